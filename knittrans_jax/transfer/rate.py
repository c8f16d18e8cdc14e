"""A token bucket: the bytes a second that a server sends over all its connections together."""

from __future__ import annotations

import threading
import time


def next_free_s(free_s: float, now_s: float, size_bytes: int, bytes_per_s: float) -> float:
    """When a link that is free from `free_s` on has carried so many more bytes. Pure: nothing is saved up while it is idle."""
    return max(free_s, now_s) + size_bytes / bytes_per_s


class RateLimit:
    """Makes senders wait until the link has carried their bytes. Any number of threads; whoever asks first is first."""

    def __init__(self, bytes_per_s: float) -> None:
        """`bytes_per_s` above 0."""
        if bytes_per_s <= 0:
            raise ValueError(f"RateLimit: bytes_per_s must be above 0 (value {bytes_per_s})")
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait(self, size_bytes: int) -> None:
        """Waits as long as these bytes take, and those before them."""
        with self._lock:
            self._free_s = until_s = next_free_s(self._free_s, time.monotonic(), size_bytes, self._bytes_per_s)
        time.sleep(max(0.0, until_s - time.monotonic()))
