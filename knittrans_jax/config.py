"""The configuration of a run: frozen typed records, read strictly from YAML, with `key.sub=value` overrides.

`load_config` returns a whole, checked configuration or raises `ConfigError` (exit status 2 at the command line) before
anything is started. Rules that need the task or the model are checked by `knittrans_jax.launch.check`.
"""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from knittrans_jax.strict_yaml import convert_strictly, parse_yaml, short

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class ConfigError(ValueError):
    """A configuration that cannot run: the message names the key, its value and the rule."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: frozen, and a key that it does not know is an error."""


class TaskConfig(Section, frozen=True):
    """`name`: a built-in task, or `path/to/file.py:Class` for a user's own. `options` are the task's own."""

    name: str
    options: dict[str, Any] = {}


class ModelSection(Section, frozen=True):
    """`preset`: a name in `knittrans_jax.models.config.PRESETS`, with random weights; or `path`: a Hugging Face checkpoint.

    `dtype` is what the model computes in; parameters, norms, softmax and log-probs are float32 either way. `remat` recomputes
    each layer in the backward pass instead of keeping its activations.
    """

    preset: str = "tiny"
    vocabulary_rows: PositiveInt | None = None
    """Rows of a preset's embedding; null: as many as the task's vocabulary has ids, which is the least."""
    path: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False


class Bound(Section, frozen=True):
    """Least and most groups of one attribute value in a train batch: integers are counts, floats are shares of `B`."""

    min: int | float = 0
    max: int | float | None = None


class BatchConfig(Section, frozen=True):
    """The train batch: `B` groups in `K` mini-batches of `n` trajectories a group, and its rules.

    `quotas` by attribute and value of the prompts; a group has one value of each attribute, so they may overlap. The launch
    gate goes by all of them.
    """

    groups: PositiveInt
    mini_batches: PositiveInt
    trajectories_per_group: Annotated[int, msgspec.Meta(ge=2)]
    quotas: dict[str, dict[str, Bound]] = {}
    pass_rate: dict[str, Bound] = {}
    """Bounds by share of a group's questions that were answered exactly: `"0..0.25": {max: 0.5}`; known at completion."""
    spanning_max: int | float | None = None
    """Most groups of a train batch that more than one version sampled."""
    drop_equal_rewards: bool = False
    """Drop finished groups whose trajectories all have one reward; others are launched in their place."""
    mini_batch_tokens: PositiveInt | None = None
    """Most tokens of a mini-batch, padding not counted."""


class AdmissionConfig(Section, frozen=True):
    """When prompts are launched and finished groups admitted. `look_ahead_groups` is `L`, in groups: of all
    values together, by value, or `auto` (the least that keeps the trainer from waiting, found while the run goes on).

    `policy`: `mini_batch` takes any mini-batch that the train batch's rules allow; the baselines are `train_batch` (waits for
    a whole train batch), `proportional` (every mini-batch repeats the batch's composition) and `fifo` (no quotas).
    """

    policy: Literal["mini_batch", "train_batch", "proportional", "fifo"] = "mini_batch"
    schedule: Literal["disaggregated", "colocated"] = "disaggregated"
    look_ahead_groups: NonNegativeInt | dict[str, NonNegativeInt] | Literal["auto"] = 0
    admit_ahead: NonNegativeInt = 1
    staleness_bound: NonNegativeInt | None = None
    """Most updates between the oldest version that sampled a group and the one that its update starts from."""
    on_stale: Literal["drop", "retry", "wait"] = "drop"
    """A group beyond the bound is dropped, or its prompt leased again; `wait`: one about to reach it goes first."""
    spread_slow: bool = False
    """Give groups that took long a fixed share of every mini-batch, while there are others to fill it up."""
    on_starvation: Literal["error", "wait", "relax"] = "error"
    """When no mini-batch can be formed for `starvation_s`, or a rule cannot be met any more: end the run, go on waiting, or
    drop the rule that is named for the train batch under way. All three are reported and counted."""
    lease_timeout_s: PositiveFloat = 120.0
    starvation_s: PositiveFloat = 300.0


