"""The update of one mini-batch, as jitted programs over the training mesh.

1. `start()`: zero accumulators, one per data shard.
2. `encode(params, images)`: every unique image once; the table is gathered to all shards.
3. `accumulate(params, table, chunk, sums)`: forward and backward of a chunk of micro-batches. Each shard adds to its own
   sums (decoder gradient, table cotangent, figures), all float32: this program contains no collective, so a process that
   lacks its rows holds up nobody inside one.
4. `finish(state, images, sums, denominator)`: the table's cotangents are summed over shards and go back through the encoder
   once; gradients are summed over shards once; clip; update.

Without images `encode` is not called, `table` and `images` are None, and the encoder's gradient is exactly zero, as it is
for naive training on a batch without images. In modes `per_micro_batch` and `per_micro_batch_unique` every micro-batch encodes
images of its own: `table` is None, the chunk brings them, and `accumulate_copies` takes the place of `accumulate`. In mode
`frozen` the table is kept over updates: `insert` encodes images into it, it gets no cotangent, and the encoder is neither
differentiated nor updated (no gradient, no moments, no weight decay).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from knittrans_jax.config import ObjectiveConfig
from knittrans_jax.encoding.encode_once import add_cotangent, encode_once, gather_rows
from knittrans_jax.models import Model, decoder_apply, encoder_apply, normalise_pixels
from knittrans_jax.train.objective import ObjectiveSums, objective_sums, score_tokens
from knittrans_jax.train.ravel import ravel, small, unravel
from knittrans_jax.train.state import TrainState, trained_params
from knittrans_jax.transfer.batch import ChunkArrays, ImageArrays

AXIS = "data"
ENCODER_CHUNK_ROWS = 8
"""Encoder rows per chunk: the encoder's activations live one chunk at a time."""


class Sums(NamedTuple):
    """Accumulators of a mini-batch; every leaf has a leading axis of data shards, sharded over `data`."""

    decoder: Any
    encoder: Any
    """Encoder gradient where micro-batches encode their own images; an empty tuple otherwise."""
    cotangent: jax.Array
    """float32 [S, table rows, E]; 0 rows when there is no table."""
    figures: ObjectiveSums


