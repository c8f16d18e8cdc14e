"""Whatever dies, in whatever order: every prompt is trained on once an epoch, every gradient counts once, and the run ends."""

from __future__ import annotations

import collections
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.lineage import final_lineage
from knittrans_jax.admission.rules import rules_of
from knittrans_jax.admission.state import fold
from knittrans_jax.launch import messages as msg

from .model import Model, begun, check_every_step, make_config, make_core, make_prompts, with_plan
from .test_resume import trained

PROMPTS = make_prompts({"a": 12, "b": 12})
EXACT = {"domain": {"a": {"min": 4, "max": 4}, "b": {"min": 4, "max": 4}}}
RECOVER = {
    "launch__on_child_death": "recover",
    "admission__look_ahead_groups": 4,
    "checkpoint__every_train_batches": 1,
    "train__updates": 400,
    "train__epochs": 2,
}
ROLES = ("engine", "unit", "unit on disk", "training", "scheduler")


@dataclasses.dataclass
class Life:
    """A run whose roles may die, one after the other. What a scheduler that died knew is in `events` only."""

    model: Model
    events: list[ev.AnyEvent]

    @classmethod
    def begin(cls, seed: int, **changes: object) -> Life:
        config = make_config(**RECOVER | changes)
        life = cls(Model(make_core(config, PROMPTS), seed=seed, after_step=check_every_step), [])
        life.model.payload_may_go = True
        life.model.hello()
        return life

    def kill(self, role: str, number: int) -> None:
        model = self.model
        host = model.hosts[number % len(model.hosts)]
        if role == "engine":
            host.kill_engine()
        elif role.startswith("unit"):
            host.kill_unit(keeps=role == "unit on disk")
        elif role == "training":
            self.train_again(number)
        else:
            self.schedule_again(number)

    def train_again(self, number: int) -> None:
        model = self.model
        for host in model.hosts:  # who forms a group again waits for nobody, but units speak all the time
            model.store(host)
        model.hello(*(model.checkpoints[-1] if model.checkpoints else (0, -1)), session=10**6 + 10 * number)

    def schedule_again(self, number: int) -> None:
        """The scheduler dies, and engines and training processes with it; units live on."""
        before = self.model
        self.events += before.events
        core = make_core(before.core.config, PROMPTS, history=tuple(self.events))
        model = Model(core, seed=number, after_step=check_every_step, now_s=before.now_s)
        model.hosts, model.checkpoints, model.payload_may_go = before.hosts, before.checkpoints, True
        for host in model.hosts:
            host.kill_engine()
            host.stopped = False
        self.model = model
        for _ in range(2):  # once to be asked, once to answer
            for host in model.hosts:
                model.store(host)
        self.train_again(number)

    def finish(self) -> list[ev.AnyEvent]:
        self.model.go_on(8000)
        assert self.model.core.finished, self.model.core.status()
        self.events += self.model.events
        return self.events


@settings(max_examples=60, deadline=None)
@given(
    deaths=st.lists(st.tuples(st.integers(0, 90), st.sampled_from(ROLES), st.integers(0, 1)), min_size=1, max_size=6),
    quotas=st.sampled_from([{}, EXACT]),
    publish=st.sampled_from(["update", "train_batch"]),
    seed=st.integers(0, 1000),
)
def test_whatever_dies_every_prompt_is_trained_on_once_an_epoch_and_every_gradient_is_in_the_lineage_once(
    deaths: list[tuple[int, str, int]], quotas: dict, publish: str, seed: int
):
    life = Life.begin(seed, batch__quotas=quotas, train__publish=publish)
    for number, (rounds, role, host) in enumerate(deaths):
        life.model.go_on(rounds)
        if life.model.core.ending is not None:
            break
        life.kill(role, 2 * number + host)
    events = life.finish()
    assert life.model.core.ending == "finished"

    assert trained(events) == {epoch: collections.Counter(name for name, _ in PROMPTS) for epoch in range(2)}
    lineage = final_lineage(events)
    assert [event.update for event in lineage.events if isinstance(event, ev.Consumed)] == list(range(24))
    assert not [event for event in lineage.events if isinstance(event, ev.Withdrawn)]
    core = life.model.core
    rules = rules_of(core.config, [attributes for _, attributes in PROMPTS])
    assert fold(rules, events) == core.state
    assert core.state.accounts.counts[Account.CONSUMED] == 48


