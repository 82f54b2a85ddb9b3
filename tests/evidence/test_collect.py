"""The evidence of a failure: each part alone, and what is left of it where one part fails."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cudalens.core.call import ApiCall, Call, NodeMark, OpCall
from cudalens.core.evidence_types import BoundOrigin, InPlaceChange
from cudalens.core.graph_types import CHANGED, ProvenanceStep
from cudalens.core.report import Evidence
from cudalens.core.report_types import (
    Bounds,
    Offender,
    Offenders,
    OpName,
    OtherModule,
    Replay,
    SeenBefore,
    SourceSpan,
    TensorFact,
    Violation,
)
from cudalens.evidence import collect
from cudalens.evidence.collect import (
    COLLECTORS,
    Collector,
    evidence_of,
    forward_of,
    graph_of,
    timing_since,
)
from cudalens.evidence.failure import (
    FailureContext,
    bad_places,
    error_facts,
    has_infinity,
)
from cudalens.recorder import Recorder
from cudalens.recorder.provenance import Provenance
from cudalens.source.locate import CallSite
from tests.probes import asked


def failure(frames: Any = (), **more: Any) -> FailureContext:
    return FailureContext(entries=frames, started=0.0, **more)


def evidence(text: str, **more: Any) -> Any:
    return asked(text, lambda frames: evidence_of(failure(frames, **more), phase="forward"))[-1]


def test_the_line_the_frames_and_the_process() -> None:
    found = evidence("here(1)")
    assert (found.source.text, found.phase, found.limits) == ("here(1)", "forward", ())
    assert [item.is_user for item in found.frames] == [True]
    assert found.environment.torch == torch.__version__
    assert found.timing.diagnose_s > 0


def test_the_name_of_the_function_needs_variables_or_the_full_name() -> None:
    def api(name: str, text: str = "") -> str | None:
        given = {"op": OpName(api=name)}
        found = evidence(text, **given) if text else evidence_of(failure(**given), phase=None)
        return str(found.op.api)

    assert api("torch.nn.functional.relu") == "torch.nn.functional.relu"
    assert api("torch.take") == "None"
    assert api("torch.take", "here(1)") == "torch.take"


def test_a_part_that_fails_leaves_a_line_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("no")

    for name in ("module_names", "owner_modules"):
        monkeypatch.setattr(collect, name, fails)
    monkeypatch.setattr(collect.context, "describe", lambda: None)
    recorder = SimpleNamespace(history=fails, snapshot=fails, recorded_ops=0)
    found = evidence("here(1)", recorder=recorder)
    assert found.limits == (
        "history unavailable: ValueError: no",
        "module names unavailable: ValueError: no",
        "modules unavailable: ValueError: no",
        "environment unavailable: TypeError: it gave NoneType",
    )
    assert (found.history, found.owners, found.source.text) == ((), (), "here(1)")


def test_each_row_of_the_table_fills_fields_of_the_evidence() -> None:
    """Of a failure that has what the row needs."""
    names = {item.name for item in fields(Evidence)}
    filled = [name for row in COLLECTORS for name in row.fields.split()]
    assert {*filled} <= names
    assert {name for name in filled if filled.count(name) > 1} == {"graph"}
    assert all(hasattr(failure(), need) for row in COLLECTORS for need in row.needs.split())


def test_a_collector_reads_what_those_before_it_have_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is asked only where the failure has what it needs."""
    rows = (
        Collector("worker", "worker_line", lambda it: "line 3"),
        Collector("limits", "device_text", lambda it: it.found.worker_line + "!"),
        Collector("parameters", "frozen frozen_at", lambda it: (("w",), None)),
        Collector("modules", "module_type", lambda it: "Linear", "recorder"),
    )
    monkeypatch.setattr(collect, "COLLECTORS", rows)
    found = evidence_of(failure(), phase="backward")
    assert (found.worker_line, found.device_text, found.frozen) == ("line 3", "line 3!", ("w",))
    assert (found.module_type, found.phase) == (None, "backward")
    assert evidence_of(failure(recorder=object())).module_type == "Linear"


def test_the_forward_call_behind_a_node() -> None:
    mark = NodeMark(name="MulBackward0", sequence_nr=7)
    recorded = SimpleNamespace(site=None, name="torch.mul")
    reader = SimpleNamespace(module=lambda site: SimpleNamespace(path="net.0"))

    def of(call: Any, node: Any = mark, path: str | None = None) -> tuple[Any, list[str]]:
        snapshot = SimpleNamespace(
            forward_call=lambda number: call if number == 7 else None, reader=reader
        )
        recorder = SimpleNamespace(snapshot=lambda: snapshot, beyond_ring=lambda what: f"{what} …")
        made = failure(call=Call(node=node), recorder=recorder)
        made.found.module_path = path
        return forward_of(made), made.limits.lines

    assert of(recorded)[0][1] == "net.0"
    # The user's own line has the path of a module that runs; the forward call is of another one.
    assert of(recorded, path="net.9")[0][1] == "net.9"
    assert of(None) == ((None, None), ["the forward call of the op that failed …"])
    assert of(recorded, None) == ((None, None), [])


