"""Writes what the GPU suite saw: docs/verified.md, the assertion texts it met, and one table."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cases import CASES, NOT_TRIGGERED, Case, is_too_old
from extras import STICKY
from faults import FAULTS

from cudalens.core.device_asserts import AssertLine, fold
from cudalens.diagnosis.assert_meanings import folded, meaning_of

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "verified.md"
DATA = ROOT / "cudalens" / "core" / "data"
INVENTORY = ROOT / "tests" / "data" / "device_asserts.json"
HEAD = "# What is verified\n\n"
WRITTEN = "Written by the GPU suite (`make test-gpu`)"
NO_HARDWARE = "Stand-in device (no GPU)"
"""The name of the device of ``tests/standin``."""
NOT_YET = (
    HEAD
    + """The GPU suite (`make test-gpu`) writes this page where there is a GPU. **It has not run \
on one yet: nothing in this project is verified on hardware.** Without a GPU there are two \
substitutes:

- **torch's CUDA build** (`make test-cuda-host`): the wheel from PyPI, unchanged, on a runtime \
library of our own (`tests/standin`). Everything above that library is torch's compiled code: \
allocators, pinned memory, streams, events, CUDA graphs, autograd's device thread, error texts, \
destructors that abort. Kernels do nothing, faults are injected, and which calls of CUDA return \
a sticky error is our reading of its documentation and of public logs. `TORCH=all` \
runs torch 2.8.0, 2.10.0, 2.11.0, 2.13.0 and 2.15.0. Run whole in November 2026, each with the \
tests of its day: all 236 passed with torch 2.8.0, 2.11.0, 2.13.0 and 2.15.0, and 235 with 2.10.0. \
That one has passed alone since.
- **the rehearsal device** (`make test`): our imitation of a GPU, on the CPU build.

| what | on a GPU | on torch's CUDA build | on the rehearsal device |
| --- | --- | --- | --- |
| guards stop the op before its launch, the device stays usable | not yet run | 47 of 47 records | \
44 of 47 records, each with the same report |
| a kernel asserts on a bad value and prints its text | not yet run | no: kernels do nothing | \
imitated, by conditions and texts read in the wheels' kernels |
| a failed kernel's op is named: forward, backward, hook, checkpoint, another stream | not yet run \
| yes, for errors 710, 700 and 719 | yes, for 710 |
| which torch calls raise after that, and their texts | not yet run | 44 calls | the same 44; \
the first matmul fails with `CUBLAS_STATUS_NOT_INITIALIZED`, as on an H200 |
| the report is shown and written before torch aborts on pinned memory | not yet run | yes, also \
in backward and in a rank; with `--fast` only where a guarded call sees the failure | \
nothing aborts there |
| later cells, `explain`, the interpreter's exit, fork, loaders with workers, pytest | not yet run \
| yes | yes |
| transformers' Trainer, Lightning, the notebooks | not yet run | yes, except the multi-GPU \
notebook | yes |
| deferred guards wait at no call | not yet run | yes, waits are counted | yes |
| CUDA graphs capture their checks | not yet run | yes, a bad replay is reported | no graphs |
| out of memory, a device that does not exist | not yet run | yes | yes |
| compiled code, cuBLAS, cuDNN, NCCL, several GPUs | not yet run | no | no |
| time and overhead with a busy queue | not yet measured | not measurable | not measurable |
"""
)
_ASSERTION = re.compile(r"Assertion `(.*)` failed\.")
_NOT_COMPARED = frozenset({"environment", "timing", "history", "limits"})


def differences(seen: dict[str, Any] | None, rehearsed: dict[str, Any] | None) -> list[str]:
    """Name the fields of two reports that differ, as dotted paths with both values.

    The frames of whoever runs a case, a worker, a fork or a test, are left out.
    """
    if seen is None or rehearsed is None:
        return [] if seen is rehearsed else ["one has no report"]
    seen, rehearsed = _within_the_case(seen), _within_the_case(rehearsed)
    found: list[str] = []
    for key in sorted(set(seen) | set(rehearsed)):
        if key not in _NOT_COMPARED:
            _compare(key, seen.get(key), rehearsed.get(key), found)
    return found


def _within_the_case(report: dict[str, Any]) -> dict[str, Any]:
    frames = report.get("frames", [])
    runs = [number for number, frame in enumerate(frames) if frame["function"] == "run_case"]
    return {**report, "frames": frames[runs[0] :]} if runs else report


def _compare(path: str, left: Any, right: Any, found: list[str]) -> None:
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(set(left) | set(right)):
            _compare(f"{path}.{key}", left.get(key), right.get(key), found)
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for number, pair in enumerate(zip(left, right, strict=True)):
            _compare(f"{path}[{number}]", *pair, found)
    elif left != right:
        found.append(f"{path}: {left!r} on the GPU, {right!r} rehearsed")


# --- texts ----------------------------------------------------------------------------------------


def harvest(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the assertion texts that the unguarded runs printed, in the form that is read
    again.
    """
    records = {item["id"]: item for item in json.loads(INVENTORY.read_text(encoding="utf-8"))}
    texts = []
    for record, result in results["bare"].items():
        for line in fold(result.get("stderr", ""))[:1]:
            texts.append(
                {
                    "record": record,
                    "expression": line.expression,
                    "file": line.file,
                    "line": line.line,
                    "function": line.function,
                    "arguments": _arguments(records[record], results["guarded"].get(record)),
                    "sentence": f"its check failed; it needs: {records[record]['condition']}",
                }
            )
    return texts


