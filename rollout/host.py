"""A rollout host's engine process: leases in, finished groups into the storage unit, then word to the scheduler.

One turn of the loop:

1. take the scheduler's answer, if it is there: leases, evaluations, the newest published version, a ticket;
2. load the version that the engine wants now (`knittrans_jax.rollout.versions`), whole, once it is here;
3. one engine step;
4. hand finished groups to the putter's thread; what the storage unit holds goes into the next report;
5. report and ask again: at once when there is news or room for work, at the latest after `SYNC_S`.

Programs are compiled before the host asks for work, on weights of zeros. On SIGTERM the host leaves politely: it takes no more
work, gives back what it has not begun, finishes the rest for at most `rollout.drain_s`, stores and reports what is done, and
says that it leaves, upon which the rest is leased elsewhere at once. A second SIGTERM ends it as it is.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from knittrans_jax.config import Config
from knittrans_jax.launch.messages import (
    Ack,
    EngineOrders,
    EngineSync,
    EvalResult,
    GroupDone,
    GroupFailure,
    Report,
)
from knittrans_jax.models import Params
from knittrans_jax.models.run_model import run_model
from knittrans_jax.observe.compilations import CompilationCounter
from knittrans_jax.rollout.engine import Engine
from knittrans_jax.rollout.putter import GroupPutter
from knittrans_jax.rollout.runs import FinishedGroup
from knittrans_jax.rollout.tasks.registry import load_task
from knittrans_jax.rollout.weight_fetcher import WeightFetcher
from knittrans_jax.transfer.control import ControlClient, ControlError, new_session
from knittrans_jax.transfer.intake import IntakeSpec, check_group
from knittrans_jax.transfer.tls import make_server
from knittrans_jax.transfer.weights import WeightReader, WeightsError, WeightSource, restore_tree

SYNC_S = 0.05
"""Longest pause between two reports."""
NEWS_S = 0.005
"""Pause between two reports while there is news or room for work."""
COUNTERS_S = 1.0
"""Pause between two reports that carry counters."""
REST_S = 0.005
"""How long an engine without work waits before it looks again."""
LAST_REPORT_S = 2.0
LEAVE_SILENCE_S = 1.5
"""A host that leaves does not wait longer for a scheduler that says nothing."""


def run_rollout(config: Config, run_dir: Path, index: int, stop: threading.Event | None = None) -> None:
    """The engine process of rollout host `host{index}`: samples until the scheduler says stop, or SIGTERM or SIGINT comes.

    Args:
        config: the run's configuration.
        run_dir: holds `control.json` and `weights/`.
        index: the rollout host's number.
        stop: set it to end; without one, signals of this process do.

    Raises:
        ControlError: the scheduler is gone or refuses this host.
        WireError: finished groups cannot be stored.
        WeightsError: a published version cannot be read.
    """
    hurry = threading.Event()
    if stop is None:
        stop = told = threading.Event()

        def on_signal(*_: object) -> None:
            (hurry if told.is_set() else told).set()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
    if config.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    compilations = CompilationCounter()
    name = f"host{index}"
    task = load_task(config.task, config.seed)
    model, template = run_model(config.model, task.vocabulary)
    engine = Engine(model, task, config.rollout, config.seed, unit=name)
    engine.warm_up(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), template))
    if stop.is_set():
        return
    vision = model.config.vision
    spec = IntakeSpec(
        patch_size=vision.patch_size if vision else 1,
        merge_size=vision.merge_size if vision else 1,
        image_token_id=task.vocabulary.image,
    )
    putter = GroupPutter(
        name,
        config.control.pull_timeout_s,
        config.control.pull_retries,
        check=lambda group: check_group(group.meta, group.payload, spec),
    )
    try:
        with (
            ControlClient(
                run_dir / "control.json",
                f"rollout-{name}",
                config.control.rpc_timeout_s,
                start_timeout_s=config.control.start_timeout_s,
                stopped=stop.is_set,
            ) as control,
            _open_weights(config, run_dir, name, template) as weights,
        ):
            host = RolloutHost(config, name, engine, template, weights, putter, control, compilations)
            try:
                host.run(stop)
                if stop.is_set():
                    host.leave(config.rollout.drain_s, hurry.is_set)
            except ControlError:
                if not stop.is_set():
                    raise
    finally:
        putter.close()
        engine.close()


def _open_weights(
    config: Config, run_dir: Path, name: str, template: Params
) -> contextlib.AbstractContextManager[WeightSource]:
    """As `weights.transfer` says."""
    if config.weights.transfer == "directory":
        return contextlib.nullcontext(WeightReader(run_dir / "weights"))
    control = config.control
    # Published floats may be wider than the model's.
    most_bytes = sum(8 * int(np.prod(leaf.shape)) + 128 for leaf in jax.tree.leaves(template)) * 2
    return WeightFetcher(
        name,
        lambda stopped: ControlClient(
            run_dir / "control.json",
            f"rollout-{name}.weights",
            control.rpc_timeout_s,
            start_timeout_s=control.start_timeout_s,
            stopped=stopped,
        ),
        host=control.bulk_host,
        most_bytes=most_bytes,
        timeout_s=control.pull_timeout_s,
        attempts=control.pull_retries + 1,
        keep=config.weights.keep,
        tls=make_server() if control.tls else None,
    )


class RolloutHost:
    """The loop of the module's opening; one thread."""

    def __init__(
        self,
        config: Config,
        name: str,
        engine: Engine,
        template: Params,
        weights: WeightSource,
        putter: GroupPutter,
        control: ControlClient,
        compilations: CompilationCounter,
    ) -> None:
        """`template`: the parameters' shapes; `name`: of the host, and of the storage unit beside it."""
        self._config, self._name, self._engine, self._template = config, name, engine, template
        self._weights, self._putter, self._control, self._compilations = weights, putter, control, compilations
        self._members = config.batch.trajectories_per_group
        self._started: list[int] = []
        self._failed: list[GroupFailure] = []
        self._evals: list[EvalResult] = []
        self._evals_failed: list[int] = []
        self._done: list[GroupDone] = []
        self._unstored: list[FinishedGroup] = []
        """Finished, but the putter's queue was full; nothing more is sampled until they are in."""
        self._reported_compilations = -1
        self._synced_s = self._counted_s = -1.0
        self._load_s = 0.0
        self._session = new_session()
        self._leaving = self._left = False
        self._dropped_tokens = 0

    def run(self, stop: threading.Event) -> None:
        """Until the scheduler says stop or `stop` is set."""
        worked = True
        while not stop.is_set():
            orders = self._exchange(0.0 if worked else REST_S)
            if orders is not None and orders.stop:
                self._report(LAST_REPORT_S)
                return
            if orders is not None:
                self._follow(orders)
            self._load_wanted()
            began_s = time.monotonic()
            worked = not self._unstored and self._engine.step()
            self._collect()
            pace_s = self._config.pace.sampler_step_s - (time.monotonic() - began_s)
            if worked and pace_s > 0:
                time.sleep(pace_s)

    def leave(self, drain_s: float, hurry: Callable[[], bool]) -> None:
        """Leaves politely: see the module's opening. Ends at once when the scheduler says stop, or `hurry()` becomes true."""
        self._leaving = True
        self._engine.give_back_queued()
        heard_s = time.monotonic()
        deadline_s = heard_s + drain_s
        while not hurry():
            orders = self._exchange(REST_S)
            if orders is not None:
                heard_s = time.monotonic()
                if orders.stop:
                    return
                if orders.ticket is not None and orders.unit_address is not None:
                    self._putter.open(orders.unit_address, orders.ticket)
            if time.monotonic() - heard_s > LEAVE_SILENCE_S:
                return  # nobody is there to leave from
            working = self._engine.has_work and time.monotonic() < deadline_s
            if working and not self._unstored:
                self._engine.step()
            self._collect()
            if not working and not self._unstored and self._putter.idle and not self._told():
                break
            if time.monotonic() >= deadline_s + self._config.control.pull_timeout_s:
                break  # the unit takes nothing
        self._dropped_tokens = self._engine.tokens_in_flight
        self._left = True
        with contextlib.suppress(ControlError):
            while self._control.outstanding and self._control.poll(LAST_REPORT_S) is None:
                pass
            self._control.call(self._sync(count=True), timeout_s=LAST_REPORT_S, overall_s=LAST_REPORT_S)
        self._report(LAST_REPORT_S)

    def counters(self) -> dict[str, float]:
        """Everything that the host counts."""
        return {
            **self._engine.counters,
            "compilations": float(self._compilations.count),
            "compile_s": self._compilations.seconds,
            "weights_load_s": self._load_s,
            "put_bytes": float(self._putter.put_bytes),
            "put_s": self._putter.put_s,
            "intake_refused": float(self._putter.refused),
            "tokens_dropped": float(self._dropped_tokens),
            **self._control.counters.as_dict(),
            **self._weights.counters(),
        }

    # --- the scheduler ---------------------------------------------------------------------------------------------------

    def _exchange(self, rest_s: float) -> EngineOrders | None:
        """Takes the answer to the last report, if it comes within `rest_s`, or reports anew when it is time to."""
        if self._control.outstanding:
            reply = self._control.poll(rest_s)
            if reply is None:
                return None
            if not isinstance(reply, EngineOrders):
                raise ControlError(f"{self._name}: expected EngineOrders, got {type(reply).__name__}")
            return reply
        now_s = time.monotonic()
        if self._engine.version >= 0 and self._compilations.count != self._reported_compilations:
            self._report(self._config.control.rpc_timeout_s)
        news = self._told() or self._free_groups() > 0
        if now_s - self._synced_s >= (NEWS_S if news else SYNC_S):
            self._post(now_s)
        else:
            time.sleep(rest_s)
        return None

    def _told(self) -> bool:
        """Whether there is something to report."""
        return any((self._done, self._started, self._failed, self._evals, self._evals_failed))

    def _sync(self, count: bool) -> EngineSync:
        return EngineSync(
            host=self._name,
            unit=self._name,
            version=self._engine.version,
            free_groups=self._free_groups(),
            started=tuple(self._started),
            done=tuple(self._done),
            failed=tuple(self._failed),
            evals=tuple(self._evals),
            evals_failed=tuple(self._evals_failed),
            counters=self.counters() if count else {},
            ticket_wanted=self._putter.ticket_wanted,
            session=self._session,
            leaving=self._leaving,
            left=self._left,
        )

    def _post(self, now_s: float) -> None:
        count = now_s - self._counted_s >= COUNTERS_S
        self._control.post(self._sync(count))
        self._started, self._done, self._failed, self._evals, self._evals_failed = [], [], [], [], []
        self._synced_s = now_s
        if count:
            self._counted_s = now_s

    def _report(self, timeout_s: float) -> None:
        """Hands in the counters: at the end, and whenever something was compiled."""
        self._reported_compilations = self._compilations.count
        report = Report(
            role=f"rollout-{self._name}", counters=self.counters(), compiled=self._compilations.take_untold()
        )
        with contextlib.suppress(ControlError):  # at the end the scheduler may be gone; before, the next sync will tell
            reply = self._control.call(report, timeout_s=timeout_s)
            if not isinstance(reply, Ack):
                raise TypeError(f"{self._name}: expected Ack, got {type(reply).__name__}")

    def _free_groups(self) -> int:
        """Room for new groups; none before there are weights, while finished ones cannot be stored, or when the host leaves."""
        if self._engine.version < 0 or self._unstored or self._leaving:
            return 0
        return self._engine.free_groups(self._members)

    def _follow(self, orders: EngineOrders) -> None:
        self._engine.announce(orders.published)
        if orders.published >= 0:
            self._weights.announce(orders.published)
        for lease in orders.leases:
            self._engine.submit(lease, self._members)
        for evaluation in orders.evals:
            self._engine.submit_eval(evaluation)
        if orders.ticket is not None and orders.unit_address is not None:
            self._putter.open(orders.unit_address, orders.ticket)

    # --- weights and results -------------------------------------------------------------------------------------------------

    def _load_wanted(self) -> None:
        wanted = self._engine.wanted_version
        if wanted is None or not self._weights.ready(wanted):
            return
        began_s = time.monotonic()
        try:
            arrays = self._weights.read(wanted)
        except WeightsError:
            # An evaluation may ask for a version that is deleted by now: the scheduler leases it again at a newer one.
            dropped = self._engine.drop_evals(wanted)
            self._evals_failed += dropped
            if dropped:
                return
            newest = max(self._weights.versions(), default=-1)
            if newest <= wanted:
                raise
            self._engine.announce(newest)  # this one was overtaken while it was read
            return
        self._engine.load_version(wanted, restore_tree(self._template, arrays, cast=True))
        self._load_s += time.monotonic() - began_s

    def _collect(self) -> None:
        results = self._engine.take_results()
        self._started += results.started
        self._failed += results.failed
        self._evals += results.evals
        self._unstored += results.finished
        while self._unstored and self._putter.offer(self._unstored[0]):
            self._unstored.pop(0)
        done, refused = self._putter.take()
        self._done += done
        self._failed += refused
