"""From a plan and pulled payloads to the arrays of a chunk: pure, numpy only.

What it guarantees: the arrays depend on the plan, the payloads and which rows are asked for, so every process computes its
own rows and together they are the mini-batch; a payload that is not what the plan says (length, grid, placeholders) is an
error that names group and trajectory, before anything reaches a device.

`rows` and `encoder_rows` are global row numbers on the axes R and ER of `knittrans_jax.transfer.batch`; a cell is one row of
one micro-batch of a chunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from knittrans_jax.encoding.patches import grid_of, patch_coords, patchify
from knittrans_jax.models.positions import mrope_positions
from knittrans_jax.trajectory import ImagePlacement, MiniBatchPlan, Placement, PlannedGroup, Trajectory
from knittrans_jax.transfer.batch import ChunkArrays, ImageArrays
from knittrans_jax.transfer.plan import (
    PackItem,
    PlanError,
    best_fit,
    bucket_rows,
    chunk_of,
    chunk_row,
    encoder_row,
    table_row,
)

Advantages = Callable[[Sequence[float]], np.ndarray]
"""Rewards of a group's trajectories -> float32 advantages."""


Cell = tuple[int, int]
"""(micro-batch of a chunk, global row)."""
Pixels = Literal["uint8", "float32"]
"""Type of pixel values, 0 to 255 in either: as they are stored, or as the baselines ship them."""


class PackError(ValueError):
    """A payload that is not what its plan says."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackSpec:
    """What packing must know of the model. `channels` of an image; the others as in its configuration."""

    patch_size: int
    merge_size: int
    channels: int
    image_token_id: int

    @property
    def patch_values(self) -> int:
        """`F`: uint8 values of a patch."""
        return self.patch_size**2 * self.channels


@dataclasses.dataclass(frozen=True)
class CopiesLayout:
    """Where every shown image lies when each micro-batch encodes its own (modes `per_micro_batch` and `.._unique`).

    `places[(p, i)]`: (row, offset) in its shard's encoder rows of its micro-batch, for the i-th image of placement `p`. Those
    that show one image in one micro-batch on one shard have one place when the layout is unique.
    """

    rows_per_shard: int
    places: dict[tuple[int, int], tuple[int, int]]
    patches: int
    """Patches of all images that are encoded, over all micro-batches and shards; padding not counted."""


def copies_layout(plan: MiniBatchPlan, *, unique: bool) -> CopiesLayout:
    """Packs the shown images into encoder rows of the micro-batch that shows them; one shape for the plan.

    `unique`: each image once in a micro-batch, else every copy.
    """
    shown: dict[tuple[int, int], dict[tuple[int, int], list[tuple[int, int]]]] = {}
    for number, placement in enumerate(plan.placements):
        uses = shown.setdefault((placement.shard, placement.row // plan.rows_per_micro_batch), {})
        for index, image in enumerate(placement.images):
            uses.setdefault((image, 0) if unique else (number, index), []).append((number, index))
    places: dict[tuple[int, int], tuple[int, int]] = {}
    most = patches = 0
    for uses in shown.values():
        items = []
        for key, (first, *_) in uses.items():
            image = plan.images[plan.placements[first[0]].images[first[1]]]
            items.append(PackItem(-image.grid_h * image.grid_w, key))
        rows = best_fit(items, plan.encoder_row_patches)
        most = max(most, len(rows))
        for row, packed in enumerate(rows):
            offset = 0
            for item in packed:
                for use in uses[int(item.key[0]), int(item.key[-1])]:
                    places[use] = (row, offset)
                offset += item.size
            patches += offset
    return CopiesLayout(bucket_rows(most), places, patches)


def chunk_shape(plan: MiniBatchPlan) -> tuple[int, int, int]:
    """Global [C, R, T] of a chunk."""
    return plan.chunk_micro_batches, plan.shards * plan.rows_per_micro_batch, plan.row_tokens


def image_shape(plan: MiniBatchPlan, spec: PackSpec) -> tuple[int, int, int]:
    """Global [ER, P, F] of the encoder's input."""
    return plan.shards * plan.encoder_rows_per_shard, plan.encoder_row_patches, spec.patch_values


