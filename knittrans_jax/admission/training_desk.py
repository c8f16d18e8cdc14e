"""The scheduler's desk for training processes: what they report, and the plans, goes and tickets that they are given. Pure.

What it guarantees:

* messages of another incarnation than the present one are refused; a chunk's go is given to all processes or to none;
* an update is consumed once, when all processes report it; a version is published once, when all have written it, and only
  when it is newer than what was published;
* a mini-batch whose payload cannot be brought is withdrawn, with those after it, unless every process holds all of it: chunks
  that have their go keep it, for some processes may have launched them, and no process launches another one;
* a training group that begins anew is served again what no checkpoint covers (`recovery`), and is not formed before the storage
  units have said what they hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.desk import RolloutDesk
from knittrans_jax.admission.figures import unique_payload_bytes
from knittrans_jax.admission.recovery import Retention
from knittrans_jax.admission.state import AdmissionState
from knittrans_jax.admission.training import TrainGroup
from knittrans_jax.config import Config
from knittrans_jax.launch import messages as msg
from knittrans_jax.trajectory import MiniBatchPlan

COUNTERS = (
    "duplicate_updates",
    "duplicate_weights",
    "train_groups_died",
    "mini_batches_withdrawn",
    "checkpoints_forced",
)
REMEMBERED_PLANS = 64
"""Plans for which it is remembered whether a checkpoint follows them; processes are at most a few apart."""
MAX_WITHDRAWN_IN_A_ROW = 16
"""Mini-batches withdrawn without an update in between: then something is wrong that planning again does not mend."""

WaitingRequest = msg.NextPlan | msg.ChunkHeld | msg.ChunkMissing | msg.TrainHello | msg.ServeWeights
"""Requests that may wait for their answer."""


class TrainingDesk:
    """See the module's opening. `emit` takes an event into the log and the state at once."""

    def __init__(
        self,
        config: Config,
        state: AdmissionState,
        rollout: RolloutDesk,
        emit: Callable[[ev.AnyEvent], None],
        ticket: Callable[[str, str], bytes],
        ticket_key: bytes,
    ) -> None:
        """`ticket`: issues one for a unit and a peer."""
        self.config, self.state, self.rollout = config, state, rollout
        self.group = TrainGroup(config.train.processes)
        self.recovers = config.launch.on_child_death == "recover"
        self.retention = Retention(rollout.room, self.recovers)
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self.heard_s: dict[int, float] = {}
        """When each process spoke last."""
        self._emit, self._ticket, self._ticket_key = emit, ticket, ticket_key
        self._missing_since_s: dict[tuple[int, str, str], float] = {}
        """By plan, unit and address: since when a process cannot bring its rows from there."""
        self._forced: dict[int, bool] = {}
        """By plan: whether a checkpoint is taken after it."""
        self._withdrawn: set[int] = set()
        self._withdrawn_in_a_row = 0

    # --- history ---------------------------------------------------------------------------------------------------------

    def replay(self, event: ev.AnyEvent) -> None:
        """Takes in an event of the log that a run goes on from, before the state does."""
        match event:
            case ev.Consumed():
                self.retention.consumed(self.state.plans[event.plan_id], event.metrics)
            case ev.Checkpointed():
                self.retention.covered(event.version)
            case ev.TrainGroupFormed():
                self.retention.begin(event.version, event.lineage)
            case _:
                pass

    # --- requests --------------------------------------------------------------------------------------------------------

    def stranger(self, process: int, incarnation: int) -> str | None:
        """Why nobody of this incarnation and number is listened to; None: it is the present training group's."""
        if incarnation != self.group.incarnation or incarnation < 0:
            return f"incarnation {incarnation} is not the present one ({self.group.incarnation}); say TrainHello first"
        if not 0 <= process < self.group.processes:
            return f"train process {process}: there are {self.group.processes}"
        return None

    def hello(self, request: msg.TrainHello) -> str | None:
        """Registers a process -> why it cannot, or None."""
        if self.group.incarnation < 0:
            refusal = self.state.why_not_from(request.version, request.after_plan)
            if refusal is not None:
                return refusal
        return self.group.hello(request)

    def group_died(self) -> None:
        """Its processes come back one by one: nobody speaks for the training group until all have."""
        goes = self.group.goes
        self.group = TrainGroup(self.config.train.processes)
        self.group.goes = goes
        self.heard_s.clear()
        self._withdrawn.clear()
        self._forced.clear()
        self._missing_since_s.clear()
        self.counters["train_groups_died"] += 1

    def chunk(self, request: msg.ChunkHeld | msg.ChunkMissing, now_s: float) -> str | None:
        """A process holds its rows of a chunk, or cannot bring them -> why that is no answerable report, or None."""
        refusal = self.stranger(request.process, request.incarnation)
        if refusal is not None or request.plan_id in self._withdrawn:
            return refusal
        plan = self._plan(request.plan_id)
        if plan is None:
            return f"plan {request.plan_id} is not under way"
        if not 0 <= request.chunk < plan.chunks:
            return f"plan {request.plan_id} has {plan.chunks} chunks, no chunk {request.chunk}"
        if isinstance(request, msg.ChunkHeld):
            self.group.holds(request.process, request.plan_id, request.chunk, now_s)
        else:
            self._missing_since_s.setdefault((request.plan_id, request.unit, request.address), now_s)
            if request.gone:
                self.payload_gone(request.plan_id, self._groups_of(plan, request.unit), request.reason, now_s)
        return None

    def _plan(self, plan_id: int) -> MiniBatchPlan | None:
        plan = self.state.plans.get(plan_id)
        if plan is None and self.retention.is_repeated(plan_id):
            plan = self.retention.plans.get(plan_id)
        return plan

    def _groups_of(self, plan: MiniBatchPlan, unit: str) -> list[int]:
        return [group.group_id for group in plan.groups if group.unit == unit]

    def update(self, request: msg.UpdateDone) -> str | None:
        """A process applied an update -> why that cannot be, or None."""
        refusal = self.stranger(request.process, request.incarnation)
        if refusal is not None:
            return refusal
        if self.retention.is_repeated(request.plan_id):
            return self._repeated(request)
        plan = self.state.plans.get(request.plan_id)
        if plan is None and 0 <= request.plan_id < self.state.next_plan_id:
            self.counters["duplicate_updates"] += 1
            return None
        if plan is None or request.version != plan.update + 1:
            expected = "no such plan" if plan is None else f"its update ends at version {plan.update + 1}"
            return f"update of plan {request.plan_id} to version {request.version}: {expected}"
        if not self.group.update_done(request):
            self.counters["duplicate_updates"] += 1
        return None

    def _repeated(self, request: msg.UpdateDone) -> str | None:
        """An update that is in the log already, of a training group that began before it."""
        plan = self.retention.plans.get(request.plan_id)
        if plan is not None and request.version != plan.update + 1:
            return (
                f"update of plan {request.plan_id} to version {request.version}: it ends at version {plan.update + 1}"
            )
        self.group.update_done(request)
        reports = self.group.take_update(request.plan_id)
        if reports is not None:
            self.retention.repeat(request.plan_id, reports[0].metrics)
        return None

    def checkpoint(self, request: msg.CheckpointDone, now_s: float) -> str | None:
        """A process took part in a whole checkpoint -> why that cannot be, or None."""
        refusal = self.stranger(request.process, request.incarnation)
        if refusal is None and not 0 <= request.oldest <= request.version <= self.state.version:
            refusal = (
                f"checkpoint of version {request.version} (oldest kept {request.oldest}): the run is at version "
                f"{self.state.version}"
            )
        if refusal is not None:
            return refusal
        reports = self.group.checkpoint_done(request)
        if reports is not None:
            self._emit(
                ev.Checkpointed(
                    time_s=now_s,
                    version=request.version,
                    plan_id=request.plan_id,
                    oldest=max(self.state.oldest_checkpoint, min(report.oldest for report in reports)),
                    size_bytes=max(report.size_bytes for report in reports),
                    stall_s=max(report.stall_s for report in reports),
                )
            )
            self.retention.covered(request.version)
        return None

    def weights(self, request: msg.WeightsWritten) -> str | None:
        """A process has written its part of a version -> why that cannot be, or None."""
        train = self.config.train
        refusal = self.stranger(request.process, request.incarnation)
        version, every = request.version, self.config.batch.mini_batches
        if refusal is None and not 0 <= version <= train.updates:
            refusal = f"version {version} does not exist: train.updates = {train.updates}"
        if refusal is None and train.publish == "train_batch" and version % every:
            refusal = f"version {version} is not published: train.publish = train_batch, every {every} updates"
        if refusal is not None:
            return refusal
        if version <= self.state.published:
            self.counters["duplicate_weights"] += 1
        else:
            self.group.weights_written(request.process, version)
        return None

    # --- settling --------------------------------------------------------------------------------------------------------

    def form(self, now_s: float, evaluated: Callable[[int], int]) -> bool:
        """Begins an incarnation when all processes are there -> whether it did.

        Args:
            now_s: the clock.
            evaluated: from the version up to which the lineage stays to the newest one whose evaluation is complete.
        """
        group, state = self.group, self.state
        if group.incarnation >= 0 or not group.complete:
            return False
        group.incarnation = state.incarnation + 1
        repeated = self.retention.begin(group.version, state.version)
        lineage = group.version + repeated
        first = next((plan for plan in state.plans.values() if lineage < state.version or self._is_gone(plan)), None)
        if first is not None:
            reason = (
                "the training group began anew, and a payload was gone"
                if lineage == state.version
                else f"training went on from version {lineage}"
            )
            self._withdraw(first, (), reason, now_s)
        self._emit(
            ev.TrainGroupFormed(
                time_s=now_s,
                incarnation=group.incarnation,
                processes=group.processes,
                version=group.version,
                after_plan=group.after_plan,
                evaluated=evaluated(lineage),
                repeated=repeated,
            )
        )
        return True

    def consume(self, now_s: float) -> None:
        """Takes in the updates that every process has reported, in order."""
        while self.state.plans:
            plan = next(iter(self.state.plans.values()))
            reports = self.group.take_update(plan.plan_id)
            if reports is None:
                return
            metas = [self.state.groups[planned.group_id].meta for planned in plan.groups]
            self._emit(
                ev.Consumed(
                    time_s=now_s,
                    plan_id=plan.plan_id,
                    update=plan.update,
                    metrics=reports[0].metrics,
                    waits_s={
                        name: max(report.waits_s.get(name, 0.0) for report in reports)
                        for name in sorted({name for report in reports for name in report.waits_s})
                    },
                    pulled_bytes=sum(report.pulled_bytes for report in reports),
                    relayed_bytes=sum(report.relayed_bytes for report in reports),
                    unique_bytes=unique_payload_bytes([meta for meta in metas if meta is not None]),
                    compilations=sum(report.compilations for report in reports),
                    compiled=tuple(dict.fromkeys(one for report in reports for one in report.compiled)),
                )
            )
            self.retention.consumed(plan, reports[0].metrics)
            self._withdrawn_in_a_row = 0

    def publish(self, now_s: float) -> int | None:
        """Publishes the newest version that is whole -> that version, or None: there is no new one."""
        version = self.group.newest_whole(at_most=self.state.version)
        if version is None or version <= self.state.published:
            return None
        self.group.forget_written(version)
        self._emit(ev.Published(time_s=now_s, version=version))
        return version

    # --- payload that is gone ------------------------------------------------------------------------------------------------

    def payload_gone(self, plan_id: int, group_ids: list[int], reason: str, now_s: float) -> None:
        """Groups of a plan under way cannot be had: withdraws it, unless every process holds all of it."""
        plan = self.state.plans.get(plan_id)
        if plan is None or not self.group.all_held(plan):
            if plan is None:  # one that is repeated: what follows the checkpoint cannot be repeated from here on
                self.rollout.room.gone.update(group_ids)
                return
            self._withdraw(plan, group_ids, reason, now_s)
        else:
            self.rollout.room.gone.update(group_ids)

    def withdraw_gone(self, now_s: float) -> None:
        """Withdraws what misses a payload: a unit has said what it holds, or a process has tried for long enough."""
        for plan in list(self.state.plans.values()):
            if self._is_gone(plan) and not self.group.all_held(plan):
                self._withdraw(plan, (), "a storage unit began anew without its payload", now_s)
                return  # and those after it
        timeout_s = self.config.control.pull_timeout_s
        for (plan_id, unit, _), since_s in list(self._missing_since_s.items()):
            plan = self._plan(plan_id)
            if plan is None:
                self._missing_since_s = {key: s for key, s in self._missing_since_s.items() if key[0] != plan_id}
            elif now_s - since_s >= timeout_s:
                reason = f"unit {unit} could not be reached for {timeout_s:g} s (control.pull_timeout_s)"
                self.payload_gone(plan_id, self._groups_of(plan, unit), reason, now_s)
                return

    def stuck(self) -> str | None:
        """Why planning again does not help; None: it may."""
        if self._withdrawn_in_a_row <= MAX_WITHDRAWN_IN_A_ROW:
            return None
        return f"update {self.state.admitted_updates}: {self._withdrawn_in_a_row} mini-batches in a row were withdrawn"

    def _is_gone(self, plan: MiniBatchPlan) -> bool:
        return any(group.group_id in self.rollout.room.gone for group in plan.groups)

    def _withdraw(self, plan: MiniBatchPlan, lost: list[int] | tuple[int, ...], reason: str, now_s: float) -> None:
        withdrawn = [other for other in self.state.plans.values() if other.plan_id >= plan.plan_id]
        units = {group.group_id: group.unit for other in withdrawn for group in other.groups}
        gone = sorted(group_id for group_id in units if group_id in lost or group_id in self.rollout.room.gone)
        self._emit(ev.Withdrawn(time_s=now_s, plan_id=plan.plan_id, lost=tuple(gone), reason=reason))
        for other in withdrawn:
            self.group.forget(other.plan_id)
            self._withdrawn.add(other.plan_id)
        for group_id in gone:
            self.rollout.room.release(units[group_id], group_id)
        self.counters["mini_batches_withdrawn"] += len(withdrawn)
        self._withdrawn_in_a_row += 1

    # --- answers -------------------------------------------------------------------------------------------------------------

    def answer(self, request: WaitingRequest, ended: bool, last_version: int) -> msg.Reply | None:
        """What a request that waits is answered; None: it waits on.

        Args:
            request: one that has been taken in.
            ended: the run ends; then nobody goes, for a process may have been told so before the last one held its rows.
            last_version: the version with which the run ends.
        """
        match request:
            case msg.ServeWeights():
                return msg.Ack() if ended else None
            case msg.TrainHello():
                if self.group.incarnation >= 0:
                    key = None if request.relay is None and request.weights is None else self._ticket_key
                    return msg.TrainWelcome(
                        incarnation=self.group.incarnation, ticket_key=key, published=self.state.published
                    )
                return None
            case msg.NextPlan():
                served = itertools.chain(self.retention.plans.values(), self.state.plans.values())
                plan = next((plan for plan in served if plan.plan_id > request.after_plan), None)
                if plan is not None and not ended:
                    return self._plan_reply(plan, f"train{request.process}")
                complete = plan is None and self.state.admitted_updates >= last_version
                return msg.PlanReply(plan=None, complete=complete) if ended or complete else None
            case msg.ChunkHeld():
                if ended:
                    return msg.PlanReply(plan=None)
                if self.group.may_go(request.plan_id, request.chunk):
                    return msg.Go()
                return self._dropped(request.plan_id)
            case msg.ChunkMissing():
                if ended:
                    return msg.PlanReply(plan=None)
                plan = self._plan(request.plan_id)
                reply = None if plan is None else self._plan_reply(plan, f"train{request.process}")
                if reply is None or reply.units.get(request.unit) in (None, request.address):
                    return self._dropped(request.plan_id)
                self._missing_since_s.pop((request.plan_id, request.unit, request.address), None)
                return reply

    def _dropped(self, plan_id: int) -> msg.Dropped | msg.Refused | None:
        if plan_id in self._withdrawn:
            return msg.Dropped(plan_id=plan_id)
        plan = self._plan(plan_id)
        if plan is not None and plan_id not in self.state.plans and self._is_gone(plan):
            return msg.Refused(
                reason=f"plan {plan_id} is repeated, and a storage unit began anew without its payload: the training group "
                "must begin again from its checkpoint"
            )
        return None

    def _plan_reply(self, plan: MiniBatchPlan, peer: str) -> msg.PlanReply | None:
        units, known = sorted({group.unit for group in plan.groups}), self.rollout.units
        if self.group.relays and peer not in self.group.relays:
            units, known = sorted(self.group.relays), self.group.relays
        if any(unit not in known for unit in units):
            return None  # a unit that has not said where it is yet will within its first sync
        return msg.PlanReply(
            plan=plan,
            checkpoint=self._forces_checkpoint(plan),
            units={unit: known[unit] for unit in units},
            tickets={unit: self._ticket(unit, peer) for unit in units},
        )

    def _forces_checkpoint(self, plan: MiniBatchPlan) -> bool:
        """Whether one is to be taken after this plan, for the sake of what is kept until then: alike for all who ask."""
        if plan.mini_batch < self.config.batch.mini_batches - 1:
            return False
        if plan.plan_id not in self._forced:
            full = self.rollout.room.retained_share >= self.config.checkpoint.retained_share
            self._forced[plan.plan_id] = full
            self.counters["checkpoints_forced"] += full
            for old in sorted(self._forced)[:-REMEMBERED_PLANS]:
                del self._forced[old]
        return self._forced[plan.plan_id]
