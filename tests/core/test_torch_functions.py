"""Each function is called, and does what its traits say."""

from __future__ import annotations

import ctypes
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import rnn

from cudalens.core import torch_functions
from cudalens.core.torch_functions import TRAITS, Trait, functions, is_in_place, stems, value_at

_ARGUMENTS = {
    "view reshape": "3, 2",
    "view_as reshape_as": "torch.empty(3, 2)",
    "expand broadcast_to": "4, 2, 3",
    "expand_as": "torch.empty(4, 2, 3)",
    "unsqueeze unbind softmax log_softmax": "1",
    "unflatten": "1, (3, 1)",
    "permute transpose swapaxes swapdims movedim moveaxis": "1, 0",
    "chunk unsafe_chunk tensor_split vsplit": "2",
    "hsplit": "3",
    "select split unsafe_split": "1, 0",
    "narrow": "1, 0, 2",
    "unfold": "1, 2, 1",
    "as_strided": "(2, 2), (3, 1)",
    "to type": "torch.float64",
    "type_as": "torch.empty(1, dtype=torch.int64)",
    "copy_": "torch.tensor([[6.0], [7.0]])",
    "index_select": "1, torch.tensor([2, 0])",
    "gather": "1, torch.tensor([[2], [0]])",
    "take_along_dim": "torch.tensor([[2], [0]]), 1",
    "masked_select": "x > 2",
    "take": "torch.tensor([5, 0])",
    "repeat_interleave": "2",
    "flip": "0, 1",
    "roll": "1",
    "repeat": "2, 2",
    "where": "x > 2, torch.zeros(2, 3)",
    "masked_fill masked_fill_": "x > 2, 0.0",
    "fill_": "4.0",
    "index_put_": "(torch.tensor([0]),), torch.tensor(9.0)",
    "put_": "torch.tensor([1]), torch.tensor([9.0])",
    "masked_scatter_": "x > 5, torch.full((6,), 9.0)",
    "__setitem__": "0, 9.0",
    "index_fill_": "0, torch.tensor([0]), 9.0",
    "index_copy_ index_add_": "0, torch.tensor([0]), torch.full((1, 3), 9.0)",
    "index_reduce_": "0, torch.tensor([0]), torch.full((1, 3), 9.0), 'mean'",
    "scatter_ scatter_add_": "0, torch.tensor([[0]]), torch.full((1, 1), 9.0)",
    "scatter_reduce_": "0, torch.tensor([[0]]), torch.full((1, 1), 9.0), 'sum'",
    "__getitem__": "torch.tensor([1])",
    "topk": "2",
    "clamp clamp_min clamp_ clip clip_": "0.0",
    "floor_divide __floordiv__ __rfloordiv__ __ifloordiv__": "2.0",
    "cumsum": "0",
    "multinomial": "2",
}
"""What follows the tensor among the arguments of a function that has them."""
_CALLS = {
    "alias": "torch.ops.aten.alias(x)",
    "_unsafe_view": "torch.ops.aten._unsafe_view(x, [3, 2])",
    "_reshape_alias": "torch.ops.aten._reshape_alias(x, [3, 2], [2, 1])",
    "as_subclass": "x.as_subclass(Tensor)",
    "broadcast_to": "x.broadcast_to((4, 2, 3))",
    "split_with_sizes": "x.split_with_sizes([1, 1])",
    "dsplit": "torch.dsplit(x[None], 3)",
    "pad_sequence": "rnn.pad_sequence([x[0], x[1, :2]])",
    "embedding": "F.embedding(torch.tensor([1]), x)",
    "tensor": "torch.tensor([[1.0, 2.0]])",
    "as_tensor": "torch.as_tensor(x.detach().numpy())",
    "asarray": "torch.asarray(x.detach().numpy())",
    "from_numpy": "torch.from_numpy(x.detach().numpy())",
    "scalar_tensor": "torch.scalar_tensor(2.0)",
    "searchsorted": "torch.searchsorted(torch.tensor([2.0, 4.0]), x)",
    "bucketize": "torch.bucketize(x, torch.tensor([2.0, 4.0]))",
    "bincount": "torch.bincount(x.long().flatten())",
    "one_hot": "F.one_hot(x.long())",
    "isin": "torch.isin(x, x)",
    "matmul": "torch.matmul(x, y)",
    "mm": "torch.mm(x, y)",
    "mv": "torch.mv(x, y[:, 0])",
    "dot": "torch.dot(x[0], y[:, 0])",
    "bmm": "torch.bmm(x[None], y[None])[0]",
    "__matmul__": "x @ y",
    "__rmatmul__": "y.__rmatmul__(x)",
    "einsum": "torch.einsum('ij,jk->ik', x, y)",
    "addmm": "torch.addmm(torch.zeros(2, 2), x, y)",
    "addmv": "torch.addmv(torch.zeros(2), x, y[:, 0])",
    "baddbmm": "torch.baddbmm(torch.zeros(1, 2, 2), x[None], y[None])[0]",
}


