"""The training group as the scheduler sees it: registration, goes, updates, weights. Pure; the clock is an argument.

What it guarantees: an incarnation begins when all processes have registered; a chunk gets its go when all processes hold it;
an update counts when all processes report it, and a version when all have written it; each counts once, however often it is
reported; whoever is missing can be named; processes that begin at different versions form no group.
"""

from __future__ import annotations

import dataclasses

from knittrans_jax.launch.messages import CheckpointDone, TrainHello, UpdateDone
from knittrans_jax.trajectory import MiniBatchPlan


@dataclasses.dataclass
class ChunkState:
    """Who holds a chunk, and since when its go is awaited."""

    since_s: float
    holders: set[int] = dataclasses.field(default_factory=set)


class TrainGroup:
    """See the module's opening."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.incarnation = -1
        self.version, self.after_plan = 0, -1
        """Where it begins: what its processes brought from a checkpoint."""
        self.sessions: dict[int, int] = {}
        self.relays: dict[str, str] = {}
        """Addresses of processes that hand payloads on, by the name of their unit."""
        self.weights: dict[int, str] = {}
        """Addresses of the processes' weight servers."""
        self.chunks: dict[tuple[int, int], ChunkState] = {}
        self.updates: dict[int, dict[int, UpdateDone]] = {}
        self.written: dict[int, set[int]] = {}
        self.checkpoints: dict[int, dict[int, CheckpointDone]] = {}
        self.goes = 0

    # --- registration -----------------------------------------------------------------------------------------------------

    def hello(self, request: TrainHello) -> str | None:
        """Registers a process -> why it cannot, or None."""
        if request.processes != self.processes or not 0 <= request.process < self.processes:
            return (
                f"process {request.process} of {request.processes}: this run has train.processes = {self.processes}; "
                f"start every role with the same configuration"
            )
        if self.incarnation >= 0 and self.sessions[request.process] != request.session:
            return (
                f"train process {request.process}: incarnation {self.incarnation} is under way with another process of this "
                "number; a training group does not rejoin (launch.on_child_death: recover), start the run again"
            )
        if self.sessions and (request.version, request.after_plan) != (self.version, self.after_plan):
            return (
                f"train process {request.process} begins at version {request.version} after plan {request.after_plan}, others "
                f"at version {self.version} after plan {self.after_plan}: all must restore the same checkpoint"
            )
        self.version, self.after_plan = request.version, request.after_plan
        self.sessions[request.process] = request.session
        if request.relay is not None:
            self.relays[f"train{request.process}"] = request.relay
        if request.weights is not None:
            self.weights[request.process] = request.weights
        return None

    def is_another(self, request: TrainHello) -> bool:
        """Whether the process that registers is not the one that did before: its group has died."""
        return self.sessions.get(request.process, request.session) != request.session

    @property
    def complete(self) -> bool:
        """All processes have registered."""
        return len(self.sessions) == self.processes

    # --- chunks -----------------------------------------------------------------------------------------------------------

    def holds(self, process: int, plan_id: int, chunk: int, now_s: float) -> None:
        """A process holds its rows of a chunk."""
        state = self.chunks.setdefault((plan_id, chunk), ChunkState(now_s))
        state.holders.add(process)
        if len(state.holders) == self.processes:
            self.goes += 1

    def may_go(self, plan_id: int, chunk: int) -> bool:
        """Every process holds the chunk."""
        state = self.chunks.get((plan_id, chunk))
        return state is not None and len(state.holders) == self.processes

    def all_held(self, plan: MiniBatchPlan) -> bool:
        """Every process holds, and hence every process will launch, all chunks of a plan."""
        return all(self.may_go(plan.plan_id, chunk) for chunk in range(plan.chunks))

    def forget(self, plan_id: int) -> None:
        """A plan was withdrawn: chunks that have their go keep it, nobody waits for the others."""
        self.chunks = {
            key: state
            for key, state in self.chunks.items()
            if key[0] != plan_id or len(state.holders) == self.processes
        }

    def overdue(self, now_s: float, timeout_s: float) -> str | None:
        """The first chunk whose go is awaited for `timeout_s`, and who is missing; None: none."""
        for (plan_id, chunk), state in self.chunks.items():
            if len(state.holders) < self.processes and now_s - state.since_s >= timeout_s:
                missing = sorted(set(range(self.processes)) - state.holders)
                return f"chunk {chunk} of plan {plan_id}: train processes {missing} do not hold their rows"
        return None

    # --- updates and weights ------------------------------------------------------------------------------------------------

    def update_done(self, report: UpdateDone) -> bool:
        """A process applied an update -> False when it had said so before."""
        reports = self.updates.setdefault(report.plan_id, {})
        if report.process in reports:
            return False
        reports[report.process] = report
        return True

    def take_update(self, plan_id: int) -> list[UpdateDone] | None:
        """All reports of an update, by process, once every process has reported; then the plan is forgotten."""
        reports = self.updates.get(plan_id, {})
        if len(reports) < self.processes:
            return None
        del self.updates[plan_id]
        self.chunks = {key: state for key, state in self.chunks.items() if key[0] > plan_id}
        return [reports[process] for process in range(self.processes)]

    def checkpoint_done(self, report: CheckpointDone) -> list[CheckpointDone] | None:
        """A process reports a whole checkpoint -> all reports, by process, once every process has reported it."""
        reports = self.checkpoints.setdefault(report.version, {})
        reports[report.process] = report
        if len(reports) < self.processes:
            return None
        del self.checkpoints[report.version]
        return [reports[process] for process in range(self.processes)]

    def weights_written(self, process: int, version: int) -> None:
        """A process wrote its shards of a version."""
        self.written.setdefault(version, set()).add(process)

    def newest_whole(self, at_most: int) -> int | None:
        """The newest version that all processes have written and that is not above `at_most`; None: none."""
        whole = [v for v, writers in self.written.items() if v <= at_most and len(writers) == self.processes]
        return max(whole, default=None)

    def forget_written(self, version: int) -> None:
        """Versions up to this one are published or superseded."""
        self.written = {other: writers for other, writers in self.written.items() if other > version}
