"""Encode every image once, use its rows many times, and go back through the encoder once, exactly.

    table, pull_back = encode_once(apply, params, images, chunk_rows=8)
    ...    # any number of micro-batches gather rows of `table` and sum their cotangents, in float32
    encoder_gradient = pull_back(cotangent_of_table)

The gradient is exact because differentiation is linear in the cotangent: the sum over all uses of an image may be taken
before the encoder's backward instead of after it. Memory: one chunk of activations, the table, and its cotangent; the
backward recomputes each chunk. `encode_and_keep` and `pull_back_kept` keep what the backward reads instead: less work, more
memory. Works for any JAX model; nothing here knows about trajectories or meshes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
        _check_cotangent(cotangent, rows * tokens, features)
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


class Residuals(NamedTuple):
    """What the encoder's backward reads besides parameters and images: mostly outputs of matrix products. A pytree."""

    arrays: tuple[jax.Array, ...]


def encode_and_keep(
    apply: Callable[[Params, Images], jax.Array], params: Params, images: Images
) -> tuple[jax.Array, Residuals]:
    """Encodes all rows at a time, and keeps the outputs of the encoder's matrix products for its backward.

    What is cheap is computed anew there: elementwise functions, norms, and products between activations (attention's, whose
    outputs grow with the square of a row's length).

    Arguments as in `encode_once`. Returns `table` [rows * tokens, E], and what `pull_back_kept` takes, which may leave a jitted
    function.
    """
    out, arrays, _, _ = _linearise(apply, params, images)
    return out.reshape(-1, out.shape[-1]), Residuals(tuple(arrays))


def pull_back_kept(
    apply: Callable[[Params, Images], jax.Array],
    params: Params,
    images: Images,
    residuals: Residuals,
    cotangent: jax.Array,
) -> Params:
    """The gradient that `encode_once`'s `pull_back` gives. `apply`, `params` and `images` are those that were encoded.

    Raises:
        ValueError: a cotangent of another shape than the table, or residuals of something else.
    """
    structure: list[Any] = []

    def trace(params: Params, images: Images) -> Any:  # the backward's form follows from shapes; nothing is computed
        out, arrays, places, vjp_structure = _linearise(apply, params, images)
        structure[:] = [places, vjp_structure]
        return out, arrays

    out, arrays = jax.eval_shape(trace, params, images)
    places, vjp_structure = structure
    _check_cotangent(cotangent, math.prod(out.shape[:-1]), out.shape[-1])
    expected, came = [a.shape for a in arrays], [a.shape for a in residuals.arrays]
    if expected != came:
        raise ValueError(f"pull_back_kept: residuals of shapes {came}; these images leave {expected}")
    given, kept = jax.tree.leaves((params, images)), iter(residuals.arrays)
    vjp = jax.tree.unflatten(vjp_structure, [next(kept) if place is None else given[place] for place in places])
    (gradient,) = vjp(cotangent.reshape(out.shape).astype(out.dtype))
    return jax.tree.map(lambda g: g.astype(jnp.float32), gradient)


def _linearise(
    apply: Callable[[Params, Images], jax.Array], params: Params, images: Images
) -> tuple[jax.Array, list[jax.Array], list[int | None], Any]:
    """-> (output, kept arrays, for each leaf of the pull-back its place among the arguments' leaves or None, its structure).

    Arguments are there anyway: as outputs of a jitted function they would be copied.
    """
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    out, vjp = jax.vjp(lambda p: jax.checkpoint(apply, policy=policy)(p, images), params)
    place_of = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves((params, images)))}
    leaves, vjp_structure = jax.tree.flatten(vjp)
    places = [place_of.get(id(leaf)) for leaf in leaves]
    kept = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
    return out, kept, places, vjp_structure


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


def _check_cotangent(cotangent: jax.Array, rows: int, features: int) -> None:
    if cotangent.shape != (rows, features):
        raise ValueError(f"pull_back: expected a cotangent of shape {(rows, features)}, got {cotangent.shape}")


def _leading(images: Images) -> int:
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(images)}
    if len(sizes) != 1:
        raise ValueError(f"encode_once: all image arrays need one leading axis of rows, got sizes {sorted(sizes)}")
    return sizes.pop()
