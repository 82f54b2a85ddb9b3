"""The documentation is that of the code: pages made from it are current, and no link is dead.

``CUDALENS_UPDATE_PAGES=1`` writes the pages of ``docs/reference`` instead of comparing them.  The
site itself is built, strictly, by ``make docs``.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import pytest

import cudalens
from cudalens.__main__ import main
from cudalens.core import error_pages
from tests import doc_pages
from tests.doc_pages import REFERENCE, ROOT
from tests.inventory import REACHABLE
from tests.releases import release

REPOSITORY = "https://github.com/cudalens/cudalens"
RAW = "https://raw.githubusercontent.com/cudalens/cudalens/main/"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TEXTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("notebooks/*.ipynb")),
    ROOT / "docs" / "llms.txt",
]


# --- pages made from the code --------------------------------------------------------------------


@pytest.mark.parametrize("name", doc_pages.PAGES)
def test_a_page_made_from_the_code_is_current(name: str) -> None:
    if name == "guards.md" and release() < (2, 10):
        pytest.skip("torch has no aten::_scaled_grouped_mm_v2 before 2.10, which the page lists")
    path, text = REFERENCE / name, doc_pages.PAGES[name]()
    if os.environ.get("CUDALENS_UPDATE_PAGES"):
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_every_guard_and_every_reachable_assertion_is_in_the_catalogue() -> None:
    if release() < (2, 10):
        pytest.skip("torch has no aten::_scaled_grouped_mm_v2 before 2.10, which the page lists")
    text = (REFERENCE / "guards.md").read_text(encoding="utf-8")
    guards, inventory = text.split("\n## ")
    assert guards.count("\n| ") - 2 == len(doc_pages.catalogue_rows())
    assert re.findall(r"^\| (\w+) \|", inventory, re.MULTILINE)[1:] == list(REACHABLE)


@pytest.mark.parametrize("name", doc_pages.CALLS)
def test_what_people_type_comes_to_a_guard(name: str) -> None:
    assert doc_pages.reached(doc_pages.CALLS[name])


def test_a_call_without_a_guard_comes_to_none() -> None:
    assert doc_pages.reached("zeros(2) + 1") == []


def test_the_readme_names_only_what_is_guarded() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.partition("## What it catches")[2].partition("\n[All checks]")[0]
    named = re.findall(r"`([^`]+)`", section)
    known = {name.partition(" (")[0] for name in doc_pages.CALLS}
    assert len(named) > 20
    assert set(named) <= known


def test_every_environment_variable_is_told() -> None:
    page = (REFERENCE / "environment.md").read_text(encoding="utf-8")
    code = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("cudalens/**/*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", code))
    read |= set(re.findall(r"\"((?:TORCHELASTIC|LOCAL|CUDALENS)_\w+)\"", code))
    assert {"CUDALENS_WIDGETS", "TORCHELASTIC_ERROR_FILE"} <= read
    assert read <= set(re.findall(r"`(\w+)`", page))


# --- which error do I have? ----------------------------------------------------------------------

PRINTED = """
== n-classes | modelscope/ms-swift/issues/3267
../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], \
thread: [0,0,0] Assertion `t >= 0 && t < n_classes` failed.
[rank0]: RuntimeError: CUDA error: device-side assert triggered
== n-classes | joe-siyuan-qiao/DetectoRS/issues/13
/pytorch/aten/src/THCUNN/SpatialClassNLLCriterion.cu:104: void \
cunn_SpatialClassNLLCriterion_updateOutput_kernel [with T = float, AccumT = float]: block: \
[0,0,0], thread: [659,0,0] Assertion `t >= 0 && t < n_classes` failed.
RuntimeError: copy_if failed to synchronize: device-side assert triggered
== src-index-select-dim-size | OptimalScale/LMFlow/issues/114
../aten/src/ATen/native/cuda/Indexing.cu:1146: indexSelectLargeIndex: block: [170,0,0], thread: \
[95,0,0] Assertion `srcIndex < srcSelectDimSize` failed.
RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`
== vectorized-gather-kernel | inclusionAI/dInfer/issues/22
IndexKernelUtils.cu:16: vectorized_gather_kernel: block: [963,0,0], thread: [64,0,0] Assertion \
`ind >=0 && ind < ind_dim_size && "vectorized gather kernel index out of bounds"` failed.
CUDA error: CUBLAS_STATUS_EXECUTION_FAILED.
== index-out-of-bounds | hustvl/CrossVIS/issues/11
ScatterGatherKernel.cu:312: operator(): block: [0,0,0], thread: [53,0,0] Assertion `idx_dim >= 0 \
&& idx_dim < index_size && "index out of bounds"` failed.
== index-out-of-bounds | swc-17/SparseDrive/issues/105
IndexKernel.cu:92: operator(): block: [20,0,0], thread: [16,0,0] Assertion `index >= -sizes[i] && \
index < sizes[i] && "index out of bounds"` failed.
== input-val-zero-one | WENGSYX/CMIVQA_Baseline/issues/16
../aten/src/ATen/native/cuda/Loss.cu:94: operator(): block: [0,0,0], thread: [96,0,0] Assertion \
`input_val >= zero && input_val <= one` failed.
== input-val-zero-one | dbolya/yolact/issues/164
/pytorch/aten/src/THCUNN/BCECriterion.cu:57: block: [20,0,0], thread: [450,0,0] Assertion `*input \
>= 0. && *input <= 1.` failed.
== probability-tensor-inf-nan | facebookresearch/crystal-text-llm/issues/11
RuntimeError: probability tensor contains either 'inf', 'nan' or element < 0
== cublas-alloc-failed | QwenLM/Qwen3/issues/873
RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
== modified-by-an-inplace-operation | google-research/sam/issues/17
RuntimeError: one of the variables needed for gradient computation has been modified by an \
inplace operation: [torch.cuda.FloatTensor [64, 1]], which is output 0 of TBackward
== backward-a-second-time | davda54/sam/issues/10
RuntimeError: Trying to backward through the graph a second time, but the saved intermediate \
results have already been freed.
== device-side-assert-triggered | isht7/pytorch-deeplab-resnet/issues/19
RuntimeError: cuda runtime error (59) : device-side assert triggered
==  | duoke360.com/post/34183
RuntimeError: "nll_loss_forward_reduce_cuda_kernel_2d_index" not implemented for 'Int'
"""
"""Messages as people pasted them, behind the page that each has to lead to and its thread."""
PASTED = [
    (*re.split(r" ?\| ", part.partition("\n")[0]), part.partition("\n")[2].strip())
    for part in PRINTED.split("\n== ")[1:]
]


def page_for(message: str) -> str | None:
    """Follow the table from the top: the first row that fits; empty for one without a page."""
    plain = re.sub(r"[`'*]", "", message)
    for row in error_pages.text().splitlines():
        cells = row.split(" | ")
        link = re.search(r"\]\(([\w-]+)\.md\)", cells[0])
        keys = [re.sub(r"[…'*]", "", key) for key in re.findall(r"`([^`]+)`", cells[bool(link)])]
        if len(cells) == 3 and any(key in plain for key in keys):
            return link[1] if link else ""
    return None


