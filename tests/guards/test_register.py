"""Guards of the user's own, for ops of the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

import cudalens
from cudalens import guards as catalogue
from cudalens.core.errors import GuardRegistrationError
from cudalens.core.report_types import Violation
from cudalens.guards import GUARDS, add, out_of_range
from cudalens.guards._base import resolve
from cudalens.guards.process import PROCESS
from tests.blocks import own_op
from tests.cpu_guards import guarded

pytestmark = pytest.mark.usefixtures("untouched_catalogue")


@pytest.fixture
def op() -> Iterator[Any]:
    """An op of the user's own that reads a table without looking."""
    library = torch.library.Library("guardtest", "DEF")
    library.define("lookup(Tensor table, Tensor rows, int step=1) -> Tensor")
    library.define("lookup.wide(Tensor table, Tensor rows, *, bool wide) -> Tensor")
    library.impl("lookup", lambda table, rows, step=1: table + 0, "CPU")
    library.impl("lookup.wide", lambda table, rows, *, wide: table + 1, "CPU")
    yield torch.ops.guardtest.lookup
    library._destroy()


def register(op: Any, check: Any, name: str | None = None) -> tuple[Any, ...]:
    """Add a guard, and return the overloads that it acts on."""
    return resolve(add(op, check, name))


def rows_in_table(table: Tensor, rows: Tensor) -> str | None:
    """Every row is in the table."""
    return f"rows reach {int(rows.max())}" if int(rows.max()) >= table.size(0) else None


def test_own_guard_acts(op: Any) -> None:
    """A registered check stops the bad call of every overload, and passes the good one on."""
    assert set(register("guardtest::lookup", rows_in_table)) == {op.default, op.wide}
    table = torch.zeros(3)
    with guarded() as collector:
        assert torch.equal(op(table, tensor([2])), table)
        found = collector.look(lambda: op(table, tensor([3])))
        assert found is not None and found.headline == "rows reach 3"
        assert collector.look(lambda: op.wide(table, tensor([3]), wide=True)) is not None
        assert [name for name, _ in collector.found] == ["guardtest::lookup.wide"]
    assert torch.equal(op(table, tensor([3])), table)


@pytest.mark.parametrize("recorded", [False, True])
def test_own_guard_of_an_op_that_decomposes(recorded: bool) -> None:
    """An op without a kernel of its own is looked at as well, and keeps its gradient."""
    schema, key = "rows(Tensor table, Tensor rows) -> Tensor", "CompositeImplicitAutograd"
    with own_op(schema, lambda table, rows: table[rows] * 2, key) as own:
        assert register("mine::rows", rows_in_table) == (own.default,)
        table = torch.zeros(3, requires_grad=recorded)
        with guarded() as collector:
            taken = own(table, tensor([2]))
            assert taken.requires_grad == recorded
            if recorded:
                taken.sum().backward()
                assert table.grad is not None and table.grad.tolist() == [0, 0, 2]
            found = collector.look(lambda: own(table, tensor([3])))
            assert found is not None and found.headline == "rows reach 3"
            assert [name for name, _ in collector.found] == ["mine::rows"]


def test_defaults_reach_the_guard(op: Any) -> None:
    """Arguments that the call leaves out arrive with their defaults, others with their values."""
    steps: list[int] = []
    register("guardtest::lookup", lambda table, step: steps.append(step))
    with guarded():
        op(torch.zeros(3), tensor([0]))
        op(torch.zeros(3), tensor([0]), 4)
        op(torch.zeros(3), tensor([0]), step=5)
    assert steps == [1, 4, 5]


def test_a_guard_of_the_same_name_takes_the_place_of_the_first(op: Any) -> None:
    """A cell that registers a guard may run twice; another name adds up, as does another op."""
    seen: list[str] = []

    def make(word: str) -> Any:
        def rows_exist(rows: Tensor) -> None:
            seen.append(word)

        return rows_exist

    register("guardtest::lookup", make("first"))
    register("guardtest::lookup", make("second"))
    register(op.wide, make("wide"))
    register("guardtest::lookup", make("named"), "other")
    with guarded():
        op(torch.zeros(3), tensor([0]))
        op.wide(torch.zeros(3), tensor([0]), wide=True)
    assert seen == ["second", "named", "wide", "named"]


