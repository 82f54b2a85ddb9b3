"""Which sample: batch, row and dataset item behind a bad value."""

from __future__ import annotations

import contextlib
import threading
from collections import UserDict
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

import cudalens
from cudalens.core.graph_types import ProvenanceStep
from cudalens.recorder import Recorder, dataloader
from cudalens.recorder.dataloader import Batch, Batches, dataset_of, describe

BAD = 23


class Samples(Dataset[tuple[torch.Tensor, int]]):
    """Forty samples that know their own index; the label of number 23 is 99."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.read.append(index)
        return torch.tensor([index]), 99 if index == BAD else index % 3


def is_bad(labels: torch.Tensor) -> bool:
    return bool(((labels < 0) | (labels > 2)).any())


def steps_of(recorder: Recorder, labels: torch.Tensor) -> list[Any]:
    bad = ((labels < 0) | (labels > 2)).nonzero().tolist()
    return recorder.provenance(labels, is_bad, [tuple(place) for place in bad]).steps


def test_of_many_batches_the_last_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataloader, "_MAX_BATCHES", 2)
    with Recorder() as recorder:
        batches = [*DataLoader(TensorDataset(torch.ones(3)))]
    assert [it.number for it in recorder.snapshot().batches.living()] == [2, 3]
    assert len(batches) == 3


class Odd(BatchSampler):
    """A batch sampler of the user's own."""

    def __iter__(self) -> Iterator[list[int]]:
        batch = [1, 2]
        yield [BAD, 5]
        yield batch


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for index in range(6):
            yield torch.tensor([index]), 99 if index == 3 else 0


def nested(items: list[Any]) -> dict[str, Any]:
    own, labels = default_collate(items)
    return {"rest": [{"own": own, "labels": labels}]}


def to_batch(steps: Sequence[ProvenanceStep]) -> Sequence[ProvenanceStep]:
    """The steps up to that of the loader: those behind it made the items."""
    return steps[: 1 + next(at for at, step in enumerate(steps) if step.op is None)]


def first_note(samples: Dataset[Any], **options: Any) -> tuple[str | None, int, int, list[int]]:
    """Load until a bad label comes, and ask where it came from.

    Returns:
        the note, the number of the batch, the row of the label, and the labels' own indices.
    """
    train_loader = DataLoader(samples, **options)
    with Recorder() as recorder:
        for number, batch in enumerate(train_loader, 1):
            own, labels = tree_leaves(batch)
            if is_bad(labels):
                moved = labels.to(torch.int32)
                steps = steps_of(recorder, moved.view(-1))
                assert recorder.limits == []
                row = int((labels > 2).nonzero()[0])
                return to_batch(steps)[-1].note, number, row, own.flatten().tolist()
    raise AssertionError


@pytest.mark.parametrize("workers", [0, 1])
def test_sequential_order_is_computed(workers: int) -> None:
    """Batch 6 of 4 begins at item 20; batches of workers were made by no op of this process.

    The names are those of the innermost function: the caller has another one for the samples.
    """
    outer = Samples()
    note, number, row, _ = first_note(outer, batch_size=4, num_workers=workers)
    assert (number, row) == (6, 3)
    assert note == "batch 6 of train_loader, row 3 = samples[23]"
    assert outer.read == ([] if workers else list(range(24)))


class Failing(Samples):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.stack([torch.zeros(2), torch.zeros(3)]), index


@pytest.mark.parametrize("workers", [0, 1])
def test_the_error_of_a_worker_is_as_without_a_recorder(workers: int) -> None:
    """A worker is a fork of this process, and what it raises is the text of a traceback."""
    loader = DataLoader(Failing(), num_workers=workers)
    with pytest.raises(RuntimeError) as plain:
        next(iter(loader))
    with Recorder() as recorder, pytest.raises(RuntimeError) as checked:
        next(iter(loader))
    assert str(checked.value) == str(plain.value)
    assert ("Original Traceback" in str(plain.value)) == bool(workers)
    assert recorder.recorded_ops > 0


class Outside(Samples):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(3)[torch.tensor([index + 3])], index


@pytest.mark.parametrize("options", [{}, {"fast": True}, {"deferred": True}])
def test_the_error_of_a_guarded_op_of_a_worker_is_as_unchecked(options: dict[str, bool]) -> None:
    loader = DataLoader(Outside(), num_workers=1)
    texts = []
    for block in (contextlib.nullcontext(), cudalens.check(**options)):
        with pytest.raises(IndexError) as caught, block:
            next(iter(loader))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert "Original Traceback" in texts[0]


