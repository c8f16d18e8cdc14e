"""Staleness of a trajectory at its consumption, by cause: pure functions of its version tags.

Words. A trajectory is consumed by the update that turns version `V` into `V + 1`, as mini-batch `j` (0-based) of its train
batch; `V_done` is the newest published version when it finished. Everything is in updates; divide by `K` for train steps.

* `gap = V - mean(token versions)`; `worst = V - min(token versions)`.
* `in_flight = V_done - mean(token versions)` and `in_queue = V - V_done`; `gap = in_flight + in_queue`.
* `colocated_gap = j`: what lock-step execution gives the same mini-batch, which refreshes at train-batch boundaries only.
* `architectural = gap - j`, signed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from knittrans_jax.trajectory import TrajectoryMeta


class Staleness(NamedTuple):
    """One trajectory's staleness at its consumption, in updates."""

    gap: float
    worst: float
    in_flight: float
    in_queue: float
    colocated_gap: float
    architectural: float


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Mean, median, 95th percentile and maximum over trajectories; all 0 where there is none."""

    mean: float
    p50: float
    p95: float
    max: float


class StalenessSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Staleness of all consumed trajectories; `architectural_clipped_mean` is the mean of `max(architectural, 0)`."""

    gap: Distribution
    worst: Distribution
    in_flight: Distribution
    in_queue: Distribution
    colocated_gap: Distribution
    architectural: Distribution
    architectural_clipped_mean: float
    trajectories: int
    unit: str


def gap(version: int, trajectory: TrajectoryMeta) -> float:
    """`V - mean(token versions)` of a trajectory consumed at version `V`."""
    return (version * trajectory.sampled_tokens - trajectory.version_sum) / trajectory.sampled_tokens


def worst(version: int, trajectory: TrajectoryMeta) -> int:
    """`V - min(token versions)`: what a staleness bound acts on."""
    return version - trajectory.version_min


def in_flight(trajectory: TrajectoryMeta) -> float:
    """`V_done - mean(token versions)`: how much the policy moved while the trajectory was sampled."""
    return gap(trajectory.version_done, trajectory)


def in_queue(version: int, trajectory: TrajectoryMeta) -> int:
    """`V - V_done`: how much the policy moved while the finished trajectory waited."""
    return version - trajectory.version_done


def colocated_gap(mini_batch: int) -> int:
    """The gap that lock-step colocated execution gives mini-batch `j` of a train batch."""
    return mini_batch


def architectural(version: int, mini_batch: int, trajectory: TrajectoryMeta) -> float:
    """`gap - j`: the staleness that the architecture adds (negative: it removes some)."""
    return gap(version, trajectory) - colocated_gap(mini_batch)


def staleness_of(trajectory: TrajectoryMeta, *, version: int, mini_batch: int) -> Staleness:
    """All measures of one trajectory.

    Args:
        trajectory: its version tags.
        version: `V`, the version before the update that consumes it.
        mini_batch: `j`, the index of its mini-batch in the train batch.
    """
    return Staleness(
        gap=gap(version, trajectory),
        worst=float(worst(version, trajectory)),
        in_flight=in_flight(trajectory),
        in_queue=float(in_queue(version, trajectory)),
        colocated_gap=float(colocated_gap(mini_batch)),
        architectural=architectural(version, mini_batch, trajectory),
    )


def distribution(values: Sequence[float] | np.ndarray) -> Distribution:
    """Mean, p50, p95 (linear interpolation) and maximum of `values` [N]; zeros for N = 0."""
    if len(values) == 0:
        return Distribution(mean=0.0, p50=0.0, p95=0.0, max=0.0)
    array = np.asarray(values, np.float64)
    p50, p95 = np.percentile(array, [50, 95])
    return Distribution(mean=float(array.mean()), p50=float(p50), p95=float(p95), max=float(array.max()))


def summarise(rows: Iterable[Sequence[float]], mini_batches: int | None = None) -> StalenessSummary:
    """The summary of many trajectories.

    Args:
        rows: `Staleness` tuples, or an array [N, 6] in the order of its fields, in updates.
        mini_batches: `K`, to report in train steps; None reports updates.
    """
    array = np.asarray(rows if isinstance(rows, np.ndarray) else list(rows), np.float64)
    array = array.reshape(-1, len(Staleness._fields)) / (mini_batches or 1)
    columns = dict(zip(Staleness._fields, array.T, strict=True))
    clipped = np.maximum(columns["architectural"], 0.0)
    return StalenessSummary(
        **{name: distribution(column) for name, column in columns.items()},
        architectural_clipped_mean=float(clipped.mean()) if len(clipped) else 0.0,
        trajectories=len(array),
        unit="updates" if mini_batches is None else "train_steps",
    )
