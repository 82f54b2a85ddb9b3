"""Each cause rule fires on its own cause, says what was seen, and is silent one step away."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.evidence_types import CallContext
from cudalens.core.limits import Limits
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import FIRST_BAD, Hint, OpName, TensorFact, TensorSummary
from cudalens.diagnosis.hints import MAX_HINTS, _base, find_hints, table
from tests import hint_evidence as given
from tests.hint_evidence import hints_of

FIRES: dict[str, tuple[str, ...]] = {
    "one_based_labels": ("one_based_labels",),
    "other_numbers": ("relabel",),
    "label_equals_classes": ("too_few_places",),
    "label_beyond_classes": ("too_few_places",),
    "binary_labels_one_output": ("binary_labels_one_output",),
    "minus_one": ("mark_not_ignored",),
    "signs": ("sign_coded_labels",),
    "scale": ("relabel",),
    "one_outlier": ("far_label",),
    "padded_with_classes": ("padded_labels",),
    "beyond_vocabulary": ("label_beyond_vocabulary",),
    "minus_100": ("mark_not_ignored",),
    "void_255": ("mark_not_ignored",),
    "mask_0_255": ("mask_of_0_and_255",),
    "gray_mask": ("gray_mask",),
    "uint8_labels": ("wrapped_in_uint8",),
    "uint8_arithmetic": ("wrapped_in_uint8",),
    "changed_labels": ("changed_since_forward",),
    "one_hot": ("too_few_places",),
    "one_hot_mark": ("mark_not_ignored",),
    "ignored_as_id": ("ignored_label_as_id",),
    "minus_one_padding": ("padding_of_minus_one",),
    "added_tokens": ("added_tokens",),
    "other_vocabulary": ("other_vocabulary",),
    "padding": ("padding_beyond_table",),
    "table_too_small": ("too_few_places",),
    "one_based_ids": ("one_based_ids",),
    "blank": ("no_output_for_blank",),
    "positions": ("positions_beyond_table",),
    "position_offset": ("positions_with_offset",),
    "generation": ("positions_beyond_table",),
    "odd_positions": ("positions_given",),
    "boxes_pixels": ("boxes_in_pixels",),
    "boxes_negative": ("boxes_negative",),
    "boxes_inverted": ("boxes_negative",),
    "segments": ("segment_ids",),
    "edges": ("edges_with_original_ids",),
    "actions": ("too_few_places",),
    "length": ("length_as_position",),
    "other_order": ("swapped_indices",),
    "offsets": ("offset_beyond_bag",),
    "gather_mark": ("mark_in_gather",),
    "flat": ("flat_position",),
    "quantile": ("quantile_levels",),
    "garbage": ("garbage_ids",),
    "nan_cast": ("nan_cast_to_integer",),
    "float_ids": ("float_ids",),
    "half_ids": ("float_ids",),
    "shift_on_line": ("shift_on_the_line",),
    "shift_before": ("shift_before",),
    "shift_below": ("shift_before",),
    "image_tokens": ("more_places_than_values",),
    "bce_logits": ("not_probabilities",),
    "bce_rounding": ("rounded_out_of_interval",),
    "bce_mask_255": ("image_not_divided",),
    "bce_labels": ("labels_as_binary_target",),
    "bce_nan": ("nan_before",),
    "drawn_logits": ("bad_weights",),
    "drawn_cold": ("temperature_of_zero", "nan_before"),
    "drawn_nan": ("not_a_number_weights", "nan_before"),
    "drawn_inf": ("bad_weights",),
    "drawn_nothing": ("bad_weights",),
}
"""All rules that may speak on the evidence of a cause; every other one must be silent."""


def fired(evidence: Evidence) -> tuple[str, ...]:
    """Names of the rules that give a hint, in their order."""
    return tuple(hint.rule for hint in hints_of(evidence))


def hint(cause: str) -> Hint:
    """The first hint on the evidence of a cause."""
    return hints_of(given.CAUSES[cause]())[0]


# --- the matrix ----------------------------------------------------------------------------------


def test_every_cause_has_its_row() -> None:
    """The table of causes and the table of what is expected have the same rows."""
    assert list(FIRES) == list(given.CAUSES)


@pytest.mark.parametrize("cause", given.CAUSES)
def test_only_the_rules_of_a_cause_speak(cause: str) -> None:
    """Every rule is given the evidence of every cause, and speaks on its own only."""
    evidence = given.CAUSES[cause]()
    limits = Limits()
    speaking = [found.rule for found in find_hints(evidence, limits)]
    assert (speaking, limits.lines) == (list(FIRES[cause]), [])


def test_every_rule_has_a_cause() -> None:
    """A rule that no evidence makes speak is not tested."""
    homes = {"labels", "tables", "places", "probabilities", "indexes"}
    mine = [item for item in table() if item.apply.__module__.rpartition(".")[2] in homes]
    causes = [build() for build in given.CAUSES.values()]
    assert [entry.name for entry in mine if not any(map(entry.apply, causes))] == []


@pytest.mark.parametrize("cause", given.CAUSES)
def test_fixes_are_code(cause: str) -> None:
    """A fix is one line of Python, or a magic."""
    for found in hints_of(given.CAUSES[cause]()):
        assert found.fix is None or "\n" not in found.fix
        if found.fix is not None and not found.fix.startswith("%%"):
            ast.parse(found.fix)


@pytest.mark.parametrize("entry", table(), ids=lambda entry: entry.name)
def test_rules_state_their_cause(entry: object) -> None:
    """Each rule's docstring is one sentence."""
    text = (entry.apply.__doc__ or "").strip()  # type: ignore[attr-defined]
    assert text.endswith(".")
    assert "\n" not in text


