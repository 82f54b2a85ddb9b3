"""The recorded calls as they are read: who made a tensor, who wrote to it, what is not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from cudalens.recorder import Recorder
from cudalens.recorder.calls import Recorded
from cudalens.recorder.earlier_calls import UnseenChange
from cudalens.recorder.history import Snapshot


def recorded(run: Callable[[], Any]) -> tuple[Snapshot, Any]:
    """Return the snapshot after a function has run, and what it gave back."""
    with Recorder() as recorder:
        result = run()
        return recorder.snapshot(), result


def names(calls: Any) -> list[str]:
    return [call.api.stem for call in calls]


def name(call: Recorded | None) -> str | None:
    return None if call is None else call.api.stem


def three() -> list[Tensor]:
    x = torch.zeros(2, 3)
    y = x.sum(0, dtype=torch.float64)
    return [x, y, torch.equal(x, x) or y]  # type: ignore[list-item]


@pytest.mark.parametrize(("limit", "count"), [(-1, 0), (0, 0), (1, 1), (3, 3), (4, 3)])
def test_history_has_the_last_calls(limit: int, count: int) -> None:
    snapshot, _ = recorded(three)
    found = snapshot.history(limit)
    assert [item.seq for item in found] == [1, 2, 3][3 - count :]
    shapes = ["-> f32[2, 3]", "f32[2, 3] -> f64[3]", "f32[2, 3], f32[2, 3] ->"]
    assert [item.shapes for item in found] == shapes[3 - count :]


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        (torch.bfloat16, "bf16"), (torch.uint8, "u8"), (torch.int64, "i64"),
        (torch.complex64, "c64"), (torch.bool, "bool"),
    ],
)  # fmt: skip
def test_dtypes_are_written_short(dtype: torch.dtype, word: str) -> None:
    snapshot, _ = recorded(lambda: torch.zeros(1, dtype=dtype))
    assert snapshot.history(1)[0].shapes == f"-> {word}[1]"


def test_a_shape_that_nobody_knows_any_more() -> None:
    x = torch.zeros(3)
    with Recorder() as recorder:
        x.exp()
        del x
        assert recorder.history()[-1].shapes == "? -> f32[3]"


def test_calls_are_put_under_their_module_and_phase() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def run() -> None:
        net(torch.ones(1, 2)).sum().backward()

    snapshot, _ = recorded(run)
    found = {item.op.rpartition(".")[2]: item for item in snapshot.history(20)}
    assert (found["linear"].module_path, found["linear"].module_type) == ("0", "Linear")
    assert (found["relu"].module_path, found["relu"].phase) == ("1", "forward")
    assert (found["sum"].module_path, found["sum"].module_type) == (None, None)
    assert found["backward"].phase == "backward"
    assert snapshot.module_roots() == {"0": {id(net)}, "1": {id(net)}}


def test_forward_call_of_a_node() -> None:
    x = torch.ones(2, requires_grad=True)
    snapshot, (y, z) = recorded(lambda: ((y := x.exp()), (y * 2).sum()))
    number = z.grad_fn.next_functions[0][0]._sequence_nr()
    assert name(snapshot.forward_call(number)) == "mul"
    assert name(snapshot.forward_call(y.grad_fn._sequence_nr())) == "exp"
    assert name(snapshot.forward_call(z.grad_fn._sequence_nr())) == "sum"
    assert snapshot.forward_call(z.grad_fn._sequence_nr() + 1) is None
    assert snapshot.forward_call(y.grad_fn._sequence_nr() - 1) is None


def test_backward_passes_are_listed_with_the_first_call_in_them() -> None:
    x = torch.ones(2, requires_grad=True)

    def run() -> None:
        x.sum().backward()
        x.exp().sum().backward()

    snapshot, _ = recorded(run)
    assert names(snapshot.calls) == ["sum", "backward", "exp", "sum", "backward"]
    assert [(first, call.seq) for first, call in snapshot.earlier_passes] == [(2, 2), (5, 5)]


class Doubled(torch.autograd.Function):
    """Computes with tensors in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def test_a_backward_pass_begins_with_the_first_call_inside_it() -> None:
    x = torch.ones(2, requires_grad=True)
    snapshot, _ = recorded(lambda: Doubled.apply(x).sum().backward())
    ((first, call),) = snapshot.earlier_passes
    inside = [it.seq for it in snapshot.calls if it.seq >= first and it is not call]
    assert name(call) == "backward"
    assert names(snapshot.calls[first - 1 :]) == ["mul", "backward"]
    assert inside == [first]


# --- who made a tensor, and wrote to it ----------------------------------------------------------


def test_maker_and_newest_before_a_call() -> None:
    def run() -> tuple[Tensor, Tensor]:
        x = torch.zeros(4)  # 1
        view = x[:2]  # 2
        view.add_(1)  # 3
        x.mul_(2)  # 4
        return x, view

    snapshot, (x, view) = recorded(run)
    its, shown = ref(x), ref(view)
    seen = [name(snapshot.newest(its, before)) for before in (None, 5, 4, 3, 2, 1)]
    assert seen == ["mul_", "mul_", "add_", "zeros", "zeros", None]
    assert name(snapshot.newest(shown, 3)) == "__getitem__"
    made = [name(snapshot.maker(shown, before)) for before in (None, 4, 3, 2)]
    assert made == ["add_", "add_", "__getitem__", None]
    assert name(snapshot.maker(its, 4)) == "zeros"
    assert snapshot.whole(shown) is its
    assert snapshot.whole(its) is its
    assert names(call for call, _ in snapshot.writes_to(shown)) == ["add_", "mul_"]
    assert [snapshot.is_untouched(shown, since) for since in (3, 4, 5)] == [False, False, True]
    assert [snapshot.is_untouched(its, since) for since in (3, 4, 5)] == [False, False, True]
    assert snapshot.is_made(its)
    assert snapshot.is_made(shown)


