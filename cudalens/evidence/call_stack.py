"""Find the Python stack of the running call, and read line, module and phase from it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from types import CodeType, FrameType, TracebackType
from typing import TypeVar, cast

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core._python import entries_from_traceback
from cudalens.core.report_types import LineRef, Phase
from cudalens.guards.past_calls import StackLine
from cudalens.recorder import PASSING_FILES, eager
from cudalens.source.files import (
    cell_number,
    is_own_file,
    is_user_file,
    source,
    source_lines,
    torch_path,
)
from cudalens.source.locate import CallSite
from cudalens.source.locate import locate as locate_call
from cudalens.source.module_path import tensors_below
from cudalens.source.running_call import MODULE_CALLS, RunningCall, code_of
from cudalens.source.running_node import line_text, mentioned
from cudalens.source.stack import (
    Entry,
    StackEntry,
    frame_of,
    line_of,
    namespaces,
    place_of,
    stack_of,
)

_SENT_LINE = re.compile(r'^\s*File "(.+)", line (\d+), in ', re.MULTILINE)
_MAX_MODULES = 64
"""How many modules of a namespace are searched for parameter names."""
_AnyEntry = TypeVar("_AnyEntry", bound=Entry)


def calling_frames(*, in_backward: bool = False) -> list[FrameType]:
    """Return the Python frames of the running call, outermost first, without our own.

    In autograd's own threads there is no Python stack: the one of the thread that called
    ``backward`` stands in when exactly one thread is doing so.
    """
    frames = _stack(sys._getframe(1))
    if not in_backward or any(is_user_file(item.f_code.co_filename) for item in frames):
        return frames
    stacks = map(_stack, sys._current_frames().values())
    callers = [
        stack
        for stack in stacks
        if any(item.f_code.co_name == "_engine_run_backward" for item in stack[-3:])
    ]
    return callers[0] if len(callers) == 1 else frames


def without_detours(entries: Sequence[_AnyEntry]) -> list[_AnyEntry]:
    """Drop the frames in which torch calls the recorder, and the recorder calls torch.

    A torch function written in Python is on the stack twice; the second frame is kept.
    """
    rest: list[_AnyEntry] = []
    is_passing = False
    for entry in entries:
        code = _code_of(entry)
        if code.co_filename in PASSING_FILES:
            is_passing = True
            continue
        if is_passing and rest and torch_path(_code_of(rest[-1]).co_filename) == "overrides.py":
            rest.pop()
            if rest and _code_of(rest[-1]).co_name == code.co_name:
                rest.pop()
        is_passing = False
        rest.append(entry)
    return rest


def _stack(frame: FrameType | None) -> list[FrameType]:
    frames = without_detours(stack_of(frame))
    while frames and is_own_file(frames[-1].f_code.co_filename):
        frames.pop()
    return frames


def locate(
    frames: Sequence[Entry], values: Mapping[str, Tensor], call: RunningCall | None = None
) -> CallSite:
    """Find the user's line, their expressions for the tensors, the API and the module."""
    site = locate_call(frames, values, _torch.same_tensor, call, _torch.row_of)
    codes = [_code_of(item) for item in frames]
    files = dict.fromkeys(code.co_filename for code in codes if is_user_file(code.co_filename))
    edited = [
        f"{PurePath(file).name} has changed since it was imported: its lines are not shown"
        for file in files
        if source(file).is_edited
    ]
    return replace(site, limits=(*site.limits, *edited, *eager.limit_of(codes)))


def entries_of(lines: Sequence[StackLine]) -> list[Entry]:
    """Return the lines of a past call, outermost first."""
    return [StackEntry(code, line_of(code, lasti), lasti) for code, lasti in lines]


def _code_of(item: Entry) -> CodeType:
    return item.code if isinstance(item, StackEntry) else frame_of(item).f_code


# Functions that make or load modules: their calls are no forward pass.
_MAKING = frozenset({"__init__", "load_state_dict", "from_pretrained"})


def phase_of(entries: Sequence[Entry], *, in_backward: bool) -> Phase:
    """Return the innermost phase: a backward pass, an optimizer step, or forward.

    Making or loading modules has no phase.  The closure of an optimizer step is no part of it.
    """
    if in_backward:
        return "backward"
    inner: list[CodeType] = []
    for entry in reversed(entries):
        code = _code_of(entry)
        file, name = torch_path(code.co_filename), code.co_name
        if file and (name in _MAKING or file.startswith("utils/data/")):
            return "unknown"
        if file == "autograd/__init__.py":
            return "backward"
        if file == "nn/modules/module.py" and name in MODULE_CALLS:
            return "forward"
        if file.startswith("optim/"):
            return "forward" if _is_closures(inner, entry) else "optimizer"
        inner.append(code)
    return "forward"