def test_nothing_is_said_without_a_finding() -> None:
    """No evidence and an exception alone carry no cause."""
    assert hints_of(Evidence()) == ()
    error = ErrorFacts(type_name="RuntimeError", message="size mismatch")
    assert hints_of(Evidence(error=error)) == ()


@pytest.mark.parametrize("cause", given.CAUSES)
def test_nothing_is_said_without_values(cause: str) -> None:
    """Where the tensors could not be read, no rule guesses what was in them."""
    assert hints_of(replace(given.CAUSES[cause](), tensors=())) == ()


def test_hints_are_few_and_ordered() -> None:
    """The surest come first, always in the same order, and no more than a reader reads."""
    assert [entry.priority for entry in table()] == sorted(entry.priority for entry in table())
    assert len({entry.name for entry in table()}) == len(table())
    assert fired(given.CAUSES["drawn_nan"]()) == ("not_a_number_weights", "nan_before")
    assert all(len(hints_of(build())) <= MAX_HINTS for build in given.CAUSES.values())


# --- text and fix --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "numbers", "fix"),
    [
        ("one_based_labels", ("1 to 10",), "F.cross_entropy(z, y - 1)"),
        ("label_equals_classes", ("labels up to 10", "11 outputs", "has 10"), None),
        ("label_beyond_classes", ("13", "14", "10"), None),
        ("binary_labels_one_output", ("0 and 1",), None),
        ("minus_one", ("-1", "-100"), "F.cross_entropy(z, y, ignore_index=-1)"),
        ("signs", ("-1 and 1",), "F.cross_entropy(z, (y + 1) // 2)"),
        ("beyond_vocabulary", ("50 tokens", "0 … 49", "-100"), None),
        ("minus_100", ("-100", "255"), "F.cross_entropy(z, y, ignore_index=-100)"),
        ("void_255", ("255", "-100"), "F.cross_entropy(z, mask, ignore_index=255)"),
        ("mask_0_255", ("0 and 255",), "F.cross_entropy(z, (mask == 255).long())"),
        ("gray_mask", ("4 different", "200", "3 classes"), None),
        ("uint8_labels", ("-1 became 255",), "F.cross_entropy(z, y, ignore_index=255)"),
        ("one_hot", ("5", "6", "4"), None),
        ("one_hot_mark", ("-1",), None),
        ("ignored_as_id", ("-100", "decoder"), "labels.masked_fill(labels == -100, 1)"),
        ("minus_one_padding", ("-1",), None),
        ("added_tokens", ("100",), None),
        ("other_vocabulary", ("4711", "100"), None),
        ("padding", ("100",), None),
        ("table_too_small", ("12", "13", "10"), None),
        ("one_based_ids", ("1 to 5",), "net(movie - 1)"),
        ("blank", ("up to 5", "blank", "6 outputs"), None),
        ("positions", ("20", "16"), None),
        ("position_offset", ("32", "30", "2"), None),
        ("generation", ("17", "16"), None),
        ("odd_positions", ("40", "32"), None),
        ("boxes_pixels", ("1500", "1023"), None),
        ("boxes_negative", ("x = -5",), None),
        ("boxes_inverted", ("width = -5",), None),
        ("segments", ("2", "0 … 1"), None),
        ("edges", ("57", "5 nodes"), None),
        ("actions", ("action 4", "the 4 outputs"), None),
        ("length", ("7", "position 6"), "x[rows, lengths - 1]"),
        ("gather_mark", ("-100",), None),
        ("flat", ("12", "cols goes up to 4"), None),
        ("garbage", ("4607182418800017408", "10^18"), None),
        ("nan_cast", ("-9223372036854775808", "x holds"), None),
        ("float_ids", ("-12.5", "0.25"), None),
        ("half_ids", ("float16", "2048"), None),
        ("shift_on_line", ("0 to 9",), "F.cross_entropy(z, y)"),
        ("shift_below", ("line 4", "y = y - 1"), None),
        ("image_tokens", ("2 elements", "image tokens"), None),
        ("bce_logits", ("-2.5 to 3",), "F.binary_cross_entropy_with_logits(p, t)"),
        ("bce_rounding", ("1.0000001",), "F.binary_cross_entropy(p.clamp(0, 1), t)"),
        ("bce_mask_255", ("0 to 255",), "F.binary_cross_entropy(p, t / 255)"),
        ("bce_labels", ("-1 to 1",), "F.binary_cross_entropy(p, (t + 1) / 2)"),
        ("bce_nan", ("1 of 2",), None),
        ("drawn_logits", ("-2.5 to 3",), "torch.multinomial(torch.softmax(p, dim=-1), 1)"),
        ("drawn_cold", ("temperature is 0",), None),
        ("drawn_nan", ("-inf alone", "masked_fill in line 3"), None),
        ("drawn_inf", (), None),
        ("drawn_nothing", ("1 of 4", "masked_fill in line 3"), None),
    ],
)
def test_a_hint_names_what_was_seen(cause: str, numbers: tuple[str, ...], fix: str | None) -> None:
    """The text holds the observed numbers, the fix the user's own words."""
    found = hint(cause)
    assert [number for number in numbers if number not in found.text] == []
    assert (found.fix is None) if fix is None else (found.fix is not None and fix in found.fix)


