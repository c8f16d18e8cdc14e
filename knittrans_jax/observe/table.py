"""What a person sees of a run: a live table, or a plain line every few seconds where there is no terminal; a panel at the end.

Everything goes to the given console (the launcher's is standard error with `--json`, so that standard output stays clean).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from knittrans_jax.launch.messages import Status
from knittrans_jax.observe.record import Recompilation, RunRecord
from knittrans_jax.observe.summary import Summary
from knittrans_jax.staleness import Distribution

REFRESH_S = 0.5
PLAIN_S = 5.0
"""Between two plain lines."""
RECENT_UPDATES = 20
"""Reward is a mean over this many updates."""


class LiveView:
    """Shows a run while it works. `show` may be called as often as one likes: it redraws at its own pace."""

    def __init__(self, console: Console, name: str) -> None:
        self._console, self._name = console, name
        self._live: Live | None = None
        self._shown_s = -math.inf
        self._last_line = ""

    def show(self, record: RunRecord, status: Status | None, elapsed_s: float) -> None:
        """Draws, if it is time to."""
        terminal = self._console.is_terminal
        if elapsed_s - self._shown_s < (REFRESH_S if terminal else PLAIN_S):
            return
        self._shown_s = elapsed_s
        if terminal:
            if self._live is None:
                self._live = Live(console=self._console, auto_refresh=False, transient=True)
                self._live.start()
            self._live.update(live_table(self._name, record, status, elapsed_s), refresh=True)
            return
        line = plain_line(record, status)
        if line != self._last_line:
            self._last_line = line
            self._console.print(f"{duration(elapsed_s):>6}  {line}", highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        """Takes the table off the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> LiveView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def live_table(name: str, record: RunRecord, status: Status | None, elapsed_s: float) -> RenderableType:
    """The live table of a run."""
    config, figures = record.config, record.figures
    updates, total, every = figures.updates, config.train.updates, config.batch.mini_batches
    waits = figures.waits_s
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    progress = Table.grid(padding=(0, 2))
    progress.add_row(
        f"{updates}/{total}", ProgressBar(total=total, completed=updates, width=30), _times(record, elapsed_s)
    )
    grid.add_row("update", progress)
    grid.add_row("train step", f"{updates // every}/{total // every}   published version {max(record.published, 0)}")
    grid.add_row("reward", _reward(record))
    grid.add_row("held-out", _heldout(record))
    grid.add_row("staleness", _staleness(record))
    grid.add_row("trainer waits", f"groups {waits['groups']:.1f} s   data {waits['data']:.1f} s")
    grid.add_row("speed", f"{figures.tokens_per_s:,.0f} sampled tokens/s")
    grid.add_row("groups", _accounts(record.accounts))
    if status is not None and status.figures.get("tool_calls"):
        grid.add_row("tools", _live_tools(status.figures))
    late = sum(one.after_warmup for one in record.compilations.values())
    if late:
        grid.add_row("[yellow]warning[/yellow]", _late_compilations(late, record.recompilations))
    grid.add_row("waits for", Text("the roles to start" if status is None else status.waiting_for))
    return Panel(grid, title=f"knittrans · {name}", title_align="left", border_style="cyan", padding=(0, 1))


def plain_line(record: RunRecord, status: Status | None) -> str:
    """The same in one line."""
    figures = record.figures
    if not figures.updates:
        return f"waits for {'the roles to start' if status is None else status.waiting_for}"
    waits = figures.waits_s
    parts = [
        f"update {figures.updates}/{record.config.train.updates}",
        f"reward {_reward(record)}",
        f"held-out {_heldout(record)}",
        f"staleness {_staleness(record)}",
        f"waited groups {waits['groups']:.1f} s, data {waits['data']:.1f} s",
        f"{figures.tokens_per_s:,.0f} tokens/s",
        f"waits for {'-' if status is None else status.waiting_for}",
    ]
    if status is not None and status.figures.get("tool_calls"):
        parts.insert(-1, _live_tools(status.figures))
    late = sum(one.after_warmup for one in record.compilations.values())
    if late:
        parts.append(f"warning: {_late_compilations(late, record.recompilations).plain}")
    return " | ".join(parts)


