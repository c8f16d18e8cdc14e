"""Runs side by side on one page: every figure in a row, every run in a column, and their curves in the same charts.

A pure function of the runs' histories and summaries. The first run is what the others are compared with. Curves over updates
show learning at equal data; curves over seconds show it at equal time.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from knittrans_jax.config import config_to_dict
from knittrans_jax.observe import charts, sections
from knittrans_jax.observe.charts import Axis, Series
from knittrans_jax.observe.history import RunHistory, count_mean
from knittrans_jax.observe.page import Key, figure, page, section, table
from knittrans_jax.observe.record import UpdateRecord
from knittrans_jax.observe.report import ended_badge
from knittrans_jax.observe.series import by_train_step
from knittrans_jax.observe.summary import Summary
from knittrans_jax.observe.table import duration, size
from knittrans_jax.staleness import Staleness

COLOURS = (0, 1, 2, 3, 4, 5)
MAX_RUNS = len(COLOURS)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run under the name that it has on the page."""

    label: str
    history: RunHistory
    summary: Summary


Figure = tuple[str, Callable[[Run], float | None], Callable[[float], str]]


def _waited_share(run: Run) -> float | None:
    figures, waits = run.history.record.figures, run.summary.trainer_wait_s
    trained_s = figures.last_update_s - (figures.first_lease_s or 0.0)
    return (waits.groups + waits.data) / trained_s if figures.updates and trained_s > 0 else None


def _per_update(total: Callable[[Run], float]) -> Callable[[Run], float | None]:
    return lambda run: total(run) / run.summary.updates if run.summary.updates else None


def _stale(name: str, part: str = "mean") -> Callable[[Run], float | None]:
    return lambda run: getattr(getattr(run.summary.staleness, name), part) if run.summary.trajectories else None


FIGURES: tuple[Figure, ...] = (
    ("updates", lambda run: run.summary.updates, lambda v: f"{v:,.0f}"),
    ("seconds per update, first lease to last update", lambda run: seconds_per_update(run), lambda v: f"{v:.3f}"),
    ("wall time", lambda run: run.summary.wall_s, duration),
    ("held-out exact", lambda run: run.summary.heldout_exact, lambda v: f"{v:.1%}"),
    ("reward, last train step", lambda run: run.summary.reward_mean, lambda v: f"{v:.3f}"),
    ("gap, mean, updates", _stale("gap"), lambda v: f"{v:.3f}"),
    ("in flight, mean, updates", _stale("in_flight"), lambda v: f"{v:.3f}"),
    ("in queue, mean, updates", _stale("in_queue"), lambda v: f"{v:.3f}"),
    ("architectural, signed mean, updates", _stale("architectural"), lambda v: f"{v:+.3f}"),
    ("architectural, p95, updates", _stale("architectural", "p95"), lambda v: f"{v:+.2f}"),
    ("architectural, max, updates", _stale("architectural", "max"), lambda v: f"{v:+.2f}"),
    (
        "trainer waited for groups, s per update",
        _per_update(lambda r: r.summary.trainer_wait_s.groups),
        lambda v: f"{v:.3f}",
    ),
    (
        "trainer waited for payload, s per update",
        _per_update(lambda r: r.summary.trainer_wait_s.data),
        lambda v: f"{v:.3f}",
    ),
    ("trainer waited, share of the time", _waited_share, lambda v: f"{v:.1%}"),
    ("tokens trained on per second", lambda run: run.summary.tokens_per_s, lambda v: f"{v:,.0f}"),
    ("payload pulled per update", _per_update(lambda r: r.summary.bytes.payload_pulled), size),
    ("payload unique per update", _per_update(lambda r: r.summary.bytes.payload_unique), size),
    ("patches encoded per update", _per_update(lambda r: r.summary.encoder.patches_encoded), lambda v: f"{v:,.0f}"),
    ("groups launched", lambda run: run.summary.groups_launched, lambda v: f"{v:,.0f}"),
    ("prompts leased again", lambda run: run.summary.group_retries, lambda v: f"{v:,.0f}"),
    ("compiled after the warm-up", lambda run: run.summary.compilations_after_warmup, lambda v: f"{v:,.0f}"),
)
"""(name, figure of a run or None, how it is written)."""


