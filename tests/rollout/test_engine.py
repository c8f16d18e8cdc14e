import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest

from knittrans_jax.launch.messages import EvalLease, Lease
from knittrans_jax.observe.compilations import CompilationCounter
from knittrans_jax.rollout.engine import Engine, EngineBusy, EngineError
from knittrans_jax.rollout.runs import FinishedGroup, Results
from knittrans_jax.rollout.tasks.base import Turn
from knittrans_jax.rollout.tasks.grid_lookup import GridLookup, GridLookupEpisode
from knittrans_jax.trajectory import NOT_SAMPLED, Trajectory

from .cases import (
    MEMBERS,
    MODEL,
    PARAMS,
    ROLLOUT,
    Misbehaving,
    RaisesOnSecondTurn,
    RewardsNan,
    ShowsTooMuch,
    Wrapped,
    engine,
    leases,
    other_params,
    recomputed_logprobs,
)

OTHER = other_params(1)


def answers_of(trajectory: Trajectory) -> list[np.ndarray]:
    """The sampled runs of a trajectory."""
    tokens, sampled = trajectory.tokens_T, trajectory.sampled_T
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sampled.astype(np.int8), [0]])))
    return [tokens[begin:end] for begin, end in edges.reshape(-1, 2)]


def assert_same_samples(one: FinishedGroup, other: FinishedGroup) -> None:
    for a, b in zip(one.payload.trajectories, other.payload.trajectories, strict=True):
        np.testing.assert_array_equal(a.tokens_T, b.tokens_T)
        np.testing.assert_allclose(a.behaviour_logprobs_T, b.behaviour_logprobs_T, atol=1e-5)


def by_id(results: Results) -> dict[int, FinishedGroup]:
    return {group.meta.group_id: group for group in results.finished}


@pytest.mark.newest
def test_behaviour_logprobs_are_those_of_a_full_forward_pass():
    task = GridLookup({}, 0)
    made = engine(task)
    compared = 0
    for version, params in enumerate((PARAMS, OTHER)):
        # The second round shows the same pictures under new weights: features of the old ones would be seen here.
        made.load_version(version, params)
        results = made.generate(leases(0, 1, 2), MEMBERS)
        assert made.counters["images_encoded"] == 3 * (version + 1)
        for group, member in itertools.product(results.finished, range(MEMBERS)):
            trajectory = group.payload.trajectories[member]
            expected = recomputed_logprobs(params, group, member, task)
            sampled = trajectory.sampled_T
            # Other shapes round otherwise, and otherwise in every XLA; other features differ by 1e-2 and more.
            np.testing.assert_allclose(trajectory.behaviour_logprobs_T[sampled], expected[sampled], atol=5e-5)
            assert not trajectory.behaviour_logprobs_T[~sampled].any()
            compared += int(sampled.sum())
    assert compared > 100


def test_the_same_pictures_are_encoded_again_under_new_weights_only():
    made = engine()
    made.generate(leases(5), MEMBERS)
    made.generate([Lease(group_id=6, prompt_id="train-000005", least_version=0)], MEMBERS)
    assert made.counters["images_encoded"] == 1
    made.load_version(1, OTHER)
    made.generate([Lease(group_id=7, prompt_id="train-000005", least_version=0)], MEMBERS)
    assert made.counters["images_encoded"] == 2


class CutTextDifferently(GridLookup):
    """Shows every episode the same tokens, with more and more empty texts between, so that no two turns look equal."""

    opened = 0

    def episode(self, prompt_id: str) -> Any:
        empty, self.opened = self.opened, self.opened + 1

        class Cut(Wrapped):
            def first(self) -> Turn:
                picture, text = super().first().parts
                return Turn((picture, *[""] * empty, text))

        return Cut(super().episode(prompt_id))


def test_a_groups_prompt_is_prefilled_once_and_sampled_as_if_each_member_had_its_own():
    shared, apart = engine(), engine(CutTextDifferently({}, 0))
    one = shared.generate(leases(0), 3).finished[0]
    other = apart.generate(leases(0), 3).finished[0]
    assert (shared.counters["prompts_prefilled"], shared.counters["prompt_copies"]) == (1, 2)
    assert (apart.counters["prompts_prefilled"], apart.counters["prompt_copies"]) == (3, 0)
    assert_same_samples(one, other)
    prompt = int(np.argmax(one.payload.trajectories[0].sampled_T))
    assert apart.counters["prefill_tokens"] - shared.counters["prefill_tokens"] == 2 * prompt
    firsts = {answers_of(t)[0].tobytes() for t in one.payload.trajectories}
    assert len(firsts) > 1  # members share the prompt, not the draws


