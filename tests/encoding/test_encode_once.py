"""Encode-once against differentiating through every use, on a model that knows nothing of this project."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from knittrans_jax.encoding.encode_once import (
    Residuals,
    add_cotangent,
    chunk_size,
    encode_and_keep,
    encode_once,
    gather_rows,
    pull_back_kept,
)

ROWS, TOKENS, FEATURES, USES = 6, 3, 5, 40


def encoder(params: Any, images: Any) -> jax.Array:
    return jnp.tanh(jnp.einsum("rtf,fe->rte", images["pixels"], params["w"]) + params["b"][None, None, :])


@pytest.fixture
def problem():
    rng = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(rng.normal(size=(4, FEATURES)), jnp.float32),
        "b": jnp.asarray(rng.normal(size=FEATURES), jnp.float32),
    }
    images = {"pixels": jnp.asarray(rng.normal(size=(ROWS, TOKENS, 4)), jnp.float32)}
    index = jnp.asarray(rng.integers(-1, ROWS * TOKENS, USES), jnp.int32)
    weights = jnp.asarray(rng.normal(size=(USES, FEATURES)), jnp.float32)
    return params, images, index, weights


def use(rows: jax.Array, weights: jax.Array) -> jax.Array:
    """A loss that is not linear in the rows."""
    return jnp.sum(jnp.sin(rows) * weights)


@pytest.mark.newest
@pytest.mark.parametrize("chunk_rows", [1, 2, 4, 6, 100])
def test_gradient_equals_differentiating_through_every_use(problem: Any, chunk_rows: int):
    params, images, index, weights = problem

    def naive(p: Any) -> jax.Array:
        table = encoder(p, images).reshape(-1, FEATURES)
        return use(gather_rows(table, index), weights)

    @jax.jit
    def once(p: Any) -> Any:
        table, pull_back = encode_once(encoder, p, images, chunk_rows=chunk_rows)
        total = jnp.zeros(table.shape, jnp.float32)
        for part in range(4):  # four micro-batches, each differentiated on its own
            rows = slice(part * USES // 4, (part + 1) * USES // 4)
            cotangent = jax.grad(use)(gather_rows(table, index[rows]), weights[rows])
            total = add_cotangent(total, index[rows], cotangent)
        return pull_back(total)

    expected, got = jax.grad(naive)(params), once(params)
    for name in params:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)


def test_index_minus_one_reads_zeros_and_adds_nothing(problem: Any):
    params, images, _, _ = problem
    table = encoder(params, images).reshape(-1, FEATURES)
    index = jnp.asarray([-1, 2], jnp.int32)
    rows = gather_rows(table, index)
    np.testing.assert_array_equal(rows[0], 0)
    np.testing.assert_array_equal(rows[1], table[2])
    total = add_cotangent(jnp.zeros_like(table), index, jnp.ones((2, FEATURES), jnp.float32))
    assert float(total.sum()) == FEATURES
    assert float(total[2].sum()) == FEATURES


def test_bfloat16_cotangents_are_summed_in_float32():
    index = jnp.zeros((4096,), jnp.int32)
    cotangents = jnp.full((4096, 1), 1 / 3, jnp.bfloat16)
    total = add_cotangent(jnp.zeros((1, 1), jnp.float32), index, cotangents)
    exact = 4096 * float(jnp.bfloat16(1 / 3))
    assert abs(float(total[0, 0]) - exact) / exact < 1e-5  # in bfloat16 the sum would stall near 256 terms


@pytest.mark.parametrize(("rows", "most", "expected"), [(6, 4, 3), (8, 8, 8), (7, 3, 1), (1, 8, 1), (12, 100, 12)])
def test_chunks_are_equal_and_at_most_as_large_as_asked(rows: int, most: int, expected: int):
    assert chunk_size(rows, most) == expected


def test_wrong_cotangent_shape_is_refused(problem: Any):
    params, images, _, _ = problem
    _, pull_back = encode_once(encoder, params, images, chunk_rows=2)
    with pytest.raises(ValueError, match=r"expected a cotangent of shape \(18, 5\)"):
        pull_back(jnp.zeros((3, 5)))


def test_kept_residuals_give_the_recomputed_gradient(problem: Any):
    params, images, _, _ = problem
    table, pull_back = encode_once(encoder, params, images, chunk_rows=2)
    kept_table, residuals = jax.jit(lambda p, i: encode_and_keep(encoder, p, i))(params, images)
    np.testing.assert_allclose(kept_table, table, rtol=1e-5, atol=1e-6)  # chunked or whole: sums differ by an ulp
    assert not any(
        kept.shape == given.shape for kept in residuals.arrays for given in (*params.values(), *images.values())
    )
    cotangent = jnp.cos(table)
    pull = jax.jit(lambda *given: pull_back_kept(encoder, *given))
    got, expected = pull(params, images, residuals, cotangent), pull_back(cotangent)
    for name in params:
        np.testing.assert_allclose(got[name], expected[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="residuals of shapes"):
        pull_back_kept(encoder, params, images, Residuals(()), cotangent)
