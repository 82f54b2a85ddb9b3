"""Facts about a bad value: why a softmax made NaN, what holds it, the keys of a batch."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cudalens.core.graph_types import FIRST_BAD, FIRST_NAN, WRITES, ProvenanceStep
from cudalens.core.limits import Limits
from cudalens.core.report_types import LineRef, Offender, Offenders, SourceSpan, Violation
from cudalens.evidence import value_facts
from cudalens.evidence.value_facts import nan_cause, nan_holder
from cudalens.recorder.provenance import Provenance
from tests.hostcells import SETUP, run_cell
from tests.probes import asked

INF, NAN = math.inf, math.nan


def step(op: str, note: str | None = FIRST_NAN) -> ProvenanceStep:
    return ProvenanceStep(op=op, source=LineRef(line=1), note=note)


def way(*scores: float, steps: tuple[ProvenanceStep, ...] = (step("torch.softmax"),)) -> Any:
    return Provenance(steps=[*steps], given=torch.tensor(scores))


def test_what_a_softmax_was_given() -> None:
    assert nan_cause(way(0.0, -INF)) == "masked row"
    assert nan_cause(way(0.0, INF)) == "infinity"
    assert nan_cause(way(0.0, 1.0)) is None
    assert nan_cause(way(INF, -INF)) is None
    assert nan_cause(Provenance(steps=[step("torch.softmax")])) is None


def test_only_one_softmax_that_is_proven_to_have_made_it() -> None:
    def cause(*steps: ProvenanceStep) -> str | None:
        return nan_cause(way(0.0, -INF, steps=steps))

    assert cause(step("torch.log_softmax")) == "masked row"
    assert cause(step("aten::mul", None), step("torch.softmax")) == "masked row"
    assert cause(step("torch.softmax", None)) is None
    assert cause(step("torch.exp")) is None
    assert cause(step("torch.softmax"), step("torch.softmax")) is None


def nan_finding(value: Any = "nan", *, is_nonfinite: bool = False) -> Violation:
    first = (Offender(position=(0,), value=value),)
    return Violation(
        headline="", offenders=Offenders(count=1, first=first), is_nonfinite=is_nonfinite
    )


def holder(
    text: str, violation: Violation, origin: Any = None, recorder: Any = None, **names: Any
) -> Any:
    def ask(frames: Any) -> Any:
        failure: Any = SimpleNamespace(
            violation=violation, frames=frames, recorder=recorder, bad=None
        )
        return nan_holder(failure, origin)

    return asked(text, ask, **names)[-1]


def test_the_named_tensor_that_a_nan_came_from() -> None:
    w = torch.tensor([1.0, NAN, NAN])
    found = holder("here(w)", nan_finding(), w, w=w)
    assert (found.name, found.nan.count, found.is_read) == ("w", 2, True)
    whole = torch.ones(3)
    assert holder("here(w)", nan_finding(), whole, w=whole) is None
    numbers = torch.tensor([1])
    assert holder("here(w)", nan_finding(), numbers, w=numbers) is None


def test_the_parameter_that_holds_a_nan_whose_way_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = torch.nn.Linear(2, 2)
    with torch.no_grad():
        net.bias[0] = NAN
    found = holder("here(net)", nan_finding(), net=net)
    assert (found.name, found.nan.count, found.is_read) == ("net.bias", 1, False)
    assert holder("here(net)", nan_finding(9.0), net=net) is None
    assert holder("here(net)", nan_finding(is_nonfinite=True), net=net) is None
    assert holder("here(net)", nan_finding(), net=torch.nn.Linear(2, 2)) is None
    monkeypatch.setattr(value_facts, "_MAX_READ", 6)  # the weight has four values, the bias two
    assert holder("here(net)", nan_finding(), net=net) is not None
    monkeypatch.setattr(value_facts, "_MAX_READ", 5)
    assert holder("here(net)", nan_finding(), net=net) is None
    way: set[int] = set()
    monkeypatch.setattr(value_facts, "_ids_on_the_way", lambda _: way)
    assert holder("here(net)", nan_finding(), net=net) is None
    way.add(id(net.bias))  # the weight, which is not on the way, is not read
    assert holder("here(net)", nan_finding(), net=net).name == "net.bias"
    way.add(id(net.weight))
    assert holder("here(net)", nan_finding(), net=net) is None


def test_every_line_that_wrote_nan_to_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last change is told only where no such line is known."""
    last = LineRef(line=9)
    monkeypatch.setattr(value_facts, "_last_change", lambda *_: last)
    net = torch.nn.Linear(2, 2)
    with torch.no_grad():
        net.bias[0] = NAN

    def written(*steps: tuple[int, str, str]) -> list[int | None]:
        found = [
            ProvenanceStep(op=op, source=LineRef(line=at), note=note) for at, op, note in steps
        ]
        recorder = SimpleNamespace(provenance=lambda *_: Provenance(steps=found))
        held = holder("here(net)", nan_finding(), recorder=recorder, net=net)
        assert held.changed is (None if held.written else last)
        return [line.line for line in held.written]

    assert written((4, "aten::fill_", f"{WRITES} nan")) == [4]
    assert written((4, "aten::fill_", f"{WRITES} 9")) == []
    assert written((4, "aten::div_", FIRST_BAD)) == [4]
    assert written((4, "aten::div", FIRST_BAD)) == []
    both = (5, "aten::fill_", f"{WRITES} nan"), (4, "aten::fill_", f"{WRITES} nan")
    assert written(*both) == [5, 4]
    assert written(both[0], both[0]) == [5]
    assert holder("here(net)", nan_finding(), net=net).written == ()


