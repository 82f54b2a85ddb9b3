"""Fifteen published examples and five systems said to cause CUDA asserts: what is true of each.

Where nothing is wrong the tool is silent; where torch refuses on the host it says so, and never
calls it an assert; where a real assert lies in wait the value is named before the launch.
"""

from __future__ import annotations

import pytest

from cudalens import simulate
from tests.hostcells import Outcome, run_cell

HEAD = """
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
"""
CONV = """
class Conv1DModel(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv1d = nn.Conv1d(in_channels, out_channels, kernel_size=3)
    def forward(self, x):
        return self.conv1d(x)
"""


def run(code: str, *, recorded: bool = False) -> Outcome:
    """Run an example under the full check, or under the guards only."""
    if "transformers" in code:
        pytest.importorskip("transformers")
    return run_cell(HEAD + code, fast=not recorded)


def assert_host(
    outcome: Outcome, headline: str, argument: str | None, expression: str | None
) -> None:
    """A host error with these words, not called an assert anywhere."""
    report = outcome.shown
    assert report.kind == "host_error"
    assert headline in report.headline
    assert (report.argument, report.expression) == (argument, expression)
    assert "assert" not in report.to_text().replace("AssertionError", "")


def assert_silent(outcome: Outcome) -> None:
    """Nothing raised, nothing reported."""
    assert (outcome.error, outcome.report) == (None, None)


# --- 1: a convolution classifier -----------------------------------------------------------------


def test_conv_example_1_a_batch_without_channels(sim: simulate.Simulation) -> None:
    """(64, 100) is read as one unbatched sample of 64 channels."""
    code = """
model = Conv1DModel(in_channels=1, out_channels=32).to("cuda")
input_data = torch.randn(64, 100).to("cuda")
try:
    output = model(input_data)
except AssertionError as e:
    print(e)
"""
    outcome = run(CONV + code)
    report = outcome.shown
    assert_host(outcome, "shape (64, 100) is read as one unbatched sample", "input", "x")
    assert report.op.api == "torch.nn.functional.conv1d"
    assert report.module_path == "conv1d"
    assert "(64, 1, 100)" in report.hints[0].text
    assert outcome.fixes == ["self.conv1d(x.unsqueeze(1))"]


def test_conv_example_2_integers_into_a_convolution(sim: simulate.Simulation) -> None:
    """The first call with .float() is fine, the second is refused."""
    code = """
model = nn.Conv1d(in_channels=1, out_channels=32, kernel_size=3).to("cuda")
input_data = torch.randint(0, 10, (64, 1, 100)).to("cuda")
output = model(input_data.float())
model(input_data)
"""
    outcome = run(code)
    assert outcome.names["output"].shape == (64, 32, 98)
    assert_host(outcome, "input is int64", "input", "input_data")
    assert outcome.fixes == ["model(input_data.float())"]


def test_conv_example_3_data_parallel(sim: simulate.Simulation) -> None:
    """It runs, on one device or several, and there is nothing to report."""
    code = """
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(Conv1DModel(1, 32)).to("cuda")
else:
    model = Conv1DModel(1, 32).to("cuda")
output = model(torch.randn(64, 1, 100).to("cuda"))
"""
    outcome = run(CONV + code, recorded=True)
    assert_silent(outcome)
    assert outcome.names["output"].shape == (64, 32, 98)


def test_conv_system_labels_beyond_the_classes(sim: simulate.Simulation) -> None:
    """The real assert of the classifier is a class label outside [0, C - 1]."""
    code = """
model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 98, 5)).to("cuda")
x = torch.randn(20, 1, 100).to("cuda")
y = torch.arange(20).remainder(5).add(1).to("cuda")
loss = F.cross_entropy(model(x), y)
"""
    report = run(code, recorded=True).shown
    assert (report.kind, report.argument, report.expression) == ("device_assert", "target", "y")
    assert report.headline == "target[4] = 5 is outside the 5 classes of input"
    assert any("y - 1" in (hint.fix or "") for hint in report.hints)


# --- 2: losses -----------------------------------------------------------------------------------


