"""The flight recorder: what it notes, what it leaves alone, and what it says after a failure."""

from __future__ import annotations

import dis
import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import cudalens.recorder.mode
from cudalens import simulate
from cudalens.core.call import ApiCall
from cudalens.recorder import Recorder, _torch
from cudalens.recorder.dataloader import Batches
from cudalens.recorder.earlier_calls import EarlierCalls, UnseenChange
from cudalens.recorder.history import Snapshot
from cudalens.recorder.nonfinite import NonFiniteWatch
from cudalens.recorder.sites import entries_of, phase_of
from tests.probes import SeenFunctions, SeenOps
from tests.releases import release


@pytest.fixture(autouse=True)
def no_hook_stays() -> Iterator[None]:
    """Assert, after every test, that no hook of the recorder is left on the modules."""
    yield
    assert not torch.nn.modules.module._global_forward_pre_hooks


class Net(nn.Module):
    """An embedding, a nested linear layer and an exponential of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        hidden = self.body(hidden)
        return hidden.exp()


def throw(error: Exception) -> float:
    raise error


def line_of(text: str) -> int:
    """The number of the only line of this file that ends with the mark ``text``."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [index for index, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return number


def forward_line(recorder: Recorder, number: int) -> int | None:
    """The line of the forward call behind an autograd node."""
    call = recorder.snapshot().forward_call(number)
    return None if call is None else entries_of(call.site)[-1].lineno


def names(recorder: Recorder) -> list[str]:
    return [entry.op for entry in recorder.history()]


# --- what is noted -------------------------------------------------------------------------------


def test_history_tells_op_shapes_line_and_phase() -> None:
    x, y = torch.ones(3, 4), torch.arange(3)
    with Recorder() as recorder:
        result = x * 2  # history-product
        result.sum(dim=1).index_select(0, y)
    first, *_, last = recorder.history()
    assert (first.op, first.shapes) == ("torch.Tensor.mul", "f32[3, 4] -> f32[3, 4]")
    assert first.source.line == line_of("history-product")
    assert first.source.text == "result = x * 2"
    assert (first.phase, first.module_path) == ("forward", None)
    assert last.shapes == "f32[3], i64[3] -> f32[3]"


def test_a_dead_tensor_keeps_its_shape_and_an_unknown_one_has_none() -> None:
    """Shapes of results outlive them; an older tensor that has died since is ``?``."""
    x = torch.ones(2, 5, dtype=torch.bfloat16)
    with Recorder() as recorder:
        x = x.t() + 1
        x = x.bool()
    shapes = {entry.op: entry.shapes for entry in recorder.history()}
    assert shapes["torch.Tensor.t"] == "? -> bf16[5, 2]"
    assert shapes["torch.Tensor.add"] == "bf16[5, 2] -> bf16[5, 2]"
    assert shapes["torch.Tensor.bool"] == "bf16[5, 2] -> bool[5, 2]"


def test_a_call_without_a_tensor_among_its_arguments_or_results_is_noted() -> None:
    with Recorder() as recorder:
        torch.device("cpu")  # no call: importing the compiler makes some
        x = torch.zeros(2, dtype=torch.int64)  # made-of-nothing
        x.sum().item()  # read-out
    made, _, read = recorder.history()
    assert (made.op, made.shapes) == ("torch.zeros", "-> i64[2]")
    assert made.source.line == line_of("made-of-nothing")
    assert (read.op, read.shapes) == ("torch.Tensor.item", "i64[] ->")
    assert read.source.line == line_of("read-out")
    assert recorder.recorded_ops == 3


def test_a_write_to_a_view_notes_its_base_and_the_versions() -> None:
    base = torch.zeros(2, 3)
    with Recorder() as recorder:
        base.add_(1)
        base[1].mul_(2)
    (whole,), _, (part,) = (call.written for call in recorder.snapshot().calls)
    assert (whole.tensor(), whole.before, whole.after, whole.base) == (base, 0, 1, None)
    assert (part.before, part.after) == (1, 2)
    assert part.base is not None and part.base() is base


