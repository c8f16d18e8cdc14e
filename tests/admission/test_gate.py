from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.gate import LaunchGate
from knittrans_jax.admission.policy import MiniBatchPolicy
from knittrans_jax.admission.rules import Quota, Rules
from knittrans_jax.admission.state import AdmissionState

from .model import make_group
from .test_policy import admit
from .test_rules import VALUES, Case, feasible_rules
from .test_state import consumed

EXACT = Rules(8, 4, "domain", {"a": Quota(6, 6), "b": Quota(2, 2)})
A, B = ("a",), ("b",)


def published(state: AdmissionState, version: int = 0) -> AdmissionState:
    state.apply(ev.Published(time_s=0, version=version))
    return state


def lease(state: AdmissionState, kind: tuple[str, ...], gate: LaunchGate | None = None) -> int:
    group_id = state.next_group_id
    event = ev.Leased(
        time_s=0,
        group_id=group_id,
        prompt_id=f"p{group_id}",
        epoch=0,
        attributes={"domain": kind[0]} if kind else {},
        host="h",
        version=state.published,
    )
    state.apply(event)
    if gate is not None:
        gate.observe(state, event)
    return group_id


def launch_all(gate: LaunchGate, state: AdmissionState) -> dict[tuple[str, ...], int]:
    while (kind := gate.next_kind(state, lambda _: True)) is not None:
        lease(state, kind)
    return dict(state.accounts.live_by_kind)


def test_nothing_is_launched_before_the_first_version():
    assert not LaunchGate(EXACT, 4).allows(AdmissionState(EXACT), A)


def test_without_look_ahead_exactly_one_batch_is_launched_per_domain():
    assert launch_all(LaunchGate(EXACT, 0), published(AdmissionState(EXACT))) == {A: 6, B: 2}


def test_uniform_look_ahead_is_shared_by_quota_and_bounded_in_all():
    assert launch_all(LaunchGate(EXACT, 4), published(AdmissionState(EXACT))) == {A: 9, B: 3}
    live = launch_all(LaunchGate(EXACT, 1), published(AdmissionState(EXACT)))
    assert sum(live.values()) == 9


def test_look_ahead_per_domain_goes_to_that_domain():
    assert launch_all(LaunchGate(EXACT, {"b": 3}), published(AdmissionState(EXACT))) == {A: 6, B: 5}


def test_the_gate_opens_at_train_batch_boundaries_only():
    gate = LaunchGate(EXACT, 0)
    assert [gate.domain_limit(A, version) for version in (0, 3, 4, 7, 8)] == [6, 6, 12, 12, 18]
    assert [gate.total_limit(version) for version in (0, 3, 4)] == [8, 8, 16]


def test_a_failed_group_s_place_is_launched_again():
    state = published(AdmissionState(EXACT))
    gate = LaunchGate(EXACT, 0)
    launch_all(gate, state)
    assert not gate.allows(state, A)
    state.apply(ev.Failed(time_s=0, group_id=0, reason="", episode_retries=0))
    first = state.accounts.live_by_kind
    assert sum(first.values()) == 7
    assert sum(launch_all(gate, state).values()) == 8


def test_a_range_never_takes_the_places_that_another_s_minimum_needs():
    rules = Rules(4, 2, "domain", {"a": Quota(0, 4), "b": Quota(2, 4)})
    state, gate = published(AdmissionState(rules)), LaunchGate(rules, 1)
    while gate.allows(state, A):
        lease(state, A)
    assert rules.composition == {A: 1, B: 3}
    assert state.accounts.live_by_kind[A] == 2  # one for the batch, one of look-ahead
    assert gate.allows(state, B)


def test_what_a_batch_took_of_a_range_is_launched_again_for_the_next():
    rules = Rules(4, 2, "domain", {"a": Quota(1, 3), "b": Quota(1, 3)})
    state, gate = published(AdmissionState(rules)), LaunchGate(rules, 2)
    assert launch_all(gate, state) == {A: 3, B: 3}
    for group in list(state.groups.values()):
        state.apply(ev.Started(time_s=0, group_id=group.group_id))
        state.apply(ev.Ready(time_s=0, group=make_group(group.group_id, "h", (0, 0), 0), episode_retries=0))
    quick = [group.group_id for group in state.groups.values() if group.kind == A]
    slow = [group.group_id for group in state.groups.values() if group.kind == B]
    admit(state, quick[:2])
    admit(state, [quick[2], slow[0]])
    for plan in list(state.plans.values()):
        state.apply(consumed(plan.plan_id, plan.update))
    state.apply(ev.Published(time_s=0, version=2))
    live = dict(launch_all(gate, state))
    assert {kind: live[kind] - taken for kind, taken in ((A, 3), (B, 1))} == {A: 3, B: 3}, "a batch and its look-ahead"


