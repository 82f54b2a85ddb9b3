"""The shell's own display of the last value of a checked cell is checked too (issue 17, item 4)."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import cudalens
from cudalens import simulate
from tests.shells import run

CLASSES = """\
class Base:
    def look(self):
        return str(F.embedding(ids, table)[0].tolist())

class Repr(Base):
    def __repr__(self): return self.look()

class Html(Base):
    def _repr_html_(self): return self.look()

class Bundle(Base):
    def _repr_mimebundle_(self, **kwargs): return {"text/plain": self.look()}

class Display(Base):
    def _ipython_display_(self): print(self.look())
"""
WAYS = ("%%cudacheck", "%cudacheck", "%cudacheck on", "%%time\n%%cudacheck")
KINDS = ("Repr", "Html", "Bundle", "Display")


@pytest.fixture
def shell(shell: Any) -> Any:
    """The shell with classes whose displays use the device."""
    run(shell, CLASSES)
    return shell


def checked(shell: Any, how: str, code: str) -> tuple[BaseException | None, list[dict[str, Any]]]:
    """Run code below the magic, behind it, or in the every-cell mode."""
    if how == "%cudacheck on":
        run(shell, how)
        return run(shell, code)
    return run(shell, f"{how}{' ' if how == '%cudacheck' else chr(10)}{code}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", WAYS)
def test_item_4_a_display_that_fails_is_stopped_before_its_launch(
    shell: Any, sim: simulate.Simulation, kind: str, how: str
) -> None:
    """The context survives and there is one report, which names the line of the display."""
    before = sys.displayhook
    error, shown = checked(shell, how, f"{kind}()")
    assert error is None  # the shell prints what a display raises, and the cell has ended well
    assert not sim.is_poisoned and sim.pending is None
    reports = [item for item in shown if "ids[1] = 7 is outside" in item["text/plain"]]
    assert len(reports) == 1
    report = cudalens.last_report()
    assert report is not None and report.source is not None
    assert report.source.text == "return str(F.embedding(ids, table)[0].tolist())"
    assert sys.displayhook is before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", WAYS)
def test_item_4_a_good_display_is_as_without_the_magic(
    shell: Any, kind: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is shown once, bound to ``_``, and nothing is said."""
    run(shell, "ids = ids - ids")
    capsys.readouterr()
    error, shown = checked(shell, how, f"{kind}()")
    assert (error, shown) == (None, [])
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("Out[") == 1
    assert type(shell.user_ns["_"]).__name__ == kind


def test_item_4_a_bound_report_outlives_a_good_display(shell: Any) -> None:
    """``-r`` keeps the report of the cell; a display with a report of its own binds that."""
    run(shell, "labels = torch.tensor([[9]], device='cuda')")
    silent = "labels.new_zeros(1, 3).take_along_dim(labels, 1).shape"
    run(shell, f"%%cudacheck -r found\n{silent}")
    assert shell.user_ns["found"] is not None and shell.user_ns["found"].kind == "silent"
    run(shell, "%%cudacheck -r found\nRepr()")
    assert shell.user_ns["found"].kind == "device_assert"


def test_item_4_a_value_that_is_not_displayed_leaves_nothing(shell: Any) -> None:
    """Neither a hook nor the value stays when the cell ends."""
    before = sys.displayhook
    run(shell, "import weakref")
    run(shell, "x = %cudacheck Repr()\nkept = weakref.ref(x)\ndel x\nalive = kept()")
    assert shell.user_ns["alive"] is None
    assert sys.displayhook is before
