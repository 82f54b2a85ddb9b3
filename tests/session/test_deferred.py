"""install(deferred=True), check(deferred=True), settle(): found later, told as at once."""

from __future__ import annotations

import copy
import io
import operator
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import cudalens
from cudalens import DeviceIndexError, simulate
from cudalens.guards import host_waits
from cudalens.guards.pending import PENDING, Check, Pending
from cudalens.session import environment
from cudalens.session.process import status
from cudalens.simulate.asserts import NOT_SIMULATED
from tests.amount import AMOUNT
from tests.blocks import cuda
from tests.hostcells import Outcome, run_cell
from tests.processes import python

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

from cases import CASES, Case, namespace

pytestmark = pytest.mark.usefixtures("sim")


@pytest.fixture
def installed() -> Iterator[None]:
    cudalens.install(deferred=True)
    try:
        yield
    finally:
        PENDING.clear()
        cudalens.uninstall()


def looked_up(*values: int) -> Tensor:
    return F.embedding(cuda(*values), torch.ones(3, 2, device="cuda", requires_grad=True))


@pytest.mark.parametrize(
    ("behind", "when"), [(0, ""), (1, ", 1 guarded call ago"), (2, ", 2 guarded calls ago")]
)
def test_the_report_says_how_many_guarded_calls_ago_it_was(behind: int, when: str) -> None:
    with pytest.raises(DeviceIndexError) as caught, cudalens.check(deferred=True):
        looked_up(2, 7)
        for _ in range(behind):
            looked_up(1)
    assert f"Its values went from 2 to 7{when}. To see which" in caught.value.report.explanation


# --- the same report ------------------------------------------------------------------------------


TRIGGERS = [case for case in CASES[::6] if case.record not in NOT_SIMULATED]
"""A few of those that ``tests/guards/test_same_when_deferred.py`` gives the guards alone."""


@pytest.mark.parametrize("case", TRIGGERS, ids=lambda case: case.record)
def test_the_report_is_that_of_the_right_call(case: Case) -> None:
    """Op, argument, bounds, line and words of an assertion as at once; of the values the ends."""

    def run(**options: Any) -> Outcome:
        with torch.device("cuda"):
            return run_cell(f"{case.code}\nbehind = 1", namespace(), **options)

    soon, late = run(), run(deferred=True)
    assert type(late.error) is type(soon.error)
    assert told(late) == told(soon)
    assert soon.shown.context_usable and late.shown.context_usable
    if not late.shown.deferred:
        return  # its guard waits
    values = late.shown.offenders
    assert values is not None and values.first == ()
    assert f"Its values went from {values.min} to {values.max}" in late.shown.explanation
    assert "run it without deferred guards" in late.shown.explanation


TOLD = ("kind", "certainty", "argument", "bounds", "phase", "device_text")


def told(outcome: Outcome) -> dict[str, Any]:
    """Return what both kinds of guards say alike; each ran in a cell of its own."""
    report = outcome.shown
    return {
        **{name: getattr(report, name) for name in TOLD},
        "op": (report.op.name, report.op.overload),
        "source": replace(report.source, cell=None),
    }


# --- training -------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))  # type: ignore[no-any-return]


def wrapped(forward: Callable[[Model, Tensor], Tensor]) -> Callable[..., None]:
    """Return the step of a model whose forward pass is run in a way of its own."""

    def step(model: Model, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor) -> None:
        loss = F.cross_entropy(forward(model, ids), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


train = wrapped(lambda model, ids: model(ids))


@pytest.mark.no_cover
@pytest.mark.usefixtures("installed")
def test_training_makes_no_synchronising_call_of_ours(sim: simulate.Simulation) -> None:
    """Under the mode in which one is an error; the same steps with guards at once wait often."""
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 10, (64,)).cuda()
    labels = torch.randint(0, 3, (64,)).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(AMOUNT.deferred_steps):
            train(model, optimizer, ids, labels)
        cudalens.settle()
        with pytest.raises(RuntimeError, match="synchronizing"):
            labels.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_guarded_training_gives_the_same_parameters() -> None:
    def trained(**options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        ids, labels = torch.randint(0, 10, (64,)).cuda(), torch.randint(0, 3, (64,)).cuda()
        labels[5] = -100
        with cudalens.guard(**options):
            for _ in range(5):
                train(model, optimizer, ids, labels)
        return [item.detach().cpu() for item in model.parameters()]

    for one, other in zip(trained(deferred=True), trained(), strict=True):
        assert torch.equal(one, other)


def train_scaled(model: Model, optimizer: torch.optim.Optimizer, *batch: Tensor) -> None:
    """One scaler for all steps of an optimizer, as in a training script."""
    scaler: torch.amp.GradScaler = SCALERS.setdefault(optimizer, torch.amp.GradScaler("cuda"))
    ids, labels = batch
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(ids), labels)
    optimizer.zero_grad()
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
    scaler.step(optimizer)
    scaler.update()


