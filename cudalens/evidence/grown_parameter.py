"""Find the parameter that an optimizer's step had made huge before the first NaN or infinity.

Only one from which the op's inputs were computed, by the autograd graph, and which a recorded step
was the last to write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from cudalens.core._torch import no_dispatch_modes, plain_torch
from cudalens.core.evidence_types import GrownParameter
from cudalens.recorder.sites import phase_of

_HUGE = 1e6
"""No parameter of a model that learns comes near it."""
_MAX_NODES = 500


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
    for leaf in _leaves(values):
        call = snapshot.newest(ref(leaf))
        if call is None or phase_of(call.site) != "optimizer":
            continue
        largest = float(leaf.detach().abs().max()) if leaf.numel() else 0.0
        if _HUGE < largest < float("inf"):
            huge.append((largest, leaf, call))
    return huge


def _leaves(values: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the parameters that tensors were computed from."""
    waiting = deque(item.grad_fn for item in values if item.grad_fn is not None)
    seen = set(waiting)
    for _ in range(_MAX_NODES):
        if not waiting:
            return
        node = waiting.popleft()
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
