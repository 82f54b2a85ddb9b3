"""Errors deep inside transformers name the user's line, his argument and the module."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest

transformers = pytest.importorskip("transformers")

from cudalens import simulate  # noqa: E402
from tests.hostcells import run_cell  # noqa: E402

logging.getLogger("transformers").setLevel(logging.ERROR)

SETUP = """
import numpy as np, torch, transformers as tr
torch.manual_seed(0)
SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
             vocab_size=30, max_position_embeddings=20)
PAIR = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=30)
def ids(*shape, value=3):
    return torch.full(shape, value, device="cuda")
"""
MODELS = {
    "bert": "tr.BertForSequenceClassification(tr.BertConfig(**SIZES))",
    "roberta": "tr.RobertaForSequenceClassification(tr.RobertaConfig(**SIZES, pad_token_id=1))",
    "gpt2": "tr.GPT2LMHeadModel(tr.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=30, "
    "n_positions=16, bos_token_id=1, eos_token_id=2, pad_token_id=0))",
    "bart": "tr.BartForConditionalGeneration(tr.BartConfig(**PAIR, max_position_embeddings=16))",
    "t5": "tr.T5ForConditionalGeneration(tr.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, "
    "num_heads=2, vocab_size=30, decoder_start_token_id=0))",
    "layoutlmv3": "tr.LayoutLMv3Model(tr.LayoutLMv3Config(**SIZES, max_2d_position_embeddings=64, "
    "coordinate_size=3, shape_size=2, input_size=16, patch_size=8, visual_embed=False, "
    "pad_token_id=1))",
    "whisper": "tr.WhisperForConditionalGeneration(tr.WhisperConfig(**PAIR, num_mel_bins=4, "
    "max_source_positions=10, max_target_positions=8, pad_token_id=0, bos_token_id=1, "
    "eos_token_id=2, decoder_start_token_id=1))",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call of a model that fails, and what must be said of it."""

    model: str
    setup: str = ""
    call: str
    kind: str = "host_error"
    argument: str | None
    expression: str | None = None
    module: str | None
    headline: str


