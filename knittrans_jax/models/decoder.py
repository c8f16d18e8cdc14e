"""The Qwen3 / Qwen3-VL decoder, once for packed training rows and once over a key/value cache.

`hidden` and `extend` run the same layers with the same weights; only where keys and values come from differs. Per layer:
x += o(attention(qk_norm(rotate(q)), ...)(norm(x))); x += down(silu(gate(y)) * up(y)), y = norm(x); then the deepstack
features of the images, if any. Source of the architecture: Qwen3 and Qwen3-VL technical reports and their published
reference implementation.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from knittrans_jax.models.attention import cached_attention, packed_attention
from knittrans_jax.models.cache import KVCache, append
from knittrans_jax.models.config import TextConfig, decoder_stack_layers, mrope_components
from knittrans_jax.models.fsdp import Fsdp
from knittrans_jax.models.layers import RMSNorm, constrain, linear, normal, rotate
from knittrans_jax.models.stack import Stack


class Attention(nnx.Module):
    """Projections and QK-norm of grouped-query attention; without biases."""

    def __init__(self, config: TextConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        def project(in_features: int, out_features: int, gain: float = 1.0) -> nnx.Linear:
            return linear(
                in_features, out_features, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs, gain=gain
            )

        def norm() -> RMSNorm:
            return RMSNorm(config.head_dim, eps=config.norm_eps, dtype=dtype, param_dtype=param_dtype)

        self.head_dim = config.head_dim
        self.q = project(config.d_model, config.heads * config.head_dim)
        self.k = project(config.d_model, config.kv_heads * config.head_dim)
        self.v = project(config.d_model, config.kv_heads * config.head_dim)
        self.o = project(config.heads * config.head_dim, config.d_model, gain=(2 * config.layers) ** -0.5)
        self.q_norm = norm()
        self.k_norm = norm()

    def qkv(self, x_BxTxD: jax.Array, angles_BxTxF: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normed, rotated queries [B, T, heads, head_dim] and keys, and values [B, T, kv_heads, head_dim]."""
        batch, length, _ = x_BxTxD.shape
        q, k, v = (layer(x_BxTxD).reshape(batch, length, -1, self.head_dim) for layer in (self.q, self.k, self.v))
        return rotate(self.q_norm(q), angles_BxTxF), rotate(self.k_norm(k), angles_BxTxF), v

    def out(self, attended_BxTxHxK: jax.Array) -> jax.Array:
        """Merge the heads -> [B, T, D]."""
        return self.o(attended_BxTxHxK.reshape(*attended_BxTxHxK.shape[:2], -1))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020); without biases."""

    def __init__(self, config: TextConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        def project(in_features: int, out_features: int, gain: float = 1.0) -> nnx.Linear:
            return linear(
                in_features, out_features, use_bias=False, dtype=dtype, param_dtype=param_dtype, rngs=rngs, gain=gain
            )

        self.gate = project(config.d_model, config.mlp_dim)
        self.up = project(config.d_model, config.mlp_dim)
        self.down = project(config.mlp_dim, config.d_model, gain=(2 * config.layers) ** -0.5)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """One pre-norm layer."""

    def __init__(self, config: TextConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=dtype, param_dtype=param_dtype)
        self.attention = Attention(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=dtype, param_dtype=param_dtype)
        self.mlp = SwiGLU(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)


class Decoder(nnx.Module):
    """Token ids and image features to hidden states and logits.

    `dtype` is the compute type, `param_dtype` that of the stored parameters. Residual additions are in `dtype`; norm
    statistics, rotary angles, softmax and logits are float32. `deepstack` is the number of image feature levels that are
    added after the first layers: those are one stack, the others another. `remat` keeps only each layer's input for the
    backward pass; `hidden_spec` is how hidden states [B, T, D] are laid out between layers, by mesh axis (None: as XLA
    likes). With `fsdp` the parameters are this device's parts.
    """

    def __init__(
        self,
        config: TextConfig,
        *,
        deepstack: int = 0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        remat: bool = False,
        hidden_spec: PartitionSpec | None = None,
        fsdp: Fsdp | None = None,
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.fsdp = fsdp
        self.deepstack = deepstack
        self.dtype = dtype
        self.hidden_spec = hidden_spec
        # Tied: small, because the same rows are the output layer. Untied: below the size of what the layers add, so that
        # from random initialisation they soon matter, and an output layer that starts close to the uniform distribution.
        embedding_std = 0.02 if config.tie_embeddings else 0.3
        self.embedding = nnx.Param(
            normal(embedding_std)(rngs.params(), (config.vocab_size, config.d_model), param_dtype)
        )

        def layer(rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

        counts = decoder_stack_layers(config.layers, deepstack)
        self.stacks = nnx.List(
            [
                Stack(layer, count, remat=remat, rngs=rngs, name=f"decoder.stacks.{number}", fsdp=fsdp)
                for number, count in enumerate(counts)
            ]
        )
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps, dtype=dtype, param_dtype=param_dtype)
        if not config.tie_embeddings:
            self.head = nnx.Param(normal(0.02)(rngs.params(), (config.vocab_size, config.d_model), param_dtype))

    def hidden(
        self,
        tokens_BxT: jax.Array,
        positions_Bx3xT: jax.Array,
        segment_ids_BxT: jax.Array,
        visual_BxTxE: jax.Array | None = None,
        visual_mask_BxT: jax.Array | None = None,
    ) -> jax.Array:
        """Final, normed hidden states of packed rows -> [B, T, D] in the compute dtype.

        Args:
          tokens_BxT: int32 token ids.
          positions_Bx3xT: int32 M-RoPE positions (time, row, column), see `positions.mrope_positions`.
          segment_ids_BxT: int32; attention is causal within equal ids, 0 is padding (finite, meaningless output).
          visual_BxTxE: image features at image tokens, anything finite elsewhere. E = (1 + n) * D: the first D replace
            the token's embedding, the i-th further D are added to the hidden state after layer i (deepstack).
          visual_mask_BxT: bool, true at image tokens; given exactly if `visual_BxTxE` is.
        """
        x, levels = self._embed(tokens_BxT, visual_BxTxE, visual_mask_BxT)
        angles = self._angles(positions_Bx3xT)

        def step(layer: DecoderLayer, x: jax.Array, level: jax.Array | None) -> jax.Array:
            q, k, v = layer.attention.qkv(layer.attention_norm(x), angles)
            x = x + layer.attention.out(packed_attention(q, k, v, segment_ids_BxT, causal=True))
            x = x + layer.mlp(layer.mlp_norm(x))
            return constrain(x if level is None else x + level, self.hidden_spec)

        x = constrain(x, self.hidden_spec)
        for number, stack in enumerate(self.stacks):
            x = stack.run(step, x, levels if number == 0 else None)
        return self.norm(x)

    def extend(
        self,
        tokens_SxL: jax.Array,
        positions_Sx3xL: jax.Array,
        new_lengths_S: jax.Array,
        cache: KVCache,
        visual_SxLxE: jax.Array | None = None,
        visual_mask_SxL: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Append up to L tokens to every slot -> (hidden [S, L, D], cache). L = 1 is decoding, a wide L is prefill.

        Slot s takes its first `new_lengths_S[s]` (int32, 0..L) tokens, which see the slot's earlier tokens and each other
        causally; the rest of the row is padding whose output is finite and meaningless. A slot with 0 new tokens is
        untouched. The caller keeps `cache.lengths + new_lengths_S` within the capacity. Other arguments as in `hidden`.
        """
        x, levels = self._embed(tokens_SxL, visual_SxLxE, visual_mask_SxL)
        angles = self._angles(positions_Sx3xL)
        steps = jnp.arange(tokens_SxL.shape[1], dtype=jnp.int32)[None, :]
        offsets_SxL = cache.lengths[:, None] + steps
        valid_SxL = steps < new_lengths_S[:, None]

        def step(layer: DecoderLayer, carry: tuple[jax.Array, ...], inputs: tuple[Any, Any]) -> tuple[jax.Array, ...]:
            (x, keys, values), (index, level) = carry, inputs
            q, k, v = layer.attention.qkv(layer.attention_norm(x), angles)
            keys = append(keys, index, k, offsets_SxL, valid_SxL)
            values = append(values, index, v, offsets_SxL, valid_SxL)
            x = x + layer.attention.out(cached_attention(q, keys[index], values[index], offsets_SxL))
            x = x + layer.mlp(layer.mlp_norm(x))
            return constrain(x if level is None else x + level, self.hidden_spec), keys, values

        carry, first = (constrain(x, self.hidden_spec), cache.k, cache.v), 0
        for number, stack in enumerate(self.stacks):
            indices = np.arange(first, first + stack.count, dtype=np.int32)
            carry = stack.run(step, carry, (indices, levels if number == 0 else None))
            first += stack.count
        x, keys, values = carry
        return self.norm(x), KVCache(keys, values, cache.lengths + new_lengths_S)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> float32 [..., vocab_size].

        With `fsdp`: of the rows (leading axis) of all devices of the axis, for this device's part of the vocabulary.
        """
        table = self.embedding if self.config.tie_embeddings else self.head
        if self.fsdp is not None:
            hidden = self.fsdp.everyones(hidden)
        return jnp.einsum(
            "...d,vd->...v", hidden, table[...].astype(self.dtype), preferred_element_type=jnp.float32
        ).astype(jnp.float32)

    def _embed(
        self, tokens: jax.Array, visual: jax.Array | None, visual_mask: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """Input states, and the deepstack features [deepstack, B, T, D] with zeros away from the image tokens, if any."""
        # Gather, then cast: the transpose then adds the rows' cotangents in the parameters' dtype.
        table_VxD = self.embedding[...]
        x = (table_VxD[tokens] if self.fsdp is None else self.fsdp.lookup(table_VxD, tokens)).astype(self.dtype)
        if (visual is None) != (visual_mask is None):
            raise ValueError("visual features and visual mask are given together or not at all; got only one of them")
        if visual is None or visual_mask is None:
            return x, None
        if visual.shape[-1] != (1 + self.deepstack) * self.config.d_model:
            raise ValueError(
                f"visual features: last axis {visual.shape[-1]}; expected (1 + deepstack levels) * d_model = "
                f"(1 + {self.deepstack}) * {self.config.d_model}"
            )
        mask = visual_mask[..., None]
        first, *rest = (part.astype(self.dtype) for part in jnp.split(visual, 1 + self.deepstack, axis=-1))
        levels = jnp.stack([jnp.where(mask, part, 0) for part in rest]) if rest else None
        return jnp.where(mask, first, x), levels

    def _angles(self, positions_Bx3xT: jax.Array) -> jax.Array:
        """Rotary angles [B, T, head_dim // 2], float32: each frequency is driven by one of the three components."""
        half = self.config.head_dim // 2
        frequencies = self.config.rope_theta ** -(np.arange(half, dtype=np.float64) / half)
        components = np.array(mrope_components(self.config.head_dim, self.config.mrope_section))
        driving_BxFxT = positions_Bx3xT[:, components, :].astype(jnp.float32)
        return jnp.swapaxes(driving_BxFxT, 1, 2) * jnp.asarray(frequencies, jnp.float32)[None, None, :]
