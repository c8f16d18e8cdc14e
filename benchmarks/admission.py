"""`knittrans bench admission`: how many groups a second the controller takes from their completion to their consumption.

In a turn of the scheduler, groups become ready (an event each: made, folded into the state, appended to the log, which is
written once a turn and not forced to disk); then the policy is asked until it waits; what it chooses is admitted and, one
mini-batch later, consumed (both folded and appended). Laying out, the launch gate and the network are not part of it: a plan
states its groups and no placements. `whole life` has each group leased and started inside the clock too, two more events.

The instance is `cases/admission_speed.json`: 512 groups in 16 mini-batches, quotas on three attributes, completions skewed
against them. With one attribute its `domain` quotas are kept alone.

* `stream`: groups come by the instance's weights, so what the quotas have no place for piles up in the pool.
* `pools`: 1,000, 100,000 and 1,000,000 groups are ready before the clock starts, by the same weights; then as many of each kind
  come as are admitted, so the pool keeps its size. What a mini-batch lacks for want of a kind comes too, as the launch gate
  would see to.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import random
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.completion import Kind
from knittrans_jax.admission.completion_space import Space
from knittrans_jax.admission.log import EventLog
from knittrans_jax.admission.policy import MiniBatchPolicy, Waiting
from knittrans_jax.admission.rules import Rules, resolve
from knittrans_jax.admission.state import AdmissionState, Group, plan_without_layout
from knittrans_jax.benchmarks.harness import Figures, Report, Say, Side, measure
from knittrans_jax.benchmarks.registry import BenchSettings
from knittrans_jax.config import BatchConfig, Bound
from knittrans_jax.trajectory import GroupMeta, MiniBatchPlan, PlannedGroup, TrajectoryMeta

INSTANCE = Path(__file__).parent / "cases" / "admission_speed.json"
POOLS = (1_000, 100_000, 1_000_000)


class Settings(BenchSettings, frozen=True):
    """Sizes. `groups` of a measured run; `trajectories` a group; `arrivals` a turn; `pool_rounds` of the three pool sizes."""

    rounds: Annotated[int, msgspec.Meta(ge=1)] = 9
    groups: Annotated[int, msgspec.Meta(ge=512)] = 16_384
    trajectories: Annotated[int, msgspec.Meta(ge=1)] = 8
    arrivals: Annotated[int, msgspec.Meta(ge=1)] = 32
    pool_rounds: Annotated[int, msgspec.Meta(ge=1)] = 3
    pool_groups: Annotated[int, msgspec.Meta(ge=512)] = 8_192
    largest_pool: Annotated[int, msgspec.Meta(ge=1_000)] = POOLS[-1]


@dataclasses.dataclass(frozen=True)
class Instance:
    """The recorded instance under some of its attributes."""

    rules: Rules
    universe: list[dict[str, str]]
    weights: list[float]

    def kinds(self, count: int, seed: int) -> list[dict[str, str]]:
        """Attributes of groups as they complete."""
        return random.Random(seed).choices(self.universe, self.weights, k=count)


def load_instance(attributes: int) -> Instance:
    """The instance with the quotas of its first `attributes` attributes."""
    raw = json.loads(INSTANCE.read_text())
    quotas: dict[str, dict[str, Bound]] = {}
    for quota in raw["quotas"]:
        if quota["attribute"] in quotas or len(quotas) < attributes:
            bound = Bound(min=quota["min"], max=quota["max"])
            quotas.setdefault(quota["attribute"], {})[quota["value"]] = bound
    config = BatchConfig(
        groups=raw["groups"], mini_batches=raw["mini_batches"], trajectories_per_group=8, quotas=quotas
    )
    rules = resolve(config, [attributes for attributes in raw["universe"] for _ in range(raw["groups"])])
    return Instance(rules, raw["universe"], raw["arrival_weights"])


class Drive:
    """One state, one policy and one log, driven turn by turn."""

    def __init__(self, instance: Instance, trajectories: int, log: EventLog) -> None:
        self.state, self.policy, self.log = AdmissionState(instance.rules), MiniBatchPolicy(), log
        self.trajectories = tuple(
            TrajectoryMeta(
                length_tokens=900 + 10 * i,
                sampled_tokens=500 + 10 * i,
                reward=float(i % 2),
                version_min=1,
                version_max=1,
                version_sum=500 + 10 * i,
                turns=1,
                questions=1,
                exact=i % 2,
                media=(),
                started_s=1000.0 + i,
                finished_s=1010.0 + i,
                version_done=1,
            )
            for i in range(trajectories)
        )
        self.rewards = tuple(one.reward for one in self.trajectories)
        self.admitted = 0
        self._events: list[ev.AnyEvent] = []

    def emit(self, event: ev.AnyEvent) -> None:
        """Into the state, and into the log at the end of the turn."""
        self.state.apply(event)
        self._events.append(event)

    def launch(self, attributes: dict[str, str]) -> int:
        """Leases a group, which starts -> its id."""
        group_id = self.state.next_group_id
        self.emit(
            ev.Leased(
                time_s=1000.0,
                group_id=group_id,
                prompt_id=f"prompt-{group_id}",
                epoch=0,
                attributes=attributes,
                host="host0",
                version=1,
            )
        )
        self.emit(ev.Started(time_s=1001.0, group_id=group_id))
        return group_id

    def complete(self, group_id: int) -> None:
        """The group becomes ready."""
        meta = GroupMeta(
            group_id=group_id, unit="host0", trajectories=self.trajectories, media=(), payload_bytes=120_000
        )
        self.emit(ev.Ready(time_s=1010.0, group=meta, episode_retries=0))

    def forget(self) -> None:
        """What happened so far does not go into the log."""
        self._events.clear()

    def turn(self, most: int = sys.maxsize) -> list[Group]:
        """Admits up to `most` mini-batches, consumes what is beyond one ahead, writes the log -> the groups admitted."""
        state, admitted = self.state, list[Group]()
        while most:
            most -= 1
            choice = self.policy.next_mini_batch(state)
            if isinstance(choice, Waiting):
                break
            admitted += choice
            self.emit(ev.Admitted(time_s=1020.0, plan=_plan(state, choice, self.rewards)))
            if len(state.plans) > 1:
                plan_id, plan = next(iter(state.plans.items()))
                self.emit(
                    ev.Consumed(
                        time_s=1021.0,
                        plan_id=plan_id,
                        update=plan.update,
                        metrics={"loss": 0.1},
                        waits_s={"data": 0.0, "groups": 0.0},
                        pulled_bytes=1,
                        unique_bytes=1,
                        compilations=0,
                    )
                )
        self.log.append(self._events)
        self._events.clear()
        self.admitted += len(admitted)
        return admitted


def _plan(state: AdmissionState, groups: tuple[Group, ...], rewards: tuple[float, ...]) -> MiniBatchPlan:
    """A plan that states its groups; the layout is the transfer's."""
    planned = [
        PlannedGroup(group_id=group.group_id, unit=group.host, rewards=rewards, payload_bytes=120_000)
        for group in groups
    ]
    return plan_without_layout(state, planned)


