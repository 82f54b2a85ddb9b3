"""The user's variables, for a fix: operands, layers, and where values were made.

Runs none of the user's code.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType, FrameType, TracebackType
from typing import Any

from torch import nn

from cudalens.core import _torch
from cudalens.core._python import parse_expression
from cudalens.core.call import Call
from cudalens.core.evidence_types import Binding
from cudalens.core.report_types import Expression, SourceSpan, TensorFact, syntax
from cudalens.core.user_objects import is_module, is_tensor
from cudalens.diagnosis import candidates
from cudalens.diagnosis.moves import Called
from cudalens.diagnosis.user_code import chooses, last_name
from cudalens.evidence.tensors import of_meta
from cudalens.source.bindings import attribute_binding, binding_of
from cudalens.source.files import is_user_file
from cudalens.source.module_path import container_of, module_at, modules_below, spelled
from cudalens.source.readers import other_readers
from cudalens.source.running_call import ABSENT, MODULE_CALLS, RunningCall
from cudalens.source.running_node import Running, running
from cudalens.source.safe_eval import (
    instance_dict,
    registered,
    value_or,
)
from cudalens.source.scopes import loop_names
from cudalens.source.stack import frame_of, place_of

_STORES = ("_modules", "_parameters", "_buffers")


@dataclass(frozen=True, kw_only=True)
class RunningLine:
    """The user's running line on the stack."""

    call: RunningCall
    """The reader of its expressions."""
    frame: FrameType
    below: Sequence[FrameType]
    """The frames below it."""
    callers: Sequence[FrameType | TracebackType]
    """The user's stack entries that led to it, innermost first."""

    @property
    def running(self) -> Running:
        """The syntax of the running expression."""
        return self.call.run

    @property
    def module(self) -> nn.Module | None:
        """The module that the line calls."""
        function = getattr(self.running.node, "func", None)
        value = function and self.call.value(function)
        if value is ABSENT and self.below:
            is_call = self.below[0].f_code.co_name in MODULE_CALLS
            value = self.below[0].f_locals.get("self") if is_call else None
        return value if is_module(value) else None


def line_of(entries: Sequence[FrameType | TracebackType]) -> RunningLine | None:
    """Return the user's innermost running line, ``None`` without its source."""
    frames = list(map(frame_of, entries))
    users = [at for at, item in enumerate(frames) if is_user_file(item.f_code.co_filename)]
    if not users:
        return None
    *outer, at = users
    run = running(place_of(entries[at]))
    callers = [entries[i] for i in reversed(outer)]
    if run.node is None:
        return None
    call = RunningCall(run)
    call.learn_from_callee(next(map(place_of, entries[at + 1 : at + 2]), None))
    below = frames[at + 1 :]
    return RunningLine(call=call, frame=frames[at], below=below, callers=callers)