def test_draws_do_not_depend_on_slots_or_company():
    alone = by_id(engine().generate(leases(3), MEMBERS))
    crowded = by_id(engine(slots=5).generate(leases(0, 1, 2, 3, 4), MEMBERS))
    assert_same_samples(alone[3], crowded[3])
    reseeded = by_id(engine(seed=1).generate(leases(3), MEMBERS))
    assert any(
        not np.array_equal(a.tokens_T, b.tokens_T)
        for a, b in zip(alone[3].payload.trajectories, reseeded[3].payload.trajectories, strict=True)
    )


def test_only_the_ids_that_may_be_sampled_are_sampled_however_likely_the_others_are():
    task = GridLookup({}, 0)
    head = np.asarray(PARAMS["decoder"]["head"]).copy()
    others = [i for i in range(task.vocabulary.size) if i not in task.sampled_ids]
    head[others] *= 1000.0  # without the mask one of these would be the likeliest nearly always
    made = engine(task, version=None)
    made.load_version(0, PARAMS | {"decoder": PARAMS["decoder"] | {"head": head}})
    results = made.generate(leases(*range(60)), MEMBERS)
    made.submit_eval(EvalLease(eval_id=0, version=0, prompt_ids=("heldout-000000",)))
    made.finish()
    sampled = np.concatenate([t.tokens_T[t.sampled_T] for g in results.finished for t in g.payload.trajectories])
    assert len(sampled) > 1000
    assert set(sampled.tolist()) == set(task.sampled_ids)  # all of these, none of the others


def test_answers_are_ragged_and_end_with_the_end_token_or_at_the_limit():
    task = GridLookup({}, 0)
    results = engine(task).generate(leases(*range(10)), MEMBERS)
    lengths = set()
    for group in results.finished:
        grid = task.grid(f"train-{group.meta.group_id:06d}")
        for trajectory, meta in zip(group.payload.trajectories, group.meta.trajectories, strict=True):
            answers = answers_of(trajectory)
            exact = 0
            for answer, question in zip(answers, grid.questions, strict=True):
                ended = answer[-1] == task.vocabulary.end
                assert task.vocabulary.end not in answer[:-1]
                assert ended or len(answer) == ROLLOUT.max_answer_tokens
                lengths.add((len(answer), bool(ended)))
                exact += bool(ended) and task.vocabulary.decode(answer[:-1]) == grid.truth(question)
            assert (meta.exact, meta.questions, meta.turns) == (exact, 3, 3)
            assert meta.length_tokens == len(trajectory.tokens_T)
            assert meta.sampled_tokens == sum(map(len, answers))
            assert meta.media == (0, 0, 0)
    assert {(1, True), (2, True), (3, True), (4, True), (4, False)} <= lengths


def test_a_group_is_described_as_it_is():
    now = iter(range(10**6))
    made = Engine(MODEL, GridLookup({}, 0), ROLLOUT, 0, unit="host7", clock=lambda: float(next(now)))
    made.load_version(4, PARAMS)
    made.submit(leases(0)[0], MEMBERS)
    made.step()
    made.announce(6)
    group = made.finish().finished[0]
    assert (group.meta.group_id, group.meta.unit) == (0, "host7")
    assert group.meta.payload_bytes == group.payload.size_bytes
    assert len(group.meta.media) == len(group.payload.media) == 1
    media = group.meta.media[0]
    assert (media.grid_h, media.grid_w, media.size_bytes) == (4, 4, 256)
    for trajectory, meta in zip(group.payload.trajectories, group.meta.trajectories, strict=True):
        assert meta.started_s < meta.finished_s
        assert (meta.version_min, meta.version_max, meta.version_mean) == (4, 4, 4)
        assert meta.version_done == 6
        assert (trajectory.versions_T[~trajectory.sampled_T] == NOT_SAMPLED).all()


