"""``%cudacheck explain`` and later cells, in a real shell: failures met without the magic."""

from __future__ import annotations

import ast
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import cudalens
from cudalens import simulate
from cudalens.evidence import lost_context
from cudalens.guards.process import PROCESS
from cudalens.session.explain import _Namespace, _tensors, _tree_of_cell, explain
from tests.builders import make_report
from tests.shells import Notebook

LINE = "Loss.cu:245: f: block: [0,0,0], thread: [0,0,0] Assertion `t >= 0 && t < n_classes` failed."
LOST = "CUDA error: device-side assert triggered"
DIES = """\
logits = torch.zeros(4, 3, device="cuda")
labels = torch.tensor([0, 1, 2, 3], device="cuda")
loss = F.cross_entropy(logits, labels)
loss.item()
"""


def shown(notebook: Notebook) -> str:
    """Return the text of the only report that the last cell showed."""
    assert len(notebook.shown) == 1
    return str(notebook.shown[0]["text/plain"])


def test_a_plain_cell_that_died_is_explained(notebook: Notebook) -> None:
    """Line, check, the cell's variables by metadata, and the next step; no value."""
    notebook.run("first = torch.ones(2, device='cuda'); del table, ids")
    failed = notebook.run(DIES)
    assert failed.error_in_exec is not None
    notebook.run("%cudacheck explain")
    text = shown(notebook)
    report = cudalens.last_report()
    assert (report.kind, report.certainty) == ("device_assert", "likely")
    assert report.context_usable is False
    assert report.device_text is not None and "t >= 0 && t < n_classes" in report.device_text
    assert report.headline_schema == (
        "F.cross_entropy(logits, labels) in line 3 is the only call of this cell that fits the "
        "assert: target: a label is neither one of the classes nor ignore_index"
    )
    assert report.op.api == "F.cross_entropy"
    assert report.source is not None and report.source.text == "loss.item()"
    assert (report.source.cell, report.source.line) == (3, 4)
    (suspect,) = (item for item in report.observations if item.kind == "suspect")
    line = "loss = F.cross_entropy(logits, labels)"
    places = [(at.cell, at.line, at.text, at.mark) for at in suspect.sources]
    assert places == [(3, 3, line, "likely here")]
    said = "F.cross_entropy(logits, labels) in line 3 is the only call of this cell that fits the"
    assert (suspect.text, dict(suspect.facts)) == (f"{said} assert", {"api": "F.cross_entropy"})
    rows = text.splitlines()
    assert any(row.startswith("    3 │") and row.endswith("◂ likely here") for row in rows)
    assert any(row.startswith("    4 │ loss.item()") for row in rows if "noticed here" in row)
    assert report.explanation.count("Next step: ") == 1
    assert report.to_markdown().count("likely here") == 1
    listed = [(item.expression, item.shape) for item in report.tensors]
    assert listed == [("loss", ()), ("logits", (4, 3)), ("labels", (4,))]
    assert all(item.summary.min is None for item in report.tensors)
    words = " ".join(text.split())
    assert "run %load_ext cudalens and %cudacheck on" in words
    assert "the real cause may be an earlier line" in report.explanation


SETUP = """\
import torch.nn as nn
bad, good = torch.tensor([9], device="cuda"), torch.tensor([1], device="cuda")
data, ints = torch.zeros(4, 3, device="cuda"), {9: 1}
words = nn.Embedding(4, 3).cuda()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(4, 3)
    def forward(self, x):
        return self.words(x)
net, both = Net().cuda(), nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2)).cuda()
def pick(x, i):
    return x[i]
"""


@pytest.mark.parametrize(
    ("code", "fits"),
    [
        ("x = data[bad]; x = x[0]", "data[bad]"),
        ("x = data[bad]; data[good]", None),
        ("x = data[bad]; ints[9]; data[1:]; data[data > 0]", "data[bad]"),
        ("x = pick(data, bad)", "x[i] inside pick(data, bad)"),
        ("x = pick(data, bad); data[good]", None),
        ("x = words(bad)", "words(bad)"),
        ("x = words(good); x = F.embedding(bad, words.weight)", None),
        ("x = net(bad)", "self.words(x) inside net(bad)"),
        ("x = both(bad)", "nn.Embedding inside both(bad)"),
        ("x = net(good); x = both(bad)", None),
    ],
)
def test_the_one_call_of_the_cell_that_fits_is_named(
    notebook: Notebook, code: str, fits: str | None
) -> None:
    notebook.run(SETUP)
    failed = notebook.run(f"{code}\nx.sum().item()\ndata[bad]; words(bad)")
    assert failed.error_in_exec is not None
    notebook.run("%cudacheck explain")
    report = cudalens.last_report()
    assert (report.kind, report.certainty) == ("device_assert", "likely")
    if fits is None:
        assert "asserted on the device" in report.headline_schema
        assert report.op.name is None
    else:
        first = f"{fits} in line 1 is the only call of this cell that fits the assert: indices: "
        assert report.headline_schema.startswith(first)
        assert report.op.name is not None
    assert any(item.kind == "suspect" for item in report.observations) is (fits is not None)


