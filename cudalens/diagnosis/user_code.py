"""Read the user's running call, and write fixes as that call with one expression replaced.

Expressions are found by their place in the syntax tree, never by counting texts, and a fix that
cannot be read back as Python is not given.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

from cudalens.core._python import parse_expression
from cudalens.core.report import Evidence
from cudalens.core.report_types import LineRef, SourceSpan, TensorFact

Rearrange = Callable[[Any, list[Any], dict[str, Any]], tuple[Any, list[Any], dict[str, Any]]]
"""Function and arguments of a call -> those of another call."""
RECEIVER = ""
"""In place of an operand's text: the object whose method is called, whatever the line spells."""


class Change(NamedTuple):
    """Replacement of an operand."""

    text: str
    """The operand, as the line spells it."""
    template: str
    """``{x}`` is the operand: ``{x} - 1``."""
    span: tuple[int, int, int] | None = None
    """Of an operand that the line spells more than once: which of them; ``None`` for all."""


class Fix(str):
    """A fix as the user would write it, and the change of the API call that it stands for.

    Args:
        text: the user's call, changed, or an assignment before it.
        changes: of operands.
        rearrange: what else becomes of the call.
        device: where the parameters of the called module go.
    """

    changes: tuple[Change, ...]
    rearrange: Rearrange | None
    device: str | None

    def __new__(
        cls,
        text: str,
        changes: Iterable[Change] = (),
        rearrange: Rearrange | None = None,
        device: str | None = None,
    ) -> Fix:
        """Make the text, with the change beside it."""
        made = super().__new__(cls, text)
        made.changes = tuple(changes)
        made.rearrange = rearrange
        made.device = device
        return made

    def of_name(self) -> tuple[str, str] | None:
        """Return the one name or attribute that is changed, and to what; else ``None``."""
        if len(self.changes) != 1 or self.rearrange is not None or self.device is not None:
            return None
        name, template, _ = self.changes[0]
        is_name = all(part.isidentifier() for part in name.split("."))
        return (name, template.replace("{x}", name)) if is_name and "{x}" in template else None

    def behind(self, first: Fix, expression: str) -> Fix:
        """Return this fix of ``expression``, which another one has made, as one of its operand."""
        name, template, span = first.changes[0]
        inner = template if isinstance(parsed(template.format(x="x")), _ATOMS) else f"({template})"
        changes = (
            Change(name, item.template.replace("{x}", inner), span)
            if item.text == expression
            else item
            for item in self.changes
        )
        return Fix(self, changes, self.rearrange, self.device)


def swapped(one: str, two: str) -> tuple[Change, Change]:
    """Return the changes that put two operands in each other's place."""
    return Change(one, two), Change(two, one)


_ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant, ast.List)
_TARGETS = (ast.Name, ast.Attribute, ast.Subscript)
_LONGEST_NAME = 40
"""Characters; a longer expression is no name to begin a sentence with."""


def parsed(expression: str) -> ast.expr | None:
    """Return the syntax tree of an expression, ``None`` when the text is none."""
    try:
        return parse_expression(f"({expression}\n)").body
    except (SyntaxError, ValueError):
        return None


def in_library(evidence: Evidence, name: str) -> bool:
    """Return whether the op was reached through a library, below the user's line."""
    last = max((at for at, frame in enumerate(evidence.frames) if frame.is_user), default=-1)
    below = [frame.file.replace("\\", "/") for frame in evidence.frames[last + 1 :]]
    return any(f"/{name}/" in file for file in below)


def rewritten(evidence: Evidence, fact: TensorFact | None, template: str) -> Fix | None:
    """Return the call with ``fact`` replaced by ``template``, where ``{x}`` stands for itself.

    Where the call does not spell the expression, as in ``model(**batch)``, the fix is an
    assignment before it.
    """
    node = parsed(fact.expression) if fact and fact.expression else None
    if fact is None or fact.expression is None or node is None:
        return None
    name = fact.expression
    inner = name if isinstance(node, _ATOMS) else f"({name})"
    value = template.replace("{x}", inner)
    changed = _in_call(evidence, fact, node, value)
    is_before = changed is None
    if is_before and isinstance(node, _TARGETS):
        changed = f"{name} = {value}"
    if changed is None:
        return None
    return Fix(changed, [Change(name, template, None if is_before else fact.span)])


def _in_call(evidence: Evidence, fact: TensorFact, node: ast.expr, value: str) -> str | None:
    call = evidence.call_text
    tree = parsed(call) if call and "#" not in call else None
    if call is None or tree is None:
        return None
    places = _places(tree, node)
    if len(places) > 1:
        direct = [item for item in places if item[1] is tree or isinstance(item[1], ast.keyword)]
        places = _by_column(evidence, fact, places, call) or direct
    if len(places) != 1:
        return None
    place, parent = places[0]
    if not _stands_alone(place, parent) and not isinstance(parsed(value), _ATOMS):
        value = f"({value})"
    return spliced(call, place, value)


