"""What cells that are not checked do to the check of others."""

from __future__ import annotations

import pytest

from cudalens.guards.process import PROCESS
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


def test_after_a_call_by_hand_the_shell_shows_the_next_exception(notebook: Notebook) -> None:
    """What a check by hand raises is for the code that asked for it, that of a cell for all."""
    notebook.shell.run_cell_magic("cudacheck", "", "z = 1")
    assert notebook.names["z"] == 1
    notebook.run("1 / 0")
    assert notebook.out.count("ZeroDivisionError: ") == 1


def test_options_of_a_cell_do_not_check_the_next(notebook: Notebook) -> None:
    checked = []
    notebook.names["note"] = lambda: checked.append(PROCESS.is_installed)
    for cell in ("%%cudacheck\nnote()", "note()", "%cudacheck note()", "note()"):
        notebook.run(cell)
    assert checked == [True, False, True, False]
