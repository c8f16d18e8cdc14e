"""Which ready groups form the next mini-batch. Policies share one interface and see the state only; they change nothing.

`MiniBatchPolicy` (`mini_batch`) guarantees:

* *safe*: after the chosen groups the train batch can still be finished within its rules;
* *work-conserving*: it chooses whenever the ready pool holds a safe mini-batch;
* *oldest first*: the choice is the lexicographically oldest safe one, by the order in which groups became ready;
* *honest*: otherwise it says which rule waits for what, how many are missing, and how many of those are in flight.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator
from typing import Protocol

from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.rules import Kind
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


class MiniBatchPolicy:
    """See the module's opening. `whole_batch`: a batch begins only when all its groups are ready (`schedule: colocated`)."""

    def __init__(self, *, whole_batch: bool = False) -> None:
        self._whole_batch = whole_batch

    def next_mini_batch(self, state: AdmissionState) -> tuple[Group, ...] | Waiting:
        """See `Policy.next_mini_batch`."""
        rules, batch = state.rules, state.batch
        if self._whole_batch and not batch.mini_batches:
            missing = self._missing(state, rules.groups)
            if missing is not None:
                return missing
            if len(self._choose(state, rules.groups)) < rules.groups:
                return self._repeated_prompts(state, rules.groups)
        missing = self._missing(state, rules.mini_batch_groups)
        if missing is not None:
            return missing
        chosen = self._choose(state, rules.mini_batch_groups)
        if len(chosen) < rules.mini_batch_groups:
            return self._repeated_prompts(state, rules.mini_batch_groups - len(chosen))
        return tuple(chosen)

    def _missing(self, state: AdmissionState, wanted: int) -> Waiting | None:
        """Constant in the size of the pool, so that asking after every event costs little."""
        shortage = state.batch.completion.shortage(state.accounts.ready_by_kind, wanted)
        if shortage is None:
            return None
        in_flight = sum(
            state.accounts.pool_by_kind[kind] - state.accounts.ready_by_kind[kind] for kind in shortage.kinds
        )
        return Waiting(shortage.rule, shortage.value, shortage.missing, in_flight)

    def _repeated_prompts(self, state: AdmissionState, missing: int) -> Waiting:
        return Waiting("no prompt twice in a train batch", "batch.groups", missing, state.accounts.in_flight)

    def _choose(self, state: AdmissionState, wanted: int) -> list[Group]:
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


def make_policy(name: str, schedule: str) -> Policy:
    """The policy of `admission.policy` under `admission.schedule`."""
    policies = {"mini_batch": MiniBatchPolicy(whole_batch=schedule == "colocated")}
    return policies[name]
