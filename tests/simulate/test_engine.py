"""The real controller in virtual time, held to what can be worked out by hand."""

import dataclasses
import random

import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.controller import Controller
from knittrans_jax.admission.gate import LaunchGate
from knittrans_jax.admission.policy import make_policy
from knittrans_jax.admission.prompts import PromptOrder
from knittrans_jax.admission.rules import Rules, resolve
from knittrans_jax.admission.state import AdmissionState, fold
from knittrans_jax.config import BatchConfig, Bound
from knittrans_jax.simulate.engine import TRAJECTORY, Flight, SimRun, Simulation, Timing

GROUPS, MINI_BATCHES = 16, 4
PROMPTS = [(f"{value}{i}", {"domain": value}) for value in "ab" for i in range(200)]
RULES = resolve(
    BatchConfig(
        groups=GROUPS,
        mini_batches=MINI_BATCHES,
        trajectories_per_group=2,
        quotas={"domain": {"a": Bound(min=12, max=12), "b": Bound(min=4, max=4)}},
    ),
    [attributes for _, attributes in PROMPTS],
)
TIMING = Timing(train_s=lambda update: 1.0, pull_s=0.0, publish_s=0.0, publish="train_batch", slots=2 * GROUPS)


def simulate(
    latency_s: float,
    *,
    sigma: float = 0.0,
    policy: str = "mini_batch",
    schedule: str = "disaggregated",
    look_ahead: int = 0,
    timing: Timing = TIMING,
    rules: Rules = RULES,
    dropped_share: float = 0.0,
    seed: int = 0,
) -> tuple[SimRun, list[ev.AnyEvent], AdmissionState]:
    """Ten train batches of groups whose flight takes `latency_s`, spread log-normally about it."""
    rng = random.Random(seed)
    state = AdmissionState(rules)
    controller = Controller(
        state,
        PromptOrder(rules, PROMPTS, seed),
        make_policy(policy, schedule),
        LaunchGate(rules, look_ahead, 10),
        admit_ahead=1,
    )
    events: list[ev.AnyEvent] = []

    def flight(leased: ev.Leased, now_s: float) -> Flight:
        dropped = "all alike" if rng.random() < dropped_share else None
        members = (msgspec.structs.replace(TRAJECTORY, reward=rng.random()),)
        return Flight(latency_s * rng.lognormvariate(0.0, sigma), dropped=dropped, members=members)

    run = Simulation(controller, timing, flight, updates=10 * MINI_BATCHES, on_event=events.append).run()
    return run, events, state


def architectural(run: SimRun) -> np.ndarray:
    return np.array([staleness.architectural for staleness in run.staleness])


def test_in_lock_step_nothing_is_stale_and_every_batch_waits_for_its_flight():
    run, _, _ = simulate(5.0, schedule="colocated")
    assert run.stuck is None
    assert not architectural(run).any()
    # A batch is launched when the one before has been trained on: 5 s of flight, then 4 updates of 1 s.
    assert run.updated_s == pytest.approx([9.0 * (u // 4) + 6.0 + u % 4 for u in range(40)])
    assert run.waited_s == pytest.approx([5.0 if u % 4 == 0 else 0.0 for u in range(40)])


def test_with_a_whole_batch_of_look_ahead_the_trainer_waits_for_the_first_flight_alone():
    run, _, _ = simulate(3.0, look_ahead=GROUPS)
    assert run.waited_s == pytest.approx([3.0] + [0.0] * 39)
    # From the second batch on, groups were sampled by the version one batch before: 4 updates older than in lock step.
    assert set(architectural(run)[4 * GROUPS :]) == {4.0}


def test_early_mini_batches_are_less_stale_than_whole_batches_at_the_same_speed():
    step, stale = {}, {}
    for policy, look_ahead in (("mini_batch", GROUPS // 2), ("train_batch", GROUPS)):
        run, _, _ = simulate(2.0, sigma=0.4, policy=policy, look_ahead=look_ahead)
        step[policy] = run.updated_s[-1] - run.updated_s[7]
        stale[policy] = architectural(run)[2 * GROUPS :].mean()
    assert step["mini_batch"] <= 1.02 * step["train_batch"]
    assert stale["mini_batch"] < 0.7 * stale["train_batch"]


def test_swapped_weights_give_a_trajectory_the_mean_version_of_its_flight():
    timing = dataclasses.replace(TIMING, publish="update", in_flight="swap")
    run, _, _ = simulate(3.5, look_ahead=GROUPS, timing=timing)
    assert any(staleness.in_flight > 0 for staleness in run.staleness)
    for staleness in run.staleness:
        assert staleness.gap == pytest.approx(staleness.in_flight + staleness.in_queue)
        assert staleness.worst >= staleness.gap - 1e-9


def test_a_filter_that_drops_everything_ends_the_run_saying_so():
    rules = dataclasses.replace(RULES, drop_equal_rewards=True)  # a simulated group has one trajectory
    run, events, _ = simulate(2.0, rules=rules)
    assert run.stuck is not None
    assert "all that comes is dropped" in run.stuck
    assert run.filtered == sum(isinstance(event, ev.Filtered) for event in events) > 0
    assert not run.updated_s


def test_nothing_beyond_the_staleness_bound_is_trained_on():
    rules = dataclasses.replace(RULES, staleness_bound=4, on_stale="retry")
    run, events, _ = simulate(6.0, sigma=0.5, look_ahead=3 * GROUPS, rules=rules)
    assert run.stuck is None
    assert any(isinstance(event, ev.Expired) for event in events)
    assert max(staleness.worst for staleness in run.staleness) <= 4


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(
    seed=st.integers(0, 10**6),
    policy=st.sampled_from(["mini_batch", "train_batch", "proportional", "fifo"]),
    sigma=st.sampled_from([0.0, 0.6, 1.5]),
    look_ahead=st.integers(0, 20),
    dropped_share=st.sampled_from([0.0, 0.3]),
)
def test_every_batch_keeps_its_quotas_and_the_events_replay_to_the_same_state(
    seed: int, policy: str, sigma: float, look_ahead: int, dropped_share: float
):
    run, events, state = simulate(
        2.0, sigma=sigma, policy=policy, look_ahead=look_ahead, dropped_share=dropped_share, seed=seed
    )
    assert run.stuck is None
    assert len(run.updated_s) == 40
    if policy != "fifo":
        assert [run.kinds[i : i + GROUPS].count(("a",)) for i in range(0, 10 * GROUPS, GROUPS)] == [12] * 10
    state.accounts.check()
    assert fold(RULES, events) == state
    again = simulate(2.0, sigma=sigma, policy=policy, look_ahead=look_ahead, dropped_share=dropped_share, seed=seed)
    assert again[1] == events
