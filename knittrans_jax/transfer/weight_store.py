"""Versions of the weights that a process serves to others, whole or while they are still arriving.

What it guarantees:

* what is handed out is what was published: a range is given only once all of it is here, and a version counts as whole only
  when every process's bytes have the checksum that their publisher gave, and shards cover every tensor exactly once;
* a request for what is on its way waits, up to its deadline; one for what will not come is told so at once;
* at most `keep` versions are held; the oldest goes first, and with it every trace.

A training process's bytes of a version are its shards one after the other, each aligned; they are described by `BytesSpec`.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import xxhash

from knittrans_jax.transfer.bulk import BytesSpec, ShardSpec, VersionKey, as_bytes
from knittrans_jax.transfer.storage_state import StorageMissing
from knittrans_jax.transfer.weights import Box, HostShard, WeightsError, overlap
from knittrans_jax.transfer.wire import Buffer

ALIGNMENT_BYTES = 64
KEEP_VERSIONS = 2
"""Fewest versions held: one that is passed on, and the next one."""
DTYPES = {
    np.dtype(one).name: np.dtype(one)
    for one in (
        np.float64,
        np.float32,
        np.float16,
        ml_dtypes.bfloat16,
        np.int64,
        np.int32,
        np.uint32,
        np.uint8,
        np.bool_,
    )
}
"""Types that weights may have, by name."""
_PADDING = memoryview(bytes(ALIGNMENT_BYTES))


def lay_out(process: int, shards: Sequence[HostShard]) -> tuple[BytesSpec, list[Buffer]]:
    """Describes a process's shards as one run of bytes -> (what lies where, the buffers in order). Nothing is copied."""
    specs: list[ShardSpec] = []
    buffers: list[Buffer] = []
    at = 0
    for shard in shards:
        if shard.data.dtype.name not in DTYPES:
            raise WeightsError(
                f"{shard.name}: weights of type {shard.data.dtype} are not published ({', '.join(DTYPES)})"
            )
        gap = -at % ALIGNMENT_BYTES
        size = tuple(shard.data.shape)
        specs.append(ShardSpec(shard.name, shard.data.dtype.name, at + gap, shard.start, size, shard.shape))
        raw = as_bytes(np.ascontiguousarray(shard.data).reshape(-1).view(np.uint8))
        buffers += [_PADDING[:gap], raw] if gap else [raw]
        at += gap + raw.nbytes
    hasher = xxhash.xxh3_64()
    for buffer in buffers:
        hasher.update(buffer)
    return BytesSpec(process, at, hasher.intdigest(), tuple(specs)), buffers


def check_layout(specs: Sequence[BytesSpec], processes: int, most_bytes: int) -> None:
    """Checks what a peer says about a version, before anything is allocated.

    Raises:
        WeightsError: a process is missing or twice, it is above `most_bytes`, a shard lies outside, or a tensor is not covered
            exactly once.
    """
    if sorted(spec.process for spec in specs) != list(range(processes)):
        raise WeightsError(
            f"shards of processes {sorted(spec.process for spec in specs)}, expected 0 to {processes - 1}"
        )
    total = sum(spec.size_bytes for spec in specs)
    if total > most_bytes:
        raise WeightsError(f"a version of {total} bytes, at most {most_bytes} are taken here: is it of this model?")
    boxes: dict[str, list[Box]] = {}
    of: dict[str, tuple[tuple[int, ...], str]] = {}
    for spec in specs:
        for shard in spec.shards:
            if shard.dtype not in DTYPES:
                raise WeightsError(f"{shard.name} is of type {shard.dtype!r}, expected one of {', '.join(DTYPES)}")
            item = DTYPES[shard.dtype].itemsize
            fits = len(shard.start) == len(shard.size) == len(shard.shape) and all(
                start + size <= whole for start, size, whole in zip(shard.start, shard.size, shard.shape, strict=True)
            )
            if not fits or shard.offset % item or shard.offset + math.prod(shard.size) * item > spec.size_bytes:
                raise WeightsError(f"a shard of {shard.name} lies outside of its tensor or of its process's bytes")
            if of.setdefault(shard.name, (shard.shape, shard.dtype)) != (shard.shape, shard.dtype):
                raise WeightsError(f"shards of {shard.name} disagree on its shape or type")
            box = tuple((start, start + size) for start, size in zip(shard.start, shard.size, strict=True))
            if any(overlap(box, other) for other in boxes.setdefault(shard.name, [])):
                raise WeightsError(f"{shard.name}: a shard overlaps another one")
            boxes[shard.name].append(box)
    for name, found in boxes.items():
        filled = sum(math.prod(end - start for start, end in box) for box in found)
        if filled != math.prod(of[name][0]):
            raise WeightsError(f"{name} has {math.prod(of[name][0])} elements, its shards bring {filled}")


