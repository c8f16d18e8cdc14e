"""`report.html`: what a run came to, on one page that needs nothing else.

What it guarantees: a pure function of the run's history and summary (the same log gives the same page); one file, no network,
no script; a run that failed or was interrupted has a report too, which says so first and leaves out what there is not.
"""

from __future__ import annotations

import datetime
import html

from knittrans_jax.config import config_to_yaml
from knittrans_jax.observe import sections
from knittrans_jax.observe.history import RunHistory
from knittrans_jax.observe.page import page, tiles
from knittrans_jax.observe.summary import Summary

WORDS = (
    ("group", "the trajectories sampled from one prompt; the atom of admission"),
    ("train batch", "groups that together satisfy the batch's rules, in mini-batches"),
    ("mini-batch", "the data of exactly one update"),
    ("version", "number of updates applied"),
    ("staleness (gap)", "versions between sampling a token and training on it, mean over a trajectory's tokens"),
    ("architectural", "the gap minus what lock-step colocated execution gives the same mini-batch"),
    ("warm-up", "the first two train steps, in which programs are compiled"),
)


def report(history: RunHistory, summary: Summary) -> bytes:
    """The page of a run."""
    config = history.record.config
    body = [
        f"<header><h1>{html.escape(summary.name)}</h1>",
        f'<p>{ended_badge(summary)} <span class="soft">{html.escape(_about(history))}</span></p></header>',
        tiles(sections.headline(summary)),
        sections.learning(history, summary),
        sections.staleness(history, summary),
        sections.accounts(history, summary),
        sections.composition(history),
        sections.waits(history, summary),
        sections.payload(history, summary),
        sections.lives(history),
        sections.compilations(history, summary),
        "<section><h2>Words and configuration</h2><dl>",
        *(f"<dt>{html.escape(word)}</dt><dd>{html.escape(meaning)}</dd>" for word, meaning in WORDS),
        "</dl><details><summary>The resolved configuration</summary>",
        f"<pre>{html.escape(config_to_yaml(config))}</pre></details>",
        sections.counters(history),
        "</section>",
    ]
    return page(f"{summary.name}: report", body)


def ended_badge(summary: Summary) -> str:
    """How the run ended, coloured."""
    css = "good" if summary.ended == "finished" else "bad" if summary.ended.startswith("error") else "warn"
    return f'<span class="badge {css}">{html.escape(summary.ended)}</span>'


def _about(history: RunHistory) -> str:
    config, start_s = history.record.config, history.record.figures.start_s
    when = "" if start_s is None else f"{datetime.datetime.fromtimestamp(start_s, datetime.UTC):%Y-%m-%d %H:%M} UTC, "
    batch = config.batch
    return (
        f"{when}task {config.task.name}, model {config.model.preset}, {batch.groups} groups of "
        f"{batch.trajectories_per_group} in {batch.mini_batches} mini-batches, policy {config.admission.policy}, schedule "
        f"{config.admission.schedule}, seed {config.seed}"
    )
