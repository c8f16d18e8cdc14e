"""How a mini-batch's images are encoded: a function of the configuration and the plan, so every process decides alike.

| mode | what is encoded | exact |
|---|---|---|
| `per_mini_batch` | every image of the mini-batch once, by one shard; one encoder backward for all of its uses | yes |
| `per_micro_batch` | in every micro-batch every image that it shows, each time that it shows it | yes |
| `per_micro_batch_unique` | in every micro-batch every image that it shows, once | yes |
| `frozen` | every image once while the cache holds it; the encoder is not trained | not trained |
| `auto` | as `per_mini_batch` (residuals kept, if they fit) or as `per_micro_batch_unique`, whichever costs less | yes |

Cost model of `auto`: encoder rows of a shard, padding included, times the passes over each. A pass forward costs 1, backward 2,
and `model.remat` adds one forward to each backward that does not read kept residuals. `per_mini_batch` encodes forward to
make the table, and when its cotangent is known goes backward, before which it encodes forward again unless residuals are kept.
A micro-batch encodes its own images forward and backward, in every micro-batch, empty ones included. Not in the model: the
table's all-gather and the sum of its cotangents (for the one), the sum of the encoder's gradient in every micro-batch (for the
other), and compilation, which a run pays once for each of the two that it comes to use. On a tie there is no table.
`per_micro_batch` never costs less than `per_micro_batch_unique`.

A mini-batch without images runs no encoder program, whatever the mode.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from knittrans_jax.config import Config
from knittrans_jax.encoding.table_cache import TableCache
from knittrans_jax.models.config import ModelConfig
from knittrans_jax.trajectory import MiniBatchPlan
from knittrans_jax.transfer.pack import CopiesLayout, PackSpec, copies_layout
from knittrans_jax.transfer.plan import encode_only, table_row

ConfiguredMode = Literal["per_mini_batch", "per_micro_batch", "per_micro_batch_unique", "frozen", "auto"]
"""What `train.encoder_mode` may be."""
Mode = Literal["per_mini_batch", "per_micro_batch", "per_micro_batch_unique", "frozen"]
"""What a plan with images is encoded by."""

Residuals = Literal["recompute", "keep"]
"""What `train.encoder_residuals` may be: where the encoder's backward gets its activations from, in `per_mini_batch`."""

FORWARD, BACKWARD = 1, 2
"""Cost of a pass over an encoder row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResidualOptions:
    """What may be kept between the encoder's forward and its backward, and what that costs."""

    residuals: Residuals = "recompute"
    """In mode `per_mini_batch`."""
    most_bytes: int = 0
    """In mode `auto`, residuals of a shard are kept when they take at most this."""
    row_bytes: int = 0
    """Bytes of the kept residuals of one encoder row."""
    remat: bool = False
    """`model.remat`."""

    def keep(self, plan: MiniBatchPlan) -> bool:
        """Whether `auto` may keep a plan's residuals."""
        return plan.encoder_rows_per_shard * self.row_bytes <= self.most_bytes


FROZEN_ENCODER_VERSION = 0
"""A frozen encoder's version: it is that of the parameters with which the process began, and never changes."""


def cached_table_rows(config: Config, model: ModelConfig) -> int:
    """Rows of a frozen encoder's table: as many as `train.encoder_cache_bytes` hold in float32, on every device."""
    return config.train.encoder_cache_bytes // (4 * model.visual_features) if model.visual_features else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderWork:
    """What a plan's images come to. `mode` None: there are none, and no encoder program runs."""

    mode: Mode | None
    keep: bool = False
    """`per_mini_batch`: keep residuals instead of recomputing them."""
    copies: CopiesLayout | None = None
    """The micro-batches' own images, in the modes that have them."""
    encode: MiniBatchPlan | None = None
    """Places the images that are encoded before the first micro-batch (no trajectories, when it is not the plan itself)."""
    table_rows: dict[str, np.ndarray] | None = None
    """`frozen`: int32 [tokens], where each of the plan's images lies in the cached table, by digest."""
    insert: np.ndarray | None = None
    """`frozen`, with `encode`: int32, the cached table's row of each row that is encoded; its size means none (padding)."""
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    """`encoder_rows` and `patches_encoded` (forward, padding counted in the former only), `encoder_cache_*`, by name."""


