"""The update of Qwen3-VL-2B, split over sixteen v5e chips, by the real TPU compiler. Runs in `make test-tpu-compile`.

What it proves: at the published size, in bfloat16, with remat and a loop over layers, the programs in which an update spends
its time compile, fit the chip, are laid out as the sharding rules say, and hold the collectives that the design allows. What it
does not: how fast they are. The compiler is told to hurry (`exec_time_optimization_effort`).
"""

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("needs the extra `tpu`; `make test-tpu-compile` (part of .ci/run) has it", allow_module_level=True)

from knittrans_jax.admission.service import bind_layout
from knittrans_jax.config import Config, load_config
from knittrans_jax.launch.topology import Program, ProgramReport, compile_report, run_programs, topology_devices
from knittrans_jax.models.config import PRESETS
from knittrans_jax.rollout.tasks.registry import load_task
from knittrans_jax.train.setup import pack_spec
from knittrans_jax.trajectory import GroupMeta, MediaMeta, TrajectoryMeta
from knittrans_jax.transfer.pack import chunk_shape, image_shape

CONFIG = Path(__file__).parents[2] / "configs" / "qwen3_vl_2b.yaml"
TOPOLOGY = "v5e:4x4"
V5E_MEMORY_BYTES = 16 * 10**9
DATA, FSDP = 2, 8
HURRY = {"exec_time_optimization_effort": -1.0}
PARAMETERS = 2_127_532_032
"""Of the published checkpoint."""


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(CONFIG)


@pytest.fixture(scope="module")
def programs(config: Config) -> Iterator[dict[str, Program]]:
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
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises a float to an int
            yield {program.name: program for program in run_programs(config, topology_devices(TOPOLOGY))}


@pytest.fixture(scope="module")
def accumulate(programs: dict[str, Program]) -> ProgramReport:
    with jax.numpy_dtype_promotion("standard"):
        return compile_report(programs["accumulate"], HURRY)


def test_parameters_moments_and_sums_are_split_as_the_rules_say(programs: dict[str, Program]) -> None:
    state, _, sums, *_ = programs["finish"].arguments
    text = PRESETS["qwen3-vl-2b"].text

    def per_device(tree: object) -> int:
        return sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))

    whole = sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))
    assert whole == pytest.approx(PARAMETERS, rel=0.01)
    for part in (state.params, state.opt_state.mu, state.opt_state.nu, sums.decoder):
        values = per_device(part)
        assert values == pytest.approx(sum(math.prod(x.shape[-3:]) for x in jax.tree.leaves(part)) / FSDP, rel=0.2)
    embedding = state.params["decoder"]["embedding"]
    assert embedding.sharding.shard_shape(embedding.shape) == (text.vocab_size // FSDP, text.d_model)


def test_accumulating_fits_and_gathers_parameters_only_inside_the_loop_over_layers(accumulate: ProgramReport) -> None:
    assert accumulate.peak_bytes < V5E_MEMORY_BYTES
    groups = {one.devices for one in accumulate.collectives if one.kind != "collective-permute"}
    assert groups == {FSDP}  # nothing is summed over data, and the table's cotangent over nothing
    outside = [one.result_bytes for one in accumulate.collectives if not one.loops and one.kind == "all-gather"]
    inside = [one for one in accumulate.collectives if one.loops and one.kind == "all-gather"]
    assert inside
    assert {one.loops for one in inside} == {1}
    hidden_bytes = FSDP * 2048 * 2048 * 4
    assert max(outside) <= hidden_bytes  # tokens, targets, hidden states; the embedding alone would be 622 MB
    assert sum(outside) < 2 * PARAMETERS / 10


def test_images_and_cotangents_are_reduced_once_over_every_data_shard(programs: dict[str, Program]) -> None:
    with jax.numpy_dtype_promotion("standard"):
        report = compile_report(programs["finish"], HURRY)
    assert report.peak_bytes < V5E_MEMORY_BYTES
    sums = programs["finish"].arguments[2]
    table_bytes = math.prod(sums.cotangent.shape[1:]) * 4
    everywhere = [
        one for one in report.collectives if one.devices == DATA * FSDP and one.result_bytes >= table_bytes // 16
    ]
    assert [(one.kind, one.loops) for one in everywhere] in ([("reduce-scatter", 0)], [("all-reduce", 0)])
    over_data = [one for one in report.collectives if one.devices == DATA]
    assert over_data
    assert {one.loops for one in over_data} == {0}  # gradients, once


def metas(seed: int, groups: int, members: int) -> list[GroupMeta]:
    """Groups of unequal lengths, each about a picture of its own."""
    rng = np.random.default_rng(seed)
    found = []
    for group in range(groups):
        lengths = rng.integers(200, 210, members)
        rows = tuple(
            TrajectoryMeta(
                length_tokens=int(length), sampled_tokens=5, reward=float(rng.random()), version_min=0, version_max=0,
                version_sum=0, turns=1, questions=1, exact=0, media=(0,), started_s=0.0, finished_s=1.0, version_done=0,
            )
            for length in lengths
        )  # fmt: skip
        media = MediaMeta(digest=f"{seed}-{group}", grid_h=14, grid_w=56, size_bytes=14 * 56 * 768)
        found.append(GroupMeta(group_id=group, unit="host0", trajectories=rows, media=(media,), payload_bytes=1))
    return found


def test_other_plans_have_the_shapes_that_were_compiled(config: Config, programs: dict[str, Program]) -> None:
    layout, spec = bind_layout(config), pack_spec(config, load_task(config.task, config.seed))
    plans = [
        layout(
            metas(seed, config.mini_batch_groups, config.batch.trajectories_per_group),
            plan_id=seed,
            update=seed,
            train_step=0,
            mini_batch=seed,
        )
        for seed in (0, 1)
    ]
    assert plans[0].placements != plans[1].placements
    for plan in plans:
        assert chunk_shape(plan) == programs["accumulate"].arguments[2].tokens.shape
        assert image_shape(plan, spec) == programs["encode"].arguments[1].patches.shape
