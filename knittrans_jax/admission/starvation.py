"""What happens when the trainer has nothing to do and what it waits for does not come: `admission.on_starvation` decides. Pure.

What it guarantees: what can never come is reported at once, naming rule, value, missing count and what is in flight; what only
does not come, after `admission.starvation_s`; each report is in the log, or is the reason for which the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.controller import Controller
from knittrans_jax.admission.evaluation import Evaluations
from knittrans_jax.admission.policy import Waiting, hopeless
from knittrans_jax.config import Config

COUNTERS = ("starvations", "relaxed_rules")
"""What starvation led to where the run went on."""


class Starvation:
    """See the module's opening. `emit` takes an event into the log and the state at once."""

    def __init__(
        self,
        config: Config,
        controller: Controller,
        evaluations: Evaluations,
        emit: Callable[[ev.AnyEvent], None],
        last_published: Callable[[int], int],
    ) -> None:
        """`last_published`: the newest version to be published at a version."""
        self._config, self._controller, self._evaluations = config, controller, evaluations
        self._state = controller.state
        self._emit, self._last_published = emit, last_published
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0.0)
        self._starving: tuple[str, str, int] | None = None
        self._hopeless: tuple[int, str, str] | None = None
        self._since_s = 0.0

    def moved(self, now_s: float) -> None:
        """A mini-batch was admitted."""
        self._since_s = now_s

    def check(self, waiting: Waiting | None, last_version: int, hosts: Iterable[str], now_s: float) -> str | None:
        """Looks whether what is missing has become less -> why the run cannot go on, or None.

        Args:
            waiting: what the policy waits for.
            last_version: the version with which the run ends.
            hosts: rollout hosts seen.
            now_s: the clock.
        """
        state = self._state
        lost = None if waiting is None else hopeless(state)
        if lost is not None and (state.batch.train_step, lost.rule, lost.value) != self._hopeless:
            self._hopeless = (state.batch.train_step, lost.rule, lost.value)
            count = sum(state.dropped_in_a_row[kind] for kind in lost.kinds)
            why = "batch.drop_equal_rewards, batch.mini_batch_tokens or admission.staleness_bound"
            dropped = f"waits in vain (the last {count} groups that could help were all dropped: {why})"
            return self._starved(lost, 0.0, dropped, now_s)
        short = self._controller.short_of_data() if state.batch.mini_batches else None
        if short is not None and (state.batch.train_step, short.rule, short.value) != self._hopeless:
            self._hopeless = (state.batch.train_step, short.rule, short.value)
            return self._run_short(short, now_s)
        key = self._missing(waiting, last_version)
        if key is None or key != self._starving:
            self._starving, self._since_s = key, now_s
            return None
        waited_s = now_s - self._since_s
        if waited_s < self._config.admission.starvation_s:
            return None
        if waiting is not None:
            return self._starved(waiting, waited_s, f"waits since {waited_s:.0f} s (admission.starvation_s)", now_s)
        what, detail, count = key
        return (
            f"nothing has moved for {waited_s:.0f} s (admission.starvation_s); missing: {what} "
            f"({detail}{f': {count}' if count else ''}); hosts seen: {', '.join(sorted(hosts)) or 'none'}"
        )

    def _missing(self, waiting: Waiting | None, last_version: int) -> tuple[str, str, int] | None:
        """What is missing, in what, and how much of it; None: something is under way."""
        state = self._state
        if state.plans:
            return None
        if waiting is not None:
            return (waiting.rule, waiting.value, waiting.missing)
        if state.version == last_version and state.published < self._last_published(last_version):
            return ("the last version's weights", f"version {last_version}, published {state.published}", 0)
        if state.version == last_version and self._evaluations.waiting and not self._evaluations.leases:
            shares = len(self._evaluations.waiting)
            return ("a rollout host that takes the final evaluation", f"version {last_version}, shares to do", shares)
        return None

    def _run_short(self, short: Waiting, now_s: float) -> str | None:
        """The data set ends in the middle of a train batch. That is no error: it is reported, and the run ends normally."""
        if self._relaxes(short):
            return self._starved(short, 0.0, "lacks prompts: the data set has no more", now_s)
        self.counters["starvations"] += 1
        reason = "the data set ends before the train batch under way is complete (train.epochs)"
        self._report(short, 0.0, reason, now_s)
        return None

    def _starved(self, waiting: Waiting, waited_s: float, why: str, now_s: float) -> str | None:
        """What is missing does not come. All three ways go into the log."""
        state, what = self._state, self._config.admission.on_starvation
        self._since_s = now_s
        if self._relaxes(waiting):
            self._emit(
                ev.Relaxed(
                    time_s=now_s, rule=waiting.rule, value=waiting.value, missing=waiting.missing, kinds=waiting.kinds
                )
            )
            self.counters["relaxed_rules"] += 1
            return None
        if what == "wait":
            self._report(waiting, waited_s, why, now_s)
            self.counters["starvations"] += 1
            return None
        failure = f"; last failure: {state.last_failure}" if state.last_failure else ""
        rigid = "; this rule cannot be relaxed" if what == "relax" else ""
        return (
            f"update {state.admitted_updates} {why} for {waiting}{rigid}; published version {state.published}, "
            f"groups { {name: count for name, count in state.accounts.as_dict().items() if count} }{failure}"
        )

    def _relaxes(self, waiting: Waiting) -> bool:
        return self._config.admission.on_starvation == "relax" and self._state.batch.completion.copy().relax(
            waiting.rule, waiting.value
        )

    def _report(self, waiting: Waiting, waited_s: float, reason: str, now_s: float) -> None:
        figures = {name: getattr(waiting, name) for name in ("rule", "value", "missing", "in_flight")}
        self._emit(ev.Starved(time_s=now_s, **figures, waited_s=waited_s, reason=reason))
