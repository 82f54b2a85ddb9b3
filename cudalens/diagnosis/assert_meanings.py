"""Translate the assertions that CUDA prints: which ops, which argument, what it means.

The built-in table, ``core/data/asserts.json``, holds the texts of the kernels of torch up to 2.14.
Texts that the GPU suite met on hardware are read from ``data/assert_texts_<version>.json`` where
present; they fill gaps and replace nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

from cudalens.core.api_names import api_names, stem_of
from cudalens.core.device_asserts import AssertLine, assert_table
from cudalens.core.text_files import packaged

__all__ = ["Meaning", "folded", "harvested", "known_texts", "meaning_of"]

_LITERAL = re.compile(r'\s*&&\s*"(?:[^"\\]|\\.)*"\s*$')
_BRACKETS = {"getitem": "x[i]", "setitem": "x[i]"}
_COMPILED = re.compile(r"index out of bounds: (?P<low>.+?) <= (?P<index>.+?) < (?P<size>.+)")


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """Meaning of an assertion text."""

    arguments: tuple[tuple[str, str], ...]
    """The ops whose kernels print it, each with the schema name of the argument at fault."""
    sentence: str
    """The mistake in the values, in words; begins small, without a full stop."""
    is_compiled: bool = False
    """True if code that torch.compile generated printed it: no op of the table's is to blame."""

    @property
    def ops(self) -> tuple[str, ...]:
        """The ops whose kernels print it, as ``aten::embedding``."""
        return tuple(op for op, _ in self.arguments)

    @property
    def argument(self) -> str | None:
        """The argument at fault when it has the same name in all these ops."""
        names = {name for _, name in self.arguments}
        return names.pop() if len(names) == 1 else None

    def argument_of(self, op: str | None) -> str | None:
        """Return the argument at fault in this op, in-place or not; ``None`` for another op.

        Args:
            op: the op, or the API function that calls it: ``torch.nn.functional.embedding``.
        """
        name = op or ""
        if "::" in name:
            return dict(self.arguments).get(name.rstrip("_"))
        stem = _BRACKETS.get(stem_of(name), stem_of(name).strip("_"))
        arguments = {
            argument
            for op_name, argument in self.arguments
            if stem in (stem_of(op_name), *(stem_of(api) for api in api_names(op_name)))
        }
        return arguments.pop() if len(arguments) == 1 else None


def folded(expression: str) -> str:
    """Return an expression without blanks and without the message behind its last ``&&``."""
    return "".join(_LITERAL.sub("", expression).split())


def meaning_of(line: AssertLine, torch_version: str | None = None) -> Meaning | None:
    """Return what an assertion means, ``None`` for one that no table knows.

    Args:
        line: the assertion as it was printed.
        torch_version: such as ``2.13.0+cu130``; chooses the texts met on hardware.
    """
    compiled = _COMPILED.search(line.expression)
    if compiled is not None:
        return _compiled(compiled)
    key = folded(line.expression)
    table = known_texts()
    for name in (f"{line.file}:{key}", key, f"{line.file}:*"):
        if name in table:
            return table[name]
    return harvested(torch_version).get(key) or _own_message(line)


def _own_message(line: AssertLine) -> Meaning | None:
    """Read the assertion of ``torch._assert_async``, which prints the caller's own words."""
    if "_assert_async" not in line.function:
        return None
    return Meaning(
        arguments=(("aten::_assert_async", "self"),),
        sentence=f"a check that the code itself makes on the device failed: {line.expression}",
    )


@cache
def known_texts() -> Mapping[str, Meaning]:
    """Return the built-in table by folded expression, after the file's name where it matters."""
    texts = {}
    for row in assert_table():
        pairs = [item.rpartition(":")[::2] for item in row["ops"]]
        meaning = Meaning(
            arguments=tuple((op if "::" in op else f"aten::{op}", name) for op, name in pairs),
            sentence=row["sentence"],
        )
        texts.update(dict.fromkeys(map(folded, _texts(row)), meaning))
    return MappingProxyType(texts)


def _texts(row: Mapping[str, Any]) -> Iterator[str]:
    for place, _, expression in row.get("sites", {}).values():
        file, _, _ = place.partition(":")
        yield f"{file}:{expression}" if row.get("by_file") else expression
    yield from row.get("texts", ())


def _compiled(match: re.Match[str]) -> Meaning:
    low, size = match["low"].strip(), match["size"].strip()
    high = str(int(size) - 1) if size.isdigit() else f"{size} - 1"
    return Meaning(
        arguments=(),
        sentence=f"an index in code that torch.compile generated is outside {low} … {high}",
        is_compiled=True,
    )


@cache
def harvested(torch_version: str | None) -> Mapping[str, Meaning]:
    """Return the texts met on hardware with a torch release; empty where none were harvested."""
    release = (torch_version or "").partition("+")[0]
    try:
        return read_harvest(packaged(f"assert_texts_{release}.json"))
    except FileNotFoundError:
        return MappingProxyType({})


def read_harvest(harvest: Mapping[str, Any]) -> Mapping[str, Meaning]:
    """Read what the file of texts holds that the GPU suite writes."""
    meanings: dict[str, Meaning] = {}
    for item in harvest["texts"]:
        meaning = meanings.get(folded(item["expression"]))
        pairs = (*(meaning.arguments if meaning else ()), *map(tuple, item["arguments"]))
        meanings[folded(item["expression"])] = Meaning(
            arguments=tuple(dict.fromkeys(pairs)), sentence=item["sentence"]
        )
    return MappingProxyType(meanings)