def violation(low: float | None, high: float | None, count: int, **more: Any) -> Violation:
    bounds = Bounds(min=low, max=high, also_allowed=more.pop("also", ()))
    offenders = Offenders(count=count, total=4, first=(Offender(position=(0,), value=9),))
    return Violation(headline="", bounds=bounds, offenders=offenders, **more)


IDS = torch.tensor([0, 3, -1, 5])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (violation(0, 4, 2), [False, False, True, True]),
        (violation(0, 5, 1), [False, False, True, False]),
        (violation(0, 4, 1, also=(-1,)), [False, False, False, True]),
        # A bound on sums says nothing of single elements.
        (violation(0, 4, 1), None),
        (violation(None, 4, 1), None),
        (violation(0, 4, 2, is_nonfinite=True), None),
    ],
)
def test_which_elements_are_outside(given: Violation, wanted: list[bool] | None) -> None:
    found = bad_places(given, IDS)
    assert (found if found is None else found.tolist()) == wanted


@pytest.mark.parametrize("is_open", [True, False])
def test_a_way_that_the_ring_has_forgotten_is_said(is_open: bool) -> None:
    recorder = SimpleNamespace(
        provenance=lambda *_: Provenance(is_open=is_open),
        beyond_ring=lambda what: f"{what} is not among the last 9 calls",
    )
    given = failure(
        violation=violation(0, 4, 2, argument="ids"), arguments={"ids": IDS}, recorder=recorder
    )
    assert given.way.is_open is is_open
    said = "the op that made the bad values, or wrote them, is not among the last 9 calls"
    assert given.limits.lines == ([said] if is_open else [])


@pytest.mark.parametrize(
    ("tensor", "is_it"),
    [
        (torch.tensor([1.0, math.inf]), True),
        (torch.tensor([1.0, -math.inf]), False),
        (torch.tensor([1.0, math.nan]), False),
        (torch.tensor([1]), False),
    ],
)
def test_an_infinity_above_0(tensor: Tensor, is_it: bool) -> None:
    assert has_infinity(tensor) is is_it


def test_an_error_is_described_without_being_kept() -> None:
    error = torch.OutOfMemoryError("no room")
    facts = error_facts(error)
    assert (facts.type_name, facts.bases[0], facts.message) == (
        "OutOfMemoryError",
        "RuntimeError",
        "no room",
    )
    assert facts.error_code is None
    error.error_code = 2  # type: ignore[attr-defined]
    assert error_facts(error).error_code == 2
    error.error_code = "2"  # type: ignore[attr-defined]
    assert error_facts(error).error_code is None


def test_the_graph_behind_the_tensors_of_a_line_that_fails() -> None:
    x = torch.ones(2, requires_grad=True)

    def graph(value: Tensor) -> Any:
        made = partial(failure, error=error_facts(RuntimeError("no")))
        return asked("here(z, y)", lambda it: graph_of(made(it)), y=value, z=torch.ones(2))[-1]

    assert [item.name for item in graph(x * 2).nodes if item.role == "upstream"]
    assert graph(torch.ones(2)).nodes == ()


def test_each_bad_value_gets_its_row_of_the_dataset() -> None:
    given = failure(
        violation=violation(0, 4, 2, argument="ids"),
        arguments={"ids": IDS},
        recorder=SimpleNamespace(
            provenance=lambda *_: Provenance(samples={(0,): 40}),
            seen_before=lambda _: None,
            history=tuple,
            recorded_ops=0,
        ),
    )
    found = evidence_of(given).violation
    assert found is not None
    assert [item.sample for item in found.offenders.first] == [40]


def test_the_time_since_the_work_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect.time, "perf_counter", lambda: 7.25)
    timing = timing_since(5.0)
    assert (timing.diagnose_s, timing.recorded_ops) == (2.25, 0)


@pytest.mark.parametrize(
    ("recorder", "has_watch"),
    [(None, False), (Recorder(), False), (SimpleNamespace(watch=object()), True)],
)
def test_whether_a_watch_looks_for_nan(recorder: Any, *, has_watch: bool) -> None:
    assert evidence_of(failure(recorder=recorder)).has_nan_watch is has_watch


def test_what_the_line_does_not_tell_comes_before_what_failed() -> None:
    made = failure(recorder=SimpleNamespace(snapshot=None, recorded_ops=0))
    made.site = CallSite(limits=("the file has changed",))
    first, second, *_ = evidence_of(made).limits
    assert (first, second.partition(" ")[0]) == ("the file has changed", "history")


@pytest.mark.parametrize("is_set", [True, False])
def test_only_a_line_that_set_the_bound_is_its_source(is_set: bool) -> None:
    made, at = failure(), SourceSpan(cell=1, line=3)
    assert collect._line_of_bound(made) is None
    made.found.bound = BoundOrigin(at=at, expression="n = 5", is_set=is_set)
    assert collect._line_of_bound(made) == (at if is_set else None)


