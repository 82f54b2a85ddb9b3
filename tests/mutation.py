"""Change one spot of the guards or the hints at a time and see whether a test notices.

``make mutate`` takes a sample and states the score; ``--all`` takes every mutant, which are hours.
The mutants are cosmic-ray's.  Each is written into a copy of the checkout, never into the checkout,
and only the tests of its family run, those of its own module first.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.processes import ROOT, environment

FAMILIES = {
    "guards": ("tests/guards/test_*.py",),
    "diagnosis/hints": ("tests/diagnosis/hints/test_*.py", "tests/recorder/test_nonfinite.py"),
    "diagnosis/host_errors": (
        "tests/diagnosis/host_errors/test_*.py",
        "tests/diagnosis/hints/test_*.py",
        "tests/evidence/test_freed_graph.py",
    ),
}
"""Folders of the package that are mutated, and the tests that concern each."""
FIRST = {
    "devices": "test_host_errors",
    "dtypes": "test_host_errors",
    "saved_tensors": "test_inplace",
}
"""Modules whose own tests are not named after them."""
NOT_COPIED = (".*", "build", "dist", "notebooks", "__pycache__", "*.egg-info")
SAME = ("_Eq_Is", "_NotEq_IsNot", "_Is_Eq", "_IsNot_NotEq")
"""Comparisons that give the same for the small numbers, names and ``None`` that occur here."""
LIMIT_S = 240.0
"""A mutant that runs longer hangs, which its tests notice: it counts as killed."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file."""

    path: str
    operator: str
    occurrence: int
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the tests said about a mutant."""

    mutant: Mutant
    is_killed: bool
    change: str
    """The line before and after."""


# --- the mutants ---------------------------------------------------------------------------------


def mutants(path: Path, root: Path = ROOT) -> list[Mutant]:
    """Return every mutant of a file, in the order of operators and places."""
    from cosmic_ray.ast import ast_nodes, get_ast

    tree = get_ast(path.read_text(encoding="utf-8"))
    nodes = list(ast_nodes(tree))
    found = []
    for name, operator in _operators().items():
        places = (start for node in nodes for start, _ in operator.mutation_positions(node))
        found += [
            Mutant(path=str(path.relative_to(root)), operator=name, occurrence=number, line=line)
            for number, (line, _) in enumerate(places)
        ]
    return found


def _operators() -> dict[str, object]:
    from cosmic_ray import plugins

    names = [name for name in sorted(plugins.operator_names()) if not name.endswith(SAME)]
    classes = {name: plugins.get_operator(name) for name in names}
    return {name: kind() for name, kind in classes.items() if not kind.arguments()}


def mutated(mutant: Mutant, source: str) -> str | None:
    """Return the changed source, ``None`` where it cannot run or runs as before."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    operator = plugins.get_operator(mutant.operator)()
    code: str | None = mutate_code(source, operator, mutant.occurrence)
    try:
        return None if code is None or _behaviour(code) == _behaviour(source) else code
    except SyntaxError:
        return None


