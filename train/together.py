"""Programs of a process group that are first run when every process has compiled them.

A process that still compiles leaves the others inside the program's first collective, and those give up after a time that
nobody chose (30 s on CPU): with two processes on a busy machine, or one that finds the program in a compilation cache, a run
would end for no fault of its own. Here the others wait at a barrier with a deadline that the configuration sets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # the coordinator's client, for its barrier with a deadline; JAX has no public one
from jax.sharding import Mesh

Barrier = Callable[[], None]
"""Returns when every process has called it as often as this one; raises after its deadline."""
_passed = itertools.count()


def mesh_barrier(mesh: Mesh, timeout_s: float) -> Barrier:
    """The barrier of a process group whose devices make up `mesh`, by way of its coordinator.

    On a mesh of this process's own devices there is nobody to wait for.
    """
    several = len({device.process_index for device in mesh.devices.flat}) > 1

    def wait() -> None:
        if several:
            distributed.global_state.client.wait_at_barrier(f"compiled-{next(_passed)}", int(timeout_s * 1000))

    return wait


class Together:
    """Wraps jitted functions; see the module's opening. All processes must call the same ones in the same order."""

    def __init__(self, barrier: Barrier) -> None:
        """`barrier`: called once for every program and every shape of its arguments."""
        self._barrier = barrier

    def __call__(self, jitted: Any) -> Callable[..., Any]:
        """`jitted`, compiled ahead and together for arguments of a new kind; every argument must be dynamic."""
        seen: set[tuple[Any, ...]] = set()

        def call(*arguments: Any) -> Any:
            leaves, structure = jax.tree.flatten(arguments)
            kind = (structure, *((jax.numpy.shape(leaf), jax.numpy.result_type(leaf)) for leaf in leaves))
            if kind not in seen:
                jitted.lower(*arguments).compile()  # the call below finds it
                self._barrier()
                seen.add(kind)
            return jitted(*arguments)

        return call


__all__ = ["Barrier", "Together", "mesh_barrier"]
