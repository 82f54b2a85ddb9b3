"""The offset that a recorded sum added to ids that are out of bounds now.

Several tables may share one embedding, with an offset for each column of ids: ``x + offsets``.  The
bound of the whole embedding does not show which column is at fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType
from weakref import ref

from torch import Tensor

from cudalens.core.evidence_types import AddedNumber
from cudalens.core.report_types import Violation
from cudalens.core.torch_functions import Trait, stems
from cudalens.evidence.call_stack import held_name
from cudalens.recorder.calls import Recorded
from cudalens.recorder.history import Snapshot

_SUMS = stems(Trait.SUM) - {"rsub"}  # ``5 - x`` does not add to x


def added_number(
    violation: Violation,
    tensor: Tensor,
    bad: Tensor,
    snapshot: Snapshot,
    frames: Sequence[FrameType],
) -> AddedNumber | None:
    """Return the number that was added to all bad values, and their column if they share one.

    Args:
        tensor: the tensor at fault, of integers.
        bad: bool[shape of the tensor], true at its bad elements.
    """
    call = snapshot.maker(ref(tensor))
    high, is_above = violation.bounds.max, violation.offenders.others is not None
    if call is None or tensor.is_floating_point() or not isinstance(high, int) or not is_above:
        return None
    given, line = _given(call, tensor, snapshot), snapshot.reader.line(call.site)
    # The innermost function may reuse the name: ``x = x + offsets``.
    name = None if given is None else held_name(given, frames[::-1])
    if given is None or name is None or line is None or bool((tensor[bad] <= high).any()):
        return None
    added = tensor - given
    if bool((added == added.flatten()[0]).all()):
        column, own, number = None, given, int(added.flatten()[0])
    else:
        columns = bad.reshape(-1, bad.shape[-1]).any(0).nonzero().flatten().tolist()
        column = columns[0] if len(columns) == 1 and tensor.dim() == 2 else None
        if column is None or bool((added[:, column] != added[0, column]).any()):
            return None
        own, number = given[:, column], int(added[0, column])
    low, top = int(own.min()), int(own.max())
    return AddedNumber(name, column, number, low, top, high - number, line) if number else None


def _given(call: Recorded, tensor: Tensor, snapshot: Snapshot) -> Tensor | None:
    """Return the only living input of a sum that is unchanged since."""
    stem = call.api.stem.strip("_")
    is_since = not snapshot.is_untouched(ref(tensor), call.seq + 1)
    if stem not in _SUMS or call.written or is_since:
        return None
    untouched = (it() for it in call.inputs if snapshot.is_untouched(it, call.seq))
    same = [it for it in untouched if it is not None and it.shape == tensor.shape]
    is_one = len(same) == 1 and same[0] is not tensor and same[0].dtype == tensor.dtype
    # ``offsets - x`` does not add to x.
    is_first = is_one and call.inputs[0]() is same[0]
    return same[0] if is_one and (is_first or stem not in ("sub", "isub")) else None
