"""Entries of the catalogue: made from a function, found for overloads, and what users may give."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import tensor

from cudalens.core.report_types import Violation
from cudalens.guards import _base
from cudalens.guards._base import (
    ArgumentSlot,
    full_name,
    make_guard,
    of_overload,
    resolve,
    schema_parameters,
)
from cudalens.guards.engine import Within

aten = torch.ops.aten


def fits(self: Any, index: Any, dim: Any = 0) -> None:
    """Every index is
    in the table.

    Source:   Kernel.cu:1,
              torch 2.13.0
    Cost:     one reduction
    Passes:   f(1)
    """


def test_an_entry_is_made_of_a_signature_and_a_docstring() -> None:
    entry = make_guard(fits, ["aten::gather"], records=("gather",), waits=True)
    assert (entry.name, entry.parameters, entry.required) == ("fits", ("self", "index", "dim"), 2)
    assert (entry.ops, entry.records, entry.waits) == (("aten::gather",), ("gather",), True)
    assert entry.precondition == "Every index is in the table."
    assert (entry.source, entry.cost) == ("Kernel.cu:1, torch 2.13.0", "one reduction")
    assert (entry.passes, entry.violates, entry.is_silent) == ("f(1)", "", False)
    assert make_guard(lambda self: None, []).precondition == ""


@pytest.mark.parametrize("is_silent", [False, True])
def test_what_a_silent_guard_finds_is_silent_too(is_silent: bool) -> None:
    need = Within("index", 0, 2, of="self", dim=0, why="")
    entry = make_guard(lambda index: need, [], is_silent=is_silent)
    assert (entry.is_silent, entry.check(tensor([5])).is_silent) == (is_silent, is_silent)


def test_what_has_no_name_is_shown() -> None:
    nameless = partial(fits, dim=1)
    assert make_guard(nameless, []).name == repr(nameless)


GATHERS = {aten.gather.default, aten.gather.out}
SLOT = ArgumentSlot(name="index", position=1, default=7)


@pytest.mark.parametrize(
    ("args", "kwargs", "value"),
    [((0, 5), {}, 5), ((0,), {"index": 6}, 6), ((0,), {}, 7), ((0, None), {}, None)],
)
def test_the_value_of_an_argument_in_a_call(args: Any, kwargs: Any, value: Any) -> None:
    assert SLOT.of(args, kwargs) == value


@pytest.mark.parametrize(
    ("args", "kwargs", "value", "item", "wanted"),
    [
        ((0, 5, 9), {}, 3, None, ((0, 3, 9), {})),
        ((0,), {"index": 6, "z": 1}, 3, None, ((0,), {"index": 3, "z": 1})),
        ((0, (5, 6)), {}, 3, 1, ((0, [5, 3]), {})),
        ((0,), {"index": [5, 6]}, 3, 0, ((0,), {"index": [3, 6]})),
    ],
)
def test_a_call_with_another_value_of_an_argument(
    args: Any, kwargs: Any, value: Any, item: int | None, wanted: Any
) -> None:
    before = repr((args, kwargs))
    assert SLOT.put(args, kwargs, value, item) == wanted
    assert repr((args, kwargs)) == before


def test_arguments_of_an_overload_in_the_order_of_its_schema() -> None:
    slots = {item.name: item for item in schema_parameters(aten.gather.default)}
    assert [(it.position, it.default) for it in slots.values()][:3] == [
        (0, None),
        (1, None),
        (2, None),
    ]
    assert slots["sparse_grad"].default is False
    assert slots["sparse_grad"].position == 4  # it is given by keyword alone
    assert full_name(aten.index.Tensor) == "aten::index.Tensor"


@pytest.mark.parametrize(
    ("ops", "parameters", "composite", "found"),
    [
        (["aten::gather"], fits, False, GATHERS),
        (["aten::gather.default"], fits, False, {aten.gather.default}),
        (["aten::gather.default"], fits, True, set()),
        (["aten::gather", "aten::gather.default"], fits, False, GATHERS),
        (["aten::no_such_op"], fits, False, set()), (["aten::gather.no_such"], fits, False, set()),
        (["aten::gather"], lambda self, other: None, False, set()),
        (["aten::take_along_dim"], lambda self, indices: None, True,
         {aten.take_along_dim.default, aten.take_along_dim.out}),
    ],
)  # fmt: skip
def test_overloads_that_a_guard_acts_on(
    ops: list[str], parameters: Any, composite: bool, found: set[Any]
) -> None:
    acts_on = resolve(make_guard(parameters, ops, is_composite=composite))
    assert (set(acts_on), len(acts_on)) == (found, len(found))


def test_a_guard_takes_what_the_overload_has() -> None:
    entry = make_guard(fits, ["aten::gather"])
    assert of_overload(entry, aten.gather.default) is entry
    assert of_overload(entry, aten.index.Tensor).parameters == ("self",)
    plain = make_guard(lambda self, dim: None, ["aten::gather"])
    assert of_overload(plain, aten.gather.default) is plain
    odd = make_guard(lambda self, nothing=0, dim=0: None, ["aten::gather"])
    assert of_overload(odd, aten.gather.default).parameters == ("self",)


VIOLATION = Violation(headline="bad")


@pytest.mark.parametrize("answer", [None, VIOLATION, "a sentence", 3, False])
def test_a_check_of_the_users_may_answer_with_a_sentence(answer: Any) -> None:
    check = _base._with_sentence(lambda value: answer, "mine")
    if isinstance(answer, int):
        kind = type(answer).__name__
        with pytest.raises(TypeError, match=f"guard mine returned {kind}, not None, a sentence"):
            check(1)
        return
    found = check(1)
    if isinstance(answer, str):
        assert found is not None
        assert (found.headline, found.is_index) == (answer, False)
    else:
        assert found is answer
