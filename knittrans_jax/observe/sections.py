"""The sections of a run's report: each a pure function from the run's history to HTML, with its units and what it is over."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from knittrans_jax.observe import charts
from knittrans_jax.observe.charts import Axis, Series
from knittrans_jax.observe.history import RunHistory, count_mean
from knittrans_jax.observe.page import Key, figure, section, table
from knittrans_jax.observe.record import UpdateRecord
from knittrans_jax.observe.series import UPDATE_BINS, by_train_step, histogram, interval, smoothed, update_bins, wilson
from knittrans_jax.observe.summary import Summary
from knittrans_jax.observe.table import duration, size
from knittrans_jax.observe.timeline import KEYS, legend_note, timeline
from knittrans_jax.staleness import Distribution, Staleness

UPDATE = Axis("update")
OPEN = (("leased", 6), ("running", 0), ("ready", 4), ("admitted", 2))
"""Accounts of groups under way, with their colours."""
MAX_VALUES = 6
"""Values of an attribute drawn by themselves; the others together."""
OWN_FIGURES = (
    ("entropy", "Entropy of the policy", "nats per token"),
    ("grad_norm", "Gradient norm", "L2 norm before clipping"),
    ("clip_fraction", "Clipped ratios", "share of sampled tokens"),
    ("update_s", "Time of an update", "seconds from first chunk to update"),
)
"""The trainer's figures that are drawn, where they are there."""


def learning(history: RunHistory, summary: Summary) -> str:
    """Reward, held-out accuracy, the trainer's own figures."""
    updates = history.updates
    reward = charts.line_chart(
        "mean reward by update",
        [smoothed("mean of the update's trajectories", updates, lambda one: one.reward_mean, 0)],
        UPDATE,
        Axis("mean reward", low=0.0),
    )
    binned = len(updates) > UPDATE_BINS
    shares = [one.exact_share for one in summary.heldout]
    bands = [wilson(one.exact, one.questions) for one in summary.heldout]
    heldout = charts.line_chart(
        "held-out accuracy by version",
        [Series("exact answers", [one.version for one in summary.heldout], shares, 2, band=bands, dots=True)],
        Axis("version", low=0.0),
        Axis("held-out questions answered exactly", low=0.0, high=1.0, percent=True),
    )
    parts = [
        figure("Reward", reward, [Key("mean over updates", 0), Key("spread over updates", 0, "band")][: 1 + binned]),
        figure(
            "Held-out accuracy", heldout, [Key("exact answers", 2, "dot"), Key("95 % interval (Wilson)", 2, "band")]
        ),
    ]
    for name, title, unit in OWN_FIGURES:
        if any(one.metrics.get(name) is not None for one in updates):
            parts.append(figure(title, trainer_chart(updates, name, unit)))
    return section("Learning", "Rewards are those of the trajectories that each update trained on.", parts)


def trainer_chart(updates: Sequence[UpdateRecord], name: str, unit: str) -> str:
    """One of the trainer's figures over the updates."""

    def value(one: UpdateRecord) -> float:
        found = one.metrics.get(name)
        return math.nan if found is None else found

    return charts.line_chart(name, [smoothed(name, updates, value, 5)], UPDATE, Axis(unit, low=0.0))


