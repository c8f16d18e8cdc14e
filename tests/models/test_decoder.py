from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.typing import ArrayLike

from knittrans_jax.models import (
    KVCache,
    Params,
    abstract_model,
    build_model,
    copy_slots,
    decoder_apply,
    init_cache,
    mrope_positions,
    parameter_count,
    preset,
    reset_slots,
)

IMAGE = 47
Case = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
CONFIG = preset("tiny", 48)
D, E = CONFIG.text.d_model, CONFIG.visual_features


def random_params(shapes: Params) -> Params:
    """Like a trained model's, with norms away from 1 and biases away from 0; quicker than drawing them in JAX."""
    rng = np.random.default_rng(0)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        spread = 0.1 if path[-1].key in ("scale", "bias") else leaf.shape[-2] ** -0.5
        return jnp.asarray(rng.normal(float(path[-1].key == "scale"), spread, leaf.shape), leaf.dtype)

    return jax.tree.map_with_path(draw, shapes)


MODEL, SHAPES = abstract_model(CONFIG)
PARAMS = random_params(SHAPES)
# With images in the middle, at the start and at the end; each (tokens, patch grids).
SEQUENCES = [
    ([1, 2, *[IMAGE] * 4, 3, 4, 5], [(4, 4)]),
    ([6, 7, 8], []),
    ([IMAGE, 9, *[IMAGE] * 6, 10, 11, IMAGE], [(2, 2), (4, 6), (2, 2)]),
]


def case(seed: int) -> Case:
    """One sequence -> tokens [T], positions [3, T], visual [T, E], mask [T], as numpy."""
    tokens, grids = SEQUENCES[seed]
    positions, _ = mrope_positions(tokens, grids, IMAGE, 2)
    tokens = np.asarray(tokens, np.int32)
    visual = np.random.default_rng(seed).normal(size=(len(tokens), E)).astype(np.float32)
    return tokens, positions, visual, tokens == IMAGE


def batch(cases: list[Case], length: int):
    """Sequences to rows of `length`, one each, padding filled with garbage."""
    rng = np.random.default_rng(7)
    rows = len(cases)
    tokens = rng.integers(0, 48, (rows, length), dtype=np.int32)
    positions = rng.integers(0, 48, (rows, 3, length), dtype=np.int32)
    segments = np.zeros((rows, length), np.int32)
    visual = rng.normal(size=(rows, length, E)).astype(np.float32)
    mask = rng.integers(0, 2, (rows, length)).astype(bool)
    for row, (t, p, v, m) in enumerate(cases):
        n = len(t)
        tokens[row, :n], positions[row, :, :n], visual[row, :n], mask[row, :n], segments[row, :n] = t, p, v, m, 1
    return tokens, positions, segments, visual, mask


@jax.jit
def hidden(
    tokens: ArrayLike,
    positions: ArrayLike,
    segments: ArrayLike,
    visual: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    params: Params = PARAMS["decoder"],
):
    return decoder_apply(MODEL.decoder, params, "hidden", tokens, positions, segments, visual, mask)


@jax.jit
def extend(
    tokens: ArrayLike,
    positions: ArrayLike,
    new_lengths: ArrayLike,
    cache: KVCache,
    visual: ArrayLike | None = None,
    mask: ArrayLike | None = None,
):
    return decoder_apply(
        MODEL.decoder, PARAMS["decoder"], "extend", tokens, positions, new_lengths, cache, visual, mask
    )


def alone(seed: int):
    tokens, positions, visual, mask = case(seed)
    return hidden(tokens[None], positions[None], np.ones((1, len(tokens)), np.int32), visual[None], mask[None])[0]


def feed(cache: KVCache, fed: list[int], takes: list[int], width: int):
    """Give every slot its next `takes[s]` tokens in one call of `extend`; the outputs per slot, and the cache."""
    chunks = []
    for seed, (done, take) in enumerate(zip(fed, takes, strict=True)):
        tokens, positions, visual, mask = case(seed)
        span = slice(done, done + take)
        chunks.append((tokens[span], positions[:, span], visual[span], mask[span]))
    tokens, positions, _, visual, mask = batch(chunks, width)
    out, cache = extend(tokens, positions, np.asarray(takes, np.int32), cache, visual, mask)
    return [out[slot, :take] for slot, take in enumerate(takes)], cache


@pytest.mark.newest
@pytest.mark.parametrize(("width", "seed"), [(1, 0), (4, 1), (11, 2)])
def test_cached_extension_equals_the_full_forward(width: int, seed: int):
    """Token by token, in ragged chunks with idle slots, and in one prefill."""
    rng = np.random.default_rng(seed)
    lengths = [len(tokens) for tokens, _ in SEQUENCES]
    cache = init_cache(CONFIG.text, len(lengths), 16)
    fed, outputs = [0] * len(lengths), [list[jax.Array]() for _ in lengths]
    while fed != lengths:
        takes = [
            min(n - f, width if width != 4 else int(rng.integers(0, 5))) for n, f in zip(lengths, fed, strict=True)
        ]
        new, cache = feed(cache, fed, takes, width)
        for slot, take in enumerate(takes):
            outputs[slot].append(new[slot])
            fed[slot] += take
    np.testing.assert_array_equal(cache.lengths, lengths)
    for seed in range(len(lengths)):
        np.testing.assert_allclose(np.concatenate(outputs[seed]), alone(seed), atol=1e-5, rtol=1e-5)


