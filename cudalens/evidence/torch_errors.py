"""Decide whether an exception is torch's business: raised by torch, or by a library on top of it.

Everything else passes through a checked cell untouched and unexplained.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from types import FrameType, TracebackType

from torch import Tensor

from cudalens.core._python import entries_from_traceback, package_of
from cudalens.core.call import ApiCall
from cudalens.core.reported import report_beside
from cudalens.diagnosis.host_errors import is_known_message
from cudalens.evidence.call_stack import without_detours
from cudalens.source.files import is_own_file, is_user_file
from cudalens.source.locate import runs_torch
from cudalens.source.running_call import ABSENT, RunningCall
from cudalens.source.shown_frames import file_of
from cudalens.source.stack import place_of

_NEVER = (
    OSError,
    ImportError,
    MemoryError,
    StopIteration,
    SyntaxError,
    NameError,
    ArithmeticError,
    UnicodeError,
)
"""Kinds that say something of the file system or of Python, wherever they were raised."""

# Torch re-raises what a worker raised as a new exception whose text ends in the old traceback.
_RERAISED = re.compile(r"^Caught \w+ in .*\.\nOriginal Traceback", re.DOTALL)
_FILE = re.compile(r'^  File "(.+)", line \d+, in ', re.MULTILINE)
_NOT_A_TENSOR = re.compile(r"^'(numpy\.ndarray|list|tuple)' object has no attribute ")
_LOOKUPS = frozenset({"__getattr__", "__getattribute__"})
_HOOK = "__torch_function__"
_RAISE = "RAISE_VARARGS"


def uses_torch(frame: FrameType) -> bool:
    """Return whether a frame's module uses torch: it *is* torch, or has it among its names."""
    names = frame.f_globals
    if package_of(frame) == "torch":
        return True
    torch_like = ("torch", "nn", "F")
    return any(getattr(names.get(name), "__name__", "").startswith("torch") for name in torch_like)


def visible_entries(error: BaseException) -> Sequence[TracebackType]:
    """Return the entries of a traceback, outermost first, up to where it enters this package.

    What this package's own frames called further in (a simulated kernel, a recorded op) stands for
    the C++ code that would have run there, so the error belongs to the frame outside of them.
    Code of the user's that was called back from there is kept, but not a ``__torch_function__``
    that only hands the call on.
    """
    entries = _above_hook(without_detours(entries_from_traceback(error.__traceback__)))
    files = [item.tb_frame.f_code.co_filename for item in entries]
    outside = [at for at, file in enumerate(files) if not is_own_file(file)]
    if not outside:
        return ()
    start = max((at for at in outside if is_user_file(files[at])), default=outside[0])
    end = next((at for at in range(start, len(files)) if is_own_file(files[at])), len(files))
    return [entries[at] for at in outside if at < end]


def _above_hook(entries: list[TracebackType]) -> list[TracebackType]:
    """Return the entries above the first ``__torch_function__`` of the user's that hands a call on.

    The call was written above, with the user's names: the hook's own are those of any call.
    """
    users = [at for at, item in enumerate(entries) if is_user_file(file_of(item))]
    hooks = [at for at in users if entries[at].tb_frame.f_code.co_name == _HOOK]
    first = hooks[0] if hooks else 0
    is_last = [at for at in users if at >= first] == hooks
    is_called = any(at < first for at in users)
    if is_called and is_last and all(_hands_on(entries[at]) for at in hooks):
        return entries[:first]
    return entries


def _hands_on(hook: TracebackType) -> bool:
    """Return whether a ``__torch_function__`` runs its function, or the one of its base class."""
    function = getattr(RunningCall.at(place_of(hook)).node, "func", None)
    if isinstance(function, ast.Attribute):
        return function.attr == _HOOK
    code = hook.tb_frame.f_code
    parameters = code.co_varnames[1 : code.co_argcount]
    return isinstance(function, ast.Name) and function.id == next(iter(parameters), None)


