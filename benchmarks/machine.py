"""On what was measured: processor, cores, memory, load, accelerators in use, and the versions of what matters. No host name."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "knittrans-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "scipy", "pyzmq", "msgspec",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """The machine as it is now. Devices are listed only where this process already uses JAX; asking would start it."""
    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1_min": round(os.getloadavg()[0], 2),
    }
    memory = _field("/proc/meminfo", "MemTotal")
    if memory is not None:
        found["memory_bytes"] = int(memory.split()[0]) * 1024
    jax = sys.modules.get("jax")
    if jax is not None:
        devices = jax.devices()
        found["devices"] = f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    return found


def versions() -> dict[str, str]:
    """Python's version and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _field(path: str, name: str) -> str | None:
    """The first value called `name` in a file of `name: value` lines."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == name), None)
