"""`knittrans bench weights` at its smallest: it runs and says what it must; times are the machine's business, bytes are not."""

from knittrans_jax.benchmarks.harness import report_to_dict
from knittrans_jax.benchmarks.registry import load_bench


def test_a_chain_takes_each_version_from_the_trainer_once_and_the_directory_is_written_once() -> None:
    bench = load_bench("weights", ["quick=true"])
    result = report_to_dict("weights", {}, bench.run(bench.settings, lambda text: None))
    loopback, linked = result["time_over_limit"]["0"], result["time_over_limit"]["40"]
    assert set(loopback["1"]) == {"chain", "tree", "no fan-out", "directory", "plain socket"}
    assert loopback["3"]["plain socket"] == 1
    assert result["trainer_copies"]["1"] == {"chain": 1, "tree": 1, "no fan-out": 1}
    assert result["trainer_copies"]["3"] == {"chain": 1, "tree": 2, "no fan-out": 3}
    assert linked["3"]["no fan-out"] > 2.5  # three versions over one link
    assert all(value > 0.9 for value in linked["3"].values())
    assert all(value > 0 for value in result["stall_s"].values())