WEIGHTED = WeightedRandomSampler([1.0] * 40, 400)
REPLACING = RandomSampler(range(40), replacement=True, num_samples=400)


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        *((seed, {"batch_size": 7, "shuffle": True}) for seed in range(5)),
        # Workers ask the sampler for batches long before they are given out.
        *((seed, {"batch_size": 4, "shuffle": True, "num_workers": 1}) for seed in range(3)),
        (0, {"batch_size": 4, "sampler": REPLACING}),
        (0, {"batch_size": 4, "sampler": WEIGHTED}),
    ],
)
def test_the_index_of_a_random_order_is_right_and_no_sample_was_read_for_it(
    seed: int, options: dict[str, Any]
) -> None:
    samples = Samples()
    torch.manual_seed(seed)
    note, number, row, own = first_note(samples, **options)
    assert own[row] == BAD
    assert note == f"batch {number} of train_loader, row {row} = samples[23]"
    if "num_workers" not in options:
        size = options["batch_size"]
        assert len(samples.read) == min(size * number, 40 if "shuffle" in options else 400)


def test_an_older_batch_stays_known() -> None:
    samples = Samples()
    loader = DataLoader(samples, batch_size=40, sampler=WeightedRandomSampler([1.0] * 40, 4000))
    with Recorder() as recorder:
        batches = iter(loader)
        own, labels = next(pair for pair in batches if is_bad(pair[1]))
        row = int((labels > 2).nonzero()[0])
        next(batches)
        del batches
        note = to_batch(steps_of(recorder, labels))[-1].note
    assert note.endswith(f"of loader, row {row} = samples[23]")
    assert own[row] == BAD


LOADED: dict[str, tuple[dict[str, Any], str]] = {
    # Of batches that a worker is already asked for, the indices of each are its own.
    "a random order ahead": (
        {"batch_size": 4, "sampler": WEIGHTED, "num_workers": 1},
        "batch {} of train_loader, row {} = samples[23]",
    ),
    "a batch sampler of the user's own": (
        {"batch_sampler": Odd(SequentialSampler(range(40)), 2, False)},
        "batch 1 of train_loader, row 0 = samples[23]",
    ),
    "a stream has batches and rows only": (
        {"samples": Stream(), "batch_size": 2},
        "batch 2 of train_loader, row 1",
    ),
}


@pytest.mark.parametrize(("options", "text"), LOADED.values(), ids=LOADED)
def test_the_item_is_named_where_the_order_is_known(options: dict[str, Any], text: str) -> None:
    note, number, row, _ = first_note(**{"samples": Samples(), **options})
    assert note == text.format(number, row)


def test_no_item_is_named_of_a_batch_that_a_function_of_the_users_made() -> None:
    """It may sort, drop or concatenate; what it did in this process is followed instead."""
    samples = Samples()
    train_loader = DataLoader(samples, batch_size=8, collate_fn=nested)
    with Recorder() as recorder:
        labels = (batch["rest"][0]["labels"] for batch in train_loader)
        steps = steps_of(recorder, next(filter(is_bad, labels)))
    assert [step.note for step in steps][:1] == ["batch 3 of train_loader"]
    assert steps[1].op == "torch.tensor"


def test_a_dead_batch_is_known_through_its_copy() -> None:
    """``labels = labels.to(…)`` lets the loader's own tensor die; row and item are still right."""
    samples = Samples()
    loader = DataLoader(samples, batch_size=8)
    with Recorder() as recorder:
        labels = next(copied for _, y in loader if is_bad(copied := y.clone()))
        steps = to_batch(steps_of(recorder, labels))
    assert [step.op for step in steps] == ["torch.Tensor.clone", None]
    assert steps[-1].note == "batch 3 of loader, row 7 = samples[23]"


def test_a_tensor_of_no_loader_has_no_batch() -> None:
    """Neither a tensor that was made beside the loop nor the labels' neighbour in bounds."""
    loader = DataLoader(Samples(), batch_size=40)
    with Recorder() as recorder:
        ((own, labels),) = loader
        other = torch.full((2,), 99)
        assert is_bad(labels)
        assert [step.note for step in steps_of(recorder, other)] == ["first out of range here"]
        steps = to_batch(recorder.provenance(own, lambda tensor: False).steps)
    assert [step.note for step in steps] == ["batch 1 of loader"]


@pytest.mark.parametrize(("value", "op"), [(77, "torch.Tensor.__setitem__"), (1, None)])
def test_what_was_written_into_a_batch_did_not_come_with_it(value: int, op: str | None) -> None:
    """A bad label that the user wrote is his; with a good one the bad ones are the loader's."""
    loader = DataLoader(Samples(), batch_size=40)
    with Recorder() as recorder:
        ((_, labels),) = loader
        labels[0] = value
        steps = to_batch(steps_of(recorder, labels))
    of_loader = (None, "batch 1 of loader, row 23 (dataset item 23)")
    assert [(step.op, step.note) for step in steps] == [(op, "it writes 77")] * bool(op) + [
        of_loader
    ]


