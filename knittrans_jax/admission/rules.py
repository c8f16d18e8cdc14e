"""The rules of a train batch: what is configured, in whole groups.

What it guarantees: `rules_of` turns bounds (counts or shares) into whole numbers of groups, or raises `ConfigError` naming key,
value and rule; rules that no train batch of this data set can meet are found there, before anything starts, with a smallest set
of rules that contradicts itself (`feasibility`).

A group's *kind* is the tuple of its prompt's values of the attributes that have quotas: `()` without quotas, `(value,)` with
one attribute. What is known only at completion (pass-rate bucket, whether more than one version sampled it) is appended to it
when the group is done: `final_kind`. Everything above this module counts groups by kind and asks a `Completion`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Literal

from knittrans_jax.admission.completion import Completion, Kind, OneAttribute, Quota, SizeOnly
from knittrans_jax.admission.completion_overlap import Overlapping
from knittrans_jax.admission.completion_solver import Program, solve
from knittrans_jax.admission.completion_space import Row, Space
from knittrans_jax.admission.feasibility import check, check_overlap
from knittrans_jax.config import BatchConfig, Bound, Config, ConfigError, groups_of, pass_rate_range
from knittrans_jax.trajectory import GroupMeta

ONE_VERSION, SEVERAL_VERSIONS = "one version", "several versions"
OTHER_PASS_RATES = "other"
"""The bucket of pass rates that no configured range holds."""


@dataclasses.dataclass(frozen=True)
class Attribute:
    """Quotas by value of one attribute. `key` is their configuration key. `final`: known only when a group is done."""

    name: str
    key: str
    quotas: Mapping[str, Quota]
    final: bool = False


@dataclasses.dataclass(frozen=True)
class Rules:
    """Resolved rules: `quotas` holds every value of the first attribute in the data set and every value that a rule names."""

    groups: int
    mini_batches: int
    attribute: str | None
    quotas: Mapping[str, Quota]
    enforced: bool = True
    """False: admission keeps the size only (policy `fifo`); the launch gate still goes by the quotas."""
    others: tuple[Attribute, ...] = ()
    """Further attributes: of prompts first, then those known only when a group is done."""
    prompts: Mapping[Kind, int] | None = None
    """Different training prompts by kind; None: not known. No prompt comes twice in a batch."""
    slack: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """By value of the first attribute: how much lower its maximum is than configured because minima leave no more."""
    drop_equal_rewards: bool = False
    """Drop groups whose trajectories all have one reward: they teach nothing."""
    staleness_bound: int | None = None
    """Most updates between the oldest version that sampled a group and the one that its update starts from."""
    on_stale: Literal["drop", "retry", "wait"] = "drop"
    mini_batch_tokens: int | None = None
    """Most tokens of a mini-batch."""
    spread_slow: bool = False
    """Spread groups that took long over the batch, instead of its last mini-batches."""

    @property
    def mini_batch_groups(self) -> int:
        """`B / K`."""
        return self.groups // self.mini_batches

    @functools.cached_property
    def prompt_attributes(self) -> tuple[str, ...]:
        """Names of the attributes whose values are a kind."""
        first = () if self.attribute is None else (self.attribute,)
        return (*first, *(one.name for one in self.others if not one.final))

    @functools.cached_property
    def final_attributes(self) -> tuple[Attribute, ...]:
        """Attributes whose values are known only when a group is done."""
        return tuple(one for one in self.others if one.final)

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """Every kind that a group can be launched with, in a fixed order."""
        if self.attribute is None:
            return ((),)
        if len(self.prompt_attributes) == 1:
            return tuple((value,) for value in sorted(self.quotas))
        if self.prompts is not None:
            return tuple(sorted(self.prompts))
        values = [self.quotas, *(one.quotas for one in self.others if not one.final)]
        return tuple(sorted(itertools.product(*values)))

    @functools.cached_property
    def final_kinds(self) -> tuple[Kind, ...]:
        """Every kind that a group can have when it is done, in a fixed order."""
        ends = list(itertools.product(*(one.quotas for one in self.final_attributes)))
        return tuple((*kind, *end) for kind in self.kinds for end in ends)

    @functools.cached_property
    def _known_kinds(self) -> dict[Kind, Kind]:
        return {kind: kind for kind in self.kinds}

    @functools.cached_property
    def _by_value(self) -> dict[str, Kind] | None:
        """Kinds by value, with one attribute."""
        return {kind[0]: kind for kind in self.kinds} if len(self.prompt_attributes) == 1 else None

    def kind(self, attributes: Mapping[str, str]) -> Kind:
        """The kind of a group whose prompt has these attributes. All groups of a kind share one tuple."""
        if self._by_value is not None:
            known = self._by_value.get(attributes[self.prompt_attributes[0]])
        else:
            known = self._known_kinds.get(tuple([attributes[name] for name in self.prompt_attributes]))
        if known is None:
            named = ", ".join(f"{name} = {attributes[name]!r}" for name in self.prompt_attributes)
            raise KeyError(f"{named} is no value of the data set that these rules were resolved for")
        return known

    def final_kind(self, kind: Kind, meta: GroupMeta) -> Kind:
        """The kind of a group that is done."""
        for one in self.final_attributes:
            kind = (*kind, version_span(meta) if one.name == "spanning" else pass_rate_bucket(meta, one.quotas))
        return kind

    def quota(self, kind: Kind) -> Quota:
        """Bounds on groups of this launched kind in a train batch."""
        if self.attribute is None:
            return Quota(0, self.groups)
        if len(self.prompt_attributes) == 1:
            return self.quotas[kind[0]]
        most = self.groups if self.prompts is None else min(self.groups, self.prompts[kind])
        for attribute, value in zip(self._by_prompt, kind, strict=True):
            if value in attribute.quotas:
                most = min(most, attribute.quotas[value].most)
        return Quota(0, most)

    @functools.cached_property
    def _by_prompt(self) -> tuple[Attribute, ...]:
        """The attributes of prompts."""
        first = () if self.attribute is None else (Attribute(self.attribute, self.key, self.quotas),)
        return (*first, *(one for one in self.others if not one.final))

    @property
    def attributes(self) -> tuple[Attribute, ...]:
        """All of them, in the order of a kind's values."""
        return (*self._by_prompt, *self.final_attributes)

    @property
    def key(self) -> str:
        """Configuration key of the first attribute's quotas."""
        return "batch.groups" if self.attribute is None else f"batch.quotas.{self.attribute}"

    @functools.cached_property
    def space(self) -> Space:
        """Kinds and bounds of overlapping rules."""
        return Space(self.groups, self.mini_batch_groups, self.final_kinds, rows_of(self), len(self.prompt_attributes))

    def open_batch(self) -> Completion:
        """An empty train batch."""
        if not self.enforced:
            return SizeOnly(self.groups, self.mini_batch_groups, self.kinds)
        if self.others:
            return Overlapping(self.space)
        quotas = {kind: self.quota(kind) for kind in self.kinds}
        slack = {(value,): count for value, count in self.slack.items()}
        return OneAttribute(self.groups, self.mini_batch_groups, self.key, quotas, slack)

    @functools.cached_property
    def composition(self) -> dict[Kind, int]:
        """One whole valid batch by launched kind: what the launch gate goes by.

        One attribute: the minima, and the places they leave shared by the room up to the maxima (largest remainder). Several:
        of all valid batches one that is nearest to the data set's own shares (least sum of absolute differences) and stays
        off the bounds of quotas that are ranges (`MARGINS`, at most half a mini-batch): early mini-batches take what is there,
        and what is left of the batch must still fit what was launched for it.
        """
        if self.others:
            return self._nearest_composition()
        quotas = {kind: self.quota(kind) for kind in self.kinds}
        free = self.groups - sum(quota.least for quota in quotas.values())
        extra = share_out(free, {kind: quota.most - quota.least for kind, quota in quotas.items()})
        return {kind: quota.least + extra[kind] for kind, quota in quotas.items()}

    def _nearest_composition(self) -> dict[Kind, int]:
        space = self.space
        natural = share_out(self.groups, self.prompts or dict.fromkeys(self.kinds, 1))
        later = [(outcomes, natural[kind]) for kind, outcomes in space.later.items()]
        for part in MARGINS:
            margins = [self._margin(r, part) for r in range(len(space.rows))]
            least = [row.least + margin if row.least else 0 for row, margin in zip(space.rows, margins, strict=True)]
            most = [row.most - margin for row, margin in zip(space.rows, margins, strict=True)]
            program = Program(space.matrix, self.groups, least, most, [0] * len(space.kinds))
            # With equal sums, most of the natural batch kept is least difference to it.
            found = solve(program, [0] * len(space.kinds), later=later)
            if found is not None:
                return {kind: sum(found[t] for t in outcomes) for kind, outcomes in space.later.items()}
        raise AssertionError("rules that no batch can meet were found before")

    def _margin(self, number: int, part: float) -> int:
        """How far from a bound a batch's composition stays: a part of the range that the attribute's other bounds leave."""
        rows, row = self.space.rows, self.space.rows[number]
        if row.attribute < 0:
            return 0
        others = [one for one in rows if one.attribute == row.attribute and one is not row]
        most = min(row.most, self.groups - sum(one.least for one in others))
        counted = frozenset[Kind]().union(row.kinds, *(one.kinds for one in others))
        named = len(counted) == len(self.space.kinds)
        least = max(row.least, self.groups - sum(one.most for one in others)) if named else row.least
        return int(min(part * (most - least), self.mini_batch_groups / 2))


