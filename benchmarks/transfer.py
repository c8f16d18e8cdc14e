"""`knittrans bench transfer`: how long consumers wait for a mini-batch's data, from the worst case step by step to ours.

One rollout host's storage unit and 1 to 8 consumers, real processes over TCP on this machine. What a process sends goes through
a token bucket, so links are the bottleneck and not the machine: the unit's link, and consumer 0's where it hands everything on.
One unit is the least favourable to reading own rows: its link carries every unique byte, however many consumers share them.

The mini-batch: `groups` groups of `n` trajectories that all show their group's picture. Sides:

* `gather`: consumer 0 collects all trajectories, each with float32 pixels of its own, then sends everything to everybody;
* `dispatch`: every consumer its own rows, each trajectory with float32 pixels of its own;
* `uint8`, `dedup`, `own rows`: from `gather` towards ours, one step at a time: pixels as stored; each picture once; each
  consumer pulls its rows chunk by chunk from the unit, each picture once. `own rows` is what the loader does;
* `in turn` and `overlap`: `own rows` with emulated compute (a sleep a chunk, in all 1.5 times the predicted pull), chunks
  brought in between or by a thread two chunks ahead.

The wait is from a common moment until the last consumer holds its rows. Predictions follow from the bytes that each link must
carry; overlap's from max(pull, compute) a mini-batch. Where a measured factor falls below the predicted one, the rest is this
machine: few cores that hash, copy and switch between all processes.

At the slow links the pictures are smaller by about as much, so that a run takes as long; the long text is measured at the fast
ones.

TransferQueue's sockets pass through no token bucket, so it is compared over bare loopback, both sides uncapped (`peer_python`
set): its readers get their own shard of the rows, each trajectory with its picture as 1024 x 1176 float32 values as its users
put it; ours get their own rows. With n = 1 it holds each picture once, which is deduplication by hand.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from knittrans_jax.benchmarks.harness import BenchFailed, Figures, Measured, Report, Say, Side, measure
from knittrans_jax.benchmarks.peer import HOW_TO_INSTALL, Peer, is_installed
from knittrans_jax.benchmarks.registry import BenchSettings
from knittrans_jax.benchmarks.transfer_process import Setup, image_patches, length_tokens
from knittrans_jax.trajectory import TRAJECTORY_BYTES_PER_TOKEN

STEPS = ("gather", "uint8", "dedup", "own rows")
COMPUTE_OVER_PULL = 1.5
PEER_ROW_BYTES = 1024 * 1176 * 4
"""A picture as float32 patches: 448 x 448 pixels of 3 channels, twice for the temporal patch."""
PEER_IMAGE_SIDE = 448
UNCAPPED_BYTES_PER_S = 1e12
LEAD_S = 0.2
"""A run begins so much after it is announced, for every process to have heard of it."""


class Settings(BenchSettings, frozen=True):
    """`quick`: two corners, one round. Pictures are square, of 3 channels; a patch is 14 x 14 pixels."""

    quick: bool = False
    rounds: Annotated[int, msgspec.Meta(ge=1)] = 2
    groups: int = 8
    trajectories: tuple[int, ...] = (1, 4, 8, 16)
    consumers: tuple[int, ...] = (1, 2, 4, 8)
    image_side: int = 448
    text_tokens: int = 64
    link_mb_per_s: float = 100.0
    slow_link_mb_per_s: float = 10.0
    slow_image_side: int = 140
    long_rows: int = 1024
    long_tokens: int = 18_000
    overlapped_mini_batches: int = 4
    peer_python: str = ""
    peer_rounds: Annotated[int, msgspec.Meta(ge=1)] = 5


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What has to move for one mini-batch, and how fast a link is."""

    unique: int
    uint8: int
    float32: int
    link_bytes_per_s: float

    def wait_s(self, side: str, consumers: int) -> float:
        """Predicted: the busiest links, one after the other where one must wait for the other."""
        all_to_all = {"gather": self.float32, "uint8": self.uint8, "dedup": self.unique}
        if side in all_to_all:  # collected over the unit's link, then sent to the others over consumer 0's
            return all_to_all[side] * consumers / self.link_bytes_per_s
        return (self.float32 if side == "dispatch" else self.unique) / self.link_bytes_per_s


