"""What is said of saved tensors that were freed or changed, by the facts that were collected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cudalens.core.evidence_types import FreedGraph, InPlaceChange
from cudalens.core.graph_types import ProvenanceStep
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import Hint, LineRef, SourceSpan
from cudalens.diagnosis.host_errors import explain_host_error
from cudalens.diagnosis.host_errors._base import Verdict
from tests.builders import fact

TWICE = "Trying to backward through the graph a second time"
CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: [torch.cuda.FloatTensor [8, 3]], which is output 0 of {}, is at version 2; "
    "expected version 1 instead."
)


def line(number: int, text: str, cell: int = 3) -> LineRef:
    return LineRef(cell=cell, line=number, text=text)


def step(number: int, text: str, cell: int = 3) -> ProvenanceStep:
    return ProvenanceStep(op="aten::add_", source=line(number, text, cell))


HERE = SourceSpan(cell=3, line=9, text="loss.backward()")


def explained(message: str, **facts: Any) -> Verdict:
    error = ErrorFacts(type_name="RuntimeError", message=message)
    verdict = explain_host_error(Evidence(error=error, **{"source": HERE, **facts}), error)
    assert verdict.troubles == ()
    return verdict


def only_hint(verdict: Verdict) -> Hint:
    (hint,) = verdict.hints
    return hint


# --- a graph that was freed -----------------------------------------------------------------------

FREED = FreedGraph(
    node="TanhBackward0", made=line(4, "h = rnn(x, h)"), freed=line(5, "loss.backward()")
)


def test_a_freed_graph_without_its_lines() -> None:
    verdict = explained(TWICE)
    assert verdict.headline == "a part of the graph of this loss was freed by an earlier backward"
    assert verdict.explanation.startswith("backward frees the tensors that the forward pass saved.")
    assert verdict.hints == ()
    tensors = (fact("self", "float32[]", "loss"),)
    assert "the graph of loss was" in explained(TWICE, tensors=tensors).headline
    assert explained(TWICE, tensors=tensors).argument == "self"
    half = explained(TWICE, freed=replace(FREED, freed=None))
    assert half.explanation == verdict.explanation


@pytest.mark.parametrize("name", ["tensors", "tensors[0]", "outputs", "outputs[0]"])
def test_the_loss_that_autograd_was_given(name: str) -> None:
    verdict = explained(TWICE, tensors=(fact(name, "float32[]", "loss"),))
    assert "the graph of loss was" in verdict.headline and verdict.argument == name


def test_two_losses_of_one_graph() -> None:
    verdict = explained(TWICE, freed=FREED)
    assert verdict.headline == (
        "this loss depends on the graph of In [3] line 4, which In [3] line 5 has freed"
    )
    assert verdict.explanation == (
        "backward frees the tensors that the forward pass saved: In [3] line 5 (loss.backward()) "
        "freed TanhBackward0 of In [3] line 4 (h = rnn(x, h))."
    )
    hint = only_hint(verdict)
    assert hint.rule == "backward_twice"
    assert hint.text == (
        "keep the graph in In [3] line 5 (retain_graph=True), or add the losses and run backward "
        "once"
    )


def test_one_backward_that_runs_again() -> None:
    verdict = explained(TWICE, freed=replace(FREED, freed=line(9, "loss.backward()")))
    assert only_hint(verdict).text == (
        "backward runs again through what In [3] line 4 made once: run the forward pass again "
        "before each backward"
    )


def test_to_keep_the_graph_is_no_help_after_a_step() -> None:
    hint = only_hint(explained(TWICE, freed=replace(FREED, has_stepped=True)))
    assert "retain_graph" not in hint.text
    assert hint.text == (
        "the optimizer has changed the parameters since the backward in In [3] line 5: run the "
        "forward pass again before this one"
    )


CARRIED = replace(
    FREED,
    read=line(4, "h = rnn(x, h)"),
    holder=line(4, "h = rnn(x, h)"),
    name="h",
    detached="h.detach()",
    is_made_again=True,
)


def test_a_state_that_is_carried_on() -> None:
    verdict = explained(TWICE, freed=CARRIED)
    assert verdict.headline == (
        "h still has the graph of the previous step, which In [3] line 5 has freed"
    )
    hint = only_hint(verdict)
    assert hint.rule == "carried_state"
    assert hint.text == (
        "h still has the graph of the previous step: add h = h.detach() after In [3] line 5"
    )


def test_the_explanation_has_each_code_once() -> None:
    text = explained(TWICE, freed=CARRIED).explanation
    assert text.count("h = rnn(x, h)") == 1
    assert text.endswith("After that, In [3] line 4 used the h that In [3] line 4 made before.")
    held = replace(CARRIED, name=None, holder=line(6, "h = h * 2"))
    assert explained(TWICE, freed=held).explanation.endswith(
        "used the tensor that In [3] line 6 (h = h * 2) made before."
    )


def test_two_states_that_are_carried_on() -> None:
    both = replace(CARRIED, name="h, c", holder=line(4, "o, (h, c) = rnn(x, (h, c))"))
    verdict = explained(TWICE, freed=replace(both, detached="h.detach(), c.detach()"))
    assert verdict.headline.startswith("h and c still have the graph of the previous step")
    assert "add h, c = h.detach(), c.detach() after" in only_hint(verdict).text


def test_what_another_line_names_is_detached_before_the_next_step() -> None:
    """Where a later line gives the variable its value, to detach it after backward is too early."""
    other = replace(CARRIED, holder=line(4, "g = rnn(x, h)"))
    assert only_hint(explained(TWICE, freed=other)).text == (
        "h still has the graph of the previous step: detach it before the next step, or start anew"
    )
    no_code = replace(CARRIED, detached=None)
    assert "detach it before the next step" in only_hint(explained(TWICE, freed=no_code)).text


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("self.state = rnn(x, h)", "self.state still has"),
        ("losses.append(loss)", "losses still has"),
        ("self.total += loss", "self.total still has"),
        ("state = rnn(x, h)", "In [3] line 4 reads what In [3] line 4 made in an earlier step"),
        ("self.a, self.b = f(x)", "In [3] line 4 reads what In [3] line 4 made in an earlier step"),
    ],
)
def test_an_attribute_or_a_list_that_keeps_the_graph(code: str, name: str) -> None:
    unnamed = replace(CARRIED, name=None, holder=line(4, code))
    assert only_hint(explained(TWICE, freed=unnamed)).text.startswith(name)


ONCE = replace(
    FREED, read=line(9, "(h + w).sum().backward()"), holder=line(4, "h = net(x)"), name="h"
)


def test_a_result_that_serves_one_backward() -> None:
    verdict = explained(TWICE, freed=ONCE)
    assert verdict.headline.startswith("this loss depends on the graph of In [3] line 4, which")
    hint = only_hint(verdict)
    assert hint.rule == "made_once"
    assert hint.text.startswith(
        "h of In [3] line 4 serves one backward: keep its graph in In [3] line 5 "
    )
    assert "(retain_graph=True)" in hint.text
    assert hint.text.endswith("before In [3] line 9")


def test_a_result_that_an_earlier_line_reads_may_be_detached() -> None:
    hint = only_hint(explained(TWICE, freed=replace(ONCE, read=line(8, "b = h * w"))))
    assert hint.text.endswith(". A pass that is not to train what made h takes h.detach()")


def test_a_result_after_a_step_is_made_again() -> None:
    hint = only_hint(explained(TWICE, freed=replace(ONCE, has_stepped=True)))
    assert "retain_graph" not in hint.text
    assert "before In [3] line 9, or give h.detach() to a pass" in hint.text


def test_a_result_that_another_line_holds_has_no_name() -> None:
    held = replace(ONCE, holder=line(6, "g = h[0]"))
    hint = only_hint(explained(TWICE, freed=held))
    assert hint.text.startswith("the result of In [3] line 4 serves one backward")
    stepped = only_hint(explained(TWICE, freed=replace(held, has_stepped=True)))
    assert stepped.text.endswith("or give what is detached of it to a pass that is not to train it")


# --- a saved tensor that was changed --------------------------------------------------------------


def changed(code: str, number: int = 6, node: str = "TanhBackward0", **facts: Any) -> Verdict:
    modified = InPlaceChange(modified=step(number, code), **facts)
    return explained(CHANGED.format(node), modified=modified)


def test_a_change_that_was_not_seen() -> None:
    verdict = explained(CHANGED.format("TanhBackward0"))
    assert verdict.headline == (
        "a tensor that backward needs was changed in place: float32 [8, 3], output 0 of "
        "TanhBackward0"
    )
    assert verdict.hints == ()
    view = explained(CHANGED.format("AsStridedBackward0"))
    assert view.headline.endswith("was changed in place: float32 [8, 3]")
    long = explained(CHANGED.format("MultiHeadAttentionBackward0")).headline
    assert long == "a tensor that backward needs was changed in place"


def test_the_line_of_a_change_is_in_the_headline() -> None:
    verdict = changed("h += 1")
    assert verdict.headline == "h += 1 in line 6 changed h, which loss.backward() needs"
    assert verdict.explanation == (
        "`h` (float32 [8, 3], output 0 of TanhBackward0) was saved for backward at version 1, and "
        "is at version 2 now: changed in place by `h += 1` at In [3] line 6. With it, backward "
        "would compute wrong gradients."
    )
    assert changed("opt.step()", name="D[2].weight").headline == (
        "opt.step() in line 6 changed D[2].weight, which loss.backward() needs"
    )
    assert " changed own.h, which" in changed("h += 1", name="own.h").headline


def test_a_long_line_is_cut_in_the_headline() -> None:
    headline = changed(f"h[{'0' * 80}] = 1").headline
    assert len(headline) <= 100
    assert "… in line 6 changed h, which loss.backward() needs" in headline


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("h += 1", "h"),
        ("h[mask].clamp_(0)", "h"),
        ("h[0][1] = 2", "h"),
        ("h = h.relu_()", "h"),
        ("self.h.mul_(2)", "self.h"),
        ("h.mul(2)", "a tensor"),
        ("f(h)", "a tensor"),
        ("h += 1; g += 1", "a tensor"),
        (f"{'h' * 24} += 1", "h" * 24),
        (f"{'h' * 25} += 1", "a tensor"),
    ],
)
def test_what_a_statement_writes_to(code: str, name: str) -> None:
    assert f" changed {name}, which" in changed(code).headline


def test_the_savers_are_named_where_they_are_few() -> None:
    savers = tuple(step(at, f"y = f{at}(h)") for at in range(1, 5))
    assert "was saved for backward by `y = f1(h)` at In [3] line 1 at version 1" in (
        changed("h += 1", savers=savers[:1]).explanation
    )
    assert "line 1 or by `y = f2(h)`" in changed("h += 1", savers=savers[:3]).explanation
    assert "was saved for backward at version 1" in changed("h += 1", savers=savers).explanation


def test_all_writes_are_named() -> None:
    writes = (step(6, "h += 1"), step(7, "h *= 2"), step(6, "h += 1"))
    text = changed("h *= 2", writes=writes).explanation
    assert "changed in place by `h += 1` at In [3] line 6 and by `h *= 2` at In [3] line 7." in text


# --- what helps -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "new"),
    [
        ("h += 1", "h = h + 1"),
        ("self.h *= 2", "self.h = self.h * 2"),
        ("h.relu_()", "h = h.relu()"),
        ("h.clamp_(0, max=2)", "h = h.clamp(0, max=2)"),
    ],
)
def test_a_new_tensor_instead_of_a_change(code: str, new: str) -> None:
    hint = only_hint(changed(code))
    assert (hint.rule, hint.text) == ("out_of_place", f"line 6: {new} makes a new tensor")
    assert hint.fix is None


@pytest.mark.parametrize("code", ["h[0] = 1", "h[0] = g = 1", "h[:, 0] += 1", "h[1:] += 1"])
def test_a_change_of_an_item_needs_a_copy_before(code: str) -> None:
    assert only_hint(changed(code)).text == (
        "before line 6: h = h.clone(), so that backward keeps the old one"
    )


def test_the_other_writes_are_said() -> None:
    writes = (step(6, "h += 1"), step(7, "h *= 2"))
    text = only_hint(changed("h *= 2", number=7, writes=writes)).text
    assert text == "line 6: h = h + 1 makes a new tensor (line 7 changes it too)"
    more = (*writes, step(8, "h -= 1"))
    text = only_hint(changed("h -= 1", number=8, writes=more)).text
    assert text.endswith("(line 7 and line 8 change it too)")


def test_an_item_may_be_one_of_a_list() -> None:
    for code in ("h[0] += 1", "h.zero_()"):
        start = "make a new tensor in line 6 instead of"
        assert only_hint(changed(code)).text.startswith(start), code


def test_every_write_is_named_where_none_can_be_rewritten() -> None:
    """A new tensor in the last of them alone would come too late."""
    text = only_hint(changed("f(h)", number=7, writes=(step(6, "f(h)"), step(7, "f(h)")))).text
    assert text.startswith("make a new tensor in line 6 and in line 7 instead of")
    text = only_hint(changed("f(h)", number=7, writes=(step(7, "f(h)"),) * 2)).text
    assert text.startswith("make a new tensor in line 7 instead of")


def test_a_line_that_reads_what_it_writes_over() -> None:
    code = "rows[j] = rows[j - 1] * w"
    assert only_hint(changed(code, savers=(step(6, code),))).text == (
        "line 6 writes over rows[j - 1], which backward needs: read rows[j - 1].clone() there"
    )
    code = "rows[j] = rows[j - 1] * rows[j - 2]"
    assert only_hint(changed(code, savers=(step(6, code),))).text == (
        "line 6 writes to rows, which it has read: write to a new tensor there"
    )
    elsewhere = only_hint(changed(code, savers=(step(5, code),))).text
    assert elsewhere.startswith("before line 6: rows = rows.clone()")


def test_a_tensor_that_another_name_has_too() -> None:
    hint = only_hint(changed("h += 1", is_shared=True))
    assert hint.text == "line 6 changes h, which another name has too: change a copy of it"
    assert hint.fix is None


def test_a_parameter_and_a_module_in_place() -> None:
    hint = only_hint(changed("w.mul_(2)", is_parameter=True))
    assert hint.text == (
        "a parameter is changed between forward and backward: run the forward pass again after it"
    )
    assert hint.fix is None
    assert only_hint(changed("x = relu(h)", module="ReLU")).text == (
        "ReLU was made with inplace=True and writes over its input: let it make a new tensor"
    )
    assert only_hint(changed("f(h)")).text == (
        "make a new tensor in line 6 instead of changing the one that backward needs"
    )


def test_a_step_of_an_optimizer_asks_for_the_forward_again() -> None:
    assert only_hint(changed("opt.step()")).text == (
        "the step changes the parameters: run the forward pass again after it"
    )
    saver = (step(2, "y = net(x)", cell=2),)
    assert only_hint(changed("opt.step()", savers=saver)).text == (
        "the step changes the parameters with which In [2] line 2 made y: run the forward pass "
        "again after it"
    )
    stale = (line(2, "y = net(x)"), line(3, "z = y * 2"), line(4, "loss = z.sum()"))
    assert only_hint(changed("opt.step()", stale=stale[:1])).text.endswith(
        "run line 2 again after it"
    )
    assert only_hint(changed("opt.step()", stale=stale)).text.endswith(
        "run lines 2, 3 and 4 again after it"
    )
    many = tuple(line(at, "y = f(y)") for at in range(1, 6))
    assert only_hint(changed("opt.step()", stale=many[:4])).text.endswith(
        "run lines 1, 2, 3 and 4 again after it"
    )
    assert only_hint(changed("opt.step()", stale=many)).text.endswith(
        "run the forward pass again after it"
    )


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            "total = opt.step()",
            "the step changes the parameters: run the forward pass again after it",
        ),
        ("total += opt.step()", "line 6: total = total + opt.step() makes a new tensor"),
    ],
)
def test_a_line_that_also_adds_in_place_is_no_step_alone(code: str, text: str) -> None:
    assert only_hint(changed(code)).text == text


def test_a_state_that_is_carried_over_a_step() -> None:
    modified = InPlaceChange(modified=step(6, "opt.step()"))
    verdict = explained(CHANGED.format("T"), modified=modified, freed=CARRIED)
    hint = only_hint(verdict)
    assert hint.rule == "carried_state"
    assert hint.text == (
        "h still has the graph of the previous step, and line 6 has changed the parameters since: "
        "add h = h.detach() after line 9. retain_graph=True does not help here"
    )


def test_two_states_without_the_code_that_detaches_them() -> None:
    both = replace(CARRIED, name="h, c", detached=None)
    assert only_hint(explained(TWICE, freed=both)).text == (
        "h and c still have the graph of the previous step: detach them before the next step, or "
        "start anew"
    )


def test_a_backward_whose_number_another_cell_has_too() -> None:
    """Without a cell a line stands where the failing one does."""
    freed = replace(CARRIED, freed=LineRef(line=5, text="loss.backward()"))
    assert explained(TWICE, freed=freed).headline.endswith(", which line 5 has freed")
    here = replace(freed, made=LineRef(line=5, text="h = rnn(x, h)"))
    assert explained(TWICE, freed=here).headline.endswith(", which line 5 has freed")
    held = replace(freed, holder=line(5, "h = rnn(x, h)", cell=2))
    assert explained(TWICE, freed=held).headline.endswith(", which In [3] line 5 has freed")
    alike = replace(freed, made=line(5, "h = rnn(x, h)", cell=2))
    assert explained(TWICE, freed=alike).headline.endswith(", which In [3] line 5 has freed")
    nowhere = explained(TWICE, freed=alike, source=None)
    assert nowhere.headline.endswith(", which line 5 has freed")


def test_what_a_step_has_made_stale() -> None:
    modified = InPlaceChange(modified=step(6, "opt.step()"))
    freed = replace(CARRIED, read=None)
    hint = only_hint(explained(CHANGED.format("T"), modified=modified, freed=freed))
    assert (hint.rule, hint.text) == (
        "out_of_place",
        "the step changes the parameters with which In [3] line 4 made h: run the forward pass "
        "again after it",
    )
    once = replace(CARRIED, is_made_again=False)
    hint = only_hint(explained(CHANGED.format("T"), modified=modified, freed=once))
    assert hint.rule == "out_of_place"


@pytest.mark.parametrize(
    ("source", "start", "place"),
    [
        (None, "aten::add_ changed", "aten::add_"),
        (line(6, ""), "line 6 changed", "In [3] line 6"),
        (line(6, "", cell=2), "In [2] line 6 changed", "In [2] line 6"),
        (
            line(6, "with torch.no_grad(): w -= 1"),
            "w -= 1 in line 6 changed",
            "`with torch.no_grad(): w -= 1` at In [3] line 6",
        ),
    ],
)
def test_a_change_of_which_less_is_known(source: LineRef | None, start: str, place: str) -> None:
    change = InPlaceChange(modified=ProvenanceStep(op="aten::add_", source=source))
    verdict = explained(CHANGED.format("T"), modified=change)
    assert verdict.headline == f"{start} a tensor, which loss.backward() needs"
    assert f" now: changed in place by {place}. With" in verdict.explanation
    several = SourceSpan(cell=3, line=9, text="(a + b).backward()")
    verdict = explained(CHANGED.format("T"), modified=change, source=several)
    assert verdict.headline == f"{start} a tensor, which backward needs"