def test_of_two_losses_none_is_named(notebook: Notebook) -> None:
    notebook.run(DIES.replace("loss.item()", "F.nll_loss(logits, labels)\nloss.item()"))
    notebook.run("%cudacheck explain")
    report = cudalens.last_report()
    assert report.op.name is None
    assert report.headline_schema.startswith("F.cross_entropy or F.nll_loss")


def test_a_host_error_is_explained_and_takes_no_assertion(notebook: Notebook) -> None:
    """The device lives: its tensors can be read, and what was printed belongs to a lost context."""
    notebook.run("a = torch.ones(2, 3, device='cuda')\na @ a")
    notebook.run("%cudacheck explain")
    assert "cannot be multiplied" in shown(notebook)
    report = explain(notebook.names, sys.last_value, LINE)
    assert report is not None and report.context_usable is True and report.device_text is None


def test_after_an_explained_failure_later_cells_get_one_line(notebook: Notebook) -> None:
    notebook.run(DIES)
    notebook.run("%cudacheck explain")
    notebook.run("%cudacheck on")
    later = notebook.run("torch.ones(2, device='cuda')")
    assert later.error_in_exec is not None
    assert notebook.shown == []
    said = (notebook.out + notebook.err).splitlines()
    lines = [line for line in said if line.startswith("cudalens:")]
    assert len(lines) == 1
    assert "the CUDA context was lost to a device-side assert" in lines[0]
    assert "restart the kernel" in lines[0]


@pytest.mark.parametrize("how", ["%cudacheck on", "%%cudacheck"])
def test_later_cells_get_one_line(notebook: Notebook, how: str, sim: simulate.Simulation) -> None:
    """Under ``on`` and under the magic, until the device lives again."""
    magic = f"{how}\n" if how.startswith("%%") else ""
    notebook.run("1" if magic else how)
    kernel = f"from cudalens import simulate\nsimulate.current().device_assert('my', {LINE!r})\n"
    first = notebook.run(f"{magic}{kernel}x = torch.ones(2, device='cuda')\nx + 1")
    assert first.error_in_exec is not None
    assert len(notebook.shown) == 1
    for _ in range(2):
        again = notebook.run(f"{magic}torch.ones(2, device='cuda')")
        assert again.error_in_exec is not None
        assert notebook.shown == []
        assert (notebook.out + notebook.err).count("the CUDA context was lost to") == 1
    assert notebook.run(f"{magic}torch.ones(2)").error_in_exec is None
    assert notebook.out.count("cudalens") == 0
    sim.reset()
    assert notebook.run(f"{magic}torch.ones(2, device='cuda') + 1").error_in_exec is None
    notebook.run(f"{magic}{kernel}x = torch.ones(2, device='cuda')\nx + 1")
    assert len(notebook.shown) == 1
    assert PROCESS.lost is not None


