"""The trap of ``where``: it discards a value, and not the NaN that backward makes of it."""

from __future__ import annotations

import pytest

from cudalens.core.evidence_types import Marks, ShortInput
from cudalens.core.report import Evidence
from cudalens.core.report_types import Violation
from cudalens.diagnosis.candidates import Trial
from cudalens.diagnosis.observed_nonfinite import discarded, short_input
from tests.nan_programs import checked

pytestmark = pytest.mark.usefixtures("sim")
X = "x = torch.tensor([0.0, 4.0], device='cuda', requires_grad=True)\n"
TRAP = "where() discards the result of {} there, but 0 times its infinite slope is nan"


def said(code: str) -> list[str]:
    """The texts of what is observed in a program that is stopped."""
    report, _ = checked(f"{X}{code}")
    assert report is not None
    return [item.text for item in report.observations]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torch.where(x > 0, x.sqrt(), x)", "sqrt"),
        ("torch.where(x == 0, x, x.log())", "log"),
        ("torch.where(x > 0, 1 / x, x)", "reciprocal"),
        ("torch.where(x > 0, x ** 0.5, x)", "pow"),
        ("x.sqrt().where(x > 0, x)", "sqrt"),
        ("torch.where(x[:, None] > 0, x[:, None].sqrt(), x)", "sqrt"),
    ],
)
@pytest.mark.parametrize("end", ["y.sum().backward()", "(y * 3).mean().backward()"])
def test_the_trap_is_told(line: str, name: str, end: str) -> None:
    assert TRAP.format(name) in said(f"y = {line}\n{end}")


@pytest.mark.parametrize(
    "code",
    [
        "(torch.where(x < 9, x.sqrt(), x) * 0).sum().backward()",  # it takes the root of 0
        "(x.sqrt() * 0).sum().backward()",  # no where
        "(x.sqrt() * torch.where(x > 0, 1, 0)).sum().backward()",  # it discards no root
        "torch.where(x > 0, x.sqrt() * 0, x.sqrt() * 0).sum().backward()",  # not next to it
        "torch.where(x > 0, x[:, None].sqrt(), x).sum().backward()",  # repeated, and taken once
    ],
)
def test_what_is_not_discarded_is_not_said_to_be(code: str) -> None:
    assert not any(text.startswith("where()") for text in said(code))


def test_a_value_that_is_taken_elsewhere_is_not_discarded() -> None:
    """At one of the bad places the root is taken, with a gradient of 0."""
    code = "taken = torch.tensor([True, False, True], device='cuda')\n"
    code += "z = torch.zeros(3, device='cuda', requires_grad=True)\n"
    code += "g = torch.tensor([0.0, 0.0, 0.0], device='cuda')\n"
    code += "(torch.where(taken, z.sqrt(), 1.0) * g).sum().backward()"
    assert not any(text.startswith("where()") for text in said(code))


@pytest.mark.parametrize("is_discarded", [True, False])
def test_the_trap_is_one_where_the_value_is_discarded(is_discarded: bool) -> None:
    node = {"op": "SqrtBackward0", "is_nonfinite": True, "is_discarded": is_discarded}
    found = discarded(Evidence(violation=Violation(headline="", **node)), Trial())  # type: ignore[arg-type]
    assert [it.text for it in found] == [TRAP.format("sqrt")] * is_discarded


def test_an_item_with_too_few_steps_for_its_labels() -> None:
    short = ShortInput(item=1, steps=5, labels=4, repeats=2, items=1, total=3)

    def told(short: ShortInput | None) -> list[str]:
        return [it.text for it in short_input(Evidence(marks=Marks(short_input=short)), Trial())]

    text = "too few steps for 1 of 3 items: item 1 has 4 labels, 2 of them equal to the one before"
    assert told(short) == [f"{text}, which takes 6 steps, and its input length is 5"]
    third = short._replace(item=2, repeats=1)
    text = "too few steps for 1 of 3 items: item 2 has 4 labels, 1 of them equal to the one before"
    assert told(third) == [f"{text}, which takes 5 steps, and its input length is 5"]
    one = short._replace(labels=1, repeats=0, steps=0)
    text = "too few steps for 1 of 3 items: item 1 has 1 label, which takes 1 steps"
    assert told(one) == [f"{text}, and its input length is 0"]
    assert told(None) == []
