"""What belongs to a run's final lineage: the parameters' own history, without what resuming from a checkpoint threw away.

`final_lineage` turns the events of a log into events as they would stand in the log of a run that was never thrown back:

* updates, evaluations, checkpoints and versions that no present parameter descends from are left out, as are earlier ends;
* so are mini-batches that were withdrawn before they were trained on;
* every group that went with them, or with an interruption, is lost by an event of its own;
* everything else stays, in order, with its times; what was left out is counted.

So whatever folds events (figures, record, report, trace) counts every update once and needs to know nothing of resuming. The
state of admission folds the log as it is: both give the same accounts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import msgspec

from knittrans_jax.admission import events as ev


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """A run that went on from a checkpoint, and what that threw away."""

    time_s: float
    """Of the scheduler's clock."""
    down_s: float
    """Between the last event before and the scheduler's return."""
    version: int
    """The version from which training went on; -1: no training group has formed yet."""
    updates_discarded: int
    groups_discarded: int
    """Consumed by those updates; leased again, like the following."""
    groups_lost: int
    """Open when the run was interrupted, and gone then: in flight, or with their storage unit."""


@dataclasses.dataclass(frozen=True)
class Lineage:
    """See the module's opening."""

    events: list[ev.AnyEvent]
    resumptions: list[Resumption]


@dataclasses.dataclass
class _Update:
    """Where an update's events stand."""

    version: int
    admitted: int
    consumed: int
    groups: tuple[int, ...]


class _Straightener:
    def __init__(self) -> None:
        self.out: list[ev.AnyEvent | None] = []
        self.resumptions: list[Resumption] = []
        self._open: dict[int, bool] = {}
        """Whether it is ready or admitted, by group."""
        self._admitted: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._updates: list[_Update] = []
        self._versions: list[tuple[int, int]] = []
        """Events of a version (published, checkpointed): the version, and where the event stands."""
        self._evals: list[tuple[int, int, int]] = []
        """Events of an evaluation: its id, its version, where the event stands."""
        self._eval_version: dict[int, int] = {}
        self._last_s = 0.0

    def apply(self, event: ev.AnyEvent) -> None:
        at = len(self.out)
        self.out.append(event)
        match event:
            case ev.Leased():
                self._open[event.group_id] = False
            case ev.Ready():
                self._open[event.group.group_id] = True
            case ev.Failed() | ev.Filtered() | ev.Expired() | ev.Lost():
                self._open.pop(event.group_id, None)
                if isinstance(event, ev.Lost):
                    self._count_lost(1)
            case ev.Admitted():
                self._admitted[event.plan.plan_id] = at, tuple(group.group_id for group in event.plan.groups)
            case ev.Withdrawn():
                self._withdrawn(event)
            case ev.Consumed():
                admitted, groups = self._admitted.pop(event.plan_id)
                for group_id in groups:
                    del self._open[group_id]
                self._updates.append(_Update(event.update + 1, admitted, at, groups))
            case ev.Published() | ev.Checkpointed():
                self._versions.append((event.version, at))
            case ev.EvalLeased():
                self._eval_version[event.eval_id] = event.version
                self._evals.append((event.eval_id, event.version, at))
            case ev.EvalDone() | ev.EvalExpired():
                self._evals.append((event.eval_id, self._eval_version[event.eval_id], at))
            case ev.Resumed():
                self._resumed(event)
            case ev.TrainGroupFormed():
                self._formed(event)
            case _:
                pass
        self._last_s = event.time_s

    def _withdrawn(self, event: ev.Withdrawn) -> None:
        self.out[-1] = None
        for plan_id in [plan_id for plan_id in self._admitted if plan_id >= event.plan_id]:
            self.out[self._admitted.pop(plan_id)[0]] = None
        for group_id in event.lost:
            del self._open[group_id]
        self._count_lost(len(event.lost))
        self._lose(event.lost, event.time_s, event.reason)

    def _count_lost(self, groups: int) -> None:
        """Between an interruption and the training group that goes on."""
        if self.resumptions and self.resumptions[-1].version < 0:
            last = self.resumptions[-1]
            self.resumptions[-1] = msgspec.structs.replace(last, groups_lost=last.groups_lost + groups)

    def _resumed(self, event: ev.Resumed) -> None:
        for index in range(len(self.out) - 1):
            if isinstance(self.out[index], ev.RunEnded):
                self.out[index] = None
        if not event.keeps:
            for at, _ in self._admitted.values():
                self.out[at] = None
            self._admitted.clear()
        gone = [group_id for group_id, done in self._open.items() if not (event.keeps and done)]
        self.resumptions.append(
            Resumption(
                time_s=event.time_s,
                down_s=max(0.0, event.time_s - self._last_s),
                version=-1,
                updates_discarded=0,
                groups_discarded=0,
                groups_lost=len(gone),
            )
        )
        self._lose(gone, event.time_s, "the run was interrupted")
        for group_id in gone:
            del self._open[group_id]

    def _formed(self, event: ev.TrainGroupFormed) -> None:
        undone = [update for update in self._updates if update.version > event.lineage]
        withdrawn: list[int] = []
        if undone:
            for at, plan_groups in self._admitted.values():
                self.out[at] = None
                withdrawn += plan_groups
            self._admitted.clear()
            for group_id in withdrawn:
                del self._open[group_id]
        self._updates = [update for update in self._updates if update.version <= event.lineage]
        for update in undone:
            self.out[update.admitted] = self.out[update.consumed] = None
        for version, at in self._versions:
            if version > event.lineage:
                self.out[at] = None
        self._versions = [entry for entry in self._versions if entry[0] <= event.lineage]
        if undone or (self.resumptions and self.resumptions[-1].version < 0):
            for _, version, at in self._evals:
                if version > event.evaluated:
                    self.out[at] = None
            self._evals = [entry for entry in self._evals if entry[1] <= event.evaluated]
        groups = sorted(group_id for update in undone for group_id in update.groups)
        if undone and not (self.resumptions and self.resumptions[-1].version < 0):  # the training group alone died
            self.resumptions.append(
                Resumption(
                    time_s=event.time_s,
                    down_s=0.0,
                    version=-1,
                    updates_discarded=0,
                    groups_discarded=0,
                    groups_lost=len(withdrawn),
                )
            )
        if self.resumptions and self.resumptions[-1].version < 0:
            self.resumptions[-1] = msgspec.structs.replace(
                self.resumptions[-1],
                version=event.version,
                updates_discarded=len(undone),
                groups_discarded=len(groups),
            )
        self._lose([*groups, *withdrawn], event.time_s, f"training went on from version {event.lineage}")

    def _lose(self, group_ids: Iterable[int], time_s: float, reason: str) -> None:
        self.out.extend(ev.Lost(time_s=time_s, group_id=group_id, reason=reason) for group_id in sorted(group_ids))


def final_lineage(events: Iterable[ev.AnyEvent]) -> Lineage:
    """The final lineage of a log's events. A log that was never resumed comes back as it is."""
    straightener = _Straightener()
    for event in events:
        straightener.apply(event)
    return Lineage([event for event in straightener.out if event is not None], straightener.resumptions)