def staleness(history: RunHistory, summary: Summary) -> str:
    """Staleness by cause: over time, its distribution, and the table of it."""
    updates, every = history.updates, history.record.config.batch.mini_batches
    steps = by_train_step(updates, every)
    if not steps:
        return section("Staleness, by cause", "", [])
    xs = [float(step[-1].update) for step in steps]

    def mean(name: str, step: Sequence[UpdateRecord]) -> float:
        total = sum(one.trajectories for one in step)
        return sum(one.staleness[name] * one.trajectories for one in step) / total

    def over_steps(name: str) -> list[float]:
        return [mean(name, step) for step in steps]

    causes = charts.area_chart(
        "staleness by cause",
        [Series("in queue", xs, over_steps("in_queue"), 4), Series("in flight", xs, over_steps("in_flight"), 0)],
        UPDATE,
        Axis("mean gap, updates", low=0.0),
        [Series("colocated gap", xs, over_steps("colocated_gap"), charts.INK, 1)],
    )
    architectural = charts.line_chart(
        "architectural staleness",
        [Series("architectural", xs, over_steps("architectural"), 1)],
        UPDATE,
        Axis("signed mean, updates", low=0.0, high=0.0),
    )
    rows = history.record.figures.staleness_rows()
    parts = [
        figure(
            "Gap by cause",
            causes,
            [
                Key("in flight", 0, "fill"),
                Key("in queue", 4, "fill"),
                Key("colocated gap", charts.INK, "line", charts.DASHES[1]),
            ],
        ),
        figure("Architectural: gap minus the colocated gap", architectural, [Key("mean by train step", 1)]),
        figure("Distribution of the gap", histogram("gap", rows[:, Staleness._fields.index("gap")], 0)),
        figure(
            "Distribution of architectural staleness",
            histogram("architectural", rows[:, Staleness._fields.index("architectural")], 1),
        ),
        _staleness_table(history, summary),
    ]
    note = (
        "How many updates the policy moved between sampling a trajectory's tokens and training on them; means over the "
        "trajectories of a train step. In flight: while it was sampled. In queue: while it waited, finished. Colocated gap: "
        f"what lock-step execution would give the same mini-batch. One train step is {every} updates."
    )
    return section("Staleness, by cause", note, parts)


def _staleness_table(history: RunHistory, summary: Summary) -> str:
    steps = history.record.figures.staleness(in_train_steps=True)

    def row(name: str, one: Distribution, in_steps: Distribution) -> list[str]:
        return [name, *(f"{value:.2f}" for value in (one.mean, one.p50, one.p95, one.max)), f"{in_steps.mean:.3f}"]

    names = (("gap", "gap"), ("in flight", "in_flight"), ("in queue", "in_queue"), ("worst token", "worst"))
    names += (("colocated gap", "colocated_gap"), ("architectural", "architectural"))
    rows = [row(title, getattr(summary.staleness, name), getattr(steps, name)) for title, name in names]
    clipped = summary.staleness.architectural_clipped_mean
    rows.append(
        ["architectural, clipped at 0", f"{clipped:.2f}", "", "", "", f"{steps.architectural_clipped_mean:.3f}"]
    )
    return table(
        "All consumed trajectories",
        ["updates", "mean", "p50", "p95", "max", "mean, train steps"],
        rows,
        note=f"{summary.staleness.trajectories:,} trajectories.",
    )


def accounts(history: RunHistory, summary: Summary) -> str:
    """Every group by account, and that the accounts add up; groups under way over time."""
    counted, launched = sum(summary.groups.values()), summary.groups_launched
    rows = [[name, f"{count:,}", share_of(count, launched)] for name, count in summary.groups.items()]
    rows.append(["sum of accounts", f"{counted:,}", share_of(counted, launched)])
    verdict = (
        f"They add up: {launched:,} groups were launched, each is in one account."
        if counted == launched
        else f"They do NOT add up: {launched:,} groups were launched, {counted:,} are in accounts. Please report this."
    )
    updates = history.updates
    xs = [one.time_s for one in updates]
    layers = [Series(name, xs, [float(one.accounts[name]) for one in updates], c) for name, c in OPEN[::-1]]
    open_groups = charts.area_chart(
        "groups under way", layers, Axis("seconds since the run began"), Axis("groups under way", low=0.0)
    )
    parts = [
        table("Accounts at the end", ["account", "groups", "share"], rows, last_is_sum=True, note=verdict),
        figure(
            "Groups under way, after each update", open_groups, [Key(name, colour, "fill") for name, colour in OPEN]
        ),
        table(
            "Again",
            ["", "number"],
            [
                ["prompts leased again after their group ended unused", f"{summary.group_retries:,}"],
                ["episodes sampled again within a group", f"{summary.episode_retries:,}"],
                ["different training prompts", f"{summary.prompts:,}"],
            ],
        ),
    ]
    return section(
        "Accounts of groups", "A group is the trajectories of one prompt. It is in exactly one account.", parts
    )


