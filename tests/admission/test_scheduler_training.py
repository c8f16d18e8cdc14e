"""What the scheduler answers training processes: registration, plans, goes, updates, versions."""

from knittrans_jax.admission import events as ev
from knittrans_jax.launch import messages as msg
from knittrans_jax.transfer import tickets

from .model import COUNTS, Model, begun, lease_all, make_config, make_core, make_prompts, update_done, with_plan


def test_a_version_is_published_when_every_process_has_written_it():
    model = Model(make_core(make_config(), make_prompts(COUNTS)))
    for process in range(2):
        model.send(msg.TrainHello(process=process, processes=2, session=process))
    model.ask(msg.WeightsWritten(process=0, incarnation=0, version=0))
    assert model.core.state.published == -1
    model.ask(msg.WeightsWritten(process=0, incarnation=0, version=0))
    assert model.core.state.published == -1
    model.ask(msg.WeightsWritten(process=1, incarnation=0, version=0))
    assert model.core.state.published == 0


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
        msg.TrainHello(process=0, processes=3, session=100),
        msg.TrainHello(process=2, processes=2, session=100),
        msg.TrainHello(process=0, processes=2, session=999),
    ):
        assert isinstance(model.ask(hello), msg.Refused)
    welcome = msg.TrainWelcome(incarnation=0, published=model.core.state.published)
    assert model.ask(msg.TrainHello(process=0, processes=2, session=100)) == welcome


def test_a_process_that_relays_gets_the_key_and_the_units_and_the_others_get_the_relay():
    model = Model(make_core(make_config(), make_prompts(COUNTS)))
    model.send(msg.TrainHello(process=1, processes=2, session=1))
    welcome = model.ask(msg.TrainHello(process=0, processes=2, session=0, relay="127.0.0.1:relay"))
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


def test_an_update_counts_once_when_all_processes_report_it_in_whatever_order():
    model, _ = with_plan(admission__admit_ahead=1)
    assert len(model.core.state.plans) == 2
    for report in (update_done(0, 0, 1), update_done(0, 1, 2), update_done(0, 0, 1), update_done(1, 1, 2)):
        assert model.ask(report) == msg.Ack()
    assert model.core.state.version == 0
    assert model.ask(update_done(1, 0, 1)) == msg.Ack()
    assert model.core.state.version == 2
    assert model.ask(update_done(1, 0, 1)) == msg.Ack()
    assert model.core.training.counters["duplicate_updates"] == 2
    consumed = [e for e in model.events if isinstance(e, ev.Consumed)]
    assert [e.update for e in consumed] == [0, 1]
    assert consumed[0].metrics == {"from": 0.0}
    assert consumed[0].waits_s == {"data": 2.0}
    assert (consumed[0].pulled_bytes, consumed[0].compilations, consumed[0].unique_bytes) == (200, 4, 1000)
    assert isinstance(model.ask(update_done(0, 0 + 9, 10)), msg.Refused)


def test_weights_of_an_update_not_yet_reported_wait_for_it():
    model, _ = with_plan()
    model.write(1)
    assert model.core.state.published == 0
    for process in range(2):
        model.ask(update_done(process, 0, 1))
    assert model.core.state.published == 1