class _Unannotated(ast.NodeTransformer):
    """Drops annotations, which nothing evaluates; dataclass fields keep that they have one."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(value=None)
        return self.generic_visit(node)


def _behaviour(source: str) -> str:
    return ast.dump(_Unannotated().visit(ast.parse(source)))


def sample(every: Iterable[Mutant], seed: int, count: int | None) -> Iterator[Mutant]:
    """Return mutants that can be noticed in an order that only the seed decides."""
    shuffled = sorted(every, key=lambda item: (item.path, item.operator, item.occurrence))
    random.Random(seed).shuffle(shuffled)
    given = 0
    for mutant in shuffled:
        if count is not None and given == count:
            return
        if mutated(mutant, (ROOT / mutant.path).read_text(encoding="utf-8")) is not None:
            given += 1
            yield mutant


# --- the runs ------------------------------------------------------------------------------------


def tests_of(path: str) -> list[str]:
    """Return the test files for a module of the package, its own first, whole families after."""
    module = Path(path)
    files = [
        str(file.relative_to(ROOT))
        for pattern in FAMILIES[module.parent.relative_to("cudalens").as_posix()]
        for file in sorted(ROOT.glob(pattern))
    ]
    own = FIRST.get(module.stem, module.stem.strip("_"))
    return sorted(files, key=lambda file: (own not in file, file))


def passes(root: Path, tests: list[str], limit_s: float = LIMIT_S) -> bool:
    """Return whether the tests pass in a copy of the checkout within the limit."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly"]
    run = subprocess.Popen(
        [*command, "-p", "no:cacheprovider", *tests],
        cwd=root,
        env=environment(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return run.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def judge(root: Path, mutant: Mutant) -> Outcome:
    """Write a mutant into a copy, run its tests there, and take it back."""
    file = root / mutant.path
    source = file.read_text(encoding="utf-8")
    changed = mutated(mutant, source) or source
    file.write_text(changed, encoding="utf-8")
    try:
        is_killed = not passes(root, tests_of(mutant.path))
    finally:
        file.write_text(source, encoding="utf-8")
    return Outcome(mutant=mutant, is_killed=is_killed, change=_change(source, changed))


def _change(before: str, after: str) -> str:
    old, new = before.splitlines(), after.splitlines()
    for left, right in zip(old, new, strict=False):
        if left != right:
            return f"{left.strip()}  →  {right.strip()}"
    return "lines were dropped at the end"


def judge_all(chosen: Iterable[Mutant], jobs: int, minutes: float) -> Iterator[Outcome]:
    """Judge mutants in several copies at a time, until all are judged or the time is over."""
    deadline = time.monotonic() + 60 * minutes
    copies: SimpleQueue[Path] = SimpleQueue()

    def one(mutant: Mutant) -> Outcome | None:
        if time.monotonic() > deadline:
            return None
        root = copies.get()
        try:
            return judge(root, mutant)
        finally:
            copies.put(root)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            root = Path(folder, str(number))
            shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*NOT_COPIED))
            copies.put(root)
        for family in FAMILIES:
            if not passes(Path(folder, "0"), tests_of(f"cudalens/{family}/__init__.py")):
                msg = f"the tests of {family} do not pass as they are"
                raise RuntimeError(msg)
        yield from filter(None, pool.map(one, chosen))


def report(outcomes: list[Outcome]) -> str:
    """Return the score by file and in all, and every mutant that no test noticed."""
    killed = Counter(item.mutant.path for item in outcomes if item.is_killed)
    total = Counter(item.mutant.path for item in outcomes)
    lines = [f"{path:<44}{killed[path]:>5} of {total[path]:>4}" for path in sorted(total)]
    lines += [
        f"SURVIVED {item.mutant}\n         {item.change}" for item in outcomes if not item.is_killed
    ]
    share = 100 * killed.total() / max(1, total.total())
    return "\n".join([*lines, f"{killed.total()} of {total.total()} mutants killed: {share:.1f} %"])


def main(arguments: list[str] | None = None) -> int:
    """Judge mutants and print the score; exit status 1 when there was none to judge."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every mutant, without a time limit")
    parser.add_argument("--sample", type=int, default=200, metavar="N")
    parser.add_argument("--minutes", type=float, default=25.0, help="hand out none after these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", metavar="TEXT", help="files whose path has this")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    files = [file for name in FAMILIES for file in sorted((ROOT / "cudalens" / name).glob("*.py"))]
    every = [item for file in files if given.only in str(file) for item in mutants(file)]
    chosen = sample(every, given.seed, None if given.all else given.sample)
    print(f"{len(every)} mutants in {len(files)} files", file=sys.stderr)
    outcomes = []
    for item in judge_all(chosen, given.jobs, float("inf") if given.all else given.minutes):
        outcomes.append(item)
        print(f"{'killed  ' if item.is_killed else 'SURVIVED'} {item.mutant}", file=sys.stderr)
    print(report(outcomes))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(item) for item in outcomes], indent=2))
    return 0 if outcomes else 1


if __name__ == "__main__":
    sys.exit(main())