SCALERS: WeakKeyDictionary[torch.optim.Optimizer, torch.amp.GradScaler] = WeakKeyDictionary()


def checkpointed(use_reentrant: bool) -> Callable[..., None]:
    def forward(model: Model, ids: Tensor) -> Tensor:
        # Without an input that wants a gradient, the reentrant kind has no backward pass.
        bias = torch.zeros(1, device="cuda", requires_grad=True)
        return checkpoint(lambda b: model(ids) + b, bias, use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    return wrapped(forward)


def replicas(model: Model, ids: Tensor) -> Tensor:
    """Run the halves of a batch in threads, as DataParallel does on several devices."""
    halves = [(half,) for half in ids.chunk(2)]
    return torch.cat(nn.parallel.parallel_apply([model, model], halves, devices=[0, 0]))


def side_stream(model: Model, ids: Tensor) -> Tensor:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        scores = model(ids)
    torch.cuda.current_stream().wait_stream(stream)
    return scores


STEPS: dict[str, Callable[..., None]] = {
    "plain": train,
    "autocast and GradScaler": train_scaled,
    "reentrant checkpoint": checkpointed(use_reentrant=True),
    "checkpoint": checkpointed(use_reentrant=False),
    "DataParallel": wrapped(lambda model, ids: nn.DataParallel(model)(ids)),
    "its threads": wrapped(replicas),
    "a stream": wrapped(side_stream),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("way", STEPS)
def test_no_parameter_sees_a_bad_row(way: str) -> None:
    """The finding is raised before the optimizer writes, and training goes on as without it."""
    step, rows, classes = STEPS[way], cuda(1, 2), cuda(0, 2)
    torch.manual_seed(0)
    model = Model().cuda()
    twin = copy.deepcopy(model)
    pair = [(item, torch.optim.SGD(item.parameters(), lr=0.1)) for item in (model, twin)]
    for trained in pair:
        step(*trained, rows, classes)
    for ids, labels, says in (
        (cuda(1, 10), classes, "contained 10, which is outside the 10 rows"),
        (rows, cuda(0, 3), "contained 3, which is outside the 3 classes"),
    ):
        with pytest.raises(DeviceIndexError, match=says) as caught:
            step(*pair[0], ids, labels)
        report = caught.value.report
        assert report is not None and report.deferred
        assert report.source is not None and report.source.file == __file__
        # The backward op has read the same values: that is no second finding.
        assert report.phase == "forward" and not hasattr(caught.value, "__notes__")
        assert all(map(torch.equal, model.parameters(), twin.parameters()))
    for trained in pair:
        step(*trained, rows, classes)
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    assert all(item.isfinite().all() for item in model.parameters())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1.0),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=1.0, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=2),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure_is_waited_for_before_the_weights_are_written(name: str, by_name: bool) -> None:
    table = nn.Embedding(4, 2).cuda()
    optimizer = OPTIMIZERS[name](table.parameters())

    def step(row: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = table(cuda(row)).sum()
            loss.backward()
            return loss

        optimizer.step(closure=closure) if by_name else optimizer.step(closure)

    before = table.weight.detach().clone()
    with pytest.raises(DeviceIndexError, match="contained 4"):
        step(4)
    assert torch.equal(table.weight, before)
    step(3)
    assert not torch.equal(table.weight, before)


CLEARED: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "not": lambda optimizer: None,
    "set to none": lambda optimizer: optimizer.zero_grad(),
    "set to zero": lambda optimizer: optimizer.zero_grad(set_to_none=False),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("where", ["step", "item"])
@pytest.mark.parametrize("how", CLEARED)
def test_gradients_of_a_caught_finding(how: str, where: str, is_first: bool) -> None:
    """They are still there: the next step raises once more, unless they were cleared."""
    table = nn.Embedding(4, 1).cuda()
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)

    def step(*rows: int) -> None:
        loss = table(cuda(*rows)).sum()
        loss.backward()
        if where == "item":
            loss.item()
        optimizer.step()
        optimizer.zero_grad()

    if not is_first:
        step(0, 1)
    before = table.weight.detach().cpu()
    with pytest.raises(DeviceIndexError, match="contained 4, which is outside"):
        step(4, 1)
    CLEARED[how](optimizer)
    told = found_by(partial(step, 2, 2))
    moved = (table.weight.detach().cpu() - before).flatten().tolist()
    if how == "not":
        assert "the gradients of that step are still there. Call zero_grad()" in told[0]
        assert moved == [0, 0, 0, 0]
        assert len(found_by(partial(step, 2))) == 1
        optimizer.zero_grad(set_to_none=is_first)
        step(2)
    else:
        assert told == []
        assert moved == pytest.approx([0, 0, -2, 0])