@pytest.mark.parametrize("role", ["engine", "unit on disk", "scheduler"])
def test_what_was_finished_survives_the_engine_the_scheduler_and_a_unit_on_disk(role: str):
    life = Life.begin(3)
    life.model.go_on(60)
    state = life.model.core.state
    kept = {group.group_id for group in state.groups.values() if group.account in (Account.READY, Account.ADMITTED)}
    assert kept
    consumed = state.version
    life.kill(role, 1)
    assert kept <= life.model.core.state.groups.keys() | {
        planned.group_id for plan in life.model.core.training.retention.plans.values() for planned in plan.groups
    }
    events = life.finish()
    lost = {event.group_id for event in final_lineage(events).events if isinstance(event, ev.Lost)}
    assert not kept & lost
    assert all(one.updates_discarded == 0 for one in final_lineage(events).resumptions)
    assert life.model.core.state.version == 24 > consumed


def test_a_unit_that_lost_what_it_held_costs_what_was_ready_and_the_mini_batches_that_need_it():
    model, reply = with_plan()
    assert reply.plan is not None
    state = model.core.state
    first = next(iter(state.plans))
    admitted = {group.group_id for plan in state.plans.values() for group in plan.groups}
    model.hosts[0].kill_unit(keeps=False)
    model.store(model.hosts[0])
    (withdrawn,) = [event for event in model.events if isinstance(event, ev.Withdrawn)]
    assert (withdrawn.plan_id, set(withdrawn.lost)) == (first, admitted)
    assert not state.plans
    assert not any(group.account is Account.READY for group in state.groups.values())
    assert model.core.training.counters["mini_batches_withdrawn"] >= 1
    held = msg.ChunkHeld(process=0, incarnation=0, plan_id=first, chunk=0)
    assert model.ask(held) == msg.Dropped(plan_id=first)


def test_a_chunk_that_has_its_go_keeps_it_when_its_mini_batch_is_withdrawn():
    model, reply = with_plan(train__micro_batch_rows=1, train__row_tokens=24, rollout__cache_tokens=24)
    assert reply.plan is not None
    plan_id = reply.plan.plan_id
    assert reply.plan.chunks > 1
    held = [msg.ChunkHeld(process=p, incarnation=0, plan_id=plan_id, chunk=0) for p in range(2)]
    tokens = [model.send(one) for one in held]
    assert [model.answer(token) for token in tokens] == [msg.Go()] * 2
    second = model.send(msg.ChunkHeld(process=0, incarnation=0, plan_id=plan_id, chunk=1))
    gone = msg.ChunkMissing(
        process=1, incarnation=0, plan_id=plan_id, chunk=1, unit="host0", address="", reason="gone", gone=True
    )
    third = model.send(gone)
    assert [model.answer(token) for token in (second, third)] == [msg.Dropped(plan_id=plan_id)] * 2
    assert model.ask(held[1]) == msg.Go()  # it asks again: the other may have launched it
    assert model.ask(msg.ChunkHeld(process=1, incarnation=0, plan_id=plan_id, chunk=1)) == msg.Dropped(plan_id=plan_id)
    model.tick(100.0)
    assert model.core.ending is None or "do not hold" not in model.core.ending


