"""The admission controller: one state, one prompt order, one policy, one launch gate, kept in step by the same events.

The live scheduler and the simulator decide through this class; only who calls it, and by which clock, differs.

What it guarantees: state, prompt order and gate have always seen the same events; a decision is a pure function of them.
"""

from __future__ import annotations

from collections.abc import Callable

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.gate import LaunchGate
from knittrans_jax.admission.policy import Policy, Waiting, drop_reason, unfinishable
from knittrans_jax.admission.prompts import PromptOrder
from knittrans_jax.admission.state import AdmissionState, Group
from knittrans_jax.trajectory import GroupMeta

_GIVING_BACK = (ev.Expired, ev.Lost, ev.Withdrawn, ev.Resumed, ev.TrainGroupFormed)


class Controller:
    """See the module's opening."""

    def __init__(
        self, state: AdmissionState, prompts: PromptOrder, policy: Policy, gate: LaunchGate, *, admit_ahead: int
    ) -> None:
        """`admit_ahead`: mini-batches that are admitted beyond the one that the trainer has."""
        self.state, self.prompts, self.policy, self.gate = state, prompts, policy, gate
        self._admit_ahead = admit_ahead

    def apply(self, event: ev.AnyEvent) -> None:
        """Folds an event in. Raises `IllegalTransition` when it does not fit."""
        given_back = self.state.given_back(event) if isinstance(event, _GIVING_BACK) else []
        self.state.apply(event)
        if isinstance(event, ev.Leased):
            self.prompts.take(event.prompt_id, event.epoch)
        for prompt_id, epoch in reversed(given_back):  # the oldest is the next
            self.prompts.give_back(prompt_id, epoch)
        self.gate.observe(self.state, event)

    def next_launch(self, host: str, now_s: float) -> ev.Leased | None:
        """The prompt that may be launched next, as the event that leases it to a host; None: none may.

        A prompt whose group failed is launched again for the same train batch only when there is no other.
        """
        state = self.state
        entry = self._next_prompt(state.busy_or_failed)
        if entry is None and state.batch.failed:
            entry = self._next_prompt(state.busy)
        if entry is None:
            return None
        prompt_id, epoch = entry
        return ev.Leased(
            time_s=now_s,
            group_id=state.next_group_id,
            prompt_id=prompt_id,
            epoch=epoch,
            attributes=self.prompts.attributes[prompt_id],
            host=host,
            version=state.published,
        )

    def filtered(self, meta: GroupMeta, now_s: float) -> ev.Filtered | None:
        """The event that drops a group just ready, if the batch's filter or token budget does."""
        reason = drop_reason(self.state.rules, meta)
        return None if reason is None else ev.Filtered(time_s=now_s, group_id=meta.group_id, reason=reason)

    def stale(self, now_s: float) -> list[tuple[Group, ev.Expired]]:
        """Ready groups beyond the staleness bound, with the events that end them: to be applied before a mini-batch is chosen.

        `drop` leaves the prompt to the next epoch; `retry` launches it again, and so does `wait`, where the batch's rules left
        no place for it in time.
        """
        rules, found = self.state.rules, []
        for group in self.state.stale():
            reason = f"beyond admission.staleness_bound = {rules.staleness_bound} updates"
            retry = rules.on_stale != "drop"
            found.append((group, ev.Expired(time_s=now_s, group_id=group.group_id, reason=reason, retry=retry)))
        return found

    def next_mini_batch(self, *, explain: bool = True) -> tuple[Group, ...] | Waiting | None:
        """The groups to admit now, or what is missing; None: as many are admitted ahead as may be.

        No train batch is begun that a finite data set cannot fill. Without `explain`, also None where something is missing
        and finding out what would take longer.
        """
        if len(self.state.plans) > self._admit_ahead or not (explain or self.policy.may_choose(self.state)):
            return None
        short = None if self.state.batch.mini_batches else self.short_of_data()
        return self.policy.next_mini_batch(self.state) if short is None else short

    def short_of_data(self) -> Waiting | None:
        """What the train batch under way will lack though all comes that a finite data set still has; None: nothing."""
        if not self.prompts.finite:
            return None
        return unfinishable(self.state, {kind: self.prompts.left(kind) for kind in self.state.rules.kinds})

    def data_ended(self, now_s: float) -> bool:
        """Whether no further mini-batch can come of a finite data set, whatever is still under way.

        A train batch under way can remain incomplete, when groups fail or are filtered: then nothing is in flight, nothing
        may be launched, and what is ready does not suffice.
        """
        state = self.state
        if not self.prompts.finite or state.plans:
            return False
        if not state.batch.mini_batches and self.short_of_data() is not None:
            return True
        choice = self.policy.next_mini_batch(state)
        return not (state.accounts.in_flight or isinstance(choice, tuple) or self.next_launch("", now_s))

    def remainder(self) -> dict[str, int]:
        """Prompts of a finite data set that were not consumed and have not failed, by kind in words; empty without an end."""
        pool = self.state.accounts.pool_by_kind
        if not self.prompts.finite:
            return {}
        return {", ".join(kind) or "all": self.prompts.left(kind) + pool[kind] for kind in self.state.rules.kinds}

    def _next_prompt(self, passed_over: Callable[[str], bool]) -> tuple[str, int] | None:
        """The next prompt that the gate lets go and that is not passed over, and its epoch."""
        kind = self.gate.next_kind(self.state, lambda k: self.prompts.peek(k, passed_over) is not None)
        return None if kind is None else self.prompts.peek(kind, passed_over)