class RolloutConfig(Section, frozen=True):
    """Rollout hosts. `cache_tokens` bounds a trajectory's length; `storage_bytes` is each storage unit's budget."""

    hosts: PositiveInt = 1
    slots: PositiveInt = 64
    cache_tokens: PositiveInt = 128
    prefill_tokens: PositiveInt = 16
    max_answer_tokens: PositiveInt = 8
    temperature: PositiveFloat = 1.0
    in_flight: Literal["swap", "trajectory"] = "swap"
    episode_retries: NonNegativeInt = 2
    tool_timeout_s: PositiveFloat = 30.0
    """Deadline of every tool call; after it the attempt of its episode has failed."""
    drain_s: NonNegativeFloat = 20.0
    """How long an engine that is told to leave (SIGTERM) still works on what it has begun; it takes no more work."""
    tool_waits: NonNegativeInt = 1024
    """Most episodes of a host that wait for a tool without a slot; further ones keep theirs."""
    storage_bytes: PositiveInt = 256 * 2**20
    storage_on_disk: bool = False
    """Units write groups to `storage/` in the run's folder before they acknowledge them, and hold them when started again."""


class OptimizerConfig(Section, frozen=True):
    """AdamW with linear warm-up, then cosine decay to `final_fraction` of `learning_rate` at the last update."""

    learning_rate: PositiveFloat = 1e-3
    warmup_updates: NonNegativeInt = 10
    final_fraction: Fraction = 0.1
    b1: Fraction = 0.9
    b2: Fraction = 0.95
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat = 1.0


class ObjectiveConfig(Section, frozen=True):
    """Clipped ratio to the behaviour log-probs, group-relative advantages, token mean, entropy bonus."""

    clip_low: Fraction = 0.2
    clip_high: NonNegativeFloat = 0.28
    entropy_bonus: NonNegativeFloat = 0.003
    credit: Literal["trajectory", "turn"] = "trajectory"
    """What an answer is credited with: the trajectory's reward, or (tasks that give one per answer) its own."""
    normalise_advantage: bool = True
    """Divide a group's centred rewards by their standard deviation (GRPO); otherwise only centre them."""


class TrainConfig(Section, frozen=True):
    """The training mesh and the shape of its work.

    `mesh` gives the size of each axis, 1 where it is left out; their product is `processes * devices_per_process`. Rows are
    split over `data` and `fsdp`, whose product is the number of data shards; parameters and Adam's moments over `fsdp` and
    `tensor` (`models/mesh.py`). A micro-batch has `micro_batch_rows` rows of `row_tokens` tokens on every data shard;
    `chunk_micro_batches` of them are scanned per call.
    """

    processes: PositiveInt = 2
    devices_per_process: PositiveInt = 1
    mesh: dict[Literal["data", "fsdp", "tensor", "sequence"], PositiveInt] = msgspec.field(
        default_factory=lambda: {"data": 2}
    )
    updates: PositiveInt = 100
    epochs: PositiveInt | None = None
    """The run also ends when the data set has been gone through so often, in whole train batches; null: without end."""
    row_tokens: PositiveInt = 128
    micro_batch_rows: PositiveInt = 8
    chunk_micro_batches: PositiveInt = 1
    transfer: Literal["on_demand", "dispatch", "gather"] = "on_demand"
    """How payloads reach a process: what its next chunk reads, each image once; or, to compare with, its own rows of a whole
    train batch (`dispatch`), or everything by way of process 0 (`gather`), both with float32 pixels for every trajectory."""
    encoder_mode: Literal["per_mini_batch", "per_micro_batch", "per_micro_batch_unique", "frozen", "auto"] = (
        "per_mini_batch"
    )
    """Which images are encoded together; `auto` takes the cheapest exact one for every plan (`encoding/modes.py`)."""
    encoder_trained: Literal["all", "mergers"] = "all"
    """`mergers`: of the encoder only the layers that make image tokens of features are trained, those of deepstack included."""
    encoder_residuals: Literal["recompute", "keep"] = "recompute"
    """`per_mini_batch`: the encoder's backward recomputes activations chunk by chunk, or reads what the forward kept."""
    encoder_residual_bytes: NonNegativeInt = 256 * 2**20
    """`auto`: memory on every device for kept activations; a plan that would need more recomputes."""
    encoder_cache_bytes: PositiveInt = 64 * 2**20
    """`frozen`: memory on every device for features of images that were encoded before."""
    encoder_row_patches: PositiveInt = 64
    prefetch_chunks: PositiveInt = 2
    publish: Literal["update", "train_batch"] = "update"
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When a loss or gradient is not finite: end the run and keep the mini-batch, or leave the update out and count it. It is a
    version all the same."""
    optimizer: OptimizerConfig = OptimizerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    coordinator: str = "127.0.0.1:0"
    """Address of the training group's `jax.distributed` coordinator; port 0 lets the launcher pick a free one."""
    start_timeout_s: PositiveFloat = 120.0
    heartbeat_timeout_s: PositiveFloat = 100.0
    compile_timeout_s: PositiveFloat = 600.0
    """Longest that a training process waits for another to compile the program that both run next."""
    go_timeout_s: PositiveFloat = 60.0
    """Deadline of the scheduler's go for a chunk, from the first process that holds its rows."""
    step_timeout_s: PositiveFloat = 900.0
    """Longest that the main thread may take over a chunk, compilation included; then the process ends, with all its stacks."""


