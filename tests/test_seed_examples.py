"""Fifteen published examples and five systems said to cause CUDA asserts: what is true of each.

Where nothing is wrong the tool is silent; where torch refuses on the host it says so, and never
calls it an assert; where a real assert lies in wait the value is named before the launch.
"""

from __future__ import annotations

import builtins

import pytest

from tests.hostcells import Outcome, run_cell
from tests.releases import in_words_of_here

pytestmark = pytest.mark.usefixtures("sim")

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
LAYOUT = """
import transformers as tr
config = tr.LayoutLMv3Config(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30,
    max_position_embeddings=20, max_2d_position_embeddings=1024, coordinate_size=3, shape_size=2,
    input_size=16, patch_size=8, visual_embed=False, pad_token_id=1)
model = tr.LayoutLMv3Model(config).cuda()
ids = torch.full((2, 8), 3, device="cuda")
"""
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


def run(code: str, *, recorded: bool = False) -> Outcome:
    """Run an example under the full check, or under the guards only."""
    if "transformers" in code:
        pytest.importorskip("transformers")
    return run_cell(HEAD + code, fast=not recorded)


SILENT = """
== conv 3: data parallel, on one device or several
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(Conv1DModel(1, 32)).to("cuda")
else:
    model = Conv1DModel(1, 32).to("cuda")
assert model(torch.randn(64, 1, 100).to("cuda")).shape == (64, 32, 98)
== loss 2: a sum after reshape gives the same value twice
target, prediction = torch.randn(10), torch.randn(10)
loss_fn = nn.MSELoss(reduction="sum")
loss = loss_fn(prediction, target)
torch.testing.assert_close(loss, loss_fn(prediction.reshape(2, 5), target.reshape(2, 5)))
== loss 3: the example itself catches that it lies on two devices
try:
    nn.MSELoss()(torch.randn(10).cuda(), torch.randn(10).cpu())
except RuntimeError: pass
== layout system: 1023 is the last coordinate
bbox = torch.full((2, 8, 4), 1023, device='cuda')
model(input_ids=ids, bbox=bbox)
== backward 1: a division by zero succeeds, every gradient is infinite, nothing asserts
def model_forward(x):
    y = torch.rand_like(x)
    return x / (y - y)

x = torch.randn(10, requires_grad=True, device="cuda")
loss = model_forward(x).mean()
loss.backward()
assert bool(x.grad.cpu().isinf().all())
== backward 2: as printed nothing is wrong: sub saves nothing, and log saves x after the clamp
def model_forward(x):
    x.clamp_(min=1e-6)
    return x.log()

x = torch.randn(10, requires_grad=True, device="cuda") - 2
loss = model_forward(x).mean()
loss.backward()
== backward 3: copies to the CPU and back are differentiable
def model_forward(x):
    return x.cpu().mean().cuda()

x = torch.randn(10, requires_grad=True, device="cuda")
model_forward(x).mean().backward()
torch.testing.assert_close(x.grad.cpu(), torch.full((10,), 0.1))
== bart 1: padding and truncation are on, with padding in the labels
labels[:, 4:] = 1
model(input_ids=ids, labels=labels)
== bart 2: casts of int64 to int64
model(input_ids=ids.to(torch.long), labels=labels.to(torch.long))
== bart 2: int32 ids
model(input_ids=ids.int(), decoder_input_ids=labels)
== bart 3: an override that never runs, a slice beyond the end
hidden = model.get_encoder()(input_ids=ids).last_hidden_state
assert hidden[:, :1024, :].shape == hidden.shape
"""
REFUSED = """
== conv 2: integers into a convolution, after floats that are fine
model = nn.Conv1d(in_channels=1, out_channels=32, kernel_size=3).to("cuda")
input_data = torch.randint(0, 10, (64, 1, 100)).to("cuda")
assert model(input_data.float()).shape == (64, 32, 98)
model(input_data)
-- RuntimeError | input_data is int64 | input | input_data | model(input_data.float())
== conv 1: a batch without channels is read as one unbatched sample of 64 channels
model = Conv1DModel(in_channels=1, out_channels=32).to("cuda")
input_data = torch.randn(64, 100).to("cuda")
try:
    output = model(input_data)
except AssertionError as e:
    print(e)
-- RuntimeError | but got 64 channels instead: x is [64, 100] | input | x | \
self.conv1d(x.unsqueeze(1))
== loss 3: two devices
target = torch.randn(10).cpu()
prediction = torch.randn(10).cuda()
loss_fn = nn.MSELoss()
loss_fn(prediction, target)
-- RuntimeError | target is on cpu, prediction is on cuda:0 | target | target | \
loss_fn(prediction, target.to(prediction.device))
== bart 2: int32 labels
y = labels.int()
model(input_ids=ids, labels=y)
-- RuntimeError | expected target dtype to be int64 or uint8, but got int32 | target
== loss 1: shapes of BCE; the range of the random targets is never checked
target = torch.randn(10, 1)
prediction = torch.randn(10)
loss_fn = nn.BCEWithLogitsLoss()
loss = loss_fn(prediction, target)
-- ValueError | prediction is [10], target is [10, 1] | target | target | loss_fn(prediction, \
target.squeeze(1))
== layout 1: completed, the model got none of what it starts from
x = torch.randn(8, 2, 16).cuda()
batch = {"image_features": x, "text_embeddings": x}
model(**batch)
-- ValueError | specify either input_ids or inputs_embeds or pixel_values | None
== layout 2: an array in place of a tensor, in the library's model
a = np.ones((2, 8), dtype=int)
model(input_ids=a)
-- Exception | a is a numpy.ndarray of int64 [2, 8] | None
== array 2: the same in a layer
a = np.random.rand(2, 4, 16)
nn.Linear(16, 4).cuda()(a)
-- TypeError | a is a numpy.ndarray of float64 [2, 4, 16] | input | - | \
nn.Linear(16, 4).cuda()(torch.from_numpy(a).float().to("cuda:0"))
== mask 3: a column of a mask on the CPU
mask = torch.ones(2, 8)
mask[:, 8 + 1] = 1
-- IndexError | index 9 is out of bounds for dimension 1 with size 8: mask is [2, 8] | None
== mask 3: a column of a mask on the device
mask = torch.ones(2, 8, device="cuda")
mask[:, 8 + 1] = 1
-- IndexError | index 9 is out of bounds for dimension 1 with size 8: mask is [2, 8] | None
== bart 2: float ids
x = ids.float()
model(input_ids=x, labels=labels)
-- Exception | types: int64, int32; but got float32 tensor on cuda instead | input | x | \
model(input_ids=x.long(), labels=labels)
"""
STOPPED = """
== conv system: class labels beyond the classes
model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 98, 5)).to("cuda")
x = torch.randn(20, 1, 100).to("cuda")
y = torch.arange(20).remainder(5).add(1).to("cuda")
loss = F.cross_entropy(model(x), y)
-- device_assert | forward | target[4] = 5 is outside the 5 classes of input | y - 1
== loss system: the assert that BCE really has, an input outside [0, 1]
z = torch.tensor([0.5, 1.5, -0.5], device="cuda")
loss = F.binary_cross_entropy(z, torch.ones(3, device="cuda"))
-- device_assert | forward | z[1] = 1.5 is outside
== layout system: a box in pixels is a lookup beyond the table; the page size mends it
bbox = torch.full((2, 8, 4), 1500, device='cuda')
model(input_ids=ids, bbox=bbox)
-- device_assert | forward | = 1500 is outside the 1024 rows | page
== backward 2: clamp of a leaf
x = torch.randn(10, requires_grad=True, device="cuda")
x.clamp_(min=1e-6)
-- autograd_error | forward | requires grad is being used in an in-place operation: x
== backward 2: clamp of a saved result: the line, the op that saved it, both versions
x = torch.randn(10, requires_grad=True, device="cuda")
y = x.exp()
y.clamp_(min=1e-6)
y.mean().backward()
-- autograd_error | backward | y.clamp_(min=1e-6) in line | changed y, which backward needs | \
version 1 | version 0 | y = x.exp() | out_of_place
== backward system: a graph used twice is autograd's error, on the host
w = torch.ones(3, device="cuda", requires_grad=True)
loss = w.exp().sum()
loss.backward()
loss.backward()
-- autograd_error | backward | loss depends on the graph of line 7, which line 8 has freed
== bart 1: more tokens than positions, without truncation
x = torch.full((2, 20), 3).cuda()
model(input_ids=x, labels=labels)
-- device_assert | forward | model.encoder.embed_positions | max_length=16
== bart system: a tokenizer larger than the table
model(input_ids=ids + 30, labels=labels)
-- device_assert | forward | = 33 is outside the 30 rows | model.encoder.embed_tokens | \
ids is 3, -30 … -1 fits
== bart system: -100 as a decoder id
y = labels * 0 - 100
model(input_ids=ids, decoder_input_ids=y)
-- device_assert | forward | = -100 is outside the 30 rows | model.decoder.embed_tokens | \
"rule": "
"""
"""What a report says of each: its kind and phase, and words of its text or its JSON."""
MODELS = {"conv": CONV, "layout": LAYOUT, "bart": BART}


