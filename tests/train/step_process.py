"""Training processes of the update's tests: one recorded mini-batch, in many layouts, by every way to bring and to encode it.

Arguments: folder, process, coordinator address. Two processes of two CPU devices each run every case of the test's setup, with
the loader and the trainer of a run and with storage units that the test serves; before that each runs the cases that are for it
alone. The gradient of every update is written to the folder.

The model has few layers, and cases share shapes, because nearly all of the time goes into compiling.
"""

import functools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding

from knittrans_jax.config import Config, ObjectiveConfig, parse_config
from knittrans_jax.encoding.modes import ResidualOptions
from knittrans_jax.launch.messages import ChunkHeld, Go, NextPlan, PlanReply, Reply, Request, UpdateDone
from knittrans_jax.models import ModelConfig, abstract_model, build_model, preset
from knittrans_jax.models.fsdp import Fsdp
from knittrans_jax.models.sharding import shard_rules
from knittrans_jax.train.advantages import group_advantages
from knittrans_jax.train.layout import TRAIN_AXES
from knittrans_jax.train.process import RELAY_UNIT, Trainer
from knittrans_jax.train.setup import TrainSetup
from knittrans_jax.train.state import EncoderTrained
from knittrans_jax.train.step import StepPrograms
from knittrans_jax.trajectory import GroupMeta, MediaMeta, MiniBatchPlan, Trajectory, TrajectoryMeta, media_digest
from knittrans_jax.transfer import tickets
from knittrans_jax.transfer.loader import ChunkLoader, LoaderOptions
from knittrans_jax.transfer.matching import rows_to_feed
from knittrans_jax.transfer.pack import PackSpec
from knittrans_jax.transfer.relay import RelayServer

VOCAB, IMAGE_ID, GROUPS, MEMBERS, TURNS = 24, 3, 4, 8, 2
SAMPLED_IDS = (1, 10, 11, 12, 13)
SPEC = PackSpec(patch_size=4, merge_size=2, channels=1, image_token_id=IMAGE_ID)
SIZES = [(8, 8), (16, 16), (8, 24), (16, 8)]
CACHED_ROWS = 32
PROCESSES, DEVICES = 2, 2
DEADLINE_S = 300.0


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Plans to train on, one update each, from the same parameters. `process`: it alone, on as many devices as shards."""

    name: str
    plans: list[MiniBatchPlan]
    transfer: str = "on_demand"
    encoder_mode: str = "per_mini_batch"
    residuals: str = "recompute"
    encoder_trained: str = "all"
    process: int | None = None
    mesh: dict[str, int] = {}
    """Sizes of mesh axes besides `data`, which has what is left."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What the test hands to its processes."""

    cases: list[Case]
    address: str
    key: bytes


def record_mini_batch(seed: int, images: bool) -> tuple[list[GroupMeta], list[list[Trajectory]], dict[str, np.ndarray]]:
    """Ragged multi-turn groups; the same picture in every turn; two groups share one picture.

    No trajectory is as short as half of the longest: rows of that length hold one each.
    """
    rng = np.random.default_rng(seed)
    pictures = [rng.integers(0, 256, (*size, 1)).astype(np.uint8) for size in SIZES[: GROUPS - 1]]
    metas, payloads, media = [], [], {}
    for group in range(GROUPS):
        picture = pictures[min(group, GROUPS - 2)]
        digest = media_digest(picture)
        if images:
            media[digest] = picture
        image_tokens = picture.shape[0] * picture.shape[1] // 64 if images else 0
        trajectories, rows = [], []
        for _ in range(MEMBERS):
            tokens: list[int] = []
            sampled: list[bool] = []
            for _ in range(TURNS):
                prompt = [IMAGE_ID] * image_tokens + rng.integers(14, VOCAB, rng.integers(7, 9)).tolist()
                answer = rng.choice(SAMPLED_IDS, rng.integers(1, 4)).tolist()
                tokens += prompt + answer
                sampled += [False] * len(prompt) + [True] * len(answer)
            mask = np.array(sampled)
            trajectories.append(
                Trajectory(
                    tokens_T=np.array(tokens, np.int32),
                    sampled_T=mask,
                    behaviour_logprobs_T=np.where(mask, rng.normal(-1.6, 0.2, len(tokens)), 0).astype(np.float32),
                    versions_T=np.where(mask, 0, -1).astype(np.int32),
                )
            )
            rows.append(
                TrajectoryMeta(
                    length_tokens=len(tokens),
                    sampled_tokens=int(mask.sum()),
                    reward=float(rng.random()),
                    version_min=0,
                    version_max=0,
                    version_sum=0,
                    turns=TURNS,
                    questions=TURNS,
                    exact=0,
                    media=(0,) * TURNS if images else (),
                    started_s=0.0,
                    finished_s=1.0,
                    version_done=0,
                )
            )
        grid = MediaMeta(
            digest=digest, grid_h=picture.shape[0] // 4, grid_w=picture.shape[1] // 4, size_bytes=picture.nbytes
        )
        metas.append(
            GroupMeta(
                group_id=group,
                unit="host0",
                trajectories=tuple(rows),
                media=(grid,) if images else (),
                payload_bytes=1,
            )
        )
        payloads.append(trajectories)
    return metas, payloads, media


