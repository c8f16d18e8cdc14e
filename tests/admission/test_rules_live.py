"""The rules of a batch in a running scheduler: filter, staleness bound, span cap, pass-rate buckets, budget, starvation.

The model of hosts and trainer is `model.py`; what a group is like when it comes is decided here.
"""

import itertools
from collections.abc import Callable
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.policy import MiniBatchPolicy, Waiting, drop_reason, unfinishable
from knittrans_jax.admission.rules import Rules, pass_rate_bucket, resolve, rules_of
from knittrans_jax.admission.state import AdmissionState, fold, oldest_version
from knittrans_jax.admission.token_budget import tokens_of
from knittrans_jax.config import BatchConfig, Bound, ConfigError
from knittrans_jax.launch import messages as msg
from knittrans_jax.trajectory import GroupMeta

from .model import Model, make_config, make_core, make_group, make_prompts
from .test_policy import add_ready, admit, plan_of

HALVES = {"domain": {"a": {"min": 0.5, "max": 0.5}, "b": {"min": 0.5, "max": 0.5}}}


class ShapedModel(Model):
    """`shape` changes a group as its host reports it; it gets the group and its domain."""

    shape: Callable[[GroupMeta, str], GroupMeta]

    def send(self, request: msg.Request) -> int:
        if isinstance(request, msg.EngineSync) and request.done:
            done = tuple(
                msgspec.structs.replace(one, group=self.shape(one.group, self.domain(one.group.group_id)))
                for one in request.done
            )
            request = msgspec.structs.replace(request, done=done)
        return super().send(request)

    def domain(self, group_id: int) -> str:
        group = self.core.state.groups.get(group_id)
        return group.kind[0] if group is not None else "a"


def run(
    shape: Callable[[GroupMeta, str], GroupMeta], seed: int = 0, rounds: int = 3000, each: int = 12, **changes: object
) -> ShapedModel:
    """`each`: prompts of each domain."""
    changes.setdefault("batch__quotas", HALVES)
    core = make_core(make_config(**changes), make_prompts({"a": each, "b": each}))
    model = ShapedModel(core, hosts=2, seed=seed, after_step=lambda m: m.core.state.accounts.check())
    model.shape = shape
    model.run(rounds)
    assert fold(core.state.rules, model.events) == core.state, "the log gives the same state"
    return model


def rewarded(meta: GroupMeta, *rewards: float) -> GroupMeta:
    trajectories = [msgspec.structs.replace(t, reward=r) for t, r in zip(meta.trajectories, rewards, strict=True)]
    return msgspec.structs.replace(meta, trajectories=tuple(trajectories))


def batches_of(model: Model) -> list[list[ev.Ready]]:
    """What was admitted, by train batch."""
    ready = {e.group.group_id: e for e in model.events if isinstance(e, ev.Ready)}
    batches: list[list[ev.Ready]] = []
    for event in model.events:
        if isinstance(event, ev.Admitted):
            if not event.plan.mini_batch:
                batches.append([])
            batches[-1] += [ready[g.group_id] for g in event.plan.groups]
    return batches


E = TypeVar("E", bound=ev.Event)


def events_of(model: Model, of: type[E]) -> list[E]:
    return [event for event in model.events if isinstance(event, of)]


# --- filter -------------------------------------------------------------------------------------------------------


def test_groups_whose_rewards_are_all_equal_are_dropped_and_others_take_their_place():
    def shape(meta: GroupMeta, domain: str) -> GroupMeta:
        return rewarded(meta, 0.0, 0.0 if domain == "b" and meta.group_id % 2 else 1.0)

    model = run(shape, batch__drop_equal_rewards=True)
    assert model.core.ending == "finished"
    filtered = events_of(model, ev.Filtered)
    assert filtered
    assert all("every reward is 0" in event.reason for event in filtered)
    assert model.core.state.accounts.counts[Account.FILTERED] == len(filtered)
    for batch in batches_of(model):
        assert len(batch) == 8
        assert all(len({t.reward for t in ready.group.trajectories}) == 2 for ready in batch)
    dropped = {event.group_id for event in filtered}
    kept = set().union(*(host.stored for host in model.hosts))
    assert not dropped & kept, "what is dropped is released"


