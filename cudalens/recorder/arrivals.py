"""The first NaN that no op of a block made: which tensor brought it, or which call was given it.

Asked at most once a block, at the first op whose result holds a NaN, if it was given one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn

from cudalens.core import _torch
from cudalens.core.tensor_values import find_offenders
from cudalens.source.files import is_user_file
from cudalens.source.locate import locate_entries
from cudalens.source.safe_eval import instance_dict
from cudalens.source.stack import stack_of

Fact = tuple[str, str]
WATCHED: Fact = ("nan.watched", "yes")
"""What is known wherever each result was looked at."""
_FROM_PYTHON = frozenset({"aten::lift_fresh", "aten::lift_fresh_copy"})


def arrival(op: Any, inputs: Sequence[Tensor]) -> tuple[Fact, ...]:
    """Describe how the first NaN came, for the cause rules.

    Args:
        op: the running op, the first whose result holds a NaN.
        inputs: those of its tensors that held one; empty where it was given the number itself.
    """
    frames = stack_of(sys._getframe(1))
    span = locate_entries(frames)
    name = str(op._schema.name)
    facts = [("nan.op", name)]
    if span is not None and span.line is not None:
        facts.append(("nan.line", str(span.line)))
    if inputs:
        facts += _holder(inputs[0], frames)
    return tuple(facts)


def is_from_python(op: Any) -> bool:
    """Tell whether an op takes over values that Python wrote: ``torch.tensor([1.0, nan])``."""
    return str(op._schema.name) in _FROM_PYTHON


def _holder(tensor: Tensor, frames: Sequence[FrameType]) -> Iterator[Fact]:
    """Name the tensor that held the NaN, a view by what it shows, and say where in it."""
    base = _torch.base_of(tensor)
    for holder in (tensor,) if base is None else (tensor, base):
        name = _name_of(holder, frames)
        if name is not None:
            found = find_offenders(holder.detach(), holder.detach().isnan())
            at = f"[{', '.join(map(str, found.first[0].position))}]"
            counted = f"{found.count} of {found.total} values" if found.total > 1 else "its value"
            yield "nan.name", name
            yield "nan.values", counted if at == "[]" else f"{counted}, the first at {at}"
            return


def _name_of(tensor: Tensor, frames: Sequence[FrameType]) -> str | None:
    """Find a tensor among what the user's running code speaks of, innermost first."""
    for frame in reversed(frames):
        if is_user_file(frame.f_code.co_filename):
            for name, value in _spoken(frame).items():
                if value is tensor:
                    return name
                if isinstance(value, nn.Module) and (path := _path_in(value, tensor)):
                    return f"{name}.{path}"
    return None


def _spoken(frame: FrameType) -> Mapping[str, object]:
    """Give the variables that a function mentions, and what it mentions of its own object."""
    code, variables = frame.f_code, frame.f_locals
    names = (*code.co_varnames, *code.co_names, *code.co_freevars)
    spoken = {name: variables.get(name, frame.f_globals.get(name)) for name in names}
    owner = instance_dict(spoken.get("self"))
    return spoken | {f"self.{name}": owner[name] for name in names if name in owner}


def _path_in(module: nn.Module, tensor: Tensor) -> str | None:
    """Give the path of a parameter or a buffer below a module."""
    for found in (module.named_parameters(), module.named_buffers()):
        for path, item in found:
            if item is tensor:
                return path
    return None
