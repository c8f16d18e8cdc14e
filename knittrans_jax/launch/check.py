"""What can be known of a run before anything starts: its arithmetic, and every rule that needs the task or the model.

`check_run` either returns the arithmetic that `knittrans check` prints, or raises `ConfigError` naming key, value and rule. It
never loads JAX and starts nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table

from knittrans_jax.admission.gate import LaunchGate, make_gate
from knittrans_jax.admission.rules import Rules, count_values, rules_of
from knittrans_jax.admission.storage_room import check_storage
from knittrans_jax.config import Config, ConfigError
from knittrans_jax.encoding.patches import grid_of
from knittrans_jax.models.config import ModelConfig, VisionConfig
from knittrans_jax.models.mesh import MeshError, check_model_divides
from knittrans_jax.models.run_model import check_files, model_config
from knittrans_jax.observe.table import size
from knittrans_jax.observe.tensorboard import check_tensorboard
from knittrans_jax.rollout.tasks.base import Prompt, Split, Task, max_group_bytes, max_trajectory_tokens
from knittrans_jax.rollout.tasks.registry import load_task
from knittrans_jax.transfer.plan import WorstCase, worst_case
from knittrans_jax.transfer.tls import is_available


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArithmetic:
    """What a configuration comes to. Bytes are upper bounds: every trajectory of the greatest length, every image different."""

    name: str
    processes: Mapping[str, int]
    """Operating-system processes by role."""
    mesh: Mapping[str, int]
    groups_per_batch: int
    mini_batches: int
    groups_per_mini_batch: int
    trajectories_per_group: int
    trajectories_per_mini_batch: int
    updates: int
    train_steps: int
    groups_total: int
    quotas: Mapping[str, tuple[int, int]]
    """Least and most groups of a train batch by `attribute = value`."""
    look_ahead_groups: int
    mini_batch_tokens: int | None
    """The token budget of a mini-batch."""
    mini_batch_tokens_guaranteed: bool
    """Any `B/K` groups fit it; otherwise it is kept by choosing, and lengths may leave nothing to choose."""
    prompts_train: int
    prompts_heldout: int
    epochs: float
    """Groups of the whole run over training prompts."""
    trajectory_tokens_max: int
    tokens_per_micro_batch: int
    tokens_per_mini_batch_max: int
    image_patches_max: int
    group_bytes_max: int
    mini_batch_payload_bytes_max: int
    chunk_bytes: int
    """Host memory of one chunk over all shards."""
    encoder_input_bytes_max: int
    encoder_rows_per_shard: tuple[int, ...]
    """Every number of encoder rows that a plan may have: the encoder's programs are compiled for at most so many shapes."""
    storage_groups: int
    """Groups that all storage units certainly have room for."""

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return dataclasses.asdict(self)


def check_run(config: Config) -> RunArithmetic:
    """Checks a run against its task and its model; raises `ConfigError`."""
    if config.observe.tensorboard:
        check_tensorboard()
    if config.control.tls and not is_available():
        raise ConfigError(
            "control.tls: certificates are made by the command `openssl`, which is not there (value true)"
        )
    task = load_task(config.task, config.seed)
    model = model_config(config.model, task.vocabulary)
    check_files(config.model)
    _check_mesh(config, model)
    tokens = _check_lengths(config, task, model.vision)
    patches = _check_images(config, task, model.vision)
    prompts = {split: _prompts(config, task, split) for split in ("train", "heldout")}
    train, heldout = [prompt.attributes for prompt in prompts["train"]], len(prompts["heldout"])
    _check_prompt_ids(config, [*prompts["train"], *prompts["heldout"]])
    _check_quota_values(config, train)
    rules = rules_of(config, train)
    n = config.batch.trajectories_per_group
    group_bytes = max_group_bytes(task.limits, n, config.rollout.cache_tokens)
    gate = make_gate(config, rules, group_bytes)
    check_storage(config, group_bytes, gate.most_useless_groups)
    for key, wanted in (("eval.prompts", config.eval.prompts), ("eval.final_prompts", config.eval.final_prompts)):
        if wanted > heldout:
            raise ConfigError(f"{key}: the task has {heldout} held-out prompts (value {wanted})")
    worst = _worst_case(config, task, tokens, patches)
    _check_encoder_cache(config, task, model, patches)
    return _arithmetic(config, rules, gate, len(train), heldout, tokens, patches, group_bytes, worst)


