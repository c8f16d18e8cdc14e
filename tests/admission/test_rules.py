import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from knittrans_jax.admission.completion import Completion, Quota
from knittrans_jax.admission.feasibility import check
from knittrans_jax.admission.rules import Rules, resolve
from knittrans_jax.config import BatchConfig, Bound, ConfigError

from . import brute

VALUES = ["a", "b", "c"]
Case = tuple[Rules, brute.Bounds]
Filled = tuple[Rules, brute.Bounds, tuple[int, ...], Completion]


@st.composite
def feasible_rules(draw: st.DrawFn, most_groups: int = 8) -> tuple[Rules, brute.Bounds]:
    """Rules on up to three values that some batch can meet, and the same as plain bounds."""
    mini_batches = draw(st.integers(1, 3))
    groups = mini_batches * draw(st.integers(1, most_groups // mini_batches))
    bounds = []
    for _ in range(draw(st.integers(1, 3))):
        most = draw(st.integers(0, groups))
        bounds.append((draw(st.integers(0, most)), most))
    assume(brute.batches(groups, tuple(bounds)))
    quotas = {VALUES[i]: Quota(*bound) for i, bound in enumerate(bounds)}
    return Rules(groups, mini_batches, "domain", quotas), tuple(bounds)


@st.composite
def partly_filled(draw: st.DrawFn) -> tuple[Rules, brute.Bounds, tuple[int, ...], Completion]:
    """Rules, and a batch that holds some composition which can be finished."""
    rules, bounds = draw(feasible_rules())
    whole = draw(st.sampled_from(brute.batches(rules.groups, bounds)))
    admitted = tuple(draw(st.integers(0, count)) for count in whole)
    completion = rules.open_batch()
    for value, count in zip(VALUES, admitted, strict=False):
        for _ in range(count):
            completion.take((value,))
    return rules, bounds, admitted, completion


@given(partly_filled())
def test_a_group_may_be_taken_exactly_when_a_whole_batch_contains_the_result(case: Filled):
    rules, bounds, admitted, completion = case
    for index in range(len(bounds)):
        after = tuple(count + (i == index) for i, count in enumerate(admitted))
        assert completion.can_take((VALUES[index],)) == brute.completes(rules.groups, bounds, after)


@given(partly_filled(), st.data())
def test_usable_is_the_most_that_any_whole_batch_can_hold(case: Filled, data: st.DataObject):
    rules, bounds, admitted, completion = case
    pool = tuple(data.draw(st.integers(0, rules.groups + 1)) for _ in bounds)
    kinds = {(VALUES[i],): count for i, count in enumerate(pool)}
    expected = brute.usable(rules.groups, bounds, admitted, pool)
    assert completion.usable(kinds) == expected
    for wanted in range(rules.groups - sum(admitted) + 1):
        shortage = completion.shortage(kinds, wanted)
        assert (shortage is None) == (expected >= wanted)
        if shortage is not None:
            assert 1 <= shortage.missing <= wanted - expected
            assert any(
                brute.usable(
                    rules.groups, bounds, admitted, tuple(p + (VALUES[i] == kind[0]) for i, p in enumerate(pool))
                )
                > expected
                for kind in shortage.kinds
            ), "one more group of a kind that is said to be missing helps"


def test_taking_what_breaks_a_rule_raises():
    completion = Rules(2, 1, "domain", {"a": Quota(0, 1), "b": Quota(1, 2)}).open_batch()
    completion.take(("a",))
    with pytest.raises(ValueError, match="cannot take"):
        completion.take(("a",))


def test_without_quotas_there_is_one_kind_and_only_the_size_counts():
    rules = resolve(BatchConfig(groups=4, mini_batches=2, trajectories_per_group=2), [{}] * 5)
    assert rules.kinds == ((),)
    assert rules.open_batch().usable({(): 9}) == 4


def batch(groups: int = 8, **domains: Bound) -> BatchConfig:
    return BatchConfig(groups=groups, mini_batches=2, trajectories_per_group=2, quotas={"domain": domains})


def prompts(**counts: int) -> list[dict[str, str]]:
    return [{"domain": value} for value, count in counts.items() for _ in range(count)]


def test_counts_and_shares_become_groups_and_other_values_are_free_within_what_is_left():
    rules = resolve(batch(a=Bound(min=0.25, max=0.25), b=Bound(min=3)), prompts(a=9, b=9, c=9))
    assert rules.quotas == {"a": Quota(2, 2), "b": Quota(3, 6), "c": Quota(0, 3)}


def test_a_maximum_is_lowered_to_the_number_of_prompts():
    assert resolve(batch(a=Bound(max=6)), prompts(a=4, b=20)).quotas["a"] == Quota(0, 4)


@pytest.mark.parametrize(
    ("config", "have", "message"),
    [
        (batch(a=Bound(min=0.3)), prompts(a=9, b=9), r"domain\.a\.min.*not a whole number"),
        (batch(a=Bound(min=5), b=Bound(min=4)), prompts(a=9, b=9), "minima add up to 9"),
        (batch(a=Bound(min=5, max=4)), prompts(a=9, b=9), r"domain\.a.*above max"),
        (batch(a=Bound(min=1)), prompts(b=9), r"domain\.a\.min.*no training prompts"),
        (batch(a=Bound(min=3)), prompts(a=2, b=9), r"domain\.a\.min.*but 2 training prompts"),
        (batch(a=Bound(max=3), b=Bound(max=4)), prompts(a=9, b=9), "at most 7 groups"),
        (batch(groups=8), prompts(a=9), None),
        (batch(a=Bound(min=1)), [{"language": "en"}], "has no attribute 'domain'"),
    ],
)
def test_what_no_batch_can_meet_is_found_at_the_start(config: BatchConfig, have: list, message: str | None):
    if message is None:
        resolve(BatchConfig(groups=8, mini_batches=2, trajectories_per_group=2), have)
        return
    with pytest.raises(ConfigError, match=message):
        resolve(config, have)


def test_too_few_different_prompts_for_a_batch_are_found_without_quotas_too():
    with pytest.raises(ConfigError, match=r"batch\.groups.*at most 3"):
        resolve(BatchConfig(groups=4, mini_batches=2, trajectories_per_group=2), [{}] * 3)


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=3))
def test_check_accepts_exactly_the_rules_that_some_batch_can_meet(groups: int, values: list[tuple[int, int, int]]):
    quotas = {VALUES[i]: Quota(least, most) for i, (least, most, _) in enumerate(values)}
    have = {VALUES[i]: count for i, (_, _, count) in enumerate(values) if count}
    bounds = tuple((least, min(most, count)) for least, most, count in values)
    possible = bool(brute.batches(groups, bounds)) if bounds else False
    try:
        check(Rules(groups, 1, "domain", quotas), have)
    except ConfigError:
        assert not possible
    else:
        assert possible
