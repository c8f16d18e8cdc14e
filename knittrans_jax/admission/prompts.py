"""The order in which prompts are launched: in every kind, a seeded permutation per epoch.

What it guarantees: the order is a function of seed, prompts and the calls made, so folding a log's `Leased`, `Expired` and
`Lost` events brings it back; every prompt of a kind is launched once per epoch; a prompt given back is next; a prompt that is
busy (it has a group in the pool or in the train batch under way) keeps its place and others go before it.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterable, Mapping

from knittrans_jax.admission.rules import Kind, Rules


class PromptOrder:
    """See the module's opening. Memory: the prompts, and up to one epoch's order per kind."""

    def __init__(
        self, rules: Rules, prompts: Iterable[tuple[str, Mapping[str, str]]], seed: int, epochs: int | None = None
    ) -> None:
        """`prompts` are (prompt id, attributes) pairs; ids are unique. `epochs`: how many there are; None: without end."""
        self._seed, self._epochs = seed, epochs
        self._ids: dict[Kind, list[str]] = {}
        self.attributes: dict[str, dict[str, str]] = {}
        self._kind: dict[str, Kind] = {}
        for prompt_id, attributes in prompts:
            if prompt_id in self.attributes:
                raise ValueError(f"task: prompt id {prompt_id!r} comes twice; ids of training prompts must be unique")
            kind = rules.kind(attributes)
            self._ids.setdefault(kind, []).append(prompt_id)
            self.attributes[prompt_id] = dict(attributes)
            self._kind[prompt_id] = kind
        self._next_epoch: dict[Kind, int] = dict.fromkeys(self._ids, 0)
        self._next: dict[Kind, list[tuple[str, int]]] = {}
        self._queues: dict[Kind, collections.deque[tuple[str, int]]] = {k: collections.deque() for k in self._ids}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptOrder):
            return NotImplemented
        return (self._seed, self._ids, self._queues) == (other._seed, other._ids, other._queues)

    __hash__ = None  # type: ignore[assignment]

    def peek(self, kind: Kind, busy: Callable[[str], bool]) -> tuple[str, int] | None:
        """The next prompt of a kind and its epoch; None when every prompt of the kind is busy."""
        ids = self._ids.get(kind)
        if not ids:
            return None
        for entry in self._queues[kind]:
            if not busy(entry[0]):
                return entry
        # Everything left of this epoch is busy: look into the next, which holds every prompt of the kind.
        return next((entry for entry in self._upcoming(kind) if not busy(entry[0])), None)

    def take(self, prompt_id: str, epoch: int) -> None:
        """The prompt was leased."""
        kind = self._kind[prompt_id]
        if self._epochs is not None and epoch >= self._epochs:
            raise ValueError(f"prompt {prompt_id} of epoch {epoch}: there are {self._epochs} epochs")
        while epoch >= self._next_epoch[kind]:
            self._queues[kind].extend(self._upcoming(kind))
            del self._next[kind]
            self._next_epoch[kind] += 1
        self._queues[kind].remove((prompt_id, epoch))

    def give_back(self, prompt_id: str, epoch: int) -> None:
        """The prompt's group expired or was lost: it is launched again, before others."""
        self._queues[self._kind[prompt_id]].appendleft((prompt_id, epoch))

    @property
    def finite(self) -> bool:
        """Whether the epochs have an end."""
        return self._epochs is not None

    def left(self, kind: Kind) -> int:
        """Launches of this kind that are still to come. Raises `ValueError` when the epochs have no end."""
        if self._epochs is None:
            raise ValueError("epochs without end always have prompts left")
        ids = self._ids.get(kind, [])
        return len(self._queues.get(kind, ())) + (self._epochs - self._next_epoch.get(kind, self._epochs)) * len(ids)

    def _upcoming(self, kind: Kind) -> list[tuple[str, int]]:
        """The order of the next epoch, which no queue holds yet."""
        if kind not in self._next:
            epoch, ids = self._next_epoch[kind], list(self._ids[kind])
            if self._epochs is not None and epoch >= self._epochs:
                return []
            random.Random(f"{self._seed}/{epoch}/{kind!r}").shuffle(ids)
            self._next[kind] = [(prompt_id, epoch) for prompt_id in ids]
        return self._next[kind]