def test_a_swap_between_tokens_tags_each_token_with_the_version_that_sampled_it():
    made = engine()
    for lease in leases(0, 1):
        made.submit(lease, MEMBERS)
    while made.counters["sampled_tokens"] < 20:
        made.step()
    made.announce(3)
    assert made.wanted_version == 3
    made.load_version(3, OTHER)
    before = made.counters["sampled_tokens"]
    finished = made.finish().finished
    tags = np.concatenate([t.versions_T[t.sampled_T] for g in finished for t in g.payload.trajectories])
    assert set(tags.tolist()) == {0, 3}
    assert (tags == 0).sum() == before
    for group in finished:
        for trajectory, meta in zip(group.payload.trajectories, group.meta.trajectories, strict=True):
            versions = trajectory.versions_T[trajectory.sampled_T]
            assert (np.diff(versions) >= 0).all()
            assert (meta.version_min, meta.version_max) == (versions[0], versions[-1])
            assert meta.version_sum == versions.sum()
    assert any(meta.version_min < meta.version_max for g in finished for meta in g.meta.trajectories)


def test_in_flight_trajectory_gives_every_trajectory_one_version():
    made = engine(in_flight="trajectory")
    made.submit(leases(0)[0], MEMBERS)
    while made.counters["sampled_tokens"] < 8:
        made.step()
    made.announce(1)
    made.submit(leases(1)[0], MEMBERS)  # there is room for it, but it begins with the new weights
    assert made.wanted_version is None
    with pytest.raises(EngineBusy, match="trajectories of version 0 are in flight"):
        made.load_version(1, OTHER)
    while made.wanted_version is None:
        assert made.step()
    assert made.take_results().finished[0].meta.trajectories[0].version_max == 0
    made.load_version(1, OTHER)
    (group,) = made.finish().finished
    assert {(t.version_min, t.version_max) for t in group.meta.trajectories} == {(1, 1)}


@pytest.mark.parametrize(
    ("misbehaviour", "reason"),
    [
        (RaisesOnSecondTurn, "ConnectionError: the tool is gone"),
        (RewardsNan, "ValueError: the reward is nan"),
        (ShowsTooMuch, "TrajectoryTooLong: .* more than rollout.cache_tokens = 48"),
    ],
)
def test_a_failing_episode_is_retried_then_its_group_fails_while_others_finish(
    misbehaviour: type[Wrapped], reason: str
):
    made = engine(Misbehaving({"train-000001": misbehaviour}), episode_retries=2)
    results = made.generate(leases(0, 1, 2), MEMBERS)
    assert set(by_id(results)) == {0, 2}
    (failure,) = results.failed
    assert failure.group_id == 1
    assert failure.episode_retries >= 2
    assert re.search(reason, failure.reason)
    assert made.counters["episode_retries"] == failure.episode_retries
    assert made.free_groups(MEMBERS) == 2
    assert not made.has_work


def test_an_episode_that_fails_once_is_sampled_anew():
    task = Misbehaving({"train-000000": RaisesOnSecondTurn}, failures=1)
    made = engine(task)
    calm = engine().generate(leases(0), MEMBERS).finished[0]
    group = made.generate(leases(0), MEMBERS).finished[0]
    assert group.episode_retries == made.counters["episode_retries"] == 1
    different = [
        not np.array_equal(a.tokens_T, b.tokens_T)
        for a, b in zip(group.payload.trajectories, calm.payload.trajectories, strict=True)
    ]
    assert sum(different) == 1  # new draws for the retried one, and the others as if nothing had happened
    member = different.index(True)
    sampled = group.payload.trajectories[member].sampled_T
    expected = recomputed_logprobs(PARAMS, group, member, task)
    np.testing.assert_allclose(
        group.payload.trajectories[member].behaviour_logprobs_T[sampled], expected[sampled], atol=1e-5
    )


def test_an_unknown_prompt_fails_its_group_alone():
    made = engine()
    results = made.generate([Lease(group_id=9, prompt_id="nowhere", least_version=0), *leases(0)], MEMBERS)
    assert "KeyError" in results.failed[0].reason
    assert set(by_id(results)) == {0}


