"""A mini-batch laid out for the training mesh: groups -> data shards -> packed rows -> micro-batches -> chunks.

What it guarantees:

* every trajectory lies in exactly one row, whole, and overlaps nothing; every image that one of them shows lies in exactly
  one encoder row;
* every shard has the same number of micro-batches, of one shape;
* the layout is a function of the groups alone: the order in which they are given changes only their index in the plan.

Cost model. Rows have a fixed shape and are computed padding and all, so a row costs the same whatever it holds: a shard costs
its number of micro-batches, and the mini-batch costs the largest shard's. The least possible is what packing all trajectories
together needs (`best`). Whole groups go to the shard with the fewest tokens, largest group first; where that costs more than
`best`, whole rows move from the fullest shard to the emptiest; where even that does, the groups are packed all together. The
encoder's rows are of one shape too: images are packed together and the rows dealt out evenly.

Packing is best-fit decreasing, which needs at most 11/9 of the fewest possible rows, plus a constant.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence

import msgspec

from knittrans_jax.trajectory import (
    TRAJECTORY_BYTES_PER_TOKEN,
    GroupMeta,
    ImagePlacement,
    MediaMeta,
    MiniBatchPlan,
    Placement,
    PlannedGroup,
)

CHUNK_BYTES_PER_TOKEN = 4 + 4 + 12 + 1 + 1 + 4 + 4 + 4
"""Host bytes of a packed token over all fields of `ChunkArrays`."""
IMAGE_BYTES_PER_PATCH = 8 + 8 + 4
"""Host bytes of a packed patch besides its pixels: coordinates, grid, segment id."""


class PlanError(ValueError):
    """A mini-batch that cannot be laid out; the message names what does not fit and what to change."""


@dataclasses.dataclass(frozen=True, order=True)
class PackItem:
    """Something to pack. Sorted largest first, then by key, so that packing never depends on the order given."""

    negative_size: int
    key: tuple[int, int] | tuple[str]

    @property
    def size(self) -> int:
        """Tokens or patches."""
        return -self.negative_size


_Row = list[PackItem]


def layout_mini_batch(
    groups: Sequence[GroupMeta],
    *,
    plan_id: int,
    update: int,
    train_step: int,
    mini_batch: int,
    shards: int,
    row_tokens: int,
    micro_batch_rows: int,
    chunk_micro_batches: int,
    encoder_row_patches: int,
    turn_credit: bool = False,
) -> MiniBatchPlan:
    """Lays a mini-batch out; see the module's opening for how.

    Args:
        groups: at least one, with different ids.
        plan_id: the plan's id.
        update: `V`, the version before the update that consumes it.
        train_step: its train batch.
        mini_batch: its index in the train batch.
        shards: number of data shards.
        row_tokens: tokens of a packed row.
        micro_batch_rows: rows of a micro-batch on one shard.
        chunk_micro_batches: micro-batches that are scanned per call.
        encoder_row_patches: patches of an encoder row.

    Raises:
        PlanError: a trajectory is longer than a row, an image larger than an encoder row, a group comes twice, or media
            references do not hold.
    """
    if not groups:
        raise PlanError("layout_mini_batch: no groups; a mini-batch has at least one")
    index_of = {group.group_id: index for index, group in enumerate(groups)}
    if len(index_of) != len(groups):
        raise PlanError(f"layout_mini_batch: a group comes twice in {[group.group_id for group in groups]}")
    _check_lengths(groups, row_tokens)

    shard_rows = _balance(groups, shards, row_tokens, micro_batch_rows)
    micro_batches = max(1, _micro_batches(shard_rows, micro_batch_rows))
    images, rows_per_shard = _place_images(groups, index_of, shards, encoder_row_patches)
    image_index = {image.digest: index for index, image in enumerate(images)}

    placements = []
    for shard, rows in enumerate(shard_rows):
        for row, items in enumerate(rows):
            offset = 0
            for item in items:
                group_id, trajectory = item.key[0], item.key[-1]
                group = groups[index_of[int(group_id)]]
                meta = group.trajectories[int(trajectory)]
                placements.append(
                    Placement(
                        group=index_of[group.group_id],
                        trajectory=int(trajectory),
                        shard=shard,
                        row=row,
                        offset=offset,
                        length=meta.length_tokens,
                        images=tuple(image_index[group.media[media].digest] for media in meta.media),
                    )
                )
                offset += meta.length_tokens
    return MiniBatchPlan(
        plan_id=plan_id,
        update=update,
        train_step=train_step,
        mini_batch=mini_batch,
        groups=tuple(
            PlannedGroup(
                group_id=group.group_id,
                unit=group.unit,
                rewards=tuple(trajectory.reward for trajectory in group.trajectories),
                turn_rewards=tuple(t.turn_rewards for t in group.trajectories) if turn_credit else (),
                payload_bytes=group.payload_bytes,
            )
            for group in groups
        ),
        placements=tuple(placements),
        images=images,
        shards=shards,
        row_tokens=row_tokens,
        rows_per_micro_batch=micro_batch_rows,
        chunk_micro_batches=chunk_micro_batches,
        chunks=math.ceil(micro_batches / chunk_micro_batches),
        encoder_rows_per_shard=rows_per_shard,
        encoder_row_patches=encoder_row_patches,
        sampled_tokens=sum(t.sampled_tokens for group in groups for t in group.trajectories),
    )


def chunk_of(plan: MiniBatchPlan, placement: Placement) -> int:
    """The chunk that holds a trajectory's row."""
    return placement.row // (plan.rows_per_micro_batch * plan.chunk_micro_batches)


