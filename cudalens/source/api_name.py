"""The public name of the function that was called to reach an op.

A frame of torch's own Python code names itself.  Where the user's or a library's line called
straight into C++, the running expression names it, if its value is known.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from cudalens.source.files import is_torch_file, torch_path
from cudalens.source.running_node import kind_sources, running_segment
from cudalens.source.safe_eval import (
    SafeEvaluator,
    evaluator_for,
    instance_dict,
    is_module,
    value_or,
)
from cudalens.source.stack import Place

_ABSENT = object()
_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.MatMult: "matmul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.Pow: "pow",
    ast.LShift: "lshift",
    ast.RShift: "rshift",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
}
_COMPARISONS = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.In: "contains",
    ast.NotIn: "contains",
}
# What decides by itself what it does with a tensor.
_BUILTIN_OWNERS = (str, bytes, bytearray, list, tuple, dict, set, frozenset, range)
_DISPLAYS = (ast.List, ast.Tuple, ast.Dict, ast.Set, ast.JoinedStr, ast.ListComp)
_UNARY = {ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "invert", ast.Not: "bool"}
_SUBSCRIPTS = {"STORE": "setitem", "DELETE": "delitem", "BINARY": "getitem"}
_TENSOR_VIEWS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
# Functions and methods that give one tensor whatever their arguments are.
_GIVE_TENSORS = frozenset(
    """abs add arange argmax argmin bmm bool cat ceil clamp clone contiguous cos cpu cuda cumsum
    detach div double empty exp expand expand_as flatten float floor full gather gelu half
    index_select int linspace log log_softmax long masked_fill masked_select matmul mean mm mul neg
    one_hot ones ones_like permute pow rand rand_like randint randn randn_like randperm relu repeat
    reshape round select sigmoid sin softmax sqrt squeeze stack sub sum t tanh tensor to transpose
    tril triu type_as unsqueeze view view_as zeros zeros_like""".split()  # noqa: SIM905  72 lines
)
# Classes whose method is what the user calls, not the functions inside it.
_METHOD_HOMES = ("distributions/", "optim/")


def api_name(
    places: Sequence[Place],
    is_tensor: Callable[[object], bool],
    argument_names: Collection[str] = (),
) -> str | None:
    """Name the function that was called to reach the op, ``None`` when that cannot be proven.

    Args:
        places: the stack, outermost first, without frames of this package.
        is_tensor: whether a value is a tensor.
        argument_names: schema names of the op's arguments, as far as they are known.
    """
    # What calls of subclasses come through only passes them on.
    places = [place for place in places if place.code.co_name != "__torch_function__"]
    group = _torch_frames(places)
    named = _of_frames(group)
    if named is not None or not places:
        return named
    reader = _CallReader(places[-1], is_tensor, argument_names)
    found = reader.name()
    if found is None and group and is_module(owner := group[-1].variables.get("self")):
        return class_name(type(owner))
    return found


def touches_torch(place: Place, is_tensor: Callable[[object], bool]) -> bool:
    """Return whether the running expression is proven to call, index or combine what is torch's."""
    reader = _CallReader(place, is_tensor, ())
    name = api_name([place], is_tensor) or ""
    if name.startswith("torch.") and reader.is_proven():
        return True
    return reader.works_on_tensor() or reader.wraps_torch()


def _torch_frames(places: Sequence[Place]) -> list[Place]:
    """Return the frames of torch at the inner end of the stack, outermost of them first."""
    group: list[Place] = []
    for place in reversed(places):
        if not is_torch_file(place.filename):
            break
        group.insert(0, place)
    return group


def _of_frames(group: Sequence[Place]) -> str | None:
    named = [(place, torch_path(place.filename), place.code.co_name) for place in group]
    for _, path, name in reversed(named):
        if path == "nn/functional.py" and not name.startswith(("_", "<")):
            return f"torch.nn.functional.{name}"
    for place, path, name in named:
        if path == "_tensor.py" and is_tensor_method(name):
            return f"torch.Tensor.{name}"
        if path == "functional.py" and not name.startswith(("_", "<")):
            return f"torch.{name}"
        if path == "autograd/__init__.py" and name in {"backward", "grad"}:
            return f"torch.autograd.{name}"
        owner = place.variables.get("self")
        if path.startswith(_METHOD_HOMES) and not name.startswith(("_", "<", "wrapper")):
            kind = None if owner is None else class_name(type(owner))
            if kind is not None:
                return f"{kind}.{name}"
    return None


