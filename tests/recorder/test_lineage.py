"""Lineage: where bad values came from, and who wrote over a tensor that autograd had saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from cudalens import simulate
from cudalens.core.report_types import ProvenanceStep
from cudalens.recorder import FIRST_BAD, ModifiedTensor, Recorder
from cudalens.recorder.inplace import read_complaint
from cudalens.recorder.ops import is_node_of
from cudalens.recorder.walk import ENTERED


def line_of(text: str) -> int:
    """The number of the only line of this file that ends with the mark ``text``."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [index for index, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return number


def is_bad(tensor: torch.Tensor) -> bool:
    """Ten classes: 0 … 9."""
    return bool(((tensor < 0) | (tensor > 9)).any())


def trace(make: Callable[[], torch.Tensor]) -> list[tuple[str | None, int | None, str | None]]:
    """Op, line and note of each step behind the tensor that ``make`` makes under a recorder."""
    with Recorder() as recorder:
        steps = recorder.provenance(make(), is_bad)
    assert recorder.limits == []
    return [(step.op, step.source and step.source.line, step.note) for step in steps]


# --- the way of bad values -----------------------------------------------------------------------


def test_the_op_whose_result_first_breaks_the_bound_is_named() -> None:
    """``raw + 1`` made a ten of a nine; what came before was in bounds and is not blamed."""
    raw = torch.arange(10)
    shifted: list[torch.Tensor] = []

    def make() -> torch.Tensor:
        shifted.append(raw + 1)  # first-shift
        return shifted[-1] * 2  # second-shift

    assert trace(make) == [
        ("aten::mul.Tensor", line_of("second-shift"), None),
        ("aten::add.Tensor", line_of("first-shift"), FIRST_BAD),
    ]


def test_a_claim_needs_living_inputs_in_bounds() -> None:
    """With the input alive the op is the first; with the input gone nothing is claimed."""
    raw = torch.arange(10)

    def alive() -> torch.Tensor:
        return raw * 2  # claim-alive

    def dead() -> torch.Tensor:
        return (raw * 1) * 2  # claim-dead

    assert trace(alive) == [("aten::mul.Tensor", line_of("claim-alive"), FIRST_BAD)]
    notes = [note for _, _, note in trace(dead)]
    assert notes == [None, None]


def test_an_input_that_was_mended_since_is_no_proof() -> None:
    """An input that a recorded call has written to says nothing of its values before."""
    raw = torch.arange(11)

    def make() -> torch.Tensor:
        copied = raw * 1
        raw.clamp_(0, 9)
        return copied

    assert [note for _, _, note in trace(make)] == [None]


def test_views_are_followed_and_are_no_steps() -> None:
    """Reshaping makes no value bad."""
    raw = torch.arange(10)

    def make() -> torch.Tensor:
        return (raw + 1).view(2, 5).t()[1:].unsqueeze(0)  # through-views

    assert trace(make) == [("aten::add.Tensor", line_of("through-views"), FIRST_BAD)]


def test_a_factory_s_own_values_are_its_result() -> None:
    """Values that no tensor brought in were made by the op itself: drawn, or typed by the user."""

    def drawn() -> torch.Tensor:
        return torch.full((3,), 12)  # made-full

    def typed() -> torch.Tensor:
        return torch.tensor([1, 12])  # made-typed

    assert trace(drawn) == [("aten::full", line_of("made-full"), FIRST_BAD)]
    assert trace(typed) == [("aten::lift_fresh", line_of("made-typed"), FIRST_BAD)]


def test_scores_are_not_labels() -> None:
    """argmax makes integers of floats: the floats' own range is no cause."""
    scores = torch.linspace(-50, 50, 12)

    def make() -> torch.Tensor:
        return scores.argmax()  # made-argmax

    assert trace(make) == [("aten::argmax", line_of("made-argmax"), FIRST_BAD)]


def test_indices_pass_no_values_on() -> None:
    """A lookup's result comes from the table, also when the index is beyond the bound itself."""
    table, index = torch.arange(20) % 10, torch.tensor([15, 19])
    holey = torch.arange(20)

    def good_table() -> torch.Tensor:
        found = table[index]
        return found * 2  # lookup-good

    def bad_table() -> torch.Tensor:
        return holey[index]  # lookup-bad

    assert trace(good_table) == [
        ("aten::mul.Tensor", line_of("lookup-good"), None),
        ("aten::index.Tensor", line_of("lookup-good") - 1, None),
    ]
    # The table is bad, and nobody knows who made it; the index is as bad and no cause.
    assert trace(bad_table) == [("aten::index.Tensor", line_of("lookup-bad"), None)]


