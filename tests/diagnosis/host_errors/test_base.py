"""Meaning of a message: torch's own words, those of a pattern, and where the error comes from."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cudalens.core.report import Environment, ErrorFacts, Evidence
from cudalens.core.report_types import Hint
from cudalens.diagnosis.host_errors import _base, explain_host_error
from cudalens.diagnosis.host_errors._base import (
    REFUSED,
    Verdict,
    groups,
    is_known_message,
    own_message,
    pattern,
    row,
)
from tests.builders import fact

UNKNOWN = "my_op: something is odd"
KNOWN = "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"


def explained(message: str, kind: str = "RuntimeError", **facts: Any) -> Verdict:
    bases = facts.pop("bases", ())
    error = ErrorFacts(type_name=kind, message=message, bases=bases)
    return explain_host_error(Evidence(error=error, **facts), error)


@pytest.fixture
def patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test enter patterns of its own, before all others."""
    monkeypatch.setattr(_base, "_patterns", [])


# --- messages -------------------------------------------------------------------------------------


def test_the_message_of_a_worker_is_the_last_one_of_its_traceback() -> None:
    text = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call"
    text += ' last):\n  File "a.py", line 3\n    f(x)\nValueError: too long\nand more'
    assert own_message(text) == "too long\nand more"
    assert own_message("too long") == "too long"
    no_error = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback\n  nothing"
    assert own_message(no_error) == no_error


def test_the_op_before_a_message_is_left_out() -> None:
    assert own_message(f"addmm: {KNOWN}") == KNOWN
    worker = "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback\n"
    assert own_message(f"{worker}a.b.MyError: addmm: {KNOWN}") == KNOWN
    assert own_message(f"{worker}not so: odd\nRuntimeError: {KNOWN}\n") == KNOWN
    assert own_message(UNKNOWN) == UNKNOWN


def test_groups_that_matched_by_their_names_without_numbers() -> None:
    match = re.match(r"(?P<got>a)|(?P<got2>b)(?P<rest>c)?", "b")
    assert match is not None
    assert groups(match) == {"got": "b"}


def test_messages_that_only_torch_raises() -> None:
    assert is_known_message(KNOWN)
    assert is_known_message("Mismatch in shape: grad_output[0] has a shape of [2]")
    assert not is_known_message(UNKNOWN)
    worker = "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback\n"
    assert is_known_message(f"{worker}RuntimeError: Inference tensors cannot be saved")
    assert not is_known_message("object of type 'NoneType' has no len()")


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "bases", "verdict"),
    [
        ("RuntimeError", (), "host_error"),
        ("MyError", ("ValueError",), "host_error"),
        ("KeyError", ("LookupError",), "python_error"),
    ],
)
def test_the_kind_of_an_exception_that_no_pattern_knows(
    kind: str, bases: tuple[str, ...], verdict: str
) -> None:
    found = explained(UNKNOWN, kind, bases=bases)
    assert (found.kind, found.pattern) == (verdict, None)
    headline = UNKNOWN if verdict == "host_error" else f"{kind}: {UNKNOWN}"
    assert found.headline == headline
    assert found.certainty == ("proven" if verdict == "host_error" else "unknown")


def test_a_message_of_autograd_is_said_of_the_tensor() -> None:
    message = "Mismatch in shape: grad_output[0] has a shape of [2]"
    y = fact("self", "float32[2]", "y")
    found = explained(message, tensors=(y,))
    assert (found.kind, found.argument) == ("autograd_error", "self")
    assert found.headline_own == f"{message}: y"
    backward = explained(message, tensors=(y,), phase="backward")
    assert (backward.headline_own, backward.argument) == ("", None)


def test_an_exception_without_a_message_is_its_type() -> None:
    assert explained("").headline == "RuntimeError"


def test_that_nothing_ran_is_not_said_where_nothing_is_on_the_gpu() -> None:
    on_cpu = fact("self", "float32[2,3]", "x", device="cpu")
    on_gpu = fact("mat2", "float32[4,5]", "y", device="cuda:0")
    assert REFUSED in explained(KNOWN, tensors=(on_cpu, on_gpu)).explanation
    assert REFUSED not in explained(KNOWN, tensors=(on_cpu,)).explanation
    unknown = "a message of nobody's"
    raised = explained(unknown, tensors=(on_gpu,)).explanation
    assert raised == "An exception of the host: it does not affect the GPU."
    assert "GPU" not in explained(unknown, tensors=(on_cpu,)).explanation