def test_a_write_is_noted_also_of_a_function_whose_name_does_not_tell() -> None:
    """A result given as ``out``, an option; a function that only reads wrote none."""
    rows, out = torch.ones(4, 3), torch.zeros(4, 3)
    with Recorder() as recorder:
        torch.nn.functional.relu(rows, inplace=True)
        torch.add(rows, 1, out=out)
        torch.add(rows, 1)
    written = [[item.tensor() for item in call.written] for call in recorder.snapshot().calls]
    assert [list(map(id, tensors)) for tensors in written] == [[id(rows)], [id(out)], []]


def test_module_paths_are_below_the_outermost_running_module() -> None:
    """Each op belongs to the innermost module that was running, also after a sibling has run."""
    net = Net()
    with Recorder() as recorder:
        net(torch.tensor([1, 2]))
        net.body(torch.ones(1, 4))
    paths = [(entry.op, entry.module_path) for entry in recorder.history()]
    assert ("torch.nn.functional.embedding", "embedding") in paths
    assert ("torch.nn.functional.relu", "body.1") in paths
    assert ("torch.Tensor.exp", None) in paths
    assert [path for op, path in paths if op == "torch.nn.functional.linear"] == ["body.0", "0"]


def test_phases_of_a_training_step() -> None:
    """Ops of the engine are backward's, ops of the step the optimizer's, at the user's lines."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    with Recorder() as recorder:
        loss = net(torch.tensor([1, 2])).sum()
        loss.backward()  # phase-backward
        optimizer.step()  # phase-optimizer
        loss.detach()
    phases = {(entry.phase, entry.source.line) for entry in recorder.history() if entry.source}
    assert ("backward", line_of("phase-backward")) in phases
    assert ("optimizer", line_of("phase-optimizer")) in phases
    assert recorder.history()[-1].phase == "forward"
    assert {line for phase, line in phases if phase == "optimizer"} == {line_of("phase-optimizer")}


def test_an_optimizer_that_raised_leaves_no_phase_behind() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])

    def fail() -> float:
        raise KeyError

    with Recorder() as recorder:
        with pytest.raises(KeyError):
            optimizer.step(fail)
        optimizer.zero_grad()
        weight.detach() + 1
    assert {entry.phase for entry in recorder.history()} == {"forward"}


def test_each_backward_has_its_own_line() -> None:
    """Two passes with given gradients follow each other without an op between them."""
    x = torch.ones(2, requires_grad=True)
    first, second, grad = x * 2, x * 3, torch.ones(2)
    with Recorder() as recorder:
        first.backward(grad)  # first-pass
        second.backward(grad)  # second-pass
    lines = [entry.source.line for entry in recorder.history() if entry.source]
    assert set(lines) == {line_of("first-pass"), line_of("second-pass")}
    assert lines == sorted(lines)


def test_ring_keeps_the_last_ops_and_counts_all() -> None:
    with Recorder(max_ops=3) as recorder:
        torch.ones(2).sin().cos().exp()
    assert recorder.recorded_ops == 4
    assert names(recorder) == ["torch.Tensor.sin", "torch.Tensor.cos", "torch.Tensor.exp"]
    assert [entry.seq for entry in recorder.history(2)] == [3, 4]
    assert recorder.history(0) == ()


# --- what is left alone --------------------------------------------------------------------------


def test_what_may_have_left_the_ring_is_said_only_once_one_call_has() -> None:
    told = []
    with Recorder(max_ops=2) as recorder:
        for _ in range(3):
            torch.zeros(1)
            told.append(recorder.beyond_ring("the op"))
    kept = "the op is not among the last 2 calls, which the recorder kept: max_ops=2"
    assert told == [None, None, kept]


def test_a_snapshot_is_that_of_the_last_call_and_leaves_what_it_follows_alone() -> None:
    x, earlier = torch.zeros(1), EarlierCalls()
    with Recorder() as recorder:
        recorder.follow(earlier)
        x.numpy()
        first = recorder.snapshot()
        assert recorder.snapshot() is first and first.earlier is earlier
        assert (len(first.changes), earlier.changes) == (1, {})
        x.exp()
        assert len(recorder.snapshot().calls) == 2
        recorder.let_go()
        assert (recorder.snapshot().calls, recorder.snapshot().earlier.calls) == ([], [])
        assert recorder.snapshot().earlier is not earlier


@pytest.mark.parametrize("is_changed", [False, True])
def test_what_changed_after_the_last_block_is_not_what_it_made(is_changed: bool) -> None:
    with Recorder() as first:
        x = torch.zeros(1)
        ((row,),) = DataLoader(TensorDataset(torch.ones(1)))
    earlier = first.handed_on()
    x.add_(1) if is_changed else x.exp()
    with Recorder() as recorder:
        recorder.follow(earlier)
        x.add_(1)
        snapshot = recorder.snapshot()
    assert (snapshot.newest(weakref.ref(x), 1) is None) is is_changed
    assert snapshot.batches.find(weakref.ref(row)) is not None


@pytest.mark.parametrize("shows", [False, True])
def test_a_call_that_left_the_ring_may_have_let_all_tensors_change(shows: bool) -> None:
    with Recorder() as first:
        x, y = torch.zeros(1), torch.zeros(1)
    with Recorder(max_ops=2) as recorder:
        recorder.follow(first.handed_on())
        x.data if shows else x.exp()
        torch.zeros(1), torch.zeros(1)
        snapshot = recorder.snapshot()
    assert [snapshot.is_untouched(weakref.ref(y), since) for since in (1, 2)] == [not shows, True]


def test_no_tensor_lives_longer() -> None:
    net = Net()
    with Recorder() as recorder:
        hidden = net(torch.tensor([1, 2]))
        loss = hidden.sum()
        references = [weakref.ref(hidden), weakref.ref(loss)]
        loss.backward()
        references.append(weakref.ref(net.embedding.weight.grad))
        net.zero_grad()
        del hidden, loss
        assert [item() for item in references] == [None, None, None]
    assert recorder.recorded_ops > 0


def test_a_failure_keeps_its_arguments_until_the_recorder_is_closed() -> None:
    """The exception carries the live call; neither its traceback nor anything else keeps more."""
    with Recorder() as recorder:
        left = torch.ones(2, 3)
        reference = weakref.ref(left)
        try:
            left @ left
        except RuntimeError as error:
            kept = error
        call = recorder.call_of(kept)
        assert call is not None and call.args[0] is left
        del left
    gc.collect()
    assert reference() is None
    assert call.name == "torch.Tensor.matmul"


def test_device_memory_is_what_it_is_without(sim: simulate.Simulation) -> None:
    def steps() -> list[int]:
        net = nn.Linear(8, 8).to("cuda")
        optimizer = torch.optim.SGD(net.parameters())
        held = []
        for _ in range(3):
            net(torch.ones(4, 8, device="cuda")).sum().backward()
            optimizer.step()
            held.append(torch.cuda.memory_allocated())
        return held

    gc.collect()  # what earlier tests left in cycles
    plain = steps()
    gc.collect()
    with Recorder():
        assert steps() == plain


def _checkpointed(reentrant: bool) -> torch.Tensor:
    x = torch.ones(2, 4, requires_grad=True)
    checkpoint(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()), x, use_reentrant=reentrant
    ).sum().backward()
    return x.grad


def _autocast() -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.Linear(4, 4)(torch.ones(2, 4))


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        result = torch.ones(3) + 1
        return result.add_(1).view(-1)


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        made = torch.ones(3) + 1
    return torch.tensor(made.shape)


def _user_modes() -> torch.Tensor:
    x = torch.ones(2, requires_grad=True)
    with SeenOps() as below, SeenFunctions() as above:
        (x * 2).sum().backward()
    names = [*map(str, below.ops), *above.names]
    return torch.tensor([len(below.ops), len(above.names), sum(map(len, names))])


def _subclass() -> torch.Tensor:
    seen: list[str] = []

    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    result = torch.ones(2).as_subclass(Named) + 1
    assert type(result) is Named
    return torch.tensor([len(seen)])


def _nested() -> torch.Tensor:
    with torch.no_grad():
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
        return (nested + 1).to_padded_tensor(0.0)


def _random() -> torch.Tensor:
    torch.manual_seed(3)
    return nn.functional.dropout(torch.rand(8), 0.5)


SURVIVED: dict[str, Callable[[], torch.Tensor]] = {
    "checkpoint": lambda: _checkpointed(False),
    "reentrant checkpoint": lambda: _checkpointed(True),
    "autocast": _autocast,
    "inference mode": _inference,
    "fake tensors": _fake,
    "modes of the user": _user_modes,
    "subclass of the user": _subclass,
    "nested tensors": _nested,
    "random numbers": _random,
    "sparse": lambda: torch.sparse.mm(torch.eye(3).to_sparse(), torch.ones(3, 3)),
    "grad": lambda: torch.func.grad(lambda a: (a**2).sum())(torch.ones(3)),
    "vmap of grad": lambda: torch.func.vmap(torch.func.grad(lambda a: a @ a))(torch.ones(3, 4)),
    "jacrev": lambda: torch.func.jacrev(lambda a: a**2)(torch.ones(3)),
    "foreach": lambda: torch.stack(torch._foreach_add([torch.ones(2), torch.ones(2)], 1.0)),
    "double backward": lambda: torch.autograd.functional.hessian(
        lambda a: (a**3).sum(), torch.ones(2)
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SURVIVED)
def test_results_are_those_without(name: str) -> None:
    """Recording changes no result, calls no code of the user's twice, and itself has no trouble."""
    torch.manual_seed(0)
    plain = SURVIVED[name]()
    torch.manual_seed(0)
    with Recorder() as recorder:
        recorded = SURVIVED[name]()
    torch.testing.assert_close(recorded, plain, rtol=0, atol=0)
    assert recorder.limits == []
    assert recorder.recorded_ops > 0


