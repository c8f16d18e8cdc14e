"""How far the gradient of each encoder mode is from the same computation in float64, in processes of their own.

    python -m knittrans_jax.benchmarks.encoding_gradient FOLDER NAME PROCESS COORDINATOR

Every placement (`PLACEMENTS`) trains one small mini-batch by every mode from the same parameters and writes the gradients. The
reference is differentiated through every use of every image, in one process, on one device, with float64 in place of float32.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

DEADLINE_S = 600.0
REFERENCE = "reference"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Devices that a mini-batch is trained on: a mesh, over so many processes."""

    name: str
    data: int
    fsdp: int
    processes: int


PLACEMENTS = (
    Placement("1 device", 1, 1, 1),
    Placement("2x2 mesh", 2, 2, 1),
    Placement("2 processes", 2, 1, 2),
)
NAIVE = "per_micro_batch"
MODES = (
    (NAIVE, NAIVE, "recompute"),
    ("per_mini_batch (recompute)", "per_mini_batch", "recompute"),
    ("per_mini_batch (keep)", "per_mini_batch", "keep"),
)
"""Name, and the mode and residuals that stand for it in a configuration."""


def gradient_errors(folder: Path, placements: Sequence[Placement], say: Any) -> dict[str, dict[str, float]]:
    """Relative L2 error of the whole gradient against float64, by placement and mode.

    Raises:
        RuntimeError: a process failed, or did not end in time.
    """
    say("gradient: the reference in float64")
    _run(folder, REFERENCE, 1)
    expected = np.load(folder / f"{REFERENCE}.npy")
    errors: dict[str, dict[str, float]] = {}
    for placement in placements:
        say(f"gradient: {placement.name}")
        _run(folder, placement.name, placement.processes)
        for name, _, _ in MODES:
            got = np.load(folder / f"{placement.name}-{name}.npy").astype(np.float64)
            error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
            errors.setdefault(placement.name, {})[name] = float(error)
    return errors


def worst_over_naive(errors: dict[str, dict[str, float]]) -> float:
    """The largest error of an encode-once mode over naive training's own on the same devices."""
    return max(
        error / by_mode[NAIVE] for by_mode in errors.values() for name, error in by_mode.items() if name != NAIVE
    )


def _run(folder: Path, name: str, processes: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        coordinator = f"127.0.0.1:{sock.getsockname()[1]}"
    command = [sys.executable, "-m", "knittrans_jax.benchmarks.encoding_gradient", str(folder), name]
    running = [
        subprocess.Popen([*command, str(process), coordinator], env=os.environ | {"JAX_PLATFORMS": "cpu"})
        for process in range(processes)
    ]
    deadline_s = time.monotonic() + DEADLINE_S
    try:
        codes = [process.wait(max(1.0, deadline_s - time.monotonic())) for process in running]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"gradient, {name}: not done after {DEADLINE_S:g} s") from error
    finally:
        for process in running:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"gradient, {name}: a process ended with status {codes}; its message is above")


# --- in the process that computes ------------------------------------------------------------------------------------------


def main() -> None:
    """Computes one placement's gradients, or the reference's."""
    folder, name, process, coordinator = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    import jax
    import jax.numpy as jnp

    if name == REFERENCE:
        jax.config.update("jax_enable_x64", True)
        jnp.float32 = jnp.float64  # before the model is imported: the same computation, in twice the digits
        placement, modes = PLACEMENTS[0], MODES[:1]
    else:
        placement, modes = next(one for one in PLACEMENTS if one.name == name), MODES
        jax.config.update("jax_num_cpu_devices", placement.data * placement.fsdp // placement.processes)
    if placement.processes > 1:
        jax.distributed.initialize(coordinator, placement.processes, process, initialization_timeout=60)
    for mode, gradient in _gradients(placement, modes):
        if process == 0:
            np.save(folder / (f"{name}.npy" if name == REFERENCE else f"{name}-{mode}.npy"), gradient)


def _gradients(placement: Placement, modes: Sequence[tuple[str, Any, Any]]) -> Any:
    """(mode's name, gradient as one float vector) of each mode."""
    import jax
    import jax.numpy as jnp

    from knittrans_jax.benchmarks.encoding_cases import Workload, make_mini_batch
    from knittrans_jax.benchmarks.encoding_run import Compiled, load, make_programs, run_update
    from knittrans_jax.encoding.modes import ResidualOptions

    workload = Workload("gradient", turns=2, grid=(4, 4), prompt_tokens=6, answer_tokens=8)
    mini_batch = make_mini_batch(
        workload, 16, 8, micro_batch_rows=2, shards=placement.data * placement.fsdp, row_tokens=workload.length_tokens
    )
    programs, shapes = make_programs(placement.data, placement.fsdp, keep_gradient())
    rng = np.random.default_rng(0)
    drawn = jax.tree.map_with_path(lambda path, shape: _draw(rng, path, shape), shapes)
    for name, mode, residuals in modes:
        params = jax.tree.map(
            lambda values, sharding: jax.make_array_from_callback(
                values.shape, sharding, lambda at: np.asarray(values[at], jnp.float32)
            ),
            drawn,
            programs.param_shardings,
        )
        batch = load(mini_batch, programs, mode, ResidualOptions(residuals=residuals))
        update = run_update(Compiled(programs), batch, programs.init(params))
        whole = jax.jit(lambda tree: tree, out_shardings=programs.replicated)(update.state.opt_state)
        leaves = [np.asarray(leaf.addressable_data(0)).reshape(-1) for leaf in jax.tree.leaves(whole)]
        yield name, np.concatenate(leaves)


def _draw(rng: np.random.Generator, path: Any, shape: Any) -> np.ndarray:
    """As in the middle of a run: norms near one, everything else of the size that keeps activations near one."""
    if path[-1].key == "scale":
        return (1 + rng.normal(0, 0.1, shape.shape)).astype(np.float32)
    fan_in = shape.shape[-2] if len(shape.shape) > 1 else 100
    return rng.normal(0, 1 / math.sqrt(fan_in), shape.shape).astype(np.float32)


def keep_gradient() -> Any:
    """An optimizer whose state is the last gradient and that changes nothing."""
    import jax
    import jax.numpy as jnp
    import optax

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del state, params
        return init(updates), updates

    return optax.GradientTransformation(init, update)


if __name__ == "__main__":
    main()
