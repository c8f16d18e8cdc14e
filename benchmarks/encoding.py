"""`knittrans bench encoding`: what encoding each image once is worth, and whether `auto` finds the best way.

An update of a mini-batch, first program to last, by every mode: `per_micro_batch` (every copy), `per_micro_batch_unique`,
`per_mini_batch` with residuals recomputed and kept. `auto` is the one of them that the run's own code picks for the plan; it is
not timed again. Where two modes come to the same programs on the same arrays (nothing is shown twice in a micro-batch), they
are one measurement. Workloads, group sizes and layouts: `encoding_cases.py`.

* `flop_bound`: FLOPs of naive training over those with every image encoded once, forward and backward, nothing recomputed, as
  the compiler counts them in the programs that are timed;
* `peak_bytes`: of the compiled programs, with what else lies on the device beside each; `table_bytes`: table and cotangents;
* `gradient_error_over_naive`: worst over modes and placements, against float64 (`encoding_gradient.py`).

Times are the least of all rounds: what else the machine does only ever adds. `clock=cpu` compares processor seconds in place of
wall time, for a machine that is busy with other things.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import msgspec

from knittrans_jax.benchmarks.encoding_cases import WORKLOADS, MiniBatch, Workload, make_mini_batch
from knittrans_jax.benchmarks.encoding_gradient import NAIVE, PLACEMENTS, gradient_errors, worst_over_naive
from knittrans_jax.benchmarks.encoding_run import Batch, Compiled, load, make_programs, run_update
from knittrans_jax.benchmarks.harness import BenchFailed, Figures, Measured, Report, Say, Side, measure
from knittrans_jax.benchmarks.registry import BenchSettings
from knittrans_jax.config import OptimizerConfig, TrainConfig
from knittrans_jax.encoding.modes import ResidualOptions
from knittrans_jax.train.state import TrainState, make_optimizer
from knittrans_jax.trajectory import MiniBatchPlan

UNIQUE, KEEP, RECOMPUTE = "per_micro_batch_unique", "per_mini_batch (keep)", "per_mini_batch (recompute)"
MODES: dict[str, tuple[Any, Any]] = {
    NAIVE: (NAIVE, "recompute"),
    UNIQUE: (UNIQUE, "recompute"),
    RECOMPUTE: ("per_mini_batch", "recompute"),
    KEEP: ("per_mini_batch", "keep"),
}
"""`train.encoder_mode` and `train.encoder_residuals` by name."""
INSIDE_ROWS = 16
"""Rows of a micro-batch that holds whole groups."""
SPREAD_FROM = 4
"""Micro-batches that an image's users must span for its speed-up to be held against the FLOP bound."""


class Settings(BenchSettings, frozen=True):
    """`trajectories` of a mini-batch; `n`: sizes of groups; `workloads`: indices; `quick`: one setting, once, no gradient."""

    rounds: Annotated[int, msgspec.Meta(ge=1)] = 5
    trajectories: Annotated[int, msgspec.Meta(ge=16, multiple_of=16)] = 16
    n: tuple[Literal[1, 4, 8, 16], ...] = (1, 4, 8, 16)
    workloads: tuple[Literal[0, 1, 2], ...] = (0, 1, 2)
    spread: tuple[bool, ...] = (True, False)
    clock: Literal["wall", "cpu"] = "wall"
    residual_bytes: Annotated[int, msgspec.Meta(ge=0)] = TrainConfig().encoder_residual_bytes
    gradient: bool = True
    quick: bool = False