class CheckpointConfig(Section, frozen=True):
    """Checkpoints of training, from which `resume: true` goes on. They are taken where a train batch is complete."""

    every_train_batches: NonNegativeInt = 10
    """0: none, not even after the last update."""
    keep: Annotated[int, msgspec.Meta(ge=2)] = 3
    """At least 2: the one before stays until the newest is complete."""
    retained_share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.5
    """`launch.on_child_death: recover`: once consumed groups that no checkpoint covers fill this share of a storage unit's
    budget, one is taken at the end of the train batch, whether or not it is due."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of writing one, and of the processes' waits for each other."""


class WeightsConfig(Section, frozen=True):
    """How rollout hosts get new weights: over the bulk channel from host to host, or through `weights/` in the run's folder."""

    transfer: Literal["bulk", "directory"] = "directory"
    """`directory` must be shared by all hosts."""
    fan_out: PositiveInt = 2
    """Hosts that bring a version from one training group or host; what a training process's link carries of each version."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of published floats; hosts convert them to the model's. `bulk` only."""
    keep: Annotated[int, msgspec.Meta(ge=2)] = 2
    """Versions that every process holds in memory to serve. `bulk` only; `directory` keeps four."""


class EvalConfig(Section, frozen=True):
    """Greedy evaluation on held-out prompts: `prompts` of them every `every_updates`, `final_prompts` after the last."""

    every_updates: PositiveInt = 50
    prompts: PositiveInt = 64
    final_prompts: PositiveInt = 352


class ControlConfig(Section, frozen=True):
    """The control channel. Loopback by default; port 0 picks a free one. `rpc_timeout_s` bounds every request."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    bulk_host: str = "127.0.0.1"
    tls: bool = False
    """The bulk channel is TLS, each server with a certificate of its own. Needs the command `openssl`. `docs/security.md`."""
    rpc_timeout_s: PositiveFloat = 30.0
    pull_timeout_s: PositiveFloat = 30.0
    pull_retries: NonNegativeInt = 3
    start_timeout_s: PositiveFloat = 120.0
    fsync: bool = True
    """Force the event log to disk before any message that acts on it leaves."""


class PaceConfig(Section, frozen=True):
    """Least times that emulate another machine's schedule on this one: what is done sooner waits. 0: as fast as it goes."""

    update_s: NonNegativeFloat = 0.0
    """A mini-batch's update, from its first chunk to its report."""
    sampler_step_s: NonNegativeFloat = 0.0
    """A step of a rollout host's sampler: prefill of the turns that wait, and one token of every answer under way."""


class LaunchConfig(Section, frozen=True):
    """What the launcher does. `on_child_death: stop` ends the run when any role dies; with `recover` it is started again, at
    most `max_restarts` times in a run: a training process with its whole group, from the newest checkpoint; the scheduler with
    engines and training group; an engine or a storage unit alone. A role of which nothing was heard for `silence_timeout_s` is
    killed, and has died.

    A run that is interrupted or fails is killed after `stop_timeout_s`. Once a run has finished, its roles have
    `finish_timeout_s` to hand in their last reports and leave.
    """

    on_child_death: Literal["stop", "recover"] = "stop"
    max_restarts: NonNegativeInt = 8
    silence_timeout_s: PositiveFloat = 45.0
    stop_timeout_s: PositiveFloat = 3.5
    finish_timeout_s: PositiveFloat = 30.0


class ObserveConfig(Section, frozen=True):
    """Meters beside `metrics.jsonl`, which is always written. All off by default."""

    tensorboard: bool = False
    """Also write TensorBoard event files into the run's folder (extra `tensorboard`)."""
    prometheus_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    """Port of the scheduler's Prometheus endpoint, `/metrics`; null: none, 0: a free one, which its log names."""
    prometheus_host: str = "127.0.0.1"
    """Where it listens: anybody who can reach it can read the run's figures."""


