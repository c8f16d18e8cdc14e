"""`mixture`: several tasks as domains of one run, some of them slow because their turns wait on an emulated tool.

    task:
      name: mixture
      options:
        domains:
          read:   {task: digits-read, options: {digits: 2}}
          camera: {task: grid-lookup, emulated_tool: {name: camera, mean_s: 0.6, sigma: 0.8}}

Every prompt keeps its attributes but for `domain`, which is the domain's name here (the task's own is kept as `kind`); its
id is `read/train-000123`. Every domain draws its prompts from a seed of its own, so two of one task differ. Held-out prompts
of the domains alternate in proportion to their numbers, so that any first few of them are a fair mix. The domains share one
vocabulary, which must be the same for all.

`emulated_tool` calls no tool: every turn of the domain after the first comes later by a latency drawn from a log-normal
distribution with mean `mean_s` seconds and `sigma` of the logarithm, as if a tool had given it. The draws depend on the seed,
the prompt, and how often it was opened before in this process.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from knittrans_jax.config import TaskConfig
from knittrans_jax.rollout.tasks.base import (
    EmulatedToolCall,
    Episode,
    Outcome,
    Prompt,
    Split,
    Task,
    TaskLimits,
    ToolCall,
    Turn,
)
from knittrans_jax.strict_yaml import convert_strictly


class EmulatedTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A log-normal latency: its mean in seconds, and the standard deviation of its logarithm."""

    name: str
    mean_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    sigma: Annotated[float, msgspec.Meta(ge=0, le=5)]


class Domain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task and its options, as in a run's own `task`."""

    task: str
    options: dict[str, Any] = {}
    emulated_tool: EmulatedTool | None = None


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module's opening."""

    domains: dict[str, Domain]


@dataclasses.dataclass
class SlowEpisode:
    """An episode whose later turns come from an emulated tool."""

    inner: Episode
    tool: str
    latencies: Iterator[float]

    def first(self) -> Turn:
        """The inner episode's, at once."""
        return self.inner.first()

    def respond(self, answer: str) -> Turn | ToolCall | EmulatedToolCall | None:
        """The inner episode's turn, later."""
        turn = self.inner.respond(answer)
        return EmulatedToolCall(self.tool, turn, next(self.latencies)) if isinstance(turn, Turn) else turn

    def outcome(self) -> Outcome:
        """The inner episode's."""
        return self.inner.outcome()


class Mixture:
    """See the module's opening."""

    def __init__(self, options: dict[str, Any], seed: int, load: Callable[[TaskConfig, int], Task]) -> None:
        """`load`: builds a domain's task. Raises `ValueError` for options that do not fit, or domains that cannot be mixed."""
        self.options = convert_strictly(options, Options)
        self.seed = seed
        if not self.options.domains:
            raise ValueError("domains: expected at least one domain")
        self._domains = self.options.domains
        self._tasks: dict[str, Task] = {}
        for name, domain in self._domains.items():
            if not name or "/" in name:
                raise ValueError(
                    f"domains: a name stands before the '/' of prompt ids and has none itself (value {name!r})"
                )
            own_seed = (seed + zlib.crc32(name.encode())) % 2**32
            task = load(TaskConfig(name=domain.task, options=domain.options), own_seed)
            if domain.emulated_tool is not None and task.limits.turns < 2:
                raise ValueError(
                    f"domains.{name}.emulated_tool: {domain.task} has no turn after its first that could wait"
                )
            self._tasks[name] = task
        self.vocabulary = next(iter(self._tasks.values())).vocabulary
        for name, task in self._tasks.items():
            if task.vocabulary != self.vocabulary:
                raise ValueError(
                    f"domains.{name}: {self._domains[name].task} has another vocabulary than the domains before"
                )
        self.sampled_ids = tuple(sorted({i for task in self._tasks.values() for i in task.sampled_ids}))
        self.limits = self._limits()
        self._opened: collections.Counter[str] = collections.Counter()

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """All prompts of a split; the domains alternate."""
        placed: list[tuple[float, int, Prompt]] = []
        for number, (name, task) in enumerate(self._tasks.items()):
            prompts = task.prompts(split)
            for index, prompt in enumerate(prompts):
                attributes = dict(prompt.attributes)
                kind = attributes.pop("domain", None)
                attributes |= {"domain": name} if kind is None else {"domain": name, "kind": kind}
                one = Prompt(f"{name}/{prompt.prompt_id}", attributes)
                placed.append(((index + 0.5) / len(prompts), number, one))
        return [prompt for _, _, prompt in sorted(placed, key=lambda entry: entry[:2])]

    def episode(self, prompt_id: str) -> Episode:
        """A new episode of the prompt's domain."""
        name, _, inner = prompt_id.partition("/")
        if name not in self._tasks:
            raise KeyError(f"prompt {prompt_id!r}: expected one of {', '.join(self._tasks)} before the '/'")
        episode, tool = self._tasks[name].episode(inner), self._domains[name].emulated_tool
        if tool is None:
            return episode
        self._opened[prompt_id] += 1
        key = [self.seed, zlib.crc32(prompt_id.encode()), self._opened[prompt_id]]
        return SlowEpisode(episode, tool.name, latencies(tool, np.random.default_rng(key)))

    def _limits(self) -> TaskLimits:
        """The most of all domains."""
        every = [task.limits for task in self._tasks.values()]
        calls = [
            one.tool_calls if domain.emulated_tool is None else one.tool_calls + one.turns - 1
            for one, domain in zip(every, self._domains.values(), strict=True)
        ]
        return TaskLimits(
            turns=max(one.turns for one in every),
            text_tokens_per_turn=max(one.text_tokens_per_turn for one in every),
            images_per_turn=max(one.images_per_turn for one in every),
            image_shapes=tuple(dict.fromkeys(shape for one in every for shape in one.image_shapes)),
            answer_tokens=max(one.answer_tokens for one in every),
            tool_calls=max(calls),
        )


def latencies(tool: EmulatedTool, rng: np.random.Generator) -> Iterator[float]:
    """Draws of the tool's latency, seconds, without end."""
    if tool.mean_s == 0:
        while True:
            yield 0.0
    location = math.log(tool.mean_s) - tool.sigma**2 / 2  # of the logarithm, so that the mean is mean_s
    while True:
        yield float(rng.lognormal(location, tool.sigma))
