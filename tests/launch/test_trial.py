"""`knittrans check --run` on eight CPU devices: the programs that a topology is compiled for, run with random weights.

It proves that every program runs on a mesh of every axis and gives finite numbers; not how fast an accelerator is.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GRID = Path(__file__).parents[2] / "configs" / "grid_lookup.yaml"
SMALL = ("train.row_tokens=40", "train.micro_batch_rows=2", "rollout.cache_tokens=40", "rollout.slots=16")


@pytest.mark.slow
def test_every_program_runs_on_a_mesh_of_every_axis(tmp_path: Path) -> None:
    mesh = ("train.mesh={data: 2, fsdp: 2, tensor: 2}", "train.processes=1", "train.devices_per_process=8")
    done = subprocess.run(
        [sys.executable, "-m", "knittrans_jax.cli", "check", str(GRID), "--run", "--json", *mesh, *SMALL],
        cwd=tmp_path,
        env=os.environ | {"JAX_NUMPY_DTYPE_PROMOTION": "standard"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    run = json.loads(done.stdout)["run"]
    assert run["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    assert run["device"] == "8 x cpu"
    assert [(one["name"], one["devices"]) for one in run["programs"]] == [
        ("encode", 8), ("start", 8), ("accumulate", 8), ("finish", 8),
        ("sampler prefill", 1), ("sampler fan_out", 1), ("sampler decode", 1), ("sampler encode", 1),
    ]  # fmt: skip
    assert all(0 < one["call_s"] < one["first_s"] for one in run["programs"])
    assert run["update_tokens"] == 4 * 2 * 40
    assert run["grad_norm"] > 0
    assert list(tmp_path.iterdir()) == []
