"""Pictures as a Qwen-VL encoder takes them: RGB, resized to whole image tokens, uint8. Normalisation is left to the device.

What it guarantees: sizes and pixels are those of `Qwen2VLImageProcessorPil` of transformers with the same
`preprocessor_config.json`; `encoding.patches` cuts them in its order.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np

from knittrans_jax.encoding.patches import grid_of
from knittrans_jax.models.config import VisionConfig
from knittrans_jax.models.hf_config import CheckpointError, read_json
from knittrans_jax.processing.extra import import_extra

MAX_ASPECT_RATIO = 200
BICUBIC = 3
"""Pillow's number of the filter."""


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) to resize to: multiples of `factor`, between `min_pixels` and `max_pixels`, close in aspect ratio.

    Source: Qwen2-VL's published processing. Halves round to even, as there.

    Raises:
        ValueError: a side that is not positive, or one more than 200 times the other.
    """
    if min(height, width) < 1 or max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ValueError(
            f"picture of {height} x {width} pixels: expected positive sides, one at most {MAX_ASPECT_RATIO} times the other"
        )
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif rows * columns * factor**2 < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureProcessor:
    """Sizes of pictures, from `preprocessor_config.json`."""

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    pixel_mean: float = 0.5
    pixel_std: float = 0.5

    @classmethod
    def from_directory(cls, directory: Path) -> PictureProcessor:
        """From a checkpoint's `preprocessor_config.json`.

        Raises:
            CheckpointError: the file or a key is missing, or says what is not done here (other filters, statistics that
                differ between channels).
        """
        path = Path(directory) / "preprocessor_config.json"
        raw = read_json(path)
        size: dict[str, Any] = raw.get("size") or {}
        found = {
            "patch_size": raw.get("patch_size"),
            "merge_size": raw.get("merge_size"),
            "min_pixels": raw.get("min_pixels") or size.get("shortest_edge"),
            "max_pixels": raw.get("max_pixels") or size.get("longest_edge"),
        }
        sizes: dict[str, int] = {}
        for key, value in found.items():
            if not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{path}: {key} = {value!r}; expected a positive integer")
            sizes[key] = value
        if raw.get("resample", BICUBIC) != BICUBIC:
            raise CheckpointError(
                f"{path}: resample = {raw['resample']!r} is not supported; expected {BICUBIC} (bicubic)"
            )
        statistics = {}
        for key in ("image_mean", "image_std"):
            values = raw.get(key) or [0.5]
            if len(set(values)) != 1:
                raise CheckpointError(f"{path}: {key} = {values}: expected the same for every channel")
            statistics[key] = float(values[0])
        return cls(**sizes, pixel_mean=statistics["image_mean"], pixel_std=statistics["image_std"])

    def check(self, vision: VisionConfig) -> None:
        """That a model takes what this makes.

        Raises:
            CheckpointError: sizes or statistics differ, by name.
        """
        for key in ("patch_size", "merge_size", "pixel_mean", "pixel_std"):
            if getattr(self, key) != getattr(vision, key):
                raise CheckpointError(
                    f"preprocessor_config.json: {key} = {getattr(self, key)}, the model has {getattr(vision, key)}"
                )

    def resize(self, picture: Any) -> np.ndarray:
        """A `PIL.Image`, or uint8 [H, W, 3], to uint8 [H', W', 3], contiguous, ready for `encoding.patches.patchify`."""
        image_module = import_extra("PIL.Image")
        image = image_module.fromarray(picture) if isinstance(picture, np.ndarray) else picture
        image = image.convert("RGB")
        unit = self.patch_size * self.merge_size
        height, width = smart_resize(image.height, image.width, unit, self.min_pixels, self.max_pixels)
        if (height, width) != (image.height, image.width):
            image = image.resize((width, height), resample=BICUBIC)
        return np.ascontiguousarray(np.asarray(image, np.uint8))

    def grid(self, pixels_HxWxC: np.ndarray) -> tuple[int, int]:
        """(rows, columns) in patches of a resized picture."""
        return grid_of(pixels_HxWxC.shape, self.patch_size, self.merge_size)
