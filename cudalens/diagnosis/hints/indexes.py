"""Causes of indices beyond a dimension: damaged numbers, other counting, lengths, edges."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import (
    EXACT,
    GARBAGE,
    LOST_NUMBERS,
    Ids,
    cast_source,
    ids_rule,
    numel,
    runs_from_one,
    shifted_source,
    shifting_step,
    within,
)
from cudalens.diagnosis.hints._roles import bad_values, fault, role_of
from cudalens.diagnosis.user_code import in_library, last_name, list_of, parsed, rewritten

_WORD = 1 << 32
_CTC = ("aten::_ctc_loss", "aten::_cudnn_ctc_loss")
_QUANTILES = ("quantile", "nanquantile")
_FLAT = re.compile(r"\.(view|reshape)\(-1\)|\.flatten\(\)|\.ravel\(\)|torch\.flatten\(\w+\)")


# --- damaged numbers -----------------------------------------------------------------------------


@rule(priority=5)
def garbage_ids(evidence: Evidence) -> Hint | None:
    """The numbers are the content of memory that holds something else."""
    bad = bad_values(evidence)
    worst = max(bad, key=abs, default=0)
    if role_of(evidence) is None or abs(worst) < GARBAGE or bad & LOST_NUMBERS:
        return None
    halves = (worst % _WORD, worst // _WORD)
    text = f"{worst} (about 10^{len(str(abs(worst))) - 1}) cannot be an id: the tensor was read "
    text += "before it was written, or after its memory was reused (torch.empty, "
    text += "non_blocking=True, a copy between GPUs)"
    if 0 <= halves[1] < _WORD >> 8 and halves[0] < _WORD >> 8:
        text += f"; as two int32 numbers it is {halves[0]} and {halves[1]}"
    return Hint(
        text=text,
        fix='ids.to("cuda")  # without non_blocking; or try with CUDA_VISIBLE_DEVICES=0',
    )


@rule(priority=5)
def nan_cast_to_integer(evidence: Evidence) -> Hint | None:
    """NaN or an infinity was cast to an integer type."""
    lost = bad_values(evidence) & LOST_NUMBERS
    if role_of(evidence) is None or not lost:
        return None
    source = cast_source(evidence)
    name = f"{source.expression} holds" if source and source.summary.nan else "the numbers held"
    watched = None if evidence.nan_watch else "%%cudacheck --nan"
    return Hint(
        text=f"{min(lost)} is what NaN or infinity becomes as an integer: {name} NaN before the "
        "cast",
        fix=f"assert {source.expression}.isfinite().all()" if source else watched,
    )


@rule(priority=8)
def float_ids(evidence: Evidence) -> Hint | None:
    """Ids went through a floating-point type that cannot hold them, or are no ids at all."""
    source = cast_source(evidence)
    if source is None or role_of(evidence) is None or bad_values(evidence) & LOST_NUMBERS:
        return None
    low, high = source.summary.min, source.summary.max
    limit = EXACT.get(source.dtype)
    is_whole = all(isinstance(end, (int, float)) and end == int(end) for end in (low, high))
    if is_whole and limit:
        text = f"{source.expression} is {source.dtype}, which holds whole numbers only up to "
        text += f"{limit}: larger ids were rounded before the cast"
        return Hint(text=text, fix="ids = ids.long()  # before the model or the batch becomes half")
    return Hint(
        text=f"{source.expression} is {source.dtype} and runs from {low} to {high}: cast to "
        "integers, these are not ids",
    )


@rule(priority=8)
def shift_on_the_line(evidence: Evidence) -> Hint | None:
    """The line itself adds to ids that lie within the bound."""
    source = shifted_source(evidence)
    found = fault(evidence)
    if source is None or found is None or role_of(evidence) in (None, "position", "box"):
        return None
    return Hint(
        text=f"{source.expression} runs from {source.summary.min} to {source.summary.max} and "
        f"fits; {found[1].expression} does not",
        fix=rewritten(evidence, found[1], source.expression or ""),
    )


@rule(priority=35)
def shift_before(evidence: Evidence) -> Hint | None:
    """An earlier line took ids out of the bound by adding to them."""
    step = shifting_step(evidence)
    if step is None or role_of(evidence) in (None, "position", "box") or shifted_source(evidence):
        return None
    line = next((item.source.line for item in reversed(evidence.provenance) if item.source), None)
    where = f"line {line}: " if line is not None else ""
    return Hint(text=f"the values left the allowed range in {where}{step}")


# --- counting -------------------------------------------------------------------------------------


@rule(priority=4)
def quantile_levels(evidence: Evidence) -> Hint | None:
    """A level of a quantile lies outside 0 … 1; CUDA reads the sorted values at its rank."""
    found = fault(evidence)
    if found is None or (evidence.op.api or "").rpartition(".")[2] not in _QUANTILES:
        return None
    last = (found[0].size or 0) - 1
    ranks = sorted(bad_values(evidence))
    if last < 1 or not ranks:
        return None
    wrong = "below 0" if ranks[0] < 0 else "above 1"
    text = f"a level q {wrong}: q runs from 0 to 1, the rank q * {last} from 0 to {last}"
    return Hint(text=text, fix="q / 100  # of percent" if ranks[-1] > 2 * last else None)


@ids_rule("index", priority=14)
def flat_position(evidence: Evidence, ids: Ids) -> Hint | None:
    """The position in a flattened tensor was computed one row or column too far."""
    if not ids.is_above or not _is_flat(evidence):
        return None
    end = f"a flattened tensor of {ids.size} elements ends at {ids.size - 1}"
    made = _row_and_column(evidence)
    if made is None:
        if not ids.only_bad(ids.size):
            return None
        fix = rewritten(evidence, ids.named, "{x} - 1") if ids.low and ids.low > 0 else None
        return Hint(text=f"{end}: {ids.size} is one too far", fix=fix)
    text = f"{end}, {made.text} reaches {ids.high}"
    if made.column is not None:
        top = made.column.summary.max
        text += f"; {made.column.expression} goes up to {top} and must stay below {made.width}"
    return Hint(text=text, fix=f"x[{made.row}, {made.rest}]  # index before flattening")


def _is_flat(evidence: Evidence) -> bool:
    if evidence.op.name in ("aten::take", "aten::put", "aten::put_"):
        return True
    target = evidence.tensor("self") or evidence.tensor("input")
    called_flat = target is not None and "flat" in (target.expression or "").lower()
    is_line = target is not None and len(target.shape) == 1
    return (
        called_flat
        or bool(_FLAT.search(evidence.call_text or ""))
        or (is_line and _row_and_column(evidence) is not None)
    )


@dataclass(frozen=True, kw_only=True)
class _Flat:
    """A sum such as ``rows * width + cols`` in the user's call."""

    text: str
    row: str
    width: str
    rest: str
    column: TensorFact | None


