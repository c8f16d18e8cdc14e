"""The state of admission: a fold over the event log (`apply`), with constant work per event.

What it guarantees:

* `fold(rules, events)` of a log gives the state that wrote it, plans included;
* every group is in one account; an event that does not fit raises and changes nothing;
* ready groups stand in one queue per kind, oldest first; any of them can leave in constant time;
* consumed, filtered, expired, lost and failed groups are kept as counts only, so memory follows what is open.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import OPEN, POOL, Account, Accounts, IllegalTransition
from knittrans_jax.admission.rules import Completion, Kind, Rules
from knittrans_jax.trajectory import GroupMeta, MiniBatchPlan


@dataclasses.dataclass(slots=True)
class Group:
    """An open group. `order` is its place among the groups that became ready (0: not ready yet)."""

    group_id: int
    kind: Kind
    prompt_id: str
    epoch: int
    host: str
    version: int
    """Published version when it was leased."""
    account: Account
    since_s: float
    """When it came to its account."""
    order: int = 0
    meta: GroupMeta | None = None
    episode_retries: int = 0


@dataclasses.dataclass(slots=True)
class Batch:
    """The train batch that admission is filling."""

    train_step: int
    completion: Completion
    mini_batches: int = 0
    """Mini-batches admitted so far."""
    prompts: set[str] = dataclasses.field(default_factory=set)
    failed: set[str] = dataclasses.field(default_factory=set)
    """Prompts whose group failed while this batch was being filled."""
    admitted: dict[Kind, int] = dataclasses.field(default_factory=dict)


class AdmissionState:
    """See the module's opening. Only `apply` changes it."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.groups: dict[int, Group] = {}
        self.accounts = Accounts(rules.kinds)
        self.ready: dict[Kind, collections.OrderedDict[int, Group]] = {
            kind: collections.OrderedDict() for kind in rules.kinds
        }
        self.pool_prompts: dict[str, int] = {}
        """Prompts of leased, running and ready groups, with how many groups each has."""
        self.open_by_host: dict[str, int] = {}
        """Open groups by rollout host: what its storage unit must have room for."""
        self.batch = Batch(0, rules.open_batch())
        self.plans: dict[int, MiniBatchPlan] = {}
        """Admitted and not yet consumed, oldest first."""
        self.hosts: dict[str, str] = {}
        """Storage unit by rollout host."""
        self.version = 0
        """`V`: updates applied."""
        self.published = -1
        self.admitted_updates = 0
        self.next_group_id = 0
        self.next_plan_id = 0
        self.incarnation = -1
        self.retries = 0
        self.last_failure = ""
        self.ended: str | None = None
        self._ready_order = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdmissionState) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def apply(self, event: ev.AnyEvent) -> None:
        """Folds one event in.

        Raises:
            IllegalTransition: the event does not fit the state.
        """
        _HANDLERS[type(event)](self, event)

    def busy(self, prompt_id: str) -> bool:
        """Whether a group of this prompt is in the pool or in the train batch being filled."""
        return prompt_id in self.pool_prompts or prompt_id in self.batch.prompts

    def busy_or_failed(self, prompt_id: str) -> bool:
        """Whether others should go first: busy, or its group failed for the train batch being filled."""
        return self.busy(prompt_id) or prompt_id in self.batch.failed

    # --- one method per event -------------------------------------------------------------------------------------------

    def _nothing(self, event: ev.AnyEvent) -> None:
        pass

    def _host_joined(self, event: ev.HostJoined) -> None:
        self.hosts[event.host] = event.unit

    def _train_group_formed(self, event: ev.TrainGroupFormed) -> None:
        self.incarnation = event.incarnation

    def _leased(self, event: ev.Leased) -> None:
        if event.group_id != self.next_group_id:
            raise IllegalTransition(f"group {event.group_id} was leased, the next id is {self.next_group_id}")
        kind = self.rules.kind(event.attributes)
        self.next_group_id += 1
        self.groups[event.group_id] = Group(
            event.group_id, kind, event.prompt_id, event.epoch, event.host, event.version, Account.LEASED, event.time_s
        )
        self.accounts.issue(kind)
        self.pool_prompts[event.prompt_id] = self.pool_prompts.get(event.prompt_id, 0) + 1
        self.open_by_host[event.host] = self.open_by_host.get(event.host, 0) + 1

    def _started(self, event: ev.Started) -> None:
        self._move(event.group_id, Account.RUNNING, event.time_s)

    def _ready(self, event: ev.Ready) -> None:
        group = self._move(event.group.group_id, Account.READY, event.time_s)
        self._ready_order += 1
        group.order, group.meta, group.episode_retries = self._ready_order, event.group, event.episode_retries
        self.ready[group.kind][group.group_id] = group
        self.retries += event.episode_retries

    def _failed(self, event: ev.Failed) -> None:
        self.batch.failed.add(self._move(event.group_id, Account.FAILED, event.time_s).prompt_id)
        self.retries += event.episode_retries
        self.last_failure = event.reason

    def _filtered(self, event: ev.Filtered) -> None:
        self._move(event.group_id, Account.FILTERED, event.time_s)

    def _expired(self, event: ev.Expired) -> None:
        self._move(event.group_id, Account.EXPIRED, event.time_s)

    def _lost(self, event: ev.Lost) -> None:
        group = self.groups.get(event.group_id)
        if group is not None and group.account is Account.ADMITTED:
            raise IllegalTransition(
                f"group {event.group_id} is in a mini-batch under way; its plan must be withdrawn first"
            )
        self._move(event.group_id, Account.LOST, event.time_s)

    def _admitted(self, event: ev.Admitted) -> None:
        plan, batch = event.plan, self.batch
        if (plan.plan_id, plan.update) != (self.next_plan_id, self.admitted_updates) or (
            plan.train_step,
            plan.mini_batch,
        ) != (batch.train_step, batch.mini_batches):
            raise IllegalTransition(
                f"plan {plan.plan_id} (update {plan.update}, mini-batch {plan.mini_batch} of train batch {plan.train_step}) "
                f"was admitted; the next is plan {self.next_plan_id}, update {self.admitted_updates}, mini-batch "
                f"{batch.mini_batches} of train batch {batch.train_step}"
            )
        groups = [self._open(planned.group_id, Account.READY) for planned in plan.groups]
        completion, prompts = batch.completion.copy(), set(batch.prompts)
        for group in groups:
            if group.prompt_id in prompts:
                raise IllegalTransition(f"prompt {group.prompt_id} comes twice in train batch {batch.train_step}")
            prompts.add(group.prompt_id)
            try:
                completion.take(group.kind)
            except ValueError as error:
                raise IllegalTransition(f"plan {plan.plan_id}, group {group.group_id}: {error}") from error
        batch.completion, batch.prompts = completion, prompts
        for group in groups:
            self._move(group.group_id, Account.ADMITTED, event.time_s)
            batch.admitted[group.kind] = batch.admitted.get(group.kind, 0) + 1
        batch.mini_batches += 1
        self.plans[plan.plan_id] = plan
        self.next_plan_id += 1
        self.admitted_updates += 1
        if batch.mini_batches == self.rules.mini_batches:
            self.batch = Batch(batch.train_step + 1, self.rules.open_batch())

    def _consumed(self, event: ev.Consumed) -> None:
        plan = next(iter(self.plans.values()), None)
        if plan is None or plan.plan_id != event.plan_id or event.update != self.version:
            raise IllegalTransition(
                f"plan {event.plan_id} (update {event.update}) was consumed; the next is "
                f"{'none' if plan is None else plan.plan_id}, update {self.version}"
            )
        del self.plans[event.plan_id]
        for planned in plan.groups:
            self._move(planned.group_id, Account.CONSUMED, event.time_s)
        self.version += 1

    def _published(self, event: ev.Published) -> None:
        if not self.published < event.version <= self.version:
            raise IllegalTransition(
                f"version {event.version} was published; versions grow (last {self.published}) and follow updates "
                f"(at {self.version})"
            )
        self.published = event.version

    def _run_ended(self, event: ev.RunEnded) -> None:
        self.ended = event.reason

    # --- moves ------------------------------------------------------------------------------------------------------------

    def _open(self, group_id: int, expected: Account | None = None) -> Group:
        group = self.groups.get(group_id)
        if group is None:
            raise IllegalTransition(f"group {group_id} is not open: never leased, or at its end already")
        if expected is not None and group.account is not expected:
            raise IllegalTransition(f"group {group_id} is {group.account}, expected {expected}")
        return group

    def _move(self, group_id: int, target: Account, time_s: float) -> Group:
        group = self._open(group_id)
        source = group.account
        self.accounts.move(group_id, group.kind, source, target)
        group.account, group.since_s = target, time_s
        if source is Account.READY:
            del self.ready[group.kind][group_id]
        if source in POOL and target not in POOL:
            self._count_down(self.pool_prompts, group.prompt_id)
        if target not in OPEN:
            self._count_down(self.open_by_host, group.host)
            del self.groups[group_id]
        return group

    @staticmethod
    def _count_down(counts: dict[str, int], key: str) -> None:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]


