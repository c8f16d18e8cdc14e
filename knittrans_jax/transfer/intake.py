"""Whether a finished group is what it says it is, before it is stored: pure.

What it guarantees of a group that passes:

* description and payload agree: as many trajectories, of those lengths and sampled tokens, showing pictures that are there;
* every picture's pixels have the grid that its description says;
* the placeholders of a trajectory are one run for each picture that it shows, in order, as long as the picture has image
  tokens: nothing is left over, and a trajectory that was cut was cut between pictures;
* no placeholder was sampled.

So nothing can go wrong with it in packing, where an error would end the run. A violation names trajectory and turn (both
counted from 0), and costs its group alone: the group fails as one whose episode failed does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from knittrans_jax.encoding.patches import grid_of
from knittrans_jax.trajectory import GroupMeta, GroupPayload, Trajectory


class IntakeError(ValueError):
    """A group that is not what it says: the message names what came, what was expected, trajectory and turn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class IntakeSpec:
    """What the check must know of model and vocabulary; of a model without vision, sizes are 1."""

    patch_size: int
    merge_size: int
    image_token_id: int


def check_group(meta: GroupMeta, payload: GroupPayload, spec: IntakeSpec) -> None:
    """Raises `IntakeError` unless the payload is what `meta` says and a trainer can pack it."""
    if len(meta.trajectories) != len(payload.trajectories):
        raise IntakeError(f"{len(payload.trajectories)} trajectories came; described are {len(meta.trajectories)}")
    for media in meta.media:
        pixels = payload.media.get(media.digest)
        if pixels is None:
            raise IntakeError(f"picture {media.digest} is described, and did not come")
        try:
            grid = grid_of(pixels.shape, spec.patch_size, spec.merge_size)
        except ValueError as error:
            raise IntakeError(f"picture {media.digest}: {error}") from error
        if grid != (media.grid_h, media.grid_w):
            raise IntakeError(
                f"picture {media.digest} has {grid[0]}x{grid[1]} patches; described are {media.grid_h}x{media.grid_w}"
            )
    for index, (described, trajectory) in enumerate(zip(meta.trajectories, payload.trajectories, strict=True)):
        came = (len(trajectory.tokens_T), int(trajectory.sampled_T.sum()))
        if came != (described.length_tokens, described.sampled_tokens):
            raise IntakeError(
                f"trajectory {index}: {came[0]} tokens came, {came[1]} of them sampled; described are "
                f"{described.length_tokens} and {described.sampled_tokens}"
            )
        wrong = [number for number in described.media if not 0 <= number < len(meta.media)]
        if wrong:
            raise IntakeError(f"trajectory {index}: shows picture {wrong[0]}; its group has {len(meta.media)}")
        grids = [(meta.media[number].grid_h, meta.media[number].grid_w) for number in described.media]
        try:
            check_placeholders(trajectory, grids, spec)
        except IntakeError as error:
            raise IntakeError(f"trajectory {index}, {error}") from error


def check_placeholders(trajectory: Trajectory, grids: Sequence[tuple[int, int]], spec: IntakeSpec) -> None:
    """Raises `IntakeError`, naming the turn, unless placeholders are the pictures' image tokens. `grids` in patches, in order.

    A turn is what is shown up to an answer, and the answer.
    """
    is_image_T = trajectory.tokens_T == spec.image_token_id
    sampled = np.flatnonzero(is_image_T & trajectory.sampled_T)
    if len(sampled):
        raise IntakeError(f"{_turn(trajectory, sampled[0])}: the placeholder at token {sampled[0]} was sampled")
    at = 0
    for number, (height, width) in enumerate(grids):
        expected = height * width // spec.merge_size**2
        what = f"image tokens of picture {number} ({height}x{width} patches)"
        found = np.flatnonzero(is_image_T[at:])
        if not len(found):
            raise IntakeError(
                f"{_turn(trajectory, len(is_image_T) - 1)}: no placeholder is left for the {expected} {what}"
            )
        begin = at + int(found[0])
        run = int(np.argmin(np.append(is_image_T[begin : begin + expected], False)))
        if run < expected:
            cut = ": cut inside a picture, which is shown whole or not at all" if begin + run == len(is_image_T) else ""
            raise IntakeError(
                f"{_turn(trajectory, begin)}: {run} placeholders from token {begin} on for the {expected} {what}{cut}"
            )
        at = begin + expected
    left = np.flatnonzero(is_image_T[at:])
    if len(left):
        raise IntakeError(
            f"{_turn(trajectory, at + left[0])}: {len(left)} placeholders from token {at + left[0]} on belong to no picture "
            f"({len(grids)} are shown)"
        )


def _turn(trajectory: Trajectory, token: int | np.integer) -> str:
    """The turn of a token: one more than the answers that ended before it."""
    sampled_T = trajectory.sampled_T[: int(token) + 1]
    ended = int(np.count_nonzero(sampled_T[:-1] & ~sampled_T[1:]))
    return f"turn {ended}"
