"""The device programs of the sampler: prefill, fan-out, decode, encode. Pure, jitted, of one shape each.

What they guarantee:

* after one call of each there is no further compilation: every call has the same shapes, padded with rows that write nothing;
* only `sampled_ids` can be sampled: other ids take no part in the draw, so an image placeholder is impossible, not unlikely;
* a draw depends on (seed, group, member, attempt), the index of the token in its trajectory and the logits, and on nothing
  else: not on the slot, the batch or the number of slots;
* the log-prob that comes with a token is the sampler's own, under temperature and mask: the behaviour log-prob.

The lengths of the cached sequences are kept by the host and passed to every call, so a slot is emptied by forgetting it.
Shapes: S slots, R prefill rows, W prefill width, F fan-out rows, A sampled ids, C cache tokens, E features of an image token.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from knittrans_jax.models import KVCache, Model, Params, decoder_apply, encoder_apply, init_cache, normalise_pixels

DRAW_FIELDS = ("key_0", "key_1", "index", "greedy")
"""Rows of a `draws` array, int32 [4, N]: the trajectory's key (`trajectory_key`), the index of the token to be drawn in its
trajectory, and 1 to take the likeliest id instead of drawing."""


def trajectory_key(seed: int, group: int, member: int, attempt: int) -> np.ndarray:
    """Two words, int32 [2], from which all draws of a trajectory follow.

    Hashed on the host, once per trajectory: the device then does two rounds of Threefry per token instead of five.
    """
    name = f"{seed}/{group}/{member}/{attempt}".encode()
    return np.frombuffer(hashlib.blake2b(name, digest_size=8).digest(), np.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerShapes:
    """The fixed sizes of the programs.

    The image table has `image_blocks` blocks of `block_tokens` image tokens, one image each; `encode_rows` images of at most
    `image_patches` patches are encoded per call. 0 blocks: no images, no encoder program.
    """

    slots: int
    cache_tokens: int
    prefill_rows: int
    prefill_tokens: int
    fan_out_rows: int
    image_blocks: int = 0
    block_tokens: int = 0
    encode_rows: int = 0
    image_patches: int = 0


class DeviceState(NamedTuple):
    """What lives on the device between calls; donated to every call that changes it."""

    k: jax.Array
    """[layers, S, C, kv_heads, head_dim]"""
    v: jax.Array
    table_NxE: jax.Array | None
    """float32 [image_blocks * block_tokens, E]; None without images."""


class Sampled(NamedTuple):
    """One draw per row."""

    tokens_N: jax.Array
    """int32"""
    logprobs_N: jax.Array
    """float32"""


@dataclasses.dataclass(frozen=True, eq=False)
class SamplerPrograms:
    """The programs for one model, one set of shapes and one sampling rule; get it from `sampler_programs`.

    Compared by identity: it is a static argument of every call, and hashing a model's structure takes longer than a step.
    """

    model: Model
    shapes: SamplerShapes
    sampled_ids: tuple[int, ...]
    temperature: float

    def init_state(self) -> DeviceState:
        """An empty cache and an empty image table."""
        shapes = self.shapes
        cache = init_cache(self.model.config.text, shapes.slots, shapes.cache_tokens)
        rows = shapes.image_blocks * shapes.block_tokens
        table = jnp.zeros((rows, self.model.config.visual_features), jnp.float32) if rows else None
        return DeviceState(cache.k, cache.v, table)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def prefill(
        self,
        params: Params,
        state: DeviceState,
        rows_4xR: jax.Array,
        tokens_RxW: jax.Array,
        positions_Rx3xW: jax.Array,
        table_index_RxW: jax.Array,
        draws_4xR: jax.Array,
    ) -> tuple[Sampled, jax.Array, DeviceState]:
        """Appends up to W tokens to R slots -> a draw after the last of them, the logits [R, V] there, and the state.

        Args:
            params: of the model.
            state: donated.
            rows_4xR: int32: slot (S: padding, nothing is written), tokens cached before, new tokens, and 0.
            tokens_RxW: int32.
            positions_Rx3xW: int32.
            table_index_RxW: int32, row of the image table at image placeholders, -1 elsewhere.
            draws_4xR: see `DRAW_FIELDS`.
        """
        slots_R, cached_R, new_R = rows_4xR[0], rows_4xR[1], rows_4xR[2]
        cache = KVCache(
            jnp.take(state.k, slots_R, axis=1, mode="clip"), jnp.take(state.v, slots_R, axis=1, mode="clip"), cached_R
        )
        visual: tuple[jax.Array, ...] = ()
        if state.table_NxE is not None:
            mask_RxW = table_index_RxW >= 0
            visual = (jnp.take(state.table_NxE, jnp.maximum(table_index_RxW, 0), axis=0), mask_RxW)
        hidden_RxWxD, cache = self._decoder(params, "extend", tokens_RxW, positions_Rx3xW, new_R, cache, *visual)
        last_R = jnp.maximum(new_R - 1, 0)
        last_RxD = jnp.take_along_axis(hidden_RxWxD, last_R[:, None, None], axis=1)[:, 0]
        logits_RxV = self._decoder(params, "logits", last_RxD)
        state = state._replace(
            k=state.k.at[:, slots_R].set(cache.k, mode="drop"), v=state.v.at[:, slots_R].set(cache.v, mode="drop")
        )
        return self._draw(logits_RxV, draws_4xR), logits_RxV, state

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def fan_out(
        self, state: DeviceState, logits_RxV: jax.Array, copies_3xF: jax.Array, draws_4xF: jax.Array
    ) -> tuple[Sampled, DeviceState]:
        """Copies prefilled slots to the other members of their groups, and draws each member's first token.

        Args:
            state: donated.
            logits_RxV: of the prefill call that completed the sources.
            copies_3xF: int32: row of `logits_RxV`, slot to copy from, slot to copy to (S: padding).
            draws_4xF: see `DRAW_FIELDS`.
        """
        rows_F, from_F, to_F = copies_3xF
        k, v = (x.at[:, to_F].set(jnp.take(x, from_F, axis=1, mode="clip"), mode="drop") for x in (state.k, state.v))
        return self._draw(jnp.take(logits_RxV, rows_F, axis=0, mode="clip"), draws_4xF), state._replace(k=k, v=v)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def decode(
        self, params: Params, state: DeviceState, slots_4xS: jax.Array, draws_4xS: jax.Array
    ) -> tuple[Sampled, DeviceState]:
        """Appends one token to the slots that take part, and draws the next.

        Args:
            params: of the model.
            state: donated.
            slots_4xS: int32: token, its position (text: the same in all three components), tokens cached before, and 1
                where the slot takes part, else 0 (then nothing is written and its draw means nothing).
            draws_4xS: see `DRAW_FIELDS`.
        """
        tokens_S, positions_S, cached_S, takes_part_S = slots_4xS
        positions_Sx3x1 = jnp.broadcast_to(positions_S[:, None, None], (positions_S.shape[0], 3, 1))
        cache = KVCache(state.k, state.v, cached_S)
        hidden_Sx1xD, cache = self._decoder(params, "extend", tokens_S[:, None], positions_Sx3x1, takes_part_S, cache)
        logits_SxV = self._decoder(params, "logits", hidden_Sx1xD[:, 0])
        return self._draw(logits_SxV, draws_4xS), state._replace(k=cache.k, v=cache.v)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def encode(
        self,
        params: Params,
        state: DeviceState,
        blocks_N: jax.Array,
        patches_NxPxF: jax.Array,
        coords_NxPx2: jax.Array,
        grids_NxPx2: jax.Array,
        segment_ids_NxP: jax.Array,
    ) -> DeviceState:
        """Encodes one image per row into its block of the image table (block `image_blocks`: padding).

        Patches are uint8; the other arrays as for the encoder (`knittrans_jax.models.vision`).
        """
        encoder, vision, table = self.model.encoder, self.model.config.vision, state.table_NxE
        if encoder is None or vision is None or table is None:
            raise ValueError("this model or this task has no images: there is nothing to encode")
        features_NxQxE = encoder_apply(
            encoder,
            params["encoder"],
            normalise_pixels(patches_NxPxF, vision),
            coords_NxPx2,
            grids_NxPx2,
            segment_ids_NxP,
        )
        blocks = table.reshape(self.shapes.image_blocks, self.shapes.block_tokens, -1)
        blocks = blocks.at[blocks_N].set(features_NxQxE, mode="drop")
        return state._replace(table_NxE=blocks.reshape(table.shape))

    def signatures(self, params: Any) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """Program and abstract arguments by name, to compile ahead of time; `params` may be abstract."""
        shapes, vision = self.shapes, self.model.config.vision
        state = jax.eval_shape(self.init_state)

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        rows, width, fan = shapes.prefill_rows, shapes.prefill_tokens, shapes.fan_out_rows
        kind = type(self)
        programs: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "prefill": (
                kind.prefill,
                (
                    self, params, state, ints(4, rows), ints(rows, width), ints(rows, 3, width), ints(rows, width),
                    ints(4, rows),
                ),
            ),
            "fan_out": (
                kind.fan_out,
                (
                    self, state, jax.ShapeDtypeStruct((rows, self.model.config.text.vocab_size), jnp.float32),
                    ints(3, fan), ints(4, fan),
                ),
            ),
            "decode": (kind.decode, (self, params, state, ints(4, shapes.slots), ints(4, shapes.slots))),
        }  # fmt: skip
        if vision is not None and shapes.image_blocks:
            images, patches = shapes.encode_rows, shapes.image_patches
            pixels = jax.ShapeDtypeStruct((images, patches, vision.patch_features), jnp.uint8)
            grid = ints(images, patches, 2)
            programs["encode"] = (
                kind.encode,
                (self, params, state, ints(images), pixels, grid, grid, ints(images, patches)),
            )
        return programs

    def _decoder(self, params: Params, method: str, *args: Any) -> Any:
        return decoder_apply(self.model.decoder, params["decoder"], method, *args)

    def _draw(self, logits_NxV: jax.Array, draws_4xN: jax.Array) -> Sampled:
        """One token per row by the Gumbel-max trick over the ids that may be sampled, or the likeliest where greedy."""
        ids_A = np.array(self.sampled_ids, np.int32)
        logprobs_NxA = jax.nn.log_softmax(logits_NxV[:, ids_A] / self.temperature, axis=-1)
        keys_Nx2 = jax.lax.bitcast_convert_type(draws_4xN[:2].T, jnp.uint32)

        def gumbel(words: jax.Array, index: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), index)
            return jax.random.gumbel(key, (len(ids_A),), jnp.float32)

        noise_NxA = jax.vmap(gumbel)(keys_Nx2, draws_4xN[2])
        greedy_Nx1 = (draws_4xN[3] > 0)[:, None]
        choice_N = jnp.argmax(logprobs_NxA + jnp.where(greedy_Nx1, 0.0, noise_NxA), axis=-1)
        logprobs_N = jnp.take_along_axis(logprobs_NxA, choice_N[:, None], axis=-1)[:, 0]
        return Sampled(jnp.asarray(ids_A)[choice_N], logprobs_N)


@functools.cache
def sampler_programs(
    model: Model, shapes: SamplerShapes, sampled_ids: tuple[int, ...], temperature: float
) -> SamplerPrograms:
    """The one instance for these values, so that engines that are alike share compiled programs."""
    return SamplerPrograms(model, shapes, sampled_ids, temperature)
