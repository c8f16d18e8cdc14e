"""An hour's traffic compressed in time against a storage unit: memory stays flat, and no reference is left."""

import collections
import tracemalloc

import numpy as np

from knittrans_jax.trajectory import TRAJECTORY_BYTES_PER_TOKEN
from knittrans_jax.transfer.bulk import put_frame
from knittrans_jax.transfer.storage_state import StorageState

from .payloads import random_group, random_image

GROUPS = 3600
"""One group a second."""
RETAINED = 24
"""Groups that a restart could need at any time."""
MOST_GROUP_BYTES = (20 + 30) * TRAJECTORY_BYTES_PER_TOKEN + 2 * 32 * 32


def test_an_hour_of_groups_leaves_memory_flat_and_no_reference():
    rng = np.random.default_rng(0)
    pictures = [
        random_image(rng, 32, 32) for _ in range(40)
    ]  # prompts come again, and share pictures while they are held
    state = StorageState("host0", 10**6)
    held: collections.deque[int] = collections.deque()
    peaks = []
    tracemalloc.start()
    try:
        for quarter in range(4):
            tracemalloc.reset_peak()
            for group_id in range(quarter * GROUPS // 4, (quarter + 1) * GROUPS // 4):
                payload = random_group(
                    rng, group_id, (20, 30), images=(pictures[group_id % 40], pictures[group_id % 7])
                )
                state.put(payload, put_frame(payload)[0])
                held.append(group_id)
                if len(held) > RETAINED:
                    state.release((held.popleft(),))
                assert state.held_groups == len(held)
                assert state.held_bytes <= RETAINED * MOST_GROUP_BYTES
            peaks.append(tracemalloc.get_traced_memory()[1])
        assert max(peaks[1:]) < 1.1 * peaks[0], f"bytes at the peak of each quarter: {peaks}"
    finally:
        tracemalloc.stop()
    state.release(tuple(held))
    assert (state.held_bytes, state.held_groups, state.held_media, state.reserved_bytes) == (0, 0, 0, 0)
    assert state._groups == state._media == state._reserved == {}
