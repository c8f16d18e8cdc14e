import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.transfer import wire

LIMITS = wire.Limits(header_bytes=1000, payload_bytes=100_000)
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@given(st.binary(max_size=1000), st.lists(st.binary(max_size=300), max_size=50), st.integers(0, 65535))
@settings(max_examples=50, deadline=None)
def test_a_frame_comes_as_it_was_sent(header: bytes, buffers: list[bytes], kind: int):
    left, right = socket.socketpair()
    with left, right:
        sent = wire.send_frame(left, kind, header, [memoryview(b) for b in buffers], deadline=wire.Deadline(5))
        prefix = wire.receive_prefix(right, LIMITS, wire.Deadline(5))
        assert (prefix.kind, prefix.header, prefix.payload_bytes) == (kind, header, sent)
        into = [bytearray(len(b)) for b in buffers]
        wire.receive_payload(right, prefix, [memoryview(b) for b in into], wire.Deadline(5))
        assert into == buffers


def test_many_buffers_and_a_slow_reader(pair: Pair):
    left, right = pair
    buffers = [bytes([i % 256]) * (i % 3000) for i in range(2000)]
    sending = threading.Thread(
        target=lambda: wire.send_frame(left, 1, b"h", [memoryview(b) for b in buffers], deadline=wire.Deadline(20))
    )
    sending.start()
    limits = wire.Limits(10, 10_000_000)
    prefix = wire.receive_prefix(right, limits, wire.Deadline(20))
    whole = bytearray(prefix.payload_bytes)
    wire.receive_payload(right, prefix, [memoryview(whole)], wire.Deadline(20))
    sending.join()
    assert whole == b"".join(buffers)


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_other_bytes_are_a_wire_error(data: bytes, with_magic: bool):
    left, right = socket.socketpair()
    with left, right:
        left.sendall((wire.MAGIC + b"\x00\x01" if with_magic else b"") + data)
        left.shutdown(socket.SHUT_WR)
        with pytest.raises(wire.WireError):
            wire.receive_prefix(right, LIMITS, wire.Deadline(5))


def test_a_peer_that_neither_reads_nor_writes_is_a_timeout(pair: Pair):
    left, _ = pair
    with pytest.raises(wire.WireTimeout, match=r"0 of 28 bytes came within 0\.05 s"):
        wire.receive_prefix(left, LIMITS, wire.Deadline(0.05))
    with pytest.raises(wire.WireTimeout, match="did not take its bytes"):
        wire.send_frame(left, 1, b"", [memoryview(bytes(50_000_000))], deadline=wire.Deadline(0.2))


def test_a_close_between_frames_is_told_from_one_within(pair: Pair):
    left, right = pair
    left.sendall(wire.MAGIC)
    left.close()
    with pytest.raises(wire.WireClosed) as within:
        wire.receive_prefix(right, LIMITS, wire.Deadline(1))
    assert not within.value.between_frames
    with pytest.raises(wire.WireClosed) as between:
        wire.receive_prefix(right, LIMITS, wire.Deadline(1))
    assert between.value.between_frames


def test_a_discarded_payload_leaves_the_stream_in_step(pair: Pair):
    left, right = pair
    for header in (b"one", b"two"):
        wire.send_frame(left, 1, header, [memoryview(b"x" * 5000)], deadline=wire.Deadline(1))
    for header in (b"one", b"two"):
        prefix = wire.receive_prefix(right, LIMITS, wire.Deadline(1))
        assert prefix.header == header
        wire.discard_payload(right, prefix, wire.Deadline(1))


def test_an_address_that_is_none_is_named():
    with pytest.raises(wire.WireProtocolError, match="expected host:port"):
        wire.connect("nowhere", 1.0)
