"""The guards inside compiled code: what the pass puts into a graph, and what it finds there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cudalens
from cudalens.core import _compiler
from cudalens.core.errors import DeviceIndexError
from cudalens.core.report_types import Violation
from cudalens.guards import Guard, full_name
from cudalens.guards.compiled import CompiledGuards, _define_op, _identity
from cudalens.guards.deferred import PastCalls
from cudalens.guards.past_calls import PastCall
from cudalens.guards.pending import PENDING
from tests.hostcells import run_cell
from tests.processes import python
from tests.releases import NO_PASSES, guards_compiled_code, unexpected


class Findings:
    """What compiled code has told, newest last."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Violation, PastCall]] = []
        self.trouble: list[str] = []
        self.calls = 0
        waits: Any = SimpleNamespace(count=lambda: self.calls, written_since=lambda count: ())
        past = PastCalls(self._tell, waits, lambda file: False, self.trouble.append)
        self.guards = CompiledGuards(past, frozenset({"cpu"}))

    def _tell(self, op: Any, guard: Guard, violation: Violation, past: PastCall) -> BaseException:
        self.told.append((full_name(op), violation, past))
        return DeviceIndexError(violation.sentence())

    def last_line(self) -> tuple[str, int, str]:
        """Return file, line and function of the deepest call of the first finding."""
        past = self.told[0][2]
        code = (past.forward or past.lines)[-1][0]
        return code.co_filename, code.co_firstlineno, code.co_name

    def look(self) -> list[str]:
        """Wait for what is pending; return what was found, in words."""
        self.told.clear()
        return [str(error) for error in PENDING.settle()]

    def compile(
        self, function: Callable[..., Any], *, guarded: bool = True, **options: Any
    ) -> Callable[..., Any]:
        """Compile as inductor does, but for its kernels: the rewritten graphs run as they are."""

        def rewrite(graph: Any) -> None:
            if guarded:
                self.guards._rewrite(graph, "cpu")
                graph.lint()

        return torch.compile(function, backend=as_inductor(rewrite), **options)


def as_inductor(rewrite: Callable[[Any], object]) -> Any:
    """Return a compiler that has its graphs rewritten as inductor does, and makes no kernels."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def run(module: Any, inputs: Any) -> Any:
        rewrite(module.graph)
        module.recompile()
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=run, decompositions=select_decomp_table)
    backend.__name__ = "aot_eager, rewritten"
    return backend


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is compiled yet, and nothing stays."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def findings() -> Iterator[Findings]:
    """Guards for the CPU's compiled code, installed."""
    found = Findings()
    remove = found.guards.install()
    try:
        yield found
    finally:
        PENDING.settle()
        remove()
    assert unexpected(found.trouble) == [], found.trouble


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


LOSS_LINE = _loss.__code__.co_firstlineno + 1
ROWS = torch.arange(12.0).reshape(4, 3)
AT = torch.tensor([3, 0, 1])


def test_a_bad_label_runs_on_and_is_named(findings: Findings) -> None:
    """Its finding names the value, the size and the line; a good one has the result it had."""
    loss, plain = findings.compile(_loss), findings.compile(_loss, guarded=False)
    logits, labels = torch.randn(6, 5), torch.tensor([0, 4, 1, -100, 2, 3])
    assert torch.equal(loss(logits, labels), plain(logits, labels))
    assert findings.look() == []
    assert loss(logits, torch.tensor([0, 4, 5, -100, 2, 3])).isfinite()
    assert findings.look() == ["index contained 5, which is outside dimension 1 (size 5) of self"]
    op, violation, past = findings.told[0]
    assert (op, past.in_backward) == ("aten::gather", False)
    assert findings.last_line() == (__file__, LOSS_LINE, "_loss")
    assert (violation.size, violation.dim, violation.bounds.text) == (5, 1, "0 … 4")


def _spread(at: Tensor) -> Tensor:
    return at[:, None].expand(3, 3)


