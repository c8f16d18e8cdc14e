"""The scheduler's desk for rollout hosts: what engines and storage units report, and the work they are given. Pure.

What it guarantees:

* a group is leased only where the launch gate and the unit's storage allow it, and never while its prompt is busy; a prompt
  whose group failed is leased again for the same train batch only when the gate has no other to let go;
* a finished group is taken once, from the host that has it; what cannot be trained on fails with a stated reason; duplicate,
  late and foreign reports change nothing, are counted, and their payload is released where nobody needs it;
* every lease has a deadline, counted anew when the group starts; after it the group is `expired` (`lost`, if the host itself
  has gone silent) and its prompt is leased again;
* what an engine had in flight is lost, and leased again, as soon as the host speaks through another process or has left; what a
  unit does not hold any more is lost as soon as it says so.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection

import msgspec

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import IN_FLIGHT, Account
from knittrans_jax.admission.controller import Controller
from knittrans_jax.admission.evaluation import MAX_ATTEMPTS, EvalLeaseRecord, Evaluations
from knittrans_jax.admission.storage_room import StorageRoom
from knittrans_jax.config import Config
from knittrans_jax.launch import messages as msg
from knittrans_jax.trajectory import GroupMeta

COUNTERS = (
    "late_groups",
    "duplicate_groups",
    "foreign_groups",
    "malformed_groups",
    "late_evals",
    "recovered_groups",
    "engines_anew",
    "engines_left",
    "units_anew",
    "payloads_gone",
)
"""What hosts reported and what changed nothing, by reason (malformed: failed; recovered: held by a unit when it was asked), and
what began anew or left."""


class RolloutDesk:
    """See the module's opening. `emit` takes an event into the log and the state at once."""

    def __init__(
        self,
        config: Config,
        controller: Controller,
        evaluations: Evaluations,
        group_bytes: int,
        emit: Callable[[ev.AnyEvent], None],
    ) -> None:
        """`group_bytes`: the most payload bytes of one group."""
        self.config, self.controller, self.state = config, controller, controller.state
        self.evaluations = evaluations
        self.room = StorageRoom(config.rollout.storage_bytes // group_bytes)
        self.units: dict[str, str] = {}
        """Address by storage unit."""
        self.inventoried: set[str] = set()
        """Units that have said what they hold."""
        self.seen_s: dict[str, float] = {}
        """When each host's engine spoke last."""
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self.engine_counters: dict[str, dict[str, float]] = {}
        """What each host's engine counted last."""
        self._sessions: dict[str, int] = {}
        """The engine's process, by host."""
        self._left: set[str] = set()
        self._stuck: str | None = None
        self._emit = emit
        self._deadlines: list[tuple[float, int]] = []

    # --- reports -------------------------------------------------------------------------------------------------------

    def join(self, sync: msg.EngineSync, now_s: float) -> None:
        """Notes the host. An engine that was started anew knows nothing of what it had in flight."""
        if self._sessions.setdefault(sync.host, sync.session) != sync.session:
            self._sessions[sync.host] = sync.session
            self.counters["engines_anew"] += sync.host not in self._left
            self._left.discard(sync.host)
            self._lose_in_flight(sync.host, IN_FLIGHT, f"the engine of host {sync.host} was started anew", now_s)
        if self.state.hosts.get(sync.host) != sync.unit:
            self._emit(ev.HostJoined(time_s=now_s, host=sync.host, unit=sync.unit))
        self.seen_s[sync.host] = now_s
        if sync.counters:
            self.engine_counters[sync.host] = sync.counters

    def tool_counters(self) -> dict[str, float]:
        """What the engines count of tools (`tool_...`), summed over hosts."""
        names = sorted({name for one in self.engine_counters.values() for name in one if name.startswith("tool_")})
        return {name: sum(one.get(name, 0.0) for one in self.engine_counters.values()) for name in names}

    def take_reports(self, sync: msg.EngineSync, now_s: float) -> None:
        """Takes in what an engine started, finished and gave up."""
        for group_id in sync.started:
            group = self.state.groups.get(group_id)
            if group is not None and group.host == sync.host and group.account is Account.LEASED:
                self._start(group_id, now_s)
        for done in sync.done:
            self._done(sync.host, done, now_s)
        for failure in sync.failed:
            self._failed(sync.host, failure, now_s)
        for result in sync.evals:
            if self.evaluations.done(result.eval_id) is None:
                self.counters["late_evals"] += 1
            else:
                self._emit(ev.EvalDone(time_s=now_s, **msgspec.structs.asdict(result)))
        for eval_id in sync.evals_failed:
            lease = self.evaluations.failed(eval_id)
            if lease is None:
                self.counters["late_evals"] += 1
            else:
                self._end_evaluation(lease, f"version {lease.version} is not to be had on host {lease.host}", now_s)
        if sync.leaving and sync.host not in self._left:
            self._left.add(sync.host)
            self.counters["engines_left"] += 1
            self._lose_in_flight(sync.host, {Account.LEASED}, f"host {sync.host} takes no more work", now_s)
        if sync.left:
            self._lose_in_flight(sync.host, IN_FLIGHT, f"host {sync.host} has left", now_s)
            del self.seen_s[sync.host]

    def _lose_in_flight(self, host: str, accounts: Collection[Account], reason: str, now_s: float) -> None:
        """What a host has of these accounts is leased again elsewhere; so are its evaluations, unless it goes on with them."""
        for group in [g for g in self.state.groups.values() if g.host == host and g.account in accounts]:
            self._emit(ev.Lost(time_s=now_s, group_id=group.group_id, reason=reason))
            self.room.release(self.state.hosts.get(host, host), group.group_id)  # it may have been stored already
        if Account.RUNNING in accounts:
            for eval_id in [one.eval_id for one in self.evaluations.leases.values() if one.host == host]:
                lease = self.evaluations.failed(eval_id)
                assert lease is not None
                self._end_evaluation(lease, reason, now_s)

    def unit_holds(self, unit: str, held: Collection[int], now_s: float) -> None:
        """A unit says what it holds: at its start, or because this scheduler does not know.

        What nobody needs may go. What is ready and not held is lost; what is admitted or retained and not held is `gone`.
        """
        self.counters["units_anew"] += unit in self.inventoried
        self.inventoried.add(unit)
        self.counters["recovered_groups"] += len(held)
        retained = self.room.retained(unit)
        for group_id in held:
            if group_id not in self.state.groups and group_id not in retained:
                self.room.release(unit, group_id)
        missing = [
            group
            for group in self.state.groups.values()
            if group.meta is not None and group.meta.unit == unit and group.group_id not in held
        ]
        for group in missing:
            if group.account is Account.READY:
                reason = f"storage unit {unit} was started anew without it"
                self._emit(ev.Lost(time_s=now_s, group_id=group.group_id, reason=reason))
        gone = {group.group_id for group in missing if group.account is Account.ADMITTED}
        gone |= retained.difference(held)
        self.room.gone |= gone
        self.counters["payloads_gone"] += len(missing) + len(gone & retained)

    def units_to_ask(self) -> list[str]:
        """Units whose groups are kept and that have not said what they hold: after the scheduler was started anew."""
        kept = {group.meta.unit for group in self.state.groups.values() if group.meta is not None}
        return sorted((kept | self.room.retaining()) - self.inventoried)

    def _start(self, group_id: int, now_s: float) -> None:
        self._emit(ev.Started(time_s=now_s, group_id=group_id))
        heapq.heappush(self._deadlines, (now_s + self.config.admission.lease_timeout_s, group_id))

    def _done(self, host: str, done: msg.GroupDone, now_s: float) -> None:
        meta, unit = done.group, self.state.hosts[host]
        group = self.state.groups.get(meta.group_id)
        if group is None:
            self.counters["late_groups"] += 1
            self.room.settled(host, meta.group_id)
            self.room.release(unit, meta.group_id)
        elif group.host != host:
            self.counters["foreign_groups"] += 1
        elif group.account not in IN_FLIGHT:
            self.counters["duplicate_groups"] += 1
        else:
            if group.account is Account.LEASED:
                self._start(meta.group_id, now_s)
            fault = self._fault(meta, unit, group.version)
            if fault is None:
                self._emit(ev.Ready(time_s=now_s, group=meta, episode_retries=done.episode_retries))
                filtered = self.controller.filtered(meta, now_s)
                if filtered is not None:
                    self._emit(filtered)
                    self.room.release(unit, meta.group_id)
                return
            self.counters["malformed_groups"] += 1
            self._emit(
                ev.Failed(time_s=now_s, group_id=meta.group_id, reason=fault, episode_retries=done.episode_retries)
            )
            self.room.release(unit, meta.group_id)

    def _failed(self, host: str, failure: msg.GroupFailure, now_s: float) -> None:
        group = self.state.groups.get(failure.group_id)
        if group is None or group.account not in IN_FLIGHT:
            self.counters["late_groups"] += 1
            self.room.settled(host, failure.group_id)
        elif group.host != host:
            self.counters["foreign_groups"] += 1
        else:
            self._emit(ev.Failed(time_s=now_s, **msgspec.structs.asdict(failure)))

    def _fault(self, meta: GroupMeta, unit: str, leased_version: int) -> str | None:
        """Why a finished group cannot be trained on; None: it can."""
        n, longest = self.config.batch.trajectories_per_group, self.config.rollout.cache_tokens
        if meta.unit != unit or len(meta.trajectories) != n:
            return f"{len(meta.trajectories)} trajectories on unit {meta.unit}, expected {n} on {unit}"
        least = self._least_version(leased_version)
        for index, one in enumerate(meta.trajectories):
            if not 1 <= one.sampled_tokens <= one.length_tokens <= longest:
                return (
                    f"trajectory {index} has {one.sampled_tokens} sampled of {one.length_tokens} tokens, expected at least "
                    f"one and at most rollout.cache_tokens = {longest}"
                )
            if not all(map(math.isfinite, (one.reward, *one.turn_rewards))):
                return f"trajectory {index} has reward {one.reward}, by turn {one.turn_rewards}"
            if self.config.train.objective.credit == "turn" and len(one.turn_rewards) != one.turns:
                return (
                    f"trajectory {index} has {len(one.turn_rewards)} turn rewards for {one.turns} turns: "
                    "train.objective.credit = turn needs a task whose outcomes give one per answer"
                )
            if not least <= one.version_min <= one.version_max <= self.state.published:
                return (
                    f"trajectory {index} was sampled by versions {one.version_min} to {one.version_max}, expected "
                    f"{least} to {self.state.published}"
                )
            if not all(0 <= image < len(meta.media) for image in one.media):
                return f"trajectory {index} refers to images {one.media} of {len(meta.media)}"
        return None

    # --- work ------------------------------------------------------------------------------------------------------------

    def lease(self, host: str, free_groups: int, now_s: float) -> tuple[msg.Lease, ...]:
        """Up to `free_groups` leases for a host."""
        leases: list[msg.Lease] = []
        state = self.state
        if host in self._left:
            return ()
        while len(leases) < free_groups and self.room.fits(host, state):
            leased = self.controller.next_launch(host, now_s)
            if leased is None:
                break
            self._emit(leased)
            group_id, prompt_id, version = leased.group_id, leased.prompt_id, leased.version
            heapq.heappush(self._deadlines, (now_s + self.config.admission.lease_timeout_s, group_id))
            least = self._least_version(version)
            leases.append(msg.Lease(group_id=group_id, prompt_id=prompt_id, least_version=least))
        return tuple(leases)

    def _least_version(self, published: int) -> int:
        """Colocated leases are sampled by the weights of their train batch's start, others by whatever the host holds."""
        every = self.config.batch.mini_batches
        return every * (published // every) if self.config.admission.schedule == "colocated" else 0

    def lease_evaluation(self, host: str, now_s: float) -> tuple[msg.EvalLease, ...]:
        """A share of the evaluation that is due, at the newest published version."""
        may = self.state.published >= 0 and host not in self._left
        lease = self.evaluations.lease(host, self.state.published, now_s) if may else None
        if lease is None:
            return ()
        self._emit(
            ev.EvalLeased(
                time_s=now_s,
                eval_id=lease.eval_id,
                host=host,
                version=lease.version,
                prompt_ids=lease.share.prompt_ids,
            )
        )
        return (msg.EvalLease(eval_id=lease.eval_id, version=lease.version, prompt_ids=lease.share.prompt_ids),)

    # --- deadlines ---------------------------------------------------------------------------------------------------------

    def expire(self, now_s: float) -> str | None:
        """Ends leases past their deadline -> why the run cannot go on, or None."""
        self._expire_groups(now_s)
        for lease in self.evaluations.expire(now_s):
            self._end_evaluation(lease, f"not done in time on host {lease.host}", now_s)
        return self._stuck

    def _end_evaluation(self, lease: EvalLeaseRecord, reason: str, now_s: float) -> None:
        self._emit(ev.EvalExpired(time_s=now_s, eval_id=lease.eval_id, reason=reason))
        if lease.share.final and lease.share.attempts + 1 >= MAX_ATTEMPTS:
            self._stuck = f"the final evaluation was leased {MAX_ATTEMPTS} times and did not come back: {reason}"

    def _expire_groups(self, now_s: float) -> None:
        timeout_s = self.config.admission.lease_timeout_s
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, group_id = heapq.heappop(self._deadlines)
            group = self.state.groups.get(group_id)
            if group is None or group.account not in IN_FLIGHT or group.since_s + timeout_s > deadline_s:
                continue  # at its end, or it started since and a later entry watches it
            silent_s = now_s - self.seen_s.get(group.host, now_s)
            if silent_s >= min(timeout_s, self.config.control.rpc_timeout_s):
                reason = f"host {group.host} was silent for {silent_s:.1f} s"
                self._emit(ev.Lost(time_s=now_s, group_id=group_id, reason=reason))
            else:
                reason = f"not done {timeout_s:g} s after it became {group.account}"
                self.room.orphan(group.host, group_id, now_s + timeout_s)
                self._emit(ev.Expired(time_s=now_s, group_id=group_id, reason=reason))
        self.room.forget_orphans(now_s)
