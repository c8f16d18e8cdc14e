import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from knittrans_jax.models.config import PRESETS
from knittrans_jax.models.positions import mrope_positions
from knittrans_jax.rollout.slots import Phase, SlotTable, TrajectoryTooLong
from knittrans_jax.rollout.tasks.base import TaskLimits, Turn
from knittrans_jax.rollout.text import Vocabulary
from knittrans_jax.rollout.turns import TurnEncoder
from knittrans_jax.trajectory import NOT_SAMPLED

LIMITS = TaskLimits(
    turns=9, text_tokens_per_turn=9, images_per_turn=2, image_shapes=((16, 16, 1), (8, 24, 1)), answer_tokens=3
)
VOCABULARY = Vocabulary()
END = VOCABULARY.end


def encoder() -> TurnEncoder:
    return TurnEncoder(VOCABULARY, LIMITS, PRESETS["tiny"].vision)


pictures = st.builds(
    lambda shape, value: np.full(shape, value, np.uint8), st.sampled_from(LIMITS.image_shapes), st.integers(0, 3)
)
turns = st.builds(
    lambda before, text, after: Turn((*before, text, *after)),
    st.lists(pictures, max_size=1),
    st.text("abc 12", min_size=1, max_size=5),
    st.lists(pictures, max_size=1),
)
answers = st.lists(st.integers(5, 14), max_size=3)
"""Sampled tokens before the end token; three of them are cut off at the limit."""


@hypothesis.given(st.lists(st.tuples(turns, answers), min_size=1, max_size=4), st.integers(1, 12))
def test_what_is_prefilled_and_fed_is_the_transcript_with_the_positions_of_one_pass(
    conversation: list[tuple[Turn, list[int]]], width: int
):
    table = SlotTable(slots=3, capacity=120, end_id=END, max_answer_tokens=3)
    encode = encoder().encode
    slot, tokens, positions, pictures_seen, rest, version = 1, [], [], [], [], 7
    grids = []
    table.begin(slot)
    for turn, answer in conversation:
        encoded = encode(turn)
        grids += [image.grid for image in encoded.images]
        table.show(slot, encoded)
        while table.phase[slot] == Phase.PROMPT:
            batch = table.prefill_batch(table.waiting(), rows=2, width=width)
            new = int(batch.new[0])
            tokens += batch.tokens_RxW[0, :new].tolist()
            positions.append(batch.positions_Rx3xW[0, :, :new])
            pictures_seen += [
                batch.images[handle].digest for handle in batch.image_RxW[0, :new].tolist() if handle >= 0
            ]
            assert (batch.image_RxW[1] == -1).all()
            table.prefilled(batch)
            if batch.complete[0]:
                first, *rest = [*answer, END][:3]
                table.sampled(np.array([slot]), np.array([first]), np.array([-1.0], np.float32), version)
        for token in rest:
            fed, at = table.last(np.array([slot]))
            tokens.append(int(fed[0]))
            positions.append(np.full((3, 1), at[0]))
            table.fed(np.array([slot]))
            table.sampled(np.array([slot]), np.array([token]), np.array([-1.0], np.float32), version)
        assert table.ended().tolist() == [slot]
        given, ended = table.answer(slot)
        assert (given.tolist(), ended) == (answer, len(answer) < 3)
    trajectory, images, _ = table.transcript(slot)
    assert tokens == trajectory.tokens_T[:-1].tolist()  # the very last token is never fed
    expected, _ = mrope_positions(trajectory.tokens_T, grids, VOCABULARY.image, 2)
    np.testing.assert_array_equal(np.concatenate(positions, axis=1), expected[:, :-1])
    assert pictures_seen == [image.digest for image in images for _ in range(image.grid[0] * image.grid[1] // 4)]
    assert trajectory.sampled_T.sum() == sum(min(len(answer) + 1, 3) for _, answer in conversation)
    assert ((trajectory.versions_T == 7) == trajectory.sampled_T).all()
    assert ((trajectory.versions_T == NOT_SAMPLED) != trajectory.sampled_T).all()


def test_a_turn_that_leaves_no_room_for_an_answer_is_refused_before_anything_changes():
    table = SlotTable(slots=1, capacity=10, end_id=END, max_answer_tokens=4)
    table.begin(0)
    with pytest.raises(TrajectoryTooLong, match=r"a turn of 7 .* more than rollout\.cache_tokens = 10"):
        table.show(0, encoder().encode(Turn(("abcabca",))))
    assert table.length[0] == 0
    table.show(0, encoder().encode(Turn(("abcabc",))))


def test_those_that_waited_longest_are_prefilled_first():
    table = SlotTable(slots=3, capacity=20, end_id=END, max_answer_tokens=4)
    turn = encoder().encode(Turn(("a",)))
    for slot in (2, 0, 1):
        table.begin(slot)
        table.show(slot, turn)
    assert table.waiting().tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        (Turn(()), "shows nothing"),
        (Turn(("A",)), "character 'A'"),
        (Turn((np.zeros((8, 8, 1), np.uint8),)), r"picture of \(8, 8, 1\); the task's limits\.image_shapes"),
        (Turn((np.zeros((16, 16, 1), np.float32),)), "expected uint8"),
        (Turn((np.zeros((16, 16, 1), np.uint8),) * 3), r"shows 3 pictures; .*images_per_turn is 2"),
    ],
)
def test_a_turn_that_cannot_be_encoded_says_why(turn: Turn, message: str):
    with pytest.raises(ValueError, match=message):
        encoder().encode(turn)


