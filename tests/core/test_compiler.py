"""The seam to torch's compiler, without the compiler: what it is asked, and what stays."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cudalens.core import _compiler


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names)
    return made


class Passes:
    """A module of inductor's with the passes of two backends, one of which has its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_passes: bool = True) -> None:
        self.order: list[str] = []
        self.before = _Before(self.order)
        self.of: dict[str, Any] = {}
        self.inside = SimpleNamespace(aot_compilation=False)
        register = lambda: self.of.update(cpu=None, cuda=self.before)
        common = module("torch._inductor.codegen.common", init_backend_registration=register)
        if has_passes:
            vars(common)["custom_backend_passes"] = self.of
        for made in (
            module("torch._inductor"),
            module("torch._inductor.compile_fx"),
            module("torch._inductor.codegen", common=common),
            common,
            module("torch._inductor.custom_graph_pass", CustomGraphModulePass=object),
            module("torch._inductor.virtualized", V=self.inside),
        ):
            monkeypatch.setitem(sys.modules, made.__name__, made)


class _Before:
    def __init__(self, order: list[str]) -> None:
        self._order = order

    def __call__(self, graph: Any) -> None:
        self._order.append("before")

    def uuid(self) -> str:
        return "its own"


def rewritten(order: list[str], devices: set[str], complaints: list[str] | None = None) -> Any:
    """Have graphs of these devices rewritten; return what undoes it."""
    return _compiler.rewrite_compiled_graphs(
        frozenset(devices),
        lambda graph, device: order.append(f"{graph} on {device}"),
        lambda: "ours",
        (complaints if complaints is not None else []).append,
    )


GRAPH: Any = SimpleNamespace(graph="graph")


def test_a_backend_s_own_pass_runs_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)
    undo = rewritten(passes.order, {"cuda", "cpu", "mps"})
    assert set(passes.of) == {"cpu", "cuda"}
    passes.of["cuda"](GRAPH)
    assert passes.order == ["before", "graph on cuda"]
    passes.of["cpu"](GRAPH)
    assert passes.order[2:] == ["graph on cpu"]
    assert passes.of["cuda"].uuid() == ("its own", "ours")
    assert passes.of["cpu"].uuid() == (None, "ours")
    undo()
    assert passes.of == {"cpu": None, "cuda": passes.before}


def test_only_graphs_of_the_devices_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)
    undo = rewritten(passes.order, {"cpu"})
    assert passes.of["cuda"] is passes.before
    undo()


def test_a_later_pass_than_ours_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)
    undo = rewritten(passes.order, {"cpu", "cuda"})
    passes.of["cuda"] = "later"
    undo()
    assert passes.of == {"cpu": None, "cuda": "later"}


def test_what_is_compiled_ahead_of_time_is_not_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = Passes(monkeypatch)
    undo = rewritten(passes.order, {"cuda"})
    passes.inside.aot_compilation = True
    passes.of["cuda"](GRAPH)
    assert passes.order == ["before"]
    del passes.inside.aot_compilation
    passes.of["cuda"](GRAPH)
    undo()
    assert passes.order == ["before", "before", "graph on cuda"]


def test_a_torch_without_passes_is_one_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, complaints = Passes(monkeypatch, has_passes=False), list[str]()
    rewritten(passes.order, {"cuda"}, complaints)()
    (line,) = complaints
    assert "not guarded" in line
    assert passes.of == {}


def test_our_frames_are_left_out_until_it_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[list[str]] = []
    skipped = ["/torch"]
    rules = module(
        "torch._dynamo.trace_rules",
        SKIP_DIRS=skipped,
        add=lambda name: skipped.append(f"/{name}"),
        _recompile_re=lambda: compiled.append([*skipped]),
    )
    monkeypatch.setitem(sys.modules, "torch._dynamo", module("torch._dynamo"))
    monkeypatch.setitem(sys.modules, "torch._dynamo.trace_rules", rules)
    undo = _compiler.leave_out_own_frames()
    assert skipped == ["/torch", "/cudalens"]
    skipped.append("/another")
    undo()
    assert skipped == ["/torch", "/another"]
    assert compiled == [["/torch", "/another"]]


def test_compiled_code_is_forgotten_where_a_compiler_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    compiler = module("torch._dynamo", reset_code_caches=lambda: calls.append("reset"))
    monkeypatch.setitem(sys.modules, "torch._dynamo", compiler)
    _compiler.forget_compiled_code()
    assert calls == ["reset"]
    monkeypatch.setitem(sys.modules, "torch._dynamo", module("torch._dynamo"))
    _compiler.forget_compiled_code()  # of an older release
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    _compiler.forget_compiled_code()
    assert calls == ["reset"]


def _guards(context: Any) -> ModuleType:
    return module("torch._guards", TracingContext=SimpleNamespace(try_get=lambda: context))


CODE = (lambda: None).__code__


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (SimpleNamespace(traced_code=[CODE]), [CODE]),
        (SimpleNamespace(traced_code=[]), None),
        (SimpleNamespace(), None),
        (None, None),
    ],
)
def test_the_code_that_is_being_compiled(
    monkeypatch: pytest.MonkeyPatch, context: Any, expected: Any
) -> None:
    monkeypatch.setitem(sys.modules, "torch._guards", _guards(context))
    assert _compiler.code_being_compiled() == expected


def test_without_a_compiler_no_code_is_being_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._guards", raising=False)
    assert _compiler.code_being_compiled() is None


def test_ops_that_inductor_leaves_to_torch_have_no_kernel_of_its(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lowering = module("torch._inductor.lowering", lowerings={"add", "sort"}, fallbacks={"sort"})
    monkeypatch.setitem(sys.modules, "torch._inductor", module("torch._inductor"))
    monkeypatch.setitem(sys.modules, "torch._inductor.lowering", lowering)
    assert [_compiler.has_kernel(op) for op in ("add", "sort", "mm")] == [True, False, False]


def test_a_size_that_values_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch.fx.experimental.symbolic_shapes"
    monkeypatch.setitem(sys.modules, name, module(name, free_unbacked_symbols=lambda size: size))
    assert [_compiler.is_data_dependent(size) for size in ({"u0"}, set())] == [True, False]
