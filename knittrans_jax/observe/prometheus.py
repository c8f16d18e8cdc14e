"""The scheduler's Prometheus endpoint: `GET /metrics` in the text exposition format 0.0.4.

What it guarantees:

* the scheduler's loop never waits for it: it hands over an immutable `Snapshot` now and then; a thread of its own serves the
  newest one;
* one request at a time, each within `REQUEST_S`; nothing but `/metrics` is answered, nothing is read but the request line and
  its headers;
* every figure says what it is and its unit; a name ends in `_total` if it only grows.
"""

from __future__ import annotations

import dataclasses
import http.server
import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from knittrans_jax.admission.accounts import Account
from knittrans_jax.config import ConfigError
from knittrans_jax.launch.messages import Status

if TYPE_CHECKING:
    from knittrans_jax.admission.scheduler import SchedulerCore

SNAPSHOT_S = 1.0
"""Between two snapshots: scrapers come every few seconds."""
REQUEST_S = 5.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
AGED = (Account.LEASED, Account.RUNNING, Account.READY, Account.ADMITTED)
CAUSES = ("gap", "worst", "in_flight", "in_queue", "architectural")

Labels = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What is served: taken by the scheduler's loop, read by the endpoint's thread."""

    status: Status
    ready: Mapping[str, int]
    """Ready groups by kind."""
    plans: int
    """Mini-batches admitted and not yet consumed."""
    parked: int
    """Requests that wait for their answer."""
    ages_s: Mapping[str, tuple[float, float]]
    """(mean, most) seconds that groups have been in their account, for the accounts of groups under way that have any."""
    host_silent_s: Mapping[str, float]
    """Seconds since each rollout host spoke."""
    evaluation_leases: int
    incarnation: int
    trajectories: int
    compilations: int


def snapshot_of(core: SchedulerCore, now_s: float) -> Snapshot:
    """The snapshot of a scheduler. Called by its own thread; costs a look at every open group."""
    state = core.state
    ages: dict[Account, list[float]] = {account: [] for account in AGED}
    for group in state.groups.values():
        ages[group.account].append(max(0.0, now_s - group.since_s))
    return Snapshot(
        status=core.status(),
        ready={"/".join(map(str, kind)) or "all": len(queue) for kind, queue in state.ready.items()},
        plans=len(state.plans),
        parked=core.parked,
        ages_s={account.value: (sum(found) / len(found), max(found)) for account, found in ages.items() if found},
        host_silent_s={host: max(0.0, now_s - seen_s) for host, seen_s in core.desk.seen_s.items()},
        evaluation_leases=len(core.evaluations.leases),
        incarnation=state.incarnation,
        trajectories=core.figures.trajectories,
        compilations=core.figures.compilations,
    )


def exposition(snapshot: Snapshot) -> str:
    """The snapshot as text."""
    figures, lines = snapshot.status.figures, []

    def metric(name: str, kind: str, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        lines.append(f"# HELP knittrans_{name} {text}")
        lines.append(f"# TYPE knittrans_{name} {kind}")
        for labels, value in samples:
            named = ",".join(f'{key}="{_escaped(own)}"' for key, own in labels)
            lines.append(f"knittrans_{name}{{{named}}} {value:.17g}" if named else f"knittrans_{name} {value:.17g}")

    def by(label: str, values: Mapping[str, float] | Mapping[str, int]) -> list[tuple[Labels, float]]:
        return [(((label, key),), float(value)) for key, value in values.items()]

    def one(value: float) -> list[tuple[Labels, float]]:
        return [((), float(value))]

    metric(
        "groups",
        "gauge",
        "Groups by account; they add up to the groups launched.",
        by("account", snapshot.status.accounts),
    )
    metric("updates_total", "counter", "Updates applied: the version.", one(figures["update"]))
    metric("updates_wanted", "gauge", "Updates of the whole run.", one(figures["updates"]))
    metric("published_version", "gauge", "Newest published version; -1 before the first.", one(figures["published"]))
    metric("reward_mean", "gauge", "Mean reward of the newest update's trajectories.", one(figures["reward_mean"]))
    if figures["heldout_questions"]:
        metric("heldout_exact_share", "gauge", "Held-out questions answered exactly.", one(figures["heldout_exact"]))
        metric("heldout_version", "gauge", "Version of that evaluation.", one(figures["heldout_version"]))
    metric(
        "staleness_updates_mean",
        "gauge",
        "Mean staleness of all consumed trajectories by cause, in updates.",
        by("cause", {cause: figures[f"{cause}_mean"] for cause in CAUSES}),
    )
    metric("trajectories_consumed_total", "counter", "Trajectories trained on.", one(snapshot.trajectories))
    metric(
        "trainer_wait_seconds_total",
        "counter",
        "Seconds that the slowest training process waited.",
        by("for", {"groups": figures["wait_groups_s"], "data": figures["wait_data_s"]}),
    )
    metric(
        "payload_bytes_total",
        "counter",
        "Payload bytes of consumed mini-batches.",
        by(
            "kind",
            {
                "pulled": figures["payload_pulled"],
                "unique": figures["payload_unique"],
                "through_scheduler": figures["payload_through_scheduler"],
            },
        ),
    )
    metric("sampled_tokens_per_second", "gauge", "Sampled tokens trained on, per second.", one(figures["tokens_per_s"]))
    metric(
        "ready_groups",
        "gauge",
        "Ready groups by kind: the values of the attributes with quotas.",
        by("kind", snapshot.ready),
    )
    metric("admitted_mini_batches", "gauge", "Mini-batches admitted and not yet consumed.", one(snapshot.plans))
    metric("parked_requests", "gauge", "Requests that wait for their answer.", one(snapshot.parked))
    metric("evaluation_leases", "gauge", "Shares of evaluations under way.", one(snapshot.evaluation_leases))
    metric("incarnation", "gauge", "Of the training group; -1 before the first.", one(snapshot.incarnation))
    metric("compilations_total", "counter", "Programs compiled by all training processes.", one(snapshot.compilations))
    metric(
        "account_age_seconds",
        "gauge",
        "How long groups have been in their account: mean and most.",
        [
            ((("account", account), ("of", name)), value)
            for account, pair in snapshot.ages_s.items()
            for name, value in zip(("mean", "max"), pair, strict=True)
        ],
    )
    metric("host_silent_seconds", "gauge", "Since a rollout host spoke.", by("host", snapshot.host_silent_s))
    known = {"payload_through_scheduler", "payload_pulled", "payload_unique", "tokens_per_s", *_STATUS}
    counted = {
        name: value for name, value in sorted(figures.items()) if name not in known and not name.endswith("_mean")
    }
    metric("scheduler_count", "untyped", "Everything else that the scheduler counts, by name.", by("name", counted))
    return "\n".join(lines) + "\n"


_STATUS = (
    *("update", "updates", "train_step", "published", "heldout_exact", "heldout_questions", "heldout_version"),
    *("wait_data_s", "wait_groups_s"),
)


class PrometheusEndpoint:
    """Serves the newest snapshot; before the first, 503."""

    def __init__(self, host: str, port: int) -> None:
        """Listens at once; port 0 picks a free one.

        Raises:
            ConfigError: it cannot listen there.
        """
        self._newest: Snapshot | None = None
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            raise ConfigError(
                f"observe.prometheus_port: cannot listen on {host!r}: {error.strerror or error} (value {port})"
            ) from error
        self.address = f"http://{host}:{self._server.server_address[1]}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.2,), name="prometheus", daemon=True)
        self._thread.start()

    def show(self, snapshot: Snapshot) -> None:
        """From now on this one is served."""
        self._newest = snapshot

    def text(self) -> str | None:
        """What is served now; None before the first snapshot."""
        newest = self._newest
        return None if newest is None else exposition(newest)

    def close(self) -> None:
        """Ends after the request under way."""
        self._server.shutdown()
        self._thread.join(REQUEST_S + 1.0)
        self._server.server_close()

    def __enter__(self) -> PrometheusEndpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Server(http.server.HTTPServer):
    def __init__(self, address: tuple[str, int], endpoint: PrometheusEndpoint) -> None:
        self.endpoint = endpoint
        super().__init__(address, _Handler)


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_S

    def do_GET(self) -> None:
        """Answers `/metrics`."""
        assert isinstance(self.server, _Server)
        text = self.server.endpoint.text()
        if self.path != "/metrics":
            self.send_error(404, "only /metrics is served")
        elif text is None:
            self.send_error(503, "the run has not begun")
        else:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: a line per scrape would bury the scheduler's log."""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
