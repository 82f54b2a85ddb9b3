"""The guards inside compiled code: what the pass puts into a graph, and what it finds there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import cudalens
from cudalens.core import _compiler
from cudalens.core.errors import DeviceIndexError
from cudalens.core.report_types import Violation
from cudalens.guards import Guard, full_name
from cudalens.guards.compiled import CompiledGuards, _define_op
from cudalens.guards.past_calls import PastCall
from cudalens.guards.pending import PENDING
from tests.hostcells import run_cell
from tests.processes import python
from tests.releases import guards_compiled_code


class Findings:
    """What compiled code has told, newest last."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Violation, PastCall]] = []
        self.trouble: list[str] = []
        self.guards = CompiledGuards(self._tell, self.trouble.append, devices={"cpu"})

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
                self.guards._rewrite(graph)
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
    found.guards.install()
    try:
        yield found
    finally:
        PENDING.settle()
        found.guards.uninstall()
    assert found.trouble == []


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


def test_the_other_devices_are_left_alone() -> None:
    """By default the CPU's graphs get nothing: their own kernels raise."""
    _define_op()
    trouble: list[str] = []
    guards = CompiledGuards(lambda *_: None, trouble.append)
    graph = torch.fx.symbolic_trace(lambda x, i: torch.ops.aten.index.Tensor(x, [i])).graph
    for node, value in zip(graph.nodes, (ROWS, AT, ROWS[AT]), strict=False):
        node.meta["val"] = value
    guards._rewrite(graph)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.index.Tensor
    ]
    CompiledGuards(lambda *_: None, trouble.append, devices={"cpu"})._rewrite(graph)
    assert torch.ops.cudalens.in_bounds.default in [node.target for node in graph.nodes]
    assert trouble == []


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
    findings.guards._rewrite = lambda graph: (rewrite(graph), graphs.append(graph))  # type: ignore[method-assign]
    findings.compile(lambda x, i: x[i] + x.index_select(0, i) + F.embedding(i, x))(ROWS, AT)
    names = [str(node.target) for node in graphs[0].nodes]
    # Negative values count from the end in the first, and are none in the others.
    assert names.count("cudalens.in_bounds.default") == 2


def test_a_failing_guard_leaves_the_graph_as_it_was(findings: Findings) -> None:
    """The code is compiled without it, and one line says so."""
    graph = torch.fx.symbolic_trace(lambda x, i: torch.ops.aten.index.Tensor(x, [i])).graph
    next(node for node in graph.nodes if node.name == "i").meta["val"] = AT
    findings.guards._rewrite(graph)
    assert findings.trouble.pop().startswith("guards of a compiled graph")
    index = next(node for node in graph.nodes if node.target is torch.ops.aten.index.Tensor)
    assert [item.op for item in index.args[1]] == ["placeholder"]


# --- the pass among others ------------------------------------------------------------------------


def _config() -> Any:
    from torch._inductor import config

    return config


class Theirs:
    """Somebody else's pass."""

    def __init__(self) -> None:
        self.graphs: list[object] = []

    def __call__(self, graph: object) -> None:
        self.graphs.append(graph)

    def uuid(self) -> str:
        return "theirs"


EMPTY = torch.fx.Graph()
EMPTY.output(None)


@guards_compiled_code
@pytest.mark.parametrize("is_first", [True, False])
def test_somebody_elses_pass_keeps_working(is_first: bool) -> None:
    """It runs before ours, whichever was there first, and stays when ours goes."""
    config, theirs, found = _config(), Theirs(), Findings()
    seen = []
    found.guards._rewrite = seen.append  # type: ignore[method-assign]
    if is_first:
        config.post_grad_custom_pre_pass = theirs
    try:
        found.guards.install()
        config.post_grad_custom_pre_pass = theirs
        config.post_grad_custom_pre_pass(EMPTY, True)
        assert theirs.graphs == seen == [EMPTY]
        found.guards.uninstall()
        assert config.post_grad_custom_pre_pass is theirs
    finally:
        found.guards.uninstall()
        config.post_grad_custom_pre_pass = None


