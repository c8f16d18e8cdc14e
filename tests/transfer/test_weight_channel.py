"""Weights over the bulk channel. CPU devices prove what is copied and served, not how long a copy takes."""

import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from knittrans_jax.transfer import tickets, wire
from knittrans_jax.transfer.bulk import BytesSpec, Hello, Kind, Piece, ShardSpec, VersionKey
from knittrans_jax.transfer.storage_state import StorageMissing
from knittrans_jax.transfer.weight_channel import WeightClient, WeightPublisher, WeightServer, bring
from knittrans_jax.transfer.weight_store import WeightStore, assemble, check_layout, lay_out
from knittrans_jax.transfer.weights import HostShard, WeightsError, restore_tree

KEY = tickets.new_key()
ROOM = 10**8

SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
process, port, key = int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3])
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
from knittrans_jax.transfer.weight_channel import WeightPublisher, WeightServer
from knittrans_jax.transfer.weight_store import WeightStore
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
def put(array, spec):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])
params = {"split": put(np.arange(64, dtype=np.float32).reshape(8, 8), P("data")),
          "columns": put(np.arange(32, dtype=np.int32).reshape(4, 8), P(None, "data")),
          "same": put(np.ones(3, np.float32), P())}
store = WeightStore()
with WeightServer(f"train{process}.weights", "127.0.0.1", store, wait_s=5, request_timeout_s=10) as server:
    server.set_key(key)
    written = []
    publisher = WeightPublisher(store, 0, process, 2, written.append, dtype="bfloat16")
    publisher.write(7, params)
    publisher.close()
    print(server.address, flush=True)
    sys.stdin.read()
    print(int(server.figures()[2]["served_bytes"]), flush=True)
"""

READER = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
from knittrans_jax.transfer.bulk import VersionKey
from knittrans_jax.transfer.weight_channel import WeightClient, bring
from knittrans_jax.transfer.weight_store import WeightStore
from knittrans_jax.transfer.weights import place_tree
store, key = WeightStore(), VersionKey(0, 7)
clients = [WeightClient(at, bytes.fromhex(ticket), "reader", 30.0, 0) for at, ticket in json.loads(sys.argv[1])]
bring(store, key, clients, 10**6, piece_bytes=20)
for client in clients:
    client.close()
mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
def leaf(shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
template = {"split": leaf((8, 8), jnp.float32, P(None, "model")), "columns": leaf((4, 8), jnp.int32, P("model")),
            "same": leaf((3,), jnp.bfloat16, P())}
arrays = store.read(key)
assert {name: array.dtype.name for name, array in arrays.items()} == {
    "split": "bfloat16", "columns": "int32", "same": "bfloat16"}
tree = place_tree(template, arrays)
for name in template:
    assert (tree[name].dtype, tree[name].sharding) == (template[name].dtype, template[name].sharding)
    assert len(tree[name].addressable_shards) == 2
assert tree["split"].addressable_shards[0].data.shape == (8, 4)
np.testing.assert_array_equal(tree["split"], np.arange(64, dtype=np.float32).reshape(8, 8))
np.testing.assert_array_equal(tree["columns"], np.arange(32).reshape(4, 8))
print(json.dumps([spec.size_bytes for spec in store.describe(key, 0.0)[1]]))
"""


def ticket(unit: str, peer: str = "reader") -> bytes:
    return tickets.issue(KEY, unit, peer, time.time() + 60, tickets.new_nonce())


def client(server: WeightServer, unit: str, timeout_s: float = 10.0) -> WeightClient:
    return WeightClient(server.address, ticket(unit), "reader", timeout_s, 0)


def params(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"a": rng.standard_normal((64, 33)).astype(np.float32), "b": rng.integers(0, 99, 1000).astype(np.int32)}


def whole(tree: dict[str, np.ndarray]) -> list[HostShard]:
    return [HostShard(name, (0,) * array.ndim, array.shape, array) for name, array in tree.items()]


