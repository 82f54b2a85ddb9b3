"""After a kernel has failed: the report says so, the op is named, later cells get one line."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cudalens
from cudalens.core.report import Report
from cudalens.session.explain import explain
from tests import standin


def report_of(run: Callable[[], object], **options: Any) -> Report:
    """Run a block under a check in which the device is lost; return its report."""
    session = cudalens.check(**options)
    with pytest.raises(torch.AcceleratorError) as caught, session:
        run()
    report = session.report
    assert report is not None
    assert report.context_usable is False
    assert report.limits == ()
    assert caught.value.error_code in {710, 700, 719}
    return report


def values() -> Tensor:
    return torch.randn(8, 3, device="cuda", requires_grad=True)


CODES = {
    standin.ASSERT: ("device_assert", "i < n"),
    standin.ILLEGAL_ADDRESS: ("cuda_error", "a kernel read or wrote memory"),
    standin.LAUNCH_FAILURE: ("cuda_error", "unspecified launch failure"),
}


@pytest.mark.parametrize("blocking", ["0", "1"])
@pytest.mark.parametrize("is_narrow", [False, True], ids=["all calls raise", "some do not"])
@pytest.mark.parametrize("code", CODES)
def test_the_op_whose_kernel_failed_is_named(
    code: int, is_narrow: bool, blocking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The op before it and the op behind it are not blamed."""
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    if is_narrow:
        standin.narrow()
    x = values()
    standin.fault("sigmoid", code=code, text=standin.LINE if code == standin.ASSERT else "")
    report = report_of(lambda: torch.sigmoid(x + 1) * 2)
    kind, words = CODES[code]
    assert (report.kind, report.op.name) == (kind, "torch.sigmoid")
    assert words in report.headline_schema
    assert report.source is not None
    assert "torch.sigmoid(x + 1)" in report.source.text


def in_backward(code: int) -> None:
    x = values()
    standin.fault("sigmoid_backward", code=code)
    x.sigmoid().sum().backward()


def in_a_hook(code: int) -> None:
    x = values()
    y = x * 2
    y.register_hook(lambda grad: grad.sigmoid())
    standin.fault("sigmoid", code=code)
    y.sum().backward()


def on_another_stream(code: int) -> None:
    x = values()
    standin.fault("sigmoid", code=code)
    with torch.cuda.stream(torch.cuda.Stream()):
        x.sigmoid()


def in_a_checkpoint(code: int) -> None:
    from torch.utils.checkpoint import checkpoint

    y = checkpoint(lambda x: x.sigmoid().sin(), values(), use_reentrant=False)
    standin.fault("sigmoid", code=code)
    y.sum().backward()


PLACES = {
    in_backward: ("backward", "SigmoidBackward0"),
    in_a_hook: ("backward", "torch.Tensor.sigmoid"),
    in_a_checkpoint: ("backward", "torch.Tensor.sigmoid"),
    on_another_stream: ("forward", "torch.Tensor.sigmoid"),
}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_it_is_named_wherever_it_ran(place: Callable[[int], None], code: int) -> None:
    report = report_of(lambda: place(code))
    kind = CODES[code][0]
    assert (report.kind, report.phase, report.op.name) == (kind, *PLACES[place])


@pytest.mark.parametrize("code", CODES)
def test_without_waits_no_op_is_blamed(code: int) -> None:
    x = values()
    standin.fault("sigmoid", code=code)
    report = report_of(lambda: x.sigmoid().sum().item(), sync=False)
    assert (report.kind, report.certainty) == (CODES[code][0], "unknown")


def test_its_arguments_are_described_without_the_device() -> None:
    """After the end nothing can be copied from the device; their shapes are known."""
    table, rows = torch.arange(8.0, device="cuda"), torch.tensor([0, 9, 3], device="cuda")
    library = torch.library.Library("lane", "DEF")
    library.define("pick(Tensor table, Tensor rows) -> Tensor")
    library.impl("pick", lambda table, rows: table[:3].sigmoid(), "CUDA")
    standin.fault("sigmoid")
    report = report_of(lambda: torch.ops.lane.pick(table, rows))
    assert report.op.name == "lane::pick"
    assert {item.argument: item.shape for item in report.tensors} == {"table": (8,), "rows": (3,)}


def test_what_the_kernel_printed_is_in_the_report() -> None:
    x = values()
    standin.fault("sigmoid", text=standin.LINE)
    assert "Ext.cu:12" in report_of(x.sigmoid).to_json()


REMINDER = "the CUDA context was lost to a device-side assert in"


