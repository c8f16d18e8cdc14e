"""The decoder's key/value cache: `S` slots of capacity `C` tokens, written in place where the buffer is donated.

A slot holds one trajectory so far. `lengths` counts its tokens; entries beyond it are never read. Appending more than
the capacity drops the excess keys, so the caller keeps `lengths + new <= C`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from knittrans_jax.models.config import TextConfig


class KVCache(NamedTuple):
    """Keys and values of every layer; a plain pytree."""

    k: jax.Array
    """[layers, S, C, kv_heads, head_dim], after QK-norm and rotary embedding."""
    v: jax.Array
    """[layers, S, C, kv_heads, head_dim]"""
    lengths: jax.Array
    """[S] int32: tokens held by each slot."""


def init_cache(config: TextConfig, slots: int, capacity: int, dtype: DTypeLike = jnp.float32) -> KVCache:
    """An empty cache for `slots` trajectories of at most `capacity` tokens."""
    shape = (config.layers, slots, capacity, config.kv_heads, config.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((slots,), jnp.int32))


def copy_slots(cache: KVCache, from_indices_N: jax.Array, to_indices_N: jax.Array) -> KVCache:
    """Copy whole slots (keys, values, length): a prompt prefilled once serves the n members of its group.

    int32 indices. A destination of S or more is dropped, so that calls can be padded to one shape; sources are clipped.
    All sources are read before anything is written. Repeated destinations have no defined winner.
    """

    def move(x: jax.Array, axis: int) -> jax.Array:
        rows = jnp.take(x, from_indices_N, axis=axis, mode="clip")
        at = (slice(None),) * axis + (to_indices_N,)
        return x.at[at].set(rows, mode="drop")

    return KVCache(move(cache.k, 1), move(cache.v, 1), move(cache.lengths, 0))


def reset_slots(cache: KVCache, reset_S: jax.Array) -> KVCache:
    """Empty the slots where `reset_S` (bool) is true; only their lengths change."""
    return cache._replace(lengths=jnp.where(reset_S, 0, cache.lengths))


def append(
    stack_NxSxCxGxK: jax.Array,
    layer: jax.Array | np.int32,
    new_SxLxGxK: jax.Array,
    offsets_SxL: jax.Array,
    valid_SxL: jax.Array,
) -> jax.Array:
    """Write each slot's valid new entries at their own offsets of one layer; the others, and those beyond C, are dropped."""
    slots, capacity = stack_NxSxCxGxK.shape[1:3]
    at_SxL = jnp.where(valid_SxL, offsets_SxL, capacity)
    slot_Sx1 = jnp.arange(slots, dtype=jnp.int32)[:, None]
    return stack_NxSxCxGxK.at[layer, slot_Sx1, at_SxL].set(new_SxLxGxK.astype(stack_NxSxCxGxK.dtype), mode="drop")
