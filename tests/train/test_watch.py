"""Signs of life of a training process, and the end of one that is stuck."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from knittrans_jax.launch import messages as msg
from knittrans_jax.train import watch
from knittrans_jax.train.watch import heartbeat, watchdog
from knittrans_jax.transfer.control import ControlClient, ControlServer

STUCK = """
import threading
from knittrans_jax.train.watch import watchdog

def other_side_is_gone():
    threading.Event().wait()

with watchdog(0.5):
    other_side_is_gone()
"""


def test_what_is_stuck_ends_in_time_with_the_stacks_of_all_threads():
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert time.monotonic() - began_s < 30
    assert "other_side_is_gone" in done.stderr
    assert "Timeout (0:00:00.500000)" in done.stderr


def test_what_is_done_in_time_is_left_alone():
    with watchdog(0.2):
        pass
    time.sleep(0.3)


def test_a_process_beats_whatever_its_main_thread_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(watch, "BEAT_S", 0.02)
    beats: list[msg.Request] = []
    over = threading.Event()

    def serve(server: ControlServer) -> None:
        while not over.is_set():
            for one in server.receive(0.05):
                beats.append(one.request)
                server.reply(one.peer, one.request_id, msg.Ack())

    with ControlServer("127.0.0.1", 0, tmp_path / "control.json") as server:
        thread = threading.Thread(target=serve, args=(server,))
        thread.start()
        connect = lambda stopped: ControlClient(tmp_path / "control.json", "beat", 5.0, stopped=stopped)  # noqa: E731
        with heartbeat(connect, 3):
            time.sleep(0.5)  # stands for a long step
        over.set()
        thread.join()
    assert len(beats) >= 3
    assert set(beats) == {msg.Beat(process=3)}
