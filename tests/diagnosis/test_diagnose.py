"""The headline in two sets of names, and what is said of a device that nobody used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cudalens
from cudalens.core.evidence_types import (
    Binding,
    DeviceFault,
    LostDimension,
    OwnerModule,
    Regrouped,
)
from cudalens.core.report import (
    ErrorFacts,
    Evidence,
    Offender,
    Offenders,
    OpName,
    SourceSpan,
    TensorFact,
    Violation,
)
from cudalens.core.report_types import Bounds, Frame, Hint, LineRef, Replay
from cudalens.diagnosis.candidates import Trial, TrialResult
from cudalens.diagnosis.diagnose import (
    _argument_changed,
    _is_of_a_part,
    _offenders,
    bare_report_of_error,
    bare_report_of_violation,
    diagnose,
    format_message,
    format_note,
    format_place,
    format_sentence,
    is_device_assert,
)
from cudalens.diagnosis.host_errors import REFUSED
from cudalens.diagnosis.moves import Called
from cudalens.diagnosis.user_code import Change, Fix
from cudalens.render.screen import build
from tests.builders import entries, fact, make_report, spelled
from tests.hint_evidence import syntax_of

LONG = "self.embedding_tables[name].weight_of_all"
"""One character more than a name may have."""


OUTSIDE = "{argument}[17] = 10 is outside the 10 classes of {related}"
IN_SCHEMA = "[17] = 10 is outside the 10 classes of input"
UNNAMED = "[17] = 10 is outside the 10 classes"


def finding(template: str = OUTSIDE, *, argument: str = "target", **more: Any) -> Violation:
    return Violation(
        headline=template,
        argument=argument,
        related="self",
        offenders=Offenders(count=1, total=32, first=(Offender(position=(17,), value=10),)),
        **more,
    )


@pytest.mark.parametrize(
    "row",
    [
        ((), f"target{UNNAMED}"),
        ([("target", "y")], f"y{UNNAMED}"),
        ([("target", "y - 1")], f"(y - 1){UNNAMED}"),
        ([("target", "b['y']")], f"b['y']{UNNAMED}"),
        ([("target", "net(x)")], f"net(x){UNNAMED}"),
        ([("target", LONG)], f"target{UNNAMED}"),
        ([("target", LONG[1:])], f"{LONG[1:]}{UNNAMED}"),
        ([("target", "d['{related}']")], f"d['{{related}}']{UNNAMED}"),
        ([("input", "z")], "target[17] = 10 is outside the 10 classes of z"),
        ([("self", "p"), ("input", "z")], "target[17] = 10 is outside the 10 classes of p"),
        ([("input", "z * 2")], "target[17] = 10 is outside the 10 classes of (z * 2)"),
        ([(None, "y"), (None, "z")], f"target{UNNAMED}"),
        # The op got the user's tensor reshaped; its own place stays in the schema's headline.
        ([(None, "y", (1, 1))], f"y[1, 1]{UNNAMED[4:]}"),
        # ``indices[1]`` is one of several; the others' names are not taken for its.
        ([("target[0]", "rows"), ("target[1]", "columns")], f"columns{UNNAMED}",
         f"target[1]{IN_SCHEMA}", finding(OUTSIDE.replace("}[", "}[1][", 1), list_position=1)),
        # Of indices that nobody named, the dimension says which it is.
        ([("indices[1]", None)], f"index{UNNAMED}", f"indices[1]{IN_SCHEMA}",
         finding(OUTSIDE.replace("}[", "}[1][", 1), list_position=1, argument="indices")),
        # A template of a user's guard names the argument alone, or nothing at all.
        ([("target", "y")], "y sums to 3", "target sums to 3", finding("{argument} sums to 3")),
        ([("target", "y")], "row {9} is bad", "row {9} is bad", finding("row {9} is bad")),
    ],
)  # fmt: skip
def test_the_headline_has_the_users_expressions_where_they_are_proven(row: tuple[Any, ...]) -> None:
    """And the schema's names in the form that tools read, whatever is known of the tensor."""
    facts, own, headline, violation = (*row, f"target{IN_SCHEMA}", finding())[:4]
    evidence = Evidence(
        violation=violation,
        op=OpName(name="aten::nll_loss_forward", api="torch.nn.functional.cross_entropy"),
        tensors=tuple(
            TensorFact(
                shape=(32,),
                argument=argument,
                expression=spelled(text),
                bad_at=place[0] if place else None,
            )
            for argument, text, *place in facts
        ),
    )
    report = diagnose(evidence)
    assert (report.headline_schema, report.headline) == (headline, own)
    assert format_message(report).startswith(own)


