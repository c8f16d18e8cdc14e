import json
import statistics
import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest

from knittrans_jax.benchmarks.harness import AGAIN, BenchFailed, Report, measure, report_to_dict, timed, write_report
from knittrans_jax.benchmarks.registry import BENCHES, BenchSettings, load_bench
from knittrans_jax.benchmarks.statistics import ratio, spread
from knittrans_jax.cli import main
from knittrans_jax.config import ConfigError

values = st.lists(st.floats(0.1, 1e3), min_size=1, max_size=12)


@hypothesis.given(values)
def test_the_spread_is_ordered_and_its_median_is_the_usual_one(samples: list[float]):
    found = spread(samples)
    assert found.median == pytest.approx(statistics.median(samples))
    assert found.least <= found.quartile_low <= found.median <= found.quartile_high <= found.most
    assert found.samples == tuple(samples)


@hypothesis.given(values, st.floats(0.1, 10))
def test_a_ratio_is_that_of_the_medians_and_a_constant_factor_has_no_spread(samples: list[float], factor: float):
    found = ratio([factor * one for one in samples], samples)
    assert found is not None
    assert found.value == pytest.approx(factor)
    assert (found.low, found.high) == pytest.approx((factor, factor)), "rounds are drawn together"


def test_the_interval_of_a_ratio_holds_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        one, other = rng.lognormal(0, 0.2, (2, 25))
        found = ratio((1.5 * one).tolist(), other.tolist())
        assert found is not None
        held += found.low <= 1.5 <= found.high
    assert 0.88 <= held / 200 <= 1.0


def test_a_figure_that_is_zero_has_no_ratio_and_one_that_is_not_finite_is_refused():
    assert ratio([1.0, 2.0], [0.0, 0.0]) is None
    with pytest.raises(ValueError, match="not finite"):
        spread([1.0, float("nan")])
    with pytest.raises(ValueError, match="no samples"):
        spread([])
    with pytest.raises(ValueError, match="2 and 1 samples"):
        ratio([1.0, 2.0], [1.0])


def test_sides_are_interleaved_and_one_runs_twice_in_every_round():
    ran: list[tuple[str, int]] = []

    def side(name: str, cost: float):
        def run(index: int):
            ran.append((name, index))
            return {"cost": cost + 0.01 * index}

        return run

    found = measure("m", {"a": side("a", 1.0), "b": side("b", 3.0)}, rounds=6, twice="b")
    assert ran[:2] == [("a", -1), ("b", -1)], "the warm-up is not counted"
    rounds = [ran[2 + 3 * index : 5 + 3 * index] for index in range(6)]
    assert all(sorted(one) == [("a", index), ("b", index), ("b", index)] for index, one in enumerate(rounds))
    assert len({tuple(name for name, _ in one) for one in rounds}) > 1, "the order changes from round to round"
    assert set(found.sides) == {"a", "b"}
    assert AGAIN not in "".join(found.sides)
    assert found.sides["b"]["cost"].samples == pytest.approx([3.0, 3.01, 3.02, 3.03, 3.04, 3.05])
    assert found.floor["cost"] is not None
    assert found.floor["cost"].distance == 0.0
    assert found.outside_noise("b", "cost") is True


def test_a_difference_that_two_runs_of_one_side_also_show_is_called_none():
    rng = np.random.default_rng(0)
    found = measure(
        "noisy", {name: lambda index: {"wall_s": rng.lognormal(0, 0.3)} for name in ("a", "same")}, rounds=30
    )
    assert found.floor["wall_s"] is not None
    assert 0.02 < found.floor["wall_s"].distance < 0.6
    assert found.outside_noise("same", "wall_s") is False
    single = measure("once", {"a": lambda index: {"wall_s": 1.0}, "b": lambda index: {"wall_s": 9.0}}, rounds=1)
    assert single.outside_noise("b", "wall_s") is None, "one round cannot tell"


def test_a_side_that_changes_its_figures_or_measures_nothing_fails_by_name():
    with pytest.raises(BenchFailed, match=r"side 'a'.*gave \['y'\], but \['x'\] before"):
        measure("m", {"a": lambda index: {"x": 1.0} if index < 1 else {"y": 1.0}}, rounds=2)
    with pytest.raises(BenchFailed, match="x is nan"):
        measure("m", {"a": lambda index: {"x": float("nan")}}, rounds=1)
    with pytest.raises(ValueError, match="base = 'c' is no side; the sides are a, b"):
        measure("m", {"a": lambda index: {}, "b": lambda index: {}}, rounds=1, base="c")


def test_the_result_is_json_with_machine_versions_and_every_sample(tmp_path: Path):
    table = measure("m", {"a": lambda index: timed(lambda: None), "b": lambda index: {"wall_s": 1.0}}, rounds=3)
    result = report_to_dict("x", {"rounds": 3}, Report([table], {"steps": [{"name": "n", "measured": 2.0}]}, ["said"]))
    read = json.loads(write_report(tmp_path / "new", result).read_text())
    assert read["steps"] == [{"name": "n", "measured": 2.0}]
    assert read["machine"]["cores"] >= 1
    assert read["versions"]["python"] == sys.version.split()[0]
    assert len(read["tables"][0]["sides"]["a"]["wall_s"]["samples"]) == 3
    assert read["tables"][0]["noise_floor"]["side"] == "a"
    with pytest.raises(BenchFailed, match="headline uses machine"):
        report_to_dict("x", {}, Report([], {"machine": 1}))
    with pytest.raises(BenchFailed, match=r"x\.steps\[0\]: is inf"):
        report_to_dict("x", {}, Report([], {"steps": [float("inf")]}))


def test_every_registered_benchmark_has_settings_that_load_by_themselves():
    for name in BENCHES:
        bench = load_bench(name, [])
        assert isinstance(bench.settings, BenchSettings)
        assert msgspec.to_builtins(bench.settings) is not None
    with pytest.raises(ConfigError, match=r"bench noise: .*round"):
        load_bench("noise", ["round=3"])


def test_the_command_prints_one_json_object_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "noise", "rounds=4", "work=20", "--json", "--out", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["arguments"] == {"rounds": 4, "work": 20, "extra": 0.25}
    assert printed["noise_floor"] >= 0
    (kept,) = tmp_path.glob("noise-*.json")
    assert json.loads(kept.read_text()) == printed
    assert main(["bench", "noise", "rounds=4", "work=20", "--out", str(tmp_path)]) == 0
    assert "one (again)" in capsys.readouterr().out


def test_an_unknown_benchmark_is_wrong_use_and_lists_those_there_are(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "nosie"]) == 2
    told = capsys.readouterr().err
    assert all(name in told for name in BENCHES)


def test_naming_benchmarks_loads_no_jax():
    code = "import sys; from knittrans_jax.cli import main; main(['bench', '?']); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=60).returncode == 0