def _arguments(record: dict[str, Any], guarded: dict[str, Any] | None) -> list[list[str]]:
    """Return the op and the argument that the guard found at fault in the same call."""
    report = (guarded or {}).get("report")
    if report and report["op"]["name"] and report["argument"]:
        return [[report["op"]["name"].rstrip("_"), report["argument"]]]
    names = [name.partition(".")[0].rstrip("_") for name in record["ops"]]
    return [[name, value] for name in dict.fromkeys(names) for value in record["value_args"][:1]]


def unexpected(results: dict[str, Any]) -> dict[str, str]:
    """Name the records whose printed text is not the inventory's, nor one that the case allows.

    Another release may have other words for the same fault of the same argument.
    """
    records = {item["id"]: item for item in json.loads(INVENTORY.read_text(encoding="utf-8"))}
    found = {}
    for case in CASES:
        lines = fold(results["bare"].get(case.record, {}).get("stderr", ""))
        known = [
            item
            for name in (case.record, *case.may_print)
            for item in fold(_joined(records[name]["stderr_text"]))
        ]
        if lines and not any(_is_same_fault(lines[0], item) for item in known):
            found[case.record] = lines[0].expression
    return found


def _joined(texts: list[str] | str) -> str:
    return texts if isinstance(texts, str) else "\n".join(texts)


def _is_same_fault(one: AssertLine, other: AssertLine) -> bool:
    if folded(one.expression) == folded(other.expression):
        return True
    meanings = meaning_of(one), meaning_of(other)
    return meanings[0] is not None and meanings[0] == meanings[1]