def test_the_exception_names_one_thing_by_one_name() -> None:
    """The user's expression comes first, the schema's name after it."""
    lines = format_message(make_report(module_path="head")).splitlines()
    assert lines[0].startswith("y[17] = 10 is outside the 10 classes of logits (allowed ")
    assert ", argument y (target) in module head" in lines[1]
    assert ", argument target\n" in format_message(make_report(expression=None))
    assert ", argument" not in format_message(make_report(expression=None, argument=None))


def test_cuda_is_not_called_fine_where_nobody_used_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host error of tensors in host memory says nothing of a device."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError), cudalens.check() as session:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert session.report is not None
    assert session.report.to_dict()["context_usable"] is None
    assert build(session.report).status is None


def edit(*changes: Change, tried: bool | None = True) -> Hint:
    return Hint(text="words", fix=Fix("f(y)", list(changes)), tried=tried)


@pytest.mark.parametrize(
    ("hints", "argument"),
    [
        ([edit(Change("y", "{x} - 1"))], "target"),
        ([edit(Change("z", "{x}.T"))], "input"),
        ([edit(Change("q", "{x}.T"))], None),
        ([edit(Change("", "{x}.T"))], "self"),
        ([edit(Change("y", "{x} - 1"), Change("z", "{x} - 1"))], "target"),
        ([edit(Change("y", "{x} - 1"), Change("z", "{x}.T"))], None),
        ([edit(Change("y", "{x} - 1")), edit(Change("z", "{x}.T"))], None),
        ([edit(Change("y", "{x} - 1")), edit(Change("z", "{x}.T"), tried=None)], "target"),
        ([Hint(text="words", fix="f(y - 1)", tried=True)], None),
        ([], None),
    ],
)
@pytest.mark.parametrize("nonfinite", [False, True])
def test_the_argument_that_the_change_alters(
    hints: list[Hint], argument: str | None, nonfinite: bool
) -> None:
    known = (fact("target", "int64[2]", "y"), fact("input", "float32[2]", "z"))
    violation = Violation(headline="", is_nonfinite=True) if nonfinite else None
    found = _argument_changed(Evidence(tensors=known, violation=violation), tuple(hints))
    assert found == (None if nonfinite else argument)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        ({"is_index": True}, "DeviceIndexError"), ({"is_index": False}, "DeviceValueError"),
        ({"is_nonfinite": True}, "NonFiniteError"), ({"is_silent": True}, "SilentFindingWarning"),
    ],
)  # fmt: skip
def test_the_exception_of_a_finding_is_what_is_raised(facts: dict[str, bool], kind: str) -> None:
    raised = diagnose(Evidence(violation=finding(**facts))).exception
    assert raised is not None
    assert raised.type == kind
    assert raised.message.startswith("target[17] = 10 is outside")


def test_the_exception_of_an_error_is_its_first_line() -> None:
    error = ErrorFacts(type_name="RuntimeError", message="  one\ntwo")
    raised = diagnose(Evidence(error=error)).exception
    assert raised is not None
    assert (raised.type, raised.message) == ("RuntimeError", "one")
    assert diagnose(Evidence()).exception is None


def test_inputs_of_a_bad_element_have_the_users_names() -> None:
    first = Offender(position=(0,), value="nan", inputs=(("self", 0), ("other", 1)))
    second = Offender(position=(1,), value="nan")
    offenders = Offenders(count=2, total=2, first=(first, second))
    violation = Violation(headline="", offenders=offenders)
    known = (fact("self", "float32[1]", "x"), fact("other", "float32[1]"))
    found = _offenders(Evidence(violation=violation, tensors=known))
    assert found is not None
    assert [it.inputs for it in found.first] == [(("x", 0), ("other", 1)), ()]
    assert _offenders(Evidence()) is None


MM = ErrorFacts(
    type_name="RuntimeError",
    message="mat1 and mat2 shapes cannot be multiplied (2x3 and 4x3)",
)


