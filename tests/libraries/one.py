"""One program of the lane, every way: the libraries are imported once, each way is a fork of that.

``python -m tests.libraries.one NAME FILE`` writes the outcome as JSON.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

PROGRAMS = "tests.libraries.programs"
CHECKS: dict[str, dict[str, Any]] = {
    "check": {},
    "fast": {"fast": True},
    "deferred": {"deferred": True},
    "nan": {"nan": True},
}
"""Options of ``cudalens.check`` by the name of the column."""
WAYS = ("plain", *CHECKS, "script", "pytest")
_TEST = """
def test_program():
    from {module} import program
    from tests.libraries.one import note, digest
    note(digest(program()))
"""
_SCRIPT = """
from {module} import program
from tests.libraries.one import note, digest
note(digest(program()))
"""
_RESULT = "CUDALENS_LANE_RESULT"


def note(text: str) -> None:
    """Leave the digest of a result where the parent reads it."""
    Path(os.environ[_RESULT]).write_text(text, encoding="utf-8")


def digest(value: object) -> str:
    """Return a hash of all bytes that a result holds."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: object) -> None:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        host = value.detach().cpu().contiguous()
        found.update(f"{host.dtype}{tuple(host.shape)}".encode())
        found.update(host.reshape(-1).view(torch.uint8).numpy().tobytes() if host.numel() else b"")
    elif isinstance(value, np.ndarray):
        found.update(f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict):
        for key in value:
            found.update(repr(key).encode())
            _feed(found, value[key])
    elif isinstance(value, list | tuple):
        found.update(f"{len(value)} items".encode())
        for item in value:
            _feed(found, item)
    else:
        found.update(repr(value).encode())


def seed() -> None:
    """Let every way start from the same random state."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def run_plain(module: ModuleType) -> str | None:
    """Run the program unchecked."""
    note(digest(module.program()))
    return None


def run_checked(module: ModuleType, options: dict[str, Any]) -> str | None:
    """Run the program in a checked block; return the headline of a report."""
    import cudalens

    with cudalens.check(**options) as session:
        note(digest(module.program()))
    return None if session.report is None else session.report.headline


def run_script(module: ModuleType) -> str | None:
    """Run the program with ``python -m cudalens``, in this process."""
    from cudalens.__main__ import main

    Path("script.py").write_text(_SCRIPT.format(module=module.__name__), encoding="utf-8")
    status = main(["script.py"])
    return f"exit status {status}" if status else None


def run_pytest(module: ModuleType) -> str | None:
    """Run the program as a test under ``--cudacheck``."""
    import pytest

    Path("test_it.py").write_text(_TEST.format(module=module.__name__), encoding="utf-8")
    # The plugin is found by its entry point, as the environment has cudalens installed.
    options = ["-q", "--cudacheck", "-p", "no:warnings"]
    log = Path("pytest.log")
    with log.open("w", encoding="utf-8") as file, _sent_to(file.fileno()):
        status = pytest.main([*options, "--rootdir=.", "-c", os.devnull, "test_it.py"])
    return log.read_text(encoding="utf-8")[-2000:] if status else None


class _sent_to:
    """Send what a block prints elsewhere."""

    def __init__(self, target: int) -> None:
        self.target = target

    def __enter__(self) -> None:
        sys.stdout.flush()
        self.kept = os.dup(1)
        os.dup2(self.target, 1)

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        os.dup2(self.kept, 1)
        os.close(self.kept)


def in_fork(run: Callable[[], str | None]) -> dict[str, Any]:
    """Run in a fork, in an empty folder; return digest, report or error, output and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        result, said = Path(folder, "result"), Path(folder, "said")
        printed = Path(folder, "printed")
        Path(folder, "work").mkdir()
        sys.stdout.flush()
        started = time.perf_counter()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                out = os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
                os.dup2(out, 1)
                os.dup2(out, 2)
                os.chdir(Path(folder, "work"))
                os.environ[_RESULT] = str(result)
                from cudalens import simulate

                simulate()
                os.ftruncate(out, 0)
                seed()
                said.write_text(run() or "", encoding="utf-8")
                status = 0
            except BaseException:
                said.write_text(_ending(traceback.format_exc()), encoding="utf-8")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        return {
            "digest": result.read_text(encoding="utf-8") if result.exists() else None,
            "said": said.read_text(encoding="utf-8") if said.exists() else f"status {status}",
            "printed": printed.read_text(encoding="utf-8", errors="replace").replace(folder, ""),
            "seconds": round(time.perf_counter() - started, 1),
        }


def _ending(text: str) -> str:
    """Return the last error of a traceback, with its first line in front."""
    lines = text.splitlines()
    last = max(at for at, line in enumerate(lines) if line[:1].strip())
    return "\n".join(lines[last : last + 6])


# Times, addresses and rates differ from run to run; so does how often a bar of progress is drawn.
_VARYING = re.compile(
    r"0x[0-9a-f]+|\[[^\]]*(it/s|s/it)[^\]]*\]|\d+(\.\d+)?(e-?\d+)?|[-/\\|\s\u2500-\u259f]"
)


def printed_more(way: str, plain: str) -> list[str]:
    """Return the lines that a checked run prints and the unchecked one does not."""
    known = {_VARYING.sub("", line) for line in plain.splitlines()}
    return [line for line in way.splitlines() if _VARYING.sub("", line) not in known]


def outcome(module: ModuleType) -> dict[str, Any]:
    """Run a program every way and compare with the unchecked run."""
    plain = in_fork(lambda: run_plain(module))
    ways: dict[str, Any] = {"plain": {"seconds": plain["seconds"], "problem": plain["said"]}}
    if plain["digest"] is None:
        ways["plain"]["problem"] = plain["said"] or "no result"
        return ways
    runs: dict[str, Callable[[], str | None]] = {
        name: lambda options=options: run_checked(module, options)  # type: ignore[misc]
        for name, options in CHECKS.items()
    }
    runs |= {"script": lambda: run_script(module), "pytest": lambda: run_pytest(module)}
    for name, run in runs.items():
        way = in_fork(run)
        problems = [way["said"]]
        if way["digest"] != plain["digest"]:
            problems.append("other bits" if way["digest"] else "no result")
        problems += printed_more(way["printed"], plain["printed"])[:3]
        ways[name] = {"seconds": way["seconds"], "problem": "\n".join(filter(None, problems))}
    is_other = any("other bits" in item["problem"] for item in ways.values())
    if is_other and in_fork(lambda: run_plain(module))["digest"] != plain["digest"]:
        ways["plain"]["problem"] = "two unchecked runs differ"
    return ways


def main(name: str, file: str) -> None:
    """Write the outcome of one program, and of the mistakes that belong to it."""
    import torch

    from tests.libraries.mistakes import MISTAKES, judged
    from tests.libraries.second_mistakes import SECOND_MISTAKES
    from tests.libraries.vision_ops import define_where_missing

    # Its process tells of locks that a fork leaves behind, and must not tell it in a fork's output.
    resource_tracker.ensure_running()
    define_where_missing()
    module = importlib.import_module(f"{PROGRAMS}.{name}")
    torch.set_num_threads(1)
    mistakes = [
        {"title": item.title, "problem": in_fork(lambda item=item: judged(item))["said"]}  # type: ignore[misc]
        for item in (*MISTAKES, *SECOND_MISTAKES)
        if item.program == name
    ]
    found = {
        "title": f"`{name}`: {(module.__doc__ or '').strip()}",
        "versions": [f"{item} {version(item)}" for item in ("torch", *module.LIBRARIES)],
        "ways": outcome(module),
        "mistakes": mistakes,
    }
    Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
