"""`knittrans bench wire`: the bulk channel beside a plain socket that copies the same bytes, and beside TransferQueue's get.

One stream over loopback between two processes, checksums on; every side receives into fresh memory and asks for the same
socket buffers. The plain side sends with one `sendall` and receives with `recv_into` the whole buffer: nothing else happens to
its bytes.
A run of a side repeats its pull so often that small sizes are timed too, and gives the time of one.

`socket_ratio` is the throughput over the plain socket's at `headline_mib`; `tls_ratio` that of the channel over TLS to it.
`transferqueue_ratio`: TransferQueue's time over ours, by size, rows of 4.5 MiB as in a group of pictures; needs `peer_python`.
"""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from knittrans_jax.benchmarks.harness import BenchFailed, Figures, Report, Say, Side, measure
from knittrans_jax.benchmarks.peer import HOW_TO_INSTALL, Peer, is_installed
from knittrans_jax.benchmarks.registry import BenchSettings
from knittrans_jax.benchmarks.wire_serve import PLAIN_REQUEST
from knittrans_jax.launch import messages as msg
from knittrans_jax.transfer import tickets, wire
from knittrans_jax.transfer.client import PullRequest, StorageClient
from knittrans_jax.transfer.control import ControlClient

ROW_BYTES = 4_718_592
"""A row of the larger payloads: 4.5 MiB, about a picture of 1024 x 1176 float32 values."""
TIMEOUT_S = 120.0


class Settings(BenchSettings, frozen=True):
    """`sizes_mib`: pulled in one request; `repeat_mib`: a run repeats its pull until it moved so much."""

    rounds: Annotated[int, msgspec.Meta(ge=1)] = 9
    sizes_mib: tuple[int, ...] = (1, 9, 64, 288)
    headline_mib: int = 64
    repeat_mib: Annotated[int, msgspec.Meta(ge=1)] = 64
    round_trips: Annotated[int, msgspec.Meta(ge=1)] = 200
    peer_python: str = ""


def layout(size_mib: int) -> tuple[int, int]:
    """(rows, bytes of a row) of a payload of about so many MiB."""
    size = size_mib * 2**20
    return (1, size) if size < ROW_BYTES else (size // ROW_BYTES, ROW_BYTES)


class Served:
    """The serving process, and this process's connections to it."""

    def __init__(self, sizes_mib: tuple[int, ...]) -> None:
        payloads = [(size, *layout(size)) for size in sizes_mib]
        command = [sys.executable, "-m", "knittrans_jax.benchmarks.wire_serve", json.dumps({"payloads": payloads})]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchFailed(f"the serving process ended with code {self._process.wait()}")
        self.where: dict[str, Any] = json.loads(line)
        key = bytes.fromhex(self.where["key"])

        def client(name: str) -> StorageClient:
            ticket = tickets.issue(key, "bench", name, time.time() + 7200, secrets.token_bytes(tickets.NONCE_BYTES))
            return StorageClient(self.where[name], ticket, name, TIMEOUT_S, 0)

        self.bulk = client("bulk")
        self.tls = client("tls")
        self.plain = wire.connect(self.where["plain"], TIMEOUT_S)
        self.control = ControlClient(Path(self.where["control"]), "bench", TIMEOUT_S)

    def request(self, size_mib: int) -> PullRequest:
        """A payload's images."""
        return PullRequest(media=tuple((size_mib, digest) for digest in self.where["digests"][str(size_mib)]))

    def pull_plain(self, size_bytes: int) -> None:
        """The plain socket's pull."""
        self.plain.sendall(PLAIN_REQUEST.pack(size_bytes))
        buffer = memoryview(np.empty(size_bytes, np.uint8).data).cast("B")
        at = 0
        while at < size_bytes:
            got = self.plain.recv_into(buffer[at:], 0, socket.MSG_WAITALL)
            if not got:
                raise BenchFailed("the plain socket closed")
            at += got

    def close(self) -> None:
        """Ends it all."""
        self.bulk.close()
        self.tls.close()
        self.plain.close()
        self.control.close()
        self._process.communicate(timeout=30)


def repeated(run: Callable[[], object], times: int) -> Side:
    """A side that runs so often and gives the time of one."""

    def side(_: int) -> Figures:
        began = time.perf_counter()
        for _ in range(times):
            run()
        return {"wall_s": (time.perf_counter() - began) / times}

    return side


def bench(settings: Settings, say: Say) -> Report:
    """See the module's opening."""
    if settings.headline_mib not in settings.sizes_mib:
        raise BenchFailed(f"headline_mib={settings.headline_mib} is none of sizes_mib={list(settings.sizes_mib)}")
    peer = None
    if is_installed(settings.peer_python):
        say("TransferQueue: looking for its best number of units")
        peer = Peer(settings.peer_python, {str(size): layout(size) for size in settings.sizes_mib})
    served = Served(settings.sizes_mib)
    tables = []
    try:
        for size in settings.sizes_mib:
            request, size_bytes = served.request(size), layout(size)[0] * layout(size)[1]
            times = max(1, settings.repeat_mib // size)
            sides: dict[str, Side] = {
                "plain socket": repeated(lambda n=size_bytes: served.pull_plain(n), times),
                "bulk channel": repeated(lambda r=request: served.bulk.pull(r), times),
                "bulk channel, TLS": repeated(lambda r=request: served.tls.pull(r), times),
            }
            if peer is not None:
                sides["TransferQueue"] = lambda _, name=str(size): {"wall_s": peer.get_s(name)}
            tables.append(measure(f"{size} MiB", sides, rounds=settings.rounds, say=say))
        one_row = PullRequest(rows=((settings.sizes_mib[0], 0),))
        report = msg.Report(role="bench", counters={"one": 1.0})
        small = {
            "bulk channel": repeated(lambda: served.bulk.pull(one_row), settings.round_trips),
            "control channel": repeated(lambda: served.control.call(report), settings.round_trips),
        }
        tables.append(measure("small message", small, rounds=settings.rounds, say=say))
    finally:
        served.close()
        if peer is not None:
            peer.close()

    def ratios(side: str, base: str = "plain socket") -> dict[str, float]:
        found = {}
        for size, table in zip(settings.sizes_mib, tables, strict=False):
            one = table.ratio(base, "wall_s", to=side)
            if one is not None:
                found[str(size)] = one.value
        return found

    socket_ratios, tls_ratios = ratios("bulk channel"), ratios("bulk channel, TLS")
    headline: dict[str, Any] = {
        "socket_ratio": socket_ratios[str(settings.headline_mib)],
        "socket_ratio_by_mib": socket_ratios,
        "tls_ratio": tls_ratios[str(settings.headline_mib)],
        "tls_ratio_by_mib": tls_ratios,
        "round_trip_s": {side: tables[-1].median(side, "wall_s") for side in small},
    }
    if peer is None:
        headline["transferqueue_ratio"] = None
        headline["transferqueue"] = {"installed": False, "how_to_install": HOW_TO_INSTALL}
    else:
        headline["transferqueue_ratio"] = ratios("bulk channel", base="TransferQueue")
        headline["transferqueue"] = {"installed": True, **peer.chosen}
    notes = ["Ratios are of throughput: above 1 is faster than the plain socket, or than TransferQueue."]
    return Report(tables=tables, headline=headline, notes=notes)
