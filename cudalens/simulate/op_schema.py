"""Facts from an op's schema, and checks of its operands: devices, numbers as tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from cudalens.core._torch import has_kernel

_FUNC = re.compile(r"- func: ([\w.]+)")
_DEVICE_CHECK = re.compile(r"  device_check: NoCheck(?:\s*#\s*(.*))?")
_TENSORS = ("Tensor", "Optional[Tensor]")
_LISTS = ("List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]")
_CUDA_ENTRY = re.compile(r"    (?:\w+, )*CUDA(?:, \w+)*: ")


class DeviceCheck(Enum):
    """Device check of an op's compiled CUDA wrapper."""

    WRAPPER = "wrapper"  # compares every tensor argument with the first
    ITERATOR = "iterator"  # TensorIterator: 0-dim CPU operands ride along
    NONE = "none"


class YamlFacts(NamedTuple):
    """Facts of native_functions.yaml that schemas lack."""

    check: dict[str, DeviceCheck]
    structured: set[str]
    has_cuda_kernel: set[str]


@cache
def yaml_facts() -> YamlFacts:
    """Read native_functions.yaml of the installed torch."""
    spec = find_spec("torchgen")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("torchgen, which ships with torch, was not found")
    path = Path(spec.origin).parent / "packaged/ATen/native/native_functions.yaml"
    facts = YamlFacts(check={}, structured=set(), has_cuda_kernel=set())
    name = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := _FUNC.match(line):
            name = f"aten::{match[1]}"
        elif match := _DEVICE_CHECK.match(line):
            # Lists fall back to one op per tensor; the rest is TensorIterator, said or not.
            is_list = (match[1] or "").startswith("foreach kernels")
            facts.check[name] = DeviceCheck.NONE if is_list else DeviceCheck.ITERATOR
        elif line.startswith(("  structured: True", "  structured_delegate:")):
            facts.structured.add(name)
        elif _CUDA_ENTRY.match(line):
            facts.has_cuda_kernel.add(name)
    return facts


@dataclass(frozen=True, kw_only=True)
class OpSchema:
    """Everything the generic kernel asks about an op; its arguments by their positions.

    defaults: name and default of each argument.
    aliases: per return the position of the argument that it gives back, or None.
    is_composite: one kernel in terms of other ops serves the CPU and every other device.
    """

    op: Any
    name: str
    names: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]
    positional: int
    aliases: tuple[int | None, ...]
    outs: tuple[int, ...]
    tensors: tuple[int, ...]
    lists: tuple[int, ...]
    written: tuple[int, ...]
    generator: int | None
    is_view: bool
    is_composite: bool
    check: DeviceCheck
    is_structured: bool


def aten_ops(names: str) -> frozenset[str]:
    """Return the full names of torch's own ops, from ``"copy_ add.Tensor"``."""
    return frozenset(f"aten::{name}" for name in names.split())


def _alias_source(value: Any, arguments: list[Any]) -> int | None:
    if value.alias_info is None or not value.alias_info.is_write:
        return None
    for i, argument in enumerate(arguments):
        if argument.alias_info and argument.alias_info.before_set & value.alias_info.before_set:
            return i
    return None


@cache
def schema_of(op: Any) -> OpSchema:
    """Return the facts of an OpOverload."""
    schema = op._schema
    raw = list(schema.arguments)
    kinds = [str(a.type) for a in raw]
    written = tuple(i for i, a in enumerate(raw) if a.alias_info and a.alias_info.is_write)
    name = op.name()
    facts = yaml_facts()
    default = DeviceCheck.WRAPPER if name.startswith("aten::") else DeviceCheck.NONE
    check = facts.check.get(name, default)
    has_wrapper = name in facts.has_cuda_kernel and check is not DeviceCheck.NONE
    return OpSchema(
        op=op,
        name=name,
        names=tuple(a.name for a in raw),
        defaults=tuple((a.name, a.default_value) for a in raw),
        positional=sum(not a.kwarg_only for a in raw),
        aliases=tuple(_alias_source(r, raw) for r in schema.returns),
        outs=tuple(i for i in written if raw[i].kwarg_only),
        tensors=tuple(i for i, kind in enumerate(kinds) if kind in _TENSORS),
        lists=tuple(i for i, kind in enumerate(kinds) if kind in _LISTS),
        written=written,
        generator=next((i for i, kind in enumerate(kinds) if "Generator" in kind), None),
        is_view=any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
        is_composite=has_kernel(name, "CompositeExplicitAutograd")
        and not has_kernel(name, "CPU")
        and not has_wrapper,
        check=check,
        is_structured=name in facts.structured,
    )