@pytest.mark.parametrize(
    ("facts", "more", "words"),
    [
        ({"device_text": "Assertion"}, {}, "the value was found before the launch."),
        ({"device_text": "Assertion"}, {"deferred": True}, "values in bounds in its place, so"),
        ({"device_text": None, "guard": "g"}, {}, "The guard g stopped the op before its launch."),
        ({"device_text": None}, {"deferred": True}, "with the bad values replaced by valid ones"),
        ({"is_silent": True}, {}, "No assert fires for this on CUDA"),
        ({"device_text": "Assertion"}, {"error": MM}, f"Why. {REFUSED}"),
    ],
)
def test_what_became_of_the_values(facts: Any, more: Any, words: str) -> None:
    violation = finding(explanation="Why.", **facts)
    text = diagnose(Evidence(violation=violation, **more)).explanation
    assert text.startswith("Why.")
    assert words in text


@pytest.mark.parametrize(
    ("facts", "more"),
    [
        ({"is_nonfinite": True}, {}),
        ({}, {"error": MM, "has_run_kernels": True}),
        ({}, {"error": MM, "tensors": (fact("self", "float32[2]", "x", device="cpu"),)}),
    ],
)
def test_what_says_nothing_of_a_launch(facts: Any, more: Any) -> None:
    report = diagnose(Evidence(violation=finding(explanation="Why.", **facts), **more))
    assert report.explanation == "Why."
    assert report.kind == ("host_error" if more else "nonfinite")


@pytest.mark.parametrize(
    ("code", "own", "indexes", "is_part"),
    [
        ("x[0, i] = y", None, ("i",), True),
        ("x[0, i] += y", None, ("i",), True),
        ("x[:, None, i] = y", None, ("i",), True),
        ("x[:, 0] = y", None, (), True),
        ("x[i, k] = y", None, ("i",), True),
        ("x[i, k] = y", None, ("i", "k"), False),
        ("x[:, i] = y", None, ("i",), False),
        ("x[:, i + 1] = y", None, (), False),
        ("x[i] = y", None, ("i",), False),
        ("x[0, i] = y", "x", ("i",), False),
        ("y = x[0, i]", None, ("i",), False),
    ],
)
def test_a_subscript_of_a_part_of_a_tensor(
    code: str, own: str | None, indexes: tuple[str, ...], is_part: bool
) -> None:
    """The op of ``x[0, i]`` is given ``x[0]``: its dimensions are others than those of x."""
    tensors = (fact("self", "float32[4]", own), *(fact(None, "int64[2]", it) for it in indexes))
    evidence = Evidence(source=SourceSpan(cell=1, line=1, text=code), tensors=tensors)
    assert _is_of_a_part(evidence) is is_part


# --- which hint is shown --------------------------------------------------------------------------


class Taking(Trial):
    """A trial in which the edits with these texts succeed, with any batch."""

    def __init__(self, *fixes: str, **answers: Any) -> None:
        self.fixes = fixes
        self.made: Binding | None = answers.pop("made", None)
        self.__dict__.update(answers)

    def __call__(self, fix: Fix | None) -> TrialResult:
        return TrialResult(succeeds=fix in self.fixes)

    def survives(self, fix: Fix, dims: int) -> bool:
        return True

    def layer(self, path: str, shape: tuple[int, ...] | None = None) -> Binding | None:
        return self.made


X, W = fact("self", "float32[2,3]", "x"), fact("mat2", "float32[4,3]", "w")


def refused(call: str = "torch.mm(x, w)", **more: Any) -> Evidence:
    api = OpName(api="torch." + call.partition("(")[0].rpartition(".")[2])
    source = SourceSpan(cell=1, line=9, text=call)
    known = {"error": MM, "call": syntax_of(call), "op": api, "source": source}
    return Evidence(**{**known, **more})


def rules(evidence: Evidence, trial: Trial) -> list[str]:
    report = diagnose(evidence, trial)
    assert report.limits == ()
    return [item.rule for item in report.hints]


def test_an_edit_is_shown_where_no_reading_says_more() -> None:
    trial = Taking("torch.mm(x, w.T)", operands=(X, W))
    assert rules(refused(), trial) == ["transposed_operand"]
    assert rules(refused(has_run_kernels=True), trial) == []
    assert rules(refused(), Taking(operands=(X, W))) == []