def is_torch_error(error: BaseException, raised: ApiCall | None = None) -> bool:
    """Return whether torch, or a library on top of it, raised ``error``.

    Args:
        raised: the call that raised it, where a recorder saw one.
    """
    if report_beside(error) is not None:
        return True  # a check inside this one knew it, and took its own frames out
    if _is_of_package(error, "torch") or str(error).startswith("CUDA error"):
        return True
    if not isinstance(error, Exception) or isinstance(error, _NEVER):
        return False
    entries = visible_entries(error)
    if not entries or _is_of_package(error, "cudalens"):
        return False
    innermost = entries[-1]
    if isinstance(error, AttributeError):
        frames = [item.tb_frame for item in entries]
        caller = next((item for item in frames[::-1] if item.f_code.co_name not in _LOOKUPS), None)
        return _is_torch_attribute(error, innermost, caller)
    if _is_raised_in_ours(innermost):
        return True  # of the line itself it needs nothing: torch called us for the op
    if is_user_file(innermost.tb_frame.f_code.co_filename):
        return _is_raised_below(error, innermost, raised)
    if _RERAISED.match(text := _text_of(error)):
        # It crossed from a worker with its traceback as text.
        original = _FILE.findall(text)
        message = text.rstrip().rpartition("\n")[2].partition(": ")[2]
        return is_known_message(message) or bool(original and not is_user_file(original[-1]))
    return uses_torch(innermost.tb_frame) or is_known_message(text)


def is_of_torchscript(error: BaseException) -> bool:
    """Return whether TorchScript's interpreter raised an error, in place of one raised inside."""
    return type(error) is RuntimeError and "TorchScript interpreter" in _text_of(error)


def _is_raised_in_ours(entry: TracebackType) -> bool:
    """Return whether the next entry is a function of ours that ran in place of one of torch's."""
    if entry.tb_next is None:
        return False
    code = entry.tb_next.tb_frame.f_code
    return is_own_file(code.co_filename) and "__tracebackhide__" in code.co_varnames


def _is_raised_below(error: BaseException, entry: TracebackType, call: ApiCall | None) -> bool:
    """Return whether C++ code of torch's, called on the user's line, raised the error."""
    if place_of(entry).operation == _RAISE:
        return False  # a raise or assert statement of his own
    if call is not None and (call.code, call.lasti) == (entry.tb_frame.f_code, entry.tb_lasti):
        return True  # the recorder saw the call of this very instruction raise
    is_mixed = isinstance(error, TypeError) and _lacks_tensor(entry)
    is_told = is_of_torchscript(error) or is_known_message(_text_of(error))
    return is_mixed or runs_torch(entry) or is_told


def _lacks_tensor(entry: TracebackType) -> bool:
    """Return whether a line works on what a tensor gave in place of one.

    That is its gradient before a backward, a method of it, or the number that a loss became.
    """
    call = RunningCall.at(place_of(entry))
    node = call.node
    if isinstance(node, ast.Attribute) and node.attr == "backward":
        return isinstance(call.value(node.value), int | float)
    parts = [node.value] if isinstance(node, ast.Attribute) else []
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else parts
    return any(_is_of_tensor(call, item) for item in parts)


def _is_of_tensor(call: RunningCall, node: ast.expr) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    owner = call.value(node.value)
    if owner is ABSENT and isinstance(node.value, ast.Name):
        return node.attr == "grad"  # of a comprehension that has ended
    is_known = node.attr == "grad" or callable(getattr(Tensor, node.attr, None))
    return isinstance(owner, Tensor) and is_known


def _is_torch_attribute(
    error: AttributeError, entry: TracebackType, caller: FrameType | None
) -> bool:
    """Return whether torch itself says that something lacks an attribute, or may not have it yet.

    A look-up of a name that is not there is a mistake of spelling, on a module as on any object.
    """
    frame = entry.tb_frame
    if is_user_file(frame.f_code.co_filename):
        return _lacks_tensor(entry)
    if _NOT_A_TENSOR.match(str(error)):
        return uses_torch(frame)
    if caller is not None and hasattr(Tensor, error.name or ""):
        return package_of(caller) == "torch"  # torch asked an argument for what a tensor has
    is_raise = place_of(entry).operation == _RAISE and frame.f_code.co_name not in _LOOKUPS
    return package_of(frame) == "torch" and is_raise


def _text_of(error: BaseException) -> str:
    # A KeyError shows the repr of its text; the message is the text itself.
    first = error.args[0] if error.args else ""
    return str(first) if isinstance(first, str) or type(first).__name__.endswith("Message") else ""


def _is_of_package(error: BaseException, package: str) -> bool:
    return any(kind.__module__.partition(".")[0] == package for kind in type(error).__mro__)
