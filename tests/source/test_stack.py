"""The stack as facts: order, what is left out, and how many frames are kept."""

from __future__ import annotations

import dis
import gc
import sys
import weakref
from pathlib import Path
from types import FrameType, FunctionType, SimpleNamespace, TracebackType
from typing import Any

import pytest
import torch

from cudalens.core._python import entries_from_traceback
from cudalens.source import stack
from cudalens.source.stack import MAX_FRAMES, OUTERMOST, StackEntry
from tests.probes import cell


def frames() -> tuple[FrameType, ...]:
    return stack.stack_of(sys._getframe(1))


def failing() -> None:
    raise RuntimeError("stop")


def recurse(depth: int) -> tuple[FrameType, ...]:
    return frames() if depth == 0 else recurse(depth - 1)


def test_frames_are_outermost_first_and_start_at_the_users() -> None:
    described = stack.frames_of(recurse(1))
    assert described[0].is_user
    assert [frame.function for frame in described[-3:]] == [
        "test_frames_are_outermost_first_and_start_at_the_users",
        "recurse",
        "recurse",
    ]
    assert described[-1].text == "return frames() if depth == 0 else recurse(depth - 1)"


def test_a_traceback_is_read_like_a_stack() -> None:
    with pytest.raises(RuntimeError) as caught:
        failing()
    described = stack.frames_of(entries_from_traceback(caught.tb))
    assert [frame.function for frame in described[1:]] == ["failing"]
    assert described[-1].text == 'raise RuntimeError("stop")'
    assert stack.frames_of(entries_from_traceback(None)) == ()


def test_a_recorded_entry_needs_no_frame() -> None:
    frame = sys._getframe()
    entry = StackEntry(frame.f_code, frame.f_lineno, frame.f_lasti)
    described = stack.frames_of([entry])
    assert described[0].function == "test_a_recorded_entry_needs_no_frame"
    assert stack.place_of(entry).variables == {}


def test_a_stack_at_the_limit_is_whole_and_one_beyond_loses_its_middle() -> None:
    entries = list(recurse(MAX_FRAMES + 20))[-MAX_FRAMES - 1 :]
    assert len(stack.frames_of(entries[1:])) == MAX_FRAMES
    cut = stack.frames_of(entries)
    whole = [stack.place_of(entry).lineno for entry in entries]
    assert len(cut) == MAX_FRAMES
    assert [frame.line for frame in cut] == whole[:OUTERMOST] + whole[OUTERMOST + 1 :]


def test_a_cells_frame_has_the_number_and_no_front_end_above_it() -> None:
    names = {"frames": frames}
    with cell("import json\nfound = frames()\n", number=3) as code:
        exec(code, names)
        described = stack.frames_of(names["found"])  # type: ignore[arg-type]
    assert described[-1].cell == 3
    assert described[-1].text == "found = frames()"


def entries_of(error: BaseException) -> list[TracebackType]:
    return entries_from_traceback(error.__traceback__)


def test_the_newest_frame_of_some_code_below_or_above_a_traceback() -> None:
    def again(depth: int) -> None:
        if depth == 0:
            failing()
        again(depth - 1)

    with pytest.raises(RuntimeError) as caught:
        again(2)
    entries = entries_of(caught.value)
    newest = stack.running_frame(again.__code__, entries)
    assert newest is not None
    assert newest.f_locals["depth"] == 0
    # Above it: the frame of this test still runs.
    assert stack.running_frame(sys._getframe().f_code, entries[1:]) is sys._getframe()
    assert stack.running_frame(frames.__code__, entries) is None
    assert stack.running_frame(again.__code__, []) is None


def test_a_statement_of_a_cell_is_any_of_its_statements() -> None:
    with cell("fail()") as code, pytest.raises(RuntimeError) as caught:
        exec(code, {"fail": failing})
    other = compile("1", code.co_filename, "exec")
    found = stack.running_frame(other, entries_of(caught.value))
    assert found is not None
    assert found.f_code is code
    assert stack.running_frame(compile("1", "<other>", "exec"), entries_of(caught.value)) is None


def test_variables_are_those_of_the_users_frames_then_of_their_modules() -> None:
    text = "def g(deep):\n    found.append(frames())\ndef f():\n    inner = 1\n    g(2)\nf()"
    with cell(text) as code:
        exec(code, names := {"frames": frames, "found": []})
        spaces = list(stack.namespaces(names["found"][0]))  # type: ignore[index]
    order = [key for item in spaces for key in ("deep", "inner", "found") if key in item]
    assert order == ["deep", "inner", "found"]
    # The variables of the cell are those of its frame and of its module.
    assert sum("found" in item and "f" in item for item in spaces) == 1


def test_the_entries_of_frames_and_tracebacks_are_places() -> None:
    with pytest.raises(RuntimeError) as caught:
        failing()
    inner = stack.place_of(entries_of(caught.value)[-1])
    assert (inner.code, inner.lineno) == (failing.__code__, failing.__code__.co_firstlineno + 1)
    here = stack.place_of(sys._getframe())
    assert (here.code, here.variables["inner"]) == (sys._getframe().f_code, inner)