class _CallReader:
    """Names what one entry of the stack is calling, from its running expression."""

    def __init__(
        self, place: Place, is_tensor: Callable[[object], bool], argument_names: Collection[str]
    ) -> None:
        self.place = place
        self.is_tensor = is_tensor
        # Read from the line alone, indices may be those of a list: the op knows itself as well.
        has_indices = any(name.startswith("indices") for name in argument_names)
        self.indexes = has_indices and "self" in argument_names
        self.evaluator: SafeEvaluator | None = (
            None if place.frame is None else evaluator_for(place.frame)
        )

    def name(self) -> str | None:
        """Return the public name of what is called, ``None`` where it is not known."""
        node = running_segment(self.place)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        method = self._of_operation(node)
        return None if method is None else f"torch.Tensor.__{method}__"

    def is_proven(self) -> bool:
        """Return whether a method that is called on an unknown result is one of torch's."""
        node = running_segment(self.place)
        return isinstance(node, ast.Call) and self._rests_on_torch(node)

    def _rests_on_torch(self, node: ast.expr) -> bool:
        """Return whether a chain of calls starts at a tensor or at a function of torch's."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_known = self._value(node.func.value) is not _ABSENT
            if not is_known and self._of_dotted(node.func) is None:
                return self._rests_on_torch(node.func.value)
        if isinstance(node, ast.Call):
            return (self._of_call(node) or "").startswith("torch.")
        sources = kind_sources(node) if self._value(node) is _ABSENT else ()
        return bool(self._is_tensor(node)) and all(map(self._rests_on_torch, sources))

    def works_on_tensor(self) -> bool:
        """Return whether it is a tensor that a running subscript or operator works on.

        A tensor as the index of a list or as the key of a dict is not worked on.
        """
        node = running_segment(self.place)
        operands: Sequence[ast.expr] = ()
        if isinstance(node, ast.Subscript):
            operands = (node.value,)
        elif isinstance(node, ast.UnaryOp):
            operands = (node.operand,)
        elif isinstance(node, ast.Compare):
            is_search = isinstance(node.ops[0], ast.In | ast.NotIn)
            operands = node.comparators if is_search else (node.left, *node.comparators)
        elif isinstance(node, ast.BinOp) and not self._is_pythons(node.left):
            operands = (node.left, node.right)
        elif isinstance(node, ast.AugAssign) and not self._is_pythons(node.target):
            operands = (node.target, node.value)
        return any(
            self._is_tensor(item) is True and self._rests_on_torch(item) for item in operands
        )

    def _is_pythons(self, node: ast.expr) -> bool:
        """Return whether a list, a text or the like is what an operator works on.

        It is the one that complains when it cannot take a tensor in.
        """
        return isinstance(node, _DISPLAYS) or isinstance(self._value(node), _BUILTIN_OWNERS)

    def wraps_torch(self) -> bool:
        """Return whether a function or method of torch's is called under another name.

        Which argument is which does not follow from the call then: only that it is torch's.
        """
        node = running_segment(self.place)
        return isinstance(node, ast.Call) and self._is_wrapper(node.func)

    def _is_wrapper(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Call) or not node.args:
            return self._is_torchs(node)
        maker, first = self._value(node.func), node.args[0]
        if maker is partial:
            return (self._of_dotted(first) or "").startswith("torch.") or self._is_wrapper(first)
        name = self._value(node.args[-1])
        is_method = len(node.args) == 2 and type(name) is str and is_tensor_method(name)
        return maker is getattr and is_method and self.is_tensor(self._value(first))

    def _is_torchs(self, node: ast.expr) -> bool:
        value = self._value(node)
        while type(value) is partial:
            value = value.func
        if type(value) is BuiltinFunctionType and self.is_tensor(value.__self__):
            return True
        if isinstance(node, ast.Attribute) and self.is_tensor(self._value(node.value)):
            return is_tensor_method(node.attr)
        return (of_value(value) or "").startswith("torch.")

    def _of_operation(self, node: ast.AST | None) -> str | None:
        if isinstance(node, ast.Subscript):
            known = self._is_tensor(node.value)
            if known or (known is None and self.indexes):
                return _SUBSCRIPTS.get(self.place.operation.partition("_")[0])
        elif isinstance(node, ast.BinOp):
            return self._of_operator(node)
        elif isinstance(node, ast.AugAssign) and self._is_tensor(node.target):
            return f"i{_OPERATORS[type(node.op)]}"
        elif isinstance(node, ast.Compare):
            is_search = isinstance(node.ops[0], ast.In | ast.NotIn)
            if self._is_tensor(node.comparators[0] if is_search else node.left):
                return _COMPARISONS.get(type(node.ops[0]))
        elif isinstance(node, ast.UnaryOp) and self._is_tensor(node.operand):
            return _UNARY[type(node.op)]
        return None

    def _value(self, node: ast.expr) -> object:
        return value_or(self.evaluator, node, _ABSENT)

    def _is_tensor(self, node: ast.expr) -> bool | None:
        """Return whether an expression is a tensor, ``None`` when its value is not known."""
        value = self._value(node)
        if value is not _ABSENT:
            return self.is_tensor(value)
        if isinstance(node, _DISPLAYS):
            return False
        if isinstance(node, ast.NamedExpr):
            return self._is_tensor(node.target)
        if isinstance(node, ast.IfExp):
            return (self._is_tensor(node.body) and self._is_tensor(node.orelse)) or None
        if isinstance(node, ast.Subscript | ast.BinOp):
            operand = node.value if isinstance(node, ast.Subscript) else node.left
            return self._is_tensor(operand) or None
        if isinstance(node, ast.Attribute) and node.attr in _TENSOR_VIEWS:
            return self._is_tensor(node.value) or None
        if isinstance(node, ast.Call):
            name = self._of_call(node) or ""
            return (name.startswith("torch.") and name.split(".")[-1] in _GIVE_TENSORS) or None
        return None

    def _of_operator(self, node: ast.BinOp) -> str | None:
        if self._is_pythons(node.left):
            return None
        name = _OPERATORS[type(node.op)]
        left = self._is_tensor(node.left)
        if left:
            return name
        return f"r{name}" if left is False and self._is_tensor(node.right) else None

    def _of_call(self, node: ast.Call) -> str | None:
        function = node.func
        if isinstance(function, ast.Attribute):
            owner = self._value(function.value)
            # A receiver that is not known is a result; C++ code runs under this very call, by
            # the name of a method that tensors have.
            is_likely = owner is _ABSENT and is_tensor_method(function.attr)
            if self.is_tensor(owner) or (is_likely and not function.attr.startswith("__")):
                return f"torch.Tensor.{function.attr}"
        return self._of_dotted(function) or of_value(self._value(function))

    def _of_dotted(self, node: ast.expr) -> str | None:
        """Name ``F.embedding`` by the real name of the module that ``F`` is."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
            module = self._value(node)
            if issubclass(type(module), ModuleType):
                return below_module(str(instance_dict(module).get("__name__")), names)
        return None


