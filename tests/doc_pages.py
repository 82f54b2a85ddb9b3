"""The pages of ``docs/reference`` that are made from the code, and the names that people type.

``make pages-update`` writes them anew; ``tests/test_docs.py`` compares them with the code.
"""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: F401  (the calls below)
from torch import nn, randn, tensor, zeros  # noqa: F401

import cudalens
from cudalens.core.report import SCHEMA_VERSION
from cudalens.guards import GUARDS, catalogue_rows
from cudalens.session import options
from cudalens.simulate import Simulation
from tests import report_schema
from tests.inventory import REACHABLE
from tests.probes import SeenOps
from tests.processes import ROOT

REFERENCE = ROOT / "docs" / "reference"
ORDER = ("very common", "common", "rare")
INSTALL = (
    "%pip install -q -r "
    "https://raw.githubusercontent.com/cudalens/cudalens/main/notebooks/requirements.txt"
)
"""How a notebook installs cudalens where it is missing: the file says where it comes from."""
MADE = "Made from the code by `make pages-update`. A test compares both."

# --- the names that people type ------------------------------------------------------------------

CALLS = {
    "F.cross_entropy": "F.cross_entropy(randn(2, 3), tensor([0, 2]))",
    "F.cross_entropy (images)": "F.cross_entropy(randn(1, 3, 2, 2), zeros(1, 2, 2).long())",
    "nn.CrossEntropyLoss": "nn.CrossEntropyLoss()(randn(2, 3), tensor([0, 2]))",
    "F.nll_loss": "F.nll_loss(randn(2, 3), tensor([0, 2]))",
    "F.binary_cross_entropy": "F.binary_cross_entropy(zeros(2), zeros(2))",
    "nn.BCELoss": "nn.BCELoss()(zeros(2), zeros(2))",
    "F.multi_margin_loss": "F.multi_margin_loss(randn(2, 3), tensor([0, 2]))",
    "F.multilabel_margin_loss": "F.multilabel_margin_loss(randn(1, 3), tensor([[0, 2, -1]]))",
    "F.ctc_loss": "F.ctc_loss(randn(4, 1, 3), tensor([[1]]), tensor([4]), tensor([1]))",
    "F.embedding": "F.embedding(tensor([0]), zeros(2, 2))",
    "nn.Embedding": "nn.Embedding(2, 2)(tensor([0]))",
    "nn.Embedding(max_norm=…)": "nn.Embedding(2, 2, max_norm=1.0)(tensor([0]))",
    "F.embedding_bag": "F.embedding_bag(tensor([0]), zeros(2, 2), tensor([0]))",
    "nn.EmbeddingBag": "nn.EmbeddingBag(2, 2)(tensor([0]), tensor([0]))",
    "x[i]": "zeros(3)[tensor([0])]",
    "x[i] = v": "zeros(3).__setitem__(tensor([0]), tensor(1.0))",
    "x[i] += v": "zeros(3).__setitem__(tensor([0]), zeros(1))",
    "x.index_put_": "zeros(3).index_put_((tensor([0]),), tensor(1.0))",
    "torch.gather": "torch.gather(zeros(3), 0, tensor([0]))",
    "torch.index_select": "torch.index_select(zeros(3), 0, tensor([0]))",
    "x.index_add_": "zeros(3).index_add_(0, tensor([0]), zeros(1))",
    "x.index_copy_": "zeros(3).index_copy_(0, tensor([0]), zeros(1))",
    "x.index_fill_": "zeros(3).index_fill_(0, tensor([0]), 1.0)",
    "x.index_reduce_": "zeros(3).index_reduce_(0, tensor([0]), zeros(1), 'mean')",
    "x.scatter_": "zeros(3).scatter_(0, tensor([0]), zeros(1))",
    "x.scatter_ (one value)": "zeros(3).scatter_(0, tensor([0]), 1.0)",
    "F.one_hot": "F.one_hot(tensor([0]), 2)",
    "x.scatter_add_": "zeros(3).scatter_add_(0, tensor([0]), zeros(1))",
    "x.scatter_reduce_": "zeros(3).scatter_reduce_(0, tensor([0]), zeros(1), 'sum')",
    "torch.take": "torch.take(zeros(3), tensor([0]))",
    "torch.take_along_dim": "torch.take_along_dim(zeros(3), tensor([0]), dim=0)",
    "x.put_": "zeros(3).put_(tensor([0]), zeros(1))",
    "x.masked_scatter_": "zeros(3).masked_scatter_(tensor([True, False, False]), zeros(1))",
    "torch.multinomial": "torch.multinomial(torch.ones(3), 1)",
    "Categorical.sample": "torch.distributions.Categorical(torch.ones(3)).sample()",
    "torch.bernoulli": "torch.bernoulli(zeros(3))",
    "x.bernoulli_(p)": "zeros(3).bernoulli_(zeros(3))",
    "Bernoulli.sample": "torch.distributions.Bernoulli(zeros(3)).sample()",
    "torch.poisson": "torch.poisson(zeros(3))",
    "torch.repeat_interleave": "torch.repeat_interleave(tensor([1, 2]), output_size=3)",
    "torch.segment_reduce": "torch.segment_reduce(zeros(3), 'sum', lengths=tensor([1, 2]))",
    "F.max_unpool2d": "F.max_unpool2d(zeros(1, 1, 1, 1), zeros(1, 1, 1, 1).long(), 2)",
    "F.max_unpool3d": "F.max_unpool3d(zeros(1, 1, 1, 1, 1), zeros(1, 1, 1, 1, 1).long(), 2)",
}
"""What people type, with a call of it: the ops that it reaches are seen, not known."""


