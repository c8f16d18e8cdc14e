"""What the report and the trace are drawn from: the updates in order, the composition of mini-batches, the lives of groups.

`RunHistory` folds the events beside the record (`knittrans_jax.observe.record`), whose update records it keeps. Memory: one
record per update, the bounded lives, and counts per mini-batch of the train batch.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.lineage import final_lineage
from knittrans_jax.config import Config
from knittrans_jax.observe.lives import Lives
from knittrans_jax.observe.record import RunRecord, UpdateRecord
from knittrans_jax.trajectory import GroupMeta

REWARD_STEP = 0.01
"""Rewards are counted to this precision."""


@dataclasses.dataclass
class MiniBatchComposition:
    """All mini-batches that came as number `j` of their train batch, together."""

    groups: int = 0
    values: dict[str, collections.Counter[str]] = dataclasses.field(default_factory=dict)
    """Groups by attribute and value."""
    lengths: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Trajectories by length in tokens."""
    rewards: collections.Counter[float] = dataclasses.field(default_factory=collections.Counter)
    """Trajectories by reward, rounded to `REWARD_STEP`."""


class RunHistory:
    """See the module's opening; `record` is folded along, so that one `apply` serves both."""

    def __init__(self, config: Config) -> None:
        self.record = RunRecord(config)
        self.lives = Lives(config)
        self.updates: list[UpdateRecord] = []
        self.published: list[tuple[float, int]] = []
        """(time, version) in order."""
        self.by_mini_batch = [MiniBatchComposition() for _ in range(config.batch.mini_batches)]
        self._metas: dict[int, GroupMeta] = {}
        self._plan_groups: dict[int, tuple[int, ...]] = {}

    def apply(self, event: ev.AnyEvent) -> UpdateRecord | None:
        """Folds one event in; returns the record of the update that it finished, if any."""
        self.lives.apply(event)
        match event:
            case ev.Ready():
                self._metas[event.group.group_id] = event.group
            case ev.Failed() | ev.Filtered() | ev.Expired() | ev.Lost():
                self._metas.pop(event.group_id, None)
            case ev.Admitted():
                self._plan_groups[event.plan.plan_id] = tuple(one.group_id for one in event.plan.groups)
            case ev.Published():
                self.published.append((event.time_s, event.version))
            case _:
                pass
        update = self.record.apply(event)
        if update is not None and isinstance(event, ev.Consumed):
            self.updates.append(update)
            self._count(self._plan_groups.pop(event.plan_id), update)
        return update

    def _count(self, group_ids: tuple[int, ...], update: UpdateRecord) -> None:
        composition = self.by_mini_batch[update.mini_batch]
        composition.groups += len(group_ids)
        for attribute, counts in update.composition.items():
            composition.values.setdefault(attribute, collections.Counter()).update(counts)
        for group_id in group_ids:
            for one in self._metas.pop(group_id).trajectories:
                composition.lengths[one.length_tokens] += 1
                composition.rewards[round(one.reward / REWARD_STEP) * REWARD_STEP] += 1


def history_of(config: Config, events: Iterable[ev.AnyEvent]) -> RunHistory:
    """The history of a log's events: of its final lineage."""
    history, lineage = RunHistory(config), final_lineage(events)
    history.record.resumptions = lineage.resumptions
    for event in lineage.events:
        history.apply(event)
    return history


def count_quantile(counts: Mapping[Any, int], share: float) -> float:
    """The smallest value that at least `share` of the counted do not exceed; NaN of nothing."""
    total, seen = sum(counts.values()), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= share * total:
            return float(value)
    return float("nan")


def count_mean(counts: Mapping[Any, int]) -> float:
    """Mean of counted values; NaN of nothing."""
    total = sum(counts.values())
    return sum(value * count for value, count in counts.items()) / total if total else float("nan")
