"""Errors of the host that turn on a value, a length or a place in a list; each with neighbours."""

from __future__ import annotations

from typing import Any

import pytest

from tests.hostcells import Outcome, run_cell

pytestmark = pytest.mark.usefixtures("sim")
SETUP = """
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Dirichlet, Normal
torch.manual_seed(0)
nan, inf = float("nan"), float("inf")
def t(*values):
    return torch.tensor(values, device="cuda")
net = nn.Linear(4, 2).cuda()
x = torch.rand(3, 4, device="cuda")
"""


def cell(code: str, **options: Any) -> Outcome:
    """Run one line after the common ones."""
    return run_cell(SETUP + code, **options)


def assert_silent(code: str, **options: Any) -> None:
    outcome = cell(code, **options)
    assert (outcome.error, outcome.report) == (None, None)


# --- values that a distribution refuses -----------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("setup", "bad", "headline", "names", "first", "count"),
    [
        ("z = t([0.0, nan], [nan, nan])", "Categorical(logits=z)",
         "logits[0, 1] = nan is not a number; 3 of 4 values are NaN", "logits z",
         ((0, 1), "nan"), 3),
        ("z = t([0.0, 1.0], [inf, 1.0])", "Categorical(logits=z)",
         "logits[1, 0] = inf becomes NaN in Categorical", "logits z", ((1, 0), "inf"), 1),
        ("p = t([2.0, 3.0], [2.0, -1.0])", "Categorical(p)",
         "probs[1, 1] = -1.0 does not satisfy GreaterThanEq(lower_bound=0.0)", "probs p",
         ((1, 1), -1.0), 1),
        ("p = t([2.0, 3.0], [0.0, 0.0])", "Categorical(probs=p)",
         "probs[1, 0] = 0.0 becomes NaN in Categorical", "probs p", ((1, 0), 0.0), 2),
        ("s = t(1.0, 0.0, -0.5)", "Normal(0.0, s)",
         "scale[1] = 0.0 does not satisfy GreaterThan(lower_bound=0.0)", "scale s", ((1,), 0.0), 2),
        ("", "Normal(0.0, -1.0)",
         "scale = -1.0 does not satisfy GreaterThan(lower_bound=0.0)", "scale", ((), -1.0), 1),
        ("a = t(1, 2); d = Categorical(torch.ones(2, 2, device='cuda'))", "d.log_prob(a)",
         "value[1] = 2 does not satisfy IntegerInterval(lower_bound=0, upper_bound=1)", "value a",
         ((1,), 2), 1),
    ],
)  # fmt: skip
def test_a_value_that_a_distribution_refuses(
    setup: str, bad: str, headline: str, names: str, first: tuple[Any, Any], count: int, fast: bool
) -> None:
    """The value, its place and how many: of what the user passed, which is what he can look at."""
    outcome = cell(f"{setup}\n{bad}", fast=fast)
    report = outcome.shown
    assert isinstance(outcome.error, ValueError)
    assert (report.kind, report.certainty, report.headline_schema) == (
        "host_error",
        "proven",
        headline,
    )
    assert [item for item in (report.argument, report.expression) if item] == names.split()
    assert report.offenders is not None and report.offenders.count == count
    found = report.offenders.first[0]
    assert (found.position, found.value) == first
    # The distribution has read the values on the device.
    assert "before running anything" not in report.explanation
    assert report.context_usable is True and report.limits == ()


@pytest.mark.parametrize(
    "good",
    [
        "Categorical(logits=t([0.0, -inf], [1e30, 1.0]))",
        "Categorical(t([2.0, 3.0], [0.0, 1.0]))",
        "Normal(0.0, t(1.0, 1e-30))",
        "Bernoulli(t(0.0, 1.0))",
        "Categorical(torch.ones(2, 2, device='cuda')).log_prob(t(1, 0))",
    ],
)
def test_values_at_the_bound_are_taken(good: str) -> None:
    """What the distribution takes gives no report."""
    assert_silent(good)


