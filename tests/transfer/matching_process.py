"""A training process of the matching tests: loads all plans under several meshes, and writes every shard of its devices.

Arguments: folder, processes, process, devices per process, coordinator address.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from knittrans_jax.train.advantages import group_advantages
from knittrans_jax.transfer.loader import ChunkLoader, LoaderOptions
from knittrans_jax.transfer.pack import PackSpec

from .loader_process import FakeScheduler, Setup

SPEC = PackSpec(patch_size=16, merge_size=2, channels=1, image_token_id=2)


class Case(msgspec.Struct):
    """A mesh (sizes by axis, outermost first; `transposed`: devices in the other order), its plans and its proxy."""

    name: str
    axes: dict[str, int]
    setup: Setup
    transposed: bool = False
    mode: str = "per_mini_batch"


def row_axes(axes: dict[str, int]) -> tuple[str, ...]:
    return tuple(axis for axis in ("data", "fsdp") if axis in axes)


def run_case(case: Case, process: int) -> dict[str, np.ndarray]:
    sizes = tuple(case.axes.values())
    devices = np.asarray(jax.devices()).reshape(sizes[::-1]).T if case.transposed else np.asarray(jax.devices())
    mesh = Mesh(devices.reshape(sizes), tuple(case.axes), axis_types=(AxisType.Auto,) * len(sizes))
    rows, sequence = row_axes(case.axes) or None, "sequence" if "sequence" in case.axes else None
    loader = ChunkLoader(
        LoaderOptions(
            open_scheduler=lambda stopped: FakeScheduler(case.setup, f"train{process}"),
            process=process,
            incarnation=1,
            peer=f"train{process}",
            chunk_sharding=NamedSharding(mesh, P(None, rows, sequence) if sequence else P(None, rows)),
            image_sharding=NamedSharding(mesh, P(rows)),
            replicated_sharding=NamedSharding(mesh, P()),
            advantages=lambda rewards: group_advantages(rewards, True),
            spec=SPEC,
            encoder_mode=case.mode,  # pyright: ignore[reportArgumentType]
        )
    )
    saved: dict[str, np.ndarray] = {}
    pulled = gathered = 0
    for chunk in loader:
        pulled, gathered = pulled + chunk.pulled_bytes, gathered + chunk.gathered_bytes
        chunk = chunk.whole()
        parts: list[tuple[str, Any]] = [("arrays", chunk.arrays), ("images", chunk.images)]
        for part, arrays in parts:
            if arrays is not None:
                for field, array in arrays._asdict().items():
                    for shard in array.addressable_shards:
                        starts = ",".join(str(index.start or 0) for index in shard.index)
                        key = (
                            f"{case.name}/{chunk.plan.plan_id}/{chunk.index}/{part}/{field}/{starts}/{shard.device.id}"
                        )
                        saved[key] = np.asarray(shard.data)
    loader.close()
    return saved | {f"{case.name}/pulled": np.asarray(pulled), f"{case.name}/gathered": np.asarray(gathered)}


def main() -> None:
    folder, processes, process, devices, coordinator = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    if int(processes) > 1:
        jax.distributed.initialize(coordinator, int(processes), int(process), initialization_timeout=60)
    cases = msgspec.msgpack.decode((Path(folder) / "cases.msgpack").read_bytes(), type=list[Case])
    saved: dict[str, np.ndarray] = {}
    for case in cases:
        saved |= run_case(case, int(process))
    np.savez(Path(folder) / f"out{process}.npz", allow_pickle=False, **saved)


if __name__ == "__main__":
    main()
