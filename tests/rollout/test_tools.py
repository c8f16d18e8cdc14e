"""Tools that take time: the runner by itself, and episodes of the engine that wait on one."""

import asyncio
import dataclasses
import threading
import time
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from knittrans_jax.launch.messages import EvalLease
from knittrans_jax.rollout.engine import Engine, EngineBusy
from knittrans_jax.rollout.runs import FinishedGroup
from knittrans_jax.rollout.tasks.base import EmulatedToolCall, ToolCall, Turn
from knittrans_jax.rollout.tasks.grid_lookup import GridLookup
from knittrans_jax.rollout.tools import ToolResult, ToolRunner, ToolTimeout

from .cases import MEMBERS, MODEL, PARAMS, Wrapped, engine, leases, other_params, recomputed_logprobs, with_rollout

TURN = Turn(("?",))
OTHER = other_params(1)


def collect(runner: ToolRunner, count: int) -> dict[int, ToolResult]:
    deadline, found = time.monotonic() + 20, {}
    while len(found) < count:
        assert time.monotonic() < deadline, f"only {sorted(found)} came back"
        found |= {result.number: result for result in runner.take()}
        time.sleep(0.002)
    return found


@hypothesis.given(st.lists(st.floats(0, 12), max_size=10), st.floats(0.1, 3))
def test_emulated_calls_come_back_when_their_latency_is_over_or_at_the_deadline(latencies: list[float], step: float):
    now = 100.0
    runner = ToolRunner(10.0, monotonic=lambda: now)
    numbers = [runner.start(EmulatedToolCall("t", TURN, latency)) for latency in latencies]
    ended: dict[int, float] = {}
    while len(runner):
        for result in runner.take():
            assert result.number not in ended
            ended[result.number] = now - 100.0
            assert result.waited_s == pytest.approx(now - 100.0)
            assert isinstance(result.error, ToolTimeout) == (latencies[result.number] >= 10.0)
        now += step
    assert sorted(ended) == numbers
    for number, latency in enumerate(latencies):
        due = min(latency, 10.0)
        assert due - 1e-6 <= ended[number] <= due + step + 1e-6
    assert threading.active_count() < 50, "emulated calls occupy no thread"


def test_functions_and_coroutines_run_beside_the_caller_and_fail_by_themselves():
    runner = ToolRunner(10.0)
    both = threading.Barrier(2)  # two plain functions run at once

    def meets() -> Turn:
        both.wait(5)
        return TURN

    async def slow() -> Turn:
        await asyncio.sleep(0.05)
        return TURN

    def breaks() -> Turn:
        raise ConnectionError("gone")

    async def breaks_too() -> Turn:
        raise KeyError("gone")

    calls = [meets, meets, slow, breaks, breaks_too]
    for number, run in enumerate(calls):
        assert runner.start(ToolCall("t", run)) == number
    found = collect(runner, len(calls))
    assert [found[i].turn for i in range(3)] == [TURN] * 3
    assert [type(found[i].error) for i in (3, 4)] == [ConnectionError, KeyError]
    runner.close()


@pytest.mark.newest
def test_a_tool_that_hangs_ends_at_its_deadline_and_its_late_result_is_dropped():
    runner = ToolRunner(0.2)
    release, cancelled = threading.Event(), threading.Event()

    def hangs() -> Turn:
        release.wait(20)
        return TURN

    async def hangs_too() -> Turn:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return TURN

    runner.start(ToolCall("plain", hangs))
    runner.start(ToolCall("async", hangs_too))
    found = collect(runner, 2)
    assert all(isinstance(one.error, ToolTimeout) for one in found.values())
    assert "tool 'plain' did not answer within rollout.tool_timeout_s = 0.2" in str(found[0].error)
    assert cancelled.wait(5)
    release.set()
    deadline = time.monotonic() + 5
    while runner.late_results < 1 and time.monotonic() < deadline:
        assert runner.take() == []
        time.sleep(0.005)
    assert runner.late_results >= 1
    runner.close()


def test_closing_does_not_wait_for_a_tool_that_hangs():
    runner = ToolRunner(60.0)
    release = threading.Event()

    def hangs() -> None:
        release.wait(20)

    runner.start(ToolCall("plain", hangs))
    runner.start(ToolCall("async", never))
    began = time.monotonic()
    runner.close()
    assert time.monotonic() - began < 2
    release.set()


