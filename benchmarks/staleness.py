"""`knittrans bench staleness`: the four policies and lock step as real processes on one task, paced to one schedule.

1. A calibration run under `mini_batch`, with a whole batch of look-ahead, measures how long groups of each domain take.
2. Every policy's look-ahead is tuned on that recording by the simulator (`simulate/recorded.py`): per domain, as small as it
   can be while train steps stay within 1 % of what the policy reaches with a whole batch of look-ahead. All are tuned alike.
3. The sides run interleaved, each round with a seed of its own, `mini_batch` twice (the noise floor). Updates and sampler
   steps are paced (`pace`), so that every side has the same machine; the slow domain's tool is emulated by the task.
4. What is compared: architectural staleness, the time of a train step, the trainer's idle share, reward; the first train
   batches (`warm_up_train_steps`) are left out. Beside every run stands what the simulator says of it, given its own measured
   latencies.

In so few and small updates little is learned: the curves say that no side learns otherwise than another, not how well.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.log import read_log
from knittrans_jax.admission.rules import rules_of
from knittrans_jax.benchmarks.harness import BenchFailed, Figures, Measured, Report, Say, Side, measure
from knittrans_jax.benchmarks.registry import BenchSettings
from knittrans_jax.config import Config, load_config
from knittrans_jax.rollout.tasks.base import max_group_bytes
from knittrans_jax.rollout.tasks.registry import load_task
from knittrans_jax.simulate.engine import SimRun
from knittrans_jax.simulate.recorded import Prompts, Recording, record, replay
from knittrans_jax.staleness import staleness_of
from knittrans_jax.trajectory import GroupMeta, MiniBatchPlan

POLICIES = ("mini_batch", "train_batch", "proportional", "fifo")
LOOK_AHEADS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SLACK = 1.01
"""A tuned look-ahead makes train steps at most so much longer than a whole batch of it."""
CALIBRATION_TRAIN_STEPS = 4


class Settings(BenchSettings, frozen=True):
    """Sizes: `updates` a run in train batches of `mini_batches`; `rounds` are seeds."""

    config: str = "configs/mixed_quotas.yaml"
    run_dir: str = "runs/bench-staleness"
    rounds: Annotated[int, msgspec.Meta(ge=1)] = 3
    mini_batches: Annotated[int, msgspec.Meta(ge=1)] = 16
    train_steps: Annotated[int, msgspec.Meta(ge=2)] = 10
    warm_up_train_steps: Annotated[int, msgspec.Meta(ge=1)] = 2
    update_s: Annotated[float, msgspec.Meta(gt=0)] = 0.4
    sampler_step_s: Annotated[float, msgspec.Meta(ge=0)] = 0.03
    slots: Annotated[int, msgspec.Meta(ge=1)] = 512
    run_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    more: tuple[str, ...] = ()
    """Further `key=value` of the runs."""


@dataclasses.dataclass(frozen=True)
class Course:
    """What a run did after its warm-up, real or simulated."""

    step_time_s: float
    architectural_updates: float
    idle_share: float


@dataclasses.dataclass
class Told:
    """What one real run showed besides its figures."""

    measured: Course
    predicted: Course
    reward_by_train_step: list[float]
    heldout_exact: float


@dataclasses.dataclass(frozen=True)
class Bench:
    """The settings with what follows from them."""

    settings: Settings
    prompts: Prompts
    group_bytes: int

    @property
    def updates(self) -> int:
        """Of a measured run."""
        return self.settings.train_steps * self.settings.mini_batches

    def overrides(self, admission: Mapping[str, Any], *, updates: int, name: str, seed: int) -> list[str]:
        """`key=value` of a run."""
        s = self.settings
        return [
            f"name={name}",
            f"run_dir={s.run_dir}",
            f"seed={seed}",
            f"batch.mini_batches={s.mini_batches}",
            f"rollout.slots={s.slots}",
            "rollout.in_flight=swap",
            "train.publish=train_batch",
            f"train.updates={updates}",
            f"pace.update_s={s.update_s}",
            f"pace.sampler_step_s={s.sampler_step_s}",
            f"eval.every_updates={updates}",  # an evaluation on the way would hold a version
            *(f"admission.{key}={msgspec.json.encode(value).decode()}" for key, value in admission.items()),
            *s.more,
        ]

    def config(self, admission: Mapping[str, Any], seed: int = 0) -> Config:
        """The configuration of a measured run."""
        return load_config(self.settings.config, self.overrides(admission, updates=self.updates, name="x", seed=seed))

    def simulate(self, admission: Mapping[str, Any], recording: Recording, seed: int = 0) -> Course:
        """What the simulator makes of a recording under `admission`. Raises `BenchFailed` when it gets stuck."""
        config = self.config(admission, seed)
        run = replay(config, self.prompts, recording, group_bytes=self.group_bytes, updates=self.updates)
        if run.stuck is not None:
            raise BenchFailed(f"the simulator got stuck under {dict(admission)}: {run.stuck}")
        return self._course_of_simulation(run)

    def _course_of_simulation(self, run: SimRun) -> Course:
        architectural = np.array([one.architectural for one in run.staleness])
        return self.course(architectural, np.array(run.consumed_by), run.updated_s, run.waited_s)

    def course(
        self, architectural: np.ndarray, consumed_by: np.ndarray, updated_s: Sequence[float], waited_s: Sequence[float]
    ) -> Course:
        """Cuts the warm-up off.

        Args:
            architectural: float [T], of every trajectory.
            consumed_by: int [T], the update that consumed it.
            updated_s: when each update ended.
            waited_s: what the trainer waited before each.
        """
        s = self.settings
        first = s.warm_up_train_steps * s.mini_batches
        spent_s = updated_s[self.updates - 1] - updated_s[first - 1]
        return Course(
            step_time_s=spent_s / (s.train_steps - s.warm_up_train_steps),
            architectural_updates=float(architectural[consumed_by >= first].mean()),
            idle_share=sum(waited_s[first : self.updates]) / spent_s,
        )


def bench(settings: Settings, say: Say) -> Report:
    """Runs it. Headline: `sides[]`, `reduction_vs_train_batch`, `predictions[]`, `prediction_within`, `paired`."""
    first = load_config(settings.config)
    task = load_task(first.task, first.seed)
    prompts = [(prompt.prompt_id, prompt.attributes) for prompt in task.prompts("train")]
    n = first.batch.trajectories_per_group
    made = Bench(settings, prompts, max_group_bytes(task.limits, n, first.rollout.cache_tokens))
    domains = list(rules_of(first, [attributes for _, attributes in prompts]).quotas)
    say("calibration: how long groups take")
    whole = dict.fromkeys(domains, first.batch.groups) or first.batch.groups
    calibrated = {"policy": "mini_batch", "look_ahead_groups": whole}
    updates = CALIBRATION_TRAIN_STEPS * settings.mini_batches
    recording = record(_run(made, calibrated, updates=updates, name="calibration", seed=first.seed))
    admissions: dict[str, dict[str, Any]] = {}
    for policy in POLICIES:
        look_ahead = tune(made, policy, recording, domains, first.batch.groups)
        admissions[policy] = {"policy": policy, "look_ahead_groups": look_ahead}
        say(f"{policy}: look-ahead {look_ahead}")
    admissions["colocated"] = {"policy": "mini_batch", "schedule": "colocated", "look_ahead_groups": 0}
    told: dict[str, list[Told]] = {side: [] for side in admissions}

    def side(name: str) -> Side:
        def run(index: int) -> Figures:
            seed = first.seed + 1 + index
            events = _run(made, admissions[name], updates=made.updates, name=f"{name}-{seed}", seed=seed)
            one = _told(made, admissions[name], events, seed)
            told[name].append(one)
            return {
                "architectural_mean_updates": one.measured.architectural_updates,
                "step_time_s": one.measured.step_time_s,
                "trainer_idle_share": one.measured.idle_share,
                "reward_last_train_step": one.reward_by_train_step[-1],
                "heldout_exact": one.heldout_exact,
            }

        return run

    table = measure(
        "mixed quotas",
        {name: side(name) for name in admissions},
        rounds=settings.rounds,
        base="train_batch",
        twice="mini_batch",
        warm_up=False,  # the calibration was one, and a run's own warm-up is cut off
        say=say,
    )
    return Report(tables=[table], headline=_headline(made, table, admissions, told), notes=_notes(table))


def tune(made: Bench, policy: str, recording: Recording, domains: Sequence[str], groups: int) -> dict[str, int] | int:
    """The smallest look-ahead per domain that keeps train steps within `SLACK` of a whole batch of it.

    Domain by domain, the quickest to complete first, until nothing gets smaller.
    """

    def step_time_s(look_ahead: Any) -> float:
        return made.simulate({"policy": policy, "look_ahead_groups": look_ahead}, recording).step_time_s

    choices = [one for one in LOOK_AHEADS if one < groups] + [groups]
    if not domains:
        most_s = SLACK * step_time_s(groups)
        return next(one for one in choices if step_time_s(one) <= most_s)
    found = dict.fromkeys(domains, groups)
    most_s = SLACK * step_time_s(found)
    latency_s = {
        domain: statistics.median(
            flight.latency_s for attributes, flight in recording.flights if domain in attributes.values()
        )
        for domain in domains
    }
    while True:
        before = dict(found)
        for domain in sorted(domains, key=latency_s.__getitem__):
            smaller = [one for one in choices if one <= found[domain]]
            found[domain] = next(one for one in smaller if step_time_s(found | {domain: one}) <= most_s)
        if found == before:
            return found


def _run(made: Bench, admission: Mapping[str, Any], *, updates: int, name: str, seed: int) -> list[ev.AnyEvent]:
    """One real run -> its events. Raises `BenchFailed` with the run's own words."""
    s = made.settings
    overrides = made.overrides(admission, updates=updates, name=name, seed=seed)
    command = [sys.executable, "-m", "knittrans_jax.cli", "run", s.config, *overrides, "--json"]
    cache = Path(s.run_dir, "compiled").resolve()  # all sides run the same programs: compiled once
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=s.run_timeout_s)
    except subprocess.TimeoutExpired:
        raise BenchFailed(f"{name}: not done within run_timeout_s = {s.run_timeout_s:g} s") from None
    if done.returncode:
        raise BenchFailed(f"{name}: ended with {done.returncode}: {done.stderr[-2000:]}")
    return read_log(Path(s.run_dir, name, "events.log")).events


