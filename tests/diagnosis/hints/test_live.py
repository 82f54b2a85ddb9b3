"""From a failing cell on the simulated device to the hint in its report."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cudalens
from cudalens.core.report import Report
from cudalens.core.report_types import Hint
from cudalens.simulate import Simulation
from tests.probes import run_cell

pytestmark = pytest.mark.usefixtures("sim")


def report_of(text: str, raises: type[Exception] = RuntimeError, **names: Any) -> Report:
    """The report of a cell that a guard stops."""
    session = cudalens.check(fast=True)
    with pytest.raises(raises), session:
        run_cell(text, {"torch": torch, "nn": nn, "F": nn.functional, **names})
    assert session.report is not None
    return session.report


def hint_of(text: str, **names: Any) -> Hint:
    """The only hint of the report of a cell that a guard stops."""
    report = report_of(text, **names)
    (hint,) = report.hints
    return hint


def cuda(values: Any, **options: Any) -> Tensor:
    """A tensor on the simulated device."""
    return torch.tensor(values, **options).cuda()


class Reader(nn.Module):
    """A small model with tables of tokens and of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.positions = nn.Embedding(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.size(1), device=ids.device)
        embedded: Tensor = self.tokens(ids) + self.positions(at)
        return embedded


def scores(rows: int, classes: int, *rest: int) -> Tensor:
    return torch.zeros(rows, classes, *rest).cuda()


@pytest.mark.parametrize(
    ("text", "names", "rule", "fix"),
    [
        ("loss = F.cross_entropy(z, y)", lambda: {"z": scores(10, 10), "y": cuda([*range(1, 11)])},
         "one_based_labels", "F.cross_entropy(z, y - 1)"),
        ("loss = nn.CrossEntropyLoss()(z, batch['mask'])",
         lambda: {"z": scores(1, 3, 2, 2), "batch": {"mask": cuda([[[0, 1], [2, 255]]])}},
         "mark_not_ignored", "nn.CrossEntropyLoss(ignore_index=255)(z, batch['mask'])"),
        ("code = F.one_hot(y, num_classes=4)", lambda: {"y": cuda([0, 3, 5])},
         "too_few_places", None),
        ("h = net(ids)", lambda: {"net": Reader().cuda(), "ids": cuda([[1, 2, 10, 3]])},
         "added_tokens", None),
        ("h = net(ids)", lambda: {"net": Reader().cuda(), "ids": cuda([[1, -100, -100]])},
         "ignored_label_as_id", None),
        ("loss = F.binary_cross_entropy(z, t)",
         lambda: {"z": cuda([-1.5, 2.0]), "t": cuda([0.0, 1.0])},
         "not_probabilities", "F.binary_cross_entropy_with_logits(z, t)"),
        ("loss = F.binary_cross_entropy(p, t)",
         lambda: {"p": cuda([0.5, math.nan]), "t": cuda([0.0, 1.0])}, "nan_before", None),
        ("pick = torch.multinomial(z, 1)", lambda: {"z": cuda([-1.5, 2.0])},
         "bad_weights", "torch.multinomial(torch.softmax(z, dim=-1), 1)"),
        ("q = z.gather(1, actions.unsqueeze(1))",
         lambda: {"z": scores(3, 4), "actions": cuda([0, 4, 2])}, "too_few_places", None),
        # There is no proof of edges on the line.
        ("row, col = edge_index\nh = x[row]",
         lambda: {"x": scores(3, 4), "edge_index": cuda([[10, 57], [57, 10]])},
         "too_few_places", None),
        ("h = x.index_select(0, edge_index[0])",
         lambda: {"x": scores(2, 4), "edge_index": cuda([[10, 57], [57, 10]])},
         "edges_with_original_ids", None),
        ("h = emb(x.long())",
         lambda: {"emb": nn.Embedding(5, 2).cuda(), "x": cuda([0.25, math.nan])},
         "nan_cast_to_integer", None),
        ("v = flat[rows * width + cols]",
         lambda: {"flat": scores(3, 4).view(-1), "rows": cuda([0, 2]), "cols": cuda([1, 4]),
                  "width": 4}, "flat_position", None),
    ],
)  # fmt: skip
def test_a_failing_cell_gets_its_hint(
    text: str, names: Callable[[], dict[str, Any]], rule: str, fix: str | None
) -> None:
    """What the collectors see is enough for the rule, and for a fix in the cell's own words."""
    hint = hint_of(text, **names())
    assert hint.rule == rule
    assert fix is None or hint.fix == fix