def test_a_picture_is_kept_as_it_was_shown():
    picture = np.zeros((16, 16, 1), np.uint8)
    shown = encoder().encode(Turn((picture,)))
    picture[:] = 9
    assert not shown.images[0].pixels_HxWxC.any()


def test_new_weights_restart_a_first_turn_that_is_prefilled_in_part_and_nothing_else():
    table = SlotTable(slots=3, capacity=60, end_id=END, max_answer_tokens=3)
    for slot in range(3):
        table.begin(slot)
        table.show(slot, encoder().encode(Turn(("abcabc",))))
    table.prefilled(table.prefill_batch(np.array([0]), rows=1, width=4))
    table.prefilled(table.prefill_batch(np.array([1]), rows=1, width=8))
    whole = np.array([1])
    table.sampled(whole, np.array([END]), np.zeros(1, np.float32), version=3)
    assert table.restart_first_turns() == 1
    assert table.cached.tolist() == [0, 6, 0]
    table.show(1, encoder().encode(Turn(("abcabc",))))
    table.prefilled(table.prefill_batch(whole, rows=1, width=4))
    assert table.restart_first_turns() == 0, "a later turn's answer is of another version than the first one's anyway"


@hypothesis.given(st.lists(st.tuples(turns, answers), min_size=2, max_size=4))
def test_a_transcript_that_left_its_slot_and_came_back_is_prefilled_whole_and_unchanged(
    conversation: list[tuple[Turn, list[int]]],
):
    stayed, moved = (SlotTable(slots=2, capacity=120, end_id=END, max_answer_tokens=3) for _ in range(2))
    encode = encoder().encode
    for table in (stayed, moved):
        table.begin(0)
    at = 0
    for number, (turn, answer) in enumerate(conversation):
        if number:
            parked = moved.park(at)
            assert moved.phase[at] == Phase.FREE
            moved.begin(at)  # somebody else uses it meanwhile
            moved.show(at, encode(Turn((np.full((8, 24, 1), 9, np.uint8), "2 1"))))
            moved.release(at)
            at = 1 - at
            moved.restore(at, parked)
        for table, slot in ((stayed, 0), (moved, at)):
            encoded = encode(turn)
            table.show(slot, encoded)
            length = int(table.length[slot])
            assert table is stayed or table.cached[slot] == 0
            table.prefilled(table.prefill_batch(np.array([slot]), rows=1, width=length))
            for token in [*answer, END][:3]:
                table.sampled(np.array([slot]), np.array([token]), np.array([-0.5], np.float32), version=number)
                table.cached[slot] = table.length[slot]
    stayed.cached[0] = moved.cached[at] = 0
    length = int(stayed.length[0])
    whole = [table.prefill_batch(np.array([slot]), rows=1, width=length) for table, slot in ((stayed, 0), (moved, at))]
    (one, images, count), (other, other_images, other_count) = stayed.transcript(0), moved.transcript(at)
    for name in ("tokens_T", "sampled_T", "behaviour_logprobs_T", "versions_T"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert [image.digest for image in images] == [image.digest for image in other_images]
    assert count == other_count == len(conversation)
    for field in ("tokens_RxW", "positions_Rx3xW", "offset_RxW"):
        np.testing.assert_array_equal(getattr(whole[0], field), getattr(whole[1], field))
    shown = [[batch.images[h].digest if h >= 0 else "" for h in batch.image_RxW[0].tolist()] for batch in whole]
    assert shown[0] == shown[1]
