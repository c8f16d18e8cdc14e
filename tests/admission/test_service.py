"""The scheduler as a process of its own, spoken to over the real control channel."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from knittrans_jax.admission import events as ev
from knittrans_jax.admission import service
from knittrans_jax.admission.log import read_log
from knittrans_jax.config import ConfigError
from knittrans_jax.launch import messages as msg
from knittrans_jax.transfer.control import ControlClient, ControlRefused, ControlTimeout, read_endpoint

from .model import Model, make_config, make_core, make_prompts


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("scheduler_process.py")), str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=10)


def client(run_dir: Path, name: str, timeout_s: float = 5.0) -> ControlClient:
    return ControlClient(run_dir / "control.json", name, timeout_s, start_timeout_s=30.0)


def call_train(run_dir: Path, process: int, answers: dict[int, msg.Reply]) -> None:
    with client(run_dir, f"train{process}") as speaker:
        answers[process] = speaker.call(msg.TrainHello(process=process, processes=2, session=process))
        speaker.call(msg.WeightsWritten(process=process, incarnation=0, version=0))


def send_rubbish(run_dir: Path, body: bytes) -> None:
    """An authenticated peer that sends something that is no record, and reads the answer."""
    endpoint = read_endpoint(run_dir / "control.json")
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        sock.curve_serverkey = endpoint.server_key.encode()
        sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
        sock.connect(endpoint.address)
        sock.send_multipart([(7).to_bytes(8, "big"), body])
        assert sock.poll(5000)
        sock.recv_multipart()


@pytest.mark.newest
def test_it_serves_all_roles_makes_events_durable_and_ends_with_the_reason(
    process: subprocess.Popen[str], tmp_path: Path
):
    answers: dict[int, msg.Reply] = {}
    with client(tmp_path, "host0") as engine:
        threads = [threading.Thread(target=call_train, args=(tmp_path, p, answers)) for p in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=10)
        assert answers == {p: msg.TrainWelcome(incarnation=0) for p in range(2)}

        orders = engine.call(msg.EngineSync(host="host0", unit="host0", version=-1, free_groups=2))
        assert isinstance(orders, msg.EngineOrders)
        assert (len(orders.leases), orders.published) == (2, 0)
        # What this reply acts on is on disk before it leaves.
        on_disk = read_log(tmp_path / "events.log").events
        assert [e.group_id for e in on_disk if isinstance(e, ev.Leased)] == [lease.group_id for lease in orders.leases]

        status = engine.call(msg.StatusRequest())
        assert isinstance(status, msg.Status)
        assert status.figures["payload_through_scheduler"] == 0
        assert status.figures["control_bytes_in"] > 0

        send_rubbish(tmp_path, b"\x00" * 5000)
        status = engine.call(msg.StatusRequest())
        assert isinstance(status, msg.Status)
        assert status.figures["payload_through_scheduler"] >= 5000, "what is no record counts as payload"

        with pytest.raises(ControlRefused, match="incarnation"):
            engine.call(msg.NextPlan(process=0, incarnation=3, after_plan=-1))
        engine.call(msg.Shutdown(reason="interrupted"))
    assert process.wait(timeout=10) == 0
    read = read_log(tmp_path / "events.log")
    assert read.torn_bytes == 0
    assert isinstance(read.events[0], ev.RunStarted)
    assert isinstance(read.events[-1], ev.RunEnded)
    assert read.events[-1].reason == "interrupted"


def test_what_was_answered_is_in_the_log_even_when_the_process_is_killed(
    process: subprocess.Popen[str], tmp_path: Path
):
    with client(tmp_path, "host0", timeout_s=2.0) as engine:
        engine.call(msg.Report(role="host0", counters={"x": 1.0}))
        process.kill()
        process.wait(timeout=10)
        with pytest.raises(ControlTimeout):
            engine.call(msg.StatusRequest(), timeout_s=0.3)
    events = read_log(tmp_path / "events.log").events
    assert isinstance(events[-1], ev.RoleReport)


def test_a_run_that_ends_in_an_error_is_raised_with_its_reason(tmp_path: Path):
    core = make_core(make_config(launch__stop_timeout_s=0.1), make_prompts({"a": 9}))
    core.end("error: update 3 waits")
    with pytest.raises(service.RunFailed, match="update 3 waits"):
        service.serve(core, tmp_path, threading.Event())
    assert read_log(tmp_path / "events.log").events[-1].reason == "error: update 3 waits"  # pyright: ignore


def test_the_stop_flag_ends_the_run_within_its_stop_timeout(tmp_path: Path):
    core = make_core(make_config(launch__stop_timeout_s=0.3), make_prompts({"a": 9}))
    stop = threading.Event()
    thread = threading.Thread(target=service.serve, args=(core, tmp_path, stop))
    thread.start()
    stop.set()
    thread.join(timeout=5)
    assert not thread.is_alive()
    assert core.ending == "interrupted"


def test_no_request_can_carry_bytes():
    service.check_no_payload_fields()


def test_a_request_with_a_field_of_bytes_would_be_found(monkeypatch: pytest.MonkeyPatch):
    class Smuggler(msg.Message, frozen=True, kw_only=True):
        pixels: list[dict[str, bytes]]

    monkeypatch.setattr(service, "Request", msg.Report | Smuggler)
    with pytest.raises(TypeError, match=r"Smuggler\.pixels"):
        service.check_no_payload_fields()


def test_the_clock_does_not_follow_a_wall_clock_that_jumps(monkeypatch: pytest.MonkeyPatch):
    clock = service.steady_wall_clock()
    before = clock()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert 0 <= clock() - before < 5


def test_a_whole_run_s_log_on_disk_folds_to_the_live_state(tmp_path: Path):
    from knittrans_jax.admission.log import EventLog
    from knittrans_jax.admission.state import fold

    core = make_core(make_config(), make_prompts({"a": 12}))
    model = Model(core, seed=5)
    model.run(fail_rate=0.1)
    with EventLog(tmp_path / "events.log", fsync=False) as log:
        log.append(model.events)
    assert fold(core.state.rules, read_log(tmp_path / "events.log").events) == core.state


def test_rules_that_the_task_s_prompts_cannot_meet_stop_the_scheduler_before_anybody_can_connect(tmp_path: Path):
    config = make_config(task={"name": "digits-read"}, batch__quotas={"domain": {"no-such-domain": {"min": 1}}})
    with pytest.raises(ConfigError, match=r"batch\.quotas\.domain"):
        service.run_scheduler(config, tmp_path, threading.Event())
    assert not list(tmp_path.iterdir())
