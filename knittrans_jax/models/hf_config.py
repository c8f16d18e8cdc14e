"""`config.json` of a Hugging Face checkpoint to a `ModelConfig` and back: Qwen3 (`qwen3`) and Qwen3-VL (`qwen3_vl`).

Both spellings of rotary settings are read (`rope_theta` with `rope_scaling`, and `rope_parameters`). Whatever this package does
not compute (biases, sliding windows, scaled rotary positions, other activations, experts) is refused by key and value: a
model that is read computes what its file says.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from knittrans_jax.models.config import ModelConfig, TextConfig, VisionConfig

QWEN_TOKEN_IDS = {
    "image_token_id": 151_655,
    "video_token_id": 151_656,
    "vision_start_token_id": 151_652,
    "vision_end_token_id": 151_653,
}
"""Ids in the published vocabulary."""


class CheckpointError(ValueError):
    """A checkpoint folder that cannot be read as, or written from, this model: names the file, the key or the tensor."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      CheckpointError: no such file, no JSON, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_config(directory: Path) -> ModelConfig:
    """The architecture of the checkpoint in `directory`.

    Raises:
      CheckpointError: no config.json, another kind of model, a key that is missing, or a setting that is not computed here.
    """
    return config_from_json(read_json(Path(directory) / "config.json"), str(Path(directory) / "config.json"))


def config_from_json(raw: dict[str, Any], where: str) -> ModelConfig:
    """See `read_config`; `where` names the file in errors."""
    kind = raw.get("model_type")
    try:
        if kind == "qwen3":
            return ModelConfig(text=_text(_Reader(raw, where), tied=raw.get("tie_word_embeddings", False)))
        if kind == "qwen3_vl":
            text = _Reader(raw, where).sub("text_config")
            # The outer value decides, as it does for those who serve the checkpoint.
            tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
            vision = _vision(_Reader(raw, where).sub("vision_config"), text.need("hidden_size"))
            return ModelConfig(text=_text(text, tied=tied), vision=vision)
    except ValueError as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{where}: {error}") from error
    raise CheckpointError(f"{where}: model_type = {kind!r}; expected qwen3 or qwen3_vl")


def config_to_json(config: ModelConfig, token_ids: dict[str, int] | None = None) -> dict[str, Any]:
    """A `config.json` for a model that did not come from a checkpoint; `token_ids` has the keys of `QWEN_TOKEN_IDS`.

    Raises:
      CheckpointError: what the format cannot say (pixel statistics belong to `preprocessor_config.json`).
    """
    text = config.text
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": text.rope_theta}
    if config.vision is not None:
        rope |= {"mrope_section": list(text.mrope_section), "mrope_interleaved": True}
    decoder: dict[str, Any] = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.d_model,
        "num_hidden_layers": text.layers,
        "num_attention_heads": text.heads,
        "num_key_value_heads": text.kv_heads,
        "head_dim": text.head_dim,
        "intermediate_size": text.mlp_dim,
        "hidden_act": "silu",
        "rms_norm_eps": text.norm_eps,
        "attention_bias": False,
        "max_position_embeddings": 262_144 if config.vision is not None else 40_960,
        "rope_theta": text.rope_theta,
        "rope_parameters": rope,
    }
    if config.vision is None:
        return decoder | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "tie_word_embeddings": text.tie_embeddings,
        }
    vision = config.vision
    if vision.norm_eps != 1e-6 or vision.rope_theta != 10_000.0:
        raise CheckpointError(
            f"vision.norm_eps = {vision.norm_eps}, vision.rope_theta = {vision.rope_theta}: Qwen3-VL's format has them "
            "fixed at 1e-6 and 10000"
        )
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": text.tie_embeddings,
        **(token_ids or QWEN_TOKEN_IDS),
        "text_config": decoder | {"model_type": "qwen3_vl_text", "tie_word_embeddings": text.tie_embeddings},
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "depth": vision.layers,
            "hidden_size": vision.d_model,
            "num_heads": vision.heads,
            "intermediate_size": vision.mlp_dim,
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": vision.channels,
            "patch_size": vision.patch_size,
            "spatial_merge_size": vision.merge_size,
            "temporal_patch_size": 2,
            "out_hidden_size": text.d_model,
            "num_position_embeddings": vision.position_grid**2,
            "deepstack_visual_indexes": list(vision.deepstack_layers),
        },
    }


class _Reader:
    """Keys of one JSON object, with errors that name file and key."""

    def __init__(self, raw: dict[str, Any], where: str, prefix: str = "") -> None:
        self._raw, self._where, self._prefix = raw, where, prefix

    def get(self, key: str, default: Any) -> Any:
        value = self._raw.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        if self._raw.get(key) is None:
            raise CheckpointError(f"{self._where}: {self._prefix}{key} is missing")
        return self._raw[key]

    def sub(self, key: str) -> _Reader:
        value = self.need(key)
        if not isinstance(value, dict):
            raise CheckpointError(f"{self._where}: {self._prefix}{key} = {value!r}; expected an object")
        return _Reader(value, self._where, f"{self._prefix}{key}.")

    def expect(self, key: str, *values: Any) -> None:
        """The key is absent, null, or one of `values`."""
        value = self._raw.get(key)
        if value is not None and value not in values:
            raise CheckpointError(
                f"{self._where}: {self._prefix}{key} = {value!r} is not supported; expected {values[0]!r}"
            )


def _text(reader: _Reader, tied: bool) -> TextConfig:
    reader.expect("hidden_act", "silu")
    reader.expect("attention_bias", False)
    reader.expect("use_sliding_window", False)
    reader.expect("num_experts", 0)
    heads, d_model = reader.need("num_attention_heads"), reader.need("hidden_size")
    head_dim = reader.get("head_dim", d_model // heads)
    rope = {**reader.get("rope_scaling", {}), **reader.get("rope_parameters", {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope") or rope.get("mrope_interleaved", True) is not True:
        raise CheckpointError(f"rope_parameters = {rope!r} are not supported; expected default or interleaved M-RoPE")
    theta = rope.get("rope_theta", reader.get("rope_theta", None))
    if theta is None:
        raise CheckpointError("rope_theta is missing")
    return TextConfig(
        vocab_size=reader.need("vocab_size"),
        d_model=d_model,
        layers=reader.need("num_hidden_layers"),
        heads=heads,
        kv_heads=reader.get("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp_dim=reader.need("intermediate_size"),
        rope_theta=float(theta),
        mrope_section=tuple(rope.get("mrope_section", (head_dim // 2, 0, 0))),
        norm_eps=float(reader.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(tied),
    )


def _vision(reader: _Reader, out_features: int) -> VisionConfig:
    reader.expect("hidden_act", "gelu_pytorch_tanh")
    reader.expect("temporal_patch_size", 2)
    reader.expect("out_hidden_size", out_features)
    positions = reader.need("num_position_embeddings")
    if math.isqrt(positions) ** 2 != positions:
        raise CheckpointError(f"vision_config.num_position_embeddings = {positions}; expected a square number")
    return VisionConfig(
        layers=reader.need("depth"),
        d_model=reader.need("hidden_size"),
        heads=reader.need("num_heads"),
        mlp_dim=reader.need("intermediate_size"),
        patch_size=reader.need("patch_size"),
        merge_size=reader.get("spatial_merge_size", 2),
        channels=reader.get("in_channels", 3),
        position_grid=math.isqrt(positions),
        deepstack_layers=tuple(reader.get("deepstack_visual_indexes", ())),
    )
