from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from knittrans_jax.admission.prompts import PromptOrder
from knittrans_jax.admission.rules import Kind, Quota, Rules

RULES = Rules(4, 2, "domain", {"a": Quota(0, 4), "b": Quota(0, 4)})
PROMPTS = [(f"{value}{i}", {"domain": value}) for value in "ab" for i in range(5)]
A, B = ("a",), ("b",)


def nothing_busy(_: str) -> bool:
    return False


def take(order: PromptOrder, kind: Kind = A, busy: Callable[[str], bool] = nothing_busy) -> tuple[str, int]:
    entry = order.peek(kind, busy)
    assert entry is not None
    order.take(*entry)
    return entry


def test_every_epoch_is_a_permutation_of_its_own_and_kinds_do_not_disturb_each_other():
    order, alone = PromptOrder(RULES, PROMPTS, 0), PromptOrder(RULES, PROMPTS, 0)
    mixed = []
    for _ in range(10):
        mixed.append(take(order))
        take(order, B)
    assert mixed == [take(alone) for _ in range(10)]
    for epoch in (0, 1):
        ids = [prompt for prompt, e in mixed if e == epoch]
        assert sorted(ids) == [f"a{i}" for i in range(5)]
    assert [p for p, _ in mixed[:5]] != [p for p, _ in mixed[5:]]


def test_the_seed_decides_the_order():
    first, same, other = (PromptOrder(RULES, PROMPTS, seed) for seed in (0, 0, 1))
    a, b, c = ([take(order)[0] for _ in range(10)] for order in (first, same, other))
    assert a == b != c


def test_a_prompt_given_back_is_next_and_keeps_its_epoch():
    order = PromptOrder(RULES, PROMPTS, 0)
    first = take(order)
    take(order)
    order.give_back(*first)
    assert take(order) == first


def test_a_busy_prompt_keeps_its_place_even_over_the_end_of_its_epoch():
    order = PromptOrder(RULES, PROMPTS, 0)
    entry = order.peek(A, nothing_busy)
    assert entry is not None
    waiting = entry[0]
    others = [take(order, busy=lambda p: p == waiting) for _ in range(6)]
    assert others[-1][1] == 1, "the next epoch has begun"
    assert take(order) == (waiting, 0)


def test_when_every_prompt_is_busy_there_is_none():
    assert PromptOrder(RULES, PROMPTS, 0).peek(A, lambda _: True) is None


def test_looking_changes_nothing():
    order, other = PromptOrder(RULES, PROMPTS, 0), PromptOrder(RULES, PROMPTS, 0)
    for _ in range(3):
        order.peek(A, lambda p: p.endswith("1"))
    assert order == other


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 9)), max_size=60))
def test_replaying_what_was_taken_and_given_back_restores_the_order(moves: list[tuple[Kind, int]]):
    live, replayed = PromptOrder(RULES, PROMPTS, 3), PromptOrder(RULES, PROMPTS, 3)
    out: list[tuple[str, int]] = []
    calls = []
    for kind, choice in moves:
        if choice == 0 and out:
            entry = out.pop(0)
            live.give_back(*entry)
            calls.append(("give_back", entry))
        else:
            busy = {prompt for prompt, _ in out[-choice % 4 :]} if out else set()
            entry = live.peek(kind, busy.__contains__)
            if entry is not None:
                live.take(*entry)
                out.append(entry)
                calls.append(("take", entry))
    for name, entry in calls:
        getattr(replayed, name)(*entry)
    assert live == replayed
