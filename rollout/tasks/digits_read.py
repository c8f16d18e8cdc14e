"""`digits-read`: k handwritten digits side by side, one turn; the answer is the k digits.

Attributes: `domain`, the parity of the first digit (`even`, `odd`); `difficulty`, `distinct` when no digit occurs twice,
else `repeated`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

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

QUESTION = "read?"
VARIATION_STREAM = 2
"""Sets the randomness of noise and shifts apart from that which chooses the digits."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`digits`: k. `train_prompts` and `heldout_prompts`: how many prompts are drawn from each part of the digits.

    There are only 1,400 digits to learn from, and a policy that knows them by heart earns full reward and learns no more.
    Training pictures may therefore be drawn with noise, whose standard deviation is `noise` grey levels of 255, and with
    digits moved by one pixel in one direction, each with probability `shift`. Held-out pictures are left as they are.

    `scale` shows every pixel as a square of `scale` x `scale` pixels, and `channels: 3` the grey picture in colour: for models
    whose patches are larger, and for the sizes that real pictures have.
    """

    digits: Annotated[int, msgspec.Meta(ge=1, le=16)] = 3
    train_prompts: Annotated[int, msgspec.Meta(ge=1, le=999_999)] = 4096
    heldout_prompts: Annotated[int, msgspec.Meta(ge=1, le=999_999)] = 1056
    noise: Annotated[float, msgspec.Meta(ge=0, le=255)] = 0.0
    shift: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    scale: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    channels: Literal[1, 3] = 1


@dataclasses.dataclass
class DigitsReadEpisode:
    """One question about one picture."""

    picture_HxWxC: np.ndarray
    truth: str
    answer: str | None = None

    def first(self) -> Turn:
        """The picture and the question."""
        return Turn((self.picture_HxWxC, QUESTION))

    def respond(self, answer: str) -> None:
        """There is no second turn."""
        self.answer = answer

    def outcome(self) -> Outcome:
        """Partial credit by position and length."""
        answer = self.answer or ""
        credit = partial_credit(answer, self.truth)
        return Outcome(credit, 1, int(answer == self.truth), (credit,))


class DigitsRead:
    """See the module's opening."""

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        """Raises `ValueError` for options that do not fit `Options`."""
        self.options = convert_strictly(options, Options)
        self.seed = seed
        self.vocabulary = Vocabulary()
        self.sampled_ids = digits_and_end(self.vocabulary)
        self._counts: dict[Split, int] = {"train": self.options.train_prompts, "heldout": self.options.heldout_prompts}
        self.limits = TaskLimits(
            turns=1,
            text_tokens_per_turn=len(QUESTION),
            images_per_turn=1,
            image_shapes=(
                (SIDE * self.options.scale, SIDE * self.options.scale * self.options.digits, self.options.channels),
            ),
            answer_tokens=self.options.digits + 1,
        )
        self._episode_data = functools.lru_cache(maxsize=4096)(self._draw)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """All prompts of a split."""
        return [self._prompt(split, index) for index in range(self._counts[split])]

    def episode(self, prompt_id: str) -> DigitsReadEpisode:
        """A new episode."""
        return DigitsReadEpisode(*self._episode_data(*parse_prompt_id(prompt_id, self._counts)))

    def _chosen(self, split: Split, index: int) -> np.ndarray:
        return prompt_rng(self.seed, split, index).integers(len(load_digits(split).labels_N), size=self.options.digits)

    def _draw(self, split: Split, index: int) -> tuple[np.ndarray, str]:
        """The picture and the true answer of a prompt."""
        digits, chosen = load_digits(split), self._chosen(split, index)
        images = list(digits.images_NxHxW[chosen])
        if split == "train":
            images = _varied(images, self.options, np.random.default_rng([self.seed, index, VARIATION_STREAM]))
        picture = np.concatenate(images, axis=1).repeat(self.options.scale, axis=0).repeat(self.options.scale, axis=1)
        picture = np.repeat(picture[..., None], self.options.channels, axis=2)
        return picture, "".join(str(label) for label in digits.labels_N[chosen])

    def _prompt(self, split: Split, index: int) -> Prompt:
        labels = load_digits(split).labels_N[self._chosen(split, index)]
        return Prompt(
            prompt_id(split, index),
            {
                "domain": "odd" if labels[0] % 2 else "even",
                "difficulty": "distinct" if len(set(labels.tolist())) == len(labels) else "repeated",
            },
        )


def _varied(images: list[np.ndarray], options: Options, rng: np.random.Generator) -> list[np.ndarray]:
    """Digits uint8 [8, 8] with the shifts and the noise of `options`; what a shift uncovers is background."""
    varied: list[np.ndarray] = []
    for image in images:
        if rng.random() < options.shift:
            axis, back = int(rng.integers(2)), bool(rng.integers(2))
            image = np.roll(image, -1 if back else 1, axis)
            np.moveaxis(image, axis, 0)[-1 if back else 0] = 0
        if options.noise:
            noisy = image + rng.normal(0, options.noise, image.shape)
            image = np.clip(np.rint(noisy), 0, 255).astype(np.uint8)
        varied.append(image)
    return varied
