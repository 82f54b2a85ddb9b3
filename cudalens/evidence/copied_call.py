"""Evaluate an expression of the user's on copies: of tensors, and of modules of torch's own.

Tensors are copied to the host, or to the meta device where they are large; modules of torch's own
are put together again around copies of their parameters.  Code of the user's is never run: what
needs it cannot be tried.  Devices are labels here, compared at each call.
"""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import inspect
import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from cudalens.core import _torch
from cudalens.core.report_types import Violation
from cudalens.evidence.tensors import tensors_of_output
from cudalens.guards import GUARDS
from cudalens.guards._base import schema_parameters
from cudalens.source.running_call import ABSENT, method_of, of_value
from cudalens.source.safe_eval import SafeEvaluator, instance_dict, items_of, value_or

_MAX_ENTRIES = 40
MAX_VALUES = 1 << 22
"""Elements of all tensors together up to which kernels run, on copies; beyond it on meta."""
_LIBRARIES = ("torch.nn.modules.", "transformers.", "torchvision.")
"""Modules of these run in a trial; what they keep besides parameters is not written in forward."""
_OF_TORCH = (torch.dtype, torch.Size, torch.device)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), slice, *_OF_TORCH)
_WITHOUT_WEIGHTS = ("activation", "dropout", "flatten", "loss")
_PLAIN_LAYERS = tuple(f"torch.nn.modules.{name}" for name in _WITHOUT_WEIGHTS)
"""Their layers have no parameters to make, or few; those of others are made without values."""
_BUILTINS = frozenset({"abs", "float", "int", "len", "list", "max", "min", "range", "tuple"})
_MOVES = frozenset({"to", "cuda", "cpu"})
_LOSSY = frozenset({"to", "type", "long", "int", "short", "byte", "char", "bool"})
_READS = frozenset(
    {"device", "dtype", "shape", "ndim", "T", "mT", "H", "mH", "data", "real", "imag"}
)
_ANY_DEVICE = frozenset({"__getitem__", "pack_padded_sequence", "size", "dim", "numel"})
"""Calls that take an argument of the host beside one of a device."""


class RefusedError(Exception):
    """The code changes values, mixes devices, or breaks the bound of a guard."""

    violation: Violation | None = None
    """What the guard found."""
    given: Mapping[str, Any] | None = None
    """The arguments of the op that it looked at."""


class CannotTryError(Exception):
    """The code needs what may not be run or copied here."""


class TooLargeError(Exception):
    """The tensors are too many to be copied."""


