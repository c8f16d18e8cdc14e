"""A functional surface over the modules: structure (static, hashable) apart from parameters (a plain pytree).

`params` is a nested dict with string keys and array leaves, `{"decoder": ..., "encoder": ...}` (no "encoder" for a model
without vision), e.g. `params["decoder"]["layers"]["0"]["attention"]["q"]["kernel"]`: ready for optax, checkpoints, the
wire and sharding rules by path.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from knittrans_jax.models.config import ModelConfig
from knittrans_jax.models.decoder import Decoder
from knittrans_jax.models.vision import VisionEncoder

Params = dict[str, Any]
"""A nested dict of arrays."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The static half of a model; hashable, so that jitted functions can close over it or take it as a static argument."""

    config: ModelConfig
    decoder: nnx.GraphDef[Decoder]
    encoder: nnx.GraphDef[VisionEncoder] | None


def build_model(
    config: ModelConfig, seed: int, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike = jnp.float32
) -> tuple[Model, Params]:
    """Structure and freshly drawn parameters; the same (config, seed, param_dtype) gives the same parameters.

    `dtype` is the compute type, `param_dtype` that of the parameters.
    """
    # Eagerly: one small program per distinct shape, where a single jitted program would compile every draw anew.
    return _structure(config, dtype, param_dtype), _initialiser(config, dtype, param_dtype)(jax.random.key(seed))


def abstract_model(
    config: ModelConfig, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike = jnp.float32
) -> tuple[Model, Params]:
    """As `build_model`, but with `jax.ShapeDtypeStruct` leaves: for sizes, shardings and compilation without memory."""
    return _structure(config, dtype, param_dtype), jax.eval_shape(
        _initialiser(config, dtype, param_dtype), jax.random.key(0)
    )


def decoder_apply(decoder: nnx.GraphDef[Decoder], params: Params, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call `Decoder.<method>` (hidden, extend, logits) with `params["decoder"]`; pure: jit it, differentiate it."""
    return getattr(nnx.merge(decoder, _with_list_keys(params)), method)(*args, **kwargs)


def encoder_apply(
    encoder: nnx.GraphDef[VisionEncoder],
    params: Params,
    patches_RxPxF: jax.Array,
    coords_RxPx2: jax.Array,
    grids_RxPx2: jax.Array,
    segment_ids_RxP: jax.Array,
) -> jax.Array:
    """Call the encoder with `params["encoder"]` -> float32 [R, P / merge_size^2, E]; see `VisionEncoder.__call__`."""
    return nnx.merge(encoder, _with_list_keys(params))(patches_RxPxF, coords_RxPx2, grids_RxPx2, segment_ids_RxP)


def _modules(
    config: ModelConfig, dtype: DTypeLike, param_dtype: DTypeLike, key: jax.Array
) -> tuple[Decoder, VisionEncoder | None]:
    decoder_key, encoder_key = jax.random.split(key)
    decoder = Decoder(config.text, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(decoder_key))
    if config.vision is None:
        return decoder, None
    encoder = VisionEncoder(
        config.vision, config.text.d_model, dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(encoder_key)
    )
    return decoder, encoder


def _initialiser(config: ModelConfig, dtype: DTypeLike, param_dtype: DTypeLike) -> Any:
    def initialise(key: jax.Array) -> Params:
        decoder, encoder = _modules(config, dtype, param_dtype, key)
        params = {"decoder": _plain(decoder)}
        return params if encoder is None else params | {"encoder": _plain(encoder)}

    return initialise


@functools.cache
def _structure(config: ModelConfig, dtype: DTypeLike, param_dtype: DTypeLike) -> Model:
    graphdefs: list[Any] = []

    def trace(key: jax.Array) -> None:
        for module in _modules(config, dtype, param_dtype, key):
            graphdefs.append(None if module is None else nnx.graphdef(module))

    jax.eval_shape(trace, jax.random.key(0))
    decoder, encoder = graphdefs
    return Model(config, decoder, encoder)


def _plain(module: nnx.Module) -> Params:
    return _with_string_keys(nnx.to_pure_dict(nnx.state(module)))


def _with_string_keys(tree: Any) -> Any:
    """nnx numbers the entries of a list with ints; as strings they survive checkpoints and sort beside names."""
    return {str(key): _with_string_keys(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def _with_list_keys(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {int(key) if key.isdigit() else key: _with_list_keys(value) for key, value in tree.items()}