def test_a_long_sequence_is_told_from_an_added_token() -> None:
    """Both end in an embedding one row short; the module's path tells which table it is."""
    hint = hint_of("h = net(ids)", net=Reader().cuda(), ids=cuda([[1] * 9]))
    assert hint.rule == "positions_beyond_table"
    assert "9 positions, the table 8" in hint.text


def test_the_hint_is_in_the_message_of_the_exception() -> None:
    """Who reads only the exception reads the fix too."""
    session = cudalens.check(fast=True)
    names = {"F": nn.functional, "z": scores(10, 10), "y": cuda([*range(1, 11)])}
    with pytest.raises(cudalens.DeviceIndexError, match=r"F\.cross_entropy\(z, y - 1\)"), session:
        run_cell("loss = F.cross_entropy(z, y)", names)


@pytest.mark.parametrize(
    ("levels", "text"),
    [
        ([0.5, 1.2], "a level q above 1"),
        ([-0.5, 1.0], "a level q below 0"),
        ([25.0, 75.0], "a level q above 1"),
    ],
)
def test_levels_of_a_quantile(levels: list[float], text: str) -> None:
    """CUDA looks at no level: the rank in the sorted values is what it meets."""
    x, q = torch.arange(11.0, device="cuda"), torch.tensor(levels, device="cuda")
    hint = hint_of("torch.quantile(x, q)", torch=torch, x=x, q=q)
    assert (hint.rule, hint.fix) == ("quantile_levels", None)
    assert hint.text.startswith(text)


# --- inside transformers -------------------------------------------------------------------------


SMALL = {
    "vocab_size": 100,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
}


def model_of(kind: str, head: str = "Model", **settings: Any) -> nn.Module:
    """A tiny random model of transformers."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **settings})
    model = getattr(transformers, f"{kind}{head}")(config)
    assert isinstance(model, nn.Module)
    return model.cuda().eval()


def test_tokens_added_without_resizing() -> None:
    """The user's own model is the one to resize."""
    bert = model_of("Bert")
    hint = hint_of("out = bert(input_ids=ids)", bert=bert, ids=cuda([[1, 100, 3]]))
    assert hint.fix is None and "resize_token_embeddings(len(tokenizer))" in hint.text


def test_segment_ids_of_a_model_with_one_segment() -> None:
    """RoBERTa knows segment 0 only."""
    hint = hint_of(
        "out = net(input_ids=ids, token_type_ids=seg)",
        net=model_of("Roberta", type_vocab_size=1),
        ids=cuda([[5, 6]]),
        seg=cuda([[0, 1]]),
    )
    assert hint.rule == "segment_ids"
    assert hint.fix is None and "leave token_type_ids out" in hint.text


@pytest.mark.parametrize(
    ("tokens", "rule"), [(16, "positions_with_offset"), (17, "positions_beyond_table")]
)
def test_positions_of_roberta_start_behind_the_padding(tokens: int, rule: str) -> None:
    """16 rows are too few for 16 tokens because of the offset; 17 tokens are too many anyway."""
    hint = hint_of("out = net(ids)", net=model_of("Roberta"), ids=cuda([[5] * tokens]))
    assert hint.rule == rule
    assert "14" in hint.text


@pytest.mark.parametrize("tokens", [17, 18])
def test_the_rows_that_bart_adds_are_none_of_its_config(tokens: int) -> None:
    """BART's table has two rows more than its config says, so 16 tokens fit, also beside 18."""
    bart = model_of(
        "Bart", d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8, decoder_ffn_dim=8,
        encoder_attention_heads=1, decoder_attention_heads=1,
    )  # fmt: skip
    hint = hint_of("out = net(ids)", net=bart, ids=cuda([[5] * tokens]))
    assert hint.rule == "positions_beyond_table"
    assert f"{tokens} positions, the table 16" in hint.text
    assert "let the tokenizer truncate to max_length=16" in hint.text


