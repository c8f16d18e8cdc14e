"""A training process's connections to storage units, and what it pulls of a plan over them.

What it guarantees: what is asked for comes whole, or an error says what did not; no response is asked to bring much more than
`PIECE_BYTES`; bytes are counted as they crossed the network, copies and all. One thread, apart from `interrupt`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from knittrans_jax.trajectory import TRAJECTORY_BYTES_PER_TOKEN, MiniBatchPlan, Trajectory
from knittrans_jax.transfer.client import PullRequest, StorageClient
from knittrans_jax.transfer.control import ControlStopped
from knittrans_jax.transfer.pack import PackSpec, Pixels
from knittrans_jax.transfer.storage_state import StorageMissing
from knittrans_jax.transfer.wire import WireError

PIECE_BYTES = 2**28
"""A pull is cut into requests of about this size: a lost connection costs one of them."""


class PullError(RuntimeError):
    """Something cannot be asked for."""


class PullFailed(RuntimeError):  # noqa: N818 - the name says what happened
    """A unit did not bring what it was asked for; the cause says why.

    `gone`: it answered, and does not hold it. Else it could not be reached, or what came was damaged, after all retries.
    """

    def __init__(self, unit: str, address: str, error: Exception) -> None:
        super().__init__(f"unit {unit} at {address.partition('#')[0]}: {error}")
        self.unit, self.address, self.gone = unit, address, isinstance(error, StorageMissing)


@dataclasses.dataclass
class Payload:
    """What was pulled of a plan: trajectories by placement, images [H, W, C] by digest, and the payload bytes it took."""

    trajectories: dict[int, Trajectory] = dataclasses.field(default_factory=dict)
    media: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    bytes: int = 0


class UnitClients:
    """Clients by storage unit, renewed as tickets come."""

    def __init__(self, peer: str, timeout_s: float, retries: int, stopped: Callable[[], bool]) -> None:
        """`peer`: the name that the tickets carry; the others as in `StorageClient`."""
        self._peer, self._timeout_s, self._retries, self._stopped = peer, timeout_s, retries, stopped
        self._clients: dict[str, StorageClient] = {}

    def renew(self, units: Mapping[str, str], tickets: Mapping[str, bytes]) -> None:
        """Takes addresses and fresh tickets by unit."""
        for unit, ticket in tickets.items():
            client = self._clients.get(unit)
            if client is not None and client.address == units.get(unit):
                client.renew(ticket)
            elif unit in units:
                if client is not None:
                    client.close()
                self._clients[unit] = StorageClient(
                    units[unit], ticket, self._peer, self._timeout_s, self._retries, stopped=self._stopped
                )

    def pull(
        self,
        plan: MiniBatchPlan,
        placements: Sequence[int],
        images: Sequence[int],
        spec: PackSpec,
        pixels: Pixels = "uint8",
        unit: str | None = None,
    ) -> Payload:
        """Pulls rows and images from the units that hold them.

        Args:
            plan: the mini-batch.
            placements: indices of its placements.
            images: indices of its images; one that stands here several times crosses the network several times.
            spec: the model's image geometry, from which sizes are estimated.
            pixels: the type in which images travel and arrive.
            unit: the one unit that holds everything, in place of the groups' own.

        Raises:
            PullError: there is no connection to a unit.
            PullFailed: a unit did not bring it.
            ControlStopped: told to stop between two requests.
        """
        payload = Payload()
        where = (lambda group: unit) if unit is not None else (lambda group: plan.groups[group].unit)
        rows_of = _by(placements, lambda index: where(plan.placements[index].group))
        images_of = _by(images, lambda index: where(plan.images[index].group))
        pixel_bytes = spec.patch_values * np.dtype(pixels).itemsize
        for name in sorted(rows_of.keys() | images_of.keys()):
            if name not in self._clients:
                raise PullError(f"plan {plan.plan_id} came without address and ticket for unit {name}")
            sizes = [
                *(plan.placements[index].length * TRAJECTORY_BYTES_PER_TOKEN for index in rows_of.get(name, [])),
                *(plan.images[i].grid_h * plan.images[i].grid_w * pixel_bytes for i in images_of.get(name, [])),
            ]
            wanted = [(True, index) for index in rows_of.get(name, [])] + [(False, i) for i in images_of.get(name, [])]
            for piece in pieces(sizes, PIECE_BYTES):
                if self._stopped():
                    raise ControlStopped("stopped between two pulls")
                rows = [index for is_row, index in wanted[piece] if is_row]
                shown = [index for is_row, index in wanted[piece] if not is_row]
                request = PullRequest(
                    rows=tuple(
                        (plan.groups[plan.placements[i].group].group_id, plan.placements[i].trajectory) for i in rows
                    ),
                    media=tuple((plan.groups[plan.images[i].group].group_id, plan.images[i].digest) for i in shown),
                    pixels=pixels,
                )
                try:
                    pulled = self._clients[name].pull(request)
                except (StorageMissing, WireError) as error:
                    raise PullFailed(name, self._clients[name].address, error) from error
                for index, fields in zip(rows, pulled.rows, strict=True):
                    payload.trajectories[index] = Trajectory(**fields)
                payload.media.update(pulled.media)
                payload.bytes += pulled.payload_bytes
        return payload

    def interrupt(self) -> None:
        """From another thread, once `stopped` is true: breaks off a pull that waits."""
        for client in list(self._clients.values()):
            client.interrupt()

    def close(self) -> None:
        """Closes every connection."""
        for client in self._clients.values():
            client.close()


def pieces(sizes: Sequence[int], most: int) -> list[slice]:
    """Cuts a sequence of sizes into runs that add up to at most `most`, or consist of one."""
    cut, begin, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > begin and total + size > most:
            cut.append(slice(begin, index))
            begin, total = index, 0
        total += size
    return [*cut, slice(begin, len(sizes))] if sizes else []


def shown_images(plan: MiniBatchPlan, placements: Iterable[int]) -> list[int]:
    """The images that these trajectories show, each as often as they show it."""
    return [image for index in placements for image in plan.placements[index].images]


def _by(indices: Sequence[int], unit_of: Callable[[int], str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index in indices:
        found.setdefault(unit_of(index), []).append(index)
    return found
