"""The scheduler as a pure state machine: requests and the clock come in, events and replies come out.

What it guarantees:

* nothing is answered that is not in the returned events or was in earlier ones: the caller makes the events durable, then
  sends the replies;
* every request gets exactly one reply: at once, when what it waits for happens, or `Wait` after half of `rpc_timeout_s`;
* duplicate, late and foreign reports change nothing and are counted; messages of an older incarnation are refused;
* every lease, go and evaluation has a deadline; a run that can make no progress for `starvation_s` ends naming the rule;
* a core that is given the events of its log goes on where they end: everything that lived in memory is lost and leased again,
  and training goes on from the version that the training processes restored.

One step of it: take the request in (`_on_*`), then settle: publish what is whole, count what is consumed, admit what the
policy gives, answer what was parked, end what is finished.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.controller import Controller
from knittrans_jax.admission.desk import RolloutDesk
from knittrans_jax.admission.evaluation import Evaluations
from knittrans_jax.admission.fan_out import FanOut, WeightsDesk
from knittrans_jax.admission.figures import REMAINDER, RunFigures, unique_payload_bytes
from knittrans_jax.admission.gate import make_gate
from knittrans_jax.admission.lineage import final_lineage
from knittrans_jax.admission.policy import Waiting, hopeless, make_policy
from knittrans_jax.admission.prompts import PromptOrder
from knittrans_jax.admission.recovery import Retention
from knittrans_jax.admission.rules import rules_of
from knittrans_jax.admission.state import AdmissionState
from knittrans_jax.admission.status import live_status
from knittrans_jax.admission.storage_room import check_storage
from knittrans_jax.admission.training import TrainGroup
from knittrans_jax.config import Config, config_to_dict
from knittrans_jax.launch import messages as msg
from knittrans_jax.trajectory import GroupMeta, MiniBatchPlan
from knittrans_jax.transfer import tickets

MAX_PARKED = 4096
"""More waiting requests than this are refused: every role has at most a few outstanding."""
COUNTERS = (
    "duplicate_updates",
    "duplicate_weights",
    "refused",
    "waits",
    "parked_refused",
    "starvations",
    "relaxed_rules",
    "train_groups_died",
)
"""Requests that changed nothing, by reason; `waits` are answers `Wait`; what starvation led to where the run went on."""


class Layout(Protocol):
    """Lays a mini-batch out for the training mesh (`knittrans_jax.transfer.plan.layout_mini_batch`, shapes bound)."""

    def __call__(
        self, groups: Sequence[GroupMeta], *, plan_id: int, update: int, train_step: int, mini_batch: int
    ) -> MiniBatchPlan:
        """The plan of these groups."""
        ...


@dataclasses.dataclass(frozen=True)
class Step:
    """What follows from one call: events to make durable first, then replies to send, by the caller's tokens."""

    events: list[ev.AnyEvent]
    replies: list[tuple[Hashable, msg.Reply]]


@dataclasses.dataclass(frozen=True)
class _Parked:
    request: msg.NextPlan | msg.ChunkHeld | msg.TrainHello | msg.ServeWeights
    deadline_s: float


