"""The one way in which this project measures. A benchmark names its sides; the harness

1. runs each side once to warm up (uncounted), unless told otherwise;
2. runs all sides in every round, in an order drawn anew for each, so that a drift of the machine touches all alike;
3. runs one side twice in every round: what those two differ by, though nothing differs, is the noise floor;
4. gives medians, spread and ratios to the side of comparison, with the machine and the versions, as one JSON object.

A comparison that lies inside the noise floor says nothing, and the table says so.

    def bench(settings: Settings, say: Callable[[str], None]) -> Report:
        sides = {"ours": lambda index: {"wait_s": pull(...)}, "gather": lambda index: timed(gather)}
        table = measure("n16", sides, rounds=settings.rounds, base="gather", say=say)
        return Report(tables=[table], headline={"wait_ratio_gather": 1 / table.ratio("ours", "wait_s").value})
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from knittrans_jax.benchmarks.machine import machine, versions
from knittrans_jax.benchmarks.statistics import Ratio, Spread, ratio, spread

Figures = Mapping[str, float]
"""What one run of a side measured, by name with its unit: `{"wait_s": 0.31, "pulled_bytes": 4096}`."""
Side = Callable[[int], Figures]
"""Runs a side once; gets the round's number (seed what is random with it), -1 for the warm-up."""
Say = Callable[[str], None]
"""Tells a person how far the benchmark is."""

AGAIN = " (again)"
"""Appended to the name of the side that is run twice a round."""


class BenchFailed(RuntimeError):  # noqa: N818 - says what happened
    """A benchmark could not measure: the message says which side, which round and why."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """One comparison. `sides[side][figure]`; `floor[figure]` is None where the twice-run side's figure is always zero."""

    name: str
    rounds: int
    base: str
    twice: str
    sides: dict[str, dict[str, Spread]]
    floor: dict[str, Ratio | None]

    def median(self, side: str, figure: str) -> float:
        """A figure's median."""
        return self.sides[side][figure].median

    def ratio(self, side: str, figure: str, to: str | None = None) -> Ratio | None:
        """A side's median over that of `to` (else of the side of comparison); None when that is zero or lacks the figure."""
        base = self.sides[self.base if to is None else to].get(figure)
        return None if base is None else ratio(self.sides[side][figure].samples, base.samples)

    def outside_noise(self, side: str, figure: str) -> bool | None:
        """Whether the side differs from the side of comparison by more than two runs of one side do; None: cannot tell."""
        found, floor = self.ratio(side, figure), self.floor.get(figure)
        if found is None or floor is None or self.rounds < 2:
            return None
        low, high = 1 / (1 + floor.distance), 1 + floor.distance
        return found.low > high or found.high < low

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        ratios = {
            side: {figure: self.ratio(side, figure) for figure in figures} for side, figures in self.sides.items()
        }
        return {
            "name": self.name,
            "rounds": self.rounds,
            "base": self.base,
            "sides": msgspec.to_builtins(self.sides),
            "ratio_to_base": msgspec.to_builtins(ratios),
            "noise_floor": {"side": self.twice, "ratio": msgspec.to_builtins(self.floor)},
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """What a benchmark found. `headline` goes to the top of the JSON object under its own keys; `notes` are for people."""

    tables: list[Measured]
    headline: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)


def measure(
    name: str,
    sides: Mapping[str, Side],
    *,
    rounds: int,
    base: str | None = None,
    twice: str | None = None,
    warm_up: bool = True,
    seed: int = 0,
    say: Say = lambda text: None,
) -> Measured:
    """Runs the sides interleaved.

    Args:
        name: of the comparison.
        sides: by name, at least one.
        rounds: how often each side is run and counted. The noise floor wants at least 5.
        base: the side of comparison; the first by default.
        twice: the side that runs twice a round; the side of comparison by default.
        warm_up: run each side once, uncounted, before the first round.
        seed: of the orders.
        say: hears of every round.

    Raises:
        ValueError: no sides, no rounds, or a name that is no side.
        BenchFailed: a side gave other figures than in its first round, or one that is not finite.
    """
    base = next(iter(sides), "") if base is None else base
    twice = base if twice is None else twice
    for role, one in (("base", base), ("twice", twice)):
        if one not in sides:
            raise ValueError(f"{name}: {role} = {one!r} is no side; the sides are {', '.join(sides) or 'none'}")
    if rounds < 1:
        raise ValueError(f"{name}: rounds must be at least 1 (value {rounds})")
    runs: dict[str, Side] = {**sides, twice + AGAIN: sides[twice]}
    if warm_up:
        for side, run in sides.items():
            say(f"{name}: warm-up, {side}")
            run(-1)
    samples: dict[str, dict[str, list[float]]] = {side: {} for side in runs}
    order = np.random.default_rng(seed)
    for index in range(rounds):
        say(f"{name}: round {index + 1} of {rounds}")
        for side in order.permutation(list(runs)).tolist():
            _add(samples[side], runs[side](index), f"{name}: side {side!r}, round {index + 1}", index)
    again = samples.pop(twice + AGAIN)
    return Measured(
        name=name,
        rounds=rounds,
        base=base,
        twice=twice,
        sides={side: {figure: spread(values) for figure, values in found.items()} for side, found in samples.items()},
        floor={figure: ratio(values, samples[twice][figure]) for figure, values in again.items()},
    )


def timed(run: Callable[[], object]) -> Figures:
    """Calls and gives the wall time, as `wall_s`. What runs asynchronously must be waited for inside."""
    began = time.perf_counter()
    run()
    return {"wall_s": time.perf_counter() - began}


def report_to_dict(bench: str, settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """The whole result, for JSON: the headline's keys, then how and on what it was measured.

    Raises:
        BenchFailed: a headline takes one of the harness's own keys, or holds a number that is not finite (JSON has none).
    """
    own = {
        "bench": bench,
        "arguments": settings,
        "machine": machine(),
        "versions": versions(),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "notes": report.notes,
        "tables": [table.as_dict() for table in report.tables],
    }
    headline = msgspec.to_builtins(report.headline)
    taken = sorted(own.keys() & headline.keys())
    if taken:
        raise BenchFailed(f"{bench}: the headline uses {', '.join(taken)}, which the harness writes itself")
    _refuse_not_finite(bench, headline)
    return {"bench": bench, **headline, **own}


def write_report(directory: Path, result: dict[str, Any]) -> Path:
    """Writes `directory/BENCH-TIME.json` -> the path. Earlier ones stay."""
    directory.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    path = directory / f"{result['bench']}-{stamp}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return path


def _add(samples: dict[str, list[float]], figures: Figures, where: str, index: int) -> None:
    if index and figures.keys() != samples.keys():
        raise BenchFailed(f"{where}: gave {sorted(figures)}, but {sorted(samples)} before")
    for figure, value in figures.items():
        if not math.isfinite(value):
            raise BenchFailed(f"{where}: {figure} is {value}, no measurement")
        samples.setdefault(figure, []).append(float(value))


def _refuse_not_finite(where: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, one in value.items():
            _refuse_not_finite(f"{where}.{key}", one)
    elif isinstance(value, (list, tuple)):
        for index, one in enumerate(value):
            _refuse_not_finite(f"{where}[{index}]", one)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BenchFailed(f"{where}: is {value}, no measurement")
