"""The loader in processes of its own: 1 and 4 CPU devices, 1 and 2 processes, against a token-by-token reference.

What the CPU proves: which rows are pulled, what is in them, and how many bytes moved. It proves nothing about speed.
"""

import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest

from knittrans_jax.encoding.patches import patchify
from knittrans_jax.launch.messages import ChunkHeld, ChunkMissing, Dropped, NextPlan, PlanReply, Reply, Request
from knittrans_jax.models.sharding import on_device
from knittrans_jax.train.advantages import group_advantages
from knittrans_jax.trajectory import (
    GroupMeta,
    GroupPayload,
    MediaMeta,
    MiniBatchPlan,
    Trajectory,
    TrajectoryMeta,
    media_digest,
)
from knittrans_jax.transfer import pack, tickets
from knittrans_jax.transfer.bulk import put_frame
from knittrans_jax.transfer.control import ControlRefused, ControlStopped
from knittrans_jax.transfer.loader import ChunkLoader, LoaderError, LoaderOptions, split_wait
from knittrans_jax.transfer.plan import chunk_of, chunk_row, layout_mini_batch
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_state import StorageState

from .loader_process import FakeScheduler, Setup
from .payloads import random_image

IMAGE_TOKEN = 2
SPEC = pack.PackSpec(patch_size=2, merge_size=2, channels=1, image_token_id=IMAGE_TOKEN)
KEY = tickets.new_key()
UPDATE = 4


