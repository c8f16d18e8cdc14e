"""`knittrans simulate`: policies on workloads, each at every look-ahead, in as many processes as the file says.

The file is checked whole, each workload under each policy, before anything is simulated. Which figure is what:

* `reduction_vs_batch_look_ahead`: our least stale setting with steps at most 5 % longer than `train_batch` has with one batch
  of look-ahead, against that;
* `reduction_vs_fastest`: our least stale setting within 2 % of `train_batch`'s fastest step, against that fastest setting (the
  least stale of those that are equally fast);
* `reduction_at_equal_allowance`: the same, with `train_batch`'s least stale setting within 2 % of its fastest;
* `auto`: `mini_batch` with `auto` look-ahead, beside its best fixed look-ahead, the least stale within 2 % of the fastest;
* `lower_bound`: `bound.lower_bound` for a trainer that waits 2 % of the time (with `publish: update`: never).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import threading
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from knittrans_jax.config import ConfigError, PositiveInt, Section, apply_override
from knittrans_jax.simulate.bound import lower_bound
from knittrans_jax.simulate.sweep import (
    NEAR_BATCH_LOOK_AHEAD,
    NEAR_FASTEST,
    Sweep,
    fastest,
    least_stale,
)
from knittrans_jax.simulate.workloads import (
    EVERYTHING,
    Pace,
    Point,
    Publish,
    Setting,
    Workload,
    config_of,
    measure,
    rules_for,
)
from knittrans_jax.strict_yaml import convert_strictly, parse_yaml, short

OURS, BASELINE = "mini_batch", "train_batch"
BOTH: tuple[Publish, ...] = ("train_batch", "update")
DEADLINE_S = 3600.0
"""A whole suite's; it takes minutes."""
BOUND_IDLE = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
"""Waiting, as a share of an ideal step, at which the lower bound is drawn."""

PolicyName = Literal["mini_batch", "train_batch", "proportional", "fifo"]


class SuiteConfig(Section, frozen=True):
    """`library` defines workloads; `workloads` names those to run (null: all). `workers` are processes."""

    pace: Pace
    library: dict[str, Workload]
    policies: list[PolicyName] = msgspec.field(default_factory=lambda: list(typing.get_args(PolicyName)))
    publish: list[Publish] = msgspec.field(default_factory=lambda: list(BOTH))
    """When weights are published; the first one's figures are the headline."""
    workloads: list[str] | None = None
    workers: PositiveInt = 2

    @property
    def names(self) -> list[str]:
        """The workloads to run."""
        return list(self.library) if self.workloads is None else self.workloads


class Auto(msgspec.Struct, frozen=True, kw_only=True):
    """`auto` look-ahead beside the best fixed one."""

    step_time_s: float
    architectural_mean_updates: float
    look_ahead_groups: float
    trainer_idle_share: float
    best_fixed: Point
    staleness_over_best_fixed: float
    step_time_over_best_fixed: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A workload's figures with one way of publishing; see the module's opening."""

    publish: str
    policies: dict[str, list[Point]]
    reduction_vs_batch_look_ahead: float | None
    reduction_vs_fastest: float | None
    reduction_at_equal_allowance: float | None
    auto: Auto | None
    lower_bound: float
    lower_bound_by_step_time: list[tuple[float, float]]
    """(step time in seconds, updates)."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One policy on one workload; `limits_s`: what its sweep has to keep besides its own. `publish`: what it goes by."""

    name: str
    workload: Workload
    pace: Pace
    policy: str
    publish: Publish
    limits_s: tuple[float, ...]


def load_suite(path: str | Path, overrides: Sequence[str] = ()) -> SuiteConfig:
    """Reads, overrides and checks a suite.

    Raises:
        ConfigError: as for a run's configuration; the message names the key, the value and the rule.
    """
    path = Path(path)
    try:
        raw = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"suite {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"suite {path}: not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"suite {path}: expected a mapping, got {type(raw).__name__}")
    for override in overrides:
        apply_override(raw, override)
    try:
        suite = convert_strictly(raw, SuiteConfig)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_suite(suite)
    return suite


