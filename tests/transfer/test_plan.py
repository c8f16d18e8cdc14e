import math
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.trajectory import GroupMeta, MediaMeta, MiniBatchPlan, TrajectoryMeta
from knittrans_jax.transfer.plan import (
    PlanError,
    chunk_of,
    chunk_row,
    encoder_row,
    layout_mini_batch,
    plan_figures,
    table_row,
    worst_case,
)

ROW = 24
ENCODER_ROW = 32
GRIDS = [(2, 2), (2, 4), (4, 4), (4, 8)]


def trajectory(length: int, media: tuple[int, ...] = (), reward: float = 0.0) -> TrajectoryMeta:
    return TrajectoryMeta(
        length_tokens=length,
        sampled_tokens=max(1, length // 2),
        reward=reward,
        version_min=0,
        version_max=0,
        version_sum=0,
        turns=1,
        questions=1,
        exact=0,
        media=media,
        started_s=0.0,
        finished_s=1.0,
        version_done=0,
    )


def group(group_id: int, lengths: list[int], media: list[MediaMeta] | None = None, shown: int = 1) -> GroupMeta:
    media = media or []
    return GroupMeta(
        group_id=group_id,
        unit="host0",
        trajectories=tuple(trajectory(n, tuple(range(len(media))) * shown, float(i)) for i, n in enumerate(lengths)),
        media=tuple(media),
        payload_bytes=1,
    )


def image(number: int) -> MediaMeta:
    rows, columns = GRIDS[number % len(GRIDS)]
    return MediaMeta(digest=f"image{number:03d}", grid_h=rows, grid_w=columns, size_bytes=1)


@st.composite
def mini_batches(draw: st.DrawFn) -> list[GroupMeta]:
    ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True))
    groups = []
    for group_id in ids:
        lengths = draw(st.lists(st.integers(1, ROW), min_size=1, max_size=6))
        numbers = draw(st.lists(st.integers(0, 9), max_size=3, unique=True))
        groups.append(group(group_id, lengths, [image(n) for n in numbers], draw(st.integers(1, 2))))
    return groups


def lay_out(groups: list[GroupMeta], shards: int = 2, rows: int = 2, chunk: int = 1) -> MiniBatchPlan:
    return layout_mini_batch(
        groups,
        plan_id=1,
        update=7,
        train_step=0,
        mini_batch=3,
        shards=shards,
        row_tokens=ROW,
        micro_batch_rows=rows,
        chunk_micro_batches=chunk,
        encoder_row_patches=ENCODER_ROW,
    )


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))


@given(mini_batches(), SHAPES)
@settings(max_examples=150, deadline=None)
def test_every_trajectory_lies_in_one_row_and_nothing_overlaps(groups: list[GroupMeta], shape: tuple[int, int, int]):
    plan = lay_out(groups, *shape)
    places = [(plan.groups[p.group].group_id, p.trajectory) for p in plan.placements]
    assert sorted(places) == sorted((g.group_id, i) for g in groups for i in range(len(g.trajectories)))
    used = set()
    for p in plan.placements:
        assert p.length == groups[p.group].trajectories[p.trajectory].length_tokens
        assert 0 <= p.shard < plan.shards
        assert p.offset + p.length <= ROW
        assert chunk_of(plan, p) < plan.chunks
        c, r = chunk_row(plan, p)
        assert c < plan.chunk_micro_batches
        assert r // plan.rows_per_micro_batch == p.shard
        cells = {(chunk_of(plan, p), c, r, t) for t in range(p.offset, p.offset + p.length)}
        assert not cells & used
        used |= cells
    assert plan.sampled_tokens == sum(t.sampled_tokens for g in groups for t in g.trajectories)


@given(mini_batches(), SHAPES)
@settings(max_examples=150, deadline=None)
def test_every_shown_image_is_encoded_once_within_its_row(groups: list[GroupMeta], shape: tuple[int, int, int]):
    plan = lay_out(groups, *shape)
    shown = {g.media[m].digest for g in groups for t in g.trajectories for m in t.media}
    assert sorted(i.digest for i in plan.images) == sorted(shown)
    assert plan.encoder_rows_per_shard in ({0} if not shown else {1, 2, 4, 8, 16})
    used = set()
    for i in plan.images:
        assert i.digest in {m.digest for m in groups[i.group].media}
        patches = i.grid_h * i.grid_w
        assert i.row < plan.encoder_rows_per_shard
        assert i.offset + patches <= ENCODER_ROW
        cells = {(encoder_row(plan, i), at) for at in range(i.offset, i.offset + patches)}
        assert not cells & used
        used |= cells
        assert table_row(plan, i, 2) * 4 == encoder_row(plan, i) * ENCODER_ROW + i.offset
    for p in plan.placements:
        g = groups[p.group]
        assert [plan.images[i].digest for i in p.images] == [
            g.media[m].digest for m in g.trajectories[p.trajectory].media
        ]


