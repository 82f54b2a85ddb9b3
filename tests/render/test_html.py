"""The HTML views: golden fragments, escaping, scoped styles, and life without a style sheet."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from markupsafe import escape
from nbconvert import HTMLExporter, MarkdownExporter

from cudalens.core.report import (
    CodeLine,
    Frame,
    GraphNode,
    Hint,
    HistoryEntry,
    LineRef,
    Observation,
    ProvenanceStep,
    RaisedException,
    Report,
    SourceSpan,
    TensorFact,
    TensorSummary,
    Timing,
)
from cudalens.core.report_types import MarkedLine
from cudalens.render.code import Block, Piece, Row
from cudalens.render.html import (
    MAX_BYTES,
    _padding,
    _said,
    history_entries,
    render_fragment,
    render_page,
    style_sheet,
)
from cudalens.render.inline import SAFE_COLOURS
from cudalens.render.markdown import render
from cudalens.render.words import page_link, visible
from tests.builders import CELL, REPRESENTATIVE, in_a_row, make_report, mismatch, source
from tests.render.test_colours import contrast
from tests.rendering import Page, check_golden, hostile_texts, sanitised, selectors, with_texts


@pytest.mark.parametrize("name", ["labels", "lost_context"])
def test_page_is_the_golden_page(name: str) -> None:
    """A few reports draw as they were approved; the style sheet has its own file."""
    html = render_page(REPRESENTATIVE[name]())
    assert html.count(style_sheet()) == 1
    body = html[html.index("<section ") : html.index("</body>")]
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
    assert tags.count("title") == 1
    assert not set(tags) & {"script", "link", "iframe", "object", "embed"}
    assert all(str(at["src"]).startswith("data:image/png") for at in page.every("img"))
    names = {name for _, attributes in page.elements for name in attributes}
    assert not names & {"srcset", "action", "background", "onclick", "id"}
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
        "CUDA is fine",
        "3 of 32 values are bad",
        "Try line 12 F.cross_entropy(logits, y - 1)",
        "The labels run from 1 to 10: they look 1-based. Tested on copies: it runs.",
        'y.to("cuda")',
        "◂ out of bounds before it reached the device",
        "loss = F.cross_entropy(logits, y)",
        "└ i64[32], 3 bad",
        "└ f32[32, 10]",
        "Graph",
        "not launched",
        "position",
        "aten::_log_softmax",
        "Assertion `t >= 0 && t < n_classes` failed.",
        "### device-side assert: y[17] = 10",
    )
    places = [text.find(one) for one in expected]
    assert -1 not in places, expected[places.index(-1)]
    assert places == sorted(places)


def test_nothing_is_garbled_where_styles_and_pictures_are_dropped() -> None:
    """No rule and no picture leaves its text behind, in any report; a page's would."""
    garbled = re.compile(r"[{}]|prefers-color|\.cl-|font-size|M\d+ \d+|base64")
    for name, build in REPRESENTATIVE.items():
        shown = sanitised(render_fragment(build()))
        assert garbled.findall(shown.text()) == [], name
    assert garbled.search(sanitised(render_page(make_report())).text())
    pictures = sanitised(render_fragment(make_report())).every("img")
    assert [str(at["alt"]).partition(":")[0] for at in pictures] == [
        "how often each value of y occurs"
    ]


def test_looks_are_said_at_the_elements() -> None:
    """An untrusted page keeps the frame, the marked line and where tables begin."""
    page = Page(render_fragment(make_report()))
    assert not {"style", "svg", "script"} & {tag for tag, _ in page.elements}
    looks = {at.get("class"): at.get("style") or "" for _, at in page.elements}
    assert "border-left:4px solid #d9483f;border-left:4px solid var(--cl-bad" in looks["cl-card"]
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


def notebook() -> nbformat.NotebookNode:
    bundle = make_report()._repr_mimebundle_()
    output = nbformat.v4.new_output("display_data", data=bundle)
    cell = nbformat.v4.new_code_cell(source="%%cudacheck\nloss", outputs=[output])
    return nbformat.v4.new_notebook(cells=[cell])


def test_notebook_converts_to_html() -> None:
    """Every element and every word of the fragment arrives in nbconvert's page."""
    html, _ = HTMLExporter().from_notebook_node(notebook())
    fragment = Page(render_fragment(make_report()))
    shown = html[html.index("<section") :]
    (whole,) = re.findall("^.*?<link [^>]*>", shown, re.DOTALL)
    page = Page(whole)
    assert [(tag, set(names)) for tag, names in page.elements] == [
        (tag, set(names)) for tag, names in fragment.elements
    ]
    assert page.text().split() == fragment.text().split()


