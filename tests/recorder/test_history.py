"""The recorded calls as they are read: who made a tensor, who wrote to it, what is not known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from cudalens.core.call import ApiCall
from cudalens.recorder import Recorder
from cudalens.recorder.calls import Recorded
from cudalens.recorder.earlier_calls import EarlierCalls, LastVersion, UnseenChange
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


class Inner(torch.autograd.Function):
    """Runs a backward pass in its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        with torch.enable_grad():
            torch.ones(2, requires_grad=True).sum().backward()
        return grads[0] * 2


def test_a_pass_inside_a_pass_begins_with_itself() -> None:
    """Which of the calls before it are its own is not known: they may be the outer one's."""
    x = torch.ones(2, requires_grad=True)
    snapshot, _ = recorded(lambda: Inner.apply(x).sum().backward())
    (first, inner), (outer_first, outer) = snapshot.earlier_passes
    assert (name(inner), first) == ("backward", inner.seq)
    assert (name(outer), outer.seq > inner.seq) == ("backward", True)
    assert names(snapshot.calls[outer_first - 1 :])[:3] == ["ones", "sum", "backward"]


def test_of_a_line_the_calls_of_the_refused_function_are_counted() -> None:
    def turn(function: Any, *args: Tensor) -> None:
        function(*args)

    left, right = torch.ones(2, 3), torch.ones(3, 2)
    with Recorder() as recorder:
        turn(torch.mm, left, right)
        turn(torch.mm, left, right)
        turn(torch.exp, left)
        torch.mm(left, right)
        with pytest.raises(RuntimeError) as caught:
            turn(torch.mm, left, left)
        call = recorder.call_of(caught.value)
        assert call is not None
        assert recorder.snapshot().calls_of_line(call) == 2
        with pytest.raises(RuntimeError) as caught:
            torch.mm(left, left)  # another line of the same function has called it
        call = recorder.call_of(caught.value)
        assert call is not None
        assert recorder.snapshot().calls_of_line(call) == 0


def test_a_node_made_in_a_backward_pass_is_of_the_call_inside_it() -> None:
    x = torch.ones(2, requires_grad=True)
    snapshot, (made,) = recorded(
        lambda: torch.autograd.grad(Doubled.apply(x).square().sum(), x, create_graph=True)
    )
    number, outer = made.grad_fn._sequence_nr(), snapshot.calls[-1]
    assert outer.first_nr < number < outer.last_nr
    assert name(snapshot.forward_call(number)) == "mul"
    # What autograd computes itself is of the pass.
    assert name(snapshot.forward_call(number - 1)) == name(outer) == "grad"


def test_other_functions_that_the_instruction_of_a_call_has_called() -> None:
    x = torch.ones(2)

    def run() -> None:
        for function in (torch.exp, torch.sin, torch.sin, torch.cos):
            function(x)
        torch.tan(x)

    snapshot, _ = recorded(run)
    (code, lasti, _), last = snapshot.calls[3].site, snapshot.calls[4]  # type: ignore[misc]
    refused = ApiCall(func=torch.cos, code=code, lasti=lasti)
    assert snapshot.other_functions(refused) == ("torch.exp", "torch.sin")
    alone = ApiCall(func=torch.tan, code=code, lasti=last.site[1])  # type: ignore[index]
    assert snapshot.other_functions(alone) == ()


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
    assert [snapshot.has_write(its, since) for since in (4, 5)] == [True, False]
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


def test_the_shape_of_a_dead_tensor_is_the_last_that_it_had() -> None:
    snapshot, _ = recorded(lambda: [torch.zeros(2, 3).t_()].clear())
    (made,) = snapshot.calls[0].outputs
    assert (made(), snapshot.meta_of(made)[0]) == (None, (3, 2))


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


def test_a_view_that_numpy_was_given_is_memory_of_its_whole() -> None:
    def run() -> tuple[Tensor, Tensor]:
        x, y = torch.zeros(4), torch.zeros(4)
        x[:2].numpy(), y[:2].exp()
        return x, y

    snapshot, (x, y) = recorded(run)
    assert snapshot.newest(ref(x)) is None
    assert name(snapshot.newest(ref(y))) == "zeros"


@pytest.mark.parametrize("shares", [True, False])
def test_one_memory_of_two_tensors_from_before_the_recording(shares: bool) -> None:
    x, y = torch.zeros(3), torch.zeros(3)
    if shares:
        y.set_(x)  # type: ignore[call-overload]
    snapshot, _ = recorded(lambda: (x.exp(), y.exp(), x.add_(1), torch.zeros(1)))
    # A write to one of them may be followed by one to the other.
    assert name(snapshot.newest(ref(x))) == (None if shares else "add_")
    assert [snapshot.is_untouched(ref(x), since) for since in (4, 5)] == [not shares, True]


def test_a_parameter_has_the_versions_of_its_data() -> None:
    x = torch.zeros(4)
    weight = nn.Parameter(x)
    snapshot, _ = recorded(lambda: (x.add_(1), weight.exp()))
    assert name(snapshot.newest(ref(x))) == "add_"


