"""Whether a partly filled train batch can still be finished within its rules: the question; the answer for one attribute.

A group's *kind* is the tuple of its values of the attributes that have rules. Groups are counted by kind; a `Completion`
answers whether one may be taken such that the remaining slots can still meet every minimum without breaking a maximum.

For one attribute the groups that may be taken together are the independent sets of a matroid (a transversal matroid cut
down to the slots that no minimum reserves). Hence taking the oldest possible group again and again never gets stuck, is the
lexicographically oldest choice, and takes as many as can be taken at all. Overlapping attributes: `completion_overlap`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

Kind = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Quota:
    """Least and most groups of one value in a train batch."""

    least: int
    most: int


@dataclasses.dataclass(frozen=True)
class Shortage:
    """Why a mini-batch cannot be formed: the rule, its value, and how many groups are missing for the mini-batch."""

    rule: str
    value: str
    missing: int
    kinds: tuple[Kind, ...]
    """Groups launched with these kinds would help."""


class Picker(Protocol):
    """Takes the groups of one mini-batch, in the order in which they are offered. It always stays possible to finish."""

    def take(self, kind: Kind) -> bool:
        """Takes a ready group of this kind; False: none of this kind can be taken any more."""
        ...

    def skip(self, kind: Kind) -> None:
        """A ready group of this kind will not be taken, whatever happens (its prompt is in the batch already)."""
        ...


class Completion(Protocol):
    """A train batch being filled. Counts are groups by kind."""

    @property
    def slots_left(self) -> int:
        """Groups that the batch still takes."""
        ...

    def can_take(self, kind: Kind) -> bool:
        """Whether the batch can still be finished within its rules after it takes one group of this kind."""
        ...

    def take(self, kind: Kind) -> None:
        """Takes one group. Raises `ValueError` when that breaks a rule."""
        ...

    def take_all(self, counts: Mapping[Kind, int]) -> None:
        """Takes several groups or, when that breaks a rule, none: `ValueError`."""
        ...

    def usable(self, pool: Mapping[Kind, int]) -> int:
        """The most groups of the pool that this batch can take and still be finished, by others where needed."""
        ...

    def can_use(self, pool: Mapping[Kind, int], wanted: int) -> bool:
        """Whether `usable` is at least `wanted`; may be answered sooner."""
        ...

    def shortage(self, pool: Mapping[Kind, int], wanted: int) -> Shortage | None:
        """What is missing to take `wanted` groups from the pool; None when nothing is."""
        ...

    def picker(self, pool: Mapping[Kind, int], wanted: int) -> Picker:
        """Picks `wanted` groups out of a pool for which `shortage` is None."""
        ...

    def relax(self, rule: str, value: str) -> bool:
        """Drops the rule that a `Shortage` named, for this batch; False: it is none that can be dropped."""
        ...

    def copy(self) -> Completion:
        """An independent copy."""
        ...


class SizeOnly:
    """`Completion` of a batch that has a size and no other rule."""

    __slots__ = ("_kinds", "_size", "_slots")

    def __init__(self, groups: int, mini_batch_groups: int, kinds: tuple[Kind, ...]) -> None:
        self._slots, self._size, self._kinds = groups, mini_batch_groups, kinds

    def __eq__(self, other: object) -> bool:
        return self._slots == other._slots if isinstance(other, SizeOnly) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    @property
    def slots_left(self) -> int:
        """Groups that the batch still takes."""
        return self._slots

    def can_take(self, kind: Kind) -> bool:
        """See `Completion.can_take`."""
        return self._slots > 0

    def take(self, kind: Kind) -> None:
        """See `Completion.take`."""
        self.take_all({kind: 1})

    def take_all(self, counts: Mapping[Kind, int]) -> None:
        """See `Completion.take_all`."""
        wanted = sum(counts.values())
        if wanted > self._slots:
            raise ValueError(f"a train batch with {self._slots} slots left cannot take {wanted} groups")
        self._slots -= wanted

    def usable(self, pool: Mapping[Kind, int]) -> int:
        """See `Completion.usable`."""
        return min(self._slots, sum(pool.values()))

    def can_use(self, pool: Mapping[Kind, int], wanted: int) -> bool:
        """See `Completion.can_use`."""
        return self.usable(pool) >= wanted

    def shortage(self, pool: Mapping[Kind, int], wanted: int) -> Shortage | None:
        """See `Completion.shortage`."""
        missing = wanted - self.usable(pool)
        if missing <= 0:
            return None
        return Shortage("batch.groups", f"{self._size} per mini-batch", missing, self._kinds)

    def picker(self, pool: Mapping[Kind, int], wanted: int) -> Picker:
        """See `Completion.picker`."""
        return _GreedyPicker(self.copy())

    def relax(self, rule: str, value: str) -> bool:
        """See `Completion.relax`: the size stays."""
        return False

    def copy(self) -> SizeOnly:
        """An independent copy."""
        return SizeOnly(self._slots, self._size, self._kinds)


class OneAttribute:
    """`Completion` for quotas on one attribute; the kinds are its values."""

    __slots__ = ("_key", "_least", "_most", "_reserved", "_size", "_slack", "_slots")

    def __init__(
        self,
        groups: int,
        mini_batch_groups: int,
        key: str,
        quotas: Mapping[Kind, Quota],
        slack: Mapping[Kind, int] | None = None,
    ) -> None:
        """Opens a batch.

        Args:
            groups: slots of the batch.
            mini_batch_groups: of a mini-batch, for messages.
            key: the configuration key of the attribute's quotas, for messages.
            quotas: bounds by kind.
            slack: by how much a maximum was tightened because the minima leave no more; a relaxed minimum gives it back.
        """
        self._slack = slack or {}
        self._slots, self._size, self._key = groups, mini_batch_groups, key
        self._least = {kind: quota.least for kind, quota in quotas.items()}
        self._most = {kind: quota.most for kind, quota in quotas.items()}
        self._reserved = sum(self._least.values())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OneAttribute):
            return NotImplemented
        return (self._slots, self._least, self._most) == (other._slots, other._least, other._most)

    __hash__ = None  # type: ignore[assignment]

    @property
    def slots_left(self) -> int:
        """Groups that the batch still takes."""
        return self._slots

    def can_take(self, kind: Kind) -> bool:
        """See `Completion.can_take`."""
        if self._slots <= 0 or self._most[kind] <= 0:
            return False
        return self._least[kind] > 0 or self._slots > self._reserved

    def take(self, kind: Kind) -> None:
        """See `Completion.take`."""
        self.take_all({kind: 1})

    def take_all(self, counts: Mapping[Kind, int]) -> None:
        """See `Completion.take_all`."""
        slots, reserved = self._slots, self._reserved
        for kind, count in counts.items():
            slots -= count
            reserved -= min(count, self._least[kind])
            if count > self._most[kind]:
                slots = -1
        if slots < max(0, reserved):
            raise ValueError(
                f"a train batch with {self._slots} slots left, {self._reserved} of them reserved for minima, cannot take "
                f"{ {', '.join(kind): count for kind, count in counts.items()} } (least {self._least}, most {self._most} more)"
            )
        self._slots, self._reserved = slots, reserved
        for kind, count in counts.items():
            self._most[kind] -= count
            self._least[kind] -= min(count, self._least[kind])

    def usable(self, pool: Mapping[Kind, int]) -> int:
        """See `Completion.usable`. Rank of the matroid: `min` over its two bounds (maxima; slots that minima leave)."""
        most, least = self._most, self._least
        within_maxima, unmet = 0, 0
        for kind, count in pool.items():
            within_maxima += count if count < most[kind] else most[kind]
        if self._reserved:
            for kind, wanted in least.items():
                short = wanted - pool.get(kind, 0)
                if short > 0:
                    unmet += short
        return min(within_maxima, self._slots - unmet)

    def can_use(self, pool: Mapping[Kind, int], wanted: int) -> bool:
        """See `Completion.can_use`."""
        return self.usable(pool) >= wanted

    def shortage(self, pool: Mapping[Kind, int], wanted: int) -> Shortage | None:
        """See `Completion.shortage`. Names the largest unmet minimum first, else the maxima that block, else the size."""
        missing = wanted - self.usable(pool)
        if missing <= 0:
            return None
        unmet = {kind: least - pool.get(kind, 0) for kind, least in self._least.items() if least > pool.get(kind, 0)}
        within_maxima = sum(min(count, self._most[kind]) for kind, count in pool.items())
        if unmet and self._slots - sum(unmet.values()) <= within_maxima:
            kind = max(unmet, key=lambda k: (unmet[k], k))
            return Shortage(f"{self._key}.min", kind[0], min(missing, unmet[kind]), tuple(sorted(unmet)))
        open_kinds = tuple(sorted(kind for kind, most in self._most.items() if most > pool.get(kind, 0)))
        full = sorted(kind for kind, count in pool.items() if count > self._most[kind])
        if full:
            return Shortage(f"{self._key}.max", full[0][0], missing, open_kinds)
        return Shortage("batch.groups", f"{self._size} per mini-batch", missing, open_kinds)

    def picker(self, pool: Mapping[Kind, int], wanted: int) -> Picker:
        """See `Completion.picker`."""
        return _OneAttributePicker(self)

    def relax(self, rule: str, value: str) -> bool:
        """See `Completion.relax`."""
        if rule == f"{self._key}.min" and self._least.get((value,)):
            self._reserved -= self._least[(value,)]
            self._least[(value,)] = 0
            for kind, count in self._slack.items():
                self._most[kind] += count
            self._slack = {}
            return True
        if rule == f"{self._key}.max" and (value,) in self._most:
            self._most[(value,)] = self._slots
            return True
        return False

    def copy(self) -> OneAttribute:
        """An independent copy."""
        other = OneAttribute.__new__(OneAttribute)
        other._slack = self._slack
        other._key, other._size, other._slots, other._reserved = self._key, self._size, self._slots, self._reserved
        other._least, other._most = dict(self._least), dict(self._most)
        return other


class _GreedyPicker:
    """Where what cannot be taken now can never be, whatever is ready."""

    __slots__ = ("_completion",)

    def __init__(self, completion: SizeOnly) -> None:
        self._completion = completion

    def take(self, kind: Kind) -> bool:
        if not self._completion.can_take(kind):
            return False
        self._completion.take(kind)
        return True

    def skip(self, kind: Kind) -> None:
        pass


class _OneAttributePicker:
    """The matroid's greedy algorithm: what a minimum reserves, then what no minimum does, up to the maximum."""

    __slots__ = ("_free", "_more", "_reserved")

    def __init__(self, completion: OneAttribute) -> None:
        self._reserved = completion._least.copy()
        self._more: dict[Kind, int] = {}
        self._free = completion._slots - completion._reserved
        for kind, most in completion._most.items():
            self._more[kind] = most - self._reserved[kind]

    def take(self, kind: Kind) -> bool:
        reserved = self._reserved[kind]
        if reserved:
            self._reserved[kind] = reserved - 1
            return True
        more = self._more[kind]
        if more > 0 < self._free:
            self._more[kind] = more - 1
            self._free -= 1
            return True
        return False

    def skip(self, kind: Kind) -> None:
        pass