def test_notebook_converts_to_markdown() -> None:
    text, _ = MarkdownExporter().from_notebook_node(notebook())
    for fact in ("y[17] = 10", "loss = F.cross_entropy(logits, y)", "i64[32]", "f32[32, 10]"):
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
    assert "more are in the JSON form" in page


def test_history_at_its_limit_says_nothing_of_more() -> None:
    """Fifty ops fit a notebook's output; of fifty-one the oldest is counted instead."""
    ops = tuple(HistoryEntry(seq=at, op=f"aten::op{at}x") for at in range(50))
    fits = render_fragment(make_report(history=ops[1:]))
    beyond = render_fragment(make_report(history=ops))
    assert "aten::op1x" in fits
    assert "in the JSON form" not in fits
    assert "aten::op0x" not in beyond
    assert "1 more are in the JSON form" in beyond
    assert "aten::op0x" in render_page(make_report(history=ops))  # a page has room for 200


def test_one_drawer_is_open_at_a_time_and_each_report_has_its_own_group() -> None:
    """The graph is open for errors that are about it, and only then."""
    groups = []
    for report, is_open in ((make_report(), False), (REPRESENTATIVE["mismatch"](), True)):
        every = Page(render_fragment(report)).every("details")
        drawers = [at for at in every if at.get("class") == "cl-drawer"]
        assert sum("open" in at for at in drawers) == is_open
        groups.append({at["name"] for at in drawers})
    assert len(groups[0]) == len(groups[1]) == 1
    assert groups[0] != groups[1]


LABELS = "Assertion `t >= 0 && t < n_classes` failed."
ROWS = "Assertion `srcIndex < srcSelectDimSize` failed."
NEW = "Assertion `something new` failed."


@pytest.mark.parametrize(
    ("kind", "printed", "message", "page"),
    [
        ("device_assert", LABELS, "", "n-classes"),
        ("device_assert", ROWS, "", "src-index-select-dim-size"),
        ("device_assert", NEW, "", "device-side-assert-triggered"),
        ("cuda_error", ROWS, "", "src-index-select-dim-size"),
        ("cuda_error", "CUDA error: an illegal memory access was encountered", "", None),
        ("cuda_error", None, "CUBLAS_STATUS_ALLOC_FAILED", "cublas-alloc-failed"),
        ("host_error", None, "input has 3 features", None),
        (
            "autograd_error",
            None,
            "a variable has been modified by an inplace operation",
            "modified-by-an-inplace-operation",
        ),
        (
            "autograd_error",
            None,
            "Trying to backward through the graph a second time",
            "backward-a-second-time",
        ),
    ],
)
def test_the_page_of_an_error_exists(
    kind: str, printed: str | None, message: str, page: str | None
) -> None:
    """It is found by what torch and CUDA say, not by what the report says of it."""
    error = RaisedException(type="RuntimeError", message=message)
    link = page_link(make_report(kind=kind, device_text=printed, exception=error))
    assert (link.address.rpartition("/")[2] if link else None) == (page and f"{page}.html")
    assert page is None or (Path(__file__).parents[2] / "docs" / "errors" / f"{page}.md").exists()


def test_equal_ops_of_the_history_are_one_row() -> None:
    """Runs of one op are counted, a line is told once, and the failed op is the last."""
    line = LineRef(cell=1, line=4, text="x = x + 1")
    ops = [HistoryEntry(seq=at, op="aten::add", source=line) for at in range(5)]
    ops.append(HistoryEntry(seq=5, op="aten::mul", source=line))
    found = history_entries(make_report(history=tuple(ops)))
    assert [(item.times, item.entry.op, item.entry.seq) for item in found] == [
        (1, "aten::nll_loss_forward", 6),
        (1, "aten::mul", 5),
        (5, "aten::add", 4),
    ]
    text = Page(render_page(make_report(history=tuple(ops)))).text()
    assert "failedaten::nll_loss_forwardf32[32, 10], i64[32]" in text
    assert "aten::add × 5" in text
    assert text.count("In [1] line 4 x = x + 1") == 1
    assert not history_entries(make_report(history=()))


def test_a_mark_that_a_picture_would_cut_stands_below_its_line() -> None:
    """Beside a picture of 180 pixels there are 88 columns; alone, the mark stands beside it."""
    mark = MarkedLine(cell=7, line=10, text=CELL[1], mark="the labels come from here " * 3)
    observed = Observation(kind="came_from", text="so", sources=(mark,))
    beside = re.compile(r'cl-pad" ?>\n')
    report = make_report(observations=(observed,))
    assert beside.search(render_fragment(report))
    assert not beside.search(render_fragment(replace(report, offenders=None)))


def test_a_screen_reader_is_told_no_drawn_lines() -> None:
    """Labels and marks are read; the rules and arrows that lead to them are for the eye."""
    html = render_fragment(make_report())
    heard = re.sub(r'<span aria-hidden="true">.*?</span>', "", html)
    code = heard[heard.index("<pre") : heard.index("</pre>")]
    assert "i64[32], 3 bad" in code
    assert not set("│└├┘◂") & set(code)
    assert set("│└◂") <= set(html)


