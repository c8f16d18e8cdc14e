"""A small model of rollout hosts, storage units and training processes that drives `SchedulerCore` in virtual time.

Everything random comes from a `random.Random` or from hypothesis through `Choices`, so a failing case is reproducible.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.scheduler import SchedulerCore, Step
from knittrans_jax.config import Config, parse_config
from knittrans_jax.launch import messages as msg
from knittrans_jax.trajectory import GroupMeta, MediaMeta, TrajectoryMeta
from knittrans_jax.transfer.plan import layout_mini_batch

N = 2
GROUP_BYTES = 1000
QUOTAS = {"domain": {"a": {"min": 2, "max": 5}, "b": {"min": 0.25, "max": 0.25}}}
COUNTS = {"a": 10, "b": 6, "c": 9}


def make_config(**changes: object) -> Config:
    """A small run; `changes` are dotted keys with `__` for the dot."""
    raw: dict = {
        "name": "model",
        "task": {"name": "none"},
        "batch": {"groups": 8, "mini_batches": 4, "trajectories_per_group": N},
        "train": {"updates": 12, "publish": "update"},
        "rollout": {"storage_bytes": 100 * GROUP_BYTES, "slots": 8},
        "eval": {"every_updates": 4, "prompts": 3, "final_prompts": 5},
    }
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        node = raw
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return parse_config(raw)


def make_prompts(counts: Mapping[str, int], attribute: str = "domain") -> list[tuple[str, dict[str, str]]]:
    """`counts[v]` prompts of value `v`."""
    return [(f"{value}-{i}", {attribute: value}) for value, count in counts.items() for i in range(count)]


def make_core(
    config: Config,
    prompts: list[tuple[str, dict[str, str]]],
    heldout: int = 6,
    history: Sequence[ev.AnyEvent] = (),
) -> SchedulerCore:
    return SchedulerCore(
        config,
        train_prompts=prompts,
        heldout_prompts=[f"held-{i}" for i in range(heldout)],
        layout=functools.partial(
            layout_mini_batch,
            shards=config.data_shards,
            row_tokens=config.train.row_tokens,
            micro_batch_rows=config.train.micro_batch_rows,
            chunk_micro_batches=config.train.chunk_micro_batches,
            encoder_row_patches=config.train.encoder_row_patches,
        ),
        group_bytes=GROUP_BYTES,
        ticket_key=bytes(32),
        new_nonce=lambda: bytes(16),
        history=history,
    )


def make_group(group_id: int, unit: str, versions: tuple[int, ...], done: int, reward: float = 0.5) -> GroupMeta:
    """A finished group; trajectory `i` was sampled by `versions[i]` alone."""
    return GroupMeta(
        group_id=group_id,
        unit=unit,
        trajectories=tuple(
            TrajectoryMeta(
                length_tokens=20,
                sampled_tokens=5,
                reward=reward,
                version_min=version,
                version_max=version,
                version_sum=5 * version,
                turns=1,
                questions=1,
                exact=1,
                media=(0,),
                started_s=0.0,
                finished_s=1.0,
                version_done=done,
            )
            for version in versions
        ),
        media=(MediaMeta(digest=f"{group_id:032x}", grid_h=2, grid_w=2, size_bytes=48),),
        payload_bytes=500,
    )


@dataclasses.dataclass
class ModelHost:
    """An engine and its unit. It loads what is published some time later, between groups (`swap` is not modelled)."""

    name: str
    slots: int
    version: int = -1
    published: int = -1
    """The newest version that it has heard of."""
    queue: list[msg.Lease] = dataclasses.field(default_factory=list)
    running: dict[int, int] = dataclasses.field(default_factory=dict)
    """Version at the start, by group."""
    evals: list[msg.EvalLease] = dataclasses.field(default_factory=list)
    stored: set[int] = dataclasses.field(default_factory=set)
    inventory: bool = True
    """Whether the unit's next report says what it holds."""
    session: int = 0
    unit_starts: int = 0

    def kill_engine(self) -> None:
        """Its process is another one from now on, and knows nothing."""
        self.session += 1
        self.version = -1
        self.queue, self.running, self.evals = [], {}, []

    def kill_unit(self, *, keeps: bool) -> None:
        """Its process is another one, at another address; what it held is there on disk, or gone."""
        self.unit_starts += 1
        self.inventory = True
        if not keeps:
            self.stored.clear()

    stopped: bool = False
    dead: bool = False
    most_stored: int = 0


