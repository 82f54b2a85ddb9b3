"""The running expression: found by position, accepted only when it fits the code."""

from __future__ import annotations

import ast
import sys
from contextlib import ExitStack
from types import CodeType, FrameType, FunctionType

import pytest

from cudalens.source import files, running_node
from cudalens.source.running_node import Running, function_of, running
from cudalens.source.stack import StackEntry, place_of
from tests.probes import cell

SEEN: list[Running] = []


def look(*_: object) -> int:
    return look_from(sys._getframe(1))


class Looking:
    """Looks from inside operators, subscripts and methods."""

    def __getitem__(self, key: object) -> int:
        return look_from(sys._getframe(1))

    def __setitem__(self, key: object, value: object) -> None:
        look_from(sys._getframe(1))

    def __delitem__(self, key: object) -> None:
        look_from(sys._getframe(1))

    def __add__(self, other: object) -> Looking:
        look_from(sys._getframe(1))
        return self

    def same(self, *_: object) -> Looking:
        return self

    def method(self, *_: object) -> Looking:
        look_from(sys._getframe(1))
        return self


def look_from(frame: FrameType) -> int:
    SEEN.append(running(place_of(frame)))
    return 1


def runs(text: str) -> list[Running]:
    SEEN.clear()
    with cell(text) as code:
        exec(code, {"look": look, "it": Looking(), "same": lambda f: f})
    return list(SEEN)


@pytest.mark.parametrize(
    ("text", "call", "line"),
    [
        ("x = look(1)", "look(1)", "x = look(1)"),
        ("x = 1; y = look(x)", "look(x)", "x = 1; y = look(x)"),
        ("x = look(\n    1,\n    2,\n)", "look(1, 2)", "x = look("),
        ("x = [\n  0,\n  look(1)]", "look(1)", "x = ["),
        ("if look(1):\n    pass", "look(1)", "if look(1):"),
        ("for x in [look(1)]:\n    pass", "look(1)", "for x in [look(1)]:"),
        ("y = [x for x in [look(1)]]", "look(1)", "y = [x for x in [look(1)]]"),
        ("y = [look(x) for x in [1]]", "look(x)", "y = [look(x) for x in [1]]"),
        ("y = sum(look(x) for x in [1])", "look(x)", "y = sum(look(x) for x in [1])"),
        ("y = (lambda q: look(q))(1)", "look(q)", "y = (lambda q: look(q))(1)"),
        ("y = f'{look(1)} é'", "look(1)", "y = f'{look(1)} é'"),
        ("def g():\n    yield look(2)\nnext(g())", "look(2)", "yield look(2)"),
        ("it[1, 2]", "it[1, 2]", "it[1, 2]"),
        ("it[1] = 2", "it[1] = 2", "it[1] = 2"),
        ("del it[1]", "del it[1]", "del it[1]"),
        ("y = it + 1", "it + 1", "y = it + 1"),
        ("it += 1", "it += 1", "it += 1"),
        ("y = (it\n  .same()\n  .method(3)\n)", "it.same().method(3)", "y = (it"),
        ("class C:\n    a = look(5)", "look(5)", "a = look(5)"),
        (
            "class C:\n    def f(self): look(self.__p)\n    __p = 1\nC().f()",
            "look(self.__p)",
            "def f(self): look(self.__p)",
        ),
    ],
)
def test_the_running_call_and_its_statement_are_found(text: str, call: str, line: str) -> None:
    (run,) = runs(text)
    assert (run.call.text, run.text) == (call, line)


def test_a_call_over_several_lines_is_not_written_as_it_is_named() -> None:
    found = [*runs("x = look(1)"), *runs("x = look(\n  1)")]
    assert [run.call.is_written_so for run in found] == [True, False]


def test_a_running_decorator_is_the_line_that_is_shown() -> None:
    assert runs("@same\n@it.method\ndef f(): pass")[0].text == "@it.method"


def test_two_calls_on_one_line_are_told_apart() -> None:
    first, second = runs("a, b = look(1), look(2)")
    assert (first.call.text, second.call.text) == ("look(1)", "look(2)")