@pytest.mark.parametrize(
    ("part", "is_row_known"),
    [
        (lambda pairs: pairs[:, 1], True),
        (lambda pairs: pairs[:, 1:], True),
        (lambda pairs: pairs[..., 1], True),
        (lambda pairs: pairs.t(), True),
        (lambda pairs: pairs[20:], True),
        (lambda pairs: pairs[:, 1:].clone(), True),  # of a view that is gone
        (lambda pairs: pairs[20:].clone(), False),
        (lambda pairs: pairs.as_strided((40,), (1,), 10).clone(), False),
        (lambda pairs: pairs[:, None].expand(40, 40, 2)[23], False),  # as long by chance
    ],
)
def test_the_row_of_a_column_is_that_of_the_batch(part: Any, is_row_known: bool) -> None:
    pairs = torch.zeros(40, 2, dtype=torch.int64)
    pairs[23, 1] = 99
    with Recorder() as recorder:
        ((batch,),) = DataLoader(TensorDataset(pairs), batch_size=40)
        bad = part(batch)
        positions = [tuple(place) for place in (bad == 99).nonzero().tolist()]
        note = to_batch(recorder.provenance(bad, is_bad, positions).steps)[-1].note
    assert (", row 23 " in note) is (", row " in note) is is_row_known


def test_loading_is_what_it_is_without() -> None:
    def epoch() -> list[list[int]]:
        torch.manual_seed(5)
        return [own.flatten().tolist() for own, _ in DataLoader(Samples(), 7, shuffle=True)]

    plain = epoch()
    with Recorder() as recorder:
        assert epoch() == plain
    assert recorder.limits == []


def test_a_batch_is_named_by_the_loader_that_its_sampler_and_dataset_belong_to() -> None:
    others = Samples()
    _data = data = Samples()  # as IPython's ``_`` is what a cell ended in
    other = DataLoader(others, batch_size=4)
    _ = loader = DataLoader(data, batch_size=4)
    iterator: Any = iter(loader)
    batches = Batches()
    batches.note_indices(iterator, [0, 1])
    batches.note(iterator, [labels := torch.ones(2)], 3)
    batch = batches.find(ref(labels))
    assert batch is not None
    assert batch.number == 0
    text = describe(batch, None, None)
    assert text == f"batch {batch.number} of loader"
    assert describe(batch, 1, None) == f"{text}, row 1"
    assert describe(batch, 1, 7) == f"{text}, row 1 = data[7]"
    assert describe(batch, None, 7) == f"{text}, data[7]"
    assert dataset_of(batch)[1] == "data"
    del loader
    assert describe(batch, None, None) == f"batch {batch.number} of a DataLoader"
    del data
    assert describe(batch, 1, 7) == "batch 0 of a DataLoader, row 1 (dataset item 7)"
    assert other.dataset is others
    assert _data is _.dataset


def test_a_loader_has_the_name_that_the_thread_at_fault_calls_it_by() -> None:
    their_name = DataLoader(Samples(), batch_size=4)
    said: list[str] = []

    def train(train_loader: DataLoader[Any]) -> None:
        iterator: Any = iter(train_loader)
        batches = Batches()
        batches.note(iterator, [labels := torch.ones(2)], 1)
        batch = batches.find(ref(labels))
        assert batch is not None
        said.append(describe(batch, None, None))

    worker = threading.Thread(target=train, args=(their_name,))
    worker.start()
    worker.join()
    assert said == ["batch 0 of train_loader"]


# --- what is noted of a batch --------------------------------------------------------------------


class Loading:
    """What a loader's iterator has for the notes."""

    def __init__(self, **more: Any) -> None:
        self._dataset_kind = 0
        self._num_yielded = 0
        self._dataset, self._index_sampler = Samples(), Samples()
        self._collate_fn: Any = default_collate
        vars(self).update(more)


def batch_of(data: Any, indices: Any = None, **more: Any) -> Batch:
    """Return what is noted of the first batch that an iterator gives out."""
    iterator, batches, seen = Loading(**more), Batches(), torch.ones(1)
    batches.note_indices(iterator, indices)
    iterator._num_yielded = getattr(iterator, "_send_idx", 0) + 1
    batches.note(iterator, [data, seen], 1)
    batch = batches.find(ref(seen))
    assert batch is not None
    batches.note(iterator, [again := torch.ones(1)], 2)
    next_batch = batches.find(ref(again))
    assert next_batch is not None and next_batch.indices is None
    return batch


