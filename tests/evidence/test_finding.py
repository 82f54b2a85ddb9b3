"""What a guard's finding says of the data: rows of the dataset, places in the user's tensors."""

from __future__ import annotations

import ast
import os
import pickle
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from cudalens import Report
from cudalens.core import _python
from cudalens.core.report import Evidence
from cudalens.evidence.tensors import same_spot
from cudalens.render.screen import build, plain
from tests.blocks import report_of
from tests.hostcells import SETUP, run_cell
from tests.layers import MAY_IMPORT, PACKAGE

pytestmark = pytest.mark.usefixtures("sim")


def bad_batch(labels: Tensor, **options: Any) -> Report:
    """The report of the first batch whose labels are not below three."""

    def run() -> None:
        data = TensorDataset(torch.ones(len(labels), 3), labels)
        for scores, y in DataLoader(data, batch_size=8, **options):
            F.cross_entropy(scores.to("cuda"), y.to("cuda"))

    return report_of(run)


HEAD = "dataset item"
"""The head of the column; the page shows the source of the tests below as well."""


def test_each_bad_value_has_its_dataset_index() -> None:
    """In the JSON form and in the table; where the order is unknown neither has one."""
    labels = torch.arange(40) % 3
    labels[[17, 21, 22]] = 7
    torch.manual_seed(3)
    shuffled = bad_batch(labels, shuffle=True)
    assert shuffled.offenders.first
    assert all(item.sample in (17, 21, 22) for item in shuffled.offenders.first)
    ordered = bad_batch(labels)
    rows = [(item.position, item.sample) for item in ordered.offenders.first]
    assert rows == [((1,), 17), ((5,), 21), ((6,), 22)]
    html = ordered.to_html()
    assert HEAD in html
    assert all(f"<code>{row}</code>" in html or f">{row}<" in html for row in (17, 21, 22))


def test_a_value_of_no_loader_has_no_dataset_index() -> None:
    """The neighbour: the table then has no column for it."""
    scores, y = torch.ones(4, 3, device="cuda"), torch.full((4,), 7, device="cuda")
    report = report_of(lambda: F.cross_entropy(scores, y))
    assert {item.sample for item in report.offenders.first} == {None}
    assert HEAD not in report.to_html()


# --- one name for one thing --------------------------------------------------------------


def inputs_in_the_picture(call: Callable[[], object]) -> set[str]:
    graph = report_of(call, RuntimeError, nan="strict").graph
    given = {edge.src for edge in graph.edges if edge.dst == graph.focus}
    return {node.name for node in graph.nodes if node.id in given}


def test_inputs_in_the_picture_have_the_users_names() -> None:
    """An input without a name of the user's keeps the schema's, and so does what is further up."""
    table, ids = torch.zeros(5, 2, device="cuda"), torch.tensor([7], device="cuda")
    variance = -torch.ones(3, device="cuda")
    assert inputs_in_the_picture(lambda: F.embedding(ids, table)) == {"ids", "table"}
    assert inputs_in_the_picture(lambda: torch.sqrt(variance)) == {"variance"}
    assert inputs_in_the_picture(lambda: torch.sqrt(*[variance * 1])) == {"self"}


# --- what has left the recorder's ring ---------------------------------------------------


BEFORE = """
z, x = torch.ones(4, 3, device="cuda", requires_grad=True), torch.ones(3, requires_grad=True)
y, old = torch.zeros(4, device="cuda").long(), torch.full((4,), 9, device="cuda")
"""
MANY = "for _ in range(40): torch.ones(1) * 1\n"
CELLS = {
    "bad labels": f"labels = y + 9\n{MANY}F.cross_entropy(z, labels)",
    "bad in backward": f"loss = F.cross_entropy(z, y)\ny.data.fill_(9)\n{MANY}loss.backward()",
    "changed in place": f"e = x.exp()\ne += 1\n{MANY}e.sum().backward()",
    "freed": f"e = x.exp().sum()\ne.backward()\n{MANY}e.backward()",
}


def limits_of(code: str, max_ops: int) -> str:
    exec(f"{SETUP}{BEFORE}", names := dict[str, Any]())
    return " ".join(run_cell(code, names, fast=False, max_ops=max_ops).shown.limits)


@pytest.mark.parametrize("code", CELLS.values(), ids=CELLS)
def test_what_has_left_the_ring_is_said(code: str) -> None:
    """A short ring ends the search, and the report says so; a long one holds the origin."""
    assert "is not among the last 16 calls" in limits_of(code, 16)
    assert "is not among the last" not in limits_of(code, 4096)


