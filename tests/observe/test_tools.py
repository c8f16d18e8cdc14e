"""Waits on tools are shown, and emulated ones are called so wherever they are read."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from knittrans_jax.admission import events as ev
from knittrans_jax.launch.messages import Status
from knittrans_jax.observe.record import RunRecord
from knittrans_jax.observe.summary import summarise, summary_of
from knittrans_jax.observe.table import live_table, plain_line, summary_panel

from .made import config, events


def report(host: str, calls: float, emulated: float) -> ev.RoleReport:
    counters = {
        "tool_calls": calls, "tool_calls_emulated": emulated, "tool_wait_s": 2 * calls, "tool_waiting_most": 5.0,
        "tool_failures": 1.0,
    }  # fmt: skip
    return ev.RoleReport(time_s=9.95, role=f"rollout-{host}", counters=counters)


def rendered(what: object) -> str:
    console = Console(file=io.StringIO(), width=240)
    console.print(what)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("emulated", "said"),
    [(10.0, "calls of an EMULATED tool"), (4.0, "4 of them EMULATED"), (0.0, "20 calls of tools,")],
)
def test_the_summary_adds_up_the_hosts_and_says_which_tools_are_emulated(tmp_path: Path, emulated: float, said: str):
    log = [*events()[:-1], report("host0", 10.0, emulated), report("host1", 10.0, 0.0 if emulated == 4 else emulated)]
    summary = summarise(log, config(tmp_path))
    assert summary.tools is not None
    assert (summary.tools.calls, summary.tools.wait_s, summary.tools.waiting_most) == (20, 40.0, 10)
    text = rendered(summary_panel(summary, "runs/made"))
    assert said in text
    assert "2.00 s each; at most 10 episodes waited at once; 0 timed out, 2 failed" in text


def test_a_run_without_tools_says_nothing_of_them(tmp_path: Path):
    record = RunRecord(config(tmp_path))
    for event in events():
        record.apply(event)
    summary = summary_of(record)
    assert summary.tools is None
    status = Status(figures={"tool_calls": 0.0}, accounts={}, waiting_for="-")
    assert "tool" not in rendered(summary_panel(summary, "runs/made")) + rendered(live_table("m", record, status, 1.0))
    status = Status(
        figures={"tool_calls": 30.0, "tool_calls_emulated": 30.0, "tool_waiting": 10.0, "tool_wait_s": 8.0},
        accounts={},
        waiting_for="-",
    )
    for text in (rendered(live_table("m", record, status, 1.0)), plain_line(record, status)):
        assert "10 episodes wait on an EMULATED tool; 30 calls, 0.40 s each, 0 failed" in text
