"""Pictures to patch rows, in numpy: uint8 in, uint8 out (or float32), in the merge-block order that the encoder expects.

Order: over blocks of merge_size x merge_size patches row by row, and within a block row by row, so that merge_size^2
consecutive patches are one image token (Qwen2-VL's order).
"""

import numpy as np


def grid_of(image_shape: tuple[int, ...], patch_size: int, merge_size: int) -> tuple[int, int]:
    """(rows, columns) in patches of a picture of shape [H, W, C].

    Raises:
      ValueError: H or W is not a positive multiple of patch_size * merge_size: resize before.
    """
    if len(image_shape) != 3:
        raise ValueError(f"picture of shape {tuple(image_shape)}; expected [height, width, channels]")
    unit = patch_size * merge_size
    for name, pixels in zip(("height", "width"), image_shape, strict=False):
        if pixels < 1 or pixels % unit:
            raise ValueError(
                f"picture {name} of {pixels} pixels; expected a positive multiple of {unit} "
                f"(patch_size {patch_size} * merge_size {merge_size}): resize or pad it first"
            )
    return image_shape[0] // patch_size, image_shape[1] // patch_size


def patchify(image_HxWxC: np.ndarray, patch_size: int, merge_size: int) -> np.ndarray:
    """Cut a picture into patches -> [N, patch_size * patch_size * C] of its type, contiguous, in merge-block order.

    N = (H / patch_size) * (W / patch_size). A patch is flattened as (row, column, channel). Values are 0 to 255, as uint8 or
    float32.
    """
    if image_HxWxC.dtype not in (np.uint8, np.float32):
        raise ValueError(
            f"picture of dtype {image_HxWxC.dtype}; expected uint8 or float32 (pixels are normalised on the device)"
        )
    rows, columns = grid_of(image_HxWxC.shape, patch_size, merge_size)
    channels = image_HxWxC.shape[2]
    blocks = image_HxWxC.reshape(
        rows // merge_size, merge_size, patch_size, columns // merge_size, merge_size, patch_size, channels
    )
    ordered = blocks.transpose(0, 3, 1, 4, 2, 5, 6)
    return np.ascontiguousarray(ordered).reshape(rows * columns, patch_size * patch_size * channels)


def patch_coords(rows: int, columns: int, merge_size: int) -> np.ndarray:
    """(row, column) of every patch of a grid in the order of `patchify` -> int32 [rows * columns, 2]."""
    if min(rows, columns) < 1 or rows % merge_size or columns % merge_size:
        raise ValueError(
            f"a grid of {rows} x {columns} patches; expected positive multiples of merge_size = {merge_size}"
        )
    coords = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1).astype(np.int32)
    blocks = coords.reshape(rows // merge_size, merge_size, columns // merge_size, merge_size, 2)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3, 4)).reshape(rows * columns, 2)
