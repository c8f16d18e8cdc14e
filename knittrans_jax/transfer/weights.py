"""Versioned weights: what both ways to publish them share, and the one through a shared directory.

`WeightSink` is what a training process hands its parameters to, `WeightSource` where a rollout host has them from. The other
way is the bulk channel (`transfer/weight_channel.py`). In both every training process gives its own shards, and readers see
whole versions only. What the shared directory guarantees:

* a version is read whole or not at all: files appear by atomic rename, a reader wants those of all processes, and checks that
  their shards cover every tensor exactly once;
* the trainer is held up by the device-to-host copy and, when the version before is still being written, by the rest of that;
  files are written in a background thread, whose failure surfaces at the next `write` or at `close`;
* each shard is written by one process, and replicas share the tensors out by bytes;
* the newest `keep` versions stay; an older one disappears as a whole.

Layout: `v00000012/shard-00000-of-00002.safetensors`, one file per process. A file's tensors are called `name#k`; its metadata
says where each lies: JSON `{"name#k": {"start": [...], "shape": [...]}}`, `shape` being the whole tensor's.
"""

from __future__ import annotations

import abc
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
from typing import Any, Protocol

import msgspec
import numpy as np
import safetensors
import safetensors.numpy

KEEP_VERSIONS = 4
"""Fewest versions kept: one being written, one published, one being loaded, one held by an evaluation."""
FLOATS = ("float32", "bfloat16", "float16", "float64")
"""Types between which weights are converted."""
_FOLDER = re.compile(r"v(\d{8,})")
_FILE = re.compile(r"shard-(\d{5})-of-(\d{5})\.safetensors")


Box = tuple[tuple[int, int], ...]
"""(start, end) along every axis."""


class WeightsError(RuntimeError):
    """A version could not be written, or is not whole."""


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class HostShard:
    """A piece of a tensor on the host: the box of `data`'s size that begins at `start`, of a tensor of shape `shape`."""

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


def restore_tree(template: Any, arrays: dict[str, np.ndarray], *, cast: bool = False) -> Any:
    """The arrays in the shape of `template`, a pytree whose leaves have `shape` and `dtype`.

    `cast`: floats of another precision are converted (weights may be published in bfloat16), else they are an error.

    Raises:
        WeightsError: a tensor is missing, left over, or of another shape or dtype.
    """
    import jax

    wanted = tree_names(template)
    if wanted.keys() != arrays.keys():
        missing, extra = sorted(wanted.keys() - arrays.keys()), sorted(arrays.keys() - wanted.keys())
        raise WeightsError(f"weights do not fit this model: missing {missing[:5]}, left over {extra[:5]}")
    if cast:
        arrays = {name: _cast(array, np.dtype(wanted[name].dtype)) for name, array in arrays.items()}
    for name, leaf in wanted.items():
        if arrays[name].shape != tuple(leaf.shape) or arrays[name].dtype != leaf.dtype:
            raise WeightsError(
                f"weights: {name} is {arrays[name].dtype} {list(arrays[name].shape)}, the model has {leaf.dtype} "
                f"{list(leaf.shape)}"
            )
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[name] for name in wanted])


