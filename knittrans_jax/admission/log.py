"""The append-only event log: records are durable before `append` returns, and a torn last record is seen as such.

Format: the line `KTLOG2`, then records of 4 bytes length, 4 bytes CRC-32 (both little endian) and events as a msgpack array.
One `append` writes one record and forces it to disk (group commit): its events are in the log together or not at all. Reading
stops at a record that is cut short or does not fit its checksum: if nothing but that follows, it is the torn tail of a crash,
and is reported; damage in the middle is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from knittrans_jax.admission.events import AnyEvent

MAGIC = b"KTLOG2\n"
MAX_RECORD_BYTES = 256 * 2**20
"""A larger length is damage: a turn's events, plans of a million trajectories included, stay below it."""
_HEADER = struct.Struct("<II")


class LogError(RuntimeError):
    """A file that is no event log, or one that is damaged before its end."""


@dataclasses.dataclass(frozen=True)
class ReadLog:
    """The events of a log; `torn_bytes` at its end belong to a record that was never whole."""

    events: list[AnyEvent]
    whole_bytes: int
    torn_bytes: int


class EventLog:
    """The writing end. One process, one thread."""

    def __init__(self, path: Path, *, fsync: bool = True, resume: ReadLog | None = None) -> None:
        """Creates the log, or goes on with one.

        Args:
            path: the log.
            fsync: force what is appended to disk.
            resume: what `read_log` found in it: its torn tail, if any, is cut off. None: a new log.

        Raises:
            LogError: the file exists: a run's log is never overwritten; or it is not what was read.
        """
        self.path = path
        self.events = 0
        self.size_bytes = len(MAGIC)
        self._fsync = fsync
        self._encoder = msgspec.msgpack.Encoder()
        if resume is not None:
            self._file: io.BufferedIOBase = self._reopen(resume)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._file = path.open("xb")
        except FileExistsError:
            raise LogError(
                f"{path} exists: a run of this name was made before; choose another name or remove it"
            ) from None
        self._file.write(MAGIC)
        self._force()

    def _reopen(self, read: ReadLog) -> io.BufferedRandom:
        with contextlib.ExitStack() as undo:
            file = undo.enter_context(self.path.open("r+b"))
            size_bytes = file.seek(0, os.SEEK_END)
            if not len(MAGIC) <= read.whole_bytes <= size_bytes or size_bytes != read.whole_bytes + read.torn_bytes:
                raise LogError(
                    f"{self.path}: has {size_bytes} bytes, {read.whole_bytes} whole and {read.torn_bytes} torn ones were read: "
                    "something else writes it"
                )
            file.truncate(read.whole_bytes)
            file.seek(read.whole_bytes)
            undo.pop_all()
        self.events, self.size_bytes = len(read.events), read.whole_bytes
        return file

    def append(self, events: Sequence[AnyEvent]) -> None:
        """Writes events; returns when they are on disk (with `fsync`) or with the operating system (without)."""
        if not events:
            return
        body = self._encoder.encode(events)
        header = _HEADER.pack(len(body), zlib.crc32(body))
        self._file.write(header)
        self._file.write(body)
        self._force()
        self.events += len(events)
        self.size_bytes += len(header) + len(body)

    def close(self) -> None:
        """Closes the file; what was appended is whole already."""
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _force(self) -> None:
        self._file.flush()
        if self._fsync:
            os.fsync(self._file.fileno())


def read_log(path: Path, start_bytes: int = 0) -> ReadLog:
    """Reads a log; a torn last record is left out and reported.

    Args:
        path: the log.
        start_bytes: where to begin: 0, or the `whole_bytes` of an earlier reading, to read on while the log grows.

    Raises:
        LogError: no event log, or damaged before its last record.
    """
    if start_bytes:
        with path.open("rb") as file:
            file.seek(start_bytes)
            return _read_records(path, file.read(), 0, start_bytes)
    content = path.read_bytes()
    if not content.startswith(MAGIC):
        if MAGIC.startswith(content):
            return ReadLog([], 0, len(content))
        raise LogError(f"{path}: not an event log of this version (expected it to begin with {MAGIC!r})")
    return _read_records(path, content, len(MAGIC), 0)


def _read_records(path: Path, content: bytes, offset: int, base: int) -> ReadLog:
    """The records of `content` from `offset` on; `content` begins at byte `base` of the log."""
    decoder = msgspec.msgpack.Decoder(list[AnyEvent])
    view, events = memoryview(content), []
    while offset < len(content):
        end = offset + _HEADER.size
        if end > len(content):
            break
        length, checksum = _HEADER.unpack_from(content, offset)
        if not any(view[end:]) and (not length or end + length <= len(content)):
            break  # space that a crash left unwritten reads as zeros
        body = view[end : end + length]
        if len(body) < length and length <= MAX_RECORD_BYTES:
            break
        if length > MAX_RECORD_BYTES or zlib.crc32(body) != checksum:
            if end + length >= len(content):
                break
            raise LogError(f"{path}: damaged at byte {base + offset}, {len(content) - offset} bytes before its end")
        try:
            events += decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise LogError(
                f"{path}: the record at byte {base + offset} holds no events of this version: {error}"
            ) from error
        offset = end + length
    return ReadLog(events, base + offset, len(content) - offset)
