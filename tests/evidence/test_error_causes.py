"""What led to an exception of torch's: the write, the frozen parameters, the rows made before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

from cudalens.core.evidence_types import FreedGraph, InPlaceChange
from cudalens.core.graph_types import AutogradNeighbourhood, ProvenanceStep
from cudalens.core.report import ErrorFacts
from cudalens.core.report_types import LineRef
from cudalens.evidence import error_causes
from cudalens.evidence.collect import evidence_of
from cudalens.evidence.error_causes import frozen, other_rows, with_marked_write
from cudalens.evidence.failure import FailureContext
from cudalens.recorder import Recorder
from tests.builders import node
from tests.probes import asked


def failure(message: str, arguments: dict[str, Any], recorder: Any = None) -> FailureContext:
    error = ErrorFacts(type_name="RuntimeError", message=message)
    return FailureContext(
        entries=(), arguments=arguments, started=0.0, recorder=recorder, error=error
    )


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
    given = failure("", {})
    given.found.graph = AutogradNeighbourhood(nodes=made, edges=())
    given.found.modified = InPlaceChange(modified=step)
    found = with_marked_write(given)
    assert [item.role == "bad_input" for item in found.nodes] == marked
    assert [item.name for item, is_it in zip(found.nodes, marked, strict=True) if is_it] == (
        ["x += 1"] * sum(marked)
    )


WITHOUT = "element 1 of tensors does not require grad and does not have a grad_fn"


def test_the_tensor_without_a_graph_is_that_of_the_number() -> None:
    one, other = torch.ones(1), torch.ones(2)
    values = {"tensors[0]": one, "tensors[1]": other}
    assert error_causes._without_graph(failure(WITHOUT, values)) is other
    assert error_causes._without_graph(failure(WITHOUT, {"outputs[1]": other})) is other
    assert error_causes._without_graph(failure(WITHOUT, {**values, "self": one})) is one
    assert error_causes._without_graph(failure(WITHOUT, {"tensors[0]": one})) is None
    assert error_causes._without_graph(failure("another error", {"self": one})) is None


def test_frozen_parameters_are_named_with_the_line_that_froze_all() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    with Recorder() as recorder:
        weight.requires_grad_(False)
        loss = (weight * 2).sum()
        names, line = frozen(failure(WITHOUT, {"self": loss}, recorder))
    assert names == ("a parameter",)
    assert line is not None
    assert line.text == "weight.requires_grad_(False)"
    assert evidence_of(failure(WITHOUT, {"self": loss})).frozen == ()
    assert frozen(failure("another error", {"self": loss}, recorder)) == ((), None)


def test_the_number_without_a_graph_is_the_first_odd_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(error_causes, "number_cut", lambda name, _: name)
    recorder = SimpleNamespace(snapshot=lambda: None)
    given = failure("'float' object has no attribute 'backward'", {}, recorder)
    assert error_causes.cut_of_graph(given) is None
    odd = (SimpleNamespace(name="loss.item()"), SimpleNamespace(name="scale"))
    given.found.refused_arguments = SimpleNamespace(odd_arguments=odd)
    assert error_causes.cut_of_graph(given) == "loss.item()"


ROWS = "Expected input batch_size (4) to match target batch_size (2)."


def test_the_line_that_made_other_rows_is_looked_for_by_their_numbers() -> None:
    with Recorder() as recorder:
        made = torch.ones(2, 6).reshape(4, 3)
        values = {"number": torch.tensor(4), "input": made, "target": torch.ones(2)}
        found = other_rows(failure(ROWS, values, recorder))
        assert found is not None
        three = torch.ones(2, 6).reshape(3, 4)
        assert other_rows(failure(ROWS, {"weight": three}, recorder)) is None
        assert other_rows(failure("another error", values, recorder)) is None
        assert other_rows(failure(ROWS, {"target": torch.ones(2)}, recorder)) is None
    assert evidence_of(failure(ROWS, values)).regrouped is None


@pytest.mark.parametrize(
    ("message", "is_asked"), [("size mismatch", True), ("no\nsize mismatch", False)]
)
def test_a_lost_batch_is_looked_for_behind_the_call_and_its_forward_call(
    message: str, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_causes, "lost_dimension", lambda tensors, _: tensors)
    own, kept = torch.ones(1), torch.ones(2)
    call = SimpleNamespace(inputs=[ref(kept), lambda: None])
    snapshot = SimpleNamespace(forward_call={7: call}.get)
    given = failure(message, {"self": own}, SimpleNamespace(snapshot=lambda: snapshot))
    given.call = SimpleNamespace(node=None)  # type: ignore[assignment]
    assert error_causes.lost_batch(given) == ([own] if is_asked else None)
    given.call.node = SimpleNamespace(sequence_nr=7)
    assert error_causes.lost_batch(given) == ([own, kept] if is_asked else None)


def test_other_shapes_are_those_of_the_users_innermost_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, library = torch.ones(2, 3), dict[str, Any]()
    monkeypatch.setattr(error_causes, "named_tensors", lambda _: [("x", x), ("y", x)])
    earlier = lambda name, it, code, _: ((4, 3), code.co_name) if name == "x" else None
    monkeypatch.setattr(error_causes, "earlier_shape", earlier)
    exec(compile("import sys\nat = sys._getframe()", torch.overrides.__file__, "exec"), library)

    def ask(frames: Any) -> Any:
        given = failure("", {}, SimpleNamespace(snapshot=lambda: None))
        given.entries = [*frames, library["at"]]
        return error_causes.other_shapes(given)

    assert asked("def f():\n    here()\nf()", ask) == [(("x", (2, 3), (4, 3), "f"),)]


NET, OTHER, LOOSE = nn.Linear(2, 12), nn.Linear(2, 12), nn.Parameter(torch.ones(12, 2))
HELD = {"net": NET}


@pytest.mark.parametrize(
    ("written", "shape", "held", "name"),
    [
        ([NET.weight, NET.bias], "12, 2", HELD, "net.weight"),
        ([NET.weight, NET.bias], "2, 12", HELD, "net.weight"),  # a linear layer saves a view
        ([NET.weight, NET.bias], "12", HELD, "net.bias"),
        ([NET.weight], "12, 3", HELD, None),
        ([NET.weight, NET.weight * 2], "12, 2", HELD, "net.weight"),
        ([NET.weight], "12, 2", {"net": NET, "same": NET}, "net.weight"),
        ([NET.weight], "12, 2", {"_net": NET}, None),
        # Which of two it is, the shape does not tell, whether both have names or one has.
        ([NET.weight, OTHER.weight], "12, 2", {"net": NET, "other": OTHER}, None),
        ([NET.weight, LOOSE], "12, 2", HELD, None),
    ],
)
def test_the_parameter_that_backward_misses_is_named_by_its_shape(
    written: list[Any], shape: str, held: dict[str, Any], name: str | None
) -> None:
    message = f"modified by an inplace operation: [torch.FloatTensor [{shape}]] is at version 2"
    write: Any = SimpleNamespace(written=[SimpleNamespace(tensor=ref(it)) for it in written])

    def ask(frames: Any) -> str | None:
        given = failure(message, {})
        given.entries = frames
        return error_causes._parameter_name(write, given)

    assert asked("here()", ask, **held) == [name]


@pytest.mark.parametrize("is_known", [True, False])
def test_the_way_to_a_change_is_looked_for_from_a_known_node(
    monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    freed, asked = FreedGraph(node="MulBackward0"), []

    def freed_graph(*arguments: Any) -> FreedGraph:
        asked.append(arguments[4])
        return freed

    monkeypatch.setattr(
        error_causes, "find_modified", lambda *_: (InPlaceChange(modified=STEP), None)
    )
    monkeypatch.setattr(error_causes, "freed_graph", freed_graph)
    monkeypatch.setattr(error_causes, "stale_lines", lambda *_: (LINE,))
    monkeypatch.setattr(error_causes, "is_shared", lambda call: True)
    monkeypatch.setattr(error_causes, "_parameter_name", lambda call, failure: "w")
    recorder = SimpleNamespace(snapshot=lambda: None, beyond_ring=lambda what: what)
    given = failure(f"has been {error_causes.MODIFIED}", {}, recorder)
    given.call = SimpleNamespace(node="node" if is_known else None)
    changed, way = error_causes.change_or_freed(given)
    assert changed is not None
    assert (changed.name, changed.is_shared, changed.stale) == ("w", True, (LINE,))
    assert (way, asked) == ((freed, ["node"]) if is_known else (None, []))
    assert given.limits.lines == []
    # The same for a graph that was freed, where a limit says what is not known.
    given = failure(error_causes.FREED, {}, recorder)
    given.call = SimpleNamespace(node="node" if is_known else None)
    assert error_causes.change_or_freed(given) == (None, freed if is_known else None)
    assert len(given.limits.lines) == (0 if is_known else 1)
    monkeypatch.setattr(error_causes, "freed_graph", lambda *_: None)
    given = failure(error_causes.FREED, {}, recorder)
    given.call = SimpleNamespace(node="node" if is_known else None)
    assert error_causes.change_or_freed(given) == (None, None)
    assert given.limits.lines == ["the op whose saved tensors were freed"]
    assert error_causes.change_or_freed(failure("another error", {}, recorder)) == (None, None)


def test_a_write_that_is_not_recorded_any_more_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_causes, "find_modified", lambda *_: None)
    recorder = SimpleNamespace(snapshot=lambda: None, beyond_ring=lambda what: what)
    given = failure(f"has been {error_causes.MODIFIED}", {}, recorder)
    assert error_causes.change_or_freed(given) == (None, None)
    assert given.limits.lines == ["the op that modified the tensor in place"]