@pytest.mark.skipif(
    release() < (2, 8),
    reason="torch 2.6 compiles hooks of modules; a checked block is eager all the same",
)
def test_a_compiled_module_is_recorded_eagerly_without_a_warning() -> None:
    """The hook that names modules makes torch warn and run eagerly; the user sees no warning."""
    module = torch.compile(nn.Sequential(nn.ReLU(), nn.Tanh()), backend="eager")
    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught, Recorder() as recorder:
        warnings.simplefilter("always", append=True)
        module(torch.zeros(2))
    torch._dynamo.reset()
    assert [str(item.message) for item in caught if "hooks" in str(item.message)] == []
    assert warnings.filters == filters
    assert [entry.module_path for entry in recorder.history()][1:] == ["_orig_mod.0", "_orig_mod.1"]


def test_threads_of_the_user_are_not_recorded() -> None:
    """A dispatch mode belongs to its thread; the other one runs as ever."""
    made: list[torch.Tensor] = []
    with Recorder() as recorder:
        thread = threading.Thread(target=lambda: made.append(torch.ones(2).cumsum(0)))
        thread.start()
        thread.join()
    assert made[0].tolist() == [1.0, 2.0]
    assert "torch.Tensor.cumsum" not in names(recorder)


def test_own_failure_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, frame: object) -> None:
        msg = "no place"
        raise LookupError(msg)

    monkeypatch.setattr("cudalens.recorder.sites.SiteTracker.of", fail)
    with Recorder() as recorder:
        assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]
        with pytest.raises(RuntimeError, match="must match"):
            torch.ones(2) + torch.ones(3)
    assert recorder.limits == [
        "a call was not recorded: LookupError: no place",
        "the failing call was not recorded: LookupError: no place",
    ]


