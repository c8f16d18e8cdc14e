"""Work in flight, apart from slots and devices: groups, evaluations and their members, and what they are when finished."""

from __future__ import annotations

import collections
import dataclasses
import math

from knittrans_jax.launch.messages import EvalLease, EvalResult, GroupFailure, Lease
from knittrans_jax.rollout.slots import Parked
from knittrans_jax.rollout.tasks.base import Episode, Outcome
from knittrans_jax.rollout.turns import Image
from knittrans_jax.trajectory import GroupMeta, GroupPayload, MediaMeta, Trajectory, TrajectoryMeta


@dataclasses.dataclass(frozen=True)
class FinishedGroup:
    """A complete group: its description for the scheduler, its payload for the storage unit."""

    meta: GroupMeta
    payload: GroupPayload
    episode_retries: int


@dataclasses.dataclass
class Results:
    """What happened since the last `Engine.take_results`."""

    started: list[int] = dataclasses.field(default_factory=list)
    finished: list[FinishedGroup] = dataclasses.field(default_factory=list)
    failed: list[GroupFailure] = dataclasses.field(default_factory=list)
    evals: list[EvalResult] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class FinishedMember:
    """One finished trajectory of a group, with the picture behind each run of placeholders."""

    trajectory: Trajectory
    images: list[Image]
    outcome: Outcome
    turns: int
    started_s: float
    finished_s: float
    version_done: int


@dataclasses.dataclass
class GroupRun:
    """A group in flight."""

    lease: Lease
    trajectories: int
    retries: int = 0
    members: list[Member] = dataclasses.field(default_factory=list)
    done: dict[int, FinishedMember] = dataclasses.field(default_factory=dict)
    over: bool = False
    """Given up: nothing of it goes on."""

    @property
    def greedy(self) -> bool:
        """Training samples."""
        return False


@dataclasses.dataclass
class EvalRun:
    """An evaluation that is active: it holds its version."""

    lease: EvalLease
    began_s: float
    """On the engine's monotonic clock."""
    waiting: collections.deque[str]
    running: int = 0
    retries: int = 0
    questions: int = 0
    exact: int = 0
    reward_sum: float = 0.0
    episodes: int = 0
    over: bool = False
    """Never: a member that fails is counted as wrong, and the others go on."""

    @property
    def greedy(self) -> bool:
        """Evaluations take the likeliest token."""
        return True

    def count(self, outcome: Outcome) -> None:
        """Adds a finished episode."""
        self.running -= 1
        self.episodes += 1
        self.questions += outcome.questions
        self.exact += outcome.exact
        self.reward_sum += outcome.reward

    def result(self, now_s: float) -> EvalResult:
        """The evaluation's outcome; `held_s` is from its activation until now."""
        return EvalResult(
            eval_id=self.lease.eval_id,
            questions=self.questions,
            exact=self.exact,
            reward_sum=self.reward_sum,
            episodes=self.episodes,
            held_s=now_s - self.began_s,
        )


@dataclasses.dataclass
class Member:
    """One trajectory in flight. `slot` is -1 while it has none."""

    run: GroupRun | EvalRun
    index: int
    prompt_id: str
    started_s: float
    episode: Episode | None = None
    attempt: int = 0
    slot: int = -1
    tool_calls: int = 0
    """Of this attempt."""
    waits_for: int | None = None
    """The number of the tool call that it waits for."""
    parked: Parked | None = None
    """Its transcript, while it has no slot."""

    def outcome(self) -> Outcome:
        """What the episode says at its end; raises `ValueError` for a reward that is not finite."""
        assert self.episode is not None
        outcome = self.episode.outcome()
        if not all(map(math.isfinite, (outcome.reward, *outcome.turn_rewards))):
            raise ValueError(f"the reward is {outcome.reward}, by turn {outcome.turn_rewards}")
        return outcome


def assemble_group(group_id: int, unit: str, members: list[FinishedMember], retries: int) -> FinishedGroup:
    """Describes and packs a group's finished trajectories, in member order; each different picture is kept once."""
    media: dict[str, Image] = {}
    for member in members:
        for image in member.images:
            media.setdefault(image.digest, image)
    number = {digest: index for index, digest in enumerate(media)}
    payload = GroupPayload(
        group_id=group_id,
        trajectories=tuple(member.trajectory for member in members),
        media={digest: image.pixels_HxWxC for digest, image in media.items()},
    )
    meta = GroupMeta(
        group_id=group_id,
        unit=unit,
        trajectories=tuple(_describe(member, number) for member in members),
        media=tuple(
            MediaMeta(
                digest=image.digest, grid_h=image.grid[0], grid_w=image.grid[1], size_bytes=image.pixels_HxWxC.nbytes
            )
            for image in media.values()
        ),
        payload_bytes=payload.size_bytes,
    )
    return FinishedGroup(meta, payload, retries)


def _describe(member: FinishedMember, number: dict[str, int]) -> TrajectoryMeta:
    trajectory = member.trajectory
    versions = trajectory.versions_T[trajectory.sampled_T]
    return TrajectoryMeta(
        length_tokens=len(trajectory.tokens_T),
        sampled_tokens=len(versions),
        reward=float(member.outcome.reward),
        turn_rewards=tuple(map(float, member.outcome.turn_rewards)),
        version_min=int(versions.min()),
        version_max=int(versions.max()),
        version_sum=int(versions.sum()),
        turns=member.turns,
        questions=int(member.outcome.questions),
        exact=int(member.outcome.exact),
        media=tuple(number[image.digest] for image in member.images),
        started_s=member.started_s,
        finished_s=member.finished_s,
        version_done=member.version_done,
    )
