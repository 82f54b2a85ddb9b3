"""Find the parameter that an optimizer's step had made huge before the first NaN or infinity.

Only one from which the op's inputs were computed, by the autograd graph, and which a recorded step
was the last to write.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from cudalens.core._torch import no_dispatch_modes, plain_torch
from cudalens.core.evidence_types import GrownParameter
from cudalens.evidence.autograd_graph import nodes_behind
from cudalens.recorder.sites import phase_of

_HUGE = 1e6
"""No parameter of a model that learns comes near it."""


def grown_parameter(
    values: Iterable[Tensor], recorder: Any, names: Mapping[int, str]
) -> GrownParameter | None:
    """Return the largest parameter behind tensors that a step left with huge values."""
    snapshot = recorder.snapshot()
    with no_dispatch_modes(), plain_torch(), torch.no_grad():
        huge = _huge(values, snapshot)
    if not huge:
        return None
    largest, leaf, call = max(huge, key=lambda item: item[0])
    return GrownParameter(
        name=names.get(id(leaf)), largest=largest, step=snapshot.reader.line(call.site)
    )


def _huge(values: Iterable[Tensor], snapshot: Any) -> list[tuple[float, Tensor, Any]]:
    """Return the parameters with huge values that a step wrote last, each with both."""
    huge = []
    for node in nodes_behind(item.grad_fn for item in values):
        leaf = getattr(node, "variable", None)
        call = snapshot.newest(ref(leaf)) if isinstance(leaf, Tensor) else None
        if leaf is None or call is None or phase_of(call.site) != "optimizer":
            continue
        largest = float(leaf.detach().abs().max()) if leaf.numel() else 0.0
        if _HUGE < largest < float("inf"):
            huge.append((largest, leaf, call))
    return huge