# --- dtypes of targets ----------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("scores", "labels", "loss", "dtypes", "fix"),
    [
        ("t(0.5, -2.0)", "t(0, 1)", "with_logits", "int64 float32", ".float()"),
        ("t(0.5, -2.0).half()", "t(0, 1)", "with_logits", "int64 float16", ".half()"),
        ("t(0.5, -2.0)", "t(0, 1).bool()", "with_logits", "bool", ".float()"),
        ("t(0.5, 0.25)", "t(0, 1)", "", "int64 float32", ".float()"),
        ("t(0.5, 0.25).double()", "t(0.0, 1.0)", "", "float32 float64", ".double()"),
        ("t(0.5, 0.25)", "t(0, 1).bool()", "", "bool float32", ".float()"),
    ],
)
def test_labels_of_another_dtype_than_the_scores(
    scores: str, labels: str, loss: str, dtypes: str, fix: str, fast: bool
) -> None:
    """torch speaks of an op in place, of a gradient or of a minus; what is wrong are the labels."""
    line = f"nn.functional.binary_cross_entropy{loss and '_'}{loss}(z, y)"
    outcome = cell(f"z = {scores}; y = {labels}\n{line}", fast=fast)
    report = outcome.shown
    assert all(dtype in report.headline for dtype in dtypes.split())
    assert (report.kind, report.argument, report.expression) == ("host_error", "target", "y")
    assert outcome.fixes == [line.replace("y)", f"y{fix})")]
    assert "place" not in report.explanation and "gradient" not in report.explanation
    assert_silent(f"z = {scores}; y = {labels}\n{outcome.fixes[0]}", fast=fast)


def test_under_autocast_no_change_is_tried() -> None:
    """Copies are not under autocast, so that any cast would succeed."""
    code = """
with torch.autocast("cuda"):
    nn.BCELoss()(net(x).sigmoid(), torch.ones(3, 2, device="cuda"))
"""
    assert cell(code).shown.hints == ()


# --- places in a list -----------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("line", "item", "argument"),
    [
        ("torch.cat(({}, x, x))", "torch.ones(1, 4)", "tensors[0]"),
        ("torch.cat(tensors=[x, {}])", "(h + 0)", "tensors[1]"),
        ("torch.cat([x, {}])", "h", "tensors[1]"),
        ("torch.stack([x, {}])", "(h + 0)", "tensors[1]"),
    ],
)
def test_the_item_on_another_device_is_named(
    line: str, item: str, argument: str, fast: bool
) -> None:
    """By its place in the list that the line spells; ``h`` alone is named by its value."""
    given = item.strip("()") if item.startswith("(") else item
    outcome = cell(f"h = torch.ones(3, 4)\n{line.format(given)}", fast=fast)
    report = outcome.shown
    # Without a recorder nothing contains the value of an expression.
    is_known = item == "h" or not fast
    named = (argument, given) if is_known else (None, None)
    assert (report.argument, report.expression) == named
    assert report.headline.startswith(f"{given} is on cpu, ") is is_known
    assert outcome.fixes == ([line.format(f"{item}.to(x.device)")] if is_known else [])


@pytest.mark.parametrize(
    "line",
    [
        "torch.cat([x + 0, h + 0])",  # either of the two may be the one
        "torch.cat([x, *[h + 0]])",  # a place in the text is none in the list
    ],
)
def test_without_certainty_no_item_is_named(line: str) -> None:
    """Guards alone do not know which of two unnamed items lies where; a trial does."""
    report = cell(f"h = torch.ones(3, 4)\n{line}").shown
    assert report.expression is None and "tensors[" not in report.headline_schema
    assert all(hint.tried for hint in report.hints if hint.fix)


