"""The bulk channel: frames over plain TCP, received into buffers that the receiver chose.

What it guarantees:

* nothing is allocated for a peer before its sizes were checked against the caller's limits, and before the header's own
  checksum held;
* every socket operation ends by the caller's deadline;
* a frame is delivered whole and unchanged (xxh3-64 over the header and over the payload), or an error names what was wrong.

A frame, network byte order: magic `KNTJ`, protocol version u16, kind u16, header length u32, payload length u64, checksum of
the header u64 (over the fields before it and the header's bytes), checksum of the payload u64; then the header (msgspec
msgpack of the kind's record), then the payload (the concatenated buffers, whose sizes the header tells).

After any `WireError` the stream is out of step: close the connection.
"""

from __future__ import annotations

import dataclasses
import socket
import struct
import time
from collections.abc import Sequence

import xxhash

MAGIC = b"KNTJ"
PROTOCOL_VERSION = 1
_FIELDS = struct.Struct("!4sHHIQ")
_CHECKSUMS = struct.Struct("!QQ")
PREFIX_BYTES = _FIELDS.size + _CHECKSUMS.size
_PIECE_BYTES = 1 << 20
"""Received and hashed in pieces of this size, so that hashing reads what is still in the cache."""
_MAX_PIECES = 512
"""Buffers given to one `sendmsg`; the system's limit is 1,024."""

Buffer = memoryview


class WireError(ConnectionError):
    """Base: the connection cannot be used any further."""


class WireClosed(WireError):  # noqa: N818 - the name that callers read
    """The peer closed. `between_frames`: in an orderly way, where a new frame would have begun."""

    def __init__(self, message: str, between_frames: bool) -> None:
        super().__init__(message)
        self.between_frames = between_frames


class WireTimeout(WireError):  # noqa: N818
    """The deadline passed."""


class WireProtocolError(WireError):
    """The peer sent something that is no frame of this protocol, or one above the limits."""


class WireChecksumError(WireError):
    """The bytes that came are not the bytes that were sent."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Most bytes that a peer may make us hold for one frame."""

    header_bytes: int
    payload_bytes: int


class Deadline:
    """A moment by which something must be done."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s` from now."""
        self.timeout_s = timeout_s
        self._at = time.monotonic() + timeout_s

    def apply(self, sock: socket.socket, doing: str) -> None:
        """Gives the socket the time that is left; raises `WireTimeout` when there is none."""
        left_s = self._at - time.monotonic()
        if left_s <= 0:
            raise WireTimeout(f"{doing}: not done within {self.timeout_s:g} s")
        sock.settimeout(left_s)


@dataclasses.dataclass(frozen=True)
class Prefix:
    """A frame whose header is here and whose payload still lies in the socket."""

    kind: int
    header: bytes
    payload_bytes: int
    payload_checksum: int


