"""The report of a lost device is written and shown where the loss is found."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import cudalens
from cudalens import simulate
from cudalens.evidence import exception
from tests.shells import Notebook

pytestmark = pytest.mark.usefixtures("sim")
LINE = "Ext.cu:12: kernel_x: block: [0,0,0], thread: [3,0,0] Assertion `i < n` failed."


def lose(sim: simulate.Simulation) -> None:
    x = torch.ones(3, device="cuda")
    sim.device_assert("ext::op", LINE)
    torch.sigmoid(x)


def test_files_are_there_while_the_exception_leaves_the_block(
    sim: simulate.Simulation, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    shown: list[Any] = []
    session = cudalens.check(json=path)
    session.show_early = lambda: shown.append(session.report)
    with pytest.raises(torch.AcceleratorError) as caught, session:
        try:
            lose(sim)
        finally:
            early = json.loads(path.read_text(encoding="utf-8"))
    assert session.report is not None
    final = session.report.to_dict()
    for key in ("kind", "headline", "op", "source", "certainty", "tensors"):
        assert early[key] == final[key], key
    assert [item.headline for item in shown] == [session.report.headline_schema]
    assert session.is_shown_early
    assert len([note for note in caught.value.__notes__ if "cudalens" in note]) == 1


@pytest.mark.parametrize(
    ("mode", "reads", "is_early"),
    [
        ("fast", lambda x, at: x[at], True),
        ("fast", lambda x, at: x.tolist(), False),
        ("deferred", lambda x, at: x.tolist(), True),
    ],
)
def test_without_a_recorder_a_guarded_call_reports_it(
    mode: str, reads: Any, is_early: bool, sim: simulate.Simulation
) -> None:
    """Deferred guards see what reaches the host as well, while something is pending."""
    table, at = torch.ones(3, 2, device="cuda"), torch.tensor([1], device="cuda")
    shown: list[Any] = []
    session = cudalens.check(**{mode: True})
    session.show_early = lambda: shown.append(session.report)
    with pytest.raises(torch.AcceleratorError), session:
        table[at]
        try:
            sim.device_assert("ext::op", LINE)
            reads(table, at)
        finally:
            assert bool(shown) is is_early
    assert session.report is not None
    assert (session.report.kind, session.report.context_usable) == ("device_assert", False)
    assert len(shown) == is_early


@pytest.mark.parametrize("mode", ["full", "fast"])
def test_the_evidence_is_collected_once(
    mode: str, sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    collected: list[BaseException] = []
    collect = exception.evidence_of_error

    def count(error: BaseException, *args: Any, **options: Any) -> Any:
        collected.append(error)
        return collect(error, *args, **options)

    monkeypatch.setattr(exception, "evidence_of_error", count)
    x, at = torch.ones(3, device="cuda"), torch.tensor([1], device="cuda")
    with (
        pytest.raises(torch.AcceleratorError) as caught,
        cudalens.check(fast=mode == "fast") as session,
    ):
        sim.device_assert("ext::op", LINE)
        x[at]
    assert collected == [caught.value]
    assert session.report is not None
    assert session.report.context_usable is False
    assert [note for note in caught.value.__notes__ if session.report.headline in note]


def test_the_error_of_a_later_call_is_explained_for_itself(sim: simulate.Simulation) -> None:
    x = torch.ones(3, device="cuda")
    lines: list[Any] = []
    session = cudalens.check()
    session.show_early = lambda: lines.append(session.report and session.report.source)
    with pytest.raises(torch.AcceleratorError), session:
        sim.device_assert("ext::op", LINE)
        with suppress(torch.AcceleratorError):
            torch.sigmoid(x)
        torch.tanh(x)
    lines.append(session.report and session.report.source)
    assert [line.text for line in lines] == ["torch.sigmoid(x)", "torch.tanh(x)"]


@pytest.mark.parametrize("other", [None, ValueError])
def test_a_loss_that_the_block_handles_keeps_its_line(
    other: type[Exception] | None, sim: simulate.Simulation
) -> None:
    session = cudalens.check()
    with suppress(ValueError), session:
        try:
            lose(sim)
        except torch.AcceleratorError as error:
            if other is not None:
                raise other from error
    assert session.report is not None
    assert session.report.source is not None
    assert session.report.source.text == "torch.sigmoid(x)"


def test_an_error_that_leaves_the_device_usable_is_reported_at_the_end(
    sim: simulate.Simulation, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    with pytest.raises(RuntimeError), cudalens.check(json=path) as session:
        try:
            torch.ones(3, device="cuda") @ torch.ones(4, device="cuda")
        finally:
            assert not path.exists()
    assert path.exists()
    assert not session.is_shown_early


def test_a_cell_shows_it_before_what_runs_afterwards(
    notebook: Notebook, sim: simulate.Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And once; a front end with a kernel gets the same output again, replaced."""
    notebook.names["sim"] = sim
    published: list[Any] = []
    publish = notebook.shell.display_pub.publish

    def keep(**words: Any) -> None:
        published.append((words.get("update", False), words.get("transient")))
        publish(**words)

    monkeypatch.setattr(notebook.shell.display_pub, "publish", keep)
    notebook.names["count"] = lambda: len(published)
    notebook.run(
        "%%cudacheck\nx = torch.ones(3, device='cuda')\n"
        f"sim.device_assert('ext::op', {LINE!r})\n"
        "try:\n    torch.sigmoid(x)\nfinally:\n    shown = count()"
    )
    assert notebook.names["shown"] == 1
    assert [is_update for is_update, _ in published] == [False]
    assert "i < n" in notebook.shown[0]["text/plain"]
