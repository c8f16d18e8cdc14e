"""A Grain iterator over plans: each item is a chunk whose arrays lie on the mesh and whose program may be launched.

For every chunk, in a background thread: ask for the plan (once per plan) -> pull the rows that this process must feed (with
chunk 0 also the encoder rows) -> pack -> global arrays -> tell the scheduler that this process holds them -> wait for its go.

What it guarantees:

* which rows a process pulls follows from the shardings themselves; nothing else is pulled;
* nothing that can fail on one process alone happens after the go;
* the thread runs no collective;
* a failure surfaces in `next()` with its cause; `close()` returns soon, whatever the thread waits for;
* the state is the id of the last plan that was handed out whole: a restored loader begins with the plan after it.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grain
import jax
import numpy as np
from jax.sharding import Sharding

from knittrans_jax.launch.messages import ChunkHeld, Go, NextPlan, PlanReply, Reply, Request
from knittrans_jax.trajectory import MiniBatchPlan, Trajectory
from knittrans_jax.transfer import pack
from knittrans_jax.transfer.batch import CHUNK_ROW_AXIS, ChunkArrays, ImageArrays
from knittrans_jax.transfer.client import PullRequest, StorageClient
from knittrans_jax.transfer.control import ControlError, ControlStopped


class LoaderError(RuntimeError):
    """A chunk could not be brought; the cause says why."""


class Scheduler(Protocol):
    """What the loader needs of a `ControlClient`."""

    def call(self, request: Request) -> Reply:
        """Asks, and waits; raises `ControlError`."""
        ...

    def close(self) -> None:
        """Closes."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """What does not change over a run.

    `open_scheduler(stopped)` makes the loader's own control client; it is called in the loader's thread, and the client must
    give up when `stopped()` becomes true. `encoder_mode` is that of the configuration.
    """

    open_scheduler: Callable[[Callable[[], bool]], Scheduler]
    process: int
    incarnation: int
    peer: str
    """The name that this process's tickets carry."""
    chunk_sharding: Sharding
    image_sharding: Sharding
    advantages: pack.Advantages
    spec: pack.PackSpec
    encoder_mode: str = "per_mini_batch"
    prefetch_chunks: int = 2
    pull_timeout_s: float = 30.0
    pull_retries: int = 3
    after_plan: int = -1


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk, ready to be launched. Times are `time.monotonic()` of this process."""

    plan: MiniBatchPlan
    index: int
    arrays: ChunkArrays
    """Global `jax.Array`s."""
    images: ImageArrays | None
    """`per_mini_batch`: the encoder's input, with the first chunk of a plan that has images. `per_micro_batch`: this
    chunk's own copies, with a leading axis C, with every chunk of such a plan."""
    plan_arrived_s: float
    ready_s: float
    pulled_bytes: int
    """Payload bytes that this process pulled for this chunk."""

    @property
    def first(self) -> bool:
        """The first chunk of its mini-batch."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """The last chunk of its mini-batch: the update follows."""
        return self.index == self.plan.chunks - 1


def split_wait(start_s: float, end_s: float, plan_arrived_s: float) -> tuple[float, float]:
    """Splits a wait for a chunk -> (waited for groups: until the plan was known; waited for data: after that)."""
    known_s = min(max(plan_arrived_s, start_s), end_s)
    return known_s - start_s, end_s - known_s


def rows_to_feed(sharding: Sharding, global_shape: Sequence[int], axis: int) -> list[int]:
    """The global rows on `axis` that this process's devices own, sorted."""
    rows: set[int] = set()
    for index in sharding.addressable_devices_indices_map(tuple(global_shape)).values():
        if index is not None:
            rows.update(range(*index[axis].indices(global_shape[axis])))
    return sorted(rows)


class ChunkLoader:
    """Iterates over chunks, prefetching in a background thread. Use from one thread; `close()` it."""

    def __init__(self, options: LoaderOptions) -> None:
        """Nothing is asked for before `start()` or the first `next()`."""
        self._stop = threading.Event()
        self._source = PlanChunks(options, self._stop)
        dataset = grain.experimental.ThreadPrefetchIterDataset(
            self._source, prefetch_buffer_size=options.prefetch_chunks
        )
        self._iterator: Any = dataset.__iter__()

    def start(self) -> None:
        """Starts prefetching before the first `next()`, say while programs compile."""
        self._iterator.start_prefetch()

    def __iter__(self) -> ChunkLoader:
        return self

    def __next__(self) -> Chunk:
        """The next chunk in plan order.

        Raises:
            StopIteration: there will be no further plan.
            LoaderError: it could not be brought.
        """
        if self._stop.is_set():
            raise LoaderError("the loader is closed")
        return next(self._iterator)

    def get_state(self) -> dict[str, int]:
        """The cursor: `{"after_plan": id of the last plan whose every chunk was returned}`."""
        return self._iterator.get_state()

    def set_state(self, state: dict[str, int]) -> None:
        """Goes on after the cursor's plan."""
        self._iterator.set_state(state)

    def interrupt(self) -> None:
        """Breaks off whatever its thread waits for: `next()` soon raises `LoaderError`. Safe in a signal handler."""
        self._stop.set()
        self._source.interrupt()

    def close(self) -> None:
        """Stops the thread and closes its connections; what it waits for is broken off."""
        self.interrupt()
        self._iterator.close()


