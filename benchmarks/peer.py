"""TransferQueue beside ours: runs `transferqueue_peer.py` with the Python of an environment where it is installed."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from knittrans_jax.benchmarks.harness import BenchFailed

SCRIPT = Path(__file__).parent / "transferqueue_peer.py"
HOW_TO_INSTALL = (
    "python3.11 -m venv PEER; PEER/bin/pip install torch==2.13.0 transferqueue; then peer_python=PEER/bin/python "
    "(`make peer` does both, into .venv-peer)"
)
START_S = 240.0


def is_installed(python: str) -> bool:
    """Whether that Python has TransferQueue."""
    if not python or not Path(python).exists():
        return False
    done = subprocess.run(
        [python, "-c", "import importlib.util as u, sys; sys.exit(not u.find_spec('transfer_queue'))"]
    )
    return done.returncode == 0


class Peer:
    """The peer process. Its storage units are chosen at the start: the best of 1, 2 and 4."""

    def __init__(self, python: str, payloads: Mapping[str, tuple[int, int]], readers: int = 0) -> None:
        """`payloads`: name -> (rows, bytes of a row). `readers`: processes that read side by side, at most."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [python, str(SCRIPT), json.dumps({"payloads": payloads, "readers": readers})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            self.chosen: dict[str, Any] = self._reply()
        except BaseException:
            self.close()
            raise

    def get_s(self, name: str, readers: int = 0) -> float:
        """Reads a payload back, or has each reader read its own share of the rows -> seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"get": name, "readers": readers}) + "\n")
        self._process.stdin.flush()
        return self._reply()["seconds"]

    def close(self) -> None:
        """Ends it."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise BenchFailed(f"TransferQueue ended: {self._errors.read()[-2000:].decode(errors='replace')}")
        return json.loads(line)