def test_an_evaluation_holds_its_version_while_training_work_goes_on():
    made = engine()
    prompts = tuple(f"heldout-{i:06d}" for i in range(12))
    made.submit_eval(EvalLease(eval_id=5, version=0, prompt_ids=prompts))
    made.step()
    made.announce(1)
    for lease in leases(0, 1):
        made.submit(lease, MEMBERS)
    results = Results()
    while not results.evals:
        assert made.wanted_version is None
        with pytest.raises(EngineBusy, match="an evaluation holds version 0"):
            made.load_version(1, OTHER)
        made.step()
        taken = made.take_results()
        results.evals += taken.evals
        results.started += taken.started
        results.finished += taken.finished
    assert results.started[:1] == [0]  # as soon as the last prompts leave room, and before the evaluation is over
    (result,) = results.evals
    assert (result.eval_id, result.episodes, result.questions) == (5, 12, 36)
    assert result.held_s > 0
    assert made.counters["eval_behind_s"] > 0
    assert made.wanted_version == 1
    made.load_version(1, OTHER)
    results.finished += made.finish().finished
    assert set(by_id(results)) == {0, 1}


class Recording(GridLookup):
    """Keeps the answers of all episodes."""

    def __init__(self) -> None:
        super().__init__({}, 0)
        self.answers: list[tuple[str, list[str]]] = []

    def episode(self, prompt_id: str) -> GridLookupEpisode:
        episode = super().episode(prompt_id)
        self.answers.append((prompt_id, episode.answers))
        return episode


def test_an_evaluation_is_greedy_and_may_go_back_to_its_version():
    task = Recording()
    made = engine(task)
    prompts = tuple(f"heldout-{i:06d}" for i in range(6))
    answers = []
    for eval_id, version in enumerate((0, 1, 0)):
        made.submit_eval(EvalLease(eval_id=eval_id, version=version, prompt_ids=prompts))
        if version != made.version:
            assert made.wanted_version == version
            made.load_version(version, (PARAMS, OTHER)[version])
        assert made.finish().evals[0].eval_id == eval_id
        answers.append(task.answers)
        task.answers = []
    assert answers[0] == answers[2] != answers[1]


def test_a_failing_episode_counts_as_wrong_in_an_evaluation():
    made = engine(Misbehaving({"heldout-000001": RaisesOnSecondTurn}))
    made.submit_eval(EvalLease(eval_id=0, version=0, prompt_ids=("heldout-000000", "heldout-000001")))
    (result,) = made.finish().evals
    assert (result.episodes, result.questions) == (2, 6)
    assert made.counters["episodes_failed"] == 1


def test_a_group_waits_for_weights_that_are_new_enough():
    made = engine()
    for lease in (*leases(0, least_version=2), *leases(1)):
        made.submit(lease, MEMBERS)
    while made.step():
        pass
    assert set(by_id(made.take_results())) == {1}
    with pytest.raises(EngineError, match=r"1 groups .* wait"):
        made.finish()
    made.announce(2)
    assert made.wanted_version == 2
    made.load_version(2, OTHER)
    assert set(by_id(made.finish())) == {0}


def test_nothing_happens_while_paused_and_everything_goes_on_afterwards():
    made = engine()
    made.submit(leases(0)[0], MEMBERS)
    made.step()
    made.pause()
    before = dict(made.counters)
    assert not made.step()
    assert dict(made.counters) == before
    made.resume()
    assert_same_samples(made.finish().finished[0], engine().generate(leases(0), MEMBERS).finished[0])


@pytest.mark.newest
def test_nothing_compiles_after_the_first_weights():
    made = engine()
    counter = CompilationCounter()
    made.generate(leases(*range(5)), MEMBERS)
    made.load_version(1, OTHER)
    made.submit_eval(EvalLease(eval_id=0, version=1, prompt_ids=("heldout-000000",)))
    made.generate(leases(7), 3)
    assert counter.count == 0


def test_weights_that_are_not_finite_are_named():
    made = engine()
    broken = jax.tree.map(lambda x: np.asarray(x) * np.nan, PARAMS)
    made.load_version(8, broken)
    with pytest.raises(EngineError, match="weights of version 8"):
        made.generate(leases(0), MEMBERS)


def test_a_group_larger_than_the_engine_is_refused():
    with pytest.raises(EngineError, match=r"rollout\.slots = 8"):
        engine().submit(leases(0)[0], 9)
