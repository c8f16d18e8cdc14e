"""A training process's JAX world: its process group, its mesh, its model and its programs, all from the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from knittrans_jax.config import Config, ConfigError
from knittrans_jax.encoding.modes import cached_table_rows
from knittrans_jax.models.run_model import initial_params, model_config, run_model
from knittrans_jax.rollout.tasks.base import Task
from knittrans_jax.train.layout import FSDP, TENSOR, TRAIN_AXES
from knittrans_jax.train.state import TrainState, make_optimizer
from knittrans_jax.train.step import StepPrograms
from knittrans_jax.transfer.pack import PackSpec


def join_process_group(config: Config, process: int) -> None:
    """Initialises JAX for training process `process`; with several processes, waits for all of them.

    Raises:
        RuntimeError: the group did not form within `train.start_timeout_s` (JAX's own error).
    """
    train = config.train
    if config.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", train.devices_per_process)
    if train.processes > 1:
        jax.distributed.initialize(
            train.coordinator,
            num_processes=train.processes,
            process_id=process,
            initialization_timeout=int(train.start_timeout_s),
            heartbeat_timeout_seconds=int(train.heartbeat_timeout_s),
            shutdown_timeout_seconds=max(1, int(config.launch.finish_timeout_s)),
        )
    if jax.local_device_count() != train.devices_per_process:
        raise ConfigError(
            f"train.devices_per_process: {train.devices_per_process}, but process {process} has "
            f"{jax.local_device_count()} {config.platform} devices"
        )


def make_mesh(config: Config, devices: Sequence[Any] | None = None) -> Mesh:
    """The training mesh over all devices of the process group, or over `devices`. Axes that are not configured have size 1."""
    sizes = tuple(config.train.mesh.get(axis, 1) for axis in TRAIN_AXES)
    return jax.make_mesh(sizes, TRAIN_AXES, axis_types=(AxisType.Auto,) * len(TRAIN_AXES), devices=devices)


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """What a training process computes with."""

    programs: StepPrograms
    state: TrainState
    """Version 0, laid out over the mesh."""
    pack_spec: PackSpec
    processor: str
    """Names everything besides its content that an image's features depend on."""
    cached_rows: int
    """Rows of a frozen encoder's table; 0 when it is trained."""
    residual_row_bytes: int = 0
    """Of one encoder row, where they may be kept (`StepPrograms.residual_row_bytes`)."""


def build_programs(config: Config, task: Task, mesh: Mesh) -> StepPrograms:
    """The step programs; no arrays are made."""
    model, _ = run_model(config.model, task.vocabulary, FSDP if mesh.shape[FSDP] > 1 else None)
    split_params = mesh.shape[FSDP] * mesh.shape[TENSOR] > 1
    optimizer = make_optimizer(config.train.optimizer, config.train.updates, split_params)
    return StepPrograms(
        model,
        config.train.objective,
        optimizer,
        mesh,
        tuple(task.sampled_ids),
        config.rollout.temperature,
        encoder_trained="none" if config.train.encoder_mode == "frozen" else config.train.encoder_trained,
    )


def pack_spec(config: Config, task: Task) -> PackSpec:
    """What packing must know of the model and the vocabulary; a text-only model packs no images, so its sizes are idle."""
    vision = model_config(config.model, task.vocabulary).vision
    if vision is None:
        return PackSpec(patch_size=1, merge_size=1, channels=1, image_token_id=task.vocabulary.image)
    return PackSpec(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        channels=vision.channels,
        image_token_id=task.vocabulary.image,
    )


def set_up_training(config: Config, task: Task, mesh: Mesh) -> TrainSetup:
    """Programs and version 0: the parameters of `model.path`, or the same drawn from `seed` on every process."""
    programs = build_programs(config, task, mesh)
    params = initial_params(config.model, task.vocabulary, config.seed, programs.param_shardings)
    state = programs.init(params)
    model, spec = programs.model.config, pack_spec(config, task)
    return TrainSetup(
        programs=programs,
        state=state,
        pack_spec=spec,
        processor=repr((spec, model.vision)),
        cached_rows=cached_table_rows(config, model) if programs.frozen_encoder else 0,
        residual_row_bytes=(
            programs.residual_row_bytes(params, config.train.encoder_row_patches)
            if config.train.encoder_mode == "auto" and model.vision is not None
            else 0
        ),
    )
