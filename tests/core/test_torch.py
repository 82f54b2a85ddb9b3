"""The seam to torch's private names: what tensors are, what is unseen, what is registered."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cudalens.core import _torch

X = torch.arange(12.0).reshape(3, 4)
CPU, META = torch.device("cpu"), torch.device("meta")


class Twice(TorchDispatchMode):
    """Counts the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Counts the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """A subclass that dispatches."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError


class Named(Tensor):
    """A subclass that does not."""


@pytest.mark.parametrize(
    ("name", "is_it"), [("cuda", True), ("mps", True), ("cpu", False), ("meta", False)]
)
def test_devices_on_which_guards_act(name: str, is_it: bool) -> None:
    assert _torch.is_accelerator(torch.device(name)) is is_it
    assert _torch.is_host(torch.device(name)) is (name == "cpu")


def test_keys_of_devices() -> None:
    assert _torch.autograd_keys(["cuda", "cpu", "vulkan"]) == ["AutogradCPU", "AutogradCUDA"]
    assert _torch.autograd_keys(["privateuseone"]) == ["AutogradPrivateUse1"]
    bits = _torch.backend_bits(frozenset({"cpu"}))
    assert torch._C._dispatch_keys(X).raw_repr() & bits
    assert not torch._C._dispatch_keys(X.to("meta")).raw_repr() & bits
    assert bits & _torch.backend_bits(frozenset({"cuda"})) == 0
    assert _torch.backend_bits(frozenset({"cpu", "cuda"})) == (
        bits | _torch.backend_bits(frozenset({"cuda"}))
    )
    npu, own = (_torch.backend_bits(frozenset({name})) for name in ("npu", "privateuseone"))
    assert npu == own != 0
    assert _torch.backend_bits(frozenset({"no such device"})) == 0


def test_a_kernel_of_ours_is_called_and_goes() -> None:
    seen: list[str] = []
    op = torch.ops.aten.erfinv.default
    redispatch, below = _torch.redispatcher(op)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append("called")
        return redispatch(keyset & below, *args, **kwargs)

    libraries = _torch.register_kernels({"aten::erfinv": kernel, "aten::erfc": kernel})
    try:
        assert len(libraries) == 1
        assert torch.equal(torch.zeros(2).erfinv(), torch.zeros(2))
        assert seen == ["called"]
    finally:
        _torch.destroy(libraries)
    torch.zeros(2).erfinv()
    assert seen == ["called"]


def test_of_a_refused_registration_nothing_stays() -> None:
    def kernel(keyset: Any, *args: Any) -> Any:
        raise AssertionError

    with pytest.raises(RuntimeError):
        _torch.register_kernels({"aten::erfinv": kernel, "aten::no_such_op": kernel}, "NoSuchKey")
    with pytest.raises(TypeError) as caught:
        _torch.register_kernels({"aten::erfinv": kernel, "aten::erfc": None})  # type: ignore[dict-item]
    torch.zeros(2).erfinv()
    assert caught.tb is not None  # whose frames hold the library


def test_what_others_have_registered_stays_on_torchs_list() -> None:
    """And ours is not on it: its end would take theirs along."""
    libraries: dict[str, Any] = {}
    with torch.library._scoped_library("aten", "IMPL") as users:
        users.impl("mish", lambda x: x, "CUDA")
        before = {*torch.library._impls}
        names = ("aten::mish", "aten::erfinv", "prims::sin")
        try:
            _torch.add_kernels(libraries, dict.fromkeys(names, lambda x: x), "CUDA")
            assert before == torch.library._impls
            assert {name: it._op_impls for name, it in libraries.items()} == {
                "aten": set(), "prims": set()
            }  # fmt: skip
        finally:
            _torch.destroy(libraries.values())


def test_a_composite_op_is_decomposed_without_a_redispatch() -> None:
    decompose, below = _torch.redispatcher(torch.ops.aten.matmul.default, "AutogradCPU")
    y, seen = torch.ones(4, requires_grad=True), []

    def kernel(keyset: Any, *args: Any) -> Any:
        seen.append("called")
        return decompose(keyset & below, *args)

    libraries = _torch.register_kernels({"aten::matmul": kernel}, "AutogradCPU")
    try:
        made = X @ y
    finally:
        _torch.destroy(libraries)
    assert seen == ["called"]
    assert torch.equal(made, X @ y)
    assert made.requires_grad


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(True, torch.bool), (0, torch.int64), (2.0, torch.float64), (2j, torch.complex128)],
)
@pytest.mark.parametrize("mode", [nullcontext, Twice, Functions])
def test_a_number_becomes_a_tensor_that_no_mode_sees(value: Any, dtype: Any, mode: Any) -> None:
    with mode() as watch:
        made = _torch.as_tensor(value)
    assert watch is None or watch.seen == []
    assert (made.dtype, made.item()) == (dtype, value)


@pytest.mark.parametrize("value", ["text", None, X])
def test_anything_else_stays_as_it_is(value: Any) -> None:
    assert _torch.as_tensor(value) is value


def test_ops_by_their_full_names() -> None:
    assert _torch.op_of("aten::copy_") is torch.ops.aten.copy_.default
    assert _torch.op_of("aten::index.Tensor") is torch.ops.aten.index.Tensor
    assert {"aten::add.Tensor", "aten::copy_"} <= set(_torch.all_op_names())
    assert _torch.has_kernel("aten::matmul", "CompositeImplicitAutograd")
    assert not _torch.has_kernel("aten::mm", "CompositeImplicitAutograd")


def test_ops_by_which_the_host_learns_values() -> None:
    found = _torch.ops_that_read()
    assert {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal"} <= found
    assert found.isdisjoint({"aten::add.Tensor", "aten::item", "aten::mm"})


@pytest.mark.parametrize(
    ("tensor", "plain"),
    [
        (X, True), (nn.Parameter(X), True), (X.as_subclass(Named), True),
        (Tensor._make_subclass(Wrapped, X), False),
    ],
)  # fmt: skip
def test_tensors_with_values_of_their_own(tensor: Tensor, plain: bool) -> None:
    assert _torch.is_plain(tensor) is plain
    assert _torch.device_type(tensor) == "cpu"


@pytest.mark.parametrize(
    ("initialized", "answer", "capturing"),
    [
        (False, AssertionError(), False), (True, True, True), (True, False, False),
        (True, RuntimeError("lost"), True),
    ],
)  # fmt: skip
def test_while_a_graph_is_captured_nothing_is_read(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, answer: Any, capturing: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", _answering(answer))
    assert _torch.is_capturing() is capturing
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", _answering(RecursionError()))
    if initialized:
        with pytest.raises(RecursionError):
            _torch.is_capturing()


def _answering(answer: Any) -> Any:
    def ask() -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return ask


def test_streams_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = lambda index: 70 + index
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", numbers, raising=False)
    devices = [CPU, torch.device("cuda"), torch.device("xpu", 1)]
    devices += [torch.device("cuda", index) for index in (0, 1)]
    assert [_torch.stream_id(item) for item in devices] == [0, 0, 0, 70, 71]


def test_zeros_are_made_in_no_mode() -> None:
    with torch.inference_mode(), Twice() as ops:
        made = _torch.zeros(2, 3, torch.int32, CPU)
    assert ops.seen == []
    assert (made.shape, made.dtype, made.is_inference()) == ((2, 3), torch.int32, False)
    assert not made.any()


# --- a device that is lost -----------------------------------------------------------------------


@pytest.mark.parametrize("wait", [True, False])
def test_each_device_that_is_in_use_is_asked(monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    asked: list[tuple[str, int]] = []

    def stream(number: int) -> Any:
        return SimpleNamespace(
            synchronize=lambda: asked.append(("wait", number)),
            query=lambda: asked.append(("query", number)),
        )

    state = {"is_initialized": True, "is_current_stream_capturing": False}
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: state[name])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    used = lambda number: number == 3
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", used, raising=False)
    _torch.raise_pending_cuda_error(wait=wait)
    word = "wait" if wait else "query"
    assert asked == [(word, 1), (word, 3)]
    for name, value in (("is_current_stream_capturing", True), ("is_initialized", False)):
        state[name] = value
        _torch.raise_pending_cuda_error(wait=wait)
    assert len(asked) == 2


@pytest.mark.parametrize(("error", "usable"), [(None, True), (RuntimeError("lost"), False)])
def test_a_device_is_usable_where_nothing_is_wrong(
    monkeypatch: pytest.MonkeyPatch, error: Any, usable: bool
) -> None:
    waits: list[bool] = []

    def ask(*, wait: bool) -> None:
        waits.append(wait)
        if error is not None:
            raise error

    monkeypatch.setattr(_torch, "raise_pending_cuda_error", ask)
    assert _torch.is_device_usable() is usable
    assert waits == [True]


# --- what is unseen ------------------------------------------------------------------------------


@pytest.fixture
def sync_mode(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """torch's mode of debugging waits, 2 at first: all values that it had."""
    modes = [2]
    monkeypatch.setattr(torch._C, "_cuda_get_sync_debug_mode", lambda: modes[-1], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_set_sync_debug_mode", modes.append, raising=False)
    return modes


def test_our_own_waits_are_no_waits_of_the_users(sync_mode: list[int]) -> None:
    with _torch.own_wait():
        assert sync_mode == [2, 0]
        with _torch.own_wait(), _torch.no_torch_function():
            assert sync_mode == [2, 0]
        assert sync_mode == [2, 0]
    assert sync_mode == [2, 0, 2]
    with pytest.raises(ValueError, match="mine"), _torch.own_wait():
        raise ValueError("mine")
    assert sync_mode == [2, 0, 2, 0, 2]
    waited: list[int] = []
    _torch.wait_for(SimpleNamespace(synchronize=lambda: waited.append(sync_mode[-1])))
    assert waited == [0]
    with _torch.no_torch_function(), Functions() as functions:
        assert sync_mode[-1] == 0
        torch.ones(1)
    assert sync_mode[-1] == 2
    assert functions.seen == []


def test_without_a_mode_of_the_users_nothing_is_set(sync_mode: list[int]) -> None:
    sync_mode.append(0)
    with _torch.own_wait(), _torch.no_torch_function():
        pass
    assert sync_mode == [2, 0]


@pytest.mark.parametrize("call", [_torch.without_modes, _torch.unseen_without_wait])
def test_calls_of_ours_are_seen_by_no_mode_and_not_by_autograd(call: Any) -> None:
    x = torch.ones(2, requires_grad=True)

    def add(*numbers: int) -> Tensor:
        return x + sum(numbers)

    assert not call(add, 1, 2).requires_grad
    with Twice() as ops, Functions() as functions:
        made = call(add, 1, 2)
    assert (ops.seen, functions.seen, made.tolist()) == ([], [], [4.0, 4.0])
    assert add(1).requires_grad


def test_whether_a_mode_would_see_us() -> None:
    assert not _torch.has_modes()
    with Twice():
        assert _torch.has_modes()
    with Functions():
        assert _torch.has_modes()


def test_plain_torch_is_without_autograd_and_modes_of_functions() -> None:
    x = torch.ones(2, requires_grad=True)
    with Functions() as functions, _torch.plain_torch():
        made = x * 2
        assert not torch.is_grad_enabled()
    assert functions.seen == []
    assert not made.requires_grad


@pytest.mark.parametrize(
    ("initialized", "mode", "capturing", "can"),
    [
        (False, 2, True, True), (True, 0, False, True), (True, 2, False, False),
        (True, 0, True, False),
    ],
)  # fmt: skip
def test_whether_we_can_read_unseen(
    monkeypatch: pytest.MonkeyPatch, sync_mode: list[int], initialized: bool, mode: int,
    capturing: bool, can: bool,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "_initialized", initialized)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    sync_mode.append(mode)
    assert not _torch.can_read_unseen()  # autograd is at work
    with _torch.BelowAutograd():
        assert _torch.can_read_unseen() is can
        with Twice():
            assert not _torch.can_read_unseen()
        monkeypatch.setattr(_torch._own_waits, "count", 1)
        assert not _torch.can_read_unseen()


def test_each_op_is_shown_before_it_runs() -> None:
    seen: list[Any] = []
    x = X.clone()

    def look(func: Any, args: Any, kwargs: Any) -> None:
        seen.append((func.__name__, args[0].sum().item(), kwargs))

    with _torch.before_each_op(look):
        x.add_(1, alpha=2)
    assert seen == [("add_.Tensor", 66.0, {"alpha": 2})]
    assert x.sum() == 66 + 24


# --- tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (X, X, True), (X, X.view(3, 4), True), (X, X.clone(), False), (X, X.view(4, 3), False),
        (X[0], X[1], False), (X[:2], X[:2].detach(), True), (X, X.view(torch.int32), False),
        (X.to("meta"), X.to("meta"), False), (torch.empty(0), torch.empty(0), False),
        (X[0:2, 0:2], torch.as_strided(X, (2, 2), (2, 1)), False), (X, "text", False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), False), ("a", "b", False),
    ],
)  # fmt: skip
def test_the_same_tensor_is_the_same_elements(left: Any, right: Any, same: bool) -> None:
    assert _torch.same_tensor(left, right) is same
    assert _torch.same_tensor(right, left) is same


