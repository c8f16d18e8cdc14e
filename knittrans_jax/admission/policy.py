"""Which ready groups form the next mini-batch. Policies share one interface and see the state only; they change nothing.

`MiniBatchPolicy` (`mini_batch`) guarantees:

* *safe*: after the chosen groups the train batch can still be finished within its rules;
* *work-conserving*: it chooses whenever the ready pool holds a safe mini-batch (within `batch.mini_batch_tokens`);
* *oldest first*: the choice is the lexicographically oldest safe one, by the order in which groups became ready. With
  `on_stale: wait`, groups that the next mini-batch is the last one for come before all others; with `spread_slow`, slow groups
  beyond their share of a mini-batch come after all others;
* *honest*: otherwise it says which rule waits for what, how many are missing, and how many of those are in flight.

`train_batch`, `proportional` and `fifo` are the baselines that it is compared with. They get the same launch gate and the same
look-ahead; what of the rules they keep is in `rules.rules_of`.

Groups beyond the staleness bound (`AdmissionState.stale`) are to be expired before a policy is asked.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.completion import Kind, Picker
from knittrans_jax.admission.completion_overlap import Overlapping
from knittrans_jax.admission.rules import Rules
from knittrans_jax.admission.state import SLOW_SHARE, AdmissionState, Group
from knittrans_jax.admission.token_budget import choose_within, tokens_of
from knittrans_jax.trajectory import GroupMeta


@dataclasses.dataclass(frozen=True)
class Waiting:
    """No mini-batch can be formed: `missing` more groups are needed for `rule` of `value`; `in_flight` are being sampled."""

    rule: str
    value: str
    missing: int
    in_flight: int
    kinds: tuple[Kind, ...] = dataclasses.field(default=(), compare=False)
    """Groups launched with these kinds would help."""

    def __str__(self) -> str:
        return f"{self.rule} of {self.value}: {self.missing} missing, {self.in_flight} in flight"


class Policy(Protocol):
    """Decides the next mini-batch of the train batch being filled."""

    def next_mini_batch(self, state: AdmissionState) -> tuple[Group, ...] | Waiting:
        """The groups of the next mini-batch (`B / K` of them, oldest first), or why there is none."""
        ...

    def may_choose(self, state: AdmissionState) -> bool:
        """False: `next_mini_batch` waits; True: it has to be asked. Sooner answered, without the reason."""
        ...


class OldestFirst:
    """Of the groups that the train batch's rules allow together, the oldest. `wanted(state)` of them must be there."""

    def wanted(self, state: AdmissionState) -> int:
        """Groups that must be ready and fit the batch together before a mini-batch is cut from them."""
        return state.rules.mini_batch_groups

    def may_choose(self, state: AdmissionState) -> bool:
        """See `Policy.may_choose`."""
        return state.batch.completion.can_use(state.accounts.ready_by_kind, self.wanted(state))

    def next_mini_batch(self, state: AdmissionState) -> tuple[Group, ...] | Waiting:
        """See `Policy.next_mini_batch`."""
        wanted = self.wanted(state)
        shortage = state.batch.completion.shortage(state.accounts.ready_by_kind, wanted)
        if shortage is not None:
            in_flight = sum(state.accounts.in_flight_of(kind) for kind in shortage.kinds)
            return Waiting(shortage.rule, shortage.value, shortage.missing, in_flight, shortage.kinds)
        budget, first = state.rules.mini_batch_tokens, wanted
        if wanted > state.rules.mini_batch_groups and _in_order_of_age(state):
            first = state.rules.mini_batch_groups  # the picker keeps room for the others
        chosen = _choose(state, wanted, first=first) if budget is None else _choose_within(state, wanted, budget)
        if isinstance(chosen, Waiting):
            return chosen
        if len(chosen) < first:
            return _repeated_prompts(state, first - len(chosen))
        chosen.sort(key=_age)
        return tuple(chosen[: state.rules.mini_batch_groups])


class MiniBatchPolicy(OldestFirst):
    """`mini_batch`: see the module's opening."""


class FifoPolicy(OldestFirst):
    """`fifo`: the oldest groups, whatever they are. The state's rules are not enforced (`rules_of`), so the size is all."""


class TrainBatchPolicy(OldestFirst):
    """`train_batch`: a batch begins when a whole valid one is ready; its mini-batches are cut from it in order of age.

    Also `schedule: colocated`. A batch whose ready groups were lost waits again until all that it lacks is ready.
    """

    def wanted(self, state: AdmissionState) -> int:
        """All that the batch still takes."""
        return state.batch.completion.slots_left


