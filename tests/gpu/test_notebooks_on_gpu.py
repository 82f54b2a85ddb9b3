"""The notebooks on real hardware: judged after each has run in a kernel of its own."""

from __future__ import annotations

import pytest
from notebook_runs import NAMES
from suite import Results
from test_on_gpu import of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_on_the_gpu(results: Results, name: str) -> None:
    """Cells fail where they are tagged, and train on behind that, in one process with one GPU."""
    found = of(results, "notebook", name)
    assert not found["rehearsed"]
    assert found["wrong"] == []
