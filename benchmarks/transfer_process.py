"""The processes of `bench transfer`: one storage unit, and consumers that pull with the loader's own parts.

A role reads `Setup` from the file that it is given, then one JSON command a line, and answers each with one JSON line.
Links are token buckets on what a process sends: the unit's, and that of consumer 0 where it hands everything on.

    python -m knittrans_jax.benchmarks.transfer_process SETUP unit
    python -m knittrans_jax.benchmarks.transfer_process SETUP INDEX
"""

from __future__ import annotations

import json
import queue
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from knittrans_jax.trajectory import (
    NOT_SAMPLED,
    GroupMeta,
    GroupPayload,
    MediaMeta,
    MiniBatchPlan,
    Trajectory,
    TrajectoryMeta,
    media_digest,
)
from knittrans_jax.transfer import pack, tickets
from knittrans_jax.transfer.bulk import put_frame
from knittrans_jax.transfer.plan import layout_mini_batch
from knittrans_jax.transfer.pull import Payload, UnitClients, shown_images
from knittrans_jax.transfer.rate import RateLimit
from knittrans_jax.transfer.relay import RelayServer
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_state import StorageState

UNIT, RELAY = "host0", "train0"
TIMEOUT_S = 600.0
IMAGE_TOKEN = 2
PREFETCH = 2
"""Chunks that the overlapping side holds ahead, as the loader does."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """One mini-batch and its consumers. `image_side`: pixels of a square picture with 3 channels; 0: text only."""

    key: bytes
    consumers: int
    groups: int
    trajectories: int
    text_tokens: int
    image_side: int
    patch_size: int
    link_bytes_per_s: float


def spec_of(setup: Setup) -> pack.PackSpec:
    """The image geometry."""
    return pack.PackSpec(patch_size=setup.patch_size, merge_size=2, channels=3, image_token_id=IMAGE_TOKEN)


def image_patches(setup: Setup) -> int:
    """Patches of a picture."""
    return (setup.image_side // setup.patch_size) ** 2


def length_tokens(setup: Setup) -> int:
    """Tokens of a trajectory."""
    return setup.text_tokens + image_patches(setup) // 4


def make_payload(setup: Setup, group: int) -> GroupPayload:
    """The same on every process."""
    rng = np.random.default_rng(group)
    length, side = length_tokens(setup), setup.image_side
    image = rng.integers(0, 256, (side, side, 3), np.uint8)
    return GroupPayload(
        group_id=group,
        trajectories=tuple(
            Trajectory(
                tokens_T=rng.integers(3, 50, length, np.int32),
                sampled_T=np.ones(length, np.bool_),
                behaviour_logprobs_T=np.zeros(length, np.float32),
                versions_T=np.full(length, NOT_SAMPLED, np.int32),
            )
            for _ in range(setup.trajectories)
        ),
        media={media_digest(image): image} if side else {},
    )


def make_plan(setup: Setup) -> MiniBatchPlan:
    """The mini-batch, laid out over the consumers: one data shard each."""
    length, side = length_tokens(setup), setup.image_side // setup.patch_size
    metas = []
    for group in range(setup.groups):
        payload = make_payload(setup, group)
        trajectory = TrajectoryMeta(
            length_tokens=length,
            sampled_tokens=length,
            reward=0.0,
            version_min=0,
            version_max=0,
            version_sum=0,
            turns=1,
            questions=1,
            exact=0,
            media=(0,) if payload.media else (),
            started_s=0.0,
            finished_s=1.0,
            version_done=0,
        )
        media = tuple(
            MediaMeta(digest=digest, grid_h=side, grid_w=side, size_bytes=image.nbytes)
            for digest, image in payload.media.items()
        )
        metas.append(
            GroupMeta(
                group_id=group,
                unit=UNIT,
                trajectories=(trajectory,) * setup.trajectories,
                media=media,
                payload_bytes=payload.size_bytes,
            )
        )
    rows_per_shard = -(-setup.groups * setup.trajectories // setup.consumers)
    return layout_mini_batch(
        metas,
        plan_id=0,
        update=0,
        train_step=0,
        mini_batch=0,
        shards=setup.consumers,
        row_tokens=length,
        micro_batch_rows=1,
        chunk_micro_batches=max(1, rows_per_shard // 4),
        encoder_row_patches=max(4, image_patches(setup)),
    )


class Consumer:
    """One training process's part: pulls of a plan in the ways that are compared."""

    def __init__(self, setup: Setup, index: int, unit_address: str) -> None:
        """Consumer 0 also opens the relay."""
        self.setup, self.index, self.plan, self.spec = setup, index, make_plan(setup), spec_of(setup)
        self.peer = f"train{index}"
        self.clients = UnitClients(self.peer, TIMEOUT_S, 0, lambda: False)
        self.relay: RelayServer | None = None
        self.addresses = {UNIT: unit_address}
        if index == 0:
            rate = RateLimit(setup.link_bytes_per_s)
            self.relay = RelayServer(RELAY, "127.0.0.1", wait_s=TIMEOUT_S, request_timeout_s=TIMEOUT_S, rate=rate)
            self.relay.set_key(setup.key)

    def connect(self, relay_address: str) -> None:
        """Takes tickets for everybody that it may pull from."""
        if self.index:
            self.addresses[RELAY] = relay_address
        made = {}
        for unit in self.addresses:
            nonce = secrets.token_bytes(tickets.NONCE_BYTES)
            made[unit] = tickets.issue(self.setup.key, unit, self.peer, time.time() + 36000, nonce)
        self.clients.renew(self.addresses, made)

    def _pull(self, placements: list[int], images: list[int], pixels: pack.Pixels, unit: str | None = None) -> Payload:
        return self.clients.pull(self.plan, placements, images, self.spec, pixels, unit=unit)

    def gather(self, pixels: pack.Pixels, copies: bool) -> int:
        """Process 0 collects everything and hands everybody everything -> bytes that came."""
        everything = list(range(len(self.plan.placements)))
        shown = shown_images(self.plan, everything) if copies else list(range(len(self.plan.images)))
        payload = self._pull(everything, shown, pixels, RELAY if self.index else None)
        if self.relay is not None:
            self.relay.offer(self.plan, payload)
        return payload.bytes

    def _own(self) -> list[list[int]]:
        return [pack.chunk_needs(self.plan, chunk, [self.index]) for chunk in range(self.plan.chunks)]

    def _own_images(self) -> list[int]:
        per_shard = self.plan.encoder_rows_per_shard
        return pack.image_needs(self.plan, range(self.index * per_shard, (self.index + 1) * per_shard))

    def dispatch(self) -> int:
        """Own rows, every trajectory with its own float pixels, and what only its encoder rows need once more."""
        placements = [one for chunk in self._own() for one in chunk]
        shown = shown_images(self.plan, placements)
        others = sorted(set(self._own_images()) - set(shown))
        return self._pull(placements, [*shown, *others], "float32").bytes

    def on_demand(self) -> Iterator[int]:
        """Chunk by chunk what its program reads, each image once, with chunk 0 -> bytes of every chunk."""
        for chunk, placements in enumerate(self._own()):
            yield self._pull(placements, self._own_images() if chunk == 0 else [], "uint8").bytes

    def steps(self, compute_s: float, mini_batches: int, overlap: bool) -> int:
        """Mini-batches of emulated compute (a sleep a chunk), with chunks brought by a thread or in between -> bytes."""
        ready: queue.Queue[int | BaseException] = queue.Queue(maxsize=PREFETCH)

        def bring() -> None:
            try:
                for _ in range(mini_batches):
                    for size in self.on_demand():
                        ready.put(size)
            except BaseException as error:
                ready.put(error)
                raise

        def chunks() -> Iterator[int]:
            if not overlap:
                for _ in range(mini_batches):
                    yield from self.on_demand()
                return
            thread = threading.Thread(target=bring, daemon=True)
            thread.start()
            for _ in range(mini_batches * self.plan.chunks):
                one = ready.get(timeout=TIMEOUT_S)
                if isinstance(one, BaseException):
                    raise one
                yield one
            thread.join()

        total = 0
        for size in chunks():
            total += size
            time.sleep(compute_s / self.plan.chunks)
        return total

    def run(self, command: dict[str, Any]) -> int:
        """One run of a side -> bytes that came to this consumer."""
        match command["side"]:
            case "gather":
                return self.gather("float32", copies=True)
            case "uint8":
                return self.gather("uint8", copies=True)
            case "dedup":
                return self.gather("uint8", copies=False)
            case "dispatch":
                return self.dispatch()
            case "own rows":
                return sum(self.on_demand())
            case "in turn" | "overlap":
                return self.steps(command["compute_s"], command["mini_batches"], command["side"] == "overlap")
            case other:
                raise ValueError(f"no side {other!r}")