def test_the_recorder_tells_the_items_apart() -> None:
    """It knows the device of each: the item is named although no value of it is held."""
    outcome = cell("h = torch.ones(3, 4)\ntorch.cat([x + 0, h + 0])", fast=False)
    assert outcome.shown.argument == "tensors[1]"
    assert outcome.fixes == ['torch.cat([x + 0, (h + 0).to("cuda:0")])']


def test_what_an_item_is_made_of_is_not_the_item() -> None:
    """``same`` keeps the shape: by shape and dtype alone, ``x`` could be the op's argument."""
    code = "same = nn.Linear(4, 4).cuda()\ntorch.mm(same(x), torch.ones(4, 2))"
    report = cell(code, fast=False).shown
    assert report.argument == "mat2"
    named = {item.argument: item.expression for item in report.tensors}
    assert named["self"] == "same(x)" and named[None] == "x"
    direct = cell("torch.mm(x, torch.ones(4, 2))", fast=False).shown
    assert {item.argument: item.expression for item in direct.tensors}["self"] == "x"


# --- nothing is named that is not proven ----------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "headline", "argument", "fixes", "is_listed"),
    [
        # ``p`` is on the line, and is not what Bernoulli was given.
        ("p = t(0.5, 1.0)\nBernoulli(*(p + 1,))", "probs[0] = 1.5 does not satisfy Interval",
         "probs", [], True),
        # Every element of the row is fine; only their sum is not 1.
        ("d = Dirichlet(t(1.0, 1.0))\nd.log_prob(t(0.5, 0.75))",
         "Expected value argument (Tensor of shape [2]) to be within the support (Simplex())",
         "value", [], False),
        # Shapes that do not fit are no matter of values, also in a distribution.
        ("Normal(t(0.0, 1.0), t(1.0, 1.0, 1.0))",
         "The size of tensor a (2) must match", None, [], False),
        # ``net(x)`` has gone when np.asarray looks at it, and ``x`` is another tensor.
        ("import numpy as np\nnp.asarray(net(x).detach())",
         "can't convert cuda:0 device type tensor to numpy", None, [], False),
        # A method of the user's is not taken for torch's: the line that called torch counts.
        ("class Box:\n    def numpy(self):\n        return (x + 1).numpy()\nBox().numpy()",
         "can't convert cuda:0 device type tensor to numpy", None, [], False),
    ],
)  # fmt: skip
def test_what_is_not_proven_is_not_named(
    code: str, headline: str, argument: str | None, fixes: list[str | None], is_listed: bool
) -> None:
    """No expression, and of the values only those that are at fault."""
    outcome = cell(code)
    report = outcome.shown
    assert report.headline_schema.startswith(headline)
    assert (report.argument, report.expression, outcome.fixes) == (argument, None, fixes)
    assert (report.offenders is not None) is is_listed
    assert "backward" not in report.explanation


# --- one name for an argument ---------------------------------------------------------------------

OPERANDS = """
a, w, host = torch.ones(2, 3).cuda(), torch.ones(3, 2).cuda(), torch.ones(3, 2)
turned = host.t()
table, rows = nn.Embedding(4, 2).cuda(), torch.tensor([0, 1])
def made(like):
    return like * 1
s = torch.rand(3, 2, 4, device="cuda")
h, c = torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)
hg, cg = h.cuda(), c.cuda()
pair = (hg, c)
lstm, gru, on_host = nn.LSTM(4, 5).cuda(), nn.GRU(4, 5).cuda(), nn.LSTM(4, 5)
"""


