"""A Grain iterator over plans: each item is a chunk whose arrays lie on the mesh and whose program may be launched.

For every chunk, in a background thread: ask for the plan (once per plan) -> pull the rows that this process must feed (with
chunk 0 also the encoder rows) -> pack -> global arrays -> tell the scheduler that this process holds them -> wait for its go.

What it guarantees:

* which rows a process pulls follows from the shardings themselves; nothing else is pulled, and what several processes own is
  pulled by one of them (`transfer/matching.py`; the baselines `dispatch` and `gather` pull what they say, see below);
* nothing that can fail on one process alone happens after the go;
* a pull that fails ends nothing: the scheduler says where the rows are to be had now, or that the plan is withdrawn; then no
  process launches a chunk that has no go yet, and all go on with the next plan (whose first chunk begins a new mini-batch);
* the thread runs no collective;
* a failure surfaces in `next()` with its cause; `close()` returns soon, whatever the thread waits for;
* the state is the id of the last plan that was handed out whole: a restored loader begins with the plan after it.

Transfer modes. `on_demand`: for every chunk what its program reads, each image once. The baselines ship every trajectory with
float32 pixel values of its own for every image that it shows. `dispatch`: a process pulls its own rows, for the whole train
batch before its first chunk, each mini-batch as soon as it is planned; an image that only its encoder rows need comes once
more. `gather`: process 0 pulls the whole mini-batch before its first chunk, and every other process gets all of it from there.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import grain
import jax
import numpy as np
from jax.sharding import Sharding

from knittrans_jax.encoding.modes import ConfiguredMode, EncoderWork, Mode, ResidualOptions, plan_encoding
from knittrans_jax.encoding.table_cache import TableCache
from knittrans_jax.launch.messages import ChunkHeld, ChunkMissing, Dropped, Go, NextPlan, PlanReply, Reply, Request
from knittrans_jax.trajectory import MiniBatchPlan
from knittrans_jax.transfer import pack
from knittrans_jax.transfer.batch import CHUNK_ROW_AXIS, ChunkArrays, ImageArrays
from knittrans_jax.transfer.control import ControlError
from knittrans_jax.transfer.matching import Gather, Matching, rows_to_feed
from knittrans_jax.transfer.pull import Payload, PullFailed, UnitClients, shown_images
from knittrans_jax.transfer.relay import RelayServer

TransferMode = Literal["on_demand", "dispatch", "gather"]
"""What `train.transfer` may be."""


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
    give up when `stopped()` becomes true. `encoder_mode` and `transfer` are those of the configuration.
    """

    open_scheduler: Callable[[Callable[[], bool]], Scheduler]
    process: int
    incarnation: int
    peer: str
    """The name that this process's tickets carry."""
    chunk_sharding: Sharding
    image_sharding: Sharding
    replicated_sharding: Sharding
    advantages: pack.Advantages
    spec: pack.PackSpec
    encoder_mode: ConfiguredMode = "per_mini_batch"
    residuals: ResidualOptions = dataclasses.field(default_factory=ResidualOptions)
    cached_rows: int = 0
    """Rows of the frozen encoder's table."""
    processor: str = ""
    """What an image's features depend on besides its content."""
    transfer: TransferMode = "on_demand"
    mini_batches: int = 1
    """`K`: how many plans a train batch has (`dispatch` waits for all of them)."""
    relay: RelayServer | None = None
    """`gather`: process 0's, from which the other processes get everything."""
    relay_unit: str | None = None
    """`gather`: the name of process 0's relay, on the other processes."""
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
    """Global `jax.Array`s; where `gather_arrays` is given, `whole()` makes them what `ChunkArrays` says."""
    mode: Mode | None
    """How the plan's images are encoded; None: it has none."""
    keep_residuals: bool
    """`per_mini_batch`: the encoder's backward reads what its forward kept."""
    images: ImageArrays | None
    """The encoder's input, with the first chunk (`per_mini_batch`; `frozen`: of images that are not cached, if any), or this
    chunk's own images with a leading axis C, with every chunk (`per_micro_batch`, `per_micro_batch_unique`)."""
    insert: jax.Array | None
    """`frozen`: int32 [rows that `images` encode to], their places in the cached table; its size means none."""
    encoder_figures: Mapping[str, float]
    """Of the plan, by name (see `EncoderWork`)."""
    plan_arrived_s: float
    """When the plan was known (`dispatch`: the last one of its train batch)."""
    ready_s: float
    pulled_bytes: int
    """Payload bytes that this process pulled from storage units for this chunk."""
    relayed_bytes: int
    """`gather`: payload bytes that it got from process 0."""
    gather_arrays: Gather | None = None
    gather_images: Gather | None = None
    checkpoint: bool = False
    """A checkpoint is to be taken after this chunk's plan, whether or not it is due."""
    gathered_bytes: int = 0
    """Packed bytes that this process gets from others when the chunk is made whole."""

    def whole(self, prepare: Callable[[Gather], Gather] = lambda gather: gather) -> Chunk:
        """The chunk with every array as its consumer's sharding has it. A collective where processes share rows: the main
        thread calls it, on every process, in plan order. `prepare` wraps a program before it is run.
        """
        arrays, images = self.arrays, self.images
        if self.gather_arrays is not None:
            arrays = prepare(self.gather_arrays)(arrays)
        if self.gather_images is not None and images is not None:
            images = prepare(self.gather_images)(images)
        return dataclasses.replace(self, arrays=arrays, images=images, gather_arrays=None, gather_images=None)

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

    @property
    def complete(self) -> bool:
        """Once `next()` has raised `StopIteration`: whether the run's plans are all done, and it was not broken off."""
        return self._source.complete

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

    @property
    def complete(self) -> bool:
        """Whether any of its iterators came to the end of the run's plans."""
        return any(iterator.complete for iterator in self._iterators)

    def interrupt(self) -> None:
        """Ends the waits of all its iterators, once `stop` is set."""
        for iterator in self._iterators:
            iterator.interrupt()


