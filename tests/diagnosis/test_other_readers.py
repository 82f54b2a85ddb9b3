"""Code of a fix is shown only where nothing else that the user's code reads forbids it."""

from __future__ import annotations

import pytest

from tests.hostcells import SETUP, run_cell

pytestmark = pytest.mark.usefixtures("sim")
STEP = """
def step(out, y):
    loss = F.cross_entropy(out, y)
    {rest}
step(torch.randn(10, 10).cuda(), torch.arange(1, 11).cuda())
"""
COMPREHENSION = """
ys, outs = [torch.arange(1, 11).cuda()], [torch.randn(10, 10).cuda()]
loss = sum(F.cross_entropy(out, y) for out, y in zip(outs, ys))
{rest}
"""
ENTRY = """
batch, out = {{"y": torch.arange(1, 11).cuda()}}, torch.randn(10, 10).cuda()
loss = F.cross_entropy(out, batch["y"])
{rest}
"""
ORIGIN = """
out, y = torch.randn(10, 10).cuda(), torch.randn(1)
y = torch.arange(1, 11).cuda()
loss = F.cross_entropy(out, y)
{rest}
"""
LOSSES = """
x, y = torch.randn(4).cuda(), torch.ones(4).cuda()
scores = torch.randn(4, 3).cuda()
for loss_fn, out in ({first}(F.cross_entropy, scores),):
    loss_fn(out, y)
"""


@pytest.mark.parametrize(
    ("code", "other", "harmless", "says"),
    [
        (STEP, "hits = out.argmax(1) == y", "n = y.shape[0]", "Line 8 reads y too"),
        (COMPREHENSION, "n = [y.tolist() for y in ys]", "n = len(outs)", "Line 8 reads y too"),
        (ENTRY, "hits = out.argmax(1) == batch['y']", "n = batch['y'].size(0)", "reads batch['y']"),
        (ORIGIN, "hits = out[0, y - 1]", "hits = out.argmax(1) == y", "adapt line 9"),
    ],
    ids=["argument", "comprehension", "entry", "origin"],
)
def test_what_else_reads_the_labels_decides(
    code: str, other: str, harmless: str, says: str
) -> None:
    fixed = run_cell(SETUP + code.format(rest=harmless), fast=False)
    assert any(fixed.fixes)
    shared = run_cell(SETUP + code.format(rest=other), fast=False)
    assert not any(shared.fixes)
    assert says in shared.shown.hints[0].text.replace('"', "'")


@pytest.mark.parametrize(
    ("rest", "says"),
    [("z = first(x)", True), ("n = x.shape[0]", False), ("z = first(x.float())", False)],
)
def test_a_cast_names_the_other_lines_that_read_the_tensor(rest: str, says: bool) -> None:
    """They may need the cast too, or the dtype as it is: the code stays that of the call alone."""
    code = f"""
first, x = nn.Linear(3, 2).cuda(), torch.zeros(4, 3, dtype=torch.float64).cuda()
y = first(x)
{rest}
"""
    hint = run_cell(SETUP + code, fast=False).shown.hints[0]
    assert hint.fix == "first(x.float())"
    assert (". Line 8 reads x too" in hint.text) == says


def test_the_failing_line_is_not_pointed_at() -> None:
    """Where it reads the labels twice, a fix of one of the two reads is no code."""
    code = STEP.replace("F.cross_entropy(out, y)", "F.cross_entropy(out, y) + y.sum()")
    outcome = run_cell(SETUP + code.format(rest="n = y.shape[0]"), fast=False)
    assert not any(outcome.fixes)
    text = outcome.shown.hints[0].text
    assert text.endswith(". This line reads y again: change it where it is made")


@pytest.mark.parametrize(
    "first",
    ["", "(F.binary_cross_entropy_with_logits, x), "],
    ids=["one function", "another function before"],
)
def test_a_loop_over_functions_gets_no_code(first: str) -> None:
    """Another function may take the tensor as it is, and the change would break that turn."""
    outcome = run_cell(SETUP + LOSSES.format(first=first), fast=False)
    assert not any(outcome.fixes)
    assert "The loop may call other functions here" in outcome.shown.hints[0].text


def test_bytes_that_a_caller_passes_are_divided_where_they_are_made() -> None:
    """The caller may read them as well; what the cell itself has made is divided on the line."""
    code = "p, x = torch.rand(2, 8).cuda(), torch.arange(32.0, 48).reshape(2, 8).cuda() * 5\n"
    outcome = run_cell(f"{SETUP}{code}F.binary_cross_entropy(p, x)", fast=False)
    assert outcome.fixes == ["F.binary_cross_entropy(p, x / 255)"]
    passed = "def loss(p, t):\n    return F.binary_cross_entropy(p, t.view(2, 8))\nloss(p, x)"
    outcome = run_cell(f"{SETUP}{code}{passed}", fast=False)
    assert outcome.fixes == [None]
    assert ". It is x, made in line 5: divide it there" in outcome.shown.hints[0].text


HELD = """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        {stored}
    def forward(self, x):
        y = {read}
        return self.fc(x) + y
M().cuda()(torch.ones(2, 4).cuda())
"""


@pytest.mark.parametrize(
    ("stored", "read", "says"),
    [
        ("self.shift = torch.ones(4)", "self.shift", "It is self.shift, a plain attribute"),
        ("self.shifts = [torch.ones(4)]", "self.shifts[0]", "It is in self.shifts, a plain list"),
        ("self.shift = torch.ones(4)", "torch.ones(4)", None),
    ],
    ids=["attribute", "list", "made in forward"],
)
def test_a_tensor_that_a_module_does_not_register(stored: str, read: str, says: str | None) -> None:
    outcome = run_cell(SETUP + HELD.format(stored=stored, read=read), fast=False)
    assert any(outcome.fixes) is (says is None)
    assert ("register_buffer" in outcome.shown.hints[0].text) is (says is not None)
    assert (says or "move it to cuda:0") in outcome.shown.hints[0].text


@pytest.mark.parametrize(
    ("code", "is_named"),
    [
        ("self.shift[:, :2]", True),
        ("self.shift.clone()[:, :2]", False),
    ],
    ids=["elements of an attribute", "of a tensor made here"],
)
def test_elements_of_a_tensor_that_a_module_does_not_register(code: str, is_named: bool) -> None:
    stored = "self.shift = torch.ones(1, 4, 4)"
    cell = HELD.format(stored=stored, read="x[:, None]")
    outcome = run_cell(SETUP + cell.replace("self.fc(x) + y", f"y + {code}"), fast=False)
    (hint,) = outcome.shown.hints
    assert ("It is self.shift, a plain attribute made in line" in hint.text) is is_named
    assert any(outcome.fixes) is not is_named


@pytest.mark.parametrize(
    ("line", "is_tried"),
    [
        ("torch.ones(3, 1, 4).cuda() * torch.ones(1, 5, 4)", True),
        ("torch.ones(3, 1).cuda() * torch.ones(5)", False),
    ],
    ids=["three dimensions that line up", "a column and a row by accident"],
)
def test_a_move_to_a_device_where_sizes_are_broadcast(line: str, is_tried: bool) -> None:
    outcome = run_cell(f"{SETUP}{line}", fast=False)
    assert any(outcome.fixes) is is_tried
