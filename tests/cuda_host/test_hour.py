"""The sessions that the hardware hour runs after an assert, and how they are judged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.processes import ROOT

sys.path.insert(0, str(ROOT / "tests" / "gpu"))

from extras import EXTRAS, STICKY, Extra, run_extra
from test_on_gpu import judge

# The loader of torch 2.10 calls what that torch warns of, and the suite's filters make an error of
# a warning that comes to a frame of ours.
pytestmark = pytest.mark.filterwarnings("ignore:The argument 'device':DeprecationWarning")

SETUP = (ROOT / "tests" / "standin" / "pick.py").read_text(encoding="utf-8")
ON_STANDIN = [item for item in EXTRAS if not item.may_abort]


def run(name: str, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found = run_extra(name, SETUP)
    return {**found, "stderr": capfd.readouterr().err}


@pytest.mark.parametrize("extra", ON_STANDIN, ids=lambda extra: extra.name)
def test_a_session_lives_on(extra: Extra, capfd: pytest.CaptureFixture[str]) -> None:
    judge(extra, run(extra.name, capfd))


def test_calls_raise_as_the_rehearsal_s_do() -> None:
    found = run_extra(STICKY, SETUP)
    assert (found["calls"], found["differ"]) == (45, {})


BREAKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a cell that raises nothing": lambda f: f["cells"][0].update(error=None),
    "no report": lambda f: f.update(report=None),
    "another op": lambda f: f["report"]["op"].update(name="torch.sigmoid"),
    "no line": lambda f: f["report"].update(source=None),
    "a device that is not known to be lost": lambda f: f["report"].update(context_usable=None),
    "nothing printed": lambda f: f.update(stderr=""),
    "a text that is not told": lambda f: f["report"].update(device_text=None),
    "nothing shown": lambda f: [cell.update(shown=[]) for cell in f["cells"]],
    "no line at a later cell": lambda f: f["cells"][-1].update(notes=[]),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_wrong_is_judged_wrong(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = run(EXTRAS[0].name, capfd)
    BREAKS[name](found)
    with pytest.raises((AssertionError, TypeError)):
        judge(EXTRAS[0], found)
