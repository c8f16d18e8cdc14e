"""M-RoPE positions of a token sequence with images, in numpy. Source: Qwen2-VL (Wang et al., 2024), stills as in Qwen3-VL."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def mrope_positions(
    tokens: ArrayLike,
    image_grids: Sequence[tuple[int, int]],
    image_token_id: int,
    merge_size: int,
    start: int = 0,
) -> tuple[np.ndarray, int]:
    """Positions (time, row, column) of every token -> (int32 [3, T], position of the token that would follow).

    A text token at p is (p, p, p) and the next one is at p + 1. An image that begins at p has its token of row r and
    column c at (p, p + r, p + c), and the text after it continues at p + max(rows, columns).

    Args:
      tokens: int [T], with every image's placeholders expanded to one id per image token.
      image_grids: (rows, columns) in patches of each image, in order of appearance; each is
        rows / merge_size x columns / merge_size image tokens.
      image_token_id: the placeholder's id.
      merge_size: patches per side of one image token.
      start: where the first token stands. Feeding turns one by one, each with the position that the last call
        returned, gives what one call with everything gives, as long as no image is cut.

    Raises:
      ValueError: a grid is not divisible by merge_size, or placeholders and grids do not match.
    """
    tokens_T = np.asarray(tokens)
    if tokens_T.ndim != 1:
        raise ValueError(f"tokens have shape {tokens_T.shape}; expected one axis [T]")
    positions_3xT = np.empty((3, len(tokens_T)), np.int32)
    is_image_T = tokens_T == image_token_id
    at, position = 0, start
    for index, (rows_patches, columns_patches) in enumerate(image_grids):
        rows, columns = _merged(index, rows_patches, columns_patches, merge_size)
        found = np.flatnonzero(is_image_T[at:])
        if not len(found):
            raise ValueError(
                f"image {index}: no placeholders left for it in {len(tokens_T)} tokens with {len(image_grids)} images; "
                f"expected {rows * columns} of id {image_token_id}"
            )
        begin = at + int(found[0])
        end = begin + rows * columns
        run = int(is_image_T[begin:end].sum())
        if end > len(tokens_T) or run != rows * columns:
            length = int(np.argmin(np.append(is_image_T[begin:], False)))
            raise ValueError(
                f"image {index}: a run of {length} placeholders at token {begin}; expected {rows * columns} "
                f"({rows} x {columns} image tokens of a {rows_patches} x {columns_patches} patch grid)"
            )
        positions_3xT[:, at:begin] = np.arange(position, position + begin - at, dtype=np.int32)[None]
        position += begin - at
        row, column = np.divmod(np.arange(rows * columns, dtype=np.int32), columns)
        positions_3xT[:, begin:end] = position + np.stack([np.zeros_like(row), row, column])
        position += max(rows, columns)
        at = end
    left = np.flatnonzero(is_image_T[at:])
    if len(left):
        raise ValueError(
            f"{len(left)} placeholders from token {at + int(left[0])} on belong to no image; {len(image_grids)} grids given"
        )
    positions_3xT[:, at:] = np.arange(position, position + len(tokens_T) - at, dtype=np.int32)[None]
    return positions_3xT, position + len(tokens_T) - at


def _merged(index: int, rows_patches: int, columns_patches: int, merge_size: int) -> tuple[int, int]:
    """(rows, columns) in image tokens of a grid in patches."""
    if min(rows_patches, columns_patches) < 1 or rows_patches % merge_size or columns_patches % merge_size:
        raise ValueError(
            f"image {index}: a grid of {rows_patches} x {columns_patches} patches; expected positive multiples of "
            f"merge_size = {merge_size}"
        )
    return rows_patches // merge_size, columns_patches // merge_size