CASES: dict[str, tuple[Callable[..., Tensor], int, int, str]] = {
    "index": (lambda x, i: x[i], -5, -4, "indices[0] contained -5, which is outside dimension 0"),
    "two": (lambda x, i: x[:, i], 3, 2, "indices[1] contained 3, which is outside dimension 1"),
    "index_put": (lambda x, i: x.clone().index_put_((i,), x[:3]), 4, 3, "indices[0] contained 4"),
    "index_add": (lambda x, i: x.index_add(0, i, x[:3]), 4, 3, "contained 4"),
    "gather": (lambda x, i: x.gather(0, _spread(i)), -1, 0, "index contained -1"),
    "scatter": (lambda x, i: x.scatter(0, _spread(i), x[:3]), 4, 3, "contained 4"),
    "a value": (lambda x, i: x.scatter(0, _spread(i), 1.0), 4, 3, "contained 4"),
    "scatter_add": (lambda x, i: x.scatter_add(0, _spread(i), x[:3]), 4, 3, "index contained 4"),
    "amax": (
        lambda x, i: x.scatter_reduce(0, _spread(i), x[:3], "amax"),
        4,
        3,
        "index contained 4",
    ),
    "embedding": (lambda x, i: F.embedding(i, x), -1, 0, "indices contained -1"),
    "index_select": (lambda x, i: x.index_select(0, i), 4, 3, "contained 4"),
    "int32": (lambda x, i: x[i.int()], 4, 3, "indices[0] contained 4"),
}


def test_a_number_without_dimensions_is_a_row_of_one(findings: Findings) -> None:
    guarded = findings.compile(lambda x, i: x.index_select(0, i))
    assert guarded(torch.tensor(3.0), torch.tensor([0])).tolist() == 3
    assert findings.look() == []
    guarded(torch.tensor(3.0), torch.tensor([1]))
    says = "indices[0] contained 1, which is outside dimension 0 (size 1) of self"
    assert findings.look() == [says]


@pytest.mark.parametrize("case", CASES)
def test_every_op_and_its_good_neighbour(findings: Findings, case: str) -> None:
    """One step beyond the bound is told and replaced; at the bound the result is the same bits."""
    function, bad, good, says = CASES[case]
    guarded = findings.compile(function)
    at_bound = torch.tensor([good, 0, 1])
    assert torch.equal(guarded(ROWS, at_bound), function(ROWS, at_bound))
    assert findings.look() == []
    guarded(ROWS, torch.tensor([0, bad, 1]))
    told = findings.look()
    assert len(told) == 1 and says in told[0]
    assert findings.last_line()[0] == __file__


def test_the_other_devices_are_left_alone(findings: Findings) -> None:
    """Their own kernels raise, or have a pass of their own."""
    graph = torch.fx.symbolic_trace(lambda x, i: torch.ops.aten.index.Tensor(x, [i])).graph
    for node, value in zip(graph.nodes, (ROWS, AT, ROWS[AT]), strict=False):
        node.meta["val"] = value
    findings.guards._rewrite(graph, "cuda")
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.index.Tensor
    ]
    findings.guards._rewrite(graph, "cpu")
    assert torch.ops.cudalens.in_bounds.default in [node.target for node in graph.nodes]


def test_dynamic_shapes(findings: Findings) -> None:
    """The bound is that of the running call, in a graph that was compiled once."""
    guarded = findings.compile(lambda x, i: x[i] * 2, dynamic=True)
    for rows in (4, 7, 9):
        x, i = torch.randn(rows, 3), torch.tensor([rows - 1, -rows])
        assert torch.equal(guarded(x, i), x[i] * 2)
        assert findings.look() == []
        guarded(x, i + 1)
        says = f"indices[0] contained {rows}, which is outside dimension 0 (size {rows}) of self"
        assert findings.look() == [says]


