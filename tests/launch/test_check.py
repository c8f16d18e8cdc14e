"""Rules that need the task or the model, and the command line around them: refused with status 2, nothing started."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from knittrans_jax.config import Config, ConfigError, load_config
from knittrans_jax.launch.check import check_run

ROOT = Path(__file__).parents[2]
GRID = ROOT / "configs" / "grid_lookup.yaml"


def load(*overrides: str) -> Config:
    return load_config(GRID, list(overrides))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_configuration_that_we_ship_passes_and_opens_with_its_command(path: Path) -> None:
    assert path.read_text().startswith(f"# knittrans run configs/{path.name}\n")
    arithmetic = check_run(load_config(path))
    assert arithmetic.groups_per_mini_batch * arithmetic.mini_batches == arithmetic.groups_per_batch


def test_the_arithmetic_of_the_demo_adds_up() -> None:
    one = check_run(load())
    assert one.processes == {"scheduler": 1, "storage": 1, "rollout": 1, "train": 2}
    assert one.trajectories_per_mini_batch == one.groups_per_mini_batch * one.trajectories_per_group
    assert one.groups_total == one.train_steps * one.groups_per_batch
    assert sum(least for least, _ in one.quotas.values()) == one.groups_per_batch
    assert one.storage_groups * one.group_bytes_max <= load().rollout.storage_bytes


def test_check_says_whether_a_token_budget_is_guaranteed() -> None:
    most = check_run(load()).tokens_per_mini_batch_max
    for budget, guaranteed in ((most, True), (most - 1, False)):
        one = check_run(load(f"batch.mini_batch_tokens={budget}"))
        assert (one.mini_batch_tokens, one.mini_batch_tokens_guaranteed) == (budget, guaranteed)
    assert check_run(load()).mini_batch_tokens_guaranteed


WRONG = [
    (["task.name=no-such-task"], "task.name", "no-such-task", "expected one of"),
    (["task.options={digitz: 3}"], "task.options", "digitz", "no such key"),
    (["model.preset=huge"], "model.preset", "'huge'", "expected one of"),
    (["model.vocabulary_rows=20"], "model.vocabulary_rows", "20", "vocabulary has 48 ids"),
    (["rollout.cache_tokens=20"], "rollout.cache_tokens", "20", "a trajectory of task grid-lookup can have"),
    (["rollout.max_answer_tokens=2"], "rollout.max_answer_tokens", "2", "right answers of 3 tokens"),
    (["train.encoder_row_patches=12"], "train.encoder_row_patches", "12", "largest image"),
    (["train.encoder_row_patches=62"], "train.encoder_row_patches", "62", "multiple of 4"),
    (["batch.quotas={colour: {red: {min: 1}}}"], "batch.quotas.colour", "", "has no attribute 'colour'"),
    (["batch.quotas.domain={diagonals: {min: 1}}"], "batch.quotas.domain.diagonals", "min 1", "cells (2048)"),
    (["batch.quotas.domain={cells: {max: 1}, rows: {max: 1}}"], "batch.quotas.domain", "", "fewer than batch.groups"),
    (["rollout.storage_bytes=1000"], "rollout.storage_bytes", "1000", "smallest budget that works"),
    (["train.mesh={data: 1, fsdp: 5}", "train.processes=5"], "train.mesh", "5", "vocabulary rows"),
    (["eval.final_prompts=100000"], "eval.final_prompts", "100000", "held-out prompts"),
]


@pytest.mark.parametrize(("overrides", "key", "value", "rule"), WRONG, ids=[case[0][0] for case in WRONG])
def test_a_run_that_cannot_work_names_key_value_and_rule(overrides: list[str], key: str, value: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(load(*overrides))
    message = str(caught.value)
    assert message.startswith(f"{key}:")
    assert value in message
    assert rule in message


def knittrans(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "knittrans_jax.cli", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("command", ["run", "check"])
def test_a_wrong_configuration_ends_with_status_2_before_anything_starts(tmp_path: Path, command: str) -> None:
    done = knittrans(command, str(GRID), "rollout.cache_tokens=20", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("knittrans: rollout.cache_tokens: ")
    assert list(tmp_path.iterdir()) == []


def test_wrong_use_ends_with_status_2(tmp_path: Path) -> None:
    for arguments in (["run"], ["fly", "x"], ["run", str(GRID), "--fast"], ["train", str(GRID), "--index", "9"]):
        done = knittrans(*arguments, cwd=tmp_path)
        assert done.returncode == 2, (arguments, done.stderr)


def test_check_prints_one_json_object_and_nothing_else_and_never_loads_jax(tmp_path: Path) -> None:
    code = (
        "import sys; from knittrans_jax.cli import main; status = main(sys.argv[1:]); "
        "sys.exit(9 if 'jax' in sys.modules else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "check", str(GRID), "--json", "name=other"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "other"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise OSError('no data')", r"prompts\('train'\) of the task fails: OSError: no data"),
        ("return [Prompt('a', {'domain': 3})]", "attributes from text to text"),
    ],
)
def test_prompts_that_fail_are_said_of_the_task(tmp_path: Path, body: str, message: str) -> None:
    source = (Path(__file__).parents[1] / "rollout" / "my_task.py").read_text()
    (tmp_path / "bad.py").write_text(f"{source}\n\nclass Bad(Echo):\n    def prompts(self, split):\n        {body}\n")
    with pytest.raises(ConfigError, match=message):
        check_run(load_config(GRID, [f"task.name={tmp_path / 'bad.py'}:Bad", "task.options={}"]))
