"""The tensors of a Hugging Face checkpoint folder, by name: one safetensors file, or several with an index. Needs no JAX.

What it guarantees: a tensor is in exactly one file, the one that the index names; files outside the folder are never opened;
headers are read when the folder is opened, and of a tensor only the part that is asked for.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from knittrans_jax.models.hf_config import CheckpointError, read_json

SHOWN = 5
"""Most tensors that an error lists."""


class Checkpoint:
    """The tensors of a checkpoint folder: one `model.safetensors`, or several files with an index. A context manager."""

    def __init__(self, directory: Path) -> None:
        """Opens the files and reads their headers.

        Raises:
          CheckpointError: there is no such file, a file is damaged, or index and files contradict each other.
        """
        self.directory = Path(directory)
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        """Open file by tensor name."""
        with contextlib.ExitStack() as closing:
            closing.callback(self._stack.close)
            self._open()
            closing.pop_all()

    def _open(self) -> None:
        index = self.directory / "model.safetensors.index.json"
        single = self.directory / "model.safetensors"
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise CheckpointError(f"{index}: weight_map is missing, or does not map tensors to files")
            paths = [self.directory / name for name in sorted(set(weight_map.values()))]
            if any(path.parent != self.directory for path in paths):
                raise CheckpointError(f"{index}: weight_map names files outside {self.directory}")
        elif single.is_file():
            weight_map, paths = None, [single]
        else:
            raise CheckpointError(
                f"{self.directory}: neither model.safetensors nor model.safetensors.index.json is there"
            )
        for path in paths:
            try:
                file = self._stack.enter_context(safetensors.safe_open(path, framework="numpy"))
            except (OSError, safetensors.SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from error
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in self._files or (weight_map is not None and weight_map.get(name) != path.name):
                    raise CheckpointError(f"{path}: tensor {name} is not where the index says, or is there twice")
                self._files[name] = file
        absent = sorted(set(weight_map or ()) - self._files.keys())
        if absent:
            raise CheckpointError(f"{index}: {listed(absent)} named there but in no file")

    @property
    def names(self) -> set[str]:
        """All tensor names."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Of a tensor, as safetensors spells it (`BF16`)."""
        return self._files[name].get_slice(name).get_dtype()

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor, or the part of it at `index`; only that part is read."""
        file = self._files[name]
        return file.get_slice(name)[index] if index else file.get_tensor(name)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._stack.close()


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
