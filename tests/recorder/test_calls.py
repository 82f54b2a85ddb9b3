"""Facts on functions of torch's: which write, which view, which compute element by element."""

from __future__ import annotations

from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cudalens.recorder.calls import (
    Api,
    Apis,
    KeyedWrite,
    Recorded,
    Write,
    divisor_of,
    is_pointwise,
    keyed_write_of,
    meta_of,
    numbers_of,
    operand_of,
    shows_argument,
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
        (T.float, {"is_view": True, "makes_values": True}),
        (T.dim_order, {"forgets": True, "is_special": True}),
        (torch.empty, {"makes_values": False}),
        (torch.zeros, {"makes_values": True}),
        (T.backward, {"is_backward": True, "makes_values": False, "may_write": False}),
        (T.shape.__get__, {"is_quiet": True, "stem": "shape"}),
        (T.data.__get__, {"is_quiet": False, "is_view": True}),
        (T.data.__set__, {"is_in_place": True, "is_quiet": False}),
        (T.requires_grad.__set__, {"is_quiet": True}),
        (T.__format__, {"is_shown": True}),
        (T.__iter__, {"is_in_place": False}),
        (T.grad.__delete__, {"is_quiet": True, "stem": "grad"}),
        (T.requires_grad.__set__, {"freezes": True}),
        (T.requires_grad.__get__, {"freezes": False}),
        (torch.ops.profiler._record_function_exit, {"is_foreign": False, "is_quiet": True}),
        (torch.ops.aten.add.Tensor, {"stem": "add", "is_foreign": False}),
        (torch.ops.prims.add.default, {"is_foreign": False, "is_quiet": False}),
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
        assert not Api(torch.ops.cudalens_foreign.twice).is_quiet
        library.define("batch_norm(Tensor x) -> Tensor")
        assert not Api(torch.ops.cudalens_foreign.batch_norm).has_statistics
    finally:
        library._destroy()


def test_ops_that_guards_put_into_compiled_code_are_nobodys() -> None:
    library = torch.library.Library("cudalens", "FRAGMENT")
    try:
        library.define("test_twice(Tensor x) -> Tensor")
        assert Api(torch.ops.cudalens.test_twice).is_quiet
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


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "wanted"),
    [
        (T.masked_fill_, (X, X > 0, 2.0), {}, 2.0),
        (T.masked_fill_, (X, X > 0, True), {}, True),
        (T.masked_fill_, (X, X > 0, "2"), {}, None),
        (T.index_add_, (X, 0, torch.tensor([0]), 3), {}, None),
        (T.index_put_, (X, (torch.tensor([0]),), 3.0), {}, 3.0),
        (T.index_put_, (X, (torch.tensor([0]),), 3.0, False), {}, 3.0),
        (T.index_put_, (X, (torch.tensor([0]),), 3.0, True), {}, None),
        (T.index_put_, (X, (torch.tensor([0]),), 3.0), {"accumulate": True}, None),
    ],
)
def test_what_replaces_elements(func: Any, args: Any, kwargs: Any, wanted: Any) -> None:
    """What is added to the old values does not replace them."""
    assert operand_of(Api(func), args, kwargs, None, ()) is wanted


@pytest.mark.parametrize(
    ("key", "is_known"),
    [
        (0, True),
        (None, True),
        (..., True),
        (slice(0, 2, 1), True),
        (slice(0, 2, torch.tensor(1)), False),
        (slice(torch.tensor(0), 2), False),
        ([0, 1], False),
    ],
)
def test_keys_that_are_kept(key: Any, is_known: bool) -> None:
    note = keyed_write_of(Api(T.__setitem__), (X, key, 2.0), {}, None, ())
    assert note == (KeyedWrite(2.0, (key,)) if is_known else 2.0)


def test_a_value_that_is_not_known_has_no_key() -> None:
    assert keyed_write_of(Api(T.__setitem__), (X, 0, 1j), {}, None, ()) is None


def test_shape_and_dtype_where_a_tensor_says_them() -> None:
    assert meta_of(X) == ((4, 3), torch.float32)
    assert meta_of(torch.nested.nested_tensor([W, W[1:]])) == (None, None)


def test_where_a_view_begins_in_its_base() -> None:
    def layout(tensor: Tensor) -> Any:
        note = keyed_write_of(Api(T.__setitem__), (tensor, 0, 2.0), {}, None, ())
        return note.layout

    assert layout(X) is None
    assert layout(X[1:]) == (3, (3, 1))
    whole = torch.ones(12)
    later = torch.empty(0).set_(whole.untyped_storage(), 4, (4, 2), (2, 1))
    assert layout(later[1:]) == (2, (2, 1))
    columns = torch.empty_strided((4, 3), (1, 4))
    assert layout(columns[1:]) is None


def test_numbers_that_are_all_there_are() -> None:
    api = Api(torch.where)
    assert numbers_of(api, (X > 0, 1, 2.5, False), {}, None, ()) == (1, 2.5, False)
    assert numbers_of(api, (X > 0, 1), {"other": 2}, None, ()) is None


@pytest.mark.parametrize("divisor", [2, 2.5, True, X, None])
def test_numbers_that_divide(divisor: Any) -> None:
    wanted = divisor if type(divisor) in (int, float) else None
    assert divisor_of(Api(torch.div), (X, divisor), {}, None, ()) is wanted
    assert divisor_of(Api(torch.div), (X,), {}, None, ()) is None


def test_results_that_show_the_argument() -> None:
    def shows(func: Any, result: Any, *tensors: Tensor) -> bool:
        return shows_argument(Api(func), (), {}, result, tensors)

    assert shows(T.reshape, X, X)
    assert shows(T.reshape, X[1:], X)
    assert not shows(T.reshape, X.clone(), X)
    assert shows(T.detach, X.clone(), X)
    with torch.inference_mode():
        assert shows(T.reshape, torch.ones(1), X)
    assert not shows(T.reshape, X[1:], X, X)
    assert shows(T.split, (X[1:],), X)
    assert not shows(T.split, (X[1:],), X, X)


def test_a_write_to_a_view_gives_the_view_and_its_base() -> None:
    out, view, base = (torch.ones(1) for _ in range(3))
    refs: list[Any] = [ref(it) for it in (out, view, base)]
    write = Write(refs[1], 0, 1, refs[2])
    call = Recorded(0, Api(T.add_), None, 0, 0, (), refs[0], (1,), X.dtype, (write,))
    assert call.results == tuple(refs)
    assert call._replace(written=()).results == (refs[0],)


def test_a_view_has_no_operand() -> None:
    call = Recorded(0, Api(T.view), None, 0, 0, (), None, (), None, (), True)
    assert call.operand is None
    assert call._replace(api=Api(T.fill_)).operand is True


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
def test_the_names_of_statistics_are_read_once(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature is slow, and a layer is called in each step."""
    api = Api(norm)
    monkeypatch.delattr("inspect.signature")
    found = writes_of(api, (), (), (X, M, V, W, W, True), {})
    assert [it.tensor() for it in found] == [M, V]
    assert Api(F.linear).parameters is None


def test_statistics_keep_their_version() -> None:
    found = writes_of(Api(F.batch_norm), (), (), (X, M, V), {"training": True})
    assert [(it.before, it.after) for it in found] == [(M._version,) * 2, (V._version,) * 2]
    with torch.inference_mode():
        mean = torch.zeros(3)
    found = writes_of(Api(F.batch_norm), (), (), (X, mean, None), {"training": True})
    assert [it.before for it in found] == [None]
