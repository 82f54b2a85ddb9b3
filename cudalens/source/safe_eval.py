"""Values of expressions, read without running code of the user or of a library.

``pure_eval`` reads names, plain attributes and items of built-in containers.  Added here are the
containers that tensors live in: modules, named tuples, subclasses of dict and list, the batches of
transformers and PyTorch Geometric.  Calls, slices and displays are never evaluated.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

from pure_eval import CannotEval, Evaluator

from cudalens.core.user_objects import is_module, is_of, loaded

_EVALUATED = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.UnaryOp, ast.BinOp)
_KEYS = (str, int, bool, float, bytes, type(None))
_MAX_KEYS = 100_000
_MAX_INT = 1 << 31
_ABSENT = object()
# The descriptor of a named tuple's fields, which reads an item without running Python code.
_FIELD = type(collections.namedtuple("_FIELD", "field").field)  # type: ignore[attr-defined]
_MODULE_LISTS = ("Sequential", "ModuleList", "ModuleDict")
# Classes whose items and attributes are entries of one dict, and the attributes that lead to it.
_STORES = (
    ("collections", "UserDict", ("data",)),
    ("transformers.tokenization_utils_base", "BatchEncoding", ("data",)),
    ("torch_geometric.data.data", "Data", ("_store", "_mapping")),
)


class SafeEvaluator(Evaluator):  # type: ignore[misc]  # pure_eval comes without types for mypy
    """Evaluates expressions that can be read, else raises :class:`pure_eval.CannotEval`."""

    gone: Collection[str] = ()
    """Names whose variables have ended; a variable that has such a name now is another one."""

    def __getitem__(self, node: ast.expr) -> Any:
        """Return the value of an expression.

        Raises:
            CannotEval: reading it could run code, copy much, or is not understood.
        """
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node)
        if not isinstance(node, _EVALUATED):
            raise CannotEval
        if isinstance(node, ast.Name) and node.id in self.gone:
            raise CannotEval
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            raise CannotEval
        try:
            return super().__getitem__(node)
        except CannotEval:
            if isinstance(node, ast.Attribute):
                return _attribute(self[node.value], node.attr)
            if isinstance(node, ast.Subscript):
                return item(self[node.value], self[node.slice])
            raise

    def _arithmetic(self, node: ast.BinOp) -> int:
        left, right = self[node.left], self[node.right]
        if not all(type(side) is int and abs(side) < _MAX_INT for side in (left, right)):
            raise CannotEval
        if not isinstance(node.op, ast.Add | ast.Sub):
            raise CannotEval
        return int(left + right if isinstance(node.op, ast.Add) else left - right)


def evaluator_for(frame: FrameType, gone: Collection[str] = ()) -> SafeEvaluator:
    """Return an evaluator for the names of a frame, without those whose variables have ended."""
    made = SafeEvaluator.from_frame(frame)
    assert isinstance(made, SafeEvaluator)
    made.gone = gone
    return made


def value_or(evaluator: SafeEvaluator | None, node: ast.expr, default: object) -> Any:
    """Return the value of an expression, ``default`` where it cannot be read."""
    if evaluator is None:
        return default
    try:
        return evaluator[node]
    except (CannotEval, RecursionError):  # an expression may be nested too deep
        return default


def instance_dict(value: object) -> dict[str, object]:
    """Return an object's own attributes, without descriptors; empty when it has none."""
    try:
        entries = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return entries if type(entries) is dict else {}


def registered(module: object, kind: str) -> Mapping[str, object]:
    """Return a module's ``_modules``, ``_parameters`` or ``_buffers`` as they are stored."""
    entries = instance_dict(module).get(kind)
    return entries if type(entries) in (dict, collections.OrderedDict) else {}  # type: ignore[return-value]


def items_of(value: object, limit: int) -> list[tuple[object, object]]:
    """Return keys and items of a container that can be read, such as a batch.

    Empty for anything else, and for containers of more than ``limit`` items.
    """
    store = _store(value)
    if store is not None:
        value = store
    # A class with a method of its own could run code.
    base = _base_of(value, "__getitem__")
    if base is None or base is not _base_of(value, "__iter__") or base.__len__(value) > limit:
        return []
    return list(dict.items(value) if base is dict else enumerate(base.__iter__(value)))  # type: ignore[arg-type]


def item(value: object, key: object) -> Any:
    """Return ``value[key]`` of a container that can be read.

    Raises:
        CannotEval: the container could run code, or has no such item.
    """
    if type(key) not in _KEYS:
        raise CannotEval
    store = _store(value)
    if store is None and is_module(value):
        store = _children(value)
    if store is not None:
        return _entry(store, key)
    base = _base_of(value, "__getitem__")
    if base is dict:
        return _entry(value, key)
    if base not in (list, tuple) or type(key) is not int:
        raise CannotEval
    try:
        return base.__getitem__(value, key)
    except IndexError:
        raise CannotEval from None


def _attribute(value: object, name: str) -> Any:
    attribute = _class_attribute(type(value), name)
    if type(attribute) is _FIELD:
        return attribute.__get__(value, type(value))  # type: ignore[attr-defined]
    if _class_attribute(type(value), "__getattribute__") is object.__getattribute__:
        # As in Python, an attribute of the class hides a registered parameter.
        if is_module(value) and attribute is _ABSENT:
            for kind in ("_parameters", "_buffers", "_modules"):
                if name in registered(value, kind):
                    return registered(value, kind)[name]
        store = _store(value)
        if store is not None and name in store:
            return _entry(store, name)
    raise CannotEval


def _store(value: object) -> Mapping[object, object] | None:
    """Return the dict behind an object of a known class, ``None`` for other objects."""
    for module, name, path in _STORES:
        if not is_of(value, module, name):
            continue
        store = value
        for step in path:
            store = instance_dict(store).get(step)
        return store if type(store) is dict else None
    return None


def _children(module: object) -> Mapping[Any, object] | None:
    """Return the children of a module that is a plain list or dict of modules."""
    if not any(type(module) is loaded("torch.nn", name) for name in _MODULE_LISTS):
        return None
    children = registered(module, "_modules")
    if type(module) is loaded("torch.nn", "ModuleDict"):
        return children
    held = list(children.values())
    # Negative indices, too, as the module's own ``__getitem__`` takes them.
    return {at: held[at] for at in range(-len(held), len(held))}


def _entry(mapping: object, key: object) -> Any:
    assert isinstance(mapping, dict)
    # A key of a foreign type could run its own comparison during the look-up.
    keys = dict.keys(mapping)
    if len(keys) > _MAX_KEYS or not all(type(item) in _KEYS for item in keys):
        raise CannotEval
    entry = dict.get(mapping, key, _ABSENT)
    if entry is _ABSENT:
        raise CannotEval
    return entry


def _base_of(value: object, method: str) -> Any:
    """Return dict, list or tuple when ``value`` uses that type's own ``method``."""
    for base in (dict, list, tuple):
        if _class_attribute(type(value), method) is _class_attribute(base, method):
            return base
    return None


def _class_attribute(kind: type, name: str) -> object:
    """Read an attribute of a class as it is stored: no descriptor, no metaclass."""
    for entry in type.__dict__["__mro__"].__get__(kind):
        own = type.__dict__["__dict__"].__get__(entry)
        if name in own:
            return own[name]
    return _ABSENT
