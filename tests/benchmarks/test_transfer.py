"""What `knittrans bench transfer` predicts, against the plan and the payloads themselves; and which corners it measures."""

import numpy as np
import pytest

from knittrans_jax.benchmarks.registry import load_bench
from knittrans_jax.benchmarks.transfer import bytes_of, combinations
from knittrans_jax.benchmarks.transfer_process import Setup, make_payload, make_plan
from knittrans_jax.transfer.rate import next_free_s

SETUP = Setup(
    key=b"k" * 32,
    consumers=2,
    groups=3,
    trajectories=4,
    text_tokens=5,
    image_side=56,
    patch_size=14,
    link_bytes_per_s=1000.0,
)


def test_predicted_bytes_are_those_of_the_payloads():
    payloads = [make_payload(SETUP, group) for group in range(SETUP.groups)]
    pixels = sum(image.nbytes for payload in payloads for image in payload.media.values())
    rows = sum(t.size_bytes for payload in payloads for t in payload.trajectories)
    moved = bytes_of(SETUP)
    assert moved.unique == sum(payload.size_bytes for payload in payloads) == rows + pixels
    assert moved.uint8 == rows + 4 * pixels
    assert moved.float32 == rows + 4 * 4 * pixels
    assert moved.wait_s("gather", 8) == 8 * moved.float32 / 1000
    assert moved.wait_s("dispatch", 8) == moved.float32 / 1000
    assert moved.wait_s("own rows", 8) == moved.unique / 1000


def test_every_trajectory_is_placed_and_every_process_plans_alike():
    plan = make_plan(SETUP)
    assert plan == make_plan(SETUP)
    assert len(plan.placements) == 12
    assert {placement.shard for placement in plan.placements} == {0, 1}
    assert len(plan.images) == 3


def test_the_sweep_covers_all_sizes_at_the_largest_other_one():
    settings = load_bench("transfer", []).settings
    assert combinations(settings) == [(1, 8), (4, 8), (8, 8), (16, 1), (16, 2), (16, 4), (16, 8)]  # pyright: ignore[reportArgumentType]
    assert combinations(load_bench("transfer", ["quick=true"]).settings) == [(16, 8)]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seed", range(5))
def test_a_link_carries_its_rate_and_saves_nothing_up(seed: int):
    rng = np.random.default_rng(seed)
    now_s = free_s = 0.0
    for size in rng.integers(1, 1000, 50).tolist():
        now_s += float(rng.exponential(0.3))
        later_s = next_free_s(free_s, now_s, size, 1000.0)
        assert later_s == pytest.approx(max(free_s, now_s) + size / 1000)
        free_s = later_s
