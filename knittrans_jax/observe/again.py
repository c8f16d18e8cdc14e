"""`knittrans report`: the pages of runs that are there already, from their event logs.

Reads only the run's `config.yaml`, `events.log` and, for why it ended, `summary.json`; so it also works on a run that is under
way, or one whose launcher was killed. Writes nothing but the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knittrans_jax.config import ConfigError, load_config
from knittrans_jax.observe.compare import MAX_RUNS, Run, comparison, figures_of
from knittrans_jax.observe.metrics import EVENTS, REPORT, TRACE, read_run, write_pages
from knittrans_jax.observe.summary import summary_to_dict, write_atomically


def report_run(directory: Path) -> dict[str, Any]:
    """Writes `report.html` and `trace.json` into a run's folder -> where they are, and the summary.

    Raises:
        ConfigError: no folder of a run.
        LogError, OSError: the log is damaged, or the pages cannot be written.
    """
    run = _read(directory)
    write_pages(directory, run.history, run.summary)
    return {
        "report": str(directory / REPORT),
        "trace": str(directory / TRACE),
        "summary": summary_to_dict(run.summary),
    }


def compare_runs(directories: Sequence[Path], out: Path | None) -> dict[str, Any]:
    """Writes a page that puts runs side by side -> where it is, and every run's compared figures and summary.

    Raises:
        ConfigError: no folder of a run, or too many.
        LogError, OSError: a log is damaged, or the page cannot be written.
    """
    if len(directories) > MAX_RUNS:
        raise ConfigError(f"report: at most {MAX_RUNS} runs fit side by side (value {len(directories)} runs)")
    names = [directory.resolve().name for directory in directories]
    labels = names if len(set(names)) == len(names) else [str(directory) for directory in directories]
    runs = [_read(directory, label) for directory, label in zip(directories, labels, strict=True)]
    page = out or directories[0].resolve().parent / f"{'-vs-'.join(names)}.html"
    write_atomically(page, comparison(runs))
    return {
        "report": str(page),
        "runs": [
            {
                "name": run.label,
                "directory": str(directory),
                "figures": figures_of(run),
                "summary": summary_to_dict(run.summary),
            }
            for run, directory in zip(runs, directories, strict=True)
        ],
    }


def _read(directory: Path, label: str | None = None) -> Run:
    config_file = directory / "config.yaml"
    if not config_file.is_file() or not (directory / EVENTS).is_file():
        raise ConfigError(
            f"report: {directory} is no run's folder: expected config.yaml and {EVENTS} in it (runs are in runs/NAME)"
        )
    history, summary = read_run(load_config(config_file), directory)
    return Run(label or directory.resolve().name, history, summary)
