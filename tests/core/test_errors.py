"""The exceptions: caught as CUDA's own and as the CPU's, and pickled with their reports."""

from __future__ import annotations

import copy
import pickle

import pytest

from cudalens.core import errors
from tests.builders import make_report


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (errors.DeviceIndexError, (RuntimeError, IndexError, errors.DeviceAssertError)),
        (errors.DeviceValueError, (RuntimeError, ValueError, errors.DeviceAssertError)),
        (errors.NonFiniteError, (RuntimeError, FloatingPointError)),
        (errors.NotRehearsedError, (errors.SimulationError, NotImplementedError)),
        (errors.DeviceOffError, (errors.SimulationError, NotImplementedError)),
        (errors.GuardRegistrationError, (ValueError,)),
        (errors.SilentFindingWarning, (UserWarning,)),
    ],
)
def test_what_catches_an_error(kind: type, bases: tuple[type, ...]) -> None:
    assert all(issubclass(kind, base) for base in bases)


@pytest.mark.parametrize(
    "kind", [errors.DeviceIndexError, errors.DeviceValueError, errors.NonFiniteError]
)
def test_a_copy_keeps_its_report(kind: type) -> None:
    report = make_report()
    for again in (
        pickle.loads(pickle.dumps(kind("said", report))),
        copy.copy(kind("said", report)),
    ):
        assert (type(again), str(again), again.report) == (kind, "said", report)
    assert kind("said").report is None
