"""The magics in a real Jupyter kernel: what a notebook, nbclient and papermill see."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from jupyter_client.manager import KernelManager, start_new_kernel

from cudalens.notebook import display
from tests.processes import environment
from tests.releases import needs_rehearsal

pytestmark = needs_rehearsal

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

    def run(
        self, cell: str, *, interrupt_at: str | None = None, is_attended: bool = False
    ) -> Reply:
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
            cell, timeout=TIMEOUT_S, output_hook=take, allow_stdin=is_attended, stop_on_error=False
        )["content"]
        reply.status, reply.name = answer["status"], answer.get("ename", "")
        reply.count = answer["execution_count"]
        return reply


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for the whole file; each test leaves it usable, which is the point."""
    env = environment(IPYTHONDIR=str(tmp_path_factory.mktemp("ipython")), NO_COLOR="1")
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
    body, line = f"%%cudacheck --no-widgets\nloss = {BAD}", f"%cudacheck --no-widgets loss = {BAD}"
    for cell, number in ((body, 2), (body, 2), (line, 1), (line, 1)):
        reply = kernel.run(cell)
        assert f"In [{reply.count}] line {number}" in reply.shown[0]["text/plain"]


def test_a_failing_cell_is_an_error_and_the_next_one_trains(kernel: Kernel) -> None:
    reply = kernel.run(f"%%cudacheck --no-widgets\n\nloss = {BAD}")
    assert (reply.status, reply.name) == ("error", "DeviceIndexError")
    assert len(reply.shown) == 1
    assert set(reply.shown[0]) == {"text/plain", "text/html"}
    assert "10 is outside the 10 classes" in reply.shown[0]["text/plain"]
    assert re.search(r"line 3\b|-> 3\b", reply.traceback)
    step = kernel.run(
        "%%cudacheck\nhead = torch.nn.Linear(4, 10).to(device)\n"
        "loss = F.cross_entropy(head(torch.ones(32, 4, device=device)), y - 1)\n"
        "loss.backward()\nbool(head.weight.grad.abs().sum() > 0)"
    )
    assert (step.status, step.value, step.shown) == ("ok", "True", [])


def test_top_level_await(kernel: Kernel) -> None:
    cell = "%%cudacheck\nimport asyncio\nawait asyncio.sleep(0.01, 5)"
    assert kernel.run(cell).value == "5"
    assert kernel.run("_ * 2").value == "10"
    reply = kernel.run(f"%%cudacheck\nawait asyncio.sleep(0.01)\nloss = {BAD}")
    assert (reply.status, reply.name) == ("error", "DeviceIndexError")
    assert re.search(r"line 3\b|-> 3\b", reply.traceback)


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
    reply = kernel.run(cell)
    assert (reply.status, reply.name) == ("error", name)
    assert reply.shown == []


@pytest.mark.parametrize("way", ["time.sleep", "await asyncio.sleep"])
@pytest.mark.parametrize("on", [False, True], ids=["magic", "always"])
def test_an_interrupt_passes(kernel: Kernel, way: str, on: bool) -> None:
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


@pytest.mark.parametrize("is_attended", [True, False])
def test_a_kernel_knows_whether_somebody_looks(kernel: Kernel, is_attended: bool) -> None:
    """JupyterLab, Notebook and VS Code may ask for input; nbclient and all built on it may not."""
    static, *live = kernel.run(f"%%cudacheck\n{BAD}", is_attended=is_attended).shown
    assert {"text/html", "text/plain"} <= set(static)
    assert display.WIDGET_TYPE not in static  # a page without the kernel shows all of it
    has_view = is_attended and display._has_new_widgets()
    assert [display.WIDGET_TYPE in bundle for bundle in live] == [True] * has_view


def run_all(cells: list[str], folder: Path) -> nbformat.NotebookNode:
    """Execute a notebook as nbclient, papermill and Run All do."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    client = nbclient.NotebookClient(
        notebook, timeout=TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": folder}}
    )
    try:
        client.execute(env=environment(IPYTHONDIR=str(folder / "ipython"), NO_COLOR="1"))
    except nbclient.exceptions.CellExecutionError as error:
        notebook.metadata["stopped_by"] = error.ename
    return notebook


def test_run_all_stops_at_the_failing_cell(tmp_path: Path) -> None:
    notebook = run_all([SETUP, f"%%cudacheck\n{BAD}", "print('never')"], tmp_path)
    assert notebook.metadata["stopped_by"] == "DeviceIndexError"
    assert [cell.execution_count for cell in notebook.cells] == [1, 2, None]
    kinds = [output.output_type for output in notebook.cells[1].outputs]
    assert kinds == ["display_data", "error"]
    assert set(notebook.cells[1].outputs[0].data) == {"text/html", "text/plain"}
    assert "widgets" not in notebook.metadata
    assert len(nbformat.writes(notebook)) < 300_000


PRINTED = "Loss.cu:245: f: block: [0,0,0], thread: [0,0,0] Assertion `t >= 0` failed."


def test_the_assertions_that_were_printed_are_kept(kernel: Kernel) -> None:
    """What is printed still reaches the notebook; unloaded, nothing is listened to."""
    kernel.run("%reload_ext cudalens\nimport sys\nfrom cudalens.notebook import magics")
    kernel.run("printed = magics.front_end_of(get_ipython())._printed")
    said = f"for each in range(3): print({PRINTED!r}, file=sys.stderr)"
    assert kernel.run(said).stream.count(PRINTED) == 3
    kernel.run("print('Assertion of mine', file=sys.stderr)")
    kept = f"{PRINTED} (3 times, 1 block, 1 thread)"
    assert kernel.run("printed.text()").value == repr(kept)
    # As a driver's text comes: in pieces.
    kernel.run(f"for part in ({PRINTED[:40]!r}, {PRINTED[40:]!r}, '\\n'): sys.stderr.write(part)")
    assert "(4 times" in kernel.run("printed.text()").value
    kernel.run("before = printed._asserts\n%unload_ext cudalens")
    assert kernel.run("vars(sys.stderr).get('write') == printed._listen").value == "False"
    assert kernel.run(said).stream.count(PRINTED) == 3
    assert kernel.run("sys.stderr.flush()\nprinted._asserts == before").value == "True"
    kernel.run("%load_ext cudalens")


def test_a_traceback_shows_the_failing_line_of_each_frame_alone(kernel: Kernel) -> None:
    """The report beside it has the lines around."""
    kernel.run("def step(logits, y):\n    rate = 1\n    return F.cross_entropy(logits, y)")
    told = re.sub(
        r"\x1b\[[0-9;]*m", "", kernel.run("%%cudacheck\na = 1\nstep(logits, y)").traceback
    )
    arrows = [line for line in told.splitlines() if line.startswith("--") and "> " in line]
    assert arrows == ["----> 3 step(logits, y)", "----> 3     return F.cross_entropy(logits, y)"]
    assert "a = 1" not in told
    assert "rate = 1" not in told
