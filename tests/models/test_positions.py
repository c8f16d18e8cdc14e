import numpy as np
import pytest

from knittrans_jax.models import mrope_positions

IMAGE = 9


def test_text_counts_up_in_all_components():
    positions, following = mrope_positions([1, 2, 3], [], IMAGE, 2, start=5)
    assert positions.dtype == np.int32
    np.testing.assert_array_equal(positions, np.tile([5, 6, 7], (3, 1)))
    assert following == 8


def test_image_tokens_take_rows_and_columns_and_text_goes_on_behind_the_longer_side():
    tokens = [1, *[IMAGE] * 6, 2]
    positions, following = mrope_positions(tokens, [(4, 6)], IMAGE, 2)
    np.testing.assert_array_equal(positions[0], [0, 1, 1, 1, 1, 1, 1, 4])
    np.testing.assert_array_equal(positions[1], [0, 1, 1, 1, 2, 2, 2, 4])
    np.testing.assert_array_equal(positions[2], [0, 1, 2, 3, 1, 2, 3, 4])
    assert following == 5


def test_turn_by_turn_equals_one_shot():
    turns = [([1, 2, *[IMAGE] * 4, 3], [(4, 4)]), ([4, 5], []), ([IMAGE, IMAGE, IMAGE, 6], [(2, 2), (2, 4)])]
    every_token = [token for tokens, _ in turns for token in tokens]
    every_grid = [grid for _, grids in turns for grid in grids]
    whole, end = mrope_positions(every_token, every_grid, IMAGE, 2)
    start, parts = 0, []
    for tokens, grids in turns:
        part, start = mrope_positions(tokens, grids, IMAGE, 2, start=start)
        parts.append(part)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    assert start == end


@pytest.mark.parametrize(
    ("tokens", "grids", "message"),
    [
        ([1, IMAGE, IMAGE, 2], [(4, 4)], "image 0: a run of 2 placeholders at token 1; expected 4"),
        ([1, IMAGE, IMAGE], [(4, 4)], "image 0: a run of 2 placeholders at token 1; expected 4"),
        ([1, 2], [(2, 2)], "image 0: no placeholders left"),
        ([IMAGE, 1, IMAGE, IMAGE], [(2, 2)], "2 placeholders from token 2 on belong to no image"),
        ([IMAGE], [(2, 3)], "image 0: a grid of 2 x 3 patches"),
    ],
)
def test_mismatched_placeholders_are_named(tokens: list[int], grids: list[tuple[int, int]], message: str):
    with pytest.raises(ValueError, match=message):
        mrope_positions(tokens, grids, IMAGE, 2)
