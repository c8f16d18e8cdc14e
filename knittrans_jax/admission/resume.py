"""Whether a run may go on from its log: what of its configuration must be as it was, and why it may not be resumed at all.

The event log is the one source of truth of a run. A checkpoint holds the training state, and names the position in the log that
it belongs to: the plan whose update led to it. Everything else (accounts, prompt order, evaluations, train batch) follows from
the events.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.log import ReadLog, read_log
from knittrans_jax.config import Config, ConfigError, config_to_dict

FIXED = ("seed", "task", "model", "batch")
"""Sections that the events and the parameters of a run depend on. Others may change: timeouts, mesh, hosts, updates, ..."""


def log_to_resume(config: Config, directory: Path, *, goes_on: bool) -> ReadLog | None:
    """The log of the run in this folder, if it is to be gone on with; None: there is none, and the run begins.

    Args:
        config: as it is now.
        directory: the run's folder.
        goes_on: False leaves a log that is there alone.

    Raises:
        ConfigError: the run has finished, or its configuration was another one.
        LogError: the log is damaged.
    """
    path = directory / "events.log"
    if not goes_on or not path.exists():
        return None
    log = read_log(path)
    if not log.events:
        path.unlink()  # its scheduler died before the first event
        return None
    check_resume(config, log.events)
    return log


def check_resume(config: Config, events: Sequence[ev.AnyEvent]) -> None:
    """Raises `ConfigError` when a run with these events cannot go on with this configuration."""
    begun = next((event for event in reversed(events) if isinstance(event, ev.RunStarted | ev.Resumed)), None)
    if begun is None or not isinstance(events[0], ev.RunStarted):
        raise ConfigError(
            f"resume: the event log of run {config.name} does not begin with a configuration; it is not one"
        )
    now = config_to_dict(config)
    for section in FIXED:
        key, before, after = _first_difference(section, begun.config.get(section), now[section])
        if key:
            raise ConfigError(
                f"{key}: was {before!r} when run {config.name} began; a resumed run keeps {', '.join(FIXED)} (value {after!r})"
            )
    epochs = 1 + max((event.epoch for event in events if isinstance(event, ev.Leased)), default=-1)
    if config.train.epochs is not None and config.train.epochs < epochs:
        raise ConfigError(
            f"train.epochs: run {config.name} has launched prompts of {epochs} epochs already (value {config.train.epochs})"
        )
    oldest = max((event.oldest for event in events if isinstance(event, ev.Checkpointed)), default=0)
    if config.train.updates < oldest:
        raise ConfigError(
            f"train.updates: the oldest checkpoint of run {config.name} is of version {oldest} (value {config.train.updates})"
        )
    bound = config.admission.staleness_bound
    if bound is not None:
        oldest_tokens: dict[int, int] = {}
        for event in events:
            if isinstance(event, ev.Ready):
                oldest_tokens[event.group.group_id] = min(one.version_min for one in event.group.trajectories)
            elif isinstance(event, ev.Admitted):
                stalest = max(event.plan.update - oldest_tokens[group.group_id] for group in event.plan.groups)
                if stalest > bound:
                    raise ConfigError(
                        f"admission.staleness_bound: run {config.name} has admitted groups {stalest} updates old; a resumed "
                        f"run's bound cannot be below that (value {bound})"
                    )
    version = sum(1 if isinstance(event, ev.Consumed) else 0 for event in events)
    if isinstance(events[-1], ev.RunEnded) and events[-1].reason == "finished":
        ends = {key: (begun.config["train"].get(key), now["train"][key]) for key in ("updates", "epochs")}
        if all(before == after or (None not in (before, after) and after < before) for before, after in ends.values()):
            raise ConfigError(
                f"resume: run {config.name} has finished, after {version} updates; to train on, raise train.updates or "
                f"train.epochs; to begin anew, leave resume out (value {config.resume})"
            )


def _first_difference(key: str, before: Any, after: Any) -> tuple[str, Any, Any]:
    """The first key that differs, and both values; an empty key: none."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in [*after, *(name for name in before if name not in after)]:
            found = _first_difference(f"{key}.{name}", before.get(name), after.get(name))
            if found[0]:
                return found
        return "", None, None
    same = before == after or (isinstance(before, list | tuple) and list(before) == list(after or ()))
    return ("", None, None) if same else (key, before, after)