@pytest.mark.parametrize(
    ("seq", "unseen", "written", "line"),
    [
        (7, 0, False, 7),
        (7, 1, False, None),  # a write that nobody saw
        (0, 0, False, None),  # of an earlier block
        (7, 0, True, None),  # the line that wrote the NaN is named
    ],
)
def test_the_last_write_to_a_parameter_that_is_nan(
    seq: int, unseen: int, written: bool, line: int | None
) -> None:
    net = torch.nn.Linear(2, 2)
    with torch.no_grad():
        net.bias[0] = NAN
    calls = [
        SimpleNamespace(seq=it, api=SimpleNamespace(stem="add"), site=it, inputs=[])
        for it in (seq - 1, seq)
    ]
    after = net.bias._version - unseen
    snapshot = SimpleNamespace(
        writes_to=lambda _: [(it, SimpleNamespace(after=after)) for it in calls],
        reader=SimpleNamespace(line=lambda site: LineRef(line=site)),
        earlier=SimpleNamespace(calls=[]),
        calls=calls,
    )
    made = ProvenanceStep(op="aten::fill_", source=LineRef(line=4), note=f"{WRITES} nan")
    recorder = SimpleNamespace(
        provenance=lambda *_: Provenance(steps=[made] * written), snapshot=lambda: snapshot
    )
    found = holder("here(net)", nan_finding(), recorder=recorder, net=net)
    assert (found.changed and found.changed.line) == line


@pytest.mark.usefixtures("sim")
def test_the_last_change_of_a_parameter_that_is_nan() -> None:
    """By an optimizer, or through ``.data``; not one of an earlier block."""
    fails = "p = net(torch.ones(2, 2).cuda()).softmax(-1)\ntorch.multinomial(p, 1)"
    step = "opt = torch.optim.SGD(net.parameters(), lr=NAN)\n"
    step += "net(torch.ones(2, 2).cuda()).sum().backward()\nopt.step()\n"
    data = "net.weight.data.add_(NAN)\n"
    made = f"{SETUP}NAN = float('nan')\nnet = nn.Linear(2, 3).cuda()\n"
    for changes, line in ((step, "opt.step()"), (data, data.strip()), (step + data, data.strip())):
        report = run_cell(made + changes + fails, fast=False).shown
        marks = [(it.text, it.mark) for one in report.observations for it in one.sources]
        assert (line, "net.weight is last changed here") in marks
        assert len([mark for _, mark in marks if "last changed" in mark]) == 1
        assert report.limits == ()


ADDS = "net.weight.data.add_(NAN)"
ARRAY = "a = net.weight.detach().numpy()"


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (f"{ADDS}; {ARRAY}", 0),
        (f"{ARRAY}; net.weight.data.add_(1); a[0] = NAN", 0),
        (f"{ADDS}; net.weight.data = net.weight.data * 1", 0),
        (f"a = net.weight.data; {ADDS}", 1),
    ],
)
def test_a_change_is_not_the_last_where_one_may_be_unseen_since(lines: str, count: int) -> None:
    code = f"NAN = float('nan')\nnet = nn.Linear(2, 3)\n{lines}\n"
    code += "torch.multinomial(net(torch.ones(2, 2)).softmax(-1), 1)"
    report = run_cell(SETUP + code, fast=False).shown
    marks = [it.mark for one in report.observations for it in one.sources]
    assert marks.count("net.weight is last changed here") == count


