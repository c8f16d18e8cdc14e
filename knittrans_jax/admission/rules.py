"""The rules of a train batch, and whether a partly filled batch can still be finished within them.

What it guarantees:

* `resolve` turns bounds (counts or shares) into whole numbers of groups, or raises `ConfigError` naming key, value and rule;
* `check` finds rules that no train batch of this data set can meet, before anything starts;
* a `Completion` answers, in constant time, whether a group may be taken such that the remaining slots can still meet every
  remaining minimum without breaking a maximum.

A group's *kind* is the tuple of its values of the attributes that have rules: `()` without quotas, `(value,)` with one
attribute. Everything above this module counts groups by kind and asks a `Completion`, so rules on several overlapping
attributes need another `Completion` and nothing else.

For one attribute the groups that may be taken together are the independent sets of a matroid (a transversal matroid cut
down to the slots that no minimum reserves). Hence taking the oldest possible group again and again never gets stuck, is the
lexicographically oldest choice, and takes as many as can be taken at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Protocol

from knittrans_jax.config import BatchConfig, Config, ConfigError, groups_of

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
    """Groups of these kinds would help."""


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

    def usable(self, pool: Mapping[Kind, int]) -> int:
        """The most groups of the pool that this batch can take and still be finished, by others where needed."""
        ...

    def shortage(self, pool: Mapping[Kind, int], wanted: int) -> Shortage | None:
        """What is missing to take `wanted` groups from the pool; None when nothing is."""
        ...

    def copy(self) -> Completion:
        """An independent copy."""
        ...


@dataclasses.dataclass(frozen=True)
class Rules:
    """Resolved rules: `quotas` holds every value of the data set and every value that a rule names."""

    groups: int
    mini_batches: int
    attribute: str | None
    quotas: Mapping[str, Quota]
    enforced: bool = True
    """False: admission keeps the size only (policy `fifo`); the launch gate still goes by the quotas."""

    @property
    def mini_batch_groups(self) -> int:
        """`B / K`."""
        return self.groups // self.mini_batches

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Every kind that a group can have, in a fixed order."""
        return ((),) if self.attribute is None else tuple((value,) for value in sorted(self.quotas))

    def kind(self, attributes: Mapping[str, str]) -> Kind:
        """The kind of a group with these attributes."""
        if self.attribute is None:
            return ()
        value = attributes[self.attribute]
        if value not in self.quotas:
            raise KeyError(
                f"{self.attribute} = {value!r} is no value of the data set that these rules were resolved for"
            )
        return (value,)

    def quota(self, kind: Kind) -> Quota:
        """Bounds on groups of this kind in a train batch."""
        return Quota(0, self.groups) if self.attribute is None else self.quotas[kind[0]]

    def open_batch(self) -> Completion:
        """An empty train batch."""
        return OneAttribute(self) if self.enforced else SizeOnly(self)

    @property
    def composition(self) -> dict[Kind, int]:
        """One whole batch: the minima, and the places they leave shared by the room up to the maxima (largest remainder)."""
        quotas = {kind: self.quota(kind) for kind in self.kinds}
        free = self.groups - sum(quota.least for quota in quotas.values())
        extra = share_out(free, {kind: quota.most - quota.least for kind, quota in quotas.items()})
        return {kind: quota.least + extra[kind] for kind, quota in quotas.items()}


