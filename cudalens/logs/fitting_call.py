"""Find the calls in a user's code that can launch the kernel of an assertion, by their syntax.

That one call alone fits is a hint and no proof: other code may have launched the kernel.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from cudalens.core.api_names import BACKWARD, api_names
from cudalens.core.evidence_types import FittingCall
from cudalens.diagnosis.assert_meanings import Meaning

__all__ = ["Objects", "fitting_calls"]

_READ, _WRITE = "x[i]", "x[i] = y"
_MAX_TEXT = 60


class Objects:
    """Facts about the objects that some code names; none are at hand where only a log is."""

    def classes(self, node: ast.expr) -> Sequence[str] | None:
        """Return the names of an object's class and its bases; ``None`` where it is unknown."""
        return None

    def parts(self, node: ast.expr) -> Sequence[str]:
        """Return the names of the classes of a module and its submodules."""
        return ()

    def definitions(self, node: ast.expr) -> Sequence[ast.AST]:
        """Return the user's functions and classes that a call of the object runs."""
        return ()


def fitting_calls(
    tree: ast.AST, meaning: Meaning, objects: Objects | None = None
) -> tuple[FittingCall, ...]:
    """Return the calls of some code that can print an assertion, in order of their lines."""
    calls = _Code(tree, meaning, objects or Objects()).calls()
    return tuple(sorted(calls, key=lambda item: item.line))


class _Code:
    """Some code, with what it says of its own names."""

    def __init__(self, tree: ast.AST, meaning: Meaning, objects: Objects) -> None:
        self._meaning, self._objects = meaning, objects
        self._ops: dict[str, str] = {}
        for op in meaning.ops:
            for name in api_names(op):
                self._ops.setdefault(name, op)
        self._functions: dict[str, str] = {}
        self._modules: dict[str, str] = {}
        for name in self._ops:
            if name.startswith("nn."):
                self._modules[name[3:]] = name
            # `add` may as well be the method of a set.
            elif not name.startswith((BACKWARD, _READ)) and name != "torch.add":
                self._functions.setdefault(name.rpartition(".")[2].rstrip("_"), name)
        self._nodes = list(_executed(tree))
        self._own, self._counters, self._foreign = set[str](), set[str](), set[str]()
        self._augmented = set[int]()
        self._made: dict[str, list[str]] = {}
        for node in self._nodes:
            self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        """Note what a statement says of the names in it."""
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                self._own.add(node.name)
            case ast.AugAssign():
                self._augmented.add(id(node.target))
            case ast.Import():
                names = [item for item in node.names if not item.name.startswith("torch")]
                self._foreign.update(item.asname or item.name.split(".")[0] for item in names)
            case ast.Assign() if made := self._constructed(node.value):
                self._made.update((ast.unparse(target), made) for target in node.targets)
            case ast.For(iter=ast.Call(func=ast.Name(id="range")), target=ast.Name(id=name)):
                self._counters.add(name)
            case ast.For(
                iter=ast.Call(func=ast.Name(id="enumerate")),
                target=ast.Tuple(elts=[ast.Name(id=name), _]),
            ):
                self._counters.add(name)

    def calls(self) -> Iterator[FittingCall]:
        for node in self._nodes:
            if isinstance(node, ast.Subscript):
                fits = [(name, "") for name in self._of_item(node)]
            elif isinstance(node, ast.Call):
                fits = list(self._of_call(node.func))
            else:
                continue
            for name, inside in fits:
                text = ast.unparse(node)
                text = text if len(text) <= _MAX_TEXT and "\n" not in text else name
                text = f"{inside} inside {text}" if inside else text
                yield FittingCall(op=self._ops[name], api=name, line=node.lineno, text=text)

    def _of_item(self, node: ast.Subscript) -> list[str]:
        is_read = isinstance(node.ctx, ast.Load) or id(node) in self._augmented
        name = _WRITE if isinstance(node.ctx, ast.Store) and _WRITE in self._ops else _READ
        classes = self._objects.classes(node.value)
        is_other = classes is not None and "Tensor" not in classes
        if name not in self._ops or is_other or (name == _READ and not is_read):
            return []
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return [name] if any(map(self._may_be_positions, parts)) else []

    def _may_be_positions(self, node: ast.expr) -> bool:
        """Return whether a kernel may read an index: it is no number, slice or mask."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._may_be_positions(node.operand)
        if isinstance(node, ast.Constant | ast.Slice | ast.Compare | ast.BoolOp | ast.UnaryOp):
            return False
        if isinstance(node, ast.Name) and node.id in self._counters:
            return False
        classes = self._objects.classes(node)
        return classes is None or not {"Tensor", "list", "tuple", "ndarray"}.isdisjoint(classes)

    def _of_call(self, function: ast.expr) -> Iterator[tuple[str, str]]:
        """Return each API call of one call, with its text where other code makes it."""
        is_made_here = isinstance(function, ast.Call)
        made = self._constructed(function) if is_made_here else self._made.get(_text(function))
        if made:
            yield from ((name, "") for name in made)
            return
        # What this code defines itself is read where it stands.
        definitions = self._objects.definitions(function)
        own = [item for item in definitions if getattr(item, "name", "") not in self._own]
        if own:
            for call in (call for item in own for call in fitting_calls(item, self._meaning)):
                yield call.api, call.text
            return
        if parts := self._objects.parts(function):
            names = [self._modules[name] for name in parts if name in self._modules]
            yield from ((name, name if len(parts) > 1 else "") for name in names)
            return
        name = self._functions.get(_text(function).rpartition(".")[2].rstrip("_"))
        if name is not None and not self._is_foreign(function):
            yield name, ""

    def _is_foreign(self, function: ast.expr) -> bool:
        """Return whether a function is one of another library's modules: ``np.take``."""
        while isinstance(function, ast.Attribute):
            function = function.value
        is_module = "module" in (self._objects.classes(function) or ())
        return is_module or (isinstance(function, ast.Name) and function.id in self._foreign)

    def _constructed(self, node: ast.expr) -> list[str]:
        """Return the modules that an expression makes."""
        calls = (item for item in ast.walk(node) if isinstance(item, ast.Call))
        names = (_text(item.func).rpartition(".")[2] for item in calls)
        return [self._modules[name] for name in names if name in self._modules]


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Return the nodes of some code without its annotations."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST):
                yield node
                yield from _executed(node)


def _text(node: ast.expr) -> str:
    """Return a name with its attributes, only the last of them behind anything else."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{_text(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""
