"""A functional surface over the modules: structure (static, hashable) apart from parameters (a plain pytree).

`params` is a nested dict with string keys and array leaves, `{"decoder": ..., "encoder": ...}` (no "encoder" for a model
without vision), e.g. `params["decoder"]["stacks"]["0"]["layers"]["attention"]["q"]["kernel"]` [layers, in, out]: ready for
optax, checkpoints, the wire and sharding rules by path. The parameters of a stack's layers share one array each.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from knittrans_jax.models.config import ModelConfig
from knittrans_jax.models.decoder import Decoder
from knittrans_jax.models.fsdp import Fsdp
from knittrans_jax.models.vision import VisionEncoder

Params = dict[str, Any]
"""A nested dict of arrays."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The static half of a model; hashable, so that jitted functions can close over it or take it as a static argument."""

    config: ModelConfig
    decoder: nnx.GraphDef[Decoder]
    encoder: nnx.GraphDef[VisionEncoder] | None


@dataclasses.dataclass(frozen=True)
class Compute:
    """How a model computes, apart from what it is.

    `dtype` is the compute type and `param_dtype` that of the parameters. `remat` recomputes each layer in the backward pass
    from its input. `hidden_spec` lays out the decoder's hidden states [B, T, D] over mesh axes (`sharding.hidden_spec`), where
    XLA partitions the program. `fsdp` says how parameters are split, inside a `shard_map` over their axis.
    """

    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False
    hidden_spec: PartitionSpec | None = None
    fsdp: Fsdp | None = None


def build_model(
    config: ModelConfig, seed: int, dtype: DTypeLike = jnp.float32, param_dtype: DTypeLike = jnp.float32
) -> tuple[Model, Params]:
    """Structure and freshly drawn parameters; the same (config, seed, param_dtype) gives the same parameters.

    They are drawn on the host: for small models. `draw_params` draws large ones into their shardings.
    """
    compute = Compute(dtype, param_dtype)
    return _structure(config, compute), _initialiser(config, compute)(jax.random.key(seed))


def abstract_model(
    config: ModelConfig,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    *,
    remat: bool = False,
    hidden_spec: PartitionSpec | None = None,
    fsdp: Fsdp | None = None,
) -> tuple[Model, Params]:
    """Structure, and parameters as `jax.ShapeDtypeStruct`: for sizes, shardings and compilation without memory.

    Arguments as in `Compute`. The shapes are those of the whole model.
    """
    compute = Compute(dtype, param_dtype, remat, hidden_spec, fsdp)
    return _structure(config, compute), jax.eval_shape(_initialiser(config, compute), jax.random.key(0))


def draw_params(config: ModelConfig, seed: int, shardings: Any, param_dtype: DTypeLike = jnp.float32) -> Params:
    """Freshly drawn parameters, each device drawing its own part; other values than `build_model`'s.

    `shardings`: a pytree like the parameters, or one sharding for all. The same arguments give the same values on any mesh.
    """
    draw = jax.jit(_initialiser(config, Compute(param_dtype=param_dtype)), out_shardings=shardings)
    return draw(jax.random.key(seed))


def decay_mask(params: Params) -> Any:
    """True for the parameters that weight decay acts on: matrices and tables, not norms and biases. For `optax.adamw`."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key not in ("scale", "bias"), params)


def decoder_apply(decoder: nnx.GraphDef[Decoder], params: Params, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call `Decoder.<method>` (hidden, extend, logits) with `params["decoder"]`; pure: jit it, differentiate it."""
    return getattr(decoder_module(decoder, params), method)(*args, **kwargs)


def encoder_apply(
    encoder: nnx.GraphDef[VisionEncoder],
    params: Params,
    patches_RxPxF: jax.Array,
    coords_RxPx2: jax.Array,
    grids_RxPx2: jax.Array,
    segment_ids_RxP: jax.Array,
) -> jax.Array:
    """Call the encoder with `params["encoder"]` -> float32 [R, P / merge_size^2, E]; see `VisionEncoder.__call__`."""
    return encoder_module(encoder, params)(patches_RxPxF, coords_RxPx2, grids_RxPx2, segment_ids_RxP)


def decoder_module(decoder: nnx.GraphDef[Decoder], params: Params) -> Decoder:
    """The decoder as a module with `params["decoder"]`, to look at its parts."""
    return nnx.merge(decoder, _with_list_keys(params))


def encoder_module(encoder: nnx.GraphDef[VisionEncoder], params: Params) -> VisionEncoder:
    """The encoder as a module with `params["encoder"]`, to look at its parts."""
    return nnx.merge(encoder, _with_list_keys(params))


def _modules(config: ModelConfig, compute: Compute, key: jax.Array) -> tuple[Decoder, VisionEncoder | None]:
    decoder_key, encoder_key = jax.random.split(key)
    options: dict[str, Any] = {
        "dtype": compute.dtype,
        "param_dtype": compute.param_dtype,
        "remat": compute.remat,
        "fsdp": compute.fsdp,
    }
    decoder = Decoder(
        config.text,
        deepstack=config.deepstack,
        hidden_spec=compute.hidden_spec,
        rngs=nnx.Rngs(decoder_key),
        **options,
    )
    if config.vision is None:
        return decoder, None
    return decoder, VisionEncoder(config.vision, config.text.d_model, rngs=nnx.Rngs(encoder_key), **options)


def _initialiser(config: ModelConfig, compute: Compute) -> Any:
    def initialise(key: jax.Array) -> Params:
        decoder, encoder = _modules(config, compute, key)
        params = {"decoder": _plain(decoder)}
        return params if encoder is None else params | {"encoder": _plain(encoder)}

    return initialise


@functools.cache
def _structure(config: ModelConfig, compute: Compute) -> Model:
    graphdefs: list[Any] = []

    def trace(key: jax.Array) -> None:
        for module in _modules(config, compute, key):
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
