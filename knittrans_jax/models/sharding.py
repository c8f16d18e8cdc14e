"""Which mesh axes each parameter is split over: an ordered list of patterns, of which the first that matches decides.

The mesh axes are those of `knittrans_jax.models.mesh`; a mesh may lack any, or have it in size 1. Over `sequence` keys and
values are gathered for attention, everything else is local. The encoder is data-parallel over all devices: its parameters are
split over `fsdp` for storage only. Every parameter must match a rule and divide evenly; otherwise an error names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from knittrans_jax.models.config import ModelConfig
from knittrans_jax.models.mesh import AXES, ROWS

Rule = tuple[str, tuple[str | tuple[str, ...] | None, ...]]
"""A regular expression for the whole dotted name, and for each array axis the mesh axes that split it (None: not split)."""


class ShardingError(ValueError):
    """A parameter has no rule, or cannot be split as its rule says."""


DECODER_RULES: tuple[Rule, ...] = (
    (r"decoder\.(embedding|head)", (("fsdp", "tensor"), None)),
    (r"decoder\.stacks\.\d+\.layers\.attention\.[qkv]\.kernel", (None, "fsdp", "tensor")),
    (r"decoder\.stacks\.\d+\.layers\.attention\.o\.kernel", (None, "tensor", "fsdp")),
    (r"decoder\.stacks\.\d+\.layers\.mlp\.(gate|up)\.kernel", (None, "fsdp", "tensor")),
    (r"decoder\.stacks\.\d+\.layers\.mlp\.down\.kernel", (None, "tensor", "fsdp")),
    (r"decoder\..*norm\.scale", ()),
)
ENCODER_RULES: tuple[Rule, ...] = (
    (r"encoder\.position_table", (None, "fsdp")),
    (r"encoder\.stacks\.\d+\.layers\..*\.kernel", (None, "fsdp", None)),
    (r"encoder\.(patch_embed|merger\.fc[12]|deepstack_mergers\.\d+\.fc[12])\.kernel", ("fsdp", None)),
    (r"encoder\..*\.(scale|bias)", ()),
)


def on_device(device: Any) -> NamedSharding:
    """Everything whole on one device. JAX's own name for that is deprecated since 0.12.1, and its successor not in 0.10."""
    return NamedSharding(Mesh(np.array([device], object), ("device",)), PartitionSpec())


def shard_rules(config: ModelConfig) -> tuple[Rule, ...]:
    """The rules of a model. A caller's own go before them: `my_rules + shard_rules(config)`."""
    return DECODER_RULES if config.vision is None else DECODER_RULES + ENCODER_RULES


def param_specs(params: Any, rules: Sequence[Rule], mesh_sizes: Mapping[str, int]) -> Any:
    """A tree of `PartitionSpec` like `params` (arrays or shapes).

    Args:
      params: nested dict; names are dotted paths, e.g. `decoder.stacks.0.layers.mlp.up.kernel`.
      rules: ordered; the first whose pattern matches the whole name decides. Axes beyond those that it names are not split.
      mesh_sizes: devices along each mesh axis (`mesh.shape`). A rule's axes that the mesh lacks split nothing.

    Raises:
      ShardingError: no rule matches; a rule has more entries than the parameter has axes; sizes do not divide.
    """
    unknown = sorted(set(mesh_sizes) - set(AXES))
    if unknown:
        raise ShardingError(f"mesh axes {unknown} are not known; expected some of {', '.join(AXES)}")
    return jax.tree.map_with_path(lambda path, leaf: _spec(_name(path), tuple(leaf.shape), rules, mesh_sizes), params)


def param_shardings(params: Any, rules: Sequence[Rule], mesh: Mesh) -> Any:
    """`param_specs` as a tree of `NamedSharding` of `mesh`."""
    specs = param_specs(params, rules, mesh.shape)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def rows_spec(mesh: Mesh) -> PartitionSpec:
    """Of arrays [rows, tokens, ...] of packed rows: rows over `data` and `fsdp`, tokens over `sequence`."""
    return PartitionSpec(_present(ROWS, mesh.shape), _present(("sequence",), mesh.shape))


def hidden_spec(mesh: Mesh) -> PartitionSpec:
    """Of hidden states [rows, tokens, D] between layers: as the rows, with features whole on every device.

    Without it XLA may prefer to move activations rather than gather an `fsdp` parameter.
    """
    return PartitionSpec(*rows_spec(mesh), None)


def _spec(name: str, shape: tuple[int, ...], rules: Sequence[Rule], sizes: Mapping[str, int]) -> PartitionSpec:
    pattern, axes = _rule(name, rules, f" {list(shape)}")
    if len(axes) > len(shape):
        raise ShardingError(f"parameter {name} {list(shape)}: its rule {pattern!r} has {len(axes)} entries: {axes}")
    entries = []
    for axis, (size, wanted) in enumerate(zip(shape, axes, strict=False)):
        names = (wanted,) if isinstance(wanted, str) else wanted or ()
        wrong = sorted(set(names) - set(AXES))
        if wrong:
            raise ShardingError(f"parameter {name}: its rule {pattern!r} names mesh axes {wrong}; expected {AXES}")
        parts = math.prod(sizes.get(mesh_axis, 1) for mesh_axis in names)
        if size % parts:
            raise ShardingError(
                f"parameter {name} {list(shape)}: axis {axis} of {size} does not divide over {parts} devices "
                f"({', '.join(f'{n} = {sizes.get(n, 1)}' for n in names)}); choose another mesh, or a rule of its own"
            )
        entries.append(_present(names, sizes))
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def split_axis(name: str, axis: str, rules: Sequence[Rule]) -> int | None:
    """The array axis of the parameter `name` that its rule splits over the mesh axis; None where it splits none.

    Raises:
        ShardingError: no rule matches.
    """
    _, axes = _rule(name, rules)
    return next((at for at, names in enumerate(axes) if names == axis or (names and axis in names)), None)


def _rule(name: str, rules: Sequence[Rule], shape: str = "") -> Rule:
    matching = next(((pattern, axes) for pattern, axes in rules if re.fullmatch(pattern, name)), None)
    if matching is None:
        raise ShardingError(
            f"no sharding rule matches parameter {name}{shape}: put a (pattern, mesh axes) pair for it before "
            "the model's shard_rules"
        )
    return matching


def _present(names: Sequence[str], sizes: Mapping[str, int]) -> str | tuple[str, ...] | None:
    """The axes that split something: not those of size 1, so that equal layouts have equal specs."""
    found = tuple(name for name in names if sizes.get(name, 1) > 1)
    return found[0] if len(found) == 1 else found or None


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