class SchedulerCore:
    """See the module's opening. One thread; `now_s` never goes back."""

    def __init__(
        self,
        config: Config,
        *,
        train_prompts: Sequence[tuple[str, Mapping[str, str]]],
        heldout_prompts: Sequence[str],
        layout: Layout,
        group_bytes: int,
        ticket_key: bytes,
        new_nonce: Callable[[], bytes] = tickets.new_nonce,
        history: Sequence[ev.AnyEvent] = (),
    ) -> None:
        """Builds a run's scheduler.

        Args:
            config: the run.
            train_prompts: (id, attributes) of every training prompt.
            heldout_prompts: ids of the held-out prompts, in the order in which evaluations take them.
            layout: lays a mini-batch out.
            group_bytes: the most payload bytes that one group can have.
            ticket_key: what storage units check tickets with.
            new_nonce: a fresh nonce per ticket.
            history: the events of the run's log, when it is resumed (`resume.check_resume` has looked at them).

        Raises:
            ConfigError: rules that no batch of these prompts can meet, or storage too small for the run to go on.
            IllegalTransition: the history is no log of such a run.
        """
        rules = rules_of(config, [attributes for _, attributes in train_prompts])
        self.config = config
        self.controller = Controller(
            AdmissionState(rules),
            PromptOrder(rules, train_prompts, config.seed, config.train.epochs),
            make_policy(config.admission.policy, config.admission.schedule),
            make_gate(config, rules, group_bytes),
            admit_ahead=config.admission.admit_ahead,
        )
        self.state, self.gate = self.controller.state, self.controller.gate
        self.prompts = self.controller.prompts
        check_storage(config, group_bytes, self.gate.most_useless_groups)
        self.evaluations = Evaluations(config, heldout_prompts)
        self.desk = RolloutDesk(config, self.controller, self.evaluations, group_bytes, self._emit)
        self.training = TrainGroup(config.train.processes)
        self._recovers = config.launch.on_child_death == "recover"
        self.retention = Retention(self.desk.room, self._recovers)
        self.weights_desk = WeightsDesk(FanOut(config.weights.fan_out), ticket_key, self._ticket)
        self.figures = RunFigures(config.batch.mini_batches)
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self.service_counters: dict[str, float] = {"payload_through_scheduler": 0.0}
        """Set by the service: bytes in and out, and bytes of requests that were no control record."""
        self.waiting: Waiting | None = None
        self.ending: str | None = None
        self.finished = False
        self.last_version = config.train.updates
        """The version with which the run ends: lower than configured when a finite data set ends before."""
        self._history = list(history)
        """Kept until the training group has formed."""
        self._layout = layout
        self._ticket_key = ticket_key
        self._new_nonce = new_nonce
        self._ticket_valid_s = (
            config.train.go_timeout_s + (config.control.pull_retries + 1) * 2 * config.control.pull_timeout_s
        )
        self._parked: dict[Hashable, _Parked] = {}
        self._events: list[ev.AnyEvent] = []
        self._replies: list[tuple[Hashable, msg.Reply]] = []
        self._starving: tuple[str, str, int] | None = None
        self._hopeless: tuple[int, str, str] | None = None
        self._waiting_since_s = 0.0
        self._ending_since_s = 0.0
        self._evaluated = -1
        """Newest version whose evaluation was complete when the lineage last began."""
        self._told_to_stop: set[str] = set()
        self._reported: set[str] = set()
        self._status_served = False
        self._now_s = 0.0
        for event in self._history:
            self.controller.apply(event)
            self.evaluations.replay(event)
        self._fold_figures()

    # --- the three ways in ---------------------------------------------------------------------------------------------

    def start(self, now_s: float) -> Step:
        """The first step: the run's configuration goes into the log."""
        self._now_s = max(now_s, self._history[-1].time_s if self._history else now_s)
        first = ev.Resumed if self._history else ev.RunStarted
        self._emit(first(time_s=self._now_s, config=config_to_dict(self.config)))
        return self._step()

    def handle(self, token: Hashable, request: msg.Request, now_s: float) -> Step:
        """One request; `token` names whom to answer. The reply may come in a later step."""
        self._now_s = max(now_s, self._now_s)
        reply = self._dispatch(token, request)
        if reply is not None:
            self._reply(token, reply)
        self._settle()
        return self._step()

    def tick(self, now_s: float) -> Step:
        """Time has passed: deadlines are looked at. To be called a few times a second."""
        self._now_s = max(now_s, self._now_s)
        if self.ending is None:
            stuck = self.desk.expire(self._now_s)
            if stuck is not None:
                self.end(f"error: {stuck}")
            overdue = self.training.overdue(self._now_s, self.config.train.go_timeout_s)
            if overdue is not None:
                self.end(f"error: {overdue} within train.go_timeout_s = {self.config.train.go_timeout_s:g} s")
        self._settle()
        if self.ending is None:
            self._check_starvation()
        for token, parked in list(self._parked.items()):
            if self._now_s >= parked.deadline_s:
                del self._parked[token]
                self.counters["waits"] += 1
                self._reply(token, msg.Wait())
        if self.ending is not None and not self.finished and self._may_finish():
            self.finished = True
            self._emit(ev.RoleReport(time_s=self._now_s, role="scheduler", counters=self.all_counters()))
            self._emit(ev.RunEnded(time_s=self._now_s, reason=self.ending))
        return self._step()

    def end(self, reason: str) -> None:
        """Begins the orderly end of the run: no more work, everybody is told to stop. The first reason stays."""
        if self.ending is None:
            self.ending, self._ending_since_s = reason, self._now_s

    @property
    def parked(self) -> int:
        """Requests that wait for their answer."""
        return len(self._parked)

    # --- requests ------------------------------------------------------------------------------------------------------

    def _dispatch(self, token: Hashable, request: msg.Request) -> msg.Reply | None:
        match request:
            case msg.EngineSync():
                return self._on_engine(request)
            case msg.StorageSync():
                return self._on_storage(request)
            case msg.TrainHello():
                if self._recovers and self.ending is None and self.training.is_another(request):
                    self._train_group_died()
                refusal = self._ended() or self._cannot_begin(request) or self.training.hello(request)
                return self._refuse(refusal) if refusal else self._park(token, request)
            case msg.NextPlan():
                refusal = self._stranger(request.process, request.incarnation)
                return self._refuse(refusal) if refusal else self._park(token, request)
            case msg.ChunkHeld():
                return self._on_chunk(token, request)
            case msg.UpdateDone():
                return self._on_update(request)
            case msg.CheckpointDone():
                return self._on_checkpoint(request)
            case msg.WeightsWritten():
                return self._on_weights(request)
            case msg.ServeWeights():
                refusal = self._stranger(request.process, request.incarnation)
                return self._refuse(refusal) if refusal else self._park(token, request)
            case msg.WeightsWanted():
                over = self.ending is not None
                return self._or_refuse(self.weights_desk.answer(request, self.training, self.state.published, over))
            case msg.Report():
                self._emit(
                    ev.RoleReport(
                        time_s=self._now_s, role=request.role, counters=request.counters, compiled=request.compiled
                    )
                )
                self._reported.add(request.role)
                return msg.Ack()
            case msg.StatusRequest():
                self._status_served = self.ending is not None
                return self.status()
            case msg.Shutdown():
                self.end(request.reason)
                return msg.Ack()

    def _on_engine(self, sync: msg.EngineSync) -> msg.Reply:
        self.desk.join(sync, self._now_s)
        if self.ending is None:
            self.desk.take_reports(sync, self._now_s)
            self._settle()  # what these reports allow shows in this reply already
        if self.ending is not None:
            self._told_to_stop.add(f"engine {sync.host}")
            return msg.EngineOrders(published=self.state.published, stop=True)
        address = self.desk.units.get(sync.unit)
        return msg.EngineOrders(
            leases=self.desk.lease(sync.host, sync.free_groups, self._now_s),
            evals=self.desk.lease_evaluation(sync.host, self._now_s),
            published=self.state.published,
            ticket=self._ticket(sync.unit, sync.host) if sync.ticket_wanted and address is not None else None,
            unit_address=address,
        )

    def _on_storage(self, sync: msg.StorageSync) -> msg.Reply:
        self.desk.units[sync.unit] = sync.address
        if self.ending is not None:
            self._told_to_stop.add(f"storage {sync.unit}")
        for group_id in sync.recovered or ():
            self.desk.recovered(sync.unit, group_id)
        release = self.desk.room.orders(sync.unit)
        return msg.StorageOrders(ticket_key=self._ticket_key, release=release, stop=self.ending is not None)

    def _on_chunk(self, token: Hashable, request: msg.ChunkHeld) -> msg.Reply | None:
        refusal = self._stranger(request.process, request.incarnation)
        plan = self.state.plans.get(request.plan_id)
        if plan is None and self.retention.is_repeated(request.plan_id):
            plan = self.retention.plans.get(request.plan_id)
        if refusal is None and plan is None:
            refusal = f"plan {request.plan_id} is not under way"
        if refusal is None and plan is not None and not 0 <= request.chunk < plan.chunks:
            refusal = f"plan {request.plan_id} has {plan.chunks} chunks, no chunk {request.chunk}"
        if refusal is not None:
            return self._refuse(refusal)
        self.training.holds(request.process, request.plan_id, request.chunk, self._now_s)
        return self._park(token, request)

    def _on_update(self, request: msg.UpdateDone) -> msg.Reply:
        refusal = self._stranger(request.process, request.incarnation)
        if refusal is not None:
            return self._refuse(refusal)
        if self.retention.is_repeated(request.plan_id):
            return self._on_repeated(request)
        plan = self.state.plans.get(request.plan_id)
        if plan is None and 0 <= request.plan_id < self.state.next_plan_id:
            self.counters["duplicate_updates"] += 1
            return msg.Ack()
        if plan is None or request.version != plan.update + 1:
            expected = "no such plan" if plan is None else f"its update ends at version {plan.update + 1}"
            return self._refuse(f"update of plan {request.plan_id} to version {request.version}: {expected}")
        if not self.training.update_done(request):
            self.counters["duplicate_updates"] += 1
        return msg.Ack()

    def _on_repeated(self, request: msg.UpdateDone) -> msg.Reply:
        """An update that is in the log already, of a training group that began before it."""
        plan = self.retention.plans.get(request.plan_id)
        if plan is not None and request.version != plan.update + 1:
            return self._refuse(
                f"update of plan {request.plan_id} to version {request.version}: it ends at version {plan.update + 1}"
            )
        self.training.update_done(request)
        reports = self.training.take_update(request.plan_id)
        if reports is not None:
            self.retention.repeat(request.plan_id, reports[0].metrics)
        return msg.Ack()

    def _on_checkpoint(self, request: msg.CheckpointDone) -> msg.Reply:
        refusal = self._stranger(request.process, request.incarnation)
        if refusal is None and not 0 <= request.oldest <= request.version <= self.state.version:
            refusal = (
                f"checkpoint of version {request.version} (oldest kept {request.oldest}): the run is at version "
                f"{self.state.version}"
            )
        if refusal is not None:
            return self._refuse(refusal)
        reports = self.training.checkpoint_done(request)
        if reports is not None:
            self._emit(
                ev.Checkpointed(
                    time_s=self._now_s,
                    version=request.version,
                    plan_id=request.plan_id,
                    oldest=max(self.state.oldest_checkpoint, min(report.oldest for report in reports)),
                    size_bytes=max(report.size_bytes for report in reports),
                    stall_s=max(report.stall_s for report in reports),
                )
            )
            self.retention.covered(request.version)
        return msg.Ack()

    def _on_weights(self, request: msg.WeightsWritten) -> msg.Reply:
        refusal = self._stranger(request.process, request.incarnation)
        version, every = request.version, self.config.batch.mini_batches
        if refusal is None and not 0 <= version <= self.config.train.updates:
            refusal = f"version {version} does not exist: train.updates = {self.config.train.updates}"
        if refusal is None and self.config.train.publish == "train_batch" and version % every:
            refusal = f"version {version} is not published: train.publish = train_batch, every {every} updates"
        if refusal is not None:
            return self._refuse(refusal)
        if version <= self.state.published:
            self.counters["duplicate_weights"] += 1
        else:
            self.training.weights_written(request.process, version)
        return msg.Ack()

    # --- settling ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        if self.ending is None:
            self._form_train_group()
            self._consume()
            self._publish()
            self._admit()
            self._check_finished()
        for token, parked in list(self._parked.items()):
            reply = self._answer(parked.request)
            if reply is not None:
                del self._parked[token]
                self._reply(token, reply)

    def _form_train_group(self) -> None:
        training = self.training
        if training.incarnation < 0 and training.complete:
            training.incarnation = self.state.incarnation + 1
            repeated = self.retention.begin(training.version, self.state.version)
            lineage = training.version + repeated
            if self.state.incarnation < 0 or self._history or lineage < self.state.version:
                self._evaluated = self.evaluations.resume(lineage)
            withdrawn = list(self.state.plans.values()) if lineage < self.state.version else []
            self._emit(
                ev.TrainGroupFormed(
                    time_s=self._now_s,
                    incarnation=training.incarnation,
                    processes=training.processes,
                    version=training.version,
                    after_plan=training.after_plan,
                    evaluated=self._evaluated,
                    repeated=repeated,
                )
            )
            for plan in withdrawn:
                for group in plan.groups:
                    self.desk.room.release(group.unit, group.group_id)
            self._fold_figures()
            self._history = []

    def _train_group_died(self) -> None:
        """Its processes come back one by one: nobody speaks for the training group until all have."""
        goes = self.training.goes
        self.training = TrainGroup(self.config.train.processes)
        self.training.goes = goes
        self.counters["train_groups_died"] += 1
        for token in [token for token, one in self._parked.items() if not isinstance(one.request, msg.TrainHello)]:
            del self._parked[token]
            self._reply(token, self._refuse("the training group has died; this process was of an older incarnation"))

    def _fold_figures(self) -> None:
        """The figures of the final lineage so far, where there is a history that may have been thrown back."""
        if self._history:
            self.figures = RunFigures(self.config.batch.mini_batches)
            for event in final_lineage(self._history).events:
                self.figures.apply(event)

    def _cannot_begin(self, hello: msg.TrainHello) -> str | None:
        """Why a training group cannot begin where this process stands; None: it can."""
        if self.training.incarnation >= 0:
            return None
        return self.state.why_not_from(hello.version, hello.after_plan)

    def _consume(self) -> None:
        while self.state.plans:
            plan = next(iter(self.state.plans.values()))
            reports = self.training.take_update(plan.plan_id)
            if reports is None:
                return
            metas = [self.state.groups[planned.group_id].meta for planned in plan.groups]
            self._emit(
                ev.Consumed(
                    time_s=self._now_s,
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

    def _publish(self) -> None:
        version = self.training.newest_whole(at_most=self.state.version)
        if version is None or version <= self.state.published:
            return
        self.training.forget_written(version)
        self._emit(ev.Published(time_s=self._now_s, version=version))
        self.evaluations.published(version, len(self.desk.seen_s))

    def _admit(self) -> None:
        state = self.state
        self.waiting = None
        while state.admitted_updates < self.last_version:
            if self.config.train.epochs is not None and self._data_ended():
                return
            for group, expired in self.controller.stale(self._now_s):
                assert group.meta is not None
                self.desk.room.release(group.meta.unit, group.group_id)
                self._emit(expired)
            choice = self.controller.next_mini_batch()
            if choice is None or isinstance(choice, Waiting):
                self.waiting = choice
                return
            try:
                plan = self._layout(
                    [group.meta for group in choice if group.meta is not None],
                    plan_id=state.next_plan_id,
                    update=state.admitted_updates,
                    train_step=state.batch.train_step,
                    mini_batch=state.batch.mini_batches,
                )
            except ValueError as error:
                self.end(f"error: update {state.admitted_updates} cannot be laid out: {error}")
                return
            self._emit(ev.Admitted(time_s=self._now_s, plan=plan))
            self._waiting_since_s = self._now_s

    def _data_ended(self) -> bool:
        """Whether a finite data set has come to its end before `train.updates`; then the run ends after what is planned."""
        state = self.state
        if self.training.incarnation < 0 or state.plans or state.published < self._last_published(state.version):
            return False
        if not self.controller.data_ended(self._now_s):
            return False
        self.last_version = state.version
        self.evaluations.conclude(state.published, len(self.desk.seen_s))
        return True

    def _last_published(self, version: int) -> int:
        """The newest version to be published at this version."""
        every = 1 if self.config.train.publish == "update" else self.config.batch.mini_batches
        return version // every * every

    def _check_finished(self) -> None:
        state, last = self.state, self.last_version
        if state.version == last and state.published == self._last_published(last) and self.evaluations.finished:
            self.end("finished")

    def _answer(self, request: msg.NextPlan | msg.ChunkHeld | msg.TrainHello | msg.ServeWeights) -> msg.Reply | None:
        match request:
            case msg.ServeWeights():
                return None if self.ending is None else msg.Ack()
            case msg.TrainHello():
                if self.training.incarnation >= 0:
                    key = None if request.relay is None and request.weights is None else self._ticket_key
                    return msg.TrainWelcome(
                        incarnation=self.training.incarnation, ticket_key=key, published=self.state.published
                    )
            case msg.NextPlan():
                served = itertools.chain(self.retention.plans.values(), self.state.plans.values())
                plan = next((plan for plan in served if plan.plan_id > request.after_plan), None)
                if plan is not None and self.ending is None:
                    return self._plan_reply(plan, f"train{request.process}")
                complete = plan is None and self.state.admitted_updates >= self.last_version
                if self.ending is not None or complete:
                    self._told_to_stop.add(f"train{request.process}")
                    return msg.PlanReply(plan=None, complete=complete)
            case msg.ChunkHeld():
                # Once the run ends nobody goes: a process may have been told so before the last one held its rows.
                if self.ending is not None:
                    self._told_to_stop.add(f"train{request.process}")
                    return msg.PlanReply(plan=None)
                if self.training.may_go(request.plan_id, request.chunk):
                    return msg.Go()
        refusal = self._ended()
        return None if refusal is None else self._refuse(refusal)

    def _plan_reply(self, plan: MiniBatchPlan, peer: str) -> msg.PlanReply | None:
        units, known = sorted({group.unit for group in plan.groups}), self.desk.units
        if self.training.relays and peer not in self.training.relays:
            units, known = sorted(self.training.relays), self.training.relays
        if any(unit not in known for unit in units):
            return None  # a unit that has not said where it is yet will within its first sync
        return msg.PlanReply(
            plan=plan,
            units={unit: known[unit] for unit in units},
            tickets={unit: self._ticket(unit, peer) for unit in units},
        )

    def _check_starvation(self) -> None:
        """The trainer has nothing to do, and what is missing has not become less, for `starvation_s`."""
        waiting, state, updates = self.waiting, self.state, self.last_version
        lost = None if waiting is None else hopeless(state)
        if lost is not None and (state.batch.train_step, lost.rule, lost.value) != self._hopeless:
            self._hopeless = (state.batch.train_step, lost.rule, lost.value)
            count = sum(state.dropped_in_a_row[kind] for kind in lost.kinds)
            why = "batch.drop_equal_rewards, batch.mini_batch_tokens or admission.staleness_bound"
            self._starved(lost, 0.0, f"waits in vain (the last {count} groups that could help were all dropped: {why})")
            return
        short = self.controller.short_of_data() if state.batch.mini_batches else None
        if short is not None and (state.batch.train_step, short.rule, short.value) != self._hopeless:
            self._hopeless = (state.batch.train_step, short.rule, short.value)
            self._run_short(short)
            return
        key: tuple[str, str, int] | None = None
        if state.plans:
            pass
        elif waiting is not None:
            key = (waiting.rule, waiting.value, waiting.missing)
        elif state.version == updates and state.published < self._last_published(updates):
            key = ("the last version's weights", f"version {updates}, published {state.published}", 0)
        elif state.version == updates and self.evaluations.waiting and not self.evaluations.leases:
            shares = len(self.evaluations.waiting)
            key = ("a rollout host that takes the final evaluation", f"version {updates}, shares to do", shares)
        if key is None or key != self._starving:
            self._starving, self._waiting_since_s = key, self._now_s
            return
        waited_s = self._now_s - self._waiting_since_s
        if waited_s < self.config.admission.starvation_s:
            return
        if waiting is None:
            what, detail, count = key
            self.end(
                f"error: nothing has moved for {waited_s:.0f} s (admission.starvation_s); missing: {what} "
                f"({detail}{f': {count}' if count else ''}); hosts seen: {', '.join(sorted(self.desk.seen_s)) or 'none'}"
            )
        else:
            self._starved(waiting, waited_s, f"waits since {waited_s:.0f} s (admission.starvation_s)")

    def _run_short(self, short: Waiting) -> None:
        """The data set ends in the middle of a train batch. That is no error: it is reported, and the run ends normally."""
        if self.config.admission.on_starvation == "relax" and self.state.batch.completion.copy().relax(
            short.rule, short.value
        ):
            self._starved(short, 0.0, "lacks prompts: the data set has no more")
            return
        self.counters["starvations"] += 1
        self._emit(
            ev.Starved(
                time_s=self._now_s,
                rule=short.rule,
                value=short.value,
                missing=short.missing,
                in_flight=short.in_flight,
                waited_s=0.0,
                reason="the data set ends before the train batch under way is complete (train.epochs)",
            )
        )

    def _starved(self, waiting: Waiting, waited_s: float, why: str) -> None:
        """What is missing does not come: `admission.on_starvation` decides. All three ways go into the log."""
        state, what = self.state, self.config.admission.on_starvation
        self._waiting_since_s = self._now_s
        if what == "relax" and state.batch.completion.copy().relax(waiting.rule, waiting.value):
            missing = waiting.missing
            self._emit(
                ev.Relaxed(
                    time_s=self._now_s, rule=waiting.rule, value=waiting.value, missing=missing, kinds=waiting.kinds
                )
            )
            self.counters["relaxed_rules"] += 1
        elif what == "wait":
            figures = {name: getattr(waiting, name) for name in ("rule", "value", "missing", "in_flight")}
            self._emit(ev.Starved(time_s=self._now_s, **figures, waited_s=waited_s, reason=why))
            self.counters["starvations"] += 1
        else:
            failure = f"; last failure: {state.last_failure}" if state.last_failure else ""
            rigid = "; this rule cannot be relaxed" if what == "relax" else ""
            self.end(
                f"error: update {state.admitted_updates} {why} for {waiting}{rigid}; published version {state.published}, "
                f"groups { {name: count for name, count in state.accounts.as_dict().items() if count} }{failure}"
            )

    # --- status and end --------------------------------------------------------------------------------------------------

    def status(self) -> msg.Status:
        """The live table's figures."""
        counters = {**self.all_counters(), **self.desk.tool_counters()}
        return live_status(self.config, self.state, self.figures, self.training, self.waiting, self.ending, counters)

    def all_counters(self) -> dict[str, float]:
        """Everything that the scheduler counts, by name."""
        return {
            "episode_retries": float(self.state.retries),
            "goes": float(self.training.goes),
            "updates_repeated": float(self.retention.repeated),
            "updates_repeated_otherwise": float(self.retention.repeated_otherwise),
            "weights_from_training": float(self.weights_desk.fan_out.from_training),
            "weights_asked_again": float(self.weights_desk.fan_out.asked_again),
            "eval_leases_expired": float(self.evaluations.leases_expired),
            "eval_shares_superseded": float(self.evaluations.shares_superseded),
            **self.counters,
            **self.desk.counters,
            **self.service_counters,
            **{REMAINDER + name: float(count) for name, count in self.controller.remainder().items()},
        }

    def _may_finish(self) -> bool:
        """Every role that was there has been told and has handed in its last report, and a status said so; or time is up.

        A run that finished gives its roles `launch.finish_timeout_s` for that. One that ends otherwise gives them half of
        `launch.stop_timeout_s`, so that its end is in the log before a launcher kills what is left.
        """
        launch, waited_s = self.config.launch, self._now_s - self._ending_since_s
        short_s = launch.stop_timeout_s / 2
        if waited_s >= (launch.finish_timeout_s if self.ending == "finished" else short_s):
            return True
        roles = len(self.desk.seen_s) + len(self.desk.units) + len(self.training.pids)
        everybody = len(self._told_to_stop) >= roles and len(self._reported) >= roles
        return everybody and (self._status_served or waited_s >= short_s)

    # --- small things ----------------------------------------------------------------------------------------------------

    def _ended(self) -> str | None:
        return None if self.ending is None else f"the run has ended: {self.ending}"

    def _stranger(self, process: int, incarnation: int) -> str | None:
        if incarnation != self.training.incarnation or incarnation < 0:
            return (
                f"incarnation {incarnation} is not the present one ({self.training.incarnation}); say TrainHello first"
            )
        if not 0 <= process < self.training.processes:
            return f"train process {process}: there are {self.training.processes}"
        return None

    def _or_refuse(self, answer: msg.Reply | str) -> msg.Reply:
        return self._refuse(answer) if isinstance(answer, str) else answer

    def _refuse(self, reason: str) -> msg.Refused:
        self.counters["refused"] += 1
        return msg.Refused(reason=reason)

    def _park(
        self, token: Hashable, request: msg.NextPlan | msg.ChunkHeld | msg.TrainHello | msg.ServeWeights
    ) -> msg.Reply | None:
        if len(self._parked) >= MAX_PARKED:
            self.counters["parked_refused"] += 1
            return self._refuse(f"{MAX_PARKED} requests wait already; ask again later")
        self._parked[token] = _Parked(request, self._now_s + self.config.control.rpc_timeout_s / 2)
        return None

    def _ticket(self, unit: str, peer: str) -> bytes:
        return tickets.issue(self._ticket_key, unit, peer, self._now_s + self._ticket_valid_s, self._new_nonce())

    def _emit(self, event: ev.AnyEvent) -> None:
        self.controller.apply(event)
        self.figures.apply(event)
        if self._history:
            self._history.append(event)
        self._events.append(event)

    def _reply(self, token: Hashable, reply: msg.Reply) -> None:
        self._replies.append((token, reply))

    def _step(self) -> Step:
        step = Step(self._events, self._replies)
        self._events, self._replies = [], []
        return step
