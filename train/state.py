"""The training state and the optimizer that moves it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from knittrans_jax.config import OptimizerConfig
from knittrans_jax.models import decay_mask


@struct.dataclass
class TrainState:
    """`update` is the version `V`, an int32 scalar kept on the device; `params` has the keys `decoder` and `encoder`."""

    update: jax.Array
    params: dict[str, Any]
    opt_state: Any


def make_optimizer(config: OptimizerConfig, total_updates: int) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW with warm-up and cosine decay. Weight decay spares vectors (norms and biases)."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / max(1, config.warmup_updates),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_updates,
        decay_steps=max(total_updates, config.warmup_updates + 1),
        end_value=config.learning_rate * config.final_fraction,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule,
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )


def init_state(params: dict[str, Any], optimizer: optax.GradientTransformation) -> TrainState:
    """Version 0."""
    return TrainState(update=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))
