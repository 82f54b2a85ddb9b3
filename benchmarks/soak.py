"""Run a thousand generated cells in one shell, a third of them failing, and look for what stays.

Every failure must be reported with its value, op and line, every good cell must stay quiet, and in
the end threads, file descriptors, hooks, dispatcher registrations and memory are those of the
beginning.  ``python -m benchmarks.soak [--cells N] [--seed N] [--limit SECONDS] [--json FILE]``
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as hooks

import cudalens
from benchmarks.memory import resident
from cudalens.guards.process import PROCESS
from tests import shells

MAX_GROWTH_BYTES = 96 << 20
"""Resident memory may grow so much over the second half, most of it the shell's own history."""
SETUP = """\
import torch, cudalens, threading
import torch.nn.functional as F
from concurrent.futures import ThreadPoolExecutor
d = torch.device("cuda")
table = torch.ones(5, 2, device=d)
grid = torch.ones(3, 4, device=d)
scores = torch.zeros(2, 3, device=d)
"""
ALIVE = """\
head = torch.nn.Linear(4, 3).to(d)
loss = F.cross_entropy(head(torch.ones(2, 4, device=d)), torch.tensor([0, 2], device=d))
loss.backward()
torch.cuda.synchronize()
alive = bool(head.weight.grad.abs().sum() > 0)
"""


@dataclass(frozen=True)
class Family:
    """A call that one family of guards looks at: ``{v}`` is the value at fault."""

    op: str
    call: str
    size: int
    """Values from 0 to below this are good."""


FORWARD = (
    Family("aten::embedding", "F.embedding(torch.tensor([0, {v}], device=d), table)", 5),
    Family("aten::_embedding_bag", "F.embedding_bag(torch.tensor([[0, {v}]], device=d), table)", 5),
    Family("aten::nll_loss", "F.cross_entropy(scores, torch.tensor([0, {v}], device=d))", 3),
    Family("aten::gather", "grid.gather(1, torch.tensor([[{v}]], device=d))", 4),
    Family("aten::index_select", "grid.index_select(0, torch.tensor([{v}], device=d))", 3),
    Family("aten::index", "grid[torch.tensor([{v}], device=d)]", 3),
    Family("aten::", "grid.clone().index_put_((torch.tensor([{v}], device=d),), grid[0])", 3),
    Family("aten::scatter", "grid.scatter(1, torch.tensor([[{v}]], device=d), 1.0)", 4),
    Family("aten::scatter_add", "grid.scatter_add(1, torch.tensor([[{v}]], device=d), grid)", 4),
    Family("aten::index_add", "grid.index_add(0, torch.tensor([{v}], device=d), grid[:1])", 3),
    Family("aten::index_copy", "grid.index_copy(0, torch.tensor([{v}], device=d), grid[:1])", 3),
    Family("aten::index_fill", "grid.index_fill(0, torch.tensor([{v}], device=d), 2.0)", 3),
    Family("aten::take", "grid.take(torch.tensor([{v}], device=d))", 12),
    Family("aten::multinomial", "torch.multinomial(torch.tensor([1.0, -{v}.0], device=d), 1)", 1),
    Family(
        "aten::binary_cross_entropy",
        "F.binary_cross_entropy(torch.tensor([0.5, {v}.0], device=d), torch.ones(2, device=d))",
        2,
    ),
)
BACKWARD = (
    Family("aten::scatter_add", "leaf.gather(1, ids.view(2, 1)).sum()", 3),
    Family("aten::index_add", "leaf.t().index_select(0, ids).sum()", 3),
    Family("aten::nll_loss_backward", "F.nll_loss(leaf, ids)", 3),
)


@dataclass(frozen=True)
class Cell:
    """A generated cell and what has to come of it."""

    text: str
    error: str | None = None
    """The class name of the error it ends with."""
    kind: str | None = None
    """The kind of the report that is shown."""
    value: str | None = None
    op: str = ""
    line: str = ""
    """The user's line that the report names."""
    label: str = "good"


@dataclass
class Result:
    """What the soak found."""

    cells: int = 0
    failing: int = 0
    seconds: float = 0.0
    by_label: dict[str, int] = field(default_factory=dict)
    start: dict[str, int] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)
    growth_bytes: int = 0
    problems: list[str] = field(default_factory=list)


# --- cells ---------------------------------------------------------------------------------------


def _bad_value(rng: random.Random, family: Family) -> int:
    return rng.randrange(family.size, family.size + 40)


def _of_value(family: Family, value: int) -> str:
    return f"-{value}" if "-{v}" in family.call else str(value)


def _forward(rng: random.Random) -> Cell:
    family = rng.choice(FORWARD)
    value = _bad_value(rng, family)
    line = f"out = {family.call.format(v=value)}"
    return _finding("forward", family, value, f"before = {value}\n{line}", line)


