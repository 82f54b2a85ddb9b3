"""Whose file it is: cells by number, the user's files, and everybody else's."""

from __future__ import annotations

import importlib.util
import linecache
import sys
import sysconfig
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
import torch

import cudalens
from cudalens.source import files


@pytest.mark.parametrize(
    ("filename", "is_user"),
    [
        ("/home/me/project/train.py", True),
        ("train.py", True),
        ("/tmp/ipykernel_4711/2947110.py", True),
        ("<ipython-input-12-0123456789ab>", True),
        ("<stdin>", True),
        ("<python-input-3>", True),
        ("<doctest mymodule.f[0]>", True),
        (__file__, True),
        ("<string>", False),
        ("<frozen runpy>", False),
        ("<attrs generated init A>", False),
        ("<eval_with_key>.3", False),
        (str(Path(sysconfig.get_paths()["stdlib"]) / "json" / "decoder.py"), False),
        ("/home/me/project/.venv/lib/python3.12/site-packages/pkg/mod.py", False),
        ("/usr/lib/python3/dist-packages/pkg.py", False),
        (torch.nn.functional.__file__, False),
        (files.__file__, False),
        (str(Path(cudalens.__path__[0]) / "render" / "text.py"), False),
    ],
)
def test_cells_scripts_and_typed_lines_are_the_users(filename: str, is_user: bool) -> None:
    assert files.is_user_file(filename) is is_user


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


def test_code_that_the_compiler_wrote_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "/tmp/torchinductor_me/cx/cxab.py"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert files.is_user_file(name)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/torchinductor_me")
    assert not files.is_user_file(name)
    assert files.is_user_file("/tmp/torchinductor_me.py")


@pytest.mark.parametrize("number", [4, None])
def test_a_registered_cell_has_its_number_and_text_until_it_is_forgotten(
    number: int | None,
) -> None:
    name = "<checked cell>"
    assert not files.is_user_file(name)
    files.CELLS.register(name, number, ["# %%cudacheck", "x = 1"])
    try:
        assert files.is_user_file(name)
        assert files.cell_number(name) == number
        assert files.source_lines(name) == ["# %%cudacheck", "x = 1"]
    finally:
        files.CELLS.forget(name)
    assert files.cell_number(name) is None
    assert name not in linecache.cache


def test_a_title_is_shown_until_the_cell_is_forgotten() -> None:
    name = "<titled cell>"
    files.CELLS.register(name, 4, ["x = 1"], title="a chat")
    try:
        assert files.title_of(name) == "a chat"
    finally:
        files.CELLS.forget(name)
    assert files.title_of(name) == name
    files.CELLS.register(name, 4, ["x = 1"])
    try:
        assert files.title_of(name) == name
    finally:
        files.CELLS.forget(name)
    files.CELLS.forget(name)  # one that is not registered


def test_both_caches_of_lines_have_a_cell_until_it_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """IPython 7 writes its own over Python's."""
    shells: dict[str, object] = {}
    monkeypatch.setattr(linecache, "_ipython_cache", shells, raising=False)
    name = "<cell of two caches>"
    files.CELLS.register(name, 4, ["x = 1"])
    assert shells[name] == linecache.cache[name] == (6, None, ["x = 1\n"], name)
    files.CELLS.forget(name)
    assert name not in shells and name not in linecache.cache


def test_a_debugger_is_shown_what_was_typed() -> None:
    name = "<typed cell>"
    files.CELLS.register(name, 4, ["run('%time')", "x = 1"], typed=["%time"])
    try:
        before = linecache.cache[name]
        with files.CELLS.as_typed():
            assert linecache.getlines(name) == ["%time\n", "x = 1\n"]
        assert linecache.cache[name] == before
        files.CELLS.register(name, 4, ["y = 1"])
        assert files.typed_line(name, ["y = 1"], 1) == "y = 1"
        linecache.cache[name] = (lambda: "y = 1",)  # not read yet
        with files.CELLS.as_typed():
            assert len(linecache.cache[name]) == 1
        files.CELLS.register(name, 4, ["z = 1"], typed=["%z"])
    finally:
        files.CELLS.forget(name)
    assert files.typed_line(name, ["z = 1"], 1) == "z = 1"
    assert files.Source(["a \r\n", "b"]).lines == ["a ", "b"]