def seconds_per_update(run: Run) -> float | None:
    """From the first lease to the last update, over the updates; None without one."""
    figures = run.history.record.figures
    if not figures.updates or figures.first_lease_s is None:
        return None
    return (figures.last_update_s - figures.first_lease_s) / figures.updates


def figures_of(run: Run) -> dict[str, float | None]:
    """The compared figures of a run, by name."""
    return {name: value(run) for name, value, _ in FIGURES}


def comparison(runs: Sequence[Run]) -> bytes:
    """The page. At most `MAX_RUNS` runs.

    Raises:
        ValueError: fewer than two runs, or too many.
    """
    if not 2 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"runs side by side: expected 2 to {MAX_RUNS}, got {len(runs)}")
    title = " · ".join(run.label for run in runs)
    ends = "<br>".join(f"{html.escape(run.label)}: {ended_badge(run.summary)}" for run in runs)
    body = [
        f"<header><h1>{html.escape(title)}</h1><p>{ends}</p></header>",
        section("Figures", "Changes are against the first run, in percent of it.", [_figures(runs), _settings(runs)]),
        _learning(runs),
        _staleness(runs),
        _composition(runs),
        _waits_and_bytes(runs),
        _accounts(runs),
    ]
    return page(title, body)


def _figures(runs: Sequence[Run]) -> str:
    head = ["", runs[0].label, *(cell for run in runs[1:] for cell in (run.label, "change"))]
    rows = []
    for name, value, written in FIGURES:
        first = value(runs[0])
        cells = [name, "-" if first is None else written(first)]
        for run in runs[1:]:
            own = value(run)
            cells += ["-" if own is None else written(own), _difference(first, own)]
        rows.append(cells)
    return table("Side by side", head, rows, css="wide")


def _difference(first: float | None, own: float | None) -> str:
    if first is None or own is None:
        return ""
    if first == own:
        return "same"
    return f"{(own - first) / abs(first):+.1%}" if first else ""


def _settings(runs: Sequence[Run]) -> str:
    """The keys of the configurations in which the runs differ."""
    flat = [dict(_flatten(config_to_dict(run.history.record.config), "")) for run in runs]
    keys = [key for key in dict.fromkeys(itertools.chain(*flat)) if key not in ("name", "run_dir", "train.coordinator")]
    rows = [
        [key, *(str(one.get(key, "-")) for one in flat)] for key in keys if len({str(one.get(key)) for one in flat}) > 1
    ]
    columns = range(1, len(runs) + 1)
    return (
        table(
            "What differs in the configurations", ["key", *(run.label for run in runs)], rows, text=columns, css="wide"
        )
        or '<p class="note wide">The configurations are the same.</p>'
    )