def test_a_unit_that_cannot_be_reached_is_waited_for_and_found_at_its_new_address():
    model, reply = with_plan()
    assert reply.plan is not None
    missing = msg.ChunkMissing(
        process=0,
        incarnation=0,
        plan_id=reply.plan.plan_id,
        chunk=0,
        unit="host0",
        address=reply.units["host0"],
        reason="refused",
    )
    token = model.send(missing)
    assert model.answer(token) is None
    model.hosts[0].kill_unit(keeps=True)
    model.store(model.hosts[0])
    again = model.answer(token)
    assert isinstance(again, msg.PlanReply)
    assert again.plan == reply.plan
    assert again.units["host0"] != reply.units["host0"]
    model.tick(31.0)
    assert model.core.training.counters["mini_batches_withdrawn"] == 0


def test_a_unit_that_stays_away_costs_the_mini_batch_after_the_deadline_of_a_pull():
    model, reply = with_plan()
    assert reply.plan is not None
    missing = msg.ChunkMissing(
        process=0,
        incarnation=0,
        plan_id=reply.plan.plan_id,
        chunk=0,
        unit="host0",
        address=reply.units["host0"],
        reason="refused",
    )
    model.send(missing)
    model.tick(14.0)
    token = model.send(missing)
    model.tick(17.0)
    (withdrawn,) = [event for event in model.events if isinstance(event, ev.Withdrawn)]
    assert "control.pull_timeout_s" in withdrawn.reason
    assert model.answer(token) in (msg.Dropped(plan_id=reply.plan.plan_id), msg.Wait())


def test_an_engine_that_begins_anew_loses_what_it_had_in_flight_at_once_and_nothing_else():
    model = begun()
    host = model.hosts[0]
    for _ in range(3):
        model.store(host)
        model.sync(host, finish=1)
    ready = model.core.state.accounts.counts[Account.READY] + model.core.state.accounts.counts[Account.ADMITTED]
    in_flight = {g.group_id for g in model.core.state.groups.values() if g.account in (Account.LEASED, Account.RUNNING)}
    assert in_flight
    host.kill_engine()
    model.sync(host)
    lost = {event.group_id for event in model.events if isinstance(event, ev.Lost)}
    assert lost == in_flight
    after = model.core.state.accounts.counts
    assert after[Account.READY] + after[Account.ADMITTED] == ready
    assert model.core.desk.counters["engines_anew"] == 1


def test_a_host_that_leaves_gives_back_what_it_has_not_begun_and_then_the_rest():
    model = begun()
    host = model.hosts[0]
    model.store(host)
    model.sync(host)
    model.sync(host)
    state = model.core.state
    leaving = msg.EngineSync(host=host.name, unit=host.name, version=0, free_groups=4, leaving=True)
    orders = model.ask(leaving)
    assert isinstance(orders, msg.EngineOrders)
    assert not orders.leases
    assert not [g for g in state.groups.values() if g.host == host.name and g.account is Account.LEASED]
    running = [g for g in state.groups.values() if g.host == host.name and g.account is Account.RUNNING]
    assert running
    model.ask(msg.EngineSync(host=host.name, unit=host.name, version=0, free_groups=0, leaving=True, left=True))
    assert not [g for g in state.groups.values() if g.host == host.name and g.account is Account.RUNNING]
    assert host.name not in model.core.desk.seen_s
    assert model.core.desk.counters["engines_left"] == 1


def test_who_was_not_heard_of_is_named_with_the_seconds_until_it_is_told_to_end():
    model = begun()
    for host in model.hosts:
        model.store(host)
        model.sync(host)
    model.ask(msg.Beat(process=1))
    model.now_s += 7.0
    model.sync(model.hosts[1])
    assert model.core.status().silent_s == {
        "storage0": 7.0, "storage1": 7.0, "rollout0": 7.0, "rollout1": 0.0, "train1": 7.0
    }  # fmt: skip
    model.core.end("finished")
    for host in model.hosts:
        model.store(host)
        model.sync(host)
    assert not {"storage0", "rollout1"} & model.core.status().silent_s.keys()
