"""One update of a mini-batch by a mode of the encoder: `StepPrograms` in the order of `train/process.py`, timed whole.

Programs are compiled ahead of their calls, so that the compiler's account of their memory is that of what is timed, and once
for all mini-batches of the same shapes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from knittrans_jax.benchmarks.encoding_cases import SAMPLED_IDS, SPEC, MiniBatch, bench_model
from knittrans_jax.config import ObjectiveConfig
from knittrans_jax.encoding.modes import ConfiguredMode, EncoderWork, ResidualOptions, plan_encoding
from knittrans_jax.models import abstract_model
from knittrans_jax.models.fsdp import Fsdp
from knittrans_jax.models.sharding import shard_rules
from knittrans_jax.train.layout import TRAIN_AXES
from knittrans_jax.train.state import TrainState
from knittrans_jax.train.step import StepPrograms
from knittrans_jax.transfer import pack
from knittrans_jax.transfer.batch import CHUNK_ROW_AXIS, ChunkArrays, ImageArrays
from knittrans_jax.transfer.loader import rows_to_feed


def make_programs(data: int, fsdp: int, optimizer: optax.GradientTransformation) -> tuple[StepPrograms, Any]:
    """The programs of an update of the benchmark's model on a mesh of `data * fsdp` devices -> (programs, parameter shapes)."""
    config = bench_model()
    rules = Fsdp("fsdp", shard_rules(config), jnp.float32) if fsdp > 1 else None
    model, shapes = abstract_model(config, jnp.float32, jnp.float32, fsdp=rules)
    devices = jax.devices()[: data * fsdp]
    mesh = jax.make_mesh((data, fsdp, 1), TRAIN_AXES, (AxisType.Auto,) * len(TRAIN_AXES), devices=devices)
    return StepPrograms(model, ObjectiveConfig(), optimizer, mesh, SAMPLED_IDS, 1.0), shapes


@dataclasses.dataclass(frozen=True)
class Batch:
    """A mini-batch on the mesh, as the loader hands it to the trainer: all micro-batches in one chunk."""

    work: EncoderWork
    chunk: ChunkArrays
    images: ImageArrays
    """The table's, or the micro-batches' own with a leading axis."""
    denominator: np.float32


def load(mini_batch: MiniBatch, programs: StepPrograms, configured: ConfiguredMode, options: ResidualOptions) -> Batch:
    """Packs this process's rows and puts them on the mesh."""
    plan = mini_batch.plan
    work = plan_encoding(plan, configured, SPEC, None, options)
    shape = pack.chunk_shape(plan)
    rows = rows_to_feed(programs.chunk_sharding, shape, CHUNK_ROW_AXIS)
    if work.copies is not None:
        copies_shape = pack.copies_shape(plan, work.copies, SPEC)
        encoder_rows = rows_to_feed(programs.chunk_sharding, copies_shape, CHUNK_ROW_AXIS)
        count = plan.chunk_micro_batches
        cells = pack.product_cells(count, encoder_rows)
        flat = pack.pack_copies(plan, 0, cells, mini_batch.media, SPEC, work.copies)
        packed = ImageArrays(*(array.reshape(count, len(encoder_rows), *array.shape[1:]) for array in flat))
        images = _to_mesh(packed, programs.chunk_sharding, CHUNK_ROW_AXIS, copies_shape[1])
    else:
        image_shape = pack.image_shape(plan, SPEC)
        encoder_rows = rows_to_feed(programs.image_sharding, image_shape, 0)
        images = _to_mesh(
            pack.pack_images(plan, encoder_rows, mini_batch.media, SPEC), programs.image_sharding, 0, image_shape[0]
        )
    packed = pack.pack_chunk(plan, 0, rows, mini_batch.trajectories, _advantages, SPEC, work.copies)
    chunk = _to_mesh(packed, programs.chunk_sharding, CHUNK_ROW_AXIS, shape[1])
    return Batch(work, ChunkArrays(*chunk), ImageArrays(*images), np.float32(plan.sampled_tokens))


