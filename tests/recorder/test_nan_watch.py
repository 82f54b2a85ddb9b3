"""The watch for NaN by itself: what made a value, which calls it passed, where it arrived."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from cudalens.recorder import Recorder
from cudalens.recorder.nonfinite import NonFiniteWatch
from cudalens.recorder.nonfinite_marks import Arrival

INF, NAN = math.inf, math.nan


class Told:
    """Reports that are only counted."""

    def __init__(self) -> None:
        self.stops: list[str] = []
        self.arrivals: list[Arrival] = []
        self.conditions: list[Any] = []

    def stop(self, arguments: Any, violation: Any, condition: Any = None) -> BaseException:
        self.stops.append(violation.op)
        self.conditions.append(condition)
        return ArithmeticError(violation.headline)

    def note(self, arguments: Any, violation: Any, condition: Any = None) -> None:
        self.conditions.append(condition)

    def arrived(self, arrival: Arrival) -> BaseException:
        self.arrivals.append(arrival)
        return ArithmeticError(arrival.sink)


def told(run: Callable[[], Any], *, is_strict: bool = False) -> Told:
    """Run a program under the watch until it is stopped."""
    reports = Told()
    watch = NonFiniteWatch(reports, lambda: recorder, is_strict=is_strict)
    with Recorder(watch=watch) as recorder:
        try:
            run()
        except ArithmeticError:
            assert reports.arrivals or reports.stops
    assert recorder.limits == []
    return reports


def short(name: str) -> str:
    return name.rpartition(".")[2]


def arrived(run: Callable[[], Any]) -> list[Any]:
    """Return sink, kind and name of the maker, and the names of the calls on the way."""
    found = [it for it in told(run).arrivals if it.maker is not None]
    return [
        (it.sink, it.maker.kind, short(it.maker.step.name), *(short(step.name) for step in it.way))
        for it in found
        if it.maker is not None
    ]


def read(make: Callable[[], Tensor]) -> list[Any]:
    """Return what arrived where the host read the sum of a tensor."""
    return arrived(lambda: make().sum().item())


def then(x: Tensor, *calls: Callable[[Tensor], object]) -> Tensor:
    """Return a tensor after calls that write to it."""
    for call in calls:
        call(x)
    return x


def neg() -> Tensor:
    return tensor([-1.0, 4.0])


def out_of(value: float) -> Tensor:
    """Return a result of ``torch.log`` in a tensor that had another value."""
    out = tensor([value, value])
    torch.log(neg(), out=out)
    return out


def copied_into(x: Tensor, *, other: bool) -> Tensor:
    """Write into a tensor with NaN itself, or another one that is finite."""
    x.copy_(neg() if other else x.detach())
    return x


def listed() -> Tensor:
    items = [tensor([1.0]), neg()]
    torch._foreach_log_(items)
    return items[1]


OLD = tensor([NAN, 1.0])
BIG = tensor([INF, 1.0])


@pytest.mark.parametrize(
    ("make", "maker"),
    {
        "made": (lambda: neg().log(), ["made", "log", "sum"]),
        "made in place": (lambda: then(neg(), Tensor.log_), ["made", "log_", "sum"]),
        "made in place of a list": (listed, ["made", "_foreach_log_", "sum"]),
        "made in place of a result": (
            lambda: then(neg() + 0, Tensor.log_),
            ["made", "log_", "sum"],
        ),
        "out=": (lambda: out_of(1.0), ["made", "log", "sum"]),
        "out= over a NaN": (lambda: out_of(NAN), ["made", "log", "sum"]),
        "written over": (lambda: then(neg().log(), Tensor.zero_), None),
        "written over in a part": (lambda: then(neg().log(), lambda x: x[:1].zero_()), None),
        "good again": (lambda: then(neg().log(), lambda x: x.nan_to_num_()), None),
        "from outside": (lambda: OLD * 1, None),
        "from outside, in place": (lambda: then(OLD.clone(), lambda x: x.mul_(1)), None),
        "from outside, in place at once": (lambda: then(OLD, lambda x: x.mul_(1)), None),
        "copied over itself": (lambda: copied_into(OLD, other=False), None),
        "copied over a NaN that was made": (lambda: copied_into(neg().log(), other=True), None),
        "a NaN out of an infinity that was made": (
            lambda: (x := 1 / tensor([0.0, 1.0])) - x,
            ["made", "__rtruediv__", "sub", "sum"],
        ),
        "a NaN out of an infinity that was asked for": (
            lambda: (x := torch.full((2,), INF)) - x,
            ["made", "sub", "sum"],
        ),
        "a NaN out of an infinity that came in": (lambda: BIG - BIG, ["made", "sub", "sum"]),
        "a NaN besides one that was asked for": (
            lambda: neg().log().masked_fill(tensor([False, True]), -INF),
            ["made", "log", "masked_fill", "sum"],
        ),
        "a NaN that was asked for, besides an infinity": (
            lambda: (1 / tensor([0.0, 1.0])).masked_fill(tensor([False, True]), NAN),
            None,
        ),
        "a mask by its name": (
            lambda: neg().masked_fill(mask=tensor([False, True]), value=NAN),
            None,
        ),
        "computed with in place": (
            lambda: then(neg().log(), lambda x: x.add_(1)),
            ["made", "log", "add_", "sum"],
        ),
        "made of the good part": (lambda: neg().log()[1:].acos(), ["made", "acos", "sum"]),
        "made of an infinity beside a NaN": (
            lambda: (x := tensor([NAN, INF])[1:]) - x,
            ["made", "sub", "sum"],
        ),
        "a mask alone": (lambda: neg().masked_fill(tensor([False, True]), NAN), None),
        "the NaN of two that are bad": (
            lambda: (1 / tensor([0.0, 1.0])) + neg().log(),
            ["made", "log", "add", "sum"],
        ),
        "asked for and made": (lambda: torch.full((2,), NAN) + neg().log(), None),
        "a view": (lambda: neg().log().view(1, 2)[:, :1], ["made", "log", "sum"]),
        "a view of the good part": (lambda: neg().log()[1:], None),
        "a part written in place": (
            lambda: then(tensor([4.0, 1.0]), lambda x: x[:1].sub_(5.0).log_()),
            ["made", "log_", "sum"],
        ),
        "joined with what was asked for": (
            lambda: torch.cat([torch.full((1,), INF), neg().log()]).masked_fill(
                tensor([True, False, False]), -INF
            ),
            ["made", "log", "cat", "masked_fill", "sum"],
        ),
        "an infinity": (lambda: 1 / tensor([0.0, 1.0]), None),
    }.values(),
)
def test_a_nan_that_is_read_leads_to_the_call_that_made_it(
    make: Callable[[], Tensor], maker: Any
) -> None:
    OLD[0], BIG[0] = NAN, INF
    assert read(make) == ([] if maker is None else [("read", *maker)])


class Rows(Dataset[Tensor]):
    """Two rows, each made by a function."""

    def __init__(self, row: Callable[[], Tensor]) -> None:
        self.row = row

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return self.row()


@pytest.mark.parametrize(
    ("row", "found"),
    {
        "computed": (
            lambda: neg().log() * 2,
            [("loss", "made", "log", "mul", "stack", "sub", "sum")],
        ),
        "of the data": (lambda: OLD, [("loss", "entered", "sub", "sub", "sum")]),
        "computed with": (lambda: OLD * 2, [("loss", "entered", "sub", "sub", "sum")]),
        "asked for": (
            lambda: torch.full((2,), NAN),
            [("loss", "entered", "sub", "sub", "sum")],
        ),
        "good": (neg, []),
    }.values(),
)
def test_of_a_loader_only_what_its_dataset_computes_is_made(
    row: Callable[[], Tensor], found: list[Any]
) -> None:
    """A value of the data is named where the batch is first read."""
    weight = parameter(0.0, 1.0)

    def run() -> None:
        (batch,) = DataLoader(Rows(row), batch_size=2)
        (batch - weight).sum().backward()

    OLD[0] = NAN
    assert arrived(run) == found


def test_a_strict_watch_stops_at_the_first_call() -> None:
    assert told(lambda: (neg().log(), neg().sqrt()), is_strict=True).stops == ["torch.Tensor.log"]
    assert told(lambda: 1 / tensor([0.0]), is_strict=True).stops == ["torch.Tensor.__rtruediv__"]
    assert told(lambda: OLD * 1, is_strict=True).stops == []
    assert told(lambda: BIG * 1, is_strict=True).stops == []
    assert told(lambda: BIG - BIG, is_strict=True).stops == ["torch.Tensor.sub"]
    assert told(lambda: torch.full((2,), INF) + 1, is_strict=True).stops == []


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(tensor([*values]))


@pytest.mark.parametrize(
    ("value", "is_leaf", "needs_grad", "found"),
    [
        (-1.0, True, True, [("parameter", "made", "log_")]),
        (1.0, True, True, []),
        (-1.0, False, True, []),
        (-1.0, True, False, []),
        (NAN, True, True, []),
    ],
)
def test_a_parameter_that_code_without_an_optimizer_writes_to(
    value: float, is_leaf: bool, needs_grad: bool, found: list[Any]
) -> None:
    x = tensor([value, 4.0], requires_grad=needs_grad)

    def run() -> None:
        target = x if is_leaf else x * 1
        with torch.no_grad():
            target.log_()

    assert arrived(run) == found


def test_a_parameter_that_a_nan_is_copied_into() -> None:
    weight = parameter(1.0, 2.0)

    def run() -> None:
        with torch.no_grad():
            weight.copy_(neg().log())

    assert arrived(run) == [("parameter", "made", "log", "copy_")]


def test_of_a_list_that_was_written_to_the_bad_item_is_told() -> None:
    (found,) = told(lambda: listed().sum().item()).arrivals
    assert found.maker is not None and found.maker.violation is not None
    assert "of item 1" in found.maker.violation.headline


def test_running_statistics_are_written_beside_the_result() -> None:
    mean, var = torch.zeros(3), torch.ones(3)

    def run() -> None:
        F.batch_norm(torch.full((4, 3), 3e38), mean, var, training=True)
        var.sum().item()

    assert arrived(run) == []
    assert not var.isfinite().all()

    def run_nan() -> None:
        F.batch_norm(torch.full((4, 3), -1.0).log(), mean, var, training=True)
        mean.sum().item()

    mean.zero_()
    assert arrived(run_nan) == [("read", "made", "log", "batch_norm", "sum")]


# --- backward ------------------------------------------------------------------------------------


def test_a_loss_is_named_with_what_made_it() -> None:
    weight = parameter(-1.0, 1.0)
    assert arrived(lambda: weight.log().sum().backward()) == [("loss", "made", "log", "sum")]
    assert arrived(lambda: (weight * NAN).sum().backward()) == [("loss", "asked", "mul", "sum")]
    loss = (weight * tensor([NAN, 1.0])).sum()
    assert arrived(loss.backward) == [("loss", "entered", "")]
    assert arrived(lambda: weight.sum().backward()) == []


def test_a_gradient_is_named_with_the_node_that_made_it() -> None:
    weight = parameter(0.0, 1.0)
    found = told(lambda: weight.sqrt().sum().backward()).arrivals
    assert [(it.sink, it.maker and it.maker.step.name, it.is_alone) for it in found] == [
        ("gradient", "SqrtBackward0", True)
    ]
    assert found[0].tensor is weight and not found[0].has_nan
    assert [step.name for step in found[0].way] == ["torch.autograd.backward"]
    weight.grad = None
    found = told(lambda: (weight.sqrt() + weight.sqrt()).sum().backward()).arrivals
    assert [(it.sink, it.is_alone) for it in found] == [("gradient", False)]


def test_a_gradient_that_grad_returns_is_marked() -> None:
    x = tensor([0.0, 1.0], requires_grad=True)

    def run(loss: Tensor) -> None:
        (grad,) = torch.autograd.grad(loss, x)
        (grad * 0).sum().item()

    found = told(lambda: run(x.sqrt().sum())).arrivals
    assert [(it.sink, it.maker and it.maker.step.name) for it in found] == [
        ("read", "SqrtBackward0")
    ]
    assert [short(step.name) for step in found[0].way] == ["backward", "mul", "sum"]
    assert arrived(lambda: run((x + 1).sqrt().sum())) == []


def test_of_a_gradient_that_was_bad_before_no_node_is_the_maker() -> None:
    """A hook has made it, or the caller of ``backward``."""
    weight = parameter(4.0, 1.0)
    found = told(lambda: (weight * 2).exp().backward(tensor([NAN, 1.0]))).arrivals
    assert [(it.sink, it.maker and it.maker.kind) for it in found] == [("gradient", "entered")]
    violation = found[0].maker and found[0].maker.violation
    assert violation is not None and violation.argument == "gradient"
    strict = told(lambda: (weight * 2).exp().backward(tensor([NAN, 1.0])), is_strict=True)
    assert (strict.stops, strict.arrivals) == ([], [])
    second = tensor([2.0, 2.0]) * weight
    assert arrived(lambda: second.backward(tensor([NAN, 1.0]))) == [
        ("gradient", "entered", "MulBackward0", "backward")
    ]


def test_a_node_that_computes_with_a_nan_of_forward_leads_to_its_call() -> None:
    weight = parameter(4.0, 1.0)

    def run(bad: Tensor) -> None:
        torch.where(tensor([False, True]), weight * bad, 0.0).sum().backward()

    assert arrived(lambda: run(neg().log())) == [("gradient", "made", "log", "mul", "backward")]
    weight.grad = None
    assert arrived(lambda: run(1 / tensor([0.0, 1.0]))) == [
        ("gradient", "made", "__rtruediv__", "mul", "backward")
    ]
    weight.grad = None
    assert arrived(lambda: run(neg().exp())) == []
    (found,) = told(lambda: run(tensor([INF, 1.0]))).arrivals
    assert found.maker is not None and found.maker.step.name == "MulBackward0"


def test_a_node_that_computes_with_a_nan_of_its_own_result_leads_to_its_call() -> None:
    weight = parameter(-1.0, 1.0)

    def run() -> None:
        weight.sqrt().nan_to_num().sum().backward()

    assert arrived(run) == [("gradient", "made", "sqrt", "backward")]

    def run_discarded() -> None:
        torch.where(tensor([False, True]), weight.sqrt(), 0.0).sum().backward()

    weight.grad = None  # what ``where`` takes nothing of was no cause
    assert arrived(run_discarded) == [("gradient", "made", "SqrtBackward0", "backward")]


@pytest.mark.parametrize(("value", "kind"), [(NAN, "entered"), (INF, "made")])
def test_what_forward_had_saved_before_the_watch_began(value: float, kind: str) -> None:
    weight = parameter(4.0, 1.0)
    loss = torch.where(tensor([False, True]), weight * tensor([value, 1.0]), 0.0).sum()
    (found,) = told(loss.backward).arrivals
    assert found.maker is not None and found.maker.violation is not None
    assert (found.maker.kind, found.maker.step.name) == (kind, "MulBackward0")
    is_saved = "computes with a nan that forward has saved" in found.maker.violation.headline
    assert is_saved is (kind == "entered")


def test_of_two_nans_of_forward_neither_is_taken_for_the_cause() -> None:
    weight = parameter(4.0, 1.0)

    def run() -> None:
        both = (weight * neg().log()) * neg().sqrt()
        torch.where(tensor([False, True]), both, 0.0).sum().backward()

    assert arrived(run) == [("gradient", "entered", "MulBackward0", "backward")]


def test_a_loss_that_a_scaler_has_made_infinite_hides_no_other() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    weight = parameter(1e5, -1.0)

    def run(*, both: bool) -> None:
        scaled = scaler.scale(weight.sum())
        torch.autograd.backward([scaled, weight.log().sum()] if both else [scaled])

    assert arrived(lambda: run(both=False)) == []
    assert arrived(lambda: run(both=True)) == [("loss", "made", "log", "sum")]


@pytest.mark.parametrize(("takes", "is_discarded"), [(False, True), (True, False)])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_where_discards_is_told(takes: bool, is_discarded: bool, is_first: bool) -> None:
    weight = parameter(0.0, 1.0)
    taken = tensor([takes, True])

    def run() -> None:
        root, other = weight.sqrt(), torch.zeros(2)
        if is_first:
            torch.where(taken, root, other).sum().backward()
        else:
            torch.where(~taken, other, root).sum().backward()

    found = told(run)
    (arrival,) = found.arrivals
    assert arrival.maker is not None and arrival.maker.violation is not None
    assert arrival.maker.violation.is_discarded is is_discarded
    strict = told(run, is_strict=True)
    assert strict.stops == ["SqrtBackward0"]
    for (condition,) in (found.conditions, strict.conditions):
        assert condition.tolist() == [takes is is_first, is_first]


def test_the_makers_of_a_pass_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudalens.recorder.nonfinite._MAX_MAKERS", 2)
    noted = list[str]()
    monkeypatch.setattr(Told, "note", lambda self, args, it, *_: noted.append(it.op))
    weight = parameter(0.0, 1.0)
    told(lambda: sum(weight.sqrt() for _ in range(4)).sum().backward())  # type: ignore[union-attr]
    assert noted == ["SqrtBackward0"] * 2


def test_two_losses_are_both_looked_at() -> None:
    weight = parameter(-1.0, 1.0)

    def run() -> None:
        torch.autograd.backward([weight.exp().sum(), weight.log().sum()])

    assert arrived(run) == [("loss", "made", "log", "sum")]


def test_what_an_optimizer_computes_is_its_own() -> None:
    weight = parameter(1.0, 2.0)
    weight.grad = torch.ones(2)

    class Odd(torch.optim.SGD):
        """Writes a NaN on the way, and takes it back."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            old = weight.clone()
            weight.fill_(-1.0).log_()
            weight.copy_(old)

    assert arrived(lambda: Odd([weight]).step()) == []
    watch = NonFiniteWatch(Told(), lambda: recorder)
    with Recorder(watch=watch) as recorder:
        made = neg().log()
        watch.steps.before(Odd([weight]), None)
        watch.steps.scaled(torch.amp.GradScaler("cpu"), tensor([1.0]), scaled := tensor([1.0]))
        assert watch.steps.is_inside and watch.marked and watch.steps.is_overscaled(scaled)
        watch.let_go()
        assert not watch.marked and not watch.steps.is_overscaled(scaled)
        watch.of_loss([made * 0], None)
        assert not watch.steps.is_inside


# --- guards --------------------------------------------------------------------------------------


def test_a_guard_meets_a_nan_that_has_a_cause() -> None:
    reports, old, loss = Told(), tensor([NAN, 1.0]), tensor([NAN])
    watch = NonFiniteWatch(reports, lambda: recorder)
    with Recorder(watch=watch) as recorder:
        made, big, asked = neg().log(), 1 / tensor([0.0]), torch.full((1,), NAN)
        entered = tensor([1.0])
        good = neg() + 1
        _ = old * 1
        found = [watch.of_guard("op", it, None) for it in (made, old, big, asked, entered, good)]
        assert [it is not None for it in found] == [True, True, False, False, False, False]
        assert [it.sink for it in reports.arrivals] == ["guard", "guard"]
        watch.of_loss([loss], None)
        assert watch.of_guard("op", loss, None) is None  # nobody knows how it became so
        assert reports.arrivals[0].step.name == "op"
        watch.let_go()
        assert watch.of_guard("op", made, None) is None
    strict = NonFiniteWatch(reports, lambda: recorder, is_strict=True)
    assert strict.of_guard("op", made, None) is None