def test_a_later_cell_gets_one_line(notebook: Any) -> None:
    notebook.run('x = torch.ones(3, device="cuda"); standin.fault("sigmoid")')
    notebook.run("%%cudacheck\ny = torch.sigmoid(x)")
    assert "device-side assert" in str(notebook.error)
    assert "restart the kernel" in str(notebook.shown) + notebook.out
    for cell in ("x + 1", "torch.cuda.synchronize()", "x.cpu()"):
        notebook.run(f"%%cudacheck\n{cell}")
        assert [note for note in notebook.error.__notes__ if REMINDER in note]
    notebook.run("%%cudacheck\n1 + 1")
    assert notebook.error is None


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("is_narrow", [False, True])
def test_a_cell_without_a_check_is_explained_afterwards(
    notebook: Any, is_narrow: bool, code: int
) -> None:
    if is_narrow:
        standin.narrow()
    notebook.run(f'x = torch.ones(3, device="cuda"); standin.fault("sigmoid", code={code})')
    notebook.run("y = torch.sigmoid(x)\nz = (x * 2).tolist()")
    assert isinstance(notebook.error, torch.AcceleratorError)
    notebook.run("%cudacheck explain")
    report = cudalens.last_report()
    assert report is not None
    assert (report.kind, report.context_usable) == (CODES[code][0], False)
    assert report.certainty == "unknown"


@pytest.mark.parametrize("more", ["", "x[i]"])
def test_the_one_call_that_fits_what_was_printed_is_named(notebook: Any, more: str) -> None:
    """A terminal keeps no text of CUDA's, a kernel does."""
    printed = (
        "IndexKernel.cu:111: operator(): block: [0,0,0], thread: [0,0,0] Assertion `-sizes[i] <= "
        'index && index < sizes[i] && "index out of bounds"` failed.'
    )
    notebook.run('x = torch.ones(3, 2, device="cuda"); i = torch.zeros(2, device="cuda").long()')
    notebook.run(f'standin.fault("sigmoid")\ny = x[i]; {more}\ny.sigmoid().tolist()')
    report = explain(notebook.names, notebook.error, printed)
    assert report is not None and (report.kind, report.certainty) == ("device_assert", "likely")
    first = "x[i], x[i] = y or " if more else "x[i] in line 2 is the only call of this cell that "
    assert report.headline_schema.startswith(first)


def test_an_error_of_another_process_is_not_this_device_s() -> None:
    """The words alone do not end a context that goes on."""
    torch.ones(3, device="cuda")
    session = cudalens.check()
    with pytest.raises(RuntimeError), session:
        raise RuntimeError("CUDA error: device-side assert triggered")
    assert session.report is None or session.report.context_usable is not False
    assert F.relu(torch.ones(3, device="cuda")).sum().item() == 3


def test_out_of_memory_leaves_the_device_usable() -> None:
    session = cudalens.check()
    with pytest.raises(torch.OutOfMemoryError), session:
        torch.empty(2**45, device="cuda")
    report = session.report
    assert report is not None
    assert (report.kind, report.context_usable) == ("cuda_error", True)
    assert torch.ones(3, device="cuda").sum().item() == 3


@pytest.mark.parametrize("failures", [1, 2])
def test_memory_that_is_refused_once_is_asked_for_again(failures: int) -> None:
    """The caching allocator frees its cache and tries again: nothing is reported then."""
    torch.ones(3, device="cuda")
    for at in range(1, failures + 1):
        standin.fault("call:cudaMalloc", at, standin.OUT_OF_MEMORY)
    session = cudalens.check()
    try:
        with session:
            torch.empty(2**28, device="cuda")
    except torch.OutOfMemoryError:
        assert failures == 2
    assert (session.report is None) == (failures == 1)


def test_a_device_that_is_not_there_is_named() -> None:
    session = cudalens.check()
    with pytest.raises(torch.AcceleratorError), session:
        torch.ones(1, device="cuda:99")
    assert session.report is not None
    assert (session.report.kind, session.report.context_usable) == ("cuda_error", True)


def test_the_launch_s_own_line_raises_where_launches_block() -> None:
    """CUDA_LAUNCH_BLOCKING=1: the error leaves out the advice to set it."""
    x = values()
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    standin.fault("sigmoid")
    with pytest.raises(torch.AcceleratorError) as caught:
        x.sigmoid()
    assert "CUDA_LAUNCH_BLOCKING" not in str(caught.value)


@pytest.mark.parametrize("code", [999, 46])
def test_an_answer_that_is_an_error_is_no_sign_of_life(code: int) -> None:
    """A device that raises an unknown error when asked is not called fine; a refusal is over."""
    x = torch.randn(8, 3, device="cuda")
    session = cudalens.check()
    with pytest.raises(torch.AcceleratorError), session:
        if code == 999:
            standin.fault("sigmoid", 1, code, "")
            torch.sigmoid(x)
        else:
            standin.fault("call:cudaMalloc", 1, code)
            torch.empty(2**28, device="cuda")
    assert session.report is not None
    assert session.report.context_usable is (None if code == 999 else True)


