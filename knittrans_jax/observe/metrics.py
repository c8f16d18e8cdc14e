"""Follows a run's event log while it grows and writes `metrics.jsonl`, one line per update.

The observer only reads the log: it slows nobody down, and when it is not there, nothing is lost: `observe` reads a whole log
again and gives the same record, the same lines and the same summary.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import msgspec

from knittrans_jax.admission.log import read_log
from knittrans_jax.config import Config
from knittrans_jax.observe.record import RunRecord, UpdateRecord
from knittrans_jax.observe.summary import Summary, summary_of, write_summary

EVENTS = "events.log"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"


class RunObserver:
    """Reads what was appended to `events.log` since the last `poll`. One thread."""

    def __init__(self, config: Config, directory: Path | None = None) -> None:
        """`directory`: the run's, by default the configuration's. `metrics.jsonl` is begun anew."""
        self.record = RunRecord(config)
        self._directory = config.directory if directory is None else directory
        self._offset_bytes = 0
        self._metrics = (self._directory / METRICS).open("wb")

    def poll(self) -> list[UpdateRecord]:
        """Folds in what is new; returns the updates among it. A log that is not there yet has nothing new."""
        path = self._directory / EVENTS
        try:
            if path.stat().st_size <= self._offset_bytes:
                return []
        except FileNotFoundError:
            return []
        log = read_log(path, self._offset_bytes)
        self._offset_bytes = log.whole_bytes
        updates = [update for update in map(self.record.apply, log.events) if update is not None]
        for update in updates:
            self._metrics.write(msgspec.json.encode(update) + b"\n")
        self._metrics.flush()
        return updates

    def finish(self, ended: str | None = None) -> Summary:
        """Reads the rest, writes `summary.json` and closes. `ended`: why the run ended, if the log does not say."""
        try:
            self.poll()
            summary = summary_of(self.record, ended)
            write_summary(self._directory / SUMMARY, summary)
            return summary
        finally:
            self.close()

    def close(self) -> None:
        """Closes `metrics.jsonl`."""
        self._metrics.close()

    def __enter__(self) -> RunObserver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def observe(config: Config, directory: Path | None = None) -> Summary:
    """Writes `metrics.jsonl` and `summary.json` of a run from its whole event log."""
    with RunObserver(config, directory) as observer:
        return observer.finish()
