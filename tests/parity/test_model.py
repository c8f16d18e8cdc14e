"""The whole model against transformers: logits of every kind of conversation, packed and alone, in both widths; and files."""

import copy
import functools
import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the extra `parity`; `make test-parity` (part of .ci/run) has it", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3VLForConditionalGeneration

from knittrans_jax.models import decoder_apply, init_cache
from knittrans_jax.models.hf_save import save_params

from .reference import (
    CONVERSATIONS,
    SHOWN,
    TEXT,
    array,
    encode,
    image_rows,
    load,
    logits,
    ours,
    randomise,
    token_rows,
    torch_inputs,
    torch_model,
)


@functools.cache
def reference() -> dict[str, np.ndarray]:
    """Logits of each conversation alone, by transformers."""
    with torch.no_grad():
        return {name: array(torch_model()(**torch_inputs(case)).logits[0]) for name, case in CONVERSATIONS.items()}


@functools.partial(jax.jit, static_argnums=0)
def forward(model: Any, params: Any, images: Any, batch: Any) -> jax.Array:
    table = encode(model, params, images)
    return logits(model, params, batch, table.reshape(-1, table.shape[-1]))


ALONE = token_rows([[case] for case in CONVERSATIONS.values()])
IMAGES = image_rows([SHOWN], 80)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_logits_agree_to_1e_4(name: str):
    got = forward(*ours(), IMAGES, ALONE)[list(CONVERSATIONS).index(name)]
    want = reference()[name]
    assert np.abs(want).max() > 1.0
    np.testing.assert_allclose(got[: len(want)], want, atol=1e-4)


def test_conversations_packed_into_rows_keep_the_logits_that_they_have_alone():
    one, two, text, several = CONVERSATIONS.values()
    order = [["text only", "one picture"], ["several turns"], ["two pictures of different sizes"], ["text only"]]
    packed = token_rows([[text, one], [several], [two], [text]])
    got = forward(*ours(), IMAGES, packed)
    for row, names in enumerate(order):
        at = 0
        for name in names:
            want = reference()[name]
            np.testing.assert_allclose(got[row, at : at + len(want)], want, atol=1e-4)
            at += len(want)


def test_a_conversation_fed_turn_by_turn_through_the_cache_has_the_same_logits():
    model, params = ours()
    row = list(CONVERSATIONS).index("several turns")
    total = len(CONVERSATIONS["several turns"].tokens)

    @jax.jit
    def run(params: Any, images: Any, batch: Any) -> jax.Array:
        table = encode(model, params, images)
        table = table.reshape(-1, table.shape[-1])
        visual = jnp.where(batch["index"][..., None] >= 0, table[batch["index"]], 0.0)
        cache, outputs, half = init_cache(model.config.text, 1, 48), [], 24
        for begin in (0, half):
            at = slice(begin, begin + half)
            new = jnp.asarray([min(total - begin, half)], jnp.int32)
            hidden, cache = decoder_apply(
                model.decoder, params["decoder"], "extend", batch["tokens"][:, at], batch["positions"][:, :, at], new,
                cache, visual[:, at], batch["index"][:, at] >= 0,
            )  # fmt: skip
            outputs.append(decoder_apply(model.decoder, params["decoder"], "logits", hidden))
        return jnp.concatenate(outputs, axis=1)[0]

    got = run(params, IMAGES, {name: value[row : row + 1] for name, value in ALONE.items()})
    np.testing.assert_allclose(got[:total], reference()["several turns"], atol=1e-4)


def test_bfloat16_errs_no_more_than_transformers_does_in_bfloat16():
    """On weights that are bfloat16 numbers, against float32 arithmetic."""
    low = copy.deepcopy(torch_model()).to(torch.bfloat16)
    rounded = copy.deepcopy(low).to(torch.float32)
    names = list(CONVERSATIONS)
    with torch.no_grad():
        exact = {name: array(rounded(**torch_inputs(CONVERSATIONS[name])).logits[0]) for name in names}
        theirs = {name: array(low(**torch_inputs(CONVERSATIONS[name])).logits[0]) for name in names}
    model, params = load(low, jnp.bfloat16, dtype=jnp.bfloat16)
    got = forward(model, params, IMAGES, ALONE)
    assert got.dtype == jnp.float32
    for row, name in enumerate(names):
        error = np.asarray(got[row, : len(exact[name])]) - exact[name]
        allowed = theirs[name] - exact[name]
        assert np.sqrt(np.mean(error**2)) < 1.2 * np.sqrt(np.mean(allowed**2)), name
        assert np.abs(error).max() < 0.05 * np.abs(exact[name]).max(), name


def test_what_is_saved_is_what_transformers_loads(tmp_path: Path):
    model, params = ours()
    torch_model().save_pretrained(tmp_path / "origin")
    save_params(
        tmp_path / "saved", model.config, params, source=tmp_path / "origin", dtype=jnp.float32, file_bytes=50_000
    )
    loaded, report = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.dtype == torch.float32
    want = torch_model().state_dict()
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, want[name], atol=1e-6, rtol=1e-6, msg=name)


def test_a_model_without_an_origin_is_loaded_and_computes_the_same(tmp_path: Path):
    model, params = ours()
    ids = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 58, "vision_end_token_id": 59}
    save_params(tmp_path / "saved", model.config, params, dtype=jnp.float32, token_ids=ids)
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        got = array(loaded(**torch_inputs(CONVERSATIONS["one picture"])).logits[0])
    np.testing.assert_allclose(got, reference()["one picture"], atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_text_only_qwen3_in_both_directions(tmp_path: Path, tied: bool):
    text = {key: value for key, value in TEXT.items() if key != "rope_parameters"}
    config = Qwen3Config(
        **text,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        attn_implementation="eager",
    )
    theirs: Any = randomise(Qwen3ForCausalLM(config).float())
    model, params = load(theirs)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 20), dtype=np.int32)
    positions = np.tile(np.arange(20, dtype=np.int32), (2, 3, 1))

    @jax.jit
    def run(params: Any) -> jax.Array:
        hidden = decoder_apply(model.decoder, params, "hidden", tokens, positions, np.ones((2, 20), np.int32))
        return decoder_apply(model.decoder, params, "logits", hidden)

    with torch.no_grad():
        want = array(theirs(torch.tensor(tokens)).logits)
    np.testing.assert_allclose(run(params["decoder"]), want, atol=1e-4)
    save_params(tmp_path / "saved", model.config, params, dtype=jnp.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    with torch.no_grad():
        np.testing.assert_allclose(array(loaded(torch.tensor(tokens)).logits), want, atol=1e-5)
