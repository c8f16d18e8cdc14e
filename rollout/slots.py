"""The slots' bookkeeping: a pure state machine over numpy arrays, one row per slot. It knows nothing of devices or tasks.

A slot's life: free -> prompt (a turn was shown, its tokens wait for prefill) -> answer (one sampled token waits to be fed)
-> ended (the answer is over, the environment's turn) -> prompt again, or free. A follower waits until its leader's first turn
is prefilled, then goes on as if it had been prefilled itself. A trajectory that waits for a tool is parked: its transcript
leaves the slot, which is free for others, and returns to any slot with an empty cache, to be prefilled again. Where no more
may be parked, it waits in its slot (tool).

Invariants: `cached <= length <= capacity`; in `answer` exactly one token is not cached; positions, flags, log-probs and
versions are written once, together with their token.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

from knittrans_jax.rollout.turns import EncodedTurn, Image
from knittrans_jax.trajectory import NOT_SAMPLED, Trajectory


class Phase(enum.IntEnum):
    """Where a slot is in its life."""

    FREE = 0
    FOLLOW = 1
    PROMPT = 2
    ANSWER = 3
    ENDED = 4
    TOOL = 5


class TrajectoryTooLong(ValueError):  # noqa: N818 - says what it is
    """A turn does not fit into the slot together with an answer."""


@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """Up to R slots and their next up to W tokens; rows beyond `len(slots)` are padding.

    `images` are the different pictures that the tokens need, by handle; `image_RxW` holds handles, -1 where there is none,
    and `offset_RxW` the place among the picture's tokens. `complete` tells which rows have nothing left to prefill afterwards.
    """

    slots: np.ndarray
    cached: np.ndarray
    new: np.ndarray
    complete: np.ndarray
    tokens_RxW: np.ndarray
    positions_Rx3xW: np.ndarray
    image_RxW: np.ndarray
    offset_RxW: np.ndarray
    images: dict[int, Image]


@dataclasses.dataclass(frozen=True)
class Parked:
    """A trajectory's transcript of T tokens without a slot. Its pictures stay referenced until `restore` or `discard`."""

    tokens_T: np.ndarray
    sampled_T: np.ndarray
    logprobs_T: np.ndarray
    versions_T: np.ndarray
    positions_3xT: np.ndarray
    image_T: np.ndarray
    offset_T: np.ndarray
    next_position: int
    turns: int
    handles: list[int]


