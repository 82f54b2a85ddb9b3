"""What the integers at fault number, and which tensor of the line they were cut out of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.evidence_types import CallContext, OwnerModule
from cudalens.core.report import Evidence
from cudalens.core.report_types import TensorFact
from cudalens.diagnosis.hints._roles import (
    bad_values,
    fault,
    is_run,
    is_vocabulary,
    name_of,
    origin,
    role_of,
    table_name,
)
from tests.hint_evidence import (
    TRANSFORMERS,
    bce,
    bert,
    gathered,
    indexed,
    labels,
    lookup,
    one_hot,
    out_of_range,
    tensor,
)


def with_violation(evidence: Evidence, **facts: Any) -> Evidence:
    assert evidence.violation is not None
    return replace(evidence, violation=replace(evidence.violation, **facts))


# --- the fault ------------------------------------------------------------------------------------


def test_the_tensor_at_fault_is_the_one_of_the_list() -> None:
    one, two = tensor("indices[0]", "a", [0]), tensor("indices[1]", "b", [9])
    evidence = replace(
        with_violation(indexed("at"), argument="indices", list_position=1), tensors=(one, two)
    )
    found = fault(evidence)
    assert found is not None and found[1] is two
    assert fault(with_violation(evidence, list_position=2)) is None
    first = fault(with_violation(evidence, list_position=0))
    assert first is not None and first[1] is one
    assert fault(Evidence()) is None


def test_bad_values_are_those_outside_the_bound_that_nothing_allows() -> None:
    assert bad_values(labels([0, 9, -100, 10, -1], 10)) == {10, -1}
    assert bad_values(labels([0, 9], 9)) == {9}
    assert bad_values(Evidence()) == frozenset()


def test_the_listed_bad_values_where_there_are_too_many_to_know_all() -> None:
    many = [*range(40), 77, 78]
    assert bad_values(lookup(many, 40)) == {77, 78}
    assert lookup(many, 40).tensors[0].summary.unique is None
    assert bad_values(bce([0.5, 1.5])) == frozenset()


# --- the role -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evidence", "role"),
    [
        (labels([3], 3), "label"),
        (labels([3], 3, shape=(1, 1, 1)), "label"),
        (out_of_range("aten::nll_loss_backward", "target", [3], 3), None),
        (out_of_range("aten::nll_loss_forward", "weight", [3], 3), None),
        (lookup([5], 5), "token"),
        (out_of_range("aten::embedding", "weight", [5], 5), None),
        (out_of_range("aten::embedding_dense_backward", "indices", [5], 5), None),
        (one_hot([5], "F.one_hot(y, 4)"), "one_hot"),
        (indexed("at"), "index"),
        (bce([1.5]), None),
        (Evidence(), None),
    ],
)
def test_the_role_by_the_op(evidence: Evidence, role: str | None) -> None:
    assert role_of(evidence) == role


def test_a_scatter_of_ones_is_a_one_hot_code() -> None:
    def role(value: str, op: str = "aten::scatter_") -> str | None:
        return role_of(out_of_range(op, "index", [5], 4, scalars={"value": value}))

    assert [role(value) for value in ("1", "1.0", "True", "2")] == ["one_hot"] * 3 + ["index"]
    assert role("1", "aten::scatter") == "one_hot"
    assert role("1", "aten::scatter_add") == "index"


def test_what_has_no_bound_by_a_size_is_no_index() -> None:
    evidence = indexed("at")
    assert role_of(with_violation(evidence, size=None)) is None
    assert role_of(with_violation(evidence, is_index=False)) is None
    floats = tensor("indices", "at", [1.0, 5.0], dtype="float32")
    assert role_of(replace(evidence, tensors=(floats,))) is None


@pytest.mark.parametrize(
    ("path", "kind", "name", "role"),
    [
        ("bert.embeddings.word_embeddings", "Embedding", "ids", "token"),
        ("bert.embeddings.position_embeddings", "Embedding", "ids", "position"),
        ("bert.embeddings.token_type_embeddings", "Embedding", "ids", "segment"),
        ("layout.x_position_embeddings", "Embedding", "ids", "box"),
        ("gpt.wte", "Embedding", "position_ids", "token"),
        ("gpt.wpe", "Embedding", "ids", "position"),
        ("net.table", "PositionalEmbedding", "ids", "position"),
        ("net.table", "Embedding", "positions", "position"),
        ("net.table", "Embedding", "seg", "segment"),
        ("net.table", "Embedding", "decomposition", "token"),
        ("net.table", "Embedding", "x", "token"),
        (None, "Embedding", None, "token"),
    ],
)
def test_the_role_of_ids_by_their_table(
    path: str | None, kind: str, name: str | None, role: str
) -> None:
    assert role_of(lookup([5], 5, path=path, kind=kind, name=name)) == role


@pytest.mark.parametrize(
    ("library", "name", "role"),
    [("position_ids", "x", "position"), ("input", "positions", "token"), (None, "seg", "segment")],
)
def test_a_librarys_name_for_the_ids_comes_before_the_users(
    library: str | None, name: str, role: str
) -> None:
    names = () if library is None else (("indices", library),)
    context = CallContext(library_names=names)
    assert role_of(lookup([5], 5, path="net.table", name=name, call_context=context)) == role


def test_the_last_part_of_a_path_names_the_table() -> None:
    assert table_name(lookup([5], 5, path="net.Word_Emb")) == "word_emb"
    assert table_name(lookup([5], 5)) == ""


def test_a_table_of_a_language_model() -> None:
    assert is_vocabulary(lookup([5], 5, path="net.wte"))
    assert is_vocabulary(lookup([5], 5, name="INPUT_IDS"))
    assert is_vocabulary(bert([5], 5, "anything"))
    assert not is_vocabulary(lookup([5], 5, path="net.users", name="ids"))


def test_positions_that_a_library_gathers() -> None:
    ids = list(range(5))
    inside = {"call": "model(ids)", "library": TRANSFORMERS, "shape": (1, 5)}
    assert role_of(gathered(ids, 4, module_type="BertEmbeddings", **inside)) == "position"
    assert role_of(gathered(ids, 4, module_type="BertLayer", **inside)) == "index"
    assert role_of(gathered(ids, 4, name="p", module_type="BertEmbeddings", **inside)) == "index"
    jumps = [0, 2, 4, 6, 8]
    assert role_of(gathered(jumps, 4, module_type="BertEmbeddings", **inside)) == "index"


def test_positions_in_a_table_of_the_library() -> None:
    def role(text: str) -> str | None:
        evidence = with_violation(indexed("at"), related="self")
        ids = tensor("indices", None, [1, 2, 3, 4, 5])
        owner = OwnerModule(argument="self", text=text, kind="Net", attribute="weight")
        return role_of(replace(evidence, tensors=(ids,), owners=(owner,)))

    assert role("model.pos_embed") == "position"
    assert role("model.weight") == "index"


# --- runs and names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "shape", "is_one"),
    [
        ([3, 4, 5], None, True),
        ([3, 5, 6], None, False),
        ([3, 4, 5] * 2, (2, 3), True),
        ([3, 4, 5, 6] * 2, (4, 2), False),
        ([], (0,), False),
    ],
)
def test_values_that_follow_each_other(
    values: list[int], shape: tuple[int, ...] | None, is_one: bool
) -> None:
    assert is_run(tensor("x", "x", values, shape)) is is_one


@pytest.mark.parametrize(("high", "is_one"), [(19, False), (20, True), (39, True), (40, False)])
def test_a_run_by_its_ends_fills_more_than_half_of_a_row(high: int, is_one: bool) -> None:
    fact = tensor("x", "x", list(range(40)), (1, 40))
    assert fact.summary.unique is None
    assert is_run(replace(fact, summary=replace(fact.summary, max=high))) is is_one


def cut_from(*others: TensorFact, bad: tuple[int, ...] = (1, 9)) -> Evidence:
    return labels(bad, 9, name=None, others=others)


def test_the_tensor_at_fault_is_its_own_origin_where_the_line_names_it() -> None:
    evidence = labels([1, 9], 9)
    assert origin(evidence, "label") is evidence.tensors[0]
    other = labels([1, 9], 9, name="ids")
    assert origin(other, "label") is other.tensors[0]
    assert origin(Evidence(), "label") is None


def test_the_tensor_of_the_line_that_holds_the_bad_values() -> None:
    target = tensor(None, "batch['labels']", [1, 9, 3])
    assert origin(cut_from(target), "label") is target
    capitals = tensor(None, "Y_LABELS", [1, 9, 3])
    assert origin(cut_from(capitals), "label") is capitals
    good = tensor(None, "batch['labels']", [1, 2, 3])
    assert origin(cut_from(good), "label") is None
    for values, is_it in (([1, 8], True), ([2, 9], True), ([2, 8], False)):
        ends = tensor(None, "batch['labels']", [*values, 5])
        ends = replace(ends, summary=replace(ends.summary, unique=None))
        assert (origin(cut_from(ends), "label") is ends) is is_it
    two = tensor(None, "mask", [9, 1])
    assert origin(cut_from(target, two), "label") is None
    floats = tensor(None, "target", [1.0, 9.0])
    assert origin(cut_from(floats), "label") is None


def test_a_twin_of_the_same_size_and_ends() -> None:
    twin = tensor(None, "a", [1, 9], (1, 2))
    assert origin(cut_from(twin), "label") is twin
    assert origin(cut_from(twin, tensor(None, "b", [9, 1])), "label") is None
    assert origin(cut_from(tensor(None, "a", [1, 9, 9])), "label") is None
    assert origin(cut_from(tensor(None, "a", [0, 9])), "label") is None


def test_the_name_of_a_tensor_in_a_sentence() -> None:
    assert name_of(tensor("target", "y", [1])) == "y"
    assert name_of(tensor("target", "y + 1", [1])) == "the target"
    assert name_of(tensor("self", None, [1])) == "the input"
