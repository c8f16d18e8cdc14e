"""The arrays of a chunk and of a mini-batch's images: what the loader hands to the step programs.

Symbols: C micro-batches in a chunk, R rows of a micro-batch over all shards (shard s owns rows [s R/S, (s+1) R/S)), T tokens
of a row, ER encoder rows over all shards, P patches of an encoder row, F values of a patch. `R` and `ER` are sharded
over the mesh's `data` axis. The loader fills them with numpy arrays of this process's rows, then makes global arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any
"""numpy on the host, `jax.Array` on the mesh."""


class ImageArrays(NamedTuple):
    """Packed patches of unique images, in merge-block order."""

    patches: Array
    """uint8 [ER, P, F]; float32 of the same values when `train.transfer` ships floats"""
    coords: Array
    """int32 [ER, P, 2]: row and column of the patch in its image"""
    grids: Array
    """int32 [ER, P, 2]: height and width of its image, in patches"""
    segment_ids: Array
    """int32 [ER, P]: 1.. per image in the row, 0 is padding"""


class ChunkArrays(NamedTuple):
    """Packed rows of trajectories. Where `segment_ids` is 0 there is padding and every other field is 0 (or -1, False)."""

    tokens: Array
    """int32 [C, R, T]"""
    segment_ids: Array
    """int32 [C, R, T]: 1.. per trajectory in the row"""
    positions: Array
    """int32 [C, R, 3, T]: M-RoPE"""
    sampled: Array
    """bool [C, R, T]: the policy sampled this token; only these have a loss"""
    fresh: Array
    """bool [C, R, T]: sampled, and the trajectory's every token by the version that now trains (log-probs must agree)"""
    behaviour_logprobs: Array
    """float32 [C, R, T]"""
    advantages: Array
    """float32 [C, R, T]: the trajectory's advantage on its sampled tokens, else 0"""
    table_index: Array
    """int32 [C, R, T]: for image placeholders the row of the encoder table, else -1"""


CHUNK_ROW_AXIS = 1
"""Axis of `R` in every field of `ChunkArrays`; `ImageArrays` have `ER` first."""
