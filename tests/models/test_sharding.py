"""Sharding rules. What eight CPU devices prove: every layout computes the same values; not how fast a TPU does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

from knittrans_jax.models import PRESETS, abstract_model, preset
from knittrans_jax.models.sharding import ShardingError, param_specs, shard_rules

TINY = preset("tiny")
SHAPES = abstract_model(TINY)[1]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_parameter_of_every_preset_has_a_rule_and_matrices_are_split(name: str):
    config = preset(name)
    shapes = abstract_model(config)[1]
    sizes = {"data": 2, "fsdp": 2, "tensor": 2}
    specs = param_specs(shapes, shard_rules(config), sizes)
    kept, total = 0, 0
    for (path, leaf), spec in zip(
        jax.tree.leaves_with_path(shapes), jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)), strict=True
    ):
        parts = 1
        for entry in spec:
            for axis in (entry,) if isinstance(entry, str) else entry or ():
                parts *= sizes[axis]
        assert path[-1].key in ("scale", "bias") or parts >= 2, path
        kept, total = kept + leaf.size // parts, total + leaf.size
    assert kept < total * (0.26 if config.vision is None else 0.5)


def test_the_first_rule_that_matches_decides():
    own = ((r"decoder\.embedding", (None, "fsdp")),)
    specs = param_specs(SHAPES, own + shard_rules(TINY), {"tensor": 2, "fsdp": 2})
    assert specs["decoder"]["embedding"] == P(None, "fsdp")
    assert specs["decoder"]["head"] == P(("fsdp", "tensor"))


def test_axes_that_the_mesh_lacks_split_nothing():
    specs = param_specs(SHAPES, shard_rules(TINY), {"data": 8})
    assert set(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))) == {P()}


@pytest.mark.parametrize(
    ("rules", "sizes", "message"),
    [
        (shard_rules(preset("tiny-text")), {"fsdp": 2}, r"no sharding rule matches parameter encoder\.\S+ \[\d+"),
        (shard_rules(TINY), {"tensor": 5}, r"decoder\.embedding \[48, 64\]: axis 0 of 48 .* 5 devices .*tensor = 5"),
        (((r".*", (None, None, None, "fsdp")),), {"fsdp": 2}, r"parameter decoder\.embedding .* has 4 entries"),
        (((r".*", ("model",)),), {"fsdp": 2}, r"parameter decoder\.embedding: .* \['model'\]"),
        (shard_rules(TINY), {"model": 2}, r"mesh axes \['model'\]"),
    ],
)
def test_errors_name_the_parameter(rules: Any, sizes: dict[str, int], message: str):
    with pytest.raises(ShardingError, match=message):
        param_specs(SHAPES, rules, sizes)


@pytest.mark.newest
def test_eight_devices_under_a_mesh_of_every_axis_compute_what_one_device_computes():
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    script = Path(__file__).with_name("sharding_process.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["fsdp", "tensor", "sequence", "vocabulary"]
