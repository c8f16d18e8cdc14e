"""Whatever a peer sends, it gets an error and is dropped, the unit lives, nothing stays reserved, and others are served.

Hypothesis makes up hostile conversations; `corpus/` keeps one file per kind of harm, sent as it is after a good greeting (names
that begin with `cold-`: without one). Fixed bytes, so that what was once tried is tried for ever.
"""

import itertools
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from knittrans_jax.transfer import tickets, wire
from knittrans_jax.transfer.bulk import FIELDS, Error, Get, Hello, Kind, MediaShape, Put, put_frame
from knittrans_jax.transfer.client import PullRequest, StorageClient
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_state import StorageState

from .payloads import random_group, random_image

CORPUS = Path(__file__).parent / "corpus"
KEY = secrets.token_bytes(32)
HELD = random_group(np.random.default_rng(1), 1, (9, 4), images=(random_image(np.random.default_rng(2)),))
TIMEOUT_S = 1.0
_names = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[StorageServer]:
    state = StorageState("host0", 100_000)
    state.put(HELD, put_frame(HELD)[0])
    with StorageServer(state, "127.0.0.1", request_timeout_s=TIMEOUT_S, idle_timeout_s=TIMEOUT_S) as one:
        one.set_key(KEY)
        yield one


def ticket(peer: str) -> bytes:
    return tickets.issue(KEY, "host0", peer, time.time() + 600, tickets.new_nonce())


def greeted(server: StorageServer) -> socket.socket:
    sock = wire.connect(server.address, 5.0)
    hello = msgspec.msgpack.encode(Hello(ticket("hostile"), "hostile"))
    wire.send_frame(sock, Kind.HELLO, hello, deadline=wire.Deadline(5))
    assert wire.receive_prefix(sock, wire.Limits(4096, 0), wire.Deadline(5)).kind == Kind.WELCOME
    return sock


def converse(server: StorageServer, data: bytes, greet: bool) -> list[str]:
    """Sends, hangs up the sending side, and reads until the unit closes -> codes of the errors that came."""
    codes = []
    with greeted(server) if greet else wire.connect(server.address, 5.0) as sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while True:
                prefix = wire.receive_prefix(sock, wire.Limits(2**20, 2**20), wire.Deadline(10))
                wire.discard_payload(sock, prefix, wire.Deadline(10))
                if prefix.kind == Kind.ERROR:
                    codes.append(msgspec.msgpack.decode(prefix.header, type=Error).code)
        except wire.WireTimeout:
            raise AssertionError("the unit neither answered nor closed") from None
        except (wire.WireError, OSError):
            return codes


def assert_unharmed(server: StorageServer) -> None:
    peer = f"good{next(_names)}"
    with StorageClient(server.address, ticket(peer), peer, 5.0, 0) as client:
        pulled = client.pull(PullRequest(rows=((1, 0),), media=((1, next(iter(HELD.media))),)))
        held = client.inventory()
    assert np.array_equal(pulled.rows[0]["tokens_T"], HELD.trajectories[0].tokens_T)
    assert [group.group_id for group in held.groups] == [1]
    assert server.figures()[2]["reserved_bytes"] == 0


def frame(kind: int, header: bytes, payload: bytes = b"") -> bytes:
    left, right = socket.socketpair()
    with left, right:
        wire.send_frame(left, kind, header, [memoryview(payload)], deadline=wire.Deadline(1))
        left.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: right.recv(1 << 16), b""))


# Payloads of groups are small and never a whole, valid PUT: what is held must stay as it is.
SHAPES = st.builds(MediaShape, st.text("0123456789abcdef", min_size=1, max_size=32), *(st.integers(1, 9),) * 3)
HEADERS = st.one_of(
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=12,
    ).map(msgspec.msgpack.encode),
    st.builds(
        Get,
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4).map(tuple),
        st.lists(st.sampled_from([*FIELDS, "rewards"]), max_size=4).map(tuple),
        st.lists(st.tuples(st.integers(0, 3), st.sampled_from([*HELD.media, "0"])), max_size=3).map(tuple),
        st.sampled_from(["uint8", "float32"]),
        st.one_of(st.just(0), st.integers(0, 400), st.integers(2**62, 2**63 - 1)),
    ).map(msgspec.msgpack.encode),
    st.builds(
        Put,
        st.integers(2, 5),
        st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=4).map(tuple),
        st.lists(SHAPES, min_size=1, max_size=3).map(tuple),
    ).map(msgspec.msgpack.encode),
)
FRAMES = st.builds(
    frame, st.one_of(st.sampled_from(list(Kind)), st.integers(0, 65535)), HEADERS, st.binary(max_size=80)
)


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """Frames that may be cut, changed in one place, or followed by rubbish."""
    data = bytearray(b"".join(draw(st.lists(FRAMES, min_size=1, max_size=3))))
    match draw(st.sampled_from(["whole", "cut", "changed", "rubbish"])):
        case "cut":
            del data[draw(st.integers(0, len(data))) :]
        case "changed":
            data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
        case "rubbish":
            data += draw(st.binary(max_size=200))
        case _:
            pass
    return bytes(data)


@given(hostile(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_hostile_conversations_end_and_harm_nobody(server: StorageServer, data: bytes, greet: bool):
    converse(server, data, greet)
    assert_unharmed(server)


@pytest.mark.parametrize("path", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_the_corpus_gets_its_error_and_harms_nobody(server: StorageServer, path: Path):
    before = server.figures()[2]
    codes = converse(server, path.read_bytes(), greet=not path.name.startswith("cold-"))
    expected = path.stem.rsplit("--", 1)[-1]
    assert codes == ([] if expected == "closed" else [expected])
    assert_unharmed(server)
    counted = ("peers_dropped", "connections_refused", "missing", "puts_refused")
    after = server.figures()[2]
    assert sum(after[name] - before[name] for name in counted) == 1, "every refusal is counted, once"


def test_a_flood_of_connections_is_bounded_and_others_are_served_after_it():
    state = StorageState("host0", 100_000)
    state.put(HELD, put_frame(HELD)[0])
    with StorageServer(state, "127.0.0.1", max_connections=8) as server:
        server.set_key(KEY)
        flood = [wire.connect(server.address, 5.0) for _ in range(40)]
        for sock in flood[8:]:
            sock.settimeout(5)
            assert sock.recv(1) == b"", "above the bound: closed at once"
        assert server.figures()[2]["connections_refused"] == 32
        for sock in flood:
            sock.close()
        deadline = time.monotonic() + 5
        while server._connections and time.monotonic() < deadline:
            time.sleep(0.02)
        assert_unharmed(server)
