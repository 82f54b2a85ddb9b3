"""The public functions behind the ops: each op of a table has one, and each one is there."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch

from cudalens.core.api_names import BACKWARD, api_names, api_names_of_all, stem_of
from cudalens.core.device_asserts import assert_table
from cudalens.core.text_files import packaged
from cudalens.guards import catalogue_rows
from tests.releases import release

GUARDED = {op for row in catalogue_rows() for op in row["op"]}
ASSERTING = {item.rpartition(":")[0] for row in assert_table() for item in row["ops"]}
NAMES = {name for names in packaged("api_names.json").values() for name in names}
HOMES = {"F": "nn.functional", "nn": "nn", "torch": "", "Tensor": "Tensor"}


@pytest.mark.parametrize("op", sorted(GUARDED | ASSERTING))
def test_each_op_of_a_table_has_a_function(op: str) -> None:
    assert api_names(op)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_function_is_one_of_torchs(name: str) -> None:
    function = name.removeprefix(BACKWARD)
    if function in ("x[i]", "x[i] = y"):
        return
    home, _, rest = function.partition(".")
    if rest in ("grouped_mm", "scaled_grouped_mm") and release() < (2, 10):
        pytest.skip("new in torch 2.10")
    if home == "torch" and "symm_mem" in rest and release() < (2, 8):
        pytest.skip("torch.ops.symm_mem has no all_to_all_vdev_2d before torch 2.8")
    found = attrgetter(".".join(filter(None, (HOMES[home], rest))))(torch)
    assert callable(found)


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("torch.Tensor.add_", "add_"),
        ("torch.Tensor.__setitem__", "setitem"),
        ("torch.Tensor.__iadd__", "iadd"),
        ("aten::index.Tensor", "index"),
        ("aten::index_put_", "index_put_"),
        ("aten::_softmax", "_softmax"),
        ("aten::__and__.Tensor", "and"),
        ("relu", "relu"),
        ("", ""),
    ],
)
def test_the_last_part_of_a_name(name: str, stem: str) -> None:
    assert stem_of(name) == stem


def test_the_functions_of_an_op_with_and_without_namespace_and_overload() -> None:
    assert api_names("aten::embedding")[0] == "nn.Embedding"
    for name in ("index_put", "aten::index_put_", "aten::index_put.hacked_twin", "index_put_"):
        assert "x[i] = y" in api_names(name)
    assert api_names("mylib::lookup") == ()


def test_names_of_several_ops_begin_with_the_best_known() -> None:
    """Backward passes only where nothing else calls the op."""
    losses = ["aten::nll_loss_forward", "aten::nll_loss_backward", "aten::embedding"]
    assert api_names_of_all(losses)[:2] == ("F.cross_entropy", "nn.Embedding")
    assert not any(name.startswith(BACKWARD) for name in api_names_of_all(losses))
    assert api_names_of_all(losses[1:2])[0] == "backward of F.cross_entropy"
    assert api_names_of_all(["mylib::lookup"]) == ("mylib::lookup",)
    assert api_names_of_all(["aten::no_such_op"]) == ("no_such_op",)