def bytes_of(setup: Setup) -> Bytes:
    """From the sizes alone."""
    members = setup.groups * setup.trajectories
    rows = members * length_tokens(setup) * TRAJECTORY_BYTES_PER_TOKEN
    picture = 3 * setup.image_side**2
    return Bytes(
        unique=rows + setup.groups * picture,
        uint8=rows + members * picture,
        float32=rows + members * picture * 4,
        link_bytes_per_s=setup.link_bytes_per_s,
    )


class World:
    """The processes of one setup."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup = setup
        path = folder / f"{secrets.token_hex(8)}.msgpack"
        path.write_bytes(msgspec.msgpack.encode(setup))
        self._unit = self._start(path, "unit")
        self._consumers = [self._start(path, str(index)) for index in range(setup.consumers)]
        try:
            self.unit = self._reply(self._unit)
            for one in self._consumers:
                self._say(one, {"unit": self.unit["address"]})
            first, *_ = [self._reply(one) for one in self._consumers]
            self._all({"relay": first["relay"]})
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _start(path: Path, role: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "knittrans_jax.benchmarks.transfer_process", str(path), role]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @staticmethod
    def _say(process: subprocess.Popen[str], command: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()

    @staticmethod
    def _reply(process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise BenchFailed(f"a process of bench transfer ended with code {process.wait()}")
        return json.loads(line)

    def _all(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        for one in self._consumers:
            self._say(one, command)
        return [self._reply(one) for one in self._consumers]

    def _served_bytes(self) -> int:
        self._say(self._unit, {})
        return self._reply(self._unit)["served_bytes"]

    def run(self, side: str, **more: float) -> Figures:
        """One mini-batch -> wait, bytes out of the unit, bytes into all consumers."""
        self._all({"reset": True})
        before, at_s = self._served_bytes(), time.monotonic() + LEAD_S
        replies = self._all({"side": side, "at_s": at_s, **more})
        return {
            "wait_s": max(reply["end_s"] for reply in replies) - at_s,
            "unit_bytes": self._served_bytes() - before,
            "received_bytes": sum(reply["bytes"] for reply in replies),
        }

    def close(self) -> None:
        """Ends all processes."""
        for one in (*self._consumers, self._unit):
            try:
                one.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                one.kill()
                one.communicate()


@contextmanager
def world_of(setup: Setup, folder: Path) -> Iterator[World]:
    """The processes, ended in any case."""
    world = World(setup, folder)
    try:
        yield world
    finally:
        world.close()


def combinations(settings: Settings) -> list[tuple[int, int]]:
    """(n, consumers): all n at most consumers, and all consumers at the largest n."""
    most_n, most_c = max(settings.trajectories), max(settings.consumers)
    if settings.quick:
        return [(most_n, most_c)]
    return sorted({(n, most_c) for n in settings.trajectories} | {(most_n, c) for c in settings.consumers})


def steps_of(table: Measured, moved: Bytes, consumers: int) -> list[dict[str, Any]]:
    """Each step's factor over the one before it, measured beside predicted."""
    steps = []
    for before, after in itertools.pairwise(STEPS):
        measured = table.median(before, "wait_s") / table.median(after, "wait_s")
        predicted = moved.wait_s(before, consumers) / moved.wait_s(after, consumers)
        steps.append({"name": after, "measured": measured, "predicted": predicted, "share": measured / predicted})
    return steps