def test_loss_example_1_shapes_of_bce(sim: simulate.Simulation) -> None:
    """A ValueError on the host; the range of the random targets is never checked."""
    code = """
target = torch.randn(10, 1)
prediction = torch.randn(10)
loss_fn = nn.BCEWithLogitsLoss()
loss = loss_fn(prediction, target)
"""
    outcome = run(code)
    assert isinstance(outcome.error, ValueError)
    assert_host(outcome, "target has shape (10, 1), input has (10,)", "target", "target")
    assert outcome.fixes == ["loss_fn(prediction, target.squeeze(1))"]


def test_loss_example_2_a_sum_after_reshape(sim: simulate.Simulation) -> None:
    """The same value twice, and nothing to report."""
    code = """
target, prediction = torch.randn(10), torch.randn(10)
loss_fn = nn.MSELoss(reduction="sum")
loss = loss_fn(prediction, target)
again = loss_fn(prediction.reshape(2, 5), target.reshape(2, 5))
"""
    outcome = run(code, recorded=True)
    assert_silent(outcome)
    assert outcome.names["loss"].item() == pytest.approx(outcome.names["again"].item())


def test_loss_example_3_two_devices(sim: simulate.Simulation) -> None:
    """Uncaught: both tensors with their devices.  Caught by the example itself: silence."""
    code = """
target = torch.randn(10).cpu()
prediction = torch.randn(10).cuda()
loss_fn = nn.MSELoss()
loss_fn(prediction, target)
"""
    outcome = run(code)
    assert_host(outcome, "target is on cpu, input is on cuda:0", "target", "target")
    assert outcome.fixes == ["loss_fn(prediction, target.to(prediction.device))"]
    devices = {item.expression: item.device for item in outcome.shown.tensors}
    assert devices == {"prediction": "cuda:0", "target": "cpu"}
    caught = code.replace("\nloss_fn(", "\ntry:\n    loss_fn(") + "except RuntimeError: pass\n"
    assert_silent(run(caught))


def test_loss_system_probabilities(sim: simulate.Simulation) -> None:
    """The assert that BCE really has: an input outside [0, 1]."""
    code = """
z = torch.tensor([0.5, 1.5, -0.5], device="cuda")
loss = F.binary_cross_entropy(z, torch.ones(3, device="cuda"))
"""
    report = run(code).shown
    assert report.kind == "device_assert"
    assert "1.5" in report.headline
    assert report.expression == "z"


# --- 3: LayoutLMv3 -------------------------------------------------------------------------------

LAYOUT = """
import transformers as tr
config = tr.LayoutLMv3Config(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30,
    max_position_embeddings=20, max_2d_position_embeddings=1024, coordinate_size=3, shape_size=2,
    input_size=16, patch_size=8, visual_embed=False, pad_token_id=1)
model = tr.LayoutLMv3Model(config).cuda()
ids = torch.full((2, 8), 3, device="cuda")
"""


def test_layout_example_1_as_printed_is_no_python(sim: simulate.Simulation) -> None:
    """``...`` inside a dict display is a SyntaxError; names of a class are unknown outside it."""
    outcome = run('x = {"a": 1, ...}')
    assert isinstance(outcome.error, SyntaxError)
    assert outcome.report is None
    outcome = run("loader = DataLoader([1], batch_size=self.batch_size)")
    assert isinstance(outcome.error, NameError)
    assert outcome.report is None


def test_layout_example_1_completed(sim: simulate.Simulation) -> None:
    """The model has no such arguments and got none of those that it starts from."""
    outcome = run(
        LAYOUT
        + """
x = torch.randn(8, 2, 16).cuda()
batch = {"image_features": x, "text_embeddings": x}
model(**batch)
"""
    )
    assert_host(outcome, "LayoutLMv3Model got none of input_ids, inputs_embeds", "input_ids", None)


