"""A network that holds bytes back, cuts connections and changes bytes: what comes is right, or an error in time."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.benchmarks.proxy import Proxy
from knittrans_jax.launch import messages as msg
from knittrans_jax.trajectory import GroupPayload
from knittrans_jax.transfer import tickets, wire
from knittrans_jax.transfer.bulk import put_frame
from knittrans_jax.transfer.client import PullRequest, StorageClient
from knittrans_jax.transfer.control import (
    ControlClient,
    ControlEndpoint,
    ControlError,
    ControlRefused,
    ControlServer,
    read_endpoint,
)
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_state import StorageState

from .payloads import random_group, random_image

KEY = secrets.token_bytes(tickets.KEY_BYTES)
TIMEOUT_S = 0.6
RNG = np.random.default_rng(3)
PAYLOAD: GroupPayload = random_group(RNG, 1, (400, 20), (random_image(RNG, 64, 48),))


def pull_through(proxy: Proxy) -> bool:
    """Pulls a group -> whether it came; then it is what it was."""
    ticket = tickets.issue(KEY, "host0", "train0", time.time() + 60, tickets.new_nonce())
    rows = tuple((1, index) for index in range(len(PAYLOAD.trajectories)))
    request = PullRequest(rows=rows, media=tuple((1, digest) for digest in PAYLOAD.media))
    with StorageClient(proxy.address, ticket, "train0", TIMEOUT_S, 2) as client:
        try:
            pulled = client.pull(request)
        except wire.WireError:
            return False
    assert all(np.array_equal(pulled.media[digest], image) for digest, image in PAYLOAD.media.items())
    for fields, trajectory in zip(pulled.rows, PAYLOAD.trajectories, strict=True):
        assert all(np.array_equal(value, getattr(trajectory, name)) for name, value in fields.items())
    return True


@settings(max_examples=25, deadline=None)
@given(
    cut_after=st.one_of(st.none(), st.integers(1, 20_000)),
    hold_s=st.sampled_from([0.0, 0.1]),
    corrupt_s=st.sampled_from([0.0, 0.02, 5.0]),
    seed=st.integers(0, 2**30),
)
def test_what_is_pulled_over_a_bad_network_is_right_or_an_error_in_time(
    cut_after: int | None, hold_s: float, corrupt_s: float, seed: int
):
    state = StorageState("host0", 10**8)
    state.put(PAYLOAD, put_frame(PAYLOAD)[0])
    with StorageServer(state, "127.0.0.1", request_timeout_s=TIMEOUT_S) as server, Proxy(server.address, seed) as proxy:
        server.set_key(KEY)
        proxy.cut_after(cut_after)
        proxy.hold(hold_s)
        proxy.corrupt(corrupt_s)
        began_s = time.monotonic()
        came = pull_through(proxy)
        assert time.monotonic() - began_s < 3 * TIMEOUT_S + 3
        if corrupt_s < 1:
            assert came or cut_after is not None or corrupt_s
        proxy.corrupt(0)
        proxy.cut_after(None)
        assert pull_through(proxy)  # the unit lives, and serves
        assert server.held() == (1,)


def answer(server: ControlServer, over: threading.Event) -> None:
    while not over.is_set():
        for one in server.receive(0.05):
            assert isinstance(one.request, msg.Shutdown)
            server.reply(one.peer, one.request_id, msg.Refused(reason=one.request.reason))


@pytest.mark.parametrize("mischief", ["cut", "hold", "corrupt"])
def test_a_request_over_a_bad_network_gets_its_own_answer_or_an_error_in_time(mischief: str, tmp_path: Path):
    over = threading.Event()
    with ControlServer("127.0.0.1", 0, tmp_path / "control.json") as server, Proxy(seed=7) as proxy:
        endpoint = read_endpoint(tmp_path / "control.json")
        proxy.upstream = endpoint.address.removeprefix("tcp://")
        through = ControlEndpoint(address=f"tcp://{proxy.address}", server_key=endpoint.server_key)
        (tmp_path / "through.json").write_bytes(msgspec.json.encode(through))
        thread = threading.Thread(target=answer, args=(server, over))
        thread.start()
        right = wrong = 0
        with ControlClient(tmp_path / "through.json", "role", TIMEOUT_S) as client:
            for number in range(12):
                if number == 4:
                    {"cut": proxy.cut, "hold": lambda: proxy.hold(1), "corrupt": lambda: proxy.corrupt(0.5)}[mischief]()
                began_s = time.monotonic()
                with pytest.raises(ControlError) as caught:  # every answer is a refusal, with the request's own number
                    client.call(msg.Shutdown(reason=f"number {number}"))
                answered = isinstance(caught.value, ControlRefused)
                assert not answered or f"number {number}" in str(caught.value)
                right, wrong = right + answered, wrong + (not answered)
                assert time.monotonic() - began_s < TIMEOUT_S + 1
        over.set()
        thread.join()
        assert right >= 8
        assert right + wrong == 12
