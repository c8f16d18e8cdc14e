"""The protocol of a task: prompts with attributes, multi-turn episodes with text and images, a reward.

A user's own task is any class with these members, constructed as `Class(options, seed)`; see `registry.load_task`. Everything
that a run must know before it starts (how long a trajectory can get, how many bytes a group can take) follows from `limits`.

An episode is a conversation: it shows a turn, receives the answer (the sampled text up to, and without, the end token, or
all of it when it reached `rollout.max_answer_tokens` before), and shows the next turn or ends. The members of one group run
one episode each from the same prompt; their first turns should be equal, since then it is prefilled only once.

Where the next turn is a tool's reply and takes time, `respond` returns a `ToolCall` instead. The episode then waits without
its slot (its tokens are kept, its cache is given up and filled again when it returns), and others are sampled meanwhile. A
tool that raises, or does not answer within `rollout.tool_timeout_s`, fails the attempt of its episode.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from knittrans_jax.encoding.patches import grid_of
from knittrans_jax.rollout.text import Vocabulary
from knittrans_jax.trajectory import TRAJECTORY_BYTES_PER_TOKEN

Split = Literal["train", "heldout"]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """An id from which the task rebuilds the whole prompt, and the attributes on which a batch's quotas act."""

    prompt_id: str
    attributes: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the environment shows before an answer: texts and images (uint8 [H, W, C]) in order."""

    parts: tuple[str | np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """The next turn comes from a tool. `run` gives it, or None when the episode is over.

    A plain function runs in a thread of its own, a coroutine function (`async def`) in one thread with all others, where it is
    cancelled at its deadline; prefer those. Neither may touch what the engine's thread uses.
    """

    name: str
    run: Callable[[], Turn | None] | Callable[[], Awaitable[Turn | None]]


@dataclasses.dataclass(frozen=True)
class EmulatedToolCall:
    """No tool at all: `turn` comes `latency_s` later. Runs count it as emulated wherever they show it."""

    name: str
    turn: Turn | None
    latency_s: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a finished episode: its reward, how many questions it asked, and how many were answered exactly.

    `turn_rewards` are each answer's own, in order, where the task can tell (`train.objective.credit: turn` needs them).
    """

    reward: float
    questions: int
    exact: int
    turn_rewards: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskLimits:
    """The most that any episode shows or expects. `knittrans check` derives lengths and bytes from it.

    `image_shapes` are all (H, W, C) that its images may have; none for a task without images. `answer_tokens` is the longest
    right answer, its end token included. `tool_calls`: the most tool calls of an episode.
    """

    turns: int
    text_tokens_per_turn: int
    images_per_turn: int
    image_shapes: tuple[tuple[int, int, int], ...]
    answer_tokens: int
    tool_calls: int = 0


class Episode(Protocol):
    """One conversation. Raising from any method, or a reward that is not finite, fails the attempt."""

    def first(self) -> Turn:
        """The first turn; called once."""
        ...

    def respond(self, answer: str) -> Turn | ToolCall | EmulatedToolCall | None:
        """The turn after this answer, or the call that gives it, or None: the episode is over."""
        ...

    def outcome(self) -> Outcome:
        """Called once, after the last answer."""
        ...


@runtime_checkable
class Task(Protocol):
    """See the module's opening. `sampled_ids` are the ids that may be sampled, the end token among them."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Ids of characters and special tokens."""
        ...

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """Ids that the sampler may emit; the objective scores over the same ids."""
        ...

    @property
    def limits(self) -> TaskLimits:
        """The most that any episode shows."""
        ...

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """All prompts of a split, in a fixed order."""
        ...

    def episode(self, prompt_id: str) -> Episode:
        """A new episode from a prompt of either split."""
        ...


TASK_MEMBERS = ("vocabulary", "sampled_ids", "limits", "prompts", "episode")


def max_image_tokens(limits: TaskLimits, patch_size: int, merge_size: int) -> int:
    """Image tokens of the largest image; 0 for a task without images."""
    grids = (grid_of(shape, patch_size, merge_size) for shape in limits.image_shapes)
    return max((rows * columns // merge_size**2 for rows, columns in grids), default=0)


def min_image_tokens(limits: TaskLimits, patch_size: int, merge_size: int) -> int:
    """Image tokens of the smallest image; 0 for a task without images."""
    grids = (grid_of(shape, patch_size, merge_size) for shape in limits.image_shapes)
    return min((rows * columns // merge_size**2 for rows, columns in grids), default=0)


def max_trajectory_tokens(limits: TaskLimits, patch_size: int, merge_size: int, max_answer_tokens: int) -> int:
    """Length of the longest trajectory, in tokens: an upper bound for every sampled text.

    Args:
        limits: the task's.
        patch_size: pixels per side of an encoder patch.
        merge_size: patches per side of an image token.
        max_answer_tokens: most tokens sampled per turn.

    Raises:
        ValueError: an image shape cannot be cut into image tokens.
    """
    image_tokens = max_image_tokens(limits, patch_size, merge_size) + 2  # between image_start and image_end
    shown = limits.text_tokens_per_turn + limits.images_per_turn * image_tokens
    return limits.turns * (shown + max_answer_tokens)


def max_group_bytes(limits: TaskLimits, trajectories: int, trajectory_tokens: int) -> int:
    """Most payload bytes of a group: every trajectory of `trajectory_tokens`, every image shown different from all others."""
    image_bytes = max((math.prod(shape) for shape in limits.image_shapes), default=0)
    images = limits.turns * limits.images_per_turn * image_bytes
    return trajectories * (trajectory_tokens * TRAJECTORY_BYTES_PER_TOKEN + images)