def test_the_running_instruction_has_a_range_where_the_code_has_columns() -> None:
    """Columns count from 0; code without a table of columns has lines alone."""
    code = compile("x = 1\ny = f(\n    2,\n)", "<columns>", "exec")
    calls = [
        at for at in range(0, len(code.co_code), 2)
        if dis.opname[code.co_code[at]] == "CALL"
    ]  # fmt: skip
    place = stack.place_of(StackEntry(code, 2, calls[0]))
    assert place.position == (2, 4, 4, 1)
    assert not place.is_generated
    function = compile("def f():\n    return 1", "<columns>", "exec").co_consts[0]
    bare = function.replace(co_linetable=b"")
    assert stack.place_of(StackEntry(bare, 1, 0)).position is None
    assert stack.place_of(StackEntry(function, 1, -1)).position is None  # it has not begun


def test_few_codes_are_kept_for_the_places_in_them() -> None:
    codes = [compile("x", f"<code {at}>", "eval") for at in range(40)]
    for code in codes:
        assert stack.line_of(code, 0) is not None
    alive = [weakref.ref(code) for code in codes]
    del codes, code
    gc.collect()
    assert 0 < sum(it() is not None for it in alive) <= 8


def test_a_link_of_a_traceback_is_the_place_where_it_was_raised() -> None:
    try:
        raise ValueError
    except ValueError as error:
        (link,) = [error.__traceback__]
    assert link is not None
    place = stack.place_of(link)
    assert (place.lineno, place.lasti) == (link.tb_lineno, link.tb_lasti)
    assert stack.place_of(sys._getframe()).lineno > place.lineno


def without_columns(function: str, line: int = 1) -> Any:
    """Return code of a function as torch's compiler writes it: all of it is of one line."""
    code = compile("def f():\n    return 1", "<cell of a compiler>", "exec").co_consts[0]
    first = bytes([0b1_1101_111, (line - 1) << 1])  # eight instructions without columns
    return code.replace(co_linetable=first + bytes([0b1_1101_111, 0]) * 9, co_name=function)


@pytest.mark.parametrize(
    ("function", "line", "is_generated"),
    [("f", 1, True), ("f", 2, False), ("<module>", 1, False), ("<cell line: 1>", 1, False)],
)
def test_code_that_the_compiler_wrote_has_the_line_of_its_function_alone(
    function: str, line: int, *, is_generated: bool
) -> None:
    place = stack.place_of(StackEntry(without_columns(function, line), line, 0))
    assert stack.line_of(place.code, 0) == line
    assert place.position is None
    assert place.is_generated is is_generated


TRACE = """\
  File "<cell of a compiler>", line 12, in f
    return g(x)
  File "<cell of a compiler>", line 14, in f
    return h(x)
  File "<cell of a compiler>", line 3, in g
    return x + 1
"""


@pytest.mark.parametrize(
    ("name", "held", "lines"),
    [
        ("<eval_with_key>.1", {"_lineno_map": {1: 0}}, [14, 2]),
        ("<eval_with_key>.1", {"_lineno_map": {1: 1}}, [2]),  # a node without a trace
        ("<eval_with_key>.1", {"_lineno_map": {2: 0}}, [2]),
        ("<eval_with_key>.1", {"_lineno_map": None}, [2]),
        ("<eval_with_key>.1", {"_lineno_map": {1: 0}, "_graph": None}, [2]),
        ("graph.py", {"_lineno_map": {1: 0}}, [2]),
    ],
)
def test_compiled_code_has_the_users_line_by_the_trace_of_its_graph(
    name: str, held: dict[str, Any], lines: list[int]
) -> None:
    """Without it there is no place of it."""
    nodes = [SimpleNamespace(stack_trace=TRACE), SimpleNamespace(stack_trace=None)]
    module = SimpleNamespace(**{"_graph": SimpleNamespace(nodes=nodes), **held})
    code = compile("def forward(self):\n    return here()", name, "exec").co_consts[0]
    inner = FunctionType(code, {"here": lambda: sys._getframe(1)})(module)
    entries = [StackEntry(without_columns("f"), 1, 0), inner]
    assert [place.lineno for place in stack.places_of(entries)] == lines
    assert [place.lineno for place in stack.places_of(entries[:1])] == []


@pytest.mark.parametrize(
    ("file", "is_worker"), [("dataloader.py", True), ("_utils/worker.py", False)]
)
def test_a_worker_is_told_by_the_loader_on_its_stack(file: str, *, is_worker: bool) -> None:
    path = str(Path(torch.__file__).parent / "utils" / "data" / file)
    assert eval(compile("f()", path, "eval"), {"f": stack.is_loader_worker}) is is_worker
    assert not stack.is_loader_worker()


def test_dispatch_above_a_call_is_no_part_of_a_live_stack_but_of_a_traceback() -> None:
    """In a traceback the innermost frame is where it was raised."""

    def stopped(text: str, file: str, **names: Any) -> Any:
        return eval(compile(text, str(Path(torch.__file__).parent / file), "eval"), names)

    inner = stopped("f(1)", "_ops.py", f=sys._getframe)  # the frame of this function
    frame = stopped("f(0)", "_ops.py", f=lambda _: sys._getframe(1))
    above = stopped("f(0)", "nn/functional.py", f=lambda _: sys._getframe(1))
    assert [place.code for place in stack.places_of([inner, frame])] == [inner.f_code]
    assert len(stack.places_of([frame, above])) == 2
    links = [TracebackType(None, item, item.f_lasti, 1) for item in (inner, frame)]
    assert len(stack.places_of(links)) == 2