def test_a_failing_question_whether_the_device_is_lost_hides_nothing() -> None:
    def is_fatal(error: BaseException) -> bool:
        msg = "nobody knows"
        raise LookupError(msg)

    recorder = Recorder(is_fatal=is_fatal)
    assert failing(recorder, lambda: torch.ones(2) + torch.ones(3)).name == "torch.Tensor.add"
    assert not recorder.is_over
    assert recorder.limits == ["a lost device was not noted: LookupError: nobody knows"]


# --- leaving -------------------------------------------------------------------------------------


def test_a_mode_that_the_user_left_on_the_stack_stays_there() -> None:
    left = SeenFunctions()
    with Recorder():
        left.__enter__()
    assert torch._C._len_torch_function_stack() == 1
    assert torch._C._get_function_stack_at(0) is left
    left.__exit__(None, None, None)


def test_recorders_of_two_threads_put_torch_s_functions_back_when_both_are_closed() -> None:
    opened, leave = threading.Event(), threading.Event()
    engine, asked = torch.autograd._engine_run_backward, torch.overrides.has_torch_function

    def other() -> None:
        with Recorder():
            opened.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with Recorder():
        thread.start()
        assert opened.wait(60)
    assert torch.autograd._engine_run_backward is not engine
    leave.set()
    thread.join()
    assert torch.autograd._engine_run_backward is engine
    assert torch.overrides.has_torch_function is asked


