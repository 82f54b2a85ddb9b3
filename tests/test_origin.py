"""Which exceptions are torch's business, and which pass a checked block untouched."""

from __future__ import annotations

import types

import pytest
from hostcells import run_cell

from cudalens import simulate
from cudalens.origin import is_torch_error, visible_entries

SETUP = """
import torch, json, numpy as np
from torch import nn
from torch.utils.data import DataLoader, Dataset
x = torch.ones(2, 3, device="cuda")
"""

FOREIGN = [
    "raise ValueError('mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)')",
    "raise RuntimeError('CUDA is a fine thing')",
    "assert x.shape == (3, 2), 'shapes differ'",
    "assert (x == 0).all()",
    "{}['a']",
    "[1, 2][5]",
    "1 / 0",
    "int('a')",
    "open('/no/such/file')",
    "import no_such_module",
    "undefined_name",
    "x.no_such_attribute",
    "json.loads('{')",
    "np.ones(3).reshape(2, 2)",
    "np.ones(3).mean().reshape(2, 2)",
    "str(x.shape).index('nothing')",
    "(lambda a: a)()",
    "(lambda a: a)(x, x)",
    "x.shape[7]",
    "dict(a=x)['b']",
    "torch.no_such_function(x)",
    "nn.Linear(2, 2).no_such_layer",
    "torch.load('/no/such/file')",
    "raise KeyboardInterrupt if False else StopIteration",
]
TORCHS = [
    "x @ x",
    "x.view(7)",
    "x + torch.ones(4, device='cuda')",
    "bool(x)",
    "float(x)",
    "if x > 0: pass",
    "x[0, 0, 0]",
    "torch.add(x, 'a')",
    "x.sum(dim=5)",
    "x += torch.ones(4, device='cuda')",
    "nn.Linear(4, 2).cuda()(x)",
    "nn.Linear(4, 2)(1)",
    "torch.ones(3, device='cuda:7')",
    "x.numpy()",
    "x.cpu() + x",
    "next(iter(DataLoader([None, None])))",
    "x.backward()",
    "x.float().t().view(7)",
    "nn.Linear(3, 2).cuda()(x).view(7)",
]


@pytest.mark.parametrize("line", FOREIGN)
def test_what_is_not_torchs_passes_untouched(line: str, sim: simulate.Simulation) -> None:
    """No report, no note, no attribute."""
    outcome = run_cell(SETUP + line)
    assert outcome.error is not None
    assert outcome.report is None
    assert not hasattr(outcome.error, "__notes__")
    assert not hasattr(outcome.error, "__cudalens_report__")


@pytest.mark.parametrize("line", TORCHS)
def test_what_torch_raises_is_reported(line: str, sim: simulate.Simulation) -> None:
    """The user's line is named, whatever stood between it and the exception."""
    outcome = run_cell(SETUP + line)
    assert outcome.error is not None
    report = outcome.shown
    assert report.kind in ("host_error", "autograd_error", "cuda_error")
    assert report.source is not None and report.source.text == line


def test_an_error_of_the_users_own_module_is_his(sim: simulate.Simulation) -> None:
    """A module of his may raise what it likes, under torch's frames or not."""
    code = """
    from torch import nn
    class Net(nn.Module):
        def forward(self, x):
            raise ValueError("I do not like this input")
    Net()(1)
    """
    assert run_cell(code).report is None


def test_an_error_of_a_dataset_is_its_authors(sim: simulate.Simulation) -> None:
    """Called from torch's loader, in this process or in a worker, it is still the user's own."""
    code = """
    from torch.utils.data import DataLoader, Dataset
    class Words(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index): return {"a": 1}["b"]
    next(iter(DataLoader(Words(), num_workers=WORKERS)))
    """
    for workers in (0, 1):
        outcome = run_cell(code.replace("WORKERS", str(workers)))
        assert isinstance(outcome.error, KeyError)
        assert outcome.report is None