def _advantages(rewards: Sequence[float]) -> np.ndarray:
    """Never all zero, which a group's own would be at n = 1."""
    return np.asarray(rewards, np.float32) - np.float32(0.4)


def _to_mesh(arrays: Sequence[np.ndarray], sharding: Any, axis: int, rows: int) -> list[jax.Array]:
    shapes = [(*array.shape[:axis], rows, *array.shape[axis + 1 :]) for array in arrays]
    return [
        jax.make_array_from_process_local_data(sharding, array, shape)
        for array, shape in zip(arrays, shapes, strict=True)
    ]


class Clocks(NamedTuple):
    """Two clocks, or what passed on them."""

    wall_s: float
    cpu_s: float

    def plus(self, other: Clocks) -> Clocks:
        """Sum."""
        return Clocks(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)

    def minus(self, other: Clocks) -> Clocks:
        """Difference."""
        return Clocks(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)


def now() -> Clocks:
    """Both clocks."""
    return Clocks(time.perf_counter(), time.process_time())


class Compiled:
    """The programs of an update, compiled for the shapes that they are called with."""

    def __init__(self, programs: StepPrograms) -> None:
        self.programs = programs
        self.compile_s = Clocks(0.0, 0.0)
        self._compiled: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, name: str, *arguments: Any, static: tuple[Any, ...] = ()) -> Any:
        """The program `name` of `StepPrograms` for these arguments; `static` ones follow them."""
        leaves, structure = jax.tree.flatten(arguments)
        key = (name, static, structure, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._compiled:
            began_s = now()
            self._compiled[key] = getattr(self.programs, name).lower(*arguments, *static).compile()
            self.compile_s = self.compile_s.plus(now().minus(began_s))
        return self._compiled[key]


@dataclasses.dataclass(frozen=True)
class Update:
    """What an update did."""

    state: TrainState
    wall_s: float
    cpu_s: float
    """Processor seconds of this process, all threads: what other processes do disturbs it little."""
    peak_bytes: int
    """Most memory on a device during any of its programs, by the compiler's account of each and by what else lies there."""


def run_update(compiled: Compiled, batch: Batch, state: TrainState) -> Update:
    """Trains on the batch; `state` is donated. What has to be compiled is compiled off the clock."""
    peaks: list[int] = []
    began_s, compile_s = now(), compiled.compile_s

    def call(name: str, *arguments: Any, static: tuple[Any, ...] = (), beside: Any = ()) -> Any:
        program = compiled.get(name, *arguments, static=static)
        peaks.append(_peak_bytes(program) + device_bytes(beside))
        return program(*arguments)

    table = residuals = None
    images, chunk, work = batch.images, batch.chunk, batch.work
    copies = work.copies is not None
    if work.keep:
        table, residuals = call("encode_and_keep", state.params, images, beside=(state.opt_state, chunk))
    elif not copies:
        table = call("encode", state.params, images, beside=(state.opt_state, chunk))
    rows = 0 if table is None else table.shape[0]
    held = (state.opt_state, images, table, residuals)
    sums = call("start", state.params, static=(rows, copies), beside=(held, chunk))
    if copies:
        sums = call("accumulate_copies", state.params, images, chunk, sums, beside=state.opt_state)
    else:
        held = (state.opt_state, images, residuals)
        sums = call("accumulate", state.params, table, chunk, sums, beside=held)
    del table
    encoded = None if copies else images
    beside = (chunk, images) if copies else chunk
    state, _ = call("finish", state, encoded, sums, batch.denominator, residuals, beside=beside)
    jax.block_until_ready(state)
    took_s = now().minus(began_s).minus(compiled.compile_s.minus(compile_s))
    return Update(state, took_s.wall_s, took_s.cpu_s, max(peaks))


def device_bytes(tree: Any) -> int:
    """Bytes of all arrays on the first of their devices."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return sum(array.addressable_shards[0].data.nbytes for array in arrays)


def _peak_bytes(program: Any) -> int:
    memory = program.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )
