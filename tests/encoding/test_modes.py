"""How a plan's images are encoded follows from the plan: what each mode costs, and which one `auto` takes."""

import dataclasses
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from knittrans_jax.config import ConfigError, parse_config
from knittrans_jax.encoding.modes import ResidualOptions, choose_mode, copies_cost, plan_encoding, table_cost
from knittrans_jax.encoding.table_cache import TableCache
from knittrans_jax.launch.check import check_run
from knittrans_jax.trajectory import GroupMeta, MediaMeta, MiniBatchPlan, TrajectoryMeta
from knittrans_jax.transfer.pack import PackSpec, copies_layout
from knittrans_jax.transfer.plan import encode_only, layout_mini_batch, table_row

SPEC = PackSpec(patch_size=2, merge_size=2, channels=1, image_token_id=2)
ROW_PATCHES = 16


def plan_of(groups: int, members: int, *, micro_batch_rows: int, shards: int = 2, shown: int = 1) -> MiniBatchPlan:
    """Groups with an image of their own each, of 4 or 8 patches, that every member shows `shown` times."""
    trajectory = TrajectoryMeta(
        length_tokens=8,
        sampled_tokens=2,
        reward=0.0,
        version_min=0,
        version_max=0,
        version_sum=0,
        turns=1,
        questions=1,
        exact=0,
        media=(0,) * shown,
        started_s=0.0,
        finished_s=1.0,
        version_done=0,
    )
    metas = [
        GroupMeta(
            group_id=group,
            unit="host0",
            trajectories=(trajectory,) * members,
            media=(MediaMeta(digest=f"image{group}", grid_h=2, grid_w=2 + 2 * (group % 2), size_bytes=1),),
            payload_bytes=1,
        )
        for group in range(groups)
    ]
    return layout_mini_batch(
        metas,
        plan_id=0,
        update=0,
        train_step=0,
        mini_batch=0,
        shards=shards,
        row_tokens=8,
        micro_batch_rows=micro_batch_rows,
        chunk_micro_batches=1,
        encoder_row_patches=ROW_PATCHES,
    )


plans = st.builds(
    plan_of,
    st.integers(1, 6),
    st.integers(1, 6),
    micro_batch_rows=st.integers(1, 8),
    shards=st.integers(1, 4),
    shown=st.integers(1, 3),
)


