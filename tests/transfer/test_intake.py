"""What a finished group must be before it is stored; each violation is named by trajectory and turn."""

import time

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from knittrans_jax.models.positions import mrope_positions
from knittrans_jax.rollout.putter import GroupPutter
from knittrans_jax.rollout.runs import FinishedGroup
from knittrans_jax.trajectory import GroupMeta, GroupPayload, MediaMeta, Trajectory, TrajectoryMeta
from knittrans_jax.transfer.intake import IntakeError, IntakeSpec, check_group, check_placeholders

IMAGE, PATCH, MERGE = 3, 4, 2
SPEC = IntakeSpec(patch_size=PATCH, merge_size=MERGE, image_token_id=IMAGE)
GRIDS = ((2, 2), (2, 4), (4, 4))


def trajectory(turns: list[list[int]]) -> Trajectory:
    """Turns that show these pictures (indices of `GRIDS`), each with text before, between and after, and two sampled tokens."""
    tokens: list[int] = []
    sampled: list[bool] = []
    for pictures in turns:
        shown = [10]
        for picture in pictures:
            shown += [IMAGE] * (GRIDS[picture][0] * GRIDS[picture][1] // MERGE**2) + [11]
        tokens += [*shown, 12, 13]
        sampled += [False] * len(shown) + [True] * 2
    return of_tokens(tokens, sampled)


def of_tokens(tokens: list[int], sampled: list[bool]) -> Trajectory:
    mask = np.array(sampled)
    return Trajectory(
        tokens_T=np.array(tokens, np.int32),
        sampled_T=mask,
        behaviour_logprobs_T=np.zeros(len(tokens), np.float32),
        versions_T=np.where(mask, 0, -1).astype(np.int32),
    )


def group(members: list[list[list[int]]]) -> tuple[GroupMeta, GroupPayload]:
    rows = [trajectory(turns) for turns in members]
    media = [MediaMeta(digest=f"picture{i}", grid_h=h, grid_w=w, size_bytes=1) for i, (h, w) in enumerate(GRIDS)]
    metas = [
        TrajectoryMeta(
            length_tokens=len(row.tokens_T),
            sampled_tokens=int(row.sampled_T.sum()),
            reward=0.0,
            version_min=0,
            version_max=0,
            version_sum=0,
            turns=len(turns),
            questions=1,
            exact=0,
            media=tuple(picture for pictures in turns for picture in pictures),
            started_s=0.0,
            finished_s=1.0,
            version_done=0,
        )
        for row, turns in zip(rows, members, strict=True)
    ]
    meta = GroupMeta(group_id=7, unit="host0", trajectories=tuple(metas), media=tuple(media), payload_bytes=1)
    pixels = {m.digest: np.zeros((m.grid_h * PATCH, m.grid_w * PATCH, 1), np.uint8) for m in media}
    return meta, GroupPayload(group_id=7, trajectories=tuple(rows), media=pixels)


pictures_of_turns = st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=4)


@given(st.lists(pictures_of_turns, min_size=1, max_size=3))
def test_a_group_as_the_engine_assembles_it_passes(members: list[list[list[int]]]) -> None:
    check_group(*group(members), SPEC)


@given(pictures_of_turns, st.data())
def test_it_refuses_exactly_what_packing_could_not_lay_out(turns: list[list[int]], data: st.DataObject) -> None:
    """Placeholders put in, taken out, or cut off anywhere: refused if and only if positions cannot be given."""
    row = trajectory(turns)
    tokens, sampled = row.tokens_T.tolist(), row.sampled_T.tolist()
    at = data.draw(st.integers(0, len(tokens) - 1))
    match data.draw(st.sampled_from(["insert", "remove", "cut"])):
        case "insert":
            tokens, sampled = [*tokens[:at], IMAGE, *tokens[at:]], [*sampled[:at], False, *sampled[at:]]
        case "remove":
            del tokens[at], sampled[at]
        case _:
            tokens, sampled = tokens[:at], sampled[:at]
    if not tokens:
        return
    shown = [GRIDS[picture] for pictures in turns for picture in pictures]
    try:
        mrope_positions(tokens, shown, IMAGE, MERGE)
    except ValueError:
        with pytest.raises(IntakeError, match=r"^turn \d+: "):
            check_placeholders(of_tokens(tokens, sampled), shown, SPEC)
    else:
        check_placeholders(of_tokens(tokens, sampled), shown, SPEC)