def copies_shape(plan: MiniBatchPlan, layout: CopiesLayout, spec: PackSpec) -> tuple[int, int, int, int]:
    """Global [C, ER, P, F] of a chunk's own copies."""
    rows = plan.shards * layout.rows_per_shard
    return plan.chunk_micro_batches, rows, plan.encoder_row_patches, spec.patch_values


def product_cells(micro_batches: int, rows: Sequence[int]) -> list[Cell]:
    """All cells of these rows, micro-batch by micro-batch."""
    return [(c, r) for c in range(micro_batches) for r in rows]


def cell_needs(plan: MiniBatchPlan, chunk: int, cells: Iterable[Cell | None]) -> list[int]:
    """Indices of the placements of a chunk that lie in these cells."""
    mine = set(cells)
    return [
        index
        for index, placement in enumerate(plan.placements)
        if chunk_of(plan, placement) == chunk and chunk_row(plan, placement) in mine
    ]


def chunk_needs(plan: MiniBatchPlan, chunk: int, rows: Sequence[int]) -> list[int]:
    """Indices of the placements of a chunk that lie in these rows."""
    return cell_needs(plan, chunk, product_cells(plan.chunk_micro_batches, rows))


def copies_needs(plan: MiniBatchPlan, chunk: int, cells: Iterable[Cell | None], copies: CopiesLayout) -> list[int]:
    """Indices of the images whose copies lie in these cells (micro-batch, encoder row) of a chunk, each once."""
    mine = set(cells)
    return sorted({image for cell, _, image in _copies(plan, chunk, copies) if cell in mine})


def image_needs(plan: MiniBatchPlan, encoder_rows: Iterable[int | None]) -> list[int]:
    """Indices of the images that lie in these encoder rows."""
    mine = set(encoder_rows)
    return [index for index, image in enumerate(plan.images) if encoder_row(plan, image) in mine]


def pack_chunk(
    plan: MiniBatchPlan,
    chunk: int,
    rows: Sequence[int],
    trajectories: Mapping[int, Trajectory],
    advantages: Advantages,
    spec: PackSpec,
    copies: CopiesLayout | None = None,
    table_rows: Mapping[str, np.ndarray] | None = None,
) -> ChunkArrays:
    """The chunk's arrays for these rows, R = len(rows); `pack_cells` has the other arguments."""
    c = plan.chunk_micro_batches
    cells = product_cells(c, rows)
    packed = pack_cells(plan, chunk, cells, trajectories, advantages, spec, copies, table_rows)
    return ChunkArrays(*(array.reshape(c, len(rows), *array.shape[1:]) for array in packed))


def pack_cells(
    plan: MiniBatchPlan,
    chunk: int,
    cells: Sequence[Cell | None],
    trajectories: Mapping[int, Trajectory],
    advantages: Advantages,
    spec: PackSpec,
    copies: CopiesLayout | None = None,
    table_rows: Mapping[str, np.ndarray] | None = None,
) -> ChunkArrays:
    """The chunk's arrays for these cells: `ChunkArrays` with one leading axis, len(cells), in place of C and R.

    Args:
        plan: the mini-batch.
        chunk: which of its chunks.
        cells: (micro-batch, global row); None is padding.
        trajectories: by placement index, at least those of `cell_needs`.
        advantages: rewards of a group -> advantages.
        spec: the model's image geometry.
        copies: given, `table_index` points into the micro-batch's own copies on its shard, not into the global table.
        table_rows: given, the table's rows of every image's tokens, by digest, in place of the plan's (mode `frozen`).

    Raises:
        PackError: a trajectory is not what the plan says.
    """
    place_of = {cell: at for at, cell in enumerate(cells) if cell is not None}
    t = plan.row_tokens
    shape = (len(cells), t)
    arrays = ChunkArrays(
        tokens=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        positions=np.zeros((len(cells), 3, t), np.int32),
        sampled=np.zeros(shape, np.bool_),
        fresh=np.zeros(shape, np.bool_),
        behaviour_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
        table_index=np.full(shape, -1, np.int32),
    )
    advantages_of: dict[int, list[np.ndarray]] = {}
    segments: dict[int, int] = {}
    for index in sorted(cell_needs(plan, chunk, cells), key=lambda i: plan.placements[i].offset):
        placement = plan.placements[index]
        trajectory = trajectories[index]
        where = f"group {plan.groups[placement.group].group_id}, trajectory {placement.trajectory}"
        if len(trajectory.tokens_T) != placement.length:
            raise PackError(f"{where}: {len(trajectory.tokens_T)} tokens came, the plan says {placement.length}")
        place = place_of[chunk_row(plan, placement)]
        at = (place, slice(placement.offset, placement.offset + placement.length))
        segments[place] = segments.get(place, 0) + 1
        if placement.group not in advantages_of:
            advantages_of[placement.group] = _answer_advantages(plan.groups[placement.group], advantages)
        sampled = trajectory.sampled_T
        arrays.tokens[at] = trajectory.tokens_T
        arrays.segment_ids[at] = segments[place]
        arrays.sampled[at] = sampled
        arrays.fresh[at] = sampled & bool((trajectory.versions_T[sampled] == plan.update).all())
        arrays.behaviour_logprobs[at] = trajectory.behaviour_logprobs_T
        arrays.advantages[at] = _by_token(sampled, advantages_of[placement.group][placement.trajectory], where)
        arrays.positions[place, :, at[1]] = _positions(plan, placement, trajectory, spec, where)
        if placement.images:
            table = _table_rows(plan, index, placement, spec, copies, table_rows)
            arrays.table_index[at][trajectory.tokens_T == spec.image_token_id] = table
    return arrays