# --- neighbours: one step away, another hint or none ---------------------------------------------


TEN = [at % 10 for at in range(30)]
ID_ROWS = [5, 6, 7, 8, 100, 5, 6, 7, 8, 100]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        pytest.param(lambda: given.labels([0, *given.ONE_TO_TEN], 10), "too_few_places", id="0"),
        pytest.param(lambda: given.labels([2, 10], 10), "too_few_places", id="few labels"),
        pytest.param(lambda: given.labels([1, 2, 10], 10), "too_few_places", id="three labels"),
        pytest.param(lambda: given.labels([1, 10], 10), "too_few_places", id="two labels"),
        pytest.param(
            lambda: given.lookup([40], 32, name="position_ids", path="positions", shape=()),
            None,
            id="one position",
        ),
        pytest.param(lambda: given.labels([10] * 40, 10), "too_few_places", id="only C"),
        pytest.param(lambda: given.labels([1, 2, 11], 10), "too_few_places", id="beyond C"),
        pytest.param(lambda: given.labels([*TEN, -2], 10), None, id="below the marks"),
        pytest.param(lambda: given.labels([-1, -100, 3], 10, ignore=255), None, id="two marks"),
        pytest.param(lambda: given.labels([0, 2], 1), None, id="three labels, one output"),
        pytest.param(
            lambda: given.labels([0, 255, 255], 3, dtype="uint8"), "mask_of_0_and_255", id="u8 mask"
        ),
        pytest.param(
            lambda: given.labels([0, 254] * 16, 21, shape=given.MASK),
            "far_label",
            id="254 marks nothing",
        ),
        pytest.param(lambda: given.labels([0, 3, 255] * 3, 255), "too_few_places", id="C=255"),
        pytest.param(
            lambda: given.labels([0, 255, 90] * 8, 2, shape=(2, 3, 4)),
            "gray_mask",
            id="three grays",
        ),
        pytest.param(
            lambda: given.labels([0, 3, 20, 22, 255] * 6, 21, shape=(2, 3, 5)),
            None,
            id="255 and a stray class",
        ),
        pytest.param(
            lambda: given.labels([0, 17, 90, 200], 3, name="y"),
            "too_few_places",
            id="no image",
        ),
        pytest.param(
            lambda: given.bert([5, 163, 7], 100, "word_embeddings"), "added_tokens", id="63 beyond"
        ),
        pytest.param(
            lambda: given.bert([5, 164, 7], 100, "word_embeddings"),
            "other_vocabulary",
            id="64 beyond",
        ),
        pytest.param(lambda: given.bert([5, -2, 7], 100, "word_embeddings"), None, id="-2 as id"),
        pytest.param(
            lambda: given.bert([5, -100, -1], 100, "word_embeddings"), None, id="both marks"
        ),
        pytest.param(
            lambda: given.bert(ID_ROWS, 100, "word_embeddings", shape=(2, 5)),
            "added_tokens",
            id="one end token a row",
        ),
        pytest.param(
            lambda: given.bert(
                ID_ROWS,
                100,
                "word_embeddings",
                shape=(2, 5),
                call_context=CallContext(pad_token_id=100),
            ),
            "padding_beyond_table",
            id="the tokenizer's padding id",
        ),
        pytest.param(
            lambda: given.lookup([1, 2, 3, 4, 5], 5, padding=0),
            "too_few_places",
            id="row 0 is padding",
        ),
        pytest.param(
            lambda: given.lookup([1, 9], 9, path="users"),
            "too_few_places",
            id="two ids are no pattern",
        ),
        pytest.param(
            lambda: given.lookup([0, 1, 2, 5], 5, path="users"), "too_few_places", id="0 too"
        ),
        pytest.param(
            lambda: given.lookup([0, 1, 5], 5, path="composition"),
            "too_few_places",
            id="composition is no position",
        ),
        pytest.param(
            lambda: given.bert(
                [*range(2, 35)], 32, "position_embeddings", name=None, shape=(1, 33), padding=1
            ),
            "positions_beyond_table",
            id="too long even without the offset",
        ),
        pytest.param(
            lambda: given.bert([0, 1, -1], 32, "position_embeddings", shape=(1, 3)),
            None,
            id="a negative position",
        ),
        pytest.param(
            lambda: given.boxes([9, 1024], "h_position_embeddings", [9, 9, 9, 1033]),
            "boxes_in_pixels",
            id="height beyond",
        ),
        pytest.param(
            lambda: given.boxes([9, -1], "h_position_embeddings", [9, 9, 9, 8]),
            "boxes_negative",
            id="height negative",
        ),
        pytest.param(
            lambda: given.boxes([9, -1], "y_position_embeddings", [9, -1, 9, 8]),
            "boxes_negative",
            id="y negative",
        ),
        pytest.param(
            lambda: given.bert([1, 1], 1, "token_type_embeddings", name="seg"),
            "segment_ids",
            id="one segment",
        ),
        pytest.param(
            lambda: given.out_of_range(
                "aten::index_select",
                "index",
                [10, 57],
                5,
                expression="idx",
                call="x.index_select(0, idx)",
            ),
            None,
            id="rows by another name",
        ),
        pytest.param(
            lambda: given.gathered(
                [0, 4], 4, call="p.gather(1, y[:, None])", line=(given.tensor(None, "y", [0, 4]),)
            ),
            None,
            id="a gather without actions",
        ),
        pytest.param(
            lambda: given.gathered(
                [0, 4],
                4,
                call="p.gather(1, y[:, None])",
                line=(given.tensor(None, "attractions", [0, 4]),),
            ),
            None,
            id="attractions are no actions",
        ),
        pytest.param(
            lambda: given.out_of_range(
                "aten::index",
                "indices[0]",
                [1, 13],
                12,
                low=-12,
                expression="i",
                call="flat[i]",
                others=(TensorFact(argument="self", expression="flat", shape=(12,)),),
            ),
            None,
            id="two beyond a flat end",
        ),
        pytest.param(
            lambda: given.lookup([5, 1 << 47], 100, path="users"),
            "too_few_places",
            id="large, but no garbage",
        ),
        pytest.param(
            lambda: given.lookup(
                [0, 12],
                10,
                name="x.long()",
                call="emb(x.long())",
                others=(given.tensor(None, "x", [0.0, 12.0]),),
            ),
            "too_few_places",
            id="floats that are ids",
        ),
        pytest.param(
            lambda: given.lookup(
                [0, 12],
                10,
                name="b.long()",
                call="emb(b.long())",
                others=(given.tensor(None, "x", [0.5, 12.5]),),
            ),
            "too_few_places",
            id="another float on the line",
        ),
        pytest.param(
            lambda: given.labels(
                [1, 5, 11], 10, name="y + 1", others=(given.tensor(None, "y", [0, 4, 10]),)
            ),
            "too_few_places",
            id="bad before the shift",
        ),
        pytest.param(
            lambda: given.labels(
                given.ONE_TO_TEN, 10, provenance=(given.step("aten::mul.Tensor", "y = y * n"),)
            ),
            "one_based_labels",
            id="not a sum",
        ),
        pytest.param(
            lambda: given.labels(
                given.ONE_TO_TEN,
                10,
                provenance=(
                    given.step("aten::add.Tensor", "y = y + 1"),
                    given.step("aten::_to_copy", "y = y.cuda()", 2),
                ),
            ),
            "one_based_labels",
            id="bad before the sum",
        ),
        pytest.param(lambda: given.bce([0.5, 1.02]), "not_probabilities", id="2 % above 1"),
        pytest.param(lambda: given.bce([0.0, 200.0]), "image_not_divided", id="an image as input"),
        pytest.param(lambda: given.bce([0.0, 300.0]), "not_probabilities", id="beyond bytes"),
        pytest.param(lambda: given.bce([1.0, 2.0], "target"), "labels_as_binary_target", id="1, 2"),
        pytest.param(
            lambda: given.bce([0.0, 4.0], "target"), "labels_as_binary_target", id="0 … 4"
        ),
        pytest.param(
            lambda: given.bce([0.0, 1.5], "target"), "labels_as_binary_target", id="no labels"
        ),
        pytest.param(lambda: given.bce([0.5, math.inf]), None, id="infinite"),
        pytest.param(lambda: given.drawn([0.5, -1e-9]), None, id="rounded below 0"),
        pytest.param(lambda: given.drawn([0.5, math.inf, math.nan]), "nan_before", id="both"),
    ],
)
def test_one_step_away(build: Callable[[], Evidence], expected: str | None) -> None:
    """A neighbour of a cause gets the hint that is true of it, or none."""
    assert (fired(build()) or (None,))[0] == expected