def reached(call: str) -> list[str]:
    """Return the names of the guards that a call comes to, each once."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), SeenOps() as below:
        warnings.simplefilter("ignore")  # some ops are in beta
        eval(call, globals())
    found = [entry.name for op in below.ops for entry in GUARDS.get(op, ())]
    return list(dict.fromkeys(found))


def typed_names() -> dict[str, list[str]]:
    """Return, for each guard, what people type to come to it."""
    found: dict[str, list[str]] = {}
    for name, call in CALLS.items():
        for guard in reached(call):
            found.setdefault(guard, []).append(name.partition(" (")[0])
    return found


# --- tables --------------------------------------------------------------------------------------


def cell(text: str) -> str:
    """Return a text as the cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: str, rows: list[str]) -> str:
    """Return a table of Markdown."""
    return "\n".join([head, "| --- " * (head.count("|") - 1) + "|", *rows])


def code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def stems(names: list[str]) -> list[str]:
    """Return the names of ops without their overloads."""
    return sorted({name.removeprefix("aten::").split(".")[0] for name in names})


def catalogue_table() -> str:
    """One row a guard, the most frequent first."""
    typed = typed_names()
    entries = sorted(
        catalogue_rows(),
        key=lambda row: (
            row["silent"],
            ORDER.index(row["frequency"]),
            row["guard"] not in typed,
            row["op"],
        ),
    )
    rows = []
    for row in entries:
        kind = "warning: CUDA asserts nothing" if row["silent"] else "error"
        rows.append(
            f"| {code(typed.get(row['guard'], []))} | {code(stems(row['op']))} "
            f"| {cell(row['precondition'])} | {kind} | {row['frequency']} |"
        )
    head = "| call | op | requirement | kind | how common |"
    return table(head, rows)


def inventory_table() -> str:
    """One row for each reachable assertion of the inventory: its guards, or the reason for none."""
    guards: dict[str, list[str]] = {}
    for row in catalogue_rows():
        for record in row["records"]:
            guards.setdefault(record, []).append(row["guard"])
    rows = []
    for name, record in REACHABLE.items():
        by = code(sorted(guards.get(name, [])))
        file = str(record["file"]).rpartition("/")[2]
        rows.append(f"| {name} | {cell(file)} | {by or 'no guard: ' + cell(record['no_guard'])} |")
    return table("| assertion | in | guarded by |", rows)


def guards_page() -> str:
    """Return the catalogue of guards."""
    return f"""\
# The catalogue of guards

{MADE} In a terminal: `cudalens guards`, as JSON `cudalens guards --json`.

Each guard mirrors a device-side assertion of PyTorch's CUDA kernels, or covers a kernel that \
asserts nothing and silently returns wrong results. The ops of a call in the first column were \
recorded by running it. For your own guards see \
[notebook 06](../../notebooks/06_write_your_own_guard.ipynb).

{catalogue_table()}

## Every reachable device-side assertion of torch 2.13, and its guard

{inventory_table()}
"""


