"""From a stack to the user's line: cells, scripts, tracebacks, and what goes wrong on the way."""

from __future__ import annotations

import gc
import linecache
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cudalens.core._python import entries_from_traceback
from cudalens.core.report_types import CodeLine
from cudalens.source.files import CELLS
from cudalens.source.locate import locate, locate_entries, locate_line, runs_torch, span_of_lines
from cudalens.source.stack import StackEntry, stack_of
from tests.probes import (
    Probe,
    Untouchable,
    asked,
    cell,
    cell_frames,
    named,
    run_cell,
    same,
    site_of,
)
from tests.shells import new_shell

X = torch.rand(4, 5)
Y = torch.tensor([0, 1, 2, 3])


NAMES = {"F": nn.functional, "x": X, "y": Y}


@pytest.fixture
def probe() -> Probe:
    return Probe("nll_loss_forward")


@pytest.fixture
def shell(probe: Probe) -> Iterator[Any]:
    with new_shell() as shell:
        shell.push({"probe": probe, **NAMES})
        yield shell


def test_a_cells_line_is_described_as_the_user_sees_it() -> None:
    text = "a = 1\nb = 2\nloss = F.cross_entropy(x,\n    y)\nc = 3\n"
    span = site_of(text, "nll_loss_forward", x=X, y=Y).source
    assert (span.cell, span.file) == (7, None)
    assert (span.line, span.end_line, span.column, span.end_column) == (3, 4, 7, 6)
    assert span.text == "loss = F.cross_entropy(x,"
    assert span.context[0] == CodeLine(line=1, text="a = 1")
    assert [line.line for line in span.context] == [1, 2, 3, 4, 5]


def test_the_context_is_four_lines_on_each_side() -> None:
    text = "\n".join(["# before"] * 6 + ["F.nll_loss(x, y)"] + ["# after"] * 6)
    span = site_of(text, "nll_loss_forward", x=X, y=Y).source
    assert [line.line for line in span.context] == list(range(3, 12))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("loss = (\n  F.nll_loss(x, y))\n", (2, "F.nll_loss(x, y))")),
        ("loss = (" + "\n" * 60 + "  F.nll_loss(x, y))\n", (61, "F.nll_loss(x, y))")),
        # The neighbour: what runs stands on the first line of the statement.
        ("loss = F.nll_loss(\n    x, y)\n", (1, "loss = F.nll_loss(")),
    ],
)
def test_a_line_inside_a_statement_is_named_with_its_own_text(
    text: str, line: tuple[int, str]
) -> None:
    """Number and text belong together, also far below where the statement begins."""
    span = site_of(text, "nll_loss_forward", x=X, y=Y).source
    assert span.text == text.partition("\n")[0]
    assert (span.ref.line, span.ref.text) == line
    assert len(span.context) <= 40


def test_a_script_has_its_file_and_no_cell(probe: Probe, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("def step(x, y):\n    return F.nll_loss(x, y)\nstep(x, y)\n")
    with probe:
        exec(compile(path.read_text(), str(path), "exec"), dict(NAMES))
    span = probe.site.source
    assert (span.cell, span.file, span.line) == (None, str(path), 2)
    assert [frame.function for frame in probe.site.frames if frame.file == str(path)] == [
        "<module>",
        "step",
    ]


def test_a_line_deep_in_a_library_is_reported_at_the_users_deepest_line() -> None:
    net = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 2))
    with Probe("addmm") as probe:
        run_cell("def go(z):\n    return net(z)\ngo(x)", {"net": net, "x": X})
    second = probe.sites[1]
    assert second.source.text == "return net(z)"
    assert second.module_path == "1"
    assert not second.frames[-1].is_user


def test_lines_of_ipythons_cells_have_their_number(shell: Any, probe: Probe) -> None:
    shell.run_cell("1 + 1", store_history=True)
    number = shell.execution_count
    text = "# a comment\nwith probe:\n    loss = F.nll_loss(x, y)"
    assert shell.run_cell(text, store_history=True).success
    span = probe.site.source
    assert (span.cell, span.file, span.line) == (number, None, 3)
    assert span.text == "loss = F.nll_loss(x, y)"
    assert named(probe.site) == {"self": "x", "target": "y"}
    assert probe.site.frames[0].is_user
    assert not any("IPython" in frame.file for frame in probe.site.frames)


