"""The frozen encoder's table: bounded, least recently used first, and the same in every process."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from knittrans_jax.encoding.table_cache import TableCache

SIZES = {"a": 1, "b": 2, "c": 3, "d": 1, "e": 4, "f": 2}
ROWS = 10
mini_batches = st.lists(
    st.tuples(
        st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=4, unique=True).filter(
            lambda digests: sum(SIZES[d] for d in digests) <= ROWS
        ),
        st.integers(0, 1),
    ),
    max_size=12,
)


def tokens_of(digests: list[str]) -> dict[str, int]:
    return {digest: SIZES[digest] for digest in digests}


@given(mini_batches)
def test_it_holds_what_a_list_of_most_recent_uses_holds(calls: list[tuple[list[str], int]]) -> None:
    cache, twin = TableCache(ROWS, "settings"), TableCache(ROWS, "settings")
    recent: list[tuple[str, int]] = []  # brute force: oldest use first
    table: dict[int, tuple[str, int, int]] = {}  # what a device would hold, by row
    hits = 0
    for digests, version in calls:
        placed = cache.place(tokens_of(digests), version)
        again = twin.place(tokens_of(digests), version)
        assert [placed.missing, placed.evicted] == [again.missing, again.evicted]
        assert all(np.array_equal(placed.rows[d], again.rows[d]) for d in digests)

        held = [d for d in digests if (d, version) in recent]
        assert placed.missing == tuple(d for d in digests if d not in held)
        recent = [key for key in recent if key not in [(d, version) for d in held]] + [(d, version) for d in held]
        evicted = 0
        for digest in placed.missing:
            while sum(SIZES[d] for d, _ in recent) + SIZES[digest] > ROWS:
                recent.pop(0)
                evicted += 1
            recent.append((digest, version))
        assert placed.evicted == evicted
        hits += len(held)

        for digest in placed.missing:
            table.update({int(row): (digest, version, at) for at, row in enumerate(placed.rows[digest])})
        for digest in digests:
            assert [table[int(row)] for row in placed.rows[digest]] == [
                (digest, version, i) for i in range(SIZES[digest])
            ]
        assert cache.held_rows == sum(SIZES[d] for d, _ in recent) <= ROWS
    assert cache.counters.hits == hits
    assert cache.counters.hits + cache.counters.misses == sum(len(digests) for digests, _ in calls)


def test_other_settings_or_another_encoder_are_other_features() -> None:
    cache = TableCache(ROWS, "settings")
    assert cache.place({"a": 2}, 0).missing == ("a",)
    assert cache.place({"a": 2}, 0).missing == ()
    assert cache.place({"a": 2}, 1).missing == ("a",)
    assert cache.place({"a": 2}, 0).missing == ()


def test_a_mini_batch_that_does_not_fit_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"train.encoder_cache_bytes: .* 11 tokens, but the table holds 10"):
        TableCache(ROWS, "settings").place({"a": 5, "b": 6}, 0)
