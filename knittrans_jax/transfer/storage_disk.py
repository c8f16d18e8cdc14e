"""A storage unit's groups in files: what it has acknowledged, it still has after it was killed and started again.

What it guarantees, besides all that `StorageState` does:

* a group is in its file, and the file on disk, before the put is acknowledged; a file is whole or not there (atomic rename);
* a unit that is started anew holds every group of its folder; a damaged or cut file is deleted and counted, never served;
* a released group's file is deleted. The budget bounds bytes on disk: every group has its own copy of its images there.

Groups are served from mapped files, so memory is the system's page cache. A file: magic `KNTS`, header length u32, xxh3-64 of
what follows (both in network byte order), the header (msgpack `Put`), zeros up to a multiple of 64 bytes, the payload of a PUT.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from knittrans_jax.trajectory import GroupPayload, Trajectory
from knittrans_jax.transfer.bulk import FIELDS, Put, put_frame, row_views
from knittrans_jax.transfer.storage_state import StorageRefused, StorageState

_START = struct.Struct("!4sIQ")
_MAGIC = b"KNTS"
_ALIGNMENT = 64
_FILE = re.compile(r"group-(\d+)\.payload")


class DamagedPayload(ValueError):  # noqa: N818
    """A file that does not hold what was written."""


def write_group(path: Path, payload: GroupPayload) -> None:
    """Writes a group, forced to disk before its name appears. Raises `OSError`."""
    put, buffers = put_frame(payload)
    header = msgspec.msgpack.encode(put)
    padded = header + bytes(-(_START.size + len(header)) % _ALIGNMENT)
    hasher = xxhash.xxh3_64(padded)
    for buffer in buffers:
        hasher.update(buffer)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            file.write(_START.pack(_MAGIC, len(header), hasher.intdigest()) + padded)
            for buffer in buffers:
                file.write(buffer)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def map_group(path: Path) -> tuple[Put, GroupPayload]:
    """A group whose arrays lie in the file. Raises `DamagedPayload`, `OSError`."""
    size_bytes = path.stat().st_size
    if size_bytes < _START.size:
        raise DamagedPayload(f"{path}: {size_bytes} bytes")
    raw = np.memmap(path, np.uint8, "r").view(np.ndarray)
    magic, header_bytes, checksum = _START.unpack_from(raw.data)
    begin = _START.size + header_bytes
    begin += -begin % _ALIGNMENT
    if magic != _MAGIC or begin > size_bytes or xxhash.xxh3_64_intdigest(raw.data[_START.size :]) != checksum:
        raise DamagedPayload(f"{path}: no payload, or not the one that was written")
    put = msgspec.msgpack.decode(raw.data[_START.size : _START.size + header_bytes], type=Put)
    if begin + put.payload_bytes != size_bytes:
        raise DamagedPayload(f"{path}: {size_bytes} bytes, its header speaks of {begin + put.payload_bytes}")
    rows = row_views(raw[begin : begin + put.row_bytes].data, put.lengths, tuple(FIELDS))
    at = begin + put.row_bytes
    media: dict[str, np.ndarray] = {}
    for shape in put.media:
        end = at + int(np.prod(shape.shape))
        media[shape.digest] = raw[at:end].reshape(shape.shape)
        at = end
    return put, GroupPayload(group_id=put.group_id, trajectories=tuple(Trajectory(**row) for row in rows), media=media)


class DiskStorageState(StorageState):
    """See the module's opening. `persist` may run in any thread, everything else under the caller's lock."""

    def __init__(self, unit: str, budget_bytes: int, folder: Path) -> None:
        """Holds what the folder has, which is made when it is not there.

        Raises:
            StorageRefused: what it has is above the budget.
        """
        super().__init__(unit, budget_bytes)
        self._folder = folder
        self.recovered_groups = 0
        self.damaged_files = 0
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.iterdir()):
            if _FILE.fullmatch(path.name):
                self._recover(path)
            elif path.name.startswith("."):
                path.unlink()  # half a group, which was never acknowledged

    @property
    def held_bytes(self) -> int:
        """Bytes of all groups, each with its own images."""
        return sum(group.size_bytes for group in self._groups.values())

    def persist(self, payload: GroupPayload) -> GroupPayload:
        """Writes a reserved group -> the same, in its file. Raises `StorageRefused` when the disk does not take it."""
        path = self._path(payload.group_id)
        try:
            write_group(path, payload)
            return map_group(path)[1]
        except (OSError, DamagedPayload) as error:
            path.unlink(missing_ok=True)
            raise StorageRefused(f"group {payload.group_id}: unit {self.unit} could not write it: {error}") from error

    def commit(self, payload: GroupPayload) -> None:
        """As `StorageState.commit`, of what `persist` gave; a group that is refused leaves no file."""
        try:
            super().commit(payload)
        except StorageRefused:
            self._path(payload.group_id).unlink(missing_ok=True)
            raise

    def release(self, group_ids: Iterable[int]) -> int:
        """As `StorageState.release`, files included."""
        going = [group_id for group_id in group_ids if group_id in self._groups]
        freed = super().release(going)
        for group_id in going:
            self._path(group_id).unlink(missing_ok=True)
        return freed

    def _recover(self, path: Path) -> None:
        try:
            put, payload = map_group(path)
            if path != self._path(put.group_id):
                raise DamagedPayload(f"{path}: holds group {put.group_id}")
            self.put(payload, put)
        except (DamagedPayload, msgspec.MsgspecError):
            path.unlink()
            self.damaged_files += 1
            return
        self.recovered_groups += 1

    def _path(self, group_id: int) -> Path:
        return self._folder / f"group-{group_id}.payload"
