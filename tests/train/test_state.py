"""The optimizer against optax's AdamW leaf by leaf, in both of its forms: one vector for small models, trees for others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from knittrans_jax.config import OptimizerConfig
from knittrans_jax.train import ravel
from knittrans_jax.train.state import make_optimizer

CONFIG = OptimizerConfig(learning_rate=1e-2, warmup_updates=3, weight_decay=0.1, clip_norm=1.0)
UPDATES = 12


def some_params(seed: int, scale: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(scale * rng.normal(size=shape), jnp.float32)
        for name, shape in {"kernel": (4, 3), "bias": (3,), "table": (2, 3, 2), "scale": (5,)}.items()
    }


@pytest.fixture(params=["one vector", "trees"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "trees":
        monkeypatch.setattr(ravel, "SMALL_VALUES", 10)
    return request.param


def reference() -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(
        CONFIG.learning_rate / 3, CONFIG.learning_rate, 3, UPDATES, CONFIG.learning_rate * CONFIG.final_fraction
    )
    mask = {"kernel": True, "bias": False, "table": True, "scale": False}
    return optax.chain(
        optax.clip_by_global_norm(CONFIG.clip_norm),
        optax.adamw(schedule, b1=CONFIG.b1, b2=CONFIG.b2, weight_decay=CONFIG.weight_decay, mask=mask),
    )


@pytest.mark.newest
@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an int
def test_it_is_adamw_with_clipping_and_decay_of_matrices_only(form: str) -> None:
    optimizer, expected = make_optimizer(CONFIG, UPDATES), reference()
    params: Any = some_params(0)
    theirs: Any = params
    state: Any = optimizer.init(params)
    their_state = expected.init(params)
    assert len(jax.tree.leaves(state.mu)) == (1 if form == "one vector" else len(params))
    step, their_step = jax.jit(optimizer.update), jax.jit(expected.update)
    for update in range(UPDATES):
        gradient = some_params(1 + update, scale=0.05 if update % 2 else 3.0)  # with and without clipping
        updates, state = step(gradient, state, params)
        their_updates, their_state = their_step(gradient, their_state, theirs)
        params, theirs = optax.apply_updates(params, updates), optax.apply_updates(theirs, their_updates)
        for name in theirs:
            np.testing.assert_allclose(params[name], theirs[name], rtol=2e-6, atol=1e-7, err_msg=f"{name} {update}")


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(form: str, bad: float) -> None:
    del form
    optimizer = make_optimizer(CONFIG, UPDATES)
    params = some_params(0)
    step = jax.jit(optimizer.update)
    _, before = step(some_params(1), optimizer.init(params), params)
    gradient = some_params(2)
    gradient["bias"] = gradient["bias"].at[1].set(bad)
    updates, after = step(gradient, before, params)
    for leaf in jax.tree.leaves(updates):
        np.testing.assert_array_equal(leaf, 0)
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(one, other)


@jax.numpy_dtype_promotion("standard")
def test_a_loss_that_is_not_finite_changes_nothing_either(form: str) -> None:
    del form
    optimizer = make_optimizer(CONFIG, UPDATES)
    params, gradient = some_params(0), some_params(2)
    step = jax.jit(optimizer.update)
    before: Any = optimizer.init(params)
    updates, after = step(gradient, before, params, loss=jnp.float32(np.nan))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    for one, other in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(one, other)
    updates, after = step(gradient, before, params, loss=jnp.float32(0.5))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert int(after.count) == int(before.count) + 1


def test_a_tree_and_its_vector_hold_the_same_values() -> None:
    tree = some_params(4) | {"scalar": jnp.float32(2.0), "empty": jnp.zeros((0, 3), jnp.float32)}
    again = ravel.unravel(ravel.ravel(tree), tree)
    for name, leaf in tree.items():
        np.testing.assert_array_equal(leaf, again[name])
    assert ravel.small(tree)
    assert not ravel.small(tree | {"ids": jnp.zeros((3,), jnp.int32)})
    assert not ravel.small({})
