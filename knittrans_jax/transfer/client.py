"""A storage unit's client: the engine puts groups with it, consumers pull with it.

What it guarantees: every call ends within `(retries + 1) * timeout_s` and the pauses between; a broken connection is opened
again with the ticket that the unit gave for the next one, and a pull goes on where it was cut; what was received is whole and
unchanged, or an error. Both `PUT` and `GET` may be repeated without harm. One thread at a time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import socket
import time
from collections.abc import Callable
from typing import Literal, Self, TypeVar

import msgspec
import numpy as np

from knittrans_jax.trajectory import GroupPayload
from knittrans_jax.transfer import wire
from knittrans_jax.transfer.bulk import (
    FIELDS,
    Data,
    Error,
    Get,
    Held,
    Hello,
    Kind,
    MediaShape,
    Welcome,
    put_frame,
    row_views,
)
from knittrans_jax.transfer.storage_state import StorageMissing, StorageRefused
from knittrans_jax.transfer.tls import split_address

MAX_HEADER_BYTES = 8 * 2**20
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
SPARE_TICKETS = 4

_T = TypeVar("_T")


class TicketRefused(wire.WireError):
    """The unit does not take the ticket; a fresh one is needed from the scheduler."""


@dataclasses.dataclass(frozen=True)
class PullRequest:
    """What to pull from one unit: rows by (group id, trajectory), and images by (group id that holds it, digest).

    An image that is asked for several times crosses the network several times; one copy of it is kept.
    """

    rows: tuple[tuple[int, int], ...] = ()
    media: tuple[tuple[int, str], ...] = ()
    fields: tuple[str, ...] = tuple(FIELDS)
    pixels: Literal["uint8", "float32"] = "uint8"


@dataclasses.dataclass(frozen=True)
class Pulled:
    """What came: the asked fields of every row in the order of the request, and the images by digest."""

    rows: list[dict[str, np.ndarray]]
    media: dict[str, np.ndarray]
    payload_bytes: int


@dataclasses.dataclass
class ClientCounters:
    """Since the start; bytes are payload bytes. What a failed attempt moved is not counted as pulled."""

    pulled_bytes: int = 0
    put_bytes: int = 0
    requests: int = 0
    connections: int = 0
    retries: int = 0
    resumed_bytes: int = 0
    """What a later connection needed not bring again."""


class StorageClient:
    """See the module's opening."""

    def __init__(
        self,
        address: str,
        ticket: bytes,
        peer: str,
        timeout_s: float,
        retries: int,
        *,
        max_payload_bytes: int = 2**30,
        stopped: Callable[[], bool] | None = None,
    ) -> None:
        """Connects at the first call.

        Args:
            address: the unit's `host:port`, with `#certificate` where connections are TLS (`transfer/tls.py`).
            ticket: a fresh ticket for this unit and peer.
            peer: the name that the ticket carries.
            timeout_s: deadline of every attempt.
            retries: attempts after the first.
            max_payload_bytes: most bytes that one response may bring.
            stopped: looked at before every attempt; true gives up at once.
        """
        self.address = address
        self.counters = ClientCounters()
        self._peer, self._timeout_s, self._retries = peer, timeout_s, retries
        self._tickets: collections.deque[bytes] = collections.deque([ticket], maxlen=SPARE_TICKETS)
        self._limits = wire.Limits(MAX_HEADER_BYTES, max_payload_bytes)
        self._stopped = stopped or (lambda: False)
        self.where, self._tls = split_address(address)
        self._socket: socket.socket | None = None  # greeted, and in step
        self._interruptible: socket.socket | None = None  # the same, or the one that is being greeted

    def renew(self, ticket: bytes) -> None:
        """Adds a fresh ticket for the next connection; the newest is used first."""
        self._tickets.append(ticket)

    def put_group(self, payload: GroupPayload) -> None:
        """Stores a group. Putting a group that is held already is no error.

        Raises:
            StorageRefused: the unit has no room, or holds something else under this id.
            WireError: not done after all attempts.
        """
        header, buffers = put_frame(payload)

        def attempt(sock: socket.socket, deadline: wire.Deadline) -> None:
            wire.send_frame(sock, Kind.PUT, msgspec.msgpack.encode(header), buffers, deadline=deadline)
            expect(self._receive(sock, deadline), Kind.DONE)

        self._attempts(f"put group {payload.group_id}", attempt)
        self.counters.put_bytes += header.payload_bytes

    def pull(self, request: PullRequest) -> Pulled:
        """Brings rows and images in one request and one response.

        Raises:
            StorageMissing: the unit does not hold something.
            StorageRefused: the unit does not answer such a request.
            WireError: not done after all attempts.
        """
        response = _Response(request)

        def attempt(sock: socket.socket, deadline: wire.Deadline) -> Pulled:
            start_bytes = response.received_bytes
            get = Get(request.rows, request.fields, request.media, request.pixels, start_bytes)
            wire.send_frame(sock, Kind.GET, msgspec.msgpack.encode(get), deadline=deadline)
            prefix = self._receive(sock, deadline)
            expect(prefix, Kind.DATA)
            if start_bytes:
                self.counters.resumed_bytes += start_bytes
            return response.receive(sock, prefix, deadline)

        pulled = self._attempts(f"pull {len(request.rows)} rows and {len(request.media)} images", attempt)
        self.counters.pulled_bytes += pulled.payload_bytes
        return pulled

    def inventory(self) -> Held:
        """Everything that the unit holds."""

        def attempt(sock: socket.socket, deadline: wire.Deadline) -> Held:
            wire.send_frame(sock, Kind.LIST, b"", deadline=deadline)
            prefix = self._receive(sock, deadline)
            expect(prefix, Kind.HELD)
            return decode(prefix, Held)

        return self._attempts("list", attempt)

    def interrupt(self) -> None:
        """From another thread, after `stopped` has become true: ends a call that waits."""
        sock = self._interruptible
        if sock is not None:
            with contextlib.suppress(OSError):  # closed meanwhile
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; a later call opens a new one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attempts(self, doing: str, attempt: Callable[[socket.socket, wire.Deadline], _T]) -> _T:
        """Runs `attempt` until it succeeds, `retries` times more at most, each on a connection that is in step."""
        self.counters.requests += 1
        for number in range(self._retries + 1):
            if number:
                self.counters.retries += 1
                time.sleep(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** (number - 1)))
            if self._stopped():
                raise wire.WireError(f"{doing}: stopped")
            try:
                deadline = wire.Deadline(self._timeout_s)
                return attempt(self._connected(deadline), deadline)
            except (StorageRefused, StorageMissing):
                raise  # an answer, on a connection that stays good
            except (OSError, msgspec.MsgspecError) as error:
                self.close()
                if number == self._retries or (isinstance(error, TicketRefused) and not self._tickets):
                    raise wire.WireError(
                        f"{doing}: unit at {self.where}, attempt {number + 1} of {self._retries + 1}: "
                        f"{type(error).__name__}: {error}"
                    ) from error
            except BaseException:
                self.close()  # in the middle of a frame
                raise
        raise AssertionError("unreachable")

    def _connected(self, deadline: wire.Deadline) -> socket.socket:
        if self._socket is not None:
            return self._socket
        if not self._tickets:
            raise TicketRefused("no ticket is left; renew() with a fresh one from the scheduler")
        sock = wire.connect(self.where, self._timeout_s, self._tls)
        self._interruptible = sock
        try:
            if self._stopped():  # interrupt() may have come before it could see the socket
                raise wire.WireError("stopped")
            ticket = self._tickets.pop()
            wire.send_frame(sock, Kind.HELLO, msgspec.msgpack.encode(Hello(ticket, self._peer)), deadline=deadline)
            prefix = self._receive(sock, deadline)
            expect(prefix, Kind.WELCOME)
            self._tickets.append(decode(prefix, Welcome).ticket)
        except BaseException:
            sock.close()
            raise
        self.counters.connections += 1
        self._socket = sock
        return sock

    def _receive(self, sock: socket.socket, deadline: wire.Deadline) -> wire.Prefix:
        """The next frame up to its payload; an ERROR becomes its exception."""
        prefix = wire.receive_prefix(sock, self._limits, deadline)
        if prefix.kind == Kind.ERROR:
            error = decode(prefix, Error)
            match error.code:
                case "refused":
                    raise StorageRefused(error.reason)
                case "missing":
                    raise StorageMissing(error.reason)
                case "ticket":
                    raise TicketRefused(error.reason)
                case _:
                    raise wire.WireProtocolError(f"the unit dropped us: {error.reason}")
        return prefix


