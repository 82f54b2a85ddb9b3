"""What fills the device, by the names of the user's variables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cudalens.evidence.memory import MAX_LISTED, format_bytes, is_full, largest
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


def held(outer: dict[str, Any] | None = None, /, **names: Any) -> list[str]:
    frames = [
        SimpleNamespace(f_code=held.__code__, f_locals=scope, f_globals=scope)
        for scope in (outer or {}, names)
    ]
    return [item.partition(":")[0] for item in largest(frames)]


def test_only_variables_that_hold_memory_of_the_device_are_listed() -> None:
    """Names with an underscore are a shell's own results."""
    one, two = (torch.zeros(8 * at, device="cuda") for at in (1, 2))
    assert held(one=one, two=two) == ["two", "one"]
    assert held(_one=one, two=two) == ["two"]
    assert held(on_cpu=torch.zeros(8), number=3) == []
    assert held(one=one, part=one[:2], again=[one]) == ["one"]
    assert held(one=one, part=two[:1]) == ["part", "one"]  # which keeps all of the memory
    assert held(one=one.to_sparse()) == []
    assert held(items=[one, 3], table={"two": two}) == ["table", "items"]
    assert held(norm=torch.nn.BatchNorm1d(2, affine=False).cuda()) == ["norm"]  # has buffers alone
    # What was passed to a function has the name that it has there.
    assert held({"data": two, "kept": one}, batch=two) == ["batch", "kept"]


def test_an_object_that_answers_anything_holds_nothing() -> None:
    class Odd:
        @property
        def __class__(self) -> Any:
            return list

        def __iter__(self) -> Any:
            raise AssertionError

        def __len__(self) -> int:
            raise AssertionError

    assert held(odd=Odd()) == []


@pytest.mark.parametrize(
    ("message", "is_it"),
    [("CUDA out of memory. Tried", True), ("CUDA error: invalid argument", False)],
)
def test_an_error_says_that_the_device_is_full(message: str, is_it: bool) -> None:
    assert is_full(message) is is_it
