"""The bulk channel: frames over plain TCP, received into buffers that the receiver chose.

What it guarantees:

* nothing is allocated for a peer before its sizes were checked against the caller's limits, and before the header's own
  checksum held;
* every socket operation ends by the caller's deadline;
* a frame is delivered whole and unchanged (xxh3-64 over the header and over the payload), or an error names what was wrong;
* what came of a payload before a connection broke is not lost: `Receiver` goes on in a later frame, once the sender has told
  the checksum of what it leaves out.

A frame, network byte order: magic `KNTJ`, protocol version u16, kind u16, header length u32, payload length u64, checksum of
the header u64 (over the fields before it and the header's bytes); then the header (msgspec msgpack of the kind's record), then
the payload (the concatenated buffers, whose sizes the header tells); after a payload that is not empty its checksum u64. It
comes last so that hashing and sending overlap with the other side's receiving. `docs/wire.md` is the protocol.

After any `WireError` the stream is out of step: close the connection.
"""

from __future__ import annotations

import dataclasses
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence

import xxhash

from knittrans_jax.transfer.rate import RateLimit

MAGIC = b"KNTJ"
PROTOCOL_VERSION = 2
_FIELDS = struct.Struct("!4sHHIQ")
_CHECKSUM = struct.Struct("!Q")
PREFIX_BYTES = _FIELDS.size + _CHECKSUM.size
_PIECE_BYTES = 1 << 20
"""Sent, received and hashed in pieces of this size, so that hashing reads what is still in the cache."""
_MAX_PIECES = 512
"""Buffers given to one `sendmsg`; the system's limit is 1,024."""
SOCKET_BUFFER_BYTES = 1 << 22
"""Asked of the system for either direction: fewer, larger system calls."""

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


def prepare(sock: socket.socket) -> None:
    """Options of every connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)


def connect(address: str, timeout_s: float, tls: ssl.SSLContext | None = None) -> socket.socket:
    """Connects to `host:port`; with `tls`, over TLS (`transfer/tls.py`)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise WireProtocolError(f"bulk address {address!r}: expected host:port")
    try:
        sock = socket.create_connection((host, int(port)), timeout=timeout_s)
    except TimeoutError as error:
        raise WireTimeout(f"connect to {address}: no answer within {timeout_s:g} s") from error
    prepare(sock)
    if tls is None:
        return sock
    try:
        return tls.wrap_socket(sock)
    except OSError as error:  # TLS errors are some
        sock.close()
        raise WireProtocolError(f"connect to {address}: TLS: {error}") from error


def send_frame(
    sock: socket.socket,
    kind: int,
    header: bytes,
    buffers: Sequence[Buffer] = (),
    *,
    deadline: Deadline,
    rate: RateLimit | None = None,
) -> int:
    """Sends a frame -> payload bytes. `buffers` must be contiguous bytes (`memoryview(x).cast("B")`); `rate` holds it back."""
    payload_bytes = sum(buffer.nbytes for buffer in buffers)
    fields = _FIELDS.pack(MAGIC, PROTOCOL_VERSION, kind, len(header), payload_bytes)
    checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields + header))
    pieces = [memoryview(fields + checksum + header)]
    hasher, hashed_bytes = xxhash.xxh3_64(), 0
    for batch in _batches(buffers):
        for piece in batch:
            hasher.update(piece)
            hashed_bytes += piece.nbytes
        if rate is not None:
            rate.wait(sum(piece.nbytes for piece in batch))
        pieces += batch
        if hashed_bytes == payload_bytes:
            pieces.append(memoryview(_CHECKSUM.pack(hasher.intdigest())))
        _send_all(sock, pieces, deadline)
        pieces = []
    if pieces:
        _send_all(sock, pieces, deadline)
    return payload_bytes


