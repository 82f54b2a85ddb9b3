"""The refused call made again with changes: what succeeds here, and with another batch too."""

from __future__ import annotations

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cudalens.core.call import ApiCall, Call, OpCall
from cudalens.diagnosis.candidates import TrialResult
from cudalens.diagnosis.user_code import Change, Fix
from cudalens.evidence import attempt
from cudalens.evidence import trial as module
from cudalens.evidence.failing_call import call_of
from cudalens.evidence.trial import ApiTrial, call_of_finding, quiet_torch, trial_of_error
from cudalens.evidence.variables import line_of
from tests.probes import asked

X, W = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)


def tried(func: Any, of: Any, text: str = "here(x, w)", **names: Any) -> Any:
    """Return what ``of`` gives for the trial of ``func`` with the arguments of a line."""
    names = {"x": X, "w": W, **names}

    def ask(frames: Any) -> Any:
        line = line_of(frames)
        assert line is not None
        read = call_of(frames, line)
        args = tuple(item.value for item in read.operands if isinstance(item.value, torch.Tensor))
        api = ApiCall(func=func, args=args)
        call = Call(api=api, operands=read.operands)
        return of(ApiTrial(call, line, has_autograd=True))

    return asked(text, ask, **names)[-1]


def change(template: str, text: str = "w") -> Fix:
    return Fix("…", [Change(text, template)])


def test_the_unchanged_call_fails_for_its_reason_without_numbers() -> None:
    result = tried(torch.mm, lambda it: it(None))
    assert result.succeeds is False
    assert result.error is not None
    said = result.error.replace("mm: ", "")  # from torch 2.15 on
    assert said == "RuntimeError: mat# and mat# shapes cannot be multiplied (#x# and #x#)"


def test_a_change_succeeds_with_its_shape_or_fails() -> None:
    assert tried(torch.mm, lambda it: it(change("{x}.T"))) == TrialResult(
        succeeds=True, shape=(2, 2)
    )
    assert tried(torch.mm, lambda it: it(change("{x} + 1"))).succeeds is False


def test_a_success_says_nothing_where_the_unchanged_call_succeeds_too() -> None:
    assert tried(torch.add, lambda it: it(change("{x} + 1"))) == TrialResult()


def test_code_of_the_users_is_not_run() -> None:
    def mine(*args: Any) -> Any:
        raise AssertionError("it was run")

    assert tried(mine, lambda it: it(None)) == TrialResult()


def test_not_under_autocast() -> None:
    def of(trial: ApiTrial) -> TrialResult:
        trial.is_possible = False
        return trial(change("{x}.T"))

    assert tried(torch.mm, of) == TrialResult()


def test_no_change_is_tried_after_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(torch.mm, lambda it: [it(None), it(change("{x}.T"))][1]).succeeds
    monkeypatch.setattr(module, "MAX_SECONDS", -1.0)
    assert tried(torch.mm, lambda it: [it(None), it(change("{x}.T"))][1]) == TrialResult()


def survives(func: Any, fix: Fix, dims: int = 1, **names: Any) -> bool:
    def of(trial: ApiTrial) -> bool:
        assert trial(fix).succeeds
        return trial.survives(fix, dims)

    return bool(tried(func, of, **names))


def test_a_fix_that_fits_this_batch_by_chance_does_not_survive() -> None:
    # Rows of as many features as there are samples.
    assert survives(F.linear, change("{x}.T", "w"), x=torch.ones(5, 4), w=_weight())
    assert not survives(torch.mm, change("{x}.reshape(3, 2)"), x=X, w=W)


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 2))


def test_nothing_survives_that_did_not_succeed() -> None:
    assert tried(torch.mm, lambda it: it.survives(change("{x}.T"), 1)) is False


def test_parameters_and_buffers_are_no_data() -> None:
    layer = nn.BatchNorm1d(3)

    def of(trial: ApiTrial) -> list[bool]:
        parts = [X, layer.running_mean, layer.weight, layer.running_mean[:2]]  # type: ignore[index]
        return [trial._is_data(item) for item in parts]  # type: ignore[arg-type]

    assert tried(torch.add, of, layer=layer) == [True, False, False, False]


def test_torch_runs_unseen() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with torch.no_grad(), quiet_torch(has_autograd=True):
        torch.rand(3)
        assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    with quiet_torch(has_autograd=False):
        assert not torch.is_grad_enabled()


@pytest.mark.parametrize("has_autograd", [True, False])
def test_no_mode_and_no_warning_tells_of_a_trial(has_autograd: bool) -> None:
    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.extend(["add"] * func.__name__.startswith("add"))
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        __torch_dispatch__ = Functions.__torch_function__

    with warnings.catch_warnings(record=True) as caught, Functions(), Ops():
        with quiet_torch(has_autograd=has_autograd):
            torch.add(X, 1)
            warnings.warn("torch's", stacklevel=1)
        assert (seen, caught) == ([], [])
        torch.add(X, 1)
        assert len(seen) == 2


