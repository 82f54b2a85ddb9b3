"""The user's program as syntax: where a number in a call was chosen.

A number is followed from its argument through names, parameters and attributes, as long as there is
only one way.  A way that ends at a different number is discarded.  No code is run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from types import FrameType
from typing import NamedTuple, cast

from cudalens.core.report_types import LineRef, SourceSpan
from cudalens.core.torch_functions import Trait, functions
from cudalens.diagnosis.user_code import last_name
from cudalens.evidence.options import is_option
from cudalens.source.files import CELLS, cell_number, is_user_file, source_lines
from cudalens.source.locate import span_of_lines
from cudalens.source.running_node import FUNCTIONS, Running, parsed_source
from cudalens.source.scopes import (
    bindings_of,
    default_of,
    item_of,
    pairs_of,
    parameters_of,
    value_bound,
)

MAX_FILES = 64
_MAX_LINES = 5000
"""How many lines are parsed: more would take too long for a report."""
_MAX_HOPS = 8
_SIZES = {
    "Embedding": (0, "num_embeddings"),
    "EmbeddingBag": (0, "num_embeddings"),
    "Linear": (1, "out_features"),
    "LazyLinear": (0, "out_features"),
    "Bilinear": (2, "out_features"),
    "Conv1d": (1, "out_channels"),
    "Conv2d": (1, "out_channels"),
    "Conv3d": (1, "out_channels"),
    "one_hot": (1, "num_classes"),
    "topk": (1, "k"),
    "arange": (0, "end"),
    "eye": (0, "n"),
    "linspace": (2, "steps"),
    "logspace": (2, "steps"),
}
"""The argument of a layer or function that is the number of rows or classes."""
_FACTORIES = functions(Trait.TAKES_SIZES | Trait.FACTORY)
_METHODS = functions(Trait.TAKES_SIZES, without=Trait.FACTORY)
_EMPTY = frozenset({"ParameterList", "ParameterDict", "ModuleList", "ModuleDict", "list"})
"""Containers that are empty, and filled later, if called without arguments."""
_SCOPES = (*FUNCTIONS, ast.ClassDef)


class Spot(NamedTuple):
    """A piece of the user's source."""

    file: str
    node: ast.AST
    is_read: bool = False
    """True if the number is only read there, and its origin is unknown."""

    @property
    def line(self) -> int:
        """The first line; of a multi-line method call, the line of the method's name."""
        return getattr(self.node, "lineno", 0)


class _Number(NamedTuple):
    """A number on the way back to the line that chose it."""

    at: Spot
    """The expression with the number."""
    shown: Spot
    """The call or the assignment around it."""
    size: int
    key: int | str | None = None
    """The item of the expression that is the number."""
    hops: int = 0

    @property
    def read(self) -> Spot:
        """The place around the expression, as one that only reads the number."""
        return self.shown._replace(is_read=True)

    def inside(self, node: ast.expr, key: int | str | None = None) -> _Number:
        """Return the number by another expression of the same place."""
        return self._replace(at=Spot(self.at.file, node), key=key)


def size_argument(call: ast.AST, dim: int | None) -> ast.expr | None:
    """Return the argument of a call that is the size of a dimension, if there is one.

    Args:
        dim: the dimension of a factory's result; a layer's rows are dimension 0 of its weight.
    """
    if not isinstance(call, ast.Call) or any(isinstance(it, ast.Starred) for it in call.args):
        return None
    name = last_name(call.func) or ""
    if name in _FACTORIES | _METHODS and call.args:
        owner = getattr(call.func, "value", None)
        if name in _METHODS and (owner is None or getattr(owner, "id", "") == "torch"):
            return None  # a function whose first argument is the tensor
        is_listed = isinstance(call.args[0], ast.Tuple | ast.List)
        size = item_of(call.args[0] if is_listed else ast.Tuple(call.args), dim)
        return None if name in _METHODS and isinstance(size, ast.UnaryOp) else size
    if name == "randint" and call.args and isinstance(call.args[-1], ast.Tuple):
        return item_of(call.args[-1], dim)
    at, keyword = _SIZES.get(name, (-1, ""))
    return _argument(call, keyword, at)[0]


def shape_argument(call: ast.AST) -> ast.Name | None:
    """Return the variable that a factory takes all sizes of its result from."""
    match call:
        case ast.Call(func, [ast.Name() as shape]) if last_name(func) in _FACTORIES:
            return shape
    return None


