"""The JSON Schema of a report, made from the report's types: ``python -m tests.report_schema``."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import jsonschema

from cudalens.core import report
from cudalens.core.report import Report

FILE = Path(report.__file__).parents[1] / "report.schema.json"
PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def schema() -> dict[str, Any]:
    """Return the schema of :meth:`Report.to_dict`."""
    definitions: dict[str, Any] = {}
    root = _object(Report, definitions)
    version = root["properties"]["schema_version"]
    del version["type"]
    version["const"] = report.SCHEMA_VERSION
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "cudalens report",
        "description": "What is known of one failure; unknown facts are null or empty.",
        **root,
        "$defs": dict(sorted(definitions.items())),
    }


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints, texts = get_type_hints(cls), _texts(cls)
    properties = {}
    for item in dataclasses.fields(cls):
        name = report._JSON_NAMES.get(cls, {}).get(item.name, item.name)
        text = {"description": texts[item.name]} if item.name in texts else {}
        properties[name] = {**_schema_of(hints[item.name], definitions), **text}
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name != report.OPTIONAL.get(cls)],
        "additionalProperties": False,
    }


def _schema_of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        name = typing.cast("type", hint).__name__
        if name not in definitions:
            definitions[name] = {}  # it may hold itself
            text = (inspect.getdoc(hint) or "").partition("\n")[0]
            definitions[name] = {
                "description": text,
                **_object(typing.cast(type, hint), definitions),
            }
        return {"$ref": f"#/$defs/{name}"}
    if origin in (typing.Union, types.UnionType):
        each = [_schema_of(item, definitions) for item in args]
        if all(item.keys() == {"type"} for item in each):
            return {"type": [item["type"] for item in each]}
        return {"anyOf": each}
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin is tuple:
        if args[-1] is not ...:
            each = [_schema_of(item, definitions) for item in args]
            return {"type": "array", "prefixItems": each, "minItems": len(args), "items": False}
        return {"type": "array", "items": _schema_of(args[0], definitions)}
    if origin is Mapping:
        return {"type": "object"}
    return {"type": PLAIN[hint]}


def _texts(cls: type) -> dict[str, str]:
    """Return the docstrings below a class's fields, inherited ones included."""
    found: dict[str, str] = {}
    for base in cls.__bases__:
        if dataclasses.is_dataclass(base):
            found |= _texts(base)
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            value = after.value if isinstance(after, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[field.target.id] = " ".join(value.value.split())
    return found


def validator() -> jsonschema.Draft202012Validator:
    """Return what tells whether data fits the schema as it stands in the package."""
    return jsonschema.Draft202012Validator(json.loads(FILE.read_text(encoding="utf-8")))


def text() -> str:
    """Return the schema as it stands in the package."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