ASSERTS = [
    Case(
        model="bert",
        setup="types = ids(2, 8, value=2)",
        call="model(input_ids=ids(2, 8), token_type_ids=types)",
        argument="indices",
        expression="types",
        module="bert.embeddings.token_type_embeddings",
        headline="indices[0, 0] = 2 is outside the 2 rows of weight",
    ),
    Case(
        model="bert",
        setup="batch = {'input_ids': ids(2, 8), 'token_type_ids': ids(2, 8, value=2)}",
        call="model(**batch)",
        argument="indices",
        expression='batch["token_type_ids"]',
        module="bert.embeddings.token_type_embeddings",
        headline="indices[0, 0] = 2 is outside the 2 rows of weight",
    ),
    Case(
        model="roberta",
        setup="x = ids(2, 19)",
        call="model(input_ids=x)",
        argument="index",
        module="roberta.embeddings",
        headline="is outside",
    ),
    Case(
        model="gpt2",
        setup="x = ids(2, 17)",
        call="model(input_ids=x)",
        argument="indices",
        module="transformer.wpe",
        headline="indices[0, 16] = 16 is outside the 16 rows of weight",
    ),
    Case(
        model="gpt2",
        setup="prompt = ids(2, 12, value=33)",
        call="model.generate(prompt, max_new_tokens=2, do_sample=False)",
        argument="indices",
        module="transformer.wte",
        headline="indices[0, 0] = 33 is outside the 30 rows of weight",
    ),
    Case(
        model="gpt2",
        setup="prompt = ids(2, 12)",
        call="model.generate(prompt, max_new_tokens=12, do_sample=False)",
        argument="indices",
        module="transformer.wpe",
        headline="indices[0, 0] = 16 is outside the 16 rows of weight",
    ),
    Case(
        model="bart",
        setup="x = ids(2, 20); y = ids(2, 4)",
        call="model(input_ids=x, labels=y)",
        argument="indices",
        module="model.encoder.embed_positions",
        headline="indices[0, 16] = 18 is outside the 18 rows of weight",
    ),
    Case(
        model="bart",
        setup="x = ids(2, 9); y = ids(2, 4, value=-100)",
        call="model(input_ids=x, decoder_input_ids=y)",
        argument="indices",
        expression="y",
        module="model.decoder.embed_tokens",
        headline="indices[0, 0] = -100 is outside the 30 rows of weight",
    ),
    Case(
        model="t5",
        setup="x = ids(2, 9, value=31); y = ids(2, 4)",
        call="model(input_ids=x, labels=y)",
        argument="indices",
        expression="x",
        module="encoder.embed_tokens",
        headline="indices[0, 0] = 31 is outside the 30 rows of weight",
    ),
    Case(
        model="whisper",
        setup="x = torch.ones(2, 4, 20, device='cuda'); y = ids(2, 9)",
        call="model(input_features=x, decoder_input_ids=y)",
        argument="indices",
        module="model.decoder.embed_positions",
        headline="= 8 is outside dimension 0 (size 8)",
    ),
]
HOST = [
    Case(
        model="bert",
        setup="x = ids(2, 8).float()",
        call="model(input_ids=x)",
        argument="input",
        expression="x",
        module="bert.embeddings.word_embeddings",
        headline="input is float32, embedding takes int64 or int32",
    ),
    Case(
        model="bert",
        setup="x = ids(2, 8).cpu()",
        call="model(input_ids=x)",
        argument="input",
        expression="x",
        module="bert.embeddings.word_embeddings",
        headline="input is on cpu, the other tensors are on cuda:0",
    ),
    Case(
        model="bert",
        setup="x = ids(2, 8); y = torch.tensor([0, 1], device='cuda').int()",
        call="model(input_ids=x, labels=y)",
        argument="target",
        expression="y",
        module=None,
        headline="target is int32, this call takes int64",
    ),
    Case(
        model="bert",
        setup="x = ids(2, 8); y = torch.tensor([0, 1, 1], device='cuda')",
        call="model(input_ids=x, labels=y)",
        argument="target",
        expression="y",
        module=None,
        headline="target has 3 labels for 2 rows of input",
    ),
    Case(
        model="bert",
        setup="x = np.ones((2, 8), dtype=int)",
        call="model(input_ids=x)",
        argument="input_ids",
        module="bert.embeddings",
        headline="input_ids is a numpy.ndarray of int64 (2, 8), a tensor is wanted",
    ),
    Case(
        model="bert",
        setup="x = [[1, 2]]",
        call="model(input_ids=x)",
        argument="input_ids",
        module="bert.embeddings",
        headline="input_ids is a list of 1, a tensor is wanted",
    ),
    Case(
        model="bert",
        setup="x = ids(2, 8)",
        call="model(attention_mask=x)",
        argument="input_ids",
        module="bert",
        headline="BertModel got none of input_ids, inputs_embeds",
    ),
    Case(
        model="bert",
        setup="x = ids(2, 8); e = torch.ones(2, 8, 16, device='cuda')",
        call="model(input_ids=x, inputs_embeds=e)",
        argument="inputs_embeds",
        module="bert",
        headline="BertModel got input_ids and inputs_embeds, and takes exactly one of",
    ),
    Case(
        model="t5",
        setup="x = ids(2, 8)",
        call="model(input_ids=x)",
        argument="decoder_input_ids",
        module="decoder",
        headline="T5Stack got none of input_ids, inputs_embeds",
    ),
    Case(
        model="layoutlmv3",
        setup="x = ids(2, 8)",
        call="model(image_features=x)",
        argument="input_ids",
        module=None,
        headline="LayoutLMv3Model got none of input_ids, inputs_embeds, pixel_values",
    ),
    Case(
        model="whisper",
        setup="x = torch.ones(2, 5, 20, device='cuda'); y = ids(2, 4)",
        call="model(input_features=x, labels=y)",
        argument="input",
        expression="x",
        module="model.encoder.conv1",
        headline="input has 5 channels, the weight takes 4",
    ),
]


def ident(case: Case) -> str:
    return f"{case.model}: {case.call} after {case.setup}"


def run(case: Case):  # type: ignore[no-untyped-def]
    return run_cell(f"{SETUP}model = {MODELS[case.model]}.cuda()\n{case.setup}\n{case.call}")


@pytest.mark.parametrize("case", HOST, ids=ident)
def test_a_refused_call_is_explained(case: Case, sim: simulate.Simulation) -> None:
    """The user's line, module path, argument and his words for it; never called an assert."""
    report = run(case).shown
    assert report.kind == "host_error"
    assert case.headline in report.headline
    assert (report.argument, report.expression) == (case.argument, case.expression)
    assert report.module_path == case.module
    assert report.source is not None and report.source.text == case.call