@functools.cache
def model_config() -> ModelConfig:
    """The tiny preset with one encoder layer, and a decoder layer after the one that deepstack features reach."""
    config = preset("tiny", VOCAB)
    assert config.vision is not None
    return ModelConfig(
        text=msgspec.structs.replace(config.text, layers=2), vision=msgspec.structs.replace(config.vision, layers=1)
    )


@functools.cache
def seed_model() -> Any:
    """The model, and parameters as in the middle of a run: no bias is still at its initial zero.

    (From zero, Adam's first step makes a bias of the size of the learning rate, and where its gradient is almost nothing
    the step's sign is rounding noise: relative to such a bias no two exact paths agree.)
    """
    model, params = build_model(model_config(), seed=1)
    rng = np.random.default_rng(2)
    moved = jax.tree.map(lambda p: np.asarray(p) + rng.normal(0, 0.05, p.shape).astype(np.float32), params)
    return model, moved


def keep_gradient() -> optax.GradientTransformation:
    """An optimizer whose state is the last gradient and that changes nothing."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del state, params
        return init(updates), updates

    return optax.GradientTransformation(init, update)


class Scheduler:
    """Hands out a case's plans; a go when all processes hold the chunk, which they tell one another by files."""

    def __init__(self, folder: Path, setup: Setup, case: Case, process: int, relay: RelayServer | None) -> None:
        self.setup, self.case, self.process = setup, case, process
        self.folder = folder / case.name
        self.folder.mkdir(exist_ok=True)
        if relay is not None:
            relay.set_key(setup.key)
            (self.folder / "relay.new").write_text(relay.address)
            (self.folder / "relay.new").rename(self.folder / "relay")

    def call(self, request: Request) -> Reply:
        if isinstance(request, NextPlan):
            unit, address = "host0", self.setup.address
            if self.case.transfer == "gather" and self.process:
                unit, address = RELAY_UNIT, wait_for(self.folder / "relay").read_text()
            following = [plan for plan in self.case.plans if plan.plan_id > request.after_plan]
            ticket = tickets.issue(
                self.setup.key, unit, f"train{self.process}", time.time() + DEADLINE_S, tickets.new_nonce()
            )
            return PlanReply(plan=following[0] if following else None, units={unit: address}, tickets={unit: ticket})
        assert isinstance(request, ChunkHeld)
        if self.case.process is None:
            for process in range(PROCESSES):
                name = self.folder / f"held-{request.plan_id}-{request.chunk}-{process}"
                if process == self.process:
                    name.touch()
            for process in range(PROCESSES):
                wait_for(self.folder / f"held-{request.plan_id}-{request.chunk}-{process}")
        return Go()

    def close(self) -> None:
        pass


def wait_for(path: Path) -> Path:
    deadline_s = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline_s, f"{path} did not come"
        time.sleep(0.01)
    return path


class Recorder:
    """Stands for scheduler, weight store and counter of compilations: keeps the reports of updates, and nothing else."""

    count, seconds = 0, 0.0

    def __init__(self) -> None:
        self.reports: list[UpdateDone] = []

    def call(self, request: UpdateDone) -> None:
        self.reports.append(request)

    def write(self, version: int, params: Any) -> None:
        pass

    def take_untold(self) -> tuple[str, ...]:
        return ()


