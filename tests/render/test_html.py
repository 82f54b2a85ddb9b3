"""The HTML views: golden fragments, escaping, scoped styles, and life without a style sheet."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from nbconvert import HTMLExporter, MarkdownExporter

from cudalens.core.report import (
    CodeLine,
    Frame,
    GraphNode,
    Hint,
    HistoryEntry,
    LineRef,
    ProvenanceStep,
    Report,
    TensorFact,
    Timing,
)
from cudalens.render.code import code_rows
from cudalens.render.html import (
    MAX_BYTES,
    facts_of,
    history_entries,
    render_fragment,
    render_page,
    style_sheet,
)
from cudalens.render.inline import SAFE_COLOURS
from cudalens.render.svg import DARK
from cudalens.render.words import page_link, visible
from tests.builders import CELL, REPRESENTATIVE, in_a_row, make_report, source
from tests.render.test_svg import contrast
from tests.rendering import Page, check_golden, hostile_texts, sanitised, selectors, with_texts


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_page_is_the_golden_page(name: str) -> None:
    """Each representative report draws as it was approved; the style sheet has its own file."""
    html = render_page(REPRESENTATIVE[name]())
    assert html.count(style_sheet()) == 1
    body = html[html.index("<div ") : html.index("</body>")]
    check_golden(f"{name}.html", body)


def test_style_sheet_is_the_golden_one() -> None:
    check_golden("style.css", style_sheet() + "\n")


def test_clock_does_not_change_the_output() -> None:
    slow = make_report(timing=Timing(checked_ops=4, recorded_ops=412, diagnose_s=9.75))
    assert render_fragment(slow) == render_fragment(make_report())


def test_page_stands_alone() -> None:
    """The page is one whole document that asks for nothing from anywhere."""
    page = Page(render_page(make_report()))
    tags = [tag for tag, _ in page.elements]
    assert tags[0] == "html"
    assert tags.count("title") == 1 + tags.count("svg")
    assert not set(tags) & {"script", "link", "img", "iframe", "object", "embed"}
    names = {name for _, attributes in page.elements for name in attributes}
    assert not names & {"src", "srcset", "action", "background", "onclick", "id"}
    links = [attributes["href"] for _, attributes in page.elements if "href" in attributes]
    link = page_link(make_report())
    assert link is not None and links == [link.address]
    assert "url(" not in style_sheet()
    assert "@import" not in style_sheet()


def test_leak_of_a_style_would_be_seen() -> None:
    """The reading of selectors splits lists and looks into at-rules."""
    css = "@media print{.cudalens.cudalens a,pre{color:red}}\nbody:is(a,b) .x{top:0}"
    assert selectors(css) == [".cudalens.cudalens a", "pre", "body:is(a,b) .x"]


def test_class_names_are_the_projects_own() -> None:
    """No class of a front end's style sheet is borrowed by accident."""
    page = Page(render_page(make_report()))
    classes = {
        name for _, attributes in page.elements for name in (attributes.get("class") or "").split()
    }
    assert {name for name in classes if not name.startswith("cl-")} == {"cudalens", "cudalens-page"}


def everything() -> Report:
    """Return a report in which every part of every template is drawn."""
    node = GraphNode(id="x", name="x", op="x", module_path="x", dtype="x", role="leaf")
    base = make_report()
    return replace(
        base,
        forward_source=replace(source(CELL, 2, "net(x)"), file="f.py"),
        module_path="m",
        limits=("limit",),
        hints=(*base.hints, Hint(text="t", fix=None)),
        graph=replace(base.graph, nodes=(*base.graph.nodes, node)),
        environment=replace(base.environment, simulated=True, rank=1),
        tensors=(*base.tensors, TensorFact(argument="w", grad_fn="G", dtype="d", device="e")),
        frames=(*base.frames, Frame(file="a.py", line=3, function="f", text="t", cell=2)),
    )


@pytest.mark.no_cover
def test_hostile_texts_add_no_element_and_no_attribute() -> None:
    base = everything()
    plain = [with_texts(base, lambda _, text=text: text) for text in ("benign", "", "long " * 20)]  # type: ignore[misc]
    benign = set().union(*(Page(render_fragment(report)).looks() for report in (base, *plain)))
    for hostile in hostile_texts():
        report = with_texts(base, lambda _, hostile=hostile: hostile)  # type: ignore[misc]
        html = render_fragment(report)
        page = Page(html)
        assert page.looks() <= benign, hostile
        assert page.strange == [], hostile
        html.encode("utf-8")
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", html), (
            hostile
        )