def test_what_registers_takes_out_again(op: Any) -> None:
    """Also where guards are installed; twice is harmless, and so is one that was replaced."""
    catalogue_before = dict(GUARDS)
    table, bad = torch.zeros(3), tensor([7])
    with PROCESS.acting_on("cpu"), cudalens.guard():
        first = cudalens.register_guard(op, lambda rows: "the first", name="mine")
        undo = cudalens.register_guard(op, lambda rows: "the second", name="mine")
        first()
        with pytest.raises(cudalens.DeviceValueError, match="the second") as caught:
            op(table, bad)
        assert caught.value.report is not None
        undo()
        undo()
        assert torch.equal(op(table, bad), table)
    assert dict(GUARDS) == catalogue_before


def test_a_guard_of_the_catalogue_is_not_replaced(op: Any) -> None:
    """Its name on an op of torch's adds a guard, and the undo leaves torch's own."""
    (builtin,) = GUARDS[torch.ops.aten.embedding.default]
    undo = cudalens.register_guard("aten::embedding", lambda indices: None, name=builtin.name)
    assert len(GUARDS[torch.ops.aten.embedding.default]) == 2
    undo()
    assert GUARDS[torch.ops.aten.embedding.default] == (builtin,)


def test_failing_guard_lets_the_call_pass(op: Any) -> None:
    """A guard that raises is told of in one line; the call goes on."""

    def broken(table: Tensor) -> None:
        msg = "no such thing"
        raise LookupError(msg)

    register("guardtest::lookup", broken)
    with guarded() as collector:
        assert op(torch.zeros(3), tensor([0])).shape == (3,)
        assert collector.trouble == ["guard broken failed: LookupError: no such thing"]
        collector.trouble.clear()


LOOKUP = "guardtest::lookup"
NO_NAME = "is not an op name: write it as namespace::op"
NO_GUARD = "is not a guard: give a function"
NO_COLUMNS = "guardtest::lookup has no argument 'columns'; its arguments are table, rows, step"


@pytest.mark.parametrize(
    ("name", "check", "says"),
    [
        ("guardtest::missing", rows_in_table, "there is no op 'guardtest::missing'"),
        ("nowhere::lookup", rows_in_table, "there is no op 'nowhere::lookup'"),
        (f"{LOOKUP}.missing", rows_in_table, "there is no op 'guardtest::lookup.missing'"),
        ("lookup", rows_in_table, f"'lookup' {NO_NAME}"),
        *((name, rows_in_table, NO_NAME) for name in (3, None, len)),
        # A check that asks for an argument the op does not have names the ones that it has.
        (LOOKUP, lambda table, columns: None, NO_COLUMNS),
        *((LOOKUP, check, NO_GUARD) for check in (3, None, "rows", torch.add)),
    ],
)
def test_what_cannot_be_a_guard_is_refused(op: Any, name: Any, check: Any, says: str) -> None:
    """One clear sentence; nothing is registered."""
    before = dict(GUARDS)
    with pytest.raises(GuardRegistrationError, match=re.escape(says)) as caught:
        cudalens.register_guard(name, check)
    assert "\n" not in str(caught.value)
    assert dict(GUARDS) == before


def test_an_op_may_be_given_as_torch_holds_it(op: Any) -> None:
    """By name, as the op with all its overloads, or as one overload."""
    assert register(op.wide, rows_in_table) == (op.wide,)
    assert op.default not in GUARDS
    assert register(op.default, rows_in_table) == (op.default,)
    assert register("guardtest::lookup.wide", rows_in_table) == (op.wide,)
    assert set(register(op, rows_in_table)) == {op.default, op.wide}


