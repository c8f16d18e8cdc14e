"""`knittrans bench weights`: new weights from one training process to several readers, real processes over loopback.

Sides, each from the moment at which the trainer hands the parameters over until the last reader holds them whole:

* `chain`, `tree`: every node serves one other, or two (`weights.fan_out` 1 and 2), while the version is still arriving;
* `no fan-out`: every reader brings it from the training process, over the same channel;
* `directory`: files by atomic rename in a temporary folder, then read; no links, but the page cache of one machine;
* `plain socket`: the physical limit of `no fan-out`: the trainer's bytes to every reader, without checksum or copy to the host.

`link_mb_s` 0 is loopback as it is: all processes share the machine's memory and cores, so fan-out cannot be faster there. Above
0 every process sends no faster than that (token buckets): there the limit is a version's bytes over a link's rate, and
`directory` and `plain socket`, which have no such link, are left out.

`time_over_limit`: by link rate and number of readers, each side's time over the limit. `trainer_copies`: how often the version
left the trainer. `stall_s`: what the trainer waited, and `copy_s` the device-to-host copy in it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from knittrans_jax.admission.fan_out import FanOut
from knittrans_jax.benchmarks.harness import BenchFailed, Figures, Measured, Report, Say, Side, measure
from knittrans_jax.benchmarks.registry import BenchSettings
from knittrans_jax.transfer import tickets
from knittrans_jax.transfer.tickets import weight_unit

DIRECT = 2**30
"""A fan-out without bound."""
WIDTHS = {"chain": 1, "tree": 2, "no fan-out": DIRECT}


class Settings(BenchSettings, frozen=True):
    """`size_mb`: of the parameters, float32, in 10^6 bytes; `link_mb_s`: see the module. `quick`: small, one round."""

    rounds: Annotated[int, msgspec.Meta(ge=1)] = 5
    size_mb: Annotated[int, msgspec.Meta(ge=1)] = 500
    readers: tuple[Annotated[int, msgspec.Meta(ge=1, le=64)], ...] = (1, 2, 4, 8)
    link_mb_s: tuple[Annotated[float, msgspec.Meta(ge=0)], ...] = (0.0, 100.0)
    quick: bool = False


class Role:
    """A process that takes commands and answers them."""

    def __init__(self, key: bytes, bytes_per_s: float, name: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "knittrans_jax.benchmarks.weights_process", key.hex(), str(bytes_per_s), name]
        self.name = name
        self._process = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, **command: Any) -> None:
        """Sends a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Waits for an answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchFailed(f"{self.name} ended with code {self._process.wait()}; its error is on standard error")
        return json.loads(line)

    def close(self) -> None:
        """Ends it."""
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.communicate(timeout=20)
        self._process.kill()
        self._process.wait()


class World:
    """A training process and readers, over links of one rate."""

    def __init__(self, settings: Settings, bytes_per_s: float, directory: Path) -> None:
        self._key, self._directory, self._version = tickets.new_key(), directory, -1
        self.size_bytes = settings.size_mb * 10**6 // 100 * 100
        self._train = Role(self._key, bytes_per_s, "train", str(self.size_bytes), str(directory))
        self._readers = [Role(self._key, bytes_per_s, f"host{i}") for i in range(max(settings.readers))]
        where = self._train.hear()
        self._plain = where["plain"]
        self._addresses = {"train": where["address"], **{one.name: one.hear()["address"] for one in self._readers}}

    def close(self) -> None:
        """Ends all of it."""
        for role in (*self._readers, self._train):
            role.close()

    def side(self, readers: int, name: str) -> Side:
        """A side by its name."""
        return lambda _: self.run(readers, name)

    def run(self, readers: int, name: str) -> Figures:
        """One version to the first `readers` readers."""
        self._version += 1
        if name == "plain socket":
            return self._run_plain(readers)
        self._train.tell(version=self._version, way="directory" if name == "directory" else "bulk")
        given = self._train.hear()
        tree = FanOut(WIDTHS.get(name, 1))
        for reader in self._readers[:readers]:
            if name == "directory":
                reader.tell(version=self._version, directory=str(self._directory))
                continue
            source = tree.assign(self._version, reader.name) or "train"
            ticket = tickets.issue(self._key, weight_unit(source), reader.name, time.time() + 7200, tickets.new_nonce())
            reader.tell(version=self._version, sources=[[self._addresses[source], ticket.hex()]])
        done = self._done(readers)
        self._train.tell()
        sent = self._train.hear()["sent_bytes"]
        return {
            "time_to_all_s": done - given["began_s"],
            "stall_s": given["stall_s"],
            "copy_s": given["copy_s"],
            "trainer_copies": sent / self.size_bytes,
        }

    def _run_plain(self, readers: int) -> Figures:
        began_s = time.monotonic()
        for reader in self._readers[:readers]:
            reader.tell(version=self._version, plain=[self._plain, self.size_bytes])
        took_s = self._done(readers) - began_s
        return {"time_to_all_s": took_s, "stall_s": 0.0, "copy_s": 0.0, "trainer_copies": float(readers)}

    def _done(self, readers: int) -> float:
        answers = [reader.hear() for reader in self._readers[:readers]]
        if any(one["size_bytes"] < self.size_bytes for one in answers):
            raise BenchFailed(f"version {self._version}: readers got {[one['size_bytes'] for one in answers]} bytes")
        return max(one["done_s"] for one in answers)


@contextlib.contextmanager
def opened(settings: Settings, bytes_per_s: float) -> Iterator[World]:
    """The processes, and a folder."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(settings, bytes_per_s, Path(directory))
        try:
            yield world
        finally:
            world.close()


def bench(settings: Settings, say: Say) -> Report:
    """See the module's opening."""
    if settings.quick:
        settings = msgspec.structs.replace(settings, rounds=1, size_mb=4, readers=(1, 3), link_mb_s=(0.0, 40.0))
    tables: list[Measured] = []
    over_limit: dict[str, dict[str, dict[str, float]]] = {}
    copies: dict[str, dict[str, float]] = {}
    stall: dict[str, float] = {}
    for mb_s in settings.link_mb_s:
        linked = mb_s > 0
        names = ["chain", "tree", "no fan-out", *(() if linked else ("directory", "plain socket"))]
        found = over_limit.setdefault(f"{mb_s:g}", {})
        with opened(settings, mb_s * 1e6) as world:
            for readers in settings.readers:
                table = measure(
                    f"{readers} readers, {f'links of {mb_s:g} MB/s' if linked else 'loopback'}",
                    {name: world.side(readers, name) for name in names},
                    rounds=settings.rounds,
                    warm_up=not linked,
                    say=say,
                )
                tables.append(table)
                limit_s = world.size_bytes / (mb_s * 1e6) if linked else table.median("plain socket", "time_to_all_s")
                found[str(readers)] = {name: table.median(name, "time_to_all_s") / limit_s for name in names}
                copies[str(readers)] = {name: table.median(name, "trainer_copies") for name in names[:3]}
                if not linked:
                    stall[str(readers)] = table.median("tree", "stall_s")
    headline = {"time_over_limit": over_limit, "trainer_copies": copies, "stall_s": stall}
    notes = [
        "The limit is a version's bytes over a link's rate; without links, a plain socket from the trainer to every reader.",
        "Without links all bytes share this machine's cores and memory: fan-out saves the trainer's bytes there, not time.",
    ]
    return Report(tables=tables, headline=headline, notes=notes)
