"""Compilations by name and shape, counted in a process of their own: the counter listens to all of JAX."""

import subprocess
import sys

import pytest

from knittrans_jax.observe.compilations import describe
from knittrans_jax.observe.record import Compilations

PROGRAM = """
import logging
logging.getLogger().addHandler(logging.StreamHandler())  # for records of every level, as some libraries install one
import jax, jax.numpy as jnp, numpy as np
from knittrans_jax.observe.compilations import CompilationCounter
counter = CompilationCounter()

@jax.jit
def accumulate(params, rows):
    return params["w"] @ rows

w = {"w": np.ones((2, 3), np.float32)}
accumulate(w, np.ones((3, 4), np.float32)), accumulate(w, np.ones((3, 4), np.float32))
assert counter.count == 1 and counter.seconds > 0
print(counter.take_untold())
accumulate(w, np.ones((3, 5), np.float32))
print(counter.take_untold())
accumulate.clear_cache()
accumulate(w, np.ones((3, 5), np.float32))
print(counter.take_untold(), counter.take_untold(), counter.count)
for i in range(20):
    jax.jit(lambda x: x + i)(np.float32(1))
print(len(counter.take_untold()), counter.count)
"""


@pytest.mark.newest
def test_a_compilation_is_told_by_program_and_by_the_argument_that_is_new() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert run.stdout.splitlines() == [
        "('accumulate: float32[2,3], float32[3,4]',)",
        "('accumulate: argument 1 float32[3,5], was float32[3,4]',)",
        "('accumulate: compiled again for the same shapes (float32[2,3], float32[3,5])',) () 3",
        "8 23",
    ]


def test_a_program_of_many_arguments_is_told_in_short() -> None:
    assert describe("jit(f)", ["a"] * 9, None) == "f: a, a, a, a, 5 more"
    assert describe("jit(f)", ["b"] * 6, ["a"] * 6).endswith("argument 3 b, was a; 2 more")
    assert describe("f", [], None) == "f: no arguments"


def test_counts_go_on_over_processes_and_tell_what_came_late() -> None:
    one = Compilations()
    assert [
        one.report(5, False),
        one.report(7, True),
        one.report(7, True),
        one.report(3, True),
        one.report(4, True),
    ] == [*(0, 2, 0, 0, 1)]
    assert (one.total, one.after_warmup) == (11, 3)
