"""Group-relative advantages, in numpy: they follow from rewards alone, so the loader computes them without a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def group_advantages(rewards: Sequence[float], normalise: bool) -> np.ndarray:
    """Advantages of the `n` trajectories of one group: reward minus the group's mean.

    Args:
        rewards: finite rewards, n >= 1.
        normalise: also divide by the group's standard deviation (GRPO, Shao et al. 2024; biased, see Dr. GRPO); a group
            of equal rewards has no direction and gets zeros either way.

    Returns:
        float32 [n]; sums to zero.
    """
    rewards_n = np.asarray(rewards, np.float64)
    if not np.isfinite(rewards_n).all():
        raise ValueError(f"group_advantages: rewards must be finite, got {list(rewards)}")
    centred_n = rewards_n - rewards_n.mean()
    if normalise:
        centred_n /= max(centred_n.std(), 1e-6)
    return centred_n.astype(np.float32)
