"""The leaves behind a node: what a NaN in its gradient can reach by the end of the pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cudalens.recorder.nonfinite_passes import leaves_of


def leaves(node: object, at: int) -> list[Tensor | None]:
    return [leaf() for leaf in leaves_of(node, at)]


def test_the_gradient_of_an_input_goes_to_the_leaves_of_all_its_branches() -> None:
    """A leaf that two branches share counts once; those of the node's other input do not count."""
    first, second, third, other = (nn.Parameter(torch.ones(2)) for _ in range(4))
    branches = (first + second.relu()) * (third.exp().relu() + first)
    node = (branches / other).grad_fn
    found = leaves(node, 0)
    assert len(found) == 3
    assert {id(leaf) for leaf in found} == {id(first), id(second), id(third)}
    (alone,) = leaves(node, 1)
    assert alone is other
    assert leaves(node, 2) == []
