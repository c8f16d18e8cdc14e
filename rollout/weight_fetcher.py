"""A rollout host's thread that brings new weights while the engine samples, and the server that passes them on.

What it guarantees:

* the newest announced version is brought as soon as it is announced, another one when it is asked for; the engine never waits
  for the network;
* a source that fails is reported, and another one is asked for; what came stays. After `attempts` the version counts as not to
  be had, which `read` says, unless a newer one was announced meanwhile;
* a version is seen whole or not at all.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Self

import numpy as np

from knittrans_jax.launch import messages as msg
from knittrans_jax.transfer.bulk import VersionKey
from knittrans_jax.transfer.control import ControlClient, ControlError
from knittrans_jax.transfer.rate import RateLimit
from knittrans_jax.transfer.storage_state import StorageMissing
from knittrans_jax.transfer.tickets import weight_unit
from knittrans_jax.transfer.tls import ServerTls
from knittrans_jax.transfer.weight_channel import PIECE_BYTES, WeightClient, WeightServer, bring
from knittrans_jax.transfer.weight_store import KEEP_VERSIONS, WeightStore
from knittrans_jax.transfer.weights import WeightsError, WeightSource
from knittrans_jax.transfer.wire import WireError

PAUSE_S = 0.1
"""Pause before the scheduler is asked again."""
LOOK_S = 0.5
"""How often the thread looks whether it is to end."""
REMEMBERED = 16
"""Failures remembered, by version."""


class WeightFetcher(WeightSource):
    """See the module's opening."""

    def __init__(
        self,
        name: str,
        open_scheduler: Callable[[Callable[[], bool]], ControlClient],
        *,
        host: str,
        most_bytes: int,
        timeout_s: float,
        attempts: int,
        keep: int = KEEP_VERSIONS,
        piece_bytes: int = PIECE_BYTES,
        rate: RateLimit | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """Serves, and starts the thread.

        Args:
            name: of the rollout host.
            open_scheduler: opens the thread's own connection; takes what tells it to give up.
            host: interface to serve on.
            most_bytes: a version of this model has no more.
            timeout_s: deadline of a request to a source.
            attempts: sources that are tried for a version.
            keep: versions held.
            piece_bytes: brought by one request.
            rate: given, others are served no faster.
            tls: given, others are served over TLS.
        """
        self._name, self._open_scheduler = name, open_scheduler
        self._most_bytes, self._timeout_s, self._attempts, self._piece_bytes = (
            most_bytes,
            timeout_s,
            attempts,
            piece_bytes,
        )
        self._store = WeightStore(keep)
        self._server = WeightServer(
            weight_unit(name), host, self._store, wait_s=timeout_s / 2, request_timeout_s=timeout_s, tls=tls, rate=rate
        )
        self._wakeup = threading.Condition()
        self._newest = -1
        self._asked: collections.deque[int] = collections.deque(maxlen=REMEMBERED)
        self._failed: dict[int, str] = {}
        self._broken: BaseException | None = None
        self._closing = threading.Event()
        self._clients: list[WeightClient] = []
        self._counters: dict[str, float] = collections.defaultdict(float)
        self._thread = threading.Thread(target=self._run, name="weight-fetcher", daemon=True)
        self._thread.start()

    # --- the engine's side -------------------------------------------------------------------------------------------------

    def announce(self, version: int) -> None:
        """A version is published."""
        with self._wakeup:
            if version > self._newest:
                self._newest = version
                self._wakeup.notify_all()

    def ready(self, version: int) -> bool:
        """Whether `read` would answer or fail at once; else the version is brought now."""
        if version in self.versions():
            return True
        with self._wakeup:
            if self._broken is not None or version in self._failed:
                return True
            if version not in self._asked:
                self._asked.append(version)
                self._wakeup.notify_all()
        return False

    def read(self, version: int) -> dict[str, np.ndarray]:
        """All tensors of a version by name; read-only. Raises `WeightsError`, and again lets the version be brought."""
        with self._wakeup:
            reason = self._failed.pop(version, None)
            if self._broken is not None:
                raise WeightsError(
                    f"{self._name}: weights cannot be brought any more: {self._broken}"
                ) from self._broken
        keys = [key for key in self._store.whole() if key.version == version]
        if not keys:
            raise WeightsError(f"version {version} cannot be read: {reason or 'it was not brought'}")
        return self._store.read(keys[-1])

    def versions(self) -> list[int]:
        """Versions that are here, whole."""
        return [key.version for key in self._store.whole()]

    def counters(self) -> dict[str, float]:
        """What was brought and passed on."""
        served = self._server.figures()[2]
        with self._wakeup:
            return {
                "weights_pulled_bytes": self._counters["pulled_bytes"],
                "weights_pull_s": self._counters["pull_s"],
                "weights_brought": self._counters["brought"],
                "weights_sources_failed": self._counters["sources_failed"],
                "weights_passed_on_bytes": served["served_bytes"],
                "weights_held_bytes": float(self._store.held_bytes),
            }

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends the thread and the server."""
        self._closing.set()
        with self._wakeup:
            self._wakeup.notify_all()
        for client in list(self._clients):
            client.interrupt()
        self._server.close()
        self._thread.join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the thread --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._open_scheduler(self._closing.is_set) as scheduler:
                self._ask(scheduler, -1, None)  # says where this host serves, and learns the key
                while not self._closing.is_set():
                    version = self._next()
                    if version is not None:
                        self._bring(scheduler, version)
        except Exception as error:
            if not self._closing.is_set():
                with self._wakeup:
                    self._broken = error

    def _next(self) -> int | None:
        """The version to bring now: what the engine waits for, else the newest; None: look again."""

        def wanted() -> list[int]:
            here = self.versions()
            news = [self._newest] if self._newest >= 0 and self._newest not in self._failed else []
            return [version for version in [*self._asked, *news] if version not in here]

        with self._wakeup:
            self._wakeup.wait_for(lambda: self._closing.is_set() or bool(wanted()), LOOK_S)
            found = wanted()
            return found[0] if found and not self._closing.is_set() else None

    def _bring(self, scheduler: ControlClient, version: int) -> None:
        failed: str | None = None
        reason, key = "no source", None
        began_s = time.monotonic()
        for _ in range(self._attempts):
            if self._closing.is_set():
                return
            try:
                reply = self._ask(scheduler, version, failed)
            except ControlError as error:
                if self._closing.is_set():
                    return
                reason = str(error)
                self._closing.wait(PAUSE_S)
                continue
            if not reply.units:  # the run ends
                self._closing.wait(PAUSE_S)
                return
            failed, key = reply.source, VersionKey(reply.incarnation, version)
            try:
                came = self._bring_from(reply, key)
            except (WireError, StorageMissing, WeightsError) as error:
                reason = f"{reply.source or 'the training processes'}: {error}"
                with self._wakeup:
                    self._counters["sources_failed"] += 1
                    overtaken = self._newest > version
                if overtaken:
                    break
                continue
            with self._wakeup:
                self._counters["pulled_bytes"] += came
                self._counters["pull_s"] += time.monotonic() - began_s
                self._counters["brought"] += 1
                self._forget(version)
            return
        if key is not None:
            self._store.abandon(key)
        with self._wakeup:
            self._forget(version)
            self._failed[version] = reason
            for old in sorted(self._failed)[:-REMEMBERED]:
                del self._failed[old]

    def _forget(self, version: int) -> None:
        if version in self._asked:
            self._asked.remove(version)

    def _bring_from(self, reply: msg.WeightsFrom, key: VersionKey) -> int:
        with contextlib.ExitStack() as opened:
            self._clients = [
                opened.enter_context(
                    WeightClient(
                        address, reply.tickets[unit], self._name, self._timeout_s, 0, stopped=self._closing.is_set
                    )
                )
                for unit, address in reply.units.items()
            ]
            stopped = self._closing.is_set
            return bring(
                self._store, key, self._clients, self._most_bytes, stopped=stopped, piece_bytes=self._piece_bytes
            )

    def _ask(self, scheduler: ControlClient, version: int, failed: str | None) -> msg.WeightsFrom:
        reply = scheduler.call(
            msg.WeightsWanted(host=self._name, address=self._server.address, version=version, failed=failed)
        )
        if not isinstance(reply, msg.WeightsFrom):
            raise ControlError(f"{self._name}: expected WeightsFrom, got {type(reply).__name__}")
        self._server.set_key(reply.key)
        return reply