class ProportionalPolicy:
    """`proportional`: every mini-batch repeats the batch's composition by its first attribute, within one group per value.

    Of `B_d` groups, every mini-batch takes `B_d // K`; what that leaves over is dealt to the mini-batches in turn, values with
    the largest remainder first, so that each mini-batch has the same size. Over the batch it is exact. Further attributes keep
    the batch's rules.
    """

    def may_choose(self, state: AdmissionState) -> bool:
        """See `Policy.may_choose`."""
        return sum(state.accounts.ready_by_kind.values()) >= state.rules.mini_batch_groups

    def next_mini_batch(self, state: AdmissionState) -> tuple[Group, ...] | Waiting:
        """See `Policy.next_mini_batch`."""
        rules, completion = state.rules, state.batch.completion
        counts = mini_batch_composition(rules, state.batch.mini_batches)
        ready = dict.fromkeys(counts, 0)
        for final, count in state.accounts.ready_by_kind.items():
            ready[final[: len(next(iter(counts)))]] += count
        short = [value for value, count in counts.items() if ready[value] < count]
        if short:
            value = max(short, key=lambda v: (counts[v] - ready[v], v))
            kinds = tuple(kind for kind in rules.kinds if kind[: len(value)] == value)
            in_flight = sum(state.accounts.in_flight_of(kind) for kind in kinds)
            missing = counts[value] - ready[value]
            return Waiting("admission.policy = proportional", ", ".join(value) or "any", missing, in_flight, kinds)
        if isinstance(completion, Overlapping):
            picker = completion.picker_by_value(state.accounts.ready_by_kind, counts)
            if picker is None:
                return Waiting(
                    "admission.policy = proportional", "with the other quotas", 1, state.accounts.in_flight, rules.kinds
                )
        else:
            picker = _ByValue(counts)
        chosen = _choose(state, rules.mini_batch_groups, picker)
        if len(chosen) < rules.mini_batch_groups:
            return _repeated_prompts(state, rules.mini_batch_groups - len(chosen))
        return tuple(sorted(chosen, key=_age))


class _ByValue:
    """`Picker` of fixed counts by value of one attribute."""

    def __init__(self, counts: Mapping[Kind, int]) -> None:
        self._left = dict(counts)

    def take(self, kind: Kind) -> bool:
        if not self._left[kind]:
            return False
        self._left[kind] -= 1
        return True

    def skip(self, kind: Kind) -> None:
        pass


