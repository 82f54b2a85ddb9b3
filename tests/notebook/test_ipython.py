"""What is read from IPython's own text and frames."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cudalens.notebook import _ipython

FRAME = """\
Cell In[3], line 2, in f(x)
      1 def f(x):
----> 2     return g(
      3         x
      4     )
"""


def test_a_frame_keeps_its_place_and_its_arrow_line() -> None:
    told = _ipython.arrow_lines(["-----", FRAME, "ValueError: 3"])
    assert told == [
        "-----",
        "Cell In[3], line 2, in f(x)\n----> 2     return g(\n",
        "ValueError: 3",
    ]


def test_colours_hide_no_line_number() -> None:
    frame = "\x1b[36mCell\x1b[39m\n\x1b[32m     11\x1b[39m a = 1\n\x1b[32m---> 12\x1b[39m f(a)"
    assert _ipython.arrow_lines([frame]) == ["\x1b[36mCell\x1b[39m\n\x1b[32m---> 12\x1b[39m f(a)"]


def test_a_line_with_a_number_alone_is_code_and_other_words_are_not() -> None:
    frame = "In [3]\n      1\n---> 2\n     3rd line\n      4 "
    assert _ipython.arrow_lines([frame]) == ["In [3]\n---> 2\n     3rd line"]


@pytest.mark.parametrize(
    "part",
    [
        "ValueError: rows\n      1 is bad\n      2 is not",  # a message, which has no arrow
        "File ~/gone.py:3, in f()",
        "",
    ],
)
def test_what_is_no_frame_with_code_is_kept(part: str) -> None:
    assert _ipython.arrow_lines([part]) == [part]


@pytest.mark.parametrize("parts", ["Traceback", ["Traceback", None], None])
def test_a_traceback_of_another_form_is_kept(parts: object) -> None:
    assert _ipython.arrow_lines(parts) is parts


# --- from running frames --------------------------------------------------------------------------


def called(way: str, last: Callable[[], Any], **variables: Any) -> Any:
    """Call a function below functions of these names, which have these variables."""
    body = "".join(f"    {key} = given[{key!r}]\n" for key in variables)
    names: dict[str, Any] = {"given": variables, "_last": last}
    below = "_last"
    for name in reversed(way.split()):
        exec(f"def {name}():\n{body}    return {below}()", names)
        below = name
    return names[below]()


def test_the_text_of_time_is_that_of_what_calls_the_compiler() -> None:
    def compiler() -> str:
        return _ipython.text_of_time(sys._getframe())

    assert called("time", compiler, expr="f(x)") == "f(x)"
    assert called("other", compiler) == ""


def test_only_time_reads_and_shows_by_itself() -> None:
    def shower() -> bool:
        return _ipython.is_shown_by_time(sys._getframe())

    reads = _ipython.is_read_by_time
    ways = ("time transform_cell", "time other transform_cell", "run transform_cell", "time")
    assert [called(way, reads) for way in ways] == [True, False, False, False]
    assert [called(way, shower) for way in ("time", "time other", "run")] == [True, False, False]


def test_what_a_running_frame_of_ipython_tells() -> None:
    info, script = _ipython.info_of_running_cell, _ipython.running_script
    assert called("run_cell_async other", info, info="the info") == "the info"
    assert called("run_cell_async", info) is None
    assert info() is None
    assert called("safe_execfile_ipy", script, fname="/a/notebook.ipynb") == "notebook.ipynb"
    assert script() is None


def test_the_line_of_a_running_magic_is_that_of_its_caller() -> None:
    frame = called("cell run_line_magic magic", _ipython.caller_of_line_magic)
    assert frame.f_code.co_name == "cell"
    assert _ipython.caller_of_line_magic() is None


@pytest.mark.parametrize(("release", "told"), [((9, 4, 1, ""), (9, 4)), ((8, 0, 0), (8, 0))])
def test_the_release_is_its_first_two_numbers(
    release: tuple[Any, ...], told: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(version_info=release))
    assert _ipython.version() == told
