"""The kinds and bounds of rules that overlap, and what has been found out about them: shared by all batches of a run.

What it keeps is never needed for an answer, only for its price: witnesses by what a batch still needs, and cuts, which bound
what any pool can give to any batch.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from knittrans_jax.admission.completion import Kind
from knittrans_jax.admission.completion_solver import Cut, Program, lightest, solve, tightest_cut

MAX_REMEMBERED = 4096
"""Witnesses kept by what the batch still needs, so that folding an admission in does not find them again."""
MAX_CUTS = 256
"""Bounds kept on what a pool can give; the one that was tight longest ago goes."""


@dataclasses.dataclass(frozen=True)
class Row:
    """At least `least` and at most `most` groups of the kinds that have `value`. `key` is the rule's configuration key."""

    key: str
    value: str
    attribute: int
    """Rows of one attribute share a number and no kind; -1: it stands alone and has no minimum."""
    kinds: frozenset[Kind]
    least: int
    most: int


class Space:
    """The kinds and rows of a run's rules, shared by all its batches. Memory: kinds x rows, and `MAX_REMEMBERED` witnesses."""

    def __init__(
        self, groups: int, mini_batch_groups: int, kinds: Sequence[Kind], rows: Sequence[Row], launched: int
    ) -> None:
        """`launched`: how many values of a kind are known when its prompt is launched."""
        self.groups, self.mini_batch_groups, self.kinds, self.rows = (
            groups,
            mini_batch_groups,
            tuple(kinds),
            tuple(rows),
        )
        self.launched = launched
        self.index = {kind: i for i, kind in enumerate(self.kinds)}
        self.later: dict[Kind, list[int]] = {}
        for i, kind in enumerate(self.kinds):
            self.later.setdefault(kind[:launched], []).append(i)
        self.of_kind = [tuple(r for r, row in enumerate(self.rows) if kind in row.kinds) for kind in self.kinds]
        self.matrix = np.array([[kind in row.kinds for kind in self.kinds] for row in self.rows], np.int64)
        self.matrix = self.matrix.reshape(len(self.rows), len(self.kinds))
        attributes = sorted({row.attribute for row in self.rows if row.attribute >= 0})
        self.by_attribute = [[r for r, row in enumerate(self.rows) if row.attribute == a] for a in attributes]
        self.row_of = [
            [next((r for r in self.of_kind[i] if r in rows_of), -1) for i in range(len(self.kinds))]
            for rows_of in map(set, self.by_attribute)
        ]
        self.swaps = _swaps(self.of_kind)
        self.one_class = [0] * len(self.kinds)
        """All kinds alike: a mini-batch of any composition."""
        self.together = ", ".join(dict.fromkeys(row.key for row in self.rows if row.attribute >= 0))
        """The name of all quotas at once, for what no single one explains."""
        self.remembered: collections.OrderedDict[tuple[int, ...], tuple[int, ...]] = collections.OrderedDict()
        self._having: dict[tuple[int, ...], list[int]] = {}
        self._cuts: list[Cut] = []
        self._tight: list[int] = []
        self._cut_matrix = np.zeros((0, 1 + 2 * len(self.rows) + len(self.kinds)))
        self.asked = 0
        """Questions whether a kind may be taken."""
        self.solved_s: collections.deque[float] = collections.deque(maxlen=100_000)
        """Seconds of each call of the solver."""

    def solve(
        self,
        program: Program,
        pool: Sequence[int] | None = None,
        wanted: Sequence[tuple[Sequence[int], int]] = (),
        later: Sequence[tuple[Sequence[int], int]] = (),
    ) -> list[int] | None:
        """`completion_solver.solve`, timed."""
        began_s = time.perf_counter()
        found = solve(program, pool, wanted, later)
        self.solved_s.append(time.perf_counter() - began_s)
        return found

    def lightest(self, program: Program, weights: Sequence[Sequence[int]], wanted: int) -> float:
        """`completion_solver.lightest`, timed."""
        began_s = time.perf_counter()
        found = lightest(program, weights, wanted)
        self.solved_s.append(time.perf_counter() - began_s)
        return found

    def bound(self, slots: int, most: Sequence[int], least: Sequence[int], pool: Sequence[int]) -> int:
        """No batch that still needs this can use more of the pool, by the cuts found so far."""
        if not self._cuts:
            return slots
        values = self._cut_matrix @ np.array([slots, *most, *least, *pool], np.float64)
        lowest = int(np.argmin(values))
        self._tight[lowest] = self.asked
        return min(slots, math.floor(float(values[lowest]) + 1e-6))

    def cut(self, program: Program, pool: Sequence[int]) -> None:
        """Finds and keeps the cut that is lowest here."""
        began_s = time.perf_counter()
        cut = tightest_cut(program, pool)
        self.solved_s.append(time.perf_counter() - began_s)
        if len(self._cuts) >= MAX_CUTS:
            oldest = self._tight.index(min(self._tight))
            del self._cuts[oldest], self._tight[oldest]
            self._cut_matrix = np.delete(self._cut_matrix, oldest, axis=0)
        self._cuts.append(cut)
        self._tight.append(self.asked)
        row = np.concatenate([[cut.slots], cut.most, -cut.least, cut.pool])
        self._cut_matrix = np.vstack([self._cut_matrix, row])

    def remember(self, key: tuple[int, ...], witness: Sequence[int]) -> None:
        """Keeps what finishes a batch that still needs this."""
        self.remembered[key] = tuple(witness)
        if len(self.remembered) > MAX_REMEMBERED:
            self.remembered.popitem(last=False)

    def having(self, rows: Sequence[int]) -> list[int]:
        """The kinds that all of these rows count."""
        key = tuple(rows)
        found = self._having.get(key)
        if found is None:
            found = self._having[key] = [t for t, of in enumerate(self.of_kind) if all(r in of for r in rows)]
        return found

    def counts(self, pool: Mapping[Kind, int]) -> list[int]:
        """A pool of finished groups as counts in the order of `kinds`."""
        counts = [0] * len(self.kinds)
        for kind, count in pool.items():
            counts[self.index[kind]] = count
        return counts


def _swaps(of_kind: Sequence[tuple[int, ...]]) -> list[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """`[t][u]`: rows that gain, rows that lose, when `t` comes in for `u`."""
    return [[(tuple(r for r in t if r not in u), tuple(r for r in u if r not in t)) for u in of_kind] for t in of_kind]
