"""Ahead-of-time compilation of every program for a TPU that is not there.

The real TPU compiler (libtpu) runs on any Linux machine: it needs a topology's name and no chip. What it reports is what a pod
of that shape would get: memory per device, FLOPs, collectives, and an error where a program does not fit or does not compile.
It does not report time.

1. `topology_devices` describes the devices to JAX; 2. `run_programs` gives every program of a run with the shapes, and the
shardings over those devices, that it is called with; 3. `compile_report` compiles one and reads the compiler's figures.

The training programs run on a mesh over all devices of the topology: `fsdp` and `tensor` as configured, `data` what is left.
Every data shard has the micro-batch of the configuration. The sampler runs on one device. Programs that differ by the plan
(encoder rows) are compiled at the most that a mini-batch can need.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table

from knittrans_jax.config import Config, ConfigError
from knittrans_jax.launch.collectives import Collective, count_kinds, read_collectives
from knittrans_jax.observe.table import size

if TYPE_CHECKING:
    from jax.sharding import Mesh

GENERATIONS = {
    # name: (accelerator type, cores that its name counts for each chip)
    "v4": ("v4", 2),
    "v5e": ("v5litepod", 1),
    "v5p": ("v5p", 2),
    "v6e": ("v6e", 1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """What the compiler says of one program. Bytes and FLOPs are per device and call; a loop's body counts once."""

    name: str
    devices: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    aliased_bytes: int
    """Of the outputs, those that reuse an argument's memory."""
    flops: float
    bytes_accessed: float
    collectives: tuple[Collective, ...]
    """As they stand in the program."""

    @property
    def peak_bytes(self) -> int:
        """Memory on each device while the program runs."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes - self.aliased_bytes

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            **dataclasses.asdict(self),
            "peak_bytes": self.peak_bytes,
            "collectives": count_kinds(self.collectives),
            "collectives_in_loops": count_kinds([one for one in self.collectives if one.loops]),
            "collective_bytes": sum(one.result_bytes for one in self.collectives),
        }


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function, and the arguments to lower it with."""

    name: str
    jitted: Any
    arguments: tuple[Any, ...]
    devices: int


def compile_for_topology(config: Config, topology: str) -> list[ProgramReport]:
    """Compiles every program of a run for a TPU topology.

    Raises:
        ConfigError: the topology's name, or libtpu is not installed.
        jax.errors.JaxRuntimeError: the compiler refuses a program; the error says which and why.
    """
    devices = topology_devices(topology)
    return [compile_report(program) for program in run_programs(config, devices)]


def topology_devices(topology: str) -> Sequence[Any]:
    """The devices of a topology such as `v5e:4x4`. Sets the variables that libtpu reads, so no TPU is looked for.

    Raises:
        ConfigError: no such name, or libtpu is not installed.
    """
    generation, _, shape = topology.partition(":")
    if generation not in GENERATIONS or not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise ConfigError(
            f"--topology: expected a name such as v5e:4x4, of one of {', '.join(GENERATIONS)} (value {topology!r})"
        )
    kind, cores_per_chip = GENERATIONS[generation]
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_LIBRARY_PATH"] = str(_libtpu())
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no chip is used, so there is nothing to keep from another process
    os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
    os.environ["TPU_ACCELERATOR_TYPE"] = f"{kind}-{math.prod(map(int, shape.split('x'))) * cores_per_chip}"

    import jax
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise ConfigError(f"--topology: the TPU compiler does not take it: {error} (value {topology!r})") from error


def _libtpu() -> Path:
    found = importlib.util.find_spec("libtpu")
    library = None if found is None or not found.origin else Path(found.origin).parent / "libtpu.so"
    if library is None or not library.is_file():
        raise ConfigError(
            "--topology: the TPU compiler is not installed here; install the extra `tpu`: pip install 'knittrans-jax[tpu]' "
            "(no TPU is needed)"
        )
    return library


# --- the programs of a run ---------------------------------------------------------------------------------------------------


def run_programs(config: Config, devices: Sequence[Any]) -> Iterator[Program]:
    """Every program of a run: training over all devices, the sampler on the first."""
    yield from train_programs(config, topology_mesh(config, devices))
    yield from sampler_programs(config, devices[0])


