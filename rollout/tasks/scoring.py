"""Rewards of text answers, as pure functions."""

from __future__ import annotations


def partial_credit(answer: str, truth: str) -> float:
    """Share of an answer that is right, in 0..1: `matches / max(len(answer), len(truth))`; halved when it is too long, and
    nothing when it is too short.

    1 exactly for the true answer, ended where it ends. An answer cut off at the token limit is longer than the truth. Length
    multiplies instead of adding: as a reward of its own it is learned first, and an answer that is short but blind then
    earns enough to hide the reward of looking. Too short is worse than too long, because a policy that has learned to stop
    early never sees what going on would have earned.
    """
    if len(answer) < len(truth):
        return 0.0
    matches = sum(a == b for a, b in zip(answer, truth, strict=False))
    return matches / max(len(answer), 1) * (1.0 if len(answer) == len(truth) else 0.5)
