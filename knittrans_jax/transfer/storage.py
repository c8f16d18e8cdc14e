"""The storage unit: a process without JAX beside each engine, which holds finished groups and serves them to consumers.

What it guarantees:

* a peer without a valid, unused ticket learns nothing and changes nothing; one that sends rubbish gets an error and is
  dropped; the process lives, and the others are served;
* connections, bytes held for a peer before its ticket was checked, and bytes held in all are bounded; every socket operation
  has a deadline;
* groups are released when the scheduler says so, and only then; with `rollout.storage_on_disk` they outlive the process.

One thread per connection: the threads spend their time in system calls and hashing, which leave the interpreter free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from knittrans_jax.config import Config
from knittrans_jax.launch.messages import Ack, Report, StorageOrders, StorageSync
from knittrans_jax.trajectory import GroupPayload, Trajectory
from knittrans_jax.transfer import tickets, wire
from knittrans_jax.transfer.bulk import (
    FIELDS,
    Data,
    Error,
    Get,
    Held,
    Hello,
    Kind,
    MediaShape,
    Put,
    Welcome,
    as_bytes,
    row_buffers,
    row_views,
)
from knittrans_jax.transfer.control import ControlClient, ControlError, reachable_host
from knittrans_jax.transfer.rate import RateLimit
from knittrans_jax.transfer.storage_disk import DiskStorageState
from knittrans_jax.transfer.storage_state import StorageMissing, StorageRefused, StorageState
from knittrans_jax.transfer.tls import ServerTls, address_with, make_server

SYNC_S = 0.2
"""Pause between two reports to the scheduler."""
HELLO_TIMEOUT_S = 5.0
"""How long a new connection may take to show its ticket."""
HELLO_LIMITS = wire.Limits(header_bytes=tickets.MAX_TICKET_BYTES + 512, payload_bytes=0)
MAX_HEADER_BYTES = 8 * 2**20
ACCEPT_POLL_S = 0.2
DRAIN_S = 0.5
"""How long, and how much, is still taken from a peer that is being dropped."""
DRAIN_BYTES = 1 << 24


@dataclasses.dataclass
class StorageCounters:
    """Traffic since the start. Bytes are payload bytes."""

    connections: int = 0
    connections_refused: int = 0
    """Above the bound, or without a valid ticket."""
    peers_dropped: int = 0
    """Connections ended for what the peer sent, or failed to send in time."""
    put_bytes: int = 0
    put_groups: int = 0
    puts_refused: int = 0
    served_bytes: int = 0
    served_requests: int = 0
    missing: int = 0
    released_groups: int = 0


class StorageServer:
    """The bulk channel of a storage unit. `address` is `host:port`; `set_key` must be called before any ticket is good."""

    def __init__(
        self,
        state: StorageState,
        host: str,
        *,
        port: int = 0,
        max_connections: int = 256,
        request_timeout_s: float = 30.0,
        idle_timeout_s: float = 3600.0,
        max_payload_bytes: int = 2**30,
        wall_clock: Callable[[], float] = time.time,
        tls: ServerTls | None = None,
        rate: RateLimit | None = None,
    ) -> None:
        """Binds and serves.

        Args:
            state: what is held; from now on this server's.
            host: interface to listen on.
            port: 0 picks a free one.
            max_connections: further ones are refused.
            request_timeout_s: deadline of receiving or sending one frame.
            idle_timeout_s: how long a peer may stay silent between requests before its connection is closed.
            max_payload_bytes: most bytes of one frame.
            wall_clock: seconds since the epoch, for the expiry of tickets.
            tls: given, connections are TLS, and the address names the certificate (`transfer/tls.py`).
            rate: given, all connections together are served no faster.
        """
        self.counters = StorageCounters()
        self._state = state
        self._lock = threading.Lock()
        self._key: bytes | None = None
        self._replays = tickets.ReplayGuard()
        self._wall_clock, self._tls, self._rate = wall_clock, tls, rate
        self._max_connections = max_connections
        self._request_timeout_s, self._idle_timeout_s = request_timeout_s, idle_timeout_s
        self._limits = wire.Limits(MAX_HEADER_BYTES, max_payload_bytes)
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        self._listener = socket.create_server((host, port), backlog=128)
        self._listener.settimeout(ACCEPT_POLL_S)
        self.address = f"{reachable_host(host)}:{self._listener.getsockname()[1]}"
        if tls is not None:
            self.address = address_with(self.address, tls.certificate)
        self._accepting = threading.Thread(target=self._accept, name="storage-accept", daemon=True)
        self._accepting.start()

    def set_key(self, key: bytes) -> None:
        """The key with which tickets are checked from now on."""
        with self._lock:
            self._key = key

    def release(self, group_ids: tuple[int, ...]) -> int:
        """Lets groups go -> bytes freed."""
        with self._lock:
            before = self._state.held_groups
            freed = self._state.release(group_ids)
            self.counters.released_groups += before - self._state.held_groups
            return freed

    def figures(self) -> tuple[int, int, dict[str, float]]:
        """(held bytes, held groups, counters)."""
        with self._lock:
            counters = {name: float(value) for name, value in dataclasses.asdict(self.counters).items()}
            counters["held_media"] = float(self._state.held_media)
            counters["reserved_bytes"] = float(self._state.reserved_bytes)
            return self._state.held_bytes, self._state.held_groups, counters

    def held(self) -> tuple[int, ...]:
        """Ids of the groups that are held."""
        with self._lock:
            return tuple(group.group_id for group in self._state.inventory())

    def close(self, timeout_s: float = 2.0) -> None:
        """Ends every connection and stops serving; waits at most `timeout_s` for the threads."""
        self._closing.set()
        self._accepting.join(timeout_s)
        self._listener.close()
        with self._lock:
            connections = list(self._connections.items())
        for sock, _ in connections:
            with contextlib.suppress(OSError):  # the peer may have closed it meanwhile
                sock.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + timeout_s
        for _, thread in connections:
            thread.join(max(0.0, end - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- threads --------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:  # out of file handles, or the peer left already: the next one may do
                self._closing.wait(0.05)
                continue
            with self._lock:
                full = len(self._connections) >= self._max_connections
                if full:
                    self.counters.connections_refused += 1
                else:
                    self.counters.connections += 1
                    thread = threading.Thread(target=self._serve, args=(sock,), name="storage-peer", daemon=True)
                    self._connections[sock] = thread
                    thread.start()
            if full:
                sock.close()

    def _serve(self, sock: socket.socket) -> None:
        try:
            wire.prepare(sock)
            if self._tls is not None:
                sock = encrypted = self._encrypted(sock, self._tls.context)
                encrypted.do_handshake()
            if self._greet(sock):
                while not self._closing.is_set():
                    prefix = wire.receive_prefix(sock, self._limits, wire.Deadline(self._idle_timeout_s))
                    self._answer(sock, prefix)
        except wire.WireClosed as error:
            if not error.between_frames and not self._closing.is_set():
                self._count_dropped()
        except wire.WireError as error:
            self._count_dropped()
            self._send_last_error(sock, error)
        except (ssl.SSLError, TimeoutError, ConnectionResetError):  # no TLS: nothing can be told
            self._count_dropped()
        except msgspec.MsgspecError as error:
            self._count_dropped()
            self._send_last_error(sock, wire.WireProtocolError(f"a header that is no record of its kind: {error}"))
        finally:
            with self._lock:
                self._connections.pop(sock, None)
            sock.close()

    def _encrypted(self, sock: socket.socket, tls: ssl.SSLContext) -> ssl.SSLSocket:
        sock.settimeout(HELLO_TIMEOUT_S)
        encrypted = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._connections[encrypted] = self._connections.pop(sock)
        return encrypted

    def _greet(self, sock: socket.socket) -> bool:
        deadline = wire.Deadline(HELLO_TIMEOUT_S)
        prefix = wire.receive_prefix(sock, HELLO_LIMITS, deadline)
        if prefix.kind != Kind.HELLO:
            raise wire.WireProtocolError(f"kind {prefix.kind} before HELLO")
        hello = msgspec.msgpack.decode(prefix.header, type=Hello)
        now_s = self._wall_clock()
        try:
            with self._lock:
                if self._key is None:
                    raise tickets.TicketError("the unit has not met its scheduler yet")
                claims = tickets.check(self._key, hello.ticket, unit=self._state.unit, peer=hello.peer, now_s=now_s)
                self._replays.use(claims, now_s)
                following = tickets.issue(
                    self._key, self._state.unit, hello.peer, claims.expires_s, tickets.new_nonce()
                )
        except tickets.TicketError as error:
            with self._lock:
                self.counters.connections_refused += 1
            self._send_last_error(sock, wire.WireProtocolError(f"ticket: {error}"), "ticket")
            return False
        self._send(sock, Kind.WELCOME, Welcome(self._state.unit, following))
        return True

    def _answer(self, sock: socket.socket, prefix: wire.Prefix) -> None:
        deadline = wire.Deadline(self._request_timeout_s)
        match prefix.kind:
            case Kind.PUT:
                self._put(sock, prefix, deadline)
            case Kind.GET:
                self._get(sock, prefix)
            case Kind.LIST:
                with self._lock:
                    held = Held(self._state.inventory(), self._state.held_bytes, self._state.budget_bytes)
                self._send(sock, Kind.HELD, held)
            case _:
                raise wire.WireProtocolError(f"kind {prefix.kind} is no request")

    def _put(self, sock: socket.socket, prefix: wire.Prefix, deadline: wire.Deadline) -> None:
        put = msgspec.msgpack.decode(prefix.header, type=Put)
        if put.payload_bytes != prefix.payload_bytes:
            raise wire.WireProtocolError(
                f"a payload of {prefix.payload_bytes} bytes, but its header speaks of {put.payload_bytes}"
            )
        try:
            with self._lock:
                wanted = self._state.reserve(put)
        except StorageRefused as error:
            wire.discard_payload(sock, prefix, deadline)
            self._refuse(sock, error)
            return
        if not wanted:
            wire.discard_payload(sock, prefix, deadline)
            self._send(sock, Kind.DONE)
            return
        try:
            payload = self._state.persist(_receive_group(sock, put, prefix, deadline))
            with self._lock:
                self._state.commit(payload)
                self.counters.put_groups += 1
                self.counters.put_bytes += prefix.payload_bytes
        except StorageRefused as error:
            self._refuse(sock, error)
            return
        finally:
            with self._lock:
                self._state.cancel(put.group_id)
        self._send(sock, Kind.DONE)

    def _get(self, sock: socket.socket, prefix: wire.Prefix) -> None:
        get = msgspec.msgpack.decode(prefix.header, type=Get)
        if prefix.payload_bytes:
            raise wire.WireProtocolError("GET brings no payload")
        try:
            with self._lock:
                rows = self._state.rows(get.rows, get.fields)
                media = self._state.media(get.media)
        except StorageMissing as error:
            with self._lock:
                self.counters.missing += 1
            self._send(sock, Kind.ERROR, Error("missing", str(error)))
            return
        shapes = tuple(MediaShape(digest, *image.shape) for (_, digest), image in zip(get.media, media, strict=True))
        pixels = {id(image): as_bytes(image.astype(get.pixels, copy=False)) for image in media}  # each converted once
        buffers = row_buffers(rows, get.fields) + [pixels[id(image)] for image in media]
        asked = sum(buffer.nbytes for buffer in buffers)
        if asked > self._limits.payload_bytes:
            reason = f"{asked} bytes asked for at once, at most {self._limits.payload_bytes} are sent: ask in parts"
            self._send(sock, Kind.ERROR, Error("refused", reason))
            return
        if get.start_bytes > asked:
            raise wire.WireProtocolError(f"GET from byte {get.start_bytes} of {asked}")
        skipped_checksum = 0
        if get.start_bytes:
            skipped_checksum, buffers = wire.skip(buffers, get.start_bytes)
        data = Data(tuple(len(row.tokens_T) for row in rows), shapes, skipped_checksum)
        sent = self._send(sock, Kind.DATA, data, buffers)
        with self._lock:
            self.counters.served_bytes += sent
            self.counters.served_requests += 1

    def _send(
        self,
        sock: socket.socket,
        kind: Kind,
        header: msgspec.Struct | None = None,
        buffers: list[wire.Buffer] | None = None,
    ) -> int:
        encoded = b"" if header is None else msgspec.msgpack.encode(header)
        deadline = wire.Deadline(self._request_timeout_s)
        return wire.send_frame(sock, kind, encoded, buffers or (), deadline=deadline, rate=self._rate)

    def _refuse(self, sock: socket.socket, error: StorageRefused) -> None:
        with self._lock:
            self.counters.puts_refused += 1
        self._send(sock, Kind.ERROR, Error("refused", str(error)))

    def _send_last_error(self, sock: socket.socket, error: wire.WireError, code: str = "protocol") -> None:
        header = msgspec.msgpack.encode(Error(code, str(error)))
        with contextlib.suppress(wire.WireError, OSError):  # it is dropped anyway; this is only to tell it why
            wire.send_frame(sock, Kind.ERROR, header, deadline=wire.Deadline(1.0))
            sock.shutdown(socket.SHUT_WR)
            _drain(sock)

    def _count_dropped(self) -> None:
        with self._lock:
            self.counters.peers_dropped += 1


def _drain(sock: socket.socket) -> None:
    """Takes what a dropped peer still sends, for a moment: closed with bytes unread, TCP would reset the connection, and the
    peer might never see its error.
    """
    deadline = wire.Deadline(DRAIN_S)
    scratch, left = bytearray(1 << 16), DRAIN_BYTES
    while left > 0:
        deadline.apply(sock, "drain")
        got = sock.recv_into(scratch)
        if not got:
            return
        left -= got


def _receive_group(sock: socket.socket, put: Put, prefix: wire.Prefix, deadline: wire.Deadline) -> GroupPayload:
    """Receives rows into one buffer and every image into its own, so that images can be let go one by one."""
    rows = memoryview(bytearray(put.row_bytes))
    images = [np.empty(shape.shape, np.uint8) for shape in put.media]
    wire.receive_payload(sock, prefix, [rows, *(image.data.cast("B") for image in images)], deadline)
    return GroupPayload(
        group_id=put.group_id,
        trajectories=tuple(Trajectory(**fields) for fields in row_views(rows, put.lengths, tuple(FIELDS))),
        media={shape.digest: image for shape, image in zip(put.media, images, strict=True)},
    )


def open_state(config: Config, run_dir: Path, unit: str) -> StorageState:
    """What the unit holds: nothing, or with `rollout.storage_on_disk` what it held before it was started anew."""
    if not config.rollout.storage_on_disk:
        return StorageState(unit, config.rollout.storage_bytes)
    state = DiskStorageState(unit, config.rollout.storage_bytes, run_dir / "storage" / unit)
    if state.recovered_groups or state.damaged_files:
        sys.stderr.write(
            f"{unit}: {state.recovered_groups} groups were on disk, {state.damaged_files} damaged files were deleted\n"
        )
    return state


def run_storage(config: Config, run_dir: Path, index: int, stop: threading.Event | None = None) -> None:
    """The process of storage unit `host{index}`: serves until the scheduler says stop, or SIGTERM or SIGINT comes.

    Args:
        config: the run's configuration.
        run_dir: holds `control.json`.
        index: the rollout host's number.
        stop: set it to end; without one, signals of this process do.

    Raises:
        ControlError: the scheduler is gone or refuses this unit. With `launch.on_child_death: recover` one that is gone is
            waited for, as long as `control.start_timeout_s`.
    """
    unit = f"host{index}"
    if stop is None:
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    control = config.control
    state = open_state(config, run_dir, unit)
    with (
        ControlClient(
            run_dir / "control.json",
            f"storage-{unit}",
            control.rpc_timeout_s,
            start_timeout_s=control.start_timeout_s,
            stopped=stop.is_set,
        ) as client,
        StorageServer(
            state,
            control.bulk_host,
            request_timeout_s=control.pull_timeout_s,
            tls=make_server() if control.tls else None,
        ) as server,
    ):
        recovered: tuple[int, ...] | None = server.held()
        heard_s = time.monotonic()
        while not stop.is_set():
            held_bytes, held_groups, counters = server.figures()
            sync = StorageSync(
                unit=unit,
                address=server.address,
                held_bytes=held_bytes,
                held_groups=held_groups,
                counters=counters,
                recovered=recovered,
            )
            try:
                orders = client.call(sync)
            except ControlError:
                if stop.is_set():
                    return
                # What it holds outlives the scheduler, which comes back from its log and asks for the inventory.
                recovers = config.launch.on_child_death == "recover"
                if not recovers or time.monotonic() - heard_s > control.start_timeout_s:
                    raise
                stop.wait(SYNC_S)
                continue
            heard_s = time.monotonic()
            if not isinstance(orders, StorageOrders):
                raise ControlError(f"unit {unit}: expected StorageOrders, got {type(orders).__name__}")
            server.set_key(orders.ticket_key)
            server.release(orders.release)
            recovered = server.held() if orders.inventory else None
            if orders.stop:
                with contextlib.suppress(ControlError):  # the scheduler may be gone by now; its log has the last sync
                    reply = client.call(Report(role=f"storage-{unit}", counters=server.figures()[2]), timeout_s=2.0)
                    if not isinstance(reply, Ack):
                        raise ControlError(f"unit {unit}: expected Ack, got {type(reply).__name__}")
                return
            stop.wait(SYNC_S)