def chunk_row(plan: MiniBatchPlan, placement: Placement) -> tuple[int, int]:
    """(micro-batch within its chunk, global row over all shards): a trajectory's place on the axes C and R."""
    micro_batch, row = divmod(placement.row, plan.rows_per_micro_batch)
    return micro_batch % plan.chunk_micro_batches, placement.shard * plan.rows_per_micro_batch + row


def encoder_row(plan: MiniBatchPlan, image: ImagePlacement) -> int:
    """The global encoder row (axis ER) that holds an image."""
    return image.shard * plan.encoder_rows_per_shard + image.row


def table_row(plan: MiniBatchPlan, image: ImagePlacement, merge_size: int) -> int:
    """The row of the encoder's table that holds an image's first merged token; its others follow.

    Raises:
        PlanError: the encoder row is not a whole number of merged tokens.
    """
    first_patch = encoder_row(plan, image) * plan.encoder_row_patches + image.offset
    if plan.encoder_row_patches % merge_size**2 or first_patch % merge_size**2:
        raise PlanError(
            f"train.encoder_row_patches: {plan.encoder_row_patches} patches (image at patch {image.offset}) do not divide "
            f"into tokens of {merge_size}x{merge_size} patches; use a multiple of {merge_size**2}"
        )
    return first_patch // merge_size**2


def encode_only(plan: MiniBatchPlan, digests: Collection[str]) -> MiniBatchPlan:
    """The encoder's input of a plan with these of its images only, packed anew. It places no trajectories."""
    images, rows = _deal_images(
        [image for image in plan.images if image.digest in digests], plan.shards, plan.encoder_row_patches
    )
    return msgspec.structs.replace(plan, images=images, encoder_rows_per_shard=rows, placements=())


@dataclasses.dataclass(frozen=True)
class PlanFigures:
    """How well a plan uses what it computes."""

    pad_share: float
    """Share of computed tokens that are padding."""
    imbalance: float
    """Tokens of the fullest shard over the mean shard's, minus 1."""
    encoder_pad_share: float
    """Share of computed patches that are padding; 0 without images."""
    groups_split: int
    """Groups whose members lie on more than one shard."""


def plan_figures(plan: MiniBatchPlan) -> PlanFigures:
    """Padding, imbalance and split groups of a plan."""
    tokens_S = [0] * plan.shards
    shards_of: dict[int, set[int]] = {}
    for placement in plan.placements:
        tokens_S[placement.shard] += placement.length
        shards_of.setdefault(placement.group, set()).add(placement.shard)
    rows = plan.shards * plan.rows_per_micro_batch * plan.chunk_micro_batches * plan.chunks
    patches = plan.shards * plan.encoder_rows_per_shard * plan.encoder_row_patches
    used = sum(image.grid_h * image.grid_w for image in plan.images)
    return PlanFigures(
        pad_share=1 - sum(tokens_S) / (rows * plan.row_tokens),
        imbalance=max(tokens_S) * plan.shards / sum(tokens_S) - 1,
        encoder_pad_share=1 - used / patches if patches else 0.0,
        groups_split=sum(len(shards) > 1 for shards in shards_of.values()),
    )


