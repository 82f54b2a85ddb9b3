"""The failing cell of the quickstart, run on a GPU or the rehearsal device."""

from __future__ import annotations

from pathlib import Path

from cudalens.core.report import Report

CELL = """\
# labels of the file run from 1 to 10, one for each digit
pixels = torch.randn(32, 784, device="cuda")
y = torch.arange(32, device="cuda") % 10 + 1

model = torch.nn.Sequential(
    torch.nn.Linear(784, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
).to("cuda")
logits = model(pixels)
loss = F.cross_entropy(logits, y)
loss.backward()
"""


def run(page: Path) -> Report:
    """Run the cell checked, write its report to ``page`` and return it.

    Raises:
        cudalens.simulate.SimulationError: there is no GPU and no simulation for this torch.
        RuntimeError: the cell was not caught, which is a defect of this package.
    """
    import torch

    import cudalens
    from cudalens.source.files import CELLS

    cudalens.ensure_cuda()
    torch.manual_seed(0)
    name = "<cudalens-demo>"
    CELLS.register(name, 1, CELL.splitlines())
    names = {"torch": torch, "F": torch.nn.functional}
    page.parent.mkdir(parents=True, exist_ok=True)
    session = cudalens.check(html=str(page))
    try:
        with session:
            exec(compile(CELL, name, "exec"), names)
    except cudalens.DeviceAssertError:
        pass  # this is what the demo shows
    if session.report is None:
        msg = "the demo's cell ran through unnoticed: nothing guards cross_entropy here"
        raise RuntimeError(msg)
    return session.report
