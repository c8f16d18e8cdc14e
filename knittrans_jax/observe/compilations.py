"""Counts this process's XLA compilations and says which program was compiled for which shapes.

A recompilation after warm-up costs seconds and is never wanted, so it must not go unseen. What is told of one is the program's
name and, where it was compiled before, the arguments whose shape or type is new: that names the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"
_LOGGER = "jax._src.interpreters.pxla"
"""Logs "Compiling NAME with global shapes and types (...)", with the abstract arguments as the record's own."""
MAX_UNTOLD = 8
"""Descriptions kept until they are taken; more compilations are counted only."""
MAX_ARGUMENTS = 4
"""Arguments named in one description."""


class CompilationCounter:
    """Counts from its creation on; one per process, created before the first program is built."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._untold: list[str] = []
        self._shapes: dict[str, tuple[str, ...]] = {}
        self._compiled: dict[str, tuple[str, ...]] = {}
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        logger = logging.getLogger(_LOGGER)
        logger.addFilter(_Shapes(self._shapes, logger.getEffectiveLevel()))
        logger.setLevel(logging.DEBUG)  # JAX asks the level first; the filter keeps to itself what was not shown before

    def take_untold(self) -> tuple[str, ...]:
        """What was compiled since the last call, at most `MAX_UNTOLD`: `f: argument 3 int32[4,68], was int32[2,68]`."""
        untold, self._untold = tuple(self._untold), []
        return untold

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event != _EVENT:
            return
        self.count += 1
        self.seconds += duration_secs
        name = str(kwargs.get("fun_name", "a program"))
        shapes = self._shapes.pop(name, ())
        if len(self._untold) < MAX_UNTOLD:
            self._untold.append(describe(name, shapes, self._compiled.get(name)))
        self._compiled[name] = shapes


class _Shapes(logging.Filter):
    """Notes the argument shapes of the program that is about to be compiled; passes records of the logger's own level on."""

    def __init__(self, shapes: dict[str, tuple[str, ...]], level: int) -> None:
        super().__init__()
        self._shapes, self._level = shapes, level

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether handlers, of which other libraries install some for every level, get the record."""
        arguments = record.args
        if isinstance(arguments, tuple) and len(arguments) >= 2 and str(record.msg).startswith("Compiling"):
            avals: Any = arguments[1]
            if isinstance(avals, Sequence):
                self._shapes[str(arguments[0])] = tuple(short_shape(aval) for aval in avals)
        return record.levelno >= self._level


def short_shape(aval: Any) -> str:
    """`float32[2,3]` of an abstract array."""
    shape = ",".join(str(size) for size in getattr(aval, "shape", ()))
    return f"{getattr(aval, 'dtype', type(aval).__name__)}[{shape}]"


def describe(name: str, shapes: Sequence[str], before: Sequence[str] | None) -> str:
    """One compilation in a line: the program, and which arguments are new against its last compilation, or all of them."""
    name = name.removeprefix("jit(").removesuffix(")")
    if before is not None and len(before) == len(shapes):
        new = [
            f"argument {i} {now}, was {old}"
            for i, (now, old) in enumerate(zip(shapes, before, strict=True))
            if now != old
        ]
        if not new:
            return f"{name}: compiled again for the same shapes ({_listed(list(shapes))})"
        return f"{name}: {_listed(new, '; ')}"
    return f"{name}: {_listed(list(shapes))}"


def _listed(parts: list[str], between: str = ", ") -> str:
    if not parts:
        return "no arguments"
    more = len(parts) - MAX_ARGUMENTS
    return between.join(parts[:MAX_ARGUMENTS]) + (f"{between}{more} more" if more > 0 else "")
