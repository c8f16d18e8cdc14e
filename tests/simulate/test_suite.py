"""The suite of the simulator: what is measured, what bounds it, and what the command says of it."""

import json
import xml.etree.ElementTree
from pathlib import Path

import msgspec
import numpy as np
import pytest

from knittrans_jax.cli import DONE, main
from knittrans_jax.config import ConfigError
from knittrans_jax.simulate.bound import lower_bound, newest_version
from knittrans_jax.simulate.show import frontier, write_pictures
from knittrans_jax.simulate.suite import Job as SuiteJob
from knittrans_jax.simulate.suite import load_suite, reduction, run_job
from knittrans_jax.simulate.sweep import Sweep, fastest, least_stale
from knittrans_jax.simulate.workloads import (
    EVERYTHING,
    Latency,
    Pace,
    Point,
    Setting,
    Workload,
    architectural_by_publish,
    measure,
    simulate_once,
)

CONFIGS = Path(__file__).parents[2] / "configs" / "sim"
QUICK = load_suite(CONFIGS / "quick.yaml")
PACE = msgspec.structs.replace(QUICK.pace, seeds=1, warm_up_batches=2, measured_batches=4)
SIXTEEN = msgspec.structs.replace(PACE, groups=64, mini_batches=16, publish_s=0.5)


def point(step_s: float, stale: float) -> Point:
    return Point(
        look_ahead=0,
        look_ahead_groups=0.0,
        step_time_s=step_s,
        step_time_sd_s=0.0,
        architectural_mean_updates=stale,
        architectural_sd_updates=0.0,
        architectural_mean_train_steps=0.0,
        trainer_idle_share=0.0,
        launched_beyond=0.0,
        filtered=0.0,
        waits_s={},
    )


def constant(latency_s: float) -> Workload:
    return Workload(latency={EVERYTHING: Latency(mean_s=latency_s, sigma=0.0)})


def test_the_suite_is_what_its_figures_are_stated_for():
    suite = load_suite(CONFIGS / "suite.yaml")
    pace = suite.pace
    assert (pace.groups, pace.mini_batches, pace.train_s, pace.publish_s) == (256, 16, 1.0, 0.5)
    assert pace.seeds >= 5
    assert suite.publish[0] == "train_batch"
    assert suite.names == ["short", "even", "long", "tail", "lagging", "overlapping", "filtered", "scarce-slots"]
    for file in CONFIGS.glob("*.yaml"):
        assert file.read_text().startswith(f"# knittrans simulate configs/sim/{file.name}\n")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pace.groups=30", "pace.groups: must be a multiple of pace.mini_batches = 4"),
        ("pace.seeds=0", "pace.seeds"),
        ("pace.publish_s=2.0", "pace.publish_s: a version is on its way no longer than an update takes"),
        ("workloads=[long]", "workloads: 'long' is not in library, which has short, lagging"),
        ("policies=[mini_batch, mini_batch]", "policies: at least one, none twice"),
        ("policies=[best]", "policies.0: invalid enum value 'best'"),
        ("library.short.latencies={}", "did you mean latency"),
        ("library.lagging.latency={quick: {mean_s: 1}}", "library.lagging.latency: needs one of each of quick, slow"),
        ("library.lagging.dropped={slow: 1.0}", "library.lagging.dropped.slow: a share below 1"),
        ("library.lagging.quotas.domain.slow={min: 0.5}", "library.lagging: batch.quotas.domain"),
    ],
)
def test_a_wrong_suite_is_refused_by_key(override: str, message: str):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        load_suite(CONFIGS / "quick.yaml", [override])


@pytest.mark.parametrize("policy", ["mini_batch", "train_batch", "proportional", "fifo"])
def test_one_run_gives_the_figures_of_both_ways_of_publishing(policy: str):
    setting = Setting(QUICK.library["lagging"], PACE, policy, 16)
    per_update, per_batch = (simulate_once(setting, 3, publish) for publish in ("update", "train_batch"))
    assert per_update.updated_s == per_batch.updated_s
    found = architectural_by_publish(per_update, PACE.mini_batches)
    assert found["train_batch"] == pytest.approx([one.architectural for one in per_batch.staleness])
    assert found["update"] == pytest.approx([one.architectural for one in per_update.staleness])


def test_two_settings_launch_the_same_groups():
    early, late = (measure(Setting(constant(1.5), PACE, "mini_batch", ahead)) for ahead in (8, 32))
    assert early["train_batch"].architectural_mean_updates < late["train_batch"].architectural_mean_updates
    assert late["train_batch"].step_time_s == pytest.approx(PACE.ideal_step_s)


