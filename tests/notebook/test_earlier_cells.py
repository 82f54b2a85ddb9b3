"""A value that an earlier checked cell made is shown with its line, where that is proven."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import cudalens
from cudalens.core.report import Report
from cudalens.session.succession import SUCCESSION
from tests.shells import Notebook

DATA = """%%cudacheck
y = torch.arange(32, device="cuda") % 10 + 1
"""
MODEL = """%%cudacheck
model = torch.nn.Linear(64, 10).to("cuda")
"""
LOSS = """%%cudacheck
out = model(torch.randn(32, 64, device="cuda"))
loss = F.cross_entropy(out, y)
"""


def report_of(notebook: Notebook, *cells: str) -> Report:
    for cell in cells:
        notebook.run(cell)
    assert isinstance(notebook.error, cudalens.DeviceIndexError)
    report = cudalens.last_report()
    assert report is not None
    return report


def marks(report: Report) -> list[str]:
    """The lines with a mark on the first screen, without their places."""
    lines = report.to_text().splitlines()
    return [re.sub(" +◂", "  ◂", line.partition("│ ")[2]) for line in lines if " ◂ " in line]


MADE = 'y = torch.arange(32, device="cuda") % 10 + 1  ◂ 10 is made here'
SET = 'model = torch.nn.Linear(64, 10).to("cuda")  ◂ 10 classes are set here'


def test_three_checked_cells_show_what_one_shows(notebook: Notebook) -> None:
    """Both lines are shown, each with its own cell."""
    report = report_of(notebook, DATA, MODEL, LOSS)
    assert sorted(marks(report)) == sorted([MADE, SET])
    lines = [item.source for item in report.provenance]
    assert {(item.cell, item.line) for item in lines if item} == {(2, 2)}
    whole = "".join(it.removeprefix("%%cudacheck\n") for it in (DATA, MODEL, LOSS))
    one = report_of(notebook, f"%%cudacheck\n{whole}")
    assert [it.op for it in one.provenance] == [it.op for it in report.provenance]


def test_every_cell_is_checked(notebook: Notebook) -> None:
    """``%cudacheck on`` instead of a magic over each cell."""
    cells = (it.removeprefix("%%cudacheck\n") for it in (DATA, MODEL, LOSS))
    assert MADE in marks(report_of(notebook, "%cudacheck on", *cells))


BOUND = (
    """%%cudacheck
