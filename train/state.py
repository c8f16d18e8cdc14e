"""The training state and the optimizer that moves it."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from knittrans_jax.config import OptimizerConfig
from knittrans_jax.models import decay_mask
from knittrans_jax.train.ravel import ravel, small, unravel

EncoderTrained = Literal["all", "mergers", "none"]
"""What of the encoder is trained: all; what makes image tokens of its features; nothing."""
MERGERS = ("merger", "deepstack_mergers")


@struct.dataclass
class TrainState:
    """`update` is the version `V`, an int32 scalar kept on the device; `params` has the keys `decoder` and `encoder`."""

    update: jax.Array
    params: dict[str, Any]
    opt_state: Any


def make_optimizer(
    config: OptimizerConfig, total_updates: int, split_params: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm, then AdamW with warm-up and cosine decay. Weight decay spares vectors (norms and biases).

    A gradient that is not finite, or a `loss` (given to `update` by name) that is not, changes nothing, neither parameters nor
    state: the update is skipped.

    The state is optax's `ScaleByAdamState`. For a small model (`knittrans_jax.train.ravel.small`) its moments are one vector
    each, in the order of `ravel(params)`. Else, and where the mesh splits parameters (`split_params`), they are trees like the
    parameters, and lie as these do.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / max(1, config.warmup_updates),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_updates,
        decay_steps=max(total_updates, config.warmup_updates + 1),
        end_value=config.learning_rate * config.final_fraction,
    )
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2)

    def init(params: Any) -> Any:
        return adam.init(ravel(params) if small(params) and not split_params else params)

    def update(updates: Any, state: Any, params: Any = None, *, loss: Any = 0.0, **_: Any) -> tuple[Any, Any]:
        one_vector = small(updates) and not split_params
        gradient = ravel(updates) if one_vector else updates
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        rate = schedule(state.count)

        def step() -> tuple[Any, Any]:
            scale = config.clip_norm / jnp.maximum(norm, config.clip_norm)
            steps, new = adam.update(jax.tree.map(lambda g: g * scale.astype(g.dtype), gradient), state)
            return jax.tree.map(lambda u: u * (-rate).astype(u.dtype), steps), new

        def skip() -> tuple[Any, Any]:
            return jax.tree.map(jnp.zeros_like, gradient), state

        if one_vector:
            # A branch keeps the compiler from computing Adam anew inside every leaf's own piece of code.
            steps, new = jax.lax.cond(finite, step, skip)
            steps = unravel(steps, updates)
        else:
            steps, new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), step(), skip())
        if config.weight_decay:
            decay = jnp.where(finite, -rate * config.weight_decay, 0.0)
            steps = jax.tree.map(
                lambda u, p, decayed: u + decay.astype(p.dtype) * p if decayed else u, steps, params, decay_mask(params)
            )
        return steps, new

    return optax.GradientTransformationExtraArgs(init, update)


def trained_params(params: dict[str, Any], encoder: EncoderTrained) -> dict[str, Any]:
    """The parameters that the optimizer knows of (or a tree like them). Others have no moments and no weight decay."""
    kept = dict(params)
    if "encoder" in kept and encoder == "none":
        del kept["encoder"]
    elif "encoder" in kept and encoder == "mergers":
        kept["encoder"] = {part: tree for part, tree in params["encoder"].items() if part in MERGERS}
    return kept


def with_fixed_part_fixed(encoder_params: dict[str, Any], encoder: EncoderTrained) -> dict[str, Any]:
    """The encoder's parameters, of which those that are not trained get no gradient: none is computed."""
    if encoder != "mergers":
        return encoder_params
    return {part: tree if part in MERGERS else jax.lax.stop_gradient(tree) for part, tree in encoder_params.items()}


def merged(params: dict[str, Any], trained: dict[str, Any]) -> dict[str, Any]:
    """`params` with the trained ones in their places."""
    return {
        part: merged(tree, trained[part]) if isinstance(tree, dict) and part in trained else trained.get(part, tree)
        for part, tree in params.items()
    }


def init_state(
    params: dict[str, Any], optimizer: optax.GradientTransformation, encoder: EncoderTrained = "all"
) -> TrainState:
    """Version 0."""
    opt_state = optimizer.init(trained_params(params, encoder))
    return TrainState(update=jnp.zeros((), jnp.int32), params=params, opt_state=opt_state)


def with_other_moments(wanted: TrainState) -> TrainState | None:
    """`wanted`, abstract, as another mesh keeps it: Adam's moments as trees instead of one vector, or the other way round.

    Its moments are whole on every device. None: there is no other form (the state is not Adam's).
    """
    adam = wanted.opt_state
    if not isinstance(adam, optax.ScaleByAdamState):
        return None
    alike = wanted.update.sharding
    moments = jax.tree.leaves(adam.mu)
    if isinstance(adam.mu, jax.ShapeDtypeStruct):
        trained = (trained_params(wanted.params, encoder) for encoder in get_args(EncoderTrained))
        shapes = next((tree for tree in trained if sum(p.size for p in jax.tree.leaves(tree)) == adam.mu.size), None)
        if shapes is None:
            return None
        other = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=alike), shapes)
    else:
        other = jax.ShapeDtypeStruct((sum(one.size for one in moments),), moments[0].dtype, sharding=alike)
    return dataclasses.replace(wanted, opt_state=adam._replace(mu=other, nu=other))


def with_moments_as(found: TrainState, wanted: TrainState) -> TrainState:
    """A state that `with_other_moments(wanted)` describes, in the form and the shardings of `wanted`."""

    def convert(moments: Any, like: Any) -> Any:
        vector = np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(moments)])
        leaves, structure = jax.tree.flatten(like)
        parts = np.split(vector, np.cumsum([leaf.size for leaf in leaves])[:-1])
        placed = [
            jax.make_array_from_callback(leaf.shape, leaf.sharding, part.reshape(leaf.shape).__getitem__)
            for part, leaf in zip(parts, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, placed)

    adam, into = found.opt_state, wanted.opt_state
    return dataclasses.replace(
        found, opt_state=adam._replace(mu=convert(adam.mu, into.mu), nu=convert(adam.nu, into.nu))
    )
