"""The running call of a stack entry: what is called, and which expression is which argument.

One reader for a call, a subscript, an operator: the public name of what runs, the receiver, each
operand by the name of its parameter, and its value where it can be read without running code.

The names of torch's own frames are in ``api_name``, and the tensors that expressions evaluate to
in ``argument_names``.
"""

from __future__ import annotations

import ast
import dis
import inspect
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from cudalens.core.torch_functions import Trait, functions
from cudalens.core.user_objects import is_module, is_tensor
from cudalens.source.running_node import Running, kind_sources, running
from cudalens.source.safe_eval import instance_dict, value_or
from cudalens.source.stack import Place

ABSENT = object()
"""Stands for a value that cannot be read without running code."""
_METHODS = {
    "Mult": "mul",
    "MatMult": "matmul",
    "Div": "truediv",
    "BitAnd": "and",
    "BitOr": "or",
    "BitXor": "xor",
    "NotEq": "ne",
    "LtE": "le",
    "GtE": "ge",
    "In": "contains",
    "NotIn": "contains",
    "Is": None,
    "IsNot": None,
    "USub": "neg",
    "UAdd": "pos",
    "Not": "bool",
}
"""Methods of operators with another name than their node; that of ``ast.Add`` is ``__add__``."""
# Built-ins whose operators handle tensors themselves.
_BUILTIN_OWNERS = (str, bytes, bytearray, list, tuple, dict, set, frozenset, range)
_DISPLAYS = (ast.List, ast.Tuple, ast.Dict, ast.Set, ast.JoinedStr, ast.ListComp)
_SUBSCRIPTS = {"STORE": "setitem", "DELETE": "delitem", "BINARY": "getitem"}
_TENSOR_VIEWS = functions(Trait.PROPERTY | Trait.VIEW)
_GIVE_TENSORS = functions(Trait.TENSOR)


