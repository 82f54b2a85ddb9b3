"""Causes of indices beyond a dimension: damaged numbers, flattened tensors, other counting."""

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
    cast_source,
    ids_of,
    shifted_source,
    shifting_step,
)
from cudalens.diagnosis.hints._roles import bad_values, fault, role_of
from cudalens.diagnosis.hints.picks import is_length
from cudalens.diagnosis.user_code import in_library, parsed, rewritten

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
    text = f"{worst} (about 10^{len(str(abs(worst))) - 1}) was never an id: memory was read before "
    text += "it was written, or after (a copy between GPUs, non_blocking=True, torch.empty)"
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
        text += f"{limit}: ids beyond were rounded before the cast"
        return Hint(text=text, fix="ids = ids.long()  # before the model or the batch becomes half")
    return Hint(
        text=f"{source.expression} is {source.dtype} and runs from {low} to {high}: cast to "
        "integers, these are no ids",
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
    return Hint(text=f"the values left the bound in {where}{step}")


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


@rule(priority=14)
def flat_position(evidence: Evidence) -> Hint | None:
    """The position in a flattened tensor was computed one row or column too far."""
    ids = ids_of(evidence, "index")
    if ids is None or not ids.is_above or not _is_flat(evidence):
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


@rule(priority=24)
def one_based_ids(evidence: Evidence) -> Hint | None:
    """Ids run from 1 to the number of rows."""
    ids = ids_of(evidence, "token", "index")
    if ids is None or not ids.counts_from_one or _is_flat(evidence):
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


@rule(priority=24)
def no_output_for_blank(evidence: Evidence) -> Hint | None:
    """CTC needs an output for the blank beside one for each label."""
    ids = ids_of(evidence, "index", "label")
    if ids is None or not _meets_blank(evidence) or ids.high != ids.size or not ids.low:
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
    return Hint(text=f"the values have {found[0].size} elements{rows}, the mask wants more{tokens}")