def test_the_pass_is_there_in_every_thread_and_goes(findings: Findings) -> None:
    """What a user sets belongs to one context; the guards belong to the process."""
    config = _config()
    seen: list[object] = []
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            seen += pool.map(lambda _: config.post_grad_custom_pre_pass, [0])
        findings.guards.uninstall()
    assert seen[0] is not None and seen[1] is None
    assert config.post_grad_custom_pre_pass is None
    # Who has kept it beyond its time has a pass that does nothing.
    before = str(EMPTY)
    seen[0](EMPTY, True)  # type: ignore[operator]
    assert str(EMPTY) == before


def test_caches_tell_the_lines_apart(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph of another function is other code; of an unknown one it is not kept."""
    hook = _config().post_grad_custom_pre_pass
    assert hook.uuid() is None
    found = []
    for function in (_loss, _loss, test_backward):
        monkeypatch.setattr(_compiler, "code_being_compiled", lambda it=function: [it.__code__])
        found.append(hook.uuid())
    assert found[0] == found[1] != found[2]


def test_what_outlives_the_guards_does_not_hide_a_bad_index(findings: Findings) -> None:
    """Code that is still held uses replaced indices: then it is looked at once, and raises."""
    index = torch.tensor([0, 4])
    need = {"argument": "index", "item": None, "of": "self", "dim": 0, "why": "Why."}
    text = json.dumps({"op": "aten::gather", "need": need, "backward": False, "frames": []})
    findings.guards.uninstall()
    assert torch.equal(torch.ops.cudalens.in_bounds(index, 0, 4, text), index)
    with pytest.raises(DeviceIndexError, match="index contained 4, which is outside dimension 0"):
        torch.ops.cudalens.in_bounds(index, 0, 3, text)


def test_functions_are_compiled_anew_with_the_guards_and_without_them() -> None:
    runs: list[object] = []

    def backend(module: Any, inputs: Any) -> Any:
        runs.append(module)
        return module.forward

    _config()
    doubled = torch.compile(lambda x: x * 2, backend=backend)
    found = Findings()
    for step in (lambda: None, found.guards.install, found.guards.uninstall):
        step()
        doubled(ROWS)
        doubled(ROWS)
    assert len(runs) == 3


def test_a_torch_without_the_hook_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, _compiler.COMPILER_CONFIG, SimpleNamespace(_config={}))
    found = Findings()
    found.guards.install()
    found.guards.uninstall()
    assert found.trouble == [
        "compiled code is not guarded: this torch has no post_grad_custom_pre_pass"
    ]


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


LATER = """
import sys
from cudalens.guards.compiled import CompiledGuards
before = list(sys.meta_path)
guards = CompiledGuards(print, print)
guards.install()
print("torch._dynamo" in sys.modules)
import torch._inductor.config as config
print(config.post_grad_custom_pre_pass is not None, sys.meta_path == before)
guards.uninstall()
print(config.post_grad_custom_pre_pass, sys.meta_path == before)
"""


def test_the_compiler_is_not_loaded_for_the_guards() -> None:
    done = python("-c", LATER)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True", "True", "None", "True"]


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
    if (hook := _config().post_grad_custom_pre_pass) is not None:
        hook(graph, False)


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
        report.headline == "indices[0] contained 4, which is outside dimension 0 (size 4) of self"
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


@pytest.mark.parametrize("fast", [True, False])
def test_a_cell_that_keeps_functions_compiled(on_cpu: None, fast: bool) -> None:
    """With --no-force-eager the cell's compiled code is guarded inside, and the cell settles."""
    space = {"rows": _rows, "backend": as_inductor(_installed), "table": ROWS, "at": BAD}
    outcome = run_cell(CELL, space, fast=fast, force_eager=False)
    assert isinstance(outcome.error, cudalens.DeviceIndexError)
    assert outcome.shown.source is not None
    assert outcome.shown.source.text == "return table[at].sum()"
    assert not any("cudalens" in entry.op for entry in outcome.shown.history)
    assert _config().post_grad_custom_pre_pass is None


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
found.guards.install()
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
found.guards.uninstall()
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