def _row_and_column(evidence: Evidence) -> _Flat | None:
    tree = parsed(evidence.call_text or "")
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
            continue
        for product, rest in ((node.left, node.right), (node.right, node.left)):
            if isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult):
                name = ast.unparse(rest)
                return _Flat(
                    text=ast.unparse(node),
                    row=ast.unparse(product.left),
                    width=ast.unparse(product.right),
                    rest=name,
                    column=next((t for t in evidence.tensors if t.expression == name), None),
                )
    return None


@ids_rule("token", "index", priority=24)
def one_based_ids(evidence: Evidence, ids: Ids) -> Hint | None:
    """Ids run from 1 to the number of rows."""
    if not ids.counts_from_one or _is_flat(evidence):
        return None
    if in_library(evidence, "transformers") or is_length(ids.named):
        return None
    if evidence.scalar("padding_idx") == "0" or _counts_back(evidence) or _meets_blank(evidence):
        return None
    return Hint(
        text=f"the ids run from 1 to {ids.high}: they look 1-based",
        fix=rewritten(evidence, ids.named, "{x} - 1") or "ids = ids - 1",
    )


def _counts_back(evidence: Evidence) -> bool:
    """Return whether one was taken away already, as in ``lengths - 1``."""
    found = fault(evidence)
    node = parsed(found[1].expression or "") if found else None
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)


def _meets_blank(evidence: Evidence) -> bool:
    return evidence.op.name in _CTC and evidence.scalar("blank") == "0"


@ids_rule("index", "label", priority=24)
def no_output_for_blank(evidence: Evidence, ids: Ids) -> Hint | None:
    """CTC needs an output for the blank beside one for each label."""
    if not _meets_blank(evidence) or ids.high != ids.size or not ids.low:
        return None
    return Hint(
        text=f"labels up to {ids.high} and the blank, which is class 0, need {ids.high + 1} "
        f"outputs; log_probs has {ids.size}",
        fix=f"nn.Linear(in_features, {ids.high + 1})  # the last layer",
    )


@rule(priority=20)
def more_places_than_values(evidence: Evidence) -> Hint | None:
    """More elements are selected to be filled than there are values, as with image tokens."""
    found = fault(evidence)
    if found is None or evidence.op.name not in ("aten::masked_scatter", "aten::masked_scatter_"):
        return None
    source = evidence.tensor("source")
    width = source.shape[-1] if source and source.shape else None
    is_table = source is not None and len(source.shape) > 1
    rows = f" ({(found[0].size or 0) // width} rows of {width})" if is_table and width else ""
    library = "transformers" in evidence.libraries
    tokens = ": more image tokens in the text than image features" if library else ""
    return Hint(
        text=f"the source has {found[0].size} elements{rows}, the mask selects more{tokens}"
    )


# --- one value picked in each row -----------------------------------------------------------------


_LENGTH = re.compile(r"(^|[^a-z])(len|lens|length|lengths)([^a-z]|$)")
_GATHERS = frozenset({"aten::gather", "aten::take_along_dim"})
_MARKS = frozenset({-1, -100})