keep = torch.ones(120, dtype=torch.bool)
keep[[17, 23, 104, 111]] = False
ids = torch.arange(120)[keep]
rows = torch.randn(120, 4)[keep].to("cuda")
ids = ids.to("cuda")
""",
    "%%cudacheck\nrows.index_select(0, ids)",
)


def test_the_size_is_followed_to_an_earlier_cell(notebook: Notebook) -> None:
    """The rows of a table, and the values of the index."""
    report = report_of(notebook, *BOUND)
    assert marks(report) == [
        "ids = torch.arange(120)[keep]  ◂ bad values are made here",
        'rows = torch.randn(120, 4)[keep].to("cuda")  ◂ 116 places are set here',
    ]


READS = (
    "print(y.shape, y.max().item(), len(y))",
    "y",
    "def later():\n    y[0] = 10",
    "import math\nclasses = 10",
)


@pytest.mark.parametrize("cell", READS)
def test_an_unchecked_cell_that_only_reads_changes_nothing(notebook: Notebook, cell: str) -> None:
    """It defines, imports, prints."""
    assert MADE in marks(report_of(notebook, DATA, MODEL, cell, LOSS))


WRITES = (
    "y[0] = 10",
    "y.data[0] = 10",
    "y += 0",
    "y.data.zero_(); y.data.add_(10)",
    "(lambda: y.data.fill_(10))()",
    "for _ in range(1): y.data.fill_(10)",
)


@pytest.mark.parametrize("cell", WRITES)
def test_an_unchecked_cell_that_may_write_ends_it(notebook: Notebook, cell: str) -> None:
    """The layer is still found: in the source."""
    assert MADE not in marks(report_of(notebook, DATA, MODEL, cell, LOSS))


def test_a_write_in_a_checked_cell_is_shown(notebook: Notebook) -> None:
    """Its line is the one that made the value, beside what was bad before."""
    good = "%%cudacheck\ny = torch.arange(32, device='cuda') % 10\n"
    report = report_of(notebook, good, MODEL, "%%cudacheck\ny[3] = 10", LOSS)
    assert "y[3] = 10  ◂ 10 is made here (1 value)" in marks(report)
    assert not any("arange" in line for line in marks(report))


def test_a_write_that_no_recorder_saw_ends_it(notebook: Notebook) -> None:
    """Nothing ran unchecked, and yet the version is another one: a thread has written."""
    report_of(notebook, DATA, MODEL, LOSS)
    notebook.names["y"][0] = 10
    assert MADE not in marks(report_of(notebook, LOSS))
    copied = LOSS.replace("(out, y)", "(out, y.clone())")
    report_of(notebook, DATA, LOSS)
    notebook.names["y"][0] = 10
    assert MADE not in marks(report_of(notebook, copied))


@pytest.mark.parametrize("check", ["%%cudacheck --fast", "%%cudacheck --no-force-eager"])
def test_a_cell_without_a_recorder_ends_it(notebook: Notebook, check: str) -> None:
    """It may have written to anything."""
    assert MADE not in marks(report_of(notebook, DATA, MODEL, f"{check}\ny.data.add_(0)", LOSS))


def test_a_cell_that_ran_again_is_the_one_that_is_shown(notebook: Notebook) -> None:
    """The new tensor has a new origin."""
    report = report_of(notebook, DATA, MODEL, LOSS, DATA, LOSS)
    lines = [item.source for item in report.provenance]
    assert {item.cell for item in lines if item} == {5}
    assert MADE in marks(report)


def test_a_long_cell_in_between(notebook: Notebook) -> None:
    """More calls than the ring has; those that lead to what is alive are kept."""
    train = (
        "%%cudacheck --max-ops 20\nfor _ in range(30):\n    h = torch.zeros(2, device='cuda') + 1"
    )
    assert MADE in marks(report_of(notebook, DATA, MODEL, train, LOSS))
    hidden = train + "\n    y.data.add_(0)"
    assert MADE not in marks(report_of(notebook, DATA, MODEL, hidden, LOSS))
    overrun = "%%cudacheck --max-ops 20\ny[0] = 10\n" + train.partition("\n")[2]
    assert MADE not in marks(report_of(notebook, DATA, overrun, LOSS))


LOADER = """%%cudacheck
from torch.utils.data import DataLoader, TensorDataset
targets = torch.arange(8) % 4
targets[5] = 10
data = TensorDataset(torch.randn(8, 3), targets)
loader = DataLoader(data, batch_size=4)
batches = list(loader)
xb, yb = batches[1]
"""


def test_a_view_that_is_gone_hides_nothing(notebook: Notebook) -> None:
    """The cell writes to a view that lives no longer than its line, and makes the value too."""
    made = f"{DATA}memory = torch.zeros(4, device='cuda')\nmemory[:2].add_(1)\nmemory[:1] /= 2\n"
    report = report_of(notebook, made, MODEL, LOSS)
    assert MADE in marks(report)
    assert report.limits == ()


def test_a_batch_of_an_earlier_cell_is_named(notebook: Notebook) -> None:
    """Which item of the data set is bad is known as in one cell."""
    loss = "%%cudacheck\nF.cross_entropy(torch.zeros(4, 10, device='cuda'), yb.to('cuda'))"
    whole = LOADER + loss.partition("\n")[2]
    apart, one = report_of(notebook, LOADER, loss), report_of(notebook, whole)
    assert apart.offenders.first[0].sample == one.offenders.first[0].sample == 5


def test_no_tensor_is_kept_alive(notebook: Notebook) -> None:
    """What is handed on has weak references; a deleted tensor is gone at once."""
    notebook.run(DATA)
    notebook.run(MODEL)
    alive = weakref.ref(notebook.names["y"])
    notebook.names.pop("y")
    gc.collect()
    assert alive() is None
    notebook.run("%%cudacheck\nz = 1")
    kept = SUCCESSION._earlier.calls
    assert not any("arange" in call.name for call in kept)


def test_a_training_loop_hands_on_few_calls(notebook: Notebook) -> None:
    """Not the steps of its optimizer, and no call whose results are gone."""
    train = """%%cudacheck
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).to("cuda")
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(50):
    optimizer.zero_grad()
    net(torch.randn(8, 4, device="cuda")).sum().backward()
    optimizer.step()
