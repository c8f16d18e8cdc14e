"""Transfer mode `gather`: process 0 collects a mini-batch whole, and hands all of it to every other training process.

What it guarantees: a mini-batch is served once it was offered, whole, until it is released; who asks earlier is answered then,
or told by a deadline that it is not there; tickets, limits and checks are those of a storage unit; nobody can put anything.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable

import msgspec

from knittrans_jax.trajectory import GroupPayload, MiniBatchPlan, Trajectory
from knittrans_jax.transfer import wire
from knittrans_jax.transfer.bulk import Get
from knittrans_jax.transfer.pull import Payload
from knittrans_jax.transfer.rate import RateLimit
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_state import StorageState
from knittrans_jax.transfer.tls import ServerTls


class _RelayState(StorageState):
    """Holds what its own process offers. Its budget is 0: every put is refused."""

    def __init__(self, unit: str) -> None:
        super().__init__(unit, 0)

    def offer(self, payload: GroupPayload) -> None:
        self._groups[payload.group_id] = payload

    def release(self, group_ids: Iterable[int]) -> int:
        return sum(self._groups.pop(group_id).size_bytes for group_id in group_ids if group_id in self._groups)

    def holds(self, group_ids: Iterable[int]) -> bool:
        return all(group_id in self._groups for group_id in group_ids)


class RelayServer(StorageServer):
    """The bulk channel of a training process that relays. `set_key` before any ticket is good."""

    def __init__(
        self,
        unit: str,
        host: str,
        *,
        wait_s: float,
        request_timeout_s: float,
        tls: ServerTls | None = None,
        rate: RateLimit | None = None,
    ) -> None:
        """Binds and serves.

        Args:
            unit: the name that tickets for it carry.
            host: interface to listen on.
            wait_s: how long a request waits for a mini-batch to be offered.
            request_timeout_s: deadline of sending one response.
            tls: as a storage unit's; so is `rate`.
        """
        self._held = _RelayState(unit)
        super().__init__(self._held, host, request_timeout_s=request_timeout_s, tls=tls, rate=rate)
        self._wait_s = wait_s
        self._offered = threading.Condition(self._lock)

    def offer(self, plan: MiniBatchPlan, payload: Payload) -> None:
        """Serves a plan's groups from now on; `payload` holds all of its placements and images."""
        groups = [
            GroupPayload(
                group_id=planned.group_id,
                trajectories=_trajectories(plan, index, payload),
                media={
                    plan.images[image].digest: payload.media[plan.images[image].digest]
                    for placement in plan.placements
                    for image in placement.images
                    if plan.images[image].group == index
                },
            )
            for index, planned in enumerate(plan.groups)
        ]
        with self._offered:
            for group in groups:
                self._held.offer(group)
            self._offered.notify_all()

    def close(self, timeout_s: float = 2.0) -> None:
        """As a storage unit's; requests that wait are broken off."""
        self._closing.set()
        with self._offered:
            self._offered.notify_all()
        super().close(timeout_s)

    def _get(self, sock: socket.socket, prefix: wire.Prefix) -> None:
        get = msgspec.msgpack.decode(prefix.header, type=Get)
        wanted = {group_id for group_id, _ in (*get.rows, *get.media)}
        with self._offered:
            self._offered.wait_for(lambda: self._closing.is_set() or self._held.holds(wanted), self._wait_s)
        super()._get(sock, prefix)


def _trajectories(plan: MiniBatchPlan, group: int, payload: Payload) -> tuple[Trajectory, ...]:
    members = {p.trajectory: index for index, p in enumerate(plan.placements) if p.group == group}
    return tuple(payload.trajectories[members[member]] for member in sorted(members))
