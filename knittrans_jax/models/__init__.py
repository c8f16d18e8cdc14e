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

from knittrans_jax.models.cache import KVCache, copy_slots, init_cache, reset_slots
from knittrans_jax.models.config import PRESETS, ModelConfig, TextConfig, VisionConfig, parameter_count, preset
from knittrans_jax.models.decoder import Decoder
from knittrans_jax.models.model import Model, Params, abstract_model, build_model, decoder_apply, encoder_apply
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
    "decoder_apply",
    "encoder_apply",
    "init_cache",
    "mrope_positions",
    "normalise_pixels",
    "parameter_count",
    "preset",
    "reset_slots",
]
