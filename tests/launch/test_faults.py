"""Roles of a real run that are killed, stopped, told to leave, every kind at least once: `knittrans bench faults` in short."""

from pathlib import Path

import pytest

from knittrans_jax.benchmarks.faults import KINDS, Settings, live

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("number", [0, 1])  # with finished groups in memory, and on disk
def test_whatever_dies_no_prompt_is_lost_no_gradient_counts_twice_and_the_run_ends(number: int, tmp_path: Path):
    settings = Settings(faults=6, epochs_per_fault=0.7, silence_s=5, most_updates_between=6)
    result = live(settings, number, settings.faults, tmp_path, print)
    output = (tmp_path / f"life{number}.out").read_text()
    assert result.ended == "finished", output
    assert (result.prompts_lost, result.gradients_twice, result.hung) == (0, 0, 0)
    assert result.repeated_otherwise == 0
    assert {fault.role.rstrip("0123456789") for fault in result.faults} == set(KINDS)
    assert all(fault.recovery_s is not None for fault in result.faults), output
