"""From a failing cell on the simulated device to the hint in its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cudalens
from cudalens.core.report_types import Hint
from tests.hint_evidence import spoken
from tests.hostcells import Outcome, run_cell

pytestmark = pytest.mark.usefixtures("sim")


def cell(text: str, **names: Any) -> Outcome:
    """Run a cell that a guard stops."""
    outcome = run_cell(text, {"torch": torch, "nn": nn, "F": nn.functional, **names})
    assert isinstance(outcome.error, RuntimeError | IndexError)
    return outcome


def hint_of(text: str, **names: Any) -> Hint:
    """The only hint of the report of a cell that a guard stops."""
    (hint,) = cell(text, **names).shown.hints
    return hint


def cuda(values: Any, **options: Any) -> Tensor:
    """A tensor on the simulated device."""
    return torch.tensor(values, **options).cuda()


def test_the_hint_is_in_the_message_of_the_exception() -> None:
    """Who reads only the exception reads the fix too."""
    names = {"z": torch.zeros(10, 10).cuda(), "y": cuda([*range(1, 11)])}
    error = cell("loss = F.cross_entropy(z, y)", **names).error
    assert isinstance(error, cudalens.DeviceIndexError)
    assert "F.cross_entropy(z, y - 1)" in str(error)


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


BART = {
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 1),
    **dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 8),
}


PROMPTED = """
def call(net, input_ids):
    embedded = net.get_input_embeddings()(input_ids)
    learned = embedded.new_zeros(len(input_ids), 8, embedded.shape[-1])
    return net(inputs_embeds=torch.cat([learned, embedded], 1))
"""


def test_positions_that_a_learned_prompt_takes_are_counted() -> None:
    """16 rows less a prompt of 8: to cut the text to the 16 of the table would change nothing."""
    transformers = pytest.importorskip("transformers")
    library = {"torch": torch}
    file = str(Path(transformers.__file__).with_name("prompt.py"))
    exec(compile(PROMPTED, file, "exec"), library)
    names = {"net": model_of("GPT2"), "call": library["call"]}
    fitting = run_cell("call(net, ids)", {**names, "ids": cuda([[5] * 8])})
    assert (fitting.error, fitting.report) == (None, None)
    said = hint_of("call(net, ids)", **names, ids=cuda([[5] * 9])).text
    assert "17 positions, the table 16: ids brings 9 of them, and with the others at most 8" in said


@pytest.mark.parametrize(
    ("model", "settings", "call", "given", "rule", "says"),
    [
        # The user's own model is the one to resize.
        ("Bert", {}, "net(input_ids=ids)", {"ids": [[1, 100, 3]]}, "added_tokens",
         "If tokens were added, give it at least 101 rows with model.resize_token_embeddings"),
        # RoBERTa knows segment 0 only.
        ("Roberta", {"type_vocab_size": 1}, "net(input_ids=ids, token_type_ids=seg)",
         {"ids": [[5, 6]], "seg": [[0, 1]]}, "segment_ids", "leave token_type_ids out"),
        # Its positions start behind the padding: 16 rows are too few for 16 tokens because of the
        # offset; 17 tokens are too many anyway.
        ("Roberta", {}, "net(ids)", {"ids": [[5] * 16]}, "positions_with_offset", "14"),
        ("Roberta", {}, "net(ids)", {"ids": [[5] * 17]}, "positions_beyond_table", "14"),
        # BART's table has two rows more than its config says, so 16 tokens fit, also beside 18.
        *(("Bart", BART, "net(ids)", {"ids": [[5] * tokens]}, "positions_beyond_table",
           f"{tokens} positions, the table 16: give it at most 16 tokens (max_length=16")
          for tokens in (17, 18)),
        # The library catches the guard's IndexError and raises its own; the report is kept.
        *(("LayoutLM", {}, "net(input_ids=ids, bbox=bbox)",
           {"ids": [[5, 6]], "bbox": [[[1, 1, 2, 2], box]]}, rule, says)
          for box, rule, says in [([10, 10, 1500, 20], "boxes_in_pixels", "1500"),
                                  ([10, -3, 50, 20], "boxes_negative", "-3"),
                                  ([10, 10, 5, 20], "boxes_negative", "-5")]),
    ],
)  # fmt: skip
def test_a_model_is_told_what_it_has_no_row_for(
    model: str, settings: Any, call: str, given: Any, rule: str, says: str
) -> None:
    """Tokens, segments and positions beyond the tables of a library's models, in words."""
    names = {key: cuda(values) for key, values in given.items()}
    outcome = cell(call, net=model_of(model, **settings), **names)
    assert isinstance(outcome.error, IndexError)
    assert (outcome.rules, outcome.fixes) == ([rule], [None])
    assert says in outcome.shown.hints[0].text


GPT = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}


@pytest.mark.parametrize(
    ("kind", "head", "answers", "setting"),
    [
        ("Bert", "ForSequenceClassification", [3], "num_labels=3"),
        ("Bert", "ForTokenClassification", [[0, 1, 3]], "num_labels=3"),
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
    assert setting in spoken(cell("out = net(ids, labels=answers)", **names).shown).text
