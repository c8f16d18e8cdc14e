"""One recorded mini-batch has one gradient and one update, however it is laid out, brought and encoded.

Two processes of two CPU devices each run everything: it proves the arithmetic, the shardings, which bytes move, and that
processes agree; not an accelerator's kernels, nor speed.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from knittrans_jax.config import OptimizerConfig
from knittrans_jax.train.state import init_state, make_optimizer
from knittrans_jax.trajectory import TRAJECTORY_BYTES_PER_TOKEN, GroupPayload, MiniBatchPlan
from knittrans_jax.transfer import tickets
from knittrans_jax.transfer.bulk import put_frame
from knittrans_jax.transfer.plan import layout_mini_batch
from knittrans_jax.transfer.pull import shown_images
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_state import StorageState

from .step_process import GROUPS, MEMBERS, PROCESSES, Case, Setup, own_rows, record_mini_batch, seed_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WHOLE = GROUPS * MEMBERS
Gradient = dict[str, np.ndarray]


class Results:
    """What the processes wrote, by case."""

    def __init__(self, folder: Path, setup: Setup, unique_bytes: int) -> None:
        self.cases = {case.name: case for case in setup.cases}
        self.unique_bytes = unique_bytes
        self.gradients: dict[str, list[Gradient]] = {}
        self.reports: dict[str, list[list[Any]]] = {}
        """By case, then process, then update."""
        for case in setup.cases:
            processes = range(PROCESSES) if case.process is None else [case.process]
            self.reports[case.name] = [json.loads((folder / f"{case.name}-{p}.json").read_text()) for p in processes]
            self.gradients[case.name] = []
            for update in range(len(case.plans)):
                by_process = [dict(np.load(folder / f"{case.name}-{update}-{p}.npz")) for p in processes]
                for other in by_process[1:]:
                    assert all(np.array_equal(by_process[0][name], other[name]) for name in other)
                self.gradients[case.name].append(by_process[0])

    def metric(self, case: str, name: str, update: int = 0) -> float:
        return self.reports[case][0][update]["metrics"][name]

    def bytes(self, case: str, kind: str) -> list[list[int]]:
        return [[report[f"{kind}_bytes"] for report in reports] for reports in self.reports[case]]


def layouts(metas: Any, longest: int) -> dict[str, list[MiniBatchPlan]]:
    """Plans by layout. Two of them, the second being the next mini-batch of the same train batch."""

    def plans(count: int, shards: int, micro_batch_rows: int, row_tokens: int, chunk: int) -> list[MiniBatchPlan]:
        return [
            layout_mini_batch(
                metas,
                plan_id=number,
                update=number,
                train_step=0,
                mini_batch=number,
                shards=shards,
                row_tokens=row_tokens,
                micro_batch_rows=micro_batch_rows,
                chunk_micro_batches=chunk,
                encoder_row_patches=64,
            )
            for number in range(count)
        ]

    return {
        "alone": plans(1, 1, WHOLE, longest, 1),
        "in two": plans(1, 1, WHOLE // 2, longest, 1),
        "in eight": plans(1, 1, WHOLE // 8, longest, 2),
        "two shards": plans(1, 2, 2, 2 * longest, 1),
        "half sharded": plans(1, 2, 1, 2 * longest, 2),
        "sharded": plans(1, 4, 1, 2 * longest, 2),
        "sharded twice": plans(2, 4, 1, 2 * longest, 2),
    }


def cases() -> tuple[list[Case], list[GroupPayload], int]:
    """Cases, payloads, and the bytes of the pictured mini-batch with every image once."""
    metas, trajectories, media = record_mini_batch(0, True)
    plain_metas, plain_trajectories, _ = record_mini_batch(1, False)
    plain_metas = [msgspec.structs.replace(meta, group_id=meta.group_id + 100) for meta in plain_metas]
    payloads = [
        GroupPayload(
            group_id=meta.group_id,
            trajectories=tuple(rows),
            media={one.digest: media[one.digest] for one in meta.media},
        )
        for meta, rows in zip([*metas, *plain_metas], [*trajectories, *plain_trajectories], strict=True)
    ]
    longest = max(t.length_tokens for group in [*metas, *plain_metas] for t in group.trajectories)
    pictured, plain = layouts(metas, longest), layouts(plain_metas, longest)
    sharded, twice = pictured["sharded"], pictured["sharded twice"]
    text = [msgspec.structs.replace(twice[0], plan_id=0), *plain["sharded twice"][1:]]
    found = [
        Case(name="reference", plans=pictured["alone"], encoder_mode="per_micro_batch", process=0),
        Case(name="text reference", plans=plain["alone"], process=1),
        Case(name="two micro-batches", plans=pictured["in two"], process=1),
        Case(name="eight micro-batches", plans=pictured["in eight"], process=0),
        Case(name="two shards", plans=pictured["two shards"], process=1),
        Case(name="text on two shards", plans=plain["two shards"], process=0),
        Case(name="on demand", plans=sharded),
        Case(name="dispatch", plans=twice, transfer="dispatch"),
        Case(name="gather", plans=twice, transfer="gather"),
        Case(name="every copy", plans=sharded, encoder_mode="per_micro_batch"),
        Case(name="micro-batch unique", plans=sharded, encoder_mode="per_micro_batch_unique"),
        Case(name="residuals kept, fsdp", plans=sharded, residuals="keep", mesh={"fsdp": 2}),
        Case(name="auto, gather", plans=sharded, encoder_mode="auto", transfer="gather"),
        Case(name="frozen", plans=twice, encoder_mode="frozen"),
        Case(name="mergers", plans=sharded, encoder_trained="mergers", residuals="keep"),
        Case(name="mergers, fsdp", plans=sharded, encoder_trained="mergers", mesh={"fsdp": 2}),
        Case(
            name="mergers, every copy", plans=sharded, encoder_trained="mergers", encoder_mode="per_micro_batch_unique"
        ),
        Case(name="images, then text", plans=text),
        Case(name="fsdp", plans=sharded, mesh={"fsdp": 2}),
        Case(name="tensor", plans=pictured["half sharded"], mesh={"tensor": 2}),
    ]
    rows = sum(t.size_bytes for group in trajectories for t in group)
    return found, payloads, rows + sum(image.nbytes for image in media.values())


def compiler_flags() -> str:
    """Nearly all of the time goes into compiling, which is done in half of it with XLA's older way of writing loops on CPU.

    A flag that a version does not know ends the process.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{flags} --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else flags


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("step")
    found, payloads, unique_bytes = cases()
    state = StorageState("host0", 10**8)
    for payload in payloads:
        state.put(payload, put_frame(payload)[0])
    with StorageServer(state, "127.0.0.1") as server:
        setup = Setup(cases=found, address=server.address, key=tickets.new_key())
        server.set_key(setup.key)
        (folder / "setup.msgpack").write_bytes(msgspec.msgpack.encode(setup))
        with socket.create_server(("127.0.0.1", 0)) as sock:
            coordinator = f"127.0.0.1:{sock.getsockname()[1]}"
        command = [sys.executable, "-c", "from tests.train.step_process import main; main()", str(folder)]
        running = [
            subprocess.Popen([*command, str(process), coordinator], env=os.environ | {"XLA_FLAGS": compiler_flags()})
            for process in range(PROCESSES)
        ]
        try:
            assert [process.wait(500) for process in running] == [0] * PROCESSES
        finally:
            for process in running:
                process.kill()
                process.wait()
    return Results(folder, setup, unique_bytes)


