"""A discrete-event model of rollout slots and a trainer around the real admission controller.

What happens, in virtual seconds:

1. wherever a slot is free, the controller is asked what to launch (launch gate, prompt order); a group occupies its slot for
   its latency, sampled by the version that is published when it starts (`trajectory`), or by whatever is published at each
   moment (`swap`); then its payload is stored and it is `Ready`, and the batch's filter, or the workload's, may drop it;
2. wherever a mini-batch may be admitted ahead, the controller is asked for one (policy, rules); its payload is pulled in
   `pull_s`, while the trainer computes;
3. the trainer takes plans in order, `train_s` each; after an update (`publish: update`) or a train batch (`train_batch`) the
   weights are on their way for `publish_s`, one version at a time, the newest first; the trainer does not wait for that.

The controller sees nothing but the events that a live scheduler would write: every decision is made by the code that runs
live (`admission.controller`), and this module makes none.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.controller import Controller
from knittrans_jax.admission.policy import Waiting, hopeless
from knittrans_jax.admission.state import plan_without_layout
from knittrans_jax.staleness import Staleness, staleness_of
from knittrans_jax.trajectory import GroupMeta, MiniBatchPlan, PlannedGroup, TrajectoryMeta

UNIT_TOKENS = 1 << 20
"""Sampled tokens of a simulated trajectory: how finely its mean version is resolved."""
HOST = "rollout0"
TRAJECTORY = TrajectoryMeta(
    length_tokens=UNIT_TOKENS,
    sampled_tokens=UNIT_TOKENS,
    reward=0.5,
    version_min=0,
    version_max=0,
    version_sum=0,
    turns=1,
    questions=1,
    exact=0,
    media=(),
    started_s=0.0,
    finished_s=math.inf,
    version_done=0,
)
"""A trajectory that is in flight as long as its group."""


@dataclasses.dataclass(frozen=True)
class Flight:
    """What one launched group will turn out to be."""

    latency_s: float
    dropped: str | None = None
    """Why the workload has it dropped at completion, besides the batch's own filter; None: it has not."""
    fails: str | None = None
    """Why the host gives it up at completion; None: it does not."""
    members: tuple[TrajectoryMeta, ...] = (TRAJECTORY,)
    """Its trajectories, with times since the group's start (none ends after the group); their versions are not read."""


class Flights(Protocol):
    """Says what becomes of each launched group; called once per group, in the order of launches."""

    def __call__(self, leased: ev.Leased, now_s: float) -> Flight:
        """The flight of a group leased now."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """The model's constants, in seconds. `train_s(update)` is the time of one mini-batch."""

    train_s: Callable[[int], float]
    pull_s: float
    publish_s: float
    publish: Literal["update", "train_batch"]
    slots: int
    in_flight: Literal["trajectory", "swap"] = "trajectory"


