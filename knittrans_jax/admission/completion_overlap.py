"""`Completion` for rules that overlap: quotas on several attributes, span caps, few prompts of a kind.

What it guarantees: every yes and every no is exact, so what is admitted depends on the rules and the groups alone. How:

1. it keeps a *witness*, counts by kind that finish the batch; taking what the witness contains is safe at once;
2. a kind that the bounds of one attribute alone rule out cannot be taken;
3. otherwise the witness is repaired: one kind goes in and another out, or two and two;
4. only what none of these decides is asked of the solver (`completion_solver`), and a no is kept: as long as the batch is being
   filled, what cannot be taken once can never be taken.

A kind here is a group's kind at its completion: its prompt's values, then values known only when it is done. A pool may also
count groups whose later values are not known yet, by their prompt's kind: they may turn out any way.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping, Sequence

import numpy as np

from knittrans_jax.admission.completion import Kind, Picker, Shortage
from knittrans_jax.admission.completion_solver import Program, lightest, solve

MAX_REMEMBERED = 4096
"""Witnesses kept by what the batch still needs, so that folding an admission in does not find them again."""


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

    def remember(self, key: tuple[int, ...], witness: Sequence[int]) -> None:
        """Keeps what finishes a batch that still needs this."""
        self.remembered[key] = tuple(witness)
        if len(self.remembered) > MAX_REMEMBERED:
            self.remembered.popitem(last=False)

    def having(self, rows: Sequence[int]) -> list[int]:
        """The kinds that all of these rows count."""
        return [t for t, of in enumerate(self.of_kind) if all(r in of for r in rows)]

    def counts(self, pool: Mapping[Kind, int]) -> list[int]:
        """A pool of finished groups as counts in the order of `kinds`."""
        counts = [0] * len(self.kinds)
        for kind, count in pool.items():
            counts[self.index[kind]] = count
        return counts


def _swaps(of_kind: Sequence[tuple[int, ...]]) -> list[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """`[t][u]`: rows that gain, rows that lose, when `t` comes in for `u`."""
    return [[(tuple(r for r in t if r not in u), tuple(r for r in u if r not in t)) for u in of_kind] for t in of_kind]


class Overlapping:
    """See the module's opening."""

    __slots__ = ("_dead", "_least", "_most", "_slots", "_space", "_witness")

    def __init__(self, space: Space) -> None:
        self._space, self._slots = space, space.groups
        self._least, self._most = [row.least for row in space.rows], [row.most for row in space.rows]
        self._dead: set[int] = set()
        self._witness: list[int] | None = None

    def __eq__(self, other: object) -> bool:
        """What the batch still needs; how it is known that it can be had does not matter."""
        return self.key == other.key if isinstance(other, Overlapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def key(self) -> tuple[int, ...]:
        """What the batch still needs: slots, minima and maxima."""
        return (self._slots, *self._least, *self._most)

    @property
    def slots_left(self) -> int:
        """Groups that the batch still takes."""
        return self._slots

    @property
    def witness(self) -> list[int] | None:
        """Counts by kind that finish the batch; None: nothing does."""
        if self._witness is None:
            known = self._space.remembered.get(self.key)
            found = list(known) if known is not None else self._space.solve(self._program())
            if found is None:
                return None
            self._keep(found)
        return self._witness

    def can_take(self, kind: Kind) -> bool:
        """See `Completion.can_take`."""
        t = self._space.index[kind]
        if t in self._dead or not self._slots or self.witness is None:
            return False
        work = _Work(self._space, self, [self._slots] * len(self._space.kinds), [0], self._space.one_class)
        found = work.make_room(t)
        if found:
            self._witness = work.witness
        else:
            self._dead.add(t)
        return found

    def take(self, kind: Kind) -> None:
        """See `Completion.take`."""
        self.take_all({kind: 1})

    def take_all(self, counts: Mapping[Kind, int]) -> None:
        """See `Completion.take_all`."""
        after = self.copy()
        for kind, count in counts.items():
            after._subtract(self._space.index[kind], count)
        if after._slots < 0 or min(after._most, default=0) < 0 or not after._completes(self._witness, counts):
            raise ValueError(
                f"a train batch with {self._slots} slots left cannot take { {', '.join(k): n for k, n in counts.items()} }: "
                f"it could not be finished any more (still to come: {self._needs()})"
            )
        self._slots, self._least, self._most, self._witness = after._slots, after._least, after._most, after._witness

    def usable(self, pool: Mapping[Kind, int]) -> int:
        """See `Completion.usable`."""
        space = self._space
        if any(len(kind) == space.launched < len(space.kinds[0]) for kind in pool):
            return self._usable_unfinished(pool)
        return self._most_from(space.counts(pool))[0]

    def shortage(self, pool: Mapping[Kind, int], wanted: int) -> Shortage | None:
        """See `Completion.shortage`. Names an attribute that alone explains it, else all of them together."""
        space = self._space
        counts = space.counts(pool)
        usable, witness = self._most_from(counts, wanted)
        missing = wanted - usable
        if missing <= 0:
            return None
        helping = {
            kind[: space.launched] for kind, x, have in zip(space.kinds, witness, counts, strict=True) if x > have
        }
        kinds = tuple(sorted(helping))
        for attribute in range(len(space.by_attribute)):
            within, unmet, free = self._of_attribute(attribute, counts)
            if min(within, self._slots - sum(unmet.values())) > usable:
                continue
            if unmet and self._slots - sum(unmet.values()) <= within:
                row = max(unmet, key=lambda r: (unmet[r], space.rows[r].value))
                return Shortage(f"{space.rows[row].key}.min", space.rows[row].value, min(missing, unmet[row]), kinds)
            full = [r for r in space.by_attribute[attribute] if free[r] > self._most[r]]
            if full:
                row = space.rows[min(full, key=lambda r: space.rows[r].value)]
                return Shortage(f"{row.key}.max", row.value, missing, kinds)
            return Shortage("batch.groups", f"{space.mini_batch_groups} per mini-batch", missing, kinds)
        return Shortage(space.together, "taken together", missing, kinds)

    def picker(self, pool: Mapping[Kind, int], wanted: int) -> Picker:
        """See `Completion.picker`."""
        counts = self._space.counts(pool)
        usable, witness = self._most_from(counts, wanted)
        if usable < wanted:
            raise ValueError(f"{wanted} groups were to be picked, {usable} can be")
        return OverlappingPicker(self, counts, [wanted], self._space.one_class, witness)

    def picker_by_value(self, pool: Mapping[Kind, int], wanted: Mapping[Kind, int]) -> OverlappingPicker | None:
        """Picks so many groups by value of the first attribute (a kind of one value); None: the pool has no such mini-batch."""
        space, counts = self._space, self._space.counts(pool)
        values = sorted({kind[:1] for kind in space.kinds})
        class_of = [values.index(kind[:1]) for kind in space.kinds]
        needs = [wanted.get(value, 0) for value in values]
        witness = self.witness
        if witness is None:
            return None
        work = _Work(space, self, counts, needs, class_of)
        if not work.enough:
            found = space.solve(self._program(), counts, work.classes())
            if found is None:
                return None
            witness = found
        return OverlappingPicker(self, counts, needs, class_of, witness)

    def lightest(self, pool: Mapping[Kind, Sequence[int]], wanted: int) -> float:
        """Least total weight of `wanted` groups of a pool (weights by kind, lightest first); infinite: it has not so many."""
        weights = [list(pool.get(kind, ()))[:wanted] for kind in self._space.kinds]
        return self._space.lightest(self._program(), weights, wanted)

    def relax(self, rule: str, value: str) -> bool:
        """See `Completion.relax`."""
        space = self._space
        together = rule == space.together
        found = False
        for r, row in enumerate(space.rows):
            if row.attribute >= 0 and (
                together or (row.value == value and rule in (f"{row.key}.min", f"{row.key}.max"))
            ):
                found = True
                if together or rule.endswith(".min"):
                    self._least[r] = 0
                if together or rule.endswith(".max"):
                    self._most[r] = self._slots
        if found:
            self._dead = set()
        return found

    def copy(self) -> Overlapping:
        """An independent copy."""
        other = Overlapping.__new__(Overlapping)
        other._space, other._slots = self._space, self._slots
        other._least, other._most = self._least.copy(), self._most.copy()
        other._dead, other._witness = set(self._dead), self._witness
        return other

    # --- inside ---------------------------------------------------------------------------------------------------------------

    def _needs(self) -> str:
        rows = zip(self._space.rows, self._least, self._most, strict=True)
        return "; ".join(f"{row.key}.{row.value} {least} to {most}" for row, least, most in rows)

    def _program(self, floor: Sequence[int] | None = None) -> Program:
        space = self._space
        return Program(
            space.matrix, self._slots, self._least, self._most, floor if floor is not None else [0] * len(space.kinds)
        )

    def _subtract(self, t: int, count: int) -> None:
        self._slots -= count
        for r in self._space.of_kind[t]:
            self._most[r] -= count
            self._least[r] = max(0, self._least[r] - count)

    def _keep(self, witness: Sequence[int]) -> None:
        self._witness = list(witness)
        self._space.remember(self.key, witness)

    def _completes(self, before: Sequence[int] | None, taken: Mapping[Kind, int]) -> bool:
        """Whether the batch can be finished, given a witness from before these were taken."""
        known = self._space.remembered.get(self.key)
        if known is not None:
            self._witness = list(known)
            return True
        if before is not None:
            rest = list(before)
            for kind, count in taken.items():
                rest[self._space.index[kind]] -= count
            if min(rest) >= 0:
                self._keep(rest)
                return True
        self._witness = None
        return self.witness is not None

    def _of_attribute(self, attribute: int, pool: Sequence[int]) -> tuple[int, dict[int, int], dict[int, int]]:
        """By one attribute alone: groups within its maxima, minima that the pool leaves unmet, and the pool, by row."""
        have = dict.fromkeys([*self._space.by_attribute[attribute], -1], 0)
        for row, count in zip(self._space.row_of[attribute], pool, strict=True):
            have[row] += count
        within = have[-1] + sum(min(have[r], self._most[r]) for r in self._space.by_attribute[attribute])
        unmet = {r: self._least[r] - have[r] for r in self._space.by_attribute[attribute] if self._least[r] > have[r]}
        return within, unmet, have

    def _at_most(self, pool: Sequence[int]) -> int:
        """No more than so many of the pool are usable: the least of what each attribute alone allows."""
        bound = min(self._slots, sum(pool))
        for attribute in range(len(self._space.by_attribute)):
            within, unmet, _ = self._of_attribute(attribute, pool)
            bound = min(bound, within, self._slots - sum(unmet.values()))
        return bound

    def _most_from(self, pool: Sequence[int], wanted: int | None = None) -> tuple[int, list[int]]:
        """The most groups that the pool can give (or `wanted`, once it is clear that it can), and a witness that uses them."""
        witness = self.witness
        if witness is None:
            return 0, [0] * len(pool)
        bound = self._at_most(pool)
        enough = bound if wanted is None else min(bound, wanted)
        used = sum(map(min, witness, pool))
        if used < enough:
            work = _Work(self._space, self, list(pool), [0], self._space.one_class)
            used = work.use_more(enough)
            witness = work.witness
        if used < enough and (wanted is None or bound < wanted or used < wanted):
            found = self._space.solve(self._program(), pool)
            assert found is not None, "a witness is known"
            witness, used = found, sum(map(min, found, pool))
        if wanted is None or bound >= wanted:
            self._keep(witness)
        return used, witness

    def _usable_unfinished(self, pool: Mapping[Kind, int]) -> int:
        """`usable` where some groups' later values are still open: those may turn out as the batch needs them."""
        space, witness = self._space, self.witness
        if witness is None:
            return 0
        finished, unfinished = [0] * len(space.kinds), dict.fromkeys(space.later, 0)
        for kind, count in pool.items():
            if len(kind) == space.launched:
                unfinished[kind] += count
            else:
                finished[space.index[kind]] = count

        def used(x: Sequence[int]) -> int:
            total = 0
            for kind, outcomes in space.later.items():
                taken = sum(min(x[t], finished[t]) for t in outcomes)
                total += min(sum(x[t] for t in outcomes), taken + unfinished[kind])
            return total

        most = used(witness)
        if most == min(self._slots, sum(pool.values())):
            return most
        later = [(outcomes, unfinished[kind]) for kind, outcomes in space.later.items()]
        found = space.solve(self._program(), finished, later=later)
        assert found is not None, "a witness is known"
        self._keep(found)
        return used(found)


class _Work:
    """A witness being repaired.

    `pool` by kind. Kinds fall into classes; of class `c`, at least `wanted[c]` of the pool must stay usable:
    `used[c]`, the sum of `min(witness, pool)`.
    """

    __slots__ = ("class_of", "completion", "pool", "room", "space", "spare", "used", "wanted", "witness")

    def __init__(
        self, space: Space, completion: Overlapping, pool: list[int], wanted: list[int], class_of: list[int]
    ) -> None:
        self.space, self.completion, self.pool, self.wanted, self.class_of = space, completion, pool, wanted, class_of
        assert completion._witness is not None
        self.adopt(list(completion._witness))

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
        self.spare = [total - least for total, least in zip(totals, self.completion._least, strict=True)]
        self.room = [most - total for total, most in zip(totals, self.completion._most, strict=True)]

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
        floor = [0] * len(self.witness)
        floor[t] = 1
        classes = self.classes()
        found = self.space.solve(self.completion._program(floor), self.pool if classes else None, classes)
        if found is not None:
            self.adopt(found)
        return found is not None

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
        least, most, slots = self.completion._least, self.completion._most, self.completion._slots
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
            if not self.completion._least[r]:
                self.spare[r] -= 1
        self.witness[t] -= 1
        self.pool[t] -= 1
        self.used[self.class_of[t]] -= 1
        self.wanted[self.class_of[t]] -= 1


class OverlappingPicker:
    """`Picker` on a pool: what the witness contains is taken at once; a kind that cannot be taken once never can."""

    __slots__ = ("_blocked", "_completion", "_index", "_left", "_work")

    def __init__(
        self, completion: Overlapping, pool: list[int], wanted: list[int], class_of: list[int], witness: list[int]
    ) -> None:
        self._completion = completion.copy()
        self._completion._witness = witness
        self._index = completion._space.index
        self._blocked: set[int] = set(completion._dead)
        self._left = sum(wanted)
        self._work = _Work(completion._space, self._completion, pool, wanted, class_of)

    def take(self, kind: Kind) -> bool:
        """See `Picker.take`."""
        t, work = self._index[kind], self._work
        if not work.wanted[work.class_of[t]]:
            return False
        if not work.witness[t]:
            if t in self._blocked:
                return False
            if not work.make_room(t):
                self._blocked.add(t)
                return False
        else:
            work.space.asked += 1
        work.remove(t)
        self._completion._subtract(t, 1)
        self._left -= 1
        if not self._left:
            self._completion._keep(work.witness)
        return True

    def skip(self, kind: Kind) -> None:
        """See `Picker.skip`."""
        work, t = self._work, self._index[kind]
        work.pool[t] -= 1
        if work.witness[t] <= work.pool[t]:
            return
        work.used[work.class_of[t]] -= 1
        if not work.enough:
            found = work.space.solve(self._completion._program(), work.pool, work.classes())
            if found is not None:
                work.adopt(found)
            else:
                work.wanted = [min(a, b) for a, b in zip(work.wanted, work.used, strict=True)]  # the caller ends short
