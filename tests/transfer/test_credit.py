"""Credit by turn: an answer's tokens carry the advantage of that answer among the members that gave it."""

import numpy as np
import pytest

from knittrans_jax.train.advantages import group_advantages
from knittrans_jax.trajectory import PlannedGroup
from knittrans_jax.transfer import pack


def planned(**fields: object) -> PlannedGroup:
    return PlannedGroup(group_id=0, unit="host0", payload_bytes=1, **fields)  # pyright: ignore[reportArgumentType]


def centred(rewards: object) -> np.ndarray:
    return group_advantages(rewards, False)  # pyright: ignore[reportArgumentType]


def test_a_trajectorys_reward_is_shared_by_its_answers():
    rows = pack._answer_advantages(planned(rewards=(1.0, 0.0)), centred)
    sampled = np.array([False, True, True, False, True])
    tokens = pack._by_token(sampled, rows[0], "here")
    np.testing.assert_array_equal(tokens, [0, 0.5, 0.5, 0, 0.5])


def test_each_answer_is_compared_with_the_same_answer_of_the_members_that_gave_it():
    group = planned(rewards=(0.5, 0.5, 0.0), turn_rewards=((1.0, 0.0), (0.0, 1.0), (0.5,)))
    rows = pack._answer_advantages(group, centred)
    sampled = np.array([False, True, True, False, True])
    first, second = (pack._by_token(sampled, row, "here") for row in rows[:2])
    np.testing.assert_array_equal(first, [0, 0.5, 0.5, 0, -0.5])
    np.testing.assert_array_equal(second, [0, -0.5, -0.5, 0, 0.5])
    np.testing.assert_array_equal(rows[2], [0])


def test_a_trajectory_with_other_answers_than_rewards_is_refused():
    with pytest.raises(pack.PackError, match="2 answers came, the plan has rewards for 3"):
        pack._by_token(np.array([True, False, True]), np.zeros(3, np.float32), "group 0")
