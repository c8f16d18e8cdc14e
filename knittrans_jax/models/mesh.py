"""The axes of a training mesh, and whether a model divides over one. Needs no JAX, so that a run is refused before it starts.

* `data`: rows of a batch; parameters are replicated over it;
* `fsdp`: rows of a batch too; parameters are split over it and made whole, layer by layer, where they are used;
* `tensor`: heads and MLP features of the decoder;
* `sequence`: tokens of a row.

The vocabulary is split over `fsdp` and `tensor` together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from knittrans_jax.models.config import ModelConfig

AXES = ("data", "fsdp", "tensor", "sequence")
ROWS = ("data", "fsdp")
"""Mesh axes over which the rows of a batch are split."""


class MeshError(ValueError):
    """A model does not divide over a mesh: the message names the axis, its size, and what it would have to divide."""


def check_model_divides(config: ModelConfig, sizes: Mapping[str, int]) -> None:
    """That every parameter divides over the mesh as `sharding.shard_rules` splits it, and that no attention head is cut.

    Raises:
        MeshError: otherwise.
    """
    for axes, name, size in _divided(config):
        parts = math.prod(sizes.get(axis, 1) for axis in axes)
        if size % parts:
            raise MeshError(f"{' x '.join(axes)} = {parts} does not divide the model's {name} = {size}")


def _divided(config: ModelConfig) -> Iterator[tuple[tuple[str, ...], str, int]]:
    """(mesh axes, what they split, size)."""
    text, vision = config.text, config.vision
    fsdp, tensor = ("fsdp",), ("tensor",)
    yield fsdp + tensor, "vocabulary rows (model.vocabulary_rows can add some)", text.vocab_size
    yield tensor, "heads", text.heads
    yield tensor, "kv_heads", text.kv_heads
    yield tensor, "mlp_dim", text.mlp_dim
    yield fsdp, "d_model", text.d_model
    if vision is not None:
        yield fsdp, "vision.d_model", vision.d_model
        yield fsdp, "vision.mlp_dim", vision.mlp_dim
        yield fsdp, "vision.patch_features", vision.patch_features
