"""The update of one mini-batch, as jitted programs over the training mesh `data` x `fsdp` x `tensor` (`train/layout.py`).

1. `start()`: zero accumulators.
2. `encode(params, images)`: every unique image once; the table is gathered to all devices.
3. `accumulate(params, table, chunk, sums)`: forward and backward of a chunk of micro-batches. Each data shard adds to sums of
   its own (gradients, table cotangent, figures), all float32. Nothing is summed over `data`, and the table's cotangent over
   nothing at all. On a mesh of `data` alone this program contains no collective, so a process that lacks its rows holds up
   nobody inside one. `fsdp` gathers each layer's parameters inside the loop over layers, and sums their gradients there; the
   vocabulary stays split.
4. `finish(state, images, sums, denominator)`: the table's cotangents are summed over data shards and go back through the
   encoder once, which recomputes its activations chunk by chunk, or reads what `encode_and_keep` (in place of `encode`) kept;
   gradients are summed over data shards once; clip; update.

The programs are manual in all axes (`shard_map`): their collectives are those written here. Only `accumulate` leaves `tensor`
to XLA, where it is larger than 1. The encoder knows no `tensor`: its rows are shared out over all devices where they divide.

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
from knittrans_jax.encoding.encode_once import (
    Residuals,
    add_cotangent,
    encode_and_keep,
    encode_once,
    gather_rows,
    pull_back_kept,
)
from knittrans_jax.models import Model, abstract_model, decoder_apply, encoder_apply, normalise_pixels
from knittrans_jax.models.mesh import ROWS
from knittrans_jax.train.layout import TENSOR, TRAIN_AXES, Layout, map_specs, without
from knittrans_jax.train.objective import ObjectiveSums, objective_sums, score_tokens
from knittrans_jax.train.ravel import ravel, small, unravel
from knittrans_jax.train.state import (
    EncoderTrained,
    TrainState,
    init_state,
    merged,
    trained_params,
    with_fixed_part_fixed,
)
from knittrans_jax.transfer.batch import ChunkArrays, ImageArrays

ENCODER_CHUNK_ROWS, ENCODER_CHUNK_PATCHES = 8, 512
"""Most encoder rows of a chunk, and most patches where they are more than one. Activations live one chunk at a time; a chunk of
several large pictures would take more memory than a micro-batch that encodes its own."""


class Sums(NamedTuple):
    """Accumulators of a mini-batch; every leaf has a leading axis, see `train/layout.py`. S data shards."""

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
    encoder_trained: EncoderTrained = "all"

    @property
    def frozen_encoder(self) -> bool:
        """No image needs a cotangent."""
        return self.encoder_trained == "none"

    @functools.cached_property
    def layout(self) -> Layout:
        """How everything lies on the mesh."""
        return Layout(self.model.config, self.mesh)

    @property
    def shards(self) -> int:
        """Number of data shards."""
        return self.layout.shards

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of the table, and of scalars."""
        return NamedSharding(self.mesh, P())

    @property
    def chunk_sharding(self) -> NamedSharding:
        """Sharding of every field of `ChunkArrays`, and of copies of images."""
        return NamedSharding(self.mesh, P(None, ROWS))

    @property
    def image_sharding(self) -> NamedSharding:
        """Sharding of every field of `ImageArrays`."""
        return NamedSharding(self.mesh, P(ROWS))

    @property
    def residual_sharding(self) -> NamedSharding:
        """Sharding of the leading axis of what `encode_and_keep` keeps."""
        return NamedSharding(self.mesh, P(TRAIN_AXES))

    @functools.cached_property
    def param_shardings(self) -> Any:
        """A tree like the parameters."""
        return self.layout.shardings(self.layout.params)

    @functools.cached_property
    def state_shardings(self) -> TrainState:
        """A tree like the training state."""
        params = abstract_model(self.model.config)[1]
        return self.layout.state(jax.eval_shape(self._init, params))

    @functools.cached_property
    def init(self) -> Any:
        """`init(params) -> state`, version 0."""
        return jax.jit(self._init, out_shardings=self.state_shardings)

    def _init(self, params: Any) -> TrainState:
        return init_state(params, self.optimizer, self.encoder_trained)

    @functools.cached_property
    def start(self) -> Any:
        """`start(params, table_rows, copies) -> Sums` of zeros. Static: `table_rows` that get a cotangent; `copies`: micro-
        batches encode their own images.
        """

        def start(params: Any, table_rows: int, copies: bool) -> Sums:
            def zeros(leaf: jax.Array, spec: P) -> jax.Array:
                lead = self.mesh.shape[spec[0]] if isinstance(spec[0], str) else self.shards
                return jnp.zeros((lead, *leaf.shape), jnp.float32)

            specs = self._sums_specs(copies)
            sums = Sums(
                decoder=jax.tree.map(zeros, params["decoder"], specs.decoder),
                encoder=jax.tree.map(zeros, params["encoder"], specs.encoder) if copies else (),
                cotangent=jnp.zeros((self.shards, table_rows, self.model.config.visual_features), jnp.float32),
                figures=ObjectiveSums(*(jnp.zeros((self.shards,), jnp.float32) for _ in ObjectiveSums._fields)),
            )
            return lax.with_sharding_constraint(sums, self.sums_shardings(copies))

        return jax.jit(start, static_argnums=(1, 2))

    @functools.cached_property
    def encode(self) -> Any:
        """`encode(params, images) -> table` [ER * P / merge^2, E], on every device."""

        def encode(params: Any, images: ImageArrays) -> jax.Array:
            own, axes = self._own_images(images)
            return lax.all_gather(self._local_table(params["encoder"], own)[0], axes, tiled=True)

        return jax.jit(self._manual(encode, (self.layout.params, P(ROWS)), P()))

    @functools.cached_property
    def encode_and_keep(self) -> Any:
        """`encode_and_keep(params, images) -> (table, residuals)`: as `encode`, with what `finish` then need not recompute.

        Leaves of `residuals` have a leading axis of devices.
        """

        def encode(params: Any, images: ImageArrays) -> tuple[jax.Array, Residuals]:
            own, axes = self._own_images(images)
            table, residuals = encode_and_keep(self._encode_rows, params["encoder"], own)
            return lax.all_gather(table, axes, tiled=True), jax.tree.map(lambda x: x[None], residuals)

        return jax.jit(self._manual(encode, (self.layout.params, P(ROWS)), (P(), P(TRAIN_AXES))))

    def residual_row_bytes(self, params: Any, row_patches: int) -> int:
        """Bytes that `encode_and_keep` keeps of one encoder row of `row_patches` patches. `params`: arrays or shapes."""
        vision, devices = self.model.config.vision, self.mesh.size
        assert vision is not None

        def kept_bytes(rows_per_device: int) -> int:
            rows = rows_per_device * devices
            images = ImageArrays(
                jax.ShapeDtypeStruct((rows, row_patches, vision.patch_features), jnp.uint8),
                jax.ShapeDtypeStruct((rows, row_patches, 2), jnp.int32),
                jax.ShapeDtypeStruct((rows, row_patches, 2), jnp.int32),
                jax.ShapeDtypeStruct((rows, row_patches), jnp.int32),
            )
            kept = jax.eval_shape(self.encode_and_keep, params, images)[1]
            return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(kept)) // devices

        return kept_bytes(2) - kept_bytes(1)

    @functools.cached_property
    def empty_table(self) -> Any:
        """`empty_table(rows) -> table` [rows, E] of zeros on every device, for `insert`; `rows` is static."""

        def empty(rows: int) -> jax.Array:
            return jnp.zeros((rows, self.model.config.visual_features), jnp.float32)

        return jax.jit(empty, static_argnums=0, out_shardings=self.replicated)

    @functools.cached_property
    def insert(self) -> Any:
        """`insert(table, params, images, rows) -> table` with the images' features in it; `table` is donated.

        `rows`: int32 [ER * P / merge^2], the row of `table` of each row that `images` encode to; out of range: none.
        """

        def insert(table: jax.Array, params: Any, images: ImageArrays, rows: jax.Array) -> jax.Array:
            own, axes = self._own_images(images)
            encoded = lax.all_gather(self._local_table(params["encoder"], own)[0], axes, tiled=True)
            return table.at[rows].set(encoded, mode="drop")

        return jax.jit(self._manual(insert, (P(), self.layout.params, P(ROWS), P()), P()), donate_argnums=0)

    @functools.cached_property
    def accumulate(self) -> Any:
        """`accumulate(params, table, chunk, sums) -> sums`; `sums` is donated."""

        def accumulate(params: Any, table: jax.Array | None, chunk: ChunkArrays, sums: Sums) -> Sums:
            own = jax.tree.map(lambda x: x[0], sums)
            own, _ = lax.scan(
                lambda carry, batch: (self._micro_batch(params, table, None, batch, carry), None), own, chunk
            )
            return jax.tree.map(lambda x: x[None], own)

        specs = self._sums_specs(copies=False)
        return self._jit_accumulate(accumulate, (self.layout.params, P(), P(None, ROWS), specs), specs)

    @functools.cached_property
    def accumulate_copies(self) -> Any:
        """`accumulate_copies(params, copies, chunk, sums) -> sums`: `copies` are `ImageArrays` with a leading axis C."""

        def accumulate(params: Any, copies: ImageArrays, chunk: ChunkArrays, sums: Sums) -> Sums:
            def one(carry: Sums, batch: tuple[ImageArrays, ChunkArrays]) -> tuple[Sums, None]:
                return self._micro_batch(params, None, batch[0], batch[1], carry), None

            own, _ = lax.scan(one, jax.tree.map(lambda x: x[0], sums), (copies, chunk))
            return jax.tree.map(lambda x: x[None], own)

        specs = self._sums_specs(copies=True)
        return self._jit_accumulate(accumulate, (self.layout.params, P(None, ROWS), P(None, ROWS), specs), specs)

    @functools.cached_property
    def finish(self) -> Any:
        """`finish(state, images, sums, denominator, residuals=None) -> (state, figures)`; `state` is donated.

        `denominator`: float32 scalar, the sampled tokens of the mini-batch. `figures`: float32 scalars by name.
        """

        def gradients(
            params: Any, images: ImageArrays | None, sums: Sums, denominator: jax.Array, residuals: Residuals | None
        ) -> Any:
            own = jax.tree.map(lambda x: x[0], sums)
            grads, encoder_over = {"decoder": own.decoder}, ROWS
            if images is not None:
                own_images, encoder_over = self._own_images(images)
                cotangent = lax.psum_scatter(own.cotangent, ROWS, scatter_dimension=0, tiled=True)
                if TENSOR in encoder_over:
                    cotangent = _own_part(cotangent, TENSOR)
                if residuals is None:
                    grads["encoder"] = self._local_table(params["encoder"], own_images)[1](cotangent)
                else:
                    kept = jax.tree.map(lambda x: x[0], residuals)
                    grads["encoder"] = pull_back_kept(self._encode_rows, params["encoder"], own_images, kept, cotangent)
            elif own.encoder:
                grads["encoder"] = own.encoder
            elif "encoder" in params and not self.frozen_encoder:
                grads["encoder"] = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params["encoder"])
            grads = trained_params(grads, self.encoder_trained)
            return self._sum_over_shards(grads, own.figures, encoder_over, denominator)

        def finish(
            state: TrainState,
            images: ImageArrays | None,
            sums: Sums,
            denominator: jax.Array,
            residuals: Residuals | None = None,
        ) -> tuple[TrainState, dict[str, jax.Array]]:
            trained = trained_params(state.params, self.encoder_trained)
            in_specs = (self.layout.params, P(ROWS), self._sums_specs(bool(sums.encoder)), P(), P(TRAIN_AXES))
            out_specs = (trained_params(self.layout.params, self.encoder_trained), P())
            given = (state.params, images, sums, denominator, residuals)
            grads, figures = self._manual(gradients, in_specs, out_specs)(*given)
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, trained)
            optimizer = optax.with_extra_args_support(self.optimizer)
            updates, opt_state = optimizer.update(grads, state.opt_state, trained, loss=figures.loss)
            params = merged(state.params, cast(dict[str, Any], optax.apply_updates(trained, updates)))
            new = TrainState(update=state.update + 1, params=params, opt_state=opt_state)
            one_vector = small(grads) and not self.layout.splits_params
            return new, _report(figures, denominator, optax.tree.norm(ravel(grads) if one_vector else grads))

        return jax.jit(finish, donate_argnums=0, out_shardings=(self.state_shardings, self.replicated))

    def sums_shardings(self, copies: bool) -> Sums:
        """Shardings of `Sums`; `copies` as in `start`."""
        return self.layout.shardings(self._sums_specs(copies))

    def _sums_specs(self, copies: bool) -> Sums:
        return Sums(
            decoder=self.layout.sums["decoder"],
            encoder=self.layout.sums["encoder"] if copies else (),
            cotangent=P(ROWS),
            figures=ObjectiveSums(*(P(ROWS) for _ in ObjectiveSums._fields)),
        )

    def _manual(self, f: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _jit_accumulate(self, f: Any, in_specs: Any, sums_specs: Sums) -> Any:
        """Jitted over data shards, with donated sums; XLA splits the work over `tensor`, where there is any."""
        axes = set(TRAIN_AXES if self.mesh.shape[TENSOR] == 1 else ROWS)

        def seen(specs: Any) -> Any:
            return specs if TENSOR in axes else map_specs(lambda spec: without(spec, TENSOR), specs)

        mapped = jax.shard_map(
            f,
            mesh=self.mesh,
            in_specs=seen(in_specs),
            out_specs=seen(sums_specs),
            axis_names=axes,
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=3, out_shardings=self.layout.shardings(sums_specs))

    def _own_images(self, images: ImageArrays) -> tuple[ImageArrays, tuple[str, ...]]:
        """A device's images of those of its data shard, and the axes over which all images are then shared out."""
        if self.mesh.shape[TENSOR] == 1 or images.patches.shape[0] % self.mesh.shape[TENSOR]:
            return images, ROWS
        return jax.tree.map(lambda x: _own_part(x, TENSOR), images), (*ROWS, TENSOR)

    def _sum_over_shards(
        self, grads: Any, figures: ObjectiveSums, encoder_over: tuple[str, ...], denominator: jax.Array
    ) -> tuple[Any, ObjectiveSums]:
        """Sums over data shards; gradients are then divided. A small tree that is whole everywhere goes as one vector.

        `encoder_over`: the axes over which the encoder's gradient is spread, were its parameters not split.
        """
        if self.layout.splits_params or not small((grads, figures)):
            sums, specs = {}, trained_params(self.layout.params, self.encoder_trained)
            for part, tree in grads.items():
                axes = encoder_over if part == "encoder" else ROWS
                sums[part] = jax.tree.map(
                    lambda g, spec, axes=axes: lax.psum(g, self.layout.not_split(spec, axes)) / denominator,
                    tree,
                    specs[part],
                )
            return sums, lax.psum(figures, ROWS)
        total = lax.psum(ravel((grads, figures)), ROWS)
        figures_at = total.size - len(figures)
        return unravel(total[:figures_at] / denominator, grads), unravel(total[figures_at:], figures)

    def _encode_rows(self, params: Any, images: ImageArrays) -> jax.Array:
        vision = self.model.config.vision
        if vision is None or self.model.encoder is None:
            raise ValueError("images came for a model without a vision encoder")
        params = with_fixed_part_fixed(params, self.encoder_trained)
        pixels = normalise_pixels(images.patches, vision)
        return encoder_apply(self.model.encoder, params, pixels, images.coords, images.grids, images.segment_ids)

    def _local_table(self, params: Any, images: ImageArrays) -> tuple[jax.Array, Any]:
        rows = min(ENCODER_CHUNK_ROWS, max(1, ENCODER_CHUNK_PATCHES // images.patches.shape[1]))
        return encode_once(self._encode_rows, params, images, chunk_rows=rows)

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
            scores = score_tokens(
                logits, batch.tokens, self._sampled_mask(), self.temperature, self.layout.vocabulary_axis
            )
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

    def _sampled_mask(self) -> jax.Array:
        return (
            jnp.zeros((self.model.config.text.vocab_size,), jnp.bool_)
            .at[jnp.asarray(self.sampled_ids, jnp.int32)]
            .set(True)
        )


def _own_part(x: jax.Array, axis: str) -> jax.Array:
    """The equal part along the leading axis that belongs to this device of a mesh axis."""
    parts = lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * (x.shape[0] // parts), x.shape[0] // parts)


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
        "update_skipped": 1.0 - (jnp.isfinite(grad_norm) & jnp.isfinite(figures.loss)).astype(jnp.float32),
    }
