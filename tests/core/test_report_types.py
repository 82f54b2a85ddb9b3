"""The words of a finding in the names of its reader, and the small parts that they are made of."""

from __future__ import annotations

from typing import Any

import pytest

from cudalens.core.report_types import (
    Offender,
    Offenders,
    Violation,
    format_count,
    format_shape,
    ravel,
    unravel,
)

AT_2 = Offenders(count=1, total=4, first=(Offender(position=(2,), value=9),))
PART = "{argument}[1][2] = 9 is outside {related}"
WHOLE = "{argument}[2] = 9 is outside {related}"
OPERANDS = "div made nan at [0] from {input:self} = 0.0, {input:other} = 0.0"


@pytest.mark.parametrize(
    ("headline", "more", "names", "sentence"),
    [
        (WHOLE, {}, {}, "index[2] = 9 is outside the input"),
        (WHOLE, {"related": "self"}, {}, "index[2] = 9 is outside self"),
        (WHOLE, {"related": "self"}, {"related": "x"}, "index[2] = 9 is outside x"),
        (WHOLE, {}, {"argument": "y"}, "y[2] = 9 is outside the input"),
        (WHOLE, {}, {"argument": "y", "position": (0, 2)}, "y[0, 2] = 9 is outside the input"),
        (WHOLE, {}, {"argument": "y", "position": ()}, "y = 9 is outside the input"),
        # Of a list the name is that of the tensor: its place in the list goes.
        (PART, {"list_position": 1}, {}, "index[1][2] = 9 is outside the input"),
        (PART, {"list_position": 1}, {"argument": "rows"}, "rows[2] = 9 is outside the input"),
        # A name that looks like a placeholder is left as it is.
        (WHOLE, {}, {"argument": "d['{related}']"}, "d['{related}'][2] = 9 is outside the input"),
        ("{input:self} and {input:other}", {}, {}, "self and other"),
        ("{input:self} and {input:other}", {}, {"inputs": {"other": "b"}}, "self and b"),
        (WHOLE, {}, {"template": "{argument} only"}, "index only"),
        (OPERANDS, {}, {"inputs": {"self": "w", "other": "w"}}, "div made nan at [0] from w = 0.0"),
        (OPERANDS, {}, {}, "div made nan at [0] from self = 0.0, other = 0.0"),
        # Two calls of one expression gave two values.
        (
            OPERANDS.replace("0.0", "1.0", 1),
            {},
            {"inputs": {"self": "f()", "other": "f()"}},
            "div made nan at [0] from f() = 1.0, f() = 0.0",
        ),
    ],
)
def test_a_headline_is_told_in_the_names_of_its_reader(
    headline: str, more: dict[str, Any], names: dict[str, Any], sentence: str
) -> None:
    found = Violation(headline=headline, argument="index", offenders=AT_2, **more)
    assert found.sentence(**names) == sentence


@pytest.mark.parametrize(
    ("sizes", "text"), [(None, ""), ((), "[]"), ((3,), "[3]"), ((32, 10), "[32, 10]")]
)
def test_a_shape_is_written_as_torch_does(sizes: Any, text: str) -> None:
    assert format_shape(sizes) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "row", "0 rows"), (1, "row", "1 row"), (2, "row", "2 rows"), (1, "class", "1 class"),
     (3, "class", "3 classes")],
)  # fmt: skip
def test_a_noun_stands_in_the_number_that_is_counted(number: int, noun: str, text: str) -> None:
    assert format_count(number, noun) == text


@pytest.mark.parametrize(
    ("index", "shape", "position"),
    [(0, (2, 3), (0, 0)), (2, (2, 3), (0, 2)), (3, (2, 3), (1, 0)), (5, (2, 3), (1, 2)),
     (7, (2, 2, 2), (1, 1, 1)), (4, (5,), (4,)), (0, (), ())],
)  # fmt: skip
def test_a_position_and_its_flat_index(
    index: int, shape: tuple[int, ...], position: tuple[int, ...]
) -> None:
    assert unravel(index, shape) == position
    assert ravel(position, shape) == index