def test_large_image_masks_are_recognised_without_distinct_values() -> None:
    """More than 32 different pixels leave only the range and the listed offenders."""
    values = [at % 41 * 6 for at in range(96)]
    assert fired(given.labels(values, 3, shape=(2, 6, 8))) == ("gray_mask",)


def test_ignored_labels_do_not_hide_a_pattern() -> None:
    """Labels from 1 to C with -100 among them still look 1-based."""
    assert fired(given.labels([*given.ONE_TO_TEN, -100], 10)) == ("one_based_labels",)


def test_labels_that_fill_minus_one_to_c_minus_two_may_be_shifted() -> None:
    """-1 … C-2 without a gap has a second explanation, and it is told."""
    found = hints_of(given.labels([-1, 0, 1, 2], 4))
    assert [item.rule for item in found] == ["mark_not_ignored"]
    assert "-1 … 2" in found[0].text


def test_edges_with_more_nodes_than_rows_cannot_be_renumbered() -> None:
    """Six nodes do not fit five rows, whatever their numbers: there is nothing to renumber."""
    nodes = [10, 57, 33, 41, 42, 43]
    evidence = given.out_of_range(
        "aten::index_select",
        "index",
        nodes,
        5,
        call="x.index_select(0, edge_index[0])",
        others=(given.tensor(None, "edge_index", nodes * 2, (2, 6)),),
    )
    (found,) = hints_of(evidence)
    assert found.fix is None
    assert "6 different nodes" in found.text


