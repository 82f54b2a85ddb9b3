"""Causes that look alike: what tells them apart, and what is said where nothing does."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.evidence_types import CallContext, InPlaceChange
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import Hint, LineRef, ProvenanceStep
from tests import hint_evidence as given

ELEVEN_OF_TWELVE = [*range(1, 11), 12]


def rules(evidence: Evidence) -> tuple[str, ...]:
    return tuple(item.rule for item in given.hints_of(evidence))


def first(evidence: Evidence) -> Hint:
    return given.hints_of(evidence)[0]


def repeated(values: Sequence[int], count: int) -> list[int]:
    """Return ``count`` values, one after the other."""
    return [values[at % len(values)] for at in range(count)]


# --- counted from 1 ------------------------------------------------------------------------------


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
    assert ("one_based_labels" in rules(given.labels(values, size))) is fires
    assert ("one_based_ids" in rules(given.lookup(values, size, path="movies"))) is fires
    action = given.gathered(
        values, size, name="actions[:, None]", call="q.gather(1, actions[:, None])"
    )
    assert ("1-based" in first(action).text) is fires
    code = given.out_of_range(
        "aten::scatter_", "index", values, size, expression="y", scalars={"value": "1"}
    )
    assert rules(code) == ("one_based_labels" if fires else "too_few_places",)


@pytest.mark.parametrize(("lowest", "says"), [(1, True), (0, False)])
def test_where_zero_may_be_missing_by_chance_both_causes_are_named(lowest: int, says: bool) -> None:
    """Without a 0 among few values the other cause stays possible, and is told as such."""
    values, other = [lowest, 2, 10], "count from 1"
    found = [
        first(given.labels(values, 10)),
        first(given.lookup(values, 10, path="movies")),
        first(given.gathered(values, 10, name="actions", call="q.gather(1, actions)")),
        first(
            given.out_of_range(
                "aten::scatter_", "index", values, 10, expression="y", scalars={"value": "1"}
            )
        ),
    ]
    assert [other in item.text for item in found] == [says] * 4
    assert [item.fix for item in found] == [None] * 4


@pytest.mark.parametrize(
    ("expression", "whole", "fires"),
    [
        ("y[1:]", [0, *given.ONE_TO_TEN], False),
        ("y[1:]", [3, *given.ONE_TO_TEN], True),
        ("y[1:].view(-1)", [0, *given.ONE_TO_TEN], False),
        ("y.argsort()", [0, *given.ONE_TO_TEN], True),
    ],
)
def test_a_zero_beside_the_labels_was_counted_from(
    expression: str, whole: list[int], fires: bool
) -> None:
    """A tensor that the labels are a part of holds a 0: so the count starts there."""
    evidence = given.labels(
        given.ONE_TO_TEN, 10, name=expression, others=(given.tensor(None, "y", whole),)
    )
    assert ("one_based_labels" in rules(evidence)) is fires


def test_a_few_ignored_labels_leave_the_number_of_labels_unknown() -> None:
    """Fourteen labels of four classes are enough; with ignored ones among them, nobody knows."""
    values = repeated([1, 2, 3, 4], 14)
    assert rules(given.labels(values, 4)) == ("one_based_labels",)
    assert rules(given.labels([*values, -100], 4)) == ("too_few_places",)


@pytest.mark.parametrize(("classes", "says"), [(1000, True), (999, False)])
def test_a_label_as_large_as_a_vocabulary_may_be_padding(classes: int, says: bool) -> None:
    """A thousand outputs may be tokens, whose padding the loss ignores by another number."""
    found = first(given.labels([1, 7, classes], classes))
    assert found.rule == "too_few_places"
    assert ("if it is padding, use -100, which the loss ignores" in found.text) is says


@pytest.mark.parametrize(("padding", "rule"), [(-1, "one_based_ids"), (0, "too_few_places")])
def test_ids_from_one_beside_a_padding_row(padding: int, rule: str) -> None:
    """Where row 0 is padding, ids count from 1 on purpose, and nothing is to be taken away."""
    found = first(given.lookup([1, 2, 3, 4, 5], 5, path="movies", padding=padding))
    assert found.rule == rule
    assert "subtract 1" not in found.text


@pytest.mark.parametrize(("lowest", "says"), [(1, True), (2, False)])
def test_ids_that_may_count_from_one_begin_there(lowest: int, says: bool) -> None:
    """Ids from 2 on are any part of a longer list."""
    found = first(given.lookup([lowest, 10], 10, path="movies"))
    assert ("subtract 1" in found.text) is says


@pytest.mark.parametrize(
    ("values", "fix"), [([1, 1, 2, 2], "net(seg - 1)"), ([0, 1, 2, 2], None), ([1, 2, 3], None)]
)
def test_segments_begin_with_the_first_sentence(values: list[int], fix: str | None) -> None:
    """Every text has a first segment: where no 0 is, the count starts at 1; nothing is merged."""
    assert first(given.lookup(values, 2, name="seg", path="segment")).fix == fix


# --- graphs --------------------------------------------------------------------------------------


def edges(nodes: list[int], rows: int, expression: str | None = "edge_index[0]") -> Evidence:
    """The evidence of the first ends of edges between ``nodes``, looked up in ``rows`` rows."""
    half = len(nodes) // 2
    return given.out_of_range(
        "aten::index",
        "indices[0]",
        nodes[:half],
        rows,
        low=-rows,
        expression=expression,
        call="x[edge_index[0]]",
        others=(given.tensor(None, "edge_index", nodes, (2, half)),),
    )


@pytest.mark.parametrize(
    ("nodes", "rows", "text"),
    [
        ([10, 57, 33, 57], 3, "give each node the number of its row"),
        ([10, 57, 33, 57], 4, "give each node the number of its row"),
        ([10, 57, 33, 57], 2, "3 different nodes up to 57, but there are only 2"),
    ],
)
def test_in_which_order_the_rows_of_nodes_stand_nobody_knows(
    nodes: list[int], rows: int, text: str
) -> None:
    """As many nodes as rows may stand in another order than their numbers."""
    found = first(edges(nodes, rows))
    assert (found.rule, found.fix) == ("edges_with_original_ids", None)
    assert text in found.text


@pytest.mark.parametrize(
    ("values", "size", "rule", "fix"),
    [
        ([-2, -1, 0, 1, 2], 5, "relabel", "F.cross_entropy(z, y + 2)"),
        ([-3, -1, 0, 1, 2], 5, None, None),
        ([-2, -1, 0, 1], 5, None, None),
        ([2019, 2020, 2021], 3, "relabel", "F.cross_entropy(z, y - 2019)"),
        ([3, 4, 5], 3, "relabel", "F.cross_entropy(z, y - 3)"),
        ([2, 3, 4], 3, "too_few_places", None),
        ([0, 2, 4, 6], 4, "too_few_places", None),
        (repeated([0, 2, 4, 6], 11), 4, "too_few_places", None),
        (repeated([0, 2, 4, 6], 12), 4, "relabel", None),  # one batch is not the whole data set
    ],
)
def test_labels_are_numbered_anew_where_they_cannot_be_a_part_of_more(
    values: list[int], size: int, rule: str | None, fix: str | None
) -> None:
    """None of them is a class, or so many would have shown more than as many as there are."""
    found = given.hints_of(given.labels(values, size))
    assert [(item.rule, item.fix) for item in found] == ([] if rule is None else [(rule, fix)])


@pytest.mark.parametrize(
    ("values", "shape", "fires"),
    [
        ([0, 3, 3, 1, 2, 3], (2, 1, 3), True),
        ([0, 1, 3, 1, 2, 3], (2, 1, 3), False),
        ([0, 3, 2, 1, 3, 3], (2, 1, 3), False),
        ([0, 3, 3, 1, 2, 3], None, False),
    ],
)
def test_padding_fills_the_ends_of_rows(
    values: list[int], shape: tuple[int, ...] | None, fires: bool
) -> None:
    """One number a row may be an end mark, and one in the middle is none."""
    evidence = given.labels(values, 3, shape=shape)
    assert ("padded_labels" in rules(evidence)) is fires


@pytest.mark.parametrize(("most", "fires"), [(3, True), (4, False)])
def test_indices_are_exchanged_where_both_fit(most: int, fires: bool) -> None:
    """Rows that do not fit the other dimension are no columns."""
    evidence = given.CAUSES["other_order"]()
    ys = given.tensor("indices[1]", "ys", [1, most])
    changed = replace(evidence, tensors=(*evidence.tensors[:2], ys))
    assert ("swapped_indices" in rules(changed)) is fires
    assert [item.fix for item in given.hints_of(changed)] == (["img[ys, xs]"] if fires else [])


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ([-1.0, 1.0, 1.0], "F.binary_cross_entropy(p, (t + 1) / 2)"),
        ([-1.0, 0.0, 1.0], None),
        ([-1.0, -1.0], None),
        ([1.0, 2.0, 2.0], "F.binary_cross_entropy(p, t - 1)"),
        ([1.0, 1.5, 2.0], None),
    ],
)
def test_two_numbers_are_coded_where_there_are_no_others(
    values: list[float], fix: str | None
) -> None:
    """A third number between them would become a half."""
    assert first(given.bce(values, "target")).fix == fix


@pytest.mark.parametrize(
    ("op", "values", "text", "fix"),
    [
        ("aten::addmm", [-0.5, 0.5], "the scores of a layer in line 4", True),
        ("aten::tanh", [-0.5, 0.5], "made by tanh in line 4", False),
        ("aten::relu", [0.0, 3.0], "made by relu in line 4", False),
        ("aten::mul", [-0.5, 0.5], "as tanh or a cosine gives it", False),
        ("aten::mul", [-0.5, 1.5], "these look like logits", True),
        ("aten::mul", [0.0, 1.5], "a probability is at most 1", False),
        ("aten::relu", [0.0, 120.5], "made by relu in line 4", False),
        ("aten::relu", [0.0, 120.0], "like the bytes of an image: divide by 255", True),
    ],
)
def test_what_made_the_input_tells_scores_from_activations(
    op: str, values: list[float], text: str, fix: bool
) -> None:
    """A loss of logits is right for scores, and wrong behind an activation."""
    found = first(given.bce(values, provenance=(given.step(op, "p = f(x)"),)))
    assert text in found.text
    assert bool(found.fix) is fix


@pytest.mark.parametrize(
    ("nodes", "is_base"), [([1, 2, 3, 6, 4, 5, 2, 1], True), ([1, 2, 3, 6, 4, 5, 2, 0], False)]
)
def test_both_ends_of_edges_are_shifted_at_once(nodes: list[int], is_base: bool) -> None:
    """The fix changes the whole tensor, and a 0 at the other end says that there is none."""
    found = first(edges(nodes, max(nodes), "edge_index[0]"))
    assert ("1-based" in found.text) is is_base
    assert (found.fix == "x[(edge_index - 1)[0]]") is is_base


def test_one_end_alone_is_not_shifted() -> None:
    """Where the line holds only halves, a fix of one would leave the other as it is."""
    evidence = given.out_of_range(
        "aten::index_add_",
        "index",
        [1, 2, 3, 4, 5],
        5,
        expression="col",
        call="out.index_add_(0, col, x[row])",
        others=(given.tensor(None, "row", [1, 2, 3, 4, 4]),),
    )
    found = first(evidence)
    assert "both ends" in found.text
    assert found.fix is None


# --- heads and layers ----------------------------------------------------------------------------


def of_model(kind: str | None, values: list[int], pad: int | None = None, **rest: Any) -> Evidence:
    """The evidence of labels in a loss inside transformers, for 50 outputs."""
    return given.labels(
        values,
        50,
        call="model(ids, labels=y)",
        library=given.TRANSFORMERS,
        call_context=CallContext(model=kind, pad_token_id=pad),
        **rest,
    )


@pytest.mark.parametrize("label", [50, 53])
@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        ("GPT2LMHeadModel", "tokenizer"),
        ("LlamaForCausalLM", "tokenizer"),
        ("BertForMaskedLM", "tokenizer"),
        ("T5ForConditionalGeneration", "tokenizer"),
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
    assert setting.format(label + 1) in found.text
    assert ("num_labels" in found.text) is ("num_labels" in setting)
    assert ("-100" in found.text) is (setting == "tokenizer")


@pytest.mark.parametrize(
    ("pad", "fix"), [(50, "model(ids, labels=y.masked_fill(y == 50, -100))"), (49, None)]
)
def test_labels_that_pad_are_known_by_the_tokenizer(pad: int, fix: str | None) -> None:
    """The padding id among the labels is proven where the tokenizer is at hand."""
    assert first(of_model("GPT2LMHeadModel", [0, 3, 50], pad=pad)).fix == fix


def test_labels_of_a_language_model_are_not_called_one_based() -> None:
    """Token 0 is one that texts seldom hold."""
    evidence = replace(
        given.labels(given.ONE_TO_TEN, 10, call="model(ids, labels=y)", library=given.TRANSFORMERS),
        call_context=CallContext(model="GPT2LMHeadModel"),
    )
    assert rules(evidence) == ("label_beyond_vocabulary",)


# --- marks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "classes", "rule"),
    [
        ([1, 1, 1, 1, -1], 2, "sign_coded_labels"),
        ([1, 1, 1, -1], 2, "mark_not_ignored"),
        ([1, 1, 1, 1, -1, 0], 2, "mark_not_ignored"),
        ([1, 1, 1, 1, -1], 3, "mark_not_ignored"),
        ([-1, -1, -1, -1], 2, "mark_not_ignored"),
    ],
)
def test_labels_of_minus_one_and_one_are_two_classes(
    values: list[int], classes: int, rule: str
) -> None:
    """Four labels of class 1 and none of class 0: -1 stands for class 0 and marks nothing."""
    found = first(given.labels(values, classes))
    assert found.rule == rule
    coded = set(values) == {-1, 1} and classes == 2
    assert ("// 2" in f"{found.text} {found.fix}") is coded


def test_a_one_hot_code_of_signs() -> None:
    """The same labels in a one-hot code."""
    evidence = given.out_of_range(
        "aten::scatter_",
        "index",
        [1, 1, 1, 1, -1],
        2,
        call="F.one_hot(y, 2)",
        api="torch.nn.functional.one_hot",
        expression="y",
    )
    assert first(evidence).fix == "F.one_hot((y + 1) // 2, 2)"
    assert rules(evidence) == ("sign_coded_labels",)


@pytest.mark.parametrize("values", [[0, -1], [0, -1, -100], [0, -100]])
def test_gather_takes_no_mark(values: list[int]) -> None:
    """The result is masked as well: a harmless index alone would give a wrong number."""
    found = first(given.gathered(values, 5, name="i", call="z.gather(1, i)"))
    assert (found.rule, found.fix) == ("mark_in_gather", None)


@pytest.mark.parametrize("values", [[0, -2], [0, -100, 5], [0, -3, -1]])
def test_other_numbers_mark_nothing_in_gather(values: list[int]) -> None:
    """-2, or an index beyond the end, is no mark."""
    assert rules(given.gathered(values, 5, name="i", call="z.gather(1, i)")) == ()


@pytest.mark.parametrize(
    ("values", "name", "op", "fix"),
    [
        ([7, 3], "lengths", "aten::index", "x[rows, lengths - 1]"),
        ([7, 3], 'batch["seq_len"]', "aten::index", 'batch["seq_len"] = batch["seq_len"] - 1'),
        ([7, 0], "lengths", "aten::index", None),
    ],
)
def test_a_length_is_one_beyond_the_last_position(
    values: list[int], name: str, op: str, fix: str | None
) -> None:
    """``x[rows, lengths]`` reads behind the end; a length of 0 has no last element."""
    found = first(length(values, name, op))
    assert (found.rule, found.fix) == ("length_as_position", fix)


@pytest.mark.parametrize(
    ("values", "name", "op"),
    [
        ([8, 3], "lengths", "aten::index"),
        ([7, 3], "lens_id2label", "aten::index_put_"),
        ([7, 3], "silence", "aten::index"),
        ([7, 3], "lengths", "aten::index_put_"),
    ],
)
def test_what_is_no_length_is_left_alone(values: list[int], name: str, op: str) -> None:
    """Two beyond the end, another name, and a tensor that is written to."""
    assert rules(length(values, name, op)) == ()


def length(values: list[int], name: str, op: str) -> Evidence:
    """The evidence of an index of that name into seven elements."""
    return given.out_of_range(
        op, "indices[1]", values, 7, low=-7, expression=name, call="x[rows, lengths]"
    )


# --- labels of a decoder -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "named", "path", "fix"),
    [
        ("t5(input_ids=i, labels=y)", "y", "decoder.embed_tokens", "(y == -1, -100)"),
        ("t5(**batch)", 'batch["labels"]', "decoder.embed_tokens", '["labels"] == -1, -100)'),
        ("t5(i, decoder_input_ids=y)", "y", "decoder.embed_tokens", ""),
        ("t5(input_ids=y, labels=y)", "y", "encoder.embed_tokens", ""),
        ("t5(y, decoder_input_ids=y, labels=y)", "y", "decoder.embed_tokens", ""),
    ],
)
def test_labels_that_a_decoder_reads_are_padded_for_the_loss(
    call: str, named: str, path: str, fix: str
) -> None:
    """The model shifts ``labels=`` itself, and knows -100 only; other ids need a row."""
    values = [5, 6, -1, 5, -1, -1]
    evidence = given.bert(
        values,
        100,
        "embed_tokens",
        path=path,
        name=None,
        shape=(2, 3),
        call=call,
        others=(given.tensor(None, named, values, (2, 3)),),
    )
    found = first(evidence)
    assert found.rule == "padding_of_minus_one"
    assert (fix in found.fix) if found.fix else not fix


# --- sampling ------------------------------------------------------------------------------------


def drawn_at(value: str, dtype: str = "float32", **rest: Any) -> Evidence:
    """The evidence of weights with NaN, drawn after a division by a temperature."""
    call = "torch.multinomial(torch.softmax(z / temperature, -1), 1)"
    seen = CallContext(temperatures=(("temperature", float(value)),))
    known = {"call": call, "call_context": seen, "dtype": dtype, **rest}
    return given.drawn([math.nan, 0.5], **known)


@pytest.mark.parametrize(
    ("value", "dtype", "fires"),
    [
        ("0", "float32", True),
        ("0.0", "float32", True),
        ("1e-30", "float32", True),
        ("1.1e-30", "float32", False),
        ("0.001", "float16", True),
        ("0.0011", "float16", False),
        ("0.001", "bfloat16", False),
        ("0.7", "float32", False),
    ],
)
def test_a_temperature_is_blamed_when_it_is_zero(value: str, dtype: str, fires: bool) -> None:
    """A temperature that divides without overflowing makes no NaN."""
    assert ("temperature_of_zero" in rules(drawn_at(value, dtype))) is fires


@pytest.mark.parametrize(
    "call",
    [
        "m.generate(i, do_sample=True, temperature=0.0)",
        "m.generate(i, do_sample=True, temperature=temperature)",
        "sample(z, temperature=temperature)",
        "sample(z, temperature=0.0)",
    ],
)
def test_a_temperature_is_read_where_it_is_given(call: str) -> None:
    """A keyword of the call counts, by its number or by its variable."""
    found = first(drawn_at("0.0", call=call))
    assert (found.rule, found.fix) == ("temperature_of_zero", None)


@pytest.mark.parametrize(
    "call",
    [
        "m.generate(i, do_sample=True, temperature=0.7)",
        "m.generate(i, do_sample=True)",
        "torch.multinomial(torch.softmax(z * temperature, -1), 1)",
        "torch.multinomial(torch.softmax(z / temperatures, -1), 1)",
    ],
)
def test_a_temperature_that_does_not_divide_is_not_blamed(call: str) -> None:
    """The call's own number counts before a variable, and only a division by it."""
    assert rules(drawn_at("0.0", call=call)) == ("nan_before",)


@pytest.mark.parametrize(("op", "fires"), [("aten::_softmax", True), ("aten::addmm", False)])
@pytest.mark.parametrize(
    ("before", "dtype", "speaks"),
    [((given.MASKED,), "float32", True), ((), "float16", True), ((), "float32", False)],
)
def test_softmax_is_blamed_when_it_gave_the_first_nan(
    op: str, fires: bool, before: tuple[ProvenanceStep, ...], dtype: str, speaks: bool
) -> None:
    """NaN that a layer behind softmax made has another cause; a mask on the way is recorded."""
    step = replace(given.SOFTMAX, op=op)
    evidence = given.drawn([math.nan, 0.5], provenance=(step, *before), dtype=dtype)
    assert ("not_a_number_weights" in rules(evidence)) is (fires and speaks)
    unknown = replace(evidence, provenance=())
    assert rules(unknown) == ("nan_before",)


# --- steps of an optimizer -----------------------------------------------------------------------


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
