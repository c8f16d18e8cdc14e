"""Overlapping rules against brute force: every answer of the completion, and whole batches of admission.

The brute force counts over compositions of a batch by kind; it shares no code with what is tested.
"""

import functools
import itertools
import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.completion import Kind
from knittrans_jax.admission.completion_overlap import Overlapping
from knittrans_jax.admission.completion_solver import Program, make_cut, solve, tightest_cut
from knittrans_jax.admission.completion_space import Space
from knittrans_jax.admission.policy import MiniBatchPolicy, Waiting
from knittrans_jax.admission.rules import Rules, resolve
from knittrans_jax.admission.state import AdmissionState, fold
from knittrans_jax.config import BatchConfig, Bound, ConfigError

from .test_policy import add_ready, admit, sorted_ready

VALUES = {"domain": ("a", "b"), "level": ("x", "y"), "language": ("en", "de")}
Quotas = tuple[tuple[str, str, int, int], ...]
"""(attribute, value, least, most)."""
Universe = tuple[Kind, ...]


@functools.cache
def batches(
    groups: int, quotas: Quotas, attributes: tuple[str, ...], universe: Universe
) -> tuple[tuple[int, ...], ...]:
    """Every whole batch that keeps all quotas, as counts by kind of the universe."""
    found = []
    for bars in itertools.combinations(range(groups + len(universe) - 1), len(universe) - 1):
        edges = (-1, *bars, groups + len(universe) - 1)
        counts = tuple(b - a - 1 for a, b in itertools.pairwise(edges))
        have = {
            (name, value): sum(
                c for c, kind in zip(counts, universe, strict=True) if kind[attributes.index(name)] == value
            )
            for name, value, _, _ in quotas
        }
        if all(least <= have[name, value] <= most for name, value, least, most in quotas):
            found.append(counts)
    return tuple(found)


def completes(case: tuple, admitted: tuple[int, ...]) -> bool:
    """Some whole batch contains these counts."""
    return any(all(a <= b for a, b in zip(admitted, batch, strict=True)) for batch in batches(*case))


def usable(case: tuple, admitted: tuple[int, ...], pool: tuple[int, ...]) -> int:
    """The most groups of the pool that a batch containing `admitted` can hold besides."""
    return max(
        sum(min(b - a, p) for a, b, p in zip(admitted, batch, pool, strict=True))
        for batch in batches(*case)
        if all(a <= b for a, b in zip(admitted, batch, strict=True))
    )


