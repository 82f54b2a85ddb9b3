"""Advice over all calls of a line: what earlier batches, and the dataset, rule out."""

from __future__ import annotations

import pytest

from tests.hint_evidence import spoken
from tests.hostcells import SETUP, Outcome, run_cell

pytestmark = pytest.mark.usefixtures("sim")


def loop(call: str, *batches: str, before: str = "") -> Outcome:
    """Run ``call`` for each batch ``b``, under the full check."""
    code = f"{SETUP}{before}\nfor b in ({', '.join(batches)},):\n    {call}"
    return run_cell(code, fast=False)


def ids(*values: int) -> str:
    return f"torch.tensor({[*values]}).cuda()"


def floats(*values: float) -> str:
    return f"torch.tensor({[*values]}).cuda()"


HEAD = "z = torch.zeros(10, 5).cuda()"
FIVE = ids(1, 2, 3, 4, 5, 1, 2, 3, 4, 5)
LOSS = "F.cross_entropy(z, b)"


@pytest.mark.parametrize(
    ("before", "rule", "fix"),
    [
        (ids(*[1, 2, 3, 4] * 2, 1, 2), "one_based_labels", "F.cross_entropy(z, b - 1)"),
        (ids(*[0, 1, 2, 3, 4] * 2), "observations", None),
        (ids(*[0, -100, 2, 3, 4] * 2), "observations", None),
    ],
)
def test_an_earlier_zero_rules_out_a_count_from_one(
    before: str, rule: str, fix: str | None
) -> None:
    """A shift by one would leave the 0 of that batch outside."""
    hint = loop(LOSS, before, FIVE, before=HEAD).shown
    hint = spoken(hint)
    assert (hint.rule, hint.fix) == (rule, fix)
    assert fix is not None or "an earlier call of the line had" in hint.text


@pytest.mark.parametrize(
    ("batches", "rule", "has_fix"),
    [
        ([FIVE], "one_based_labels", True),
        ([ids(0, 1, 2), FIVE], "observations", False),
        ([ids(5, 6, 7, 8, 9)], "relabel", True),
        ([ids(0, 1, 2), ids(5, 6, 7, 8, 9)], "relabel", False),
        ([ids(*[0, 1, 2, 3, 4, 5] * 9)], "too_few_places", False),
        ([ids(0, 1, 2), ids(*[0, 1, 2, 3, 4, 5] * 9)], "observations", False),
    ],
)
@pytest.mark.parametrize("loss", ["F.cross_entropy", "nn.CrossEntropyLoss()"])
def test_on_the_cpu_nobody_has_read_what_earlier_calls_had(
    batches: list[str], rule: str, has_fix: bool, loss: str
) -> None:
    on_cpu = [it.removesuffix(".cuda()") for it in batches]
    outcome = loop("loss(torch.zeros(len(b), 5), b)", *on_cpu, before=f"loss = {loss}")
    hint = spoken(outcome.shown)
    assert (hint.rule, hint.fix is not None) == (rule, has_fix)


@pytest.mark.parametrize(
    ("first", "rule"), [("zeros", "observations"), ("ones", "one_based_labels")]
)
def test_on_the_cpu_the_column_of_the_dataset_is_read(first: str, rule: str) -> None:
    code = f"""\
from torch.utils.data import DataLoader, TensorDataset
y = torch.cat([torch.{first}(20), torch.arange(20.) % 5 + 1]).long()
data = TensorDataset(torch.randn(40, 5), y)
for x, b in DataLoader(data, batch_size=20):
    F.cross_entropy(x, b)
"""
    report = run_cell(SETUP + code, fast=False).shown
    assert report.observations[0].text.startswith("4 of 40 labels of the dataset are 5")
    assert spoken(report).rule == rule


