"""What repeated measurements say: medians, spread, ratios with an interval, and the noise floor. Pure.

Medians, since a shared machine disturbs some runs and never speeds one up; intervals by bootstrap over rounds, seeded, since
nothing is known of the distribution. Sides of one round are drawn together: what slows a whole round cancels in the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

BOOTSTRAP_DRAWS = 2000
INTERVAL = 0.95
"""Share of the bootstrap's draws that lie inside an interval."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one side over the rounds, in the figure's own unit. `samples` are in the order of the rounds."""

    median: float
    quartile_low: float
    quartile_high: float
    least: float
    most: float
    samples: tuple[float, ...]


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Median of one side over the median of another, and the interval in which it lies (`INTERVAL` of the draws)."""

    value: float
    low: float
    high: float

    @property
    def distance(self) -> float:
        """The furthest that the interval reaches from 1: 0.03 says that 3 % more or less may be nothing."""
        return max(abs(self.low - 1), abs(self.high - 1))


def spread(samples: Sequence[float]) -> Spread:
    """Median, quartiles (linear between samples) and extremes.

    Raises:
        ValueError: no sample, or one that is not finite.
    """
    values = _checked(samples)
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return Spread(
        median=median,
        quartile_low=low,
        quartile_high=high,
        least=float(values.min()),
        most=float(values.max()),
        samples=tuple(values.tolist()),
    )


def ratio(samples: Sequence[float], base: Sequence[float], seed: int = 0) -> Ratio | None:
    """Median of `samples` over median of `base`, both of the same rounds; None when a median of `base` is zero.

    One round gives the ratio alone: its interval has no width, and says nothing.

    Raises:
        ValueError: not the same number of rounds, no round, or a sample that is not finite.
    """
    values, bases = _checked(samples), _checked(base)
    if len(values) != len(bases):
        raise ValueError(f"a ratio needs both sides of every round: {len(values)} and {len(bases)} samples")
    picks = np.random.default_rng(seed).integers(len(values), size=(BOOTSTRAP_DRAWS, len(values)))
    drawn, drawn_base = np.median(values[picks], axis=1), np.median(bases[picks], axis=1)
    if not np.median(bases) or not drawn_base.all():
        return None
    outside = (1 - INTERVAL) / 2
    low, high = np.quantile(drawn / drawn_base, [outside, 1 - outside]).tolist()
    return Ratio(value=float(np.median(values) / np.median(bases)), low=low, high=high)


def _checked(samples: Sequence[float]) -> np.ndarray:
    if not len(samples):
        raise ValueError("no samples: a figure needs at least one round")
    if not all(math.isfinite(one) for one in samples):
        raise ValueError(f"a sample is not finite: {list(samples)}")
    return np.asarray(samples, np.float64)