def _flatten(node: Any, key: str) -> list[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        return [pair for name, value in node.items() for pair in _flatten(value, f"{key}.{name}" if key else str(name))]
    return [(key, node)]


# --- charts ----------------------------------------------------------------------------------------------------------------


def _keys(runs: Sequence[Run]) -> list[Key]:
    dashes = charts.DASHES
    return [Key(run.label, COLOURS[i], "line", dashes[i % len(dashes)]) for i, run in enumerate(runs)]


def _curves(
    runs: Sequence[Run], value: Callable[[UpdateRecord], float], over: Callable[[UpdateRecord], float]
) -> list[Series]:
    """A curve per run: means by train step."""
    series = []
    for index, run in enumerate(runs):
        steps = by_train_step(run.history.updates, run.history.record.config.batch.mini_batches)
        xs = [over(step[-1]) for step in steps]
        ys = [sum(map(value, step)) / len(step) for step in steps]
        series.append(Series(run.label, xs, ys, COLOURS[index], index))
    return series


def _chart(runs: Sequence[Run], title: str, unit: str, value: Callable[[UpdateRecord], float]) -> str:
    svg = charts.line_chart(
        title, _curves(runs, value, lambda one: float(one.update)), sections.UPDATE, Axis(unit, low=0.0)
    )
    return figure(title, svg, _keys(runs))


def _learning(runs: Sequence[Run]) -> str:
    heldout = [
        Series(
            run.label,
            [float(one.version) for one in run.summary.heldout],
            [one.exact_share for one in run.summary.heldout],
            COLOURS[i],
            i,
            dots=True,
        )
        for i, run in enumerate(runs)
    ]
    accuracy = Axis("held-out questions answered exactly", 0.0, 1.0, percent=True)
    over_time = charts.line_chart(
        "reward over time",
        _curves(runs, lambda one: one.reward_mean, lambda one: one.time_s),
        Axis("seconds since the run began"),
        Axis("mean reward", low=0.0),
    )
    parts = [
        _chart(runs, "Reward", "mean reward", lambda one: one.reward_mean),
        figure("Reward over time", over_time, _keys(runs)),
        figure(
            "Held-out accuracy", charts.line_chart("held-out", heldout, Axis("version", 0.0), accuracy), _keys(runs)
        ),
        _chart(runs, "Length", "tokens of a trajectory, mean", lambda one: one.length_tokens_mean),
    ]
    return section("Learning", "Means by train step.", parts)


def _staleness(runs: Sequence[Run]) -> str:
    parts = [
        _chart(runs, title, "updates, mean", lambda one, name=name: one.staleness[name])
        for title, name in (
            ("Architectural", "architectural"),
            ("Gap", "gap"),
            ("In flight", "in_flight"),
            ("In queue", "in_queue"),
        )
    ]
    column = Staleness._fields.index("architectural")
    shares = np.linspace(0.0, 1.0, 101)
    quantiles = [
        Series(run.label, list(shares), list(np.quantile(rows[:, column], shares)), COLOURS[i], i)
        for i, run in enumerate(runs)
        if len(rows := run.history.record.figures.staleness_rows())
    ]
    x = Axis("share of trajectories with at most this", 0.0, 1.0, percent=True)
    svg = charts.line_chart("distribution", quantiles, x, Axis("architectural staleness, updates", low=0.0))
    parts.append(figure("Distribution of architectural staleness", svg, _keys(runs)))
    return section(
        "Staleness, by cause", "Means by train step, over the trajectories that an update trained on.", parts
    )


def _composition(runs: Sequence[Run]) -> str:
    parts = []
    for title, unit, counts in (
        ("Length by mini-batch", "tokens of a trajectory, mean", lambda one: one.lengths),
        ("Reward by mini-batch", "mean reward", lambda one: one.rewards),
    ):
        series = [
            Series(
                run.label,
                [float(j + 1) for j in range(len(run.history.by_mini_batch))],
                [count_mean(counts(one)) for one in run.history.by_mini_batch],
                COLOURS[i],
                i,
                dots=True,
            )
            for i, run in enumerate(runs)
        ]
        svg = charts.line_chart(title, series, Axis("mini-batch of the train batch"), Axis(unit, low=0.0))
        parts.append(figure(title, svg, _keys(runs)))
    for attribute in sorted({name for run in runs for one in run.history.by_mini_batch for name in one.values}):
        rows = [
            [
                f"{run.label}: {value}",
                *(_share(one.values.get(attribute, {}).get(value, 0), one.groups) for one in batches),
            ]
            for run in runs
            for batches in (run.history.by_mini_batch,)
            for value in sorted({value for one in batches for value in one.values.get(attribute, ())})
        ]
        most = max(len(run.history.by_mini_batch) for run in runs)
        head = [attribute, *(f"mini-batch {j + 1}" for j in range(most))]
        parts.append(
            table(f"Share of groups by {attribute}", head, [row + [""] * (len(head) - len(row)) for row in rows])
        )
    return section("Composition of early and late mini-batches", "Over all train steps.", parts)


def _share(part: int, whole: int) -> str:
    return sections.share_of(part, whole)


def _waits_and_bytes(runs: Sequence[Run]) -> str:
    parts = [
        _chart(runs, "Waits for groups", "seconds per update", lambda one: one.waits_s.get("groups", 0.0)),
        _chart(runs, "Waits for payload", "seconds per update", lambda one: one.waits_s.get("data", 0.0)),
        _chart(runs, "Payload pulled", "MB per update", lambda one: one.payload_pulled / 1e6),
    ]
    return section("Waits and bytes", "Means by train step.", parts)


def _accounts(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.summary.groups)
    rows = [[name, *(f"{run.summary.groups.get(name, 0):,}" for run in runs)] for name in names]
    rows.append(["sum of accounts", *(f"{sum(run.summary.groups.values()):,}" for run in runs)])
    rows.append(["launched", *(f"{run.summary.groups_launched:,}" for run in runs)])
    parts = [table("Groups by account at the end", ["", *(run.label for run in runs)], rows)]
    return section("Accounts of groups", "The sum of the accounts is the number launched.", parts)
