"""The first NaN or infinity: which op made it, of what, and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, Mock
from weakref import ref

import pytest
import torch
import torch.nn.functional as F

import cudalens
from cudalens.core.graph_types import FIRST_NAN
from cudalens.core.report import Report
from cudalens.recorder import nonfinite
from cudalens.recorder.calls import Api
from cudalens.recorder.nonfinite import NonFiniteWatch
from cudalens.recorder.nonfinite_marks import Maker, NonFiniteTensor, Step
from cudalens.render.html import render_page
from cudalens.render.text import render
from tests.blocks import cuda, report_of
from tests.probes import SeenOps

pytestmark = [
    pytest.mark.usefixtures("sim"),
    pytest.mark.filterwarnings("ignore:std.*degrees of freedom"),
]

INF, NAN = float("inf"), float("nan")


def found(code: object, **options: bool) -> Report | None:
    """Run a function under ``nan=True`` and give the report, with its exception checked."""
    session = cudalens.check(**{"nan": "strict", **options})
    try:
        with session:
            code()  # type: ignore[operator]
    except cudalens.NonFiniteError as error:
        assert error.report is session.report
        assert isinstance(error, RuntimeError)
    return session.report


def masked_scores(places: int) -> torch.Tensor:
    """Return two rows of three scores, with so many places of the second one masked."""
    scores = torch.zeros(2, 3, device="cuda")
    mask = torch.arange(3, device="cuda") < places
    return scores.masked_fill(torch.stack([torch.zeros_like(mask), mask]), -INF)


def labelled(*labels: int) -> torch.Tensor:
    return F.cross_entropy(torch.zeros(len(labels), 3, device="cuda"), cuda(*labels))


def hints(report: Report | None) -> list[str]:
    return [item.rule for item in report.hints]


@pytest.mark.parametrize("fast", [False, True])
def test_a_division_by_zero_is_named_with_its_inputs(fast: bool) -> None:
    """In the schema's names, and in the user's."""
    x, y = cuda(1.0, -2.0, 3.0), cuda(1.0, 0.0, 2.0)
    report = found(lambda: x / y, fast=fast)
    assert (report.kind, report.certainty) == ("nonfinite", "proven")
    assert (
        report.headline_schema == "torch.Tensor.div made -inf at [1] from self = -2.0, other = 0.0"
    )
    assert report.headline == "torch.Tensor.div made -inf at [1] from x = -2.0, y = 0.0"
    assert (report.offenders.count, report.offenders.total) == (1, 3)
    assert hints(report) == ["outside_domain"]
    assert report.context_usable


def masked() -> None:
    """Attention masks hold -inf on purpose, and reserved memory holds anything."""
    scores = torch.zeros(4, 4, device="cuda")
    keep = torch.ones(4, 4, device="cuda").tril().bool()
    scores.masked_fill(~keep, -INF).softmax(-1).sum()
    torch.full((3,), INF, device="cuda") + 1
    torch.empty(1000, device="cuda")


def test_backward_names_the_forward_line() -> None:
    """where() does not stop the gradient of the branch not taken."""

    def train() -> None:
        x = torch.zeros(3, device="cuda", requires_grad=True)
        torch.where(x > 0, x.sqrt(), x).sum().backward()

    report = found(train)
    assert report.phase == "backward"
    assert "x.sqrt()" in (report.forward_source.text or "")
    assert hints(report) == ["safe_branch"]


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        (lambda: torch.zeros(3, device="cuda").log(), "log_of_zero"),
        (lambda: (-torch.ones(3, device="cuda")).sqrt(), "outside_domain"),
        (lambda: torch.zeros(2, device="cuda").rsqrt(), "outside_domain"),
        (lambda: torch.ones(1, 3, device="cuda").std(0), "of_too_few"),
        (lambda: torch.ones(0, 3, device="cuda").mean(), "of_too_few"),
        (lambda: torch.full((2,), 1.01, device="cuda").acos(), "outside_domain"),
        (lambda: torch.full((2,), -1.0, device="cuda").log1p(), "outside_domain"),
        (lambda: torch.full((2,), -0.5, device="cuda") ** 0.5, "outside_domain"),
        (lambda: torch.zeros(2, device="cuda") ** -1.5, "outside_domain"),
        (lambda: torch.full((2,), 3e38, device="cuda") * 2, "overflow"),
        (lambda: torch.full((2,), 89.0, device="cuda").exp(), "overflow"),
        (lambda: masked_scores(3).softmax(-1), "all_masked"),
        (lambda: masked_scores(3).t().log_softmax(0), "all_masked"),
        (lambda: torch.full((2,), 6e4, device="cuda").half() * 2, "overflow"),
        (lambda: labelled(-100, -100, -100, -100), "all_labels_ignored"),
    ],
)
def test_each_cause_has_its_hint(code: object, rule: str) -> None:
    assert hints(found(code)) == [rule]


def test_a_nan_out_of_infinities_is_new() -> None:
    report = found(lambda: masked_scores(3).softmax(-1))
    assert report.op.name == "torch.Tensor.softmax"
    assert report.explanation.startswith(
        "3 of 6 values of the result are not finite; the inputs contained infinities, but no NaN."
    )
    plain = found(lambda: torch.zeros(2, device="cuda").log())
    assert "; all values of the inputs were finite." in plain.explanation


@pytest.mark.parametrize(
    "code",
    [
        masked,
        lambda: (torch.tensor([1.0, NAN], device="cuda") + 1).sum(),  # it was there before
        lambda: torch.ones(2, device="cuda") / torch.tensor([1.0, 1e-3], device="cuda"),
        lambda: torch.full((3,), 1e-6, device="cuda").log(),
        lambda: torch.zeros(3, device="cuda").sqrt(),
        lambda: torch.full((2,), 1e-6, device="cuda").rsqrt(),
        lambda: torch.ones(2, 3, device="cuda").std(0),
        lambda: torch.ones(1, 3, device="cuda").mean(),
        lambda: torch.full((2,), 1.0, device="cuda").acos(),
        lambda: torch.full((2,), -0.99, device="cuda").log1p(),
        lambda: torch.full((2,), -0.5, device="cuda") ** 2.0,
        lambda: torch.zeros(2, device="cuda") ** 0.5,
        lambda: torch.full((2,), 1.5e38, device="cuda") * 2,
        lambda: torch.full((2,), 88.0, device="cuda").exp(),
        lambda: masked_scores(2).softmax(-1),
        lambda: torch.full((2,), 3e4, device="cuda").half() * 2,
        lambda: labelled(-100, -100, -100, 0),
    ],
)
def test_what_was_asked_for_and_the_neighbour_of_each_cause_are_silent(code: object) -> None:
    assert found(code) is None


def test_a_guard_that_meets_nan_finds_its_first_op() -> None:
    """Without the option too: the line that made the NaN, not one that was merely beyond [0, 1]."""
    raw = cuda(-1.0, 2.0)

    def code() -> None:
        logs = raw.log()
        chances = torch.sigmoid(logs)
        F.binary_cross_entropy(chances, torch.ones(2, device="cuda"))

    notes = {step.op: step.note for step in report_of(code, cudalens.DeviceValueError).provenance}
    assert notes == {"torch.sigmoid": None, "torch.Tensor.log": FIRST_NAN}


def told(code: Callable[[], object], **options: bool) -> list[tuple[str, str]]:
    """Rule and text of each hint about NaN that a guard met."""
    report = report_of(code, cudalens.DeviceAssertError, **options)
    rules = ("nan_before", "nan_cast_to_integer")
    return [(item.rule, item.text) for item in report.hints if item.rule in rules]


def draw(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(torch.softmax(layer(x), -1), 1)


@pytest.mark.parametrize("inside", ["a layer", "a model"])
def test_the_weight_that_held_nan_before_is_named(inside: str) -> None:
    layer = torch.nn.Linear(8, 3).to("cuda")
    with torch.no_grad():
        layer.weight[1, 2] = NAN
    model = torch.nn.Sequential(torch.nn.Identity(), layer) if inside == "a model" else layer
    ((_, text),) = told(lambda: draw(model, torch.randn(4, 8, device="cuda")))
    path = "layer.1.weight" if inside == "a model" else "layer.weight"
    line = draw.__code__.co_firstlineno + 1
    assert f"linear in line {line} read them from {path} " in text
    assert "(1 of 24 values, the first at [1, 2])" in text


def test_a_variable_that_held_nan_before_is_named() -> None:
    data = torch.tensor([0.5, NAN], device="cuda")
    ((_, text),) = told(lambda: torch.bernoulli(data * 1))
    assert ". mul in line" in text
    assert "read them from data (1 of 2 values, the first at [1])" in text


@pytest.mark.parametrize("way", ["typed", "cast"])
def test_a_literal_nan_is_traced_to_its_line(way: str) -> None:
    """The tensor that was made of it, also where a cast to integers met it next."""

    def code() -> None:
        chances = torch.tensor([0.5, NAN], device="cuda")
        if way == "typed":
            torch.bernoulli(chances)
        else:
            torch.ones(3, device="cuda")[chances.long()]

    report = report_of(code, cudalens.DeviceAssertError)
    line = code.__code__.co_firstlineno + 1
    assert report.provenance[-1].source.line == line
    ((rule, text),) = told(code, nan=True)
    assert rule == ("nan_before" if way == "typed" else "nan_cast_to_integer")
    assert (f". Line {line} made " in text) is (way == "typed")
    assert "--nan" not in text


@pytest.mark.parametrize("nan", [True, False])
def test_nan_of_unknown_origin_advises_the_option_where_it_is_off(nan: bool) -> None:
    """A write in place hides what was there: no tensor is named."""
    chances = torch.tensor([0.5, -INF], device="cuda")
    ((rule, text),) = told(lambda: torch.bernoulli(chances.mul_(0)), nan=nan)
    assert rule == "nan_before"
    assert ("--nan, or cudalens.check(nan=True), stops at the first one" in text) is not nan


def test_nan_that_came_in_explains_no_other_finding() -> None:
    """Some tensor held NaN; what the guard met is an ordinary number."""
    data = torch.tensor([0.5, NAN], device="cuda")

    def code() -> None:
        _ = data * 1
        torch.bernoulli(torch.tensor([1.5], device="cuda"))

    assert told(code) == []


def test_without_the_option_nothing_is_looked_at() -> None:
    assert found(lambda: torch.zeros(3, device="cuda").log(), nan=False) is None


def test_the_watch_is_not_seen_by_the_users_modes() -> None:
    """A mode below the check sees the user's ops alone, as many as without the option."""
    seen = []
    for nan in (False, True):
        with SeenOps() as below, cudalens.check(nan=nan):
            (torch.ones(3) * 2).log()
        seen.append(below.ops)
    assert seen[0] == seen[1]
    assert torch.ops.aten.log.default in seen[0]


