"""The environment of each role: its platform, its number of devices, and how many threads it may use.

On one machine the roles share the cores. A JAX process left alone starts as many threads as there are cores, and so does the
next one; here the cores are divided among the processes that compute. What the user has set already is left as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from knittrans_jax.config import Config
from knittrans_jax.launch.supervise import Role

JAX_PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 * 2**20), "MALLOC_TRIM_THRESHOLD_": str(2**30)}
"""XLA on CPU allocates and frees its buffers in every call; glibc would give the pages back and fault them in again."""
LAUNCHED = "KNITTRANS_LAUNCHED"
"""Set for roles that a launcher started: the launcher then writes the run's summary, not the scheduler's process."""


def roles_of(config: Config, config_file: Path, cores: int, environment: Mapping[str, str] = os.environ) -> list[Role]:
    """Every role of a run on this machine, the scheduler first.

    To recover, engines and storage units are started again alone; training processes together; with the scheduler, all that
    hold nothing but work in flight: storage units live on, with what they hold.

    Args:
        config: the resolved configuration, also in `config_file`.
        config_file: what the roles read.
        cores: cores to divide.
        environment: the user's; what is set there stays.
    """

    recovers = config.launch.on_child_death == "recover"

    def role(
        kind: str, index: int | None, own: Mapping[str, str], group: str | None = None, also: tuple[str, ...] = ()
    ) -> Role:
        name = kind if index is None else f"{kind}{index}"
        essential = kind != "train"
        command = (sys.executable, "-m", "knittrans_jax.cli", kind, str(config_file))
        if index is not None:
            command += ("--index", str(index))
        own = {**own, LAUNCHED: "1", "PYTHONUNBUFFERED": "1"}
        return Role(name, command, own, essential, (group or name) if recovers else "", also if recovers else ())

    computing = config.rollout.hosts + config.train.processes
    engine = jax_environment(config.platform, 1, cores, computing, environment)
    train = jax_environment(config.platform, config.train.devices_per_process, cores, computing, environment)
    plain = thread_environment(1, environment)
    return [
        role("scheduler", None, plain),
        *(role("storage", i, plain) for i in range(config.rollout.hosts)),
        *(role("rollout", i, engine, also=("scheduler",)) for i in range(config.rollout.hosts)),
        *(role("train", i, train, "train", also=("scheduler",)) for i in range(config.train.processes)),
    ]


def thread_environment(threads: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Thread counts of numerical libraries, where the user has not set them."""
    return {name: str(threads) for name in THREAD_VARIABLES if name not in environment}


def jax_environment(
    platform: str, devices: int, cores: int, computing_processes: int, environment: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a JAX process.

    Args:
        platform: the configuration's.
        devices: CPU devices of the process.
        cores: cores to divide.
        computing_processes: processes among which they are divided.
        environment: the user's.
    """
    threads = max(1, cores // computing_processes)
    own = {"JAX_PLATFORMS": JAX_PLATFORMS[platform], **thread_environment(threads, environment)}
    if platform == "cpu":
        own["JAX_NUM_CPU_DEVICES"] = str(devices)
        if "NPROC" not in environment:
            own["NPROC"] = str(max(threads, devices))  # XLA's thread pools; at least one thread a device
        own |= {name: value for name, value in KEEP_MEMORY.items() if name not in environment}
        flags = environment.get("XLA_FLAGS", "")
        kept = [flag for flag in flags.split() if not flag.startswith("--xla_force_host_platform_device_count")]
        if threads == 1 and not any(flag.startswith("--xla_cpu_multi_thread_eigen") for flag in kept):
            kept.append("--xla_cpu_multi_thread_eigen=false")
        if kept or flags:
            own["XLA_FLAGS"] = " ".join(kept)
    return own


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))
