import json
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from knittrans_jax.launch.messages import Ack, Refused, Report, Status, StatusRequest, Wait
from knittrans_jax.transfer.control import (
    ControlClient,
    ControlError,
    ControlRefused,
    ControlServer,
    ControlStopped,
    ControlTimeout,
    read_endpoint,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlServer]:
    with ControlServer("127.0.0.1", 0, tmp_path / "control.json") as one:
        yield one


class Answering(threading.Thread):
    """Serves `answers` one after the other, then stops."""

    def __init__(self, server: ControlServer, answers: list) -> None:
        super().__init__(daemon=True)
        self.server, self.answers, self.seen = server, list(answers), []
        self.start()

    def run(self) -> None:
        deadline = time.monotonic() + 10
        while self.answers and time.monotonic() < deadline:
            for incoming in self.server.receive(0.05):
                self.seen.append(incoming)
                answer = self.answers.pop(0)
                if answer is not None:
                    self.server.reply(incoming.peer, incoming.request_id, answer)


def client(tmp_path: Path, name: str = "train0", timeout_s: float = 5.0, **options: Any) -> ControlClient:
    return ControlClient(tmp_path / "control.json", name, timeout_s, **options)


def test_a_call_brings_back_its_reply_and_counts_bytes(server: ControlServer, tmp_path: Path):
    answering = Answering(server, [Ack()])
    with client(tmp_path) as one:
        assert one.call(Report(role="train0", counters={"a": 1.0})) == Ack()
        answering.join()
        assert answering.seen[0].peer.startswith(b"train0/")
        assert answering.seen[0].request == Report(role="train0", counters={"a": 1.0})
        assert answering.seen[0].size_bytes == one.counters.bytes_out
        assert server.counters.messages_in == server.counters.messages_out == 1


def test_the_control_file_is_readable_by_its_owner_only(server: ControlServer, tmp_path: Path):
    path = tmp_path / "control.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert set(json.loads(path.read_text())) == {"address", "server_key"}
    assert [p.name for p in tmp_path.iterdir()] == ["control.json"]


def test_a_client_asks_again_upon_wait(server: ControlServer, tmp_path: Path):
    answering = Answering(server, [Wait(), Wait(), Ack()])
    with client(tmp_path) as one:
        assert one.call(StatusRequest()) == Ack()
    answering.join()
    assert [i.request for i in answering.seen] == [StatusRequest()] * 3
    assert len({i.request_id for i in answering.seen}) == 3


def test_waiting_ends_at_the_overall_deadline(server: ControlServer, tmp_path: Path):
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            for incoming in server.receive(0.02):
                server.reply(incoming.peer, incoming.request_id, Wait())
                time.sleep(0.02)

    thread = threading.Thread(target=serve)
    thread.start()
    began = time.monotonic()
    with client(tmp_path) as one, pytest.raises(ControlTimeout, match=r"unanswered after 0\.3 s in all"):
        one.call(StatusRequest(), overall_s=0.3)
    assert 0.25 < time.monotonic() - began < 2
    stop.set()
    thread.join()


def test_a_silent_scheduler_is_a_timeout_and_its_late_answer_is_not_taken_for_the_next(
    server: ControlServer, tmp_path: Path
):
    with client(tmp_path, timeout_s=0.3) as one:
        with pytest.raises(ControlTimeout, match=r"no answer to StatusRequest within 0\.3 s"):
            one.call(StatusRequest())
        late = server.receive(1.0)[0]
        server.reply(late.peer, late.request_id, Refused(reason="late"))
        Answering(server, [Ack()])
        assert one.call(StatusRequest(), timeout_s=5) == Ack()


def test_a_refusal_is_an_error_with_its_reason(server: ControlServer, tmp_path: Path):
    Answering(server, [Refused(reason="incarnation 3 is over")])
    with (
        client(tmp_path) as one,
        pytest.raises(ControlRefused, match="StatusRequest was refused: incarnation 3 is over"),
    ):
        one.call(StatusRequest())


def test_post_and_poll_do_not_block_and_allow_one_request_at_a_time(server: ControlServer, tmp_path: Path):
    with client(tmp_path) as one:
        one.post(StatusRequest())
        assert one.outstanding
        assert one.poll(0.0) is None
        with pytest.raises(ControlError, match="still outstanding"):
            one.post(StatusRequest())
        answering = Answering(server, [Wait(), Ack()])
        reply, deadline = None, time.monotonic() + 5
        while reply is None and time.monotonic() < deadline:
            reply = one.poll(0.05)
        assert reply == Ack()
        assert not one.outstanding
        assert one.poll(0.0) is None
        answering.join()


