"""`knittrans what-if RUN key=value ...`: what a recorded run's completions would have come to under other settings.

Three sides: what the log says (`recorded`); the same completions replayed under the run's own settings (`replayed`, which says
how far the model is to be trusted); and under the changed ones (`alternative`). Only what the simulator models may be changed:
admission, the batch's rules, publication, slots and hosts; any other key is refused, since it would change nothing. See
`simulate.recorded` for what a replay leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.log import read_log
from knittrans_jax.config import Config, ConfigError, load_config
from knittrans_jax.simulate.engine import SimRun
from knittrans_jax.simulate.recorded import Prompts, Recording, record, replay
from knittrans_jax.staleness import Staleness, staleness_of, summarise

CHANGEABLE = (
    "admission.",
    "batch.quotas",
    "batch.pass_rate",
    "batch.spanning_max",
    "batch.drop_equal_rewards",
    "batch.mini_batches",
    "batch.groups",
    "train.publish",
    "rollout.in_flight",
    "rollout.slots",
    "rollout.hosts",
)
WARM_UP_BATCHES = 1
"""Train batches that no figure counts: the first one has nothing launched before it, and programs are compiled in it."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one side, after `WARM_UP_BATCHES`."""

    updates: int
    step_time_s: float
    architectural_mean_updates: float
    architectural_mean_train_steps: float
    gap_mean_updates: float
    worst_p95_updates: float
    trainer_idle_share: float
    look_ahead_groups: float | None
    filtered: int
    stuck: str | None


def what_if(directory: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The three sides, as the JSON object of the command.

    Raises:
        ConfigError: no run's folder, a key that a replay does not look at, or settings that do not go together.
        LogError, NothingRecorded: the log is damaged, or says too little.
    """
    recorded_as, changed = _configs(directory, overrides)
    events = read_log(directory / "events.log").events
    prompts, group_bytes = _prompts(recorded_as)
    recording = record(events)
    updates = len(recording.update_s)
    return {
        "command": "what-if",
        "run": str(directory),
        "changed": list(overrides),
        "recorded": msgspec.to_builtins(recorded_side(events, recorded_as)),
        "replayed": msgspec.to_builtins(_replayed(recorded_as, prompts, recording, group_bytes, updates)),
        "alternative": msgspec.to_builtins(_replayed(changed, prompts, recording, group_bytes, updates)),
    }


def _configs(directory: Path, overrides: Sequence[str]) -> tuple[Config, Config]:
    file = directory / "config.yaml"
    if not file.is_file() or not (directory / "events.log").is_file():
        raise ConfigError(
            f"what-if: {directory} is no run's folder: expected config.yaml and events.log in it (runs are in runs/NAME)"
        )
    for override in overrides:
        if not override.startswith(CHANGEABLE):
            raise ConfigError(
                f"override {override!r}: a replay would not notice it; what-if changes {', '.join(CHANGEABLE)} only"
            )
    recorded_as, changed = load_config(file), load_config(file, list(overrides))
    whole = recorded_as.train.updates
    if whole % changed.batch.mini_batches:
        raise ConfigError(f"batch.mini_batches: must divide the run's train.updates = {whole}")
    return recorded_as, changed


def _prompts(config: Config) -> tuple[Prompts, int]:
    """The run's prompts, and the most payload bytes of a group."""
    from knittrans_jax.rollout.tasks.base import max_group_bytes
    from knittrans_jax.rollout.tasks.registry import load_task

    task = load_task(config.task, config.seed)
    prompts = [(prompt.prompt_id, prompt.attributes) for prompt in task.prompts("train")]
    return prompts, max_group_bytes(task.limits, config.batch.trajectories_per_group, config.rollout.cache_tokens)


def recorded_side(events: Sequence[ev.AnyEvent], config: Config) -> Side:
    """What a log says."""
    K = config.batch.mini_batches
    metas, plans = {}, {}
    rows: list[Staleness] = []
    of_update: list[int] = []
    ended_s: list[float] = []
    waited_s: list[float] = []
    filtered = 0
    for event in events:
        match event:
            case ev.Ready():
                metas[event.group.group_id] = event.group
            case ev.Admitted():
                plans[event.plan.plan_id] = event.plan
            case ev.Filtered():
                filtered += 1
            case ev.Consumed():
                plan = plans[event.plan_id]
                ended_s.append(event.time_s)
                waited_s.append(event.waits_s.get("groups", 0.0))
                for planned in plan.groups:
                    for one in metas[planned.group_id].trajectories:
                        rows.append(staleness_of(one, version=plan.update, mini_batch=plan.mini_batch))
                        of_update.append(plan.update)
            case _:
                pass
    return _side(rows, of_update, ended_s, waited_s, K, None, filtered, None)


def _replayed(config: Config, prompts: Prompts, recording: Recording, group_bytes: int, updates: int) -> Side:
    run: SimRun = replay(config, prompts, recording, group_bytes=group_bytes, updates=updates)
    ahead = run.look_ahead[WARM_UP_BATCHES:]
    return _side(
        run.staleness,
        run.consumed_by,
        run.updated_s,
        run.waited_s,
        config.batch.mini_batches,
        sum(ahead) / len(ahead) if ahead else None,
        run.filtered,
        run.stuck,
    )


def _side(
    rows: Sequence[Staleness],
    of_update: Sequence[int],
    ended_s: Sequence[float],
    waited_s: Sequence[float],
    mini_batches: int,
    look_ahead_groups: float | None,
    filtered: int,
    stuck: str | None,
) -> Side:
    first = WARM_UP_BATCHES * mini_batches
    if len(ended_s) <= first:
        raise ConfigError(
            f"what-if: {len(ended_s)} updates are too few: figures begin after {WARM_UP_BATCHES} train batch of {mini_batches}"
            + ("" if stuck is None else f" (the replay got stuck {stuck})")
        )
    found = summarise([row for row, update in zip(rows, of_update, strict=True) if update >= first])
    whole_s = ended_s[-1] - ended_s[first - 1]
    return Side(
        updates=len(ended_s),
        step_time_s=whole_s / (len(ended_s) - first) * mini_batches,
        architectural_mean_updates=found.architectural.mean,
        architectural_mean_train_steps=found.architectural.mean / mini_batches,
        gap_mean_updates=found.gap.mean,
        worst_p95_updates=found.worst.p95,
        trainer_idle_share=sum(waited_s[first:]) / whole_s if whole_s > 0 else 0.0,
        look_ahead_groups=look_ahead_groups,
        filtered=filtered,
        stuck=stuck,
    )


def what_if_view(answer: Mapping[str, Any]) -> RenderableType:
    """The three sides beside each other."""
    sides = ("recorded", "replayed", "alternative")
    changed = " ".join(answer["changed"]) or "nothing changed"
    table = Table(title=f"{answer['run']}: {changed}", title_justify="left", padding=(0, 1))
    for column in ("figure", "recorded", "replayed as it was", "replayed as changed"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for key in answer["recorded"]:
        if key != "stuck":
            table.add_row(key, *(_written(answer[side][key]) for side in sides))
    stuck = [Text(f"{side}: stuck {answer[side]['stuck']}", style="red") for side in sides if answer[side]["stuck"]]
    return Group(table, *stuck)


def _written(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
