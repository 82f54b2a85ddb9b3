"""Which edit of a refused call is shown: the cheapest that succeeds, if it is the only one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import Frame, Hint, OpName, SourceSpan
from cudalens.diagnosis import candidates
from cudalens.diagnosis.candidates import Trial, TrialResult, search, verify_fixes
from cudalens.diagnosis.moves import Called
from cudalens.diagnosis.user_code import Change, Fix
from tests.builders import fact, spelled
from tests.hint_evidence import syntax_of


class Taking(Trial):
    """A trial in which the edits with these texts succeed."""

    def __init__(self, *fixes: str, operands: Any = (), **answers: Any) -> None:
        self.fixes, self.tried = fixes, list[str | None]()
        self.operands = operands
        self.reason: str | None = answers.pop("reason", None)
        self.result: Callable[[], TrialResult] = lambda: TrialResult(succeeds=True)
        self.is_chance = answers.pop("is_chance", False)
        self.__dict__.update(answers)

    def __call__(self, fix: Fix | None) -> TrialResult:
        self.tried.append(fix)
        if fix in self.fixes:
            return self.result()
        return TrialResult(succeeds=False, error=self.reason)

    def survives(self, fix: Fix, dims: int) -> bool:
        self.dims = dims
        return not self.is_chance


def evidence(call: str, api: str, **more: Any) -> Evidence:
    return Evidence(
        call=syntax_of(call), op=OpName(api=api), source=SourceSpan(line=1, text=call), **more
    )


X, W = fact(None, "float32[2,3]", "x"), fact(None, "float32[4,3]", "w")
MM = evidence("torch.mm(x, w)", "torch.mm")


def fixes(trial: Trial, given: Evidence = MM) -> list[str | None]:
    return [item.fix for item in search(given, trial)]


def test_the_one_edit_that_succeeds_is_shown() -> None:
    (hint,) = search(MM, Taking("torch.mm(x, w.T)", operands=(X, W)))
    assert (hint.fix, hint.rule, hint.tried) == ("torch.mm(x, w.T)", "transposed_operand", True)
    assert fixes(Taking(operands=(X, W))) == []


def test_of_two_that_cost_the_same_none_is_shown() -> None:
    both = Taking("torch.mm(x, w.T)", "torch.mm(x.T, w)", operands=(X, W))
    assert fixes(both) == []


def test_the_cheaper_one_goes_first() -> None:
    x = fact(None, "float64[2,3]", "x")
    trial = Taking("torch.mm(x.float(), w)", "torch.mm(x, w.T)", operands=(x, W))
    assert fixes(trial) == ["torch.mm(x.float(), w)"]


def test_sizes_that_fit_by_chance_are_not_shown() -> None:
    assert fixes(Taking("torch.mm(x, w.T)", operands=(X, W), is_chance=True)) == []


def test_a_cast_is_tried_only_where_the_refusal_speaks_of_a_type() -> None:
    x = fact(None, "float64[2,3]", "x")
    wanted = "torch.mm(x.float(), w)"
    for reason, shown in (
        ("E: expected Float", [wanted]),
        ("E: sizes differ", []),
        (None, [wanted]),
    ):
        assert fixes(Taking(wanted, operands=(x, W), reason=reason)) == shown


def test_an_outer_product_is_no_fix() -> None:
    add = evidence("x + y", "torch.Tensor.__add__")
    rows, columns = fact(None, "float32[32]", "x"), fact(None, "float32[10]", "y")

    def step(item: Any) -> Any:
        changes = ((item, "{x}.unsqueeze(1)"),)
        return candidates._Step(rule="missing_dimension", words="", cost=1, changes=changes)

    def holds(*shape: int, given: Evidence = add) -> bool:
        outcome = TrialResult(succeeds=True, shape=shape)
        return candidates._holds(given, step(rows), outcome, (rows, columns))

    assert (holds(32, 10), holds(32, 1), holds(32, 10, given=MM)) == (False, True, True)
    assert candidates._is_broadcast(add, step(rows))
    assert not candidates._is_broadcast(MM, step(rows))
    mask = fact(None, "bool[32]", "mask")
    assert not candidates._is_broadcast(add, step(mask))
    both = candidates._Step(
        rule="missing_dimension", words="", cost=1,
        changes=((mask, "{x}.unsqueeze(1)"), (rows, "{x}[:, None]")),
    )  # fmt: skip
    assert candidates._is_broadcast(add, both)
    x, y = fact(None, "float32[2,5,3]", "x"), fact(None, "float32[2,5]", "y")
    turned = "x.transpose(0, 2) + y"
    one = Taking(turned, operands=(x, y))
    assert (fixes(one, add), one.dims) == ([turned], 2)  # of an elementwise op both may be batches
    assert fixes(Taking(turned, "x + y.unsqueeze(2)", operands=(x, y)), add) == []


def test_what_the_order_of_labels_is_the_user_knows() -> None:
    """Words alone, where the rows of another line may be in another order."""
    given = evidence("F.cross_entropy(z, y)", "torch.nn.functional.cross_entropy")
    z, y = fact("input", "float32[6,5]", "z"), fact("target", "int64[2,3]", "y")
    (hint,) = search(given, Taking("F.cross_entropy(z, y.reshape(-1))", operands=(z, y)))
    assert (hint.rule, hint.fix, hint.tried) == ("labels_in_order", None, None)
    codes = fact("target", "int64[6,5]", "y")
    (hint,) = search(given, Taking("F.cross_entropy(z, y.argmax(1))", operands=(z, codes)))
    assert (hint.rule, hint.fix, hint.tried) == ("one_hot_classes", None, None)


def test_what_the_call_does_not_spell_is_changed_before_it() -> None:
    given = evidence("f(**b)", "torch.f")
    names = [fact(None, "float64[2]", f'b["{key}"]') for key in "xy"]
    names = [replace(it, span=(1, 2, 3)) for it in names]
    known = (*names, fact(None, "float32[2]", "c"))
    wanted = 'b["x"] = b["x"].float()\nb["y"] = b["y"].float()'
    (hint,) = search(given, Taking(wanted, operands=known))
    assert isinstance(hint.fix, Fix) and [it.span for it in hint.fix.changes] == [None, None]
    part = (names[0], fact(None, "float64[2]", "g()"), known[2])
    trial = Taking(operands=part)
    assert fixes(trial, given) == []
    assert not any(str(it).endswith("\n") for it in trial.tried)


def test_a_whole_division() -> None:
    given = evidence("torch.zeros(n / 2)", "torch.zeros")
    (hint,) = search(given, Taking("torch.zeros(n // 2)"))
    assert (hint.rule, hint.fix) == ("true_division", "torch.zeros(n // 2)")
    two = evidence("torch.zeros(n / 2, m / 2)", "torch.zeros")
    assert fixes(Taking("torch.zeros(n // 2, m / 2)", "torch.zeros(n / 2, m // 2)"), two) == []
    assert fixes(Taking(), given) == []


def test_a_view_that_torch_refuses_gets_no_other_order() -> None:
    """It says itself to use reshape; below a library's line the user has no such line."""
    words = "view size is not compatible with input tensor's size and stride"
    error = ErrorFacts(type_name="RuntimeError", message=words)
    x = fact(None, "float32[2,3,4]", "x")
    wanted = "x.transpose(1, 2).view(6, 4)"
    here = Frame(file="a.py", line=1, function="f", is_user=True)
    below = Frame(file="/site-packages/b.py", line=1, function="g")
    for message, frames, shown in (
        (error, (here,), []),
        (error, (here, below), [wanted]),
        (error, (), [wanted]),
        (replace(error, message="shape is invalid"), (here,), [wanted]),
    ):
        given = evidence("x.view(6, 4)", "torch.Tensor.view", error=message, frames=frames)
        assert fixes(Taking(wanted, operands=(x,)), given) == shown