_HANDLERS: dict[type, Callable[[AdmissionState, ev.AnyEvent], None]] = {
    ev.RunStarted: AdmissionState._nothing,
    ev.HostJoined: AdmissionState._host_joined,
    ev.TrainGroupFormed: AdmissionState._train_group_formed,
    ev.Leased: AdmissionState._leased,
    ev.Started: AdmissionState._started,
    ev.Ready: AdmissionState._ready,
    ev.Failed: AdmissionState._failed,
    ev.Filtered: AdmissionState._filtered,
    ev.Expired: AdmissionState._expired,
    ev.Lost: AdmissionState._lost,
    ev.Admitted: AdmissionState._admitted,
    ev.Consumed: AdmissionState._consumed,
    ev.Published: AdmissionState._published,
    ev.EvalLeased: AdmissionState._nothing,
    ev.EvalDone: AdmissionState._nothing,
    ev.EvalExpired: AdmissionState._nothing,
    ev.RoleReport: AdmissionState._nothing,
    ev.RunEnded: AdmissionState._run_ended,
}  # pyright: ignore[reportAssignmentType]


def fold(rules: Rules, events: Iterable[ev.AnyEvent]) -> AdmissionState:
    """The state after these events."""
    state = AdmissionState(rules)
    for event in events:
        state.apply(event)
    return state
