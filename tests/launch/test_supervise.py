"""Children are real processes here: none outlives its parent, and every end has a deadline."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from knittrans_jax.launch.supervise import Outcome, Role, StopSignals, supervise

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
SLEEPS = "import time; print('up', flush=True); time.sleep(60)"


def role(name: str, code: str, essential: bool = False) -> Role:
    return Role(name, (sys.executable, "-c", textwrap.dedent(code)), {"ROLE": name}, essential)


def alive(pid: int) -> bool:
    """Running; a zombie that nobody reaps does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], within_s: float = 3.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while any(map(alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not any(map(alive, pids))


def wait_for(path: Path, text: str, within_s: float = 10.0) -> str:
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        if path.exists() and text in path.read_text():
            return path.read_text()
        time.sleep(0.02)
    raise AssertionError(f"{path} does not say {text!r}: {path.read_text() if path.exists() else 'it is not there'}")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def run_roles(tmp_path: Path, *roles: Role, stop_timeout_s: float = 1.0, **more: float) -> Outcome:
    with StopSignals() as signals:
        return supervise(roles, tmp_path, signals, stop_timeout_s=stop_timeout_s, **more)  # pyright: ignore


def test_roles_that_end_by_themselves_end_the_run(tmp_path: Path) -> None:
    outcome = run_roles(tmp_path, role("a", "import os; print(os.environ['ROLE'])"), role("b", "pass"))
    assert outcome == Outcome()
    assert (tmp_path / "a.log").read_text() == "a\n"


def test_a_dead_child_ends_the_run_with_its_name_status_and_last_words(tmp_path: Path) -> None:
    outcome = run_roles(
        tmp_path,
        role("sleeper", SLEEPS),
        role("victim", "import sys; print('\\n'.join(map(str, range(50)))); sys.exit('out of memory')"),
    )
    assert outcome.death is not None
    assert (outcome.death.name, outcome.death.status) == ("victim", "exit status 1")
    assert outcome.death.log_tail.splitlines()[-2:] == ["49", "out of memory"]
    assert len(outcome.death.log_tail.splitlines()) == 20
    assert "victim died (exit status 1)" in str(outcome.death)


def test_a_child_killed_by_a_signal_is_reported_by_its_name(tmp_path: Path) -> None:
    outcome = run_roles(tmp_path, role("a", SLEEPS), role("b", "import os; os.kill(os.getpid(), 11)"))
    assert outcome.death is not None
    assert outcome.death.status == "signal SIGSEGV"


def test_nothing_runs_after_a_death_not_even_who_ignores_sigterm_or_was_left_in_its_session(tmp_path: Path) -> None:
    leaves_a_child = """
        import subprocess, sys
        print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
        sys.exit(3)
    """
    pids: list[int] = []

    def on_tick() -> None:
        pids.extend(pid for pid in children_of(os.getpid()) if pid not in pids)

    with StopSignals() as signals:
        outcome = supervise(
            [role("stubborn", STUBBORN), role("dies", leaves_a_child)],
            tmp_path,
            signals,
            stop_timeout_s=0.5,
            on_tick=on_tick,
        )
    assert outcome.death is not None
    assert outcome.killed == ("stubborn",)
    pids.append(int((tmp_path / "dies.log").read_text().split()[0]))
    assert len(pids) >= 3
    assert gone(pids)


def test_an_essential_child_that_leaves_early_is_a_death(tmp_path: Path) -> None:
    with StopSignals() as signals:
        outcome = supervise(
            [role("a", SLEEPS), role("unit", "pass", essential=True)],
            tmp_path,
            signals,
            stop_timeout_s=0.5,
            is_over=lambda: False,
        )
    assert outcome.death is not None
    assert outcome.death.status == "exit status 0, before the run had ended"


def test_a_command_that_does_not_exist_is_a_death_that_says_so(tmp_path: Path) -> None:
    outcome = run_roles(tmp_path, Role("nobody", ("/nowhere/at-all",)))
    assert outcome.death is not None
    assert "cannot start /nowhere/at-all: No such file" in outcome.death.log_tail


def test_others_may_not_linger_after_the_first_role_has_left(tmp_path: Path) -> None:
    began_s = time.monotonic()
    outcome = run_roles(tmp_path, role("scheduler", "pass"), role("lingers", SLEEPS), linger_s=0.2)
    assert outcome == Outcome()
    assert time.monotonic() - began_s < 5


def test_a_callback_that_raises_leaves_nothing_running(tmp_path: Path) -> None:
    pids: list[int] = []

    def on_tick() -> None:
        pids.extend(children_of(os.getpid()))
        raise OSError("disk full")

    with StopSignals() as signals, pytest.raises(OSError, match="disk full"):
        supervise([role("a", STUBBORN)], tmp_path, signals, stop_timeout_s=5.0, on_tick=on_tick)
    assert pids
    assert gone(pids)


LAUNCHER = f"""
import sys
from pathlib import Path
from knittrans_jax.launch.supervise import Role, StopSignals, supervise
roles = [Role(name, (sys.executable, "-c", code)) for name, code in (("plain", {SLEEPS!r}), ("stubborn", {STUBBORN!r}))]
with StopSignals() as signals:
    outcome = supervise(roles, Path(sys.argv[1]), signals, stop_timeout_s=float(sys.argv[2]))
print(outcome.interrupted, outcome.killed, flush=True)
"""


def start_launcher(tmp_path: Path, stop_timeout_s: float) -> tuple["subprocess.Popen[str]", list[int]]:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path), str(stop_timeout_s)], stdout=subprocess.PIPE, text=True
    )
    for name in ("plain", "stubborn"):
        wait_for(tmp_path / f"{name}.log", "up")
    pids = children_of(launcher.pid)
    assert len(pids) == 2
    return launcher, pids


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_within_five_seconds_even_who_ignores_sigterm(
    tmp_path: Path, number: signal.Signals
) -> None:
    launcher, pids = start_launcher(tmp_path, stop_timeout_s=2.0)
    began_s = time.monotonic()
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=10)
    assert time.monotonic() - began_s < 5
    assert output.split(maxsplit=1) == [number.name, "('stubborn',)\n"]
    assert gone(pids)


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path, stop_timeout_s=30.0)
    launcher.send_signal(signal.SIGINT)
    timer = threading.Timer(0.3, launcher.send_signal, [signal.SIGINT])
    timer.start()
    launcher.communicate(timeout=10)
    timer.join()
    assert gone(pids)


def test_a_launcher_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path, stop_timeout_s=5.0)
    launcher.kill()
    launcher.communicate(timeout=10)
    assert gone(pids)


def test_a_group_is_started_again_whole_as_often_as_allowed_and_the_others_live_on(tmp_path: Path) -> None:
    told: list[str] = []
    with StopSignals() as signals:
        outcome = supervise(
            [
                role("first", "import time; time.sleep(30)"),
                Role("a", (sys.executable, "-c", "print('up', flush=True); raise SystemExit(3)"), group="both"),
                Role("b", (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(30)"), group="both"),
            ],
            tmp_path,
            signals,
            stop_timeout_s=1.0,
            max_restarts=2,
            on_restart=lambda group, death: told.append(f"{group}: {death.reason}"),
        )
    assert told == ["both: a died (exit status 3)"] * 2
    assert outcome.death is not None
    assert outcome.death.name == "a"
    assert (tmp_path / "a.log").read_text() == "up\n" * 3
