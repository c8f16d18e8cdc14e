"""Pictures, tokens and chat text against transformers' own processing of the same files."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the extra `parity`; `make test-parity` (part of .ci/run) has it", allow_module_level=True)

import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from knittrans_jax.encoding.patches import patchify
from knittrans_jax.models import PRESETS, normalise_pixels
from knittrans_jax.processing.chat import ChatTemplate, read_template
from knittrans_jax.processing.pictures import PictureProcessor
from knittrans_jax.processing.vocabulary import TokenizerVocabulary

from ..processing.made import CORPUS, SPECIALS, make_tokenizer

VISION = PRESETS["qwen3-vl-2b"].vision
assert VISION is not None
SIZES = [(256, 320), (250, 300), (64, 48), (700, 33), (1200, 900), (33, 65), (480, 640)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_and_grids(tmp_path: Path, size: tuple[int, int]):
    theirs = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 16_384, "longest_edge": 262_144},
        patch_size=16,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    theirs.save_pretrained(tmp_path)
    ours = PictureProcessor.from_directory(tmp_path)
    ours.check(VISION)
    # Smooth, so that resampling matters, with noise on top.
    rng = np.random.default_rng(sum(size))
    rows, columns = np.meshgrid(np.arange(size[0]), np.arange(size[1]), indexing="ij")
    wave = 128 + 90 * np.sin(rows / 9.0 + columns / 17.0)[..., None] + rng.normal(0, 20, (*size, 3))
    picture = np.clip(wave, 0, 255).astype(np.uint8)
    out = theirs([picture], return_tensors="np")
    pixels = ours.resize(picture)
    assert (1, *ours.grid(pixels)) == tuple(out["image_grid_thw"][0])
    got = normalise_pixels(jnp.asarray(patchify(pixels, 16, 2)), VISION)
    # There: channel, frame, row, column; here: row, column, channel of the one frame.
    want = out["pixel_values"].reshape(-1, 3, 2, 16, 16)
    np.testing.assert_array_equal(want[:, :, 0], want[:, :, 1])
    np.testing.assert_allclose(got, want[:, :, 0].transpose(0, 2, 3, 1).reshape(got.shape), atol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_ids_and_text(folder: Path):
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = TokenizerVocabulary(folder)
    assert (ours.end, ours.pad, ours.size) == (theirs.eos_token_id, theirs.pad_token_id, len(theirs))
    for text in [*CORPUS, "", "  two  spaces\n\n", "<|im_start|>user\nx<|im_end|>", "".join(SPECIALS), "ünïcode 🙂"]:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)


def test_chat_text(folder: Path):
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTemplate(read_template(folder))
    text, image = {"type": "text", "text": "é <b> 'quoted'"}, {"type": "image"}
    conversations = [
        [{"role": "user", "content": "plain"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": [image, text]}],
        [{"role": "user", "content": [image, text, image]}, {"role": "assistant", "content": "7"},
         {"role": "user", "content": [{"type": "text", "text": ""}, text]}],
    ]  # fmt: skip
    tools = [
        {"type": "function", "function": {"name": "look", "description": "é <&>", "parameters": {"type": "object"}}}
    ]
    for messages in conversations:
        for options in ({}, {"add_generation_prompt": True}, {"numbered": True}, {"tools": tools}):
            want = theirs.apply_chat_template(messages, tokenize=False, **options)
            assert ours.render(messages, **options) == want


def test_the_settings_file_is_the_one_that_transformers_writes(tmp_path: Path):
    Qwen2VLImageProcessorPil(patch_size=16, min_pixels=4096, max_pixels=65_536).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert raw["size"] == {"longest_edge": 65_536, "shortest_edge": 4096}
