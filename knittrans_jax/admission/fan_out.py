"""From whom a rollout host brings a version of the weights: a tree whose root is the training group. Pure.

What it guarantees:

* every node, the root included, has at most `width` hosts that bring a version from it at one time; so a training process's
  link carries a version `width` times, and once more for every host that asks again because its source failed;
* nobody waits in a circle: a host's source never brings the version from that host, directly or not;
* the tree stays as flat as the width allows; the same questions give the same answers;
* only the newest `KEEP` versions are remembered.

Hosts pass on what they have while the rest is still arriving, so a host is a source from the moment it has one itself.
"""

from __future__ import annotations

from collections.abc import Callable

from knittrans_jax.admission.training import TrainGroup
from knittrans_jax.launch.messages import WeightsFrom, WeightsWanted
from knittrans_jax.transfer.tickets import weight_unit

KEEP = 4
"""Versions remembered; older ones are served by nobody."""


class FanOut:
    """See the module's opening. `None` is the root."""

    def __init__(self, width: int) -> None:
        """`width`: hosts that bring a version from one node."""
        self._width = width
        self._source_of: dict[int, dict[str, str | None]] = {}
        self._failed: dict[int, set[str]] = {}
        self.from_training = 0
        """How often the root was given as a source."""
        self.asked_again = 0

    def assign(self, version: int, host: str, failed: str | None = None) -> str | None:
        """The source of a host for a version; None: the training processes.

        Args:
            version: a published one.
            host: who asks; it lives, and is no source before it has one.
            failed: the host that was its source, and did not serve it.
        """
        if version not in self._source_of:
            self._source_of[version], self._failed[version] = {}, set()
            for old in sorted(self._source_of)[:-KEEP]:
                del self._source_of[old], self._failed[old]
            if version not in self._source_of:
                self.from_training += 1
                return None
        sources, failures = self._source_of[version], self._failed[version]
        if host in sources:
            self.asked_again += 1
        if failed is not None:
            failures.add(failed)
        failures.discard(host)
        sources.pop(host, None)
        source = None if self._users(version, None) < self._width else self._flattest(version, host)
        sources[host] = source
        self.from_training += source is None
        return source

    def _users(self, version: int, node: str | None) -> int:
        return sum(source == node for source in self._source_of[version].values())

    def _flattest(self, version: int, host: str) -> str | None:
        """The host nearest to the root that has room, the first to have asked among equals; None: there is none."""
        best: tuple[int, str] | None = None
        for candidate in self._source_of[version]:
            way = self._way(version, candidate)
            sound = way is not None and host not in way and not self._failed[version].intersection(way)
            if way is not None and sound and self._users(version, candidate) < self._width:
                best = min(best or (len(way), candidate), (len(way), candidate), key=lambda one: one[0])
        return None if best is None else best[1]

    def _way(self, version: int, node: str) -> list[str] | None:
        """The hosts from a node to the root, itself first; None: the way ends at a host that has no source just now."""
        sources, way = self._source_of[version], [node]
        while True:
            if way[-1] not in sources:
                return None
            source = sources[way[-1]]
            if source is None:
                return way
            way.append(source)


class WeightsDesk:
    """Answers rollout hosts that want a version: sources, with their addresses and tickets."""

    def __init__(self, fan_out: FanOut, key: bytes, ticket: Callable[[str, str], bytes]) -> None:
        """`ticket`: issues one for a unit and a peer."""
        self.fan_out = fan_out
        self._key, self._ticket = key, ticket
        self._servers: dict[str, str] = {}
        """Addresses by rollout host."""

    def answer(self, request: WeightsWanted, training: TrainGroup, published: int, over: bool) -> WeightsFrom | str:
        """The sources, none of them when the run is `over` or the training group begins anew; or why there can be none."""
        self._servers[request.host] = request.address
        if request.version < 0 or over or training.incarnation < 0:
            return WeightsFrom(key=self._key)
        if request.version > published:
            return f"weights of version {request.version}: the newest published is {published}"
        if len(training.weights) < training.processes:
            return (
                f"weights: {len(training.weights)} of {training.processes} training processes serve them; start every role "
                "with the same weights.transfer"
            )
        source = self.fan_out.assign(request.version, request.host, request.failed)
        if source is None:
            units = {weight_unit(f"train{process}"): training.weights[process] for process in sorted(training.weights)}
        else:
            units = {weight_unit(source): self._servers[source]}
        return WeightsFrom(
            key=self._key,
            incarnation=training.incarnation,
            source=source,
            units=units,
            tickets={unit: self._ticket(unit, request.host) for unit in units},
        )