def _names(trait: Trait, *others: str) -> list[str]:
    return sorted(functions(trait) - set(others))


def _x() -> Tensor:
    return torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def _call(name: str, x: Tensor, y: Tensor | None = None) -> Any:
    """Call a function of the table with ``x``, and what else it needs."""
    given = next((text for names, text in _ARGUMENTS.items() if name in names.split()), "")
    space = {"torch": torch, "F": F, "rnn": rnn, "Tensor": Tensor, "x": x, "y": y}
    if name in _CALLS:
        return eval(_CALLS[name], space)
    if name == "where":
        return torch.where(x > 2, x, 0.0)
    if Trait.JOINS in TRAITS[name]:
        return getattr(torch, name)([x, x + 10])
    if Trait.PROPERTY in TRAITS[name]:
        return getattr(x, name)
    if hasattr(x, name):
        return eval(f"x.{name}({given})", space)
    return getattr(torch if hasattr(torch, name) else F, name)(x)


def _shares(result: Any, x: Tensor) -> bool:
    """Return whether a result, or the first of several, shows the memory of a tensor."""
    first = result if isinstance(result, Tensor) else next(iter(result))
    return bool(first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())


def _elements(result: Any) -> set[float]:
    parts = [result] if isinstance(result, Tensor) else list(result)
    return {float(item) for part in parts for item in part.flatten()}


def test_every_name_is_a_function_of_torch() -> None:
    """A misspelt name would be found by nobody."""
    places: list[Any] = [torch, Tensor, F, rnn, torch.ops.aten, torch._C]
    unknown = {
        name
        for name in TRAITS
        if not any(hasattr(place, name) for place in places)
        and not hasattr(torch.ops.aten, name.strip("_"))
    }
    # Older releases have the first one; Python makes the second one of ``__matmul__``.
    assert unknown <= {"has_names", "__imatmul__"}


# --- where the elements come from -----------------------------------------------------------------

_SPARSE = ("values", "indices", "crow_indices", "col_indices")
_COMPLEX = ("real", "imag", "view_as_complex", "view_as_real")
_OTHER_VIEWS = (*_SPARSE, *_COMPLEX, "requires_grad_")


@pytest.mark.parametrize("name", _names(Trait.VIEW, *_OTHER_VIEWS))
def test_a_view_may_show_the_memory_of_its_argument(name: str) -> None:
    """It does for a contiguous tensor that has the dtype and the place that are asked for."""
    x = _x() if name != "_conj" else _x() + 0j
    if name == "__getitem__":
        assert _shares(x[0], x)
    elif name in ("_unsafe_view", "cuda"):
        return  # the one promises that nobody looks, the other needs a device
    elif Trait.CAST in TRAITS[name]:
        made = _call(name, x)
        again = {"to": "to(made.dtype)", "type": "type(made.dtype)", "type_as": "type_as(made)"}
        assert _shares(eval(f"made.{again.get(name, name + '()')}", {"made": made}), made)
    else:
        assert _shares(_call(name, x), x)


@pytest.mark.parametrize("name", ["real", "imag", "view_as_real"])
def test_parts_of_complex_numbers_are_views(name: str) -> None:
    """So is the way back."""
    x = torch.ones(2, dtype=torch.complex64)
    made = getattr(x, name) if name != "view_as_real" else torch.view_as_real(x)
    assert _shares(made, x)
    if name == "view_as_real":
        assert _shares(torch.view_as_complex(made), x)


@pytest.mark.parametrize("name", _names(Trait.NEVER_COPIES))
def test_these_views_never_copy(name: str) -> None:
    """Not even where the tensor has gaps in memory; ``view`` raises there."""
    x = torch.arange(14.0).reshape(2, 7)[:, :6:2]
    if name in ("view", "view_as"):
        with pytest.raises(RuntimeError):
            _call(name, x)
    elif name == "_reshape_alias":
        return
    else:
        assert _shares(_call(name, x), x)


