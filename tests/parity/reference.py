"""What the parity tests share: a tiny Qwen3-VL of transformers with random weights, ours loaded from its files, and
conversations as both take them."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from knittrans_jax.encoding.patches import grid_of, patch_coords, patchify
from knittrans_jax.models import (
    Params,
    abstract_model,
    decoder_apply,
    encoder_apply,
    mrope_positions,
    normalise_pixels,
    parameter_count,
)
from knittrans_jax.models.hf_config import read_config
from knittrans_jax.models.hf_load import load_params
from knittrans_jax.models.sharding import on_device

torch.set_num_threads(1)
IMAGE = 60
PATCH, MERGE, CHANNELS = 4, 2, 3
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,  # stacks of two (unrolled) and three (scanned)
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 40,
    "in_channels": CHANNELS,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
}


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """As after training: norms away from 1, biases away from 0, weights that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
            spread = 0.1 if parameter.ndim == 1 else float(np.prod(parameter.shape[1:])) ** -0.5
            if "embed" in name and parameter.ndim == 2:
                spread = 0.5
            parameter.copy_(mean + spread * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@functools.cache
def torch_model() -> Any:
    config = Qwen3VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=IMAGE,
        video_token_id=61,
        vision_start_token_id=58,
        vision_end_token_id=59,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    return randomise(Qwen3VLForConditionalGeneration(config).float())


def load(model: Any, param_dtype: Any = np.float32, **compute: Any) -> tuple[Any, Params]:
    """Through the files that transformers writes, in several pieces."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory, max_shard_size="60KB")
        config = read_config(Path(directory))
        params = load_params(Path(directory), config, on_device(jax.devices()[0]), param_dtype)
    assert parameter_count(params) >= sum(p.numel() for p in model.parameters()) * 0.9  # the frames' weights are one
    return abstract_model(config, param_dtype=param_dtype, **compute)[0], params


@functools.cache
def ours() -> tuple[Any, Params]:
    return load(torch_model())


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Token ids with expanded placeholders, and its pictures in order."""

    tokens: list[int]
    pictures: list[np.ndarray]

    @property
    def grids(self) -> list[tuple[int, int]]:
        return [grid_of(picture.shape, PATCH, MERGE) for picture in self.pictures]


def picture(seed: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, CHANNELS), dtype=np.uint8)


def conversation(seed: int, *parts: int | np.ndarray) -> Conversation:
    """A number is that many text tokens, a picture is itself between its marks."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    for part in parts:
        if isinstance(part, int):
            tokens += rng.integers(0, 50, part).tolist()
        else:
            rows, columns = grid_of(part.shape, PATCH, MERGE)
            tokens += [58, *[IMAGE] * (rows * columns // MERGE**2), 59]
    return Conversation(tokens, [part for part in parts if not isinstance(part, int)])


SMALL, WIDE, TALL = picture(1, 16, 16), picture(2, 16, 40), picture(3, 32, 8)
CONVERSATIONS = {
    "one picture": conversation(0, 3, SMALL, 5),
    "two pictures of different sizes": conversation(1, 2, WIDE, 3, TALL, 4),
    "text only": conversation(2, 12),
    "several turns": conversation(3, 4, SMALL, 6, 3, TALL, 5, SMALL, 7),
}
SHOWN = [SMALL, WIDE, TALL]
TOKENS, PATCHES = 48, 56
"""Lengths of packed rows: one compiled program serves every case."""


def processor() -> Any:
    return Qwen2VLImageProcessorPil(
        do_resize=False,
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def torch_inputs(case: Conversation) -> dict[str, Any]:
    """A batch of one."""
    ids = torch.tensor([case.tokens])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if case.pictures:
        inputs |= dict(processor()(case.pictures, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    return inputs


def image_rows(rows: list[list[np.ndarray]], length: int = PATCHES) -> tuple[np.ndarray, ...]:
    """Pictures packed into rows: uint8 patches, coordinates, grids, segment ids."""
    shape = (len(rows), length)
    patches = np.zeros((*shape, PATCH * PATCH * CHANNELS), np.uint8)
    coords, grids, segments = (
        np.zeros((*shape, 2), np.int32),
        np.zeros((*shape, 2), np.int32),
        np.zeros(shape, np.int32),
    )
    for row, pictures in enumerate(rows):
        at = 0
        for number, one in enumerate(pictures, start=1):
            grid = grid_of(one.shape, PATCH, MERGE)
            span = slice(at, at + grid[0] * grid[1])
            patches[row, span] = patchify(one, PATCH, MERGE)
            coords[row, span], grids[row, span], segments[row, span] = patch_coords(*grid, MERGE), grid, number
            at = span.stop
    return patches, coords, grids, segments


def table_rows(pictures: list[np.ndarray]) -> dict[bytes, range]:
    """Rows of the encoder's table for `image_rows([pictures])`, by picture."""
    found, at = {}, 0
    for one in pictures:
        rows, columns = grid_of(one.shape, PATCH, MERGE)
        found[one.tobytes()] = range(at, at + rows * columns // MERGE**2)
        at += rows * columns // MERGE**2
    return found


def token_rows(rows: list[list[Conversation]], length: int = TOKENS) -> dict[str, np.ndarray]:
    """Conversations packed into rows, with the row of the table of `SHOWN` behind every placeholder."""
    shape = (len(rows), length)
    found = {name: np.zeros(shape, np.int32) for name in ("tokens", "segments")}
    found |= {"positions": np.zeros((len(rows), 3, length), np.int32), "index": np.full(shape, -1, np.int32)}
    table = table_rows(SHOWN)
    for row, cases in enumerate(rows):
        at = 0
        for number, case in enumerate(cases, start=1):
            span = slice(at, at + len(case.tokens))
            tokens = np.asarray(case.tokens, np.int32)
            found["tokens"][row, span], found["segments"][row, span] = tokens, number
            found["positions"][row, :, span] = mrope_positions(tokens, case.grids, IMAGE, MERGE)[0]
            index = [r for one in case.pictures for r in table[one.tobytes()]]
            found["index"][row, span][tokens == IMAGE] = index
            at = span.stop
    return found


def encode(model: Any, params: Any, images: tuple[np.ndarray, ...]) -> jax.Array:
    """The table [rows, tokens, E]."""
    pixels = normalise_pixels(jax.numpy.asarray(images[0]), model.config.vision)
    return encoder_apply(model.encoder, params["encoder"], pixels, *images[1:])


def logits(model: Any, params: Any, batch: dict[str, Any], table: jax.Array) -> jax.Array:
    """[rows, tokens, V], with pictures from the table [N, E]."""
    visual = jax.numpy.where(batch["index"][..., None] >= 0, table[batch["index"]], 0.0)
    return logits_with(model, params, batch, visual)


def logits_with(model: Any, params: Any, batch: dict[str, Any], visual: jax.Array | None) -> jax.Array:
    mask = None if visual is None else batch["index"] >= 0
    hidden = decoder_apply(
        model.decoder, params["decoder"], "hidden", batch["tokens"], batch["positions"], batch["segments"], visual, mask
    )
    return decoder_apply(model.decoder, params["decoder"], "logits", hidden)


def array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy()