class Model:
    """Drives a core. Each `act_*` is one thing that can happen next; any order of them is a legal life of the system."""

    def __init__(
        self,
        core: SchedulerCore,
        *,
        hosts: int = 2,
        slots: int = 4,
        seed: int = 0,
        after_step: Callable[[Model], None] | None = None,
        now_s: float = 1000.0,
    ) -> None:
        self.core = core
        self.random = random.Random(seed)
        self.now_s = now_s
        self.events: list[ev.AnyEvent] = []
        self.hosts = [ModelHost(f"host{i}", slots) for i in range(hosts)]
        self.after_step = after_step
        self.processes = core.config.train.processes
        self.version = 0
        self.incarnation = -1
        self.plan: msg.PlanReply | None = None
        self.after_plan = -1
        self.checkpoints: list[tuple[int, int]] = []
        """(version, after plan) on disk, oldest first; two are kept."""
        self.published_before = -1
        self.trainer_done = False
        self.plans: list[msg.PlanReply] = []
        self.payload_may_go = False
        """Units may lose what they held."""
        self._answers: dict[object, msg.Reply] = {}
        self._token = 0
        self._take(core.start(self.now_s))

    # --- plumbing ------------------------------------------------------------------------------------------------------

    def _take(self, step: Step) -> None:
        self.events.extend(step.events)
        for token, reply in step.replies:
            assert token not in self._answers, "one reply per request"
            self._answers[token] = reply
        if self.after_step is not None:
            self.after_step(self)

    def send(self, request: msg.Request) -> int:
        self._token += 1
        self._take(self.core.handle(self._token, request, self.now_s))
        return self._token

    def answer(self, token: int) -> msg.Reply | None:
        return self._answers.pop(token, None)

    def ask(self, request: msg.Request) -> msg.Reply | None:
        """The reply, or None when the request is parked."""
        return self.answer(self.send(request))

    def tick(self, seconds: float = 0.05) -> None:
        self.now_s += seconds
        self._take(self.core.tick(self.now_s))

    # --- hosts -----------------------------------------------------------------------------------------------------------

    def sync(self, host: ModelHost, finish: int = 10**9, fail: int = 0) -> None:
        """The engine reports: starts what it holds, finishes up to `finish` groups in random order, fails `fail`."""
        if host.dead or host.stopped:
            return
        done, failed, started = [], [], []
        running = list(host.running)
        self.random.shuffle(running)
        for group_id in running[:fail]:
            del host.running[group_id]
            failed.append(msg.GroupFailure(group_id=group_id, reason="model", episode_retries=1))
        for group_id in running[fail : fail + finish]:
            version = host.running.pop(group_id)
            host.stored.add(group_id)
            host.most_stored = max(host.most_stored, len(host.stored))
            meta = make_group(group_id, host.name, (version,) * N, host.version)
            done.append(msg.GroupDone(group=meta, episode_retries=0))
        for lease in list(host.queue):
            if len(host.running) < host.slots and host.version >= lease.least_version:
                host.queue.remove(lease)
                host.running[lease.group_id] = host.version
                started.append(lease.group_id)
        evals = [
            msg.EvalResult(
                eval_id=lease.eval_id,
                questions=len(lease.prompt_ids),
                exact=1,
                reward_sum=1.0,
                episodes=len(lease.prompt_ids),
                held_s=0.5,
            )
            for lease in host.evals
        ]
        host.evals = []
        orders = self.ask(
            msg.EngineSync(
                host=host.name,
                unit=host.name,
                version=host.version,
                free_groups=max(0, host.slots - len(host.running) - len(host.queue)),
                started=tuple(started),
                done=tuple(done),
                failed=tuple(failed),
                evals=tuple(evals),
                session=host.session,
            )
        )
        assert isinstance(orders, msg.EngineOrders)
        host.queue.extend(orders.leases)
        host.evals.extend(orders.evals)
        host.published = orders.published
        if host.version < 0 or self.random.random() < 0.5:
            host.version = host.published
        host.stopped = orders.stop

    def store(self, host: ModelHost) -> None:
        """The storage unit reports and releases."""
        orders = self.ask(
            msg.StorageSync(
                unit=host.name,
                address=f"127.0.0.1:{host.name}" + f".{host.unit_starts}" * (host.unit_starts > 0),
                held_bytes=0,
                held_groups=len(host.stored),
                recovered=tuple(host.stored) if host.inventory else None,
            )
        )
        assert isinstance(orders, msg.StorageOrders)
        host.inventory = orders.inventory
        host.stored -= set(orders.release)

    # --- trainer ---------------------------------------------------------------------------------------------------------

    def hello(self, version: int = 0, after_plan: int = -1, session: int = 100) -> None:
        """The training processes register, with what they restored; `session`: of the first."""
        self.version, self.after_plan = version, after_plan
        tokens = [
            self.send(
                msg.TrainHello(
                    process=p, processes=self.processes, session=session + p, version=version, after_plan=after_plan
                )
            )
            for p in range(self.processes)
        ]
        for token in tokens:
            welcome = self.answer(token)
            assert isinstance(welcome, msg.TrainWelcome)
            self.incarnation, self.published_before = welcome.incarnation, welcome.published
        self.write(version)

    def write(self, version: int) -> None:
        for process in range(self.processes if version > self.published_before else 0):
            request = msg.WeightsWritten(process=process, incarnation=self.incarnation, version=version)
            assert isinstance(self.ask(request), msg.Ack)

    def train(self) -> bool:
        """One whole update, if a plan is there."""
        tokens = [
            self.send(msg.NextPlan(process=p, incarnation=self.incarnation, after_plan=self.after_plan))
            for p in range(self.processes)
        ]
        replies = [self.answer(token) for token in tokens]
        if None in replies:
            assert replies == [None] * self.processes
            return False
        first = replies[0]
        assert isinstance(first, msg.PlanReply)
        assert all(isinstance(reply, msg.PlanReply) and reply.plan == first.plan for reply in replies)
        plan = first.plan
        if plan is None:
            self.trainer_done = True
            return False
        assert plan.update == self.version
        stored = {host.name: host.stored for host in self.hosts}
        gone = [group.unit for group in plan.groups if group.group_id not in stored[group.unit]]
        if gone:
            assert self.payload_may_go, f"plan {plan.plan_id} misses groups of {gone}"
            self.drop(first, gone[0])
            return False
        for chunk in range(plan.chunks):
            held = [
                self.send(msg.ChunkHeld(process=p, incarnation=self.incarnation, plan_id=plan.plan_id, chunk=chunk))
                for p in range(self.processes)
            ]
            assert [self.answer(token) for token in held] == [msg.Go()] * self.processes
        self.plans.append(first)
        self.after_plan = plan.plan_id
        self.version += 1
        for process in range(self.processes):
            assert isinstance(
                self.ask(
                    msg.UpdateDone(
                        process=process,
                        incarnation=self.incarnation,
                        plan_id=plan.plan_id,
                        version=self.version,
                        metrics={"loss": 0.1},
                        waits_s={"data": 0.1, "groups": 0.2},
                        pulled_bytes=10,
                        compilations=3,
                    )
                ),
                msg.Ack,
            )
        every = self.core.config.batch.mini_batches if self.core.config.train.publish == "train_batch" else 1
        if self.version % every == 0:
            self.write(self.version)
        self.checkpoint(forced=first.checkpoint)
        return True

    def drop(self, reply: msg.PlanReply, unit: str) -> None:
        """The first process finds a unit without its rows, the others hold theirs: nobody goes, and all are told so."""
        plan = reply.plan
        assert plan is not None
        ids = {"incarnation": self.incarnation, "plan_id": plan.plan_id, "chunk": 0}
        missing = msg.ChunkMissing(process=0, **ids, unit=unit, address=reply.units[unit], reason="gone", gone=True)
        tokens = [self.send(msg.ChunkHeld(process=p, **ids)) for p in range(1, self.processes)]
        tokens.append(self.send(missing))
        self.tick()
        answers = [self.answer(token) for token in tokens]
        if isinstance(answers[-1], msg.Refused):  # it is repeated, and cannot be: the training group begins anew
            self.hello(*(self.checkpoints[-1] if self.checkpoints else (0, -1)), session=self.random.getrandbits(40))
        else:
            assert answers == [msg.Dropped(plan_id=plan.plan_id)] * self.processes

    def checkpoint(self, forced: bool = False) -> None:
        """Takes one where it is due, or the scheduler says so."""
        config = self.core.config
        every = config.checkpoint.every_train_batches * config.batch.mini_batches
        assert not forced or self.version % config.batch.mini_batches == 0
        if not forced and (not every or self.version % every):
            return
        self.checkpoints = [*self.checkpoints, (self.version, self.after_plan)][-2:]
        for process in range(self.processes):
            request = msg.CheckpointDone(
                process=process,
                incarnation=self.incarnation,
                version=self.version,
                plan_id=self.after_plan,
                oldest=self.checkpoints[0][0],
                size_bytes=1,
                stall_s=0.0,
            )
            assert isinstance(self.ask(request), msg.Ack)

    # --- whole runs --------------------------------------------------------------------------------------------------------

    def run(self, rounds: int = 3000, fail_rate: float = 0.0) -> None:
        """Lets everything happen in random order until the run has ended; fails when it does not."""
        self.hello()
        self.go_on(rounds, fail_rate)
        assert self.core.finished, f"no end after {rounds} rounds: {self.core.status()}"

    def go_on(self, rounds: int, fail_rate: float = 0.0) -> None:
        """So many things happen in random order, or until the run has ended."""
        for _ in range(rounds):
            if self.core.finished:
                return
            what = self.random.random()
            host = self.random.choice(self.hosts)
            if what < 0.55:
                self.sync(host, finish=self.random.randint(0, 3), fail=int(self.random.random() < fail_rate))
            elif what < 0.75:
                self.store(host)
            elif what < 0.95:
                if not self.trainer_done:
                    self.train()
            else:
                self.tick(0.5)
                self._answers.clear()


