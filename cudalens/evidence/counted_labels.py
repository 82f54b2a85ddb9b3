"""The label that breaks the ``bincount`` of a confusion matrix.

Such a matrix is counted as ``bincount(n * label + prediction).reshape(n, n)``.  A label beyond the
classes makes the result longer, and torch's error is about a shape.  A negative one is rejected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core.call import ApiCall, Operand
from cudalens.core.report_types import Bounds, Violation
from cudalens.evidence.recorded_way import sources_of
from cudalens.guards._ranges import out_of_range, violation_at
from cudalens.recorder.history import Snapshot

_TOO_MANY = re.compile(r"^shape '\[(\d+), (\d+)\]' is invalid for input of size (\d+)$")
_NEGATIVE = "bincount only supports 1-d non-negative integral inputs"


def counted_label(
    message: str, call: ApiCall, operands: Sequence[Operand], recorder: Any
) -> tuple[Violation, Tensor] | None:
    """Return the label outside the classes, and its tensor; ``None`` if that is not proven.

    By the recorded calls, the tensor must have led to the counted numbers, and its label to the
    largest of them.

    Args:
        call: the rejected call of ``reshape`` or ``bincount``.
        operands: the operands of the user's line, whose tensors are preferred.
    """
    match, given = _TOO_MANY.match(message), call.args[0] if call.args else None
    if not isinstance(given, Tensor) or (match is None and _NEGATIVE not in message):
        return None
    snapshot = recorder.snapshot()
    with _torch.plain_torch(), _torch.no_dispatch_modes():
        if match is not None:
            rows, columns, size = map(int, match.groups())
            made = snapshot.maker(ref(given))
            if rows != columns or made is None or made.api.stem != "bincount":
                return None
            return _found(given, rows, size - 1, operands, snapshot)
        if given.dim() != 1 or not _is_whole(given):
            return None
        places, least = call.kwargs.get("minlength", 0), int(given.min())
        classes = math.isqrt(places) if type(places) is int and places > 0 else 0
        if classes < 2 or classes * classes != places:
            return _counted_alone(given, operands, snapshot)
        return _found(given, classes, least, operands, snapshot)


def _found(
    counted: Tensor, classes: int, place: int, operands: Sequence[Operand], snapshot: Snapshot
) -> tuple[Violation, Tensor] | None:
    """Return the finding in the labels that led to an extreme counted number.

    Proven by the numbers: it is the minimum or maximum of ``classes * label + prediction``.
    """
    sources = [item for item in sources_of(counted, snapshot) if _is_whole(item)]
    label = place // classes
    if 0 <= label < classes:
        return None
    guilty = [it for it in sources if any(_leads(it, by, classes, place) for by in sources)]
    if any(not torch.equal(it.flatten(), guilty[0].flatten()) for it in guilty):
        return None
    tensor = _named(guilty, operands)
    if tensor is None or bool(
        ((tensor < min(label, 0)) | (tensor > max(label, classes - 1))).any()
    ):
        return None  # some labels were masked out, and it is unknown which
    bad = (tensor < 0) if label < 0 else (tensor >= classes) & (tensor <= label)
    violation = out_of_range(
        tensor,
        place=f"the {classes} classes of the matrix",
        bad=bad,
        low=0,
        high=classes - 1,
        size=classes,
        unit="class",
        argument="target",
        is_index=False,
        why=f"bincount counts at {classes} * label + prediction, one place for each pair.",
    )
    return violation, tensor


def _leads(labels: Tensor, predictions: Tensor, classes: int, place: int) -> bool:
    """Return whether a number is the smallest or largest that two tensors are counted as.

    The prediction there must be a class: else it may be the one at fault.
    """
    if labels is predictions or labels.numel() != predictions.numel():
        return False
    label, prediction = labels.flatten().long().cpu(), predictions.flatten().long().cpu()
    places = classes * label + prediction
    at = int(places.argmin() if place < 0 else places.argmax())
    return int(places[at]) == place and 0 <= int(prediction[at]) < classes


def _counted_alone(
    counted: Tensor, operands: Sequence[Operand], snapshot: Snapshot
) -> tuple[Violation, Tensor] | None:
    """Return the finding in numbers that are counted directly: these may not be negative."""
    sources = [item for item in sources_of(counted, snapshot) if _is_whole(item)]
    tensor = _named([it for it in sources if torch.equal(it.flatten(), counted)], operands)
    if tensor is None:
        return None
    violation = violation_at(
        tensor,
        tensor < 0,
        "is below 0",
        argument="target",
        is_index=False,
        bounds=Bounds(min=0, text="at least 0"),
        explanation="bincount makes one place for each number from 0 to the largest.",
    )
    return violation, tensor


def _named(tensors: Sequence[Tensor], operands: Sequence[Operand]) -> Tensor | None:
    """Return the tensor that the user's line names, else the first; ``None`` if it names two."""
    named = [it for it in tensors if any(operand.value is it for operand in operands)]
    if not tensors or len(named) > 1:
        return None
    return named[0] if named else tensors[0]


def _is_whole(tensor: Any) -> bool:
    """Return whether a tensor has readable integers."""
    is_number = not (tensor.is_floating_point() or tensor.is_complex())
    return bool(is_number and tensor.dtype != torch.bool and tensor.numel() and not tensor.is_meta)
