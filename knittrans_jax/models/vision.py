"""The Qwen3-VL vision encoder for still images, over rows of packed patches. Source: its published reference implementation.

Patches arrive in merge-block order (`encoding.patches`), so that merge_size^2 consecutive patches are one image token.
Attention is full within one image (equal segment ids); images of any sizes share a row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from knittrans_jax.models.attention import packed_attention
from knittrans_jax.models.config import VisionConfig
from knittrans_jax.models.fsdp import Fsdp, whole_module
from knittrans_jax.models.layers import LayerNorm, linear, normal, rotate
from knittrans_jax.models.stack import Stack


def normalise_pixels(patches: jax.Array, config: VisionConfig) -> jax.Array:
    """uint8 values in 0..255 -> float32 (x / 255 - pixel_mean) / pixel_std, on the device: pictures travel as bytes."""
    return (patches.astype(jnp.float32) / 255.0 - config.pixel_mean) / config.pixel_std


class VisionLayer(nnx.Module):
    """Pre-norm attention (fused qkv, with biases) and a tanh-gelu MLP (with biases)."""

    def __init__(self, config: VisionConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        def project(in_features: int, out_features: int, gain: float = 1.0) -> nnx.Linear:
            return linear(
                in_features, out_features, use_bias=True, dtype=dtype, param_dtype=param_dtype, rngs=rngs, gain=gain
            )

        def norm() -> LayerNorm:
            return LayerNorm(config.d_model, eps=config.norm_eps, dtype=dtype, param_dtype=param_dtype)

        self.heads = config.heads
        self.norm1 = norm()
        self.qkv = project(config.d_model, 3 * config.d_model)
        self.proj = project(config.d_model, config.d_model, gain=(2 * config.layers) ** -0.5)
        self.norm2 = norm()
        self.fc1 = project(config.d_model, config.mlp_dim)
        self.fc2 = project(config.mlp_dim, config.d_model, gain=(2 * config.layers) ** -0.5)

    def __call__(self, x_RxPxD: jax.Array, angles_RxPxF: jax.Array, segment_ids_RxP: jax.Array) -> jax.Array:
        """[R, P, D] -> [R, P, D]."""
        rows, patches, features = x_RxPxD.shape
        fused = self.qkv(self.norm1(x_RxPxD)).reshape(rows, patches, 3, self.heads, features // self.heads)
        q, k = rotate(fused[:, :, 0], angles_RxPxF), rotate(fused[:, :, 1], angles_RxPxF)
        attended = packed_attention(q, k, fused[:, :, 2], segment_ids_RxP, causal=False)
        x_RxPxD = x_RxPxD + self.proj(attended.reshape(rows, patches, features))
        return x_RxPxD + self.fc2(jax.nn.gelu(self.fc1(self.norm2(x_RxPxD)), approximate=True))


class PatchMerger(nnx.Module):
    """merge_size^2 patches to one image token: norm, concatenate, fc, exact gelu, fc.

    The final merger norms each patch; the deepstack mergers norm the concatenation (`norm_after`), as Qwen3-VL does.
    """

    def __init__(
        self,
        config: VisionConfig,
        out_features: int,
        *,
        norm_after: bool,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        merged = config.merge_size**2 * config.d_model
        self.merged = merged
        self.norm_after = norm_after
        self.norm = LayerNorm(
            merged if norm_after else config.d_model, eps=config.norm_eps, dtype=dtype, param_dtype=param_dtype
        )
        self.fc1 = linear(merged, merged, use_bias=True, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.fc2 = linear(merged, out_features, use_bias=True, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x_RxPxD: jax.Array) -> jax.Array:
        """[R, P, D] -> [R, P / merge_size^2, out_features]."""
        rows = x_RxPxD.shape[0]
        if self.norm_after:
            x = self.norm(x_RxPxD.reshape(rows, -1, self.merged))
        else:
            x = self.norm(x_RxPxD).reshape(rows, -1, self.merged)
        return self.fc2(jax.nn.gelu(self.fc1(x), approximate=False))


class VisionEncoder(nnx.Module):
    """Patches to image tokens: a ViT with a resampled position table, 2-D axial RoPE, a merger and deepstack mergers.

    Its layers are stacks that end where a deepstack level is taken. `remat` keeps only each layer's input for the backward
    pass. With `fsdp` the parameters are this device's parts.
    """

    def __init__(
        self,
        config: VisionConfig,
        out_features: int,
        *,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        remat: bool = False,
        fsdp: Fsdp | None = None,
        rngs: nnx.Rngs,
    ):
        def merger(norm_after: bool) -> PatchMerger:
            return PatchMerger(
                config, out_features, norm_after=norm_after, dtype=dtype, param_dtype=param_dtype, rngs=rngs
            )

        self.config = config
        self.dtype = dtype
        self.fsdp = fsdp
        self.patch_embed = linear(
            config.patch_features, config.d_model, use_bias=True, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        # As large as a patch's own features: where a patch lies must be legible from the first update; much
        # smaller, and a model that starts from nothing takes long to tell image tokens apart by place.
        self.position_table = nnx.Param(
            normal(1.0)(rngs.params(), (config.position_grid**2, config.d_model), param_dtype)
        )

        def layer(rngs: nnx.Rngs) -> VisionLayer:
            return VisionLayer(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        self.stacks = nnx.List(
            [
                Stack(layer, count, remat=remat, rngs=rngs, name=f"encoder.stacks.{number}", fsdp=fsdp)
                for number, count in enumerate(config.stack_layers)
            ]
        )
        self.merger = merger(norm_after=False)
        self.deepstack_mergers = nnx.List([merger(norm_after=True) for _ in config.deepstack_layers])

    def __call__(
        self,
        patches_RxPxF: jax.Array,
        coords_RxPx2: jax.Array,
        grids_RxPx2: jax.Array,
        segment_ids_RxP: jax.Array,
    ) -> jax.Array:
        """Encode packed images -> float32 [R, P / merge_size^2, E], E = (1 + deepstack levels) * out_features.

        Args:
          patches_RxPxF: float, from `normalise_pixels`; F = patch_size^2 * channels. P is a multiple of merge_size^2.
          coords_RxPx2: int32 (row, column) of the patch in its image, counted in patches.
          grids_RxPx2: int32 (rows, columns) of its image's patch grid; anything, 0 included, at padding.
          segment_ids_RxP: int32, one id > 0 per image, 0 at padding. Whole images only, each beginning at a multiple of
            merge_size^2. Image tokens of padding are zero.
        """
        merged = self.config.merge_size**2
        if patches_RxPxF.shape[1] % merged or patches_RxPxF.shape[2] != self.config.patch_features:
            raise ValueError(
                f"patches of shape {patches_RxPxF.shape}; expected [rows, a multiple of {merged}, "
                f"{self.config.patch_features}]"
            )
        positions = self._positions(coords_RxPx2, grids_RxPx2)
        patch_embed = whole_module(self.patch_embed, self.fsdp, "encoder.patch_embed")
        x = patch_embed(patches_RxPxF.astype(self.dtype)) + positions.astype(self.dtype)
        angles = self._angles(coords_RxPx2)
        levels: list[jax.Array] = []
        for number, stack in enumerate(self.stacks):
            x = stack.run(lambda layer, x, _: layer(x, angles, segment_ids_RxP), x)
            if number < len(self.deepstack_mergers):
                name = f"encoder.deepstack_mergers.{number}"
                levels.append(whole_module(self.deepstack_mergers[number], self.fsdp, name)(x))
        merger = whole_module(self.merger, self.fsdp, "encoder.merger")
        table = jnp.concatenate([merger(x), *levels], axis=-1).astype(jnp.float32)
        return jnp.where(segment_ids_RxP[:, ::merged, None] > 0, table, 0.0)

    def _positions(self, coords_RxPx2: jax.Array, grids_RxPx2: jax.Array) -> jax.Array:
        """The position table sampled bilinearly with aligned corners at each patch -> float32 [R, P, D]."""
        side = self.config.position_grid
        # Exact in integers: patch i of n lies at i * (side - 1) / (n - 1) of the table.
        spans = jnp.maximum(grids_RxPx2 - 1, 1)
        scaled = jnp.clip(coords_RxPx2, 0, spans) * (side - 1)
        low = scaled // spans
        high = jnp.minimum(low + 1, side - 1)
        fraction = (scaled - low * spans).astype(jnp.float32) / spans.astype(jnp.float32)
        table = self.position_table[...]
        if self.fsdp is not None:
            table = self.fsdp.whole(table, "encoder.position_table", dtype=table.dtype)
        total = jnp.zeros((*coords_RxPx2.shape[:2], table.shape[1]), jnp.float32)
        for row, row_weight in ((low[..., 0], 1 - fraction[..., 0]), (high[..., 0], fraction[..., 0])):
            for column, column_weight in ((low[..., 1], 1 - fraction[..., 1]), (high[..., 1], fraction[..., 1])):
                corner = table[row * side + column].astype(jnp.float32)
                total = total + corner * (row_weight * column_weight)[..., None]
        return total

    def _angles(self, coords_RxPx2: jax.Array) -> jax.Array:
        """2-D axial rotary angles [R, P, head_dim // 2], float32: the first half from the row, the second from the column."""
        quarter = self.config.head_dim // 4
        frequencies = self.config.rope_theta ** -(np.arange(quarter, dtype=np.float64) / quarter)
        angles = (
            coords_RxPx2.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)[None, None, None, :]
        )
        return angles.reshape(*coords_RxPx2.shape[:2], 2 * quarter)
