"""Compiled functions inside a checked block: eager, also when the block loads the compiler."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest
import torch

from cudalens.recorder.eager import RAN_EAGERLY, EagerCompiler
from tests.hostcells import run_cell
from tests.processes import python

BACKEND = """
import sys, torch
from cudalens.recorder.eager import EagerCompiler
compiled = []
def backend(graph, inputs):
    compiled.append(graph)
    return graph
"""


# Loading the compiler takes seconds: where that is not what is asked, a test is a thorough one.
ALONE = {
    # The first torch.compile of the process, inside: eager there, compiled afterwards.
    "a block that loads the compiler runs eagerly": (
        """
        assert "torch._dynamo" not in sys.modules
        before = list(sys.meta_path)
        with EagerCompiler():
            @torch.compile(backend=backend)
            def f(x):
                return x + 1
            f(torch.ones(2))
            print(len(compiled))
        loaded = sys.modules["torch._dynamo"]
        print(type(loaded.__spec__.loader).__name__, type(loaded.__loader__).__name__)
        print(sys.meta_path == before)
        f(torch.ones(2))
        print(len(compiled))
        """,
        ["0", "SourceFileLoader", "SourceFileLoader", "True", "1"],
    ),
    "blocks inside each other give the stance back in order": (
        """
        with EagerCompiler():
            with EagerCompiler():
                f = torch.compile(lambda x: x + 1, backend=backend)
                f(torch.ones(2))
            f(torch.ones(2))
            print(len(compiled))
        f(torch.ones(2))
        print(len(compiled))
        """,
        ["0", "1"],
    ),
    "a block without the compiler does not load it, also after an error": (
        """
        before = list(sys.meta_path)
        try:
            with EagerCompiler():
                1 / 0
        except ZeroDivisionError:
            pass
        print("torch._dynamo" in sys.modules, sys.meta_path == before)
        """,
        ["False", "True"],
    ),
    # It takes no function under two names; a module of layers is compiled as anywhere.
    "the rehearsal device lets the compiler load": (
        """
        import cudalens
        with cudalens.simulate(announce=False):
            layer = torch.compile(torch.nn.Linear(3, 2).cuda(), backend=backend)
            print(tuple(layer(torch.ones(4, 3, device="cuda")).shape), len(compiled))
        """,
        ["(4,", "2)", "1"],
    ),
}


@pytest.mark.parametrize(
    "what",
    [
        item if "does not load it" in item else pytest.param(item, marks=pytest.mark.thorough)
        for item in ALONE
    ],
)
def test_in_a_process_that_has_not_loaded_the_compiler(what: str) -> None:
    code, said = ALONE[what]
    done = python("-c", BACKEND + textwrap.dedent(code))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == said


@pytest.fixture
def compiled() -> list[object]:
    """What the test's backend was asked to compile."""
    graphs: list[object] = []
    torch.compiler.reset()
    yield graphs
    torch.compiler.reset()


def stance() -> str:
    return str(torch._dynamo.eval_frame._stance.stance)


@pytest.fixture
def default_stance() -> Iterator[None]:
    import torch._dynamo

    yield
    torch.compiler.set_stance("default")


@pytest.mark.usefixtures("default_stance")
@pytest.mark.parametrize("wanted", ["force_eager", "eager_on_recompile", "default"])
def test_a_stance_that_the_block_sets_stays(wanted: str) -> None:
    with EagerCompiler():
        torch.compiler.set_stance(wanted)
    assert stance() == wanted


@pytest.mark.usefixtures("default_stance")
def test_a_stance_that_is_left_after_the_block_returns_to_that_before() -> None:
    with EagerCompiler():
        own = torch.compiler.set_stance("eager_on_recompile")
    assert stance() == "eager_on_recompile"
    own.__exit__(None, None, None)
    assert stance() == "default"


@pytest.mark.usefixtures("default_stance")
def test_a_stance_that_was_entered_before_can_be_left_in_the_block() -> None:
    own = torch.compiler.set_stance("eager_on_recompile")
    with EagerCompiler():
        own.__exit__(None, None, None)
    assert stance() == "default"