def test_a_function_of_an_earlier_cell_keeps_that_cells_number(shell: Any, probe: Probe) -> None:
    number = shell.execution_count
    shell.run_cell("def go():\n    return F.nll_loss(x, y)", store_history=True)
    shell.run_cell("with probe: go()", store_history=True)
    assert (probe.site.source.cell, probe.site.source.line) == (number, 2)
    cells = [frame.cell for frame in probe.site.frames if frame.cell is not None]
    assert cells == [number + 1, number]
    assert probe.site.frames[-1].function == "nll_loss"


def test_ipykernels_file_names_are_cells_of_the_shells_map(shell: Any, probe: Probe) -> None:
    name = "/tmp/ipykernel_4711/2947110.py"
    text = "F.nll_loss(x, y)"
    shell.compile._filename_map[name] = 31
    linecache.cache[name] = (len(text), None, [text + "\n"], name)
    try:
        with probe:
            exec(compile(text, name, "exec"), dict(NAMES))
    finally:
        del linecache.cache[name]
    assert (probe.site.source.cell, probe.site.source.text) == (31, text)


def test_a_cell_compiled_with_moved_lines_shows_the_registered_text(probe: Probe) -> None:
    """The magic's own line is a comment of the text that the body's lines count from."""
    body = "F.nll_loss(x, y)"
    name = "<moved cell>"
    CELLS.register(name, 5, ["# %%cudacheck --fast", body])
    try:
        with probe:
            exec(compile("\n" + body, name, "exec"), dict(NAMES))
    finally:
        CELLS.forget(name)
    assert (probe.site.source.line, probe.site.source.text) == (2, body)


def test_a_traceback_gives_the_line_and_the_tensors_of_a_host_error() -> None:
    with cell("def go(a, b):\n    return a @ b\ngo(x, w)") as code:
        with pytest.raises(RuntimeError) as caught:
            exec(code, {"x": X, "w": torch.rand(3, 3)})
        site = locate(entries_from_traceback(caught.value.__traceback__), {}, same)
    assert (site.source.line, site.source.text) == (2, "return a @ b")
    assert site.api == "torch.Tensor.__matmul__"
    assert [other.expression for other in site.others] == ["a", "b"]


def test_recorded_entries_give_the_line_after_the_frames_are_gone() -> None:
    entries: list[StackEntry] = []

    def record() -> None:
        frames = stack_of(sys._getframe(1))
        entries.extend(StackEntry(item.f_code, item.f_lineno, item.f_lasti) for item in frames)

    with cell("def go():\n    y = [record(),\n         2]\ngo()") as code:
        exec(code, {"record": record})
        span = locate_entries(entries)
    assert (span.cell, span.line, span.column, span.end_column) == (7, 2, 9, 17)
    assert span.text == "y = [record(),"


def test_no_user_frame_gives_no_source() -> None:
    assert locate_entries([]) is None
    site = locate([], {"x": X}, same)
    assert (site.source, site.api, site.names, site.frames, site.limits) == (None, None, (), (), ())


def test_a_failing_stage_becomes_a_limit_and_the_rest_is_known() -> None:
    def broken(one: object, other: object) -> bool:
        raise ValueError("no comparison today")

    with cell("frames = stack_of(look(0)), x") as code:
        names: dict[str, Any] = {"stack_of": stack_of, "look": sys._getframe, "x": X}
        exec(code, names)
        site = locate(names["frames"][0], {"x": X}, broken)
    assert site.source is not None
    assert site.names == ()
    assert site.limits == ("names unavailable: ValueError: no comparison today",)


def test_objects_on_the_line_are_not_touched() -> None:
    def take(x: Any, y: Any, *_: Any) -> None:
        nn.functional.nll_loss(x, y)

    names = {"take": take, "x": X, "y": Y, "u": Untouchable(), "us": [Untouchable()]}
    with Probe("nll_loss_forward") as probe:
        run_cell("take(x, y, u, us, us[0])", names)
    assert probe.site.limits == ()
    assert probe.site.api == "torch.nn.functional.nll_loss"


def test_nothing_is_kept_alive_after_the_call() -> None:
    class Local:
        pass

    kept: list[Any] = []

    def user() -> None:
        local = Local()
        kept.append(weakref.ref(local))
        frames = stack_of(sys._getframe())
        kept.append(locate(frames, {}, same))

    user()
    gc.collect()
    assert kept[1].source is not None
    assert kept[0]() is None


