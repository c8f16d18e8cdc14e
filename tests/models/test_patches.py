import numpy as np
import pytest

from knittrans_jax.encoding.patches import grid_of, patch_coords, patchify


@pytest.mark.parametrize(("rows", "columns", "merge"), [(2, 2, 2), (4, 6, 2), (3, 9, 3), (2, 5, 1)])
def test_patches_and_coordinates_share_one_order_and_rebuild_the_picture(rows: int, columns: int, merge: int):
    size, channels = 4, 3
    image = np.random.default_rng(0).integers(0, 256, (rows * size, columns * size, channels), dtype=np.uint8)
    patches, coords = patchify(image, size, merge), patch_coords(rows, columns, merge)
    assert patches.dtype == np.uint8
    assert coords.dtype == np.int32
    rebuilt = np.zeros_like(image)
    for patch, (row, column) in zip(patches, coords, strict=True):
        rebuilt[row * size : (row + 1) * size, column * size : (column + 1) * size] = patch.reshape(
            size, size, channels
        )
    np.testing.assert_array_equal(rebuilt, image)


def test_order_is_merge_blocks_row_by_row():
    np.testing.assert_array_equal(
        patch_coords(2, 4, 2), [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    )


@pytest.mark.parametrize(
    ("shape", "message"),
    [((12, 16, 1), "picture height of 12 pixels"), ((16, 9, 1), "picture width of 9 pixels"), ((8, 8), "shape")],
)
def test_indivisible_pictures_are_refused(shape: tuple[int, ...], message: str):
    with pytest.raises(ValueError, match=message):
        grid_of(shape, 4, 2)


def test_pictures_of_other_types_are_refused():
    with pytest.raises(ValueError, match="float64; expected uint8 or float32"):
        patchify(np.zeros((8, 8, 1), np.float64), 4, 2)