@dataclasses.dataclass(frozen=True)
class StepPrograms:
    """The programs of an update for one model, objective and mesh. Methods are jitted; shapes are those of `batch.py`.

    `sampled_ids` are the ids that the sampler may emit and `temperature` its temperature: the objective scores tokens
    under the same distribution.
    """

    model: Model
    objective: ObjectiveConfig
    optimizer: optax.GradientTransformation
    mesh: Mesh
    sampled_ids: tuple[int, ...]
    temperature: float
    frozen_encoder: bool = False

    @property
    def shards(self) -> int:
        """Number of data shards."""
        return self.mesh.shape[AXIS]

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of parameters, optimizer state and the table."""
        return NamedSharding(self.mesh, P())

    @property
    def chunk_sharding(self) -> NamedSharding:
        """Sharding of every field of `ChunkArrays`."""
        return NamedSharding(self.mesh, P(None, AXIS))

    @property
    def image_sharding(self) -> NamedSharding:
        """Sharding of every field of `ImageArrays`, and of the leading axis of `Sums`."""
        return NamedSharding(self.mesh, P(AXIS))

    @functools.cached_property
    def start(self) -> Any:
        """`start(params, table_rows, copies) -> Sums` of zeros. Static: `table_rows` that get a cotangent; `copies`: micro-
        batches encode their own images.
        """

        def start(params: Any, table_rows: int, copies: bool) -> Sums:
            def zeros(leaf: jax.Array) -> jax.Array:
                return jnp.zeros((self.shards, *leaf.shape), jnp.float32)

            return Sums(
                decoder=jax.tree.map(zeros, params["decoder"]),
                encoder=jax.tree.map(zeros, params["encoder"]) if copies else (),
                cotangent=jnp.zeros((self.shards, table_rows, self.model.config.visual_features), jnp.float32),
                figures=ObjectiveSums(*(jnp.zeros((self.shards,), jnp.float32) for _ in ObjectiveSums._fields)),
            )

        return jax.jit(start, static_argnums=(1, 2), out_shardings=self.image_sharding)

    @functools.cached_property
    def encode(self) -> Any:
        """`encode(params, images) -> table` [ER * P / merge^2, E], on every shard."""

        def encode(params: Any, images: ImageArrays) -> jax.Array:
            return lax.all_gather(self._local_table(params["encoder"], images)[0], AXIS, tiled=True)

        return jax.jit(self._sharded(encode, (P(), P(AXIS)), P(), check_vma=False))

    @functools.cached_property
    def empty_table(self) -> Any:
        """`empty_table(rows) -> table` [rows, E] of zeros on every shard, for `insert`; `rows` is static."""

        def empty(rows: int) -> jax.Array:
            return jnp.zeros((rows, self.model.config.visual_features), jnp.float32)

        return jax.jit(empty, static_argnums=0, out_shardings=self.replicated)

    @functools.cached_property
    def insert(self) -> Any:
        """`insert(table, params, images, rows) -> table` with the images' features in it; `table` is donated.

        `rows`: int32 [ER * P / merge^2], the row of `table` of each row that `images` encode to; out of range: none.
        """

        def insert(table: jax.Array, params: Any, images: ImageArrays, rows: jax.Array) -> jax.Array:
            encoded = lax.all_gather(self._local_table(params["encoder"], images)[0], AXIS, tiled=True)
            return table.at[rows].set(encoded, mode="drop")

        return jax.jit(self._sharded(insert, (P(), P(), P(AXIS), P()), P(), check_vma=False), donate_argnums=0)

    @functools.cached_property
    def accumulate(self) -> Any:
        """`accumulate(params, table, chunk, sums) -> sums`; `sums` is donated."""

        def accumulate(params: Any, table: jax.Array | None, chunk: ChunkArrays, sums: Sums) -> Sums:
            own = jax.tree.map(lambda x: x[0], sums)
            own, _ = lax.scan(
                lambda carry, batch: (self._micro_batch(params, table, None, batch, carry), None), own, chunk
            )
            return jax.tree.map(lambda x: x[None], own)

        return jax.jit(
            self._sharded(accumulate, (P(), P(), P(None, AXIS), P(AXIS)), P(AXIS), check_vma=False), donate_argnums=3
        )

    @functools.cached_property
    def accumulate_copies(self) -> Any:
        """`accumulate_copies(params, copies, chunk, sums) -> sums`: `copies` are `ImageArrays` with a leading axis C."""

        def accumulate(params: Any, copies: ImageArrays, chunk: ChunkArrays, sums: Sums) -> Sums:
            def one(carry: Sums, batch: tuple[ImageArrays, ChunkArrays]) -> tuple[Sums, None]:
                return self._micro_batch(params, None, batch[0], batch[1], carry), None

            own, _ = lax.scan(one, jax.tree.map(lambda x: x[0], sums), (copies, chunk))
            return jax.tree.map(lambda x: x[None], own)

        return jax.jit(
            self._sharded(accumulate, (P(), P(None, AXIS), P(None, AXIS), P(AXIS)), P(AXIS), check_vma=False),
            donate_argnums=3,
        )

    @functools.cached_property
    def finish(self) -> Any:
        """`finish(state, images, sums, denominator) -> (state, figures)`; `state` is donated.

        `denominator`: float32 scalar, the sampled tokens of the mini-batch. `figures`: float32 scalars by name.
        """

        def gradients(params: Any, images: ImageArrays | None, sums: Sums, denominator: jax.Array) -> Any:
            own = jax.tree.map(lambda x: x[0], sums)
            grads = {"decoder": own.decoder}
            if images is not None:
                cotangent = lax.psum_scatter(own.cotangent, AXIS, scatter_dimension=0, tiled=True)
                grads["encoder"] = self._local_table(params["encoder"], images)[1](cotangent)
            elif own.encoder:
                grads["encoder"] = own.encoder
            elif "encoder" in params and not self.frozen_encoder:
                grads["encoder"] = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params["encoder"])
            return _sum_over_shards(grads, own.figures, denominator)

        def finish(
            state: TrainState, images: ImageArrays | None, sums: Sums, denominator: jax.Array
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            grads, figures = self._sharded(gradients, (P(), P(AXIS), P(AXIS), P()), P(), check_vma=False)(
                state.params, images, sums, denominator
            )
            trained = trained_params(state.params, self.frozen_encoder)
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, trained)
            updates, opt_state = self.optimizer.update(grads, state.opt_state, trained)
            params = state.params | cast(dict[str, Any], optax.apply_updates(trained, updates))
            new = TrainState(update=state.update + 1, params=params, opt_state=opt_state)
            return new, _report(figures, denominator, optax.tree.norm(ravel(grads) if small(grads) else grads))

        return jax.jit(finish, donate_argnums=0, out_shardings=self.replicated)

    def _sharded(self, f: Any, in_specs: Any, out_specs: Any, check_vma: bool) -> Any:
        return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)

    def _encode_rows(self, params: Any, images: ImageArrays) -> jax.Array:
        vision = self.model.config.vision
        if vision is None or self.model.encoder is None:
            raise ValueError("images came for a model without a vision encoder")
        pixels = normalise_pixels(images.patches, vision)
        return encoder_apply(self.model.encoder, params, pixels, images.coords, images.grids, images.segment_ids)

    def _local_table(self, params: Any, images: ImageArrays) -> tuple[jax.Array, Any]:
        return encode_once(self._encode_rows, params, images, chunk_rows=ENCODER_CHUNK_ROWS)

    def _micro_batch(
        self, params: Any, table: jax.Array | None, copies: ImageArrays | None, batch: ChunkArrays, sums: Sums
    ) -> Sums:
        """One forward and backward on this shard; adds to its sums."""
        index_RxT = batch.table_index

        def loss(decoder: Any, visual: jax.Array | None) -> tuple[jax.Array, ObjectiveSums]:
            mask = None if visual is None else index_RxT >= 0
            hidden = decoder_apply(
                self.model.decoder, decoder, "hidden", batch.tokens, batch.positions, batch.segment_ids, visual, mask
            )
            logits = decoder_apply(self.model.decoder, decoder, "logits", hidden)
            scores = score_tokens(logits, batch.tokens, self._sampled_mask(logits.shape[-1]), self.temperature)
            figures = objective_sums(
                scores, batch.sampled, batch.behaviour_logprobs, batch.advantages, batch.fresh, self.objective
            )
            return figures.loss, figures

        def naive_loss(decoder: Any, encoder: Any) -> tuple[jax.Array, ObjectiveSums]:
            rows = self._encode_rows(encoder, copies)  # pyright: ignore[reportArgumentType]
            return loss(decoder, gather_rows(rows.reshape(-1, rows.shape[-1]), index_RxT))

        encoder_sum, cotangent_sum = sums.encoder, sums.cotangent
        if copies is not None:
            (decoder, encoder), figures = jax.grad(naive_loss, (0, 1), has_aux=True)(
                params["decoder"], params["encoder"]
            )
            encoder_sum = jax.tree.map(_add, encoder_sum, encoder)
        elif table is not None and not self.frozen_encoder:
            visual = gather_rows(table, index_RxT)
            (decoder, cotangent), figures = jax.grad(loss, (0, 1), has_aux=True)(params["decoder"], visual)
            cotangent_sum = add_cotangent(cotangent_sum, index_RxT, cotangent)
        else:
            visual = None if table is None else gather_rows(table, index_RxT)
            decoder, figures = jax.grad(loss, has_aux=True)(params["decoder"], visual)
        return Sums(
            decoder=jax.tree.map(_add, sums.decoder, decoder),
            encoder=encoder_sum,
            cotangent=cotangent_sum,
            figures=jax.tree.map(_add, sums.figures, figures),
        )

    def _sampled_mask(self, vocab_size: int) -> jax.Array:
        return jnp.zeros((vocab_size,), jnp.bool_).at[jnp.asarray(self.sampled_ids, jnp.int32)].set(True)


def _sum_over_shards(grads: Any, figures: ObjectiveSums, denominator: jax.Array) -> tuple[Any, ObjectiveSums]:
    """Sums over shards; gradients are then divided. A small tree goes as one vector, in one collective."""
    if not small((grads, figures)):
        grads, figures = lax.psum((grads, figures), AXIS)
        return jax.tree.map(lambda g: g / denominator, grads), figures
    total = lax.psum(ravel((grads, figures)), AXIS)
    figures_at = total.size - len(figures)
    return unravel(total[:figures_at] / denominator, grads), unravel(total[figures_at:], figures)


def _add(total: jax.Array, term: jax.Array) -> jax.Array:
    return total + term.astype(jnp.float32)


def _report(figures: ObjectiveSums, denominator: jax.Array, grad_norm: jax.Array) -> dict[str, jax.Array]:
    """Means over sampled tokens; `logprob_mismatch` over fresh tokens, and nan where there are none."""
    return {
        "loss": figures.loss / denominator,
        "entropy": figures.entropy / denominator,
        "clip_fraction": figures.clipped / denominator,
        "ratio_deviation": figures.ratio_deviation / denominator,
        "logprob_mismatch": figures.mismatch_abs / figures.fresh,
        "fresh_tokens": figures.fresh,
        "sampled_tokens": figures.tokens,
        "grad_norm": grad_norm,
        "update_skipped": 1.0 - jnp.isfinite(grad_norm).astype(jnp.float32),
    }
