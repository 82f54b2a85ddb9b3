"""Reading of values that count from 0 without a gap, and need more places than there are."""

from __future__ import annotations

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.hints._makers import is_made
from cudalens.diagnosis.hints._reading import (
    Ids,
    fills_row_ends,
    ids_rule,
    numel,
    runs_from_one,
    whole_column,
)
from cudalens.diagnosis.hints._roles import Role
from cudalens.diagnosis.hints.labels import head_of

_NOUNS: dict[Role, str] = {"label": "labels", "one_hot": "labels", "token": "ids"}
_PLACES: dict[Role, str] = {"label": "outputs", "one_hot": "columns", "token": "rows"}


@ids_rule("label", "one_hot", "token")
def too_few_places(evidence: Evidence, ids: Ids) -> Hint | None:
    """The values count from 0 without a gap, and need more places than there are.

    Data that is indexed gets no larger, and what a line computes may be one too many: of these
    nobody knows which side is right.  Where earlier calls of the line had values within the bound
    alone, another data set may number things of its own.
    """
    if not ids.is_above or not ids.is_count or ids.size < 2 or fills_row_ends(ids):
        return None
    seen, is_whole = evidence.seen_before, whole_column(evidence) is not None
    # A call that came back, and whose values nobody has read, had none beyond.
    was_within = seen is not None and (not isinstance(seen.max, int) or seen.max < ids.size)
    if ids.is_computed or is_made(evidence) or (was_within and not is_whole):
        return None
    if runs_from_one(ids.fact.summary.unique, ids.size, numel(ids.fact)):
        return None  # this batch counts from 1, and another one from 0
    every, outputs = ids.every(_NOUNS[ids.role]), f"{ids.size} {_PLACES[ids.role]}"
    is_label = ids.role == "label"
    if is_label and evidence.scalar("ignore_index") == "0":
        # Whether they are to be shifted, or the outputs are too few, is not known here.
        return Hint(
            text=f"but for the ignored 0 the labels run from 1 to {ids.high} without a gap, and "
            f"the {outputs} are numbered 0 … {ids.size - 1}"
        )
    # Of the heads of transformers only these are as wide as num_labels says.
    setting = f": num_labels={ids.high + 1}" if head_of(evidence) == "classes" else ""
    may_mark = is_label and ids.high == ids.size
    text = f"{every} run from 0 to {ids.high} without a gap: "
    text += f"{'if each is a class, ' * may_mark}they need {ids.high + 1} "
    text += f"{_PLACES[ids.role]}, there are {ids.size}{setting}"
    if may_mark:
        text += ". If 0 marks labels to leave out, subtract 1 and use ignore_index=-1"
    return Hint(text=text)
