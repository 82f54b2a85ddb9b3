"""One call on copies: what takes an operand's place, what is refused, what cannot be tried."""

from __future__ import annotations

import ast
import operator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cudalens.core.call import ApiCall, Operand
from cudalens.diagnosis.user_code import Change, Fix, function_named
from cudalens.evidence import attempt as module
from cudalens.evidence.attempt import (
    Attempt,
    CannotTryError,
    RefusedError,
    Resize,
    TooLargeError,
    ask_guards,
    is_torchs,
    tensors_in,
)
from cudalens.source.running_call import ABSENT
from tests.builders import spelled

X, Y = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)


class Mine(nn.Module):
    """A module of a user's."""


def operands(**values: Any) -> list[Operand]:
    nodes = {name: ast.parse(name, mode="eval").body for name in values}
    return [Operand(text=key, node=nodes[key], value=item) for key, item in values.items()]


def attempt(on_meta: bool = False, resize: Resize | None = None, **values: Any) -> Attempt:
    return Attempt(operands(**values), None, None, on_meta=on_meta, resize=resize)


def run(func: Any, *args: Any, fix: Fix | None = None, **options: Any) -> Any:
    """Call a function of torch's on copies of ``x`` and ``y``, as an attempt has it."""
    names = dict(zip("xyz", args, strict=False))
    return attempt(**options, **names).run(ApiCall(func=func, args=args), fix)


def change(template: str, text: str = "x", **more: Any) -> Fix:
    return Fix("…", [Change(text, template)], **more)


def test_a_call_is_made_on_copies() -> None:
    made = run(Tensor.add_, X, Y)
    assert torch.equal(made, X + Y)
    assert torch.equal(X, torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize(
    ("template", "shape"), [("{x}.T", (3, 3)), ("{x}[None]", None), ("torch.cat([{x}])", None)]
)
def test_an_operand_is_replaced_by_what_its_template_makes(template: str, shape: Any) -> None:
    if shape is None:
        with pytest.raises((RuntimeError, CannotTryError)):
            run(torch.mm, X, X, fix=change(template, "x"))
    else:
        assert run(torch.mm, X, Y, fix=change(template)).shape == shape


def test_a_change_that_does_not_reach_the_call_is_not_tried() -> None:
    with pytest.raises(CannotTryError):
        run(torch.mm, X, Y, fix=change("{x}.T", "other"))
    two = attempt(x=X, unused=torch.ones(3))
    with pytest.raises(CannotTryError):
        two.run(ApiCall(func=torch.sum, args=(X,)), change("{x} + 1", "unused"))


def test_another_function() -> None:
    turned = X.T
    with pytest.raises(RuntimeError):
        attempt(x=turned).run(ApiCall(func=Tensor.view, args=(turned, 6)), None)
    fix = Fix("…", rearrange=function_named("reshape"))
    made = attempt(x=turned).run(ApiCall(func=Tensor.view, args=(turned, 6)), fix)
    assert made.tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("value", "template", "is_refused"),
    [
        (torch.tensor([1.0, 2.0]), "{x}.long()", False),
        (torch.tensor([1.0, 2.5]), "{x}.long()", True),
        (torch.tensor([0, 1]), "{x}.bool()", False),
        (torch.tensor([0, 2]), "{x}.bool()", True),
        (torch.tensor([1.5]), "{x}.half()", False),
        (torch.tensor([300]), "{x}.to(torch.uint8)", True),
        (torch.tensor([[0, 1], [1, 0]]), "{x}.argmax(1)", False),
        (torch.tensor([[1, 1], [1, 0]]), "{x}.argmax(1)", True),
        (torch.tensor([[0.2, 0.8]]), "{x}.argmax(1)", False),
    ],
)
def test_a_cast_may_lose_no_value(value: Tensor, template: str, is_refused: bool) -> None:
    tried = Attempt(operands(x=value), Names(), None, on_meta=False)
    call = ApiCall(func=torch.clone, args=(value,))
    if is_refused:
        with pytest.raises(RefusedError):
            tried.run(call, change(template))
    else:
        tried.run(call, change(template))


class Names:
    """Stands for the reader of a line: it knows ``torch`` alone."""

    def __getitem__(self, node: Any) -> Any:
        raise KeyError(node)


