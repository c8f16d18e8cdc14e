"""The typed events of a run. The scheduler's state is a fold over them; the log on disk is nothing else.

Every event carries `time_s`, the scheduler's clock. Ids (`group_id`, `plan_id`) are issued by the scheduler and never reused.
"""

from __future__ import annotations

import msgspec

from knittrans_jax.trajectory import GroupMeta, MiniBatchPlan


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """Base of all events. Encoded as an array: name, then the fields in order; a new field goes to the end, with a default."""

    time_s: float


class RunStarted(Event, frozen=True, kw_only=True):
    """The first event of a log: the resolved configuration, as a plain mapping, so that a log explains itself."""

    config: dict


class Resumed(Event, frozen=True, kw_only=True):
    """The scheduler is back from its log: what was leased or running is lost, for nobody knows of it any more.

    What was ready, admitted or consumed stays what it was; the storage units' inventories then say what of it is gone, by
    events of their own. From which version training goes on, the next `TrainGroupFormed` says. `config`: as in `RunStarted`.
    """

    config: dict
    keeps: bool = False
    """False, in logs of earlier versions: everything open is lost."""
    published: int = -1
    """The version whose weights are still to be had."""


class HostJoined(Event, frozen=True, kw_only=True):
    """A rollout host's engine registered, with the storage unit beside it."""

    host: str
    unit: str


class Leased(Event, frozen=True, kw_only=True):
    """A prompt was leased to a host as a group. `version` is the published version when the gate let it through."""

    group_id: int
    prompt_id: str
    epoch: int
    attributes: dict[str, str]
    host: str
    version: int


class Started(Event, frozen=True, kw_only=True):
    """The host began to sample the group."""

    group_id: int


class Ready(Event, frozen=True, kw_only=True):
    """The group is complete and its payload is in the storage unit."""

    group: GroupMeta
    episode_retries: int


class Failed(Event, frozen=True, kw_only=True):
    """The host gave the group up after its retries."""

    group_id: int
    reason: str
    episode_retries: int


class Filtered(Event, frozen=True, kw_only=True):
    """A finished group was dropped by a filter of the train batch."""

    group_id: int
    reason: str


class Expired(Event, frozen=True, kw_only=True):
    """A lease ran past its deadline on a host that is still there, or a ready group past its staleness bound.

    `retry`: its prompt is leased again.
    """

    group_id: int
    reason: str
    retry: bool = True


class Lost(Event, frozen=True, kw_only=True):
    """A group went with its host or its storage unit; its prompt will be leased again."""

    group_id: int
    reason: str


class Starved(Event, frozen=True, kw_only=True):
    """The trainer has waited for `admission.starvation_s`, or for what cannot come; the run goes on all the same."""

    rule: str
    value: str
    missing: int
    in_flight: int
    waited_s: float
    reason: str


class Relaxed(Event, frozen=True, kw_only=True):
    """A rule of the train batch under way could not be met and was dropped, for this batch (`on_starvation: relax`).

    `kinds`: what would have helped to meet it; the launch gate counts on them no more for this batch.
    """

    rule: str
    value: str
    missing: int
    kinds: tuple[tuple[str, ...], ...]


class TrainGroupFormed(Event, frozen=True, kw_only=True):
    """All training processes registered: messages of older incarnations are refused from here on.

    They begin at `version`, after the update of plan `after_plan` (0 and -1: from the beginning). What was consumed after it
    is not part of the lineage of the parameters: its groups become lost, and their prompts are launched again. Except for the
    `repeated` updates that follow `version`: their mini-batches are served again, which gives the parameters that they gave.
    """

    incarnation: int
    processes: int
    version: int = 0
    after_plan: int = -1
    evaluated: int = -1
    """Newest version up to `lineage` whose evaluation is complete; results of later ones do not count."""
    repeated: int = 0
    """Updates after `version` that stay in the lineage."""

    @property
    def lineage(self) -> int:
        """The version up to which the lineage stays as it was."""
        return self.version + self.repeated


class Admitted(Event, frozen=True, kw_only=True):
    """A mini-batch was chosen and laid out. Its groups leave the ready pool."""

    plan: MiniBatchPlan


class Withdrawn(Event, frozen=True, kw_only=True):
    """A mini-batch that was admitted cannot be trained on, nor can those after it be as they are: none of them begins.

    Their groups are ready again, save the `lost` ones, whose payload is gone; their places in the train batch are open.
    """

    plan_id: int
    lost: tuple[int, ...]
    reason: str


class Consumed(Event, frozen=True, kw_only=True):
    """Every training process applied the update of this plan: version `update` became `update + 1`.

    `metrics` are the trainer's figures of the update (reward, loss, gradient norm, ...), `waits_s` what the slowest process
    waited for (`data`, `groups`), `pulled_bytes` the payload bytes that all processes pulled for it from storage units, and
    `relayed_bytes` those that passed between training processes (`train.transfer: gather`).
    """

    plan_id: int
    update: int
    metrics: dict[str, float]
    waits_s: dict[str, float]
    pulled_bytes: int
    relayed_bytes: int = 0
    unique_bytes: int
    compilations: int
    """Compilations so far, summed over the training processes."""
    compiled: tuple[str, ...] = ()
    """What any of them compiled since the last update, in words: program, shapes."""


class Checkpointed(Event, frozen=True, kw_only=True):
    """A checkpoint of `version`, after the update of plan `plan_id`, is whole; `oldest` is the oldest version kept."""

    version: int
    plan_id: int
    oldest: int
    size_bytes: int
    stall_s: float
    """What it took from the slowest training process's main thread."""


class Published(Event, frozen=True, kw_only=True):
    """A version is whole in the weight store: hosts may load it."""

    version: int


class EvalLeased(Event, frozen=True, kw_only=True):
    """Held-out prompts were leased at a stated version. In an account of their own, never trained on."""

    eval_id: int
    host: str
    version: int
    prompt_ids: tuple[str, ...]


class EvalDone(Event, frozen=True, kw_only=True):
    """An evaluation lease ended. `held_s` is how long the host held its version for it."""

    eval_id: int
    questions: int
    exact: int
    reward_sum: float
    episodes: int
    held_s: float


class EvalExpired(Event, frozen=True, kw_only=True):
    """An evaluation lease ran past its deadline; its prompts are leased again."""

    eval_id: int
    reason: str


class RoleReport(Event, frozen=True, kw_only=True):
    """Counters that a role reports at its end (and on the way): compilations, bytes, tokens, drops."""

    role: str
    counters: dict[str, float]
    compiled: tuple[str, ...] = ()
    """What it compiled since its last report, in words: program, shapes."""


class RunEnded(Event, frozen=True, kw_only=True):
    """The last event: why the run ended (`finished`, `interrupted`, or an error's text)."""

    reason: str


AnyEvent = (
    RunStarted
    | Resumed
    | HostJoined
    | Leased
    | Started
    | Ready
    | Failed
    | Filtered
    | Expired
    | Lost
    | Starved
    | Relaxed
    | TrainGroupFormed
    | Admitted
    | Withdrawn
    | Consumed
    | Checkpointed
    | Published
    | EvalLeased
    | EvalDone
    | EvalExpired
    | RoleReport
    | RunEnded
)


def gives_back(event: AnyEvent) -> bool:
    """Whether this ends a group whose prompt is to be launched again."""
    return isinstance(event, Lost) or (isinstance(event, Expired) and event.retry)