def test_slots_without_new_tokens_are_untouched():
    cache = init_cache(CONFIG.text, 3, 16)
    _, before = feed(cache, [0, 0, 0], [3, 3, 3], 4)
    _, after = feed(before, [3, 3, 3], [2, 0, 1], 4)
    np.testing.assert_array_equal(before.k[:, 1], after.k[:, 1])
    np.testing.assert_array_equal(before.v[:, 1], after.v[:, 1])
    np.testing.assert_array_equal(after.lengths, [5, 3, 4])
    np.testing.assert_array_equal(after.k[:, 0, 5:], 0.0)


def test_a_prompt_prefilled_once_serves_copied_slots():
    """Slot 0's prompt goes to slots 1 and 2, whose stale contents must not shine through; destination 3 is dropped."""
    cache = init_cache(CONFIG.text, 3, 16)
    _, cache = feed(cache, [0, 0, 0], [6, 3, 11], 11)
    cache = copy_slots(cache, jnp.array([0, 0, 0], jnp.int32), jnp.array([1, 2, 3], jnp.int32))
    np.testing.assert_array_equal(cache.lengths, [6, 6, 6])
    tokens, positions, visual, mask = (np.stack([x] * 3) for x in case(0))
    out, _ = extend(tokens[:, 6:], positions[:, :, 6:], np.full(3, 3, np.int32), cache, visual[:, 6:], mask[:, 6:])
    for slot in range(3):
        np.testing.assert_allclose(out[slot], alone(0)[6:], atol=1e-5, rtol=1e-5)


def test_reset_slots_start_afresh():
    cache = init_cache(CONFIG.text, 3, 16)
    _, cache = feed(cache, [0, 0, 0], [6, 3, 11], 11)
    cache = reset_slots(cache, jnp.array([True, False, True]))
    np.testing.assert_array_equal(cache.lengths, [0, 3, 0])
    new, _ = feed(cache, [0, 3, 0], [9, 0, 11], 11)
    np.testing.assert_allclose(new[0], alone(0), atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(new[2], alone(2), atol=1e-5, rtol=1e-5)


def test_packed_rows_equal_the_sequences_alone():
    parts = [case(seed) for seed in (2, 0, 1)]
    tokens, positions, visual, mask = (
        np.concatenate([part[i] for part in parts], axis=axis) for i, axis in ((0, 0), (1, 1), (2, 0), (3, 0))
    )
    segments = np.concatenate([np.full(len(part[0]), i + 1, np.int32) for i, part in enumerate(parts)])
    packed = hidden(tokens[None], positions[None], segments[None], visual[None], mask[None])[0]
    at = 0
    for seed in (2, 0, 1):
        n = len(SEQUENCES[seed][0])
        np.testing.assert_allclose(packed[at : at + n], alone(seed), atol=1e-5, rtol=1e-5)
        at += n


def test_padding_has_no_influence_and_stays_finite():
    out = hidden(*batch([case(0), case(1), case(2)], 16))
    assert jnp.isfinite(out).all()
    for seed in range(3):
        np.testing.assert_allclose(out[seed, : len(SEQUENCES[seed][0])], alone(seed), atol=1e-5, rtol=1e-5)


def test_hidden_is_causal():
    tokens, positions, visual, mask = case(0)
    changed = tokens.copy()
    changed[7] = 20
    rows = np.ones((1, len(tokens)), np.int32)
    before = hidden(tokens[None], positions[None], rows, visual[None], mask[None])[0]
    after = hidden(changed[None], positions[None], rows, visual[None], mask[None])[0]
    np.testing.assert_array_equal(before[:7], after[:7])
    assert (jnp.abs(before[7:] - after[7:]).max(axis=1) > 1e-3).all()


@pytest.mark.parametrize("half", [slice(0, D), slice(D, E)], ids=["embedding", "deepstack"])
def test_each_level_of_image_features_matters_at_image_tokens_only(half: slice):
    tokens, positions, visual, mask = case(0)
    rows = np.ones((1, len(tokens)), np.int32)
    before = hidden(tokens[None], positions[None], rows, visual[None], mask[None])
    elsewhere, at_image = visual.copy(), visual.copy()
    elsewhere[~mask, half] += 1.0
    at_image[mask, half] *= -1.0
    np.testing.assert_array_equal(before, hidden(tokens[None], positions[None], rows, elsewhere[None], mask[None]))
    assert jnp.abs(before - hidden(tokens[None], positions[None], rows, at_image[None], mask[None])).max() > 1e-2


@pytest.mark.parametrize("component", [0, 1, 2])
def test_every_mrope_component_matters(component: int):
    tokens, positions, visual, mask = case(0)
    rows = np.ones((1, len(tokens)), np.int32)
    moved = positions.copy()
    moved[component, 2:6] += np.array([3, 0, 1, 5], np.int32)
    before = hidden(tokens[None], positions[None], rows, visual[None], mask[None])
    assert jnp.abs(before - hidden(tokens[None], moved[None], rows, visual[None], mask[None])).max() > 1e-3


def test_text_positions_are_plain_one_dimensional_rope():
    """With equal components the section has no effect, and a common shift of all positions changes nothing."""
    plain = msgspec.structs.replace(CONFIG, text=msgspec.structs.replace(CONFIG.text, mrope_section=(8, 0, 0)))
    model, params = abstract_model(plain)[0], PARAMS
    tokens = np.arange(8, dtype=np.int32)[None]
    positions, rows = np.tile(np.arange(8, dtype=np.int32), (1, 3, 1)), np.ones((1, 8), np.int32)
    expected = decoder_apply(model.decoder, params["decoder"], "hidden", tokens, positions, rows)
    np.testing.assert_allclose(hidden(tokens, positions, rows), expected, atol=1e-5)
    np.testing.assert_allclose(hidden(tokens, positions + np.int32(100), rows), expected, atol=1e-4)


def test_gradients_are_finite_and_reach_every_parameter_with_padding_rows_present():
    inputs = batch([case(0), case(1), case(2)], 16)
    targets, weights = inputs[0], (inputs[2] > 0).astype(np.float32)
    inputs[2][1] = 0  # a row of nothing but padding

    def loss(params: Params):
        states = hidden(*inputs, params=params)
        logits = decoder_apply(MODEL.decoder, params, "logits", states)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(targets)[..., None], axis=-1)[..., 0]
        return -jnp.sum(picked * weights)

    for path, leaf in jax.tree.leaves_with_path(jax.grad(loss)(PARAMS["decoder"])):
        assert jnp.isfinite(leaf).all(), path
        assert jnp.abs(leaf).max() > 0, path


