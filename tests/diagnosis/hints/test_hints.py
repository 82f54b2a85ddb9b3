"""Each cause rule fires on its own cause, says what was seen, and is silent one step away."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.limits import Limits
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import Hint, OpName, TensorFact, TensorSummary
from cudalens.diagnosis.hints import READINGS, find_hints, nonfinite
from cudalens.diagnosis.hints._base import first_reading
from tests.builders import fact
from tests.diagnosis.hints import test_indexes as indexes_test
from tests.diagnosis.hints import test_labels as labels_test
from tests.diagnosis.hints import test_places as places_test
from tests.diagnosis.hints import test_probabilities as probabilities_test
from tests.diagnosis.hints import test_tables as tables_test
from tests.hint_evidence import (
    MASK,
    ONE_TO_TEN,
    TRANSFORMERS,
    WRITTEN,
    Cause,
    bce,
    bert,
    check_cause,
    check_code,
    ctc,
    drawn,
    gathered,
    hints_of,
    indexed,
    labels,
    lookup,
    one_hot,
    out_of_range,
    step,
    tensor,
)

TEN = [at % 10 for at in range(30)]
WORDS, PLACES = "word_embeddings", "position_embeddings"


def into_rows(*others: TensorFact) -> Evidence:
    call = "out.index_add_(0, col, x[row])"
    return out_of_range(
        "aten::index_add_", "index", [3, 7], 5, expression="col", call=call, others=others
    )


OBSERVED: dict[str, Cause] = {
    "label_equals_classes": Cause(
        labels([0, 3, 10, 7], 10),
        rule="observations",
        says=(
            "1 of 4 labels is 10",
            "0 … 7",
        ),
    ),
    "label_beyond_classes": Cause(
        labels([0, 3, 13, 7], 10), rule="observations", says=("1 of 4 labels is 13",)
    ),
    "one_outlier": Cause(
        labels([0, 1, 2, 6], 3),
        rule="observations",
        says=(
            "1 of 4 labels is 6",
            "0 … 2",
        ),
    ),
    "padded_with_classes": Cause(
        labels([0, 1, 3, 3, 2, 0, 1, 3], 3, shape=(2, 1, 4)),
        rule="observations",
        says=(
            "3 of 8",
            "end of rows",
        ),
    ),
    "gray_mask": Cause(
        labels([0, 17, 90, 200] * 8, 3, name="mask", shape=MASK),
        rule="observations",
        says=(
            "24 of 32",
            "17, 90, 200",
        ),
    ),
    "one_hot": Cause(
        one_hot([0, 3, 5], "F.one_hot(y, num_classes=4)"),
        rule="observations",
        says=("1 of 3 labels is 5",),
    ),
    "table_too_small": Cause(
        lookup([0, 5, 12], 10, name="user", path="users"),
        rule="observations",
        says=(
            "1 of 3 ids is 12",
            "0 … 5",
        ),
    ),
    "odd_positions": Cause(
        lookup([3, 9, 40], 32, name="position_ids", path="positions", shape=(1, 3)),
        rule="observations",
        says=("1 of 3 values is 40",),
    ),
    "edges": Cause(
        out_of_range(
            "aten::index_select",
            "index",
            [10, 57, 33],
            5,
            call="x.index_select(0, edge_index[0])",
            others=(tensor(None, "edge_index", [10, 57, 33, 41, 42, 57], (2, 3)),),
        ),
        rule="observations",
        says=("10, 33, 57",),
    ),
    "actions": Cause(
        gathered(
            [0, 1, 2, 3, 4, 0],
            4,
            call="q(s).gather(1, actions.unsqueeze(1))",
            line=(tensor(None, "actions", [0, 1, 2, 3, 4, 0]),),
        ),
        rule="observations",
        says=("1 of 6 values is 4",),
    ),
    "gather_mark": Cause(
        gathered([0, -100, 3], 5, name="y[:, None]", call="z.gather(1, y[:, None])"),
        rule="observations",
        says=("1 of 3 values is -100",),
    ),
    "flat": Cause(
        out_of_range(
            "aten::index",
            "indices[0]",
            [1, 12],
            12,
            low=-12,
            call="flat[rows * width + cols]",
            others=(
                fact("self", "float32[12]", "flat"),
                tensor(None, "rows", [0, 2]),
                tensor(None, "cols", [1, 4]),
            ),
        ),
        rule="observations",
        says=("1 of 2 values is 12",),
    ),
    "shift_before": Cause(
        labels([1, 5, 10], 10, provenance=(step("aten::add.Tensor", "y = y + 1"),)),
        rule="observations",
        says=("line 4: y = y + 1",),
    ),
    "shift_below": Cause(
        labels([-1, 3, 8], 10, provenance=(step("aten::sub.Tensor", "y = y - 1"),)),
        rule="observations",
        says=("line 4: y = y - 1",),
    ),
}
"""Causes that no reading knows: what was observed is said."""
NEIGHBOURS: dict[str, Cause] = {
    "infinite of nobody knows what": Cause(drawn([math.inf, 0.5]), rule="observations"),
    "a negative id of few": Cause(
        lookup([0, 5, -2], 300, path="users", dtype="int8"), rule="observations"
    ),
    "few labels": Cause(labels([2, 10], 10), rule="observations"),
    "three labels": Cause(labels([1, 2, 10], 10), rule="observations"),
    "two labels": Cause(labels([1, 10], 10), rule="observations"),
    "one position": Cause(
        lookup([40], 32, name="position_ids", path="positions", shape=()), rule="observations"
    ),
    "only C": Cause(labels([10] * 40, 10), rule="observations"),
    "beyond C": Cause(labels([1, 2, 11], 10), rule="observations"),
    "below the marks": Cause(labels([*TEN, -2], 10), rule="observations"),
    "two marks": Cause(labels([-1, -100, 3], 10, ignore=255), rule="observations"),
    "three labels, one output": Cause(labels([0, 2], 1), rule="observations"),
    "254 marks nothing": Cause(labels([0, 254] * 16, 21, shape=MASK), rule="observations"),
    "C=255": Cause(labels([0, 3, 255] * 3, 255), rule="observations"),
    "three grays": Cause(
        labels([0, 255, 90] * 8, 2, shape=(2, 3, 4)), rule="observations", says=("90, 255",)
    ),
    "255 and a stray class": Cause(
        labels([0, 3, 20, 22, 255] * 6, 21, shape=(2, 3, 5)), rule="observations"
    ),
    "no image": Cause(labels([0, 17, 90, 200], 3, name="y"), rule="observations"),
    "-2 as id": Cause(bert([5, -2, 7], 100, WORDS), rule="observations"),
    "both marks": Cause(bert([5, -100, -1], 100, WORDS), rule="observations"),
    "0 too": Cause(lookup([0, 1, 2, 5], 5, path="users"), rule="observations"),
    "composition is no position": Cause(
        lookup([0, 1, 5], 5, path="composition"), rule="observations"
    ),
    "a negative position": Cause(bert([0, 1, -1], 32, PLACES, shape=(1, 3)), rule="observations"),
    "rows by another name": Cause(
        out_of_range(
            "aten::index_select",
            "index",
            [10, 57],
            5,
            expression="idx",
            call="x.index_select(0, idx)",
        ),
        rule="observations",
    ),
    "a gather without actions": Cause(
        gathered([0, 4], 4, call="p.gather(1, y[:, None])", line=(tensor(None, "y", [0, 4]),)),
        rule="observations",
    ),
    "attractions are no actions": Cause(
        gathered(
            [0, 4], 4, call="p.gather(1, y[:, None])", line=(tensor(None, "attractions", [0, 4]),)
        ),
        rule="observations",
    ),
    "two beyond a flat end": Cause(
        out_of_range(
            "aten::index",
            "indices[0]",
            [1, 13],
            12,
            low=-12,
            expression="i",
            call="flat[i]",
            others=(fact("self", "[12]", "flat"),),
        ),
        rule="observations",
    ),
    "large, but no garbage": Cause(lookup([5, 1 << 47], 100, path="users"), rule="observations"),
    "floats that are ids": Cause(
        lookup(
            [0, 12],
            10,
            name="x.long()",
            call="emb(x.long())",
            others=(tensor(None, "x", [0.0, 12.0]),),
        ),
        rule="observations",
    ),
    "another float on the line": Cause(
        lookup(
            [0, 12],
            10,
            name="b.long()",
            call="emb(b.long())",
            others=(tensor(None, "x", [0.5, 12.5]),),
        ),
        rule="observations",
    ),
    "bad before the shift": Cause(
        labels([1, 5, 11], 10, name="y + 1", others=(tensor(None, "y", [0, 4, 10]),)),
        rule="observations",
    ),
    "numbered by another line": Cause(
        labels(ONE_TO_TEN, 10, provenance=(step("aten::add.Tensor", "y = out.argmax(1) + 1"),)),
        rule="observations",
        says=("line 4: y = out.argmax(1) + 1",),
    ),
    "computed on the line": Cause(labels(ONE_TO_TEN, 10, name="n * y"), rule="observations"),
    "computed ids": Cause(
        bert([5, 102, 7], 100, WORDS, provenance=(step("torch.argmax", "ids = out.argmax(-1)"),)),
        rule="observations",
        says=("line 4: ids = out.argmax(-1)",),
    ),
    "computed rows": Cause(
        lookup(
            [0, 1, 2, 3, 4, 5] * 9,
            5,
            path="ages",
            provenance=(step("torch.bucketize", "ages = torch.bucketize(years, edges)"),),
        ),
        rule="observations",
    ),
    "infinite": Cause(bce([0.5, math.inf]), rule="observations"),
    "rounded below 0": Cause(drawn([0.5, -1e-9]), rule="observations"),
    "more grays than are listed": Cause(
        labels([at % 41 * 6 for at in range(96)], 3, shape=(2, 6, 8)),
        rule="observations",
        says=("outside, such as 6",),
    ),
    "col beside row": Cause(into_rows(tensor(None, "row", [1, 2])), rule="observations"),
    "col alone": Cause(into_rows(), rule="observations"),
    "labels beyond the blank": Cause(ctc([1, 2, 3, 4, 6], "0"), rule="observations"),
    "an index that counts back": Cause(indexed("n - 1"), rule="observations"),
}
"""One step away from the cause of a reading."""
CAUSES = {
    **labels_test.CAUSES,
    **indexes_test.CAUSES,
    **tables_test.CAUSES,
    **places_test.CAUSES,
    **probabilities_test.CAUSES,
    **OBSERVED,
}


# --- the matrix ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", (rows := {**OBSERVED, **NEIGHBOURS}).values(), ids=rows)
def test_only_what_was_observed_is_said(cause: Cause) -> None:
    check_cause(cause)


def test_every_reading_has_a_cause() -> None:
    """A reading that no evidence makes speak is not tested."""
    mine = [item for item in READINGS if item.__module__ != nonfinite.__name__]
    assert [
        item.__name__ for item in mine if not any(item(cause.evidence) for cause in CAUSES.values())
    ] == []


@pytest.mark.parametrize("cause", CAUSES)
def test_one_reading_speaks_of_a_cause(cause: str) -> None:
    """So neither their order nor what they are called decides what is said."""
    assert len({item for item in READINGS if item(CAUSES[cause].evidence)}) <= 1


def test_nothing_is_said_without_a_finding() -> None:
    """No evidence and an exception alone carry no cause."""
    assert hints_of(Evidence()) == ()
    error = ErrorFacts(type_name="RuntimeError", message="size mismatch")
    assert hints_of(Evidence(error=error)) == ()


@pytest.mark.parametrize("cause", CAUSES)
def test_nothing_is_said_without_values(cause: str) -> None:
    """Where the tensors could not be read, no rule guesses what was in them."""
    assert hints_of(replace(CAUSES[cause].evidence, tensors=())) == ()


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
    for cause in CAUSES.values():
        for damage in DAMAGE.values():
            check_code(hints_of(damage(cause.evidence)))


def test_a_reading_that_raises_leaves_a_line_and_the_next_is_asked() -> None:
    def broken(evidence: Evidence) -> None:
        raise ZeroDivisionError

    limits = Limits()
    hints = first_reading((broken, lambda evidence: Hint(rule="next", text="")), Evidence(), limits)
    assert [item.rule for item in hints] == ["next"]
    assert limits.lines[0].startswith("hint broken unavailable: ZeroDivision")


def of_a_row(**facts: Any) -> Evidence:
    evidence = bce([0.5, math.nan])
    assert evidence.violation is not None
    return replace(evidence, violation=replace(evidence.violation, is_masked_row=True, **facts))


@pytest.mark.parametrize(
    ("evidence", "rule"),
    [
        (Evidence(), None),
        (labels(ONE_TO_TEN, 10), "one_based_labels"),
        (of_a_row(is_nonfinite=False), "nan_before"),
        (of_a_row(is_nonfinite=True), "all_masked"),
    ],
)
def test_the_readings_of_a_kind_of_value_are_asked(evidence: Evidence, rule: str | None) -> None:
    hints = find_hints(evidence, Limits())
    assert [hint.rule for hint in hints] == ([] if rule is None else [rule])
