"""Which ready groups form the next mini-batch. Policies share one interface and see the state only; they change nothing.

`MiniBatchPolicy` (`mini_batch`) guarantees:

* *safe*: after the chosen groups the train batch can still be finished within its rules;
* *work-conserving*: it chooses whenever the ready pool holds a safe mini-batch;
* *oldest first*: the choice is the lexicographically oldest safe one, by the order in which groups became ready;
* *honest*: otherwise it says which rule waits for what, how many are missing, and how many of those are in flight.

`train_batch`, `proportional` and `fifo` are the baselines that it is compared with. They get the same launch gate and the same
look-ahead; what of the rules they keep is in `rules.rules_of`.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Iterator
from typing import Protocol

from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.rules import Kind, Rules
from knittrans_jax.admission.state import AdmissionState, Group


@dataclasses.dataclass(frozen=True)
class Waiting:
    """No mini-batch can be formed: `missing` more groups are needed for `rule` of `value`; `in_flight` are being sampled."""

    rule: str
    value: str
    missing: int
    in_flight: int

    def __str__(self) -> str:
        return f"{self.rule} of {self.value}: {self.missing} missing, {self.in_flight} in flight"


class Policy(Protocol):
    """Decides the next mini-batch of the train batch being filled."""

    def next_mini_batch(self, state: AdmissionState) -> tuple[Group, ...] | Waiting:
        """The groups of the next mini-batch (`B / K` of them, oldest first), or why there is none."""
        ...


class OldestFirst:
    """Of the groups that the train batch's rules allow together, the oldest. `wanted(state)` of them must be there."""

    def wanted(self, state: AdmissionState) -> int:
        """Groups that must be ready and fit the batch together before a mini-batch is cut from them."""
        return state.rules.mini_batch_groups

    def next_mini_batch(self, state: AdmissionState) -> tuple[Group, ...] | Waiting:
        """See `Policy.next_mini_batch`."""
        wanted = self.wanted(state)
        shortage = state.batch.completion.shortage(state.accounts.ready_by_kind, wanted)
        if shortage is not None:  # constant in the size of the pool, so that asking after every event costs little
            return Waiting(shortage.rule, shortage.value, shortage.missing, _in_flight(state, shortage.kinds))
        chosen = _choose(state, wanted)
        if len(chosen) < wanted:
            return _repeated_prompts(state, wanted - len(chosen))
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
    """`proportional`: every mini-batch repeats the batch's composition, within one group per kind; over the batch it is exact.

    Of `B_d` groups, every mini-batch takes `B_d // K`; what that leaves over is dealt to the mini-batches in turn, kinds with
    the largest remainder first, so that each mini-batch has the same size.
    """

    def next_mini_batch(self, state: AdmissionState) -> tuple[Group, ...] | Waiting:
        """See `Policy.next_mini_batch`."""
        counts = mini_batch_composition(state.rules, state.batch.mini_batches)
        ready = state.accounts.ready_by_kind
        short = [kind for kind, count in counts.items() if ready[kind] < count]
        if short:
            kind = max(short, key=lambda k: (counts[k] - ready[k], k))
            missing = counts[kind] - ready[kind]
            return Waiting("admission.policy = proportional", _name(kind), missing, _in_flight(state, (kind,)))
        prompts, chosen = set(state.batch.prompts), []
        for kind, count in counts.items():
            wanted = len(chosen) + count
            for group in state.ready[kind].values():
                if len(chosen) == wanted:
                    break
                if group.prompt_id not in prompts:
                    prompts.add(group.prompt_id)
                    chosen.append(group)
            if len(chosen) < wanted:
                return _repeated_prompts(state, wanted - len(chosen))
        return tuple(sorted(chosen, key=lambda group: group.order))


def mini_batch_composition(rules: Rules, mini_batch: int) -> dict[Kind, int]:
    """Groups by kind of mini-batch `mini_batch` when each repeats the batch's composition. See `ProportionalPolicy`."""
    every = rules.mini_batches
    counts = {kind: count // every for kind, count in rules.composition.items()}
    over = {kind: count % every for kind, count in rules.composition.items()}
    dealt = 0
    for kind in sorted(over, key=lambda k: (-over[k], k)):
        counts[kind] += sum((dealt + i) % every == mini_batch for i in range(over[kind]))
        dealt += over[kind]
    return counts


def _in_flight(state: AdmissionState, kinds: Iterable[Kind]) -> int:
    return sum(state.accounts.pool_by_kind[kind] - state.accounts.ready_by_kind[kind] for kind in kinds)


def _name(kind: Kind) -> str:
    return ", ".join(kind) or "any"


def _repeated_prompts(state: AdmissionState, missing: int) -> Waiting:
    return Waiting("no prompt twice in a train batch", "batch.groups", missing, state.accounts.in_flight)


def _choose(state: AdmissionState, wanted: int) -> list[Group]:
    """Oldest first over the kinds' queues. A kind that cannot be taken now cannot be taken after further groups."""
    completion, prompts = state.batch.completion.copy(), set(state.batch.prompts)
    chosen: list[Group] = []
    heads: list[tuple[int, Kind, Group, Iterator[Group]]] = []
    for kind, queue in state.ready.items():
        _push(heads, kind, iter(queue.values()))
    while heads and len(chosen) < wanted:
        _, kind, group, rest = heapq.heappop(heads)
        if not completion.can_take(kind):
            continue
        if group.prompt_id not in prompts:
            completion.take(kind)
            prompts.add(group.prompt_id)
            chosen.append(group)
        _push(heads, kind, rest)
    return chosen


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
