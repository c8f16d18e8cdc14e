"""Checkpoints: what was saved comes back bit for bit, damaged ones are refused by name, failures come up at the next update."""

import dataclasses
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from knittrans_jax.config import OptimizerConfig
from knittrans_jax.train.checkpoint import CheckpointError, Checkpoints, Cursor, Saved
from knittrans_jax.train.state import TrainState, init_state, make_optimizer

pytestmark = pytest.mark.newest


def state(version: int) -> TrainState:
    weights = jax.random.normal(jax.random.key(version), (40, 30))
    return TrainState(update=jnp.int32(version), params={"decoder": {"w": weights}}, opt_state=(jnp.full(7, version),))


def opened(folder: Path, keep: int = 3, told: list[Saved] | None = None) -> Checkpoints:
    told = [] if told is None else told
    return Checkpoints(folder, keep=keep, timeout_s=60, on_saved=told.append)


def save(folder: Path, *versions: int, keep: int = 3) -> list[Saved]:
    told: list[Saved] = []
    with opened(folder, keep, told) as checkpoints:
        for version in versions:
            checkpoints.save(state(version), Cursor(version=version, after_plan=version + 10))
    return told


def restored_version(folder: Path) -> int:
    with opened(folder) as checkpoints:
        found = checkpoints.restore(state(0))
    assert found is not None
    got, cursor = found
    jax.tree.map(np.testing.assert_array_equal, got, state(cursor.version))
    assert cursor.after_plan == cursor.version + 10
    return cursor.version


def test_the_newest_comes_back_as_it_was_and_a_number_is_kept(tmp_path: Path):
    told = save(tmp_path / "new", 4, 8, 12, keep=2)
    assert [(one.cursor.version, one.oldest) for one in told] == [(4, 4), (8, 4), (12, 8)]
    assert all(one.size_bytes > 0 and one.stall_s >= 0 for one in told)
    assert restored_version(tmp_path / "new") == 12
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["12", "8"]


def test_where_there_is_none_nothing_is_restored(tmp_path: Path):
    with opened(tmp_path) as checkpoints:
        assert checkpoints.restore(state(0)) is None


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip_a_bit(folder: Path) -> str:
    file = largest_file(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return "its checksum differs"


def truncate(folder: Path) -> str:
    file = largest_file(folder)
    file.write_bytes(file.read_bytes()[:-1])
    return "bytes, and had"


def lose_an_item(folder: Path) -> str:
    shutil.rmtree(folder / "cursor")
    return "lacks cursor/"


def never_seal(folder: Path) -> str:
    (folder / "checksums.json").unlink()
    return "ended before it was complete"


@pytest.mark.parametrize("damage", [flip_a_bit, truncate, lose_an_item, never_seal])
def test_a_damaged_one_is_refused_by_name_and_the_one_before_is_taken(
    damage: Callable[[Path], str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    save(tmp_path, 4, 8)
    reason = damage(tmp_path / "8")
    assert restored_version(tmp_path) == 4
    told = capfd.readouterr().err
    assert str(tmp_path / "8") in told
    assert reason in told
    assert (tmp_path / "refused-8").is_dir()
    assert save(tmp_path, 8)[0].cursor.version == 8  # its place is free again
    assert restored_version(tmp_path) == 8


def test_where_only_the_first_was_not_sealed_training_begins_anew(tmp_path: Path):
    save(tmp_path, 4)
    never_seal(tmp_path / "4")
    with opened(tmp_path) as checkpoints:
        assert checkpoints.restore(state(0)) is None
    assert (tmp_path / "refused-4").is_dir()


def test_with_only_damaged_ones_the_error_names_each(tmp_path: Path):
    save(tmp_path, 4, 8)
    for version in ("4", "8"):
        truncate(tmp_path / version)
    with opened(tmp_path) as checkpoints, pytest.raises(CheckpointError, match=r"(?s)no checkpoint.*/8: .*/4: "):
        checkpoints.restore(state(0))


def test_one_of_another_model_is_an_error_and_stays_where_it_is(tmp_path: Path):
    save(tmp_path, 4)
    other = dataclasses.replace(state(0), params={"decoder": {"other": jnp.zeros(3)}})
    with opened(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="does not fit this run"):
        checkpoints.restore(other)
    assert restored_version(tmp_path) == 4


@pytest.mark.parametrize("split", [False, True])
def test_moments_that_another_mesh_kept_as_one_vector_or_as_trees_come_back_as_they_are_wanted(
    split: bool, tmp_path: Path
):
    params = {"decoder": {"b": jnp.arange(3.0), "w": jnp.ones((4, 5))}, "encoder": {"w": jnp.zeros((2, 2))}}
    kept, wanted = (
        init_state(params, make_optimizer(OptimizerConfig(), 10, split_params=one)) for one in (split, not split)
    )
    rng = np.random.default_rng(0)
    filled = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), kept.opt_state)
    with opened(tmp_path) as checkpoints:
        checkpoints.save(dataclasses.replace(kept, opt_state=filled), Cursor(version=4, after_plan=3))
    with opened(tmp_path) as checkpoints:
        found = checkpoints.restore(wanted)
    assert found is not None
    got = found[0].opt_state
    assert jax.tree.structure(got) == jax.tree.structure(wanted.opt_state)
    for ours, theirs in ((got.mu, filled.mu), (got.nu, filled.nu)):
        got_V, kept_V = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (ours, theirs))
        np.testing.assert_array_equal(got_V, kept_V)


def test_a_save_that_failed_comes_up_at_the_next_check(tmp_path: Path):
    code = """
import os, shutil, sys
from pathlib import Path
from knittrans_jax.train.checkpoint import CheckpointError, Cursor
from tests.train.test_checkpoint import opened, state
folder = Path(sys.argv[1])
checkpoints = opened(folder)
shutil.rmtree(folder)
folder.write_text("a file where the folder was")
try:
    checkpoints.save(state(4), Cursor(version=4, after_plan=0))
    checkpoints.close()
except CheckpointError as error:
    print(error, flush=True)
os._exit(0)  # as a training process does: Orbax's threads would hold the interpreter up
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "c")], capture_output=True, text=True, timeout=120
    )
    assert f"checkpoint of version 4 in {tmp_path / 'c'} could not be written" in done.stdout, done.stderr


def test_one_alone_cannot_be_kept(tmp_path: Path):
    with pytest.raises(ValueError, match="at least 2"):
        opened(tmp_path, keep=1)


@pytest.mark.slow
def test_what_two_processes_saved_one_restores(tmp_path: Path):
    code = """
import sys
from pathlib import Path
import jax
process, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from knittrans_jax.train.checkpoint import Cursor
from tests.train.test_checkpoint import opened, state
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
spread, alike = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
shardings = jax.tree.map(lambda x: spread if x.shape == (40, 30) else alike, state(4))
with opened(folder) as checkpoints:
    for version in (4, 8):
        made = jax.jit(state, static_argnums=0, out_shardings=shardings)(version)
        checkpoints.save(made, Cursor(version=version, after_plan=version + 10))
"""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen([*command, str(process), port, str(tmp_path)]) for process in range(2)]
    try:
        assert [process.wait(120) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert restored_version(tmp_path) == 8
