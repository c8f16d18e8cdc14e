"""The configuration of a run: frozen typed records, read strictly from YAML, with `key.sub=value` overrides.

`load_config` returns a whole, checked configuration or raises `ConfigError` (exit status 2 at the command line) before
anything is started. Rules that need the task or the model are checked by `knittrans_jax.launch.check`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class ConfigError(ValueError):
    """A configuration that cannot run: the message names the key, its value and the rule."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: frozen, and a key that it does not know is an error."""


class TaskConfig(Section):
    """`name`: a built-in task, or `path/to/file.py:Class` for a user's own. `options` are the task's own."""

    name: str
    options: dict[str, Any] = {}


class ModelSection(Section):
    """`preset`: a name in `knittrans_jax.models.config.PRESETS`."""

    preset: str = "tiny"


class Bound(Section):
    """Least and most groups of one attribute value in a train batch: integers are counts, floats are shares of `B`."""

    min: int | float = 0
    max: int | float | None = None


class BatchConfig(Section):
    """The train batch: `B` groups in `K` mini-batches of `n` trajectories a group, and its quotas by attribute and value."""

    groups: PositiveInt
    mini_batches: PositiveInt
    trajectories_per_group: Annotated[int, msgspec.Meta(ge=2)]
    quotas: dict[str, dict[str, Bound]] = {}


class AdmissionConfig(Section):
    """When prompts are launched and finished groups admitted. `look_ahead_groups` is `L`, in groups."""

    policy: Literal["mini_batch"] = "mini_batch"
    schedule: Literal["disaggregated", "colocated"] = "disaggregated"
    look_ahead_groups: NonNegativeInt | dict[str, NonNegativeInt] = 0
    admit_ahead: NonNegativeInt = 1
    lease_timeout_s: PositiveFloat = 120.0
    starvation_s: PositiveFloat = 300.0


class RolloutConfig(Section):
    """Rollout hosts. `cache_tokens` bounds a trajectory's length; `storage_bytes` is each storage unit's budget."""

    hosts: PositiveInt = 1
    slots: PositiveInt = 64
    cache_tokens: PositiveInt = 128
    prefill_tokens: PositiveInt = 16
    max_answer_tokens: PositiveInt = 8
    temperature: PositiveFloat = 1.0
    in_flight: Literal["swap", "trajectory"] = "swap"
    episode_retries: NonNegativeInt = 2
    storage_bytes: PositiveInt = 256 * 2**20


class OptimizerConfig(Section):
    """AdamW with linear warm-up, then cosine decay to `final_fraction` of `learning_rate` at the last update."""

    learning_rate: PositiveFloat = 1e-3
    warmup_updates: NonNegativeInt = 10
    final_fraction: Fraction = 0.1
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat = 1.0


class ObjectiveConfig(Section):
    """Clipped ratio to the behaviour log-probs, group-relative advantages, token mean, entropy bonus."""

    clip_low: Fraction = 0.2
    clip_high: NonNegativeFloat = 0.28
    entropy_bonus: NonNegativeFloat = 0.003
    normalise_advantage: bool = True
    """Divide a group's centred rewards by their standard deviation (GRPO); otherwise only centre them."""


class TrainConfig(Section):
    """The training mesh and the shape of its work.

    `mesh` gives the size of each axis; their product is `processes * devices_per_process`. A micro-batch has
    `micro_batch_rows` rows of `row_tokens` tokens on every data shard; `chunk_micro_batches` of them are scanned per call.
    """

    processes: PositiveInt = 2
    devices_per_process: PositiveInt = 1
    mesh: dict[Literal["data"], PositiveInt] = msgspec.field(default_factory=lambda: {"data": 2})
    updates: PositiveInt = 100
    row_tokens: PositiveInt = 128
    micro_batch_rows: PositiveInt = 8
    chunk_micro_batches: PositiveInt = 1
    encoder_mode: Literal["per_mini_batch", "per_micro_batch"] = "per_mini_batch"
    encoder_row_patches: PositiveInt = 64
    prefetch_chunks: PositiveInt = 2
    publish: Literal["update", "train_batch"] = "update"
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    coordinator: str = "127.0.0.1:0"
    """Address of the training group's `jax.distributed` coordinator; port 0 lets the launcher pick a free one."""
    start_timeout_s: PositiveFloat = 120.0
    heartbeat_timeout_s: PositiveFloat = 100.0
    go_timeout_s: PositiveFloat = 60.0
    """Deadline of the scheduler's go for a chunk, from the first process that holds its rows."""


