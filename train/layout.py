"""How everything that an update computes with lies on the training mesh `data` x `fsdp` x `tensor`.

| what | lies |
|---|---|
| rows of a chunk | split over (`data`, `fsdp`), the same on every device of `tensor`: these are the data shards |
| parameters, Adam's moments | split over `fsdp` and `tensor` by the sharding rules, the same on every device of `data` |
| gradient sums, where `fsdp` splits the parameter | the device's part, already summed over `fsdp`; one per device of `data` |
| gradient sums of other parameters, figures | one per data shard |
| the table's cotangent | one per data shard, whole; the same on every device of `tensor` |

So a leaf of the sums has a leading axis of `data`, or of all data shards, and is otherwise split as its parameter is. An axis
that a configuration does not name has size 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from knittrans_jax.models import ModelConfig, abstract_model
from knittrans_jax.models.mesh import ROWS
from knittrans_jax.models.sharding import param_specs, shard_rules
from knittrans_jax.transfer.weights import tree_names

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
TRAIN_AXES = (DATA, FSDP, TENSOR)
"""The axes that every training mesh has, in this order."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Specs and shardings for one model and mesh; the mesh has `TRAIN_AXES`."""

    config: ModelConfig
    mesh: Mesh

    def __post_init__(self) -> None:
        if self.mesh.axis_names != TRAIN_AXES:
            raise ValueError(f"a training mesh has the axes {TRAIN_AXES}, got {self.mesh.axis_names}")

    @property
    def shards(self) -> int:
        """Number of data shards."""
        return math.prod(self.mesh.shape[axis] for axis in ROWS)

    @property
    def splits_params(self) -> bool:
        """Some parameters are split; otherwise every device has all of them."""
        return self.mesh.shape[FSDP] * self.mesh.shape[TENSOR] > 1

    @property
    def vocabulary_axis(self) -> str | None:
        """The manual axis over which the vocabulary is split, where it is."""
        return FSDP if self.mesh.shape[FSDP] > 1 else None

    @functools.cached_property
    def params(self) -> Any:
        """A tree of `PartitionSpec` like the parameters."""
        return param_specs(abstract_model(self.config)[1], shard_rules(self.config), self.mesh.shape)

    @functools.cached_property
    def sums(self) -> Any:
        """Specs of the gradient sums, a tree like the parameters."""
        return map_specs(lambda spec: P(DATA if _names(spec, FSDP) else ROWS, *spec), self.params)

    def not_split(self, spec: P, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Those of `axes` that a parameter of this spec is not split over by `fsdp`: its gradient is summed there already."""
        return tuple(axis for axis in axes if axis != FSDP or not _names(spec, FSDP))

    def sharding(self, spec: P) -> NamedSharding:
        """Of this mesh."""
        return NamedSharding(self.mesh, spec)

    def shardings(self, specs: Any) -> Any:
        """A tree of specs as shardings of this mesh."""
        return map_specs(self.sharding, specs)

    def state(self, state: Any) -> Any:
        """Shardings of a training state (arrays or shapes): whatever is called and shaped as a parameter lies as it does."""
        shapes = tree_names(abstract_model(self.config)[1])
        specs = tree_names_of_specs(self.params)

        def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            parts = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
            for first in range(len(parts)):
                name = ".".join(parts[first:])
                if name in shapes and shapes[name].shape == leaf.shape:
                    return self.sharding(specs[name])
            return self.sharding(P())

        return jax.tree.map_with_path(place, state)


def map_specs(f: Any, *trees: Any) -> Any:
    """`jax.tree.map` over trees of specs, which are trees themselves to JAX."""
    return jax.tree.map(f, *trees, is_leaf=lambda x: isinstance(x, P))


def tree_names_of_specs(specs: Any) -> dict[str, P]:
    """Specs by dotted name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda x: isinstance(x, P))
    return {jax.tree_util.keystr(path, simple=True, separator="."): spec for path, spec in leaves}


def without(spec: P, axis: str) -> P:
    """The spec without a mesh axis: what a `shard_map` sees for which that axis is automatic."""

    def one(entry: Any) -> Any:
        if isinstance(entry, tuple):
            left = tuple(name for name in entry if name != axis)
            return left or None
        return None if entry == axis else entry

    return P(*(one(entry) for entry in spec))


def _names(spec: P, axis: str) -> bool:
    return any(axis in (entry if isinstance(entry, tuple) else (entry,)) for entry in spec if entry)