def test_a_batch_that_was_squeezed_away_comes_before_any_edit() -> None:
    line = LineRef(line=3, text="z = x.squeeze()", cell=1)
    lost = LostDimension(line=line, before=(1, 5), after=(5,), earlier=((4, 5), (4, 5)))
    trial = Taking("torch.mm(x, w.T)", operands=(X, W))
    assert rules(refused(lost_dimension=lost), trial) == ["batch_squeezed"]
    assert rules(refused(lost_dimension=lost, has_run_kernels=True), trial) == []


def test_a_layer_that_has_its_batch_second_comes_before_any_edit() -> None:
    facts = (fact(None, "float32[4,7,3]", "x"), fact(None, "float32[1,4,8]", "h"))
    called = Called(is_batch_second=True)
    trial = Taking("rnn(x.transpose(0, 1), h)", operands=facts, called=called)
    assert rules(refused("rnn(x, h)", module_type="GRU"), trial) == ["batch_second"]


LAYER = Binding(
    at=SourceSpan(cell=1, line=4, text="head = nn.Linear(8, 2)"),
    value=spelled("nn.Linear(8, 2)"),
    name="net.head",
)


def flat(**more: Any) -> Evidence:
    """The evidence of a layer for 8 features that is given images of 3 x 2 x 2."""
    line = LineRef(line=6, text="h = x.flatten(1)", cell=1)
    facts = (fact("input", "float32[5,12]", "h"), fact("weight", "float32[2,8]", "net.head.weight"))
    known: dict[str, Any] = {
        "error": ErrorFacts(
            type_name="RuntimeError",
            message="mat1 and mat2 shapes cannot be multiplied (5x12 and 8x2)",
        ),
        "flattened": Regrouped(line=line, before=(5, 3, 2, 2), after=(5, 12)),
        "tensors": facts,
        "history": entries(1, [("torch.Tensor.flatten", "", None, None)]),
        "module_path": "head",
        "module_type": "Linear",
        "op": OpName(api="torch.nn.functional.linear"),
        "frames": (
            Frame(file="<cell 1>", line=9, function="f", is_user=True),
            Frame(file="/site-packages/torch/nn/modules/linear.py", line=1, function="forward"),
        ),
    }
    return refused("net(x)", **{**known, **more})


def test_the_layer_behind_flattened_images_is_advised_on() -> None:
    trial = Taking("nn.Linear(12, 2)", made=LAYER)
    assert rules(flat(), trial) == ["features_of_images"]


# --- the device behind an exception ---------------------------------------------------------------


STATUS = ErrorFacts(
    type_name="RuntimeError",
    message="CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`\nmore",
)
SHAPES = "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x3)"


def test_an_assert_that_a_library_hides_is_the_failure() -> None:
    fault = DeviceFault(hidden_error="CUDA error: device-side assert triggered", is_assert=True)
    report = diagnose(Evidence(error=STATUS, device_fault=fault, context_usable=False))
    assert report.kind == "device_assert"
    assert report.explanation.startswith(
        "RuntimeError (CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`) "
        "is not the cause: it hides an assert. "
    )
    own = diagnose(Evidence(error=STATUS, context_usable=False))
    assert (own.kind, "hides" in own.explanation) == ("cuda_error", False)


@pytest.mark.parametrize(
    ("message", "is_assert"), [(SHAPES, True), (STATUS.message, False), (SHAPES, False)]
)
def test_another_fault_of_the_device_is_said_beside_the_exception(
    message: str, is_assert: bool
) -> None:
    fault = DeviceFault(hidden_error="CUDA error: misaligned address", is_assert=is_assert)
    error = ErrorFacts(type_name="RuntimeError", message=message)
    report = diagnose(Evidence(error=error, device_fault=fault))
    assert report.kind != "device_assert"
    assert report.explanation.endswith(
        "The device had also failed before (CUDA error: misaligned address): "
        "restart the kernel to use it."
    )


def test_an_assert_is_known_by_its_code_or_its_words() -> None:
    def is_it(message: str, code: int | None) -> bool:
        return is_device_assert(ErrorFacts(type_name="E", message=message, error_code=code))

    assert is_it("new words", 710) and is_it("CUDA error: device-side assert triggered", None)
    assert not is_it("CUDA error: misaligned address", 716)
    coded = ErrorFacts(type_name="E", message="new words", error_code=710)
    assert diagnose(Evidence(error=coded)).kind == "device_assert"


