"""What is read of an exception: the call behind it, its op and phase, and whether CUDA lives on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudalens.core.call import ApiCall, Call, NodeMark
from cudalens.core.graph_types import AutogradNeighbourhood, ProvenanceStep
from cudalens.core.limits import Limits
from cudalens.core.report import ErrorFacts
from cudalens.core.report_types import LineRef
from cudalens.evidence import exception
from cudalens.evidence.collect import FailureContext
from cudalens.evidence.exception import failed_call
from cudalens.recorder import Recorder
from cudalens.recorder.sites import Site
from tests.builders import node

MARK = NodeMark("MulBackward0", 7)
RAISED, FATAL = ApiCall(func=torch.mm), ApiCall(func=torch.exp)
NOTED = ApiCall(func=None, node=MARK)
"""Noted on autograd's own thread, before torch raised it."""


@pytest.mark.parametrize(
    ("fatal", "is_over", "raised", "is_lost", "wanted"),
    [
        (None, False, RAISED, True, (RAISED, False)),
        (FATAL, True, RAISED, True, (FATAL, True)),
        (FATAL, True, RAISED, False, (RAISED, False)),
        (FATAL, False, RAISED, True, (RAISED, False)),
        (FATAL, True, FATAL, True, (FATAL, False)),
        (None, True, RAISED, True, (None, False)),
        (FATAL, True, None, True, (FATAL, True)),
        (NOTED, True, ApiCall(func=torch.mm, node=MARK), True, None),
        (NOTED, True, RAISED, True, (NOTED, True)),
    ],
)
def test_the_call_that_failed_or_had_ended_the_context_before(
    fatal: Any, is_over: bool, raised: Any, is_lost: bool, wanted: Any
) -> None:
    recorder = SimpleNamespace(fatal=fatal, is_over=is_over)
    found = failed_call(recorder, raised, is_lost=is_lost)
    assert found == ((raised, False) if wanted is None else wanted)
    assert failed_call(None, raised, is_lost=is_lost) == (None, False)


@pytest.mark.parametrize(
    ("call", "name", "overload", "phase"),
    [
        (ApiCall(func=torch.ops.aten.add.Tensor), "aten::add", "Tensor", "forward"),
        (ApiCall(func=torch.mm), "torch.mm", "", "forward"),
        (ApiCall(func=None, node=MARK), "MulBackward0", "", "backward"),
        (ApiCall(func=torch.Tensor.backward, node=MARK), "MulBackward0", "", "backward"),
        (ApiCall(func=torch.mm, node=MARK), "torch.mm", "", "backward"),
        (ApiCall(func=torch.Tensor.backward), "torch.Tensor.backward", "", "backward"),
        (ApiCall(func=torch.mm, site=Site("optimizer", None)), "torch.mm", "", "optimizer"),
    ],
)
def test_the_op_and_the_phase_of_a_call(
    call: ApiCall, name: str, overload: str, phase: str
) -> None:
    op = exception._op_of(call)
    assert (op.name, op.overload or "", exception._phase_of(call)) == (name, overload, phase)


def error(code: int, before: BaseException | None = None) -> BaseException:
    made = (
        torch.AcceleratorError("CUDA error: it ended")
        if hasattr(torch, "AcceleratorError")
        else RuntimeError("CUDA error: it ended")
    )
    made.error_code = code  # type: ignore[attr-defined]
    made.__context__ = before
    return made


def test_what_ended_a_capture_is_the_cause_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    first = RuntimeError("CUDA error: not permitted")
    of_device = [True]
    monkeypatch.setattr(exception.lost_context, "is_of_device", lambda error: of_device[-1])
    end = error(901, first)
    assert exception._cause_in_capture(end) is first
    for other in (error(900, first), error(901), ValueError()):
        assert exception._cause_in_capture(other) is other
    of_device.append(False)
    assert exception._cause_in_capture(end) is end