@pytest.mark.usefixtures("installed")
def test_running_statistics_that_a_bad_call_reached_are_named() -> None:
    model = nn.Sequential(nn.Embedding(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)).cuda()
    model[2].eval()
    with pytest.raises(DeviceIndexError) as caught:
        model(cuda(3, 1)).sum().item()
    report = caught.value.report
    assert report is not None
    names = re.findall(r"\S+\.running_\w+", report.explanation)
    assert names == ["model.1.running_mean", "model.1.running_var"]
    with pytest.raises(DeviceIndexError) as caught:
        model[1](torch.ones(2, 4, device="cuda"))
        looked_up(0, 3).sum().item()
    assert caught.value.report is not None and "running_" not in caught.value.report.explanation


@pytest.mark.usefixtures("installed")
def test_a_wait_is_for_the_last_guarded_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued behind it is not waited for: nothing is put into the stream by then."""
    done: list[tuple[str, Any, Any]] = []
    awaited_streams: list[Any] = []
    users, record = torch.cuda.current_stream(), torch.cuda.Event.record
    wait_event = torch.cuda.Stream.wait_event

    def recorded(event: torch.cuda.Event, stream: Any) -> None:
        done.append(("record", event, stream))
        record(event, stream)

    def awaited(stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        done.append(("wait", event, stream))
        wait_event(stream, event)

    monkeypatch.setattr(torch.cuda.Event, "record", recorded)
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", awaited)
    monkeypatch.setattr(
        torch.cuda.Stream, "synchronize", lambda stream: awaited_streams.append(stream)
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: users)
    for _ in range(2):
        looked_up(0, 2)
    at_calls, done = done[:], []
    cudalens.settle()
    (_, filled, stream), _ = at_calls
    assert [(name, item) for name, item, _ in at_calls] == [("record", filled)] * 2
    ((name, event, copying),) = done
    assert (name, event) == ("wait", filled)
    assert stream is users is not copying
    assert awaited_streams == [copying]


COPY = Tensor.copy_
LEAVING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float64),
    "numpy": lambda x: x.numpy(force=True),
    "print": repr,
    "copy_": lambda x: torch.empty(2, 2).copy_(x),
    "copy_, as a function": lambda x: Tensor.copy_(torch.empty(2, 2), x),
    "copy_ of the base": lambda x: torch._C.TensorBase.copy_(torch.empty(2, 2), x),
    "copy_ taken before": lambda x: COPY(torch.empty(2, 2), x),
    "multinomial": lambda x: torch.multinomial(x.detach(), 1),
    "repeat_interleave": lambda x: torch.repeat_interleave(x.detach().flatten().long()),
    "copy_ of a subclass": lambda x: nn.Buffer(torch.empty(2, 2)).copy_(x),
    "setitem": lambda x: operator.setitem(torch.empty(2, 2), 0, x[0]),
    "setitem by an index": lambda x: operator.setitem(torch.empty(2), torch.tensor([0]), x[0, 0]),
    "index_put_": lambda x: torch.empty(2).index_put_((torch.tensor([0]),), x[0, 0]),
    "masked_fill_": lambda x: torch.empty(2).masked_fill_(torch.tensor([True, False]), x[0, 0]),
    "several copies": lambda x: torch._foreach_copy_([torch.empty(2, 2)], [x.detach()]),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "nonzero, out": lambda x: torch.nonzero(x, out=cuda().long()),
    "unique rows": lambda x: torch.unique_consecutive(x.detach(), dim=0),
    "allclose": lambda x: torch.allclose(x, x),
    "mask": lambda x: x.masked_select(x > 0),
    "save": lambda x: torch.save(x, io.BytesIO()),
    "settle": lambda x: cudalens.settle(),
    "next check": lambda x: cudalens.check().open(),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("way", LEAVING)
def test_nothing_poisoned_leaves(way: str) -> None:
    result = looked_up(0, 3)
    assert PENDING.count == 1
    with pytest.raises(DeviceIndexError, match="contained 3, which is outside the 3 rows"):
        LEAVING[way](result)
    assert not PENDING


STAYING: dict[str, Callable[[Tensor], Any]] = {
    "to": lambda x: x.to("cpu", non_blocking=True),
    "copy_": lambda x: torch.empty(2, 2).copy_(x, True),
    "copy_, by name": lambda x: torch.empty(2, 2).copy_(x, non_blocking=True),
    "several copies": lambda x: torch._foreach_copy_([torch.empty(2, 2)], [x], non_blocking=True),
    "copy_ on the device": lambda x: torch.empty_like(x).copy_(x),
    "setitem on the device": lambda x: operator.setitem(torch.empty_like(x), 0, x[0]),
    "setitem of a number": lambda x: operator.setitem(torch.empty(2), 0, True),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("way", STAYING)
def test_a_copy_that_does_not_wait_is_not_waited_for(way: str) -> None:
    STAYING[way](looked_up(0, 3).detach())
    with pytest.raises(DeviceIndexError):
        cudalens.settle()


class Functions(TorchFunctionMode):
    """What somebody sees of the functions that a program calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("row", [2, 3])
