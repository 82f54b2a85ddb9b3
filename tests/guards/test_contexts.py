"""Guards wherever torch runs an op: transforms, tracing, odd tensors, an index that was changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cpu_guards import Collector, guarded

TABLE = torch.rand(3, 2)
GOOD, BAD = tensor([0, 2]), tensor([0, 3])


def lookup(indices: Tensor) -> Tensor:
    return F.embedding(indices, TABLE)


def test_tensors_without_values_are_left_alone(guards: Collector) -> None:
    """Fake and meta tensors have nothing to read."""
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(BAD), mode.from_tensor(TABLE)
        assert guards.look(lambda: F.embedding(*fake)) is None
    assert guards.look(lambda: F.embedding(BAD.to("meta"), TABLE.to("meta"))) is None


INDEX_TYPES = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", [*INDEX_TYPES, torch.bool, torch.float32], ids=str)
def test_what_is_no_index_is_torch_s_matter(guards: Collector, dtype: torch.dtype) -> None:
    """Dtypes that torch refuses as an index get torch's own error."""
    for call in (
        lambda: lookup(BAD.to(dtype)),
        lambda: TABLE.gather(0, BAD.to(dtype).unsqueeze(1)),
        lambda: TABLE.take(BAD.to(dtype)),
    ):
        assert guards.unguarded(call) is not None
        assert guards.found == []


CHOICES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "max": lambda x: x.max(1),
    "sort": lambda x: x.sort(1),
    "topk": lambda x: x.topk(2),
    "cummax": lambda x: x.cummax(1),
    "kthvalue": lambda x: x.kthvalue(1),
}


@pytest.mark.parametrize("name", CHOICES)
def test_positions_changed_before_backward(guards: Collector, name: str) -> None:
    """Positions that an op gave are trusted by its gradient, unless somebody wrote to them."""
    for value in (0, 99):
        values, places = CHOICES[name](torch.rand(4, 4, requires_grad=True))
        places.data.reshape(-1)[0] = value
        found = guards.look(lambda: values.sum().backward())  # noqa: B023
        assert (found is not None) == (value == 99)


class Noting(Tensor):
    """Notes each function of torch's that is called with it."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


CHOSEN: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda table, ids: F.embedding(ids, table),
    lambda table, ids: table[ids],
    lambda table, ids: table.T[:, ids],
]


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("choose", CHOSEN)
def test_a_subclass_does_not_see_the_look(
    choose: Callable[[Tensor, Tensor], Tensor], is_deferred: bool
) -> None:
    """Alone or in a list of indices, it sees the calls of the program alone; a bad one is found.

    In backward of a plain tensor nothing has switched off what it defines.
    """

    def train(ids: Tensor) -> None:
        found = choose(TABLE.clone().requires_grad_(), ids.as_subclass(Noting))
        found.as_subclass(Tensor).backward(torch.ones(found.shape).as_subclass(Noting))

    Noting.seen.clear()
    train(GOOD)
    alone = Noting.seen.copy()
    with guarded(is_deferred=is_deferred) as guards:
        assert guards.look(lambda: train(GOOD)) is None
        assert [*alone, *alone] == Noting.seen
        assert guards.look(lambda: train(BAD)) is not None


class Shapeless(Tensor):
    """Raises where its sizes or its device are asked for."""

    @property
    def shape(self) -> Any:
        raise RuntimeError("no shape")

    device = shape


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("choose", CHOSEN)
def test_a_property_of_a_subclass_that_raises_hides_no_index(
    choose: Callable[[Tensor, Tensor], Tensor], is_deferred: bool
) -> None:
    """Sizes and devices are read below Python."""
    with guarded(is_deferred=is_deferred) as guards:
        assert guards.look(lambda: choose(TABLE, GOOD.as_subclass(Shapeless))) is None
        found = guards.look(lambda: choose(TABLE, BAD.as_subclass(Shapeless)))
        assert found is not None and found.offenders.first[0].value == 3
        guards.trouble.clear()  # deferred guards say that they looked at once


def room_left() -> int:
    """Return how many more frames fit.

    Less than the recursion limit says on Python 3.12 where torch 2.10 or older has failed to
    compile: it leaves its frame evaluator in place, and each frame then counts as a frame of C.
    """
    try:
        return 1 + room_left()
    except RecursionError:
        return 0


def at_depth(room: int, call: Callable[[], Any]) -> Any:
    """Make a call with room for so many more frames of Python."""

    def deeper(left: int) -> Any:
        return call() if left == 0 else deeper(left - 1)

    return deeper(room_left() - room)


@pytest.mark.parametrize("is_deferred", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_bad_call_is_found_as_deep_as_any_call_runs(is_deferred: bool) -> None:
    """Near the end of the stack Python may refuse a call; none that runs has not been looked at."""
    limit = sys.getrecursionlimit()
    ran = found = 0
    with guarded(is_deferred=is_deferred) as guards:
        for room in range(5, 90):
            for ids in (GOOD, BAD):
                with suppress(RecursionError):
                    if guards.look(lambda: at_depth(room, lambda: TABLE[ids])) is None:  # noqa: B023
                        assert ids is GOOD
                        ran += 1
                    else:
                        found += 1
        guards.trouble.clear()
    assert sys.getrecursionlimit() == limit
    assert found > 40 and ran > 40