def expect(prefix: wire.Prefix, kind: Kind) -> None:
    """Raises `WireProtocolError` when a frame is of another kind."""
    if prefix.kind != kind:
        raise wire.WireProtocolError(f"expected {kind.name}, got kind {prefix.kind}")


def decode(prefix: wire.Prefix, header: type[_T]) -> _T:
    """A frame's header; `WireProtocolError` when it is no such record."""
    try:
        return msgspec.msgpack.decode(prefix.header, type=header)
    except msgspec.MsgspecError as error:
        raise wire.WireProtocolError(f"a header that is no {header.__name__}: {error}") from error


class _Response:
    """What comes for one request, over as many connections as it takes: rows into one buffer, every image into its own."""

    def __init__(self, request: PullRequest) -> None:
        self._request = request
        self._data: Data | None = None
        self._rows = np.empty(0, np.uint8)
        self._images: dict[MediaShape, np.ndarray] = {}
        self._receiver: wire.Receiver | None = None

    @property
    def received_bytes(self) -> int:
        """How much came before a connection broke: where the next response begins."""
        return 0 if self._receiver is None else self._receiver.received_bytes

    def receive(self, sock: socket.socket, prefix: wire.Prefix, deadline: wire.Deadline) -> Pulled:
        """Receives a response, or the rest of it, after checking that it is what was asked for."""
        data = decode(prefix, Data)
        if self._receiver is None or self._data is None:
            receiver = self._begin(data, prefix)
        else:
            receiver = self._receiver
            if (data.lengths, data.media) != (self._data.lengths, self._data.media):
                self._receiver = None
                raise wire.WireProtocolError("the response goes on otherwise than it began")
            if receiver.received_bytes:
                try:
                    receiver.agree(data.skipped_checksum)
                except wire.WireChecksumError:
                    receiver.restart()
                    raise
        receiver.receive(sock, prefix, deadline)
        return Pulled(
            row_views(self._rows.data, data.lengths, self._request.fields),
            {shape.digest: image for shape, image in self._images.items()},
            receiver.total_bytes,
        )

    def _begin(self, data: Data, prefix: wire.Prefix) -> wire.Receiver:
        request, pixel = self._request, np.dtype(self._request.pixels)
        if len(data.lengths) != len(request.rows) or [m.digest for m in data.media] != [d for _, d in request.media]:
            raise wire.WireProtocolError("the response is not what was asked for")
        row_bytes = sum(data.lengths) * sum(dtype.itemsize for name, dtype in FIELDS.items() if name in request.fields)
        if row_bytes + sum(math.prod(image.shape) for image in data.media) * pixel.itemsize != prefix.payload_bytes:
            raise wire.WireProtocolError(
                f"a payload of {prefix.payload_bytes} bytes, but its header speaks of other sizes"
            )
        self._data, self._rows = data, np.empty(row_bytes, np.uint8)
        for shape in data.media:
            if shape not in self._images:
                self._images[shape] = np.empty(shape.shape, pixel)
        # Further copies of an image fall on the first.
        buffers = [self._images[shape].data.cast("B") for shape in data.media]
        self._receiver = wire.Receiver([self._rows.data, *buffers])
        return self._receiver