def summary_panel(summary: Summary, directory: str) -> RenderableType:
    """What the run came to, on one panel."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("ended", Text(summary.ended))
    grid.add_row(
        "trained", f"{summary.updates} updates in {summary.train_steps} train steps, {duration(summary.wall_s)}"
    )
    if summary.heldout_exact is not None:
        grid.add_row(
            "held-out",
            f"[bold]{summary.heldout_exact:.1%}[/bold] exact on {summary.heldout_questions:,} questions "
            f"(version {summary.heldout_version})",
        )
    if summary.reward_mean is not None and summary.reward_mean_first is not None:
        grid.add_row("reward", f"{summary.reward_mean:.3f} (first train step {summary.reward_mean_first:.3f})")
    grid.add_row("staleness", _staleness_table(summary))
    waits = summary.trainer_wait_s
    grid.add_row("trainer waited", f"{waits.groups:.1f} s for groups, {waits.data:.1f} s for data")
    if summary.tokens_per_s is not None:
        grid.add_row("speed", f"{summary.tokens_per_s:,.0f} tokens/s trained on")
    counts = summary.bytes
    grid.add_row(
        "payload",
        f"{size(counts.payload_pulled)} pulled, {size(counts.payload_unique)} unique; "
        f"{counts.payload_through_scheduler} bytes through the scheduler",
    )
    encoder = summary.encoder
    if encoder.images_referenced:
        grid.add_row(
            "images",
            f"{encoder.images_unique:,} unique of {encoder.images_referenced:,} shown "
            f"({encoder.patches_naive / max(1, encoder.patches_encoded):.1f} times fewer patches encoded)",
        )
    if summary.updates_skipped:
        grid.add_row(
            "[yellow]warning[/yellow]", f"{summary.updates_skipped} updates left out: loss or gradient not finite"
        )
    if summary.logprob_mismatch is not None:
        grid.add_row("log-prob mismatch", f"{summary.logprob_mismatch:.2e} (mean, same version)")
    after = summary.compilations_after_warmup
    grid.add_row(
        "compilations", f"{summary.compilations}, {'-' if after is None else after} of them after the second train step"
    )
    if after:
        grid.add_row("[yellow]warning[/yellow]", _late_compilations(after, summary.recompilations))
    for one in summary.resumptions:
        grid.add_row(
            "resumed",
            f"from version {one.version}: {one.updates_discarded} updates thrown away, the prompts of "
            f"{one.groups_discarded} consumed and {one.groups_lost} open groups launched again",
        )
    if summary.checkpoints.count:
        kept = summary.checkpoints
        grid.add_row(
            "checkpoints",
            f"{kept.count}, the newest of version {kept.version} ({size(kept.size_bytes)}); the trainer stood still for "
            f"{kept.stall_s:.2f} s in all",
        )
    if summary.remainder:
        left = ", ".join(f"{count:,} {name}" for name, count in summary.remainder.items())
        grid.add_row("remainder", f"prompts that filled no train batch: {left}")
    grid.add_row("groups", f"{_accounts(summary.groups)}   of {summary.groups_launched:,} launched")
    tools = summary.tools
    if tools is not None:
        ended = (
            f"{tools.timeouts} timed out, {tools.failures} failed" if tools.timeouts + tools.failures else "none failed"
        )
        grid.add_row(
            "tools",
            f"{tools.calls:,} calls of {_tool_kind(tools.calls, tools.calls_emulated)}, {tools.wait_s / tools.calls:.2f} s "
            f"each; at most {tools.waiting_most} episodes waited at once; {ended}",
        )
    grid.add_row("files", Text(directory))
    border = "green" if summary.ended == "finished" else "red"
    return Panel(grid, title=f"knittrans · {summary.name}", title_align="left", border_style=border, padding=(0, 1))


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


def size(count_bytes: float) -> str:
    """Bytes as a person says them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count_bytes < 1000 or unit == "GB":
            return f"{count_bytes:.0f} {unit}" if unit == "bytes" else f"{count_bytes:.1f} {unit}"
        count_bytes /= 1000
    raise AssertionError("unreachable")


def _times(record: RunRecord, elapsed_s: float) -> str:
    figures = record.figures
    if not figures.updates or figures.first_lease_s is None:
        return duration(elapsed_s)
    per_update_s = (figures.last_update_s - figures.first_lease_s) / figures.updates
    left_s = per_update_s * (record.config.train.updates - figures.updates)
    return f"{duration(elapsed_s)}, about {duration(left_s)} left" if left_s > 0 else duration(elapsed_s)


def _reward(record: RunRecord) -> str:
    rewards = record.figures.rewards[-RECENT_UPDATES:]
    return f"{sum(rewards) / len(rewards):.3f}" if rewards else "-"


def _heldout(record: RunRecord) -> str:
    version, questions, exact = record.figures.heldout
    return f"{exact / questions:.1%} (version {version})" if questions else "-"


def _staleness(record: RunRecord) -> str:
    if not record.figures.updates:
        return "-"
    means = record.figures.staleness_means()
    return (
        f"{means.gap:.2f} updates = in flight {means.in_flight:.2f} + in queue {means.in_queue:.2f}; "
        f"architectural {means.architectural:+.2f}"
    )


def _staleness_table(summary: Summary) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    for column in ("updates", "mean", "p50", "p95", "max"):
        table.add_column(column, justify="left" if column == "updates" else "right")

    def add(name: str, one: Distribution) -> None:
        table.add_row(name, f"{one.mean:.2f}", f"{one.p50:.2f}", f"{one.p95:.2f}", f"{one.max:.2f}")

    staleness = summary.staleness
    add("gap", staleness.gap)
    add("in flight", staleness.in_flight)
    add("in queue", staleness.in_queue)
    add("architectural", staleness.architectural)
    return Group(table)


def _tool_kind(calls: float, emulated: float) -> str:
    """What was called, emulated tools by that name."""
    if emulated >= calls:
        return "an EMULATED tool"
    return "tools" if not emulated else f"tools ({emulated:,.0f} of them EMULATED)"


def _live_tools(figures: dict[str, float]) -> str:
    calls, waiting = figures["tool_calls"], figures.get("tool_waiting", 0.0)
    kind = _tool_kind(calls, figures.get("tool_calls_emulated", 0.0))
    failed = figures.get("tool_timeouts", 0.0) + figures.get("tool_failures", 0.0)
    mean_s = figures.get("tool_wait_s", 0.0) / max(1.0, calls - waiting)
    return f"{waiting:.0f} episodes wait on {kind}; {calls:,.0f} calls, {mean_s:.2f} s each, {failed:.0f} failed"


def _late_compilations(count: int, named: Sequence[Recompilation]) -> Text:
    """What was compiled after the warm-up: how many, and the newest by name."""
    newest = f"; the newest: {named[-1].role}: {named[-1].program} (update {named[-1].update})" if named else ""
    return Text(f"{count} compiled after the warm-up{newest}", style="yellow")


def _accounts(accounts: dict[str, int]) -> str:
    return "  ".join(f"{name} {count:,}" for name, count in accounts.items() if count) or "none"