def test_a_tensor_without_elements_is_itself_alone() -> None:
    empty = torch.empty(0)
    assert _torch.same_tensor(empty, empty)
    assert not _torch.same_tensor(empty, empty.view(0))


@pytest.mark.parametrize(
    ("part", "whole", "row"),
    [
        (X[0], X, 0), (X[2], X, 2), (X[2].detach(), X, 2), (X[1].clone(), X, None),
        (X[0], X[1:], None), (X[2], X[:2], None), (X[0, :3], X, None), (X[0], "text", None),
        ("text", X, None), (X[1, :2], X[:, 1:3], None), (X[1, 1:3], X[:, 1:3], 1),
        (X[0, 0], X[0], 0), (X[0, 3], X[0], 3), (X[:, 0], X, None), (X[0].long(), X, None),
        (torch.empty(0), torch.empty(2, 0), None), (X[1, :0], X[:, :0], None),
        (X[0].view(torch.int32), X, None), (torch.ones(0, 3)[:, 0], torch.ones(0, 3), None),
        (X.as_strided((2, 2), (1, 2)), X.view(3, 2, 2), None), (X[0], X[0].expand(3, 4), None),
        (torch.eye(2).to_sparse()[0], torch.eye(2).to_sparse(), None),
    ],
)  # fmt: skip
def test_the_row_of_a_tensor(part: Any, whole: Any, row: int | None) -> None:
    assert _torch.row_of(part, whole) == row


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_tensor_without_strides_is_no_row() -> None:
    assert _torch.row_of(torch.eye(2).to_sparse_csr(), torch.ones(3, 2, 2)) is None