def examples(text: str) -> dict[str, tuple[str, str]]:
    """Return the code of each example, behind the model that its title names, and what is said."""
    found = {}
    for part in text.split("\n== ")[1:]:
        title, _, body = part.partition("\n")
        code, _, said = body.partition("\n-- ")
        found[title] = (MODELS.get(title.split()[0], "") + code, said.strip())
    return found


@pytest.mark.parametrize(("code", "said"), examples(SILENT).values(), ids=examples(SILENT))
def test_nothing_is_said_of_what_runs(code: str, said: str) -> None:
    outcome = run(code, recorded=True)
    assert (outcome.error, outcome.report, said) == (None, None, "")


@pytest.mark.parametrize(("code", "said"), examples(REFUSED).values(), ids=examples(REFUSED))
def test_what_torch_refuses_is_explained(code: str, said: str) -> None:
    """As an error of the host: nothing of it is called an assert."""
    outcome = run(code)
    kind, headline, *names = said.split(" | ")
    argument, *more = [None if word == "None" else word for word in names]
    report = outcome.shown
    assert isinstance(outcome.error, getattr(builtins, kind))
    assert report.kind == "host_error"
    told = in_words_of_here(headline)
    assert all(text in report.headline for text in told)
    expression = next((word for word in more[:1] if word != "-"), None)
    argument = argument if told == [headline] else None  # earlier words name none
    assert (report.argument, report.expression) == (argument, expression)
    told = f"{report.headline} {report.explanation}"
    assert "assert" not in told.replace("AssertionError", "")
    assert outcome.fixes == more[1:] or not more[1:]


@pytest.mark.parametrize(("code", "said"), examples(STOPPED).values(), ids=examples(STOPPED))
def test_what_asserts_or_fails_in_backward_is_found(code: str, said: str) -> None:
    report = run(code, recorded=True).shown
    kind, phase, *words = said.split(" | ")
    assert (report.kind, report.phase) == (kind, phase)
    told = f"{report.headline_schema}\n{report.to_text(width=1000)}\n{report.to_json()}"
    assert [word for word in words if word not in told] == []


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ('x = {"a": 1, ...}', SyntaxError),
        ("loader = DataLoader([1], batch_size=self.batch_size)", NameError),
    ],
)
def test_layout_example_1_as_printed_is_no_python(code: str, error: type[Exception]) -> None:
    """``...`` inside a dict display is a SyntaxError; names of a class are unknown outside it."""
    outcome = run(code)
    assert isinstance(outcome.error, error)
    assert outcome.report is None
