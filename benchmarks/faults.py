"""`knittrans bench faults`: real runs in which a random role is killed or stopped at a random moment, again and again.

A life is one run of a small task over a finite data set, with `launch.on_child_death: recover`. While it trains, a fault
strikes: a role, each kind once and then drawn, gets SIGKILL, or SIGSTOP, which leaves it hanging until the launcher finds it
silent; an engine may also be told to leave politely (SIGTERM). Between the roles and the scheduler stands a proxy, which cuts
their connections, holds what they say back or changes it (`network`). The next fault strikes when the run has trained on since.
Every second life keeps finished groups on disk, so that storage units are killed too without anything being lost.

What must come out: every life ends by itself (`hung`), every prompt is trained on once an epoch in the final lineage
(`prompts_lost`), no group's gradient is in it twice (`gradients_twice`), repeated updates are bit by bit what they were
(`repeated_otherwise`). `recovery_s`: from the fault to the next update that had not been made before.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.lineage import final_lineage
from knittrans_jax.admission.log import read_log
from knittrans_jax.benchmarks.harness import BenchFailed, Report, Say
from knittrans_jax.benchmarks.proxy import Proxy
from knittrans_jax.benchmarks.registry import BenchSettings
from knittrans_jax.config import load_config
from knittrans_jax.rollout.tasks.registry import load_task
from knittrans_jax.transfer.control import ControlEndpoint, ControlError, read_endpoint, write_private_file

NAME = "life"
CONFIG = f"""
name: {NAME}
task: {{name: digits-read, options: {{digits: 1, train_prompts: 40, heldout_prompts: 8}}}}
batch: {{groups: 4, mini_batches: 2, trajectories_per_group: 2}}
admission: {{look_ahead_groups: 4, lease_timeout_s: 30}}
rollout: {{slots: 8, cache_tokens: 16, max_answer_tokens: 3, drain_s: 1}}
train: {{updates: 100000, row_tokens: 32, micro_batch_rows: 2, encoder_row_patches: 8, go_timeout_s: 40}}
checkpoint: {{every_train_batches: 4, keep: 2}}
control: {{pull_timeout_s: 10, rpc_timeout_s: 4}}
eval: {{every_updates: 100000, prompts: 4, final_prompts: 8}}
launch: {{on_child_death: recover, max_restarts: 1000}}
pace: {{update_s: 0.1}}
"""
KINDS = ("scheduler", "storage", "rollout", "train", "network")
MISCHIEF: dict[str, Callable[[Proxy], None]] = {
    "cut": lambda proxy: proxy.cut(),
    "hold": lambda proxy: proxy.hold(1.5),
    "corrupt": lambda proxy: proxy.corrupt(0.5),
}
"""What the proxy does: once, for seconds, for half a second."""
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}
POLL_S = 0.02


class Settings(BenchSettings, frozen=True):
    """`faults` in lives of at most `faults_per_life`; `silence_s` is the lives' `launch.silence_timeout_s`."""

    faults: Annotated[int, msgspec.Meta(ge=1)] = 40
    faults_per_life: Annotated[int, msgspec.Meta(ge=1)] = 10
    epochs_per_fault: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    train_processes: Annotated[int, msgspec.Meta(ge=1)] = 1
    hosts: Annotated[int, msgspec.Meta(ge=1)] = 1
    stop_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.25
    silence_s: Annotated[float, msgspec.Meta(ge=1)] = 5.0
    most_updates_between: Annotated[int, msgspec.Meta(ge=1)] = 12
    hang_s: Annotated[float, msgspec.Meta(gt=0)] = 180.0
    """A life without a new update for so long counts as hung."""
    kinds: tuple[str, ...] = KINDS
    seed: int = 0


@dataclasses.dataclass
class Fault:
    """One fault and what it cost."""

    life: int
    role: str
    signal: str
    on_disk: bool
    after_update: int
    recovery_s: float | None = None
    """None: the run did not train on."""


@dataclasses.dataclass
class LifeResult:
    """What a whole life came to."""

    faults: list[Fault]
    prompts_lost: int = 0
    gradients_twice: int = 0
    hung: int = 0
    updates: int = 0
    groups_lost: int = 0
    updates_repeated: int = 0
    repeated_otherwise: int = 0
    ended: str = ""


class _Between:
    """Puts a proxy between a run's scheduler and its roles: they find it in `control.json`, in the scheduler's place."""

    def __init__(self, file: Path) -> None:
        self.proxy = Proxy()
        self._file = file
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="between", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        ours = f"tcp://{self.proxy.address}"
        while not self._over.wait(POLL_S / 4):
            with contextlib.suppress(OSError, ControlError):
                endpoint = read_endpoint(self._file)
                if endpoint.address != ours:
                    self.proxy.upstream = endpoint.address.removeprefix("tcp://")
                    mine = ControlEndpoint(address=ours, server_key=endpoint.server_key)
                    write_private_file(self._file, msgspec.json.encode(mine))

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self.proxy.close()


