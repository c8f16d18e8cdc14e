"""Finished groups on their way into the storage unit, in a thread of its own, so that sampling does not wait for sockets.

What it guarantees: a group is reported done only after the unit holds it; at most `QUEUE_GROUPS` wait; every put has a
deadline; the thread's failure surfaces in `take` and `offer`. A group that is not what it says (`transfer/intake.py`) or that
the unit refuses is reported as failed. A unit that was started anew is found at its new address.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from knittrans_jax.launch.messages import GroupDone, GroupFailure
from knittrans_jax.rollout.runs import FinishedGroup
from knittrans_jax.transfer.client import StorageClient
from knittrans_jax.transfer.intake import IntakeError
from knittrans_jax.transfer.storage_state import StorageRefused
from knittrans_jax.transfer.wire import WireError

QUEUE_GROUPS = 256
POLL_S = 0.1
AGAIN_S = 0.25
"""Pause before a put that failed is tried again with a fresh ticket."""


class GroupPutter:
    """`offer`, `take`, `open` and `close` belong to the engine's thread."""

    def __init__(
        self, peer: str, timeout_s: float, retries: int, check: Callable[[FinishedGroup], None] = lambda group: None
    ) -> None:
        """Starts the thread; nothing is put before `open`.

        Args:
            peer: the name that the tickets carry.
            timeout_s: deadline of every attempt, and of waiting for a fresh ticket.
            retries: attempts after the first.
            check: raises `IntakeError` for a group that must not be stored.
        """
        self._peer, self._timeout_s, self._retries = peer, timeout_s, retries
        self._queue: queue.Queue[FinishedGroup] = queue.Queue(maxsize=QUEUE_GROUPS)
        self._lock = threading.Lock()
        self._opened = threading.Condition(self._lock)
        self._done: list[GroupDone] = []
        self._failed: list[GroupFailure] = []
        self._client: StorageClient | None = None
        self._ticket_wanted = True
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._check = check
        self.refused = 0
        """Groups that `check` refused."""
        self.put_bytes = 0
        self.put_s = 0.0
        self._thread = threading.Thread(target=self._run, name="group-putter", daemon=True)
        self._thread.start()

    @property
    def ticket_wanted(self) -> bool:
        """A fresh ticket is needed: hand it over with `open`."""
        with self._lock:
            return self._ticket_wanted

    @property
    def idle(self) -> bool:
        """Everything that was offered is in the unit, or has failed, and was taken."""
        with self._lock:
            return not self._queue.unfinished_tasks and not self._done and not self._failed

    def open(self, address: str, ticket: bytes) -> None:
        """Where the unit is, and a fresh ticket for it."""
        with self._lock:
            if self._client is None or self._client.address != address:
                if self._client is not None:
                    self._client.interrupt()
                self._client = StorageClient(
                    address, ticket, self._peer, self._timeout_s, self._retries, stopped=self._closing.is_set
                )
            else:
                self._client.renew(ticket)
            self._ticket_wanted = False
            self._opened.notify_all()

    def offer(self, group: FinishedGroup) -> bool:
        """Queues a group -> False when the queue is full: sample no further before there is room."""
        self._raise_error()
        try:
            self._queue.put_nowait(group)
        except queue.Full:
            return False
        return True

    def take(self) -> tuple[list[GroupDone], list[GroupFailure]]:
        """What became of groups since the last call. Raises what ended the thread."""
        self._raise_error()
        with self._lock:
            done, self._done = self._done, []
            failed, self._failed = self._failed, []
        return done, failed

    def close(self) -> None:
        """Ends the thread; groups that still wait are dropped with the run."""
        self._closing.set()
        with self._lock:
            if self._client is not None:
                self._client.interrupt()
            self._opened.notify_all()
        self._thread.join(self._timeout_s)
        if self._client is not None:
            self._client.close()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise WireError(f"finished groups cannot be stored: {self._error}") from self._error

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    group = self._queue.get(timeout=POLL_S)
                except queue.Empty:
                    continue
                self._put(group)
                self._queue.task_done()
        except BaseException as error:
            if not self._closing.is_set():
                self._error = error

    def _put(self, group: FinishedGroup) -> None:
        began = time.monotonic()
        try:
            self._check(group)
            self._with_ticket(lambda client: client.put_group(group.payload))
        except IntakeError as error:
            self.refused += 1
            self._fail(group, f"intake: {error}")
            return
        except StorageRefused as error:
            self._fail(group, f"storage: {error}")
            return
        self.put_bytes += group.payload.size_bytes
        self.put_s += time.monotonic() - began
        with self._lock:
            self._done.append(GroupDone(group=group.meta, episode_retries=group.episode_retries))

    def _fail(self, group: FinishedGroup, reason: str) -> None:
        failure = GroupFailure(group_id=group.meta.group_id, reason=reason, episode_retries=group.episode_retries)
        with self._lock:
            self._failed.append(failure)

    def _with_ticket(self, put: Callable[[StorageClient], None]) -> None:
        """Puts; what fails is tried again, until `timeout_s` is over, with a fresh ticket for where the unit is then."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                put(self._ready_client())
                return
            except WireError:
                if time.monotonic() >= deadline_s or self._closing.wait(AGAIN_S):
                    raise
                with self._lock:
                    self._ticket_wanted = True

    def _ready_client(self) -> StorageClient:
        with self._lock:
            there = self._opened.wait_for(
                lambda: self._closing.is_set() or (self._client is not None and not self._ticket_wanted),
                self._timeout_s,
            )
            if self._client is None or not there or self._closing.is_set():
                raise WireError(f"no ticket for the storage unit within {self._timeout_s:g} s")
            return self._client