@pytest.mark.parametrize(("page", "thread", "message"), PASTED, ids=[row[1] for row in PASTED])
def test_a_message_as_people_paste_it_leads_to_its_page(
    page: str, thread: str, message: str
) -> None:
    assert page_for(message) == page


def test_another_message_leads_nowhere() -> None:
    assert page_for("KeyError: labels") is None
    assert {page for page, _, _ in PASTED} - {""} == set(error_pages.names())


def test_the_pages_are_read_without_a_network(capsys: pytest.CaptureFixture[str]) -> None:
    """A wheel brings the folder that a checkout has."""
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert wheel == {"docs/errors": "cudalens/docs/errors"}
    for name in error_pages.names():
        assert main(["page", name]) == 0
        assert capsys.readouterr().out.strip() == error_pages.text(name).strip()
    assert main(["page"]) == 0
    assert capsys.readouterr().out.startswith("# Which error do I have?")
    assert main(["page", "nothing"]) == 1
    assert "n-classes" in capsys.readouterr().err


# --- links ---------------------------------------------------------------------------------------


def text_of(path: Path) -> str:
    """Return the Markdown of a page or a notebook."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf-8")
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as GitHub and the site make them."""
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def local(target: str, page: Path) -> Path | None:
    """Return the file of the checkout that a link leads to, ``None`` for one that leads out."""
    for base in (f"{REPOSITORY}/blob/main/", f"{REPOSITORY}/tree/main/", RAW):
        if target.startswith(base):
            return ROOT / target.removeprefix(base)
    if target.startswith(error_pages.SITE):
        path = ROOT / target.removeprefix(error_pages.SITE).removesuffix(".html")
        return path.with_suffix(".md") if path.with_suffix(".md").exists() else path
    return None if re.match(r"\w+:", target) else page.parent / target