def overlap_step(
    world: World, moved: Bytes, settings: Settings, name: str, say: Say
) -> tuple[Measured, dict[str, Any]]:
    """Overlap: the factor of a mini-batch's time without over with it, and what is still waited for."""
    pull_s, count = moved.wait_s("own rows", world.setup.consumers), settings.overlapped_mini_batches
    compute_s = COMPUTE_OVER_PULL * pull_s
    rounds = 1 if settings.quick else settings.rounds

    def side(which: str) -> Side:
        def run(_: int) -> Figures:
            found = world.run(which, compute_s=compute_s, mini_batches=count)
            return {"mini_batch_s": found["wait_s"] / count}

        return run

    sides = {"in turn": side("in turn"), "overlap": side("overlap")}
    table = measure(f"{name}, compute on", sides, rounds=rounds, warm_up=False, say=say)
    in_turn, overlapped = table.median("in turn", "mini_batch_s"), table.median("overlap", "mini_batch_s")
    # The first chunk of the first mini-batch cannot hide behind anything.
    ideal_s = max(pull_s, compute_s) + pull_s / count
    predicted = (pull_s + compute_s) / ideal_s
    measured = in_turn / overlapped
    step = {"name": "overlap", "measured": measured, "predicted": predicted, "share": measured / predicted}
    return table, step


def beside_transferqueue(
    settings: Settings, setup: Callable[[int, int, int, float], Setup], folder: Path, say: Say
) -> tuple[list[Measured], dict[str, Any]]:
    """Own shard by both, over bare loopback; `setup` as in `bench`."""
    if not is_installed(settings.peer_python):
        return [], {"installed": False, "how_to_install": HOW_TO_INSTALL}
    pairs = combinations(settings)
    rows = {str(n): (settings.groups * n, PEER_ROW_BYTES) for n in sorted({1, *(n for n, _ in pairs)})}
    say("TransferQueue: looking for its best number of units")
    tables, found = [], []
    with Peer(settings.peer_python, rows, max(consumers for _, consumers in pairs)) as peer:
        for n, consumers in pairs:
            with world_of(setup(n, consumers, PEER_IMAGE_SIDE, UNCAPPED_BYTES_PER_S), folder) as world:

                def ours(_: int, world: World = world) -> Figures:
                    return {"wait_s": world.run("own rows")["wait_s"]}

                def theirs(_: int, name: str = str(n), readers: int = consumers) -> Figures:
                    return {"wait_s": peer.get_s(name, readers)}

                def by_hand(_: int, readers: int = consumers) -> Figures:
                    return {"wait_s": peer.get_s("1", readers)}

                sides: dict[str, Side] = {"own rows": ours, "TransferQueue": theirs}
                if n > 1:
                    sides["TransferQueue, n = 1"] = by_hand
                name = f"uncapped, n {n}, {consumers} consumers"
                table = measure(name, sides, rounds=settings.peer_rounds, base="own rows", say=say)
            tables.append(table)
            medians = {side: table.median(side, "wait_s") for side in sides}
            hand_s = medians.get("TransferQueue, n = 1", medians["TransferQueue"])
            found.append(
                {
                    "trajectories": n,
                    "consumers": consumers,
                    "wait_s": medians,
                    "ratio": medians["TransferQueue"] / medians["own rows"],
                    "ratio_dedup_by_hand": hand_s / medians["own rows"],
                }
            )
        return tables, {"installed": True, **peer.chosen, "own_shard": found}


