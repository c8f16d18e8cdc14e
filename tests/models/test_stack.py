from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from knittrans_jax.models import abstract_model, build_model, decay_mask, decoder_apply, draw_params, init_cache, preset
from knittrans_jax.models import stack as stack_module
from knittrans_jax.models.sharding import on_device

TINY = preset("tiny")
assert TINY.vision is not None
# Stacks of one and two layers.
CONFIG = msgspec.structs.replace(TINY, text=msgspec.structs.replace(TINY.text, layers=3))
_, PARAMS = build_model(CONFIG, seed=0)
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 48, (2, 8), dtype=np.int32)
POSITIONS = RNG.integers(0, 9, (2, 3, 8), dtype=np.int32)
VISUAL = RNG.normal(size=(2, 8, CONFIG.visual_features)).astype(np.float32)


def forward_backward_and_extend(remat: bool) -> Any:
    model = abstract_model(CONFIG, remat=remat)[0]
    mask, ones, lengths = TOKENS < 20, np.ones((2, 8), np.int32), np.full(2, 8, np.int32)

    def loss(params: Any, visual: Any) -> Any:
        hidden = decoder_apply(model.decoder, params, "hidden", TOKENS, POSITIONS, ones, visual, mask)
        return jnp.sum(jnp.sin(hidden)), hidden

    @jax.jit
    def everything(params: Any, visual: Any) -> Any:
        cache = init_cache(CONFIG.text, 2, 8)
        extended = decoder_apply(model.decoder, params, "extend", TOKENS, POSITIONS, lengths, cache, visual, mask)
        return jax.value_and_grad(loss, (0, 1), has_aux=True)(params, visual), extended

    return everything(PARAMS["decoder"], VISUAL)


@pytest.mark.newest
def test_a_scanned_stack_and_a_rematerialised_one_equal_the_unrolled_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stack_module, "UNROLLED_LAYERS", 8)
    expected = forward_backward_and_extend(remat=False)
    monkeypatch.setattr(stack_module, "UNROLLED_LAYERS", 0)
    scanned = forward_backward_and_extend(remat=True)
    for (path, want), got in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(scanned), strict=True):
        scale = max(float(jnp.abs(want).max()), 1e-3)
        np.testing.assert_allclose(got, want, atol=1e-5 * scale, err_msg=jax.tree_util.keystr(path))


def test_a_deep_model_traces_each_kind_of_layer_once_per_stack():
    deep = msgspec.structs.replace(CONFIG, text=msgspec.structs.replace(CONFIG.text, layers=32))
    sizes = []
    for config in (CONFIG, deep):
        model, shapes = abstract_model(config)
        ints = jax.ShapeDtypeStruct((2, 8), np.int32)
        positions = jax.ShapeDtypeStruct((2, 3, 8), np.int32)
        lowered = jax.jit(lambda p, t, x, s, model=model: decoder_apply(model.decoder, p, "hidden", t, x, s)).lower(
            shapes["decoder"], ints, positions, ints
        )
        sizes.append(len(lowered.as_text().splitlines()))
    assert sizes[1] < 1.05 * sizes[0]


def test_weight_decay_spares_norms_and_biases_though_they_are_stacked():
    mask = decay_mask(PARAMS)
    spared = {path[-1].key for path, decayed in jax.tree.leaves_with_path(mask) if not decayed}
    decayed = {path[-1].key for path, decayed in jax.tree.leaves_with_path(mask) if decayed}
    assert spared == {"scale", "bias"}
    assert decayed == {"kernel", "embedding", "head", "position_table"}


def test_parameters_drawn_into_a_sharding_are_like_those_drawn_on_the_host():
    sharding = on_device(jax.devices()[0])
    config = preset("tiny-text")
    drawn, host = draw_params(config, 0, sharding), build_model(config, 0)[1]
    for (path, want), got in zip(jax.tree.leaves_with_path(host), jax.tree.leaves(drawn), strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype), path
        if want.size > 500:
            np.testing.assert_allclose(jnp.std(got), jnp.std(want), rtol=0.2, atol=1e-6, err_msg=str(path))
    kernels = drawn["decoder"]["stacks"]["0"]["layers"]["mlp"]["up"]["kernel"]
    assert kernels.shape == (3, 64, 128)
    assert jnp.abs(kernels[0] - kernels[1]).max() > 0.01