@pytest.fixture(autouse=True)
def names_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template's names are torch, and nothing else."""
    known = {"torch": torch}
    read = module.value_or
    monkeypatch.setattr(
        module,
        "value_or",
        lambda evaluator, node, default: (
            known.get(node.id, default)
            if not evaluator or isinstance(evaluator, Names)
            else read(evaluator, node, default)
        ),
    )


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(
    ("func", "fix", "outcome"),
    [
        (torch.add, None, "refused"),
        (torch.add, change('{x}.to("cuda:0")'), None),
        (torch.add, change("{x}.cuda()"), None),
        (torch.add, change("{x}.cpu()"), "refused"),
        (torch.add, change("{x}.cpu()", "y"), None),
        (operator.getitem, None, "refused"),
    ],
)
def test_devices_are_labels_of_copies(func: Any, fix: Fix | None, outcome: str | None) -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    if func is operator.getitem:
        there = torch.zeros(3, dtype=torch.long, device="cuda")
    if outcome:
        with pytest.raises(RefusedError):
            run(func, here, there, fix=fix)
    else:
        run(func, here, there, fix=fix)


@pytest.mark.usefixtures("sim")
def test_the_parameters_of_the_called_module_move_alone() -> None:
    there, layer = torch.ones(2, 3, device="cuda"), nn.Linear(3, 2)
    for called in (layer, layer.forward, nn.BatchNorm1d(3, affine=False)):
        with pytest.raises(RefusedError):
            run(called, there)
    assert run(layer, there, fix=Fix("…", device="cuda")).shape == (2, 2)
    for fix in (Fix("…", device="cuda"), change("{x} + 1", device="cuda")):
        with pytest.raises(RefusedError):
            run(layer, torch.ones(2, 3), fix=fix)


@pytest.mark.usefixtures("sim")
def test_a_number_of_the_host_goes_with_each_device() -> None:
    run(torch.add, torch.tensor(1.0), torch.ones(3, device="cuda"))
    with pytest.raises(RefusedError):
        run(torch.add, torch.tensor(1.0, device="cuda"), torch.ones(3))


def test_a_guard_refuses_values_that_the_kernel_does_not_check() -> None:
    table = torch.zeros(3, 2)
    run(F.embedding, torch.tensor([2]), table)
    with pytest.raises(RefusedError) as caught:
        run(F.embedding, torch.tensor([3]), table)
    assert caught.value.violation is not None
    assert caught.value.violation.op == "aten::embedding"


def test_a_guard_is_asked_with_the_defaults_of_an_op() -> None:
    draw, repeat = torch.ops.aten.multinomial.default, torch.ops.aten.repeat_interleave.Tensor
    one, repeats = torch.tensor([1.0, 0.0]), torch.tensor([1, 2])
    ask_guards(draw, (one, 2, True), {})
    ask_guards(repeat, (repeats,), {"output_size": 3})
    with pytest.raises(RefusedError):
        ask_guards(draw, (one, 2), {})
    with pytest.raises(RefusedError) as caught:
        ask_guards(repeat, (repeats,), {"output_size": 4})
    found = caught.value.violation
    assert found is not None
    assert (found.op, found.overload) == ("aten::repeat_interleave", "Tensor")
    assert caught.value.arguments == {"repeats": repeats, "output_size": 4}


def test_on_meta_shapes_alone_decide() -> None:
    assert run(torch.mm, X, Y.T, on_meta=True).device.type == "meta"
    with pytest.raises(CannotTryError):  # its kernels compare no dtypes
        run(torch.add, X, Y.double(), on_meta=True)


def test_what_is_too_large_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_VALUES", 12)
    run(torch.add, X, Y)
    monkeypatch.setattr(module, "MAX_VALUES", 11)
    with pytest.raises(TooLargeError):
        run(torch.add, X, Y)


@pytest.mark.parametrize("value", [object(), torch.ones(2, 2).to_sparse(), lambda: 1])
def test_what_cannot_be_copied_is_not_tried(value: object) -> None:
    with pytest.raises(CannotTryError):
        run(torch.clone, value)


