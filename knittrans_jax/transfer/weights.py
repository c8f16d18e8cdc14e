"""Versioned weights through a shared directory: every training process writes its shards, readers see whole versions only.

What it guarantees:

* a version is read whole or not at all: files appear by atomic rename, a reader wants those of all processes, and checks that
  their shards cover every tensor exactly once;
* the trainer is held up by the device-to-host copy and, when the version before is still being written, by the rest of that;
  files are written in a background thread, whose failure surfaces at the next `write` or at `close`;
* each shard is written by one process: the one that holds its replica 0;
* the newest `keep` versions stay; an older one disappears as a whole.

Layout: `v00000012/shard-00000-of-00002.safetensors`, one file per process. A file's tensors are called `name#k`; its metadata
says where each lies: JSON `{"name#k": {"start": [...], "shape": [...]}}`, `shape` being the whole tensor's.
"""

from __future__ import annotations

import dataclasses
import json
import math
import queue
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
import safetensors.numpy

KEEP_VERSIONS = 4
"""Fewest versions kept: one being written, one published, one being loaded, one held by an evaluation."""
_FOLDER = re.compile(r"v(\d{8,})")
_FILE = re.compile(r"shard-(\d{5})-of-(\d{5})\.safetensors")


_Box = tuple[tuple[int, int], ...]
"""(start, end) along every axis."""


class WeightsError(RuntimeError):
    """A version could not be written, or is not whole."""


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Shard:
    """A piece of a tensor on the host."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: np.ndarray


def version_folder(directory: Path, version: int) -> Path:
    """Where a version lies."""
    return directory / f"v{version:08d}"


def tree_names(tree: Any) -> dict[str, Any]:
    """Leaves of a pytree by dotted path: the names under which they are stored."""
    import jax  # only trees need it; a reader of arrays may live in a process without JAX

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def restore_tree(template: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The arrays in the shape of `template`, a pytree whose leaves have `shape` and `dtype`.

    Raises:
        WeightsError: a tensor is missing, left over, or of another shape or dtype.
    """
    import jax

    wanted = tree_names(template)
    if wanted.keys() != arrays.keys():
        missing, extra = sorted(wanted.keys() - arrays.keys()), sorted(arrays.keys() - wanted.keys())
        raise WeightsError(f"weights do not fit this model: missing {missing[:5]}, left over {extra[:5]}")
    for name, leaf in wanted.items():
        if arrays[name].shape != tuple(leaf.shape) or arrays[name].dtype != leaf.dtype:
            raise WeightsError(
                f"weights: {name} is {arrays[name].dtype} {list(arrays[name].shape)}, the model has {leaf.dtype} "
                f"{list(leaf.shape)}"
            )
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[name] for name in wanted])