@functools.cache
def initial_state(programs: StepPrograms) -> Any:
    """A function: every update takes the state that it is given for its own."""
    _, params = seed_model()

    def place(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return lambda: programs.init(jax.tree.map(place, params, programs.param_shardings))


def run_case(
    folder: Path, setup: Setup, case: Case, process: int, programs: StepPrograms, config: Config
) -> tuple[list[dict[str, np.ndarray]], list[UpdateDone]]:
    """-> (gradient by tensor, report) of every update."""
    cached_rows = CACHED_ROWS if programs.frozen_encoder else 0
    training = TrainSetup(programs, initial_state(programs)(), SPEC, "settings", cached_rows)
    relay = None
    if case.transfer == "gather" and process == 0:
        relay = RelayServer(RELAY_UNIT, "127.0.0.1", wait_s=DEADLINE_S / 2, request_timeout_s=DEADLINE_S)
    scheduler = Scheduler(folder, setup, case, process, relay)
    loader = ChunkLoader(
        LoaderOptions(
            open_scheduler=lambda stopped: scheduler,
            process=process,
            incarnation=1,
            peer=f"train{process}",
            chunk_sharding=programs.chunk_sharding,
            image_sharding=programs.image_sharding,
            replicated_sharding=programs.replicated,
            advantages=lambda rewards: group_advantages(rewards, True),
            spec=SPEC,
            encoder_mode=case.encoder_mode,  # pyright: ignore[reportArgumentType]
            residuals=ResidualOptions(residuals=case.residuals),  # pyright: ignore[reportArgumentType]
            cached_rows=cached_rows,
            processor="settings",
            transfer=case.transfer,  # pyright: ignore[reportArgumentType]
            mini_batches=len(case.plans),
            relay=relay,
            relay_unit=RELAY_UNIT if case.transfer == "gather" and process else None,
            pull_timeout_s=DEADLINE_S,
        )
    )
    recorder = Recorder()
    trainer = Trainer(config, training, process, 1, recorder, recorder, recorder)  # pyright: ignore[reportArgumentType]
    gradients = []
    for chunk in loader:
        trainer.take(chunk)
        if chunk.last:
            leaves, _ = jax.tree.flatten_with_path(gather(programs, trainer.state.opt_state))
            gradients.append({jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})
    loader.close()
    if relay is not None:
        relay.close()
    return gradients, recorder.reports


def own_rows(plan: MiniBatchPlan, process: int) -> list[int]:
    """Indices of the placements on a process's two shards."""
    return [i for i, p in enumerate(plan.placements) if p.shard // DEVICES == process]


def gather(programs: StepPrograms, tree: Any) -> Any:
    """The tree with every array whole on every process."""
    return jax.jit(lambda x: x, out_shardings=programs.replicated)(tree)


def main() -> None:
    folder, process, coordinator = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.distributed.initialize(coordinator, PROCESSES, process, initialization_timeout=60)
    setup = msgspec.msgpack.decode((folder / "setup.msgpack").read_bytes(), type=Setup)
    config = parse_config(
        {
            "name": "step",
            "task": {"name": "digits-read"},
            "batch": {"groups": 2, "mini_batches": 2, "trajectories_per_group": 2},
        }
    )

    @functools.cache
    def programs(sizes: tuple[int, int, int], encoder_trained: EncoderTrained) -> StepPrograms:
        count = math.prod(sizes)
        devices = jax.local_devices()[:count] if count <= DEVICES else jax.devices()
        mesh = Mesh(np.asarray(devices).reshape(sizes), TRAIN_AXES, axis_types=(AxisType.Auto,) * len(TRAIN_AXES))
        fsdp = Fsdp("fsdp", shard_rules(model_config()), jnp.float32) if mesh.shape["fsdp"] > 1 else None
        model, _ = abstract_model(model_config(), fsdp=fsdp)
        objective = ObjectiveConfig(entropy_bonus=0.01)
        return StepPrograms(model, objective, keep_gradient(), mesh, SAMPLED_IDS, 0.9, encoder_trained)

    assert rows_to_feed(programs((PROCESSES * DEVICES, 1, 1), "all").image_sharding, (4,), 0) == [
        2 * process,
        2 * process + 1,
    ]
    for case in sorted(setup.cases, key=lambda case: case.process is None):
        if case.process in (None, process):
            fsdp, tensor = case.mesh.get("fsdp", 1), case.mesh.get("tensor", 1)
            sizes = (case.plans[0].shards // fsdp, fsdp, tensor)
            trained = "none" if case.encoder_mode == "frozen" else case.encoder_trained
            of_case = programs(sizes, trained)
            began_s = time.monotonic()
            gradients, reports = run_case(folder, setup, case, process, of_case, config)
            print(f"{case.name}: {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)
            for update, gradient in enumerate(gradients):
                np.savez(folder / f"{case.name}-{update}-{process}.npz", allow_pickle=False, **gradient)
            told = [msgspec.to_builtins(report) for report in reports]
            (folder / f"{case.name}-{process}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
