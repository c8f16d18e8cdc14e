"""What a person sees: a table on a terminal, plain lines elsewhere, one panel at the end."""

import io
from pathlib import Path

from rich.console import Console

from knittrans_jax.launch.messages import Status
from knittrans_jax.observe.record import RunRecord
from knittrans_jax.observe.summary import summary_of
from knittrans_jax.observe.table import LiveView, duration, live_table, size, summary_panel

from .made import config, events

STATUS = Status(figures={}, accounts={}, waiting_for="cells: 3 groups are missing, 5 in flight")


def record(tmp_path: Path) -> RunRecord:
    one = RunRecord(config(tmp_path))
    for event in events():
        one.apply(event)
    return one


def rendered(what: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_live_table_shows_progress_staleness_by_cause_waits_and_what_is_missing(tmp_path: Path) -> None:
    text = rendered(live_table("made", record(tmp_path), STATUS, 10.0))
    for part in ("6/6", "3/3", "0.500", "85.0% (version 6)", "in flight", "in queue", "architectural", "groups 3.0 s"):
        assert part in text
    assert "cells: 3 groups are missing" in text
    assert "consumed 6" in text


def test_without_a_terminal_there_is_a_plain_line_every_few_seconds(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    with LiveView(console, "made") as view:
        view.show(RunRecord(config(tmp_path)), None, 0.0)
        view.show(record(tmp_path), STATUS, 1.0)
        view.show(record(tmp_path), STATUS, 6.0)
        view.show(record(tmp_path), STATUS, 12.0)
    lines = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    assert len(lines) == 2
    assert "waits for the roles to start" in lines[0]
    assert "update 6/6" in lines[1]
    assert "\x1b" not in lines[1]


def test_the_panel_at_the_end_says_the_figures_that_matter(tmp_path: Path) -> None:
    text = rendered(summary_panel(summary_of(record(tmp_path)), "runs/made"))
    for part in ("finished", "85.0%", "20 questions", "0 bytes through the scheduler", "4.0 times fewer", "runs/made"):
        assert part in text
    nothing = rendered(summary_panel(summary_of(RunRecord(config(tmp_path)), "interrupted"), "runs/made"))
    assert "interrupted" in nothing


def test_durations_and_sizes_read_as_a_person_says_them() -> None:
    assert [duration(s) for s in (5, 65, 3725)] == ["5 s", "1:05 min", "1:02 h"]
    assert [size(b) for b in (5, 1500, 2.5e6, 3e12)] == ["5 bytes", "1.5 kB", "2.5 MB", "3000.0 GB"]