def make_group(
    rng: np.random.Generator, group_id: int, images: list[np.ndarray], patch: int = 2
) -> tuple[GroupMeta, GroupPayload]:
    """Three ragged trajectories; each shows the group's images, the first of them twice."""
    shown = [*range(len(images)), 0] if images else []
    trajectories, metas = [], []
    for member in range(3):
        tokens: list[int] = []
        for index in shown:
            tokens += list(rng.integers(3, 50, rng.integers(1, 4)))
            height, width, _ = images[index].shape
            tokens += [IMAGE_TOKEN] * (height * width // (2 * patch) ** 2)
        tokens += list(rng.integers(3, 50, rng.integers(2, 6)))
        tokens_T = np.asarray(tokens, np.int32)
        sampled_T = (rng.random(len(tokens)) < 0.5) & (tokens_T != IMAGE_TOKEN)
        sampled_T[-1] = True
        version = UPDATE - member % 2
        trajectories.append(
            Trajectory(
                tokens_T=tokens_T,
                sampled_T=sampled_T,
                behaviour_logprobs_T=np.where(sampled_T, -rng.random(len(tokens)), 0).astype(np.float32),
                versions_T=np.where(sampled_T, version, -1).astype(np.int32),
            )
        )
        metas.append(
            TrajectoryMeta(
                length_tokens=len(tokens),
                sampled_tokens=int(sampled_T.sum()),
                reward=float(member),
                version_min=version,
                version_max=version,
                version_sum=version * int(sampled_T.sum()),
                turns=1,
                questions=1,
                exact=0,
                media=tuple(shown),
                started_s=0.0,
                finished_s=1.0,
                version_done=version,
            )
        )
    payload = GroupPayload(
        group_id=group_id, trajectories=tuple(trajectories), media={media_digest(image): image for image in images}
    )
    media = tuple(
        MediaMeta(digest=media_digest(i), grid_h=i.shape[0] // patch, grid_w=i.shape[1] // patch, size_bytes=i.nbytes)
        for i in images
    )
    meta = GroupMeta(
        group_id=group_id, unit="host0", trajectories=tuple(metas), media=media, payload_bytes=payload.size_bytes
    )
    return meta, payload


class World:
    """Storage in this process, two plans: with images (one of them in two groups), and without."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        common = random_image(rng, 8, 8)
        pictured = [make_group(rng, g, [common] if g < 2 else [random_image(rng, 8, 4), common]) for g in range(5)]
        plain = [make_group(rng, 10 + g, []) for g in range(3)]
        self.groups = {payload.group_id: payload for _, payload in pictured + plain}
        self.metas = {"pictured": [meta for meta, _ in pictured], "plain": [meta for meta, _ in plain]}
        self.images = {digest: i for payload in self.groups.values() for digest, i in payload.media.items()}
        state = StorageState("host0", 10**6)
        for payload in self.groups.values():
            state.put(payload, put_frame(payload)[0])
        self.server = StorageServer(state, "127.0.0.1")
        self.server.set_key(KEY)

    def plan(self, kind: str, plan_id: int, shards: int) -> MiniBatchPlan:
        return layout_mini_batch(
            self.metas[kind],
            plan_id=plan_id,
            update=UPDATE,
            train_step=0,
            mini_batch=0,
            shards=shards,
            row_tokens=40,
            micro_batch_rows=1,
            chunk_micro_batches=2,
            encoder_row_patches=24,
        )

    def setup(self, shards: int) -> Setup:
        return Setup([self.plan("pictured", 5, shards), self.plan("plain", 6, shards)], self.server.address, KEY)

    def served_bytes(self) -> int:
        return int(self.server.figures()[2]["served_bytes"])


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    one = World()
    yield one
    one.server.close()


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def run_processes(
    world: World, folder: Path, processes: int, devices: int, mode: str = "per_mini_batch"
) -> tuple[Setup, dict[str, np.ndarray], list[int]]:
    """Runs the loader -> (setup, global arrays by plan/chunk/part/field, bytes pulled by each process)."""
    setup = world.setup(processes * devices)
    (folder / "setup.msgpack").write_bytes(msgspec.msgpack.encode(setup))
    coordinator = f"127.0.0.1:{unused_port()}"
    script = "from tests.transfer.loader_process import main; main()"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, folder, str(processes), str(p), str(devices), coordinator, mode]
        )
        for p in range(processes)
    ]
    try:
        assert [process.wait(120) for process in running] == [0] * processes
    finally:
        for process in running:
            process.kill()
            process.wait()
    whole: dict[str, np.ndarray] = {}
    filled: Counter[str] = Counter()
    pulled = []
    for p in range(processes):
        with np.load(folder / f"out{p}.npz") as out:
            pulled.append(int(out["pulled"]))
            last_of = [c == plan.chunks - 1 for plan in setup.plans for c in range(plan.chunks)]
            ids = [plan.plan_id for plan in setup.plans for _ in range(plan.chunks)]
            assert list(out["states"]) == [
                i if last else i - 1 if i != 5 else -1 for i, last in zip(ids, last_of, strict=True)
            ]
            for key in out.files:
                if key in ("states", "pulled"):
                    continue
                name, start, size = key.rsplit("/", 2)
                data = out[key]
                axis = 0 if "/images/" in key and mode == "per_mini_batch" else 1
                shape = (*data.shape[:axis], int(size), *data.shape[axis + 1 :])
                whole.setdefault(name, np.zeros(shape, data.dtype))
                at = (slice(None),) * axis + (slice(int(start), int(start) + data.shape[axis]),)
                whole[name][at] = data
                filled[name] += data.shape[axis]
    assert all(
        filled[name] == whole[name].shape[0 if "/images/" in name and mode == "per_mini_batch" else 1] for name in whole
    )
    return setup, whole, pulled


def reference_positions(plan: MiniBatchPlan, images: tuple[int, ...], tokens: np.ndarray) -> np.ndarray:
    """M-RoPE positions token by token."""
    out, at, position, left = np.zeros((3, len(tokens)), np.int32), 0, 0, list(images)
    while at < len(tokens):
        if tokens[at] != IMAGE_TOKEN:
            out[:, at] = position
            at, position = at + 1, position + 1
            continue
        image = plan.images[left.pop(0)]
        rows, columns = image.grid_h // 2, image.grid_w // 2
        for row in range(rows):
            for column in range(columns):
                out[:, at] = (position, position + row, position + column)
                at += 1
        position += max(rows, columns)
    assert not left
    return out


def check_chunks(world: World, plan: MiniBatchPlan, whole: dict[str, np.ndarray], mode: str) -> None:
    """Every token of every chunk against the payload it came from; what is left must be padding."""
    for chunk in range(plan.chunks):
        arrays = {name: whole[f"{plan.plan_id}/{chunk}/arrays/{name}"].copy() for name in pack.ChunkArrays._fields}
        places = sorted((p for p in plan.placements if chunk_of(plan, p) == chunk), key=lambda p: p.offset)
        segments: Counter[tuple[int, int]] = Counter()
        for p in places:
            c, r = chunk_row(plan, p)
            segments[c, r] += 1
            group = world.groups[plan.groups[p.group].group_id]
            trajectory = group.trajectories[p.trajectory]
            advantage = group_advantages(plan.groups[p.group].rewards, True)[p.trajectory]
            positions = reference_positions(plan, p.images, trajectory.tokens_T)
            media = [world.images[plan.images[i].digest] for i in p.images]
            merged = [patch for image in media for patch in patchify(image, 2, 2).reshape(-1, 4 * 4)]
            fresh = p.trajectory % 2 == 0
            for t in range(p.length):
                at = (c, r, p.offset + t)
                sampled = bool(trajectory.sampled_T[t])
                assert arrays["tokens"][at] == trajectory.tokens_T[t]
                assert arrays["segment_ids"][at] == segments[c, r]
                assert list(arrays["positions"][c, r, :, p.offset + t]) == list(positions[:, t])
                assert arrays["sampled"][at] == sampled
                assert arrays["fresh"][at] == (sampled and fresh)
                assert arrays["behaviour_logprobs"][at] == trajectory.behaviour_logprobs_T[t]
                assert arrays["advantages"][at] == (advantage if sampled else 0)
                index = arrays["table_index"][at]
                if trajectory.tokens_T[t] == IMAGE_TOKEN:
                    patches = image_input(plan, chunk, whole, mode, c, p.shard)
                    assert np.array_equal(patches.reshape(-1, 4 * 4)[index], merged.pop(0))
                else:
                    assert index == -1
                for name, array in arrays.items():
                    if name != "positions":
                        array[at] = -1 if name == "table_index" else 0
                arrays["positions"][c, r, :, p.offset + t] = 0
            assert not merged
        for name, array in arrays.items():
            assert (array == (-1 if name == "table_index" else 0)).all(), f"{name}: not only padding is left"


def image_input(
    plan: MiniBatchPlan, chunk: int, whole: dict[str, np.ndarray], mode: str, micro_batch: int, shard: int
) -> np.ndarray:
    """The patches into which `table_index` of a micro-batch's shard points."""
    if mode == "per_mini_batch":
        return whole[f"{plan.plan_id}/0/images/patches"]
    copies = whole[f"{plan.plan_id}/{chunk}/images/patches"][micro_batch]
    return copies.reshape(plan.shards, -1, *copies.shape[1:])[shard]


@pytest.mark.parametrize(("processes", "devices"), [(1, 1), (1, 4), (2, 2)])
def test_the_arrays_are_the_payloads_and_every_byte_is_pulled_once(
    world: World, tmp_path: Path, processes: int, devices: int
):
    before = world.served_bytes()
    setup, whole, pulled = run_processes(world, tmp_path, processes, devices)
    for plan in setup.plans:
        check_chunks(world, plan, whole, "per_mini_batch")
    images = {name: whole[f"5/0/images/{name}"] for name in pack.ImageArrays._fields}
    assert not [name for name in whole if "/images/" in name and not name.startswith("5/0/")]
    used = 0
    for image in setup.plans[0].images:
        row = image.shard * setup.plans[0].encoder_rows_per_shard + image.row
        n = image.grid_h * image.grid_w
        at = slice(image.offset, image.offset + n)
        assert np.array_equal(images["patches"][row, at], patchify(world.images[image.digest], 2, 2))
        assert (images["grids"][row, at] == (image.grid_h, image.grid_w)).all()
        assert len(np.unique(images["coords"][row, at], axis=0)) == n
        assert len(set(images["segment_ids"][row, at])) == 1
        used += n
    assert (images["segment_ids"] > 0).sum() == used

    rows = sum(t.size_bytes for payload in world.groups.values() for t in payload.trajectories)
    unique = sum(image.nbytes for image in world.images.values())
    assert sum(pulled) == rows + unique
    assert world.served_bytes() - before == rows + unique
    if processes == 2:
        assert max(pulled) < rows + unique


def test_per_micro_batch_brings_every_copy_to_the_micro_batch_that_shows_it(world: World, tmp_path: Path):
    setup, whole, _ = run_processes(world, tmp_path, 1, 4, "per_micro_batch")
    plan = setup.plans[0]
    for one in setup.plans:
        check_chunks(world, one, whole, "per_micro_batch")
    copies = sum(int((whole[f"5/{c}/images/segment_ids"] > 0).sum()) for c in range(plan.chunks))
    assert copies == sum(plan.images[i].grid_h * plan.images[i].grid_w for p in plan.placements for i in p.images)
    assert len({whole[f"5/{c}/images/patches"].shape for c in range(plan.chunks)}) == 1


# --- one device, in this process -------------------------------------------------------------------------------------


def options(scheduler: object, **changes: object) -> LoaderOptions:
    sharding = on_device(jax.devices()[0])
    fields: dict = {
        "open_scheduler": lambda stopped: scheduler,
        "process": 0,
        "incarnation": 1,
        "peer": "train0",
        "chunk_sharding": sharding,
        "image_sharding": sharding,
        "replicated_sharding": sharding,
        "advantages": lambda rewards: group_advantages(rewards, True),
        "spec": SPEC,
        "pull_timeout_s": 5.0,
        "pull_retries": 1,
    } | changes
    return LoaderOptions(**fields)


@pytest.mark.newest
def test_a_restored_cursor_goes_on_with_the_plan_after_it(world: World):
    setup = world.setup(1)
    loader = ChunkLoader(options(FakeScheduler(setup, "train0")))
    first = next(loader)
    assert first.first
    assert first.images is not None
    assert loader.get_state() == {"after_plan": -1}  # the first plan is not whole yet: it is begun again
    loader.set_state({"after_plan": 5})
    rest = list(loader)
    assert [(chunk.plan.plan_id, chunk.index) for chunk in rest] == [(6, c) for c in range(setup.plans[1].chunks)]
    assert rest[-1].last
    assert loader.get_state() == {"after_plan": 6}
    loader.close()


class Withdrawing(FakeScheduler):
    """Withdraws the plan of which a process lacks rows, or says where they are now."""

    def __init__(self, setup: Setup, moved_to: str | None = None) -> None:
        super().__init__(setup, "train0")
        self.moved_to, self.asked = moved_to, list[Request]()

    def call(self, request: Request) -> Reply:
        self.asked.append(request)
        if not isinstance(request, ChunkMissing):
            return super().call(request)
        if self.moved_to is None:
            return Dropped(plan_id=request.plan_id)
        self.setup.address = self.moved_to
        return super().call(NextPlan(process=0, incarnation=1, after_plan=request.plan_id - 1))


def without_payload(setup: Setup) -> None:
    """The first plan's groups are not there."""
    groups = tuple(msgspec.structs.replace(g, group_id=g.group_id + 900) for g in setup.plans[0].groups)
    setup.plans[0] = msgspec.structs.replace(setup.plans[0], groups=groups)


def test_a_plan_whose_rows_are_gone_is_dropped_when_the_scheduler_says_so_and_the_next_one_begins(world: World):
    setup = world.setup(1)
    without_payload(setup)
    scheduler = Withdrawing(setup)
    loader = ChunkLoader(options(scheduler))
    first = next(loader)
    assert (first.plan.plan_id, first.index) == (setup.plans[1].plan_id, 0)
    assert loader.get_state()["after_plan"] in (-1, first.plan.plan_id)
    (missing,) = [one for one in scheduler.asked if isinstance(one, ChunkMissing)]
    assert (missing.plan_id, missing.chunk, missing.unit, missing.gone) == (setup.plans[0].plan_id, 0, "host0", True)
    assert "does not hold group 90" in missing.reason
    assert not [one for one in scheduler.asked if isinstance(one, ChunkHeld) and one.plan_id == missing.plan_id]
    loader.close()


def test_rows_are_pulled_from_where_the_unit_is_now(world: World):
    setup = world.setup(1)
    address = setup.address
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        setup.address = f"127.0.0.1:{nobody.getsockname()[1]}"
    scheduler = Withdrawing(setup, moved_to=address)
    loader = ChunkLoader(options(scheduler, pull_retries=0))
    first = next(loader)
    assert (first.plan.plan_id, first.index) == (setup.plans[0].plan_id, 0)
    (missing,) = [one for one in scheduler.asked if isinstance(one, ChunkMissing)]
    assert not missing.gone
    loader.close()


def test_a_plan_that_is_dropped_after_some_of_its_chunks_had_their_go_hands_out_no_more_of_them(world: World):
    setup = world.setup(1)

    class Dropping(FakeScheduler):
        def call(self, request: Request) -> Reply:
            if isinstance(request, ChunkHeld) and (request.plan_id, request.chunk) == (setup.plans[0].plan_id, 1):
                return Dropped(plan_id=request.plan_id)
            return super().call(request)

    loader = ChunkLoader(options(Dropping(setup, "train0")))
    handed = [(chunk.plan.plan_id, chunk.index) for chunk in loader]
    first, *others = setup.plans
    assert first.chunks > 1
    assert handed == [(first.plan_id, 0), *((plan.plan_id, i) for plan in others for i in range(plan.chunks))]
    loader.close()


def test_a_refused_go_surfaces(world: World):
    class Refusing(FakeScheduler):
        def call(self, request: Request) -> Reply:
            reply = super().call(request)
            if isinstance(reply, PlanReply):
                return reply
            raise ControlRefused("no go: process 1 does not hold its rows")

    loader = ChunkLoader(options(Refusing(world.setup(1), "train0")))
    with pytest.raises(LoaderError, match="no go: process 1 does not hold its rows") as caught:
        next(loader)
    assert isinstance(caught.value.__cause__, ControlRefused)
    loader.close()


@pytest.mark.parametrize("stuck_in", ["scheduler", "unit", "full buffer"])
def test_close_returns_soon_whatever_the_thread_waits_for(world: World, stuck_in: str):
    setup = world.setup(1)
    waiting = threading.Event()

    class Stuck(FakeScheduler):
        def __init__(self, stopped: object) -> None:
            super().__init__(setup, "train0")
            self.stopped = stopped

        def call(self, request: Request) -> Reply:
            while stuck_in == "scheduler":
                waiting.set()
                if self.stopped():  # pyright: ignore[reportCallIssue]
                    raise ControlStopped("stopped")
                time.sleep(0.01)
            waiting.set()
            return super().call(request)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        if stuck_in == "unit":
            setup.address = f"127.0.0.1:{silent.getsockname()[1]}"
        loader = ChunkLoader(options(None, open_scheduler=Stuck, pull_timeout_s=60.0, prefetch_chunks=1))
        if stuck_in == "full buffer":
            next(loader)
        else:
            loader.start()
        assert waiting.wait(5)
        time.sleep(0.3)
        began = time.monotonic()
        loader.close()
        assert time.monotonic() - began < 3
        with pytest.raises(LoaderError, match="closed"):
            next(loader)


def test_a_payload_that_is_not_what_the_plan_says_is_named(world: World):
    plan = world.plan("pictured", 5, 1)
    trajectories = {
        i: world.groups[plan.groups[p.group].group_id].trajectories[p.trajectory] for i, p in enumerate(plan.placements)
    }

    def packed() -> None:
        pack.pack_chunk(plan, 0, [0], trajectories, lambda rewards: group_advantages(rewards, True), SPEC)

    packed()
    first = pack.chunk_needs(plan, 0, [0])[0]
    good = trajectories[first]
    trajectories[first] = Trajectory(
        tokens_T=good.tokens_T[:-1],
        sampled_T=good.sampled_T[:-1],
        behaviour_logprobs_T=good.behaviour_logprobs_T[:-1],
        versions_T=good.versions_T[:-1],
    )
    with pytest.raises(pack.PackError, match=r"group \d+, trajectory \d+: \d+ tokens came, the plan says"):
        packed()
    tokens = good.tokens_T.copy()
    tokens[tokens == IMAGE_TOKEN] = 3
    trajectories[first] = Trajectory(
        tokens_T=tokens,
        sampled_T=good.sampled_T,
        behaviour_logprobs_T=good.behaviour_logprobs_T,
        versions_T=good.versions_T,
    )
    with pytest.raises(pack.PackError, match=r"group \d+, trajectory \d+: image 0"):
        packed()
    wrong = {digest: np.zeros((4, 4, 1), np.uint8) for digest in world.images}
    rows = range(plan.encoder_rows_per_shard)
    with pytest.raises(pack.PackError, match="2x2 patches and 1 channels came, the plan says 4x"):
        pack.pack_images(plan, rows, wrong, SPEC)


def test_a_wait_is_split_at_the_moment_when_the_plan_was_known():
    assert split_wait(1.0, 5.0, 3.0) == (2.0, 2.0)
    assert split_wait(1.0, 5.0, 0.5) == (0.0, 4.0)
    assert split_wait(1.0, 5.0, 9.0) == (4.0, 0.0)
