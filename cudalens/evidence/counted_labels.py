"""Which label made the counts of a confusion matrix too many, or a place to count at negative.

Such a matrix is counted in one row, ``bincount(n * label + prediction)``, which is reshaped to
n × n.  A label beyond the classes makes the row longer, and torch's words are of a shape.
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
    """Return the label that no class has, and its tensor; ``None`` where that is not proven.

    The tensor has led to what was counted, by the recorded calls, and its label is that of the
    largest place.

    Args:
        call: the refused call of ``reshape`` or ``bincount``.
        operands: those of the user's line, whose tensors are preferred.
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
            return _found(given, rows, (size - 1) // rows, operands, snapshot)
        if given.dim() != 1 or not _is_whole(given):
            return None
        places, least = call.kwargs.get("minlength", 0), int(given.min())
        classes = math.isqrt(places) if type(places) is int and places > 0 else 0
        if classes < 2 or classes * classes != places:
            return _found(given, 0, least, operands, snapshot)
        return _found(given, classes, least // classes, operands, snapshot)


def _found(
    counted: Tensor, classes: int, label: int, operands: Sequence[Operand], snapshot: Snapshot
) -> tuple[Violation, Tensor] | None:
    """Return the finding in the tensor that brought a label in.

    Args:
        classes: 0 where there is no matrix and any number from 0 on can be counted.
    """
    sources = [item for item in sources_of(counted, snapshot) if _is_whole(item)]
    guilty = [item for item in sources if bool((item == label).any())]
    named = [it for it in guilty if any(operand.value is it for operand in operands)]
    if not guilty or len(named) > 1 or (classes and 0 <= label < classes):
        return None
    tensor = named[0] if named else guilty[0]
    bad = (tensor < 0) if label < 0 else (tensor >= classes) & (tensor <= label)
    if classes and bool(((tensor < min(label, 0)) | (tensor > max(label, classes - 1))).any()):
        return None  # others were left out of the count, and which is not known here
    facts: dict[str, Any] = {"argument": "target", "is_index": False}
    if not classes:
        facts |= {
            "bounds": Bounds(min=0, text="at least 0"),
            "explanation": "bincount makes one place for each number from 0 to the largest.",
        }
        return violation_at(tensor, bad, "is below 0", **facts), tensor
    facts["why"] = f"bincount counts at {classes} * label + prediction, one place for each pair."
    place = f"the {classes} classes of the matrix"
    facts |= {"low": 0, "high": classes - 1, "size": classes, "unit": "class"}
    violation = out_of_range(tensor, place=place, bad=bad, **facts)
    return violation, tensor


def _is_whole(tensor: Any) -> bool:
    """Return whether a tensor has integers that can be read."""
    is_number = not (tensor.is_floating_point() or tensor.is_complex())
    return bool(is_number and tensor.dtype != torch.bool and tensor.numel() and not tensor.is_meta)