@pytest.mark.parametrize(
    ("line", "argument", "expression", "headline"),
    [
        ("made(a) @ host", "other", "host", "host is on cpu, made(a) is on cuda:0"),
        ("torch.matmul(made(a), host)", "other", "host", "host is on cpu,"),
        ("torch.mm(made(a), host)", "mat2", "host", "host is on cpu,"),
        ("nn.functional.linear(a, turned)", "weight", "turned", "turned is on cpu, a is on"),
        ("table(rows)", "input", "rows", "rows is on cpu, the parameters of table are on cuda:0"),
        ("table(a)", "input", "a", "Expected tensor for argument #1 'indices' to have"),
        ("w.gather(0, made(a))", "index", "made(a)", "gather(): Expected dtype int32/int64"),
        ("torch.gather(w, 0, made(a))", "index", "made(a)", "gather(): Expected dtype int32/int64"),
        (
            "host.gather(0, made(rows)[None] + 8)",
            "index",
            "made(rows)[None] + 8",
            "(made(rows)[None] + 8)[0, 0] =",
        ),
        ("a.sum(2)", None, None, "Dimension out of range"),
        # Of a recurrent layer's input and states, the only one elsewhere.
        ("lstm(s, (h, c))", "hx[0]", "h", "h and c are on cpu, s and the parameters of lstm are"),
        ("lstm(s, (hg, c))", "hx[1]", "c", "c is on cpu, s, hg and the parameters of lstm are on"),
        ("lstm(s, (h, cg))", "hx[0]", "h", "h is on cpu, s, cg and the parameters of lstm are on"),
        ("lstm(s, (h + 0, cg))", "hx[0]", "h + 0", "h + 0 is on cpu, s, cg and the parameters of"),
        ("lstm(s, pair)", "hx[1]", "pair[1]", "pair[1] is on cpu, s, pair[0] and the parameters"),
        ("gru(s, h)", "hx", "h", "h is on cpu, s and the parameters of gru are on cuda:0"),
        ("lstm(s.cpu(), (hg, cg))", "input", "s.cpu()", "s.cpu() is on cpu, hg, cg and the param"),
        ("on_host(s, (h, c))", "input", "s", "h, c and the parameters of on_host are on cpu, s is"),
        (
            "on_host(s.cpu(), (h, cg))",
            "hx[1]",
            "cg",
            "s.cpu(), h and the parameters of on_host are",
        ),
    ],
)
def test_an_argument_goes_by_the_name_that_the_called_function_has_for_it(
    line: str, argument: str | None, expression: str | None, headline: str
) -> None:
    """The inner op's name (``mat2``, ``indices``) stands in no list of what the user passed."""
    # Of a state guards alone know enough; what a function has returned the recorder holds.
    report = cell(f"{OPERANDS}{line}", fast="(s" in line).shown
    assert (report.argument, report.expression) == (argument, expression)
    assert report.headline.startswith(headline)
    facts = {item.argument: item.expression for item in report.tensors}
    assert expression is None or facts[argument] == expression


def test_an_operand_that_no_variable_holds_is_named_by_the_line() -> None:
    """The refused call is at hand: what the line has in its place is the operand."""
    report = cell(f"{OPERANDS}a @ made(a)", fast=False).shown
    assert report.argument is None  # either may be transposed
    assert report.headline == "a and made(a) shapes cannot be multiplied (2x3 and 2x3)"
    assert [item.expression for item in report.tensors][:2] == ["a", "made(a)"]


@pytest.mark.parametrize("made", ["Pair", "cell.Pair", "cell.pair.of", "cell.Pair.of"])
def test_arguments_of_a_constructor_and_a_method_are_told_apart(made: str) -> None:
    """``self`` is one of the parameters, and on the line only where a class is asked."""
    code = f"""
import types
class Pair:
    def __init__(self, one, two):
        self.of(one, two) if one is not None else None
    def of(self, one, two):
        return one + two
cell = types.SimpleNamespace(Pair=Pair, pair=Pair(None, None))
{made}({"cell.pair, " * made.endswith("Pair.of")}w * 1, torch.cat([w, w]))
"""
    report = cell(f"w = torch.ones(2, 3).cuda()\n{code}").shown
    named = {item.expression: item.shape for item in report.tensors if item.expression}
    assert {"one": (2, 3), "two": (4, 3)}.items() <= named.items()
    assert all(shape != (4, 3) for name, shape in named.items() if "w * 1" in name)
