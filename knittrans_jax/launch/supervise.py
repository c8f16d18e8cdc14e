"""Child processes that never outlive their parent: started in sessions of their own, watched, and ended within a deadline.

What it guarantees:

* a child is killed by the kernel when the launcher dies, however it dies (`PR_SET_PDEATHSIG`), so nothing is left behind;
* Ctrl-C reaches the launcher only: children are in sessions of their own and are ended in order, politely first;
* when `supervise` returns or raises, no child is left: SIGTERM first, SIGKILL to the whole session after `stop_timeout_s`;
* a child that dies is reported with its name, its exit status or signal, and the last lines of its log;
* a child that is said to be hung is killed, and has died of that;
* roles that are started again together are so whole: none of them runs any more when the first of the new ones starts. What
  was started wrongly (exit status 2) is not started again.

Linux only: the death signal is a kernel feature that other systems lack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

POLL_S = 0.05
WRONG_USE = 2
"""Exit status of a role that refuses its configuration: it would again."""
LOG_TAIL_LINES = 20
LOG_TAIL_BYTES = 16 * 2**10
KILL_WAIT_S = 1.0
"""How long a killed child may take to be reaped; only a process stuck in the kernel takes longer."""
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0) != 0:  # PR_SET_PDEATHSIG
    sys.exit("knittrans starts processes on Linux only: prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != int(sys.argv[1]):  # the launcher died before we asked
    sys.exit("the launcher is gone")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot start {sys.argv[2]}: {error.strerror}")
"""
"""What every child runs first; the death signal survives `exec`. Not a `preexec_fn`: that forks with threads alive."""


@dataclasses.dataclass(frozen=True)
class Role:
    """A process to run. `environment` is added to the launcher's own; `essential`: exit status 0 before the end is a death.

    `group`: when it dies, all roles that belong to this group are started again; without one, its death ends the run. `also`:
    further groups that it belongs to.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    essential: bool = False
    group: str = ""
    also: tuple[str, ...] = ()

    def belongs_to(self, group: str) -> bool:
        """Whether it is started again with that group."""
        return group == self.group or group in self.also


@dataclasses.dataclass(frozen=True)
class Death:
    """A child that died."""

    name: str
    status: str
    """Such as `exit status 3`, or `signal SIGKILL`."""
    log: Path
    log_tail: str

    @property
    def reason(self) -> str:
        """In one line."""
        return f"{self.name} died ({self.status})"

    def __str__(self) -> str:
        tail = "\n".join(f"  | {line}" for line in self.log_tail.splitlines()) or "  | (nothing)"
        return f"{self.reason}; the last lines of {self.log}:\n{tail}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the children ended: all by themselves (no `death`, not `interrupted`), by a death, or because they were told to."""

    death: Death | None = None
    interrupted: str | None = None
    """The signal that asked for the end."""
    killed: tuple[str, ...] = ()
    """Children that did not end when asked, and were killed."""


