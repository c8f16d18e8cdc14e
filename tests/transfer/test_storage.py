"""A storage unit as a process of its own, its peers, and those who would do it harm."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from knittrans_jax.launch.messages import Ack, Report, StorageOrders, StorageSync
from knittrans_jax.transfer import tickets, wire
from knittrans_jax.transfer.bulk import Error, Get, Hello, Kind, Put, put_frame
from knittrans_jax.transfer.client import PullRequest, StorageClient
from knittrans_jax.transfer.control import ControlServer
from knittrans_jax.transfer.storage import MAX_HEADER_BYTES
from knittrans_jax.transfer.storage_state import StorageMissing, StorageRefused

from .payloads import random_group, random_image

BUDGET = 100_000
UNIT_PROCESS = """
import sys
from pathlib import Path
from knittrans_jax.config import parse_config
from knittrans_jax.transfer.storage import run_storage
config = parse_config({"name": "x", "task": {"name": "t"}, "rollout": {"storage_bytes": %d},
                       "batch": {"groups": 1, "mini_batches": 1, "trajectories_per_group": 2},
                       "control": {"pull_timeout_s": 3.0, "rpc_timeout_s": 5.0, "start_timeout_s": 5.0}})
run_storage(config, Path(sys.argv[1]), 0)
assert "jax" not in sys.modules, "the storage unit imported jax"
"""


class Unit:
    """A real storage process, and the scheduler that it reports to."""

    def __init__(self, run_dir: Path) -> None:
        self.key = tickets.new_key()
        self.release: tuple[int, ...] = ()
        self.stop = False
        self.sync: StorageSync | None = None
        self.report: Report | None = None
        self._over = threading.Event()
        self._control = ControlServer("127.0.0.1", 0, run_dir / "control.json")
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.process = subprocess.Popen([sys.executable, "-c", UNIT_PROCESS % BUDGET, str(run_dir)])

    def _serve(self) -> None:
        while not self._over.is_set():
            for incoming in self._control.receive(0.05):
                if isinstance(incoming.request, StorageSync):
                    self.sync = incoming.request
                    orders = StorageOrders(ticket_key=self.key, release=self.release, stop=self.stop)
                    self._control.reply(incoming.peer, incoming.request_id, orders)
                elif isinstance(incoming.request, Report):
                    self.report = incoming.request
                    self._control.reply(incoming.peer, incoming.request_id, Ack())

    @property
    def address(self) -> str:
        wait_until(lambda: self.sync is not None)
        assert self.sync is not None
        return self.sync.address

    def settle(self) -> None:
        """Waits for a report that was made after this call."""
        for _ in range(2):
            last = self.sync
            wait_until(lambda last=last: self.sync is not last)

    def counter(self, name: str) -> float:
        return self.sync.counters[name] if self.sync else 0.0

    def ticket(self, peer: str = "train0", expires_in_s: float = 60.0) -> bytes:
        return tickets.issue(self.key, "host0", peer, time.time() + expires_in_s, tickets.new_nonce())

    def client(self, peer: str = "train0", retries: int = 2, timeout_s: float = 3.0) -> StorageClient:
        return StorageClient(self.address, self.ticket(peer), peer, timeout_s, retries)

    def connect(self, ticket: bytes | None = None, peer: str = "train0") -> socket.socket:
        """A raw connection, past its greeting when a ticket is given."""
        sock = wire.connect(self.address, 3.0)
        if ticket is not None:
            send(sock, Kind.HELLO, Hello(ticket, peer))
            assert receive(sock).kind == Kind.WELCOME
        return sock

    def end(self) -> None:
        self.stop = True
        try:
            assert self.process.wait(10) == 0
        finally:
            self.process.kill()
            self.process.wait()
            self._over.set()
            self._thread.join()
            self._control.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def send(sock: socket.socket, kind: int, header: msgspec.Struct, buffers: tuple = ()) -> None:
    wire.send_frame(sock, kind, msgspec.msgpack.encode(header), buffers, deadline=wire.Deadline(3))


def receive(sock: socket.socket) -> wire.Prefix:
    return wire.receive_prefix(sock, wire.Limits(MAX_HEADER_BYTES, 2**20), wire.Deadline(5))


def error_of(sock: socket.socket) -> Error:
    prefix = receive(sock)
    assert prefix.kind == Kind.ERROR
    return msgspec.msgpack.decode(prefix.header, type=Error)


def assert_dropped(sock: socket.socket) -> None:
    sock.settimeout(5)
    try:
        assert sock.recv(1) == b""
    except ConnectionResetError:
        pass
    finally:
        sock.close()


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unit]:
    one = Unit(tmp_path_factory.mktemp("run"))
    yield one
    one.end()
    assert one.report is not None
    assert one.report.counters["put_groups"] > 0


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def serves(unit: Unit, group_id: int) -> None:
    """Other peers are served: a put, a pull and a release."""
    payload = random_group(np.random.default_rng(group_id), group_id)
    with unit.client("engine") as engine, unit.client("train9") as consumer:
        engine.put_group(payload)
        pulled = consumer.pull(PullRequest(rows=((group_id, 0),)))
        assert np.array_equal(pulled.rows[0]["tokens_T"], payload.trajectories[0].tokens_T)


def test_what_was_put_is_pulled_unchanged_and_counted(unit: Unit, rng: np.random.Generator):
    image = random_image(rng)
    first, second = random_group(rng, 1, images=(image,)), random_group(rng, 2, (7,), images=(image,))
    with unit.client("engine") as engine, unit.client("train0") as consumer:
        engine.put_group(first)
        engine.put_group(second)
        engine.put_group(first)  # again, as after a lost answer: no harm
        held = engine.inventory()
        assert [(g.group_id, g.trajectories, g.payload_bytes) for g in held.groups] == [
            (1, 3, first.size_bytes),
            (2, 1, second.size_bytes),
        ]
        assert held.held_bytes == first.size_bytes + second.size_bytes - image.nbytes
        digest = next(iter(first.media))
        pulled = consumer.pull(PullRequest(rows=((2, 0), (1, 2), (1, 0)), media=((2, digest),)))
        for row, original in zip(
            pulled.rows, (second.trajectories[0], first.trajectories[2], first.trajectories[0]), strict=True
        ):
            for name, array in row.items():
                assert array.dtype == getattr(original, name).dtype
                assert np.array_equal(array, getattr(original, name))
        assert np.array_equal(pulled.media[digest], image)
        expected = 13 * (7 + 3 + 5) + image.nbytes
        assert pulled.payload_bytes == consumer.counters.pulled_bytes == expected
        some = consumer.pull(PullRequest(rows=((1, 1),), fields=("sampled_T", "tokens_T")))
        assert set(some.rows[0]) == {"sampled_T", "tokens_T"}
        assert some.payload_bytes == 5 * 8
        wait_until(lambda: unit.counter("served_bytes") >= expected)
        assert consumer.counters.connections == 1
        assert engine.counters.put_bytes == 2 * first.size_bytes + second.size_bytes
    unit.release = (1, 2)
    wait_until(lambda: unit.sync is not None and unit.sync.held_groups == 0)
    assert unit.sync is not None
    assert unit.sync.held_bytes == unit.counter("held_media") == 0
    unit.release = ()


def test_a_group_above_the_budget_is_refused_and_the_connection_stays_good(unit: Unit, rng: np.random.Generator):
    with unit.client("engine") as engine:
        with pytest.raises(StorageRefused, match=r"rollout\.storage_bytes"):
            engine.put_group(random_group(rng, 10, (BUDGET,)))
        with pytest.raises(StorageMissing, match="does not hold group 10"):
            engine.pull(PullRequest(rows=((10, 0),)))
        assert engine.counters.connections == 1
        assert engine.counters.retries == 0
    serves(unit, 11)


def test_a_broken_connection_is_opened_again_with_the_next_ticket(unit: Unit, rng: np.random.Generator):
    with unit.client("engine") as engine:
        engine.put_group(random_group(rng, 20))
        for _ in range(3):
            assert engine._socket is not None
            engine._socket.shutdown(socket.SHUT_RDWR)
            assert len(engine.pull(PullRequest(rows=((20, 1),))).rows) == 1
        assert engine.counters.connections == 4
        assert engine.counters.retries == 3


def test_a_client_gives_up_after_its_retries_and_says_where():
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with (
            StorageClient(address, b"ticket", "train0", 0.2, 1) as client,
            pytest.raises(wire.WireError, match=rf"pull 0 rows.*{address}, attempt 2 of 2"),
        ):
            client.pull(PullRequest())


def test_tickets_that_open_nothing(unit: Unit):
    good = unit.ticket()
    unit.connect(good).close()
    for ticket, peer, why in [
        (good, "train0", "used before"),
        (unit.ticket("train1"), "train0", "for peer 'train1'"),
        (unit.ticket(expires_in_s=-1), "train0", "expired"),
        (tickets.issue(unit.key, "host1", "train0", time.time() + 9, b"n" * 16), "train0", "for unit 'host1'"),
        (tickets.issue(b"k" * 32, "host0", "train0", time.time() + 9, b"n" * 16), "train0", "signature"),
        (b"rubbish", "train0", "7 bytes"),
    ]:
        sock = unit.connect()
        send(sock, Kind.HELLO, Hello(ticket, peer))
        error = error_of(sock)
        assert error.code == "ticket"
        assert why in error.reason
        assert_dropped(sock)
    serves(unit, 30)


def test_nothing_is_answered_before_a_ticket(unit: Unit):
    for kind, header in [(Kind.GET, Get(((1, 0),), ("tokens_T",), ())), (Kind.LIST, Get((), (), ()))]:
        sock = unit.connect()
        send(sock, kind, header)
        assert "before HELLO" in error_of(sock).reason
        assert_dropped(sock)


def frame_bytes(kind: int, header: bytes, payload: bytes = b"") -> bytearray:
    """A correct frame as bytes."""
    left, right = socket.socketpair()
    with left, right:
        wire.send_frame(left, kind, header, [memoryview(payload)], deadline=wire.Deadline(1))
        return bytearray(right.recv(10_000_000))


def put_bytes(group_id: int) -> bytearray:
    header, buffers = put_frame(random_group(np.random.default_rng(0), group_id, (9,)))
    return frame_bytes(Kind.PUT, msgspec.msgpack.encode(header), b"".join(buffers))


def changed(frame: bytearray, at: int, value: bytes) -> bytes:
    frame[at : at + len(value)] = value
    return bytes(frame)


RUBBISH = {
    "no frame": (b"GET / HTTP/1.1\r\nHost: storage\r\n\r\n" + b"x" * 100, "not a frame"),
    "wrong version": (changed(put_bytes(40), 4, b"\x00\x09"), "protocol version 9"),
    "huge header": (changed(put_bytes(40), 8, b"\xff\xff\xff\xff"), "a header of 4294967295 bytes"),
    "huge payload": (changed(put_bytes(40), 12, b"\x7f" + b"\xff" * 7), "a payload of 9223372036854775807 bytes"),
    "changed header": (changed(put_bytes(40), wire.PREFIX_BYTES + 1, b"\x55"), "header's checksum"),
    "changed payload": (changed(put_bytes(40), -1, b"\x55"), "checksum of a payload"),
    "unknown kind": (bytes(frame_bytes(77, b"")), "kind 77 is no request"),
    "header of another kind": (bytes(frame_bytes(Kind.PUT, msgspec.msgpack.encode({"a": 1}))), "no record of its kind"),
    "negative length": (bytes(frame_bytes(Kind.PUT, msgspec.msgpack.encode((1, (-4,), ())))), "no record of its kind"),
    "sizes that do not add up": (
        bytes(frame_bytes(Kind.PUT, msgspec.msgpack.encode(Put(40, (5,), ())), b"x" * 64)),
        "its header speaks of 65",
    ),
    "half a message, then silence": (bytes(put_bytes(40))[:-20], "receive: "),
    "half a prefix, then closed": (bytes(put_bytes(40))[:10], None),
    "half a payload, then closed": (bytes(put_bytes(40))[:-20], None),
}


@pytest.mark.parametrize("name", RUBBISH)
def test_rubbish_gets_an_error_and_is_dropped_and_others_are_served(unit: Unit, name: str):
    data, reason = RUBBISH[name]
    unit.settle()
    before = unit.counter("peers_dropped")
    sock = unit.connect(unit.ticket())
    sock.sendall(data)
    if reason is None:
        sock.close()
    else:
        error = error_of(sock)
        assert error.code == "protocol"
        assert reason in error.reason
        assert_dropped(sock)
    wait_until(lambda: unit.counter("peers_dropped") == before + 1)
    wait_until(lambda: unit.counter("reserved_bytes") == 0)
    with unit.client("engine") as engine, pytest.raises(StorageMissing):
        engine.pull(PullRequest(rows=((40, 0),)))
    assert unit.process.poll() is None
    serves(unit, 1000 + list(RUBBISH).index(name))


def test_a_response_that_was_changed_on_the_way_is_an_error():
    left, right = socket.socketpair()
    frame = frame_bytes(Kind.DATA, b"header", b"payload")
    with left, right:
        right.sendall(changed(frame, -1, b"X"))
        prefix = wire.receive_prefix(left, wire.Limits(100, 100), wire.Deadline(1))
        with pytest.raises(wire.WireChecksumError):
            wire.receive_payload(left, prefix, [memoryview(bytearray(7))], wire.Deadline(1))


def test_a_unit_without_a_scheduler_ends_with_an_error(tmp_path: Path):
    script = (UNIT_PROCESS % BUDGET).replace('"start_timeout_s": 5.0', '"start_timeout_s": 0.2')
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=30)
    assert done.returncode != 0
    assert "did the scheduler start" in done.stderr
