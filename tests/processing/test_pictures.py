import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knittrans_jax.models import PRESETS
from knittrans_jax.models.hf_config import CheckpointError
from knittrans_jax.processing.pictures import PictureProcessor, smart_resize

SETTINGS: dict[str, Any] = {
    "patch_size": 16,
    "merge_size": 2,
    "size": {"shortest_edge": 65_536, "longest_edge": 1_048_576},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_sizes_are_whole_image_tokens_within_bounds_and_keep_their_shape(height: int, width: int):
    factor, least, most = 32, 65_536, 1_048_576
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ValueError, match=f"{height} x {width}"):
            smart_resize(height, width, factor, least, most)
        return
    rows, columns = smart_resize(height, width, factor, least, most)
    assert rows % factor == columns % factor == 0
    assert factor <= min(rows, columns)
    assert rows * columns >= least
    # One whole image token per side is the least, however flat the picture is.
    assert rows * columns <= most or min(rows, columns) == factor
    if least * 2 < height * width < most / 2 and min(height, width) > 4 * factor:
        assert abs(rows - height) <= factor / 2
        assert abs(columns - width) <= factor / 2


def test_a_picture_that_fits_is_left_alone_and_others_are_resized(tmp_path: Path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    processor = PictureProcessor.from_directory(tmp_path)
    vision = PRESETS["qwen3-vl-2b"].vision
    assert vision is not None
    processor.check(vision)
    fits = np.random.default_rng(0).integers(0, 256, (256, 320, 3), dtype=np.uint8)
    np.testing.assert_array_equal(processor.resize(fits), fits)
    resized = processor.resize(fits[:250, :300])
    assert resized.shape == (256, 288, 3)
    assert resized.flags.c_contiguous
    assert processor.grid(resized) == (16, 18)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": None}, "patch_size = None"),
        ({"size": {}}, "min_pixels = None"),
        ({"resample": 2}, "resample = 2 is not supported"),
        ({"image_mean": [0.4, 0.5, 0.5]}, "image_mean"),
    ],
)
def test_settings_that_are_not_done_here_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS | changes))
    with pytest.raises(CheckpointError, match=message):
        PictureProcessor.from_directory(tmp_path)


def test_a_processor_of_another_model_is_refused():
    vision = PRESETS["tiny"].vision
    assert vision is not None
    with pytest.raises(CheckpointError, match="patch_size = 16, the model has 4"):
        PictureProcessor(patch_size=16, merge_size=2, min_pixels=1, max_pixels=2).check(vision)
