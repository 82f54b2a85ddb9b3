"""Checked blocks of the tests' own code, on the simulated device."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import cudalens
from cudalens.core.report import Report
from cudalens.core.reported import report_beside


def cuda(*values: Any) -> torch.Tensor:
    return torch.tensor(values, device="cuda")


def reported_on(error: BaseException) -> Report | None:
    """Return the report that hangs on an exception, of ours or of torch's."""
    return getattr(error, "report", report_beside(error))


def report_of(
    function: Callable[[], object],
    kind: type[Exception] = cudalens.DeviceIndexError,
    **options: Any,
) -> Report:
    """Return the report of a block that one finding, or one error of torch's, leaves."""
    with pytest.raises(kind) as caught:
        with cudalens.check(**options) as session:
            function()
    assert session.report is not None and session.report is reported_on(caught.value)
    assert len(session.findings) == hasattr(caught.value, "report")
    return session.report


@contextmanager
def own_op(
    schema: str, kernel: Callable[..., torch.Tensor], key: str = "CompositeExplicitAutograd"
) -> Iterator[Any]:
    """Register an op of the user's own, ``mine::…``, for the length of a block."""
    name = schema.partition("(")[0]
    with torch.library._scoped_library("mine", "FRAGMENT") as library:
        library.define(schema)
        library.impl(name, kernel, key)
        yield getattr(torch.ops.mine, name)


def line_of(function: Callable[..., Any], fragment: str) -> int:
    """Return the number of the first line of a function that holds a fragment."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, text in enumerate(lines) if fragment in text)


def overwritten() -> None:
    """Fail in backward, of an index that was changed after forward."""
    model = torch.nn.Linear(3, 4).cuda()
    ids = cuda(0, 1, 2).reshape(3, 1)
    hidden = model(torch.ones(3, 3, device="cuda"))
    loss = hidden.gather(1, ids).mean()  # forward
    ids.data[1] = 9
    loss.backward()  # fails
