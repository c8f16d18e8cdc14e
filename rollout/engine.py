"""The sampling engine: groups and evaluations in, finished trajectories out; usable alone, without scheduler or network.

    engine = Engine(model, task, config.rollout, seed=0)
    engine.load_version(0, params)
    results = engine.generate([Lease(group_id=0, prompt_id="train-000000", least_version=0)], trajectories=16)

What it guarantees:

* a group's prompt is encoded and prefilled once, and its cache is copied to the members;
* every sampled token carries the version that sampled it and the sampler's own log-prob;
* which version is held when, and what may begin: `knittrans_jax.rollout.versions`;
* an episode that raises, or whose reward is not finite, is started again `episode_retries` times; then its group is reported
  as failed and its slots are free. Nothing that a task does ends the engine;
* an episode that waits for a tool holds no slot (but for more than `tool_waits` at once), and goes on as if it had never left:
  its tokens are prefilled again when it returns, before new work begins;
* after `warm_up`, or the first `load_version`, nothing compiles.

One thread, besides the tools' own. A step: take what tools gave; begin work in free slots; launch prefill for turns that wait
and a decode step for answers under way, on different slots; wait for both; hand over the answers that are over to their
episodes.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from knittrans_jax.config import RolloutConfig
from knittrans_jax.launch.messages import EvalLease, GroupFailure, Lease
from knittrans_jax.models import Model
from knittrans_jax.rollout.device import Device, EngineError, FanOut, sampler_shapes
from knittrans_jax.rollout.runs import EvalRun, FinishedMember, GroupRun, Member, Results, assemble_group
from knittrans_jax.rollout.sampler import sampler_programs, trajectory_key
from knittrans_jax.rollout.slots import SlotTable
from knittrans_jax.rollout.tasks.base import EmulatedToolCall, Outcome, Task, ToolCall
from knittrans_jax.rollout.tools import ToolResult, ToolRunner
from knittrans_jax.rollout.turns import EncodedTurn, TurnEncoder
from knittrans_jax.rollout.versions import Decision, Flight, decide
from knittrans_jax.rollout.waits import ToolWaits

PREFILL_PATIENCE_STEPS = 2
"""Steps that a turn waits for others to fill its prefill call, while decoding goes on."""
TOOL_REST_S = 0.001
"""How long `finish` rests when there is nothing to do but to wait for tools."""


class EngineBusy(EngineError):  # noqa: N818 - says what it is
    """A version cannot be loaded now; `Engine.wanted_version` says when."""


class Engine:
    """See the module's opening."""

    def __init__(
        self,
        model: Model,
        task: Task,
        rollout: RolloutConfig,
        seed: int,
        *,
        unit: str = "",
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocates the cache; nothing is compiled before the first `load_version`.

        Args:
            model: the structure; its weights come with `load_version`.
            task: prompts, episodes and the ids that may be sampled.
            rollout: slots, lengths, temperature and policies.
            seed: of all draws.
            unit: the storage unit that will hold the groups; goes into their descriptions.
            clock: wall clock of the trajectories' times, seconds.
            monotonic: clock of durations, seconds.
        """
        self.counters: dict[str, float] = collections.defaultdict(float)
        self._task, self._config, self._seed, self._unit = task, rollout, seed, unit
        self._clock, self._monotonic = clock, monotonic
        shapes = sampler_shapes(rollout, task.limits, model.config)
        programs = sampler_programs(model, shapes, tuple(task.sampled_ids), rollout.temperature)
        self._device = Device(programs, self.counters)
        self._rows, self._width = shapes.prefill_rows, shapes.prefill_tokens
        self._slots = SlotTable(rollout.slots, rollout.cache_tokens, task.vocabulary.end, rollout.max_answer_tokens)
        self._turns = TurnEncoder(task.vocabulary, task.limits, model.config.vision)
        self._draws_4xS = np.zeros((4, rollout.slots), np.int32)
        self._members: dict[int, Member] = {}
        """By slot."""
        self._followers: dict[int, list[int]] = {}
        """By leading slot, until its first turn is prefilled."""
        self._groups: collections.deque[GroupRun] = collections.deque()
        """Not begun."""
        self._running: dict[int, GroupRun] = {}
        self._evals: collections.deque[EvalLease] = collections.deque()
        """Not active."""
        self._active: list[EvalRun] = []
        self._tools = ToolRunner(rollout.tool_timeout_s, monotonic)
        self._waits = ToolWaits(self._tools, self._slots, task.limits.tool_calls, rollout.tool_waits, self.counters)
        self._version: int | None = None
        self._published = -1
        self._newer_since_s: float | None = None
        self._paused = False
        self._waited_steps = 0
        self._results = Results()

    # --- the contract ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version held; -1 before the first."""
        return -1 if self._version is None else self._version

    @property
    def wanted_version(self) -> int | None:
        """The version to load now, or None: nothing newer, or not now."""
        return self._decide().load

    def warm_up(self, params: Any) -> None:
        """Compiles every program, on weights of which only the shapes matter; else the first `load_version` does."""
        self._device.warm_up(params)

    def announce(self, published: int) -> None:
        """A version is there to be loaded; `wanted_version` says when."""
        self._published = max(self._published, published)
        if self._published > self.version and self._newer_since_s is None:
            self._newer_since_s = self._monotonic()

    def load_version(self, version: int, params: Any) -> None:
        """Takes new weights, between two steps; encoded pictures are forgotten.

        Args:
            version: `V` of the weights.
            params: as `build_model` returns them; host or device arrays.

        Raises:
            EngineBusy: an evaluation holds another version, groups in flight need a newer one, or (`in_flight: trajectory`)
                trajectories are in flight.
        """
        if self._version is not None and version != self._version:
            self._check_free_for(version)
            self.counters["version_swaps"] += 1
            self.counters["prefills_restarted"] += self._slots.restart_first_turns()
        self._device.load(params)
        self._version = version
        self._published = max(self._published, version)
        if self._published <= version:
            self._newer_since_s = None

    def pause(self) -> None:
        """Steps do nothing until `resume`; what is in flight stays."""
        self._paused = True

    def resume(self) -> None:
        """Steps go on where they stopped."""
        self._paused = False

    def submit(self, lease: Lease, trajectories: int) -> None:
        """Queues a group of `trajectories` members.

        Raises:
            EngineError: more members than slots.
        """
        if not 1 <= trajectories <= self._config.slots:
            raise EngineError(f"a group of {trajectories}: rollout.slots = {self._config.slots} is the most")
        self._groups.append(GroupRun(lease, trajectories))

    def submit_eval(self, lease: EvalLease) -> None:
        """Queues an evaluation; it holds the engine at its version from its beginning to its end."""
        self._evals.append(lease)

    def generate(self, leases: Sequence[Lease], trajectories: int, timeout_s: float = 600.0) -> Results:
        """Submits groups and steps until all work is done.

        Raises:
            EngineError: paused, no weights, or not done in time.
        """
        for lease in leases:
            self.submit(lease, trajectories)
        return self.finish(timeout_s)

    def finish(self, timeout_s: float = 600.0) -> Results:
        """Steps until nothing is left to do. Raises like `generate`."""
        deadline = self._monotonic() + timeout_s
        while self.has_work:
            if self._monotonic() > deadline:
                raise EngineError(f"not done within {timeout_s:g} s")
            if not self.step():
                if self._waits.waiting and not self._paused:
                    time.sleep(TOOL_REST_S)
                    continue
                raise EngineError(
                    f"work is left that cannot go on: paused={self._paused}, version {self.version}, "
                    f"{len(self._groups)} groups and {len(self._evals)} evaluations wait (for another version?)"
                )
        return self.take_results()

    def take_results(self) -> Results:
        """What happened since the last call."""
        results, self._results = self._results, Results()
        return results

    @property
    def has_work(self) -> bool:
        """Something is queued or in flight."""
        in_flight = self._members or self._waits.waiting or self._waits.returned
        return bool(in_flight or self._groups or self._evals or self._active)

    def close(self) -> None:
        """Ends the tools' threads."""
        self._tools.close()

    def free_groups(self, trajectories: int) -> int:
        """How many more groups of `trajectories` members could begin at once."""
        wanted = sum(group.trajectories for group in self._groups)
        wanted += (
            self._waits.returned
            + sum(len(run.waiting) for run in self._active)
            + sum(len(lease.prompt_ids) for lease in self._evals)
        )
        return max(0, len(self._slots.free()) - wanted) // trajectories

    def give_back_queued(self) -> None:
        """Forgets what has not begun: groups and evaluations. They are somebody else's from now on."""
        self.counters["groups_given_back"] += len(self._groups)
        self._groups.clear()
        self._evals.clear()

    @property
    def tokens_in_flight(self) -> int:
        """Tokens sampled so far of trajectories that are not finished."""
        return self._slots.sampled_tokens()

    def drop_evals(self, version: int) -> list[int]:
        """Forgets queued evaluations of a version that cannot be had -> their ids."""
        dropped = [lease.eval_id for lease in self._evals if lease.version == version]
        self._evals = collections.deque(lease for lease in self._evals if lease.version != version)
        self.counters["evals_dropped"] += len(dropped)
        return dropped

    def step(self) -> bool:
        """One step -> whether there was anything to do. Raises `EngineError` when the weights are not finite."""
        if self._paused or self._version is None:
            return False
        begun = self._take_tool_results()
        begun = self._resume_returned() or begun
        begun = self._begin_work() or begun
        answering = self._slots.answering()
        prefilled = self._launch_prefill(bool(len(answering)))
        if len(answering):
            self._launch_decode(answering)
        if not prefilled and not len(answering):
            return begun
        for slots, tokens, logprobs in self._device.fetch(self._version):
            self._slots.sampled(slots, tokens, logprobs, self._version)
            self.counters["sampled_tokens"] += len(slots)
        for slot in self._slots.ended():
            member = self._members.get(int(slot))
            if member is not None:  # else its group failed on the way
                self._answered(member)
        return True

    # --- what begins -----------------------------------------------------------------------------------------------------

    def _decide(self) -> Decision:
        flight = Flight(
            held=self._version,
            published=self._published,
            evaluating=bool(self._active),
            next_evaluation=self._evals[0].version if self._evals else None,
            trajectories=len(self._members) + self._waits.off_slot,
            least=max((run.lease.least_version for run in self._running.values()), default=None),
        )
        return decide(flight, self._config.in_flight)

    def _check_free_for(self, version: int) -> None:
        if self._active:
            raise EngineBusy(f"version {version} cannot be loaded: an evaluation holds version {self._version}")
        in_flight = len(self._members) + self._waits.off_slot
        if in_flight and self._config.in_flight == "trajectory":
            raise EngineBusy(
                f"version {version} cannot be loaded: {in_flight} trajectories of version {self._version} are in "
                "flight (rollout.in_flight = trajectory)"
            )
        least = max((run.lease.least_version for run in self._running.values()), default=version)
        if least > version:
            raise EngineBusy(f"version {version} cannot be loaded: a group in flight needs version {least} or newer")

    def _begin_work(self) -> bool:
        """Fills free slots, evaluations first -> whether anything began or ended."""
        if not (self._groups or self._evals or self._active) or not self._decide().begin:
            return False
        begun = self._activate_evals()
        free = collections.deque(int(slot) for slot in self._slots.free())
        for run in list(self._active):
            while run.waiting and free:
                begun = True
                self._begin_eval_member(run, free)
        for _ in range(len(self._groups)):
            group = self._groups[0]
            if group.lease.least_version > self.version:
                self._groups.rotate(-1)  # newer weights are on their way; others need not wait for them
                continue
            if group.trajectories > len(free):
                break
            self._groups.popleft()
            begun = True
            self._begin_group(group, free)
        return begun

    def _activate_evals(self) -> bool:
        held = [lease for lease in self._evals if lease.version == self._version]
        for lease in held:
            self._evals.remove(lease)
            run = EvalRun(lease, self._monotonic(), collections.deque(lease.prompt_ids))
            self._active.append(run)
            self._finish_eval_if_over(run)  # of no prompts
        return bool(held)

    def _begin_eval_member(self, run: EvalRun, free: collections.deque[int]) -> None:
        run.running += 1
        member = Member(run, run.lease.eval_id, run.waiting.popleft(), self._clock())
        turn = self._open(member)
        if turn is not None:
            self._occupy(member, free.popleft())
            self._slots.show(member.slot, turn)
            self.counters["prompts_prefilled"] += 1

    def _begin_group(self, run: GroupRun, free: collections.deque[int]) -> None:
        """Opens an episode per member; of those that show the same first turn, one is prefilled and the others follow."""
        lease = run.lease
        self._running[lease.group_id] = run
        self._results.started.append(lease.group_id)
        run.members = [Member(run, index, lease.prompt_id, self._clock()) for index in range(run.trajectories)]
        leaders: dict[int, Member] = {}  # by the turn's identity: equal turns are one object (TurnEncoder)
        turns: list[EncodedTurn] = []
        for member in run.members:
            turn = self._open(member)
            if turn is None:
                return
            turns.append(turn)
        for member, turn in zip(run.members, turns, strict=True):
            self._occupy(member, free.popleft())
            leader = leaders.setdefault(id(turn), member)
            if leader is member:
                self._slots.show(member.slot, turn)
                self.counters["prompts_prefilled"] += 1
            else:
                self._slots.follow(member.slot, turn)
                self._followers.setdefault(leader.slot, []).append(member.slot)

    def _open(self, member: Member) -> EncodedTurn | None:
        """A new episode's first turn; None when the member was given up."""
        while True:
            try:
                member.episode = self._task.episode(member.prompt_id)
                turn = self._turns.encode(member.episode.first())
                self._slots.check_fits(0, turn)
                return turn
            except Exception as error:
                if not self._may_retry(member, error):
                    return None

    def _occupy(self, member: Member, slot: int) -> None:
        self._slots.begin(slot)
        member.slot = slot
        self._members[slot] = member
        group = member.run.lease.group_id if isinstance(member.run, GroupRun) else -1
        self._draws_4xS[:2, slot] = trajectory_key(self._seed, group, member.index, member.attempt)
        self._draws_4xS[3, slot] = member.run.greedy

    # --- device work -----------------------------------------------------------------------------------------------------

    def _launch_prefill(self, decoding: bool) -> bool:
        """Launches prefill calls: full ones at once, one that is not full when it waited long enough or nothing decodes."""
        waiting = self._slots.waiting()
        full = len(waiting) // self._rows
        rest = len(waiting) % self._rows
        self._waited_steps = self._waited_steps + 1 if rest and not full else 0
        count = full
        if rest and not full and (not decoding or self._waited_steps > PREFILL_PATIENCE_STEPS):
            count, self._waited_steps = 1, 0
        for index in range(count):
            self._prefill(waiting[index * self._rows : (index + 1) * self._rows])
        return count > 0

    def _prefill(self, slots: np.ndarray) -> None:
        batch = self._slots.prefill_batch(slots, self._rows, self._width)
        copies = [
            (row, int(slots[row]), follower)
            for row in np.flatnonzero(batch.complete)
            for follower in self._followers.pop(int(slots[row]), ())
        ]
        rows, leaders, followers = (
            np.array(column, np.int32) for column in (zip(*copies, strict=True) if copies else [()] * 3)
        )
        self._draws_4xS[2, slots] = self._slots.length[slots]
        self._draws_4xS[2, followers] = self._slots.length[followers]
        self._device.prefill(batch, FanOut(rows, leaders, followers), self._draws_4xS)
        self._slots.prefilled(batch)
        self._slots.copied(followers, leaders)

    def _launch_decode(self, slots: np.ndarray) -> None:
        tokens, positions = self._slots.last(slots)
        self._draws_4xS[2, slots] = self._slots.length[slots]
        self._device.decode(slots, tokens, positions, self._slots.cached[slots], self._draws_4xS.copy())
        self._slots.fed(slots)

    # --- what ends -------------------------------------------------------------------------------------------------------

    def _answered(self, member: Member) -> None:
        """An answer is over: the episode shows its next turn, waits for a tool, or is done."""
        ids, ended = self._slots.answer(member.slot)
        self.counters["answers"] += 1
        self.counters["answers_truncated"] += not ended
        try:
            assert member.episode is not None
            turn = member.episode.respond(self._task.vocabulary.decode(ids))
            if isinstance(turn, ToolCall | EmulatedToolCall):
                self._wait_for_tool(member, turn)
                return
            if turn is not None:
                self._slots.show(member.slot, self._turns.encode(turn))
                return
            outcome = member.outcome()
        except Exception as error:
            self._try_again(member, error)
            return
        self._done(member, outcome)

    def _wait_for_tool(self, member: Member, call: ToolCall | EmulatedToolCall) -> None:
        if self._waits.start(member, call):
            del self._members[member.slot]
            member.slot = -1

    def _take_tool_results(self) -> bool:
        """Members whose tool has answered go on, those whose tool failed try again -> whether there were any."""
        ended = self._waits.take()
        for member, result in ended:
            if member.run.over:
                self._waits.drop(member)  # its group was given up because of an earlier one
                continue
            try:
                turn = self._tool_turn(member, result)
            except Exception as error:
                self._try_again(member, error)
                continue
            if turn is not None:
                self._go_on(member, turn)
        return bool(ended)

    def _tool_turn(self, member: Member, result: ToolResult) -> EncodedTurn | None:
        """The turn that a tool gave; None: the episode is over, and done."""
        if result.error is not None:
            raise result.error
        if result.turn is None:
            self._done(member, member.outcome())
            return None
        turn = self._turns.encode(result.turn)
        self._slots.check_fits(self._waits.length(member), turn)
        return turn

    def _go_on(self, member: Member, turn: EncodedTurn) -> None:
        """Shows the turn, at once in the member's slot, or as soon as it has one."""
        if member.slot < 0:
            self._waits.line_up(member, turn)
        else:
            self._slots.show(member.slot, turn)

    def _resume_returned(self) -> bool:
        """Gives free slots to those that came back, whatever may begin: they are in flight -> whether there were any."""
        free = self._slots.free()[: self._waits.returned] if self._waits.returned else ()
        for slot in map(int, free):
            member, turn = self._waits.next()
            self._occupy(member, slot)
            if member.parked is not None:
                self._slots.restore(slot, member.parked)
                member.parked = None
                self.counters["tool_prefilled_again"] += int(self._slots.length[slot])
            self._slots.show(slot, turn)
        return len(free) > 0

    def _may_retry(self, member: Member, error: Exception) -> bool:
        """Counts a failed attempt -> whether there is another; without one the member's run is told."""
        if member.attempt < self._config.episode_retries:
            member.attempt += 1
            member.tool_calls = 0
            member.run.retries += 1
            self.counters["episode_retries"] += 1
            return True
        self._give_up(member, error)
        return False

    def _try_again(self, member: Member, error: Exception) -> None:
        """Starts the member's episode again, in its slot if it has one."""
        if not self._may_retry(member, error):
            return
        self._waits.forget_transcript(member)
        turn = self._open(member)
        if turn is None:
            return
        if member.slot >= 0:
            self._occupy(member, member.slot)
        self._go_on(member, turn)

    def _give_up(self, member: Member, error: Exception) -> None:
        self.counters["episodes_failed"] += 1
        run = member.run
        if isinstance(run, EvalRun):
            self._free(member)
            # Wrong, not missing: else a model that breaks the task would look better than it is.
            run.count(Outcome(0.0, self._task.limits.turns, 0))
            self._finish_eval_if_over(run)
            return
        run.over = True
        for other in run.members:
            self._free(other)
        del self._running[run.lease.group_id]
        reason = f"trajectory {member.index}, attempt {member.attempt + 1}: {type(error).__name__}: {error}"
        self._results.failed.append(
            GroupFailure(group_id=run.lease.group_id, reason=reason, episode_retries=run.retries)
        )
        self.counters["groups_failed"] += 1

    def _done(self, member: Member, outcome: Outcome) -> None:
        run, slots = member.run, self._slots
        if isinstance(run, EvalRun):
            self._free(member)
            run.count(outcome)
            self._finish_eval_if_over(run)
            return
        if member.parked is None:
            trajectory, images, turns = slots.transcript(member.slot)
        else:
            trajectory, images, turns = slots.parked_transcript(member.parked)
        run.done[member.index] = FinishedMember(
            trajectory=trajectory,
            images=images,
            outcome=outcome,
            turns=turns,
            started_s=member.started_s,
            finished_s=self._clock(),
            version_done=max(self._published, self.version),
        )
        self._free(member)
        if len(run.done) == run.trajectories:
            del self._running[run.lease.group_id]
            members = [run.done[index] for index in range(run.trajectories)]
            self._results.finished.append(assemble_group(run.lease.group_id, self._unit, members, run.retries))
            self.counters["groups_finished"] += 1

    def _free(self, member: Member) -> None:
        """Takes away everything that the member holds."""
        self._waits.drop(member)
        if member.slot >= 0:
            self._slots.release(member.slot)
            self._followers.pop(member.slot, None)
            del self._members[member.slot]
            member.slot = -1

    def _finish_eval_if_over(self, run: EvalRun) -> None:
        if run.waiting or run.running or run not in self._active:
            return
        now_s = self._monotonic()
        self._active.remove(run)
        self._results.evals.append(run.result(now_s))
        self.counters["evals_finished"] += 1
        self.counters["eval_held_s"] += now_s - run.began_s
        if self._newer_since_s is not None:
            self.counters["eval_behind_s"] += now_s - max(run.began_s, self._newer_since_s)