class _Log:
    """Follows a run's event log."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset_bytes = path, 0
        self.updates = 0
        """The highest version reached so far."""

    def poll(self) -> int:
        if self._path.exists() and self._path.stat().st_size > self._offset_bytes:
            log = read_log(self._path, self._offset_bytes)
            self._offset_bytes = log.whole_bytes
            done = [event.update + 1 for event in log.events if isinstance(event, ev.Consumed)]
            self.updates = max([self.updates, *done])
        return self.updates


def live(settings: Settings, number: int, faults: int, folder: Path, say: Say) -> LifeResult:
    """One run with so many faults, from its first process to the look at its log."""
    draw = random.Random(f"{settings.seed}/{number}")
    on_disk = number % 2 == 1
    epochs = max(2, round(settings.epochs_per_fault * faults))
    shutil.rmtree(folder / "runs", ignore_errors=True)
    (folder / "life.yaml").write_text(CONFIG)
    overrides = [
        f"train.epochs={epochs}",
        f"train.processes={settings.train_processes}",
        f"train.mesh={{data: {settings.train_processes}}}",
        f"rollout.hosts={settings.hosts}",
        f"rollout.storage_on_disk={str(on_disk).lower()}",
        f"launch.silence_timeout_s={settings.silence_s}",
        f"seed={number}",
    ]
    with (folder / f"life{number}.out").open("wb") as out:
        run = subprocess.Popen(
            [sys.executable, "-m", "knittrans_jax.cli", "run", "life.yaml", *overrides, "--json"],
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")},
        )
    between = _Between(folder / "runs" / NAME / "control.json")
    try:
        result = LifeResult(_strike(settings, number, faults, on_disk, run, folder, between.proxy, draw, say))
        result.hung += _wait_for_end(run, folder, settings.hang_s)
    finally:
        if run.poll() is None:
            run.kill()
        run.wait()
        between.close()
    _look(result, folder, overrides)
    return result


def _strike(
    settings: Settings,
    number: int,
    faults: int,
    on_disk: bool,
    run: subprocess.Popen[bytes],
    folder: Path,
    proxy: Proxy,
    draw: random.Random,
    say: Say,
) -> list[Fault]:
    log = _Log(folder / "runs" / NAME / "events.log")
    struck: list[Fault] = []
    for index in range(faults):
        due = log.poll() + draw.randint(1, settings.most_updates_between)
        if not _reach(log, due, run, settings.hang_s):
            break
        time.sleep(draw.random())
        kind = settings.kinds[index] if index < len(settings.kinds) else draw.choice(settings.kinds)
        what = "SIGSTOP" if draw.random() < settings.stop_share else "SIGKILL"
        if kind == "rollout" and draw.random() < 0.25:
            what = "SIGTERM"
        if kind == "network":
            role, what = kind, draw.choice(list(MISCHIEF))
            strike = functools.partial(MISCHIEF[what], proxy)
        else:
            pids = roles(run.pid, kind)
            if not pids:
                break  # the run ends
            role, pid = draw.choice(pids)
            strike = functools.partial(os.kill, pid, SIGNALS[what])
        fault = Fault(number, role, what, on_disk, log.poll())
        struck.append(fault)
        strike()
        began_s = time.monotonic()
        if not _reach(log, fault.after_update + 1, run, settings.hang_s):
            say(f"life {number}: {what} to {role} after update {fault.after_update}: did not train on")
            break
        fault.recovery_s = time.monotonic() - began_s
        say(f"life {number}: {what} to {role} after update {fault.after_update}: {fault.recovery_s:.1f} s")
    return struck


def roles(launcher: int, kind: str) -> list[tuple[str, int]]:
    """Roles of a kind that a launcher's children are, with their process ids."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children")
    found: list[tuple[str, int]] = []
    for pid in map(int, children.read_text().split() if children.exists() else []):
        command = Path(f"/proc/{pid}/cmdline")
        words = command.read_bytes().decode().split("\0") if command.exists() else []
        if "knittrans_jax.cli" in words and kind in words:
            found.append((kind + (words[words.index("--index") + 1] if "--index" in words else ""), pid))
    return sorted(found)


def _reach(log: _Log, updates: int, run: subprocess.Popen[bytes], most_s: float) -> bool:
    """Waits for that many updates -> False when they do not come within `most_s` of the last one, or the run ends."""
    last, since_s = log.poll(), time.monotonic()
    while log.updates < updates:
        if run.poll() is not None or time.monotonic() - since_s > most_s:
            return log.poll() >= updates
        time.sleep(POLL_S)
        if log.poll() > last:
            last, since_s = log.updates, time.monotonic()
    return True


