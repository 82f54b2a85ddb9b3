"""What the whole dataset says of the values at fault, read as it is stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from cudalens.core.report import Report
from cudalens.evidence import dataset_column
from tests.hostcells import run_cell

pytestmark = pytest.mark.usefixtures("sim")
SETUP = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
class Own(Dataset):
    def __init__(self, targets, classes=None):
        self.targets, self.calls = targets, 0
        if classes is not None:
            self.classes = classes
    def __len__(self):
        return len(self.targets)
    def __getitem__(self, at):
        self.calls += 1
        return torch.zeros(4), int(self.targets[at])
head = nn.Linear(4, {outputs}).cuda()
{made}
for x, y in DataLoader(ds, 30, shuffle={shuffle}):
    F.cross_entropy(head(x.cuda()), y.cuda())
"""
ALL = "the labels of ds run from 0 to 39 without a gap: they need 40 outputs, there are 10"
BOUND = "{} classes, set in line 15: nn.Linear(4, {})"
OWN = "ds = Own({})\nOwn.__getitem__ = lambda self, at: (torch.zeros(4), {})"


def said(report: Report) -> list[str]:
    """Return all that a report says beyond its headline: its readings, then its facts."""
    return [*(hint.text for hint in report.hints), *(item.text for item in report.observations)]


def says_one(report: Report, start: str) -> bool:
    """Return whether one of the lines of a report begins so."""
    return any(text.startswith(start) for text in said(report))


@pytest.mark.parametrize(
    ("made", "options", "says"),
    [
        # A batch of 30 does not hold the largest label of 40 for certain.
        ("ds = TensorDataset(torch.randn(40, 4), torch.arange(40))", {}, ALL),
        ("ds = [(torch.randn(4), n) for n in range(40)]", {}, ALL),
        ("ds = [(torch.randn(4), torch.tensor(n)) for n in range(40)]", {}, ALL),
        # Of what an attribute has, ``__getitem__`` may make other labels.
        ("ds = Own(list(range(40)))", {}, ALL.replace("ds", "ds.targets")),
        ("ds = Own(torch.arange(40).numpy())", {}, ALL.replace("ds", "ds.targets")),
        ("ds = Subset(Own(torch.arange(50).flip(0)), range(10, 50))", {},
         ALL.replace("ds", "ds.dataset.targets")),
        # Labels that are computed have no column; the names of the classes are there.
        (OWN.format("[range(n) for n in range(40)], classes=[str(n) for n in range(40)]",
                    "len(self.targets[at])"), {"shuffle": False},
         "the 30 labels of this batch run from 0 to 29 without a gap: they need 30 outputs, there "
         "are 10"),
        # Labels that were shifted on the way are not those that are stored.
        (OWN.format("list(range(40))", "self.targets[at] + 1"), {"shuffle": False},
         "21 of 30 labels are 10 … 30, all others 1 … 9"),
        # One label is far beyond the others, or one of a class that is no other row's.
        ("y = torch.arange(40) % 3\ny[17] = 999\nds = TensorDataset(torch.randn(40, 4), y)",
         {"outputs": 3, "shuffle": False}, "1 of 40 labels of ds is 999 (item 17), all others "
         "0 … 2"),
        ("y = torch.arange(3200) % 7\ny[17] = 7\nds = TensorDataset(torch.randn(3200, 4), y)",
         {"outputs": 7, "shuffle": False}, "1 of 3200 labels of ds is 7 (item 17), all others "
         "0 … 6"),
    ],
)  # fmt: skip
def test_the_data_set_is_asked_for_its_labels(
    made: str, options: dict[str, Any], says: str
) -> None:
    """For what it stores: all the labels, the number of classes, the row of a bad one."""
    code = SETUP.format(made=made, **{"outputs": 10, "shuffle": True, **options})
    report = run_cell(code, fast=False).shown
    assert report.limits == ()
    assert len(report.hints) <= 1
    assert says in said(report)
    outputs = options.get("outputs", 10)
    (head,) = [item for item in report.observations if item.facts.get("holder") == "head"]
    assert head.text == BOUND.format(outputs, outputs)
    assert [item.line for item in head.sources] == [15]
    assert ("ds names 40 classes" in said(report)) is ("classes=" in made)


