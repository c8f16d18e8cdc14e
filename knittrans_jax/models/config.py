"""Frozen, checked records that fix a model's architecture, and the named presets.

The architecture is that of Qwen3 (text) and Qwen3-VL (text with a vision encoder). A record that exists is consistent:
every impossible combination is refused when the record is built, naming the key and the value.
"""

import collections.abc
import itertools

import msgspec


def _refuse(key: str, value: object, expected: str) -> ValueError:
    return ValueError(f"model configuration: {key} = {value!r}; expected {expected}")


def mrope_components(head_dim: int, section: tuple[int, int, int]) -> tuple[int, ...]:
    """For each of the head_dim // 2 rotary frequencies, the position component (0 time, 1 row, 2 column) that drives it.

    Interleaved as in Qwen3-VL: T H W T H W ..., until the rows' and columns' shares are used up, then T.
    """
    return tuple(
        axis if axis > 0 and index < 3 * section[axis] else 0 for index in range(head_dim // 2) for axis in (index % 3,)
    )


def decoder_stack_layers(layers: int, deepstack: int) -> tuple[int, ...]:
    """Layers of each decoder stack: those that image features are added after, and the others."""
    return tuple(count for count in (deepstack, layers - deepstack) if count)


class TextConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The Qwen3 decoder: pre-norm RMSNorm, QK-norm per head, grouped queries, SwiGLU, rotary positions, no biases."""

    vocab_size: int
    d_model: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float = 5_000_000.0
    mrope_section: tuple[int, int, int]
    """Rotary frequencies driven by time, row and column; sums to head_dim // 2, interleaved."""
    norm_eps: float = 1e-6
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        for key in ("vocab_size", "d_model", "layers", "heads", "kv_heads", "head_dim", "mlp_dim"):
            if getattr(self, key) < 1:
                raise _refuse(f"text.{key}", getattr(self, key), "at least 1")
        for key in ("rope_theta", "norm_eps"):
            if getattr(self, key) <= 0:
                raise _refuse(f"text.{key}", getattr(self, key), "more than 0")
        if self.heads % self.kv_heads:
            raise _refuse("text.kv_heads", self.kv_heads, f"a divisor of text.heads = {self.heads}")
        if self.head_dim % 2:
            raise _refuse("text.head_dim", self.head_dim, "an even number")
        if min(self.mrope_section) < 0 or sum(self.mrope_section) != self.head_dim // 2:
            raise _refuse(
                "text.mrope_section",
                self.mrope_section,
                f"three shares that add up to {self.head_dim // 2} (head_dim // 2)",
            )
        components = mrope_components(self.head_dim, self.mrope_section)
        if any(components.count(axis) != self.mrope_section[axis] for axis in (1, 2)):
            raise _refuse(
                "text.mrope_section",
                self.mrope_section,
                f"row and column shares that interleave by threes into {self.head_dim // 2} frequencies",
            )


class VisionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The Qwen3-VL encoder of still images: pre-norm LayerNorm, fused qkv, gelu MLP, patch merger, deepstack mergers."""

    layers: int
    d_model: int
    heads: int
    mlp_dim: int
    patch_size: int
    merge_size: int = 2
    """merge_size x merge_size neighbouring patches become one image token."""
    channels: int = 3
    position_grid: int
    """Side of the square learned position table, resampled bilinearly to each image's grid."""
    deepstack_layers: tuple[int, ...] = ()
    """Encoder layers (0-based, ascending) whose output is merged and added after decoder layers 0, 1, ..."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    pixel_mean: float = 0.5
    """Mean and standard deviation of pixels scaled to [0, 1], the same for every channel as in Qwen3-VL."""
    pixel_std: float = 0.5

    def __post_init__(self) -> None:
        for key in ("layers", "d_model", "heads", "mlp_dim", "patch_size", "merge_size", "channels", "position_grid"):
            if getattr(self, key) < 1:
                raise _refuse(f"vision.{key}", getattr(self, key), "at least 1")
        for key in ("rope_theta", "norm_eps", "pixel_std"):
            if getattr(self, key) <= 0:
                raise _refuse(f"vision.{key}", getattr(self, key), "more than 0")
        if self.d_model % (4 * self.heads):
            raise _refuse(
                "vision.d_model", self.d_model, f"a multiple of 4 * vision.heads = {4 * self.heads} (2-D rotary)"
            )
        if list(self.deepstack_layers) != sorted(
            {index for index in self.deepstack_layers if 0 <= index < self.layers}
        ):
            raise _refuse(
                "vision.deepstack_layers", self.deepstack_layers, f"ascending layer indices in [0, {self.layers - 1}]"
            )

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.d_model // self.heads

    @property
    def stack_layers(self) -> tuple[int, ...]:
        """Layers of each stack: one stack up to and with every deepstack layer, and one for those after the last."""
        cuts = [0, *(index + 1 for index in self.deepstack_layers), self.layers]
        return tuple(end - begin for begin, end in itertools.pairwise(cuts) if end > begin)

    @property
    def patch_features(self) -> int:
        """Values of one flattened patch, F."""
        return self.patch_size**2 * self.channels


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A decoder and, for models that see, an encoder."""

    text: TextConfig
    vision: VisionConfig | None = None

    def __post_init__(self) -> None:
        if self.vision is not None and len(self.vision.deepstack_layers) > self.text.layers:
            raise _refuse(
                "vision.deepstack_layers",
                self.vision.deepstack_layers,
                f"at most text.layers = {self.text.layers} entries",
            )

    @property
    def deepstack(self) -> int:
        """Levels of image features that are added after decoder layers 0, 1, ..."""
        return 0 if self.vision is None else len(self.vision.deepstack_layers)

    @property
    def visual_features(self) -> int:
        """E: features of one image token, (1 + deepstack levels) * text.d_model; 0 without an encoder."""
        return 0 if self.vision is None else (1 + self.deepstack) * self.text.d_model


QWEN3_VOCABULARY = 151_936


def _qwen3(
    d_model: int, layers: int, heads: int, mlp_dim: int, vision: VisionConfig | None = None, *, tied: bool = True
) -> ModelConfig:
    """Sizes as published; all have 8 key/value heads of 128 features."""
    text = TextConfig(
        vocab_size=QWEN3_VOCABULARY,
        d_model=d_model,
        layers=layers,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        mlp_dim=mlp_dim,
        rope_theta=1_000_000.0 if vision is None else 5_000_000.0,
        mrope_section=(64, 0, 0) if vision is None else (24, 20, 20),
        tie_embeddings=tied,
    )
    return ModelConfig(text=text, vision=vision)


def _vision(layers: int, d_model: int, mlp_dim: int, deepstack_layers: tuple[int, ...]) -> VisionConfig:
    return VisionConfig(
        layers=layers,
        d_model=d_model,
        heads=16,
        mlp_dim=mlp_dim,
        patch_size=16,
        position_grid=48,
        deepstack_layers=deepstack_layers,
    )


_TINY_TEXT = TextConfig(
    vocab_size=48,
    d_model=64,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    mlp_dim=128,
    rope_theta=100.0,  # trajectories of some fifty tokens
    mrope_section=(4, 2, 2),
    tie_embeddings=False,
)
# One 8x8-pixel digit is 2x2 patches and one image token. Every option of the large models is on: grouped queries, M-RoPE,
# QK-norm, deepstack.
_TINY_VISION = VisionConfig(
    layers=2,
    d_model=48,
    heads=4,
    mlp_dim=112,
    patch_size=4,
    merge_size=2,
    channels=1,
    position_grid=8,
    deepstack_layers=(0,),
)

PRESETS: dict[str, ModelConfig] = {
    "tiny": ModelConfig(text=_TINY_TEXT, vision=_TINY_VISION),
    "tiny-text": ModelConfig(text=_TINY_TEXT),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "qwen3-vl-2b": _qwen3(2048, 28, 16, 6144, _vision(24, 1024, 4096, (5, 11, 17))),
    "qwen3-vl-4b": _qwen3(2560, 36, 32, 9728, _vision(24, 1024, 4096, (5, 11, 17))),
    "qwen3-vl-8b": _qwen3(4096, 36, 32, 12288, _vision(27, 1152, 4304, (8, 16, 24)), tied=False),
}


def preset(name: str, vocab_size: int | None = None) -> ModelConfig:
    """The preset `name`, with the tokenizer's vocabulary size if one is given.

    Raises:
      ValueError: an unknown name; the message lists the choices.
    """
    if name not in PRESETS:
        raise _refuse("preset", name, f"one of {', '.join(sorted(PRESETS))}")
    config = PRESETS[name]
    if vocab_size is None:
        return config
    return msgspec.structs.replace(config, text=msgspec.structs.replace(config.text, vocab_size=vocab_size))


def parameter_count(params: collections.abc.Mapping[str, object]) -> int:
    """Number of values in a nested mapping of arrays (or of shapes: anything whose leaves have `.size`)."""
    total = 0
    for value in params.values():
        if isinstance(value, collections.abc.Mapping):
            total += parameter_count(value)
        else:
            total += int(value.size)  # pyright: ignore[reportAttributeAccessIssue]
    return total
