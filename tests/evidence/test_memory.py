"""What fills the device, by the names of the user's variables."""

from __future__ import annotations

import pytest

from cudalens.evidence.memory import MAX_LISTED, format_bytes
from tests.hostcells import run_cell

pytestmark = pytest.mark.usefixtures("sim")
FULL = "raise torch.OutOfMemoryError('CUDA out of memory.')"
CELL = f"""
import torch
big = [torch.zeros(256, 1024, device="cuda")]
kept = {{at: torch.zeros(64, 1024, device="cuda") for at in range(2)}} | {{"b": big[0][:2], "n": 3}}
small = torch.zeros(3, device="cuda")
on_cpu = torch.zeros(4096, 1024)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(1, 64, device="cuda")).sum().backward()
optimizer.step()

def train(local):
    {FULL}

train(torch.zeros(512, 1024, device="cuda"))
"""


def test_the_largest_holders_are_named_from_metadata() -> None:
    """Variables by name with size, dtype and shape; views, host tensors and ties count once."""
    report = run_cell(CELL).shown
    assert report.kind == "cuda_error"
    assert report.source is not None and report.source.text.startswith("raise torch.OutOf")
    held = report.explanation.partition("The largest tensors in your variables: ")[2]
    names = held.partition(".  ")[0].partition(". This is not")[0].split("; ")
    assert names == [
        "local: 2.00 MiB, float32 [512, 1024]",
        "big: 1.00 MiB in 1 item",
        "kept: 512.00 KiB in 4 items",
        "model: 32.50 KiB, parameters and gradients of Linear",
        "optimizer: 32.50 KiB, state of Adam",
    ]
    assert len(names) == MAX_LISTED


def test_a_cell_that_keeps_nothing_gets_no_list() -> None:
    """Nothing on the device, nothing listed."""
    assert "variables hold" not in run_cell(f"import torch\n{FULL}").shown.explanation


@pytest.mark.parametrize(
    ("size", "text"),
    [(1023, "1023 B"), (1024, "1.00 KiB"), (2**31, "2.00 GiB"), (2**50, "1024.00 TiB")],
)
def test_sizes_are_spoken_as_torch_does(size: int, text: str) -> None:
    """Binary units with two decimals."""
    assert format_bytes(size) == text
