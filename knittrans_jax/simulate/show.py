"""What `knittrans simulate` shows: progress while it works, a table at the end, and a picture per workload.

Everything is made from the JSON object of `suite.run_suite`, so that a kept result can be shown again. Pictures are SVG files,
with the charts and the palette of a run's report, for light and dark pages.
"""

from __future__ import annotations

import contextlib
import html
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import rich.progress
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from knittrans_jax.observe import charts
from knittrans_jax.observe.charts import Axis, Series
from knittrans_jax.observe.page import STYLE
from knittrans_jax.observe.summary import write_atomically

LINES = {"train_batch": (1, 0), "proportional": (2, 1), "fifo": (6, 2), "mini_batch": (0, 0)}
"""Colour and dash, in the order in which they are drawn."""
SLOWEST = 1.6
"""The pictures end at this factor of the fastest step."""
LEGEND = 48.0
"""Height of a picture's legend."""

Progress = Callable[[str, int, int], None]


@contextlib.contextmanager
def show_progress() -> Iterator[Progress]:
    """A bar on standard error; yields what is told of every job done."""
    columns = (
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    with rich.progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("simulating", total=None)

        def progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            if not bar.console.is_terminal:
                bar.console.print(f"{done}/{total} {what}", highlight=False)

        yield progress


def suite_view(result: Mapping[str, Any]) -> RenderableType:
    """The frontiers, then one line per workload."""
    parts: list[RenderableType] = [_frontiers(one) for one in result["workloads"]]
    table = Table(title="what early mini-batches save", title_justify="left", padding=(0, 1))
    for column in (
        "workload",
        "publish",
        "vs one batch of look-ahead",
        "vs fastest",
        "vs fastest, 2 % both",
        "best fixed",
        "auto / best fixed",
        "lower bound",
    ):
        table.add_column(column, justify="left" if column in ("workload", "publish") else "right")
    for workload in result["workloads"]:
        for one in (workload, *workload["other_publish"].values()):
            auto = one["auto"]
            table.add_row(
                Text(workload["name"]),
                one["publish"],
                _share(one["reduction_vs_batch_look_ahead"]),
                _share(one["reduction_vs_fastest"]),
                _share(one["reduction_at_equal_allowance"]),
                "-" if auto is None else _point(auto["best_fixed"]),
                "-"
                if auto is None
                else f"stale {_ratio(auto['staleness_over_best_fixed'])}, step {auto['step_time_over_best_fixed']:.3f}",
                f"{one['lower_bound']:.2f}",
            )
    note = Text(
        "Staleness: signed mean architectural staleness in updates. vs: 1 - ours / train_batch's, ours within 5 % and 2 % of "
        "its step time. Lower bound: no admission gets below it at steps 2 % above the ideal (publish update: at the ideal).",
        style="dim",
    )
    return Group(*parts, table, note)


def _frontiers(workload: Mapping[str, Any]) -> Table:
    """Every policy's settings that no other beats in both, by step time."""
    table = Table(title=f"{workload['name']}: the frontier of every policy", title_justify="left", padding=(0, 1))
    for column in (
        "policy",
        "look-ahead",
        "step (s)",
        "staleness, publish per train batch",
        "per update",
        "trainer idle",
    ):
        table.add_column(column, justify="left" if column in ("policy", "look-ahead") else "right")
    other = next(iter(workload["other_publish"].values()), None)
    for policy, points in workload["policies"].items():
        twin = {} if other is None else {_look_ahead(p): p for p in other["policies"][policy]}
        shown = frontier(points)
        for index, point in enumerate(shown):
            match = twin.get(_look_ahead(point))
            table.add_row(
                policy if not index else "",
                _look_ahead(point),
                f"{point['step_time_s']:.2f}",
                f"{point['architectural_mean_updates']:.2f}",
                "-" if match is None else f"{match['architectural_mean_updates']:.2f}",
                f"{point['trainer_idle_share']:.1%}",
                end_section=index == len(shown) - 1,
            )
    return table


def frontier(points: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The settings than which no other is both faster and less stale, by step time."""
    kept: list[Mapping[str, Any]] = []
    for one in sorted(points, key=lambda p: (p["step_time_s"], p["architectural_mean_updates"])):
        if not kept or one["architectural_mean_updates"] < kept[-1]["architectural_mean_updates"]:
            kept.append(one)
    return kept


def _look_ahead(point: Mapping[str, Any]) -> str:
    given = point["look_ahead"]
    return ", ".join(f"{k} {v}" for k, v in given.items()) if isinstance(given, dict) else str(given)


def _point(point: Mapping[str, Any]) -> str:
    return f"{point['architectural_mean_updates']:.2f} at {point['step_time_s']:.2f} s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value else "-"


# --- pictures ------------------------------------------------------------------------------------------------------------


def write_pictures(directory: Path, result: Mapping[str, Any]) -> list[Path]:
    """Writes `simulate-NAME.svg` for every workload, and `simulate.md` with the figures -> the pictures."""
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    write_atomically(directory / "simulate.md", figures_page(result).encode())
    for workload in result["workloads"]:
        path = directory / f"simulate-{workload['name']}.svg"
        write_atomically(path, picture(workload).encode())
        written.append(path)
    return written


def figures_page(result: Mapping[str, Any]) -> str:
    """The figures of every workload as a Markdown table, and their pictures."""
    pace = result["pace"]
    lines = [
        f"<!-- Written by `knittrans simulate {' '.join(result['arguments'])}`; not by hand. -->",
        "# Policies on workloads: the figures",
        "",
        f"`knittrans simulate {' '.join(result['arguments'])}` made this page: B = {pace['groups']}, K = "
        f"{pace['mini_batches']}, {pace['train_s']:g} s a mini-batch, {pace['publish_s']:g} s until weights are published, "
        f"{pace['seeds']} seeds. What the columns mean: [simulator.md](../simulator.md). Staleness is the signed mean "
        "architectural staleness in updates.",
        "",
        "| workload | publish | vs one batch of look-ahead | vs fastest | vs fastest, 2 % both | best fixed | auto | bound |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for workload in result["workloads"]:
        for one in (workload, *workload["other_publish"].values()):
            auto = one["auto"]
            lines.append(
                f"| {workload['name']} | {one['publish']} | {_share(one['reduction_vs_batch_look_ahead'])} "
                f"| {_share(one['reduction_vs_fastest'])} | {_share(one['reduction_at_equal_allowance'])} "
                f"| {'-' if auto is None else _point(auto['best_fixed'])} | {'-' if auto is None else _point(auto)} "
                f"| {one['lower_bound']:.2f} |"
            )
    lines.append("")
    lines += [f"![{w['name']}](simulate-{w['name']}.svg)" for w in result["workloads"]]
    return "\n".join(lines) + "\n"


def picture(workload: Mapping[str, Any]) -> str:
    """The frontiers of a workload's policies, `auto`, and the lower bound, as an SVG file."""
    points = workload["policies"]
    fastest_s = min(p["step_time_s"] for found in points.values() for p in found)
    edge_s = SLOWEST * fastest_s
    series, keys = [], []
    for policy, (colour, dash) in LINES.items():
        shown = [p for p in frontier(points.get(policy, [])) if p["step_time_s"] <= edge_s]
        if shown:
            xs, ys = [p["step_time_s"] for p in shown], [p["architectural_mean_updates"] for p in shown]
            series.append(Series(policy, xs, ys, colour, dash, dots=policy != "fifo"))
            keys.append((policy, colour, charts.DASHES[dash]))
    bound = [(s, u) for s, u in workload["lower_bound_by_step_time"] if s <= edge_s]
    if len(bound) > 1:
        series.append(Series("lower bound", [s for s, _ in bound], [u for _, u in bound], charts.INK, 3))
        keys.append(("lower bound", charts.INK, charts.DASHES[3]))
    auto = workload["auto"]
    if auto is not None:
        series.append(Series("auto", [auto["step_time_s"]], [auto["architectural_mean_updates"]], 4, dots=True))
        keys.append(("mini_batch, auto", 4, "dot"))
    svg = charts.line_chart(
        f"{workload['name']}: staleness against step time",
        series,
        Axis("step time (s)"),
        Axis("mean architectural staleness (updates)", low=0.0 if all(min(one.ys) >= 0 for one in series) else None),
    )
    return _stand_alone(svg, workload["name"], keys)


def _stand_alone(svg: str, name: str, keys: list[tuple[str, int, str]]) -> str:
    """A chart of a page as a file of its own: with style, name and legend."""
    height = charts.HEIGHT + LEGEND
    parts = [f'<text class="title" x="2" y="12" style="font-weight:600">{html.escape(name)}</text>']
    x, y = 2.0, 30.0
    for text, colour, dash in keys:
        wide = 30 + 6.2 * len(text)
        if x + wide > charts.WIDTH:
            x, y = 2.0, y + 14.0
        if dash == "dot":
            parts.append(f'<circle class="dot c{colour}" cx="{x + 9:.0f}" cy="{y - 4:.0f}" r="3"/>')
        else:
            style = f' stroke-dasharray="{dash}"' if dash else ""
            parts.append(f'<path class="line c{colour}" d="M{x:.0f} {y - 4:.0f}h18"{style}/>')
        parts.append(f'<text x="{x + 23:.0f}" y="{y:.0f}">{html.escape(text)}</text>')
        x += wide
    inner = re.sub(r"^<svg [^>]*>|</svg>$", "", svg)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {charts.WIDTH:.0f} {height:.0f}" '
        f'width="{2 * charts.WIDTH:.0f}" height="{2 * height:.0f}"><style>{STYLE}</style>'
        f'<rect width="100%" height="100%" style="fill:var(--bg)"/>{"".join(parts)}'
        f'<g transform="translate(0 {LEGEND:.0f})">{inner}</g></svg>\n'
    )