def always_equal(meta: GroupMeta, domain: str) -> GroupMeta:
    return rewarded(meta, 0.0, 0.0 if domain == "b" else 1.0)


def test_a_filter_that_drops_a_whole_domain_is_reported_at_once_with_rule_value_missing_and_in_flight():
    model = run(always_equal, batch__drop_equal_rewards=True, admission__starvation_s=1e6)
    ending = model.core.ending
    assert ending is not None
    assert ending.startswith("error: update")
    assert "waits in vain" in ending
    assert "batch.drop_equal_rewards" in ending
    assert "batch.quotas.domain.min of b: " in ending
    assert "in flight" in ending


def test_on_starvation_relax_drops_the_rule_for_the_batch_and_counts_it():
    model = run(
        always_equal,
        batch__drop_equal_rewards=True,
        admission__starvation_s=1e6,
        admission__on_starvation="relax",
        admission__look_ahead_groups=4,
        train__updates=8,
    )
    assert model.core.ending == "finished"
    relaxed = events_of(model, ev.Relaxed)
    assert {event.value for event in relaxed} >= {"b"}
    assert model.core.all_counters()["relaxed_rules"] == len(relaxed)
    assert sum(model.core.state.relaxed.values()) == len(relaxed)
    for batch in batches_of(model):
        assert len(batch) == 8


def test_on_starvation_wait_reports_and_goes_on():
    with pytest.raises(AssertionError, match="no end after"):
        run(
            always_equal,
            rounds=1500,
            batch__drop_equal_rewards=True,
            admission__starvation_s=5.0,
            admission__on_starvation="wait",
        )
    core = make_core(
        make_config(
            batch__quotas=HALVES,
            batch__drop_equal_rewards=True,
            admission__starvation_s=5.0,
            admission__on_starvation="wait",
        ),
        make_prompts({"a": 12, "b": 12}),
    )
    model = ShapedModel(core, hosts=2)
    model.shape = always_equal
    with pytest.raises(AssertionError, match="no end after"):
        model.run(1500)
    starved = events_of(model, ev.Starved)
    assert core.ending is None
    assert len(starved) >= 2
    assert core.all_counters()["starvations"] == len(starved)
    assert {event.value for event in starved} == {"b"}


# --- staleness bound ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10**6), on_stale=st.sampled_from(["drop", "retry", "wait"]), bound=st.integers(1, 8))
def test_no_group_is_consumed_beyond_the_staleness_bound(seed: int, on_stale: str, bound: int):
    model = run(
        lambda meta, _: meta,
        seed,
        admission__staleness_bound=bound,
        admission__on_stale=on_stale,
        admission__look_ahead_groups=6,
    )
    # Hosts of this model are slow to load versions: with a tight bound all that comes may be too old, which is reported.
    assert model.core.ending == "finished" or "staleness_bound" in str(model.core.ending)
    ready = {e.group.group_id: e.group for e in model.events if isinstance(e, ev.Ready)}
    for event in events_of(model, ev.Admitted):
        for group in event.plan.groups:
            assert event.plan.update - oldest_version(ready[group.group_id]) <= bound
    expired = events_of(model, ev.Expired)
    assert all(event.retry == (on_stale != "drop") for event in expired)
    assert model.core.state.accounts.counts[Account.EXPIRED] == len(expired)


def aged(state: AdmissionState, domain: str, version: int) -> int:
    """A ready group sampled by this version."""
    group_id = state.next_group_id
    state.apply(
        ev.Leased(
            time_s=0,
            group_id=group_id,
            prompt_id=f"p{group_id}",
            epoch=0,
            attributes={"domain": domain},
            host="h",
            version=0,
        )
    )
    state.apply(ev.Started(time_s=0, group_id=group_id))
    meta = make_group(group_id, "h", (version, version), version)
    state.apply(ev.Ready(time_s=0, group=meta, episode_retries=0))
    return group_id