def pack_images(
    plan: MiniBatchPlan,
    encoder_rows: Sequence[int | None],
    media: Mapping[str, np.ndarray],
    spec: PackSpec,
    pixels: Pixels = "uint8",
) -> ImageArrays:
    """The encoder's input for these rows, ER = len(encoder_rows).

    Args:
        plan: the mini-batch.
        encoder_rows: global encoder rows; None is padding.
        media: [H, W, C] by digest, at least those of `image_needs`.
        spec: the model's image geometry.
        pixels: their type, and that of the packed patches.

    Raises:
        PackError: an image is not what the plan says.
    """
    row_at = {row: at for at, row in enumerate(encoder_rows) if row is not None}
    arrays = _empty_images((len(encoder_rows),), plan, spec, pixels)
    entries = (
        (row_at[encoder_row(plan, image)], image.offset, image)
        for image in (plan.images[index] for index in image_needs(plan, encoder_rows))
    )
    _fill_images(arrays, entries, media, spec)
    return arrays


def pack_copies(
    plan: MiniBatchPlan,
    chunk: int,
    cells: Sequence[Cell | None],
    media: Mapping[str, np.ndarray],
    spec: PackSpec,
    copies: CopiesLayout,
    pixels: Pixels = "uint8",
) -> ImageArrays:
    """Images that the chunk's micro-batches show, as `copies` has them: `ImageArrays`, ER = len(cells).

    `cells`: (micro-batch, global encoder row), None is padding. `media`: at least those of `copies_needs`.
    """
    place_of = {cell: at for at, cell in enumerate(cells) if cell is not None}
    arrays = _empty_images((len(cells),), plan, spec, pixels)
    entries = {
        (place_of[cell], offset): plan.images[image]
        for cell, offset, image in _copies(plan, chunk, copies)
        if cell in place_of
    }
    _fill_images(arrays, ((place, offset, image) for (place, offset), image in entries.items()), media, spec)
    return arrays


def _copies(plan: MiniBatchPlan, chunk: int, copies: CopiesLayout) -> Iterator[tuple[Cell, int, int]]:
    """(cell, offset, image) of everything that the chunk's micro-batches show."""
    for index, placement in enumerate(plan.placements):
        if chunk_of(plan, placement) == chunk:
            micro_batch, _ = chunk_row(plan, placement)
            for number, image in enumerate(placement.images):
                row, offset = copies.places[index, number]
                yield (micro_batch, placement.shard * copies.rows_per_shard + row), offset, image


def _answer_advantages(group: PlannedGroup, advantages: Advantages) -> list[np.ndarray]:
    """Of each trajectory: [1] for all its answers, or one per answer, relative to the members that gave that answer too."""
    if not group.turn_rewards:
        return [np.array([advantage], np.float32) for advantage in advantages(group.rewards)]
    by_answer: list[list[np.float32]] = [[] for _ in group.turn_rewards]
    for turn in range(max(map(len, group.turn_rewards))):
        members = [member for member, rewards in enumerate(group.turn_rewards) if turn < len(rewards)]
        relative = advantages([group.turn_rewards[member][turn] for member in members])
        for member, advantage in zip(members, relative, strict=True):
            by_answer[member].append(advantage)
    return [np.array(row, np.float32) for row in by_answer]


