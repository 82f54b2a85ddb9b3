"""Causes of class numbers outside the classes, in losses and in one-hot codes."""

from __future__ import annotations

import re
from typing import Literal

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, LineRef
from cudalens.diagnosis.hints._makers import is_made
from cudalens.diagnosis.hints._reading import (
    MARKS,
    Ids,
    adding_line,
    fills_row_ends,
    ids_rule,
    is_made_by_sum,
    is_written,
    runs_from_one,
)
from cudalens.diagnosis.user_code import (
    in_transformers,
    list_of,
    place,
    rewritten,
    with_keyword,
)

LOSSES = ("cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss")
_TOKEN_HEAD = re.compile(
    r"(LMHead(Model)?|EncoderDecoderModel"
    r"|For(CausalLM|MaskedLM|ConditionalGeneration|SpeechSeq2Seq|ImageTextToText|Vision2Seq))$"
)
_CLASS_HEAD = re.compile(
    r"For((Sequence|Token|Image|Video|AudioFrame)Classification|SemanticSegmentation)$"
)


def head_of(evidence: Evidence) -> Literal["classes", "tokens"] | None:
    """Return what the model of transformers scores that computed the loss, where it is known."""
    if not in_transformers(evidence):
        return None
    name = evidence.call_context.model or evidence.module_type or ""
    if _TOKEN_HEAD.search(name):
        return "tokens"
    return "classes" if _CLASS_HEAD.search(name) else None


# --- counting -------------------------------------------------------------------------------------


@ids_rule("label", "one_hot")
def one_based_labels(evidence: Evidence, ids: Ids) -> Hint | None:
    """Labels run from 1 to C: shift them down by one."""
    if ids.size < 2 or not ids.counts_from_one or head_of(evidence) == "tokens":
        return None
    if (line := adding_line(evidence, 1)) is not None:
        return Hint(text=_added(line, 1, f"{ids.size} classes", ids, evidence))
    return Hint(
        text=f"{ids.every('labels')} run from {ids.low} to {ids.high}: they look 1-based",
        fix=rewritten(evidence, ids.named, "{x} - 1"),
    )


@ids_rule("label", "one_hot", "token")
def relabel(evidence: Evidence, ids: Ids) -> Hint | None:
    """No more different labels than outputs, with other numbers: years, 10, 20, 30, or 0, 1, 4."""
    seen, places = ids.distinct or (), ids.size
    # One number just beyond the end is a stray one or a mark rather than another numbering.
    is_stray = ids.bad == {places}
    if not seen or places < 2 or ids.bad == {255} or ids.counts_from_one or is_stray:
        return None
    if head_of(evidence) == "tokens" or (ids.role == "token" and in_transformers(evidence)):
        return None
    what, of = ("ids", "rows") if ids.role == "token" else ("labels", "outputs")
    every = ids.every(what)
    if evidence.seen_before is not None and not ids.is_whole:
        if {*seen} - {*(ids.fact.summary.unique or ())}:
            return None  # of earlier calls the ends are known, and not which numbers they had
        every = f"the {what} of this call"
    is_run = seen == tuple(range(seen[0], seen[0] + places))
    is_first = evidence.seen_before is None or ids.is_whole
    if is_run and is_first and (seen[0] >= places or seen[0] < -1):
        if (line := adding_line(evidence, seen[0])) is not None:
            return Hint(text=_added(line, seen[0], f"{places} {of}", ids, evidence))
        sign = "-" if seen[0] > 0 else "+"
        return Hint(
            text=f"{every} run from {seen[0]} to {seen[-1]}, as many as there are {of}: "
            f"number them 0 … {places - 1}",
            fix=rewritten(evidence, ids.named, f"{{x}} {sign} {abs(seen[0])}"),
        )
    if seen[0] == 1 and what == "labels" and runs_from_one(seen, ids.high, ids.count):
        # Whether they are to be shifted, or the outputs are too few, is not known here.
        return Hint(
            text=f"{every} are {len(seen)} different numbers, 1 … {ids.high}, and none is 0. The "
            f"{places} {of} are numbered 0 … {places - 1}"
        )
    is_all = len(seen) == places and (seen[0] >= places or (seen[0] >= 0 and ids.has_gaps))
    is_part = seen[0] == 0 and ids.has_gaps and ids.high < 2 * places <= 4 * len(seen)
    if not is_all and not is_part:
        return None
    # What numbered them so, a data set or a line before this one, is not known here.
    outside = [value for value in seen if not 0 <= value < places]
    return Hint(
        text=f"{every} are {len(seen)} different numbers: {list_of(seen, first=outside)}. The "
        f"{places} {of} are numbered 0 … {places - 1}"
    )


