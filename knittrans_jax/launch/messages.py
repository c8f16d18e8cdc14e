"""The control channel's records: what roles ask the scheduler, and what it answers. No payload is ever among them.

Every exchange is a request by a role and one reply by the scheduler; the scheduler never speaks first. Requests that wait
(`NextPlan`, `ChunkHeld`, `ChunkMissing`, `TrainHello`) are parked and answered when the answer is known, or with a `Wait` after
`control.rpc_timeout_s / 2`, upon which the caller asks again: so every wait has a deadline and a dead peer is noticed.
"""

from __future__ import annotations

import msgspec

from knittrans_jax.trajectory import GroupMeta, MiniBatchPlan


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all control records."""


# --- rollout hosts -------------------------------------------------------------------------------------------------


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Sample `trajectories_per_group` trajectories from a prompt, with weights no older than `least_version`."""

    group_id: int
    prompt_id: str
    least_version: int


class EvalLease(msgspec.Struct, frozen=True, kw_only=True):
    """Run held-out prompts once each, greedily, at exactly `version`; hold that version until all are done."""

    eval_id: int
    version: int
    prompt_ids: tuple[str, ...]


class GroupFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A group given up after `episode_retries` retries."""

    group_id: int
    reason: str
    episode_retries: int


class GroupDone(msgspec.Struct, frozen=True, kw_only=True):
    """A finished group, sent after its payload is in the storage unit."""

    group: GroupMeta
    episode_retries: int


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of an evaluation lease."""

    eval_id: int
    questions: int
    exact: int
    reward_sum: float
    episodes: int
    held_s: float


class EngineSync(Message, frozen=True, kw_only=True):
    """An engine's regular report (at least every second). `free_groups`: how many more groups it could start at once.

    `session`: drawn by the engine's process at its start; with another one, what the host had in flight is gone. `leaving`: it
    takes no more work, and what it has not started goes elsewhere. `left`: this is its last word; what it has not reported done
    is gone.

    `ticket_wanted`: it needs a new ticket for its storage unit (see `knittrans_jax.transfer.tickets`).
    """

    host: str
    unit: str
    version: int
    free_groups: int
    started: tuple[int, ...] = ()
    done: tuple[GroupDone, ...] = ()
    failed: tuple[GroupFailure, ...] = ()
    evals: tuple[EvalResult, ...] = ()
    evals_failed: tuple[int, ...] = ()
    """Evaluation leases that this host cannot run: their version is not to be had any more."""
    counters: dict[str, float] = {}
    ticket_wanted: bool = False
    session: int = 0
    leaving: bool = False
    left: bool = False


class EngineOrders(Message, frozen=True, kw_only=True):
    """The reply: new work, the newest published version (-1: none yet), and whether to end."""

    leases: tuple[Lease, ...] = ()
    evals: tuple[EvalLease, ...] = ()
    published: int = -1
    ticket: bytes | None = None
    unit_address: str | None = None
    stop: bool = False


class StorageSync(Message, frozen=True, kw_only=True):
    """A storage unit's regular report. `address` is its bulk channel's `host:port`."""

    unit: str
    address: str
    held_bytes: int
    held_groups: int
    counters: dict[str, float] = {}
    recovered: tuple[int, ...] | None = None
    """The groups that it holds: in the first report of its process, and when the scheduler asks."""


class StorageOrders(Message, frozen=True, kw_only=True):
    """The reply: the key with which tickets for this unit are checked, groups to release, and whether to end.

    `inventory`: the scheduler does not know what the unit holds; say so in the next report.
    """

    ticket_key: bytes
    release: tuple[int, ...] = ()
    stop: bool = False
    inventory: bool = False


# --- training processes ----------------------------------------------------------------------------------------------


class TrainHello(Message, frozen=True, kw_only=True):
    """A training process registers. Answered with `TrainWelcome` when all `processes` have.

    Its parameters are at `version`, after the update of plan `after_plan`, from a checkpoint (0 and -1: the initial ones).
    `session`: drawn by the process at its start; another one is another process.
    """

    process: int
    processes: int
    session: int
    relay: str | None = None
    """`host:port` from which the other processes get their payloads (`train.transfer: gather`), as unit `train<process>`."""
    version: int = 0
    after_plan: int = -1
    weights: str | None = None
    """`host:port` from which rollout hosts get this process's weights (`weights.transfer: bulk`)."""


class TrainWelcome(Message, frozen=True, kw_only=True):
    """All training processes are there: the group's incarnation. It begins at the version that they named."""

    incarnation: int
    ticket_key: bytes | None = None
    """For a process that relays or serves weights: the key with which tickets for it are checked."""
    published: int = -1
    """The newest version that was published: the group publishes nothing until it is at a newer one."""


class NextPlan(Message, frozen=True, kw_only=True):
    """Asks for the plan after `after_plan` (-1: the first)."""

    process: int
    incarnation: int
    after_plan: int


class PlanReply(Message, frozen=True, kw_only=True):
    """The next plan, with bulk addresses and tickets by storage unit; or `plan=None`: there will be no further one.

    `complete`: because every update of the run has been planned, not because it was broken off. `checkpoint`: take one after
    this plan's update, with which a train batch ends, whether or not it is due.
    """

    plan: MiniBatchPlan | None
    complete: bool = False
    checkpoint: bool = False
    units: dict[str, str] = {}
    tickets: dict[str, bytes] = {}


