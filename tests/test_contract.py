"""The public interface as an outside reader takes it: names, JSON types, and what stays alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import cudalens
from cudalens.core.reported import report_beside
from tests import report_schema
from tests.blocks import cuda, report_of

pytestmark = pytest.mark.usefixtures("sim")


class Net(nn.Module):
    """A body and a head, so that graph nodes have module paths."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.body(rows).relu())


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


def logarithm_in_the_loss() -> None:
    """The plain watch for NaN stops where it reaches the loss, not at the logarithm."""
    x = torch.tensor([1.0, -1.0], device="cuda", requires_grad=True)
    x.log().sum().backward()


# --- the report as JSON --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "options", "kind"),
    [
        (one_based, {}, "device_assert"),
        (one_based, {"fast": True}, "device_assert"),
        (changed_labels, {}, "device_assert"),
        (wrong_shapes, {}, "host_error"),
        (written_over, {}, "autograd_error"),
        (logarithm_in_the_loss, {"nan": True}, "nonfinite"),
        (logarithm, {"nan": "strict"}, "nonfinite"),
    ],
)
def test_every_kind_has_every_key_with_its_type(
    run: Callable[[], object], options: dict[str, Any], kind: str
) -> None:
    """And its graph names no nodes but its own."""
    data = json.loads(report_of(run, RuntimeError, **options).to_json())
    assert data["kind"] == kind
    report_schema.validator().validate(data)
    graph = data["graph"]
    nodes = {node["id"]: node["role"] for node in graph["nodes"]}
    assert {edge[end] for edge in graph["edges"] for end in ("from", "to")} <= nodes.keys()
    assert graph["focus"] is None or nodes[graph["focus"]] == "failed"


def test_the_documented_example_reads_as_documented() -> None:
    data = json.loads(report_of(one_based).to_json())
    assert data["schema_version"] == 4
    assert data["headline_schema"] == "target[17] = 10 is outside the 10 classes of input"
    assert (
        data["headline"] == data["headline_own"] == "y[17] = 10 is outside the 10 classes of logits"
    )
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


# --- findings and errors -------------------------------------------------------------------------


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
    assert report_beside(error) is None
