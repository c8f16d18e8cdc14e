"""One recorded mini-batch, laid out in many ways, has one gradient and one update; and encode-once has the naive one.

Runs on four CPU devices in a process of its own: it proves the arithmetic and the shardings, not an accelerator's kernels.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def report() -> Any:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("step_process.py"))],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_gradient_does_not_depend_on_micro_batches_shards_packing_or_encoder_mode(report: Any):
    layouts = report["images"]["layouts"] | report["text"]["layouts"]
    assert {row["micro_batches"] for row in layouts.values()} >= {2, 8}
    for name, row in layouts.items():
        assert row["gradient"] < 3e-6, (name, row)
        assert row["loss"] < 1e-6, (name, row)


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_parameters_after_one_update_agree_to_1e_6_per_tensor(report: Any):
    for kind in ("images", "text"):
        for name, row in report[kind]["layouts"].items():
            assert row["parameters"] < 1e-6, (kind, name, row)


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_every_tensor_has_a_gradient_and_the_encoder_has_none_without_images(report: Any):
    assert report["images"]["smallest_decoder_norm"] > 0
    assert report["images"]["encoder_norm"] > 0
    assert report["text"]["encoder_norm"] == 0
