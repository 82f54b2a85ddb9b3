"""The JSON form of the data model: dataclasses to plain dictionaries and back, losslessly."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from cudalens.core.report_types import GraphEdge

# The JSON form names these fields with words that Python or its readers reserve.
_JSON_NAMES: dict[type, dict[str, str]] = {GraphEdge: {"src": "from", "dst": "to"}}

_T = TypeVar("_T")


def to_plain(value: Any) -> Any:
    """Give dataclasses as dictionaries, tuples as lists, and non-finite floats as texts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = _JSON_NAMES.get(type(value), {})
        return {
            names.get(item.name, item.name): to_plain(getattr(value, item.name))
            for item in dataclasses.fields(value)
        }
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def from_plain(cls: type[_T], data: dict[str, Any]) -> _T:
    """Build ``cls`` from what :func:`to_plain` gave; keys that it does not know are ignored."""
    hints = get_type_hints(cls)
    names = _JSON_NAMES.get(cls, {})
    known = {}
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        key = names.get(item.name, item.name)
        if key in data:
            known[item.name] = _read(hints[item.name], data[key])
    return cls(**known)


def _read(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        candidates = [arg for arg in get_args(hint) if arg is not type(None)]
        return _read(candidates[0], value) if len(candidates) == 1 else value
    if origin is tuple:
        args = get_args(hint)
        return tuple(_read(args[0], item) for item in value)
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast("type[Any]", hint), value)
    return value