# --- pages ----------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """Describe the device.

    Raises:
        RuntimeError: it is the stand-in: nothing that is seen there may be told of hardware.
    """
    import torch

    if torch.cuda.get_device_name() == NO_HARDWARE:
        raise RuntimeError("this page is about hardware: the stand-in is none")
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
        version = driver.stdout.strip().split("\n", maxsplit=1)[0]
    except (OSError, subprocess.SubprocessError):
        version = ""
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "driver": version or "unknown",
        "device": f"{torch.cuda.get_device_name()} (compute capability {capability})",
        "date": time.strftime("%Y-%m-%d"),
    }


def rows(results: dict[str, Any], torch_version: str) -> list[tuple[str, str, str, str]]:
    """Return a row a record: what CUDA did without guards, with them, and the rehearsal's
    verdict.
    """
    found = []
    for case in CASES:
        bare, guarded, rehearsed = (
            results[mode].get(case.record) for mode in ("bare", "guarded", "rehearsed")
        )
        if bare is None:
            major, minor = case.capability
            found.append((case.record, f"needs capability {major}.{minor}", "–", "–"))
            continue
        seen = _bare(bare, case, torch_version)
        stopped = _guarded(guarded) + _foretold(bare, guarded)
        found.append((case.record, seen, stopped, _same(guarded, rehearsed)))
    found += [(name, f"not provoked: {why}", "–", "–") for name, why in NOT_TRIGGERED.items()]
    return found


def _bare(result: dict[str, Any], case: Case, torch_version: str) -> str:
    if "unavailable" in result:
        return result["unavailable"]
    if result["error"] is None and is_too_old(case, torch_version):
        first = ".".join(map(str, case.asserts_since))
        return f"no error: this kernel is known to assert from torch {first} on"
    lines = fold(result.get("stderr", ""))
    said = f"`{lines[0].expression or '(empty)'}`" if lines else "no assertion printed"
    return f"{result['error'] or 'no error'} {result['code'] or ''}: {said}".replace(" :", ":")


def _guarded(result: dict[str, Any] | None) -> str:
    if result is None or "unavailable" in result:
        return (result or {}).get("unavailable", "not run")
    alive = "CUDA alive" if result["alive"] else "CUDA DEAD"
    report = result.get("report")
    return f"{result['error']}, {alive}" if report and report["prevented"] else f"MISSED, {alive}"


def _foretold(bare: dict[str, Any], guarded: dict[str, Any] | None) -> str:
    """Say where the report told of another assertion than the one that CUDA then printed."""
    said = ((guarded or {}).get("report") or {}).get("device_text") or ""
    printed = {folded(line.expression) for line in fold(bare.get("stderr", ""))}
    told = {folded(text) for text in _ASSERTION.findall(said)}
    return ", another text foretold" if printed and told and not printed & told else ""


def _same(guarded: dict[str, Any] | None, rehearsed: dict[str, Any] | None) -> str:
    for result in (guarded, rehearsed):
        if result is None or "unavailable" in result:
            return (result or {}).get("unavailable", "not run")
    assert guarded is not None and rehearsed is not None
    found = differences(guarded.get("report"), rehearsed.get("report"))
    return "; ".join(found) or "equal"


def page(results: dict[str, Any] | None, about: dict[str, str] | None = None) -> str:
    """Return the page: what was seen case by case, or that nothing has run yet."""
    if results is None or about is None:
        return NOT_YET
    sections = (
        (
            "Device-side assertions",
            ("record", "without guards", "with guards", "as rehearsed"),
            rows(results, about["torch"]),
        ),
        ("Failures that no guard prevents", ("failure", "seen"), _told(results["fault"], _fault)),
        (
            "Cells in which nothing is wrong",
            ("cell", "seen"),
            _told(results["harmless"], _harmless),
        ),
        (
            "Training steps of a BERT-base-sized encoder",
            ("run", "seen"),
            _told(results["step"], partial(_step, results["step"].get("plain", {}))),
        ),
        ("After an assert", ("session", "seen"), _told(results.get("extra", {}), _extra)),
        ("Notebooks", ("notebook", "seen"), _told(results["notebook"], _notebook)),
        ("Frameworks", ("framework", "seen"), _told(results.get("framework", {}), _framework)),
        ("A word behind each call", ("question", "seen"), _crumbs(results.get("breadcrumbs", []))),
    )
    lines = [*_with_hardware(results, about).rstrip().splitlines(), ""]
    for title, head, body in sections:
        lines += [f"## {title}", "", *_table(head, body), ""]
    return "\n".join(lines)


MAX_NAMED = 3
"""That many cases that did not go well are named."""
Judge = Callable[[str, dict[str, Any]], bool]


def _of_records(mode: str, is_good: Judge) -> Callable[[dict[str, Any]], str | None]:
    return lambda results: _count(results[mode], is_good, "records")


def _named(results: dict[str, Any]) -> str | None:
    """Return for how many failed kernels the report names the op, where one is to blame."""
    blamed = {item.name: item.op for item in FAULTS if item.is_lost and item.op is not None}
    found = {name: results["fault"][name] for name in blamed if name in results["fault"]}
    return _count(
        found,
        lambda name, seen: (seen["report"] or {"op": {"name": None}})["op"]["name"] == blamed[name],
        "failures: forward, in a hook of backward, on a side stream, by 710 and by 700",
    )


def _as_the_table(results: dict[str, Any]) -> str | None:
    """Return how many calls raise, or do not, as the rehearsal's table says."""
    found = results.get("extra", {}).get(STICKY, {})
    if "unavailable" in found or not found:
        return None
    return f"{found['calls'] - len(found['differ'])} of {found['calls']} raise as in the table"


def _sessions(begins: str | None, what: str) -> Callable[[dict[str, Any]], str | None]:
    """Return what counts the sessions that begin so, or without a word all that have another."""

    def is_asked(name: str) -> bool:
        return name.startswith(begins) if begins else name != STICKY and "pinned" not in name

    return lambda results: _count(
        {name: seen for name, seen in results.get("extra", {}).items() if is_asked(name)},
        lambda name, seen: seen["report"] is not None,
        what,
    )


def _faults(words: str, what: str) -> Callable[[dict[str, Any]], str | None]:
    """Return what counts the faults with one of these words in their name that were reported."""

    def counted(results: dict[str, Any]) -> str | None:
        named = {n: f for n, f in results["fault"].items() if re.search(words, n)}
        return _count(named, lambda name, seen: seen["report"] is not None, what)

    return counted