def test_a_size_that_only_the_run_knows(findings: Findings) -> None:
    """An index into what nonzero selected, beside another: each bound is that of the run."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        guarded = findings.compile(
            lambda x, m, i, j: (x[m.nonzero().squeeze(1)][i, j], x[m.nonzero().squeeze(1), j[:1]])
        )
        mask, j = torch.tensor([True, False, True, True]), torch.tensor([2, -3])
        guarded(ROWS, mask, torch.tensor([2, -3]), j)
        assert findings.look() == []
        guarded(ROWS, mask, torch.tensor([0, 3]), j)
        says = "indices[0] contained 3, which is outside dimension 0 (size 3) of self"
        assert findings.look() == [says]
        guarded(ROWS, mask, torch.tensor([0, 0]), j + 1)
        says = "indices[1] contained 3, which is outside dimension 1 (size 3) of self"
        assert set(findings.look()) == {says}


def test_backward(findings: Findings) -> None:
    """What backward writes by index is guarded there, and says so."""
    guarded = findings.compile(lambda x, i: (x * 2)[i].sum())
    x = ROWS.clone().requires_grad_()
    guarded(x, AT).backward()
    expected = torch.zeros(4, 3).index_add(0, AT, torch.full((3, 3), 2.0))
    assert x.grad is not None and torch.equal(x.grad, expected)
    assert findings.look() == []
    guarded(x, torch.tensor([0, 4, 1])).backward()
    assert len(findings.look()) == 2
    told = [(op, past.in_backward) for op, _, past in findings.told]
    assert told == [("aten::index.Tensor", False), ("aten::index_put", True)]


def test_what_is_not_looked_at(findings: Findings) -> None:
    """What the compiler itself makes, a mask, which selects by position, and an empty index."""
    findings.compile(lambda x: F.interpolate(x[None, None], scale_factor=2.0))(ROWS)
    guarded = findings.compile(lambda x, i, mask: (x[i], torch.where(mask, x, 0)))
    guarded(ROWS, torch.zeros(0, dtype=torch.int64), ROWS > 3)
    assert PENDING.count == 0


def test_one_index_is_reduced_once(findings: Findings) -> None:
    """Ops that take the same index in the same bounds share it."""
    graphs: list[Any] = []
    rewrite = findings.guards._rewrite
    findings.guards._rewrite = lambda graph, device: (rewrite(graph, device), graphs.append(graph))  # type: ignore[method-assign]
    findings.compile(lambda x, i: x[i] + x.index_select(0, i) + F.embedding(i, x))(ROWS, AT)
    names = [str(node.target) for node in graphs[0].nodes]
    # Negative values count from the end in the first, and are none in the others.
    assert names.count("cudalens.in_bounds.default") == 2


def test_a_failing_guard_leaves_the_graph_as_it_was(findings: Findings) -> None:
    """The code is compiled without it, and one line says so."""
    graph = torch.fx.symbolic_trace(lambda x, i: torch.ops.aten.index.Tensor(x, [i])).graph
    next(node for node in graph.nodes if node.name == "i").meta["val"] = AT
    findings.guards._rewrite(graph, "cpu")
    assert findings.trouble.pop().startswith("guards of a compiled graph")
    index = next(node for node in graph.nodes if node.target is torch.ops.aten.index.Tensor)
    assert [item.op for item in index.args[1]] == ["placeholder"]


# --- the pass among others ------------------------------------------------------------------------


def _pass() -> Any:
    """Return the pass that inductor runs on graphs for the CPU."""
    from torch._inductor import compile_fx
    from torch._inductor.codegen import common

    assert compile_fx
    common.init_backend_registration()
    return getattr(common, "custom_backend_passes", {}).get("cpu")


class Theirs:
    """The pass of a backend."""

    def __init__(self) -> None:
        self.modules: list[object] = []

    def __call__(self, module: object) -> None:
        self.modules.append(module)

    def uuid(self) -> str:
        return "theirs"


EMPTY = torch.fx.GraphModule({}, torch.fx.Graph())
EMPTY.graph.output(None)


@guards_compiled_code
def test_the_pass_of_a_backend_runs_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """And stays when ours goes."""
    assert _pass() is None
    from torch._inductor.codegen.common import custom_backend_passes

    theirs, found, seen = Theirs(), Findings(), []
    monkeypatch.setitem(custom_backend_passes, "cpu", theirs)
    found.guards._rewrite = lambda *item: seen.append((*item, len(theirs.modules)))  # type: ignore[method-assign]
    remove = found.guards.install()
    _pass()(EMPTY)
    assert seen == [(EMPTY.graph, "cpu", 1)] and theirs.modules == [EMPTY]
    assert _pass().uuid()[0] == "theirs"
    remove()
    assert _pass() is theirs


@guards_compiled_code
def test_a_pass_that_came_later_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _pass() is None
    from torch._inductor.codegen.common import custom_backend_passes

    theirs, before = Theirs(), dict(custom_backend_passes)
    remove = Findings().guards.install()
    with monkeypatch.context() as patch:
        patch.setitem(custom_backend_passes, "cpu", theirs)
        remove()
        assert _pass() is theirs
    custom_backend_passes["cpu"] = None
    assert custom_backend_passes == before


def test_caches_tell_the_lines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph of another function is other code; of an unknown one it is not kept."""
    _define_op()
    assert _identity() != _identity()
    found = []
    for function in (_loss, _loss, test_backward):
        monkeypatch.setattr(_compiler, "code_being_compiled", lambda it=function: [it.__code__])
        found.append(_identity())
    assert found[0] == found[1] != found[2]


