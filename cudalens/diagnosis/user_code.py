"""Read the user's running call, and write fixes as that call with one expression replaced.

Expressions are found by their place in the syntax tree, never by counting texts, and a fix that
cannot be read back as Python is not given.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterable

from cudalens.core._python import parse_expression
from cudalens.core.report import Evidence
from cudalens.core.report_types import TensorFact

_ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant, ast.List)
_TARGETS = (ast.Name, ast.Attribute, ast.Subscript)


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


def rewritten(evidence: Evidence, fact: TensorFact | None, template: str) -> str | None:
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
    if changed is None and isinstance(node, _TARGETS):
        changed = f"{name} = {value}"
    return changed


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
    found, parent = places[0]
    if not _stands_alone(found, parent) and not isinstance(parsed(value), _ATOMS):
        value = f"({value})"
    return spliced(call, found, value)


def _stands_alone(node: ast.expr, parent: ast.AST | None) -> bool:
    """Return whether any expression can take the node's place without parentheses."""
    if isinstance(parent, ast.Call):
        return parent.func is not node
    if isinstance(parent, ast.Subscript):
        return parent.slice is node
    return parent is None or isinstance(parent, ast.keyword | ast.Tuple | ast.List)


_Place = tuple[ast.expr, ast.AST | None]


def _places(tree: ast.AST, wanted: ast.expr) -> list[_Place]:
    found: list[_Place] = []
    key = ast.dump(wanted)
    waiting: list[tuple[ast.AST, ast.AST | None]] = [(tree, None)]
    while waiting:
        node, parent = waiting.pop()
        if isinstance(node, ast.expr) and ast.dump(node) == key:
            found.append((node, parent))
            continue
        waiting.extend((child, node) for child in ast.iter_child_nodes(node))
    return found


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
) -> str | None:
    """Return the call with ``keyword=value`` added or replaced.

    An argument that stands at ``position`` without its keyword is replaced there.

    ``None`` when the line does not spell a call of one of ``functions``, by its last name.
    """
    call, node = _call_in_text(evidence, set(functions))
    if node is None:
        return None
    if position is not None and len(node.args) > position:
        return spliced(call, node.args[position], value)
    for item in node.keywords:
        if item.arg == keyword:
            return spliced(call, item.value, value)
    if any(item.arg is None for item in node.keywords):
        return None
    written = ast.get_source_segment(f"({call}\n)", node)
    if written is None:
        return None
    inside = written[:-1].rstrip().rstrip(",")
    comma = "" if inside.endswith("(") else ", "
    return spliced(call, node, f"{inside}{comma}{keyword}={value})")


def _call_in_text(evidence: Evidence, names: Container[str | None]) -> tuple[str, ast.Call | None]:
    """Return the running call's text, and in it the first call of a function of these names."""
    call = evidence.call_text or ""
    tree = parsed(call) if call and "#" not in call else None
    nodes = (item for item in ast.walk(tree) if isinstance(item, ast.Call)) if tree else ()
    return call, next((item for item in nodes if last_name(item.func) in names), None)


def last_name(node: ast.expr) -> str | None:
    """Return the last part of a dotted name: ``cross_entropy`` of ``F.cross_entropy``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def called_name(evidence: Evidence) -> str | None:
    """Return the dotted name that the user's line calls, such as ``self.bert`` or ``F.one_hot``."""
    tree = parsed(evidence.call_text or "")
    if not isinstance(tree, ast.Call):
        return None
    text = ast.unparse(tree.func)
    return text if all(part.isidentifier() for part in text.split(".")) else None


def renamed(evidence: Evidence, old: str, new: str) -> str | None:
    """Return the call with its function ``old`` replaced by ``new``, the arguments as they are."""
    call, node = _call_in_text(evidence, {old})
    if node is None:
        return None
    return spliced(call, node.func, ast.unparse(node.func).removesuffix(old) + new)


def renamed_keyword(evidence: Evidence, old: str, new: str) -> str | None:
    """Return the call with its keyword ``old`` replaced by ``new``, the value as it is."""
    tree = parsed(evidence.call_text or "")
    found = [item for item in getattr(tree, "keywords", ()) if item.arg in (old, new)]
    if not isinstance(tree, ast.Call) or [item.arg for item in found] != [old]:
        return None
    found[0].arg = new
    return ast.unparse(tree)


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
