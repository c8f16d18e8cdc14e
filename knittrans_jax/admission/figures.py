"""The figures of a run: a second fold over the event log, for the live table and the summary. Nothing is decided from it."""

from __future__ import annotations

import array
import collections

import numpy as np

from knittrans_jax.admission import events as ev
from knittrans_jax.staleness import Staleness, StalenessSummary, staleness_of, summarise
from knittrans_jax.trajectory import GroupMeta, MiniBatchPlan

REMAINDER = "remainder:"
"""Begins the names of the scheduler's counters of prompts that a finite data set has left over, by kind."""


def unique_payload_bytes(groups: list[GroupMeta]) -> int:
    """Payload bytes of a mini-batch with every image counted once, also where several groups show it."""
    media = {one.digest: one.size_bytes for group in groups for one in group.media}
    own = sum(group.payload_bytes - sum(one.size_bytes for one in group.media) for group in groups)
    return own + sum(media.values())


def _counts_on(name: str) -> bool:
    """Counters that are sums over all processes that a role has had."""
    return name == "payload_through_scheduler" or (name.startswith("tool_") and not name.endswith("_most"))


class RunFigures:
    """Folds the events of a final lineage (`lineage`). Memory: six numbers per consumed trajectory, plus what is open."""

    def __init__(self, mini_batches: int) -> None:
        """`mini_batches`: `K`."""
        self._mini_batches = mini_batches
        self._metas: dict[int, GroupMeta] = {}
        self._plans: dict[int, MiniBatchPlan] = {}
        self._staleness = array.array("d")
        self._staleness_sum = [0.0] * len(Staleness._fields)
        self.updates = 0
        self.episode_retries = 0
        self.rewards: list[float] = []
        """Mean reward of the trajectories of each update."""
        self.metrics: list[dict[str, float]] = []
        self.waits_s: collections.Counter[str] = collections.Counter()
        self.pulled_bytes = 0
        self.relayed_bytes = 0
        self.unique_bytes = 0
        self.sampled_tokens = 0
        self.trajectories = 0
        self.images_unique = 0
        self.images_referenced = 0
        self.patches_unique = 0
        self.patches_encoded = 0
        """As the trainer says; one that does not say is taken to encode every image of a mini-batch once."""
        self.patches_naive = 0
        self.compilations = 0
        self.compilations_warm: int | None = None
        """After the second train step, where warm-up ends."""
        self.evals: dict[int, tuple[int, int, int]] = {}
        """Per version: held-out questions, exact answers, episodes."""
        self.eval_held_s = 0.0
        self._eval_version: dict[int, int] = {}
        self.counters: dict[str, dict[str, float]] = {}
        """The last report of every role. What a process had reported before its run was interrupted counts on."""
        self._before: dict[str, dict[str, float]] = {}
        self.start_s: float | None = None
        self.last_s = 0.0
        self.first_lease_s: float | None = None
        self.last_update_s = 0.0
        self.down_s = 0.0
        """Time between an interruption and the scheduler's return, in all."""
        self.checkpoints = 0
        self.checkpoint_stall_s = 0.0
        """What checkpoints took from the slowest training process's main thread, in all."""
        self.checkpoint_bytes = 0
        """Size of the newest checkpoint."""
        self.checkpoint_version: int | None = None
        self.ended: str | None = None

    def apply(self, event: ev.AnyEvent) -> None:
        """Folds one event in."""
        self.start_s = event.time_s if self.start_s is None else self.start_s
        if isinstance(event, ev.Resumed):
            self.down_s += max(0.0, event.time_s - self.last_s)
            self._before = self.counters.copy()
        self.last_s = event.time_s
        match event:
            case ev.Leased():
                self.first_lease_s = event.time_s if self.first_lease_s is None else self.first_lease_s
            case ev.Ready():
                self._metas[event.group.group_id] = event.group
                self.episode_retries += event.episode_retries
            case ev.Failed():
                self.episode_retries += event.episode_retries
            case ev.Filtered() | ev.Expired() | ev.Lost():
                self._metas.pop(event.group_id, None)
            case ev.Admitted():
                self._plans[event.plan.plan_id] = event.plan
            case ev.Withdrawn():
                for plan_id in [plan_id for plan_id in self._plans if plan_id >= event.plan_id]:
                    del self._plans[plan_id]
                for group_id in event.lost:
                    self._metas.pop(group_id, None)
            case ev.Consumed():
                self._consumed(event)
            case ev.EvalLeased():
                self._eval_version[event.eval_id] = event.version
            case ev.EvalExpired():
                self._eval_version.pop(event.eval_id, None)
            case ev.EvalDone():
                version = self._eval_version.pop(event.eval_id)
                questions, exact, episodes = self.evals.get(version, (0, 0, 0))
                self.evals[version] = (questions + event.questions, exact + event.exact, episodes + event.episodes)
                self.eval_held_s += event.held_s
            case ev.Checkpointed():
                self.checkpoints += 1
                self.checkpoint_stall_s += event.stall_s
                self.checkpoint_version, self.checkpoint_bytes = event.version, event.size_bytes
            case ev.RoleReport():
                before = self._before.get(event.role, {})
                self.counters[event.role] = {
                    name: count + (before.get(name, 0.0) if _counts_on(name) else 0.0)
                    for name, count in event.counters.items()
                }
            case ev.RunEnded():
                self.ended = event.reason
            case _:
                pass

    def _consumed(self, event: ev.Consumed) -> None:
        plan = self._plans.pop(event.plan_id)
        reward_sum, trajectories = 0.0, 0
        for planned in plan.groups:
            for trajectory in self._metas.pop(planned.group_id).trajectories:
                staleness = staleness_of(trajectory, version=event.update, mini_batch=plan.mini_batch)
                self._staleness.extend(staleness)
                self._staleness_sum = [a + b for a, b in zip(self._staleness_sum, staleness, strict=True)]
                reward_sum += trajectory.reward
                trajectories += 1
        self.updates += 1
        self.trajectories += trajectories
        self.rewards.append(reward_sum / trajectories)
        self.metrics.append(event.metrics)
        self.waits_s.update(event.waits_s)
        self.pulled_bytes += event.pulled_bytes
        self.relayed_bytes += event.relayed_bytes
        self.unique_bytes += event.unique_bytes
        self.sampled_tokens += plan.sampled_tokens
        references = collections.Counter(image for placement in plan.placements for image in placement.images)
        patches = [image.grid_h * image.grid_w for image in plan.images]
        self.images_unique += len(plan.images)
        self.images_referenced += references.total()
        self.patches_unique += sum(patches)
        self.patches_encoded += int(event.metrics.get("patches_encoded", sum(patches)))
        self.patches_naive += sum(patches[image] * count for image, count in references.items())
        self.compilations = event.compilations
        if self.updates == 2 * self._mini_batches:
            self.compilations_warm = event.compilations
        self.last_update_s = event.time_s

    def staleness(self, *, in_train_steps: bool = False) -> StalenessSummary:
        """Staleness of all consumed trajectories."""
        return summarise(self.staleness_rows(), self._mini_batches if in_train_steps else None)

    def staleness_means(self) -> Staleness:
        """Means over all consumed trajectories, in updates, at no cost."""
        return Staleness(*(total / max(1, self.trajectories) for total in self._staleness_sum))

    def staleness_rows(self) -> np.ndarray:
        """[trajectories, 6] in the order of `Staleness`, in updates."""
        return np.asarray(self._staleness, np.float64).reshape(-1, len(Staleness._fields))

    @property
    def heldout(self) -> tuple[int, int, int]:
        """(version, questions, exact) of the newest evaluation that has a result; (-1, 0, 0): none."""
        if not self.evals:
            return -1, 0, 0
        version = max(self.evals)
        return version, self.evals[version][0], self.evals[version][1]

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens trained on, per second from the first lease to the last update."""
        return self.sampled_tokens / self.trained_s if self.trained_s > 0 else 0.0

    @property
    def trained_s(self) -> float:
        """From the first lease to the last update, without the time for which the run was down; 0 before the first update."""
        return self.last_update_s - (self.first_lease_s or 0.0) - self.down_s if self.updates else 0.0
