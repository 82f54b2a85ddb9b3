"""What is said where no rule knows a cause: how many places the numbers need."""

from __future__ import annotations

import ast

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.hints._base import LAST
from cudalens.diagnosis.hints._reading import Ids, ids_rule, numel
from cudalens.diagnosis.hints._roles import Role
from cudalens.diagnosis.hints.labels import head_of
from cudalens.diagnosis.user_code import Fix, list_of, parsed, spliced, swapped

MAX_CLASSES = 1 << 20
_LANGUAGE = 1000
"""Outputs from which on labels may be tokens; ids beyond it may be keys."""
_IN_DIMENSION = "index {high} needs at least {need} elements in dimension {dim}, which has {size}"
_NEEDS: dict[Role, str] = {
    "label": "labels up to {high}{bad} need at least {need} outputs (this batch), the head has "
    "{size}",
    "one_hot": "values up to {high} need at least {need} columns (this batch), the encoding has "
    "{size}",
    "token": "ids up to {high} need at least {need} rows (this batch), the table has {size}",
    "action": "actions up to {high} need at least {need} outputs, the network has {size}",
    "index": _IN_DIMENSION,
    "edge": _IN_DIMENSION,
}
_ALONG = ("aten::gather", "aten::index_select", "aten::take_along_dim")
"""Ops that are told along which dimension the numbers count."""
_VOID = 255
"""No class: pixels to leave out."""
_STEPWISE = ("aten::index_copy", "aten::index_copy_", "aten::index_put", "aten::index_put_")


@ids_rule(*_NEEDS, priority=LAST)
def too_few_places(evidence: Evidence, ids: Ids) -> Hint | None:
    """The numbers need more places than there are."""
    dim, is_class = ids.violation.dim, ids.role in ("label", "one_hot")
    if not ids.is_above or (is_class and ids.high >= MAX_CLASSES):
        return None
    if (ids.role == "label" and ids.size < 2) or (is_class and ids.high == _VOID > ids.size):
        return None
    if ids.role in ("index", "edge") and dim is None:
        return None
    known = evidence.dataset_labels if ids.role == "label" else None
    if known is not None and known.high is not None:
        text = f"{known.count} labels of {known.name} go up to {known.high}: they need "
        text += f"{known.high + 1} outputs, the head has {ids.size}"
        return Hint(text=text + _settings(evidence, known.high + 1))
    text = _NEEDS[ids.role].format(
        high=ids.high,
        need=ids.high + 1,
        size=ids.size,
        dim=dim,
        bad=f" ({list_of(ids.bad)})" if len(ids.bad) > 1 else "",
    )
    named = "" if known is None else f"; {known.name} names {known.classes} classes"
    return Hint(text=text + named + _besides(evidence, ids) + _settings(evidence, ids.high + 1))


def _besides(evidence: Evidence, ids: Ids) -> str:
    """Say what else the numbers may be."""
    seen = ids.distinct or ()
    is_padded = evidence.scalar("padding_idx") == "0"
    may_count = ids.may_count_from_one and (ids.low == 1 or ids.role != "token")
    if may_count and numel(ids.fact) > 1 and not is_padded:
        return f"; none is 0: if they count from 1, subtract 1{_padding(evidence, ids)}"
    if ids.role == "label" and len(seen) == ids.size and len(ids.bad) > 1:
        return f"; if no others occur than these {ids.size}, number them 0 … {ids.size - 1}"
    if (
        ids.role == "token"
        and ids.high >= max(2 * ids.size, _LANGUAGE)
        and 0 < len(seen) <= ids.size
    ):
        return "; if they are keys of a larger set, give each its own number below that"
    if evidence.op.name in _STEPWISE and numel(ids.fact) == 1:
        return "; if it is a cache that is filled step by step, it is full"
    return _padding(evidence, ids) or _in_other_dimension(evidence, ids)


def _padding(evidence: Evidence, ids: Ids) -> str:
    ignored = evidence.scalar("ignore_index")
    if ids.role != "label" or not ids.high == ids.size >= _LANGUAGE or ignored is None:
        return ""
    return f"; if it is padding, use {ignored}, which the loss ignores"


def _in_other_dimension(evidence: Evidence, ids: Ids) -> str:
    target, own = evidence.tensor(ids.violation.related or "self"), ids.violation.dim
    if target is None or own is None or evidence.op.name not in _ALONG:
        return ""
    if len(ids.fact.shape) > 1 and ids.fact.shape[own] == 1:
        return ""  # one number a row: there are as many rows by chance
    dims = [
        dim
        for dim, size in enumerate(target.shape)
        if dim != own % len(target.shape) and size == ids.high + 1
    ]
    if len(dims) != 1:
        return ""
    return f"; dimension {dims[0]}, which has {target.shape[dims[0]]}, has room for them"


@ids_rule("index", "action", priority=45)
def swapped_indices(evidence: Evidence, ids: Ids) -> Hint | None:
    """Row and column indices are swapped."""
    tree, call = parsed(evidence.call_text or ""), evidence.call_text or ""
    if evidence.op.name != "aten::index" or not isinstance(tree, ast.Subscript):
        return None
    if not isinstance(tree.slice, ast.Tuple) or len(tree.slice.elts) != 2:
        return None
    one, two = map(ast.unparse, tree.slice.elts)
    first, second, target = (evidence.tensor(name) for name in ("indices[0]", "indices[1]", "self"))
    if first is None or second is None or target is None or len(target.shape) < 2:
        return None
    for fact, size in ((first, target.shape[1]), (second, target.shape[0])):
        if not isinstance(fact.summary.max, int) or fact.summary.max >= size:
            return None
    text = spliced(call, tree.slice, f"{two}, {one}")
    return Hint(
        text=f"{one} fits dimension 1 and {two} dimension 0: swap them",
        fix=Fix(text, swapped(one, two)) if text else None,
    )


def _settings(evidence: Evidence, classes: int) -> str:
    """Name the setting that a model of transformers takes its number of outputs from."""
    # Only these heads are as wide as num_labels says.
    return f": num_labels={classes}" if head_of(evidence) == "classes" else ""