def _backward(rng: random.Random) -> Cell:
    family = rng.choice(BACKWARD)
    value = _bad_value(rng, family)
    text = (
        "leaf = torch.zeros(2, 3, device=d, requires_grad=True)\n"
        "ids = torch.tensor([0, 1], device=d)\n"
        f"loss = {family.call}\n"
        f"ids.data[1] = {value}\n"
        "loss.backward()"
    )
    return _finding("backward", family, value, text, "loss.backward()")


def _thread(rng: random.Random) -> Cell:
    family = rng.choice(FORWARD)
    value = _bad_value(rng, family)
    line = f"return {family.call.format(v=value)}"
    text = (
        f"def work(_):\n    {line}\n"
        "with ThreadPoolExecutor(2) as pool:\n    out = list(pool.map(work, range(2)))"
    )
    return _finding("thread", family, value, text, line)


def _finding(label: str, family: Family, value: int, text: str, line: str) -> Cell:
    is_value = "multinomial" in family.op or "binary" in family.op
    return Cell(
        text,
        error="DeviceValueError" if is_value else "DeviceIndexError",
        kind="device_assert",
        value=_of_value(family, value),
        op=family.op,
        line=line,
        label=label,
    )


def _swallowed(rng: random.Random) -> Cell:
    found = _forward(rng)
    body = "\n".join(f"    {line}" for line in found.text.splitlines())
    text = f"try:\n{body}\nexcept RuntimeError:\n    out = None"
    return Cell(text, None, found.kind, found.value, found.op, found.line, "swallowed")


def _host_error(rng: random.Random) -> Cell:
    rows = rng.randrange(5, 9)
    line = f"out = grid @ torch.ones({rows}, 2, device=d)"
    return Cell(line, "RuntimeError", "host_error", str(rows), "", line, "host error")


def _foreign(rng: random.Random) -> Cell:
    return Cell("{}['missing']", "KeyError", label="foreign")


def _nonfinite(rng: random.Random) -> Cell:
    line = "out = (torch.zeros(2, device=d) - 1).log()"
    return Cell(line, "NonFiniteError", "nonfinite", "nan", "torch.Tensor.log", line, "nonfinite")


def _good(rng: random.Random) -> Cell:
    family = rng.choice(FORWARD)
    value = rng.randrange(family.size)
    call = family.call.format(v=value)
    extra = "\nx = torch.ones(3, device=d, requires_grad=True)\n(x * 2).sum().backward()"
    return Cell(f"out = {call}{rng.choice(('', extra))}")


FAILING: tuple[Callable[[random.Random], Cell], ...] = (
    *([_forward] * 3 + [_backward] * 2 + [_thread] * 2),
    *(_swallowed, _host_error, _foreign),
)


# --- the run -------------------------------------------------------------------------------------


