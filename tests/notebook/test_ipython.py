"""What is read from IPython's own text and frames."""

from __future__ import annotations

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
