"""A bad value of each record is stopped before the launch, with the verdict of the rehearsal."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cudalens
from cudalens.simulate.asserts import NOT_SIMULATED
from tests import standin
from tests.processes import ROOT, python

sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import worker
from cases import CASES, Case
from report import differences, machine

REHEARSE = """
import json, sys
sys.path.insert(0, "tests/gpu")
import torch, worker
from cudalens import simulate
from cudalens.simulate.asserts import NOT_SIMULATED
with simulate.start(announce=False):
    for record in sys.argv[1:]:
        if record in NOT_SIMULATED:
            print(json.dumps([record, {}]))
            continue
        print(json.dumps([record, worker.run_case(record, guarded=True)]))
"""


@cache
def rehearsed() -> dict[str, Any]:
    """Return what the rehearsal device makes of each case, in a process without the stand-in."""
    done = python("-c", REHEARSE, *(c.record for c in CASES), fresh=True, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


rehearsed()  # once, before the tests are forked


# Up to torch 2.11 this warning comes for check_invariants=False, too.
@pytest.mark.filterwarnings("default:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.record)
def test_it_is_prevented_as_rehearsed(case: Case) -> None:
    found = worker.run_case(case.record, guarded=True)
    report = found["report"]
    assert report is not None, found["message"]
    assert (report["prevented"], report["context_usable"]) == (True, True)
    assert (report["certainty"], report["limits"]) == ("proven", [])
    assert found["alive"] and standin.count("healthy")
    expected = rehearsed()[case.record].get("report")
    if expected is not None:
        assert differences(report, expected) == []
    else:
        assert case.record in NOT_SIMULATED


@pytest.mark.parametrize("how", [{}, {"fast": True}, {"deferred": True}, {"sync": False}])
def test_a_bad_label_is_stopped_and_the_next_one_computes(how: Any) -> None:
    logits, labels = torch.randn(8, 3, device="cuda"), torch.full((8,), 3, device="cuda")
    with pytest.raises(cudalens.DeviceIndexError, match=r"contained 3|3 is outside"):
        with cudalens.check(**how) as session:
            F.cross_entropy(logits, labels)
    assert session.report is not None
    assert session.report.context_usable is True
    assert F.cross_entropy(logits, labels - 1).isfinite().item()


def test_without_guards_it_ends_the_context() -> None:
    """The neighbour: on the stand-in too a kernel that is given such a label asserts."""
    logits, labels = torch.randn(8, 3, device="cuda"), torch.full((8,), 3, device="cuda")
    F.cross_entropy(logits, labels)
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        torch.cuda.synchronize()


def test_a_notebook_s_later_cells_compute(notebook: Any) -> None:
    notebook.run("table, ids = torch.ones(5, 2).cuda(), torch.tensor([1, 7, 2]).cuda()")
    notebook.run("%%cudacheck\nF.embedding(ids, table)")
    assert isinstance(notebook.error, cudalens.DeviceIndexError)
    notebook.run("F.embedding(ids.clamp(max=4), table).sum().item()")
    assert notebook.error is None


def test_the_file_of_results_is_written(folder: Path) -> None:
    table, ids = torch.ones(5, 2).cuda(), torch.tensor([1, 7, 2]).cuda()
    with pytest.raises(cudalens.DeviceIndexError), cudalens.check(json="report.json"):
        F.embedding(ids, table)
    assert json.loads((folder / "report.json").read_text())["context_usable"] is True


def test_the_gpu_suite_s_page_is_not_written_here() -> None:
    """What it says is said of hardware."""
    with pytest.raises(RuntimeError, match="stand-in"):
        machine()
