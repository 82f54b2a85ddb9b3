"""Whole processes on a lost device: loaders, workers, scripts, pytest, the interpreter's exit."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import cudalens
from tests import standin
from tests.processes import python
from tests.releases import release

LOOP = """
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from tests import standin
data = TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
model = torch.nn.Linear(4, 3).cuda()
loader = DataLoader(data, batch_size=8, num_workers=1, pin_memory=True)
standin.fault("sigmoid", 2)
for i, (a, b) in enumerate(loader):
    a, b = a.to("cuda", non_blocking=True), b.to("cuda", non_blocking=True)
    loss = F.cross_entropy(torch.sigmoid(model(a)), b).item()
"""
"""The usual loop: as it is left, the pinned batch is freed on the lost device."""
ABORTS = """
import torch
from tests import standin
def step():
    x = torch.ones(3, device="cuda")
    x.record_stream(torch.cuda.Stream())
    torch.sigmoid(x)
standin.fault("sigmoid")
try:
    step()
except RuntimeError:
    pass
"""
"""Torch ends the process where it frees what another stream has used, whatever its settings are."""
IN_BACKWARD = """
import torch
from tests import standin
def step():
    x = torch.ones(3, device="cuda", requires_grad=True)
    kept = x * 1
    kept.record_stream(torch.cuda.Stream())
    torch.sigmoid(kept).sum().backward()
    kept.sum().item()
standin.fault("sigmoid_backward")
try:
    step()
except RuntimeError:
    pass
"""
"""The same, where the kernel fails in autograd's own thread."""
KERNEL = """
import gc, sys
from tests.shells import new_shell
class Publisher:
    def publish(self, data, metadata=None, transient=None, update=False, **more):
        print("SHOWN", update, data["text/plain"].split("\\n")[0], flush=True)
with new_shell() as shell:
    shell.display_pub.publish = Publisher().publish
    shell.run_line_magic("load_ext", "cudalens")
    line, program = sys.argv[1:]
    shell.run_cell(line + "\\n" + program)
    for cell in ("1/0", "no_such_name", "%reset -f", "1 + 1"):
        shell.run_cell(cell)
    gc.collect()
    print("lives", flush=True)
"""
"""A cell, later cells, and the end of all names of the cell."""

HEADLINE = "CUDA asserted `i < n` by the end of torch.sigmoid"
SHOWN = HEADLINE.replace("`", "")
"""The same as text, where code has no marks."""


def test_a_pinned_batch_does_not_take_the_report_along(notebook: Any) -> None:
    """Torch aborts where such a batch is freed on a lost device, unless it is told to go on."""
    notebook.run(f"%%cudacheck\n{LOOP}")
    assert isinstance(notebook.error, torch.AcceleratorError)
    report = cudalens.last_report()
    assert report is not None
    assert (report.kind, report.op.name) == ("device_assert", "torch.sigmoid")
    notebook.run("%%cudacheck\nmodel(a)")
    assert "the CUDA context was lost" in str(notebook.error.__notes__)


ABORTS_ON_PINNED = release() < (2, 15)
"""Later releases warn."""
HAS_SETTING = release() > (2, 11)


@pytest.mark.parametrize("value", ["False", "True"])
def test_the_setting_for_a_loop_without_a_check(value: str) -> None:
    """``docs/limits.md`` says which releases have it; torch reads it as the process starts."""
    setting = f"pinned_free_catch_all:{value}"
    done = python("-c", LOOP, fresh=True, PYTORCH_CUDA_ALLOC_CONF=setting)
    if HAS_SETTING:
        aborts = value == "False" and ABORTS_ON_PINNED
        assert done.returncode == (-6 if aborts else 1), done.stderr
    else:
        assert done.returncode == 1
        assert "pinned_free_catch_all" in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize(
    ("program", "setting"),
    [(LOOP, ""), (ABORTS, ""), (IN_BACKWARD, ""), (ABORTS, "backend:cudaMallocAsync")],
    ids=["pinned", "another stream", "in backward", "cudaMallocAsync"],
)
@pytest.mark.parametrize("line", ["%%cudacheck", "%%cudacheck --deferred", "%%cudacheck --no-sync"])
def test_the_kernel_lives_on(line: str, program: str, setting: str) -> None:
    """What torch cannot free on a lost device is kept, also when later cells end its names."""
    more = {"PYTORCH_CUDA_ALLOC_CONF": setting} if setting else {}
    if line != "%%cudacheck":  # nothing waits for the op itself
        program = program.replace("torch.sigmoid(x)\n", "torch.sigmoid(x).tolist()\n")
    done = python("-c", KERNEL, line, program, fresh=bool(setting), **more)
    assert done.returncode == 0, done.stderr
    assert "SHOWN False" in done.stdout
    assert done.stdout.splitlines()[-1] == "lives"


