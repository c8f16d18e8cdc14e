"""Who pulls what on which mesh: the pure assignment over made-up devices, and real processes whose bytes are counted."""

import contextlib
import math
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from knittrans_jax.train.advantages import group_advantages
from knittrans_jax.trajectory import MiniBatchPlan
from knittrans_jax.transfer import pack
from knittrans_jax.transfer.bulk import put_frame
from knittrans_jax.transfer.matching import Matching, rows_to_feed
from knittrans_jax.transfer.plan import layout_mini_batch
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_state import StorageState

from .loader_process import Setup
from .matching_process import SPEC, Case, row_axes
from .payloads import random_image
from .test_loader import KEY, UPDATE, make_group, unused_port

# --- the assignment, over made-up devices ----------------------------------------------------------------------------


class Client:
    def __init__(self, process: int) -> None:
        self._process = process

    def process_index(self) -> int:
        return self._process


class Device:
    """What a mesh and its shardings look at. `client` is that of the process in whose place we are."""

    platform = device_kind = "cpu"

    def __init__(self, number: int, process: int, client: Client) -> None:
        self.id, self.process_index, self.client = number, process, client


def sharding_of(axes: dict[str, int], order: list[int], per_process: int, spec: P, process: int) -> NamedSharding:
    """The sharding as `process` sees it; `order[i]` is the device at flat place i of the mesh."""
    client = Client(process)
    devices = np.empty(len(order), object)
    devices[:] = [Device(number, number // per_process, client) for number in order]
    mesh = Mesh(devices.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    return NamedSharding(mesh, spec)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[dict[str, int], list[int], int]:
    axes = {axis: draw(st.sampled_from([1, 2, 3, 4])) for axis in draw(st.permutations(["data", "fsdp", "tensor"]))}
    count = math.prod(axes.values())
    per_process = draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
    order = draw(st.one_of(st.just(list(range(count))), st.permutations(range(count))))
    return axes, list(order), per_process


@given(meshes(), st.integers(1, 4), st.integers(1, 3), st.sampled_from([0, 1]))
@settings(max_examples=60, deadline=None)
def test_every_cell_is_brought_once_and_every_owner_can_be_given_its_rows(
    mesh: tuple[dict[str, int], list[int], int], micro_batches: int, rows_per_shard: int, row_axis: int
):
    axes, order, per_process = mesh
    spec = P(*(None,) * row_axis, ("data", "fsdp"))
    rows = axes["data"] * axes["fsdp"] * rows_per_shard
    micro_batches = micro_batches if row_axis else 1
    processes = range(len(order) // per_process)
    brought: Counter[tuple[int, int]] = Counter()
    shares: dict[tuple[int, ...], list[int]] = {}
    gathers = set()
    for process in processes:
        matching = Matching(sharding_of(axes, order, per_process, spec, process), row_axis)
        cells = matching.cells(micro_batches, rows)
        mine = [cell for cell in cells if cell is not None]
        owned = rows_to_feed(matching.sharding, (micro_batches, rows)[1 - row_axis :], row_axis)
        assert matching.owned(micro_batches, rows) == micro_batches * len(owned)
        assert {r for _, r in mine} <= set(owned), "a process brings only what it owns"
        brought.update(mine)
        gathers.add(matching.gathers)
        shares.setdefault(tuple(owned), []).append(len(mine))
        if not matching.gathers:
            assert mine == [(c, r) for c in range(micro_batches) for r in owned]
    assert brought == Counter({(c, r): 1 for c in range(micro_batches) for r in range(rows)})
    assert len(gathers) == 1, "all processes run the gather, or none does"


@given(st.sampled_from([1, 2, 4]), st.sampled_from([2, 4]), st.integers(1, 8))
@settings(max_examples=20, deadline=None)
def test_owners_share_a_shard_evenly(data: int, tensor: int, micro_batches: int):
    count = data * tensor
    shares = []
    for process in range(count):
        sharding = sharding_of({"data": data, "tensor": tensor}, list(range(count)), 1, P(None, "data"), process)
        cells = Matching(sharding, 1).cells(micro_batches, data * 2)
        shares.append(sum(cell is not None for cell in cells))
    assert max(shares) == math.ceil(2 * micro_batches / tensor)


def test_the_baselines_bring_whatever_they_own():
    sharding = sharding_of({"data": 1, "tensor": 2}, [0, 1], 1, P(None, "data"), 1)
    matching = Matching(sharding, 1, split=False)
    assert not matching.gathers
    assert matching.cells(2, 2) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_rows_that_do_not_divide_are_refused():
    matching = Matching(sharding_of({"data": 2, "tensor": 2}, [0, 1, 2, 3], 1, P(None, "data"), 0), 1)
    with pytest.raises(ValueError, match="3 rows do not divide over 2 shards"):
        matching.cells(1, 3)


# --- real processes ---------------------------------------------------------------------------------------------------


class CountingProxy:
    """Passes connections on, and counts what it sends to either side: bytes on the network, frames and all."""

    def __init__(self, target: str) -> None:
        self._target = (target.rsplit(":", 1)[0], int(target.rsplit(":", 1)[1]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed_bytes = 0
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass, args=(source, sink)))
                    self._threads[-1].start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
                with self._lock:
                    self.passed_bytes += len(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()


class BigWorld:
    """A megabyte and a half: two groups share an image, one has two, one has none."""

    def __init__(self) -> None:
        rng = np.random.default_rng(11)
        common = random_image(rng, 512, 512)
        shown = [[common], [common], [random_image(rng, 512, 256), random_image(rng, 256, 256)], []]
        shown += [[random_image(rng, 512, 512)] for _ in range(4)]
        made = [make_group(rng, g, images, patch=16) for g, images in enumerate(shown)]
        self.metas = [meta for meta, _ in made]
        self.groups = {payload.group_id: payload for _, payload in made}
        self.images = {digest: i for payload in self.groups.values() for digest, i in payload.media.items()}
        state = StorageState("host0", 10**8)
        for payload in self.groups.values():
            state.put(payload, put_frame(payload)[0])
        self.unique_bytes = state.held_bytes
        self.server = StorageServer(state, "127.0.0.1")
        self.server.set_key(KEY)

    def plan(self, shards: int) -> MiniBatchPlan:
        return layout_mini_batch(
            self.metas,
            plan_id=5,
            update=UPDATE,
            train_step=0,
            mini_batch=0,
            shards=shards,
            row_tokens=700,
            micro_batch_rows=1,
            chunk_micro_batches=4,
            encoder_row_patches=1024,
        )

    def reference(self, plan: MiniBatchPlan) -> dict[str, np.ndarray]:
        """All arrays whole; that they are right is the loader's test."""
        trajectories = {
            i: self.groups[plan.groups[p.group].group_id].trajectories[p.trajectory]
            for i, p in enumerate(plan.placements)
        }
        whole = {}
        for chunk in range(plan.chunks):
            rows = range(plan.shards)
            packed = pack.pack_chunk(plan, chunk, rows, trajectories, lambda r: group_advantages(r, True), SPEC)
            whole |= {f"{chunk}/arrays/{name}": array for name, array in packed._asdict().items()}
        images = pack.pack_images(plan, range(pack.image_shape(plan, SPEC)[0]), self.images, SPEC)
        return whole | {f"0/images/{name}": array for name, array in images._asdict().items()}


@pytest.fixture(scope="module")
def world() -> Iterator[BigWorld]:
    one = BigWorld()
    yield one
    one.server.close()


ONE = [({"data": 2, "tensor": 2}, False), ({"tensor": 4}, False)]
TWO = [
    ({"data": 2, "tensor": 2}, False),  # tensor inside a process
    ({"data": 2, "tensor": 2}, True),  # tensor across processes
    ({"fsdp": 1, "tensor": 4}, False),  # both
]
FOUR = [
    ({"data": 2, "fsdp": 2}, False),
    ({"data": 2, "fsdp": 1, "tensor": 2}, False),
    ({"data": 2, "sequence": 2}, False),
    ({"tensor": 4}, False),
]


@pytest.mark.parametrize(("processes", "devices", "shapes"), [(1, 4, ONE), (2, 2, TWO), (4, 1, FOUR)])
def test_each_byte_crosses_the_network_once_and_every_device_ends_with_its_rows(
    world: BigWorld, tmp_path: Path, processes: int, devices: int, shapes: list[tuple[dict[str, int], bool]]
):
    proxies = [CountingProxy(world.server.address) for _ in shapes]
    cases = []
    for at, (axes, transposed) in enumerate(shapes):
        shards = math.prod(axes[axis] for axis in row_axes(axes))
        setup = Setup([world.plan(shards)], proxies[at].address, KEY)
        cases.append(Case(f"case{at}", axes, setup, transposed))
    (tmp_path / "cases.msgpack").write_bytes(msgspec.msgpack.encode(cases))
    script = "from tests.transfer.matching_process import main; main()"
    fixed = [str(processes), "", str(devices), f"127.0.0.1:{unused_port()}"]
    running = [
        subprocess.Popen([sys.executable, "-c", script, tmp_path, fixed[0], str(p), *fixed[2:]])
        for p in range(processes)
    ]
    try:
        assert [process.wait(120) for process in running] == [0] * processes
    finally:
        for process in running:
            process.kill()
            process.wait()
        for proxy in proxies:
            proxy.close()
    outs = [np.load(tmp_path / f"out{p}.npz") for p in range(processes)]
    for case, proxy in zip(cases, proxies, strict=True):
        reference = world.reference(case.setup.plans[0])
        devices_of: Counter[str] = Counter()
        for out in outs:
            for key in out.files:
                if key.startswith(f"{case.name}/5/"):
                    _, _, chunk, part, field, starts, _ = key.split("/")
                    name = f"{chunk}/{part}/{field}"
                    data = out[key]
                    at = tuple(slice(int(s), int(s) + n) for s, n in zip(starts.split(","), data.shape, strict=True))
                    assert np.array_equal(data, reference[name][at]), f"{case.axes}: {name} on one device"
                    devices_of[name] += 1
        assert devices_of == dict.fromkeys(reference, processes * devices)
        pulled = [int(out[f"{case.name}/pulled"]) for out in outs]
        gathered = [int(out[f"{case.name}/gathered"]) for out in outs]
        assert sum(pulled) == world.unique_bytes, case.axes
        assert proxy.passed_bytes <= 1.02 * world.unique_bytes, f"{case.axes}: {proxy.passed_bytes} bytes"
        across = processes > 1 and (case.transposed or not {"data", "fsdp"} >= case.axes.keys())
        across = across and not (processes == 2 and case.axes == {"data": 2, "tensor": 2} and not case.transposed)
        assert all((bytes_ > 0) == across for bytes_ in gathered), f"{case.axes}: gathered {gathered}"
        if across:
            assert max(pulled) < world.unique_bytes, "nobody pulls everything"
    for out in outs:
        out.close()
