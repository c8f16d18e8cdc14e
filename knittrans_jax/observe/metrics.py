"""Follows a run's event log while it grows, writes `metrics.jsonl`, one line per update, and at the end what the run came to.

The observer only reads the log: it slows nobody down, and when it is not there, nothing is lost: `observe` reads a whole log
again and gives the same record, the same lines, the same summary, report and trace.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

import msgspec

from knittrans_jax.admission.events import AnyEvent, Resumed, TrainGroupFormed, Withdrawn
from knittrans_jax.admission.log import read_log
from knittrans_jax.config import Config
from knittrans_jax.observe.history import RunHistory, history_of
from knittrans_jax.observe.record import RunRecord, UpdateRecord
from knittrans_jax.observe.report import report
from knittrans_jax.observe.summary import Summary, summary_of, write_atomically, write_summary
from knittrans_jax.observe.tensorboard import TensorBoard
from knittrans_jax.observe.trace import trace

EVENTS = "events.log"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
REPORT = "report.html"
TRACE = "trace.json"
TENSORBOARD = "tensorboard"


class RunObserver:
    """Reads what was appended to `events.log` since the last `poll`. One thread."""

    def __init__(self, config: Config, directory: Path | None = None) -> None:
        """`directory`: the run's, by default the configuration's. `metrics.jsonl` is begun anew.

        Raises:
            ConfigError: `observe.tensorboard` without the package that it needs.
        """
        self.history = RunHistory(config)
        self.directory = config.directory if directory is None else directory
        self._offset_bytes = 0
        self._closing = contextlib.ExitStack()
        self._tensorboard = None
        if config.observe.tensorboard:
            self._tensorboard = self._closing.enter_context(TensorBoard(self.directory / TENSORBOARD))
        self._metrics = self._closing.enter_context((self.directory / METRICS).open("wb"))

    @property
    def record(self) -> RunRecord:
        """The record so far."""
        return self.history.record

    def poll(self) -> list[UpdateRecord]:
        """Folds in what is new; returns the updates among it. A log that is not there yet has nothing new.

        Where a run is resumed, a training group begins anew or a mini-batch is withdrawn, the lines of `metrics.jsonl` are
        those of the final lineage: they are written anew.
        """
        path = self.directory / EVENTS
        try:
            if path.stat().st_size <= self._offset_bytes:
                return []
        except FileNotFoundError:
            return []
        log = read_log(path, self._offset_bytes)
        if any(map(_takes_back, log.events)):
            log = read_log(path)  # what was folded in so far may not belong to the final lineage
            self.history = history_of(self.record.config, log.events)
            self._metrics.seek(0)
            self._metrics.truncate()
            updates = self.history.updates
        else:
            updates = [update for update in map(self.history.apply, log.events) if update is not None]
        self._offset_bytes = log.whole_bytes
        for update in updates:
            self._metrics.write(msgspec.json.encode(update) + b"\n")
        self._metrics.flush()
        if self._tensorboard is not None:
            self._tensorboard.write(updates, self.record)
        return updates

    def finish(self, ended: str | None = None) -> Summary:
        """Reads the rest, writes `summary.json` and closes. `ended`: why the run ended, if the log does not say."""
        try:
            self.poll()
            summary = summary_of(self.record, ended)
            write_summary(self.directory / SUMMARY, summary)
            return summary
        finally:
            self.close()

    def close(self) -> None:
        """Closes what is written."""
        self._closing.close()

    def __enter__(self) -> RunObserver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _takes_back(event: AnyEvent) -> bool:
    """Whether earlier events may not be of the final lineage, once this one has happened."""
    return isinstance(event, Resumed | Withdrawn) or (isinstance(event, TrainGroupFormed) and event.incarnation > 0)


def write_pages(directory: Path, history: RunHistory, summary: Summary) -> None:
    """Writes `report.html` and `trace.json`, each whole or not at all."""
    write_atomically(directory / REPORT, report(history, summary))
    write_atomically(directory / TRACE, trace(history))


def observe(config: Config, directory: Path | None = None) -> Summary:
    """Writes `metrics.jsonl`, `summary.json`, `report.html` and `trace.json` of a run from its whole event log."""
    with RunObserver(config, directory) as observer:
        summary = observer.finish()
        write_pages(observer.directory, observer.history, summary)
        return summary


def read_run(config: Config, directory: Path) -> tuple[RunHistory, Summary]:
    """History and summary of a run from its log; writes nothing, so that the run may still be under way.

    Why a run ended may be known to its launcher only, which wrote it to `summary.json`.

    Raises:
        OSError, LogError: there is no event log, or it is damaged.
    """
    history = history_of(config, read_log(directory / EVENTS).events)
    ended = None
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):  # not ended yet, or written by another version
        ended = msgspec.json.decode((directory / SUMMARY).read_bytes(), type=_Ended).ended
    return history, summary_of(history.record, ended)


class _Ended(msgspec.Struct):
    ended: str