@dataclasses.dataclass
class _Child:
    role: Role
    process: subprocess.Popen[bytes]
    log: Path
    started_s: float
    hung: str = ""
    """Why it was killed."""

    def running(self) -> bool:
        """Whether it still runs. Once it does not, what it started itself and left in its session is killed."""
        if self.process.returncode is not None:
            return False
        # Look without reaping: as long as the process is not reaped, its session's number cannot be another's.
        if os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return True
        self.signal(signal.SIGKILL)
        self.process.wait()
        return False

    def signal(self, number: signal.Signals) -> None:
        """To the child's whole session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP set `received` instead of ending this process."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, lambda n, _: self.received.append(signal.Signals(n).name))
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]


def supervise(
    roles: Sequence[Role],
    logs: Path,
    signals: StopSignals,
    *,
    stop_timeout_s: float,
    on_tick: Callable[[], None] = lambda: None,
    ask_to_end: Callable[[str], None] = lambda reason: None,
    is_over: Callable[[], bool] = lambda: True,
    linger_s: float = 30.0,
    max_restarts: int = 0,
    on_restart: Callable[[str, Death], None] = lambda group, death: None,
    hung: Callable[[], Mapping[str, float]] = dict,
) -> Outcome:
    """Runs the roles until all have ended.

    Args:
        roles: what to run; `logs/<name>.log` receives both outputs of each.
        logs: an existing folder.
        signals: entered by the caller; the first signal ends the run, a second one kills at once.
        stop_timeout_s: from being asked to end to being killed.
        on_tick: called between polls; must not block.
        ask_to_end: tells the roles in their own way, with a reason, before SIGTERM.
        is_over: whether the run has ended, so that an essential role may leave.
        linger_s: how long the others may take once the first role of `roles` has ended.
        max_restarts: how often groups are started again in all; the next death ends the run.
        on_restart: told of a group that will be started again, and of the death that is the reason.
        hung: roles that must not be waited for any longer, and for how many seconds nothing was heard of each.

    Returns:
        How they ended. Nothing runs any more.
    """
    children: list[_Child] = []
    try:
        for role in roles:
            children.append(_start(role, logs))
        first_left_s: float | None = None
        restarts = 0
        while any(child.running() for child in children):
            on_tick()
            _kill_hung(children, hung())
            dead = _first_death(children, is_over)
            if dead is not None:
                death, group = _death(dead), dead.role.group
                again = group and dead.process.returncode != WRONG_USE
                if again and restarts < max_restarts and not signals.received:
                    restarts += 1
                    on_restart(group, death)
                    _restart(children, group, logs)
                    continue
                return Outcome(
                    death=death, killed=_end(children, signals, stop_timeout_s, ask_to_end, f"error: {death.reason}")
                )
            if signals.received:
                return Outcome(
                    interrupted=signals.received[0],
                    killed=_end(children, signals, stop_timeout_s, ask_to_end, "interrupted"),
                )
            if not children[0].running():
                first_left_s = time.monotonic() if first_left_s is None else first_left_s
                if time.monotonic() - first_left_s > linger_s:
                    return Outcome(killed=_end(children, signals, stop_timeout_s, ask_to_end, "finished"))
            time.sleep(POLL_S)
        dead = _first_death(children, lambda: True)
        return Outcome(death=None if dead is None else _death(dead))
    finally:
        _kill([child for child in children if child.running()])


def _restart(children: list[_Child], group: str, logs: Path) -> None:
    """Starts all roles of a group again, in their places; their logs go on."""
    _kill([child for child in children if child.role.belongs_to(group) and child.running()])
    for index, child in enumerate(children):
        if child.role.belongs_to(group):
            children[index] = _start(child.role, logs)


def _kill_hung(children: Sequence[_Child], silent_s: Mapping[str, float]) -> None:
    """Kills who is silent. What is known of a child's silence may be that of the one before it."""
    for child in children:
        silence_s = silent_s.get(child.role.name)
        if silence_s is not None and time.monotonic() - child.started_s > silence_s and child.running():
            child.hung = f"killed: nothing was heard of it for {silence_s:.0f} s"
            child.signal(signal.SIGKILL)


def _start(role: Role, logs: Path) -> _Child:
    path = logs / f"{role.name}.log"
    with path.open("ab") as log:
        process = subprocess.Popen(
            (sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *role.command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **role.environment},
            start_new_session=True,
        )
    return _Child(role, process, path, time.monotonic())


def _first_death(children: Sequence[_Child], is_over: Callable[[], bool]) -> _Child | None:
    ended = [child for child in children if not child.running()]
    for child in ended:
        if child.process.returncode != 0:
            return child
    early = [child for child in ended if child.role.essential]
    return early[0] if early and not is_over() else None


def _death(child: _Child) -> Death:
    status = child.hung or describe_status(child.process.returncode)
    return Death(child.role.name, status, child.log, log_tail(child.log))


def describe_status(returncode: int) -> str:
    """A return code in words."""
    if returncode >= 0:
        return f"exit status {returncode}" + (", before the run had ended" if returncode == 0 else "")
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"signal {-returncode}"


def log_tail(path: Path) -> str:
    """The last lines of a log; at most `LOG_TAIL_BYTES` are read."""
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-LOG_TAIL_LINES:])


def _end(
    children: Sequence[_Child],
    signals: StopSignals,
    stop_timeout_s: float,
    ask_to_end: Callable[[str], None],
    reason: str,
) -> tuple[str, ...]:
    """Ends all children: asked, then SIGTERM after a third of the time, then SIGKILL. Returns whom it had to kill."""
    began_s, told = time.monotonic(), len(signals.received)
    ask_to_end(reason)
    running = [child for child in children if child.running()]
    terminated = False
    while running and time.monotonic() - began_s < stop_timeout_s and len(signals.received) <= max(told, 1):
        if not terminated and time.monotonic() - began_s >= stop_timeout_s / 3:
            terminated = True
            for child in running:
                child.signal(signal.SIGTERM)
        time.sleep(POLL_S)
        running = [child for child in running if child.running()]
    _kill(running)
    return tuple(child.role.name for child in running)


def _kill(children: Sequence[_Child]) -> None:
    for child in children:
        child.signal(signal.SIGKILL)
    deadline_s = time.monotonic() + KILL_WAIT_S
    while (left := [child for child in children if child.running()]) and time.monotonic() < deadline_s:
        time.sleep(POLL_S / 5)
    for child in left:
        print(f"{child.role.name} (pid {child.process.pid}) does not go away, even killed", file=sys.stderr)  # noqa: T201