# --- reference -----------------------------------------------------------------------------------

HOLDERS = {
    "CheckSession": cudalens.CheckSession,
    "Report": cudalens.Report,
    "Simulation": Simulation,
}
"""The classes whose methods are listed."""


def plain(text: str) -> str:
    """Return a docstring's marks as Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def prose(value: object) -> str:
    """Return a docstring as Markdown; its sections become lists."""
    found: list[str] = []
    for paragraph in plain(inspect.getdoc(value) or "").split("\n\n"):
        head, _, body = paragraph.partition("\n")
        if head == "Example:":
            found.append(f"```console\n{textwrap.dedent(body)}\n```")
            continue
        if head not in ("Args:", "Returns:", "Raises:"):
            found.append(" ".join(paragraph.split()))
            continue
        items = re.split(r"\n(?! )", textwrap.dedent(body))
        name = {"Args:": "Takes", "Returns:": "Returns", "Raises:": "Raises"}[head]
        lines = [" ".join(item.split()) for item in items]
        found.append("\n".join([f"{name}:", "", *[f"- {_named(line, head)}" for line in lines]]))
    return "\n\n".join(found)


def _named(line: str, head: str) -> str:
    name, colon, text = line.partition(": ")
    return line if head == "Returns:" or not colon else f"`{name}`: {text}"


class _Bare(str):
    """A text that shows itself without quotes: an annotation is one, and is shown as code."""

    def __repr__(self) -> str:
        return str(self)


def signature(name: str, value: Any) -> str:
    """Return how a function is called: ``settle()``, ``guard(*, deferred: bool = False)``."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [
        item.replace(annotation=_bare(item.annotation))
        for key, item in found.parameters.items()
        if key != "self"
    ]
    result = _bare(found.return_annotation)
    found = found.replace(parameters=parameters, return_annotation=result)
    return f"{name}{str(found).removesuffix(' -> None')}"


def _bare(annotation: Any) -> Any:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def python_page() -> str:
    """Return the reference of the public names."""
    parts = []
    for name in cudalens.__all__:
        value = getattr(cudalens, name)
        if name in ("GUARDS", "__version__"):
            continue
        parts.append(_entry(f"cudalens.{name}", value))
        if name == "simulate":
            parts.append(_entry("cudalens.simulate.Simulation", Simulation))
    return f"""\
# Python

{MADE} `import cudalens` loads neither torch nor IPython: each name is loaded on first use.

`cudalens.GUARDS` is the catalogue as a read-only mapping from op overloads to their guards, \
`cudalens.__version__` the version.

{"".join(parts).rstrip()}
"""


def _entry(name: str, value: Any) -> str:
    short = name.rpartition(".")[2]
    if inspect.isclass(value):
        kinds = [base for base in value.__bases__ if issubclass(base, Exception)]
        bases = [base.__name__ for base in kinds if not base.__name__.startswith("_")]
        said = f"A kind of {' and '.join(bases)}.\n\n" if bases else ""
    else:
        said = f"`{signature(short, value)}`\n\n"
    methods = [
        f"- `{signature(f'.{key}', method)}`: {plain(_first(method))}\n"
        for key, method in _methods(HOLDERS.get(short))
    ]
    lists = f"\n{''.join(methods)}" if methods else ""
    return f"## `{name}`\n\n{said}{prose(value)}\n{lists}\n"


def _methods(cls: type | None) -> Iterator[tuple[str, Callable[..., Any]]]:
    for key, value in vars(cls).items() if cls is not None else ():
        member = getattr(cls, key)
        if not key.startswith("_") and (inspect.isroutine(member) or isinstance(value, property)):
            yield key, member


def _first(value: object) -> str:
    return " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())


def options_table() -> str:
    """Return the options of a check, with the keyword of ``cudalens.check`` for each."""
    rows = []
    for names, spec in options._TABLE:
        field = spec.get("dest", names[-1].lstrip("-").replace("-", "_"))
        value = f" {spec['metavar']}" if "metavar" in spec else ""
        keyword = _keyword(field, spec) if field in options.Options().for_session() else ""
        text = spec["help"] % {"default": spec.get("default")}
        rows.append(f"| {code([name + value for name in names])} | {keyword} | {cell(text)} |")
    return table("| option | keyword of `cudalens.check` | what it does |", rows)


