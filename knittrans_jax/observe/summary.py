"""`summary.json`: what a run came to, as a pure function of its events.

Every figure says what it is over: groups by account add up to `groups_launched`; staleness is over all consumed trajectories,
in updates; waits and bytes are sums over updates; a figure with nothing to be taken over is null, never a made-up zero.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from knittrans_jax.admission.events import AnyEvent
from knittrans_jax.admission.figures import REMAINDER
from knittrans_jax.admission.lineage import Resumption, final_lineage
from knittrans_jax.config import Config
from knittrans_jax.observe.record import Recompilation, RunRecord
from knittrans_jax.staleness import StalenessSummary


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Held-out questions at one version."""

    version: int
    questions: int
    exact: int
    exact_share: float


class Waits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the slowest training process waited, summed over updates: for payload, and for groups to be admitted."""

    data: float
    groups: float


class Bytes(msgspec.Struct, frozen=True, kw_only=True):
    """Payload bytes: pulled from storage units by training processes, of which unique, passed on between training processes
    (`train.transfer: gather`), and those that the scheduler ever received.
    """

    payload_pulled: int
    payload_unique: int
    payload_relayed: int = 0
    payload_through_scheduler: int


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    """Images and patches summed over mini-batches. `naive` encodes every reference of every trajectory."""

    images_unique: int
    images_referenced: int
    patches_encoded: int
    patches_naive: int


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """Tool calls of all episodes, evaluations included; `calls_emulated` of them called no tool but waited a drawn latency."""

    calls: int
    calls_emulated: int
    wait_s: float
    """Summed over the calls that ended."""
    waiting_most: int
    """Most episodes that waited at once (of several hosts: the sum of each one's most)."""
    waits_in_slot: int
    """Waits that kept their slot because `rollout.tool_waits` others were without one."""
    timeouts: int
    failures: int
    tokens_prefilled_again: int


class Checkpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoints of the final lineage: how many became whole, the newest one, and what they took from the trainer."""

    count: int
    version: int | None
    size_bytes: int
    stall_s: float
    """Of the slowest training process's main thread, summed."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """See the module's opening. Figures are those of the final lineage; `resumptions` says what was thrown away."""

    name: str
    ended: str
    """`finished`, `interrupted`, or the error that ended the run."""
    updates: int
    train_steps: int
    groups: dict[str, int]
    """Every group by account; the values add up to `groups_launched`."""
    groups_launched: int
    group_retries: int
    episode_retries: int
    trajectories: int
    prompts: int
    """Different training prompts that were launched."""
    reward_mean: float | None
    """Mean reward of the trajectories of the last train step's updates."""
    reward_mean_first: float | None
    """The same of the first train step."""
    heldout_exact: float | None
    """Share of exact answers in the newest evaluation."""
    heldout_questions: int
    heldout_version: int | None
    heldout: list[Evaluation]
    staleness: StalenessSummary
    trainer_wait_s: Waits
    bytes: Bytes
    encoder: Encoder
    tools: Tools | None
    """Null when no episode called a tool."""
    updates_skipped: int
    """Updates left out because a loss or gradient was not finite (`train.on_nonfinite: skip`); they count as versions."""
    logprob_mismatch: float | None
    """Mean absolute difference of trainer's and sampler's log-prob, over tokens sampled by the version that trained on them."""
    tokens_per_s: float | None
    """Tokens of consumed trajectories, prompts included, per second from the first lease to the last update."""
    sampled_tokens_per_s: float | None
    compilations: int
    compilations_after_warmup: int | None
    """Null when the run ended within its warm-up, the first two train steps."""
    compilations_by_role: dict[str, int]
    compilations_after_warmup_by_role: dict[str, int]
    recompilations: list[Recompilation]
    """The first of those after the warm-up, by name and shape."""
    eval_held_s: float
    """Seconds for which hosts held a version for evaluation."""
    checkpoints: Checkpoints
    resumptions: list[Resumption]
    """Every time that the run was resumed, and what that threw away."""
    remainder: dict[str, int] | None
    """Prompts of a finite data set (times epochs) that no train batch could take, by kind; null without `train.epochs`."""
    wall_s: float
    """From the first event to the last, without the time for which the run was down."""


def summarise(events: Iterable[AnyEvent], config: Config) -> Summary:
    """The summary of a log's events."""
    record, lineage = RunRecord(config), final_lineage(events)
    record.resumptions = lineage.resumptions
    for event in lineage.events:
        record.apply(event)
    return summary_of(record)


def summary_of(record: RunRecord, ended: str | None = None) -> Summary:
    """The summary of a record, at whatever point it is. `ended`: why the run ended, if no event says so."""
    figures, config = record.figures, record.config
    batch = config.batch.mini_batches
    version, questions, exact = figures.heldout
    compilations = record.compilations
    trained_s = figures.trained_s
    scheduler = figures.counters.get("scheduler", {})
    return Summary(
        name=config.name,
        ended=record.ended or ended or "still running, or ended without a word",
        updates=figures.updates,
        train_steps=figures.updates // batch,
        groups=dict(record.accounts),
        groups_launched=record.launched,
        group_retries=record.retries,
        episode_retries=figures.episode_retries,
        trajectories=figures.trajectories,
        prompts=len(record.prompts),
        reward_mean=_mean(figures.rewards[-batch:]),
        reward_mean_first=_mean(figures.rewards[:batch]),
        heldout_exact=exact / questions if questions else None,
        heldout_questions=questions,
        heldout_version=version if questions else None,
        heldout=[
            Evaluation(version=v, questions=q, exact=x, exact_share=x / q)
            for v, (q, x, _) in sorted(figures.evals.items())
            if q
        ],
        staleness=figures.staleness(),
        trainer_wait_s=Waits(data=figures.waits_s["data"], groups=figures.waits_s["groups"]),
        bytes=Bytes(
            payload_pulled=figures.pulled_bytes,
            payload_unique=figures.unique_bytes,
            payload_relayed=figures.relayed_bytes,
            payload_through_scheduler=int(scheduler.get("payload_through_scheduler", 0)),
        ),
        encoder=Encoder(
            images_unique=figures.images_unique,
            images_referenced=figures.images_referenced,
            patches_encoded=figures.patches_encoded,
            patches_naive=figures.patches_naive,
        ),
        tools=_tools(figures.counters),
        updates_skipped=sum(one.get("update_skipped", 0.0) > 0 for one in figures.metrics),
        logprob_mismatch=token_mean(figures.metrics, "logprob_mismatch", "fresh_tokens"),
        tokens_per_s=record.tokens / trained_s if trained_s > 0 else None,
        sampled_tokens_per_s=figures.sampled_tokens / trained_s if trained_s > 0 else None,
        compilations=sum(one.total for one in compilations.values()),
        compilations_after_warmup=sum(c.after_warmup for c in compilations.values()) if record.warm else None,
        compilations_by_role={role: one.total for role, one in sorted(compilations.items())},
        compilations_after_warmup_by_role={
            role: one.after_warmup for role, one in sorted(compilations.items()) if record.warm
        },
        recompilations=list(record.recompilations),
        eval_held_s=figures.eval_held_s,
        checkpoints=Checkpoints(
            count=figures.checkpoints,
            version=figures.checkpoint_version,
            size_bytes=figures.checkpoint_bytes,
            stall_s=figures.checkpoint_stall_s,
        ),
        resumptions=list(record.resumptions),
        remainder=_remainder(scheduler) if config.train.epochs is not None else None,
        wall_s=record.elapsed_s,
    )


def _remainder(scheduler: dict[str, float]) -> dict[str, int]:
    """From the scheduler's last counters."""
    return {
        name.removeprefix(REMAINDER): int(count)
        for name, count in scheduler.items()
        if name.startswith(REMAINDER) and count
    }


def _tools(counters: dict[str, dict[str, float]]) -> Tools | None:
    """From the last counters of each role."""

    def total(name: str) -> float:
        return sum(one.get(f"tool_{name}", 0.0) for role, one in counters.items() if role.startswith("rollout-"))

    if not total("calls"):
        return None
    return Tools(
        calls=int(total("calls")),
        calls_emulated=int(total("calls_emulated")),
        wait_s=total("wait_s"),
        waiting_most=int(total("waiting_most")),
        waits_in_slot=int(total("waits_in_slot")),
        timeouts=int(total("timeouts")),
        failures=int(total("failures")),
        tokens_prefilled_again=int(total("prefilled_again")),
    )


def token_mean(metrics: list[dict[str, float]], name: str, tokens: str) -> float | None:
    """Mean of a per-token figure over updates, weighted by their numbers of tokens; None where there are none."""
    pairs = [
        (one[name], one[tokens])
        for one in metrics
        if one.get(tokens, 0.0) > 0 and math.isfinite(one.get(name, math.nan))
    ]
    weight = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / weight if weight else None


def summary_to_dict(summary: Summary) -> dict[str, Any]:
    """The summary as it stands in `summary.json`."""
    return msgspec.to_builtins(summary)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: readers see the old content or the new."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_summary(path: Path, summary: Summary) -> None:
    """Writes `summary.json`."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
