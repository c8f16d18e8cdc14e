"""From the configuration's `task` to a task: a built-in one by name, or a user's own class by file."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from knittrans_jax.config import ConfigError, TaskConfig
from knittrans_jax.rollout.tasks.base import TASK_MEMBERS, Task
from knittrans_jax.rollout.tasks.digits_read import DigitsRead
from knittrans_jax.rollout.tasks.grid_lookup import GridLookup
from knittrans_jax.rollout.tasks.mixture import Mixture

BUILT_IN: dict[str, Callable[[dict[str, Any], int], Task]] = {
    "digits-read": DigitsRead,
    "grid-lookup": GridLookup,
    "mixture": lambda options, seed: Mixture(options, seed, load_task),
}


def load_task(config: TaskConfig, seed: int) -> Task:
    """Builds the task of a run.

    Args:
        config: `name` is a built-in task or `path/to/file.py:Class`; the class is constructed as `Class(options, seed)`.
        seed: the run's.

    Raises:
        ConfigError: no such task, file or class, a class that is no task, or options that it refuses.
    """
    build = BUILT_IN.get(config.name) or _user_class(config.name)
    try:
        task = build(dict(config.options), seed)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"task.options: {config.name} refuses {config.options}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"task.name: {config.name!r} fails when it is made with {config.options}: {type(error).__name__}: {error}"
        ) from error
    missing = [member for member in TASK_MEMBERS if not hasattr(task, member)]
    if missing:
        raise ConfigError(
            f"task.name: {config.name!r} is not a task: it has no {', '.join(missing)} "
            "(the protocol is knittrans_jax.rollout.tasks.base.Task)"
        )
    _check_ids(config.name, task)
    return task


def _check_ids(name: str, task: Task) -> None:
    vocabulary, ids = task.vocabulary, task.sampled_ids
    if vocabulary.end not in ids:
        raise ConfigError(
            f"task.name: {name!r}: sampled_ids {ids} lack the end token {vocabulary.end}: no answer could end"
        )
    bad = [i for i in ids if not 0 <= i < vocabulary.size or i in (vocabulary.pad, vocabulary.image)]
    if bad or len(set(ids)) != len(ids):
        raise ConfigError(
            f"task.name: {name!r}: sampled_ids {ids}: expected different ids of 0..{vocabulary.size - 1}, without pad "
            f"{vocabulary.pad} and the image placeholder {vocabulary.image}"
        )


def _user_class(name: str) -> Callable[[dict[str, Any], int], Task]:
    file, colon, class_name = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ConfigError(
            f"task.name: no task {name!r}: expected one of {', '.join(sorted(BUILT_IN))}, or path/to/file.py:Class"
        )
    path = Path(file).resolve()
    if not path.is_file():
        raise ConfigError(f"task.name: {name!r}: there is no file {path}")
    # A name of its own, known to the import system, so that dataclasses and the like work in the file.
    module_name = f"knittrans_task_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"task.name: {name!r}: {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"task.name: {name!r}: {path} fails when it is imported: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = sorted(key for key, value in vars(module).items() if isinstance(value, type))
        raise ConfigError(
            f"task.name: {name!r}: {path} has no class {class_name!r}; it has {', '.join(classes) or 'none'}"
        )
    return found