def check_suite(suite: SuiteConfig) -> None:
    """Checks what types cannot say, and each workload as the run that it stands for. Raises `ConfigError`."""
    pace = suite.pace
    if pace.groups % pace.mini_batches:
        raise ConfigError(
            f"pace.groups: must be a multiple of pace.mini_batches = {pace.mini_batches} (value {pace.groups})"
        )
    if pace.publish_s > pace.train_s:
        raise ConfigError(
            f"pace.publish_s: a version is on its way no longer than an update takes, pace.train_s = {pace.train_s} "
            f"(value {pace.publish_s})"
        )
    for key, given in (("policies", suite.policies), ("publish", suite.publish), ("workloads", suite.names)):
        if not given or len(set(given)) != len(given):
            raise ConfigError(f"{key}: at least one, none twice (value {short(given)})")
    for name in suite.names:
        if name not in suite.library:
            raise ConfigError(f"workloads: {name!r} is not in library, which has {', '.join(suite.library)}")
    for name, workload in suite.library.items():
        _check_workload(f"library.{name}", workload, pace, suite.policies)


def _check_workload(key: str, workload: Workload, pace: Pace, policies: Sequence[str]) -> None:
    values = set(workload.latency)
    expected = {EVERYTHING} if workload.domain is None else set(workload.quotas.get(workload.domain, {}))
    if workload.domain is not None and not expected:
        raise ConfigError(f"{key}.domain: look-ahead by domain needs quotas for it (value {workload.domain!r})")
    if values != expected:
        raise ConfigError(
            f"{key}.latency: needs one of each of {', '.join(sorted(expected))} (value {short(sorted(values))})"
        )
    for value, share in workload.dropped.items():
        if value not in values or share >= 1.0:
            raise ConfigError(f"{key}.dropped.{value}: a share below 1 of a value that has a latency (value {share})")
    for policy in policies:
        try:
            rules_for(config_of(Setting(workload, pace, policy, 0)), workload, pace)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error


def run_suite(
    suite: SuiteConfig, progress: Callable[[str, int, int], None], arguments: Sequence[str] = ()
) -> dict[str, Any]:
    """Runs it all.

    Args:
        suite: what to run.
        progress: hears what is done: (what, jobs done, jobs in all).
        arguments: of the command, to be kept with the result.

    Returns:
        The JSON object of `knittrans simulate`, as a plain mapping.
    """
    began_s = time.monotonic()
    results = _run_jobs(suite, progress)
    workloads = []
    for name in suite.names:
        by_publish = [_result(suite, name, publish, results) for publish in suite.publish]
        headline = msgspec.to_builtins(by_publish[0])
        others = {one.publish: msgspec.to_builtins(one) for one in by_publish[1:]}
        workloads.append({"name": name, **headline, "other_publish": others})
    return {
        "command": "simulate",
        "arguments": list(arguments),
        "pace": msgspec.to_builtins(suite.pace),
        "workloads": workloads,
        "wall_s": time.monotonic() - began_s,
    }


# --- jobs ----------------------------------------------------------------------------------------------------------------

Key = tuple[str, str]
Done = tuple[dict[Publish, list[Point]], dict[Publish, Point] | None]


def run_job(job: Job) -> Done:
    """The sweep, and for `OURS` the point of `auto` look-ahead."""
    sweep = Sweep(job.workload, job.pace, job.policy, job.publish)
    sweep.run(job.limits_s)
    auto = measure(Setting(job.workload, job.pace, job.policy, "auto")) if job.policy == OURS else None
    return {publish: sweep.points_of(publish) for publish in BOTH}, auto


