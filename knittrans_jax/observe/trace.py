"""`trace.json`: the lives of groups and trajectories and the trainer's time, in Chrome's trace format; opens in Perfetto.

What it guarantees:

* bounded: groups and trajectories are those that the lives keep (`knittrans_jax.observe.lives`), updates are all of them up to
  `MAX_UPDATES`, else those of the kept train steps; what was left out is said in `otherData` and in the tracks' names;
* every slice is a complete event (`X`), in microseconds since the run's first event; slices of one track never overlap, or lie
  one inside the other;
* the same log gives the same file.

Tracks: the trainer (updates, waits for groups, waits for payload, published versions, groups under way as a counter); groups,
one lane for each that is open at a time, with its accounts leased, running, ready, admitted inside; trajectories by host, one
lane for each that is being sampled; evaluations.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from knittrans_jax.observe.history import RunHistory
from knittrans_jax.observe.lives import GroupLife
from knittrans_jax.observe.record import UpdateRecord

TRAINER, GROUPS, EVALUATIONS, HOSTS = 1, 2, 3, 10
"""Process numbers of the trace; rollout hosts follow from `HOSTS` on."""
MAX_UPDATES = 8_000
OPEN_ACCOUNTS = ("leased", "running", "ready", "admitted")

Event = dict[str, Any]


def trace(history: RunHistory) -> bytes:
    """The file."""
    lives, figures = history.lives, history.record.figures
    start_s, end_s = figures.start_s or 0.0, figures.last_s
    groups = [life for _, step in sorted(lives.by_step.items()) for life in step]
    updates = _kept_updates(history)
    kept = f"{lives.kept:,} of {lives.groups:,} groups" if lives.left_out else f"all {lives.groups:,} groups"
    events = [
        *_trainer(updates, history, start_s),
        *_groups(groups, kept, start_s, end_s),
        *_trajectories(groups, kept, start_s),
        *_evaluations(history, start_s),
    ]
    other = {
        "run": history.record.config.name,
        "groups": lives.said(),
        "groups_left_out": lives.left_out,
        "updates": f"{len(updates):,} of {len(history.updates):,} updates",
        "updates_left_out": len(history.updates) - len(updates),
        "evaluations_left_out": lives.evaluations_left_out,
        "waits": "A wait is drawn before its update; what of it came within the update is in the update's arguments only.",
    }
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}) + b"\n"


def _kept_updates(history: RunHistory) -> list[UpdateRecord]:
    if len(history.updates) <= MAX_UPDATES:
        return history.updates
    kept = [one for one in history.updates if one.train_step in history.lives.by_step]
    return kept[:: 1 + (len(kept) - 1) // MAX_UPDATES]


def _trainer(updates: Sequence[UpdateRecord], history: RunHistory, start_s: float) -> Iterable[Event]:
    left = len(history.updates) - len(updates)
    yield from _process(TRAINER, f"trainer ({left:,} updates left out)" if left else "trainer")
    for track, name in ((1, "updates"), (2, "waits for groups"), (3, "waits for payload")):
        yield _name(TRAINER, track, name)
    wanted = {one.update for one in updates}
    free_s = 0.0
    for one in updates:
        began_s = max(free_s, one.time_s - (one.metrics.get("update_s") or 0.0))
        arguments = {
            "train_step": one.train_step,
            "mini_batch": one.mini_batch,
            "reward_mean": one.reward_mean,
            "staleness": one.staleness,
            "waits_s": one.waits_s,
            "payload_pulled": one.payload_pulled,
        }
        at_s = began_s
        for track, key in ((3, "data"), (2, "groups")):  # backwards from the update: groups are waited for first
            begin_s = max(free_s, at_s - one.waits_s.get(key, 0.0))
            if at_s > begin_s:
                yield _slice(TRAINER, track, f"wait for {key}", begin_s, at_s, {"update": one.update})
            at_s = begin_s
        yield _slice(TRAINER, 1, f"update {one.update}", began_s, one.time_s, arguments)
        counts = {name: one.accounts.get(name, 0) for name in OPEN_ACCOUNTS}
        yield {"ph": "C", "pid": TRAINER, "name": "groups under way", "ts": _us(one.time_s), "args": counts}
        free_s = one.time_s
    for time_s, version in history.published:
        if version in wanted or version == 0:
            yield {
                "ph": "i", "s": "p", "pid": TRAINER, "tid": 1, "name": f"version {version} published",
                "ts": _us(time_s - start_s), "cat": "version",
            }  # fmt: skip


def _groups(groups: Sequence[GroupLife], kept: str, start_s: float, end_s: float) -> Iterable[Event]:
    yield from _process(GROUPS, f"groups ({kept})")
    spans = [(life.leased_s - start_s, (end_s if life.ended_s is None else life.ended_s) - start_s) for life in groups]
    chosen = lanes(spans)
    yield from (_name(GROUPS, lane, f"lane {lane}") for lane in range(1, max(chosen, default=0) + 1))
    for life, lane, (begin_s, until_s) in zip(groups, chosen, spans, strict=True):
        arguments: Event = {
            "prompt": life.prompt_id,
            "attributes": life.attributes,
            "host": life.host,
            "version": life.version,
            "account": str(life.account),
        }
        if life.update is not None:
            arguments |= {"update": life.update + 1, "mini_batch": life.mini_batch}
        if life.reason:
            arguments["reason"] = life.reason
        yield _slice(GROUPS, lane, f"group {life.group_id}", begin_s, until_s, arguments)
        for account, phase_s, phase_end_s in life.phases(end_s):
            yield _slice(GROUPS, lane, str(account), phase_s - start_s, phase_end_s - start_s, {})


def _trajectories(groups: Sequence[GroupLife], kept: str, start_s: float) -> Iterable[Event]:
    hosts = {host: HOSTS + index for index, host in enumerate(sorted({life.host for life in groups}))}
    for host, pid in hosts.items():
        yield from _process(pid, f"trajectories on {host} (of {kept})")
        rows = [(life, i, one) for life in groups if life.host == host for i, one in enumerate(life.trajectories)]
        spans = [(one.started_s - start_s, max(one.started_s, one.finished_s) - start_s) for _, _, one in rows]
        chosen = lanes(spans)
        yield from (_name(pid, lane, f"lane {lane}") for lane in range(1, max(chosen, default=0) + 1))
        for (life, index, one), lane, (begin_s, until_s) in zip(rows, chosen, spans, strict=True):
            arguments = {
                "group": life.group_id,
                "tokens": one.length_tokens,
                "sampled": one.sampled_tokens,
                "reward": one.reward,
                "versions": [one.version_min, one.version_max],
            }
            yield _slice(pid, lane, f"{life.group_id}.{index}", begin_s, until_s, arguments)


def _evaluations(history: RunHistory, start_s: float) -> Iterable[Event]:
    done = [
        (one, one.leased_s - start_s, one.done_s - start_s)
        for one in history.lives.evaluations
        if one.done_s is not None
    ]
    if not done:
        return
    yield from _process(EVALUATIONS, "evaluations")
    for (one, begin_s, until_s), lane in zip(done, lanes([span[1:] for span in done]), strict=True):
        arguments = {"host": one.host, "result": one.result}
        yield _slice(EVALUATIONS, lane, f"version {one.version}", begin_s, until_s, arguments)


def lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """A lane (from 1) for every span, so that spans of one lane do not overlap; the fewest lanes that allow it."""
    result = [0] * len(spans)
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    count = 0
    for index in sorted(range(len(spans)), key=lambda i: spans[i]):
        begin, end = _us(spans[index][0]), _us(spans[index][1])
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            count += 1
            free.append(count)
        result[index] = heapq.heappop(free)
        heapq.heappush(busy, (max(end, begin + 1), result[index]))
    return result


def _slice(pid: int, track: int, name: str, begin_s: float, end_s: float, arguments: Event) -> Event:
    begin, end = _us(begin_s), _us(end_s)
    event: Event = {"ph": "X", "pid": pid, "tid": track, "name": name, "ts": begin, "dur": max(0, end - begin)}
    return event | {"args": arguments} if arguments else event


def _process(pid: int, name: str) -> Iterable[Event]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}


def _name(pid: int, track: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": track, "name": "thread_name", "args": {"name": name}}


def _us(time_s: float) -> int:
    return round(time_s * 1e6)
