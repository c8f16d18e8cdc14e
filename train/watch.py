"""Signs of life, and the lack of them: a training process that is stuck is found, and says where, instead of waiting for ever.

* `heartbeat`: a thread tells the scheduler that the process lives, whatever its main thread does. A process that is stopped, or
  whose interpreter is held, goes silent; the launcher ends it after `launch.silence_timeout_s`.
* `watchdog`: what the main thread does must be done in time. A collective whose other side is gone, or a device that does not
  answer, becomes the end of the process, with the stack of every thread in its log.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator

from knittrans_jax.launch.messages import Beat
from knittrans_jax.transfer.control import ControlClient, ControlError

BEAT_S = 1.0
"""Pause between two signs of life."""
JOIN_S = 2.0


@contextlib.contextmanager
def heartbeat(connect: Callable[[Callable[[], bool]], ControlClient], process: int) -> Iterator[None]:
    """While entered, a thread of its own tells the scheduler that training process `process` lives.

    Args:
        connect: opens the thread's connection; takes what tells it to give up.
        process: the number of the training process.
    """
    stop = threading.Event()

    def beat() -> None:
        with contextlib.suppress(ControlError), connect(stop.is_set) as control:
            while not stop.wait(BEAT_S):
                with contextlib.suppress(ControlError):  # the main thread finds out what that means
                    control.call(Beat(process=process))

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(JOIN_S)


@contextlib.contextmanager
def watchdog(timeout_s: float) -> Iterator[None]:
    """What is done inside must be done within `timeout_s`: else the stacks of all threads go to stderr and the process ends."""
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
