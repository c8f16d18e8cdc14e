"""Blocks that decoder and encoder share: norms, projections, rotary positions. Parameters in `param_dtype`, compute in `dtype`.

Norm statistics and rotary angles are always float32.
"""

from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis (Zhang and Sennrich, 2019); statistics in float32."""

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike, param_dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] -> [..., features] in `dtype`."""
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return x32.astype(self.dtype) * _over_last(self.scale[...], x.ndim).astype(self.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(var + eps) * scale + bias over the last axis; all of it in float32."""

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike, param_dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))
        self.bias = nnx.Param(jnp.zeros((features,), param_dtype))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., features] -> [..., features] in `dtype`."""
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        scale = _over_last(self.scale[...], x.ndim).astype(jnp.float32)
        bias = _over_last(self.bias[...], x.ndim).astype(jnp.float32)
        return (x32 * scale + bias).astype(self.dtype)


def _over_last(vector: jax.Array, ndim: int) -> jax.Array:
    return jnp.reshape(vector, (1,) * (ndim - 1) + vector.shape)


def normal(std: float) -> Callable[[jax.Array, Sequence[int], DTypeLike], jax.Array]:
    """An initialiser: normal with this standard deviation.

    With a real key numpy draws (the key's bits seed it): eager JAX would compile a program per shape, in every
    process. Under a trace (jit, eval_shape) JAX draws, with other values.
    """

    def draw(key: jax.Array, shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
        if isinstance(key, jax.core.Tracer):
            return nnx.initializers.normal(std)(key, tuple(shape), dtype)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        return jnp.asarray(rng.normal(0.0, std, tuple(shape)), dtype)

    return draw


def linear(
    in_features: int,
    out_features: int,
    *,
    use_bias: bool,
    dtype: DTypeLike,
    param_dtype: DTypeLike,
    rngs: nnx.Rngs,
    gain: float = 1.0,
) -> nnx.Linear:
    """A projection with kernel [in, out] drawn with variance gain^2 / in_features: small and large models start alike."""
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=use_bias,
        dtype=dtype,
        param_dtype=param_dtype,
        kernel_init=normal(gain * in_features**-0.5),
        rngs=rngs,
    )


def rotate(x_BxTxHxK: jax.Array, angles_BxTxF: jax.Array) -> jax.Array:
    """Rotary embedding (Su et al., 2021) in the rotate-half layout of Llama and Qwen: pairs are (i, i + K/2), F = K/2.

    Angles float32 in radians; computed in float32 and returned in x's dtype.
    """
    cos = jnp.cos(angles_BxTxF)[:, :, None, :]
    sin = jnp.sin(angles_BxTxF)[:, :, None, :]
    first, second = jnp.split(x_BxTxHxK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BxTxHxK.dtype)


def constrain(x: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    """`x` laid out by mesh axis as `spec` says, under `jax.set_mesh`; None leaves the choice to XLA."""
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)