def test_hostile_title_of_the_page_is_text() -> None:
    page = render_page(make_report(headline="</title><script>alert(1)</script>"))
    assert "<script" not in page
    assert "&lt;/title&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_hostile_text_stays_readable() -> None:
    """Escaping keeps what the user wrote; only control codes become signs."""
    for hostile in ("<b>&amp;\"'", "a\x1b[31m", "日本語 👩\u200d🔬"):
        text = Page(render_page(make_report(explanation=hostile))).text()
        assert visible(hostile) in text


def test_sanitised_page_tells_the_story_in_order() -> None:
    """Without styles, classes and pictures: the verdict, the code, the facts, in this order."""
    text = sanitised(render_fragment(make_report())).text()
    expected = (
        "✗ y[17] = 10 is outside the 10 classes of logits",
        "3 of 32 values are bad",
        "CUDA is fine: nothing was launched",
        "F.cross_entropy(logits, y - 1)",
        "▸ 12      loss = F.cross_entropy(logits, y)",
        "f32[32, 10] ┘",
        "i64[32], 3 bad ┘",
        "Where the bad values came from",
        "nll_loss_forward",
        "[17]",
        "AddmmBackward0",
        "aten::_log_softmax",
        "IndexError: Target 10 is out of bounds.",
        "Assertion `t >= 0 && t < n_classes` failed.",
        "NVIDIA H200",
    )
    places = [text.find(one) for one in expected]
    assert -1 not in places, expected[places.index(-1)]
    assert text.count("▸") == 1
    assert places[:8] == sorted(places[:8])


def test_nothing_is_garbled_where_styles_and_pictures_are_dropped() -> None:
    """No rule and no picture leaves its text behind, in any report; a page's would."""
    garbled = re.compile(r"[{}]|prefers-color|\.cl-|font-size|M\d+ \d+|base64")
    for build in REPRESENTATIVE.values():
        shown = sanitised(render_fragment(build()))
        assert garbled.findall(shown.text()) == []
    assert garbled.search(sanitised(render_page(make_report())).text())
    pictures = sanitised(render_fragment(make_report())).every("img")
    assert [str(at["alt"]).partition(":")[0] for at in pictures] == [
        "Autograd graph around F.cross_entropy",
        "y, 32 values by position; allowed 0 … 9 or -100 (ignore_index)",
        "y",
    ]


def test_looks_are_said_at_the_elements() -> None:
    """An untrusted page keeps the frame, the marked line and where tables begin."""
    page = Page(render_fragment(make_report()))
    assert not {"style", "svg", "script"} & {tag for tag, _ in page.elements}
    looks = {at.get("class"): at.get("style") or "" for _, at in page.elements}
    assert "border:1px solid #8a929a;border:1px solid var(--cl-line,#8a929a)" in looks["cl-card"]
    assert "background-color:rgba(217, 72, 63, 0.14)" in looks["cl-row cl-hot"]
    cells = [at for tag, at in page.elements if tag in ("td", "th")]
    assert all(str(at["style"]).startswith("text-align:left") for at in cells)
    (link,) = page.every("link")
    sheet = unquote(str(link["href"]).removeprefix("data:text/css,"))
    assert sheet == style_sheet().replace("\n", "")


def test_colours_without_a_theme_are_seen_on_both() -> None:
    """Nobody says whether an untrusted page is light or dark: 3 : 1 on either."""
    for role in ("bad", "warn", "link", "line"):
        for ground in ("#ffffff", "#111111", "#1e1e1e"):
            assert contrast(SAFE_COLOURS[role], ground) >= 3, (role, ground)


def test_pictures_of_a_notebook_are_the_pages_own() -> None:
    """An image holds the drawing of the page, with colours for dark pages besides."""
    page = Page(render_fragment(make_report()))
    drawn = re.findall(r"<svg .*?</svg>", render_page(make_report()), re.DOTALL)
    for at, svg in zip(page.every("img"), drawn, strict=True):
        picture = base64.b64decode(str(at["src"]).partition(",")[2]).decode()
        assert re.sub("<style>.*?</style>", "", picture) == svg
        assert "prefers-color-scheme:dark" in picture
        assert f"fill:{DARK['canvas']}" in picture