def _captured(words: str, what: str) -> Callable[[dict[str, Any]], str | None]:
    """Return what counts the tests of ``test_captured_on_gpu.py`` that passed."""

    def counted(results: dict[str, Any]) -> str | None:
        ran = {n: s for n, s in results.get("captured", {}).items() if re.search(words, n)}
        good = sum(said == "passed" for said in ran.values())
        return f"{good} of {len(ran)} {what}" if ran else None

    return counted


def _notebooks(results: dict[str, Any]) -> str | None:
    return _count(
        results["notebook"],
        lambda name, seen: not seen["wrong"] and not seen["rehearsed"],
        "notebooks",
    )


def _frameworks(results: dict[str, Any]) -> str | None:
    """Return how many notebooks and trainings of frameworks went well."""
    trained = _count(
        results.get("framework", {}),
        lambda name, seen: seen["bad"][-1:] == ["ALIVE"] and "MISSED" not in _framework(name, seen),
        "frameworks stop the bad label",
    )
    return ", ".join(filter(None, [trained, _notebooks(results)])) or None


def _compiled(results: dict[str, Any]) -> str | None:
    said = [
        _faults("compiled", "failures in compiled code reported")(results),
        _captured("compiled", "tests of compiled code passed")(results),
    ]
    known = ", ".join(filter(None, said))
    return f"{known}; NCCL and several GPUs not yet run" if known else None


_ON_GPU: dict[str, Callable[[dict[str, Any]], str | None]] = {
    "guards stop the op": _of_records("guarded", lambda name, seen: "CUDA alive" in _guarded(seen)),
    "a kernel asserts": _of_records("bare", lambda name, seen: bool(fold(seen.get("stderr", "")))),
    "a failed kernel's op": _named,
    "which torch calls raise after that": _as_the_table,
    "the report is shown and written before torch aborts": _sessions("pinned", "sessions"),
    "later cells": _sessions(None, "sessions of later cells and `explain`; the rest not yet run"),
    "transformers' Trainer": _frameworks,
    "deferred guards wait": _captured("a_wait_leaves", "tests"),
    "CUDA graphs capture": _captured("graph|capture", "tests"),
    "out of memory": _faults("out of memory|ordinal", "reported"),
    "compiled code": _compiled,
    "time and overhead": lambda results: _times_plain(results),
}
"""What was seen on a GPU, by how a row of the table begins; ``None`` where it was not asked."""


def _with_hardware(results: dict[str, Any], about: dict[str, str]) -> str:
    """Return the page's beginning with the column for a GPU filled in, and the others as they are.

    What the run did not ask stays ``not yet run``.
    """
    intro, mark, table = NOT_YET.partition("| what |")
    substitutes = intro[intro.index("Without a GPU") :]
    where = (
        f"{WRITTEN} on {about['date']}: torch {about['torch']}, CUDA {about['cuda']}, driver "
        f"{about['driver']}, {about['device']}. Nothing else is claimed for a GPU."
    )
    lines = []
    for row in (mark + table).splitlines():
        what, on_gpu, *others = row.strip("|").split(" | ")
        found = next((tell(results) for key, tell in _ON_GPU.items() if key in what), None)
        if found is not None:
            on_gpu = found
        lines.append("|" + " | ".join((what, on_gpu, *others)) + "|")
    return f"{HEAD}{where} {substitutes}" + "\n".join(lines) + "\n"


def _count(cases: dict[str, Any], is_good: Judge, what: str) -> str | None:
    """Return how many of the cases that were begun went well, ``None`` where none was.

    One whose process ended did not go well.
    """
    ran = {n: f for n, f in cases.items() if "unavailable" not in f or f.get("is_broken")}
    if not ran:
        return None
    bad = [name for name, f in ran.items() if "unavailable" in f or not is_good(name, f)]
    others = f"; not: {', '.join(bad)}" if 0 < len(bad) <= MAX_NAMED else ""
    return f"{len(ran) - len(bad)} of {len(ran)} {what}{others}"


def _times_plain(results: dict[str, Any]) -> str | None:
    """Return what each way costs, and how far two plain runs are apart."""
    in_turn = [f for f in results.get("step", {}).values() if "medians" in f]
    if in_turn:
        return "a BERT-base step, times plain: " + "; ".join(map(_ratios, in_turn))
    ran = {n: f for n, f in results.get("step", {}).items() if "seconds" in f and "float" not in n}
    plain = ran.pop("plain", None)
    if plain is None or not ran:
        return None
    said = [f"{name} {found['seconds'] / plain['seconds']:.2f}" for name, found in ran.items()]
    return f"a BERT-base step, each way in a process of its own, times plain: {', '.join(said)}"