class RunningCall:
    """The call, subscript or operator that one entry of the stack is running.

    Args:
        run: the syntax that the entry runs.
    """

    def __init__(self, run: Running) -> None:
        self.place = run.place
        self.node = run.node
        self.statement = run.statement
        self.run = run
        self.learned: dict[int, object] = {}
        """Values that the call received, by the ``id`` of their expressions."""
        self.spelled: set[int] = set()
        """The ``id`` of the operands, which are preferred as names of their values."""
        self._evaluator = run.evaluator

    @classmethod
    def at(cls, place: Place) -> RunningCall:
        """Return the running call of a stack entry."""
        return cls(running(place))

    # --- the operands ----------------------------------------------------------------------------

    def value(self, node: ast.expr) -> object:
        """Return the value of an expression, ``ABSENT`` where it cannot be read."""
        if id(node) in self.learned:
            return self.learned[id(node)]
        return value_or(self._evaluator, node, ABSENT)

    @property
    def receiver(self) -> ast.expr | None:
        """The expression before the dot of a method call."""
        is_method = isinstance(self.node, ast.Call) and isinstance(self.node.func, ast.Attribute)
        return self.node.func.value if is_method else None  # type: ignore[union-attr]

    def learn(self, pairs: Iterable[tuple[ast.expr, object]]) -> None:
        """Add values for expressions that are not read as tensors."""
        for node, value in pairs:
            if value is not ABSENT and not is_tensor(self.value(node)):
                self.learned[id(node)] = value

    def learn_from_callee(self, callee: Place | None) -> None:
        """Read the arguments from the parameters of the function that was called.

        Only if it is proven to be the running one, and only parameters that it never rebinds.
        """
        node = self.node
        if not isinstance(node, ast.Call) or callee is None or callee.frame is None:
            return
        function, code = self.value(node.func), callee.code
        variables: Mapping[str, Any] = callee.variables
        called, skipped = _code_of(function)
        if function is ABSENT and code.co_name in MODULE_CALLS:
            # A partial adds arguments that the line does not have.
            is_whole = len(variables.get("args", ())) == len(node.args)
            called, skipped = code if is_whole else None, 1
        if called is not code or any(isinstance(item, ast.Starred) for item in node.args):
            return
        # ``co_varnames`` has the parameters first, then ``*args``, then ``**kwargs``.
        rebound = {step.argval for step in dis.get_instructions(code) if step.opname in _REBINDS}
        names = code.co_varnames
        count = code.co_argcount + code.co_kwonlyargcount
        contents = {n: variables[n] for n in names[:count] if n in variables and n not in rebound}
        positional = [contents.get(name, ABSENT) for name in names[: code.co_argcount]]
        has_rest = bool(code.co_flags & inspect.CO_VARARGS)
        if has_rest and type(rest := variables.get(names[count])) is tuple:
            positional += rest
        if code.co_flags & inspect.CO_VARKEYWORDS:
            contents = {**variables.get(names[count + has_rest], {}), **contents}
        self.learn(zip(node.args, positional[skipped:], strict=False))
        named = (item for item in node.keywords if item.arg in contents)
        self.learn((item.value, contents[item.arg or ""]) for item in named)

    @property
    def operands(self) -> list[ast.expr]:
        """Operands of a running operator or subscript, with the value assigned to the latter."""
        node, statement = self.node, self.statement
        if isinstance(node, ast.BinOp):
            return [node.left, node.right]
        if isinstance(node, ast.AugAssign):
            return [node.target, node.value]
        if isinstance(node, ast.Compare):
            return [node.left, node.comparators[0]]
        if isinstance(node, ast.UnaryOp):
            return [node.operand]
        if not isinstance(node, ast.Subscript):
            return []
        is_assigned = isinstance(node.ctx, ast.Store) and isinstance(statement, ast.Assign)
        return [node.value, node.slice, *([statement.value] if is_assigned else [])]  # type: ignore[union-attr]

    # --- its public name -------------------------------------------------------------------------

    def api(self, argument_names: Collection[str] = ()) -> str | None:
        """Return the public name of the running function, ``None`` where it is not known.

        Args:
            argument_names: the schema's names of the op's arguments, as far as they are known.
        """
        if isinstance(self.node, ast.Call):
            return self._of_call(self.node)
        # By the line alone a subscript may be that of a list: the op's arguments must fit, too.
        has_indices = any(name.startswith(("indices", "index", "mask")) for name in argument_names)
        method = self._of_operation(self.node, has_indices and "self" in argument_names)
        return None if method is None else f"torch.Tensor.__{method}__"

    def uses_torch(self) -> bool:
        """Return whether it provably calls torch, or indexes or combines a tensor."""
        node = self.node
        if not isinstance(node, ast.Call):
            return self._works_on_tensor()
        # A method of an unknown result may belong to another library.
        is_named = (self._of_call(node) or "").startswith("torch.")
        return (is_named and self._rests_on_torch(node)) or self._is_torchs(node.func)

    def _rests_on_torch(self, node: ast.expr) -> bool:
        """Return whether a chain of calls starts at a tensor or a torch function."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_known = self.value(node.func.value) is not ABSENT
            if not is_known and self._of_dotted(node.func) is None:
                return self._rests_on_torch(node.func.value)
        if isinstance(node, ast.Call):
            return (self._of_call(node) or "").startswith("torch.")
        sources = kind_sources(node) if self.value(node) is ABSENT else ()
        return bool(self._is_tensor(node)) and all(map(self._rests_on_torch, sources))

    def _works_on_tensor(self) -> bool:
        """Return whether a running subscript or operator works on a tensor.

        A tensor that is the index of a list or the key of a dict does not count.
        """
        node = self.node
        operands = self.operands
        if isinstance(node, ast.Subscript):
            operands = [node.value]
        elif isinstance(node, ast.Compare):
            is_search = isinstance(node.ops[0], ast.In | ast.NotIn)
            operands = node.comparators if is_search else [node.left, *node.comparators]
        elif isinstance(node, ast.BinOp | ast.AugAssign) and self._is_pythons(operands[0]):
            return False
        return any(self._is_tensor(item) and self._rests_on_torch(item) for item in operands)

    def _is_pythons(self, node: ast.expr) -> bool:
        """Return whether an operand is a list, a text or the like.

        As the left operand it raises the error itself when it does not accept a tensor.
        """
        return isinstance(node, _DISPLAYS) or isinstance(self.value(node), _BUILTIN_OWNERS)

    def _is_torchs(self, node: ast.expr) -> bool:
        value = self.value(node)
        while type(value) is partial:
            value = value.func
        if type(value) is BuiltinFunctionType and is_tensor(value.__self__):
            return True
        return (of_value(value) or "").startswith("torch.")

    def _of_operation(self, node: ast.AST | None, is_indexed: bool) -> str | None:
        if isinstance(node, ast.Subscript):
            is_tensor = self._is_tensor(node.value)
            if is_tensor or (is_tensor is None and is_indexed):
                return _SUBSCRIPTS.get(self.place.operation.partition("_")[0])
        elif isinstance(node, ast.BinOp) and not self._is_pythons(node.left):
            left = self._is_tensor(node.left)
            # A left operand that is known to be no tensor: the right one's reflected method runs.
            if left or (left is False and self._is_tensor(node.right)):
                return f"{'' if left else 'r'}{method_of(node.op)}"
        elif isinstance(node, ast.AugAssign) and self._is_tensor(node.target):
            return f"i{method_of(node.op)}"
        elif isinstance(node, ast.Compare):
            is_search = isinstance(node.ops[0], ast.In | ast.NotIn)
            if self._is_tensor(node.comparators[0] if is_search else node.left):
                return method_of(node.ops[0])
        elif isinstance(node, ast.UnaryOp) and self._is_tensor(node.operand):
            return method_of(node.op)
        return None

    def _is_tensor(self, node: ast.expr) -> bool | None:
        """Return whether an expression is a tensor, ``None`` when its value is not known."""
        value = self.value(node)
        if value is not ABSENT:
            return is_tensor(value)
        if isinstance(node, _DISPLAYS):
            return False
        if isinstance(node, ast.NamedExpr):
            return self._is_tensor(node.target)
        # From here on only True is proven: an item of a list, for one, may be a tensor.
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

    def _of_call(self, node: ast.Call) -> str | None:
        function = node.func
        if isinstance(function, ast.Attribute):
            owner = self.value(function.value)
            # An unknown receiver is a result of another call.  This call runs C++ code, and has
            # the name of a tensor method.
            is_likely = owner is ABSENT and is_tensor_method(function.attr)
            if is_tensor(owner) or (is_likely and not function.attr.startswith("__")):
                return f"torch.Tensor.{function.attr}"
        return self._of_dotted(function) or of_value(self.value(function))

    def _of_dotted(self, node: ast.expr) -> str | None:
        """Return the name of ``F.embedding`` with the real name of the module ``F``."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
            module = self.value(node)
            # By its class, because a lazy module runs code when its `__class__` is read.
            if issubclass(type(module), ModuleType):
                path = str(instance_dict(module).get("__name__"))
                package = path.partition(".")[0]
                # A path of several names that starts in another package proves little.
                is_known = package == "torch" or len(names) == 1
                is_public = is_known and package not in sys.stdlib_module_names
                return ".".join([path, *names]) if is_public else None
        return None


