"""What a storage unit holds: a pure state, without clock, socket or thread.

What it guarantees:

* held and reserved bytes together never exceed the budget; a put reserves its bytes before they are received;
* an image is held once however many groups show it, and goes with the last of them;
* a group is held whole or not at all; putting what is already held changes nothing (a repeated put is no error);
* after all groups are released, no byte is held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from knittrans_jax.trajectory import GroupPayload, Trajectory, media_digest
from knittrans_jax.transfer.bulk import FIELDS, HeldGroup, Put


class StorageRefused(ValueError):  # noqa: N818 - the name that callers read
    """A put that the unit does not accept: above its budget, or at odds with what it holds."""


class StorageMissing(KeyError):  # noqa: N818
    """Something that was asked for is not held."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclasses.dataclass
class _Media:
    image: np.ndarray
    groups: set[int]


class StorageState:
    """See the module's opening. Not thread-safe: the caller holds a lock."""

    def __init__(self, unit: str, budget_bytes: int) -> None:
        """`budget_bytes` bounds held and reserved bytes together."""
        self.unit = unit
        self.budget_bytes = budget_bytes
        self._groups: dict[int, GroupPayload] = {}
        self._media: dict[str, _Media] = {}
        self._reserved: dict[int, int] = {}
        self._row_bytes = 0
        self._media_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of all rows, and of each image once."""
        return self._row_bytes + self._media_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes promised to puts that are under way."""
        return sum(self._reserved.values())

    @property
    def held_groups(self) -> int:
        """Number of groups."""
        return len(self._groups)

    @property
    def held_media(self) -> int:
        """Number of different images."""
        return len(self._media)

    def reserve(self, put: Put) -> bool:
        """Reserves the bytes of a put -> False when the group is held already, and nothing is to be done.

        Raises:
            StorageRefused: no room, the same group is being put by another connection, or a held group differs.
        """
        held = self._groups.get(put.group_id)
        if held is not None:
            lengths = tuple(len(t.tokens_T) for t in held.trajectories)
            if lengths != put.lengths or {m.digest for m in put.media} != set(held.media):
                raise StorageRefused(f"group {put.group_id} is held already, with other trajectories or images")
            return False
        if put.group_id in self._reserved:
            raise StorageRefused(f"group {put.group_id} is being put by another connection")
        if not put.lengths:
            raise StorageRefused(f"group {put.group_id} has no trajectories")
        if len({m.digest for m in put.media}) != len(put.media):
            raise StorageRefused(f"group {put.group_id} brings one image twice; send each digest once")
        free = self.budget_bytes - self.held_bytes - self.reserved_bytes
        if put.payload_bytes > free:
            raise StorageRefused(
                f"group {put.group_id} needs {put.payload_bytes} bytes, {free} of unit {self.unit}'s {self.budget_bytes} "
                "are free (rollout.storage_bytes): raise it, or lower admission.look_ahead_groups"
            )
        self._reserved[put.group_id] = put.payload_bytes
        return True

    def cancel(self, group_id: int) -> None:
        """Gives the bytes of a reserved put back; nothing when it was never reserved."""
        self._reserved.pop(group_id, None)

    def persist(self, payload: GroupPayload) -> GroupPayload:
        """Makes a reserved group outlive the unit's process, where the unit does that -> what is to be held.

        The only method that may take long, and that needs no lock.

        Raises:
            StorageRefused: that failed.
        """
        return payload

    def commit(self, payload: GroupPayload) -> None:
        """Holds a reserved group.

        Raises:
            StorageRefused: not reserved, or an image's content is not what its digest says.
        """
        if payload.size_bytes != self._reserved.get(payload.group_id):
            raise StorageRefused(f"group {payload.group_id}: {payload.size_bytes} bytes came, not those reserved")
        for digest, image in payload.media.items():
            if digest not in self._media and media_digest(image) != digest:
                raise StorageRefused(f"group {payload.group_id}: an image's content is not what digest {digest} says")
        del self._reserved[payload.group_id]
        for digest, image in payload.media.items():
            held = self._media.get(digest)
            if held is None:
                held = self._media[digest] = _Media(image, set())
                self._media_bytes += image.nbytes
            held.groups.add(payload.group_id)
        media = {digest: self._media[digest].image for digest in payload.media}  # the held copy; the new one goes
        self._groups[payload.group_id] = dataclasses.replace(payload, media=media)
        self._row_bytes += sum(t.size_bytes for t in payload.trajectories)

    def put(self, payload: GroupPayload, put: Put) -> None:
        """Reserves and holds in one step, for callers in the same process."""
        if self.reserve(put):
            try:
                self.commit(payload)
            except StorageRefused:
                self.cancel(payload.group_id)
                raise

    def rows(self, requests: Sequence[tuple[int, int]], fields: Sequence[str]) -> list[Trajectory]:
        """Trajectories by (group, index). Raises `StorageMissing`."""
        unknown = [name for name in fields if name not in FIELDS]
        if unknown:
            raise StorageMissing(f"no such fields: {unknown}; there are {list(FIELDS)}")
        found = []
        for group_id, index in requests:
            group = self._group(group_id)
            if index >= len(group.trajectories):
                raise StorageMissing(f"group {group_id} has {len(group.trajectories)} trajectories, no index {index}")
            found.append(group.trajectories[index])
        return found

    def media(self, requests: Sequence[tuple[int, str]]) -> list[np.ndarray]:
        """Images by (group, digest); a group gives only its own. Raises `StorageMissing`."""
        found = []
        for group_id, digest in requests:
            group = self._group(group_id)
            if digest not in group.media:
                raise StorageMissing(f"group {group_id} has no image {digest}")
            found.append(group.media[digest])
        return found

    def release(self, group_ids: Iterable[int]) -> int:
        """Lets groups go -> bytes freed. Ids that are not held are skipped: a release may be told twice."""
        before = self.held_bytes
        for group_id in group_ids:
            group = self._groups.pop(group_id, None)
            if group is None:
                continue
            self._row_bytes -= sum(t.size_bytes for t in group.trajectories)
            for digest in group.media:
                held = self._media[digest]
                held.groups.discard(group_id)
                if not held.groups:
                    self._media_bytes -= held.image.nbytes
                    del self._media[digest]
        return before - self.held_bytes

    def inventory(self) -> tuple[HeldGroup, ...]:
        """Every held group, by id."""
        return tuple(
            HeldGroup(group_id, len(group.trajectories), group.size_bytes)
            for group_id, group in sorted(self._groups.items())
        )

    def _group(self, group_id: int) -> GroupPayload:
        try:
            return self._groups[group_id]
        except KeyError:
            raise StorageMissing(
                f"unit {self.unit} does not hold group {group_id}: released, lost or never put"
            ) from None