@pytest.mark.parametrize("name", _names(Trait.IN_ORDER, "cuda", "pin_memory", "bool", "copy_"))
def test_these_keep_all_elements_in_order(name: str) -> None:
    """One after the other, they are the same numbers."""
    assert _call(name, _x()).flatten().tolist() == [1, 2, 3, 4, 5, 6]


def test_a_copy_has_the_elements_of_its_source() -> None:
    """``copy_`` converts and broadcasts them."""
    assert _x().long().copy_(_x() + 0.5).flatten().tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", _names(Trait.WHOLE, *functions(Trait.IN_ORDER)))
def test_these_have_every_element(name: str) -> None:
    """In another order, or several times."""
    assert _elements(_call(name, _x())) == {1, 2, 3, 4, 5, 6}


_NOT_CALLED = {"cuda", "pin_memory", "cumsum"}


@pytest.mark.parametrize(
    "name", _names(Trait.KEEPS, *_NOT_CALLED, *functions(Trait.WRITES), "bool", "copy_")
)
def test_these_compute_no_element(name: str) -> None:
    """Each is one of an argument, or the number that was given."""
    assert _elements(_call(name, _x())) <= {0, 1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15, 16}


@pytest.mark.parametrize("name", _names(Trait.BLANKS))
def test_these_put_zero_at_some_places(name: str) -> None:
    """All others stay."""
    x = _x()
    made = x.fill_diagonal_(0) if name == "fill_diagonal_" else getattr(x, name)()
    assert all(new in (0, old) for new, old in zip(made.flatten(), _x().flatten(), strict=True))
    assert 0 in made


# --- dtype and device -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", _names(Trait.CAST, "copy_"))
def test_a_cast_changes_the_dtype(name: str) -> None:
    """Of at least one of float32 and float64."""
    x = _x()
    made = _call(name, x.double() if name == "float" else x)
    assert made.dtype != (torch.float64 if name == "float" else torch.float32)
    if Trait.TO_INTEGER in TRAITS[name]:
        assert not made.is_floating_point()
    if Trait.TO_HALF in TRAITS[name]:
        assert made.element_size() == 2
        assert name == "bfloat16" or _call(name, x * 1e6).isinf().all()


@pytest.mark.parametrize("name", ["to", "type_as"])
def test_these_move(name: str) -> None:
    """To the device that is named, or that of the other tensor."""
    meta = torch.empty(2, 3, device="meta")
    assert getattr(_x(), name)(meta).device.type == "meta"


# --- values of its own ----------------------------------------------------------------------------

_FACTORY_ARGUMENTS = {
    **{"full": ((2, 3), 1.0), "arange": (3,), "linspace": (0, 1, 3), "randint": (3, (2,))},
    **{"randperm": (3,), "eye": (3,), "logspace": (0, 1, 3), "tril_indices": (3, 3)},
    **{"triu_indices": (3, 3)},
}


@pytest.mark.parametrize("name", _names(Trait.FACTORY))
def test_a_factory_needs_no_tensor_and_takes_a_device(name: str) -> None:
    """Without ``device=`` the tensor is on the CPU."""
    args: tuple[Any, ...] = _FACTORY_ARGUMENTS.get(name, (2, 3))  # type: ignore[assignment]
    assert getattr(torch, name)(*args).device.type == "cpu"
    assert getattr(torch, name)(*args, device="meta").device.type == "meta"


@pytest.mark.parametrize("name", _names(Trait.TAKES_SIZES))
def test_these_are_given_sizes(name: str) -> None:
    """As a list as well; ``full`` takes no other way."""
    owner: Any = torch if Trait.FACTORY in TRAITS[name] else _x()
    rest = (1.0,) if name == "full" else ()
    assert getattr(owner, name)((2, 3), *rest).shape == (2, 3)


@pytest.mark.parametrize("name", _names(Trait.NUMBERS, "cumsum"))
def test_these_give_places_and_counts(name: str) -> None:
    """Integers, whatever the argument holds."""
    assert _call(name, _x()).dtype == torch.int64


@pytest.mark.parametrize("name", ["sort", "topk", "max", "min"])
def test_these_give_elements_and_places(name: str) -> None:
    """Along a dimension."""
    values, places = _call(name, _x()) if name in ("sort", "topk") else getattr(_x(), name)(1)
    assert _elements(values) <= {1, 2, 3, 4, 5, 6}
    assert places.dtype == torch.int64