class Config(Section, frozen=True):
    """A run. `run_dir/name/` receives everything that it writes."""

    name: str
    task: TaskConfig
    batch: BatchConfig
    seed: NonNegativeInt = 0
    run_dir: str = "runs"
    resume: bool = False
    """Go on with the run of this name from its newest checkpoint; begin it where there is none."""
    platform: Literal["cpu", "gpu", "tpu"] = "cpu"
    model: ModelSection = ModelSection()
    admission: AdmissionConfig = AdmissionConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    control: ControlConfig = ControlConfig()
    launch: LaunchConfig = LaunchConfig()
    pace: PaceConfig = PaceConfig()
    observe: ObserveConfig = ObserveConfig()

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
        """Number of data shards of the training mesh: parts that rows are split into."""
        return self.train.mesh.get("data", 1) * self.train.mesh.get("fsdp", 1)


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
        raw = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path}: not YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"configuration {path}: expected a mapping of sections, got {type(raw).__name__}")
    for override in overrides or []:
        apply_override(raw, override)
    return parse_config(raw)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Sets `key.sub=value` in a plain mapping, in place. The value is read as YAML."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise ConfigError(f"override {override!r}: expected key.sub=value")
    *parents, leaf = key.strip().split(".")
    node = raw
    for index, parent in enumerate(parents):
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {override!r}: {'.'.join(parents[: index + 1])} is a value, not a section")
    try:
        node[leaf] = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from error


