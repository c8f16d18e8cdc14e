"""Weights through a shared directory. CPU devices prove what is written and read, not how long a copy takes."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from knittrans_jax.transfer.weights import (
    WeightReader,
    WeightsError,
    WeightWriter,
    restore_tree,
    tree_names,
    version_folder,
)

SHARDED = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
jax.config.update("jax_num_cpu_devices", 2)
folder, process, port = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
from knittrans_jax.transfer.weights import WeightWriter
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
def put(array, spec):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])
params = {"split": put(np.arange(64, dtype=np.float32).reshape(8, 8), P("data")),
          "columns": put(np.arange(32, dtype=np.int32).reshape(4, 8), P(None, "data")),
          "same": put(np.ones(3, np.float32), P())}
writer = WeightWriter(folder, process, 2, lambda version: None)
writer.write(7, params)
writer.close()
print(writer.written_bytes)
"""


def params(scale: float = 1.0) -> dict:
    return {
        "decoder": {"kernel": jnp.full((2, 3), scale, jnp.float32), "half": jnp.full((4,), scale, jnp.bfloat16)},
        "scalar": jnp.asarray(scale, jnp.float32),
    }


def write(folder: Path, version: int, tree: dict, process: int = 0, processes: int = 1) -> None:
    writer = WeightWriter(folder, process, processes, lambda _: None)
    writer.write(version, tree)
    writer.close()


def test_what_was_written_is_read_back_and_reported(tmp_path: Path):
    written: list[int] = []
    writer = WeightWriter(tmp_path, 0, 1, written.append)
    assert writer.write(0, params()) >= 0
    writer.write(1, params(2.0))
    writer.close()
    assert written == [0, 1]
    assert writer.stall_s > 0
    reader = WeightReader(tmp_path)
    assert reader.versions() == [0, 1]
    arrays = reader.read(1)
    assert set(arrays) == set(tree_names(params()))
    assert arrays["decoder.half"].dtype == ml_dtypes.bfloat16
    restored = restore_tree(params(), arrays)
    jax.tree.map(np.testing.assert_array_equal, restored, params(2.0))


def test_parameters_may_be_donated_once_write_returned(tmp_path: Path):
    double = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, tree), donate_argnums=0)
    writer = WeightWriter(tmp_path, 0, 1, lambda _: None)
    tree = params()
    for version in range(3):
        writer.write(version, tree)
        tree = double(tree)
    writer.close()
    for version in range(3):
        assert (WeightReader(tmp_path).read(version)["decoder.kernel"] == 2.0**version).all()


@pytest.mark.newest
def test_two_processes_write_disjoint_shards_that_make_a_whole(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = str(sock.getsockname()[1])
    running = [
        subprocess.Popen([sys.executable, "-c", SHARDED, tmp_path, str(p), port], stdout=subprocess.PIPE, text=True)
        for p in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=90)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0, 0]
    assert sum(int(output) for output in outputs) == 64 * 4 + 32 * 4 + 3 * 4
    arrays = WeightReader(tmp_path).read(7)
    assert np.array_equal(arrays["split"], np.arange(64, dtype=np.float32).reshape(8, 8))
    assert np.array_equal(arrays["columns"], np.arange(32, dtype=np.int32).reshape(4, 8))
    assert np.array_equal(arrays["same"], np.ones(3, np.float32))


def test_half_a_version_is_never_seen(tmp_path: Path):
    reader = WeightReader(tmp_path)
    with pytest.raises(WeightsError, match="version 3 cannot be read"):
        reader.read(3)
    write(tmp_path, 3, params(), process=1, processes=2)
    assert reader.versions() == []
    with pytest.raises(WeightsError, match="1 of 2 files are there"):
        reader.read(3)
    write(tmp_path, 3, {"other": jnp.ones(2)}, process=0, processes=2)
    assert reader.versions() == [3]
    assert set(reader.read(3)) == {"other", *tree_names(params())}


def test_files_that_do_not_fit_together_or_are_cut_are_errors(tmp_path: Path):
    write(tmp_path, 1, params())
    path = version_folder(tmp_path, 1) / "shard-00000-of-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(WeightsError, match="version 1 cannot be read"):
        WeightReader(tmp_path).read(1)
    path.write_bytes(whole)
    (version_folder(tmp_path, 1) / "shard-00001-of-00002.safetensors").write_bytes(whole)
    with pytest.raises(WeightsError, match="mixed"):
        WeightReader(tmp_path).read(1)
    write(tmp_path, 2, params(), 0, 2)
    write(tmp_path, 2, params(), 1, 2)  # every shard twice
    with pytest.raises(WeightsError, match="overlaps another shard"):
        WeightReader(tmp_path).read(2)


def test_a_shard_that_is_missing_is_an_error(tmp_path: Path):
    write(tmp_path, 1, {"a": jnp.zeros((4, 2))})
    path = version_folder(tmp_path, 1) / "shard-00000-of-00001.safetensors"
    places = json.dumps({"a#0": {"start": [0, 0], "shape": [4, 2]}})
    safetensors.numpy.save_file({"a#0": np.zeros((3, 2), np.float32)}, path, {"places": places})
    with pytest.raises(WeightsError, match="a has 8 elements, its shards bring 6"):
        WeightReader(tmp_path).read(1)


def test_only_the_newest_versions_are_kept(tmp_path: Path):
    writer = WeightWriter(tmp_path, 0, 1, lambda _: None, keep=4)
    for version in range(7):
        writer.write(version, params(float(version)))
    writer.close()
    assert WeightReader(tmp_path).versions() == [3, 4, 5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"v{v:08d}" for v in range(3, 7)]
    with pytest.raises(ValueError, match="keep=3"):
        WeightWriter(tmp_path, 0, 1, lambda _: None, keep=3)


def test_a_failed_write_surfaces_at_the_next_call(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    writer = WeightWriter(tmp_path / "file", 0, 1, lambda _: None)
    writer.write(0, params())
    with pytest.raises(WeightsError, match="could not be written") as caught:
        writer.close()
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(WeightsError, match="could not be written"):
        writer.write(1, params())


def test_a_slow_disk_holds_the_trainer_up_at_most_until_the_deadline(tmp_path: Path):
    let_go = threading.Event()
    writer = WeightWriter(tmp_path, 0, 1, lambda _: bool(let_go.wait(20)), timeout_s=0.3)  # type: ignore[arg-type]
    writer.write(0, params())
    writer.write(1, params())

    def write_two_more() -> None:
        for version in (2, 3):
            writer.write(version, params())

    with pytest.raises(WeightsError, match="not written within"):
        write_two_more()
    let_go.set()
    writer.close()


def test_a_tree_that_does_not_fit_is_named():
    arrays = {name: np.asarray(leaf) for name, leaf in tree_names(params()).items()}
    with pytest.raises(WeightsError, match=r"missing \['scalar'\], left over \['x'\]"):
        restore_tree(params(), {("x" if name == "scalar" else name): a for name, a in arrays.items()})
    with pytest.raises(WeightsError, match=r"decoder\.kernel is float64 \[2, 3\]"):
        restore_tree(params(), arrays | {"decoder.kernel": np.zeros((2, 3))})