@dataclasses.dataclass
class SimRun:
    """What a simulated run did. Rows are per trajectory, in the order of consumption."""

    staleness: list[Staleness] = dataclasses.field(default_factory=list)
    consumed_by: list[int] = dataclasses.field(default_factory=list)
    """The update that consumed the trajectory of the same row."""
    kinds: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    updated_s: list[float] = dataclasses.field(default_factory=list)
    """When each update ended."""
    waited_s: list[float] = dataclasses.field(default_factory=list)
    """What the trainer waited before each update."""
    waits: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds without a mini-batch while the trainer was free, by the rule and value that were short when the wait began."""
    look_ahead: list[int] = dataclasses.field(default_factory=list)
    """Look-ahead in groups at the end of each train batch."""
    launched_beyond: int = 0
    filtered: int = 0
    launched: int = 0
    stuck: str | None = None
    """Why the run could not go on; None: it did."""


class VersionClock:
    """Which version was published when. Version 0 is there from the beginning."""

    def __init__(self) -> None:
        self._times_s, self._versions, self._areas = [0.0], [0], [0.0]

    def publish(self, now_s: float, version: int) -> None:
        """`version` is the newest from `now_s` on; no earlier than the last one."""
        self._areas.append(self._area(now_s))
        self._times_s.append(now_s)
        self._versions.append(version)

    def version(self, time_s: float) -> int:
        """The newest version at a time."""
        return self._versions[bisect.bisect_right(self._times_s, time_s) - 1]

    def mean(self, start_s: float, end_s: float) -> float:
        """The mean over time of the newest version."""
        if end_s <= start_s:
            return float(self.version(start_s))
        return (self._area(end_s) - self._area(start_s)) / (end_s - start_s)

    def _area(self, time_s: float) -> float:
        """The integral of the newest version over time, from the beginning."""
        last = bisect.bisect_right(self._times_s, time_s) - 1
        return self._areas[last] + self._versions[last] * (time_s - self._times_s[last])


class Simulation:
    """See the module's opening. One run; `run` may be called once."""

    def __init__(
        self,
        controller: Controller,
        timing: Timing,
        flights: Flights,
        *,
        updates: int,
        on_event: Callable[[ev.AnyEvent], None] | None = None,
    ) -> None:
        """Builds a run.

        Args:
            controller: fresh; nothing is published yet.
            timing: the model's constants.
            flights: what becomes of each group.
            updates: the run ends after so many.
            on_event: hears every event after it was folded in, as a log would.
        """
        self._controller, self._state = controller, controller.state
        self._timing, self._flights, self._updates = timing, flights, updates
        self._on_event = on_event
        self._batch_updates = controller.state.rules.mini_batches
        self._now_s = 0.0
        self._due: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = 0
        self._free = timing.slots
        self._started_s: dict[int, float] = {}
        self._clock = VersionClock()
        self._pulled: dict[int, float] = {}
        self._training: MiniBatchPlan | None = None
        self._free_since_s = 0.0
        self._publishing: int | None = None
        self._to_publish: int | None = None
        self._waiting: tuple[str, float] | None = None
        self.run_ = SimRun()

    def run(self) -> SimRun:
        """Runs until the last update; one in which nothing can happen any more, or all is dropped, ends with `stuck`."""
        self._emit(ev.HostJoined(time_s=0.0, host=HOST, unit=HOST))
        self._emit(ev.Published(time_s=0.0, version=0))
        self._settle(True, True)
        while self._state.version < self._updates and self.run_.stuck is None:
            if not self._due:
                self.run_.stuck = f"at {self._now_s:.1f} s; nothing is in flight; waiting for {self._waiting}"
                break
            self._now_s, _, act, arguments = heapq.heappop(self._due)
            act(*arguments)
        self.run_.launched_beyond = self._controller.gate.beyond
        self.run_.launched = self._state.accounts.issued
        return self.run_

    # --- what happens ---------------------------------------------------------------------------------------------------------

    def _settle(self, launch: bool, admit: bool) -> None:
        """Asks the controller for what the event just folded in may allow."""
        if admit:
            self._admit()
        if launch:
            self._launch()

    def _launch(self) -> None:
        next_launch, now_s = self._controller.next_launch, self._now_s
        while self._free:
            leased = next_launch(HOST, now_s)
            if leased is None:
                return
            self._emit(leased)
            self._emit(ev.Started(time_s=now_s, group_id=leased.group_id))
            flight = self._flights(leased, now_s)
            self._free -= 1
            self._started_s[leased.group_id] = now_s
            self._after(flight.latency_s, self._done, leased.group_id, flight)

    def _done(self, group_id: int, flight: Flight) -> None:
        """A group is complete."""
        now_s = self._now_s
        self._free += 1
        began_s = self._started_s.pop(group_id)
        if flight.fails is not None:
            self._emit(ev.Failed(time_s=now_s, group_id=group_id, reason=flight.fails, episode_retries=0))
            return self._settle(True, False)
        meta = GroupMeta(
            group_id=group_id,
            unit=HOST,
            trajectories=tuple(self._finished(member, began_s) for member in flight.members),
            media=(),
            payload_bytes=0,
        )
        self._emit(ev.Ready(time_s=now_s, group=meta, episode_retries=0))
        filtered = self._controller.filtered(meta, now_s)
        if flight.dropped is not None:
            filtered = ev.Filtered(time_s=now_s, group_id=group_id, reason=flight.dropped)
        if filtered is not None:
            self.run_.filtered += 1
            self._emit(filtered)
            never = hopeless(self._state)
            if never is not None:  # live, `admission.on_starvation` decides
                self.run_.stuck = f"at {now_s:.1f} s; all that comes is dropped; waiting for {never}"
        return self._settle(True, filtered is None)

    def _finished(self, member: TrajectoryMeta, began_s: float) -> TrajectoryMeta:
        """A trajectory of a group that began then and is complete now, with its versions."""
        start_s = began_s + member.started_s
        end_s = max(start_s, min(began_s + member.finished_s, self._now_s))
        newest = self._clock.version(end_s)
        if self._timing.in_flight == "swap":
            oldest, mean = self._clock.version(start_s), self._clock.mean(start_s, end_s)
        else:
            oldest = self._clock.version(began_s)
            mean = float(oldest)
        return msgspec.structs.replace(
            member,
            version_min=oldest,
            version_max=newest if self._timing.in_flight == "swap" else oldest,
            version_sum=round(mean * member.sampled_tokens),
            started_s=start_s,
            finished_s=end_s,
            version_done=newest,
        )

    def _admit(self) -> None:
        state, now_s = self._state, self._now_s
        while state.admitted_updates < self._updates:
            for _, expired in self._controller.stale(now_s):
                self._emit(expired)
            idle = self._training is None and not state.plans
            choice = self._controller.next_mini_batch(explain=idle and self._waiting is None)
            if choice is None:
                return
            if isinstance(choice, Waiting):
                if idle:
                    self._note_wait(f"{choice.rule} of {choice.value}")
                return
            planned = (PlannedGroup(group_id=one.group_id, unit=HOST, rewards=(), payload_bytes=0) for one in choice)
            plan = plan_without_layout(state, planned, UNIT_TOKENS * len(choice))
            self._emit(ev.Admitted(time_s=now_s, plan=plan))
            self._note_wait(None)
            if self._timing.pull_s:
                self._after(self._timing.pull_s, self._pull_done, plan)
            else:
                self._pull_done(plan)

    def _pull_done(self, plan: MiniBatchPlan) -> None:
        self._pulled[plan.plan_id] = self._now_s
        self._train()

    def _train(self) -> None:
        """The trainer takes the next plan, if it is free and the plan's rows are there."""
        if self._training is not None:
            return
        plan = next(iter(self._state.plans.values()), None)
        if plan is None or plan.plan_id not in self._pulled:
            return
        del self._pulled[plan.plan_id]
        self._training = plan
        waited_s = self._now_s - self._free_since_s
        self._after(self._timing.train_s(plan.update), self._trained, plan, waited_s)

    def _trained(self, plan: MiniBatchPlan, waited_s: float) -> None:
        now_s, run = self._now_s, self.run_
        groups = self._state.groups
        for planned in plan.groups:
            group = groups[planned.group_id]
            assert group.meta is not None
            for trajectory in group.meta.trajectories:
                run.staleness.append(staleness_of(trajectory, version=plan.update, mini_batch=plan.mini_batch))
                run.consumed_by.append(plan.update)
                run.kinds.append(group.kind)
        run.updated_s.append(now_s)
        run.waited_s.append(waited_s)
        self._training, self._free_since_s = None, now_s
        self._emit(
            ev.Consumed(
                time_s=now_s,
                plan_id=plan.plan_id,
                update=plan.update,
                metrics={"update_s": self._timing.train_s(plan.update)},
                waits_s={"groups": waited_s},
                pulled_bytes=0,
                unique_bytes=0,
                compilations=0,
            )
        )
        if plan.mini_batch == self._batch_updates - 1:
            run.look_ahead.append(self._controller.gate.look_ahead_groups)
        if self._timing.publish == "update" or plan.mini_batch == self._batch_updates - 1:
            self._publish(plan.update + 1)
        self._train()
        self._settle(self._controller.gate.auto is not None, True)

    def _publish(self, version: int) -> None:
        if self._publishing is None:
            self._publishing = version
            self._after(self._timing.publish_s, self._published)
        else:
            self._to_publish = version

    def _published(self) -> None:
        assert self._publishing is not None
        self._clock.publish(self._now_s, self._publishing)
        self._emit(ev.Published(time_s=self._now_s, version=self._publishing))
        self._publishing = None
        if self._to_publish is not None:
            version, self._to_publish = self._to_publish, None
            self._publish(version)
        self._settle(True, True)

    # --- small things ----------------------------------------------------------------------------------------------------

    def _emit(self, event: ev.AnyEvent) -> None:
        self._controller.apply(event)
        if self._on_event is not None:
            self._on_event(event)

    def _after(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        self._order += 1
        heapq.heappush(self._due, (self._now_s + seconds, self._order, act, arguments))

    def _note_wait(self, reason: str | None) -> None:
        if self._waiting is not None:
            was, since_s = self._waiting
            self.run_.waits[was] = self.run_.waits.get(was, 0.0) + self._now_s - since_s
        self._waiting = None if reason is None else (reason, self._now_s)
