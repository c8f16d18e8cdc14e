"""The baselines' transport: float pixels in as many copies as asked for, requests in pieces, and process 0's relay."""

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from knittrans_jax.config import ConfigError, parse_config
from knittrans_jax.trajectory import GroupPayload, MiniBatchPlan
from knittrans_jax.transfer import pull, tickets
from knittrans_jax.transfer.bulk import put_frame
from knittrans_jax.transfer.client import PullRequest, StorageClient
from knittrans_jax.transfer.pack import PackSpec
from knittrans_jax.transfer.pull import Payload, PullError, PullFailed, UnitClients, pieces, shown_images
from knittrans_jax.transfer.relay import RelayServer
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_state import StorageRefused, StorageState

from .payloads import random_group, random_image
from .test_loader import World

KEY = tickets.new_key()
SPEC = PackSpec(patch_size=2, merge_size=2, channels=1, image_token_id=2)


def ticket(unit: str) -> bytes:
    return tickets.issue(KEY, unit, "train1", time.time() + 60, tickets.new_nonce())


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    one = World()
    one.server.set_key(KEY)
    yield one
    one.server.close()


@pytest.fixture
def clients(world: World) -> Iterator[UnitClients]:
    made = UnitClients("train1", 5.0, 1, lambda: False)
    made.renew({"host0": world.server.address}, {"host0": ticket("host0")})
    yield made
    made.close()


def test_pixels_come_as_floats_and_in_as_many_copies_as_asked_for() -> None:
    image = random_image(np.random.default_rng(0))
    payload = random_group(np.random.default_rng(1), 3, images=(image,))
    state = StorageState("host0", 10**6)
    state.put(payload, put_frame(payload)[0])
    (digest,) = payload.media
    with StorageServer(state, "127.0.0.1") as server:
        server.set_key(KEY)
        with StorageClient(server.address, ticket("host0"), "train1", 5.0, 0) as client:
            pulled = client.pull(PullRequest(media=((3, digest),) * 5, pixels="float32"))
        assert pulled.payload_bytes == client.counters.pulled_bytes == 5 * 4 * image.nbytes
    assert pulled.media[digest].dtype == np.float32
    np.testing.assert_array_equal(pulled.media[digest], image)


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 20))
def test_pieces_cover_everything_in_order_and_hold_at_most_so_much_or_one(sizes: list[int], most: int) -> None:
    cut = [sizes[piece] for piece in pieces(sizes, most)]
    assert [size for piece in cut for size in piece] == sizes
    assert all(sum(piece) <= most or len(piece) == 1 for piece in cut)
    assert all(a and sum(a) + b[0] > most for a, b in itertools.pairwise(cut))


def test_a_pull_in_pieces_is_the_pull_in_one(
    world: World, clients: UnitClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = world.plan("pictured", 5, 1)
    everything = range(len(plan.placements))
    whole = clients.pull(plan, everything, shown_images(plan, everything), SPEC, "float32")
    served = world.server.figures()[2]["served_requests"]
    monkeypatch.setattr(pull, "PIECE_BYTES", 1000)
    parts = clients.pull(plan, everything, shown_images(plan, everything), SPEC, "float32")
    assert world.server.figures()[2]["served_requests"] - served > 5
    assert parts.bytes == whole.bytes
    assert set(parts.trajectories) == set(everything)
    for index in everything:
        np.testing.assert_array_equal(parts.trajectories[index].tokens_T, whole.trajectories[index].tokens_T)
    assert all(
        np.array_equal(parts.media[digest], image) for digest, image in world.images.items() if digest in whole.media
    )


def test_a_plan_without_a_way_to_its_unit_is_refused(world: World) -> None:
    with pytest.raises(PullError, match="plan 5 came without address and ticket for unit host0"):
        UnitClients("train1", 5.0, 1, lambda: False).pull(world.plan("pictured", 5, 1), [0], [], SPEC)


# --- the relay -------------------------------------------------------------------------------------------------------


@pytest.fixture
def relay() -> Iterator[RelayServer]:
    with RelayServer("train0", "127.0.0.1", wait_s=0.5, request_timeout_s=5.0) as server:
        server.set_key(KEY)
        yield server


@pytest.fixture
def relayed(relay: RelayServer) -> Iterator[UnitClients]:
    made = UnitClients("train1", 5.0, 0, lambda: False)
    made.renew({"train0": relay.address}, {"train0": ticket("train0")})
    yield made
    made.close()


def collected(world: World, clients: UnitClients) -> tuple[MiniBatchPlan, list[int], Payload]:
    plan = world.plan("pictured", 5, 1)
    shown = shown_images(plan, range(len(plan.placements)))
    return plan, shown, clients.pull(plan, range(len(plan.placements)), shown, SPEC, "float32")


def test_what_process_0_collected_comes_whole_to_who_asked_before(
    world: World, clients: UnitClients, relay: RelayServer, relayed: UnitClients
) -> None:
    plan, shown, payload = collected(world, clients)
    offering = threading.Timer(0.2, relay.offer, (plan, payload))
    offering.start()
    got = relayed.pull(plan, range(len(plan.placements)), shown, SPEC, "float32", unit="train0")
    offering.join()
    assert got.bytes == payload.bytes
    assert set(got.media) == set(payload.media)
    assert all(np.array_equal(got.media[digest], image) for digest, image in payload.media.items())
    for index, trajectory in payload.trajectories.items():
        for field in ("tokens_T", "sampled_T", "behaviour_logprobs_T", "versions_T"):
            np.testing.assert_array_equal(getattr(got.trajectories[index], field), getattr(trajectory, field))

    relay.release(tuple(group.group_id for group in plan.groups))
    with pytest.raises(PullFailed, match="unit train0 does not hold group"):
        relayed.pull(plan, [0], [], SPEC, "float32", unit="train0")
    assert relay.figures()[:2] == (0, 0)


def test_what_is_never_offered_is_said_to_be_missing_in_time(
    world: World, relay: RelayServer, relayed: UnitClients
) -> None:
    del relay
    began_s = time.monotonic()
    with pytest.raises(PullFailed, match="unit train0 does not hold group"):
        relayed.pull(world.plan("pictured", 5, 1), [0], [], SPEC, "float32", unit="train0")
    assert 0.4 < time.monotonic() - began_s < 3


def test_nobody_can_put_anything(relay: RelayServer) -> None:
    payload: GroupPayload = random_group(np.random.default_rng(1), 3)
    with (
        StorageClient(relay.address, ticket("train0"), "train1", 5.0, 0) as client,
        pytest.raises(StorageRefused, match="0 of unit train0's 0"),
    ):
        client.put_group(payload)


def test_dispatch_needs_a_whole_train_batch_admitted_ahead() -> None:
    raw: dict[str, Any] = {
        "name": "small",
        "task": {"name": "digits-read"},
        "batch": {"groups": 8, "mini_batches": 4, "trajectories_per_group": 2},
        "train": {"transfer": "dispatch"},
        "admission": {"admit_ahead": 2},
    }
    with pytest.raises(ConfigError, match=r"admission.admit_ahead: .* at least 3 .*\(value 2\)"):
        parse_config(raw)
    raw["admission"]["admit_ahead"] = 3
    parse_config(raw)