def share_out(total: int, weights: Mapping[Kind, int]) -> dict[Kind, int]:
    """`total` in whole numbers proportional to `weights`: largest remainder, ties by kind; never above a weight if it fits."""
    whole = sum(weights.values())
    if not whole:
        return dict.fromkeys(weights, 0)
    shares = {kind: total * weight // whole for kind, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda kind: (-(total * weights[kind] % whole), kind))
    for kind in by_remainder[: total - sum(shares.values())]:
        shares[kind] += 1
    return shares


class SizeOnly:
    """`Completion` of a batch that has a size and no other rule."""

    __slots__ = ("_rules", "_slots")

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._slots = rules.groups

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
        if self._slots <= 0:
            raise ValueError(f"a train batch without slots left cannot take a group of kind {kind}")
        self._slots -= 1

    def usable(self, pool: Mapping[Kind, int]) -> int:
        """See `Completion.usable`."""
        return min(self._slots, sum(pool.values()))

    def shortage(self, pool: Mapping[Kind, int], wanted: int) -> Shortage | None:
        """See `Completion.shortage`."""
        missing = wanted - self.usable(pool)
        if missing <= 0:
            return None
        return Shortage("batch.groups", f"{self._rules.mini_batch_groups} per mini-batch", missing, self._rules.kinds)

    def copy(self) -> SizeOnly:
        """An independent copy."""
        other = SizeOnly.__new__(SizeOnly)
        other._rules, other._slots = self._rules, self._slots
        return other


class OneAttribute:
    """`Completion` for quotas on at most one attribute."""

    __slots__ = ("_least", "_most", "_reserved", "_rules", "_slots")

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._slots = rules.groups
        self._least = {kind: rules.quota(kind).least for kind in rules.kinds}
        self._most = {kind: rules.quota(kind).most for kind in rules.kinds}
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
        if not self.can_take(kind):
            raise ValueError(
                f"a train batch with {self._slots} slots left, {self._reserved} of them reserved for minima, cannot take "
                f"a group of kind {kind} (least {self._least[kind]}, most {self._most[kind]} more)"
            )
        self._slots -= 1
        self._most[kind] -= 1
        if self._least[kind] > 0:
            self._least[kind] -= 1
            self._reserved -= 1

    def usable(self, pool: Mapping[Kind, int]) -> int:
        """See `Completion.usable`. Rank of the matroid: `min` over its two bounds (maxima; slots that minima leave)."""
        within_maxima = sum(min(count, self._most[kind]) for kind, count in pool.items())
        unmet = sum(max(0, least - pool.get(kind, 0)) for kind, least in self._least.items() if least)
        return min(within_maxima, self._slots - unmet)

    def shortage(self, pool: Mapping[Kind, int], wanted: int) -> Shortage | None:
        """See `Completion.shortage`. Names the largest unmet minimum first, else the maxima that block, else the size."""
        missing = wanted - self.usable(pool)
        if missing <= 0:
            return None
        attribute = self._rules.attribute
        unmet = {kind: least - pool.get(kind, 0) for kind, least in self._least.items() if least > pool.get(kind, 0)}
        within_maxima = sum(min(count, self._most[kind]) for kind, count in pool.items())
        if unmet and self._slots - sum(unmet.values()) <= within_maxima:
            kind = max(unmet, key=lambda k: (unmet[k], k))
            return Shortage(f"batch.quotas.{attribute}.min", kind[0], min(missing, unmet[kind]), tuple(sorted(unmet)))
        open_kinds = tuple(sorted(kind for kind, most in self._most.items() if most > pool.get(kind, 0)))
        full = sorted(kind for kind, count in pool.items() if count > self._most[kind])
        if full and attribute is not None:
            return Shortage(f"batch.quotas.{attribute}.max", full[0][0], missing, open_kinds)
        return Shortage("batch.groups", f"{self._rules.mini_batch_groups} per mini-batch", missing, open_kinds)

    def copy(self) -> OneAttribute:
        """An independent copy."""
        other = OneAttribute.__new__(OneAttribute)
        other._rules, other._slots, other._reserved = self._rules, self._slots, self._reserved
        other._least, other._most = dict(self._least), dict(self._most)
        return other


def rules_of(config: Config, prompts: Iterable[Mapping[str, str]] | None = None) -> Rules:
    """The rules of a run under its policy: `resolve`, then exact quotas for `proportional` and size alone for `fifo`."""
    rules = resolve(config.batch, prompts)
    if config.admission.policy == "fifo":
        return dataclasses.replace(rules, enforced=False)
    if config.admission.policy == "proportional" and rules.attribute is not None:
        exact = {kind[0]: Quota(count, count) for kind, count in rules.composition.items()}
        return dataclasses.replace(rules, quotas=exact)
    return rules


def resolve(batch: BatchConfig, prompts: Iterable[Mapping[str, str]] | None = None) -> Rules:
    """Whole-number rules of a train batch.

    Args:
        batch: the configuration's section.
        prompts: the attributes of every training prompt. A value that no rule names has minimum 0 and maximum `B`; a
            maximum above the number of prompts that have the value is lowered to it (no prompt comes twice in a batch).
            None: only the values that a rule names are known.

    Raises:
        ConfigError: see `check`.
    """
    if len(batch.quotas) > 1:
        raise ConfigError(
            f"batch.quotas: quotas on one attribute are supported, got {len(batch.quotas)} "
            f"({', '.join(sorted(batch.quotas))}); keep one of them"
        )
    attribute = next(iter(batch.quotas), None)
    bounds = batch.quotas[attribute] if attribute is not None else {}
    key = f"batch.quotas.{attribute}"
    quotas = {
        value: Quota(
            groups_of(f"{key}.{value}.min", bound.min, batch.groups),
            batch.groups if bound.max is None else groups_of(f"{key}.{value}.max", bound.max, batch.groups),
        )
        for value, bound in bounds.items()
    }
    rules = Rules(batch.groups, batch.mini_batches, attribute, quotas)
    if prompts is None:
        check(rules, None)
        return rules
    counts = count_values(attribute, prompts)
    check(rules, counts)
    if attribute is None:
        return rules
    known = {value: quotas.get(value, Quota(0, batch.groups)) for value in {*quotas, *counts}}
    least_total = sum(quota.least for quota in known.values())
    tight = {
        value: Quota(quota.least, min(quota.most, counts.get(value, 0), batch.groups - least_total + quota.least))
        for value, quota in known.items()
    }
    return dataclasses.replace(rules, quotas=tight)


def count_values(attribute: str | None, prompts: Iterable[Mapping[str, str]]) -> dict[str, int]:
    """Number of prompts by value of the attribute (`""` for all, without one)."""
    counts: dict[str, int] = {}
    for index, attributes in enumerate(prompts):
        if attribute is not None and attribute not in attributes:
            raise ConfigError(
                f"batch.quotas.{attribute}: training prompt number {index} has no attribute {attribute!r} "
                f"(it has {', '.join(sorted(attributes)) or 'none'}); every prompt of the task needs one"
            )
        value = "" if attribute is None else attributes[attribute]
        counts[value] = counts.get(value, 0) + 1
    return counts


def check(rules: Rules, prompts_by_value: Mapping[str, int] | None) -> None:
    """Raises `ConfigError` when no train batch can meet the rules.

    Args:
        rules: as configured.
        prompts_by_value: number of training prompts by value of the attribute; None: not known yet.
    """
    groups, key = rules.groups, f"batch.quotas.{rules.attribute}"
    if groups % rules.mini_batches:
        raise ConfigError(f"batch.mini_batches = {rules.mini_batches}: does not divide batch.groups = {groups}")
    for value, quota in rules.quotas.items():
        if quota.least > quota.most:
            raise ConfigError(
                f"{key}.{value}: min of {quota.least} groups is above max of {quota.most}; no batch can meet both"
            )
        have = None if prompts_by_value is None else prompts_by_value.get(value, 0)
        if have is not None and have < quota.least:
            raise ConfigError(
                f"{key}.{value}.min: {quota.least} groups in every train batch, but {have or 'no'} training prompts have "
                f"this value, and no prompt comes twice in a train batch; lower min or add prompts"
            )
    least_total = sum(quota.least for quota in rules.quotas.values())
    if least_total > groups:
        raise ConfigError(
            f"{key}: the minima add up to {least_total} groups, more than batch.groups = {groups}; lower some of "
            f"{ {value: quota.least for value, quota in rules.quotas.items()} }"
        )
    if prompts_by_value is None:
        return
    most = {
        value: min(have, rules.quotas[value].most if value in rules.quotas else groups)
        for value, have in prompts_by_value.items()
    }
    if sum(most.values()) < groups:
        rule = key if rules.attribute is not None else "batch.groups"
        raise ConfigError(
            f"{rule}: maxima and numbers of different training prompts allow at most {sum(most.values())} groups in a "
            f"train batch, fewer than batch.groups = {groups} (by value: {dict(sorted(most.items()))}); raise a max, add "
            f"prompts or lower batch.groups"
        )
