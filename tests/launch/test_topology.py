"""Reading the TPU compiler's text, and what is said where there is no TPU compiler. Compilation itself: tests/tpu."""

import importlib.util

import pytest

from knittrans_jax.config import ConfigError
from knittrans_jax.launch.collectives import Collective, count_kinds, read_collectives
from knittrans_jax.launch.topology import ProgramReport, topology_devices

HLO = """
HloModule jit_finish
%add (x: f32[], y: f32[]) -> f32[] { ... }

%layer (p: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {
  %ags = (bf16[4]{0}, bf16[8]{0}) all-gather-start(bf16[4]{0} %c), replica_groups=[4,2]<=[8], dimensions={0}
  ROOT %agd = bf16[8]{0} all-gather-done((bf16[4]{0}, bf16[8]{0}) %ags)
}

%shared (x: f32[4]) -> f32[4] {
  %ar = (f32[4]{0}, bf16[6]{0}) all-reduce(f32[4]{0} %a, bf16[6]{0} %b), to_apply=%add
}

%micro_batch (p: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {
  %inner = (s32[], f32[16,8]) while((s32[], f32[16,8]) %q), condition=%less, body=%layer
  %called = f32[4] fusion(f32[4] %x), kind=kCustom, calls=%shared
}

ENTRY %main {
  %all-reduce.3 = f32[16,8]{1,0:T(8,128)} all-reduce(f32[16,8]{1,0} %p0), replica_groups={{0,1,2},{3,4,5}}, to_apply=%add
  %permute = (pred[3], pred[3], u32[], u32[]) collective-permute-start(pred[3] %d), source_target_pairs={{0,1}}
  %loop = (s32[], f32[16,8]) while((s32[], f32[16,8]) %t), condition=%less.2, body=%micro_batch
  ROOT %fusion = f32[16,8]{1,0} fusion(f32[16,8]{1,0} %all-reduce.3), kind=kLoop, calls=%not-an-all-reduce
}
"""


def test_collectives_are_read_once_with_size_group_and_loops() -> None:
    found = read_collectives(HLO)
    assert found == [
        Collective("all-gather", 8 * 2, 2, 2),
        Collective("all-reduce", 4 * 4 + 6 * 2, None, 1),
        Collective("all-reduce", 16 * 8 * 4, 3, 0),
        Collective("collective-permute", 3, None, 0),
    ]
    assert count_kinds(found) == {"all-gather": 1, "all-reduce": 2, "collective-permute": 1}


def test_memory_at_the_peak_counts_reused_arguments_once() -> None:
    report = ProgramReport(
        name="x", devices=1, argument_bytes=10, output_bytes=10, temporary_bytes=5, aliased_bytes=8,
        flops=1.0, bytes_accessed=1.0, collectives=(Collective("all-reduce", 8, 2, 1), Collective("all-gather", 4, 2, 0)),
    )  # fmt: skip
    assert report.peak_bytes == 17
    told = report.as_dict()
    assert (told["peak_bytes"], told["collective_bytes"]) == (17, 12)
    assert (told["collectives"], told["collectives_in_loops"]) == (
        {"all-gather": 1, "all-reduce": 1},
        {"all-reduce": 1},
    )


@pytest.mark.parametrize("name", ["", "v5e", "v5e:4", "v9:2x2", "v5e:ax4", "v5e:2x2x2x2"])
def test_a_topology_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--topology: expected a name such as v5e:4x4"):
        topology_devices(name)


def test_without_the_tpu_compiler_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"knittrans-jax\[tpu\]"):
        topology_devices("v5e:4x4")