def test_a_write_in_place_is_a_step_without_a_claim() -> None:
    """What the tensor held before the write cannot be known any more."""
    raw = torch.arange(10)

    def make() -> torch.Tensor:
        raw.mul_(2)  # in-place-write
        return raw

    assert trace(make) == [("aten::mul_.Tensor", line_of("in-place-write"), None)]


def test_what_no_recorded_op_made_has_no_steps() -> None:
    """A tensor from before the recording came from nowhere that is known."""
    assert trace(torch.arange(11).contiguous) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="copies to the simulated device")
def test_data_that_came_from_the_cpu_is_said_to_enter(sim: simulate.Simulation) -> None:
    """The copy to the device brought the bad values; one on the CPU alone is an ordinary step."""
    labels = torch.tensor([3, 10])

    def moved() -> torch.Tensor:
        return labels.to("cuda")  # moved-labels

    assert trace(moved) == [("aten::_to_copy", line_of("moved-labels"), ENTERED)]
    assert trace(lambda: labels.to(torch.int32)) == [
        ("aten::_to_copy", line_of("moved-labels") + 3, None)
    ]


def test_provenance_records_nothing_itself() -> None:
    """Asking runs the test of the values outside the recorder and outside autograd."""
    with Recorder() as recorder:
        made = torch.full((2,), 12)
        before = recorder.recorded_ops
        recorder.provenance(made, is_bad)
        assert recorder.recorded_ops == before


def test_site_of_follows_a_view_to_its_base() -> None:
    """The op that made a tensor, the one that made the base of a view, and none for a stranger."""
    with Recorder() as recorder:
        made = torch.ones(4) * 2  # site-made
    view = made[1:]
    site = recorder.site_of(view)
    assert site is not None
    assert site[0][-1].lineno == line_of("site-made")
    assert recorder.site_of(torch.ones(2)) is None


def test_a_step_has_the_text_of_its_own_line() -> None:
    """Of a statement over several lines the one that made the values, not the first."""
    with Recorder() as recorder:
        made = (
            torch.full((3,), 12)  # inside-statement
            .view(3)
        )  # fmt: skip
        (step,) = recorder.provenance(made, is_bad)
    assert step.source is not None
    assert step.source.line == line_of("inside-statement")
    assert step.source.text == "torch.full((3,), 12)  # inside-statement"


# --- writes in place on that way -----------------------------------------------------------------


def good_values_at_new_indices(labels: torch.Tensor) -> None:
    labels[torch.tensor([3, 4])] = torch.tensor([1, 3])


def good_number_at_a_mask(labels: torch.Tensor) -> None:
    labels[labels == 7] = 2


def good_values_of_a_living_tensor(labels: torch.Tensor) -> None:
    labels.scatter_(0, PLACES, GOOD)


def good_values_in_a_view(labels: torch.Tensor) -> None:
    labels[2:4] = torch.tensor([1, 2])


def good_values_through_data(labels: torch.Tensor) -> None:
    labels.data[0] = 3


def good_values_one_by_one(labels: torch.Tensor) -> None:
    for at in range(30):
        labels[at] = at % 10


PLACES, GOOD = torch.tensor([0, 1]), torch.tensor([4, 5])
GOOD_WRITES = [
    good_values_at_new_indices,
    good_number_at_a_mask,
    good_values_of_a_living_tensor,
    good_values_in_a_view,
    good_values_through_data,
    good_values_one_by_one,
]
IN_VIEWS = (good_values_in_a_view, good_values_through_data, good_values_one_by_one)


