"""`grid-lookup`: 4 handwritten digits in a 2x2 picture, 3 turns; each shows the same picture and asks about a part of it.

The cells are called `a b` above `c d`. A question names one cell (`c`: one digit) or a row (`top` or `low`: two digits), so
questions and answers are of unequal length. No question is asked twice in an episode.

Attributes: `domain`, `cells` (three cell questions) or `rows` (both rows and one cell); `difficulty`, `distinct`
when all four digits differ, else `repeated` (then looking at a wrong cell can still give the right digit).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from knittrans_jax.rollout.tasks.base import Outcome, Prompt, Split, TaskLimits, Turn
from knittrans_jax.rollout.tasks.digits import (
    SIDE,
    digits_and_end,
    load_digits,
    parse_prompt_id,
    prompt_id,
    prompt_rng,
)
from knittrans_jax.rollout.tasks.scoring import partial_credit
from knittrans_jax.rollout.text import Vocabulary
from knittrans_jax.strict_yaml import convert_strictly

CELLS = {"a": (0,), "b": (1,), "c": (2,), "d": (3,)}
ROWS = {"top": (0, 1), "low": (2, 3)}
QUESTIONS = CELLS | ROWS
"""Question -> the cells whose digits are the answer, in reading order: 0 1 above 2 3."""
TURNS = 3


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`rows_share`: share of prompts of the domain `rows`. `train_prompts`, `heldout_prompts`: how many prompts are drawn."""

    rows_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    train_prompts: Annotated[int, msgspec.Meta(ge=1, le=999_999)] = 4096
    heldout_prompts: Annotated[int, msgspec.Meta(ge=1, le=999_999)] = 352


@dataclasses.dataclass(frozen=True)
class GridPrompt:
    """A picture uint8 [16, 16, 1], its digits in reading order, and what is asked about it."""

    picture_HxWx1: np.ndarray
    digits: tuple[int, int, int, int]
    questions: tuple[str, ...]

    def truth(self, question: str) -> str:
        """The right answer."""
        return "".join(str(self.digits[cell]) for cell in QUESTIONS[question])


@dataclasses.dataclass
class GridLookupEpisode:
    """One conversation about one picture."""

    prompt: GridPrompt
    answers: list[str] = dataclasses.field(default_factory=list)

    def first(self) -> Turn:
        """The picture and the first question."""
        return self._turn(0)

    def respond(self, answer: str) -> Turn | None:
        """The picture again and the next question."""
        self.answers.append(answer)
        return self._turn(len(self.answers)) if len(self.answers) < TURNS else None

    def outcome(self) -> Outcome:
        """Mean partial credit of the turns."""
        truths = [self.prompt.truth(question) for question in self.prompt.questions]
        pairs = list(zip(self.answers, truths, strict=True))
        credits = tuple(partial_credit(answer, truth) for answer, truth in pairs)
        return Outcome(sum(credits) / TURNS, TURNS, sum(answer == truth for answer, truth in pairs), credits)

    def _turn(self, index: int) -> Turn:
        return Turn((self.prompt.picture_HxWx1, self.prompt.questions[index]))


class GridLookup:
    """See the module's opening."""

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        """Raises `ValueError` for options that do not fit `Options`."""
        self.options = convert_strictly(options, Options)
        self.seed = seed
        self.vocabulary = Vocabulary()
        self.sampled_ids = digits_and_end(self.vocabulary)
        self._counts: dict[Split, int] = {"train": self.options.train_prompts, "heldout": self.options.heldout_prompts}
        self.limits = TaskLimits(
            turns=TURNS,
            text_tokens_per_turn=max(map(len, QUESTIONS)),
            images_per_turn=1,
            image_shapes=((2 * SIDE, 2 * SIDE, 1),),
            answer_tokens=3,
        )
        self._grid = functools.lru_cache(maxsize=4096)(self._draw)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """All prompts of a split."""
        return [self._prompt(split, index) for index in range(self._counts[split])]

    def episode(self, prompt_id: str) -> GridLookupEpisode:
        """A new episode."""
        return GridLookupEpisode(self.grid(prompt_id))

    def grid(self, prompt_id: str) -> GridPrompt:
        """Everything about a prompt."""
        return self._grid(*parse_prompt_id(prompt_id, self._counts))

    def _asks_rows(self, index: int) -> bool:
        """Spreads the domain `rows` evenly: of the first i prompts, floor(i * rows_share) are of it."""
        share = self.options.rows_share
        return math.floor((index + 1) * share) > math.floor(index * share)

    def _draw(self, split: Split, index: int) -> GridPrompt:
        rng = prompt_rng(self.seed, split, index)
        digits = load_digits(split)
        chosen = rng.integers(len(digits.labels_N), size=4)
        picture = np.block([[digits.images_NxHxW[chosen[2 * row + column]] for column in (0, 1)] for row in (0, 1)])
        rows = list(ROWS) if self._asks_rows(index) else []
        asked = [*rows, *rng.permutation(list(CELLS))[: TURNS - len(rows)]]
        questions = tuple(str(question) for question in rng.permutation(asked))
        a, b, c, d = (int(label) for label in digits.labels_N[chosen])
        return GridPrompt(picture[..., None], (a, b, c, d), questions)

    def _prompt(self, split: Split, index: int) -> Prompt:
        grid = self._draw(split, index)
        return Prompt(
            prompt_id(split, index),
            {
                "domain": "rows" if self._asks_rows(index) else "cells",
                "difficulty": "distinct" if len(set(grid.digits)) == 4 else "repeated",
            },
        )
