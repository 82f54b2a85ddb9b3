"""Values and lengths that a model of transformers refuses."""

from __future__ import annotations

import pytest

from tests.hostcells import run_cell

pytestmark = pytest.mark.usefixtures("sim")
TRUNCATED = "truncate to max_length=20"
MODELS = """
import torch
import transformers as tr
tr.logging.set_verbosity_error()
sizes = dict(vocab_size=60, max_position_embeddings=20)
bert = tr.BertModel(tr.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                  intermediate_size=16, **sizes)).cuda()
distilbert = tr.DistilBertModel(tr.DistilBertConfig(dim=16, n_layers=1, n_heads=2, hidden_dim=16,
                                                    **sizes)).cuda()
def ids(length):
    return torch.ones(2, length, device="cuda").long()
"""


def test_a_model_s_multi_label_loss() -> None:
    """Deep in transformers the labels are the user's all the same."""
    pytest.importorskip("transformers")
    setup = f"""{MODELS}
head = tr.BertForSequenceClassification(tr.BertConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3,
    problem_type="multi_label_classification", **sizes)).cuda()
y = torch.ones(2, 3, device="cuda").long()
"""
    outcome = run_cell(f"{setup}head(input_ids=ids(8), labels=y)")
    assert (outcome.shown.argument, outcome.shown.expression) == ("target", "y")
    assert outcome.fixes == ["head(input_ids=ids(8), labels=y.float())"]
    assert run_cell(f"{setup}{outcome.fixes[0]}").error is None


@pytest.mark.parametrize(
    "call",
    [
        "bert(input_ids=ids({n}))",
        "bert(input_ids=ids({n}), token_type_ids=torch.zeros_like(ids({n})))",
        "bert(inputs_embeds=torch.ones(2, {n}, 16, device='cuda'))",
        "distilbert(input_ids=ids({n}))",
    ],
)
def test_more_tokens_than_positions(call: str) -> None:
    """torch speaks of two shapes; the reader needs the two lengths, and how to cut his text."""
    pytest.importorskip("transformers")
    fitting = run_cell(MODELS + call.format(n=20))
    assert (fitting.error, fitting.report) == (None, None)
    for beyond in (21, 30):
        outcome = run_cell(MODELS + call.format(n=beyond))
        report = outcome.shown
        name = "inputs_embeds" if "embeds" in call else "input_ids"
        assert report.headline_schema.startswith(f"{name} has {beyond} tokens, ")
        assert report.headline_schema.endswith(" has positions for 20")
        said = (report.argument, outcome.rules, outcome.fixes)
        assert said == (name, ["input_beyond_positions"], [None])
        assert TRUNCATED in outcome.shown.hints[0].text


@pytest.mark.parametrize(
    "call",
    [
        # The user's own positions and segments, which are too few for an input that is not.
        "bert(input_ids=ids(15), position_ids=torch.arange(9, device='cuda')[None],"
        " token_type_ids=ids(15))",
        "bert(input_ids=ids(15), token_type_ids=ids(9))",
        # Positions of the user's that are as many as the table has.
        "bert(input_ids=ids(30), position_ids=torch.arange(20, device='cuda')[None],"
        " token_type_ids=ids(30))",
    ],
)
def test_other_lengths_are_not_blamed_on_the_positions(call: str) -> None:
    """The table is not said to be too short where it was not, or was not asked."""
    pytest.importorskip("transformers")
    outcome = run_cell(MODELS + call)
    assert "positions for" not in outcome.shown.headline_schema
    assert not any(TRUNCATED in hint.text for hint in outcome.shown.hints)


def test_what_a_model_views_is_copied_before_the_call() -> None:
    """A slice of a batch does not lie in order; the view is no line of the user's to change."""
    pytest.importorskip("transformers")
    code = MODELS + "head = tr.BertForTokenClassification(bert.config).cuda()\n"
    code += "y = torch.ones(2, 5, device='cuda').long()[:, :-1]\n"
    outcome = run_cell(code + "head(input_ids=ids(4), labels=y)")
    (fix,) = outcome.fixes
    assert fix == "head(input_ids=ids(4), labels=y.contiguous())"
    assert run_cell(code + fix).report is None
