"""Figures of updates and evaluations as TensorBoard scalars, through tensorboardX (extra `tensorboard`), loaded only here.

Scalars stand at the number of updates, and carry the times of the run's events: the same log gives the same curves.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from knittrans_jax.config import ConfigError
from knittrans_jax.observe.record import RunRecord, UpdateRecord

PACKAGE = "tensorboardX"


def check_tensorboard() -> None:
    """Raises `ConfigError` naming the extra, if the package is not there."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            "observe.tensorboard: needs the package tensorboardX: pip install 'knittrans-jax[tensorboard]' (value true)"
        )


def scalars(update: UpdateRecord) -> Iterator[tuple[str, float]]:
    """(name, value) of all figures of an update that are there."""
    yield "train/reward_mean", update.reward_mean
    yield "train/length_tokens_mean", update.length_tokens_mean
    yield "bytes/payload_pulled", float(update.payload_pulled)
    yield "bytes/payload_unique", float(update.payload_unique)
    yield "compilations", float(update.compilations)
    for name, value in update.staleness.items():
        yield f"staleness_updates/{name}", value
    for name, value in update.waits_s.items():
        yield f"waits_s/{name}", value
    for name, count in update.accounts.items():
        yield f"groups/{name}", float(count)
    for name, metric in update.metrics.items():
        if metric is not None:
            yield f"trainer/{name}", metric


class TensorBoard:
    """Writes event files into a folder. One thread, beside the package's own."""

    def __init__(self, directory: Path) -> None:
        """Raises `ConfigError` without the package."""
        check_tensorboard()
        self._writer = importlib.import_module(PACKAGE).SummaryWriter(str(directory))
        self._heldout: dict[int, tuple[int, int, int]] = {}

    def write(self, updates: Sequence[UpdateRecord], record: RunRecord) -> None:
        """Writes these updates, and the evaluations of the record that are new or have grown by a host's share."""
        start_s = record.figures.start_s or 0.0
        for update in updates:
            for name, value in scalars(update):
                self._writer.add_scalar(name, value, update.update, walltime=start_s + update.time_s)
        for version, result in record.figures.evals.items():
            questions, exact, _ = result
            if questions and self._heldout.get(version) != result:
                self._heldout[version] = result
                self._writer.add_scalar(
                    "heldout/exact_share", exact / questions, version, walltime=record.figures.last_s
                )

    def close(self) -> None:
        """Writes the rest."""
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
