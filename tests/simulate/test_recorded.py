"""A recording is what happened: replayed as it was, it gives the same run; under another policy, what that policy would do."""

import random

import msgspec
import numpy as np
import pytest

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.controller import Controller
from knittrans_jax.admission.gate import LaunchGate
from knittrans_jax.admission.policy import make_policy
from knittrans_jax.admission.prompts import PromptOrder
from knittrans_jax.admission.rules import rules_of
from knittrans_jax.admission.state import AdmissionState
from knittrans_jax.config import Config, parse_config
from knittrans_jax.simulate.engine import TRAJECTORY, Flight, SimRun, Simulation, Timing
from knittrans_jax.simulate.recorded import NothingRecorded, Recording, record, replay

UPDATES, GROUP_BYTES = 48, 1000
PROMPTS = [(f"{domain}{i}", {"domain": domain}) for domain in ("quick", "slow") for i in range(300)]
LATENCY_S = {"quick": 2.0, "slow": 9.0}


def config(policy: str = "mini_batch", look_ahead: int = 4) -> Config:
    half = {"min": 0.5, "max": 0.5}
    return parse_config(
        {
            "name": "recorded",
            "task": {"name": "digits-read"},
            "batch": {
                "groups": 16,
                "mini_batches": 8,
                "trajectories_per_group": 2,
                "quotas": {"domain": {"quick": half, "slow": half}},
            },
            "admission": {"policy": policy, "look_ahead_groups": look_ahead},
            "rollout": {"in_flight": "swap"},
            "train": {"updates": UPDATES, "publish": "train_batch"},
        }
    )


def flight(rng: random.Random, domain: str) -> Flight:
    """The second trajectory ends in the middle; a tenth of the groups fail."""
    latency_s = LATENCY_S[domain] * rng.lognormvariate(0.0, 0.5)
    members = tuple(msgspec.structs.replace(TRAJECTORY, finished_s=latency_s * share) for share in (1.0, 0.5))
    return Flight(latency_s, fails="gave up" if rng.random() < 0.1 else None, members=members)


def run_once() -> tuple[SimRun, list[ev.AnyEvent]]:
    made = config()
    rules = rules_of(made, [attributes for _, attributes in PROMPTS])
    controller = Controller(
        AdmissionState(rules),
        PromptOrder(rules, PROMPTS, made.seed),
        make_policy("mini_batch", "disaggregated"),
        LaunchGate(rules, 4, UPDATES // 8),
        admit_ahead=1,
    )
    rng, events = random.Random(1), []
    timing = Timing(
        train_s=lambda update: 1.0 + 0.1 * (update % 3),
        pull_s=0.0,
        publish_s=0.5,
        publish="train_batch",
        slots=32,
        in_flight="swap",
    )
    simulation = Simulation(
        controller,
        timing,
        lambda leased, now_s: flight(rng, leased.attributes["domain"]),
        updates=UPDATES,
        on_event=events.append,
    )
    return simulation.run(), events


def again(recording: Recording, policy: str = "mini_batch", look_ahead: int = 4) -> SimRun:
    return replay(config(policy, look_ahead), PROMPTS, recording, group_bytes=GROUP_BYTES, updates=UPDATES)


def architectural(run: SimRun) -> float:
    return float(np.mean([staleness.architectural for staleness in run.staleness]))


def test_a_recording_replayed_as_it_was_gives_the_same_run():
    recorded, events = run_once()
    replayed = again(record(events))
    assert replayed.stuck is None
    assert replayed.updated_s == pytest.approx(recorded.updated_s)
    assert architectural(replayed) == pytest.approx(architectural(recorded), abs=1e-6)


def test_a_recording_replayed_under_whole_batch_admission_is_staler_or_slower():
    recorded, events = run_once()
    whole = again(record(events), "train_batch", 4)
    ahead = again(record(events), "train_batch", 16)
    assert whole.updated_s[-1] > recorded.updated_s[-1]
    assert architectural(ahead) > architectural(recorded)


def test_a_flight_begins_when_its_host_says_so_and_not_when_the_scheduler_hears_of_it():
    _, events = run_once()
    late = [
        msgspec.structs.replace(event, time_s=event.time_s + 0.3) if isinstance(event, ev.Started) else event
        for event in events
    ]
    whole = [found for _, found in record(events).flights if found.fails is None]
    heard = [found for _, found in record(late).flights if found.fails is None]
    assert [one.latency_s for one in heard] == [one.latency_s for one in whole]


def test_a_log_without_an_update_cannot_be_replayed():
    _, events = run_once()
    with pytest.raises(NothingRecorded, match="0 updates"):
        record(event for event in events if not isinstance(event, ev.Consumed))
