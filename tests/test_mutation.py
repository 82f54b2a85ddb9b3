"""The mutation run's own arithmetic; the mutants themselves come from cosmic-ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutation
from tests.mutation import Mutant, Outcome


def mutant(line: int) -> Mutant:
    path = "cudalens/diagnosis/hints/labels.py"
    return Mutant(path=path, operator="core/AddNot", occurrence=0, line=line)


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("def f(x: int | None) -> int: return x", "def f(x: int & None) -> str: return x", True),
        ("class A:\n    x: int = 1", "class A:\n    x: str = 1", True),
        ("class A:\n    x: int = 1", "class A:\n    x: int = 2", False),
        ("def f(x: int = 1): return x", "def f(x: int = 2): return x", False),
    ],
)
def test_annotations_are_no_behaviour(before: str, after: str, is_same: bool) -> None:
    """A mutant that only changes an annotation cannot be noticed, one of a value can."""
    assert (mutation._behaviour(before) == mutation._behaviour(after)) is is_same


def test_a_module_is_judged_by_its_family_own_tests_first() -> None:
    """The file named after the module runs first, so that a mutant dies early."""
    losses = mutation.tests_of("cudalens/guards/losses.py")
    assert losses[0] == "tests/guards/test_losses.py"
    assert "tests/guards/test_catalogue.py" in losses
    assert not any("hints" in name for name in losses)
    first = mutation.tests_of("cudalens/diagnosis/host_errors/devices.py")[0]
    assert first == "tests/diagnosis/host_errors/test_host_errors.py"


def test_the_score_counts_what_was_noticed() -> None:
    outcomes = [
        Outcome(mutant=mutant(3), is_killed=True, change="a  →  b"),
        Outcome(mutant=mutant(7), is_killed=False, change="x > 0  →  x >= 0"),
    ]
    text = mutation.report(outcomes)
    assert text.splitlines()[-1] == "1 of 2 mutants killed: 50.0 %"
    assert "SURVIVED cudalens/diagnosis/hints/labels.py:7 core/AddNot" in text
    assert "x > 0  →  x >= 0" in text
    assert ":3 core" not in text


def test_a_mutant_is_judged_in_the_copy_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests see the changed file; the file is as before afterwards, also when they fail."""
    file = tmp_path / "cudalens/diagnosis/hints/labels.py"
    file.parent.mkdir(parents=True)
    file.write_text("limit = 1\n")
    seen: list[str] = []

    def passes(root: Path, tests: list[str]) -> bool:
        seen.append((root / "cudalens/diagnosis/hints/labels.py").read_text())
        return False

    monkeypatch.setattr(mutation, "mutated", lambda mutant, source: source.replace("1", "2"))
    monkeypatch.setattr(mutation, "passes", passes)
    outcome = mutation.judge(tmp_path, mutant(1))
    assert seen == ["limit = 2\n"]
    assert file.read_text() == "limit = 1\n"
    assert outcome.is_killed
    assert outcome.change == "limit = 1  →  limit = 2"


@pytest.mark.parametrize(("text", "is_green"), [("assert True", True), ("assert False", False)])
def test_a_failing_test_kills(tmp_path: Path, text: str, is_green: bool) -> None:
    (tmp_path / "test_one.py").write_text(f"def test_it():\n    {text}\n")
    assert mutation.passes(tmp_path, ["test_one.py"]) is is_green


def test_a_hanging_mutant_is_ended(tmp_path: Path) -> None:
    """Beyond the limit the run is killed with all that it started, and counts as noticed."""
    (tmp_path / "test_one.py").write_text("import time\ndef test_it():\n    time.sleep(600)\n")
    assert mutation.passes(tmp_path, ["test_one.py"], limit_s=3) is False
