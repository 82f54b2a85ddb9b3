"""A few integers are looked at one by one, many are reduced: both find the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cudalens.guards import Guard, _ranges, losses
from cudalens.guards._ranges import FEW, extremes, few
from tests.cpu_guards import Stopped, guarded, positions
from tests.guards.test_catalogue import CATALOGUE, evaluate, run_passing


class Reductions(TorchDispatchMode):
    """Notes how many elements each ``aminmax`` reads."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "aten::aminmax":
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def nothing_is_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every tensor be reduced, as large ones are."""
    for module in (_ranges, losses):
        monkeypatch.setattr(module, "few", lambda tensor: None)


@pytest.mark.usefixtures("nothing_is_few")
@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_reductions_find_what_single_looks_find(entry: Guard) -> None:
    """Both examples of every guard end the same way when its tensors count as large."""
    with guarded() as collector:
        run_passing(entry)
        assert collector.found == []
        with pytest.raises(Stopped):
            evaluate(entry.violates)
    assert [violation.guard for _, violation in collector.found] == [entry.name]


@pytest.mark.usefixtures("nothing_is_few")
@pytest.mark.parametrize(
    ("classes", "target", "ignored", "bad"),
    [
        (3, [0, 2, -100], -100, []),
        (3, [-1, 2, -100], -100, [(0,)]),
        (3, [255, 2, 0], 255, []),
        (3, [1, 1, 3], 1, [(2,)]),
        (0, [-100, -100, -100], -100, []),
        (0, [-100, 0, -100], -100, [(1,)]),
    ],
)
def test_many_targets_are_judged_as_few_are(
    classes: int, target: list[int], ignored: int, bad: list[Any]
) -> None:
    """Classes and ignore_index pass through the reduction too; everything else is found."""
    scores = torch.zeros(3, classes)
    with guarded() as guards:
        found = guards.look(lambda: F.nll_loss(scores, tensor(target), ignore_index=ignored))
    assert (positions(found) if found else []) == bad


@pytest.mark.parametrize(("count", "sizes"), [(FEW, []), (FEW + 1, [FEW + 1])])
def test_so_many_integers_are_not_reduced(count: int, sizes: list[int]) -> None:
    """At the limit nothing is launched, one beyond there is one reduction."""
    with Reductions() as reductions:
        assert extremes(torch.arange(count) - 3) == (-3, count - 4)
    assert reductions.sizes == sizes


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (1, 3, 2)])
def test_few_looks_through_any_shape(shape: tuple[int, ...]) -> None:
    """The integers of all dimensions are seen, repeated ones and transposed ones alike."""
    values = torch.arange(6)[:1] if not shape else torch.arange(6)
    turned = values.view(shape).permute(tuple(reversed(range(len(shape)))))
    assert few(turned) == set(values.tolist())
    assert few(values[:1].expand(8, 8)) == {0}
    assert few(values[:1].expand(8, 9)) is None


def test_numbers_that_may_be_nan_are_reduced() -> None:
    """Floats are never looked at one by one: NaN would win or lose by its place."""
    assert few(tensor([1.0])) is None
    low, high = extremes(tensor([1.0, torch.nan, 0.0]))
    assert math.isnan(low) and math.isnan(high)
