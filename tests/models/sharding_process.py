"""On eight CPU devices: loss and gradients of the tiny model under a mesh of every axis equal those of one device.

The environment says how many devices; prints the axes that split something.
"""

from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from knittrans_jax.models import abstract_model, build_model, decoder_apply, encoder_apply, preset
from knittrans_jax.models.fsdp import Fsdp
from knittrans_jax.models.sharding import hidden_spec, param_shardings, rows_spec, shard_rules
from knittrans_jax.train.objective import score_tokens

AXES = {"data": 1, "fsdp": 2, "tensor": 2, "sequence": 2}
TINY = preset("tiny")
assert TINY.vision is not None
CONFIG = msgspec.structs.replace(  # as few layers as show everything: compiling is what takes the time
    TINY,
    text=msgspec.structs.replace(TINY.text, layers=1),
    vision=msgspec.structs.replace(TINY.vision, layers=1),
)
RNG = np.random.default_rng(0)
ROWS, TOKENS, PATCHES = 8, 16, 16
PARAMS = jax.tree.map(np.asarray, build_model(CONFIG, seed=0)[1])  # from the host: eager operations would compile
assert CONFIG.vision is not None
BATCH: dict[str, Any] = {
    "tokens": RNG.integers(0, 48, (ROWS, TOKENS), dtype=np.int32),
    "segments": np.repeat(RNG.integers(1, 3, (ROWS, 2), dtype=np.int32), TOKENS // 2, axis=1),
    "positions": RNG.integers(0, 9, (ROWS, TOKENS, 3), dtype=np.int32),
    "pixels": RNG.normal(size=(ROWS, PATCHES, CONFIG.vision.patch_features)).astype(np.float32),
    "coords": RNG.integers(0, 4, (ROWS, PATCHES, 2), dtype=np.int32),
}


def loss(model: Any, params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    grids, ones = jnp.full((ROWS, PATCHES, 2), 4, jnp.int32), jnp.ones((ROWS, PATCHES), jnp.int32)
    table = encoder_apply(model.encoder, params["encoder"], batch["pixels"], batch["coords"], grids, ones)
    visual = jnp.repeat(table, TOKENS // table.shape[1], axis=1)
    hidden = decoder_apply(
        model.decoder, params["decoder"], "hidden", batch["tokens"], jnp.swapaxes(batch["positions"], 1, 2),
        batch["segments"], visual, batch["tokens"] < 20,
    )  # fmt: skip
    return jnp.sum(jnp.sin(decoder_apply(model.decoder, params["decoder"], "logits", hidden)))


def main() -> None:
    plain = abstract_model(CONFIG)[0]
    expected_loss, expected = jax.jit(jax.value_and_grad(lambda p, b: loss(plain, p, b)))(PARAMS, BATCH)
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))
    shardings = param_shardings(PARAMS, shard_rules(CONFIG), mesh)
    with jax.set_mesh(mesh):
        model, _ = abstract_model(CONFIG, remat=True, hidden_spec=hidden_spec(mesh))
        params = jax.device_put(PARAMS, shardings)
        batch = jax.device_put(BATCH, NamedSharding(mesh, rows_spec(mesh)))
        step = jax.jit(jax.value_and_grad(lambda p, b: loss(model, p, b)), out_shardings=(None, shardings))
        value, gradients = step(params, batch)
    np.testing.assert_allclose(value, expected_loss, rtol=1e-4)
    for (path, want), got in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(gradients), strict=True):
        scale = np.abs(np.asarray(want)).max()
        np.testing.assert_allclose(
            np.asarray(got), np.asarray(want), atol=1e-4 * scale, err_msg=jax.tree_util.keystr(path)
        )
    print(*(axis for axis, size in mesh.shape.items() if size > 1))
    split_vocabulary()


def split_vocabulary() -> None:
    """Looking tokens up, logits, log-probs and entropies with the vocabulary split over four devices; and the gradients."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    fsdp = Fsdp("fsdp", shard_rules(CONFIG), jnp.float32)
    tokens = jnp.asarray(BATCH["tokens"])
    allowed = jnp.asarray(RNG.random(48) < 0.3).at[:12].set(False)  # the first device has none of the sampled ids
    weights = jnp.asarray(RNG.normal(size=(2, ROWS, TOKENS)), jnp.float32)
    whole, split = (abstract_model(CONFIG, fsdp=one)[0].decoder for one in (None, fsdp))
    tables = {name: PARAMS["decoder"][name] for name in ("embedding", "head")}

    def scored(decoder: Any, tables: Any, tokens: jax.Array, weights: jax.Array, axis: str | None) -> jax.Array:
        found = tables["embedding"][tokens] if axis is None else fsdp.lookup(tables["embedding"], tokens)
        logits = decoder_apply(decoder, PARAMS["decoder"] | tables, "logits", jnp.sin(found))
        scores = score_tokens(logits, tokens, allowed, 0.7, axis)
        return jnp.sum(weights[0] * scores.logprobs_RxT + weights[1] * scores.entropies_RxT)

    def on_a_device(tables: Any, tokens: jax.Array, weights: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(lambda t: scored(split, t, tokens, weights, "fsdp"))(tables)
        return lax.psum(value, ("data", "fsdp")), lax.psum(gradients, "data")

    rows = P(("data", "fsdp"))
    mapped = jax.shard_map(
        on_a_device, mesh=mesh, in_specs=(P("fsdp"), rows, P(None, *rows)), out_specs=(P(), P("fsdp")), check_vma=False
    )
    value, got = jax.jit(mapped)(tables, tokens, weights)
    expected, want = jax.jit(jax.value_and_grad(lambda t: scored(whole, t, tokens, weights, None)))(tables)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name in tables:
        np.testing.assert_allclose(got[name], want[name], atol=2e-6 * np.abs(want[name]).max(), err_msg=name)
    print("vocabulary")


if __name__ == "__main__":
    main()
