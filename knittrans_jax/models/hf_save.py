"""Parameters to a Hugging Face checkpoint that other programs serve: safetensors with an index, config and tokenizer files.

What it guarantees: the folder appears whole (one rename) or not at all; one tensor is on the host at a time; on several
processes every one takes part in gathering and process 0 writes. Names and layouts are those that `hf_load` reads, from the
same table.
"""

from __future__ import annotations

import json
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from knittrans_jax.models.config import ModelConfig
from knittrans_jax.models.hf_config import CheckpointError, config_to_json, read_json
from knittrans_jax.models.hf_files import Checkpoint
from knittrans_jax.models.hf_names import FRAMES, Source, sources
from knittrans_jax.models.model import Params

FILE_BYTES = 5 * 2**30
"""Most tensor bytes of one file."""
SIDE_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
)
"""Copied from the checkpoint that training began with."""
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def save_params(
    directory: Path,
    config: ModelConfig,
    params: Params,
    *,
    source: Path | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    token_ids: dict[str, int] | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a checkpoint. With parameters over several processes every process calls this, on its main thread.

    Args:
      directory: must not exist.
      config: the model.
      params: arrays, sharded or not.
      source: the checkpoint that training began with. Its config and tokenizer files are copied, and the difference between
        the two frames' patch weights, which stills neither see nor train, is kept; without it both get half each.
      dtype: of the written tensors: float32, bfloat16 or float16.
      token_ids: for the config when there is no `source` (`hf_config.QWEN_TOKEN_IDS` by default).
      file_bytes: most tensor bytes of one file.

    Raises:
      CheckpointError: the folder exists, it cannot be written, or `source` is another model.
    """
    directory = Path(directory)
    if np.dtype(dtype).name not in _DTYPES:
        raise CheckpointError(f"dtype {np.dtype(dtype).name}: expected one of {', '.join(_DTYPES)}")
    # Every process works out the same plan from the same arguments; only process 0 touches the folder.
    raw = config_to_json(config, token_ids) if source is None else read_json(Path(source) / "config.json")
    table = sources(config, params)
    plan = _files(table, np.dtype(dtype).itemsize, file_bytes)
    values = _values(config, params, table, source)
    if jax.process_index() != 0:
        _drain(values)
        return
    if directory.exists():
        _drain(values)
        raise CheckpointError(f"{directory}: is there already; delete it, or choose another folder")
    temporary = directory.with_name(f".{directory.name}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        _write(temporary, plan, values, np.dtype(dtype))
        _write_json(
            temporary / "config.json", raw | {"dtype": np.dtype(dtype).name, "torch_dtype": np.dtype(dtype).name}
        )
        for path in [] if source is None else [Path(source) / name for name in SIDE_FILES]:
            if path.is_file():
                shutil.copyfile(path, temporary / path.name)
        temporary.rename(directory)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written: {error}") from error
    finally:
        _drain(values)  # the other processes gather on: stopping here would leave them in a collective
        shutil.rmtree(temporary, ignore_errors=True)


_Tensor = tuple[str, tuple[int, ...]]


def _files(table: dict[str, Source], item_bytes: int, file_bytes: int) -> list[list[_Tensor]]:
    """Tensors in order of writing, cut into files of at most `file_bytes` (a larger tensor has its own)."""
    files: list[list[_Tensor]] = [[]]
    filled = 0
    for source in table.values():
        for name in source.tensors:
            size = int(np.prod(source.tensor_shape, dtype=np.int64)) * item_bytes
            if files[-1] and filled + size > file_bytes:
                files.append([])
                filled = 0
            files[-1].append((name, source.tensor_shape))
            filled += size
    return files


def _values(config: ModelConfig, params: Params, table: dict[str, Source], origin: Path | None) -> Iterator[np.ndarray]:
    """Every tensor's value on the host, in the table's order. Gathers: all processes iterate to the end."""
    leaves = dict(zip(table, jax.tree.leaves(params), strict=True))
    for name, source in table.items():
        leaf = leaves[name]
        for layer in range(len(source.tensors)):
            value = source.to_tensor(_on_host(leaf, layer if source.stacked else None), config.vision)
            if source.layout == "patches" and origin is not None:
                value = value + _frame_difference(origin, source)
            yield value


def _frame_difference(origin: Path, source: Source) -> np.ndarray:
    """What the checkpoint's frames add to and take from their mean, float32."""
    (name,) = source.tensors
    with Checkpoint(origin) as checkpoint:
        if name not in checkpoint.names or checkpoint.shape(name) != source.tensor_shape:
            raise CheckpointError(f"{origin}: its {name} is not {list(source.tensor_shape)}: it is another model")
        frames = checkpoint.read(name).astype(np.float32)
    return frames - frames.sum(axis=2, keepdims=True) / FRAMES


def _on_host(leaf: Any, layer: int | None) -> np.ndarray:
    """The whole array, or one layer of it."""
    if not isinstance(leaf, jax.Array):
        return np.asarray(leaf if layer is None else leaf[layer])
    if not leaf.is_fully_addressable:
        assert isinstance(leaf.sharding, NamedSharding), leaf.sharding
        return np.asarray(
            _gather(NamedSharding(leaf.sharding.mesh, PartitionSpec()))(leaf, _index(layer)).addressable_data(0)
        )
    return np.asarray(leaf) if layer is None else np.asarray(_gather(None)(leaf, _index(layer)))


def _index(layer: int | None) -> np.int32 | None:
    """An array, so that one program serves every layer."""
    return None if layer is None else np.int32(layer)


def _take(leaf: jax.Array, layer: jax.Array | None) -> jax.Array:
    return leaf if layer is None else jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)


_PROGRAMS: dict[Any, Callable[..., jax.Array]] = {}


def _gather(sharding: NamedSharding | None) -> Callable[..., jax.Array]:
    if sharding not in _PROGRAMS:
        _PROGRAMS[sharding] = jax.jit(_take) if sharding is None else jax.jit(_take, out_shardings=sharding)
    return _PROGRAMS[sharding]


def _write(folder: Path, plan: list[list[_Tensor]], values: Iterator[np.ndarray], dtype: np.dtype) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(plan, start=1):
        name = "model.safetensors" if len(plan) == 1 else f"model-{number:05d}-of-{len(plan):05d}.safetensors"
        with (folder / name).open("wb") as file:
            total += _write_header(file, tensors, dtype)
            for tensor, shape in tensors:
                value = np.ascontiguousarray(next(values).astype(dtype))
                assert value.shape == shape, (tensor, value.shape, shape)
                file.write(value.reshape(-1).view(np.uint8).data)
                weight_map[tensor] = name
    if len(plan) > 1:
        _write_json(
            folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )


def _write_header(file: BinaryIO, tensors: list[_Tensor], dtype: np.dtype) -> int:
    """The safetensors header, so that tensors can follow one by one: length, JSON with every tensor's bytes -> total bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in tensors:
        end = begin + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype.name], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of 8
    file.write(struct.pack("<Q", len(encoded)) + encoded)
    return begin


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _drain(values: Iterator[np.ndarray]) -> None:
    """Takes part in what is left to gather."""
    if jax.process_count() > 1:
        for _ in values:
            pass
