"""What the schema and native_functions.yaml say about one op, computed once per op."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_FUNC = re.compile(r"- func: ([\w.]+)")
_DEVICE_CHECK = re.compile(r"  device_check: NoCheck(?:\s*#\s*(.*))?")
_CUDA_ENTRY = re.compile(r"    (?:\w+, )*CUDA(?:, \w+)*: ")


class DeviceCheck(Enum):
    """How the compiled CUDA wrapper of an op refuses tensors of another device."""

    WRAPPER = "wrapper"  # compares every tensor argument with the first
    ITERATOR = "iterator"  # TensorIterator: 0-dim CPU operands ride along
    NONE = "none"


@dataclass(frozen=True, kw_only=True)
class YamlFacts:
    """What native_functions.yaml says that schemas do not."""

    check: dict[str, DeviceCheck]
    structured: frozenset[str]
    has_cuda_kernel: frozenset[str]


def _yaml_path() -> Path:
    spec = find_spec("torchgen")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("torchgen, which ships with torch, was not found")
    return Path(spec.origin).parent / "packaged/ATen/native/native_functions.yaml"


@cache
def yaml_facts() -> YamlFacts:
    """Read native_functions.yaml of the installed torch."""
    check: dict[str, DeviceCheck] = {}
    structured: set[str] = set()
    has_cuda_kernel: set[str] = set()
    name = ""
    for line in _yaml_path().read_text(encoding="utf-8").splitlines():
        if found := _FUNC.match(line):
            name = f"aten::{found[1]}"
        elif found := _DEVICE_CHECK.match(line):
            # Lists fall back to one op per tensor; the rest is TensorIterator, said or not.
            is_list = (found[1] or "").startswith("foreach kernels")
            check[name] = DeviceCheck.NONE if is_list else DeviceCheck.ITERATOR
        elif line.startswith(("  structured: True", "  structured_delegate:")):
            structured.add(name)
        elif _CUDA_ENTRY.match(line):
            has_cuda_kernel.add(name)
    return YamlFacts(
        check=check,
        structured=frozenset(structured),
        has_cuda_kernel=frozenset(has_cuda_kernel),
    )


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One schema argument, as the kernel needs it."""

    name: str
    default: Any
    is_kwarg_only: bool
    is_written: bool
    is_tensor: bool  # Tensor, Tensor?
    is_tensor_list: bool


@dataclass(frozen=True, kw_only=True)
class OpFacts:
    """Everything the generic kernel asks about an op.

    aliases: per return the position of the argument that it gives back, or None.
    is_composite: one kernel in terms of other ops serves the CPU and every other device.
    """

    op: Any
    name: str
    arguments: tuple[Argument, ...]
    positional: int
    aliases: tuple[int | None, ...]
    outs: tuple[int, ...]
    tensors: tuple[int, ...]
    lists: tuple[int, ...]
    written_lists: tuple[int, ...]
    generator: int | None
    is_view: bool
    is_composite: bool
    check: DeviceCheck
    is_structured: bool


def full_name(schema: Any) -> str:
    """Return the schema's name with its overload, such as ``aten::index.Tensor``."""
    name = str(schema.name)
    return f"{name}.{schema.overload_name}" if schema.overload_name else name


def _argument(argument: Any) -> Argument:
    kind = str(argument.type)
    return Argument(
        name=argument.name,
        default=argument.default_value if argument.has_default_value() else None,
        is_kwarg_only=argument.kwarg_only,
        is_written=argument.alias_info is not None and argument.alias_info.is_write,
        is_tensor=kind in ("Tensor", "Optional[Tensor]"),
        is_tensor_list=kind in ("List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]"),
    )


def _alias_source(value: Any, arguments: list[Any]) -> int | None:
    if value.alias_info is None or not value.alias_info.is_write:
        return None
    for i, argument in enumerate(arguments):
        if argument.alias_info and argument.alias_info.before_set & value.alias_info.before_set:
            return i
    return None


@cache
def op_facts(op: Any) -> OpFacts:
    """Return the facts of an OpOverload."""
    schema = op._schema
    raw = list(schema.arguments)
    arguments = tuple(_argument(a) for a in raw)
    name = full_name(schema)
    facts = yaml_facts()
    check = facts.check.get(name, _default_check(name))
    has_wrapper = name in facts.has_cuda_kernel and check is not DeviceCheck.NONE
    outs = tuple(i for i, a in enumerate(arguments) if a.is_written and a.is_kwarg_only)
    return OpFacts(
        op=op,
        name=name,
        arguments=arguments,
        positional=sum(not a.is_kwarg_only for a in arguments),
        aliases=tuple(_alias_source(r, raw) for r in schema.returns),
        outs=outs,
        tensors=tuple(i for i, a in enumerate(arguments) if a.is_tensor),
        lists=tuple(i for i, a in enumerate(arguments) if a.is_tensor_list),
        written_lists=tuple(
            i for i, a in enumerate(arguments) if a.is_written and a.is_tensor_list
        ),
        generator=next((i for i, a in enumerate(raw) if "Generator" in str(a.type)), None),
        is_view=any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
        is_composite=_has_kernel(name, "CompositeExplicitAutograd")
        and not _has_kernel(name, "CPU")
        and not has_wrapper,
        check=check,
        is_structured=name in facts.structured,
    )


def _has_kernel(name: str, key: str) -> bool:
    import torch

    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def _default_check(name: str) -> DeviceCheck:
    return DeviceCheck.WRAPPER if name.startswith("aten::") else DeviceCheck.NONE