def test_layout_example_2_an_array_in_place_of_a_tensor(sim: simulate.Simulation) -> None:
    """Argument, type and dtype; in a layer and in the library's model."""
    code = "a = np.random.rand(2, 4, 16)\nnn.Linear(16, 4).cuda()(a)"
    outcome = run(code)
    assert isinstance(outcome.error, TypeError)
    assert_host(outcome, "input is a numpy.ndarray of float64 (2, 4, 16)", "input", None)
    assert outcome.fixes == ['torch.from_numpy(a).float().to("cuda:0")']
    outcome = run(LAYOUT + "a = np.ones((2, 8), dtype=int)\nmodel(input_ids=a)")
    assert_host(outcome, "input_ids is a numpy.ndarray of int64 (2, 8)", "input_ids", None)


def test_layout_example_3_a_mask_column(sim: simulate.Simulation) -> None:
    """An IndexError at the assignment, on every device, with the last valid index."""
    for device in ("cpu", "cuda"):
        code = f"""
batch_size, sequence_length = 2, 8
attention_mask = torch.ones(batch_size, sequence_length, device="{device}")
attention_mask[:, sequence_length + 1] = 1
"""
        outcome = run(code)
        assert isinstance(outcome.error, IndexError)
        assert_host(
            outcome,
            "index 9 is out of bounds for dimension 1 with size 8: the last valid index is 7",
            "indices",
            None,
        )


def test_layout_system_boxes_in_pixels(sim: simulate.Simulation) -> None:
    """A box value beyond 1023 is a lookup beyond the table; the page size mends it."""
    report = run(
        LAYOUT
        + "bbox = torch.full((2, 8, 4), 1500, device='cuda')\nmodel(input_ids=ids, bbox=bbox)"
    ).shown
    assert report.kind == "device_assert"
    assert "= 1500 is outside the 1024 rows" in report.headline
    assert any("page" in hint.text for hint in report.hints)


def test_layout_system_at_the_bound(sim: simulate.Simulation) -> None:
    """1023 is the last coordinate."""
    code = "bbox = torch.full((2, 8, 4), 1023, device='cuda')\nmodel(input_ids=ids, bbox=bbox)"
    assert_silent(run(LAYOUT + code))


# --- 4: backward ---------------------------------------------------------------------------------


def test_backward_example_1_division_by_zero(sim: simulate.Simulation) -> None:
    """No exception: backward succeeds, every gradient is infinite.  Nothing asserts."""
    code = """
def model_forward(x):
    y = torch.rand_like(x)
    return x / (y - y)

x = torch.randn(10, requires_grad=True, device="cuda")
loss = model_forward(x).mean()
loss.backward()
"""
    outcome = run(code, recorded=True)
    assert_silent(outcome)
    assert bool(outcome.names["x"].grad.cpu().isinf().all())


def test_backward_example_2_clamp_of_a_result(sim: simulate.Simulation) -> None:
    """As printed nothing is wrong: sub saves nothing, and log saves x after the clamp."""
    code = """
def model_forward(x):
    x.clamp_(min=1e-6)
    return x.log()

x = torch.randn(10, requires_grad=True, device="cuda") - 2
loss = model_forward(x).mean()
loss.backward()
"""
    assert_silent(run(code, recorded=True))


def test_backward_example_2_clamp_of_a_leaf(sim: simulate.Simulation) -> None:
    """The variant that fails at once."""
    code = 'x = torch.randn(10, requires_grad=True, device="cuda")\nx.clamp_(min=1e-6)'
    report = run(code).shown
    assert report.kind == "autograd_error"
    assert report.headline == "x is a leaf that requires grad, and clamp_ changes it in place"


def test_backward_example_2_clamp_of_a_saved_result(sim: simulate.Simulation) -> None:
    """The variant that fails in backward: the line, the op that saved it, both versions."""
    code = """
x = torch.randn(10, requires_grad=True, device="cuda")
y = x.exp()
y.clamp_(min=1e-6)
y.mean().backward()
"""
    outcome = run(code, recorded=True)
    report = outcome.shown
    assert (report.kind, report.phase) == ("autograd_error", "backward")
    assert "y.clamp_(min=1e-6) changed a tensor that backward needs" in report.headline
    assert "version 1" in report.headline and "version 0" in report.headline
    assert "aten::exp" in report.explanation
    assert outcome.fixes == ["y = y.clamp(min=1e-06)"]