def answer(reply: dict[str, Any]) -> None:
    """One line to the benchmark."""
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def run_unit(setup: Setup) -> None:
    """Holds the groups and serves them over one link until its input ends; every line is answered with what it served."""
    state = StorageState(UNIT, 2**34)
    for group in range(setup.groups):
        payload = make_payload(setup, group)
        state.put(payload, put_frame(payload)[0])
    rate = RateLimit(setup.link_bytes_per_s)
    with StorageServer(state, "127.0.0.1", request_timeout_s=TIMEOUT_S, rate=rate) as server:
        server.set_key(setup.key)
        answer({"address": server.address, "unique_bytes": state.held_bytes})
        for _ in sys.stdin:
            answer({"served_bytes": server.figures()[2]["served_bytes"]})


def run_consumer(setup: Setup, index: int) -> None:
    """Answers commands until its input ends."""
    first = json.loads(sys.stdin.readline())
    consumer = Consumer(setup, index, first["unit"])
    answer({"relay": None if consumer.relay is None else consumer.relay.address})
    consumer.connect(json.loads(sys.stdin.readline())["relay"])
    answer({})
    for line in sys.stdin:
        command = json.loads(line)
        if "reset" in command:
            if consumer.relay is not None:
                consumer.relay.release(tuple(group.group_id for group in consumer.plan.groups))
            answer({})
            continue
        time.sleep(max(0.0, command["at_s"] - time.monotonic()))
        came = consumer.run(command)
        answer({"end_s": time.monotonic(), "bytes": came})
    consumer.clients.close()
    if consumer.relay is not None:
        consumer.relay.close()


def main() -> None:
    """See the module's opening."""
    setup = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=Setup)
    if sys.argv[2] == "unit":
        run_unit(setup)
    else:
        run_consumer(setup, int(sys.argv[2]))


if __name__ == "__main__":
    main()