def _interrupted_at(instant: int) -> bool:
    """Run a block and raise KeyboardInterrupt at one instant of the recorder's.

    That is where Python looks for signals: after a call, a jump back, the start of a function.

    Returns:
        whether there were that many.
    """
    root = str(Path(cudalens.recorder.mode.__file__).parent)
    count, previous = 0, dict[FrameType, str]()

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(root):
            return None
        frame.f_trace_opcodes = True
        # The first instructions of __exit__ come before anything can be caught, the return of
        # __enter__ after it.
        is_entry = frame.f_code.co_name == "__exit__" and frame.f_lasti < 8
        if event != "opcode":
            return trace
        name = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        is_return = frame.f_code.co_name == "__enter__" and name.startswith("RETURN")
        is_asked = previous.get(frame, "").startswith(("CALL", "JUMP_BACKWARD", "RESUME"))
        previous[frame] = name
        if is_asked and not is_entry and not is_return:
            count += 1
            if count == instant:
                raise KeyboardInterrupt
        return trace

    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it here alone
    sys.settrace(trace)
    try:
        with Recorder():
            layer(x).add_(1)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_an_interrupt_at_any_instruction_leaves_nothing_installed() -> None:
    instant, engine = 1, torch.autograd._engine_run_backward
    gc.freeze()  # what holds a function of ours is looked for among all objects, of other tests too
    try:
        while _interrupted_at(instant):
            assert torch._C._len_torch_function_stack() == 0, instant
            assert not torch.nn.modules.module._global_forward_pre_hooks, instant
            assert torch.autograd._engine_run_backward is engine, instant
            instant += 2
    finally:
        gc.unfreeze()
    assert instant > 100


# --- failures ------------------------------------------------------------------------------------


def failing(recorder: Recorder, run: Callable[[], object]) -> ApiCall:
    """Run inside the recorder what raises, and give the call that raised."""
    with recorder, pytest.raises(RuntimeError) as caught:
        run()
    call = recorder.call_of(caught.value)
    assert call is not None
    return call


def test_the_failing_op_is_kept_with_its_arguments() -> None:
    left, right = torch.ones(2, 3), torch.ones(2, 3)
    with Recorder() as recorder:
        with pytest.raises(RuntimeError) as caught:
            left @ right  # failing-product
        call = recorder.call_of(caught.value)
        assert call is not None and (call.args[0] is left, call.args[1] is right) == (True, True)
    assert (call.name, phase_of(call.site)) == ("torch.Tensor.matmul", "forward")
    assert entries_of(call.site)[-1].lineno == line_of("failing-product")