def test_views_share_a_storage() -> None:
    assert _torch.shares_storage(X, X[1:])
    assert not _torch.shares_storage(X, X.clone())
    assert not _torch.shares_storage(torch.eye(2).to_sparse(), X)
    whole = torch.ones(3)
    assert _torch.base_of(part := whole[1:]) is whole
    assert _torch.base_of(part.clone()) is None


def test_a_tensor_from_host_memory_alone() -> None:
    made = torch.ones(3, 4, requires_grad=True)[1:].mul(2)[:, 1:]
    found = _torch.meta_of(made)
    assert (found.shape, found.dtype, found.device) == ((2, 3), "float32", "cpu")
    assert (found.stride, found.storage_offset) == ((4, 1), 1)
    assert (found.requires_grad, found.is_leaf) == (True, False)
    assert found.grad_fn == _torch.grad_fn_name(made) == "SliceBackward0"
    sparse = _torch.meta_of(torch.eye(2).to_sparse())
    assert (sparse.stride, sparse.storage_offset) == (None, 0)
    of_cpp: Any = SimpleNamespace(name=lambda: "torch::autograd::CppNode")
    of_cpp = SimpleNamespace(requires_grad=True, is_leaf=False, grad_fn=of_cpp)
    assert _torch.grad_fn_name(of_cpp) == "CppNode"
    assert _torch.grad_fn_name(X) is _torch.grad_fn_name(nn.Parameter(X)) is None
    assert _torch.node_sequence_nr(made.grad_fn) == made.grad_fn._sequence_nr()
    assert _torch.node_sequence_nr(object()) is None