@pytest.fixture
def serve() -> Iterator[Callable[..., WeightServer]]:
    servers: list[WeightServer] = []

    def make(unit: str, store: WeightStore, wait_s: float = 5.0) -> WeightServer:
        servers.append(WeightServer(unit, "127.0.0.1", store, wait_s=wait_s, request_timeout_s=10.0))
        servers[-1].set_key(KEY)
        return servers[-1]

    yield make
    for server in servers:
        server.close()


def published(key: VersionKey, tree: dict[str, np.ndarray]) -> WeightStore:
    store = WeightStore()
    store.add(key, 1, *lay_out(0, whole(tree)))
    return store


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=5), st.integers(1, 4), st.data())
def test_any_cut_of_tensors_over_processes_is_put_together_again(
    shapes: list[tuple[int, int]], processes: int, data: st.DataObject
) -> None:
    tensors = {f"t{i}": np.random.default_rng(i).standard_normal(shape).astype("f4") for i, shape in enumerate(shapes)}
    shards: dict[int, list[HostShard]] = {process: [] for process in range(processes)}
    for name, array in tensors.items():
        cuts = sorted({0, array.shape[0], *data.draw(st.lists(st.integers(0, array.shape[0]), max_size=3))})
        for begin, end in itertools.pairwise(cuts):
            owner = data.draw(st.integers(0, processes - 1))
            shards[owner].append(HostShard(name, (begin, 0), array.shape, array[begin:end]))
    laid = [lay_out(process, of) for process, of in shards.items()]
    specs = [spec for spec, _ in laid]
    check_layout(specs, processes, ROOM)
    raw = {spec.process: np.frombuffer(b"".join(buffers), np.uint8) for spec, buffers in laid}
    found = assemble(specs, raw)
    assert found.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(found[name], array)


def test_descriptions_that_do_not_hold_together_are_refused_before_anything_is_allocated() -> None:
    good = ShardSpec("a", "float32", 0, (0,), (4,), (4,))

    def check(*shards: ShardSpec, size: int = 16, processes: int = 1, most: int = 100) -> None:
        check_layout([BytesSpec(0, size, 0, shards)], processes, most)

    check(good)
    for message, shards, options in (
        ("expected 0 to 1", (good,), {"processes": 2}),
        ("at most 100", (good,), {"size": 2**40}),
        ("outside", (good,), {"size": 15}),
        ("outside", (ShardSpec("a", "float32", 0, (2,), (4,), (4,)),), {}),
        ("outside", (ShardSpec("a", "float32", 2, (0,), (3,), (3,)),), {}),
        ("is of type", (ShardSpec("a", "object", 0, (0,), (1,), (1,)),), {}),
        ("overlaps", (good, ShardSpec("a", "float32", 0, (1,), (2,), (4,))), {}),
        ("its shards bring 2", (ShardSpec("a", "float32", 0, (1,), (2,), (4,)),), {}),
        ("disagree", (good, ShardSpec("a", "float32", 0, (0,), (1,), (9,))), {}),
    ):
        with pytest.raises(WeightsError, match=message):
            check(*shards, **options)


def test_a_reader_passes_on_what_it_has_while_the_rest_is_arriving(serve: Callable[..., WeightServer]) -> None:
    key, tree = VersionKey(0, 1), params()
    spec, buffers = lay_out(0, whole(tree))
    middle, last = WeightStore(), WeightStore()
    server = serve("middle", middle)
    begun = middle.begin(key, 1, [spec])
    flat = np.frombuffer(b"".join(buffers), np.uint8)
    half = spec.size_bytes // 2
    came: list[int] = []
    reader = client(server, "middle")
    thread = threading.Thread(target=lambda: came.append(bring(last, key, [reader], ROOM, piece_bytes=1000)))
    thread.start()
    begun[0][:half] = flat[:half]
    middle.advance(key, 0, half)
    deadline_s = time.monotonic() + 10
    while last.filled(key, 0) < half - 1000:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert last.filled(key, 0) <= half
    assert last.whole() == middle.whole() == []
    with pytest.raises(WeightsError, match="not held whole"):
        last.read(key)
    begun[0][half:] = flat[half:]
    middle.advance(key, 0, spec.size_bytes)
    thread.join(10)
    reader.close()
    assert came == [spec.size_bytes]
    for name, array in last.read(key).items():
        np.testing.assert_array_equal(array, tree[name])


