"""Input that nobody hopes for: each gets a clear line, and nothing stays installed.

What concerns options, syntax and shells alone is in ``test_magics.py``.
"""

from __future__ import annotations

import subprocess

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import cudalens
from cudalens import DeviceIndexError
from cudalens.core.reported import report_beside
from tests.probes import Untouchable
from tests.processes import python

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


SHELL = """
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
def cell(text):
    result = shell.run_cell(text)
    return result.error_before_exec or result.error_in_exec
"""


def in_shell(*cells: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run cells in a shell of a process of its own, a fresh one where it does something before."""
    lines = [before, SHELL, *(f"cell({text!r})" for text in cells)]
    return python("-c", "\n".join(lines), fresh=bool(before), NO_COLOR="1")


# --- no GPU --------------------------------------------------------------------------------------


@without_gpu
def test_no_gpu_and_no_simulation_says_what_to_do() -> None:
    told = "print('said', '%cudacheck simulate' in f'{found.explanation} {found.hints}')"
    ran = in_shell(
        "%load_ext cudalens",
        "import torch",
        "%%cudacheck -r found\ntorch.ones(3, device='cuda')",
        told,
        "%%cudacheck -r found\ntorch.ones(3).cuda()",
        told,
        "from cudalens.guards.process import PROCESS",
        "print('left', PROCESS.is_installed)",
    )
    assert ran.stdout.count("CUDA is not available") >= 2
    assert ran.stdout.count("said True") == 2
    assert "left False" in ran.stdout
    assert "AssertionError" in ran.stdout or "RuntimeError" in ran.stdout


# --- no torch ------------------------------------------------------------------------------------


# --- values that fight back ----------------------------------------------------------------------


class Nasty(Tensor):
    """A tensor that cannot be shown."""

    def __repr__(self) -> str:  # type: ignore[override]
        raise RuntimeError("no repr of mine")

    __str__ = __repr__


@pytest.mark.usefixtures("sim")
def test_a_tensor_whose_repr_raises() -> None:
    table = torch.ones(5, 2, device="cuda")
    ids = torch.tensor([1, 7], device="cuda").as_subclass(Nasty)
    grim = Untouchable()
    with pytest.raises(DeviceIndexError) as caught, cudalens.check() as session:
        F.embedding(ids, table), grim
    assert session.report.headline_schema == "indices[1] = 7 is outside the 5 rows of weight"
    assert session.report.to_text()
    assert session.report.to_html()
    assert "no repr of mine" not in str(caught.value)


@pytest.mark.usefixtures("sim")
def test_a_host_error_among_objects_that_fight_back() -> None:
    """The exception is torch's own, and our looking around raises nothing."""
    grim, left = Untouchable(), torch.ones(2, 3, device="cuda").as_subclass(Nasty)
    with pytest.raises(RuntimeError, match="multiplied") as caught, cudalens.check() as session:
        torch.mm(left, torch.ones(2, 3, device="cuda")), grim
    assert session.report.to_html()
    assert report_beside(caught.value) is session.report
