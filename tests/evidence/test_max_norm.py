"""A lookup with ``max_norm`` says the same of a bad id as one without."""

from __future__ import annotations

import pytest

from tests.hostcells import SETUP, run_cell

pytestmark = pytest.mark.usefixtures("sim")

TABLES = (
    "table = torch.randn(6, 4).cuda(); e = nn.Embedding(6, 4, **o).cuda(); "
    "bag = nn.EmbeddingBag(6, 4, **o).cuda()\n"
)
LOOKUPS = (
    "e(ids)",
    "F.embedding(ids, table, **o)",
    "bag(ids)",
    'F.embedding_bag(ids, table, mode="max", **o)',
    "F.embedding_bag(ids[0], table, torch.tensor([0, 1]).cuda(), padding_idx=1, **o)",
)


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize("ids", ["[2, 7]", "[-1, 6]"])
def test_a_cut_norm_changes_no_word(lookup: str, ids: str) -> None:
    code = f"{SETUP}{TABLES}ids = torch.tensor([{ids}]).cuda()\n{lookup}"
    plain, cut = (
        run_cell(code.replace("import torch\n", f"import torch\no = {options}\n", 1)).shown
        for options in ("dict()", "dict(max_norm=1.0)")
    )
    assert cut.headline_own == plain.headline_own
    assert cut.bounds == plain.bounds
    assert cut.offenders == plain.offenders
    assert cut.graph == plain.graph
    assert cut.replay == plain.replay
    assert "renorm" in (cut.device_text or "")


@pytest.mark.parametrize("lookup", LOOKUPS)
@pytest.mark.parametrize(
    ("ids", "is_first", "value"),
    [("[2, 6]", True, 6), ("[-6, 5]", False, -6), ("[-7, 5]", True, -7)],
)
def test_guards_that_look_later_say_it_of_the_lookup_too(
    lookup: str, ids: str, is_first: bool, value: int
) -> None:
    """Once, and with the assertion that comes first."""
    code = f"{SETUP}o = dict(max_norm=1.0)\n{TABLES}ids = torch.tensor([{ids}]).cuda()\n{lookup}"
    soon, late = run_cell(code).shown, run_cell(code, deferred=True).shown
    assert late.headline_own == f"indices contained {value}, which is outside the 6 rows"
    assert (late.op, late.bounds, late.device_text) == (soon.op, soon.bounds, soon.device_text)
    assert ("renorm" in (late.device_text or "")) is is_first
    assert "more in this block" not in late.explanation
    assert "weight was written to" in late.explanation


def test_the_op_itself_takes_negative_rows() -> None:
    code = f"{SETUP}w = torch.randn(6, 4).cuda()\nids = torch.tensor([-1, 6]).cuda()\n"
    shown = run_cell(f"{code}torch.embedding_renorm_(w, ids, 1.0, 2.0)").shown
    assert (shown.bounds.min, shown.bounds.max) == (-6, 5)
    assert shown.offenders.count == 1
    late = run_cell(f"{code}torch.embedding_renorm_(w, ids, 1.0, 2.0)", deferred=True).shown
    assert late.op.name == shown.op.name == "aten::embedding_renorm_"
    assert late.bounds == shown.bounds
    assert "self was written to" in late.explanation