def assemble(specs: Sequence[BytesSpec], buffers: dict[int, np.ndarray]) -> dict[str, np.ndarray]:
    """Whole tensors by name, from checked shards. One that is a single shard is not copied: treat all as read-only.

    Args:
        specs: as `check_layout` takes them.
        buffers: uint8 [size_bytes] by process.
    """
    arrays: dict[str, np.ndarray] = {}
    for spec in specs:
        for shard in spec.shards:
            dtype = DTYPES[shard.dtype]
            count = math.prod(shard.size)
            raw = buffers[spec.process][shard.offset : shard.offset + count * dtype.itemsize]
            data = raw.view(dtype).reshape(shard.size)
            if shard.size == shard.shape:
                arrays[shard.name] = data
                continue
            if shard.name not in arrays:
                arrays[shard.name] = np.empty(shard.shape, dtype)
            at = tuple(slice(start, start + size) for start, size in zip(shard.start, shard.size, strict=True))
            arrays[shard.name][at] = data
    return arrays


@dataclasses.dataclass
class _Held:
    processes: int = 0
    specs: tuple[BytesSpec, ...] = ()
    buffers: dict[int, list[Buffer]] = dataclasses.field(default_factory=dict)
    filled: dict[int, int] = dataclasses.field(default_factory=dict)
    arriving: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)
    whole: bool = False