class Soak:
    """One shell, and the state that the commands between the cells have put it in."""

    def __init__(self, shell: Any, seed: int) -> None:
        self.rng = random.Random(seed)
        self.result = Result()
        self.labels: Counter[str] = Counter()
        self.is_loaded = True
        self.is_on = False
        self.is_nan = False
        self.shell = shell

    def run(self, text: str) -> tuple[str | None, list[Any]]:
        """Run a cell quietly; return the error's name and what was displayed."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            error, shown = shells.run(self.shell, text)
        self.shell.display_pub.outputs.clear()
        return None if error is None else type(error).__name__, shown

    def command(self, text: str) -> None:
        """Run a cell that must not fail and shows nothing."""
        error, shown = self.run(text)
        if error is not None or shown:
            self.complain(text, f"ended with {error} and {len(shown)} displays")

    def complain(self, text: str, what: str) -> None:
        if len(self.result.problems) < 50:
            self.result.problems.append(f"cell {self.shell.execution_count - 1}: {what}: {text!r}")

    def between(self) -> None:
        """Turn something on or off, as a user does."""
        choice = self.rng.random()
        if choice < 0.05:
            self.command("%cudacheck off" if self.is_loaded else "%load_ext cudalens")
            self.command("%unload_ext cudalens")
            self.is_loaded = self.is_on = self.is_nan = False
        elif choice < 0.30 and not self.is_loaded:
            self.command("%load_ext cudalens")
            self.is_loaded = True
        elif choice < 0.20 and self.is_loaded:
            self.is_nan = self.rng.random() < 0.4
            self.command("%cudacheck on --no-widgets" + (" --nan=strict" if self.is_nan else ""))
            self.is_on = True
        elif choice < 0.28 and self.is_loaded:
            self.command("%cudacheck off")
            self.is_on = self.is_nan = False

    def step(self) -> None:
        """Run one cell in one of the ways that the present state allows."""
        self.between()
        if not self.is_loaded:
            self.judge(_good(self.rng), "")
            return
        header = "" if self.is_on and self.rng.random() < 0.7 else "%%cudacheck --no-widgets"
        is_nan = self.is_nan if not header else self.rng.random() < 0.2
        if header and is_nan:
            header += " --nan=strict"
        elif header and self.rng.random() < 0.3:
            header += " --fast"
        # Without the extension nothing may fail, so more than a third do with it.
        if self.rng.random() >= 0.42:
            cell = _good(self.rng)
        elif is_nan and self.rng.random() < 0.3:
            cell = _nonfinite(self.rng)
        else:
            cell = self.rng.choice(FAILING)(self.rng)
        self.judge(cell, header)

    def judge(self, cell: Cell, header: str) -> None:
        """Run a cell and compare what came with what had to come."""
        text = f"{header}\n{cell.text}" if header else cell.text
        self.labels[cell.label] += 1
        self.result.failing += cell.label != "good"
        error, shown = self.run(text)
        if error != cell.error:
            self.complain(text, f"ended with {error}, not with {cell.error}")
        elif len(shown) != (cell.kind is not None):
            self.complain(text, f"{len(shown)} reports shown")
        elif cell.kind is not None:
            self.compare(cell, text)
        if PROCESS.is_installed or PROCESS.listeners:
            self.complain(text, "guards stayed installed")

    def compare(self, cell: Cell, text: str) -> None:
        report = cudalens.last_report()
        if report is None or report.source is None:
            self.complain(text, "no report, or one without a place")
            return
        lines = [line.strip() for line in text.splitlines()]
        expected = {
            "kind": (report.kind, cell.kind),
            "line": (report.source.line, lines.index(cell.line) + 1),
            "text": (report.source.text, cell.line),
            "cell": (report.source.cell, self.shell.execution_count - 1),
        }
        for what, (got, wanted) in expected.items():
            if got != wanted:
                self.complain(text, f"{what} is {got!r}, not {wanted!r}")
        if cell.value is not None and cell.value not in report.headline:
            self.complain(text, f"{cell.value} is not in {report.headline!r}")
        if not (report.op.name or "").startswith(cell.op):
            self.complain(text, f"op is {report.op.name}, not {cell.op}")

    def measure(self) -> dict[str, int]:
        """Count what must not grow."""
        torch.cuda.synchronize()
        self.shell.user_ns.pop("out", None)
        # The last error is the shell's to keep, and no leak of ours.
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        gc.collect()
        return {
            "threads": threading.active_count(),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "module hooks": len(hooks._global_forward_pre_hooks),
            "registrations": len(torch.library._impls),
            "dispatch modes": torch._C._len_torch_dispatch_stack(),
            "event callbacks": sum(len(v) for v in self.shell.events.callbacks.values()),
            "input transformers": len(self.shell.input_transformers_post),
            "tensors": sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()),
        }


@contextlib.contextmanager
def _simulation() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    with cudalens.simulate(announce=False):
        yield


def soak(cells: int, seed: int, limit_s: float) -> Result:
    """Run ``cells`` cells, or as many as fit into ``limit_s`` seconds."""
    started = time.monotonic()
    with _simulation(), shells.new_shell() as shell:
        run = Soak(shell, seed)
        result = run.result
        run.command("%load_ext cudalens")
        run.command(SETUP)
        for make in dict.fromkeys((*FAILING, _nonfinite)):  # the first time costs for good
            run.judge(make(run.rng), "%%cudacheck --no-widgets --nan=strict")
        result.start = run.measure()
        half = 0
        for number in range(cells):
            if time.monotonic() - started > limit_s:
                result.problems.append(f"stopped after {number} cells: out of time")
                break
            if number == cells // 2:
                gc.collect()
                half = resident()
            run.step()
            result.cells += 1
        if not run.is_loaded:
            run.command("%load_ext cudalens")
        run.command("%cudacheck off")
        result.growth_bytes = resident() - half if half else 0
        result.end = run.measure()
        run.command(ALIVE)
        if run.shell.user_ns.get("alive") is not True:
            result.problems.append("CUDA is not alive at the end")
        run.command("%unload_ext cudalens")
    _conclude(run, time.monotonic() - started)
    return result


def _conclude(run: Soak, seconds: float) -> None:
    result = run.result
    result.seconds = round(seconds, 1)
    result.by_label = dict(sorted(run.labels.items()))
    for name, before in result.start.items():
        after = result.end[name]
        # The variables of the last cells hold a few tensors more or less.
        if after > before + (20 if name == "tensors" else 0):
            result.problems.append(f"{name} grew from {before} to {after}")
    if result.growth_bytes > MAX_GROWTH_BYTES:
        result.problems.append(f"memory grew by {result.growth_bytes >> 20} MiB in the second half")


def main() -> int:
    """Run and print; exit status 1 when anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1500.0, metavar="SECONDS")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    result = soak(given.cells, given.seed, given.limit)
    print(f"{result.cells} cells, {result.failing} failing, {result.seconds} s")
    print(f"  {', '.join(f'{name} {count}' for name, count in result.by_label.items())}")
    print(f"  {'':<20}{'start':>8}{'end':>8}")
    for name, before in result.start.items():
        print(f"  {name:<20}{before:>8}{result.end[name]:>8}")
    print(f"  memory grew by {result.growth_bytes / 2**20:.1f} MiB in the second half")
    for problem in result.problems:
        print(f"PROBLEM {problem}")
    if given.json is not None:
        given.json.write_text(json.dumps(asdict(result), indent=2), encoding="utf-8")
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
