"""The launch gate: of which kind a prompt may be launched next, so that look-ahead is bounded and no batch gets stuck.

With published version `P`, batches of `B` groups in `K` mini-batches, look-ahead `L`, and `n_d` groups of kind `d` in the
composition of one whole batch (`Rules.composition`: the exact quotas where there are any), let `T_d` be the groups of kind `d`
that the batches up to the one that version `P` begins are made of: those whose mini-batches are all admitted of what was
admitted, the others of `n_d`. With exact quotas `T_d = (P // K + 1) * n_d`. A group of kind `d` is launched only while one of
these holds:

1. `live_d < T_d`: these batches still lack it;
2. `live_d < T_d + L_d`, and what is above these shares, of all kinds, is less than `L`: look-ahead
   (with both, `live < (P // K + 1) * B + L`);
3. nothing is left to launch by these, the groups that are launched and not yet admitted cannot complete the train batch under
   way, and one more of this kind helps. With quotas that are ranges a batch's mini-batches may have taken other kinds than were
   launched for it; and a kind may have no prompt to launch (all are busy, or failed for this batch) while others can do for it.
   Such a group is launched *beyond the gate* and counted in `beyond`; later batches launch so many less.

Where quotas are ranges, 1 and 2 also keep at most `L` launched groups of no use to the train batch under way.
Hence `live_d < (P // K + 1) * B_d + L_d` with `B_d` the maximum of `d`, and `live < (P // K + 1) * B + L`, strictly (one more
would make the colocated schedule stale), but for what 3 needs; and every launched set holds a whole valid batch.

Groups beyond the run's last train batch are launched only to finish it. Uniform look-ahead is shared over kinds in proportion
to `n_d`; one per value over the kinds that have it; `auto` is `look_ahead.AutoLookAhead`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.look_ahead import AutoLookAhead
from knittrans_jax.admission.rules import Kind, Rules
from knittrans_jax.admission.state import AdmissionState
from knittrans_jax.admission.storage_room import most_retained_groups
from knittrans_jax.config import Config

LookAhead = int | Mapping[str, int] | Literal["auto"]
AUTO_BATCHES = 2
"""`auto` looks ahead at most so many train batches, where no other bound is lower."""


class LaunchGate:
    """See the module's opening. Pure: the state comes in as an argument; `observe` folds what `auto` learns from."""

    def __init__(
        self,
        rules: Rules,
        look_ahead: LookAhead,
        train_steps: int | None = None,
        *,
        most_look_ahead: int | None = None,
    ) -> None:
        """Builds the gate.

        Args:
            rules: the batch's resolved rules.
            look_ahead: `L` in groups, shared over kinds; or per value of an attribute (0 for those not named); or `auto`.
            train_steps: train batches of the whole run; None: without end.
            most_look_ahead: the bound on `auto`, from staleness and storage; None: `AUTO_BATCHES` train batches.

        Raises:
            ValueError: a value that no kind has.
        """
        self._rules = rules
        self._train_steps = train_steps
        self._kinds = rules.kinds
        self._composition = rules.composition
        self.auto: AutoLookAhead | None = None
        self.beyond = 0
        """Groups launched beyond the gate."""
        self._by_kind: Mapping[Kind, int] = {}
        if look_ahead == "auto":
            most = min(AUTO_BATCHES * rules.groups, _most_within_bound(rules))
            self.most_look_ahead_groups = most if most_look_ahead is None else min(most, most_look_ahead)
            self.auto = AutoLookAhead(rules, self.most_look_ahead_groups)
        elif isinstance(look_ahead, Mapping):
            self._by_kind = self._by_value(look_ahead)
            self.most_look_ahead_groups = sum(look_ahead.values())
        else:
            self.most_look_ahead_groups = look_ahead
            # One more than a kind's share is held by the bound on all together.
            self._by_kind = {k: -(-look_ahead * n // rules.groups) for k, n in self._composition.items()}
        quotas = [rules.quota(kind) for kind in self._kinds]
        self._exact = all(quota.least == quota.most for quota in quotas) or len(quotas) == 1
        self._exact = self._exact and not rules.final_attributes

    def _by_value(self, look_ahead: Mapping[str, int]) -> dict[Kind, int]:
        """Each value's look-ahead, shared over its kinds."""
        by_kind = dict.fromkeys(self._kinds, 0)
        for value, groups in look_ahead.items():
            having = {kind: self._composition[kind] for kind in self._kinds if value in kind}
            if not having:
                raise ValueError(f"look-ahead of {value!r}: no group has this value")
            whole = sum(having.values())
            for kind, count in having.items():
                by_kind[kind] += -(-groups * count // whole) if whole else 0
        return by_kind

    @property
    def look_ahead_groups(self) -> int:
        """`L` as it is now, in groups."""
        return self.most_look_ahead_groups if self.auto is None else self.auto.total

    @property
    def look_ahead_by_kind(self) -> Mapping[Kind, int]:
        """`L_d` as it is now, in groups."""
        return self._by_kind if self.auto is None else self.auto.groups

    @property
    def most_useless_groups(self) -> int:
        """The most launched groups that the train batch under way may have no use for, at any time."""
        return self.most_look_ahead_groups

    def domain_limit(self, kind: Kind, published: int) -> int:
        """A number of live groups of a kind from which on the gate itself lets none go: the least one with exact quotas."""
        most = self._composition[kind] if self._exact else self._rules.quota(kind).most
        return self._begun(published) * most + self.look_ahead_by_kind[kind]

    def total_limit(self, published: int) -> int:
        """The least number of live groups at which the gate itself lets none go any more."""
        return (published // self._rules.mini_batches + 1) * self._rules.groups + self.look_ahead_groups

    def allows(self, state: AdmissionState, kind: Kind) -> bool:
        """Whether one more group of this kind may be launched now."""
        return self.next_kind(state, lambda k: k == kind) is not None

    def next_kind(self, state: AdmissionState, has_prompt: Callable[[Kind], bool]) -> Kind | None:
        """The kind to launch next; None: none.

        What the batches begun lack goes before look-ahead; then the kind of which the greater share is missing.
        """
        if state.published < 0:
            return None
        given_up = state.batch.given_up

        def available(kind: Kind) -> bool:
            return kind not in given_up and has_prompt(kind)

        kind = self._within(state, available)
        return self._missing(state, available) if kind is None and (given_up or not self._exact) else kind

    def used_up(self, state: AdmissionState) -> bool:
        """Whether the gate itself, not a lack of slots, is what keeps more groups from being launched."""
        return state.published >= 0 and self._within(state, lambda _: True) is None

    def observe(self, state: AdmissionState, event: ev.AnyEvent) -> None:
        """Takes in an event that `state` has folded in already."""
        if isinstance(event, ev.Leased) and not self._exact and self._is_beyond(state, event):
            self.beyond += 1
        if self.auto is not None:
            self.auto.observe(state, event, used_up=isinstance(event, ev.Consumed) and self.used_up(state))

    def _is_beyond(self, state: AdmissionState, event: ev.Leased) -> bool:
        """Whether neither what batches lack nor look-ahead covers a group just launched."""
        over = self._over(state, self._begun(event.version))
        kind = state.groups[event.group_id].kind
        if over[kind] <= 0:
            return False
        surplus = sum(max(0, one) for one in over.values())
        return surplus > self.look_ahead_groups or over[kind] > self.look_ahead_by_kind[kind]

    # --- inside ---------------------------------------------------------------------------------------------------------------

    def _begun(self, published: int) -> int:
        """Train batches up to the one that this version begins."""
        batches = published // self._rules.mini_batches + 1
        return batches if self._train_steps is None else min(batches, self._train_steps)

    def _over(self, state: AdmissionState, begun: int) -> dict[Kind, int]:
        """`live_d - T_d` by kind: what was launched beyond the batches begun; below zero, what they lack."""
        accounts, batch, counts = state.accounts, state.batch, self._composition
        if self._exact:
            live = accounts.live_by_kind
            return {kind: live[kind] - begun * count for kind, count in counts.items()}
        # Those admitted whole drop out on both sides.
        rest, pool = begun - batch.train_step, accounts.pool_by_kind
        over = {kind: pool[kind] - rest * count for kind, count in counts.items()}
        values = len(state.rules.prompt_attributes)
        for final, count in batch.admitted.items():
            over[final[:values]] += count
        return over

    def _within(self, state: AdmissionState, has_prompt: Callable[[Kind], bool]) -> Kind | None:
        """By rules 1 and 2."""
        begun, counts = self._begun(state.published), self._composition
        overs = self._over(state, begun)
        lacking: list[tuple[float, Kind]] = []
        surplus = lack = 0
        for kind, over in overs.items():
            if over >= 0:
                surplus += over
            elif kind not in state.batch.given_up:
                lack -= over
                lacking.append((over / counts[kind] if counts[kind] else 0.0, kind))
        if surplus - lack >= self.look_ahead_groups:
            return None  # others do for what lacks
        if len(lacking) > 1:
            lacking.sort()
        for _, kind in lacking:
            if has_prompt(kind) and (self._exact or self._leaves_room(state, kind)):
                return kind
        if surplus >= self.look_ahead_groups:
            return None
        left = None if self._train_steps is None else self._train_steps - begun
        ahead: list[tuple[float, Kind]] = []
        for kind, most in self.look_ahead_by_kind.items():
            over = overs[kind]
            if 0 <= over < (most if left is None else min(most, left * counts[kind])):
                ahead.append((over / most, kind))
        ahead.sort()
        return next((k for _, k in ahead if has_prompt(k) and (self._exact or self._leaves_room(state, k))), None)

    def _leaves_room(self, state: AdmissionState, kind: Kind) -> bool:
        """Whether, after one more of this kind, at most `L` launched groups are of no use to the batch under way."""
        if state.batch.train_step >= self._begun(state.published):
            return True  # its groups are not due yet: all that is launched for it is look-ahead
        pool = _pool(state)
        pool[kind] = pool.get(kind, 0) + 1
        return state.batch.completion.can_use(pool, sum(pool.values()) - self.look_ahead_groups)

    def _missing(self, state: AdmissionState, has_prompt: Callable[[Kind], bool]) -> Kind | None:
        """By rule 3."""
        batch, begun = state.batch, self._begun(state.published)
        if batch.train_step >= begun:
            return None  # its groups are not due yet
        pool = _pool(state)
        if batch.completion.can_use(pool, batch.completion.slots_left):
            return None
        before = batch.completion.usable(pool)
        over = self._over(state, begun)
        for kind in sorted(self._kinds, key=lambda one: (over[one], one)):
            pool[kind] = pool.get(kind, 0) + 1
            if has_prompt(kind) and batch.completion.can_use(pool, before + 1):
                return kind
            pool[kind] -= 1
        return None


def _pool(state: AdmissionState) -> dict[Kind, int]:
    """Launched and not yet admitted: finished groups by what they turned out to be, the others by their prompt's kind."""
    accounts = state.accounts
    if not state.rules.final_attributes:
        return dict(accounts.pool_by_kind)
    pool = {kind: count for kind, count in accounts.ready_by_kind.items() if count}
    in_flight, values = dict(accounts.pool_by_kind), len(state.rules.prompt_attributes)
    for kind, count in pool.items():
        in_flight[kind[:values]] -= count
    return {**pool, **{kind: count for kind, count in in_flight.items() if count}}


def _most_within_bound(rules: Rules) -> int:
    """The most look-ahead of which no group gets older than the staleness bound while it waits its turn.

    Look-ahead groups are sampled by the version that begins a batch and trained on in the first mini-batches of the next one.
    """
    if rules.staleness_bound is None:
        return AUTO_BATCHES * rules.groups
    return max(0, rules.staleness_bound - rules.mini_batches + 1) * rules.mini_batch_groups


def make_gate(config: Config, rules: Rules, group_bytes: int) -> LaunchGate:
    """The gate of a run. `auto` is bounded by what the storage units have room for.

    Args:
        config: the run.
        rules: its resolved rules.
        group_bytes: the most payload bytes of one group.
    """
    train_steps = config.train.updates // config.batch.mini_batches
    look_ahead = config.admission.look_ahead_groups
    if look_ahead != "auto":
        return LaunchGate(rules, look_ahead, train_steps)
    room = config.rollout.hosts * (config.rollout.storage_bytes // group_bytes)
    whole = config.admission.policy in ("train_batch", "proportional")
    most = room - most_retained_groups(config, room) - (rules.groups if whole else rules.mini_batch_groups)
    return LaunchGate(rules, "auto", train_steps, most_look_ahead=max(0, most))
