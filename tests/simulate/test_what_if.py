"""What-if on a recorded run's folder: the run itself again, and what other settings would have made of it."""

import json
import random
from pathlib import Path

import msgspec
import pytest

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.controller import Controller
from knittrans_jax.admission.gate import LaunchGate
from knittrans_jax.admission.log import EventLog
from knittrans_jax.admission.policy import make_policy
from knittrans_jax.admission.prompts import PromptOrder
from knittrans_jax.admission.rules import rules_of
from knittrans_jax.admission.state import AdmissionState
from knittrans_jax.cli import DONE, WRONG_USE, main
from knittrans_jax.config import config_to_yaml, parse_config
from knittrans_jax.rollout.tasks.registry import load_task
from knittrans_jax.simulate.engine import TRAJECTORY, Flight, Simulation, Timing
from knittrans_jax.simulate.what_if import what_if

UPDATES = 32


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder, as a live scheduler would have left it: two trajectories a group, uneven flights and updates."""
    directory = tmp_path_factory.mktemp("run")
    config = parse_config(
        {
            "name": "recorded",
            "task": {"name": "digits-read"},
            "batch": {"groups": 16, "mini_batches": 4, "trajectories_per_group": 2},
            "admission": {"look_ahead_groups": 6},
            "rollout": {"in_flight": "trajectory"},
            "train": {"updates": UPDATES, "publish": "train_batch"},
        }
    )
    prompts = [(one.prompt_id, one.attributes) for one in load_task(config.task, config.seed).prompts("train")]
    rules = rules_of(config, [attributes for _, attributes in prompts])
    controller = Controller(
        AdmissionState(rules),
        PromptOrder(rules, prompts, config.seed),
        make_policy("mini_batch", "disaggregated"),
        LaunchGate(rules, 6, UPDATES // 4),
        admit_ahead=1,
    )
    rng, events = random.Random(5), []

    def flight(leased: ev.Leased, now_s: float) -> Flight:
        latency_s = 2.0 * rng.lognormvariate(0.0, 0.6)
        shares = (1.0, rng.random())
        return Flight(
            latency_s, members=tuple(msgspec.structs.replace(TRAJECTORY, finished_s=latency_s * s) for s in shares)
        )

    timing = Timing(
        train_s=lambda update: 1.0 + 0.1 * (update % 2), pull_s=0.0, publish_s=0.4, publish="train_batch", slots=32
    )
    Simulation(controller, timing, flight, updates=UPDATES, on_event=events.append).run()
    (directory / "config.yaml").write_text(config_to_yaml(config))
    with EventLog(directory / "events.log", fsync=False) as log:
        log.append(events)
    return directory


def test_with_nothing_changed_it_is_the_recorded_run_again(run: Path):
    answer = what_if(run, [])
    for side in ("replayed", "alternative"):
        for key in ("architectural_mean_updates", "gap_mean_updates", "step_time_s", "trainer_idle_share"):
            assert answer[side][key] == pytest.approx(answer["recorded"][key], rel=0.02, abs=0.02), (side, key)


def test_another_policy_on_the_same_completions_waits_longer(run: Path):
    answer = what_if(run, ["admission.policy=train_batch"])
    assert answer["alternative"]["step_time_s"] > 1.1 * answer["replayed"]["step_time_s"]


def test_more_look_ahead_makes_them_staler_and_the_trainer_wait_less(run: Path):
    answer = what_if(run, ["admission.look_ahead_groups=16"])
    assert answer["alternative"]["architectural_mean_updates"] > 1.5 * answer["replayed"]["architectural_mean_updates"]
    assert answer["alternative"]["trainer_idle_share"] < answer["replayed"]["trainer_idle_share"]


def test_the_command_prints_one_json_object_and_refuses_what_a_replay_cannot_show(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["what-if", str(run), "admission.policy=fifo", "--json"]) == DONE
    assert json.loads(capsys.readouterr().out).keys() >= {"recorded", "replayed", "alternative"}
    assert main(["what-if", str(run)]) == DONE
    assert "replayed as it was" in capsys.readouterr().out
    assert main(["what-if", str(run), "train.optimizer.learning_rate=1"]) == WRONG_USE
    assert "a replay would not notice it" in capsys.readouterr().err
    assert main(["what-if", str(tmp_path)]) == WRONG_USE
    assert "no run's folder" in capsys.readouterr().err
