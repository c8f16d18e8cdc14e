"""The record of a run: one fold over its events, from which the live table, `metrics.jsonl` and the summary are all read.

`RunRecord` extends the scheduler's own figures (`knittrans_jax.admission.figures`) by what only an observer needs: the account
of every group, counted independently of the scheduler; compilations by role and what was compiled late; lengths, rewards,
composition and bytes by update.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

import msgspec

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.figures import RunFigures
from knittrans_jax.admission.lineage import Resumption
from knittrans_jax.config import Config
from knittrans_jax.staleness import Staleness, staleness_of
from knittrans_jax.trajectory import GroupMeta, MiniBatchPlan

TRAIN_ROLE = "train"
"""Compilations of all training processes together stand under this name."""
MAX_RECOMPILATIONS = 50
"""Compilations after warm-up that are told one by one; more are only counted."""
FLOAT32_BYTES = 4


def naive_payload_bytes(groups: Sequence[GroupMeta]) -> int:
    """Payload bytes of a mini-batch if every trajectory brought each image that it shows, each time, as float32 pixels."""
    own = sum(group.payload_bytes - sum(one.size_bytes for one in group.media) for group in groups)
    shown = sum(group.media[image].size_bytes for group in groups for one in group.trajectories for image in one.media)
    return own + FLOAT32_BYTES * shown


class UpdateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One update, as a line of `metrics.jsonl`. Staleness is the mean over its trajectories, in updates."""

    update: int
    """Versions after it: the first update is 1."""
    train_step: int
    mini_batch: int
    time_s: float
    """Since the run began."""
    groups: int
    trajectories: int
    reward_mean: float
    length_tokens_mean: float
    sampled_tokens: int
    staleness: dict[str, float]
    waits_s: dict[str, float]
    payload_pulled: int
    payload_unique: int
    payload_naive: int
    """If every trajectory brought each image that it shows, each time, as float32 pixels."""
    images_unique: int
    images_referenced: int
    accounts: dict[str, int]
    """Groups by account after it; the values add up to the groups launched so far."""
    composition: dict[str, dict[str, int]]
    """Groups of the mini-batch by attribute and value, for the attributes with quotas (without quotas: all attributes)."""
    compilations: int
    metrics: dict[str, float | None]
    """The trainer's own figures; null where a figure is not defined for the update (nothing to average over)."""


class Recompilation(msgspec.Struct, frozen=True, kw_only=True):
    """A program that was compiled after the warm-up: a warning, for it costs time and shows a shape that varies."""

    role: str
    update: int
    """Updates finished when it was reported."""
    program: str
    """Its name, and the arguments whose shape was new."""


@dataclasses.dataclass
class Compilations:
    """Programs compiled by one role, over all processes that it has had: in all, and after the warm-up."""

    total: int = 0
    after_warmup: int = 0
    reported: int = 0
    """By its present process."""

    def report(self, count: int, warm: bool) -> int:
        """Takes a report of the present process in -> how many are new after the warm-up.

        A smaller count is that of a process started anew, whose first report is warm-up of its own.
        """
        anew = count < self.reported
        new = count if anew else count - self.reported
        self.reported = count
        self.total += new
        late = new if warm and not anew else 0
        self.after_warmup += late
        return late


