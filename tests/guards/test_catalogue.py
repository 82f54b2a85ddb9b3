"""The whole catalogue of guards: each entry is documented, acts, is cheap, misses no overload."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cudalens import guards
from cudalens.core.report_types import Violation
from cudalens.guards import GUARDS, Guard, _base, catalogue_rows, full_name
from cudalens.guards._base import _decomposes, _overloads, of_overload, resolve
from tests.cpu_guards import Stopped, guarded
from tests.inventory import LEFT_OUT, REACHABLE, UNGUARDABLE
from tests.probes import SeenFunctions
from tests.releases import here, release

CATALOGUE = tuple({item.requires: item for items in GUARDS.values() for item in items}.values())
NAMESPACE = {
    "torch": torch,
    "F": nn.functional,
    "aten": torch.ops.aten,
    "tensor": torch.tensor,
    "zeros": torch.zeros,
    "ones": torch.ones,
    "rand": torch.rand,
    "nan": math.nan,
    "inf": math.inf,
}
every_guard = pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)


def evaluate(expression: str) -> Any:
    return eval(expression, dict(NAMESPACE))


def run_passing(entry: Guard) -> None:
    """Run the passing example; some kernels exist on accelerators alone."""
    with contextlib.suppress(NotImplementedError):
        evaluate(entry.passes)


def passing_arguments(entry: Guard) -> list[Any]:
    """Return the arguments that the guard gets in its own passing example."""
    calls: list[tuple[Any, ...]] = []

    def note(*values: Any) -> None:
        calls.append(values)

    noting = replace(entry, requires=note, check=note)
    before = dict(guards._table)
    guards._table.update({op: (of_overload(noting, op),) for op in resolve(entry)})
    try:
        with guarded():
            run_passing(entry)
    finally:
        guards._table.update(before)
    assert calls, f"the example of {entry.name} calls no op that it guards"
    return list(calls[0])


class Ops(TorchDispatchMode):
    """Counts dispatched ops by name, and notes how many elements each reduction reads."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.reduced: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.counts[name] += 1
        if name in REDUCTIONS:
            self.reduced.append(args[0].numel())
        return func(*args, **(kwargs or {}))


