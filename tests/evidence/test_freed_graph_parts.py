"""The names that a line reads or detaches, and the code that detaches what they hold."""

from __future__ import annotations

import ast
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from cudalens.core.call import NodeMark
from cudalens.evidence import freed_graph
from cudalens.recorder import Recorder

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
    ],
)
def test_what_a_caller_or_the_base_of_a_view_has_is_shared(
    lines: str, tmp_path: Path, *, is_it: bool
) -> None:
    assert shared(lines, tmp_path / "write.py") is is_it
