"""Input that nobody hopes for: each gets a clear line, and nothing stays installed.

What concerns options, syntax and shells alone is in ``test_magics.py``.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import cudalens
from cudalens import DeviceIndexError, Report
from tests.probes import cell

ROOT = Path(__file__).parent.parent
HAS_GPU = torch.cuda.is_available()
without_gpu = pytest.mark.skipif(HAS_GPU, reason="about machines without a GPU")


def python(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, as a fresh kernel does."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "IPYTHONDIR": os.environ.get("IPYTHONDIR", "/nonexistent-ipython"),
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment,
    )


SHELL = """
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config
config = Config()
config.HistoryManager.enabled = False
shell = InteractiveShell.instance(config=config)
def cell(text):
    result = shell.run_cell(text)
    return result.error_before_exec or result.error_in_exec
"""


def in_shell(*cells: str) -> subprocess.CompletedProcess[str]:
    lines = [SHELL, *(f"cell({text!r})" for text in cells)]
    return python("\n".join(lines))


# --- no GPU --------------------------------------------------------------------------------------


@without_gpu
@pytest.mark.parametrize("call", ["torch.ones(3, device='cuda')", "torch.ones(3).cuda()"])
def test_no_gpu_and_no_simulation_says_what_to_do(call: str) -> None:
    """torch's own error passes with a report that names the rehearsal device."""
    ran = in_shell(
        "%load_ext cudalens",
        "import torch",
        f"%%cudacheck -r found\n{call}",
        "from cudalens.guards.process import PROCESS",
        "print('said', '%cudacheck simulate' in f'{found.explanation} {found.hints}')",
        "print('left', PROCESS.is_installed)",
    )
    assert "CUDA was asked for" in ran.stdout.splitlines()[0]
    assert "said True" in ran.stdout
    assert "left False" in ran.stdout
    assert "AssertionError" in ran.stdout or "RuntimeError" in ran.stdout


@without_gpu
def test_simulation_after_a_backward_is_refused_in_one_sentence() -> None:
    """By the magic as a usage error, in Python as an exception; the process goes on."""
    ran = in_shell(
        "%load_ext cudalens",
        "import torch; (torch.ones(2, requires_grad=True) * 2).sum().backward()",
        "%cudacheck simulate",
        "%%cudacheck\nprint('still', 'here', torch.cuda.is_available())",
    )
    assert ran.returncode == 0, ran.stderr
    said = "This process already ran a backward: restart the kernel first"
    (line,) = [text for text in (ran.stdout + ran.stderr).splitlines() if said in text]
    assert line.startswith("UsageError: ")
    assert "still here False" in ran.stdout


@without_gpu
@pytest.mark.parametrize("call", ["cudalens.simulate()", "cudalens.ensure_cuda()"])
def test_simulation_after_a_backward_in_python(call: str) -> None:
    """The sentence is the exception's, without torch's internal one behind it."""
    ran = python(
        "import torch, cudalens\n"
        "(torch.ones(2, requires_grad=True) * 2).sum().backward()\n"
        f"{call}\n"
    )
    assert ran.returncode == 1
    assert "SimulationError: This process already ran a backward: restart" in ran.stderr
    assert "INTERNAL ASSERT" not in ran.stderr


# --- no torch ------------------------------------------------------------------------------------

NO_TORCH = "import sys\nsys.modules['torch'] = None\n"


@pytest.mark.parametrize(
    "call", ["%%cudacheck\n1", "%cudacheck 1", "%cudacheck simulate", "%cudacheck on"]
)
def test_without_torch_every_form_is_one_usage_line(call: str) -> None:
    """Also the sub-commands; and the next cell runs."""
    cells = "".join(f"cell({text!r})\n" for text in ("%load_ext cudalens", call, "print(6 * 7)"))
    ran = python(NO_TORCH + SHELL + cells)
    lines = [line for line in (ran.stdout + ran.stderr).splitlines() if line.strip()]
    assert len([line for line in lines if "UsageError" in line]) == 1
    assert "needs torch" in "".join(lines)
    assert ran.stdout.splitlines()[-1] == "42"
    assert "Traceback" not in "".join(lines)