def parse_config(raw: dict[str, Any]) -> Config:
    """Turns a plain mapping into a checked `Config`; raises `ConfigError`."""
    try:
        config = convert_strictly(raw, Config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    check_config(config)
    return config


def config_to_dict(config: Config) -> dict[str, Any]:
    """The resolved configuration as a plain mapping: `parse_config` of it gives the same configuration."""
    return msgspec.to_builtins(config)


def config_to_yaml(config: Config) -> str:
    """The resolved configuration as YAML: `load_config` of it gives the same configuration."""
    return yaml.safe_dump(config_to_dict(config), sort_keys=False, allow_unicode=True)


# --- rules ---------------------------------------------------------------------------------------------------------------


def check_config(config: Config) -> None:
    """Checks what types cannot say: values that contradict each other. Raises `ConfigError` naming key, value and rule."""
    _check_names(config)
    _check_batch(config)
    _check_admission(config)
    _check_lengths(config)
    _check_training(config)


def _refuse(condition: bool, key: str, value: Any, rule: str) -> None:
    if condition:
        raise ConfigError(f"{key}: {rule} (value {short(value)})")


def _check_names(config: Config) -> None:
    _refuse(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", config.name) is None,
        "name",
        config.name,
        "the run's folder is called so: letters, digits, '.', '_' and '-', beginning with a letter or digit, at most 100",
    )
    _refuse(config.seed >= 2**32, "seed", config.seed, "random keys keep 32 bits of it: must be below 4294967296")
    for key, value in _floats(config_to_dict(config), ""):
        _refuse(not math.isfinite(value), key, value, "must be finite")
    for key, value in (
        ("control.rpc_timeout_s", config.control.rpc_timeout_s),
        ("train.start_timeout_s", config.train.start_timeout_s),
        ("train.heartbeat_timeout_s", config.train.heartbeat_timeout_s),
        ("launch.silence_timeout_s", config.launch.silence_timeout_s),
    ):
        _refuse(value < 1, key, value, "must be at least 1: shorter ones end runs that are well")
    _refuse(
        config.launch.on_child_death == "recover" and config.launch.silence_timeout_s >= config.train.go_timeout_s,
        "launch.silence_timeout_s",
        config.launch.silence_timeout_s,
        f"must be below train.go_timeout_s = {config.train.go_timeout_s:g}, which ends the run: a training process that is "
        "stuck is to be started again before (launch.on_child_death: recover)",
    )
    host, _, port = config.train.coordinator.rpartition(":")
    _refuse(
        not host or not port.isdecimal() or int(port) > 65535,
        "train.coordinator",
        config.train.coordinator,
        "expected host:port with a port from 0 to 65535",
    )


def _floats(node: Any, key: str) -> list[tuple[str, float]]:
    if isinstance(node, dict):
        return [found for k, v in node.items() for found in _floats(v, f"{key}.{k}" if key else str(k))]
    return [(key, node)] if isinstance(node, float) else []


def _check_batch(config: Config) -> None:
    batch = config.batch
    _refuse(
        batch.groups % batch.mini_batches != 0,
        "batch.mini_batches",
        batch.mini_batches,
        f"does not divide batch.groups = {batch.groups}; a train batch is K mini-batches of B/K whole groups",
    )
    for attribute, bounds in batch.quotas.items():
        key = f"batch.quotas.{attribute}"
        _refuse(not bounds, key, bounds, "names no value: give each value a min and a max, or remove the attribute")
        least_total = 0
        for value, bound in bounds.items():
            least = groups_of(f"{key}.{value}.min", bound.min, batch.groups)
            most = batch.groups if bound.max is None else groups_of(f"{key}.{value}.max", bound.max, batch.groups)
            _refuse(least > most, f"{key}.{value}.min", bound.min, f"is {least} groups, more than the max, {most}")
            least_total += least
        _refuse(
            least_total > batch.groups,
            key,
            {value: bound.min for value, bound in bounds.items()},
            f"the minima add up to {least_total} groups, but a train batch has batch.groups = {batch.groups}: "
            "no batch can meet them",
        )

    _check_final_rules(config)


def pass_rate_range(text: str) -> tuple[float, float]:
    """`"0..0.25"` -> (0.0, 0.25). Raises `ValueError`."""
    low, dots, high = text.partition("..")
    if not dots or not 0.0 <= float(low) < float(high) <= 1.0:
        raise ValueError(f"expected LOW..HIGH with 0 <= LOW < HIGH <= 1, got {text!r}")
    return float(low), float(high)


def _check_final_rules(config: Config) -> None:
    """Rules on what is known only when a group is done."""
    batch, rollout = config.batch, config.rollout
    ranges: list[tuple[float, float]] = []
    for text, bound in batch.pass_rate.items():
        key = f"batch.pass_rate.{text}"
        try:
            ranges.append(pass_rate_range(text))
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
        least = groups_of(f"{key}.min", bound.min, batch.groups)
        most = batch.groups if bound.max is None else groups_of(f"{key}.max", bound.max, batch.groups)
        _refuse(least > most, f"{key}.min", bound.min, f"is {least} groups, more than the max, {most}")
    ranges.sort()
    overlap = any(after[0] < before[1] for before, after in itertools.pairwise(ranges))
    _refuse(overlap, "batch.pass_rate", list(batch.pass_rate), "ranges overlap; a group must have one of them")
    if batch.spanning_max is not None:
        groups_of("batch.spanning_max", batch.spanning_max, batch.groups)
    tokens, trajectories = batch.mini_batch_tokens, config.mini_batch_groups * batch.trajectories_per_group
    if tokens is not None and tokens < trajectories * rollout.cache_tokens:
        _refuse(
            tokens < 2 * trajectories,
            "batch.mini_batch_tokens",
            tokens,
            f"{trajectories} trajectories of a mini-batch have at least two tokens each",
        )
        _refuse(
            config.admission.schedule == "colocated" or config.admission.policy not in ("mini_batch", "fifo"),
            "batch.mini_batch_tokens",
            tokens,
            f"whole train batches and fixed compositions are cut without looking at lengths: the budget must hold "
            f"{trajectories} trajectories of rollout.cache_tokens = {rollout.cache_tokens}, or admission.policy be mini_batch",
        )


def groups_of(key: str, bound: int | float, groups: int) -> int:
    """A quota bound in groups: integers are counts, floats are shares of `groups` that must give whole groups.

    Raises:
        ConfigError: negative, more than the batch, a share outside 0..1, or a share that gives no whole number of groups.
    """
    if isinstance(bound, int):
        _refuse(not 0 <= bound <= groups, key, bound, f"a count of groups lies in 0..{groups} (batch.groups)")
        return bound
    _refuse(not 0.0 <= bound <= 1.0, key, bound, "a share lies in 0.0..1.0; for a count of groups write an integer")
    count = round(bound * groups)
    _refuse(
        abs(bound * groups - count) > 1e-6 * max(1, groups),
        key,
        bound,
        f"is {bound * groups:g} of batch.groups = {groups}, not a whole number of groups",
    )
    return count


def _check_admission(config: Config) -> None:
    admission = config.admission
    bound, last = admission.staleness_bound, config.batch.mini_batches - 1
    _refuse(
        bound is not None and bound < last and config.train.publish == "train_batch",
        "admission.staleness_bound",
        bound,
        f"with train.publish = train_batch the last mini-batch of a train batch is {last} updates old whatever is admitted; "
        f"at least {last}, or train.publish = update",
    )
    look_ahead = admission.look_ahead_groups
    if isinstance(look_ahead, dict):
        values = {value for bounds in config.batch.quotas.values() for value in bounds}
        for value in look_ahead:
            _refuse(
                value not in values,
                f"admission.look_ahead_groups.{value}",
                look_ahead[value],
                f"look-ahead by value needs a quota for it in batch.quotas (which has {', '.join(sorted(values)) or 'none'})",
            )
    if admission.schedule == "colocated":
        _refuse(
            any(look_ahead.values()) if isinstance(look_ahead, dict) else look_ahead != 0,
            "admission.look_ahead_groups",
            look_ahead,
            "admission.schedule = colocated launches a batch, trains it, then refreshes: look-ahead must be 0",
        )
        _refuse(
            config.train.publish != "train_batch",
            "train.publish",
            config.train.publish,
            "admission.schedule = colocated refreshes its weights at the train batch's boundary only: "
            "must be train_batch",
        )
        _refuse(
            admission.policy not in ("mini_batch", "train_batch"),
            "admission.policy",
            admission.policy,
            "admission.schedule = colocated admits whole train batches: must be mini_batch or train_batch",
        )


def _check_lengths(config: Config) -> None:
    rollout, train = config.rollout, config.train
    _refuse(
        rollout.cache_tokens > train.row_tokens,
        "rollout.cache_tokens",
        rollout.cache_tokens,
        f"a trajectory of this length does not fit a packed row of train.row_tokens = {train.row_tokens}",
    )
    _refuse(
        rollout.prefill_tokens > rollout.cache_tokens,
        "rollout.prefill_tokens",
        rollout.prefill_tokens,
        f"a prefill step writes more than a slot's rollout.cache_tokens = {rollout.cache_tokens}",
    )
    _refuse(
        rollout.max_answer_tokens >= rollout.cache_tokens,
        "rollout.max_answer_tokens",
        rollout.max_answer_tokens,
        f"an answer must leave room for its prompt in rollout.cache_tokens = {rollout.cache_tokens}",
    )
    _refuse(
        config.batch.trajectories_per_group > rollout.slots,
        "batch.trajectories_per_group",
        config.batch.trajectories_per_group,
        f"a group is sampled together on one host, which has rollout.slots = {rollout.slots}",
    )


def _check_training(config: Config) -> None:
    train = config.train
    devices = train.processes * train.devices_per_process
    _refuse(
        train.mesh.get("sequence", 1) > 1,
        "train.mesh.sequence",
        train.mesh.get("sequence"),
        "the update does not split a row's tokens over devices: must be 1; use data, fsdp and tensor, and train.row_tokens "
        "no longer than the longest trajectory needs",
    )
    _refuse(
        math.prod(train.mesh.values()) != devices,
        "train.mesh",
        train.mesh,
        f"its axes multiply to {math.prod(train.mesh.values())}, but train.processes = {train.processes} times "
        f"train.devices_per_process = {train.devices_per_process} is {devices}",
    )
    _refuse(
        train.encoder_mode == "frozen" and train.encoder_trained != "all",
        "train.encoder_trained",
        train.encoder_trained,
        "with train.encoder_mode = frozen nothing of the encoder is trained: leave it out, or choose another mode",
    )
    _refuse(
        config.weights.transfer == "directory" and config.weights.dtype != "float32",
        "weights.dtype",
        config.weights.dtype,
        "files hold parameters as they are trained: must be float32, or weights.transfer = bulk",
    )
    _refuse(
        train.transfer == "dispatch" and config.admission.admit_ahead < config.batch.mini_batches - 1,
        "admission.admit_ahead",
        config.admission.admit_ahead,
        f"train.transfer = dispatch pulls a whole train batch before its first update: at least "
        f"{config.batch.mini_batches - 1} (batch.mini_batches - 1)",
    )
    _refuse(
        train.updates % config.batch.mini_batches != 0,
        "train.updates",
        train.updates,
        f"is not a whole number of train batches of batch.mini_batches = {config.batch.mini_batches} updates",
    )
    for key in ("b1", "b2"):
        _refuse(
            getattr(train.optimizer, key) >= 1.0,
            f"train.optimizer.{key}",
            getattr(train.optimizer, key),
            "a decay rate of Adam is below 1",
        )