def _added(line: LineRef, number: int, places: str, ids: Ids, evidence: Evidence) -> str:
    text = f"{place(line, evidence)} adds {number} ({line.text}), and the {places} are numbered"
    return f"{text} 0 … {ids.size - 1}"


# --- marks and masks ------------------------------------------------------------------------------


@ids_rule("label")
def binary_labels_one_output(evidence: Evidence, ids: Ids) -> Hint | None:
    """Labels 0 and 1 meet a head with a single output."""
    if ids.size != 1 or ids.low is None or ids.low < 0 or ids.high != 1:
        return None
    return Hint(
        text=f"{ids.every('labels')} are 0 and 1 but the scores have one column: this loss takes "
        "one column per class, so 2. Or use binary_cross_entropy_with_logits on the single "
        "column, with the labels as floats of its shape"
    )


@ids_rule("label", "one_hot")
def mask_of_0_and_255(evidence: Evidence, ids: Ids) -> Hint | None:
    """A black-and-white image is used as a mask of class numbers: 255 stands for 1."""
    if not _is_black_and_white(evidence, ids) or ids.size < 2:
        return None
    text = f"the mask{ids.looked_at[1]} has only 0 and 255, like an image. "
    if ids.size > 2:
        return Hint(text=f"{text}The {ids.size} outputs are numbered 0 … {ids.size - 1}")
    text += "The class numbers are 0 and 1"
    return Hint(text=text, fix=rewritten(evidence, ids.named, "({x} == 255).long()"))


def _is_black_and_white(evidence: Evidence, ids: Ids) -> bool:
    """Return whether labels are 0 and 255 alone, as far as is known in earlier calls too.

    Where those had a class 1, 255 is another thing.
    """
    seen = evidence.seen_before
    return ids.distinct == (0, 255) and (seen is None or seen.max in (0, 255))


@ids_rule("label", "one_hot")
def mark_not_ignored(evidence: Evidence, ids: Ids) -> Hint | None:
    """Labels are marked with -1, -100 or 255 to be left out, and are not."""
    is_255 = (
        ids.bad == {255} and not _is_black_and_white(evidence, ids) and ids.size not in (1, 255)
    )
    is_negative = max(ids.bad) < 0 and not is_made_by_sum(evidence)
    if not (is_255 or is_negative):
        return None
    if ids.role == "one_hot":
        text = f"{list_of(ids.bad)} is not a class, and a one-hot encoding has no column for it"
        return Hint(text=text)
    if len(ids.bad) != 1 or not ids.bad <= {255, *MARKS}:
        return None
    (mark,), what = ids.bad, "elements" if is_255 else "labels"
    index = evidence.scalar("ignore_index")
    ignores = "this loss ignores nothing" if index is None else f"the loss ignores {index}"
    # A -1 may as well be a class 0 from which 1 was subtracted, where nothing shows that it pads.
    is_other = ids.fact.dtype != "uint8" and ids.distinct != (0, 255)
    is_255_sure = is_255 and is_other and not is_made(evidence)
    is_sure = mark == -100 or is_255_sure
    if is_sure or fills_row_ends(ids) or is_written(evidence, mark):
        text = f"{mark} usually marks {what} to leave out. {ignores[0].upper()}{ignores[1:]}"
        return Hint(text=text, fix=_ignoring(evidence, ids, mark))
    if ids.distinct == tuple(range(-1, ids.size - 1)):
        text = f"{ids.every('labels')} are -1 … {ids.size - 2}, as many as there are outputs: add "
        text += "1 to them if -1 is a class, and use ignore_index=-1 if it marks labels to leave "
        return Hint(text=f"{text}out")
    leave = f"use ignore_index={mark} ({ignores})"
    if ids.violation.offenders.allowed:
        leave = f"make it {index}, which other labels are"
    text = f"if {mark} marks {what} to leave out, {leave}. "
    if is_255:
        text += "In uint8 a -1 becomes 255 too"
    elif ids.size == 2 and ids.distinct == (-1, 1):
        text += "If the two classes are coded -1 and 1, use (labels + 1) // 2"
    else:
        text += "Subtracting 1 from a label 0 gives -1 as well"
    return Hint(text=text)


def _ignoring(evidence: Evidence, ids: Ids, mark: int) -> str | None:
    index = evidence.scalar("ignore_index")
    if index is None:
        return None
    # A loss ignores one number: where labels have that one too, both have to be it.
    # What the call itself ignores was chosen, though this batch may have none.
    is_in_use = bool(ids.violation.offenders.allowed) or index != "-100"
    call = None if is_in_use else with_keyword(evidence, LOSSES, "ignore_index", str(mark))
    return call or rewritten(evidence, ids.named, f"{{x}}.masked_fill({{x}} == {mark}, {index})")