def bench(settings: Settings, say: Say) -> Report:
    """Runs it. Headline: groups a second and what the exact fallback cost; times are wall clock of one process."""
    instances = {1: load_instance(1), 3: load_instance(3)}
    fallback = Fallback()
    with tempfile.TemporaryDirectory() as folder:
        logs = _logs(Path(folder))
        say("streams of completions")
        streams = measure(
            "stream",
            {
                f"{_name(attributes)}{', whole life' if whole else ''}": _stream_side(
                    attributes, whole, settings, logs, fallback
                )
                for attributes in (1, 3)
                for whole in (False, True)
            },
            rounds=settings.rounds,
            say=say,
        )
        tables, ratios = [streams], dict[int, float]()
        sizes = sorted({min(size, settings.largest_pool) for size in POOLS})
        for attributes in (1, 3):
            sides = {f"{size:,} ready": _pool_side(instances[attributes], size, settings, logs) for size in sizes}
            rounds = settings.pool_rounds
            table = measure(f"pools, {_name(attributes)}", sides, rounds=rounds, warm_up=False, say=say)
            tables.append(table)
            least, most = (f"{sizes[i]:,} ready" for i in (0, -1))
            ratios[attributes] = table.median(most, "us_per_group") / table.median(least, "us_per_group")
        memory = _bytes_per_ready_group(instances[3], settings, logs)
    return Report(
        tables=tables,
        headline={
            "groups_per_s_1_attribute": streams.median(_name(1), "groups_per_s"),
            "groups_per_s_3_attributes": streams.median(_name(3), "groups_per_s"),
            "groups_per_s_1_attribute_whole_life": streams.median(f"{_name(1)}, whole life", "groups_per_s"),
            "groups_per_s_3_attributes_whole_life": streams.median(f"{_name(3)}, whole life", "groups_per_s"),
            "ratio_1m_over_1k": max(ratios.values()),
            "ratio_1m_over_1k_1_attribute": ratios[1],
            "ratio_1m_over_1k_3_attributes": ratios[3],
            "fallback_share": fallback.calls / max(1, fallback.asked),
            "fallback_p99_ms": 1000 * float(np.percentile(fallback.seconds, 99)) if fallback.seconds else 0.0,
            "fallback_calls_per_1000_groups": 1000 * fallback.calls / max(1, fallback.groups),
            "bytes_per_ready_group": memory,
            "trajectories_per_group": settings.trajectories,
        },
        notes=[
            "groups_per_s: from ready to consumed, fold and log append included; whole life: leased and started too",
            "fallback_share: calls of the solver over questions whether a kind may be taken, three attributes",
            "log not forced to disk; wall clock of one process, with whatever else this machine does",
        ],
    )


