"""Causes of ids beyond the tables of document and sentence-pair models: boxes and segments."""

from __future__ import annotations

from cudalens.core.report import Evidence
from cudalens.core.report_types import Hint, TensorFact
from cudalens.diagnosis.hints._base import rule
from cudalens.diagnosis.hints._reading import Ids, ids_of
from cudalens.diagnosis.hints._roles import INTEGERS, table_name
from cudalens.diagnosis.user_code import list_of, rewritten

_PAGE = 1000
"""Coordinates of LayoutLM are thousandths of the page, in tables of 1024 rows."""
_SIDES = {
    "x_position_embeddings": "x",
    "y_position_embeddings": "y",
    "h_position_embeddings": "height",
    "w_position_embeddings": "width",
}


def _boxes(evidence: Evidence) -> tuple[Ids, TensorFact | None, str] | None:
    """Return the coordinates at fault, the tensor of boxes on the line, and what they are."""
    ids = ids_of(evidence, "box")
    if ids is None:
        return None
    boxes = [
        item
        for item in evidence.tensors
        if item.expression and item.dtype in INTEGERS and item.shape[-1:] == (4,)
    ]
    box = boxes[0] if len(boxes) == 1 else None
    return ids, box, _SIDES.get(table_name(evidence), "coordinate")


@rule(priority=10)
def boxes_in_pixels(evidence: Evidence) -> Hint | None:
    """Boxes are in pixels; the model wants thousandths of the page."""
    found = _boxes(evidence)
    if found is None or not found[0].is_above:
        return None
    ids, box, side = found
    size = "torch.tensor([width, height, width, height], device={x}.device)"
    fix = rewritten(evidence, box, f"({{x}} * {_PAGE} / {size}).long()")
    return Hint(
        text=f"a box has {side} {ids.high}, the table ends at {ids.size - 1}: these look like "
        f"pixels; divide them by the page size, so that a page goes from 0 to {_PAGE}",
        fix=fix or f"x * {_PAGE} // page_width, y * {_PAGE} // page_height",
    )


@rule(priority=10)
def boxes_negative(evidence: Evidence) -> Hint | None:
    """A box begins outside the page."""
    found = _boxes(evidence)
    if found is None or found[2] not in ("x", "y") or max(found[0].bad) >= 0:
        return None
    fix = rewritten(evidence, found[1], f"{{x}}.clamp(0, {_PAGE})")
    return Hint(
        text=f"a box begins at {found[2]} = {min(found[0].bad)}, outside the page",
        fix=fix or f"bbox = bbox.clamp(0, {_PAGE})",
    )


@rule(priority=10)
def boxes_inverted(evidence: Evidence) -> Hint | None:
    """A box ends before it begins, so that its width or height is negative."""
    found = _boxes(evidence)
    if found is None or found[2] not in ("width", "height") or max(found[0].bad) >= 0:
        return None
    ids, box, side = found
    first, last = ("x0", "x1") if side == "width" else ("y0", "y1")
    ends = "{x}[..., :2], {x}[..., 2:]"
    fix = rewritten(
        evidence, box, f"torch.cat([torch.minimum({ends}), torch.maximum({ends})], dim=-1)"
    )
    return Hint(
        text=f"a box has {side} {min(ids.bad)}: {last} lies before {first}; boxes are written "
        "x0, y0, x1, y1, not as a corner with width and height",
        fix=fix or f"{first}, {last} = min({first}, {last}), max({first}, {last})",
    )


@rule(priority=12)
def segment_ids(evidence: Evidence) -> Hint | None:
    """Segment ids number the sentences from 0, and a model may know one segment only."""
    ids = ids_of(evidence, "segment")
    if ids is None:
        return None
    bad = list_of(ids.bad)
    if ids.size == 1:
        return Hint(
            text=f"segment ids hold {bad}, but this model has one segment: leave token_type_ids "
            "away, or all 0",
            fix=rewritten(evidence, ids.named, "torch.zeros_like({x})"),
        )
    # Each text begins with segment 0: where it is missing, few values are enough.
    one_based = ids.may_count_from_one and ids.distinct == tuple(range(1, ids.size + 1))
    fix = "{x} - 1" if one_based else f"{{x}}.clamp(0, {ids.size - 1})"
    base = "; they look 1-based" if one_based else ""
    return Hint(
        text=f"segment ids hold {bad}, the model has segments 0 … {ids.size - 1}{base}",
        fix=rewritten(evidence, ids.named, fix),
    )