def _told(made: Bench, admission: Mapping[str, Any], events: Sequence[ev.AnyEvent], seed: int) -> Told:
    metas: dict[int, GroupMeta] = {}
    plans: dict[int, MiniBatchPlan] = {}
    architectural: list[float] = []
    consumed_by: list[int] = []
    updated_s: list[float] = []
    waited_s: list[float] = []
    rewards: list[float] = []
    exact = questions = 0
    for event in events:
        match event:
            case ev.Ready():
                metas[event.group.group_id] = event.group
            case ev.Admitted():
                plans[event.plan.plan_id] = event.plan
            case ev.Consumed():
                plan = plans[event.plan_id]
                for group in plan.groups:
                    for one in metas[group.group_id].trajectories:
                        found = staleness_of(one, version=event.update, mini_batch=plan.mini_batch)
                        architectural.append(found.architectural)
                        consumed_by.append(event.update)
                updated_s.append(event.time_s)
                waited_s.append(sum(event.waits_s.values()))
                rewards.append(event.metrics["reward_mean"])
            case ev.EvalDone():
                exact, questions = exact + event.exact, questions + event.questions
            case _:
                pass
    measured = made.course(np.array(architectural), np.array(consumed_by), updated_s, waited_s)
    by_step = np.array(rewards).reshape(-1, made.settings.mini_batches).mean(axis=1)
    return Told(
        measured=measured,
        predicted=made.simulate(admission, record(events), seed),
        reward_by_train_step=[round(float(one), 6) for one in by_step],
        heldout_exact=exact / questions,
    )


