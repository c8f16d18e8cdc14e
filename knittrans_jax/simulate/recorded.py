"""A recorded run as a workload of the simulator: what its groups turned out to be, and how long its machine took.

`record` takes from a log, in order of their start and by kind (the attributes that the batch's rules look at): each group's
flight, with its trajectories' own times and rewards, or why it failed; the time of each update; and the medians of what follows
an update until its weights are published, and of what a plan waits for its data. `replay` drives the real controller through
that under any configuration of rules, policy and look-ahead: the i-th group launched of a kind becomes the i-th recorded one,
and after the last it begins again. So two replays differ by their decisions alone.

Not in it: how a fuller machine would have slowed the groups down. A flight stays as long as it was recorded, however many
others are in the air; slots are those of the configuration.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.controller import Controller
from knittrans_jax.admission.gate import make_gate
from knittrans_jax.admission.policy import make_policy
from knittrans_jax.admission.prompts import PromptOrder
from knittrans_jax.admission.rules import Kind, Rules, rules_of
from knittrans_jax.admission.state import AdmissionState
from knittrans_jax.config import Config
from knittrans_jax.simulate.engine import Flight, SimRun, Simulation, Timing

Prompts = Sequence[tuple[str, Mapping[str, str]]]
"""(id, attributes) of every training prompt."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """See the module's opening. Times in seconds."""

    flights: tuple[tuple[Mapping[str, str], Flight], ...]
    """(attributes, flight) of every group that became ready or failed, in the order in which they started."""
    update_s: tuple[float, ...]
    """By update: from its plan's first chunk to its end."""
    pull_s: float
    publish_s: float


class NothingRecorded(ValueError):  # noqa: N818 - says what is wrong
    """A log in which no group was finished or no update made: there is nothing to replay."""


def record(events: Iterable[ev.AnyEvent]) -> Recording:
    """Takes a run's log apart.

    Raises:
        NothingRecorded: no finished group, or no update.
    """
    attributes: dict[int, Mapping[str, str]] = {}
    started_s: dict[int, float] = {}
    found: dict[int, Flight] = {}
    consumed_s: dict[int, float] = {}
    update_s: list[float] = []
    publish_s: list[float] = []
    pull_s: list[float] = []
    for event in events:
        match event:
            case ev.Leased():
                attributes[event.group_id] = event.attributes
            case ev.Started():
                started_s[event.group_id] = event.time_s
            case ev.Ready() if event.group.group_id in started_s:
                # The host's own word: the scheduler hears of a start a moment later.
                began_s = min(one.started_s for one in event.group.trajectories)
                members = tuple(
                    msgspec.structs.replace(one, started_s=one.started_s - began_s, finished_s=one.finished_s - began_s)
                    for one in event.group.trajectories
                )
                found[event.group.group_id] = Flight(event.time_s - began_s, members=members)
            case ev.Failed() if event.group_id in started_s:
                found[event.group_id] = Flight(event.time_s - started_s[event.group_id], fails=event.reason)
            case ev.Consumed():
                consumed_s[event.update + 1] = event.time_s
                update_s.append(event.metrics.get("update_s", 0.0))
                pull_s.append(event.waits_s.get("data", 0.0))
            case ev.Published() if event.version in consumed_s:
                publish_s.append(event.time_s - consumed_s[event.version])
            case _:
                pass
    if not found or not update_s:
        raise NothingRecorded(f"{len(found)} groups were finished and {len(update_s)} updates made: nothing to replay")
    in_order = sorted(found, key=lambda group: (started_s[group], group))
    return Recording(
        flights=tuple((attributes[group], found[group]) for group in in_order),
        update_s=tuple(update_s),
        pull_s=statistics.median(pull_s),
        publish_s=statistics.median(publish_s) if publish_s else 0.0,
    )


class _Flights:
    """Recorded flights, handed out by kind."""

    def __init__(self, rules: Rules, recording: Recording) -> None:
        by_kind: dict[Kind, list[Flight]] = collections.defaultdict(list)
        for attributes, flight in recording.flights:
            by_kind[rules.kind(attributes)].append(flight)
        self._rules = rules
        self._next: dict[Kind, Iterator[Flight]] = {kind: itertools.cycle(found) for kind, found in by_kind.items()}
        self._any = itertools.cycle(flight for _, flight in recording.flights)

    def __call__(self, leased: ev.Leased, now_s: float) -> Flight:
        """The next recorded flight of its kind; of a kind that was never recorded, the next of any."""
        del now_s
        return next(self._next.get(self._rules.kind(leased.attributes), self._any))


def replay(config: Config, prompts: Prompts, recording: Recording, *, group_bytes: int, updates: int) -> SimRun:
    """Replays a recording under a configuration.

    Args:
        config: rules, policy, look-ahead, publication and slots; need not be those of the recorded run.
        prompts: of the run.
        recording: its flights and times.
        group_bytes: the most payload bytes of a group; bounds `auto` look-ahead by storage, as live.
        updates: how many; recorded times of updates are used again from the first after the last.

    Raises:
        ConfigError: rules that no batch of these prompts can meet.
    """
    rules = rules_of(config, [attributes for _, attributes in prompts])
    controller = Controller(
        AdmissionState(rules),
        PromptOrder(rules, prompts, config.seed),
        make_policy(config.admission.policy, config.admission.schedule),
        make_gate(config, rules, group_bytes),
        admit_ahead=config.admission.admit_ahead,
    )
    timing = Timing(
        train_s=lambda update: recording.update_s[update % len(recording.update_s)],
        pull_s=recording.pull_s,
        publish_s=recording.publish_s,
        publish=config.train.publish,
        slots=config.rollout.hosts * (config.rollout.slots // config.batch.trajectories_per_group),
        in_flight=config.rollout.in_flight,
    )
    return Simulation(controller, timing, _Flights(rules, recording), updates=updates).run()
