"""Errors deep inside transformers name the user's line, his argument and the module."""

from __future__ import annotations

import logging
from typing import NamedTuple

import pytest

transformers = pytest.importorskip("transformers")

from cudalens import simulate  # noqa: E402
from cudalens.core.report import Report  # noqa: E402
from tests import misread  # noqa: E402
from tests.hostcells import check_fixes, run_cell  # noqa: E402
from tests.releases import in_words_of_here  # noqa: E402

pytestmark = pytest.mark.usefixtures("sim")

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


class Case(NamedTuple):
    """A call of a model that fails, and what must be said of it."""

    model: str
    setup: str
    call: str
    argument: str | None
    expression: str | None
    module: str | None
    headline: str


def read_cases(table: str) -> list[Case]:
    """Read cases of four lines: model and set-up; call; argument, its expression, module; headline.

    What must not be named is a dash.
    """
    lines, cases = [line.strip() for line in table.strip().splitlines()], []
    for first, call, names, headline in zip(*[iter(lines)] * 4, strict=True):
        model, _, setup = first.partition(": ")
        known = (None if name == "-" else name for name in names.split(" | "))
        cases.append(Case(model, setup, call, *known, headline))
    return cases


ASSERTS = read_cases("""
bert: types = ids(2, 8, value=2)
    model(input_ids=ids(2, 8), token_type_ids=types)
    indices | types | bert.embeddings.token_type_embeddings
    indices[0, 0] = 2 is outside the 2 rows
roberta: x = ids(2, 19)
    model(input_ids=x)
    index | - | roberta.embeddings
    is outside
gpt2: x = ids(2, 17)
    model(input_ids=x)
    indices | - | transformer.wpe
    indices[0, 16] = 16 is outside the 16 rows
gpt2: prompt = ids(2, 12)
    model.generate(prompt, max_new_tokens=12, do_sample=False)
    indices | - | transformer.wpe
    indices[0, 0] = 16 is outside the 16 rows
bart: x = ids(2, 9); y = ids(2, 4, value=-100)
    model(input_ids=x, decoder_input_ids=y)
    indices | y | model.decoder.embed_tokens
    indices[0, 0] = -100 is outside the 30 rows
layoutlmv3: x = ids(2, 8); box = ids(2, 8, 4, value=70)
    model(input_ids=x, bbox=box)
    indices | - | embeddings.x_position_embeddings
    = 70 is outside the 64 rows
whisper: x = torch.ones(2, 4, 20, device='cuda'); y = ids(2, 9)
    model(input_features=x, decoder_input_ids=y)
    indices | - | model.decoder.embed_positions
    = 8 is outside dimension 0 (size 8)
""")
HOST = read_cases("""
bert: x = ids(2, 8).float()
    model(input_ids=x)
    input | x | bert.embeddings.word_embeddings
    to have one of the following scalar types: int64, int32; but got float32
bert: x = ids(2, 8).cpu()
    model(input_ids=x)
    input | x | bert.embeddings.word_embeddings
    x is on cpu, the parameters of model.bert.embeddings.word_embeddings are on cuda:0
bert: x = ids(2, 8); y = torch.tensor([0, 1], device='cuda').int()
    model(input_ids=x, labels=y)
    target | y | -
    expected target dtype to be int64 or uint8, but got int32: y is int32
bert: x = ids(2, 8); y = torch.tensor([0, 1, 1], device='cuda')
    model(input_ids=x, labels=y)
    target | y | -
    Expected input batch_size (2) to match target batch_size (3): y is [3]
bert: x = np.ones((2, 8), dtype=int)
    model(input_ids=x)
    - | - | bert.embeddings
    'int' object is not callable: x is a numpy.ndarray of int64 [2, 8]
bert: x = ids(2, 8); e = torch.ones(2, 8, 16, device='cuda')
    model(input_ids=x, inputs_embeds=e)
    - | - | bert
    specify exactly one of input_ids or inputs_embeds
whisper: x = torch.ones(2, 5, 20, device='cuda'); y = ids(2, 4)
    model(input_features=x, labels=y)
    input | x | model.encoder.conv1
    to have 4 channels, but got 5 channels instead: x is [2, 5, 20]
""")


def ident(case: Case) -> str:
    return f"{case.model}: {case.call} after {case.setup}"


def explained(case: Case) -> Report:
    """Return the report of a case, which names line, module, argument and the user's words."""
    code = f"{SETUP}model = {MODELS[case.model]}.cuda()\n{case.setup}\n{case.call}"
    report = run_cell(code).shown
    told = f"{report.headline_schema} {report.headline}"
    assert all(text in told for text in in_words_of_here(case.headline))
    assert (report.argument, report.expression) == (case.argument, case.expression)
    assert report.module_path == case.module
    assert report.source is not None and report.source.text == case.call
    return report


