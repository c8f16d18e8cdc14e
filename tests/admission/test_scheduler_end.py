"""How a run ends, and what it says while it waits: starvation, last evaluations, shutdown, reports."""

import pytest

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import Account
from knittrans_jax.launch import messages as msg

from .model import (
    COUNTS,
    QUOTAS,
    Model,
    begun,
    check_every_step,
    lease_all,
    make_config,
    make_core,
    make_prompts,
    sync_of,
    with_plan,
)


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