def test_a_reader_goes_on_with_another_source_where_the_first_one_failed(serve: Callable[..., WeightServer]) -> None:
    key, tree = VersionKey(0, 4), params()
    source, reader = published(key, tree), WeightStore()
    first, second = serve("one", published(key, tree)), serve("two", source)
    pieces: list[int] = []

    def stopped() -> bool:
        pieces.append(1)
        return len(pieces) > 3

    with client(first, "one") as one, pytest.raises(wire.WireError, match="stopped"):
        bring(reader, key, [one], ROOM, stopped=stopped, piece_bytes=1000)
    assert reader.filled(key, 0) == 3000
    assert reader.whole() == []
    first.close()
    with client(second, "two") as two:
        came = bring(reader, key, [two], ROOM, piece_bytes=1000)
    total = sum(spec.size_bytes for spec in source.describe(key, 0.0)[1])
    assert came == total - 3000
    np.testing.assert_array_equal(reader.read(key)["a"], tree["a"])


def test_a_version_whose_bytes_are_not_those_published_is_never_seen(serve: Callable[..., WeightServer]) -> None:
    key = VersionKey(0, 0)
    spec, buffers = lay_out(0, whole(params()))
    raw = bytearray(b"".join(buffers))
    raw[100] ^= 1
    bad, reader = WeightStore(), WeightStore()
    bad.add(key, 1, spec, [memoryview(raw)])
    with client(serve("bad", bad), "bad") as one, pytest.raises(WeightsError, match="checksum does not hold"):
        bring(reader, key, [one], ROOM)
    assert reader.whole() == []
    assert reader.held_bytes == 0


def test_readers_that_die_midway_leave_nothing_behind(serve: Callable[..., WeightServer]) -> None:
    key, tree = VersionKey(0, 2), params()
    store = published(key, tree)
    server = serve("train", store)
    before = store.held_bytes
    for _ in range(5):
        sock = wire.connect(server.address, 5.0)
        deadline = wire.Deadline(5.0)
        hello = Hello(ticket("train"), "reader")
        wire.send_frame(sock, Kind.HELLO, msgspec.msgpack.encode(hello), deadline=deadline)
        wire.send_frame(sock, Kind.PIECE, msgspec.msgpack.encode(Piece(key, 0, 0, 8000)), deadline=deadline)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        sock.close()  # a reset, in the middle of what it asked for
    deadline_s = time.monotonic() + 5
    while server.open_connections:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert store.held_bytes == before
    with client(server, "train") as one:
        bring(WeightStore(), key, [one], ROOM)


