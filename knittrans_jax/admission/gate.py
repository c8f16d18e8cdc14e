"""The launch gate: of which kind a prompt may be launched next, so that look-ahead is bounded and no batch gets stuck.

With published version `P`, batches of `B` groups in `K` mini-batches, `B_d` the exact quota of domain `d` in a batch (else its
maximum) and look-ahead `L`, a group of domain `d` may be launched only while all of these hold:

1. `live_d < (P // K + 1) * B_d + L_d`, strictly: one more would make the colocated schedule stale;
2. `live < (P // K + 1) * B + L`;
3. *reservation*: of the groups launched and not yet admitted, at most `L` are more than the train batch under way can use.
   Where quotas are ranges, 1 and 2 alone let a surplus of one domain take the places that another's minimum needs; with 3
   the places left in 2 always suffice for what the batch still lacks, so the batch can always be finished;
4. the run still needs it: groups beyond its last train batch are launched only to finish that batch.

Uniform look-ahead is shared over domains in proportion to their `B_d`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from knittrans_jax.admission.rules import Kind, Rules
from knittrans_jax.admission.state import AdmissionState


class LaunchGate:
    """See the module's opening. Pure: the state comes in as an argument."""

    def __init__(self, rules: Rules, look_ahead: int | Mapping[str, int], train_steps: int | None = None) -> None:
        """Builds the gate.

        Args:
            rules: the batch's resolved rules.
            look_ahead: `L` in groups, shared over domains; or per domain (0 for those it does not name).
            train_steps: train batches of the whole run; None: without end.
        """
        self._rules = rules
        self._train_steps = train_steps
        self._most = {kind: rules.quota(kind).most for kind in rules.kinds}
        total = sum(self._most.values())
        if isinstance(look_ahead, Mapping):
            self._look_ahead = {kind: look_ahead.get(kind[0], 0) if kind else 0 for kind in rules.kinds}
            self.look_ahead_groups = sum(self._look_ahead.values())
        else:
            self.look_ahead_groups = look_ahead
            # live < x with a fractional share x is live < ceil(x); the total is held by the second condition.
            self._look_ahead = {
                kind: -(-look_ahead * most // total) if total else 0 for kind, most in self._most.items()
            }

    def domain_limit(self, kind: Kind, published: int) -> int:
        """The least number of live groups of a domain at which it may not launch any more."""
        return (published // self._rules.mini_batches + 1) * self._most[kind] + self._look_ahead[kind]

    def total_limit(self, published: int) -> int:
        """The least number of live groups at which nothing may be launched any more."""
        return (published // self._rules.mini_batches + 1) * self._rules.groups + self.look_ahead_groups

    def allows(self, state: AdmissionState, kind: Kind) -> bool:
        """Whether one more group of this kind may be launched now."""
        published, accounts = state.published, state.accounts
        if published < 0:
            return False
        live = accounts.live
        if accounts.live_by_kind[kind] >= self.domain_limit(kind, published) or live >= self.total_limit(published):
            return False
        pool = dict(accounts.pool_by_kind)
        before = state.batch.completion.usable(pool)
        pool[kind] += 1
        usable = state.batch.completion.usable(pool)
        in_reach = state.batch.train_step <= published // self._rules.mini_batches  # else 2 leaves look-ahead only
        if in_reach and sum(pool.values()) - usable > self.look_ahead_groups:
            return False
        needed = self._train_steps is None or live < self._train_steps * self._rules.groups
        return needed or (usable > before and state.batch.train_step < (self._train_steps or 0))

    def next_kind(self, state: AdmissionState, has_prompt: Callable[[Kind], bool]) -> Kind | None:
        """The kind to launch next: of those allowed, the one furthest behind its share of live groups; None: none."""
        best: tuple[int, int, Kind] | None = None
        for kind in self._rules.kinds:
            most = self._most[kind]
            if not most or not self.allows(state, kind) or not has_prompt(kind):
                continue
            live = state.accounts.live_by_kind[kind]
            if best is None or live * best[1] < best[0] * most:
                best = (live, most, kind)
        return None if best is None else best[2]