def bounded(bound: int, on_stale: str) -> Rules:
    config = make_config(
        batch={"groups": 4, "mini_batches": 4, "trajectories_per_group": 2, "quotas": {"domain": {"a": {"max": 3}}}},
        admission__staleness_bound=bound,
        admission__on_stale=on_stale,
    )
    return rules_of(config, [{"domain": v} for v in "aaaaabbbbb"])


def test_a_group_about_to_reach_its_bound_goes_first_only_with_wait():
    for on_stale, expected in (("drop", 0), ("wait", 1)):
        state = AdmissionState(bounded(0, on_stale))
        groups = [aged(state, "a", 3), aged(state, "a", 0)]
        choice = MiniBatchPolicy().next_mini_batch(state)
        assert isinstance(choice, tuple)
        assert [g.group_id for g in choice] == [groups[expected]]


def test_a_group_that_quotas_keep_out_until_its_bound_expires():
    state = AdmissionState(bounded(1, "wait"))
    for _ in range(3):
        admit(state, [aged(state, "a", state.admitted_updates)])
    late = aged(state, "a", 2)  # the batch has no place for a fourth one; the next batch begins at update 4
    assert [g.group_id for g in state.due()] == [late]
    other = aged(state, "b", 3)
    choice = MiniBatchPolicy().next_mini_batch(state)
    assert isinstance(choice, tuple)
    assert [g.group_id for g in choice] == [other]
    admit(state, [other])
    assert [g.group_id for g in state.stale()] == [late]


def test_a_plan_with_a_group_beyond_the_bound_is_refused():
    state = AdmissionState(bounded(0, "drop"))
    admit(state, [aged(state, "b", 0)])
    old = aged(state, "b", 0)
    with pytest.raises(ValueError, match="beyond 0 updates"):
        state.apply(ev.Admitted(time_s=0, plan=plan_of(state, [old])))


def test_a_bound_that_publishing_cannot_keep_is_refused():
    with pytest.raises(ConfigError, match=r"admission\.staleness_bound.*at least 3"):
        make_config(admission__staleness_bound=2, train__publish="train_batch")


# --- what is known only at completion -----------------------------------------------------------------------------


def test_no_more_groups_than_the_cap_span_several_versions():
    def shape(meta: GroupMeta, domain: str) -> GroupMeta:
        newest = meta.trajectories[0].version_done
        if meta.group_id % 3 and newest:
            one = msgspec.structs.replace(meta.trajectories[0], version_min=newest - 1, version_max=newest)
            return msgspec.structs.replace(meta, trajectories=(one, *meta.trajectories[1:]))
        return meta

    for seed in range(3):
        model = run(shape, seed, each=60, batch__spanning_max=2, admission__look_ahead_groups=6)
        assert model.core.ending == "finished"
        spanning = 0
        for batch in batches_of(model):
            over = [
                r for r in batch if len({v for t in r.group.trajectories for v in (t.version_min, t.version_max)}) > 1
            ]
            assert len(over) <= 2
            spanning += len(over)
            assert len(batch) == 8
        assert spanning