REFUSED_LAUNCHES = {98: "built for other GPUs", 218: "update the driver", 222: "update the driver"}
REFUSED_LAUNCHES |= {46: "nvidia-smi", 802: "nvidia-fabricmanager"}


@pytest.mark.parametrize("code", REFUSED_LAUNCHES)
def test_a_refusal_that_is_not_about_arguments_says_what_to_do(code: int) -> None:
    x = torch.randn(8, 3, device="cuda")
    session = cudalens.check()
    standin.fault("call:cudaLaunchKernel", 1, code)
    with pytest.raises(torch.AcceleratorError), session:
        torch.sigmoid(x)
    assert session.report is not None
    assert REFUSED_LAUNCHES[code] in session.report.explanation
    assert "arguments" not in session.report.explanation


def read(y: Tensor) -> None:
    y.tolist()


def synchronize(y: Tensor) -> None:
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("wait", "line"), [(read, "y.tolist()"), (synchronize, "torch.cuda.synchronize()")]
)
def test_after_deferred_guards_no_op_and_no_option_is_named_that_was_not_there(
    wait: Callable[[Tensor], None], line: str
) -> None:
    x = values()
    with pytest.raises(torch.AcceleratorError), cudalens.guard(deferred=True):
        session = cudalens.check(fast=True)
        with session:
            standin.fault("sigmoid")
            wait(torch.sigmoid(x))
    report = session.report
    assert report is not None and report.source is not None
    assert (report.op.name, report.certainty) == (None, "unknown")
    assert report.source.text == line
    assert "torch._C" not in report.headline
    assert "under a full check" in report.explanation
    assert "--no-sync" not in report.explanation


def test_the_line_of_another_thread_is_named() -> None:
    """Its ops are not waited for: where its exception was raised is all that is known."""
    x = values().detach()

    def work() -> float:
        return torch.sigmoid(x).sum().item()

    standin.fault("sigmoid")
    with ThreadPoolExecutor() as pool:
        report = report_of(lambda: pool.submit(work).result())
    assert (report.op.name, report.certainty) == (None, "unknown")
    assert report.source is not None
    assert report.source.text == "return torch.sigmoid(x).sum().item()"
    assert "another thread did" in report.explanation


def test_the_call_that_a_capture_forbids_is_named() -> None:
    """Leaving the block raises once more, at the line of the ``with``."""
    x = values().detach()
    graph, session = torch.cuda.CUDAGraph(), cudalens.check()
    with pytest.raises(torch.AcceleratorError), session:
        with torch.cuda.graph(graph):
            y = torch.sigmoid(x)
            y.sum().item()
    report = session.report
    assert report is not None and report.source is not None
    assert "item()" in report.source.text
    assert "while a CUDA graph is captured" in report.headline


@pytest.mark.parametrize("at", [2, 9])
def test_the_replay_whose_kernel_failed_is_named(at: int) -> None:
    """Its launches are no calls of torch's ops; the launch before it and the read after are not."""
    x = values().detach()
    torch.sigmoid(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.sigmoid(x) * 2
    session = cudalens.check()
    standin.fault("sigmoid", at)
    if at == 9:  # never
        with session:
            for _ in range(3):
                graph.replay()
            y.sum().item()
        assert session.report is None
        return
    with pytest.raises(torch.AcceleratorError), session:
        for _ in range(3):
            graph.replay()
        y.sum().item()
    report = session.report
    assert report is not None and report.source is not None
    assert report.source.text == "graph.replay()"
    assert report.op.name == "torch.cuda.CUDAGraph.replay"
    assert report.headline_schema.endswith("by the end of torch.cuda.CUDAGraph.replay")
    assert report.limits == ()


def test_the_traceback_ends_where_the_user_called() -> None:
    """What we ask a stream is no call of the user's."""
    x = values().detach()
    standin.fault("sigmoid")
    with pytest.raises(torch.AcceleratorError) as caught, cudalens.check():
        torch.sigmoid(x)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.line) == (__file__, "torch.sigmoid(x)")


@pytest.mark.parametrize("blocking", ["0", "1"])
def test_where_launches_may_block_explain_says_what_that_means(
    notebook: Any, blocking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", blocking)
    notebook.run('x = torch.ones(3, device="cuda"); standin.fault("sigmoid")')
    notebook.run("y = torch.sigmoid(x).tolist()\n%cudacheck explain")
    notebook.run("%cudacheck explain")
    report = cudalens.last_report()
    assert report is not None
    assert ("CUDA reports asserts late" in report.explanation) == (blocking == "0")
    assert ("CUDA_LAUNCH_BLOCKING=1 is set" in report.explanation) == (blocking == "1")
