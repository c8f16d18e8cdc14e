"""Checkpoints without torch; `tests/parity` proves that names and layouts are the published ones."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.models import PRESETS, Params, abstract_model, preset
from knittrans_jax.models.hf_config import CheckpointError, config_from_json, config_to_json, read_config
from knittrans_jax.models.hf_files import Checkpoint
from knittrans_jax.models.hf_load import load_params, read_part
from knittrans_jax.models.hf_names import sources
from knittrans_jax.models.hf_save import save_params
from knittrans_jax.models.sharding import on_device

TINY = preset("tiny")
TIED = msgspec.structs.replace(TINY, text=msgspec.structs.replace(TINY.text, tie_embeddings=True))
DEVICE = on_device(jax.devices()[0])


def drawn(config: Any, dtype: Any = np.float32) -> Params:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(dtype), abstract_model(config)[1])


PARAMS = drawn(TINY)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in several files."""
    directory = tmp_path_factory.mktemp("saved") / "model"
    save_params(directory, TINY, PARAMS, dtype=jnp.float32, file_bytes=200_000)
    return directory


def assert_equal(got: Params, want: Params) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(np.asarray(b), a, err_msg=jax.tree_util.keystr(path))


def rewrite(directory: Path, target: Path, change: Any) -> Path:
    """A copy in one file with changed tensors."""
    with Checkpoint(directory) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.names}
    change(tensors)
    target.mkdir()
    safetensors.numpy.save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_bytes((directory / "config.json").read_bytes())
    return target


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_survives_its_config_file(name: str):
    config = PRESETS[name]
    assert config_from_json(json.loads(json.dumps(config_to_json(config))), "config.json") == (
        msgspec.structs.replace(config, text=msgspec.structs.replace(config.text, mrope_section=(8, 0, 0)))
        if name == "tiny-text"  # text only: which component drives a frequency has no effect, and the format cannot say
        else config
    )


def test_the_older_spelling_of_rotary_settings_is_read():
    raw = config_to_json(PRESETS["qwen3-vl-2b"])
    text = raw["text_config"]
    section = text.pop("rope_parameters")["mrope_section"]
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": section, "mrope_interleaved": True}
    assert config_from_json(raw, "config.json") == PRESETS["qwen3-vl-2b"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type = 'llama'; expected qwen3 or qwen3_vl"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "yarn"),
        ({"num_key_value_heads": 3}, "kv_heads"),
    ],
)
def test_settings_that_are_not_computed_are_refused_by_name(changes: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        config_from_json(config_to_json(PRESETS["qwen3-0.6b"]) | changes, "config.json")


@pytest.mark.newest
def test_several_files_come_back_as_they_were(saved: Path):
    assert len(list(saved.glob("model-*-of-*.safetensors"))) > 3
    assert read_config(saved) == TINY
    assert_equal(load_params(saved, TINY, DEVICE), PARAMS)


def test_files_are_what_safetensors_reads_and_say_which_framework_they_are_for(saved: Path):
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    total = 0
    for path in saved.glob("*.safetensors"):
        for name, tensor in safetensors.numpy.load_file(path).items():
            assert index["weight_map"][name] == path.name
            total += tensor.nbytes
        with safetensors.safe_open(path, "numpy") as file:
            assert file.metadata() == {"format": "pt"}
    assert total == index["metadata"]["total_size"]


def test_tied_bfloat16_in_one_file(tmp_path: Path):
    params = drawn(TIED, jnp.bfloat16)
    assert "head" not in params["decoder"]
    save_params(tmp_path / "model", TIED, params)
    assert [path.name for path in (tmp_path / "model").glob("*.safetensors")] == ["model.safetensors"]
    assert_equal(load_params(tmp_path / "model", TIED, DEVICE, jnp.bfloat16), params)
    wide = load_params(tmp_path / "model", TIED, DEVICE)
    assert {leaf.dtype for leaf in jax.tree.leaves(wide)} == {np.dtype(np.float32)}


def test_the_output_layer_of_a_tied_checkpoint_may_be_there_if_it_is_the_embedding(tmp_path: Path):
    save_params(tmp_path / "tied", TIED, drawn(TIED))
    embedding = "model.language_model.embed_tokens.weight"
    same = rewrite(tmp_path / "tied", tmp_path / "same", lambda t: t.update({"lm_head.weight": t[embedding]}))
    assert_equal(load_params(same, TIED, DEVICE), load_params(tmp_path / "tied", TIED, DEVICE))
    other = rewrite(tmp_path / "tied", tmp_path / "other", lambda t: t.update({"lm_head.weight": t[embedding] + 1}))
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings is true, but lm_head\.weight differs"):
        load_params(other, TIED, DEVICE)


LAYER = "model.language_model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(LAYER),
            rf"missing tensors: {LAYER} \(parameter decoder\.stacks\.1\.layers\.mlp\.up\.kernel\)",
        ),
        (
            lambda t: t.update({LAYER: t[LAYER].T}),
            rf"{LAYER} has shape \[64, 128\]; .*mlp\.up\.kernel needs \[128, 64\]",
        ),
        (lambda t: t.update({"model.extra.weight": t[LAYER]}), r"extra tensors.* model\.extra\.weight"),
        (lambda t: t.update({LAYER: t[LAYER].astype(np.int32)}), rf"{LAYER} is I32"),
    ],
    ids=["missing", "misshapen", "extra", "integers"],
)
def test_a_tensor_that_does_not_fit_is_named(saved: Path, tmp_path: Path, change: Any, message: str):
    with pytest.raises(CheckpointError, match=message):
        load_params(rewrite(saved, tmp_path / "changed", change), TINY, DEVICE)