def test_a_torch_error_in_a_dataset_is_torchs(sim: simulate.Simulation) -> None:
    """In the worker's text the message tells it."""
    code = """
    import torch
    from torch.utils.data import DataLoader, Dataset
    class Products(Dataset):
        def __len__(self): return 4
        def __getitem__(self, index): return torch.ones(2, 3) @ torch.ones(2, 3)
    next(iter(DataLoader(Products(), num_workers=1)))
    """
    report = run_cell(code).shown
    assert report.headline.endswith("(2, 3) and (2, 3) cannot be multiplied")


def test_an_error_raised_from_a_torch_error_is_the_users(sim: simulate.Simulation) -> None:
    """``raise … from`` is a statement of his."""
    code = """
    try:
        x @ x
    except RuntimeError as error:
        raise ValueError("wrong input") from error
    """
    assert run_cell(SETUP + code.replace("\n    ", "\n")).report is None


def test_a_torch_error_raised_again_is_torchs(sim: simulate.Simulation) -> None:
    """``raise`` and ``raise error`` keep the traceback that leads to torch."""
    for again in ("raise", "raise error"):
        code = f"try:\n    x @ x\nexcept RuntimeError as error:\n    {again}"
        report = run_cell(SETUP + code).shown
        assert report.source is not None and report.source.text == "x @ x"


def test_a_feature_that_is_not_rehearsed_says_so_itself(sim: simulate.Simulation) -> None:
    """The simulation's own refusal is complete: no report calls it a host error of torch's."""
    outcome = run_cell(
        "from cudalens.simulate.refusal import not_rehearsed\nraise not_rehearsed('x')"
    )
    assert outcome.report is None


def test_a_simulated_kernel_stands_for_the_kernel(sim: simulate.Simulation) -> None:
    """Frames below the simulation are nobody's: no frame of the report lies in this package."""
    report = run_cell(SETUP + "nn.Linear(4, 2).cuda()(x)").shown
    assert report.frames
    assert not any(
        "cudalens/" in frame.file and "tests" not in frame.file for frame in report.frames
    )
    assert report.frames[-1].file.endswith("torch/nn/modules/linear.py")


def failing(depth: int, names: list[str]) -> BaseException:
    """Raise below functions that are compiled as the given files, outermost first."""
    space: dict[str, object] = {"inner": lambda: 1 / 0}
    for name in reversed(names):
        module = types.ModuleType(name)
        exec(compile("def call():\n    inner()", name, "exec"), module.__dict__ | space, made := {})
        space = {"inner": made["call"]}
    try:
        space["inner"]()  # type: ignore[operator]
    except ZeroDivisionError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize(
    ("files", "seen"),
    [
        (["user", "lib"], ["user", "lib"]),
        (["own", "user", "lib"], ["user", "lib"]),
        (["user", "lib", "own", "torch"], ["user", "lib"]),
        (["user", "own", "torch", "user"], ["user", "torch", "user"]),
        (["user", "own", "torch", "user", "own", "lib"], ["user", "torch", "user"]),
        (["own", "lib", "own", "lib"], ["lib"]),
    ],
)
def test_the_traceback_ends_where_it_enters_this_package(files: list[str], seen: list[str]) -> None:
    """Up to the last of the user's frames all foreign ones are kept, then up to the first own."""
    error = failing(0, files)
    entries = visible_entries(
        error.__traceback__.tb_next,  # type: ignore[union-attr]  the frame of this file
        is_own=lambda file: file == "own",
        is_user=lambda file: file == "user",
    )
    found = [item.tb_frame.f_code.co_filename for item in entries]
    # The function that divides by zero stands in this file, innermost.
    assert [name for name in found if name in {*files}] == seen


def test_without_a_traceback_nothing_is_known() -> None:
    """An exception that was never raised belongs to nobody."""
    assert not is_torch_error(
        ValueError("x"),
        is_own=lambda file: False,
        is_user=lambda file: True,
        runs_torch=lambda entry: True,
    )
