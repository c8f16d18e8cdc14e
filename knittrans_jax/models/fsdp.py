"""Parameters that are split over a manual mesh axis, made whole where they are used and nowhere else.

Inside a `shard_map` over the axis each device has its own part of every parameter that its sharding rule splits. A layer's
parameters are made whole inside the loop over layers (`whole`), in the compute type; the pass backwards sums their gradients
over the axis in float32 and leaves each device the sum of its own part: what the layers' loop returns is already reduced over
the axis. Under remat the pass backwards makes them whole again instead of keeping them. Embedding and output layer, split along
the vocabulary, are never made whole: devices swap tokens and hidden states instead (`lookup`, `everyones`), which are smaller.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from knittrans_jax.models.sharding import Rule, split_axis

ModuleT = TypeVar("ModuleT", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class Fsdp:
    """How parameters are split. Hashable, so that it can be part of a model's static structure.

    `axis` is the manual mesh axis, `rules` the sharding rules that the parameters were split by, and `dtype` the type in
    which they are used: parts travel in it.
    """

    axis: str
    rules: tuple[Rule, ...]
    dtype: Any

    def whole(self, params: Any, name: str, *, leading: int = 0, dtype: Any = None) -> Any:
        """The whole parameters of a part of the model.

        Args:
            params: nested dict of this device's parts, or one array.
            name: the dotted name of `params` in the model's parameters.
            leading: axes that the rules count and these arrays do not have: 1 for one layer of a stack.
            dtype: travels and is returned in this type instead of the compute type.

        Returns:
            The same tree; what is split over no device is returned as it is.
        """

        def one(path: tuple[Any, ...], part: jax.Array) -> jax.Array:
            suffix = jax.tree_util.keystr(path, simple=True, separator=".")
            at = split_axis(f"{name}.{suffix}" if suffix else name, self.axis, self.rules)
            return part if at is None else _gather(part, self.axis, at - leading, jnp.dtype(dtype or self.dtype).name)

        return jax.tree.map_with_path(one, params)

    def lookup(self, table_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
        """Rows of a table split along V -> [B, T, D] in the table's type, for this device's own tokens.

        Every device looks all tokens up in its own rows; each token is found by one. The table's cotangent is summed, in the
        table's type, where its rows lie.
        """
        rows = table_VxD.shape[0]
        everyones = lax.all_gather(tokens_BxT, self.axis, axis=0, tiled=True)
        at = everyones - lax.axis_index(self.axis) * rows
        held = (at >= 0) & (at < rows)
        found = jnp.where(held[..., None], table_VxD[jnp.where(held, at, 0)], 0)
        return lax.psum_scatter(found, self.axis, scatter_dimension=0, tiled=True)

    def everyones(self, x: jax.Array) -> jax.Array:
        """The rows (leading axis) of all devices of the axis, in their order; cotangents are summed in float32."""
        return _gather(x, self.axis, 0, x.dtype.name)


def whole_module(module: ModuleT, fsdp: Fsdp | None, name: str) -> ModuleT:
    """The module with whole parameters; itself where nothing is split."""
    if fsdp is None:
        return module
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, fsdp.whole(nnx.to_pure_dict(state), name))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(part: jax.Array, axis: str, at: int, dtype: str) -> jax.Array:
    return lax.all_gather(part.astype(dtype), axis, axis=at, tiled=True)


def _gather_forward(part: jax.Array, axis: str, at: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    return _gather(part, axis, at, dtype), jnp.zeros((0,), part.dtype)  # its type is all that the backward pass needs


def _gather_backward(axis: str, at: int, dtype: str, like: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    del dtype
    summed = lax.psum_scatter(cotangent.astype(jnp.float32), axis, scatter_dimension=at, tiled=True)
    return (summed.astype(like.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)