def _by_token(sampled_T: np.ndarray, advantages_A: np.ndarray, where: str) -> np.ndarray:
    """The advantage of each sampled token: A is 1, or the number of answers (runs of sampled tokens); 0 elsewhere."""
    if len(advantages_A) == 1:
        return np.where(sampled_T, advantages_A[0], np.float32(0))
    answer_T = np.cumsum(np.diff(sampled_T, prepend=False) & sampled_T) - 1
    if answer_T[-1] + 1 != len(advantages_A):
        raise PackError(f"{where}: {answer_T[-1] + 1} answers came, the plan has rewards for {len(advantages_A)}")
    return np.where(sampled_T, advantages_A[np.maximum(answer_T, 0)], np.float32(0))


def _positions(
    plan: MiniBatchPlan, placement: Placement, trajectory: Trajectory, spec: PackSpec, where: str
) -> np.ndarray:
    grids = [(plan.images[i].grid_h, plan.images[i].grid_w) for i in placement.images]
    try:
        return mrope_positions(trajectory.tokens_T, grids, spec.image_token_id, spec.merge_size)[0]
    except ValueError as error:
        raise PackError(f"{where}: {error}") from error


def _table_rows(
    plan: MiniBatchPlan,
    index: int,
    placement: Placement,
    spec: PackSpec,
    copies: CopiesLayout | None,
    table_rows: Mapping[str, np.ndarray] | None,
) -> np.ndarray:
    """Table rows of all image placeholders of a trajectory, in order."""
    if table_rows is not None:
        return np.concatenate([table_rows[plan.images[image].digest] for image in placement.images])
    parts = []
    for number, image in enumerate(plan.images[i] for i in placement.images):
        if copies is None:
            first = table_row(plan, image, spec.merge_size)
        else:
            row, offset = copies.places[index, number]
            first = (row * plan.encoder_row_patches + offset) // spec.merge_size**2
        parts.append(np.arange(first, first + image.grid_h * image.grid_w // spec.merge_size**2, dtype=np.int32))
    return np.concatenate(parts)


def _empty_images(leading: tuple[int, ...], plan: MiniBatchPlan, spec: PackSpec, pixels: Pixels) -> ImageArrays:
    if plan.encoder_row_patches % spec.merge_size**2:
        raise PlanError(
            f"train.encoder_row_patches: {plan.encoder_row_patches} is no multiple of merge_size^2 ({spec.merge_size**2})"
        )
    shape = (*leading, plan.encoder_row_patches)
    return ImageArrays(
        patches=np.zeros((*shape, spec.patch_values), pixels),
        coords=np.zeros((*shape, 2), np.int32),
        grids=np.zeros((*shape, 2), np.int32),
        segment_ids=np.zeros(shape, np.int32),
    )


def _fill_images(
    arrays: ImageArrays,
    entries: Iterable[tuple[int, int, ImagePlacement]],
    media: Mapping[str, np.ndarray],
    spec: PackSpec,
) -> None:
    """Puts images at (row, offset); segments are numbered by offset within a row."""
    segments: dict[int, int] = {}
    for row, offset, image in sorted(entries, key=lambda entry: entry[:2]):
        pixels = media[image.digest]
        grid = (image.grid_h, image.grid_w)
        try:
            came = grid_of(pixels.shape, spec.patch_size, spec.merge_size)
        except ValueError as error:
            raise PackError(f"image {image.digest}: {error}") from error
        if came != grid or pixels.shape[2] != spec.channels:
            raise PackError(
                f"image {image.digest}: {came[0]}x{came[1]} patches and {pixels.shape[2]} channels came, the plan says "
                f"{grid[0]}x{grid[1]} and the model {spec.channels}"
            )
        at = slice(offset, offset + math.prod(grid))
        segments[row] = segments.get(row, 0) + 1
        arrays.patches[row, at] = patchify(pixels, spec.patch_size, spec.merge_size)
        arrays.coords[row, at] = patch_coords(*grid, spec.merge_size)
        arrays.grids[row, at] = grid
        arrays.segment_ids[row, at] = segments[row]
