"""The events of a small run, made by hand: every figure of its summary can be added up on paper."""

from pathlib import Path

import msgspec

from knittrans_jax.admission import events as ev
from knittrans_jax.config import Config, parse_config
from knittrans_jax.trajectory import (
    GroupMeta,
    ImagePlacement,
    MediaMeta,
    MiniBatchPlan,
    Placement,
    PlannedGroup,
    TrajectoryMeta,
)

K = 2


def config(tmp_path: Path, **train: object) -> Config:
    return parse_config(
        {
            "name": "made",
            "run_dir": str(tmp_path),
            "task": {"name": "digits-read"},
            "batch": {"groups": 2, "mini_batches": K, "trajectories_per_group": 2},
            "train": {"updates": 6, **train},
        }
    )


def trajectory(reward: float, version: int, done: int) -> TrajectoryMeta:
    """10 tokens, 4 of them sampled by `version`; shows the group's image in two turns."""
    return TrajectoryMeta(
        length_tokens=10,
        sampled_tokens=4,
        reward=reward,
        version_min=version,
        version_max=version,
        version_sum=4 * version,
        turns=2,
        questions=2,
        exact=1,
        media=(0, 0),
        started_s=0.0,
        finished_s=1.0,
        version_done=done,
    )


def group(group_id: int, version: int, done: int) -> GroupMeta:
    return GroupMeta(
        group_id=group_id,
        unit="host0",
        trajectories=(trajectory(1.0, version, done), trajectory(0.0, version, done)),
        media=(MediaMeta(digest=f"image{group_id}", grid_h=4, grid_w=2, size_bytes=128),),
        payload_bytes=388,
    )


def plan(update: int, group_id: int) -> MiniBatchPlan:
    return MiniBatchPlan(
        plan_id=update,
        update=update,
        train_step=update // K,
        mini_batch=update % K,
        groups=(PlannedGroup(group_id=group_id, unit="host0", rewards=(1.0, 0.0), payload_bytes=388),),
        placements=tuple(
            Placement(group=0, trajectory=i, shard=0, row=0, offset=10 * i, length=10, images=(0, 0)) for i in (0, 1)
        ),
        images=(ImagePlacement(f"image{group_id}", 0, 0, 0, 0, 4, 2),),
        shards=1,
        row_tokens=20,
        rows_per_micro_batch=1,
        chunk_micro_batches=1,
        chunks=1,
        encoder_rows_per_shard=1,
        encoder_row_patches=8,
        sampled_tokens=8,
    )


def lease(group_id: int, prompt: str, time_s: float = 1.0) -> ev.Leased:
    return ev.Leased(
        time_s=time_s, group_id=group_id, prompt_id=prompt, epoch=0, attributes={}, host="host0", version=0
    )


def consumed(update: int, time_s: float, compilations: int, fresh: float = 0.0) -> ev.Consumed:
    return ev.Consumed(
        time_s=time_s,
        plan_id=update,
        update=update,
        metrics={"logprob_mismatch": 1e-6 if fresh else float("nan"), "fresh_tokens": fresh},
        waits_s={"data": 0.25, "groups": 0.5},
        pulled_bytes=400,
        unique_bytes=388,
        compilations=compilations,
    )


def rollout(time_s: float, compilations: int) -> ev.RoleReport:
    return ev.RoleReport(time_s=time_s, role="host0", counters={"compilations": compilations})


def events() -> list[ev.AnyEvent]:
    """Six updates of one group each; one group fails and its prompt is leased again, one is still running, one waits."""
    log: list[ev.AnyEvent] = [ev.RunStarted(time_s=0.0, config={}), ev.Published(time_s=0.5, version=0)]
    log += [rollout(0.6, 3), lease(0, "p0"), ev.Failed(time_s=1.5, group_id=0, reason="r", episode_retries=2)]
    for update in range(6):
        one = update + 1
        log += [lease(one, f"p{update}"), ev.Started(time_s=1.6, group_id=one)]
        version = max(0, update - 1)  # sampled by the version before the newest
        log.append(ev.Ready(time_s=2.0, group=group(one, version, update), episode_retries=0))
        log.append(ev.Admitted(time_s=2.0 + update, plan=plan(update, one)))
        log.append(
            consumed(update, 3.0 + update, compilations=10 if update < 5 else 11, fresh=8.0 if update < 2 else 0.0)
        )
        log.append(ev.Published(time_s=3.0 + update, version=update + 1))
        if update == 2:
            log.append(rollout(5.5, 4))
    log += [lease(7, "p7", 9.0), ev.Started(time_s=9.0, group_id=7), lease(8, "p8", 9.0)]
    log += [ev.Started(time_s=9.0, group_id=8), ev.Ready(time_s=9.1, group=group(8, 6, 6), episode_retries=1)]
    for eval_id, version, exact in ((0, 4, 5), (1, 6, 9), (2, 6, 8)):
        log.append(ev.EvalLeased(time_s=9.2, eval_id=eval_id, host="host0", version=version, prompt_ids=("h",)))
        log.append(
            ev.EvalDone(time_s=9.3, eval_id=eval_id, questions=10, exact=exact, reward_sum=1.0, episodes=5, held_s=0.5)
        )
    log += [rollout(9.8, 4), ev.RoleReport(time_s=9.9, role="scheduler", counters={"payload_through_scheduler": 0.0})]
    log.append(ev.RunEnded(time_s=10.0, reason="finished"))
    return log


def every_copy_encoded(made: list[ev.AnyEvent]) -> list[ev.AnyEvent]:
    """As a trainer tells it that encodes every image in every place, and that got 100 bytes from another process."""
    return [
        msgspec.structs.replace(event, metrics=event.metrics | {"patches_encoded": 32.0}, relayed_bytes=100)
        if isinstance(event, ev.Consumed)
        else event
        for event in made
    ]
