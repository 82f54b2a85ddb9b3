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
from cudalens.core.report_types import Hint, LineRef, ProvenanceStep, TensorFact
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
    assert rules(code) == ("one_based_labels" if fires else "one_hot_too_small",)


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
    assert [item.fix for item in found] == [
        "nn.Linear(in_features, 11)  # the last layer",
        "nn.Embedding(11, dim)",
        "nn.Linear(in_features, env.action_space.n)  # the last layer",
        "num_classes = 11",
    ]


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
    assert rules(given.labels([*values, -100], 4)) == ("label_equals_classes",)


@pytest.mark.parametrize(("classes", "says"), [(1000, True), (999, False)])
def test_a_label_as_large_as_a_vocabulary_may_be_padding(classes: int, says: bool) -> None:
    """A thousand outputs may be tokens, whose padding the loss ignores by another number."""
    found = first(given.labels([1, 7, classes], classes))
    assert found.rule == "label_equals_classes"
    assert ("if it is padding, use -100, which the loss ignores" in found.text) is says


@pytest.mark.parametrize(("padding", "rule"), [(-1, "one_based_ids"), (0, "table_too_small")])
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
    ("values", "fix"),
    [
        ([1, 1, 2, 2], "net(seg - 1)"),
        ([0, 1, 2, 2], "net(seg.clamp(0, 1))"),
        ([1, 2, 3], "net(seg.clamp(0, 1))"),
    ],
)
def test_segments_begin_with_the_first_sentence(values: list[int], fix: str) -> None:
    """Every text has a first segment: where no 0 is, the count starts at 1."""
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
    ("nodes", "rows", "fix"),
    [
        ([10, 57, 33, 57], 3, "x[edge_index.unique(return_inverse=True)[1][0]]"),
        ([10, 57, 33, 57], 4, None),
        ([10, 57, 33, 57], 2, None),
        ([0, 5, 999, 1000, 1, 2, 3, 4], 1000, None),
    ],
)
def test_new_numbers_are_those_of_the_rows_when_there_are_as_many(
    nodes: list[int], rows: int, fix: str | None
) -> None:
    """A node without an edge would shift the numbers of all nodes behind it."""
    found = first(edges(nodes, rows))
    assert (found.rule, found.fix) == ("edges_with_original_ids", fix)


@pytest.mark.parametrize(
    ("nodes", "is_base"),
    [([1, 2, 3, 6, 4, 5, 2, 1], True), ([1, 2, 3, 6, 4, 5, 2, 0], False)],
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
    ("kind", "fix"),
    [
        ("GPT2LMHeadModel", "model.resize_token_embeddings(len(tokenizer))"),
        ("LlamaForCausalLM", "model.resize_token_embeddings(len(tokenizer))"),
        ("BertForMaskedLM", "model.resize_token_embeddings(len(tokenizer))"),
        ("T5ForConditionalGeneration", "model.resize_token_embeddings(len(tokenizer))"),
        ("BertForSequenceClassification", "from_pretrained(name, num_labels={})"),
        ("BertForTokenClassification", "from_pretrained(name, num_labels={})"),
        ("ViTForImageClassification", "from_pretrained(name, num_labels={})"),
        ("BertForMultipleChoice", None),
        (None, None),
    ],
)
def test_num_labels_is_for_heads_that_have_it(
    kind: str | None, fix: str | None, label: int
) -> None:
    """A language model's outputs are its tokens; of a head that nobody knows no fix is given."""
    found = first(of_model(kind, [0, 3, label]))
    assert found.fix == (None if fix is None else fix.format(label + 1))
    assert ("-100" in found.text) is ("tokenizer" in (fix or ""))


@pytest.mark.parametrize(
    ("pad", "fix"),
    [
        (50, "model(ids, labels=y.masked_fill(y == 50, -100))"),
        (49, "model.resize_token_embeddings(len(tokenizer))"),
    ],
)
def test_labels_that_pad_are_known_by_the_tokenizer(pad: int, fix: str) -> None:
    """The padding id among the labels is proven where the tokenizer is at hand."""
    assert first(of_model("GPT2LMHeadModel", [0, 3, 50], pad=pad)).fix == fix


def test_labels_of_a_language_model_are_not_called_one_based() -> None:
    """Token 0 is one that texts seldom hold."""
    evidence = replace(
        given.labels(given.ONE_TO_TEN, 10, call="model(ids, labels=y)", library=given.TRANSFORMERS),
        call_context=CallContext(model="GPT2LMHeadModel"),
    )
    assert rules(evidence) == ("label_beyond_vocabulary",)


