"""Run in a process of its own with 4 CPU devices: one recorded mini-batch through the step in many layouts.

Prints one JSON object: for each layout the largest relative L2 difference, over tensors, of the gradient (and of the
parameters after one AdamW update) from those of the reference layout: 1 shard, 1 micro-batch, one trajectory a row, every
copy of an image encoded anew.
"""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from knittrans_jax.config import ObjectiveConfig, OptimizerConfig
from knittrans_jax.models import build_model, preset
from knittrans_jax.train.advantages import group_advantages
from knittrans_jax.train.state import init_state, make_optimizer
from knittrans_jax.train.step import StepPrograms
from knittrans_jax.trajectory import GroupMeta, MediaMeta, Trajectory, TrajectoryMeta, media_digest
from knittrans_jax.transfer.pack import (
    PackSpec,
    copies_layout,
    copies_shape,
    image_shape,
    pack_chunk,
    pack_copies,
    pack_images,
)
from knittrans_jax.transfer.plan import layout_mini_batch

VOCAB, IMAGE_ID, GROUPS, MEMBERS, TURNS = 24, 3, 4, 4, 2
SAMPLED_IDS = (1, 10, 11, 12, 13)
SPEC = PackSpec(patch_size=4, merge_size=2, channels=1, image_token_id=IMAGE_ID)
SIZES = [(8, 8), (16, 16), (8, 24), (16, 8)]


def record_mini_batch(seed: int, images: bool) -> tuple[list[GroupMeta], list[list[Trajectory]], dict[str, np.ndarray]]:
    """Ragged multi-turn groups; the same picture in every turn; two groups share one picture."""
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
                prompt = [IMAGE_ID] * image_tokens + rng.integers(14, VOCAB, rng.integers(3, 6)).tolist()
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