def difference(got: Gradient, expected: Gradient) -> dict[str, float]:
    """Relative L2 difference of every tensor that `got` has."""
    found = {}
    for name, tensor in got.items():
        ours, theirs = tensor.astype(np.float64), expected[name].astype(np.float64)
        found[name] = float(np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 1e-12))
    return found


def reference_of(case: str, update: int) -> str:
    """An update without images has another one."""
    return "text reference" if case.startswith("text") or (case == "images, then text" and update) else "reference"


def not_trained(case: str, names: Iterable[str]) -> set[str]:
    """Tensors that have no gradient."""
    encoder = {name for name in names if name.startswith("['encoder']")}
    if case == "frozen":
        return encoder
    mergers = ("['encoder']['merger']", "['encoder']['deepstack_mergers']")
    return {name for name in encoder if not name.startswith(mergers)} if case.startswith("mergers") else set()


ALL_CASES = [case.name for case in cases()[0]]


def test_the_gradient_does_not_depend_on_layout_transfer_or_encoder_mode(results: Results) -> None:
    for case, gradients in results.gradients.items():
        for update, gradient in enumerate(gradients):
            expected = results.gradients[reference_of(case, update)][0]
            assert set(gradient) == set(expected) - not_trained(case, expected), case
            worst = max(difference(gradient, expected).items(), key=lambda item: item[1])
            assert worst[1] < 3e-6, (case, update, worst)
    layouts = {case.name: case.plans[0] for case in results.cases.values()}
    assert {plan.shards for plan in layouts.values()} == {1, 2, 4}
    assert {plan.chunks * plan.chunk_micro_batches for plan in layouts.values()} >= {1, 2, 4, 8}
    packed = {name for name, plan in layouts.items() if any(placement.offset for placement in plan.placements)}
    assert packed == set(layouts) - {"reference", "text reference", "two micro-batches", "eight micro-batches"}
    assert (layouts["on demand"].chunks, layouts["on demand"].chunk_micro_batches) == (2, 2)
    for case in set(layouts) - {"text reference", "text on two shards"}:
        assert abs(results.metric(case, "loss") - results.metric("reference", "loss")) < 1e-6