def _headline(
    made: Bench, table: Measured, admissions: Mapping[str, Mapping[str, Any]], told: Mapping[str, Sequence[Told]]
) -> dict[str, Any]:
    figure = "architectural_mean_updates"
    sides = [
        {
            "name": name,
            "look_ahead": admissions[name]["look_ahead_groups"],
            figure: table.median(name, figure),
            "architectural_mean_train_steps": table.median(name, figure) / made.settings.mini_batches,
            "step_time_s": table.median(name, "step_time_s"),
            "trainer_idle_share": table.median(name, "trainer_idle_share"),
            "heldout_exact": table.median(name, "heldout_exact"),
            "reward_by_train_step": np.mean([one.reward_by_train_step for one in runs], axis=0).round(6).tolist(),
        }
        for name, runs in told.items()
    ]
    predictions = [
        {
            "side": name,
            "measured_updates": one.measured.architectural_updates,
            "predicted_updates": one.predicted.architectural_updates,
            "measured_step_time_s": one.measured.step_time_s,
            "predicted_step_time_s": one.predicted.step_time_s,
            "within": within(one.measured.architectural_updates, one.predicted.architectural_updates),
        }
        for name, runs in told.items()
        for one in runs
    ]
    ours, theirs = table.median("mini_batch", figure), table.median("train_batch", figure)
    return {
        "reduction_vs_train_batch": 1 - ours / theirs if theirs > 0 else None,
        "step_time_over_train_batch": table.median("mini_batch", "step_time_s")
        / table.median("train_batch", "step_time_s"),
        "prediction_within": all(one["within"] for one in predictions),
        "sides": sides,
        "predictions": predictions,
    }


def within(measured: float, predicted: float) -> bool:
    """Whether a prediction of architectural staleness is good: within 15 % or 0.25 updates, whichever is larger."""
    return abs(predicted - measured) <= max(0.15 * abs(measured), 0.25)


def _notes(table: Measured) -> list[str]:
    idle = table.median("colocated", "trainer_idle_share")
    return [
        "updates and sampler steps are paced, and the slow domain's tool is emulated",
        f"in lock step the trainer idles {idle:.0%} of the time: that is what look-ahead is for",
    ]
