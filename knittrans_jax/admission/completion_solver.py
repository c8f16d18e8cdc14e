"""The exact question about a train batch with overlapping rules, as a small integer program over counts by kind.

Given bounds on sums over sets of kinds (*rows*), is there a vector of counts, and how many of a pool's groups can it use? Used
where no cheaper argument decides, and for yes or no only: which groups are taken never depends on the solver's own choice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp


class SolverFailed(RuntimeError):  # noqa: N818 - says what happened
    """The solver neither found counts nor proved that there are none."""


@dataclasses.dataclass(frozen=True)
class Program:
    """`least <= rows @ x <= most`, `sum(x) == slots`, `x >= floor`, whole numbers. Rows [R, T]; the rest by row or kind."""

    rows: np.ndarray
    slots: int
    least: Sequence[int]
    most: Sequence[int]
    floor: Sequence[int]


def solve(
    program: Program,
    pool: Sequence[int] | None = None,
    wanted: Sequence[tuple[Sequence[int], int]] = (),
    later: Sequence[tuple[Sequence[int], int]] = (),
) -> list[int] | None:
    """Counts by kind, or None when there are none.

    Args:
        program: what the counts must satisfy.
        pool: groups at hand by kind; the counts then use as many of them as any can: `sum(min(x, pool))` is greatest.
        wanted: with a pool: any counts will do that use at least so many of the pool's groups of some kinds: (kinds, number).
        later: with a pool: further groups, of which it is not known yet which of some kinds each will be: (kinds, number).

    Raises:
        SolverFailed: see there.
    """
    kinds = len(program.floor)
    if program.slots < sum(program.floor) or any(most < 0 for most in program.most):
        return None
    rows = np.vstack([np.ones((1, kinds)), program.rows])
    lower = np.array([program.slots, *program.least], np.float64)
    upper = np.array([program.slots, *program.most], np.float64)
    cost = np.zeros(kinds)
    low, high = np.asarray(program.floor, np.float64), np.full(kinds, float(program.slots))
    if pool is not None:
        # y = groups taken from the pool: y <= x, y <= pool. w = later ones by the kind that they turn out to be: y + w <= x.
        more = 2 if later else 1
        widen = np.zeros((len(rows), more * kinds))
        rows = np.vstack([np.hstack([rows, widen]), np.hstack([np.eye(kinds), *[-np.eye(kinds)] * more])])
        lower, upper = np.append(lower, np.zeros(kinds)), np.append(upper, np.full(kinds, np.inf))
        cost = np.append(cost, -np.ones(more * kinds))
        low, high = np.append(low, np.zeros(kinds)), np.append(high, np.minimum(pool, program.slots))
        if later:
            share = np.zeros((len(later), len(cost)))
            for i, (outcomes, _) in enumerate(later):
                share[i, 2 * kinds + np.asarray(outcomes)] = 1
            rows = np.vstack([rows, share])
            lower = np.append(lower, np.full(len(later), -np.inf))
            upper = np.append(upper, [float(count) for _, count in later])
            low, high = np.append(low, np.zeros(kinds)), np.append(high, np.full(kinds, float(program.slots)))
        for members, number in wanted:
            taken = np.zeros((1, len(cost)))
            taken[0, kinds + np.asarray(members)] = 1
            rows, lower, upper = np.vstack([rows, taken]), np.append(lower, number), np.append(upper, np.inf)
            cost = np.zeros(len(cost))
    solution = _solve(cost, kinds, low, high, rows, lower, upper)
    return None if solution is None else [round(count) for count in solution[:kinds].tolist()]


@dataclasses.dataclass(frozen=True)
class Cut:
    """An upper bound on how many of a pool any counts can use, linear in what the batch still needs and in the pool.

    It holds for every pool and whatever the batch still needs, so it is found once and kept: the bound is
    `slots * s + most @ m - least @ l + pool @ p`, with `s` free, `m` and `l` [R] not negative, `s + (m - l) @ rows` [T] not
    negative, and `p` [T] what that leaves to one. (It is a feasible point of the linear program's dual; `p` is computed
    from the others and `s` raised where needed, so no rounding can make it wrong.)
    """

    slots: float
    most: np.ndarray
    least: np.ndarray
    pool: np.ndarray


def make_cut(rows: np.ndarray, slots: float, most: np.ndarray, least: np.ndarray) -> Cut:
    """The cut with these multipliers; rows [R, T]."""
    most, least = np.maximum(most, 0.0), np.maximum(least, 0.0)
    by_kind = (most - least) @ rows
    slots = max(slots, -float(by_kind.min()))
    return Cut(slots, most, least, np.maximum(0.0, 1.0 - slots - by_kind))


def tightest_cut(program: Program, pool: Sequence[int]) -> Cut:
    """The cut that is lowest for this batch and pool: the linear program's optimum.

    Raises:
        SolverFailed: see there.
    """
    number, kinds = program.rows.shape
    cover = np.hstack([np.ones((kinds, 1)), program.rows.T, -program.rows.T])
    result = linprog(
        np.array([program.slots, *program.most, *[-one for one in program.least], *pool], np.float64),
        # What a kind's slot costs is not negative, and with what a group of the pool adds it is at least one.
        A_ub=-np.vstack([np.hstack([cover, np.eye(kinds)]), np.hstack([cover, np.zeros((kinds, kinds))])]),
        b_ub=-np.concatenate([np.ones(kinds), np.zeros(kinds)]),
        bounds=[(None, None), *[(0, None)] * (2 * number + kinds)],
        method="highs",
    )
    if result.x is None or result.status != 0:
        raise SolverFailed(f"no bound on {kinds} kinds and {number} rows: {result.message}")
    # Multipliers are small fractions; clean ones give bounds that are whole where they should be.
    clean = np.round(np.asarray(result.x) * 720) / 720
    return make_cut(program.rows, float(clean[0]), clean[1 : 1 + number], clean[1 + number : 1 + 2 * number])


def lightest(program: Program, weights: Sequence[Sequence[int]], wanted: int) -> float:
    """Least total weight of `wanted` groups that can be part of such counts; infinite: so many cannot.

    Args:
        program: what the counts must satisfy.
        weights: of the groups at hand, by kind.
        wanted: how many to take.
    """
    kinds, flat = len(program.floor), [weight for of_kind in weights for weight in of_kind]
    if wanted > len(flat) or program.slots < 0 or any(most < 0 for most in program.most):
        return math.inf
    kind_of = np.repeat(np.arange(kinds), [len(of_kind) for of_kind in weights])
    ones = np.concatenate([np.ones(kinds), np.zeros(len(flat))])[None, :]
    bounds = np.hstack([program.rows, np.zeros((len(program.rows), len(flat)))])
    taken = np.zeros((kinds, len(flat)))
    taken[kind_of, np.arange(len(flat))] = -1
    rows = np.vstack([ones, bounds, np.hstack([np.eye(kinds), taken]), 1 - ones])
    lower = np.array([program.slots, *program.least, *[0] * kinds, wanted], np.float64)
    upper = np.array([program.slots, *program.most, *[np.inf] * kinds, wanted], np.float64)
    cost = np.concatenate([np.zeros(kinds), np.asarray(flat, np.float64)])
    low = np.concatenate([np.asarray(program.floor, np.float64), np.zeros(len(flat))])
    high = np.concatenate([np.full(kinds, float(program.slots)), np.ones(len(flat))])
    solution = _solve(cost, len(cost), low, high, rows, lower, upper)
    return math.inf if solution is None else float(round(float(cost @ np.round(solution))))


def _solve(
    cost: np.ndarray,
    whole: int,
    low: np.ndarray,
    high: np.ndarray,
    rows: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
) -> np.ndarray | None:
    """The cheapest solution, its first `whole` numbers whole; None: there is none."""
    result = milp(
        cost,
        integrality=np.concatenate([np.ones(whole), np.zeros(len(cost) - whole)]),
        bounds=Bounds(low, high),  # pyright: ignore[reportArgumentType]
        constraints=LinearConstraint(rows, lower, upper),  # pyright: ignore[reportArgumentType]
    )
    if result.status == 2:
        return None
    if result.x is None or result.status != 0:
        raise SolverFailed(f"the solver gave up on {len(cost)} numbers and {rows.shape[0]} rows: {result.message}")
    return result.x