def _stands_alone(node: ast.expr, parent: ast.AST | None) -> bool:
    """Return whether any expression can take the node's place without parentheses."""
    if isinstance(parent, ast.Call):
        return parent.func is not node
    if isinstance(parent, ast.Subscript):
        return parent.slice is node
    return parent is None or isinstance(parent, ast.keyword | ast.Tuple | ast.List)


_Place = tuple[ast.expr, ast.AST | None]


def _places(tree: ast.AST, wanted: ast.expr) -> list[_Place]:
    places: list[_Place] = []
    key = ast.dump(wanted)
    waiting: list[tuple[ast.AST, ast.AST | None]] = [(tree, None)]
    while waiting:
        node, parent = waiting.pop()
        if isinstance(node, ast.expr) and ast.dump(node) == key:
            places.append((node, parent))
            continue
        waiting.extend((child, node) for child in ast.iter_child_nodes(node))
    return places


def _by_column(
    evidence: Evidence, fact: TensorFact, places: list[_Place], call: str
) -> list[_Place]:
    source = evidence.source
    if source is None or source.column is None or fact.span is None or "\n" in call:
        return []
    if fact.span[0] != source.line:
        return []
    # One parenthesis is put before the text when it is read.
    column = fact.span[1] - source.column + 1
    return [item for item in places if _offset(f"({call}", item[0].col_offset) == column]


def spliced(call: str, node: ast.expr, value: str) -> str | None:
    """Put ``value`` in the place of ``node``, which was read from ``call`` by ``parsed``."""
    lines = f"({call}\n)".split("\n")
    start_line, end_line = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    start = _offset(lines[start_line], node.col_offset)
    end = _offset(lines[end_line], node.end_col_offset or 0)
    head = "\n".join([*lines[:start_line], lines[start_line][:start]])
    tail = "\n".join([lines[end_line][end:], *lines[end_line + 1 :]])
    text = " ".join(line.strip() for line in f"{head}{value}{tail}".strip().split("\n"))
    text = text.removeprefix("(").removesuffix(")").strip()
    return text if parsed(text) is not None else None


def _offset(line: str, bytes_before: int) -> int:
    # The syntax tree counts bytes of UTF-8, texts count characters.
    return len(line.encode()[:bytes_before].decode(errors="ignore"))


def with_keyword(
    evidence: Evidence,
    functions: Iterable[str],
    keyword: str,
    value: str,
    position: int | None = None,
) -> Fix | None:
    """Return the call with ``keyword=value`` added or replaced.

    An argument that stands at ``position`` without its keyword is replaced there.

    ``None`` when the line does not spell a call of one of ``functions``, by its last name.
    """
    call, tree, node = _call_in_text(evidence, set(functions))
    if node is None:
        return None
    text: str | None
    if position is not None and len(node.args) > position:
        text = spliced(call, node.args[position], value)
    elif values := [item.value for item in node.keywords if item.arg == keyword]:
        text = spliced(call, values[0], value)
    elif any(item.arg is None for item in node.keywords):
        return None
    else:
        written = ast.get_source_segment(f"({call}\n)", node)
        inside = "" if written is None else written[:-1].rstrip().rstrip(",")
        comma = "" if inside.endswith("(") else ", "
        made = f"{inside}{comma}{keyword}={value})"
        text = inside and spliced(call, node, made)
        if text and isinstance(tree, ast.Call) and node not in (tree, tree.func):
            return Fix(text, [Change(ast.unparse(node), made)])  # of an operand's own call
    return Fix(text, rearrange=_setting(keyword, value, position)) if text else None