@pytest.mark.parametrize(
    ("in_place", "plain"),
    [
        (lambda x: (x * 1).log_(), lambda x: (x * 1).log()),
        (lambda x: (x - 1).sqrt_(), lambda x: (x - 1).sqrt()),
        (lambda x: (x * 1).reciprocal_(), lambda x: (x * 1).reciprocal()),
    ],
)
def test_an_input_that_the_op_wrote_over_is_not_read(
    in_place: Callable[[torch.Tensor], object], plain: Callable[[torch.Tensor], object]
) -> None:
    """Its values of before are gone: no cause is named; where they live on one is."""
    x = torch.tensor([1.0, 0.0], device="cuda")
    over, kept = found(lambda: in_place(x)), found(lambda: plain(x))
    assert "infinities" not in over.explanation
    assert "from" not in over.headline and "from" in kept.headline
    assert hints(over) == [] and hints(kept)
    assert all(fact.summary.min is None for fact in over.tensors if fact.argument == "self")


@pytest.mark.parametrize(
    ("before", "is_found"), [("finite", True), ("a NaN in a view", False), ("older", True)]
)
def test_a_call_in_place_is_blamed_for_a_tensor_that_was_finite_before_it(
    before: str, is_found: bool
) -> None:
    """Also where the tensor is older than the check: it is looked at before it is overwritten."""
    old = torch.tensor([1.0, -1.0], device="cuda")

    def code() -> None:
        x = old if before == "older" else torch.tensor([1.0, -1.0], device="cuda") * 1
        if before == "a NaN in a view":
            x[0:1] = NAN
        x.sqrt_()

    assert (found(code) is not None) is is_found