def test_pass_rate_buckets_are_bounded_as_configured():
    def shape(meta: GroupMeta, domain: str) -> GroupMeta:
        exact = (0, 0, 1, 2)[meta.group_id % 4]
        trajectories = [msgspec.structs.replace(t, exact=int(i < exact)) for i, t in enumerate(meta.trajectories)]
        return msgspec.structs.replace(meta, trajectories=tuple(trajectories))

    buckets = {"0..0.25": {"max": 2}, "0.25..0.75": {"min": 2}}
    for seed in range(3):
        model = run(shape, seed, each=60, batch__pass_rate=buckets, admission__look_ahead_groups=6)
        assert model.core.ending == "finished"
        for batch in batches_of(model):
            names = [pass_rate_bucket(ready.group, buckets) for ready in batch]
            assert names.count("0..0.25") <= 2
            assert names.count("0.25..0.75") >= 2


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"0..2": {}}, r"batch\.pass_rate\.0\.\.2"),
        ({"0..0.5": {}, "0.25..1": {}}, "ranges overlap"),
        ({"0..0.5": {"min": 3, "max": 2}}, "more than the max"),
    ],
)
def test_buckets_that_make_no_sense_are_refused(bounds: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        make_config(batch__pass_rate=bounds)


# --- token budget -------------------------------------------------------------------------------------------------


def long(state: AdmissionState, attributes: dict[str, str], tokens: int) -> int:
    """A ready group of two trajectories with so many tokens in all."""
    group_id = state.next_group_id
    state.apply(
        ev.Leased(
            time_s=0, group_id=group_id, prompt_id=f"p{group_id}", epoch=0, attributes=attributes, host="h", version=0
        )
    )
    state.apply(ev.Started(time_s=0, group_id=group_id))
    meta = make_group(group_id, "h", (0, 0), 0)
    lengths = (tokens // 2, tokens - tokens // 2)
    trajectories = [
        msgspec.structs.replace(t, length_tokens=n) for t, n in zip(meta.trajectories, lengths, strict=True)
    ]
    meta = msgspec.structs.replace(meta, trajectories=tuple(trajectories))
    state.apply(ev.Ready(time_s=0, group=meta, episode_retries=0))
    return group_id


@settings(deadline=None, max_examples=60)
@given(st.data(), st.booleans())
def test_a_mini_batch_under_a_token_budget_is_the_lexicographically_oldest_that_fits_and_is_safe(
    data: st.DataObject, two: bool
):
    quotas: dict = {"domain": {"a": {"min": 2, "max": 4}}}
    if two:
        quotas["level"] = {"x": {"min": 2, "max": 4}}
    config = make_config(
        batch={"groups": 6, "mini_batches": 2, "trajectories_per_group": 2, "quotas": quotas, "mini_batch_tokens": 60}
    )
    universe = [{"domain": d, "level": v} for d in "ab" for v in "xy"]
    state = AdmissionState(rules_of(config, [one for one in universe for _ in range(6)]))
    groups = []
    for _ in range(data.draw(st.integers(3, 8))):
        one = data.draw(st.sampled_from(universe))
        groups.append((long(state, one, data.draw(st.integers(4, 40))), one))
    expected = None
    for chosen in itertools.combinations(groups, 3):
        a = sum(one["domain"] == "a" for _, one in chosen)
        x = sum(one["level"] == "x" for _, one in chosen)
        safe = a >= 0 and (not two or x >= 0)  # three more slots can still bring two of each
        if safe and sum(tokens_of(state.groups[g]) for g, _ in chosen) <= 60:
            expected = [g for g, _ in chosen]
            break
    choice = MiniBatchPolicy().next_mini_batch(state)
    if expected is None:
        assert isinstance(choice, Waiting)
        assert choice.rule == "batch.mini_batch_tokens"
    else:
        assert isinstance(choice, tuple)
        assert [g.group_id for g in choice] == expected


def test_a_group_that_fits_no_mini_batch_is_dropped_with_the_reason():
    rules = Rules(4, 2, None, {}, mini_batch_tokens=30)
    meta = make_group(0, "h", (0, 0), 0)  # 40 tokens
    reason = drop_reason(rules, meta)
    assert reason is not None
    assert "40 tokens, at most 26" in reason
    assert drop_reason(Rules(4, 2, None, {}, mini_batch_tokens=60), meta) is None


# --- fairness and supply ------------------------------------------------------------------------------------------


def timed(state: AdmissionState, seconds: float) -> int:
    group_id = state.next_group_id
    state.apply(
        ev.Leased(time_s=0, group_id=group_id, prompt_id=f"p{group_id}", epoch=0, attributes={}, host="h", version=0)
    )
    state.apply(ev.Started(time_s=0, group_id=group_id))
    state.apply(ev.Ready(time_s=seconds, group=make_group(group_id, "h", (0, 0), 0), episode_retries=0))
    return group_id


def test_slow_groups_get_a_share_of_every_mini_batch_and_the_rest_when_nothing_else_is_there():
    state = AdmissionState(Rules(16, 2, None, {}, spread_slow=True))
    for _ in range(200):  # learns what is slow
        group_id = timed(state, 1.0)
        state.apply(ev.Filtered(time_s=1.0, group_id=group_id, reason=""))
    slow = [timed(state, 9.0) for _ in range(5)]
    fast = [timed(state, 0.1) for _ in range(6)]
    choice = MiniBatchPolicy().next_mini_batch(state)
    assert isinstance(choice, tuple)
    assert [g.group_id for g in choice] == [*slow[:2], *fast], "a quarter of eight are slow"
    admit(state, [g.group_id for g in choice])
    for _ in range(5):
        timed(state, 9.0)
    choice = MiniBatchPolicy().next_mini_batch(state)
    assert isinstance(choice, tuple), "slow groups alone are taken rather than waited with"


def test_what_a_data_set_that_runs_out_leaves_missing_is_known_at_once():
    rules = resolve(
        BatchConfig(
            groups=4,
            mini_batches=2,
            trajectories_per_group=2,
            quotas={"domain": {"a": Bound(min=2), "b": Bound(min=1)}},
        ),
        [{"domain": v} for v in "aaaabbbb"],
    )
    state = AdmissionState(rules)
    add_ready(state, {"domain": "b"})
    assert unfinishable(state, {("a",): 2, ("b",): 1}) is None
    waiting = unfinishable(state, {("a",): 1, ("b",): 5})
    assert waiting is not None
    assert (waiting.rule, waiting.value, waiting.missing) == ("batch.quotas.domain.min", "a", 1)


# --- overlapping quotas ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=10)
@given(
    seed=st.integers(0, 10**6),
    look_ahead=st.sampled_from([0, 3, 8]),
    fail_rate=st.sampled_from([0.0, 0.2]),
    policy=st.sampled_from(["mini_batch", "train_batch", "proportional"]),
)
def test_a_run_with_overlapping_quotas_ends_with_every_batch_within_all_of_them(
    seed: int, look_ahead: int, fail_rate: float, policy: str
):
    quotas = {
        "domain": {"a": {"min": 0.5, "max": 0.5}},
        "level": {"hard": {"min": 2, "max": 3}},
        "language": {"de": {"min": 2}, "en": {"max": 5}},
    }
    combinations = [(d, v, w) for d in "ab" for v in ("easy", "hard") for w in ("de", "en", "zh")]
    prompts: list[tuple[str, dict[str, str]]] = [
        (f"{index}-{copy}", dict(zip(("domain", "level", "language"), one, strict=True)))
        for index, one in enumerate(combinations)
        for copy in range(6)
    ]
    config = make_config(
        batch__quotas=quotas,
        admission__look_ahead_groups=look_ahead,
        admission__policy=policy,
        train__publish="train_batch",
    )
    core = make_core(config, prompts)
    model = Model(core, hosts=2, seed=seed, after_step=lambda m: m.core.state.accounts.check())
    model.run(fail_rate=fail_rate)
    assert core.ending == "finished"
    leased = {e.group_id: e.attributes for e in model.events if isinstance(e, ev.Leased)}
    batches = batches_of(model)
    assert len(batches) == 3
    for batch in batches:
        values = [value for ready in batch for value in leased[ready.group.group_id].values()]
        assert len(batch) == 8
        assert values.count("a") == 4
        assert 2 <= values.count("hard") <= 3
        assert values.count("de") >= 2
        assert values.count("en") <= 5
    assert fold(core.state.rules, model.events) == core.state