def is_length(fact: TensorFact | None) -> bool:
    """Return whether the user calls a tensor a length, as in ``lengths`` or
    ``batch["seq_len"]``.
    """
    name = fact.expression if fact is not None else None
    return bool(name and name.isprintable() and _LENGTH.search(name.lower()))


@ids_rule("index", priority=13)
def length_as_position(evidence: Evidence, ids: Ids) -> Hint | None:
    """The length of a sequence is used as the position of its last element."""
    if not ids.is_above or not ids.only_bad(ids.size) or not _picks(evidence, ids):
        return None
    is_empty = ids.low is None or ids.low < 1
    empty = "; a length of 0 has no last element" if is_empty else ""
    return Hint(
        text=f"a sequence of length {ids.size} ends at position {ids.size - 1}{empty}",
        fix=None if is_empty else rewritten(evidence, ids.named, "{x} - 1"),
    )


def _picks(evidence: Evidence, ids: Ids) -> bool:
    is_read = evidence.op.name in ("aten::index", "aten::index_select", *_GATHERS)
    return is_read and is_length(ids.named)


@ids_rule("index", "action", priority=20)
def mark_in_gather(evidence: Evidence, ids: Ids) -> Hint | None:
    """Labels with -1 or -100, which a loss may leave out, are indices of a gather."""
    if evidence.op.name not in _GATHERS or not ids.bad <= _MARKS:
        return None
    return Hint(
        text=f"gather takes no negative index ({list_of(ids.bad)}): if it marks values to leave "
        "out, gather at a valid index there and set the result to 0",
        fix=_masked(evidence, ids),
    )


def _masked(evidence: Evidence, ids: Ids) -> str | None:
    """Return the gather of harmless indices, with zeros where the mark was."""
    index = ids.fact.expression
    call = rewritten(evidence, ids.fact, "{x}.clamp(min=0)")
    tree = parsed(evidence.call_text or "")
    if call is None or not isinstance(tree, ast.Call) or last_name(tree.func) != "gather":
        return None
    fix = f"{call} * ({index} >= 0)"
    return fix if parsed(fix) is not None else None


# --- nodes of graphs, actions of reinforcement learning -------------------------------------------


@ids_rule("edge", priority=12)
def edges_with_original_ids(evidence: Evidence, ids: Ids) -> Hint | None:
    """Edges name nodes by the ids of the data set, not by their rows."""
    if not ids.is_above:
        return None
    both = _both_ends(evidence, ids)
    if _counts_from_one(ids, both):
        # One end alone cannot be shifted: the other one would keep its numbers.
        return Hint(
            text=f"the edges name nodes 1 … {ids.high}: they look 1-based; subtract 1 from "
            "both ends",
            fix=rewritten(evidence, both, "{x} - 1"),
        )
    nodes = both or ids.named
    seen = nodes.summary.unique if nodes is not None else None
    if seen is not None and len(seen) > ids.size:
        return Hint(
            text=f"the edges name {len(seen)} different nodes up to {ids.high}, but there are only "
            f"{ids.size}: nodes were left out"
        )
    base = ", count from 1" if ids.may_count_from_one else ""
    # New numbers in the order of the ids are those of the rows only when no row is without edge.
    is_complete = both is not None and seen is not None and len(seen) == ids.size
    return Hint(
        text=f"the edges name node {ids.high}, but there are {ids.size} nodes: they still hold the "
        f"original ids{base}, or nodes were left out; renumber the nodes 0 … N-1 in the order of "
        "the rows",
        fix=rewritten(evidence, both, "{x}.unique(return_inverse=True)[1]")
        if is_complete
        else None,
    )


def _both_ends(evidence: Evidence, ids: Ids) -> TensorFact | None:
    """Return the tensor on the line that holds both ends of the edges."""
    candidates = (ids.named, *within(evidence, ids.fact))
    return next((item for item in candidates if item is not None and len(item.shape) > 1), None)


def _counts_from_one(ids: Ids, both: TensorFact | None) -> bool:
    if not ids.may_count_from_one:
        return False
    if both is None:
        return ids.counts_from_one
    return runs_from_one(both.summary.unique, ids.size, numel(both))


@ids_rule("action", priority=12)
def actions_beyond_outputs(evidence: Evidence, ids: Ids) -> Hint | None:
    """Stored actions have numbers for which the network has no output."""
    if not ids.is_above or evidence.op.name not in ("aten::gather", "aten::index"):
        return None
    if ids.counts_from_one:
        return Hint(
            text=f"the actions run from {ids.low} to {ids.high}: they look 1-based",
            fix=rewritten(evidence, ids.named, "{x} - 1"),
        )
    base = "; if the actions count from 1, subtract 1" if ids.may_count_from_one else ""
    return Hint(
        text=f"action {ids.high} was stored, the network has {ids.size} outputs (0 … "
        f"{ids.size - 1}): it was built for fewer actions than the environment has{base}",
        fix="nn.Linear(in_features, env.action_space.n)  # the last layer",
    )
