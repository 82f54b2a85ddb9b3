"""The table at the end of a run, the page docs/performance.md and the README's section."""

from __future__ import annotations

from typing import Any

from benchmarks.compiled import GUARDED, PLAIN
from benchmarks.tools import TOOLS

COMMAND = "make bench"
MARKS = ("<!-- costs:begin -->", "<!-- costs:end -->")
SHORT = ("guards", "full", "nan", "anomaly", "debugmode", "debugmode_traces")
LABELS = {tool.name: tool.label for tool in TOOLS}
WORKLOADS = {
    "transformer": "transformer",
    "conv": "conv net",
    "tiny_bert": "tiny BERT",
    "graph": "graph network",
    "policy": "policy gradient",
    "recurrent": "recurrent loop",
    "bert_base": "BERT-base",
    "gpt2_medium": "GPT-2 medium",
}
CPU_ONLY = "CPU only"
"""What a run says of its device where there is no GPU."""
BUDGETS = (
    ("guards only, small transformer step", "guards_step_ratio", 1.03, "×"),
    ("full check, same step", "full_step_ratio", 2.0, "×"),
    ("`%load_ext cudalens`, without importing torch", "load_ext_ms", 50.0, " ms"),
    ("failure to report, slowest autograd graph", "diagnose_max_s", 0.3, " s"),
    ("HTML report", "report_html_kb", 200.0, " kB"),
    ("saved notebook with one report", "notebook_kb", 300.0, " kB"),
    ("peak of device memory, full check to plain", "peak_device_ratio", 1.0, "×"),
)


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _table(head: tuple[str, ...], rows: list[str]) -> str:
    return "\n".join([_row(*head), _row(*["---"] * len(head)), *rows])


def _range(found: dict[str, Any]) -> str:
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def ratios_table(results: dict[str, Any]) -> str:
    """One row a tool, one column a training step."""
    steps = results["steps"]
    rows = []
    for name, label in LABELS.items():
        cells = [
            _range(found["ratios"][name]) if name in found["ratios"] else "–"
            for found in steps.values()
        ]
        if any(cell != "–" for cell in cells):
            rows.append(_row(label, *cells))
    heads = [f"{WORKLOADS[name]} ({found['plain_ms']:.1f} ms)" for name, found in steps.items()]
    return _table(("tool", *heads), rows)


def budget_table(results: dict[str, Any]) -> str:
    """One row a budget: what it is, what was measured."""
    values = {**results, "diagnose_max_s": max(results["diagnose_s"].values())}
    ratios = results["steps"]["transformer"]["ratios"]
    rows = []
    for what, key, budget, unit in BUDGETS:
        verdict = _verdict(values[key], budget, ratios.get(key.removesuffix("_step_ratio")))
        rows.append(_row(what, f"≤ {budget:g}{unit}", f"{values[key]:g}{unit}", verdict))
    return _table(("what", "budget", "measured", ""), rows)


def _verdict(value: float, budget: float, found: dict[str, Any] | None) -> str:
    low, high = (value, value) if found is None else (found["low"], found["high"])
    if high <= budget:
        return "met"
    return "**missed**" if low > budget else f"not certain: {low:g} … {high:g}"


def summary(results: dict[str, Any]) -> str:
    """Return the one table that a run ends with."""
    lines = [ratios_table(results), "", budget_table(results), "", _curves(results)]
    return "\n".join(lines)


def _curves(results: dict[str, Any]) -> str:
    rows = [
        _row(name.replace("_", " "), ", ".join(f"{x}: {y:.3g}" for x, y in points.items()))
        for name, points in results["growth"].items()
    ]
    return _table(("against", "measured"), rows)


def _machine(results: dict[str, Any]) -> str:
    found, measured = results["machine"], results["measured"]
    return (
        f"{found['cores']} cores, {found['device']}, one thread; "
        f"Python {found['python']}, torch {found['torch']}; "
        f"commit {measured['commit']}, {measured['date']}"
    )


def _is_on_gpu(results: dict[str, Any]) -> bool:
    return bool(results["machine"]["device"] != CPU_ONLY)


def _clock(results: dict[str, Any]) -> str:
    return "Wall time" if _is_on_gpu(results) else "CPU time"


def _acting(results: dict[str, Any]) -> str:
    if _is_on_gpu(results):
        return "The guards act on the GPU's tensors"
    return "The guards are forced to act on CPU tensors"


def costs_section(results: dict[str, Any]) -> str:
    """Return the README's short table: the range over all measured steps, not the best figure."""
    steps = results["steps"]
    rows = [_row(LABELS[name], _span(name, steps)) for name in SHORT if _span(name, steps)]
    slowest = max(results["diagnose_s"].values())
    sizes = list(results["diagnose_s"])
    return f"""\
{_clock(results)} of a training step, in times the plain step: the lowest and the highest median of\
 {len(steps)} steps ({", ".join(WORKLOADS[name] for name in steps)}).

{_table(("", "× plain"), rows)}

From the failing call to the finished report {slowest:.2g} s at most, for {sizes[0]} to \
{sizes[-1]} nodes of the autograd graph; `%load_ext cudalens` takes \
{results["load_ext_ms"]:.0f} ms.  Measured by `{COMMAND}` on {_machine(results)}: \
[steps, ranges, growth and memory](docs/performance.md)."""