class WeightWriter:
    """Writes this process's shards. `write` and `close` belong to one thread."""

    def __init__(
        self,
        directory: Path,
        process: int,
        processes: int,
        on_written: Callable[[int], None],
        *,
        keep: int = KEEP_VERSIONS,
        timeout_s: float = 120.0,
    ) -> None:
        """Starts the background thread.

        Args:
            directory: shared by all training processes and rollout hosts.
            process: this process's number.
            processes: how many training processes write.
            on_written: called in the background thread with a version whose file of this process is in place.
            keep: versions kept; older ones are deleted by process 0.
            timeout_s: deadline of `write` for the write before, and of `close`.
        """
        if keep < KEEP_VERSIONS:
            raise ValueError(f"WeightWriter keep={keep}: at least {KEEP_VERSIONS} versions are in use at once")
        self._directory, self._process, self._processes = Path(directory), process, processes
        self._on_written, self._keep, self._timeout_s = on_written, keep, timeout_s
        self._queue: queue.Queue[tuple[int, list[_Shard]] | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self.stall_s = 0.0
        """Time that `write` took from its callers, in all."""
        self.written_bytes = 0
        self._thread = threading.Thread(target=self._run, name="weight-writer", daemon=True)
        self._thread.start()

    def write(self, version: int, params: Any) -> float:
        """Copies this process's shards to the host and queues them for writing -> seconds that this took.

        Args:
            version: `V`, after whose update the parameters are.
            params: a pytree of `jax.Array`s, which may be donated once this returns.

        Raises:
            WeightsError: an earlier version could not be written, or is not written within the deadline.
        """
        began = time.monotonic()
        self._raise_error()
        shards = _own_shards(params)
        try:
            self._queue.put((version, shards), timeout=self._timeout_s)
        except queue.Full:
            self._raise_error()
            raise WeightsError(
                f"{self._directory}: the version before {version} was not written within {self._timeout_s:g} s"
            ) from None
        took_s = time.monotonic() - began
        self.stall_s += took_s
        return took_s

    def close(self) -> None:
        """Waits until everything is written. Raises `WeightsError` like `write`."""
        end = time.monotonic() + self._timeout_s
        while self._thread.is_alive():
            try:
                self._queue.put(None, timeout=0.1)
                break
            except queue.Full:
                if time.monotonic() >= end:
                    break
        self._thread.join(max(0.0, end - time.monotonic()))
        self._raise_error()
        if self._thread.is_alive():
            raise WeightsError(f"{self._directory}: not everything was written within {self._timeout_s:g} s")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise WeightsError(f"{self._directory}: weights could not be written: {self._error}") from self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._write_file(*item)
                self._on_written(item[0])
                if self._process == 0:
                    delete_old(self._directory, self._keep)
            except Exception as error:
                self._error = error
                return

    def _write_file(self, version: int, shards: list[_Shard]) -> None:
        folder = version_folder(self._directory, version)
        folder.mkdir(parents=True, exist_ok=True)
        numbered = {f"{shard.name}#{number}": shard for number, shard in enumerate(shards)}
        places = {key: {"start": shard.start, "shape": shard.shape} for key, shard in numbered.items()}
        temporary = folder / f".{self._process}-{secrets.token_hex(4)}"
        try:
            safetensors.numpy.save_file(
                {key: shard.data for key, shard in numbered.items()}, temporary, {"places": json.dumps(places)}
            )
            temporary.replace(folder / f"shard-{self._process:05d}-of-{self._processes:05d}.safetensors")
        finally:
            temporary.unlink(missing_ok=True)
        self.written_bytes += sum(shard.data.nbytes for shard in shards)


class WeightReader:
    """Reads whole versions. Needs no JAX."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the writers'."""
        self._directory = Path(directory)

    def read(self, version: int) -> dict[str, np.ndarray]:
        """All tensors of a version, whole, by name.

        Raises:
            WeightsError: the version is not there, not whole, or its files do not fit together.
        """
        folder = version_folder(self._directory, version)
        arrays: dict[str, np.ndarray] = {}
        boxes: dict[str, list[_Box]] = {}
        try:
            for path in _files(folder):
                _read_file(path, arrays, boxes)
        except (OSError, safetensors.SafetensorError, msgspec.MsgspecError) as error:
            raise WeightsError(f"{folder}: version {version} cannot be read: {error}") from error
        for name, array in arrays.items():
            filled = sum(math.prod(end - start for start, end in box) for box in boxes[name])
            if filled != array.size:
                raise WeightsError(f"{folder}: {name} has {array.size} elements, its shards bring {filled}")
        return arrays

    def versions(self) -> list[int]:
        """Versions of which every process's file is there, oldest first."""
        return [version for version in _versions(self._directory) if self._is_whole(version)]

    def _is_whole(self, version: int) -> bool:
        try:
            _files(version_folder(self._directory, version))
        except (OSError, WeightsError):  # being written, or deleted meanwhile
            return False
        return True


def delete_old(directory: Path, keep: int) -> None:
    """Deletes all but the newest `keep` versions; each vanishes in one rename before its files go."""
    for version in _versions(directory)[:-keep]:
        doomed = directory / f".deleted-{version:08d}-{secrets.token_hex(4)}"
        version_folder(directory, version).rename(doomed)
        shutil.rmtree(doomed)


def _versions(directory: Path) -> list[int]:
    names = (_FOLDER.fullmatch(path.name) for path in directory.iterdir()) if directory.is_dir() else ()
    return sorted(int(match[1]) for match in names if match)


def _files(folder: Path) -> list[Path]:
    """The files of a whole version, in process order."""
    found = {path: match for path in folder.iterdir() if (match := _FILE.fullmatch(path.name))}
    counts = {int(match[2]) for match in found.values()}
    if len(counts) > 1:
        raise WeightsError(f"{folder}: files of {sorted(counts)} processes are mixed; delete the folder")
    if not found or len(found) != max(counts):
        raise WeightsError(f"{folder}: {len(found)} of {max(counts, default=0)} files are there: not whole (yet)")
    return sorted(found)


def _read_file(path: Path, arrays: dict[str, np.ndarray], boxes: dict[str, list[_Box]]) -> None:
    with safetensors.safe_open(path, framework="numpy") as file:
        places = msgspec.json.decode((file.metadata() or {}).get("places", "{}"), type=dict[str, _Place])
        for key in file.keys():  # noqa: SIM118 - not a mapping
            if key not in places:
                raise WeightsError(f"{path}: its metadata does not say where {key} lies")
            name, place, data = key.rpartition("#")[0], places[key], file.get_tensor(key)
            if name not in arrays:
                arrays[name] = np.empty(place.shape, data.dtype)
                boxes[name] = []
            whole = arrays[name]
            box = tuple((start, start + size) for start, size in zip(place.start, data.shape, strict=True))
            at = tuple(slice(*side) for side in box)
            if any(_overlap(box, other) for other in boxes[name]):
                raise WeightsError(f"{path}: {key} overlaps another shard of {name}")
            if (
                min(place.start, default=0) < 0
                or whole.shape != place.shape
                or whole.dtype != data.dtype
                or whole[at].shape != data.shape
            ):
                raise WeightsError(f"{path}: {key} does not fit into {name} {whole.dtype} {list(whole.shape)}")
            whole[at] = data
            boxes[name].append(box)


def _overlap(one: _Box, other: _Box) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _own_shards(params: Any) -> list[_Shard]:
    """Host copies of the addressable shards of replica 0."""
    own = [
        (name, tuple(leaf.shape), shard)
        for name, leaf in tree_names(params).items()
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]
    for _, _, shard in own:
        shard.data.copy_to_host_async()
    return [
        _Shard(
            name,
            tuple(index.indices(size)[0] for index, size in zip(shard.index, shape, strict=True)),
            shape,
            np.array(shard.data, copy=True),  # on CPU the array would be a view of memory that may be donated next
        )
        for name, shape, shard in own
    ]
