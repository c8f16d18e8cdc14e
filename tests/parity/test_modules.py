"""Every part of the model against its counterpart in transformers, on the same random weights."""

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the extra `parity`; `make test-parity` (part of .ci/run) has it", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from knittrans_jax.encoding.patches import patch_coords
from knittrans_jax.models.attention import packed_attention
from knittrans_jax.models.layers import rotate
from knittrans_jax.models.model import decoder_module, encoder_module

from .reference import (
    CONVERSATIONS,
    IMAGE,
    MERGE,
    SMALL,
    TALL,
    WIDE,
    array,
    image_rows,
    ours,
    torch_inputs,
    torch_model,
)

MODEL, PARAMS = ours()
TORCH = torch_model()
VISUAL, LANGUAGE = TORCH.model.visual, TORCH.model.language_model
ENCODER, DECODER = encoder_module(MODEL.encoder, PARAMS["encoder"]), decoder_module(MODEL.decoder, PARAMS["decoder"])
RNG = np.random.default_rng(0)
PATCHES_RxPxD = RNG.normal(size=(1, 40, 32)).astype(np.float32)
HIDDEN_BxTxD = RNG.normal(size=(2, 12, 32)).astype(np.float32)
GRIDS = [(4, 4), (4, 10), (8, 2), (6, 6), (14, 16)]


def assert_close(got: Any, want: torch.Tensor, atol: float = 2e-5) -> None:
    np.testing.assert_allclose(np.asarray(got).reshape(want.shape), array(want), atol=atol, rtol=1e-5)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_position_table_is_resampled_alike(grid: tuple[int, int]):
    indices, weights = get_vision_interpolation_indices_and_weights(
        torch.tensor([[1, *grid]]), num_grid_per_side=6, mode="bilinear", align_corners=True, spatial_merge_size=MERGE
    )
    want = (VISUAL.pos_embed(indices) * weights[:, :, None]).sum(1)
    coords = patch_coords(*grid, MERGE)[None]
    grids = np.broadcast_to(np.asarray(grid, np.int32), coords.shape)
    assert_close(ENCODER._positions(jnp.asarray(coords), jnp.asarray(grids)), want)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_two_dimensional_rope_angles_are_alike(grid: tuple[int, int]):
    cos, sin = VISUAL.rotary_pos_emb(torch.zeros(1), get_vision_position_ids(torch.tensor([[1, *grid]]), MERGE))
    angles = ENCODER._angles(jnp.asarray(patch_coords(*grid, MERGE)[None]))[0]
    assert_close(jnp.tile(jnp.cos(angles), (1, 2)), cos)
    assert_close(jnp.tile(jnp.sin(angles), (1, 2)), sin)


def test_patch_projection_sums_the_frames_of_a_still():
    inputs = torch_inputs(CONVERSATIONS["two pictures of different sizes"])
    patches = image_rows([[WIDE, TALL]])[0][:, :56].astype(np.float32) / 255.0
    got = ENCODER.patch_embed(jnp.asarray((patches - 0.5) / 0.5))
    assert_close(got, VISUAL.patch_embed(inputs["pixel_values"]))


def test_vision_attention_mlp_and_layer():
    coords = patch_coords(4, 10, MERGE)
    angles = ENCODER._angles(jnp.asarray(coords[None]))
    segments = np.ones((1, 40), np.int32)
    hidden = torch.tensor(PATCHES_RxPxD[0])
    position = VISUAL.rotary_pos_emb(hidden, get_vision_position_ids(torch.tensor([[1, 4, 10]]), MERGE))
    seqlens: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 40], dtype=torch.int32), "max_seqlen": 40}
    layers = [stack.layer(index) for stack in ENCODER.stacks for index in range(stack.count)]
    for layer, block in zip(layers, VISUAL.blocks, strict=True):
        assert_close(layer.norm1(jnp.asarray(PATCHES_RxPxD)), block.norm1(hidden))
        assert_close(layer.fc2(jax.nn.gelu(layer.fc1(jnp.asarray(PATCHES_RxPxD)), approximate=True)), block.mlp(hidden))
        want = block(hidden, position_embeddings=position, **seqlens)
        assert_close(layer(jnp.asarray(PATCHES_RxPxD), angles, segments), want)