@pytest.mark.parametrize(
    ("more", "indices", "is_known"),
    [
        ({}, [3, 4], True),
        ({"_send_idx": 5, "_in_order": True}, [3, 4], True),
        ({"_in_order": False}, [3, 4], False),
        ({"_dataset_kind": 1}, [3, 4], False),
        ({}, (3, 4), False),
    ],
)
def test_the_indices_of_a_batch_are_known_where_its_order_is(
    more: dict[str, Any], indices: Any, is_known: bool
) -> None:
    assert batch_of(None, indices, **more).indices == ([3, 4] if is_known else None)


def collator(name: str, module: str = "transformers.data.data_collator") -> Any:
    return type(name, (), {"__module__": module, "__call__": lambda self, items: items})


def of_transformers(items: Any) -> Any:
    return items


of_transformers.__module__ = "transformers.data.data_collator"


@pytest.mark.parametrize(
    ("collate", "is_stacked"),
    [
        (default_collate, True),
        (default_convert, True),
        (collator("DataCollatorWithPadding")(), True),
        (of_transformers, True),
        (collator("DataCollatorWithFlattening")(), False),
        (collator("DataCollatorWithPadding", "my_module")(), False),
        (nested, False),
    ],
)
def test_the_rows_are_the_items_in_batches_of_known_makers_alone(
    collate: Any, is_stacked: bool
) -> None:
    assert batch_of(None, _collate_fn=collate).is_stacked is is_stacked


@pytest.mark.parametrize(("more", "is_here"), [({}, True), ({"_num_workers": 1}, False)])
def test_a_batch_of_a_worker_was_not_made_here(more: dict[str, Any], is_here: bool) -> None:
    assert batch_of(None, **more).is_collated_here is is_here


X, ROWS = torch.ones(3), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("data", "noted"),
    [
        (X, {(None, 1)}),
        ([X, ROWS], {(0, 1), (1, 2)}),
        ((X, "text", 3, [ROWS]), {(0, 1), (3, 2)}),
        ({"x": X, "rest": {"y": ROWS}}, {("x", 1), ("rest", 2)}),
        (UserDict({"x": X, "y": ROWS}), {("x", 1), ("y", 2)}),  # as transformers' BatchEncoding
        (SimpleNamespace(data=[X]), set()),
        ([[[[X]]]], {(0, 1)}),
        ([[[[[X]]]]], set()),
        ([X] * 65, {(at, 1) for at in range(64)}),
    ],
)
def test_each_tensor_of_a_batch_has_its_key_and_rank(data: Any, noted: set[Any]) -> None:
    batches = Batches()
    batches.note(Loading(), data, 1)
    batches.follow([batch_of(None)])
    found = [it for it in batches.living() if it.tensors]
    assert {pair for it in found for pair in zip(it.keys, it.ranks, strict=True)} == noted


def test_no_more_than_64_tensors_of_a_batch_are_noted() -> None:
    batches, seen = Batches(), torch.ones(1)
    batches.note(Loading(), {key: torch.ones(1) for key in range(64)} | {64: seen}, 1)
    batch = batches.find(ref(seen))
    assert batch is not None
    assert len(batch.tensors) == 64


def test_a_batch_is_known_while_a_tensor_of_it_lives() -> None:
    first, second, dead = (torch.ones(1) for _ in range(3))
    earlier, later = Batches(), Batches()
    for seq, data in enumerate(([first, dead], [second], [torch.ones(1)]), 1):
        earlier.note(Loading(), data, seq)
    del dead, data
    assert [it.seq for it in earlier.living()] == [1, 2]
    later.follow(earlier.living())
    found = [later.find(ref(it)) for it in (first, second)]
    assert [it and (it.seq, it.tensors[it.at]()) for it in found] == [(1, first), (2, second)]
    later.note(Loading(), [first], 4)  # the same tensor again
    assert [it and it.seq for it in (later.find(ref(first)), earlier.find(ref(first)))] == [4, 1]
    later.clear()
    assert later.living() == []


def test_a_list_is_a_dataset_while_the_loop_runs() -> None:
    """It has no weak reference."""
    items = [1, 2]
    running = [Loading(_dataset=items)]
    batches = Batches()
    batches.note(running[0], [X], 1)
    batch = batches.find(ref(X))
    assert batch is not None
    assert dataset_of(batch) == (items, "items")
    assert describe(batch, 1, 0) == "batch 0 of a DataLoader, row 1 = items[0]"
    running.clear()
    assert dataset_of(batch) == (None, None)
    assert describe(batch, 1, 0) == "batch 0 of a DataLoader, row 1 (dataset item 0)"
