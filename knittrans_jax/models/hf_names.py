"""Which Hugging Face tensor holds which parameter of ours, and how the two are laid out.

One table serves loading and saving, so that they cannot disagree. Differences of layout:

* a parameter of a stack is one array [layers, ...]; the checkpoint has one tensor per layer;
* kernels are [in, out] here and [out, in] there;
* the patch projection is a convolution over (channel, frame, row, column) there and a matrix over (row, column, channel)
  here: a still is its own second frame, so the two frames' weights add up.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import numpy as np

from knittrans_jax.models.config import ModelConfig, VisionConfig, decoder_stack_layers

FRAMES = 2
"""Frames of a patch in the checkpoint."""

_DECODER_LAYER = {
    "attention_norm.scale": "input_layernorm.weight",
    "attention.q.kernel": "self_attn.q_proj.weight",
    "attention.k.kernel": "self_attn.k_proj.weight",
    "attention.v.kernel": "self_attn.v_proj.weight",
    "attention.o.kernel": "self_attn.o_proj.weight",
    "attention.q_norm.scale": "self_attn.q_norm.weight",
    "attention.k_norm.scale": "self_attn.k_norm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "mlp.gate.kernel": "mlp.gate_proj.weight",
    "mlp.up.kernel": "mlp.up_proj.weight",
    "mlp.down.kernel": "mlp.down_proj.weight",
}
_ENCODER_MODULES = {
    "norm1": "norm1",
    "norm2": "norm2",
    "qkv": "attn.qkv",
    "proj": "attn.proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
_MERGER_MODULES = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_LEAVES = {"kernel": "weight", "scale": "weight", "bias": "bias"}

Layout = Literal["same", "transposed", "patches"]


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a parameter lies in a checkpoint: one tensor, or one for each layer of a stack."""

    parameter: str
    """Dotted name."""
    shape: tuple[int, ...]
    """Of the parameter, with the leading axis of layers where it is stacked."""
    tensors: tuple[str, ...]
    tensor_shape: tuple[int, ...]
    stacked: bool
    layout: Layout

    def from_tensor(self, tensor: np.ndarray, vision: VisionConfig | None) -> np.ndarray:
        """One whole tensor in our layout, [...] without the axis of layers; patches in float32."""
        if self.layout == "transposed":
            return tensor.T
        if self.layout == "patches":
            assert vision is not None
            summed_DxCxHxW = tensor.astype(np.float32).sum(axis=2)
            return summed_DxCxHxW.transpose(2, 3, 1, 0).reshape(vision.patch_features, vision.d_model)
        return tensor

    def to_tensor(self, value: np.ndarray, vision: VisionConfig | None) -> np.ndarray:
        """The other way; the frames of a patch get half the weight each."""
        if self.layout == "transposed":
            return value.T
        if self.layout == "patches":
            assert vision is not None
            size = vision.patch_size
            kernel_DxCxHxW = value.reshape(size, size, vision.channels, vision.d_model).transpose(3, 2, 0, 1)
            return np.stack([kernel_DxCxHxW.astype(np.float32) / FRAMES] * FRAMES, axis=2)
        return value


def sources(config: ModelConfig, params: Any) -> dict[str, Source]:
    """The source of every parameter by dotted name, in the order of the tree; `params` may be abstract."""
    found = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found[name] = _source(name, tuple(leaf.shape), config)
    return found


def _source(name: str, shape: tuple[int, ...], config: ModelConfig) -> Source:
    part, *rest = name.split(".")
    prefix = "model." if config.vision is None else "model.language_model."
    stacked = rest[0] == "stacks"
    one = shape[1:] if stacked else shape
    layout: Layout = "transposed" if rest[-1] == "kernel" else "same"
    if stacked:
        stack, inner = int(rest[1]), rest[3:]  # stacks.0.layers.attention.q.kernel
        if part == "decoder":
            counts, folder, tail = (
                decoder_stack_layers(config.text.layers, config.deepstack),
                f"{prefix}layers",
                _DECODER_LAYER[".".join(inner)],
            )
        else:
            assert config.vision is not None
            counts, folder = config.vision.stack_layers, "model.visual.blocks"
            tail = f"{_ENCODER_MODULES[inner[0]]}.{_LEAVES[inner[1]]}"
        first = sum(counts[:stack])
        tensors = tuple(f"{folder}.{layer}.{tail}" for layer in range(first, first + counts[stack]))
    elif part == "decoder":
        names = {"embedding": f"{prefix}embed_tokens.weight", "head": "lm_head.weight", "norm": f"{prefix}norm.weight"}
        tensors = (names[rest[0]],)
    elif rest[0] == "position_table":
        tensors = ("model.visual.pos_embed.weight",)
    elif rest[0] == "patch_embed":
        tensors = (f"model.visual.patch_embed.proj.{_LEAVES[rest[1]]}",)
        layout = "patches" if rest[1] == "kernel" else "same"
    elif rest[0] == "merger":
        tensors = (f"model.visual.merger.{_MERGER_MODULES[rest[1]]}.{_LEAVES[rest[2]]}",)
    else:  # deepstack_mergers.0.fc1.kernel
        tensors = (f"model.visual.deepstack_merger_list.{rest[1]}.{_MERGER_MODULES[rest[2]]}.{_LEAVES[rest[3]]}",)
    if layout == "patches":
        assert config.vision is not None
        size = config.vision.patch_size
        tensor_shape = (config.vision.d_model, config.vision.channels, FRAMES, size, size)
    else:
        tensor_shape = one[::-1] if layout == "transposed" else one
    return Source(name, shape, tensors, tensor_shape, stacked, layout)