def mini_batch_composition(rules: Rules, mini_batch: int) -> dict[Kind, int]:
    """Groups by value of the first attribute in mini-batch `mini_batch`, when each repeats the batch's composition."""
    every, whole = rules.mini_batches, dict[Kind, int]()
    for kind, count in rules.composition.items():
        whole[kind[:1]] = whole.get(kind[:1], 0) + count
    counts = {value: count // every for value, count in whole.items()}
    over = {value: count % every for value, count in whole.items()}
    dealt = 0
    for value in sorted(over, key=lambda v: (-over[v], v)):
        counts[value] += sum((dealt + i) % every == mini_batch for i in range(over[value]))
        dealt += over[value]
    return counts


def drop_reason(rules: Rules, meta: GroupMeta) -> str | None:
    """Why a group that is done is not to be trained on; None: it may be. Pure; the account is `filtered`."""
    if rules.drop_equal_rewards and len({one.reward for one in meta.trajectories}) == 1:
        return f"batch.drop_equal_rewards: every reward is {meta.trajectories[0].reward:g}"
    if rules.mini_batch_tokens is not None:
        tokens, n = sum(one.length_tokens for one in meta.trajectories), len(meta.trajectories)
        most = rules.mini_batch_tokens - (rules.mini_batch_groups - 1) * 2 * n
        if tokens > most:
            return f"batch.mini_batch_tokens: {tokens} tokens, at most {most} fit beside the rest of any mini-batch"
    return None


def unfinishable(
    state: AdmissionState, supply: Mapping[Kind, int], in_flight: Mapping[Kind, int] | None = None
) -> Waiting | None:
    """What the train batch under way will lack even if all comes that is in flight or may still be launched; None: nothing.

    Args:
        state: as it is.
        supply: groups that may still be launched, by kind; kinds that it does not name have none left.
        in_flight: how many of those in flight count, for kinds whose own number does not.
    """
    rules, accounts, completion = state.rules, state.accounts, state.batch.completion
    pool: dict[Kind, int] = dict(accounts.ready_by_kind)
    for kind in rules.kinds:
        flying = accounts.in_flight_of(kind) if in_flight is None or kind not in in_flight else in_flight[kind]
        coming = flying + supply.get(kind, 0)
        pool[kind] = pool.get(kind, 0) + coming
    wanted = completion.slots_left
    missing = wanted - completion.usable(pool)
    if missing <= 0:
        return None
    if rules.final_attributes:
        return Waiting("batch.quotas", "what is left of the data set", missing, accounts.in_flight, rules.kinds)
    shortage = completion.shortage(pool, wanted)
    assert shortage is not None
    coming = sum(accounts.in_flight_of(kind) for kind in shortage.kinds)
    return Waiting(shortage.rule, shortage.value, shortage.missing, coming, shortage.kinds)


def hopeless(state: AdmissionState) -> Waiting | None:
    """What the train batch under way needs and will not get, because all prompts that have it are dropped; None: nothing.

    A kind is given up when as many of its groups as it has prompts were dropped, by a filter or because their own flight takes
    longer than the staleness bound, since one of them was last admitted.
    """
    prompts, dropped, slots = state.rules.prompts, state.dropped_in_a_row, state.batch.completion.slots_left
    if not prompts or not dropped:
        return None
    supply = {k: 0 if dropped.get(k, 0) >= max(1, prompts.get(k, 0)) else slots for k in state.rules.kinds}
    if all(supply.values()):
        return None
    waiting = unfinishable(state, supply, in_flight={kind: 0 for kind, count in supply.items() if not count})
    return None if waiting is None else dataclasses.replace(waiting, kinds=tuple(k for k, n in supply.items() if not n))


_age = operator.attrgetter("order")


def _repeated_prompts(state: AdmissionState, missing: int) -> Waiting:
    return Waiting("no prompt twice in a train batch", "batch.groups", missing, state.accounts.in_flight)


def _in_order_of_age(state: AdmissionState) -> bool:
    """No rule changes the order in which ready groups are taken, and none of them has to be passed over for its prompt."""
    rules, seen = state.rules, set(state.batch.prompts)
    if rules.on_stale == "wait" or rules.spread_slow:
        return False
    count = len(seen)
    for queue in state.ready.values():
        seen.update(group.prompt_id for group in queue.values())
        count += len(queue)
    return len(seen) == count


def _choose(
    state: AdmissionState, wanted: int, picker: Picker | None = None, *, first: int | None = None
) -> list[Group]:
    """The first `wanted` groups in order that the picker (else the batch's own) takes. A kind refused once stays refused.

    `first`: only so many of them.
    """
    rules, batch_prompts = state.rules, state.batch.prompts
    if picker is None:
        picker = state.batch.completion.picker(state.accounts.ready_by_kind, wanted)
    wanted = wanted if first is None else first
    taken: dict[str, Group] = {}
    due = state.due() if rules.on_stale == "wait" else []
    orders: list[Iterable[Group]] = [due] if due else []
    if rules.spread_slow:
        share = max(1, round(SLOW_SHARE * wanted))
        orders += [_spread(state, share)]
    for group in itertools.chain(*orders):
        if len(taken) == wanted:
            break
        if group.prompt_id not in batch_prompts and group.prompt_id not in taken and picker.take(group.final):
            taken[group.prompt_id] = group
    heads: list[tuple[int, Kind, Group, Iterator[Group]]] = []
    for kind, queue in state.ready.items():
        if queue:
            _push(heads, kind, iter(queue.values()))
    count, take = len(taken), picker.take
    while heads and count < wanted:
        _, kind, group, rest = heads[0]
        # As long as this kind's next group is older than every other kind's, no heap is needed.
        limit = min(heads[1][0], heads[2][0] if len(heads) > 2 else heads[1][0]) if len(heads) > 1 else sys.maxsize
        while True:
            prompt = group.prompt_id
            if prompt in batch_prompts or prompt in taken:
                if taken.get(prompt) is not group:
                    picker.skip(kind)
            elif take(kind):
                taken[prompt] = group
                count += 1
                if count == wanted:
                    break
            else:
                heapq.heappop(heads)
                break
            group = next(rest, None)
            if group is None:
                heapq.heappop(heads)
                break
            if group.order > limit:
                heapq.heapreplace(heads, (group.order, kind, group, rest))
                break
    return list(taken.values())


def _spread(state: AdmissionState, share: int) -> Iterator[Group]:
    """Oldest first, without slow groups beyond `share`: they come when nothing else is left."""
    groups = sorted((g for queue in state.ready.values() for g in queue.values()), key=_age)
    for group in groups:
        if group.slow:
            share -= 1
            if share < 0:
                continue
        yield group


def _choose_within(state: AdmissionState, wanted: int, tokens: int) -> list[Group] | Waiting:
    """`_choose` with a token budget: the first groups in order that leave enough for the lightest of the others."""
    groups = sorted((g for queue in state.ready.values() for g in queue.values()), key=_age)
    if sum(heapq.nlargest(wanted, map(tokens_of, groups))) <= tokens:
        return _choose(state, wanted)
    groups = [group for group in groups if group.prompt_id not in state.batch.prompts]
    if state.rules.on_stale == "wait":
        due = {group.group_id for group in state.due()}
        groups.sort(key=lambda group: (group.group_id not in due, group.order))
    chosen = choose_within(state.batch.completion, groups, wanted, tokens)
    if chosen is not None:
        return chosen
    return Waiting(
        "batch.mini_batch_tokens",
        str(tokens),
        1,
        state.accounts.in_flight,
        state.rules.kinds,
    )


def _push(heads: list[tuple[int, Kind, Group, Iterator[Group]]], kind: Kind, queue: Iterator[Group]) -> None:
    group = next(queue, None)
    if group is not None:
        assert group.account is Account.READY
        heapq.heappush(heads, (group.order, kind, group, queue))


POLICIES: dict[str, type[Policy]] = {
    "mini_batch": MiniBatchPolicy,
    "train_batch": TrainBatchPolicy,
    "proportional": ProportionalPolicy,
    "fifo": FifoPolicy,
}


def make_policy(name: str, schedule: str) -> Policy:
    """The policy of `admission.policy` under `admission.schedule`: lock step admits whole batches."""
    return TrainBatchPolicy() if schedule == "colocated" else POLICIES[name]()
