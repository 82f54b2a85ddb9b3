"""Find the Python stack of the running call, and say what it tells: user's line, module, phase."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core.report_types import LineRef, Phase, Violation
from cudalens.recorder import eager
from cudalens.source.argument_names import OpSignature
from cudalens.source.files import (
    cell_number,
    is_own_file,
    is_user_file,
    is_user_source,
    source_lines,
    torch_path,
)
from cudalens.source.locate import CallSite
from cudalens.source.locate import locate as locate_call
from cudalens.source.running_node import line_text

_SENT_LINE = re.compile(r'^\s*File "(.+)", line (\d+), in ', re.MULTILINE)
_OPS = "_ops.py"
"""Where torch keeps the wrappers through which an op is called from Python."""


def calling_frames(*, in_backward: bool = False) -> list[FrameType]:
    """Return the Python frames of the running call, outermost first, without our own.

    In autograd's own threads there is no Python stack: the one of the thread that called
    ``backward`` stands in when exactly one thread is doing so.
    """
    frames = _stack(sys._getframe(1))
    if not in_backward or any(is_user_file(item.f_code.co_filename) for item in frames):
        return frames
    callers = [
        stack
        for frame in list(sys._current_frames().values())
        if _runs_backward(stack := _stack(frame))
    ]
    return callers[0] if len(callers) == 1 else frames


def _stack(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    while found and is_own_file(found[0].f_code.co_filename):
        found.pop(0)
    return found[::-1]


def _runs_backward(stack: Sequence[FrameType]) -> bool:
    return any(item.f_code.co_name == "_engine_run_backward" for item in stack[-3:])


def locate(
    frames: Sequence[FrameType | TracebackType],
    values: Mapping[str, Tensor],
    signature: OpSignature | None = None,
) -> CallSite:
    """Find the user's line, his expressions for the tensors, the API and the module."""
    site = locate_call(
        frames,
        values,
        same=_torch.same_tensor,
        is_tensor=lambda item: isinstance(item, Tensor),
        signature=signature,
    )
    return replace(site, limits=(*site.limits, *eager.limit_of(map(_code_of, frames))))


def op_signature(violation: Violation) -> OpSignature:
    """Return what the op of a finding takes, in the order of its schema."""
    taken = _torch.signature_of(violation.op, violation.overload)
    return OpSignature(violation.op, taken)


def _code_of(item: FrameType | TracebackType) -> CodeType:
    frame = item.tb_frame if isinstance(item, TracebackType) else item
    return frame.f_code


# Functions of torch that set something up: no pass is running yet.
_MAKING = frozenset({"__init__", "load_state_dict", "from_pretrained"})


def phase_of(frames: Sequence[FrameType], node: Any) -> Phase:
    """Tell the phase: autograd's backward, an optimizer's step, or forward.

    What is being made or loaded belongs to none of them.
    """
    if node is not None:
        return "backward"
    for frame in reversed(frames):
        file, name = torch_path(frame.f_code.co_filename), frame.f_code.co_name
        if file and (name in _MAKING or file.startswith("utils/data/")):
            return "unknown"
        if file == "autograd/__init__.py":
            return "backward"
        if file.startswith("optim/"):
            return "optimizer"
    return "forward"


def traceback_frames(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """Return the entries of a traceback, outermost first, without our own."""
    while traceback is not None:
        if not is_own_file(traceback.tb_frame.f_code.co_filename):
            yield traceback
        traceback = traceback.tb_next


def hide_own_frames(error: BaseException) -> None:
    """Take this package's frames out of a traceback: the user's error, not our machinery.

    An op that we passed on went through torch's own wrapper of ops: that frame is ours as well.
    """
    entry = error.__traceback__
    while entry is not None:
        following, passed_on = entry.tb_next, False
        while following is not None:
            file = following.tb_frame.f_code.co_filename
            if not is_own_file(file) and not (passed_on and torch_path(file) == _OPS):
                break
            following, passed_on = following.tb_next, True
        entry.tb_next = following
        entry = following


def trim(error: BaseException) -> None:
    """Cut a traceback after the user's last frame, so that a debugger lands in his code."""
    last = None
    entry = error.__traceback__
    while entry is not None:
        if is_user_file(entry.tb_frame.f_code.co_filename):
            last = entry
        entry = entry.tb_next
    if last is not None:
        last.tb_next = None


def parameter_names(frames: Sequence[FrameType]) -> dict[int, str]:
    """Name the parameters of the modules that the running code speaks of, by ``id``.

    Only variables that the user's own running code mentions are looked at, so the size of his
    namespace does not matter.
    """
    names: dict[int, str] = {}
    for frame in reversed(frames):
        if not is_user_file(frame.f_code.co_filename):
            continue
        for name in (*frame.f_code.co_names, *frame.f_code.co_varnames):
            value = frame.f_locals.get(name, frame.f_globals.get(name))
            if isinstance(value, torch.nn.Module):
                for path, parameter in value.named_parameters():
                    names.setdefault(id(parameter), path)
    return names


def api_arguments(frames: Sequence[FrameType | TracebackType]) -> tuple[tuple[str, object], ...]:
    """Return the arguments of the functional API on the stack, by the names that its manual uses.

    The op's own schema calls them otherwise: ``cross_entropy(input, target)`` ends in
    ``nll_loss_forward(self, target, …)``.
    """
    for entry in reversed(frames):
        frame = entry.tb_frame if isinstance(entry, TracebackType) else entry
        if frame.f_globals.get("__name__") == "torch.nn.functional":
            code = frame.f_code
            count = code.co_argcount + code.co_kwonlyargcount
            variables = frame.f_locals
            return tuple((name, variables.get(name)) for name in code.co_varnames[:count])
    return ()


def worker_line(message: str) -> str:
    """Return the user's deepest line in the traceback that a worker sent along as text.

    Empty where the message holds no such traceback, or nothing of the user's is on it.
    """
    _, is_sent, sent = message.partition("\nOriginal Traceback (most recent call last):")
    places = [item for item in _SENT_LINE.findall(sent) if is_user_source(item[0])]
    if not is_sent or not places:
        return ""
    file, number = places[-1][0], int(places[-1][1])
    text = line_text(source_lines(file), number)
    return LineRef(line=number, text=text, cell=cell_number(file), file=file).format()