def test_the_cost_does_not_depend_on_the_size_of_the_namespace() -> None:
    looked: list[object] = []

    def counted(one: object, other: object) -> bool:
        looked.append(one)
        return same(one, other)

    many = {f"v{number}": torch.zeros(1) for number in range(2000)}
    with cell("keep(x, y)") as code:
        frames: list[Any] = []
        exec(
            code,
            {"keep": lambda *_: frames.extend(stack_of(sys._getframe(1))), "x": X, "y": Y, **many},
        )
        site = locate(frames, {"input": X}, counted)
    assert named(site) == {"input": "x"}
    assert len(looked) < 50


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("here(1)", 1, "here(1)"),
        ("a = 1; here(a)", 1, "here(a)"),
        ("if 1: here(1)", 1, "if 1: here(1)"),
        ("a = [\n    here(1)]", 2, "here(1)]"),
    ],
)
def test_a_line_in_short_has_the_running_statement(text: str, line: int, said: str) -> None:
    (found,) = asked(text, lambda frames: locate_line(frames))
    assert (found.line, found.text, found.cell) == (line, said, 7)
    assert locate_line([]) is None


@pytest.mark.parametrize(
    ("text", "uses"), [("torch.mm(x, y)", True), ("x @ y", True), ("len(3)", False)]
)
def test_whether_a_line_that_failed_uses_torch(text: str, *, uses: bool) -> None:
    with cell(text) as code:
        with pytest.raises((RuntimeError, TypeError)) as caught:
            exec(code, {"torch": torch, "x": X, "y": Y})
        entries = entries_from_traceback(caught.value.__traceback__)
        assert runs_torch(entries[-1]) is uses


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        # The running line is kept, and four after it where there are so many.
        ("loss = (" + "\n" * 60 + "  F.nll_loss(x, y))" + "\n#" * 6, range(25, 65)),
        ("F.nll_loss(" + "\n" * 60 + "x, y)", range(1, 41)),
    ],
)
def test_forty_lines_of_a_long_statement_are_kept(text: str, lines: range) -> None:
    span = site_of(text, "nll_loss_forward", x=X, y=Y).source
    assert [line.line for line in span.context] == list(lines)


def test_columns_are_characters_of_the_line_that_they_are_in() -> None:
    span = site_of("ä = 'ö', F.nll_loss(x, y)", "nll_loss_forward", x=X, y=Y).source
    assert (span.column, span.end_column) == (9, 25)


@pytest.mark.parametrize(
    ("lines", "typed", "columns"),
    [
        (["f(1)"], [], (0, 4)),
        (["f(1)"], ["%time f(1)"], (6, 10)),
        (["f(1)  # é"], ["%time   f(1)  # é"], (8, 12)),
        (["f(1,", "  2)"], ["%time f(1,", "  2)"], (6, 4)),
        # Typed in other words, the first line or the last.
        (["f(1)"], ["!run f"], (None, None)),
        (["f(1)"], ["f 1"], (None, None)),
        (["f(1,", "  2)"], ["%time f(1,", "2)"], (None, None)),
    ],
)
def test_columns_are_those_of_what_was_typed(
    lines: list[str], typed: list[str], columns: tuple[int | None, int | None]
) -> None:
    name, found = "<cell as typed>", list[Any]()
    CELLS.register(name, 7, lines, typed)
    try:
        code = compile("\n".join(lines), name, "exec")
        exec(code, {"f": lambda *_: found.append(locate_entries(cell_frames()))})
    finally:
        CELLS.forget(name)
    (span,) = found
    assert (span.column, span.end_column) == columns
    assert [line.text for line in span.context] == (typed or lines)


def test_the_place_of_lines_that_are_given_by_their_numbers() -> None:
    with cell("a = 1  # one\nb = dict(\n    c=2)") as code:
        span = span_of_lines(code.co_filename, 2, 3)
        assert (span.cell, span.line, span.end_line, span.text) == (7, 2, 3, "b = dict(")
        one = span_of_lines(code.co_filename, 1)
        assert (one.end_line, one.text, one.ref.text) == (None, "a = 1  # one", "a = 1")
        assert span_of_lines(code.co_filename, 0).text == ""
        assert span_of_lines(code.co_filename, 4).text == ""
        CELLS.typed[code.co_filename] = ("%time a = 1",)
        assert span_of_lines(code.co_filename, 1).text == "%time a = 1"
