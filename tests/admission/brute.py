"""Brute force over compositions of a train batch: slow, obvious, and independent of the code under test."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

Bounds = tuple[tuple[int, int], ...]
"""(least, most) per value."""


@functools.cache
def batches(groups: int, bounds: Bounds) -> tuple[tuple[int, ...], ...]:
    """Every composition of a whole batch that keeps all bounds."""
    ranges = [range(least, min(most, groups) + 1) for least, most in bounds]
    return tuple(counts for counts in itertools.product(*ranges) if sum(counts) == groups)


def completes(groups: int, bounds: Bounds, admitted: tuple[int, ...]) -> bool:
    """Some whole batch contains these counts."""
    return any(all(a <= b for a, b in zip(admitted, batch, strict=True)) for batch in batches(groups, bounds))


def usable(groups: int, bounds: Bounds, admitted: tuple[int, ...], pool: tuple[int, ...]) -> int:
    """The most groups of the pool that a batch containing `admitted` can hold besides."""
    return max(
        (
            sum(min(b - a, p) for a, b, p in zip(admitted, batch, pool, strict=True))
            for batch in batches(groups, bounds)
            if all(a <= b for a, b in zip(admitted, batch, strict=True))
        ),
        default=-1,
    )


def oldest_safe(
    groups: int, bounds: Bounds, admitted: tuple[int, ...], ready: list[int], wanted: int
) -> tuple[int, ...] | None:
    """Indices of the lexicographically oldest `wanted` ready groups (values, oldest first) that are safe; None: none are."""
    for chosen in itertools.combinations(range(len(ready)), wanted):  # in lexicographic order
        counts = list(admitted)
        for index in chosen:
            counts[ready[index]] += 1
        if completes(groups, bounds, tuple(counts)):
            return chosen
    return None


def counts_of(kinds: Mapping[tuple[str, ...], int], values: list[str]) -> tuple[int, ...]:
    """Counts by kind as a tuple in the order of values."""
    return tuple(kinds.get((value,), 0) for value in values)