MARGINS = (0.25, 0.125, 0.0)
"""Parts of a range."""


def rows_of(rules: Rules) -> list[Row]:
    """The bounds on a whole batch that can bind, one a row."""
    rows: list[Row] = []
    for number, attribute in enumerate(rules.attributes):
        for value, quota in sorted(attribute.quotas.items()):
            kinds = frozenset(kind for kind in rules.final_kinds if kind[number] == value)
            if kinds and (quota.least > 0 or quota.most < rules.groups):
                rows.append(Row(attribute.key, value, number, kinds, quota.least, quota.most))
    for kind, count in sorted((rules.prompts or {}).items()):
        if count < rules.groups and len(rules.prompt_attributes) > 1:
            kinds = frozenset(final for final in rules.final_kinds if final[: len(kind)] == kind)
            rows.append(Row("training prompts", ", ".join(kind), -1, kinds, 0, count))
    return rows


def version_span(meta: GroupMeta) -> str:
    """Whether one version sampled the whole group."""
    versions = {v for one in meta.trajectories for v in (one.version_min, one.version_max)}
    return ONE_VERSION if len(versions) <= 1 else SEVERAL_VERSIONS


def pass_rate_bucket(meta: GroupMeta, buckets: Iterable[str]) -> str:
    """The range that holds the share of the group's questions that were answered exactly."""
    questions = sum(one.questions for one in meta.trajectories)
    rate = sum(one.exact for one in meta.trajectories) / questions if questions else 0.0
    for bucket in buckets:
        if bucket != OTHER_PASS_RATES:
            low, high = pass_rate_range(bucket)
            if low <= rate < high or rate == high == 1.0:
                return bucket
    return OTHER_PASS_RATES


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