def _is_closures(inner: Sequence[CodeType], step: Entry) -> bool:
    """Return whether the code called by a function of ``torch.optim`` is a closure."""
    if torch_path(_code_of(step).co_filename) != "optim/optimizer.py":
        # A step of torch's own optimizers calls no other code of the user's.
        files = {code.co_filename for code in inner}
        return any(not torch_path(file) and not is_own_file(file) for file in files)
    frame = place_of(step).frame
    variables = {} if frame is None else frame.f_locals
    given = (*variables.get("args", ())[1:], *variables.get("kwargs", {}).values())
    return any(code_of(item) in inner for item in given if callable(item))


def with_callers(trace: TracebackType | None) -> TracebackType | None:
    """Extend the traceback of an exception that has not left the user's call up to their frame.

    Args:
        trace: the traceback so far.
    """
    frame = sys._getframe(1) if trace is None else trace.tb_frame.f_back
    callers = []
    while frame is not None:
        callers.append(frame)
        frame = frame.f_back
    while callers and not is_user_file(callers[-1].f_code.co_filename):
        callers.pop()
    for frame in callers:
        trace = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno)
    return trace


def trim(error: BaseException) -> None:
    """Cut a traceback after the user's last frame, so that a debugger lands in their code."""
    for entry in reversed(entries_from_traceback(error.__traceback__)):
        if is_user_file(entry.tb_frame.f_code.co_filename):
            entry.tb_next = None
            return


def parameter_names(frames: Sequence[FrameType]) -> dict[int, str]:
    """Name the parameters, and other leaves of the graph, that the user's running code can reach.

    Names that the code mentions come first, then the variables of the module or notebook.

    Returns:
        A name for each tensor, by ``id``: the path in its module, or the variable.
    """
    names: dict[int, str] = {}
    outer: list[Mapping[str, object]] = []
    for frame in reversed(frames):
        if not is_user_file(frame.f_code.co_filename):
            continue
        _add_names(names, mentioned(frame))
        if frame.f_code.co_name == "<module>":
            outer.append(frame.f_globals)
    for namespace in outer:
        _add_names(names, dict(namespace), limit=_MAX_MODULES)
    return names


def visible_parameters(frames: Sequence[FrameType]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of modules that the user's running code can reach, with their names."""
    names, seen = parameter_names(frames), set[int]()
    for _, value in tensors_and_modules(namespaces(frames)):
        for item in value.parameters() if isinstance(value, torch.nn.Module) else ():
            if id(item) in names and id(item) not in seen:
                seen.add(id(item))
                yield names[id(item)], item


def tensors_and_modules(
    scopes: Iterable[Mapping[str, object]],
) -> Iterator[tuple[str, Tensor | torch.nn.Module]]:
    """Yield the tensors and modules among variables, with their names."""
    for scope in scopes:
        for name, value in list(scope.items()):
            # A notebook may have 100 000 names, so the type is checked first.
            if issubclass(type(value), (Tensor, torch.nn.Module)):
                yield name, cast("Tensor | torch.nn.Module", value)


def buffer_names(frames: Sequence[FrameType], buffers: Sequence[Tensor]) -> list[str]:
    """Name buffers by their path in the modules that the user's running code can reach."""
    written = list(filter(None, (held_name(item, frames) for item in buffers)))
    others = len(buffers) - len(written)
    return [*written, f"{others} other buffer{'s' * (others != 1)}"] if others else written


def held_name(tensor: Tensor, frames: Sequence[FrameType]) -> str | None:
    """Return the variable that holds a tensor, or its module and path."""
    for variable, value in tensors_and_modules(namespaces(frames)):
        if value is tensor and not variable.startswith("_"):
            return variable
        for path, item in tensors_below(value):
            if item is tensor:
                return f"{variable}.{path}"
    return None


def _add_names(
    names: dict[int, str], variables: Mapping[str, object], limit: int | None = None
) -> None:
    # By type(): an object of the user's may override `__class__`, which isinstance reads.
    modules = [item for item in variables.values() if issubclass(type(item), torch.nn.Module)]
    for module in modules[:limit]:
        for path, parameter in cast("torch.nn.Module", module).named_parameters():
            names.setdefault(id(parameter), path)
    for name, value in variables.items():
        if type(value) in (Tensor, torch.nn.Parameter):
            tensor = cast("Tensor", value)
            if tensor.requires_grad and tensor.is_leaf:
                names.setdefault(id(tensor), name)


def parameters_of(frame: FrameType) -> dict[str, object]:
    """Return the values of a function's parameters."""
    code, variables = frame.f_code, frame.f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return {name: variables.get(name) for name in names}


def worker_line(message: str) -> str:
    """Return the user's innermost line in a worker's traceback, which its error has as text.

    Empty if the message has no such traceback, or no line of the user's is in it.
    """
    _, is_sent, sent = message.partition("\nOriginal Traceback (most recent call last):")
    places = [item for item in _SENT_LINE.findall(sent) if is_user_file(item[0])]
    if not is_sent or not places:
        return ""
    file, number = places[-1][0], int(places[-1][1])
    text = line_text(source_lines(file), number)
    return LineRef(line=number, text=text, cell=cell_number(file), file=file).format()