@pytest.mark.parametrize("case", HOST, ids=ident)
def test_a_refused_call_is_explained_and_never_called_an_assert(case: Case) -> None:
    assert explained(case).kind == "host_error"


@pytest.mark.parametrize("case", ASSERTS, ids=ident)
def test_a_bad_value_is_stopped(case: Case) -> None:
    """In a model's forward, below generate(), and where LayoutLMv3 raises an error of its own."""
    report = explained(case)
    assert (report.kind, report.certainty, report.prevented) == ("device_assert", "proven", True)


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
def test_a_right_call_gives_no_report(name: str) -> None:
    outcome = run_cell(f"{SETUP}model = {MODELS[name]}.cuda()\n{GOOD[name]}")
    assert (outcome.error, outcome.report) == (None, None)


WORDS = "input_ids=x, attention_mask=torch.ones_like(x)"
SCAN = "bbox=boxes.expand(2, 6, 4).contiguous(), pixel_values=page"
TRAINED = {
    "bart": (MODELS["bart"], f"model({WORDS}, labels=x)"),
    "llama": (
        "tr.LlamaForCausalLM(tr.LlamaConfig(**SIZES, num_key_value_heads=1))",
        f"model({WORDS}, labels=x)",
    ),
    "layoutlmv3": (
        "tr.LayoutLMv3ForTokenClassification(tr.LayoutLMv3Config(**SIZES, coordinate_size=2, "
        "shape_size=4, max_2d_position_embeddings=64, input_size=16, patch_size=8, num_labels=3))",
        f"model({WORDS}, {SCAN}, labels=x % 3)",
    ),
}
TWO_STEPS = """
model = {model}.eval().to(device)
x, boxes = torch.randint(3, 30, (2, 6)).to(device), torch.randint(0, 8, (2, 6, 1)).to(device)
page = torch.randn(2, 3, 16, 16).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(2):
    optimizer.zero_grad()
    loss = {call}.loss
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
"""


@pytest.mark.parametrize("name", TRAINED)
def test_a_model_trains_and_generates_as_on_the_cpu(name: str) -> None:
    """Two AdamW steps lose as on the CPU; beams agree with the CPU and sampling runs."""
    model, call = TRAINED[name]
    device, host = {"device": "cuda"}, {"device": "cpu"}
    for names in (device, host):
        exec(SETUP + TWO_STEPS.format(model=model, call=call), names)
    assert device["losses"] == pytest.approx(host["losses"], abs=1e-3)
    if name == "layoutlmv3":
        return
    options = {"max_new_tokens": 4, "min_new_tokens": 4}
    device["model"].load_state_dict(host["model"].state_dict())
    beams, expected = (
        names["model"].generate(names["x"], num_beams=2, do_sample=False, **options)
        for names in (device, host)
    )
    assert beams.is_cuda
    assert beams.tolist() == expected.tolist()
    sampled = device["model"].generate(device["x"], do_sample=True, **options)
    assert sampled.is_cuda
    assert sampled.shape == beams.shape


PAGE = """
boxes = torch.zeros(2, 4, 4).long()
page = {"input_ids": words, "bbox": boxes}
"""
BY_NAME = "model(input_ids=words, bbox=boxes)"
BOTH = 'model(input_ids=words.to("cuda:0"), bbox=boxes.to("cuda:0"))'


@pytest.mark.parametrize(
    ("words", "call", "fix"),
    [
        ("ids(2, 4)", BY_NAME, "model(input_ids=words, bbox=boxes.to(words.device))"),
        ("ids(2, 4)", "model(**page)", 'page["bbox"] = page["bbox"].to("cuda:0")'),
        # The neighbour: the words lie on the CPU, too.
        ("ids(2, 4).cpu()", BY_NAME, BOTH),
    ],
)
def test_what_was_left_behind_is_moved(
    words: str, call: str, fix: str, sim: simulate.Simulation
) -> None:
    """The model takes slices of it to its tables: those have no name on the user's line."""
    code = f"{SETUP}model = {MODELS['layoutlmv3']}.cuda()\nwords = {words}\n{PAGE}{call}".strip()
    outcome = run_cell(code)
    assert outcome.fixes == [fix]
    check_fixes(code, outcome, sim)


@pytest.mark.parametrize("cell", misread.cells("libraries"), ids=lambda cell: cell[0])
def test_a_size_of_a_library_is_not_misread(cell: misread.Cell, sim: simulate.Simulation) -> None:
    misread.check(cell, sim)


def test_inside_a_trainer(tmp_path) -> None:  # type: ignore[no-untyped-def]
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