@pytest.mark.parametrize(
    ("initialized", "of_device", "unanswered", "lives"),
    [
        (False, True, True, None), (True, True, True, None), (True, True, False, True),
        (True, False, True, True),
    ],
)  # fmt: skip
def test_whether_the_device_lives_on(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, of_device: bool, unanswered: bool,
    lives: bool | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(exception.lost_context, "is_of_device", lambda error: of_device)
    monkeypatch.setattr(exception.lost_context, "is_unanswered", lambda: unanswered)
    assert exception._lives_on(ValueError()) is lives


LINE = LineRef(line=3, text="x += 1", cell=1)
STEP = ProvenanceStep(op="torch.add", source=LINE)


@pytest.mark.parametrize(
    ("nodes", "step", "marked"),
    [
        ([("torch.add", LINE), ("torch.mul", LINE)], STEP, [True, False]),
        ([("torch.add", LINE), ("torch.add", LINE)], STEP, [False, False]),
        ([("torch.mul", LINE)], STEP, [False]),
        ([("torch.add", None)], STEP, [False]),
        ([("torch.add", LINE)], None, [False]),
        ([("torch.add", LINE)], ProvenanceStep(op="torch.add"), [False]),
        ([("torch.add", LINE)], ProvenanceStep(source=LINE), [False]),
    ],
)
def test_the_node_of_a_write_is_marked_where_it_is_the_only_one(
    nodes: Any, step: Any, marked: list[bool]
) -> None:
    made = tuple(node(str(at), op, source=line) for at, (op, line) in enumerate(nodes))
    graph = AutogradNeighbourhood(nodes=made, edges=())
    found = exception._with_marked_write(graph, step)
    assert [item.role == "bad_input" for item in found.nodes] == marked
    assert [item.name for item, is_it in zip(found.nodes, marked, strict=True) if is_it] == (
        ["x += 1"] * sum(marked)
    )


def failure(message: str, values: dict[str, Any], recorder: Any = None) -> FailureContext:
    return FailureContext(
        call=Call(), values=values, entries=(), started=0.0, limits=Limits(), recorder=recorder,
        error=ErrorFacts(type_name="RuntimeError", message=message),
    )  # fmt: skip


WITHOUT = "element 1 of tensors does not require grad and does not have a grad_fn"


def test_the_tensor_without_a_graph_is_that_of_the_number() -> None:
    one, other = torch.ones(1), torch.ones(2)
    values = {"tensors[0]": one, "tensors[1]": other}
    assert exception._without_graph(failure(WITHOUT, values)) is other
    assert exception._without_graph(failure(WITHOUT, {"outputs[1]": other})) is other
    assert exception._without_graph(failure(WITHOUT, {**values, "self": one})) is one
    assert exception._without_graph(failure(WITHOUT, {"tensors[0]": one})) is None
    assert exception._without_graph(failure("another error", {"self": one})) is None


def test_frozen_parameters_are_named_with_the_line_that_froze_all() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with Recorder() as recorder:
        weight.requires_grad_(False)
        loss = (weight * 2).sum()
        names, line = exception._frozen(failure(WITHOUT, {"self": loss}, recorder))
    assert names == ("a parameter",)
    assert line is not None
    assert line.text == "weight.requires_grad_(False)"
    assert exception._frozen(failure(WITHOUT, {"self": loss})) == ((), None)
    assert exception._frozen(failure("another error", {"self": loss}, recorder)) == ((), None)


ROWS = "Expected input batch_size (4) to match target batch_size (2)."


def test_the_line_that_made_other_rows_is_looked_for_by_their_numbers() -> None:
    with Recorder() as recorder:
        made = torch.ones(2, 6).reshape(4, 3)
        values = {"input": made, "target": torch.ones(2), "number": torch.tensor(4)}
        found = exception._regrouped(failure(ROWS, values, recorder))
        assert found is not None
        assert exception._regrouped(failure("another error", values, recorder)) is None
        assert exception._regrouped(failure(ROWS, {"target": torch.ones(2)}, recorder)) is None
    assert exception._regrouped(failure(ROWS, values)) is None


@pytest.mark.parametrize(
    ("root", "path", "text"),
    [("D", "2.weight", "D[2].weight"), ("net", "a.b", "net.a.b"), ("net", "0", "net[0]")],
)
def test_a_parameter_is_spelled_as_code_names_it(root: str, path: str, text: str) -> None:
    assert exception._spelled(root, path) == text
