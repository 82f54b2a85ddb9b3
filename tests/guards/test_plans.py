"""Plans of guarded ops: where a guard finds its arguments, and what a call of a form requires."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import cudalens
from cudalens import DeviceIndexError, guards
from cudalens.core import _python
from cudalens.core.report_types import Bounds
from cudalens.guards import GUARDS, plans
from cudalens.guards.engine import Between, Within
from cudalens.guards.plans import Forms, guarded_op, guarded_ops, is_deferred, required_of
from tests.cpu_guards import deterministic

EMBEDDING = torch.ops.aten.embedding.default
TABLE, GOOD, BAD = torch.zeros(3, 2), torch.tensor([0, 2]), torch.tensor([0, 3])


def within(**more: Any) -> Within:
    return Within("index", **{"low": 0, "high": 2, "why": "Why.", **more})


BETWEEN = Between("x", 0, 1, bounds=Bounds(min=0, max=1), why="Why.", asserts="a")


def test_every_guarded_op_is_planned_once_until_its_guards_change() -> None:
    found = guarded_op(EMBEDDING)
    assert found is guarded_op(EMBEDDING)
    assert (found.name, found.entries) == ("aten::embedding", GUARDS[EMBEDDING])
    assert {item.op for item in guarded_ops()} == set(GUARDS)
    mine = guards.add(EMBEDDING, lambda weight: None, "mine")
    try:
        again = next(it for it in guarded_ops() if it.op is EMBEDDING)
        assert again is not found
        assert again.entries is GUARDS[EMBEDDING]
        assert again is guarded_op(EMBEDDING)
    finally:
        guards.remove(mine)
    assert len(guarded_op(EMBEDDING).entries) == len(found.entries)


def test_arguments_of_a_guard_by_place_and_by_name() -> None:
    (plan,) = guarded_op(EMBEDDING).plans
    names = [item.name for item in plan.parameters]
    assert plan.places == {name: at for at, name in enumerate(names)}
    picked = dict(zip(names, plan.pick((TABLE, GOOD, -1, False, False)), strict=True))
    named = dict(zip(names, plan.find((TABLE,), {"indices": GOOD}), strict=True))
    assert picked["weight"] is named["weight"] is TABLE
    assert picked["indices"] is named["indices"] is GOOD
    assert plan.last == max(item.position for item in plan.parameters)


@pytest.mark.parametrize(
    "check",
    [lambda weight, indices: None, lambda indices, weight: None, lambda indices: None],
    ids=["of the op", "another", "one"],
)
def test_arguments_stand_in_the_order_of_the_guard(check: Any) -> None:
    mine = guards.add(EMBEDDING, check, "mine")
    try:
        plan = guarded_op(EMBEDDING).plan_of[mine]
    finally:
        guards.remove(mine)
    names = list(check.__code__.co_varnames)
    assert [item.name for item in plan.parameters] == list(plan.places) == names
    expected = [{"weight": TABLE, "indices": GOOD}[name] for name in names]
    for found in (plan.pick((TABLE, GOOD)), plan.find((TABLE, GOOD), {})):
        assert all(it is other for it, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("op", "waits", "may_read"),
    [
        (EMBEDDING, {False}, False),
        (torch.ops.aten._embedding_bag.default, {False, True}, True),
    ],
    ids=["none", "some"],
)
def test_an_op_may_read_where_any_of_its_guards_waits(
    op: Any, waits: set[bool], may_read: bool
) -> None:
    found = guarded_op(op)
    assert {entry.waits for entry in found.entries} == waits
    assert found.may_read is may_read


@pytest.mark.parametrize(("index", "good"), [(GOOD, True), (BAD, False)])
def test_calls_of_one_form_require_the_same(index: torch.Tensor, good: bool) -> None:
    forms = Forms(guarded_op(EMBEDDING).plans)
    required = forms.of(1, (TABLE, index, -1, False, False))
    assert required is not None
    assert required.are_good((TABLE, index)) is good
    assert forms.of(1, (TABLE, GOOD.flip(0), -1, False, False)) is required
    others = [
        (2, (TABLE, GOOD, -1, False, False)), (1, (TABLE.view(2, 3), GOOD, -1, False, False)),
        (1, (TABLE, GOOD.int(), -1, False, False)), (1, (TABLE, GOOD, 0, False, False)),
    ]  # fmt: skip
    assert all(forms.of(*other) is not required for other in others)
    with deterministic():
        assert forms.of(1, (TABLE, index, -1, False, False)) is not required
    assert [(item.low, item.high) for item in required.deferred] == [(0, 2)]
    assert required.at_once == []


def test_an_unusual_call_has_no_form() -> None:
    class Sub(torch.Tensor):
        """A subclass of a user's."""

    forms = Forms(guarded_op(EMBEDDING).plans)
    for odd in (GOOD.as_subclass(Sub), object(), [GOOD, object()], (1, 2)):
        assert forms.of(1, (TABLE, odd, -1, False, False)) is None
    assert forms.of(1, (TABLE, [GOOD, 3, None], -1, False, False)) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (([None, GOOD],), ([GOOD, None],)),
        (([GOOD], GOOD), ([GOOD, GOOD],)),
        (([GOOD, GOOD],), ([GOOD, GOOD.int()],)),
    ],
)
def test_lists_of_one_form_have_the_same_items(one: Any, other: Any) -> None:
    forms = Forms(guarded_op(torch.ops.aten.index.Tensor).plans)
    assert forms.of(1, (TABLE, *one)) is forms.of(1, (TABLE, *one))
    assert forms.of(1, (TABLE, *one)) is not forms.of(1, (TABLE, *other))