def run(
    recorded: Any, *, shards: int, micro_batch_rows: int, row_tokens: int, chunk: int, mode: str
) -> tuple[Any, dict[str, float]]:
    """One update -> (state, whose opt_state is the gradient; figures)."""
    optimizer = keep_gradient()
    metas, payloads, media = recorded
    mesh = jax.make_mesh((shards,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    model, params = seed_model()
    programs = StepPrograms(model, ObjectiveConfig(entropy_bonus=0.01), optimizer, mesh, SAMPLED_IDS, 0.9)
    state = jax.device_put(jax.tree.map(jnp.copy, init_state(params, optimizer)), programs.replicated)  # it is donated
    plan = layout_mini_batch(
        metas,
        plan_id=0,
        update=0,
        train_step=0,
        mini_batch=0,
        shards=shards,
        row_tokens=row_tokens,
        micro_batch_rows=micro_batch_rows,
        chunk_micro_batches=chunk,
        encoder_row_patches=64,
    )
    rows = range(shards * micro_batch_rows)
    everything = {i: payloads[p.group][p.trajectory] for i, p in enumerate(plan.placements)}
    naive = mode == "per_micro_batch" and bool(plan.images)
    layout = copies_layout(plan) if naive else None
    images = table = None
    table_rows = 0
    if plan.images and not naive:
        encoder_rows = range(image_shape(plan, SPEC)[0])
        images = jax.device_put(pack_images(plan, encoder_rows, media, SPEC), programs.image_sharding)
        table = programs.encode(state.params, images)
        table_rows = table.shape[0]
    sums = programs.start(state.params, table_rows, naive)
    for number in range(plan.chunks):
        arrays = pack_chunk(plan, number, rows, everything, lambda r: group_advantages(r, True), SPEC, layout)
        arrays = jax.device_put(arrays, programs.chunk_sharding)
        if layout is not None:
            encoder_rows = range(copies_shape(plan, layout, SPEC)[1])
            copies = pack_copies(plan, number, rows, encoder_rows, media, SPEC, layout)
            sums = programs.accumulate_naive(
                state.params, jax.device_put(copies, programs.chunk_sharding), arrays, sums
            )
        else:
            sums = programs.accumulate(state.params, table, arrays, sums)
    micro_batches = plan.chunks * chunk
    state, figures = programs.finish(state, images, sums, jnp.float32(plan.sampled_tokens))
    return state, {name: float(value) for name, value in figures.items()} | {"micro_batches": micro_batches}


@functools.cache
def seed_model() -> Any:
    """The model, and parameters as in the middle of a run: no bias is still at its initial zero.

    (From zero, Adam's first step makes a bias of the size of the learning rate, and where its gradient is almost nothing
    the step's sign is rounding noise: relative to such a bias no two exact paths agree.)
    """
    model, params = build_model(preset("tiny", VOCAB), seed=1)
    rng = np.random.default_rng(2)
    moved = jax.tree.map(lambda p: p + jnp.asarray(rng.normal(0, 0.05, p.shape), p.dtype), params)
    return model, moved


def keep_gradient() -> optax.GradientTransformation:
    """An optimizer whose state is the last gradient and that changes nothing."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del state, params
        return init(updates), updates

    return optax.GradientTransformation(init, update)


def difference(tree: Any, reference: Any) -> float:
    """Largest relative L2 difference over tensors."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-12)))
    return worst


def adam_step(gradient: Any) -> Any:
    """Parameters after one AdamW update by this gradient, in the middle of a run: Adam's moments have a history.

    (Its very first step divides each element by its own size: where a gradient is almost nothing, rounding decides the sign.)
    """
    _, params = seed_model()
    optimizer = make_optimizer(OptimizerConfig(), 100)
    rng = np.random.default_rng(3)
    earlier = jax.tree.map(
        lambda g: jnp.asarray(rng.normal(0, max(float(np.sqrt(np.mean(np.square(g)))), 1e-6), g.shape), g.dtype),
        reference_gradient[0],
    )
    _, opt_state = optimizer.update(earlier, init_state(params, optimizer).opt_state, params)
    return optax.apply_updates(params, optimizer.update(gradient, opt_state, params)[0])


reference_gradient: list[Any] = []
"""The reference layout's gradient: the scale of the history."""


def main() -> None:
    """Runs all layouts and prints their differences."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    report: dict[str, Any] = {}
    whole = GROUPS * MEMBERS
    for images in (True, False):
        recorded = record_mini_batch(0, images)
        longest = max(t.length_tokens for g in recorded[0] for t in g.trajectories)
        kinds = [
            ("per_mini_batch", 1, whole // 2, longest, 1),
            ("per_mini_batch", 1, whole // 8, longest, 2),
            ("per_mini_batch", 2, 2, 2 * longest, 1),
            ("per_mini_batch", 4, 1, 2 * longest, 2),
            ("per_micro_batch", 4, 2, 2 * longest, 1),
        ]
        state, reference = run(
            recorded, shards=1, micro_batch_rows=whole, row_tokens=longest, chunk=1, mode="per_micro_batch"
        )
        expected = state.opt_state
        reference_gradient[:] = [expected]
        params = adam_step(expected)
        layouts = {}
        for mode, shards, rows, tokens, chunk in kinds if images else kinds[2:3]:
            state, figures = run(
                recorded, shards=shards, micro_batch_rows=rows, row_tokens=tokens, chunk=chunk, mode=mode
            )
            packed = "packed" if tokens > longest else "unpacked"
            layouts[f"{mode}, {shards} shards, {rows} rows, {packed}, chunks of {chunk}"] = {
                "gradient": difference(state.opt_state, expected),
                "parameters": difference(adam_step(state.opt_state), params),
                "loss": abs(figures["loss"] - reference["loss"]),
                "micro_batches": figures["micro_batches"],
            }
        norms = [float(jnp.linalg.norm(leaf.reshape(-1))) for leaf in jax.tree.leaves(expected["decoder"])]
        report["images" if images else "text"] = {
            "layouts": layouts,
            "encoder_norm": float(optax.tree.norm(expected["encoder"])),
            "smallest_decoder_norm": min(norms),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
