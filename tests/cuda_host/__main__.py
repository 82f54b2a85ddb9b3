"""Runs the CUDA lane: ``python -m tests.cuda_host [TORCH] [WORDS FOR PYTEST …]``.

Installs torch's CUDA wheel alone below ``build/cuda_host`` and builds the stand-in's libraries
there.  Where one of the two cannot be had, one line says so and nothing fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.processes import ROOT
from tests.standin import build

BUILT = ROOT / "build" / "cuda_host"
HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
TORCH = "2.13.0"


class UnavailableError(Exception):
    """The lane cannot run here, for the reason given."""


def main(words: list[str]) -> int:
    release, *rest = words if words and words[0][:1].isdigit() else [TORCH, *words]
    try:
        torch, libraries = prepared(release)
    except UnavailableError as reason:
        print(f"the CUDA lane was not run: {reason}")
        return 0
    own = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests/standin/site", torch, ROOT)))}
    own |= {"CUDALENS_STANDIN": str(libraries), "OMP_NUM_THREADS": "1"}
    own |= {"HF_HUB_OFFLINE": "1", "JUPYTER_PLATFORM_DIRS": "1"}
    environment = os.environ | own
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    folder = str(ROOT / "tests" / "cuda_host")
    count = str(min(4, os.cpu_count() or 1))
    # A conftest above asks for a device, and torch refuses CUDA in a fork of who has asked.
    command = [sys.executable, "-m", "pytest", f"--confcutdir={folder}", "-q", "-n", count]
    command += ["--dist", "worksteal", folder, *rest]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def prepared(release: str) -> tuple[Path, Path]:
    """Return where a torch release and its libraries are, installed and built where need be.

    Raises:
        UnavailableError: there is no compiler, or pip finds no CUDA build.
    """
    missing = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing or not sys.platform.startswith("linux"):
        raise UnavailableError(f"needs Linux, gcc and binutils; missing: {' '.join(missing)}")
    torch, headers, libraries = BUILT / release, BUILT / "headers", BUILT / f"{release}-libraries"
    # Three signs: a CPU build of the same number, as "2.13.0+cpu", is another release.
    _install(torch, f"torch==={release}")
    _install(headers, *HEADERS)
    if not (torch / "torch" / "lib" / "libtorch_cuda.so").exists():
        raise UnavailableError(f"torch {release} from pip's index is no CUDA build here")
    sources = [build.HERE / "runtime.c", build.HERE / "build.py"]
    made = libraries / build.RUNTIME
    if not made.exists() or made.stat().st_mtime < max(path.stat().st_mtime for path in sources):
        build.build(torch / "torch", headers, libraries)
    return torch, libraries


def _install(target: Path, *packages: str) -> None:
    if target.exists():
        return
    part = target.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-compile", "--target", str(part), *packages]
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise UnavailableError(f"{' '.join(packages)} cannot be installed: {last}")
    part.rename(target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
