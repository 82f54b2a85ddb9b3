"""The write over a tensor that autograd had saved: which it was, or that it is not known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cudalens.core.call import NodeMark
from cudalens.core.evidence_types import InPlaceChange
from cudalens.recorder import Recorder
from cudalens.recorder.saved_tensor import find_modified

SAID = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: [torch.FloatTensor [2]], which is output 0 of ExpBackward0, is at version {}; "
    "expected version 0 instead."
)


def found(
    forward: Callable[[], tuple[Tensor, Any]], version: int, said: str = SAID
) -> InPlaceChange | None:
    """Ask for the write behind a complaint of the node of what ``forward`` gives first."""
    with Recorder() as recorder:
        result, _kept = forward()
        node = NodeMark.of(result.grad_fn)
        pair = find_modified(recorder.snapshot(), said.format(version), node)
    return None if pair is None else pair[0]


def line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [index for index, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return number


def lines(steps: Any) -> list[int]:
    return [step.source.line for step in steps]


X = torch.ones(2, requires_grad=True)


def test_the_write_and_the_call_that_had_saved() -> None:
    def forward() -> tuple[Tensor, Any]:
        w = torch.ones(2)
        y = X * w  # saves-it
        w.add_(1)  # writes-over-it
        return y, w

    change = found(forward, 1)
    assert change is not None
    assert (change.modified.op, lines([change.modified])) == (
        "torch.Tensor.add_",
        [line_of("writes-over-it")],
    )
    assert lines(change.savers) == [line_of("saves-it")]
    assert lines(change.writes) == [line_of("writes-over-it")]
    assert not change.is_parameter and change.module is None


@pytest.mark.parametrize("version", [0, 2])
def test_a_version_that_no_write_led_to_proves_nothing(version: int) -> None:
    def forward() -> tuple[Tensor, Any]:
        w = torch.ones(2)
        y = X * w
        w.add_(1)
        return y, w

    assert found(forward, version) is None


def test_all_writes_since_are_told_and_the_last_is_the_one() -> None:
    def forward() -> tuple[Tensor, Any]:
        w = torch.ones(2)
        w.sub_(1)
        y = X * w
        w.add_(1)  # first-write
        w.mul_(2)  # second-write
        return y, w

    change = found(forward, 3)
    assert change is not None and change.modified.op == "torch.Tensor.mul_"
    assert lines(change.writes) == [line_of("first-write"), line_of("second-write")]
    assert found(forward, 2) is None


def test_the_first_write_of_a_line_stands_for_it() -> None:
    def forward() -> tuple[Tensor, Any]:
        w = torch.ones(2)
        y = X * w
        w.add_(1).mul_(2)  # both-writes
        return y, w

    change = found(forward, 2)
    assert change is not None and change.modified.op == "torch.Tensor.mul_"
    assert [it.op for it in change.writes] == ["torch.Tensor.add_"]
    assert lines(change.writes) == [line_of("both-writes")]


def test_writes_to_two_tensors_are_told_in_their_order() -> None:
    def forward() -> tuple[Tensor, Any]:
        v, w = X + 1, X + 2
        y = v * w
        v.add_(1)  # to-the-first
        w.add_(1)  # to-the-second
        v.mul_(2), w.mul_(2)  # to-both
        return y, (v, w)

    change = found(forward, 2)
    assert change is not None and change.modified.op == "torch.Tensor.mul_"
    order = ["to-the-first", "to-the-second", "to-both"]
    assert lines(change.writes) == [*map(line_of, order)]


def test_a_write_before_it_was_saved_is_none() -> None:
    def forward() -> tuple[Tensor, Any]:
        w = torch.ones(2)
        w.add_(1)
        return X * w, w

    assert found(forward, 1) is None


def test_writes_of_two_lines_prove_neither() -> None:
    def forward(both: bool) -> Callable[[], tuple[Tensor, Any]]:
        def run() -> tuple[Tensor, Any]:
            v, w = torch.ones(2, requires_grad=True) * 1, torch.ones(2)
            y = v * w
            with torch.no_grad():
                w.add_(1)
                if both:
                    v.add_(1)
            return y, (v, w)

        return run

    assert found(forward(False), 1) is not None
    assert found(forward(True), 1) is None


def test_two_ops_of_one_line_are_told_without_an_op() -> None:
    def forward() -> tuple[Tensor, Any]:
        v, w = torch.ones(2, requires_grad=True) * 1, torch.ones(2)
        y = v * w
        with torch.no_grad():
            v.add_(1), w.mul_(2)  # both-of-them
        return y, (v, w)

    change = found(forward, 1)
    assert change is not None and change.modified.op is None
    assert lines([change.modified]) == [line_of("both-of-them")]


def test_a_parameter_is_told() -> None:
    def forward() -> tuple[Tensor, Any]:
        w = nn.Parameter(torch.ones(2))
        y = X * w
        with torch.no_grad():
            w.add_(1)
        return y, w

    change = found(forward, 1)
    assert change is not None and change.is_parameter


class Own(nn.Module):
    """A module of the user's with an option of that name."""

    inplace = True

    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


class OfALibrary(nn.ReLU):
    """A module of a library whose name begins like torch's."""

    __module__ = "torchvision.ops"


@pytest.mark.parametrize(
    ("module", "expected"),
    [(nn.ReLU(inplace=True), "ReLU"), (Own(), None), (OfALibrary(inplace=True), None)],
)
def test_the_module_of_torch_that_writes_in_place(module: nn.Module, expected: str | None) -> None:
    def forward() -> tuple[Tensor, Any]:
        w = torch.ones(2)
        y = X * w
        module(w)
        return y, w

    change = found(forward, 1)
    assert change is not None and change.module == expected


def test_another_message_and_no_node_prove_nothing() -> None:
    def forward() -> tuple[Tensor, Any]:
        w = torch.ones(2)
        y = X * w
        w.add_(1)
        return y, w

    assert found(forward, 1, "something else is at version {};") is None
    with Recorder() as recorder:
        kept = forward()
        assert find_modified(recorder.snapshot(), SAID.format(1), None) is None
    assert kept is not None


@pytest.mark.parametrize("through", ["detach", "view"])
def test_a_write_through_what_shares_the_versions(through: str) -> None:
    def forward() -> tuple[Tensor, Any]:
        y = X.exp()
        y.data.mul_(2)  # counts for itself
        shown = y.detach() if through == "detach" else y.detach().view(2)
        shown += 1  # counts
        return y, shown

    change = found(forward, 1)
    assert change is not None
    assert lines([change.modified]) == lines(change.writes) == [line_of("counts")]


def test_a_write_through_data_is_not_what_autograd_notices() -> None:
    def forward() -> tuple[Tensor, Any]:
        y = X.exp()
        y.data[:1].mul_(2)
        return y, None

    assert found(forward, 1) is None
