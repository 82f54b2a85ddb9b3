"""Lineage: where bad values came from, and who wrote over a tensor that autograd had saved."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cudalens.core.graph_types import FIRST_BAD
from cudalens.recorder import Recorder
from cudalens.recorder.places import joined_at
from cudalens.recorder.saved_tensor import find_modified
from tests.probes import cell


def is_bad(tensor: torch.Tensor) -> bool:
    """Ten classes: 0 … 9."""
    return bool(((tensor < 0) | (tensor > 9)).any())


def call(body: str, use: Callable[[Callable[[], Any]], Any], **more: Any) -> Any:
    """Let ``use`` call a function of a cell; the first line of its body is line 2."""
    kept: list[torch.Tensor] = []
    names = {
        "torch": torch,
        "nn": nn,
        "raw": torch.arange(10),
        "eleven": torch.arange(11),
        "twenty": torch.arange(20),
        "digits": torch.arange(20) % 10,
        "chosen": torch.tensor([3, 4]),
        "scores": torch.linspace(-50, 50, 12),
        "seventh": torch.arange(40) == 7,
        "good": torch.tensor([4, 5]),
        "worse": torch.tensor([4, 12]),
        "x": torch.ones(3, requires_grad=True),
        "x43": torch.ones(4, 3, requires_grad=True),
        "keep": lambda tensor: kept.append(tensor) or tensor,
        **more,
    }
    with cell(f"def run():\n{textwrap.indent(body, '    ')}") as code:
        exec(code, names)
        return use(names["run"])


Step = tuple[str, int, str | None]


def positions(tensor: torch.Tensor, is_wanted: Callable[[torch.Tensor], bool]) -> list[Any]:
    places = torch.ones_like(tensor).nonzero().tolist()
    return [tuple(place) for place in places if is_wanted(tensor.detach()[tuple(place)])]


def trace(body: str, is_wanted: Callable[[torch.Tensor], bool] = is_bad) -> list[Step]:
    """Op, line of the body and note of each step behind the tensor that a body returns."""

    def follow(run: Callable[[], torch.Tensor]) -> list[Step]:
        with Recorder() as recorder:
            made = run()
            wanted = positions(made, is_wanted)
            before = recorder.recorded_ops
            steps = recorder.provenance(made, is_wanted, wanted).steps
            assert recorder.recorded_ops == before  # what follows the way is not recorded
        assert recorder.limits == []
        return [(str(s.op).rpartition(".")[2], s.source.line - 1, s.note) for s in steps]

    return call(body, follow)


# --- the way of bad values -----------------------------------------------------------------------

WRITTEN = "labels = torch.full((40,), 5)\n{}\nlabels[30:] = 3\nreturn labels"
WAYS = {
    "the first result beyond the bound is named, and what came before is not blamed": (
        "shifted = keep(raw + 1)\nreturn shifted * 2",
        [("mul", 2, None), ("add", 1, FIRST_BAD)],
    ),
    "with the input alive the op is the first": ("return raw * 2", [("mul", 1, FIRST_BAD)]),
    "with the input gone nothing is claimed": (
        "return (raw * 1) * 2",
        [("mul", 1, None), ("mul", 1, None)],
    ),
    "an input that a recorded call has mended since is no proof": (
        "copied = eleven * 1\neleven.clamp_(0, 9)\nreturn copied",
        [("mul", 1, None)],
    ),
    "views are followed and are no steps": (
        "return (raw + 1).view(2, 5).t()[1:].unsqueeze(0)",
        [("add", 1, FIRST_BAD)],
    ),
    "values that are drawn are the op's own": (
        "return torch.full((3,), 12)",
        [("full", 1, FIRST_BAD)],
    ),
    "values that are typed are the op's own, also where data is read later": (
        "made = torch.tensor([1, 12])\nmade.data.sum()\nreturn made",
        [("tensor", 1, FIRST_BAD)],
    ),
    "the range of scores is no cause of integers out of them": (
        "return scores.argmax()",
        [("argmax", 1, FIRST_BAD)],
    ),
    "an index beyond the bound passes no values on": (
        "found = digits[twenty[-4:]]\nreturn found * 2",
        [("mul", 2, None), ("__getitem__", 1, None)],
    ),
    "of a bad table nobody knows who made it, and the index is as bad and no cause": (
        "return twenty[twenty[-4:]]",
        [("__getitem__", 1, None)],
    ),
    "what a tensor held before a write in place is not known": (
        "raw.mul_(2)\nreturn raw",
        [("mul_", 1, None)],
    ),
    "one number is spread over all": (
        "one = keep(torch.tensor(12))\nreturn torch.zeros(3, dtype=torch.int64) + one",
        [("add", 2, None), ("tensor", 1, FIRST_BAD)],
    ),
    "a mask that is gone": (
        "labels = torch.full((4,), 12)\nreturn labels[labels > 3]",
        [("__getitem__", 2, None), ("full", 1, None)],
    ),
    "rows that one line of Python's gave, gone by now": (
        "return nn.utils.rnn.pad_sequence([torch.tensor([1, n]) for n in (2, 12)]).clone()",
        [("clone", 1, None), ("pad_sequence", 1, None), ("tensor", 1, None)],
    ),
    "of rows that one line computed, gone by now, it is not known whose are bad": (
        "return nn.utils.rnn.pad_sequence([good - 1, good - 9]).clone()",
        [("clone", 1, None), ("pad_sequence", 1, None)],
    ),
    "the part that one line computed at the place of the bad values, gone by now": (
        "return torch.cat([good - 1, good - 9])",
        [("cat", 1, None), ("sub", 1, FIRST_BAD)],
    ),
    "of rows of two lines it is not known whose are bad": (
        "first = lambda: torch.tensor([1, 2])\nother = lambda: torch.tensor([1, 12])\n"
        "return torch.stack([first(), other()])",
        [("stack", 3, None)],
    ),
    "what no recorded op made": ("return eleven.contiguous()", []),
    "elements that nobody knows any more can be the bad ones": (
        "labels = torch.full((40,), 5)\nlabels[:2] = 12\n"
        "labels[torch.tensor([38, 39])] = torch.tensor([1, 2]) * 1\nreturn labels",
        [],
    ),
    "a bad number that an unknown mask writes is told, and that it arrived is not claimed": (
        "labels = torch.arange(12)\nlabels[labels == 0] = 12\nreturn labels",
        [("__setitem__", 2, "it writes 12"), ("arange", 1, FIRST_BAD)],
    ),
    "a good number that an unknown mask writes": (
        "labels = torch.arange(12)\nlabels[labels == 0] = 2\nreturn labels",
        [("arange", 1, FIRST_BAD)],
    ),
    "good values that are added may make bad ones": (
        "labels = torch.full((4,), 12)\n"
        "labels.index_put_((torch.tensor([0, 1, 2, 3]),), good[:1], True)\n"
        "labels.clamp_(12, 12)\nreturn labels",
        [("clamp_", 3, None)],
    ),
    "a write beside a view is none to the view": (
        "batch = torch.full((4, 2), 12)\nlabels = batch[:, 0]\nbatch[:, 1] = 11\nreturn labels",
        [("full", 1, FIRST_BAD)],
    ),
    "a write to what a view shows": (
        "batch = torch.full((4, 2), 12)\nlabels = batch[:, 0]\nbatch[:, 0] = 11\nreturn labels",
        [("__setitem__", 3, "it writes 11")],
    ),
    "a tensor that is filled": (
        "made = torch.empty(3)\nwith torch.no_grad(): made.fill_(12)\nreturn made",
        [("fill_", 2, FIRST_BAD)],
    ),
    "a fused function changed it": (
        "rates = torch.full((3,), 12.0)\ntorch._foreach_add_([rates], 0.0)\nreturn rates",
        [("_foreach_add_", 2, None), ("full", 1, None)],
    ),
    "which of a list a fused function changed is not known": (
        "rates = torch.full((3,), 12.0)\n"
        "torch._foreach_add_([rates, torch.ones(3)], 0.0)\nreturn rates",
        [],
    ),
    "a tensor outside the list is not concerned": (
        "rates = torch.full((3,), 12.0)\ntorch._foreach_add_([torch.ones(3)], 0.0)\nreturn rates",
        [("full", 1, FIRST_BAD)],
    ),
    "what was written to the data": (
        "labels = torch.tensor([0, 1, 2])\nlabels.data.fill_(12)\nreturn labels",
        [("fill_", 2, FIRST_BAD)],
    ),
    "of what was written through a view of all elements nothing is claimed": (
        "labels = torch.tensor([0, 1, 2])\nlabels.view(3).fill_(12)\nreturn labels",
        [],
    ),
    "values from before a shift are gone": (
        "labels = torch.arange(10)\nlabels = labels + 1\nreturn labels",
        [("add", 2, None), ("arange", 1, None)],
    ),
    # One of the values that are written is bad; good ones are written afterwards.
    "bad values at new indices": (
        WRITTEN.format("labels[chosen] = worse"),
        [("__setitem__", 2, None)],
    ),
    "a bad number at a mask that is kept": (
        WRITTEN.format("labels.masked_fill_(seventh, 12)"),
        [("masked_fill_", 2, "it writes 12")],
    ),
    "bad values of a living tensor": (
        WRITTEN.format("labels.scatter_(0, chosen, worse)"),
        [("scatter_", 2, None)],
    ),
    "bad values in a view": (
        WRITTEN.format("labels[2:4] = worse"),
        [("__setitem__", 2, None)],
    ),
    "bad values through data": (
        WRITTEN.format("labels.data[0] = 12"),
        [("__setitem__", 2, "it writes 12")],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_way_of_bad_values(way: str) -> None:
    body, steps = WAYS[way]
    assert trace(body) == steps


CLASSES = "mask = torch.arange(36).reshape(6, 6) % 5\n"
BATCH = "batch = torch.zeros(2, 6).long()\n"
WRITERS = {
    "each element by its own line": (
        "labels = torch.arange(6)\nlabels[1] = 10\nlabels[4] = 20\nreturn labels",
        [(3, "it writes 20", 1), (2, "it writes 10", 1)],
    ),
    "one number by two lines, the later one over the earlier": (
        f"{CLASSES}mask[:2] = 255\nmask[:, :2] = 255\nreturn mask.clone()",
        [(4, None, None), (3, "it writes 255", 12), (2, "it writes 255", 8)],
    ),
    "what a later line wrote over is nobody's": (
        "labels = torch.arange(6)\nlabels[1] = 10\nlabels[1:5] = 20\nreturn labels",
        [(3, "it writes 20", 4)],
    ),
    "the rest was there before": (
        "labels = torch.arange(12)\nlabels[1] = 10\nreturn labels",
        [(2, "it writes 10", 1), (1, FIRST_BAD, 2)],
    ),
    "a copy from another tensor, which is gone": (
        "labels = torch.tensor([1, 12, 2])\nids = torch.zeros_like(labels)\n"
        "ids[1:] = labels[:-1].clone()\nids.masked_fill_(ids == -100, 0)\nreturn ids",
        [(3, None, 1), (3, None, None), (1, FIRST_BAD, None)],
    ),
    "one number by two views": (
        f"{BATCH}batch[0][1:3] = 12\nbatch.T[5] = 12\nreturn batch",
        [(3, "it writes 12", 2), (2, "it writes 12", 2)],
    ),
    "what a later write to a view hides": (
        f"{BATCH}batch[0][1:3] = 12\nbatch[:, 1:][0] = 13\nreturn batch",
        [(3, "it writes 13", 5)],
    ),
    "views at masks that are gone: where is not known, but not beside the view": (
        f"{BATCH}batch[0][1:3] = 12\nbatch[1][batch[1] == 0] = 12\nreturn batch",
        [(3, "it writes 12", None), (2, "it writes 12", None)],
    ),
    "a mask that is gone in a view without that number": (
        f"{BATCH}batch[0][1:3] = 12\nbatch[1][batch[1] == 7] = 12\nreturn batch",
        [(2, "it writes 12", 2)],
    ),
    "a mask that is gone in a view with another number": (
        f"{BATCH}batch[0][1:3] = 12\nbatch[1][:2] = 13\nbatch[1][batch[1] == 7] = 12\nreturn batch",
        [(3, "it writes 13", 2), (2, "it writes 12", 2)],
    ),
    "a view through another dtype has other places": (
        f"{BATCH}batch.view(torch.float64)[0] = 1.0\nreturn batch",
        [],
    ),
    "the part of a choice that nothing replaced": (
        "ids = torch.tensor([1, 12, -100])\nids = torch.where(ids == -100, 0, ids)\n"
        "ids = ids.masked_fill(ids == -1, 3)\nreturn ids",
        [(1, FIRST_BAD, 1)],
    ),
    "the number that a choice puts in is its own": (
        "ids = torch.tensor([1, 2, -100])\nids = torch.where(ids == -100, 12, ids)\nreturn ids",
        [(2, None, None), (1, None, None)],
    ),
}


@pytest.mark.parametrize("how", WRITERS)
def test_every_line_that_wrote_bad_values_is_named_with_how_many(how: str) -> None:
    body, wanted = WRITERS[how]

    def follow(run: Callable[[], torch.Tensor]) -> Any:
        with Recorder() as recorder:
            made = run()
            mask = (made < 0) | (made > 9)
            places = [tuple(place) for place in mask.nonzero().tolist()]
            return recorder.provenance(made, is_bad, places, mask).steps

    assert [(it.source.line - 1, it.note, it.count) for it in call(body, follow)] == wanted


GOOD_WRITES = [
    "labels[torch.tensor([3, 4])] = good",
    "labels[labels == 7] = 2",
    "labels.scatter_(0, chosen, good)",
    "labels[2:4] = good",
    "labels.data[0] = 3",
    "for at in range(30): labels[at] = at % 10",
]


@pytest.mark.parametrize("write", GOOD_WRITES)
@pytest.mark.parametrize("inference", [False, True])
def test_a_write_of_good_values_is_passed_over(write: str, inference: bool) -> None:
    """The values were bad from the beginning: the line that made them is named, and no other."""
    labels = "labels = torch.full((40,), 12)"
    body = f"with torch.inference_mode({inference}):\n    {labels}\n    {write}\nreturn labels"
    assert trace(body) == [("full", 2, FIRST_BAD)]


def test_a_step_has_the_text_of_its_own_line() -> None:
    """Of a statement over several lines the one that made the values, not the first."""

    def steps(run: Callable[[], torch.Tensor]) -> Any:
        with Recorder() as recorder:
            return recorder.provenance(run(), is_bad).steps

    (step,) = call("made = (\n    torch.full((3,), 12)\n    .view(3)\n)\nreturn made", steps)
    assert (step.source.line - 1, step.source.text) == (2, "torch.full((3,), 12)")


@pytest.mark.parametrize(("write", "steps"), [("mask[2:] = 1", []), ("", [("ones", 1, None)])])
def test_values_of_which_no_single_one_is_bad_are_not_judged_one_by_one(
    write: str, steps: list[Step]
) -> None:
    """Too many ones in a mask: who wrote some of them is not blamed, nor who made the rest."""
    body = f"mask = torch.ones(4)\n{write}\nreturn mask"
    assert trace(body, lambda tensor: False) == steps


# --- who wrote over it ---------------------------------------------------------------------------


def modified(body: str, **names: Any) -> Any:
    """What is found about the complaint of a backward pass over what a body returns."""

    def complain(run: Callable[[], torch.Tensor]) -> Any:
        with Recorder() as recorder, pytest.raises(RuntimeError, match="inplace") as caught:
            run().sum().backward()
        assert recorder.limits == []
        call = recorder.call_of(caught.value)
        change = find_modified(recorder.snapshot(), str(caught.value), call and call.node)
        return None if change is None else change[0]

    return call(body, complain, **names)


def place(step: Any) -> tuple[str | None, int]:
    return step.op, step.source.line - 1


def test_the_writer_of_a_saved_tensor_is_named() -> None:
    found = modified("y = x.exp()\nz = y * y\ny += 1\nreturn z")
    assert place(found.modified) == ("torch.Tensor.add_", 3)


@pytest.mark.parametrize(("is_read", "line"), [(False, 6), (True, 5)])
def test_of_tensors_that_fit_the_one_that_the_failing_node_saved_is_named(
    is_read: bool, line: int
) -> None:
    """The first values of a new parameter are a write too, of the same shape and version."""
    found = modified(
        "w = torch.ones(3, requires_grad=True)\n"
        "other = torch.empty(3, requires_grad=True)\n"
        f"z = w * w{' * other' if is_read else ''}\n"
        "with torch.no_grad():\n    other.fill_(1)\n    w += 1\nreturn z"
    )
    assert place(found.modified)[1] == line
    assert found.is_parameter


WRITES = {
    "a saved result": ("y = x.exp()\nNone\ny += 1\nreturn y", 3),
    "a write before the tensor was saved is innocent": (
        "y = x * 2\ny.add_(1)\nz = y * y\ny.mul_(2)\ny.mul_(3)\nreturn z",
        5,
    ),
    "a saved input: autograd names the newest node, the write's and not the maker's": (
        "y = x.sigmoid()\nz = y * y\ny += 1\nreturn z",
        3,
    ),
    "through a view": ("y = x.sigmoid()\nNone\ny[0] = 0.0\nreturn y", 3),
    # Masks, indices and constants have no gradient, so autograd names no node of theirs.
    "a mask": (
        "saved = torch.rand(4, 3) > 0.5; saved = saved & saved\n"
        "result = torch.where(saved, x43, x43 * 2)\nsaved.zero_()\nreturn result",
        3,
    ),
    "an index": (
        "saved = torch.arange(4); saved = saved % 3\nresult = x43[saved]\n"
        "saved += 1\nreturn result",
        3,
    ),
    "a scale": (
        "saved = torch.rand(4, 3) * 2\nresult = x43 * saved\nsaved += 1\nreturn result",
        3,
    ),
}


@pytest.mark.parametrize("how", WRITES)
def test_the_write_to_the_found_version_is_named(how: str) -> None:
    body, line = WRITES[how]
    assert place(modified(body).modified)[1] == line


SAVED_AT = {
    "a copy that went on and the maker": (
        "y = x.exp()\nz = y.clone() + (y > 1)\ny += 1\nreturn z * 0 + x.exp() * 0 + y.sum()",
        [1],
    ),
    "a result by its maker": ("y = x.exp()\ny += 1\nreturn y", [1]),
    "an input by its reader, also where that one writes elsewhere": (
        "y, z = x * 1, x.clone()\nz.mul_(y)\ny += 1\nreturn z",
        [2],
    ),
    "of two readers the one that saved": (
        "y = x * 1\nz = y * y\nw = y * 3\ny += 1\nreturn z + w",
        [2],
    ),
    "a leaf from before": ("z = x * x\nwith torch.no_grad(): x.add_(1)\nreturn z", [1]),
}


@pytest.mark.parametrize("how", SAVED_AT)
def test_the_call_that_saved_a_tensor_is_named(how: str) -> None:
    body, lines = SAVED_AT[how]
    savers = modified(body).savers
    assert [step.source.line - 1 for step in savers] == lines


@pytest.mark.parametrize("way", ["one by one", "as a list"])
def test_a_weight_that_an_optimizer_changed(way: str) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(layers[1].parameters(), lr=0.1, foreach=way == "as a list")

    body = (
        "loss = layers(rows).sum()\nloss.backward(retain_graph=True)\noptimizer.step()\nreturn loss"
    )
    found = modified(body, layers=layers, optimizer=optimizer, rows=torch.ones(2, 3))
    assert place(found.modified)[1] == 3


@pytest.mark.parametrize("order", [("y", "z"), ("z", "y")])
def test_of_two_tensors_alike_the_failing_node_tells_which(order: tuple[str, str]) -> None:
    """Autograd runs the newest node first."""
    older, newer = order
    found = modified(f"{older} = x.exp()\n{newer} = x.exp()\ny += 1\nz += 2\nreturn y + z")
    assert place(found.modified)[1] == (3 if newer == "y" else 4)


def test_a_write_before_the_recording_is_not_guessed() -> None:
    y = torch.ones(3, requires_grad=True).exp()
    y += 1
    assert modified("return y", y=y) is None


# --- another element of the same tensor is not to blame -------------------------------------------


MARKED = "raw = keep(torch.tensor([255, 3, 9]))\nshifted = keep(raw + 1)\nreturn {}"
LOOKED_UP = (
    "table = keep(torch.tensor([12, 1, 2]))\nmore = keep(table * 1)\nmore[1:2] = 11\n"
    "return more[torch.tensor([2, {}])]"
)
COLUMNS = (
    "pairs = keep(torch.tensor([[3, 99], [6, 1]]))\ndoubled = keep(pairs * 2)\nreturn doubled[:, 0]"
)
JOINED = (
    "left = keep(torch.tensor([12, 3]))\nright = keep(torch.tensor([{}, 4]))\n"
    "return torch.cat([left, right])[2:]"
)
SHARED = (
    "left = keep(torch.tensor([12, 3]))\nright = keep(torch.tensor([12, 11]))\n"
    "return torch.cat([left, right])[[0, 3]]"
)
ADDED = (
    "left = keep(torch.tensor([12, 3]))\nright = keep(torch.tensor([11, 4]))\nreturn left + right"
)
OVERWRITTEN = (
    "labels = torch.tensor([1, 2, 12])\n"
    "labels.scatter_(0, keep(torch.tensor([0, 1])), torch.tensor([12, 3]))\n"
    "labels[0:1] = {}"
)
BLAMED = {
    "another element was bad before, and was mended": (
        MARKED.format("torch.where(shifted == 256, 0, shifted)"), [2]),
    "the same element was bad before": (MARKED.format("shifted"), [1]),
    "a look-up loses the place, and who is to blame": (LOOKED_UP.format(0), []),
    "a column keeps the place, and another column was bad before": (COLUMNS, [2]),
    "a concatenation tells by the value": (JOINED.format(11), [2]),
    "of two bad inputs that share a value none is chosen": (SHARED, []),
    "of two equal bad inputs the one at the place": (JOINED.format(12), [2]),
    "of two bad inputs that are both shown each": (JOINED.format(12).removesuffix("[2:]"), [1, 2]),
    "of two bad terms none is chosen": (ADDED, []),
    "what a dead tensor wrote is not known": (OVERWRITTEN.format("5\nreturn labels"), []),
}  # fmt: skip


@pytest.mark.parametrize(("body", "lines"), BLAMED.values(), ids=BLAMED.keys())
def test_a_line_is_blamed_for_the_bad_elements_alone(body: str, lines: list[int]) -> None:
    assert [line for _, line, note in trace(body) if note == FIRST_BAD] == lines


@pytest.mark.parametrize(
    ("body", "line"), [(LOOKED_UP.format(1), 3), (OVERWRITTEN.format("11\nreturn labels[:1]"), 3)]
)
def test_the_way_ends_at_the_write_of_the_bad_element(body: str, line: int) -> None:
    assert trace(body)[-1][1] == line


@pytest.mark.parametrize(
    ("stem", "shape", "parts", "place", "expected"),
    [
        ("stack", (3, 2), [(2,)] * 3, (1, 0), (1, (0,))),
        ("stack", (2, 3), [(2,)] * 3, (1, 0), (0, (1,))),
        ("stack", (2, 2), [(2,)] * 2, (1, 0), None),  # in either dimension
        ("cat", (5,), [(2,), (3,)], (1,), (0, (1,))),
        ("cat", (5,), [(2,), (3,)], (2,), (1, (0,))),
        ("cat", (2, 5), [(2, 2), (2, 3)], (1, 4), (1, (1, 2))),
        ("cat", (2, 2), [(2, 2)], (1, 1), None),
        ("add", (2,), [(2,), (2,)], (1,), None),
        ("cat", (2, 5), [(2, 2), (2, 3)], (1,), None),  # a row, where the rows were joined
        ("cat", (5, 2), [(2, 2), (3, 2)], (3,), (1, (1,))),
    ],
)
def test_the_input_that_an_element_was_joined_from(
    stem: str, shape: Any, parts: Any, place: Any, expected: Any
) -> None:
    """Its number and the place in it, where the sizes fit one dimension alone."""
    assert joined_at(stem, shape, parts, [place]) == (None if expected is None else [expected])


def test_a_dead_view_that_was_written_to_hands_on() -> None:
    """A reference to a tensor that is gone has no hash."""
    with Recorder() as recorder:
        whole = torch.zeros(4)
        whole[:2].add_(1)
        del whole
        assert recorder.handed_on().calls == []
