"""The state of admission: a fold over the event log (`apply`), with constant work per event.

What it guarantees:

* `fold(rules, events)` of a log gives the state that wrote it, plans included;
* every group is in one account; an event that does not fit raises and changes nothing;
* ready groups stand in one queue per kind, oldest first; any of them can leave in constant time;
* no mini-batch is taken in that breaks a rule: quotas, no prompt twice, the staleness bound;
* filtered, expired, lost and failed groups are kept as counts only, consumed ones by id and prompt until no checkpoint that is
  kept could make them unconsumed again; so memory follows what is open;
* a mini-batch that is withdrawn leaves no trace: its groups stand in the queues where they stood, its places are open again;
* what was consumed after the version from which training goes on becomes lost; a training group that begins anew, and repeats
  what followed, changes nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import IN_FLIGHT, OPEN, POOL, Account, Accounts, IllegalTransition
from knittrans_jax.admission.completion import Completion, Kind
from knittrans_jax.admission.rules import Rules
from knittrans_jax.trajectory import GroupMeta, MiniBatchPlan, PlannedGroup

SLOW_SHARE = 0.25
"""Groups that took longer than all but this share are slow (`admission.spread_slow`)."""
SLOW_STEP = 0.05
"""How far one group moves the estimate of where the slow ones begin."""


_LEASED, _RUNNING, _READY = Account.LEASED, Account.RUNNING, Account.READY


class Group(msgspec.Struct, gc=False):
    """An open group. `order` is its place among the groups that became ready (0: not ready yet)."""

    group_id: int
    kind: Kind
    """By its prompt."""
    prompt_id: str
    epoch: int
    host: str
    version: int
    """Published version when it was leased."""
    account: Account
    since_s: float
    """When it came to its account."""
    final: Kind = ()
    """Its kind once it is done."""
    order: int = 0
    meta: GroupMeta | None = None
    episode_retries: int = 0
    slow: bool = False


class ConsumedGroup(msgspec.Struct, frozen=True, gc=False):
    """What must be known of a consumed group to launch its prompt again, and to open its train batch again."""

    group_id: int
    kind: Kind
    prompt_id: str
    epoch: int
    final: Kind


class ConsumedPlan(msgspec.Struct, frozen=True):
    """A mini-batch that the update from `update` to `update + 1` consumed."""

    update: int
    groups: tuple[ConsumedGroup, ...]


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
    given_up: set[Kind] = dataclasses.field(default_factory=set)
    """Launched kinds that a relaxed rule waited for: they are not counted on any more."""

    def take(self, counts: Mapping[Kind, int], prompts: Iterable[str]) -> None:
        """Takes a mini-batch in, by final kinds and prompts. Raises `ValueError` when that breaks a rule."""
        completion = self.completion.copy()
        completion.take_all(counts)
        self.completion = completion
        self.prompts.update(prompts)
        for final, count in counts.items():
            self.admitted[final] = self.admitted.get(final, 0) + count
        self.mini_batches += 1


class AdmissionState:
    """See the module's opening. Only `apply` changes it."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.groups: dict[int, Group] = {}
        self.accounts = Accounts(rules.kinds, rules.final_kinds)
        self.ready: dict[Kind, collections.OrderedDict[int, Group]] = {
            kind: collections.OrderedDict() for kind in rules.final_kinds
        }
        self.ready_by_version: dict[int, dict[int, Group]] = {}
        """Ready groups by the oldest version that sampled them; kept where there is a staleness bound."""
        self.dropped_in_a_row: dict[Kind, int] = {}
        """Groups filtered, or too stale when they came, since one of the kind was last admitted."""
        self.slow_s = 0.0
        """Groups that take longer are slow (an estimate, folded from all so far)."""
        self.relaxed: dict[str, int] = {}
        """How often each rule was dropped for a train batch."""
        self.relaxed_in: dict[int, list[tuple[str, str]]] = {}
        """Rules and values that were dropped, by train batch, as far back as one may be opened again."""
        self.pool_prompts: dict[str, int] = {}
        """Prompts of leased, running and ready groups, with how many groups each has."""
        self.open_by_host: dict[str, int] = {}
        """Open groups by rollout host: what its storage unit must have room for."""
        self.batch = Batch(0, rules.open_batch())
        self.plans: dict[int, MiniBatchPlan] = {}
        """Admitted and not yet consumed, oldest first."""
        self.consumed: dict[int, ConsumedPlan] = {}
        """Consumed plans that a resumed run may have to consume again, and the last one before them; oldest first."""
        self.oldest_checkpoint = 0
        """The lowest version from which the run could be resumed."""
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
        self._interrupted = False
        """The run is resumed, and no training group has formed since."""
        self._bounded, self._has_final = rules.staleness_bound is not None, bool(rules.final_attributes)
        self._spread, self._launched = rules.spread_slow, len(rules.prompt_attributes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AdmissionState) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def apply(self, event: ev.AnyEvent) -> None:
        """Folds one event in.

        Raises:
            IllegalTransition: the event does not fit the state.
        """
        _HANDLERS[event.__class__](self, event)

    def busy(self, prompt_id: str) -> bool:
        """Whether a group of this prompt is in the pool or in the train batch being filled."""
        return prompt_id in self.pool_prompts or prompt_id in self.batch.prompts

    def busy_or_failed(self, prompt_id: str) -> bool:
        """Whether others should go first: busy, or its group failed for the train batch being filled."""
        return self.busy(prompt_id) or prompt_id in self.batch.failed

    def is_stale(self, group: Group) -> bool:
        """Whether a ready group is beyond the staleness bound for the next update planned, and hence for all after it."""
        bound = self.rules.staleness_bound
        return (
            bound is not None and group.meta is not None and self.admitted_updates - oldest_version(group.meta) > bound
        )

    def stale(self) -> list[Group]:
        """Ready groups beyond the staleness bound, in the order in which they became ready."""
        bound = self.rules.staleness_bound
        if bound is None:
            return []
        oldest = self.admitted_updates - bound
        found = [g for version, groups in self.ready_by_version.items() if version < oldest for g in groups.values()]
        return sorted(found, key=lambda group: group.order)

    def due(self) -> list[Group]:
        """Ready groups that the next mini-batch is the last one for, in the order in which they became ready."""
        bound = self.rules.staleness_bound
        if bound is None:
            return []
        groups = self.ready_by_version.get(self.admitted_updates - bound, {})
        return sorted(groups.values(), key=lambda group: group.order)

    def why_not_from(self, version: int, after_plan: int) -> str | None:
        """Why training cannot go on from this version, after this plan's update; None: it can."""
        last = next((plan_id for plan_id, plan in self.consumed.items() if plan.update == version - 1), -1)
        if not self.oldest_checkpoint <= version <= self.version or version % self.rules.mini_batches:
            return (
                f"training cannot begin at version {version}: the log allows whole train batches from version "
                f"{self.oldest_checkpoint}, its oldest checkpoint, to version {self.version}"
            )
        if last != after_plan:
            return (
                f"training cannot begin at version {version} after plan {after_plan}: in the log, plan {last} leads to "
                f"version {version}; this checkpoint is not of this run's lineage"
            )
        return None

    def given_back(self, event: ev.AnyEvent) -> list[tuple[str, int]]:
        """Prompts, with their epochs, that are to be launched again once this event is applied; the oldest first."""
        match event:
            case ev.Expired() | ev.Lost():
                group = self.groups.get(event.group_id)
                groups = [] if group is None or not ev.gives_back(event) else [group]
            case ev.Resumed():
                gone = [group for group in self.groups.values() if not event.keeps or group.account in IN_FLIGHT]
                groups = sorted(gone, key=lambda group: group.group_id)
            case ev.TrainGroupFormed():
                undone: list[ConsumedGroup | Group] = [
                    group for plan in self.consumed.values() if plan.update >= event.lineage for group in plan.groups
                ]
                if event.lineage < self.version:
                    undone += [self.groups[one.group_id] for plan in self.plans.values() for one in plan.groups]
                groups = sorted(undone, key=lambda group: group.group_id)
            case ev.Withdrawn():
                groups = [self.groups[group_id] for group_id in sorted(event.lost)]
            case _:
                groups = []
        return [(group.prompt_id, group.epoch) for group in groups]

    # --- one method per event -------------------------------------------------------------------------------------------

    def _nothing(self, event: ev.AnyEvent) -> None:
        pass

    def _host_joined(self, event: ev.HostJoined) -> None:
        self.hosts[event.host] = event.unit

    def _train_group_formed(self, event: ev.TrainGroupFormed) -> None:
        refusal = self.why_not_from(event.version, event.after_plan)
        if refusal is not None:
            raise IllegalTransition(refusal)
        if event.repeated < 0 or event.lineage > self.version:
            raise IllegalTransition(
                f"{event.repeated} updates are repeated from version {event.version}, of {self.version} in the log"
            )
        self.incarnation = event.incarnation
        if event.lineage == self.version and not self._interrupted:
            return  # mini-batches under way go on as they are
        self._interrupted = False
        for plan in self.plans.values():
            for one in plan.groups:
                self._move(one.group_id, Account.LOST, event.time_s)
        self.plans.clear()
        for plan_id in [plan_id for plan_id, plan in self.consumed.items() if plan.update >= event.lineage]:
            for group in self.consumed.pop(plan_id).groups:
                self.accounts.move(group.group_id, group.kind, Account.CONSUMED, Account.LOST)
        self.version = event.lineage
        self._reopen(event.lineage)

    def _resumed(self, event: ev.Resumed) -> None:
        if not event.keeps:
            self.plans.clear()
        for group in list(self.groups.values()):
            if not event.keeps or group.account in IN_FLIGHT:
                self._move(group.group_id, Account.LOST, event.time_s)
        self.published = event.published
        self.ended = None
        self._interrupted = not event.keeps

    def _checkpointed(self, event: ev.Checkpointed) -> None:
        if not self.oldest_checkpoint <= event.oldest <= event.version <= self.version:
            raise IllegalTransition(
                f"checkpoint of version {event.version} (oldest kept {event.oldest}) at version {self.version}, with an "
                f"oldest of {self.oldest_checkpoint} before"
            )
        self.oldest_checkpoint = event.oldest
        for plan_id in [plan_id for plan_id, plan in self.consumed.items() if plan.update < event.oldest - 1]:
            del self.consumed[plan_id]
        for step in [step for step in self.relaxed_in if (step + 1) * self.rules.mini_batches <= event.oldest]:
            del self.relaxed_in[step]

    def _leased(self, event: ev.Leased) -> None:
        group_id, prompt_id, host = event.group_id, event.prompt_id, event.host
        if group_id != self.next_group_id:
            raise IllegalTransition(f"group {group_id} was leased, the next id is {self.next_group_id}")
        kind = self.rules.kind(event.attributes)
        self.next_group_id += 1
        self.groups[group_id] = Group(
            group_id, kind, prompt_id, event.epoch, host, event.version, _LEASED, event.time_s, kind
        )
        self.accounts.issue(kind)
        pool, hosts = self.pool_prompts, self.open_by_host
        pool[prompt_id] = pool.get(prompt_id, 0) + 1
        hosts[host] = hosts.get(host, 0) + 1

    def _started(self, event: ev.Started) -> None:
        group = self.groups.get(event.group_id) or self._open(event.group_id)
        self.accounts.move(event.group_id, group.kind, group.account, _RUNNING)
        group.account, group.since_s = _RUNNING, event.time_s

    def _ready(self, event: ev.Ready) -> None:
        meta, now_s, retries = event.group, event.time_s, event.episode_retries
        group_id = meta.group_id
        group = self.groups.get(group_id) or self._open(group_id)
        kind = group.kind
        final = self.rules.final_kind(kind, meta) if self._has_final else kind
        if group.account is not _RUNNING:
            self._open(group_id, _RUNNING)  # raises
        self.accounts.become_ready(final)
        took_s = now_s - group.since_s
        self._ready_order = group.order = self._ready_order + 1
        group.account, group.since_s, group.final, group.meta = _READY, now_s, final, meta
        self.ready[final][group_id] = group
        if retries:
            group.episode_retries = retries
            self.retries += retries
        if self._bounded:
            self.ready_by_version.setdefault(oldest_version(meta), {})[group.group_id] = group
        if self._spread:
            group.slow = took_s > self.slow_s
            share = (1 - SLOW_SHARE) if group.slow else -SLOW_SHARE
            self.slow_s = max(0.0, self.slow_s + SLOW_STEP * share * max(took_s, self.slow_s))

    def _failed(self, event: ev.Failed) -> None:
        group = self._move(event.group_id, Account.FAILED, event.time_s)
        self.batch.failed.add(group.prompt_id)
        self.retries += event.episode_retries
        self.last_failure = event.reason

    def _filtered(self, event: ev.Filtered) -> None:
        self._dropped(self._move(event.group_id, Account.FILTERED, event.time_s))

    def _expired(self, event: ev.Expired) -> None:
        group = self._open(event.group_id)
        was_ready = group.account is Account.READY
        self._move(group.group_id, Account.EXPIRED, event.time_s)
        if was_ready:
            self._dropped(group)

    def _dropped(self, group: Group) -> None:
        self.dropped_in_a_row[group.kind] = self.dropped_in_a_row.get(group.kind, 0) + 1

    def _relaxed(self, event: ev.Relaxed) -> None:
        completion = self.batch.completion.copy()
        if not completion.relax(event.rule, event.value):
            raise IllegalTransition(f"{event.rule} of {event.value} cannot be relaxed")
        self.batch.completion = completion
        self.relaxed_in.setdefault(self.batch.train_step, []).append((event.rule, event.value))
        self.batch.given_up.update(event.kinds)
        self.relaxed[event.rule] = self.relaxed.get(event.rule, 0) + 1

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
        groups = self._all_open(plan, _READY)
        prompts, counts = {group.prompt_id for group in groups}, collections.Counter([g.final for g in groups])
        if len(prompts) < len(groups) or not prompts.isdisjoint(batch.prompts):
            seen = set(batch.prompts)
            twice = next(g.prompt_id for g in groups if g.prompt_id in seen or seen.add(g.prompt_id))
            raise IllegalTransition(f"prompt {twice} comes twice in train batch {batch.train_step}")
        stale = [group.group_id for group in groups if self.is_stale(group)] if self._bounded else []
        if stale:
            raise IllegalTransition(
                f"plan {plan.plan_id}: groups {stale} are beyond {self.rules.staleness_bound} updates"
            )
        try:
            batch.take(counts, prompts)
        except ValueError as error:
            raise IllegalTransition(f"plan {plan.plan_id}: {error}") from error
        self._move_all(groups, counts, Account.ADMITTED, event.time_s)
        if self.dropped_in_a_row:
            for group in groups:
                self.dropped_in_a_row.pop(group.kind, None)
        self.plans[plan.plan_id] = plan
        self.next_plan_id += 1
        self.admitted_updates += 1
        if batch.mini_batches == self.rules.mini_batches:
            self.batch = Batch(batch.train_step + 1, self.rules.open_batch())

    def _withdrawn(self, event: ev.Withdrawn) -> None:
        first = self.plans.get(event.plan_id)
        if first is None:
            raise IllegalTransition(f"plan {event.plan_id} was withdrawn, and is not under way")
        withdrawn = [plan for plan in self.plans.values() if plan.plan_id >= event.plan_id]
        groups = {one.group_id for plan in withdrawn for one in plan.groups}
        if not groups.issuperset(event.lost):
            raise IllegalTransition(f"groups {sorted(set(event.lost) - groups)} are lost, but not in what is withdrawn")
        for plan in withdrawn:
            del self.plans[plan.plan_id]
        for group_id in event.lost:
            self._move(group_id, Account.LOST, event.time_s)
        self._ready_again([self._open(group_id, Account.ADMITTED) for group_id in sorted(groups - set(event.lost))])
        self._reopen(first.update)

    def _ready_again(self, groups: Iterable[Group]) -> None:
        """Admitted groups stand in the queues again where they stood."""
        kinds = set()
        for group in groups:
            assert group.meta is not None
            self.accounts.move(group.group_id, group.kind, Account.ADMITTED, _READY, group.final)
            group.account = _READY
            self.pool_prompts[group.prompt_id] = self.pool_prompts.get(group.prompt_id, 0) + 1
            self.ready[group.final][group.group_id] = group
            kinds.add(group.final)
            if self._bounded:
                self.ready_by_version.setdefault(oldest_version(group.meta), {})[group.group_id] = group
        for kind in kinds:
            queue = sorted(self.ready[kind].items(), key=lambda item: item[1].order)
            self.ready[kind] = collections.OrderedDict(queue)

    def _reopen(self, update: int) -> None:
        """The next mini-batch is that of `update`: its train batch is as it was before that one was admitted."""
        every = self.rules.mini_batches
        batch = Batch(update // every, self.rules.open_batch())
        if batch.train_step == self.batch.train_step:
            batch.failed, batch.given_up = self.batch.failed, self.batch.given_up
        for rule, value in self.relaxed_in.get(batch.train_step, ()):
            batch.completion.relax(rule, value)
        taken: list[Sequence[ConsumedGroup | Group]] = [
            plan.groups for plan in self.consumed.values() if every * batch.train_step <= plan.update < update
        ]
        taken += [
            [self.groups[one.group_id] for one in plan.groups]
            for plan in self.plans.values()
            if plan.train_step == batch.train_step
        ]
        for groups in taken:
            batch.take(collections.Counter(group.final for group in groups), [group.prompt_id for group in groups])
        self.batch, self.admitted_updates = batch, update

    def _consumed(self, event: ev.Consumed) -> None:
        plan = next(iter(self.plans.values()), None)
        if plan is None or plan.plan_id != event.plan_id or event.update != self.version:
            raise IllegalTransition(
                f"plan {event.plan_id} (update {event.update}) was consumed; the next is "
                f"{'none' if plan is None else plan.plan_id}, update {self.version}"
            )
        del self.plans[event.plan_id]
        groups = self._all_open(plan, Account.ADMITTED)
        counts = collections.Counter([group.final for group in groups])
        self._move_all(groups, counts, Account.CONSUMED, event.time_s)
        self.consumed[event.plan_id] = ConsumedPlan(
            event.update, tuple([ConsumedGroup(g.group_id, g.kind, g.prompt_id, g.epoch, g.final) for g in groups])
        )
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

    def _all_open(self, plan: MiniBatchPlan, expected: Account) -> list[Group]:
        """The groups of a plan, all in this account."""
        opened = self.groups
        groups = [group for planned in plan.groups if (group := opened.get(planned.group_id)) is not None]
        if len(groups) < len(plan.groups) or {group.account for group in groups} != {expected}:
            groups = [self._open(planned.group_id, expected) for planned in plan.groups]  # raises, naming the first
        return groups

    def _move(self, group_id: int, target: Account, time_s: float) -> Group:
        group = self._open(group_id)
        self.accounts.move(group_id, group.kind, group.account, target, group.final)
        self._leave([group], group.account, target, time_s)
        return group

    def _move_all(self, groups: list[Group], counts: Mapping[Kind, int], target: Account, time_s: float) -> None:
        """Groups of one account that move together; `counts` of them by final kind."""
        source = groups[0].account
        for final, count in counts.items():
            self.accounts.move(groups[0].group_id, final[: self._launched], source, target, final, count)
        self._leave(groups, source, target, time_s)

    def _leave(self, groups: list[Group], source: Account, target: Account, time_s: float) -> None:
        """What goes with leaving an account: queues, and counts by prompt and host."""
        for group in groups:
            group.account, group.since_s = target, time_s
        if source is _READY:
            ready = self.ready
            for group in groups:
                del ready[group.final][group.group_id]
            if self._bounded:
                self._forget_versions(groups)
        if source in POOL and target not in POOL:
            prompts = self.pool_prompts
            for group in groups:
                count = prompts.pop(group.prompt_id) - 1
                if count:
                    prompts[group.prompt_id] = count
        if target not in OPEN:
            opened, hosts = self.groups, self.open_by_host
            for group in groups:
                del opened[group.group_id]
                count = hosts.pop(group.host) - 1
                if count:
                    hosts[group.host] = count

    def _forget_versions(self, groups: list[Group]) -> None:
        for group in groups:
            assert group.meta is not None
            version = oldest_version(group.meta)
            del self.ready_by_version[version][group.group_id]
            if not self.ready_by_version[version]:
                del self.ready_by_version[version]


_HANDLERS: dict[type, Callable[[AdmissionState, ev.AnyEvent], None]] = {
    ev.RunStarted: AdmissionState._nothing,
    ev.Resumed: AdmissionState._resumed,
    ev.HostJoined: AdmissionState._host_joined,
    ev.TrainGroupFormed: AdmissionState._train_group_formed,
    ev.Leased: AdmissionState._leased,
    ev.Started: AdmissionState._started,
    ev.Ready: AdmissionState._ready,
    ev.Failed: AdmissionState._failed,
    ev.Filtered: AdmissionState._filtered,
    ev.Expired: AdmissionState._expired,
    ev.Lost: AdmissionState._lost,
    ev.Starved: AdmissionState._nothing,
    ev.Relaxed: AdmissionState._relaxed,
    ev.Admitted: AdmissionState._admitted,
    ev.Withdrawn: AdmissionState._withdrawn,
    ev.Consumed: AdmissionState._consumed,
    ev.Checkpointed: AdmissionState._checkpointed,
    ev.Published: AdmissionState._published,
    ev.EvalLeased: AdmissionState._nothing,
    ev.EvalDone: AdmissionState._nothing,
    ev.EvalExpired: AdmissionState._nothing,
    ev.RoleReport: AdmissionState._nothing,
    ev.RunEnded: AdmissionState._run_ended,
}  # pyright: ignore[reportAssignmentType]


def oldest_version(meta: GroupMeta) -> int:
    """The oldest version that sampled any token of a group."""
    return min([one.version_min for one in meta.trajectories])


def plan_without_layout(
    state: AdmissionState, groups: Iterable[PlannedGroup], sampled_tokens: int = 1
) -> MiniBatchPlan:
    """The next plan of this state, stating its groups only: where nothing is laid out, simulated or measured."""
    return MiniBatchPlan(
        plan_id=state.next_plan_id,
        update=state.admitted_updates,
        train_step=state.batch.train_step,
        mini_batch=state.batch.mini_batches,
        groups=tuple(groups),
        placements=(),
        images=(),
        shards=1,
        row_tokens=1,
        rows_per_micro_batch=1,
        chunk_micro_batches=1,
        chunks=1,
        encoder_rows_per_shard=0,
        encoder_row_patches=0,
        sampled_tokens=sampled_tokens,
    )


def fold(rules: Rules, events: Iterable[ev.AnyEvent]) -> AdmissionState:
    """The state after these events."""
    state = AdmissionState(rules)
    for event in events:
        state.apply(event)
    return state