def test_without_a_gpu_nothing_is_known_of_its_context() -> None:
    none = ErrorFacts(type_name="RuntimeError", message="No CUDA GPUs are available")
    assert diagnose(Evidence(error=none, context_usable=True)).context_usable is None
    assert diagnose(Evidence(error=STATUS, context_usable=True)).context_usable is True


# --- names and sentences --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "expression"), [("tensors[1]", "y + 1"), ("tensors[2]", None), ("other[1]", None)]
)
def test_an_item_of_a_list_by_the_line_that_spells_it(
    argument: str, expression: str | None
) -> None:
    here = Frame(file="a.py", line=1, function="f", is_user=True)
    violation = finding(argument=argument)
    known = {"violation": violation, "frames": (here,), "tensors": (fact(argument, "int64[2]"),)}
    given = refused("torch.cat([x, y + 1])", error=None, **known)
    assert diagnose(given).expression == expression


@pytest.mark.parametrize(
    ("known", "expression"),
    [({"indices": "a", "indices[1]": "b"}, "b"), ({"indices": "a", "indices[0]": "b"}, "a")],
)
def test_an_item_of_a_list_comes_before_the_list(known: dict[str, str], expression: str) -> None:
    tensors = tuple(fact(argument, "int64[2]", text) for argument, text in known.items())
    violation = finding(argument="indices", list_position=1)
    assert diagnose(Evidence(violation=violation, tensors=tensors)).expression == expression


def test_one_hot_is_said_of_its_labels() -> None:
    """Its op ``scatter_`` has them as an index of another shape; the CPU has words of its own."""
    first = Offender(position=(17, 0), value=10)
    violation = Violation(
        headline="{argument}[17, 0] = 10 is outside the 10 places of {related}",
        element="{argument}{position} = 10",
        argument="index",
        size=10,
        offenders=Offenders(count=1, total=32, first=(first,)),
    )

    def shown(call: str, **more: Any) -> Any:
        op = OpName(name="aten::scatter_", api="torch.nn.functional.one_hot")
        known = {"error": None, "op": op, "violation": violation}
        return diagnose(refused(call, **{**known, **more}))

    assert shown("F.one_hot(y, 10)").expression == "y"
    assert shown("F.one_hot(*both)").expression is None
    assert "outside num_classes = 10" in shown("F.one_hot(y, 10)").headline
    assert " is outside" in shown("F.one_hot(y, 10)").headline
    assert ", which is outside" in shown("F.one_hot(y, 10)", deferred=True).headline
    below = Frame(file="/site-packages/lib.py", line=1, function="f")
    assert shown("fit(y)", frames=(below,)).expression is None
    raised = Replay(outcome="raised", exception="IndexError", message="index 10 is out of bounds")
    report = shown("F.one_hot(y, 10)", replay=raised)
    assert report.replay.message == "Class values must be smaller than num_classes."
    assert shown("F.one_hot(y, 10)").replay == Replay()
    negative = Offenders(count=1, total=32, first=(Offender(position=(17, 0), value=-1),))
    below_0 = replace(violation, offenders=negative)
    report = shown("F.one_hot(y, 10)", replay=raised, violation=below_0)
    assert report.replay.message == "Class values must be non-negative."
    other = OpName(name="aten::scatter_", api="torch.Tensor.scatter_")
    assert shown("x.scatter_(1, y, 1)", op=other, replay=raised).replay == raised


def test_a_table_is_said_by_its_module() -> None:
    violation = replace(
        finding(argument="indices"), unit="row", size=10, element="{argument}[17] = 10",
        bounds=Bounds(min=0, max=9, text="0 … 9"),
    )  # fmt: skip
    owner = OwnerModule(argument="self", text="net.emb", kind="nn.Embedding", attribute="weight")

    def headline(**more: Any) -> str:
        op = OpName(name="aten::embedding", api="torch.nn.functional.embedding")
        known: dict[str, Any] = {"owners": (owner,), "op": op, "violation": violation}
        return diagnose(Evidence(**{**known, **more})).headline

    assert headline() == "indices[17] = 10, but net.emb (nn.Embedding) has 10 rows (0 … 9)"
    named = (fact("self", "float32[10, 2]", "w"),)
    assert headline(tensors=named) == "indices[17] = 10 is outside the 10 classes of w"
    no_unit = replace(violation, unit="")
    assert headline(violation=no_unit).endswith("classes of net.emb.weight")
    other = replace(owner, argument="weight")
    assert headline(owners=(other,)) == "indices[17] = 10 is outside the 10 classes"


