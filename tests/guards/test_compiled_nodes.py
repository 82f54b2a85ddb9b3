"""What the pass over a compiled graph reads of one node, and what it writes into the check."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cudalens.core import _compiler, _python
from cudalens.guards.compiled import (
    CompiledGuards,
    _define_op,
    _identity,
    _is_index,
    _meaning,
    _stand_in,
)
from cudalens.guards.engine import Within

GATHER = torch.ops.aten.gather.default
NEED = Within("index", low=0, high=2, why="Why.", of="self", dim=1, item=None)
TRACE = """\
  File "/home/me/a b.py", line 12, in train
    loss(x)
  File "<cell 3>", line 4, in <lambda>
    x.gather(1, i)  # File "no.py", line 1, in this
"""


def node_of(value: object = None, **meta: Any) -> Any:
    return SimpleNamespace(target=GATHER, meta={"val": value, **meta})


def meaning_of(wraps: bool = False, **meta: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_meaning(node_of(**meta), NEED, wraps))
    return found


@pytest.mark.parametrize("wraps", [False, True])
def test_the_op_and_the_requirement_travel_in_the_code(wraps: bool) -> None:
    found = meaning_of(wraps)
    need = {"argument": "index", "item": None, "of": "self", "dim": 1, "why": "Why."}
    assert (found["op"], found["need"], found["wraps"]) == ("aten::gather", need, wraps)
    node: Any = SimpleNamespace(target=torch.ops.aten.index.Tensor, meta={})
    assert json.loads(_meaning(node, NEED, wraps))["op"] == "aten::index.Tensor"


@pytest.mark.parametrize(
    ("meta", "is_backward"),
    [
        ({}, False),
        ({"partitioner_tag": "is_backward"}, True),
        ({"partitioner_tag": "is_forward"}, False),
        ({"autograd_backward": True}, True),
        ({"autograd_backward": False}, False),
        ({"partitioner_tag": "is_forward", "autograd_backward": True}, True),
    ],
)
def test_a_node_of_backward_is_marked_by_either_release(
    meta: dict[str, Any], is_backward: bool
) -> None:
    assert meaning_of(**meta)["backward"] is is_backward


@pytest.mark.parametrize("trace", [None, "", TRACE])
def test_the_lines_of_a_trace_travel_outermost_first(trace: str | None) -> None:
    frames = [["/home/me/a b.py", 12, "train"], ["<cell 3>", 4, "<lambda>"]]
    assert meaning_of(stack_trace=trace)["frames"] == (frames if trace else [])


def sizes() -> tuple[Any, Any]:
    """Return a size that the compiler has an example of, and one that only the run knows."""
    environment = ShapeEnv()
    known = environment.create_symbol(6, ConstantSource("n"))
    return (
        environment.create_symintnode(known, hint=6),
        environment.create_unbacked_symint(),
    )


def test_sizes_of_an_example_are_numbers() -> None:
    known, unknown = sizes()
    assert _stand_in(node_of(known)) == 6
    assert _stand_in(node_of(unknown)) == 1 << 13
    assert _stand_in(node_of(0.5)) == 0.5
    assert _stand_in(node_of(None)) is None


def test_an_example_has_the_form_of_the_tensor_and_no_memory() -> None:
    value = torch.zeros(2, 3, dtype=torch.int32).t()
    found = _stand_in(node_of(value))
    assert (found.shape, found.stride(), found.dtype) == ((3, 2), (1, 3), torch.int32)
    assert found.device.type == "meta"


@pytest.mark.parametrize(("dtype", "size"), [(torch.int64, 1), (torch.float32, 1 << 13)])
def test_an_index_of_unknown_size_broadcasts_with_others(dtype: torch.dtype, size: int) -> None:
    known, unknown = sizes()
    with torch._subclasses.FakeTensorMode(shape_env=unknown.node.shape_env):
        value = torch.empty((unknown, known), dtype=dtype, device="cpu")
    assert _stand_in(node_of(value)).shape == (size, 6)


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        (torch.zeros(2, dtype=torch.int64), True),
        (torch.zeros(1, dtype=torch.int32), True),
        (torch.zeros((), dtype=torch.int64), False),
        (torch.zeros(2), False),
        (torch.zeros(2, 0, dtype=torch.int64), False),
        (torch.zeros(2, dtype=torch.int64, device="meta"), False),
    ],
    ids=["index", "small", "number", "floats", "empty", "elsewhere"],
)
def test_an_index_that_surely_has_elements_is_looked_at(value: torch.Tensor, is_one: bool) -> None:
    assert _is_index(node_of(value), "cpu") is is_one


# --- guards that compiled code is told apart by, and that it tells --------------------------------


def one() -> int:
    return 1


def two() -> int:
    return 1


def test_code_is_told_apart_by_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lines are not known, from all other code."""

    def identity(*functions: Any) -> object:
        codes = [function.__code__ for function in functions] or None
        monkeypatch.setattr(_compiler, "code_being_compiled", lambda: codes)
        return _identity()

    assert identity(one, two) == identity(one, two)
    assert identity(one) != identity(two)
    assert identity(one) != identity(one, two)
    assert identity() != identity()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A compiler that keeps what it is told."""
    made = Mock()
    for name in ("rewrite_compiled_graphs", "forget_compiled_code"):
        monkeypatch.setattr(_compiler, name, getattr(made, name))
    return made


def test_the_last_that_were_put_in_are_told(compiler: Mock) -> None:
    """And the compiler forgets the code that it made, each time."""
    pasts = [Mock(), Mock()]
    for past in pasts:
        past.can_check.return_value = False

    def told() -> list[int]:
        for past in pasts:
            past.can_check.reset_mock()
        torch.ops.cudalens.in_bounds(torch.tensor([0]), 1, "")
        return [past.can_check.call_count for past in pasts]

    first, last = (CompiledGuards(past, frozenset()).install() for past in pasts)
    assert told() == [0, 1]
    last()
    assert told() == [1, 0]
    first()
    assert told() == [0, 0]
    assert compiler.rewrite_compiled_graphs.return_value.call_count == 2
    assert compiler.forget_compiled_code.call_count == 4


@pytest.mark.parametrize("is_outside", [False, True])
def test_a_graph_that_cannot_be_guarded_is_one_line(
    is_outside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    past, graph = Mock(), SimpleNamespace(nodes=[SimpleNamespace(target=GATHER)])
    monkeypatch.setattr(_python, "came_from_outside", lambda error: is_outside)
    with pytest.raises(AttributeError) if is_outside else nullcontext():
        CompiledGuards(past, frozenset())._rewrite(graph, "cpu")
    lines = [str(given.args[0]) for given in past.complain.call_args_list]
    assert len(lines) == (not is_outside)
    assert all(line.startswith("guards of a compiled graph") for line in lines)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_index_without_gaps_comes_out_of_the_check(device: str) -> None:
    _define_op()
    turned = torch.tensor([[0, 1], [2, 3]], device=device).t()
    made = torch.ops.cudalens.in_bounds(turned, 4, "")
    assert (made.shape, made.stride(), made.dtype) == ((2, 2), (2, 1), torch.int64)
    assert device == "meta" or torch.equal(made, turned)
