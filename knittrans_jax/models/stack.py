"""Layers of one kind with their parameters stacked along a leading axis of layers, applied in order.

A deep stack is one `lax.scan`: compilation does not grow with depth, and under `remat` only each layer's input is kept for
the backward pass. A shallow one is unrolled: a loop has a price of its own on CPU, and small models compile as fast
without it. Both give the same values from the same parameters.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from knittrans_jax.models.fsdp import Fsdp

UNROLLED_LAYERS = 2
"""Stacks of at most this many layers are unrolled."""

LayerT = TypeVar("LayerT", bound=nnx.Module)


class Stack(nnx.Module, Generic[LayerT]):
    """`count` layers; `self.layers` is one of them whose every parameter has a leading axis [count]."""

    def __init__(
        self,
        make: Callable[[nnx.Rngs], LayerT],
        count: int,
        *,
        remat: bool,
        rngs: nnx.Rngs,
        name: str = "",
        fsdp: Fsdp | None = None,
    ):
        """`make` builds one layer; it is called once for every layer, in order (under a trace: once for all).

        `fsdp` makes each layer's parameters whole where it is applied; `name` is the stack's own among the model's parameters.
        """
        self.count = count
        self.remat = remat
        self.name = f"{name}.layers"
        self.fsdp = fsdp
        self.layers = _stacked(make, count, rngs)

    def run(self, step: Callable[[LayerT, Any, Any], Any], carry: Any, xs: Any = None) -> Any:
        """`carry = step(layer, carry, x)` for every layer in order -> the last carry.

        Args:
          step: pure; the carry keeps its structure, shapes and dtypes.
          carry: a pytree.
          xs: a pytree of arrays with a leading axis [count]; `x` is the layer's own entry. An unrolled stack's numpy
            entries stay numpy: a layer's number stays a constant.
        """
        graphdef, state = nnx.split(self.layers)
        params = nnx.to_pure_dict(state)

        def body(carry: Any, inputs: tuple[Any, Any]) -> tuple[Any, None]:
            layer_params, x = inputs
            if self.fsdp is not None:
                layer_params = self.fsdp.whole(layer_params, self.name, leading=1)
            return step(nnx.merge(graphdef, layer_params), carry, x), None

        if self.count <= UNROLLED_LAYERS:
            layer = jax.checkpoint(body) if self.remat else body
            for index in range(self.count):
                carry, _ = layer(carry, jax.tree.map(lambda leaf, at=index: leaf[at], (params, xs)))
            return carry
        # Inside a loop nothing can be merged with the forward pass, which is what prevent_cse guards against.
        layer = jax.checkpoint(body, prevent_cse=False) if self.remat else body
        return lax.scan(layer, carry, (params, xs))[0]

    def layer(self, index: int) -> LayerT:
        """One layer by itself: its parameters are copies."""
        graphdef, params = nnx.split(self.layers)
        return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[index], params))


def _stacked(make: Callable[[nnx.Rngs], LayerT], count: int, rngs: nnx.Rngs) -> LayerT:
    if not isinstance(rngs.params.key[...], jax.core.Tracer):
        layers = [nnx.split(make(rngs)) for _ in range(count)]
        # In numpy: eager JAX would compile a program per shape, in every process.
        state = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *(state for _, state in layers))
        return nnx.merge(layers[0][0], state)
    graphdefs: list[Any] = []

    def one(key: jax.Array) -> Any:
        graphdef, state = nnx.split(make(nnx.Rngs(key)))
        graphdefs.append(graphdef)
        return state

    state = jax.vmap(one)(jax.random.split(rngs.params(), count))
    return nnx.merge(graphdefs[0], state)