def composition(history: RunHistory) -> str:
    """What came early and what late in the train batch: attributes, lengths, rewards by mini-batch."""
    batches = history.by_mini_batch
    if not history.updates:
        return section("Composition of early and late mini-batches", "", [])
    names = [str(j + 1) for j in range(len(batches))]
    x = Axis(f"mini-batch of the train batch (1 is the first, {len(batches)} the last)")
    parts = []
    for attribute in sorted({name for one in batches for name in one.values}):
        values = sorted({value for one in batches for value in one.values.get(attribute, ())})
        layers = [
            (value, i, [one.values.get(attribute, {}).get(value, 0) / max(1, one.groups) for one in batches])
            for i, value in enumerate(values[:MAX_VALUES])
        ]
        rest = values[MAX_VALUES:]
        if rest:
            counts = [
                sum(one.values.get(attribute, {}).get(v, 0) for v in rest) / max(1, one.groups) for one in batches
            ]
            layers.append((f"{len(rest)} further values", MAX_VALUES, counts))
        chart = charts.column_chart(
            attribute, names, layers, x, Axis("share of groups", low=0.0, high=1.0, percent=True)
        )
        parts.append(figure(f"By {attribute}", chart, [Key(name, c, "fill") for name, c, _ in layers]))
    keys = (Key("10th to 90th percentile", 0, "band"), Key("median", 0), Key("mean", 0, "dot"))
    lengths = [interval(one.lengths) for one in batches]
    parts.append(
        figure(
            "By length",
            charts.interval_chart("length", names, lengths, 0, x, Axis("tokens of a trajectory", low=0.0)),
            keys,
        )
    )
    rewards = [interval(one.rewards) for one in batches]
    keys = (Key("10th to 90th percentile", 3, "band"), Key("median", 3), Key("mean", 3, "dot"))
    parts.append(
        figure("By reward", charts.interval_chart("reward", names, rewards, 3, x, Axis("reward", low=0.0)), keys)
    )
    first, last = batches[0], batches[-1]
    note = (
        "Admission takes what is ready first, within the rules, so early mini-batches could differ from late ones. Over all "
        f"train steps, the first mini-batch has {count_mean(first.lengths):.1f} tokens and reward "
        f"{count_mean(first.rewards):.3f} on average, the last {count_mean(last.lengths):.1f} and "
        f"{count_mean(last.rewards):.3f}."
    )
    return section("Composition of early and late mini-batches", note, parts)


def waits(history: RunHistory, summary: Summary) -> str:
    """What the trainer waited for."""
    updates = history.updates
    first_s = history.record.figures.first_lease_s
    trained_s = (history.record.figures.last_update_s - first_s) if updates and first_s is not None else 0.0
    names = (("groups", "groups to be admitted", 4), ("data", "payload to arrive", 0))
    bins, edges = update_bins(updates)
    layers = [
        (title, colour, [sum(one.waits_s.get(key, 0.0) for one in group) / len(group) for group in bins])
        for key, title, colour in names
    ]
    chart = charts.bar_chart("waits", edges, layers, UPDATE, Axis("seconds waited per update", low=0.0)) if bins else ""
    late = updates[2 * history.record.config.batch.mini_batches :]
    rows = [
        [
            "for groups to be admitted",
            f"{summary.trainer_wait_s.groups:.2f} s",
            share_of(summary.trainer_wait_s.groups, trained_s),
        ],
        [
            "for payload to arrive",
            f"{summary.trainer_wait_s.data:.2f} s",
            share_of(summary.trainer_wait_s.data, trained_s),
        ],
    ]
    late_waits = [sum(one.waits_s.get(key, 0.0) for one in late) for key, _, _ in names]
    if late:
        late_s = late[-1].time_s - updates[len(updates) - len(late) - 1].time_s
        rows.append(["for groups, after the warm-up", f"{late_waits[0]:.2f} s", share_of(late_waits[0], late_s)])
        rows.append(["for payload, after the warm-up", f"{late_waits[1]:.2f} s", share_of(late_waits[1], late_s)])
    parts = [
        figure("Waits", chart, [Key(title, colour, "fill") for _, title, colour in names]),
        table("In all", ["the trainer waited", "seconds", "of the time"], rows) if updates else "",
    ]
    tools = summary.tools
    if tools is not None:
        kind = "emulated: no tool was called, a drawn latency was waited"
        parts.append(
            table(
                "Episodes that waited for tools",
                ["", "number"],
                [
                    ["calls", f"{tools.calls:,}"],
                    [f"of which {kind}", f"{tools.calls_emulated:,}"],
                    ["seconds waited, all calls", f"{tools.wait_s:,.1f} s"],
                    ["episodes waiting at once, at most", f"{tools.waiting_most:,}"],
                    ["timed out, failed", f"{tools.timeouts:,}, {tools.failures:,}"],
                ],
                note="Waiting episodes hold no slot; evaluations included.",
            )
        )
    note = (
        "Seconds of the slowest training process. The first update's wait for groups includes the start of the rollout hosts. "
        "Shares are of the time from the first lease to the last update; the warm-up is the first two train steps."
    )
    return section("What the trainer waited for", note, parts)


