"""A fix of shape is code only where it succeeds with another batch size, and alone."""

from __future__ import annotations

import pytest

from tests.hostcells import SETUP, Outcome, run_cell

pytestmark = pytest.mark.usefixtures("sim")
POSITIONS = """
class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("pe", torch.randn({rows}, 1, 64))
    def forward(self, x):
        return x + self.pe[:x.size(0)]
Positions()(torch.randn(35, 20, 64))
"""


def cell(code: str) -> Outcome:
    return run_cell(SETUP + code, fast=False)


WRONG = {
    "batch equal to the rows of the table": POSITIONS.format(rows=20),
    "batch equal to the channels": """
bn, output = nn.BatchNorm1d(64), torch.randn(64, 32)
bn(output)
""",
    "batch equal to the channels, of sequences": """
conv, x = nn.Conv1d(8, 4, 3), torch.randn(8, 50, 20)
conv(x)
""",
    "another dimension of cat": """
xt, h = torch.randn(32, 64), torch.randn(16, 64)
torch.cat([xt, h], dim=1)
""",
    "index transposed to one row": """
gold = torch.randint(0, 50, (192,))
torch.zeros(176, 50).scatter(1, gold.view(-1, 1), 1.0)
torch.zeros(176, 50).scatter(1, gold, 1.0)
""",
    "batch equal to the heads": """
scores, m = torch.randn(4, 4, 16, 16), torch.ones(4, 16)
scores[:, :, :15].masked_fill((m == 0)[:, :15], 0.0)
""",
    "class numbers against probabilities": """
cy, outputs = torch.tensor([0, 1, 1, 0, 1]), torch.rand(5, 2)
cy - outputs
""",
    "either factor may be transposed": """
q, k = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
torch.bmm(q, k)
""",
    "one-hot labels, or shares of the classes": """
y = torch.eye(3)[:2].long()
F.cross_entropy(torch.randn(2, 3), y)
""",
    "labels of rows in an unknown order": """\
rows, y = torch.randn(32, 9), torch.randint(9, (2, 16))
F.cross_entropy(rows, y)""",
    "flags of queries, or of keys": """\
scores, flags = torch.randn(2, 12, 12), torch.ones(2, 12).bool()
scores.masked_fill(flags, 0.0)""",
    "a token before the others, or features behind them": """\
tokens, first = torch.randn(4, 10, 8), torch.randn(4, 8)
torch.cat([first, tokens], dim=1)""",
    "samples, or the scores of one": """\
scores = torch.randn(32)
scores.softmax(dim=1)""",
    "rows without channels, or one image": """\
images = torch.randn(64, 28, 28)
images.permute(0, 3, 1, 2)""",
    "steps of features, or samples of them": """\
x = torch.randn(100, 64)
nn.Conv1d(64, 8, 3, padding=1)(x)""",
    "an image of three channels, or three samples": """\
image = torch.randn(3, 32, 32)
nn.Linear(1024, 10)(image.flatten())""",
    "rows of several classes, or shares": """\
z, marks = torch.randn(3, 4), torch.tensor([[1, 1, 0, 0], [0, 0, 1, 0], [0, 1, 1, 1]])
F.cross_entropy(z, marks)""",
    "a mask of what is read, or of what is not": """\
x, mask = torch.randn(2, 5, 8), torch.ones(2, 5).long()
nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, key_padding_mask=mask)""",
    "a mask for attention, or of padding": """\
x, mask = torch.randn(2, 5, 8), torch.ones(2, 5).bool()
nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, attn_mask=mask)""",
    "scores and labels in each other's place": """\
loss = nn.BCEWithLogitsLoss()
loss(torch.randint(0, 2, (8, 1)), torch.randn(8, 1))""",
    "all steps, or the last state": """\
gru = nn.GRU(4, 8, batch_first=True)
nn.Linear(8, 2)(gru(torch.randn(3, 5, 4)))""",
    "two tensors of one call": """\
one, two = torch.randn(3, 8), torch.randn(3, 8)
nn.Linear(8, 2)((one, two))""",
    "a loss of each with each": """\
p, y = torch.randn(4, 10, 1), torch.randn(4, 9)
F.mse_loss(p, y)""",
    "heads and steps, mixed in a row": """\
heads = torch.randn(2, 10, 4, 16).transpose(1, 2)
heads.view(2, 10, 64)""",
    "steps, or as many classes": """\
z, y = torch.randn(9, 2, 9), torch.randint(0, 9, (2, 9))
F.cross_entropy(z, y)""",
    "a write to a copy": """\
w, at = torch.zeros(4, 6), torch.tensor([0, 3])
w.t().view(-1)[at] = 1.0""",
    "a write to a copy, by a method": """\
w = torch.randn(4, 6)
w.t().view(-1).zero_()""",
    "one-hot rows, flattened": """\
logits, rows = torch.randn(4, 4), F.one_hot(torch.arange(4))
F.cross_entropy(logits, rows.view(-1))""",
}
"""Changes with which the call succeeds, and which mean something else."""


