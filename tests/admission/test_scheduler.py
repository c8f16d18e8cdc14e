"""Whole runs of the scheduler core, driven in virtual time by a model of hosts and trainer (see `model.py`)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.prompts import PromptOrder
from knittrans_jax.admission.scheduler import SchedulerCore
from knittrans_jax.admission.state import fold
from knittrans_jax.config import ConfigError
from knittrans_jax.observe.summary import summarise, summary_to_dict

from .model import COUNTS, GROUP_BYTES, QUOTAS, Model, check_every_step, make_config, make_core, make_prompts


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
