"""One call of torch's API on copies, with changed operands.

Tensors are copied to the CPU, or to the meta device if they are large.  The original device is kept
as a label, and labels are compared before the call.  The user's code is never run.
"""

from __future__ import annotations

import ast
import copy
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import starmap, zip_longest
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from cudalens.core import _torch
from cudalens.core._python import parse_expression
from cudalens.core.call import ApiCall, Operand
from cudalens.core.report_types import Violation, syntax
from cudalens.core.torch_functions import Trait, functions
from cudalens.core.user_objects import is_module, is_tensor
from cudalens.diagnosis.user_code import Fix
from cudalens.evidence.failing_call import LIBRARIES, text_of
from cudalens.evidence.tensors import tensors_of_output
from cudalens.guards import GUARDS
from cudalens.guards._base import schema_parameters
from cudalens.source.running_call import ABSENT, of_value
from cudalens.source.safe_eval import SafeEvaluator, instance_dict, value_or

_FACTOR = 3
MAX_VALUES = 1 << 22
"""Up to this many elements in total, kernels run on CPU copies; beyond it on the meta device."""
_PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), slice, type(...)),
    *(torch.dtype, torch.Size, torch.device, torch.memory_format, torch.layout),
)
_BUILTINS = {f.__name__: f for f in (abs, float, int, len, list, max, min, range, tuple)}
_LOSSY = functions(Trait.TO_INTEGER) | {"type"}
_ANY_DEVICE = frozenset({"__getitem__", "getitem__", "getitem", "pack_padded_sequence"})
"""Functions that accept CPU tensors together with tensors on a device."""


class RefusedError(Exception):
    """The edit changes values, mixes devices, or violates a guard."""

    violation: Violation | None = None
    """The guard's violation."""
    arguments: Mapping[str, Any] | None = None
    """The arguments of the guarded op."""


class CannotTryError(Exception):
    """The call needs something that cannot be run or copied here."""


class TooLargeError(Exception):
    """The tensors are too large to be copied."""


