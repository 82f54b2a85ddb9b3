"""The public interface as an outside reader takes it: names, JSON types, and what stays alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import cudalens
from cudalens import DeviceIndexError, GuardRegistrationError
from cudalens.__main__ import main

pytestmark = pytest.mark.usefixtures("sim")


def cuda(*values: Any) -> Tensor:
    return torch.tensor(values, device="cuda")


class Net(nn.Module):
    """A body and a head, so that graph nodes have module paths."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.body(rows).relu())


def report_of(run: Callable[[], object], **options: Any) -> dict[str, Any]:
    """The JSON of what a checked block that fails reports."""
    with pytest.raises(RuntimeError), cudalens.check(**options) as session:
        run()
    assert session.report is not None
    return json.loads(session.report.to_json())


def one_based() -> None:
    """Labels 1 … 10 for ten classes; the first 10 stands at position 17."""
    y = torch.arange(32) % 9 + 1
    y[17] = y[20] = y[21] = 10
    y, rows, net = y.to("cuda"), torch.ones(32, 4, device="cuda"), Net().to("cuda")
    logits = net(rows)
    F.cross_entropy(logits, y)


def wrong_shapes() -> None:
    torch.ones(2, 3, device="cuda") @ torch.ones(4, 5, device="cuda")


def written_over() -> None:
    value = torch.ones(3, device="cuda", requires_grad=True).exp()
    value += 1
    value.sum().backward()


def changed_labels() -> None:
    labels, net = cuda(0, 1), Net().to("cuda")
    loss = F.nll_loss(net(torch.ones(2, 4, device="cuda")).log_softmax(1), labels)
    labels.data.fill_(50)
    loss.backward()


def logarithm() -> None:
    cuda(1.0, -1.0).log()


# --- the report as JSON --------------------------------------------------------------------------

TEXT, NUMBER = (str, type(None)), (int, type(None))
VALUE = (int, float, str, bool, type(None))
LINE = {"line": NUMBER, "text": TEXT}
SPAN = LINE | {"file": TEXT, **dict.fromkeys(("cell", "end_line", "column", "end_column"), NUMBER)}
SUMMARY = {
    **dict.fromkeys(("min", "max", "mean"), VALUE),
    "nan": NUMBER,
    "inf": NUMBER,
    "unique": (list, type(None)),
    "histogram": {"edges": [VALUE], "counts": [(int,)]},
}
NODE = {
    **dict.fromkeys(("name", "op", "dtype", "device", "module_path"), TEXT),
    "id": (str,),
    "role": (str,),
    "shape": [(int,)],
    "source": LINE,
}
SHAPE: dict[str, Any] = {
    **dict.fromkeys(
        ("kind", "certainty", "phase", "headline", "headline_own", "explanation"), (str,)
    ),
    **dict.fromkeys(("argument", "expression", "module_path", "device_text"), TEXT),
    "schema_version": (int,),
    "prevented": (bool,),
    "context_usable": (bool, type(None)),
    "op": {"name": TEXT, "overload": TEXT, "api": TEXT},
    "offenders": {
        "count": NUMBER,
        "total": NUMBER,
        "first": [{"position": [(int,)], "value": VALUE, "sample": NUMBER}],
    },
    "bounds": {"min": VALUE, "max": VALUE, "also_allowed": [VALUE], "text": TEXT},
    "source": SPAN,
    "forward_source": SPAN,
    "frames": [LINE | {"file": TEXT, "function": TEXT, "is_user": (bool,)}],
    "replay": {"outcome": (str,), "exception": TEXT, "message": TEXT, "reason": TEXT},
    "tensors": [
        {
            **dict.fromkeys(("argument", "expression", "grad_fn"), TEXT),
            "shape": [(int,)],
            "dtype": (str,),
            "device": (str,),
            "stride": [(int,)],
            "requires_grad": (bool, type(None)),
            "summary": SUMMARY,
        }
    ],
    "graph": {
        "nodes": [NODE],
        "edges": [{"from": (str,), "to": (str,), "input": (int,)}],
        "focus": TEXT,
        "total_nodes": NUMBER,
    },
    "provenance": [{"op": TEXT, "source": LINE, "note": TEXT}],
    "history": [{"seq": (int,), "op": (str,), "shapes": TEXT, "source": LINE}],
    "hints": [
        {
            "text": (str,),
            "fix": TEXT,
            "rule": (str,),
            "tried": (bool, type(None)),
            "at": SPAN,
        }
    ],
    "environment": {
        **dict.fromkeys(("cudalens", "python", "torch"), (str,)),
        "cuda": TEXT,
        "device": TEXT,
        "simulated": (bool,),
        "rank": NUMBER,
    },
    "timing": {"checked_ops": (int,), "recorded_ops": (int,), "diagnose_s": (float, int)},
    "deferred": (bool,),
    "limits": [(str,)],
}


def strays(value: Any, shape: Any, at: str = "report") -> list[str]:
    """Where ``value`` has not the keys and types of ``shape``; an object may be ``null``."""
    if isinstance(shape, tuple):
        is_fit = isinstance(value, shape) and (bool in shape or not isinstance(value, bool))
        return [] if is_fit else [f"{at}: {value!r}"]
    if value is None:
        return []
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{at} is no list"]
        return [line for item in value for line in strays(item, shape[0], f"{at}[]")]
    if missing := sorted(shape.keys() - value.keys()):
        return [f"{at} lacks {missing}"]
    return [line for key in shape for line in strays(value[key], shape[key], f"{at}.{key}")]


