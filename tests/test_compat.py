"""The table of lanes on docs/compatibility.md: each outcome replaces that lane's last one."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from tests import compat

ROW = "| 3.12 | 2.8.0 | 2026-01-31 | 5 passed |"
PAGE = f"before\n{compat.MARKS[0]}\n\n{compat.HEAD}\n{ROW}\n\n{compat.MARKS[1]}\nafter\n"


@pytest.mark.parametrize(
    ("lane", "rows"),
    [
        (("3.12", "2.8.0"), ["| 3.12 | 2.8.0 | 2026-02-01 | 7 passed |"]),
        (("3.12", "2.10.0"), [ROW, "| 3.12 | 2.10.0 | 2026-02-01 | 7 passed |"]),
        (("3.11", "2.9.1"), ["| 3.11 | 2.9.1 | 2026-02-01 | 7 passed |", ROW]),
    ],
)
def test_an_outcome_has_its_place_in_the_table(lane: tuple[str, str], rows: list[str]) -> None:
    page = compat.with_outcome(PAGE, compat.Lane(*lane), "7 passed", date(2026, 2, 1))
    assert page == PAGE.replace(ROW, "\n".join(rows))


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_package_at_which_pip_was_stopped_is_installed_again(
    is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "HOME", tmp_path)
    lane = compat.Lane("3.12", "2.8.0")
    packages = lane.folder / "lib/python3.12/site-packages"
    for name in ("pip-23.2.1", "torch-2.8.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
        (packages / f"{name}.dist-info" / "INSTALLER").write_text("pip\n")
    if not is_whole:
        (packages / "torch-2.8.0.dist-info" / "INSTALLER").unlink()
    seen: list[bool] = []

    def install(command: list[str], limit_s: float) -> None:
        assert command[1:4] == ["-m", "pip", "install"]
        seen.append((packages / "torch-2.8.0.dist-info").exists())

    monkeypatch.setattr(compat, "_call", install)
    monkeypatch.setattr(compat.Lane, "_do_without_nvidia", lambda self: None)
    lane.install()
    assert seen == [is_whole] * 2


def test_torch_asks_for_nothing_of_nvidia(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "HOME", tmp_path)
    monkeypatch.setattr(compat, "build_stubs", lambda torch, out: None)
    lane = compat.Lane("3.12", "2.8.0")
    (info := lane.folder / "lib/python3.12/site-packages/torch-2.8.0.dist-info").mkdir(parents=True)
    lines = (
        "Requires-Dist: filelock\nRequires-Dist: nvidia-nccl-cu12==2.27.3\nRequires-Dist: triton\n"
    )
    (info / "METADATA").write_text(f"Name: torch\n{lines}")
    lane._do_without_nvidia()
    assert (info / "METADATA").read_text() == "Name: torch\nRequires-Dist: filelock\n"