def oldest_safe(case: tuple, admitted: tuple[int, ...], ready: list[int], wanted: int) -> tuple[int, ...] | None:
    """Indices of the lexicographically oldest safe `wanted` of the ready groups; None: none are."""
    for chosen in itertools.combinations(range(len(ready)), wanted):
        counts = list(admitted)
        for index in chosen:
            counts[ready[index]] += 1
        if completes(case, tuple(counts)):
            return chosen
    return None


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[Rules, tuple]:
    """Rules on two or three attributes that some batch meets, and the same as a plain case."""
    mini_batches = draw(st.integers(1, 3))
    groups = mini_batches * draw(st.integers(1, 7 // mini_batches))
    attributes = tuple(VALUES)[: draw(st.integers(2, 3))]
    everything = list(itertools.product(*(VALUES[name] for name in attributes)))
    universe = tuple(sorted(draw(st.lists(st.sampled_from(everything), min_size=2, max_size=6, unique=True))))
    # A batch that exists, and bounds around it: rules that can be met, often tightly.
    batch = [draw(st.sampled_from(universe)) for _ in range(groups)]
    quotas: list[tuple[str, str, int, int]] = []
    for number, name in enumerate(attributes):
        named = [value for value in VALUES[name] if any(kind[number] == value for kind in universe)]
        for value in draw(st.lists(st.sampled_from(named), min_size=1, unique=True)):
            have = sum(kind[number] == value for kind in batch)
            least = draw(st.integers(max(0, have - 2), have))
            quotas.append((name, value, least, draw(st.integers(have, min(groups, have + 2)))))
    rules = resolve_quotas(groups, mini_batches, tuple(quotas), attributes, universe)
    return rules, (groups, tuple(quotas), attributes, universe)


def resolve_quotas(
    groups: int, mini_batches: int, quotas: Quotas, attributes: tuple[str, ...], universe: Universe, copies: int = 0
) -> Rules:
    bounds: dict[str, dict[str, Bound]] = {}
    for name, value, least, most in quotas:
        bounds.setdefault(name, {})[value] = Bound(min=least, max=most)
    config = BatchConfig(groups=groups, mini_batches=mini_batches, trajectories_per_group=2, quotas=bounds)
    prompts = [dict(zip(attributes, kind, strict=True)) for kind in universe for _ in range(copies or groups)]
    return resolve(config, prompts)


def filled(rules: Rules, universe: Universe, admitted: tuple[int, ...]) -> Overlapping:
    completion = rules.open_batch()
    assert isinstance(completion, Overlapping)
    completion.take_all({kind: count for kind, count in zip(universe, admitted, strict=True) if count})
    return completion


@st.composite
def partly_filled(draw: st.DrawFn) -> tuple[Rules, tuple, tuple[int, ...]]:
    rules, case = draw(overlapping())
    whole = draw(st.sampled_from(batches(*case)))
    return rules, case, tuple(draw(st.integers(0, count)) for count in whole)


@settings(deadline=None)
@given(partly_filled())
def test_a_group_may_be_taken_exactly_when_a_whole_batch_contains_the_result(case: tuple):
    rules, plain, admitted = case
    completion = filled(rules, plain[3], admitted)
    for index, kind in enumerate(plain[3]):
        after = tuple(count + (i == index) for i, count in enumerate(admitted))
        expected = completes(plain, after)
        assert completion.can_take(kind) == expected
        if expected:
            taken = completion.copy()
            taken.take(kind)
            assert taken == filled(rules, plain[3], after)
        else:
            with pytest.raises(ValueError, match="cannot take"):
                completion.copy().take(kind)


@settings(deadline=None)
@given(partly_filled(), st.data())
def test_usable_and_shortage_are_exact(case: tuple, data: st.DataObject):
    rules, plain, admitted = case
    universe = plain[3]
    pool = tuple(data.draw(st.integers(0, 4)) for _ in universe)
    counts = dict(zip(universe, pool, strict=True))
    expected = usable(plain, admitted, pool)
    assert filled(rules, universe, admitted).usable(counts) == expected
    for wanted in range(plain[0] - sum(admitted) + 1):
        shortage = filled(rules, universe, admitted).shortage(counts, wanted)
        assert (shortage is None) == (expected >= wanted)
        assert filled(rules, universe, admitted).can_use(counts, wanted) == (expected >= wanted)
        if shortage is not None:
            assert 1 <= shortage.missing <= wanted - expected
            assert shortage.kinds
            for kind in shortage.kinds:
                more = tuple(p + (universe[i] == kind) for i, p in enumerate(pool))
                assert usable(plain, admitted, more) > expected, "one more group that is said to be missing helps"


@settings(deadline=None, max_examples=60)
@given(overlapping(), st.data())
def test_over_whole_batches_admission_is_safe_work_conserving_and_lexicographically_oldest(
    case: tuple, data: st.DataObject
):
    rules, plain = case
    attributes, universe = plain[2], plain[3]
    state, policy, size = AdmissionState(rules), MiniBatchPolicy(), rules.mini_batch_groups
    for _ in range(2 * rules.mini_batches):
        room = max(0, 9 - state.accounts.counts[Account.READY])
        for kind in data.draw(st.lists(st.sampled_from(universe), max_size=room)):
            add_ready(state, dict(zip(attributes, kind, strict=True)))
        groups = sorted_ready(state)
        ready = [universe.index(group.final) for group in groups]
        admitted = tuple(state.batch.admitted.get(kind, 0) for kind in universe)
        expected = oldest_safe(plain, admitted, ready, size)
        choice = policy.next_mini_batch(state)
        if expected is None:
            assert isinstance(choice, Waiting)
            assert choice.missing >= 1
            continue
        assert isinstance(choice, tuple)
        assert [g.group_id for g in choice] == [groups[i].group_id for i in expected]
        step = state.batch.train_step
        admit(state, [g.group_id for g in choice])
        if state.batch.train_step > step:
            whole = tuple(a + [ready[i] for i in expected].count(t) for t, a in enumerate(admitted))
            assert whole in batches(*plain)
        else:
            assert completes(plain, tuple(state.batch.admitted.get(kind, 0) for kind in universe))
        state.accounts.check()


def test_the_answer_depends_on_the_groups_and_not_on_what_was_asked_before():
    """Two controllers, one of which was asked about everything on the way, choose alike."""
    for seed in range(5):
        draw = random.Random(seed)
        universe = tuple(itertools.product(*VALUES.values()))
        quotas = (("domain", "a", 6, 6), ("level", "x", 3, 7), ("language", "en", 4, 8), ("language", "de", 3, 8))
        states = [AdmissionState(resolve_quotas(12, 4, quotas, tuple(VALUES), universe)) for _ in range(2)]
        for _ in range(60):
            kind = draw.choice(universe)
            for state in states:
                add_ready(state, dict(zip(VALUES, kind, strict=True)))
            nosy = states[1].batch.completion
            for other in universe:
                nosy.can_take(other)
            nosy.usable(states[1].accounts.ready_by_kind)
            choices = [MiniBatchPolicy().next_mini_batch(state) for state in states]
            if isinstance(choices[0], tuple):
                assert isinstance(choices[1], tuple)
                ids = [[g.group_id for g in choice] for choice in choices if isinstance(choice, tuple)]
                assert ids[0] == ids[1]
                for state in states:
                    admit(state, ids[0])
            else:
                assert choices[0] == choices[1]
        assert states[0] == states[1]


def test_few_prompts_of_a_kind_bound_it():
    universe = (("a", "x"), ("a", "y"), ("b", "x"), ("b", "y"))
    quotas = (("domain", "a", 2, 2), ("level", "x", 2, 2))
    rules = resolve_quotas(4, 2, quotas, ("domain", "level"), universe, copies=1)
    completion = rules.open_batch()
    completion.take(("a", "x"))
    assert not completion.can_take(("a", "x")), "its only prompt is in the batch"
    assert completion.can_take(("b", "x"))


def test_a_whole_valid_batch_near_the_data_set_s_shares_is_the_composition():
    universe = tuple(itertools.product("ab", "xy"))
    quotas = (("domain", "a", 4, 4), ("level", "x", 2, 3))
    rules = resolve_quotas(8, 2, quotas, ("domain", "level"), universe)
    assert rules.composition == {("a", "x"): 1, ("a", "y"): 3, ("b", "x"): 2, ("b", "y"): 2} or (
        sum(rules.composition.values()) == 8
        and rules.composition["a", "x"] + rules.composition["a", "y"] == 4
        and 2 <= rules.composition["a", "x"] + rules.composition["b", "x"] <= 3
    )


def test_a_composition_stays_off_the_bounds_of_ranges_where_it_can():
    universe = tuple(itertools.product("ab", "xyz"))
    quotas = (("domain", "a", 24, 24), ("level", "x", 0, 12), ("level", "y", 20, 40))
    rules = resolve_quotas(48, 6, quotas, ("domain", "level"), universe)
    by_level = {level: sum(n for kind, n in rules.composition.items() if kind[1] == level) for level in "xyz"}
    assert by_level["x"] <= 12 - 3, "a quarter of the range; by shares alone it would be 16"
    assert 20 + 4 <= by_level["y"] <= 40 - 4, "half a mini-batch"
    assert sum(n for kind, n in rules.composition.items() if kind[0] == "a") == 24
    tight = resolve_quotas(48, 6, (*quotas[:2], ("level", "y", 36, 40)), ("domain", "level"), universe)
    assert sum(tight.composition.values()) == 48


# --- contradictions -------------------------------------------------------------------------------------------------------


def test_rules_that_contradict_each_other_are_named_and_no_others():
    universe = (("a", "x"), ("b", "y"), ("b", "x"))
    quotas = (("domain", "a", 5, 8), ("level", "y", 4, 8), ("level", "x", 0, 7))
    with pytest.raises(ConfigError) as error:
        resolve_quotas(8, 2, quotas, ("domain", "level"), universe)
    text = str(error.value)
    assert "batch.quotas.domain.a.min = 5" in text
    assert "batch.quotas.level.y.min = 4" in text
    assert "level.x" not in text


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_rules_are_refused_exactly_when_no_batch_meets_them_and_without_any_one_of_those_named_some_batch_does(
    data: st.DataObject,
):
    attributes = tuple(VALUES)[:2]
    everything = list(itertools.product(*(VALUES[name] for name in attributes)))
    universe = tuple(sorted(data.draw(st.lists(st.sampled_from(everything), min_size=1, unique=True))))
    groups = data.draw(st.integers(1, 5))
    quotas: list[tuple[str, str, int, int]] = []
    for number, name in enumerate(attributes):
        for value in {kind[number] for kind in universe}:
            low, high = sorted([data.draw(st.integers(0, groups)), data.draw(st.integers(0, groups))])
            quotas.append((name, value, low, high))
    assume(len({name for name, *_ in quotas}) == 2)
    possible = bool(batches(groups, tuple(quotas), attributes, universe))
    try:
        resolve_quotas(groups, 1, tuple(quotas), attributes, universe)
    except ConfigError as error:
        assert not possible
        named = [q for q in quotas if f"batch.quotas.{q[0]}.{q[1]}.m" in str(error)]
        if "can meet" in str(error) and "add up" not in str(error) and "at most" not in str(error):
            kept = [
                (
                    name,
                    value,
                    least if f"{name}.{value}.min =" in str(error) else 0,
                    most if f"{name}.{value}.max =" in str(error) else groups,
                )
                for name, value, least, most in named
            ]
            assert not batches(groups, tuple(kept), attributes, universe), "those named do contradict each other"
            for index, (name, value, least, most) in enumerate(kept):
                if least:
                    without = [*kept[:index], (name, value, 0, most), *kept[index + 1 :]]
                    assert batches(groups, tuple(without), attributes, universe)
                if most < groups:
                    without = [*kept[:index], (name, value, least, groups), *kept[index + 1 :]]
                    assert batches(groups, tuple(without), attributes, universe)
    else:
        assert possible


# --- the fold ---------------------------------------------------------------------------------------------------------------


def test_a_batch_folded_again_without_what_was_remembered_gives_the_same_state():
    universe = tuple(itertools.product(*VALUES.values()))
    quotas = (("domain", "a", 6, 6), ("level", "x", 4, 6), ("language", "en", 5, 7))
    draw = random.Random(3)
    rules = resolve_quotas(12, 4, quotas, tuple(VALUES), universe)
    state, events = AdmissionState(rules), []
    apply = state.apply
    state.apply = lambda event: (events.append(event), apply(event))[1]
    for _ in range(80):
        add_ready(state, dict(zip(VALUES, draw.choice(universe), strict=True)))
        choice = MiniBatchPolicy().next_mini_batch(state)
        if isinstance(choice, tuple):
            admit(state, [g.group_id for g in choice])
    del state.apply
    again = fold(resolve_quotas(12, 4, quotas, tuple(VALUES), universe), events)
    assert state.batch.train_step >= 2
    assert again == state


def test_the_solver_agrees_with_brute_force_on_what_the_swaps_leave_open():
    """`Space.solve` alone, without any witness: the fallback's own answer."""
    universe = tuple(itertools.product("ab", "xy"))
    quotas = (("domain", "a", 2, 3), ("level", "x", 1, 2))
    rules = resolve_quotas(4, 2, quotas, ("domain", "level"), universe)
    space = rules.space
    assert isinstance(space, Space)
    case = (4, quotas, ("domain", "level"), universe)
    least, most = [row.least for row in space.rows], [row.most for row in space.rows]
    for pool in itertools.product(range(3), repeat=4):
        found = solve(Program(space.matrix, 4, least, most, [0] * 4), pool)
        assert found is not None
        assert tuple(found) in batches(*case)
        assert sum(map(min, found, pool)) == usable(case, (0, 0, 0, 0), pool)


@settings(deadline=None)
@given(overlapping(), st.data())
def test_a_cut_bounds_every_pool_of_every_batch_whatever_multipliers_it_is_made_of(case: tuple, data: st.DataObject):
    """Also of multipliers that are no optimum of anything, and for batches that it was not found for."""
    rules, plain = case
    universe, space = plain[3], rules.space
    number = len(space.rows)
    multipliers = st.floats(-2, 2)
    cut = make_cut(
        space.matrix,
        data.draw(multipliers),
        np.array([data.draw(multipliers) for _ in range(number)]),
        np.array([data.draw(multipliers) for _ in range(number)]),
    )
    whole = data.draw(st.sampled_from(batches(*plain)))
    admitted = tuple(data.draw(st.integers(0, count)) for count in whole)
    completion = filled(rules, universe, admitted)
    pool = tuple(data.draw(st.integers(0, 4)) for _ in universe)
    order = [universe.index(kind) for kind in space.kinds]
    counts = np.array([pool[i] for i in order])
    bound = cut.slots * completion.slots + cut.most @ completion.most - cut.least @ completion.least + cut.pool @ counts
    assert bound >= usable(plain, admitted, pool) - 1e-9
    program = completion.program()
    best = tightest_cut(program, counts.tolist())
    lowest = (
        best.slots * completion.slots + best.most @ completion.most - best.least @ completion.least + best.pool @ counts
    )
    assert usable(plain, admitted, pool) - 1e-6 <= lowest <= bound + 1e-6