@pytest.mark.parametrize(
    ("scores", "labels", "fix"),
    [
        ((4, 3), (4,), "nn.Linear(in_features, 4)  # the last layer"),
        ((1, 3, 4), (1, 4), "num_classes = 4  # the outputs of the last layer"),
        ((1, 3, 2, 2), (1, 2, 2), "nn.Conv2d(in_channels, 4, kernel_size)  # the last layer"),
        ((1, 3, 1, 2, 2), (1, 1, 4), "nn.Conv3d(in_channels, 4, kernel_size)  # the last layer"),
        (None, (4,), "nn.Linear(in_features, 4)  # the last layer"),
        (None, (1, 2, 2), "nn.Conv2d(in_channels, 4, kernel_size)  # the last layer"),
        (None, (1, 1, 4), "num_classes = 4  # the outputs of the last layer"),
    ],
)
def test_the_last_layer_is_of_the_kind_that_makes_such_scores(
    scores: tuple[int, ...] | None, labels: tuple[int, ...], fix: str
) -> None:
    """Scores of images come from a convolution; where either kind is possible, none is named."""
    others = () if scores is None else (TensorFact(argument="input", expression="z", shape=scores),)
    evidence = given.labels([0, 1, 2, 3], 3, shape=labels, others=others)
    assert first(evidence).fix == fix


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        ("aten::embedding", "nn.Embedding"),
        ("aten::_embedding_bag", "nn.EmbeddingBag"),
        ("aten::_embedding_bag_forward_only", "nn.EmbeddingBag"),
    ],
)
def test_a_bag_stays_a_bag(op: str, kind: str) -> None:
    """The larger table is of the kind that the line looks ids up in."""
    plain = given.out_of_range(op, "indices", [0, 12], 10, expression="ids", module_path="users")
    tokens = given.out_of_range(op, "indices", [0, 12], 10, expression="ids", module_path="tokens")
    assert [first(plain).fix, first(tokens).fix] == [f"{kind}(13, dim)"] * 2


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


@pytest.mark.parametrize(
    ("values", "call", "fix"),
    [
        ([0, -1], "z.gather(1, i)", "z.gather(1, i.clamp(min=0)) * (i >= 0)"),
        ([0, -1, -100], "z.gather(1, i)", "z.gather(1, i.clamp(min=0)) * (i >= 0)"),
        ([0, -100], "f(i)", None),
    ],
)
def test_gather_takes_no_mark(values: list[int], call: str, fix: str | None) -> None:
    """The result is masked as well: a harmless index alone would give a wrong number."""
    found = first(given.gathered(values, 5, name="i", call=call))
    assert (found.rule, found.fix) == ("mark_in_gather", fix)


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
        ("t5(i, decoder_input_ids=y)", "y", "decoder.embed_tokens", "t5.config.pad_token_id"),
        ("t5(input_ids=y, labels=y)", "y", "encoder.embed_tokens", "tokenizer.pad_token_id"),
        ("t5(y, decoder_input_ids=y, labels=y)", "y", "decoder.embed_tokens", "pad_token_id"),
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
    assert fix in (found.fix or "")


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
    ("call", "fix"),
    [
        ("m.generate(i, do_sample=True, temperature=0.0)", "do_sample=False"),
        ("m.generate(i, do_sample=True, temperature=temperature)", "do_sample=False"),
        ("sample(z, temperature=temperature)", "temperature = max(temperature, 1e-2)"),
        ("sample(z, temperature=0.0)", None),
    ],
)
def test_a_temperature_is_read_where_it_is_given(call: str, fix: str | None) -> None:
    """A keyword of the call counts, by its number or by its variable."""
    found = first(drawn_at("0.0", call=call))
    assert found.rule == "temperature_of_zero"
    assert (found.fix is None) if fix is None else fix in (found.fix or "")


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
@pytest.mark.parametrize(("context", "dtype"), [(("z = top_k(z)",), "float32"), ((), "float16")])
def test_softmax_is_blamed_when_it_gave_the_first_nan(
    op: str, fires: bool, context: tuple[str, ...], dtype: str
) -> None:
    """NaN that a layer before softmax made has another cause."""
    step = replace(given.SOFTMAX, op=op)
    evidence = given.drawn([math.nan, 0.5], provenance=(step,), context=context, dtype=dtype)
    assert ("not_a_number_weights" in rules(evidence)) is fires
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