IDS = "torch.randint(0, 9, (40, 3))"
WORDS = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
table = nn.Embedding(9, 2).cuda()
ids = {ids}
ids[17, 1], ids[3, 2] = 12, 0
ds = {ds}
for batch in DataLoader(ds, 30):
    table({given}.cuda())
"""
SAYS = "1 of 120 ids of ds is 12 (item 17), all others 0 … 8"


@pytest.mark.parametrize(
    ("ds", "given"),
    [
        ("TensorDataset(ids)", "batch[0]"),
        ("[(row, 1.0) for row in ids]", "batch[0]"),
        ("[{'ids': row} for row in ids]", "batch['ids']"),
    ],
)
def test_the_data_set_is_asked_for_its_token_ids(ds: str, given: str) -> None:
    """Rows of several numbers, as tensors and as lists."""
    report = run_cell(WORDS.format(ids=IDS, ds=ds, given=given), fast=False).shown
    assert report.limits == ()
    assert SAYS in said(report)


TWO = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
class Own(Dataset):
    def __init__(self, ids, targets):
        self.ids, self.targets = ids, targets
    def __len__(self):
        return len(self.targets)
    def __getitem__(self, at):
        return self.ids[at], self.targets[at] - {less}
table, head = nn.Embedding(50, 2).cuda(), nn.Linear(6, 5).cuda()
ids, y = torch.arange(1200).view(400, 3) % 50, torch.arange(400) % 5 + {less}
y[2] = 5 + {less}
ids[2] = torch.tensor([5, 5, 6])
for x, t in DataLoader({ds}, 10):
    F.cross_entropy(head(table(x.cuda()).flatten(1)), t.cuda())
"""


@pytest.mark.parametrize(
    ("ds", "less", "says"),
    [
        ("TensorDataset(ids, y)", 0, "1 of 400 labels of the dataset is 5 (item 2)"),
        ("[(x, t) for x, t in zip(ids, y)]", 0, "1 of 400 labels of the dataset is 5 (item 2)"),
        ("Own(ids, y)", 0, "1 of 400 labels of the dataset's targets is 5 (item 2)"),
        # The labels are computed, and the ids of their row have their value by chance.
        ("Own(ids, y)", 1, "1 of 10 labels is 5"),
    ],
    ids=["tensors", "tuples", "attributes", "computed"],
)
def test_the_labels_are_not_taken_for_another_column(ds: str, less: int, says: str) -> None:
    """Though that one has the bad value at the same row."""
    report = run_cell(TWO.format(ds=ds, less=less), fast=False).shown
    assert report.limits == ()
    assert says_one(report, says)


PAIR = "return self.x[at], self.y[at]"
GIVEN = """\
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
class Own(Dataset):
    def __init__(self):
        self.x, self.y = torch.zeros(20, 5), torch.arange(20) % 5 + 1
    def __len__(self):
        return len(self.y)
    def __getitem__(self, at):
        {code}
ds = Own()
for batch in DataLoader(ds, 5):
    F.cross_entropy(batch[{key!r}].cuda(), batch[{label!r}].cuda())
"""