class PlanChunks(grain.IterDataset[Chunk]):
    """The chunks of the scheduler's plans, in order, without prefetch."""

    def __init__(self, options: LoaderOptions, stop: threading.Event) -> None:
        """`stop` breaks off every wait."""
        super().__init__()
        self._options, self._stop = options, stop
        self._iterators: list[_PlanChunksIterator] = []

    def __iter__(self) -> grain.DatasetIterator[Chunk]:
        iterator = _PlanChunksIterator(self._options, self._stop)
        self._iterators.append(iterator)
        return iterator

    def interrupt(self) -> None:
        """Ends the waits of all its iterators, once `stop` is set."""
        for iterator in self._iterators:
            iterator.interrupt()


class _PlanChunksIterator(grain.DatasetIterator[Chunk]):
    def __init__(self, options: LoaderOptions, stop: threading.Event) -> None:
        super().__init__()
        self._options, self._stop = options, stop
        self._scheduler: Scheduler | None = None
        self._clients: dict[str, StorageClient] = {}
        self._after_plan = options.after_plan
        self._plan: MiniBatchPlan | None = None
        self._plan_arrived_s = 0.0
        self._next_chunk = 0
        self._copies: pack.CopiesLayout | None = None

    def __next__(self) -> Chunk:
        try:
            if self._plan is None:
                self._next_plan()
            if self._plan is None:
                raise StopIteration
            chunk = self._bring(self._plan, self._next_chunk)
        except StopIteration:
            raise
        except Exception as error:
            if self._stop.is_set():
                raise LoaderError("the loader was closed while it brought a chunk") from error
            what = f"chunk {self._next_chunk} of plan {self._plan.plan_id}" if self._plan else "the next plan"
            raise LoaderError(
                f"process {self._options.process}: {what} (after plan {self._after_plan}): {type(error).__name__}: {error}"
            ) from error
        self._next_chunk += 1
        if chunk.last:
            self._after_plan, self._plan, self._next_chunk = chunk.plan.plan_id, None, 0
        return chunk

    def get_state(self) -> dict[str, Any]:
        return {"after_plan": self._after_plan}

    def set_state(self, state: dict[str, Any]) -> None:
        self._after_plan, self._plan, self._next_chunk = int(state["after_plan"]), None, 0

    def interrupt(self) -> None:
        for client in list(self._clients.values()):
            client.interrupt()

    def close(self) -> None:
        super().close()
        for client in self._clients.values():
            client.close()
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    def _ask(self, request: Request) -> Reply:
        if self._scheduler is None:
            self._scheduler = self._options.open_scheduler(self._stop.is_set)
        return self._scheduler.call(request)

    def _next_plan(self) -> None:
        options = self._options
        request = NextPlan(process=options.process, incarnation=options.incarnation, after_plan=self._after_plan)
        reply = self._ask(request)
        if not isinstance(reply, PlanReply):
            raise ControlError(f"expected PlanReply to NextPlan, got {type(reply).__name__}")
        self._plan_arrived_s = time.monotonic()
        self._plan = reply.plan
        if reply.plan is None:
            return
        self._copies = None
        if options.encoder_mode == "per_micro_batch" and reply.plan.images:
            self._copies = pack.copies_layout(reply.plan)
        for unit, ticket in reply.tickets.items():
            client = self._clients.get(unit)
            if client is not None and client.address == reply.units.get(unit):
                client.renew(ticket)
            elif unit in reply.units:
                if client is not None:
                    client.close()
                self._clients[unit] = StorageClient(
                    reply.units[unit],
                    ticket,
                    options.peer,
                    options.pull_timeout_s,
                    options.pull_retries,
                    stopped=self._stop.is_set,
                )

    def _bring(self, plan: MiniBatchPlan, index: int) -> Chunk:
        options, spec = self._options, self._options.spec
        shape = pack.chunk_shape(plan)
        rows = rows_to_feed(options.chunk_sharding, shape, CHUNK_ROW_AXIS)
        placements = pack.chunk_needs(plan, index, rows)
        if self._copies is not None:
            wanted = sorted({image for p in placements for image in plan.placements[p].images})
        elif index == 0 and plan.images:
            encoder_rows = rows_to_feed(options.image_sharding, pack.image_shape(plan, spec), 0)
            wanted = pack.image_needs(plan, encoder_rows)
        else:
            wanted = []
        trajectories, media, pulled_bytes = self._pull(plan, placements, wanted)

        images: ImageArrays | None = None
        if self._copies is not None:
            copies_shape = pack.copies_shape(plan, self._copies, spec)
            encoder_rows = rows_to_feed(options.chunk_sharding, copies_shape, CHUNK_ROW_AXIS)
            packed = pack.pack_copies(plan, index, rows, encoder_rows, media, spec, self._copies)
            images = ImageArrays(*_to_mesh(packed, options.chunk_sharding, CHUNK_ROW_AXIS, copies_shape[1]))
        elif index == 0 and plan.images:
            encoder_rows = rows_to_feed(options.image_sharding, pack.image_shape(plan, spec), 0)
            packed = pack.pack_images(plan, encoder_rows, media, spec)
            images = ImageArrays(*_to_mesh(packed, options.image_sharding, 0, pack.image_shape(plan, spec)[0]))
        packed = pack.pack_chunk(plan, index, rows, trajectories, options.advantages, spec, self._copies)
        arrays = ChunkArrays(*_to_mesh(packed, options.chunk_sharding, CHUNK_ROW_AXIS, shape[1]))

        held = ChunkHeld(process=options.process, incarnation=options.incarnation, plan_id=plan.plan_id, chunk=index)
        reply = self._ask(held)
        if isinstance(reply, PlanReply) and reply.plan is None:
            raise StopIteration  # the run ends, and no process launches this chunk
        if not isinstance(reply, Go):
            raise ControlError(f"expected Go to ChunkHeld, got {type(reply).__name__}")
        return Chunk(plan, index, arrays, images, self._plan_arrived_s, time.monotonic(), pulled_bytes)

    def _pull(
        self, plan: MiniBatchPlan, placements: Sequence[int], images: Sequence[int]
    ) -> tuple[dict[int, Trajectory], dict[str, np.ndarray], int]:
        """Pulls rows and images, one request per unit -> (trajectories by placement, images by digest, payload bytes)."""
        rows_of: dict[str, list[int]] = {}
        for index in placements:
            rows_of.setdefault(plan.groups[plan.placements[index].group].unit, []).append(index)
        images_of: dict[str, list[int]] = {}
        for index in images:
            images_of.setdefault(plan.groups[plan.images[index].group].unit, []).append(index)
        trajectories: dict[int, Trajectory] = {}
        media: dict[str, np.ndarray] = {}
        pulled_bytes = 0
        for unit in sorted(rows_of.keys() | images_of.keys()):
            if self._stop.is_set():
                raise ControlStopped("stopped between two pulls")
            if unit not in self._clients:
                raise LoaderError(f"plan {plan.plan_id} came without address and ticket for unit {unit}")
            numbers = rows_of.get(unit, [])
            places = [plan.placements[index] for index in numbers]
            pulled = self._clients[unit].pull(
                PullRequest(
                    rows=tuple((plan.groups[place.group].group_id, place.trajectory) for place in places),
                    media=tuple(
                        (plan.groups[plan.images[i].group].group_id, plan.images[i].digest)
                        for i in images_of.get(unit, [])
                    ),
                )
            )
            trajectories.update(
                (index, Trajectory(**fields)) for index, fields in zip(numbers, pulled.rows, strict=True)
            )
            media.update(pulled.media)
            pulled_bytes += pulled.payload_bytes
        return trajectories, media, pulled_bytes


def _to_mesh(arrays: Sequence[np.ndarray], sharding: Sharding, axis: int, rows: int) -> list[jax.Array]:
    """Global arrays from this process's rows; `rows` is the global size of `axis`."""
    made = []
    for array in arrays:
        shape = (*array.shape[:axis], rows, *array.shape[axis + 1 :])
        made.append(jax.make_array_from_process_local_data(sharding, array, shape))
    return made


__all__ = ["Chunk", "ChunkLoader", "LoaderError", "LoaderOptions", "PlanChunks", "rows_to_feed", "split_wait"]
