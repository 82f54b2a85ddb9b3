"""The examples in the docstrings of the public names run, on the rehearsal device."""

from __future__ import annotations

import builtins
import doctest
import inspect
from typing import Any

import pytest
import torch

import cudalens
from cudalens import simulate
from cudalens.simulate import activation

PUBLIC = {name: getattr(cudalens, name) for name in cudalens.__all__}
PUBLIC["simulate"] = activation.start
WITHOUT_EXAMPLE = {
    # a mapping and a string
    *("GUARDS", "__version__"),
    # the class behind `check`, and kinds of an error that has an example
    *("CheckSession", "DeviceIndexError", "DeviceValueError", "NonFiniteError"),
    *("GuardRegistrationError", "SilentFindingWarning", "Violation"),
}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def failures(docstring: str, name: str) -> int:
    """Run the examples of a docstring and return how many fail."""
    names: dict[str, Any] = {"cudalens": cudalens, "torch": torch}
    test = doctest.DocTestParser().get_doctest(docstring, names, name, None, 0)
    try:
        return doctest.DocTestRunner(optionflags=FLAGS).run(test).failed
    finally:
        vars(builtins).pop("_", None)  # the shown value, which would hide that of a shell


@pytest.mark.parametrize("name", sorted(set(PUBLIC) - WITHOUT_EXAMPLE))
def test_the_example_of_a_public_name_runs(name: str, sim: simulate.Simulation) -> None:
    docstring = inspect.getdoc(PUBLIC[name]) or ""
    assert ">>> " in docstring
    assert failures(docstring, name) == 0


def test_an_example_that_is_wrong_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert failures(">>> torch.zeros(2).sum().item()\n0.0", "right") == 0
    assert failures(">>> torch.zeros(2).sum().item()\n1.0", "wrong") == 1