def test_containers_are_copied_with_what_is_in_them() -> None:
    parts = [X, (Y, {"a": X})]
    copies = attempt()
    made = copies._copy(parts)
    assert made[0] is made[1][1]["a"] is not X
    assert [item.shape for item in tensors_in([made])] == [(2, 3)] * 3
    assert copies.copied()


def test_what_a_method_changes_is_a_copy() -> None:
    norm, before = nn.BatchNorm1d(3), X.clone()
    assert run(norm.forward, X).shape == (2, 3)
    assert norm.running_mean is not None and norm.running_mean.tolist() == [0, 0, 0]
    assert attempt()._copy(X.add_)(1).tolist() == (before + 1).tolist()
    run(operator.getitem, {"a": X}, "a").add_(1)
    assert torch.equal(X, before)


def test_a_module_is_copied_unless_it_has_hooks_or_is_the_users() -> None:
    layer = nn.Linear(3, 2)
    assert run(layer, X).shape == (2, 2)
    layer.register_forward_hook(lambda *_: None)
    with pytest.raises(CannotTryError):
        run(layer, X)

    class Own(nn.Module):
        pass

    with pytest.raises(CannotTryError):
        run(Own(), X)


@pytest.mark.parametrize(
    ("shape", "dim", "size", "wanted"),
    [
        ((2, 3), 0, 2, (6, 3)),
        ((4, 3), 0, 2, (12, 3)),
        ((3, 2), 0, 2, (3, 2)),
        ((5, 2), 0, 2, (5, 2)),
        ((4, 3), 1, 3, (4, 9)),
        ((3, 4), 1, 3, (9, 4)),
        ((3,), 0, 1, (3,)),
    ],
)
def test_another_size_of_a_dimension(
    shape: tuple[int, ...], dim: int, size: int, wanted: tuple[int, ...]
) -> None:
    assert Resize(dim, size, lambda _: True).shape_of(torch.ones(shape)) == wanted
    assert Resize(dim, size, lambda _: False).shape_of(torch.ones(shape)) == shape


def test_another_size_everywhere() -> None:
    assert Resize(0, 2, lambda _: True, True).shape_of(torch.ones(3, 2, 2)) == (3, 6, 6)


@pytest.mark.parametrize(
    ("value", "is_it"),
    [
        (torch, True),
        (torch.nn.functional, True),
        (ast, False),
        (ModuleType("torchvision"), False),
        (torch.add, True),
        (F.linear, True),
        (Tensor.add, True),
        (operator.add, True),
        (nn.Linear(1, 1), True),
        (nn.Linear(1, 1).forward, True),
        (nn.Sequential(nn.Linear(1, 1)), True),
        (nn.Sequential(Mine()), False),
        (Mine().forward, False),
        (torch.ops.aten.add.Tensor, True),
        (torch.ops.prims.sin.default, False),
        (torch._C._nn.upsample_nearest2d, True),
        (nn.Linear, True),
        (dict, False),
        (lambda: 1, False),
        (len, False),
        (object(), False),
    ],
)
def test_what_is_torchs_own(value: object, is_it: bool) -> None:
    assert bool(is_torchs(value)) is is_it


@pytest.mark.parametrize(
    ("template", "dtype"),
    [
        ("{x}.to(torch.float64)", torch.float64),
        ("{x}.to(dtype=torch.float64)", torch.float64),
        ("{x}.to(y)", torch.float64),
        ("{x}.to('cpu', torch.int64)", torch.int64),
        ("{x}.to(device='cpu', non_blocking=True, copy=True)", torch.float32),
        ("{x}.to(device='cuda')", torch.float32),  # a label, which no tensor moves to
    ],
)
def test_a_move_may_cast_as_well(
    template: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"torch": torch, "y": Y.double()}
    read = lambda evaluator, node, default: known.get(node.id, default)
    monkeypatch.setattr(module, "value_or", read)
    made = attempt(x=X).run(ApiCall(func=torch.clone, args=(X,)), change(template))
    assert (made.dtype, made.device.type) == (dtype, "cpu")