def place_tree(template: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The arrays on the devices of this process's mesh, each device with its own part, whatever mesh published them.

    Args:
        template: a pytree whose leaves have `shape`, `dtype` and `sharding`.
        arrays: whole tensors by name; floats are converted to the template's.

    Raises:
        WeightsError: as `restore_tree`.
    """
    import jax

    def place(leaf: Any, array: np.ndarray) -> Any:
        return jax.make_array_from_callback(array.shape, leaf.sharding, lambda index: array[index])

    return jax.tree.map(place, template, restore_tree(template, arrays, cast=True))


def _cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    floats = all(one.name in FLOATS for one in (array.dtype, dtype))
    return array.astype(dtype) if floats and array.dtype != dtype else array


class WeightSink(abc.ABC):
    """Takes a training process's shards and publishes them in a background thread, whose failure surfaces at the next call.

    `write` and `close` belong to one thread. The trainer is held up by the device-to-host copy and, when the version before is
    still being published, by the rest of that.
    """

    def __init__(self, where: str, on_written: Callable[[int], None], timeout_s: float) -> None:
        """Starts the background thread.

        Args:
            where: for messages.
            on_written: called in the background thread with a version of which this process's part is published.
            timeout_s: deadline of `write` for the version before, and of `close`.
        """
        self._where, self._on_written, self._timeout_s = where, on_written, timeout_s
        self._queue: queue.Queue[tuple[int, list[HostShard]] | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self.stall_s = 0.0
        """Time that `write` took from its callers, in all."""
        self.copy_s = 0.0
        """The part of it that went into device-to-host copies."""
        self.written_bytes = 0
        self._thread = threading.Thread(target=self._run, name="weight-sink", daemon=True)
        self._thread.start()

    @abc.abstractmethod
    def _publish(self, version: int, shards: list[HostShard]) -> None:
        """Publishes this process's part of a version, in the background thread."""

    def write(self, version: int, params: Any) -> float:
        """Copies this process's shards to the host and queues them for publishing -> seconds that this took.

        Args:
            version: `V`, after whose update the parameters are.
            params: a pytree of `jax.Array`s, which may be donated once this returns.

        Raises:
            WeightsError: an earlier version could not be published, or is not within the deadline.
        """
        began = time.monotonic()
        self._raise_error()
        shards = own_shards(params)
        self.copy_s += time.monotonic() - began
        try:
            self._queue.put((version, shards), timeout=self._timeout_s)
        except queue.Full:
            self._raise_error()
            raise WeightsError(
                f"{self._where}: the version before {version} was not written within {self._timeout_s:g} s"
            ) from None
        took_s = time.monotonic() - began
        self.stall_s += took_s
        return took_s

    def close(self) -> None:
        """Waits until everything is published. Raises `WeightsError` like `write`."""
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
            raise WeightsError(f"{self._where}: not everything was written within {self._timeout_s:g} s")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise WeightsError(f"{self._where}: weights could not be written: {self._error}") from self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._publish(*item)
                self.written_bytes += sum(shard.data.nbytes for shard in item[1])
                self._on_written(item[0])
            except Exception as error:
                self._error = error
                return


class WeightSource(Protocol):
    """Where a rollout host has whole versions from."""

    def announce(self, version: int) -> None:
        """A version is published: it may be brought before it is asked for."""
        ...

    def ready(self, version: int) -> bool:
        """Whether `read` would answer, or fail, at once; else the version is brought meanwhile."""
        ...

    def read(self, version: int) -> dict[str, np.ndarray]:
        """All tensors of a version, whole, by name. Raises `WeightsError`."""
        ...

    def versions(self) -> list[int]:
        """Versions that can be read, oldest first."""
        ...

    def counters(self) -> dict[str, float]:
        """What moved so far."""
        ...


class WeightWriter(WeightSink):
    """Writes this process's shards into the shared directory."""

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
        self._keep = keep
        super().__init__(str(directory), on_written, timeout_s)

    def _publish(self, version: int, shards: list[HostShard]) -> None:
        self._write_file(version, shards)
        if self._process == 0:
            delete_old(self._directory, self._keep)

    def _write_file(self, version: int, shards: list[HostShard]) -> None:
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


class WeightReader(WeightSource):
    """Reads whole versions from the shared directory. Needs no JAX."""

    def __init__(self, directory: Path) -> None:
        """`directory`: the writers'."""
        self._directory = Path(directory)

    def announce(self, version: int) -> None:
        """Nothing is brought in advance."""

    def ready(self, version: int) -> bool:
        """Files are read when they are asked for."""
        return True

    def counters(self) -> dict[str, float]:
        """Nothing moves but through the file system."""
        return {}

    def read(self, version: int) -> dict[str, np.ndarray]:
        """All tensors of a version, whole, by name.

        Raises:
            WeightsError: the version is not there, not whole, or its files do not fit together.
        """
        folder = version_folder(self._directory, version)
        arrays: dict[str, np.ndarray] = {}
        boxes: dict[str, list[Box]] = {}
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


def _read_file(path: Path, arrays: dict[str, np.ndarray], boxes: dict[str, list[Box]]) -> None:
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
            if any(overlap(box, other) for other in boxes[name]):
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


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes share an element."""
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def own_shards(params: Any) -> list[HostShard]:
    """Host copies of the addressable shards that are this process's to give.

    Of a shard's replicas one gives it; which, is the same on every process: tensors go in turn to the replica that has least.
    """
    own: list[tuple[str, tuple[int, ...], Any]] = []
    loads: dict[int, list[int]] = {}
    for name, leaf in tree_names(params).items():
        parts = leaf.sharding.shard_shape(leaf.shape)
        distinct = math.prod(-(-whole // part) for whole, part in zip(leaf.shape, parts, strict=True) if part)
        load = loads.setdefault(distinct, [0] * max(1, len(leaf.sharding.device_set) // distinct))
        replica = load.index(min(load))
        load[replica] += leaf.nbytes
        own += [(name, tuple(leaf.shape), shard) for shard in leaf.addressable_shards if shard.replica_id == replica]
    for _, _, shard in own:
        shard.data.copy_to_host_async()
    return [
        HostShard(
            name,
            tuple(index.indices(size)[0] for index, size in zip(shard.index, shape, strict=True)),
            shape,
            np.array(shard.data, copy=True),  # on CPU the array would be a view of memory that may be donated next
        )
        for name, shape, shard in own
    ]