def test_the_keys_of_a_batch_under_which_one_tensor_is() -> None:
    one, two = torch.ones(1), torch.ones(1)

    def keys(*pairs: tuple[Any, Any], at: int = 0, is_stacked: bool = False) -> Any:
        names, tensors = zip(*pairs, strict=True)
        batch: Any = SimpleNamespace(keys=names, tensors=tensors, at=at, is_stacked=is_stacked)
        return value_facts._aliases(Provenance(batch=batch))

    assert keys(("labels", one), ("ids", one), ("x", two)) == ("ids", "labels")
    assert keys(("labels", one), ("ids", two)) == ()
    assert keys(("labels", one), (None, one)) == ()
    assert keys(("x", two), ("labels", one), ("ids", one), at=0) == ()
    assert keys(("labels", one), ("ids", one), is_stacked=True) == ()
    assert value_facts._aliases(Provenance()) == ()


def test_the_tensors_of_a_line_by_their_expressions() -> None:
    one, two, fake = torch.ones(1), torch.ones(2), FakeTensorMode().from_tensor(torch.ones(3))
    others = [("n", 3), ("y", two), ("z", fake), ("w", one)]
    site = SimpleNamespace(
        names=[SimpleNamespace(expression="x", key="self")],
        others=[SimpleNamespace(expression=name, value=value) for name, value in others],
    )
    failure: Any = SimpleNamespace(site=site, values={"self": one})
    found = [(name, id(it)) for name, it in value_facts.named_tensors(failure)]
    assert found == [("x", id(one)), ("y", id(two)), ("w", id(one))]


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(("read", "said"), [("net", True), ("other", False)])
def test_a_parameter_that_the_values_did_not_come_from_is_not_named(read: str, said: bool) -> None:
    code = "net, other = nn.Linear(2, 3), nn.Linear(2, 3)\nnet.weight.data.fill_(float('nan'))\n"
    code += "inf = torch.full((2, 2), float('inf'))\n"
    code += f"torch.multinomial({read}(inf).softmax(-1), 1)"
    hints = run_cell(SETUP + code, fast=False).shown.hints
    assert any("net.weight contains NaN" in hint.text for hint in hints) is said


def test_the_ids_on_the_way_are_known_of_a_recorded_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, read = torch.ones(1), torch.ones(2)
    monkeypatch.setattr(value_facts, "sources_of", lambda tensor, snapshot: [bad, read])

    def ids(bad: Any, makers: Any) -> Any:
        snapshot = SimpleNamespace(maker=lambda ref: makers.get(id(ref())))
        recorder = None if makers is None else SimpleNamespace(snapshot=lambda: snapshot)
        failure: Any = SimpleNamespace(bad=bad, recorder=recorder)
        return value_facts._ids_on_the_way(failure)

    assert ids(bad, {id(bad): "a call"}) == {id(bad), id(read)}
    assert [ids(bad, {}), ids(bad, None), ids(None, {})] == [None, None, None]
    monkeypatch.setattr(value_facts, "sources_of", lambda tensor, snapshot: [])
    assert ids(bad, {id(bad): "a call"}) == set()


def test_numbers_vanish_on_the_running_line_or_on_that_of_the_forward_call() -> None:
    found = replace(nan_finding(is_nonfinite=True), dtype="torch.float16")
    running = SimpleNamespace(statement=ast.parse("y = x + 1e-8").body[0])

    def vanished(node: Any, forward: SourceSpan | None) -> tuple[str, ...]:
        failure: Any = SimpleNamespace(
            violation=found, way=None, trial=SimpleNamespace(line=SimpleNamespace(running=running)),
            call=SimpleNamespace(node=node, op=None), bad=None, limits=Limits(),
            forward_call=lambda number: (forward if number == 3 else None, None, None),
        )  # fmt: skip
        return value_facts.marks_of_finding(failure).vanished

    node, forward = SimpleNamespace(sequence_nr=3), SourceSpan(text="y = x * 1e-9")
    assert vanished(None, forward) == ("1e-08 is 0",)
    assert vanished(node, forward) == ("1e-09 is 0",)
    assert vanished(node, None) == ()


def ctc(op: str = "aten::_ctc_loss", value: Any = "inf", arguments: Any = "given") -> Any:
    first = () if value is None else (Offender(position=(), value=value),)
    found = Violation(headline="", op=op, offenders=Offenders(count=1, first=first))
    call = SimpleNamespace(op=arguments and SimpleNamespace(arguments=arguments))
    return SimpleNamespace(violation=found, call=call, limits=Limits())


