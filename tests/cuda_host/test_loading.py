"""Loading cudalens does not start CUDA; a rehearsal is refused where there is a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cudalens
from tests import standin
from tests.shells import new_shell


@pytest.mark.parametrize(
    ("cell", "context"), [("pass", 0), ("import torch\ntorch.zeros(1, device='cuda')", 1)]
)
@pytest.mark.parametrize("magic", ["%%cudacheck", "%%cudacheck --deferred"])
def test_only_the_user_s_cell_makes_a_context(magic: str, cell: str, context: int) -> None:
    with new_shell() as shell:
        shell.run_line_magic("load_ext", "cudalens")
        shell.run_line_magic("cudacheck", "status")
        assert shell.run_cell(f"{magic}\n{cell}").success
        assert standin.count("context") == context
        assert torch.cuda.is_initialized() == bool(context)


@pytest.mark.parametrize("words", [{}, {"deferred": True}])
def test_installed_guards_make_no_context(words: Any) -> None:
    cudalens.install(**words)
    torch.nn.functional.embedding(torch.tensor([1]), torch.zeros(3, 2))
    cudalens.uninstall()
    assert standin.count("context") == 0


def test_a_device_is_not_rehearsed_where_there_is_one() -> None:
    from cudalens import simulate

    with pytest.raises(simulate.SimulationError, match="GPU"):
        simulate.start()
