"""Checkpoints of training: parameters, optimizer state and version, with the cursor that says where in the log they belong.

What it guarantees:

* `save` returns once the state is copied to the host; writing goes on behind the updates (Orbax's asynchronous checkpointer);
* a checkpoint is there whole or not at all (written aside, then renamed), and the newest `keep` are kept;
* a save that failed is an error at the next `check`, which the trainer calls at every update;
* `restore` takes the newest checkpoint that is whole, on whatever mesh and however many processes. Process 0 holds every file
  against the checksums that it wrote once the checkpoint was whole, and the others hear from it; a checkpoint that is damaged
  is named, moved aside to `refused-V` (never deleted), and the one before is taken.

Everything else that a resumed run needs is in the event log. Random state is in neither: every draw is a function of the
configuration's seed and of ids in the log.

All processes of the training group call every method, in the same order; the folder is one that all of them see. The processes
meet at the coordinator's barriers, which have deadlines, and never in a collective.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import jax
import msgspec
import orbax.checkpoint as ocp
import xxhash
from jax._src import distributed  # the coordinator's client, for its store with a deadline; JAX has no public one

from knittrans_jax.observe.summary import write_atomically
from knittrans_jax.train.state import TrainState, with_moments_as, with_other_moments

UNSEALED = "its run ended before it was complete"
STATE, CURSOR, SUMS = "state", "cursor", "checksums.json"
READ_BYTES = 4 * 2**20
_asked = itertools.count()


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or none that can be read; the message says which, where and why."""


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """Where in the run's log a checkpoint belongs: `version`, which the update of plan `after_plan` led to."""

    version: int
    after_plan: int


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is whole. `oldest`: the oldest version kept; `stall_s`: what it took from the main thread."""

    cursor: Cursor
    oldest: int
    size_bytes: int
    stall_s: float


class Checkpoints:
    """See the module's opening."""

    def __init__(
        self, directory: Path, *, keep: int, timeout_s: float, on_saved: Callable[[Saved], None] = lambda saved: None
    ) -> None:
        """Opens the folder; makes it if need be.

        Args:
            directory: holds a folder per version.
            keep: checkpoints that are kept, at least 2: the one before stays until the newest is sealed.
            timeout_s: deadline of writing one, and of the processes' waits for each other.
            on_saved: called from `check` and `close` when a checkpoint has become whole.

        Raises:
            CheckpointError: the folder cannot be made or read.
        """
        if keep < 2:
            raise ValueError(f"checkpoints: keep must be at least 2 (value {keep})")
        self.on_saved = on_saved
        self._directory, self._keep, self._timeout_s = directory.absolute(), keep, timeout_s
        self._pending: tuple[Cursor, float] | None = None
        self._sums: concurrent.futures.Future[int] | None = None
        self._summing = concurrent.futures.ThreadPoolExecutor(1, "checksums")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._manager = self._open()
        except OSError as error:
            raise CheckpointError(f"checkpoints in {directory}: {error.strerror or error}") from error

    def restore(self, state: TrainState) -> tuple[TrainState, Cursor] | None:
        """The newest checkpoint that can be read; None: there is none.

        Args:
            state: of the shapes, dtypes and shardings that are wanted; its values are not looked at.

        Raises:
            CheckpointError: there are checkpoints, and none is whole; or one is of another model.
        """
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        refused: list[str] = []
        for version in sorted(self._manager.all_steps(), reverse=True):
            damage = self._from_first(lambda v=version: _damage(self._directory / str(v)) or "")
            if damage:
                refused.append(f"{self._directory / str(version)}: {damage}")
                self._refuse(version, refused[-1])
                continue
            try:
                return self._read(version, wanted)
            except Exception as error:
                raise CheckpointError(
                    f"{self._directory / str(version)} is whole, but does not fit this run: {type(error).__name__}: "
                    f"{_first_line(error)}; is model, train.optimizer or train.encoder_mode another one?"
                ) from error
        if any(UNSEALED not in reason for reason in refused):
            raise CheckpointError("no checkpoint can be read:\n" + "\n".join(refused))
        return None

    def save(self, state: TrainState, cursor: Cursor) -> None:
        """Begins to save; a save under way is waited for first.

        Raises:
            CheckpointError: this save or the one before failed.
        """
        began_s = time.monotonic()
        self._finish()
        try:
            self._manager.save(
                cursor.version,
                args=ocp.args.Composite(
                    **{STATE: ocp.args.PyTreeSave(state), CURSOR: ocp.args.JsonSave(msgspec.to_builtins(cursor))}
                ),
            )
        except Exception as error:
            raise self._failed(cursor.version, error) from error
        self._pending = cursor, time.monotonic() - began_s

    def check(self) -> None:
        """Raises `CheckpointError` when the save under way has failed; tells of it once it is whole."""
        if self._pending is None:
            return
        cursor, stall_s = self._pending
        try:
            self._manager.check_for_errors()
        except Exception as error:
            raise self._failed(cursor.version, error) from error
        if self._manager.is_saving_in_progress():
            return
        if self._sums is None:
            self._sums = self._summing.submit(self._seal, cursor.version)
        if not self._sums.done():
            return
        try:
            size_bytes = self._sums.result()
        except OSError as error:
            raise self._failed(cursor.version, error) from error
        self._pending = self._sums = None
        kept = self._manager.all_steps()
        self.on_saved(Saved(cursor=cursor, oldest=min(kept), size_bytes=size_bytes, stall_s=stall_s))

    def close(self) -> None:
        """Waits for the save under way, within its deadline, and tells of it. Raises like `check`."""
        try:
            self._finish()
        finally:
            self._summing.shutdown()
            self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._summing.shutdown(wait=False, cancel_futures=True)

    def _read(self, version: int, wanted: TrainState) -> tuple[TrainState, Cursor]:
        """Reads a checkpoint in the form that is wanted, or else in that of a mesh that keeps Adam's moments otherwise."""

        def read(form: TrainState) -> tuple[TrainState, Cursor]:
            state = ocp.args.PyTreeRestore(item=form, restore_args=ocp.checkpoint_utils.construct_restore_args(form))
            found = self._manager.restore(
                version, args=ocp.args.Composite(**{STATE: state, CURSOR: ocp.args.JsonRestore()})
            )
            return found[STATE], msgspec.convert(found[CURSOR], Cursor)

        try:
            return read(wanted)
        except Exception as error:
            other = with_other_moments(wanted)
            if other is None:
                raise
            try:
                state, cursor = read(other)
            except Exception:
                raise error from None  # the first one says what is wrong
            return with_moments_as(state, wanted), cursor

    def _open(self) -> ocp.CheckpointManager:
        timeout_s = max(1, int(self._timeout_s))
        # Named processes meet at the coordinator's barrier; otherwise Orbax would run a collective of its own.
        together = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes=set(range(jax.process_count())), barrier_sync_key_prefix="checkpoint"
        )
        # What all processes have alike is written by one. Sharing it out would compile a program for each array's slices.
        arrays = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, ocp.type_handlers.ArrayHandler(use_replica_parallel=False))
        )
        return ocp.CheckpointManager(
            self._directory,
            item_handlers={
                STATE: ocp.PyTreeCheckpointHandler(multiprocessing_options=together, type_handler_registry=arrays),
                CURSOR: ocp.JsonCheckpointHandler(multiprocessing_options=together),
            },
            options=ocp.CheckpointManagerOptions(
                max_to_keep=self._keep,
                create=False,
                enable_async_checkpointing=True,
                async_options=ocp.options.AsyncOptions(timeout_secs=timeout_s),
                multiprocessing_options=together,
            ),
        )

    def _finish(self) -> None:
        if self._pending is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed(self._pending[0].version, error) from error
        self.check()
        if self._sums is not None:
            concurrent.futures.wait([self._sums], self._timeout_s)
            self.check()

    def _seal(self, version: int) -> int:
        """Process 0 writes the checksums of a checkpoint that is whole -> its size in bytes, 0 elsewhere."""
        if jax.process_index():
            return 0
        folder = self._directory / str(version)
        sums = _checksums(folder)
        write_atomically(folder / SUMS, msgspec.json.encode(sums))
        return sum(size_bytes for size_bytes, _ in sums.values())

    def _from_first(self, find: Callable[[], str]) -> str:
        """What process 0 finds, on every process."""
        client = distributed.global_state.client
        if client is None:
            return find()
        key = f"knittrans/checkpoint/{next(_asked)}"
        if jax.process_index() == 0:
            client.key_value_set(key, find())
        return client.blocking_key_value_get(key, int(self._timeout_s * 1000))

    def _refuse(self, version: int, reason: str) -> None:
        """Moves a checkpoint aside, so that a later one of its version has a place."""
        sys.stderr.write(f"checkpoint refused: {reason}\n")
        sys.stderr.flush()
        self._manager.close()
        if jax.process_index() == 0:
            place, number = self._directory / f"refused-{version}", 1
            while place.exists():
                place, number = self._directory / f"refused-{version}.{number}", number + 1
            (self._directory / str(version)).rename(place)
        self._manager = self._open()  # all processes meet in it

    def _failed(self, version: int, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"checkpoint of version {version} in {self._directory} could not be written: {type(error).__name__}: "
            f"{_first_line(error)}; training state is safe in the checkpoints before it: free the disk, then resume"
        )