def test_backward_example_3_to_the_cpu_and_back(sim: simulate.Simulation) -> None:
    """Copies are differentiable: the gradient is 0.1 everywhere."""
    code = """
def model_forward(x):
    return x.cpu().mean().cuda()

x = torch.randn(10, requires_grad=True, device="cuda")
model_forward(x).mean().backward()
"""
    outcome = run(code, recorded=True)
    assert_silent(outcome)
    assert outcome.names["x"].grad.cpu().tolist() == pytest.approx([0.1] * 10)


def test_backward_system_a_graph_used_twice(sim: simulate.Simulation) -> None:
    """What really stops a backward pass is said to be autograd's, on the host."""
    code = """
w = torch.ones(3, device="cuda", requires_grad=True)
loss = w.exp().sum()
loss.backward()
loss.backward()
"""
    outcome = run(code, recorded=True)
    assert outcome.shown.kind == "autograd_error"
    assert outcome.shown.headline == (
        "loss leads into the graph of line 8, which backward in line 9 has freed"
    )


# --- 5: summarisation with BART ------------------------------------------------------------------

BART = """
import transformers as tr
config = tr.BartConfig(
    d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=30,
    max_position_embeddings=16)
model = tr.BartForConditionalGeneration(config).cuda()
ids = torch.full((2, 16), 3, device="cuda")
labels = torch.full((2, 6), 4, device="cuda")
"""


def test_bart_example_1_a_truncated_batch(sim: simulate.Simulation) -> None:
    """Padding and truncation are on: nothing fatal, also with padding in the labels."""
    assert_silent(run(BART + "labels[:, 4:] = 1\nmodel(input_ids=ids, labels=labels)"))


def test_bart_example_1_without_truncation(sim: simulate.Simulation) -> None:
    """The real failure: more tokens than positions."""
    report = run(
        BART + "x = torch.full((2, 20), 3).cuda()\nmodel(input_ids=x, labels=labels)"
    ).shown
    assert report.kind == "device_assert"
    assert report.module_path == "model.encoder.embed_positions"
    assert any("truncation=True" in (hint.fix or "") for hint in report.hints)


def test_bart_example_2_casts_do_nothing(sim: simulate.Simulation) -> None:
    """int64 to int64 and int32 ids are fine."""
    assert_silent(run(BART + "model(input_ids=ids.to(torch.long), labels=labels.to(torch.long))"))
    assert_silent(run(BART + "model(input_ids=ids.int(), decoder_input_ids=labels)"))


def test_bart_example_2_real_dtype_errors(sim: simulate.Simulation) -> None:
    """int32 labels and float ids are refused on the host."""
    outcome = run(BART + "y = labels.int()\nmodel(input_ids=ids, labels=y)")
    assert outcome.shown.headline == "target is int32, this call takes int64"
    outcome = run(BART + "x = ids.float()\nmodel(input_ids=x, labels=labels)")
    assert_host(outcome, "input is float32, embedding takes int64 or int32", "input", "x")
    assert outcome.fixes == ["model(input_ids=x.long(), labels=labels)"]


def test_bart_example_3_an_override_that_never_runs(sim: simulate.Simulation) -> None:
    """A factory returns a plain model; a slice beyond the end is a no-op."""
    code = """
hidden = model.get_encoder()(input_ids=ids).last_hidden_state
cut = hidden[:, :1024, :]
"""
    outcome = run(BART + code)
    assert_silent(outcome)
    assert outcome.names["cut"].shape == outcome.names["hidden"].shape


@pytest.mark.parametrize(
    ("code", "module", "value"),
    [
        ("model(input_ids=ids + 30, labels=labels)", "model.encoder.embed_tokens", 33),
        (
            "y = labels * 0 - 100\nmodel(input_ids=ids, decoder_input_ids=y)",
            "model.decoder.embed_tokens",
            -100,
        ),
    ],
)
def test_bart_system(code: str, module: str, value: int, sim: simulate.Simulation) -> None:
    """The real asserts: a tokenizer larger than the table, and -100 as a decoder id."""
    report = run(BART + code).shown
    assert (report.kind, report.module_path) == ("device_assert", module)
    assert f"= {value} is outside the 30 rows" in report.headline
    assert report.hints
