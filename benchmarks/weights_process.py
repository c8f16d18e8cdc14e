"""The processes of `bench weights`: one training process, and readers that bring a version and pass it on.

A role prints where it serves as a JSON line, then takes one JSON command a line, and answers each with one JSON line.
Links are token buckets on what a process sends. Times are of the machine's monotonic clock, which all processes share.

    python -m knittrans_jax.benchmarks.weights_process KEY BYTES_PER_S train SIZE_BYTES DIRECTORY
    python -m knittrans_jax.benchmarks.weights_process KEY BYTES_PER_S NAME
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from knittrans_jax.transfer.bulk import VersionKey
from knittrans_jax.transfer.rate import RateLimit
from knittrans_jax.transfer.tickets import weight_unit
from knittrans_jax.transfer.weight_channel import WeightClient, WeightPublisher, WeightServer, bring
from knittrans_jax.transfer.weight_store import WeightStore
from knittrans_jax.transfer.weights import WeightReader, WeightWriter
from knittrans_jax.transfer.wire import prepare

TIMEOUT_S = 600.0
TENSORS = 25
MOST_BYTES = 2**34


def answer(**fields: Any) -> None:
    """One line."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def serve_plain(listener: socket.socket, size_bytes: int) -> None:
    """Whoever connects gets so many bytes of one buffer, in one `sendall` each: nothing else happens to them."""
    data = np.ones(size_bytes, np.uint8).data

    def send(sock: socket.socket) -> None:
        prepare(sock)
        with sock:
            sock.sendall(data)

    with contextlib.suppress(OSError):  # closed at the end
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=send, args=(sock,), daemon=True).start()


def run_train(server: WeightServer, store: WeightStore, size_bytes: int, directory: Path) -> None:
    """Publishes made-up parameters by either way: `{"version": 3, "way": "bulk"}`."""
    import jax
    import jax.numpy as jnp

    elements = size_bytes // 4 // TENSORS
    params = {f"t{i}": jnp.full((elements,), float(i), jnp.float32) for i in range(TENSORS)}
    double = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    written: queue.Queue[int] = queue.Queue()
    publisher = WeightPublisher(store, 0, 0, 1, written.put, timeout_s=TIMEOUT_S)
    writer = WeightWriter(directory, 0, 1, written.put, timeout_s=TIMEOUT_S)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_plain, args=(listener, size_bytes), daemon=True).start()
    answer(address=server.address, plain=f"127.0.0.1:{listener.getsockname()[1]}")
    for line in sys.stdin:
        command = json.loads(line)
        sink = publisher if command["way"] == "bulk" else writer
        params = jax.block_until_ready(double(params))  # as an update would: every version lies in memory of its own
        before = server.figures()[2]["served_bytes"], sink.written_bytes, sink.copy_s
        began_s = time.monotonic()
        stall_s = sink.write(command["version"], params)
        written.get(timeout=TIMEOUT_S)
        answer(began_s=began_s, stall_s=stall_s, copy_s=sink.copy_s - before[2])
        sys.stdin.readline()  # every reader is done
        served = server.figures()[2]["served_bytes"] - before[0]
        answer(sent_bytes=served if command["way"] == "bulk" else sink.written_bytes - before[1])
    publisher.close()
    writer.close()
    listener.close()


def run_reader(name: str, server: WeightServer, store: WeightStore) -> None:
    """Brings versions: `{"version": 3, "sources": [[address, ticket]]}`, or `"directory"`, or `"plain"` bytes that it drops."""
    answer(address=server.address)
    for line in sys.stdin:
        command = json.loads(line)
        version = command["version"]
        if "directory" in command:
            arrays = WeightReader(Path(command["directory"])).read(version)
            size_bytes = sum(array.nbytes for array in arrays.values())
            del arrays
        elif "plain" in command:
            size_bytes = receive_plain(*command["plain"])
        else:
            clients = [
                WeightClient(address, bytes.fromhex(ticket), name, TIMEOUT_S, 0)
                for address, ticket in command["sources"]
            ]
            size_bytes = bring(store, VersionKey(0, version), clients, MOST_BYTES)
            for client in clients:
                client.close()
        answer(done_s=time.monotonic(), size_bytes=size_bytes)


def receive_plain(address: str, size_bytes: int) -> int:
    """Receives into fresh memory."""
    host, _, port = address.rpartition(":")
    buffer = np.empty(size_bytes, np.uint8).data
    at = 0
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as sock:
        prepare(sock)
        while at < size_bytes and (got := sock.recv_into(buffer[at:])):
            at += got
    return at


def main() -> None:
    """See the module's opening."""
    key, bytes_per_s, role, *rest = sys.argv[1:]
    rate = RateLimit(float(bytes_per_s)) if float(bytes_per_s) else None
    store = WeightStore()
    with WeightServer(
        weight_unit(role), "127.0.0.1", store, wait_s=TIMEOUT_S / 2, request_timeout_s=TIMEOUT_S, rate=rate
    ) as server:
        server.set_key(bytes.fromhex(key))
        if role == "train":
            run_train(server, store, int(rest[0]), Path(rest[1]))
        else:
            run_reader(role, server, store)


if __name__ == "__main__":
    main()