READS = frozenset(
    {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"}
    | {"equal", "allclose", "is_nonzero", "__contains__"}
)
"""Functions by which the host asks for values."""
REDUCTIONS = frozenset(
    {"aminmax", "amin", "amax", "min", "max", "any", "all", "sum", "count_nonzero", "mean"}
    | {"nansum", "prod", "norm", "linalg_vector_norm", "argmax", "argmin", "cumsum", "cummax"}
    | {"unique", "sort", "nonzero", "bincount"}
)
COPIES = frozenset({"_local_scalar_dense", "_to_copy", "copy_"})


def tensors_in(arguments: list[Any]) -> Iterator[torch.Tensor]:
    for value in arguments:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


@every_guard
def test_docstring_has_its_five_parts(entry: Guard) -> None:
    """Precondition, source with a torch version, cost, and both examples are written down."""
    assert entry.precondition.endswith(".")
    assert "torch 2." in entry.source
    for part in (entry.cost, entry.passes, entry.violates):
        assert part
    assert entry.passes != entry.violates


def stopped_by(entry: Guard) -> tuple[str, Violation]:
    """Run both examples with every guard: the one at the bound is silent, the other's finding."""
    with guarded() as collector:
        run_passing(entry)
        run_passing(entry)  # its shapes are known now, and so is what their values must be in
        assert collector.found == []
        for _ in range(2):
            with pytest.raises(Stopped):
                evaluate(entry.violates)
    assert [violation.guard for _, violation in collector.found] == [entry.name] * 2
    return collector.found[0]


@every_guard
def test_examples_pass_and_violate(entry: Guard) -> None:
    """The example one step beyond is stopped by this guard, with a whole finding."""
    op, violation = stopped_by(entry)
    overload = next(item for item in GUARDS if full_name(item) == op)
    schema = {argument.name for argument in overload._schema.arguments}
    assert violation.argument in schema
    assert violation.related is None or violation.related in schema
    assert violation.is_silent == entry.is_silent
    # What CUDA would print is a line of one of the records that the guard stands for; none where
    # it is silent, or in a release before the kernel asserted.
    lines = [here(line) for name in entry.records for line in REACHABLE[name]["stderr_text"]]
    assert (violation.device_text is None) == (entry.is_silent or not any(lines))
    if violation.device_text is not None:
        assert _printed(violation.device_text) in map(_printed, lines)
    assert violation.bounds.text
    assert violation.explanation
    assert violation.offenders.count >= len(violation.offenders.first) >= 1
    assert "{argument}" in violation.headline
    assert set(re.findall(r"{(\w+)}", violation.headline)) <= {"argument", "related"}
    assert ("{related}" not in violation.headline) or violation.related


def _printed(line: str) -> str:
    """Return a line without what differs by thread, and without a message that the caller chose."""
    line = line.replace(" block: [0,0,0], thread: [0,0,0]", "")
    return re.sub(r"(?<=_assert_async_cuda_kernel: Assertion )`.*`", "`…`", line)


@pytest.mark.usefixtures("nothing_is_few")  # of what is few, the host has a copy to read
@every_guard
def test_passing_check_is_cheap(entry: Guard) -> None:
    """One pass over each index or row of values, one wait of the host, when nothing is wrong."""
    arguments = passing_arguments(entry)
    listed = [value for value in arguments if isinstance(value, (list, tuple))]
    allowed = max(1, *(sum(isinstance(x, torch.Tensor) for x in value) for value in listed), 1)
    with SeenFunctions() as seen, Ops() as ops:
        assert entry.check(*arguments) is None
    # What a pass over rows leaves, one number a row, may be reduced once more.
    passes = [numel for numel in ops.reduced if numel == max(ops.reduced)]
    assert len(passes) <= allowed, ops.counts
    assert len(ops.reduced) <= 1 + allowed, ops.counts
    assert sum(ops.counts[name] for name in COPIES) <= 1, ops.counts
    assert sum(name in READS for name in seen.names) <= 1


@every_guard
def test_empty_tensors_cost_nothing(entry: Guard) -> None:
    """Nothing is reduced, copied or waited for when the tensors have no elements."""

    def emptied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty((0,) * max(value.dim(), 1), dtype=value.dtype)
        if isinstance(value, (list, tuple)):
            return [emptied(item) for item in value]
        return value

    arguments = [emptied(value) for value in passing_arguments(entry)]
    with SeenFunctions() as seen, Ops() as ops:
        assert entry.check(*arguments) is None
    assert not READS & set(seen.names)
    assert ops.reduced == []
    assert not COPIES & set(ops.counts)


@every_guard
def test_check_changes_nothing(entry: Guard) -> None:
    """The arguments and the random state are the same after a check as before it."""
    arguments = passing_arguments(entry)
    before = [item.clone() for item in tensors_in(arguments)]
    state = torch.get_rng_state()
    entry.check(*arguments)
    assert torch.equal(torch.get_rng_state(), state)
    for old, new in zip(before, tensors_in(arguments), strict=True):
        assert torch.equal(old, new)


def _dispatched(op: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel(full_name(op)))


def _signature(op: Any) -> dict[str, str]:
    return {argument.name: str(argument.type) for argument in op._schema.arguments}


# Their probability is a Python number, which torch checks on the host.
NOT_TWINS = frozenset({"aten::bernoulli.p", "aten::bernoulli.float_out", "aten::bernoulli_.float"})


@every_guard
def test_sibling_overloads_are_guarded(entry: Guard) -> None:
    """Each in-place, out= and functional twin with the same arguments is guarded as well."""
    missed = []
    for op in [op for op in resolve(entry) if op in GUARDS]:
        wanted = {name: _signature(op)[name] for name in entry.parameters[: entry.required]}
        base = op._schema.name.removesuffix("_")
        for twin in [*_overloads(base), *_overloads(base + "_")]:
            if not _dispatched(twin) or _decomposes(twin) or full_name(twin) in NOT_TWINS:
                continue
            if wanted.items() <= _signature(twin).items() and twin not in GUARDS:
                missed.append(full_name(twin))
    assert missed == []


_VALIDATE = "aten::_validate_compressed_sparse_indices"
# Ops that reach their assert through another op, which is guarded.
REACHED_THROUGH = {
    "aten::sparse_compressed_tensor.comp_plain_value_size": _VALIDATE,
    "aten::sparse_compressed_tensor.comp_plain_value": _VALIDATE,
    "aten::add.Tensor": "aten::index_add_",
    "aten::add_.Tensor": "aten::index_add_",
    "aten::add.out": "aten::index_add_",
}


@pytest.mark.parametrize("record", REACHABLE, ids=str)
def test_record_is_guarded_or_has_a_reason(record: str) -> None:
    """No reachable assertion is left over, and none is both guarded and called unguardable."""
    if record.startswith("grouped_mm") and release() < (2, 8):
        pytest.skip("torch has no aten::_grouped_mm before 2.8")
    guards = [entry for entry in CATALOGUE if record in entry.records]
    assert bool(guards) != (record in UNGUARDABLE)


@pytest.mark.parametrize("record", sorted(set(REACHABLE) - UNGUARDABLE), ids=str)
def test_ops_of_a_record_are_guarded(record: str) -> None:
    """Each op of the inventory that this torch dispatches carries a guard for the record."""
    missed = []
    for name in REACHABLE[record]["ops"]:
        for op in _overloads(REACHED_THROUGH.get(name, name)):
            is_other = "." not in name and op._overloadname != "default"
            if is_other or not _dispatched(op) or _decomposes(op):
                continue
            if not any(record in entry.records for entry in GUARDS.get(op, ())):
                missed.append(full_name(op))
    assert missed == []


def test_what_is_named_is_there() -> None:
    """Reasons and guards name records of the inventory, and every op left out exists."""
    claimed = {name for entry in CATALOGUE for name in entry.records}
    assert claimed | UNGUARDABLE <= set(REACHABLE)
    assert [name for name in LEFT_OUT if not _overloads(name)] == []


def test_catalogue_rows_list_every_guard_once() -> None:
    """The printed catalogue has one row a guard, with its ops, and can be written as JSON."""
    rows = catalogue_rows()
    names = [row["guard"] for row in rows]
    assert sorted(names) == sorted({entry.name for entry in CATALOGUE})
    assert all(row["op"] for row in rows)
    assert json.loads(json.dumps(rows)) == rows


Releases = tuple[tuple[int, int], tuple[int, int]]
_NEWEST = (9, 99)
OF_OTHER_RELEASES: Mapping[str, Releases] = {
    "aten::_grouped_mm": ((2, 8), _NEWEST),
    "aten::_scaled_grouped_mm": ((2, 8), _NEWEST),
    "aten::_scaled_grouped_mm_v2": ((2, 10), _NEWEST),
}
"""Ops of the catalogue that not every supported torch has: the first and the last that does."""


def astray(
    entries: Iterable[Guard], others: Mapping[str, Releases], torch_release: tuple[int, int]
) -> list[str]:
    """Return the ops on which a guard never acts, though they should be in this release."""
    found = []
    for entry in entries:
        for op in entry.ops:
            first, last = others.get(op, (torch_release, torch_release))
            is_expected = first <= torch_release <= last
            if bool(resolve(replace(entry, ops=(op,)))) != is_expected:
                found.append(f"{entry.name}: {op}")
    return found


def test_every_guard_acts_on_every_op_that_it_names() -> None:
    """For users a guard stands aside where there is no such op; here a misspelt one is found."""
    own = _base._registered
    assert astray(own, OF_OTHER_RELEASES, release()) == []
    assert set(OF_OTHER_RELEASES) <= {op for entry in own for op in entry.ops}
    assert [entry.name for entry in own if resolve(entry)] == [entry.name for entry in CATALOGUE]
