import json

import pytest

from knittrans_jax.benchmarks.admission import INSTANCE, Settings, bench, load_instance


def test_the_admission_benchmark_reports_what_it_promises():
    settings = Settings(rounds=1, groups=1024, pool_rounds=1, pool_groups=512, largest_pool=1000, trajectories=2)
    report = bench(settings, lambda text: None)
    figures = report.headline
    assert {
        "groups_per_s_1_attribute",
        "groups_per_s_3_attributes",
        "ratio_1m_over_1k",
        "fallback_share",
        "fallback_p99_ms",
        "bytes_per_ready_group",
    } <= figures.keys()
    assert figures["groups_per_s_1_attribute"] > figures["groups_per_s_3_attributes"] > 0
    assert figures["ratio_1m_over_1k"] == pytest.approx(1.0), "one size of pool, compared with itself"
    assert 0 <= figures["fallback_share"] < 0.2
    assert figures["bytes_per_ready_group"] > 100


def test_the_instance_has_the_recorded_quotas():
    raw = json.loads(INSTANCE.read_text())
    rules = load_instance(3).rules
    assert rules.prompt_attributes == ("domain", "difficulty", "language")
    for quota in raw["quotas"]:
        attribute = next(one for one in rules.attributes if one.name == quota["attribute"])
        found = attribute.quotas[quota["value"]]
        assert (found.least, found.most) == (quota["min"], quota["max"])
    assert load_instance(1).rules.prompt_attributes == ("domain",)
