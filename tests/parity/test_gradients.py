"""Gradients of every parameter against torch: naively, and with every picture encoded once for the whole mini-batch."""

import functools
import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the extra `parity`; `make test-parity` (part of .ci/run) has it", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from knittrans_jax.encoding.encode_once import add_cotangent, encode_once
from knittrans_jax.models.hf_names import FRAMES, sources

from .reference import (
    CONVERSATIONS,
    SHOWN,
    array,
    conversation,
    encode,
    image_rows,
    logits_with,
    ours,
    table_rows,
    token_rows,
    torch_inputs,
    torch_model,
)

MODEL, PARAMS = ours()
CASES = list(CONVERSATIONS.values())
BATCH = token_rows([[case] for case in CASES])
WEIGHTS = np.random.default_rng(5).normal(size=(*BATCH["tokens"].shape, 64)).astype(np.float32)
WEIGHTS[BATCH["segments"] == 0] = 0.0
IMAGES = image_rows([[one] for one in SHOWN], 40)
ROWS = 10
"""Image tokens of an encoder row."""
TOKENS_OF = [len(rows) for rows in table_rows(SHOWN).values()]


def spread_index() -> np.ndarray:
    """`BATCH["index"]` points into pictures packed one behind the other; here each has an encoder row of its own."""
    index = BATCH["index"].copy()
    begin = 0
    for number, count in enumerate(TOKENS_OF):
        inside = (BATCH["index"] >= begin) & (BATCH["index"] < begin + count)
        index[inside] += number * ROWS - begin
        begin += count
    return index


INDEX = spread_index()


def torch_gradients(encoder_once: bool) -> dict[str, np.ndarray]:
    """Of sum(weights * logits) over all conversations."""
    model = torch_model()
    model.zero_grad()
    tables: dict[bytes, Any] = {}
    if encoder_once:
        everything = torch_inputs(conversation(9, *SHOWN))
        out = model.model.get_image_features(everything["pixel_values"], everything["image_grid_thw"], return_dict=True)
        for number, one in enumerate(SHOWN):
            tables[one.tobytes()] = (out.pooler_output[number], [level[number] for level in out.deepstack_features])
    leaves = {key: (main.detach().requires_grad_(), [level.detach().requires_grad_() for level in levels])
              for key, (main, levels) in tables.items()}  # fmt: skip
    for row, case in enumerate(CASES):
        inputs = torch_inputs(case)
        if encoder_once and case.pictures:
            del inputs["pixel_values"]
            mine = [leaves[one.tobytes()] for one in case.pictures]
            inputs["mm_encoder_outputs"] = {
                "image": BaseModelOutputWithDeepstackFeatures(
                    pooler_output=tuple(main for main, _ in mine),
                    deepstack_features=[tuple(levels[at] for _, levels in mine) for at in range(2)],
                )
            }
        values = model(**inputs).logits[0]
        (values * torch.tensor(WEIGHTS[row, : len(values)])).sum().backward()
    roots, cotangents = [], []
    for key, (main, levels) in tables.items():
        for root, leaf in zip([main, *levels], [leaves[key][0], *leaves[key][1]], strict=True):
            roots.append(root)
            cotangents.append(leaf.grad)
    if roots:
        torch.autograd.backward(roots, cotangents)
    return {name: array(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_agree(got: Any, want: dict[str, np.ndarray]) -> None:
    """Per tensor, relative to its largest value; every tensor of the checkpoint is compared."""
    table = sources(MODEL.config, PARAMS)
    compared = set()
    for source, leaf in zip(table.values(), jax.tree.leaves(got), strict=True):
        for layer, name in enumerate(source.tensors):
            mine = np.asarray(leaf[layer] if source.stacked else leaf)
            theirs = want[name]
            if source.layout == "patches":
                # Both frames see the same picture: each one's gradient is that of their sum.
                np.testing.assert_allclose(theirs[:, :, 0], theirs[:, :, 1], rtol=1e-4, atol=1e-5)
                theirs = source.from_tensor(theirs, MODEL.config.vision) / FRAMES
            elif source.layout == "transposed":
                theirs = theirs.T
            scale = np.abs(theirs).max()
            assert scale > 0, name
            np.testing.assert_allclose(mine, theirs, atol=2e-4 * scale, err_msg=name)
            compared.add(name)
    assert compared == set(want)


@functools.cache
def naive() -> Any:
    """Every use of a picture encodes its own copy."""
    copies = image_rows([case.pictures for case in CASES], 56)

    def loss(params: Any) -> jax.Array:
        table = encode(MODEL, params, copies)
        flat = table.reshape(-1, table.shape[-1])
        index = np.full(BATCH["tokens"].shape, -1, np.int32)
        for row in range(len(CASES)):
            places = np.flatnonzero(BATCH["index"][row] >= 0)
            index[row, places] = row * table.shape[1] + np.arange(len(places))
        visual = jnp.where(jnp.asarray(index)[..., None] >= 0, flat[index], 0.0)
        return jnp.sum(WEIGHTS * logits_with(MODEL, params, BATCH, visual))

    return jax.jit(jax.grad(loss))(PARAMS)


@functools.cache
def once() -> Any:
    """Every picture is encoded once; the cotangents of all its uses go back together."""

    def gradients(params: Any) -> Any:
        table, pull_back = encode_once(
            lambda encoder, images: encode(MODEL, {"encoder": encoder}, images), params["encoder"], IMAGES, chunk_rows=1
        )
        visual = jnp.where(jnp.asarray(INDEX)[..., None] >= 0, table[INDEX], 0.0)

        def loss(decoder: Any, visual: jax.Array) -> jax.Array:
            return jnp.sum(WEIGHTS * logits_with(MODEL, {"decoder": decoder}, BATCH, visual))

        decoder, cotangent = jax.grad(loss, (0, 1))(params["decoder"], visual)
        total = add_cotangent(jnp.zeros(table.shape, jnp.float32), jnp.asarray(INDEX), cotangent)
        return {"decoder": decoder, "encoder": pull_back(total)}

    return jax.jit(gradients)(PARAMS)


def test_naive_gradients_of_all_parameters():
    assert_gradients_agree(naive(), torch_gradients(encoder_once=False))


def test_gradients_with_every_picture_encoded_once():
    assert_gradients_agree(once(), torch_gradients(encoder_once=True))


def test_encoding_once_equals_naive_transformers():
    assert_gradients_agree(once(), torch_gradients(encoder_once=False))