def test_a_mask_of_scores_lines_up_on_purpose() -> None:
    """A cast beside three dimensions is no outer product; one of the shape may be."""
    add = evidence("x + y", "torch.Tensor.__add__")
    cast = candidates._Step(rule="cast_needed", words="", cost=1, changes=((X, "{x}.float()"),))
    wide, row = fact(None, "float32[2,1,3]", "x"), fact(None, "float32[4,1]", "y")
    outcome = TrialResult(succeeds=True, shape=(2, 4, 3))
    assert candidates._holds(add, cast, outcome, (wide, row))
    flat = fact(None, "float32[1,3]", "x")
    assert not candidates._holds(add, cast, TrialResult(succeeds=True, shape=(4, 3)), (flat, row))
    assert candidates._holds(add, cast, TrialResult(succeeds=True, shape=()), (flat, row))
    assert candidates._holds(add, cast, TrialResult(succeeds=True), (flat, row))
    assert not candidates._holds(add, cast, TrialResult(succeeds=None), (flat, row))


def test_a_tensor_is_made_of_a_list_on_the_device_of_the_module() -> None:
    given = evidence("net(a)", "torch.nn.functional.linear")
    both = ("net(torch.tensor(a))", 'net(torch.tensor(a).to("cuda:0"))')
    listed = {"others": ((spelled("a"), "list"),), "called": Called(device="cuda:0")}
    (hint,) = search(given, Taking(*both, **listed))
    assert (hint.rule, hint.fix) == ("made_tensor", both[0])  # the shorter one goes first
    assert fixes(Taking(both[1], **listed), given) == [both[1]]


