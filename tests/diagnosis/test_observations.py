"""Observations of a guard's finding: each template with the facts that it needs, and without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.evidence_types import (
    AddedNumber,
    BadSlice,
    BoundOrigin,
    DatasetColumn,
    Marks,
    NamedConstant,
    NanHolder,
)
from cudalens.core.graph_types import FIRST_BAD, WRITES, ProvenanceStep
from cudalens.core.limits import Limits
from cudalens.core.report import ErrorFacts
from cudalens.core.report_types import (
    Bounds,
    LineRef,
    Offender,
    Offenders,
    OtherModule,
    SeenBefore,
    SourceSpan,
)
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.observations import observe
from tests.hint_evidence import (
    bce,
    ctc,
    finding,
    labels,
    lookup,
    observations,
    observed,
    out_of_range,
    tensor,
    with_offenders,
)


def step(op: str, text: str, line: int, **more: Any) -> ProvenanceStep:
    return ProvenanceStep(op=op, source=LineRef(cell=1, line=line, text=text), **more)


# --- values ---------------------------------------------------------------------------------------


def test_equal_bad_values_are_said_as_one() -> None:
    assert observed(labels([1, 2, 10, 9, 10], 10), "values") == [
        "2 of 5 labels are 10, all others 1 … 9"
    ]
    (item,) = [it for it in observations(labels([1, 2, 12, 9, 10], 10)) if it.kind == "values"]
    assert item.text == "2 of 5 labels are 10, 12, all others 1 … 9"
    known = {"count": 2, "total": 5, "values": (10, 12), "others": "1 … 9", "allowed": 0}
    assert item.facts == known


def test_indices_of_classes_are_labels_in_every_loss() -> None:
    """The rules on labels leave those of CTC alone, whose class 0 is no label; the words do not."""
    evidence = ctc([1, 2, 5, 5], "0")
    assert observed(evidence, "values") == ["2 of 4 values are 5, all others 1 … 2"]
    violation = evidence.violation
    assert violation is not None
    for is_silent in (False, True):
        of_loss = replace(violation, unit="class", is_silent=is_silent)
        found = replace(evidence, violation=of_loss)
        assert observed(found, "values") == ["2 of 4 labels are 5, all others 1 … 2"]
        assert observed(found, "pattern")[0] == (
            "5 is the number of classes, one past the last (0 … 4)"
        )


def test_all_values_bad() -> None:
    assert observed(lookup([7, 7, 7], 5), "values") == ["all 3 ids are 7"]
    # The host may have refused them, with an exception of its own.
    error = ErrorFacts(type_name="IndexError", message="index out of range in self")
    assert observed(lookup([7, 7, 7], 5, error=error), "values") == ["all 3 ids are 7"]


def test_values_that_expand_shows_several_times_are_counted_once() -> None:
    """The report counts those of the expanded tensor elsewhere: both numbers are said."""
    twice = Marks(value=7, copies=2)
    assert observed(lookup([7, 7, 7, 7], 5, marks=twice), "values") == [
        "all 2 ids are 7 (expand shows each 2 times)"
    ]
    assert observed(lookup([7, 7, 7, 7, 1, 1], 5, marks=twice), "values") == [
        "2 of 3 ids are 7, all others 1 (expand shows each 2 times)"
    ]
    assert observed(lookup([7, 7, 7, 1, 1, 1], 5, marks=twice), "values") == [
        "3 of 6 ids are 7, all others 1"
    ]
    ignored = labels([9, 9, -100, -100], 7, marks=replace(twice, value=9))
    assert observed(ignored, "values") == ["2 of 4 labels are 9, 2 are -100 (ignored)"]


def test_one_value_alone_is_in_the_headline() -> None:
    assert observed(lookup([7], 5), "values") == []


def test_allowed_values_are_counted_apart() -> None:
    evidence = with_offenders(labels([9, 3, -100, -100, 1], 7), allowed=2)
    assert observed(evidence, "values") == [
        "1 of 5 labels is 9, 2 are -100 (ignored), all others 1 … 3"
    ]
    evidence = with_offenders(labels([9, -100, -100], 7), allowed=2)
    assert observed(evidence, "values") == ["1 of 3 labels is 9, 2 are -100 (ignored)"]
    # Of a mark that the call does not name it is not known why it is allowed.
    evidence = with_offenders(labels([9, -100], 7, scalars={}), allowed=1)
    assert observed(evidence, "values") == ["1 of 2 labels is 9, 1 is -100 (allowed)"]


def test_values_of_a_float_tensor() -> None:
    numbers = [0.0, 2.0, 1.0, 2.0]
    bounds = Bounds(min=0.0, max=1.0, text="0 … 1")
    fact = tensor("target", "t", numbers)
    evidence = finding("aten::binary_cross_entropy", fact, numbers, lambda value: value > 1, bounds)
    assert observed(evidence, "values") == ["2 of 4 values are 2, all others 0 … 1"]


def test_values_of_a_data_set() -> None:
    column = DatasetColumn(
        name="data", count=300, low=0, high=64, kinds=65, bad_count=1, rows=(217,), others="0 … 63",
        distinct=(0, 63, 64),
    )  # fmt: skip
    text = "1 of 300 ids of data is 64 (item 217), all others 0 … 63"
    assert in_column(column) == [text]
    # Of more bad values than the rows that are known, none is named.
    more = replace(column, bad_count=2)
    assert in_column(more) == ["2 of 300 ids of data are 64, all others 0 … 63"]
    many = replace(column, bad_count=9, distinct=None)
    text = "9 of 300 ids of data are outside, such as 64, 70, 71, all others 0 … 63"
    assert in_column(many, [3, 64, 71, 70, 72]) == [text]
    # Where the batch alone is known, its own values are counted.
    only_classes = replace(column, count=0, classes=64)
    assert in_column(only_classes) == ["1 of 2 ids is 64, all others 3"]


def in_column(column: DatasetColumn, ids: list[int] | None = None) -> list[str]:
    return observed(lookup(ids or [3, 64], 64, dataset_column=column), "values")


def outside(numbers: list[float], **changes: Any) -> list[str]:
    """Return what is said of numbers above 1."""
    bounds = Bounds(min=0.0, max=1.0, text="0 … 1")
    found = finding("aten::x", tensor("target", "t", numbers), numbers, lambda it: it > 1, bounds)
    return observed(with_offenders(found, **changes) if changes else found, "values")


def test_a_few_different_numbers_are_listed_and_of_many_the_ends() -> None:
    assert outside([0.0, 2.5, 3.5, 4.0]) == ["3 of 4 values are 2.5, 3.5, 4, all others 0"]
    four = [0.0, 2.5, 3.5, 4.0, 6.5]
    assert outside(four) == ["4 of 5 values are outside, such as 2.5 and 6.5, all others 0"]
    assert outside([0.0, 2.5, 3.5], count=9, total=20) == [
        "9 of 20 values are outside, such as 2.5 and 3.5, all others 0"
    ]
    assert outside([0.0, 2.5, 2.5], others="low … high") == [
        "2 of 3 values are 2.5, all others low … high"
    ]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0, 7, 8, 9, 10, 11], "5 of 6 ids are 7 … 11, all others 0"),
        ([0, 7, 8], "2 of 3 ids are 7, 8, all others 0"),
        ([0, -3, -2, -1, 7, 8, 9], "6 of 7 ids are -3 … -1, 7 … 9, all others 0"),
        ([0, -1, 7, 8, 9], "4 of 5 ids are -1, 7, 8, 9, all others 0"),
        ([0, 7, 9, 11, 13, 15], "5 of 6 ids are 7, 9, 11, 13 and 1 more, all others 0"),
    ],
)
def test_integers_in_a_row_are_said_as_an_interval(ids: list[int], text: str) -> None:
    assert observed(lookup(ids, 5), "values") == [text]


def test_a_number_that_was_expanded_to_all_values() -> None:
    """The op is given one value, the report shows the tensor that has it everywhere."""
    shown = tensor("indices", "ids", [7], (2, 3))
    one = Offenders(count=1, total=1, first=(Offender(position=(0,), value=7),))
    evidence = lookup([7], 5)
    violation = evidence.violation
    assert violation is not None
    known = replace(evidence, violation=replace(violation, offenders=one), tensors=(shown,))
    assert observed(known, "values") == ["all 6 values are 7"]
    several = replace(known, tensors=(tensor("indices", "ids", [7, 1], (2, 3)),))
    assert observed(several, "values") == []
    twice = Marks(value=7, copies=2)
    assert observed(lookup([7, 7], 5, marks=twice), "values") == [
        "the one value is 7 (expand shows each 2 times)"
    ]


def test_flags_and_numbers_that_are_nan_have_no_range() -> None:
    assert outside([0.0, 2.0, 2.0]) != []
    assert outside([0.0, 2.0, float("nan")]) == []
    flags = replace(lookup([7, 1], 5), tensors=(tensor("indices", "m", [1, 0], None, "bool"),))
    assert observed(flags, "values") == []


# --- earlier calls --------------------------------------------------------------------------------


def test_earlier_calls_and_the_module_that_differs() -> None:
    other = OtherModule(module="stores.0", calls=4, min=0, max=3, size=8)
    seen = SeenBefore(calls=7, min=0, max=3, other_modules=(other,))
    assert observed(lookup([3], 3, seen_before=seen), "earlier") == [
        "7 earlier calls of the line had 0 … 3",
        "stores.0 has 8 rows and took 0 … 3 in 4 calls",
    ]
    one = SeenBefore(calls=1, min=2, max=2)
    assert observed(lookup([3], 3, seen_before=one), "earlier") == [
        "an earlier call of the line had 2"
    ]
    nothing = SeenBefore(calls=7, min=0, max=None, other_modules=(other,))
    assert observed(lookup([3], 3, seen_before=nothing), "earlier") == []


def test_three_other_modules_by_the_users_names_and_without_a_size() -> None:
    others = tuple(OtherModule(module=str(at), calls=1, min=0, max=3) for at in range(4))
    seen = SeenBefore(calls=2, min=1, max=1, other_modules=others)
    names = (("0", "net.0"),)
    assert observed(lookup([3], 3, seen_before=seen, module_names=names), "earlier")[1:] == [
        "net.0 took 0 … 3 in 1 call",
        "1 took 0 … 3 in 1 call",
        "2 took 0 … 3 in 1 call",
    ]


@pytest.mark.parametrize(
    ("phase", "path", "is_said"),
    [("backward", "net.0", True), ("backward", None, False), ("forward", "net.0", False)],
)
def test_a_forward_that_backward_runs_again(phase: Any, path: str | None, is_said: bool) -> None:
    seen = SeenBefore(calls=1, min=2, max=2)
    evidence = lookup([3], 3, path=path, seen_before=seen, phase=phase)
    texts = [it for it in observed(evidence, "earlier") if "checkpointed" in it]
    assert len(texts) == is_said


# --- where the values came from -------------------------------------------------------------------


def test_every_writer_has_a_line_and_a_mark() -> None:
    steps = (
        step("aten::index_put_", "masks[1][a] = 255", 12, note=f"{WRITES} 255", count=136),
        step("aten::index_put_", "masks[0][b] = hole", 11, note=f"{WRITES} 255", count=256),
        step("torch.zeros", "masks = torch.zeros(2, 8)", 7),
    )
    evidence = with_offenders(labels([255, 0, 255], 21, provenance=steps))
    seen = [item for item in observations(evidence) if item.kind == "came_from"]
    assert [item.text for item in seen] == [
        "line 12: masks[1][a] = 255 (136 values)",
        "line 11: masks[0][b] = hole (writes 255) (256 values)",
    ]
    marks = [source.mark for item in seen for source in item.sources]
    assert marks == ["255 is made here (136 values)", "255 is made here (256 values)"]


@pytest.mark.parametrize(
    ("ops", "line"),
    [
        (["torch.Tensor.cuda", "aten::add.Tensor"], 5),
        (["torch.Tensor.pin_memory", "torch.tensor"], 5),
        (["torch.where", "torch.searchsorted"], 5),
        (["torch.where"], 4),
        (["torch.Tensor.cuda"], None),
    ],
)
def test_a_line_that_hands_values_on_is_not_their_origin(ops: list[str], line: int | None) -> None:
    steps = tuple(step(op, f"x = {op}(x)", 4 + at) for at, op in enumerate(ops))
    evidence = with_offenders(labels([1, 9], 7, provenance=steps))
    lines = [source.line for it in observations(evidence) for source in it.sources
             if it.kind == "came_from"]  # fmt: skip
    assert lines == ([] if line is None else [line])


@pytest.mark.parametrize(
    ("op", "code", "note", "mark"),
    [
        ("torch.tensor", "y = torch.tensor([1, 9])", FIRST_BAD, "9 is made here"),
        ("torch.tensor", "y = torch.tensor([1, n])", FIRST_BAD, "9 comes in here"),
        ("torch.tensor", "y = torch.tensor([it[9] for it in z])", FIRST_BAD, "9 comes in here"),
        ("torch.as_tensor", "y = torch.as_tensor(found)", FIRST_BAD, "9 comes in here"),
        ("torch.Tensor.add", "y = z[index] + 1", None, "9 is made here"),
        ("torch.Tensor.add", "y = z[index] + 0", None, "9 comes from here"),
        ("torch.Tensor.add", "y = z + start", None, "9 comes from here"),
        ("torch.Tensor.add", "y = z + start", FIRST_BAD, "9 is made here"),
        ("torch.Tensor.mul", "y = z * mask", None, "9 comes from here"),
        ("torch.randint", "y = torch.randint(10, (2,))", None, "9 is made here"),
        ("torch.where", "y = torch.where(m, z, 0)", None, "9 comes from here"),
        ("torch.full", "y = torch.full((2,), n)", FIRST_BAD, "9 is made here"),
    ],
)
def test_a_line_makes_a_value_only_where_that_is_proven(
    op: str, code: str, note: str | None, mark: str
) -> None:
    evidence = with_offenders(labels([1, 9], 7, provenance=(step(op, code, 4, note=note),)))
    (item,) = [it for it in observations(evidence) if it.kind == "came_from"]
    assert [it.mark for it in item.sources] == [mark]


def test_a_line_of_two_calls_makes_what_one_of_them_makes() -> None:
    code = "y = (z + 1) * mask"
    steps = (step("torch.Tensor.mul", code, 4), step("torch.Tensor.add", code, 4))
    evidence = with_offenders(labels([1, 9], 7, provenance=steps))
    (item,) = [it for it in observations(evidence) if it.kind == "came_from"]
    assert [it.mark for it in item.sources] == ["9 is made here"]


@pytest.mark.parametrize("op", ["torch.Tensor.__setitem__", "torch.nn.utils.rnn.pad_sequence"])
def test_a_line_that_stores_values_is_left_for_the_one_that_made_them(op: str) -> None:
    steps = (step(op, "t[i] = y", 4), step("torch.Tensor.add", "y = z + 1", 3))
    evidence = with_offenders(labels([1, 9], 7, provenance=steps))
    marks = [(it.line, it.mark) for seen in observations(evidence) for it in seen.sources]
    assert marks == [(3, "9 is made here")]
    alone = replace(evidence, provenance=steps[:1])
    assert observed(alone, "came_from") == []


def test_nan_is_made_only_where_no_input_had_it() -> None:
    for note, mark in ((FIRST_BAD, "is made"), (None, "comes from")):
        given = (step("torch.softmax", "p = net(x).softmax(-1)", 4, note=note),)
        evidence = with_offenders(labels([1, 9], 7, provenance=given))
        assert evidence.violation is not None
        nan = (Offender(position=(1,), value="nan"),)
        evidence = with_offenders(evidence, first=nan, count=1)
        marks = [it.mark for seen in observations(evidence) for it in seen.sources]
        assert marks == [f"nan {mark} here"]


def test_of_a_line_that_wrote_several_values_each_is_said() -> None:
    steps = (
        step("aten::fill_", "y[0] = k", 4, note=f"{WRITES} 9", count=1),
        step("aten::fill_", "y[0] = k", 4, note=f"{WRITES} 8"),
    )
    evidence = with_offenders(labels([1, 9, 8], 7, provenance=steps))
    (item,) = [it for it in observations(evidence) if it.kind == "came_from"]
    # Of one write the number is not known: neither is that of both.
    assert (item.text, item.facts["count"]) == ("line 4: y[0] = k (writes 9, 8)", None)
    assert [it.mark for it in item.sources] == ["bad values are made here"]


def test_three_lines_that_wrote_are_enough() -> None:
    steps = tuple(step("aten::fill_", "y[0] = 9", at, note=f"{WRITES} 9") for at in (2, 3, 4, 5))
    evidence = with_offenders(labels([1, 9], 7, provenance=steps))
    assert len(observed(evidence, "came_from")) == 3


def test_a_parameter_that_was_nan_before() -> None:
    lines = [LineRef(cell=1, line=at, text="w.data[0] = nan") for at in (4, 9)]
    holder = NanHolder(name="net.w", nan=Offenders(), is_read=False, written=(lines[0],))

    def said(holder: NanHolder, *steps: ProvenanceStep) -> list[tuple[str, str]]:
        evidence = with_offenders(labels([1, 9], 7, provenance=steps, nan_holder=holder))
        seen = [it for it in observations(evidence) if it.kind == "came_from"]
        return [(it.text, it.sources[0].mark or "") for it in seen]

    written = ("line 4: w.data[0] = nan", "nan is written to net.w here")
    assert said(holder) == [written]
    changed = replace(holder, written=(), changed=lines[0])
    assert said(changed) == [(written[0], "net.w is last changed here")]
    assert said(replace(changed, changed=lines[1])) == []  # the failing line
    # A call that is not known to have made it may have handed the parameter on.
    called = step("torch.nn.functional.linear", "p = net(x)", 5)
    assert said(holder, called) == [written]
    assert len(said(holder, replace(called, note=FIRST_BAD))) == 2
    assert len(said(replace(holder, is_read=True), called)) == 2
    own = step("aten::fill_", "w.data[0] = nan", 4, note=f"{WRITES} nan")
    assert [text for text, _ in said(holder, own)] == [written[0]]


def test_lines_of_python_that_computed_the_values() -> None:
    lines = tuple(LineRef(cell=1, line=at, text="a = b + 1") for at in (3, 9))
    seen = observations(with_offenders(labels([1, 9], 7, marks=Marks(computed=lines))))
    found = [it for it in seen if it.kind == "came_from"]
    assert [it.text for it in found] == ["line 3: a = b + 1"]
    assert [it.mark for item in found for it in item.sources] == ["9 comes from here"]
    two = observations(with_offenders(labels([8, 9], 7, marks=Marks(computed=lines))))
    marks = [it.mark for item in two if item.kind == "came_from" for it in item.sources]
    assert marks == ["bad values come from here"]


def test_the_line_that_chose_how_long_the_ids_are() -> None:
    origin = BoundOrigin(at=SourceSpan(cell=1, line=3), expression="n = 8")

    def said(origin: BoundOrigin, most: Any = 7) -> list[str]:
        evidence = with_offenders(lookup([7, 1], 5, marks=Marks(length=origin)), max=most)
        return observed(evidence, "came_from")

    assert said(origin) == ["length 8, set in line 3: n = 8"]
    assert said(replace(origin, is_set=False)) == []
    assert said(replace(origin, at=SourceSpan(cell=1, line=9))) == []
    assert said(origin, None) == []


def test_the_failing_line_is_no_origin() -> None:
    steps = (step("aten::add.Tensor", "F.cross_entropy(z, y + 1)", 9, note=FIRST_BAD),)
    evidence = with_offenders(labels([1, 9], 7, provenance=steps))
    assert observed(evidence, "came_from") == []


def test_an_item_only_where_the_way_ends_at_a_batch() -> None:
    note = "batch 28 of loader, row 1 = data[217]"
    steps = (step("torch.Tensor.cuda", "x = x.cuda()", 4), ProvenanceStep(note=note))
    evidence = with_offenders(
        lookup([64, 3], 64, provenance=steps),
        first=(Offender(position=(0,), value=64, sample=217),),
    )
    (item,) = [it for it in observations(evidence) if it.kind == "item"]
    assert (item.text, item.facts["samples"]) == (note, (217,))
    assert observed(replace(evidence, provenance=steps[:1]), "item") == []


# --- marks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marks", "text"),
    [
        (Marks(value=-7, constants=(NamedConstant(name="HOLE", value=-7),)), "-7 is HOLE"),
        (Marks(zero_at="weight"), "weight is 0 at the bad values, and nowhere else"),
        (Marks(aliases=("x", "y")), "x and y of the batch are one tensor"),
        (Marks(vanished=("1e-8 is 0",)), "1e-8 is 0 in this dtype"),
        (
            Marks(constants=(NamedConstant(name="HOLE", value=-7, line=LineRef(cell=1, line=3)),)),
            "-7 is HOLE, set in line 3",
        ),
        (
            Marks(in_slice=BadSlice(None, 1, 4, 16, is_full=False)),
            "all 16 bad values of ids are in [:, 4]",
        ),
        (
            Marks(in_slice=BadSlice(None, 1, 4, 4, is_full=True, is_nan=True)),
            "ids[:, 4] is nan throughout (4 values), the rest nowhere",
        ),
        (
            Marks(in_slice=BadSlice("x", 0, 4, 16, is_full=True, is_nan=True)),
            "x[4] is nan throughout (16 values), the rest nowhere",
        ),
        (Marks(is_size=True), "5 is the number of rows, one past the last (0 … 4)"),
        (
            Marks(maker=step("torch.argmax", "y = z.argmax(1)", 4)),
            "argmax in line 4 gives positions of the largest",
        ),
        (
            Marks(maker=step("torch.Tensor.ge", "over = t >= 2", 4)),
            "ge in line 4 gives the truth of a comparison, 0 or 1",
        ),
        (
            Marks(maker=ProvenanceStep(op="aten::round_", source=LineRef(cell=2, line=4))),
            "round in In [2] line 4 gives a rounded number",
        ),
    ],
)
def test_a_mark_of_the_bad_values(marks: Marks, text: str) -> None:
    evidence = with_offenders(lookup([-7, -7, 1, 2], 5, marks=marks))
    assert observed(evidence, "pattern") == [text]


def test_what_makes_integers_is_not_said_of_probabilities() -> None:
    rounded = Marks(maker=step("torch.round", "p = q.round()", 4))
    assert observed(with_offenders(bce([0.0, 2.0], marks=rounded)), "pattern") == []


@pytest.mark.parametrize(("low", "fits"), [(0, "1 … 10"), (-10, "-9 … 10")])
def test_what_fits_before_a_shift_begins_at_the_lower_bound(low: int, fits: str) -> None:
    evidence = out_of_range(
        "aten::index", "indices[0]", [11, 2], 10, low=low, expression="i - 1", call="x[i - 1]"
    )
    assert observed(evidence, "pattern") == [f"i is 3 … 12, {fits} fits"]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("i + 1", "i is 1 … 10, -1 … 8 fits"),
        ("i - 1", "i is 3 … 12, 1 … 10 fits"),
        ("i * 1", None),
        ("i + k", None),
        ("i + 0.5", None),
        ("i", None),
    ],
)
def test_what_is_added_on_the_line_tells_what_fits(code: str, text: str | None) -> None:
    evidence = out_of_range("aten::index", "indices[0]", [11, 2], 10, expression=code)
    assert observed(evidence, "pattern") == ([] if text is None else [text])


def test_what_another_line_added() -> None:
    line = LineRef(cell=1, line=3, text="y = x + k")
    sums = AddedNumber("x", 1, 10, 0, 5, 3, line)
    said = "line 3 adds 10 to x[:, 1], which is 0 … 5: at most 3 fits"

    def texts(sums: AddedNumber) -> list[str]:
        found = out_of_range("aten::index", "indices[0]", [11, 2], 10, expression="i - 1")
        return observed(with_offenders(replace(found, marks=Marks(added=sums))), "pattern")

    assert texts(sums) == [said]
    assert texts(sums._replace(column=None)) == [said.replace("x[:, 1]", "x")]
    own = sums._replace(line=replace(line, line=9))
    assert texts(own) == ["i is 3 … 12, 1 … 10 fits"]


@pytest.mark.parametrize(
    ("ids", "side"),
    [
        ([9, 9, 1, 9, 1, 2], "start"),
        ([1, 9, 9, 2, 1, 9], "end"),
        ([1, 9, 9, 9, 1, 2], None),
        ([1, 9, 2, 1, 2, 9], None),
    ],
)
def test_padding_is_on_the_side_where_it_stands(ids: list[int], side: str | None) -> None:
    evidence = out_of_range("aten::embedding", "indices", ids, 9, expression="ids", shape=(2, 3))
    texts = [text for text in observed(evidence, "pattern") if "only at" in text]
    assert texts == ([f"the bad values are only at the {side} of rows"] if side else [])


def test_without_marks_there_is_no_pattern() -> None:
    assert observed(lookup([-7, 1, 2], 5), "pattern") == []


def test_an_observer_that_fails_leaves_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits()
    broken = replace(labels([1, 9], 7), provenance=(ProvenanceStep(op="x", source=3),))  # type: ignore[arg-type]
    seen = observe(broken, Trial(), limits)
    assert [item.kind for item in seen] == ["values"]
    assert limits.lines[0].startswith("observation came_from ")
