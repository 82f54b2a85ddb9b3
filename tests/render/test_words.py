"""The words that every view shares: facts in, text out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.evidence_types import Synchronization
from cudalens.core.next_steps import NOTEBOOK
from cudalens.core.report import (
    AutogradNeighbourhood,
    Bounds,
    Environment,
    GraphNode,
    HistoryEntry,
    LineRef,
    Offender,
    Offenders,
    OpName,
    ProvenanceStep,
    RaisedException,
    RankResult,
    Replay,
    Report,
    SourceSpan,
    TensorFact,
)
from cudalens.core.report_types import Observation, SeenBefore
from cudalens.render import words


def report(**parts: Any) -> Report:
    return Report(**{"kind": "device_assert", "headline": "", **parts})


def fact(**parts: Any) -> TensorFact:
    return TensorFact(**{"argument": None, "shape": (32,), "dtype": "int64", **parts})


# --- texts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31m", "␛[31m"),
        ("\x00\x1f\x7f", "␀␟␡"),
        ("\x85\u202e\ue000\u2028", "����"),
        ("क्\u200dष", "क्\u200dष"),
        ("x" * 4001, "x" * 4000),
    ],
)
def test_control_characters_become_signs(text: str, shown: str) -> None:
    assert words.visible(text) == shown


def test_one_line_has_neither_breaks_nor_tabs() -> None:
    assert words.one_line("a\tb\nc\x07") == "a b c␇"


@pytest.mark.parametrize(
    ("limit", "clipped", "elided"),
    [(7, "abcdefg", "abcdefg"), (6, "abcde…", "abc…fg"), (5, "abcd…", "ab…fg"), (0, "…", None)],
)
def test_a_long_text_is_cut(limit: int, clipped: str, elided: str | None) -> None:
    assert words.clip("abcdefg", limit) == clipped
    assert elided is None or words.elide("abcdefg", limit) == elided


# --- numbers and tensors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text", "drawn"),
    [
        (None, "–", None),
        (1234567, "1234567", 1234567.0),
        (0.12345678, "0.123457", 0.12345678),
        (1.00000012, "1.00000012", 1.00000012),
        (9999.9999, "9999.9999", 9999.9999),
        (10000.00001, "10000", 10000.00001),
        (-2.0, "-2", -2.0),
        (math.inf, "inf", None),
        ("nan", "nan", None),
        (10**400, "1" + "0" * 400, None),
    ],
)
def test_a_number_for_reading_and_for_drawing(value: Any, text: str, drawn: float | None) -> None:
    assert words.format_number(value) == text
    assert words.finite(value) == drawn


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("torch.float32", "f32"),
        ("bfloat16", "bf16"),
        ("uint8", "u8"),
        ("int64", "i64"),
        ("complex64", "c64"),
        ("bool", "bool"),
        ("quint8", "quint8"),
    ],
)
def test_a_dtype_in_short(name: str, short: str) -> None:
    assert words.format_dtype(name) == short


@pytest.mark.parametrize(
    ("expression", "argument", "name"),
    [("y", "target", "y"), (None, "target", "target"), (None, None, "unnamed")],
)
def test_the_name_of_a_tensor(expression: str | None, argument: str | None, name: str) -> None:
    assert words.tensor_name(fact(expression=expression, argument=argument)) == name


Y = fact(argument="target", expression="y")
FIRST = fact(argument="indices[0]", expression="i")
SECOND = fact(argument="indices[1]", expression="j")
TWICE = fact(argument="indices[1]", expression="i")


@pytest.mark.parametrize(
    ("parts", "item", "is_it"),
    [
        ({"argument": "target"}, Y, True),
        ({"argument": "weight"}, Y, False),
        ({}, Y, False),
        ({"argument": "target"}, fact(expression="y"), False),
        ({"argument": "indices", "expression": "i", "tensors": (FIRST, SECOND)}, FIRST, True),
        ({"argument": "indices", "expression": "i", "tensors": (FIRST, SECOND)}, SECOND, False),
        # An expression that stands twice does not tell which one it is.
        ({"argument": "indices", "expression": "i", "tensors": (FIRST, TWICE)}, FIRST, False),
        ({"argument": "indices", "tensors": (FIRST, SECOND)}, FIRST, False),
        ({"argument": "tar", "expression": "y", "tensors": (Y,)}, Y, False),
    ],
)
def test_the_tensor_at_fault(parts: dict[str, Any], item: TensorFact, *, is_it: bool) -> None:
    assert words.is_at_fault(report(**parts), item) is is_it


def offenders(count: int, total: int, **parts: Any) -> Offenders:
    return Offenders(count=count, total=total, **parts)


@pytest.mark.parametrize(
    ("device", "other", "found", "label"),
    [
        ("cuda:0", "cuda:0", offenders(3, 32), "i64[32], 3 bad"),
        ("cuda:0", "cpu", offenders(3, 32), "i64[32] cuda:0, 3 bad"),
        # Of a row whose sum is bad, no element is.
        ("cuda:0", "cuda:0", offenders(3, 31), "i64[32]"),
        ("cuda:0", "cuda:0", offenders(0, 32), "i64[32]"),
        ("cuda:0", "cuda:0", None, "i64[32]"),
    ],
)
def test_the_label_of_a_tensor(
    device: str, other: str, found: Offenders | None, label: str
) -> None:
    bad = fact(argument="target", device=device)
    good = fact(argument="self", device=other)
    typed = fact(device="meta", bad_at=(0,))
    made = report(argument="target", tensors=(bad, good, typed), offenders=found)
    assert words.tensor_label(made, bad) == label
    assert (" bad" in words.tensor_label(made, typed)) is (" bad" in label)
    assert " bad" not in words.tensor_label(made, good)


# --- places and names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ref", "text"),
    [
        (None, ""),
        (LineRef(line=12, cell=7, text=" x = 1 "), "In [7] line 12 x = 1"),
        (SourceSpan(line=3, file="C:\\run\\train.py", text="y"), "train.py:3 y"),
    ],
)
def test_a_line_of_a_list(ref: Any, text: str) -> None:
    assert words.format_line(ref) == text


@pytest.mark.parametrize(
    ("op", "path"),
    [
        (OpName(), ""),
        (OpName(name="aten::add", overload="Tensor"), "aten::add.Tensor"),
        (OpName(name="aten::add", overload="default", api="torch.add"), "torch.add → aten::add"),
        (OpName(api="torch.nn.functional.relu"), "F.relu"),
        (OpName(api="torch.Tensor.sum", name="Tensor.sum"), "Tensor.sum"),
        (OpName(api="torch.nn.Linear"), "nn.Linear"),
    ],
)
def test_the_way_from_the_function_to_the_op(op: OpName, path: str) -> None:
    assert words.format_op_path(op) == path


@pytest.mark.parametrize(
    ("entries", "types"),
    [
        ([("net.0", "Linear")], {"net.0": "Linear"}),
        ([("net.0", "Linear"), ("net.0", "Linear")], {"net.0": "Linear"}),
        ([("net.0", "Linear"), ("net.0", "ReLU")], {}),
        ([("net.0", None), (None, "ReLU")], {}),
    ],
)
def test_the_class_of_a_module_path(entries: list[Any], types: dict[str, str]) -> None:
    history = tuple(
        HistoryEntry(seq=0, op="aten::add", module_path=path, module_type=kind)
        for path, kind in entries
    )
    assert words.module_types(report(history=history)) == types


# --- bounds and counts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        (None, ""),
        (Bounds(), ""),
        (Bounds(min=0, max=9), "0 … 9"),
        (Bounds(min=0), "at least 0"),
        (Bounds(max=9), "at most 9"),
        (Bounds(min=0, max=9, also_allowed=(-100,)), "0 … 9 or -100"),
        (Bounds(min=0, max=9, text="less than ten"), "less than ten"),
    ],
)
def test_the_allowed_values(bounds: Bounds | None, text: str) -> None:
    assert words.format_bounds(report(bounds=bounds)) == text


@pytest.mark.parametrize(
    ("bounds", "headline", "says"),
    [
        (Bounds(min=0, max=9), "y is outside 0 … 9", True),
        (Bounds(min=0, max=9), "y is outside", False),
        (Bounds(min=0, text="positive"), "y is not positive", True),
        (Bounds(min=0, text="positive"), "y is 0", False),
        (Bounds(min=0), "y is 0", False),
        (Bounds(min=0, text=""), "y is 0", False),
        (None, "y", False),
    ],
)
def test_whether_the_headline_has_the_bounds(
    bounds: Bounds | None, headline: str, *, says: bool
) -> None:
    assert words.says_bounds(report(bounds=bounds, headline=headline)) is says


@pytest.mark.parametrize(
    ("found", "kind", "text"),
    [
        (offenders(1, 2), None, "1 of 2 values is bad"),
        (offenders(2, 3), None, "2 of 3 values are bad"),
        (offenders(2, 3, others="0 … 4"), None, "2 of 3 values are bad, all others 0 … 4"),
        (offenders(1, 1), None, ""),
        (offenders(0, 3), None, ""),
        (None, None, ""),
        (offenders(2, 3), "values", ""),
        (offenders(2, 3), "shape", "2 of 3 values are bad"),
    ],
)
def test_the_count_of_bad_values(found: Offenders | None, kind: str | None, text: str) -> None:
    told = () if kind is None else (Observation(kind=kind, text="told"),)
    assert words.bad_count(report(offenders=found, observations=told)) == text


@pytest.mark.parametrize(
    ("seen", "text"),
    [
        (None, ""),
        (SeenBefore(calls=1, min=0, max=9), "1 earlier call of this line: 0 … 9"),
        (SeenBefore(calls=2, min=0, max=9), "2 earlier calls of this line: 0 … 9"),
        (SeenBefore(calls=2, min=None, max=9), ""),
        (SeenBefore(calls=2, min=0, max=None), ""),
    ],
)
def test_earlier_calls(seen: SeenBefore | None, text: str) -> None:
    assert words.earlier_calls(report(seen_before=seen)) == text


# --- the way of the bad values --------------------------------------------------------------------


HERE, THERE = LineRef(line=3, cell=1, text="f(y)"), LineRef(line=1, cell=1, text="y = g()")


def test_steps_of_one_line_are_merged_and_the_failing_line_is_left_out() -> None:
    steps = (
        ProvenanceStep(source=THERE, note=None, op="a"),
        ProvenanceStep(source=THERE, note="read", op="b"),
        ProvenanceStep(source=THERE, note="written", op="b"),
        ProvenanceStep(source=LineRef(line=2, cell=1), op="b"),
        ProvenanceStep(source=None, op="c"),
        ProvenanceStep(source=None, op="d"),
        ProvenanceStep(source=HERE, op="e"),
    )
    source = SourceSpan(line=3, cell=1, text="f(y)")
    found = words.way(report(provenance=steps, source=source))
    assert [item.op for item in found] == ["a", "b", "c", "d"]
    assert [item.note for item in found] == ["read", None, None, None]
    said = (ProvenanceStep(source=HERE, note="cast"),)
    assert words.way(report(provenance=said, source=source)) == said


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (ProvenanceStep(source=THERE, op="aten::add"), "In [1] line 1 y = g()"),
        (ProvenanceStep(op="aten::add", note="cast"), "aten::add (cast)"),
        (ProvenanceStep(note="cast"), "cast"),
        (ProvenanceStep(), ""),
    ],
)
def test_a_step_in_words(step: ProvenanceStep, text: str) -> None:
    assert words.format_step(step) == text


def test_a_bad_value_is_told_where_the_user_typed_it() -> None:
    """The op gets ``[2, 1, 3]`` of a tensor that the user has as ``[2, 3]``."""
    typed = fact(shape=(2, 3), expression="y", bad_at=(1, 2))
    passed = fact(shape=(2, 1, 3), argument="target")
    bad = Offender(position=(1, 0, 2), value=9)
    assert words.bad_place(report(argument="target", tensors=(typed, passed)), bad) == "[1, 2]"
    assert words.bad_place(report(argument="target", tensors=(passed,)), bad) == "[1, 0, 2]"
    assert words.bad_place(report(argument="self", tensors=(typed, passed)), bad) == "[1, 0, 2]"
    whole = Offender(position=(1,), value=9)
    assert words.bad_place(report(argument="target", tensors=(typed, passed)), whole) == "[1]"


# --- processes, replay, pages ---------------------------------------------------------------------


def rank(number: int, outcome: str = "", *, is_process: bool = False) -> RankResult:
    made = None if outcome else report(headline=f"headline of {number}")
    given = {"process": number} if is_process else {"rank": number}
    return RankResult(**given, outcome=outcome, report=made)


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        ((), ""),
        ((rank(0), rank(1, "ended")), "rank 0 of 2"),
        ((rank(3), rank(1), rank(0, "ended")), "ranks 1 and 3 of 3"),
        ((rank(10), rank(9), rank(1)), "ranks 1, 9 and 10 of 3"),
        ((rank(1, is_process=True), rank(2, is_process=True)), "processes 1 and 2 of 2"),
        ((rank(1), rank(2, is_process=True)), ""),
    ],
)
def test_the_processes_that_a_report_is_of(ranks: tuple[RankResult, ...], line: str) -> None:
    assert words.ranks_line(report(ranks=ranks)) == line


@pytest.mark.parametrize(
    ("others", "line"),
    [
        ((rank(0, "ended"),), "rank 2 of 2"),
        ((rank(0),), "rank 2 of 2 (rank 0 failed too)"),
        ((rank(3), rank(0), rank(1, "ended")), "rank 2 of 4 (ranks 0 and 3 failed too)"),
    ],
)
def test_a_report_says_of_which_process_its_own_facts_are(
    others: tuple[RankResult, ...], line: str
) -> None:
    """Of two that report the same none is named."""
    own = rank(2)
    assert own.report is not None
    assert words.ranks_line(replace(own.report, ranks=(*others, own))) == line
    twice = replace(own.report, ranks=(own, replace(own, rank=5)))
    assert words.ranks_line(twice) == "ranks 2 and 5 of 2"


def test_what_is_known_of_a_process() -> None:
    assert words.rank_facts(rank(1)) == ("headline of 1",)
    assert words.rank_facts(rank(1, "ended")) == ("ended",)
    ended = RankResult(rank=1, batch="batch 3", outcome="ended", report=report(headline="no"))
    assert words.rank_facts(ended) == ("batch 3", "ended")


RETURNED = "returned a result for the same arguments: no error on the CPU"


@pytest.mark.parametrize(
    ("replay", "line"),
    [
        (Replay(), ""),
        (Replay(reason="too\nlarge"), "not replayed: too large"),
        (Replay(outcome="raised", exception="IndexError", message="9"), "IndexError: 9"),
        (Replay(outcome="raised", exception="IndexError"), "IndexError"),
        (
            Replay(outcome="returned"),
            "returned a result for the same arguments: no error on the CPU",
        ),
    ],
)
def test_what_the_cpu_said(replay: Replay, line: str) -> None:
    assert words.replay_line(report(replay=replay)) == line


@pytest.mark.parametrize(
    ("parts", "page"),
    [
        ({"device_text": "Assertion `t >= 0 && t < n_classes` failed."}, "n-classes"),
        ({"device_text": "Assertion `other` failed."}, "device-side-assert-triggered"),
        ({"kind": "cuda_error", "device_text": "t < n_classes"}, "n-classes"),
        ({"kind": "cuda_error", "device_text": "other"}, None),
        ({"kind": "silent", "device_text": "t < n_classes"}, None),
        (
            {"exception": RaisedException(type="RuntimeError", message="CUBLAS_STATUS_X")},
            "cublas-alloc-failed",
        ),
        ({}, None),
    ],
)
def test_the_page_on_an_error(parts: dict[str, Any], page: str | None) -> None:
    link = words.page_link(report(**parts))
    assert (link and link.address.rstrip("/").rpartition("/")[2].partition(".")[0]) == page


def test_surroundings_that_are_known_have_a_name() -> None:
    known = Environment(torch="2.9", rank=0)
    assert words.environment(report(environment=known)) == (("torch", "2.9"), ("rank", "0"))


def test_modules_have_the_name_of_the_variable_where_it_is_proven() -> None:
    graph = AutogradNeighbourhood(
        nodes=(GraphNode(id="a", name="Mul", module_path="0"), GraphNode(id="b", name="Add")),
        module_names=(("0", "net.0"),),
    )
    history = tuple(HistoryEntry(seq=0, op="aten::add", module_path=path) for path in ("0", "1"))
    made = words.with_module_names(report(module_path="0", graph=graph, history=history))
    assert made.module_path == "net.0"
    assert [item.module_path for item in made.graph.nodes] == ["net.0", None]
    assert [item.module_path for item in made.history] == ["net.0", "1"]


OWN, REPLAY = OpName(name="gpu_suite::pick"), OpName(name="torch.cuda.CUDAGraph.replay")
CHECK = "a full check names the op at fault if torch called it"
GUARD = "A guard of your own can name the value before gpu_suite::pick runs: see register_guard"
WAITED, UNWAITED = Synchronization(waits=True), Synchronization(waits=False)
OP_UNWAITED = Synchronization(waits=True, is_op_unwaited=True)


@pytest.mark.parametrize(
    ("parts", "step"),
    [
        ({"op": OWN, "certainty": "likely"}, CHECK),  # not checked
        ({"op": OWN, "certainty": "likely", "synchronization": UNWAITED}, CHECK),
        ({"op": OWN, "certainty": "likely", "synchronization": OP_UNWAITED}, CHECK),
        ({"op": OWN, "certainty": "likely", "synchronization": WAITED}, GUARD),
        ({"op": OWN, "certainty": "unknown", "synchronization": WAITED}, ""),
        ({"op": OpName(name="aten::add"), "certainty": "likely", "synchronization": WAITED}, ""),
        ({"op": REPLAY, "certainty": "likely", "synchronization": WAITED}, ""),
        ({"certainty": "unknown", "synchronization": WAITED}, ""),
        (
            {"kind": "cuda_error", "op": OWN, "certainty": "likely", "synchronization": WAITED},
            "",
        ),
    ],
)
def test_a_full_check_is_advised_only_where_none_has_run(parts: dict[str, Any], step: str) -> None:
    said = words.step_after_loss(report(context_usable=False, **parts), NOTEBOOK)
    assert (CHECK in said) is (step == CHECK)
    assert (GUARD in said) is (step == GUARD)
    assert "restart the kernel" in said
    assert step or said == "restart the kernel to use the GPU again"
