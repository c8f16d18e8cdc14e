"""Turns as tokens: text by character, an image as image_start, its placeholders, image_end. Pure numpy.

Placeholders are expanded here and nowhere else. Positions are relative to the turn's own beginning: M-RoPE positions of a
turn that begins at p are these plus p.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from knittrans_jax.encoding.patches import grid_of
from knittrans_jax.models.config import VisionConfig
from knittrans_jax.models.positions import mrope_positions
from knittrans_jax.rollout.tasks.base import TaskLimits, Turn
from knittrans_jax.rollout.text import Vocabulary
from knittrans_jax.trajectory import media_digest


@dataclasses.dataclass(frozen=True)
class Image:
    """A picture, its content hash, and its size in patches (rows, columns)."""

    digest: str
    pixels_HxWxC: np.ndarray
    grid: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class EncodedTurn:
    """A turn of T tokens.

    `image_T` is the number of the image (in `images`) behind each placeholder, -1 elsewhere; `offset_T` the placeholder's
    place among the image's tokens. The token after the turn stands `span` positions behind its first.
    """

    tokens_T: np.ndarray
    positions_3xT: np.ndarray
    span: int
    image_T: np.ndarray
    offset_T: np.ndarray
    images: tuple[Image, ...]


class TurnEncoder:
    """Encodes turns; remembers the last `remember` different ones, since the members of a group see the same."""

    def __init__(
        self, vocabulary: Vocabulary, limits: TaskLimits, vision: VisionConfig | None, remember: int = 4096
    ) -> None:
        """`limits` are the task's, `vision` the model's; at most `remember` turns are kept."""
        self._vocabulary, self._limits, self._vision = vocabulary, limits, vision
        self._cache: collections.OrderedDict[tuple[str, ...], EncodedTurn] = collections.OrderedDict()
        self._capacity = remember

    def encode(self, turn: Turn) -> EncodedTurn:
        """The turn's tokens.

        Raises:
            ValueError: an empty turn, a part that is neither text nor a uint8 picture, a character outside the vocabulary,
                pictures that the task's limits do not announce, or any picture for a model without vision.
        """
        key = tuple(f"t{part}" if isinstance(part, str) else f"i{media_digest(part)}" for part in turn.parts)
        found = self._cache.get(key)
        if found is None:
            found = self._encode(turn, key)
            self._cache[key] = found
            if len(self._cache) > self._capacity:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return found

    def _encode(self, turn: Turn, key: tuple[str, ...]) -> EncodedTurn:
        vocabulary, merge_size = self._vocabulary, self._vision.merge_size if self._vision else 1
        tokens: list[int] = []
        number: list[int] = []
        offset: list[int] = []
        images: list[Image] = []
        for part, name in zip(turn.parts, key, strict=True):
            if isinstance(part, str):
                new = vocabulary.encode(part)
                new_number, new_offset = [-1] * len(new), [0] * len(new)
            else:
                image = self._image(part, name[1:])
                count = image.grid[0] * image.grid[1] // merge_size**2
                new = [vocabulary.image_start, *[vocabulary.image] * count, vocabulary.image_end]
                new_number, new_offset = [-1, *[len(images)] * count, -1], [0, *range(count), 0]
                images.append(image)
            tokens, number, offset = tokens + new, number + new_number, offset + new_offset
        if len(images) > self._limits.images_per_turn:
            raise ValueError(
                f"a turn shows {len(images)} pictures; the task's limits.images_per_turn is {self._limits.images_per_turn}"
            )
        if not tokens:
            raise ValueError("a turn shows nothing: give it text or an image, so that there is something to answer")
        positions, span = mrope_positions(tokens, [image.grid for image in images], vocabulary.image, merge_size)
        as_ints = (np.asarray(x, np.int32) for x in (tokens, number, offset))
        tokens_T, image_T, offset_T = as_ints
        return EncodedTurn(tokens_T, positions, span, image_T, offset_T, tuple(images))

    def _image(self, pixels: np.ndarray, digest: str) -> Image:
        if self._vision is None:
            raise ValueError(
                "a turn shows a picture, but the model has no vision: choose another model.preset or model.path"
            )
        if pixels.shape not in self._limits.image_shapes:
            raise ValueError(
                f"a turn shows a picture of {pixels.shape}; the task's limits.image_shapes are {self._limits.image_shapes}"
            )
        # A copy of its own: a task may draw into the same array again, and the digest must stay true.
        return Image(digest, pixels.copy(), grid_of(pixels.shape, self._vision.patch_size, self._vision.merge_size))