def test_the_text_of_a_cell_survives_a_check_of_the_line_cache() -> None:
    files.CELLS.register("/tmp/ipykernel_1/2.py", 1, ["x = 1"])
    try:
        linecache.checkcache()
        assert files.source_lines("/tmp/ipykernel_1/2.py") == ["x = 1"]
    finally:
        files.CELLS.forget("/tmp/ipykernel_1/2.py")


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("a = 1\n")
    assert files.source_lines(str(path)) == ["a = 1"]
    path.write_text("a = 1\nb = 22\n")
    assert files.source_lines(str(path)) == ["a = 1", "b = 22"]


def test_ipythons_name_carries_the_number_when_no_shell_runs() -> None:
    assert files.cell_number("<ipython-input-12-0123456789ab>") == 12
    assert files.cell_number("/tmp/ipykernel_4711/2947110.py") is None


def test_what_a_shell_runs_that_is_no_cell_of_its_is_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map={"<a cell>": 1}))
    monkeypatch.setattr(files, "running_shell", lambda: shell)
    name = "<ipython-input-12-0123456789ab>"
    assert files.cell_number(name) is None
    assert files.is_user_file(name)


def test_a_cell_of_marimo_is_the_users_and_shown_by_its_name() -> None:
    name = "/tmp/marimo_4711/__marimo__cell_MJUe_.py"
    assert (files.is_user_file(name), files.title_of(name)) == (True, "marimo cell MJUe")
    other = "/tmp/marimo_4711/helper.py"
    assert files.title_of(other) == other


def test_what_runs_cells_and_scripts_is_machinery() -> None:
    shell = pytest.importorskip("IPython.core.interactiveshell").__file__
    assert files.is_machinery(shell)
    # Found, not imported: that would take the communication of widgets over in this process.
    found = importlib.util.find_spec("ipykernel.kernelapp")
    assert found is not None and files.is_machinery(str(found.origin))
    assert files.is_machinery("<frozen runpy>")
    assert files.is_machinery(str(Path(sysconfig.get_paths()["stdlib"]) / "runpy.py"))
    assert not files.is_machinery(torch.__file__)
    assert not files.is_machinery("/home/me/IPython/work.py")
    assert not files.is_machinery("/home/me/runpy.py")


def installed_with_target(folder: Path) -> dict[str, Path]:
    """Write what ``pip install --target`` leaves in a folder, beside files of the user's."""
    files = {
        name: folder / name
        for name in ("pkg/__init__.py", "pkg/sub/mod.py", "single.py", "pkg/mine.py", "train.py")
    }
    for path in files.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n", encoding="utf-8")
    info = folder / "pkg-1.0.dist-info"
    info.mkdir()
    lines = ["pkg/__init__.py,sha256=x,1", "pkg/sub/mod.py,,", '"single.py",,', "../../bin/pkg,,"]
    (info / "RECORD").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


@pytest.mark.parametrize("entry", ["{folder}", "{folder}/", ""])
def test_a_package_installed_with_target_is_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """Its files are on the list beside it; the user's, in the same folder, are not."""
    found = installed_with_target(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(entry.format(folder=tmp_path))
    users = {name for name, path in found.items() if files.is_user_file(str(path))}
    assert users == {"pkg/mine.py", "train.py"}


@pytest.mark.parametrize("entries", [(".", "deps"), ("deps", ".")])
def test_each_folder_of_the_search_path_above_a_file_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: tuple[str, str]
) -> None:
    """The user's folder may hold the one that ``pip install --target`` wrote to."""
    found = installed_with_target(tmp_path / "deps")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*(str(tmp_path / entry) for entry in entries), *sys.path])
    users = {name for name, path in found.items() if files.is_user_file(str(path))}
    assert users == {"pkg/mine.py", "train.py"}


def test_a_package_installed_meanwhile_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell may install one; a project that is installed editable stays the user's."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "project.egg-info").mkdir()
    (tmp_path / "own.py").write_text("x = 1\n", encoding="utf-8")
    assert files.is_user_file(str(tmp_path / "own.py"))
    found = installed_with_target(tmp_path)
    assert not files.is_user_file(str(found["single.py"]))
    assert files.is_user_file(str(found["train.py"]))


