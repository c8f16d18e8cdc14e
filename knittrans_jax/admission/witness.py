"""Repairing a witness: counts by kind that finish a batch, changed so that they contain one more kind or use more of a pool.

One kind goes in and another out, or two and two; every intermediate answer keeps all bounds. What swaps do not find, the solver
decides, so `Work.make_room` is exact.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Protocol

from knittrans_jax.admission.completion_solver import Program, SolverFailed
from knittrans_jax.admission.completion_space import Space


class Needs(Protocol):
    """What a batch still needs: slots, and by row at least and at most so many groups."""

    space: Space
    slots: int
    least: list[int]
    most: list[int]

    def program(self, floor: Sequence[int] | None = None) -> Program:
        """The same for the solver, with at least `floor` of each kind."""
        ...


class Work:
    """A witness being repaired.

    `pool` by kind. Kinds fall into classes; of class `c`, at least `wanted[c]` of the pool must stay usable:
    `used[c]`, the sum of `min(witness, pool)`.
    """

    __slots__ = ("class_of", "needs", "pool", "room", "space", "spare", "used", "wanted", "witness")

    def __init__(
        self, needs: Needs, witness: Sequence[int], pool: list[int], wanted: list[int], class_of: list[int]
    ) -> None:
        """`pool` and `wanted` are counted down as kinds are removed; `needs` is looked at, not changed."""
        self.space, self.needs, self.pool, self.wanted, self.class_of = needs.space, needs, pool, wanted, class_of
        self.adopt(list(witness))

    def adopt(self, witness: list[int]) -> None:
        """Goes on from another witness."""
        self.witness = witness
        totals = [0] * len(self.space.rows)
        self.used = [0] * len(self.wanted)
        for t, count in enumerate(witness):
            if count:
                self.used[self.class_of[t]] += min(count, self.pool[t])
                for r in self.space.of_kind[t]:
                    totals[r] += count
        self.spare = [total - least for total, least in zip(totals, self.needs.least, strict=True)]
        self.room = [most - total for total, most in zip(totals, self.needs.most, strict=True)]

    @property
    def enough(self) -> bool:
        """As many of the pool are usable as must be."""
        return all(used >= wanted for used, wanted in zip(self.used, self.wanted, strict=True))

    def classes(self) -> list[tuple[list[int], int]]:
        """What must stay usable, for the solver: kinds and number."""
        kinds = range(len(self.class_of))
        return [([t for t in kinds if self.class_of[t] == c], wanted) for c, wanted in enumerate(self.wanted) if wanted]

    def make_room(self, t: int) -> bool:
        """Changes the witness so that it contains kind `t`; False: no witness does, with enough of the pool."""
        self.space.asked += 1
        if self.witness[t]:
            return True
        if self._ruled_out(t):
            return False
        if self._swap_in(t) or self._swap_two_in(t):
            return True
        if self._bounded_out(t):
            return False
        floor = [0] * len(self.witness)
        floor[t] = 1
        classes = self.classes()
        found = self.space.solve(self.needs.program(floor), self.pool if classes else None, classes)
        if found is not None:
            self.adopt(found)
        elif len(self.wanted) == 1 and self.wanted[0] and self.pool[t]:
            slots, least, most, pool = self._after(t)
            rows = self.needs.program().rows
            with contextlib.suppress(SolverFailed):  # no batch at all has a `t`: nothing is bounded then
                self.space.cut(
                    Program(rows, slots, least, most, [0] * len(pool)), pool
                )  # answers the next like question
        return found is not None

    def _after(self, t: int) -> tuple[int, list[int], list[int], list[int]]:
        """Slots, minima, maxima and pool when one `t` is in the batch."""
        least, most, pool = list(self.needs.least), list(self.needs.most), list(self.pool)
        for r in self.space.of_kind[t]:
            most[r] -= 1
            least[r] = max(0, least[r] - 1)
        pool[t] -= 1
        return self.needs.slots - 1, least, most, pool

    def _bounded_out(self, t: int) -> bool:
        """With one `t` of the pool in the batch, the cuts found so far leave too little of the pool usable."""
        if len(self.wanted) != 1 or not self.wanted[0] or not self.pool[t]:
            return False
        slots, least, most, pool = self._after(t)
        return self.space.bound(slots, most, least, pool) < self.wanted[0] - 1

    def use_more(self, wanted: int) -> int:
        """Swaps until `wanted` of the pool are used (all kinds in one class) or nothing helps -> how many are."""
        moved = True
        while self.used[0] < wanted and moved:
            moved = False
            for t, have in enumerate(self.pool):
                while self.used[0] < wanted and self.witness[t] < have and self._swap_in(t, improve=True):
                    moved = True
        return self.used[0]

    def _ruled_out(self, t: int) -> bool:
        """One attribute's bounds alone forbid it."""
        least, most, slots = self.needs.least, self.needs.most, self.needs.slots
        for r in self.space.of_kind[t]:
            if most[r] < 1:
                return True
        for rows, row_of in zip(self.space.by_attribute, self.space.row_of, strict=True):
            if row_of[t] < 0 or not least[row_of[t]]:
                reserved = 0
                for r in rows:
                    reserved += least[r]
                if slots <= reserved:
                    return True
        return False

    def _fits(self, t: int, u: int, *, improve: bool = False) -> bool:
        """Whether enough of the pool stays usable when one `t` comes in and one `u` goes out."""
        gain = 1 if self.witness[t] < self.pool[t] else 0
        loss = 1 if self.witness[u] <= self.pool[u] else 0
        if improve:
            return gain > loss
        a, b = self.class_of[t], self.class_of[u]
        if a == b:
            return self.used[a] + gain - loss >= self.wanted[a]
        return self.used[b] - loss >= self.wanted[b]

    def _swap_in(self, t: int, *, improve: bool = False) -> bool:
        """One `t` in, one other out. `improve`: only where more of the pool is used then."""
        witness, room, spare = self.witness, self.room, self.spare
        for u, (gains, losses) in enumerate(self.space.swaps[t]):
            if not witness[u] or u == t:
                continue
            for r in gains:
                if room[r] < 1:
                    break
            else:
                for r in losses:
                    if spare[r] < 1:
                        break
                else:
                    if self._fits(t, u, improve=improve):
                        self._apply(t, u)
                        return True
        return False

    def _swap_two_in(self, t: int) -> bool:
        """`t` in and some `u` out breaks a rule; another pair that mends it, if there is one."""
        for u, (gains, losses) in enumerate(self.space.swaps[t]):
            if not self.witness[u] or u == t:
                continue
            over = [r for r in gains if self.room[r] < 1]
            under = [r for r in losses if self.spare[r] < 1]
            if not over and not under:
                continue
            self._apply(t, u)
            if self._mend(t, over, under):
                return True
            self._apply(u, t)
        return False

    def _mend(self, t: int, over: list[int], under: list[int]) -> bool:
        """One more pair, in and out, so that no row has too much (`over`) or too little (`under`) any more."""
        of_kind, swaps, room, spare = self.space.of_kind, self.space.swaps, self.room, self.spare
        into = self.space.having(under)
        for v in self.space.having(over):
            if not self.witness[v] or v == t or any(r in of_kind[v] for r in under):
                continue
            for q in into:
                if q == v or any(r in of_kind[q] for r in over):
                    continue
                gains, losses = swaps[q][v]
                if any(room[r] < 1 for r in gains) or any(spare[r] < 1 for r in losses):
                    continue
                self._apply(q, v)
                if self.enough:
                    return True
                self._apply(v, q)
        return False

    def _apply(self, t: int, u: int) -> None:
        """One `t` in, one `u` out."""
        witness = self.witness
        if witness[u] <= self.pool[u]:
            self.used[self.class_of[u]] -= 1
        witness[u] -= 1
        if witness[t] < self.pool[t]:
            self.used[self.class_of[t]] += 1
        witness[t] += 1
        gains, losses = self.space.swaps[t][u]
        for r in gains:
            self.room[r] -= 1
            self.spare[r] += 1
        for r in losses:
            self.room[r] += 1
            self.spare[r] -= 1

    def remove(self, t: int) -> None:
        """One `t` of the witness and of the pool is taken: minima that are met already are kept by one fewer."""
        for r in self.space.of_kind[t]:
            if not self.needs.least[r]:
                self.spare[r] -= 1
        self.witness[t] -= 1
        self.pool[t] -= 1
        self.used[self.class_of[t]] -= 1
        self.wanted[self.class_of[t]] -= 1
