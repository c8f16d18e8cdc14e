"""A training group that dies and begins anew at a checkpoint repeats the mini-batches after it; nothing else changes."""

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.lineage import final_lineage
from knittrans_jax.admission.rules import rules_of
from knittrans_jax.admission.state import fold
from knittrans_jax.admission.storage_room import check_storage
from knittrans_jax.config import ConfigError
from knittrans_jax.launch import messages as msg

from .model import Model, check_every_step, make_config, make_core, make_prompts
from .test_resume import trained

PROMPTS = make_prompts({"a": 12, "b": 12})
RECOVER = {"launch__on_child_death": "recover", "admission__look_ahead_groups": 4, "checkpoint__every_train_batches": 1}


def recovering(seed: int, **changes: object) -> Model:
    settings_ = {"train__updates": 400, "train__epochs": 2, **RECOVER, **changes}
    return Model(make_core(make_config(**settings_), PROMPTS), seed=seed, after_step=check_every_step)


def compositions(model: Model) -> dict[int, tuple[int, ...]]:
    """The groups of every update that a training group was served; fails when one came with others the second time."""
    found: dict[int, tuple[int, ...]] = {}
    for reply in model.plans:
        assert reply.plan is not None
        groups = tuple(group.group_id for group in reply.plan.groups)
        assert found.setdefault(reply.plan.update, groups) == groups
    return found


@settings(max_examples=15, deadline=None)
@given(
    deaths=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    publish=st.sampled_from(["update", "train_batch"]),
    every=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_a_training_group_that_dies_is_served_the_same_mini_batches_again_and_every_gradient_is_in_the_log_once(
    deaths: list[int], publish: str, every: int, seed: int
):
    model = recovering(seed, train__publish=publish, checkpoint__every_train_batches=every)
    model.hello()
    for number, rounds in enumerate(deaths):
        model.go_on(rounds)
        if model.core.ending is None:
            model.hello(*(model.checkpoints[-1] if model.checkpoints else (0, -1)), session=200 + 10 * number)
    model.go_on(6000)
    assert model.core.finished
    assert model.core.ending == "finished"

    events = model.events
    updates = [event.update for event in events if isinstance(event, ev.Consumed)]
    assert updates == list(range(24))
    assert list(compositions(model)) == updates
    assert trained(events) == {epoch: collections.Counter(name for name, _ in PROMPTS) for epoch in range(2)}
    published = [event.version for event in events if isinstance(event, ev.Published)]
    assert published == sorted(set(published))
    assert model.core.state.accounts.counts[Account.LOST] == 0
    lineage = final_lineage(events)
    assert lineage.events == events
    assert not lineage.resumptions
    assert fold(rules_of(model.core.config, [attributes for _, attributes in PROMPTS]), events) == model.core.state


def test_where_a_mini_batch_is_gone_its_groups_become_lost_and_are_leased_again():
    model = recovering(5)
    model.hello()
    while len(model.checkpoints) < 2 or model.version % 4 != 2:
        model.go_on(1)
    before = model.version
    version, after_plan = model.checkpoints[0]  # the newest cannot be read, and what led to it was released
    model.hello(version, after_plan, session=500)
    state = model.core.state
    assert state.version == version < before
    assert all(plan.plan_id > after_plan + before - version for plan in state.plans.values())  # admitted anew
    assert state.accounts.counts[Account.LOST] >= 2 * (before - version)
    model.checkpoints = model.checkpoints[:1]
    model.go_on(6000)
    assert model.core.ending == "finished"
    assert trained(model.events) == {epoch: collections.Counter(name for name, _ in PROMPTS) for epoch in range(2)}
    lineage = final_lineage(model.events)
    assert [event.update for event in lineage.events if isinstance(event, ev.Consumed)] == list(range(24))
    (resumption,) = lineage.resumptions
    assert (resumption.version, resumption.updates_discarded) == (version, before - version)
    assert resumption.groups_discarded == 2 * (before - version)


def test_a_message_of_the_dead_group_is_refused_and_what_it_waited_for_is_answered():
    model = recovering(1)
    model.hello()
    waiting = model.send(msg.NextPlan(process=0, incarnation=0, after_plan=10**6))
    model.core.handle("new", msg.TrainHello(process=0, processes=2, session=900), model.now_s)
    model.tick()
    late = model.ask(msg.NextPlan(process=1, incarnation=0, after_plan=-1))
    assert isinstance(late, msg.Refused)
    assert model.core.training.counters["train_groups_died"] == 1
    assert waiting


def test_storage_must_hold_what_no_checkpoint_covers_and_checkpoints_must_be_taken():
    check_storage(make_config(**RECOVER), 1000, 4)
    rarely = RECOVER | {"checkpoint__every_train_batches": 50}
    with pytest.raises(
        ConfigError, match=r"rollout\.storage_bytes.*consumed groups.*smallest budget that works is 28000"
    ):
        check_storage(make_config(**rarely, rollout__storage_bytes=27_999), 1000, 4)
    check_storage(make_config(**rarely, rollout__storage_bytes=28_000), 1000, 4)
    with pytest.raises(ConfigError, match=r"checkpoint\.every_train_batches"):
        check_storage(make_config(**RECOVER | {"checkpoint__every_train_batches": 0}), 1000, 4)


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_budget_with_what_is_kept_does_not_stop_the_run_for_checkpoints_are_forced(seed: int):
    model = recovering(
        seed,
        checkpoint__every_train_batches=50,
        rollout__storage_bytes=28_000,
        train__epochs=6,
        admission__starvation_s=60,
    )
    model.hosts = model.hosts[:1]
    model.hello()
    model.go_on(12_000)
    assert model.core.ending == "finished"
    assert model.core.state.version == 72
    assert model.core.training.counters["checkpoints_forced"] >= 3
    assert model.hosts[0].most_stored <= 28