def test_the_sentence_has_bounds_and_count() -> None:
    bounds = Bounds(min=0, max=9, text="0 … 9")

    def said(count: int, total: int, headline: str = "y is bad", **more: Any) -> str:
        known = {"bounds": bounds, "offenders": Offenders(count=count, total=total), **more}
        return format_sentence(make_report(headline=headline, **known))

    assert said(1, 5) == "y is bad (allowed 0 … 9); 1 of 5 is bad"
    assert said(2, 5) == "y is bad (allowed 0 … 9); 2 of 5 are bad"
    assert said(1, 1) == "y is bad (allowed 0 … 9)"
    assert said(1, 1, "y is outside 0 … 9") == "y is outside 0 … 9"
    assert said(1, 1, bounds=None, offenders=None) == "y is bad"


def test_a_message_says_where_and_what_to_do() -> None:
    at = SourceSpan(cell=7, line=3, text="z = net(x)")
    edit, words = Hint(rule="a", text="why", fix="f(y)", tried=True), Hint(rule="b", text="because")

    def lines(**more: Any) -> list[str]:
        return format_message(make_report(**more)).splitlines()

    assert "  from   forward call at In [7] line 3: z = net(x)" in lines(forward_source=at)
    assert not any(it.startswith("  from") for it in lines())
    assert "  CUDA   is fine: nothing was launched" in lines()
    assert "  CUDA   is fine: the op ran with values in bounds" in lines(deferred=True)
    assert not any(it.startswith("  CUDA") for it in lines(prevented=False))
    assert lines(hints=(words, edit))[-1] == "  try    f(y)  why"
    assert lines(hints=(words,))[-1] == "  hint   because"
    assert not any(it.startswith("  op") for it in lines(op=OpName()))
    same = OpName(name="torch.f", api="torch.f")
    assert lines(op=same, expression=None)[1] == "  op     torch.f, argument target"
    assert not any(it.startswith("  where") for it in lines(source=None))


def test_a_note_is_one_line() -> None:
    edit, words = Hint(rule="a", text="why", fix="f(y)", tried=True), Hint(rule="b", text="because")
    report = make_report(headline="it failed", source=SourceSpan(cell=7, line=3), hints=(edit,))
    assert format_note(report) == "cudalens: it failed · at In [7] line 3 · try f(y)"
    assert format_note(replace(report, hints=(words,))).endswith(" · because")
    bare = replace(report, headline="", source=None, hints=())
    assert format_note(bare) == "cudalens: see the report"
    assert format_place(bare) is None


def test_a_report_without_a_diagnosis() -> None:
    found = bare_report_of_violation(
        finding(explanation="Why.", device_text="Assertion"), is_deferred=True, limits=("a",)
    )
    assert (found.kind, found.certainty) == ("device_assert", "proven")
    assert (found.prevented, found.context_usable, found.deferred) == (True, True, True)
    assert (found.headline, found.explanation) == (f"target{IN_SCHEMA[:-5]}self", "Why.")
    assert (found.argument, found.device_text, found.limits) == ("target", "Assertion", ("a",))
    assert (found.offenders and found.offenders.count, found.bounds) == (1, None)
    for facts, kind in (({"is_silent": True}, "silent"), ({"is_nonfinite": True}, "nonfinite")):
        noticed = bare_report_of_violation(finding(**facts), is_deferred=False, limits=())
        assert (noticed.kind, noticed.prevented, noticed.deferred) == (kind, False, False)
    empty = Violation(headline="x", bounds=Bounds(min=0, max=1))
    bare = bare_report_of_violation(empty, is_deferred=False, limits=())
    assert (bare.offenders, bare.bounds) == (None, Bounds(min=0, max=1))
    error = bare_report_of_error(ErrorFacts(type_name="E", message=" one\ntwo"), ("a",))
    assert (error.kind, error.headline, error.limits) == ("python_error", "one", ("a",))
    assert bare_report_of_error(ErrorFacts(type_name="E", message=""), ()).headline == "E"