@jax.numpy_dtype_promotion("standard")  # optax's Adam raises a float to an int
def test_parameters_after_one_update_agree_to_1e_6_per_tensor(results: Results) -> None:
    """One AdamW update by each gradient in the middle of a run, where Adam's moments have a history.

    (Its very first step divides each element by its own size: where a gradient is almost nothing, rounding decides the sign.)
    """
    _, params = seed_model()
    leaves, structure = jax.tree.flatten(params)
    optimizer = make_optimizer(OptimizerConfig(), 100)

    @jax.jit
    def step(earlier: Any, gradient: Any) -> Any:
        _, state = optimizer.update(earlier, init_state(params, optimizer).opt_state, params)
        return optimizer.update(gradient, state, params)[0]

    def moved(case: str, update: int) -> Gradient:
        expected = results.gradients[reference_of(case, update)][0]
        rng = np.random.default_rng(3)
        scales = [max(float(np.sqrt(np.mean(np.square(leaf)))), 1e-6) for leaf in expected.values()]
        history = [jnp.asarray(rng.normal(0, s, p.shape), jnp.float32) for s, p in zip(scales, leaves, strict=True)]
        gradient = [jnp.asarray(leaf) for leaf in results.gradients[case][update].values()]
        steps = step(jax.tree.unflatten(structure, history), jax.tree.unflatten(structure, gradient))
        return {
            name: np.asarray(p) + np.asarray(s)
            for name, p, s in zip(expected, leaves, jax.tree.leaves(steps), strict=True)
        }

    for case in results.gradients:
        if case == "frozen" or case.startswith("mergers"):
            continue
        for update in range(len(results.gradients[case])):
            expected = moved(reference_of(case, update), 0)
            worst = max(difference(moved(case, update), expected).items(), key=lambda item: item[1])
            assert worst[1] < 1e-6, (case, update, worst)


def test_every_tensor_has_a_gradient_and_the_encoder_has_none_without_images(results: Results) -> None:
    for name, tensor in results.gradients["reference"][0].items():
        assert np.linalg.norm(tensor) > 0, name
    for name, tensor in results.gradients["images, then text"][1].items():
        assert (np.linalg.norm(tensor) > 0) == name.startswith("['decoder']"), name
    assert "encoder_rows" not in results.reports["images, then text"][0][1]["metrics"]


def test_each_image_is_encoded_as_often_as_its_mode_says(results: Results) -> None:
    plan = results.cases["on demand"].plans[0]
    patches = [image.grid_h * image.grid_w for image in plan.images]
    copies = sum(patches[image] for image in shown_images(plan, range(WHOLE)))
    in_micro_batches: dict[tuple[int, int], set[int]] = {}
    for placement in plan.placements:
        place = (placement.shard, placement.row // plan.rows_per_micro_batch)
        in_micro_batches.setdefault(place, set()).update(placement.images)
    unique = sum(patches[image] for images in in_micro_batches.values() for image in images)
    assert sum(patches) < unique < copies
    for case, expected in (("on demand", sum(patches)), ("micro-batch unique", unique), ("every copy", copies)):
        assert results.metric(case, "patches_encoded") == expected, case
    assert [results.metric("frozen", "patches_encoded", update) for update in (0, 1)] == [sum(patches), 0]
    images = float(len(plan.images))
    assert [results.metric("frozen", "encoder_cache_misses", update) for update in (0, 1)] == [images, 0]
    assert [results.metric("frozen", "encoder_cache_hits", update) for update in (0, 1)] == [0, images]


def test_each_transfer_mode_moves_the_bytes_that_it_says(results: Results) -> None:
    plan = results.cases["on demand"].plans[0]

    def naive_bytes(placements: list[int]) -> int:
        tokens = sum(plan.placements[index].length for index in placements)
        pixels = sum(plan.images[i].grid_h * plan.images[i].grid_w for i in shown_images(plan, placements)) * 16
        return tokens * TRAJECTORY_BYTES_PER_TOKEN + 4 * pixels

    unique = results.unique_bytes
    assert sum(map(sum, results.bytes("on demand", "pulled"))) == unique
    assert sum(row[0] for row in results.bytes("frozen", "pulled")) == unique
    own = [own_rows(plan, process) for process in range(PROCESSES)]
    for process, (first, second) in enumerate(results.bytes("dispatch", "pulled")):
        shown = set(shown_images(plan, own[process]))
        others = [
            image
            for index, image in enumerate(plan.images)
            if image.shard // 2 == process and index not in shown  # only its encoder rows need them
        ]
        extra = sum(image.grid_h * image.grid_w for image in others) * 16 * 4
        assert (first, second) == (2 * (naive_bytes(own[process]) + extra), 0)  # the whole train batch before update 0
    everything = naive_bytes(list(range(WHOLE)))
    assert everything > 3 * unique
    assert results.bytes("gather", "pulled") == [[everything] * 2, [0, 0]]
    assert results.bytes("gather", "relayed") == [[0, 0], [everything] * 2]
    for case in set(ALL_CASES) - {"gather", "auto, gather"}:
        assert not any(map(any, results.bytes(case, "relayed"))), case
