"""Reads a compiled program's text: which collectives it holds, how large, between how many devices, and in which loops.

Pure text in, records out. A loop's body stands once in the text, however often it runs: `loops` says in how many loops, one
inside the other, a collective stands. Of an asynchronous pair the start counts.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf"= (?P<shape>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"(?P<type>pred|[a-z]+\d+[a-z0-9]*)\[(?P<shape>[\d,]*)\]")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_CALLED = re.compile(
    r"\b(?P<how>body|condition|calls|to_apply|true_computation|false_computation)=%?(?P<name>[\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{(?P<names>[^}]*)\}")
_GROUPS = re.compile(r"replica_groups=(?:\{\{(?P<first>[\d,]*)\}|\[\d+,(?P<size>\d+)\]<=)")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program. Bytes are those of its result on one device."""

    kind: str
    result_bytes: int
    devices: int | None
    """How many exchange with one another; None where the text does not say (all of them, or neighbours)."""
    loops: int
    """Loops that it stands in."""


def read_collectives(hlo: str) -> list[Collective]:
    """Every collective of a program's text, in its order."""
    found: list[tuple[str, Collective]] = []
    calls: dict[str, list[tuple[str, bool]]] = collections.defaultdict(list)
    inside = entry = ""
    for line in hlo.splitlines():
        if line[:1] not in ("", " ", "}") and (header := _COMPUTATION.match(line)):
            inside = header["name"]
            entry = inside if header["entry"] else entry
            continue
        calls[inside].extend(_called(line))
        if (match := _COLLECTIVE.search(line)) is not None:
            found.append((inside, Collective(match["kind"], _result_bytes(line, match), _group_size(line), 0)))
    depth = _loop_depths(calls, entry)
    return [dataclasses.replace(one, loops=depth.get(name, 0)) for name, one in found]


def count_kinds(found: Sequence[Collective]) -> dict[str, int]:
    """How often each kind stands in the program."""
    return dict(sorted(collections.Counter(one.kind for one in found).items()))


def _called(line: str) -> Iterator[tuple[str, bool]]:
    """(computation, it is a loop's body) for each that an instruction refers to."""
    for match in _CALLED.finditer(line):
        yield match["name"], match["how"] == "body"
    if (branches := _BRANCHES.search(line)) is not None:
        yield from ((name.strip().lstrip("%"), False) for name in branches["names"].split(","))


def _loop_depths(calls: dict[str, list[tuple[str, bool]]], entry: str) -> dict[str, int]:
    """Loops around each computation: the most, where it is called from several places."""
    depth = {entry: 0}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        for called, is_body in calls.get(name, ()):
            found = depth[name] + is_body
            if found > depth.get(called, -1):
                depth[called] = found
                waiting.append(called)
    return depth


def _result_bytes(line: str, match: re.Match[str]) -> int:
    arrays = [_array_bytes(one["type"], one["shape"]) for one in _ARRAY.finditer(match["shape"])]
    if match["start"]:  # (operands..., results..., contexts): the results are as many as the operands
        operands = max(1, len(_ARRAY.findall(line[match.end() : line.index(")", match.end())])))
        arrays = arrays[operands : 2 * operands] or arrays
    return sum(arrays)


def _array_bytes(kind: str, shape: str) -> int:
    bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
    return math.ceil(math.prod(int(n) for n in shape.split(",") if n) * bits / 8)


def _group_size(line: str) -> int | None:
    match = _GROUPS.search(line)
    if match is None:
        return None
    return int(match["size"]) if match["size"] else len(match["first"].split(",")) if match["first"] else None
