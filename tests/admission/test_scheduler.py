"""The scheduler core, driven in virtual time by a model of hosts and trainer (see `model.py`): no socket, no process."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.prompts import PromptOrder
from knittrans_jax.admission.scheduler import SchedulerCore
from knittrans_jax.admission.state import fold
from knittrans_jax.config import ConfigError
from knittrans_jax.launch import messages as msg
from knittrans_jax.observe.summary import summarise, summary_to_dict
from knittrans_jax.transfer import tickets

from .model import GROUP_BYTES, Model, ModelHost, make_config, make_core, make_group, make_prompts

QUOTAS = {"domain": {"a": {"min": 2, "max": 5}, "b": {"min": 0.25, "max": 0.25}}}
COUNTS = {"a": 10, "b": 6, "c": 9}


def check_every_step(model: Model) -> None:
    """Accounts add up, and what is admitted, launched and stored stays within its bounds, at every moment."""
    core = model.core
    state, config = core.state, core.config
    state.accounts.check()
    assert state.accounts.issued == sum(state.accounts.counts.values())
    assert len(state.plans) <= 1 + config.admission.admit_ahead
    if state.published >= 0:
        assert state.accounts.live <= core.gate.total_limit(state.published)
    for host in getattr(model, "hosts", ()):
        assert len(host.stored) <= core.desk.room.capacity


def run(
    seed: int = 0, fail_rate: float = 0.0, hosts: int = 2, counts: dict[str, int] | None = None, **changes: object
) -> Model:
    core = make_core(make_config(**changes), make_prompts(counts or COUNTS))
    model = Model(core, hosts=hosts, seed=seed, after_step=check_every_step)
    model.run(fail_rate=fail_rate)
    return model


def compositions(model: Model) -> list[dict[str, int]]:
    """Groups by domain, per train batch."""
    domain = {e.group_id: e.attributes["domain"] for e in model.events if isinstance(e, ev.Leased)}
    batches: list[dict[str, int]] = []
    for event in model.events:
        if isinstance(event, ev.Admitted):
            if event.plan.mini_batch == 0:
                batches.append(dict.fromkeys(COUNTS, 0))
            for group in event.plan.groups:
                batches[-1][domain[group.group_id]] += 1
    return batches


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    look_ahead=st.sampled_from([0, 1, 3, 9]),
    fail_rate=st.sampled_from([0.0, 0.2]),
    publish=st.sampled_from(["update", "train_batch"]),
    hosts=st.integers(1, 3),
    admit_ahead=st.integers(0, 2),
)
def test_whatever_the_order_of_things_a_run_ends_with_every_batch_within_its_quotas(
    seed: int, look_ahead: int, fail_rate: float, publish: str, hosts: int, admit_ahead: int
):
    model = run(
        seed,
        fail_rate,
        hosts,
        batch__quotas=QUOTAS,
        admission__look_ahead_groups=look_ahead,
        admission__admit_ahead=admit_ahead,
        train__publish=publish,
    )
    core = model.core
    assert core.ending == "finished"
    assert core.state.accounts.counts[Account.CONSUMED] == 24
    for batch in compositions(model):
        assert sum(batch.values()) == 8
        assert 2 <= batch["a"] <= 5
        assert batch["b"] == 2
    # Everything the log says gives the same state again, prompts included.
    assert fold(core.state.rules, model.events) == core.state
    assert replayed_prompts(core, model.events) == core.prompts
    assert isinstance(model.events[0], ev.RunStarted)
    assert isinstance(model.events[-1], ev.RunEnded)


def replayed_prompts(core: SchedulerCore, events: list[ev.AnyEvent]) -> PromptOrder:
    order = PromptOrder(core.state.rules, list(core.prompts.attributes.items()), core.config.seed)
    leased: dict[int, tuple[str, int]] = {}
    for event in events:
        if isinstance(event, ev.Leased):
            leased[event.group_id] = (event.prompt_id, event.epoch)
            order.take(event.prompt_id, event.epoch)
        elif isinstance(event, ev.Expired | ev.Lost):
            order.give_back(*leased[event.group_id])
    return order


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), fail_rate=st.sampled_from([0.0, 0.2]), hosts=st.integers(1, 3))
def test_a_colocated_run_has_architectural_staleness_zero_for_every_trajectory(seed: int, fail_rate: float, hosts: int):
    model = run(
        seed, fail_rate, hosts, batch__quotas=QUOTAS, admission__schedule="colocated", train__publish="train_batch"
    )
    assert model.core.ending == "finished"
    rows = model.core.figures.staleness_rows()
    assert rows.shape == (48, 6)
    assert (rows[:, 5] == 0.0).all()
    assert rows[:, 0].max() == 3.0, "the gap itself is the mini-batch's index"


@pytest.mark.parametrize("seed", range(6))
def test_no_prompt_comes_twice_in_a_train_batch_even_with_barely_enough_prompts_and_failures(seed: int):
    quotas = {"domain": {"a": {"min": 5, "max": 5}}}
    model = run(seed, 0.4, batch__quotas=quotas, counts={"a": 5, "c": 4}, train__publish="train_batch")
    prompt = {e.group_id: e.prompt_id for e in model.events if isinstance(e, ev.Leased)}
    batches: dict[int, list[str]] = {}
    for event in model.events:
        if isinstance(event, ev.Admitted):
            batches.setdefault(event.plan.train_step, []).extend(prompt[g.group_id] for g in event.plan.groups)
    assert len(batches) == 3
    for prompts in batches.values():
        assert len(set(prompts)) == len(prompts) == 8


@pytest.mark.parametrize("policy", ["train_batch", "proportional", "fifo"])
@pytest.mark.parametrize("look_ahead", [0, 9])
def test_a_run_under_a_baseline_ends_and_keeps_what_it_promises(policy: str, look_ahead: int):
    for seed in range(3):
        model = run(seed, 0.2, batch__quotas=QUOTAS, admission__policy=policy, admission__look_ahead_groups=look_ahead)
        assert model.core.ending == "finished"
        batches = compositions(model)
        assert [sum(batch.values()) for batch in batches] == [8, 8, 8]
        if policy != "fifo":
            assert all(2 <= batch["a"] <= 5 and batch["b"] == 2 for batch in batches)
        assert fold(model.core.state.rules, model.events) == model.core.state


def test_the_same_requests_give_the_same_events_and_plans():
    first, second = run(7, 0.1, batch__quotas=QUOTAS), run(7, 0.1, batch__quotas=QUOTAS)
    assert first.events == second.events
    assert [p.plan for p in first.plans] == [p.plan for p in second.plans]


def test_the_smallest_storage_that_is_allowed_does_not_stop_the_run_and_less_is_refused():
    kwargs: dict = {"admission__look_ahead_groups": 3, "admission__admit_ahead": 2}
    with pytest.raises(ConfigError, match=r"rollout\.storage_bytes.*smallest budget that works is 3000"):
        make_core(make_config(rollout__hosts=2, rollout__storage_bytes=2999, **kwargs), make_prompts(COUNTS))
    for seed in range(5):
        model = run(seed, 0.1, 2, rollout__hosts=2, rollout__storage_bytes=3 * GROUP_BYTES, **kwargs)
        assert model.core.ending == "finished"
        assert max(host.most_stored for host in model.hosts) <= 3


# --- single moments ----------------------------------------------------------------------------------------------------


def begun(**changes: object) -> Model:
    """A run whose trainer is there and whose version 0 is out; two hosts that have not spoken yet."""
    model = Model(make_core(make_config(**changes), make_prompts(COUNTS)), after_step=check_every_step)
    model.hello()
    return model


def lease_all(model: Model, host: ModelHost) -> list[int]:
    model.sync(host)
    model.store(host)
    model.sync(host, finish=0)
    return list(host.running)


def sync_of(host: ModelHost, **changes: object) -> msg.EngineSync:
    fields: dict = {"host": host.name, "unit": host.name, "version": 0, "free_groups": 0} | changes
    return msg.EngineSync(**fields)


def done(group_id: int, unit: str = "host0", **changes: object) -> msg.GroupDone:
    fields: dict = {"versions": (0, 0), "done": 0} | changes
    return msg.GroupDone(group=make_group(group_id, unit, **fields), episode_retries=0)


def test_no_lease_before_the_first_version_is_published():
    model = Model(make_core(make_config(), make_prompts(COUNTS)))
    orders = model.ask(sync_of(model.hosts[0], free_groups=4))
    assert isinstance(orders, msg.EngineOrders)
    assert (orders.leases, orders.published) == ((), -1)


def test_a_version_is_published_when_every_process_has_written_it():
    model = Model(make_core(make_config(), make_prompts(COUNTS)))
    for process in range(2):
        model.send(msg.TrainHello(process=process, processes=2, pid=process))
    model.ask(msg.WeightsWritten(process=0, incarnation=0, version=0))
    assert model.core.state.published == -1
    model.ask(msg.WeightsWritten(process=0, incarnation=0, version=0))
    assert model.core.state.published == -1
    model.ask(msg.WeightsWritten(process=1, incarnation=0, version=0))
    assert model.core.state.published == 0


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


def test_a_request_that_waits_is_answered_wait_after_half_the_rpc_timeout():
    model = begun()
    token = model.send(msg.NextPlan(process=0, incarnation=0, after_plan=-1))
    model.tick(14.9)
    assert model.answer(token) is None
    model.tick(0.2)
    assert model.answer(token) == msg.Wait()
    assert model.core.parked == 0


def test_messages_of_another_incarnation_are_refused():
    model = begun()
    for request in (
        msg.NextPlan(process=0, incarnation=1, after_plan=-1),
        msg.ChunkHeld(process=0, incarnation=-1, plan_id=0, chunk=0),
        msg.WeightsWritten(process=0, incarnation=7, version=1),
        msg.UpdateDone(
            process=0, incarnation=1, plan_id=0, version=1, metrics={}, waits_s={}, pulled_bytes=0, compilations=0
        ),
    ):
        reply = model.ask(request)
        assert isinstance(reply, msg.Refused)
        assert "incarnation" in reply.reason


def test_a_training_process_of_another_size_or_a_second_group_is_refused():
    model = begun()
    for hello in (
        msg.TrainHello(process=0, processes=3, pid=100),
        msg.TrainHello(process=2, processes=2, pid=100),
        msg.TrainHello(process=0, processes=2, pid=999),
    ):
        assert isinstance(model.ask(hello), msg.Refused)
    assert model.ask(msg.TrainHello(process=0, processes=2, pid=100)) == msg.TrainWelcome(incarnation=0)


def with_plan(**changes: object) -> tuple[Model, msg.PlanReply]:
    """A run whose first mini-batch is admitted and asked for by both processes."""
    model = begun(**changes)
    host = model.hosts[0]
    lease_all(model, host)
    model.sync(host)
    replies = [model.ask(msg.NextPlan(process=p, incarnation=0, after_plan=-1)) for p in range(2)]
    assert isinstance(replies[0], msg.PlanReply)
    return model, replies[0]


def test_a_process_that_relays_gets_the_key_and_the_units_and_the_others_get_the_relay():
    model = Model(make_core(make_config(), make_prompts(COUNTS)))
    model.send(msg.TrainHello(process=1, processes=2, pid=1))
    welcome = model.ask(msg.TrainHello(process=0, processes=2, pid=0, relay="127.0.0.1:relay"))
    assert welcome == msg.TrainWelcome(incarnation=0, ticket_key=bytes(32))
    for process in range(2):
        model.ask(msg.WeightsWritten(process=process, incarnation=0, version=0))
    for host in model.hosts:
        model.sync(host)
    lease_all(model, model.hosts[0])
    model.sync(model.hosts[0])
    first, second = (model.ask(msg.NextPlan(process=p, incarnation=0, after_plan=-1)) for p in range(2))
    assert isinstance(first, msg.PlanReply)
    assert isinstance(second, msg.PlanReply)
    assert first.plan == second.plan is not None
    assert (set(first.units), second.units) == ({"host0"}, {"train0": "127.0.0.1:relay"})
    tickets.check(bytes(32), second.tickets["train0"], unit="train0", peer="train1", now_s=model.now_s)


def test_a_plan_comes_with_addresses_and_a_ticket_per_unit_in_the_process_s_name():
    model, reply = with_plan()
    assert reply.plan is not None
    assert reply.units == {"host0": "127.0.0.1:host0"}
    for process in range(2):
        mine = model.ask(msg.NextPlan(process=process, incarnation=0, after_plan=-1))
        assert isinstance(mine, msg.PlanReply)
        claims = tickets.check(
            bytes(32), mine.tickets["host0"], unit="host0", peer=f"train{process}", now_s=model.now_s
        )
        assert claims.expires_s > model.now_s + model.core.config.control.pull_timeout_s


def test_a_go_is_given_when_every_process_holds_the_chunk_and_not_before():
    model, _ = with_plan()
    held = [msg.ChunkHeld(process=p, incarnation=0, plan_id=0, chunk=0) for p in range(2)]
    first, again = model.send(held[0]), model.send(held[0])
    assert model.answer(first) is None
    second = model.send(held[1])
    assert [model.answer(token) for token in (first, again, second)] == [msg.Go()] * 3
    assert isinstance(model.ask(msg.ChunkHeld(process=0, incarnation=0, plan_id=0, chunk=99)), msg.Refused)


def test_a_go_that_does_not_come_in_time_ends_the_run_naming_who_is_missing():
    model, _ = with_plan()
    model.send(msg.ChunkHeld(process=1, incarnation=0, plan_id=0, chunk=0))
    model.tick(61.0)
    assert model.core.ending is not None
    assert "train processes [0] do not hold" in model.core.ending
    assert "train.go_timeout_s" in model.core.ending


def update(process: int, plan_id: int, version: int) -> msg.UpdateDone:
    return msg.UpdateDone(
        process=process,
        incarnation=0,
        plan_id=plan_id,
        version=version,
        metrics={"from": float(process)},
        waits_s={"data": 1.0 + process},
        pulled_bytes=100,
        compilations=2,
    )


def test_an_update_counts_once_when_all_processes_report_it_in_whatever_order():
    model, _ = with_plan(admission__admit_ahead=1)
    assert len(model.core.state.plans) == 2
    for report in (update(0, 0, 1), update(0, 1, 2), update(0, 0, 1), update(1, 1, 2)):
        assert model.ask(report) == msg.Ack()
    assert model.core.state.version == 0
    assert model.ask(update(1, 0, 1)) == msg.Ack()
    assert model.core.state.version == 2
    assert model.ask(update(1, 0, 1)) == msg.Ack()
    assert model.core.counters["duplicate_updates"] == 2
    consumed = [e for e in model.events if isinstance(e, ev.Consumed)]
    assert [e.update for e in consumed] == [0, 1]
    assert consumed[0].metrics == {"from": 0.0}
    assert consumed[0].waits_s == {"data": 2.0}
    assert (consumed[0].pulled_bytes, consumed[0].compilations, consumed[0].unique_bytes) == (200, 4, 1000)
    assert isinstance(model.ask(update(0, 0 + 9, 10)), msg.Refused)


def test_weights_of_an_update_not_yet_reported_wait_for_it():
    model, _ = with_plan()
    model.write(1)
    assert model.core.state.published == 0
    for process in range(2):
        model.ask(update(process, 0, 1))
    assert model.core.state.published == 1


def test_consumed_groups_are_released_once_and_their_room_is_used_again_after_the_unit_came_back():
    model, reply = with_plan()
    assert reply.plan is not None
    room = model.core.desk.room
    for process in range(2):
        model.ask(update(process, 0, 1))
    sync = msg.StorageSync(unit="host0", address="x", held_bytes=0, held_groups=0)
    first, second = model.ask(sync), model.ask(sync)
    assert isinstance(first, msg.StorageOrders)
    assert isinstance(second, msg.StorageOrders)
    assert first.release == tuple(group.group_id for group in reply.plan.groups)
    assert second.release == ()
    assert room.fits("host0", model.core.state)


def test_starvation_ends_the_run_naming_rule_value_and_the_last_failure():
    model = begun(admission__starvation_s=20.0, batch__quotas=QUOTAS)
    host = model.hosts[0]
    for _ in range(30):
        model.sync(host, finish=0, fail=8)
        model.tick(1.0)
    assert model.core.ending is not None
    assert "admission.starvation_s" in model.core.ending
    assert "batch.quotas.domain.min of a" in model.core.ending or "batch.groups" in model.core.ending
    assert "last failure: model" in model.core.ending


def test_a_trainer_that_computes_for_long_starves_nobody():
    model, _ = with_plan(admission__starvation_s=20.0)
    for _ in range(40):
        model.tick(1.0)
        for host in model.hosts:
            model.ask(sync_of(host))
    assert model.core.ending is None


def test_a_prompt_that_always_fails_does_not_hold_up_a_batch_that_others_can_fill():
    """Value `b` lags behind, but its only prompt always fails: `a` fills the batches, which the quotas allow."""
    quotas = {"domain": {"a": {"min": 1}}}
    core = make_core(make_config(batch__quotas=quotas), make_prompts({"a": 16, "b": 1}))
    model = Model(core, after_step=check_every_step)
    model.hello()
    prompt: dict[int, str] = {}
    for _ in range(400):
        for host in model.hosts:
            prompt |= {e.group_id: e.attributes["domain"] for e in model.events if isinstance(e, ev.Leased)}
            bad = [group_id for group_id in host.running if prompt[group_id] == "b"]
            for group_id in bad:
                del host.running[group_id]
            failed = tuple(msg.GroupFailure(group_id=g, reason="bad prompt", episode_retries=0) for g in bad)
            model.ask(sync_of(host, version=host.version, failed=failed))
            model.sync(host)
            model.store(host)
        model.train()
        if core.state.version == core.config.train.updates:
            break
    assert core.state.version == core.config.train.updates
    assert core.state.accounts.counts[Account.FAILED] < 20


def trained(model: Model) -> None:
    """Every update, and no host after the last."""
    for _ in range(2000):
        if model.version == model.core.config.train.updates:
            break
        for host in model.hosts:
            model.sync(host)
            model.store(host)
        model.train()
    assert model.core.state.version == model.core.config.train.updates


def test_a_final_evaluation_that_no_host_takes_ends_the_run():
    model = begun(admission__starvation_s=20.0, batch__quotas=QUOTAS)
    trained(model)
    for host in model.hosts:
        host.evals.clear()
    for _ in range(4 * 120):  # leases of earlier evaluations run out first
        model.tick(1.0)
    assert model.core.ending is not None
    assert "takes the final evaluation" in model.core.ending
    assert "hosts seen: host0, host1" in model.core.ending


def test_a_final_evaluation_that_no_host_can_run_ends_the_run_and_says_so():
    core = make_core(make_config(), make_prompts(COUNTS))
    desk = core.desk
    desk.join(msg.EngineSync(host="host0", unit="host0", version=12, free_groups=0), 0.0)
    desk.evaluations.published(12, 1)
    failed: tuple[int, ...] = ()
    for _ in range(3):
        lease = desk.evaluations.lease("host0", 12, 1.0)
        assert lease is not None
        assert desk.expire(1.0) is None
        failed = (lease.eval_id,)
        desk.take_reports(
            msg.EngineSync(host="host0", unit="host0", version=12, free_groups=0, evals_failed=failed), 1.0
        )
    stuck = desk.expire(1.0)
    assert stuck is not None
    assert "did not come back: version 12 is not to be had on host host0" in stuck
    desk.take_reports(msg.EngineSync(host="host0", unit="host0", version=12, free_groups=0, evals_failed=failed), 1.0)
    assert desk.counters["late_evals"] == 1


def test_a_last_version_that_is_never_written_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    model = begun(admission__starvation_s=20.0, batch__quotas=QUOTAS)
    write = model.write
    last = model.core.config.train.updates
    monkeypatch.setattr(model, "write", lambda version: None if version == last else write(version))
    trained(model)
    for _ in range(40):
        model.tick(1.0)
    assert model.core.ending is not None
    assert f"the last version's weights (version {last}, published {last - 1})" in model.core.ending


def test_shutdown_tells_everybody_and_the_log_ends_with_the_reason():
    model, _ = with_plan()
    parked = model.send(msg.NextPlan(process=0, incarnation=0, after_plan=1))
    assert model.ask(msg.Shutdown(reason="interrupted")) == msg.Ack()
    assert model.answer(parked) == msg.PlanReply(plan=None)
    orders = model.ask(sync_of(model.hosts[0]))
    storage = model.ask(msg.StorageSync(unit="host0", address="x", held_bytes=0, held_groups=0))
    status = model.ask(msg.StatusRequest())
    assert isinstance(orders, msg.EngineOrders)
    assert isinstance(storage, msg.StorageOrders)
    assert isinstance(status, msg.Status)
    assert (orders.stop, storage.stop, status.ended) == (True, True, "interrupted")
    model.tick(0.1)
    assert not model.core.finished, "the roles may still hand in their reports"
    model.tick(3.0)
    assert model.core.finished
    assert model.events[-1] == ev.RunEnded(time_s=model.now_s, reason="interrupted")


def test_the_run_ends_at_once_when_every_role_has_handed_in_its_report():
    model = begun()
    model.sync(model.hosts[0])
    model.store(model.hosts[0])
    model.ask(msg.Shutdown(reason="interrupted"))
    model.sync(model.hosts[0])
    model.store(model.hosts[0])
    for process in range(2):
        model.ask(msg.NextPlan(process=process, incarnation=0, after_plan=-1))
    for role in ("host0", "storage-host0", "train0", "train1"):
        model.ask(msg.Report(role=role, counters={"x": 1.0}))
    model.ask(msg.StatusRequest())
    model.tick(0.01)
    assert model.core.finished
    reports = {e.role for e in model.events if isinstance(e, ev.RoleReport)}
    assert reports == {"host0", "storage-host0", "train0", "train1", "scheduler"}


def test_the_status_says_what_the_run_waits_for():
    model = Model(make_core(make_config(batch__quotas=QUOTAS), make_prompts(COUNTS)))
    assert model.core.status().waiting_for == "training processes (0 of 2 are there)"
    model.hello()
    assert "missing" in model.core.status().waiting_for
    host = model.hosts[0]
    lease_all(model, host)
    model.sync(host)
    assert model.core.status().waiting_for == "the trainer (update 0)"


def test_the_summary_has_every_figure_and_its_accounts_add_up():
    model = run(1, 0.1)
    core = model.core
    summary = summary_to_dict(summarise(model.events, core.config))
    assert (summary["updates"], summary["train_steps"]) == (12, 3)
    assert summary["groups"] == core.state.accounts.as_dict()
    assert sum(summary["groups"].values()) == summary["groups_launched"] == core.state.accounts.issued
    assert summary["heldout_questions"] == 5
    assert summary["heldout_exact"] == pytest.approx(core.figures.heldout[2] / 5)
    assert summary["encoder"] == {
        "images_unique": 24,
        "images_referenced": 48,
        "patches_encoded": 96,
        "patches_naive": 192,
    }
    assert summary["bytes"] == {
        "payload_pulled": 240,
        "payload_unique": 12000,
        "payload_relayed": 0,
        "payload_through_scheduler": 0,
    }
    assert summary["trainer_wait_s"]["groups"] == pytest.approx(2.4)
    assert summary["compilations_after_warmup"] == 0
    assert summary["staleness"]["unit"] == "updates"
    assert summary["ended"] == "finished"


def test_when_the_run_ends_no_process_goes_even_if_the_last_one_holds_its_rows_now():
    model = begun()
    host = model.hosts[0]
    lease_all(model, host)
    model.sync(host)
    assert model.core.state.plans
    first = msg.ChunkHeld(process=0, incarnation=0, plan_id=0, chunk=0)
    model.core.handle("first", first, model.now_s)
    step = model.core.handle("end", msg.Shutdown(reason="interrupted"), model.now_s)
    assert ("first", msg.PlanReply(plan=None)) in step.replies
    assert model.ask(msg.ChunkHeld(process=1, incarnation=0, plan_id=0, chunk=0)) == msg.PlanReply(plan=None)
