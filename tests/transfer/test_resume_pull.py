"""Pulls that are cut go on where they stopped; and the bulk channel over TLS."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from knittrans_jax.trajectory import GroupPayload
from knittrans_jax.transfer import tickets, tls, wire
from knittrans_jax.transfer.bulk import put_frame
from knittrans_jax.transfer.client import PullRequest, StorageClient
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_state import StorageState

from .payloads import random_group, random_image

KEY = tickets.new_key()


class CuttingProxy:
    """Passes connections on and breaks each after it gave the client so many bytes; `spoil` changes one byte of the first."""

    def __init__(self, target: str, give_bytes: int, spoil: bool = False) -> None:
        self._target = (target.rsplit(":", 1)[0], int(target.rsplit(":", 1)[1]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._give_bytes, self._spoil = give_bytes, spoil
        self.given: list[int] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with near, socket.create_connection(self._target) as far:
                    asking = threading.Thread(target=self._ask, args=(near, far))
                    asking.start()
                    self.given.append(0)
                    with contextlib.suppress(OSError):
                        while data := bytearray(far.recv(1 << 16)):
                            if self._spoil and self.given[-1] > self._give_bytes // 2:
                                data[-1] ^= 1
                                self._spoil = False
                            near.sendall(data)
                            self.given[-1] += len(data)
                            if self.given[-1] >= self._give_bytes:
                                break
                    for end in (near, far):
                        with contextlib.suppress(OSError):
                            end.shutdown(socket.SHUT_RDWR)
                    asking.join()

    def _ask(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 16):
                far.sendall(data)
        with contextlib.suppress(OSError):  # the client has gone
            far.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@pytest.fixture(scope="module")
def payload() -> GroupPayload:
    rng = np.random.default_rng(2)
    return random_group(rng, 1, (5000, 70), images=tuple(random_image(rng, 1000, 1000) for _ in range(3)))


def serve(payload: GroupPayload, encryption: tls.ServerTls | None = None) -> StorageServer:
    state = StorageState("host0", 10**8)
    state.put(payload, put_frame(payload)[0])
    server = StorageServer(state, "127.0.0.1", tls=encryption)
    server.set_key(KEY)
    return server


@pytest.fixture
def server(payload: GroupPayload) -> Iterator[StorageServer]:
    with serve(payload) as one:
        yield one


def ticket() -> bytes:
    return tickets.issue(KEY, "host0", "train0", time.time() + 60, tickets.new_nonce())


def everything(payload: GroupPayload) -> PullRequest:
    return PullRequest(rows=((1, 0), (1, 1)), media=tuple((1, digest) for digest in payload.media))


def test_a_cut_pull_goes_on_where_it_was_cut(server: StorageServer, payload: GroupPayload):
    proxy = CuttingProxy(server.address, 1_300_000)
    with StorageClient(proxy.address, ticket(), "train0", 10.0, 5) as client:
        pulled = client.pull(everything(payload))
    proxy.close()
    assert all(np.array_equal(pulled.media[digest], image) for digest, image in payload.media.items())
    assert np.array_equal(pulled.rows[0]["tokens_T"], payload.trajectories[0].tokens_T)
    assert pulled.payload_bytes == payload.size_bytes
    assert client.counters.connections == 3
    assert client.counters.resumed_bytes > 1_300_000
    assert sum(proxy.given) < 1.1 * payload.size_bytes, "what had come is not sent again"


def test_bytes_changed_before_the_cut_all_come_again(server: StorageServer, payload: GroupPayload):
    proxy = CuttingProxy(server.address, 2_000_000, spoil=True)
    with StorageClient(proxy.address, ticket(), "train0", 10.0, 9) as client:
        pulled = client.pull(everything(payload))
    proxy.close()
    assert all(np.array_equal(pulled.media[digest], image) for digest, image in payload.media.items())
    assert sum(proxy.given) > 1.3 * payload.size_bytes


def test_a_request_from_beyond_the_end_is_dropped(server: StorageServer):
    import msgspec

    from knittrans_jax.transfer.bulk import Error, Get, Hello, Kind

    with wire.connect(server.address, 3.0) as sock:
        deadline, limits = wire.Deadline(5), wire.Limits(10_000, 0)
        wire.send_frame(sock, Kind.HELLO, msgspec.msgpack.encode(Hello(ticket(), "train0")), deadline=deadline)
        wire.receive_prefix(sock, limits, deadline)
        get = Get(((1, 1),), ("tokens_T",), (), "uint8", 281)
        wire.send_frame(sock, Kind.GET, msgspec.msgpack.encode(get), deadline=deadline)
        answer = wire.receive_prefix(sock, limits, deadline)
    assert answer.kind == Kind.ERROR
    assert "GET from byte 281 of 280" in msgspec.msgpack.decode(answer.header, type=Error).reason


def test_over_tls_the_same_comes_and_only_the_right_server_is_believed(payload: GroupPayload):
    with serve(payload, tls.make_server()) as server:
        where, _ = tls.split_address(server.address)
        with StorageClient(server.address, ticket(), "train0", 10.0, 0) as client:
            client.put_group(random_group(np.random.default_rng(5), 9, (2000,)))
            pulled = client.pull(everything(payload))
        assert all(np.array_equal(pulled.media[digest], image) for digest, image in payload.media.items())
        other = tls.address_with(where, tls.make_server().certificate)
        with (
            StorageClient(other, ticket(), "train0", 5.0, 0) as stranger,
            pytest.raises(wire.WireError, match="TLS"),
        ):
            stranger.pull(PullRequest())
        with (
            StorageClient(where, ticket(), "train0", 5.0, 0) as plain,
            pytest.raises(wire.WireError),
        ):
            plain.pull(PullRequest())
    with pytest.raises(tls.TlsError, match="no certificate"):
        StorageClient(where + "#rubbish", ticket(), "train0", 5.0, 0)