def test_a_check_inside_a_check_knows_the_exception_too() -> None:
    """Both met it as it passed; an exception that forbids attributes is no obstacle."""

    class ClosedError(RuntimeError):
        def __setattr__(self, name: str, value: object) -> None:
            raise AttributeError(name)

    inner, outer = Recorder(), Recorder()
    with outer, inner:
        with pytest.raises(RuntimeError) as caught:
            torch.ones(2) + torch.ones(3)
        with pytest.raises(ClosedError) as closed:
            torch.ones(2).apply_(lambda value: throw(ClosedError("of the user")))
    for recorder in (inner, outer):
        assert recorder.call_of(caught.value).name == "torch.Tensor.add"
        assert recorder.call_of(closed.value).name == "torch.Tensor.apply_"
    assert inner.limits == outer.limits == []


def test_a_failure_in_backward_leads_to_the_forward_line() -> None:
    net = Net()
    recorder = Recorder()

    def step() -> None:
        hidden = net.body(net.embedding(torch.tensor([1])))
        result = nn.functional.softplus(hidden)  # forward-of-hook
        result.grad_fn.register_prehook(lambda grads: (grads[0] @ torch.ones(7),))
        result.sum().backward()  # backward-of-hook

    record = failing(recorder, step)
    assert (phase_of(record.site), record.node.name) == ("backward", "SoftplusBackward0")
    assert line_of("backward-of-hook") in [entry.lineno for entry in entries_of(record.site)]
    assert forward_line(recorder, record.node.sequence_nr) == line_of("forward-of-hook")


def test_a_module_s_node_leads_to_its_path() -> None:
    net = Net()
    with Recorder() as recorder:
        result = net(torch.tensor([1, 2]))  # whole-net
    node = result.grad_fn.next_functions[0][0].next_functions[0][0]
    assert node.name() == "ViewBackward0" or node.name() == "AddmmBackward0"
    snapshot = recorder.snapshot()
    call = snapshot.forward_call(node._sequence_nr())
    entries = entries_of(call.site)
    assert entries[0].lineno == line_of("whole-net")
    assert entries[-1].code.co_name == "forward"
    assert snapshot.reader.module(call.site).path == "body.0"


@pytest.mark.parametrize("retain_graph", [False, True])
def test_a_graph_keeps_nothing_of_a_pass(retain_graph: bool) -> None:
    """Whether it may be run again or not; a graph that is kept is marked in each pass anew."""
    x = torch.ones(2, requires_grad=True)
    loss = x.sin().sum()
    with Recorder() as recorder:
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=retain_graph)
    assert recorder.limits == []
    reference = weakref.ref(recorder)
    del recorder
    gc.collect()
    assert reference() is None
    if retain_graph:
        loss.backward()
    assert torch.equal(x.grad, torch.ones(2).cos() * (3 if retain_graph else 2))


def test_a_custom_function_s_node_leads_to_the_line_of_apply() -> None:
    """Also when forward runs no op of its own."""

    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    with Recorder() as recorder:
        y = Same.apply(torch.ones(2, requires_grad=True))  # apply-same
        y.detach().exp()
    assert forward_line(recorder, y.grad_fn._sequence_nr()) == line_of("apply-same")


def test_an_unsure_forward_call_is_none() -> None:
    x = torch.ones(2, requires_grad=True)
    with Recorder(max_ops=2) as recorder:
        y = x.sin()
        number = y.grad_fn._sequence_nr()
        assert forward_line(recorder, number) is not None
        y.detach().argmax()
    assert forward_line(recorder, number) is None


def test_a_node_from_before_the_recording_is_nobody_s() -> None:
    """An op that needs no node sees the counter where the newest node left it, here of its name."""
    x, plain = torch.ones(2, requires_grad=True), torch.ones(2)
    before = x.exp()
    with Recorder() as recorder:
        plain.exp()
        within = x.exp()  # exp-within
        plain.exp()
    older, newer = before.grad_fn, within.grad_fn
    assert older._sequence_nr() + 1 == newer._sequence_nr()
    assert forward_line(recorder, older._sequence_nr()) is None
    assert forward_line(recorder, newer._sequence_nr()) == line_of("exp-within")