class SlotTable:
    """See the module's opening. All arrays have S rows."""

    def __init__(self, slots: int, capacity: int, end_id: int, max_answer_tokens: int) -> None:
        """`capacity`: tokens of a slot; an answer ends with `end_id` or after `max_answer_tokens`."""
        self.capacity, self.end_id, self.max_answer_tokens = capacity, end_id, max_answer_tokens
        self.phase = np.zeros(slots, np.int8)
        self.length = np.zeros(slots, np.int32)
        self.cached = np.zeros(slots, np.int32)
        self.answered = np.zeros(slots, np.int32)
        """Tokens sampled in the current answer."""
        self.turns = np.zeros(slots, np.int32)
        self.waiting_since = np.zeros(slots, np.int64)
        """Serial number of the turn that waits for prefill: oldest first."""
        self._next_position = np.zeros(slots, np.int32)
        self._tokens = np.zeros((slots, capacity), np.int32)
        self._sampled = np.zeros((slots, capacity), np.bool_)
        self._logprobs = np.zeros((slots, capacity), np.float32)
        self._versions = np.zeros((slots, capacity), np.int32)
        self._positions = np.zeros((slots, 3, capacity), np.int32)
        self._image = np.full((slots, capacity), -1, np.int32)
        self._offset = np.zeros((slots, capacity), np.int32)
        self._images: list[list[int]] = [[] for _ in range(slots)]
        self._pictures = _Pictures()
        self._serial = 0

    # --- which slots ---------------------------------------------------------------------------------------------------

    def free(self) -> np.ndarray:
        """Slots that nobody uses, in order."""
        return np.flatnonzero(self.phase == Phase.FREE)

    def answering(self) -> np.ndarray:
        """Slots whose next token is to be sampled by a decode step."""
        return np.flatnonzero(self.phase == Phase.ANSWER)

    def ended(self) -> np.ndarray:
        """Slots whose answer is over."""
        return np.flatnonzero(self.phase == Phase.ENDED)

    def waiting(self) -> np.ndarray:
        """Slots with tokens to prefill, longest waiting first."""
        slots = np.flatnonzero(self.phase == Phase.PROMPT)
        return slots[np.argsort(self.waiting_since[slots], kind="stable")]

    def sampled_tokens(self) -> int:
        """Tokens sampled so far of the trajectories that are in slots."""
        held_SxT = np.arange(self.capacity) < self.length[:, None]
        return int((self._sampled & held_SxT)[self.phase != Phase.FREE].sum())

    # --- transitions ---------------------------------------------------------------------------------------------------

    def begin(self, slot: int) -> None:
        """Empties the slot for a new trajectory; `show` or `follow` comes next."""
        self.phase[slot] = Phase.ENDED
        for array in (self.length, self.cached, self.answered, self.turns, self._next_position):
            array[slot] = 0
        self._forget_images(slot)

    def show(self, slot: int, turn: EncodedTurn) -> None:
        """Appends a turn of the environment.

        Raises:
            TrajectoryTooLong: with it and the longest answer the trajectory would not fit.
        """
        at = int(self.length[slot])
        self.check_fits(at, turn)
        end = at + len(turn.tokens_T)
        self._append_turn(slot, at, end, turn)
        self.phase[slot] = Phase.PROMPT
        self.waiting_since[slot] = self._serial
        self._serial += 1

    def check_fits(self, length: int, turn: EncodedTurn) -> None:
        """Raises `TrajectoryTooLong` when a turn after `length` tokens leaves no room for the longest answer."""
        if length + len(turn.tokens_T) + self.max_answer_tokens > self.capacity:
            raise TrajectoryTooLong(
                f"{length} tokens so far, a turn of {len(turn.tokens_T)} and an answer of up to {self.max_answer_tokens}: "
                f"more than rollout.cache_tokens = {self.capacity}"
            )

    def follow(self, slot: int, turn: EncodedTurn) -> None:
        """Appends a first turn that a leader prefills; `copied` comes next."""
        self._append_turn(slot, 0, len(turn.tokens_T), turn)
        self.phase[slot] = Phase.FOLLOW

    def release(self, slot: int) -> None:
        """Frees the slot."""
        self.phase[slot] = Phase.FREE
        self._forget_images(slot)

    def hold(self, slot: int) -> None:
        """The trajectory waits for a tool in its slot; `show` or `release` comes next."""
        self.phase[slot] = Phase.TOOL

    def park(self, slot: int) -> Parked:
        """Takes the transcript out of the slot, which is free then."""
        length = int(self.length[slot])
        parked = Parked(
            tokens_T=self._tokens[slot, :length].copy(),
            sampled_T=self._sampled[slot, :length].copy(),
            logprobs_T=self._logprobs[slot, :length].copy(),
            versions_T=self._versions[slot, :length].copy(),
            positions_3xT=self._positions[slot, :, :length].copy(),
            image_T=self._image[slot, :length].copy(),
            offset_T=self._offset[slot, :length].copy(),
            next_position=int(self._next_position[slot]),
            turns=int(self.turns[slot]),
            handles=self._images[slot],
        )
        self._images[slot] = []  # their references went with it
        self.phase[slot] = Phase.FREE
        return parked

    def restore(self, slot: int, parked: Parked) -> None:
        """Puts a transcript into an empty slot, nothing of it cached; `show` comes next, and all of it is prefilled."""
        self.begin(slot)
        length = len(parked.tokens_T)
        self._tokens[slot, :length] = parked.tokens_T
        self._sampled[slot, :length] = parked.sampled_T
        self._logprobs[slot, :length] = parked.logprobs_T
        self._versions[slot, :length] = parked.versions_T
        self._positions[slot, :, :length] = parked.positions_3xT
        self._image[slot, :length] = parked.image_T
        self._offset[slot, :length] = parked.offset_T
        self._next_position[slot] = parked.next_position
        self.length[slot], self.turns[slot] = length, parked.turns
        self._images[slot] = parked.handles

    def discard(self, parked: Parked) -> None:
        """Forgets a transcript that will not return."""
        for handle in parked.handles:
            self._pictures.drop(handle)

    def prefill_batch(self, slots: np.ndarray, rows: int, width: int) -> PrefillBatch:
        """The next up to `width` tokens of at most `rows` slots that wait."""
        count = len(slots)
        new = np.minimum(self.length[slots] - self.cached[slots], width)
        at = np.minimum(self.cached[slots][:, None] + np.arange(width, dtype=np.int32), self.capacity - 1)
        valid = np.arange(width) < new[:, None]
        pick = slots[:, None]

        def padded(values: np.ndarray, fill: int, shape: tuple[int, ...]) -> np.ndarray:
            out = np.full((rows, *shape), fill, np.int32)
            out[:count] = values
            return out

        image = np.where(valid, self._image[pick, at], -1)
        return PrefillBatch(
            slots=slots,
            cached=self.cached[slots],
            new=new,
            complete=self.cached[slots] + new == self.length[slots],
            tokens_RxW=padded(np.where(valid, self._tokens[pick, at], 0), 0, (width,)),
            positions_Rx3xW=padded(self._positions[pick, :, at].transpose(0, 2, 1) * valid[:, None], 0, (3, width)),
            image_RxW=padded(image, -1, (width,)),
            offset_RxW=padded(self._offset[pick, at] * valid, 0, (width,)),
            images={int(handle): self._pictures.by_handle(handle) for handle in np.unique(image[image >= 0])},
        )

    def prefilled(self, batch: PrefillBatch) -> None:
        """The batch is in the cache. Its complete rows await their first draw (`sampled`)."""
        self.cached[batch.slots] += batch.new

    def restart_first_turns(self) -> int:
        """Forgets what is cached of first turns that are prefilled in part -> how many. For new weights: a first answer
        then has all of its context from the version that samples it."""
        partial = (self.phase == Phase.PROMPT) & (self.turns == 1) & (self.cached > 0)
        self.cached[partial] = 0
        return int(partial.sum())

    def copied(self, followers: np.ndarray, leaders: np.ndarray) -> None:
        """The leaders' prefilled first turns were copied; the followers await their first draw."""
        self.cached[followers] = self.cached[leaders]

    def fed(self, slots: np.ndarray) -> None:
        """The one uncached token of each was appended to the cache by a decode step."""
        self.cached[slots] += 1

    def sampled(self, slots_N: np.ndarray, tokens_N: np.ndarray, logprobs_N: np.ndarray, version: int) -> None:
        """Appends one sampled token to each of different slots; an answer may end with it."""
        at = self.length[slots_N]
        self._tokens[slots_N, at] = tokens_N
        self._sampled[slots_N, at] = True
        self._logprobs[slots_N, at] = logprobs_N
        self._versions[slots_N, at] = version
        self._positions[slots_N, :, at] = self._next_position[slots_N][:, None]
        self._image[slots_N, at] = -1
        self._next_position[slots_N] += 1
        self.length[slots_N] += 1
        self.answered[slots_N] += 1
        over = (tokens_N == self.end_id) | (self.answered[slots_N] >= self.max_answer_tokens)
        self.phase[slots_N] = np.where(over, Phase.ENDED, Phase.ANSWER)

    # --- what they hold ------------------------------------------------------------------------------------------------

    def last(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The last token of each slot, and its position (a sampled token: the same in all components)."""
        at = self.length[slots] - 1
        return self._tokens[slots, at], self._positions[slots, 0, at]

    def answer(self, slot: int) -> tuple[np.ndarray, bool]:
        """The sampled tokens of the answer that is over, without the end token, and whether it was ended by one."""
        end = int(self.length[slot])
        tokens = self._tokens[slot, end - int(self.answered[slot]) : end]
        ended = bool(tokens[-1] == self.end_id)
        return (tokens[:-1] if ended else tokens), ended

    def transcript(self, slot: int) -> tuple[Trajectory, list[Image], int]:
        """A copy of the slot's trajectory, the picture behind each run of placeholders in order, and the number of turns."""
        length = int(self.length[slot])
        trajectory = Trajectory(
            tokens_T=self._tokens[slot, :length].copy(),
            sampled_T=self._sampled[slot, :length].copy(),
            behaviour_logprobs_T=self._logprobs[slot, :length].copy(),
            versions_T=self._versions[slot, :length].copy(),
        )
        return trajectory, [self._pictures.by_handle(handle) for handle in self._images[slot]], int(self.turns[slot])

    def parked_transcript(self, parked: Parked) -> tuple[Trajectory, list[Image], int]:
        """The same of a trajectory without a slot."""
        trajectory = Trajectory(
            tokens_T=parked.tokens_T,
            sampled_T=parked.sampled_T,
            behaviour_logprobs_T=parked.logprobs_T,
            versions_T=parked.versions_T,
        )
        return trajectory, [self._pictures.by_handle(handle) for handle in parked.handles], parked.turns

    def _append_turn(self, slot: int, at: int, end: int, turn: EncodedTurn) -> None:
        handles = [self._pictures.take(image) for image in turn.images]
        self._images[slot] += handles
        self._tokens[slot, at:end] = turn.tokens_T
        self._sampled[slot, at:end] = False
        self._logprobs[slot, at:end] = 0.0
        self._versions[slot, at:end] = NOT_SAMPLED
        self._positions[slot, :, at:end] = turn.positions_3xT + self._next_position[slot]
        self._image[slot, at:end] = np.array([*handles, -1], np.int32)[turn.image_T]  # number -1 picks the -1
        self._offset[slot, at:end] = turn.offset_T
        self._next_position[slot] += turn.span
        self.length[slot] = end
        self.answered[slot] = 0
        self.turns[slot] += 1

    def _forget_images(self, slot: int) -> None:
        for handle in self._images[slot]:
            self._pictures.drop(handle)
        self._images[slot] = []


class _Pictures:
    """Reference-counted handles of the pictures in use, one per content."""

    def __init__(self) -> None:
        self._handles: dict[str, int] = {}
        self._held: dict[int, tuple[Image, int]] = {}
        self._next = 0

    def take(self, image: Image) -> int:
        handle = self._handles.get(image.digest)
        if handle is None:
            handle = self._handles[image.digest] = self._next
            self._next = (self._next + 1) % 2**31
            self._held[handle] = (image, 0)
        held, count = self._held[handle]
        self._held[handle] = (held, count + 1)
        return handle

    def drop(self, handle: int) -> None:
        image, count = self._held.pop(handle)
        if count > 1:
            self._held[handle] = (image, count - 1)
        else:
            del self._handles[image.digest]

    def by_handle(self, handle: int) -> Image:
        return self._held[int(handle)][0]
