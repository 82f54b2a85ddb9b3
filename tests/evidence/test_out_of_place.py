"""The form out of place of a change in place: which lines it is read from, and tried with what."""

from __future__ import annotations

import ast

import pytest
import torch

from cudalens.evidence import out_of_place

F32 = torch.float32
SHAPE = torch.Size((3,))


@pytest.mark.parametrize(
    ("line", "name", "methods"),
    [
        ("h += 1.0", "h", ("__iadd__", "__add__")),
        ("h *= y", "h", ("__imul__", "__mul__")),
        ("h.clamp_(0, max=1)", "h", ("clamp_", "clamp")),
        ("h[0] += 1", None, None),
        ("h[0] = 1", None, None),
        ("self.h += 1", None, None),
        ("h.x.add_(1)", None, None),
        ("h = h + 1", None, None),
    ],
)
def test_which_statements_are_read(line: str, name: str | None, methods: object) -> None:
    found = out_of_place._read(ast.parse(line).body[0])
    assert (found and found[0], found and found[1]) == (name, methods)
    assert out_of_place._read(None) is None


def tried(line: str, *metas: tuple[torch.Size, torch.dtype]) -> bool:
    read = out_of_place._read(ast.parse(line).body[0])
    assert read is not None
    return out_of_place._is_tried(*read[1:], metas)


@pytest.mark.parametrize(
    ("line", "metas", "succeeds"),
    [
        ("h += 1.0", [(SHAPE, F32)], True),
        ("h += 2 * 3", [(SHAPE, F32)], True),
        ("h += y", [(SHAPE, F32), (SHAPE, F32)], True),
        ("h.clamp_(0, max=1)", [(SHAPE, F32)], True),
        # Another tensor was recorded than the line names.
        ("h += 1.0", [(SHAPE, F32), (SHAPE, F32)], False),
        # In place the dtype stays, out of place it does not.
        ("h += y", [(SHAPE, F32), (SHAPE, torch.float64)], False),
        # Beyond what is computed with values, shapes and dtypes decide.
        ("h += 1.0", [(torch.Size((1 << 17,)), F32)], True),
    ],
)
def test_the_result_is_the_same_and_backward_goes_on(
    line: str, metas: list[tuple[torch.Size, torch.dtype]], succeeds: bool
) -> None:
    assert tried(line, *metas) is succeeds


def test_what_backward_does_not_refuse_in_place_is_no_cure() -> None:
    assert not tried("h.contiguous()", (SHAPE, F32))


@pytest.mark.parametrize(("text", "value"), [("-1", -1), ("2 - 3", -1), ("(1, 2)", (1, 2))])
def test_numbers_are_read_and_names_are_stand_ins(text: str, value: object) -> None:
    stand_in = torch.ones(1)
    assert out_of_place._value(ast.parse(text, mode="eval").body, iter([stand_in])) == value
    assert out_of_place._value(ast.parse("y * 2", mode="eval").body, iter([stand_in])) is stand_in
