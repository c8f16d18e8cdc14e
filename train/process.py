"""A training process: join the group, then turn chunks into updates until there is no further plan.

One update, on the main thread, in the order that every process of the group follows:

1. take chunk 0 from the loader: its rows are here, and the scheduler says that every process holds theirs; rows that several
   processes own, each of which pulled a part, are gathered first;
2. encode the mini-batch's unique images (when it has any, and they are not encoded micro-batch by micro-batch);
3. accumulate chunk by chunk, while the loader's thread brings the next one;
4. finish: one encoder backward, sums over shards, clip, update: version V becomes V + 1;
5. copy the new weights to the host when they are to be published (a thread writes them), and report the update;
6. where a checkpoint is due, copy the training state to the host too; and see whether the last one has become whole.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from knittrans_jax.config import Config
from knittrans_jax.encoding.encode_once import Residuals
from knittrans_jax.encoding.modes import ResidualOptions
from knittrans_jax.launch import messages as msg
from knittrans_jax.observe.compilations import CompilationCounter
from knittrans_jax.rollout.tasks.registry import load_task
from knittrans_jax.train.advantages import group_advantages
from knittrans_jax.train.bad_numbers import BadNumbersError, bad_figures, folder_of, save_mini_batch
from knittrans_jax.train.checkpoint import CheckpointError, Checkpoints, Cursor, Saved
from knittrans_jax.train.setup import TrainSetup, join_process_group, make_mesh, set_up_training
from knittrans_jax.train.state import TrainState
from knittrans_jax.train.step import Sums
from knittrans_jax.train.together import Together, mesh_barrier
from knittrans_jax.train.watch import heartbeat, watchdog
from knittrans_jax.trajectory import MiniBatchPlan
from knittrans_jax.transfer.control import ControlClient, ControlError, new_session
from knittrans_jax.transfer.loader import Chunk, ChunkLoader, LoaderError, LoaderOptions, split_wait
from knittrans_jax.transfer.matching import Gather
from knittrans_jax.transfer.pull import Payload, UnitClients
from knittrans_jax.transfer.relay import RelayServer
from knittrans_jax.transfer.tickets import weight_unit
from knittrans_jax.transfer.tls import make_server
from knittrans_jax.transfer.weight_channel import WeightPublisher, WeightServer
from knittrans_jax.transfer.weight_store import WeightStore
from knittrans_jax.transfer.weights import WeightsError, WeightSink, WeightWriter

RELAY_UNIT = "train0"
"""The relay's name on the bulk channel: that of its process."""
LEAVE_S = 1.0
"""A process told to end may be inside a compilation, or a collective whose other side is gone: it leaves after this long."""
KEEP_S = 120.0
"""Longest that a training process waits for process 0 to keep a mini-batch with bad numbers."""