@pytest.mark.parametrize("case", ASSERTS, ids=ident)
def test_a_bad_value_is_stopped(case: Case, sim: simulate.Simulation) -> None:
    """The guards inside a model's forward, also below generate()."""
    report = run(case).shown
    assert (report.kind, report.certainty, report.prevented) == ("device_assert", "proven", True)
    assert case.headline in report.headline
    assert (report.argument, report.expression) == (case.argument, case.expression)
    assert report.module_path == case.module
    assert report.source is not None and report.source.text == case.call


def test_a_box_beyond_the_page_is_found_although_the_model_catches_it(
    sim: simulate.Simulation,
) -> None:
    """LayoutLMv3 turns the IndexError into one of its own; the finding is still the report."""
    code = (
        f"{SETUP}model = {MODELS['layoutlmv3']}.cuda()\n"
        "x = ids(2, 8); box = ids(2, 8, 4, value=70)\nmodel(input_ids=x, bbox=box)"
    )
    report = run_cell(code).shown
    assert report.kind == "device_assert"
    assert "= 70 is outside the 64 rows" in report.headline
    assert report.module_path == "embeddings.x_position_embeddings"
    assert report.source is not None and report.source.text == "model(input_ids=x, bbox=box)"


GOOD = {
    "bert": "model(input_ids=ids(2, 8), labels=ids(2, value=1)).loss.backward()",
    "roberta": "model(input_ids=ids(2, 18), labels=ids(2, value=1)).loss.backward()",
    "gpt2": "model.generate(ids(2, 4), max_new_tokens=12, do_sample=False)",
    "bart": "model(input_ids=ids(2, 16), labels=ids(2, 4)).loss.backward()",
    "t5": "model(input_ids=ids(2, 20), labels=ids(2, 4)).loss.backward()",
    "layoutlmv3": "model(input_ids=ids(2, 8), bbox=ids(2, 8, 4, value=63))",
    "whisper": "model(input_features=torch.ones(2, 4, 20, device='cuda'), labels=ids(2, 8)).loss"
    ".backward()",
}


@pytest.mark.parametrize("name", MODELS)
def test_a_right_call_gives_no_report(name: str, sim: simulate.Simulation) -> None:
    """At the very bounds, forward and backward, or a whole generation."""
    outcome = run_cell(f"{SETUP}model = {MODELS[name]}.cuda()\n{GOOD[name]}")
    assert (outcome.error, outcome.report) == (None, None)


PAGE = """
boxes, words = torch.zeros(2, 4, 4).long(), ids(2, 4)
page = {"input_ids": words, "bbox": boxes}
"""


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (
            "model(input_ids=words, bbox=boxes)",
            'model(input_ids=words, bbox=boxes.to("cuda:0"))',
        ),
        ("model(**page)", 'page["bbox"] = page["bbox"].to("cuda:0")'),
    ],
)
def test_the_only_tensor_left_behind_is_moved(
    call: str, fix: str, sim: simulate.Simulation
) -> None:
    """The model takes slices of it to its tables: those have no name on the user's line."""
    setup = f"{SETUP}model = {MODELS['layoutlmv3']}.cuda()\n{PAGE}"
    assert run_cell(setup + call).fixes == [fix]
    assert run_cell(f"{setup}{fix}\n{call if '**' in call else ''}").error is None


def test_of_two_left_behind_none_is_named_alone(sim: simulate.Simulation) -> None:
    """The neighbour: the words lie on the CPU, too."""
    setup = f"{SETUP}model = {MODELS['layoutlmv3']}.cuda()\n{PAGE}"
    assert "left_behind" not in run_cell(f"{setup}model(input_ids=words.cpu(), bbox=boxes)").rules


def test_inside_a_trainer(sim: simulate.Simulation, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """The line that called train() is the user's, the module path is the model's."""
    pytest.importorskip("accelerate")
    code = f"""{SETUP}
model = {MODELS["bert"]}
rows = [{{"input_ids": [3] * 8, "token_type_ids": [2] * 8, "labels": 1}}] * 4
arguments = tr.TrainingArguments(
    {str(tmp_path)!r}, max_steps=1, per_device_train_batch_size=2, report_to=[],
)
trainer = tr.Trainer(model=model, args=arguments, train_dataset=rows)
trainer.train()
"""
    report = run_cell(code).shown
    assert report.kind == "device_assert"
    assert (report.module_path or "").endswith("embeddings.token_type_embeddings")
    assert report.source is not None and report.source.text == "trainer.train()"
