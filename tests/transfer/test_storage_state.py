import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from knittrans_jax.trajectory import GroupPayload, media_digest
from knittrans_jax.transfer.bulk import Put, put_frame
from knittrans_jax.transfer.storage_state import StorageMissing, StorageRefused, StorageState

from .payloads import random_group, random_image

BUDGET = 2000
IMAGES = [random_image(np.random.default_rng(seed), 4 + 4 * seed) for seed in range(3)]


def header(payload: GroupPayload) -> Put:
    return put_frame(payload)[0]


class StorageModel(RuleBasedStateMachine):
    """Any order of puts, releases and failed puts, against a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.state = StorageState("host0", BUDGET)
        self.groups: dict[int, GroupPayload] = {}

    @rule(group_id=st.integers(0, 8), images=st.sets(st.integers(0, 2)), size=st.integers(1, 40))
    def put(self, group_id: int, images: set[int], size: int) -> None:
        chosen = tuple(IMAGES[i] for i in sorted(images))
        payload = random_group(np.random.default_rng(group_id), group_id, (size, 3), chosen)
        try:
            self.state.put(payload, header(payload))
        except StorageRefused:
            held = self.groups.get(group_id)
            assert (held is not None and held is not payload) or payload.size_bytes > BUDGET - self.state.held_bytes
        else:
            self.groups.setdefault(group_id, payload)

    @rule(group_id=st.integers(0, 8))
    def a_put_that_breaks_off(self, group_id: int) -> None:
        payload = random_group(np.random.default_rng(1), group_id, (4,))
        if group_id not in self.groups and payload.size_bytes <= BUDGET - self.state.held_bytes:
            assert self.state.reserve(header(payload))
            with pytest.raises(StorageRefused, match="another connection"):
                self.state.reserve(header(payload))
            assert self.state.reserved_bytes == payload.size_bytes
            self.state.cancel(group_id)

    @rule(ids=st.lists(st.integers(0, 8)))
    def release(self, ids: list[int]) -> None:
        before = self.state.held_bytes
        assert self.state.release(ids) == before - self.state.held_bytes
        for group_id in ids:
            self.groups.pop(group_id, None)

    @invariant()
    def holds_exactly_its_groups_and_each_image_once(self) -> None:
        media = {digest: image for g in self.groups.values() for digest, image in g.media.items()}
        rows = sum(t.size_bytes for g in self.groups.values() for t in g.trajectories)
        assert self.state.held_bytes == rows + sum(image.nbytes for image in media.values()) <= BUDGET
        assert self.state.held_media == len(media)
        assert self.state.reserved_bytes == 0
        assert [entry.group_id for entry in self.state.inventory()] == sorted(self.groups)
        for group_id, payload in self.groups.items():
            (row,) = self.state.rows([(group_id, 1)], ("tokens_T",))
            assert np.array_equal(row.tokens_T, payload.trajectories[1].tokens_T)
            for digest, image in payload.media.items():
                assert np.array_equal(self.state.media([(group_id, digest)])[0], image)


StorageModel.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestStorageModel = StorageModel.TestCase


def test_a_put_above_the_budget_is_refused_with_the_key_to_change():
    state = StorageState("host0", 50)
    payload = random_group(np.random.default_rng(0), 1, (4,))
    with pytest.raises(StorageRefused, match=r"group 1 needs 52 bytes, 50 of unit host0's 50 .*rollout\.storage_bytes"):
        state.put(payload, header(payload))
    assert state.held_bytes == state.reserved_bytes == 0


def test_an_image_whose_content_is_not_its_digest_is_refused():
    state = StorageState("host0", BUDGET)
    good = random_group(np.random.default_rng(0), 1, (4,), (IMAGES[0],))
    lie = GroupPayload(group_id=1, trajectories=good.trajectories, media={media_digest(IMAGES[1]): IMAGES[0]})
    with pytest.raises(StorageRefused, match="content is not what digest"):
        state.put(lie, header(lie))
    assert state.held_bytes == state.reserved_bytes == state.held_groups == 0


def test_putting_a_held_group_again_changes_nothing_and_another_under_its_id_is_refused():
    state = StorageState("host0", BUDGET)
    payload = random_group(np.random.default_rng(0), 1, (4, 2))
    state.put(payload, header(payload))
    state.put(payload, header(payload))
    assert state.held_bytes == payload.size_bytes
    other = random_group(np.random.default_rng(0), 1, (4, 3))
    with pytest.raises(StorageRefused, match="with other trajectories"):
        state.put(other, header(other))


def test_what_is_not_held_is_named():
    state = StorageState("host0", BUDGET)
    payload = random_group(np.random.default_rng(0), 1, (4,))
    state.put(payload, header(payload))
    with pytest.raises(StorageMissing, match="does not hold group 2"):
        state.rows([(2, 0)], ("tokens_T",))
    with pytest.raises(StorageMissing, match="has 1 trajectories, no index 1"):
        state.rows([(1, 1)], ("tokens_T",))
    with pytest.raises(StorageMissing, match="no such fields"):
        state.rows([(1, 0)], ("secrets",))
    with pytest.raises(StorageMissing, match="has no image"):
        state.media([(1, "x")])
