"""Hugging Face safetensors into sharded parameters, one parameter at a time.

What it guarantees: before anything is read, every tensor's name and shape is checked against the model, and what is missing,
extra or misshapen is an error that names it; a process reads only the bytes of its own devices' shards and holds one shard on
the host at a time; the whole model is never in one host's memory (unless its devices are that host).
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from jax.typing import DTypeLike

from knittrans_jax.models.config import ModelConfig
from knittrans_jax.models.hf_config import CheckpointError, read_json
from knittrans_jax.models.hf_names import Source, sources
from knittrans_jax.models.model import Params, abstract_model

FLOATS = {"F64", "F32", "F16", "BF16"}
HEAD = "lm_head.weight"
SHOWN = 5
"""Most tensors that an error lists."""


class Checkpoint:
    """The tensors of a checkpoint folder: one `model.safetensors`, or several files with an index. A context manager."""

    def __init__(self, directory: Path) -> None:
        """Opens the files and reads their headers.

        Raises:
          CheckpointError: there is no such file, a file is damaged, or index and files contradict each other.
        """
        self.directory = Path(directory)
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        """Open file by tensor name."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._stack.close)
            self._open()
            closing.pop_all()

    def _open(self) -> None:
        index = self.directory / "model.safetensors.index.json"
        single = self.directory / "model.safetensors"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise CheckpointError(f"{index}: weight_map is missing, or does not map tensors to files")
            paths = [self.directory / name for name in sorted(set(weight_map.values()))]
            if any(path.parent != self.directory for path in paths):
                raise CheckpointError(f"{index}: weight_map names files outside {self.directory}")
        elif single.is_file():
            weight_map, paths = None, [single]
        else:
            raise CheckpointError(
                f"{self.directory}: neither model.safetensors nor model.safetensors.index.json is there"
            )
        for path in paths:
            try:
                file = self._stack.enter_context(safetensors.safe_open(path, framework="numpy"))
            except (OSError, safetensors.SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in self._files or (weight_map is not None and weight_map.get(name) != path.name):
                    raise CheckpointError(f"{path}: tensor {name} is not where the index says, or is there twice")
                self._files[name] = file
        absent = sorted(set(weight_map or ()) - self._files.keys())
        if absent:
            raise CheckpointError(f"{index}: {_listed(absent)} named there but in no file")

    @property
    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Of a tensor, as safetensors spells it (`BF16`)."""
        return self._files[name].get_slice(name).get_dtype()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor, or the part of it at `index`; only that part is read."""
        file = self._files[name]
        return file.get_slice(name)[index] if index else file.get_tensor(name)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._stack.close()


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
        raise CheckpointError(f"{where}: missing tensors: {_listed(missing)}")
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
        raise CheckpointError(
            f"{where}: extra tensors, for which this model has no parameter: {_listed(sorted(extra))}"
        )


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


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
