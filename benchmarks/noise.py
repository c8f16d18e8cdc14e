"""`knittrans bench noise`: the same work under two names, and the same work plus a little. It measures the harness and the
machine: the first ratio lies inside the noise floor; how large must a difference be to lie outside it?"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from knittrans_jax.benchmarks.harness import Report, Say, Side, measure, timed
from knittrans_jax.benchmarks.registry import BenchSettings


class Settings(BenchSettings, frozen=True):
    """`work`: how many thousand numbers are sorted; `extra`: the share by which the third side sorts more."""

    rounds: Annotated[int, msgspec.Meta(ge=1)] = 15
    work: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 500
    extra: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.25


def bench(settings: Settings, say: Say) -> Report:
    """Runs it. Headline: `same_over_same`, `more_over_same`, `noise_floor` (relative)."""
    numbers = np.random.default_rng(0).random(int(settings.work * 1000 * (1 + settings.extra)))

    def sort(count: int) -> Side:
        return lambda index: timed(lambda: np.sort(numbers[:count]))

    sides = {"one": sort(settings.work * 1000), "same": sort(settings.work * 1000), "more": sort(len(numbers))}
    table = measure("sort", sides, rounds=settings.rounds, say=say)
    headline: dict[str, object] = {}
    for name, found in (
        ("same_over_one", table.ratio("same", "wall_s")),
        ("more_over_one", table.ratio("more", "wall_s")),
    ):
        headline[name] = None if found is None else found.value
    floor = table.floor["wall_s"]
    headline["noise_floor"] = None if floor is None else floor.distance
    return Report(tables=[table], headline=headline)