def test_the_compiler_traces_none_of_ours(backend: str, row: int) -> None:
    """Under a module that is compiled in place, whose calls the compiler watches."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 2)).cuda()
    model.compile(backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower")  # on Python 3.13.0
        found = found_by(lambda: compiled_step(model, row))
    assert [line[:20] for line in found] == ["indices contained 3, "[:20]] * (row == 3)
    rules = sys.modules["torch._dynamo.trace_rules"]
    assert not [path for path in rules.SKIP_DIRS if "cudalens" in path]


def compiled_step(model: nn.Module, row: int) -> None:
    with cudalens.check(deferred=True):
        model(cuda(1, row)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()


@pytest.mark.usefixtures("installed")
def test_a_copy_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the device that is lost; a good copy beside it is nothing."""
    told: list[tuple[BaseException, Any]] = []
    with cudalens.check(deferred=True) as session:
        monkeypatch.setattr(session, "call_failed", lambda *what: told.append(what))
        looked_up(0, 1)
        host = torch.zeros(2).copy_(torch.ones(2, device="cuda"))
        assert (host.tolist(), told) == ([1, 1], [])
        target, source = torch.zeros(2), torch.ones(3, device="cuda")
        with pytest.raises(RuntimeError) as caught:
            target.copy_(source)
    ((error, (args, kwargs)),) = told
    assert (error, kwargs) == (caught.value, {})
    assert args[0] is target and args[1] is source  # what a lost device must not free


def test_a_traced_function_that_asks_for_a_number() -> None:
    """The tracer gives ops numbers in place of tensors."""

    def run() -> list[float]:
        traced = torch.jit.trace(lambda x: x * int(x.sum()), torch.ones(3))  # type: ignore[no-untyped-call]
        return traced(torch.ones(3)).tolist()  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = run()
        with cudalens.guard(deferred=True):
            assert run() == plain == [3, 3, 3]


@pytest.mark.parametrize("deferred", [False, True])
def test_function_modes_see_what_they_see_without_guards(deferred: bool) -> None:
    """The very functions of torch, and none of ours."""
    host, source = torch.zeros(2, 2), torch.ones(2, 2, device="cuda")
    with cudalens.guard(deferred=True) if deferred else nullcontext(), Functions() as mode:
        host.copy_(source)
        host[0] = source[0]
        F.embedding(cuda(1), source)
    names = ["copy_", "__getitem__", "__setitem__"]
    assert mode.seen[:3] == [getattr(torch._C.TensorBase, name) for name in names]
    assert mode.seen[-1] is F.embedding or torch.embedding in mode.seen