@pytest.mark.parametrize(
    ("module", "folder", "mark", "is_user"),
    [
        ("pkg/mod.py", "work", None, False),
        ("pkg/sub/mod.py", "work", None, False),
        ("mod.py", "work", None, True),
        ("pkg/mod.py", ".", None, True),
        ("pkg/mod.py", "work", "pyproject.toml", True),
        ("pkg/mod.py", "work", ".git", True),
    ],
    ids=["package", "below it", "module", "below the working directory", "checkout", "clone"],
)
def test_a_package_on_the_search_path_is_a_library_outside_the_users_project(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    folder: str,
    mark: str | None,
    *,
    is_user: bool,
) -> None:
    """``sys.path.append("../src")`` in a notebook of a project names the user's own code."""
    path = tmp_path / "src" / module
    path.parent.mkdir(parents=True)
    (tmp_path / "work").mkdir()
    for name in ("src/pkg/__init__.py", "src/mod.py", f"src/{module}"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if mark is not None:
        (tmp_path / mark).touch()
    monkeypatch.chdir(tmp_path / folder)
    assert files.is_user_file(str(path))  # nobody imports from there yet
    files._is_library_path.cache_clear()
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    assert files.is_user_file(str(path)) == is_user


def test_a_package_beside_the_running_script_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not files.is_user_file(str(tmp_path / "pkg" / "mod.py"))
    script = str(tmp_path / "train.py")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", script, raising=False)
    assert files.is_user_file(str(tmp_path / "pkg" / "other.py"))


def loaded_from(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Load a file as a module of this name, as a library does with what it has written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x = 1\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    monkeypatch.setitem(sys.modules, name, importlib.util.module_from_spec(spec))
    return str(path)


@pytest.mark.parametrize(
    ("name", "file", "is_user"),
    [
        ("torch.nn.conv_Conv_propagate", "anything.py", False),
        ("_pytest.assertion.made", "anything.py", False),
        ("__main___MyConv_propagate", "__main___MyConv_propagate_x8_k2mqa.py", False),
        ("made", "tmpx8_k2mqa.py", False),
        # The neighbours: a person may have chosen these names.
        ("__main___MyConv_propagate", "__main___MyConv_propagate_x8_k2mq.py", True),
        ("made", "tmpx8_k2mqab.py", True),
        ("made", "made.py", True),
        ("helper", "training.py", True),
        ("nets.gnn", "gnn.py", True),
    ],
)
def test_a_module_that_a_library_wrote_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, file: str, *, is_user: bool
) -> None:
    """Its name is inside the library, or ``tempfile`` drew the name of its file."""
    assert files.is_user_file(loaded_from(tmp_path / file, name, monkeypatch)) is is_user


def test_links_to_a_library_are_the_users_and_a_temporary_folder_may_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (real := tmp_path / "site-packages").mkdir()
    (real / "linked.py").touch()
    (mine := tmp_path / "linked.py").symlink_to(real / "linked.py")
    assert files.is_user_file(str(mine))
    monkeypatch.chdir(real)
    assert not files.is_user_file("a_relative_name.py")
    (tmp_path / "real").mkdir()
    (link := tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setattr("tempfile.tempdir", str(link))
    assert not files.is_user_file(loaded_from(link / "tmpx8_k2mqa.py", "made", monkeypatch))


def test_a_module_whose_name_is_no_text_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = loaded_from(tmp_path / "tmpx8_k2mqa.py", "made", monkeypatch)
    vars(sys.modules["made"]).update(__name__=None, __file__=path)
    assert files.is_user_file(path)


def test_a_drawn_name_outside_the_temporary_folder_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "elsewhere"))
    assert files.is_user_file(loaded_from(tmp_path / "tmpx8_k2mqa.py", "made", monkeypatch))


def test_a_users_part_of_an_installed_package_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package looks for its parts there may be a folder of the user's."""
    import _pytest.assertion as package

    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    path = loaded_from(tmp_path / "mine.py", "_pytest.assertion.mine", monkeypatch)
    assert files.is_user_file(path)