_REBINDS = ("STORE_FAST", "DELETE_FAST", "STORE_DEREF", "DELETE_DEREF")
MODULE_CALLS = ("_wrapped_call_impl", "_call_impl")
"""Functions that a call of a module runs first."""


def code_of(function: object) -> object:
    """Return the code that a call of a function, a partial or an object runs, if it is known."""
    while type(function) is partial:
        function = function.func
    kind: type = type(function)
    if kind is FunctionType or kind is MethodType:
        return _code_of(function)[0]
    # Static, because a class of the user's may compute its attributes.
    return _code_of(inspect.getattr_static(kind, "__call__", None))[0]


def _code_of(function: object) -> tuple[object, int]:
    """Return the code that a call of ``function`` runs, and the number of bound parameters."""
    if type(function) is FunctionType:
        return function.__code__, 0
    if type(function) is MethodType:
        return _code_of(function.__func__)[0], 1
    name = "__init__" if issubclass(type(function), type) else "__call__"
    kind = function if name == "__init__" else type(function) if is_module(function) else None
    return (None, 0) if kind is None else (_code_of(inspect.getattr_static(kind, name, None))[0], 1)


def method_of(operator: ast.AST) -> str | None:
    """Return the method behind an operator: ``matmul`` for ``@``."""
    name = type(operator).__name__
    return _METHODS.get(name, name.lower())


# --- the public names of torch's functions and classes --------------------------------------------


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
    # Without ``object``, the last of them, whose methods all values have.
    return any(name in vars(base) for base in tensor.__mro__[:-1])


def of_value(value: Any) -> str | None:
    """Return the public dotted name of a function or class of torch."""
    if issubclass(type(value), type):
        return class_name(value)
    if type(value) not in (FunctionType, BuiltinFunctionType):
        return None
    module = value.__module__
    # Torch's own handler of overrides is no API.
    if module == "torch.overrides" or (module or "torch").partition(".")[0] != "torch":
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
    # A package that exports the class is public, while the module that defines it may not be.
    for count in range(1, len(parts)):
        package = ".".join(parts[:count])
        if vars(sys.modules[package]).get(kind.__name__) is kind:
            return f"{package}.{kind.__name__}"
    return f"{module}.{kind.__name__}"