async def never() -> Turn:
    await asyncio.sleep(60)
    return TURN


# --- the engine ---------------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Tooled(GridLookup):
    """grid-lookup whose later turns come from a tool; `call` turns the next turn (None: the end) into a call, or raises."""

    def __init__(self, call: Any, last: bool = False, prompts: tuple[str, ...] | None = None):
        super().__init__({}, 0)
        self.limits = dataclasses.replace(self.limits, tool_calls=3)
        self.call, self.last, self.chosen = call, last, prompts

    def episode(self, prompt_id: str) -> Any:
        task, episode = self, super().episode(prompt_id)
        if self.chosen is not None and prompt_id not in self.chosen:
            return episode

        class Waits(Wrapped):
            def respond(self, answer: str) -> Any:
                turn = super().respond(answer)
                return turn if turn is None and not task.last else task.call(turn)

        return Waits(episode)


def emulated(latency_s: float) -> Any:
    return lambda turn: EmulatedToolCall("camera", turn, latency_s)


def tooled(task: Tooled, clock: Clock | None = None, **changes: Any) -> Engine:
    made = Engine(MODEL, task, with_rollout(**changes), 0, unit="host0", monotonic=clock or time.monotonic)
    made.load_version(0, PARAMS)
    return made


def assert_same(one: FinishedGroup, other: FinishedGroup) -> None:
    for a, b in zip(one.payload.trajectories, other.payload.trajectories, strict=True):
        np.testing.assert_array_equal(a.tokens_T, b.tokens_T)
        np.testing.assert_array_equal(a.sampled_T, b.sampled_T)
        np.testing.assert_allclose(a.behaviour_logprobs_T, b.behaviour_logprobs_T, atol=1e-5)
    assert one.meta.media == other.meta.media
    for a, b in zip(one.meta.trajectories, other.meta.trajectories, strict=True):
        assert (a.turns, a.media, a.reward) == (b.turns, b.media, b.reward)


