"""Every group is in exactly one account, moves only along legal transitions, and all accounts add up at every moment."""

from __future__ import annotations

import enum

from knittrans_jax.admission.completion import Kind


class Account(enum.StrEnum):
    """Where a group is."""

    LEASED = "leased"
    RUNNING = "running"
    READY = "ready"
    ADMITTED = "admitted"
    CONSUMED = "consumed"
    FILTERED = "filtered"
    EXPIRED = "expired"
    LOST = "lost"
    FAILED = "failed"

    __hash__ = str.__hash__  # an enumeration's own runs in Python, at every look-up of every transition


LIVE = frozenset({Account.LEASED, Account.RUNNING, Account.READY, Account.ADMITTED, Account.CONSUMED})
"""Groups that the launch gate counts. The place of any other group may be launched again."""
POOL = frozenset({Account.LEASED, Account.RUNNING, Account.READY})
"""Launched, and not yet part of a mini-batch."""
IN_FLIGHT = frozenset({Account.LEASED, Account.RUNNING})
"""Groups that a rollout host has."""
OPEN = POOL | {Account.ADMITTED}
"""Groups that still occupy their share of a storage unit for the run's sake."""

LEGAL: dict[Account, frozenset[Account]] = {
    Account.LEASED: frozenset({Account.RUNNING, Account.FAILED, Account.EXPIRED, Account.LOST}),
    Account.RUNNING: frozenset({Account.READY, Account.FAILED, Account.EXPIRED, Account.LOST}),
    Account.READY: frozenset({Account.ADMITTED, Account.FILTERED, Account.EXPIRED, Account.LOST}),
    Account.ADMITTED: frozenset({Account.READY, Account.CONSUMED, Account.LOST}),
    Account.CONSUMED: frozenset({Account.LOST}),
    Account.FILTERED: frozenset(),
    Account.EXPIRED: frozenset(),
    Account.LOST: frozenset(),
    Account.FAILED: frozenset(),
}


_EFFECTS: dict[Account, dict[Account, tuple[int, bool]]] = {
    source: {target: ((target in POOL) - (source in POOL), target not in LIVE) for target in targets}
    for source, targets in LEGAL.items()
}
"""By source and target: how the pool changes (a withdrawn group comes back to it), and whether the group stops being live."""
_LEASED, _RUNNING, _READY = Account.LEASED, Account.RUNNING, Account.READY


class IllegalTransition(ValueError):  # noqa: N818 - the name says what happened
    """An event that does not fit the account of its group: the log is wrong, or its writer is."""


class Accounts:
    """Counts of groups: by account; live and in the pool by launched kind; ready by the kind they have when done.

    Every operation takes constant time.
    """

    __slots__ = ("counts", "issued", "live", "live_by_kind", "pool_by_kind", "ready_by_kind")

    def __init__(self, kinds: tuple[Kind, ...], final_kinds: tuple[Kind, ...] | None = None) -> None:
        """`final_kinds`: the kinds of groups that are done, where these have more values than launched ones."""
        self.counts: dict[Account, int] = dict.fromkeys(Account, 0)
        self.issued = 0
        self.live = 0
        """Groups that are leased, running, ready, admitted or consumed."""
        self.live_by_kind: dict[Kind, int] = dict.fromkeys(kinds, 0)
        self.pool_by_kind: dict[Kind, int] = dict.fromkeys(kinds, 0)
        self.ready_by_kind: dict[Kind, int] = dict.fromkeys(kinds if final_kinds is None else final_kinds, 0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Accounts):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    @property
    def in_flight(self) -> int:
        """Groups that are leased or running."""
        return self.counts[Account.LEASED] + self.counts[Account.RUNNING]

    def in_flight_of(self, kind: Kind) -> int:
        """Groups launched with this kind that are leased or running."""
        if kind in self.ready_by_kind:
            return self.pool_by_kind[kind] - self.ready_by_kind[kind]
        ready = sum(n for final, n in self.ready_by_kind.items() if final[: len(kind)] == kind)
        return self.pool_by_kind[kind] - ready

    def issue(self, kind: Kind) -> None:
        """A new group, leased."""
        self.issued += 1
        self.live += 1
        self.counts[_LEASED] += 1
        self.live_by_kind[kind] += 1
        self.pool_by_kind[kind] += 1

    def become_ready(self, final: Kind) -> None:
        """A running group becomes ready: `move` for the commonest transition of all."""
        self.counts[_RUNNING] -= 1
        self.counts[_READY] += 1
        self.ready_by_kind[final] += 1

    def move(
        self, group_id: int, kind: Kind, source: Account, target: Account, final: Kind | None = None, count: int = 1
    ) -> None:
        """Moves a group, or `count` alike (`group_id` is one of them).

        Args:
            group_id: for messages.
            kind: the kind that it was launched with.
            source: where it is.
            target: where it goes.
            final: its kind when it is done, where that says more.
            count: how many alike move.

        Raises:
            IllegalTransition: not along a legal transition; nothing has moved.
        """
        effect = _EFFECTS[source].get(target)
        if effect is None:
            raise IllegalTransition(
                f"group {group_id}: {source} -> {target}; from {source} a group may become "
                f"{', '.join(sorted(LEGAL[source])) or 'nothing else'}"
            )
        counts = self.counts
        counts[source] -= count
        counts[target] += count
        if source is _READY:
            self.ready_by_kind[final or kind] -= count
        elif target is _READY:
            self.ready_by_kind[final or kind] += count
        pool, dies = effect
        if pool:
            self.pool_by_kind[kind] += pool * count
        if dies:
            self.live -= count
            self.live_by_kind[kind] -= count

    def check(self) -> None:
        """Raises `AssertionError` unless everything adds up."""
        counts = self.counts
        if min(counts.values()) < 0 or sum(counts.values()) != self.issued:
            raise AssertionError(f"{self.issued} groups were issued, the accounts hold {counts}")
        for name, by_kind, accounts in (
            ("live", self.live_by_kind, LIVE),
            ("in the pool", self.pool_by_kind, POOL),
            ("ready", self.ready_by_kind, {Account.READY}),
        ):
            total = sum(counts[account] for account in accounts)
            if sum(by_kind.values()) != total or min(by_kind.values(), default=0) < 0:
                raise AssertionError(f"{total} groups are {name}, by kind there are {by_kind}")
        if self.live != sum(self.live_by_kind.values()):
            raise AssertionError(f"{self.live} groups are live, by kind there are {self.live_by_kind}")

    def as_dict(self) -> dict[str, int]:
        """Counts by account name."""
        return {account.value: count for account, count in self.counts.items()}
