"""`Completion` for rules that overlap: quotas on several attributes, span caps, few prompts of a kind.

What it guarantees: every yes and every no is exact, so what is admitted depends on the rules and the groups alone. How:

1. it keeps a *witness*, counts by kind that finish the batch (and a few others, for other pools); taking what the witness
   contains is safe at once;
2. a kind that the bounds of one attribute alone rule out cannot be taken;
3. otherwise the witness is repaired (`witness`): one kind goes in and another out, or two and two;
4. how much of a pool can be used at all is bounded from above by cuts, each found once by the solver and valid ever after;
5. only what none of these decides is asked of the solver (`completion_solver`), and a no is kept: as long as the batch is being
   filled, what cannot be taken once can never be taken.

A kind here is a group's kind at its completion: its prompt's values, then values known only when it is done. A pool may also
count groups whose later values are not known yet, by their prompt's kind: they may turn out any way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from knittrans_jax.admission.completion import Kind, Picker, Shortage
from knittrans_jax.admission.completion_solver import Program
from knittrans_jax.admission.completion_space import Space
from knittrans_jax.admission.witness import Work

MAX_KNOWN = 4
"""Witnesses kept: the launch gate asks about another pool than the policy does, and each has its own."""


class Overlapping:
    """See the module's opening."""

    __slots__ = ("_dead", "_known", "_witness", "least", "most", "slots", "space")

    def __init__(self, space: Space) -> None:
        self.space, self.slots = space, space.groups
        self.least, self.most = [row.least for row in space.rows], [row.most for row in space.rows]
        self._dead: set[int] = set()
        self._witness: list[int] | None = None
        self._known: list[list[int]] = []

    def __eq__(self, other: object) -> bool:
        """What the batch still needs; how it is known that it can be had does not matter."""
        return self.key == other.key if isinstance(other, Overlapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def key(self) -> tuple[int, ...]:
        """What the batch still needs: slots, minima and maxima."""
        return (self.slots, *self.least, *self.most)

    @property
    def slots_left(self) -> int:
        """Groups that the batch still takes."""
        return self.slots

    @property
    def witness(self) -> list[int] | None:
        """Counts by kind that finish the batch; None: nothing does."""
        if self._witness is None:
            known = self.space.remembered.get(self.key)
            found = list(known) if known is not None else self.space.solve(self.program())
            if found is None:
                return None
            self.keep(found)
        return self._witness

    def can_take(self, kind: Kind) -> bool:
        """See `Completion.can_take`."""
        t = self.space.index[kind]
        witness = self.witness
        if t in self._dead or not self.slots or witness is None:
            return False
        work = Work(self, witness, [self.slots] * len(self.space.kinds), [0], self.space.one_class)
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
            after.subtract(self.space.index[kind], count)
        if after.slots < 0 or min(after.most, default=0) < 0 or not after._completes(self._witness, counts):
            raise ValueError(
                f"a train batch with {self.slots} slots left cannot take { {', '.join(k): n for k, n in counts.items()} }: "
                f"it could not be finished any more (still to come: {self._needs()})"
            )
        self.slots, self.least, self.most, self._witness = after.slots, after.least, after.most, after._witness
        self._known = [rest for one in self._known if min(rest := self._without(one, counts)) >= 0]

    def usable(self, pool: Mapping[Kind, int]) -> int:
        """See `Completion.usable`."""
        space = self.space
        if any(len(kind) == space.launched < len(space.kinds[0]) for kind in pool):
            return self._usable_unfinished(pool)
        return self._most_from(space.counts(pool))[0]

    def can_use(self, pool: Mapping[Kind, int], wanted: int) -> bool:
        """See `Completion.can_use`. A witness that uses so many is a yes, a bound below it a no; else `usable` decides."""
        space, witness = self.space, self.witness
        if witness is None:
            return wanted <= 0
        if any(len(kind) == space.launched < len(space.kinds[0]) for kind in pool):
            return self._usable_unfinished(pool) >= wanted
        counts = space.counts(pool)
        if sum(map(min, self._nearest(witness, counts), counts)) >= wanted:
            return True
        if min(self._at_most(counts), space.bound(self.slots, self.most, self.least, counts)) < wanted:
            return False
        return self._most_from(counts, wanted)[0] >= wanted

    def shortage(self, pool: Mapping[Kind, int], wanted: int) -> Shortage | None:
        """See `Completion.shortage`. Names an attribute that alone explains it, else all of them together."""
        space = self.space
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
            if min(within, self.slots - sum(unmet.values())) > usable:
                continue
            if unmet and self.slots - sum(unmet.values()) <= within:
                row = max(unmet, key=lambda r: (unmet[r], space.rows[r].value))
                return Shortage(f"{space.rows[row].key}.min", space.rows[row].value, min(missing, unmet[row]), kinds)
            full = [r for r in space.by_attribute[attribute] if free[r] > self.most[r]]
            if full:
                row = space.rows[min(full, key=lambda r: space.rows[r].value)]
                return Shortage(f"{row.key}.max", row.value, missing, kinds)
            return Shortage("batch.groups", f"{space.mini_batch_groups} per mini-batch", missing, kinds)
        return Shortage(space.together, "taken together", missing, kinds)

    def picker(self, pool: Mapping[Kind, int], wanted: int) -> Picker:
        """See `Completion.picker`."""
        counts = self.space.counts(pool)
        usable, witness = self._most_from(counts, wanted)
        if usable < wanted:
            raise ValueError(f"{wanted} groups were to be picked, {usable} can be")
        return OverlappingPicker(self, counts, [wanted], self.space.one_class, witness)

    def picker_by_value(self, pool: Mapping[Kind, int], wanted: Mapping[Kind, int]) -> OverlappingPicker | None:
        """Picks so many groups by value of the first attribute (a kind of one value); None: the pool has no such mini-batch."""
        space, counts = self.space, self.space.counts(pool)
        values = sorted({kind[:1] for kind in space.kinds})
        class_of = [values.index(kind[:1]) for kind in space.kinds]
        needs = [wanted.get(value, 0) for value in values]
        witness = self.witness
        if witness is None:
            return None
        work = Work(self, witness, counts, needs, class_of)
        if not work.enough:
            found = space.solve(self.program(), counts, work.classes())
            if found is None:
                return None
            witness = found
        return OverlappingPicker(self, counts, needs, class_of, witness)

    def lightest(self, pool: Mapping[Kind, Sequence[int]], wanted: int) -> float:
        """Least total weight of `wanted` groups of a pool (weights by kind, lightest first); infinite: it has not so many."""
        weights = [list(pool.get(kind, ()))[:wanted] for kind in self.space.kinds]
        return self.space.lightest(self.program(), weights, wanted)

    def relax(self, rule: str, value: str) -> bool:
        """See `Completion.relax`."""
        space = self.space
        together = rule == space.together
        found = False
        for r, row in enumerate(space.rows):
            if row.attribute >= 0 and (
                together or (row.value == value and rule in (f"{row.key}.min", f"{row.key}.max"))
            ):
                found = True
                if together or rule.endswith(".min"):
                    self.least[r] = 0
                if together or rule.endswith(".max"):
                    self.most[r] = self.slots
        if found:
            self._dead = set()
            self._known = []
        return found

    def copy(self) -> Overlapping:
        """An independent copy."""
        other = Overlapping.__new__(Overlapping)
        other.space, other.slots = self.space, self.slots
        other.least, other.most = self.least.copy(), self.most.copy()
        other._dead, other._witness, other._known = set(self._dead), self._witness, list(self._known)
        return other

    # --- inside ---------------------------------------------------------------------------------------------------------------

    def _needs(self) -> str:
        rows = zip(self.space.rows, self.least, self.most, strict=True)
        return "; ".join(f"{row.key}.{row.value} {least} to {most}" for row, least, most in rows)

    def program(self, floor: Sequence[int] | None = None) -> Program:
        """What the batch still needs, for the solver, with at least `floor` of each kind."""
        space = self.space
        return Program(
            space.matrix, self.slots, self.least, self.most, floor if floor is not None else [0] * len(space.kinds)
        )

    def subtract(self, t: int, count: int) -> None:
        """Groups of the kind with this number are in the batch; whether it can still be finished is not asked."""
        self.slots -= count
        for r in self.space.of_kind[t]:
            self.most[r] -= count
            self.least[r] = max(0, self.least[r] - count)

    def keep(self, witness: Sequence[int]) -> None:
        """This finishes the batch."""
        self._witness = list(witness)
        self.space.remember(self.key, witness)
        if self._witness not in self._known:
            self._known = [self._witness, *self._known[: MAX_KNOWN - 1]]

    def _without(self, witness: Sequence[int], taken: Mapping[Kind, int]) -> list[int]:
        """What is left of a witness when these groups are in the batch; negative where it had too few."""
        rest = list(witness)
        for kind, count in taken.items():
            rest[self.space.index[kind]] -= count
        return rest

    def _nearest(self, witness: list[int], pool: Sequence[int]) -> list[int]:
        """Of the witnesses that are known, the one that uses most of this pool."""
        if len(self._known) < 2:
            return witness
        return max([witness, *self._known], key=lambda one: sum(map(min, one, pool)))

    def _completes(self, before: Sequence[int] | None, taken: Mapping[Kind, int]) -> bool:
        """Whether the batch can be finished, given a witness from before these were taken."""
        known = self.space.remembered.get(self.key)
        if known is not None:
            self._witness = list(known)
            return True
        for one in self._known if before is None else [before, *self._known]:
            rest = self._without(one, taken)
            if min(rest) >= 0:
                self.keep(rest)
                return True
        self._witness = None
        return self.witness is not None

    def _of_attribute(self, attribute: int, pool: Sequence[int]) -> tuple[int, dict[int, int], dict[int, int]]:
        """By one attribute alone: groups within its maxima, minima that the pool leaves unmet, and the pool, by row."""
        have = dict.fromkeys([*self.space.by_attribute[attribute], -1], 0)
        for row, count in zip(self.space.row_of[attribute], pool, strict=True):
            have[row] += count
        within = have[-1] + sum(min(have[r], self.most[r]) for r in self.space.by_attribute[attribute])
        unmet = {r: self.least[r] - have[r] for r in self.space.by_attribute[attribute] if self.least[r] > have[r]}
        return within, unmet, have

    def _at_most(self, pool: Sequence[int]) -> int:
        """No more than so many of the pool are usable: the least of what each attribute alone allows."""
        bound = min(self.slots, sum(pool))
        for attribute in range(len(self.space.by_attribute)):
            within, unmet, _ = self._of_attribute(attribute, pool)
            bound = min(bound, within, self.slots - sum(unmet.values()))
        return bound

    def _most_from(self, pool: Sequence[int], wanted: int | None = None) -> tuple[int, list[int]]:
        """The most groups that the pool can give (or `wanted`, once it is clear that it can), and a witness that uses them."""
        witness, space = self.witness, self.space
        if witness is None:
            return 0, [0] * len(pool)
        witness = self._nearest(witness, pool)
        used = sum(map(min, witness, pool))
        if wanted is not None and used >= wanted:
            return used, witness
        bound = min(self._at_most(pool), space.bound(self.slots, self.most, self.least, pool))
        if used < bound:
            work = Work(self, witness, list(pool), [0], space.one_class)
            used = work.use_more(bound if wanted is None else min(bound, wanted))
            witness = work.witness
            if used < bound and (wanted is None or used < wanted):
                program = self.program()
                space.cut(program, pool)
                bound = min(bound, space.bound(self.slots, self.most, self.least, pool))
                if used < bound:
                    found = space.solve(program, pool)
                    assert found is not None, "a witness is known"
                    witness, used = found, sum(map(min, found, pool))
            self.keep(witness)
        return used, witness

    def _usable_unfinished(self, pool: Mapping[Kind, int]) -> int:
        """`usable` where some groups' later values are still open: those may turn out as the batch needs them."""
        space, witness = self.space, self.witness
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
        if most == min(self.slots, sum(pool.values())):
            return most
        later = [(outcomes, unfinished[kind]) for kind, outcomes in space.later.items()]
        found = space.solve(self.program(), finished, later=later)
        assert found is not None, "a witness is known"
        self.keep(found)
        return used(found)


class OverlappingPicker:
    """`Picker` on a pool: what the witness contains is taken at once; a kind that cannot be taken once never can."""

    __slots__ = ("_blocked", "_completion", "_index", "_left", "_origin", "_taken", "_work")

    def __init__(
        self, completion: Overlapping, pool: list[int], wanted: list[int], class_of: list[int], witness: list[int]
    ) -> None:
        self._origin, self._taken = completion, [0] * len(pool)
        self._completion = completion.copy()
        self._completion._witness = witness
        self._index = completion.space.index
        self._blocked: set[int] = set(completion._dead)
        self._left = sum(wanted)
        self._work = Work(self._completion, witness, pool, wanted, class_of)

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
        self._completion.subtract(t, 1)
        self._taken[t] += 1
        self._left -= 1
        if not self._left or sum(self._taken) == work.space.mini_batch_groups:
            self._completion.keep(work.witness)
            # The batch picked from is asked next, about what was picked.
            self._origin.keep([a + b for a, b in zip(self._taken, work.witness, strict=True)])
        return True

    def skip(self, kind: Kind) -> None:
        """See `Picker.skip`."""
        work, t = self._work, self._index[kind]
        work.pool[t] -= 1
        if work.witness[t] <= work.pool[t]:
            return
        work.used[work.class_of[t]] -= 1
        if not work.enough:
            found = work.space.solve(self._completion.program(), work.pool, work.classes())
            if found is not None:
                work.adopt(found)
            else:
                work.wanted = [min(a, b) for a, b in zip(work.wanted, work.used, strict=True)]  # the caller ends short