def _span(name: str, steps: dict[str, Any]) -> str:
    """Return the lowest and the highest median of a tool, empty where it was not measured."""
    found = [step["ratios"][name]["median"] for step in steps.values() if name in step["ratios"]]
    if not found:
        return ""
    low, high = f"{min(found):.2f}", f"{max(found):.2f}"
    return low if low == high else f"{low} to {high}"


def _left_out(results: dict[str, Any]) -> str:
    """Say what was not measured, and with whose layers the models were built."""
    lines = []
    if results["not_installed"]:
        lines.append(f"  Not installed, so not measured: {', '.join(results['not_installed'])}.")
    if any(found["layers_of"] != "transformers" for found in results["steps"].values()):
        lines.append("  The BERT and GPT-2 steps are torch's own layers of that size.")
    return "".join(lines)


def performance_page(results: dict[str, Any]) -> str:
    """Return docs/performance.md."""
    pictures = "\n".join(
        f"![{name.replace('_', ' ')}](performance/{name}.svg)" for name in results["growth"]
    )
    starts = [
        ("`import cudalens`", "import_ms"),
        ("`%load_ext cudalens`", "load_ext_ms"),
        ("first `%%cudacheck`, with torch imported", "first_check_ms"),
        ("each further `%%cudacheck` of an empty cell", "check_ms"),
        ("`cudalens.simulate()`", "simulate_ms"),
    ]
    weights = [
        ("HTML report", "report_html_kb"),
        ("display bundle (text and HTML)", "report_bundle_kb"),
        ("saved notebook with one report, widget state included", "notebook_kb"),
        ("wheel", "wheel_kb"),
    ]
    start_rows = [_row(label, f"{results[key]:.1f}") for label, key in starts if key in results]
    memory = results["memory"]
    kinds = [(kind, memory[kind]) for kind in ("plain", "full")]
    same = "yes" if memory["device_is_same_after_each_step"] else "no"
    return f"""\
# What cudalens costs

Written by `{COMMAND}`; the numbers are also in `benchmarks/results.json`.
Measured on {_machine(results)}.

## Budgets

{budget_table(results)}

## A training step

{_clock(results)} of whole steps (forward, backward, optimizer), in times the plain step: the \
median of interleaved repetitions, each between two plain ones, with the 95 % range of that \
median.  {_acting(results)}.  The control is the plain step measured as if it were a \
tool: it shows the error of the method.  Small steps show overhead at its worst; \
[whole programs](programs.md).

{ratios_table(results)}

DebugMode records and keeps every tensor that it saw; it is opened anew for each step.\
{_left_out(results)}
{_waits(results)}{_compiled(results)}
## Growth

Nothing may grow with what is not looked at.  Seconds are from the \
failing call to the finished report.

{_curves(results)}

{pictures}

## Start

{_table(("", "ms"), start_rows)}

## Weight

{_table(("", "kB"), [_row(label, f"{results[key]:.1f}") for label, key in weights])}

## Memory

{memory["steps"]} training steps of the small transformer on {memory["device"]}.

{_table(("bytes", "plain", "full check"), _memory_rows(kinds))}

The device's memory is the same after each step as without the check: {same}.
"""


def _waits(results: dict[str, Any]) -> str:
    """Return the section on waits of the host, empty where they were not counted."""
    found = results.get("waits_per_step")
    if not found:
        return ""
    rows = [
        _row(LABELS[name], *(f"{counts[name]:g}" for counts in found.values()))
        for name in next(iter(found.values()))
    ]
    table = _table(("", *(WORKLOADS[name] for name in found)), rows)
    return f"""
## Waits of the host

Calls of one step in which the host waits for the device, counted on the rehearsal device: those \
that `torch.cuda.set_sync_debug_mode` speaks of.  The step itself reads its loss, which is one.  \
Deferred guards wait for an event besides, before the optimizer writes.

{table}
"""


def _compiled(results: dict[str, Any]) -> str:
    """Return the section on compiled code, empty where it was not measured."""
    found = results.get("compiled")
    if not found:
        return ""
    columns = ("step_us", "compile_cold_s", "compile_warm_s", "code_kb")
    rows = [
        _row(f"{name}, {kind}", *(f"{steps[kind][column]:g}" for column in columns))
        for name, steps in found.items()
        for kind in (PLAIN, GUARDED)
    ]
    heads = ("", "step, µs", "compiled in, s", "from a warm cache, s", "code, kB")
    same = "yes" if all(steps["same_bits"] for steps in found.values()) else "no"
    return f"""
## Compiled code

Steps that `torch.compile` compiles with inductor for the CPU, without guards and with deferred \
guards inside: CPU time, each kind in processes of its own, the least of the medians.  Loss and \
gradients are the same bit by bit: {same}.

{_table(heads, rows)}
"""


def _memory_rows(kinds: list[tuple[str, dict[str, Any]]]) -> list[str]:
    labels = {
        "peak_device": "peak of device memory",
        "device_growth": "growth of device memory, second half of the steps",
        "peak_resident": "peak of resident memory",
        "resident_growth": "growth of resident memory, second half of the steps",
    }
    return [
        _row(label, *[f"{found[key]:,}" for _, found in kinds]) for key, label in labels.items()
    ]


def with_costs(readme: str, results: dict[str, Any]) -> str:
    """Return the README with the section between the marks made anew.

    Raises:
        ValueError: it does not have both marks.
    """
    before, begin, rest = readme.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not end:
        msg = f"the README has no section between {' and '.join(MARKS)}"
        raise ValueError(msg)
    return f"{before}{begin}\n\n{costs_section(results)}\n\n{end}{after}"
