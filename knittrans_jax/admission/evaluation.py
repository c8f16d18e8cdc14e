"""Evaluation as leased work: which held-out prompts are due, who runs them, what came of it. Pure; the clock is an argument.

What it guarantees: at most one evaluation is under way, and a newer one takes the place of shares that nobody has begun
(counted); every share is leased at a stated version; a share whose lease ran out, or whose host cannot run it, is leased
again, at most `MAX_ATTEMPTS` times in all; a result counts once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

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
        if final:
            self.final_planned = True
        elif version < self._next_version:
            return
        self._next_version = (version // self._every + 1) * self._every
        prompts = self._final_prompts if final else self._prompts
        self.shares_superseded += len(self.waiting)
        parts = max(1, min(hosts, len(prompts)))
        self.waiting = [Share(prompts[part::parts], final) for part in range(parts)] if prompts else []

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
        return self.leases.pop(eval_id, None)

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
