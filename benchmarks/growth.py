"""How cost grows with what is not looked at: it should not."""

from __future__ import annotations

import atexit
import gc
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own custom

import cudalens
from benchmarks.measure import compare
from benchmarks.tools import FULL, GUARDS, TOOLS
from cudalens.guards.process import PROCESS
from cudalens.source.files import CELLS

ROWS, CLASSES, BAD = 32, 10, 17


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One quantity against one size."""

    name: str
    points: tuple[tuple[int, float], ...]

    def to_dict(self) -> dict[str, float]:
        return {str(size): value for size, value in self.points}


Call = Callable[[], Any]
Prepare = Callable[[], Call]
"""Does inside the checked block what comes before the failing call, and gives that call."""


def diagnose_s(prepare: Prepare, repetitions: int = 3, **options: Any) -> float:
    """Return the median seconds from the failing call to the finished report."""
    # What the user made is old by the time that something fails: it is collected before.
    gc.collect()
    return round(median(timed_report(prepare, **options)[1] for _ in range(repetitions)), 4)


def timed_report(prepare: Prepare, **options: Any) -> tuple[cudalens.Report, float]:
    """Make a call that fails in a checked block; return its report and the seconds until then."""
    session = cudalens.check(**options)
    started = 0.0
    try:
        with PROCESS.acting_on("cpu", "cuda"), session:
            call = prepare()
            started = time.perf_counter()
            call()
    except cudalens.DeviceAssertError:
        pass
    took = time.perf_counter() - started
    if session.report is None:
        msg = "the call was to fail"
        raise RuntimeError(msg)
    return session.report, took


def labels() -> Tensor:
    bad = torch.arange(ROWS) % CLASSES
    bad[BAD] = CLASSES
    return bad


def logits(nodes: int = 1) -> Tensor:
    """Return logits with that many autograd nodes behind them."""
    value = torch.randn(ROWS, CLASSES, requires_grad=True)
    for _ in range(nodes):
        value = value + 1.0
    return value


def by_ops(sizes: Iterable[int], repetitions: int) -> list[Curve]:
    """Overhead of guards and of the full check against the number of ops in a step."""
    chosen = {tool.name: tool.opener for tool in TOOLS if tool.name in (GUARDS, FULL)}
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in chosen}
    for size in sizes:

        def step(size: int = size) -> Any:
            value = torch.ones(8, 8)
            for _ in range(size - 2):
                value = value * 1.0
            return value.take(torch.tensor(0))

        runs = max(3, 2000 // size)
        ratios, _ = compare(step, chosen, repetitions=repetitions, steps=runs)
        for name, ratio in ratios.items():
            found[name].append((size, ratio.median))
    return [Curve(name=f"{name}_by_ops", points=tuple(points)) for name, points in found.items()]


def behind_graph(nodes: int) -> Prepare:
    """A loss whose scores have that many autograd nodes behind them."""
    scores, bad = logits(nodes), labels()
    # A long chain is freed by recursion, unless it lives on to the end of the process.
    _kept.append(scores)
    return lambda: lambda: F.cross_entropy(scores, bad)


_kept: list[Tensor] = []


def with_index(elements: int) -> Prepare:
    """A lookup with one bad element in the middle."""
    table, index = torch.randn(CLASSES), torch.zeros(elements, dtype=torch.int64)
    index[elements // 2] = CLASSES
    return lambda: lambda: table.gather(0, index)


def after_ops(count: int) -> Prepare:
    """A loss after that many recorded ops."""

    def prepare() -> Call:
        value, bad = torch.randn(ROWS, CLASSES), labels()
        for _ in range(count):
            value = value * 1.0
        return lambda: F.cross_entropy(value, bad)

    return prepare


def among_names(count: int) -> Prepare:
    """A loss in a namespace that has filled up, as a notebook's does in a long session."""
    names: dict[str, Any] = {f"value_{number}": torch.zeros(1) for number in range(count)}
    names.update(F=F, scores=logits(), bad=labels(), __name__="__main__")
    text = "F.cross_entropy(scores, bad)"
    CELLS.register("<cell 1>", 1, [text])
    code = compile(text, "<cell 1>", "exec")
    return lambda: lambda: exec(code, names)


class _Nested(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner: nn.Module = _Nested(depth - 1) if depth > 1 else nn.Embedding(4, 4)

    def forward(self, index: Tensor) -> Tensor:
        return self.inner(index)


def inside_modules(depth: int) -> Prepare:
    """A lookup below that many modules."""
    model, index = _Nested(depth), torch.tensor([0, 4])
    return lambda: lambda: model(index)


def in_file(lines: int) -> Prepare:
    """A loss at the end of a file with that many lines."""
    filler = [f"def unused(x): return x + {number}" for number in range(lines - 1)]
    return lambda: _from_file([*filler, "F.cross_entropy(scores, bad)"])


def after_lines(count: int) -> Prepare:
    """A loss after ops that were recorded on as many lines of the user's."""
    ops = ["value = scores * 1.0"] * count
    return lambda: _from_file([*ops, "F.cross_entropy(value, bad)"])


def _from_file(lines: list[str]) -> Call:
    """Run the first lines of a file; return a call that runs the last one."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write("\n".join(lines) + "\n")
    atexit.register(Path(file.name).unlink)
    names: dict[str, Any] = {"F": F, "scores": logits(), "bad": labels(), "__name__": "__main__"}
    exec(compile("\n".join(lines[:-1]), file.name, "exec"), names)
    last = compile("\n" * (len(lines) - 1) + lines[-1], file.name, "exec")
    return lambda: exec(last, names)


DIAGNOSES: tuple[tuple[str, Callable[[int], Prepare], tuple[int, ...]], ...] = (
    ("graph_nodes", behind_graph, (100, 1_000, 10_000, 100_000)),
    (
        "index_elements",
        with_index,
        (10, 1_000, 100_000, 1_000_000, 10_000_000, 100_000_000),
    ),
    ("history", after_ops, (10, 100, 1_000, 10_000)),
    ("source_lines", in_file, (100, 1_000, 10_000, 100_000)),
    ("distinct_lines", after_lines, (10, 100, 1_000, 4_000)),
    ("namespace", among_names, (10, 100, 1_000, 10_000, 100_000)),
    ("module_depth", inside_modules, (1, 4, 16, 64)),
)


def diagnosis_curves(*, quick: bool) -> tuple[Curve, ...]:
    """Return every curve of the diagnosis; the quick ones only show that they can be made."""
    timed_report(after_ops(1))  # loads what is loaded on first use
    return tuple(
        Curve(
            name=name,
            points=tuple(
                (size, diagnose_s(failing(size), max_ops=20_000))
                for size in sizes[: 2 if quick else None]
            ),
        )
        for name, failing, sizes in DIAGNOSES
    )