def notebook() -> nbformat.NotebookNode:
    bundle = make_report()._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", data=bundle)
    cell = nbformat.v4.new_code_cell(source="%%cudacheck\nloss", outputs=[output])
    return nbformat.v4.new_notebook(cells=[cell])


def test_notebook_converts_to_html() -> None:
    """Every element and every word of the fragment arrives in nbconvert's page."""
    html, _ = HTMLExporter().from_notebook_node(notebook())
    fragment = Page(render_fragment(make_report()))
    shown = html[html.index('<div class="cudalens ') :]
    (whole,) = re.findall("^.*?<link [^>]*>", shown, re.DOTALL)
    page = Page(whole)
    assert [(tag, set(names)) for tag, names in page.elements] == [
        (tag, set(names)) for tag, names in fragment.elements
    ]
    assert page.text().split() == fragment.text().split()


def test_notebook_converts_to_markdown() -> None:
    text, _ = MarkdownExporter().from_notebook_node(notebook())
    for fact in ("y[17] = 10", "loss = F.cross_entropy(logits, ", "i64[32]", "f32[32, 10]"):
        assert fact in text


def enormous(text: str) -> Report:
    """Return a report with far more of everything than any collector gathers."""
    nodes = (GraphNode(id=f"n{at}", name=text, op=text, module_path=text) for at in range(400))
    lines = tuple(CodeLine(line=at + 1, text=text) for at in range(500))
    return make_report(
        explanation=text,
        limits=(text,) * 300,
        hints=(Hint(text=text, fix=text),) * 300,
        provenance=(ProvenanceStep(op=text, note=text),) * 300,
        frames=(Frame(file=text, line=1, function=text, text=text, is_user=True),) * 1000,
        history=tuple(HistoryEntry(seq=at, op=text, shapes=text) for at in range(4096)),
        tensors=(TensorFact(argument=text, expression=text, shape=(1,) * 64, dtype=text),) * 300,
        source=replace(make_report().source, context=lines),
        graph=in_a_row(*nodes),
    )


@pytest.mark.parametrize("text", ["op", "<'&\">" * 2000], ids=["many", "many and long"])
def test_page_stays_below_its_size(text: str) -> None:
    """Whatever is in a report, the page is below 200 kB and says that more exists."""
    page = render_page(enormous(text))
    assert len(page.encode()) < MAX_BYTES
    assert "more in the JSON form of this report" in page


def test_history_at_its_limit_says_nothing_of_more() -> None:
    """Fifty ops fit a notebook's output; of fifty-one the oldest is counted instead."""
    ops = tuple(HistoryEntry(seq=at, op=f"aten::op{at}x") for at in range(50))
    fits = render_fragment(make_report(history=ops[1:]))
    beyond = render_fragment(make_report(history=ops))
    assert "aten::op1x" in fits
    assert "in the JSON form" not in fits
    assert "aten::op0x" not in beyond
    assert "1 more in the JSON form" in beyond


def test_one_tab_is_open_and_each_report_has_its_own_group() -> None:
    groups = []
    for report in (make_report(), make_report(headline="another")):
        every = Page(render_fragment(report)).every("details")
        tabs = [at for at in every if at.get("class") == "cl-tab"]
        assert sum("open" in at for at in tabs) == 1
        groups.append({at["name"] for at in tabs})
    assert len(groups[0]) == len(groups[1]) == 1
    assert groups[0] != groups[1]


@pytest.mark.parametrize("width", [70, 37])
def test_a_long_failing_line_is_folded(width: int) -> None:
    """Column 0 and the expression at fault are in view; other lines stay whole."""
    report = REPRESENTATIVE["long_line"]()
    rows = code_rows(report, fold=width)
    hot = [row for row in rows if row.is_hot]
    assert max(len(row.text) for row in hot) <= width + 22
    assert [row.number for row in hot if row.number] == [10]
    bad = next(row for row in hot if any(piece.tone == "bad" for piece in row.pieces))
    label = rows[rows.index(bad) + 1].text
    assert label.index("└ i64[32]") == bad.text.index("targets.view(-1)") < width
    whole = code_rows(report)
    joined = "".join(row.text.strip() for row in hot if "└" not in row.text).replace(" ", "")
    assert joined == whole[1].text.replace(" ", "")