@given(mini_batches(), SHAPES, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_layout_does_not_depend_on_the_order_of_the_groups(
    groups: list[GroupMeta], shape: tuple[int, int, int], random: Random
):
    plan = lay_out(groups, *shape)
    assert msgspec.msgpack.encode(lay_out(groups, *shape)) == msgspec.msgpack.encode(plan)
    shuffled = list(groups)
    random.shuffle(shuffled)
    other = lay_out(shuffled, *shape)

    def places(p: MiniBatchPlan) -> list[tuple]:
        return sorted(
            (p.groups[x.group].group_id, x.trajectory, x.shard, x.row, x.offset, x.images) for x in p.placements
        )

    assert places(other) == places(plan)
    assert other.chunks == plan.chunks
    assert [(i.digest, i.shard, i.row, i.offset) for i in other.images] == [
        (i.digest, i.shard, i.row, i.offset) for i in plan.images
    ]


@given(mini_batches(), SHAPES)
@settings(max_examples=100, deadline=None)
def test_a_mini_batch_costs_no_more_micro_batches_than_packing_everything_together(
    groups: list[GroupMeta], shape: tuple[int, int, int]
):
    shards, rows, _ = shape
    plan = lay_out(groups, shards, rows, 1)
    alone = lay_out(groups, 1, 1, 1)  # one shard, one row a micro-batch: packing of everything together
    assert plan.chunks == max(1, -(-alone.chunks // (shards * rows)))


def test_whole_groups_stay_on_one_shard_where_balance_allows():
    plan = lay_out([group(i, [ROW // 2] * 4) for i in range(4)])
    assert plan_figures(plan).groups_split == 0
    assert plan_figures(plan).imbalance == 0
    assert plan_figures(plan).pad_share == 0


def test_one_large_group_is_split_rather_than_computed_on_one_shard():
    plan = lay_out([group(0, [ROW] * 8)])
    assert plan_figures(plan).groups_split == 1
    assert plan.chunks == 2
    assert plan_figures(plan).imbalance == 0


def test_a_trajectory_longer_than_a_row_is_an_error_that_names_the_key():
    with pytest.raises(PlanError, match=r"group 5, trajectory 1: 25 tokens.*train\.row_tokens"):
        lay_out([group(5, [3, ROW + 1])])


def test_an_image_larger_than_an_encoder_row_is_an_error_that_names_the_key():
    big = MediaMeta(digest="big", grid_h=8, grid_w=8, size_bytes=1)
    with pytest.raises(PlanError, match=r"image big has 8x8 = 64 patches.*train\.encoder_row_patches"):
        lay_out([group(5, [3], [big])])


def test_impossible_groups_are_refused():
    with pytest.raises(PlanError, match="no groups"):
        lay_out([])
    with pytest.raises(PlanError, match="twice"):
        lay_out([group(1, [2]), group(1, [2])])
    other_shape = msgspec.structs.replace(image(0), grid_h=4)
    with pytest.raises(PlanError, match="one digest, one picture"):
        lay_out([group(1, [2], [image(0)]), group(2, [2], [other_shape])])
    dangling = msgspec.structs.replace(group(1, [2], [image(0)]), media=())
    with pytest.raises(PlanError, match="shows image 0"):
        lay_out([dangling])


def test_the_worst_case_covers_a_full_mini_batch():
    worst = worst_case(
        groups=2,
        trajectories_per_group=4,
        max_length_tokens=ROW,
        images_per_group=1,
        image_bytes=4 * 192,
        image_patches=4,
        shards=2,
        row_tokens=ROW,
        micro_batch_rows=2,
        chunk_micro_batches=1,
        encoder_row_patches=ENCODER_ROW,
    )
    assert worst.payload_bytes == 2 * (4 * ROW * 13 + 4 * 192)
    assert worst.chunk_bytes == 2 * 2 * ROW * 34
    assert worst.encoder_bytes > 0
    assert worst.encoder_shapes == (1,)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_the_encoder_has_as_few_shapes_as_announced(groups: int, pictures: int, shards: int) -> None:
    """However many pictures of whatever sizes come, up to the most: a plan's rows a shard are one of the shapes."""
    worst = worst_case(
        groups=groups,
        trajectories_per_group=1,
        max_length_tokens=ROW,
        images_per_group=pictures,
        image_bytes=1,
        image_patches=ENCODER_ROW,
        shards=shards,
        row_tokens=ROW,
        micro_batch_rows=1,
        chunk_micro_batches=1,
        encoder_row_patches=ENCODER_ROW,
    )
    assert len(worst.encoder_shapes) <= math.log2(groups * pictures) + 2
    for shown in range(1, pictures + 1):
        metas = [group(g, [4], [image(g * pictures + i) for i in range(shown)]) for g in range(groups)]
        assert lay_out(metas, shards=shards).encoder_rows_per_shard in worst.encoder_shapes