def _check_mesh(config: Config, model: ModelConfig) -> None:
    """Every parameter divides over the training mesh."""
    try:
        check_model_divides(model, {str(axis): count for axis, count in config.train.mesh.items()})
    except MeshError as error:
        key, value = _named(config)
        raise ConfigError(f"train.mesh: {error} ({key} = {value}) (value {config.train.mesh})") from error


def _named(config: Config) -> tuple[str, str]:
    """The key that chose the model, and its value."""
    model = config.model
    return ("model.preset", model.preset) if model.path is None else ("model.path", model.path)


def _check_lengths(config: Config, task: Task, vision: VisionConfig | None) -> int:
    """The longest trajectory, in tokens."""
    rollout, limits = config.rollout, task.limits
    key, value = _named(config)
    if limits.answer_tokens > rollout.max_answer_tokens:
        raise ConfigError(
            f"rollout.max_answer_tokens: task {config.task.name} has right answers of {limits.answer_tokens} tokens, end "
            f"token included, which could never be given (value {rollout.max_answer_tokens})"
        )
    patch, merge = (1, 1) if vision is None else (vision.patch_size, vision.merge_size)
    if limits.image_shapes and vision is None:
        raise ConfigError(
            f"{key}: task {config.task.name} shows images, but this model has no vision encoder (value {value!r})"
        )
    try:
        tokens = max_trajectory_tokens(limits, patch, merge, rollout.max_answer_tokens)
    except ValueError as error:
        raise ConfigError(
            f"{key}: the images of task {config.task.name} do not fit its patches: {error} (value {value!r})"
        ) from error
    longest_s, lease_s = limits.tool_calls * rollout.tool_timeout_s, config.admission.lease_timeout_s
    if longest_s >= lease_s:
        raise ConfigError(
            f"rollout.tool_timeout_s: an episode of task {config.task.name} can wait {limits.tool_calls} times for a tool, "
            f"{longest_s:g} s in all: leases would expire before (admission.lease_timeout_s = {lease_s:g}) "
            f"(value {rollout.tool_timeout_s:g})"
        )
    if tokens > rollout.cache_tokens:
        raise ConfigError(
            f"rollout.cache_tokens: a trajectory of task {config.task.name} can have {tokens} tokens "
            f"({limits.turns} turns); at least that many are needed, here and in train.row_tokens "
            f"(value {rollout.cache_tokens})"
        )
    return tokens


def _check_images(config: Config, task: Task, vision: VisionConfig | None) -> int:
    """Encoder patches of the largest image; 0 without images."""
    if vision is None or not task.limits.image_shapes:
        return 0
    key, value = _named(config)
    for shape in task.limits.image_shapes:
        if shape[2] != vision.channels:
            raise ConfigError(
                f"{key}: its encoder takes images of {vision.channels} channels, task {config.task.name} shows "
                f"{shape[2]} (value {value!r})"
            )
    row, merge = config.train.encoder_row_patches, vision.merge_size
    grids = [grid_of(shape, vision.patch_size, merge) for shape in task.limits.image_shapes]
    patches = max(rows * columns for rows, columns in grids)
    if patches > row or row % merge**2:
        raise ConfigError(
            f"train.encoder_row_patches: the largest image of task {config.task.name} has {patches} patches, and a row holds "
            f"whole images and is a multiple of {merge**2} (value {row})"
        )
    return patches


def _check_encoder_cache(config: Config, task: Task, model: ModelConfig, patches: int) -> None:
    """A frozen encoder's table must hold a mini-batch whose every showing is of another image."""
    if config.train.encoder_mode != "frozen" or model.vision is None:
        return
    shown = config.batch.trajectories_per_group * task.limits.turns * task.limits.images_per_turn
    tokens = config.mini_batch_groups * shown * patches // model.vision.merge_size**2
    least = 4 * model.visual_features * tokens
    if config.train.encoder_cache_bytes < least:
        raise ConfigError(
            f"train.encoder_cache_bytes: a mini-batch can show images of {tokens} tokens, whose features take {least} bytes; "
            f"at least that many (value {config.train.encoder_cache_bytes})"
        )


