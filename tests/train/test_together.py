"""A program's first run waits for every process to have compiled it; later ones do not."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

from knittrans_jax.observe.compilations import CompilationCounter
from knittrans_jax.train.together import Together, mesh_barrier

pytestmark = pytest.mark.newest


def test_a_program_is_compiled_once_a_shape_and_before_the_barrier():
    compilations, at_barrier = CompilationCounter(), []
    inputs = [jnp.ones(3), jnp.ones(3) + 1, jnp.ones(4)]
    before = compilations.count
    double = Together(lambda: at_barrier.append(compilations.count - before))(jax.jit(lambda x: 2 * x))
    assert [float(jax.device_get(double(one)).max()) for one in inputs] == [2.0, 4.0, 2.0]
    assert at_barrier == [1, 2]
    assert compilations.count - before == 2


def test_arguments_may_be_donated_and_missing():
    add = Together(lambda: None)(jax.jit(lambda x, y: x if y is None else x + y, donate_argnums=0))
    assert float(add(add(jnp.ones(()), None), jnp.ones(()))) == 2.0


def test_a_barrier_that_is_not_reached_stops_the_program_before_it_runs():
    def late() -> None:
        raise TimeoutError

    ran = []
    program = Together(late)(jax.jit(lambda x: (jax.debug.callback(lambda: ran.append(1)), x)[1]))
    with pytest.raises(TimeoutError):
        program(jnp.ones(()))
    assert not ran


def test_on_its_own_devices_a_process_waits_for_nobody():
    mesh_barrier(Mesh(jax.local_devices()[:1], ("data",)), 0.001)()
