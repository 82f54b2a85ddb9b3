"""The names that a line reads or detaches, and the code that detaches what they hold."""

from __future__ import annotations

import ast
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cudalens.core._python import entries_from_traceback
from cudalens.core.call import NodeMark
from cudalens.core.report_types import SourceSpan
from cudalens.evidence import freed_graph
from cudalens.recorder import Recorder
from tests.probes import cell

X, Y = torch.ones(1), torch.ones(2)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("h = h.detach()", ["h"]), ("  h.detach_()  ", ["h"]), ("a.h = a.h.detach()", ["a.h"]),
        ("h, c = h.detach(), c.detach()", ["h", "c"]), ("f(h.detach())", []), ("for x in", []),
        ("", []),
    ],
)  # fmt: skip
def test_names_that_a_line_detaches(line: str, names: list[str]) -> None:
    assert sorted(freed_graph._given(line)) == sorted(names)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (X, "h.detach()"), ((X, Y), "tuple(item.detach() for item in h)"),
        ([X], "[item.detach() for item in h]"), ((X, 3), None), (deque([X]), None), (3, None),
    ],
)  # fmt: skip
def test_the_code_that_detaches_a_value(value: Any, code: str | None) -> None:
    assert freed_graph._detached("h", value) == code


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (X, [X]), ([X, 3, (Y, X)], [X, Y, X]), ((X,), [X]), (deque([Y]), [Y]), ([[X]], []),
        ({"a": X}, []), (3, []), ([X] * 65, [X] * 64),
    ],
)  # fmt: skip
def test_tensors_in_a_variable(value: Any, found: list[Any]) -> None:
    assert [id(it) for it in freed_graph._tensors_in(value)] == [id(it) for it in found]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("z = x + y.w", ["x", "y", "y.w"]), ("h += x", ["h", "x"]), ("a[i] = b", ["a", "b", "i"]),
        ("z = [q for q in items]", ["items", "q"]),
    ],
)  # fmt: skip
def test_names_whose_values_a_line_uses(line: str, names: list[str]) -> None:
    (statement,) = ast.parse(line).body
    assert sorted(map(ast.unparse, freed_graph._names_read(statement))) == names
    assert list(freed_graph._names_read(None)) == []


@pytest.mark.parametrize(
    ("argument", "is_root"),
    [
        ("self", True), ("tensors", True), ("tensors[0]", True), ("outputs[1]", True),
        ("grad_tensors[0]", False), ("inputs[0]", False),
    ],
)  # fmt: skip
def test_the_graph_is_followed_from_what_backward_was_asked_of(
    argument: str, *, is_root: bool
) -> None:
    """Alone or in a list; a gradient that it was given, or what to differentiate by, is none."""
    leaf = torch.ones(3, requires_grad=True)
    with Recorder() as recorder:
        part = leaf.exp()
        first, second = part.sum(), (part * 3).sum()
        first.backward()
        raising = NodeMark.of(part.grad_fn)
        assert raising is not None
        freed = freed_graph.freed_graph({argument: second}, recorder, [], None, raising)
    assert (freed is not None and freed.freed is not None) is is_root


def test_without_an_earlier_pass_the_failing_one_has_freed_it() -> None:
    leaf = torch.ones(3, requires_grad=True)
    with Recorder() as recorder:
        part = leaf.exp()
        raising = NodeMark.of(part.grad_fn)
        assert raising is not None
        assert freed_graph.freed_graph({"self": part}, recorder, [], None, raising) is None


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        # The reader's line calls another function before, as in ``cell(f(x), h)``.
        ("        h = h.detach()\n        h = torch.mul(torch.exp(x), h)\n", {"h"}),
        # Another line calls the reader's function, too.
        ("        h = h.detach()\n        torch.mul(x, x)\n        h = torch.mul(x, h)\n", {"h"}),
        ("        g = h.detach()\n        torch.mul(torch.exp(x), h)\n", {"g"}),
        ("        h = torch.mul(torch.exp(x), h)\n        h = h.detach()\n", {"h"}),
        ("        h = torch.mul(torch.exp(x), h)\n", set()),
    ],
)
def test_what_was_detached_since_the_line_ran_before(
    lines: str, names: set[str], tmp_path: Path
) -> None:
    code = f"def f(x, h, k):\n    k = k.detach()\n    for _ in range(3):\n{lines}"
    file = tmp_path / "steps.py"
    file.write_text(code)
    run: dict[str, Any] = {"torch": torch}
    exec(compile(code, str(file), "exec"), run)
    with Recorder() as recorder:
        run["f"](X, X, X)
        snapshot = recorder.snapshot()
        reader = [call for call in snapshot.calls if call.api.stem == "mul"][-1]
        assert freed_graph._cut_before(reader, snapshot) == names


