"""A fix of values stands where they were made, when they are used again; and how they were made."""

from __future__ import annotations

import pytest

from cudalens import simulate
from tests.diagnosis.test_outside_cells import SETUP, check_fixes
from tests.hostcells import Outcome, run_cell

LOSS = "out = torch.randn(10, 10).cuda()\n"
TWICE = f"{LOSS}a = F.cross_entropy(out, y)\nb = F.cross_entropy(out * 2, y)"
LOOP = f"{LOSS}for _ in range(2):\n    F.cross_entropy(out, y)"


def first(outcome: Outcome) -> tuple[str | None, int | None]:
    """The first fix, and the line that it belongs behind."""
    hint = outcome.shown.hints[0]
    return hint.fix, hint.at and hint.at.line


@pytest.mark.parametrize(
    ("code", "fix", "line"),
    [
        (f"y = torch.arange(1, 11).cuda()\n{TWICE}", "y = y - 1", 5),
        (f"y = torch.arange(1, 11).cuda()\n{LOOP}", "y = y - 1", 5),
        (
            f"{LOSS}for x, y in [(out, torch.arange(1, 11).cuda())]:\n"
            "    loss = F.cross_entropy(x, y)\n    right = (x.argmax(1) == y).sum()",
            "y = y - 1",
            6,
        ),
        ("m, x = nn.Linear(4, 2).cuda(), torch.randn(3, 4)\nx.to('cuda')\nm(x)",
         "x = x.to('cuda')", 6),
        ("z, y = torch.randn(2, 3), torch.tensor([0.0, 1.0])\ny.long()\nF.cross_entropy(z, y)",
         "y = y.long()", 6),
    ],
)  # fmt: skip
def test_the_fix_stands_behind_the_line_that_made_the_values(
    code: str, fix: str, line: int, sim: simulate.Simulation
) -> None:
    """It is applied there, and the cell succeeds."""
    outcome = run_cell(SETUP + code)
    assert first(outcome) == (fix, line)
    check_fixes(SETUP + code, outcome, sim)


@pytest.mark.parametrize(
    "code",
    [
        # Used once.
        f"y = torch.arange(1, 11).cuda()\n{LOSS}F.cross_entropy(out, y)",
        # Written to after it was bound.
        f"y = torch.zeros(10).long().cuda()\ny.add_(torch.arange(1, 11).cuda())\n{TWICE}",
        # Bound again by the next turn of the loop.
        f"y = torch.arange(1, 11).cuda()\n{LOOP}\n    y = y.flip(0)",
        # Bound on one of two ways.
        f"y = torch.arange(1, 11).cuda()\nif len(y) == 10:\n    y = y.flip(0)\n{TWICE}",
        # Another function may have bound it.
        f"def f():\n    global y\n    y = 1\ny = torch.arange(1, 11).cuda()\n{TWICE}",
        # It came as an argument.
        "def f(out, y):\n    for _ in range(2):\n        F.cross_entropy(out, y)\n"
        f"{LOSS}f(out, torch.arange(1, 11).cuda())",
    ],
)
def test_a_binding_that_is_not_proven_leaves_the_fix_in_the_call(
    code: str, sim: simulate.Simulation
) -> None:
    """Used once, written to, bound elsewhere, or given."""
    assert first(run_cell(SETUP + code)) == ("F.cross_entropy(out, y - 1)", None)


MODULE = """\
class M(nn.Module):
    def __init__(self):
        super().__init__()
        {made}
    def forward(self, x):
        return {used}
M().cuda()(torch.ones(2, 4).cuda())
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("m = nn.Linear(4, 2).cuda()\nx = torch.ones(3, 4)\nm(x)",
         "made on the CPU in line 6: torch.ones(3, 4) without device="),
        ("z = torch.randn(2, 3)\ny = torch.tensor([0.0, 1.0])\nF.cross_entropy(z, y)",
         "made in line 6: torch.tensor([0.0, 1.0])"),
        (MODULE.format(made="self.scale = torch.ones(4)", used="x * self.scale"),
         "made on the CPU in line 8: torch.ones(4) without device=; moving the module moves what "
         "is registered: register_buffer('scale', …)"),
        (MODULE.format(made="self.parts = [nn.Linear(4, 4)]", used="self.parts[0](x)"),
         "self.parts is a plain list, and moving the module moves what is registered: make it an "
         "nn.ModuleList"),
    ],
)  # fmt: skip
def test_the_origin_is_told(code: str, says: str, sim: simulate.Simulation) -> None:
    """Where a tensor of the wrong device or dtype was made."""
    hint = run_cell(SETUP + code).shown.hints[0]
    assert hint.text.endswith(says)
