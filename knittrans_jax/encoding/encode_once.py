"""Encode every image once, use its rows many times, and go back through the encoder once, exactly.

    table, pull_back = encode_once(apply, params, images, chunk_rows=8)
    ...    # any number of micro-batches gather rows of `table` and sum their cotangents, in float32
    encoder_gradient = pull_back(cotangent_of_table)

The gradient is exact because differentiation is linear in the cotangent: the sum over all uses of an image may be taken
before the encoder's backward instead of after it. Memory: one chunk of activations, the table, and its cotangent; the
backward recomputes each chunk. Works for any JAX model; nothing here knows about trajectories or meshes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Params = Any
Images = Any


def encode_once(
    apply: Callable[[Params, Images], jax.Array], params: Params, images: Images, *, chunk_rows: int
) -> tuple[jax.Array, Callable[[jax.Array], Params]]:
    """Encodes a batch of image rows in chunks, keeping only the table.

    Args:
        apply: `(params, images) -> [rows, tokens, E]`, independent between rows. Differentiable in `params`.
        params: the encoder's parameters.
        images: pytree of arrays with leading axis `rows`.
        chunk_rows: rows encoded at a time; `rows` is divided into equal chunks of at most this many.

    Returns:
        `table` [rows * tokens, E], and `pull_back(cotangent)`: cotangent [rows * tokens, E] float32 -> gradient of
        `sum(table * cotangent)` with respect to `params`, in float32.
    """
    rows = _leading(images)
    size = chunk_size(rows, chunk_rows)
    chunks = jax.tree.map(lambda x: x.reshape(rows // size, size, *x.shape[1:]), images)
    table = jax.lax.map(lambda chunk: apply(params, chunk), chunks)
    tokens, features = table.shape[-2:]

    def pull_back(cotangent: jax.Array) -> Params:
        if cotangent.shape != (rows * tokens, features):
            raise ValueError(
                f"pull_back: expected a cotangent of shape {(rows * tokens, features)}, got {cotangent.shape}"
            )
        cotangents = cotangent.reshape(rows // size, size, tokens, features)

        def one_chunk(total: Params, chunk: tuple[Images, jax.Array]) -> tuple[Params, None]:
            image_rows, rows_cotangent = chunk
            out, vjp = jax.vjp(lambda p: apply(p, image_rows), params)
            (gradient,) = vjp(rows_cotangent.astype(out.dtype))
            return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, gradient), None

        # Derived from the arguments rather than made from nothing, so that inside shard_map the carry varies as they do.
        vary = cotangent[0, 0].astype(jnp.float32) * 0.0 if cotangent.size else jnp.float32(0.0)
        zeros = jax.tree.map(lambda p: p.astype(jnp.float32) * 0.0 + vary, params)
        return jax.lax.scan(one_chunk, zeros, (chunks, cotangents))[0]

    return table.reshape(rows * tokens, features), pull_back


def chunk_size(rows: int, chunk_rows: int) -> int:
    """The largest divisor of `rows` that is at most `chunk_rows`."""
    return max(size for size in range(1, min(rows, chunk_rows) + 1) if rows % size == 0)


def gather_rows(table_NxE: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of the table by index; index -1 (no image) gives zeros. Shapes: index [...] -> [..., E]."""
    rows = jnp.take(table_NxE, jnp.maximum(index, 0), axis=0)
    return jnp.where((index >= 0)[..., None], rows, jnp.zeros((), table_NxE.dtype))


def add_cotangent(total_NxE: jax.Array, index: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Adds the cotangents of gathered rows to the running float32 total of the table; index -1 adds nothing."""
    rows = total_NxE.shape[0]
    flat = jnp.where(index >= 0, index, rows).reshape(-1)  # out of range: dropped
    return total_NxE.at[flat].add(cotangent.astype(jnp.float32).reshape(flat.shape[0], -1), mode="drop")


def _leading(images: Images) -> int:
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(images)}
    if len(sizes) != 1:
        raise ValueError(f"encode_once: all image arrays need one leading axis of rows, got sizes {sorted(sizes)}")
    return sizes.pop()
