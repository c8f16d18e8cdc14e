"""What charts are drawn from: a run's updates and trajectories as series, bins, histograms and intervals. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from knittrans_jax.observe import charts
from knittrans_jax.observe.charts import Axis, Interval, Series
from knittrans_jax.observe.history import count_mean, count_quantile
from knittrans_jax.observe.record import UpdateRecord

HISTOGRAM_BINS = 24
UPDATE_BINS = 60


def smoothed(name: str, updates: Sequence[UpdateRecord], value: Callable[[UpdateRecord], float], colour: int) -> Series:
    """A figure over updates as means of equal bins, with the least to the greatest value of each bin as a band."""
    bins, _ = update_bins(updates)
    values = [[v for v in map(value, group) if math.isfinite(v)] for group in bins]
    return Series(
        name,
        [sum(one.update for one in group) / len(group) for group in bins],
        [sum(v) / len(v) if v else math.nan for v in values],
        colour,
        band=[(min(v), max(v)) if v else (math.nan, math.nan) for v in values] if len(updates) > len(bins) else None,
        dots=len(bins) <= 12,
    )


def by_train_step(updates: Sequence[UpdateRecord], every: int) -> list[list[UpdateRecord]]:
    """Updates by train step. A last one that the run's end cut short has early mini-batches only: left out beside others."""
    steps = [list(updates[i : i + every]) for i in range(0, len(updates), every)]
    return steps[:-1] if len(steps) > 1 and len(steps[-1]) < every else steps


def update_bins(updates: Sequence[UpdateRecord]) -> tuple[list[list[UpdateRecord]], list[float]]:
    """At most `UPDATE_BINS` runs of equally many updates, and their edges on the update axis."""
    if not updates:
        return [], []
    width = math.ceil(len(updates) / UPDATE_BINS)
    bins = [list(updates[i : i + width]) for i in range(0, len(updates), width)]
    first = updates[0].update - 1
    return bins, [float(min(first + i * width, updates[-1].update)) for i in range(len(bins) + 1)]


def histogram(name: str, values: np.ndarray, colour: int) -> str:
    """The distribution of a staleness over trajectories, in bins of whole or half updates where these are not too many."""
    if not len(values):
        return ""
    low, high = math.floor(values.min()), math.ceil(values.max()) + 1
    width = next(
        (w for w in (0.25, 0.5, 1.0) if (high - low) / w <= HISTOGRAM_BINS), math.ceil((high - low) / HISTOGRAM_BINS)
    )
    edges = np.arange(low - width / 2, high + width, width)
    counts, _ = np.histogram(values, edges)
    last = int(np.flatnonzero(counts)[-1]) + 1
    shares = [float(count) / len(values) for count in counts[:last]]
    title = f"{name.replace('_', ' ')}, updates"
    return charts.bar_chart(
        title,
        [float(e) for e in edges[: last + 1]],
        [("share", colour, shares)],
        Axis(title),
        Axis("share of trajectories", 0.0, percent=True),
    )


def interval(counts: dict[int, int] | dict[float, int]) -> Interval:
    """10th percentile, median, 90th percentile and mean of counted values."""
    return Interval(
        count_quantile(counts, 0.1), count_quantile(counts, 0.5), count_quantile(counts, 0.9), count_mean(counts)
    )


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share (E. B. Wilson, JASA 22, 1927); (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    share = successes / trials
    centre = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