def _prompts(config: Config, task: Task, split: Split) -> list[Prompt]:
    """The task's prompts, which are somebody else's code: whatever is wrong with them is said of the task."""
    try:
        prompts = list(task.prompts(split))
    except Exception as error:
        raise ConfigError(
            f"task.name: prompts({split!r}) of the task fails: {type(error).__name__}: {error} (value {config.task.name!r})"
        ) from error
    for prompt in prompts:
        try:
            msgspec.convert(prompt.attributes, dict[str, str], strict=True)
            msgspec.convert(prompt.prompt_id, str, strict=True)
        except (msgspec.ValidationError, AttributeError) as error:
            raise ConfigError(
                f"task.name: a prompt of prompts({split!r}) has no text id with attributes from text to text: {error} "
                f"(value {config.task.name!r})"
            ) from error
    return prompts


def _check_prompt_ids(config: Config, prompts: list[Prompt]) -> None:
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.prompt_id in seen:
            raise ConfigError(
                f"task.name: prompt id {prompt.prompt_id!r} comes twice; ids are unique over both splits "
                f"(value {config.task.name!r})"
            )
        seen.add(prompt.prompt_id)


def _check_quota_values(config: Config, prompts: list[dict[str, str]]) -> None:
    for attribute, bounds in config.batch.quotas.items():
        known = count_values(attribute, prompts)
        for value, bound in bounds.items():
            if value not in known:
                raise ConfigError(
                    f"batch.quotas.{attribute}.{value}: no training prompt of task {config.task.name} has this value; it has "
                    f"{', '.join(f'{name} ({count})' for name, count in sorted(known.items()))} "
                    f"(value min {bound.min}, max {bound.max})"
                )


def _worst_case(config: Config, task: Task, tokens: int, patches: int) -> WorstCase:
    limits, train = task.limits, config.train
    shapes = [height * width * channels for height, width, channels in limits.image_shapes]
    n = config.batch.trajectories_per_group
    return worst_case(
        groups=config.mini_batch_groups,
        trajectories_per_group=n,
        max_length_tokens=tokens,
        images_per_group=n * limits.turns * limits.images_per_turn,
        image_bytes=max(shapes, default=0),
        image_patches=patches,
        shards=config.data_shards,
        row_tokens=train.row_tokens,
        micro_batch_rows=train.micro_batch_rows,
        chunk_micro_batches=train.chunk_micro_batches,
        encoder_row_patches=train.encoder_row_patches,
    )


