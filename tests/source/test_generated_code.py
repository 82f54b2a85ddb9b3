"""A library that writes Python while it runs: the report names the line of the user's."""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import cudalens
from cudalens.core.report import Report
from tests.blocks import cuda, report_of

WRITTEN = """
def collect(rows, edge_index):
    edge_index_j = edge_index[0]
    return rows.index_select(0, edge_index_j)
"""


def written(name: str) -> ModuleType:
    """Write a module into the temporary folder and import it, as torch_geometric does."""
    with tempfile.NamedTemporaryFile("w", prefix=f"{name}_", suffix=".py", delete=False) as file:
        file.write(WRITTEN)
    spec = importlib.util.spec_from_file_location(name, file.name)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def file_of(name: str) -> Iterator[Callable[..., Tensor]]:
    module = written(name)
    try:
        yield module.collect
    finally:
        del sys.modules[name]
        Path(str(module.__file__)).unlink()


@contextmanager
def text_of(name: str) -> Iterator[Callable[..., Tensor]]:
    """Make the function of a string, as attrs and dataclasses do."""
    space: dict[str, Any] = {}
    exec(compile(WRITTEN, name, "exec"), space)
    yield space["collect"]


@contextmanager
def graph_of(_: str) -> Iterator[Callable[..., Tensor]]:
    class Layer(nn.Module):
        def forward(self, rows: Tensor, edge_index: Tensor) -> Tensor:
            return rows.index_select(0, edge_index[0])

    yield fx.symbolic_trace(Layer())


@pytest.mark.parametrize(
    ("maker", "name"),
    [
        (file_of, "torch.nn.made_Conv_propagate"),
        (file_of, "__main___MyConv_propagate"),
        (text_of, "<string>"),
        (text_of, "<attrs generated init Conv>"),
        (graph_of, ""),
    ],
)
@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("fast", [False, True])
def test_a_bad_edge_is_told_at_the_users_line_in_their_names(
    maker: Callable[[str], Any], name: str, *, fast: bool
) -> None:
    with maker(name) as collect:
        report = bad_edge(collect, fast=fast)
    assert report.source is not None and report.source.file == __file__
    assert report.source.text == "return report_of(lambda: collect(x, pairs), fast=fast)"
    assert report.headline_own is not None and report.headline_own.startswith("pairs[0][2] = 4 ")


def bad_edge(collect: Callable[..., Tensor], *, fast: bool) -> Report:
    x, pairs = torch.ones(4, 6, device="cuda"), cuda([1, 2, 4, 3], [3, 1, 2, 1])
    return report_of(lambda: collect(x, pairs), fast=fast)


@pytest.mark.usefixtures("sim")
def test_a_finding_that_the_library_answers_with_an_error_of_its_own_is_told() -> None:
    """Its message names the edges of the library; the report the line of the user's."""
    x, pairs = torch.ones(4, 6, device="cuda"), cuda([1, 2, 4, 3], [3, 1, 2, 1])
    with file_of("torch.nn.made_Conv_propagate") as collect:

        def layer(rows: Tensor, edges: Tensor) -> Tensor:
            try:
                return collect(rows, edges)
            except IndexError:
                raise ValueError("Found indices in 'edge_index' that are too large") from None

        with pytest.raises(ValueError, match="edge_index"), cudalens.check() as session:
            layer(x, pairs)
    assert session.report is not None
    assert session.report.source is not None
    assert session.report.source.text == "return collect(rows, edges)"
