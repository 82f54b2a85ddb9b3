"""Install the libraries, run their programs every way, and write the table of ``docs/programs.md``.

``make libraries`` runs all; ``NAMES="graph_networks"`` some, with the last outcomes of the others.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from typing import Any

from tests.libraries.one import WAYS

ROOT = Path(__file__).parent.parent.parent
HOME = ROOT / "build" / "libraries"
OUTCOMES = ROOT / "build" / "libraries-outcomes"
PAGE = ROOT / "docs" / "programs.md"
PINS = Path(__file__).with_name("requirements.txt")
MARKS = ("<!-- libraries:begin -->", "<!-- libraries:end -->")
LIMIT_S = 10 * 60
WORKERS = int(os.environ.get("WORKERS", "2"))


def install() -> str:
    """Make the environment where it is missing or its pins changed; return its Python."""
    python, stamp = HOME / "bin" / "python", HOME / ".installed"
    pins = PINS.read_text(encoding="utf-8")
    if not (stamp.exists() and stamp.read_text(encoding="utf-8") == pins):
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(PINS)], check=True)
        # torch stays that of the pins: the project's own needs are few.
        subprocess.run([*pip, "-r", str(PINS), str(ROOT)], check=True)
        stamp.write_text(pins, encoding="utf-8")
    return str(python)


def run(python: str, name: str) -> dict[str, Any]:
    """Return the outcome of one program."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "outcome.json")
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "YOLO_CONFIG_DIR": folder,
            "MPLCONFIGDIR": folder,
        }
        started = time.perf_counter()
        command = [python, "-m", "tests.libraries.one", name, str(file)]
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            error = done.stderr
        except subprocess.TimeoutExpired:
            error = f"more than {LIMIT_S} s"
        if not file.exists():
            return {"ways": {"plain": {"problem": error[-1500:] or "nothing came back"}}}
        outcome: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        outcome["date"] = date.today().isoformat()
        outcome["seconds"] = round(time.perf_counter() - started)
        OUTCOMES.mkdir(parents=True, exist_ok=True)
        (OUTCOMES / f"{name}.json").write_text(json.dumps(outcome), encoding="utf-8")
        return outcome


def row(name: str, outcome: dict[str, Any]) -> str:
    """Return a program's line of the table."""
    ways = outcome["ways"]
    cells = ["not run" if way not in ways else "x" if ways[way]["problem"] else "=" for way in WAYS]
    right = [item for item in outcome.get("mistakes", []) if not item["problem"]]
    mistakes = f"{len(right)} of {len(outcome['mistakes'])}" if outcome.get("mistakes") else ""
    return f"| {outcome.get('title', f'`{name}`')} | {' | '.join([*cells[1:], mistakes])} |"


def page(outcomes: dict[str, dict[str, Any]]) -> str:
    """Return the generated part of the page."""
    versions = sorted({pair for item in outcomes.values() for pair in item.get("versions", [])})
    dates = sorted({item["date"] for item in outcomes.values() if "date" in item})
    names = (f"`--{way}`" if way in ("fast", "deferred", "nan") else way for way in WAYS[1:])
    lines = [
        MARKS[0],
        f"| program | {' | '.join(names)} | mistakes |",
        "| --- " * (len(WAYS) + 1) + "|",
        *(row(name, outcome) for name, outcome in sorted(outcomes.items())),
        "",
        "=: the same bits as without cudalens, no report, nothing more printed. x: not so. "
        "*not run*: not on these versions, or not since a part of cudalens that it shows was "
        "changed. "
        "*script* is `python -m cudalens`, *pytest* is `pytest --cudacheck`. *Mistakes*: of those "
        "that users of the library make, for how many the report names the line, the value and "
        "the bound.",
        "",
        f"Run by `make libraries`, {' to '.join(dates[:1] + dates[1:][-1:])}, Python "
        f"{platform.python_version()}, on the rehearsal device (no GPU): {', '.join(versions)}.",
        MARKS[1],
    ]
    return "\n".join(lines)


def told(name: str, outcome: dict[str, Any]) -> list[str]:
    """Return a program's row, and what is not as it should be."""
    troubles = [(way, found["problem"]) for way, found in outcome["ways"].items()]
    troubles += [(item["title"], item["problem"]) for item in outcome.get("mistakes", [])]
    lines = [f"    {what}: {problem}" for what, problem in troubles if problem]
    return [f"{row(name, outcome)} {outcome.get('seconds')} s", *lines]


def main(names: list[str]) -> int:
    """Run the lane; 1 if a program is not as it is unchecked, or a mistake is told wrongly."""
    python, started = install(), time.perf_counter()
    known = sorted(item.stem for item in Path(__file__).parent.glob("programs/[a-z]*.py"))
    chosen = names or known
    outcomes = {item.stem: json.loads(item.read_text()) for item in OUTCOMES.glob("*.json")}
    outcomes = {name: outcomes[name] for name in known if name in outcomes and name not in chosen}
    outcomes |= {name: {"ways": {}} for name in known if name not in outcomes}
    problems = 0
    with ThreadPoolExecutor(WORKERS) as pool:
        runs = {pool.submit(run, python, name): name for name in chosen}
        for done in as_completed(runs):
            outcomes[runs[done]] = done.result()
            lines = told(runs[done], done.result())
            problems += len(lines) - 1
            print(*lines, sep="\n", flush=True)
    text = PAGE.read_text(encoding="utf-8")
    start, stop = text.index(MARKS[0]), text.index(MARKS[1]) + len(MARKS[1])
    PAGE.write_text(text[:start] + page(outcomes) + text[stop:], encoding="utf-8")
    seconds = time.perf_counter() - started
    print(f"{len(chosen)} programs, {problems} problems, {seconds:.0f} s", flush=True)
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
