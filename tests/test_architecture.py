"""Who may import whom: read from the syntax trees, so that the table cannot rot."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter

from tests.layers import MAY_IMPORT, PACKAGE
from tests.processes import python

MAX_MODULE_LINES = 550

TORCH_IN_CORE = (
    *("core._torch", "core._compiler", "core.call", "core.tensor_values", "core.user_objects"),
)


TREES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): ast.parse(path.read_bytes())
    for path in sorted(PACKAGE.rglob("*.py"))
}
"""The modules of the package by dotted name below ``cudalens``."""


def unit(name: str) -> str:
    """The unit of the layer table that a module belongs to: its package or itself."""
    return name.split(".", maxsplit=1)[0]


def imported(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """The modules that a module imports when it is imported or used, with the names from each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((item.name, []) for item in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module, [item.name for item in node.names]


def imports_of(tree: ast.AST) -> set[str]:
    """The modules of cudalens that a module imports."""
    found: set[str] = set()
    for module, names in imported(tree):
        inner = {f"{module}.{name}" for name in names}
        if module.startswith("cudalens."):
            known = {name for name in inner if name.removeprefix("cudalens.") in TREES}
            found |= known if inner and known == inner else {module, *known}
        elif module == "cudalens":
            found |= inner
    return {name.removeprefix("cudalens.") for name in found}


def external_imports(tree: ast.AST) -> set[str]:
    """The top-level packages that a module imports from outside."""
    return {module.partition(".")[0] for module, _ in imported(tree)}


def private_torch(tree: ast.AST) -> set[str]:
    """The private names below ``torch`` that a module touches."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            inner: ast.AST = node.value
            while isinstance(inner, ast.Attribute):
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id == "torch" and node.attr[1:2] != "_":
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            parts = (node.module or "").split(".") + [item.name for item in node.names]
            found |= {item for item in parts if item.startswith("_") and item[1:2] != "_"}
    return found


def test_the_package_has_these_entries_and_no_others() -> None:
    """A module that the table does not name cannot be judged."""
    assert set(map(unit, TREES)) == set(MAY_IMPORT)
    here = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert here - {"__pycache__", "py.typed", "report.schema.json"} == set(MAY_IMPORT)


def forbidden(name: str, tree: ast.AST) -> list[str]:
    """What a module imports although the table does not let it."""
    here = unit(name)
    allowed = {here, *MAY_IMPORT[here].split()}
    public = {"__init__"}  # "from cudalens import X" of a name that is no module
    return [
        f"{name} imports {target}"
        for target in sorted(imports_of(tree))
        if unit(target) not in allowed and unit(target) in MAY_IMPORT.keys() - public
    ]


def test_imports_are_those_of_the_table() -> None:
    """Packages of one layer never import each other, and nothing imports upwards."""
    assert [line for name, tree in TREES.items() for line in forbidden(name, tree)] == []


def test_the_table_can_be_broken() -> None:
    """A sideways and an upward import are both told; one that is allowed is not."""
    tree = ast.parse("from cudalens.simulate import state\nfrom cudalens.core import report")
    assert forbidden("guards.engine", tree) == ["guards.engine imports simulate.state"]
    tree = ast.parse("from cudalens.evidence.finding import Limits")
    assert forbidden("source.stack", tree) == ["source.stack imports evidence.finding"]


def test_there_are_no_import_cycles() -> None:
    """Not even for annotations: shared types live in layer 0."""
    graph = {name.removesuffix(".__init__"): imports_of(tree) for name, tree in TREES.items()}
    # The public face names everything, and is imported by name only.
    graph |= {"__init__": set(), "simulate": set()}
    TopologicalSorter({name: graph[name] - {name} for name in graph}).prepare()


def test_the_centre_knows_no_torch() -> None:
    """The report, the diagnosis and the renderers work without torch."""
    for name, tree in TREES.items():
        is_core = unit(name) == "core" and name not in TORCH_IN_CORE
        if is_core or unit(name) in ("diagnosis", "logs", "render"):
            assert "torch" not in external_imports(tree), name


def test_ipython_is_known_to_the_magics_only() -> None:
    """Everything below the notebook front end works without IPython."""
    used = {unit(name) for name, tree in TREES.items() if "IPython" in external_imports(tree)}
    assert used == {"notebook"}


def test_private_torch_names_stay_in_the_seam() -> None:
    """One file owns every private name; compiler, simulation and recorder have a seam each."""
    wrong = {}
    for name, tree in TREES.items():
        if name in ("core._torch", "core._compiler", "recorder._torch") or unit(name) == "simulate":
            continue
        if used := private_torch(tree):
            wrong[name] = sorted(used)
    assert wrong == {}


def test_modules_stay_small() -> None:
    """A module over 550 lines hides an idea that has no name yet."""
    long = []
    for name, tree in TREES.items():
        lines = max((getattr(node, "end_lineno", 0) for node in tree.body), default=0)
        if lines > MAX_MODULE_LINES:
            long.append(f"{name}: {lines} lines")
    assert long == []


def doubled_classes(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """The names that several classes have, with their modules."""
    found: dict[str, list[str]] = {}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(name)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_two_classes_have_one_name() -> None:
    """Only the callback is called alike in both frameworks."""
    assert set(doubled_classes(TREES)) == {"CudaCheckCallback"}


def test_the_checks_can_fail() -> None:
    """Each reader of the syntax trees sees an offence when there is one."""
    tree = ast.parse(
        "import torch\nfrom cudalens.session.session import check\nimport IPython.display\n"
        "x = torch._C._get_sequence_nr()\nfrom torch.utils._python_dispatch import Y\n"
    )
    assert imports_of(tree) == {"session.session"}
    assert external_imports(tree) == {"torch", "cudalens", "IPython"}
    assert private_torch(tree) == {"_get_sequence_nr", "_C", "_python_dispatch"}
    tree = ast.parse("class Page:\n    pass")
    assert doubled_classes({"text": tree, "html": tree}) == {"Page": ["text", "html"]}


def test_importing_the_package_loads_nothing_heavy() -> None:
    """``import cudalens``, and so its loading as an extension, is quick; ``json`` would be told."""
    names = {"torch", "IPython", "ipywidgets", "matplotlib", "json"}
    code = f"import sys, json, cudalens; print(*{names} & set(sys.modules))"
    assert python("-c", code, fresh=True).stdout.split() == ["json"]


def test_every_public_name_exists() -> None:
    """Each name in ``cudalens.__all__`` can be fetched."""
    import cudalens

    for name in cudalens.__all__:
        assert getattr(cudalens, name) is not None