class Variables(candidates.Trial):
    """Answer questions about the user's line: its operands, its module, where its values were made.

    Args:
        call: the failing call.
        line: the user's running line.
    """

    def __init__(self, call: Call, line: RunningLine) -> None:
        self.call, self.line = call, line
        self.evaluator = line.running.evaluator
        self._node = line.running.node

    def _read(self, node: ast.expr) -> object:
        return value_or(self.evaluator, node, ABSENT)

    @functools.cached_property
    def operands(self) -> tuple[TensorFact, ...]:  # type: ignore[override]
        """The tensor operands of the running call, by their text."""
        facts = []
        for item in self.call.operands:
            if is_tensor(item.value) and _torch.is_plain(item.value):
                node, text = item.node, Expression(item.text, item.node)
                fact = of_meta(None, _torch.meta_of(item.value), text)
                span = (node.lineno, node.col_offset, node.end_col_offset or 0)
                facts.append(replace(fact, span=span))
        return tuple(facts)

    @functools.cached_property
    def others(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        """Arguments that can be converted to a tensor: text and kind."""
        kinds = ((item, _kind(item.value)) for item in self.call.operands)
        return tuple((Expression(item.text, item.node), kind) for item, kind in kinds if kind)

    @functools.cached_property
    def lists(self) -> tuple[tuple[str, list[Any]], ...]:  # type: ignore[override]
        """The arguments that are lists, by their text."""
        return tuple((it.text, it.value) for it in self.call.operands if type(it.value) is list)

    @functools.cached_property
    def is_of_loop(self) -> bool:  # type: ignore[override]
        """True if a loop around the line calls another object each time: ``layer(x)``."""
        called = getattr(self._node, "func", None)
        if isinstance(called, ast.Attribute) and called.attr != "forward":
            return False  # a method call
        parts = ast.walk(called) if called is not None else ()
        return any(isinstance(item, ast.Name) and item.id in self.loop_names for item in parts)

    @functools.cached_property
    def loop_names(self) -> frozenset[str]:  # type: ignore[override]
        """The loop variables around the call, including those of comprehensions."""
        return loop_names(self.line.running.parents)

    @functools.cached_property
    def loop_arguments(self) -> frozenset[str]:  # type: ignore[override]
        """Arguments of the running function that depend on a loop in the caller: ``f(x[n])``."""
        code = self.line.frame.f_code
        if code.co_name == "<module>" or not self.line.callers:
            return frozenset()
        run = running(place_of(self.line.callers[0]))
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        loops, call = loop_names(run.parents), run.node
        if not isinstance(call, ast.Call) or not names:
            return frozenset()
        func = call.func
        owners = (func, func.value) if isinstance(func, ast.Attribute) else (func,)
        first = self.line.frame.f_locals.get(names[0])
        is_method = any(value_or(run.evaluator, item, ABSENT) is first for item in owners)
        given = [*zip(names[is_method:], call.args, strict=False)]
        given += [(item.arg, item.value) for item in call.keywords if item.arg in names]
        return frozenset(name for name, value in given if chooses(value, loops))

    def binding(self, expression: str, *, of_shape: bool = False) -> Binding | None:
        """Return where a name, or an attribute of a user's module, got its value.

        ``None`` for a tensor that was written to since: the binding does not explain its values.
        """
        target = _syntax(expression)
        value = self._read(target)
        if is_tensor(value) and not of_shape and (value.is_inference() or value._version):
            return None
        if isinstance(target, ast.Name) and type(value) in (int, float):
            return binding_of(self.line.running, target.id)
        is_array = type(value).__name__ == "ndarray"
        if isinstance(target, ast.Name) and (is_tensor(value) or is_module(value) or is_array):
            return binding_of(self.line.running, target.id) or self._passed_in(target.id, value)
        owner = self._read(target.value) if isinstance(target, ast.Attribute) else None
        if not is_module(owner) or not isinstance(target, ast.Attribute):
            return None
        made = next(d["__init__"] for k in type(owner).__mro__ if "__init__" in (d := vars(k)))
        code = getattr(made, "__code__", None)
        if not isinstance(code, CodeType) or not is_user_file(code.co_filename):
            return None
        stored = (instance_dict(owner), *(registered(owner, kind) for kind in _STORES))
        return (
            attribute_binding(code, target.attr) if any(target.attr in s for s in stored) else None
        )

    def other_readers(self, expression: str) -> tuple[list[int], list[int]]:
        """Return the other lines that read an operand, and those that need its exact numbers.

        Only lines from the running one on: earlier lines have run with it as it is.
        """
        statement = self.line.running.statement
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if any(ast.unparse(target) == expression for target in targets):
            return [], []  # rebound here, so later lines read another value
        every, counting = other_readers(self.line.running, _syntax(expression))
        here = self.line.running.place.lineno
        return [line for line in every if line >= here], counting

    def _passed_in(self, name: str, value: object) -> Binding | None:
        """Return where a caller made the object that is an argument of the running function."""
        code = self.line.frame.f_code
        is_cell = code.co_name == "<module>" or name not in code.co_varnames[: code.co_argcount]
        for entry in () if is_cell else self.line.callers:
            run = running(place_of(entry))
            nodes = getattr(run.node, "args", []), getattr(run.node, "keywords", [])
            arguments = (*nodes[0], *(item.value for item in nodes[1]))
            same = [item for item in arguments if value_or(run.evaluator, item, ABSENT) is value]
            if len(same) != 1 or not isinstance(same[0], ast.Name):
                return None
            binding = binding_of(run, same[0].id)
            if binding is not None:
                return replace(binding, name=same[0].id, dropped=None)
        return None

    def layer(self, path: str, shape: tuple[int, ...] | None = None) -> Binding | None:
        """Return the user's name for the module at a path, and where it was made.

        ``None`` if the running code sees several modules with such a part.

        Args:
            shape: the shape of one of its parameters, to select among modules.
        """
        # Look for the root module among the variables. Several roots with the part are ambiguous.
        layers: dict[int, tuple[str, nn.Module, nn.Module]] = {}
        for variables in (self.line.frame.f_locals, self.line.frame.f_globals):
            for name, value in list(variables.items()):
                if is_module(value) and not name.startswith("_"):
                    part = module_at(value, path)
                    own = registered(part, "_parameters").values()
                    shapes = [item.shape for item in own if is_tensor(item)]
                    if is_module(part) and (shape is None or shape in shapes):
                        layers.setdefault(id(value), (name, value, part))
        if len(layers) != 1:
            return None
        root, model, part = next(iter(layers.values()))
        if isinstance(part, nn.ParameterDict | nn.ParameterList):
            return None
        # `net.0` as code is `net[0]`. Its binding is the container's, with the position in it.
        holder, places = container_of(path)
        made = self.binding(spelled(root, holder))
        made = _item(made, places, part) or made
        weight = registered(part, "_parameters").get("weight")
        others = [
            (f"{root}.{at}", item, registered(item, "_parameters").get("weight"))
            for at, item in modules_below(model)
            if item is not part and item is not model
        ]
        # Modules that must change together: a tied weight, or a head with as many outputs as rows.
        tied = [name for name, _, other in others if other is weight]
        of_table = part.weight.shape if isinstance(part, nn.Embedding) else None
        alike = [
            name  # an output head; a table may have the size by chance
            for name, item, other in others
            if getattr(other, "shape", ()) == of_table and not isinstance(item, nn.Embedding)
        ]
        return replace(
            made or Binding(at=SourceSpan()),
            name=spelled(root, path),
            tied=tied[0] if tied and weight is not None else None,
            beside=alike[0] if len(alike) == 1 else None,
        )

    def held_in(self, expression: str) -> tuple[str, str] | None:
        """Return the attribute of a running module that is a tensor, and its kind.

        For a parameter or a buffer, which the module's ``.to()`` moves, the class of the module.
        """
        value = self._read(_syntax(expression))
        owner = self.line.frame.f_locals.get("self")
        if is_module(owner):
            registered = (*owner.parameters(recurse=False), *owner.buffers(recurse=False))
            if any(item is value for item in registered):
                return type(owner).__name__, "module"
        stored = instance_dict(owner).items() if is_module(owner) else ()
        for key, item in list(stored):
            if item is value:
                is_group = type(item) in (list, tuple, dict)
                return f"self.{key}", type(item).__name__ if is_group else "attribute"
            parts = list(item.values()) if type(item) is dict else item
            is_group = type(parts) in (list, tuple) and not key.startswith("_")
            if is_group and any(part is value for part in parts):  # type: ignore[attr-defined]
                return f"self.{key}", type(item).__name__
        return None

    @functools.cached_property
    def unregistered(self) -> tuple[str, str] | None:  # type: ignore[override]
        """The list or dict that contains a running module, which no module registers."""
        frames = [self.line.frame, *map(frame_of, self.line.callers)]
        scopes = [list(frame.f_locals.items()) for frame in frames]
        values = [value for scope in scopes for _, value in scope]
        modules = [item for item in (self.line.module, *values) if is_module(item)]
        ids = {id(self.line.module)} | {id(frame.f_locals.get("self")) for frame in frames}
        registered = {id(part) for it in modules for at, part in modules_below(it) if at}
        spaces = {id(frame.f_globals) for frame in frames}
        for frame, scope in zip(frames, scopes, strict=True):
            owner = frame.f_locals.get("self")
            stored = list(instance_dict(owner).items()) if is_module(owner) else []
            named = [*((f"self.{key}", item) for key, item in stored), *scope]
            for name, value in named:
                if id(value) in spaces:
                    continue
                if type(value) in (list, tuple, dict) and "_" not in (name[:1], name[5:6]):
                    items = value.values() if type(value) is dict else value
                    parts = {id(item) for item in items if is_module(item)}
                    if (parts & ids) - registered:
                        return name, type(value).__name__
        return None

    @functools.cached_property
    def called(self) -> Called:  # type: ignore[override]
        """Facts about the called module, for edits."""
        module = self.line.module
        if module is None:
            return Called()
        tensors = (*module.parameters(), *module.buffers())
        devices = {str(item.device) for item in tensors}
        flags = [instance_dict(item).get("batch_first") for item in module.modules()]
        return Called(
            device=devices.pop() if len(devices) == 1 else None,
            is_model=not type(module).__module__.startswith("torch.nn.modules."),
            is_batch_second=False in flags and True not in flags,
        )


def _syntax(expression: str) -> ast.expr:
    """Return the syntax of an expression: as it was read, or parsed from a hint's text."""
    return syntax(expression) or parse_expression(expression).body


def _kind(value: object) -> str | None:
    """Return the kind of a value that can be converted to a tensor."""
    if type(value) is list and value:
        has_tensors = all(is_tensor(item) for item in value)
        return "tensors" if has_tensors else "list"
    name = f"{type(value).__module__}.{type(value).__name__}"
    if name == "numpy.ndarray":
        return name
    is_bound = is_tensor(getattr(value, "__self__", None))
    return "method" if is_bound and callable(value) else None


def _item(made: Binding | None, places: Sequence[int], part: nn.Module) -> Binding | None:
    """Return the call that made a layer of a container, as written on the container's line.

    ``None`` if the layer was replaced since: class and sizes must match.
    """
    for at in places:
        made = made.items[at] if made is not None and at < len(made.items) else None
    call = made and made.value and syntax(made.value)
    if not isinstance(call, ast.Call) or last_name(call.func) != type(part).__name__:
        return None
    names = list(inspect.signature(type(part)).parameters)
    given = [*zip(names, call.args, strict=False), *((it.arg, it.value) for it in call.keywords)]
    has: Mapping[Any, object] = instance_dict(part)
    numbers = [
        (has.get(name), item.value) for name, item in given if isinstance(item, ast.Constant)
    ]
    is_same = all(own == value for own, value in numbers if type(own) is type(value) is int)
    return made if is_same else None
