"""The policy objective: clipped ratio to the behaviour log-probs, token mean, entropy bonus.

Every quantity here is a *sum* over the tokens of a micro-batch. The caller divides by a denominator that is fixed for the
whole mini-batch, so the gradient does not depend on how the mini-batch was cut into micro-batches, rows or shards.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from knittrans_jax.config import ObjectiveConfig


class TokenScores(NamedTuple):
    """Of each token given those before it in its row, float32 [R, T]; index 0 of a row has no predecessor and is 0."""

    logprobs_RxT: jax.Array
    entropies_RxT: jax.Array


class ObjectiveSums(NamedTuple):
    """Sums over the sampled tokens of a micro-batch, float32 scalars. `mismatch_*` cover the tokens marked `fresh`."""

    loss: jax.Array
    entropy: jax.Array
    clipped: jax.Array
    ratio_deviation: jax.Array
    fresh: jax.Array
    mismatch_abs: jax.Array
    tokens: jax.Array


def score_tokens(
    logits_RxTxV: jax.Array,
    tokens_RxT: jax.Array,
    sampled_ids_mask_V: jax.Array,
    temperature: float,
    split_over: str | None = None,
) -> TokenScores:
    """Log-prob and entropy of the sampler's distribution at every token.

    The distribution is the sampler's own: logits over `temperature`, ids outside the mask excluded. Tokens that could not
    have been sampled get log-prob 0; mask them.

    Args:
        logits_RxTxV: float32; position t predicts token t + 1.
        tokens_RxT: int32.
        sampled_ids_mask_V: bool; the ids that may be sampled.
        temperature: of the sampler, > 0.
        split_over: the manual mesh axis over which the vocabulary is split, if it is. Logits are then those of the rows of
            all its devices [R', T, V'] for the device's own part of the ids, as `Decoder.logits` gives them; sums over the
            vocabulary go to the device whose rows they are. All else, what is returned too, is of the device's own rows.
    """
    targets_RxT = tokens_RxT[:, 1:]
    every_target, own_ids_V, first_id = targets_RxT, sampled_ids_mask_V, jnp.int32(0)
    if split_over is not None:
        size = logits_RxTxV.shape[-1]
        first_id = lax.axis_index(split_over) * size
        own_ids_V = lax.dynamic_slice(sampled_ids_mask_V, (first_id,), (size,))
        every_target = lax.all_gather(targets_RxT, split_over, axis=0, tiled=True)

    def own_sum(x: jax.Array) -> jax.Array:
        """Sums over the vocabulary, whose last axis is gone already -> [R, T - 1]."""
        return x if split_over is None else lax.psum_scatter(x, split_over, scatter_dimension=0, tiled=True)

    allowed = own_ids_V[None, None, :]
    logits = jnp.where(allowed, logits_RxTxV[:, :-1] / temperature, -jnp.inf)
    highest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    if split_over is not None:
        highest = lax.pmax(highest, split_over)
    logits = logits - highest
    finite = jnp.where(allowed, logits, 0.0)  # -inf * 0 would be nan, here and backwards
    weights = jnp.exp(logits)
    target = every_target - first_id
    held = (target >= 0) & (target < logits.shape[-1])
    chosen = jnp.take_along_axis(finite, jnp.where(held, target, 0)[..., None], axis=-1)[..., 0]

    total = own_sum(jnp.sum(weights, axis=-1))
    log_total = jnp.log(total)
    logprobs = own_sum(jnp.where(held, chosen, 0.0)) - log_total
    logprobs = jnp.where(sampled_ids_mask_V[targets_RxT], logprobs, 0.0)
    entropies = log_total - own_sum(jnp.sum(weights * finite, axis=-1)) / total
    return TokenScores(jnp.pad(logprobs, ((0, 0), (1, 0))), jnp.pad(entropies, ((0, 0), (1, 0))))


def objective_sums(
    scores: TokenScores,
    sampled_RxT: jax.Array,
    behaviour_logprobs_RxT: jax.Array,
    advantages_RxT: jax.Array,
    fresh_RxT: jax.Array,
    config: ObjectiveConfig,
) -> ObjectiveSums:
    """PPO's clipped surrogate (Schulman et al. 2017) with an asymmetric clip (DAPO, Yu et al. 2025), as a sum.

    `loss = -sum(min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + entropy_bonus * H)` over sampled tokens, with
    `r = exp(logprob - behaviour_logprob)`. `fresh` tokens were sampled, with all their context, by the version that now
    scores them: there the two log-probs should agree to rounding, and their difference is reported.
    """
    mask = sampled_RxT.astype(jnp.float32)
    log_ratio = jnp.where(sampled_RxT, scores.logprobs_RxT - behaviour_logprobs_RxT, 0.0)
    ratio = jnp.exp(log_ratio)
    clipped_ratio = jnp.clip(ratio, 1.0 - config.clip_low, 1.0 + config.clip_high)
    surrogate = jnp.minimum(ratio * advantages_RxT, clipped_ratio * advantages_RxT)
    loss = -jnp.sum(mask * (surrogate + config.entropy_bonus * scores.entropies_RxT))
    fresh = (fresh_RxT & sampled_RxT).astype(jnp.float32)
    return ObjectiveSums(
        loss=loss,
        entropy=jnp.sum(mask * scores.entropies_RxT),
        clipped=jnp.sum(mask * (clipped_ratio * advantages_RxT < ratio * advantages_RxT).astype(jnp.float32)),
        ratio_deviation=jnp.sum(mask * jnp.abs(ratio - 1.0)),
        fresh=jnp.sum(fresh),
        mismatch_abs=jnp.sum(fresh * jnp.abs(log_ratio)),
        tokens=jnp.sum(mask),
    )
