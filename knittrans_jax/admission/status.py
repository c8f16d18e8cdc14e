"""What the live table shows: figures by name, the accounts of groups, and what the run waits for."""

from __future__ import annotations

from collections.abc import Mapping

from knittrans_jax.admission.figures import RunFigures
from knittrans_jax.admission.policy import Waiting
from knittrans_jax.admission.state import AdmissionState
from knittrans_jax.admission.training import TrainGroup
from knittrans_jax.config import Config
from knittrans_jax.launch.messages import Status


def live_status(
    config: Config,
    state: AdmissionState,
    figures: RunFigures,
    training: TrainGroup,
    waiting: Waiting | None,
    ending: str | None,
    counters: Mapping[str, float],
    silent_s: Mapping[str, float],
) -> Status:
    """The status; staleness is the mean over all trajectories consumed so far, in updates; waits are sums in seconds."""
    staleness = figures.staleness_means()
    version, questions, exact = figures.heldout
    return Status(
        figures={
            "update": float(state.version),
            "updates": float(config.train.updates),
            "train_step": float(state.version // config.batch.mini_batches),
            "published": float(state.published),
            "reward_mean": figures.rewards[-1] if figures.rewards else 0.0,
            "heldout_exact": exact / questions if questions else 0.0,
            "heldout_questions": float(questions),
            "heldout_version": float(version),
            "gap_mean": staleness.gap,
            "worst_mean": staleness.worst,
            "in_flight_mean": staleness.in_flight,
            "in_queue_mean": staleness.in_queue,
            "architectural_mean": staleness.architectural,
            "wait_data_s": figures.waits_s["data"],
            "wait_groups_s": figures.waits_s["groups"],
            "tokens_per_s": figures.tokens_per_s,
            "payload_pulled": float(figures.pulled_bytes),
            "payload_unique": float(figures.unique_bytes),
            **counters,
        },
        accounts=state.accounts.as_dict(),
        waiting_for=_waits_for(config, state, training, waiting, ending),
        ended=ending,
        silent_s=dict(silent_s),
    )


def _waits_for(
    config: Config, state: AdmissionState, training: TrainGroup, waiting: Waiting | None, ending: str | None
) -> str:
    if ending is not None:
        return "the end"
    if training.incarnation < 0:
        return f"training processes ({len(training.sessions)} of {training.processes} are there)"
    if state.published < 0:
        return "the initial weights"
    if waiting is not None and not state.plans:
        return str(waiting)
    if state.version == config.train.updates:
        return "the final evaluation" if state.published == state.version else "the final weights"
    return f"the trainer (update {state.version})" if state.plans else "rollout hosts"