@pytest.mark.parametrize(
    ("copied", "headline"),
    [
        (lambda p: p, "nan was there already where torch.Tensor.copy_ wrote"),
        (lambda p: p.detach(), "nan was there already where torch.Tensor.copy_ wrote"),
        (
            lambda p: torch.full((2, 3), 1e300, dtype=torch.float64, device="cuda"),
            "torch.Tensor.copy_ made inf at [0, 0]",
        ),
    ],
)
def test_a_copy_of_its_own_memory_makes_nothing(
    copied: Callable[[torch.Tensor], torch.Tensor], headline: str
) -> None:
    p = torch.nn.Parameter(torch.ones(2, 3, device="cuda"))

    def code() -> None:
        with torch.no_grad():
            p[1] = NAN
            p.copy_(copied(p))
        p.sum().backward()

    assert found(code, nan=True).headline.startswith(headline)


def test_what_a_result_is_written_to_is_no_input() -> None:
    own = cuda(1.0, -1.0)
    assert found(lambda: torch.log(own, out=own)) is not None
    x, out = cuda(1.0, 0.0), cuda(1.0, 1.0)
    written, plain = found(lambda: torch.log(x, out=out)), found(lambda: torch.log(x))
    assert (written.headline, written.explanation) == (plain.headline, plain.explanation)


