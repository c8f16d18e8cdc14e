"""The frontier of one policy on one workload: staleness against step time, over look-ahead.

How, the same for every policy:

1. a coarse grid of total look-ahead, from nothing to two train batches, in one family; with domains in two: shared by the
   composition of a batch, and by latency, each domain as many groups as are still in flight when they are due;
   beyond the first look-ahead at which the trainer never waits (`NEVER`) more of it is only staler, and is left out;
2. for each limit on step time that a figure asks for, the least look-ahead of each family that keeps it, by bisection;
3. with domains, from the least stale setting that keeps the limit: one domain's look-ahead up or down, while that helps.

2 and 3 search with `SEARCH_SEEDS` seeds; what they propose is then measured with all, like every point of the frontier.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from knittrans_jax.simulate.workloads import (
    Pace,
    Point,
    Publish,
    Setting,
    Workload,
    groups_by_domain,
    measure,
    sample_latencies,
)

GRID = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 1.5, 2.0)
"""Total look-ahead, in train batches."""
NEVER = 0.001
"""Idle share of a trainer that never waits."""
NEAR_FASTEST = 1.02
NEAR_BATCH_LOOK_AHEAD = 1.05
TIE = 1.001
"""Step times within this factor are equal: of settings that are equally fast the least stale one is meant."""
PRECISION = 32
SEARCH_SEEDS = 2
SEARCH_STEP = 0.12
"""A change of a domain's look-ahead that is tried, as a part of it."""
SAME_LIMIT = 1.002
"""Limits that are no further apart than this factor are searched for once, by the stricter one."""

Ahead = int | dict[str, int]
Family = Callable[[int], Ahead]


def fastest(points: Sequence[Point]) -> Point:
    """The least stale of the fastest settings."""
    return least_stale(points, TIE * min(one.step_time_s for one in points))


def least_stale(points: Sequence[Point], limit_s: float) -> Point:
    """The least stale setting whose step takes no longer than this; the fastest where there is none."""
    within = [one for one in points if one.step_time_s <= limit_s]
    if not within:
        return min(points, key=lambda one: one.step_time_s)
    return min(within, key=lambda one: (one.architectural_mean_updates, one.step_time_s))


def frontier(points: Sequence[Point]) -> list[Point]:
    """The settings than which no other is both faster and less stale, by step time."""
    kept: list[Point] = []
    for one in sorted(points, key=lambda p: (p.step_time_s, p.architectural_mean_updates)):
        if not kept or one.architectural_mean_updates < kept[-1].architectural_mean_updates:
            kept.append(one)
    return kept


