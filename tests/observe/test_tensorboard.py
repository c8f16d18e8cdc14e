"""TensorBoard event files: the scalars of every update, read back; and what is said without the package."""

import importlib
import importlib.util
import struct
from pathlib import Path

import msgspec
import pytest

from knittrans_jax.admission.log import EventLog
from knittrans_jax.config import Config, ConfigError, ObserveConfig
from knittrans_jax.observe.metrics import TENSORBOARD, RunObserver, observe
from knittrans_jax.observe.tensorboard import PACKAGE, check_tensorboard

from .made import config, events


def with_tensorboard(tmp_path: Path) -> Config:
    return msgspec.structs.replace(config(tmp_path), observe=ObserveConfig(tensorboard=True))


def scalars(directory: Path) -> dict[tuple[str, int], float]:
    """(name, step) -> value, from the record files of a folder."""
    event_type = importlib.import_module("tensorboardX.proto.event_pb2").Event
    found = {}
    for path in directory.iterdir():
        content, offset = path.read_bytes(), 0
        while offset < len(content):
            (length,) = struct.unpack_from("<Q", content, offset)
            event = event_type.FromString(content[offset + 12 : offset + 12 + length])
            offset += 12 + length + 4
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return found


def test_every_update_and_evaluation_is_written_at_its_step(tmp_path: Path) -> None:
    pytest.importorskip(PACKAGE, reason="needs the extra `tensorboard`; `make test` installs it")
    one = with_tensorboard(tmp_path)
    one.directory.mkdir()
    with EventLog(one.directory / "events.log", fsync=False) as log:
        log.append(events())
    observe(one)
    found = scalars(one.directory / TENSORBOARD)
    assert {step for name, step in found if name == "train/reward_mean"} == {1, 2, 3, 4, 5, 6}
    assert found["staleness_updates/gap", 6] == pytest.approx(1.0)
    assert found["groups/consumed", 4] == 4
    assert found["waits_s/groups", 1] == 0.5
    assert found["heldout/exact_share", 6] == pytest.approx(0.85)
    assert ("trainer/logprob_mismatch", 6) not in found
    assert (one.directory / "report.html").exists()


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^observe.tensorboard: .*knittrans-jax\[tensorboard\]"):
        check_tensorboard()
    one = with_tensorboard(tmp_path)
    one.directory.mkdir()
    with pytest.raises(ConfigError, match=r"observe.tensorboard"):
        RunObserver(one)
    assert list(one.directory.iterdir()) == []
