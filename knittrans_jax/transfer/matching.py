"""Which rows a process brings, and how rows that several processes own become whole on each of them.

A consumer's sharding says which rows its devices own. Where all owners of a row are devices of one process, that process brings
it. Where devices of several processes own it (a tensor or sequence axis across hosts), the cells of a shard, micro-batch by
micro-batch, are dealt out among these processes, and an all-gather makes them whole: a program of its own, for the main thread.

What it guarantees:

* every cell is brought by exactly one process, and every owner ends with all its rows (`gather`);
* who brings what follows from `Sharding.addressable_devices_indices_map` alone, on the consumer's mesh or on one whose axes are
  the consumer's, cut into their prime factors: those along which the process changes deal out the cells;
* without rows that several processes own there is no further program and no padding.

A shard with fewer cells than owners leaves the later owners with none: a cell is never cut.

Symbols: C micro-batches of a chunk (1 for the encoder's input), R rows over all shards, S shards, K owners that share a shard's
cells, U = S K ceil(C R / (S K)) places for cells. Place u belongs to shard u // (U / S); there, cell i is micro-batch
i // (R / S) and row i % (R / S); places beyond the cells are padding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from knittrans_jax.transfer.pack import Cell

Gather = Callable[[Any], Any]
"""A jitted program: arrays of places [U, ...] -> the same as the consumer has them."""


def rows_to_feed(sharding: Sharding, global_shape: Sequence[int], axis: int) -> list[int]:
    """The global rows on `axis` that this process's devices own, sorted."""
    rows: set[int] = set()
    for index in sharding.addressable_devices_indices_map(tuple(global_shape)).values():
        if index is not None:
            rows.update(range(*index[axis].indices(global_shape[axis])))
    return sorted(rows)