def test_cells_with_one_number_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those are that run without history; a cell with a number of its own has no file."""
    first, second, other = (f"/tmp/ipykernel_7/{name}.py" for name in (11, 22, 33))
    monkeypatch.setattr(files.CELLS, "numbers", {first: 3, second: 3, other: 4})
    assert files.place_of_code(first) == (3, "11.py")
    assert files.place_of_code(second) == (3, "22.py")
    assert files.place_of_code(other) == (4, None)
    assert files.place_of_code("train.py") == (None, "train.py")


def test_the_sources_that_were_read_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is read again is young again, and is the same object until it changes."""
    monkeypatch.setattr(files, "MAX_SOURCES", 2)
    monkeypatch.setattr(files.CELLS, "sources", {})
    names = [f"<cell that is kept {at}>" for at in range(3)]
    for name in names:
        monkeypatch.setitem(linecache.cache, name, (6, None, ["x = 1\n"], name))
    first, second = files.source(names[0]), files.source(names[1])
    assert files.source(names[0]) is first
    third = files.source(names[2])
    assert list(files.CELLS.sources) == [names[0], names[2]]
    assert (files.source(names[0]), files.source(names[2])) == (first, third)
    assert files.source(names[1]) is not second
    monkeypatch.setitem(linecache.cache, names[1], (6, None, ["y = 1\n"], names[1]))
    assert files.source(names[1]).lines == ["y = 1"]


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_what_is_below_a_folder_of_packages_is_a_library(folder: str) -> None:
    assert files._is_library_path(f"/nowhere/{folder}/mod.py")
    assert not files._is_library_path(f"/nowhere/my-{folder}/mod.py")


def test_only_folders_of_the_search_path_above_a_file_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", ["/a/b", "/a", "/a/bc", "/a/b/", "/c"])
    assert files._entries_above("/a/b/mod.py") == ["/a/b", "/a"]


def test_an_entry_of_the_line_cache_that_is_no_file_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever made it gave it a time, by which Python looks for a file and drops it."""
    entry = (6, 1.0, ["x = 1\n"], "<made>")
    monkeypatch.setitem(linecache.cache, "<made>", entry)
    assert files.source_lines("<made>") == ["x = 1"]
    assert linecache.cache["<made>"] == entry
    assert files.source_lines("<not made>") == []


def test_a_shell_without_a_map_has_the_number_of_the_running_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As before IPython 8, by the innermost frame of a cell."""
    monkeypatch.setattr(files.CELLS, "numbers_of_shell", {})
    shell = SimpleNamespace(execution_count=5, compile=SimpleNamespace())
    code = compile("def f(): g()", "<old cell>", "exec").co_consts[0]
    note = lambda: files.CELLS.note_running(shell)
    FunctionType(code, {"g": note})()
    assert files.CELLS.of_shell(shell) == {}
    FunctionType(code.replace(co_name="<cell line: 3>"), {"g": note})()
    assert files.CELLS.of_shell(shell) == {"<old cell>": 5}
    shell.compile._filename_map = {"<new cell>": 6}
    assert files.CELLS.of_shell(shell) == {"<new cell>": 6}


def test_a_package_whose_list_is_broken_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = installed_with_target(tmp_path)
    no_number = "own.py,sha256=x,no number\n"
    for name, text in (("broken", no_number), ("long", "x" * 200_000), ("zoo", no_number)):
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        record = tmp_path / f"{name}-1.0.dist-info" / "RECORD"
        record.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert not files.is_user_file(str(found["single.py"]))
    assert files.is_user_file(str(found["train.py"]))


def test_a_folder_of_the_search_path_that_is_gone_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = installed_with_target(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "pkg" / "sub"), str(tmp_path), *sys.path])
    # The list is read while all files are there: since Python 3.12 it leaves out the others.
    assert not files.is_user_file(str(found["single.py"]))
    (tmp_path / "pkg" / "sub" / "mod.py").unlink()
    (tmp_path / "pkg" / "sub").rmdir()
    assert not files.is_user_file(str(tmp_path / "pkg" / "sub" / "mod.py"))


def test_cells_are_listed_from_the_newest_and_texts_without_a_number_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files.CELLS, "numbers", {"a": 3, "text": None, "c": 12, "d": 5})
    assert files.CELLS.names() == ["c", "d", "a", "text"]
