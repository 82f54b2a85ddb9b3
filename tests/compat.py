"""Run the tests on other Pythons and torches than those of `make setup`, and write the outcome.

``make compat`` runs every lane; ``LANES="3.12:2.8.0"`` some.  Each has an environment of its own
under ``build/compat``, of 3 GB: torch's wheel alone, with empty libraries instead of NVIDIA's.  A
lane that cannot run here, for want of the interpreter or of a package, gets its reason.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tests.standin.build import build_stubs

ROOT = Path(__file__).parent.parent
HOME = ROOT / "build" / "compat"
PAGE = ROOT / "docs" / "compatibility.md"
LANES = ("3.12:2.6.0", "3.12:2.8.0", "3.12:2.10.0", "3.13:2.15.0", "3.14:2.15.0")
"""Python and torch: the oldest for the guards, the oldest for the rehearsal device, the newest."""
INSTALL_LIMIT_S = 15 * 60
TEST_LIMIT_S = 90 * 60
MARKS = ("<!-- lanes:begin -->", "<!-- lanes:end -->")
"""What the page says beside the table stays."""
HEAD = "| Python | torch | run on | outcome |\n| --- | --- | --- | --- |"


_NVIDIA = re.compile("Requires-Dist: (nvidia|cuda|triton)")


class NotRunError(Exception):
    """The lane cannot run here; the text says why."""


@dataclass(frozen=True)
class Lane:
    """A Python and a torch."""

    python: str
    torch: str

    @property
    def folder(self) -> Path:
        return HOME / f"python{self.python}-torch{self.torch}"

    @property
    def own(self) -> str:
        return str(self.folder / "bin" / "python")

    def interpreter(self) -> str:
        """Return an interpreter of this version: from the path, or one that pyenv has installed."""
        pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
        installed = sorted(pyenv.glob(f"versions/{self.python}.*/bin/python"))
        for path in (sys.executable, shutil.which(f"python{self.python}"), *map(str, installed)):
            if path and self.python == _version_of(path):
                return path
        raise NotRunError(f"there is no Python {self.python} here")

    def install(self) -> None:
        """Make the environment; what is there already and whole is kept."""
        self._forget_halves()
        if not any(self.folder.glob("lib/python*/site-packages/pip-*.dist-info")):
            _call([self.interpreter(), "-m", "venv", str(self.folder)], INSTALL_LIMIT_S)
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        others = [line for line in pins if not line.startswith("torch==")]
        constraints = self.folder / "constraints.txt"
        constraints.write_text("\n".join([*others, f"torch=={self.torch}", ""]), encoding="utf-8")
        pip = [self.own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _call([*pip, "--no-deps", f"torch=={self.torch}"], INSTALL_LIMIT_S)
        self._do_without_nvidia()
        _call([*pip, "-c", str(constraints), "-e", f"{ROOT}[test]"], INSTALL_LIMIT_S)

    def _forget_halves(self) -> None:
        """Let pip install again what it was stopped at: its last file says that it is done."""
        for metadata in self.folder.glob("lib/python*/site-packages/*.dist-info"):
            if not (metadata / "INSTALLER").exists():
                shutil.rmtree(metadata)

    def _do_without_nvidia(self) -> None:
        """Let torch ask for none of NVIDIA's packages, and find empty libraries in their place."""
        (packages,) = self.folder.glob("lib/python*/site-packages")
        (metadata,) = packages.glob("torch-*.dist-info/METADATA")
        lines = metadata.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if not _NVIDIA.match(line)]
        metadata.write_text("".join(kept), encoding="utf-8")
        build_stubs(packages / "torch", packages / "torch" / "lib")

    def run_tests(self, workers: str) -> str:
        """Run the tests and return pytest's last line."""
        command = [self.own, "-m", "pytest", "-q", "-n", workers, "--dist", "worksteal"]
        command += ["-p", "no:cacheprovider", "-m", "not gpu and not browser", "tests"]
        log = self.folder / "tests.log"
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUDALENS_TESTS": "quick"}
        with log.open("wb") as out:
            try:
                subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=out, stderr=out,
                    timeout=TEST_LIMIT_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return f"not finished within {TEST_LIMIT_S // 60} minutes"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() or ["nothing"]
        outcome = lines[-1].strip("= ").partition(" in ")[0]
        return re.sub(r", \d+ warnings?", "", outcome)


def _version_of(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _call(command: list[str], limit_s: float) -> None:
    # A constraint of this machine's would ask for its own torch.
    alone = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    try:
        subprocess.run(
            command, check=True, timeout=limit_s, capture_output=True, text=True, env=alone
        )
    except subprocess.TimeoutExpired:
        raise NotRunError(f"not installed within {limit_s / 60:.0f} minutes") from None
    except subprocess.CalledProcessError as error:
        reasons = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        raise NotRunError(f"cannot be installed: {(reasons or ['no reason given'])[0]}") from None


def main(words: list[str]) -> int:
    """Run the lanes, print each outcome, and write it into the page."""
    HOME.mkdir(parents=True, exist_ok=True)
    is_good = True
    workers = os.environ.get("WORKERS") or str((os.cpu_count() or 1) + 1)
    for word in words or LANES:
        lane, began = Lane(*word.split(":")), time.monotonic()
        try:
            lane.install()
            outcome = lane.run_tests(workers)
            is_bad = "failed" in outcome or "error" in outcome or "passed" not in outcome
        except NotRunError as error:
            outcome, is_bad = f"not run: {error}", False
        is_good = is_good and not is_bad
        print(f"{word}: {outcome}  {time.monotonic() - began:.0f} s", flush=True)
        page = with_outcome(PAGE.read_text(encoding="utf-8"), lane, outcome, date.today())
        PAGE.write_text(page, encoding="utf-8")
    return 0 if is_good else 1


def with_outcome(page: str, lane: Lane, outcome: str, day: date) -> str:
    """Return the page with the outcome of a lane in the place of its last one."""
    before, rest = page.split(MARKS[0])
    table, after = rest.split(MARKS[1])
    start = f"| {lane.python} | {lane.torch} |"
    rows = [row for row in table.split("\n") if re.match(r"\| \d", row) and start not in row]
    rows.append(f"{start} {day} | {outcome} |")
    rows.sort(key=lambda row: [int(number) for number in re.findall(r"\d+", row)[:5]])
    return "\n".join([before + MARKS[0], "", HEAD, *rows, "", MARKS[1] + after])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