def test_rows_and_columns_of_edges_are_edges() -> None:
    """``row`` beside ``col`` names edges; alone it is any index."""

    def evidence(*others: TensorFact) -> Evidence:
        return given.out_of_range(
            "aten::index_add_",
            "index",
            [3, 7],
            5,
            expression="col",
            call="out.index_add_(0, col, x[row])",
            others=others,
        )

    assert fired(evidence(given.tensor(None, "row", [1, 2]))) == ("edges_with_original_ids",)
    assert fired(evidence()) == ()


def test_nan_with_provenance_names_the_line() -> None:
    """The recorder's first bad op is part of the text."""
    evidence = replace(
        given.bce([0.5, math.nan]), provenance=(given.step("aten::log", "h = x.log()", FIRST_BAD),)
    )
    assert "line 4" in hints_of(evidence)[0].text


def test_nan_on_an_unproven_way_names_no_line() -> None:
    """A step that merely passed the values on is not called the first."""
    evidence = replace(
        given.bce([0.5, math.nan]), provenance=(given.step("aten::log", "h = x.log()"),)
    )
    assert "line" not in hints_of(evidence)[0].text


# --- the writer of fixes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name", "fix"),
    [
        ("F.cross_entropy(z, y)", "y", "F.cross_entropy(z, y - 1)"),
        ("crit(net(x, y), y)", "y", "crit(net(x, y), y - 1)"),
        ("crit(z, batch['y'])", 'batch["y"]', 'crit(z, batch["y"] - 1)'),
        ("crit(z, yy, target=y)", "y", "crit(z, yy, target=y - 1)"),
        ("crit(\n    z,\n    y,\n)", "y", "crit( z, y - 1, )"),
        ("crit(z, y.view(-1))", "y", "crit(z, (y - 1).view(-1))"),
        ("crit('é', y)", "y", "crit('é', y - 1)"),
        ("model(**batch)", 'batch["labels"]', 'batch["labels"] = batch["labels"] - 1'),
        ("crit(z, y)  # y", "y", "y = y - 1"),
        (None, "y", "y = y - 1"),
        ("crit(z, 2 * y)", "2 * y", "crit(z, (2 * y) - 1)"),
    ],
)
def test_a_fix_changes_the_expression_by_its_place(call: str | None, name: str, fix: str) -> None:
    """Only the node that is the argument changes, whatever else is spelled alike."""
    evidence = given.labels(given.ONE_TO_TEN, 10, name=name, call=call)
    assert hints_of(evidence)[0].fix == fix


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        ("F.cross_entropy(z, y, ignore_index=-100)", "F.cross_entropy(z, y, ignore_index=-1)"),
        ("F.cross_entropy(z, y,)", "F.cross_entropy(z, y, ignore_index=-1)"),
        ("nn.CrossEntropyLoss()(z, y)", "nn.CrossEntropyLoss(ignore_index=-1)(z, y)"),
        ("crit(z, y)", "crit(z, y.masked_fill(y == -1, -100))"),
        (
            "F.cross_entropy(z, y, **more)",
            "F.cross_entropy(z, y.masked_fill(y == -1, -100), **more)",
        ),
    ],
)
def test_a_keyword_is_added_where_the_call_can_take_it(call: str, fix: str) -> None:
    """``ignore_index`` goes into the loss on the line, else the mark becomes what it ignores."""
    assert hints_of(given.labels([3, -1], 10, call=call))[0].fix == fix