@pytest.mark.parametrize(
    ("code", "is_handed_on"),
    [
        ("return self.x[at], self.y[at]", True),
        ("return self.x[at], int(self.y[at])", True),
        ("return self.x[at], torch.as_tensor(self.y[at], dtype=torch.long)", True),
        ("y = self.y[at]; return [self.x[at], torch.as_tensor(y)]", True),
        ("return {'x': self.x[at], 'y': self.y[at]}", True),
        ("return self.x[at], self.y[at] if at != 13 else torch.tensor(0)", False),
        ("return self.x[at], self.y[at] * (at < 13)", False),
        ("y = self.y[at]; y = y * (at < 13); return self.x[at], y", False),
        ("y = self.y[at]; y = y + 0; return self.x[at], y", False),
        ("at = min(at, 12); return self.x[at], self.y[at]", False),
        ("if at < 13: return self.x[at], self.y[at]\n        return (), self.y[0]", False),
        ("return {**{'x': self.x[at]}, 'y': self.y[at] * 1}", False),
        ("pair = self.x[at], self.y[at]; return pair", False),
        # What gives the items is another function than the one of this class and name.
        (f"{PAIR}\n    def __getitems__(self, at):\n        return [self[it] for it in at]", False),
        ("return 0\n    __getitem__ = lambda self, at: (self.x[at], self.y[at])", False),
        (f"{PAIR}\nclass Own(Own):\n    def __getitem__(self, at):\n        {PAIR} * 1", False),
    ],
)
def test_an_edit_needs_an_attribute_that_the_dataset_hands_on(
    code: str, is_handed_on: bool
) -> None:
    """What only some items have would fail in a later batch."""
    key, label = ("x", "y") if "{" in code else (0, 1)
    report = run_cell(GIVEN.format(code=code, key=key, label=label), fast=False).shown
    (hint,) = report.hints
    of = "of ds.y" if is_handed_on else "of this batch"
    assert hint.text.endswith(f"{of} run from 1 to 5: they look 1-based")
    assert (hint.fix is not None) is is_handed_on
    assert report.limits == ()


def test_no_sample_is_asked_for() -> None:
    """Only the loader has called the dataset's own code."""
    code = SETUP.format(made="ds = Own(list(range(40)))", outputs=10, shuffle=False)
    assert run_cell(code, fast=False).names["ds"].calls == 30


def test_labels_of_a_batch_are_not_numbered_alone() -> None:
    """Another batch may have fewer labels, and its numbers would be other ones."""
    code = "import torch\nfrom torch.nn import functional as F\nz = torch.zeros(3, 3).cuda()\n"
    code += "y = torch.tensor([10, 20, 30]).cuda()\nF.cross_entropy(z, y)"
    hint = run_cell(code).shown.hints[0]
    assert (hint.rule, hint.fix) == ("relabel", None)
    assert "The 3 outputs are numbered 0 … 2" in hint.text


LAYERS = """\
import torch
from torch import nn
from torch.nn import functional as F
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.emb.weight
    def forward(self, x):
        return self.head(self.emb(x))
m, i, y = M().cuda(), torch.tensor([1]).cuda(), torch.tensor([8]).cuda()
conv = nn.Sequential(nn.Conv2d(3, 2, 1)).cuda()
"""


@pytest.mark.parametrize(
    ("line", "name", "says"),
    [
        ("F.cross_entropy(m(i), y)", "m.head", "5 classes, those of m.head, made in line 8: "
         "nn.Linear(4, 5), and its weight is that of m.emb too"),
        ("m(i + 9)", "self.emb", "5 rows, set in line 7: nn.Embedding(5, 4), and its weight is "
         "that of self.head too"),
        ("F.cross_entropy(conv(torch.randn(1, 3, 1, 1).cuda()), y.view(1, 1, 1))", "conv[0]",
         "2 classes, those of conv[0], made in line 13: nn.Conv2d(3, 2, 1)"),
    ],
)  # fmt: skip
def test_the_layer_to_change_is_named(line: str, name: str, says: str) -> None:
    """With its line, what shares its weight."""
    observations = run_cell(LAYERS + line).shown.observations
    (bound,) = [item for item in observations if item.kind == "bound"]
    assert (bound.facts["holder"], bound.text) == (name, says)