@pytest.mark.parametrize("code", WRONG.values(), ids=WRONG)
def test_a_change_that_fits_by_chance_is_no_code(code: str) -> None:
    outcome = cell(code)
    assert outcome.error is not None
    assert not any(outcome.fixes)


RIGHT = {
    "labels in a column": ("F.cross_entropy(torch.randn(32, 10), y)", "y.squeeze(1)"),
    "scores in a column": (
        "F.binary_cross_entropy_with_logits(z[:, None], y.flatten().float())",
        "z[:, None].squeeze(1)",
    ),
    "images, channels last": ("nn.Conv2d(3, 8, 3)(images)", "images.permute(0, 3, 1, 2)"),
    "images, flat": ("nn.Linear(48, 2)(small)", "small.flatten(1)"),
    "classes last": ("F.cross_entropy(torch.randn(32, 16, 9), s)", "transpose(1, 2)"),
    "signals without channels": ("nn.Conv1d(1, 4, 3)(signals)", "signals.unsqueeze(1)"),
    "an image without a batch": ("nn.BatchNorm2d(3)(image)", "image.unsqueeze(0)"),
    "labels of all steps": ("F.cross_entropy(steps.view(-1, 9), s)", "s.reshape(-1)"),
    "state of a batch": ("nn.GRU(4, 6)(torch.randn(5, 32, 4), h)", "h.unsqueeze(0)"),
    "mask of the keys": (
        "torch.randn(32, 4, 16, 16).masked_fill(s == 0, 0.0)",
        "(s == 0)[:, None, None]",
    ),
    "weights that are not the data": ("torch.randn(4, 3) @ torch.randn(5, 3)", ".T"),
}
DATA = """
y, z, s = torch.zeros(32, 1).long(), torch.randn(32), torch.zeros(32, 16).long()
images, small = torch.randn(32, 28, 28, 3), torch.randn(8, 3, 4, 4)
steps = torch.randn(32, 16, 9)
signals, image, h = torch.randn(32, 100), torch.randn(3, 8, 8), torch.randn(32, 6)
"""


@pytest.mark.parametrize(("line", "change"), RIGHT.values(), ids=RIGHT)
def test_a_change_that_fits_any_batch_is_code(line: str, change: str) -> None:
    outcome = cell(f"{DATA}{line}")
    (fix,) = filter(None, outcome.fixes)
    assert change in fix
    assert cell(f"{DATA}{fix}").error is None


def test_a_table_that_ends_early_is_all_that_is_named() -> None:
    """With fewer rows than the sequence, also where the batch has as many samples."""
    for rows in (20, 21):
        (hint,) = cell(POSITIONS.format(rows=rows)).shown.hints
        assert f"self.pe ends after {rows} positions" in hint.text