@pytest.mark.parametrize(
    ("box", "rule"),
    [
        ([10, 10, 1500, 20], "boxes_in_pixels"),
        ([10, -3, 50, 20], "boxes_negative"),
        ([10, 10, 5, 20], "boxes_negative"),
    ],
)
def test_boxes_of_layoutlm(box: list[int], rule: str) -> None:
    """The library catches the guard's IndexError and raises its own; the report is kept."""
    names = {"ids": cuda([[5, 6]]), "bbox": cuda([[[1, 1, 2, 2], box]])}
    text, net = "out = net(input_ids=ids, bbox=bbox)", model_of("LayoutLM")
    hint = hint_of(text, raises=IndexError, net=net, **names)
    assert (hint.rule, hint.fix) == (rule, None)


GPT = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}


@pytest.mark.parametrize(
    ("kind", "head", "answers", "setting"),
    [
        ("GPT2", "LMHeadModel", [[1, 2, 100]], "resize_token_embeddings(len(tokenizer))"),
        ("Bert", "ForMaskedLM", [[1, 2, 100]], "resize_token_embeddings(len(tokenizer))"),
        ("Bert", "ForSequenceClassification", [3], "num_labels=4"),
        ("Bert", "ForTokenClassification", [[0, 1, 3]], "num_labels=4"),
    ],
)
@pytest.mark.parametrize("is_own", [False, True])
def test_a_head_is_known_by_its_class(
    kind: str, head: str, answers: Any, setting: str, is_own: bool
) -> None:
    """Labels that a head has no output for: a class of the user's is known by its base."""
    net = model_of(kind, head, num_labels=3, **GPT)
    if is_own:
        net.__class__ = type("Mine", (type(net),), {"__module__": "__main__"})
    names = {"net": net, "ids": cuda([[5, 6, 7]]), "answers": cuda(answers)}
    assert setting in hint_of("out = net(ids, labels=answers)", **names).text


def test_labels_of_a_decoder_padded_with_minus_one() -> None:
    """T5 makes its decoder's ids of the labels: -100 is replaced there, -1 is not."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 1}
    net = model_of("T5", "ForConditionalGeneration", **sizes, decoder_start_token_id=0)
    names = {"net": net, "ids": cuda([[5, 6, 7]]), "labels": cuda([[5, -1, -1]])}
    hint = hint_of("out = net(input_ids=ids, labels=labels)", **names)
    assert hint.fix == "net(input_ids=ids, labels=labels.masked_fill(labels == -1, -100))"


SAMPLE = """
class Sampler:
    def __init__(self, temperature):
        self.temperature = temperature

    def draw(self, z):
        return torch.multinomial(torch.softmax(z / self.temperature, -1), 1)

def sample(z, temperature):
    return torch.multinomial(torch.softmax(z / temperature, -1), 1)

"""


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("sample(z, 0)", "temperature is 0:"),
        ("Sampler(0.0).draw(z)", "self.temperature is 0:"),
        ("sample(z * float('nan'), 0.7)", None),
        ("Sampler(0.7).draw(z * float('nan'))", None),
    ],
)
def test_the_temperature_is_read_from_the_running_code(call: str, says: str | None) -> None:
    """A temperature of 0 is the cause of NaN, one of 0.7 is not."""
    hints = report_of(SAMPLE + call, z=cuda([[1.0, 2.0]])).hints
    found = {hint.rule: hint.text for hint in hints}
    assert says in found["temperature_of_zero"] if says else "temperature_of_zero" not in found
    assert "nan_before" in found


def test_the_simulation_is_what_the_cells_run_on(sim: Simulation) -> None:
    """Without the guards the same cell asserts: the hints above prevented something."""
    with pytest.raises(RuntimeError, match="device-side assert"):
        nn.functional.cross_entropy(scores(1, 2), cuda([2]))
        torch.cuda.synchronize()
    sim.reset()