def plan_encoding(
    plan: MiniBatchPlan,
    configured: ConfiguredMode,
    spec: PackSpec,
    cache: TableCache | None,
    options: ResidualOptions = ResidualOptions(),
) -> EncoderWork:
    """Decides how a plan's images are encoded. `cache` is there in mode `frozen`, and moves on by this plan.

    Raises:
        ValueError: a mini-batch's images do not fit the cached table.
    """
    if not plan.images:
        return EncoderWork(mode=None)
    if cache is not None:
        return _cached(plan, cache, spec)
    mode, keep, copies = choose_mode(plan, configured, options)
    if copies is not None:
        micro_batches = plan.chunks * plan.chunk_micro_batches
        figures = _figures(plan.shards * copies.rows_per_shard * micro_batches, copies.patches)
        return EncoderWork(mode=mode, copies=copies, figures=figures)
    return EncoderWork(mode=mode, keep=keep, encode=plan, figures=_table_figures(plan))


def choose_mode(
    plan: MiniBatchPlan, configured: ConfiguredMode, options: ResidualOptions
) -> tuple[Mode, bool, CopiesLayout | None]:
    """For a plan with images: its mode, whether residuals are kept, the layout of its micro-batches' own images if any."""
    if configured in ("per_mini_batch", "frozen"):
        return configured, configured == "per_mini_batch" and options.residuals == "keep", None
    if configured == "per_micro_batch":
        return configured, False, copies_layout(plan, unique=False)
    copies = copies_layout(plan, unique=True)
    keep = options.keep(plan)
    if configured == "auto" and table_cost(plan, keep, options.remat) < copies_cost(plan, copies, options.remat):
        return "per_mini_batch", keep, None
    return "per_micro_batch_unique", False, copies


def table_cost(plan: MiniBatchPlan, keep: bool, remat: bool) -> int:
    """Of `per_mini_batch`, by the module's cost model."""
    again = 0 if keep else FORWARD + remat * FORWARD
    return (FORWARD + again + BACKWARD) * plan.encoder_rows_per_shard


def copies_cost(plan: MiniBatchPlan, copies: CopiesLayout, remat: bool) -> int:
    """Of encoding in every micro-batch, by the module's cost model."""
    passes = FORWARD + remat * FORWARD + BACKWARD
    return passes * copies.rows_per_shard * plan.chunks * plan.chunk_micro_batches


def _cached(plan: MiniBatchPlan, cache: TableCache, spec: PackSpec) -> EncoderWork:
    tokens = {image.digest: image.grid_h * image.grid_w // spec.merge_size**2 for image in plan.images}
    placed = cache.place(tokens, FROZEN_ENCODER_VERSION)
    counted = {
        "encoder_cache_hits": float(len(tokens) - len(placed.missing)),
        "encoder_cache_misses": float(len(placed.missing)),
        "encoder_cache_evictions": float(placed.evicted),
    }
    if not placed.missing:
        return EncoderWork(mode="frozen", table_rows=placed.rows, figures=_figures(0, 0) | counted)
    encode = encode_only(plan, placed.missing)
    rows = encode.shards * encode.encoder_rows_per_shard * encode.encoder_row_patches // spec.merge_size**2
    insert = np.full(rows, cache.rows, np.int32)
    for image in encode.images:
        first = table_row(encode, image, spec.merge_size)
        insert[first : first + tokens[image.digest]] = placed.rows[image.digest]
    return EncoderWork(
        mode="frozen",
        encode=encode,
        table_rows=placed.rows,
        insert=insert,
        figures=_table_figures(encode) | counted,
    )


def _table_figures(plan: MiniBatchPlan) -> dict[str, float]:
    patches = sum(image.grid_h * image.grid_w for image in plan.images)
    return _figures(plan.shards * plan.encoder_rows_per_shard, patches)


def _figures(rows: int, patches: int) -> dict[str, float]:
    return {"encoder_rows": float(rows), "patches_encoded": float(patches)}
