"""The magics in a real Jupyter kernel: what a notebook, nbclient and papermill see."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import torch
from jupyter_client.manager import KernelManager, start_new_kernel

ROOT = Path(__file__).parents[2]
SETUP = """\
%load_ext cudalens
import cudalens, torch, torch.nn.functional as F
device = cudalens.ensure_cuda()
logits = torch.zeros(32, 10, device=device)
y = torch.arange(32, device=device) % 10 + 1"""
BAD = "F.cross_entropy(logits, y)"
GOOD = "round(F.cross_entropy(logits, y - 1).item(), 3)"
TIMEOUT_S = 120


@dataclass
class Reply:
    """What came back for one cell."""

    status: str
    count: int = 0
    name: str = ""
    value: str | None = None
    stream: str = ""
    shown: list[dict[str, Any]] = field(default_factory=list)
    traceback: str = ""


class Kernel:
    """A running kernel and its client."""

    def __init__(self, manager: KernelManager, client: Any) -> None:
        self.manager, self.client = manager, client

    def run(self, cell: str, *, interrupt_at: str | None = None) -> Reply:
        """Run a cell; interrupt the kernel when the cell has printed ``interrupt_at``."""
        reply = Reply("")

        def take(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                reply.stream += content["text"]
                if interrupt_at is not None and interrupt_at in reply.stream:
                    time.sleep(0.2)  # the print returns before the line behind it runs
                    self.manager.interrupt_kernel()
            elif message["msg_type"] == "execute_result":
                reply.value = content["data"]["text/plain"]
            elif message["msg_type"] == "display_data":
                reply.shown.append(content["data"])
            elif message["msg_type"] == "error":
                reply.traceback = "\n".join(content["traceback"])

        # Without the last: an older kernel throws away what comes soon after a failing cell.
        answer = self.client.execute_interactive(
            cell, timeout=TIMEOUT_S, output_hook=take, allow_stdin=False, stop_on_error=False
        )["content"]
        reply.status, reply.name = answer["status"], answer.get("ename", "")
        reply.count = answer["execution_count"]
        return reply


def environment() -> dict[str, str]:
    """The kernel imports this checkout and keeps off the network and the screen."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": os.environ.get("IPYTHONDIR", "/nonexistent-ipython"),
        "NO_COLOR": "1",
    }


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for the whole file; each test leaves it usable, which is the point."""
    env = environment() | {"IPYTHONDIR": str(tmp_path_factory.mktemp("ipython"))}
    manager, client = start_new_kernel(kernel_name="python3", env=env, startup_timeout=TIMEOUT_S)
    try:
        kernel = Kernel(manager, client)
        assert kernel.run(SETUP).status == "ok"
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(running: Kernel) -> Iterator[Kernel]:
    """The kernel, and afterwards the proof that CUDA still works in it."""
    yield running
    assert running.run(GOOD).value == "2.303"


def test_a_cell_that_runs_again_has_its_new_number(kernel: Kernel) -> None:
    """The kernel names a cell by its text, which is the same."""
    for _ in range(2):
        reply = kernel.run(f"%%cudacheck --no-widgets\nloss = {BAD}")
        assert f"In [{reply.count}] line 2" in reply.shown[0]["text/plain"]
    for _ in range(2):
        reply = kernel.run(f"%cudacheck --no-widgets loss = {BAD}")
        assert f"In [{reply.count}] line 1" in reply.shown[0]["text/plain"]


def test_a_failing_cell_is_an_error_and_the_next_one_trains(kernel: Kernel) -> None:
    """Reply status error, one bundle with text and HTML, then a training step to completion."""
    reply = kernel.run(f"%%cudacheck --no-widgets\n\nloss = {BAD}")
    assert (reply.status, reply.name) == ("error", "DeviceIndexError")
    assert len(reply.shown) == 1
    assert set(reply.shown[0]) == {"text/plain", "text/html"}
    assert "10 is outside the 10 classes" in reply.shown[0]["text/plain"]
    assert "line 3" in reply.traceback
    step = kernel.run(
        "%%cudacheck\nhead = torch.nn.Linear(4, 10).to(device)\n"
        "loss = F.cross_entropy(head(torch.ones(32, 4, device=device)), y - 1)\n"
        "loss.backward()\nbool(head.weight.grad.abs().sum() > 0)"
    )
    assert (step.status, step.value, step.shown) == ("ok", "True", [])


def test_the_report_says_cell_line_and_expression(kernel: Kernel) -> None:
    """What the user reads is what the user typed, although the kernel renames files."""
    reply = kernel.run(f"%%cudacheck -r found\nloss = {BAD}")
    fields = kernel.run("[found.source.line, found.source.text, found.expression, found.argument]")
    assert fields.value == f"[2, 'loss = {BAD}', 'y', 'target']"
    assert kernel.run("found.source.cell").value == str(reply.count)


def test_values_and_underscore(kernel: Kernel) -> None:
    """The last value is displayed and bound; a semicolon silences it."""
    assert kernel.run("%%cudacheck\n40 + 2").value == "42"
    assert kernel.run("_ + 1").value == "43"
    assert kernel.run("%%cudacheck\n40 + 3;").value is None


def test_top_level_await(kernel: Kernel) -> None:
    """In the kernel's own event loop, with the value displayed and bound."""
    cell = "%%cudacheck\nimport asyncio\nawait asyncio.sleep(0.01, 5)"
    assert kernel.run(cell).value == "5"
    assert kernel.run("_ * 2").value == "10"
    reply = kernel.run(f"%%cudacheck\nawait asyncio.sleep(0.01)\nloss = {BAD}")
    assert (reply.status, reply.name) == ("error", "DeviceIndexError")
    assert "line 3" in reply.traceback


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ("%%cudacheck --bogus\n1", "UsageError"),
        ("%%cudacheck\nx = 1 +* 2", "SyntaxError"),
        ("%%cudacheck\n{}['missing']", "KeyError"),
        ("%%cudacheck\nraise SystemExit(2)", "SystemExit"),
        ("%cudacheck 1 / 0", "ZeroDivisionError"),
    ],
)
def test_every_error_has_status_error(kernel: Kernel, cell: str, name: str) -> None:
    """A front end stops here."""
    reply = kernel.run(cell)
    assert (reply.status, reply.name) == ("error", name)
    assert reply.shown == []


