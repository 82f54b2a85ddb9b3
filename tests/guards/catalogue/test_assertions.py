"""The guard of stated assertions: the one element, and what was stated of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from cudalens.core.device_asserts import READ_RELEASE
from tests.cpu_guards import assert_said, said_id
from tests.verdicts import ask

HOLDS = torch.ops.aten._assert_async


def stated(value: Tensor, message: str | None = None) -> Any:
    call = (HOLDS.default, value) if message is None else (HOLDS.msg, value, message)
    return next(iter(dict(ask(*call)).values()), None)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (tensor(1), None),
        (tensor(-1), None),
        (tensor(float("nan")), None),
        (tensor(1j), None),
        (tensor(0), {"headline": "{argument} = 0, where the program states that it is not zero"}),
        (tensor([[0]]), {"at": [(0, 0)], "bounds.text": "anything but 0", "is_index": False}),
        (tensor(False), {"line": "TensorCompare.cu:121"}),
        (tensor(-0.0), {"line": "TensorCompare.cu:121"}),
        (tensor([0, 0]), None),
        (tensor([]), None),
    ],
    ids=said_id,
)
def test_a_statement_about_one_element(value: Tensor, said: dict[str, Any] | None) -> None:
    assert_said(stated(value), said)


def test_a_message_is_repeated_up_to_the_longest_that_torch_takes() -> None:
    assert stated(tensor(0)).explanation == "It comes with no message."
    assert stated(tensor(0), "no rows").explanation == "The statement reads: no rows."
    assert stated(tensor(0), "a" * 254) is not None
    assert stated(tensor(0), "a" * 255) is None
    assert stated(tensor(0), "é" * 127) is not None
    assert stated(tensor(0), "é" * 128) is None  # counted in bytes


@pytest.mark.parametrize(
    ("dtype", "line"), [(torch.float32, 121), (torch.complex64, 125), (torch.complex128, 128)]
)
def test_each_kind_of_number_has_a_line_of_its_own(
    dtype: torch.dtype, line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", READ_RELEASE)
    found = stated(torch.zeros((), dtype=dtype), "no rows")
    assert found.device_text.startswith(f"TensorCompare.cu:{line}: ")
    assert found.device_text.endswith("Assertion `no rows` failed.")
    assert found.offenders.first[0].value == 0
