"""The interactive view: its parts, the linked selection, what it tells Python, and its size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import ipywidgets
import pytest
from markupsafe import Markup

from cudalens import simulate
from cudalens.core.report import AutogradNeighbourhood, Replay, Report
from cudalens.render import widget as lens
from cudalens.render import words
from cudalens.render.lens import parts as lens_parts
from cudalens.render.words import headline
from tests.builders import REPRESENTATIVE, in_a_row, make_report, node
from tests.hostcells import run_cell
from tests.rendering import Page, hostile_texts, selectors, with_texts

STATIC = Path(lens.__file__).with_name("static")
MAX_MODULE_BYTES = 15_000
MAX_NOTEBOOK_BYTES = 250_000


@pytest.fixture(autouse=True)
def no_widget_is_left() -> Iterator[None]:
    """Widgets live in a registry of the process until they are closed."""
    ipywidgets.Widget.close_all()  # those of other tests
    yield
    ipywidgets.Widget.close_all()


def parts(view: Any) -> list[Any]:
    """Return a widget and all below it, outermost first."""
    return [view, *(found for child in getattr(view, "children", ()) for found in parts(child))]


def of_kind(view: Any, kind: type) -> list[Any]:
    return [part for part in parts(view) if isinstance(part, kind)]


def with_class(view: Any, name: str) -> Any:
    return next(part for part in parts(view) if name in part._dom_classes)


def html_of(view: Any) -> str:
    return "".join(part.value for part in of_kind(view, ipywidgets.HTML))


def button(view: Any, label: str) -> Any:
    return next(b for b in of_kind(view, ipywidgets.Button) if b.description == label)


class Reader:
    """Does what the browser module does for a reader."""

    def __init__(self, report: Report) -> None:
        self.view = lens.build(report)
        self._said = 0

    def choose(self, keys: str = "") -> None:
        self._said += 1
        with_class(self.view, "cl-wire").value = f"{self._said} {keys}"

    @property
    def marks(self) -> set[str]:
        """The keys that the style rule marks."""
        return set(re.findall(r'data-k~="(\w+)"', html_of(self.view)))

    @property
    def details(self) -> str:
        return Page(with_class(self.view, "cl-details").value).text()

    def marked(self) -> list[str]:
        """Return the own keys of the drawn things that carry a marked key."""
        found = []
        for part in of_kind(self.view, ipywidgets.HTML):
            for _, at in Page(part.value).elements:
                if self.marks & set((at.get("data-k") or "").split()):
                    found.append(str(at["data-id"]))
        return found


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_every_report_has_a_view_that_is_saved_small(name: str) -> None:
    """Notebook metadata holds the state of every widget; text and HTML lie in the bundle."""
    report = REPRESENTATIVE[name]()
    assert headline(report) in Page(html_of(lens.build(report))).text()
    state = ipywidgets.Widget.get_manager_state(drop_defaults=False)
    bundle = report._repr_mimebundle_()
    assert len(json.dumps(state)) + len(json.dumps(bundle)) < MAX_NOTEBOOK_BYTES


def test_only_core_widgets_are_used() -> None:
    """A front end without our package and without a network knows every one of them."""
    modules = {part._model_module for part in parts(lens.build(make_report()))}
    assert modules == {"@jupyter-widgets/controls", "@jupyter-widgets/output"}


TABS = ["Values", "Tensors 2", "History 5", "Replay on CPU", "Call stack 2", "Environment"]


@pytest.mark.parametrize(
    ("report", "titles"),
    [
        (make_report(), TABS),
        (make_report(replay=Replay()), TABS),
        # The state of CUDA alone is told above already.
        (make_report(replay=Replay(), device_text=None), [*TABS[:3], *TABS[4:]]),
        (Report(), TABS[-1:]),
    ],
)
def test_the_tabs_answer_in_order(report: Report, titles: list[str]) -> None:
    """Those that a report has nothing for are left out."""
    (tab,) = of_kind(lens.build(report), ipywidgets.Tab)
    assert [tab.get_title(at) for at, _ in enumerate(tab.children)] == titles


@pytest.mark.parametrize(
    ("key", "marked", "other", "said"),
    [
        # The addmm is also the tensor logits, a line of the code and a recorded op.
        ("n2", {"n2", "t0", "h3", "l0"}, "n0", "AddmmBackward0"),
        # The labels are the bad input of the graph.
        ("t1", {"t1", "n3"}, "n2", "i64[32]"),
    ],
)
def test_what_is_chosen_is_marked_in_every_pane(
    key: str, marked: set[str], other: str, said: str
) -> None:
    reader = Reader(make_report())
    assert reader.marks == set()
    reader.choose(key)
    assert reader.marks == {key}
    assert marked <= set(reader.marked())
    assert other not in reader.marked()
    assert said in reader.details


def test_nothing_chosen_marks_nothing() -> None:
    reader = Reader(make_report())
    reader.choose("n2")
    assert reader.marks == {"n2"}
    reader.choose()
    assert (reader.marks, reader.details) == (set(), "")


def test_a_tensor_that_two_nodes_can_have_made_is_linked_with_neither() -> None:
    """A link is proven or it is not there."""
    report = make_report()
    graph = report.graph
    twin = replace(graph.nodes[2], id="twin")
    reader = Reader(replace(report, graph=replace(graph, nodes=(*graph.nodes, twin))))
    reader.choose("t0")
    assert not {"n2", "n7"} & set(reader.marked())


@pytest.mark.parametrize(
    "said",
    [
        *(f"1 {keys}" for keys in ("n7", "x1", "n-1", "n0]{}*{display:none", "t2 h5", "👩")),
        *("", "1", "1 ", "1 drop", "select n1", "__class__ n0"),
    ],
)
def test_unknown_keys_do_nothing(said: str) -> None:
    reader = Reader(make_report())
    before = html_of(reader.view)
    with_class(reader.view, "cl-wire").value = said
    assert html_of(reader.view) == before
    assert reader.marks == set()


def test_views_of_a_module_go_without_saying() -> None:
    """A box of a transpose and a product is told by the product."""
    nodes = [node("n0", "aten::t"), node("n1", "aten::addmm"), node("n2", "aten::exp")]
    graph = in_a_row(*nodes, node("n3", "aten::sum", "failed"))
    reader = Reader(make_report(graph=graph))
    reader.choose("n0 n1")
    assert "F.linear" in reader.details and "upstream" not in reader.details
    assert not re.search(r"^t$", reader.details, re.MULTILINE)


def test_the_slider_shows_one_row() -> None:
    view = lens.build(REPRESENTATIVE["segmentation"]())
    (slider,) = of_kind(view, ipywidgets.SelectionSlider)
    assert [label for label, _ in slider.options] == [str(at) for at in range(24)]
    assert "mask[0]: 192 bad" in Page(html_of(view)).text()
    slider.value = 5
    assert "mask[5]: 4 bad" in Page(html_of(view)).text()
    slider.value = 1
    assert "mask[1]: no bad value" in Page(html_of(view)).text()


def test_without_a_picture_the_code_has_the_whole_width() -> None:
    """The details of what is chosen stand below the code."""
    assert len(with_class(lens.build(make_report()), "cl-panes").children) == 2
    graph = make_report().graph
    few = replace(graph, nodes=graph.nodes[4:], edges=graph.edges[4:])
    for shown in (AutogradNeighbourhood(), few):
        reader = Reader(make_report(graph=shown))
        assert len(with_class(reader.view, "cl-panes").children) == 1
        reader.choose("t1")
        assert "i64[32]" in reader.details
    bare = Report(headline="gone", explanation="why")
    assert len(with_class(lens.build(bare), "cl-panes").children) == 1


@pytest.mark.parametrize(
    ("shape", "ends"),
    [
        ((24, 192), None),  # two dimensions are seen at once
        # A map has at most 32 rows: torch.tensor_split makes the first ones one longer.
        ((50, 16, 12), ["0–2", "3–5", "6–7", "48–49"]),
    ],
)
def test_the_slider_names_the_rows_of_a_bin(shape: tuple[int, ...], ends: object) -> None:
    report = REPRESENTATIVE["segmentation"]()
    fact = replace(report.tensors[0], shape=shape)
    view = lens.build(replace(report, tensors=(fact, *report.tensors[1:])))
    rows = [[label for label, _ in s.options] for s in of_kind(view, ipywidgets.SelectionSlider)]
    assert [[*labels[:3], labels[-1]] for labels in rows] == ([ends] if ends else [])


@pytest.mark.parametrize(("text", "kept"), [("", 5), ("ADDMM", 1), ("net.1", 1), ("zzz", 0)])
def test_the_history_is_filtered(text: str, kept: int) -> None:
    view = lens.build(make_report())
    field = next(f for f in of_kind(view, ipywidgets.Text) if f.description == "filter")
    field.value = "something else"
    field.value = text
    page = Page(html_of(view))
    assert sum(str(at.get("data-id", "")).startswith("h") for _, at in page.elements) == kept


@pytest.mark.parametrize("suffix", ["html", "json", "txt"])
def test_saving_never_overwrites(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    view = lens.build(make_report())
    for _ in range(2):
        button(view, {"txt": "Text"}.get(suffix, suffix.upper())).click()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"cudalens_report_1.{suffix}", f"cudalens_report_2.{suffix}"]
    assert f"saved as {names[1]}" in Page(html_of(view)).text()


def test_a_save_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Report, "save", Mock(side_effect=OSError("no space left on device")))
    view = lens.build(make_report())
    button(view, "JSON").click()
    assert "not saved: no space left on device" in Page(html_of(view)).text()


@pytest.mark.parametrize("is_ours", [True, False])
def test_export_stands_in_the_head(is_ours: bool) -> None:
    """Beside the headline, one click away; nothing hides it by width.

    A widget that the user asked for cannot be replaced: there is no output of that name.
    """
    view = lens.build(make_report(), keep=lambda: None) if is_ours else make_report().widget()
    top = with_class(view, "cl-top")
    choices = with_class(top, "cl-choices")
    labels = [b.description for b in of_kind(choices, ipywidgets.Button)]
    assert labels == ["HTML", "JSON", "Text", *["Keep in notebook"] * is_ours]
    assert with_class(view, "cl-card").children[0] is top
    assert choices.layout.display == "none"
    button(top, "Export").click()
    assert choices.layout.display is None
    button(top, "Export").click()
    assert choices.layout.display == "none"
    assert not re.search(r"cl-(export|choices|top)[^{}]*\{[^}]*display:none", html_of(view))


def test_every_view_names_the_same_expression_first(sim: simulate.Simulation) -> None:
    """The user's ``labels[2]``, before any name that the op's schema has for it."""
    code = """
