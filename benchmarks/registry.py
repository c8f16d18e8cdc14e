"""The benchmarks by name. A benchmark is a module with

    class Settings(BenchSettings, frozen=True): ...   # its sizes, fixed here; `key=value` on the command line changes them
    def bench(settings: Settings, say: Say) -> Report: ...

and a line in `BENCHES`. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from knittrans_jax.benchmarks.harness import Report, Say
from knittrans_jax.config import ConfigError, apply_override
from knittrans_jax.strict_yaml import convert_strictly

BENCHES: dict[str, tuple[str, str]] = {
    "admission": (
        "knittrans_jax.benchmarks.admission",
        "groups a second through fold, log and policy, by attributes and pool",
    ),
    "staleness": (
        "knittrans_jax.benchmarks.staleness",
        "the policies and lock step as real, paced runs: staleness, step time; the simulator's word beside it",
    ),
    "encoding": (
        "knittrans_jax.benchmarks.encoding",
        "an update by every way to encode images, against its FLOP bound; error of the gradient",
    ),
    "transfer": (
        "knittrans_jax.benchmarks.transfer",
        "data wait of gather, dispatch and every step towards own rows, over links of a set rate; beside the predicted",
    ),
    "wire": (
        "knittrans_jax.benchmarks.wire",
        "the bulk channel beside a plain socket, over TLS, and beside TransferQueue's get; small-message round trips",
    ),
    "weights": (
        "knittrans_jax.benchmarks.weights",
        "new weights to 1, 2, 4, 8 readers: chain, tree, no fan-out, shared directory; trainer's bytes and stall",
    ),
    "faults": (
        "knittrans_jax.benchmarks.faults",
        "runs in which random roles are killed, stopped or told to leave: what is lost, how soon they train on",
    ),
    "noise": ("knittrans_jax.benchmarks.noise", "equal work against itself: what this machine cannot tell apart"),
}
"""Name -> module, and what it measures."""


class BenchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every benchmark's settings: frozen, and a key that it does not know is an error."""


@dataclasses.dataclass(frozen=True)
class Bench:
    """A benchmark with its settings, ready to run."""

    name: str
    settings: BenchSettings
    run: Callable[[Any, Say], Report]


def load_bench(name: str, overrides: Sequence[str]) -> Bench:
    """Finds a benchmark and reads its settings.

    Args:
        name: a key of `BENCHES`.
        overrides: `key=value` strings; the value is read as YAML.

    Raises:
        ConfigError: no such benchmark, or settings that it refuses.
    """
    if name not in BENCHES:
        listed = "\n".join(f"  {one:<12} {text}" for one, (_, text) in BENCHES.items())
        raise ConfigError(f"no benchmark {name!r}; there are\n{listed}")
    module = importlib.import_module(BENCHES[name][0])
    raw: dict[str, Any] = {}
    for override in overrides:
        apply_override(raw, override)
    try:
        settings = convert_strictly(raw, module.Settings)
    except ValueError as error:
        raise ConfigError(f"bench {name}: {error}") from error
    return Bench(name, settings, module.bench)