def test_watch_sees_every_result_and_may_stop_the_call() -> None:
    class Watch(NonFiniteWatch):
        def __call__(
            self, api: Any, args: Any, kwargs: Any, result: Any, *_: Any, **__: Any
        ) -> Any:
            if api.func is torch.Tensor.log and not bool(result.isfinite().all()):
                return RuntimeError("not finite")
            return None

    recorder = Recorder(watch=Watch(cast("Any", None), lambda: recorder))
    record = failing(recorder, lambda: torch.zeros(2).log())
    assert record.name == "torch.Tensor.log"
    assert names(recorder) == ["torch.zeros", "torch.Tensor.log"]


# --- the device ----------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="asserts on the simulated device")
def test_calls_in_autograd_s_thread_have_the_phase_and_the_line_of_backward(
    sim: simulate.Simulation,
) -> None:
    weight = torch.ones(3, device="cuda", requires_grad=True)
    threads = set()

    def hook(grad: torch.Tensor) -> None:
        threads.add(threading.get_ident())
        grad.sin()  # in-the-hook

    with Recorder() as recorder:
        result = (weight * 2).sum()
        weight.register_hook(hook)
        result.backward()  # device-backward
    backward = {entry.op: entry for entry in recorder.history() if entry.phase == "backward"}
    assert threads != {threading.get_ident()}
    assert backward["torch.Tensor.sin"].source.line == line_of("in-the-hook")
    assert backward["torch.Tensor.backward"].source.line == line_of("device-backward")
    assert recorder.limits == []


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda host, other: other + 1, ["cuda"]),
        (lambda host, other: other.max(1), ["cuda"]),
        (lambda host, other: other.add_(1), ["cuda"]),
        (lambda host, other: other.fill_(1).size(0), ["cuda"]),
        # The host has the answer, and has waited for it.
        (lambda host, other: torch.equal(other, other), []),
        (lambda host, other: host.to("cuda"), ["cuda"]),
        (lambda host, other: host + 1, []),
        (lambda host, other: host.max(1), []),
        (lambda host, other: host.unbind(), []),
        (lambda host, other: torch.equal(host, host), []),
    ],
)
def test_the_device_of_a_call_is_waited_for(
    sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch, call: Any, waits: list[str]
) -> None:
    host, other = torch.ones(2, 2), torch.ones(2, 2, device="cuda")
    waited: list[str] = []
    with Recorder() as recorder:
        monkeypatch.setattr(_torch, "wait_if_busy", lambda device: waited.append("before"))
        monkeypatch.setattr(
            recorder, "_wait_after", lambda tensors, result: after(recorder, tensors, result)
        )

        def after(recorder: Recorder, tensors: Any, result: Any) -> None:
            monkeypatch.setattr(_torch, "wait_if_busy", lambda device: waited.append(device.type))
            Recorder._wait_after(recorder, tensors, result)

        call(host, other)
    assert [item for item in waited if item != "before"] == waits


def test_a_change_that_was_not_recorded_hides_the_calls_before_it() -> None:
    changed, other = (weakref.ref(torch.ones(2)) for _ in range(2))
    changes = {id(changed): UnseenChange(changed, 3, 5)}
    snapshot = Snapshot([], Batches(), EarlierCalls(), changes)
    assert snapshot.is_hidden(changed, 5, before=None)
    assert not snapshot.is_hidden(changed, 6, before=None)
    assert snapshot.is_hidden(changed, 2, before=4)
    assert not snapshot.is_hidden(changed, 2, before=3)
    assert not snapshot.is_hidden(other, 2, before=None)
    assert not snapshot.is_untouched(changed, since=5)
    assert snapshot.is_untouched(changed, since=6)


def test_a_tensor_is_untouched_since_the_call_after_the_last_write() -> None:
    made = torch.zeros(2)
    with Recorder() as recorder:
        made + 1
        made.add_(1)
        made + 1
    snapshot, tensor = recorder.snapshot(), weakref.ref(made)
    write = next(call.seq for call in snapshot.calls if call.api.stem == "add_")
    assert not snapshot.is_untouched(tensor, since=write)
    assert snapshot.is_untouched(tensor, since=write + 1)
