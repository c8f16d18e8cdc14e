"""`look_ahead_groups: auto`: the smallest look-ahead that keeps the trainer from waiting, found while the run goes on.

What it guarantees:

* it is a fold over the events of the log, like the state: a replay finds the same look-ahead at every moment;
* look-ahead never goes above the bound that it is given (staleness, storage);
* a kind whose groups take long gets look-ahead from its observed latencies before the trainer has to wait for it.

How. After every train batch it compares what the trainer waited for groups with `IDLE_SHARE` of the batch's time, and adds
(or takes away) groups for a part of the difference. What is added goes to the kinds that the trainer waited for, each weighed
by the seconds that one more group would have saved it (the wait over the groups that were missing); what is taken away comes
from the kinds that saved least, which give some up in any case: at the best shares one more group of any kind saves the same.
The first batches' look-ahead comes from latencies: a kind needs as many groups ahead as are still in flight when its batch
ends.

Look-ahead grows only after a batch in which the gate held something back: where it never was used up, slots are scarce, and
more look-ahead would make the data older and nothing faster.
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Mapping

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.rules import Kind, Rules
from knittrans_jax.admission.state import AdmissionState

IDLE_SHARE = 0.018
"""Of the time, that the trainer may wait for groups: the last percents cost the most look-ahead."""
GAIN = 0.35
"""Part of the difference that one batch corrects. Look-ahead acts a batch later, so 1 would swing."""
SHRINK = 0.08
"""Part of the look-ahead that goes after a batch, while there is no wait at all; less, the nearer waits are to `IDLE_SHARE`."""
RECENT = 0.6
"""Weight of the past in the mean wait that shrinking goes by: one batch without a wait says little."""
TRADE = 0.08
"""Part of a kind's look-ahead that goes after a batch if it saves nothing where another kind's does; less, if it saves some."""
TRADE_IDLE_SHARE = 0.0135
"""Recent wait above which that goes to the kinds that save most, and below which it is saved."""
MEMORY = 0.75
"""Weight of the past in a kind's marginal saving."""
LATENCIES = 256
"""Newest latencies kept by kind."""


