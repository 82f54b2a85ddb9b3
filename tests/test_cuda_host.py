"""The CUDA lane where it cannot run: it fails, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import cuda_host
from tests.cuda_host import __main__ as lane


def test_without_a_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lane.main(["2.13.0"]) == lane.NOT_RUN != 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("THE CUDA LANE WAS NOT RUN on torch 2.13.0: ")
    assert "gcc" in line


def test_without_the_wheel_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip finds nothing where it may ask no index."""
    for tool in ("gcc", "nm", "readelf"):
        (tmp_path / tool).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(lane, "BUILT", tmp_path / "built")
    assert lane.main(["2.13.0"]) == lane.NOT_RUN
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("THE CUDA LANE WAS NOT RUN on torch 2.13.0: torch===2.13.0 cannot be")
    assert not list(tmp_path.glob("built/2.13.0*"))


def test_its_tests_are_not_collected_beside_a_cpu_build() -> None:
    from tests.cuda_host import conftest

    assert conftest.collect_ignore_glob == ["test_*.py"]
    assert list(Path(cuda_host.__file__).parent.glob("test_*.py"))
