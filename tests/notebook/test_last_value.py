"""The shell's own display of the last value of a checked cell is checked too."""

from __future__ import annotations

import sys

import pytest

import cudalens
from cudalens import simulate
from tests.releases import release
from tests.shells import Notebook

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
WAYS = ("%%cudacheck\n", "%cudacheck ", "%cudacheck on", "%%time\n%%cudacheck\n")
"""Below the magic, behind it, and in the every-cell mode."""
KINDS = ("Repr", "Html", "Bundle", "Display")


@pytest.fixture
def notebook(notebook: Notebook) -> Notebook:
    """The shell with classes whose displays use the device."""
    notebook.run(CLASSES)
    return notebook


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", WAYS)
def test_a_display_that_fails_is_stopped_before_its_launch(
    notebook: Notebook, sim: simulate.Simulation, kind: str, how: str
) -> None:
    """The context survives and there is one report, which names the line of the display."""
    before = sys.displayhook
    notebook.run(notebook.under(how) + f"{kind}()")
    # The shell prints what a display raises, and the cell has ended well.
    assert (notebook.error, sim.is_poisoned, sim.pending) == (None, False, None)
    reports = [item for item in notebook.shown if "ids[1] = 7 is outside" in item["text/plain"]]
    assert len(reports) == 1
    report = cudalens.last_report()
    assert report.source.text == "return str(F.embedding(ids, table)[0].tolist())"
    assert sys.displayhook is before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", WAYS)
def test_a_good_display_is_as_without_the_magic(notebook: Notebook, kind: str, how: str) -> None:
    """It is shown once, bound to ``_``, and nothing is said."""
    notebook.run("ids = ids - ids")
    notebook.run(notebook.under(how) + f"{kind}()")
    assert (notebook.error, notebook.shown, notebook.err) == (None, [], "")
    assert notebook.out.count("Out[") == 1
    assert type(notebook.names["_"]).__name__ == kind


def test_a_bound_report_outlives_a_good_display(notebook: Notebook) -> None:
    """``-r`` keeps the report of the cell; a display with a report of its own binds that."""
    notebook.run("labels = torch.tensor([[9]], device='cuda')")
    silent = "labels.new_zeros(1, 3).take_along_dim(labels, 1).shape"
    notebook.run(f"%%cudacheck -r found\n{silent}")
    kind = "silent" if release() >= (2, 10) else "device_assert"  # before, it takes no modulo
    assert notebook.names["found"] is not None and notebook.names["found"].kind == kind
    notebook.run("%%cudacheck -r found\nRepr()")
    assert notebook.names["found"].kind == "device_assert"


def test_a_value_that_is_not_displayed_leaves_nothing(notebook: Notebook) -> None:
    """Neither a hook nor the value stays when the cell ends."""
    before = sys.displayhook
    notebook.run("import weakref")
    notebook.run("x = %cudacheck Repr()\nkept = weakref.ref(x)\ndel x\nalive = kept()")
    assert notebook.names["alive"] is None
    assert sys.displayhook is before