def test_views_of_data_are_of_data_and_what_is_computed_from_it_is_not() -> None:
    def run() -> tuple[Tensor, ...]:
        x = torch.zeros(3)
        return x, x.data, x.data[1:], x.data.exp()

    snapshot, found = recorded(run)
    assert [snapshot.is_of_data(ref(item)) for item in found] == [False, True, True, False]


def test_a_view_from_before_is_one_of_its_base() -> None:
    base = torch.zeros(4)
    view = base[:2]
    snapshot, given = recorded(lambda: view.contiguous())
    assert given is view
    assert snapshot.whole(ref(view)) is snapshot.whole(ref(view[:1])) is ref(base)
    assert snapshot.whole(ref(base)) is ref(base)


def rest(base: Tensor) -> Tensor:
    return base[2:]


@pytest.mark.parametrize("written", [Tensor.clone, Tensor.detach, rest, nn.Parameter])
@pytest.mark.parametrize("held", [Tensor.detach, rest, nn.Parameter])
def test_a_write_to_what_was_given_the_memory_before_the_recording(
    held: Callable[[Tensor], Tensor], written: Callable[[Tensor], Tensor]
) -> None:
    base = torch.zeros(4)
    x, other = held(base), written(base)
    is_copy = written is Tensor.clone

    def run() -> None:
        with torch.no_grad():
            x.exp()
            other.add_(1)

    snapshot, _ = recorded(run)
    assert [snapshot.is_untouched(ref(x), since) for since in (2, 3)] == [is_copy, True]


def test_a_write_through_a_view_that_is_gone_is_one_to_the_memory() -> None:
    x = torch.zeros(4)
    held = nn.Parameter(x)
    snapshot, _ = recorded(lambda: [held.exp(), x.detach()[:2].add_(1)].clear())
    assert [snapshot.is_untouched(ref(held), since) for since in (4, 5)] == [False, True]


def test_what_is_made_of_a_view_from_before_changes_with_its_base() -> None:
    base = torch.zeros(4)
    view = base[:2]
    snapshot, (part, _) = recorded(lambda: (view[:1], base.add_(1)))
    assert snapshot.whole(ref(part)) is ref(base)
    assert name(snapshot.newest(ref(part))) == "add_"
    assert name(snapshot.newest(ref(part), 2)) == "__getitem__"


@pytest.mark.parametrize("shares", [True, False])
def test_a_write_to_the_data_that_was_sliced_before_the_recording_hides(shares: bool) -> None:
    base = torch.zeros(4)
    view = (base.data if shares else base.clone())[:2]
    snapshot, _ = recorded(lambda: (view.add_(1), base.add_(1)))
    assert name(snapshot.newest(ref(view))) == (None if shares else "add_")


# --- between two blocks --------------------------------------------------------------------------


def after_a_block(
    run: Callable[[], Any], *lasts: LastVersion, calls: Sequence[Recorded] = ()
) -> dict[int, tuple[int, int]]:
    """Return the first and last of each unseen change that a block after ``calls`` notes."""
    old = [call._replace(seq=call.seq - len(calls)) for call in calls]
    now = recorded(run)[0]
    snapshot = Snapshot(now.calls, now.batches, EarlierCalls(old, versions=[*lasts]), {})
    snapshot.note_unseen_writes()
    return {key: (it.first, it.last) for key, it in snapshot.changes.items()}


@pytest.mark.parametrize(("version", "is_seen"), [(0, False), (1, True)])
def test_another_version_than_the_last_block_left_was_written_unseen(
    version: int, is_seen: bool
) -> None:
    base = torch.zeros(4)
    gone, view = ref(torch.zeros(1)), base[:2]
    base.add_(1)
    lasts = (LastVersion(gone, gone, 0), LastVersion(ref(view), ref(base), version))
    found = after_a_block(lambda: (torch.zeros(1), torch.zeros(1)), *lasts)
    assert found == ({} if is_seen else {id(ref(view)): (0, 2), id(ref(base)): (0, 2)})


@pytest.mark.parametrize("is_seen", [False, True])
def test_writes_that_this_block_has_seen_are_known(is_seen: bool) -> None:
    x = torch.zeros(4)
    last = LastVersion(ref(x), ref(x), 0)

    def run() -> None:
        x.add_(1)
        if not is_seen:
            torch.autograd.graph.increment_version(x)

    assert after_a_block(run, last) == ({} if is_seen else {id(ref(x)): (0, 1)})


def test_a_write_of_an_earlier_block_says_nothing_of_the_version_that_it_left() -> None:
    x = torch.zeros(4)
    calls = recorded(lambda: x.add_(1))[0].calls
    x.add_(1)  # not recorded, and before that block ended
    left = LastVersion(ref(x), ref(x), x._version)
    assert after_a_block(x.exp, left, calls=calls) == {}
    x.add_(1)
    assert after_a_block(x.exp, left, calls=calls) == {id(ref(x)): (0, 1)}


def test_a_tensor_of_inference_mode_has_no_version_to_trust() -> None:
    with torch.inference_mode():
        x = torch.zeros(4)
    last = LastVersion(ref(x), ref(x), 0)
    assert after_a_block(lambda: torch.zeros(1), last) == {id(ref(x)): (0, 1)}