class RunRecord:
    """Folds the events of a run's final lineage; `apply` returns an `UpdateRecord` for every update.

    Warm-up ends with the second train step after a training group has formed: compilations that a role reports later count as
    after warm-up.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.figures = RunFigures(config.batch.mini_batches)
        self.accounts: dict[str, int] = {account.value: 0 for account in Account}
        self.launched = 0
        self.retries = 0
        """Prompts leased again after their group failed, expired or was lost."""
        self.compilations: dict[str, Compilations] = {}
        self.recompilations: list[Recompilation] = []
        """The first of those after the warm-up."""
        self.warm = False
        """Whether the warm-up is over."""
        self.published = -1
        self.tokens = 0
        """Tokens of consumed trajectories, prompts included."""
        self.prompts: set[str] = set()
        self.last_update: UpdateRecord | None = None
        self.resumptions: list[Resumption] = []
        """Times that the run was resumed, and what that threw away: known to who takes the lineage from the log."""
        self._warm_at = 2 * config.batch.mini_batches
        self._attributes: dict[int, dict[str, str]] = {}
        self._account: dict[int, Account] = {}
        self._prompt: dict[int, tuple[str, int]] = {}
        self._given_back: set[tuple[str, int]] = set()
        self._metas: dict[int, GroupMeta] = {}
        self._plans: dict[int, MiniBatchPlan] = {}

    def apply(self, event: ev.AnyEvent) -> UpdateRecord | None:
        """Folds one event in; returns the record of the update that it finished, if any."""
        self.figures.apply(event)
        match event:
            case ev.Leased():
                self._leased(event)
            case ev.Started():
                self._move(event.group_id, Account.RUNNING)
            case ev.Ready():
                self._move(event.group.group_id, Account.READY)
                self._metas[event.group.group_id] = event.group
            case ev.Failed():
                self._end(event.group_id, Account.FAILED)
            case ev.Filtered():
                self._end(event.group_id, Account.FILTERED)
            case ev.Expired():
                self._end(event.group_id, Account.EXPIRED)
            case ev.Lost():
                self._end(event.group_id, Account.LOST)
            case ev.Admitted():
                self._plans[event.plan.plan_id] = event.plan
                for planned in event.plan.groups:
                    self._move(planned.group_id, Account.ADMITTED)
            case ev.Consumed():
                return self._consumed(event)
            case ev.Published():
                self.published = event.version
            case ev.TrainGroupFormed():
                self.warm, self._warm_at = False, self.figures.updates + 2 * self.config.batch.mini_batches
            case ev.RoleReport():
                self._report(event.role, event.counters, event.compiled)
            case _:
                pass
        return None

    @property
    def ended(self) -> str | None:
        """Why the run ended; None while it has not."""
        return self.figures.ended

    @property
    def elapsed_s(self) -> float:
        """From the first event to the newest, without the time for which the run was down."""
        return self.since_start_s(self.figures.last_s) - self.figures.down_s

    def since_start_s(self, time_s: float) -> float:
        """An event's time, counted from the first event."""
        return time_s - (time_s if self.figures.start_s is None else self.figures.start_s)

    # --- accounts ---------------------------------------------------------------------------------------------------------

    def _leased(self, event: ev.Leased) -> None:
        self._account[event.group_id] = Account.LEASED
        self._attributes[event.group_id] = event.attributes
        self.accounts[Account.LEASED] += 1
        self.launched += 1
        self.prompts.add(event.prompt_id)
        key = (event.prompt_id, event.epoch)
        self._prompt[event.group_id] = key
        if key in self._given_back:
            self._given_back.remove(key)
            self.retries += 1

    def _move(self, group_id: int, target: Account) -> None:
        self.accounts[self._account[group_id]] -= 1
        self.accounts[target] += 1
        self._account[group_id] = target

    def _end(self, group_id: int, target: Account) -> None:
        """A group that will not be consumed."""
        self._move(group_id, target)
        del self._account[group_id], self._attributes[group_id]
        self._metas.pop(group_id, None)
        self._given_back.add(self._prompt.pop(group_id))

    # --- updates and roles ------------------------------------------------------------------------------------------------

    def _consumed(self, event: ev.Consumed) -> UpdateRecord:
        plan = self._plans.pop(event.plan_id)
        composition = self._composition([planned.group_id for planned in plan.groups])
        groups = [self._metas.pop(planned.group_id) for planned in plan.groups]
        for planned in plan.groups:
            self._move(planned.group_id, Account.CONSUMED)
            del self._account[planned.group_id], self._prompt[planned.group_id], self._attributes[planned.group_id]
        trajectories = [one for group in groups for one in group.trajectories]
        rows = [staleness_of(one, version=event.update, mini_batch=plan.mini_batch) for one in trajectories]
        count = len(trajectories)
        lengths = sum(one.length_tokens for one in trajectories)
        self.tokens += lengths
        self._report(TRAIN_ROLE, {"compilations": event.compilations}, event.compiled)
        if event.update + 1 >= self._warm_at:
            self.warm = True
        self.last_update = UpdateRecord(
            update=event.update + 1,
            train_step=plan.train_step,
            mini_batch=plan.mini_batch,
            time_s=self.since_start_s(event.time_s),
            groups=len(plan.groups),
            trajectories=count,
            reward_mean=sum(one.reward for one in trajectories) / count,
            length_tokens_mean=lengths / count,
            sampled_tokens=plan.sampled_tokens,
            staleness={name: sum(row[i] for row in rows) / count for i, name in enumerate(Staleness._fields)},
            waits_s=event.waits_s,
            payload_pulled=event.pulled_bytes,
            payload_unique=event.unique_bytes,
            payload_naive=naive_payload_bytes(groups),
            images_unique=len(plan.images),
            images_referenced=sum(len(placement.images) for placement in plan.placements),
            accounts=dict(self.accounts),
            composition=composition,
            compilations=event.compilations,
            metrics={name: value if math.isfinite(value) else None for name, value in event.metrics.items()},
        )
        return self.last_update

    def _composition(self, group_ids: list[int]) -> dict[str, dict[str, int]]:
        attributes = [self._attributes[group_id] for group_id in group_ids]
        names = self.config.batch.quotas or dict.fromkeys(name for one in attributes for name in one)
        return {
            name: dict(sorted(collections.Counter(one[name] for one in attributes if name in one).items()))
            for name in names
        }

    def _report(self, role: str, counters: dict[str, float], compiled: Sequence[str]) -> None:
        if "compilations" not in counters or (role.startswith(TRAIN_ROLE) and role != TRAIN_ROLE):
            return  # training processes report theirs with every update, together
        late = self.compilations.setdefault(role, Compilations()).report(int(counters["compilations"]), self.warm)
        if late:
            room = MAX_RECOMPILATIONS - len(self.recompilations)
            self.recompilations += [
                Recompilation(role=role, update=self.figures.updates, program=program)
                for program in (compiled or (f"{late} programs, not named",))[:room]
            ]
