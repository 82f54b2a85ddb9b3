"""Find the in-place write to a tensor that autograd had saved."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from cudalens.core.call import NodeMark
from cudalens.core.evidence_types import InPlaceChange
from cudalens.core.graph_types import ProvenanceStep
from cudalens.recorder.calls import Recorded
from cudalens.recorder.history import Snapshot
from cudalens.recorder.provenance import describe_step
from cudalens.recorder.sites import RawSite, Site
from cudalens.source.safe_eval import instance_dict

_COMPLAINT: Final = re.compile(r"modified by an inplace operation: .* is at version (\d+);")


def find_modified(
    snapshot: Snapshot, message: str, node: NodeMark | None
) -> tuple[InPlaceChange, Recorded] | None:
    """Return the last write to the saved tensor that autograd rejects.

    It is an input or output of the failing node's forward call.

    Args:
        message: "… has been modified by an inplace operation: … is at version 3; …".
        node: the failing node.

    Returns:
        The write and its call. ``None`` unless the writes of a single line, since the forward call,
        led to the version in the message.
    """
    match = _COMPLAINT.search(message)
    saver = None if node is None else snapshot.forward_call(node.sequence_nr)
    if match is None or saver is None:
        return None
    # The message has no tensor, only its version: take the tensors whose last write led to it.
    fitting: dict[int, tuple[Recorded, Any]] = {}
    since: dict[int, Recorded] = {}
    for tensor in (*saver.inputs, *saver.outputs):
        writes = [it for it in snapshot.writes_to(tensor) if not snapshot.is_of_data(it[1].tensor)]
        for writer, write in writes[-1:]:
            if writer.seq > saver.seq and write.after == int(match[1]):
                fitting[writer.seq] = writer, snapshot.whole(tensor)()
                since |= {item.seq: item for item, _ in writes if item.seq > saver.seq}
    steps = [describe_step(writer, snapshot) for writer, _ in fitting.values()]
    if len({step.source for step in steps}) != 1:
        return None  # none fits, or one of several lines did it
    writer, living = next(iter(fitting.values()))
    by_line: dict[Any, ProvenanceStep] = {}
    for seq in sorted(since):
        step = describe_step(since[seq], snapshot)
        by_line.setdefault(step.source, step)
    is_one_op = len({step.op for step in steps}) == 1
    change = InPlaceChange(
        modified=steps[0] if is_one_op else replace(steps[0], op=None),
        savers=(describe_step(saver, snapshot),),
        writes=tuple(by_line.values()),
        is_parameter=living is not None and living.is_leaf and living.requires_grad,
        module=_in_place_module(writer.site),
    )
    return change, writer


def _in_place_module(site: RawSite) -> str | None:
    """Return the class name of the torch module with ``inplace=True`` that made a call.

    ``None`` for a call of the user's own code.
    """
    module = site.module() if isinstance(site, Site) and site.module is not None else None
    kind = type(module)
    # In a module of another library, `inplace` may mean something else.
    is_torch = kind.__module__.partition(".")[0] == "torch"
    return kind.__name__ if is_torch and instance_dict(module).get("inplace") is True else None
