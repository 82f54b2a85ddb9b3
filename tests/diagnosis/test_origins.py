"""Where a fix acts: at the failing call, at the line that made the values, or nowhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from cudalens.core.evidence_types import Binding, LostDimension, Regrouped
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import Hint, LineRef, SourceSpan
from cudalens.diagnosis.candidates import Trial, TrialResult
from cudalens.diagnosis.moves import Called
from cudalens.diagnosis.origins import (
    at_origin,
    batch_second,
    features_of_images,
    lost_dimension,
    true_division,
)
from cudalens.diagnosis.user_code import Change, Fix
from tests.builders import entries, fact, spelled
from tests.hint_evidence import made, syntax_of

HERE = SourceSpan(cell=1, line=9, end_line=9, text="f(y)")


class Said(Trial):
    """A trial that answers as it is told, and in which every fix succeeds."""

    def __init__(self, **answers: Any) -> None:
        self.bindings: dict[str, Binding] = answers.pop("bindings", {})
        self.held: dict[str, tuple[str, str]] = answers.pop("held", {})
        self.readers: tuple[list[int], list[int]] = answers.pop("readers", ([], []))
        self.layers: dict[str, Binding] = answers.pop("layers", {})
        self.refused: tuple[str, ...] = answers.pop("refused", ())
        self.result: bool | None = True
        self.__dict__.update(answers)

    def __call__(self, fix: Fix | None) -> TrialResult:
        return TrialResult(succeeds=self.result and fix not in self.refused)

    def binding(self, expression: str, *, of_shape: bool = False) -> Binding | None:
        return self.bindings.get(expression)

    def held_in(self, expression: str) -> tuple[str, str] | None:
        return self.held.get(expression)

    def other_readers(self, expression: str) -> tuple[list[int], list[int]]:
        return self.readers

    def layer(self, path: str, shape: tuple[int, ...] | None = None) -> Binding | None:
        return self.layers.get(path)


class Written(Said):
    """A trial whose tensors were written to since: what made the shape is known, and no more."""

    def binding(self, expression: str, *, of_shape: bool = False) -> Binding | None:
        return self.bindings.get(expression) if of_shape else None


def placed(rule: str, template: str, trial: Trial, text: str = "y", **more: Any) -> Hint:
    fix = Fix(f"f({template.replace('{x}', text)})", [Change(spelled(text) or "", template)])
    hint = Hint(rule=rule, text="words", fix=fix, tried=True)
    (found,) = at_origin([hint], Evidence(source=HERE, **more), trial)
    return found


def test_a_fix_at_the_call_stays_where_nothing_else_reads() -> None:
    hint = placed("relabel", "{x} - 1", Said())
    assert (hint.text, hint.fix, hint.at) == ("words", "f(y - 1)", None)


def test_values_that_are_read_again_are_changed_behind_the_line_that_made_them() -> None:
    trial = Said(bindings={"y": made("load()", is_read_again=True)})
    hint = placed("relabel", "{x} - 1", trial)
    assert (hint.fix, hint.at and hint.at.line) == ("y = y - 1", 2)
    assert hint.text == "words. y is used more than once: change it after line 2"
    hint = placed("relabel", "{x} - 1", Said(bindings={"y": made("load()")}))
    assert (hint.fix, hint.at) == ("f(y - 1)", None)
    trial.refused = ("y = y - 1",)
    assert placed("relabel", "{x} - 1", trial).fix == "f(y - 1)"


def test_readers_that_need_the_numbers_as_they_are_are_named() -> None:
    trial = Said(bindings={"y": made("load()", is_read_again=True)}, readers=([12], [12, 14]))
    hint = placed("relabel", "{x} - 1", trial)
    assert hint.text.endswith(", and adapt line 12, 14, which needs its numbers as they are")
    assert (hint.fix, hint.tried, hint.at) == (None, None, None)
    here = placed("relabel", "{x} - 1", Said(readers=([], [12])))
    assert (here.text, here.fix) == ("words", "f(y - 1)")  # what is given stays as it was


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([12], "Line 12 reads y too: change it where it is made"),
        ([12, 13], "Lines 12, 13 read y too: change it where it is made"),
        ([9], "This line reads y again: change it where it is made"),
    ],
)
def test_without_its_origin_no_code_for_what_is_read_elsewhere(
    lines: list[int], words: str
) -> None:
    hint = placed("relabel", "{x} - 1", Said(readers=(lines, [])))
    assert (hint.text, hint.fix, hint.tried) == (f"words. {words}", None, None)


def test_a_cast_acts_at_the_call_and_names_other_readers() -> None:
    hint = placed("cast_needed", "{x}.long()", Said(readers=([12], [])))
    assert (hint.text, hint.fix) == ("words. Line 12 reads y too", "f(y.long())")
    again = Said(bindings={"y": made("load()", is_read_again=True)})
    hint = placed("cast_needed", "{x}.long()", again)
    assert (hint.text, hint.fix, hint.at) == ("words", "f(y.long())", None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a(x.clamp_(0, g[3] - 1), y.clamp_(0, g[2] - 1))", "y.clamp_(0, g[2] - 1) too"),
        ("a(x.clamp_(0, g[3] - 1), y.clamp_(0, n))", ""),
        ("a(x.clamp_(0, g[3] - 1), y.clamp(0, g[2] - 1))", ""),
        ("i = x.clamp_(0, g[3] - 1), y.clamp_(0, g[2] - 1)", "y.clamp_(0, g[2] - 1) too"),
        ("a(x.clamp_(0, g[3] - 1))", ""),
        ("a(y.clamp_(0, g[2] - 1), z.clamp_(0, g[1] - 1))", "y.clamp_(0, g[2] - 1) too"),
    ],
)
def test_a_cast_names_a_call_of_the_same_form_in_the_line(line: str, words: str) -> None:
    """It fails next, in the same way, where its tensors are alike."""
    source, call = replace(HERE, text=line), syntax_of("x.clamp_(0, g[3] - 1)")
    fix = Fix("x.clamp_(0, (g[3] - 1).long())", [Change("g[3] - 1", "({x}).long()")])
    hint = Hint(rule="cast_needed", text="words", fix=fix, tried=True)
    (found,) = at_origin([hint], Evidence(source=source, call=call), Said())
    assert found.text == f"words. The line has {words}".removesuffix(". The line has ")
    sums = Evidence(source=replace(HERE, text="a(x + 1, y + 2)"), call=syntax_of("x + 1"))
    assert at_origin([hint], sums, Said())[0].text == "words"


def test_what_a_loop_chooses_is_not_changed_at_one_turn() -> None:
    trial = Said(loop_names=frozenset({"n"}))
    assert placed("relabel", "{x} - 1", trial, "y[n]").fix is None
    assert placed("relabel", "{x} - 1", trial, "n[0]").fix == "f(n[0] - 1)"
    assert placed("relabel", "{x} - 1", Said(is_of_loop=True)).text.endswith(
        "The loop may call other functions here: change what is given to it"
    )
    moved = placed("move_tensor", "{x}.cuda()", Said(is_of_loop=True))
    assert moved.fix == "f(y.cuda())"  # every function needs it there
    trial = Said(is_of_loop=True, bindings={"y": made("load()", is_read_again=True)})
    assert placed("relabel", "{x} - 1", trial).fix == "y = y - 1"
    trial.loop_arguments = frozenset({"y"})
    hint = placed("relabel", "{x} - 1", trial)
    assert hint.text.endswith("Each turn of the loop has another tensor here: check them all")
    assert (hint.fix, hint.tried, hint.at) == (None, None, None)


@pytest.mark.parametrize(
    ("rule", "text", "fix"),
    [
        ("relabel", "i", None),
        ("relabel", "y", "f(y - 1)"),
        ("cast_needed", "i", "f(i - 1)"),
    ],
)
def test_values_that_a_loop_of_the_caller_chooses_are_not_changed(
    rule: str, text: str, fix: str | None
) -> None:
    """Another turn has other ones, but takes a cast as this one does."""
    trial = Said(loop_arguments=frozenset({"i"}))
    assert placed(rule, "{x} - 1", trial, text).fix == fix


def test_a_call_that_was_another_function_before_gets_no_code() -> None:
    others = ("torch.nn.functional.l1_loss", "torch.nn.functional.mse_loss")
    hint = placed("cast_needed", "{x}.long()", Said(), other_functions=others)
    assert hint.text == "words. This call was mse_loss before, which took it as it is"
    assert hint.fix is None
    assert placed("cast_needed", "{x}.long()", Said()).fix == "f(y.long())"


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (("Net", "module"), "words: .to() of the Net that registers it does that"),
        (("y", "attribute"), "It is a plain attribute. The module's .to() moves what is"),
        (("self.parts", "list"), "It is in self.parts, a plain list. The module's .to() moves"),
    ],
)
def test_what_a_module_holds_is_registered(held: tuple[str, str], words: str) -> None:
    hint = placed("move_tensor", "{x}.cuda()", Said(held={"y": held}))
    assert words in hint.text
    assert hint.fix is None


@pytest.mark.parametrize(
    ("requires_grad", "kind", "words"),
    [
        (False, "attribute", "a buffer with register_buffer"),
        (True, "attribute", "an nn.Parameter"),
        (True, "dict", "one of an nn.ParameterDict"),
        (True, "list", "one of an nn.ParameterList"),
    ],
)
def test_a_parameter_becomes_a_parameter(requires_grad: bool, kind: str, words: str) -> None:
    other = fact(None, "float32[3]", "w", requires_grad=not requires_grad)
    known = (other, fact(None, "float32[3]", "y", requires_grad=requires_grad))
    trial = Said(held={"y": ("self.y", kind)})
    assert placed("move_tensor", "{x}.cuda()", trial, tensors=known).text.endswith(words)


def test_pixels_of_an_argument_are_divided_where_the_caller_made_them() -> None:
    """The function may need the bytes as well, as a model does that learns to repeat them."""
    given = made("load()", name="images")
    hint = placed("image_not_divided", "{x} / 255", Said(bindings={"y": given}))
    assert hint.text == "words. It is images, made in line 2: divide it there"
    assert (hint.fix, hint.tried) == (None, None)
    view = placed("image_not_divided", "{x} / 255", Said(bindings={"y": given}), "y[0].flatten()")
    assert view.text.endswith("divide it there")
    written = Written(bindings={"y": given})
    assert placed("image_not_divided", "{x} / 255", written).text.endswith("divide it there")
    result = placed("image_not_divided", "{x} / 255", Said(bindings={"y": given}), "net(y)")
    assert result.fix == "f(net(y) / 255)"
    own = placed("image_not_divided", "{x} / 255", Said(bindings={"y": made("load()")}))
    assert own.fix == "f(y / 255)"
    other = placed("relabel", "{x} - 1", Said(bindings={"y": given}))
    assert other.fix == "f(y - 1)"


def test_a_change_of_the_whole_call_or_of_several_names_is_left() -> None:
    both = Fix("f(a - 1, n[0])", [Change("", "{x}"), Change("n[0]", "{x} - 1")])
    hint = Hint(rule="relabel", text="words", fix=both, tried=True)
    trial = Said(loop_names=frozenset({"n"}), held={"y": ("Net", "module")}, readers=([12], [12]))
    assert at_origin([hint], Evidence(source=HERE), trial) == (hint,)
    chosen = replace(hint, fix=Fix("f(a - 1, y[n])", [both.changes[0], Change("y[n]", "{x} - 1")]))
    assert at_origin([chosen], Evidence(source=HERE), trial)[0].fix is None
    moved = replace(hint, rule="move_tensor")
    assert at_origin([moved], Evidence(source=HERE), trial) == (moved,)
    two = [Change(spelled("y") or "", "{x}.cuda()"), Change("n", "{x}.cuda()")]
    moved = replace(moved, fix=Fix("f(y.cuda(), n.cuda())", two))
    assert at_origin([moved], Evidence(source=HERE), trial) == (moved,)
    wordless, reading = replace(hint, text=""), Hint(rule="relabel", text="a", fix=None)
    assert at_origin([wordless, reading], Evidence(source=HERE), trial) == (reading,)


def test_an_item_of_what_a_module_holds_is_registered_with_it() -> None:
    trial = Said(held={"y": ("y", "attribute")})
    assert "It is y, a plain attr" in placed("move_tensor", "{x}.cuda()", trial, "y[0][1]").text
    assert placed("move_tensor", "{x}.cuda()", trial, "y()").fix == "f(y().cuda())"
    trial = Said(
        held={"y": ("self.parts", "list")}, bindings={"self.parts": made("[a, b]", line=3)}
    )
    text = placed("move_tensor", "{x}.cuda()", trial).text
    assert "in self.parts, a plain list made in line 3: [a, b]. The module's" in text


def test_a_result_that_was_thrown_away_but_is_not_enough() -> None:
    dropped = ("y.float()", SourceSpan(cell=1, line=5))
    trial = Said(
        bindings={"y": made("load()", dropped=dropped)}, refused=("y = y.float()", "y = y.cuda()")
    )
    assert placed("move_tensor", "{x}.cuda()", trial).fix == "f(y.cuda())"
    assert placed("move_tensor", "{x}.cuda()", Said(bindings=trial.bindings)).fix == "y = y.float()"
    trial.refused = ("y = y.float()",)
    assert placed("move_tensor", "{x}.cuda()", trial).fix == "y = y.cuda()"
    trial.result = None
    assert placed("move_tensor", "{x}.cuda()", trial).fix == "f(y.cuda())"  # it was not tried
    # What the values have to be is no matter of what was thrown away.
    assert placed("relabel", "{x} - 1", trial).fix == "f(y - 1)"


def test_a_result_that_was_thrown_away_is_kept() -> None:
    dropped = ("y.cuda()", SourceSpan(cell=1, line=5))
    trial = Said(bindings={"y": made("load()", dropped=dropped)})
    hint = placed("move_tensor", "{x}.cuda()", trial)
    assert (hint.fix, hint.at and hint.at.line) == ("y = y.cuda()", 5)
    assert "Line 5: y.cuda() gives a new tensor, its result is not kept" in hint.text
    named = Said(bindings={"y": made("load()", dropped=("f(y, y=y)", dropped[1]))})
    fix = placed("move_tensor", "{x}.cuda()", named).fix
    assert isinstance(fix, Fix) and fix.changes[0].template == "f({x}, y={x})"


# --- other sentences ------------------------------------------------------------------------------


def test_a_division_that_made_a_float_of_a_size() -> None:
    refused = ErrorFacts(type_name="TypeError", message="must be tuple of ints, not float")
    trial = Said(bindings={"n": made("m"), "m": made("a / 2", 3)})

    def texts(message: ErrorFacts = refused, **bindings: Binding) -> list[str]:
        trial.bindings |= bindings
        evidence = Evidence(error=message, call=syntax_of("torch.zeros(n)"), source=HERE)
        return [item.text for item in true_division(evidence, trial)]

    rule = "The operator / gives floats, // gives whole numbers"
    assert texts() == [f"m is made in line 3: a / 2. {rule}"]
    assert texts(ErrorFacts(type_name="TypeError", message="bad shape")) == []
    assert texts(m=made("a // 2", 3)) == []
    assert texts(m=made("int(a / 2)", 3)) == []
    assert texts(m=made("(a / 2).floor()", 3)) == [f"m is made in line 3: (a / 2).floor(). {rule}"]
    chain = {name: made(following) for name, following in zip("mpqr", "pqrs", strict=True)}
    assert texts(**chain, s=made("a / 2")) == []  # five names are too many
    chain["q"] = made("a / 2", 3)
    assert texts(**chain) == [f"q is made in line 3: a / 2. {rule}"]


def test_a_layer_that_takes_dimension_1_for_the_batch() -> None:
    facts = (fact(None, "float32[4,7,3]", "x"), fact(None, "float32[1,4,8]", "h"))

    def said(operands: Any = facts, module: str = "GRU", **called: Any) -> Hint | None:
        kind = Called(**{"is_batch_second": True, **called})
        trial = Said(operands=operands, called=kind)
        evidence = Evidence(call=syntax_of("rnn(x, h)"), source=HERE, module_type=module)
        return batch_second(evidence, trial)

    hint = said()
    assert hint is not None
    assert "fits h [1, 4, 8] with a batch of 4 in dimension 0" in hint.text
    assert said(is_batch_second=False) is None
    assert said(is_model=True) is None
    assert said((facts[0], fact(None, "float32[1,7,8]", "h"))) is None
    assert said((fact(None, "float32[4,4,3]", "x"), facts[1])) is None
    assert said((facts[1], facts[0])) is None  # the input comes first
    assert said((fact(None, "float32[7,3]", "x"), facts[1])) is None
    memory = fact(None, "float32[4,9,3]", "m")
    assert said((facts[0], memory), "TransformerDecoder") is not None
    assert said((fact(None, "float32[4,4,3]", "x"), memory), "TransformerDecoder") is None


@pytest.mark.parametrize(
    ("kind", "other", "fits"),
    [
        ("GRU", "float32[1,4,8]", True),
        ("GRU", "float32[4,1,8]", False),
        ("GRU", "bool[4,7]", False),
        ("TransformerEncoder", "bool[4,7]", True),
        ("TransformerEncoder", "bool[7,7]", False),
        ("MultiheadAttention", "float32[4,9,3]", True),
        ("MultiheadAttention", "float32[1,4,3]", False),
        ("MultiheadAttention", "float32[4,7,3]", False),
    ],
)
def test_what_lies_beside_a_sequence_tells_its_batch(kind: str, other: str, fits: bool) -> None:
    """A state has the batch second, a mask and the memory have it first."""
    facts = (fact(None, "float32[4,7,3]", "x"), fact(None, other, "h"))
    trial = Said(
        operands=facts,
        called=Called(is_batch_second=True),
        bindings={"rnn": made("nn.GRU(3, 8)", line=3)},
    )
    evidence = Evidence(call=syntax_of("rnn(x, h)"), source=HERE, module_type=kind)
    hint = batch_second(evidence, trial)
    assert (hint is not None) is fits
    made_in = "rnn has batch_first=False, made in line 3: nn.GRU(3, 8). It takes dimension 1"
    assert hint is None or hint.text.startswith(made_in)


LAYER = made("nn.Linear(8, 2)", 4, name="net.head")


def features(layer: Binding | None = LAYER, *, survives: bool = True, **more: Any) -> Hint | None:
    """Advise on a layer for 8 features that is given images of 3 x 2 x 2."""
    line = LineRef(line=6, text="h = x.flatten(1)", cell=1)
    known: dict[str, Any] = {
        "flattened": Regrouped(line=line, before=(5, 3, 2, 2), after=(5, 12)),
        "tensors": (fact("weight", "float32[2,8]", "net.head.weight"),),
        "history": entries(1, [("aten::relu", "", None, None), ("aten::flatten", "", None, None)]),
        "module_path": "head",
    }
    trial = Said(
        layers={"head": layer} if layer is not None else {},
        refused=more.pop("refused", ()),
        survives=lambda fix, dims: survives and dims == 1,
    )
    return features_of_images(Evidence(source=HERE, **{**known, **more}), trial)


def test_a_layer_is_made_for_as_many_features_as_it_is_given() -> None:
    hint = features()
    assert hint is not None and isinstance(hint.fix, Fix) and hint.fix.rearrange is not None
    assert (hint.fix, hint.tried) == ("nn.Linear(12, 2)", True)
    assert hint.text == "flatten makes 12 features of [3, 2, 2]"
    assert hint.at is not None
    assert (hint.at.line, hint.at.column, hint.at.end_column) == (4, 1, 16)  # as the syntax has it
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(8, 2), nn.Linear(4, 8))
    assert hint.fix.rearrange(net, ["x"], {"k": 1}) == (net, ["x"], {"k": 1})
    assert [(*it.weight.shape,) for it in net] == [(4, 3), (2, 12), (8, 4)]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"flattened": None}, LAYER.value),
        ({"history": ()}, LAYER.value),
        ({"module_path": None}, LAYER.value),
        ({"tensors": ()}, LAYER.value),
        ({"refused": ("nn.Linear(12, 2)",)}, LAYER.value),
        ({"survives": False}, LAYER.value),  # another batch size
        ({"layer": None}, None),
        ({}, "nn.Linear(n, 2)"),
        ({}, "nn.Linear(9, 2)"),
        ({}, "nn.Linear(\n    8, 2)"),
        ({}, "nn.Linear(in_features=8, out_features=2)"),
        ({}, "layer"),
        ({}, None),
    ],
)
def test_without_the_number_in_its_line_the_layer_stays(more: Any, code: str | None) -> None:
    layer = replace(LAYER, value=spelled(code))
    assert features(**{"layer": layer, **more}) is None


def test_a_squeeze_that_took_the_batch_away() -> None:
    line = LineRef(line=3, text="z = x.squeeze()", cell=1)
    lost = LostDimension(line=line, before=(1, 5, 1), after=(5,), earlier=((4, 5, 1), (4, 5)))
    text = lost_dimension(Evidence(source=HERE), lost).text
    assert text.startswith("line 3 took the batch dimension away: z = x.squeeze(). It made (5,)")
    assert text.endswith("give squeeze the dimension 2")
    two = replace(lost, earlier=((4, 1, 1), (4,)))
    assert lost_dimension(Evidence(source=HERE), two).text.endswith("the dimensions (1, 2)")