@dataclasses.dataclass
class _Work:
    """A plan on its way through the loader."""

    plan: MiniBatchPlan
    encoder: EncoderWork
    arrived_s: float
    whole: bool
    """Everything of it was pulled already."""
    payload: Payload
    checkpoint: bool


class _PlanChunksIterator(grain.DatasetIterator[Chunk]):
    def __init__(self, options: LoaderOptions, stop: threading.Event) -> None:
        super().__init__()
        self._options, self._stop = options, stop
        self.complete = False
        self._scheduler: Scheduler | None = None
        self._clients = UnitClients(options.peer, options.pull_timeout_s, options.pull_retries, stop.is_set)
        on_demand = options.transfer == "on_demand"
        self._pixels: pack.Pixels = "uint8" if on_demand else "float32"
        self._rows = Matching(options.chunk_sharding, CHUNK_ROW_AXIS, split=on_demand)
        self._encoder_rows = Matching(options.image_sharding, 0, split=on_demand)
        self._begin_after(options.after_plan)

    def _begin_after(self, plan_id: int) -> None:
        self._after_plan = plan_id
        self._cache: TableCache | None = None
        if self._options.encoder_mode == "frozen":
            self._cache = TableCache(self._options.cached_rows, self._options.processor)
        self._ahead: collections.deque[_Work] = collections.deque()
        self._work: _Work | None = None
        self._next_chunk = 0
        self._dropped_plan = -1
        self._pulled_bytes = self._relayed_bytes = 0

    def __next__(self) -> Chunk:
        try:
            chunk = None
            while chunk is None:
                if self._work is None:
                    self._work = self._next_work()
                if self._work is None:
                    raise StopIteration
                chunk = self._bring(self._work, self._next_chunk)
                if chunk is None:
                    self._drop(self._work.plan)
        except StopIteration:
            raise
        except Exception as error:
            if self._stop.is_set():
                raise LoaderError("the loader was closed while it brought a chunk") from error
            what = f"chunk {self._next_chunk} of plan {self._work.plan.plan_id}" if self._work else "the next plan"
            raise LoaderError(
                f"process {self._options.process}: {what} (after plan {self._after_plan}): {type(error).__name__}: {error}"
            ) from error
        self._next_chunk += 1
        if chunk.last:
            self._after_plan, self._work, self._next_chunk = chunk.plan.plan_id, None, 0
        return chunk

    def get_state(self) -> dict[str, Any]:
        return {"after_plan": self._after_plan}

    def set_state(self, state: dict[str, Any]) -> None:
        self._begin_after(int(state["after_plan"]))

    def interrupt(self) -> None:
        self._clients.interrupt()

    def close(self) -> None:
        super().close()
        self._clients.close()
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    def _ask(self, request: Request) -> Reply:
        if self._scheduler is None:
            self._scheduler = self._options.open_scheduler(self._stop.is_set)
        return self._scheduler.call(request)

    # --- plans ----------------------------------------------------------------------------------------------------------

    def _next_work(self) -> _Work | None:
        if self._ahead:
            return self._ahead.popleft()
        batch: list[_Work] = []
        while not batch or (
            self._options.transfer == "dispatch" and batch[-1].plan.mini_batch < self._options.mini_batches - 1
        ):
            reply = self._next_plan(batch[-1].plan.plan_id if batch else self._after_plan)
            plan = reply.plan
            if plan is None:
                return None  # the run ends, and a train batch that is not whole is not begun
            arrived_s = time.monotonic()
            options = self._options
            encoder = plan_encoding(plan, options.encoder_mode, options.spec, self._cache, options.residuals)
            whole = self._options.transfer != "on_demand"
            work = _Work(plan, encoder, arrived_s, whole, Payload(), reply.checkpoint)
            batch.append(work)
            if work.whole and not self._pulled(plan, 0, functools.partial(self._pull_whole, work)):
                batch.pop()
                self._drop(plan)
        for work in batch:
            work.arrived_s = batch[-1].arrived_s
        self._ahead.extend(batch)
        return self._ahead.popleft()

    def _next_plan(self, after_plan: int) -> PlanReply:
        options, after_plan = self._options, max(after_plan, self._dropped_plan)
        reply = self._ask(NextPlan(process=options.process, incarnation=options.incarnation, after_plan=after_plan))
        if not isinstance(reply, PlanReply):
            raise ControlError(f"expected PlanReply to NextPlan, got {type(reply).__name__}")
        self._clients.renew(reply.units, reply.tickets)
        self.complete = reply.complete
        return reply

    def _drop(self, plan: MiniBatchPlan) -> None:
        """The plan was withdrawn, and those after it; ids of later ones are higher."""
        self._dropped_plan = plan.plan_id
        self._work, self._next_chunk = None, 0
        self._ahead.clear()
        if self._cache is not None:  # what this plan was to put there may not have come there
            self._cache = TableCache(self._options.cached_rows, self._options.processor)
        if self._options.relay is not None:
            self._options.relay.release(tuple(group.group_id for group in plan.groups))

    # --- payloads -------------------------------------------------------------------------------------------------------

    def _pulled(self, plan: MiniBatchPlan, chunk: int, pull: Callable[[], None]) -> bool:
        """Pulls, if need be from where the scheduler says that the rows are now -> False: the plan is withdrawn."""
        options = self._options
        while True:
            try:
                pull()
                return True
            except PullFailed as failure:
                if self._stop.is_set():
                    raise
                missing = ChunkMissing(
                    process=options.process,
                    incarnation=options.incarnation,
                    plan_id=plan.plan_id,
                    chunk=chunk,
                    unit=failure.unit,
                    address=failure.address,
                    reason=str(failure),
                    gone=failure.gone and options.relay_unit is None,  # a relay may have it later
                )
                reply = self._ask(missing)
            if isinstance(reply, Dropped):
                return False
            if not isinstance(reply, PlanReply):
                raise ControlError(f"expected PlanReply or Dropped to ChunkMissing, got {type(reply).__name__}")
            if reply.plan is None:
                raise StopIteration  # the run ends
            self._clients.renew(reply.units, reply.tickets)

    def _pull_whole(self, work: _Work) -> None:
        """`dispatch`: this process's rows of the mini-batch; `gather`: everybody's. Each with its own pixel values."""
        options, plan = self._options, work.plan
        if options.transfer == "gather":
            everything = range(len(plan.placements))
            shown = shown_images(plan, everything)
            work.payload = self._clients.pull(
                plan, everything, shown, options.spec, self._pixels, unit=options.relay_unit
            )
            if options.relay is not None:
                options.relay.offer(plan, work.payload)
        else:
            rows = rows_to_feed(options.chunk_sharding, pack.chunk_shape(plan), CHUNK_ROW_AXIS)
            placements = [p for chunk in range(plan.chunks) for p in pack.chunk_needs(plan, chunk, rows)]
            shown = shown_images(plan, placements)
            others = sorted(set(self._encoder_needs(work)) - set(shown))
            work.payload = self._clients.pull(plan, placements, [*shown, *others], options.spec, self._pixels)
        if options.relay_unit is None:
            self._pulled_bytes += work.payload.bytes
        else:
            self._relayed_bytes += work.payload.bytes

    def _pull_for(self, work: _Work, index: int, cells: Sequence[pack.Cell | None]) -> None:
        """`on_demand`: these cells, and of the images that are read now those that did not come before."""
        plan, held, copies = work.plan, work.payload, work.encoder.copies
        if copies is not None:
            wanted = pack.copies_needs(plan, index, self._copies_cells(work), copies)
        else:
            wanted = self._encoder_needs(work) if index == 0 else []
        missing = [image for image in wanted if plan.images[image].digest not in held.media]
        pulled = self._clients.pull(plan, pack.cell_needs(plan, index, cells), missing, self._options.spec)
        held.trajectories = pulled.trajectories  # the rows of earlier chunks are on the device
        held.media.update(pulled.media)
        self._pulled_bytes += pulled.bytes

    def _encoder_needs(self, work: _Work) -> list[int]:
        """Indices of the plan's images that lie in the encoder rows that this process brings."""
        encode = work.encoder.encode
        if encode is None:
            return []
        mine = {encode.images[image].digest for image in pack.image_needs(encode, self._encoder_cells(encode))}
        return [index for index, image in enumerate(work.plan.images) if image.digest in mine]

    def _encoder_cells(self, encode: MiniBatchPlan) -> list[int | None]:
        cells = self._encoder_rows.cells(1, pack.image_shape(encode, self._options.spec)[0])
        return [None if cell is None else cell[1] for cell in cells]

    def _copies_cells(self, work: _Work) -> list[pack.Cell | None]:
        assert work.encoder.copies is not None
        return self._rows.cells(*pack.copies_shape(work.plan, work.encoder.copies, self._options.spec)[:2])

    # --- chunks ---------------------------------------------------------------------------------------------------------

    def _bring(self, work: _Work, index: int) -> Chunk | None:
        """The chunk, with the scheduler's go; None: its plan is withdrawn."""
        options, spec, plan, encoder = self._options, self._options.spec, work.plan, work.encoder
        shape = pack.chunk_shape(plan)
        cells = self._rows.cells(*shape[:2])
        if not work.whole and not self._pulled(plan, index, lambda: self._pull_for(work, index, cells)):
            return None
        media = work.payload.media

        images: ImageArrays | None = None
        gather_images: Gather | None = None
        insert: jax.Array | None = None
        gathered = 0
        if encoder.copies is not None:
            sizes = pack.copies_shape(plan, encoder.copies, spec)[:2]
            packed = pack.pack_copies(plan, index, self._copies_cells(work), media, spec, encoder.copies, self._pixels)
            made, gather_images, gathered = _to_mesh(packed, self._rows, sizes)
            images = ImageArrays(*made)
        elif index == 0 and encoder.encode is not None:
            sizes = (1, pack.image_shape(encoder.encode, spec)[0])
            packed = pack.pack_images(encoder.encode, self._encoder_cells(encoder.encode), media, spec, self._pixels)
            made, gather_images, gathered = _to_mesh(packed, self._encoder_rows, sizes)
            images = ImageArrays(*made)
            if encoder.insert is not None:
                rows_N = encoder.insert
                insert = jax.make_array_from_callback(rows_N.shape, options.replicated_sharding, lambda at: rows_N[at])
        packed = pack.pack_cells(
            plan,
            index,
            cells,
            work.payload.trajectories,
            options.advantages,
            spec,
            encoder.copies,
            encoder.table_rows,
        )
        made, gather_arrays, gathered_rows = _to_mesh(packed, self._rows, shape[:2])
        arrays = ChunkArrays(*made)

        held = ChunkHeld(process=options.process, incarnation=options.incarnation, plan_id=plan.plan_id, chunk=index)
        reply = self._ask(held)
        if isinstance(reply, Dropped):
            return None
        if isinstance(reply, PlanReply) and reply.plan is None:
            raise StopIteration  # the run ends, and no process launches this chunk
        if not isinstance(reply, Go):
            raise ControlError(f"expected Go to ChunkHeld, got {type(reply).__name__}")
        if options.relay is not None and index == 0:  # every process holds the whole mini-batch
            options.relay.release(tuple(group.group_id for group in plan.groups))
        pulled, relayed = self._pulled_bytes, self._relayed_bytes
        self._pulled_bytes = self._relayed_bytes = 0
        return Chunk(
            plan=plan,
            index=index,
            arrays=arrays,
            mode=encoder.mode,
            keep_residuals=encoder.keep,
            images=images,
            insert=insert,
            encoder_figures=encoder.figures,
            plan_arrived_s=work.arrived_s,
            ready_s=time.monotonic(),
            pulled_bytes=pulled,
            relayed_bytes=relayed,
            gather_arrays=gather_arrays,
            gather_images=gather_images,
            checkpoint=work.checkpoint,
            gathered_bytes=gathered + gathered_rows,
        )


def _to_mesh(
    arrays: Sequence[np.ndarray], matching: Matching, sizes: tuple[int, int]
) -> tuple[list[jax.Array], Gather | None, int]:
    """Global arrays from this process's cells -> (arrays; how they become whole; bytes that this brings from other processes).

    `sizes`: micro-batches and rows, over all processes.
    """
    made = [matching.to_mesh(array, *sizes) for array in arrays]
    if not matching.gathers:
        return made, None, 0
    cell_bytes = sum(array.itemsize * math.prod(array.shape[1:]) for array in arrays)
    brought = sum(cell is not None for cell in matching.cells(*sizes))
    return made, matching.gather(*sizes), (matching.owned(*sizes) - brought) * cell_bytes


__all__ = [
    "Chunk",
    "ChunkLoader",
    "LoaderError",
    "LoaderOptions",
    "PlanChunks",
    "TransferMode",
    "split_wait",
]
