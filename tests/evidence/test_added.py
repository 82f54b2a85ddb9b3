"""What a sum added to ids that are outside the bound since."""

from __future__ import annotations

import pytest

from tests.hostcells import SETUP, run_cell

pytestmark = pytest.mark.usefixtures("sim")
FIELDS = """\
class Fields(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 4)
    def forward(self, x):
        x = x + x.new_tensor([0, 40]).unsqueeze(0)
        return self.table(x)
fields = torch.tensor({rows}).cuda()
Fields().cuda()(fields)
"""
IDS = """\
table = nn.Embedding(10, 4).cuda()
ids = torch.arange(10).cuda()
{made}
table(shifted)
"""
STEP = """\
table = nn.Embedding(10, 4).cuda()
def embed(x, offsets):
    z = x + offsets
    return table(z)
def step(fields):
    return embed(fields, torch.tensor([0, 6]).cuda())
step(torch.tensor([[1, 2], [3, 4], [0, 1]]).cuda())
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (FIELDS.format(rows=[[1, 60], [39, 2]]),
         "adds 40 to fields[:, 1], which is 2 … 60: at most 59 fits"),
        # The name is the caller's, not that of the parameter.
        (STEP, "adds 6 to fields[:, 1], which is 1 … 4: at most 3 fits"),
        # Both columns are too large, each by its own number.
        (FIELDS.format(rows=[[1, 60], [100, 2]]), None),
        (IDS.format(made="shifted = ids + 1"), "adds 1 to ids, which is 0 … 9: at most 8 fits"),
        (IDS.format(made="shifted = ids - (-3)"), "adds 3 to ids, which is 0 … 9: at most 6 fits"),
        # Its elements are added to by themselves, or have other values by now.
        (IDS.format(made="shifted = ids + torch.arange(10).cuda()"), None),
        (IDS.format(made="shifted = ids + 1\nids += 5"), None),
        (IDS.format(made="shifted = ids + 1\nshifted += 5"), None),
        (IDS.format(made="ids = torch.ones_like(ids)\nshifted = ids * 12 - ids"), None),
        (IDS.format(made="shifted = ids + 1\nshifted.data.add_(5)"), None),
        # The ids have no columns.
        (IDS.format(made="ids = torch.arange(10).reshape(1, 5, 2).cuda()\n"
                    "shifted = ids + torch.tensor([0, 5]).cuda()"), None),
        (IDS.format(made="shifted = ids * 2"), None),
        (IDS.format(made="shifted = ids.clone()\nshifted += 1"), None),
    ],
)  # fmt: skip
def test_what_was_added_to_bad_ids(code: str, says: str | None) -> None:
    """To a column of them, or to all: with its range before, and what fits."""
    report = run_cell(SETUP + code, fast=False).shown
    assert report.kind == "device_assert"
    assert report.limits == ()
    texts = [it.text for it in report.observations if " adds " in it.text]
    assert [text.partition(" adds ")[2] for text in texts] == ([says[5:]] if says else [])
