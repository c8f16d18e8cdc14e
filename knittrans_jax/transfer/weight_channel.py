"""Weights over the bulk channel: training processes serve their own shards, rollout hosts pass on what they have.

What it guarantees:

* a training process is held up by the device-to-host copy only; shards are served from there, nothing is written anywhere;
* a reader brings a version piece by piece, and serves every piece to the next reader as soon as it is here, so that a chain of
  readers takes about as long as one; when its source fails it goes on with another one where it stopped;
* what a reader holds is whole, checked from end to end, or not to be seen (`transfer/weight_store.py`);
* a reader that dies leaves a closed connection behind, and nothing else; tickets, limits and deadlines are a storage unit's.

Who brings a version from whom is the scheduler's decision (`admission/fan_out.py`).
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from knittrans_jax.transfer import wire
from knittrans_jax.transfer.bulk import Error, Kind, Piece, Sharded, Shards, VersionKey
from knittrans_jax.transfer.client import StorageClient, decode, expect
from knittrans_jax.transfer.rate import RateLimit
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_state import StorageMissing, StorageState
from knittrans_jax.transfer.tls import ServerTls
from knittrans_jax.transfer.weight_store import DTYPES, WeightStore, check_layout, lay_out
from knittrans_jax.transfer.weights import FLOATS, HostShard, WeightSink

PIECE_BYTES = 8 * 2**20
"""Asked for at once: what the next reader in a chain is behind."""


class WeightServer(StorageServer):
    """Serves a store's versions. `set_key` before any ticket is good. As a storage unit it holds nothing and takes nothing."""

    def __init__(
        self,
        unit: str,
        host: str,
        store: WeightStore,
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
            store: what is served; closed with the server.
            wait_s: how long a request waits for what is still arriving.
            request_timeout_s: deadline of sending one piece.
            tls: given, connections are TLS.
            rate: given, all connections together are served no faster.
        """
        self._store, self._wait_s = store, wait_s
        super().__init__(StorageState(unit, 0), host, request_timeout_s=request_timeout_s, tls=tls, rate=rate)

    @property
    def open_connections(self) -> int:
        """Connections of readers."""
        with self._lock:
            return len(self._connections)

    def close(self, timeout_s: float = 2.0) -> None:
        """As a storage unit's; requests that wait are broken off."""
        self._closing.set()
        self._store.close()
        super().close(timeout_s)

    def _answer(self, sock: socket.socket, prefix: wire.Prefix) -> None:
        if prefix.kind not in (Kind.SHARDS, Kind.PIECE):
            super()._answer(sock, prefix)
            return
        if prefix.payload_bytes:
            raise wire.WireProtocolError(f"{Kind(prefix.kind).name} brings no payload")
        try:
            if prefix.kind == Kind.SHARDS:
                processes, specs = self._store.describe(decode(prefix, Shards).key, self._wait_s)
                self._send(sock, Kind.SHARDED, Sharded(processes, specs))
                return
            piece = decode(prefix, Piece)
            if piece.end - piece.begin > self._limits.payload_bytes:
                raise wire.WireProtocolError(f"{piece.end - piece.begin} bytes asked for at once")
            buffers = self._store.range(piece.key, piece.process, piece.begin, piece.end, self._wait_s)
        except StorageMissing as error:
            with self._lock:
                self.counters.missing += 1
            self._send(sock, Kind.ERROR, Error("missing", str(error)))
            return
        sent = self._send(sock, Kind.BYTES, None, buffers)
        with self._lock:
            self.counters.served_bytes += sent
            self.counters.served_requests += 1


class WeightClient(StorageClient):
    """A reader's connection to one server of weights. One thread at a time; every call ends as `StorageClient`'s do."""

    def describe(self, key: VersionKey) -> Sharded:
        """What the server has of a version. Raises `StorageMissing`, `WireError`."""

        def attempt(sock: socket.socket, deadline: wire.Deadline) -> Sharded:
            wire.send_frame(sock, Kind.SHARDS, msgspec.msgpack.encode(Shards(key)), deadline=deadline)
            prefix = self._receive(sock, deadline)
            expect(prefix, Kind.SHARDED)
            return decode(prefix, Sharded)

        return self._attempts(f"shards of version {key.version}", attempt)

    def pull_piece(self, piece: Piece, into: wire.Buffer) -> None:
        """Receives a range into `into`, of the range's size. Raises `StorageMissing`, `WireError`."""

        def attempt(sock: socket.socket, deadline: wire.Deadline) -> None:
            wire.send_frame(sock, Kind.PIECE, msgspec.msgpack.encode(piece), deadline=deadline)
            prefix = self._receive(sock, deadline)
            expect(prefix, Kind.BYTES)
            wire.receive_payload(sock, prefix, [into], deadline)

        self._attempts(f"version {piece.key.version}, process {piece.process} from byte {piece.begin}", attempt)
        self.counters.pulled_bytes += into.nbytes


def bring(
    store: WeightStore,
    key: VersionKey,
    clients: Sequence[WeightClient],
    most_bytes: int,
    *,
    stopped: Callable[[], bool] = lambda: False,
    piece_bytes: int = PIECE_BYTES,
) -> int:
    """Brings a version into the store, whole -> bytes that came.

    What an earlier, failed call brought is not brought again. On an error the version stays as it is: begun, and not to be
    seen; `store.abandon` forgets it.

    Args:
        store: the reader's, which may serve what arrives.
        key: the version.
        clients: of one rollout host, or of every training process.
        most_bytes: a version of this model has no more.
        stopped: looked at before every piece.
        piece_bytes: brought by one request.

    Raises:
        StorageMissing: a source does not have it, or does not get it in time.
        WireError: a source fails, or `stopped`.
        WeightsError: sources disagree, or what came is not what was published.
    """
    described = [(client, client.describe(key)) for client in clients]
    specs = {spec.process: spec for _, sharded in described for spec in sharded.bytes_of}
    source = {spec.process: client for client, sharded in described for spec in sharded.bytes_of}
    processes = described[0][1].processes
    check_layout(list(specs.values()), processes, most_bytes)
    buffers = store.begin(key, processes, list(specs.values()))
    at = {process: store.filled(key, process) for process in specs}
    came = 0
    while at:
        for process in list(at):  # a piece of each in turn: every training process's link carries its share
            begin, end = at[process], min(at[process] + piece_bytes, specs[process].size_bytes)
            if begin == end:
                del at[process]
                continue
            if stopped():
                raise wire.WireError(f"version {key.version}: stopped")
            view = buffers[process].data[begin:end]
            source[process].pull_piece(Piece(key, process, begin, end), view)
            at[process] = end
            came += end - begin
            store.advance(key, process, end)
    store.finish(key)
    return came


class WeightPublisher(WeightSink):
    """Publishes a training process's shards through its store, which a `WeightServer` serves."""

    def __init__(
        self,
        store: WeightStore,
        incarnation: int,
        process: int,
        processes: int,
        on_written: Callable[[int], None],
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        timeout_s: float = 120.0,
    ) -> None:
        """Starts the background thread.

        Args:
            store: this process's.
            incarnation: of the training group.
            process: this process's number.
            processes: how many training processes publish.
            on_written: called in the background thread with a version that can be had from here.
            dtype: of floats as they are published; narrower ones are converted in the background thread.
            timeout_s: deadline of `write` for the version before, and of `close`.
        """
        self._store, self._incarnation, self._process, self._processes = store, incarnation, process, processes
        self._dtype = DTYPES[dtype]
        super().__init__(f"weights of train{process}", on_written, timeout_s)

    def _publish(self, version: int, shards: list[HostShard]) -> None:
        spec, buffers = lay_out(self._process, [self._narrowed(shard) for shard in shards])
        self._store.add(VersionKey(self._incarnation, version), self._processes, spec, buffers)

    def _narrowed(self, shard: HostShard) -> HostShard:
        data = shard.data
        if data.dtype.name not in FLOATS or data.dtype.itemsize <= self._dtype.itemsize:
            return shard
        return dataclasses.replace(shard, data=data.astype(self._dtype))