import torch
from torch.nn import functional as F
scores = torch.zeros(3, 5, device="cuda")
labels = torch.tensor([0, 1, 9], device="cuda")
F.cross_entropy(scores, labels)
"""
    outcome = run_cell(code)
    report = outcome.shown
    views = (
        str(outcome.error),
        report.to_text(),
        Page(report.to_html()).text(),
        Page(html_of(lens.build(report))).text(),
    )
    for text in views:
        found = re.search(r"\w+\[2\] = 9", text)
        assert found is not None and found[0] == "labels[2] = 9"
        assert "target" not in text[: found.start()]


@pytest.mark.parametrize("kind", ["device_assert", "host_error"])
def test_the_page_on_this_error_is_linked_once(kind: Any) -> None:
    """Of a kind that has one, and of none that has not."""
    report = make_report(kind=kind)
    page = words.page_link(report)
    assert (page is not None) is (kind == "device_assert")
    links = re.findall('href="([^"]*)"', html_of(lens.build(report)))
    assert links == ([page.address] if page else [])


def test_keeping_is_told_only_where_the_view_is_still_there() -> None:
    """The button replaces the view; where nothing is replaced, it says what to do."""
    pressed: list[int] = []
    view = lens.build(make_report(), keep=lambda: pressed.append(1))
    assert "not kept" not in Page(html_of(view)).text()
    button(view, "Keep in notebook").click()
    assert pressed == [1]
    assert "not kept: this page was loaded after the cell ran" in Page(html_of(view)).text()


def test_the_report_as_text_is_whole() -> None:
    report = make_report()
    shown = of_kind(lens.build(report), ipywidgets.HTML)
    (html,) = [part.value for part in shown if 'class="cl-text"' in part.value]
    assert report.to_text().strip() in Page(html).text()


def test_views_have_layouts_styles_and_the_style_sheet_in_common() -> None:
    """Of a second report a saved notebook holds only what is its own, until all are closed."""
    widgets = ipywidgets.Widget.get_manager_state
    first, second = (lens.build(make_report()) for _ in range(2))
    assert first.children[0] is second.children[0]
    assert first.layout is second.layout
    roots = [re.findall(r"cl-lens-\w+", " ".join(view._dom_classes)) for view in (first, second)]
    assert roots[0] != roots[1]  # a choice in one marks nothing in the other
    kinds = [state["model_name"] for state in widgets(drop_defaults=True)["state"].values()]
    assert kinds.count("LayoutModel") < 12
    ipywidgets.Widget.close_all()
    assert lens.build(make_report()).layout.comm is not None


def test_the_module_is_small_and_names_no_address() -> None:
    """It works offline: nothing is loaded from anywhere."""
    script = (STATIC / "lens.js").read_text(encoding="utf-8")
    assert len(script.encode()) < MAX_MODULE_BYTES
    assert re.findall(r"https?:|import\s|fetch\(|eval\(|innerHTML", script) == []


def test_the_module_holds_nothing_of_the_report() -> None:
    """So no text of the user can end its script element."""
    scripts = []
    for report in (make_report(), Report()):
        (carrier,) = of_kind(lens.build(report), ipywidgets.Output)
        scripts.append(re.sub(r"cl-lens-\w+", "", carrier.outputs[0]["data"]["text/html"]))
    assert scripts[0] == scripts[1]
    assert scripts[0].count("</script>") == 1
    assert "%R" not in scripts[0]


def test_nothing_moves_when_the_system_asks_for_rest() -> None:
    html = html_of(lens.build(make_report()))
    assert "prefers-reduced-motion:reduce" in html
    assert "prefers-reduced-motion: reduce" in (STATIC / "lens.js").read_text(encoding="utf-8")


def test_a_long_fix_leaves_room_for_its_reason() -> None:
    html = html_of(lens.build(make_report()))
    own = html[html.index(".cl-lens .cl-try{") :]
    assert "flex-wrap:wrap" in own[: own.index("}")]
    reason = own[own.index(".cl-try>span{") :]
    assert "flex:1 1 260px" in reason[: reason.index("}")]


def test_every_rule_of_the_style_is_scoped() -> None:
    """Those of the static views, which stand in it, as well."""
    view = lens.build(make_report())
    style = next(p.value for p in of_kind(view, ipywidgets.HTML) if "<style>" in p.value)
    found = selectors(style.removeprefix("<style>").removesuffix("</style>"))
    root = re.compile(r"(^|\s)\.cudalens\.cudalens(?![\w-])")
    assert len(found) > 140 and style.count(".cl-lens ") > 40
    assert [one for one in found if not root.search(one)] == []


@pytest.mark.no_cover
@pytest.mark.parametrize(
    "name", ["labels", "segmentation", pytest.param("bert_backward", marks=pytest.mark.all)]
)
def test_hostile_texts_add_nothing(name: str) -> None:
    known = _known_looks()
    report = REPRESENTATIVE[name]()
    for number, text in enumerate(hostile_texts()):
        if number % 3 == list(REPRESENTATIVE).index(name) % 3:
            assert _looks(with_texts(report, lambda _, text=text: text)) <= known, repr(text)  # type: ignore[misc]


def test_the_fuzz_test_sees_what_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    known = _known_looks()
    raw = SimpleNamespace(**{**vars(words), "format_shape": _raw})
    monkeypatch.setattr(lens_parts, "words", raw)
    assert not _looks(make_report()) <= known


def _known_looks() -> set[tuple[str, ...]]:
    reports = [build() for build in REPRESENTATIVE.values()]
    wide = [with_texts(report, lambda _: "long " * 20) for report in reports]
    return set().union(*map(_looks, (*reports, *wide)))


def _raw(sizes: object) -> Markup:
    return Markup("<b onclick=x>[32]</b>")


def _looks(report: Report) -> set[tuple[str, ...]]:
    view = lens.build(report)
    with_class(view, "cl-wire").value = "1 n0 t0 h0"
    found: set[tuple[str, ...]] = set()
    for part in of_kind(view, ipywidgets.HTML):
        page = Page(part.value)
        assert page.strange == []
        found |= page.looks()
    ipywidgets.Widget.close_all()
    return found
