"""Consumed mini-batches that a training group which begins anew is served again. Pure.

What it guarantees:

* a consumed mini-batch is kept, plan and payload, until a checkpoint covers it;
* a group that begins at a checkpoint repeats the mini-batches after it, the same ones in the same order, up to the first that
  misses a payload: there the lineage ends;
* a repeated update is no new one: its report is counted here and leaves no event, so every gradient is in the log once.
"""

from __future__ import annotations

from collections.abc import Mapping

from knittrans_jax.admission.storage_room import StorageRoom
from knittrans_jax.trajectory import MiniBatchPlan

COMPARED = ("loss", "grad_norm", "reward_mean")
"""Figures of an update that tell whether a repeated one is the same."""


class Retention:
    """See the module's opening. `room`: where the payloads' bytes are accounted for."""

    def __init__(self, room: StorageRoom, keeps: bool) -> None:
        """`keeps`: False lets the payloads of a mini-batch go when it is consumed."""
        self._room, self.keeps = room, keeps
        self._plans: dict[int, MiniBatchPlan] = {}
        """Oldest first."""
        self._metrics: dict[int, Mapping[str, float]] = {}
        """What the update came to when it was made first."""
        self._to_repeat: set[int] = set()
        self.repeated = 0
        """Updates that training groups applied again."""
        self.repeated_otherwise = 0
        """Those among them whose figures were not, bit by bit, what they had been; 0 on the same mesh."""

    @property
    def plans(self) -> Mapping[int, MiniBatchPlan]:
        """Consumed plans that are kept, oldest first."""
        return self._plans

    def consumed(self, plan: MiniBatchPlan, metrics: Mapping[str, float]) -> None:
        """A mini-batch was consumed."""
        if self.keeps:
            self._plans[plan.plan_id], self._metrics[plan.plan_id] = plan, metrics
            for group in plan.groups:
                self._room.retain(group.unit, group.group_id)
        else:
            self._release(plan)

    def covered(self, version: int) -> None:
        """There is a checkpoint of this version: what led to it is not needed any more."""
        for plan in [plan for plan in self._plans.values() if plan.update < version]:
            self._release(self._plans.pop(plan.plan_id))

    def begin(self, version: int, newest: int) -> int:
        """A training group begins at `version`, the log is at `newest` -> how many updates it repeats.

        All that follow, up to the first whose payloads are not all there: it and those after it are let go, for they are not
        part of the lineage any more.
        """
        gone = self._room.gone
        kept = {
            plan.update: plan
            for plan in self._plans.values()
            if not any(group.group_id in gone for group in plan.groups)
        }
        repeats = next((update for update in range(version, newest) if update not in kept), newest) - version
        self._to_repeat = {kept[update].plan_id for update in range(version, version + repeats)}
        for plan in [plan for plan in self._plans.values() if plan.update >= version + repeats]:
            self._release(self._plans.pop(plan.plan_id))
        return repeats

    def is_repeated(self, plan_id: int) -> bool:
        """Whether the present training group has yet to repeat this plan."""
        return plan_id in self._to_repeat

    def repeat(self, plan_id: int, metrics: Mapping[str, float]) -> None:
        """Every process of the training group has repeated a plan."""
        self._to_repeat.remove(plan_id)
        self.repeated += 1
        before = self._metrics[plan_id]
        self.repeated_otherwise += any(before.get(name) != metrics.get(name) for name in COMPARED)

    def _release(self, plan: MiniBatchPlan) -> None:
        self._metrics.pop(plan.plan_id, None)
        for group in plan.groups:
            self._room.release(group.unit, group.group_id)
