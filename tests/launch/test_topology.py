"""Reading the TPU compiler's text, and what is said where there is no TPU compiler. Compilation itself: tests/tpu."""

import importlib.util

import pytest

from knittrans_jax.config import ConfigError
from knittrans_jax.launch.topology import ProgramReport, collectives_of, topology_devices

HLO = """
HloModule jit_finish
%add (x: f32[], y: f32[]) -> f32[] { ... }
ENTRY %main {
  %all-reduce.3 = f32[16,8]{1,0:T(8,128)} all-reduce(f32[16,8]{1,0} %p0), replica_groups={{0,1}}, to_apply=%add
  %ar = (f32[4]{0}, bf16[6]{0}) all-reduce(f32[4]{0} %a, bf16[6]{0} %b), to_apply=%add
  %ags = (bf16[4]{0}, bf16[8]{0}) all-gather-start(bf16[4]{0} %c), dimensions={0}
  %agd = bf16[8]{0} all-gather-done((bf16[4]{0}, bf16[8]{0}) %ags)
  %permute = (pred[3], pred[3], u32[], u32[]) collective-permute-start(pred[3] %d), source_target_pairs={{0,1}}
  ROOT %fusion = f32[16,8]{1,0} fusion(f32[16,8]{1,0} %all-reduce.3), kind=kLoop, calls=%not-an-all-reduce
}
"""


def test_collectives_are_counted_once_with_the_bytes_of_their_results() -> None:
    counts, size_bytes = collectives_of(HLO)
    assert counts == {"all-gather": 1, "all-reduce": 2, "collective-permute": 1}
    assert size_bytes == 16 * 8 * 4 + 4 * 4 + 6 * 2 + 8 * 2 + 3


def test_memory_at_the_peak_counts_reused_arguments_once() -> None:
    report = ProgramReport(
        name="x", devices=1, argument_bytes=10, output_bytes=10, temporary_bytes=5, aliased_bytes=8,
        flops=1.0, bytes_accessed=1.0, collectives={}, collective_bytes=0,
    )  # fmt: skip
    assert report.peak_bytes == 17
    assert report.as_dict()["peak_bytes"] == 17


@pytest.mark.parametrize("name", ["", "v5e", "v5e:4", "v9:2x2", "v5e:ax4", "v5e:2x2x2x2"])
def test_a_topology_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--topology: expected a name such as v5e:4x4"):
        topology_devices(name)


def test_without_the_tpu_compiler_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"knittrans-jax\[tpu\]"):
        topology_devices("v5e:4x4")