@pytest.mark.parametrize("way", ["time.sleep", "await asyncio.sleep"])
@pytest.mark.parametrize("on", [False, True], ids=["magic", "always"])
def test_an_interrupt_passes(kernel: Kernel, way: str, on: bool) -> None:
    """The interrupt ends the cell, and nothing stays installed."""
    body = "import asyncio, time\nprint('started', flush=True)\n"
    # ipykernel itself notices an interrupt only when the event loop wakes up.
    body += f"for tick in range(240):\n    {way}(0.25)"
    if on:
        kernel.run("%cudacheck on")
    reply = kernel.run(body if on else f"%%cudacheck\n{body}", interrupt_at="started")
    assert reply.status == "error"
    assert reply.name in {"KeyboardInterrupt", "CancelledError"}
    assert reply.shown == []
    if on:
        kernel.run("%cudacheck off")
    left = kernel.run("from cudalens.guards.process import PROCESS\nPROCESS.is_installed")
    assert left.value == "False"


def test_debug_enters_the_users_frame(kernel: Kernel) -> None:
    """The post-mortem debugger starts where the user called the op."""
    kernel.run(f"%%cudacheck\ndef step(y):\n    here = 'mine'\n    return {BAD}\nstep(y)")
    reply = kernel.run(
        "import sys\nt = sys.last_traceback\nwhile t.tb_next: t = t.tb_next\n"
        "t.tb_frame.f_locals['here'], t.tb_lineno"
    )
    assert reply.value == "('mine', 4)"


def test_on_checks_the_following_cells(kernel: Kernel) -> None:
    """Also those that await, until off."""
    kernel.run("%cudacheck on --no-widgets")
    first = kernel.run(BAD)
    second = kernel.run(f"import asyncio\nawait asyncio.sleep(0.01)\n{BAD}")
    kernel.run("%cudacheck off")
    assert [first.name, second.name] == ["DeviceIndexError"] * 2
    assert [len(first.shown), len(second.shown)] == [1, 1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the rehearsal device is refused there")
def test_the_rehearsal_is_announced_as_one(kernel: Kernel) -> None:
    """The first line that a user without a GPU reads is honest."""
    reply = kernel.run("%cudacheck simulate")
    assert "Not a GPU" in reply.stream


def run_all(cells: list[str], folder: Path) -> nbformat.NotebookNode:
    """Execute a notebook as nbclient, papermill and Run All do."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    try:
        client.execute(env=environment() | {"IPYTHONDIR": str(folder / "ipython")})
    except nbclient.exceptions.CellExecutionError as error:
        notebook.metadata["stopped_by"] = error.ename
    return notebook


def test_run_all_stops_at_the_failing_cell(tmp_path: Path) -> None:
    """nbclient stops, the report is in the saved notebook, and it is small."""
    notebook = run_all([SETUP, f"%%cudacheck\n{BAD}", "print('never')"], tmp_path)
    assert notebook.metadata["stopped_by"] == "DeviceIndexError"
    assert [cell.execution_count for cell in notebook.cells] == [1, 2, None]
    kinds = [output.output_type for output in notebook.cells[1].outputs]
    assert kinds == ["display_data", "error"]
    assert "text/html" in notebook.cells[1].outputs[0].data
    assert len(nbformat.writes(notebook)) < 300_000


def test_run_all_goes_on_when_the_cell_caught_it(tmp_path: Path) -> None:
    """A swallowed finding is shown, and the notebook runs to its end."""
    cell = f"%%cudacheck\ntry:\n    {BAD}\nexcept IndexError:\n    print('caught')"
    notebook = run_all([SETUP, cell, "print('ran on')"], tmp_path)
    assert "stopped_by" not in notebook.metadata
    kinds = {output.output_type for output in notebook.cells[1].outputs}
    assert kinds == {"stream", "display_data"}
    assert notebook.cells[2].outputs[0].text == "ran on\n"