# --- values that fight back ----------------------------------------------------------------------


class Nasty(Tensor):
    """A tensor that cannot be shown."""

    def __repr__(self) -> str:  # type: ignore[override]
        raise RuntimeError("no repr of mine")

    __str__ = __repr__


class Grim:
    """An object that raises whatever is asked of it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} of mine")

    def __repr__(self) -> str:
        raise RuntimeError("no repr of mine")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no comparison of mine")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth of mine")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.usefixtures("sim")
def test_a_tensor_whose_repr_raises() -> None:
    """Nobody asks for it: the report is whole."""
    table = torch.ones(5, 2, device="cuda")
    ids = torch.tensor([1, 7], device="cuda").as_subclass(Nasty)
    grim = Grim()
    with pytest.raises(DeviceIndexError) as caught, cudalens.check() as session:
        F.embedding(ids, table), grim
    assert session.report.headline == "indices[1] = 7 is outside the 5 rows of weight"
    assert session.report.to_text()
    assert session.report.to_html()
    assert "no repr of mine" not in str(caught.value)


@pytest.mark.usefixtures("sim")
def test_a_host_error_among_objects_that_fight_back() -> None:
    """The exception is torch's own, and our looking around raises nothing."""
    grim, left = Grim(), torch.ones(2, 3, device="cuda").as_subclass(Nasty)
    with (
        pytest.raises(RuntimeError, match="multiplied") as caught,
        cudalens.check() as session,
    ):
        torch.mm(left, torch.ones(2, 3, device="cuda")), grim
    assert session.report is not None
    assert session.report.to_html()
    assert caught.value.__cudalens_report__ is session.report


class MuteError(Exception):
    """An exception of the user's that cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no str of mine")


@pytest.mark.usefixtures("sim")
def test_an_exception_whose_str_raises_passes() -> None:
    """It is not torch's, so nobody reads it."""
    error = MuteError()
    with pytest.raises(MuteError) as caught, cudalens.check() as session:
        raise error
    assert caught.value is error
    assert session.report is None


# --- user text in HTML ---------------------------------------------------------------------------

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}</textarea></svg>"


class Tags(HTMLParser):
    """The tags and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.attributes: set[str] = set()
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_script = tag == "script"
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts.append(data)


def evil_report(evil_line: str) -> Report:
    names: dict[str, Any] = {"torch": torch, "F": F}
    with cell(evil_line) as code:
        with pytest.raises((RuntimeError, IndexError)), cudalens.check() as session:
            exec(code, names)
    assert session.report is not None
    return session.report


@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize(
    "call",
    [
        "F.embedding(torch.tensor([9], device='cuda'), torch.ones(3, 2, device='cuda'))",
        "torch.ones(2, 3, device='cuda') @ torch.ones(2, 3, device='cuda')",
    ],
    ids=["guard", "host error"],
)
def test_user_text_is_shown_not_run(call: str) -> None:
    """Code and file names full of HTML are escaped in page, fragment and drawings."""
    report = evil_report(f"note = {EVIL!r}; {call}  # {EVIL}")
    assert EVIL in report.source.text
    for text in (report.to_html(), report._repr_mimebundle_()["text/html"]):
        tags = Tags(text)
        assert "alert(1)" not in "".join(tags.scripts)
        assert "onerror" not in tags.attributes
        assert "{{7*7}}" in html.unescape(re.sub(r"<[^>]*>", "", text)) or "7*7" in text
        assert "<script>alert" not in text
        assert "<img src=x" not in text


@pytest.mark.usefixtures("sim")
def test_terminal_escapes_in_user_text_do_not_reach_the_terminal() -> None:
    """A string that would repaint the screen is shown as text."""
    line = (
        "note = '\x1b[2J\x1b]0;owned\x07'; "
        "F.embedding(torch.tensor([9], device='cuda'), torch.ones(3, 2, device='cuda'))"
    )
    text = evil_report(line).to_text()
    assert "\x1b" not in text
    assert "\x07" not in text