def test_the_bound_is_what_can_be_worked_out_by_hand():
    # Launched when a version is published, 0.5 s after the boundary, a group of 4 s is there for mini-batch 5 at the earliest.
    assert lower_bound(constant(4.0), SIXTEEN, "train_batch") == pytest.approx(16 * 5 / 16)
    assert lower_bound(constant(4.0), SIXTEEN, "train_batch", idle_s=2.0) == pytest.approx(16 * 3 / 16)
    assert lower_bound(constant(20.0), SIXTEEN, "train_batch") == pytest.approx(16 * (16 + 5) / 16)


def test_versions_published_per_update_are_counted_one_by_one():
    times_s = np.array([-16.0, -15.5, -0.6, 0.4, 0.5, 1.49, 1.5, 15.4])
    assert newest_version(times_s, SIXTEEN, "update").tolist() == [-17, -16, -2, -1, 0, 0, 1, 14]
    assert newest_version(times_s, SIXTEEN, "train_batch").tolist() == [-32, -16, -16, -16, 0, 0, 0, 0]


@pytest.mark.parametrize("policy", ["mini_batch", "train_batch"])
def test_no_setting_gets_below_the_bound_at_its_step_time(policy: str):
    workload = constant(3.0)
    for look_ahead in (0, 4, 8, 16, 24, 32):
        found = measure(Setting(workload, PACE, policy, look_ahead))["train_batch"]
        idle_s = found.step_time_s - PACE.ideal_step_s
        assert found.architectural_mean_updates >= lower_bound(workload, PACE, "train_batch", idle_s) - 1e-6


def test_of_equally_fast_settings_the_least_stale_one_is_the_fastest():
    points = [point(16.0, 20.0), point(16.001, 12.0), point(16.2, 8.0), point(17.0, 4.0), point(17.5, 5.0)]
    assert fastest(points).architectural_mean_updates == 12.0
    assert least_stale(points, 1.02 * 16.0).architectural_mean_updates == 8.0
    assert least_stale(points, 10.0).step_time_s == 16.0
    assert reduction(points[2], points[0]) == pytest.approx(0.6)
    assert reduction(points[2], point(16.0, 0.0)) is None
    assert [one["step_time_s"] for one in frontier([msgspec.to_builtins(one) for one in points])] == [
        16.0,
        16.001,
        16.2,
        17.0,
    ]


def test_a_sweep_finds_the_least_look_ahead_that_keeps_a_limit():
    sweep = Sweep(constant(1.5), PACE, "mini_batch")
    sweep.run([])
    best = least_stale(sweep.points, 1.02 * fastest(sweep.points).step_time_s)
    for look_ahead in range(int(best.look_ahead_groups) - 1):
        assert sweep.at(look_ahead).step_time_s > 1.02 * PACE.ideal_step_s


def test_auto_gives_the_slow_domain_the_look_ahead():
    workload = QUICK.library["lagging"]
    pace: Pace = msgspec.structs.replace(QUICK.pace, seeds=1)
    _, auto = run_job(SuiteJob("lagging", workload, pace, "mini_batch", "train_batch", ()))
    assert auto is not None
    uniform = measure(Setting(workload, pace, "mini_batch", auto["train_batch"].look_ahead))["train_batch"]
    assert auto["train_batch"].step_time_s < uniform.step_time_s


def test_the_command_prints_one_json_object_and_draws_every_workload(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    small = ["pace.seeds=1", "pace.measured_batches=4", "policies=[mini_batch, train_batch]", "workloads=[short]"]
    status = main(["simulate", str(CONFIGS / "quick.yaml"), *small, "workers=1", "--json", "--pictures", str(tmp_path)])
    out, err = capfd.readouterr()
    assert status == DONE, err
    answer = json.loads(out)
    (workload,) = answer["workloads"]
    assert workload["name"] == "short"
    assert set(workload["policies"]) == {"mini_batch", "train_batch"}
    for points in workload["policies"].values():
        for one in points:
            assert one.keys() >= {
                "look_ahead",
                "step_time_s",
                "architectural_mean_updates",
                "architectural_mean_train_steps",
                "trainer_idle_share",
            }
    assert any(one["look_ahead"] == 32 for one in workload["policies"]["train_batch"])
    assert 0 < workload["reduction_vs_fastest"] < 1
    assert workload["auto"]["best_fixed"]["step_time_s"] > 0
    assert workload["lower_bound"] > 0
    assert workload["other_publish"]["update"]["publish"] == "update"
    assert "2/2" in err
    picture = tmp_path / "simulate-short.svg"
    assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")
    assert write_pictures(tmp_path, answer) == [picture]
