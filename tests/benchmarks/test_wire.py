"""`knittrans bench wire` at its smallest: it runs, checks and says what it must; the figures are the machine's business."""

from typing import Any

import pytest

from knittrans_jax.benchmarks.harness import BenchFailed, report_to_dict
from knittrans_jax.benchmarks.registry import load_bench
from knittrans_jax.benchmarks.wire import layout


def run(*overrides: str) -> dict[str, Any]:
    bench = load_bench("wire", overrides)
    return report_to_dict("wire", {}, bench.run(bench.settings, lambda text: None))


def test_it_compares_with_a_plain_socket_and_says_how_to_install_the_peer():
    result = run("rounds=2", "sizes_mib=[1, 9]", "headline_mib=9", "repeat_mib=9", "round_trips=5")
    assert set(result["socket_ratio_by_mib"]) == set(result["tls_ratio_by_mib"]) == {"1", "9"}
    assert result["socket_ratio"] == result["socket_ratio_by_mib"]["9"] > 0
    assert result["tls_ratio"] > 0
    assert set(result["round_trip_s"]) == {"bulk channel", "control channel"}
    assert result["transferqueue_ratio"] is None
    assert "pip install" in result["transferqueue"]["how_to_install"]


def test_a_headline_that_is_not_measured_is_refused():
    with pytest.raises(BenchFailed, match="headline_mib=64"):
        run("sizes_mib=[1]")


def test_payloads_have_the_size_that_they_are_called_by():
    assert {size: rows * row_bytes for size, (rows, row_bytes) in ((s, layout(s)) for s in (1, 9, 64, 288))} == {
        1: 2**20,
        9: 9 * 2**20,
        64: 14 * 4_718_592,
        288: 288 * 2**20,
    }
