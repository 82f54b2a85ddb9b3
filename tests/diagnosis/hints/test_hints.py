"""Each cause rule fires on its own cause, says what was seen, and is silent one step away."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.evidence_types import CallContext
from cudalens.core.limits import Limits
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import Hint, OpName, TensorFact, TensorSummary
from cudalens.diagnosis.hints import READINGS, nonfinite
from cudalens.diagnosis.hints._base import first_reading
from tests.builders import fact
from tests.hint_evidence import (
    EXP,
    LINEAR,
    MASK,
    MASKED,
    ONE_TO_TEN,
    SOFTMAX,
    TRANSFORMERS,
    WRITTEN,
    bce,
    bert,
    boxes,
    cast,
    drawn,
    empty_rows,
    gathered,
    hints_of,
    labels,
    lookup,
    numbers,
    one_hot,
    out_of_range,
    step,
    tensor,
    words_of,
)

Row = tuple[Evidence, str, str | None, *tuple[str, ...]]
# Of each cause: its evidence, all rules that speak, the fix of the first, and what that one names.
CAUSES: dict[str, Row] = {
    "one_based_labels": (labels(ONE_TO_TEN, 10), "one_based_labels", "F.cross_entropy(z, y - 1)",
        "1 to 10"),
    "other_numbers": (labels([10, 20, 30, 10], 3), "relabel", None),
    "other_numbers_of_many": (labels([0, 1, 2, 4, 7] * 9, 6), "relabel", None,
        "labels are 5 different numbers: 7, 0, 1, 2 and 1 more", "0 … 5"),
    "other_numbers_of_four": (labels([0, 1, 4, 7] * 9, 6), "relabel", None,
        "labels are 4 different numbers: 0, 1, 4, 7;"),
    "label_equals_classes": (labels([0, 3, 10, 7], 10), "observations", None,
        "1 of 4 labels is 10", "0 … 7"),
    "label_beyond_classes": (labels([0, 3, 13, 7], 10), "observations", None,
        "1 of 4 labels is 13"),
    "binary_labels_one_output": (labels([0, 1, 1, 0], 1), "binary_labels_one_output", None,
        "0 and 1"),
    "minus_one": (labels([3, -1, 2, -1], 10), "mark_not_ignored", None, "if -1 marks labels",
        "-100", "if 1 was subtracted"),
    "minus_one_written": (labels([3, -1, 2, -1], 10, provenance=(WRITTEN,)), "mark_not_ignored",
        "F.cross_entropy(z, y, ignore_index=-1)", "-1", "-100"),
    "minus_one_filled": (labels([3, -1, 2, -1], 10, provenance=(step("torch.Tensor.masked_fill",
        "y = y.masked_fill(far, value=-1)"),)), "mark_not_ignored",
        "F.cross_entropy(z, y, ignore_index=-1)"),
    "too_few_outputs": (labels([0, 1, 2, 3] * 4, 3), "too_few_places", None, "they need 4 outputs"),
    "no_blank": (out_of_range("aten::_ctc_loss", "targets", [1, 2, 3, 4], 4, expression="t",
        scalars={"blank": "0"}), "no_class_for_blank", None, "label 4 needs 5 classes"),
    "minus_one_computed": (labels([3, -1, 2, -1], 10, provenance=(step("torch.where",
        "y = torch.where(far, y - 1, y)", line=3),)), "mark_not_ignored", None,
        "if -1 marks labels"),
    "scale": (labels([-2, 0, 2, 1, -1], 5), "relabel", "F.cross_entropy(z, y + 2)"),
    "one_outlier": (labels([0, 1, 2, 6], 3), "observations", None, "1 of 4 labels is 6", "0 … 2"),
    "padded_with_classes": (labels([0, 1, 3, 3, 2, 0, 1, 3], 3, shape=(2, 1, 4)), "observations",
        None, "3 of 8", "end of rows"),
    "minus_100": (labels([3, -100, 2, -100], 10, ignore=255), "mark_not_ignored",
        "F.cross_entropy(z, y, ignore_index=-100)", "-100", "255"),
    "void_255": (labels([0, 3, 20, 255] * 8, 21, name="mask", shape=MASK), "mark_not_ignored",
        "F.cross_entropy(z, mask, ignore_index=255)", "255", "-100"),
    "mask_0_255": (labels([0, 255] * 16, 2, name="mask", shape=MASK), "mask_of_0_and_255",
        "F.cross_entropy(z, (mask == 255).long())", "0 and 255"),
    "gray_mask": (labels([0, 17, 90, 200] * 8, 3, name="mask", shape=MASK), "observations", None,
        "24 of 32", "17, 90, 200"),
    "uint8_labels": (labels([1, 2, 255], 10, dtype="uint8"), "mark_not_ignored", None,
        "if 255 marks elements", "in uint8 a -1 becomes 255 too"),
    "uint8_arithmetic": (labels([0, 255, 3], 10, name="(y - 1).long()", others=(tensor(None, "y",
        [1, 0, 4], dtype="uint8"),)), "wrapped", None, "-1 became 255"),
    "one_hot": (one_hot([0, 3, 5], "F.one_hot(y, num_classes=4)"), "observations", None,
        "1 of 3 labels is 5"),
    "one_hot_mark": (one_hot([0, -1, 3], "F.one_hot(y, 4)"), "mark_not_ignored", None, "-1"),
    "ignored_as_id": (bert([5, 6, -100, 5, -100, -100], 100, "embed_tokens",
        path="model.decoder.embed_tokens", name="labels", shape=(2, 3), padding=1,
        call="model(input_ids=ids, decoder_input_ids=labels)"), "ignored_label_as_id",
        "model(input_ids=ids, decoder_input_ids=labels.masked_fill(labels == -100, 1))", "-100",
        "decoder"),
    "minus_one_padding": (bert([5, 6, -1, 5, -1, -1], 100, "embed_tokens", shape=(2, 3)),
        "padding_of_minus_one", None, "-1"),
    "added_tokens": (bert([5, 100, 7, 8], 100, "word_embeddings", shape=(2, 2)), "added_tokens",
        None, "100"),
    "padding": (bert([5, 6, 7, 100, 100, 5, 6, 7, 8, 100], 100, "word_embeddings", shape=(2, 5)),
        "padding_beyond_table", None, "100"),
    "table_too_small": (lookup([0, 5, 12], 10, name="user", path="users"), "observations", None,
        "1 of 3 ids is 12", "0 … 5"),
    "one_based_ids": (lookup([1, 2, 3, 4, 5], 5, name="movie", path="movies"), "one_based_ids",
        None, "1 to 5", "a table of 6 rows"),
    "positions": (bert([*range(20)], 16, "wpe", path="transformer.wpe", name=None, shape=(1, 20)),
        "positions_beyond_table", None, "20", "16"),
    "position_offset": (
        bert([*range(2, 34)], 32, "position_embeddings", name=None, shape=(1, 32), padding=1),
        "positions_with_offset", None, "32", "30", "2"),
    "generation": (bert([16, 16], 16, "wpe", path="transformer.wpe", name=None, shape=(2, 1),
        call="gpt.generate(ids, max_new_tokens=30)",
        others=(tensor(None, "ids", [5, 6, 7, 8] * 2, (2, 4)),)), "positions_beyond_table", None,
        "17", "16"),
    "odd_positions": (lookup([3, 9, 40], 32, name="position_ids", path="positions", shape=(1, 3)),
        "observations", None, "1 of 3 values is 40"),
    "boxes_pixels": (boxes([50, 1500], "x_position_embeddings", [9, 9, 50, 50, 9, 9, 1500, 9]),
        "boxes_in_pixels", None, "1500", "1023"),
    "boxes_negative": (boxes([9, -5], "x_position_embeddings", [9, 9, 50, 50, -5, 9, 50, 50]),
        "boxes_negative", None, "x = -5"),
    "boxes_inverted": (boxes([40, -5], "w_position_embeddings", [9, 9, 49, 50, 9, 9, 4, 50]),
        "boxes_negative", None, "width = -5"),
    "segments": (bert([0, 1, 2, 2], 2, "token_type_embeddings", name="seg", shape=(1, 4),
        call="model(input_ids=ids, token_type_ids=seg)"), "segment_ids", None, "2", "0 … 1"),
    "edges": (out_of_range("aten::index_select", "index", [10, 57, 33], 5,
        call="x.index_select(0, edge_index[0])", others=(tensor(None, "edge_index", [10, 57, 33,
        41, 42, 57], (2, 3)),)), "observations", None, "10, 33, 57"),
    "narrow": (lookup([0, 127, -56], 300, path="users", dtype="int8"), "wrapped", None,
        "int8 ends at 127: -56 is what 200 becomes"),
    "actions": (gathered([0, 1, 2, 3, 4, 0], 4, call="q(s).gather(1, actions.unsqueeze(1))",
        line=(tensor(None, "actions", [0, 1, 2, 3, 4, 0]),)), "observations", None,
        "1 of 6 values is 4"),
    "gather_mark": (gathered([0, -100, 3], 5, name="y[:, None]", call="z.gather(1, y[:, None])"),
        "observations", None, "1 of 3 values is -100"),
    "flat": (out_of_range("aten::index", "indices[0]", [1, 12], 12, low=-12,
        call="flat[rows * width + cols]", others=(fact("self", "float32[12]", "flat"),
        tensor(None, "rows", [0, 2]), tensor(None, "cols", [1, 4]))),
        "observations", None, "1 of 2 values is 12"),
    "nan_cast": (cast([0, -(1 << 63)], 10, tensor(None, "x", [0.25, math.nan])),
        "nan_cast_to_integer", None, "-9223372036854775808", "x contains"),
    "shift_on_line": (labels([1, 5, 10], 10, name="y + 1", others=(tensor(None, "y", [0, 4, 9]),)),
        "shift_on_the_line", "F.cross_entropy(z, y)", "0 to 9"),
    "shift_before": (labels([1, 5, 10], 10, provenance=(step("aten::add.Tensor", "y = y + 1"),)),
        "observations", None, "line 4: y = y + 1"),
    "shift_below": (labels([-1, 3, 8], 10, provenance=(step("aten::sub.Tensor", "y = y - 1"),)),
        "observations", None, "line 4: y = y - 1"),
    "bce_logits": (bce([-2.5, 0.5, 3.0], provenance=(step("torch.nn.functional.linear",
        "p = f(x)"),)), "not_probabilities", "F.binary_cross_entropy_with_logits(p, t)",
        "-2.5 to 3", "the scores of a layer in line 4"),
    "bce_convolution": (bce([-0.5, 0.5], call="crit(p, t)", module_type="BCELoss", provenance=(step(
        "torch.conv2d", "p = f(x)"),)), "not_probabilities", "crit(torch.sigmoid(p), t)",
        "the scores of a layer in line 4", "BCEWithLogitsLoss instead of BCELoss"),
    "bce_unknown": (bce([-2.5, 0.5, 3.0]), "not_probabilities", None, "-2.5 to 3",
        "if they are scores"),
    "bce_rounding": (bce([0.25, 1.0000001]), "rounded_out_of_interval",
        "F.binary_cross_entropy(p.clamp(0, 1), t)", "1.0000001"),
    "bce_mask_255": (bce([0.0, 255.0], "target"), "image_not_divided",
        "F.binary_cross_entropy(p, t / 255)",
        "t runs from 0 to 255, like the bytes of an image"),
    "bce_labels": (bce([-1.0, 1.0], "target"), "labels_as_binary_target",
        "F.binary_cross_entropy(p, (t + 1) / 2)", "-1 to 1"),
    "bce_nan": (bce([0.5, math.nan]), "nan_before", None, "1 of 2"),
    "drawn_logits": (drawn([-2.5, 0.5, 3.0]), "bad_weights", None,
        "-2.5 to 3", "none may be below 0"),
    "distribution_of_scores": (numbers("", "probs", [-2.5, 0.5, 3.5], high=None,
        call="Categorical(p)", api="torch.distributions.Categorical", provenance=(LINEAR,)),
        "scores_as_probabilities", "Categorical(logits=p)", "-2.5 to 3.5",
        "the scores of a layer in line 3"),
    "distribution_of_numbers": (numbers("", "probs", [-2.5, 0.5, 3.5], high=None,
        call="Categorical(p)", api="torch.distributions.Categorical"), "scores_as_probabilities",
        None, "if these are scores"),
    "scale_of_a_layer": (numbers("", "scale", [-2.5, 0.5, 3.5], high=None,
        call="Normal(0, p)", api="torch.distributions.Normal", provenance=(LINEAR,)),
        "scale_of_a_layer", None, "-2.5 to 3.5", "softplus or exp makes a scale above 0 of it"),
    "drawn_nan": (drawn([math.nan, 0.5], provenance=(SOFTMAX, MASKED)),
        "nan_before", None, "1 of 2 values is NaN already"),
    "drawn_inf": (drawn([math.inf, 0.5], dtype="float16", provenance=(EXP,)), "bad_weights", None,
        "made by exp in line 3 in float16"),
    "drawn_nothing": (replace(empty_rows(), provenance=(SOFTMAX, MASKED)), "bad_weights", None,
        "1 of 4", "masked_fill in line 3"),
}  # fmt: skip

# One step away from a cause: another hint, or none.
TEN = [at % 10 for at in range(30)]
ID_ROWS = [5, 6, 7, 8, 100, 5, 6, 7, 8, 100]
WORDS, PLACES = "word_embeddings", "position_embeddings"


def into_rows(*others: TensorFact) -> Evidence:
    call = "out.index_add_(0, col, x[row])"
    return out_of_range(
        "aten::index_add_", "index", [3, 7], 5, expression="col", call=call, others=others
    )


def ctc(values: list[int], blank: str) -> Evidence:
    return out_of_range(
        "aten::_ctc_loss", "targets", values, 5, expression="y", scalars={"blank": blank}
    )


def indexed(name: str) -> Evidence:
    return out_of_range(
        "aten::index", "indices", [1, 2, 3, 4, 5], 5, expression=name, call=f"x[{name}]"
    )


NEIGHBOURS: dict[str, Row] = {
    "infinite of nobody knows what": (drawn([math.inf, 0.5]), "observations", None),
    "a negative id of few": (lookup([0, 5, -2], 300, path="users", dtype="int8"), "observations",
        None),
    "0": (labels([0, *ONE_TO_TEN], 10), "too_few_places", None),
    "few labels": (labels([2, 10], 10), "observations", None),
    "three labels": (labels([1, 2, 10], 10), "observations", None),
    "two labels": (labels([1, 10], 10), "observations", None),
    "one position": (lookup([40], 32, name="position_ids", path="positions", shape=()),
        "observations", None),
    "only C": (labels([10] * 40, 10), "observations", None),
    "beyond C": (labels([1, 2, 11], 10), "observations", None),
    "below the marks": (labels([*TEN, -2], 10), "observations", None),
    "two marks": (labels([-1, -100, 3], 10, ignore=255), "observations", None),
    "three labels, one output": (labels([0, 2], 1), "observations", None),
    "u8 mask": (labels([0, 255, 255], 3, dtype="uint8"), "mask_of_0_and_255", None),
    "254 marks nothing": (labels([0, 254] * 16, 21, shape=MASK), "observations", None),
    "C=255": (labels([0, 3, 255] * 3, 255), "observations", None),
    "three grays": (labels([0, 255, 90] * 8, 2, shape=(2, 3, 4)), "observations", None, "90, 255"),
    "255 and a stray class": (labels([0, 3, 20, 22, 255] * 6, 21, shape=(2, 3, 5)),
        "observations", None),
    "no image": (labels([0, 17, 90, 200], 3, name="y"), "observations", None),
    "63 beyond": (bert([5, 163, 7], 100, WORDS), "added_tokens", None),
    "-2 as id": (bert([5, -2, 7], 100, WORDS), "observations", None),
    "both marks": (bert([5, -100, -1], 100, WORDS), "observations", None),
    "one end token a row": (bert(ID_ROWS, 100, WORDS, shape=(2, 5)), "added_tokens", None),
    "the tokenizer's padding id": (bert(ID_ROWS, 100, WORDS, shape=(2, 5),
        call_context=CallContext(pad_token_id=100)), "padding_beyond_table", None),
    "0 too": (lookup([0, 1, 2, 5], 5, path="users"), "observations", None),
    "composition is no position": (lookup([0, 1, 5], 5, path="composition"), "observations", None),
    "too long even without the offset": (bert([*range(2, 35)], 32, PLACES, name=None, shape=(1, 33),
        padding=1), "positions_beyond_table", None),
    "a negative position": (bert([0, 1, -1], 32, PLACES, shape=(1, 3)), "observations", None),
    "pixels": (boxes([9, 1126], "x_position_embeddings", [9, 9, 1126, 9]), "boxes_in_pixels", None),
    "height negative": (boxes([9, -1], "h_position_embeddings", [9, 9, 9, 8]), "boxes_negative",
        None),
    "y negative": (boxes([9, -1], "y_position_embeddings", [9, -1, 9, 8]), "boxes_negative", None),
    "one segment": (bert([1, 1], 1, "token_type_embeddings", name="seg"), "segment_ids", None),
    "rows by another name": (out_of_range("aten::index_select", "index", [10, 57], 5,
        expression="idx", call="x.index_select(0, idx)"), "observations", None),
    "a gather without actions": (gathered([0, 4], 4, call="p.gather(1, y[:, None])",
        line=(tensor(None, "y", [0, 4]),)), "observations", None),
    "attractions are no actions": (gathered([0, 4], 4, call="p.gather(1, y[:, None])",
        line=(tensor(None, "attractions", [0, 4]),)), "observations", None),
    "two beyond a flat end": (out_of_range("aten::index", "indices[0]", [1, 13], 12, low=-12,
        expression="i", call="flat[i]", others=(fact("self", "[12]", "flat"),)),
        "observations", None),
    "large, but no garbage": (lookup([5, 1 << 47], 100, path="users"), "observations", None),
    "floats that are ids": (lookup([0, 12], 10, name="x.long()", call="emb(x.long())",
        others=(tensor(None, "x", [0.0, 12.0]),)), "observations", None),
    "another float on the line": (lookup([0, 12], 10, name="b.long()", call="emb(b.long())",
        others=(tensor(None, "x", [0.5, 12.5]),)), "observations", None),
    "bad before the shift": (labels([1, 5, 11], 10, name="y + 1", others=(tensor(None, "y", [0, 4,
        10]),)), "observations", None),
    "not a sum": (labels(ONE_TO_TEN, 10, provenance=(step("aten::mul.Tensor", "y = y * n"),)),
        "one_based_labels", "F.cross_entropy(z, y - 1)"),
    "bad before the sum": (labels(ONE_TO_TEN, 10, provenance=(step("aten::add.Tensor", "y = y + 1"),
        step("aten::_to_copy", "y = y.cuda()", line=2))), "one_based_labels",
        "F.cross_entropy(z, y - 1)"),
    "numbered by another line": (labels(ONE_TO_TEN, 10, provenance=(step("aten::add.Tensor",
        "y = out.argmax(1) + 1"),)), "observations", None, "line 4: y = out.argmax(1) + 1"),
    "read by another line": (labels(ONE_TO_TEN, 10, provenance=(step("torch.from_numpy",
        "y = torch.from_numpy(a)"),)), "one_based_labels", "F.cross_entropy(z, y - 1)"),
    "computed on the line": (labels(ONE_TO_TEN, 10, name="n * y"), "observations", None),
    "computed ids": (bert([5, 102, 7], 100, WORDS, provenance=(step("torch.argmax",
        "ids = out.argmax(-1)"),)), "observations", None, "line 4: ids = out.argmax(-1)"),
    "computed rows": (lookup([0, 1, 2, 3, 4, 5] * 9, 5, path="ages", provenance=(step(
        "torch.bucketize", "ages = torch.bucketize(years, edges)"),)), "observations", None),
    "convolution before a pool": (bce([-0.5, 0.5], provenance=(step("torch.max_pool2d", "p = g(h)"),
        step("torch.conv2d", "h = f(x)"))), "not_probabilities", None, "probability is at least 0"),
    "2 % above 1": (bce([0.5, 1.02]), "not_probabilities", None),
    "beyond bytes": (bce([0.0, 300.0]), "not_probabilities", None),
    "no labels": (bce([0.0, 1.5], "target"), "labels_as_binary_target", None),
    "infinite": (bce([0.5, math.inf]), "observations", None),
    "rounded below 0": (drawn([0.5, -1e-9]), "observations", None),
    "both": (drawn([0.5, math.inf, math.nan]), "nan_before", None),
    "more grays than are listed": (labels([at % 41 * 6 for at in range(96)], 3, shape=(2, 6, 8)),
        "observations", None, "outside, such as 6"),
    "ignored ones beside 1 to C": (labels([*ONE_TO_TEN, -100], 10), "one_based_labels",
        "F.cross_entropy(z, y - 1)"),
    "col beside row": (into_rows(tensor(None, "row", [1, 2])), "observations", None),
    "col alone": (into_rows(), "observations", None),
    "labels beyond the blank": (ctc([1, 2, 3, 4, 6], "0"), "observations", None),
    "the blank last": (ctc([1, 2, 3, 4, 5], "4"), "one_based_ids", "y = y - 1"),
    "an index from 1": (indexed("at"), "one_based_ids", "x[at - 1]"),
    "an index that counts back": (indexed("n - 1"), "observations", None),
}  # fmt: skip


def check_code(hints: Iterable[Hint]) -> None:
    """A fix is one line of Python."""
    for fix in filter(None, (hint.fix for hint in hints)):
        assert "\n" not in fix
        ast.parse(fix)


# --- the matrix ----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", (rows := {**CAUSES, **NEIGHBOURS}).values(), ids=rows)
def test_only_the_rules_of_a_cause_speak(row: Row) -> None:
    """Of all rules; the text holds what was observed, the fix the user's own words."""
    evidence, rules, fix, *seen = row
    hints = words_of(evidence)
    assert [hint.rule for hint in hints] == (rules.split() or ["observations"])
    check_code(hints)
    assert [text for text in seen if text not in hints[0].text] == []
    assert [hint.fix for hint in hints[:1]] == [fix][: len(hints)]


