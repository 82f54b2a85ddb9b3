"""The write over a tensor that autograd had saved."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from cudalens.core.evidence_types import InPlaceChange
from cudalens.recorder.calls import Recorded, Write
from cudalens.recorder.history import Snapshot
from cudalens.recorder.provenance import describe_step
from cudalens.recorder.sites import calling_module
from cudalens.source.safe_eval import instance_dict

_COMPLAINT: Final = re.compile(
    r"modified by an inplace operation: \[[\w.]+ \[(?P<shape>[\d, ]*)\]\].*"
    r" is at version (?P<now>\d+); expected version (?P<saved>\d+)"
)


def find_modified(snapshot: Snapshot, message: str, saver: Recorded | None) -> InPlaceChange | None:
    """Return the last write to the tensor that autograd complains of, and who saved it.

    A tensor fits when the call that saved it, where that is known, had it, when it or a view of it
    has as many elements as the message says, and when recorded writes lead from the saved version
    to the found one without a gap.

    Args:
        message: "… has been modified by an inplace operation: …".
        saver: the forward call of the node that complains.

    Returns:
        ``None`` unless exactly one tensor fits, or one line wrote to all that do.
    """
    match = _COMPLAINT.search(message)
    if match is None:
        return None
    count = math.prod(int(size) for size in match["shape"].split(",") if size.strip())
    last = partial(
        _last_write, saved=int(match["saved"]), now=int(match["now"]), since=saver and saver.seq
    )
    fitting = []
    for target in snapshot.written_tensors():
        writes = snapshot.writes_to(target)
        views = [write.tensor for _, write in writes]
        if saver is not None:
            views = [*saver.inputs, *saver.outputs]
        views = [item for item in views if snapshot.whole(item) is target]
        shapes = [snapshot.meta_of(item)[0] for item in (target, *views)]
        is_alike = any(shape is not None and math.prod(shape) == count for shape in shapes)
        if views and is_alike and (call := last(writes)):
            fitting.append((target, call))
    steps = [describe_step(call, snapshot) for _, call in fitting]
    if len({step.source for step in steps}) != 1:
        return None
    (target, call), saved = fitting[0], saver and describe_step(saver, snapshot)
    living = target()
    is_one_op = len({step.op for step in steps}) == 1
    return InPlaceChange(
        modified=steps[0] if is_one_op else replace(steps[0], op=None),
        savers=() if saved is None else (saved,),
        is_parameter=living is not None and living.is_leaf and living.requires_grad,
        module=_in_place_module(calling_module(call.site)),
    )


def _in_place_module(module: object) -> str | None:
    """Return the class of a module of torch's that was made with ``inplace=True``."""
    kind = type(module)
    # Another's may mean something else by it.
    is_torch = kind.__module__.partition(".")[0] == "torch"
    return kind.__name__ if is_torch and instance_dict(module).get("inplace") is True else None


def _last_write(
    writes: Sequence[tuple[Recorded, Write]], saved: int, now: int, since: int | None
) -> Recorded | None:
    """Return the last of the writes from the saved version to the present one.

    ``None`` where one of them was not recorded.

    Args:
        since: the number of the call that saved the tensor, where it is known.
    """
    version, last = saved, None
    for call, item in writes:
        if item.before is None or call.seq <= (since or 0):
            continue
        if item.before <= version < item.after:
            version, last = item.after, call
    return last if version >= now else None
