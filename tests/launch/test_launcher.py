"""The launcher on roles that are small programs: folders, ends, and what it leaves on disk."""

import io
import json
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from knittrans_jax.config import Config, ConfigError, load_config, parse_config
from knittrans_jax.launch.environment import jax_environment, roles_of
from knittrans_jax.launch.launcher import RunFolder, RunResult, run
from knittrans_jax.launch.supervise import Role


def config(tmp_path: Path, **more: object) -> Config:
    return parse_config(
        {
            "name": "small",
            "run_dir": str(tmp_path / "runs"),
            "task": {"name": "digits-read"},
            "batch": {"groups": 8, "mini_batches": 2, "trajectories_per_group": 4},
            "launch": {"stop_timeout_s": 0.5},
            **more,
        }
    )


FINISHES = """
    import sys, pathlib
    from knittrans_jax.admission.events import RunEnded, RunStarted
    from knittrans_jax.admission.log import EventLog
    with EventLog(pathlib.Path(sys.argv[1]) / "events.log") as log:
        log.append([RunStarted(time_s=1.0, config={}), RunEnded(time_s=3.5, reason="finished")])
"""


def launch(one: Config, *programs: tuple[str, str]) -> tuple[RunResult, str]:
    console = Console(file=io.StringIO(), width=200)

    def make_roles(config: Config, config_file: Path) -> list[Role]:
        assert load_config(config_file) == config
        return [
            Role(name, (sys.executable, "-c", textwrap.dedent(program), str(config.directory)), essential=True)
            for name, program in programs
        ]

    result = run(one, console, make_roles)
    return result, console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_a_run_that_finishes_leaves_configuration_logs_metrics_and_summary(tmp_path: Path) -> None:
    result, _ = launch(config(tmp_path), ("scheduler", FINISHES))
    assert result.error is None
    folder = tmp_path / "runs" / "small"
    assert {"config.yaml", "events.log", "logs", "metrics.jsonl", "summary.json"} <= {p.name for p in folder.iterdir()}
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["ended"], summary["wall_s"], summary["updates"]) == ("finished", 2.5, 0)
    port = load_config(folder / "config.yaml").train.coordinator.rpartition(":")[2]
    assert int(port) > 0


def test_a_dead_role_fails_the_run_and_the_summary_says_so(tmp_path: Path) -> None:
    result, _ = launch(
        config(tmp_path), ("scheduler", "import time; time.sleep(60)"), ("train1", "raise SystemExit('no memory')")
    )
    assert result.error is not None
    assert "train1 died (exit status 1)" in result.error
    assert "| no memory" in result.error
    summary = json.loads((tmp_path / "runs" / "small" / "summary.json").read_text())
    assert summary["ended"] == "error: train1 died (exit status 1)"


def test_a_second_run_moves_the_first_aside_and_deletes_nothing(tmp_path: Path) -> None:
    outputs = []
    for _ in range(3):
        result, output = launch(config(tmp_path), ("scheduler", FINISHES))
        assert result.error is None
        outputs.append(output)
    runs = tmp_path / "runs"
    assert {path.name for path in runs.iterdir()} == {"small", "small.1", "small.2"}
    assert (runs / "small.1" / "summary.json").exists()
    assert f"moved to {runs / 'small.2'}" in outputs[2]


def test_a_run_under_way_is_not_touched(tmp_path: Path) -> None:
    one = config(tmp_path)
    with RunFolder(one), pytest.raises(ConfigError, match=r"^name: a run is under way"):
        launch(one, ("scheduler", FINISHES))
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"small"}


def test_every_role_is_started_once_with_its_own_environment(tmp_path: Path) -> None:
    one = config(tmp_path, rollout={"hosts": 2}, train={"devices_per_process": 2, "mesh": {"data": 4}})
    roles = roles_of(one, tmp_path / "config.yaml", cores=2, environment={})
    assert [role.name for role in roles] == [
        *("scheduler", "storage0", "storage1", "rollout0", "rollout1", "train0", "train1"),
    ]
    by_name = {role.name: role for role in roles}
    assert by_name["train1"].command[-2:] == ("--index", "1")
    assert by_name["train0"].environment["JAX_NUM_CPU_DEVICES"] == "2"
    assert by_name["rollout0"].environment["JAX_NUM_CPU_DEVICES"] == "1"
    assert "JAX_PLATFORMS" not in by_name["scheduler"].environment
    assert by_name["storage0"].environment["OMP_NUM_THREADS"] == "1"


def test_what_the_user_has_set_stays_and_forced_device_counts_go() -> None:
    own = jax_environment(
        "cpu",
        1,
        8,
        2,
        {"OMP_NUM_THREADS": "3", "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_dump_to=x"},
    )
    assert "OMP_NUM_THREADS" not in own
    assert own["XLA_FLAGS"] == "--xla_dump_to=x"
    assert own["NPROC"] == "4"
