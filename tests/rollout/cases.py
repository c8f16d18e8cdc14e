"""What the engine's tests share: one small engine shape (so that programs compile once), weights, tasks that misbehave, and
the full forward pass as an oracle of log-probs."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from knittrans_jax.config import RolloutConfig
from knittrans_jax.encoding.patches import grid_of, patch_coords, patchify
from knittrans_jax.launch.messages import Lease
from knittrans_jax.models import (
    build_model,
    decoder_apply,
    encoder_apply,
    mrope_positions,
    normalise_pixels,
    preset,
)
from knittrans_jax.rollout.engine import Engine
from knittrans_jax.rollout.runs import FinishedGroup
from knittrans_jax.rollout.tasks.base import Outcome, Task, Turn
from knittrans_jax.rollout.tasks.grid_lookup import GridLookup, GridLookupEpisode
from knittrans_jax.rollout.text import Vocabulary

MEMBERS = 4
# Turns of 9 and 10 tokens and the answer's end take two prefill calls of 8.
ROLLOUT = RolloutConfig(slots=8, cache_tokens=48, prefill_tokens=8, max_answer_tokens=4, temperature=0.7)
MODEL, PARAMS = build_model(preset("tiny", Vocabulary().size), seed=0)


def other_params(seed: int) -> Any:
    """Other weights, clearly different from PARAMS in decoder and encoder."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.asarray(x) + 0.2 * rng.standard_normal(x.shape).astype(x.dtype), PARAMS)


def with_rollout(**changes: Any) -> RolloutConfig:
    return RolloutConfig(**({field: getattr(ROLLOUT, field) for field in ROLLOUT.__struct_fields__} | changes))


def engine(task: Task | None = None, *, seed: int = 0, version: int | None = 0, **changes: Any) -> Engine:
    made = Engine(MODEL, task or GridLookup({}, 0), with_rollout(**changes), seed, unit="host0")
    if version is not None:
        made.load_version(version, PARAMS)
    return made


def leases(*group_ids: int, least_version: int = 0) -> list[Lease]:
    return [Lease(group_id=i, prompt_id=f"train-{i:06d}", least_version=least_version) for i in group_ids]


class Wrapped:
    """A grid-lookup episode that a test can break."""

    def __init__(self, episode: GridLookupEpisode):
        self.episode = episode

    def first(self) -> Turn:
        return self.episode.first()

    def respond(self, answer: str) -> Turn | None:
        return self.episode.respond(answer)

    def outcome(self) -> Outcome:
        return self.episode.outcome()


class Misbehaving(GridLookup):
    """Wraps the episodes of some prompts; `opened` counts episodes by prompt."""

    def __init__(self, wrap: dict[str, type[Wrapped]], failures: int = 10**9):
        super().__init__({}, 0)
        self.wrap, self.left = wrap, collections.defaultdict(lambda: failures)

    def episode(self, prompt_id: str) -> Any:
        episode = super().episode(prompt_id)
        if prompt_id not in self.wrap or self.left[prompt_id] <= 0:
            return episode
        self.left[prompt_id] -= 1
        return self.wrap[prompt_id](episode)


class RaisesOnSecondTurn(Wrapped):
    def respond(self, answer: str) -> Turn | None:
        raise ConnectionError("the tool is gone")


class RewardsNan(Wrapped):
    def outcome(self) -> Outcome:
        return Outcome(float("nan"), 3, 0)


class ShowsTooMuch(Wrapped):
    def respond(self, answer: str) -> Turn | None:
        return Turn(("x" * 40,))


@functools.cache
def _full_forward() -> Any:
    def forward(params: Any, tokens: Any, positions: Any, visual: Any, mask: Any) -> Any:
        segments = jnp.ones(tokens.shape, jnp.int32)
        hidden = decoder_apply(MODEL.decoder, params["decoder"], "hidden", tokens, positions, segments, visual, mask)
        return decoder_apply(MODEL.decoder, params["decoder"], "logits", hidden)

    def encode(params: Any, patches: Any, coords: Any, grids: Any) -> Any:
        vision, encoder = MODEL.config.vision, MODEL.encoder
        assert vision is not None
        assert encoder is not None
        segments = jnp.ones(patches.shape[:2], jnp.int32)
        return encoder_apply(encoder, params["encoder"], normalise_pixels(patches, vision), coords, grids, segments)

    return jax.jit(forward), jax.jit(encode)


def recomputed_logprobs(params: Any, group: FinishedGroup, member: int, task: Task) -> np.ndarray:
    """Log-probs of a trajectory's tokens by one forward pass over all of it, with temperature and mask, [T]; padded to the
    cache's length so that one program serves all."""
    forward, encode = _full_forward()
    vision = MODEL.config.vision
    assert vision is not None
    trajectory, meta = group.payload.trajectories[member], group.meta
    tokens = trajectory.tokens_T
    length, padded = len(tokens), ROLLOUT.cache_tokens
    images = [group.payload.media[meta.media[index].digest] for index in meta.trajectories[member].media]
    grids = [grid_of(image.shape, vision.patch_size, vision.merge_size) for image in images]
    positions, _ = mrope_positions(tokens, grids, task.vocabulary.image, vision.merge_size)
    visual = np.zeros((1, padded, MODEL.config.visual_features), np.float32)
    mask = np.zeros((1, padded), np.bool_)
    mask[0, :length] = tokens == task.vocabulary.image
    tables = [
        encode(
            params,
            patchify(image, vision.patch_size, vision.merge_size)[None],
            patch_coords(*grid, vision.merge_size)[None],
            np.full((1, grid[0] * grid[1], 2), grid, np.int32),
        )[0]
        for image, grid in zip(images, grids, strict=True)
    ]
    visual[mask] = np.concatenate(tables)
    tokens_1xT, positions_1x3xT = np.zeros((1, padded), np.int32), np.zeros((1, 3, padded), np.int32)
    tokens_1xT[0, :length], positions_1x3xT[0, :, :length] = tokens, positions
    logits = np.asarray(forward(params, tokens_1xT, positions_1x3xT, visual, mask))[0, : length - 1]
    allowed = np.full(logits.shape[-1], -np.inf)
    allowed[list(task.sampled_ids)] = 0.0
    scaled = logits / ROLLOUT.temperature + allowed
    scaled = scaled - scaled.max(axis=-1, keepdims=True)
    logprobs = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    return np.concatenate([[0.0], logprobs[np.arange(length - 1), tokens[1:]]])