@pytest.mark.parametrize(
    ("line", "rule", "says", "fix"),
    [
        ("y = y + 1", "one_based_labels", "line 6 adds 1 (y = y + 1), and the 5 classes", None),
        ("y = 1 + y.long()", "one_based_labels", "line 6 adds 1 (y = 1 + y.long())", None),
        ("y += 7", "relabel", "line 6 adds 7 (y += 7), and the 5 outputs are numbered 0", None),
        ("y = y % 5 + 1", "one_based_labels", "they look 1-based", "F.cross_entropy(z, y - 1)"),
        ("y = y + y.new_ones(20)", "one_based_labels", "1-based", "F.cross_entropy(z, y - 1)"),
    ],
)
def test_no_number_is_subtracted_that_a_line_before_has_added(
    line: str, rule: str, says: str, fix: str | None
) -> None:
    made = "z, y = torch.zeros(20, 5).cuda(), (torch.arange(20) % 5).cuda()"
    hint = spoken(run_cell(f"{SETUP}{made}\n{line}\nF.cross_entropy(z, y)", fast=False).shown)
    assert (hint.rule, hint.fix) == (rule, fix)
    assert says in hint.text


PAIR = "t = torch.ones(3).cuda()"
BCE = "F.binary_cross_entropy(b, t)"


@pytest.mark.parametrize(
    ("call", "before", "bad", "advice"),
    [
        (BCE, None, floats(-2.5, 0.5, 3.0), "b runs from -2.5 to 3, which no sigmoid gives. If "
         "they are scores, binary_cross_entropy_with_logits takes them as they are"),
        (BCE, floats(0.1, 0.5, 0.9), floats(-2.5, 0.5, 3.0), None),
        ("torch.multinomial(b, 1)", None, floats(-2.5, 0.5, 3.0),
         "the weights run from -2.5 to 3, and none may be below 0: softmax makes weights of "
         "scores, abs() of errors"),
        ("torch.multinomial(b, 1)", floats(0.1, 0.5, 2.0), floats(-2.5, 0.5, 3.0), None),
        ("F.binary_cross_entropy(t, b)", None, floats(0.0, 255.0, 0.0),
         "F.binary_cross_entropy(t, b / 255)"),
        ("F.binary_cross_entropy(t, b)", floats(0.0, 0.5, 1.0), floats(0.0, 255.0, 0.0), None),
        # A black picture is one of bytes, too.
        ("F.binary_cross_entropy(t, b)", floats(0.0, 0.0, 0.0), floats(0.0, 255.0, 0.0),
         "F.binary_cross_entropy(t, b / 255)"),
    ],
)  # fmt: skip
def test_numbers_that_were_right_before_are_no_other_scale(
    call: str, before: str | None, bad: str, advice: str | None
) -> None:
    """No change of all values is offered for some of one batch; they are named instead."""
    outcome = loop(call, *filter(None, (before, bad)), before=PAIR)
    first = spoken(outcome.shown)
    assert advice in (first.fix, first.text)
    if advice is None:
        assert first.rule == "observations"
        assert "logits" not in first.text


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("F.cross_entropy(z, y[b])", "the 99 labels of y are 3 different numbers: 0, 3, 7. The 3 "
         "outputs are numbered 0 … 2"),
        # The other column may count something else.
        ("F.cross_entropy(z, t[b, 0])", "2 of 4 labels are 3, 7, all others 0"),
    ],
)  # fmt: skip
def test_all_of_a_vector_is_looked_at_that_the_labels_were_cut_out_of(call: str, says: str) -> None:
    """Its four labels alone prove nothing."""
    made = "z = torch.zeros(4, 3).cuda()\ny = torch.tensor([0, 3, 0, 7] + [0, 3, 7, 3, 7] * 19)"
    made += ".cuda()\nt = torch.stack([y, y], 1)"
    assert spoken(loop(call, ids(0, 1, 2, 3), before=made).shown).text.startswith(says)


