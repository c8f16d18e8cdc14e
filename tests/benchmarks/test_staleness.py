"""What the staleness benchmark decides without a real run: look-ahead, what is cut off, and when a prediction is good."""

import random

import msgspec
import numpy as np
import pytest

from knittrans_jax.benchmarks.staleness import LOOK_AHEADS, SLACK, Bench, Settings, tune, within
from knittrans_jax.simulate.engine import TRAJECTORY, Flight
from knittrans_jax.simulate.recorded import Recording

DOMAINS = {"read": 0.5, "lookup": 1.5, "camera": 6.0}
PROMPTS = [(f"{domain}{i}", {"domain": domain}) for domain in DOMAINS for i in range(400)]


@pytest.fixture
def made() -> Bench:
    settings = Settings(train_steps=4, warm_up_train_steps=2, update_s=1.0)
    return Bench(settings, PROMPTS, 1000)


def recording() -> Recording:
    rng = random.Random(0)

    def flight(domain: str) -> Flight:
        latency_s = DOMAINS[domain] * rng.lognormvariate(0.0, 0.3)
        return Flight(latency_s, members=(msgspec.structs.replace(TRAJECTORY, finished_s=latency_s),))

    flights = tuple(({"domain": domain}, flight(domain)) for _ in range(80) for domain in DOMAINS)
    return Recording(flights=flights, update_s=(1.0,), pull_s=0.0, publish_s=0.1)


def test_a_policy_is_tuned_to_the_least_look_ahead_that_keeps_its_speed(made: Bench):
    for policy in ("mini_batch", "train_batch"):
        found = tune(made, policy, recording(), list(DOMAINS), 64)
        assert isinstance(found, dict)

        def step_time_s(look_ahead: dict[str, int], policy: str = policy) -> float:
            return made.simulate({"policy": policy, "look_ahead_groups": look_ahead}, recording()).step_time_s

        most_s = SLACK * step_time_s(dict.fromkeys(DOMAINS, 64))
        assert step_time_s(found) <= most_s
        assert any(found.values()), policy  # nobody is as fast without any
        for domain, groups in found.items():
            for smaller in [one for one in LOOK_AHEADS if one < groups][-2:]:
                assert step_time_s(found | {domain: smaller}) > most_s, (policy, domain)
        if policy == "mini_batch":
            assert sum(found.values()) < 32


def test_the_first_train_batches_are_cut_off(made: Bench):
    updated_s = [float(update) for update in range(1, 65)]
    waited_s = [9.0] * 32 + [0.25] * 32
    architectural = np.where(np.arange(64) < 32, 100.0, 2.0)
    course = made.course(architectural, np.arange(64), updated_s, waited_s)
    assert (course.step_time_s, course.architectural_updates, course.idle_share) == (16.0, 2.0, 0.25)


@pytest.mark.parametrize(
    ("measured", "predicted", "good"), [(0.0, 0.25, True), (0.0, 0.26, False), (10.0, 11.5, True), (10.0, 8.4, False)]
)
def test_a_prediction_is_good_within_15_percent_or_a_quarter_update(measured: float, predicted: float, good: bool):
    assert within(measured, predicted) == good