def test_functorch_is_on_again_after_a_repr_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._tensor_str, "_str_intern", lambda *_, **__: 1 / 0)
    held = None
    try:
        repr(X)
    except ZeroDivisionError as error:
        held = error
    frames, entry = [], held.__traceback__ if held is not None else None
    while entry is not None:
        frames.append(entry.tb_frame)
        entry = entry.tb_next
    inside = [it for it in frames if it.f_code is torch._tensor_str._str.__code__]
    assert inside
    assert inside[0].f_locals
    own = sys._getframe()
    _torch.restore_functorch(held)
    assert not inside[0].f_locals
    assert own.f_locals
    _torch.restore_functorch(None)


def test_other_threads_wait_for_themselves(sync_mode: list[int]) -> None:
    inside, go = threading.Event(), threading.Event()

    def run() -> None:
        with _torch._own_waits.block():
            inside.set()
            go.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    inside.wait(10)
    with _torch._own_waits.block():
        go.set()
        thread.join()
        assert sync_mode == [2, 0]
    assert sync_mode == [2, 0, 2]


def test_the_last_block_of_ours_that_ends_gives_the_mode_back(sync_mode: list[int]) -> None:
    for make in (_torch.own_wait, _torch.no_torch_function):
        with ExitStack() as last:
            with _torch.own_wait():
                last.enter_context(make())
            assert sync_mode[-1] == 0
        assert sync_mode[-1] == 2


