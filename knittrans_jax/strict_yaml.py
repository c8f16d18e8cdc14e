"""Reading YAML into typed records without surprises: what does not fit is an error that names the dotted key and the value.

PyYAML follows YAML 1.1, where `1e-3` (no dot) is a string and the last of two equal keys silently wins; here it is a number,
and an error. msgspec says `$.a[...].b` for an entry of a mapping; here the entry's own key is named.
"""

from __future__ import annotations

import copy
import difflib
import re
from typing import Any, TypeVar

import msgspec
import yaml

Record = TypeVar("Record")


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's floats and unique keys. The resolver and constructors are this class's own."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?
             |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
             |[-+]?\.(?:inf|Inf|INF)
             |\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (dict, list)):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word or a number", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


_Loader.add_constructor("tag:yaml.org,2002:map", _unique_mapping)


def parse_yaml(text: str) -> Any:
    """The document's value; raises `yaml.YAMLError`, which names line and column."""
    return yaml.load(text, Loader=_Loader)


def convert_strictly(raw: Any, record: type[Record]) -> Record:
    """The plain value as a msgspec record; raises `ValueError` naming key, value and what was expected."""
    try:
        return msgspec.convert(raw, record, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(_explain(raw, record, str(error))) from error


def _explain(raw: Any, record: type, message: str) -> str:
    """Rewrites msgspec's "... - at `$.a[...].b`" so that the dotted key comes first and the value is shown."""
    text, _, where = message.partition(" - at `")
    at_key = where.startswith("key` in `")
    steps = re.findall(r"\[\.\.\.\]|\[\d+\]|[^.\[\]]+", where.removeprefix("key` in `").rstrip("`").removeprefix("$"))
    path: list[Any] = []
    for step in steps:
        if step == "[...]":
            path.append(_guilty_key(raw, record, path, message))
        else:
            path.append(int(step[1:-1]) if step.startswith("[") else step)
    if at_key:
        path.append(_guilty_key(raw, record, path, message))
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", text)
    missing = re.fullmatch(r"Object missing required field `(.*)`", text)
    choices = _choices(record, path[:-1] if at_key else path, keys=at_key)
    if unknown:
        known = _fields(record, path)
        near = difflib.get_close_matches(unknown[1], known, n=1)
        text = f"no such key{f' (did you mean {near[0]}?)' if near else ''}; known: {', '.join(known)}"
        path.append(unknown[1])
    elif missing:
        text = "required, but not given"
        path.append(missing[1])
    elif at_key:
        text = f"a key here is {'one of ' + ', '.join(choices) if choices else 'a string (quote it)'}"
    elif choices:
        text = f"expected one of {', '.join(choices)}"
    else:
        text = text[:1].lower() + text[1:]
    value = "" if missing else f" (value {short(_at(raw, path))})"
    return f"{'.'.join(map(str, path)) or 'configuration'}: {text}{value}"


def _at(raw: Any, path: list[Any]) -> Any:
    for part in path:
        try:
            raw = raw[part]
        except (KeyError, IndexError, TypeError):
            return None
    return raw


def _guilty_key(raw: Any, record: type, path: list[Any], message: str) -> Any:
    """The key behind msgspec's `[...]`: the one whose entry alone brings the same message."""
    for key, value in _at(raw, path).items():
        alone = copy.deepcopy(raw)
        node = _at(alone, path)
        node.clear()
        node[key] = value
        try:
            msgspec.convert(alone, record, strict=True)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return key
    return "[...]"


def _type_at(record: type, path: list[Any]) -> Any:
    node: Any = msgspec.inspect.type_info(record)
    for part in path:
        if isinstance(node, msgspec.inspect.UnionType):
            node = next((t for t in node.types if isinstance(t, msgspec.inspect.DictType)), None)
        if isinstance(node, msgspec.inspect.StructType):
            node = next((field.type for field in node.fields if field.name == part), None)
        elif isinstance(node, msgspec.inspect.DictType):
            node = node.value_type
        else:
            return None
    return node


def _fields(record: type, path: list[Any]) -> list[str]:
    node = _type_at(record, path)
    return [field.name for field in node.fields] if isinstance(node, msgspec.inspect.StructType) else []


def _choices(record: type, path: list[Any], *, keys: bool) -> list[str]:
    node = _type_at(record, path)
    if keys and isinstance(node, msgspec.inspect.DictType):
        node = node.key_type
    return [str(value) for value in node.values] if isinstance(node, msgspec.inspect.LiteralType) else []


def short(value: Any) -> str:
    """A value for a message: its `repr`, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