def step_until(made: Engine, condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        made.step()


@pytest.mark.parametrize("tool_waits", [0, 3, 100])
def test_an_episode_that_waited_goes_on_as_if_it_had_never_left(tool_waits: int):
    task = Tooled(emulated(0.001), last=True)
    made = tooled(task, tool_waits=tool_waits)
    waited = {group.meta.group_id: group for group in made.generate(leases(0, 1, 2, 3), MEMBERS).finished}
    plain = {group.meta.group_id: group for group in engine().generate(leases(0, 1, 2, 3), MEMBERS).finished}
    for group_id in range(4):
        assert_same(waited[group_id], plain[group_id])
        trajectory = waited[group_id].payload.trajectories[1]
        expected = recomputed_logprobs(PARAMS, waited[group_id], 1, task)
        sampled = trajectory.sampled_T
        np.testing.assert_allclose(trajectory.behaviour_logprobs_T[sampled], expected[sampled], atol=1e-5)
    counters = made.counters
    assert counters["tool_calls"] == counters["tool_calls_emulated"] == 4 * MEMBERS * 3
    assert counters["tool_waiting"] == 0
    assert (counters["tool_waits_in_slot"] > 0) == (tool_waits < 8)
    assert (counters["tool_prefilled_again"] > 0) == (tool_waits > 0)
    assert counters["tool_wait_s"] >= 0.001 * counters["tool_calls"]
    assert not made.has_work


def test_while_episodes_wait_their_slots_serve_others_and_they_come_before_new_work():
    clock = Clock()
    made = tooled(Tooled(emulated(5.0), prompts=("train-000000", "train-000001")), clock, in_flight="swap")
    for lease in leases(0, 1):  # 8 members: all slots
        made.submit(lease, MEMBERS)
    step_until(made, lambda: made.counters["tool_waiting"] == 8)
    assert made.free_groups(MEMBERS) == 2
    for lease in leases(2, 3, 4):
        made.submit(lease, MEMBERS)
    finished: list[int] = []

    def collect_finished() -> bool:
        finished.extend(group.meta.group_id for group in made.take_results().finished)
        return len(finished) >= 2

    step_until(made, collect_finished)
    assert set(finished) <= {2, 3, 4}, "the others still wait"
    clock.now_s += 5.0
    made.step()
    assert made.free_groups(MEMBERS) == 0
    step_until(made, lambda: made.counters["tool_waiting"] == 8)
    clock.now_s += 5.0
    results = made.finish()
    assert {group.meta.group_id for group in results.finished} | set(finished) == {0, 1, 2, 3, 4}


def raises(turn: Turn | None) -> ToolCall:
    def run() -> Turn:
        raise ConnectionError("the tool is gone")

    return ToolCall("gone", run)


def no_turn() -> Any:
    return "no turn"


@pytest.mark.parametrize(
    ("call", "reason", "changes"),
    [
        (raises, "ConnectionError: the tool is gone", {}),
        (raises, "ConnectionError: the tool is gone", {"tool_waits": 0}),
        (lambda turn: ToolCall("slow", never), "ToolTimeout: tool 'slow'", {"tool_timeout_s": 0.05}),
        (lambda turn: ToolCall("long", lambda: Turn(("x" * 40,))), "TrajectoryTooLong", {}),
        (lambda turn: ToolCall("odd", no_turn), "AttributeError|ValueError|TypeError", {}),
    ],
)
def test_a_tool_that_fails_or_is_too_slow_costs_its_group_alone(call: Any, reason: str, changes: dict[str, Any]):
    made = tooled(Tooled(call, prompts=("train-000001",)), episode_retries=1, **changes)
    results = made.generate(leases(0, 1, 2), MEMBERS)
    assert {group.meta.group_id for group in results.finished} == {0, 2}
    (failure,) = results.failed
    assert failure.group_id == 1
    assert failure.episode_retries >= 1
    assert any(name in failure.reason for name in reason.split("|")), failure.reason
    assert made.free_groups(MEMBERS) == 2
    assert not made.has_work
    assert made.counters["tool_waiting"] == 0
    made.close()


def test_a_tool_that_fails_once_is_asked_again_in_a_new_attempt():
    failures = [ConnectionError("once")]

    def call(turn: Turn | None) -> Any:
        def run() -> Turn | None:
            if failures:
                raise failures.pop()
            return turn

        return ToolCall("flaky", run)

    made = tooled(Tooled(call))
    (group,) = made.generate(leases(0), MEMBERS).finished
    assert group.episode_retries == made.counters["tool_failures"] == 1
    assert {trajectory.turns for trajectory in group.meta.trajectories} == {3}
    made.close()


def test_more_calls_than_the_task_announces_fail_the_episode():
    task = Tooled(emulated(0.0))
    task.limits = GridLookup({}, 0).limits
    results = tooled(task, episode_retries=0).generate(leases(0), MEMBERS)
    assert "limits.tool_calls is 0" in results.failed[0].reason


def test_weights_change_under_a_waiting_episode_only_where_they_may():
    clock = Clock()
    swapped, whole = (tooled(Tooled(emulated(1.0)), clock, in_flight=mode) for mode in ("swap", "trajectory"))
    for made in (swapped, whole):
        made.submit(leases(0)[0], MEMBERS)
        step_until(made, lambda made=made: made.counters["tool_waiting"] == MEMBERS)
        made.announce(1)
    assert whole.wanted_version is None
    with pytest.raises(EngineBusy, match="4 trajectories of version 0 are in flight"):
        whole.load_version(1, OTHER)
    assert swapped.wanted_version == 1
    swapped.load_version(1, OTHER)
    for made in (swapped, whole):
        while made.has_work:
            clock.now_s += 0.5
            made.step()
        (group,) = made.take_results().finished
        versions = {(t.version_min, t.version_max) for t in group.meta.trajectories}
        assert versions == ({(0, 1)} if made is swapped else {(0, 0)})


def test_an_evaluation_waits_for_its_tools_and_holds_its_version():
    made = tooled(Tooled(emulated(0.01)))
    made.submit_eval(EvalLease(eval_id=0, version=0, prompt_ids=("heldout-000000", "heldout-000001")))
    step_until(made, lambda: made.counters["tool_waiting"] == 2)
    made.announce(1)
    assert made.wanted_version is None
    (result,) = made.finish().evals
    assert (result.episodes, result.questions) == (2, 6)
