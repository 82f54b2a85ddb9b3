"""What is concluded from an assert that has happened, and how certainly: pure, from evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cudalens.core.evidence_types import DeviceFault, FittingCall, Synchronization
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import Environment, OpName, TensorFact
from cudalens.diagnosis.assert_verdict import joined
from cudalens.diagnosis.diagnose import diagnose
from tests.builders import entries

ERROR = ErrorFacts(
    type_name="AcceleratorError",
    bases=("RuntimeError",),
    message="CUDA error: device-side assert triggered",
    error_code=710,
)
LINE = "F.cu:1: kernel: block: [0,0,0], thread: [0,0,0] Assertion `{}` failed."
LABELS = LINE.format("t >= 0 && t < n_classes")
ROWS = LINE.format("srcIndex < srcSelectDimSize")
OWN = LINE.format("mine < yours")
COMPILED = LINE.format("index out of bounds: 0 <= tmp4 < 10")
EMBEDDING = OpName(name="aten::embedding", overload="default")
NODE = OpName(name="SigmoidBackward0")
BASE = Evidence(error=ERROR, context_usable=False, environment=Environment(torch="2.13.0"))
UNWAITED = Synchronization(is_op_unwaited=True)
WAITING, UNWAITING = Synchronization(waits=True), Synchronization(waits=False)
WAIT = "under a full check"
FITTING = FittingCall(
    op="aten::embedding", api="torch.nn.functional.embedding", line=3, text="F.embedding(i, w)"
)


def evidence(**known: object) -> Evidence:
    return replace(BASE, **known)  # type: ignore[arg-type]


CASES = {
    "op and text agree": (evidence(op=EMBEDDING, device_text=ROWS), "likely",
        "aten::embedding asserted on the device: indices: an index is outside 0 … size - 1"),
    "in place": (
        evidence(op=OpName(name="aten::index_put_"), device_text=LINE.format("input[0] != 0")),
        "likely", "aten::index_put_ asserted on the device: indices: an internal check failed"),
    "in backward": (
        evidence(op=OpName(name="aten::nll_loss_backward"), phase="backward", device_text=LABELS),
        "likely",
        "aten::nll_loss_backward in the backward pass asserted on the device: target: a label"),
    "op and text disagree": (
        evidence(op=OpName(name="aten::relu"), device_text=LABELS), "unknown",
        "CUDA printed the assert of F.cross_entropy or F.nll_loss, "
        "but aten::relu was the op that reported it: a label"),
    "a function of the API and a text that disagree": (
        evidence(op=OpName(name="aten::relu", api="torch.relu"), device_text=LABELS), "unknown",
        "CUDA printed the assert of F.cross_entropy or F.nll_loss, "
        "but torch.relu was the op that reported it: a label"),
    "an extension that calls torch's kernel": (
        evidence(op=OpName(name="mine::pick"), device_text=ROWS), "likely",
        "mine::pick asserted on the device: an index is outside"),
    "an extension with a text of its own": (
        evidence(op=OpName(name="mine::pick"), device_text=OWN), "likely",
        "mine::pick asserted on the device: `mine < yours` failed"),
    "an op of torch's with a text that is none of torch's": (
        evidence(op=OpName(name="aten::add"), device_text=OWN), "unknown",
        "CUDA asserted `mine < yours` by the end of aten::add"),
    "an op without text": (evidence(op=EMBEDDING), "unknown",
        "aten::embedding is the op after which CUDA reported a device-side assert"),
    "an extension without text": (evidence(op=OpName(name="mine::pick")), "likely",
        "mine::pick is the op after which CUDA reported a device-side assert"),
    "a node of torch's without text": (evidence(op=NODE, phase="backward"), "unknown",
        "SigmoidBackward0 in the backward pass is the op after which CUDA reported"),
    "a node of torch's with a text that is none of torch's": (
        evidence(op=NODE, phase="backward", device_text=OWN), "unknown",
        "CUDA asserted `mine < yours` by the end of SigmoidBackward0 in the backward pass"),
    "a function of the API in backward": (
        evidence(op=OpName(name="aten::relu", api="torch.relu"), phase="backward"), "unknown",
        "torch.relu in the backward pass is the op after which CUDA reported"),
    "a node that a function of the API ran": (
        evidence(op=replace(NODE, api="torch.Tensor.backward"), phase="backward"), "unknown",
        "SigmoidBackward0 in the backward pass is the op after which CUDA reported"),
    "a node of a Function with a text of its own": (
        evidence(op=OpName(name="PickBackward"), phase="backward", device_text=OWN), "likely",
        "PickBackward in the backward pass asserted on the device: `mine < yours` failed"),
    "a text without an op": (evidence(device_text=LABELS), "likely",
        "F.cross_entropy or F.nll_loss asserted on the device: a "
        "label is neither one of the classes nor ignore_index"),
    "two texts without an op": (evidence(device_text=f"{LABELS}\n{ROWS}"), "likely",
        "F.cross_entropy or F.nll_loss asserted on the device"),
    "an unknown text without an op": (evidence(device_text=OWN), "unknown",
        "CUDA asserted `mine < yours`, and no recorded op can be blamed for it"),
    "nothing": (evidence(), "unknown",
        "CUDA reported a device-side assert, and no recorded op can be blamed for it"),
    "nothing, in a cell without a check": (evidence(is_checked=False), "unknown",
        "CUDA reported a device-side assert, and this cell was not checked"),
    "an unknown text, in a cell without a check": (
        evidence(is_checked=False, device_text=OWN), "unknown",
        "CUDA asserted `mine < yours`, and this cell was not checked"),
    "nothing, before this cell": (
        evidence(device_fault=DeviceFault(was_before=True)), "unknown",
        "CUDA reported a device-side assert that came before this cell"),
    "an op that was not waited for": (
        evidence(op=EMBEDDING, synchronization=UNWAITED), "unknown",
        "CUDA reported a device-side assert while aten::embedding was called"),
    "not waited for, but the text agrees": (
        evidence(op=EMBEDDING, device_text=ROWS, synchronization=UNWAITED), "likely",
        "aten::embedding asserted on the device: indices: an index is outside 0 … size - 1"),
    "the one call that fits the text": (
        evidence(fitting_call=FITTING, device_text=ROWS), "likely",
        "F.embedding(i, w) in line 3 is the only call of this cell that fits the assert: indices: "
        "an index is outside"),
    "the one call that fits, whose op has no such argument": (
        evidence(fitting_call=replace(FITTING, op="aten::relu"), device_text=ROWS), "likely",
        "F.embedding(i, w) in line 3 is the only call of this cell that fits the assert: an index"),
    "a fitting call without a text": (evidence(fitting_call=FITTING), "unknown",
        "CUDA reported a device-side assert, and no recorded op can be blamed for it"),
    "compiled code": (evidence(op=OpName(name="aten::relu"), device_text=COMPILED), "likely",
        "compiled code asserted on the device: an index in code that torch.compile generated is "
        "outside 0 … 9"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_certainty_and_headline(name: str) -> None:
    """A text and an op that disagree prove nothing."""
    given, certainty, headline = CASES[name]
    report = diagnose(given)
    assert (report.kind, report.certainty) == ("device_assert", certainty)
    assert report.headline_schema.startswith(headline)
    assert "restart the kernel" in report.explanation.lower()
    assert report.context_usable is False


@pytest.mark.parametrize("op", [EMBEDDING, NODE, OpName(name="mine::pick")], ids=lambda o: o.name)
def test_more_evidence_makes_no_verdict_less_certain(op: OpName) -> None:
    """From no text to one that no kernel of torch's prints, and to the op's own."""
    texts = (None, OWN, ROWS)
    order = [diagnose(evidence(op=op, device_text=text)).certainty for text in texts]
    ranks = ["unknown", "likely", "proven"]
    assert order == sorted(order, key=ranks.index)


def test_the_argument_gets_the_users_name() -> None:
    known = TensorFact(argument="indices", expression="ids", dtype="int64")
    report = diagnose(evidence(op=EMBEDDING, device_text=ROWS, tensors=(known,)))
    assert (report.argument, report.expression) == ("indices", "ids")


def test_the_error_code_alone_is_enough() -> None:
    """Recognised by type and code, whatever words torch uses."""
    error = replace(ERROR, message="CUDA error: something new")
    assert diagnose(replace(BASE, error=error)).kind == "device_assert"


@pytest.mark.parametrize(
    ("known", "text", "is_said"),
    [
        # Triton's and others are launched unseen; an extension's op may print texts of its own.
        ({"op": OpName(name="aten::add"), "device_text": OWN}, "launched past torch's ops", True),
        ({"op": OpName(name="mine::pick"), "device_text": OWN}, "launched past torch's ops", False),
        ({"op": EMBEDDING}, "text of the assertion was not seen. A kernel that is launched", True),
        ({"op": EMBEDDING, "synchronization": UNWAITED}, "launched past torch's ops", False),
        ({"op": EMBEDDING, "device_text": ROWS}, "launched past torch's ops", False),
        # The ops in compiled code cannot be told apart: run it eagerly.
        ({"device_text": COMPILED}, "run the cell without --no-force-eager", True),
        # The first is the cause; that there were more is said.
        ({"device_text": LABELS}, "different assertions", False),
        ({"device_text": f"{LABELS}\n{ROWS}"}, "2 different assertions, the first comes", True),
        ({"device_text": LABELS}, "printed `t >= 0 && t < n_classes`, the check of F.cross", True),
        ({"device_text": COMPILED}, "CUDA printed `", False),
        # How to name the op: only where none is named, and waiting would have named one.
        ({"synchronization": UNWAITING, "device_text": OWN}, WAIT, True),
        ({"synchronization": WAITING, "device_text": OWN}, WAIT, False),
        ({"synchronization": UNWAITING, "device_text": OWN, "op": EMBEDDING}, WAIT, False),
        ({"synchronization": UNWAITING, "device_text": COMPILED}, WAIT, False),
    ],
)
def test_what_is_explained(known: dict[str, object], text: str, is_said: bool) -> None:
    """What else may have printed the text, and the next step."""
    assert (text in diagnose(evidence(**known)).explanation) is is_said


@pytest.mark.parametrize(
    ("ops", "listed"),
    [
        (["mine::a"], "mine::a"),
        (["mine::a", "mine::a.out", "aten::relu", "torch.relu", "c10d::send"], "mine::a"),
        (["mine::a", "mine::b", "its::c", "its::d"], "mine::a, mine::b, its::c"),
        (["aten::relu", "quantized::add"], None),
        ([], None),
    ],
)
def test_ops_before_that_are_not_torchs_are_named_where_none_was_waited_for(
    ops: list[str], listed: str | None
) -> None:
    history = entries(1, [(op, "", None, None) for op in ops])
    known = {"op": OpName(name="aten::add"), "device_text": OWN, "history": history}
    text = diagnose(evidence(**known, synchronization=UNWAITED)).explanation
    others = f"No known torch kernel prints it. Ops called before that are not torch's: {listed}."
    past = "No known torch kernel prints it. A kernel that is launched past torch's ops"
    assert (past if listed is None else others) in text
    assert past in diagnose(evidence(**known)).explanation


@pytest.mark.parametrize(
    ("message", "is_set"),
    [
        ("CUDA error: device-side assert triggered\nFor debugging", True),
        ("CUDA error: device-side assert triggered\nmight be asynchronously reported", False),
        ("device-side assert triggered", False),
    ],
)
def test_without_a_check_the_line_is_the_launch_s_only_where_launches_block(
    message: str, is_set: bool
) -> None:
    error = replace(ERROR, message=message)
    text = diagnose(evidence(error=error, is_checked=False)).explanation
    assert ("CUDA_LAUNCH_BLOCKING=1 is set" in text) is is_set
    assert ("CUDA reports asserts late" in text) is not is_set
    assert "Next step: restart the kernel, run `%load_ext cudalens`" in text
    assert text.count("Next step:") == 1
    checked = diagnose(evidence(error=error)).explanation
    assert "CUDA reports asserts late" not in checked and "LAUNCH_BLOCKING" not in checked


def test_who_raised_it_where_each_op_was_waited_for() -> None:
    """A fault from before this cell, or an error that the code handled, is said to be one."""
    elsewhere = "Each op that the cell called in its own thread was waited for"
    before, handled = DeviceFault(was_before=True), DeviceFault(was_handled_inside=True)
    assert elsewhere in diagnose(evidence(synchronization=WAITING)).explanation
    text = diagnose(evidence(synchronization=WAITING, device_fault=before)).explanation
    assert elsewhere not in text and "It happened before this cell ran." in text
    assert "It happened before" not in diagnose(evidence()).explanation
    text = diagnose(evidence(device_fault=handled)).explanation
    assert "The op's own error did not leave the block" in text
    unwaited = "Ops were not waited for, so an earlier one can be at fault. Next step: "
    assert unwaited in diagnose(evidence(op=EMBEDDING, synchronization=UNWAITED)).explanation
    assert unwaited not in diagnose(evidence(op=EMBEDDING)).explanation


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["F.cross_entropy", "nn.CrossEntropyLoss", "F.nll_loss"], "F.cross_entropy or F.nll_loss"),
        (["nn.Embedding", "F.embedding"], "nn.Embedding"),
        (["x[i]", "x.put_", "torch.take", "y"], "x[i], x.put_, torch.take or another"),
        (["x[i]", "x.put_", "torch.take"], "x[i], x.put_ or torch.take"),
        ([], "a kernel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_of_a_function_and_its_module_one_is_named(names: list[str], text: str) -> None:
    assert joined(names) == text