def test_a_source_that_changed_gives_the_line_and_no_expression() -> None:
    with cell("def f(): look()\nf()") as code:
        exec(code, {"look": look})
        place = SEEN[-1].place
        assert SEEN[-1].call.text == "look()"
        files.CELLS.register(place.filename, 7, ["def f(): show()", "f()"])
        changed = running(place)
        assert changed.call is None
        assert changed.text == "def f(): show()"
        assert changed.statement is not None
        assert ast.unparse(changed.statement) == "show()"


@pytest.mark.parametrize(
    ("ran", "now", "fits"),
    [
        ("look(12)", "look(23)", True),
        ("look(12)", "show(12)", False),
        ("look(12)", "show.a()", False),
        ("look(1234)", "look.it(1)", True),
        ("look(1234)", "look.th(1)", False),
        # A subscript alone can run where one ran.
        ("it[1]", "it[2]", True),
        ("it[1]", "it(1)", False),
        ("it[1]", "it+it", False),
        ("it + 1", "it - 1", True),
    ],
)
def test_only_what_the_instruction_can_run_is_its_expression(
    ran: str, now: str, *, fits: bool
) -> None:
    """The source has changed, and has something else at the very place."""
    with cell(f"def f():\n    {ran}\n    it\nf()") as code:
        exec(code, {"look": look, "it": Looking()})
        place = SEEN[-1].place
        files.CELLS.register(place.filename, 7, ["def f():", f"    {now}", "    it", "f()"])
        changed = running(place)
        assert (changed.node is not None) is fits
        assert changed.statement is not None
        assert ast.unparse(changed.statement) == ast.unparse(ast.parse(now))


def test_code_without_columns_has_a_statement_alone() -> None:
    with cell("if 1:\n    a = 1\n    b = 2") as code:
        table = bytes([0b1_1101_111, 4]) + bytes([0b1_1101_111, 0]) * 9  # two lines below the first
        place = place_of(StackEntry(code.replace(co_linetable=table), 3, 0))
        run = running(place)
        assert (run.node, run.text, run.call) == (None, "b = 2", None)
        assert run.statement is not None
        assert ast.unparse(run.statement) == "b = 2"


def test_each_cell_of_a_notebook_is_parsed_once() -> None:
    """A report looks at all of them more than once."""
    with ExitStack() as stack:
        cells = [stack.enter_context(cell(f"x = {number}")) for number in range(64)]
        names = [code.co_filename for code in cells]
        trees = [running_node.parsed_source(name) for name in names]
        again = [running_node.parsed_source(name) for name in names]
    assert all(left is right for left, right in zip(trees, again, strict=True))
    assert ast.unparse(trees[7] or ast.Module([], [])) == "x = 7"


def test_without_a_source_nothing_is_known() -> None:
    exec(compile("look()", "<no such file>", "exec"), {"look": look})
    run = SEEN[-1]
    assert (run.text, run.call, run.scope) == (None, None, None)


# --- long sources ---------------------------------------------------------------------------------


