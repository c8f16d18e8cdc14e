"""Evaluation as leased work: which held-out prompts are due, who runs them, what came of it. Pure; the clock is an argument.

What it guarantees: at most one evaluation is under way, and a newer one takes the place of shares that nobody has begun
(counted); every share is leased at a stated version; a share whose lease ran out, or whose host cannot run it, is leased
again, at most `MAX_ATTEMPTS` times in all; a result counts once; a resumed run repeats the evaluations that were not complete.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence

from knittrans_jax.admission import events as ev
from knittrans_jax.config import Config

MAX_ATTEMPTS = 3


@dataclasses.dataclass(frozen=True)
class Share:
    """Part of an evaluation: held-out prompts for one host."""

    prompt_ids: tuple[str, ...]
    final: bool
    attempts: int = 0


@dataclasses.dataclass(frozen=True)
class EvalLeaseRecord:
    """A share on a host."""

    eval_id: int
    share: Share
    host: str
    version: int
    deadline_s: float


class Evaluations:
    """See the module's opening."""

    def __init__(self, config: Config, prompt_ids: Sequence[str]) -> None:
        """`prompt_ids`: the held-out prompts in the task's order; evaluations take the first of them."""
        self._every = config.eval.every_updates
        self._prompts = tuple(prompt_ids[: config.eval.prompts])
        self._final_prompts = tuple(prompt_ids[: config.eval.final_prompts])
        self._last_update = config.train.updates
        self._slots = config.rollout.slots
        self._timeout_s = config.admission.lease_timeout_s
        self._next_version = self._every
        self._next_id = 0
        self._log: dict[int, tuple[int, tuple[str, ...]]] = {}
        """Version and prompts of leases in the log of a resumed run."""
        self._done: collections.defaultdict[int, set[str]] = collections.defaultdict(set)
        """Prompts done in that log, by version."""
        self._version, self._interrupted = 0, False
        """Of that log, up to where it was taken in."""
        self.waiting: list[Share] = []
        self.leases: dict[int, EvalLeaseRecord] = {}
        self.final_planned = False
        self.shares_superseded = 0
        self.leases_expired = 0

    @property
    def finished(self) -> bool:
        """The final evaluation was planned and every lease has ended."""
        return self.final_planned and not self.waiting and not self.leases

    def published(self, version: int, hosts: int) -> None:
        """A version is out: plans an evaluation if one is due, split over `hosts` hosts."""
        final = version >= self._last_update
        if final and self.final_planned:
            return
        if final:
            self.final_planned = True
        elif version < self._next_version:
            return
        self._next_version = (version // self._every + 1) * self._every
        begun = self._done.get(version, set()).union(
            *(lease.share.prompt_ids for lease in self.leases.values() if lease.version == version)
        )
        prompts = [prompt for prompt in (self._final_prompts if final else self._prompts) if prompt not in begun]
        self.shares_superseded += len(self.waiting)
        parts = max(1, min(hosts, len(prompts)))
        self.waiting = [Share(tuple(prompts[part::parts]), final) for part in range(parts)] if prompts else []

    def conclude(self, version: int, hosts: int) -> None:
        """The run ends with this published version, before `train.updates`: plans the final evaluation."""
        self._last_update = version
        self.published(version, hosts)

    def replay(self, event: ev.AnyEvent) -> None:
        """Takes in an event of the log of a run that is resumed."""
        match event:
            case ev.EvalLeased():
                self._next_id = event.eval_id + 1
                self._log[event.eval_id] = event.version, event.prompt_ids
            case ev.EvalDone():
                version, prompts = self._log.pop(event.eval_id)
                self._done[version].update(prompts)
            case ev.Consumed():
                self._version = event.update + 1
            case ev.Resumed():
                self._interrupted = True
            case ev.TrainGroupFormed():
                if self._interrupted or event.lineage < self._version:
                    self.resume(event.lineage)
                self._version, self._interrupted = event.lineage, False
            case _:
                pass

    def resume(self, version: int) -> int:
        """Training goes on from a version -> the newest version up to it whose evaluation is complete; -1: none.

        Evaluations after that one are due again.
        """
        final, prompts = set(self._final_prompts), set(self._prompts)
        complete = [v for v, done in self._done.items() if done >= (final if v >= self._last_update else prompts)]
        evaluated = max((v for v in complete if v <= version), default=-1)
        for undone in [v for v in self._done if v > evaluated]:
            del self._done[undone]
        self._next_version = (max(evaluated, 0) // self._every + 1) * self._every
        self.final_planned = 0 <= self._last_update <= evaluated
        return evaluated

    def lease(self, host: str, version: int, now_s: float) -> EvalLeaseRecord | None:
        """Leases a share to a host that has none, at the newest published version."""
        if not self.waiting or any(lease.host == host for lease in self.leases.values()):
            return None
        share = self.waiting.pop(0)
        # A share larger than the host's slots is run in rounds, each of which may take as long as a lease.
        rounds = math.ceil(len(share.prompt_ids) / self._slots)
        record = EvalLeaseRecord(self._next_id, share, host, version, now_s + rounds * self._timeout_s)
        self._next_id += 1
        self.leases[record.eval_id] = record
        return record

    def done(self, eval_id: int) -> EvalLeaseRecord | None:
        """A result came -> its lease, or None when it ended before (a duplicate, or too late)."""
        lease = self.leases.pop(eval_id, None)
        if lease is not None:
            self._done[lease.version].update(lease.share.prompt_ids)
        return lease

    def expire(self, now_s: float) -> list[EvalLeaseRecord]:
        """Ends the leases that ran out and puts their shares back; a share past `MAX_ATTEMPTS` is returned only."""
        expired = [lease for lease in self.leases.values() if now_s >= lease.deadline_s]
        for lease in expired:
            self._give_back(lease)
        return expired

    def failed(self, eval_id: int) -> EvalLeaseRecord | None:
        """The host cannot run it -> its lease, which ends like one that ran out; None when it had ended before."""
        lease = self.leases.get(eval_id)
        if lease is not None:
            self._give_back(lease)
        return lease

    def _give_back(self, lease: EvalLeaseRecord) -> None:
        del self.leases[lease.eval_id]
        self.leases_expired += 1
        if lease.share.attempts + 1 < MAX_ATTEMPTS:
            self.waiting.append(dataclasses.replace(lease.share, attempts=lease.share.attempts + 1))