def test_mergers():
    hidden = torch.tensor(PATCHES_RxPxD[0])
    assert_close(ENCODER.merger(jnp.asarray(PATCHES_RxPxD)), VISUAL.merger(hidden))
    for number, merger in enumerate(VISUAL.deepstack_merger_list):
        assert_close(ENCODER.deepstack_mergers[number](jnp.asarray(PATCHES_RxPxD)), merger(hidden))


def test_encoder_with_its_deepstack_levels():
    inputs = torch_inputs(CONVERSATIONS["several turns"])
    out = VISUAL(inputs["pixel_values"], inputs["image_grid_thw"])
    patches, coords, grids, segments = image_rows([[SMALL, TALL, SMALL]], 48)
    got = ENCODER(jnp.asarray((patches.astype(np.float32) / 255.0 - 0.5) / 0.5), coords, grids, segments)
    assert_close(got[0], torch.cat([out.pooler_output, *out.deepstack_features], dim=-1), atol=1e-4)


def test_text_norm_and_mlp():
    hidden = torch.tensor(HIDDEN_BxTxD)
    layer, reference = DECODER.stacks[1].layer(1), LANGUAGE.layers[3]
    assert_close(layer.attention_norm(jnp.asarray(HIDDEN_BxTxD)), reference.input_layernorm(hidden))
    assert_close(layer.mlp(jnp.asarray(HIDDEN_BxTxD)), reference.mlp(hidden))


def test_interleaved_mrope_and_text_attention():
    hidden = torch.tensor(HIDDEN_BxTxD)
    positions = RNG.integers(0, 30, (2, 3, 12), dtype=np.int32)
    cos, sin = LANGUAGE.rotary_emb(hidden, torch.tensor(positions).permute(1, 0, 2))
    angles = DECODER._angles(jnp.asarray(positions))
    assert_close(jnp.tile(jnp.cos(angles), (1, 1, 2)), cos)
    assert_close(jnp.tile(jnp.sin(angles), (1, 1, 2)), sin)
    mask = torch.full((12, 12), float("-inf")).triu(1)[None, None].expand(2, 1, -1, -1)
    layers = [stack.layer(index) for stack in DECODER.stacks for index in range(stack.count)]
    for layer, reference in zip(layers, LANGUAGE.layers, strict=True):
        want, _ = reference.self_attn(hidden, position_embeddings=(cos, sin), attention_mask=mask)
        q, k, v = layer.attention.qkv(jnp.asarray(HIDDEN_BxTxD), angles)
        got = layer.attention.out(packed_attention(q, k, v, jnp.ones((2, 12), jnp.int32), causal=True))
        assert_close(got, want)


def test_rotation_pairs_features_alike():
    from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb

    q = RNG.normal(size=(1, 5, 2, 16)).astype(np.float32)
    angles = RNG.normal(size=(1, 5, 8)).astype(np.float32)
    full = torch.tensor(np.tile(angles, (1, 1, 2)))
    want, _ = apply_rotary_pos_emb(torch.tensor(q), torch.tensor(q), full.cos(), full.sin(), unsqueeze_dim=2)
    assert_close(rotate(jnp.asarray(q), jnp.asarray(angles)), want)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_mrope_positions(name: str):
    from knittrans_jax.models import mrope_positions

    case = CONVERSATIONS[name]
    inputs = torch_inputs(case)
    types = inputs.get("mm_token_type_ids", torch.zeros_like(inputs["input_ids"]))
    want, delta = TORCH.model.get_rope_index(inputs["input_ids"], types, image_grid_thw=inputs.get("image_grid_thw"))
    got, following = mrope_positions(case.tokens, case.grids, IMAGE, MERGE)
    np.testing.assert_array_equal(got, want[:, 0].numpy())
    assert following == len(case.tokens) + int(delta[0, 0])