def users_frames(frames: Sequence[FrameType]) -> list[FrameType]:
    """Return the frames of the user's program, outermost first.

    A launcher that runs cells is no part of it, and may have functions of equal names.
    """
    users = [it for it in frames if is_user_file(it.f_code.co_filename)]
    cells = (at for at, it in enumerate(users) if cell_number(it.f_code.co_filename) is not None)
    return users[next(cells, 0) :]


class Program:
    """The user's files and cells that may have made the arguments of a failing call.

    Args:
        files: the files of the running code, which come first.
    """

    @classmethod
    def of(cls, frames: Sequence[FrameType]) -> Program:
        """Return the program that runs on a stack, outermost first."""
        return cls(it.f_code.co_filename for it in reversed(users_frames(frames)))

    def __init__(self, files: Iterable[str]) -> None:
        names = list(dict.fromkeys((*files, *CELLS.names())))[:MAX_FILES]
        if sum(len(source_lines(name)) for name in names) > _MAX_LINES:
            names = []  # some files alone could hide a second assignment
        parsed = {name: parsed_source(name) for name in names}
        self.trees = {name: tree for name, tree in parsed.items() if tree is not None}

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The syntax nodes of all files."""
        return [node for tree in self.trees.values() for node in ast.walk(tree)]

    @cached_property
    def _parents(self) -> dict[int, ast.AST]:
        return {id(part): it for it in self.nodes for part in ast.iter_child_nodes(it)}

    def find(self, file: str, wanted: ast.AST) -> Spot | None:
        """Return the node in a whole file for a node that was parsed from a part of it."""
        key = _range(wanted)
        same = (it for it in ast.walk(self.trees[file]) if type(it) is type(wanted))
        node = next((it for it in same if _range(it) == key), None) if key[0] else None
        return None if node is None else Spot(file, node)

    @cached_property
    def _classes(self) -> set[str]:
        """The names of the program's classes."""
        return {it.name for it in self.nodes if isinstance(it, ast.ClassDef)}

    def running(self, run: Running) -> Spot | None:
        """Return the running expression of a stack entry, as a node of its whole file."""
        is_known = run.node is not None and run.place.filename in self.trees
        return self.find(run.place.filename, run.node) if is_known and run.node else None

    def above(self, spot: Spot) -> Iterator[ast.AST]:
        """Yield the enclosing nodes, innermost first."""
        node = spot.node
        while id(node) in self._parents:
            node = self._parents[id(node)]
            yield node

    def statement(self, spot: Spot) -> Spot | None:
        """Return the statement around an expression; a statement itself."""
        around = (it for it in (spot.node, *self.above(spot)) if isinstance(it, ast.stmt))
        node = next(around, None)
        return None if node is None else Spot(spot.file, node)

    def function_around(self, spot: Spot) -> ast.FunctionDef | None:
        """Return the enclosing function, ``None`` in a class body, a lambda or a module."""
        found = next((it for it in self.above(spot) if isinstance(it, _SCOPES)), None)
        return found if isinstance(found, ast.FunctionDef) else None

    def _class_of(self, spot: Spot) -> ast.ClassDef | None:
        above = next(iter(self.above(spot)), None)
        return above if isinstance(above, ast.ClassDef) else None

    def _every(self, kind: type[ast.AST]) -> Iterator[Spot]:
        for file, tree in self.trees.items():
            yield from (Spot(file, it) for it in ast.walk(tree) if isinstance(it, kind))

    def functions(self, name: str) -> list[Spot]:
        """Return the functions and classes of a name."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        every = (it for kind in kinds for it in self._every(kind))
        return [it for it in every if getattr(it.node, "name", "") == name]

    def returned(self, function: Spot) -> Spot | None:
        """Return what a function returns, ``None`` for several ``return`` and for a generator."""
        ends = (ast.Return, ast.Yield, ast.YieldFrom)
        match [it for it in ast.walk(function.node) if isinstance(it, ends)]:
            case [ast.Return(ast.expr() as value)]:
                return Spot(function.file, value)
        return None

    # --- the number ------------------------------------------------------------------------------

    def chosen(
        self, number: Spot, shown: Spot, size: int, key: int | str | None = None
    ) -> Spot | None:
        """Return the call or assignment that chose a number, ``None`` if it chose a different one.

        Args:
            number: the expression with the number.
            shown: the call or the assignment around the expression.  Returned as one that only
                reads the number if its origin cannot be traced.
            size: the number.
            key: the item of the expression that is the number, if it is a tuple or a dict.
        """
        return self._chosen(_Number(number, shown, size, key))

    def _chosen(self, it: _Number) -> Spot | None:
        """Return where a number was chosen, by a literal or by what is behind the expression."""
        node = it.at.node
        if (item := item_of(node, it.key)) is not None:
            return self._chosen(it.inside(item))
        match node:
            case ast.Constant(value):
                return it.shown if type(value) is int and value == it.size else None
            case ast.UnaryOp(ast.USub(), ast.Constant()):
                return None
            case ast.List(elts) | ast.Tuple(elts):
                numbers = [part.value for part in elts if isinstance(part, ast.Constant)]
                if it.size not in numbers and len(numbers) < len(elts):
                    return it.read
                return it.shown if it.size in numbers else None
            case ast.Call(ast.Name("int"), [given]):
                return self._chosen(it.inside(given))
            case ast.Call(ast.Attribute(attr="size")):
                return it.read
        return it.read if it.hops >= _MAX_HOPS else self._behind(it._replace(hops=it.hops + 1))

    def _behind(self, it: _Number) -> Spot | None:
        """Continue with the value of a name, an attribute, an item or a user's call."""
        match it.at.node:
            case ast.Name(name):
                return self._of_name(it, name)
            case ast.Attribute():
                return self._of_attribute(it, it.at.node)
            case ast.Call(func):
                return self._result(it, last_name(func) or "")
            case ast.Subscript(ast.Name() | ast.Call() as owner, ast.Constant(int() | str() as at)):
                return self._chosen(it.inside(owner, at))
            case ast.Subscript(ast.Name() as owner):
                return self._chosen(it.inside(owner))
            case ast.Subscript():
                return it.read
        return it.shown

    def _result(self, it: _Number, name: str) -> Spot | None:
        """Continue with what the user's only function of the called name returns."""
        own = [one for one in self.functions(name) if isinstance(one.node, ast.FunctionDef)]
        value = self.returned(own[0]) if len(own) == 1 else None
        # A method of this name may belong to a built-in object.
        if value is not None and not hasattr(dict, name):
            return self._chosen(it._replace(at=value, shown=self._parent(value)))
        return it.read if own else it.shown

    def _of_name(self, it: _Number, name: str) -> Spot | None:
        """Continue with a loop, the calls of a function, or the only assignment of a name."""
        if (loop := self._loop_over(it.at, name)) is not None:
            return self._chosen(it.inside(loop))
        function = self.function_around(it.at)
        if function is not None:
            if name in parameters_of(function):
                calls = self.given(Spot(it.at.file, function), name)
                ways = [
                    self._chosen(it._replace(at=Spot(call.file, given), shown=call))
                    for call, given in calls
                ]
                return _only(filter(None, ways)) or it.read
            if bound := bindings_of(function, name):
                return self._of_bindings(it, name, bound, it.at.file)
        for file in (it.at.file, *reversed(self.trees)):
            if file in self.trees and (bound := bindings_of(self.trees[file], name)):
                return self._of_bindings(it, name, bound, file)
        return it.read

    def _of_bindings(
        self, it: _Number, name: str, bound: Sequence[ast.stmt], file: str
    ) -> Spot | None:
        """Continue with the only assignment that binds a name."""
        if len(bound) != 1 or not isinstance(bound[0], ast.Assign):
            return it.read
        made = Spot(file, bound[0])
        if (value := value_bound(bound[0], name)) is not None:
            return self._chosen(it._replace(at=Spot(file, value), shown=made))
        if _reads_size(bound[0].value):
            return made._replace(is_read=True)
        match bound[0]:
            case ast.Assign([ast.Tuple(targets)], ast.Call() as value) if it.key is None:
                names = [ast.unparse(target) for target in targets]
                at = names.index(name) if name in names else None
                return self._chosen(it._replace(at=Spot(file, value), shown=made, key=at))
        return made

    def _loop_over(self, name: Spot, text: str) -> ast.expr | None:
        """Return the iterable of the loop with this variable."""
        for above in self.above(name):
            loops = [above] if isinstance(above, ast.For) else getattr(above, "generators", [])
            for loop in loops:
                if isinstance(loop.target, ast.Name) and loop.target.id == text:
                    return cast("ast.expr", loop.iter)
            if isinstance(above, _SCOPES):
                return None
        return None

    def _of_attribute(self, it: _Number, node: ast.Attribute) -> Spot | None:
        """Continue with the only place that sets this attribute of this object."""
        text = ast.unparse(node)
        is_own = text == f"self.{node.attr}"
        owner = self.class_around(it.at) if is_own else None
        values = [*self.values_of(None if owner is None else owner.name, node.attr, text)]
        found: list[Spot | None] = []
        for call in self._objects(Spot(it.at.file, node.value), it.hops):
            assert isinstance(call.node, ast.Call)
            given = [arg.value for arg in call.node.keywords if arg.arg == node.attr]
            ways = (it._replace(at=Spot(call.file, arg), shown=call, key=None) for arg in given)
            found += [self._chosen(way) for way in ways]
            if not given:
                kind = last_name(call.node.func) or ""
                found += self._fields(kind, node.attr, it.size)
                values += self.values_of(kind, node.attr)
        places = (it._replace(at=value, shown=self._parent(value), key=None) for value in values)
        found += [self._chosen(place) for place in places]
        if not any(found) and not text.startswith("self."):
            calls = self._every(ast.Call)
            found += [call for call in calls if is_option(call.node, node.attr, it.size)]
        return _only(filter(None, found)) or it.read

    def _parent(self, spot: Spot) -> Spot:
        return Spot(spot.file, next(self.above(spot)))

    def _objects(self, base: Spot, hops: int) -> Iterator[Spot]:
        """Yield the calls that made the object behind a name: ``Config(classes=5)``."""
        node = base.node
        if isinstance(node, ast.Call):
            yield base
        elif isinstance(node, ast.Name) and hops < _MAX_HOPS:
            function = self.function_around(base)
            if function is not None and node.id in parameters_of(function):
                for call, given in self.given(Spot(base.file, function), node.id):
                    yield from self._objects(Spot(call.file, given), hops + 1)
            else:
                for value in self.values_of(None, node.id):
                    yield from self._objects(value, hops + 1)
        elif isinstance(node, ast.Attribute) and (owner := self.class_around(base)) is not None:
            for value in self.values_of(owner.name, node.attr, target=ast.unparse(node)):
                yield from self._objects(value, hops + 1)

    def _fields(self, owner: str, name: str, size: int) -> Iterator[Spot]:
        """Yield the line in a class body that gives a field this number."""
        for spot in self.functions(owner):
            for made in bindings_of(spot.node, name) if isinstance(spot.node, ast.ClassDef) else ():
                match value_bound(made, name):
                    case ast.Constant(value) if value == size:
                        yield Spot(spot.file, made)

    def class_around(self, spot: Spot) -> ast.ClassDef | None:
        """Return the class of the enclosing method."""
        return next((it for it in self.above(spot) if isinstance(it, ast.ClassDef)), None)

    # --- calls of a function, and the layers that they make --------------------------------------

    def name_called(self, function: Spot) -> str:
        """Return the name by which a function is called; the class's name for a constructor."""
        assert isinstance(function.node, ast.FunctionDef)
        owner, name = self._class_of(function), function.node.name
        return owner.name if owner is not None and name == "__init__" else name

    def given(self, function: Spot, name: str) -> Iterator[tuple[Spot, ast.expr]]:
        """Yield the calls of a function of the user's, each with the argument for a parameter."""
        definition = function.node
        assert isinstance(definition, ast.FunctionDef)
        owner = self._class_of(function)
        called = self.name_called(function)
        is_init = called != definition.name
        at = parameters_of(definition).index(name) - (owner is not None)
        for spot in self._every(ast.Call):
            call = spot.node
            assert isinstance(call, ast.Call)
            if last_name(call.func) != called and not (is_init and self._is_super(spot, called)):
                continue
            if owner is not None and not is_init and not isinstance(call.func, ast.Attribute):
                continue  # a function of the name of a method
            # ``Model.f(model, x)`` gives the object, too.
            base = getattr(call.func, "value", None)
            is_of_class = owner is not None and getattr(base, "id", "") in self._classes
            given, is_plain = _argument(call, name, at + is_of_class)
            if given is None and is_plain and not any(it.arg is None for it in call.keywords):
                given = default_of(definition, name)
                if given is not None:
                    spot = Spot(function.file, given)  # noqa: PLW2901
            if given is not None:
                yield spot, given

    def _is_super(self, spot: Spot, base: str) -> bool:
        """Return whether ``super().__init__(…)`` calls the constructor of a class."""
        assert isinstance(spot.node, ast.Call)
        function = self.function_around(spot)
        owner = function and self._class_of(Spot(spot.file, function))
        is_call = last_name(spot.node.func) == "__init__"
        return bool(is_call and owner and base in map(last_name, owner.bases))

    def layers(self, value: Spot, kind: str, size: int, hops: int = 0) -> list[Spot]:
        """Return the calls of a class in an expression that may have made a layer of a size."""
        node = value.node
        if isinstance(node, ast.Name) and hops < _MAX_HOPS:
            function = self.function_around(value)
            if function is None or node.id not in parameters_of(function):
                return []
            calls = self.given(Spot(value.file, function), node.id)
            ways = (self.layers(Spot(it.file, arg), kind, size, hops + 1) for it, arg in calls)
            return list(dict.fromkeys(spot for way in ways for spot in way))
        spots = [
            Spot(value.file, it)
            for it in ast.walk(node)
            if isinstance(it, ast.Call) and last_name(it.func) == kind
        ]
        numbers = ((spot, size_argument(spot.node, 0)) for spot in spots)
        return [
            spot
            for spot, number in numbers
            if number is None or self.chosen(Spot(spot.file, number), spot, size) is not None
        ]

    def values_of(self, owner: str | None, name: str, target: str = "") -> Iterator[Spot]:
        """Yield the values assigned to an attribute of a class, or to a variable of the program.

        Args:
            target: the full text for an attribute of another object: ``cfg.classes``.
        """
        for spot in self._every(ast.Assign):
            node = spot.node
            assert isinstance(node, ast.Assign)
            for item, value in pairs_of(node.targets, node.value):
                if last_name(item) != name:
                    continue
                is_own = owner is not None and self._is_own(spot, item, owner)
                is_variable = owner is None and isinstance(item, ast.Name) and not target
                is_other = owner is None and bool(target) and ast.unparse(item) == target
                if is_own or is_variable or is_other:
                    yield Spot(spot.file, value)

    def appended(self, owner: str | None, name: str) -> Iterator[Spot]:
        """Yield the values appended to an attribute of a class, or to a variable of the program."""
        for spot in self._every(ast.Call):
            match spot.node:
                case ast.Call(ast.Attribute(target, "append"), [value]) if (
                    last_name(target) == name
                ):
                    is_variable = owner is None and isinstance(target, ast.Name)
                    if is_variable or (owner is not None and self._is_own(spot, target, owner)):
                        yield Spot(spot.file, value)

    def _is_own(self, spot: Spot, target: ast.expr, owner: str) -> bool:
        """Return whether a target is an attribute of ``self`` in a method of a class."""
        around = self.class_around(spot)
        return isinstance(target, ast.Attribute) and around is not None and around.name == owner

    def text(self, spot: Spot) -> str:
        """Return the source of a call or an assignment on one line, or a default as ``n=10``."""
        if not isinstance(spot.node, ast.Constant):
            return ast.unparse(spot.node)
        function = next(it for it in self.above(spot) if isinstance(it, ast.FunctionDef))
        names = (it for it in parameters_of(function) if default_of(function, it) is spot.node)
        return f"{next(names)}={ast.unparse(spot.node)}"

    def span(self, spot: Spot) -> SourceSpan:
        """Return the place of a node, with all of its lines."""
        return span_of_lines(spot.file, spot.line, getattr(spot.node, "end_lineno", None))

    def line(self, spot: Spot) -> LineRef:
        """Return the first line of a node."""
        return span_of_lines(spot.file, spot.line).ref