class CopiedCall:
    """One evaluation: the copies that it made, and the device that each of them stands for."""

    def __init__(
        self, evaluator: SafeEvaluator, known: Mapping[str, object], *, on_meta: bool
    ) -> None:
        self._evaluator = evaluator
        self._known = known
        self._changed: dict[str, object] = {}
        self._on_meta = on_meta
        self._copies: dict[int, tuple[object, object]] = {}
        self._devices: dict[int, tuple[Tensor, torch.device]] = {}
        self._size = 0

    # --- statements and expressions --------------------------------------------------------------

    def statements(self, body: Sequence[ast.stmt], call: ast.AST | None) -> object:
        """Run assignments and then the call, or the expression that stands in its place."""
        for statement in body:
            if isinstance(statement, ast.Expr) and statement is body[-1]:
                return self.value(statement.value)
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                raise CannotTryError
            value = self.value(statement.value)
            self._changed[key_of(statement.targets[0])] = value
        if isinstance(call, ast.AugAssign):
            return self._operation(call)
        if not isinstance(call, ast.expr) or not isinstance(
            getattr(call, "ctx", ast.Load()), ast.Load
        ):
            raise CannotTryError
        return self.value(call)

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression, of copies only."""
        key = key_of(node)
        if key in self._changed:
            return self._changed[key]
        parts = (item for item in ast.walk(node) if isinstance(item, ast.expr))
        is_changed = any(key_of(item) in self._changed for item in parts)
        if not is_changed and key in self._known:
            return self._copy(self._known[key])
        if not is_changed and (found := read(self._evaluator, node)) is not ABSENT:
            return self._copy(found)
        made = getattr(self, f"_{type(node).__name__.lower()}", None)
        if made is None:
            raise CannotTryError
        return made(node)

    def _tuple(self, node: ast.Tuple) -> Any:
        return tuple(map(self.value, node.elts))

    def _list(self, node: ast.List) -> Any:
        return list(map(self.value, node.elts))

    def _slice(self, node: ast.Slice) -> Any:
        parts = (node.lower, node.upper, node.step)
        return slice(*(part and self.value(part) for part in parts))

    def _operation(self, node: ast.AST) -> Any:
        """Apply the one operator of a node to its operands."""
        parts = list(ast.iter_child_nodes(node))
        operands = [item for item in parts if isinstance(item, ast.expr)]
        (kind, *more) = [item for item in parts if not isinstance(item, ast.expr)]
        function = getattr(operator, f"__{method_of(kind)}__", None)
        if more or function in (None, operator.contains):  # its operands stand the other way round
            raise CannotTryError
        return self._applied(function, *map(self.value, operands))

    _unaryop = _binop = _compare = _operation

    def _subscript(self, node: ast.Subscript) -> Any:
        owner = self.value(node.value)
        if not isinstance(owner, Tensor | tuple | list | dict | torch.Size):
            raise CannotTryError
        return self._applied(operator.getitem, owner, self.value(node.slice), name="__getitem__")

    def _attribute(self, node: ast.Attribute) -> Any:
        owner = self.value(node.value)
        found = instance_dict(owner).get(node.attr) if isinstance(owner, ModuleType) else None
        if found is not None:
            return self._copy(found)
        if isinstance(owner, SimpleNamespace):
            return getattr(owner, node.attr)
        if not isinstance(owner, Tensor):
            raise CannotTryError
        if node.attr not in _READS:
            return getattr(owner, node.attr) if callable(getattr(Tensor, node.attr, None)) else None
        if node.attr == "device":
            return self.device_of(owner)
        return self._labelled(getattr(owner, node.attr), self.device_of(owner))

    def _call(self, node: ast.Call) -> Any:
        if any(isinstance(item, ast.Starred) for item in node.args):
            raise CannotTryError
        function, owner = node.func, None
        if isinstance(function, ast.Attribute):
            # A module that cannot be copied may still be a name: torch, F.
            owner = self._owner(function.value)
        args = [self.value(item) for item in node.args]
        kwargs: dict[str, Any] = {}
        for item in node.keywords:
            kwargs.update(self._keyword(item))
        if isinstance(owner, Tensor):
            return self._method(owner, function.attr, args, kwargs)  # type: ignore[attr-defined]
        if isinstance(owner, nn.Module) and function.attr in _MOVES:  # type: ignore[attr-defined]
            return self._moved_module(owner, function.attr, args)  # type: ignore[attr-defined]
        return self._function(self.value(function), args, kwargs)

    def _function(self, called: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(called, nn.Module):
            return self._applied(called, *args, **kwargs)
        is_layer = isinstance(called, type) and called.__module__ in _PLAIN_LAYERS
        if is_layer or _is_builtin(called):
            return called(*args, **kwargs)
        if isinstance(called, type) and called.__module__.startswith("torch.nn.modules."):
            if "device" not in inspect.signature(called).parameters:
                raise CannotTryError
            return called(*args, **{**kwargs, "device": "meta"})
        name = _name_of(called) or ""
        if not name.startswith("torch.") or isinstance(called, type):
            raise CannotTryError
        device = kwargs.pop("device", None)
        result = self._applied(called, *args, name=name.rpartition(".")[2], **kwargs)
        return result if device is None else self._labelled(result, torch.device(device))

    def _keyword(self, node: ast.keyword) -> dict[str, Any]:
        """Return what a keyword passes; of ``**batch`` its entries, as assignments changed them."""
        if node.arg is not None:
            return {node.arg: self.value(node.value)}
        found = read(self._evaluator, node.value)
        entries = dict(items_of(found, _MAX_ENTRIES))
        if found != {} and not entries:
            raise CannotTryError
        passed: dict[str, Any] = {}
        for key, value in entries.items():
            if not isinstance(key, str):
                raise CannotTryError
            part = key_of(ast.Subscript(node.value, ast.Constant(key), ast.Load()))
            passed[key] = self._changed[part] if part in self._changed else self._copy(value)
        return passed

    def _owner(self, node: ast.expr) -> object:
        try:
            return self.value(node)
        except CannotTryError:
            if isinstance(node, ast.Name | ast.Attribute):
                return None
            raise

    # --- calls -----------------------------------------------------------------------------------

    def _method(self, owner: Tensor, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not callable(getattr(Tensor, name, None)) or name.startswith("__"):
            raise CannotTryError
        device = self.device_of(owner)
        if name in _MOVES:
            device, args, kwargs = _destination(name, device, self, args, kwargs)
            if name != "to" or not (args or kwargs):
                return self._labelled(owner.view_as(owner), device)
        if name == "numpy" and device.type != "cpu":
            raise RefusedError
        method = functools.partial(getattr(Tensor, name), owner)
        others = [item for item in args if isinstance(item, Tensor)]
        self._check_devices([owner, *others], name if name != "to" else "size")
        with self._watched():
            result = method(*args, **kwargs)
        if name in _LOSSY:
            self._check_kept(owner, result)
        if name == "argmax" and not owner.is_floating_point():
            self._check_one_hot(owner, args)
        return self._labelled(result, device)

    def _check_kept(self, before: Tensor, after: object) -> None:
        """Refuse a cast that changes values: floats to integers, numbers to flags."""
        if not isinstance(after, Tensor) or before.dtype in (after.dtype, torch.bool):
            return
        if after.dtype.is_floating_point or after.dtype.is_complex:
            return
        if self._on_meta:
            raise CannotTryError
        if not bool((after.to(before.dtype) == before).all()):
            raise RefusedError

    def _check_one_hot(self, tensor: Tensor, args: Sequence[Any]) -> None:
        """Refuse the class numbers of rows that are not one-hot."""
        if self._on_meta:
            raise CannotTryError
        is_code = bool(((tensor == 0) | (tensor == 1)).all())
        dim = args[0] if args else None
        if not is_code or dim is None or not bool((tensor.sum(dim) == 1).all()):
            raise RefusedError

    def _moved_module(self, module: nn.Module, name: str, args: Sequence[Any]) -> nn.Module:
        device = torch.device("cpu" if name == "cpu" else "cuda")
        if name == "to":
            if len(args) != 1 or not isinstance(args[0], str | torch.device):
                raise CannotTryError  # no cast of a module's weights
            device = torch.device(args[0])
        for item in (*module.parameters(), *module.buffers()):
            self._labelled(item, device)
        return module

    def _applied(self, function: Any, *args: Any, name: str = "", **kwargs: Any) -> Any:
        if function is operator.getitem and not isinstance(args[0], Tensor):
            return args[0][args[1]]
        tensors = _tensors([*args, *kwargs.values()])
        if isinstance(function, nn.Module):
            tensors += [*function.parameters(), *function.buffers()]
        device = self._check_devices(tensors, name)
        if self._on_meta and len({item.dtype for item in tensors if item.is_floating_point()}) > 1:
            raise CannotTryError  # kernels of meta tensors do not compare dtypes
        with self._watched():
            result = function(*args, **kwargs)
        return self._labelled(result, device)

    def _watched(self) -> AbstractContextManager[Any]:
        # Some kernels of the CPU check nothing: a bad value would write where it may not.
        return nullcontext() if self._on_meta else _torch.before_each_op(_ask_guards)

    def _check_devices(self, tensors: Sequence[Tensor], name: str) -> torch.device:
        devices = [self.device_of(item) for item in tensors]
        large = {
            device
            for device, item in zip(devices, tensors, strict=True)
            if item.ndim or device.type != "cpu"
        }
        if len(large) > 1 and name not in _ANY_DEVICE:
            raise RefusedError
        if name == "pack_padded_sequence" and devices[1:2] != [torch.device("cpu")]:
            raise RefusedError
        if len(large) > 1 and name == "__getitem__" and devices[0].type == "cpu":
            raise RefusedError
        return next((item for item in devices if item.type != "cpu"), torch.device("cpu"))

    # --- copies ----------------------------------------------------------------------------------

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return the device that a copy stands for."""
        return self._devices.get(id(tensor), (tensor, torch.device("cpu")))[1]

    def _labelled(self, value: Any, device: torch.device) -> Any:
        if str(device) == device.type != "cpu":
            device = torch.device(device.type, 0)
        for item in _tensors([value]):
            self._devices[id(item)] = (item, device)
        return value

    def _copy(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if isinstance(value, Tensor):
            made: Any = self._copied_tensor(value)
        elif isinstance(value, nn.Module):
            made = self._copied_module(value)
        elif type(value) in (list, tuple):
            made = type(value)(map(self._copy, value))
        elif type(value) is dict and all(type(key) in _PLAIN for key in value):
            made = {key: self._copy(item) for key, item in value.items()}
        elif results := tensors_of_output(value):
            made = SimpleNamespace(**{key: self._copy(item) for key, item in results.items()})
        elif isinstance(value, _PLAIN) or _is_of_torch(value) or _is_builtin(value):
            return value
        elif f"{type(value).__module__}.{type(value).__name__}" == "numpy.ndarray":
            made = value.copy()
        elif type(value) in (type(len), MethodType) and isinstance(value.__self__, Tensor):
            return getattr(self._copy(value.__self__), value.__name__)
        else:
            raise CannotTryError
        self._copies[id(value)] = (value, made)
        return made

    def _copied_tensor(self, tensor: Tensor) -> Any:
        if not _torch.is_plain(tensor) or tensor.layout != torch.strided:
            raise CannotTryError
        self._size += tensor.numel()
        like = functools.partial(torch.empty_strided, tensor.shape, tensor.stride())
        if self._on_meta:
            made = like(dtype=tensor.dtype, device="meta")
        elif self._size > MAX_VALUES:
            raise TooLargeError
        else:
            made = like(dtype=tensor.dtype)
            # What is expanded has fewer elements in memory than may be written.
            made = torch.empty_like(made) if 0 in tensor.stride() else made
            made.copy_(tensor.detach().cpu())
        if tensor.requires_grad and torch.is_grad_enabled():
            made.requires_grad_()
            made = made if tensor.is_leaf else made.view_as(made)
        return self._labelled(made, tensor.device)

    def _copied_module(self, module: nn.Module) -> nn.Module:
        """Return a module of torch's own around copies of its tensors, without its hooks."""
        stored = instance_dict(module).items()
        has_hooks = any(value for key, value in stored if key.endswith("_hooks"))
        if has_hooks or not type(module).__module__.startswith(_LIBRARIES):
            raise CannotTryError
        made = module.__new__(type(module))
        own: dict[str, Any] = {
            key: copy.copy(item) if isinstance(item, dict | list | set) else item
            for key, item in stored
        }
        for kind in ("_parameters", "_buffers"):
            for key, item in own[kind].items():
                if item is not None:
                    copied = self._copy(item)
                    if kind == "_parameters":
                        copied = nn.Parameter(copied, item.requires_grad)
                    own[kind][key] = self._labelled(copied, item.device)
        own["_modules"] = {
            key: None if item is None else self._copied_module(item)
            for key, item in own["_modules"].items()
        }
        made.__dict__.update(own)
        if "_flat_weights_names" in own:
            names = own["_flat_weights_names"]
            made.__dict__["_flat_weights"] = [getattr(made, name) for name in names]
        return made


def _destination(
    name: str, device: torch.device, run: CopiedCall, args: list[Any], kwargs: dict[str, Any]
) -> tuple[torch.device, list[Any], dict[str, Any]]:
    """Return the device that a tensor is moved to, and the arguments that say something else."""
    if name != "to":
        return torch.device("cpu" if name == "cpu" else "cuda"), [], {}
    kwargs = {key: item for key, item in kwargs.items() if key not in ("non_blocking", "copy")}
    if "device" in kwargs:
        device = torch.device(kwargs.pop("device"))
    if args and isinstance(args[0], str | torch.device):
        device, args = torch.device(args[0]), args[1:]
    elif args and isinstance(args[0], Tensor):
        device = run.device_of(args[0])
        args = [args[0].dtype]
    return device, args, kwargs


def _ask_guards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what a guard would not let onto the device."""
    slots = schema_parameters(op) if op in GUARDS else ()
    given = {item.name: item.default for item in slots} | kwargs
    given.update(zip([item.name for item in slots], args, strict=False))
    for guard in GUARDS.get(op, ()):
        found = guard.check(*[given[name] for name in guard.parameters])
        if found is not None:
            error = RefusedError()
            error.violation = replace(found, op=str(op._schema.name), overload=op._overloadname)
            error.given = given
            raise error


# --- what is read ---------------------------------------------------------------------------------


def key_of(node: ast.expr) -> str:
    """Return what expressions that read the same have in common."""
    text = ast.dump(node)
    return text.replace("ctx=Store()", "ctx=Load()")


def read(evaluator: SafeEvaluator, node: ast.expr) -> Any:
    """Return the value of an expression that can be read, ``ABSENT`` for others."""
    name = node.id if isinstance(node, ast.Name) and node.id in _BUILTINS else None
    return value_or(evaluator, node, ABSENT if name is None else getattr(builtins, name))


def _is_of_torch(value: object) -> bool:
    if isinstance(value, ModuleType):
        return str(instance_dict(value).get("__name__")).partition(".")[0] == "torch"
    return (_name_of(value) or "").startswith("torch.")


def _name_of(value: object) -> str | None:
    """Return the public name of a function or class of torch's."""
    home = getattr(value, "__module__", None)
    if isinstance(value, FunctionType) and home == "torch.nn.utils.rnn":
        return f"{home}.{value.__name__}"
    return of_value(value)


def _is_builtin(value: object) -> bool:
    return any(value is getattr(builtins, name) for name in _BUILTINS)


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    leaves = _torch.pytree.tree_leaves(list(values))
    return [item for item in leaves if isinstance(item, Tensor)]