def test_a_tensor_from_before_the_check_is_no_loss() -> None:
    """While nothing was dropped there is nothing to say."""
    assert "is not among the last" not in limits_of("F.cross_entropy(z, old)", 16)


# --- where a bad value lies in the user's own tensor, of which the op was given another shape -----


def labels_of(*shape: int) -> Tensor:
    """Zeros, but 11 in the last place but one."""
    found = torch.zeros(shape, dtype=torch.long)
    found.view(-1)[-2] = 11
    return found.to("cuda")


@pytest.mark.parametrize(
    ("shape", "own"),
    [((2, 6), "y[1, 4] = 11"), ((1, 2, 2, 3), "y[0, 1, 1, 1] = 11"), ((6, 2), "y[5, 0] = 11")],
)
def test_the_headline_points_into_the_users_tensor(shape: tuple[int, ...], own: str) -> None:
    """cross_entropy gives its op ``[N, 1, L]``: the JSON names that place, the headline his."""
    y = labels_of(*shape)
    scores = torch.zeros(shape[0], 11, *shape[1:], device="cuda")
    report = report_of(lambda: F.cross_entropy(scores, y))
    assert (build(report).headline[0].text, report.expression) == (own, None)
    assert report.offenders is not None and len(report.offenders.first[0].position) == 3
    (fact,) = (item for item in report.tensors if item.expression == "y")
    assert fact.bad_at is not None and y[fact.bad_at] == 11
    assert Report.from_dict(report.to_dict()) == report


def test_the_list_of_bad_values_points_into_the_users_tensor() -> None:
    y = torch.zeros(2, 6, dtype=torch.long, device="cuda")
    y[0, 1] = y[1, 4] = 11
    report = report_of(lambda: F.cross_entropy(torch.zeros(2, 11, 6, device="cuda"), y))
    assert "[1, 4]" in report.to_html()


def test_a_tensor_of_the_same_shape_needs_no_translation() -> None:
    scores, y = torch.zeros(6, 3, device="cuda"), labels_of(6)
    report = report_of(lambda: F.cross_entropy(scores, y))
    assert build(report).headline[0].text == "y[4] = 11"
    assert all(fact.bad_at is None for fact in report.tensors)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda y: F.one_hot(y, 5), "y[1, 1] = 11 is outside num_classes = 5"),
        (lambda y: F.one_hot(y + 1, num_classes=5), "(y + 1)[1, 1] = 12 is outside num_classes"),
        (lambda y: F.one_hot(y - 1), "(y - 1)[0, 0] = -1 is outside num_classes = 11"),
        (lambda y: F.one_hot(*(y, 5)), "y[1, 1] = 11 is outside num_classes = 5"),
        (lambda y: y.new_zeros(2, 3, 5).scatter_(2, y[..., None], 1), "y[..., None][1, 1, 0] = 11"),
    ],
    ids=["a variable", "a sum", "counted", "unpacked", "scatter_ itself"],
)
def test_one_hot_is_reported_with_its_own_arguments(
    call: Callable[[Tensor], object], says: str
) -> None:
    """Its ``scatter_`` gets an index of one more dimension, and a tensor that no one typed."""
    y = labels_of(2, 3)
    report = report_of(lambda: call(y))
    assert plain(build(report).headline).startswith(says)
    text = report.to_text(width=200)
    assert "with    index" not in text
    assert text.count("of 6 labels") == 1
    assert report.argument == "index"


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (torch.arange(6).view(2, 3), (1, 1)),
        (torch.arange(6).view(3, 2).t().contiguous().view(2, 3), None),
        (torch.arange(7), None),
        (torch.arange(6).view(2, 3).int(), None),
        (torch.arange(6).view(1, 6, 1), None),
    ],
)
def test_only_the_same_values_tell_the_place(own: Tensor, found: tuple[int, ...] | None) -> None:
    """Another order, number or dtype of values is another tensor; the same shape needs nothing."""
    assert same_spot(own, torch.arange(6).view(1, 6, 1), (0, 4, 0)) == found


LABELS = "z, y = torch.zeros(20, 10).cuda(), torch.arange(1, 11).repeat(2).cuda()\n"


