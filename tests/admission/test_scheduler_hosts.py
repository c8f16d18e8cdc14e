"""What the scheduler answers rollout hosts and storage units: leases, reports, deadlines, room."""

import pytest

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import Account
from knittrans_jax.launch import messages as msg

from .model import (
    COUNTS,
    Model,
    begun,
    done,
    lease_all,
    make_config,
    make_core,
    make_prompts,
    sync_of,
    update_done,
    with_plan,
)


def test_no_lease_before_the_first_version_is_published():
    model = Model(make_core(make_config(), make_prompts(COUNTS)))
    orders = model.ask(sync_of(model.hosts[0], free_groups=4))
    assert isinstance(orders, msg.EngineOrders)
    assert (orders.leases, orders.published) == ((), -1)


def test_a_host_gets_no_more_than_it_can_start():
    model = begun()
    orders = model.ask(sync_of(model.hosts[0], free_groups=3))
    assert isinstance(orders, msg.EngineOrders)
    assert len(orders.leases) == 3


def test_a_duplicate_report_of_a_group_is_counted_and_changes_nothing():
    model = begun()
    host = model.hosts[0]
    group_id = lease_all(model, host)[0]
    for _ in range(2):
        model.ask(sync_of(host, done=(done(group_id),)))
    assert model.core.desk.counters["duplicate_groups"] == 1
    assert sum(isinstance(e, ev.Ready) for e in model.events) == 1


def test_a_group_reported_without_a_start_is_started_first():
    model = begun()
    orders = model.ask(sync_of(model.hosts[0], free_groups=1))
    assert isinstance(orders, msg.EngineOrders)
    model.ask(sync_of(model.hosts[0], done=(done(orders.leases[0].group_id),)))
    assert [type(e).__name__ for e in model.events[-2:]] == ["Started", "Ready"]


def test_another_host_s_report_of_a_group_is_counted_and_ignored():
    model = begun()
    group_id = lease_all(model, model.hosts[0])[0]
    model.ask(sync_of(model.hosts[1], done=(done(group_id, "host1"),)))
    assert model.core.desk.counters["foreign_groups"] == 1
    assert model.core.state.groups[group_id].account is Account.RUNNING


@pytest.mark.parametrize(
    ("report", "why"),
    [
        ({"reward": float("nan")}, "reward nan"),
        ({"versions": (0, 0, 0)}, "3 trajectories"),
        ({"versions": (0, 1)}, "versions 1 to 1, expected 0 to 0"),
    ],
)
def test_a_group_that_cannot_be_trained_on_fails_with_the_reason_and_its_payload_is_released(report: dict, why: str):
    model = begun()
    host = model.hosts[0]
    group_id = lease_all(model, host)[0]
    model.ask(sync_of(host, done=(done(group_id, **report),)))
    failed = [e for e in model.events if isinstance(e, ev.Failed)]
    assert len(failed) == 1
    assert why in failed[0].reason
    orders = model.ask(msg.StorageSync(unit="host0", address="x", held_bytes=0, held_groups=0))
    assert isinstance(orders, msg.StorageOrders)
    assert orders.release == (group_id,)


def test_an_expired_lease_is_counted_its_prompt_is_next_and_a_late_report_only_frees_the_payload():
    model = begun(admission__lease_timeout_s=10.0)
    host = model.hosts[0]
    group_id = lease_all(model, host)[0]
    prompt = model.core.state.groups[group_id].prompt_id
    for _ in range(12):
        model.tick(1.0)
        model.ask(sync_of(host))
    counts = model.core.state.accounts.counts
    assert (counts[Account.EXPIRED], counts[Account.RUNNING], counts[Account.LOST]) == (4, 0, 0)
    orders = model.ask(sync_of(host, free_groups=4))
    assert isinstance(orders, msg.EngineOrders)
    assert prompt in {lease.prompt_id for lease in orders.leases}
    model.ask(sync_of(host, done=(done(group_id),)))
    assert model.core.desk.counters["late_groups"] == 1
    storage = model.ask(msg.StorageSync(unit="host0", address="x", held_bytes=0, held_groups=0))
    assert isinstance(storage, msg.StorageOrders)
    assert storage.release == (group_id,)


def test_groups_of_a_silent_host_are_lost_and_leased_to_another():
    model = begun(admission__lease_timeout_s=10.0)
    lost = lease_all(model, model.hosts[0])
    prompts = {model.core.state.groups[group_id].prompt_id for group_id in lost}
    for _ in range(11):
        model.tick(1.0)
    assert model.core.state.accounts.counts[Account.LOST] == len(lost)
    orders = model.ask(sync_of(model.hosts[1], free_groups=8))
    assert isinstance(orders, msg.EngineOrders)
    assert prompts <= {lease.prompt_id for lease in orders.leases}


def test_consumed_groups_are_released_once_and_their_room_is_used_again_after_the_unit_came_back():
    model, reply = with_plan()
    assert reply.plan is not None
    room = model.core.desk.room
    for process in range(2):
        model.ask(update_done(process, 0, 1))
    sync = msg.StorageSync(unit="host0", address="x", held_bytes=0, held_groups=0)
    first, second = model.ask(sync), model.ask(sync)
    assert isinstance(first, msg.StorageOrders)
    assert isinstance(second, msg.StorageOrders)
    assert first.release == tuple(group.group_id for group in reply.plan.groups)
    assert second.release == ()
    assert room.fits("host0", model.core.state)


def test_a_unit_started_anew_keeps_open_groups_and_lets_others_go():
    model = begun()
    host = model.hosts[0]
    group_id = lease_all(model, host)[0]
    model.ask(sync_of(host, done=(done(group_id),)))
    sync = msg.StorageSync(unit=host.name, address="there", held_bytes=1, held_groups=2, recovered=(group_id, 10**6))
    orders = model.ask(sync)
    assert isinstance(orders, msg.StorageOrders)
    assert orders.release == (10**6,)
    assert model.core.desk.counters["recovered_groups"] == 2