def test_bfloat16_compute_keeps_float32_logits_close():
    model, shapes = abstract_model(CONFIG, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {np.dtype(np.float32)}
    params = PARAMS
    inputs = batch([case(0)], 9)
    low = decoder_apply(model.decoder, params["decoder"], "hidden", *inputs)
    assert low.dtype == jnp.bfloat16
    logits = decoder_apply(model.decoder, params["decoder"], "logits", low)
    assert logits.dtype == jnp.float32
    expected = decoder_apply(MODEL.decoder, PARAMS["decoder"], "logits", hidden(*inputs))
    np.testing.assert_allclose(logits, expected, atol=0.05)
    cache = init_cache(CONFIG.text, 1, 16, jnp.bfloat16)
    tokens, positions, _, visual, mask = inputs
    lengths = np.array([9], np.int32)
    out, cache = decoder_apply(
        model.decoder, params["decoder"], "extend", tokens, positions, lengths, cache, visual, mask
    )
    assert cache.k.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), low.astype(jnp.float32), atol=0.1)


def test_tied_embeddings_share_the_output_table_and_text_only_models_have_no_encoder():
    tied = msgspec.structs.replace(CONFIG, text=msgspec.structs.replace(CONFIG.text, tie_embeddings=True), vision=None)
    model, params = build_model(tied, seed=0)
    assert model.encoder is None
    assert set(params) == {"decoder"}
    assert parameter_count(params["decoder"]) == parameter_count(PARAMS["decoder"]) - 48 * D
    logits = decoder_apply(model.decoder, params["decoder"], "logits", jnp.ones((2, 5, D)))
    np.testing.assert_allclose(logits[0, 0], params["decoder"]["embedding"].sum(axis=1), rtol=1e-4, atol=1e-5)


def test_same_seed_same_parameters_and_paths_are_strings():
    (_, first), (_, again), (_, other) = (build_model(CONFIG, seed=seed) for seed in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert (first["decoder"]["embedding"] != other["decoder"]["embedding"]).any()
    assert jax.tree.map(jnp.shape, first) == jax.tree.map(jnp.shape, PARAMS)
    for path, _ in jax.tree.leaves_with_path(first):
        assert all(isinstance(entry.key, str) for entry in path)


def test_mismatched_visual_arguments_are_named():
    tokens, positions, visual, mask = (x[None] for x in case(0))
    rows = np.ones_like(tokens)
    with pytest.raises(ValueError, match="together or not at all"):
        hidden(tokens, positions, rows, visual, None)
    with pytest.raises(ValueError, match="last axis 100"):
        hidden(tokens, positions, rows, visual[..., :100], mask)