@pytest.mark.parametrize("write", GOOD_WRITES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_write_of_good_values_is_passed_over(
    write: Callable[[torch.Tensor], None], inference: bool
) -> None:
    """The values were bad from the beginning: the line that made them is named, and no other."""

    def make() -> torch.Tensor:
        with torch.inference_mode(inference):
            labels = torch.full((40,), 12)  # made-before-writes
            write(labels)
        return labels

    if inference and write in IN_VIEWS:
        # There torch does not tell which elements a view showed, so nothing is said.
        assert trace(make) == []
    else:
        assert trace(make) == [("aten::full", line_of("made-before-writes"), FIRST_BAD)]


def bad_values_at_new_indices(labels: torch.Tensor) -> None:
    labels[CHOSEN] = torch.tensor([1, 12])


def bad_number_at_a_kept_mask(labels: torch.Tensor) -> None:
    labels.masked_fill_(KEPT, 12)


def bad_values_of_a_living_tensor(labels: torch.Tensor) -> None:
    labels.scatter_(0, PLACES, BAD)


def bad_values_in_a_view(labels: torch.Tensor) -> None:
    labels[2:4] = torch.tensor([1, 12])


def bad_values_through_data(labels: torch.Tensor) -> None:
    labels.data[0] = 12


CHOSEN, BAD = torch.tensor([3, 4]), torch.tensor([4, 12])
KEPT = torch.arange(40) == 7
BAD_WRITES = [
    (bad_values_at_new_indices, "aten::index_put_", None),
    (bad_number_at_a_kept_mask, "aten::masked_fill_.Scalar", FIRST_BAD),
    (bad_values_of_a_living_tensor, "aten::scatter_.src", None),
    (bad_values_in_a_view, "aten::copy_", None),
    (bad_values_through_data, "aten::copy_", None),
]


@pytest.mark.parametrize(("write", "op", "note"), BAD_WRITES)
def test_a_write_of_bad_values_is_named(
    write: Callable[[torch.Tensor], None], op: str, note: str | None
) -> None:
    """The neighbour: one of the values is bad, also where good ones were written afterwards."""
    line = write.__code__.co_firstlineno + 1

    def make() -> torch.Tensor:
        labels = torch.full((40,), 5)
        write(labels)
        labels[30:] = 3
        return labels

    assert trace(make) == [(op, line, note)]


def test_who_wrote_more_than_the_bad_elements_may_have_written_them() -> None:
    """Two unknown elements cannot be three bad ones; they can be two, and then nothing is said."""

    def write(count: int) -> torch.Tensor:
        labels = torch.full((40,), 5)
        labels[:count] = 12  # some-bad
        labels[torch.tensor([38, 39])] = torch.tensor([1, 2]) * 1
        return labels

    assert trace(lambda: write(3)) == [("aten::fill_.Tensor", line_of("some-bad"), None)]
    assert trace(lambda: write(2)) == []


def test_a_bad_number_is_what_an_unknown_mask_writes() -> None:
    """The number is told, and that it reached an element is not claimed; a good one is silent."""

    def write(number: int) -> torch.Tensor:
        labels = torch.arange(12)
        labels[labels == 0] = number  # number-at-mask
        return labels

    bad = [("aten::index_put_", line_of("number-at-mask"), "it writes 12")]
    assert trace(lambda: write(12)) == bad
    assert trace(lambda: write(2))[0][0] == "aten::arange"


def test_values_added_to_what_was_there_are_not_the_result() -> None:
    """Good values that are added may make bad ones; written as they are they cannot."""

    def write(adds: bool) -> torch.Tensor:
        labels = torch.full((4,), 12)  # made-before-adding
        labels.index_put_((torch.tensor([0, 1, 2, 3]),), GOOD[:1], adds)
        labels.clamp_(12, 12)
        return labels

    assert [step[0] for step in trace(lambda: write(True))] == ["aten::clamp_"]


def test_a_write_beside_a_view_is_none_to_the_view() -> None:
    """A bad number in another column did not reach the labels; one in theirs did."""

    def write(column: int) -> torch.Tensor:
        batch = torch.full((4, 2), 12)  # made-columns
        labels = batch[:, 0]
        batch[:, column] = 11  # wrote-column
        return labels

    assert trace(lambda: write(1)) == [("aten::full", line_of("made-columns"), FIRST_BAD)]
    assert trace(lambda: write(0)) == [("aten::fill_.Tensor", line_of("wrote-column"), None)]


def test_values_of_which_no_single_one_is_bad_are_not_judged_one_by_one() -> None:
    """Too many ones in a mask: who wrote some of them is not blamed, nor who made the rest."""

    def write(is_written: bool) -> torch.Tensor:
        mask = torch.ones(4)  # made-mask
        if is_written:
            mask[2:] = 1
        return mask

    with Recorder() as recorder:
        written, whole = write(True), write(False)
        assert recorder.provenance(written, lambda tensor: False) == ()
        (step,) = recorder.provenance(whole, lambda tensor: False)
    assert (step.source and step.source.line, step.note) == (line_of("made-mask"), None)


def test_the_first_numbers_of_a_layer_are_no_claim() -> None:
    """They are no labels; a plain tensor that is filled with the same numbers is one."""

    def fill(kind: type) -> torch.Tensor:
        values = torch.empty(3) if kind is torch.Tensor else nn.Parameter(torch.empty(3))
        with torch.no_grad():
            values.fill_(12)
        return values

    assert [note for _, _, note in trace(lambda: fill(nn.Parameter))] == [None]
    assert [note for _, _, note in trace(lambda: fill(torch.Tensor))] == [FIRST_BAD]


def test_a_list_of_tensors_that_was_written_to_ends_the_way() -> None:
    """Which of them a fused op changed is not known; a tensor outside the list is not concerned."""

    def write(is_inside: bool) -> torch.Tensor:
        rates, others = torch.full((3,), 12.0), torch.ones(3)
        torch._foreach_add_([rates if is_inside else others], 0.0)
        return rates

    assert trace(lambda: write(True)) == []
    assert [step[2] for step in trace(lambda: write(False))] == [FIRST_BAD]


# --- who wrote over it ---------------------------------------------------------------------------


def modified(run: Callable[[], torch.Tensor]) -> ModifiedTensor | None:
    """What is found about the complaint of a backward pass over what ``run`` returns."""
    with Recorder() as recorder, pytest.raises(RuntimeError, match="inplace") as caught:
        run().sum().backward()
    assert recorder.limits == []
    return recorder.modified_tensor(str(caught.value))


def place(step: ProvenanceStep | None) -> tuple[str | None, int | None]:
    assert step is not None
    assert step.source is not None
    return step.op, step.source.line


def test_the_line_that_modified_a_saved_result_is_named() -> None:
    """With the op that made it, the write, and both versions."""
    x = torch.ones(3, requires_grad=True)

    def run() -> torch.Tensor:
        y = x.exp()  # saved-exp
        y += 1  # write-exp
        return y

    found = modified(run)
    assert found is not None
    assert place(found.made_by) == ("aten::exp", line_of("saved-exp"))
    assert [place(write.step) for write in found.written_by] == [
        ("aten::add_.Tensor", line_of("write-exp"))
    ]
    assert (found.complaint.saved, found.complaint.found) == (0, 1)


@pytest.mark.parametrize("is_read", [False, True])
def test_a_new_parameter_that_nothing_read_is_innocent(is_read: bool) -> None:
    """Its first values are a write too, of the same shape and version; once read, it is another."""

    def run() -> torch.Tensor:
        w = torch.ones(3, requires_grad=True)
        other = torch.empty(3, requires_grad=True)
        z = w * w
        if is_read:
            z = z * other
        with torch.no_grad():
            other.fill_(1)  # first-values
            w += 1  # write-parameter
        return z

    found = modified(run)
    assert (found is None) is is_read
    if found is not None:
        assert [place(item.step)[1] for item in found.written_by] == [line_of("write-parameter")]
        assert found.is_parameter


def test_only_the_writes_between_the_two_versions_are_named() -> None:
    """A write before the tensor was saved is innocent; a reader before the write is listed."""
    x = torch.ones(3, requires_grad=True)

    def run() -> torch.Tensor:
        y = x * 2
        y.add_(1)
        z = y * y  # reads-product
        y.mul_(2)  # write-second
        y.mul_(3)  # write-third
        return z

    found = modified(run)
    assert found is not None
    assert [place(write.step)[1] for write in found.written_by] == [
        line_of("write-second"),
        line_of("write-third"),
    ]
    assert [write.version for write in found.written_by] == [1, 2]
    assert [place(step)[1] for step in found.read_by] == [line_of("reads-product")]


def test_a_saved_input_is_found_behind_the_node_of_the_write() -> None:
    """Autograd names the newest node of an input that it saved: the write's, not the maker's."""
    x = torch.ones(3, requires_grad=True)

    def run() -> torch.Tensor:
        y = x.sigmoid()
        z = y * y
        y += 1  # write-input
        return z

    found = modified(run)
    assert found is not None
    assert [place(write.step)[1] for write in found.written_by] == [line_of("write-input")]


def saved_lines(run: Callable[[], torch.Tensor]) -> list[int]:
    found = modified(run)
    assert found is not None
    return [entry.lineno for entry in found.saved_at]


def test_the_only_call_that_can_have_saved_a_tensor_is_named() -> None:
    """A result by its maker; an input by its reader, also where that one writes elsewhere."""
    x = torch.ones(3, requires_grad=True)

    def result() -> torch.Tensor:
        y = x.exp()  # only-exp
        y += 1
        return y

    def read() -> torch.Tensor:
        y, z = x * 1, x.clone()
        z.mul_(y)  # only-reader
        y += 1
        return z

    def two() -> torch.Tensor:
        y = x * 1
        z = y * y
        w = y * 3
        y += 1
        return z + w

    def before() -> torch.Tensor:
        z = leaf * leaf
        with torch.no_grad():
            leaf.add_(1)
        return z

    def copied() -> torch.Tensor:
        y = x.exp()  # copied-exp
        z = y.clone() + (y > 1)
        y += 1
        return z * 0 + x.exp() * 0 + y.sum()

    leaf = torch.ones(3, requires_grad=True)
    assert saved_lines(copied)[-1:] == [line_of("copied-exp")]
    assert saved_lines(result)[-1:] == [line_of("only-exp")]
    assert saved_lines(read)[-1:] == [line_of("only-reader")]
    assert saved_lines(two) == []
    assert saved_lines(before) == []


def test_a_write_through_a_view_is_a_write_to_the_tensor() -> None:
    """``y[0] = 0`` modifies ``y``."""
    x = torch.ones(3, requires_grad=True)

    def run() -> torch.Tensor:
        y = x.sigmoid()
        y[0] = 0.0  # write-item
        return y

    found = modified(run)
    assert found is not None
    assert [place(write.step)[1] for write in found.written_by] == [line_of("write-item")]


@pytest.mark.parametrize("way", ["one by one", "as a list"])
def test_a_weight_that_an_optimizer_changed(way: str) -> None:
    """A step between forward and backward is named, with CUDA's list of all tensors too."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(layers[1].parameters(), lr=0.1, foreach=way == "as a list")

    def run() -> torch.Tensor:
        loss = layers(torch.ones(2, 3)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()  # write-step
        return loss

    found = modified(run)
    assert found is not None
    assert {place(write.step)[1] for write in found.written_by} == {line_of("write-step")}


def test_the_state_of_an_optimizer_is_in_no_graph() -> None:
    """Of the lists that a step writes to only the parameters are noted, with their versions."""
    weight = nn.Parameter(torch.ones(3))
    state = torch.zeros(3)
    with Recorder() as recorder, torch.no_grad():
        torch._foreach_add_([weight, state], 1)
        torch._foreach_add_([weight, state], 1)
    noted = [call.written for call in recorder._snapshot().calls]
    assert [[(item[0](), item[1]) for item in written] for written in noted] == [
        [(weight, 0)],
        [(weight, 1)],
    ]
    assert weight._version == 2


@pytest.mark.parametrize("kind", ["mask", "index", "scale"])
def test_a_saved_tensor_without_a_node_is_found(kind: str) -> None:
    """Masks, indices and constants have no gradient, so autograd names no node of theirs."""
    x = torch.ones(4, 3, requires_grad=True)

    def run() -> torch.Tensor:
        if kind == "mask":
            saved = torch.rand(4, 3) > 0.5
            saved = saved & saved
            result = torch.where(saved, x, x * 2)
            saved.zero_()  # write-mask
        elif kind == "index":
            saved = torch.arange(4)
            saved = saved % 3
            result = x[saved]
            saved += 1  # write-index
        else:
            saved = torch.rand(4, 3) * 2
            result = x * saved
            saved += 1  # write-scale
        return result

    found = modified(run)
    assert found is not None
    assert [place(write.step)[1] for write in found.written_by] == [line_of(f"write-{kind}")]


def test_two_tensors_that_fit_are_not_told_apart() -> None:
    """With writes on different lines nobody is blamed; on one line that line is."""
    x = torch.ones(3, requires_grad=True)

    def two_lines() -> torch.Tensor:
        y, z = x.exp(), x.exp()
        y += 1
        z += 2
        return y + z

    def one_line() -> torch.Tensor:
        y, z = x.exp(), x.exp()
        _ = y.add_(1), z.add_(1)  # write-both
        return y + z

    assert modified(two_lines) is None
    found = modified(one_line)
    assert found is not None
    assert [place(write.step)[1] for write in found.written_by] == [line_of("write-both")]
    assert found.made_by is None
    assert place(found.written_by[0].step)[0] == "aten::add_.Tensor"

    def two_ops() -> torch.Tensor:
        y, z = x.exp(), x.exp()
        _ = y.add_(1), z.mul_(2)  # write-either
        return y + z

    found = modified(two_ops)
    assert found is not None
    assert [place(write.step) for write in found.written_by] == [(None, line_of("write-either"))]


def test_a_write_before_the_recording_is_not_guessed() -> None:
    """Without the write in the ring nothing is said."""
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y += 1
    with Recorder() as recorder, pytest.raises(RuntimeError, match="inplace") as caught:
        y.sum().backward()
    assert recorder.modified_tensor(str(caught.value)) is None


def test_complaints_are_read() -> None:
    """With and without an origin, on CUDA, of a scalar; another message is none."""
    text = (
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation: [torch.cuda.HalfTensor [3, 4]], which is output 0 of AsStridedBackward0, is at "
        "version 3; expected version 2 instead. Hint: …"
    )
    found = read_complaint(text)
    assert found is not None
    assert (found.shape, found.dtype, found.made_by) == (
        (3, 4),
        torch.float16,
        "AsStridedBackward0",
    )
    assert (found.saved, found.found) == (2, 3)
    leaf = read_complaint(
        "modified by an inplace operation: [torch.FloatTensor []] is at version 1; expected "
        "version 0 instead."
    )
    assert leaf is not None
    assert (leaf.shape, leaf.made_by) == ((), None)
    newer = "modified by an inplace operation: [{} [2]] is at version 1; expected version 0 instead"
    for spelled, dtype in (
        ("CUDABFloat16Type", torch.bfloat16),
        ("CPUBoolType", torch.bool),
        ("CUDAComplexFloatType", torch.complex64),
    ):
        told = read_complaint(newer.format(spelled))
        assert told is not None and told.dtype == dtype
    assert read_complaint("Trying to backward through the graph a second time") is None


@pytest.mark.parametrize(
    ("node", "op", "expected"),
    [
        ("AddmmBackward0", "aten::addmm", True),
        ("AddBackward0", "aten::add_", True),
        ("NllLossBackward0", "aten::nll_loss_forward", True),
        ("LogSoftmaxBackward0", "aten::_log_softmax", True),
        ("Exp", "aten::exp", True),
        ("ExpBackward0", "aten::expand", False),
        ("AddmmBackward0", "aten::addmv", False),
    ],
)
def test_nodes_belong_to_ops_by_name(node: str, op: str, expected: bool) -> None:
    """A node's name is its op's without underscores; a longer name is another op's."""
    assert is_node_of(node, op) is expected


def test_a_write_through_data_is_the_origin() -> None:
    """``t.data`` is a twin of ``t``: what was written through it did not come with ``t``."""
    with Recorder() as recorder:
        labels = torch.tensor([0, 1, 2])
        labels.data.fill_(7)
    steps = recorder.provenance(labels, _beyond_two)
    assert [(step.op, step.note) for step in steps] == [("aten::fill_.Scalar", FIRST_BAD)]


def test_what_came_bad_is_its_own_origin() -> None:
    """The neighbour: nothing was written, so the tensor was made with the bad value."""
    with Recorder() as recorder:
        labels = torch.tensor([0, 1, 7])
        labels.data.sum()
    notes = [step.note for step in recorder.provenance(labels, _beyond_two)]
    assert FIRST_BAD in notes


def _beyond_two(tensor: torch.Tensor) -> bool:
    return bool((tensor > 2).any())


def test_a_shift_is_proven_from_its_result() -> None:
    """``y = y + 1`` leaves no ``y`` of before: it is computed back from what it became."""
    with Recorder() as recorder:
        labels = torch.arange(10)
        labels = labels + 1
        steps = recorder.provenance(labels, is_bad)
    assert [(step.op, step.note) for step in steps] == [("aten::add.Tensor", FIRST_BAD)]


def test_a_shift_of_what_was_bad_before_is_not_blamed() -> None:
    """The neighbour: ten was out of bounds already, and the shift is only a step."""
    with Recorder() as recorder:
        labels = torch.arange(11)
        labels = labels + 1
        steps = recorder.provenance(labels, is_bad)
    assert ("aten::add.Tensor", FIRST_BAD) not in [(step.op, step.note) for step in steps]


def test_a_shift_in_place_is_proven_too() -> None:
    """``ids -= 1`` made the first negative one."""
    with Recorder() as recorder:
        ids = torch.arange(3)
        ids -= 1
        steps = recorder.provenance(ids, is_bad)
    assert (steps[0].op, steps[0].note) == ("aten::sub_.Tensor", FIRST_BAD)
