"""What is advised beside an exception of torch: changes that were tried, and conditions."""

from __future__ import annotations

import pytest

from cudalens import simulate
from tests.host_errors import CASES, SETUP, Case, check, ident
from tests.hostcells import run_cell
from tests.releases import release

pytestmark = pytest.mark.usefixtures("sim")


@pytest.mark.parametrize("case", [case for case in CASES if case.fix is not None], ids=ident)
def test_a_host_error_has_a_fix(case: Case, sim: simulate.Simulation) -> None:
    check(case, sim)


@pytest.mark.parametrize(
    ("layer", "sizes", "call", "named"),
    [
        ("MultiheadAttention(8, 2)", [(4, 6, 8), (4, 9, 8)], "m(a, b, b)", "b [4, 9, 8]"),
        ("MultiheadAttention(8, 2)", [(4, 6, 8), (4, 6)], "m(a, a, a, b > 2)", "b > 2 [4, 6]"),
        ("GRU(8, 5)", [(4, 6, 8), (1, 4, 5)], "m(a, b)", "b [1, 4, 5]"),
        ("LSTM(8, 5)", [(4, 6, 8), (1, 4, 5)], "m(a, (b, b))", "b [1, 4, 5]"),
        ("MultiheadAttention(8, 2, batch_first=True)", [(4, 6, 8), (5, 9, 8)], "m(a, b, b)", ""),
        ("MultiheadAttention(8, 2)", [(6, 4, 8), (9, 5, 8)], "m(a, b, b)", ""),
        ("GRU(8, 5)", [(6, 4, 8), (1, 3, 5)], "m(a, b)", ""),
    ],
    ids=["keys", "mask", "state", "states", "batch first", "length first", "another state"],
)
def test_a_layer_that_takes_another_dimension_for_the_batch(
    layer: str, sizes: list[tuple[int, ...]], call: str, named: str
) -> None:
    """Where the sizes fit with the batch first; a transposed mask would mix the samples."""
    if layer.startswith(("GRU", "LSTM")) and release() < (2, 10):
        pytest.skip("this torch computes no shapes of recurrent layers on the meta device")
    a, b = (f"torch.ones{size}.cuda()" for size in sizes)
    report = run_cell(f"{SETUP}m = nn.{layer}.cuda()\na, b = {a}, {b}\n{call}", fast=False).shown
    hints = [item for item in report.hints if item.rule == "batch_second"]
    assert len(hints) == bool(named)
    if named:
        assert [item.fix for item in report.hints] == [None]
        text = hints[0].text
        assert text.startswith(f"m has batch_first=False, made in line 5: nn.{layer}.cuda(). It ")
        assert f"a [4, 6, 8] fits {named} with a batch of 4 in dimension 0" in text


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = {w}
    def forward(self, x):
        return x @ self.w{at}
Net().cuda()(torch.ones(3, 8).cuda())
"""
POSITIONS = """
table, x = torch.ones(1, 500, 8).cuda(), torch.ones(2, 60, 8).cuda()
short, n = table[:, :50], 50
x + {}
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (NET.format(w="torch.ones(8, 2)", at=""), "make it a buffer with register_buffer"),
        (NET.format(w="torch.ones(8, 2, requires_grad=True)", at=""), "make it an nn.Parameter"),
        (NET.format(w="[nn.Parameter(torch.ones(8, 2))]", at="[0]"), "one of an nn.ParameterList"),
        (POSITIONS.format("short[:, :x.size(1)]"), "short ends after 50 positions"),
        (POSITIONS.format("table[:, :n]"), ""),
        (
            "torch.stack([torch.ones(n, 5).cuda() for n in (8, 3)])",
            "If they are batches, torch.cat",
        ),
        ("torch.stack([torch.ones(2, n, 5).cuda() for n in (8, 3)])", "if they are images"),
        ("torch.stack([torch.ones(2, n, n + 1).cuda().mT[0] for n in (8, 3)])", ""),
        ("a, b = 7, 2\nn = a / b\ntorch.arange(9).cuda()[:n]", "/ gives floats, // gives whole"),
        ("a, b = 7, 2\nn = a / b\nF.relu(n)", ""),
        ("nn.InstanceNorm2d(3)(torch.ones(2, 3, 1, 1).cuda())", ""),
        ("m = torch.ones(3).cuda()\n(m > 0) and (m < 2)", "& | ~ are and, or and not"),
        ("nn.CrossEntropyLoss(torch.ones(2, 3), torch.ones(2))", ""),
    ],
    ids=[
        *("buffer", "trained", "trained list", "table that ends", "slice that ends", "batches"),
        *("images", "two sizes", "index", "number", "pixel", "and", "setting"),
    ],
)
def test_advice_says_on_what_it_depends(code: str, says: str) -> None:
    """What other tensors of these sizes may be is a condition, or nothing is said."""
    text = "; ".join(item.text for item in run_cell(SETUP + code, fast=False).shown.hints)
    advice = ("make it a buffer", "ends after", "if they are", "If they are", ".any()", "//")
    advice = (*advice, "changes that work")
    assert says in text if says else not any(item in text for item in advice)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("s.masked_fill(m, 0.0)", "The size of m (2) must match the size of s (5)"),
        ("(s > 0) == m", "The size of s > 0 (5) must match the size of m (2)"),
        ("s[0, 0, 0, 0] = s[:1, 0, 0]", "s[0, 0, 0, 0] has shape [], s[:1, 0, 0] has shape [1, 5]"),
        ("s * m", "The size of s (5) must match the size of m (2)"),
        ("F.scaled_dot_product_attention(s, s, s, attn_mask=m)", "size of tensor a (5) must match"),
    ],
    ids=["mask first", "compared", "assigned", "scores first", "neither is the tensor"],
)
def test_a_size_is_told_of_the_tensor_that_has_it(line: str, says: str) -> None:
    """By the dimension that torch names; scores inside of attention are none of its arguments."""
    code = f"{SETUP}s, m = torch.ones(2, 4, 5, 5).cuda(), torch.ones(2, 5).bool().cuda()\n{line}"
    assert says in run_cell(code, fast=False).shown.headline
