"""Imports of the extra `hf`, with an error that says what to install."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_extra(module: str) -> ModuleType:
    """A module of the extra `hf`.

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is not installed: pip install 'knittrans-jax[hf]'") from error
