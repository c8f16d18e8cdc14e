"""A small tree as one vector: hundreds of small arrays cost one operation each to compile, to launch and to communicate.

What it guarantees: `unravel(ravel(tree), tree)` is the tree, leaf by leaf and bit by bit; whether a tree is `small` depends on
its shapes and types alone, so every process, and every restart, decides alike. Large trees stay as they are: their leaves are
worth an operation each, and keep shardings of their own.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SMALL_VALUES = 2**24
"""Trees of at most this many values, 64 MiB of float32, are handled as one vector."""


def small(tree: Any) -> bool:
    """The tree has leaves, all of one type, and at most `SMALL_VALUES` values."""
    leaves = jax.tree.leaves(tree)
    return len({leaf.dtype for leaf in leaves}) == 1 and sum(leaf.size for leaf in leaves) <= SMALL_VALUES


def ravel(tree: Any) -> jax.Array:
    """All leaves, one after the other -> [values]."""
    return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])


def unravel(vector: jax.Array, like: Any) -> Any:
    """The tree of the structure and shapes of `like` whose `ravel` is `vector`."""
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])
    parts = jnp.split(vector, ends[:-1])
    return jax.tree.unflatten(structure, [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)])