@given(plans, st.booleans())
def test_a_micro_batch_holds_all_it_shows_and_overlaps_nothing(plan: MiniBatchPlan, unique: bool) -> None:
    layout = copies_layout(plan, unique=unique)
    held: dict[tuple[int, int, int, int], tuple[int, object]] = {}  # patch of a micro-batch's encoder row: its image
    for number, placement in enumerate(plan.placements):
        for index, image in enumerate(placement.images):
            row, offset = layout.places[number, index]
            assert 0 <= row < layout.rows_per_shard
            patches = plan.images[image].grid_h * plan.images[image].grid_w
            assert offset + patches <= ROW_PATCHES
            use = None if unique else (number, index)
            for patch in range(offset, offset + patches):
                at = (placement.shard, placement.row // plan.rows_per_micro_batch, row, patch)
                assert held.setdefault(at, (image, use)) == (image, use)
    assert len(held) == layout.patches


NONE_KEPT = ResidualOptions(row_bytes=1)
ALL_KEPT = ResidualOptions(row_bytes=1, most_bytes=1000)


@given(plans, st.sampled_from([NONE_KEPT, ALL_KEPT]), st.booleans())
def test_auto_takes_the_cheapest_and_unique_copies_never_cost_more(
    plan: MiniBatchPlan, options: ResidualOptions, remat: bool
) -> None:
    options = dataclasses.replace(options, remat=remat)
    unique, copies = copies_layout(plan, unique=True), copies_layout(plan, unique=False)
    assert unique.patches <= copies.patches
    assert copies_cost(plan, unique, remat) <= copies_cost(plan, copies, remat)
    mode, keep, layout = choose_mode(plan, "auto", options)
    costs = {
        ("per_mini_batch", False): table_cost(plan, False, remat),
        ("per_micro_batch_unique", False): copies_cost(plan, unique, remat),
    }
    if options is not NONE_KEPT and options.most_bytes:
        costs["per_mini_batch", True] = table_cost(plan, True, remat)
    assert costs[mode, keep] == min(costs.values())
    assert (layout is None) == (mode == "per_mini_batch")


def test_auto_by_example() -> None:
    one_each = plan_of(8, 1, micro_batch_rows=4)  # no image is shown twice: no table
    inside = plan_of(2, 4, micro_batch_rows=4)  # each group inside its shard's one micro-batch
    for plan in (one_each, inside):
        for options in (NONE_KEPT, ALL_KEPT):
            assert choose_mode(plan, "auto", options)[:2] == ("per_micro_batch_unique", False)
    spread = plan_of(2, 8, micro_batch_rows=1)  # every member in a micro-batch of its own
    assert choose_mode(spread, "auto", NONE_KEPT)[:2] == ("per_mini_batch", False)
    assert choose_mode(spread, "auto", ALL_KEPT)[:2] == ("per_mini_batch", True)
    assert [table_cost(spread, keep, remat) for keep in (False, True) for remat in (False, True)] == [4, 5, 3, 3]
    copies = copies_layout(spread, unique=True)
    assert [copies_cost(spread, copies, remat) for remat in (False, True)] == [8 * 3, 8 * 4]


def test_residuals_are_kept_as_configured_and_in_auto_while_they_fit() -> None:
    spread = plan_of(2, 8, micro_batch_rows=1)
    for residuals in ("recompute", "keep"):
        options = ResidualOptions(residuals=residuals, row_bytes=10)
        assert choose_mode(spread, "per_mini_batch", options)[1] == (residuals == "keep")
        assert not choose_mode(spread, "per_micro_batch", options)[1]
    exact = spread.encoder_rows_per_shard * 10
    for most_bytes, keep in ((exact, True), (exact - 1, False)):
        options = ResidualOptions(row_bytes=10, most_bytes=most_bytes)
        assert choose_mode(spread, "auto", options)[:2] == ("per_mini_batch", keep)


@pytest.mark.parametrize("mode", ["per_mini_batch", "per_micro_batch", "per_micro_batch_unique", "frozen", "auto"])
def test_without_images_nothing_is_encoded(mode: str) -> None:
    plain = encode_only(plan_of(2, 2, micro_batch_rows=2), ())
    cache = TableCache(8, "") if mode == "frozen" else None
    work = plan_encoding(plain, mode, SPEC, cache)  # pyright: ignore[reportArgumentType]
    assert (work.mode, work.copies, work.encode, work.figures) == (None, None, None, {})


def test_a_frozen_plan_encodes_what_is_not_cached_into_its_rows() -> None:
    cache = TableCache(8, "settings")
    first, second = plan_of(2, 2, micro_batch_rows=2), plan_of(4, 2, micro_batch_rows=2)
    assert [image.digest for image in first.images] == ["image1", "image0"]
    plan_encoding(first, "frozen", SPEC, cache)
    work = plan_encoding(second, "frozen", SPEC, cache)
    assert work.encode is not None
    assert work.insert is not None
    assert work.table_rows is not None
    assert {image.digest for image in work.encode.images} == {"image2", "image3"}
    assert len(work.insert) == work.encode.shards * work.encode.encoder_rows_per_shard * ROW_PATCHES // 4
    for image in work.encode.images:
        begin, tokens = table_row(work.encode, image, 2), image.grid_h * image.grid_w // 4
        np.testing.assert_array_equal(work.insert[begin : begin + tokens], work.table_rows[image.digest])
    assert sorted(row for row in work.insert if row < cache.rows) == [3, 4, 5]
    assert len(set(np.concatenate(list(work.table_rows.values())))) == 6
    assert work.figures == {
        "encoder_rows": 2.0,
        "patches_encoded": 12.0,
        "encoder_cache_hits": 2.0,
        "encoder_cache_misses": 2.0,
        "encoder_cache_evictions": 0.0,
    }
    again = plan_encoding(msgspec.structs.replace(second, plan_id=2), "frozen", SPEC, cache)
    assert (again.encode, again.insert) == (None, None)


def test_a_cache_that_a_mini_batch_may_not_fit_is_refused_before_the_run() -> None:
    raw: dict[str, Any] = {
        "name": "small",
        "task": {"name": "digits-read", "options": {"digits": 1, "train_prompts": 64, "heldout_prompts": 8}},
        "batch": {"groups": 4, "mini_batches": 2, "trajectories_per_group": 2},
        "rollout": {"slots": 8, "cache_tokens": 16, "max_answer_tokens": 3},
        "train": {"updates": 6, "row_tokens": 32, "encoder_mode": "frozen", "encoder_row_patches": 8},
        "eval": {"prompts": 4, "final_prompts": 8},
    }
    raw["train"]["encoder_cache_bytes"] = 4 * 128 * 4  # 2 groups x 2 trajectories x 1 image of one token, 128 features
    check_run(parse_config(raw))
    raw["train"]["encoder_cache_bytes"] -= 1
    with pytest.raises(ConfigError, match=r"train.encoder_cache_bytes: .* 4 tokens, whose features take 2048 bytes"):
        check_run(parse_config(raw))