def test_what_went_in_stands_beside_each_bad_value() -> None:
    """In the table, in the text, and in the graph for the first of them."""
    x = torch.tensor([[1.0, -4.0], [-9.0, 2.0]], device="cuda")
    scale = torch.tensor([2.0, 3.0], device="cuda")
    report = found(lambda: torch.pow(x, scale / 4))
    assert [item.inputs for item in report.offenders.first] == [
        (("x", -4.0), ("scale / 4", 0.75)),
        (("x", -9.0), ("scale / 4", 0.5)),
    ]
    values = {node.name: node.value for node in report.graph.nodes if node.value is not None}
    assert sorted(values.values()) == [-4.0, 0.75]
    assert Report.from_dict(report.to_dict()) == report
    page = render_page(report)
    assert ">from x</th>" in page
    assert "nan at [0, 1] from x = -4.0, scale / 4 = 0.75" in render(report)


@pytest.mark.parametrize(
    "call",
    [lambda x: x @ (x + 0.5), lambda x: x.sub_(1.0).sqrt_(), lambda x: x.sub_(1.0).div_(x.sub_(x))],
    ids=["product", "in place", "alias"],
)
def test_no_value_went_in_where_none_is_known(call: Callable[[torch.Tensor], object]) -> None:
    """A square product is not elementwise, and what an op wrote over is gone."""
    x = torch.tensor([[3e38, -1.0], [1.0, 1.0]], device="cuda")
    report = found(lambda: call(x))
    assert report.offenders.first
    assert all(item.inputs == () for item in report.offenders.first)
    assert all(node.value is None for node in report.graph.nodes)


@pytest.mark.parametrize(
    ("eps", "says"),
    [
        (1e-8, "1e-8 is 0 in float16, and 1e-7 is not"),
        (None, "both are 0 there, and 0 / 0 gives nan"),
    ],
)
def test_a_constant_that_vanishes_in_float16_is_named(eps: float | None, says: str) -> None:
    s = torch.full((3,), 0.5, device="cuda", dtype=torch.float16)
    if eps is None:
        report = found(lambda: (s - s.min()) / (s.max() - s.min()))
    else:
        report = found(lambda: (s - s.min()) / (s.max() - s.min() + 1e-8))
    assert report.hints[0].text.startswith(says)
    assert found(lambda: (s - s.min()) / (s.max() - s.min() + 1e-7)) is None


def test_operands_and_no_settings_are_named_with_their_largest_values() -> None:
    conv = torch.nn.Conv1d(2, 2, 3, bias=False).to("cuda")
    with torch.no_grad():
        conv.weight.fill_(3e37)
    x = torch.full((1, 2, 5), 9.0, device="cuda")
    report = found(lambda: conv(x))
    assert report.headline.endswith(
        "made inf at [0, 0, 0] from x (up to 9.0), weight (up to 3e+37)"
    )


def test_the_value_furthest_from_0_may_be_negative() -> None:
    x, w = torch.tensor([[-9e30, 2.0]], device="cuda"), torch.full((2, 1), -3e30, device="cuda")
    headline = found(lambda: torch.mm(x, w)).headline
    assert headline.endswith("made inf at [0, 0] from x (down to -9e+30), w (down to -3e+30)")


def test_an_overwritten_list_is_not_read_as_an_input() -> None:
    """What it contained before is gone, and a setting is no operand."""
    p, grad = torch.zeros(4, device="cuda"), torch.full((4,), 1e21, device="cuda")
    report = found(lambda: torch._foreach_addcmul_([p], [grad], [grad], value=0.001))
    assert "infinities" not in report.explanation
    assert "value =" not in report.headline
    assert report.headline.endswith("of item 0 from grad = 1e+21")


