"""A live call of torch's public API: the function and its arguments as the user passed them."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from cudalens.core.evidence_types import SavedValues

# The documented path of the methods of torch's private classes.
_PLACES = (
    ("torch.Tensor", ("Tensor", "TensorBase", "_TensorBase")),
    ("torch", ("_VariableFunctionsClass", "_VariableFunctions")),
)


class NodeMark(NamedTuple):
    """An autograd node by its name and sequence number; the node itself is not kept alive."""

    name: str
    sequence_nr: int
    saved: tuple[SavedValues, ...] = ()
    """Its saved tensors in anomaly mode, which are freed before the mode finds a NaN."""

    @classmethod
    def of(cls, node: Any) -> NodeMark | None:
        """Return the mark of a node, ``None`` without one."""
        return None if node is None else cls(node.name(), node._sequence_nr())


@dataclass(kw_only=True, eq=False)
class ApiCall:
    """A call of torch's API that raised; it contains live tensors until it is released.

    Example: a refused ``x @ y`` has ``name`` ``torch.Tensor.matmul`` and ``args`` ``(x, y)``.
    """

    func: Any
    args: tuple[Any, ...] = field(default=(), repr=False)
    kwargs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    code: CodeType | None = None
    """The code that made the call; ``None`` where C++ made it, on a thread of autograd."""
    lasti: int = 0
    """The instruction of ``code`` that made the call."""
    nodes: tuple[ast.expr, ...] = ()
    """The syntax of ``args``, where the user's line writes them out."""
    keywords: Mapping[str, ast.expr] = field(default_factory=dict)
    """The syntax of ``kwargs``."""
    node: NodeMark | None = None
    """In backward: the node that was running."""
    site: Any = None
    """Place of the call, in the recorder's form."""

    @property
    def name(self) -> str:
        """The public name of the function: ``torch.nn.functional.linear``."""
        return public_name(self.func)

    def release(self) -> None:
        """Drop the arguments."""
        self.args, self.kwargs = (), {}


def _is_of_torch(func: Any) -> bool:
    # Reading the name or the hash of a user's object may run their code.
    return type(func).__module__.partition(".")[0] in ("builtins", "functools", "torch")


def function_name(func: Any) -> str:
    """Return the name of a function, or the name of the class of any other object."""
    default = type(func).__name__
    return str(getattr(func, "__name__", default)) if _is_of_torch(func) else default


def public_name(func: Any) -> str:
    """Return the name under which torch documents a function, ``aten::sin`` for an op itself."""
    if type(func).__name__ == "OpOverload":
        return str(func.name())
    if type(func).__name__ == "OpOverloadPacket":
        return str(func).replace(".", "::")
    name = function_name(func)
    if not _is_of_torch(func):
        return f"{type(func).__module__}.{name}"
    if name in ("__get__", "__set__", "__delete__"):  # the property of a tensor
        return f"torch.Tensor.{getattr(func.__self__, '__name__', name)}"
    resolved = torch.overrides.resolve_name(func)
    if resolved is not None:
        # One built-in may have several names, as mm, spmm and dsmm have: use its own.
        is_alias = str(resolved).rpartition(".")[2] != name and getattr(torch, name, None) == func
        return f"torch.{name}" if is_alias else str(resolved)
    owner = getattr(func, "__objclass__", None) or type(getattr(func, "__self__", None))
    if owner.__module__ in ("torch", "torch._C") and hasattr(torch, owner.__name__):
        return f"torch.{owner.__name__}.{name}"
    place = next((path for path, names in _PLACES if owner.__name__ in names), None)
    module = place or getattr(func, "__module__", None) or "torch"
    qualified = getattr(func, "__qualname__", name)
    package = sys.modules.get(module.rpartition(".")[0])
    if place is None and hasattr(package, qualified.partition(".")[0]):
        # A class is documented under the package that exports it: torch.cuda.CUDAGraph.
        return f"{module.rpartition('.')[0]}.{qualified}"
    return f"{module}.{name}"


Extreme = tuple[str, float, float]
"""Name, smallest and largest value of an argument, as a guard read them."""


class CallInProgress:
    """The API call that a thread is making, shared by the recorders and guards of the thread."""

    __slots__ = ("call", "extremes")

    def __init__(self) -> None:
        self.call: tuple[Any, tuple[Any, ...], Any, FrameType] | None = None
        """Function, arguments, keyword arguments, and the frame that called the recorder."""
        self.extremes: tuple[list[Extreme], ...] = ()
        """One list for each recorder that is open on the thread.

        A guard appends to all of them, and each recorder clears its own.
        """


class _OfThread(threading.local):
    # Called once in each thread that uses it.
    def __init__(self) -> None:
        self.running = CallInProgress()


THREAD = _OfThread()
"""``THREAD.running`` is the call of the current thread.

Torch's dispatcher and autograd are between a recorder and a guard.  They pass on the arguments of
the call and nothing else.
"""


@dataclass(frozen=True, kw_only=True)
class OpCall:
    """An aten op that a guard checked, with its arguments by schema name."""

    op: Any
    arguments: Mapping[str, Any]
    name: str = ""
    """The function's name where there is no op, as for a first NaN."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Operand:
    """A part of the user's call: its text, its syntax and its value together."""

    text: str
    node: ast.expr
    value: Any


@dataclass(frozen=True, kw_only=True)
class Call:
    """The call that failed; it contains live tensors, so it is dropped with its report.

    An unknown part is ``None``.
    """

    api: ApiCall | None = None
    """The public function and its arguments."""
    enclosing: tuple[ApiCall, ...] = ()
    """The calls around ``api``, outermost first: the call of a library's module on the user's line,
    or of a torch function that is written in Python."""
    op: OpCall | None = None
    """The op, where a guard checked it."""
    node: NodeMark | None = None
    """In backward: the autograd node that was running."""
    operands: tuple[Operand, ...] = ()
    """Operands of the call on the user's line; a value may be unknown."""