def test_every_reading_has_a_cause() -> None:
    """A reading that no evidence makes speak is not tested."""
    mine = [item for item in READINGS if item.__module__ != nonfinite.__name__]
    assert [
        item.__name__ for item in mine if not any(item(row[0]) for row in CAUSES.values())
    ] == []


def test_nothing_is_said_without_a_finding() -> None:
    """No evidence and an exception alone carry no cause."""
    assert hints_of(Evidence()) == ()
    error = ErrorFacts(type_name="RuntimeError", message="size mismatch")
    assert hints_of(Evidence(error=error)) == ()


@pytest.mark.parametrize("cause", CAUSES)
def test_nothing_is_said_without_values(cause: str) -> None:
    """Where the tensors could not be read, no rule guesses what was in them."""
    assert hints_of(replace(CAUSES[cause][0], tensors=())) == ()


# --- the writer of fixes -------------------------------------------------------------------------


def counted(call: str | None, name: str = "y") -> Evidence:
    return labels(ONE_TO_TEN, 10, name=name, call=call)


def marked(call: str, **more: Any) -> Evidence:
    return labels([3, -1], 10, call=call, provenance=(WRITTEN,), **more)


@pytest.mark.parametrize(
    ("evidence", "fix"),
    [
        # Only the node that is the argument changes, whatever else is spelled alike.
        (counted("crit(net(x, y), y)"), "crit(net(x, y), y - 1)"),
        (counted("crit(z, batch['y'])", 'batch["y"]'), 'crit(z, batch["y"] - 1)'),
        (counted("crit(z, yy, target=y)"), "crit(z, yy, target=y - 1)"),
        (counted("crit(\n    z,\n    y,\n)"), "crit(z, y - 1)"),
        (counted("crit(z, y.view(-1))"), "crit(z, (y - 1).view(-1))"),
        (counted("crit('é', y)"), "crit('é', y - 1)"),
        (counted("model(**batch)", 'batch["labels"]'), 'batch["labels"] = batch["labels"] - 1'),
        (counted("crit(z, y)  # y"), "crit(z, y - 1)"),
        (counted(None), "y = y - 1"),
        (labels([20, 21, 22], 3, name="2 * y", call="crit(z, 2 * y)"), "crit(z, (2 * y) - 20)"),
        # ``ignore_index`` goes into the loss on the line, else the mark becomes what it ignores.
        (marked("F.cross_entropy(z, y, ignore_index=-100)"),
         "F.cross_entropy(z, y, ignore_index=-1)"),
        (marked("F.cross_entropy(z, y,)"), "F.cross_entropy(z, y, ignore_index=-1)"),
        (marked("nn.CrossEntropyLoss()(z, y)"), "nn.CrossEntropyLoss(ignore_index=-1)(z, y)"),
        (marked("crit(z, y)"), "crit(z, y.masked_fill(y == -1, -100))"),
        (marked("F.cross_entropy(z, y, **more)"),
         "F.cross_entropy(z, y.masked_fill(y == -1, -100), **more)"),
        # Where users cannot reach the loss, their labels take the number that it ignores.
        (marked("model(ids, labels=y)", library=TRANSFORMERS),
         "model(ids, labels=y.masked_fill(y == -1, -100))"),
    ],
)  # fmt: skip
def test_a_fix_changes_the_expression_by_its_place(evidence: Evidence, fix: str) -> None:
    """In the running call, or before it where the call does not spell it."""
    assert hints_of(evidence)[0].fix == fix