def test_what_outlives_the_guards_is_as_without_them(findings: Findings) -> None:
    """Code that still runs uses the index as it is, so that its kernel says what it says."""
    index = torch.tensor([0, 4])
    need = {"argument": "index", "item": None, "of": "self", "dim": 0, "why": "Why."}
    check = {"op": "aten::gather", "need": need, "wraps": False, "backward": False, "frames": []}
    text = json.dumps(check)
    assert torch.ops.cudalens.in_bounds(index, 4, text).tolist() == [0, 3]
    assert len(findings.look()) == 1
    assert torch.ops.cudalens.in_bounds(index[:0], 4, text).tolist() == []
    assert PENDING.count == 0
    # Of 32 bits that cannot leave the bounds nothing is replaced; what is given back is a copy.
    wide, small = json.dumps({**check, "wraps": True}), index.int()
    same = torch.ops.cudalens.in_bounds(small, (1 << 31) + 1, wide)
    assert (same.tolist(), same.data_ptr() == small.data_ptr()) == ([0, 4], False)
    assert findings.look() == []
    with mock.patch("cudalens.guards.compiled._installed", []):
        assert torch.ops.cudalens.in_bounds(index, 4, text).tolist() == [0, 4]
    assert findings.look() == []


def test_a_finding_counts_the_calls_since(findings: Findings) -> None:
    look_up = findings.compile(lambda x, i: x[i])
    look_up(ROWS, torch.tensor([4]))
    findings.calls += 3
    assert len(findings.look()) == 1
    assert findings.told[0][2].calls_ago == 3


def test_functions_are_compiled_anew_with_the_guards_and_without_them() -> None:
    runs: list[object] = []

    def backend(module: Any, inputs: Any) -> Any:
        runs.append(module)
        return module.forward

    assert _pass() is None
    doubled = torch.compile(lambda x: x * 2, backend=backend)
    remove: Callable[[], None] = lambda: None
    for step in ("before", "with", "behind"):
        if step == "with":
            remove = Findings().guards.install()
        elif step == "behind":
            remove()
        doubled(ROWS)
        doubled(ROWS)
    assert len(runs) == 3


