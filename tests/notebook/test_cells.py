"""What cells that are not checked do to the check of others."""

from __future__ import annotations

import pytest

from cudalens.session.succession import SUCCESSION
from tests.shells import Notebook

MADE = "%%cudacheck\ny = torch.arange(3, device='cuda')"


@pytest.mark.parametrize(("silent", "is_kept"), [(True, True), (False, False)])
def test_what_a_front_end_runs_unseen_ends_no_succession(
    notebook: Notebook, silent: bool, is_kept: bool
) -> None:
    """A front end only looks at the variables. A cell of the user's that calls may write."""
    notebook.run(MADE)
    assert SUCCESSION._earlier is not None
    notebook.shell.run_cell("vars().get('y').device", silent=silent)
    assert (SUCCESSION._earlier is not None) is is_kept