@pytest.mark.parametrize("is_outside", [False, True])
def test_a_look_that_fails_has_the_guards_asked(
    is_outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what came from outside, as an error that the handler of a signal raised."""
    forms, call = Forms(guarded_op(EMBEDDING).plans), (TABLE, GOOD, -1, False, False)
    required: Any = forms.of(1, call)
    monkeypatch.setattr(_python, "came_from_outside", lambda error: is_outside)
    for name in ("required_of", "fulfils"):
        monkeypatch.setattr(plans, name, Mock(side_effect=LookupError))
    for look in (lambda: forms.of(2, call), lambda: required.are_good(call)):
        with pytest.raises(LookupError) if is_outside else nullcontext():
            assert not look()


def test_where_there_is_no_room_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    forms, call = Forms(guarded_op(EMBEDDING).plans), (TABLE, GOOD, -1, False, False)
    with monkeypatch.context() as patched:
        patched.setattr(plans, "_requirements", Mock(side_effect=RecursionError))
        assert forms.of(1, call) is None
    assert forms.of(1, call) is not None


def test_forms_are_forgotten_before_they_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST_FORMS", 2)
    forms = Forms(guarded_op(EMBEDDING).plans)
    first = forms.of(1, (TABLE, GOOD, -1, False, False))
    forms.of(2, (TABLE, GOOD, -1, False, False))
    assert forms.of(1, (TABLE, GOOD, -1, False, False)) is first
    forms.of(3, (TABLE, GOOD, -1, False, False))
    assert len(forms._by_form) == 1
    assert forms.of(1, (TABLE, GOOD, -1, False, False)) is not first


def test_values_that_cannot_be_read_have_the_guard_asked() -> None:
    required = required_of(guarded_op(EMBEDDING).plans, (TABLE, GOOD, -1), {})
    assert required.are_good((TABLE, GOOD))
    assert not required.are_good((TABLE, "no tensor"))
    required.intervals = None
    assert not required.are_good((TABLE, GOOD))


@pytest.mark.parametrize(
    ("indices", "good"),
    [([None, GOOD], True), ([None, BAD], False), ([GOOD, GOOD], True), ([GOOD, BAD], False),
     ([BAD, GOOD], False)],
)  # fmt: skip
def test_each_index_of_a_list_is_read(indices: list[torch.Tensor | None], good: bool) -> None:
    data = torch.zeros(3, 3)
    required = required_of(guarded_op(torch.ops.aten.index.Tensor).plans, (data, indices), {})
    assert required.intervals is not None
    assert [item for _, item, _ in required.intervals] == [
        at for at, index in enumerate(indices) if index is not None
    ]
    assert required.are_good((data, indices)) is good
    # What is kept refers to no tensor of the call.
    for _, _, need in required.intervals:
        assert isinstance(need, Within)
        assert (need.skip_if, callable(need.asserts), callable(need.narrows)) == (
            None,
            False,
            False,
        )


@pytest.mark.parametrize(
    ("devices", "are_asked"),
    [
        (("cpu", "cpu"), False),
        (("meta", "cpu"), True),
        (("cpu", "meta"), True),
        (("meta", "meta"), True),
        (("meta",), False),
    ],
)
def test_indices_on_a_device_are_read_together(devices: tuple[str, ...], are_asked: bool) -> None:
    """By their guard: each by itself would be copied alone."""
    indices = [GOOD.to(device) for device in devices]
    plan = guarded_op(torch.ops.aten.index.Tensor).plans
    required = required_of(plan, (torch.zeros(3, 3), indices), {})
    assert (required.intervals is None) is are_asked
    assert len(required.deferred) == len(devices)


def test_a_condition_and_a_mask_have_the_guard_asked() -> None:
    """Both may refer to tensors of this one call."""
    x, target = torch.zeros(2, 3), torch.tensor([[0, 1, -1], [1, -1, 9]])
    masked = guarded_op(torch.ops.aten.multilabel_margin_loss_forward.default)
    stated = guarded_op(torch.ops.aten._assert_async.default)
    for op, args in ((masked, (x, target, 1)), (stated, (torch.tensor(1),))):
        required = required_of(op.plans, args, {})
        assert required.intervals is None
        assert required.at_once == [*op.entries]
        assert required.deferred == []


def test_a_guard_that_fails_is_asked_at_each_call() -> None:
    required = required_of(guarded_op(EMBEDDING).plans, ("no table", GOOD, -1), {})
    assert (required.intervals, required.deferred) == (None, [])
    assert len(required.at_once) == 1


@pytest.mark.parametrize(
    ("need", "tensor", "later"),
    [
        (within(), None, True), (within(), GOOD, True), (within(), GOOD.byte(), True),
        (within(), GOOD.float(), False), (within(), GOOD.to_sparse(), False),
        (within(high=-1), None, False), (within(high=0), None, True),
        (within(mask=GOOD), None, False), (BETWEEN, None, True),
        (BETWEEN, torch.ones(2), True),
        (BETWEEN, GOOD, False), (object(), None, False),
        (object(), GOOD, False),
    ],
)  # fmt: skip
def test_what_is_looked_at_without_a_wait(need: Any, tensor: Any, later: bool) -> None:
    assert is_deferred(need, tensor) is later


@pytest.mark.parametrize("selected", [0, 1])
def test_an_index_beside_a_mask_is_read_only_where_the_mask_selects_something(
    selected: int, sim: object
) -> None:
    """So it cannot be looked at later, on its own."""
    x, index = torch.zeros(3, 4, device="cuda"), torch.tensor([99], device="cuda")
    mask = torch.arange(3, device="cuda") < selected
    is_bad = pytest.raises(DeviceIndexError, match=r"= 99 ") if selected else nullcontext()
    with is_bad, cudalens.check(deferred=True) as session:
        assert x[mask, index].shape == (0,)
    assert (session.report is None) is not selected