@pytest.mark.parametrize("name", _names(Trait.COMPARES, "isin"))
def test_a_comparison_gives_truth_values(name: str) -> None:
    """Of each pair of elements."""
    assert getattr(_x(), name)(_x() + 1).dtype == torch.bool


@pytest.mark.parametrize("name", _names(Trait.SUM))
def test_these_add_or_subtract(name: str) -> None:
    add, x = getattr(_x(), name, None), _x()
    made = torch.rsub(x, 4) if add is None else add(4)
    assert any(torch.equal(made, sum_) for sum_ in (x + 4, x - 4, 4 - x))


@pytest.mark.parametrize("name", _names(Trait.DIVIDES))
def test_these_divide_by_their_second_argument(name: str) -> None:
    """The other way round it would be 4 for the first element."""
    assert getattr(_x(), name)(4.0).flatten().tolist() == [0.25, 0.5, 0.75, 1, 1.25, 1.5]


@pytest.mark.parametrize("name", _names(Trait.ROUNDS))
def test_these_give_whole_numbers(name: str) -> None:
    """Of fractions as well."""
    made = _call(name, _x() + 0.3)
    assert made.tolist() == made.long().tolist()


# --- writes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", _names(Trait.OVERWRITES, "_foreach_zero_", "_foreach_copy_"))
def test_these_write_to_all_elements(name: str) -> None:
    """Whatever was there: two tensors are the same afterwards."""
    made = []
    for start in (math.nan, 3.0):
        torch.manual_seed(0)
        x = torch.full((2, 3), start)
        if name == "copy_":
            x.copy_(torch.tensor([[6.0], [7.0]]))
        elif name in ("fill_", "geometric_"):
            getattr(x, name)(0.5)
        else:
            getattr(x, name)()
        made.append(x.tolist())
    assert made[0] == made[1]


@pytest.mark.parametrize("name", _names(Trait.WRITES, "masked_scatter_"))
def test_these_write_to_some_elements(name: str) -> None:
    """The others stay, and what is written is where ``value_at`` says."""
    x = _x()
    _call(name, x)
    is_new = x != _x()
    assert is_new.any()
    assert not is_new.all()
    is_added = Trait.ADDS in TRAITS[name]
    written = {9.0, 0.0} if name == "masked_fill_" else {9.0}
    assert (set(x[is_new].tolist()) <= written) is not is_added
    if name != "__setitem__":
        packet = getattr(torch.ops.aten, name)
        schemas = [getattr(packet, item)._schema for item in packet.overloads()]
        places = {[it.name for it in one.arguments][value_at(name)] for one in schemas}
        assert places & {"value", "values", "source", "src"}


@pytest.mark.parametrize("name", sorted(TRAITS.keys() - functions(Trait.WRITES)))
def test_all_others_write_no_part(name: str) -> None:
    """There is no operand to ask for."""
    assert value_at(name) == 0


@pytest.mark.parametrize("name", _names(Trait.ONLY_IN_PLACE, "copy_"))
def test_these_have_no_form_that_gives_a_new_tensor(name: str) -> None:
    """So a fix cannot leave the underscore out."""
    assert not hasattr(Tensor, name.removesuffix("_"))


def test_a_fill_with_a_form_that_gives_a_new_tensor_has_no_such_trait() -> None:
    """``bernoulli`` is the one."""
    kept = functions(Trait.FILLS, without=Trait.ONLY_IN_PLACE)
    assert [name for name in kept if hasattr(Tensor, name.removesuffix("_"))] == ["bernoulli_"]


@pytest.mark.parametrize("name", _names(Trait.RENEWS))
def test_these_give_a_tensor_other_memory(name: str) -> None:
    """More of it, or that of another tensor."""
    x, other = _x(), torch.zeros(100)
    before = x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
    if name == "data":
        x.data = other
    else:
        getattr(x, name)((100,) if name == "resize_" else other)
    assert before != (x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())


# --- what the host learns -------------------------------------------------------------------------


@pytest.mark.parametrize("name", _names(Trait.FACT))
def test_a_fact_is_no_tensor_and_asking_changes_nothing(name: str) -> None:
    """The version stays, and so does the gradient."""
    x = _x().requires_grad_()
    assert not isinstance(_call(name, x), Tensor)
    assert (x._version, x.requires_grad, x.grad_fn) == (0, True, None)


@pytest.mark.parametrize("name", _names(Trait.READS))
def test_these_give_values_to_the_host(name: str) -> None:
    """No tensor comes back; a number of Python's from some."""
    made = _call(name, torch.tensor(2.0))
    assert not isinstance(made, Tensor)
    assert (type(made) in (int, float)) is (name in {*functions(Trait.NUMBER), "tolist"})