def test_an_op_may_be_given_as_what_made_it() -> None:
    """``torch.library.custom_op`` gives an object: its op is meant, and its arguments count."""

    @torch.library.custom_op("guardtest_custom::lookup", mutates_args=())
    def lookup(table: Tensor, rows: Tensor) -> Tensor:
        return table + 0

    assert register(lookup, rows_in_table) == (torch.ops.guardtest_custom.lookup.default,)
    with guarded() as collector:
        assert collector.look(lambda: lookup(torch.zeros(3), tensor([2]))) is None
        assert collector.look(lambda: lookup(torch.zeros(3), tensor([3]))) is not None
    with pytest.raises(GuardRegistrationError, match="has no argument 'columns'"):
        register(lookup, lambda columns: None)


@pytest.mark.parametrize("wide", [{}, {"wide": True}])
def test_the_framework_names_guard_op_and_overload(op: Any, wide: dict[str, bool]) -> None:
    """A finding carries the name of its check and of the overload called, whatever it says."""

    def rows_exist(table: Tensor, rows: Tensor) -> Violation | None:
        return out_of_range(rows, argument="rows", low=0, high=2, place="the 3 rows")

    def rows_are_few(table: Tensor, rows: Tensor) -> Violation | None:
        return Violation(headline="too many rows", guard="mine", op="other", overload="odd")

    def rows_are_good(table: Tensor, rows: Tensor) -> str:
        return "rows are bad"

    overload = "wide" if wide else "default"
    for check in (rows_exist, rows_are_few, rows_are_good):
        catalogue._table.pop(getattr(op, overload), None)
        register("guardtest::lookup", check)
        with guarded() as collector:
            found = collector.look(lambda: op(torch.zeros(3), tensor([3]), **wide))
        assert found is not None
        made = (found.guard, found.op, found.overload)
        assert made == (check.__name__, "guardtest::lookup", overload)


def row_of(guard: str) -> Any:
    (row,) = (row for row in catalogue.catalogue_rows() if row["guard"] == guard)
    return row


def test_a_row_of_the_catalogue_says_all_of_a_guard() -> None:
    row = row_of("gather_index_in_range")
    assert row["op"] == ["aten::gather", "aten::gather.out"]
    assert row["api"] == ["torch.gather", "Tensor.gather"]
    assert row["precondition"].startswith("Every index is in [0, size - 1] of the dimension")
    assert row["source"].startswith("ScatterGatherKernel.cu:") and "torch" in row["source"]
    assert row["cost"].endswith("one copy of two numbers")
    assert (row["frequency"], row["silent"], row["waits"]) == ("very common", False, False)
    assert row["records"] == ["gather_scatter", "gather_rows_fast"]
    assert row_of("embedding_bag_offsets_rise")["waits"] is True
    assert row_of("embedding_bag_backward_indices_in_range")["silent"] is True


def test_a_row_has_the_functions_of_all_its_ops(op: Any) -> None:
    assert {"torch.scatter", "Tensor.scatter_"} <= {*row_of("scatter_index_in_range")["api"]}
    register("guardtest::lookup", rows_in_table)
    row = row_of("rows_in_table")
    assert row["op"] == ["guardtest::lookup", "guardtest::lookup.wide"]
    assert (row["precondition"], row["frequency"]) == ("Every row is in the table.", "user")


def test_where_one_overload_decomposes_the_others_are_guarded() -> None:
    """What it is made of is looked at by the guards of its parts."""
    library = torch.library.Library("guardtest", "DEF")
    library.define("parts(Tensor table, Tensor rows) -> Tensor")
    library.define("parts.wide(Tensor table, Tensor rows, *, bool wide) -> Tensor")
    library.impl("parts", lambda table, rows: table + 0, "CompositeImplicitAutograd")
    library.impl("parts.wide", lambda table, rows, *, wide: table + 1, "CPU")
    try:
        parts = torch.ops.guardtest.parts
        assert register(parts, rows_in_table) == (parts.wide,)
        assert register("guardtest::parts.default", rows_in_table) == (parts.default,)
    finally:
        library._destroy()
