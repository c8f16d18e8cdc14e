"""Workloads of the simulator: how long groups take, what the batch's rules ask of them, and what is dropped at completion.

What it guarantees:

* a workload run under a policy and a look-ahead is a whole, checked `Config`: rules, gate and policy are those of a live run;
* two runs with one seed launch the same groups: the i-th one launched of a kind has the same latency and the same fate under
  every policy and look-ahead, so what they differ by is their decisions;
* latencies are log-normal, given by their mean (not their median) and by sigma, the standard deviation of their logarithm.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.controller import Controller
from knittrans_jax.admission.gate import LookAhead, make_gate
from knittrans_jax.admission.policy import make_policy
from knittrans_jax.admission.prompts import PromptOrder
from knittrans_jax.admission.rules import Kind, Rules, rules_of
from knittrans_jax.admission.state import AdmissionState
from knittrans_jax.config import (
    Bound,
    Config,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    parse_config,
)
from knittrans_jax.simulate.engine import Flight, SimRun, Simulation, Timing

Publish = Literal["train_batch", "update"]
EVERYTHING = "all"
"""The value of a workload without domains."""


class Latency(Section, frozen=True):
    """A group's flight: log-normal with this mean, in seconds, and this standard deviation of its logarithm."""

    mean_s: PositiveFloat
    sigma: NonNegativeFloat = 0.6

    @property
    def mu(self) -> float:
        """The mean of the logarithm."""
        return math.log(self.mean_s) - self.sigma**2 / 2


class Workload(Section, frozen=True):
    """What is simulated. `latency` by value of the attribute that `domain` names; without one, that of `all`.

    `quotas` are the batch's, as in a run's `batch.quotas`; `dropped` is the share of a value's groups that a filter drops when
    they are complete. `slots` is how many groups are in the air at once at most; null: two train batches.
    """

    latency: dict[str, Latency]
    domain: str | None = None
    quotas: dict[str, dict[str, Bound]] = msgspec.field(default_factory=dict)
    dropped: dict[str, Fraction] = msgspec.field(default_factory=dict)
    slots: PositiveInt | None = None
    warm_up_batches: PositiveInt | None = None
    measured_batches: PositiveInt | None = None
    """In place of the pace's, for what takes long to simulate."""


class Pace(Section, frozen=True):
    """What all workloads share: the batch, the trainer's times in seconds, and how much is simulated and measured."""

    groups: PositiveInt
    mini_batches: PositiveInt
    train_s: PositiveFloat
    publish_s: NonNegativeFloat
    pull_s: NonNegativeFloat
    seeds: PositiveInt
    warm_up_batches: PositiveInt
    """Train batches before the measurement begins, under a fixed look-ahead."""
    measured_batches: PositiveInt
    auto_warm_up_batches: PositiveInt
    """The same under `auto`, which has to find its look-ahead first."""

    @property
    def ideal_step_s(self) -> float:
        """A train step of a trainer that never waits."""
        return self.mini_batches * self.train_s


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One setting's figures: means over seeds; `_sd` are standard deviations between seeds."""

    look_ahead: int | dict[str, int]
    look_ahead_groups: float
    """In all; under `auto`, the mean over the measured train batches."""
    step_time_s: float
    step_time_sd_s: float
    architectural_mean_updates: float
    architectural_sd_updates: float
    architectural_mean_train_steps: float
    trainer_idle_share: float
    launched_beyond: float
    filtered: float
    waits_s: dict[str, float]
    """Seconds that the free trainer waited for a mini-batch, of the whole run, by the rule and value that were short."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One thing to run: `look_ahead` as in `admission.look_ahead_groups`."""

    workload: Workload
    pace: Pace
    policy: str
    look_ahead: LookAhead


def universe(workload: Workload) -> list[dict[str, str]]:
    """Every combination of values that a prompt can have: the data set holds as many prompts of each."""
    values = {attribute: sorted(bounds) for attribute, bounds in workload.quotas.items()}
    if workload.domain is not None:
        values.setdefault(workload.domain, sorted(workload.latency))
    return [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]


