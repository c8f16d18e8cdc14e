"""The objective against a float64 reference written token by token."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.config import ObjectiveConfig
from knittrans_jax.train.advantages import group_advantages
from knittrans_jax.train.objective import objective_sums, score_tokens

ROWS, TOKENS, VOCAB = 3, 7, 6
ALLOWED = np.array([False, True, True, False, True, True])


def reference_logprob(logits: Any, token: int, temperature: float) -> float:
    allowed = [logits[v] / temperature for v in range(VOCAB) if ALLOWED[v]]
    top = max(allowed)
    return logits[token] / temperature - (top + math.log(sum(math.exp(x - top) for x in allowed)))


@pytest.mark.newest
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_objective_equals_the_reference_token_by_token(seed: int, temperature: float):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(ROWS, TOKENS, VOCAB)) * 3
    tokens = rng.choice(np.nonzero(ALLOWED)[0], (ROWS, TOKENS)).astype(np.int32)
    sampled = rng.random((ROWS, TOKENS)) < 0.5
    sampled[:, 0] = False
    behaviour = rng.normal(size=(ROWS, TOKENS)) - 2
    advantages = rng.normal(size=(ROWS, TOKENS))
    config = ObjectiveConfig(clip_low=0.2, clip_high=0.28, entropy_bonus=0.01)

    loss = entropy_total = 0.0
    clipped = 0
    for r in range(ROWS):
        for t in range(TOKENS):
            if not sampled[r, t]:
                continue
            before = logits[r, t - 1]
            logprobs = {v: reference_logprob(before, v, temperature) for v in range(VOCAB) if ALLOWED[v]}
            entropy = -sum(math.exp(lp) * lp for lp in logprobs.values())
            ratio = math.exp(logprobs[int(tokens[r, t])] - behaviour[r, t])
            free, held = ratio * advantages[r, t], min(max(ratio, 0.8), 1.28) * advantages[r, t]
            loss -= min(free, held) + 0.01 * entropy
            entropy_total += entropy
            clipped += held < free

    scores = score_tokens(jnp.asarray(logits, jnp.float32), jnp.asarray(tokens), jnp.asarray(ALLOWED), temperature)
    sums = objective_sums(
        scores,
        jnp.asarray(sampled),
        jnp.asarray(behaviour, jnp.float32),
        jnp.asarray(advantages, jnp.float32),
        jnp.zeros((ROWS, TOKENS), bool),
        config,
    )
    assert float(sums.loss) == pytest.approx(loss, rel=2e-4, abs=1e-4)
    assert float(sums.entropy) == pytest.approx(entropy_total, rel=1e-4, abs=1e-5)
    assert int(sums.clipped) == clipped
    assert int(sums.tokens) == sampled.sum()


def test_masked_ids_get_no_gradient_and_no_nan():
    tokens = jnp.ones((1, 4), jnp.int32)

    def loss(logits: jax.Array) -> jax.Array:
        scores = score_tokens(logits, tokens, jnp.asarray(ALLOWED), 1.0)
        return jnp.sum(scores.logprobs_RxT + scores.entropies_RxT)

    grad = jax.grad(loss)(jnp.zeros((1, 4, VOCAB), jnp.float32))
    assert np.isfinite(grad).all()
    np.testing.assert_array_equal(np.asarray(grad)[..., ~ALLOWED], 0)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20), st.booleans())
def test_advantages_sum_to_zero_and_keep_the_order_of_rewards(rewards: list[float], normalise: bool):
    advantages = group_advantages(rewards, normalise)
    assert advantages.dtype == np.float32
    assert abs(float(advantages.astype(np.float64).sum())) < 1e-3 * len(rewards)
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(advantages[order]) >= -1e-6).all()


def test_normalised_advantages_have_unit_deviation():
    assert group_advantages([0, 0, 1, 1], True) == pytest.approx([-1, -1, 1, 1])
    assert group_advantages([0, 0, 1, 1], False) == pytest.approx([-0.5, -0.5, 0.5, 0.5])


def test_equal_rewards_give_zero_advantages():
    np.testing.assert_array_equal(group_advantages([0.3] * 5, True), 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_reward_is_refused(bad: float):
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, bad], True)
