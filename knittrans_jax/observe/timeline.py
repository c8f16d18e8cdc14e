"""A time line of groups as SVG: a row per group, from its lease to its update, with its trajectories and the versions."""

from __future__ import annotations

from collections.abc import Sequence

from knittrans_jax.admission.accounts import Account
from knittrans_jax.observe.charts import BOTTOM, TOP, Axis, Frame, number
from knittrans_jax.observe.lives import GroupLife
from knittrans_jax.observe.page import Key

MAX_ROWS = 128
"""Groups drawn; of more, evenly many are left out."""
MAX_DOTS = 2048
"""Trajectories drawn as dots; with more, every second, third, ... of each group."""
NAME_WIDTH = 30.0
"""Room for a version's name."""
ROW = 2.9
COLOURS = {Account.LEASED: 6, Account.RUNNING: 0, Account.READY: 4, Account.ADMITTED: 2}
KEYS = (
    Key("leased", COLOURS[Account.LEASED], "fill"),
    Key("running", COLOURS[Account.RUNNING], "fill"),
    Key("ready", COLOURS[Account.READY], "fill"),
    Key("admitted, until its update is done", COLOURS[Account.ADMITTED], "fill"),
    Key("not consumed", 1, "dot"),
)


def timeline(
    label: str, lives: Sequence[GroupLife], published: Sequence[tuple[float, int]], start_s: float, now_s: float
) -> str:
    """The time line of some groups, oldest lease on top.

    Args:
        label: what it shows.
        lives: the groups.
        published: (time, version), of which those within the time shown become marks.
        start_s: the run's first event: times are shown from there.
        now_s: where what has not ended ends.
    """
    if not lives:
        return ""
    rows = lives if len(lives) <= MAX_ROWS else [lives[i * len(lives) // MAX_ROWS] for i in range(MAX_ROWS)]
    phases = [one.phases(now_s) for one in rows]
    first = min(row[0][1] for row in phases) - start_s
    last = max(row[-1][2] for row in phases) - start_s
    frame = Frame(Axis("seconds since the run began"), Axis("group, in order of lease"), (first, last), (0, len(rows)))
    frame.y_low, frame.y_high, frame.y_ticks = float(len(rows)), 0.0, []
    frame.height = TOP + BOTTOM + max(60.0, ROW * len(rows))
    every = 1 + sum(len(one.trajectories) for one in rows) // MAX_DOTS
    for index, (life, row) in enumerate(zip(rows, phases, strict=True)):
        tip = _tip(life, start_s)
        for account, begin_s, end_s in row:
            css = f"fill c{COLOURS[account]}"
            frame.rect(begin_s - start_s, end_s - start_s, index + 0.9, index + 0.1, css, tip)
        for one in life.trajectories[::every]:
            x = frame.px(min(max(one.finished_s - start_s, first), last))
            frame.add(f'<circle class="finish" cx="{x:.1f}" cy="{frame.py(index + 0.5):.1f}" r=".7"/>')
        if life.ended_s is not None and life.account is not Account.CONSUMED:
            frame.dot(life.ended_s - start_s, index + 0.5, 1, tip)
    marks = [(time_s - start_s, version) for time_s, version in published if first <= time_s - start_s <= last]
    named_to = 0.0
    for x, version in marks:
        place = frame.px(x)
        frame.add(
            f'<path class="version" d="M{place:.1f} {TOP:.0f}V{frame.height - BOTTOM:.1f}">'
            f"<title>version {version} published at {number(x)} s</title></path>"
        )
        if place >= named_to:
            named_to = place + NAME_WIDTH
            frame.add(f'<text class="tick" x="{place:.1f}" y="{TOP - 3:.0f}" text-anchor="middle">v{version}</text>')
    return frame.svg(label)


def _tip(life: GroupLife, start_s: float) -> str:
    def at(name: str, time_s: float | None) -> str:
        return "" if time_s is None else f"\n{name} {time_s - start_s:.2f} s"

    attributes = ", ".join(life.attributes.values())
    lines = f"group {life.group_id}, prompt {life.prompt_id}{f' ({attributes})' if attributes else ''}"
    lines += at(f"leased at version {life.version},", life.leased_s) + at("started", life.started_s)
    lines += at("finished", life.ready_s) + at("admitted", life.admitted_s) + at(f"{life.account}", life.ended_s)
    if life.update is not None:
        lines += f"\nmini-batch {life.mini_batch}, update {life.update + 1}"
    return lines + (f"\n{life.reason}" if life.reason else "")


def legend_note(lives: Sequence[GroupLife]) -> str:
    """What a reader must know of the drawing."""
    drawn = f"{MAX_ROWS} of {len(lives):,} groups are drawn. " if len(lives) > MAX_ROWS else ""
    return f"{drawn}Dots: trajectories finishing. Dashed lines: versions published."
