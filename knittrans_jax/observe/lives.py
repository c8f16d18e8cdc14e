"""The lives of groups and their trajectories, for time lines and traces: a fold over the events, in bounded memory.

What it guarantees:

* groups stand under the train step during which they were leased; a train step is kept whole, or up to `step_groups` of its
  groups in the order of their leases;
* at most about `max_slices` slices (a group has four, and one per trajectory) are kept: beyond, every second train step is
  dropped, again and again, so that those kept stay evenly spread; the first and the newest two always stay;
* what was left out is counted, and the same log gives the same lives, read live or afterwards.
"""

from __future__ import annotations

import dataclasses

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import Account
from knittrans_jax.config import Config
from knittrans_jax.trajectory import TrajectoryMeta

MAX_SLICES = 60_000
"""Some 10 MB of trace, which a browser still opens with ease."""
GROUP_SLICES = 4
NEWEST_STEPS = 2
MAX_EVALUATIONS = 1_000


@dataclasses.dataclass(slots=True)
class GroupLife:
    """What happened to a group, and when; times in seconds of the scheduler's clock, None: has not happened."""

    group_id: int
    prompt_id: str
    attributes: dict[str, str]
    host: str
    version: int
    """Published version when it was leased."""
    leased_s: float
    started_s: float | None = None
    ready_s: float | None = None
    admitted_s: float | None = None
    ended_s: float | None = None
    account: Account = Account.LEASED
    reason: str = ""
    update: int | None = None
    """The update that consumed it, or will: `V` before it."""
    mini_batch: int | None = None
    trajectories: tuple[TrajectoryMeta, ...] = ()

    def phases(self, until_s: float) -> list[tuple[Account, float, float]]:
        """(account, from, to) in order; a phase that has not ended ends at `until_s`."""
        begins = [
            (Account.LEASED, self.leased_s),
            (Account.RUNNING, self.started_s),
            (Account.READY, self.ready_s),
            (Account.ADMITTED, self.admitted_s),
        ]
        marks = [(account, time_s) for account, time_s in begins if time_s is not None]
        ends = [time_s for _, time_s in marks[1:]] + [until_s if self.ended_s is None else self.ended_s]
        return [(account, begin_s, end_s) for (account, begin_s), end_s in zip(marks, ends, strict=True)]


@dataclasses.dataclass(slots=True)
class EvaluationLife:
    """A share of an evaluation on a host. `done_s` is None while it is under way; `result` says how it ended."""

    host: str
    version: int
    leased_s: float
    done_s: float | None = None
    result: str = ""


