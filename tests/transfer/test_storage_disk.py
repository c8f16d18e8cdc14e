"""Groups on disk: what was acknowledged survives a kill, what is damaged is never served, what is released leaves nothing."""

import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from knittrans_jax.trajectory import GroupPayload, Trajectory
from knittrans_jax.transfer import tickets
from knittrans_jax.transfer.bulk import put_frame
from knittrans_jax.transfer.client import PullRequest, StorageClient
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_disk import DiskStorageState, map_group, write_group
from knittrans_jax.transfer.storage_state import StorageMissing, StorageRefused

from .payloads import random_group, random_image

KEY = tickets.new_key()

UNIT = """
import sys
import tempfile
from pathlib import Path
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_disk import DiskStorageState
with StorageServer(DiskStorageState("host0", 10**6, Path(sys.argv[1])), "127.0.0.1") as server:
    server.set_key(bytes.fromhex(sys.argv[2]))
    print(server.address, flush=True)
    sys.stdin.read()
"""


def group(group_id: int, seed: int = 0) -> GroupPayload:
    rng = np.random.default_rng(seed)
    return random_group(rng, group_id, images=(random_image(rng), random_image(rng, 4, 12)))


def hold(state: DiskStorageState, payload: GroupPayload) -> None:
    assert state.reserve(put_frame(payload)[0])
    state.commit(state.persist(payload))


def connect(address: str) -> StorageClient:
    ticket = tickets.issue(KEY, "host0", "peer", time.time() + 60, tickets.new_nonce())
    return StorageClient(address, ticket, "peer", 10.0, 0)


def assert_same(found: GroupPayload, wanted: GroupPayload) -> None:
    assert found.group_id == wanted.group_id
    for one, other in zip(found.trajectories, wanted.trajectories, strict=True):
        for field in dataclasses.fields(Trajectory):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))
    assert found.media.keys() == wanted.media.keys()
    for digest, image in wanted.media.items():
        np.testing.assert_array_equal(found.media[digest], image)


@settings(max_examples=12, deadline=None)  # each is forced to disk
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 3))
def test_a_group_is_read_back_as_it_was_written(lengths: list[int], images: int) -> None:
    rng = np.random.default_rng(len(lengths))
    payload = random_group(rng, 7, tuple(lengths), tuple(random_image(rng, 3, 5) for _ in range(images)))
    path = Path(tempfile.gettempdir(), f"group-{os.getpid()}.payload")
    try:
        write_group(path, payload)
        assert_same(map_group(path)[1], payload)
    finally:
        path.unlink()


def test_a_unit_started_anew_holds_what_it_held_and_released_groups_leave_no_file(tmp_path: Path) -> None:
    state = DiskStorageState("host0", 10**6, tmp_path)
    for number in range(4):
        hold(state, group(number, seed=number // 2))  # two and two show the same images
    assert state.held_bytes == sum(group(number, number // 2).size_bytes for number in range(4))
    freed = state.release((1, 3, 99))
    assert freed == group(1).size_bytes + group(3, 1).size_bytes
    (tmp_path / ".group-9.payload-0123").write_bytes(b"half a group")
    again = DiskStorageState("host0", 10**6, tmp_path)
    assert again.recovered_groups == 2
    assert again.inventory() == state.inventory()
    assert [held.group_id for held in again.inventory()] == [0, 2]
    assert again.held_bytes == state.held_bytes
    assert not again.reserve(put_frame(group(0))[0])  # a put that is repeated changes nothing
    assert again.release((0, 2)) > 0
    assert (again.held_bytes, list(tmp_path.iterdir())) == (0, [])


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "rename"])
def test_a_damaged_file_is_deleted_and_counted(tmp_path: Path, damage: str) -> None:
    state = DiskStorageState("host0", 10**6, tmp_path)
    hold(state, group(0))
    hold(state, group(1))
    path = tmp_path / "group-1.payload"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    if damage == "rename":
        path.rename(tmp_path / "group-5.payload")
    else:
        path.unlink()  # the state before has it mapped
        path.write_bytes({"flip": bytes(raw), "cut": bytes(raw[:-40]), "empty": b""}[damage])
    again = DiskStorageState("host0", 10**6, tmp_path)
    assert (again.recovered_groups, again.damaged_files) == (1, 1)
    assert [one.name for one in tmp_path.iterdir()] == ["group-0.payload"]
    with pytest.raises(StorageMissing):
        again.rows([(1, 0)], ("tokens_T",))


def test_the_budget_holds_for_what_is_on_disk_and_a_refused_group_leaves_no_file(tmp_path: Path) -> None:
    size = group(0).size_bytes
    state = DiskStorageState("host0", 2 * size, tmp_path)
    hold(state, group(0))
    hold(state, group(1))
    with pytest.raises(StorageRefused, match="0 of unit host0"):
        state.reserve(put_frame(group(2))[0])
    with pytest.raises(StorageRefused, match="not those reserved"):
        state.commit(state.persist(group(2)))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["group-0.payload", "group-1.payload"]
    with pytest.raises(StorageRefused):
        DiskStorageState("host0", size, tmp_path)
    (tmp_path / "gone").mkdir()
    elsewhere = DiskStorageState("host0", 2 * size, tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert elsewhere.reserve(put_frame(group(2))[0])
    with pytest.raises(StorageRefused, match="could not write it"):
        elsewhere.persist(group(2))


def test_what_a_killed_unit_acknowledged_the_next_one_serves(tmp_path: Path) -> None:
    def start() -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", UNIT, str(tmp_path), KEY.hex()]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    wanted = [group(number, seed=number) for number in range(3)]
    first = start()
    try:
        assert first.stdout is not None
        with connect(first.stdout.readline().strip()) as client:
            for payload in wanted:
                client.put_group(payload)
        first.send_signal(signal.SIGKILL)
        assert first.wait(10) == -signal.SIGKILL
    finally:
        first.kill()
        first.communicate()
    state = DiskStorageState("host0", 10**6, tmp_path)
    with StorageServer(state, "127.0.0.1") as server:
        server.set_key(KEY)
        assert server.held() == (0, 1, 2)
        with connect(server.address) as client:
            assert [one.group_id for one in client.inventory().groups] == [0, 1, 2]
            for payload in wanted:
                rows = tuple((payload.group_id, index) for index in range(len(payload.trajectories)))
                pulled = client.pull(
                    PullRequest(rows=rows, media=tuple((payload.group_id, digest) for digest in payload.media))
                )
                trajectories = tuple(Trajectory(**fields) for fields in pulled.rows)
                assert_same(
                    GroupPayload(group_id=payload.group_id, trajectories=trajectories, media=pulled.media), payload
                )
        server.release((0, 1, 2))
    assert list(tmp_path.iterdir()) == []
