"""`knittrans run`: all roles of a run on this machine, from an empty folder to `summary.json`.

1. Everything that can be known beforehand is checked (`launch/check.py`); nothing is started otherwise.
2. The run's folder is made. An earlier run of the same name is moved aside to `NAME.1`, `NAME.2`, ... (never deleted), unless
   it still runs, which is an error. So `runs/NAME` is always the newest run, and a command can simply be given again. With
   `resume: true` the earlier run is gone on with, in its folder; its `logs` become `logs.1`, `logs.2`, ...
3. The roles start as processes of their own, with the resolved `config.yaml`; their output goes to `logs/ROLE.log`.
4. The launcher watches: it shows the live table, writes `metrics.jsonl`, and ends everything when a role dies or a signal
   comes. With `launch.on_child_death: recover` the role is started again, with those that cannot go on without it; a role of
   which nothing is heard any more is killed, and so dies.
5. `summary.json`, `report.html` and `trace.json` are written however the run ended, and say how.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
from rich.console import Console

from knittrans_jax.admission.log import LogError
from knittrans_jax.admission.resume import log_to_resume
from knittrans_jax.config import Config, ConfigError, config_to_yaml
from knittrans_jax.launch.environment import roles_of, usable_cores
from knittrans_jax.launch.messages import Shutdown, Status, StatusRequest
from knittrans_jax.launch.supervise import Death, Outcome, Role, StopSignals, supervise
from knittrans_jax.observe.metrics import RunObserver, write_pages
from knittrans_jax.observe.summary import Summary
from knittrans_jax.observe.table import LiveView, duration
from knittrans_jax.transfer.control import ControlClient, ControlError

STATUS_S = 0.25
"""Pause between two questions to the scheduler for its status."""
SHUTDOWN_S = 0.5
"""How long the scheduler may take to acknowledge that the run shall end."""
LOCK = ".launcher.lock"
CONTROL = "control.json"
SCHEDULER = "scheduler"
"""The name of its role, and of the group that is started again with it."""


@dataclasses.dataclass(frozen=True)
class RunResult:
    """How a run ended. `error`: None when it finished; else what to tell the user."""

    summary: Summary
    outcome: Outcome
    error: str | None


def run(
    config: Config,
    console: Console,
    make_roles: Callable[[Config, Path], Sequence[Role]] | None = None,
) -> RunResult:
    """Runs all roles on this machine. The configuration has been checked (`check_run`).

    Args:
        config: the run; port 0 of `train.coordinator` is replaced by a free one.
        console: where the table and messages go.
        make_roles: from the resolved configuration and its file to the roles; by default those of the run.

    Raises:
        ConfigError: the run's folder cannot be used.
    """
    config = _with_coordinator(config)
    with RunFolder(config) as folder:
        if folder.moved_to is not None:
            console.print(f"the earlier run was moved to {folder.moved_to}", highlight=False, soft_wrap=True)
        if config.resume:
            what = "goes on with the run in" if folder.resumed else "no run to resume: begins one in"
            console.print(f"{what} {folder.path}", highlight=False, soft_wrap=True)
        config_file = config.directory / "config.yaml"
        config_file.write_text(config_to_yaml(config), encoding="utf-8")
        logs = config.directory / "logs"
        logs.mkdir()
        roles = make_roles(config, config_file) if make_roles else roles_of(config, config_file, usable_cores())
        with (
            RunObserver(config) as observer,
            _SchedulerLink(config) as link,
            LiveView(console, config.name) as view,
            StopSignals() as signals,
        ):
            began_s = time.monotonic()

            def on_tick() -> None:
                observer.poll()
                view.show(observer.record, link.status(), time.monotonic() - began_s)

            def is_over() -> bool:
                if observer.record.ended is None and not link.ended():
                    observer.poll()  # the scheduler may have written the end and left in between
                    return observer.record.ended is not None
                return True

            def ask_to_end(reason: str) -> None:
                view.close()
                if reason == "interrupted":
                    console.print("ending all processes", highlight=False)
                link.shutdown(reason)

            def on_restart(group: str, death: Death) -> None:
                if group == SCHEDULER:
                    link.reset()
                console.print(f"{death.reason}: {group} begins again", markup=False, highlight=False, soft_wrap=True)

            outcome = supervise(
                roles,
                logs,
                signals,
                stop_timeout_s=config.launch.stop_timeout_s,
                on_tick=on_tick,
                ask_to_end=ask_to_end,
                is_over=is_over,
                linger_s=config.launch.finish_timeout_s,
                max_restarts=config.launch.max_restarts,
                on_restart=on_restart,
                hung=lambda: link.silent(config.launch.silence_timeout_s),
            )
            view.close()
            summary = observer.finish(_ended(outcome))
            _write_pages(observer, summary, console)
    return RunResult(summary, outcome, _error(summary, outcome, time.monotonic() - began_s))


def _write_pages(observer: RunObserver, summary: Summary, console: Console) -> None:
    try:
        write_pages(observer.directory, observer.history, summary)
    except Exception as error:  # what the run came to is on disk, and stands whether or not it can be drawn
        again = f"`knittrans report {observer.directory}` tries again"
        console.print(
            f"report.html or trace.json could not be written ({error!r}); {again}", markup=False, soft_wrap=True
        )


def _ended(outcome: Outcome) -> str:
    """Why the run ended, where the scheduler could no longer write it down."""
    if outcome.death is not None:
        return f"error: {outcome.death.reason}"
    return "interrupted" if outcome.interrupted is not None else "error: the scheduler ended without a word"


def _error(summary: Summary, outcome: Outcome, elapsed_s: float) -> str | None:
    if outcome.death is not None:
        return str(outcome.death)
    if outcome.interrupted is not None:
        killed = f"; had to be killed: {', '.join(outcome.killed)}" if outcome.killed else ""
        return f"interrupted by {outcome.interrupted} after {duration(elapsed_s)}, at update {summary.updates}{killed}"
    return None if summary.ended == "finished" else f"the run did not finish: {summary.ended}"


def _with_coordinator(config: Config) -> Config:
    """Port 0 of the coordinator becomes a port that is free now."""
    host, _, port = config.train.coordinator.rpartition(":")
    if int(port):
        return config
    with socket.socket() as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise ConfigError(
                f"train.coordinator: cannot listen on {host!r}: {error.strerror} (value {config.train.coordinator!r})"
            ) from error
        free = probe.getsockname()[1]
    train = msgspec.structs.replace(config.train, coordinator=f"{host}:{free}")
    return msgspec.structs.replace(config, train=train)


class RunFolder:
    """A folder for the run, locked while it runs: an empty one, or the one of the run that is resumed.

    `moved_to`: where an earlier run of this name went. `resumed`: it is gone on with.
    """

    def __init__(self, config: Config) -> None:
        self.path = config.directory
        self.moved_to: Path | None = None
        self.resumed = False
        self._config = config
        self._lock = -1

    def __enter__(self) -> RunFolder:
        """Raises `ConfigError` when the folder cannot be used, or the run in it not be resumed."""
        try:
            if self.path.exists():
                self._lock = self._take_lock()
                self.resumed = log_to_resume(self._config, self.path, goes_on=self._config.resume) is not None
                if self.resumed:
                    self._clear_for_resuming()
                    return self
                self._unlock()
                self.moved_to = _next_name(self.path)
                self.path.rename(self.moved_to)
            self.path.mkdir(parents=True)
            self._lock = self._take_lock()
        except (ConfigError, LogError) as error:
            self._unlock()
            raise error if isinstance(error, ConfigError) else ConfigError(f"resume: {error}") from error
        except OSError as error:
            self._unlock()
            raise ConfigError(
                f"run_dir: cannot make the run's folder {self.path}: {error.strerror or error}"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unlock()

    def _clear_for_resuming(self) -> None:
        (self.path / CONTROL).unlink(missing_ok=True)  # of the scheduler that is gone
        shutil.rmtree(self.path / "weights", ignore_errors=True)  # of versions that may come again, with other contents
        for name in ("logs", "config.yaml"):
            if (self.path / name).exists():
                (self.path / name).rename(_next_name(self.path / name))

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> int:
        lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ConfigError(
                f"name: a run is under way in {self.path}; wait for it, end it, or give this one another name=..."
            ) from None
        return lock


def _next_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate


class _SchedulerLink:
    """Asks the scheduler for its status without ever blocking the launcher. A scheduler that is not there has none."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._file = config.directory / CONTROL
        self._client: ControlClient | None = None
        self._newest: Status | None = None
        self._asked_s = 0.0
        self._heard_s: float | None = None
        """When the present scheduler answered last; None: it has not yet."""

    def status(self) -> Status | None:
        """The newest status that is here; asks for a newer one."""
        try:
            client = self._connected()
            if client is None:
                return None
            if not client.outstanding and time.monotonic() - self._asked_s >= STATUS_S:
                self._asked_s = time.monotonic()
                client.post(StatusRequest())
            reply = client.poll(0.0)
        except ControlError:
            return self._newest  # a dead scheduler is found by its exit, with its log
        if isinstance(reply, Status):
            self._newest, self._heard_s = reply, time.monotonic()
        return self._newest

    def silent(self, timeout_s: float) -> dict[str, float]:
        """Roles of which nothing was heard for `timeout_s`, and for how long; the scheduler is one of them."""
        if self._newest is None or self._heard_s is None:
            return {}
        unheard_s = time.monotonic() - self._heard_s
        if unheard_s > timeout_s:
            return {SCHEDULER: unheard_s}
        return {role: silence_s for role, silence_s in self._newest.silent_s.items() if silence_s > timeout_s}

    def reset(self) -> None:
        """The scheduler is started anew: it will write where it is."""
        if self._client is not None:
            self._client.close()
        self._client, self._heard_s = None, None
        self._file.unlink(missing_ok=True)

    def ended(self) -> bool:
        """Asks once more, briefly: whether the scheduler says that roles may go."""
        try:
            client = self._connected()
            if client is None:
                return False
            client.abandon()
            reply = client.call(StatusRequest(), timeout_s=SHUTDOWN_S, overall_s=SHUTDOWN_S)
        except ControlError:
            return False
        return isinstance(reply, Status) and reply.ended is not None

    def shutdown(self, reason: str) -> None:
        """Asks the scheduler to end the run; it may be gone."""
        try:
            client = self._connected()
            if client is not None:
                client.abandon()
                client.call(Shutdown(reason=reason), timeout_s=SHUTDOWN_S, overall_s=SHUTDOWN_S)
        except ControlError:
            return  # signals follow

    def _connected(self) -> ControlClient | None:
        if self._client is None and self._file.exists():
            self._client = ControlClient(self._file, "launcher", self._config.control.rpc_timeout_s)
        return self._client

    def __enter__(self) -> _SchedulerLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            self._client.close()