def _ratios(result: dict[str, Any]) -> str:
    """Return what steps cost that were taken in turn in one process."""
    plain = result["medians"]["plain"]
    said = [
        f"{way} {taken / plain:.2f}" for way, taken in result["medians"].items() if way != "plain"
    ]
    return f"{result['size']} ({plain * 1000:.0f} ms): {', '.join(said)}"


def _extra(name: str, result: dict[str, Any]) -> str:
    if name == STICKY:
        differ = "; ".join(f"{call}: {text}" for call, text in result["differ"].items())
        return f"{result['calls']} calls asked; other than in the table: {differ or 'none'}"
    report = result["report"]
    said = report["headline"] if report is not None else "NO REPORT"
    return f"{len(result['cells'])} cells run: {said}"


def _told(
    results: dict[str, Any], tell: Callable[[str, dict[str, Any]], str]
) -> list[tuple[str, str]]:
    return [
        (name, f"not run: {found['unavailable']}" if "unavailable" in found else tell(name, found))
        for name, found in results.items()
    ]


def _fault(name: str, result: dict[str, Any]) -> str:
    report = result["report"]
    if report is None:
        return f"{result['error']}: {result['message']}: no report"
    named = report["op"]["name"] or "no op named"
    return f"{report['kind']}, {report['certainty']}, {named}: {report['headline']}"


def _harmless(name: str, result: dict[str, Any]) -> str:
    said = [
        f"{what} {text}"
        for what, text in (("ERROR", result["error"]), ("FALSE REPORT", result["report"]))
        if text
    ]
    return "; ".join([*said, *result["troubles"]]) or "nothing reported"


def _notebook(name: str, result: dict[str, Any]) -> str:
    if result["rehearsed"]:
        return "ran on the REHEARSAL DEVICE"
    wrong = len(result["wrong"])
    return f"{wrong} of {result['cells']} cells WRONG" if wrong else f"{result['cells']} cells run"


def _framework(name: str, result: dict[str, Any]) -> str:
    raised = [line.removeprefix("RAISED ") for line in result["bad"] if line.startswith("RAISED")]
    ended = "CUDA alive" if result["bad"][-1:] == ["ALIVE"] else "CUDA DEAD"
    return f"trains with good labels; with a bad one: {'; '.join(raised) or 'MISSED'}, {ended}"


def _crumbs(answers: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return a row a question about words that a stream writes behind each call."""
    asked: dict[str, list[dict[str, Any]]] = {}
    for answer in answers:
        for question, found in answer.items():
            asked.setdefault(question, []).append(found)
    said = []
    for question, found in asked.items():
        if question == "cost":
            said += [
                (f"cost: {way}", f"{taken['issued_us']:.1f} µs to issue, {taken['done_us']:.1f} µs")
                for way, taken in found[0].items()
            ]
            continue
        good = sum(set(item.get("said", [])) == {item.get("finished")} for item in found)
        names = f"names the last finished call without a wait: {good} of {len(found)}"
        said.append((question, names))
    return said


def _step(plain: dict[str, Any], name: str, result: dict[str, Any]) -> str:
    if "medians" in result:
        return _ratios(result)
    least = f" (least {result['least']:.4f})" if "least" in result else ""
    memory = f"peak {result['peak_bytes'] / 2**20:.0f} MiB"
    said = [f"{result['seconds']:.4f} s a step{least}, {memory}"]
    if "float" not in name and name != "plain" and "losses" in plain:
        is_equal = result["losses"] == plain["losses"]
        said.append("losses bit-equal" if is_equal else "losses DIFFER")
        said.append(f"{result['seconds'] / plain['seconds']:.2f} times plain")
    if "stopped" in result:
        said.append(f"bad label: {result['stopped'] or 'MISSED'}")
    return ", ".join(said)


def _table(head: tuple[str, ...], body: list[Any]) -> list[str]:
    return [
        f"| {' | '.join(head)} |",
        f"|{' --- |' * len(head)}",
        *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in body),
    ]


def texts(results: dict[str, Any], about: dict[str, str]) -> tuple[str, str]:
    """Return name and content of the file of the texts that this torch's kernels printed."""
    release = about["torch"].partition("+")[0]
    found = {"torch": about["torch"], "device": about["device"], "texts": harvest(results)}
    content = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    return f"assert_texts_{release}.json", content


def write(results: dict[str, Any], about: dict[str, str], *targets: Path) -> None:
    """Write the page, and the texts of this torch version, below each target."""
    name, content = texts(results, about)
    for target in targets:
        for file, text in (
            (target / PAGE.relative_to(ROOT), page(results, about)),
            (target / DATA.relative_to(ROOT) / name, content),
        ):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
