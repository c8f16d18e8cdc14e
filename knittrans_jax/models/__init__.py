"""Qwen3 and Qwen3-VL in flax.nnx behind a functional surface, from the tiny preset to the published sizes.

    config = preset("tiny", vocab_size=48)
    model, params = build_model(config, seed=0)                     # static structure, plain dict of arrays
    table_RxQxE = encoder_apply(model.encoder, params["encoder"], pixels, coords, grids, segments)
    hidden_BxTxD = decoder_apply(model.decoder, params["decoder"], "hidden", tokens, positions, segments, visual, mask)
    logits_BxTxV = decoder_apply(model.decoder, params["decoder"], "logits", hidden_BxTxD)
    cache = init_cache(config.text, slots, capacity)
    hidden, cache = decoder_apply(model.decoder, params["decoder"], "extend", tokens, positions, new_lengths, cache)

Everything here is pure: jit, grad and sharding are the caller's. `mrope_positions` and the patch functions of
`knittrans_jax.encoding.patches` are numpy and prepare the inputs on the host.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knittrans_jax.models.cache import KVCache, copy_slots, init_cache, reset_slots
    from knittrans_jax.models.config import PRESETS, ModelConfig, TextConfig, VisionConfig, parameter_count, preset
    from knittrans_jax.models.decoder import Decoder
    from knittrans_jax.models.model import (
        Model,
        Params,
        abstract_model,
        build_model,
        decay_mask,
        decoder_apply,
        draw_params,
        encoder_apply,
    )
    from knittrans_jax.models.positions import mrope_positions
    from knittrans_jax.models.vision import VisionEncoder, normalise_pixels

__all__ = [
    "PRESETS",
    "Decoder",
    "KVCache",
    "Model",
    "ModelConfig",
    "Params",
    "TextConfig",
    "VisionConfig",
    "VisionEncoder",
    "abstract_model",
    "build_model",
    "copy_slots",
    "decay_mask",
    "decoder_apply",
    "draw_params",
    "encoder_apply",
    "init_cache",
    "mrope_positions",
    "normalise_pixels",
    "parameter_count",
    "preset",
    "reset_slots",
]

_HOME = {
    "Decoder": "decoder",
    "KVCache": "cache",
    "Model": "model",
    "ModelConfig": "config",
    "PRESETS": "config",
    "Params": "model",
    "TextConfig": "config",
    "VisionConfig": "config",
    "VisionEncoder": "vision",
    "abstract_model": "model",
    "build_model": "model",
    "copy_slots": "cache",
    "decay_mask": "model",
    "decoder_apply": "model",
    "draw_params": "model",
    "encoder_apply": "model",
    "init_cache": "cache",
    "mrope_positions": "positions",
    "normalise_pixels": "vision",
    "parameter_count": "config",
    "preset": "config",
    "reset_slots": "cache",
}


def __getattr__(name: str) -> Any:
    """Imports on first use: whoever only asks for a preset's sizes (`knittrans check`, the launcher) never loads JAX."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