def test_a_stop_flag_ends_a_wait_at_once(server: ControlServer, tmp_path: Path):
    stop = threading.Event()
    with client(tmp_path, timeout_s=30, stopped=stop.is_set) as one:
        threading.Timer(0.1, stop.set).start()
        began = time.monotonic()
        with pytest.raises(ControlStopped):
            one.call(StatusRequest())
        assert time.monotonic() - began < 2


def test_a_process_that_was_stopped_beyond_its_deadline_still_takes_the_answer(server: ControlServer, tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from knittrans_jax.launch.messages import StatusRequest\n"
        "from knittrans_jax.transfer.control import ControlClient\n"
        "with ControlClient(Path(sys.argv[1]), 'train0', 1.0) as one: print(one.call(StatusRequest()))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "control.json")], stdout=subprocess.PIPE, text=True
    )
    try:
        deadline_s = time.monotonic() + 30
        while not (incoming := server.receive(0.05)):
            assert time.monotonic() < deadline_s
        child.send_signal(signal.SIGSTOP)
        server.reply(incoming[0].peer, incoming[0].request_id, Ack())
        server.receive(2.0)
        child.send_signal(signal.SIGCONT)
        assert child.communicate(timeout=10)[0] == "Ack()\n"
    finally:
        child.kill()
        child.communicate()


def raw_dealer(context: zmq.Context, control_file: Path, server_key: bytes | None = None) -> zmq.Socket:
    endpoint = read_endpoint(control_file)
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
    sock.curve_serverkey = server_key or endpoint.server_key.encode()
    sock.connect(endpoint.address)
    return sock


def test_rubbish_is_refused_and_counted_and_others_are_served(server: ControlServer, tmp_path: Path):
    context = zmq.Context()
    rubbish = raw_dealer(context, tmp_path / "control.json")
    rubbish.send_multipart([b"12345678", b"\xc1 not msgpack"])
    rubbish.send_multipart([b"12345678", b"\x93" * 5000])  # nested beyond any record
    rubbish.send_multipart([b"short", b"x"])
    rubbish.send_multipart([b"a", b"b", b"c", b"d"])
    deadline = time.monotonic() + 5
    while server.counters.messages_in < 4 and time.monotonic() < deadline:
        assert server.receive(0.1) == []
    assert server.counters.messages_in == 4
    assert server.counters.dropped == 2
    assert server.counters.undecodable_bytes == (8 + 13) + (8 + 5000) + 6 + 4
    assert b"not a request" in rubbish.recv_multipart()[1]
    Answering(server, [Status(figures={}, accounts={}, waiting_for="")])
    with client(tmp_path) as one:
        assert isinstance(one.call(StatusRequest()), Status)
    context.destroy(linger=0)


def test_a_message_above_the_limit_is_not_received(tmp_path: Path):
    context = zmq.Context()
    with ControlServer("127.0.0.1", 0, tmp_path / "control.json", max_message_bytes=1000) as server:
        flood = raw_dealer(context, tmp_path / "control.json")
        flood.send_multipart([b"12345678", b"x" * 100_000])
        assert server.receive(0.5) == []
        assert server.counters.messages_in == 0
        Answering(server, [Ack()])
        with client(tmp_path) as one:
            assert one.call(StatusRequest()) == Ack()
        context.destroy(linger=0)


def test_a_peer_without_the_servers_key_reaches_nothing(server: ControlServer, tmp_path: Path):
    context = zmq.Context()
    stranger = raw_dealer(context, tmp_path / "control.json", server_key=zmq.curve_keypair()[0])
    stranger.send_multipart([b"12345678", b"x"])
    plain = context.socket(zmq.DEALER)
    plain.connect(read_endpoint(tmp_path / "control.json").address)
    plain.send_multipart([b"12345678", b"x"])
    assert server.receive(0.5) == []
    assert server.counters.messages_in == 0
    context.destroy(linger=0)


def test_a_reply_to_a_peer_that_left_is_counted(server: ControlServer):
    server.reply(b"nobody/1", 1, Ack())
    assert server.counters.dropped == 1


def test_a_missing_control_file_says_what_to_look_at(tmp_path: Path):
    with pytest.raises(ControlTimeout, match="did the scheduler start"):
        client(tmp_path, start_timeout_s=0.1)
    (tmp_path / "control.json").write_text("{}")
    with pytest.raises(ControlError, match="not a control endpoint"):
        client(tmp_path)