def _keyword(field: str, spec: dict[str, Any]) -> str:
    action = {"store_true": "True", "store_false": "False"}.get(spec.get("action", ""), "…")
    return f"`{field}={action}`"


def magics_page() -> str:
    """Return the reference of the magics and the options."""
    forms = []
    for line in options.USAGE.splitlines():
        form, _, text = line.strip().partition("  ")
        forms.append(f"| `{cell(form)}` | {cell(text)} |")
    return f"""\
# Magics and options

{MADE} Run `%load_ext cudalens` once per kernel. `%unload_ext cudalens` removes \
everything. `%cudacheck --help` prints a short form of this page.

{table("| form | what it does |", forms)}

An exception from a guard stops the cell like any other exception, so *Run All*, nbclient and \
papermill stop too. With a misspelt option you get one line, and the cell does not run.

## Options

For `%%cudacheck`, `%cudacheck on` and, except `-r`, `python -m cudalens`.

{options_table()}
"""


def report_page() -> str:
    """Return the reference of a report's JSON form."""
    schema = json.loads(report_schema.FILE.read_text("utf-8"))
    parts = [_object_table(schema)]
    types = {name: found for name, found in schema["$defs"].items() if name != "Report"}
    for name, found in types.items():
        parts.append(f"### {name}\n\n{_said(found)}\n\n{_object_table(found)}")
    return f"""\
# A report as JSON

{MADE} Every key is always present, but the optional ones, which are left out when empty. Unknown \
values are `null` or an empty list, never a guess. The JSON Schema is `report.schema.json` in the \
package. This is version {SCHEMA_VERSION}.

`Report.to_dict()`, `.to_json()` and `--json FILE` write it, `Report.from_dict()` and \
`cudalens show report.json` read it.

## The kinds

| kind | what happened |
| --- | --- |
| `device_assert` | a guard fired, or CUDA asserted |
| `host_error` | torch, or a library on it, rejected the call before running anything on the GPU |
| `autograd_error` | a tensor that backward needs was changed or freed |
| `nonfinite` | a first NaN or infinity was made (`--nan`) |
| `silent` | neither CUDA nor the CPU complains, and the result is certainly wrong: a warning |
| `cuda_error` | another error of CUDA: out of memory, illegal memory access, cuBLAS |
| `python_error` | raised inside torch's own machinery without a better name |

## The keys

{parts[0]}

## The types

{(chr(10) * 2).join(parts[1:])}
"""


def _object_table(found: dict[str, Any]) -> str:
    """Return a row for each key of a type."""
    rows = []
    for key, spec in found["properties"].items():
        kind = cell(_kind(spec)) + ", optional" * (key not in found["required"])
        rows.append(f"| `{key}` | {kind} | {cell(_said(spec))} |")
    return table("| key | type | what it says |", rows)


def _said(spec: dict[str, Any]) -> str:
    return plain(spec["description"]).replace("`None`", "`null`")


def _kind(spec: dict[str, Any]) -> str:
    """Return the type of a key in words."""
    if "$ref" in spec:
        name = spec["$ref"].rpartition("/")[2]
        return f"[{name}](#{'the-keys' if name == 'Report' else name.lower()})"
    if "anyOf" in spec:
        return " or ".join(_kind(item) for item in spec["anyOf"])
    if "enum" in spec:
        return ", ".join(f"`{item}`" for item in spec["enum"])
    if "const" in spec:
        return f"`{spec['const']}`"
    found = spec.get("type", "any")
    if items := spec.get("prefixItems"):
        return f"list of {len(items)}: {', '.join(map(_kind, items))}"
    if found == "array":
        return f"list of {_kind(spec['items'])}" if spec.get("items") else "list"
    names = found if isinstance(found, list) else [found]
    return " or ".join("`null`" if name == "null" else str(name) for name in names)


PAGES: dict[str, Callable[[], str]] = {
    "guards.md": guards_page,
    "magics.md": magics_page,
    "python.md": python_page,
    "report.md": report_page,
}
"""The pages of ``docs/reference`` that are made from the code."""
