import pytest
from hypothesis import given
from hypothesis import strategies as st

from knittrans_jax.staleness import Staleness, staleness_of, summarise
from knittrans_jax.trajectory import TrajectoryMeta


def trajectory(versions: list[int], done: int) -> TrajectoryMeta:
    return TrajectoryMeta(
        length_tokens=len(versions) + 3,
        sampled_tokens=len(versions),
        reward=0.0,
        version_min=min(versions),
        version_max=max(versions),
        version_sum=sum(versions),
        turns=1,
        questions=1,
        exact=0,
        media=(),
        started_s=0.0,
        finished_s=1.0,
        version_done=done,
    )


@given(st.data())
def test_gap_is_in_flight_plus_in_queue_and_architectural_is_what_lock_step_does_not_explain(data: st.DataObject):
    versions = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=30))
    done = data.draw(st.integers(max(versions), 1100))
    version = data.draw(st.integers(done, 1200))
    mini_batch = data.draw(st.integers(0, 16))
    s = staleness_of(trajectory(versions, done), version=version, mini_batch=mini_batch)
    assert s.gap == pytest.approx(s.in_flight + s.in_queue, abs=1e-9)
    assert s.gap == pytest.approx(version - sum(versions) / len(versions), abs=1e-9)
    assert s.worst == version - min(versions)
    assert s.in_queue == version - done
    assert s.architectural == s.gap - mini_batch


@given(st.integers(0, 50), st.integers(1, 16), st.integers(1, 99), st.data())
def test_lock_step_has_architectural_staleness_exactly_zero(step: int, k: int, tokens: int, data: st.DataObject):
    j = data.draw(st.integers(0, k - 1))
    one = trajectory([step * k] * tokens, step * k)
    assert staleness_of(one, version=step * k + j, mini_batch=j).architectural == 0.0


def test_the_summary_keeps_the_sign_and_reports_the_clipped_mean_beside_it():
    rows = [Staleness(0, 0, 0, 0, 0, value) for value in (-2.0, 0.0, 4.0)]
    summary = summarise(rows)
    assert summary.architectural.mean == pytest.approx(2 / 3)
    assert summary.architectural_clipped_mean == pytest.approx(4 / 3)
    assert (summary.architectural.p50, summary.architectural.max) == (0.0, 4.0)
    assert summary.architectural.p95 == pytest.approx(3.6)
    assert (summary.trajectories, summary.unit) == (3, "updates")


def test_in_train_steps_everything_is_divided_by_k():
    rows = [Staleness(8, 8, 4, 4, 2, 6)]
    updates, steps = summarise(rows), summarise(rows, mini_batches=4)
    assert (updates.gap.mean, steps.gap.mean) == (8.0, 2.0)
    assert steps.architectural_clipped_mean == 1.5
    assert steps.unit == "train_steps"


def test_a_run_without_trajectories_has_a_summary_of_zeros():
    summary = summarise([])
    assert summary.trajectories == 0
    assert summary.gap.max == summary.architectural_clipped_mean == 0.0
