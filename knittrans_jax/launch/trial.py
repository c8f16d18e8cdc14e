"""Runs every program of a run on the devices at hand, with random weights and made-up rows: does it fit, how long does it take?

Nothing is trained, sampled or moved between roles. The shapes, shardings and programs are those of `launch/topology.py`, which
are those of a run; `data` takes the devices that `fsdp` and `tensor` leave. One process, so one host. A program's time depends
on its shapes and not on what is in the arrays; all the same loss and gradient must be finite.

1. one update: encode, start, accumulate a chunk, finish; 2. the sampler's programs on the first device. Each is called once to
compile, then `CALLS` times.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table

from knittrans_jax.config import Config
from knittrans_jax.launch.environment import JAX_PLATFORMS
from knittrans_jax.launch.topology import Program, sampler_programs, topology_mesh, train_programs
from knittrans_jax.observe.table import size

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh

    from knittrans_jax.transfer.batch import ChunkArrays, ImageArrays

CALLS = 3


class TrialError(RuntimeError):
    """A program gave numbers that are not finite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramTime:
    """Of one program: seconds of its first call, compilation included, and the median of further ones."""

    name: str
    devices: int
    first_s: float
    call_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What was run, on what, and how long it took."""

    device: str
    mesh: dict[str, int]
    programs: tuple[ProgramTime, ...]
    update_tokens: int
    """Tokens of a chunk over all data shards, padding included."""
    loss: float
    grad_norm: float
    peak_bytes: int | None
    """Most memory that the first device held; None where it does not say."""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return dataclasses.asdict(self)


def run_trial(config: Config) -> Trial:
    """Runs every program on this process's devices.

    Raises:
        ConfigError: the mesh does not fit the devices.
        TrialError: loss or gradient is not finite.
    """
    import jax

    train = config.train
    jax.config.update("jax_platforms", JAX_PLATFORMS[config.platform])
    if config.platform == "cpu":
        jax.config.update("jax_num_cpu_devices", train.processes * train.devices_per_process)
    devices = jax.local_devices()
    mesh = topology_mesh(config, devices)
    times, tokens, loss, grad_norm = _run_update(config, mesh)
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        raise TrialError(f"loss {loss}, gradient norm {grad_norm}: not finite with random weights and made-up rows")
    peak_bytes = (devices[0].memory_stats() or {}).get("peak_bytes_in_use")
    for program in sampler_programs(config, devices[0]):
        times.append(_timed(program, functools.partial(_sampler_arguments, program))[1])
    return Trial(
        device=f"{len(devices)} x {devices[0].device_kind}",
        mesh=dict(mesh.shape),
        programs=tuple(times),
        update_tokens=tokens,
        loss=loss,
        grad_norm=grad_norm,
        peak_bytes=peak_bytes,
    )


def _run_update(config: Config, mesh: Mesh) -> tuple[list[ProgramTime], int, float, float]:
    """-> (times, tokens of a chunk, loss, gradient norm). What it made is gone when it returns."""
    import numpy as np

    from knittrans_jax.rollout.tasks.registry import load_task
    from knittrans_jax.train.setup import set_up_training

    task = load_task(config.task, config.seed)
    rng = np.random.default_rng(config.seed)
    state = set_up_training(config, task, mesh).state
    programs = {program.name: program for program in train_programs(config, mesh)}
    times: list[ProgramTime] = []

    def run(name: str, arguments: Callable[[], tuple[Any, ...]]) -> Any:
        result, took = _timed(programs[name], arguments)
        times.append(took)
        return result

    images = table = residuals = None
    if "encode_and_keep" in programs:
        images = _made_images(programs["encode_and_keep"].arguments[1], rng)
        table, residuals = run("encode_and_keep", lambda: (state.params, images))
    elif "encode" in programs:
        images = _made_images(programs["encode"].arguments[1], rng)
        table = run("encode", lambda: (state.params, images))
    elif "insert" in programs:
        empty, _, some, rows = programs["insert"].arguments
        inserted, places = _made_images(some, rng), _placed(np.arange(rows.shape[0], dtype=np.int32), rows)
        table = run("insert", lambda: (_zeros(empty), state.params, inserted, places))
    static = programs["start"].arguments[1:]
    zeros = run("start", lambda: (state.params, *static))
    copied = "accumulate_copies" in programs
    name = "accumulate_copies" if copied else "accumulate"
    _, shown, rows, _ = programs[name].arguments
    shown = _made_images(shown, rng) if copied else table
    table_rows = 0 if table is None else table.shape[0]
    chunk = _made_chunk(rows, np.asarray(task.sampled_ids, np.int32), table_rows, rng)
    sums = run(name, lambda: (state.params, shown, chunk, _copy(zeros)))
    tokens = math.prod(chunk.tokens.shape)
    _, figures = run("finish", lambda: (_copy(state), images, sums, np.float32(tokens), residuals))
    return times, tokens, float(figures["loss"]), float(figures["grad_norm"])


def _timed(program: Program, arguments: Callable[[], tuple[Any, ...]]) -> tuple[Any, ProgramTime]:
    """The result of the last call, and the times; `arguments` are made anew for each, since some are donated."""
    import jax

    result, seconds = None, []
    for _ in range(1 + CALLS):
        made = jax.block_until_ready(arguments())
        began_s = time.perf_counter()
        result = jax.block_until_ready(program.jitted(*made))
        seconds.append(time.perf_counter() - began_s)
        del made
    calls_s = statistics.median(seconds[1:])
    return result, ProgramTime(name=program.name, devices=program.devices, first_s=seconds[0], call_s=calls_s)


def trial_table(trial: Trial) -> RenderableType:
    """The figures for a person."""
    mesh = " x ".join(f"{axis} {count}" for axis, count in trial.mesh.items())
    table = Table(title=f"run on {trial.device}, mesh {mesh}", title_justify="left", header_style="bold cyan")
    table.add_column("program", no_wrap=True)
    for column in ("devices", "first call", "call"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in trial.programs:
        table.add_row(one.name, str(one.devices), f"{one.first_s:.2f} s", f"{one.call_s * 1000:.2f} ms")
    peak = "unknown" if trial.peak_bytes is None else size(trial.peak_bytes)
    table.caption = (
        f"{trial.update_tokens:,} tokens a chunk, padding included; loss {trial.loss:.4g}, gradient norm "
        f"{trial.grad_norm:.4g}; most memory of a device during the update: {peak}"
    )
    table.caption_justify = "left"
    return table


# --- made-up arguments -------------------------------------------------------------------------------------------------------


def _placed(host: np.ndarray, like: Any) -> Any:
    import jax

    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: host[index])


def _zeros(like: Any) -> Any:
    import numpy as np

    return _placed(np.zeros(like.shape, like.dtype), like)


def _copy(tree: Any) -> Any:
    """New buffers, laid out alike: what is donated is lost."""
    import jax

    def one(x: Any) -> Any:
        parts = [jax.device_put(shard.data, shard.device, may_alias=False) for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)

    return jax.tree.map(one, tree)


def _made_images(like: ImageArrays, rng: np.random.Generator) -> ImageArrays:
    """Every row one picture of random pixels, one patch high."""
    import numpy as np

    shape = like.segment_ids.shape
    coords = np.zeros((*shape, 2), np.int32)
    coords[..., 1] = np.arange(shape[-1])
    pixels = rng.integers(0, 256, like.patches.shape, dtype=np.uint8).astype(like.patches.dtype)
    grids = np.broadcast_to(np.array([1, shape[-1]], np.int32), (*shape, 2))
    fields = (pixels, coords, grids, np.ones(shape, np.int32))
    return type(like)(*(_placed(host, one) for host, one in zip(fields, like, strict=True)))


def _made_chunk(like: ChunkArrays, ids: np.ndarray, table_rows: int, rng: np.random.Generator) -> ChunkArrays:
    """Every row one trajectory of sampled ids; every other token an image's, where there is a table."""
    import numpy as np

    shape = like.tokens.shape
    positions = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), like.positions.shape)
    pictured = np.broadcast_to(np.arange(shape[-1]) % 2 == 1, shape) & (table_rows > 0)
    fields = {
        "tokens": rng.choice(ids, shape),
        "segment_ids": np.ones(shape, np.int32),
        "positions": positions,
        "sampled": ~pictured,
        "fresh": np.zeros(shape, np.bool_),
        "behaviour_logprobs": np.full(shape, -math.log(len(ids)), np.float32),
        "advantages": rng.normal(size=shape).astype(np.float32),
        "table_index": np.where(pictured, rng.integers(0, max(1, table_rows), shape), -1).astype(np.int32),
    }
    return type(like)(**{name: _placed(host, getattr(like, name)) for name, host in fields.items()})


def _sampler_arguments(program: Program) -> tuple[Any, ...]:
    """Zeros, which are valid slots, tokens and positions; weights that are zero take as long as others."""
    import jax

    return jax.tree.map(lambda x: _zeros(x) if isinstance(x, jax.ShapeDtypeStruct) else x, program.arguments)


__all__: Sequence[str] = ["ProgramTime", "Trial", "TrialError", "run_trial", "trial_table"]
