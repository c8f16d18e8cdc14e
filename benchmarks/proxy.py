"""A TCP proxy that does mischief: it holds bytes back, cuts connections, changes bytes on their way. For tests and `faults`."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

CHUNK_BYTES = 64 * 2**10
POLL_S = 0.2


class Proxy:
    """Passes what comes to `address` on to `upstream` (`host:port`), and back. Calm until told otherwise."""

    def __init__(self, upstream: str = "", seed: int = 0) -> None:
        """`upstream` may be set later; connections that come before are closed."""
        self.upstream = upstream
        self.passed_bytes = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._hold_until_s = self._corrupt_until_s = 0.0
        self._corrupt_share = 0.0
        self._cut_after_bytes: int | None = None
        self._closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(POLL_S)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    # --- mischief --------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Closes every connection now."""
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def cut_after(self, count: int | None) -> None:
        """Closes a connection once so many further bytes have passed; None: no more."""
        with self._lock:
            self._cut_after_bytes = count

    def hold(self, seconds: float) -> None:
        """Nothing passes for so long; then all of it does."""
        self._hold_until_s = time.monotonic() + seconds

    def corrupt(self, seconds: float, share: float = 1.0) -> None:
        """For so long, one bit of this share of what passes at a time is another."""
        self._corrupt_share, self._corrupt_until_s = share, time.monotonic() + seconds

    def close(self) -> None:
        """Ends every connection."""
        self._closing.set()
        self.cut()
        self._listener.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- threads ---------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            try:
                host, _, port = self.upstream.rpartition(":")
                far = socket.create_connection((host, int(port)), timeout=5)
                far.settimeout(None)
            except (OSError, ValueError):
                near.close()
                continue
            with self._lock:
                self._open |= {near, far}
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(source, target), name="proxy-pump", daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                while (wait_s := self._hold_until_s - time.monotonic()) > 0 and not self._closing.is_set():
                    time.sleep(min(wait_s, POLL_S))
                data = self._changed(data)
                left = self._passing(len(data))
                target.sendall(data[:left])
                if left is not None:
                    break
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if {source, target} <= self._open:
                self._open -= {source, target}
            else:  # the other direction ended before
                source.close()
                target.close()

    def _passing(self, count: int) -> int | None:
        """Counts bytes -> after how many of them the connection is to be cut; None: not yet."""
        with self._lock:
            self.passed_bytes += count
            left = self._cut_after_bytes
            if left is not None:
                self._cut_after_bytes = None if count >= left else left - count
            return left if left is not None and count >= left else None

    def _changed(self, data: bytes) -> bytes:
        if time.monotonic() >= self._corrupt_until_s or self._random.random() >= self._corrupt_share:
            return data
        changed = bytearray(data)
        changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)
