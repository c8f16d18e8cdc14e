"""The groups of a mini-batch under a token budget: the first in order of which enough can be had within it.

What it guarantees: never more tokens than the budget, never a group that breaks the train batch's rules; a group is passed over
only when, with it, no safe mini-batch of the pool fits the budget. That is decided by the lightest rest that the rules allow:
the greedy basis of a matroid with one attribute, a small integer program where attributes overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

from knittrans_jax.admission.completion import Completion, Kind
from knittrans_jax.admission.completion_overlap import Overlapping
from knittrans_jax.admission.state import Group


def tokens_of(group: Group) -> int:
    """Tokens of a group's trajectories, padding not counted."""
    assert group.meta is not None
    return sum([one.length_tokens for one in group.meta.trajectories])


def choose_within(completion: Completion, groups: Sequence[Group], wanted: int, tokens: int) -> list[Group] | None:
    """The first `wanted` of `groups`, in their order, that fit `tokens` and leave the batch completable; None: none do."""
    weights = {group.group_id: tokens_of(group) for group in groups}
    if _lightest(completion, groups, weights, wanted, set()) > tokens:
        return None
    chosen: list[Group] = []
    prompts: set[str] = set()
    used = 0
    for index, group in enumerate(groups):
        if len(chosen) == wanted:
            break
        if (
            group.prompt_id in prompts
            or used + weights[group.group_id] > tokens
            or not completion.can_take(group.final)
        ):
            continue
        after = completion.copy()
        after.take(group.final)
        rest = _lightest(after, groups[index + 1 :], weights, wanted - len(chosen) - 1, {*prompts, group.prompt_id})
        if used + weights[group.group_id] + rest <= tokens:
            completion = after
            chosen.append(group)
            prompts.add(group.prompt_id)
            used += weights[group.group_id]
    return chosen if len(chosen) == wanted else None


def _lightest(
    completion: Completion, groups: Sequence[Group], weights: dict[int, int], wanted: int, prompts: set[str]
) -> float:
    """Fewest tokens of `wanted` groups of these that can be taken together; infinite: so many cannot."""
    if not wanted:
        return 0.0
    by_weight: list[Group] = []
    seen = set(prompts)
    for group in sorted(groups, key=lambda one: (weights[one.group_id], one.order)):
        if group.prompt_id not in seen:
            seen.add(group.prompt_id)
            by_weight.append(group)
    if isinstance(completion, Overlapping):
        by_kind: dict[Kind, list[int]] = {}
        for group in by_weight:
            by_kind.setdefault(group.final, []).append(weights[group.group_id])
        return completion.lightest(by_kind, wanted)
    picker = completion.picker({}, wanted)
    total, left = 0.0, wanted
    for group in by_weight:
        if picker.take(group.final):
            total += weights[group.group_id]
            left -= 1
            if not left:
                return total
    return float("inf")
