"""The model that a run's configuration names: a preset with random weights, or a Hugging Face checkpoint folder.

Every role asks here, so that all of them have the same architecture, compute type and parameters. `model_config` needs no
JAX and reads no weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from knittrans_jax.config import ConfigError, ModelSection
from knittrans_jax.models.config import PRESETS, ModelConfig, parameter_count, preset
from knittrans_jax.models.hf_config import CheckpointError, config_from_json, read_json
from knittrans_jax.models.hf_files import Checkpoint

if TYPE_CHECKING:
    from knittrans_jax.models.model import Model, Params

HOST_DRAWN_VALUES = 2**24
"""Models of at most this many values are drawn on the host: no program is compiled for it."""


class Ids(Protocol):
    """What a model must know of a vocabulary."""

    @property
    def size(self) -> int:
        """Number of ids."""
        ...

    @property
    def image(self) -> int:
        """The placeholder of an image token."""
        ...


def model_config(section: ModelSection, vocabulary: Ids) -> ModelConfig:
    """The architecture. A preset has `vocabulary_rows`, else as many rows as the vocabulary has ids; a checkpoint has its own.

    Raises:
        ConfigError: no such preset; fewer rows than ids; no such checkpoint, or one whose ids are not the task's.
    """
    if section.path is None:
        if section.preset not in PRESETS:
            raise ConfigError(
                f"model.preset: no such preset; expected one of {', '.join(sorted(PRESETS))} (value {section.preset!r})"
            )
        rows = vocabulary.size if section.vocabulary_rows is None else section.vocabulary_rows
        if rows < vocabulary.size:
            raise ConfigError(
                f"model.vocabulary_rows: the task's vocabulary has {vocabulary.size} ids, at least that many (value {rows})"
            )
        return preset(section.preset, rows)
    file = Path(section.path) / "config.json"
    try:
        raw = read_json(file)
        config = config_from_json(raw, str(file))
    except CheckpointError as error:
        raise ConfigError(f"model.path: {error}") from error
    if vocabulary.size > config.text.vocab_size:
        raise ConfigError(
            f"model.path: {file} has {config.text.vocab_size} token ids, the task's vocabulary {vocabulary.size}: it is "
            f"another tokenizer's (value {section.path!r})"
        )
    placeholder = raw.get("image_token_id", vocabulary.image)
    if config.vision is not None and placeholder != vocabulary.image:
        raise ConfigError(
            f"model.path: {file} has image_token_id {placeholder}, the task's vocabulary {vocabulary.image}: it is another "
            f"tokenizer's (value {section.path!r})"
        )
    return config


def check_files(section: ModelSection) -> None:
    """That a checkpoint's files are there, whole by their headers, and agree with its index; without JAX.

    Raises:
        ConfigError: otherwise.
    """
    if section.path is None:
        return
    try:
        with Checkpoint(Path(section.path)):
            pass
    except CheckpointError as error:
        raise ConfigError(f"model.path: {error}") from error


def run_model(section: ModelSection, vocabulary: Ids, fsdp_axis: str | None = None) -> tuple[Model, Params]:
    """The model's structure, and the shapes of its whole parameters, which are float32.

    `fsdp_axis`: the manual mesh axis over which the parameters are split where the model is applied; None: they are whole.
    """
    import jax.numpy as jnp

    from knittrans_jax.models.fsdp import Fsdp
    from knittrans_jax.models.model import abstract_model
    from knittrans_jax.models.sharding import shard_rules

    config, dtype = model_config(section, vocabulary), jnp.dtype(section.dtype)
    fsdp = None if fsdp_axis is None else Fsdp(fsdp_axis, shard_rules(config), dtype)
    return abstract_model(config, dtype, remat=section.remat, fsdp=fsdp)


def initial_params(section: ModelSection, vocabulary: Ids, seed: int, shardings: Any) -> Params:
    """The parameters of version 0, float32, in their shardings; the same on every process and for every mesh.

    Args:
        section: `path`: read from there, each process its own parts; otherwise drawn.
        vocabulary: the task's.
        seed: of what is drawn.
        shardings: a pytree like the parameters, or one sharding for all.

    Raises:
        ConfigError: as `model_config`, or the checkpoint's tensors are not this model's.
    """
    import jax

    from knittrans_jax.models.hf_load import load_params
    from knittrans_jax.models.model import build_model, draw_params

    config = model_config(section, vocabulary)
    if section.path is not None:
        try:
            return load_params(Path(section.path), config, shardings)
        except CheckpointError as error:
            raise ConfigError(f"model.path: {error}") from error
    if parameter_count(run_model(section, vocabulary)[1]) > HOST_DRAWN_VALUES:
        return draw_params(config, seed, shardings)
    host = jax.tree.map(jax.device_get, build_model(config, seed)[1])
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, host)
    return jax.tree.map(
        lambda leaf, sharding: jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index]),
        host,
        shardings,
    )