def test_violations_name_trajectory_and_turn() -> None:
    meta, payload = group([[[0]], [[0], [2, 1]]])
    row = payload.trajectories[1]

    def refused(changed: Trajectory, pattern: str) -> None:
        described = msgspec.structs.replace(
            meta.trajectories[1],
            length_tokens=len(changed.tokens_T),
            sampled_tokens=int(changed.sampled_T.sum()),
        )
        told = msgspec.structs.replace(meta, trajectories=(meta.trajectories[0], described))
        came = GroupPayload(group_id=7, trajectories=(payload.trajectories[0], changed), media=payload.media)
        with pytest.raises(IntakeError, match=pattern):
            check_group(told, came, SPEC)

    tokens, sampled = row.tokens_T.tolist(), row.sampled_T.tolist()
    refused(of_tokens(tokens[:8], sampled[:8]), r"trajectory 1, turn 1: 2 placeholders .* 4 image tokens .* cut inside")
    refused(of_tokens(tokens[:5], sampled[:5]), r"trajectory 1, turn 0: no placeholder is left for the 4 image tokens")
    refused(of_tokens([*tokens, IMAGE], [*sampled, False]), r"trajectory 1, turn 2: 1 placeholders .* belong to no pic")
    refused(
        of_tokens([*tokens[:-1], IMAGE], sampled), r"trajectory 1, turn 1: the placeholder at token \d+ was sampled"
    )


def test_description_and_payload_must_agree() -> None:
    meta, payload = group([[[0]], [[1]]])
    one = msgspec.structs.replace(meta.trajectories[0], length_tokens=3)
    wrong_grid = tuple(msgspec.structs.replace(m, grid_w=8) for m in meta.media)
    for described, pattern in (
        (msgspec.structs.replace(meta, trajectories=meta.trajectories[:1]), "2 trajectories came; described are 1"),
        (msgspec.structs.replace(meta, trajectories=(one, meta.trajectories[1])), "trajectory 0: 5 tokens came"),
        (msgspec.structs.replace(meta, media=wrong_grid), "picture picture0 has 2x2 patches; described are 2x8"),
        (msgspec.structs.replace(meta, media=meta.media[:1]), "trajectory 1: shows picture 1; its group has 1"),
    ):
        with pytest.raises(IntakeError, match=pattern):
            check_group(described, payload, SPEC)
    with pytest.raises(IntakeError, match="picture picture0 is described, and did not come"):
        check_group(meta, GroupPayload(group_id=7, trajectories=payload.trajectories, media={}), SPEC)


def test_a_group_that_is_refused_fails_alone_and_is_counted() -> None:
    meta, payload = group([[[0]], [[1]]])
    swapped = GroupPayload(group_id=7, trajectories=payload.trajectories[::-1], media=payload.media)
    putter = GroupPutter("host0", 5.0, 0, check=lambda group: check_group(group.meta, group.payload, SPEC))
    try:
        assert putter.offer(FinishedGroup(meta, swapped, 2))
        failed, deadline_s = [], time.monotonic() + 10
        while not failed and time.monotonic() < deadline_s:
            failed = putter.take()[1]  # raises what ended the thread
            time.sleep(0.01)
        (failure,) = failed
        assert (failure.group_id, failure.episode_retries, putter.refused) == (7, 2, 1)
        assert failure.reason.startswith("intake: trajectory 0: 6 tokens came")
        assert putter.offer(FinishedGroup(meta, swapped, 0)), "the thread goes on"
    finally:
        putter.close()
