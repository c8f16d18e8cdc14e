"""Handwritten digits (the UCI set that scikit-learn carries): 1,400 for training and 397 held out, always the same ones.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from knittrans_jax.rollout.tasks.base import Split
from knittrans_jax.rollout.text import Vocabulary

TRAIN_DIGITS = 1400
HELDOUT_DIGITS = 397
SIDE = 8
"""Pixels per side of a digit."""
_SPLIT_SEED = 1998
"""The set is ordered by writer; a fixed shuffle makes both parts alike. It does not depend on the run's seed."""


@dataclasses.dataclass(frozen=True)
class Digits:
    """Some digits: pictures uint8 [N, 8, 8], and what they show, int [N]."""

    images_NxHxW: np.ndarray
    labels_N: np.ndarray


@functools.cache
def load_digits(split: Split) -> Digits:
    """The digits of a split. Pixel values 0..16 are scaled to 0..255.

    Raises:
        ImportError: scikit-learn, which carries the data, is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise ImportError(
            "the tasks digits-read and grid-lookup need scikit-learn's digits: pip install 'knittrans-jax[digits]'"
        ) from error
    data, labels = load(return_X_y=True)
    images = np.rint(np.asarray(data).reshape(-1, SIDE, SIDE) * 15.9375).astype(np.uint8)
    if len(images) != TRAIN_DIGITS + HELDOUT_DIGITS:
        raise ValueError(f"scikit-learn's digits: expected {TRAIN_DIGITS + HELDOUT_DIGITS} pictures, got {len(images)}")
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(images))
    chosen = order[:TRAIN_DIGITS] if split == "train" else order[TRAIN_DIGITS:]
    return Digits(images[chosen], np.asarray(labels)[chosen])


def prompt_id(split: Split, index: int) -> str:
    """`train-000123`."""
    return f"{split}-{index:06d}"


def parse_prompt_id(name: str, counts: dict[Split, int]) -> tuple[Split, int]:
    """The split and index of a prompt id.

    Raises:
        KeyError: not a prompt of this task.
    """
    split, _, index = name.partition("-")
    if split in counts and index.isdecimal() and int(index) < counts[split] and name == prompt_id(split, int(index)):
        return split, int(index)
    known = ", ".join(f"{prompt_id(s, 0)} to {prompt_id(s, n - 1)}" for s, n in counts.items())
    raise KeyError(f"prompt {name!r}: expected {known}")


def prompt_rng(seed: int, split: Split, index: int) -> np.random.Generator:
    """The randomness of one prompt: depends on nothing but its id and the run's seed."""
    return np.random.default_rng([seed, 0 if split == "train" else 1, index])


def digits_and_end(vocabulary: Vocabulary) -> tuple[int, ...]:
    """The ids of answers that are digits."""
    return (vocabulary.end, *vocabulary.encode("0123456789"))