def test_a_view_of_a_view_is_one_of_the_first() -> None:
    snapshot, (x, inner) = recorded(lambda: ((x := torch.zeros(4)), x[1:].view(3, 1)))
    assert snapshot.whole(ref(inner)) is ref(x)


def test_what_was_only_written_to_was_not_made() -> None:
    x = torch.zeros(3)
    snapshot, _ = recorded(lambda: x.add_(1))
    assert not snapshot.is_made(ref(x))
    assert name(snapshot.newest(ref(x))) == "add_"


def test_shape_and_dtype_of_a_dead_tensor() -> None:
    def run() -> Any:
        return ref(torch.zeros(2, 3).exp())

    with Recorder() as recorder:
        run()
        snapshot = recorder.snapshot()
        made = snapshot.calls[-1].outputs[0]
        assert made() is None
        assert snapshot.meta_of(made) == (torch.Size([2, 3]), torch.float32)
        assert snapshot.meta_of(snapshot.calls[0].inputs[0] if snapshot.calls[0].inputs else made)
        other = ref(torch.zeros(1))
        assert snapshot.meta_of(other) == (None, None)


@pytest.mark.parametrize(
    ("seq", "before", "hides"),
    [
        (1, None, True), (3, None, True), (4, None, False),
        (1, 3, True), (1, 2, False), (3, 4, True), (4, 9, False),
    ],
)  # fmt: skip
def test_a_change_that_nobody_recorded_hides_what_was_before(
    seq: int, before: int | None, hides: bool
) -> None:
    snapshot, x = recorded(lambda: torch.zeros(3))
    snapshot.changes[id(ref(x))] = UnseenChange(ref(x), 2, 3)
    assert snapshot.is_hidden(ref(x), seq, before) is hides
    assert snapshot.is_hidden(ref(torch.zeros(1)), seq, before) is False


def test_a_hidden_call_is_no_maker_and_its_tensor_not_untouched() -> None:
    snapshot, x = recorded(lambda: torch.zeros(3))
    assert name(snapshot.maker(ref(x))) == name(snapshot.newest(ref(x))) == "zeros"
    snapshot.changes[id(ref(x))] = UnseenChange(ref(x), 1, 2)
    assert snapshot.maker(ref(x)) is snapshot.newest(ref(x)) is None
    assert [snapshot.is_untouched(ref(x), since) for since in (2, 3)] == [False, True]


def test_a_change_of_the_whole_is_one_of_its_view() -> None:
    snapshot, (x, view) = recorded(lambda: ((x := torch.zeros(4)), x[:2]))
    snapshot.changes[id(ref(x))] = UnseenChange(ref(x), 2, 2)
    assert snapshot.newest(ref(view)) is None
    assert snapshot.is_hidden(ref(view), 2, None)


def test_what_numpy_was_given_may_have_changed_since() -> None:
    def run() -> tuple[Tensor, Tensor]:
        x, y = torch.zeros(3), torch.zeros(3)
        x.numpy()
        torch.zeros(1)
        return x, y

    snapshot, (x, y) = recorded(run)
    assert snapshot.newest(ref(x)) is None
    assert name(snapshot.newest(ref(y))) == "zeros"
    change = snapshot.changes[id(ref(x))]
    assert (change.first, change.last) == (3, 4)


def test_new_memory_through_data_hides_what_was_before_it_alone() -> None:
    def run() -> Tensor:
        x = torch.zeros(3)
        x.data = torch.ones(3)
        x.add_(1)
        return x

    snapshot, x = recorded(run)
    assert name(snapshot.newest(ref(x))) == "add_"
    assert snapshot.newest(ref(x), snapshot.calls[-1].seq) is None


def test_two_tensors_of_one_memory_that_no_call_says() -> None:
    def run(shares: bool) -> tuple[Tensor, Tensor]:
        x, y = torch.zeros(3), torch.zeros(3)
        if shares:
            y.set_(x)  # type: ignore[call-overload]
        x.exp(), y.exp()
        return x, y

    for shares in (True, False):
        snapshot, (x, _) = recorded(lambda shares=shares: run(shares))  # type: ignore[misc]
        assert (snapshot.newest(ref(x)) is None) is shares


def test_views_and_parameters_share_memory_that_torch_knows() -> None:
    weight = nn.Parameter(torch.zeros(4))

    def run() -> tuple[Tensor, Tensor]:
        x = torch.zeros(4)
        view = x[:2]
        view.exp(), weight.exp(), weight.detach().exp()
        return x, view

    snapshot, (x, view) = recorded(run)
    assert name(snapshot.newest(ref(x))) == "zeros"
    assert name(snapshot.newest(ref(view))) == "__getitem__"
    assert not snapshot._shared