def test_a_model_moves_to_where_its_input_is() -> None:
    given = evidence("net(x)", "torch.nn.functional.linear")
    x = fact(None, "float32[2,3]", "x", device="cuda:0")
    moved = 'net.to("cuda:0")(x)'
    here = Called(device="cpu")
    (hint,) = search(given, Taking(moved, operands=(x,), called=here))
    assert (hint.rule, hint.fix) == ("move_model", moved)
    listed = Taking(moved, operands=(x,), called=here, unregistered=("self.parts", "dict"))
    (hint,) = search(given, listed)
    assert (hint.rule, hint.fix) == ("not_registered", None)
    assert "nn.ModuleDict" in hint.text
    for text, words in (("self.net(x)", "contains self.net"), ("nn.Linear(3, 2)(x)", "made anew")):
        head = text.removesuffix("(x)")
        one = Taking(f'{head}.to("cuda:0")(x)', operands=(x,), called=here)
        (hint,) = search(evidence(text, "torch.nn.functional.linear"), one)
        assert (hint.fix, words in hint.text) == (None, True)
    listed = Taking(moved, operands=(x,), called=here, unregistered=("self.parts", "list"))
    (hint,) = search(given, listed)
    assert "self.parts is a plain list" in hint.text and "nn.ModuleList" in hint.text
    on_host = fact(None, "float32[2,3]", "x", device="cpu")
    assert fixes(Taking(moved, operands=(on_host,), called=here), given) == []
    # Nothing is moved back to the host for a tensor that was left there.
    back = Taking('net.to("cpu")(x)', operands=(on_host,), called=Called(device="cuda:0"))
    assert fixes(back, given) == []
    assert fixes(Taking(moved, operands=(x,), called=Called()), given) == []
    on_device = Called(device="cuda:0")
    assert fixes(Taking(moved, operands=(x,), called=on_device), given) == []


def test_all_tensors_that_need_the_same_are_changed_together() -> None:
    given = evidence("f(a, b, c)", "torch.f")
    facts = [fact(None, "float64[2]", name) for name in "ab"]
    known = (*facts, fact(None, "float32[2]", "c"))
    assert fixes(Taking("f(a.float(), b.float(), c)", operands=known), given) == [
        "f(a.float(), b.float(), c)"
    ]


def test_hints_whose_fixes_fail_are_dropped() -> None:
    def hint(text: str, tried: bool | None = None) -> Hint:
        return Hint(rule="r", text=text, fix=Fix(text, [Change("x", text)]), tried=tried)

    class Some(Trial):
        def __call__(self, fix: Fix | None) -> TrialResult:
            return TrialResult(succeeds={"good": True, "bad": False}.get(fix or ""))

    found = verify_fixes(map(hint, ("good", "bad", "unknown")), Some())
    assert [(item.text, item.fix, item.tried) for item in found] == [
        ("good", "good", True),
        ("unknown", None, None),
    ]
    (kept,) = verify_fixes([hint("bad", True)], Some())
    assert kept.fix == "bad"
