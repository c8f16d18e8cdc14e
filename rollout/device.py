"""The engine's hold on the device: weights, cache and image table behind three calls. Batches in, drawn tokens out.

What it guarantees: device calls are launched in order and only read in `fetch`, so the host prepares the next one while the
device works; a picture is encoded once per version; log-probs that are not finite are an error naming the version.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from knittrans_jax.config import RolloutConfig
from knittrans_jax.models import ModelConfig, Params
from knittrans_jax.rollout.images import ImageTable
from knittrans_jax.rollout.sampler import Sampled, SamplerPrograms, SamplerShapes
from knittrans_jax.rollout.slots import PrefillBatch
from knittrans_jax.rollout.tasks.base import TaskLimits, max_image_tokens, min_image_tokens

PREFILL_ROWS = 64
"""Rows of a prefill call: enough to fill the device with `prefill_tokens` each, few enough that a padded call is cheap."""
FAN_OUT_ROWS = 64
ENCODE_ROWS = 16


class EngineError(RuntimeError):
    """The engine cannot go on, or was asked for what it cannot do now."""


def sampler_shapes(rollout: RolloutConfig, limits: TaskLimits, model: ModelConfig) -> SamplerShapes:
    """The program shapes of a run.

    Raises:
        EngineError: a task with images for a model without vision.
    """
    rows = min(rollout.slots, PREFILL_ROWS)
    shapes = SamplerShapes(
        slots=rollout.slots,
        cache_tokens=rollout.cache_tokens,
        prefill_rows=rows,
        prefill_tokens=rollout.prefill_tokens,
        fan_out_rows=min(rollout.slots, FAN_OUT_ROWS),
    )
    if not limits.image_shapes or not limits.images_per_turn:
        return shapes
    if model.vision is None:
        raise EngineError(
            "the task shows images, but the model has no vision: choose another model.preset or model.path"
        )
    tokens = max_image_tokens(limits, model.vision.patch_size, model.vision.merge_size)
    images = limits.images_per_turn
    if limits.tool_calls:
        # A trajectory that comes back from a tool is prefilled from its beginning: a call can reach over several turns.
        smallest = min_image_tokens(limits, model.vision.patch_size, model.vision.merge_size) + 2
        images = max(images, min(images * limits.turns, rollout.prefill_tokens // smallest + 2))
    return dataclasses.replace(
        shapes,
        # One prefill call can need as many at once; as many again let a group's picture survive until its next turn.
        image_blocks=2 * rows * images,
        block_tokens=tokens,
        encode_rows=min(ENCODE_ROWS, rows),
        image_patches=tokens * model.vision.merge_size**2,
    )


@dataclasses.dataclass(frozen=True)
class Draw:
    """Slots whose next token was drawn, and the tokens and log-probs, still on the device, at `rows`."""

    slots: np.ndarray
    rows: np.ndarray
    sampled: Sampled


@dataclasses.dataclass(frozen=True)
class FanOut:
    """Prefilled slots to copy: for each copy the row of the prefill call, the slot copied from, the slot copied to."""

    rows: np.ndarray
    leaders: np.ndarray
    followers: np.ndarray


class Device:
    """See the module's opening. `draws_4xS` in every call: what each slot's draw depends on (`sampler.DRAW_FIELDS`)."""

    def __init__(self, programs: SamplerPrograms, counters: dict[str, float]) -> None:
        """Allocates cache and image table."""
        self._programs, self._counters = programs, counters
        self._shapes = programs.shapes
        self._state = programs.init_state()
        self._params: Params | None = None
        vision = programs.model.config.vision
        self._images = ImageTable(vision, self._shapes) if vision is not None and self._shapes.image_blocks else None
        self._draws: list[Draw] = []
        self._warm = False

    def load(self, params: Any) -> None:
        """Takes new weights and forgets all encoded pictures. Compiles every program, if that is still to be done."""
        self.warm_up(params)
        self._params = jax.device_put(params)
        if self._images is not None:
            self._images.flush()

    def prefill(self, batch: PrefillBatch, copies: FanOut, draws_4xS: np.ndarray) -> None:
        """Prefills, copies the complete rows to their followers, and draws for the complete rows and all followers."""
        shapes = self._shapes
        index_RxW = self._place_images(batch)
        count = len(batch.slots)
        rows_4xR = np.zeros((4, shapes.prefill_rows), np.int32)
        rows_4xR[0] = shapes.slots
        rows_4xR[0, :count] = batch.slots
        rows_4xR[1, :count] = batch.cached
        rows_4xR[2, :count] = batch.new
        draws_4xR = np.zeros((4, shapes.prefill_rows), np.int32)
        draws_4xR[:, :count] = draws_4xS[:, batch.slots]
        sampled, logits_RxV, self._state = self._programs.prefill(
            self._held(), self._state, rows_4xR, batch.tokens_RxW, batch.positions_Rx3xW, index_RxW, draws_4xR
        )
        self._counters["prefill_calls"] += 1
        self._counters["prefill_tokens"] += int(batch.new.sum())
        complete = np.flatnonzero(batch.complete)
        self._draws.append(Draw(batch.slots[complete], complete, sampled))
        for begin in range(0, len(copies.rows), shapes.fan_out_rows):
            part = slice(begin, begin + shapes.fan_out_rows)
            self._fan_out(
                logits_RxV, FanOut(copies.rows[part], copies.leaders[part], copies.followers[part]), draws_4xS
            )

    def decode(
        self, slots: np.ndarray, tokens: np.ndarray, positions: np.ndarray, cached: np.ndarray, draws_4xS: np.ndarray
    ) -> None:
        """Feeds one token to each of `slots` and draws the next."""
        slots_4xS = np.zeros((4, self._shapes.slots), np.int32)
        slots_4xS[0, slots] = tokens
        slots_4xS[1, slots] = positions
        slots_4xS[2, slots] = cached
        slots_4xS[3, slots] = 1
        sampled, self._state = self._programs.decode(self._held(), self._state, slots_4xS, draws_4xS)
        self._counters["decode_steps"] += 1
        self._draws.append(Draw(slots, slots, sampled))

    def fetch(self, version: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Waits for everything launched -> (slots, tokens, log-probs) of all draws.

        Raises:
            EngineError: a log-prob is not finite.
        """
        fetched = []
        for draw in self._draws:
            tokens = np.asarray(draw.sampled.tokens_N)[draw.rows]
            logprobs = np.asarray(draw.sampled.logprobs_N)[draw.rows]
            if not np.isfinite(logprobs).all():
                raise EngineError(f"weights of version {version}: the sampler's log-probs are not finite")
            fetched.append((draw.slots, tokens, logprobs))
        self._draws = []
        return fetched

    def _held(self) -> Params:
        if self._params is None:
            raise EngineError("no weights yet: load_version() comes first")
        return self._params

    def _place_images(self, batch: PrefillBatch) -> np.ndarray:
        """Encodes the pictures that are not in the table -> rows of the table, [R, W], -1 where there is no image."""
        if self._images is None or not batch.images:
            return np.full_like(batch.image_RxW, -1)
        blocks, missing = self._images.place(batch.images.values())
        step = self._shapes.encode_rows
        for begin in range(0, len(missing), step):
            inputs = self._images.encoder_inputs(missing[begin : begin + step])
            self._state = self._programs.encode(self._held(), self._state, *inputs)
        self._counters["images_encoded"] += len(missing)
        handles = np.array(list(batch.images), np.int64)  # ascending
        block_of = np.array([blocks[image.digest] for image in batch.images.values()], np.int64)
        found = block_of[np.searchsorted(handles, np.maximum(batch.image_RxW, handles[0]))]
        rows = found * self._shapes.block_tokens + batch.offset_RxW
        return np.where(batch.image_RxW >= 0, rows, -1).astype(np.int32)

    def _fan_out(self, logits_RxV: jax.Array, copies: FanOut, draws_4xS: np.ndarray) -> None:
        shapes, count = self._shapes, len(copies.rows)
        copies_3xF = np.zeros((3, shapes.fan_out_rows), np.int32)
        copies_3xF[2] = shapes.slots
        copies_3xF[:, :count] = copies.rows, copies.leaders, copies.followers
        draws_4xF = np.zeros((4, shapes.fan_out_rows), np.int32)
        draws_4xF[:, :count] = draws_4xS[:, copies.followers]
        sampled, self._state = self._programs.fan_out(self._state, logits_RxV, copies_3xF, draws_4xF)
        self._counters["prompt_copies"] += count
        self._draws.append(Draw(copies.followers, np.arange(count), sampled))

    def warm_up(self, params: Any) -> None:
        """Runs every program once on padding, which writes nothing; any weights of the right shapes will do."""
        if self._warm:
            return
        self._warm = True
        shapes, params = self._shapes, jax.device_put(params)

        def ints(*shape: int, fill: int = 0) -> np.ndarray:
            return np.full(shape, fill, np.int32)

        rows, width = shapes.prefill_rows, shapes.prefill_tokens
        rows_4xR = ints(4, rows)
        rows_4xR[0] = shapes.slots
        _, logits, self._state = self._programs.prefill(
            params,
            self._state,
            rows_4xR,
            ints(rows, width),
            ints(rows, 3, width),
            ints(rows, width, fill=-1),
            ints(4, rows),
        )
        copies = ints(3, shapes.fan_out_rows)
        copies[2] = shapes.slots
        _, self._state = self._programs.fan_out(self._state, logits, copies, ints(4, shapes.fan_out_rows))
        sampled, self._state = self._programs.decode(params, self._state, ints(4, shapes.slots), ints(4, shapes.slots))
        if self._images is not None:
            self._state = self._programs.encode(params, self._state, *self._images.encoder_inputs([]))
        jax.block_until_ready((sampled, self._state))