DAMAGE: dict[str, Callable[[Evidence], Evidence]] = {
    "no call": lambda e: replace(e, call=None, source=None, frames=()),
    "no names": lambda e: replace(e, tensors=_each(e, expression=None)),
    "strange names": lambda e: replace(e, tensors=_each(e, expression="yield from x")),
    "no shapes": lambda e: replace(e, tensors=_each(e, shape=())),
    "no summary": lambda e: replace(e, tensors=_each(e, summary=TensorSummary())),
    "no distinct values": lambda e: replace(
        e, tensors=tuple(replace(t, summary=replace(t.summary, unique=None)) for t in e.tensors)
    ),
    "no op": lambda e: replace(e, op=OpName()),
    "no module": lambda e: replace(e, module_path=None, module_type=None),
    "no scalars": lambda e: replace(e, scalars=()),
}


def _each(evidence: Evidence, **changes: Any) -> tuple[TensorFact, ...]:
    return tuple(replace(item, **changes) for item in evidence.tensors)


def test_missing_facts_are_no_trouble() -> None:
    """Whatever a collector failed to find, no rule raises, and every fix still is code."""
    for evidence, *_ in CAUSES.values():
        for damage in DAMAGE.values():
            check_code(hints_of(damage(evidence)))


def test_a_reading_that_raises_leaves_a_line_and_the_next_is_asked() -> None:
    def broken(evidence: Evidence) -> None:
        raise ZeroDivisionError

    limits = Limits()
    hints = first_reading((broken, lambda evidence: Hint(rule="next", text="")), Evidence(), limits)
    assert [item.rule for item in hints] == ["next"]
    assert limits.lines[0].startswith("hint broken unavailable: ZeroDivision")
