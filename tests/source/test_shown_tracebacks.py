"""Tracebacks that Python, the command line and pytest show, in processes of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import cudalens
from tests.processes import python
from tests.releases import needs_rehearsal
from tests.shells import BAD, SETUP

OWN = str(Path(cudalens.__path__[0]))
FROZEN = """\
from dataclasses import dataclass
@dataclass(frozen=True)
class E(Exception):
    text: str
    def __str__(self): return self.text
"""
SCRIPT = """
import sys, torch, torch.nn as nn, torch.nn.functional as F, cudalens
cudalens.simulate()
table = nn.Embedding(5, 2, device="cuda")
def look():
    return table(torch.tensor([1, 7], device="cuda"))
if "check" in sys.argv:
    with cudalens.check():
        look()
look()
"""


@needs_rehearsal
@pytest.mark.parametrize("arguments", [("script.py", "check"), ("-m", "cudalens", "script.py")])
def test_the_traceback_of_a_script_is_the_users(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    trace = done.stderr.partition("Traceback")[2].partition("DeviceIndexError")[0]
    assert "in look" in trace and trace.count("script.py") >= 2
    assert OWN not in trace and "runpy" not in trace


@pytest.mark.parametrize("message", ["mine", "CUDA error: mine"])
@pytest.mark.parametrize("arguments", [("script.py",), ("-m", "cudalens", "script.py")])
def test_an_exception_that_nobody_may_write_to_is_the_users_own(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    """Notes and reports are put on it as far as its class allows, also for one of CUDA."""
    raised = f"with cudalens.check(): raise E({message!r})"
    (tmp_path / "script.py").write_text(f"{FROZEN}import cudalens\n{raised}\n")
    done = python(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert f"__main__.E: {message}" in done.stderr.replace("\nE: ", "\n__main__.E: ")
    assert "FrozenInstanceError" not in done.stderr


@needs_rehearsal
@pytest.mark.parametrize(
    "line", [BAD, pytest.param(f"with cudalens.check(): {BAD}", marks=pytest.mark.thorough)]
)
def test_pytest_shows_the_users_frames_only(tmp_path: Path, line: str) -> None:
    """It hides what has ``__tracebackhide__``; the guard that raises is hidden as well."""
    indented = "".join(f"        {text}\n" for text in [*SETUP.split("\n"), line])
    with_guards = "with cudalens.simulate(), cudalens.guard():"
    test = f"import cudalens\ndef test_it():\n    {with_guards}\n{indented}"
    (tmp_path / "test_it.py").write_text(test)
    done = python("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", cwd=tmp_path)
    assert "DeviceIndexError" in done.stdout and "test_it.py:" in done.stdout
    assert "interceptor.py" not in done.stdout and f"{OWN}{os.sep}" not in done.stdout