@pytest.mark.parametrize(
    ("run", "options", "kind"),
    [
        (one_based, {}, "device_assert"),
        (one_based, {"fast": True}, "device_assert"),
        (changed_labels, {}, "device_assert"),
        (wrong_shapes, {}, "host_error"),
        (written_over, {}, "autograd_error"),
        (logarithm, {"nan": True}, "nonfinite"),
    ],
)
def test_every_kind_has_every_key_with_its_type(
    run: Callable[[], object], options: dict[str, Any], kind: str
) -> None:
    """Down to the last nested key; no key is added at the top."""
    data = report_of(run, **options)
    assert data["kind"] == kind
    assert data.keys() == SHAPE.keys()
    assert strays(data, SHAPE) == []


@pytest.mark.parametrize("run", [one_based, changed_labels, wrong_shapes, written_over])
def test_the_graph_names_only_its_own_nodes(run: Callable[[], object]) -> None:
    """Edges and focus lead to nodes that are there, and the focus is what failed."""
    graph = report_of(run)["graph"]
    nodes = {node["id"]: node["role"] for node in graph["nodes"]}
    assert {edge[end] for edge in graph["edges"] for end in ("from", "to")} <= nodes.keys()
    assert graph["focus"] is None or nodes[graph["focus"]] == "failed"


def test_the_documented_example_reads_as_documented() -> None:
    """Labels one too high, from the headline to the hint."""
    data = report_of(one_based)
    assert data["schema_version"] == 2
    assert data["headline"] == "target[17] = 10 is outside the 10 classes of input"
    assert data["headline_own"] == "y[17] = 10 is outside the 10 classes of logits"
    assert data["offenders"]["first"] == [
        {"position": [place], "value": 10, "sample": None} for place in (17, 20, 21)
    ]
    assert data["bounds"]["text"] == "0 … 9 or -100 (ignore_index)"
    assert data["replay"]["message"] == "Target 10 is out of bounds."
    names = {item["argument"]: item["expression"] for item in data["tensors"]}
    assert names == {"input": "logits", "target": "y"}
    assert data["hints"][0]["rule"] == "one_based_labels"
    assert "y - 1" in data["hints"][0]["fix"]
    assert {"head", "body"} <= {node["module_path"] for node in data["graph"]["nodes"]}


# --- options -------------------------------------------------------------------------------------


def test_a_negated_option_keeps_its_name_as_a_keyword() -> None:
    """``--no-sync`` is ``no_sync=True``, and ``no_sync=False`` is the default."""
    asked, usual = cudalens.check(no_sync=True, no_widgets=True), cudalens.check(no_sync=False)
    assert (asked.sync, asked.widgets) == (False, False)
    assert (usual.sync, usual.widgets) == (True, True)


def test_a_negated_option_that_does_not_exist_is_refused() -> None:
    """A ``no_`` before any word is not a way past the check of names."""
    with pytest.raises(TypeError, match="bogus"):
        cudalens.check(no_bogus=True)


def test_a_wrong_option_on_the_command_line_names_no_magic(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Whoever types ``cudalens --bogus`` is not sent to ``%cudacheck``."""
    assert main(["--bogus", str(tmp_path / "script.py")]) == 2
    said = capsys.readouterr().err
    assert "--bogus" in said
    assert "%" not in said


# --- findings and errors -------------------------------------------------------------------------


def test_findings_that_are_alike_are_listed_once_with_their_number() -> None:
    """Three times the same and once another: two entries, in the order of their first."""
    table = torch.ones(5, 2, device="cuda")
    with cudalens.check() as session:
        for value in (7, 8, 7, 7, 9):
            try:
                F.embedding(cuda(value), table)
            except DeviceIndexError:
                continue
    assert session.report is not None
    told = session.report.explanation
    assert "4 more" in told
    listed = [f"= {value} is outside" for value in (8, 7, 9)]
    assert [told.count(item) for item in listed] == [1, 1, 1]
    assert sorted(listed, key=told.index) == listed
    assert "(2 times)" in told


def in_forward(error: Exception) -> None:
    class Raising(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            raise error

    nn.Sequential(Raising())(torch.ones(1))


def in_gradient_hook(error: Exception) -> None:
    def hook(grad: Tensor) -> None:
        raise error

    leaf = torch.ones(1, device="cuda", requires_grad=True)
    leaf.register_hook(hook)
    (leaf * 2).sum().backward()


def in_collate(error: Exception) -> None:
    def collate(samples: list[int]) -> None:
        raise error

    next(iter(DataLoader([1, 2], collate_fn=collate)))  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [in_forward, in_gradient_hook, in_collate])
@pytest.mark.parametrize("kind", [RuntimeError, ValueError, KeyError])
def test_the_users_own_exception_inside_a_call_of_torchs_is_foreign(
    place: Callable[[Exception], None], kind: type[Exception]
) -> None:
    """Torch's frames lie around it, yet it is the user who raised it."""
    error = kind("mine")
    with pytest.raises(kind) as caught, cudalens.check() as session:
        place(error)
    assert caught.value is error
    assert session.report is None
    assert not hasattr(error, "__notes__")
    assert not hasattr(error, "__cudalens_report__")


@pytest.mark.parametrize("op", [3, None, len])
def test_what_is_no_op_gets_no_guard(op: Any) -> None:
    """The refusal is the documented exception, in one line."""
    with pytest.raises(GuardRegistrationError, match="namespace::op"):
        cudalens.register_guard(op, lambda: None)