def bench(settings: Settings, say: Say) -> Report:
    """Runs it. Headline: `settings` (one entry each) and `gradient_error_over_naive`, with the worst of what must hold."""
    if settings.quick:
        settings = msgspec.structs.replace(settings, rounds=1, n=(4,), workloads=(0,), spread=(True,), gradient=False)
    timed = _Timed(settings, say)
    tables, entries = [], []
    for index in settings.workloads:
        for spread in settings.spread:
            for n in settings.n:
                table, entry = timed.run(WORKLOADS[index], n, spread)
                tables.append(table)
                entries.append(entry)
    headline: dict[str, Any] = {"settings": entries, **_worst(entries)}
    if settings.gradient:
        with tempfile.TemporaryDirectory() as folder:
            try:
                errors = gradient_errors(Path(folder), PLACEMENTS, say)
            except RuntimeError as error:
                raise BenchFailed(str(error)) from error
        headline |= {"gradient_error_over_naive": worst_over_naive(errors), "gradient_errors": errors}
    return Report(
        tables=tables,
        headline=headline | {"programs_compiled": len(timed.compiled), "compile_s": timed.compiled.compile_s.wall_s},
        notes=[
            f"best, speed-ups and bounds by {settings.clock} time, least of {settings.rounds} rounds; a model of two layers",
            f"speedup_over_bound_worst: where an image's users span {SPREAD_FROM} or more micro-batches",
        ],
    )


def _worst(entries: list[dict[str, Any]]) -> dict[str, float]:
    """What must hold, at the setting where it holds least."""
    spread = [one["speedup_over_bound"] for one in entries if one["micro_batches_of_an_image"] >= SPREAD_FROM]
    room = [
        one["peak_bytes"][RECOMPUTE] / (one["peak_bytes"][NAIVE] + one["table_and_cotangent_bytes"]) for one in entries
    ]
    return {
        "auto_over_best_worst": min(one["auto_over_best"] for one in entries),
        "speedup_worst": min(one["speedup"] for one in entries),
        **({"speedup_over_bound_worst": min(spread)} if spread else {}),
        "peak_recompute_over_allowed_worst": max(room),
    }


