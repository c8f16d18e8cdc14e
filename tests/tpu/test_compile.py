"""The TPU compiler takes every program of the demo. Runs in `make test-tpu-compile`, whose environment has libtpu.

What it proves: the programs compile for that topology, fit its memory, and hold the collectives that the design allows. What it
does not: how fast they are.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("needs the extra `tpu`; `make test-tpu-compile` (part of .ci/run) has it", allow_module_level=True)

from knittrans_jax.config import load_config
from knittrans_jax.launch.collectives import count_kinds
from knittrans_jax.launch.topology import (
    ProgramReport,
    compile_report,
    run_programs,
    topology_devices,
    topology_mesh,
    train_programs,
)

DEMO = Path(__file__).parents[2] / "configs" / "grid_lookup.yaml"
TOPOLOGY = "v5e:2x4"
V5E_MEMORY_BYTES = 16 * 10**9


@pytest.fixture(scope="module")
def reports() -> Iterator[dict[str, ProgramReport]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        for name in (
            "ALLOW_MULTIPLE_LIBTPU_LOAD",
            "TPU_LIBRARY_PATH",
            "TPU_SKIP_MDS_QUERY",
            "TPU_WORKER_HOSTNAMES",
            "TPU_ACCELERATOR_TYPE",
        ):
            patch.setenv(name, "")
        devices = topology_devices(TOPOLOGY)
        assert len(devices) == 8
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises a float to an int
            found = {program.name: compile_report(program) for program in run_programs(load_config(DEMO), devices)}
        yield found


def test_every_program_of_the_demo_compiles_and_fits(reports: dict[str, ProgramReport]) -> None:
    assert set(reports) == {
        "encode", "start", "accumulate", "finish",
        "sampler prefill", "sampler fan_out", "sampler decode", "sampler encode",
    }  # fmt: skip
    for report in reports.values():
        assert 0 < report.peak_bytes < V5E_MEMORY_BYTES
    for name in ("encode", "accumulate", "finish", "sampler prefill", "sampler decode"):
        assert reports[name].flops > 0


def test_accumulating_a_chunk_needs_no_other_device(reports: dict[str, ProgramReport]) -> None:
    assert reports["accumulate"].collectives == ()
    assert reports["start"].collectives == ()


def test_the_table_is_gathered_once_and_gradients_and_cotangents_are_summed_once(
    reports: dict[str, ProgramReport],
) -> None:
    assert count_kinds(reports["encode"].collectives) == {"all-gather": 1}
    assert 1 <= len(reports["finish"].collectives) <= 2
    assert set(count_kinds(reports["finish"].collectives)) <= {"all-reduce", "reduce-scatter"}


def test_the_naive_mode_compiles_too(reports: dict[str, ProgramReport]) -> None:
    config = load_config(DEMO, ["train.encoder_mode=per_micro_batch"])
    mesh = topology_mesh(config, topology_devices(TOPOLOGY))
    with jax.numpy_dtype_promotion("standard"):
        programs = {program.name: program for program in train_programs(config, mesh)}
    naive = compile_report(programs["accumulate_copies"])
    assert naive.collectives == ()
    assert naive.flops > reports["accumulate"].flops