@pytest.mark.parametrize("name", ["numpy", "__array__", "__dlpack__", "as_tensor", "from_numpy"])
def test_these_share_memory(name: str) -> None:
    """A write through the other one is seen."""
    x = _x()
    made = _call(name, x)
    torch.from_dlpack(made).fill_(7) if name == "__dlpack__" else made.__setitem__((0, 0), 7)
    assert x[0, 0] == 7


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", _names(Trait.GIVES))
def test_these_give_memory_away(name: str) -> None:
    """A write through what comes back has no trace in the version."""
    x = _x()
    version = x._version
    made = _call(name, x)
    if isinstance(made, int):
        ctypes.memset(made, 0, x.nbytes)
    elif isinstance(made, torch.UntypedStorage | torch.TypedStorage):
        made.fill_(0)
    elif name != "share_memory_":
        made = torch.from_dlpack(made).numpy() if name == "__dlpack__" else made
        made[:] = 0
    else:
        assert x.is_shared()
        return
    assert not x.any()
    assert x._version == version


@pytest.mark.parametrize("name", _names(Trait.CUTS))
def test_these_cut_the_graph(name: str) -> None:
    """The result requires no gradient, and the argument did."""
    x = _x().requires_grad_() * 1
    assert not _call(name, x).requires_grad


# --- arithmetic -----------------------------------------------------------------------------------

_BINARY = "add sub mul pow div eq floor_divide maximum minimum logical_and __truediv__ __mod__"


@pytest.mark.parametrize("name", _BINARY.split())
def test_these_repeat_a_tensor_of_size_one(name: str) -> None:
    """A column and a row give a table."""
    assert Trait.BROADCASTS in TRAITS[name]
    assert getattr(torch.ones(2, 1), name)(torch.ones(1, 3)).shape == (2, 3)


@pytest.mark.parametrize("name", _names(Trait.PRODUCT, "__imatmul__"))
def test_a_product_sums_rows_times_columns(name: str) -> None:
    """With two factors, the first has the rows."""
    x, y = _x(), torch.tensor([[1.0, 2.0], [0.0, 1.0], [2.0, 0.0]])
    whole = torch.tensor([[7.0, 4.0], [16.0, 13.0]])
    assert _call(name, x, y).tolist() in (whole.tolist(), whole[:, 0].tolist(), float(whole[0, 0]))


