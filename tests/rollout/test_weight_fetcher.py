"""Rollout hosts bring weights from one another: real servers and connections, the scheduler's answers in the same process."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import pytest

from knittrans_jax.admission.fan_out import FanOut, WeightsDesk
from knittrans_jax.admission.training import TrainGroup
from knittrans_jax.launch import messages as msg
from knittrans_jax.rollout.weight_fetcher import WeightFetcher
from knittrans_jax.transfer import tickets
from knittrans_jax.transfer.bulk import VersionKey
from knittrans_jax.transfer.control import ControlError
from knittrans_jax.transfer.rate import RateLimit
from knittrans_jax.transfer.weight_channel import WeightServer
from knittrans_jax.transfer.weight_store import WeightStore, lay_out
from knittrans_jax.transfer.weights import HostShard, WeightsError

KEY = tickets.new_key()
COLUMNS = 20_000


def tensor(version: int) -> np.ndarray:
    return np.random.default_rng(version).standard_normal((4, COLUMNS)).astype(np.float32)


class World:
    """Two training processes that serve half a tensor each, a desk, and rollout hosts."""

    def __init__(self, width: int, rate: RateLimit | None = None) -> None:
        self.published, self.over = -1, False
        self.training = TrainGroup(2)
        self.stores = [WeightStore(), WeightStore()]
        self.servers = [
            WeightServer(f"train{i}.weights", "127.0.0.1", store, wait_s=0.2, request_timeout_s=5.0, rate=rate)
            for i, store in enumerate(self.stores)
        ]
        for process, server in enumerate(self.servers):
            server.set_key(KEY)
            hello = msg.TrainHello(process=process, processes=2, session=process, weights=server.address)
            assert self.training.hello(hello) is None
        self.training.incarnation = 0
        self.desk = WeightsDesk(
            FanOut(width), KEY, lambda u, p: tickets.issue(KEY, u, p, time.time() + 60, tickets.new_nonce())
        )
        self.lock = threading.Lock()
        self.hosts: dict[str, WeightFetcher] = {}

    def publish(self, version: int) -> None:
        for process, store in enumerate(self.stores):
            part = tensor(version)[2 * process : 2 * process + 2]
            spec, buffers = lay_out(process, [HostShard("w", (2 * process, 0), (4, COLUMNS), part)])
            store.add(VersionKey(0, version), 2, spec, buffers)
        self.published = version

    def host(self, name: str, **options: Any) -> WeightFetcher:
        self.hosts[name] = WeightFetcher(
            name,
            lambda stopped: Scheduler(self),  # pyright: ignore[reportArgumentType]
            host="127.0.0.1",
            most_bytes=10**6,
            timeout_s=1.0,
            attempts=3,
            piece_bytes=20_000,
            **options,
        )
        return self.hosts[name]

    @property
    def served(self) -> float:
        return sum(server.figures()[2]["served_bytes"] for server in self.servers)


class Scheduler:
    """What a fetcher uses of a control client."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, request: msg.WeightsWanted) -> msg.WeightsFrom:
        world = self._world
        with world.lock:
            answer = world.desk.answer(request, world.training, world.published, world.over)
        if isinstance(answer, str):
            raise ControlError(answer)
        return answer


@pytest.fixture
def make() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def build(width: int, rate: RateLimit | None = None) -> World:
        worlds.append(World(width, rate))
        return worlds[-1]

    yield build
    for world in worlds:
        for one in (*world.hosts.values(), *world.servers):
            one.close()


def until(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_training_processes_send_a_version_once_however_many_hosts_there_are(make: Callable[..., World]) -> None:
    world = make(1)
    hosts = [world.host(f"host{i}") for i in range(5)]
    size = tensor(0).nbytes
    for version in range(3):
        world.publish(version)
        for one in hosts:
            one.announce(version)
        until(lambda v=version: all(one.ready(v) for one in hosts))
        for one in hosts:
            np.testing.assert_array_equal(one.read(version)["w"], tensor(version))
    assert world.served == 3 * size
    assert world.desk.fan_out.from_training == 3
    assert sum(one.counters()["weights_passed_on_bytes"] for one in hosts) == 3 * 4 * size
    assert [one.versions() for one in hosts] == [[1, 2]] * 5
    assert all(one.counters()["weights_held_bytes"] == 2 * size for one in hosts)


def test_a_host_that_dies_midway_holds_nobody_up_for_good(make: Callable[..., World]) -> None:
    world = make(1, RateLimit(1_000_000.0))
    first = world.host("host0")
    world.publish(0)
    first.announce(0)
    until(lambda: world.desk.fan_out.from_training == 1)
    rest = [world.host("host1"), world.host("host2")]
    for one in rest:
        one.announce(0)
    until(lambda: first.counters()["weights_passed_on_bytes"] > 0)
    assert first.versions() == []
    first.close()
    until(lambda: all(one.ready(0) for one in rest))
    for one in rest:
        np.testing.assert_array_equal(one.read(0)["w"], tensor(0))
    assert sum(one.counters()["weights_sources_failed"] for one in rest) >= 1
    assert world.desk.fan_out.from_training == 2
    assert world.served < 2 * tensor(0).nbytes  # what came before is not brought again


def test_what_is_not_to_be_had_is_an_error_and_the_newest_still_comes(make: Callable[..., World]) -> None:
    world = make(2)
    one = world.host("host0")
    for version in range(5):
        world.publish(version)
    assert not one.ready(1)
    until(lambda: one.ready(1))
    with pytest.raises(WeightsError, match="version 1 cannot be read: the training processes"):
        one.read(1)
    one.announce(4)
    until(lambda: one.ready(4))
    np.testing.assert_array_equal(one.read(4)["w"], tensor(4))
    assert not one.ready(9)
    until(lambda: one.ready(9))
    with pytest.raises(WeightsError, match="newest published is 4"):
        one.read(9)


def test_a_run_that_ends_is_no_failure(make: Callable[..., World]) -> None:
    world = make(1)
    one = world.host("host0")
    world.publish(0)
    world.over = True
    one.announce(0)
    time.sleep(0.3)
    assert one.versions() == []
    assert not one.ready(0)
    one.close()
    assert one.counters()["weights_sources_failed"] == 0