# --- the beginning of a run, and single reports ---------------------------------------------------------------------------


def check_every_step(model: Model) -> None:
    """Accounts add up, and what is admitted, launched and stored stays within its bounds, at every moment."""
    core = model.core
    state, config = core.state, core.config
    state.accounts.check()
    assert state.accounts.issued == sum(state.accounts.counts.values())
    assert len(state.plans) <= 1 + config.admission.admit_ahead
    if state.published >= 0:
        assert state.accounts.live <= core.gate.total_limit(state.published)
    for host in getattr(model, "hosts", ()):
        assert len(host.stored) <= core.desk.room.capacity


def begun(**changes: object) -> Model:
    """A run whose trainer is there and whose version 0 is out; two hosts that have not spoken yet."""
    model = Model(make_core(make_config(**changes), make_prompts(COUNTS)), after_step=check_every_step)
    model.hello()
    return model


def lease_all(model: Model, host: ModelHost) -> list[int]:
    model.sync(host)
    model.store(host)
    model.sync(host, finish=0)
    return list(host.running)


def sync_of(host: ModelHost, **changes: object) -> msg.EngineSync:
    fields: dict = {"host": host.name, "unit": host.name, "version": 0, "free_groups": 0} | changes
    return msg.EngineSync(**fields)


def done(group_id: int, unit: str = "host0", **changes: object) -> msg.GroupDone:
    fields: dict = {"versions": (0, 0), "done": 0} | changes
    return msg.GroupDone(group=make_group(group_id, unit, **fields), episode_retries=0)


def with_plan(**changes: object) -> tuple[Model, msg.PlanReply]:
    """A run whose first mini-batch is admitted and asked for by both processes."""
    model = begun(**changes)
    host = model.hosts[0]
    lease_all(model, host)
    model.sync(host)
    replies = [model.ask(msg.NextPlan(process=p, incarnation=0, after_plan=-1)) for p in range(2)]
    assert isinstance(replies[0], msg.PlanReply)
    return model, replies[0]


def update_done(process: int, plan_id: int, version: int) -> msg.UpdateDone:
    return msg.UpdateDone(
        process=process,
        incarnation=0,
        plan_id=plan_id,
        version=version,
        metrics={"from": float(process)},
        waits_s={"data": 1.0 + process},
        pulled_bytes=100,
        compilations=2,
    )