class EvalConfig(Section):
    """Greedy evaluation on held-out prompts: `prompts` of them every `every_updates`, `final_prompts` after the last."""

    every_updates: PositiveInt = 50
    prompts: PositiveInt = 64
    final_prompts: PositiveInt = 352


class ControlConfig(Section):
    """The control channel. Loopback by default; port 0 picks a free one. `rpc_timeout_s` bounds every request."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    bulk_host: str = "127.0.0.1"
    rpc_timeout_s: PositiveFloat = 30.0
    pull_timeout_s: PositiveFloat = 30.0
    pull_retries: NonNegativeInt = 3
    start_timeout_s: PositiveFloat = 120.0
    fsync: bool = True
    """Force the event log to disk before any message that acts on it leaves."""


class LaunchConfig(Section):
    """What the launcher does. `on_child_death: stop` ends the run when any role dies."""

    on_child_death: Literal["stop"] = "stop"
    stop_timeout_s: PositiveFloat = 3.0


class Config(Section):
    """A run. `run_dir/name/` receives everything that it writes."""

    name: str
    task: TaskConfig
    batch: BatchConfig
    seed: NonNegativeInt = 0
    run_dir: str = "runs"
    platform: Literal["cpu", "gpu", "tpu"] = "cpu"
    model: ModelSection = ModelSection()
    admission: AdmissionConfig = AdmissionConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    control: ControlConfig = ControlConfig()
    launch: LaunchConfig = LaunchConfig()

    @property
    def directory(self) -> Path:
        """Where the run is written."""
        return Path(self.run_dir) / self.name

    @property
    def mini_batch_groups(self) -> int:
        """`B / K`."""
        return self.batch.groups // self.batch.mini_batches

    @property
    def data_shards(self) -> int:
        """Number of data shards of the training mesh."""
        return self.train.mesh.get("data", 1)


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Reads, overrides and checks a configuration.

    Args:
        path: a YAML file.
        overrides: `key.sub=value` strings; the value is read as YAML.

    Raises:
        ConfigError: the file is missing or no YAML, a key is unknown, a value has the wrong type or range, or values
            contradict each other. The message names the key, the value and the rule.
    """
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration {path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration {path}: not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"configuration {path}: expected a mapping of sections, got {type(raw).__name__}")
    for override in overrides or []:
        apply_override(raw, override)
    return parse_config(raw)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Sets `key.sub=value` in a plain mapping, in place. The value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected key.sub=value")
    *parents, leaf = key.strip().split(".")
    node = raw
    for index, parent in enumerate(parents):
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(parents[: index + 1])} is a value, not a section")
    try:
        node[leaf] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from error


def parse_config(raw: dict[str, Any]) -> Config:
    """Turns a plain mapping into a checked `Config`; raises `ConfigError`."""
    try:
        config = msgspec.convert(raw, Config, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(raw, str(error))) from error
    check_config(config)
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as a plain mapping: `parse_config` of it gives the same configuration."""
    return msgspec.to_builtins(config)


def _explain(raw: dict[str, Any], message: str) -> str:
    """Rewrites msgspec's "... - at `$.a.b`" so that the key comes first and the offending value is shown."""
    text, _, where = message.partition(" - at `")
    if not where:
        return f"configuration: {text}"
    parts = where.rstrip("`").removeprefix("$").lstrip(".").split(".")
    node: Any = raw
    for part in parts:
        node = node.get(part, None) if isinstance(node, dict) else None
    value = "" if node is None or isinstance(node, dict) else f" (value {node!r})"
    return f"{'.'.join(parts) or 'configuration'}: {text}{value}"


def check_config(config: Config) -> None:
    """Checks what types cannot say: values that contradict each other. Raises `ConfigError` naming key, value and rule."""
    batch, train = config.batch, config.train
    if batch.groups % batch.mini_batches:
        raise ConfigError(
            f"batch.mini_batches: {batch.mini_batches} does not divide batch.groups ({batch.groups}); "
            f"a train batch is K mini-batches of B/K whole groups"
        )