def run_train(config: Config, run_dir: Path, index: int) -> None:
    """Training process `index`, from registration to the scheduler's word that there is no further plan.

    Raises:
        LoaderError, ControlError, WeightsError, CheckpointError: what could not be brought, said or written, and why.
        BadNumbersError: a loss or gradient is not finite, and `train.on_nonfinite` is `stop`.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    compilations = CompilationCounter()
    join_process_group(config, index)
    task = load_task(config.task, config.seed)
    setup = set_up_training(config, task, make_mesh(config))
    control_file = run_dir / "control.json"

    def connect(name: str, stopped: Callable[[], bool] = stop.is_set) -> ControlClient:
        return ControlClient(
            control_file,
            name,
            config.control.rpc_timeout_s,
            start_timeout_s=config.control.start_timeout_s,
            stopped=stopped,
        )

    with (
        contextlib.ExitStack() as stack,
        connect(f"train{index}") as control,
        connect(f"train{index}.weights") as publishing,
        _open_relay(config, index) as relay,
        _open_weight_server(config, index) as weights,
        Checkpoints(
            run_dir / "checkpoints", keep=config.checkpoint.keep, timeout_s=config.checkpoint.timeout_s
        ) as checkpoints,
    ):
        recovers = config.launch.on_child_death == "recover"
        restored = checkpoints.restore(setup.state) if config.resume or recovers else None
        state, cursor = (setup.state, Cursor(version=0, after_plan=-1)) if restored is None else restored
        hello = msg.TrainHello(
            process=index,
            processes=config.train.processes,
            session=new_session(),
            relay=None if relay is None else relay.address,
            version=cursor.version,
            after_plan=cursor.after_plan,
            weights=None if weights is None else weights[1].address,
        )
        welcome = control.call(hello, overall_s=config.train.start_timeout_s)
        assert isinstance(welcome, msg.TrainWelcome), welcome
        incarnation = welcome.incarnation
        stack.enter_context(heartbeat(lambda stopped: connect(f"train{index}.beat", stopped), index))
        if relay is not None and welcome.ticket_key is not None:
            relay.set_key(welcome.ticket_key)
        if weights is not None and welcome.ticket_key is not None:
            weights[1].set_key(welcome.ticket_key)

        def on_saved(saved: Saved) -> None:
            control.call(
                msg.CheckpointDone(
                    process=index,
                    incarnation=incarnation,
                    version=saved.cursor.version,
                    plan_id=saved.cursor.after_plan,
                    oldest=saved.oldest,
                    size_bytes=saved.size_bytes,
                    stall_s=saved.stall_s,
                )
            )

        checkpoints.on_saved = on_saved

        def on_written(version: int) -> None:
            publishing.call(msg.WeightsWritten(process=index, incarnation=incarnation, version=version))

        processes = config.train.processes
        writer: WeightSink
        if weights is None:
            writer = WeightWriter(run_dir / "weights", index, processes, on_written)
        else:
            dtype = config.weights.dtype
            writer = WeightPublisher(weights[0], incarnation, index, processes, on_written, dtype=dtype)
        options = _loader_options(config, setup, control_file, index, incarnation, relay)
        loader = ChunkLoader(dataclasses.replace(options, after_plan=cursor.after_plan))

        def end(*_: object) -> None:
            stop.set()
            loader.interrupt()
            leave = threading.Timer(LEAVE_S, os._exit, (0,))
            leave.daemon = True
            leave.start()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        setup = dataclasses.replace(setup, state=state)
        trainer = Trainer(config, setup, index, incarnation, compilations, control, writer, cursor.version)
        trainer.published = welcome.published
        try:
            trainer.publish()
            after_plan, saved = cursor.after_plan, cursor.version
            for chunk in _timed(loader, trainer):
                with watchdog(config.train.step_timeout_s):
                    trainer.take(chunk)
                if chunk.last:
                    checkpoints.check()
                    after_plan = chunk.plan.plan_id
                    if chunk.checkpoint or _checkpoint_due(config, trainer.version):
                        saved = trainer.version
                        checkpoints.save(trainer.state, Cursor(version=saved, after_plan=after_plan))
            whole = trainer.version % config.batch.mini_batches == 0
            if loader.complete and whole and saved < trainer.version and config.checkpoint.every_train_batches:
                checkpoints.save(trainer.state, Cursor(version=trainer.version, after_plan=after_plan))
            writer.close()
            checkpoints.close()
            counters = trainer.counters()
            if weights is not None:
                control.call(msg.ServeWeights(process=index, incarnation=incarnation))
                counters |= {"weight_served_bytes": weights[1].figures()[2]["served_bytes"]}
            control.call(msg.Report(role=f"train{index}", counters=counters))
        except (LoaderError, ControlError, WeightsError):
            if not stop.is_set():
                raise  # else: told to end, and the wait that this broke off is no failure
        except CheckpointError:
            if not stop.is_set():
                traceback.print_exc()
                os._exit(1)  # Orbax's threads may wait for minutes for what does not come, and the interpreter for them
        except BadNumbersError as bad:
            _keep_mini_batch(config, setup, run_dir, index, incarnation, control, trainer, bad)
            raise
        finally:
            loader.close()


def _checkpoint_due(config: Config, version: int) -> bool:
    """Checkpoints are of whole train batches: a resumed run begins one anew."""
    every = config.checkpoint.every_train_batches * config.batch.mini_batches
    return every > 0 and version % every == 0


def _open_relay(config: Config, index: int) -> contextlib.AbstractContextManager[RelayServer | None]:
    """`train.transfer: gather` with several processes: process 0 hands all payloads on."""
    if config.train.transfer != "gather" or config.train.processes == 1 or index:
        return contextlib.nullcontext()
    control = config.control
    return RelayServer(
        RELAY_UNIT,
        control.bulk_host,
        wait_s=control.pull_timeout_s * (control.pull_retries + 1),
        request_timeout_s=control.pull_timeout_s,
        tls=make_server() if control.tls else None,
    )


@contextlib.contextmanager
def _open_weight_server(config: Config, index: int) -> Iterator[tuple[WeightStore, WeightServer] | None]:
    """`weights.transfer: bulk`: every process serves its own shards."""
    if config.weights.transfer != "bulk":
        yield None
        return
    store, control = WeightStore(config.weights.keep), config.control
    with WeightServer(
        weight_unit(f"train{index}"),
        control.bulk_host,
        store,
        wait_s=control.pull_timeout_s / 2,
        request_timeout_s=control.pull_timeout_s,
        tls=make_server() if control.tls else None,
    ) as server:
        yield store, server


def _loader_options(
    config: Config,
    setup: TrainSetup,
    control_file: Path,
    index: int,
    incarnation: int,
    relay: RelayServer | None,
) -> LoaderOptions:
    control = config.control
    relayed = config.train.transfer == "gather" and index > 0
    # Who is served by the relay waits there, for as long as process 0 may take to collect a mini-batch.
    pull_timeout_s = control.pull_timeout_s * (control.pull_retries + 2 if relayed else 1)
    return LoaderOptions(
        open_scheduler=lambda stopped: ControlClient(
            control_file, f"train{index}.loader", config.control.rpc_timeout_s, stopped=stopped
        ),
        process=index,
        incarnation=incarnation,
        peer=f"train{index}",
        chunk_sharding=setup.programs.chunk_sharding,
        image_sharding=setup.programs.image_sharding,
        replicated_sharding=setup.programs.replicated,
        advantages=lambda rewards: group_advantages(rewards, config.train.objective.normalise_advantage),
        spec=setup.pack_spec,
        encoder_mode=config.train.encoder_mode,
        residuals=ResidualOptions(
            residuals=config.train.encoder_residuals,
            most_bytes=config.train.encoder_residual_bytes,
            row_bytes=setup.residual_row_bytes,
            remat=config.model.remat,
        ),
        cached_rows=setup.cached_rows,
        processor=setup.processor,
        transfer=config.train.transfer,
        mini_batches=config.batch.mini_batches,
        relay=relay,
        relay_unit=RELAY_UNIT if relayed else None,
        prefetch_chunks=config.train.prefetch_chunks,
        pull_timeout_s=pull_timeout_s,
        pull_retries=control.pull_retries,
    )


def _keep_mini_batch(
    config: Config,
    setup: TrainSetup,
    run_dir: Path,
    index: int,
    incarnation: int,
    control: ControlClient,
    trainer: Trainer,
    bad: BadNumbersError,
) -> None:
    """Keeps the mini-batch of an update with bad numbers, and the parameters before it; every process calls it.

    Nobody leaves before all is kept: the first process to end takes the run down, storage units with it.
    """
    folder = folder_of(run_dir, bad.plan.update)

    def pull(plan: MiniBatchPlan) -> Payload:
        ask = msg.NextPlan(process=index, incarnation=incarnation, after_plan=plan.plan_id - 1)
        reply = control.call(ask)
        if not isinstance(reply, msg.PlanReply) or reply.plan is None or reply.plan.plan_id != plan.plan_id:
            raise ControlError(f"the scheduler no longer knows plan {plan.plan_id}: the run was told to end")
        clients = UnitClients(
            f"train{index}", config.control.pull_timeout_s, config.control.pull_retries, lambda: False
        )
        with contextlib.closing(clients):
            clients.renew(reply.units, reply.tickets)
            return clients.pull(plan, range(len(plan.placements)), range(len(plan.images)), setup.pack_spec)

    try:
        writer = WeightWriter(folder / "weights", index, config.train.processes, lambda version: None)
        writer.write(bad.plan.update, trainer.state.params)
        writer.close()
        if index == 0:
            save_mini_batch(folder, bad, pull)
    except Exception as error:
        bad.add_note(f"its mini-batch could not be kept in {folder}: {type(error).__name__}: {error}")
        raise bad from error
    mesh_barrier(setup.programs.mesh, KEEP_S)()
    bad.add_note(
        f"its mini-batch and the parameters before it are kept in {folder}; train.on_nonfinite: skip leaves such updates out"
    )


class Trainer:
    """The state between chunks: parameters, this mini-batch's sums, and what was waited for."""

    def __init__(
        self,
        config: Config,
        setup: TrainSetup,
        process: int,
        incarnation: int,
        compilations: CompilationCounter,
        control: ControlClient,
        writer: WeightSink,
        version: int = 0,
    ) -> None:
        """`version`: of `setup.state`."""
        self.config = config
        self.programs = programs = setup.programs
        self._together = together = Together(mesh_barrier(programs.mesh, config.train.compile_timeout_s))
        self._encode_images, self._insert = together(programs.encode), together(programs.insert)
        self._encode_and_keep = together(programs.encode_and_keep)
        self._accumulate = together(programs.accumulate)
        self._accumulate_copies = together(programs.accumulate_copies)
        self._finish = together(programs.finish)
        self._gathers: dict[Gather, Gather] = {}
        self.state: TrainState = setup.state
        self.version = version
        self.published = -1
        """The newest version published before this group began: only later ones are."""
        self.waits_s: dict[str, float] = collections.defaultdict(float)
        self._process, self._incarnation = process, incarnation
        self._compilations, self._control, self._writer = compilations, control, writer
        self._cached = self.programs.empty_table(setup.cached_rows) if setup.cached_rows else None
        self._table: jax.Array | None = None
        self._images: Any = None
        self._residuals: Residuals | None = None
        self._sums: Sums | None = None
        self._pulled_bytes = self._relayed_bytes = 0
        self._gathered_bytes = 0
        self._began_s = 0.0
        self._chunks = self._chunks_dropped = 0

    def take(self, chunk: Chunk) -> None:
        """Accumulates a chunk; the last one of a mini-batch is followed by the update, its report and publication."""
        params = self.state.params
        copies = chunk.mode in ("per_micro_batch", "per_micro_batch_unique")
        if chunk.first:
            self._began_s = time.monotonic()
            self._chunks_dropped += self._chunks  # of a mini-batch that was withdrawn: as if it had never begun
            self._table = self._images = self._sums = self._residuals = None
            self._chunks = 0
        self._chunks += 1
        chunk = chunk.whole(self._gather)  # rows that several processes own: the first collective of all
        self._gathered_bytes += chunk.gathered_bytes
        if chunk.first:
            self._encode(chunk)
            table_rows = 0 if self._images is None or self._table is None else self._table.shape[0]
            self._sums = self.programs.start(params, table_rows, copies)
        self._pulled_bytes += chunk.pulled_bytes
        self._relayed_bytes += chunk.relayed_bytes
        if copies:
            self._sums = self._accumulate_copies(params, chunk.images, chunk.arrays, self._sums)
        else:
            self._sums = self._accumulate(params, self._table, chunk.arrays, self._sums)
        if chunk.last:
            self._update(chunk)

    def _gather(self, gather: Gather) -> Gather:
        if gather not in self._gathers:
            self._gathers[gather] = self._together(gather)
        return self._gathers[gather]

    def _encode(self, chunk: Chunk) -> None:
        """The table of the mini-batch whose first chunk this is, and the images that its cotangent goes back through."""
        params = self.state.params
        if chunk.mode == "per_mini_batch":
            self._images = chunk.images
            if chunk.keep_residuals:
                self._table, self._residuals = self._encode_and_keep(params, self._images)
            else:
                self._table = self._encode_images(params, self._images)
        elif chunk.mode == "frozen":
            if chunk.images is not None:
                self._cached = self._insert(self._cached, params, chunk.images, chunk.insert)
            self._table = self._cached

    def publish(self) -> None:
        """Hands the current weights to the writer, when the configuration publishes this version."""
        every = self.config.batch.mini_batches if self.config.train.publish == "train_batch" else 1
        newer = self.version > self.published
        # A version that is published already is served again: hosts may lack it, and whoever had it may be gone.
        again = self.config.weights.transfer == "bulk" and self.version == self.published
        if self.version % every == 0 and (newer or again):
            self._writer.write(self.version, self.state.params)

    def counters(self) -> dict[str, float]:
        """For the process's last report."""
        return {
            "compilations": self._compilations.count,
            "compile_s": self._compilations.seconds,
            "weight_stall_s": self._writer.stall_s,
            "weight_copy_s": self._writer.copy_s,
            "weight_bytes": self._writer.written_bytes,
            "gathered_bytes": self._gathered_bytes,
            "chunks_dropped": self._chunks_dropped,
        }

    def _update(self, chunk: Chunk) -> None:
        plan = chunk.plan
        self.state, figures = self._finish(
            self.state, self._images, self._sums, np.float32(plan.sampled_tokens), self._residuals
        )
        self._table = self._images = self._sums = self._residuals = None
        self._chunks = 0
        metrics = {name: float(value) for name, value in jax.device_get(figures).items()}
        if self.config.train.on_nonfinite == "stop" and bad_figures(metrics):
            raise BadNumbersError(plan, metrics)  # the update was left out, so the parameters are those before it
        self.version = plan.update + 1
        pace_s = self.config.pace.update_s - (time.monotonic() - self._began_s)
        if pace_s > 0:
            time.sleep(pace_s)
        metrics |= self._plan_metrics(chunk) | {"update_s": time.monotonic() - self._began_s}
        done = msg.UpdateDone(
            process=self._process,
            incarnation=self._incarnation,
            plan_id=plan.plan_id,
            version=self.version,
            metrics=metrics,
            waits_s={"data": self.waits_s["data"], "groups": self.waits_s["groups"]},
            pulled_bytes=self._pulled_bytes,
            relayed_bytes=self._relayed_bytes,
            compilations=self._compilations.count,
            compiled=self._compilations.take_untold(),
        )
        self._control.call(done)
        self.publish()
        self.waits_s.clear()
        self._pulled_bytes = self._relayed_bytes = 0

    def _plan_metrics(self, chunk: Chunk) -> dict[str, float]:
        plan = chunk.plan
        rewards = [reward for group in plan.groups for reward in group.rewards]
        return {
            "reward_mean": float(np.mean(rewards)),
            "micro_batches": float(plan.chunks * plan.chunk_micro_batches),
            "tokens": float(sum(placement.length for placement in plan.placements)),
            "images_unique": float(len(plan.images)),
            "images_referenced": float(sum(len(placement.images) for placement in plan.placements)),
            **chunk.encoder_figures,
        }


def _timed(loader: ChunkLoader, trainer: Trainer) -> Any:
    """The loader's chunks, noting in `trainer.waits_s` what each was waited for."""
    while True:
        began_s = time.monotonic()
        try:
            chunk = next(loader)
        except StopIteration:
            return
        groups_s, data_s = split_wait(began_s, time.monotonic(), chunk.plan_arrived_s)
        trainer.waits_s["groups"] += groups_s
        trainer.waits_s["data"] += data_s
        yield chunk


__all__ = ["Trainer", "run_train"]
