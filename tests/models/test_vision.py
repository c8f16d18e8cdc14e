from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from knittrans_jax.encoding.patches import grid_of, patch_coords, patchify
from knittrans_jax.models import Params, VisionEncoder, abstract_model, encoder_apply, normalise_pixels, preset

CONFIG = preset("tiny", 48)
assert CONFIG.vision is not None
VISION = CONFIG.vision


def random_params(shapes: Params) -> Params:
    """Like a trained model's, with norms away from 1 and biases away from 0; quicker than drawing them in JAX."""
    rng = np.random.default_rng(0)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        spread = 0.1 if path[-1].key in ("scale", "bias") else leaf.shape[-2] ** -0.5
        return jnp.asarray(rng.normal(float(path[-1].key == "scale"), spread, leaf.shape), leaf.dtype)

    return jax.tree.map_with_path(draw, shapes)


MODEL, SHAPES = abstract_model(CONFIG)
assert MODEL.encoder is not None
ENCODER, PARAMS = MODEL.encoder, random_params(SHAPES)


def picture(seed: int, height: int, width: int):
    return np.random.default_rng(seed).integers(0, 256, (height, width, VISION.channels), dtype=np.uint8)


def pack(rows: list[list[np.ndarray]], length: int):
    """Lists of pictures -> the encoder's arrays, with the rest of every row garbage under segment id 0."""
    rng = np.random.default_rng(99)
    patches = rng.integers(0, 256, (len(rows), length, VISION.patch_features), dtype=np.uint8)
    coords = rng.integers(0, 5, (len(rows), length, 2), dtype=np.int32)
    grids = rng.integers(0, 5, (len(rows), length, 2), dtype=np.int32)
    segments = np.zeros((len(rows), length), np.int32)
    for row, pictures in enumerate(rows):
        at = 0
        for number, image in enumerate(pictures, start=1):
            grid = grid_of(image.shape, VISION.patch_size, VISION.merge_size)
            span = slice(at, at + grid[0] * grid[1])
            patches[row, span] = patchify(image, VISION.patch_size, VISION.merge_size)
            coords[row, span] = patch_coords(*grid, VISION.merge_size)
            grids[row, span] = grid
            segments[row, span] = number
            at = span.stop
    return jnp.asarray(patches), jnp.asarray(coords), jnp.asarray(grids), jnp.asarray(segments)


@jax.jit
def encode(
    patches: jax.Array, coords: jax.Array, grids: jax.Array, segments: jax.Array, params: Params = PARAMS["encoder"]
):
    return encoder_apply(ENCODER, params, normalise_pixels(patches, VISION), coords, grids, segments)


@pytest.mark.newest
def test_pictures_packed_into_a_row_equal_them_alone_and_padding_is_zero():
    first, second = picture(1, 8, 8), picture(2, 16, 24)
    packed = encode(*pack([[first, second]], 40))
    assert packed.dtype == jnp.float32
    assert packed.shape == (1, 10, CONFIG.visual_features)
    np.testing.assert_allclose(packed[0, :1], encode(*pack([[first]], 4))[0], atol=1e-5)
    np.testing.assert_allclose(packed[0, 1:7], encode(*pack([[second]], 24))[0], atol=1e-5)
    np.testing.assert_array_equal(packed[0, 7:], 0.0)


def test_place_within_the_picture_matters():
    image = picture(1, 16, 16)
    patches, coords, grids, segments = pack([[image]], 16)
    assert (
        jnp.abs(encode(patches, coords, grids, segments) - encode(patches, coords[:, ::-1], grids, segments)).max()
        > 1e-3
    )


def test_position_table_is_sampled_bilinearly_with_aligned_corners():
    encoder = nnx.eval_shape(lambda: VisionEncoder(VISION, 64, rngs=nnx.Rngs(0)))
    encoder.position_table = nnx.Param(PARAMS["encoder"]["position_table"])
    side = VISION.position_grid
    table = np.asarray(PARAMS["encoder"]["position_table"]).reshape(side, side, -1)
    for rows, columns in ((2, 2), (4, 10), (side, side), (12, 2)):
        coords = patch_coords(rows, columns, 2)
        grids = np.broadcast_to(np.array([rows, columns], np.int32), coords.shape)
        ours = encoder._positions(jnp.asarray(coords)[None], jnp.asarray(grids)[None])[0]
        ys, xs = np.linspace(0, side - 1, rows)[coords[:, 0]], np.linspace(0, side - 1, columns)[coords[:, 1]]
        y0, x0 = np.floor(ys + 1e-9).astype(int), np.floor(xs + 1e-9).astype(int)
        y1, x1 = np.minimum(y0 + 1, side - 1), np.minimum(x0 + 1, side - 1)
        fy, fx = (ys - y0)[:, None], (xs - x0)[:, None]
        top = table[y0, x0] * (1 - fx) + table[y0, x1] * fx
        bottom = table[y1, x0] * (1 - fx) + table[y1, x1] * fx
        np.testing.assert_allclose(ours, top * (1 - fy) + bottom * fy, atol=1e-6)


def test_deepstack_levels_follow_the_main_features():
    assert CONFIG.visual_features == 2 * CONFIG.text.d_model
    table = encode(*pack([[picture(1, 8, 8)]], 4))[0, 0]
    main, deep = jnp.split(table, 2)
    assert jnp.abs(main).max() > 0.01
    assert jnp.abs(deep).max() > 0.01
    assert jnp.abs(main - deep).max() > 0.01


def test_pixels_are_normalised_to_plus_minus_one():
    np.testing.assert_allclose(normalise_pixels(jnp.array([0, 255], jnp.uint8), VISION), [-1.0, 1.0])


def test_gradients_are_finite_and_reach_every_parameter():
    inputs = pack([[picture(1, 8, 8), picture(2, 16, 8)], []], 16)
    grads = jax.grad(lambda params: jnp.sum(jnp.sin(encode(*inputs, params=params))))(PARAMS["encoder"])
    for path, leaf in jax.tree.leaves_with_path(grads):
        assert jnp.isfinite(leaf).all(), path
        assert jnp.abs(leaf).max() > 0, path


def test_wrong_patch_size_is_named():
    with pytest.raises(ValueError, match="patches of shape"):
        encode(
            jnp.zeros((1, 4, 7), jnp.uint8),
            jnp.zeros((1, 4, 2), jnp.int32),
            jnp.ones((1, 4, 2), jnp.int32),
            jnp.ones((1, 4), jnp.int32),
        )