class ChunkHeld(Message, frozen=True, kw_only=True):
    """This process holds its rows of a chunk (chunk 0: and its images). Answered with `Go` when all processes do.

    When the run ends before that, the answer is `PlanReply(plan=None)`, to all of them; when the plan is withdrawn, `Dropped`.
    """

    process: int
    incarnation: int
    plan_id: int
    chunk: int


class ChunkMissing(Message, frozen=True, kw_only=True):
    """This process cannot bring its rows of a chunk from `unit` at `address`: `reason` says why.

    Answered with a `PlanReply` of the plan when the unit is to be had elsewhere, or with `Dropped`. `gone`: the unit answers,
    and does not hold them.
    """

    process: int
    incarnation: int
    plan_id: int
    chunk: int
    unit: str
    address: str
    reason: str
    gone: bool = False


class Dropped(Message, frozen=True, kw_only=True):
    """The plan was withdrawn: no process launches this chunk or a later one; go on with the next plan."""

    plan_id: int


class Go(Message, frozen=True, kw_only=True):
    """Launch the chunk's program."""


class UpdateDone(Message, frozen=True, kw_only=True):
    """This process applied the update of `plan_id`; its parameters are now at `version`. `metrics` from process 0 count."""

    process: int
    incarnation: int
    plan_id: int
    version: int
    metrics: dict[str, float]
    waits_s: dict[str, float]
    pulled_bytes: int
    """Payload bytes from storage units to this process; `relayed_bytes`: to it from another training process."""
    relayed_bytes: int = 0
    compilations: int
    compiled: tuple[str, ...] = ()
    """What was compiled since the last update, in words."""


class CheckpointDone(Message, frozen=True, kw_only=True):
    """A checkpoint that this process took part in is whole: of `version`, after plan `plan_id`; `oldest` is the oldest kept."""

    process: int
    incarnation: int
    version: int
    plan_id: int
    oldest: int
    size_bytes: int
    stall_s: float
    """What saving it took from this process's main thread."""


class WeightsWritten(Message, frozen=True, kw_only=True):
    """This process's shards of `version` are whole in the weight store."""

    process: int
    incarnation: int
    version: int


class ServeWeights(Message, frozen=True, kw_only=True):
    """This process has no further plan, and serves weights until the run ends. Answered with `Ack` then."""

    process: int
    incarnation: int


class WeightsWanted(Message, frozen=True, kw_only=True):
    """A rollout host asks from whom to bring a version; others may bring it from the host itself, at `address`.

    -1: none yet, it only says where it is. `failed`: the host that was its source for this version, and did not serve it.
    """

    host: str
    address: str
    version: int
    failed: str | None = None


class WeightsFrom(Message, frozen=True, kw_only=True):
    """The reply: addresses and tickets of a host's weight server, or of all training processes'; none: ask again later.

    `key`: with which tickets for the asking host's own server are checked. `source`: the host, None: the training group.
    """

    key: bytes
    incarnation: int = -1
    source: str | None = None
    units: dict[str, str] = {}
    tickets: dict[str, bytes] = {}


# --- everyone ----------------------------------------------------------------------------------------------------------


class Report(Message, frozen=True, kw_only=True):
    """Counters that a role hands in, at its end at the latest."""

    role: str
    counters: dict[str, float]
    compiled: tuple[str, ...] = ()
    """What was compiled since the last report, in words."""


class Beat(Message, frozen=True, kw_only=True):
    """This training process is alive, whatever its main thread does."""

    process: int


class StatusRequest(Message, frozen=True, kw_only=True):
    """Asks for the live status (the launcher's table)."""


class Status(Message, frozen=True, kw_only=True):
    """What the live table shows; figures by name, and the accounts of groups."""

    figures: dict[str, float]
    accounts: dict[str, int]
    waiting_for: str
    ended: str | None = None
    """Why the run ended, once every role may go."""
    silent_s: dict[str, float] = {}
    """For how long nothing was heard of each role (its process's name), those that have been told to end left out."""


class Shutdown(Message, frozen=True, kw_only=True):
    """Asks the scheduler to end the run in an orderly way."""

    reason: str


class Ack(Message, frozen=True, kw_only=True):
    """Received and durable."""


class Wait(Message, frozen=True, kw_only=True):
    """Not known yet: ask again."""


class Refused(Message, frozen=True, kw_only=True):
    """The request was not accepted; `reason` says why and what to do."""

    reason: str


Request = (
    EngineSync
    | StorageSync
    | TrainHello
    | NextPlan
    | ChunkHeld
    | ChunkMissing
    | UpdateDone
    | CheckpointDone
    | WeightsWritten
    | ServeWeights
    | WeightsWanted
    | Report
    | Beat
    | StatusRequest
    | Shutdown
)
Reply = (
    EngineOrders | StorageOrders | TrainWelcome | PlanReply | Go | Dropped | WeightsFrom | Status | Ack | Wait | Refused
)
