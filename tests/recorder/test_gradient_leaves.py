"""Behind a node: the leaves that a NaN in its gradient can reach, and the poles of ``where``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from cudalens.recorder.nonfinite_passes import PassNotes, keep_condition, leaves_of


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


X = torch.ones(2, requires_grad=True)


@pytest.mark.parametrize(
    ("make", "pole"),
    [
        (lambda x: x.log(), "LogBackward0"),
        (lambda x: 1 / x, "ReciprocalBackward0"),
        (lambda x: x.reciprocal() * x, None),  # a product: the other factor counts, too
        (lambda x: x * 2, None),
        (lambda x: x.sin(), None),
    ],
)
@pytest.mark.parametrize("is_taken", [True, False])
def test_the_condition_of_a_where_is_kept_for_a_pole_before_it(
    make: Callable[[Tensor], Tensor], pole: str | None, is_taken: bool
) -> None:
    notes, condition, made = PassNotes(), torch.tensor([True, False]), make(X)
    parts = (made, X) if is_taken else (X, made)
    keep_condition(torch.where(condition, *parts).grad_fn, notes)
    if pole is None:
        assert notes.conditions == {}
        return
    node = made.grad_fn
    assert node is not None
    node = node if node.name() == pole else node.next_functions[0][0]
    assert node is not None and node.name() == pole
    ((number, (kept, truth)),) = notes.conditions.items()
    assert (number, truth) == (node._sequence_nr(), is_taken)
    assert kept.tolist() == condition.tolist()
    keep_condition(made.grad_fn, other := PassNotes())
    assert other.conditions == {}