@pytest.mark.parametrize(("outputs", "says"), [(5, ", and net.1 has the same size"), (6, "")])
def test_the_head_of_a_tables_size_is_named(outputs: int, says: str) -> None:
    """What has to grow with the table."""
    made = f"net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, {outputs})).cuda()"
    code = f"import torch\nfrom torch import nn\n{made}\nnet(torch.tensor([8]).cuda())"
    (bound,) = [item for item in run_cell(code).shown.observations if item.kind == "bound"]
    assert bound.text == f"5 rows, set in line 3: nn.Embedding(5, 4){says}"
    assert bound.facts["holder"] == "net[0]"
    assert [(item.line, item.text) for item in bound.sources] == [(3, made)]


@pytest.mark.parametrize(
    ("made", "says", "tested"),
    [
        # Nobody knows what the next batch has: what is said is said of this one.
        (OWN.format("[range(n % 10 + 1) for n in range(60)]", "len(self.targets[at])"),
         "the 30 labels of this batch run from 1 to 10", "copies of this batch"),
        ("ds = TensorDataset(torch.randn(60, 4), torch.arange(60) % 10 + 1)",
         "the labels of ds run from 1 to 10", "copies of this batch"),
        ("ds, y = [], torch.tensor([n % 10 + 1 for n in range(60)]).cuda()\n"
         "F.cross_entropy(head(torch.zeros(60, 4).cuda()), y)",
         "the 60 labels run from 1 to 10", "copies"),
    ],
)  # fmt: skip
def test_a_reading_says_what_it_was_judged_on(made: str, says: str, tested: str) -> None:
    """One batch of a loader, the whole column of a data set, or one tensor."""
    report = run_cell(SETUP.format(made=made, outputs=10, shuffle=False), fast=False).shown
    assert report.limits == ()
    assert [hint.text.partition(":")[0] for hint in report.hints] == [says]
    assert report.hints[0].tried
    assert f"Tested on {tested}: it runs." in " ".join(report.to_text().split())


# --- the parts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        ([3, 1], ([0, 1], [3, 1])),
        ([[3, 4], [], [1]], ([0, 0, 2], [3, 4, 1])),
        ([torch.tensor([3, 4]), 5], ([0, 0, 1], [3, 4, 5])),
        ([torch.tensor([[3], [4]])], ([0, 0], [3, 4])),
        ([torch.tensor([3.0])], None),
        (torch.tensor([[3, 4], [1, 2]]), ([0, 0, 1, 1], [3, 4, 1, 2])),
        (np.array([3, 1], dtype="uint8"), ([0, 1], [3, 1])),
        (np.array([3, 1], dtype="uint64"), None),
        (np.array([3.0, 1.0]), None),
        (torch.tensor([3.0]), None),
        (torch.tensor(3), None),
        (torch.tensor([], dtype=torch.int64), None),
        ([3, 1.0], None),
        ([[3, True]], None),
        ([True], None),
        ([], None),
        ((3, 1), None),
    ],
)
def test_whole_numbers_of_a_column_and_the_row_of_each(column: Any, wanted: Any) -> None:
    found = dataset_column._whole_numbers(column)
    assert (None if found is None else tuple(it.tolist() for it in found)) == wanted


@pytest.mark.parametrize(
    ("column", "is_read"),
    [
        ([3, 1, 2], True), ([3, 1, 2, 0], False), ([[3, 1], [2]], True), ([[3, 1], [2, 0]], False),
        (torch.arange(3), True), (torch.arange(4), False),
    ],
)  # fmt: skip
def test_columns_of_too_many_values_are_not_read(
    column: Any, *, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_column, "_MAX_VALUES", 3)
    assert (dataset_column._whole_numbers(column) is not None) is is_read
    if type(column) is list:
        assert bool(arrow({"ids": ("int64", column)}, None)) is (len(column) <= 3)


