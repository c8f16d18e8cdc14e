"""The host process against a real control channel, a real storage unit and real weight files; only the scheduler is a stub."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from knittrans_jax.config import Config, TaskConfig, config_to_yaml, parse_config
from knittrans_jax.launch import messages as msg
from knittrans_jax.rollout.host import run_rollout
from knittrans_jax.trajectory import GroupMeta
from knittrans_jax.transfer import tickets
from knittrans_jax.transfer.client import PullRequest, StorageClient
from knittrans_jax.transfer.control import ControlServer
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_state import StorageState
from knittrans_jax.transfer.weights import WeightWriter

from .cases import MEMBERS, PARAMS, ROLLOUT, other_params

DEADLINE_S = 120.0


def make_config(tmp_path: Path, task: TaskConfig) -> Config:
    return parse_config(
        {
            "name": "host-test",
            "run_dir": str(tmp_path),
            "task": {"name": task.name, "options": task.options},
            "batch": {"groups": 2, "mini_batches": 1, "trajectories_per_group": MEMBERS},
            "rollout": {name: getattr(ROLLOUT, name) for name in ROLLOUT.__struct_fields__},
            "control": {"rpc_timeout_s": 20.0, "pull_timeout_s": 5.0},
        }
    )


class Stub:
    """A scheduler that hands out leases and evaluations as they are listed, and remembers what it is told."""

    def __init__(self, server: ControlServer, unit: StorageServer, key: bytes):
        self.server, self.unit, self.key = server, unit, key
        self.leases: list[msg.Lease] = []
        self.evals: list[msg.EvalLease] = []
        self.published, self.stop, self.withhold_tickets = -1, False, 0
        self.syncs: list[msg.EngineSync] = []
        self.reports: list[msg.Report] = []
        self.bytes_seen = 0

    def serve(self, until: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < deadline, f"not there in time; last sync: {self.syncs[-1:]}"
            for incoming in self.server.receive(0.05):
                self.bytes_seen += incoming.size_bytes
                self.server.reply(incoming.peer, incoming.request_id, self.answer(incoming.request))

    def answer(self, request: Any) -> Any:
        if isinstance(request, msg.Report):
            self.reports.append(request)
            return msg.Ack()
        assert isinstance(request, msg.EngineSync), request
        self.syncs.append(request)
        ticket = None
        if request.ticket_wanted:
            ticket = tickets.issue(self.key, request.unit, request.host, time.time() + 60, tickets.new_nonce())
        room, evals = request.free_groups, tuple(self.evals)
        given, self.leases, self.evals = tuple(self.leases[:room]), self.leases[room:], []
        return msg.EngineOrders(
            leases=given,
            evals=evals,
            published=self.published,
            ticket=ticket,
            unit_address=self.unit.address,
            stop=self.stop,
        )

    def done(self) -> dict[int, GroupMeta]:
        return {done.group.group_id: done.group for sync in self.syncs for done in sync.done}

    def last(self, counter: str) -> float:
        return self.reports[-1].counters[counter]


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    key = tickets.new_key()
    directory = tmp_path / "host-test"
    with (
        ControlServer("127.0.0.1", 0, directory / "control.json") as server,
        StorageServer(StorageState("host0", 2**20), "127.0.0.1") as unit,
    ):
        unit.set_key(key)
        yield Stub(server, unit, key)


def publish(tmp_path: Path, version: int, params: Any) -> None:
    writer = WeightWriter(tmp_path / "host-test" / "weights", 0, 1, lambda _: None)
    writer.write(version, jax.device_put(params))  # compiles nothing: compilations are counted
    writer.close()


def train_lease(group_id: int, prompt_id: str, least_version: int = 0) -> msg.Lease:
    return msg.Lease(group_id=group_id, prompt_id=prompt_id, least_version=least_version)


def check_stored(stub: Stub, meta: GroupMeta) -> None:
    """The unit holds what the description says."""
    ticket = tickets.issue(stub.key, "host0", "test", time.time() + 60, tickets.new_nonce())
    request = PullRequest(
        rows=tuple((meta.group_id, member) for member in range(MEMBERS)),
        media=tuple((meta.group_id, one.digest) for one in meta.media),
    )
    with StorageClient(stub.unit.address, ticket, "test", 5.0, 1) as client:
        pulled = client.pull(request)
    assert pulled.payload_bytes == meta.payload_bytes
    for row, described in zip(pulled.rows, meta.trajectories, strict=True):
        assert len(row["tokens_T"]) == described.length_tokens
        assert int(row["sampled_T"].sum()) == described.sampled_tokens
        assert int(row["versions_T"][row["sampled_T"]].sum()) == described.version_sum


def test_a_host_samples_stores_and_follows_published_weights_until_it_is_told_to_stop(tmp_path: Path, stub: Stub):
    config = make_config(tmp_path, TaskConfig(name="grid-lookup"))
    failure: list[BaseException] = []

    def host() -> None:
        try:
            run_rollout(config, config.directory, 0, threading.Event())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=host, daemon=True)
    thread.start()
    stub.serve(lambda: len(stub.syncs) > 3)
    assert all(sync.free_groups == 0 and sync.version == -1 for sync in stub.syncs)  # there are no weights yet

    publish(tmp_path, 0, PARAMS)
    stub.published = 0
    stub.leases = [train_lease(i, f"train-{i:06d}") for i in range(6)] + [train_lease(6, "nonsense")]
    stub.evals = [msg.EvalLease(eval_id=3, version=0, prompt_ids=("heldout-000000", "heldout-000001"))]
    stub.serve(lambda: len(stub.done()) == 6 and any(sync.failed for sync in stub.syncs))
    assert {i for sync in stub.syncs for i in sync.started} == set(range(7))
    (failed,) = [one for sync in stub.syncs for one in sync.failed]
    assert (failed.group_id, failed.episode_retries) == (6, config.rollout.episode_retries)
    for meta in stub.done().values():
        check_stored(stub, meta)
        assert {t.version_max for t in meta.trajectories} == {0}
    (result,) = [one for sync in stub.syncs for one in sync.evals]
    assert (result.eval_id, result.questions) == (3, 6)
    compiled = stub.last("compilations")

    publish(tmp_path, 1, other_params(1))
    publish(tmp_path, 2, other_params(2))
    stub.published = 2
    stub.leases = [train_lease(10, "train-000010", least_version=2)]
    # An evaluation of a version that was never there is given back at once.
    stub.evals = [msg.EvalLease(eval_id=4, version=77, prompt_ids=("heldout-000000",))]
    stub.serve(lambda: 10 in stub.done())
    assert {t.version_min for t in stub.done()[10].trajectories} == {2}
    check_stored(stub, stub.done()[10])

    stub.stop = True
    reports = len(stub.reports)
    stub.serve(lambda: len(stub.reports) > reports)
    thread.join(10)
    assert not thread.is_alive()
    assert not failure
    assert stub.last("compilations") == compiled
    assert stub.last("evals_dropped") == 1
    assert [eval_id for sync in stub.syncs for eval_id in sync.evals_failed] == [4]
    assert stub.last("put_bytes") == sum(meta.payload_bytes for meta in stub.done().values())


def test_a_host_process_samples_a_users_own_task_and_ends_politely_on_sigterm(tmp_path: Path, stub: Stub):
    task_file = Path(__file__).with_name("my_task.py")
    config = make_config(tmp_path, TaskConfig(name=f"{task_file}:Echo", options={"repeat": 3}))
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    code = (
        "import sys; from pathlib import Path; from knittrans_jax.config import load_config;"
        "from knittrans_jax.rollout.host import run_rollout;"
        "config = load_config(sys.argv[1]); run_rollout(config, config.directory, 0)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "config.yaml")])
    try:
        publish(tmp_path, 0, PARAMS)
        stub.published = 0
        words = ("aaa", "ababab", "abcabcabc")
        stub.leases = [train_lease(i, f"train-{word}") for i, word in enumerate(words)]
        stub.serve(lambda: len(stub.done()) == 3)
        for group_id, meta in stub.done().items():
            check_stored(stub, meta)
            assert meta.media == ()
            prompts = {t.length_tokens - t.sampled_tokens for t in meta.trajectories}
            assert prompts == {len(words[group_id]) + 1}
        payload = sum(meta.payload_bytes for meta in stub.done().values())
        assert stub.unit.figures()[2]["put_bytes"] == payload
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait(10)