def rules_of(config: Config, prompts: Iterable[Mapping[str, str]] | None = None) -> Rules:
    """The rules of a run under its policy.

    `fifo` keeps the size alone. `proportional` makes the quotas of the first attribute exact: its counts in `composition`.

    Raises:
        ConfigError: see `resolve`.
    """
    admission, policy = config.admission, config.admission.policy
    rules = dataclasses.replace(
        resolve(config.batch, prompts),
        drop_equal_rewards=config.batch.drop_equal_rewards,
        staleness_bound=admission.staleness_bound,
        on_stale=admission.on_stale,
        mini_batch_tokens=config.batch.mini_batch_tokens,
        spread_slow=admission.spread_slow,
        enforced=policy != "fifo",
    )
    if policy == "proportional" and rules.attribute is not None:
        counts = dict.fromkeys(rules.quotas, 0)
        for kind, count in rules.composition.items():
            counts[kind[0]] += count
        exact = {value: Quota(count, count) for value, count in counts.items()}
        return dataclasses.replace(rules, quotas=exact, slack={})
    return rules


def resolve(batch: BatchConfig, prompts: Iterable[Mapping[str, str]] | None = None) -> Rules:
    """Whole-number rules of a train batch.

    Args:
        batch: the configuration's section.
        prompts: the attributes of every training prompt. A value that no rule names has minimum 0 and maximum `B`; a
            maximum above the number of prompts that have the value is lowered to it (no prompt comes twice in a batch).
            None: only the values that a rule names are known.

    Raises:
        ConfigError: no train batch can meet the rules; names a smallest set of them that contradicts itself.
    """
    attribute = next(iter(batch.quotas), None)
    further = list(batch.quotas)[1:]
    quotas = {} if attribute is None else _quotas(f"batch.quotas.{attribute}", batch.quotas[attribute], batch.groups)
    others = [
        Attribute(name, f"batch.quotas.{name}", _quotas(f"batch.quotas.{name}", batch.quotas[name], batch.groups))
        for name in further
    ]
    others += _final_attributes(batch)
    rules = Rules(batch.groups, batch.mini_batches, attribute, quotas, others=tuple(others))
    if prompts is None:
        check(rules, None)
        if others:
            check_overlap(rules, rows_of(rules))
        return rules
    prompts = list(prompts)
    counts = count_values(attribute, prompts)
    check(rules, counts)
    if attribute is None:
        if others:
            check_overlap(rules, rows_of(rules))
        return rules
    known = {value: quotas.get(value, Quota(0, batch.groups)) for value in {*quotas, *counts}}
    least_total = sum(quota.least for quota in known.values())
    tight = {
        value: Quota(quota.least, min(quota.most, counts.get(value, 0), batch.groups - least_total + quota.least))
        for value, quota in known.items()
    }
    by_kind: dict[Kind, int] = {}
    for attributes in prompts:
        kind = tuple(attributes.get(name, "") for name in rules.prompt_attributes)
        by_kind[kind] = by_kind.get(kind, 0) + 1
    if others:
        for name in further:
            count_values(name, prompts)  # refuses a prompt that lacks it
        plain = dataclasses.replace(
            rules, quotas={value: quotas.get(value, Quota(0, batch.groups)) for value in known}, prompts=by_kind
        )
        check_overlap(plain, rows_of(plain))
    slack = {
        value: min(quota.most, counts.get(value, 0)) - tight[value].most
        for value, quota in known.items()
        if min(quota.most, counts.get(value, 0)) > tight[value].most
    }
    return dataclasses.replace(rules, quotas=tight, prompts=by_kind, slack=slack)


def _quotas(key: str, bounds: Mapping[str, Bound], groups: int) -> dict[str, Quota]:
    return {
        value: Quota(
            groups_of(f"{key}.{value}.min", bound.min, groups),
            groups if bound.max is None else groups_of(f"{key}.{value}.max", bound.max, groups),
        )
        for value, bound in bounds.items()
    }


def _final_attributes(batch: BatchConfig) -> list[Attribute]:
    """What is known only when a group is done."""
    found: list[Attribute] = []
    if batch.pass_rate:
        quotas = _quotas("batch.pass_rate", batch.pass_rate, batch.groups)
        quotas.setdefault(OTHER_PASS_RATES, Quota(0, batch.groups))
        found.append(Attribute("pass_rate", "batch.pass_rate", quotas, final=True))
    if batch.spanning_max is not None:
        most = groups_of("batch.spanning_max", batch.spanning_max, batch.groups)
        quotas = {ONE_VERSION: Quota(0, batch.groups), SEVERAL_VERSIONS: Quota(0, most)}
        found.append(Attribute("spanning", "batch.spanning_max", quotas, final=True))
    return found


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