@pytest.mark.parametrize(("columns", "is_far"), [(75, False), (76, True)])
def test_labels_beyond_a_narrow_pane_have_a_form_for_it(columns: int, is_far: bool) -> None:
    """Three columns of line numbers are drawn before the code, which ends with its label."""
    call = f"{'f' * (columns - len('(y)') - len('└ i64[32], 3 bad') + 2)}(y)"
    line = SourceSpan(
        cell=1,
        line=3,
        end_line=3,
        column=0,
        end_column=len(call),
        text=call,
        context=(CodeLine(line=3, text=call),),
    )
    y = replace(make_report().tensors[1], span=(3, len(call) - 2, len(call) - 1))
    report = make_report(source=line, tensors=(y,), observations=(), provenance=())
    html = render_fragment(report)
    assert ("cl-main cl-far" in html) is is_far


@pytest.mark.parametrize("is_drawn", [True, False])
def test_a_label_passes_the_fold_only_where_no_picture_cuts_it(is_drawn: bool) -> None:
    call = f"f({'a' * 90 if not is_drawn else 'a' * 70}, y)"
    y = make_report().tensors[1]
    y = replace(y, span=(9, len(call) - 2, len(call) - 1))
    report = make_report(source=source((call,), 0, call), tensors=(y,), provenance=())
    shown = report if is_drawn else replace(report, tensors=(replace(y, summary=TensorSummary()),))
    text = sanitised(render_fragment(shown)).text()
    assert ("i64[32], 3 bad ┘" in text) is is_drawn
    assert ("└ i64[32], 3 bad" in text) is not is_drawn
    # Code alone is folded by the page.
    assert "cl-main cl-far" not in render_fragment(replace(shown, tensors=(), offenders=None))


def test_line_numbers_of_all_files_end_in_one_column() -> None:
    marks = (MarkedLine(file="/a/network.py", line=123, text="n = 10", mark="set here"),)
    seen = Observation(kind="bound", text="10 classes", sources=marks)
    html = render_fragment(make_report(observations=(seen,), provenance=()))
    numbers = re.findall(r'class="cl-n"[^>]*>([^<]*)<', html)
    assert "network.py" in "".join(numbers) and "In [7]" in "".join(numbers)
    assert len({len(number) for number in numbers if number.strip()}) == 1


def test_a_report_to_share_is_whole_where_other_texts_are_cut() -> None:
    report = make_report(
        limits=tuple(f"<{at}> {'is unknown ' * 50}" for at in range(3)),
        frames=(Frame(file="a.py", line=3, function="f\x1b", text="t", is_user=True),),
    )
    html = render_fragment(report)
    assert str(escape(render(report).strip())) in html
    assert "f␛" in html and "f\x1b" not in html


def test_a_name_below_its_line_is_brief() -> None:
    long = "torch.randn(2, 3, 64, 64, device=device)"
    first, *others = make_report().tensors
    html = render_fragment(make_report(tensors=(replace(first, expression=long), *others)))
    below = re.findall(r'cl-narrow[^>]*>[^<]*<span class="[^"]*"[^>]*>([^<]*)', html)
    assert not any(long in name for name in below)
    assert [name for name in below if "…" in name] == ["torch.randn…ce=device)  f32[32, 10]"]


@pytest.mark.parametrize("said", ["", "rank 3 failed"])
def test_a_place_alone_stands_beside_the_code(said: str) -> None:
    """It takes a line of its own only where there is more to say in it."""
    more = (Observation(kind="values", text=said),) if said else ()
    report = replace(mismatch(), observations=more)
    html = render_fragment(report)
    place = f"In [{mismatch().source.cell}]"  # type: ignore[union-attr]
    beside = re.findall(r'class="cl-n"[^>]*>(In \[\d+\])', html)
    assert beside == ([] if said else [place])
    line = re.findall(r'<p class="cl-sub"[^>]*>(.*?)</p>', html[: html.index("<pre")])
    assert [place in text for text in line] == ([True] if said else [])


def test_a_long_mark_is_within_the_fold_beside_a_long_line() -> None:
    """The marks of a block stand below each other only as far as each has room."""
    long = Row(number=1, pieces=(Piece(text="x" * 100),), marks=("a",))
    short = Row(number=2, pieces=(Piece(text="y = 1"),), marks=("made here by one of them" * 2,))
    block = Block(title="", rows=(long, short))
    for row in block.rows:
        padding = _padding(112, 2, block, row)
        assert padding.strip(" ") == ""
        # The first two blanks count as a part of the mark.
        assert len(row.text) + len(padding) - 2 + _said(row) <= 112