@pytest.mark.usefixtures("installed")
def test_no_other_rank_sees_a_bad_row(tmp_path: Path) -> None:
    """What other processes would be sent is looked at first."""
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1
    )
    try:
        for send in (dist.all_reduce, lambda x: dist.broadcast(x, 0)):
            with pytest.raises(DeviceIndexError):
                send(looked_up(0, 3).detach())
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()


# --- threads, processes, interrupts ---------------------------------------------------------------


def found_by(function: Callable[[], object]) -> list[str]:
    """Return the text of the finding that is raised, if any, and of those found with it."""
    try:
        function()
    except DeviceIndexError as error:
        return [str(error), *getattr(error, "__notes__", [])]
    return []


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda y: F.one_hot(y, 4), "y contained 4, which is outside num_classes = 4"),
        (lambda y: F.one_hot(y.view(2, 1), num_classes=4), "y.view(2, 1) contained 4, which is"),
        (lambda y: y.new_zeros(2, 4).scatter_(1, y.view(2, 1), 1), "index contained 4, which is"),
        (lambda y: encode(4, y), "index contained 4, which is outside dimension 1"),
    ],
    ids=["a variable", "an expression", "scatter_ itself", "another name"],
)
def test_one_hot_is_reported_with_its_own_arguments(
    call: Callable[[Tensor], Tensor], says: str
) -> None:
    """The index of its ``scatter_`` is no tensor that anyone typed."""
    assert found_by(lambda: call(cuda(0, 4)).sum().item())[0].startswith(says)


def encode(count: int, y: Tensor) -> Tensor:
    """Call ``F.one_hot`` by a name that no function of torch has."""
    of_torch = F.one_hot
    return of_torch(y, count)


@pytest.mark.usefixtures("installed")
def test_eight_threads() -> None:
    """Each finding is raised once, in the thread whose call it was."""
    together = threading.Barrier(8)

    def work(number: int) -> list[str]:
        together.wait()
        rows = [100 + number if step == 50 else 2 for step in range(100)]
        found = [line for row in rows for line in found_by(partial(looked_up, 0, row))]
        return found + found_by(lambda: looked_up(0, 1).sum().item())

    with ThreadPoolExecutor(8) as pool:
        for number, told in enumerate(pool.map(work, range(8))):
            assert len(told) == 1
            assert told[0].startswith(f"indices contained {100 + number}, which is outside")
    assert not PENDING


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("is_alive", [True, False])
def test_the_finding_of_another_thread(is_alive: bool) -> None:
    """It is not raised in an innocent call while its own thread is at work; settle() raises it."""
    done, end = threading.Event(), threading.Event()

    def work() -> None:
        looked_up(0, 3)
        done.set()
        end.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    done.wait(30)
    if not is_alive:
        end.set()
        thread.join()
    assert bool(found_by(lambda: looked_up(0, 1).sum().item())) is not is_alive
    assert bool(found_by(cudalens.settle)) is is_alive
    end.set()
    thread.join()


