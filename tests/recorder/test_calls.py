"""Facts on functions of torch's: which write, which view, which compute element by element."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cudalens.recorder.calls import (
    Api,
    Apis,
    Write,
    is_pointwise,
    writes_nothing,
    writes_of,
)

T: Any = Tensor


@pytest.mark.parametrize(
    ("func", "wanted"),
    [
        (torch.add, {"stem": "add", "is_positional": True, "may_write": False}),
        (torch.sum, {"is_positional": False, "makes_values": True}),
        (T.add_, {"is_in_place": True, "may_write": True, "is_positional": True}),
        (T.__iadd__, {"is_in_place": True}),
        (T.__invert__, {"is_in_place": False}),
        (T.__setitem__, {"is_in_place": True, "may_write": True}),
        (T.view, {"is_view": True, "makes_values": False, "is_in_place": False}),
        (torch.empty, {"makes_values": False}),
        (torch.zeros, {"makes_values": True}),
        (T.backward, {"is_backward": True, "makes_values": False, "may_write": False}),
        (T.shape.__get__, {"is_quiet": True, "stem": "shape"}),
        (T.data.__get__, {"is_quiet": False, "is_view": True}),
        (T.data.__set__, {"is_in_place": True, "is_quiet": False}),
        (T.requires_grad.__set__, {"is_quiet": True}),
        (T.__format__, {"is_shown": True}),
        (torch.ops.aten.add.Tensor, {"stem": "add", "is_foreign": False}),
        (F.relu, {"stem": "relu", "is_foreign": False}),
    ],
)
def test_facts_on_a_function(func: Any, wanted: dict[str, Any]) -> None:
    api = Api(func)
    assert {name: bool(getattr(api, name)) if name != "stem" else api.stem for name in wanted} == (
        wanted
    )


def test_ops_of_other_libraries_are_foreign() -> None:
    library = torch.library.Library("cudalens_foreign", "DEF")
    try:
        library.define("twice(Tensor x) -> Tensor")
        assert Api(torch.ops.cudalens_foreign.twice).is_foreign
        assert Api(torch.ops.cudalens_foreign.twice.default).stem == "twice"
    finally:
        library._destroy()


@pytest.mark.parametrize(
    ("stem", "is_it"),
    [("add", True), ("__add__", True), ("rdiv", True), ("mm", False), ("nothing", False)],
)
def test_element_by_element(stem: str, is_it: bool) -> None:
    assert is_pointwise(stem) is is_it


@pytest.mark.parametrize(
    ("name", "is_it"),
    [("add", True), ("add_", False), ("batch_norm", False), ("nothing", False), ("mm", True)],
)
def test_what_writes_to_no_argument(name: str, is_it: bool) -> None:
    assert writes_nothing(name) is is_it


def test_facts_are_read_once() -> None:
    apis = Apis()
    assert apis[torch.add] is apis[torch.add]
    assert apis[torch.add].name == "torch.add"


def test_what_a_write_to_a_view_writes_to() -> None:
    base: Any = object()
    view: Any = object()
    assert Write(view, base=base).target is base
    assert Write(view).target is view


X, W, M, V = torch.ones(4, 3), torch.ones(3), torch.zeros(3), torch.ones(3)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "is_it"),
    [
        (F.batch_norm, (X, M, V), {"training": True}, True),
        (F.batch_norm, (X, M, V), {}, False),
        (F.instance_norm, (X, M, V), {}, True),
        (F.instance_norm, (X, M, V, W, W, False), {}, False),
        (torch.cudnn_batch_norm, (X, W, W, M, V, True, 0.1, 1e-5), {}, True),
        (torch.cudnn_batch_norm, (X, W, W, M, V, False, 0.1, 1e-5), {}, False),
        (torch.miopen_batch_norm, (X, W, W, M, V, True, 0.1, 1e-5), {}, True),
        (torch.batch_norm_gather_stats, (X, M, V, M, V, 0.1, 1e-5, 4), {}, True),
        (torch.batch_norm_gather_stats_with_counts, (X, M, V, M, V, 0.1, 1e-5, V), {}, True),
        (torch.native_batch_norm, (X, W, W, None, None, True, 0.1, 1e-5), {}, None),
    ],
)
def test_running_statistics_that_a_call_writes_to(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_it: bool | None
) -> None:
    """Their versions do not tell."""
    api = Api(func)
    assert api.has_statistics
    found = writes_of(api, (), (), args, kwargs)
    assert [it.tensor() for it in found] == ([M, V] if is_it else [])
