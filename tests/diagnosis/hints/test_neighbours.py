"""Causes that look alike: what tells them apart, and what is said where nothing does."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

import pytest

from cudalens.core.evidence_types import CallContext, InPlaceChange
from cudalens.core.graph_types import FIRST_NAN, ProvenanceStep
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import Hint, LineRef
from tests import hint_evidence as given
from tests.hint_evidence import (
    ONE_TO_TEN,
    TRANSFORMERS,
    bce,
    drawn,
    exchanged,
    gathered,
    labels,
    lookup,
    out_of_range,
    step,
    tensor,
)

ELEVEN_OF_TWELVE = [*range(1, 11), 12]
GRAY = [0, 60, 120, 200] * 8
SCORES = {"the scores of a layer": True}
UNKNOWN = {"softmax makes weights of scores, abs() of errors": True}


def repeated(values: Sequence[int], count: int) -> list[int]:
    """Return ``count`` values, one after the other."""
    return [values[at % len(values)] for at in range(count)]


def part_of(expression: str, whole: list[int]) -> Evidence:
    """Return the evidence of labels 1 … 10 that are an expression of ``y``."""
    return labels(ONE_TO_TEN, 10, name=expression, others=(tensor(None, "y", whole),))


def edges(nodes: list[int], rows: int) -> Evidence:
    """Return the evidence of the first ends of edges between ``nodes``, looked up in ``rows``."""
    half = len(nodes) // 2
    return out_of_range(
        "aten::index", "indices[0]", nodes[:half], rows, low=-rows, expression="edge_index[0]",
        call="x[edge_index[0]]", others=(tensor(None, "edge_index", nodes, (2, half)),),
    )  # fmt: skip


def of_model(
    kind: str | None, values: list[int], pad: int | None = None, size: int = 50
) -> Evidence:
    """Return the evidence of labels in a loss inside transformers, for ``size`` outputs."""
    context = CallContext(model=kind, pad_token_id=pad)
    call = "model(ids, labels=y)"
    return labels(values, size, call=call, library=TRANSFORMERS, call_context=context)


def picked(values: list[int]) -> Evidence:
    return gathered(values, 5, name="i", call="z.gather(1, i)")


def length(values: list[int], name: str, op: str = "aten::index") -> Evidence:
    """Return the evidence of an index of that name into seven elements."""
    call = "x[rows, lengths]"
    return out_of_range(op, "indices[1]", values, 7, low=-7, expression=name, call=call)


def made_by(op: str, values: list[float]) -> Evidence:
    return bce(values, provenance=(step(op, "p = f(x)"),))


def drawn_of(op: str, values: list[float]) -> Evidence:
    return drawn(values, provenance=(step(op, "p = f(x)"),))


def first(evidence: Evidence) -> Hint:
    return given.words_of(evidence)[0]


# Evidence, all rules that speak on it, the fix of the first, and what else it says and does not.
TOLD: list[tuple[Evidence, str, str | None, *tuple[dict[str, bool], ...]]] = [
    # A tensor that the labels are a part of holds a 0: so the count starts there.
    (part_of("y[1:]", [0, *ONE_TO_TEN]), "observations", None),
    (part_of("y[1:]", [3, *ONE_TO_TEN]), "one_based_labels", "F.cross_entropy(z, y[1:] - 1)"),
    (part_of("y[1:].view(-1)", [0, *ONE_TO_TEN]), "observations", None),
    (part_of("y.argsort()", [0, *ONE_TO_TEN]), "one_based_labels",
     "F.cross_entropy(z, y.argsort() - 1)"),
    # With ignored labels among them nobody knows how many labels there are.
    (labels(repeated([1, 2, 3, 4], 14), 4), "one_based_labels", "F.cross_entropy(z, y - 1)"),
    (labels([*repeated([1, 2, 3, 4], 14), -100], 4), "observations", None),
    # Where row 0 is padding, ids count from 1 on purpose; ids from 2 on are any part of a list.
    (lookup([1, 2, 3, 4, 5], 5, path="movies", padding=-1), "one_based_ids", None,
     {"subtract 1": True}),
    (lookup([1, 2, 3, 4, 5], 5, path="movies", padding=0), "observations", None,
     {"subtract 1": False}),
    (lookup([1] + [10] * 7, 10, path="movies"), "observations", None, {"subtract 1": False}),
    (lookup([1] + [10] * 6, 10, path="movies"), "observations", None, {"subtract 1": False}),
    (lookup([2, 10], 10, path="movies"), "observations", None, {"subtract 1": False}),
    # Every text has a first segment: where no 0 is, the count starts at 1; nothing is merged.
    (lookup([1, 1, 2, 2], 2, name="seg", path="segment"), "segment_ids", "net(seg - 1)"),
    (lookup([0, 1, 2, 2], 2, name="seg", path="segment"), "segment_ids", None),
    (lookup([1, 2, 3], 2, name="seg", path="segment"), "segment_ids", None),
    # Which row a node of another number has nobody knows.
    (edges([10, 57, 33, 57], 3), "observations", None, {"10, 57": True, "need": False}),
    # Both ends of edges are shifted at once, and a 0 at the other end says that they are not.
    (edges([1, 2, 3, 6, 4, 5, 2, 0], 6), "observations", None, {"1-based": False}),
    # Where the line holds only halves, a fix of one would leave the other as it is.
    # Labels are numbered anew where none is a class, or so many would have shown more than these.
    (labels([-2, -1, 0, 1, 2], 5), "relabel", "F.cross_entropy(z, y + 2)"),
    (labels([-3, -1, 0, 1, 2], 5), "observations", None),
    (labels([-2, -1, 0, 1], 5), "observations", None),
    (labels([2019, 2020, 2021], 3), "relabel", "F.cross_entropy(z, y - 2019)"),
    (labels([3, 4, 5], 3), "relabel", "F.cross_entropy(z, y - 3)"),
    (labels([2, 3, 4], 3), "observations", None),
    (labels([0, 2, 4, 6], 4), "observations", None),
    (labels(repeated([0, 2, 4, 6], 11), 4), "observations", None),
    (labels(repeated([0, 2, 4, 6], 12), 4), "relabel", None),
    # Padding fills the ends of rows: one number a row may be an end mark, one inside is none.
    (labels([0, 3, 3, 1, 2, 3], 3, shape=(2, 1, 3)), "observations", None,
     {"end of rows": True, "need": False}),
    (labels([0, 1, 3, 1, 2, 3], 3, shape=(2, 1, 3)), "too_few_places", None),
    (labels([0, 3, 2, 1, 3, 3], 3, shape=(2, 1, 3)), "too_few_places", None),
    (labels([0, 3, 3, 1, 2, 3], 3), "too_few_places", None),
    # Rows that do not fit the other dimension are no columns.
    (exchanged(4), "observations", None),
    # Two numbers are a code where there are no others: a third one would become a half.
    (bce([-1.0, 1.0, 1.0], "target"), "labels_as_binary_target",
     "F.binary_cross_entropy(p, (t + 1) / 2)"),
    (bce([1.0, 2.0, 2.0], "target"), "labels_as_binary_target", "F.binary_cross_entropy(p, t - 1)"),
    (bce([1.0, 1.5, 2.0], "target"), "observations", None),
    # A loss of logits is right for scores, and wrong behind an activation.
    (made_by("aten::addmm", [-0.5, 0.5]), "not_probabilities",
     "F.binary_cross_entropy_with_logits(p, t)", {"the scores of a layer in line 4": True}),
    (made_by("aten::tanh", [-0.5, 0.5]), "not_probabilities", None,
     {"made by tanh in line 4": True}),
    (made_by("aten::relu", [0.0, 3.0]), "not_probabilities", None,
     {"made by relu in line 4": True}),
    (made_by("aten::mul", [-0.5, 0.5]), "not_probabilities", None,
     {"a probability is at least 0": True, "logits": False}),
    (made_by("aten::sub", [-0.5, 1.5]), "not_probabilities", None, {"as sub in line 4": True}),
    (made_by("aten::mul", [-0.5, 1.5]), "not_probabilities", None, {"If they are scores": True}),
    (made_by("aten::mul", [0.0, 1.5]), "not_probabilities", None,
     {"a probability is at most 1": True}),
    (made_by("aten::relu", [0.0, 120.5]), "not_probabilities", None,
     {"made by relu in line 4": True}),
    (made_by("aten::relu", [0.0, 120.0]), "image_not_divided", "F.binary_cross_entropy(p / 255, t)",
     {"like the bytes of an image: divide by 255": True}),
    # The padding id among the labels is proven where the tokenizer is at hand.
    # Token 0 is one that texts seldom hold: labels of a language model do not count from 1.
    # A setting is told to a number only for labels without a gap.
    (of_model("BertForTokenClassification", [0, 1, 2, 3], size=3), "too_few_places", None,
     {"they need 4 outputs, there are 3: num_labels=4": True}),
    # Four labels of class 1 and none of class 0: -1 stands for class 0 and marks nothing.
    (labels([1, 1, 1, -1], 2), "mark_not_ignored", None,
     {"// 2": True}),
    (labels([1, 1, 1, 1, -1, 0], 2), "mark_not_ignored", None,
     {"// 2": False}),
    (labels([1, 1, 1, 1, -1], 3), "mark_not_ignored", None,
     {"// 2": False}),
    (labels([-1, -1, -1, -1], 2), "mark_not_ignored", None,
     {"// 2": False}),
    # -1 … C-2 without a gap has a second explanation, and it is told.
    (labels([-1, 0, 1, 2], 4), "mark_not_ignored", None, {"-1 … 2": True}),
    # A step that merely passed the NaN on is not called the first one.
    (bce([0.5, math.nan], provenance=(step("aten::log", "h = x.log()", FIRST_NAN),)), "nan_before",
     None, {"Line 4": True}),
    (bce([0.5, math.nan], provenance=(step("aten::log", "h = x.log()"),)), "nan_before", None,
     {"line": False}),
    # A gather takes no negative index, and what one means there nobody knows.
    (picked([0, -1]), "observations", None, {"1 of 2 values is -1": True}),
    (picked([0, -100, 5]), "observations", None),
    # A length is one beyond the last position, which a length of 0 has not; others are no lengths.
    (length([8, 3], "lengths"), "observations", None),
    (length([7, 3], "lens_id2label", "aten::index_put_"), "observations", None),
    (length([7, 3], "silence"), "observations", None),
    (length([7, 3], "lengths", "aten::index_put_"), "observations", None),
    # Four numbers of four classes are numbered anew, and not those of three.
    (labels(GRAY, 3, shape=(1, 1, len(GRAY)), name="mask"), "observations", None),
    (labels(GRAY, 4, shape=(1, 1, len(GRAY)), name="mask"), "relabel", None),
    # Weights are logits where one end is further from 0 … 1 than rounding goes; differences around
    # 0 may be anything, unless a layer made them.
    (drawn([-2.5, 0.5]), "bad_weights", None, UNKNOWN),
    (drawn([-0.1, 1.0]), "bad_weights", None, UNKNOWN),
    (drawn([-1e-7, 1.5]), "bad_weights", None, UNKNOWN),
    (drawn([-1e-7, 1.0]), "observations", None),
    (drawn_of("aten::mul", [-0.5, 0.5]), "bad_weights", None),
    (drawn_of("aten::addmm", [-0.5, 0.5]), "bad_weights", None, SCORES),
    (drawn_of("aten::mul", [-0.5, 1.1]), "bad_weights", None, UNKNOWN),
    (drawn_of("aten::mul", [-1.1, 0.5]), "bad_weights", None, UNKNOWN),
    # Of a binary loss input or target is named; marks below 0 are told from classes above 1.
    (bce([0.0, 255.0]), "image_not_divided", "F.binary_cross_entropy(p / 255, t)",
     {"p runs from 0 to 255, like the bytes of an image": True}),
    # 255 and 156 are what -1 and -100 become in uint8, and may be other numbers.
    (labels([1, 2, 255, 156], 10, dtype="uint8"), "observations", None),
    (labels([1, 2, 255, 90], 10, dtype="uint8"), "observations", None),
    # Ids of half the width that were read as whole ones; large halves are mere bits.
]  # fmt: skip


@pytest.mark.parametrize("row", TOLD, ids=lambda row: f"{row[1] or 'nothing'}-{row[0].call_text}")
def test_causes_that_look_alike_are_told_apart(row: tuple[Any, ...]) -> None:
    """Each by what the values, their number, and the names around them prove."""
    evidence, expected, fix, *says = row
    hints = given.words_of(evidence)
    assert [item.rule for item in hints] == expected.split()
    assert [item.fix for item in hints[:1]] == [fix][: len(hints)]
    for text, is_said in says[0].items() if says else ():
        assert (text in f"{hints[0].text} {fix}") is is_said


# --- one measure for several rules ---------------------------------------------------------------


def of_all_roles(values: list[int], size: int) -> list[Evidence]:
    """Return the evidence of labels, ids, actions and codes of these values."""
    actions, rest = "actions[:, None]", {"expression": "y", "scalars": {"value": "1"}}
    return [
        labels(values, size),
        lookup(values, size, path="movies"),
        gathered(values, size, name=actions, call=f"q.gather(1, {actions})"),
        out_of_range("aten::scatter_", "index", values, size, **rest),
    ]


@pytest.mark.parametrize(
    ("values", "size", "fires"),
    [
        pytest.param([1, 2, 3, 4, 5], 5, True, id="all of five"),
        pytest.param([1, 2, 3, 4], 4, False, id="all of four, each once"),
        pytest.param(repeated([1, 2, 3, 4], 14), 4, True, id="all of four, 14 times"),
        pytest.param(repeated([1, 2, 3, 4], 13), 4, False, id="all of four, 13 times"),
        pytest.param(repeated([1, 2], 8), 2, True, id="both of two, 8 times"),
        pytest.param(repeated([1, 2], 7), 2, False, id="both of two, 7 times"),
        pytest.param([1, 3], 3, False, id="two of three"),
        pytest.param(repeated(ELEVEN_OF_TWELVE, 38), 12, True, id="one missing, 38 labels"),
        pytest.param(repeated(ELEVEN_OF_TWELVE, 37), 12, False, id="one missing, 37 labels"),
        pytest.param(
            repeated([1, *range(4, 13)], 200), 12, False, id="two missing, however many labels"
        ),
        pytest.param(repeated([2, 3, 4, 5], 40), 5, False, id="1 is missing too"),
        pytest.param([1, *range(3, 30), 32000], 32000, False, id="a few tokens of a vocabulary"),
        pytest.param(list(range(1, 101)), 100, False, id="too many to list the distinct ones"),
        pytest.param([0, 1, 2, 3, 4, 5], 5, False, id="0 is there"),
    ],
)
def test_one_based_means_that_zero_would_have_been_seen(
    values: list[int], size: int, fires: bool
) -> None:
    """Labels, ids, codes and actions that run from 1 to the size are told apart by one measure."""
    found = [first(item) for item in of_all_roles(values, size)]
    assert [item.text.count("run from 1 to") for item in found] == [fires] * 4
    names = ["one_based_labels", "one_based_ids"]
    assert not fires or [item.rule for item in found] == [*names, *names[::-1]]


@pytest.mark.parametrize("label", [50, 53])
@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("GPT2LMHeadModel", ""),
        ("LlamaForCausalLM", ""),
        ("BertForMaskedLM", ""),
        ("T5ForConditionalGeneration", ""),
        ("BertForSequenceClassification", "num_labels={}"),
        ("BertForTokenClassification", "num_labels={}"),
        ("ViTForImageClassification", "num_labels={}"),
        ("BertForMultipleChoice", ""),
        (None, ""),
    ],
)
def test_num_labels_is_for_heads_that_have_it(kind: str | None, setting: str, label: int) -> None:
    """A language model's outputs are its tokens; of a head that nobody knows no setting is told."""
    found = first(of_model(kind, [0, 3, label]))
    assert setting.format(50) in found.text
    assert ("num_labels" in found.text) is ("num_labels" in setting)


