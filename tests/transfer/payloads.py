"""Random groups for the transfer tests."""

import numpy as np

from knittrans_jax.trajectory import NOT_SAMPLED, GroupPayload, Trajectory, media_digest


def random_trajectory(rng: np.random.Generator, length: int) -> Trajectory:
    sampled = rng.random(length) < 0.5
    return Trajectory(
        tokens_T=rng.integers(3, 50, length, np.int32),
        sampled_T=sampled,
        behaviour_logprobs_T=np.where(sampled, -rng.random(length), 0).astype(np.float32),
        versions_T=np.where(sampled, 4, NOT_SAMPLED).astype(np.int32),
    )


def random_image(rng: np.random.Generator, height: int = 8, width: int = 8) -> np.ndarray:
    return rng.integers(0, 256, (height, width, 1), np.uint8)


def random_group(
    rng: np.random.Generator, group_id: int, lengths: tuple[int, ...] = (5, 8, 3), images: tuple[np.ndarray, ...] = ()
) -> GroupPayload:
    return GroupPayload(
        group_id=group_id,
        trajectories=tuple(random_trajectory(rng, n) for n in lengths),
        media={media_digest(image): image for image in images},
    )
