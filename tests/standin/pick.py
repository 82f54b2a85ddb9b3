"""An op whose kernel asserts on some rows: what ``tests/gpu/extras.py`` compiles for a GPU.

Its text is run as the first cell of a session.
"""

import torch

from tests import standin

table = torch.arange(8.0, device="cuda")
rows = torch.tensor([0, 9, 3], device="cuda")
library = torch.library.Library("gpu_suite", "DEF")
library.define("pick(Tensor table, Tensor rows) -> Tensor")


def on_cuda(table, values):
    if values.data_ptr() == rows.data_ptr():
        standin.fault("sigmoid")
    return table[:3].sigmoid()


library.impl("pick", on_cuda, "CUDA")
pick = torch.ops.gpu_suite.pick


def spoil(at):
    """Let the next replay of a graph with ``pick`` assert."""
    standin.fault("sigmoid")