def test_the_users_line_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its cell; what else is parsed is code of a fix."""
    texts: list[str] = []
    parse = _python._parsed

    def noted(text: str, mode: str) -> Any:
        texts.append(text)
        return parse(text, mode)

    monkeypatch.setattr(_python, "_parsed", noted)
    # No cell of another test, which the origin of the bound may look into, has this name.
    own = "scores_" + "of_this_test"
    code = f"{SETUP}{LABELS}{own} = z\nF.cross_entropy({own}, y)"
    outcome = run_cell(code, fast=False)
    assert (outcome.shown.expression, outcome.fixes) == ("y", [f"F.cross_entropy({own}, y - 1)"])
    assert sum(f"F.cross_entropy({own}, y)" in text for text in texts) == 1


def test_a_copied_report_keeps_texts_alone() -> None:
    """The syntax of an expression serves its diagnosis."""
    report = run_cell(f"{SETUP}{LABELS}F.cross_entropy(z, y)").shown
    assert [type(item.node) for item in report.tensors] == [ast.Name, ast.Name]
    copied = pickle.loads(pickle.dumps(report))
    assert copied == report
    assert [item.node for item in copied.tensors] == [None, None]


def _level(entry: str) -> int:
    """The layer of an entry of the package: one more than what it may import."""
    return 1 + max(map(_level, MAY_IMPORT[entry].split()), default=-1)


def test_a_finding_is_made_once_and_goes_up_twice() -> None:
    """To its report, and to the session."""
    climbs: list[tuple[str, str, str]] = []
    made: list[str] = []
    stack: list[tuple[FrameType, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        _, is_ours, path = frame.f_code.co_filename.partition(f"{PACKAGE}{os.sep}")
        name = frame.f_code.co_qualname
        if event == "call" and frame.f_code.co_name == "__init__":
            kind = type(frame.f_locals.get("self"))
            made.extend([kind.__name__] if kind in (Evidence, Report) else [])
        if is_ours:
            entry = path.partition(os.sep)[0]
            # The centre calls what it is handed, and the rehearsal device is torch to the rest.
            is_seen = entry not in ("core", "simulate")
            if event == "call" and is_seen and (stack or name == "Interceptor._handle"):
                above = stack[-1][1] if stack else entry
                if _level(entry) > _level(above):
                    climbs.append((above, entry, name))
                stack.append((frame, entry))
            elif event == "return" and stack and stack[-1][0] is frame:
                stack.pop()

    setup = (
        "net, x, y = nn.Linear(4, 10).cuda(), torch.zeros(11, 4).cuda(), torch.arange(11).cuda()\n"
    )
    sys.setprofile(note)
    try:
        outcome = run_cell(f"{SETUP}{setup}F.cross_entropy(net(x), y)", fast=False)
    finally:
        sys.setprofile(None)
    assert outcome.shown.kind == "device_assert"
    assert made == ["Evidence", "Report"]
    assert sorted(set(climbs)) == [
        ("guards", "evidence", "on_violation"),
        ("guards", "session", "CheckSession.add_finding"),
    ]


# --- of the call that the user made, and of no other --------------------------------------


def test_the_words_of_the_cpu_are_those_of_the_function_that_was_called() -> None:
    """``one_hot`` scatters; on the CPU it looks at its classes itself."""
    code = f"{SETUP}F.one_hot(torch.tensor([0, 4]).cuda(), num_classes=4)"
    replay = run_cell(code, fast=False).shown.replay
    assert replay.message == "Class values must be smaller than num_classes."
    assert replay.outcome == "raised"


def test_what_another_call_of_the_line_was_given_is_no_input() -> None:
    code = (
        "skip = torch.ones(1, 2, 5, requires_grad=True) * 2\n"
        "low = torch.ones(1, 2, 2, requires_grad=True) * 2\n"
        "torch.cat([skip, F.interpolate(low, scale_factor=2)], 1)"
    )
    graph = run_cell(SETUP + code, fast=False).shown.graph
    assert [edge.input for edge in graph.edges if edge.dst == graph.focus] == [0, 1]


UNNAMED = """\
import torch
from torch.nn import functional as F
def loss(lg, **more): return F.cross_entropy(lg, *more.values())
y = torch.ones(2, 5, dtype=torch.long).cuda()
y[1, 4] = 3
loss(torch.zeros(2, 3, 5).cuda(), target=y)
"""


@pytest.mark.usefixtures("sim")
def test_a_target_that_its_line_does_not_name_has_the_users_shape() -> None:
    text = run_cell(UNNAMED).shown.to_text()
    assert "target[1, 4] = 3 is outside" in text
    assert "with target i64[2, 5], 1 bad" in " ".join(text.split())