def _setting(keyword: str, text: str, position: int | None) -> Rearrange:
    def put(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        value = ast.literal_eval(text)
        if position is not None and len(args) > position:
            return function, [*args[:position], value, *args[position + 1 :]], kwargs
        return function, args, {**kwargs, keyword: value}

    return put


def _call_in_text(
    evidence: Evidence, names: Container[str | None]
) -> tuple[str, ast.expr | None, ast.Call | None]:
    """Return the running call as text and tree, and in it the first call of one of these names."""
    call = evidence.call_text or ""
    tree = parsed(call) if call and "#" not in call else None
    nodes = (item for item in ast.walk(tree) if isinstance(item, ast.Call)) if tree else ()
    return call, tree, next((item for item in nodes if last_name(item.func) in names), None)


def last_name(node: ast.expr) -> str | None:
    """Return the last part of a dotted name: ``cross_entropy`` of ``F.cross_entropy``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def is_name(expression: str | None) -> bool:
    """Return whether an expression is a name, an attribute or an entry of readable length."""
    node = parsed(expression or "")
    return isinstance(node, _TARGETS) and len(expression or "") <= _LONGEST_NAME


def called_name(evidence: Evidence) -> str | None:
    """Return the dotted name that the user's line calls, such as ``self.bert`` or ``F.one_hot``."""
    tree = parsed(evidence.call_text or "")
    if not isinstance(tree, ast.Call):
        return None
    text = ast.unparse(tree.func)
    return text if all(part.isidentifier() for part in text.split(".")) else None


def renamed(evidence: Evidence, old: str, new: str, function: str | None = None) -> Fix | None:
    """Return the call with its function ``old`` replaced by ``new``, the arguments as they are.

    Args:
        function: what torch calls the new one, where it has another name than ``new``.
    """
    call, _, node = _call_in_text(evidence, {old})
    text = node and spliced(call, node.func, ast.unparse(node.func).removesuffix(old) + new)
    if not text:
        return None
    way, dot, _ = new.rpartition(".")
    if dot:  # something is done to the receiver first
        return Fix(text, [Change(RECEIVER, f"{{x}}.{way}")])
    return Fix(text, rearrange=function_named(function or new))


def function_named(name: str) -> Rearrange:
    """Return the change of a call to another function of the same kind."""

    def put(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return name, args, kwargs

    return put


def renamed_keyword(evidence: Evidence, old: str, new: str, value: str | None = None) -> Fix | None:
    """Return the call with its keyword ``old`` replaced by ``new``, the value as it is.

    Args:
        value: the value as the line spells it, where the last argument may be it, without keyword.
    """
    tree = parsed(evidence.call_text or "")
    keywords = [item for item in getattr(tree, "keywords", ()) if item.arg in (old, new)]
    if not isinstance(tree, ast.Call) or len(keywords) > 1:
        return None
    is_bare = not keywords and bool(tree.args) and ast.unparse(tree.args[-1]) == value
    if is_bare:
        tree.keywords.insert(0, ast.keyword(new, tree.args.pop()))
    elif [item.arg for item in keywords] == [old]:
        keywords[0].arg = new
    else:
        return None

    def put(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        rest = {key: item for key, item in kwargs.items() if key != old}
        leading, value = (args[:-1], args[-1]) if is_bare else (args, kwargs.get(old))
        return function, leading, {**rest, new: value}

    return Fix(ast.unparse(tree), rearrange=put)


def list_of(values: Iterable[int], limit: int = 4) -> str:
    """Return a few numbers for reading: ``10, 11, 12 and 3 more``."""
    ordered = sorted(values)
    shown = ", ".join(str(value) for value in ordered[:limit])
    rest = len(ordered) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


# --- parts of the running call -------------------------------------------------------------------


def api_function(evidence: Evidence) -> str:
    """Return the last part of the name of the called function: ``conv1d``, ``__matmul__``."""
    return (evidence.op.api or "").rpartition(".")[2]


def receiver(evidence: Evidence) -> str | None:
    """Return the expression on which the line calls the method that raised: ``(a + b)``."""
    call = _direct_call(evidence)
    if call is None or not (evidence.op.api or "").startswith("torch.Tensor."):
        return None
    function = call.func
    if not isinstance(function, ast.Attribute):
        return None
    text = ast.unparse(function.value)
    return text if isinstance(function.value, _ATOMS) else f"({text})"


def list_items(evidence: Evidence) -> tuple[str, ...]:
    """Return the expressions of the list of tensors that the line passes first, if it spells it."""
    call = _direct_call(evidence)
    if call is None:
        return ()
    named = (item.value for item in call.keywords if item.arg == "tensors")
    node = next(named, call.args[0] if call.args else None)
    if not isinstance(node, ast.List | ast.Tuple):
        return ()
    if any(isinstance(item, ast.Starred) for item in node.elts):
        return ()
    return tuple(map(ast.unparse, node.elts))


def _direct_call(evidence: Evidence) -> ast.Call | None:
    """Return the line's call when it is the one that raised, with nothing of Python below it."""
    if not evidence.frames or not evidence.frames[-1].is_user:
        return None
    call = parsed(evidence.call_text or "")
    if not isinstance(call, ast.Call) or last_name(call.func) != api_function(evidence):
        return None
    return call


def place(at: SourceSpan | LineRef, evidence: Evidence) -> str:
    """Return ``line 7``, with the cell or file where that is not the failing line's."""
    here = evidence.source
    is_here = here is None or (at.cell, at.file) == (here.cell, here.file)
    return f"line {at.line}" if is_here else LineRef(line=at.line, cell=at.cell, file=at.file).where
