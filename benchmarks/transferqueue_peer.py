"""TransferQueue's side of `bench wire`, in an environment of its own: this file imports nothing of KnitTrans.

Reads one JSON request a line, writes one JSON reply a line. The best of 1, 2 and 4 storage units is looked for at the start,
with the largest payload; then `{"get": NAME}` reads a payload back and gives the seconds it took.

    python transferqueue_peer.py '{"payloads": {"9": [2, 4718592]}}'     # name -> rows, bytes of a row
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


def start(units: int, payloads: dict[str, list[int]]) -> None:
    """Fresh units that hold every payload."""
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": units}}}))
    for name, (rows, row_bytes) in payloads.items():
        pixels = torch.rand(rows, row_bytes // 4, dtype=torch.float32)
        tq.kv_batch_put(keys=keys(name, rows), partition_id=f"p{name}", fields=TensorDict({"pixels": pixels}, [rows]))


def keys(name: str, rows: int) -> list[str]:
    """Keys of a payload's rows."""
    return [f"{name}-{row}" for row in range(rows)]


def get(name: str, rows: int, row_bytes: int) -> float:
    """Reads a payload back -> seconds."""
    began = time.perf_counter()
    found = tq.kv_batch_get(keys=keys(name, rows), partition_id=f"p{name}", select_fields=["pixels"])
    got = sum(one.numel() * one.element_size() for one in found["pixels"])
    took = time.perf_counter() - began
    if got != rows * row_bytes:
        raise RuntimeError(f"{name}: {got} bytes came back, {rows * row_bytes} were put")
    return took


def main() -> None:
    """See the module's opening."""
    payloads = json.loads(sys.argv[1])["payloads"]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print is no reply
    # With fewer CPUs its actors wait for ever.
    ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    largest = max(payloads, key=lambda name: payloads[name][0] * payloads[name][1])
    best: dict[int, float] = {}
    for units in UNITS:
        start(units, payloads)
        best[units] = min(get(largest, *payloads[largest]) for _ in range(TRIES))
        tq.close()
    chosen = min(best, key=lambda units: best[units])
    start(chosen, payloads)
    print(json.dumps({"units": chosen, "seconds_by_units": best}), file=out, flush=True)
    for line in sys.stdin:
        name = json.loads(line)["get"]
        print(json.dumps({"seconds": get(name, *payloads[name])}), file=out, flush=True)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