FILLER = "".join(f"a{n} = {n}\n\n" for n in range(running_node._SHORT // 2))
"""As many lines as are still parsed whole."""
PLACES = {
    "of the module": "x = look(1)\n",
    "of a function": "def f():\n    y = 1\n    return look(y)\nf()\n",
    "of a method": "class C:\n    z = 1\n\n    @same\n    def f(self):\n        look(2)\nC().f()\n",
    "of a lambda": "f = lambda: look(1)\nf()\n",
    "in a decorator": "@same\n@(look(1) and same)\ndef f():\n    pass\n",
    "in a branch": "if False:\n    pass\nelse:\n    look(3)\n",
    "of a call over several lines": "x = look(\n1,\n2,\n)\n",
    "below text that looks like code": 'def f():\n    """Text.\nx = 1\n"""\n    look(1)\nf()\n',
    "behind text that looks like code": 'x = ("""\nx = 1\n""", look(1))\n',
}


@pytest.mark.parametrize("text", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("is_above", [True, False], ids=["above", "below"])
def test_of_a_long_source_only_the_statement_is_parsed(
    text: str, is_above: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same is found as in a short one, however much stands around it."""
    short = runs(text)
    sizes: list[int] = []
    parse = running_node.parse
    monkeypatch.setattr(
        running_node, "parse", lambda code: (sizes.append(code.count("\n")), parse(code))[1]
    )
    long = runs(FILLER + text if is_above else text + FILLER)
    assert [(item.call.text, item.text) for item in long if item.node] == [
        (item.call.text, item.text) for item in short
    ]
    assert max(sizes) <= text.count("\n") + 1
    offset = FILLER.count("\n") * is_above
    assert [item.place.lineno for item in long] == [item.place.lineno + offset for item in short]


def test_behind_many_lines_that_look_like_code_the_whole_source_is_parsed() -> None:
    lines = "x = 1\n" * (running_node._STARTS + 1)
    (run,) = runs(f'{FILLER}x = ("""\n{lines}""", look(1))\n')
    assert run.call.text == "look(1)"


@pytest.mark.parametrize("beyond", [0, 1], ids=["short", "one line longer"])
def test_how_long_a_source_is_parsed_whole(beyond: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[object] = []
    monkeypatch.setattr(running_node, "_whole", lambda text: whole.append(text))
    runs(FILLER.removesuffix("\n") + "\n" * beyond + "look(1)\n")
    assert bool(whole) is not bool(beyond)


# --- pieces of a source ---------------------------------------------------------------------------


def node_of(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("f(a, b + 1)", ["f(a, b + 1)", "f", "a", "b + 1", "b", "1"]),
        ("[x for x in y]", ["[x for x in y]"]),
        ("f(lambda: z)", ["f(lambda: z)", "f"]),
    ],
)
def test_expressions_that_are_evaluated_here(text: str, wanted: list[str]) -> None:
    assert [ast.unparse(item) for item in running_node.expressions_in(node_of(text))] == wanted


def test_of_a_statement_the_body_runs_at_another_time() -> None:
    (loop,) = ast.parse("for x in y:\n    z()").body
    assert [ast.unparse(item) for item in running_node.expressions_in(loop)] == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a if c else b", ["a", "b"]), ("a + b", ["a"]), ("a.b", ["a"]), ("a[b]", ["a"]),
        ("f(a)", []), ("a", []),
    ],
)  # fmt: skip
def test_the_parts_that_decide_the_kind_of_a_value(text: str, wanted: list[str]) -> None:
    assert [ast.unparse(it) for it in running_node.kind_sources(node_of(text))] == wanted


def test_the_text_and_the_columns_of_a_node_on_one_line() -> None:
    lines = ["é = f( a,b )", "g(", "  1)"]
    first, second = ast.parse("\n".join(lines)).body
    assert isinstance(first, ast.Assign)
    assert isinstance(second, ast.Expr)
    assert running_node.text_of(first.value, lines) == "f( a,b )"
    assert running_node.span_of(first.value, lines) == (1, 4, 12)
    assert running_node.text_of(second.value, lines) == "g(1)"
    assert running_node.span_of(second.value, lines) is None
    assert running_node.span_of(first.value, []) is None
    assert running_node.text_of(first.value, []) == "f(a, b)"
    assert running_node.span_of(ast.Load(), lines) is None
    named = node_of("(n := 3)")
    assert running_node.text_of(named, ["(n := 3)"]) == "(n := 3)"
    assert running_node.column_of("é = 1", 3) == 2
    texts = [running_node.line_text(["  a ", "b"], at) for at in (0, 1, 2, 3)]
    assert texts == [None, "a", "b", None]


def test_the_text_of_a_statement_that_shares_its_line() -> None:
    found = {item.statement_text for item in runs("x = look(1); y = look(2)\nz = look(3)  # last")}
    assert found == {"x = look(1)", "y = look(2)", "z = look(3)  # last"}
    assert runs("é = 1; x = look(1) ; y = 2")[0].statement_text == "x = look(1)"
    for text in ("x = look(", "y = 1; x = look("):
        (several,) = runs(f"{text}\n    1)")
        assert several.statement_text == text
    with cell("x = look(1); y = 2") as code:
        exec(code, {"look": look})
        files.CELLS.typed[code.co_filename] = ("%time x = look(1); y = 2",)
        assert SEEN[-1].statement_text == "%time x = look(1); y = 2"


@pytest.mark.parametrize(
    ("text", "scope"),
    [
        ("y = look(1) + 2", "y = look(1) + 2"),
        ("y = sum(look(x) for x in [1])", "look(x)"),
        ("y = (lambda q: look(q) + 1)(1)", "look(q) + 1"),
    ],
)
def test_the_largest_piece_whose_names_mean_the_same(text: str, scope: str) -> None:
    (found,) = runs(text)
    assert found.scope is not None
    assert ast.unparse(found.scope) == scope


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        ("[here for x, (y, *z) in xs for w in x]", {"x", "y", "z", "w"}),
        ("[0 for x in xs for w in here]", {"x", "w"}),
        ("{here: 0 for x in xs}", {"x"}),
        ("[[here for y in x] for x in xs]", {"x", "y"}),
        # Evaluated outside, and in functions of their own.
        ("[0 for x in here]", set()),
        ("(here for x in xs)", set()),
        ("[(here for y in ys) for x in xs]", set()),
        ("[(lambda: here) for x in xs]", set()),
    ],
)
def test_the_variables_of_a_comprehension_that_its_frame_has_left(
    text: str, ended: set[str]
) -> None:
    def path_to(node: ast.AST) -> tuple[ast.AST, ...]:
        if isinstance(node, ast.Name) and node.id == "here":
            return (node,)
        paths = map(path_to, ast.iter_child_nodes(node))
        return next(((node, *path) for path in paths if path), ())

    def frame_of(name: str) -> FrameType:
        code = (lambda: (yield)).__code__
        return FunctionType(code.replace(co_name=name), {})().gi_frame  # type: ignore[no-any-return]

    def gone(name: str, moved: int) -> set[str]:
        place = place_of(frame := frame_of(name))
        place = place._replace(lasti=place.lasti + moved)
        assert frame is place.frame
        *parents, node = path_to(ast.parse(text))
        made = Running(place=place, node=node, parents=tuple(parents)).evaluator
        return set(made.gone if made is not None else ())

    assert gone("f", 2) == ended
    assert gone("f", 0) == gone("<listcomp>", 2) == set()


def test_a_statement_of_a_cell_mentions_what_the_cell_does() -> None:
    seen: list[dict[str, object]] = []
    text = "def inner(): look()\ninner()\nlook()\nother"
    names = {"look": lambda: seen.append(running_node.mentioned(sys._getframe(1))), "other": 3}
    with cell(text) as code:
        for line in text.splitlines()[:3]:  # as a shell compiles them
            exec(compile(line, code.co_filename, "exec"), names)
    inner, outer = seen
    assert "other" not in inner
    assert outer["other"] == 3


def test_variables_that_the_running_code_mentions() -> None:
    seen: list[dict[str, object]] = []

    def mention(own: int) -> None:
        seen.append(running_node.mentioned(sys._getframe()))

    mention(3)
    (found,) = seen
    assert found["own"] == 3
    assert found["seen"] is seen
    assert found["running_node"] is running_node
    assert "runs" not in found
    assert found["_getframe"] is None


@pytest.mark.parametrize(("line", "is_on"), [(1, False), (2, True), (3, True), (4, False)])
def test_the_lines_that_a_statement_is_written_on(line: int, is_on: bool) -> None:
    (_, loop, _) = ast.parse("a = 1\nfor b in c:\n    d\ne = 1").body
    assert running_node.has_line(loop, line) is is_on


def test_the_syntax_of_the_function_of_a_code() -> None:
    with cell("def f(): pass\nclass A:\n    def f(self): return 1\n@print\ndef g(): pass") as code:
        codes = {it.co_name: it for it in code.co_consts if isinstance(it, CodeType)}
        method = next(it for it in codes["A"].co_consts if isinstance(it, CodeType))
        found = function_of(codes["f"]), function_of(method)
        assert [it and it.lineno for it in found] == [1, 3]
        assert function_of(code) is function_of(codes["g"]) is None  # a cell; one with a decorator
    assert function_of(compile("def f(): pass", "<no such file>", "exec")) is None