@pytest.mark.parametrize(
    ("func", "op", "is_whole"),
    [
        (torch.nn.functional.one_hot, "aten::scatter_", True),
        (torch.scatter, "aten::scatter_", False),
        (torch.scatter_add, "aten::scatter_add_", False),
        # What Python calls is read there: its op is what checks the values.
        (torch.nn.functional.embedding, "aten::index_select", False),
    ],
)
def test_the_cpu_is_asked_for_the_call_or_for_its_op(
    func: Any, op: str, *, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of C++ that makes an op of another name may check its arguments before."""
    monkeypatch.setattr(collect, "replay", lambda func, args, kwargs, is_safe: (func, args))
    inner = torch.ops.aten.gather.default
    made = failure(
        violation=Violation(headline="", op=op),
        call=Call(
            api=ApiCall(func=func, args=(1,)),
            op=OpCall(op=inner, args=(2,), kwargs={}, arguments={}, name=op),
        ),
    )
    asked_for: Any = collect.replay_of(made)
    assert asked_for == ((func, (1,)) if is_whole else (inner, (2,)))
    assert collect.replay_of(failure(call=made.call)) == Replay()


def test_the_tensors_of_a_lost_device_and_those_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without values; of the others those that the line does not name, and not too many."""
    beside = tuple(TensorFact(argument=None, expression=it) for it in ("x", "y", "z"))

    def names(is_lost: bool) -> list[Any]:
        def of(frames: Any) -> Any:
            made = failure(
                frames, arguments={"a": IDS, "b": torch.ones(2)}, is_lost=is_lost,
                beside=lambda: beside,
            )  # fmt: skip
            return collect.tensors_of(made)

        facts = asked("here(x)", of, x=IDS)[-1]
        assert [it.summary is not None and it.summary.max for it in facts][:2] == (
            [None, None] if is_lost else [5, None]
        )
        return [it.expression or it.argument for it in facts]

    assert names(is_lost=False) == ["x", "b"]
    assert names(is_lost=True) == ["x", "b", "y", "z"]
    monkeypatch.setattr(collect, "MAX_TENSORS", 3)
    assert names(is_lost=True) == ["x", "b", "y"]


@pytest.mark.parametrize(
    ("message", "worker_line", "asked_for"),
    [("CUDA out of memory.", "", True), ("CUDA out of memory.", "f()", False), ("no", "", False)],
)
def test_the_holders_of_memory_are_those_of_this_process(
    message: str, worker_line: str, *, asked_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect.memory, "largest", lambda frames: ("x: 2 GiB",))
    made = failure(error=error_facts(RuntimeError(message)))
    made.found.worker_line = worker_line
    assert collect._memory(made) == (("x: 2 GiB",) if asked_for else ())


def test_the_way_is_that_of_the_values_or_the_write_that_backward_refuses() -> None:
    made, step = failure(), ProvenanceStep(op="aten::add_")
    made.way = Provenance(steps=[step])
    assert collect.provenance_steps(made) == (step,)
    made.found.modified = InPlaceChange(modified=step)
    assert collect.provenance_steps(made) == (ProvenanceStep(op="aten::add_", note=CHANGED),)


def test_the_names_are_of_the_modules_of_the_history_and_the_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        collect, "module_names", lambda path, others, *_, running: [path, *others, running]
    )
    made = failure()
    made.site = CallSite(module_path="running")
    made.found.module_path = "own"
    made.found.history = [SimpleNamespace(module_path="past")]
    made.found.graph = SimpleNamespace(nodes=[SimpleNamespace(module_path="node")])
    assert collect._names_of_modules(made) == ["own", "past", "node", "running"]  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(("related", "key"), [("weight", "weight"), (None, "self")])
def test_of_earlier_calls_the_other_modules_are_those_of_another_bound(
    related: str | None, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def others(seen: Any, stack: Any, tensor: Any, size: int, dim: int, frames: Any) -> Any:
        assert (seen, size, dim) == (["net"], 4, 1) and tensor is given[key]
        return modules

    monkeypatch.setattr(collect, "other_modules", others)
    modules = (OtherModule(module="a", calls=1),)
    given = {"self": torch.ones(2), "weight": torch.ones(3), "ids": IDS}
    earlier = {"calls": 3, "min": 0, "max": 3, "modules": ["net"]}
    found = collect.seen_before(
        failure(
            call=Call(op=OpCall(op=None, arguments=given)),
            arguments=given,
            violation=violation(0, 4, 2, argument="ids", related=related, size=4, dim=1),
            recorder=SimpleNamespace(seen_before=lambda key: earlier if key == "ids" else None),
        )
    )
    assert found == SeenBefore(calls=3, min=0, max=3, other_modules=modules)


def test_of_a_call_that_no_guard_saw_the_earlier_ones_are_counted() -> None:
    counts = [2, 0]
    snapshot = SimpleNamespace(calls_of_line=lambda raised: counts.pop(0))
    recorder = SimpleNamespace(snapshot=lambda: snapshot)
    made = failure(recorder=recorder, raised=ApiCall(func=torch.mm))
    found = collect.seen_before(made)
    assert found is not None and found.calls == 2
    assert collect.seen_before(made) is None
    assert collect.seen_before(failure(recorder=recorder)) is None
