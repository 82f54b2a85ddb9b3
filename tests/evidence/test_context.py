"""What the variables around a call tell: tables of positions, kinds of labels, rank, device."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cudalens.evidence import context
from cudalens.source.locate import CallSite
from tests.probes import asked


class Embeddings(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("position_ids", torch.arange(rows)[None])


def entry(library: str = "transformers.models.bert", **names: Any) -> Any:
    """Return an entry whose frame has these variables, in a module of a library."""
    frame = SimpleNamespace(f_locals=names, f_globals={"__name__": library})
    return SimpleNamespace(tb_frame=frame)


def table(tokens: int, *, own: bool = False, **more: Any) -> Any:
    module = Embeddings(4)
    names = {
        "self": module,
        "position_ids": module.position_ids,
        "input_ids": torch.ones(2, tokens),
    }
    if own:
        names["position_ids"] = torch.arange(4)[None]
    return context.table_of_positions([entry(**{**names, **more})])


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of a frame is said by its globals."""
    monkeypatch.setattr(
        context, "package_of", lambda frame: frame.f_globals["__name__"].partition(".")[0]
    )


def test_an_input_that_is_longer_than_the_table() -> None:
    found = table(5)
    assert (found.input, found.rows, found.tokens) == ("input_ids", 4, 5)
    assert table(4) is None


def test_positions_of_the_users_are_no_table() -> None:
    assert table(5, own=True) is None
    assert table(5, position_ids=None) is None
    assert table(5, input_ids=None) is None
    assert table(5, input_ids=[1] * 5) is None
    assert table(5, input_ids=torch.ones(5)) is None
    assert context.table_of_positions([]) is None
    module = Embeddings(4)
    names = {"self": module, "position_ids": module.position_ids, "input_ids": torch.ones(2, 5)}
    ours, mine = entry(**names), entry("mine", **names)
    assert context.table_of_positions([mine, ours])
    assert context.table_of_positions([ours, mine]) is None
    first = {"position_ids": module.position_ids[:, :3]}
    assert context.table_of_positions([entry(**{**names, **first})]) is None


def test_a_table_in_one_row_and_an_input_of_vectors() -> None:
    found = table(5, input_ids=None, inputs_embeds=torch.ones(2, 5, 8))
    assert (found.input, found.rows, found.tokens) == ("inputs_embeds", 4, 5)
    module = Embeddings(4)
    module.position_ids = torch.arange(4)
    assert table(5, self=module, position_ids=module.position_ids) is None


def test_the_kind_of_labels_is_that_of_the_innermost_model() -> None:
    def model(kind: Any) -> Any:
        made = nn.Module()
        made.config = SimpleNamespace(problem_type=kind)
        return made

    outer, inner = entry(self=model("regression")), entry(self=model("single_label"))
    assert context.problem_type([outer, inner]) == "single_label"
    assert context.problem_type([outer, entry(self=model(None)), entry()]) == "regression"
    assert context.problem_type([entry()]) is None


@pytest.mark.parametrize(("rank", "wanted"), [("3", 3), ("0", 0), ("", None), ("a", None)])
def test_the_rank_of_the_process(
    monkeypatch: pytest.MonkeyPatch, rank: str, wanted: int | None
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert context.describe().rank == wanted


@pytest.mark.usefixtures("sim")
def test_the_rehearsal_device_is_said() -> None:
    described = context.describe()
    assert described.simulated
    assert described.torch == str(torch.__version__)
    assert context.rehearsed_fault() is None


@pytest.mark.parametrize(("is_started", "wanted"), [(True, 2), (False, None)])
def test_the_rank_that_torch_knows(
    monkeypatch: pytest.MonkeyPatch, is_started: bool, wanted: int | None
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(context.distributed, "is_initialized", lambda: is_started)
    monkeypatch.setattr(context.distributed, "get_rank", lambda: 2)
    assert context.describe().rank == wanted


@pytest.mark.parametrize("is_started", [True, False])
def test_the_name_of_the_device(monkeypatch: pytest.MonkeyPatch, is_started: bool) -> None:
    """It is asked for where CUDA runs, and a lost context cannot tell it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_started)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    assert context.describe().device == ("H200" if is_started else None)

    def fails() -> None:
        raise RuntimeError

    monkeypatch.setattr(torch.cuda, "get_device_name", fails)
    assert context.describe().device is None


def test_without_a_device() -> None:
    described = context.describe()
    assert (described.simulated, described.device) == (False, None)


class Base:
    """Stands for a class of transformers."""


Base.__module__ = "transformers.models.bert.modeling_bert"


class Mine(Base):
    """A subclass of the user's."""


class Tokenizer:
    pad_token_id = 3

    def __len__(self) -> int:
        return 7


def observed(text: str, **names: Any) -> Any:
    return asked(text, lambda frames: context.observe(frames, CallSite()), **names)[-1]


def test_the_one_tokenizer_that_the_code_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(PreTrainedTokenizerBase=Tokenizer)
    monkeypatch.setitem(sys.modules, "transformers", fake)  # type: ignore[arg-type]
    found = observed("here(tok)", tok=Tokenizer(), other=Tokenizer())
    assert (found.tokenizer_length, found.pad_token_id) == (7, 3)
    found = observed("here(tok, other)", tok=Tokenizer(), other=Tokenizer())
    assert (found.tokenizer_length, found.pad_token_id) == (None, None)


def test_a_model_of_the_users_has_the_name_of_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(PreTrainedModel=Base)
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", fake)  # type: ignore[arg-type]
    code = "def inner():\n    here()\ndef forward(self):\n    inner()\nforward(model)"
    assert observed(code, model=Mine()).model == "Base"
    assert observed(code, model=object()).model is None


def test_of_two_names_in_a_library_that_of_the_innermost_function_counts() -> None:
    names = (("indices", "position_ids"), ("weight", "table"), ("indices", "x"))
    found = context.observe((), CallSite(library_names=names))
    assert found.library_name("indices") == "position_ids"
    assert found.library_name("weight") == "table"
    assert found.library_name("offsets") is None
