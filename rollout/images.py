"""The device's image table as a cache: each picture is encoded once per version, the least recently used gives way.

What it guarantees: the features of a picture are those of the version that is held. `flush` forgets everything, and must be
called at every change of weights; until a block is written again nothing can refer to it.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

import numpy as np

from knittrans_jax.encoding.patches import patch_coords, patchify
from knittrans_jax.models.config import VisionConfig
from knittrans_jax.rollout.sampler import SamplerShapes
from knittrans_jax.rollout.turns import Image


class ImageTable:
    """Says which block holds which picture. The blocks themselves are on the device."""

    def __init__(self, vision: VisionConfig, shapes: SamplerShapes) -> None:
        """An empty table."""
        self._vision, self._shapes = vision, shapes
        self._blocks: collections.OrderedDict[str, int] = collections.OrderedDict()
        self._free = list(range(shapes.image_blocks))

    def flush(self) -> None:
        """Forgets all pictures: their features are those of weights that are gone."""
        self._blocks.clear()
        self._free = list(range(self._shapes.image_blocks))

    def place(self, images: Iterable[Image]) -> tuple[dict[str, int], list[tuple[Image, int]]]:
        """Gives every picture a block -> (block by digest, the pictures that must be encoded into theirs first).

        Raises:
            ValueError: more pictures than blocks at once.
        """
        wanted = {image.digest: image for image in images}
        if len(wanted) > self._shapes.image_blocks:
            raise ValueError(f"{len(wanted)} pictures at once; the image table has {self._shapes.image_blocks} blocks")
        for digest in wanted:
            if digest in self._blocks:
                self._blocks.move_to_end(digest)
        missing = [image for digest, image in wanted.items() if digest not in self._blocks]
        for image in missing:
            # The least recently used is none of those wanted now: they were all moved to the end.
            block = self._free.pop() if self._free else self._blocks.popitem(last=False)[1]
            self._blocks[image.digest] = block
        return {digest: self._blocks[digest] for digest in wanted}, [(i, self._blocks[i.digest]) for i in missing]

    def encoder_inputs(self, placed: list[tuple[Image, int]]) -> tuple[np.ndarray, ...]:
        """Arguments of one `SamplerPrograms.encode` call for at most `encode_rows` pictures: blocks, patches, coordinates,
        grids, segment ids; padded.

        Raises:
            ValueError: a picture with more patches than the program takes.
        """
        rows, size = self._shapes.encode_rows, self._shapes.image_patches
        vision = self._vision
        blocks_N = np.full(rows, self._shapes.image_blocks, np.int32)
        patches_NxPxF = np.zeros((rows, size, vision.patch_features), np.uint8)
        coords_NxPx2 = np.zeros((rows, size, 2), np.int32)
        grids_NxPx2 = np.zeros((rows, size, 2), np.int32)
        segment_ids_NxP = np.zeros((rows, size), np.int32)
        for row, (image, block) in enumerate(placed):
            count = image.grid[0] * image.grid[1]
            if count > size:
                raise ValueError(
                    f"a picture of {image.pixels_HxWxC.shape} is {count} patches; the task's limits.image_shapes allow {size}"
                )
            blocks_N[row] = block
            patches_NxPxF[row, :count] = patchify(image.pixels_HxWxC, vision.patch_size, vision.merge_size)
            coords_NxPx2[row, :count] = patch_coords(*image.grid, vision.merge_size)
            grids_NxPx2[row, :count] = image.grid
            segment_ids_NxP[row, :count] = 1
        return blocks_N, patches_NxPxF, coords_NxPx2, grids_NxPx2, segment_ids_NxP
