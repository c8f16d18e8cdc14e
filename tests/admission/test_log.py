from pathlib import Path

import pytest

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.log import EventLog, LogError, read_log

from .model import make_group

EVENTS: list[ev.AnyEvent] = [
    ev.RunStarted(time_s=1.0, config={"name": "x", "batch": {"groups": 4}}),
    ev.Ready(time_s=2.0, group=make_group(0, "host0", (0, 1), 1), episode_retries=1),
    ev.Consumed(
        time_s=3.0,
        plan_id=0,
        update=0,
        metrics={"loss": float("inf")},
        waits_s={"data": 0.5},
        pulled_bytes=1,
        unique_bytes=1,
        compilations=2,
    ),
    ev.RunEnded(time_s=4.0, reason="finished"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with EventLog(tmp_path / "events.log", fsync=False) as log:
        log.append(EVENTS[:1])
        log.append([])
        log.append(EVENTS[1:])
        assert log.size_bytes == log.path.stat().st_size
    return tmp_path / "events.log"


def test_what_was_appended_is_read_back(path: Path):
    read = read_log(path)
    assert (read.events, read.torn_bytes, read.whole_bytes) == (EVENTS, 0, path.stat().st_size)


def test_a_log_cut_anywhere_gives_the_whole_turns_before_the_cut_and_says_what_is_torn(path: Path):
    content = path.read_bytes()
    counts = []
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        read = read_log(path)
        assert read.events == EVENTS[: len(read.events)]
        assert read.whole_bytes + read.torn_bytes == cut
        counts.append(len(read.events))
    assert counts == sorted(counts)
    assert set(counts) == {0, 1}, "the second turn's three events are there together or not at all"


def test_a_damaged_last_turn_is_a_torn_tail_and_a_damaged_earlier_one_is_an_error(path: Path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert read_log(path).events == EVENTS[:1]
    content[20] ^= 1
    path.write_bytes(content)
    with pytest.raises(LogError, match="damaged at byte 7"):
        read_log(path)


def test_a_run_s_log_is_never_overwritten(path: Path):
    with pytest.raises(LogError, match="exists"):
        EventLog(path)


def test_another_file_is_no_log(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"something else\n")
    with pytest.raises(LogError, match="not an event log"):
        read_log(tmp_path / "x")
