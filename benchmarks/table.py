"""A benchmark's result for people: one table per comparison, then the headline, the machine and the versions."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from knittrans_jax.benchmarks.harness import AGAIN, Measured, Report
from knittrans_jax.benchmarks.statistics import Ratio


def report_view(result: dict[str, Any], report: Report, path: str) -> RenderableType:
    """The whole result; `result` is `report_to_dict` of the report, `path` where it was written."""
    parts: list[RenderableType] = [measured_table(table) for table in report.tables]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    for key, value in report.headline.items():
        if not isinstance(value, (list, dict)):  # those are for programs
            grid.add_row(key, number(value) if isinstance(value, (int, float)) else Text(str(value)))
    for note in report.notes:
        grid.add_row("note", Text(note))
    grid.add_row("machine", Text(", ".join(f"{key} {value}" for key, value in result["machine"].items())))
    grid.add_row("versions", Text(", ".join(f"{key} {value}" for key, value in result["versions"].items())))
    grid.add_row("written", Text(path))
    return Group(*parts, grid)


def measured_table(measured: Measured) -> Table:
    """One comparison: a row per figure and side, then the noise floor: the side that ran twice, over itself."""
    table = Table(title=f"{measured.name}: {measured.rounds} rounds, interleaved", title_justify="left", padding=(0, 1))
    for column in ("figure", "side", "median", "quartiles", f"over {measured.base}"):
        table.add_column(column, justify="left" if column in ("figure", "side") else "right", overflow="fold")
    figures = dict.fromkeys(figure for found in measured.sides.values() for figure in found)
    for figure in figures:
        for side, found in measured.sides.items():
            if figure not in found:
                continue
            one = found[figure]
            table.add_row(
                Text(figure),
                Text(side),
                number(one.median),
                f"{number(one.quartile_low)} to {number(one.quartile_high)}",
                _compared(measured, side, figure),
            )
        if figure in measured.floor:
            floor = measured.floor[figure]
            text = "-" if floor is None else f"{_interval(floor)} = noise"
            table.add_row(
                "", Text(measured.twice + AGAIN, style="dim"), "", "", Text(text, style="dim"), end_section=True
            )
    return table


def number(value: float) -> str:
    """A number with four digits that count."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _compared(measured: Measured, side: str, figure: str) -> Text:
    found = measured.ratio(side, figure)
    if side == measured.base or found is None:
        return Text("-", style="dim")
    outside = measured.outside_noise(side, figure)
    return Text(
        _interval(found) + {True: "", False: ", inside noise", None: ", ?"}[outside],
        style="bold" if outside else "",
    )


def _interval(found: Ratio) -> str:
    return f"{found.value:.3g} ({found.low:.3g} to {found.high:.3g})"