@pytest.mark.parametrize(
    ("samples", "columns"),
    [
        ([(1, 2), (3, 4)], [(0, [1, 3]), (1, [2, 4])]),
        ([[1], [2]], [(0, [1, 2])]),
        ([{"x": 1, "y": 2}, {"x": 3, "y": 4}], [("x", [1, 3]), ("y", [2, 4])]),
        ([(1, 2), (3,)], [(0, [1, 3])]),
        ([{"x": 1, "y": 2}, {"x": 3}], [("x", [1, 3])]),
        ([{"x": 1, "y": 2}, {"y": 3}], [("y", [2, 3])]),
        ([(1,), [2], (3,)], [(0, [1, 3])]),
        ([5, 6], []),
    ],
)
def test_columns_of_a_list_of_samples(samples: list[Any], columns: list[Any]) -> None:
    found = list(dataset_column._of_samples(samples))
    assert found == columns


def stored(values: dict[str, tuple[str, list[Any]]], order: list[int] | None) -> dict[str, Any]:
    """Return the attributes of a table with these types and values, in an order of rows."""

    def column(kind: str, items: list[Any]) -> Any:
        class Column:
            type = kind
            __len__ = lambda self: len(items)
            to_pylist = lambda self: list(items)

        return Column()

    made = {name: column(*item) for name, item in values.items()}
    table = SimpleNamespace(column_names=list(values), column=made.__getitem__)
    rows = None if order is None else SimpleNamespace(column=lambda at: column("int64", order))
    return {"_data": table, "_indices": rows}


def arrow(values: dict[str, tuple[str, list[Any]]], order: list[int] | None) -> list[Any]:
    """Return the columns of such a table."""
    return list(dataset_column._of_arrow(stored(values, order)))


def test_columns_of_a_table_are_in_the_order_of_its_rows() -> None:
    columns = {"label": ("int64", [7, 8, 9]), "text": ("string", ["a", "b", "c"])}
    assert arrow(columns, None) == [("label", [7, 8, 9])]
    assert arrow(columns, [2, 0]) == [("label", [9, 7])]
    assert arrow({"ids": ("list<item: int32>", [[1], [2]])}, None) == [("ids", [[1], [2]])]
    assert arrow({"ids": ("struct<a: int32>", [{}])}, None) == []
    assert list(dataset_column._of_arrow({})) == []


def test_where_a_dataset_keeps_its_columns() -> None:
    def keys(dataset: Any) -> list[Any]:
        return [*dataset_column._columns(dataset)]

    table = type("Dataset", (), {"__module__": "datasets.arrow_dataset"})()
    vars(table).update(stored({"label": ("int64", [7])}, None), y=[1])
    assert keys(table) == ["label"]
    assert keys(data_set(y=[1], x=[2], ids=3)) == ["y", "ids"]
    assert keys(TensorDataset(torch.ones(1), torch.ones(1))) == [0, 1]
    assert keys(type("Mine", (TensorDataset,), {})(torch.ones(1))) == []
    assert keys([(1, 2, 3)]) == [0, 1, 2]
    assert keys([]) == keys(data_set()) == []


class ClassLabel:
    def __init__(self, names: object) -> None:
        self.names = names


def data_set(**own: object) -> SimpleNamespace:
    return SimpleNamespace(**own)


@pytest.mark.parametrize(
    ("own", "classes"),
    [
        ({"classes": ["a", "b"]}, 2),
        ({"classes": ("a",)}, 1),
        ({"classes": 3}, None),
        ({"_info": data_set(features={"y": ClassLabel(["a", "b", "c"]), "x": 1})}, 3),
        ({"_info": data_set(features={"y": ClassLabel(["a"]), "z": ClassLabel(["b"])})}, None),
        ({"_info": data_set(features={"y": ClassLabel(None)})}, None),
        ({"_info": data_set(features={})}, None),
        ({}, None),
    ],
)
def test_how_many_classes_a_dataset_names(own: dict[str, Any], classes: int | None) -> None:
    assert dataset_column._classes(data_set(**own)) == classes
