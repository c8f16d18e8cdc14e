"""`on_child_death: recover` with real processes: a training process is killed, its group begins again, nothing is lost."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.log import read_log

from .test_resume import CONFIG, start, trained_prompts, wait_for_update
from .test_supervise import children_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def training_processes(launcher: int) -> list[int]:
    """Process ids of the run's training processes."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children_of(launcher)}
    return [pid for pid, words in commands.items() if b"train" in words]


@pytest.mark.parametrize(
    "more", [(), ("control.tls=true", "weights.transfer=bulk")], ids=["files", "tls, bulk weights"]
)
def test_a_killed_training_process_costs_time_only(more: tuple[str, ...], tmp_path: Path):
    (tmp_path / "resumed.yaml").write_text(CONFIG)
    short = ("train.updates=10", "train.epochs=null", "checkpoint.every_train_batches=1", "pace.update_s=0.1", *more)
    run, folder = start(tmp_path, "launch.on_child_death=recover", *short), tmp_path / "runs" / "resumed"
    wait_for_update(run, tmp_path, 7)  # the newest whole checkpoint is of an earlier version
    (killed, *_) = training_processes(run.pid)
    os.kill(killed, signal.SIGKILL)
    began_s = time.monotonic()
    output, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    assert "train begins again" in errors
    assert time.monotonic() - began_s < 300
    summary = json.loads(output)
    assert summary["ended"] == "finished"
    assert summary["updates"] == 10
    assert summary["groups"]["consumed"] == 20
    assert summary["groups"]["lost"] == 0
    assert not summary["resumptions"]

    events = read_log(folder / "events.log").events
    assert [event.update for event in events if isinstance(event, ev.Consumed)] == list(range(10))
    versions = [event.version for event in events if isinstance(event, ev.Published)]
    assert versions == sorted(set(versions))
    first, second = (event for event in events if isinstance(event, ev.TrainGroupFormed))
    assert (first.incarnation, second.incarnation) == (0, 1)
    assert second.version in (0, 2, 4, 6)
    assert second.lineage >= 7
    (report,) = (event for event in events if isinstance(event, ev.RoleReport) and event.role == "scheduler")
    assert report.counters["train_groups_died"] == 1
    assert report.counters["updates_repeated"] == second.repeated >= 1
    assert report.counters["updates_repeated_otherwise"] == 0
    assert set(trained_prompts(folder)[0].values()) == {1}
