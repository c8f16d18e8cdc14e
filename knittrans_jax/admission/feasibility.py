"""Rules that no train batch can meet, found before anything starts, with a smallest set of rules that contradicts itself."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from knittrans_jax.admission.completion_solver import Program, solve
from knittrans_jax.admission.completion_space import Row
from knittrans_jax.config import ConfigError

if TYPE_CHECKING:
    from knittrans_jax.admission.rules import Rules

MOST_QUESTIONS = 400
"""Subsets of rules that are tried for a smaller contradiction than the one found, each some milliseconds of the solver."""


def check(rules: Rules, prompts_by_value: Mapping[str, int] | None) -> None:
    """Raises `ConfigError` when no train batch can meet the quotas of the first attribute alone.

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


def check_overlap(rules: Rules, rows: Sequence[Row]) -> None:
    """Raises `ConfigError` when rules that overlap contradict each other; names a smallest set that does."""
    contradiction = smallest_contradiction(rules, rows)
    if contradiction:
        raise ConfigError(
            f"batch.quotas: no train batch of {rules.groups} groups of this data set can meet "
            f"{', '.join(contradiction)} {'together' if len(contradiction) > 1 else ''}".rstrip()
            + "; each could be met without one of them: change one"
        )


def smallest_contradiction(rules: Rules, rows: Sequence[Row]) -> tuple[str, ...]:
    """Names and values of the fewest rules that no batch can meet together; empty: some batch meets all.

    The batch's size and the data set's prompts are no rules here: they are facts. No rule of the answer can be left out; where
    `MOST_QUESTIONS` did not suffice to look through all smaller sets, there may be another with fewer.
    """
    limits = [(r, "min") for r, row in enumerate(rows) if row.attribute >= 0 and row.least > 0]
    limits += [(r, "max") for r, row in enumerate(rows) if row.attribute >= 0 and row.most < rules.groups]
    kinds = rules.final_kinds
    matrix = np.array([[kind in row.kinds for kind in kinds] for row in rows], np.int64).reshape(len(rows), len(kinds))

    def contradicts(kept: Sequence[tuple[int, str]]) -> bool:
        chosen = set(kept)
        least = [row.least if (r, "min") in chosen else 0 for r, row in enumerate(rows)]
        most = [row.most if row.attribute < 0 or (r, "max") in chosen else rules.groups for r, row in enumerate(rows)]
        return solve(Program(matrix, rules.groups, least, most, [0] * len(kinds))) is None

    missing = [
        f"{one.key}.{value}.min = {quota.least} (no prompt has this value)"
        for number, one in enumerate(rules.attributes)
        for value, quota in sorted(one.quotas.items())
        if quota.least and not any(kind[number] == value for kind in kinds)
    ]
    if missing:
        return (missing[0],)
    if not contradicts(limits):
        return ()
    if contradicts([]):
        return (f"batch.groups = {rules.groups} with the prompts that there are",)
    found = list(limits)
    for one in limits:
        rest = [other for other in found if other != one]
        if contradicts(rest):
            found = rest
    questions = 0
    for size in range(1, len(found)):
        for subset in itertools.combinations(limits, size):
            questions += 1
            if questions > MOST_QUESTIONS:
                break
            if contradicts(subset):
                found = list(subset)
                break
        else:
            continue
        break
    return tuple(
        f"{rows[r].key}.{rows[r].value}.{bound} = {rows[r].least if bound == 'min' else rows[r].most}"
        for r, bound in found
    )
