"""Hugging Face safetensors into sharded parameters, one parameter at a time.

What it guarantees: before anything is read, every tensor's name and shape is checked against the model, and what is missing,
extra or misshapen is an error that names it; a process reads only the bytes of its own devices' shards and holds one shard on
the host at a time; the whole model is never in one host's memory (unless its devices are that host).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from knittrans_jax.models.config import ModelConfig
from knittrans_jax.models.hf_config import CheckpointError
from knittrans_jax.models.hf_files import Checkpoint, listed
from knittrans_jax.models.hf_names import Source, sources
from knittrans_jax.models.model import Params, abstract_model

FLOATS = {"F64", "F32", "F16", "BF16"}
HEAD = "lm_head.weight"


def load_params(directory: Path, config: ModelConfig, shardings: Any, param_dtype: DTypeLike = jnp.float32) -> Params:
    """The parameters of a checkpoint, each in its sharding.

    Args:
      directory: has `model.safetensors`, or several files with `model.safetensors.index.json`.
      config: the model, e.g. from `hf_config.read_config(directory)`.
      shardings: a pytree like the parameters (`sharding.param_shardings`), or one sharding for all. Every process of a mesh
        over several calls this, and reads its own part.
      param_dtype: of the result; float tensors of any width are cast.

    Raises:
      CheckpointError: a missing, extra or misshapen tensor, by name.
    """
    _, shapes = abstract_model(config, param_dtype=param_dtype)
    with Checkpoint(directory) as checkpoint:
        table = sources(config, shapes)
        check_tensors(checkpoint, config, table)
        if isinstance(shardings, jax.sharding.Sharding):
            shardings = jax.tree.map(lambda _: shardings, shapes)
        leaves = [
            _load(checkpoint, config, source, sharding, np.dtype(param_dtype))
            for source, sharding in zip(table.values(), jax.tree.leaves(shardings), strict=True)
        ]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def check_tensors(checkpoint: Checkpoint, config: ModelConfig, table: dict[str, Source]) -> None:
    """Every tensor is there once, has its shape and is of floats, and there is no other; reads headers only.

    A tied model may have an output layer all the same, as some published ones do, if it equals the embedding.

    Raises:
      CheckpointError: otherwise.
    """
    where = checkpoint.directory
    wanted = {tensor: source for source in table.values() for tensor in source.tensors}
    missing = [f"{name} (parameter {wanted[name].parameter})" for name in wanted if name not in checkpoint.names]
    if missing:
        raise CheckpointError(f"{where}: missing tensors: {listed(missing)}")
    for name, source in wanted.items():
        if checkpoint.shape(name) != source.tensor_shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(checkpoint.shape(name))}; parameter {source.parameter} needs "
                f"{list(source.tensor_shape)}"
            )
        if checkpoint.dtype(name) not in FLOATS:
            raise CheckpointError(
                f"{where}: tensor {name} is {checkpoint.dtype(name)}; expected one of {sorted(FLOATS)}"
            )
    extra = checkpoint.names - wanted.keys()
    if config.text.tie_embeddings and HEAD in extra:
        _check_tied(checkpoint, table["decoder.embedding"].tensors[0])
        extra -= {HEAD}
    if extra:
        raise CheckpointError(f"{where}: extra tensors, for which this model has no parameter: {listed(sorted(extra))}")


def read_part(checkpoint: Checkpoint, config: ModelConfig, source: Source, index: tuple[slice, ...]) -> np.ndarray:
    """The part of a parameter at `index` (a slice for each of its axes), in the checkpoint's dtype (patches: float32)."""
    if not source.stacked:
        return _read_tensor(checkpoint, config, source, source.tensors[0], index)
    layers = source.tensors[index[0]]
    parts = [_read_tensor(checkpoint, config, source, name, index[1:]) for name in layers]
    return np.stack(parts)


def _load(checkpoint: Checkpoint, config: ModelConfig, source: Source, sharding: Any, dtype: np.dtype) -> jax.Array:
    last: list[tuple[Any, np.ndarray]] = []
    """Devices that hold the same part ask one after another."""

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        whole = index or (slice(None),) * len(source.shape)
        key = tuple(side.indices(size) for side, size in zip(whole, source.shape, strict=True))
        if not last or last[0][0] != key:
            last[:] = [(key, read_part(checkpoint, config, source, whole).astype(dtype))]
        return last[0][1]

    return jax.make_array_from_callback(source.shape, sharding, part, dtype=dtype)


def _read_tensor(
    checkpoint: Checkpoint, config: ModelConfig, source: Source, name: str, index: Sequence[slice]
) -> np.ndarray:
    if source.layout == "patches":
        return source.from_tensor(checkpoint.read(name), config.vision)[tuple(index)]
    at = tuple(index[::-1] if source.layout == "transposed" else index)
    return source.from_tensor(checkpoint.read(name, at), config.vision)


def _check_tied(checkpoint: Checkpoint, embedding: str, rows: int = 4096) -> None:
    """Compared some rows at a time."""
    vocabulary = checkpoint.shape(embedding)[0]
    ends = [*range(0, vocabulary, rows), vocabulary]
    equal = checkpoint.shape(HEAD) == checkpoint.shape(embedding) and all(
        np.array_equal(checkpoint.read(HEAD, at), checkpoint.read(embedding, at))
        for at in ((slice(begin, end),) for begin, end in itertools.pairwise(ends))
    )
    if not equal:
        raise CheckpointError(
            f"{checkpoint.directory}: tie_word_embeddings is true, but {HEAD} differs from {embedding}; set it to false"
        )