@pytest.mark.parametrize(("program", "status"), [(LOOP, 1), (ABORTS, 0)])
def test_a_script_s_report_is_printed_and_written(program: str, status: int, folder: Path) -> None:
    """However the process ends: the report comes first, and comes once."""
    (folder / "train.py").write_text(program)
    words = ("-m", "cudalens", "--json", "report.json", "--html", "report.html", "train.py")
    done = python(*words, cwd=folder)
    assert done.returncode == status, done.stderr
    shown = done.stderr.replace("`", "")
    assert shown.count(SHOWN) == 1 + ("Traceback" in done.stderr)  # the exception's note
    assert "train.py" in done.stderr
    report = json.loads((folder / "report.json").read_text())
    assert (report["context_usable"], report["op"]["name"]) == (False, "torch.sigmoid")
    assert "sigmoid" in report["source"]["text"]
    assert "sigmoid" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("options", "program", "status", "says"),
    [
        ((), IN_BACKWARD, 0, "by the end of SigmoidBackward0 in the backward pass"),
        (("--no-sync",), IN_BACKWARD, 0, "while torch.Tensor.item was called"),
        # No recorder: told by a guard's own wait, and with deferred guards where the host reads.
        (("--fast",), LOOP, 1, "no recorded op can be blamed"),
        (("--deferred",), LOOP, 1, "no recorded op can be blamed"),
        (("--deferred",), IN_BACKWARD, 0, "no recorded op can be blamed"),
        # docs/limits.md: here no guarded call sees it.
        (("--fast",), IN_BACKWARD, -6, None),
    ],
)
def test_the_report_comes_first_in_backward_and_without_a_recorder(
    options: tuple[str, ...], program: str, status: int, says: str | None, folder: Path
) -> None:
    (folder / "train.py").write_text(program)
    done = python("-m", "cudalens", *options, "--json", "r.json", "train.py", cwd=folder)
    assert done.returncode == status, done.stderr
    assert (folder / "r.json").exists() == (says is not None)
    if says is not None:
        assert says in done.stderr
        assert says in json.loads((folder / "r.json").read_text())["headline_schema"]


RANKS = """
import torch.multiprocessing as mp
import ranks
import cudalens
session = cudalens.check(json="report.json")
try:
    with session:
        mp.spawn(ranks.work, nprocs=2)
except Exception as error:
    print(type(error).__name__)
print([(item.process, item.report is not None) for item in session.report.ranks])
"""
RANK = f"""
import os
def work(rank):
    if rank == 0:
        return
{indent(ABORTS, "    ")}
    os.abort()
"""


def test_the_report_of_a_rank_that_aborts_is_kept(folder: Path) -> None:
    (folder / "ranks.py").write_text(RANK)
    (folder / "main.py").write_text(f"if __name__ == '__main__':\n{indent(RANKS, '    ')}")
    done = python("main.py", cwd=folder, fresh=True)
    assert done.stdout.splitlines() == ["ProcessExitedException", "[(0, False), (1, True)]"], (
        done.stderr
    )
    report = json.loads((folder / "report.json").read_text())
    assert HEADLINE in report["headline_schema"]
    assert "ranks.py" in report["source"]["file"]


