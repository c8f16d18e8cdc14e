"""The mini-batches of `knittrans bench encoding`: what trajectories show, and how their groups meet micro-batches.

Three workloads whose trajectories all have `ROW_TOKENS` tokens, so that every one fills a row and every picture an encoder row:

* `small pictures, long answers`: one picture of 32 image tokens, then an answer of 200;
* `large pictures`: one picture of 128 image tokens, an answer of 104;
* `multi-turn screenshots`: three turns, each with a screenshot of 48 image tokens of its own, which all members see.

Members of a group show the same pictures, groups different ones. Inside: a micro-batch has 16 rows, so that a whole group of up
to 16 lies in one. Spread: a micro-batch has one row, so that a group's members lie in as many micro-batches as they are. Plans
come from the layout of a run.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from knittrans_jax.models.config import ModelConfig, TextConfig, VisionConfig
from knittrans_jax.trajectory import GroupMeta, MediaMeta, MiniBatchPlan, Trajectory, TrajectoryMeta
from knittrans_jax.transfer.pack import PackSpec
from knittrans_jax.transfer.plan import layout_mini_batch

ROW_TOKENS = 256
VOCABULARY, IMAGE_ID, FIRST_TEXT_ID = 256, 3, 8
PATCH, MERGE = 4, 2


@dataclasses.dataclass(frozen=True)
class Workload:
    """What every trajectory of a mini-batch looks like; counts of one turn."""

    name: str
    turns: int
    grid: tuple[int, int]
    """Patches of a picture, one a turn."""
    prompt_tokens: int
    answer_tokens: int

    @property
    def patches(self) -> int:
        """Of a picture; also those of an encoder row."""
        return self.grid[0] * self.grid[1]

    @property
    def length_tokens(self) -> int:
        """Of a trajectory."""
        return self.turns * (self.patches // MERGE**2 + self.prompt_tokens + self.answer_tokens)


WORKLOADS = (
    Workload("small pictures, long answers", turns=1, grid=(8, 16), prompt_tokens=24, answer_tokens=200),
    Workload("large pictures", turns=1, grid=(16, 32), prompt_tokens=24, answer_tokens=104),
    Workload("multi-turn screenshots", turns=3, grid=(12, 16), prompt_tokens=10, answer_tokens=27),
)


def bench_model() -> ModelConfig:
    """A small Qwen3-VL whose encoder costs an image token about what its decoder costs a token, as that of 2B does.

    One layer each, because most of the benchmark's time goes into compiling; unrolled, so that the compiler counts its FLOPs.
    """
    text = TextConfig(
        vocab_size=VOCABULARY,
        d_model=160,
        layers=1,
        heads=4,
        kv_heads=2,
        head_dim=40,
        mlp_dim=512,
        rope_theta=10_000.0,
        mrope_section=(8, 6, 6),
        tie_embeddings=False,
    )
    vision = VisionConfig(
        layers=1,
        d_model=80,
        heads=4,
        mlp_dim=320,
        patch_size=PATCH,
        merge_size=MERGE,
        channels=3,
        position_grid=8,
        deepstack_layers=(),
    )
    return ModelConfig(text=text, vision=vision)


SPEC = PackSpec(patch_size=PATCH, merge_size=MERGE, channels=3, image_token_id=IMAGE_ID)
SAMPLED_IDS = tuple(range(FIRST_TEXT_ID, VOCABULARY))


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """A plan and all that its rows are packed from."""

    plan: MiniBatchPlan
    trajectories: dict[int, Trajectory]
    """By placement."""
    media: dict[str, np.ndarray]


def make_mini_batch(
    workload: Workload,
    trajectories: int,
    n: int,
    *,
    micro_batch_rows: int,
    shards: int = 1,
    row_tokens: int = ROW_TOKENS,
    seed: int = 0,
) -> MiniBatch:
    """A mini-batch of `trajectories` in groups of `n`, all micro-batches in one chunk."""
    if trajectories % n:
        raise ValueError(f"trajectories = {trajectories} do not divide into groups of n = {n}")
    rng = np.random.default_rng(seed)
    metas, drawn, media = [], {}, {}
    for group in range(trajectories // n):
        digests = [f"{group}-{turn}" for turn in range(workload.turns)]
        height, width = (side * PATCH for side in workload.grid)
        media |= {digest: rng.integers(0, 256, (height, width, 3)).astype(np.uint8) for digest in digests}
        for member in range(n):
            drawn[group, member] = _trajectory(workload, rng)
        metas.append(
            GroupMeta(
                group_id=group,
                unit="",
                trajectories=tuple(_meta(workload, float(rng.random())) for _ in range(n)),
                media=tuple(
                    MediaMeta(digest=d, grid_h=workload.grid[0], grid_w=workload.grid[1], size_bytes=media[d].nbytes)
                    for d in digests
                ),
                payload_bytes=1,
            )
        )
    plan = layout_mini_batch(
        metas,
        plan_id=0,
        update=0,
        train_step=0,
        mini_batch=0,
        shards=shards,
        row_tokens=row_tokens,
        micro_batch_rows=micro_batch_rows,
        chunk_micro_batches=trajectories // (shards * micro_batch_rows),
        encoder_row_patches=workload.patches,
    )
    by_placement = {
        index: drawn[plan.groups[placement.group].group_id, placement.trajectory]
        for index, placement in enumerate(plan.placements)
    }
    return MiniBatch(plan, by_placement, media)


def _trajectory(workload: Workload, rng: np.random.Generator) -> Trajectory:
    tokens, sampled = [], []
    image = [IMAGE_ID] * (workload.patches // MERGE**2)
    for _ in range(workload.turns):
        text = rng.integers(FIRST_TEXT_ID, VOCABULARY, workload.prompt_tokens + workload.answer_tokens).tolist()
        tokens += [*image, *text]
        sampled += [False] * (len(image) + workload.prompt_tokens) + [True] * workload.answer_tokens
    mask = np.array(sampled)
    return Trajectory(
        tokens_T=np.array(tokens, np.int32),
        sampled_T=mask,
        behaviour_logprobs_T=np.where(mask, rng.normal(-5.5, 0.2, len(tokens)), 0).astype(np.float32),
        versions_T=np.where(mask, 0, -1).astype(np.int32),
    )


def _meta(workload: Workload, reward: float) -> TrajectoryMeta:
    return TrajectoryMeta(
        length_tokens=workload.length_tokens,
        sampled_tokens=workload.turns * workload.answer_tokens,
        reward=reward,
        version_min=0,
        version_max=0,
        version_sum=0,
        turns=workload.turns,
        questions=workload.turns,
        exact=0,
        media=tuple(range(workload.turns)),
        started_s=0.0,
        finished_s=1.0,
        version_done=0,
    )