def _end_with_parent() -> None:
    """In a worker: when the command is killed its workers end too, instead of finishing what nobody waits for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _run_jobs(suite: SuiteConfig, progress: Callable[[str, int, int], None]) -> dict[Key, Done]:
    """All jobs; the baseline of a workload first, since the limits of the others come from it."""

    def job(name: str, policy: str, limits_s: tuple[float, ...] = ()) -> Job:
        return Job(name, suite.library[name], suite.pace, policy, suite.publish[0], limits_s)

    # What takes long goes first, so that no worker is left with it at the end; a baseline before what waits for it.
    names = sorted(suite.names, key=lambda one: (suite.library[one].domain is None, -len(suite.library[one].quotas)))
    first = BASELINE if BASELINE in suite.policies else suite.policies[0]
    waiting = [job(name, first) for name in names]
    total = len(waiting) * len(suite.policies)
    done: dict[Key, Done] = {}
    end_s = time.monotonic() + DEADLINE_S
    context = multiprocessing.get_context("spawn")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the workers are what runs in parallel
    with concurrent.futures.ProcessPoolExecutor(suite.workers, context, _end_with_parent) as pool:
        running: dict[concurrent.futures.Future[Done], Job] = {}
        while waiting or running:
            while waiting and len(running) < suite.workers:
                one = waiting.pop(0)
                running[pool.submit(run_job, one)] = one
            timeout_s = max(0.0, end_s - time.monotonic())
            finished, _ = concurrent.futures.wait(running, timeout_s, concurrent.futures.FIRST_COMPLETED)
            if not finished:
                for future in running:
                    future.cancel()
                raise TimeoutError(f"simulate: {len(running)} jobs were not done after {DEADLINE_S:.0f} s")
            for future in finished:
                one = running.pop(future)
                done[one.name, one.policy] = future.result()
                progress(f"{one.name}, {one.policy}", len(done), total)
                if one.policy == first:
                    limits_s = _limits(done[one.name, one.policy][0][suite.publish[0]], suite.pace)
                    followers = [policy for policy in suite.policies if policy != first]
                    # Figures are read off our own curve at these limits; the other curves are only shown.
                    waiting += [job(one.name, policy, limits_s if policy == OURS else ()) for policy in followers]
                    waiting.sort(key=lambda later: names.index(later.name))
    return done


def _limits(points: Sequence[Point], pace: Pace) -> tuple[float, ...]:
    """Step times that the figures of the other policies are read at."""
    limits = [NEAR_FASTEST * fastest(points).step_time_s]
    batch = _at_batch_look_ahead(points, pace)
    if batch is not None:
        limits.append(NEAR_BATCH_LOOK_AHEAD * batch.step_time_s)
    return tuple(limits)


def _at_batch_look_ahead(points: Sequence[Point], pace: Pace) -> Point | None:
    return next((one for one in points if one.look_ahead == pace.groups), None)


# --- figures -------------------------------------------------------------------------------------------------------------


def _result(suite: SuiteConfig, name: str, publish: Publish, results: dict[Key, Done]) -> Result:
    pace, workload = suite.pace, suite.library[name]
    policies = {policy: results[name, policy][0][publish] for policy in suite.policies}
    ours, baseline = policies.get(OURS), policies.get(BASELINE)
    idle = BOUND_IDLE if publish == "train_batch" else (0.0,)
    bound = [
        (pace.ideal_step_s * (1 + share), lower_bound(workload, pace, publish, share * pace.ideal_step_s))
        for share in idle
    ]
    against_batch = against_fastest = equal = None
    if ours and baseline:
        batch, fast = _at_batch_look_ahead(baseline, pace), fastest(baseline)
        limit_s = NEAR_FASTEST * fast.step_time_s
        if batch is not None:
            against_batch = reduction(least_stale(ours, NEAR_BATCH_LOOK_AHEAD * batch.step_time_s), batch)
        against_fastest = reduction(least_stale(ours, limit_s), fast)
        equal = reduction(least_stale(ours, limit_s), least_stale(baseline, limit_s))
    auto = None if ours is None else _auto(results[name, OURS][1], publish, ours)
    return Result(
        publish=publish,
        policies=policies,
        reduction_vs_batch_look_ahead=against_batch,
        reduction_vs_fastest=against_fastest,
        reduction_at_equal_allowance=equal,
        auto=auto,
        lower_bound=bound[idle.index(0.02)][1] if 0.02 in idle else bound[0][1],
        lower_bound_by_step_time=bound,
    )


def reduction(ours: Point, theirs: Point) -> float | None:
    """How much of their staleness ours avoids; None where they have none to avoid."""
    if theirs.architectural_mean_updates <= 0.0:
        return None
    return 1.0 - ours.architectural_mean_updates / theirs.architectural_mean_updates


def _auto(found: dict[Publish, Point] | None, publish: Publish, fixed: Sequence[Point]) -> Auto | None:
    if found is None:
        return None
    auto = found[publish]
    best = least_stale(fixed, NEAR_FASTEST * fastest(fixed).step_time_s)
    return Auto(
        step_time_s=auto.step_time_s,
        architectural_mean_updates=auto.architectural_mean_updates,
        look_ahead_groups=auto.look_ahead_groups,
        trainer_idle_share=auto.trainer_idle_share,
        best_fixed=best,
        staleness_over_best_fixed=auto.architectural_mean_updates / best.architectural_mean_updates
        if best.architectural_mean_updates > 0
        else 0.0,
        step_time_over_best_fixed=auto.step_time_s / best.step_time_s,
    )
