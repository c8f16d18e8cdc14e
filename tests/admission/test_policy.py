"""Admission on one attribute against brute force, and all recorded instances. Overlapping rules: `test_overlap.py`."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.policy import (
    MiniBatchPolicy,
    Policy,
    TrainBatchPolicy,
    Waiting,
    make_policy,
    mini_batch_composition,
)
from knittrans_jax.admission.rules import Quota, Rules, resolve, rules_of
from knittrans_jax.admission.state import AdmissionState, plan_without_layout
from knittrans_jax.config import BatchConfig, Bound, Config
from knittrans_jax.trajectory import MiniBatchPlan, PlannedGroup

from . import brute
from .model import make_config, make_group
from .test_rules import VALUES, Case, feasible_rules

CASES = json.loads((Path(__file__).parents[1] / "cases" / "admission.json").read_text())


def plan_of(state: AdmissionState, group_ids: list[int]) -> MiniBatchPlan:
    """A plan that states the groups and no layout."""
    groups = (PlannedGroup(group_id=g, unit="host0", rewards=(0.0, 0.0), payload_bytes=500) for g in group_ids)
    return plan_without_layout(state, groups)


def add_ready(state: AdmissionState, attributes: dict[str, str], prompt: str | None = None) -> int:
    group_id = state.next_group_id
    state.apply(
        ev.Leased(
            time_s=0.0,
            group_id=group_id,
            prompt_id=prompt or f"p{group_id}",
            epoch=0,
            attributes=attributes,
            host="host0",
            version=0,
        )
    )
    state.apply(ev.Started(time_s=0.0, group_id=group_id))
    state.apply(ev.Ready(time_s=0.0, group=make_group(group_id, "host0", (0, 0), 0), episode_retries=0))
    return group_id


def admit(state: AdmissionState, group_ids: list[int]) -> None:
    state.apply(ev.Admitted(time_s=0.0, plan=plan_of(state, group_ids)))


def fill(state: AdmissionState, kinds: list[dict[str, str]]) -> None:
    """Admits these groups, in whatever mini-batches of the right size."""
    ids = [add_ready(state, attributes) for attributes in kinds]
    size = state.rules.mini_batch_groups
    assert len(ids) % size == 0
    for start in range(0, len(ids), size):
        admit(state, ids[start : start + size])


def rules_of_case(case: dict) -> Rules:
    """The rules of a recorded instance; every attribute combination that may still arrive has prompts enough."""
    quotas: dict[str, dict[str, Bound]] = {}
    for quota in case["quotas"]:
        quotas.setdefault(quota["attribute"], {})[quota["value"]] = Bound(
            min=quota["min"], max=min(quota["max"], case["groups"])
        )
    config = BatchConfig(
        groups=case["groups"], mini_batches=case["mini_batches"], trajectories_per_group=2, quotas=quotas
    )
    return resolve(config, [attributes for attributes in case["universe"] for _ in range(case["groups"])])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_recorded_instance_is_decided_as_recorded(case: dict):
    rules = rules_of_case(case)
    state = AdmissionState(rules)
    fill(state, case["admitted"])
    for attributes in case["ready"]:
        add_ready(state, attributes)
    choice = MiniBatchPolicy().next_mini_batch(state)
    assert isinstance(choice, tuple) == case["admissible"]
    if isinstance(choice, tuple):
        admit(state, [group.group_id for group in choice])  # refuses what breaks a rule
    else:
        assert choice.missing >= 1


@given(feasible_rules(), st.data())
def test_over_whole_batches_admission_is_safe_work_conserving_and_lexicographically_oldest(
    case: Case, data: st.DataObject
):
    rules, bounds = case
    values = VALUES[: len(bounds)]
    state, policy = AdmissionState(rules), MiniBatchPolicy()
    size = rules.mini_batch_groups
    for _ in range(2 * rules.mini_batches):
        ready = [values.index(g.kind[0]) for g in sorted_ready(state)]
        for value in data.draw(st.lists(st.sampled_from(values), max_size=max(0, 9 - len(ready)))):
            add_ready(state, {"domain": value})
        groups = sorted_ready(state)
        ready = [values.index(g.kind[0]) for g in groups]
        admitted = brute.counts_of(state.batch.admitted, values)
        expected = brute.oldest_safe(rules.groups, bounds, admitted, ready, size)
        choice = policy.next_mini_batch(state)
        if expected is None:
            assert isinstance(choice, Waiting)
            assert choice.missing >= 1
            continue
        assert isinstance(choice, tuple)
        assert [g.group_id for g in choice] == [groups[i].group_id for i in expected]
        step = state.batch.train_step
        admit(state, [group.group_id for group in choice])
        after = brute.counts_of(state.batch.admitted, values)
        assert brute.completes(rules.groups, bounds, after)
        if state.batch.train_step > step:
            whole = tuple(a + [ready[i] for i in expected].count(v) for v, a in enumerate(admitted))
            assert whole in brute.batches(rules.groups, bounds)
        state.accounts.check()


def sorted_ready(state: AdmissionState) -> list:
    return sorted((g for queue in state.ready.values() for g in queue.values()), key=lambda g: g.order)


def test_a_prompt_comes_once_in_a_train_batch_and_again_in_the_next():
    state = AdmissionState(Rules(2, 2, None, {}))
    policy = MiniBatchPolicy()
    first, again, other = (add_ready(state, {}, prompt) for prompt in ("p", "p", "q"))
    for expected in (first, other, again):
        choice = policy.next_mini_batch(state)
        assert isinstance(choice, tuple)
        assert [g.group_id for g in choice] == [expected]
        admit(state, [expected])


def test_only_a_repeated_prompt_is_waited_for_by_name():
    state = AdmissionState(Rules(2, 2, None, {}))
    admit(state, [add_ready(state, {}, "p")])
    add_ready(state, {}, "p")
    choice = MiniBatchPolicy().next_mini_batch(state)
    assert isinstance(choice, Waiting)
    assert choice.rule == "no prompt twice in a train batch"


def test_waiting_names_rule_value_missing_and_in_flight():
    rules = resolve(
        BatchConfig(
            groups=4,
            mini_batches=2,
            trajectories_per_group=2,
            quotas={"domain": {"a": Bound(min=2), "b": Bound(max=2)}},
        ),
        [{"domain": value} for value in "aabbb" for _ in range(3)],
    )
    state = AdmissionState(rules)
    fill(state, [{"domain": "b"}, {"domain": "b"}])
    add_ready(state, {"domain": "b"})
    add_ready(state, {"domain": "a"})
    state.apply(
        ev.Leased(
            time_s=0,
            group_id=state.next_group_id,
            prompt_id="x",
            epoch=0,
            attributes={"domain": "a"},
            host="h",
            version=0,
        )
    )
    choice = MiniBatchPolicy().next_mini_batch(state)
    assert choice == Waiting("batch.quotas.domain.min", "a", 1, 1)


def test_a_colocated_batch_begins_only_when_it_is_whole():
    state = AdmissionState(Rules(4, 2, None, {}))
    policy = make_policy("mini_batch", "colocated")
    for _ in range(3):
        add_ready(state, {})
        assert isinstance(policy.next_mini_batch(state), Waiting)
    add_ready(state, {})
    choice = policy.next_mini_batch(state)
    assert isinstance(choice, tuple)
    admit(state, [g.group_id for g in choice])
    assert isinstance(policy.next_mini_batch(state), tuple), "the rest of a begun batch follows"


# --- baselines ---------------------------------------------------------------------------------------------------------


def play(policy: Policy, rules: Rules, data: st.DataObject, steps: int = 2) -> list[list[list[str]]]:
    """Values by mini-batch and train batch while ready groups come in any order; each is admitted as soon as it may be."""
    state, values = AdmissionState(rules), sorted(rules.quotas)
    batches: list[list[list[str]]] = []
    order = data.draw(st.permutations([v for v in values for _ in range(rules.quotas[v].most * steps)]))
    for value in [*order, *[v for v in values for _ in range(rules.groups * steps)]]:
        add_ready(state, {"domain": value})
        while isinstance(choice := policy.next_mini_batch(state), tuple):
            if not state.batch.mini_batches:
                batches.append([])
            assert [g.order for g in choice] == sorted(g.order for g in choice)
            assert len(choice) == rules.mini_batch_groups
            batches[-1].append([g.kind[0] for g in choice])
            admit(state, [g.group_id for g in choice])
            if len(batches) == steps and len(batches[-1]) == rules.mini_batches:
                return batches
    raise AssertionError(f"stuck: {policy.next_mini_batch(state)}")


@given(feasible_rules(), st.data())
def test_train_batch_cuts_its_mini_batches_from_a_whole_valid_batch_in_order_of_age(case: Case, data: st.DataObject):
    rules, bounds = case
    state, policy, values = AdmissionState(rules), TrainBatchPolicy(), VALUES[: len(bounds)]
    for value in data.draw(st.lists(st.sampled_from(values), max_size=10)):
        add_ready(state, {"domain": value})
    groups = sorted_ready(state)
    empty = tuple(0 for _ in bounds)
    whole = brute.oldest_safe(rules.groups, bounds, empty, [values.index(g.kind[0]) for g in groups], rules.groups)
    if whole is None:
        assert isinstance(policy.next_mini_batch(state), Waiting)
        return
    admitted: list[int] = []
    while state.batch.train_step == 0:
        choice = policy.next_mini_batch(state)
        assert isinstance(choice, tuple)
        admit(state, [g.group_id for g in choice])
        admitted += [g.group_id for g in choice]
    assert admitted == [groups[i].group_id for i in whole]


@given(feasible_rules(), st.data())
def test_proportional_repeats_the_composition_in_every_mini_batch_and_is_exact_over_the_batch(
    case: Case, data: st.DataObject
):
    composition = case[0].composition
    config = parse(case[0], "proportional")
    rules = rules_of(config, [{"domain": v} for v in case[0].quotas for _ in range(case[0].groups)])
    assert sum(composition.values()) == rules.groups
    assert all(case[0].quota(kind).least <= count <= case[0].quota(kind).most for kind, count in composition.items())
    for batch in play(make_policy("proportional", "disaggregated"), rules, data):
        for (value,), count in rules.composition.items():
            counts = [mini_batch.count(value) for mini_batch in batch]
            assert sum(counts) == count
            assert all(count // rules.mini_batches <= one <= -(-count // rules.mini_batches) for one in counts)


def parse(rules: Rules, policy: str) -> Config:
    """A run with these rules."""
    quotas = {v: {"min": q.least, "max": q.most} for v, q in rules.quotas.items()}
    return make_config(
        batch={
            "groups": rules.groups,
            "mini_batches": rules.mini_batches,
            "trajectories_per_group": 2,
            "quotas": {"domain": quotas},
        },
        train__updates=rules.mini_batches,
        admission__policy=policy,
    )


def test_what_equal_shares_leave_over_is_dealt_to_the_mini_batches_in_turn():
    rules = Rules(8, 4, "domain", {"a": Quota(3, 3), "b": Quota(5, 5)})
    rows = [mini_batch_composition(rules, j) for j in range(4)]
    assert [(row[("a",)], row[("b",)]) for row in rows] == [(1, 1), (1, 1), (1, 1), (0, 2)]


def test_fifo_takes_the_oldest_whatever_they_are():
    config = parse(Rules(4, 2, "domain", {"a": Quota(2, 2), "b": Quota(2, 2)}), "fifo")
    rules = rules_of(config, [{"domain": v} for v in "aabb"])
    state, policy = AdmissionState(rules), make_policy("fifo", "disaggregated")
    ids = [add_ready(state, {"domain": v}) for v in "aaaab"]
    for expected in (ids[:2], ids[2:4]):
        choice = policy.next_mini_batch(state)
        assert isinstance(choice, tuple)
        assert [g.group_id for g in choice] == expected
        admit(state, expected)
    assert isinstance(policy.next_mini_batch(state), Waiting)
    assert rules.quota(("a",)) == Quota(2, 2), "the launch gate still goes by the quotas"
