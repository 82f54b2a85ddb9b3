"""The lists of the command line: which rows, in which order, and what each says."""

from __future__ import annotations

from typing import Any

from cudalens.core.report import Report
from cudalens.core.report_types import Environment
from cudalens.render.tables import guard_list, matching, report_list


def row(name: str, frequency: str = "common", *, silent: bool = False, **more: Any) -> Any:
    facts = {"api": [name], "op": [f"aten::{name}"], "frequency": frequency, "silent": silent}
    return {**facts, "precondition": f"{name} is small", "source": "CUDA", **more}


def test_a_row_has_to_have_each_word_in_whatever_case() -> None:
    rows = [row("Embedding"), row("gather"), row("gather_nd")]
    assert matching(rows, []) == rows
    assert matching(rows, ["GATHER"]) == rows[1:]
    assert matching(rows, ["gather", "_nd"]) == rows[2:]
    assert matching(rows, ["gather", "embedding"]) == []
    assert matching(rows, ["frequency"]) == []  # the names of the columns are no words of a row


def test_own_guards_come_first_and_warnings_last() -> None:
    rows = [
        row("warned", "very common", silent=True),
        row("seldom", "rare"),
        row("often", "very common"),
        row("own", "user"),
        row("between"),
    ]
    drawn = guard_list(rows, width=80, color=False)
    heads = [line for line in drawn.splitlines() if line and not line.startswith(" ")]
    assert heads == [
        "own  a guard of your own",
        "often  a very common error",
        "between  a common error",
        "seldom  a rare error",
        "warned  a warning: CUDA asserts nothing",
    ]


def test_overloads_of_an_op_are_one() -> None:
    ops = ["aten::gather", "aten::gather.out", "aten::index.Tensor"]
    drawn = guard_list([row("gather", op=ops)], width=80, color=False)
    assert drawn.splitlines() == [
        "gather  a common error",
        "  gather is small",
        "  gather, index · CUDA",
    ]


def test_each_report_is_listed_with_what_is_known_of_it() -> None:
    first = Report(headline="y is 10", kind="device_assert", certainty="proven")
    environment = Environment(rank=0)
    other = Report(headline="z is 3", kind="silent", certainty="likely", environment=environment)
    drawn = report_list([("a.json", first), ("b.json", other)], width=80, color=False)
    assert drawn.splitlines() == [
        "a.json",
        "  ✗ y is 10",
        "    device-side assert",
        "b.json",
        "  ⚠ z is 3",
        "    silently wrong result · rank 0 · likely cause",
    ]
