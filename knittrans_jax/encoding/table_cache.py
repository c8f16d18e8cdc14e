"""Which rows of a fixed table hold which images of a frozen encoder: least recently used goes first. Pure.

What it guarantees:

* never more rows than the table has; an image's rows are its own until it is evicted;
* the images of one `place` call are all held when it returns, so none of them evicts another;
* what is held depends on the calls alone: processes that see the same plans agree, without speaking;
* an image counts as held under its content, the processor's settings and the encoder's version together: when any of them
  changes, it is encoded anew, and what was held for the old ones goes as the least recently used do.

Rows are handed out one by one, so nothing is lost to gaps, however different the images' sizes.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Mapping

import numpy as np

_Key = tuple[str, str, int]


@dataclasses.dataclass
class CacheCounters:
    """Images since the start."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where the images of a mini-batch lie. `missing`: those that are to be encoded into their rows now, in order."""

    rows: dict[str, np.ndarray]
    """int32 [tokens] by digest."""
    missing: tuple[str, ...]
    evicted: int


class TableCache:
    """See the module's opening."""

    def __init__(self, rows: int, processor: str) -> None:
        """`rows` of the table; `processor` names everything besides its content that an image's features depend on."""
        self.rows = rows
        self.counters = CacheCounters()
        self._processor = processor
        self._free = list(range(rows))  # a heap: the lowest go first
        self._held: collections.OrderedDict[_Key, np.ndarray] = collections.OrderedDict()  # oldest use first

    @property
    def held_rows(self) -> int:
        """Rows in use."""
        return self.rows - len(self._free)

    def place(self, tokens: Mapping[str, int], encoder_version: int) -> Placed:
        """Finds or makes room for a mini-batch's images: image tokens (table rows) by digest.

        Raises:
            ValueError: together they have more tokens than the table has rows.
        """
        needed = sum(tokens.values())
        if needed > self.rows:
            raise ValueError(
                f"train.encoder_cache_bytes: a mini-batch has images of {needed} tokens, but the table holds {self.rows}: "
                "raise it"
            )
        keys = {digest: (digest, self._processor, encoder_version) for digest in tokens}
        for key in keys.values():
            if key in self._held:
                self._held.move_to_end(key)  # before anything is evicted: nothing of this mini-batch is
        missing = tuple(digest for digest, key in keys.items() if key not in self._held)
        evicted = 0
        for digest in missing:
            while len(self._free) < tokens[digest]:
                _, rows = self._held.popitem(last=False)
                evicted += 1
                for row in rows:
                    heapq.heappush(self._free, int(row))
            self._held[keys[digest]] = np.array([heapq.heappop(self._free) for _ in range(tokens[digest])], np.int32)
        self.counters.hits += len(tokens) - len(missing)
        self.counters.misses += len(missing)
        self.counters.evictions += evicted
        return Placed({digest: self._held[key] for digest, key in keys.items()}, missing, evicted)