def _argument(call: ast.Call, name: str, at: int) -> tuple[ast.expr | None, bool]:
    """Return the argument for a parameter, and whether its position is known."""
    named = next((it.value for it in call.keywords if it.arg == name), None)
    is_plain = not any(isinstance(it, ast.Starred) for it in call.args[: at + 1])
    return named or (call.args[at] if is_plain and 0 <= at < len(call.args) else None), is_plain


def takes_sizes(node: ast.AST) -> bool:
    """Return whether a call takes the sizes of its result as arguments."""
    name = last_name(node.func) if isinstance(node, ast.Call) and node.args else ""
    return name in _FACTORIES | _METHODS


def is_empty_container(node: ast.AST) -> bool:
    """Return whether an expression makes an empty container."""
    is_list = isinstance(node, ast.List) and not node.elts
    is_call = isinstance(node, ast.Call) and not node.args and last_name(node.func) in _EMPTY
    return is_list or is_call


def _reads_size(node: ast.expr) -> bool:
    """Return whether an expression reads sizes of a tensor: ``x.shape[:2]``, ``x.size()``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return last_name(getattr(node, "func", node)) in ("shape", "size")


def _only(spots: Iterable[Spot]) -> Spot | None:
    """Return the only spot, ``None`` for several."""
    found = {(it.file, it.line, getattr(it.node, "col_offset", 0)): it for it in spots}
    return next(iter(found.values())) if len(found) == 1 else None


def _range(node: ast.AST) -> tuple[int, int, int, int]:
    names = ("lineno", "col_offset", "end_lineno", "end_col_offset")
    first, column, last, end = (getattr(node, name, 0) or 0 for name in names)
    return first, column, last, end