class _Timed:
    """The programs, and the training state that every update hands on to the next."""

    def __init__(self, settings: Settings, say: Say) -> None:
        self.settings, self.say = settings, say
        programs, shapes = make_programs(1, 1, make_optimizer(OptimizerConfig(learning_rate=1e-6), 10_000))
        self.compiled = Compiled(programs)
        params = jax.tree.map(lambda shape: jnp.full(shape.shape, 0.02, shape.dtype), shapes)
        self.state: TrainState = jax.device_put(programs.init(params), programs.state_shardings)
        self.flops: dict[str, tuple[float, float]] = {}

    def run(self, workload: Workload, n: int, spread: bool) -> tuple[Measured, dict[str, Any]]:
        """Times every mode of a setting -> (its table, its entry of `settings`)."""
        programs, settings = self.compiled.programs, self.settings
        mini_batch = make_mini_batch(workload, settings.trajectories, n, micro_batch_rows=1 if spread else INSIDE_ROWS)
        plan = mini_batch.plan
        row_bytes = programs.residual_row_bytes(self.state.params, workload.patches)
        options = ResidualOptions(most_bytes=settings.residual_bytes, row_bytes=row_bytes)
        batches = {
            name: load(mini_batch, programs, mode, dataclasses.replace(options, residuals=residuals))
            for name, (mode, residuals) in MODES.items()
        }
        auto = _auto(mini_batch, self.compiled, options)
        measured = {name: batch for name, batch in batches.items() if name != UNIQUE or not _alike(batches)}
        peaks: dict[str, int] = {}
        title = f"{workload.name}, n = {n}, {'spread' if spread else 'inside'}"
        sides = {name: self._side(name, batch, peaks) for name, batch in measured.items()}
        table = measure(title, sides, rounds=settings.rounds, base=NAIVE, say=self.say)
        seconds = {name: side[f"{settings.clock}_s"].least for name, side in table.sides.items()}
        best = min(seconds, key=lambda name: seconds[name])
        if auto == UNIQUE and UNIQUE not in seconds:
            auto_s = seconds[NAIVE]
            best = UNIQUE if best == NAIVE else best
        else:
            auto_s = seconds[auto]
        unique, shown = _patches(plan)
        decoder, encoder = self._flops(workload, batches, plan.rows_per_micro_batch)
        bound = (decoder + encoder) / (decoder + encoder * unique / shown)
        speedup = seconds[NAIVE] / auto_s
        return table, {
            "name": workload.name,
            "n": n,
            "spread": spread,
            "speedup": speedup,
            "best_mode": best,
            "auto_mode": auto,
            "auto_over_best": min(seconds.values()) / auto_s,
            "flop_bound": bound,
            "speedup_over_bound": speedup / bound,
            "patch_ratio": unique / shown,
            "micro_batches_of_an_image": _span(plan),
            "seconds": seconds,
            "peak_bytes": peaks,
            "table_and_cotangent_bytes": 2 * self._table_bytes(plan, workload),
            "residual_bytes": row_bytes * plan.encoder_rows_per_shard,
        }

    def _side(self, name: str, batch: Batch, peaks: dict[str, int]) -> Side:
        def run(index: int) -> Figures:
            del index
            update = run_update(self.compiled, batch, self.state)
            self.state, peaks[name] = update.state, update.peak_bytes
            return {"wall_s": update.wall_s, "cpu_s": update.cpu_s}

        return run

    def _flops(self, workload: Workload, batches: dict[str, Batch], micro_batch_rows: int) -> tuple[float, float]:
        """FLOPs of a trajectory, forward and backward: (its tokens through the decoder, its images through the encoder).

        A loop's body counts once, and is here a micro-batch, whose every row is a trajectory.
        """
        if workload.name not in self.flops:
            params, programs = self.state.params, self.compiled.programs
            table, naive = batches[RECOMPUTE], batches[NAIVE]
            encoded = jax.eval_shape(programs.encode, params, table.images)
            sums = self.compiled.get("start", params, static=(encoded.shape[0], False))(params)
            rows = jnp.zeros(encoded.shape, encoded.dtype, device=programs.replicated)
            without = self.compiled.get("accumulate", params, rows, table.chunk, sums)
            sums = self.compiled.get("start", params, static=(0, True))(params)
            copies = self.compiled.get("accumulate_copies", params, naive.images, naive.chunk, sums)
            decoder, both = (float(program.cost_analysis()["flops"]) for program in (without, copies))
            self.flops[workload.name] = decoder / micro_batch_rows, (both - decoder) / micro_batch_rows
        return self.flops[workload.name]

    def _table_bytes(self, plan: MiniBatchPlan, workload: Workload) -> int:
        config = self.compiled.programs.model.config
        assert config.vision is not None
        tokens = plan.shards * plan.encoder_rows_per_shard * workload.patches // config.vision.merge_size**2
        return 4 * tokens * config.visual_features


def _auto(mini_batch: MiniBatch, compiled: Compiled, options: ResidualOptions) -> str:
    """What a run's `auto` takes, by its name here."""
    work = load(mini_batch, compiled.programs, "auto", options).work
    if work.mode != "per_mini_batch":
        return str(work.mode)
    return KEEP if work.keep else RECOMPUTE


def _alike(batches: dict[str, Batch]) -> bool:
    """Nothing is shown twice in a micro-batch: naive and unique are the same programs on the same arrays."""
    return batches[UNIQUE].work.copies == batches[NAIVE].work.copies


def _patches(plan: MiniBatchPlan) -> tuple[int, int]:
    """Of all images, each once; and each time that it is shown."""
    patches = [image.grid_h * image.grid_w for image in plan.images]
    return sum(patches), sum(patches[image] for placement in plan.placements for image in placement.images)


def _span(plan: MiniBatchPlan) -> int:
    """The fewest (shard, micro-batch) pairs over which an image's users spread."""
    users: dict[int, set[tuple[int, int]]] = {}
    for placement in plan.placements:
        for image in placement.images:
            users.setdefault(image, set()).add((placement.shard, placement.row // plan.rows_per_micro_batch))
    return min(map(len, users.values()))
