import pytest
from hypothesis import given
from hypothesis import strategies as st

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import LEGAL, LIVE, Account, IllegalTransition
from knittrans_jax.admission.rules import Quota, Rules
from knittrans_jax.admission.state import AdmissionState, fold

from .model import make_group
from .test_policy import add_ready, admit, plan_of

RULES = Rules(2, 2, None, {})


def consumed(plan_id: int, update: int) -> ev.Consumed:
    return ev.Consumed(
        time_s=0, plan_id=plan_id, update=update, metrics={}, waits_s={}, pulled_bytes=0, unique_bytes=0, compilations=0
    )


def lease(state: AdmissionState) -> int:
    group_id = state.next_group_id
    state.apply(ev.Leased(time_s=0, group_id=group_id, prompt_id="p", epoch=0, attributes={}, host="h", version=0))
    return group_id


def put_into(account: Account) -> tuple[AdmissionState, int]:
    """A state with one group, in this account."""
    state = AdmissionState(RULES)
    group_id = lease(state)
    if account is Account.FAILED:
        state.apply(ev.Failed(time_s=0, group_id=group_id, reason="", episode_retries=0))
    elif account is Account.EXPIRED:
        state.apply(ev.Expired(time_s=0, group_id=group_id, reason=""))
    elif account is Account.LOST:
        state.apply(ev.Lost(time_s=0, group_id=group_id, reason=""))
    elif account is not Account.LEASED:
        state.apply(ev.Started(time_s=0, group_id=group_id))
        if account is not Account.RUNNING:
            state.apply(ev.Ready(time_s=0, group=make_group(group_id, "h", (0, 0), 0), episode_retries=0))
            if account is Account.FILTERED:
                state.apply(ev.Filtered(time_s=0, group_id=group_id, reason=""))
            elif account is not Account.READY:
                admit(state, [group_id])
                if account is Account.CONSUMED:
                    state.apply(consumed(0, 0))
    return state, group_id


EVENTS = {
    Account.RUNNING: lambda g: ev.Started(time_s=0, group_id=g),
    Account.READY: lambda g: ev.Ready(time_s=0, group=make_group(g, "h", (0, 0), 0), episode_retries=0),
    Account.FAILED: lambda g: ev.Failed(time_s=0, group_id=g, reason="", episode_retries=0),
    Account.FILTERED: lambda g: ev.Filtered(time_s=0, group_id=g, reason=""),
    Account.EXPIRED: lambda g: ev.Expired(time_s=0, group_id=g, reason=""),
    Account.LOST: lambda g: ev.Lost(time_s=0, group_id=g, reason=""),
}


@pytest.mark.parametrize("source", list(Account))
@pytest.mark.parametrize("target", list(EVENTS))
def test_a_group_moves_only_along_legal_transitions_and_the_accounts_add_up(source: Account, target: Account):
    state, group_id = put_into(source)
    state.accounts.check()
    assert state.accounts.counts[source] == 1
    assert state.accounts.live == (source in LIVE)
    # The groups of a plan are lost together: by a training group that begins before it, or a run that is resumed.
    under_way = source is Account.ADMITTED or (source, target) == (Account.CONSUMED, Account.LOST)
    if target in LEGAL[source] and not under_way:
        state.apply(EVENTS[target](group_id))
        assert state.accounts.counts[target] == 1
    else:
        with pytest.raises(IllegalTransition):
            state.apply(EVENTS[target](group_id))
        assert state.accounts.counts[source] == 1
    state.accounts.check()


def test_a_group_id_is_issued_once_and_in_order():
    state = AdmissionState(RULES)
    lease(state)
    with pytest.raises(IllegalTransition, match="next id is 1"):
        state.apply(ev.Leased(time_s=0, group_id=0, prompt_id="q", epoch=0, attributes={}, host="h", version=0))


def test_a_plan_that_breaks_a_quota_is_refused_whole():
    state = AdmissionState(Rules(4, 2, "domain", {"a": Quota(0, 1), "b": Quota(0, 4)}))
    ids = [add_ready(state, {"domain": "a"}), add_ready(state, {"domain": "a"})]
    with pytest.raises(IllegalTransition, match="cannot take"):
        admit(state, ids)
    assert state.accounts.counts[Account.READY] == 2
    assert state.batch.completion.slots_left == 4
    state.accounts.check()


def test_plans_are_numbered_and_consumed_in_order():
    state = AdmissionState(RULES)
    ids = [add_ready(state, {}) for _ in range(2)]
    plan = plan_of(state, ids[:1])
    state.apply(ev.Admitted(time_s=0, plan=plan))
    with pytest.raises(IllegalTransition, match="the next is plan 1"):
        state.apply(ev.Admitted(time_s=0, plan=plan))
    with pytest.raises(IllegalTransition, match="the next is"):
        state.apply(consumed(1, 1))


def test_versions_grow_and_never_run_ahead_of_updates():
    state = AdmissionState(RULES)
    state.apply(ev.Published(time_s=0, version=0))
    for version in (0, 1):
        with pytest.raises(IllegalTransition, match="versions grow"):
            state.apply(ev.Published(time_s=0, version=version))


def test_what_is_at_its_end_is_kept_as_counts_only():
    state = AdmissionState(Rules(1, 1, None, {}))
    for update in range(50):
        admit(state, [add_ready(state, {}, "same prompt")])
        state.apply(consumed(update, update))
    assert not state.groups
    assert not state.plans
    assert not state.pool_prompts
    assert not state.open_by_host
    assert state.accounts.counts[Account.CONSUMED] == 50


@given(st.lists(st.integers(0, 5), max_size=40))
def test_any_ready_group_can_leave_its_queue(moves: list[int]):
    events: list[ev.AnyEvent] = []
    state = AdmissionState(RULES)
    for move in moves:
        ready = [g for queue in state.ready.values() for g in queue]
        if move == 0 or not ready:
            group_id = state.next_group_id
            new = [
                ev.Leased(
                    time_s=0, group_id=group_id, prompt_id=f"{group_id}", epoch=0, attributes={}, host="h", version=0
                ),
                ev.Started(time_s=0, group_id=group_id),
                ev.Ready(time_s=0, group=make_group(group_id, "h", (0, 0), 0), episode_retries=0),
            ]
        else:
            new = [ev.Expired(time_s=0, group_id=ready[move % len(ready)], reason="")]
        for event in new:
            state.apply(event)
            events.append(event)
        state.accounts.check()
    assert fold(RULES, events) == state
