"""The model that a configuration names: presets, and a checkpoint that a run begins with."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from knittrans_jax.config import Config, ConfigError, ModelSection, load_config
from knittrans_jax.launch.check import check_run
from knittrans_jax.models import build_model, preset
from knittrans_jax.models.hf_save import save_params
from knittrans_jax.models.run_model import initial_params, model_config, run_model
from knittrans_jax.models.sharding import on_device
from knittrans_jax.rollout.tasks.registry import load_task
from knittrans_jax.rollout.text import Vocabulary
from knittrans_jax.train.setup import make_mesh, set_up_training

VOCABULARY = Vocabulary()
CONFIG, PARAMS = preset("tiny", VOCABULARY.size), build_model(preset("tiny", VOCABULARY.size), seed=3)[1]
DEMO = Path(__file__).parents[2] / "configs" / "grid_lookup.yaml"
IDS = {"image_token_id": VOCABULARY.image, "video_token_id": 0, "vision_start_token_id": 2, "vision_end_token_id": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    save_params(directory, CONFIG, PARAMS, dtype=jnp.float32, token_ids=IDS)
    return directory


def configured(*overrides: str) -> Config:
    return load_config(DEMO, ["train.processes=1", "train.mesh={data: 1}", *overrides])


def assert_equal(got: Any, want: Any) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_array_equal(np.asarray(b), np.asarray(a), err_msg=jax.tree_util.keystr(path))


def test_a_run_begins_with_the_checkpoint_that_its_configuration_names(checkpoint: Path):
    config = configured(f"model.path={checkpoint}")
    check_run(config)
    setup = set_up_training(config, load_task(config.task, config.seed), make_mesh(config))
    assert_equal(setup.state.params, PARAMS)


def test_without_a_checkpoint_every_sharding_gets_what_the_seed_draws():
    sharding = on_device(jax.devices()[0])
    drawn = initial_params(ModelSection(), VOCABULARY, 3, sharding)
    assert_equal(drawn, PARAMS)
    assert {leaf.sharding for leaf in jax.tree.leaves(drawn)} == {sharding}


def test_compute_type_is_the_configurations_and_parameters_are_float32():
    model, shapes = run_model(ModelSection(dtype="bfloat16", remat=True), VOCABULARY)
    assert model != run_model(ModelSection(), VOCABULARY)[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {np.dtype(np.float32)}


def test_a_preset_of_real_size_takes_the_tasks_vocabulary():
    assert model_config(ModelSection(preset="qwen3-vl-2b"), VOCABULARY).text.vocab_size == VOCABULARY.size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw["text_config"].update(vocab_size=20), r"has 20 token ids, the task's vocabulary 48"),
        (lambda raw: raw.update(image_token_id=7), r"image_token_id 7, the task's vocabulary 3"),
        (lambda raw: raw.update(model_type="llama"), r"model_type = 'llama'"),
    ],
)
def test_a_checkpoint_that_does_not_fit_the_task_is_refused(
    checkpoint: Path, tmp_path: Path, change: Any, message: str
):
    raw = json.loads((checkpoint / "config.json").read_text())
    change(raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=rf"model\.path: .*{message}"):
        check_run(configured(f"model.path={tmp_path}"))


def test_a_checkpoint_without_its_weights_is_refused_before_anything_starts(checkpoint: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model\.path: .*config\.json: No such file"):
        check_run(configured(f"model.path={tmp_path}"))
    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"model\.path: .*neither model\.safetensors nor"):
        check_run(configured(f"model.path={tmp_path}"))


def test_a_vocabulary_is_known_by_its_size_and_placeholder():
    @dataclasses.dataclass
    class Ids:
        size: int = 100
        image: int = 9

    assert model_config(ModelSection(), Ids()).text.vocab_size == 100
