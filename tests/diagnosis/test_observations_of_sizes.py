"""Observations of the size behind a bound and of sizes beside it: with their facts, and without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.evidence_types import Binding, BoundOrigin, DatasetColumn
from cudalens.core.graph_types import AutogradNeighbourhood
from cudalens.core.report import Evidence
from cudalens.core.report_types import LineRef, OpName, SourceSpan
from tests.builders import fact, node
from tests.hint_evidence import (
    Bound,
    bert,
    exchanged,
    gathered,
    labels,
    lookup,
    made,
    observations,
    observed,
    tensor,
    with_offenders,
)

# --- the bound ------------------------------------------------------------------------------------


def test_the_line_that_chose_the_number_and_the_one_that_made_the_table() -> None:
    origin = BoundOrigin(
        at=SourceSpan(cell=1, line=11, text="model = Recommender(100, 64)"),
        expression="Recommender(100, 64)",
        holder="model.items",
        made=LineRef(cell=1, line=5, text="self.items = nn.Embedding(items, 8)"),
        made_by="nn.Embedding(items, 8)",
    )
    evidence = with_offenders(lookup([64, 1], 64, bound=origin))
    (item,) = [it for it in observations(evidence) if it.kind == "bound"]
    assert item.text == (
        "64 rows, set in line 11: Recommender(100, 64) "
        "(model.items is made in line 5: nn.Embedding(items, 8))"
    )
    assert [(it.line, it.mark) for it in item.sources] == [
        (11, "64 rows are set here"),
        (5, "model.items is made here"),
    ]


def test_a_line_that_made_the_table_of_a_number_from_elsewhere_has_not_set_it() -> None:
    origin = BoundOrigin(
        at=SourceSpan(cell=1, line=5, text="self.items = nn.Embedding(cfg.n, 8)"),
        expression="nn.Embedding(cfg.n, 8)",
        holder="model.items",
        is_set=False,
    )
    evidence = with_offenders(lookup([64, 1], 64, bound=origin))
    (item,) = [it for it in observations(evidence) if it.kind == "bound"]
    assert [it.mark for it in item.sources] == ["model.items is made here (64 rows)"]
    assert "set" not in item.text
    assert observed(replace(evidence, bound=replace(origin, holder=None)), "bound") == []


def test_a_bound_of_the_failing_line_is_not_repeated() -> None:
    origin = BoundOrigin(at=SourceSpan(cell=1, line=9), expression="torch.zeros(3)")
    assert observed(with_offenders(lookup([7, 1], 3, bound=origin)), "bound") == []


def test_of_values_that_are_not_finite_no_size_is_said() -> None:
    evidence = with_offenders(
        lookup([7, 1], 5, bound=BoundOrigin(at=SourceSpan(cell=1, line=3), expression="n = 5"))
    )
    assert evidence.violation is not None
    for is_nonfinite in (False, True):
        violation = replace(evidence.violation, is_nonfinite=is_nonfinite)
        said = observed(replace(evidence, violation=violation), "bound")
        assert said == ([] if is_nonfinite else ["5 rows, set in line 3: n = 5"])


def test_what_a_data_set_and_a_model_say_of_the_number_of_classes() -> None:
    column = DatasetColumn(name="data", classes=10)
    assert observed(labels([1, 9], 7, dataset_column=column), "bound") == ["data names 10 classes"]
    assert observed(lookup([1, 9], 7, dataset_column=column), "bound") == []


@pytest.mark.parametrize(
    ("code", "is_set", "text"),
    [
        ("n = 5", True, "5 rows, set in line 3: n = 5"),
        ("n = w.shape[0]", True, "5 rows, read in line 3: n = w.shape[0]"),
        ("n = w.size(0)", True, "5 rows, read in line 3: n = w.size(0)"),
        ("n = cfg", False, "5 rows, read in line 3: n = cfg"),
        ("make(n)", False, "5 rows, those of t, made in line 3: make(n)"),
    ],
)
def test_a_size_is_set_or_read(code: str, is_set: bool, text: str) -> None:
    at = SourceSpan(cell=1, line=3)
    origin = BoundOrigin(at=at, expression=code, holder="t", is_set=is_set)
    assert observed(with_offenders(lookup([7, 1], 5, bound=origin)), "bound") == [text]


ORIGIN = BoundOrigin(at=SourceSpan(cell=1, line=3), expression="n = 5")


def beside(evidence: Evidence, **layers: Binding) -> str:
    """Return what is said to change with a size that was set in line 3."""
    evidence = with_offenders(replace(evidence, bound=ORIGIN))
    (text,) = observed(evidence, "bound", Bound(**layers))
    return text.partition(", set in line 3: n = 5")[2]


def layer(code: str = "nn.Embedding(5, 2)", called: str = "Embedding", **more: Any) -> Binding:
    return made(code, 4, called=f"torch.nn.{called}", name="net.emb", **more)


def test_what_else_changes_with_the_size_of_a_table() -> None:
    table = lookup([7, 1], 5, call="emb(ids)", path="emb")
    shared = layer(tied="net.head", beside="net.other")
    assert beside(table, emb=shared) == ", and its weight is that of net.head too"
    assert beside(table, emb=layer(beside="net.head")) == ", and net.head has the same size"
    assert beside(table, emb=layer()) == ""
    assert beside(table) == ""
    assert beside(lookup([7, 1], 5, call="emb(ids)"), emb=shared) == ""


def test_the_layer_of_a_size_whose_line_is_not_known() -> None:
    table = with_offenders(lookup([7, 1], 5, call="emb(ids)", path="emb"))

    def said(line: int = 4, value: str | None = "Model(config)", **more: Any) -> list[str]:
        found = replace(made(value, line, name="net.emb"), **more)
        return observed(table, "bound", Bound(emb=found))

    text = "5 rows, those of net.emb, made in line 4: Model(config)"
    assert said() == [text]
    assert said(tied="net.head") == [f"{text}, and its weight is that of net.head too"]
    assert said(line=9) == []  # the failing line
    # The headline names the layer and its size.
    assert said(value=None) == []
    assert said(value=None, beside="net.head") == [
        "5 rows, those of net.emb, and net.head has the same size"
    ]
    (item,) = [
        it
        for it in observations(table, Bound(emb=made("Model(config)", 4, name="net.emb")))
        if it.kind == "bound"
    ]
    assert [(it.line, it.mark) for it in item.sources] == [(4, "net.emb is made here (5 rows)")]


@pytest.mark.parametrize(
    ("code", "called", "is_it"),
    [
        ("nn.Embedding(6, 2)", "Embedding", False),
        ("nn.Embedding(5, 6)", "Embedding", True),
        ("nn.EmbeddingBag(6, 2)", "EmbeddingBag", False),
        ("nn.Linear(6, 5)", "Linear", True),
        ("nn.Linear(5, 6)", "Linear", False),
        ("nn.Linear(6)", "Linear", True),
        ("nn.Embedding(n, 2)", "Embedding", True),
        ("make", "", True),
    ],
)
def test_a_layer_whose_line_shows_another_size_is_not_the_one(
    code: str, called: str, is_it: bool
) -> None:
    table = lookup([7, 1], 5, call="emb(ids)", path="emb")
    assert beside(table, emb=layer(code, called, tied="net.head")) == (
        ", and its weight is that of net.head too" if is_it else ""
    )


@pytest.mark.parametrize(
    ("shape", "path", "is_it"),
    [((5, 3), "head", True), ((4, 3), "head", False), ((), "head", False), ((5, 3), None, False)],
)
def test_the_layer_that_made_the_scores(
    shape: tuple[int, ...], path: str | None, is_it: bool
) -> None:
    near = node("p", "", "parameter", name="w", shape=shape, module_path=path)
    graph = AutogradNeighbourhood(nodes=(node("q", "aten::t"), near), edges=())
    scores = replace(labels([7, 1], 5), graph=graph)
    head = layer("nn.Linear(3, 5)", "Linear", tied="net.emb")
    assert (beside(scores, head=head) != "") is is_it


def test_one_row_is_no_many() -> None:
    origin = BoundOrigin(at=SourceSpan(cell=1, line=3), expression="n = 1")
    evidence = with_offenders(lookup([7, 1], 1, bound=origin))
    (item,) = [it for it in observations(evidence) if it.kind == "bound"]
    assert [it.mark for it in item.sources] == ["1 row is set here"]


# --- other dimensions, other tensors --------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "sizes", "shape", "is_said"),
    [
        ("aten::gather", (4, 10), (2, 1), True),
        ("aten::index_select", (4, 10), (2,), True),
        ("aten::index", (4, 10), (2,), False),
        ("aten::gather", (4, 10), (1, 2), False),
        ("aten::gather", (4, 11), (2, 1), False),
        ("aten::gather", (4, 10, 10), (2, 1, 1), False),
    ],
)
def test_the_other_dimension_that_has_as_many_places(
    op: str, sizes: tuple[int, ...], shape: tuple[int, ...], is_said: bool
) -> None:
    evidence = gathered([9, 2], 4, name="i", call="x.gather(0, i)", shape=shape)
    violation = evidence.violation
    assert violation is not None
    table = fact("self", f"float32[{','.join(map(str, sizes))}]", "x")
    known = replace(
        evidence,
        violation=replace(violation, dim=0),
        op=OpName(name=op),
        tensors=(*evidence.tensors, table),
    )
    text = "dimension 0 has 4 places, dimension 1 has 10"
    assert (text in observed(known, "pattern")) is is_said
    assert text not in observed(replace(known, violation=violation), "pattern")


@pytest.mark.parametrize(("most", "is_said"), [(8, True), (7, False)])
def test_the_other_index_that_is_outside_too(most: int, is_said: bool) -> None:
    """A guard stops at the first; the columns of (4, 8) go up to 7."""
    evidence = exchanged(most)
    text = f"ys is 1 … {most}, dimension 1 has 8 places"
    assert (text in observed(evidence, "values")) is is_said
    low = replace(evidence, tensors=(*evidence.tensors[:-1], other_index([-9 + 8 - most, 1])))
    assert any("ys is" in it for it in observed(low, "values")) is is_said
    mask = replace(
        evidence, tensors=(*evidence.tensors, tensor("indices[2]", "m", [1], None, "bool"))
    )
    assert not any("ys is" in it for it in observed(mask, "values"))


def other_index(values: list[int]) -> Any:
    return tensor("indices[1]", "ys", values)


def test_the_users_tensor_behind_the_ids_of_a_library() -> None:
    def said(values: list[int], name: str | None = None) -> list[str]:
        ids = tensor(None, "boxes", values)
        evidence = lookup([7, 8, 1], 5, name=name, call="model(boxes)", others=(ids,))
        return [it for it in observed(evidence, "values") if "boxes" in it]

    assert said([7, 8, 0]) == ["boxes is 0 … 8"]
    assert said([7, 0]) == []  # one number may be in it by chance
    assert said([7, 8, 1]) == []  # the very values of the index
    assert said([7, 8, 0], "ids") == []


@pytest.mark.parametrize(("table", "is_said"), [("word", True), ("position", False)])
def test_positions_that_a_library_counted_are_no_ids_of_the_users(
    table: str, is_said: bool
) -> None:
    ids = tensor(None, "ids", [7, 8, 0])
    evidence = bert([7, 8, 1], 5, f"{table}_embeddings", name=None, others=(ids,))
    assert ("ids is 0 … 8" in observed(evidence, "values")) is is_said
