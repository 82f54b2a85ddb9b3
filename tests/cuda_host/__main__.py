"""Runs the CUDA lane: ``python -m tests.cuda_host [TORCH … | all] [WORDS FOR PYTEST …]``.

Installs torch's CUDA wheel alone below ``build/cuda_host`` and builds the stand-in's libraries
there.  Where one of the two cannot be had the lane fails, and says why: a run that tried nothing
must not look like one in which all is well.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.processes import ROOT
from tests.standin import build

BUILT = ROOT / "build" / "cuda_host"
HEADERS = {
    12: ("nvidia-cuda-runtime-cu12==12.8.90", "nvidia-cuda-nvcc-cu12==12.8.93"),
    13: ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"),
}
"""CUDA's headers and its runtime library, by the major release that torch was built with."""
RELEASES = ("2.8.0", "2.10.0", "2.11.0", "2.13.0", "2.15.0")
"""What people have, and the newest; ``make compat`` runs them all.  Torch 2.8 needs g++, too: it
gives Python no kernel of an op, and a module is built that does."""
IN_CI = ("2.11.0", "2.13.0")
"""The newest that the project is developed with, and the older one that Colab has: its allocator
has no setting that catches what is freed after a fault, and it uses other words."""
NOT_RUN = 3
"""The exit status where the lane could not be run."""


class UnavailableError(Exception):
    """The lane cannot run here, for the reason given."""


def main(words: list[str]) -> int:
    """Run the lane on each release; the worst exit status is the result."""
    releases = [word for word in words if re.match(r"\d+\.\d+", word)]
    rest = [word for word in words if word not in (*releases, "all")]
    if "all" in words:
        releases = [*RELEASES]
    return max(_run(release, rest) for release in releases or IN_CI)


def _run(release: str, rest: list[str]) -> int:
    try:
        torch, libraries = prepared(release)
    except UnavailableError as reason:
        print(f"THE CUDA LANE WAS NOT RUN on torch {release}: {reason}")
        return NOT_RUN
    print(f"the CUDA lane on torch {release}", flush=True)
    own = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests/standin/site", torch, ROOT)))}
    own |= {"CUDALENS_STANDIN": str(libraries), "OMP_NUM_THREADS": "1"}
    own |= {"HF_HUB_OFFLINE": "1", "JUPYTER_PLATFORM_DIRS": "1"}
    environment = os.environ | own
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    folder = str(ROOT / "tests" / "cuda_host")
    count = str(min(4, os.cpu_count() or 1))
    # A conftest above asks for a device, and torch refuses CUDA in a fork of who has asked.
    command = [sys.executable, "-m", "pytest", f"--confcutdir={folder}", "-q", "-n", count]
    command += ["--dist", "worksteal", *([] if _names_tests(rest) else [folder]), *rest]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def _names_tests(words: list[str]) -> bool:
    return any(word.startswith("tests/") for word in words)


def prepared(release: str) -> tuple[Path, Path]:
    """Return where a torch release and its libraries are, installed and built where need be.

    Raises:
        UnavailableError: there is no compiler, or pip finds no CUDA build.
    """
    missing = [tool for tool in ("gcc", "nm", "readelf") if shutil.which(tool) is None]
    if missing or not sys.platform.startswith("linux"):
        raise UnavailableError(f"needs Linux, gcc and binutils; missing: {' '.join(missing)}")
    torch, libraries = BUILT / release, BUILT / f"{release}-libraries"
    # Three signs: a CPU build of the same number, as "2.13.0+cpu", is another release.
    _install(torch, f"torch==={release}")
    if not (torch / "torch" / "lib" / "libtorch_cuda.so").exists():
        raise UnavailableError(f"torch {release} from pip's index is no CUDA build here")
    major = build.cuda_of(torch / "torch")
    headers = BUILT / f"headers{major}"
    _install(headers, *HEADERS[major])
    sources = [build.HERE / name for name in ("runtime.c", "build.py", "kernels.cpp")]
    made = libraries / build.runtime(major)
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
