"""TransferQueue's side of `bench wire` and `bench transfer`, in an environment of its own: nothing of KnitTrans is imported.

Reads one JSON request a line, writes one JSON reply a line. The best of 1, 2 and 4 storage units is looked for at the start,
with the largest payload and the most readers; then `{"get": NAME}` reads a payload back, and `{"get": NAME, "readers": 4}` has
4 processes each read its own quarter of the rows at the same time. The reply is the seconds until the last one had its rows.

    python transferqueue_peer.py '{"payloads": {"9": [2, 4718592]}, "readers": 0}'     # name -> rows, bytes of a row
"""

import json
import logging
import os
import sys
import time

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "TQ_LOGGING_LEVEL": "ERROR"}

import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

UNITS = (1, 2, 4)
TRIES = 3
LEAD_S = 0.2
"""Readers begin together, so long after they were told."""


def start(units: int, payloads: dict[str, list[int]]) -> None:
    """Fresh units that hold every payload."""
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": units}}}))
    for name, (rows, row_bytes) in payloads.items():
        pixels = torch.rand(rows, row_bytes // 4, dtype=torch.float32)
        tq.kv_batch_put(keys=keys(name, rows), partition_id=f"p{name}", fields=TensorDict({"pixels": pixels}, [rows]))


def keys(name: str, rows: int) -> list[str]:
    """Keys of a payload's rows."""
    return [f"{name}-{row}" for row in range(rows)]


def get(name: str, mine: list[str], row_bytes: int) -> float:
    """Reads rows of a payload back -> seconds."""
    began = time.perf_counter()
    found = tq.kv_batch_get(keys=mine, partition_id=f"p{name}", select_fields=["pixels"])
    got = sum(one.numel() * one.element_size() for one in found["pixels"])
    took = time.perf_counter() - began
    if got != len(mine) * row_bytes:
        raise RuntimeError(f"{name}: {got} bytes came back, {len(mine) * row_bytes} were put")
    return took


class Reader:
    """A reading process."""

    def __init__(self) -> None:
        """Joins the queue that is there."""
        torch.set_num_threads(1)
        tq.init()

    def read(self, name: str, mine: list[str], row_bytes: int, at_s: float) -> float:
        """Reads its rows from a moment of this machine's monotonic clock on -> when it had them."""
        time.sleep(max(0.0, at_s - time.monotonic()))
        if mine:
            get(name, mine, row_bytes)
        return time.monotonic()


class Queue:
    """Fresh units that hold every payload, and readers."""

    def __init__(self, units: int, payloads: dict[str, list[int]], readers: int) -> None:
        """Puts everything."""
        start(units, payloads)
        self._payloads = payloads
        self._readers = [ray.remote(Reader).options(num_cpus=1).remote() for _ in range(readers)]
        ray.get([one.read.remote("", [], 0, 0.0) for one in self._readers])

    def seconds(self, name: str, readers: int) -> float:
        """All of a payload by this process (no readers), or each reader's own share of the rows."""
        rows, row_bytes = self._payloads[name]
        everything = keys(name, rows)
        if not readers:
            return get(name, everything, row_bytes)
        at_s = time.monotonic() + LEAD_S
        ends = ray.get(
            [
                one.read.remote(name, everything[rows * i // readers : rows * (i + 1) // readers], row_bytes, at_s)
                for i, one in enumerate(self._readers[:readers])
            ]
        )
        return max(ends) - at_s

    def close(self) -> None:
        """Ends the readers and the units."""
        for one in self._readers:
            ray.kill(one)
        tq.close()


def main() -> None:
    """See the module's opening."""
    arguments = json.loads(sys.argv[1])
    payloads, readers = arguments["payloads"], arguments["readers"]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print is no reply
    # With fewer CPUs its actors wait for ever.
    ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    largest = max(payloads, key=lambda name: payloads[name][0] * payloads[name][1])
    best: dict[int, float] = {}
    for units in UNITS:
        queue = Queue(units, payloads, readers)
        best[units] = min(queue.seconds(largest, readers) for _ in range(TRIES))
        queue.close()
    chosen = min(best, key=lambda units: best[units])
    queue = Queue(chosen, payloads, readers)
    print(json.dumps({"units": chosen, "seconds_by_units": best}), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"seconds": queue.seconds(request["get"], request["readers"])}), file=out, flush=True)
    queue.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