@pytest.mark.usefixtures("sim")
def test_a_template_takes_the_device_of_another_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = torch.ones(3), torch.ones(3, device="cuda")
    monkeypatch.setattr(module, "value_or", lambda _, node, default: {"y": there}[node.id])
    for template in ("{x}.to(y)", "{x}.to(y.device)", "y + 1"):
        run(torch.add, here, there, fix=change(template))
    both, other = [here, there], torch.zeros(3, device="cuda")
    run(torch.add, both, other, fix=change("{x}[1]"))
    with pytest.raises(RefusedError):
        run(torch.add, both, other, fix=change("{x}[0]"))
    with pytest.raises(RefusedError):
        run(torch.add, here, there, fix=change("{x} + 1"))
    moved, stays = Change("x", "{x}.cuda()"), Change("y", "{x} + 1")
    with pytest.raises(RefusedError):
        run(torch.add, here, torch.zeros(3), fix=Fix("…", [moved, stays]))


def test_a_template_reads_torch_and_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"torch": torch, "n": 2, "f": lambda value: value, "y": Y}
    read = lambda evaluator, node, default: known.get(node.id, default)
    monkeypatch.setattr(module, "value_or", read)
    call = ApiCall(func=torch.clone, args=(X,))
    assert attempt(x=X).run(call, change("{x} * n")).tolist() == (X * 2).tolist()
    assert attempt(x=X).run(call, change("{x} * max(n, 3)")).tolist() == (X * 3).tolist()
    assert attempt(x=X, y=ABSENT).run(call, change("y")).tolist() == Y.tolist()
    for template in ("f({x})", "{x} * unknown", "open({x})"):
        with pytest.raises(CannotTryError):
            attempt(x=X).run(call, change(template))


def test_a_method_that_was_not_called_is_called_on_a_copy() -> None:
    method = X.t
    call = ApiCall(func=torch.clone, args=(method,))
    made = attempt(x=method).run(call, change("{x}()"))
    assert torch.equal(made, X.T)
    for other in (len, [X].copy):
        with pytest.raises(CannotTryError):
            attempt(x=other).run(ApiCall(func=torch.clone, args=(other,)), change("{x}()"))


def test_an_operand_may_take_the_place_of_another_one_or_of_the_call() -> None:
    two = attempt(x=X, y=Y)
    assert torch.equal(two.run(ApiCall(func=torch.clone, args=(X,)), change("y")), Y)
    given = operands(x=X)
    whole = Attempt(given, None, given[0].node, on_meta=False)
    made = whole.run(ApiCall(func=torch.neg, args=(X,)), change("{x} + 1"))
    assert torch.equal(made, X + 1)


def test_a_number_is_found_however_it_is_spelled() -> None:
    call = ApiCall(func=torch.tensor, args=(value := 1e9,))
    given = [Operand(text="1000000000.0", node=ast.Constant(value), value=value)]
    made = Attempt(given, None, None, on_meta=False).run(call, change("7.0", spelled("1e9") or ""))
    assert made.item() == 7


def test_of_two_of_one_text_the_first_is_read() -> None:
    tried = Attempt([*operands(x=X, y=Y), *operands(x=X.T)], None, None, on_meta=False)
    assert torch.equal(tried.run(ApiCall(func=torch.clone, args=(Y,)), change("x", "y")), X)


def test_of_two_alike_the_one_of_the_span_is_changed() -> None:
    places = ({"col_offset": at, "end_col_offset": at + 1} for at in (9, 12))
    first, second = (ast.Name("x", lineno=1, **it) for it in places)
    given = [Operand(text="x", node=node, value=X) for node in (first, second)]
    plain = ApiCall(func=torch.mm, args=(X, X), nodes=(first, second))
    named = ApiCall(func=torch.mm, args=(X,), kwargs={"mat2": X}, nodes=(first,))
    named.keywords = {"mat2": second}

    def tried(api: ApiCall, span: Any, number: int = 2, template: str = "{x}.T") -> Any:
        one = Attempt(given[:number], None, None, on_meta=False)
        return one.run(api, Fix("…", [Change("x", template, span)]))

    for api in (plain, named):
        assert tried(api, (1, 12, 13)).shape == (2, 2)
        assert tried(api, (1, 9, 10)).shape == (3, 3)
        with pytest.raises(RuntimeError):
            tried(api, None)
        with pytest.raises(RefusedError):  # the other one has stayed on the host
            tried(api, (1, 9, 10), template="{x}.cuda()")
        with pytest.raises(CannotTryError):  # neither has this span
            tried(api, (1, 10, 11))
    # The only one is changed by its value, whatever is known of the syntax.
    assert tried(ApiCall(func=torch.mm, args=(X, Y)), (1, 9, 10), 1).shape == (3, 3)


