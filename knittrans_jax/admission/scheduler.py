"""The scheduler as a pure state machine: requests and the clock come in, events and replies come out.

What it guarantees:

* nothing is answered that is not in the returned events or was in earlier ones: the caller makes the events durable, then
  sends the replies;
* every request gets exactly one reply: at once, when what it waits for happens, or `Wait` after half of `rpc_timeout_s`;
* duplicate, late and foreign reports change nothing and are counted; messages of an older incarnation are refused;
* every lease, go and evaluation has a deadline; a run that can make no progress for `starvation_s` ends naming the rule;
* a core that is given the events of its log goes on where they end: what was in flight is lost and leased again, what the
  storage units still hold is kept, and training goes on from the version that the training processes restored.

One step of it: take the request in (`_on_*`), then settle: publish what is whole, count what is consumed, admit what the
policy gives, answer what was parked, end what is finished.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.controller import Controller
from knittrans_jax.admission.desk import RolloutDesk
from knittrans_jax.admission.evaluation import Evaluations
from knittrans_jax.admission.fan_out import FanOut, WeightsDesk
from knittrans_jax.admission.figures import REMAINDER, RunFigures
from knittrans_jax.admission.gate import make_gate
from knittrans_jax.admission.lineage import final_lineage
from knittrans_jax.admission.policy import Waiting, make_policy
from knittrans_jax.admission.prompts import PromptOrder
from knittrans_jax.admission.rules import rules_of
from knittrans_jax.admission.starvation import Starvation
from knittrans_jax.admission.state import AdmissionState
from knittrans_jax.admission.status import live_status
from knittrans_jax.admission.storage_room import check_storage
from knittrans_jax.admission.training_desk import TrainingDesk, WaitingRequest
from knittrans_jax.config import Config, config_to_dict
from knittrans_jax.launch import messages as msg
from knittrans_jax.trajectory import GroupMeta, MiniBatchPlan
from knittrans_jax.transfer import tickets

MAX_PARKED = 4096
"""More waiting requests than this are refused: every role has at most a few outstanding."""
COUNTERS = (
    "refused",
    "waits",
    "parked_refused",
)
"""Requests that changed nothing, by reason; `waits` are answers `Wait`."""


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
    request: WaitingRequest
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
        published: int = -1,
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
            published: with it, the newest version whose weights are there, as are those of the one before; -1: none are.

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
        self.training = TrainingDesk(config, self.state, self.desk, self._emit, self._ticket, ticket_key)
        self.weights_desk = WeightsDesk(FanOut(config.weights.fan_out), ticket_key, self._ticket)
        self.starvation = Starvation(config, self.controller, self.evaluations, self._emit, self._last_published)
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
        self._ending_since_s = 0.0
        self._evaluated = -1
        """Newest version whose evaluation was complete when the lineage last began."""
        self._heard_s: dict[str, float] = {}
        """When each role spoke last, by its process's name; training processes when they beat."""
        self._told_to_stop: set[str] = set()
        self._reported: set[str] = set()
        self._status_served = False
        self._now_s = 0.0
        for event in self._history:
            self.training.replay(event)
            self.controller.apply(event)
            self.evaluations.replay(event)
        self.desk.room.forget_releases()
        self._published_there = published
        self._began_s = 0.0
        self._inventories_awaited = False
        self._fold_figures()

    # --- the three ways in ---------------------------------------------------------------------------------------------

    def start(self, now_s: float) -> Step:
        """The first step: the run's configuration goes into the log."""
        self._now_s = max(now_s, self._history[-1].time_s if self._history else now_s)
        self._began_s = self._now_s
        config = config_to_dict(self.config)
        if self._history:
            there = self.state.published if self.state.published <= self._published_there else -1
            self._emit(ev.Resumed(time_s=self._now_s, config=config, keeps=True, published=there))
            self._inventories_awaited = True
            self._await_inventories()
        else:
            self._emit(ev.RunStarted(time_s=self._now_s, config=config))
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
            overdue = self.training.group.overdue(self._now_s, self.config.train.go_timeout_s)
            if overdue is not None:
                self.end(f"error: {overdue} within train.go_timeout_s = {self.config.train.go_timeout_s:g} s")
            stuck = self.training.stuck()
            if stuck is not None:
                self.end(f"error: {stuck}")
        self._settle()
        if self.ending is None:
            starved = self.starvation.check(self.waiting, self.last_version, self.desk.seen_s, self._now_s)
            if starved is not None:
                self.end(f"error: {starved}")
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
                if self.training.recovers and self.ending is None and self.training.group.is_another(request):
                    self._train_group_died()
                return self._park_unless(self._ended() or self.training.hello(request), token, request)
            case msg.NextPlan() | msg.ServeWeights():
                refusal = self.training.stranger(request.process, request.incarnation)
                return self._park_unless(refusal, token, request)
            case msg.ChunkHeld() | msg.ChunkMissing():
                return self._park_unless(self.training.chunk(request, self._now_s), token, request)
            case msg.UpdateDone():
                return self._ack_unless(self.training.update(request))
            case msg.CheckpointDone():
                return self._ack_unless(self.training.checkpoint(request, self._now_s))
            case msg.WeightsWritten():
                return self._ack_unless(self.training.weights(request))
            case msg.WeightsWanted():
                over = self.ending is not None
                answer = self.weights_desk.answer(request, self.training.group, self.state.published, over)
                return self._refuse(answer) if isinstance(answer, str) else answer
            case msg.Beat():
                self._heard_s[f"train{request.process}"] = self._now_s
                return msg.Ack()
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
        role = f"rollout{sync.host.removeprefix('host')}"
        self._heard_s[role] = self._now_s
        self.desk.join(sync, self._now_s)
        if self.ending is None:
            self.desk.take_reports(sync, self._now_s)
            self._settle()  # what these reports allow shows in this reply already
        if self.ending is not None:
            self._told_to_stop.add(role)
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
        role = f"storage{sync.unit.removeprefix('host')}"
        self._heard_s[role] = self._now_s
        self.desk.units[sync.unit] = sync.address
        if self.ending is not None:
            self._told_to_stop.add(role)
        if sync.recovered is not None:
            self.desk.unit_holds(sync.unit, frozenset(sync.recovered), self._now_s)
        return msg.StorageOrders(
            ticket_key=self._ticket_key,
            release=self.desk.room.orders(sync.unit),
            stop=self.ending is not None,
            inventory=sync.unit not in self.desk.inventoried,
        )

    # --- settling ------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        if self.ending is None:
            self._await_inventories()
            self._form_train_group()
            self.training.consume(self._now_s)
            version = self.training.publish(self._now_s)
            if version is not None:
                self.evaluations.published(version, len(self.desk.seen_s))
            self.training.withdraw_gone(self._now_s)
            if not self._inventories_awaited:
                self._admit()
            self._check_finished()
        for token, parked in list(self._parked.items()):
            reply = self._answer(parked.request)
            if reply is not None:
                del self._parked[token]
                self._reply(token, reply)

    def _form_train_group(self) -> None:
        if self._inventories_awaited:
            return
        state, fresh = self.state, self.state.incarnation < 0 or bool(self._history)

        def evaluated(lineage: int) -> int:
            if fresh or lineage < state.version:
                self._evaluated = self.evaluations.resume(lineage)
            return self._evaluated

        if self.training.form(self._now_s, evaluated):
            self._fold_figures()
            self._history = []

    def _train_group_died(self) -> None:
        """What its processes waited for is answered: they are of an older incarnation."""
        self.training.group_died()
        for token in [token for token, one in self._parked.items() if not isinstance(one.request, msg.TrainHello)]:
            del self._parked[token]
            self._reply(token, self._refuse("the training group has died; this process was of an older incarnation"))

    def _await_inventories(self) -> None:
        """After a restart: until the units have said what they hold, or have not come in time, nobody knows what is left."""
        if not self._inventories_awaited:
            return
        configured = {f"host{index}" for index in range(self.config.rollout.hosts)}
        control = self.config.control
        for unit in self.desk.units_to_ask():
            # One that the configuration does not know, any more, lives already if it lives at all.
            most_s = control.start_timeout_s if unit in configured else control.rpc_timeout_s
            if self._now_s - self._began_s >= most_s:
                self.desk.unit_holds(unit, (), self._now_s)
        self._inventories_awaited = bool(self.desk.units_to_ask())

    def _fold_figures(self) -> None:
        """The figures of the final lineage so far, where there is a history that may have been thrown back."""
        if self._history:
            self.figures = RunFigures(self.config.batch.mini_batches)
            for event in final_lineage(self._history).events:
                self.figures.apply(event)

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
            self.starvation.moved(self._now_s)

    def _data_ended(self) -> bool:
        """Whether a finite data set has come to its end before `train.updates`; then the run ends after what is planned."""
        state = self.state
        if self.training.group.incarnation < 0 or state.plans or state.published < self._last_published(state.version):
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

    def _answer(self, request: WaitingRequest) -> msg.Reply | None:
        ended = self.ending is not None
        reply = self.training.answer(request, ended, self.last_version)
        if isinstance(reply, msg.PlanReply) and reply.plan is None and not isinstance(request, msg.TrainHello):
            self._told_to_stop.add(f"train{request.process}")
        if reply is None and ended and not isinstance(request, msg.ServeWeights):
            return self._refuse(self._ended() or "")
        return self._refuse(reply.reason) if isinstance(reply, msg.Refused) else reply

    # --- status and end --------------------------------------------------------------------------------------------------

    def status(self) -> msg.Status:
        """The live table's figures."""
        counters = {**self.all_counters(), **self.desk.tool_counters()}
        return live_status(
            self.config,
            self.state,
            self.figures,
            self.training.group,
            self.waiting,
            self.ending,
            counters,
            {role: self._now_s - heard_s for role, heard_s in self._heard_s.items() if role not in self._told_to_stop},
        )

    def all_counters(self) -> dict[str, float]:
        """Everything that the scheduler counts, by name."""
        return {
            "episode_retries": float(self.state.retries),
            "goes": float(self.training.group.goes),
            "updates_repeated": float(self.training.retention.repeated),
            "updates_repeated_otherwise": float(self.training.retention.repeated_otherwise),
            "weights_from_training": float(self.weights_desk.fan_out.from_training),
            "weights_asked_again": float(self.weights_desk.fan_out.asked_again),
            "eval_leases_expired": float(self.evaluations.leases_expired),
            "eval_shares_superseded": float(self.evaluations.shares_superseded),
            **self.counters,
            **self.training.counters,
            **self.starvation.counters,
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
        roles = len(self.desk.seen_s) + len(self.desk.units) + len(self.training.group.sessions)
        everybody = len(self._told_to_stop) >= roles and len(self._reported) >= roles
        return everybody and (self._status_served or waited_s >= short_s)

    # --- small things ----------------------------------------------------------------------------------------------------

    def _ended(self) -> str | None:
        return None if self.ending is None else f"the run has ended: {self.ending}"

    def _ack_unless(self, refusal: str | None) -> msg.Reply:
        return msg.Ack() if refusal is None else self._refuse(refusal)

    def _park_unless(self, refusal: str | None, token: Hashable, request: WaitingRequest) -> msg.Reply | None:
        return self._park(token, request) if refusal is None else self._refuse(refusal)

    def _refuse(self, reason: str) -> msg.Refused:
        self.counters["refused"] += 1
        return msg.Refused(reason=reason)

    def _park(self, token: Hashable, request: WaitingRequest) -> msg.Reply | None:
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