@pytest.mark.parametrize(
    ("outer", "rearrange", "tried_of"),
    [
        (True, None, ["outer"]),
        (False, None, ["outer"]),
        (None, None, ["outer", "inner"]),
        (False, "b s d -> s b d", ["outer", "inner"]),
    ],
)
def test_a_change_is_tried_from_the_outermost_call_inwards(
    outer: bool | None, rearrange: Any, tried_of: list[str]
) -> None:
    """What an outer call has answered stands, unless dimensions may be rearranged further in."""
    calls = {name: ApiCall(func=torch.mm, args=(X, W)) for name in ("outer", "inner")}
    names = {id(call): name for name, call in calls.items()}
    asked_of: list[str] = []

    def run(api: ApiCall, fix: Fix | None) -> TrialResult:
        if fix is None:
            return TrialResult(succeeds=False)
        asked_of.append(names[id(api)])
        return TrialResult(succeeds=outer if names[id(api)] == "outer" else False)

    def of(trial: Any) -> Any:
        trial.call = Call(api=calls["inner"], enclosing=(calls["outer"],), operands=())
        trial._run, trial._succeeded = run, calls["inner"]
        return trial(Fix("…", [Change("w", "{x}.T")], rearrange)), trial._succeeded

    result, succeeded = tried(torch.mm, of)
    assert (result.succeeds, asked_of) == (outer is True, tried_of)
    assert succeeded is (calls["outer"] if outer else None)


def test_no_trial_without_a_line() -> None:
    assert trial_of_error(RuntimeError(), [], None) is None


def test_no_trial_of_an_error_that_speaks_of_autocast() -> None:
    def is_possible(message: str) -> bool:
        def ask(frames: Any) -> Any:
            trial = trial_of_error(RuntimeError(message), frames, None)
            assert trial is not None
            return trial.is_possible

        return bool(asked("here(x, w)", ask, x=X, w=W)[-1])

    assert is_possible("binary_cross_entropy is refused")
    assert not is_possible("binary_cross_entropy is unsafe to autocast")


@pytest.mark.parametrize("way", ["_run", "_is_possible"])
def test_a_time_out_of_the_users_ends_a_trial(way: str) -> None:
    """What a signal handler raises is no answer of torch's to the call."""

    def handler(number: int, frame: Any) -> None:
        raise TimeoutError("mine")

    def answer(fails: Any) -> Any:
        def of(trial: Any) -> Any:
            trial._attempt = lambda **_: SimpleNamespace(run=fails)
            call = ApiCall(func=torch.mm, args=(X, W))
            more = (None,) if way == "_is_possible" else ()
            return getattr(trial, way)(call, change("{x}.T"), *more)

        return tried(torch.mm, of)

    def refused(*_: object) -> None:
        raise RuntimeError("sizes")

    assert answer(refused) in (False, TrialResult(succeeds=False, error="RuntimeError: sizes"))
    with pytest.raises(TimeoutError, match="mine"):
        answer(lambda *_: handler(14, sys._getframe()))


class Held(nn.Module):
    """A module with a tensor in its parts, and a list of them that no module registers."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm1d(3))
        self.inner.table = table  # type: ignore[assignment]


def test_what_parts_of_a_module_hold_is_no_data() -> None:
    table, free = torch.ones(2), torch.ones(2)
    net = Held(table)

    def of(trial: ApiTrial) -> list[bool]:
        mean = net.inner[0].running_mean
        return [trial._is_data(item) for item in (table, table[:1], mean, free)]  # type: ignore[arg-type]

    assert tried(torch.add, of, net=net) == [False, False, False, True]
    leaf, inner = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True) * 2
    assert tried(torch.add, lambda it: [it._is_data(leaf), it._is_data(inner)]) == [False, True]


def test_a_change_survives_where_its_other_dimension_may_be_the_batch() -> None:
    """Of three dimensions the second may be that of the batch, too."""
    x, y = torch.ones(5, 4, 3), torch.ones(20, 3)
    fix = change("{x}.reshape(5, 4, 3)", "w")
    assert not survives(torch.add, fix, 1, x=x, w=y)
    fixed = change("{x}.view(-1, 4, 3)", "w")
    assert survives(torch.add, fixed, 1, x=x, w=y)
    assert not survives(torch.add, fixed, 2, x=x, w=y)


def test_shapes_that_need_values_are_taken_as_they_are() -> None:
    """A mask has as many places as it has values: this batch counts."""
    mask = torch.tensor([1, 0])
    fix = change("{x}.bool()", "w")
    assert survives(torch.masked_select, fix, x=torch.ones(2), w=mask)


def test_the_call_of_a_finding_is_read_from_its_line() -> None:
    op = OpCall(op=torch.ops.aten.mm.default, arguments={}, args=(X, W))

    def ask(frames: Any) -> Any:
        found = call_of_finding(frames, op)
        assert found is not None
        call, line = found
        return call.op is op, getattr(line.running.node, "lineno", None), line.frame is frames[-1]

    assert asked("here(x, w)", ask, x=X, w=W) == [(True, 1, True)]
    assert call_of_finding([], op) is None


def test_what_is_too_large_to_copy_is_tried_by_its_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempt, "MAX_VALUES", 1)
    assert tried(torch.mm, lambda it: it(change("{x}.T"))) == TrialResult(
        succeeds=True, shape=(2, 2)
    )
    assert tried(torch.mm, lambda it: it(change("{x}.long()"))) == TrialResult()


def test_a_value_that_a_guard_refuses_fails_without_a_reason() -> None:
    outside = torch.tensor([9])
    result = tried(F.embedding, lambda it: it(None), x=outside, w=W)
    assert result == TrialResult(succeeds=False)
    assert tried(F.embedding, lambda it: it(change("{x} - 9", "x")), x=outside, w=W).succeeds