@dataclasses.dataclass(frozen=True)
class WorstCase:
    """Most bytes that a mini-batch can need, for `check` and for budgets."""

    payload_bytes: int
    """Payload of the mini-batch's groups in storage units, and on the network."""
    chunk_bytes: int
    """Host bytes of one chunk over all shards."""
    encoder_bytes: int
    """Host bytes of the encoder's input over all shards."""
    encoder_shapes: tuple[int, ...]
    """All numbers of encoder rows that a shard may have; empty without images. Each is compiled for once, if it comes."""


def worst_case(
    *,
    groups: int,
    trajectories_per_group: int,
    max_length_tokens: int,
    images_per_group: int,
    image_bytes: int,
    image_patches: int,
    shards: int,
    row_tokens: int,
    micro_batch_rows: int,
    chunk_micro_batches: int,
    encoder_row_patches: int,
) -> WorstCase:
    """Bytes and shapes of a mini-batch whose every trajectory has the greatest length and whose every image differs."""
    images = groups * images_per_group
    per_row = max(1, encoder_row_patches // max(1, image_patches))
    # Best fit opens a row only for what fits into no other, so all rows but one hold `per_row` images or more.
    most = bucket_rows(math.ceil(math.ceil(images / per_row) / shards))
    pixel_bytes_per_patch = math.ceil(image_bytes / max(1, image_patches))
    return WorstCase(
        payload_bytes=groups * trajectories_per_group * max_length_tokens * TRAJECTORY_BYTES_PER_TOKEN
        + images * image_bytes,
        chunk_bytes=shards * micro_batch_rows * chunk_micro_batches * row_tokens * CHUNK_BYTES_PER_TOKEN,
        encoder_bytes=shards * most * encoder_row_patches * (pixel_bytes_per_patch + IMAGE_BYTES_PER_PATCH),
        encoder_shapes=tuple(1 << power for power in range(most.bit_length())),
    )


# --- packing -------------------------------------------------------------------------------------------------------------


def _check_lengths(groups: Sequence[GroupMeta], row_tokens: int) -> None:
    for group in groups:
        for index, trajectory in enumerate(group.trajectories):
            if not 0 < trajectory.length_tokens <= row_tokens:
                raise PlanError(
                    f"group {group.group_id}, trajectory {index}: {trajectory.length_tokens} tokens, but a row holds 1 to "
                    f"{row_tokens} (train.row_tokens): raise it, or lower rollout.cache_tokens"
                )
            for media in trajectory.media:
                if not 0 <= media < len(group.media):
                    raise PlanError(
                        f"group {group.group_id}, trajectory {index}: shows image {media}, but the group has "
                        f"{len(group.media)}"
                    )


def best_fit(items: Sequence[PackItem], capacity: int) -> list[_Row]:
    """Best-fit decreasing. Within a row, items keep the order in which they were put."""
    rows: list[_Row] = []
    spaces: list[tuple[int, int]] = []  # (free space, row), sorted
    for item in sorted(items):
        at = bisect.bisect_left(spaces, (item.size, -1))
        if at == len(spaces):
            rows.append([item])
            free, row = capacity - item.size, len(rows) - 1
        else:
            free, row = spaces.pop(at)
            rows[row].append(item)
            free -= item.size
        bisect.insort(spaces, (free, row))
    return rows


def _tokens(row: _Row) -> int:
    return sum(item.size for item in row)


def _row_order(row: _Row) -> tuple[tuple[int, int] | tuple[str], ...]:
    """Sorts a shard's rows so that a group's members share micro-batches."""
    return tuple(sorted(item.key for item in row))


def _micro_batches(shard_rows: Sequence[Sequence[_Row]], micro_batch_rows: int) -> int:
    return max(math.ceil(len(rows) / micro_batch_rows) for rows in shard_rows)


def _balance(groups: Sequence[GroupMeta], shards: int, row_tokens: int, micro_batch_rows: int) -> list[list[_Row]]:
    """The rows of every shard, at the least number of micro-batches that packing allows."""
    members = {
        group.group_id: [
            PackItem(-t.length_tokens, (group.group_id, index)) for index, t in enumerate(group.trajectories)
        ]
        for group in groups
    }
    together = best_fit([item for items in members.values() for item in items], row_tokens)
    best = math.ceil(len(together) / (shards * micro_batch_rows))

    items_of: list[list[PackItem]] = [[] for _ in range(shards)]
    tokens_of = [0] * shards
    for _, group_id in sorted((-_tokens(items), group_id) for group_id, items in members.items()):
        shard = min(range(shards), key=lambda s: (tokens_of[s], s))
        items_of[shard].extend(members[group_id])
        tokens_of[shard] += _tokens(members[group_id])
    shard_rows = [best_fit(items, row_tokens) for items in items_of]

    limit = best * micro_batch_rows
    if _micro_batches(shard_rows, micro_batch_rows) > best:
        if sum(len(rows) for rows in shard_rows) <= shards * limit:
            _move_rows(shard_rows, limit)
        else:
            together.sort(key=_row_order)
            share = math.ceil(len(together) / shards)
            shard_rows = [together[shard * share : (shard + 1) * share] for shard in range(shards)]
    for rows in shard_rows:
        rows.sort(key=_row_order)
    return shard_rows


def _move_rows(shard_rows: list[list[_Row]], limit: int) -> None:
    """Moves the least filled rows off shards with more than `limit` of them, to the shards with the fewest."""
    for rows in shard_rows:
        while len(rows) > limit:
            moved = min(rows, key=lambda row: (_tokens(row), _row_order(row)))
            rows.remove(moved)
            min(shard_rows, key=len).append(moved)


def _place_images(
    groups: Sequence[GroupMeta], index_of: dict[int, int], shards: int, row_patches: int
) -> tuple[tuple[ImagePlacement, ...], int]:
    """Unique images that some trajectory shows, packed into encoder rows dealt out evenly -> (places, rows per shard)."""
    owner: dict[str, tuple[int, MediaMeta]] = {}
    for group in sorted(groups, key=lambda g: g.group_id):
        for media in (group.media[m] for t in group.trajectories for m in t.media):
            if not 0 < media.patches <= row_patches:
                raise PlanError(
                    f"group {group.group_id}: image {media.digest} has {media.grid_h}x{media.grid_w} = {media.patches} "
                    f"patches, but an encoder row holds 1 to {row_patches} (train.encoder_row_patches): raise it"
                )
            first = owner.setdefault(media.digest, (group.group_id, media))[1]
            if (first.grid_h, first.grid_w) != (media.grid_h, media.grid_w):
                raise PlanError(
                    f"group {group.group_id}: image {media.digest} is {media.grid_h}x{media.grid_w} patches here and "
                    f"{first.grid_h}x{first.grid_w} in group {owner[media.digest][0]}: one digest, one picture"
                )
    unplaced = [
        ImagePlacement(
            digest=digest,
            group=index_of[group_id],
            shard=0,
            row=0,
            offset=0,
            grid_h=media.grid_h,
            grid_w=media.grid_w,
        )
        for digest, (group_id, media) in owner.items()
    ]
    return _deal_images(unplaced, shards, row_patches)


def _deal_images(
    images: Iterable[ImagePlacement], shards: int, row_patches: int
) -> tuple[tuple[ImagePlacement, ...], int]:
    """Packs images into encoder rows and deals these out evenly -> (the images, placed; rows per shard)."""
    by_digest = {image.digest: image for image in images}
    rows = best_fit([PackItem(-i.grid_h * i.grid_w, (digest,)) for digest, i in by_digest.items()], row_patches)
    rows.sort(key=lambda row: (-_tokens(row), _row_order(row)))
    placed = []
    for index, row in enumerate(rows):
        # There and back over the shards, so that the fuller rows of each pass do not all meet on shard 0.
        turn, at = divmod(index, shards)
        shard = at if turn % 2 == 0 else shards - 1 - at
        offset = 0
        for item in row:
            image = by_digest[str(item.key[0])]
            placed.append(msgspec.structs.replace(image, shard=shard, row=turn, offset=offset))
            offset += item.size
    placed.sort(key=lambda image: (image.shard, image.row, image.offset))
    return tuple(placed), bucket_rows(math.ceil(len(rows) / shards))


def bucket_rows(rows: int) -> int:
    """Next power of two, 0 for 0: few shapes, so few compilations."""
    return 1 << (rows - 1).bit_length() if rows else 0