@dataclasses.dataclass(frozen=True)
class Matching:
    """How arrays [C, R, ...] (`row_axis` 1) or [R, ...] (`row_axis` 0) come onto a mesh.

    `split` False: every process brings all rows that it owns, though others bring them too. Entries of the sharding's spec
    behind the row axis split an array's last axes (a sequence axis).
    """

    sharding: Sharding
    row_axis: int
    split: bool = True

    @functools.cached_property
    def gathers(self) -> bool:
        """Some rows are owned by several processes, which share them out: `gather` must be run."""
        return self.split and bool(self._sharing_axes)

    def cells(self, micro_batches: int, rows: int) -> list[Cell | None]:
        """What this process brings, in the order of its local array's leading axes; None is padding."""
        if not self.gathers:
            shape = (micro_batches, rows) if self.row_axis else (rows,)
            own = rows_to_feed(self._rows_sharding, shape, self.row_axis)
            return [(c, r) for c in range(micro_batches) for r in own]
        shards, rows_per_shard, places = self._sizes(micro_batches, rows)
        found: list[Cell | None] = []
        for place in rows_to_feed(self._places_sharding, (shards * places,), 0):
            shard, cell = divmod(place, places)
            c, r = divmod(cell, rows_per_shard)
            found.append((c, shard * rows_per_shard + r) if c < micro_batches else None)
        return found

    def owned(self, micro_batches: int, rows: int) -> int:
        """How many cells this process's devices own."""
        shape = (micro_batches, rows) if self.row_axis else (rows,)
        return micro_batches * len(rows_to_feed(self._rows_sharding, shape, self.row_axis))

    def to_mesh(self, array: np.ndarray, micro_batches: int, rows: int) -> jax.Array:
        """A global array from this process's cells, [len(cells), ...]: of places when `gathers`, else as consumed."""
        rest = array.shape[1:]
        if self.gathers:
            shards, _, places = self._sizes(micro_batches, rows)
            return jax.make_array_from_process_local_data(self._places_sharding, array, (shards * places, *rest))
        if self.row_axis:
            array = array.reshape(micro_batches, -1, *rest)
            return jax.make_array_from_process_local_data(
                self._sharding_of(array.ndim), array, (micro_batches, rows, *rest)
            )
        return jax.make_array_from_process_local_data(self._sharding_of(array.ndim), array, (rows, *rest))

    def gather(self, micro_batches: int, rows: int) -> Gather:
        """The program that makes places whole; the same object for the same sizes."""
        return _gather(self, micro_batches, rows)

    # --- the mesh of places -----------------------------------------------------------------------------------------------

    @functools.cached_property
    def _factored(self) -> tuple[Mesh, dict[str, tuple[str, ...]]]:
        """The consumer's mesh with every axis cut into its prime factors, outermost first -> (mesh, new names by old)."""
        assert isinstance(self.sharding, NamedSharding)
        mesh = self.sharding.mesh
        assert isinstance(mesh, Mesh)
        sizes, names = [], {}
        for axis, size in mesh.shape.items():
            factors = _prime_factors(size)
            names[axis] = tuple(f"{axis}.{i}" for i in range(len(factors)))
            sizes += factors
        flat = tuple(name for cut in names.values() for name in cut)
        devices = mesh.devices.reshape(sizes)
        return Mesh(devices, flat, axis_types=(AxisType.Auto,) * len(flat)), names

    @functools.cached_property
    def _row_axes(self) -> tuple[str, ...]:
        """Axes of the factored mesh that split the rows."""
        assert isinstance(self.sharding, NamedSharding)
        spec = self.sharding.spec
        entry = spec[self.row_axis] if len(spec) > self.row_axis else None
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        return tuple(name for axis in axes for name in self._factored[1][axis])

    @functools.cached_property
    def _sharing_axes(self) -> tuple[str, ...]:
        """Axes of the factored mesh that do not split the rows, and along which the process changes."""
        if not isinstance(self.sharding, NamedSharding):
            return ()
        mesh, _ = self._factored
        processes = np.vectorize(lambda device: device.process_index, otypes=[np.int64])(mesh.devices)
        return tuple(
            name
            for at, name in enumerate(mesh.axis_names)
            if name not in self._row_axes and (processes != processes.take([0], axis=at)).any()
        )

    @functools.cached_property
    def _places_sharding(self) -> NamedSharding:
        return NamedSharding(self._factored[0], P((*self._row_axes, *self._sharing_axes)))

    def _sizes(self, micro_batches: int, rows: int) -> tuple[int, int, int]:
        """(S, R / S, U / S)."""
        mesh = self._factored[0]
        shards = math.prod(mesh.shape[axis] for axis in self._row_axes)
        owners = math.prod(mesh.shape[axis] for axis in self._sharing_axes)
        if rows % shards:
            raise ValueError(f"{rows} rows do not divide over {shards} shards")
        return shards, rows // shards, owners * math.ceil(micro_batches * rows / shards / owners)

    @functools.cached_property
    def _rows_sharding(self) -> Sharding:
        """The sharding up to the row axis."""
        if not isinstance(self.sharding, NamedSharding):
            return self.sharding
        return NamedSharding(self.sharding.mesh, P(*tuple(self.sharding.spec)[: self.row_axis + 1]))

    def _sharding_of(self, ndim: int) -> Sharding:
        """The consumer's sharding of an array of so many axes: entries behind the rows' belong to its last axes."""
        sharding, head = self.sharding, self.row_axis + 1
        if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= head:
            return sharding
        tail = tuple(sharding.spec)[head:]
        spec = P(*tuple(sharding.spec)[:head], *(None,) * (ndim - head - len(tail)), *tail)
        return NamedSharding(sharding.mesh, spec)


@functools.lru_cache(maxsize=256)
def _gather(matching: Matching, micro_batches: int, rows: int) -> Gather:
    mesh, _ = matching._factored
    _, rows_per_shard, _ = matching._sizes(micro_batches, rows)
    row_axes, sharing = matching._row_axes, matching._sharing_axes

    def local(part: jax.Array) -> jax.Array:
        whole = lax.all_gather(part, sharing, tiled=True)[: micro_batches * rows_per_shard]
        return whole.reshape(micro_batches, rows_per_shard, *part.shape[1:]) if matching.row_axis else whole

    def run(places: Any) -> Any:
        out_spec = P(None, row_axes) if matching.row_axis else P(row_axes)
        gathered = jax.shard_map(
            lambda arrays: jax.tree.map(local, arrays),
            mesh=mesh,
            in_specs=(P((*row_axes, *sharing)),),
            out_specs=out_spec,
            check_vma=False,
        )(places)
        return jax.tree.map(lambda x: lax.with_sharding_constraint(x, matching._sharding_of(x.ndim)), gathered)

    return jax.jit(run)


def _prime_factors(number: int) -> list[int]:
    factors, factor = [], 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return factors


__all__ = ["Gather", "Matching", "rows_to_feed"]