def test_zeros_on_a_device_are_waited_for_by_the_current_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another thread has made them, on the default stream."""
    waits: list[Any] = []
    current = SimpleNamespace(wait_stream=waits.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"default of {device}")
    makers: list[int] = []

    def make(*size: int, dtype: Any, device: Any) -> str:
        makers.append(threading.get_ident())
        return f"zeros of {size}"

    monkeypatch.setattr(torch, "zeros", make)
    assert _torch.zeros(2, 3, torch.int32, torch.device("cuda", 1)) == "zeros of (2, 3)"  # type: ignore[comparison-overlap]
    assert waits == ["default of cuda:1"]
    assert makers != [threading.get_ident()]
    assert _torch.zeros(2, 3, torch.int32, CPU) == "zeros of (2, 3)"  # type: ignore[comparison-overlap]
    assert len(waits) == 1


def test_zeros_are_made_here_where_no_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter ends."""

    class NoThreads(ThreadPoolExecutor):
        def submit(self, *args: Any, **options: Any) -> Any:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(_torch, "ThreadPoolExecutor", NoThreads)
    with torch.inference_mode():
        made = _torch.zeros(2, 3, torch.int32, CPU)
    assert (made.shape, made.dtype, made.is_inference()) == ((2, 3), torch.int32, False)


def test_a_tensor_that_is_being_printed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed(*_: Any, **__: Any) -> str:
        running = TracebackType(None, sys._getframe(1), 0, 1)
        _torch.restore_functorch(RuntimeError().with_traceback(running))
        return "printed"

    monkeypatch.setattr(torch._tensor_str, "_str_intern", printed)
    assert repr(X) == "printed"


@pytest.mark.parametrize("error", [None, RuntimeError("no such setting"), ValueError("no")])
def test_the_tensors_of_a_lost_device_are_kept_once(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    settings: list[str] = []

    def change(setting: str) -> None:
        settings.append(setting)
        if error is not None:
            raise error

    kept: list[Any] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", change, raising=False)
    monkeypatch.setattr(_torch, "_KEPT", kept)
    monkeypatch.setattr(_torch, "live_instances", lambda kind: [kind])
    before = sys.getrefcount(kept)
    _torch.outlive_lost_device("an argument")
    assert kept == [Tensor, "an argument"]
    assert sys.getrefcount(kept) == before + 1
    _torch.outlive_lost_device("another")
    assert kept == [Tensor, "an argument"]
    assert settings == ["pinned_free_catch_all:True"] * 2
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    _torch.outlive_lost_device()


def test_the_device_that_ops_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert _torch.current_device() == torch.device("cuda", 1)
    assert _torch.is_host(CPU) and not _torch.is_host(META)