def dead(text: str, page: Path) -> list[str]:
    """Return the links of a text that lead to nothing in the checkout."""
    found = []
    bare = re.sub(r"```.*?```|`[^`\n]*`(?!\])", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", bare):
        target, _, anchor = link.partition("#")
        path = local(target, page) if target else page
        if path is None:
            continue
        is_lost = not path.exists()
        if not is_lost and anchor and path.suffix == ".md":
            is_lost = anchor not in anchors(text if path == page else text_of(path))
        if is_lost:
            found.append(link)
    return found


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_is_dead(path: Path) -> None:
    assert dead(text_of(path), path) == []


def test_a_dead_link_is_seen() -> None:
    page = ROOT / "docs" / "start.md"
    assert dead("[a](performance.md) [b](https://pytorch.org)", page) == []
    assert dead("[a](nowhere.md)", page) == ["nowhere.md"]
    assert dead("[a](how_it_works.md#modes)", page) == []
    assert dead("[a](performance.md#nowhere)", page) == ["performance.md#nowhere"]
    assert dead(f"[a]({error_pages.SITE}docs/start.html)", page) == []
    assert dead(f"[a]({error_pages.SITE}docs/nowhere.html)", page) != []
    assert dead(f"[a]({REPOSITORY}/blob/main/NOWHERE.md)", page) != []
    assert dead(f"[a]({RAW}docs/nowhere.md)", page) != []


def test_the_addresses_are_one() -> None:
    """Reports, the package index and the site's own sources name the same places."""
    urls = PROJECT["project"]["urls"]
    assert urls["Documentation"] == error_pages.SITE
    assert urls["Source"] == REPOSITORY
    assert f'"{REPOSITORY}/"' in (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")


def test_the_version_is_one() -> None:
    """What a release changes beside ``cudalens.__version__``."""
    version = cudalens.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {version} – " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_package_and_its_citation_have_one_description() -> None:
    described = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f'\nabstract: "{PROJECT["project"]["description"]}"\n' in described


def test_one_place_says_where_the_package_comes_from() -> None:
    """The README and the guide install what the notebooks install; a release changes one line."""
    lines = (ROOT / "notebooks" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    (source,) = [line for line in lines if not line.startswith("#")]
    assert f"\n%pip install {source}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"\npip install {source}\n" in (ROOT / "docs/start.md").read_text(encoding="utf-8")
    for path in ROOT.glob("notebooks/*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
        installs = [line.strip() for line in code.splitlines() if "pip install" in line]
        assert installs == [doc_pages.INSTALL], path.name


def test_the_readme_is_a_screen_and_a_half() -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 125