def _wait_for_end(run: subprocess.Popen[bytes], folder: Path, most_s: float) -> int:
    """Waits for a life's end, as long as it trains on -> 1 when it hangs."""
    log = _Log(folder / "runs" / NAME / "events.log")
    while run.poll() is None:
        before = log.poll()
        if not _reach(log, before + 1, run, most_s) and run.poll() is None:
            return 1
    return 0


def _look(result: LifeResult, folder: Path, overrides: list[str]) -> None:
    """What the log says of a life that has ended."""
    directory = folder / "runs" / NAME
    events = read_log(directory / "events.log").events
    result.ended = next((event.reason for event in reversed(events) if isinstance(event, ev.RunEnded)), "")
    config = load_config(folder / "life.yaml", overrides)
    wanted = collections.Counter(
        (prompt.prompt_id, epoch)
        for prompt in load_task(config.task, config.seed).prompts("train")
        for epoch in range(config.train.epochs or 0)
    )
    leased: dict[int, tuple[str, int]] = {}
    plans: dict[int, tuple[int, ...]] = {}
    trained: collections.Counter[tuple[str, int]] = collections.Counter()
    groups: collections.Counter[int] = collections.Counter()
    for event in final_lineage(events).events:
        match event:
            case ev.Leased():
                leased[event.group_id] = event.prompt_id, event.epoch
            case ev.Admitted():
                plans[event.plan.plan_id] = tuple(group.group_id for group in event.plan.groups)
            case ev.Consumed():
                groups.update(plans[event.plan_id])
                trained.update(leased[group_id] for group_id in plans[event.plan_id])
            case ev.Lost():
                result.groups_lost += 1
            case _:
                pass
    result.prompts_lost = (wanted - trained).total()
    result.gradients_twice = (trained - wanted).total() + sum(count - 1 for count in groups.values())
    reports = [event for event in events if isinstance(event, ev.RoleReport) and event.role == "scheduler"]
    counters = reports[-1].counters if reports else {}
    result.updates = sum(isinstance(event, ev.Consumed) for event in final_lineage(events).events)
    result.updates_repeated = int(counters.get("updates_repeated", 0))
    result.repeated_otherwise = int(counters.get("updates_repeated_otherwise", 0))


def bench(settings: Settings, say: Say) -> Report:
    """Lives until all faults have struck. Raises `BenchFailed` when a life does not even begin."""
    unknown = set(settings.kinds) - set(KINDS)
    if unknown:
        raise BenchFailed(f"kinds: {sorted(unknown)} are no roles; there are {list(KINDS)}")
    results: list[LifeResult] = []
    with tempfile.TemporaryDirectory(prefix="knittrans-faults-") as directory:
        folder, left, number = Path(directory), settings.faults, 0
        while left > 0:
            result = live(settings, number, min(left, settings.faults_per_life), folder, say)
            if not result.faults:
                raise BenchFailed(f"life {number} took no fault: {(folder / f'life{number}.out').read_text()[-2000:]}")
            results.append(result)
            say(
                f"life {number}: {len(result.faults)} faults, {result.updates} updates, ended {result.ended!r}; "
                f"prompts lost {result.prompts_lost}, gradients twice {result.gradients_twice}, hung {result.hung}"
            )
            left -= len(result.faults)
            number += 1
    return _report(settings, results)


def _report(settings: Settings, results: list[LifeResult]) -> Report:
    faults = [fault for result in results for fault in result.faults]
    by_role: dict[str, list[float]] = collections.defaultdict(list)
    for fault in faults:
        if fault.recovery_s is not None:
            by_role[f"{fault.role.rstrip('0123456789')} {fault.signal}"].append(fault.recovery_s)
    recovery = {
        name: {"faults": len(found), "median_s": statistics.median(found), "max_s": max(found)}
        for name, found in sorted(by_role.items())
    }
    headline: dict[str, Any] = {
        "faults": len(faults),
        "lives": len(results),
        "prompts_lost": sum(result.prompts_lost for result in results),
        "gradients_twice": sum(result.gradients_twice for result in results),
        "hung": sum(result.hung for result in results),
        "not_finished": sum(result.ended != "finished" for result in results),
        "updates": sum(result.updates for result in results),
        "updates_repeated": sum(result.updates_repeated for result in results),
        "repeated_otherwise": sum(result.repeated_otherwise for result in results),
        "groups_lost": sum(result.groups_lost for result in results),
        "recovery_s": recovery,
        "trials": [dataclasses.asdict(fault) for fault in faults],
        "endings": [result.ended for result in results],
    }
    notes = [
        f"{name}: {one['faults']} faults, trained on after {one['median_s']:.1f} s (median), {one['max_s']:.1f} s at most"
        for name, one in recovery.items()
    ]
    notes.append(
        f"SIGSTOP includes {settings.silence_s:g} s of silence before the launcher acts; groups lost were leased again"
    )
    return Report(tables=[], headline=headline, notes=notes)
