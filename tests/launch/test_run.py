"""`knittrans run` with all its real processes, small: it adds up, and an interrupted or failed run leaves nothing."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from knittrans_jax.admission.events import Admitted, RoleReport
from knittrans_jax.admission.log import read_log
from knittrans_jax.config import load_config
from knittrans_jax.rollout.tasks.registry import load_task
from knittrans_jax.train.advantages import group_advantages
from knittrans_jax.train.bad_numbers import load_mini_batch
from knittrans_jax.train.setup import pack_spec
from knittrans_jax.trajectory import media_digest
from knittrans_jax.transfer.pack import pack_chunk
from knittrans_jax.transfer.weights import WeightReader

from .test_supervise import children_of, gone

CONFIG = """
name: small
task: {name: digits-read, options: {digits: 1, train_prompts: 64, heldout_prompts: 8}}
batch:
  groups: 4
  mini_batches: 2
  trajectories_per_group: 2
  quotas: {domain: {even: {min: 0.5, max: 0.5}, odd: {min: 0.5, max: 0.5}}}
admission: {look_ahead_groups: 2}
rollout: {slots: 8, cache_tokens: 16, max_answer_tokens: 3}
train: {updates: 6, row_tokens: 32, micro_batch_rows: 2, encoder_row_patches: 8}
eval: {every_updates: 4, prompts: 4, final_prompts: 8}
observe: {prometheus_port: 0}
"""


@pytest.fixture
def run(tmp_path: Path) -> "subprocess.Popen[str]":
    (tmp_path / "small.yaml").write_text(CONFIG)
    return subprocess.Popen(
        [sys.executable, "-m", "knittrans_jax.cli", "run", "small.yaml", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_it_trains(run: "subprocess.Popen[str]", tmp_path: Path) -> dict[str, int]:
    """Process ids by role, once version 0 is published: all roles are up and work."""
    weights = tmp_path / "runs" / "small" / "weights"
    deadline_s = time.monotonic() + 120
    while not weights.exists() or not any(weights.iterdir()):
        assert run.poll() is None, run.communicate()[1]
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    roles = {}
    for pid in children_of(run.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        roles["".join([words[3], *words[-2:-1]]) if "--index" in words else words[3]] = pid
    return roles


@pytest.mark.newest
@pytest.mark.slow
def test_a_run_finishes_with_one_json_object_that_adds_up(run: "subprocess.Popen[str]", tmp_path: Path) -> None:
    output, errors = run.communicate(timeout=240)
    assert run.returncode == 0, errors
    summary = json.loads(output)
    assert summary == json.loads((tmp_path / "runs" / "small" / "summary.json").read_text())
    assert (summary["ended"], summary["updates"], summary["train_steps"]) == ("finished", 6, 3)
    assert sum(summary["groups"].values()) == summary["groups_launched"] >= summary["groups"]["consumed"] == 12
    assert summary["bytes"]["payload_through_scheduler"] == 0
    assert summary["bytes"]["payload_pulled"] == summary["bytes"]["payload_unique"] > 0
    assert summary["heldout_questions"] == 8
    assert summary["encoder"]["images_referenced"] == 2 * summary["encoder"]["images_unique"]
    assert summary["logprob_mismatch"] < 1e-4
    folder = tmp_path / "runs" / "small"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(sum(line["accounts"].values()) >= line["accounts"]["consumed"] == 2 * line["update"] for line in lines)
    assert all(line["composition"] == {"domain": {"even": 1, "odd": 1}} for line in lines[::2])
    assert (folder / "logs" / "scheduler.log").read_text().startswith("Prometheus: http://127.0.0.1:")
    assert_pages_are_those_of_the_log(folder, summary)


def assert_pages_are_those_of_the_log(folder: Path, summary: dict) -> None:
    """`report.html` and `trace.json` are there, say what the summary says, and come out the same from the log."""
    page, trace = (folder / "report.html").read_bytes(), (folder / "trace.json").read_bytes()
    assert f"They add up: {summary['groups_launched']} groups were launched".encode() in page
    assert b"http" not in page
    slices = [one for one in json.loads(trace)["traceEvents"] if one["ph"] == "X"]
    assert sum(one["name"] == "admitted" for one in slices) == summary["groups"]["consumed"]
    assert sum(one["name"].startswith("update ") for one in slices) == summary["updates"]
    assert sum(one["name"].startswith("version ") for one in slices) >= len(summary["heldout"])
    read = [sys.executable, "-m", "knittrans_jax.cli", "report", str(folder), "--json"]
    again = subprocess.run(read, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(again.stdout)["summary"] == summary
    assert ((folder / "report.html").read_bytes(), (folder / "trace.json").read_bytes()) == (page, trace)


@pytest.mark.slow
def test_ctrl_c_ends_every_process_within_five_seconds(run: "subprocess.Popen[str]", tmp_path: Path) -> None:
    roles = wait_until_it_trains(run, tmp_path)
    assert len(roles) == 5
    began_s = time.monotonic()
    run.send_signal(signal.SIGINT)
    output, errors = run.communicate(timeout=30)
    assert time.monotonic() - began_s < 5
    assert run.returncode == 1
    assert json.loads(output)["ended"] == "interrupted"
    assert "interrupted by SIGINT" in errors
    assert b"interrupted" in (tmp_path / "runs" / "small" / "report.html").read_bytes()
    assert gone(list(roles.values()))


@pytest.mark.slow
def test_a_killed_role_ends_the_run_and_is_named(run: "subprocess.Popen[str]", tmp_path: Path) -> None:
    roles = wait_until_it_trains(run, tmp_path)
    os.kill(roles["storage0"], signal.SIGKILL)
    output, errors = run.communicate(timeout=30)
    assert run.returncode == 1
    assert "storage0 died (signal SIGKILL)" in errors
    assert json.loads(output)["ended"] == "error: storage0 died (signal SIGKILL)"
    assert b"error: storage0 died (signal SIGKILL)" in (tmp_path / "runs" / "small" / "report.html").read_bytes()
    assert gone(list(roles.values()))


COLOCATED = """
name: lockstep
task: {name: my_task.py:Echo, options: {repeat: 2}}
batch: {groups: 2, mini_batches: 2, trajectories_per_group: 2}
admission: {schedule: colocated}
rollout: {slots: 4, cache_tokens: 24, max_answer_tokens: 7, storage_on_disk: true}
weights: {transfer: bulk}
train: {updates: 4, publish: train_batch, row_tokens: 32, micro_batch_rows: 1, transfer: gather, encoder_mode: auto}
eval: {every_updates: 4, prompts: 2, final_prompts: 3}
"""


@pytest.mark.slow
def test_a_users_own_text_task_runs_in_lock_step_without_architectural_staleness(tmp_path: Path) -> None:
    """Also: no images, so no encoder program runs; the roles follow a task named by file in the configuration; and process 0
    gathers all payloads and passes them on; weights come from the training processes' memory, payloads lie on disk."""
    (tmp_path / "lockstep.yaml").write_text(COLOCATED)
    (tmp_path / "my_task.py").write_text((Path(__file__).parents[1] / "rollout" / "my_task.py").read_text())
    run = subprocess.run(
        [sys.executable, "-m", "knittrans_jax.cli", "run", "lockstep.yaml", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout)
    assert (summary["ended"], summary["updates"], summary["trajectories"]) == ("finished", 4, 8)
    architectural = summary["staleness"]["architectural"]
    assert (architectural["mean"], architectural["p50"], architectural["p95"], architectural["max"]) == (0, 0, 0, 0)
    assert summary["staleness"]["gap"]["max"] == 1  # mini-batch 1 of each train batch is trained one update later
    assert summary["encoder"]["images_referenced"] == 0
    assert not (tmp_path / "runs" / "lockstep" / "weights").exists()
    assert_every_training_process_served_its_shards(tmp_path / "runs" / "lockstep")
    assert (
        summary["bytes"]["payload_pulled"] == summary["bytes"]["payload_relayed"] == summary["bytes"]["payload_unique"]
    )
    assert summary["logprob_mismatch"] < 1e-4


def assert_every_training_process_served_its_shards(folder: Path) -> None:
    events = read_log(folder / "events.log").events
    reports = {event.role: event.counters for event in events if isinstance(event, RoleReport)}
    served = [reports[f"train{process}"]["weight_served_bytes"] for process in range(2)]
    assert min(served) > 0  # parameters are replicated, and shared out
    assert sum(served) == reports["rollout-host0"]["weights_pulled_bytes"] > 0
    assert reports["rollout-host0"]["weights_sources_failed"] == 0
    assert reports["scheduler"]["weights_from_training"] == reports["rollout-host0"]["weights_brought"]


@pytest.mark.slow
def test_bad_numbers_end_the_run_and_their_mini_batch_can_be_loaded_and_packed(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(CONFIG)
    settings = (
        "train.processes=1",
        "train.mesh.data=1",
        "train.objective.entropy_bonus=1.0e+39",
        "eval.every_updates=6",
    )
    run = subprocess.run(
        [sys.executable, "-m", "knittrans_jax.cli", "run", "small.yaml", *settings],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 1
    assert "BadNumbersError: update 1 (plan 0, from version 0): loss is -inf and grad_norm is nan" in run.stderr
    assert "kept in runs/small/nonfinite/update-0;" in run.stderr
    folder = tmp_path / "runs" / "small"
    kept = load_mini_batch(folder / "nonfinite" / "update-0")
    assert next(e.plan for e in read_log(folder / "events.log").events if isinstance(e, Admitted)) == kept.plan
    assert kept.figures["loss"] is kept.figures["grad_norm"] is None
    assert {media_digest(image) for image in kept.payload.media.values()} == {one.digest for one in kept.plan.images}
    config = load_config(tmp_path / "small.yaml")
    spec = pack_spec(config, load_task(config.task, config.seed))
    advantages = functools.partial(group_advantages, normalise=True)
    trajectories, rows = kept.payload.trajectories, range(kept.plan.shards * kept.plan.rows_per_micro_batch)
    packed = [pack_chunk(kept.plan, chunk, rows, trajectories, advantages, spec) for chunk in range(kept.plan.chunks)]
    assert sum(int(chunk.sampled.sum()) for chunk in packed) == kept.plan.sampled_tokens > 0
    weights = WeightReader(folder / "nonfinite" / "update-0" / "weights").read(0)
    initial = WeightReader(folder / "weights").read(0)
    assert weights.keys() == initial.keys()
    assert all(np.array_equal(weights[name], initial[name]) for name in initial)