@pytest.mark.parametrize("name", ["std", "var", "std_mean", "var_mean"])
def test_the_spread_of_one_number_is_nan(name: str) -> None:
    """It is unbiased."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = getattr(torch, name)(torch.ones(1))
    assert Trait.SPREAD in TRAITS[name]
    assert (made[0] if isinstance(made, tuple) else made).isnan()


@pytest.mark.parametrize("name", _names(Trait.EXPONENTIAL))
def test_an_exponential_overflows(name: str) -> None:
    """At 1000, in float32."""
    assert getattr(torch, name)(torch.tensor(1000.0)).isinf()


@pytest.mark.parametrize("name", _names(Trait.LOGARITHM))
def test_a_logarithm_has_a_pole_at_zero(name: str) -> None:
    """There it and its slope are infinite, below it is NaN, above it is neither."""
    x = torch.tensor([-1e-6, 0.0, 1e-6], requires_grad=True)
    made = getattr(torch, name)(x)
    made.sum().backward()
    assert x.grad is not None
    assert made.tolist()[1] == -math.inf
    assert [made.isnan().tolist(), made.isfinite().tolist()] == [[1, 0, 0], [0, 0, 1]]
    assert x.grad[1:].isfinite().tolist() == [False, True]


@pytest.mark.parametrize("name", _names(Trait.ARC))
def test_an_arc_is_steep_at_both_ends(name: str) -> None:
    """At -1 and 1 it is finite and its slope is not; beyond it is NaN."""
    x = torch.tensor([-1.0, 0.999, 1.0], requires_grad=True)
    made = getattr(torch, name)(x)
    made.sum().backward()
    assert x.grad is not None
    assert bool(made.isfinite().all())
    assert x.grad.isfinite().tolist() == [False, True, False]
    assert getattr(torch, name)(torch.tensor([-1.001, 1.001])).isnan().all()


@pytest.mark.parametrize("name", _names(Trait.CLAMPS))
def test_a_clamp_puts_its_bound_in_place_of_what_is_below(name: str) -> None:
    """Whatever is at the bound or above stays."""
    assert getattr(_x(), name)(2.0).tolist() == [[2, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize("name", _names(Trait.ACTIVATION))
def test_an_activation_goes_beyond_probabilities(name: str) -> None:
    """Below 0 or above 1."""
    made = F.elu(_x() * 10 - 20) if name == "elu" else _of_activation(name)(_x() * 10 - 20)
    assert made.min() < 0 or made.max() > 1


def _of_activation(name: str) -> Callable[[Tensor], Tensor]:
    if name == "clamp_min":
        return lambda x: x.clamp_min(0)
    function: Callable[[Tensor], Tensor] = getattr(F, name)
    return function


_SIMPLE_TENSOR = sorted(
    name
    for name in functions(Trait.TENSOR) - functions(Trait.FACTORY) - functions(Trait.PRODUCT)
    if name not in {"cuda", "pin_memory", "add", "sub", "mul", "pow", "div", "_unsafe_view"}
)


@pytest.mark.parametrize("name", _SIMPLE_TENSOR)
def test_these_give_one_tensor(name: str) -> None:
    """And no tuple, nor a number."""
    assert isinstance(_call(name, _x()), Tensor)


_AS_CALLED_HERE = {"bool", "repeat_interleave", "unfold"}
"""Functions that have every element, or none, only with the arguments of these tests."""
_SEEN = {*_SIMPLE_TENSOR, *_CALLS} - functions(Trait.SHARES) - {"one_hot"}


@pytest.mark.parametrize("name", sorted(_SEEN - {"dsplit", "split_with_sizes"}))
def test_what_a_function_is_seen_to_do_is_among_its_traits(name: str) -> None:
    """Its type, its memory, its elements: a row that leaves one out says too little."""
    x, y = _x(), torch.tensor([[1.0, 2.0], [0.0, 1.0], [2.0, 0.0]])
    made, traits = _call(name, x, y), TRAITS[name]
    kinds = Trait.TO_INTEGER | Trait.COMPARES | Trait.NUMBERS
    takes_another = name in ("type_as", "cumsum")
    assert made.is_floating_point() or takes_another or traits & kinds
    assert made.dtype is not torch.bool or traits & (Trait.TO_INTEGER | Trait.COMPARES)
    assert made.element_size() != 2 or traits & (Trait.TO_HALF | Trait.TO_INTEGER)
    assert made.dtype is torch.float32 or traits & (Trait.CAST | kinds)
    assert not _shares(made, x) or Trait.VIEW in traits
    if Trait.KEEPS in traits and Trait.JOINS not in traits and name not in _AS_CALLED_HERE:
        assert (_elements(made) >= _elements(x)) is (Trait.WHOLE in traits)
        assert made.flatten().tolist() != x.flatten().tolist() or Trait.IN_ORDER in traits


# --- the table itself -----------------------------------------------------------------------------


def test_what_follows_from_a_trait_is_there_as_well() -> None:
    """A view of all elements in order computes none."""
    assert Trait.KEEPS | Trait.WHOLE | Trait.VIEW in TRAITS["view"]
    assert Trait.CAST in TRAITS["half"]
    assert Trait.KEEPS not in TRAITS["add"]


def test_functions_have_all_that_is_wanted_and_none_of_what_is_refused() -> None:
    wanted, asked = Trait.WHOLE | Trait.VIEW, {"view", "half", "cuda", "to", "clone"}
    assert functions(wanted) & asked == asked - {"clone"}
    assert functions(wanted, without=Trait.CAST) & asked == {"view", "cuda"}
    assert functions(wanted, without=Trait.CAST | Trait.MOVES) & asked == {"view"}


def test_names_of_a_report_have_no_underscores_of_operators() -> None:
    """Those of functions in place stay."""
    assert "setitem" in stems(Trait.WRITES)
    assert "masked_fill_" in stems(Trait.WRITES)
    assert functions(Trait.CAST, without=Trait.TO_INTEGER) >= {"to", "half"}
    assert "long" not in functions(Trait.CAST, without=Trait.TO_INTEGER)


def test_a_form_in_place_is_told_by_its_name() -> None:
    names = ("add_", "__add__", "__iadd__", "add", "copy_")
    assert [name for name in names if is_in_place(name)] == ["add_", "copy_"]


def test_a_function_has_its_traits_in_one_row() -> None:
    with pytest.raises(ValueError, match="add is in two rows"):
        torch_functions._read({"add": "tensor", "sub add": "finite"})