class Sweep:
    """See the module's opening. `points` are all that were measured with all seeds."""

    def __init__(self, workload: Workload, pace: Pace, policy: str, publish: Publish = "train_batch") -> None:
        """`publish`: the way of publishing that the search goes by; every point is measured with both."""
        self._base = Setting(workload, pace, policy, 0)
        self._publish: Publish = publish
        self._counts = groups_by_domain(workload, pace)
        self._measured: dict[tuple[object, int], dict[Publish, Point]] = {}
        self._full = pace.seeds
        self.families: list[Family] = [_by_composition]
        if workload.domain is not None:
            self.families.append(_by_latency(workload, pace, self._counts))

    @property
    def points(self) -> list[Point]:
        """All settings measured with all seeds, by total look-ahead."""
        return self.points_of(self._publish)

    def points_of(self, publish: Publish) -> list[Point]:
        """The same with a way of publishing."""
        full = [points[publish] for (_, seeds), points in self._measured.items() if seeds == self._full]
        return sorted(full, key=lambda one: (one.look_ahead_groups, one.step_time_s))

    def run(self, limits_s: Sequence[float]) -> None:
        """The whole sweep; `limits_s` are bounds on step time besides `NEAR_FASTEST` times the fastest."""
        batch, baseline = self._base.pace.groups, self._base.policy == "train_batch"
        for family in self.families:
            for share in GRID:
                point = self.at(family(round(share * batch)))
                if point.trainer_idle_share < NEVER and (share >= 1.0 or not baseline):
                    break
        own = [NEAR_FASTEST * fastest(self.points).step_time_s]
        if baseline:
            own.append(TIE * min(one.step_time_s for one in self.points))
        for limit_s in _distinct([*limits_s, *own]):
            for family in self.families:
                self._bisect(family, limit_s)
            if len(self.families) > 1:
                self._by_domain(limit_s)

    def at(self, look_ahead: Ahead, seeds: int | None = None) -> Point:
        """The figures at a look-ahead."""
        count = self._full if seeds is None else min(seeds, self._full)
        key = (tuple(look_ahead.items()) if isinstance(look_ahead, dict) else look_ahead, count)
        if key not in self._measured:
            self._measured[key] = measure(dataclasses.replace(self._base, look_ahead=look_ahead), count)
        return self._measured[key][self._publish]

    def _bisect(self, family: Family, limit_s: float) -> None:
        """The least look-ahead of a family that keeps the limit, to a part in `PRECISION`."""
        batch = self._base.pace.groups
        grid = [round(share * batch) for share in GRID]
        coarse = high = next((x for x in grid if self._known(family(x), limit_s)), None)
        if not high or coarse is None:
            return  # none keeps it, or none is needed
        low = max(x for x in grid if x < high)
        while high - low > max(1, high // PRECISION):
            middle = (low + high) // 2
            if self.at(family(middle), SEARCH_SEEDS).step_time_s <= limit_s:
                high = middle
            else:
                low = middle
        # All seeds together may be slower or faster than the few of the search.
        step = max(1, high // PRECISION)
        while high < coarse and self.at(family(high)).step_time_s > limit_s:
            high += step
        while high > step and self.at(family(high - step)).step_time_s <= limit_s:
            high -= step

    def _known(self, look_ahead: Ahead, limit_s: float) -> bool:
        """Whether a point of the grid that was measured keeps the limit."""
        key = (tuple(look_ahead.items()) if isinstance(look_ahead, dict) else look_ahead, self._full)
        return key in self._measured and self._measured[key][self._publish].step_time_s <= limit_s

    def _by_domain(self, limit_s: float) -> None:
        """One domain up or down from the least stale setting within the limit, while that helps."""
        start = least_stale(self.points, limit_s)
        here = start.look_ahead if isinstance(start.look_ahead, dict) else self._split(start.look_ahead)
        best = self.at(here, SEARCH_SEEDS)
        if best.step_time_s > limit_s * TIE:
            limit_s = best.step_time_s  # the few seeds of the search are slower: compare with them alone
        for domain in self._counts:
            for sign in (-1, 1):
                change = sign * max(1, round(SEARCH_STEP * max(here[domain], self._counts[domain] / 8)))
                there = {**here, domain: max(0, here[domain] + change)}
                if there == here:
                    continue
                point = self.at(there, SEARCH_SEEDS)
                if point.step_time_s <= limit_s and point.architectural_mean_updates < best.architectural_mean_updates:
                    here, best = there, point
                    break
        here, _ = self._trade(here, best, limit_s)
        self.at(here)

    def _trade(self, here: dict[str, int], best: Point, limit_s: float) -> tuple[dict[str, int], Point]:
        """More for one domain and less for another: what one change alone cannot show to be better."""
        for giver in self._counts:
            for taker in self._counts:
                less = max(2, round(SEARCH_STEP * max(here[giver], 1)))
                if giver == taker or here[giver] < less:
                    continue
                there = {**here, giver: here[giver] - less, taker: here[taker] + max(1, less // 2)}
                point = self.at(there, SEARCH_SEEDS)
                if point.step_time_s <= limit_s and point.architectural_mean_updates < best.architectural_mean_updates:
                    here, best = there, point
        return here, best

    def _split(self, total: int) -> dict[str, int]:
        whole = sum(self._counts.values())
        return {domain: -(-total * n // whole) for domain, n in self._counts.items()}


def _distinct(limits_s: Sequence[float]) -> list[float]:
    """The limits in order, without those that the one before them stands for."""
    kept: list[float] = []
    for limit_s in sorted(limits_s):
        if not kept or limit_s > SAME_LIMIT * kept[-1]:
            kept.append(limit_s)
    return kept


def _by_composition(total: int) -> Ahead:
    return total


def _by_latency(workload: Workload, pace: Pace, counts: dict[str, int]) -> Family:
    """Look-ahead by domain: groups still in flight at a phase of the step, chosen so that they are `total` together."""
    latencies = {domain: np.sort(sample_latencies(workload, domain, 4096, 7)) for domain in counts}
    step_s = pace.ideal_step_s

    def needs(phase_s: float) -> dict[str, float]:
        """Groups of each domain in flight, when a batch of it is launched every step and that long before they are due."""
        found = {}
        for domain, ordered in latencies.items():
            ages = np.arange(0, 1 + int(max(0.0, (ordered[-1] - phase_s)) // step_s))
            longer = len(ordered) - np.searchsorted(ordered, phase_s + ages * step_s, side="right")
            found[domain] = counts[domain] * float(longer.sum()) / len(ordered)
        return found

    def family(total: int) -> Ahead:
        low, high = -4 * step_s, 16 * step_s  # much look-ahead, little look-ahead
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(needs(middle).values()) > total else (low, middle)
        return {domain: round(need) for domain, need in needs(high).items()}

    return family