class Resize(NamedTuple):
    """Another size for a dimension of the data tensors."""

    dim: int
    size: int
    """The current size of the dimension that changes."""
    is_data: Callable[[Tensor], bool]
    is_everywhere: bool = False
    """True if every dimension of this size changes."""

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape of a tensor with the other size.

        A merged dimension (samples times steps) changes with the samples.  If dimension 1 changes,
        a tensor without a batch dimension starts with it.
        """
        sizes = list(tensor.shape)
        if self.is_everywhere and self.is_data(tensor):
            return tuple(size * _FACTOR if size == self.size else size for size in sizes)
        for dim, size in enumerate(sizes[: self.dim + 1]) if self.is_data(tensor) else ():
            is_flat = dim == self.dim == 0 and self.size > 1 and size % self.size == 0
            if size == self.size or is_flat:
                sizes[dim] *= _FACTOR
        return tuple(sizes)


class Attempt:
    """One call on copies, with the original device of each copy.

    Args:
        operands: the operands of the user's line, each with its value.
        evaluator: evaluates the names in a template.
        whole: the syntax of the whole call.
        on_meta: compute shapes only.
        resize: another size for the data tensors; implies shapes only.
    """

    def __init__(
        self,
        operands: Sequence[Operand],
        evaluator: SafeEvaluator | None,
        whole: ast.AST | None,
        *,
        on_meta: bool,
        resize: Resize | None = None,
    ) -> None:
        self._operands, self._evaluator, self._whole = operands, evaluator, whole
        self._on_meta, self._resize = on_meta, resize
        self._by_value: dict[int, Any] = {}
        self._by_node: dict[int, Any] = {}
        """Replaced operands, by the ``id`` of their value or syntax node."""
        self._used: set[int] = set()
        self._copies: dict[int, tuple[object, Any]] = {}
        self._devices: dict[int, tuple[Tensor, torch.device]] = {}
        self._size = 0
        self._moved: torch.device | None = None

    def run(self, api: ApiCall, fix: Fix | None) -> Any:
        """Make the call with operands replaced according to the fix's templates."""
        changes = fix.changes if fix is not None else ()
        operands = self._operands
        values = {item.text: item.value for item in reversed(operands)}
        for text, template, span in changes:
            spelled = syntax(text)  # so that 1e9 and 1000000000.0 match
            texts = (text, "" if spelled is None else text_of(spelled))
            matches = [item for item in operands if item.text in texts]
            made = self._made(template, matches[0].value, values) if matches else ABSENT
            if made is ABSENT:
                raise CannotTryError
            if matches[0].node is self._whole:
                return made  # the fix replaces the whole call
            if span is None or len(matches) == 1:
                self._by_value[id(matches[0].value)] = made
            else:
                here = (item.node for item in matches if span_of(item) == span)
                self._by_node.update({id(node): made for node in here})
        args = list(starmap(self._put, zip_longest(api.args, api.nodes)))
        kwargs = {key: self._put(item, api.keywords.get(key)) for key, item in api.kwargs.items()}
        changed = [*self._by_value.values(), *self._by_node.values()]
        if (changes and not changed) or not self._used.issuperset(map(id, changed)):
            raise CannotTryError  # the function gets another object than the changed operand
        function = self._function(api)
        if fix is not None and fix.rearrange is not None:
            function, args, kwargs = fix.rearrange(function, args, kwargs)
            function = _named(function, api.func) if isinstance(function, str) else function
        if fix is not None and fix.device is not None:
            own = {id(made) for made in changed}
            own |= {id(self._copies[id(v)][1]) for v in values.values() if id(v) in self._copies}
            for item in tensors_in([function, *args, *kwargs.values()]):
                if id(item) not in own:
                    self._label(item, torch.device(fix.device))
        return self._called(function, args, kwargs)

    def _function(self, api: ApiCall) -> Any:
        """Return the called function; for a module's method, that of a copy."""
        function = api.func
        if is_module(function):
            return self._copy(function)
        if isinstance(function, MethodType) and is_module(function.__self__):
            return getattr(self._copy(function.__self__), function.__name__)
        return function

    def _called(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = tensors_in([function, *args, *kwargs.values()])
        name = getattr(function, "__name__", "")
        self._check_devices(tensors, name)
        # A tensor on a device has no `numpy()`. Its copy on the CPU would have it.
        if name == "numpy" and self._device_of(tensors[0]).type != "cpu":
            raise RefusedError
        is_unsure = self._on_meta and self._resize is None
        if is_unsure and len({item.dtype for item in tensors if item.is_floating_point()}) > 1:
            raise CannotTryError  # meta kernels do not check dtypes
        # The copies are on the CPU or the meta device, whatever device the call names.
        kwargs = {key: item for key, item in kwargs.items() if key != "device"}
        # Some CPU kernels check nothing: a bad index would write out of bounds.
        with nullcontext() if self._on_meta else _torch.before_each_op(ask_guards):
            return function(*args, **kwargs)

    def _check_devices(self, tensors: Sequence[Tensor], name: str) -> None:
        devices = [self._device_of(item) for item in tensors]
        # torch accepts a scalar on the CPU beside tensors on a device.
        large = {
            device
            for device, item in zip(devices, tensors, strict=True)
            if item.ndim or device.type != "cpu"
        }
        if len(large) > 1 and name.lstrip("_") not in _ANY_DEVICE:
            raise RefusedError
        # torch wants its lengths on the CPU, wherever the sequences are.
        if name.strip("_") == "pack_padded_sequence" and devices[1:2] != [torch.device("cpu")]:
            raise RefusedError
        # An index may be on the CPU. One on a device needs a tensor on that device.
        if len(large) > 1 and name in ("__getitem__", "getitem") and devices[0].type == "cpu":
            raise RefusedError

    # --- what takes the place of an operand -----------------------------------------------------

    def _made(self, template: str, value: Any, operands: Mapping[str, Any]) -> Any:
        """Evaluate a template, in which ``{x}`` is the operand."""
        if template in operands and operands[template] is not ABSENT:
            return self._copy(operands[template])
        is_method = "{x}()" in template
        x = self._copy(value) if "{x}" in template and not is_method else None
        tree = parse_expression(template.replace("{x}", "x_"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {"x_"}
        space: dict[str, Any] = {name: self._of_name(name) for name in names - set(_BUILTINS)}
        space |= {"x_": self._method(value) if is_method else x, "__builtins__": _BUILTINS}
        space |= {"_move": self._move, "_cast": self._cast, "_argmax": self._argmax}
        space["_device"] = self._device_of
        tree = ast.fix_missing_locations(_Labelled().visit(tree))
        self._moved = None
        made = eval(compile(tree, "<fix>", "eval"), space)
        device = self._moved
        if device is None:
            inputs = tensors_in([x]) or tensors_in([space.get(name) for name in names])
            device = self._device_of(inputs[0]) if inputs else torch.device("cpu")
        for item in tensors_in([made]):
            # An item of a container is a copy with a device label already.
            if self._moved is not None or id(item) not in self._devices:
                self._label(item, device)
        return made

    def _of_name(self, name: str) -> Any:
        value = value_or(self._evaluator, ast.Name(name, ast.Load()), ABSENT)
        if value is ABSENT:
            raise CannotTryError
        return self._copy(value)

    def _method(self, value: Any) -> Any:
        owner = getattr(value, "__self__", None)
        if not is_tensor(owner):
            raise CannotTryError
        return getattr(self._copy(owner), value.__name__)

    def _move(self, value: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        kwargs = {key: item for key, item in kwargs.items() if key not in ("non_blocking", "copy")}
        target = kwargs.pop("device", None)
        if name != "to":
            target, args = name, ()
        elif args and isinstance(args[0], str | torch.device):
            target, *args = args  # type: ignore[assignment]
        elif args and is_tensor(args[0]):
            target, args = self._device_of(args[0]), (args[0].dtype,)
        if target is not None:
            self._moved = torch.device(target)
        if not args and not kwargs:
            # A new object, because a label of a device belongs to the object.
            return value.view_as(value)
        return self._cast(value, "to", *args, **kwargs)

    def _cast(self, value: Tensor, name: str, *args: Any, **kwargs: Any) -> Tensor:
        """Cast a tensor; reject casts that change values, as from float to integer or to bool."""
        made: Tensor = getattr(value, name)(*args, **kwargs)
        is_kept = value.dtype in (made.dtype, torch.bool) or made.is_floating_point()
        if is_kept or made.is_complex():
            return made
        if self._resize is not None:
            return made
        if self._on_meta:
            raise CannotTryError
        if not bool((made.to(value.dtype) == value).all()):
            raise RefusedError
        return made

    def _argmax(self, value: Tensor, *args: Any) -> Tensor:
        """Return class indices; reject integer rows that are not one-hot."""
        if not value.is_floating_point() and self._resize is None:
            if self._on_meta:
                raise CannotTryError
            is_code = bool(((value == 0) | (value == 1)).all())
            if not is_code or not args or not bool((value.sum(args[0]) == 1).all()):
                raise RefusedError
        return value.argmax(*args)

    # --- copies ----------------------------------------------------------------------------------

    def copied(self) -> list[Any]:
        """Return the copies."""
        return [made for _, made in self._copies.values()]

    def _device_of(self, tensor: Tensor) -> torch.device:
        return self._devices.get(id(tensor), (tensor, torch.device("cpu")))[1]

    def _label(self, tensor: Tensor, device: torch.device) -> None:
        # `cuda` and `cuda:0` must compare as one device.
        if str(device) == device.type != "cpu":
            device = torch.device(device.type, 0)
        self._devices[id(tensor)] = (tensor, device)

    def _put(self, value: Any, node: ast.expr | None) -> Any:
        """Return an argument with tensors copied and operands replaced."""
        made = self._by_node.get(id(node), self._by_value.get(id(value), ABSENT))
        if made is not ABSENT:
            self._used.add(id(made))
            return made
        if type(value) in (list, tuple):
            parts = node.elts if isinstance(node, ast.Tuple | ast.List) else ()
            parts = parts if len(parts) == len(value) else ()
            return type(value)(starmap(self._put, zip_longest(value, parts)))
        if type(value) is dict:
            return {key: self._put(item, None) for key, item in value.items()}
        return self._copy(value)

    def _copy(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if is_tensor(value):
            made: Any = self._copied_tensor(value)
        elif is_module(value):
            made = self._copied_module(value)
        elif type(value) in (list, tuple):
            made = type(value)(map(self._copy, value))
        elif type(value) is dict:
            made = {key: self._copy(item) for key, item in value.items()}
        elif results := tensors_of_output(value):
            made = type("Output", (), {key: self._copy(item) for key, item in results.items()})()
        elif f"{type(value).__module__}.{type(value).__name__}" == "numpy.ndarray":
            made = value.copy()
        elif is_tensor(getattr(value, "__self__", None)):
            return getattr(self._copy(value.__self__), value.__name__)
        elif isinstance(value, _PLAIN) or is_torchs(value):
            return value
        else:
            raise CannotTryError
        self._copies[id(value)] = (value, made)
        return made

    def _copied_tensor(self, tensor: Tensor) -> Tensor:
        if not _torch.is_plain(tensor) or tensor.layout != torch.strided:
            raise CannotTryError
        self._size += tensor.numel()
        like = functools.partial(torch.empty_strided, tensor.shape, tensor.stride())
        if self._resize is not None:
            order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
            shape = self._resize.shape_of(tensor)
            made = torch.empty_permuted(shape, order, dtype=tensor.dtype, device="meta")
        elif self._on_meta:
            made = like(dtype=tensor.dtype, device="meta")
        elif self._size > MAX_VALUES:
            raise TooLargeError
        else:
            made = like(dtype=tensor.dtype)
            # An expanded tensor shares elements in memory, so it cannot be written to.
            made = torch.empty_like(made) if 0 in tensor.stride() else made
            made.copy_(tensor.detach().cpu())
        if tensor.requires_grad and torch.is_grad_enabled():
            made.requires_grad_()
            made = made if tensor.is_leaf else made.view_as(made)
        self._label(made, tensor.device)
        return made

    def _copied_module(self, module: nn.Module) -> nn.Module:
        parts = list(module.modules())
        has_hooks = any(v for item in parts for k, v in vars(item).items() if k.endswith("_hooks"))
        is_known = all(type(item).__module__.startswith(LIBRARIES) for item in parts)
        stored = [*module.parameters(), *module.buffers()]
        if has_hooks or not is_known or sum(item.numel() for item in stored) > MAX_VALUES:
            raise CannotTryError
        # A deep copy, because a forward may write to buffers, such as running statistics.
        made = copy.deepcopy(module).to("cpu" if self._resize is None else "meta")
        for item, original in zip((*made.parameters(), *made.buffers()), stored, strict=True):
            self._label(item, original.device)
        return made


class _Labelled(ast.NodeTransformer):
    """Rewrite moves and casts of a tensor as calls that act on labelled copies."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace ``x.to(…)`` and the like."""
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        function = "_move" if name in ("to", "cpu", "cuda") else "_cast" if name in _LOSSY else ""
        function = "_argmax" if name == "argmax" else function
        if not function or not isinstance(node.func, ast.Attribute):
            return node
        names = [ast.Constant(name)] if function != "_argmax" else []
        return ast.Call(
            ast.Name(function, ast.Load()), [node.func.value, *names, *node.args], node.keywords
        )

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace ``x.device``."""
        self.generic_visit(node)
        if node.attr != "device":
            return node
        return ast.Call(ast.Name("_device", ast.Load()), [node.value], [])


def span_of(operand: Operand) -> tuple[int, int, int]:
    """Return line, start and end column of an operand, in bytes."""
    node = operand.node
    return node.lineno, node.col_offset, node.end_col_offset or 0


def _named(name: str, function: Any) -> Any:
    """Return the function or method of another name: ``reshape`` for ``view``."""
    homes: tuple[Any, ...] = (functional, torch, Tensor)
    is_method = getattr(function, "__objclass__", None) is not None
    for home in reversed(homes) if is_method else homes:
        if callable(candidate := getattr(home, name, None)):
            return candidate
    raise CannotTryError


def is_torchs(value: object) -> bool:
    """Return whether an object is torch's own: a function, a method, a class or a module."""
    if isinstance(value, ModuleType):
        return str(instance_dict(value).get("__name__")).partition(".")[0] == "torch"
    if is_module(value):
        return all(type(item).__module__.startswith(LIBRARIES) for item in value.modules())
    if isinstance(value, MethodType):
        return type(value.__self__).__module__.startswith("torch.nn.modules.")
    if getattr(operator, getattr(value, "__name__", ""), None) is value:
        return True
    if type(value).__name__ == "OpOverload":
        return getattr(value, "namespace", "") == "aten"
    owner = getattr(value, "__objclass__", None)
    if isinstance(owner, type):
        return issubclass(Tensor, owner)
    if isinstance(value, FunctionType | type):
        return str(value.__module__).partition(".")[0] == "torch"
    home = getattr(value, "__module__", None)
    is_builtin = type(value).__name__ == "builtin_function_or_method"
    return is_builtin and (of_value(value) is not None or str(home).startswith("torch"))


def ask_guards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise if a guard would reject the call."""
    slots = schema_parameters(op) if op in GUARDS else ()
    arguments = {item.name: item.default for item in slots} | kwargs
    arguments.update(zip([item.name for item in slots], args, strict=False))
    for guard in GUARDS.get(op, ()):
        violation = guard.check(*[arguments[name] for name in guard.parameters])
        if violation is not None:
            error = RefusedError()
            error.violation = replace(violation, op=str(op._schema.name), overload=op._overloadname)
            error.arguments = arguments
            raise error


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among values, including those of modules and bound methods."""
    tensors: list[Tensor] = []
    for leaf in _torch.pytree.tree_leaves(list(values)):
        item = leaf.__self__ if isinstance(leaf, MethodType) else leaf
        if is_tensor(item):
            tensors.append(item)
        elif is_module(item):
            tensors += [*item.parameters(), *item.buffers()]
    return tensors