# --- tensors of different devices, in the words of CUDA's compiled kernels ------------------------


_TWO_DEVICES: Final = (
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
)
_INDEX_OPS: Final = aten_ops("index.Tensor index.Tensor_out _index_put_impl_")
# Their kernel makes its result before TensorIterator sees the operands.
_NO_SCALARS: Final = aten_ops("binary_cross_entropy binary_cross_entropy.out")


def _tensors(facts: OpSchema, values: Sequence[Any]) -> Iterator[tuple[str, bool, Tensor]]:
    """Yield name, is_written and tensor in schema order."""
    for i, value in enumerate(values):
        for item in value or () if i in facts.lists else (value,):
            if isinstance(item, Tensor):
                yield facts.names[i], i in facts.written, item


def method_name(facts: OpSchema) -> str:
    """Return the name of the compiled wrapper, which CUDA puts into its message."""
    name, _, overload = facts.name.removeprefix("aten::").partition(".")
    cpp = f"{name}_out" if facts.outs else name
    if not facts.is_structured:
        return f"wrapper_CUDA_{overload}_{cpp}"
    return f"wrapper_CUDA_{cpp}" + (f"_{overload}" if overload else "")


def _check_index(facts: OpSchema, values: Sequence[Any]) -> None:
    """Refuse device indices of a CPU tensor, and values with dimensions on the other device.

    CPU indices are moved to the device, and 0-dim values to the tensor that is written.
    """
    self, indices = values[0], values[1]
    if not self.is_cuda and any(i is not None and i.is_cuda for i in indices):
        raise RuntimeError(
            f"indices should be either on {self.device} or on the same device as the indexed"
            f" tensor ({self.device})"
        )
    if facts.name != "aten::_index_put_impl_":
        return
    if values[2].device != self.device and values[2].dim() > 0:
        raise RuntimeError(_TWO_DEVICES)


def has_mixed_devices(facts: OpSchema, values: Sequence[Any]) -> bool:
    """Return whether any tensor of this call lives elsewhere than on the device."""
    return any(not tensor.is_cuda for _, _, tensor in _tensors(facts, values))


def check_devices(facts: OpSchema, values: Sequence[Any]) -> None:
    """Raise CUDA's own error when the tensors of this call live on different devices."""
    if facts.check is DeviceCheck.NONE:
        return
    tensors = list(_tensors(facts, values))
    if all(tensor.is_cuda for _, _, tensor in tensors):
        return
    if facts.name in _INDEX_OPS:
        _check_index(facts, values)
    elif facts.name in ("aten::masked_fill_.Scalar", "aten::masked_fill_.Tensor"):
        self, mask = values[0], values[1]
        if mask.device != self.device:
            raise RuntimeError(
                "expected self and mask to be on the same device, but got mask on"
                f" {mask.device} and self on {self.device}"
            )
    elif facts.check is DeviceCheck.WRAPPER:
        # The wrapper compares with what it meets first, and looks at the results before all else.
        outs = {facts.names[i] for i in facts.outs}
        ordered = sorted(tensors, key=lambda item: item[0] not in outs)
        common = ordered[0][2].device
        for name, _, tensor in ordered:
            if tensor.device != common:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but got"
                    f" {name} is on {tensor.device}, different from other tensors on {common}"
                    f" (when checking argument in method {method_name(facts)})"
                )
    elif facts.name in _NO_SCALARS or any(
        not t.is_cuda and (t.dim() > 0 or written) for _, written, t in tensors
    ):
        raise RuntimeError(_TWO_DEVICES)


# --- numbers where the schema says Tensor ---------------------------------------------------------


_MASKS: Final = frozenset({"condition", "mask"})


def number_tensor(value: complex, facts: OpSchema, host: Sequence[Any]) -> Tensor:
    """Return the 0-dim CPU tensor for a number, with the dtype that leaves promotion unchanged."""
    tensors = [
        it
        for name, it in zip(facts.names, host, strict=True)
        if isinstance(it, Tensor) and name not in _MASKS
    ]
    # The operand that decides the dtype: one with dimensions wins over a 0-dim one.
    other = max(tensors, key=lambda it: it.dim() > 0, default=None)
    if isinstance(value, bool) or other is None:
        return torch.tensor(value)
    dtype = torch.result_type(other, value)
    if dtype is other.dtype and other.dim() and not isinstance(value, int):
        # Beside a tensor with dimensions the most exact number promotes nothing.
        dtype = torch.float64 if isinstance(value, float) else torch.complex128
    return torch.tensor(value, dtype=dtype)