def bench(settings: Settings, say: Say) -> Report:
    """See the module's opening."""
    key, fast, slow = secrets.token_bytes(32), settings.link_mb_per_s * 1e6, settings.slow_link_mb_per_s * 1e6
    rounds = 1 if settings.quick else settings.rounds
    most_n, most_c = max(settings.trajectories), max(settings.consumers)

    def setup(n: int, consumers: int, side: int, link: float) -> Setup:
        return Setup(
            key=key,
            consumers=consumers,
            groups=settings.groups,
            trajectories=n,
            text_tokens=settings.text_tokens,
            image_side=side,
            patch_size=14,
            link_bytes_per_s=link,
        )

    tables: list[Measured] = []
    curve: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    over_unique: list[float] = []
    slow_result: dict[str, Any] = {}
    headline_table: Measured | None = None

    def compare(world: World, name: str, names: tuple[str, ...]) -> Measured:
        sides: dict[str, Side] = {side: (lambda _, side=side: world.run(side)) for side in names}
        # Every process has pulled once before anything counts: connections are open, memory is mapped.
        world.run("own rows")
        table = measure(name, sides, rounds=rounds, base="own rows", warm_up=False, say=say)
        tables.append(table)
        return table

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for n, consumers in combinations(settings):
            one = setup(n, consumers, settings.image_side, fast)
            corner = (n, consumers) == (most_n, most_c)
            names = ("own rows", "gather", "dispatch", *(("uint8", "dedup") if corner else ()))
            with world_of(one, folder) as world:
                table, moved = compare(world, f"n {n}, {consumers} consumers", names), bytes_of(one)
                unique = world.unit["unique_bytes"]
                over_unique.append(table.median("own rows", "unit_bytes") / unique)
                curve.append(
                    {
                        "trajectories": n,
                        "consumers": consumers,
                        "patches_a_picture": image_patches(one),
                        "unique_bytes": unique,
                        "wait_s": {side: table.median(side, "wait_s") for side in names},
                        "predicted_s": {side: moved.wait_s(side, consumers) for side in names},
                        "received_bytes": {side: table.median(side, "received_bytes") for side in names},
                    }
                )
                if corner:
                    headline_table = table
                    steps = steps_of(table, moved, consumers)
                    overlapped, step = overlap_step(world, moved, settings, table.name, say)
                    tables.append(overlapped)
                    steps.append(step)
        one = setup(most_n, most_c, settings.slow_image_side, slow)
        with world_of(one, folder) as world:
            table = compare(world, f"slow links, n {most_n}, {most_c} consumers", ("dispatch", *STEPS))
            slow_result = {
                "mb_per_s": settings.slow_link_mb_per_s,
                "wait_ratio_gather": table.median("gather", "wait_s") / table.median("own rows", "wait_s"),
                "wait_ratio_dispatch": table.median("dispatch", "wait_s") / table.median("own rows", "wait_s"),
                "steps": steps_of(table, bytes_of(one), most_c),
            }
        peer_tables, peer_result = beside_transferqueue(settings, setup, folder, say)
        tables += peer_tables
        long = msgspec.structs.replace(
            setup(settings.long_rows // settings.groups, most_c, 0, fast), text_tokens=settings.long_tokens
        )
        long_text: dict[str, Any] = {}
        if not settings.quick:
            with world_of(long, folder) as world:
                names = ("own rows", "dispatch", "gather")
                table, moved = compare(world, "long text", names), bytes_of(long)
                long_text = {
                    "rows": settings.long_rows,
                    "tokens": settings.long_tokens,
                    "wait_s": {side: table.median(side, "wait_s") for side in names},
                    "predicted_s": {side: moved.wait_s(side, most_c) for side in names},
                }
    assert headline_table is not None, "combinations() has the largest of both"
    own = headline_table.median("own rows", "wait_s")
    headline = {
        "wait_ratio_gather": headline_table.median("gather", "wait_s") / own,
        "wait_ratio_dispatch": headline_table.median("dispatch", "wait_s") / own,
        "steps": steps,
        "bytes_over_unique": max(over_unique),
        "link_mb_per_s": settings.link_mb_per_s,
        "slow_links": slow_result,
        "long_text": long_text,
        "curve": curve,
        "transferqueue": peer_result,
    }
    notes = [
        f"Measured with {most_n} trajectories a group and {most_c} consumers unless it says otherwise.",
        "`wait_s` lists medians; `share` is the measured factor over the predicted one.",
    ]
    return Report(tables=tables, headline=headline, notes=notes)