def test_a_short_failing_line_is_not_folded() -> None:
    rows = [[row.text for row in code_rows(make_report(), fold=fold)] for fold in (None, 48, 47)]
    assert rows[0] == rows[1]
    assert [row for row in rows[0] if "└" not in row] == [row for row in rows[2] if "┘" not in row]
    assert code_rows(REPRESENTATIVE["nonfinite"](), fold=37) == code_rows(
        REPRESENTATIVE["nonfinite"]()
    )


def test_labels_that_would_pass_the_edge_are_on_the_left() -> None:
    rows = [row.text for row in code_rows(make_report(), fold=37) if row.is_hot]
    assert rows == [
        "    loss = F.cross_entropy(logits, y)",
        "               f32[32, 10] ┘       │",
        "                    i64[32], 3 bad ┘",
    ]


def test_the_width_of_the_pane_chooses_the_folding() -> None:
    """A page holds both forms and shows one; a notebook's fragment has the narrow one."""
    report = REPRESENTATIVE["long_line"]()
    for html, names in (
        (render_page(report), ["cl-code cl-wide", "cl-code cl-narrow"]),
        (render_fragment(report), ["cl-code"]),
        (render_page(REPRESENTATIVE["nonfinite"]()), ["cl-code"]),
    ):
        assert [at.get("class") for at in Page(html).every("pre")] == names


LABELS = "Assertion `t >= 0 && t < n_classes` failed."
ROWS = "Assertion `srcIndex < srcSelectDimSize` failed."
NEW = "Assertion `something new` failed."


@pytest.mark.parametrize(
    ("kind", "printed", "headline", "page"),
    [
        ("device_assert", LABELS, "", "n-classes"),
        ("device_assert", ROWS, "", "src-index-select-dim-size"),
        ("device_assert", NEW, "", "device-side-assert-triggered"),
        ("cuda_error", ROWS, "", "src-index-select-dim-size"),
        ("cuda_error", "CUDA error: an illegal memory access was encountered", "", None),
        ("cuda_error", None, "CUBLAS_STATUS_ALLOC_FAILED", "cublas-alloc-failed"),
        ("host_error", None, "input has 3 features", None),
        ("autograd_error", None, "that backward needs", "modified-by-an-inplace-operation"),
        ("autograd_error", None, "the graph was freed earlier", "backward-a-second-time"),
    ],
)
def test_the_page_of_an_error_exists(
    kind: str, printed: str | None, headline: str, page: str | None
) -> None:
    link = page_link(make_report(kind=kind, device_text=printed, headline=headline))
    assert (link.address.rpartition("/")[2] if link else None) == (page and f"{page}.html")
    assert page is None or (Path(__file__).parents[2] / "docs" / "errors" / f"{page}.md").exists()


def test_equal_ops_of_the_history_are_one_row() -> None:
    """Runs of one op are counted, a line is told once, and the failed op is the last."""
    line = LineRef(cell=1, line=4, text="x = x + 1")
    ops = [HistoryEntry(seq=at, op="aten::add", source=line) for at in range(5)]
    ops.append(HistoryEntry(seq=5, op="aten::mul", source=line))
    found = history_entries(make_report(history=tuple(ops)))
    assert [(item.times, item.entry.op, item.at) for item in found] == [
        (1, "aten::nll_loss_forward", None),
        (1, "aten::mul", 5),
        (5, "aten::add", 4),
    ]
    text = Page(render_page(make_report(history=tuple(ops)))).text()
    assert "failedaten::nll_loss_forwardf32[32, 10], i64[32]" in text
    assert "aten::add × 5" in text
    assert text.count("In [1] line 4 x = x + 1") == 1
    assert not history_entries(make_report(history=()))


def test_why_does_not_repeat_the_head() -> None:
    """The first hint is said above; the tab is there for what is said nowhere else."""
    one = make_report()
    assert "Why" not in [at.label for at in facts_of(one)["tabs"]]
    two = make_report(hints=(*one.hints, Hint(text="the other cause", fix="y % 10")))
    assert "Why" in [at.label for at in facts_of(two)["tabs"]]
    text = Page(render_page(two)).text()
    assert text.count("the labels run from 1 to 10") == 1
    assert text.count("the other cause") == 1
    assert text.count("batch 4 of loader") == 1