def topology_mesh(config: Config, devices: Sequence[Any]) -> Mesh:
    """The configuration's mesh over other devices than its own: `data` has what `fsdp` and `tensor` leave.

    Raises:
        ConfigError: they leave no whole number.
    """
    import msgspec

    from knittrans_jax.train.setup import make_mesh

    split = {axis: count for axis, count in config.train.mesh.items() if axis != "data"}
    data, rest = divmod(len(devices), math.prod(split.values()))
    if rest or not data:
        raise ConfigError(
            f"train.mesh: fsdp and tensor do not divide the {len(devices)} devices that there are (value {config.train.mesh})"
        )
    train = msgspec.structs.replace(config.train, mesh={"data": data, **split})
    return make_mesh(msgspec.structs.replace(config, train=train), devices)


def train_programs(config: Config, mesh: Mesh) -> Iterator[Program]:
    """The programs of an update, as `knittrans_jax.train.process` calls them."""
    import jax
    import jax.numpy as jnp

    from knittrans_jax.encoding.modes import cached_table_rows
    from knittrans_jax.models.run_model import run_model
    from knittrans_jax.rollout.tasks.registry import load_task
    from knittrans_jax.train.setup import build_programs
    from knittrans_jax.transfer.batch import ChunkArrays, ImageArrays

    task = load_task(config.task, config.seed)
    programs = build_programs(config, task, mesh)
    structure, params = run_model(config.model, task.vocabulary)
    model = structure.config
    train, shards, devices = config.train, programs.shards, mesh.size
    pixels = jnp.uint8 if train.transfer == "on_demand" else jnp.float32

    def shaped(tree: Any, shardings: Any) -> Any:
        """`shardings`: a tree like `tree`, or one for all of it."""
        if isinstance(shardings, jax.sharding.Sharding):
            shardings = jax.tree.map(lambda _: shardings, tree)
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)

    def chunk_field(dtype: Any, *inner: int) -> jax.ShapeDtypeStruct:
        shape = (train.chunk_micro_batches, shards * train.micro_batch_rows, *inner, train.row_tokens)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=programs.chunk_sharding)

    def images(rows_per_shard: int, *leading: int) -> ImageArrays:
        assert model.vision is not None
        rows, patches = shards * rows_per_shard, train.encoder_row_patches
        sharding = programs.chunk_sharding if leading else programs.image_sharding

        def field(dtype: Any, *inner: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*leading, rows, patches, *inner), dtype, sharding=sharding)

        return ImageArrays(
            field(pixels, model.vision.patch_features), field(jnp.int32, 2), field(jnp.int32, 2), field(jnp.int32)
        )

    chunk = ChunkArrays(
        tokens=chunk_field(jnp.int32),
        segment_ids=chunk_field(jnp.int32),
        positions=chunk_field(jnp.int32, 3),
        sampled=chunk_field(jnp.bool_),
        fresh=chunk_field(jnp.bool_),
        behaviour_logprobs=chunk_field(jnp.float32),
        advantages=chunk_field(jnp.float32),
        table_index=chunk_field(jnp.int32),
    )
    frozen = programs.frozen_encoder
    state = shaped(jax.eval_shape(programs.init, params), programs.state_shardings)
    params = state.params
    denominator = jax.ShapeDtypeStruct((), jnp.float32, sharding=programs.replicated)
    rows_per_shard = encoder_rows_per_shard(config, shards)
    copied = train.encoder_mode in ("per_micro_batch", "per_micro_batch_unique") and rows_per_shard > 0
    encoded = images(rows_per_shard) if rows_per_shard and not copied else None
    table = residuals = None
    if encoded is not None and frozen:
        cached = cached_table_rows(config, model)
        table = shaped(jax.eval_shape(lambda: programs.empty_table(cached)), programs.replicated)
        rows = encoded.patches.shape[0] * encoded.patches.shape[1] // model.vision.merge_size**2  # pyright: ignore[reportOptionalMemberAccess]
        insert = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=programs.replicated)
        yield Program("insert", programs.insert, (table, params, encoded, insert), devices)
        encoded = None
    elif encoded is not None and train.encoder_residuals == "keep":
        yield Program("encode_and_keep", programs.encode_and_keep, (params, encoded), devices)
        shapes = jax.eval_shape(programs.encode_and_keep, params, encoded)
        table = shaped(shapes[0], programs.replicated)
        residuals = shaped(shapes[1], programs.residual_sharding)
    elif encoded is not None:
        yield Program("encode", programs.encode, (params, encoded), devices)
        table = shaped(jax.eval_shape(programs.encode, params, encoded), programs.replicated)
    table_rows = 0 if table is None or frozen else table.shape[0]
    zeros: Callable[[Any], Any] = lambda p: programs.start(p, table_rows, copied)  # noqa: E731
    sums = shaped(jax.eval_shape(zeros, params), programs.sums_shardings(copied))
    yield Program("start", programs.start, (params, table_rows, copied), devices)
    if copied:
        copies = images(rows_per_shard, train.chunk_micro_batches)
        yield Program("accumulate_copies", programs.accumulate_copies, (params, copies, chunk, sums), devices)
    else:
        yield Program("accumulate", programs.accumulate, (params, table, chunk, sums), devices)
    yield Program("finish", programs.finish, (state, encoded, sums, denominator, residuals), devices)