def test_a_builtin_has_the_name_that_it_was_called_by() -> None:
    big = torch.full((2, 2), 3e30, device="cuda")
    report = found(lambda: torch.mm(big, big))
    assert report.headline == "torch.mm made inf at [0, 0] from big (up to 3e+30)"
    assert hints(report) == ["overflow"]


# --- what the host reads --------------------------------------------------------------------------

BAD, GOOD = torch.tensor([math.nan]), torch.ones(1)


def watching(mark: NonFiniteTensor | None, **options: bool) -> tuple[NonFiniteWatch, list[Any]]:
    """Return a watch that knows of one mark, and the places that it tells of."""
    told: list[Any] = []

    def arrived(arrival: Any) -> ArithmeticError:
        told.append(arrival)
        return ArithmeticError(len(told))

    watch: Any = NonFiniteWatch(Mock(arrived=arrived), Mock(), **options)
    watch._marks = MagicMock(of=lambda tensor: mark)
    watch._marks.__bool__.return_value = mark is not None
    return watch, told


def marked(
    kind: Any = "made", *, has_nan: bool = True, is_of_view: bool = False
) -> NonFiniteTensor:
    maker = Maker(kind, Step("torch.log", None), has_nan=has_nan)
    return NonFiniteTensor(ref(BAD), 0, maker, has_nan=has_nan, is_of_view=is_of_view)


@pytest.mark.parametrize(("func", "source"), [(torch.add, "nan"), (torch.fmax, "inf")])
def test_a_nan_comes_from_a_nan_and_an_infinity_from_where_it_stood(func: Any, source: str) -> None:
    """``add`` keeps both, the infinity first; ``fmax`` leaves the NaN out."""
    inputs = {"inf": torch.tensor([INF, 1.0]), "nan": torch.tensor([1.0, NAN])}
    recorder = Mock(last_call=lambda: ("call", None))
    watch = NonFiniteWatch(Mock(), lambda: recorder)
    for name, item in inputs.items():
        has_nan = name == "nan"
        watch._marks.mark(item, Maker("entered", Step(name, None), has_nan), has_nan=has_nan)
    args = tuple(inputs.values())
    result = func(*args)
    assert watch(Api(func), args, None, result, ()) is None
    mark = watch._marks.of(result)
    assert mark is not None and mark.maker.step.name == source


@pytest.mark.parametrize(
    ("mark", "args", "result", "is_found"),
    [
        (marked(), (BAD,), math.nan, True),
        (marked(), (BAD,), True, True),
        (marked(is_of_view=True), (BAD,), math.nan, True),
        # The neighbours: nothing is marked, or what is read is not bad, or nothing has made it.
        (None, (BAD,), math.nan, False),
        (marked(), (BAD,), 1.0, False),
        (marked(), (), math.nan, False),
        (marked(), (3.0,), math.nan, False),
        (marked("entered"), (BAD,), math.nan, False),
        (marked("asked"), (BAD,), math.nan, False),
        (marked(has_nan=False), (BAD,), True, False),
        (marked(is_of_view=True), (GOOD,), True, False),
    ],
)
def test_a_nan_that_a_call_has_made_is_found_where_the_host_reads_it(
    mark: NonFiniteTensor | None, args: tuple[Any, ...], result: Any, is_found: bool
) -> None:
    watch, told = watching(mark)
    error = watch.read(Api(torch.Tensor.item), args, result, site=("here",))  # type: ignore[arg-type]
    assert isinstance(error, ArithmeticError) is is_found
    assert [(it.sink, it.step.site) for it in told] == ([("read", ("here",))] if is_found else [])
    assert watch.late is None
    strict, told = watching(mark, is_strict=True)
    assert (strict.read(Api(torch.Tensor.item), args, result), told) == (None, [])


def test_the_first_that_the_shell_shows_is_raised_when_the_cell_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nonfinite, "_files", lambda: [nonfinite._SHELL])
    watch, told = watching(marked())
    for _ in range(2):
        error = watch.read(Api(torch.Tensor.item), (BAD,), math.nan, ("here",))  # type: ignore[arg-type]
        assert error is None
    assert [it.sink for it in told] == ["result", "result"]
    assert str(watch.late) == "1"