@dataclasses.dataclass
class Fallback:
    """What the exact fallback did in all measured streams."""

    calls: int = 0
    asked: int = 0
    groups: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)

    def add(self, space: Space, groups: int) -> None:
        """A stream's, which admitted so many groups."""
        self.calls += len(space.solved_s)
        self.asked += space.asked
        self.groups += groups
        self.seconds += space.solved_s


def _name(attributes: int) -> str:
    return f"{attributes} attribute{'s' if attributes > 1 else ''}"


def _stream_side(
    attributes: int, whole_life: bool, settings: Settings, logs: Iterator[EventLog], fallback: Fallback
) -> Side:
    def run(index: int) -> Figures:
        instance = load_instance(attributes)  # anew: nothing is remembered of earlier rounds
        kinds = instance.kinds(settings.groups, seed=index)
        with next(logs) as log:
            drive = Drive(instance, settings.trajectories, log)
            launched = [] if whole_life else [drive.launch(one) for one in kinds]
            drive.forget()
            gc.collect()
            began_s = time.perf_counter()
            for start in range(0, settings.groups, settings.arrivals):
                end = start + settings.arrivals
                for group_id in map(drive.launch, kinds[start:end]) if whole_life else launched[start:end]:
                    drive.complete(group_id)
                drive.turn()
            took_s = time.perf_counter() - began_s
            size_bytes = log.size_bytes
        if attributes > 1:
            fallback.add(instance.rules.space, drive.admitted)
        return {
            "groups_per_s": settings.groups / took_s,
            "admitted_share": drive.admitted / settings.groups,
            "log_bytes_per_group": size_bytes / settings.groups,
        }

    return run


def _logs(folder: Path) -> Iterator[EventLog]:
    number = 0
    while True:
        yield EventLog(folder / f"{number}.log", fsync=False)
        (folder / f"{number}.log").unlink()
        number += 1


def _pool_side(instance: Instance, size: int, settings: Settings, logs: Iterator[EventLog]) -> Side:
    """Time per group at a pool of this size, which stays as large: what is admitted is replaced by its like."""
    names = instance.rules.prompt_attributes

    def arrive(drive: Drive, kind: Kind) -> None:
        drive.complete(drive.launch(dict(zip(names, kind, strict=True))))

    def run(index: int) -> Figures:
        with next(logs) as log:
            drive = Drive(instance, settings.trajectories, log)
            for one in instance.kinds(size, seed=index):
                drive.complete(drive.launch(one))
                drive.forget()
            gc.collect()
            done = extra = 0
            began_s = time.perf_counter()
            while done < settings.pool_groups:
                admitted = drive.turn(most=1)
                for group in admitted:
                    arrive(drive, group.kind)
                if not admitted:
                    waiting = drive.policy.next_mini_batch(drive.state)
                    assert isinstance(waiting, Waiting)
                    for kind in waiting.kinds[: waiting.missing]:
                        arrive(drive, kind)
                        extra += 1
                done += len(admitted)
            took_s = time.perf_counter() - began_s
            return {"us_per_group": 1e6 * took_s / done, "extra_share": extra / done}

    return run


def _bytes_per_ready_group(instance: Instance, settings: Settings, logs: Iterator[EventLog]) -> float:
    """Memory of a ready group, its description included, over 2,000 of them."""
    count = 2_000
    with next(logs) as log:
        drive = Drive(instance, settings.trajectories, log)
        kinds = instance.kinds(count, seed=0)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for one in kinds:
            drive.trajectories = tuple(msgspec.structs.replace(trajectory) for trajectory in drive.trajectories)
            drive.complete(drive.launch(dict(one)))
            drive.forget()
        after = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    return (after - before) / count