def sampler_programs(config: Config, device: Any) -> Iterator[Program]:
    """The programs of an engine, on one device."""
    import jax

    from knittrans_jax.models.run_model import run_model
    from knittrans_jax.models.sharding import on_device
    from knittrans_jax.rollout import sampler
    from knittrans_jax.rollout.device import sampler_shapes
    from knittrans_jax.rollout.tasks.registry import load_task

    task = load_task(config.task, config.seed)
    model, params = run_model(config.model, task.vocabulary)
    shapes = sampler_shapes(config.rollout, task.limits, model.config)
    programs = sampler.sampler_programs(model, shapes, tuple(task.sampled_ids), config.rollout.temperature)
    sharding = on_device(device)

    def place(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if isinstance(x, jax.ShapeDtypeStruct) else x

    for name, (jitted, arguments) in programs.signatures(params).items():
        yield Program(f"sampler {name}", jitted, jax.tree.map(place, arguments), 1)


def encoder_rows_per_shard(config: Config, shards: int) -> int:
    """Encoder rows of a shard when every turn of every group of a mini-batch shows another image; 0 without images."""
    from knittrans_jax.encoding.patches import grid_of
    from knittrans_jax.models.run_model import model_config
    from knittrans_jax.rollout.tasks.registry import load_task
    from knittrans_jax.transfer.plan import bucket_rows

    task = load_task(config.task, config.seed)
    vision = model_config(config.model, task.vocabulary).vision
    limits = task.limits
    if vision is None or not limits.image_shapes or not limits.images_per_turn:
        return 0
    grids = [grid_of(shape, vision.patch_size, vision.merge_size) for shape in limits.image_shapes]
    per_row = config.train.encoder_row_patches // max(rows * columns for rows, columns in grids)
    images = config.mini_batch_groups * limits.turns * limits.images_per_turn
    return bucket_rows(math.ceil(math.ceil(images / per_row) / shards))


# --- the compiler's figures --------------------------------------------------------------------------------------------------


def compile_report(program: Program, compiler_options: dict[str, Any] | None = None) -> ProgramReport:
    """Compiles a program for the devices that its arguments' shardings name, and reads the compiler's figures."""
    compiled = program.jitted.lower(*program.arguments).compile(compiler_options)
    memory = compiled.memory_analysis()
    cost = compiled.cost_analysis() or {}
    return ProgramReport(
        name=program.name,
        devices=program.devices,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        flops=float(cost.get("flops", 0.0)),
        bytes_accessed=float(cost.get("bytes accessed", 0.0)),
        collectives=tuple(read_collectives(compiled.as_text())),
    )


def report_table(topology: str, reports: Sequence[ProgramReport]) -> RenderableType:
    """The figures for a person."""
    table = Table(title=f"compiled for {topology}, per device", title_justify="left", header_style="bold cyan")
    table.add_column("program", no_wrap=True)
    for column in ("devices", "memory", "temporary", "FLOPs"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("collectives", overflow="fold")
    for one in reports:
        table.add_row(
            one.name,
            str(one.devices),
            size(one.peak_bytes),
            size(one.temporary_bytes),
            f"{one.flops:.2g}",
            _collectives(one.collectives),
        )
    return table


def _collectives(found: Sequence[Collective]) -> str:
    """`all-reduce 1 (64 MB), in loops: all-gather 14 (120 MB)`; bytes are of one pass through each loop."""
    parts = []
    for place, here in (
        ("", [one for one in found if not one.loops]),
        ("in loops: ", [one for one in found if one.loops]),
    ):
        if here:
            kinds = ", ".join(f"{count} {kind}" for kind, count in count_kinds(here).items())
            parts.append(f"{place}{kinds} ({size(sum(one.result_bytes for one in here))})")
    return "; ".join(parts) or "none"