CELL = """
import torch

def backend(graph, inputs):
    compiled.append(graph)
    return graph

@torch.compile(backend=backend)
def product(a, b):
    return a @ b

product(torch.ones(2, 2), torch.ones(2, 2))
{last}
"""


@pytest.mark.parametrize(("options", "count"), [({}, 0), ({"force_eager": False}, 1)])
def test_the_option_decides(compiled: list[object], options: dict[str, bool], count: int) -> None:
    outcome = run_cell(CELL.format(last=""), {"compiled": compiled}, fast=False, **options)
    assert outcome.error is None
    assert len(compiled) == count


def test_a_report_says_that_a_compiled_function_ran_eagerly(compiled: list[object]) -> None:
    """The failing line is the user's own, inside the function; the limit names the option."""
    code = CELL.format(last="product(torch.ones(2, 3), torch.ones(2, 3))")
    report = run_cell(code, {"compiled": compiled}, fast=False).shown
    assert report.source is not None and report.source.text == "return a @ b"
    assert RAN_EAGERLY in report.limits
    plain = run_cell("import torch\ntorch.ones(2, 3) @ torch.ones(2, 3)", fast=False).shown
    assert RAN_EAGERLY not in plain.limits


LOOK_UP = """
import torch

def backend(graph, inputs):
    {runs}

@torch.compile(backend=backend)
def look_up(table, at):
    doubled = table * 2
    return doubled[at]

look_up(torch.ones(5, 2), torch.tensor([0, 9]))
"""
CALLED = "look_up(torch.ones(5, 2), torch.tensor([0, 9]))"
WITHIN = "return doubled[at]"
UNKNOWN = "[node.meta.clear() for node in graph.graph.nodes]"


@pytest.mark.parametrize(
    ("runs", "options", "text"),
    [
        ("return graph", {"force_eager": False}, WITHIN),
        ("return graph.forward", {"force_eager": False}, WITHIN),
        # Nobody knows what the running line was made of: the line that called it is certain.
        (f"{UNKNOWN}; return graph", {"force_eager": False}, CALLED),
        ("return graph", {}, WITHIN),  # the neighbour: it runs as it was written
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_compiled_code_is_not_at_its_decorator(
    on_cpu: None, compiled: list[object], runs: str, options: dict[str, bool], text: str
) -> None:
    """The line that the compiler read, or the line of the call."""
    torch.compile(torch.sin, backend="eager")  # the first in a process calls torch by itself
    report = run_cell(LOOK_UP.format(runs=runs), fast=False, **options).shown
    assert report.source is not None and report.source.text == text
    lines = [str(entry.source.text) for entry in report.history if entry.source]
    assert bool(lines) is not bool(options)  # what stays compiled is not recorded
    assert "@torch.compile" not in "\n".join([*lines, *(frame.text for frame in report.frames)])


def test_what_is_kept_from_the_compiler_was_not_compiled(on_cpu: None) -> None:
    """A checkpoint passes the compiler's files too; around a compiled function the line stays."""
    code = """
    import torch
    from torch.utils.checkpoint import checkpoint
    table = torch.ones(5, 2)
    def look_up(at):
        return torch.nn.functional.embedding(at, table)
    {compiled}
    checkpoint(look_up, torch.tensor([5]), use_reentrant=False)
    """
    plain = run_cell(code.format(compiled=""), fast=False).shown
    assert plain.prevented
    assert RAN_EAGERLY not in plain.limits
    compiled = 'look_up = torch.compile(look_up, backend="eager")'
    assert RAN_EAGERLY in run_cell(code.format(compiled=compiled), fast=False).shown.limits


def test_the_users_own_stance_is_given_back() -> None:
    import torch._dynamo.eval_frame as frames

    with torch.compiler.set_stance("eager_on_recompile"):
        with EagerCompiler():
            assert frames._stance.stance == "force_eager"
        assert frames._stance.stance == "eager_on_recompile"


def test_blocks_of_two_threads_may_overlap() -> None:
    """Whichever ends last gives the stance back as it was before the first."""
    import torch._dynamo.eval_frame as frames

    first, second = EagerCompiler(), EagerCompiler()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert frames._stance.stance == "force_eager"
    second.__exit__(None, None, None)
    assert frames._stance.stance == "default"
