"""Tools that episodes wait on, beside the engine's thread: calls go in, turns or errors come out when they are there.

What it guarantees:

* nothing here blocks the engine: `start` and `take` return at once;
* every call ends, by its result, its error, or `timeout_s` after `start` (waiting for a thread included), and is reported once;
* an emulated call occupies no thread: it is a time on the clock, nothing more;
* coroutine functions share one thread and are cancelled at their deadline; plain functions run in at most `THREADS` threads.
  One that never returns keeps its thread (nothing can end it); when all hang, further calls reach their deadline in the queue.
  A result that comes after the deadline is dropped and counted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import heapq
import inspect
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from knittrans_jax.rollout.tasks.base import EmulatedToolCall, ToolCall, Turn

THREADS = 64
"""Plain functions that run at once."""
CLOSE_S = 2.0


class ToolTimeout(TimeoutError):  # noqa: N818 - says what it is
    """A tool did not answer in time."""


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """How a call ended: `turn` (None: the episode is over) or `error`; `waited_s` since its start."""

    number: int
    turn: Turn | None
    error: Exception | None
    waited_s: float


@dataclasses.dataclass
class _Open:
    call: ToolCall | EmulatedToolCall
    began_s: float
    deadline_s: float
    future: concurrent.futures.Future[Turn | None] | None = None


_Result = tuple[int, Turn | None, Exception | None]
"""Number of a call, and what it gave."""


class ToolRunner:
    """See the module's opening. One thread uses it."""

    def __init__(self, timeout_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        """`timeout_s`: of every call; `monotonic`: the clock of latencies and deadlines."""
        self.late_results = 0
        self._timeout_s, self._monotonic = timeout_s, monotonic
        self._open: dict[int, _Open] = {}
        self._next = 0
        self._times: list[tuple[float, int]] = []
        """Heap: when a call must be looked at, for its emulated latency or its deadline."""
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._pool = _Pool(self._results)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Calls that have not ended."""
        return len(self._open)

    def start(self, call: ToolCall | EmulatedToolCall) -> int:
        """Starts a call -> its number."""
        number, now_s = self._next, self._monotonic()
        self._next += 1
        one = _Open(call, now_s, now_s + self._timeout_s)
        self._open[number] = one
        if isinstance(call, EmulatedToolCall):
            heapq.heappush(self._times, (min(now_s + call.latency_s, one.deadline_s), number))
            return number
        heapq.heappush(self._times, (one.deadline_s, number))
        if inspect.iscoroutinefunction(call.run):
            one.future = asyncio.run_coroutine_threadsafe(call.run(), self._running_loop())
            one.future.add_done_callback(lambda future: self._results.put((number, *_outcome(future))))
        else:
            self._pool.submit(number, call.run, wanted=lambda: number in self._open)
        return number

    def cancel(self, number: int) -> None:
        """Forgets a call that has not ended: its result is dropped."""
        one = self._open.pop(number)
        if one.future is not None:
            one.future.cancel()

    def take(self) -> list[ToolResult]:
        """The calls that ended since the last `take`."""
        ended: list[ToolResult] = []
        now_s = self._monotonic()
        while not self._results.empty():
            number, turn, error = self._results.get()
            if number in self._open:
                ended.append(self._end(number, turn, error, now_s))
            else:
                self.late_results += 1
        while self._times and self._times[0][0] <= now_s:
            at_s, number = heapq.heappop(self._times)
            one = self._open.get(number)
            if one is None:
                continue
            if isinstance(one.call, EmulatedToolCall) and at_s < one.deadline_s:
                ended.append(self._end(number, one.call.turn, None, now_s))
                continue
            late = ToolTimeout(
                f"tool {one.call.name!r} did not answer within rollout.tool_timeout_s = {self._timeout_s:g} s"
            )
            if one.future is not None:
                one.future.cancel()
            ended.append(self._end(number, None, late, now_s))
        return ended

    def close(self) -> None:
        """Cancels what runs and ends the threads; those that hang are left to the end of the process."""
        for number in list(self._open):
            self.cancel(number)
        self._pool.close()
        if self._loop is not None and self._loop_thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join(CLOSE_S)
            if not self._loop_thread.is_alive():
                self._loop.close()
            self._loop = self._loop_thread = None

    def _end(self, number: int, turn: Turn | None, error: Exception | None, now_s: float) -> ToolResult:
        return ToolResult(number, turn, error, now_s - self._open.pop(number).began_s)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop_thread = threading.Thread(target=_run_loop, args=(self._loop,), name="tools-async", daemon=True)
            self._loop_thread.start()
        return self._loop


class _Pool:
    """Daemon threads, started as they are needed: one that hangs cannot hold up the end of the process."""

    def __init__(self, results: queue.SimpleQueue[_Result]) -> None:
        self._results = results
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._unfinished = 0

    def submit(self, number: int, run: Callable[[], Any], wanted: Callable[[], bool]) -> None:
        """Calls `run` in a thread, unless nobody wants it any more by then."""

        def job() -> None:
            if not wanted():
                return
            try:
                self._results.put((number, run(), None))
            except Exception as error:
                self._results.put((number, None, error))

        self._jobs.put(job)
        with self._lock:
            self._unfinished += 1
            if self._unfinished > self._threads and self._threads < THREADS:
                threading.Thread(target=self._work, name=f"tools-{self._threads}", daemon=True).start()
                self._threads += 1

    def close(self) -> None:
        """Threads end when their function returns."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._lock:
                self._unfinished -= 1


def _outcome(future: concurrent.futures.Future[Turn | None]) -> tuple[Turn | None, Exception | None]:
    if future.cancelled():
        return None, ToolTimeout("cancelled")
    error = future.exception()
    if isinstance(error, Exception):
        return None, error
    return (None, RuntimeError(f"{error!r}")) if error is not None else (future.result(), None)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
