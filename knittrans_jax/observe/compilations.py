"""Counts this process's XLA compilations, so that a recompilation after warm-up cannot go unseen."""

from __future__ import annotations

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts from its creation on; one per process, created before the first program is built."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == _EVENT:
            self.count += 1
            self.seconds += duration_secs