# --- the name under which torch offers a function or class to its ---------------------------------


_FUNCTION_HOMES = (
    "torch",
    "torch.nn.functional",
    "torch.special",
    "torch.linalg",
    "torch.fft",
    "torch.autograd",
)


def is_tensor_method(name: str) -> bool:
    """Return whether tensors have an attribute of this name."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", object)
    return any(name in vars(base) for base in tensor.__mro__[:-1])


def below_module(module: str, names: Sequence[str]) -> str | None:
    """Name what is reached from a module, ``None`` where that says little."""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names or (package != "torch" and len(names) > 1):
        return None
    return ".".join([module, *names])


def of_value(value: Any) -> str | None:
    """Name a function or class of torch by where it is offered."""
    if issubclass(type(value), type):
        return class_name(value)
    if type(value) not in (FunctionType, BuiltinFunctionType):
        return None
    module = value.__module__
    if module is not None and module.partition(".")[0] != "torch":
        return None
    for home in _FUNCTION_HOMES:
        offered = vars(sys.modules[home]) if home in sys.modules else {}
        for name, item in offered.items():
            if item is value and not name.startswith("_"):
                return f"{home}.{name}"
    return None


def class_name(kind: type) -> str | None:
    """Return the shortest public name of a class of torch, ``None`` for other classes."""
    module = str(vars(kind).get("__module__", ""))
    parts = module.split(".")
    if parts[0] != "torch":
        return None
    for count in range(1, len(parts)):
        package = ".".join(parts[:count])
        if vars(sys.modules[package]).get(kind.__name__) is kind:
            return f"{package}.{kind.__name__}"
    return f"{module}.{kind.__name__}"
