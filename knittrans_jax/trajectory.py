"""What travels: trajectories, groups, and the mini-batch plans that say where each one goes.

Two kinds of record live here and never mix:

* *descriptions* (msgspec records: `MediaMeta`, `TrajectoryMeta`, `GroupMeta`, `MiniBatchPlan` and its parts) are small, go
  through the scheduler and are written to the event log. Those that come by the thousand are encoded as arrays, without the
  names of their fields: a new field goes to the end and has a default;
* *payloads* (`Trajectory`, `GroupPayload`: numpy arrays) go from the rollout host's storage unit straight to the consumers.

Tokens, masks and versions of one trajectory are aligned arrays of its own length `T`; nothing is padded before packing.
"""

from __future__ import annotations

import dataclasses
import hashlib

import msgspec
import numpy as np

NOT_SAMPLED = -1
"""The version tag of a token that no policy sampled (prompt, image placeholder, the environment's reply)."""


class MediaMeta(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One image of a group, by content. `grid_h` x `grid_w` is its size in encoder patches."""

    digest: str
    grid_h: int
    grid_w: int
    size_bytes: int

    @property
    def patches(self) -> int:
        """Number of encoder patches."""
        return self.grid_h * self.grid_w


class TrajectoryMeta(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What the scheduler knows of one finished trajectory.

    `media[i]` is the index, in the group's `media`, of the image behind the i-th run of image placeholders, so an image
    shown in three turns is listed three times. Versions are those of the sampled tokens; times are the scheduler-comparable
    wall clock of the rollout host in seconds.
    """

    length_tokens: int
    sampled_tokens: int
    reward: float
    turn_rewards: tuple[float, ...] = ()
    """Each answer's own reward, in order; empty when the task gives none."""
    version_min: int
    version_max: int
    version_sum: int
    turns: int
    questions: int
    exact: int
    media: tuple[int, ...]
    started_s: float
    finished_s: float
    version_done: int

    @property
    def version_mean(self) -> float:
        """Mean version over the sampled tokens."""
        return self.version_sum / self.sampled_tokens


class GroupMeta(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """What the scheduler knows of one finished group of `n` trajectories; enough to admit it and to lay it out."""

    group_id: int
    unit: str
    trajectories: tuple[TrajectoryMeta, ...]
    media: tuple[MediaMeta, ...]
    payload_bytes: int
    """Bytes held by the storage unit for this group: trajectory fields, plus each unique image once."""


class PlannedGroup(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A group's share in a plan: where its payload lies, and the rewards from which its advantages follow."""

    group_id: int
    unit: str
    rewards: tuple[float, ...]
    turn_rewards: tuple[tuple[float, ...], ...] = ()
    """By trajectory and answer, when `train.objective.credit` is `turn`: advantages are then taken answer by answer."""
    payload_bytes: int


class Placement(msgspec.Struct, frozen=True, array_like=True):
    """One trajectory's place: `row` of `shard`, tokens `[offset, offset + length)`.

    `images[i]` is the index in `MiniBatchPlan.images` of the image behind its i-th run of placeholders.
    """

    group: int
    trajectory: int
    shard: int
    row: int
    offset: int
    length: int
    images: tuple[int, ...]


class ImagePlacement(msgspec.Struct, frozen=True, array_like=True):
    """One unique image's place in the encoder's input: patches `[offset, offset + grid_h * grid_w)` of `row` of `shard`.

    `group` names a group (index in `MiniBatchPlan.groups`) whose storage unit holds the pixels.
    """

    digest: str
    group: int
    shard: int
    row: int
    offset: int
    grid_h: int
    grid_w: int


class MiniBatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One mini-batch laid out for the training mesh; every training process receives the same plan.

    Shapes: a micro-batch is `shards * rows_per_micro_batch` rows of `row_tokens` tokens; every shard has
    `micro_batches` of them, padded with empty rows to `chunks * chunk_micro_batches`. Global row `r` of micro-batch `m` of
    shard `s` is `Placement(shard=s, row=m * rows_per_micro_batch + r)`. The encoder's input is
    `shards * encoder_rows_per_shard` rows of `encoder_row_patches` patches (0 rows: no images, no encoder program).
    """

    plan_id: int
    update: int
    """`V`, the version before the update that consumes this mini-batch."""
    train_step: int
    mini_batch: int
    groups: tuple[PlannedGroup, ...]
    placements: tuple[Placement, ...]
    images: tuple[ImagePlacement, ...]
    shards: int
    row_tokens: int
    rows_per_micro_batch: int
    chunk_micro_batches: int
    chunks: int
    encoder_rows_per_shard: int
    encoder_row_patches: int
    sampled_tokens: int
    """The objective's denominator: sampled tokens of the whole mini-batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The payload of one trajectory of `T` tokens.

    `sampled_T` marks the tokens that the policy sampled (the only ones with a loss); `behaviour_logprobs_T` is the
    sampler's own log-prob there (after temperature and mask) and 0 elsewhere; `versions_T` is the version that sampled the
    token, and `NOT_SAMPLED` elsewhere.
    """

    tokens_T: np.ndarray  # int32
    sampled_T: np.ndarray  # bool
    behaviour_logprobs_T: np.ndarray  # float32
    versions_T: np.ndarray  # int32

    def __post_init__(self) -> None:
        expected = {
            "tokens_T": np.int32,
            "sampled_T": np.bool_,
            "behaviour_logprobs_T": np.float32,
            "versions_T": np.int32,
        }
        for name, dtype in expected.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.shape != self.tokens_T.shape or array.ndim != 1:
                raise ValueError(
                    f"Trajectory.{name}: expected {np.dtype(dtype)} of shape {self.tokens_T.shape}, "
                    f"got {array.dtype} {array.shape}"
                )

    @property
    def size_bytes(self) -> int:
        """Bytes of all fields."""
        return sum(getattr(self, field.name).nbytes for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupPayload:
    """What a storage unit holds of one group: its trajectories, and its unique images (uint8, HxWxC) by digest."""

    group_id: int
    trajectories: tuple[Trajectory, ...]
    media: dict[str, np.ndarray]

    @property
    def size_bytes(self) -> int:
        """Bytes of all trajectories and of each unique image once."""
        return sum(t.size_bytes for t in self.trajectories) + sum(image.nbytes for image in self.media.values())


TRAJECTORY_BYTES_PER_TOKEN = 4 + 1 + 4 + 4
"""Payload bytes of a token: token id, sampled flag, behaviour log-prob, version."""


def media_digest(image_HxWxC: np.ndarray) -> str:
    """The content hash under which an image is stored, sent and encoded once: BLAKE2b-128 of shape and pixels, hex."""
    if image_HxWxC.dtype != np.uint8 or image_HxWxC.ndim != 3:
        raise ValueError(f"media: expected uint8 [H, W, C], got {image_HxWxC.dtype} {list(image_HxWxC.shape)}")
    digest = hashlib.blake2b(repr(image_HxWxC.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(image_HxWxC).data)
    return digest.hexdigest()
