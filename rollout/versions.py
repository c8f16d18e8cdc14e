"""Which weights the engine should hold, and which work may begin: one pure function over what is in flight.

What it guarantees:

* an evaluation runs at exactly its version from its first token to its last: while one is active nothing is loaded;
* a group never begins, and never goes on, with weights older than its `least_version`;
* `in_flight = "swap"`: a newer version is taken at once, between two tokens;
* `in_flight = "trajectory"`: weights change only while no trajectory is in flight. When a newer version is there, nothing new
  begins until the running trajectories are over; so every trajectory carries one version. The price is idle slots while the
  last ones finish, about one trajectory's length per swap;
* an evaluation at another version than the one held is next in line: it is loaded as soon as the rules above allow, before
  any newer one, and an older one too.
"""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flight:
    """What is in flight. Versions are None where there is none."""

    held: int | None
    """The version that the engine holds."""
    published: int
    """Newest version that is known to be there; -1: none."""
    evaluating: bool
    """An evaluation is active, at the held version."""
    next_evaluation: int | None
    """Version of the oldest evaluation that is not active."""
    trajectories: int
    """Trajectories in flight, of groups and of evaluations."""
    least: int | None
    """Largest `least_version` among the groups in flight."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """`load`: the version to load now; `begin`: whether new work may begin at the held version."""

    load: int | None
    begin: bool


def decide(flight: Flight, in_flight: Literal["swap", "trajectory"]) -> Decision:
    """See the module's opening."""
    if flight.held is None:
        wanted = flight.published if flight.next_evaluation is None else flight.next_evaluation
        return Decision(wanted if wanted >= 0 else None, begin=False)
    if flight.evaluating:
        return Decision(None, begin=True)
    if flight.next_evaluation is not None:
        if flight.next_evaluation == flight.held:
            return Decision(None, begin=True)
        wanted = flight.next_evaluation
    elif flight.published > flight.held:
        wanted = flight.published
    else:
        return Decision(None, begin=True)
    free = flight.trajectories == 0
    new_enough = flight.least is None or flight.least <= wanted
    if free or (in_flight == "swap" and new_enough):
        return Decision(wanted, begin=False)
    return Decision(None, begin=False)