class AutoLookAhead:
    """See the module's opening. `groups` is the look-ahead by kind, `total` their sum."""

    def __init__(self, rules: Rules, most: int) -> None:
        """`most`: the bound on the look-ahead, in groups."""
        self._rules, self._most = rules, most
        self._composition = rules.composition
        start = min(most, rules.mini_batch_groups)
        self._exact = {kind: start * count / rules.groups for kind, count in self._composition.items()}
        self._saving = dict.fromkeys(self._composition, 0.0)
        self._saving_now = dict.fromkeys(self._composition, 0.0)
        self._latencies: dict[Kind, collections.deque[float]] = {
            kind: collections.deque(maxlen=LATENCIES) for kind in self._composition
        }
        self._leased_s: dict[int, tuple[Kind, float]] = {}
        self._free_since_s: float | None = None
        self._short: dict[Kind, float] = {}
        self._idle_s = 0.0
        self._idle_share = IDLE_SHARE
        self._missing = 0
        self._held_back = False
        self._boundary_s: float | None = None
        self._batches = 0
        self.groups: dict[Kind, int] = {}
        self.total = 0
        self._round()

    def observe(self, state: AdmissionState, event: ev.AnyEvent, *, used_up: bool) -> None:
        """Takes in an event that `state` has folded in already. `used_up`: the gate allows no more of any kind."""
        match event:
            case ev.Leased():
                self._leased_s[event.group_id] = (state.groups[event.group_id].kind, event.time_s)
            case ev.Ready():
                kind, leased_s = self._leased_s.pop(event.group.group_id)
                self._latencies[kind].append(event.time_s - leased_s)
            case ev.Failed() | ev.Expired() | ev.Lost() | ev.Filtered():
                self._leased_s.pop(event.group_id, None)
            case ev.Resumed():  # no step and no wait spans an interruption
                self._leased_s.clear()
                self._short.clear()
                self._free_since_s = self._boundary_s = None
                self._idle_s = 0.0
            case ev.Consumed():
                self._held_back |= used_up
                if (event.update + 1) % self._rules.mini_batches == 0:
                    self._adapt(event.time_s)
                if not state.plans:
                    self._begin_wait(state, event.time_s)
            case ev.Admitted():
                self._end_wait(event.time_s)
            case _:
                pass

    # --- waits ------------------------------------------------------------------------------------------------------------

    def _begin_wait(self, state: AdmissionState, now_s: float) -> None:
        self._free_since_s = now_s
        self._short = {}
        shortage = state.batch.completion.shortage(state.accounts.ready_by_kind, self._rules.mini_batch_groups)
        if shortage is not None:
            self._short = dict.fromkeys(shortage.kinds, 1.0 / shortage.missing)
            self._missing += shortage.missing

    def _end_wait(self, now_s: float) -> None:
        if self._free_since_s is None:
            return
        waited_s, self._free_since_s = now_s - self._free_since_s, None
        if self._short:
            self._idle_s += waited_s
            for kind, share in self._short.items():
                self._saving_now[kind] += waited_s * share

    # --- adapting -----------------------------------------------------------------------------------------------------------

    def _adapt(self, now_s: float) -> None:
        """A train batch was consumed."""
        began_s, self._boundary_s = self._boundary_s, now_s
        idle_s, self._idle_s = self._idle_s, 0.0
        missing, self._missing = self._missing, 0
        held_back, self._held_back = self._held_back, False
        for kind, now in self._saving_now.items():
            self._saving[kind] = MEMORY * self._saving[kind] + (1 - MEMORY) * now
            self._saving_now[kind] = 0.0
        if began_s is None or now_s <= began_s:
            return  # the first batch had no look-ahead to judge
        self._batches += 1
        step_s = now_s - began_s
        groups_per_s = self._rules.groups / max(step_s - idle_s, 1e-9)
        change = GAIN * (idle_s - IDLE_SHARE * step_s) * groups_per_s
        self._idle_share = RECENT * self._idle_share + (1 - RECENT) * idle_s / step_s
        if change < 0:
            spare = max(0.0, 1.0 - self._idle_share / IDLE_SHARE)
            change = min(change, -SHRINK * spare * sum(self._exact.values()))
        if change > 0 and held_back:
            self._add(min(change, missing))  # with all that was missing there would have been no wait
        elif change < 0:
            self._take_away(-change)
        self._trade()
        if self._batches <= 3:
            for kind, need in self._in_flight_at(step_s - step_s / self._rules.mini_batches, step_s).items():
                self._exact[kind] = max(self._exact[kind], need)
        self._round()

    def _add(self, groups: float) -> None:
        weights = {kind: saving * self._composition[kind] for kind, saving in self._saving.items()}
        whole = sum(weights.values())
        for kind, weight in weights.items():
            if whole:
                self._exact[kind] += groups * weight / whole

    def _take_away(self, groups: float) -> None:
        """From every kind in proportion to what it has; a kind with the greatest saving keeps it all."""
        most = max(self._saving.values())
        weights = {
            kind: have * (1.0 - 0.9 * self._saving[kind] / most if most else 1.0) for kind, have in self._exact.items()
        }
        whole = sum(weights.values())
        for kind, weight in weights.items():
            if whole:
                self._exact[kind] = max(0.0, self._exact[kind] - groups * weight / whole)

    def _trade(self) -> None:
        """Kinds of which one more group would save less than of others give some up: to those, where the trainer waits."""
        most, given = max(self._saving.values()), 0.0
        for kind, saving in self._saving.items():
            if most:
                gives = self._exact[kind] * TRADE * (1.0 - saving / most)
                self._exact[kind] -= gives
                given += gives
        if self._idle_share > TRADE_IDLE_SHARE:
            self._add(given)

    def _in_flight_at(self, phase_s: float, step_s: float) -> Mapping[Kind, float]:
        """Groups of each kind still in flight that long after a batch's launch, when one is launched every `step_s`."""
        needs: dict[Kind, float] = {}
        for kind, latencies in self._latencies.items():
            ordered = sorted(latencies)
            if ordered:
                ages = range(1 + int(ordered[-1] // step_s))
                longer = sum(len(ordered) - bisect.bisect_right(ordered, phase_s + age * step_s) for age in ages)
                needs[kind] = self._composition[kind] * longer / len(ordered)
        return needs

    def _round(self) -> None:
        whole = sum(self._exact.values())
        if whole > self._most:
            self._exact = {kind: have * self._most / whole for kind, have in self._exact.items()}
            whole = float(self._most)
        self.total = min(self._most, round(whole))
        self.groups = {kind: -int(-have // 1) for kind, have in self._exact.items()}
