"""What happens when the loss or the gradient of an update is not finite (`train.on_nonfinite: stop`).

What it guarantees: the run stops and says which figure and which update it was; the parameters are those before that update;
they and the mini-batch lie in `runs/NAME/nonfinite/update-V`, from which `load_mini_batch` brings the update's exact input
back. Every process sees the same figures, so all stop at the same update.

The payloads are pulled from the storage units once more: these hold them until the update is reported, and it is not. So it
costs nothing while all goes well. The folder holds

* `plan.msgpack`: the mini-batch plan;
* `payload.safetensors`: the fields of every trajectory, `0.tokens_T` being those of the plan's placement 0, and every image, by
  content hash;
* `weights/`: the parameters of version V, as they are published (`transfer/weights.py`);
* `figures.json`: loss, gradient norm and so on; null where not finite. Written last: without it the folder is not whole.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import safetensors.numpy

from knittrans_jax.trajectory import MiniBatchPlan, Trajectory
from knittrans_jax.transfer.pull import Payload

FOLDER = "nonfinite"
CHECKED = ("loss", "grad_norm")
"""Figures of an update that must be finite."""
_FIELDS = tuple(field.name for field in dataclasses.fields(Trajectory))


class BadNumbersError(RuntimeError):
    """An update's loss or gradient is not finite, and the configuration says that the run stops."""

    def __init__(self, plan: MiniBatchPlan, figures: Mapping[str, float]) -> None:
        named = " and ".join(f"{name} is {figures[name]:g}" for name in bad_figures(figures))
        super().__init__(f"update {plan.update + 1} (plan {plan.plan_id}, from version {plan.update}): {named}")
        self.plan, self.figures = plan, figures


@dataclasses.dataclass(frozen=True)
class SavedMiniBatch:
    """A mini-batch that gave bad numbers, and its figures."""

    plan: MiniBatchPlan
    payload: Payload
    figures: dict[str, float | None]


def bad_figures(figures: Mapping[str, float]) -> list[str]:
    """Which of the figures that must be finite are not."""
    return [name for name in CHECKED if not math.isfinite(figures[name])]


def folder_of(run_dir: Path, update: int) -> Path:
    """Where the mini-batch of the update from version `update` is kept."""
    return run_dir / FOLDER / f"update-{update}"


def save_mini_batch(folder: Path, bad: BadNumbersError, pull: Callable[[MiniBatchPlan], Payload]) -> None:
    """Writes everything but the parameters.

    Args:
        folder: made if need be.
        bad: what went wrong.
        pull: brings every trajectory and image of the plan.

    Raises:
        OSError: it cannot be written. And whatever `pull` raises.
    """
    payload = pull(bad.plan)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.msgpack").write_bytes(msgspec.msgpack.encode(bad.plan))
    arrays = {
        f"{index}.{name}": getattr(trajectory, name)
        for index, trajectory in payload.trajectories.items()
        for name in _FIELDS
    }
    safetensors.numpy.save_file(arrays | payload.media, folder / "payload.safetensors")
    finite = {name: value if math.isfinite(value) else None for name, value in bad.figures.items()}
    (folder / "figures.json").write_bytes(msgspec.json.encode(finite))


def load_mini_batch(folder: Path) -> SavedMiniBatch:
    """What `save_mini_batch` wrote; `transfer.pack` makes the update's arrays of it, for any mesh.

    Raises:
        OSError: a file is missing.
        msgspec.MsgspecError, safetensors.SafetensorError, KeyError: a file is damaged.
    """
    figures = msgspec.json.decode((folder / "figures.json").read_bytes(), type=dict[str, float | None])
    plan = msgspec.msgpack.decode((folder / "plan.msgpack").read_bytes(), type=MiniBatchPlan)
    arrays = safetensors.numpy.load_file(folder / "payload.safetensors")
    payload = Payload(
        trajectories={
            index: Trajectory(**{name: arrays[f"{index}.{name}"] for name in _FIELDS})
            for index in range(len(plan.placements))
        },
        media={image.digest: arrays[image.digest] for image in plan.images},
    )
    return SavedMiniBatch(plan, payload, figures)


__all__ = ["BadNumbersError", "SavedMiniBatch", "bad_figures", "folder_of", "load_mini_batch", "save_mini_batch"]