def test_on_meta_a_cast_that_may_lose_values_is_not_tried() -> None:
    whole, codes = torch.tensor([1.0, 2.5]), torch.tensor([[1, 1], [1, 0]])

    def tried(value: Tensor, template: str, resize: Resize | None = None) -> Any:
        one = attempt(on_meta=True, resize=resize, x=value)
        return one.run(ApiCall(func=torch.clone, args=(value,)), change(template))

    for value, template in ((whole, "{x}.long()"), (codes, "{x}.argmax(1)")):
        with pytest.raises(CannotTryError):
            tried(value, template)
        # Of other sizes there are no values: the shapes decide.
        assert tried(value, template, Resize(0, 2, lambda _: True)).shape == (6,)
    assert tried(whole, "{x}.double()").dtype == torch.float64
    assert tried(codes.bool(), "{x}.long()").dtype == torch.int64
    assert tried(codes, "{x}.bool()", Resize(0, 9, lambda _: True)).dtype == torch.bool


def test_codes_of_classes_have_one_in_each_row_of_a_dimension() -> None:
    call = ApiCall(func=torch.clone, args=(codes := torch.tensor([[0, 2], [1, 0]]),))
    for template in ("{x}.argmax(1)", "{x}.argmax()"):
        with pytest.raises(RefusedError):
            attempt(x=codes).run(call, change(template))
    code = torch.tensor([[0, 1], [1, 0]])
    with pytest.raises(RefusedError):
        attempt(x=code).run(ApiCall(func=torch.clone, args=(code,)), change("{x}.argmax()"))


def test_a_copy_has_the_memory_and_the_graph_of_its_kind() -> None:
    turned = attempt()._copy(X.T)
    assert turned.stride() == X.T.stride()
    wide = attempt()._copy(torch.ones(1).expand(3))
    wide[0] = 5
    assert wide.tolist() == [5, 1, 1]
    leaf = torch.ones(2, requires_grad=True)
    copies = [attempt()._copy(it) for it in (leaf, leaf * 2, X)]
    assert [(it.requires_grad, it.is_leaf) for it in copies] == [
        (True, True), (True, False), (False, True),
    ]  # fmt: skip
    with torch.no_grad():
        assert not attempt()._copy(leaf).requires_grad
    array = X.numpy()
    assert attempt()._copy(array) is not array


def test_another_function_is_found_where_torch_has_it() -> None:
    named = module._named
    assert named("reshape", Tensor.view) is Tensor.reshape
    assert named("relu", F.linear) is F.relu
    assert named("stack", torch.cat) is torch.stack
    with pytest.raises(CannotTryError):
        named("no_such", torch.cat)


def test_numpy_takes_no_tensor_of_a_device() -> None:
    tried = attempt(x=X)
    made = tried._copy(X)
    tried._called(Tensor.numpy, [made], {})
    tried._label(made, torch.device("cuda"))
    assert tried._device_of(made) == torch.device("cuda", 0)
    with pytest.raises(RefusedError):
        tried._called(Tensor.numpy, [made], {})


def packed(lengths: Tensor, there: bool, whole: str = "cuda") -> Any:
    """Call ``_pack_padded_sequence`` with its input on a device, and its lengths there or not."""
    tried = attempt()
    parts = [tried._copy(it) for it in (torch.ones(2, 3, 1), lengths)]
    tried._label(parts[0], torch.device(whole))
    if there:
        tried._label(parts[1], torch.device("cuda"))
    return tried._called(torch._C._VariableFunctions._pack_padded_sequence, [*parts, True], {})


def test_lengths_stay_on_the_host() -> None:
    lengths = torch.tensor([3, 2])
    packed(lengths, there=False)
    with pytest.raises(RefusedError):
        packed(lengths, there=True)
    with pytest.raises(RefusedError):
        packed(lengths, there=True, whole="cpu")
