"""The table at the end of a run, the page docs/performance.md and the README's sentence."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.compiled import GUARDED, PLAIN
from benchmarks.tools import TOOLS

COMMAND = "make bench"
MARKS = ("<!-- costs:begin -->", "<!-- costs:end -->")
CHART = {
    "guards": "guards only",
    "full": "%%cudacheck",
    "nan": "%%cudacheck --nan",
    "anomaly": "detect_anomaly()",
    "debugmode": "DebugMode()",
}
"""What the chart compares, with the names of its legend."""
COLORS = ("#93c5fd", "#2563eb", "#1e3a8a", "#d1d5db", "#6b7280")
STYLE = {
    # The same picture for the same numbers, so that a new run changes only what was measured.
    "svg.hashsalt": "cudalens",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
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
    return _table(("by", "measured"), rows)


def _machine(results: dict[str, Any]) -> str:
    found, measured = results["machine"], results["measured"]
    return (
        f"{found['cores']} cores, {found['device']}, one thread; "
        f"Python {found['python']}, torch {found['torch']}; {measured['date']}"
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
    """Return the README's sentence: the median over the measured steps, with the extremes."""
    steps, device = results["steps"], results["machine"]["device"]
    return (
        f"A checked cell runs about {_span('full', steps)}. With the value checks alone "
        f"(`cudalens.install()`) a program runs about {_span('guards', steps)}. Measured on "
        f"{'a CPU' if device == CPU_ONLY else f'one {device}'} "
        f"([what it costs](docs/performance.md), {results['measured']['date']})."
    )


def _span(name: str, steps: dict[str, Any]) -> str:
    """Return the median of a tool over all steps, and the lowest and the highest step."""
    found = [step["ratios"][name]["median"] for step in steps.values() if name in step["ratios"]]
    extremes = f"{min(found):.1f} to {max(found):.1f} on {len(found)} models"
    return f"{statistics.median(found):.1f} times slower ({extremes})"


def draw_costs(results: dict[str, Any], folder: Path) -> Path:
    """Draw the slowdown of each model's step as bars into ``costs.svg`` and return its path."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("svg")
    steps = results["steps"]
    shown = [name for name in CHART if all(name in step["ratios"] for step in steps.values())]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(shown)
        for at, name in enumerate(shown):
            values = [step["ratios"][name]["median"] for step in steps.values()]
            places = [place + at * width for place in range(len(values))]
            bars = axes.bar(places, values, width * 0.92, label=CHART[name], color=COLORS[at])
            if name == "full":
                axes.bar_label(bars, fmt="%.1f", fontsize=7, padding=1)
        axes.axhline(1, color="#111827", linewidth=0.8)
        middle = width * (len(shown) - 1) / 2
        axes.set_xticks([place + middle for place in range(len(steps))])
        axes.set_xticklabels([WORKLOADS[name] for name in steps], fontsize=8)
        axes.set_ylabel("times the plain step", fontsize=8)
        axes.tick_params(axis="y", labelsize=8)
        figure.legend(fontsize=8, frameon=False, ncols=len(shown), loc="outside upper left")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "costs.svg"
        figure.savefig(path, metadata={"Date": None})
    return path


def _left_out(results: dict[str, Any]) -> str:
    """Say what was not measured, and with whose layers the models were built."""
    lines = []
    if results["not_installed"]:
        lines.append(f" Not installed, so not measured: {', '.join(results['not_installed'])}.")
    if results["machine"]["device"] == CPU_ONLY:
        lines.append(
            " On a GPU deferred guards also pass each copy to or from the device through a kernel "
            "in Python, about 2 µs of host time a copy, which these steps do not have."
        )
    if any(found["layers_of"] != "transformers" for found in results["steps"].values()):
        lines.append(" The BERT and GPT-2 steps are torch's own layers of that size.")
    return "".join(lines)


def _fold(title: str, body: str) -> str:
    """Return a section that is closed until the reader opens it."""
    return f"<details>\n<summary>{title}</summary>\n\n{body.strip()}\n\n</details>"


def performance_page(results: dict[str, Any]) -> str:
    """Return docs/performance.md: one sentence and one chart, then the figures in folds."""
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
    steps = f"""\
{_clock(results)} of one training step (forward, backward, optimizer) as a multiple of the same \
step without cudalens: median of interleaved repetitions, with the 95 % range of the median in \
brackets. {_acting(results)}. The control row is the plain step measured as if it were a tool: it \
shows the error of the method. DebugMode keeps every tensor that it records and is opened anew \
for each step.{_left_out(results)}

{ratios_table(results)}"""
    growth = f"""\
The first two rows say how many times slower a step of so many ops is, with the guards alone and \
with the full check. The other rows are seconds from the failing call to the finished report, by \
the size of what the report looks at.

{_curves(results)}"""
    start = f"""\
{_table(("", "ms"), start_rows)}

{_table(("", "kB"), [_row(label, f"{results[key]:.1f}") for label, key in weights])}"""
    used = f"""\
{memory["steps"]} training steps of the small transformer on {memory["device"]}.

{_table(("bytes", "plain", "full check"), _memory_rows(kinds))}

The device's memory after each step is the same as without the check: {same}."""
    folds = [
        ("Every step and every tool", steps),
        ("Goals", budget_table(results)),
        ("Waits for the GPU", _waits(results)),
        ("Compiled code", _compiled(results)),
        ("Does it grow?", growth),
        ("Start and size", start),
        ("Memory", used),
    ]
    return f"""\
# What it costs

A checked cell runs about {_span("full", results["steps"])}. Models with many small ops slow down \
most. Without the magic, cudalens costs nothing.

![Slowdown of one training step for each model](performance/costs.svg)

For whole public training programs see [whole programs](programs.md), for one model on a GPU \
[what is verified](verified.md). Measured by `{COMMAND}` on \
{_machine(results)}. The numbers are in `benchmarks/results.json`.

{chr(10).join(_fold(title, body) + chr(10) for title, body in folds if body)}"""


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
    return f"""\
Calls of one step in which the host waits for the device, counted on the rehearsal device: those \
that `torch.cuda.set_sync_debug_mode` reports. Each step has new inputs. The step itself reads \
its loss, which is one. Deferred guards wait once more where a value reaches the host or the \
optimizer writes, if anything was checked since. A good tensor that has not changed, like the \
labels of the conv net here, is not checked again.

{table}"""


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
    return f"""\
Steps that `torch.compile` compiles with inductor for the CPU, without guards and with deferred \
guards inside: CPU time, each kind in its own processes, the lowest of the medians. Loss and \
gradients are bit-identical: {same}.

{_table(heads, rows)}"""


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