@pytest.mark.parametrize(
    ("failure", "is_asked"),
    [
        (ctc(), True),
        (ctc("aten::_cudnn_ctc_loss"), True),
        (ctc("aten::nll_loss"), False),
        (ctc(value="nan"), False),
        (ctc(value=None), False),
        (ctc(arguments=None), False),
    ],
)
def test_an_infinity_of_ctc_asks_for_the_item_with_too_few_steps(
    failure: Any, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_facts, "short_input", lambda given: f"item of {given}")
    found: Any = value_facts._of_ctc(failure)
    assert found == ("item of given" if is_asked else None)


OUT_OF_RANGE = "selected index k out of range"


@pytest.mark.parametrize(
    ("message", "k", "line", "is_asked"),
    [
        (OUT_OF_RANGE, 7, "line", True),
        ("no such dimension", 7, "line", False),
        (OUT_OF_RANGE, True, "line", False),
        (OUT_OF_RANGE, torch.tensor(7), "line", False),
        (OUT_OF_RANGE, 7, None, False),
    ],
)
def test_the_origin_of_a_k_that_is_out_of_range(
    message: str, k: Any, line: str | None, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(value_facts, "bound_origin", lambda *a, **k: given.append((a, k)))
    trial = SimpleNamespace(line=SimpleNamespace(running=line))
    failure: Any = SimpleNamespace(
        violation=None, recorder=None, trial=trial, message=message, arguments={"k": k}, frames=[]
    )
    assert value_facts.bound_of(failure) is None
    known: dict[str, Any] = {"size": 7, "dim": None, "snapshot": None, "frames": [], "line": "line"}
    assert given == ([((None,), known)] if is_asked else [])
    failure.trial = None
    assert value_facts.bound_of(failure) is None
    assert len(given) == is_asked


def test_the_tensors_that_may_have_the_size_of_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op's own first, in its dimension; another of its shape, and last a number."""
    own, alike, other = torch.ones(4, 5), torch.ones(4, 5), torch.ones(5)
    bad, small = torch.ones(5), torch.ones(4)
    asked_of: list[tuple[Any, Any]] = []

    def origin(tensor: Any, *, dim: Any, **known: Any) -> None:
        assert known["size"] == 5
        asked_of.append((tensor, dim))

    monkeypatch.setattr(value_facts, "bound_origin", origin)
    found = Violation(headline="", size=5, dim=1, related="table")
    named = [("x", alike), ("y", other), ("bad", bad), ("small", small), ("n", 5)]
    failure: Any = SimpleNamespace(
        violation=found, recorder=None, trial=None, values={"table": own, "self": small}, bad=bad,
        named=named, frames=[],
    )  # fmt: skip
    assert value_facts.bound_of(failure) is None
    wanted = [(own, 1), (alike, 1), (other, None), (None, None)]
    assert [(id(it), dim) for it, dim in asked_of] == [(id(it), dim) for it, dim in wanted]
    asked_of.clear()
    failure.violation = replace(found, related=None)
    failure.values["self"] = other
    value_facts.bound_of(failure)
    assert [(id(it), dim) for it, dim in asked_of][:2] == [(id(other), 1), (id(alike), None)]
    asked_of.clear()
    for less in (replace(found, size=None), replace(found, is_nonfinite=True)):
        failure.violation = less
        value_facts.bound_of(failure)
    assert asked_of == []


@pytest.mark.parametrize(
    ("shape", "last", "others", "is_found"),
    [
        ((2, 8), 7, [(2, 8)], True),
        ((8,), 7, [(8,), (2, 9), (3, 8)], True),
        ((2, 8), 8, [(2, 9)], False),  # no run of positions
        ((2, 8), 7, [(8, 2)], False),
        ((2, 8), 7, [(8,)], False),
        ((2, 8), 7.0, [(2, 8)], False),
        ((2, 8), 7, [], False),
    ],
)
def test_where_the_length_of_ids_was_chosen(
    shape: Any, last: Any, others: Any, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def origin(tensor: Any, *, size: int, dim: int, **known: Any) -> str:
        given.append((tuple(tensor.shape), size, dim))
        return "line"

    monkeypatch.setattr(value_facts, "bound_origin", origin)
    bad = torch.zeros(shape)
    found = Violation(headline="", offenders=Offenders(count=1, max=last))
    on_line = [SimpleNamespace(value=3), *(SimpleNamespace(value=torch.ones(it)) for it in others)]
    site = SimpleNamespace(names=[], others=on_line)
    failure: Any = SimpleNamespace(
        violation=found, site=site, bad=bad, values={"ids": bad}, recorder=None, frames=[]
    )
    length: Any = value_facts._length(failure)
    assert length == ("line" if is_found else None)
    assert given == ([(others[-1], 8, 1)] if is_found else [])
    site.names = [SimpleNamespace(key="ids")]  # the user has the positions on the line
    assert value_facts._length(failure) is None