def test_a_cell_s_report_is_shown_once_where_the_loss_is_found() -> None:
    done = python("-c", KERNEL, "%%cudacheck", ABORTS)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SHOWN False")]
    assert SHOWN in line


def test_a_block_s_files_are_written_where_the_loss_is_found(folder: Path) -> None:
    x = torch.ones(3, device="cuda")
    standin.fault("sigmoid")
    with pytest.raises(torch.AcceleratorError):
        with cudalens.check(json="report.json") as session:
            try:
                torch.sigmoid(x)
            finally:
                early = json.loads((folder / "report.json").read_text())
    assert session.report is not None
    final = session.report.to_dict()
    for key in ("kind", "headline", "op", "source", "certainty", "context_usable", "tensors"):
        assert early[key] == final[key], key


def test_a_loader_with_workers_and_pinned_memory_is_left_alone() -> None:
    data = TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
    layer = torch.nn.Linear(4, 3).cuda()
    with cudalens.check() as session:
        for inputs, labels in DataLoader(data, batch_size=8, num_workers=2, pin_memory=True):
            moved = [item.to("cuda", non_blocking=True) for item in (inputs, labels)]
            torch.nn.functional.cross_entropy(layer(moved[0]), moved[1]).backward()
    assert session.report is None
    assert session.internal_errors == []


@pytest.mark.parametrize("mode", ["on", "fast", "deferred"])
def test_the_interpreter_ends_as_without_cudalens(mode: str) -> None:
    program = """
import torch
from tests import standin
import cudalens
event, x = torch.cuda.Event(), torch.ones(3, device="cuda")
event.record()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2
standin.fault("sigmoid")
torch.sigmoid(x)
torch.cuda.synchronize()
"""
    plain, checked = python("-c", program), python("-c", program, CUDALENS=mode)
    assert (plain.returncode, checked.returncode) == (1, 1)
    assert "Exception ignored" not in checked.stderr
    assert ("CUDA asserted i < n" in checked.stderr.replace("`", "")) == (mode == "on")


SUITE = """
import torch
from tests import standin

def test_good():
    assert torch.ones(3, device="cuda").sum().item() == 3

def test_bad_index():
    table, rows = torch.ones(3, 2, device="cuda"), torch.tensor([3], device="cuda")
    torch.nn.functional.embedding(rows, table)

def test_good_again():
    test_good()

def test_lost():
    x = torch.ones(3, device="cuda")
    standin.fault("sigmoid")
    torch.sigmoid(x)

def test_after():
    test_good()
"""


def test_pytest_reports_and_goes_on(folder: Path) -> None:
    (folder / "test_device.py").write_text(SUITE)
    options = ("-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist")
    done = python("-m", "pytest", "--cudacheck", *options, "-rA", "test_device.py", cwd=folder)
    outcome = {
        line.split("::")[1].split()[0]: line.split()[0]
        for line in done.stdout.splitlines()
        if line.startswith(("PASSED", "FAILED"))
    }
    assert outcome == {
        "test_good": "PASSED",
        "test_bad_index": "FAILED",
        "test_good_again": "PASSED",
        "test_lost": "FAILED",
        "test_after": "FAILED",
    }
    assert "3 is outside the 3 rows" in done.stdout
    assert SHOWN in done.stdout.replace("`", "")
    assert "A test lost CUDA for this process" in done.stdout


def test_a_fork_of_a_process_with_a_device_says_so_itself() -> None:
    """A child may not use CUDA: its error is torch's, and no lost device."""
    program = """
import os, sys, torch, cudalens
torch.ones(3, device="cuda")
child = os.fork()
if child == 0:
    session = cudalens.check()
    try:
        with session:
            torch.ones(3, device="cuda")
    except RuntimeError as error:
        print(type(error).__name__, session.report.context_usable, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(torch.ones(3, device="cuda").sum().item())
"""
    done = python("-c", program)
    assert "RuntimeError" in done.stdout
    assert "False" not in done.stdout
    assert done.stdout.splitlines()[-1] == "3.0", done.stderr