def test_a_torch_without_passes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _pass() is None
    from torch._inductor.codegen import common

    monkeypatch.delattr(common, "custom_backend_passes", raising=False)
    found = Findings()
    found.guards.install()()
    assert found.trouble == [NO_PASSES]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends(on_cpu: None, backend: str) -> None:
    """What torch's own kernels run is guarded there, at the line of the call."""
    compiled = torch.compile(_rows, backend=backend)
    with cudalens.guard(deferred=True):
        compiled(ROWS, BAD)
        with pytest.raises(cudalens.DeviceIndexError, match="contained 4") as caught:
            cudalens.settle()
    source = caught.value.report.source
    assert source is not None and source.text == "compiled(ROWS, BAD)"


def test_the_compiler_traces_what_is_watched() -> None:
    """Methods that deferred guards wrap break no graph, called as methods or as functions."""

    def write(host: Tensor, x: Tensor) -> Tensor:
        host.copy_(x)
        Tensor.copy_(host, x, True)
        host[0] = x[1]
        Tensor.__setitem__(host, 1, 7)
        return host

    with cudalens.guard(deferred=True):
        written = torch.compile(write, backend="eager", fullgraph=True)(torch.zeros(3), AT * 1.0)
    assert written.tolist() == [0, 7, 1]


# --- from the call to the report ------------------------------------------------------------------


def _installed(graph: Any) -> None:
    """Run the pass that is installed."""
    if (hook := _pass()) is not None:
        hook(SimpleNamespace(graph=graph))


def _rows(table: Tensor, at: Tensor) -> Tensor:
    return table[at].sum()


ROWS_LINE = _rows.__code__.co_firstlineno + 1
BAD = torch.tensor([0, 4, 1])


@guards_compiled_code
def test_deferred_guards_raise_where_a_parameter_would_be_written(on_cpu: None) -> None:
    """The report has the user's line, the bound and what is not known; training goes on."""
    table = torch.nn.Parameter(ROWS.clone())
    optimizer = torch.optim.SGD([table], lr=1.0)
    look_up = torch.compile(_rows, backend=as_inductor(_installed))
    with cudalens.guard(deferred=True):
        look_up(table, BAD).backward()
        with pytest.raises(cudalens.DeviceIndexError) as caught:
            optimizer.step()
        assert torch.equal(table, ROWS)
        optimizer.zero_grad()
        look_up(table, AT).backward()
        optimizer.step()
    report = caught.value.report
    assert (
        report.headline_schema
        == "indices[0] contained 4, which is outside dimension 0 (size 4) of self"
    )
    assert (report.op.name, report.argument, report.phase) == ("aten::index", "indices", "forward")
    assert report.source is not None
    assert (report.source.line, report.source.text) == (ROWS_LINE, "return table[at].sum()")
    assert report.deferred and report.offenders is not None
    assert (report.offenders.first, report.offenders.max) == ((), 4)
    assert report.explanation.endswith("discard everything computed from its result.")
    assert len(caught.value.__notes__) == 1  # that of backward
    assert not torch.equal(table, ROWS)


@guards_compiled_code
def test_backward_is_at_its_own_line(on_cpu: None) -> None:
    """The place is the call of backward; where the forward op was called is told beside it."""
    at = AT.clone()
    loss = torch.compile(_rows, backend=as_inductor(_installed))
    with cudalens.guard(deferred=True):
        value = loss(ROWS.clone().requires_grad_(), at)
        cudalens.settle()
        at.data[0] = 9
        value.backward()
        with pytest.raises(cudalens.DeviceIndexError, match="contained 9") as caught:
            cudalens.settle()
    report = caught.value.report
    assert report.phase == "backward"
    assert report.source is not None and report.source.text == "value.backward()"
    assert report.forward_source is not None and report.forward_source.line == ROWS_LINE


CELL = """
import torch
look_up = torch.compile(rows, backend=backend)
look_up(table, at)
"""


@guards_compiled_code
@pytest.mark.parametrize("fast", [True, False])
def test_a_cell_that_keeps_functions_compiled(on_cpu: None, fast: bool) -> None:
    """With --no-force-eager the cell's compiled code is guarded inside, and the cell settles."""
    space = {"rows": _rows, "backend": as_inductor(_installed), "table": ROWS, "at": BAD}
    outcome = run_cell(CELL, space, fast=fast, force_eager=False)
    assert isinstance(outcome.error, cudalens.DeviceIndexError)
    assert outcome.shown.source is not None
    assert outcome.shown.source.text == "return table[at].sum()"
    assert not any("cudalens" in entry.op for entry in outcome.shown.history)
    assert _pass() is None


