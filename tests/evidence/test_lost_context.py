"""Whether a context has ended is asked of the device, not read off an exception's words."""

from __future__ import annotations

import pytest
import torch

import cudalens
from cudalens import Report, simulate
from cudalens.session.explain import explain

TEXT = "CUDA error: device-side assert triggered\nCUDA kernel errors might be reported late"


def reported(error: BaseException) -> Report:
    """The report of a checked block that raises ``error``."""
    with pytest.raises(type(error)), cudalens.check() as session:
        raise error
    return session.report


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(TEXT),
        getattr(torch, "AcceleratorError", RuntimeError)(TEXT),  # new in torch 2.8
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
)
def test_words_alone_end_no_context(error: BaseException, sim: simulate.Simulation) -> None:
    """Raised by hand, or relayed: the device answers, and is said to; nothing is remembered."""
    assert torch.ones(2, device="cuda").sum().item() == 2
    report = reported(error)
    assert (report.kind, report.context_usable) == ("cuda_error", True)
    text = report.to_text()
    assert "is gone" not in text and "Restart the kernel" not in text
    assert reported(RuntimeError(TEXT)).headline == reported(RuntimeError(TEXT)).headline
    assert "no device of this process has failed" in report.headline_schema


def test_without_cuda_nothing_is_said_of_it() -> None:
    """A process that has not used CUDA has no context to lose."""
    if torch.cuda.is_initialized():
        pytest.skip("this process has used a GPU")
    report = reported(RuntimeError(TEXT))
    assert report.context_usable is None
    assert "torch has not used CUDA in this process" in report.explanation
    assert "  CUDA " not in report.to_text()
    assert explain({}, RuntimeError(TEXT)).context_usable is None