def shared(lines: str, file: Path) -> bool:
    """Return whether the tensor that the last call wrote to has another name, too."""
    names: dict[str, Any] = {"torch": torch}
    file.write_text(lines)
    exec(compile(lines, str(file), "exec"), names)
    with Recorder() as recorder:
        names["f"]()
        writes = [call for call in recorder.snapshot().calls if call.written]
    return freed_graph.is_shared(writes[-1])


@pytest.mark.parametrize(
    ("lines", "is_it"),
    [
        ("def f():\n    x = torch.ones(4)\n    x.add_(1)\n", False),
        ("def f():\n    x = torch.ones(4)\n    x += 1\n", False),
        ("def f():\n    x = torch.ones(4)[:2]\n    x.add_(1)\n", True),
        ("def f(x=torch.ones(4)):\n    x.add_(1)\n", True),
        ("def f(*, x=torch.ones(4)):\n    x += 1\n", True),
        ("def f():\n    x = torch.ones(4)[:2]\n    y = x.add_(1)\n", False),
        # The list has it too.
        ("def f():\n    a = torch.ones(4)\n    for x in (a,):\n        x.add_(1)\n", True),
        ("def f():\n    x = torch.ones(4)\n    for a in (x,):\n        a + 1\n    x += 1\n", False),
        (
            "def f():\n    a = torch.ones(4)\n    for _ in (1,):\n"
            "        for x, _ in ((a, 1),):\n            x.add_(1)\n",
            True,
        ),
        ("def f():\n    for x in (1,):\n        pass\n    x = torch.ones(4)\n    x += 1\n", False),
    ],
)
def test_what_a_caller_or_the_base_of_a_view_has_is_shared(
    lines: str, tmp_path: Path, *, is_it: bool
) -> None:
    assert shared(lines, tmp_path / "write.py") is is_it


def test_a_line_has_its_cell_or_file_where_that_is_another(tmp_path: Path) -> None:
    text, names, file = "torch.ones(4).add_(1)", {"torch": torch}, tmp_path / "write.py"
    file.write_text(text)
    with Recorder() as recorder, cell(text) as code:
        exec(code, names)
        exec(compile(text, str(file), "exec"), names)
        writes = [call for call in recorder.snapshot().calls if call.written]
        own = SourceSpan(cell=7), SourceSpan(file=str(file))
        places = (*own, SourceSpan(cell=8), SourceSpan(file="other.py"))
        lines = [freed_graph._line(write, here) for write in writes for here in places]
    assert [line and (line.cell, line.file) for line in lines] == [
        (None, None), *[(7, None)] * 3, (None, str(file)), (None, None), *[(None, str(file))] * 2,
    ]  # fmt: skip


STALE = """\
class Half(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w
    def forward(self, x):
        return torch.mul(self.w, x)
def make(w, x):
    return torch.mul(w, x)
def f(w, v, x, half):
    a = {first}
    b = torch.exp(x)
    e = torch.exp(a)
    c = torch.add(torch.add(a, b), e)
    with torch.no_grad(): u.mul_(2), w.add_(1)
    d = torch.mul(c, w)
    1 / 0
"""


@pytest.mark.parametrize(
    ("first", "lines"),
    [
        ("torch.mul(w, x)", [10, 12, 13]),
        ("half(x) + half(x)", [10, 12, 13]),  # the line of the function that calls backward
        ("torch.mul(v, x)", []),  # another parameter
        ("torch.mul(u, x)", []),  # no parameter
        ("make(w, x)", []),  # of the function no caller is known, which would have to call it again
    ],
)
def test_the_lines_to_run_again_after_a_parameter_was_changed(
    first: str, lines: list[int], tmp_path: Path
) -> None:
    """Those that read it before, and what is made of that until then: nothing that came after."""
    file = tmp_path / "step.py"
    file.write_text(code := STALE.format(first=first))
    run: dict[str, Any] = {"torch": torch, "nn": nn, "u": torch.ones(3)}
    exec(compile(code, str(file), "exec"), run)
    w, v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with Recorder() as recorder:
        with pytest.raises(ZeroDivisionError) as caught:
            # The line of the caller has the same number.
            run |= {"w": w, "v": v, "x": torch.ones(3, requires_grad=True), "half": run["Half"](w)}
            exec(compile("\n" * 15 + "f(w, v, x, half)", "<caller>", "exec"), run)
        snapshot = recorder.snapshot()
    entries = entries_from_traceback(caught.value.__traceback__)
    root = {"self": entries[-1].tb_frame.f_locals["d"]}
    (write,) = [call for call in snapshot.calls if call.api.stem == "add_"]
    here = SourceSpan(file=str(file), line=16)
    found = freed_graph.stale_lines(root, snapshot, entries, here, write)
    assert [it.line for it in found] == lines