class WeightStore:
    """See the module's opening. Every method may be called from any thread."""

    def __init__(self, keep: int = KEEP_VERSIONS) -> None:
        """`keep`: versions held at most."""
        if keep < KEEP_VERSIONS:
            raise ValueError(f"WeightStore keep={keep}: at least {KEEP_VERSIONS} versions are in use at once")
        self._keep = keep
        self._held: dict[VersionKey, _Held] = {}
        self._changed = threading.Condition()
        self._closed = False

    @property
    def held_bytes(self) -> int:
        """Bytes of all versions, those that are arriving included."""
        with self._changed:
            return sum(spec.size_bytes for held in self._held.values() for spec in held.specs)

    # --- what comes in ---------------------------------------------------------------------------------------------------

    def add(self, key: VersionKey, processes: int, spec: BytesSpec, buffers: list[Buffer]) -> None:
        """Holds this training process's part of a version, which is complete."""
        held = _Held(processes, (spec,), {spec.process: buffers}, {spec.process: spec.size_bytes}, whole=True)
        with self._changed:
            self._held[key] = held
            self._prune()

    def begin(self, key: VersionKey, processes: int, specs: Sequence[BytesSpec]) -> dict[int, np.ndarray]:
        """A version is about to arrive -> its buffers by process, to be filled from the front.

        When it was begun before, what came then is still in them (`filled`).

        Raises:
            WeightsError: it was begun with other shards, or is older than everything that is held.
        """
        ordered = tuple(sorted(specs, key=lambda spec: spec.process))
        with self._changed:
            held = self._held.get(key)
            if held is None and len(self._held) >= self._keep and key < min(self._held):
                raise WeightsError(f"version {key.version} is older than the {self._keep} versions that are held")
            if held is None:
                arriving = {spec.process: np.empty(spec.size_bytes, np.uint8) for spec in ordered}
                buffers = {process: [array.data.cast("B")] for process, array in arriving.items()}
                held = _Held(processes, ordered, buffers, dict.fromkeys(arriving, 0), arriving)
                self._held[key] = held
                self._prune()
            elif held.specs != ordered:
                raise WeightsError(f"version {key.version}: another source describes other shards than the one before")
            return held.arriving

    def advance(self, key: VersionKey, process: int, filled_bytes: int) -> None:
        """So many bytes of a process are here, and may be passed on."""
        with self._changed:
            if key in self._held:
                self._held[key].filled[process] = filled_bytes
                self._changed.notify_all()

    def filled(self, key: VersionKey, process: int) -> int:
        """How many bytes of a process are here."""
        with self._changed:
            held = self._held.get(key)
            return 0 if held is None else held.filled.get(process, 0)

    def finish(self, key: VersionKey) -> None:
        """Everything came: from now on the version can be read.

        Raises:
            WeightsError: bytes are missing or are not those that were published; nothing of the version is kept.
        """
        with self._changed:
            held = self._held.get(key)
        if held is None:
            raise WeightsError(f"version {key.version} was overtaken by newer ones while it arrived")
        for spec in held.specs:
            short = held.filled[spec.process] < spec.size_bytes
            if short or xxhash.xxh3_64_intdigest(held.arriving[spec.process].data) != spec.checksum:
                self.abandon(key)
                what = "is not all here" if short else "is not what was published: its checksum does not hold"
                raise WeightsError(f"version {key.version}: what process {spec.process} has of it {what}")
        with self._changed:
            for array in held.arriving.values():
                array.flags.writeable = False
            held.whole = True
            self._prune()

    def abandon(self, key: VersionKey) -> None:
        """Forgets a version that does not become whole."""
        with self._changed:
            held = self._held.get(key)
            if held is not None and not held.whole:
                del self._held[key]
                self._changed.notify_all()

    def _prune(self) -> None:
        for key in sorted(self._held)[: -self._keep]:
            del self._held[key]
        self._changed.notify_all()

    # --- what goes out ---------------------------------------------------------------------------------------------------

    def read(self, key: VersionKey) -> dict[str, np.ndarray]:
        """All tensors of a whole version; see `assemble`. Raises `WeightsError`."""
        with self._changed:
            held = self._held.get(key)
        if held is None or not held.whole:
            raise WeightsError(f"version {key.version} is not held whole; held are {self.whole()}")
        return assemble(held.specs, held.arriving)

    def whole(self) -> list[VersionKey]:
        """Versions that can be read, oldest first."""
        with self._changed:
            return sorted(key for key, held in self._held.items() if held.whole)

    def describe(self, key: VersionKey, wait_s: float) -> tuple[int, tuple[BytesSpec, ...]]:
        """(training processes, what lies where), once it is known. Raises `StorageMissing`."""
        held = self._wait(key, lambda held: True, wait_s)
        return held.processes, held.specs

    def range(self, key: VersionKey, process: int, begin: int, end: int, wait_s: float) -> list[Buffer]:
        """A range of a process's bytes, once all of it is here. Raises `StorageMissing`."""
        held = self._wait(key, lambda held: held.filled.get(process, end) >= end, wait_s)
        size = {spec.process: spec.size_bytes for spec in held.specs}.get(process)
        if size is None or not begin <= end <= size:
            raise StorageMissing(
                f"version {key.version}: no bytes {begin} to {end} of process {process} (it has {size})"
            )
        found: list[Buffer] = []
        at = 0
        for buffer in held.buffers[process]:
            first, last = max(begin - at, 0), min(end - at, buffer.nbytes)
            if first < last:
                found.append(buffer[first:last])
            at += buffer.nbytes
            if at >= end:
                break
        return found

    def close(self) -> None:
        """Whoever waits is told that nothing will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait(self, key: VersionKey, enough: Callable[[_Held], bool], wait_s: float) -> _Held:
        def settled() -> bool:
            if self._closed:
                return True
            held = self._held.get(key)
            if held is None:
                return len(self._held) >= self._keep and key < min(self._held)  # it was here, and is gone for good
            return enough(held)

        with self._changed:
            self._changed.wait_for(settled, wait_s)
            held = self._held.get(key)
            if self._closed or held is None or not enough(held):
                raise StorageMissing(f"version {key.version} of incarnation {key.incarnation} is not here (yet)")
            return held
