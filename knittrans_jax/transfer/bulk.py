"""What storage units and their peers say to each other over the bulk channel: one request, one response, many per connection.

    peer                                   unit
    HELLO  ticket, peer             ->
                                    <-     WELCOME  unit, the peer's next ticket      (or ERROR, and the unit closes)
    PUT    shapes | rows, media     ->
                                    <-     DONE                                       (or ERROR: refused, nothing kept)
    GET    rows, fields, media,     ->
           pixels' type, start      <-     DATA  shapes | rows, media                 (or ERROR: missing)
    LIST                            ->
                                    <-     HELD  groups
    SHARDS version                  ->
                                    <-     SHARDED  what lies where                   (or ERROR: missing)
    PIECE  version, process, range  ->
                                    <-     BYTES | the range                          (or ERROR: missing)

Storage units take PUT, GET and LIST; who serves weights takes SHARDS and PIECE (`transfer/weight_channel.py`).
Buffers travel field by field (`FIELDS`, those of four bytes first, so that all stay aligned), then image by image.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

from knittrans_jax.trajectory import GroupPayload, Trajectory
from knittrans_jax.transfer.wire import Buffer

FIELDS: dict[str, np.dtype] = {
    "tokens_T": np.dtype(np.int32),
    "behaviour_logprobs_T": np.dtype(np.float32),
    "versions_T": np.dtype(np.int32),
    "sampled_T": np.dtype(np.bool_),
}
"""Fields of a trajectory in the order in which they travel."""

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
GroupId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Digest = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class Kind(enum.IntEnum):
    """Kinds of frames."""

    HELLO = 1
    WELCOME = 2
    PUT = 3
    DONE = 4
    GET = 5
    DATA = 6
    LIST = 7
    HELD = 8
    ERROR = 9
    SHARDS = 10
    SHARDED = 11
    PIECE = 12
    BYTES = 13


class _Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Hello(_Header, frozen=True):
    """Opens a connection."""

    ticket: bytes
    peer: Annotated[str, msgspec.Meta(max_length=200)]


class Welcome(_Header, frozen=True):
    """The ticket was good; `ticket` is good for the peer's next connection, until the first one would have expired."""

    unit: str
    ticket: bytes


class MediaShape(_Header, frozen=True):
    """One image, uint8 [height, width, channels]."""

    digest: Digest
    height: Size
    width: Size
    channels: Size

    @property
    def shape(self) -> tuple[int, int, int]:
        """As numpy wants it."""
        return self.height, self.width, self.channels


class Put(_Header, frozen=True):
    """A group's payload follows: the fields of trajectories of these lengths, then the images."""

    group_id: GroupId
    lengths: tuple[Size, ...]
    media: tuple[MediaShape, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of all fields of all trajectories."""
        return sum(self.lengths) * sum(dtype.itemsize for dtype in FIELDS.values())

    @property
    def payload_bytes(self) -> int:
        """Bytes of rows and images."""
        return self.row_bytes + sum(math.prod(image.shape) for image in self.media)


class Get(_Header, frozen=True):
    """Asks for fields of trajectories (group, index in the group) and for images (group that holds it, digest).

    An image that is asked for several times comes several times.
    """

    rows: tuple[tuple[GroupId, Annotated[int, msgspec.Meta(ge=0)]], ...]
    fields: tuple[str, ...]
    media: tuple[tuple[GroupId, Digest], ...]
    pixels: Literal["uint8", "float32"] = "uint8"
    """As stored, or as floats of the same values (what the baselines of `train.transfer` ship)."""
    start_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    """How much of the response came over an earlier connection: the payload begins there."""


class Data(_Header, frozen=True):
    """What was asked for follows, in the order of the request: lengths of the rows, shapes of the images."""

    lengths: tuple[Size, ...]
    media: tuple[MediaShape, ...]
    skipped_checksum: int = 0
    """xxh3-64 of the first `start_bytes`; 0 when nothing is left out."""


class HeldGroup(_Header, frozen=True):
    """One group in a unit."""

    group_id: int
    trajectories: int
    payload_bytes: int


class Held(_Header, frozen=True):
    """Everything that a unit holds."""

    groups: tuple[HeldGroup, ...]
    held_bytes: int
    budget_bytes: int


class VersionKey(_Header, frozen=True, order=True):
    """Weights by the incarnation of the training group that published them, and version; a later one is greater."""

    incarnation: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    version: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


Extent = Annotated[int, msgspec.Meta(ge=0, le=2**47)]
"""A coordinate, length or offset within a version's tensors."""


class ShardSpec(_Header, frozen=True):
    """A part of a tensor of shape `shape`: the box that begins at `start`, `size` long, at `offset` of its process's bytes."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
    dtype: str
    offset: Extent
    start: tuple[Extent, ...]
    size: tuple[Extent, ...]
    shape: tuple[Extent, ...]


class BytesSpec(_Header, frozen=True):
    """What one training process has of a version: its shards one after the other, and their xxh3-64 as published."""

    process: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    size_bytes: Extent
    checksum: int
    shards: tuple[ShardSpec, ...]


class Shards(_Header, frozen=True):
    """Asks what the peer has of a version."""

    key: VersionKey


class Sharded(_Header, frozen=True):
    """What it has, or is just getting: a training process its own bytes, a rollout host those of all processes."""

    processes: Size
    bytes_of: tuple[BytesSpec, ...]


class Piece(_Header, frozen=True):
    """Asks for the bytes `begin` to `end` of a training process's bytes of a version."""

    key: VersionKey
    process: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    begin: Extent
    end: Extent


class Error(_Header, frozen=True):
    """The request failed. `missing`: what was asked for is not here; `refused`: it is not accepted."""

    code: str
    reason: str


def row_views(buffer: Buffer, lengths: Sequence[int], fields: Sequence[str]) -> list[dict[str, np.ndarray]]:
    """Cuts received bytes into arrays, without copying -> fields of every row."""
    rows: list[dict[str, np.ndarray]] = [{} for _ in lengths]
    at = 0
    for name, dtype in FIELDS.items():
        if name in fields:
            for row, length in zip(rows, lengths, strict=True):
                row[name] = np.frombuffer(buffer, dtype, count=length, offset=at)
                at += length * dtype.itemsize
    return rows


def row_buffers(rows: Sequence[Trajectory], fields: Sequence[str]) -> list[Buffer]:
    """The bytes of these fields in travelling order."""
    return [as_bytes(getattr(row, name)) for name in FIELDS if name in fields for row in rows]


def media_shapes(media: dict[str, np.ndarray]) -> tuple[MediaShape, ...]:
    """Headers of images."""
    return tuple(MediaShape(digest, *image.shape) for digest, image in media.items())


def put_frame(payload: GroupPayload) -> tuple[Put, list[Buffer]]:
    """Header and buffers that carry a group's payload."""
    header = Put(payload.group_id, tuple(len(t.tokens_T) for t in payload.trajectories), media_shapes(payload.media))
    return header, row_buffers(payload.trajectories, tuple(FIELDS)) + [as_bytes(i) for i in payload.media.values()]


def as_bytes(array: np.ndarray) -> Buffer:
    """An array's bytes, copied only where it is not contiguous."""
    return np.ascontiguousarray(array).data.cast("B")