@pytest.mark.parametrize(
    ("simulated", "device"), [(True, "cuda:0"), (False, "cuda:0"), (True, "cpu")]
)
def test_a_refusal_of_the_cpus_kernel_alone(simulated: bool, device: str) -> None:
    message = "\"histogram_cpu\" not implemented for 'Half'"
    x = fact("self", "float16[2]", "x", device=device)
    bins = fact("bins", "float16[2]", "bins", device="cpu")
    found = explained(message, tensors=(x, bins), environment=Environment(simulated=simulated))
    is_doubted = simulated and device != "cpu"
    assert ("Refused by the CPU's kernel" in found.explanation) is is_doubted
    assert bool(found.hints) is is_doubted


@pytest.mark.usefixtures("patterns")
def test_a_hint_stands_beside_the_doubt_about_the_cpus_kernel() -> None:
    row("mine", "not implemented for", hint=Hint(rule="mine", text="mend it"))
    x = fact("self", "float16[2]", "x", device="cuda:0")
    simulated = Environment(simulated=True)
    message = "\"histogram_cpu\" not implemented for 'Half'"
    found = explained(message, tensors=(x,), environment=simulated)
    assert "Refused by the CPU's kernel" in found.explanation
    assert [it.text for it in found.hints] == ["mend it"]


def test_where_an_error_of_a_worker_was_raised() -> None:
    text = "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback\nValueError: odd"
    found = explained(text, "ValueError")
    assert found.headline == "odd"
    assert found.explanation.startswith("Raised in DataLoader worker process 0. ")
    at = explained(text, "ValueError", worker_line="data.py:7").explanation
    assert at.startswith("Raised in DataLoader worker process 0, at data.py:7. ")
    named = text.replace("odd", "f(): argument 'index' must be Tensor, not list")
    assert explained(named, "ValueError").argument_named == "index"


# --- patterns -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patterns")
def test_a_row_fills_its_texts_from_the_message() -> None:
    row("mine", r"my_op: (?P<what>\w+)", "{what} is odd", "See {match}.", "self")
    found = explained(UNKNOWN)
    assert (found.pattern, found.headline, found.argument) == ("mine", "something is odd", "self")
    assert found.explanation == f"See my_op: something. {REFUSED}"
    assert is_known_message(UNKNOWN)


@pytest.mark.usefixtures("patterns")
def test_a_row_with_a_hint_alone_leaves_torchs_words() -> None:
    row("mine", r"my_op: (?P<what>\w+)", hint=Hint(rule="mine", text="mend {what}"))
    found = explained(UNKNOWN)
    assert (found.pattern, found.headline) == ("mine", UNKNOWN)
    assert [it.text for it in found.hints] == ["mend something"]


@pytest.mark.usefixtures("patterns")
def test_the_first_pattern_that_answers() -> None:
    @pattern("my_op")
    def silent(evidence: Evidence, match: re.Match[str]) -> Any:
        yield from ()

    row("first", "my_op.*end", "first")
    row("second", "my_op", "second")
    assert explained(UNKNOWN).headline == "second"
    assert explained(f"{UNKNOWN}\nthe end").headline == "first"  # of all lines


@pytest.mark.usefixtures("patterns")
def test_hints_that_fail_leave_the_verdict_and_a_line() -> None:
    @pattern("my_op")
    def fails(evidence: Evidence, match: re.Match[str]) -> Any:
        yield _base.host("mine")
        raise KeyError("k")

    found = explained(UNKNOWN)
    assert (found.headline, found.hints) == ("mine", ())
    assert found.troubles == ("hints of fails failed: KeyError: 'k'",)


@pytest.mark.usefixtures("patterns")
@pytest.mark.parametrize("is_distinct", [True, False])
def test_a_pattern_of_messages_that_others_raise_too(is_distinct: bool) -> None:
    @pattern("my_op", is_distinct=is_distinct)
    def mine(evidence: Evidence, match: re.Match[str]) -> Any:
        yield _base.host("mine")

    assert is_known_message(UNKNOWN) is is_distinct