"""
    notebook.run(train)
    notebook.run(train.replace("range(50)", "range(5)"))
    names = [call.api.stem for call in SUCCESSION._earlier.calls]
    assert names.count("linear") == 0
    assert len(names) < 100


@pytest.mark.parametrize("end", ["%unload_ext cudalens", "%cudacheck off", "%reset -f"])
def test_it_is_gone_with_the_extension(notebook: Notebook, end: str) -> None:
    """Nothing refers to the tensors, so torch may swap them."""
    notebook.run(DATA)
    y: Any = notebook.names["y"]
    assert SUCCESSION._earlier is not None
    assert weakref.getweakrefs(y)
    notebook.run(end)
    assert SUCCESSION._earlier is None
    assert not weakref.getweakrefs(y)


def test_an_unchecked_swap_is_not_hindered(notebook: Notebook) -> None:
    """torch refuses to swap tensors that have weak references."""
    notebook.run(DATA)
    notebook.run("z = torch.zeros(2, device='cuda'); torch.utils.swap_tensors(y, z)")
    assert notebook.error is None
    notebook.run(DATA)
    notebook.run("%%cudacheck\nz = torch.zeros(2, device='cuda'); torch.utils.swap_tensors(y, z)")
    assert notebook.error is None
    assert notebook.names["y"].shape == (2,)


def test_a_changed_weight_is_not_where_its_layer_was_made(notebook: Notebook) -> None:
    """The layer comes from an unchecked cell, a later one fills its weight."""
    made = "model = torch.nn.Linear(64, 10).to('cuda')"
    fill = "%%cudacheck\ntorch.nn.init.ones_(model.weight)"
    report = report_of(notebook, DATA, made, fill, DATA, LOSS)
    assert not any("ones_" in line for line in marks(report))


BLOCK = "with cudalens.check():\n    "
Y = "y = torch.arange(32, device='cuda') % 10 + 1\n"
FAIL = "F.cross_entropy(torch.zeros(32, 10, device='cuda'), y)\n"


@pytest.mark.parametrize(
    "cells",
    [
        (f"import cudalens\n{BLOCK}{Y}print(y.shape)\n{BLOCK}{FAIL}",),
        ("import cudalens", BLOCK + Y, BLOCK + FAIL),
        ("import cudalens", BLOCK + Y, f"%%cudacheck\n{FAIL}"),
        (f"import cudalens\n{DATA.partition(chr(10))[2]}", DATA, BLOCK + FAIL),
    ],
)
def test_blocks_in_sequence(notebook: Notebook, cells: tuple[str, ...]) -> None:
    """Of one cell and of several, among checked cells too."""
    report = report_of(notebook, *cells)
    assert [line for line in marks(report) if line.startswith("y = torch.arange(32")]


@pytest.mark.parametrize(
    "cell",
    [
        f"import cudalens\n{BLOCK}{Y}y.data[0] = 10\n{BLOCK}{FAIL}",
        f"import cudalens\nfor step in range(2):\n    {BLOCK}    if step: {FAIL}        else: {Y}",
        f"import cudalens\ndef f():\n    {BLOCK}    global y; {Y}f()\n{BLOCK}{FAIL}",
    ],
)
def test_code_between_blocks_may_have_written(notebook: Notebook, cell: str) -> None:
    """What runs between them is not known, or writes."""
    assert not marks(report_of(notebook, cell))


def test_blocks_of_a_function_in_a_script() -> None:
    """Without a shell only a block right behind the other goes on."""
    with cudalens.check():
        y = torch.arange(32) % 10 + 1
    with cudalens.check() as second:
        y.sum()
        earlier = second.recorder.snapshot().earlier.calls
    assert [call.api.stem for call in earlier] == ["arange", "remainder", "add"]
    y.sum()
    with cudalens.check() as third:
        assert not third.recorder.snapshot().earlier.calls


LABELS = """%%cudacheck
y = torch.arange(32) % 10 + 1
logits = torch.zeros(32, 10, device="cuda")
"""
CLONED = "%%cudacheck\nF.cross_entropy(logits, y.clone().to('cuda'))"


MADE_ON_HOST = "y = torch.arange(32) % 10 + 1  ◂ 10 is made here"


@pytest.mark.parametrize("check", ["", "%%cudacheck\n"])
def test_a_line_of_an_edited_file_is_not_shown(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    """The file has another line there now; it was edited by a cell, or in an editor."""
    file = tmp_path / "labels_for_cells.py"
    file.write_text(f"import torch\n{LABELS.splitlines()[1]}\n")
    monkeypatch.chdir(tmp_path)
    logits = f"%%cudacheck\n{LABELS.splitlines()[2]}"
    run = f"%%cudacheck\n%run {file.name}"
    assert MADE_ON_HOST in marks(report_of(notebook, run, logits, CLONED))
    notebook.run(run)
    if check:
        notebook.run(f"{check}open({file.name!r}, 'w').write('import torch\\nprint(1)\\n')")
    else:
        file.write_text("import torch\nprint(1)\n")
    assert not any("made here" in line for line in marks(report_of(notebook, logits, CLONED)))


@pytest.mark.parametrize(
    "cell",
    [
        f"from contextlib import suppress\nwith suppress(IndexError), cudalens.check():\n    {Y}"
        "    torch.zeros(3)[7]\ny.data.fill_(10)",
        f"@contextmanager\ndef writing():\n    yield\n    y.data.fill_(10)\n"
        f"with writing(), cudalens.check():\n    {Y}",
        f"from contextlib import nullcontext as check\n{BLOCK}{Y}with check():\n"
        "    y.data.fill_(10)\nwith cudalens.check():\n    pass",
    ],
    ids=["suppress", "manager", "other check"],
)
def test_a_with_statement_of_others_ends_it(notebook: Notebook, cell: str) -> None:
    """Another context manager ends after the block, or hides its error; or it is none of ours."""
    notebook.run("import cudalens; from contextlib import contextmanager")
    fail = f"%%cudacheck\n{FAIL.replace('y)', 'y.clone())')}"
    assert not marks(report_of(notebook, cell, fail))


def test_cells_without_history_are_not_taken_for_one(notebook: Notebook) -> None:
    """They have one number in common, and some front ends and nbclient run all cells so."""
    for cell in (DATA, MODEL, LOSS):
        notebook.shell.run_cell(cell, store_history=False)
    report = cudalens.last_report()
    assert report is not None and report.source is not None
    told = report.to_markdown()
    assert all(mark.replace("◂", "# <-") in told for mark in (MADE, SET))
    assert told.count(f"In [{report.source.cell}], another:") == 2
