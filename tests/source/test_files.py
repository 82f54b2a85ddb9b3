"""Whose file it is: cells by number, the user's files, and everybody else's."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import cudalens
from cudalens.source import files


@pytest.mark.parametrize(
    "filename",
    [
        "/home/me/project/train.py",
        "train.py",
        "/tmp/ipykernel_4711/2947110.py",
        "<ipython-input-12-0123456789ab>",
        "<stdin>",
        "<python-input-3>",
        "<doctest mymodule.f[0]>",
        __file__,
    ],
)
def test_cells_scripts_and_typed_lines_are_the_users(filename: str) -> None:
    assert files.is_user_file(filename)


@pytest.mark.parametrize(
    "filename",
    [
        "<string>",
        "<frozen runpy>",
        "<attrs generated init A>",
        "<eval_with_key>.3",
        str(Path(sysconfig.get_paths()["stdlib"]) / "json" / "decoder.py"),
        "/home/me/project/.venv/lib/python3.12/site-packages/pkg/mod.py",
        "/usr/lib/python3/dist-packages/pkg.py",
        torch.nn.functional.__file__,
        files.__file__,
        str(Path(cudalens.__path__[0]) / "render" / "text.py"),
    ],
)
def test_libraries_and_generated_code_are_not_the_users(filename: str) -> None:
    assert not files.is_user_file(filename)


def test_a_project_around_its_environment_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/home/me/project")
    assert files.is_user_file("/home/me/project/model.py")
    assert not files.is_user_file("/home/me/project/lib/site-packages/model.py")


def test_torch_is_a_library_wherever_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.is_user_file("/home/me/pytorch/torch/nn/functional.py")
    monkeypatch.setattr(torch, "__file__", "/home/me/pytorch/torch/__init__.py")
    assert not files.is_user_file("/home/me/pytorch/torch/nn/functional.py")
    assert files.torch_path("/home/me/pytorch/torch/nn/functional.py") == "nn/functional.py"
    assert files.is_user_file("/home/me/pytorch/train.py")


def test_a_registered_cell_has_its_number_and_text_until_it_is_forgotten() -> None:
    name = "<checked cell>"
    assert not files.is_user_file(name)
    files.register_cell(name, 4, ["# %%cudacheck", "x = 1"])
    try:
        assert files.is_user_file(name)
        assert files.cell_number(name) == 4
        assert files.source_lines(name) == ["# %%cudacheck", "x = 1"]
    finally:
        files.forget_cell(name)
    assert files.cell_number(name) is None
    assert name not in linecache.cache


def test_the_text_of_a_cell_survives_a_check_of_the_line_cache() -> None:
    files.register_cell("/tmp/ipykernel_1/2.py", 1, ["x = 1"])
    try:
        linecache.checkcache()
        assert files.source_lines("/tmp/ipykernel_1/2.py") == ["x = 1"]
    finally:
        files.forget_cell("/tmp/ipykernel_1/2.py")


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("a = 1\n")
    assert files.source_lines(str(path)) == ["a = 1"]
    path.write_text("a = 1\nb = 22\n")
    assert files.source_lines(str(path)) == ["a = 1", "b = 22"]


def test_ipythons_name_carries_the_number_when_no_shell_runs() -> None:
    assert files.cell_number("<ipython-input-12-0123456789ab>") == 12
    assert files.cell_number("/tmp/ipykernel_4711/2947110.py") is None


def test_what_runs_cells_and_scripts_is_machinery() -> None:
    site = "/v/lib/python3.12/site-packages"
    assert files.is_machinery(f"{site}/IPython/core/interactiveshell.py")
    assert files.is_machinery(f"{site}/ipykernel/kernelapp.py")
    assert files.is_machinery("<frozen runpy>")
    assert files.is_machinery(str(Path(sysconfig.get_paths()["stdlib"]) / "runpy.py"))
    assert not files.is_machinery(f"{site}/transformers/trainer.py")
    assert not files.is_machinery("/home/me/IPython/work.py")