@pytest.mark.parametrize("printed", [LINE, ""])
def test_what_cuda_printed_is_used_where_nothing_else_tells(
    notebook: Notebook, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU keeps no text of its own; the shell's stream has it, or nobody."""
    notebook.run(DIES)
    monkeypatch.setattr("cudalens.session.explain.rehearsed_fault", lambda: None)
    report = explain(notebook.names, sys.last_value, printed)
    assert report is not None and report.device_text == (printed or None)
    assert ("a label is neither one of the classes" in report.headline_schema) == bool(printed)


def test_what_the_exception_says_goes_before_what_was_printed(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream of a shell has the assertions of every process; the exception those of its own."""
    notebook.run(DIES)
    error = sys.last_value
    monkeypatch.setattr("cudalens.session.explain.rehearsed_fault", lambda: None)
    error.args = (f"{error.args[0]}\n{LINE}",)
    report = explain(notebook.names, error, LINE.replace("245", "9"))
    assert report is not None and report.device_text == LINE
    assert PROCESS.last is report
    assert explain(notebook.names, error) is report  # of the device that it ended


def test_there_is_nothing_to_explain_without_an_exception_of_torchs() -> None:
    for error in (None, ValueError("mine")):
        assert explain({}, error) is None
    report = make_report()
    assert explain({}, cudalens.DeviceIndexError("found", report)) is report
    other = ValueError("mine")
    other.report = 3  # type: ignore[attr-defined]
    assert explain({}, other) is None


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


@pytest.mark.parametrize("text", ["mat1 and mat2 shapes cannot be multiplied", LOST])
def test_the_device_that_was_lost_before_explains_the_errors_of_the_device_alone(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = make_report(context_usable=False)
    monkeypatch.setattr(lost_context, "end", lambda: earlier)
    monkeypatch.setattr(lost_context, "is_lost", lambda facts: LOST in facts.message)
    monkeypatch.setattr("cudalens.session.explain.is_torch_error", lambda error: True)
    assert (explain({}, raised(RuntimeError(text))) is earlier) is (text == LOST)


@pytest.mark.parametrize("is_of_another", [True, False])
def test_what_another_process_tells_is_no_loss_of_this_one(
    is_of_another: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered: list[object] = []
    monkeypatch.setattr(lost_context, "is_of_another", lambda error: is_of_another)
    monkeypatch.setattr(lost_context, "remember", remembered.append)
    monkeypatch.setattr("cudalens.session.explain.is_torch_error", lambda error: True)
    report = explain({}, raised(RuntimeError(LOST)))
    assert report is not None and report is PROCESS.last
    assert report.headline.startswith("no device of this process has failed") is is_of_another
    assert remembered == ([] if is_of_another else [report])


def test_an_error_without_a_line_of_the_user_s_has_no_cell() -> None:
    assert _tree_of_cell(RuntimeError("from nowhere")).body == []
    tree = _tree_of_cell(raised(RuntimeError("here")))
    assert "raised" in [getattr(item, "name", None) for item in tree.body]
    assert "Part" not in [getattr(item, "name", None) for item in tree.body]


def test_a_torch_function_of_the_user_s_sees_no_call_of_the_explanation(
    notebook: Notebook,
) -> None:
    notebook.run(
        "seen = []\n"
        "class Own(torch.Tensor):\n"
        "    @classmethod\n"
        "    def __torch_function__(cls, func, types, args=(), kwargs=None):\n"
        "        seen.append(func)\n"
        "        return super().__torch_function__(func, types, args, kwargs or {})\n"
        "x = torch.ones(2, 3).as_subclass(Own)"
    )
    notebook.run("x @ x")
    notebook.run("%cudacheck explain")
    assert "x and x shapes cannot be multiplied (2x3 and 2x3)" in shown(notebook)
    assert len(notebook.names["seen"]) == 1


# --- the objects that a cell's names stand for ---------------------------------------------------


class Part(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def node(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def test_the_classes_of_an_object_are_those_it_inherits_from() -> None:
    objects = _Namespace({"part": Part(), "number": 3, "torch": torch, "F": F, "none": None})
    assert objects.classes(node("part")) == ["Part", "Module", "object"]
    assert objects.classes(node("number")) == ["int", "object"]
    for unknown in ("missing", "part(number)", "torch", "F", "none"):
        assert objects.classes(node(unknown)) is None


def test_the_parts_of_an_object_are_those_of_a_module() -> None:
    net = nn.Sequential(nn.Embedding(3, 2), Part())
    objects = _Namespace({"net": net, "number": 3})
    assert objects.parts(node("net")) == ["Sequential", "Embedding", "Part"]
    assert objects.parts(node("net[0]")) == ["Embedding"]
    assert objects.parts(node("number")) == []
    assert objects.parts(node("missing")) == []


def helper(x: Tensor) -> Tensor:
    return x


def test_the_definition_of_an_object_is_a_users_function_or_class() -> None:
    twice = nn.Sequential(Part(), Part(), nn.ReLU())
    names = {"helper": helper, "twice": twice, "relu": F.relu, "method": Part().forward}
    objects = _Namespace(names)

    def found(text: str) -> list[str]:
        return [getattr(item, "name", "") for item in objects.definitions(node(text))]

    assert found("helper") == ["helper"]
    assert found("twice") == ["Part"]
    for other in ("relu", "method", "missing"):
        assert found(other) == []


@pytest.mark.usefixtures("sim")
def test_tensors_are_those_of_the_gpu_that_a_cell_mentions() -> None:
    there, here = torch.ones(2, 3, device="cuda"), torch.ones(2, 3)
    names = {"x": there, "other": there, "_": there, "here": here, "number": 3}
    found = _tensors(names, ast.parse("f(x, _, here, number)\ndel missing"))
    assert [(item.expression, item.shape) for item in found] == [("x", (2, 3))]
