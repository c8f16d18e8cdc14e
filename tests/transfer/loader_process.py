"""A training process of the loader's tests: loads every plan and writes the rows that its devices hold.

Arguments: folder, processes, process, devices per process, coordinator address, encoder mode.
"""

import sys
import time
from pathlib import Path

import jax
import msgspec
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from knittrans_jax.launch.messages import ChunkHeld, Go, NextPlan, PlanReply, Reply, Request
from knittrans_jax.train.advantages import group_advantages
from knittrans_jax.trajectory import MiniBatchPlan
from knittrans_jax.transfer import tickets
from knittrans_jax.transfer.loader import ChunkLoader, LoaderOptions
from knittrans_jax.transfer.pack import PackSpec


class Setup(msgspec.Struct):
    """What the test hands to the process."""

    plans: list[MiniBatchPlan]
    address: str
    key: bytes


class FakeScheduler:
    """Hands out the plans one by one, and every go."""

    def __init__(self, setup: Setup, peer: str) -> None:
        self.setup, self.peer = setup, peer

    def call(self, request: Request) -> Reply:
        if isinstance(request, NextPlan):
            following = [plan for plan in self.setup.plans if plan.plan_id > request.after_plan]
            ticket = tickets.issue(self.setup.key, "host0", self.peer, time.time() + 60, tickets.new_nonce())
            return PlanReply(
                plan=following[0] if following else None, units={"host0": self.setup.address}, tickets={"host0": ticket}
            )
        assert isinstance(request, ChunkHeld)
        return Go()

    def close(self) -> None:
        pass


def main() -> None:
    folder, processes, process, devices, coordinator, mode = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", int(devices))
    if int(processes) > 1:
        jax.distributed.initialize(coordinator, int(processes), int(process), initialization_timeout=60)
    setup = msgspec.msgpack.decode((Path(folder) / "setup.msgpack").read_bytes(), type=Setup)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    peer = f"train{process}"
    loader = ChunkLoader(
        LoaderOptions(
            open_scheduler=lambda stopped: FakeScheduler(setup, peer),
            process=int(process),
            incarnation=1,
            peer=peer,
            chunk_sharding=NamedSharding(mesh, P(None, "data")),
            image_sharding=NamedSharding(mesh, P("data")),
            replicated_sharding=NamedSharding(mesh, P()),
            advantages=lambda rewards: group_advantages(rewards, True),
            spec=PackSpec(patch_size=2, merge_size=2, channels=1, image_token_id=2),
            encoder_mode=mode,  # pyright: ignore[reportArgumentType]
        )
    )
    saved: dict[str, np.ndarray] = {}
    states, pulled = [], 0
    for chunk in loader:
        states.append(loader.get_state()["after_plan"])
        pulled += chunk.pulled_bytes
        assert chunk.plan_arrived_s <= chunk.ready_s
        parts: list[tuple[str, object]] = [("arrays", chunk.arrays)]
        if chunk.images is not None:
            parts.append(("images", chunk.images))
        for part, arrays in parts:
            axis = 0 if part == "images" and mode == "per_mini_batch" else 1
            for field, array in arrays._asdict().items():  # pyright: ignore[reportAttributeAccessIssue]
                for shard in array.addressable_shards:
                    start = shard.index[axis].start or 0
                    key = f"{chunk.plan.plan_id}/{chunk.index}/{part}/{field}/{start}/{array.shape[axis]}"
                    saved[key] = np.asarray(shard.data)
    loader.close()
    saved["states"] = np.asarray(states)
    saved["pulled"] = np.asarray(pulled)
    np.savez(Path(folder) / f"out{process}.npz", allow_pickle=False, **saved)


if __name__ == "__main__":
    main()