TABLE = "table = nn.Embedding(4, 2).cuda()"


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([ids(0, 1, 2, 3, 4)], "the 5 ids run from 0 to 4 without a gap: they need 5 rows, "
         "there are 4"),
        ([ids(0, 1, 3, 4)], "1 of 4 ids is 4, all others 0 … 3"),
        # What is missing in this batch, an earlier one had.
        ([ids(0, 2), ids(1, 2, 3, 4)], "1 of 4 ids is 4, all others 1 … 3"),
        ([ids(1, 2), ids(1, 2, 3, 4)], "1 of 4 ids is 4, all others 1 … 3"),
        # One in a thousand is a stray one.
        (["(torch.arange(1000) % 4).index_fill(0, torch.tensor(7), 4).cuda()"],
         "1 of 1000 ids is 4, all others 0 … 3"),
        # A row has several numbers, and its end only the one.
        (["torch.tensor([[0, 1, 4, 4], [2, 3, 0, 4]]).cuda()"],
         "3 of 8 ids are 4, all others 0 … 3"),
        (["torch.tensor([[0, 1, 2, 3], [4, 4, 4, 4]]).cuda()"], "the 8 ids run from 0 to 4"),
        (["torch.tensor([0, 1, 2, 3, 4, 4, 4]).view(1, 7).cuda()"], "the 7 ids run from 0 to 4"),
        (["torch.tensor([3, 11, 27, 40] * 20).cuda()"], "the 80 ids are 4 different "
         "numbers: 3, 11, 27, 40. The 4 rows are numbered 0 … 3"),
    ],
)  # fmt: skip
def test_a_size_is_asked_for_a_count_without_gaps(batches: list[str], says: str) -> None:
    """Over everything seen; else it is said what is there."""
    hint = spoken(loop("table(b)", *batches, before=TABLE).shown)
    assert hint.text.startswith(says)


@pytest.mark.parametrize(
    ("ids", "given", "says"),
    [
        ("raw * 2", "ids", "line 6: ids = raw * 2"),
        ("raw", "ids * 2", None),
        # Positions are no values of what was sorted.
        ("raw.float().topk(2).indices + 3", "ids", "line 6: ids = raw.float()"),
        ("(raw / 0.5)", "ids", "line 6: ids = (raw / 0.5)"),
    ],
)
def test_the_line_that_made_the_values_is_named(ids: str, given: str, says: str | None) -> None:
    """The recorded one; not the failing line itself."""
    before = "emb, raw = nn.Embedding(4, 2).cuda(), torch.tensor([3, 3]).cuda()"
    code = f"{SETUP}{before}\nids = {ids}\nemb(({given}).long())"
    report = run_cell(code, fast=False).shown
    assert all(step.note is None for step in report.provenance if "0.5" in ids)
    text = spoken(report).text
    assert says in text if says else "line 7" not in text


def test_two_places_are_named_where_two_parts_must_agree() -> None:
    """The line of the values, the layer, and the variable that its size was taken from."""
    made = "names = ['a', 'b', 'c']\nn = len(names)\nemb = nn.Embedding(n, 2).cuda()\n"
    made += "names = names + ['d', 'e', 'f']\n"
    made += "ids = torch.tensor([names.index(c) for c in 'fad']).cuda()\nemb(ids)"
    report = run_cell(SETUP + made, fast=False).shown
    assert [item.text for item in report.observations if item.kind == "came_from"] == [
        "line 9: ids = torch.tensor([names.index(c) for c in 'fad']).cuda() (2 values)"
    ]
    bounds = [item for item in report.observations if item.kind == "bound"]
    assert {6, 7} & {line.line for item in bounds for line in item.sources}


HELPER = """\
def loss_of(scores, target):
    return F.cross_entropy(scores, target)
y, z = torch.arange(1, 11).cuda(), torch.zeros(10, 10).cuda()
loss = loss_of(z, y)
"""


@pytest.mark.parametrize(
    ("rest", "fix", "line"),
    [
        ("", "F.cross_entropy(scores, target - 1)", None),
        ("right = (z.argmax(1) == y).sum()", "y = y - 1", 7),
    ],
)
def test_a_tensor_that_others_read_is_changed_where_it_was_made(
    rest: str, fix: str, line: int | None
) -> None:
    """Inside the helper a change would leave the accuracy with the other numbers."""
    hint = run_cell(f"{SETUP}{HELPER}{rest}").shown.hints[0]
    assert (hint.fix, hint.at and hint.at.line) == (fix, line)