# --- inductor itself ------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids))  # type: ignore[no-any-return]


MODEL_LINE = Model.forward.__code__.co_firstlineno + 1


def trained(backend: str, batches: Sequence[list[int]], *, in_place: bool) -> list[Tensor]:
    """Return the parameters of a compiled model after a step for each batch."""
    torch.manual_seed(0)
    model: Any = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if in_place:
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(torch.tensor(batch)), torch.tensor([0, 2])).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("in_place", [True, False], ids=["module.compile", "torch.compile"])
def test_compiled_models_are_trained_as_without_guards(
    on_cpu: None, backend: str, in_place: bool
) -> None:
    """To the bit; and a bad index is found before the weights are written."""
    good = [[1, 4], [0, 2]]
    plain = trained(backend, good, in_place=in_place)
    torch.compiler.reset()
    with cudalens.guard(deferred=True):
        assert all(map(torch.equal, plain, trained(backend, good, in_place=in_place)))
        with pytest.raises(cudalens.DeviceIndexError, match="indices contained 5") as caught:
            trained(backend, [*good, [1, 5]], in_place=in_place)
    source = caught.value.report.source
    assert source is not None
    is_inside = backend == "inductor"  # the others run torch's ops below the user's call
    assert (source.file, source.line == MODEL_LINE) == (__file__, is_inside)


@pytest.mark.thorough
def test_a_module_of_torch_alone_is_told_by_the_line_of_its_call(on_cpu: None) -> None:
    """No line of the user's is in it, and the file that inductor wrote is none."""
    look_up = torch.compile(torch.nn.Embedding(5, 4))
    with cudalens.guard(deferred=True), pytest.raises(cudalens.DeviceIndexError) as caught:
        look_up(torch.tensor([5])).sum().item()
    assert caught.value.report.source is not None
    assert caught.value.report.source.text == "look_up(torch.tensor([5])).sum().item()"


PROGRAM = """
import sys, torch, torch.nn.functional as F
import torch._dynamo
from tests.guards.test_compiled import Findings
{blank}
def loss(logits, labels):
    return F.cross_entropy(logits, labels)

torch.manual_seed(0)
logits, labels = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 4, 1, -100, 2, 3])
plain = torch.compile(loss)
results = [plain(logits, labels), *torch.autograd.grad(plain(logits, labels), logits)]
found = Findings()
remove = found.guards.install()
torch._dynamo.utils.counters.clear()
guarded = torch.compile(loss)
value = guarded(logits, labels)
print(*map(torch.equal, results, [value, *torch.autograd.grad(value, logits)]))
print(found.look())
labels[2] = 5
guarded(logits, labels).backward()
print(found.look()[0], found.last_line()[1:])
counts = torch._dynamo.utils.counters["aot_autograd"]
print(counts["autograd_cache_miss"], counts["autograd_cache_hit"])
remove()
try:
    guarded(logits, labels)
except RuntimeError as error:
    print(type(error).__name__, "index out of bounds" in str(error))
print(found.trouble)
"""


@pytest.mark.all
def test_inductor_and_its_caches(tmp_path: Path) -> None:
    """Cold, warm, and with the function one line further down: each names its own line."""
    says = "index contained 5, which is outside dimension 1 (size 5) of self"
    script = tmp_path / "program.py"
    for blank, line, cached in (("", 7, "1 0"), ("", 7, "0 1"), ("\n", 8, "1 0")):
        script.write_text(PROGRAM.format(blank=blank))
        done = python(str(script), timeout=600, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            "True True",
            "[]",
            f"{says} ({line}, 'loss')",
            cached,
            "RuntimeError True",
            "[]",
        ]