def _checksums(folder: Path) -> dict[str, tuple[int, str]]:
    """(size in bytes, xxh3) of every file below a folder, by its path there."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS):
        digest, size_bytes = xxhash.xxh3_128(), 0
        with path.open("rb") as file:
            while piece := file.read(READ_BYTES):
                digest.update(piece)
                size_bytes += len(piece)
        found[path.relative_to(folder).as_posix()] = size_bytes, digest.hexdigest()
    return found


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files; None: nothing."""
    try:
        wanted = msgspec.json.decode((folder / SUMS).read_bytes(), type=dict[str, tuple[int, str]])
        found = _checksums(folder)
    except FileNotFoundError:
        return f"has no {SUMS}: {UNSEALED}"
    except (OSError, msgspec.MsgspecError) as error:
        return f"cannot be read: {_first_line(error)}"
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found:
            return f"lacks {name}"
        if name not in wanted:
            return f"has a file that does not belong to it, {name}"
        if found[name][0] != wanted[name][0]:
            return f"{name} has {found[name][0]} bytes, and had {wanted[name][0]}"
        if found[name][1] != wanted[name][1]:
            return f"{name} is not what was written: its checksum differs"
    return None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "(no message)"


__all__ = ["CheckpointError", "Checkpoints", "Cursor", "Saved"]