def stepped_elsewhere(step: Callable[[], object]) -> list[str]:
    """Call ``step`` in a thread of its own; return what it raised."""
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.extend(found_by(step)))
    thread.start()
    thread.join()
    return told


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("second", [None, "of the stepping thread", "of this thread", "unused"])
def test_an_optimizer_that_steps_in_another_thread_writes_nothing_bad(
    second: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless this thread may have another optimizer of its own, whose step raises the finding."""
    net = nn.Embedding(3, 2).to("cuda")
    before = net.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    other = second and torch.optim.SGD([nn.Parameter(torch.ones(1, device="cuda"))], lr=1.0)
    own = [item for item in (optimizer, other) if item]
    # Optimizers that other tests have left alive are none of this program.
    monkeypatch.setattr(host_waits, "live_instances", lambda cls: own)
    if second == "of the stepping thread":
        assert stepped_elsewhere(other.step) == []
    elif second == "of this thread":
        other.step()
    net(cuda(3)).sum().backward()
    told = stepped_elsewhere(optimizer.step)
    if second in (None, "of the stepping thread"):
        assert told and told[0].startswith("indices contained 3, which is outside the 3 rows")
        assert torch.equal(net.weight, before)
        assert found_by(cudalens.settle) == []
    else:
        assert told == []
        assert found_by(other.step)


@pytest.mark.usefixtures("installed")
def test_an_optimizer_with_a_thread_of_its_own_is_left_alone() -> None:
    """Two trainings in two threads: each raises its own findings."""
    nets = [nn.Embedding(3, 2).to("cuda") for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1.0) for net in nets]
    done = [threading.Event() for _ in range(2)]
    told: list[str] = []

    def bad() -> None:
        optimizers[1].step()
        nets[1](cuda(3)).sum().backward()
        done[0].set()
        done[1].wait(30)
        told.extend(found_by(optimizers[1].step))

    thread = threading.Thread(target=bad)
    thread.start()
    done[0].wait(30)
    nets[0](cuda(2)).sum().backward()
    assert found_by(optimizers[0].step) == []
    done[1].set()
    thread.join()
    assert len(told) == 1


# --- blocks that end by an exception --------------------------------------------------------------


class Frozen(Exception):  # noqa: N818  not an error of ours
    """An exception that cannot be written to."""

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError("frozen")


def end(error: BaseException) -> None:
    raise error


ENDS: dict[str, tuple[Callable[[], BaseException], bool]] = {
    "an error": (ZeroDivisionError, False),
    "an interrupt": (KeyboardInterrupt, False),
    "a frozen error": (Frozen, False),
    "exit 3": (partial(SystemExit, 3), False),
    "exit": (SystemExit, True),
    "exit 0": (partial(SystemExit, 0), True),
    "a closed generator": (GeneratorExit, True),
    "a skipped test": (partial(pytest.skip.Exception, "not here"), True),
}


@pytest.mark.parametrize("row", [2, 3])
@pytest.mark.parametrize("block", [cudalens.guard, cudalens.check])
@pytest.mark.parametrize("name", ENDS)
def test_a_finding_is_not_lost_where_its_block_ends(
    name: str, block: Callable[..., AbstractContextManager[Any]], row: int
) -> None:
    """What ends a block well gives way to it; any other exception goes on, with a note."""
    make, is_well = ENDS[name]
    error = make()  # a new one: the report of a finding stays with the exception it ended
    before = cudalens.last_report()
    with pytest.raises(BaseException) as caught, block(deferred=True):
        looked_up(0, row)
        end(error)
    notes = getattr(caught.value, "__notes__", [])
    if row == 2:
        assert (caught.value, notes, cudalens.last_report()) == (error, [], before)
    elif is_well:
        assert isinstance(caught.value, DeviceIndexError)
    else:
        assert caught.value is error
        assert ["indices contained 3, which" in note for note in notes] == [True]
    assert (cudalens.last_report() is before) is (row == 2)


def test_a_generator_that_is_closed() -> None:
    def steps() -> Iterator[int]:
        with cudalens.guard(deferred=True):
            looked_up(0, 3)
            yield 1

    running = steps()
    next(running)
    with pytest.raises(DeviceIndexError):
        running.close()  # type: ignore[attr-defined]


def test_several_findings_of_a_block_are_counted() -> None:
    with (
        pytest.raises(DeviceIndexError, match="contained 3"),
        cudalens.check(deferred=True) as session,
    ):
        looked_up(0, 3)
        looked_up(4, 0)
    assert len(session.findings) == 2
    assert "1 more in this block" in session.report.explanation
    assert "contained 4, which" in session.report.explanation


def test_an_error_of_the_users_stays_his() -> None:
    """The finding is told all the same, and raised by nobody."""
    with pytest.raises(ZeroDivisionError), cudalens.check(deferred=True) as session:
        looked_up(0, 3)
        _ = 1 / 0
    assert session.report is not None and session.report.headline_schema.endswith("rows of weight")


@pytest.mark.usefixtures("installed")
def test_at_once_while_anybody_wants_it() -> None:
    with cudalens.check(), pytest.raises(DeviceIndexError) as caught:
        looked_up(0, 3)
    assert caught.value.report is not None and not caught.value.report.deferred
    looked_up(0, 3)
    with pytest.raises(DeviceIndexError):
        cudalens.uninstall()


SCRIPT = """
import torch, cudalens
cudalens.simulate()
x = torch.zeros(3, device="cuda")[torch.tensor([0, 9], device="cuda")]
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [pytest.param("", 1, marks=pytest.mark.thorough), ("import sys; sys.exit(0)", 1)],
)
def test_a_finding_in_the_very_last_op_of_a_program(tmp_path: Path, end: str, status: int) -> None:
    """Also behind sys.exit(0); a good program ends as it wants."""
    script = tmp_path / "last.py"
    script.write_text(SCRIPT + end)
    found = python(str(script), CUDALENS="deferred")
    assert "DeviceIndexError: index contained 9, which is outside" in found.stderr
    assert "last.py:4" in found.stderr
    for bad, code in ((9, status), (2, 0)):
        script.write_text(SCRIPT.replace("9", str(bad)) + end)
        checked = python("-m", "cudalens", "--deferred", str(script))
        assert checked.returncode == code
        assert ("index contained 9, which is outside" in checked.stderr) is bool(code)