def test_a_loss_inside_a_library_gets_changed_labels() -> None:
    """Where the user cannot reach the loss, his labels take the number that it ignores."""
    evidence = given.labels([3, -1], 10, call="model(ids, labels=y)", library=given.TRANSFORMERS)
    assert hints_of(evidence)[0].fix == "model(ids, labels=y.masked_fill(y == -1, -100))"


DAMAGE: dict[str, Callable[[Evidence], Evidence]] = {
    "no call": lambda e: replace(e, call_text=None, source=None, frames=()),
    "half a call": lambda e: replace(e, call_text="F.cross_entropy(z,"),
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
    for build in given.CAUSES.values():
        for damage in DAMAGE.values():
            for found in hints_of(damage(build())):
                if found.fix is not None and not found.fix.startswith("%%"):
                    ast.parse(found.fix)


def test_a_rule_that_raises_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests ask the rules with fails as soon as any one of them raises."""

    def broken(evidence: Evidence) -> None:
        raise ZeroDivisionError

    for entry in table():
        rules = [replace(item, apply=broken) if item is entry else item for item in table()]
        with monkeypatch.context() as patch:
            patch.setattr(_base, "_rules", rules)
            with pytest.raises(
                AssertionError, match=f"hint {entry.name} unavailable: ZeroDivision"
            ):
                hints_of(Evidence())


@pytest.mark.parametrize(("values", "fires"), [([1, 2, 3, 4, 5], True), ([1, 2, 3, 4, 6], False)])
def test_the_blank_needs_one_output_more(values: list[int], fires: bool) -> None:
    """Labels 1 … C for C outputs forgot the blank; labels further up forgot something else."""
    evidence = given.out_of_range(
        "aten::_ctc_loss", "targets", values, 5, expression="y", scalars={"blank": "0"}
    )
    assert ("no_output_for_blank" in fired(evidence)) is fires


@pytest.mark.parametrize(("blank", "rule"), [("0", "no_output_for_blank"), ("4", "one_based_ids")])
def test_labels_of_ctc_count_from_one_when_the_blank_is_first(blank: str, rule: str) -> None:
    """Taking one away would make the first label the blank."""
    evidence = given.out_of_range(
        "aten::_ctc_loss", "targets", [1, 2, 3, 4, 5], 5, expression="y", scalars={"blank": blank}
    )
    assert fired(evidence) == (rule,)


@pytest.mark.parametrize(("name", "rules"), [("at", ("one_based_ids",)), ("n - 1", ())])
def test_what_counts_back_is_not_called_one_based(name: str, rules: tuple[str, ...]) -> None:
    """``lengths - 1`` is an index that somebody thought about."""
    evidence = given.out_of_range(
        "aten::index", "indices", [1, 2, 3, 4, 5], 5, expression=name, call=f"x[{name}]"
    )
    assert fired(evidence) == rules
