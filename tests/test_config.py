"""A configuration that cannot run is refused before anything starts: the message names key, value and rule."""

import copy
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knittrans_jax.config import (
    Config,
    ConfigError,
    apply_override,
    config_to_yaml,
    groups_of,
    load_config,
    parse_config,
)
from knittrans_jax.strict_yaml import parse_yaml

SMALL = {
    "name": "small",
    "task": {"name": "digits-read"},
    "batch": {"groups": 8, "mini_batches": 2, "trajectories_per_group": 4},
}


def parse(*overrides: str) -> Config:
    raw = copy.deepcopy(SMALL)
    for override in overrides:
        apply_override(raw, override)
    return parse_config(raw)


WRONG = [
    # overrides, the key, the value as shown, part of the rule
    (["train.objectiv.x=1"], "train.objectiv", "{'x': 1}", "did you mean objective?"),
    (["batch.quotas.domain.cells.least=3"], "batch.quotas.domain.cells.least", "3", "known: min, max"),
    (["rollout.slots=1.5"], "rollout.slots", "1.5", "expected `int`"),
    (["rollout.slots=true"], "rollout.slots", "True", "expected `int`"),
    (["rollout.slots=0"], "rollout.slots", "0", ">= 1"),
    (["control.port=70000"], "control.port", "70000", "<= 65535"),
    (["train=null"], "train", "None", "expected `object`"),
    (["admission.policy=greedy"], "admission.policy", "'greedy'", "expected one of fifo, mini_batch"),
    (["train.mesh={model: 2}"], "train.mesh.model", "2", "one of data"),
    (["train.mesh={data: 1, sequence: 2}"], "train.mesh.sequence", "2", "must be 1"),
    (["train.mesh={data: 0}"], "train.mesh.data", "0", ">= 1"),
    (["batch.quotas.domain.cells.min=abc"], "batch.quotas.domain.cells.min", "'abc'", "expected `int | float`"),
    (
        ["batch.quotas={domain: {a: {min: 1}, b: {min: x}}}"],
        "batch.quotas.domain.b.min",
        "'x'",
        "expected `int | float`",
    ),
    (["batch.quotas={level: {1: {min: 2}}}"], "batch.quotas.level.1", "{'min': 2}", "quote it"),
    (["admission.look_ahead_groups={a: -3}"], "admission.look_ahead_groups.a", "-3", ">= 0"),
    (["batch.mini_batches=3"], "batch.mini_batches", "3", "does not divide batch.groups = 8"),
    (["train.processes=3"], "train.mesh", "{'data': 2}", "train.processes = 3"),
    (["train.mesh={}"], "train.mesh", "{}", "train.processes = 2"),
    (["seed=4294967296"], "seed", "4294967296", "32 bits"),
    (["control.rpc_timeout_s=0.01"], "control.rpc_timeout_s", "0.01", "at least 1"),
    (["train.heartbeat_timeout_s=0.5"], "train.heartbeat_timeout_s", "0.5", "at least 1"),
    (["train.devices_per_process=2"], "train.mesh", "{'data': 2}", "is 4"),
    (["train.updates=3"], "train.updates", "3", "whole number of train batches"),
    (["batch.quotas.domain.a.min=0.3"], "batch.quotas.domain.a.min", "0.3", "not a whole number of groups"),
    (["batch.quotas.domain.a.max=1.5"], "batch.quotas.domain.a.max", "1.5", "0.0..1.0"),
    (["batch.quotas.domain.a.min=-1"], "batch.quotas.domain.a.min", "-1", "0..8"),
    (["batch.quotas.domain.a={min: 5, max: 4}"], "batch.quotas.domain.a.min", "5", "more than the max, 4"),
    (
        ["batch.quotas.domain={a: {min: 5}, b: {min: 4}}"],
        "batch.quotas.domain",
        "{'a': 5, 'b': 4}",
        "no batch can meet",
    ),
    (["batch.quotas.domain={}"], "batch.quotas.domain", "{}", "names no value"),
    (["admission.look_ahead_groups={a: 3}"], "admission.look_ahead_groups.a", "3", "needs a quota"),
    (["admission.schedule=colocated"], "train.publish", "'update'", "must be train_batch"),
    (
        ["admission.schedule=colocated", "train.publish=train_batch", "admission.look_ahead_groups=4"],
        "admission.look_ahead_groups",
        "4",
        "look-ahead must be 0",
    ),
    (["rollout.cache_tokens=200"], "rollout.cache_tokens", "200", "train.row_tokens = 128"),
    (["rollout.prefill_tokens=129"], "rollout.prefill_tokens", "129", "rollout.cache_tokens = 128"),
    (["rollout.max_answer_tokens=128"], "rollout.max_answer_tokens", "128", "room for its prompt"),
    (["rollout.slots=3"], "batch.trajectories_per_group", "4", "rollout.slots = 3"),
    (["train.optimizer.learning_rate=.inf"], "train.optimizer.learning_rate", "inf", "finite"),
    (["train.optimizer.b2=1.0"], "train.optimizer.b2", "1.0", "below 1"),
    (["train.coordinator=nowhere"], "train.coordinator", "'nowhere'", "host:port"),
    (["name=../elsewhere"], "name", "'../elsewhere'", "folder"),
]


@pytest.mark.parametrize(("overrides", "key", "value", "rule"), WRONG, ids=[" ".join(case[0]) for case in WRONG])
def test_an_impossible_configuration_names_key_value_and_rule(
    overrides: list[str], key: str, value: str, rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*overrides)
    message = str(caught.value)
    assert message.startswith(f"{key}: ")
    assert f"(value {value})" in message
    assert rule in message


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^task\.name: required"):
        parse("task={}")


def test_overrides_reach_into_sections_and_are_read_as_yaml() -> None:
    config = parse("train.optimizer.learning_rate=1e-3", "batch.quotas.domain.cells={min: 0.5, max: 4}", "seed=7")
    assert config.train.optimizer.learning_rate == 1e-3
    assert config.batch.quotas["domain"]["cells"].max == 4
    assert config.seed == 7


@pytest.mark.parametrize("override", ["no equals", "=3", "a..b=3", "name.sub=3", "seed={"])
def test_an_override_that_says_nothing_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        parse(override)


def test_a_file_that_is_missing_or_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    for text, rule in (("- a\n", "expected a mapping"), ("a: [", "not YAML"), ("a: 1\na: 2\n", "'a' is given twice")):
        path = tmp_path / "wrong.yaml"
        path.write_text(text)
        with pytest.raises(ConfigError, match=rule):
            load_config(path)


def test_the_resolved_configuration_reads_back_as_itself(tmp_path: Path) -> None:
    config = parse("batch.quotas.domain={a: {min: 0.25}, b: {max: 3}}", "admission.look_ahead_groups={a: 2}")
    path = tmp_path / "config.yaml"
    path.write_text(config_to_yaml(config))
    assert load_config(path) == config


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_with_and_without_a_dot_are_numbers(value: float) -> None:
    assert math.isclose(parse_yaml(f"{value:e}"), value, rel_tol=1e-6)
    assert parse_yaml(repr(value)) == value


@given(st.integers(1, 500), st.integers(0, 500))
def test_a_share_gives_the_groups_it_was_made_of(groups: int, part: int) -> None:
    part = min(part, groups)
    assert groups_of("key", part / groups, groups) == part
    assert groups_of("key", part, groups) == part


@given(st.integers(2, 500), st.integers(0, 499), st.floats(0.01, 0.99))
def test_a_share_between_whole_groups_is_refused(groups: int, part: int, between: float) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        groups_of("key", (min(part, groups - 1) + between) / groups, groups)
