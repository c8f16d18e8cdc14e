"""The serving process of `bench wire`: a plain socket, the bulk channel, the same over TLS, and a control channel.

Prints where they are as one JSON line, and serves until its standard input ends.

    python -m knittrans_jax.benchmarks.wire_serve '{"payloads": [[64, 16, 4194304]]}'     # group id, images, bytes of an image
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

from knittrans_jax.launch.messages import Ack
from knittrans_jax.trajectory import GroupPayload, Trajectory, media_digest
from knittrans_jax.transfer import tls
from knittrans_jax.transfer.bulk import put_frame
from knittrans_jax.transfer.control import ControlServer
from knittrans_jax.transfer.storage import StorageServer
from knittrans_jax.transfer.storage_state import StorageState

PLAIN_REQUEST = struct.Struct("!Q")
IMAGE_WIDTH = 1024
TOKENS = 16


def make_group(group_id: int, images: int, image_bytes: int) -> GroupPayload:
    """A short trajectory, and images of random bytes."""
    rng = np.random.default_rng(group_id)
    shape = (image_bytes // IMAGE_WIDTH, IMAGE_WIDTH, 1)
    pixels = [rng.integers(0, 256, shape, np.uint8) for _ in range(images)]
    trajectory = Trajectory(
        tokens_T=np.arange(TOKENS, dtype=np.int32),
        sampled_T=np.ones(TOKENS, np.bool_),
        behaviour_logprobs_T=np.zeros(TOKENS, np.float32),
        versions_T=np.zeros(TOKENS, np.int32),
    )
    return GroupPayload(group_id=group_id, trajectories=(trajectory,), media={media_digest(one): one for one in pixels})


def serve_plain(listener: socket.socket, data: memoryview) -> None:
    """Who sends a size gets so many bytes, in one `sendall`; options as the bulk channel's."""
    from knittrans_jax.transfer.wire import prepare

    with contextlib.suppress(OSError):
        while True:
            sock, _ = listener.accept()
            prepare(sock)
            with sock:
                while request := sock.recv(PLAIN_REQUEST.size, socket.MSG_WAITALL):
                    sock.sendall(data[: PLAIN_REQUEST.unpack(request)[0]])


def serve_control(server: ControlServer, over: threading.Event) -> None:
    """Acknowledges everything."""
    while not over.is_set():
        for incoming in server.receive(0.1):
            server.reply(incoming.peer, incoming.request_id, Ack())


def main() -> None:
    """See the module's opening."""
    payloads = [tuple(one) for one in json.loads(sys.argv[1])["payloads"]]
    state = StorageState("bench", 2 * sum(images * size for _, images, size in payloads) + 2**20)
    digests: dict[int, list[str]] = {}
    for group_id, images, image_bytes in payloads:
        payload = make_group(group_id, images, image_bytes)
        state.put(payload, put_frame(payload)[0])
        digests[group_id] = list(payload.media)
    largest = max(images * size for _, images, size in payloads)
    plain_data = memoryview(np.random.default_rng(0).integers(0, 256, largest, np.uint8).data).cast("B")
    encryption = tls.make_server()
    key, over = secrets.token_bytes(32), threading.Event()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        control = ControlServer("127.0.0.1", 0, Path(folder) / "control.json")
        answering = threading.Thread(target=serve_control, args=(control, over))
        answering.start()
        threading.Thread(target=serve_plain, args=(listener, plain_data), daemon=True).start()
        with StorageServer(state, "127.0.0.1") as bulk, StorageServer(state, "127.0.0.1", tls=encryption) as encrypted:
            bulk.set_key(key)
            encrypted.set_key(key)
            where = {
                "plain": f"127.0.0.1:{listener.getsockname()[1]}",
                "bulk": bulk.address,
                "tls": encrypted.address,
                "key": key.hex(),
                "digests": digests,
                "control": str(Path(folder) / "control.json"),
            }
            sys.stdout.write(json.dumps(where) + "\n")
            sys.stdout.flush()
            sys.stdin.read()
            over.set()
            answering.join()
        control.close()


if __name__ == "__main__":
    main()