def config_of(setting: Setting, publish: Publish = "update") -> Config:
    """The run that the setting stands for; raises `ConfigError` as a run's file would."""
    pace, workload = setting.pace, setting.workload
    look_ahead = dict(setting.look_ahead) if isinstance(setting.look_ahead, Mapping) else setting.look_ahead
    batches = _warm_up(setting) + _measured(setting)
    raw: dict[str, Any] = {
        "name": "simulated",
        "task": {"name": "simulated"},
        "batch": {
            "groups": pace.groups,
            "mini_batches": pace.mini_batches,
            "trajectories_per_group": 2,
            "quotas": msgspec.to_builtins(workload.quotas),
        },
        "admission": {"policy": setting.policy, "look_ahead_groups": look_ahead},
        "rollout": {"slots": 2 * (workload.slots or 2 * pace.groups), "in_flight": "trajectory"},
        # Two batches more than are simulated: the gate must not see the end coming.
        "train": {"updates": (batches + 2) * pace.mini_batches, "publish": publish},
    }
    return parse_config(raw)


def prompts_of(workload: Workload, groups: int) -> list[tuple[str, dict[str, str]]]:
    """(id, attributes) of the data set: enough of each combination that no kind runs out of idle prompts."""
    combinations = universe(workload)
    each = max(groups // 4, 4 * groups // len(combinations))
    return [(f"p{number}-{i}", attributes) for number, attributes in enumerate(combinations) for i in range(each)]


class LogNormalFlights:
    """Flights of a workload; see the module's opening."""

    def __init__(self, workload: Workload, rules: Rules, seed: int) -> None:
        self._workload, self._rules, self._seed = workload, rules, seed
        self._draws: dict[Kind, random.Random] = {}

    def __call__(self, leased: ev.Leased, now_s: float) -> Flight:
        """The flight of the next group of its kind."""
        del now_s
        workload = self._workload
        domain = EVERYTHING if workload.domain is None else leased.attributes[workload.domain]
        latency = workload.latency[domain]
        kind = self._rules.kind(leased.attributes)
        draw = self._draws.get(kind)
        if draw is None:
            draw = self._draws[kind] = random.Random(f"{self._seed}/{kind!r}")
        latency_s, fate = draw.lognormvariate(latency.mu, latency.sigma), draw.random()
        share = workload.dropped.get(domain, 0.0)
        return Flight(latency_s, dropped="the workload's filter" if fate < share else None)


def simulate_once(setting: Setting, seed: int, publish: Publish) -> SimRun:
    """One run of the real controller through the workload."""
    config, pace, workload = config_of(setting, publish), setting.pace, setting.workload
    prompts = prompts_of(workload, pace.groups)
    rules = rules_of(config, [attributes for _, attributes in prompts])
    controller = Controller(
        AdmissionState(rules),
        PromptOrder(rules, prompts, seed),
        make_policy(config.admission.policy, config.admission.schedule),
        make_gate(config, rules, 1),
        admit_ahead=config.admission.admit_ahead,
    )
    timing = Timing(
        train_s=lambda update: pace.train_s,
        pull_s=pace.pull_s,
        publish_s=pace.publish_s,
        publish=publish,
        slots=workload.slots or 2 * pace.groups,
    )
    updates = (_warm_up(setting) + _measured(setting)) * pace.mini_batches
    return Simulation(controller, timing, LogNormalFlights(workload, rules, seed), updates=updates).run()


def architectural_by_publish(run: SimRun, mini_batches: int) -> dict[Publish, np.ndarray]:
    """Architectural staleness of every trajectory of a run that publishes every update, and of its twin per train batch.

    Launches and admissions go by the train batches that are published, so both runs make the same decisions at the same times,
    and the twin's newest version is the newest one at a train batch's boundary: true as long as a version is on its way no
    longer than an update takes (`check_suite` sees to it).
    """
    per_update = np.array([one.architectural for one in run.staleness])
    versions = np.array(run.consumed_by) - np.array([one.gap for one in run.staleness])
    return {"update": per_update, "train_batch": per_update + versions % mini_batches}


def measure(setting: Setting, seeds: int | None = None) -> dict[Publish, Point]:
    """The setting's figures over `seeds` seeds (None: all of the pace's), by what is published when."""
    pace = setting.pace
    skip = _warm_up(setting)
    first = skip * pace.mini_batches
    count = pace.seeds if seeds is None else min(seeds, pace.seeds)
    stale: dict[Publish, list[float]] = {"train_batch": [], "update": []}
    step_s: list[float] = []
    others: list[tuple[float, float, float, float]] = []
    waits: dict[str, float] = {}
    for seed in range(count):
        run = simulate_once(setting, seed, "update")
        if run.stuck is not None:
            raise RuntimeError(f"the simulated run under {setting.policy} cannot go on: {run.stuck}")
        measured_s = run.updated_s[-1] - run.updated_s[first - 1]
        step_s.append(measured_s / _measured(setting))
        for publish, values in architectural_by_publish(run, pace.mini_batches).items():
            stale[publish].append(float(values[skip * pace.groups :].mean()))
        idle, ahead = sum(run.waited_s[first:]) / measured_s, float(np.mean(run.look_ahead[skip:]))
        others.append((idle, ahead, float(run.launched_beyond), float(run.filtered)))
        for reason, seconds in run.waits.items():
            waits[reason] = waits.get(reason, 0.0) + seconds / count
    idle, ahead, beyond, filtered = (float(x) for x in np.mean(others, axis=0))
    given = setting.look_ahead
    return {
        publish: Point(
            look_ahead=round(ahead) if given == "auto" else dict(given) if isinstance(given, Mapping) else given,
            look_ahead_groups=ahead,
            step_time_s=float(np.mean(step_s)),
            step_time_sd_s=float(np.std(step_s)),
            architectural_mean_updates=float(np.mean(stale[publish])),
            architectural_sd_updates=float(np.std(stale[publish])),
            architectural_mean_train_steps=float(np.mean(stale[publish])) / pace.mini_batches,
            trainer_idle_share=idle,
            launched_beyond=beyond,
            filtered=filtered,
            waits_s=dict(sorted(waits.items(), key=lambda item: -item[1])),
        )
        for publish in stale
    }


def _warm_up(setting: Setting) -> int:
    pace, workload = setting.pace, setting.workload
    if setting.look_ahead == "auto":
        return pace.auto_warm_up_batches
    return workload.warm_up_batches or pace.warm_up_batches


def _measured(setting: Setting) -> int:
    return setting.workload.measured_batches or setting.pace.measured_batches


def groups_by_domain(workload: Workload, pace: Pace) -> dict[str, int]:
    """Groups of each domain in the composition that the launch gate goes by."""
    if workload.domain is None:
        return {EVERYTHING: pace.groups}
    setting = Setting(workload, pace, "mini_batch", 0)
    rules = rules_for(config_of(setting), workload, pace)
    where = rules.prompt_attributes.index(workload.domain)
    counts = dict.fromkeys(workload.latency, 0)
    for kind, count in rules.composition.items():
        counts[kind[where]] += count
    return counts


def rules_for(config: Config, workload: Workload, pace: Pace) -> Rules:
    """The batch's rules, resolved for the workload's data set; raises `ConfigError`."""
    return rules_of(config, [attributes for _, attributes in prompts_of(workload, pace.groups)])


def sample_latencies(workload: Workload, domain: str, count: int, seed: int) -> np.ndarray:
    """[count] seconds from a place's first launch to a group that is kept: dropped flights count until one is not."""
    latency, rng = workload.latency[domain], np.random.default_rng(seed)
    share = workload.dropped.get(domain, 0.0)
    flights = rng.geometric(1.0 - share, count)
    draws = rng.lognormal(latency.mu, latency.sigma, (count, int(flights.max())))
    return np.where(np.arange(draws.shape[1]) < flights[:, None], draws, 0.0).sum(axis=1)