def connect(address: str, timeout_s: float) -> socket.socket:
    """Connects to `host:port`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise WireProtocolError(f"bulk address {address!r}: expected host:port")
    try:
        sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    except TimeoutError as error:
        raise WireTimeout(f"connect to {address}: no answer within {timeout_s:g} s") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def send_frame(
    sock: socket.socket, kind: int, header: bytes, buffers: Sequence[Buffer] = (), *, deadline: Deadline
) -> int:
    """Sends a frame -> payload bytes. `buffers` must be contiguous bytes (`memoryview(x).cast("B")`)."""
    hasher = xxhash.xxh3_64()
    payload_bytes = 0
    for buffer in buffers:
        hasher.update(buffer)
        payload_bytes += buffer.nbytes
    fields = _FIELDS.pack(MAGIC, PROTOCOL_VERSION, kind, len(header), payload_bytes)
    checksums = _CHECKSUMS.pack(xxhash.xxh3_64_intdigest(fields + header), hasher.intdigest())
    pieces = [memoryview(fields + checksums + header), *(b for b in buffers if b.nbytes)]
    at = 0
    while at < len(pieces):
        deadline.apply(sock, "send")
        try:
            sent = sock.sendmsg(pieces[at : at + _MAX_PIECES])
        except TimeoutError as error:
            raise WireTimeout(f"send: the peer did not take its bytes within {deadline.timeout_s:g} s") from error
        except OSError as error:
            raise WireClosed(f"send: the connection broke ({error.strerror or error})", between_frames=False) from error
        while at < len(pieces) and sent >= pieces[at].nbytes:
            sent -= pieces[at].nbytes
            at += 1
        if sent:
            pieces[at] = pieces[at][sent:]
    return payload_bytes


def receive_prefix(sock: socket.socket, limits: Limits, deadline: Deadline) -> Prefix:
    """Receives and checks a frame up to its payload."""
    start = bytearray(PREFIX_BYTES)
    _receive_into(sock, memoryview(start), deadline, between_frames=True)
    magic, version, kind, header_bytes, payload_bytes = _FIELDS.unpack_from(start)
    header_checksum, payload_checksum = _CHECKSUMS.unpack_from(start, _FIELDS.size)
    if magic != MAGIC:
        raise WireProtocolError(f"not a frame: it begins with {bytes(magic)!r}, expected {MAGIC!r}")
    if version != PROTOCOL_VERSION:
        raise WireProtocolError(
            f"protocol version {version}, expected {PROTOCOL_VERSION}: do all roles run one version?"
        )
    if header_bytes > limits.header_bytes:
        raise WireProtocolError(f"a header of {header_bytes} bytes, at most {limits.header_bytes} are taken here")
    if payload_bytes > limits.payload_bytes:
        raise WireProtocolError(f"a payload of {payload_bytes} bytes, at most {limits.payload_bytes} are taken here")
    header = bytearray(header_bytes)
    _receive_into(sock, memoryview(header), deadline)
    if xxhash.xxh3_64_intdigest(bytes(start[: _FIELDS.size]) + bytes(header)) != header_checksum:
        raise WireChecksumError("the header's checksum does not hold")
    return Prefix(kind, bytes(header), payload_bytes, payload_checksum)


def receive_payload(sock: socket.socket, prefix: Prefix, buffers: Sequence[Buffer], deadline: Deadline) -> None:
    """Receives the payload into writable buffers, whose sizes must add up to it."""
    expected = sum(buffer.nbytes for buffer in buffers)
    if expected != prefix.payload_bytes:
        raise WireProtocolError(f"a payload of {prefix.payload_bytes} bytes, but its header speaks of {expected}")
    hasher = xxhash.xxh3_64()
    for buffer in buffers:
        _receive_into(sock, buffer, deadline, hasher)
    _check(hasher, prefix)


def discard_payload(sock: socket.socket, prefix: Prefix, deadline: Deadline) -> None:
    """Receives a payload that is not wanted, without holding it, so that the connection stays in step."""
    scratch = memoryview(bytearray(min(_PIECE_BYTES, prefix.payload_bytes)))
    hasher = xxhash.xxh3_64()
    left = prefix.payload_bytes
    while left:
        piece = scratch[: min(left, scratch.nbytes)]
        _receive_into(sock, piece, deadline, hasher)
        left -= piece.nbytes
    _check(hasher, prefix)


def _check(hasher: xxhash.xxh3_64, prefix: Prefix) -> None:
    if hasher.intdigest() != prefix.payload_checksum:
        raise WireChecksumError(f"the checksum of a payload of {prefix.payload_bytes} bytes does not hold")


def _receive_into(
    sock: socket.socket,
    buffer: Buffer,
    deadline: Deadline,
    hasher: xxhash.xxh3_64 | None = None,
    between_frames: bool = False,
) -> None:
    at = 0
    while at < buffer.nbytes:
        deadline.apply(sock, "receive")
        try:
            got = sock.recv_into(buffer[at : at + _PIECE_BYTES])
        except TimeoutError as error:
            raise WireTimeout(f"receive: {at} of {buffer.nbytes} bytes came within {deadline.timeout_s:g} s") from error
        except OSError as error:
            raise WireClosed(
                f"receive: the connection broke ({error.strerror or error})", between_frames=False
            ) from error
        if not got:
            raise WireClosed(f"the peer closed after {at} of {buffer.nbytes} bytes", between_frames and at == 0)
        if hasher is not None:
            hasher.update(buffer[at : at + got])
        at += got
