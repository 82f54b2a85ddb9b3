"""What the watch for NaN and infinity keeps about one backward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from torch import Tensor

from cudalens.recorder.nonfinite_marks import Maker, Step
from cudalens.recorder.nonfinite_values import is_steep, saved_value
from cudalens.recorder.tensor_refs import Ref


@dataclass
class PassNotes:
    """Facts about one backward pass."""

    makers: list[tuple[Maker, tuple[Step, ...], list[Ref]]] = field(default_factory=list)
    """Each maker, the forward calls that its values passed through, and the leaves that they can
    reach."""
    nodes: set[int] = field(default_factory=set)
    """Sequence numbers of the nodes that made non-finite gradients from finite ones."""
    conditions: dict[int, tuple[Tensor, bool]] = field(default_factory=dict)
    """By sequence number of the node whose forward result went into a ``where``: the condition, and
    the truth value that selects that result."""


def keep_condition(node: Any, notes: PassNotes) -> None:
    """Keep the condition of a ``where`` for inputs with a pole: the node frees it after it runs."""
    condition = saved_value(node, "_saved_condition")
    for at, (following, _) in enumerate(node.next_functions if condition is not None else ()):
        inputs = [following] if following is not None else []
        if inputs and following.name().startswith("MulBackward"):  # 1 / x: its reciprocal times 1
            inputs = [item for item, _ in following.next_functions if item is not None]
        if len(inputs) == 1 and is_steep(inputs[0].name()):
            notes.conditions[inputs[0]._sequence_nr()] = condition, at == 0


def leaves_of(node: Any, at: int) -> list[Ref]:
    """Return the leaves that the gradient of a node's input number ``at`` flows to."""
    following = node.next_functions
    nodes = [following[at][0]] if at < len(following) else []
    leaves: list[Ref] = []
    seen = set()
    while nodes:
        item = nodes.pop()
        if item is None or item in seen:
            continue
        seen.add(item)
        # Only an `AccumulateGrad` has one: the leaf that it adds to.
        leaf = getattr(item, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(ref(leaf))
        nodes += [other for other, _ in item.next_functions]
    return leaves
