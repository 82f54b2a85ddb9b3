"""What is said of tensors: those of the op, those of the line, and where the bad value is."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cudalens.core import _torch
from cudalens.core.report_types import Bounds, Offender, Offenders, Violation
from cudalens.core.tensor_values import find_offenders
from cudalens.evidence import tensors as module
from cudalens.evidence.tensors import (
    bad_key,
    facts_of,
    of_meta,
    same_spot,
    scalars_of,
    tensor_facts,
    tensors_of_output,
    with_own_planes,
)
from cudalens.guards.process import PROCESS
from cudalens.source.locate import CallSite, locate
from tests.probes import asked, same, site_of

X, IDS = torch.ones(2, 3), torch.tensor([[0, 7, 1]])


def violation(position: int | None = None, overwritten: tuple[str, ...] = ()) -> Violation:
    return Violation(
        headline="",
        argument="target",
        list_position=position,
        overwritten=overwritten,
        offenders=Offenders(count=1, total=3, first=(Offender(position=(1,), value=7),)),
    )


@pytest.mark.parametrize(("bad", "is_own"), [(255, True), (-100, False)])
def test_slices_are_those_of_the_users_tensor(bad: int, is_own: bool) -> None:
    """A loss gives its op a volume as one row; a tensor with other values stays out."""
    volume = torch.zeros(2, 3, 4, 5, dtype=torch.long)
    volume[1, 2, :, 0] = bad
    row = volume.reshape(2, 1, 60)
    bounds = Bounds(min=0, max=2, also_allowed=(-100,))
    found = find_offenders(row, (row < 0) | (row > 2), marked=bounds.also_allowed)
    finding = Violation(headline="", argument="target", offenders=found, bounds=bounds)
    site = site_of("torch.relu(vol.reshape(2, 1, 60))", "relu", vol=volume)
    seen = with_own_planes(finding, {"target": row}, site)
    assert found.planes[0].size == (2, 60)
    assert (seen.offenders.planes[0].size == (4, 5)) is is_own
    assert seen.offenders.planes[0].index == ((1, 2) if is_own else ())
    assert seen.offenders.first == found.first
    for other in (
        replace(finding, offenders=replace(found, planes=())),
        replace(finding, offenders=replace(found, count=99)),
        replace(finding, bounds=Bounds(min=0, max=None)),
    ):
        assert with_own_planes(other, {"target": row}, site) == other
    apart = site_of("torch.relu(vol.reshape(2, 1, 60))", "relu", vol=volume.flip(0))
    assert with_own_planes(finding, {"target": row}, apart) == finding


def test_the_key_of_the_tensor_at_fault() -> None:
    assert bad_key(violation()) == "target"
    assert bad_key(violation(0)) == "target[0]"


def test_scalars_are_plain_values() -> None:
    values = {"a": 1, "b": None, "c": "mean", "d": True, "e": X, "f": [1], "g": 0.5}
    wanted = (("a", "1"), ("b", "None"), ("c", "mean"), ("d", "True"), ("g", "0.5"))
    assert scalars_of(values) == wanted


@pytest.mark.parametrize(
    ("tensor", "operand", "position", "wanted"),
    [
        (torch.arange(6).view(2, 3), torch.arange(6), (4,), (1, 1)),
        (torch.arange(6), torch.arange(6).view(2, 3), (1, 2), (5,)),
        (torch.arange(6).view(2, 3), torch.arange(1, 7), (4,), None),
        (torch.arange(6), torch.arange(6), (4,), None),
        (torch.arange(6).view(2, 3), torch.arange(6).int(), (4,), None),
        (torch.arange(5), torch.arange(6), (4,), None),
    ],
)
def test_the_same_value_in_another_shape(
    tensor: Tensor, operand: Tensor, position: tuple[int, ...], wanted: Any
) -> None:
    assert same_spot(tensor, operand, position) == wanted


def test_what_the_line_shows_goes_before_what_a_library_made() -> None:
    site = site_of("torch.mm(x, y.T + 0)", "mm", x=X, y=X)
    values = {"self": X, "mat2": torch.zeros(3, 2)}
    facts = tensor_facts(values, site, "mat2")
    assert [item.argument for item in facts][:2] == ["self", "mat2"]
    facts = tensor_facts(values, site, "self")
    assert "mat2" not in [item.argument for item in facts]
    assert [item.argument for item in tensor_facts(values, CallSite(), None)] == ["self", "mat2"]
    site = site_of("torch.relu(y.view(-1) * 1)", "relu", y=IDS)
    for values, bad, has_y in (
        ({"other": X}, None, True),
        ({"target": X, "weight": IDS}, "target", True),
        ({"target": IDS.detach()}, "target", False),
    ):
        facts = tensor_facts(values, site, bad)
        assert [it.argument for it in facts if it.argument] == [*filter(None, [bad])]
        assert ("y" in [it.expression for it in facts]) is has_y


def test_the_bad_value_on_the_line_has_its_place() -> None:
    site = site_of("torch.relu(y.view(-1) * 1)", "relu", y=IDS)
    flat = IDS.view(-1)
    facts = tensor_facts({"target": flat}, site, "target", api=[("labels", IDS)], first_bad=(1,))
    told = {item.expression: item for item in facts}
    assert (told["y"].bad_at, told["y"].argument) == ((0, 1), "labels")
    unread = tensor_facts({"target": flat}, site, "target", first_bad=(1,), read=False)
    assert [(item.bad_at, item.summary.max) for item in unread] == [(None, None)] * len(unread)


@pytest.mark.parametrize(
    ("given", "shapes"),
    [
        (IDS.view(3, 1), [(3,), (3, 1)]),
        (IDS.view(3, 1) + 1, [(3,)]),
        (IDS.view(3), [(3,)]),
        (None, [(3,)]),
    ],
)
def test_a_target_without_a_name_has_the_shape_that_the_function_was_given(
    given: Any, shapes: list[tuple[int, ...]]
) -> None:
    operand = IDS.view(3)
    facts = facts_of(violation(), {"target": operand}, CallSite(), [("target", given)])
    assert [item.shape for item in facts] == shapes
    assert [item.bad_at is not None for item in facts] == [False, True][: len(shapes)]


def test_nothing_is_known_of_values_that_were_overwritten() -> None:
    site = CallSite()
    (fact,) = facts_of(violation(), {"target": IDS}, site, ())
    assert fact.summary.max == 7
    (fact,) = facts_of(violation(overwritten=("target",)), {"target": IDS}, site, ())
    assert (fact.summary.max, fact.shape) == (None, (1, 3))
    (fact,) = facts_of(violation(overwritten=("other",)), {"target": IDS}, site, ())
    assert fact.summary.max == 7
    parts = {"indices[0]": IDS, "values": IDS}
    facts = facts_of(violation(overwritten=("indices",)), parts, site, ())
    assert {item.argument: item.summary.max for item in facts} == {"indices[0]": None, "values": 7}


def test_what_cannot_be_read_leaves_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(tensor: Tensor) -> None:
        raise RuntimeError("no values")

    lines: list[str] = []
    monkeypatch.setattr(module, "summarise", refuses)
    monkeypatch.setattr(type(PROCESS), "internal_error", lambda self, line: lines.append(line))
    (fact,) = tensor_facts({"self": X}, CallSite(), None)
    assert fact.summary.max is None
    assert lines[0].startswith("values of self unavailable: RuntimeError")
    tensor_facts({"self": X}, site_of("torch.relu(x)", "relu", x=X), None)
    assert lines[1].startswith("values of x unavailable: RuntimeError")
    with monkeypatch.context() as context:
        context.setattr(module._torch, "is_plain", lambda tensor: False)
        tensor_facts({"self": X}, CallSite(), None)
    tensor_facts({"self": X.to("meta")}, CallSite(), None)
    assert len(lines) == 2


def test_what_is_said_of_a_tensor_without_its_values() -> None:
    tensor = torch.ones(2, 3, requires_grad=True)
    for item in (tensor, tensor.t() * 1, X):
        meta = _torch.meta_of(item)
        fact = of_meta("self", meta, "x")
        assert (fact.argument, fact.expression) == ("self", "x")
        names = ("shape", "dtype", "device", "stride", "requires_grad", "grad_fn")
        assert [getattr(fact, it) for it in names] == [getattr(meta, it) for it in names]


def test_the_tensors_of_a_models_output() -> None:
    class Output:
        def __init__(self) -> None:
            self.logits, self.size = X, 3

    assert tensors_of_output(Output()) == {}
    Output.__module__ = "transformers_of_mine"
    assert tensors_of_output(Output()) == {}
    Output.__module__ = "transformers.modeling_outputs"
    assert tensors_of_output(Output()) == {"logits": X}
    assert ast.literal_eval("{}") == tensors_of_output({"logits": X})


def test_a_target_with_a_name_needs_no_other_shape() -> None:
    """That of the function would be the same tensor twice."""
    flat = IDS.view(3)

    def ask(frames: Any) -> list[tuple[int, ...]]:
        site = locate(frames, {"target": flat}, same)
        facts = facts_of(violation(), {"target": flat}, site, [("target", IDS.view(3, 1))])
        return [item.shape for item in facts]

    assert asked("here(y)", ask, y=flat) == [[(3,)]]
    assert asked("here(z)", ask, z=1) == [[(3,), (3, 1)]]