def _arithmetic(
    config: Config,
    rules: Rules,
    gate: LaunchGate,
    prompts_train: int,
    prompts_heldout: int,
    tokens: int,
    patches: int,
    group_bytes: int,
    worst: WorstCase,
) -> RunArithmetic:
    batch, train, hosts = config.batch, config.train, config.rollout.hosts
    trajectories = config.mini_batch_groups * batch.trajectories_per_group
    train_steps = train.updates // batch.mini_batches
    if train.epochs is not None:
        held = train.epochs * prompts_train // batch.groups
        if not held:
            raise ConfigError(
                f"train.epochs: {train.epochs} times {prompts_train} training prompts fill no train batch of batch.groups = "
                f"{batch.groups} (value {train.epochs})"
            )
        train_steps = min(train_steps, held)
    groups_total = train_steps * batch.groups
    return RunArithmetic(
        name=config.name,
        processes={"scheduler": 1, "storage": hosts, "rollout": hosts, "train": train.processes},
        mesh={str(axis): count for axis, count in train.mesh.items()},
        groups_per_batch=batch.groups,
        mini_batches=batch.mini_batches,
        groups_per_mini_batch=config.mini_batch_groups,
        trajectories_per_group=batch.trajectories_per_group,
        trajectories_per_mini_batch=trajectories,
        updates=train_steps * batch.mini_batches,
        train_steps=train_steps,
        groups_total=groups_total,
        quotas={
            f"{attribute.name} = {value}": (quota.least, quota.most)
            for attribute in rules.attributes
            for value, quota in sorted(attribute.quotas.items())
        },
        look_ahead_groups=gate.most_look_ahead_groups,
        mini_batch_tokens=batch.mini_batch_tokens,
        mini_batch_tokens_guaranteed=batch.mini_batch_tokens is None
        or trajectories * tokens <= batch.mini_batch_tokens,
        prompts_train=prompts_train,
        prompts_heldout=prompts_heldout,
        epochs=groups_total / prompts_train,
        trajectory_tokens_max=tokens,
        tokens_per_micro_batch=config.data_shards * train.micro_batch_rows * train.row_tokens,
        tokens_per_mini_batch_max=trajectories * tokens,
        image_patches_max=patches,
        group_bytes_max=group_bytes,
        mini_batch_payload_bytes_max=worst.payload_bytes,
        chunk_bytes=worst.chunk_bytes,
        encoder_input_bytes_max=worst.encoder_bytes,
        encoder_rows_per_shard=worst.encoder_shapes if patches else (),
        storage_groups=hosts * (config.rollout.storage_bytes // group_bytes),
    )


def arithmetic_panel(config: Config, one: RunArithmetic) -> RenderableType:
    """The arithmetic for a person."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold cyan", justify="right", no_wrap=True)
    grid.add_column(overflow="fold")
    devices = config.train.devices_per_process
    mesh = " x ".join(f"{axis} {count}" for axis, count in one.mesh.items())
    grid.add_row("processes", ", ".join(f"{count} {role}" for role, count in one.processes.items()))
    grid.add_row("training mesh", f"{mesh} ({config.train.processes} processes x {devices} {config.platform} devices)")
    grid.add_row(
        "train batch",
        f"B = {one.groups_per_batch} groups = K {one.mini_batches} mini-batches x {one.groups_per_mini_batch} groups x "
        f"n {one.trajectories_per_group} = {one.trajectories_per_mini_batch} trajectories an update",
    )
    grid.add_row("quotas", _quotas(one))
    grid.add_row(
        "run",
        f"{one.updates} updates in {one.train_steps} train steps; {one.groups_total:,} groups of {one.prompts_train:,} "
        f"prompts ({one.epochs:.1f} epochs); {one.prompts_heldout:,} held out",
    )
    grid.add_row(
        "admission",
        f"{config.admission.policy}, {config.admission.schedule}, look-ahead {one.look_ahead_groups} groups",
    )
    grid.add_row(
        "tokens",
        f"at most {one.trajectory_tokens_max} a trajectory, {one.tokens_per_mini_batch_max:,} a mini-batch; "
        f"{one.tokens_per_micro_batch:,} a micro-batch, padding included",
    )
    if one.mini_batch_tokens is not None:
        holds = (
            "guaranteed: any mini-batch fits"
            if one.mini_batch_tokens_guaranteed
            else "kept by choosing groups that fit; a mini-batch may have to wait for shorter ones"
        )
        grid.add_row("token budget", f"{one.mini_batch_tokens:,} a mini-batch, {holds}")
    shapes = len(one.encoder_rows_per_shard)
    grid.add_row(
        "images",
        f"at most {one.image_patches_max} patches; at most {one.encoder_rows_per_shard[-1]} rows of "
        f"{config.train.encoder_row_patches} a shard, in {shapes} shape{'s' if shapes > 1 else ''} at most"
        if one.image_patches_max
        else "none",
    )
    grid.add_row(
        "bytes, at most",
        f"{size(one.mini_batch_payload_bytes_max)} of payload a mini-batch, {size(one.group_bytes_max)} a group; "
        f"host memory {size(one.chunk_bytes)} a chunk, {size(one.encoder_input_bytes_max)} of encoder input",
    )
    grid.add_row(
        "storage", f"{size(config.rollout.storage_bytes)} a host: room for {one.storage_groups:,} groups in all"
    )
    return Panel(grid, title=f"knittrans check · {one.name}", title_align="left", border_style="green", padding=(0, 1))


def _quotas(one: RunArithmetic) -> str:
    if not one.quotas:
        return "none"
    return "; ".join(
        f"{name}: {least}" if least == most else f"{name}: {least} to {most}"
        for name, (least, most) in one.quotas.items()
    )