def test_folders_that_are_no_checkpoint_are_refused(saved: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 no header")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is there already"):
        save_params(saved, TINY, PARAMS)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(CheckpointError, match="outside"):
        Checkpoint(tmp_path)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_part_of_a_parameter_is_that_part_of_the_whole(saved: Path, data: st.DataObject):
    table = sources(TINY, PARAMS)
    name = data.draw(st.sampled_from(sorted(table)))
    whole = jax.tree.leaves(PARAMS)[list(table).index(name)]
    index = []
    for size in whole.shape:
        begin = data.draw(st.integers(0, size - 1))
        index.append(slice(begin, data.draw(st.integers(begin + 1, size))))
    with Checkpoint(saved) as checkpoint:
        part = read_part(checkpoint, TINY, table[name], tuple(index))
    np.testing.assert_array_equal(part, whole[tuple(index)])


def test_nothing_larger_than_a_tensor_is_read_at_once_and_no_byte_twice(saved: Path, monkeypatch: pytest.MonkeyPatch):
    read: list[int] = []
    original = Checkpoint.read

    def counting(self: Checkpoint, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        part = original(self, name, index)
        read.append(part.nbytes)
        return part

    monkeypatch.setattr(Checkpoint, "read", counting)
    load_params(saved, TINY, DEVICE)
    total = json.loads((saved / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    assert sum(read) == total
    largest = max(int(np.prod(source.tensor_shape)) * 4 for source in sources(TINY, PARAMS).values())
    assert max(read) == largest < total


def test_what_stills_do_not_train_comes_back_as_it_was(tmp_path: Path):
    """The frames' difference and the files of the tokenizer survive training on stills."""
    name = "model.visual.patch_embed.proj.weight"
    save_params(tmp_path / "made", TINY, PARAMS, dtype=jnp.float32)
    rng = np.random.default_rng(1)
    frames = rng.normal(size=(48, 1, 2, 4, 4)).astype(np.float32)
    origin = rewrite(tmp_path / "made", tmp_path / "origin", lambda t: t.update({name: frames}))
    (origin / "tokenizer.json").write_text("{}")
    raw = json.loads((origin / "config.json").read_text()) | {"image_token_id": 3}
    (origin / "config.json").write_text(json.dumps(raw))
    params = load_params(origin, TINY, DEVICE)
    moved = jax.tree.map(lambda x: x, params)
    moved["encoder"]["patch_embed"]["kernel"] = params["encoder"]["patch_embed"]["kernel"] + 1.0
    save_params(tmp_path / "after", TINY, moved, source=origin, dtype=jnp.float32)
    with Checkpoint(tmp_path / "after") as checkpoint:
        np.testing.assert_allclose(checkpoint.read(name), frames + 0.5, atol=1e-6)
    assert (tmp_path / "after" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "after" / "config.json").read_text())["image_token_id"] == 3


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("knittrans_jax.models.hf_save._write_header", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        save_params(tmp_path / "model", TINY, PARAMS)
    assert list(tmp_path.iterdir()) == []