@pytest.mark.parametrize(
    ("code", "is_step"),
    [
        ("opt.step()", True),
        ("l1.backward(); opt.step()", True),
        ("if ready: opt.step()", True),
        ("clip_grad_norm_(ps, 1); nn.utils.clip_grad_norm_(ps, 1); opt.step()", True),
        ("x.add_(1); opt.step()", False),
        ("x += 1; opt.step()", False),
        ("l1.backward()", False),
        ("for step in steps:", False),
    ],
)
def test_a_step_is_named_wherever_it_stands_on_the_line(code: str, is_step: bool) -> None:
    """Beside another change in place nobody knows which of the two it was."""
    evidence = Evidence(
        error=ErrorFacts(
            type_name="RuntimeError",
            message="one of the variables needed for gradient computation has been modified by an "
            "inplace operation: [torch.FloatTensor [8, 3]], which is output 0 of AsStrided, is at "
            "version 2; expected version 1 instead.",
        ),
        modified=InPlaceChange(
            modified=ProvenanceStep(
                op="aten::_foreach_add_", source=LineRef(cell=3, line=7, text=code)
            )
        ),
    )
    found = first(evidence)
    assert found.rule == "out_of_place"
    assert found.text.startswith("the step changes the parameters") is is_step
    assert found.fix is None or ast.parse(found.fix)
