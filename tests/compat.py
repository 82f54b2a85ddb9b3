"""Run the tests on other Pythons and torches than those of `make setup`, and write what was seen.

``make compat`` runs every lane; ``LANES="3.12:2.14.1"`` some.  Each has an environment of its own
under ``build/compat``, of 2 to 7 GB with torch's CUDA libraries.  A lane that cannot run here, for
want of the interpreter or of a package, is written down with its reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOME = ROOT / "build" / "compat"
PAGE = ROOT / "docs" / "compatibility.md"
LANES = ("3.11:2.11.0", "3.12:2.14.1", "3.13:2.13.0")
"""Python and torch: the oldest torch, the newest that the rehearsal device knows, each Python."""
INSTALL_LIMIT_S = 15 * 60
TEST_LIMIT_S = 30 * 60
MARKS = ("<!-- lanes:begin -->", "<!-- lanes:end -->")
"""What the page says beside the table stays."""
HEAD = "| Python | torch | what the tests said |\n| --- | --- | --- |"


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
        for found in (sys.executable, shutil.which(f"python{self.python}"), *map(str, installed)):
            if found and self.python == _version_of(found):
                return found
        raise NotRunError(f"there is no Python {self.python} here")

    def install(self) -> None:
        """Make the environment; what is there already is kept."""
        if not Path(self.own).exists():
            _call([self.interpreter(), "-m", "venv", str(self.folder)], INSTALL_LIMIT_S)
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        others = [line for line in pins if not line.startswith("torch==")]
        constraints = self.folder / "constraints.txt"
        constraints.write_text("\n".join([*others, f"torch=={self.torch}", ""]), encoding="utf-8")
        pip = [self.own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _call([*pip, "-c", str(constraints), "-e", f"{ROOT}[test]"], INSTALL_LIMIT_S)

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
        return lines[-1].strip("= ").partition(" in ")[0]


def _version_of(python: str) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _call(command: list[str], limit_s: float) -> None:
    try:
        subprocess.run(command, check=True, timeout=limit_s, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        raise NotRunError(f"not installed within {limit_s / 60:.0f} minutes") from None
    except subprocess.CalledProcessError as error:
        reasons = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
        raise NotRunError(f"cannot be installed: {(reasons or ['no reason given'])[0]}") from None


def main(words: list[str]) -> int:
    """Run the lanes, print what each said, and write the page when all were asked for."""
    HOME.mkdir(parents=True, exist_ok=True)
    rows, is_good = [], True
    workers = str((os.cpu_count() or 1) + 1)
    for word in words or LANES:
        lane, began = Lane(*word.split(":")), time.monotonic()
        try:
            lane.install()
            said = lane.run_tests(workers)
            is_good = is_good and "passed" in said and "failed" not in said and "error" not in said
        except NotRunError as error:
            said = f"not run: {error}"
        rows.append(f"| {lane.python} | {lane.torch} | {said} |")
        print(f"{rows[-1]}  {time.monotonic() - began:.0f} s", flush=True)
    if not words:
        before, rest = PAGE.read_text(encoding="utf-8").split(MARKS[0])
        table = "\n".join([MARKS[0], "", HEAD, *rows, "", MARKS[1]])
        PAGE.write_text(before + table + rest.partition(MARKS[1])[2], encoding="utf-8")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