def test_an_unknown_mode_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    environment.begin("loud")
    said = "cudalens: CUDALENS='loud' is none of on, fast, nan, nan=strict, deferred\n"
    assert capsys.readouterr() == ("", said)


@pytest.mark.usefixtures("installed")
def test_what_is_pending_at_a_fork_stays_the_parents() -> None:
    looked_up(0, 3)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with warnings.catch_warnings(record=True, action="always") as seen:
            cudalens.settle()
        os.write(write, str([str(item.message) for item in seen]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000).decode() == (
        "['pending when this process was forked, so for its parent to settle: 1 check']"
    )
    with pytest.raises(DeviceIndexError):
        cudalens.settle()


@pytest.mark.usefixtures("installed")
def test_an_interrupt_while_waiting_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up(0, 3)
    wait = torch.cuda.Stream.synchronize

    def interrupted(stream: Any) -> None:
        monkeypatch.setattr(torch.cuda.Stream, "synchronize", wait)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(torch.cuda.Stream, "synchronize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cudalens.settle()
    with pytest.raises(DeviceIndexError):
        cudalens.settle()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cuda", torch.bfloat16)]
)
def test_a_mode_of_the_call_and_of_the_wait(
    mode: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Slots made in one mode are used in the others."""
    for inside in (True, False, True):
        with mode():
            looked_up(0, 2)
        assert PENDING.count == 1
        with mode() if inside else nullcontext():
            cudalens.settle()
        with mode():
            looked_up(0, 3)
        with pytest.raises(DeviceIndexError), mode() if inside else nullcontext():
            looked_up(0, 1).sum().item()


@pytest.mark.usefixtures("installed")
def test_slots_lie_on_the_device_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page for each device and stream; the findings of all of them are reported in order."""
    queue, seen = Pending(), []
    aminmax = torch.aminmax

    def noted(index: Tensor, *, out: Any) -> Any:
        seen.append([item.device.type for item in (index, *out)])
        return aminmax(index, out=out)

    monkeypatch.setattr(torch, "aminmax", noted)
    for device, values in (("cuda", [9]), ("cpu", [0, 7]), ("cuda", [3]), ("cpu", [8])):
        check = Check(0, 5, lambda *ends: ValueError(*ends))
        queue.note(torch.tensor(values, device=device), check)
    assert seen == [["cuda"] * 3, ["cpu"] * 3] * 2
    assert queue.count == 4
    assert [error.args for error in queue.settle()] == [(9, 9), (0, 7), (8, 8)]


@pytest.mark.usefixtures("installed")
def test_settling_inside_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up(0, 2)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="after a replay"):
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        cudalens.settle()
    cudalens.settle()


@pytest.mark.usefixtures("installed")
def test_the_status_counts_what_is_pending() -> None:
    for pending in ("1 call pending", "2 calls pending"):
        looked_up(0, 2)
        assert f"installed, deferred: {pending}" in status()


def test_without_guards_there_is_nothing_to_settle() -> None:
    cudalens.settle()
    cudalens.uninstall()


def test_the_first_guarded_call_of_a_device_does_not_wait() -> None:
    """Also where room is made for checks in graphs; see :func:`torch.cuda.set_sync_debug_mode`."""
    ids, table = cuda(1, 2), torch.ones(5, 2, device="cuda")
    PENDING.forked()  # nothing is prepared for the device
    with warnings.catch_warnings(), cudalens.check(deferred=True) as session:
        warnings.simplefilter("error")
        torch.cuda.set_sync_debug_mode("error")
        try:
            F.embedding(ids, table)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert session.internal_errors == []
    assert session.internal_errors == []
