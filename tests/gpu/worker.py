"""Runs one case in a process of its own and prints what came of it as one line of JSON.

``python worker.py bare|guarded|rehearsed RECORD``, or ``python worker.py
fault|harmless|extra|step|notebook|framework NAME``.  CUDA's own lines go to standard error, which
the caller reads.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

RESULT = "RESULT "


def run_case(record: str, *, guarded: bool, device: str = "cuda") -> dict[str, Any]:
    """Run a record's trigger on a device; with guards under a full check."""
    import torch
    from cases import CASES, namespace

    from cudalens.source.files import CELLS

    case = next(item for item in CASES if item.record == record)
    names = namespace()
    CELLS.register("<case>", 1, case.code.splitlines())  # so that the report knows its text
    code = compile(case.code, "<case>", "exec")
    if not guarded:
        found = _outcome(lambda: _execute(code, names, device))
        if found["error"] is not None and device == "cuda":
            # The driver prints on waiting: an error that a launch noticed may come before the text.
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize()
        return found

    import cudalens

    session = cudalens.check()

    def checked() -> None:
        with session:
            _execute(code, names, device)

    found = _outcome(checked)
    found["report"] = session.report.to_dict() if session.report is not None else None
    found["alive"] = _is_alive(torch, device)
    return found


def _execute(code: Any, names: dict[str, Any], device: str) -> None:
    import torch

    with torch.device(device):
        exec(code, names)
    if device == "cuda":
        torch.cuda.synchronize()


def _outcome(run: Any) -> dict[str, Any]:
    try:
        run()
    except Exception as error:
        return {
            "error": type(error).__name__,
            "message": str(error).split("\n", 1)[0],
            "code": getattr(error, "error_code", None),
        }
    return {"error": None, "message": None, "code": None}


def _is_alive(torch: Any, device: str) -> bool:
    try:
        leaf = torch.ones(3, device=device, requires_grad=True)
        (leaf * 2).sum().backward()
        return leaf.grad is not None and leaf.grad.tolist() == [2.0, 2.0, 2.0]
    except RuntimeError:
        return False


def main(mode: str, name: str) -> dict[str, Any]:
    if mode == "fault":
        from faults import run_fault

        return run_fault(name)
    if mode == "harmless":
        from harmless import run_harmless

        return run_harmless(name)
    if mode == "notebook":
        from notebook_runs import run_notebook

        return run_notebook(name)
    if mode == "extra":
        from extras import run_extra

        return run_extra(name)
    if mode == "step":
        from steps import run_step

        return run_step(name)
    if mode == "framework":
        from frameworks import run_framework

        return run_framework(name)
    with contextlib.ExitStack() as stack:
        if mode == "rehearsed":
            from cudalens import simulate
            from cudalens.simulate.asserts import NOT_SIMULATED

            if name in NOT_SIMULATED:
                return {"unavailable": NOT_SIMULATED[name]}
            try:
                stack.enter_context(simulate.start(announce=False))
            except simulate.SimulationError as error:
                return {"unavailable": str(error)}
        # One line for both: the frames of their reports are compared too.
        return run_case(name, guarded=mode != "bare")


if __name__ == "__main__":
    # On a line of its own, whatever a kernel printed before it.
    print("\n" + RESULT + json.dumps(main(*sys.argv[1:3])), flush=True)