class Lives:
    """See the module's opening."""

    def __init__(self, config: Config, max_slices: int = MAX_SLICES) -> None:
        """`max_slices`: the bound; the newest train steps may each take a quarter of it."""
        self._mini_batches = config.batch.mini_batches
        self._slices_per_group = GROUP_SLICES + config.batch.trajectories_per_group
        self._max_groups = max(4, max_slices // self._slices_per_group)
        self.step_groups = self._max_groups // 4
        self.stride = 1
        """Train steps that are kept are multiples of this, or the newest."""
        self.by_step: dict[int, list[GroupLife]] = {}
        self.groups = 0
        """All groups so far, kept or not."""
        self.kept = 0
        self.train_steps = 0
        """Train steps during which groups were leased."""
        self.evaluations: list[EvaluationLife] = []
        self.evaluations_left_out = 0
        self._open: dict[int, GroupLife] = {}
        self._plan_groups: dict[int, tuple[int, ...]] = {}
        self._evaluation: dict[int, EvaluationLife] = {}
        self._updates = 0

    def apply(self, event: ev.AnyEvent) -> None:
        """Folds one event in."""
        match event:
            case ev.Leased():
                self._leased(event)
            case ev.Started():
                if life := self._open.get(event.group_id):
                    life.account, life.started_s = Account.RUNNING, event.time_s
            case ev.Ready():
                if life := self._open.get(event.group.group_id):
                    life.account, life.ready_s = Account.READY, event.time_s
                    life.trajectories = event.group.trajectories
            case ev.Admitted():
                self._plan_groups[event.plan.plan_id] = tuple(one.group_id for one in event.plan.groups)
                for planned in event.plan.groups:
                    if life := self._open.get(planned.group_id):
                        life.account, life.admitted_s = Account.ADMITTED, event.time_s
                        life.update, life.mini_batch = event.plan.update, event.plan.mini_batch
            case ev.Consumed():
                self._updates = event.update + 1
                for group_id in self._plan_groups.pop(event.plan_id, ()):
                    self._end(group_id, Account.CONSUMED, event.time_s, "")
            case ev.Failed():
                self._end(event.group_id, Account.FAILED, event.time_s, event.reason)
            case ev.Filtered():
                self._end(event.group_id, Account.FILTERED, event.time_s, event.reason)
            case ev.Expired():
                self._end(event.group_id, Account.EXPIRED, event.time_s, event.reason)
            case ev.Lost():
                self._end(event.group_id, Account.LOST, event.time_s, event.reason)
            case ev.EvalLeased():
                self._evaluation[event.eval_id] = EvaluationLife(event.host, event.version, event.time_s)
            case ev.EvalDone():
                self._end_evaluation(event.eval_id, event.time_s, f"{event.exact} of {event.questions} exact")
            case ev.EvalExpired():
                self._end_evaluation(event.eval_id, event.time_s, f"expired: {event.reason}")
            case _:
                pass

    @property
    def left_out(self) -> int:
        """Groups that are not kept."""
        return self.groups - self.kept

    def near(self, step: int) -> int | None:
        """The kept train step nearest to `step`; None: none is kept."""
        return min(self.by_step, key=lambda kept: (abs(kept - step), kept), default=None)

    def said(self) -> str:
        """What is kept and what is not, in words."""
        if not self.left_out:
            return f"all {self.groups:,} groups of {self.train_steps:,} train steps"
        return (
            f"{self.kept:,} of {self.groups:,} groups: those leased during {len(self.by_step):,} of {self.train_steps:,} train "
            f"steps (every {self.stride}th and the newest {NEWEST_STEPS}, at most {self.step_groups:,} groups of each)"
        )

    def _leased(self, event: ev.Leased) -> None:
        step = self._updates // self._mini_batches
        self.groups += 1
        bucket = self.by_step.get(step)
        if bucket is None:
            bucket = self.by_step[step] = []
            self.train_steps += 1
            self._thin()
        if len(bucket) >= self.step_groups:
            return
        life = GroupLife(event.group_id, event.prompt_id, event.attributes, event.host, event.version, event.time_s)
        bucket.append(life)
        self.kept += 1
        self._open[event.group_id] = life
        if self.kept > self._max_groups:
            self._thin()

    def _thin(self) -> None:
        """Drops train steps neither on the stride nor among the newest; doubles the stride while there are too many."""
        while True:
            steps = sorted(self.by_step)
            for step in steps[:-NEWEST_STEPS]:
                if step % self.stride:
                    self.kept -= len(self.by_step.pop(step))
            older = [step for step in steps[:-NEWEST_STEPS] if step in self.by_step and step]
            if self.kept <= self._max_groups or not older:
                return
            self.stride *= 2

    def _end(self, group_id: int, account: Account, time_s: float, reason: str) -> None:
        if life := self._open.pop(group_id, None):
            life.account, life.ended_s, life.reason = account, time_s, reason

    def _end_evaluation(self, eval_id: int, time_s: float, result: str) -> None:
        life = self._evaluation.pop(eval_id, None)
        if life is None:
            return
        if len(self.evaluations) >= MAX_EVALUATIONS:
            self.evaluations_left_out += 1
            return
        life.done_s, life.result = time_s, result
        self.evaluations.append(life)
