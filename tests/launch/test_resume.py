"""`resume: true` with real processes: killed in the middle and gone on with, a run trains on every prompt once an epoch."""

import collections
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.lineage import final_lineage
from knittrans_jax.admission.log import read_log
from knittrans_jax.config import load_config
from knittrans_jax.rollout.tasks.registry import load_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CONFIG = """
name: resumed
task: {name: digits-read, options: {digits: 1, train_prompts: 22, heldout_prompts: 8}}
batch:
  groups: 4
  mini_batches: 2
  trajectories_per_group: 2
admission: {look_ahead_groups: 4}
rollout: {slots: 8, cache_tokens: 16, max_answer_tokens: 3}
train: {updates: 200, epochs: 2, row_tokens: 32, micro_batch_rows: 2, encoder_row_patches: 8}
checkpoint: {every_train_batches: 2, keep: 2}
eval: {every_updates: 8, prompts: 4, final_prompts: 8}
pace: {update_s: 0.25}
"""


def start(folder: Path, *overrides: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "knittrans_jax.cli", "run", "resumed.yaml", *overrides, "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")},
    )


def wait_for_update(run: "subprocess.Popen[str]", folder: Path, update: int) -> None:
    """Until the run has told of that many updates."""
    deadline_s = time.monotonic() + 240
    metrics = folder / "runs" / "resumed" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < update:
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def trained_prompts(folder: Path) -> dict[int, collections.Counter[str]]:
    """How often each prompt was trained on, by epoch, in the final lineage."""
    leased: dict[int, tuple[int, str]] = {}
    plans: dict[int, list[int]] = {}
    found: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for event in final_lineage(read_log(folder / "events.log").events).events:
        match event:
            case ev.Leased():
                leased[event.group_id] = event.epoch, event.prompt_id
            case ev.Admitted():
                plans[event.plan.plan_id] = [group.group_id for group in event.plan.groups]
            case ev.Consumed():
                for epoch, prompt in map(leased.__getitem__, plans[event.plan_id]):
                    found[epoch][prompt] += 1
            case _:
                pass
    return found


def test_a_killed_run_is_gone_on_with_on_other_processes_and_trains_on_every_prompt_once_an_epoch(tmp_path: Path):
    (tmp_path / "resumed.yaml").write_text(CONFIG)
    run, folder = start(tmp_path), tmp_path / "runs" / "resumed"
    wait_for_update(run, tmp_path, 11)  # the newest checkpoint is of version 8, or of 4 if its seal is not there yet
    run.kill()
    run.communicate()
    resumed = start(tmp_path, "resume=true", "train.processes=1", "train.mesh={data: 1}")
    output, errors = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, errors
    assert "goes on with the run in" in errors
    summary = json.loads(output)
    assert summary["ended"] == "finished"
    assert (summary["updates"], summary["train_steps"]) == (22, 11)
    (resumption,) = summary["resumptions"]
    assert resumption["version"] in (4, 8)
    assert resumption["updates_discarded"] >= 11 - resumption["version"]
    assert summary["groups"]["consumed"] == 44
    assert summary["groups"]["lost"] == resumption["groups_discarded"] + resumption["groups_lost"]
    assert sum(summary["groups"].values()) == summary["groups_launched"]
    assert not summary["remainder"]

    config = load_config(folder / "config.yaml")
    every = collections.Counter(prompt.prompt_id for prompt in load_task(config.task, config.seed).prompts("train"))
    assert trained_prompts(folder) == {0: every, 1: every}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, 23))
    assert {path.name for path in (folder / "checkpoints").iterdir()} >= {"20", "22"}
    assert (folder / "logs.1" / "train1.log").exists()
    assert not (folder / "logs" / "train1.log").exists()

    finished = start(tmp_path, "resume=true", "train.processes=1", "train.mesh={data: 1}")
    _, errors = finished.communicate(timeout=60)
    assert finished.returncode == 2, errors
    assert "has finished" in errors