def test_rubbish_gets_an_error_and_the_others_are_served(serve: Callable[..., WeightServer]) -> None:
    key = VersionKey(0, 0)
    server = serve("train", published(key, params()), wait_s=0.05)
    with client(server, "train") as one:
        for piece in (
            Piece(key, 0, 0, 2**40),
            Piece(VersionKey(0, 9), 0, 0, 1),
            Piece(key, 3, 0, 1),
            Piece(key, 0, 9, 3),
        ):
            with pytest.raises((StorageMissing, wire.WireError)):
                one.pull_piece(piece, memoryview(bytearray(1)))
            one.renew(ticket("train"))
    for kind, header in (
        (Kind.PIECE, b"\xc1"),
        (Kind.SHARDS, b""),
        (Kind.PIECE, msgspec.msgpack.encode([[0, -1], 0, 0, 1])),
    ):
        sock = wire.connect(server.address, 5.0)
        deadline = wire.Deadline(5.0)
        wire.send_frame(sock, Kind.HELLO, msgspec.msgpack.encode(Hello(ticket("train"), "reader")), deadline=deadline)
        wire.receive_prefix(sock, wire.Limits(1000, 0), deadline)
        wire.send_frame(sock, kind, header, deadline=deadline)
        assert wire.receive_prefix(sock, wire.Limits(1000, 0), deadline).kind == Kind.ERROR
        sock.close()
    with client(server, "train") as one:
        bring(WeightStore(), key, [one], ROOM)


def test_only_the_newest_versions_are_held_and_older_ones_are_refused_at_once(
    serve: Callable[..., WeightServer],
) -> None:
    store = WeightStore()
    for version in range(5):
        store.add(VersionKey(0, version), 1, *lay_out(0, whole(params(version))))
    assert store.whole() == [VersionKey(0, 3), VersionKey(0, 4)]
    began_s = time.monotonic()
    with client(serve("train", store, 5.0), "train") as one, pytest.raises(StorageMissing):
        one.describe(VersionKey(0, 1))
    assert time.monotonic() - began_s < 2
    store.add(VersionKey(1, 0), 1, *lay_out(0, whole(params())))  # a later incarnation's versions are newer
    assert store.whole() == [VersionKey(0, 4), VersionKey(1, 0)]
    with pytest.raises(ValueError, match="keep=1"):
        WeightStore(1)


def test_parameters_may_be_donated_once_write_returned(serve: Callable[..., WeightServer]) -> None:
    double = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
    store, written = WeightStore(3), list[int]()
    publisher = WeightPublisher(store, 0, 0, 1, written.append)
    tree = {"x": jnp.ones((4, 2)), "scalar": jnp.asarray(3.0), "half": jnp.ones(5, jnp.bfloat16)}
    for version in range(3):
        assert publisher.write(version, tree) >= 0
        tree = double(tree)
    publisher.close()
    assert written == [0, 1, 2]
    assert 0 < publisher.copy_s <= publisher.stall_s
    reader = WeightStore(3)
    with client(serve("train", store), "train") as one:
        for version in range(3):
            bring(reader, VersionKey(0, version), [one], ROOM)
    for version in range(3):
        arrays = reader.read(VersionKey(0, version))
        assert (arrays["x"] == 2.0**version).all()
        assert (arrays["scalar"], arrays["half"].dtype) == (3.0 * 2**version, ml_dtypes.bfloat16)


@pytest.mark.newest
def test_two_processes_serve_their_shards_in_bfloat16_to_one_reader_on_two_devices() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])

    def start(*command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    running = [start(SHARDED, str(process), port, KEY.hex()) for process in range(2)]
    try:
        addresses = [process.stdout.readline().strip() for process in running if process.stdout is not None]
        named = [(address, ticket(f"train{index}.weights").hex()) for index, address in enumerate(addresses)]
        running.append(start(READER, json.dumps(named)))
        sizes = json.loads(running[-1].communicate("", timeout=60)[0])
        outputs = []
        for process in running[:2]:  # they leave their group together: both are told before either is waited for
            assert process.stdin is not None
            process.stdin.close()
        for process in running[:2]:
            assert process.stdout is not None
            outputs.append(process.stdout.read())
            assert process.wait(60) == 0
    finally:
        for process in running:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
    assert [int(output) for output in outputs] == sizes  # every byte left its process once


def test_only_floats_are_converted() -> None:
    template = {"same": jax.ShapeDtypeStruct((3,), jnp.int32)}
    with pytest.raises(WeightsError, match="same is float32"):
        restore_tree(template, {"same": np.ones(3, np.float32)}, cast=True)