def test_beyond_the_run_s_last_batch_only_what_finishes_it_is_launched():
    rules = Rules(2, 2, None, {})
    state, gate = published(AdmissionState(rules)), LaunchGate(rules, 5, train_steps=1)
    assert launch_all(gate, state) == {(): 2}


@settings(deadline=None)
@given(feasible_rules(), st.integers(0, 3), st.data())
def test_gate_and_admission_together_never_get_stuck(case: Case, look_ahead: int, data: st.DataObject):
    """Whatever order kinds are launched in and groups finish or fail in, every batch of the run gets finished."""
    rules, _ = case
    values = VALUES[: len(rules.quotas)]
    steps = 3
    gate, policy = LaunchGate(rules, look_ahead, train_steps=steps), MiniBatchPolicy()
    state = published(AdmissionState(rules))
    failures = data.draw(st.integers(0, 3))
    publish_each = data.draw(st.booleans())
    while state.version < steps * rules.mini_batches:
        choice = policy.next_mini_batch(state) if state.admitted_updates < steps * rules.mini_batches else None
        flying = [g for g in state.groups.values() if g.account in (Account.LEASED, Account.RUNNING)]
        launchable = [(value,) for value in values if gate.allows(state, (value,))]
        options = ["launch"] * bool(launchable) + ["finish"] * bool(flying) + ["train"] * bool(state.plans)
        if isinstance(choice, tuple) and len(state.plans) <= 1:
            options.append("admit")
        assert options, f"stuck: {choice}, {state.accounts.as_dict()}, {state.accounts.pool_by_kind}"
        what = data.draw(st.sampled_from(options))
        if what == "launch":
            lease(state, data.draw(st.sampled_from(launchable)), gate)
        elif what == "finish":
            group = data.draw(st.sampled_from(flying))
            if failures and data.draw(st.booleans()):
                failures -= 1
                state.apply(ev.Failed(time_s=0, group_id=group.group_id, reason="", episode_retries=0))
            else:
                state.apply(ev.Started(time_s=0, group_id=group.group_id))
                meta = make_group(group.group_id, "h", (0, 0), 0)
                state.apply(ev.Ready(time_s=0, group=meta, episode_retries=0))
        elif what == "admit":
            assert isinstance(choice, tuple)
            admit(state, [g.group_id for g in choice])
        else:
            plan = next(iter(state.plans.values()))
            state.apply(consumed(plan.plan_id, plan.update))
            if publish_each or state.version % rules.mini_batches == 0:
                state.apply(ev.Published(time_s=0, version=state.version))
        state.accounts.check()
        assert state.accounts.live <= gate.total_limit(state.published) + gate.beyond
        for value in values:
            assert state.accounts.live_by_kind[(value,)] <= gate.domain_limit((value,), state.published) + gate.beyond
        useless = sum(state.accounts.pool_by_kind.values()) - state.batch.completion.usable(state.accounts.pool_by_kind)
        begun = state.batch.train_step <= state.published // rules.mini_batches
        assert not begun or useless <= gate.most_useless_groups


def test_what_the_batches_lack_goes_before_look_ahead():
    state, gate = published(AdmissionState(EXACT)), LaunchGate(EXACT, {"a": 2, "b": 2})
    order = []
    while (kind := gate.next_kind(state, lambda _: True)) is not None:
        order.append(kind)
        lease(state, kind)
    assert sorted(order[:8]) == [A] * 6 + [B] * 2
    assert sorted(order[8:]) == [A, A, B, B]


def test_missing_kinds_are_launched_beyond_the_gate_and_later_batches_launch_so_many_less():
    """The batch took other kinds than were launched for it, so what is left cannot complete the next one."""
    rules = Rules(4, 2, "domain", {"a": Quota(2, 4), "b": Quota(0, 2)})
    assert rules.composition == {A: 3, B: 1}
    state, gate = published(AdmissionState(rules)), LaunchGate(rules, 0)
    for kind in (A, A, A, B):
        lease(state, kind, gate)
    for group_id in range(4):
        state.apply(ev.Started(time_s=0, group_id=group_id))
    state.apply(ev.Failed(time_s=0, group_id=0, reason="", episode_retries=0))
    no_more_a = lambda kind: kind == B  # noqa: E731
    assert gate.next_kind(state, lambda _: True) == A
    assert gate.next_kind(state, no_more_a) == B  # the quotas allow a second b in its place
    lease(state, B, gate)
    assert gate.beyond == 1
    assert gate.next_kind(state, lambda _: True) is None
    state.published = 2
    assert launch_all(gate, state)[B] == 2  # the next batch's b is there already


def test_auto_is_bounded_and_a_fold_over_events():
    gate = LaunchGate(EXACT, "auto", most_look_ahead=1)
    assert gate.look_ahead_groups <= gate.most_look_ahead_groups == 1