def payload(history: RunHistory, summary: Summary) -> str:
    """Bytes and images: what was moved and encoded, against what is unique and what a naive system would move."""
    updates = history.updates
    if not updates:
        return section("Bytes and images", "", [])
    unique = max(1, summary.bytes.payload_unique)
    naive = sum(one.payload_naive for one in updates)
    amounts = (
        ("pulled by training processes", summary.bytes.payload_pulled),
        ("unique: every image of a mini-batch once", summary.bytes.payload_unique),
        ("naive: each image at every showing, float32", naive),
    )
    relayed = summary.bytes.payload_relayed
    if relayed:
        amounts = (*amounts, ("passed on between training processes", relayed))
    rows = [[name, size(count), size(count / len(updates)), f"{count / unique:.2f}"] for name, count in amounts]
    rows.append(["through the scheduler", size(summary.bytes.payload_through_scheduler), "", ""])
    xs = [float(one.update) for one in updates]
    chart = charts.line_chart(
        "bytes by update",
        [
            Series("naive", xs, [one.payload_naive / 1e6 for one in updates], 1, 1),
            Series("pulled", xs, [one.payload_pulled / 1e6 for one in updates], 0),
            Series("unique", xs, [one.payload_unique / 1e6 for one in updates], 2, 2),
        ],
        UPDATE,
        Axis("payload per mini-batch, MB", low=0.0),
    )
    dashes = charts.DASHES
    keys = (Key("naive", 1, "line", dashes[1]), Key("pulled", 0), Key("unique", 2, "line", dashes[2]))
    encoder = summary.encoder
    images = [
        [
            "images",
            f"{encoder.images_unique:,}",
            f"{encoder.images_referenced:,}",
            ratio(encoder.images_referenced, encoder.images_unique),
        ],
        [
            "patches",
            f"{encoder.patches_encoded:,}",
            f"{encoder.patches_naive:,}",
            ratio(encoder.patches_naive, encoder.patches_encoded),
        ],
    ]
    parts = [
        table("Payload bytes", ["", "in all", "per update", "of unique"], rows),
        figure("Payload per mini-batch", chart, keys),
        table("Images", ["", "encoded", "shown", "times fewer"], images) if encoder.images_referenced else "",
    ]
    return section("Bytes and images", "From storage units to training processes, headers not counted.", parts)


