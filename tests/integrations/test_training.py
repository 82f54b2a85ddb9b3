"""The guards around a training: what they write, which name it has, when they go."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cudalens.core.errors import DeviceIndexError
from cudalens.guards.process import PROCESS
from cudalens.integrations.training import TrainingCheck
from tests.builders import make_report

pytestmark = pytest.mark.usefixtures("sim")


def look_up(row: int) -> torch.Tensor:
    table = torch.ones(3, 2, device="cuda")
    return torch.nn.functional.embedding(torch.tensor([row], device="cuda"), table)


def trained(
    check: TrainingCheck, folder: Path, row: int, place: Callable[[], tuple[int, int, int]]
) -> BaseException | None:
    check.open(folder, place)
    try:
        look_up(row).sum().item()
    except DeviceIndexError as error:
        check.close(error)
        return error
    check.close()
    return None


@pytest.mark.parametrize(
    ("place", "name"),
    [((7, 0, 1), "cudalens-step7"), ((8, 0, 2), "cudalens-step8-rank0"),
     ((9, 1, 2), "cudalens-step9-rank1")],
)  # fmt: skip
def test_a_finding_is_written_with_its_step_and_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: tuple[int, int, int], name: str
) -> None:
    check, folder = TrainingCheck(deferred=False), tmp_path / "new" / "checkpoints"
    assert trained(check, folder, 3, lambda: place) is not None
    assert check.written == [folder / f"{name}.html", folder / f"{name}.json"]
    assert all(path.stat().st_size for path in check.written)
    assert capsys.readouterr().err == f"cudalens: the report is in {folder / name}.html\n"


def test_a_good_training_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = TrainingCheck(deferred=False)
    assert trained(check, tmp_path, 2, lambda: (1, 0, 1)) is None
    assert (check.written, list(tmp_path.iterdir())) == ([], [])
    assert capsys.readouterr().err == ""


def test_a_folder_that_cannot_be_made_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a file"
    file.touch()
    check = TrainingCheck(deferred=False)
    assert trained(check, file, 3, lambda: (1, 0, 1)) is not None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"cudalens: the report was not written to {file / 'cudalens-step1'}")
    assert check.written == []


def test_deferred_guards_raise_where_the_training_ends(tmp_path: Path) -> None:
    check = TrainingCheck()
    check.open(tmp_path, lambda: (1, 0, 1))
    with pytest.raises(DeviceIndexError):
        look_up(3)
        check.close()
    check.close()
    assert [path.suffix for path in check.written] == [".html", ".json"]


def test_a_finding_behind_another_error_is_written_and_does_not_replace_it(tmp_path: Path) -> None:
    check = TrainingCheck()
    check.open(tmp_path, lambda: (1, 0, 1))
    look_up(3)
    check.close(ValueError("of the training"))
    assert [path.suffix for path in check.written] == [".html", ".json"]


def test_the_guards_go_with_the_training(tmp_path: Path) -> None:
    before = PROCESS.is_installed
    check = TrainingCheck(deferred=False)
    check.open(tmp_path, lambda: (1, 0, 1))
    assert PROCESS.is_installed
    check.close()
    assert PROCESS.is_installed is before
    check.close()  # harmless


def test_the_next_training_of_a_thread_ends_the_one_before(tmp_path: Path) -> None:
    first, second = TrainingCheck(deferred=False), TrainingCheck(deferred=False)
    first.open(tmp_path, lambda: (1, 0, 1))
    second.open(tmp_path, lambda: (1, 0, 1))
    assert [*TrainingCheck._open] == [second]
    other = TrainingCheck(deferred=False)
    thread = threading.Thread(target=lambda: other.open(tmp_path, lambda: (1, 0, 1)))
    thread.start()
    thread.join()
    assert {*TrainingCheck._open} == {second, other}
    other.close()
    second.close()
    assert not [*TrainingCheck._open]


def test_the_guards_go_with_a_callback_that_nobody_has_closed(tmp_path: Path) -> None:
    before = PROCESS.is_installed
    check = TrainingCheck(deferred=False)
    check.open(tmp_path, lambda: (1, 0, 1))
    del check
    gc.collect()
    assert PROCESS.is_installed is before


def test_what_one_training_has_written_is_not_of_the_next(tmp_path: Path) -> None:
    check = TrainingCheck(deferred=False)
    trained(check, tmp_path, 3, lambda: (1, 0, 1))
    assert len(check.written) == 2
    trained(check, tmp_path, 2, lambda: (2, 0, 1))
    assert check.written == []


def test_a_silent_finding_is_written_where_nothing_was_before(tmp_path: Path) -> None:
    """What raises is written at each step; the place is asked for at that time."""
    steps = iter(range(1, 9))
    check = TrainingCheck(deferred=False)
    check.open(tmp_path, lambda: (next(steps), 0, 1))
    assert check._session is not None
    kinds = ("silent", "silent", "device_assert", "silent", "nonfinite")
    for kind in kinds:
        check._session.add_finding(make_report(kind=kind))
    check._session.report = None
    check.close()
    names = [path.name for path in check.written if path.suffix == ".html"]
    assert names == [f"cudalens-step{step}.html" for step in (1, 2, 3)]


@pytest.mark.parametrize("deferred", [True, False, None])
def test_guards_of_a_training_record_nothing(deferred: bool | None, tmp_path: Path) -> None:
    check = TrainingCheck() if deferred is None else TrainingCheck(deferred=deferred)
    check.open(tmp_path, lambda: (1, 0, 1))
    session = check._session
    assert session is not None and session.recorder is None
    assert (session.fast, session.deferred) == (True, deferred is not False)
    check.close()
    assert check._session is None and session.recorder is None
