"""The scheduler process: a thin loop around `SchedulerCore`, the control server and the event log.

One turn: receive requests (or let 50 ms pass) -> the core decides -> the turn's events are written and forced to disk together
-> only then the replies leave. The service holds no state that matters; what ends it is the core's `finished`.

It counts every byte that comes in. The control channel's records cannot hold a payload (no request has a field of bytes,
which is checked at start), so a payload could come only as something that is no record: those bytes are what
`payload_through_scheduler` reports.
"""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import signal
import sys
import threading
import time
import typing
from collections.abc import Callable
from pathlib import Path

import msgspec

from knittrans_jax.admission.events import AnyEvent
from knittrans_jax.admission.log import EventLog, ReadLog
from knittrans_jax.admission.resume import log_to_resume
from knittrans_jax.admission.scheduler import Layout, SchedulerCore, Step
from knittrans_jax.config import Config
from knittrans_jax.launch.messages import Request
from knittrans_jax.observe.prometheus import SNAPSHOT_S, PrometheusEndpoint, snapshot_of
from knittrans_jax.rollout.tasks.base import max_group_bytes
from knittrans_jax.rollout.tasks.registry import load_task
from knittrans_jax.transfer import tickets
from knittrans_jax.transfer.control import ControlServer
from knittrans_jax.transfer.plan import layout_mini_batch
from knittrans_jax.transfer.weights import WeightReader

TURN_S = 0.05
"""How long a turn waits for requests: the resolution of the scheduler's deadlines."""


class RunFailed(RuntimeError):  # noqa: N818 - the name says what happened
    """The run ended with an error, which the message states."""


def run_scheduler(config: Config, run_dir: Path, stop: threading.Event | None = None) -> None:
    """The scheduler process: serves until the run has ended and everybody knows.

    Args:
        config: the run's configuration.
        run_dir: receives `control.json` and `events.log`; with `resume` or `launch.on_child_death: recover`, a log that is
            there already is gone on with.
        stop: set it to end the run as interrupted; without one, SIGTERM and SIGINT do.

    Raises:
        ConfigError: no batch of this task's prompts can meet the rules, storage is too small, or the run cannot be resumed.
        LogError: there is a log, and it is not to be resumed or damaged.
        RunFailed: the run ended with an error.
    """
    recovers = config.launch.on_child_death == "recover"
    resumed = log_to_resume(config, run_dir, goes_on=config.resume or recovers)
    if resumed is not None and not recovers:
        shutil.rmtree(run_dir / "weights", ignore_errors=True)  # of versions that may come again, with other contents
    whole = WeightReader(run_dir / "weights").versions() if config.weights.transfer == "directory" else []
    task = load_task(config.task, config.seed)
    core = SchedulerCore(
        config,
        train_prompts=[(prompt.prompt_id, prompt.attributes) for prompt in task.prompts("train")],
        heldout_prompts=[prompt.prompt_id for prompt in task.prompts("heldout")],
        layout=bind_layout(config),
        group_bytes=max_group_bytes(task.limits, config.batch.trajectories_per_group, config.rollout.cache_tokens),
        ticket_key=tickets.new_key(),
        history=() if resumed is None else resumed.events,
        published=max(whole, default=-1),
    )
    if stop is None:
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    serve(core, run_dir, stop, resumed)


def serve(core: SchedulerCore, run_dir: Path, stop: threading.Event, resumed: ReadLog | None = None) -> None:
    """Runs the loop around a core. `resumed`: the log that the core's history is of. See `run_scheduler`."""
    config = core.config
    check_no_payload_fields()
    clock = steady_wall_clock(resumed.events[-1].time_s if resumed is not None else 0.0)
    with (
        EventLog(run_dir / "events.log", fsync=config.control.fsync, resume=resumed) as log,
        ControlServer(config.control.host, config.control.port, run_dir / "control.json") as server,
        contextlib.ExitStack() as meters,
    ):
        endpoint = _prometheus(config, meters)
        shown_s = -math.inf

        def commit(steps: list[Step]) -> None:
            events: list[AnyEvent] = [event for step in steps for event in step.events]
            log.append(events)
            for step in steps:
                for token, reply in step.replies:
                    peer, request_id = typing.cast("tuple[bytes, int]", token)
                    server.reply(peer, request_id, reply)

        commit([core.start(clock())])
        while not core.finished:
            if stop.is_set():
                core.end("interrupted")
            incoming = server.receive(TURN_S)
            counters = server.counters
            core.service_counters = {
                "payload_through_scheduler": float(counters.undecodable_bytes),
                "log_bytes": float(log.size_bytes),
                **counters.as_dict(),
            }
            steps = [core.handle((one.peer, one.request_id), one.request, clock()) for one in incoming]
            steps.append(core.tick(clock()))
            commit(steps)
            if endpoint is not None and clock() - shown_s >= SNAPSHOT_S:
                shown_s = clock()
                endpoint.show(snapshot_of(core, shown_s))
    if core.ending is not None and core.ending.startswith("error"):
        raise RunFailed(core.ending)


def _prometheus(config: Config, meters: contextlib.ExitStack) -> PrometheusEndpoint | None:
    """The endpoint, if one is wanted; its address goes to the scheduler's log."""
    port = config.observe.prometheus_port
    if port is None:
        return None
    endpoint = meters.enter_context(PrometheusEndpoint(config.observe.prometheus_host, port))
    sys.stderr.write(f"Prometheus: {endpoint.address}\n")
    sys.stderr.flush()
    return endpoint


def steady_wall_clock(not_before_s: float = 0.0) -> Callable[[], float]:
    """A clock in seconds since the epoch that no clock adjustment moves: the wall clock at the start plus what has passed.

    `not_before_s`: the clock of an earlier process, which this one goes on with.
    """
    wall_s, steady_s = max(time.time(), not_before_s), time.monotonic()
    return lambda: wall_s + (time.monotonic() - steady_s)


def bind_layout(config: Config) -> Layout:
    """`layout_mini_batch` with the shapes of the configuration."""
    train = config.train
    return functools.partial(
        layout_mini_batch,
        shards=config.data_shards,
        row_tokens=train.row_tokens,
        micro_batch_rows=train.micro_batch_rows,
        chunk_micro_batches=train.chunk_micro_batches,
        encoder_row_patches=train.encoder_row_patches,
        turn_credit=train.objective.credit == "turn",
    )


def check_no_payload_fields() -> None:
    """Raises `TypeError` if a record that roles send to the scheduler could carry bytes: payload must have no way in."""
    for info in msgspec.inspect.multi_type_info(typing.get_args(Request)):
        _check_type(info, type(info).__name__, set())


def _check_type(info: msgspec.inspect.Type, path: str, seen: set[type]) -> None:
    match info:
        case msgspec.inspect.StructType():
            if info.cls not in seen:
                seen.add(info.cls)
                for field in info.fields:
                    _check_type(field.type, f"{info.cls.__name__}.{field.name}", seen)
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType() | msgspec.inspect.SetType():
            _check_type(info.item_type, path, seen)
        case msgspec.inspect.TupleType():
            for item in info.item_types:
                _check_type(item, path, seen)
        case msgspec.inspect.DictType():
            _check_type(info.key_type, path, seen)
            _check_type(info.value_type, path, seen)
        case msgspec.inspect.UnionType():
            for item in info.types:
                _check_type(item, path, seen)
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType() | msgspec.inspect.StrType():
            pass
        case msgspec.inspect.BoolType() | msgspec.inspect.NoneType():
            pass
        case _:
            raise TypeError(f"{path}: a record for the scheduler has a field of {info}, which could carry a payload")