def lives(history: RunHistory) -> str:
    """Time lines of a first, a middle and a last train step."""
    kept, figures = history.lives, history.record.figures
    start_s = figures.start_s or 0.0
    wanted = dict.fromkeys(kept.near(step) for step in (0, kept.train_steps // 2, kept.train_steps - 2))
    parts = []
    for step in wanted:
        if step is None:
            continue
        groups = kept.by_step[step]
        title = f"Groups leased during train step {step + 1}"
        chart = timeline(title, groups, history.published, start_s, figures.last_s)
        parts.append(figure(title, chart, KEYS, legend_note(groups)))
    note = (
        "A row is a group, from its lease to the update that consumed it. trace.json has more, and the trainer's side."
    )
    if not parts:
        return section("Time line", "No group was launched.", ['<p class="soft">Nothing to show.</p>'])
    return section("Time line", note, parts)


def counters(history: RunHistory) -> str:
    """Everything that every role counted, folded away."""
    rows = [
        [f"{role}: {name}", f"{value:,.6g}"]
        for role, counts in sorted(history.record.figures.counters.items())
        for name, value in sorted(counts.items())
    ]
    if not rows:
        return ""
    summary = "<summary>What every role counted (its last report)</summary>"
    return f"<details>{summary}{table('Counters', ['role and name', 'value'], rows)}</details>"


def compilations(history: RunHistory, summary: Summary) -> str:
    """Programs compiled by role; those after the warm-up by name, as a warning."""
    late = summary.compilations_after_warmup
    rows = [
        [role, f"{count:,}", "-" if late is None else f"{summary.compilations_after_warmup_by_role.get(role, 0):,}"]
        for role, count in summary.compilations_by_role.items()
    ]
    warned = [[one.role, f"{one.update:,}", one.program] for one in summary.recompilations]
    if late is None:
        verdict = "The run ended within its warm-up, the first two train steps."
    elif late:
        verdict = (
            f'<b class="warn">Warning: {late:,} after the warm-up.</b> A shape varies that should not; each costs time.'
        )
    else:
        verdict = "None after the warm-up, the first two train steps."
    parts = [
        table("Programs compiled", ["role", "in all", "after the warm-up"], rows),
        table("After the warm-up", ["role", "update", "program and shapes"], warned, text=(2,)),
    ]
    return section("Compilations", verdict, parts or ['<p class="soft">None was reported.</p>'])


# --- small things --------------------------------------------------------------------------------------------------------


def share_of(part: float, whole: float) -> str:
    """A share in percent; a dash of nothing."""
    return f"{part / whole:.1%}" if whole else "-"


def ratio(above: float, below: float) -> str:
    """How many times; a dash of nothing."""
    return f"{above / below:.1f}" if below else "-"


def headline(summary: Summary) -> list[tuple[str, str]]:
    """The figures of the tiles at the top, most wanted first."""
    found: Iterable[tuple[str | None, str]] = (
        (_percent(summary.heldout_exact), f"held-out exact ({summary.heldout_questions:,} questions)"),
        (None if summary.reward_mean is None else f"{summary.reward_mean:.3f}", "reward, last train step"),
        (None if summary.reward_mean_first is None else f"{summary.reward_mean_first:.3f}", "reward, first train step"),
        (f"{summary.updates:,}", f"updates, {summary.train_steps:,} train steps"),
        (
            f"{summary.staleness.architectural.mean:+.2f}" if summary.trajectories else None,
            "architectural staleness, updates",
        ),
        (f"{summary.staleness.gap.mean:.2f}" if summary.trajectories else None, "gap, updates"),
        (f"{summary.trainer_wait_s.groups:.1f} s" if summary.updates else None, "trainer waited for groups"),
        (f"{summary.trainer_wait_s.data:.1f} s" if summary.updates else None, "trainer waited for payload"),
        (None if summary.tokens_per_s is None else f"{summary.tokens_per_s:,.0f}", "tokens trained on per second"),
        (
            None
            if not summary.encoder.patches_encoded
            else f"{summary.encoder.patches_naive / summary.encoder.patches_encoded:.1f}x",
            "fewer patches encoded",
        ),
        (
            None if summary.compilations_after_warmup is None else f"{summary.compilations_after_warmup}",
            "compiled after warm-up",
        ),
        (f"{len(summary.resumptions)}" if summary.resumptions else None, "times resumed from a checkpoint"),
        (
            f"{sum(one.updates_discarded for one in summary.resumptions):,}" if summary.resumptions else None,
            "updates thrown away by that, not shown here",
        ),
        (duration(summary.wall_s), "from first to last event"),
    )
    return [(value, name) for value, name in found if value is not None]


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"