def _batches(buffers: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """The buffers in order, cut and put together into batches of about `_PIECE_BYTES`."""
    batch: list[Buffer] = []
    size = 0
    for buffer in buffers:
        at = 0
        while at < buffer.nbytes:
            piece = buffer[at : at + _PIECE_BYTES - size]
            batch.append(piece)
            at += piece.nbytes
            size += piece.nbytes
            if size == _PIECE_BYTES or len(batch) == _MAX_PIECES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _send_all(sock: socket.socket, pieces: list[Buffer], deadline: Deadline) -> None:
    if isinstance(sock, ssl.SSLSocket):  # it knows no sendmsg, and small records cost a call each
        pieces = [memoryview(b"".join(pieces))] if len(pieces) > 1 else pieces
    at = 0
    while at < len(pieces):
        deadline.apply(sock, "send")
        try:
            sent = sock.send(pieces[at]) if isinstance(sock, ssl.SSLSocket) else sock.sendmsg(pieces[at:])
        except TimeoutError as error:
            raise WireTimeout(f"send: the peer did not take its bytes within {deadline.timeout_s:g} s") from error
        except OSError as error:
            raise WireClosed(f"send: the connection broke ({error.strerror or error})", between_frames=False) from error
        while at < len(pieces) and sent >= pieces[at].nbytes:
            sent -= pieces[at].nbytes
            at += 1
        if sent:
            pieces[at] = pieces[at][sent:]


def skip(buffers: Sequence[Buffer], count_bytes: int) -> tuple[int, list[Buffer]]:
    """Leaves the first `count_bytes` of a payload out -> (their checksum, what is left)."""
    hasher, left = xxhash.xxh3_64(), []
    for buffer in buffers:
        cut = min(count_bytes, buffer.nbytes)
        hasher.update(buffer[:cut])
        count_bytes -= cut
        if cut < buffer.nbytes:
            left.append(buffer[cut:])
    return hasher.intdigest(), left


def receive_prefix(sock: socket.socket, limits: Limits, deadline: Deadline) -> Prefix:
    """Receives and checks a frame up to its payload."""
    start = bytearray(PREFIX_BYTES)
    _receive_into(sock, memoryview(start), deadline, between_frames=True)
    magic, version, kind, header_bytes, payload_bytes = _FIELDS.unpack_from(start)
    (header_checksum,) = _CHECKSUM.unpack_from(start, _FIELDS.size)
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
    return Prefix(kind, bytes(header), payload_bytes)


class Receiver:
    """Receives a payload into writable buffers, over as many frames as it takes.

    A frame brings the payload from `received_bytes` on. When a connection breaks, what came stays; it counts as good once
    `agree` was told the sender's checksum of it.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        """`buffers`: contiguous bytes, of the whole payload's size together."""
        self._buffers = buffers
        self.total_bytes = sum(buffer.nbytes for buffer in buffers)
        self.received_bytes = 0

    def agree(self, checksum: int) -> None:
        """Compares the sender's checksum of the first `received_bytes` with that of what came.

        Raises:
            WireChecksumError: they differ; everything must come again (`restart`).
        """
        hasher, left = xxhash.xxh3_64(), self.received_bytes
        for buffer in self._buffers:
            hasher.update(buffer[: min(left, buffer.nbytes)])
            left -= min(left, buffer.nbytes)
        if hasher.intdigest() != checksum:
            raise WireChecksumError(f"the first {self.received_bytes} bytes, from before the cut, are not the sender's")

    def restart(self) -> None:
        """Forgets what came."""
        self.received_bytes = 0

    def receive(self, sock: socket.socket, prefix: Prefix, deadline: Deadline) -> None:
        """Receives the rest from a frame whose prefix is here."""
        left = self.total_bytes - self.received_bytes
        if left != prefix.payload_bytes:
            raise WireProtocolError(f"a payload of {prefix.payload_bytes} bytes, but its header speaks of {left}")
        frame = xxhash.xxh3_64()
        skip = self.received_bytes
        for buffer in self._buffers:
            if skip >= buffer.nbytes:
                skip -= buffer.nbytes
                continue
            at, skip = skip, 0
            while at < buffer.nbytes:
                piece = buffer[at : at + _PIECE_BYTES]
                got = _receive_some(sock, piece, deadline, f"{self.received_bytes} of {self.total_bytes} bytes")
                frame.update(piece[:got])
                at += got
                self.received_bytes += got
        try:
            _check(sock, frame, prefix, deadline)
        except WireChecksumError:
            self.restart()
            raise


def receive_payload(sock: socket.socket, prefix: Prefix, buffers: Sequence[Buffer], deadline: Deadline) -> None:
    """Receives the payload into writable buffers, whose sizes must add up to it."""
    Receiver(buffers).receive(sock, prefix, deadline)


def discard_payload(sock: socket.socket, prefix: Prefix, deadline: Deadline) -> None:
    """Receives a payload that is not wanted, without holding it, so that the connection stays in step."""
    scratch = memoryview(bytearray(min(_PIECE_BYTES, prefix.payload_bytes)))
    hasher = xxhash.xxh3_64()
    left = prefix.payload_bytes
    while left:
        piece = scratch[: min(left, scratch.nbytes)]
        got = _receive_some(sock, piece, deadline, f"{prefix.payload_bytes - left} of {prefix.payload_bytes} bytes")
        hasher.update(piece[:got])
        left -= got
    _check(sock, hasher, prefix, deadline)


def _check(sock: socket.socket, hasher: xxhash.xxh3_64, prefix: Prefix, deadline: Deadline) -> None:
    """Receives a payload's checksum and compares; an empty payload has none."""
    if not prefix.payload_bytes:
        return
    checksum = bytearray(_CHECKSUM.size)
    _receive_into(sock, memoryview(checksum), deadline)
    if (hasher.intdigest(),) != _CHECKSUM.unpack(checksum):
        raise WireChecksumError(f"the checksum of a payload of {prefix.payload_bytes} bytes does not hold")


def _receive_into(sock: socket.socket, buffer: Buffer, deadline: Deadline, between_frames: bool = False) -> None:
    at = 0
    while at < buffer.nbytes:
        at += _receive_some(sock, buffer[at:], deadline, f"{at} of {buffer.nbytes} bytes", between_frames and at == 0)


def _receive_some(
    sock: socket.socket, buffer: Buffer, deadline: Deadline, so_far: str, between_frames: bool = False
) -> int:
    deadline.apply(sock, "receive")
    try:
        got = sock.recv_into(buffer)
    except TimeoutError as error:
        raise WireTimeout(f"receive: {so_far} came within {deadline.timeout_s:g} s") from error
    except OSError as error:
        raise WireClosed(f"receive: the connection broke ({error.strerror or error})", between_frames=False) from error
    if not got:
        raise WireClosed(f"the peer closed after {so_far}", between_frames)
    return got
