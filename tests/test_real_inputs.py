"""Four models with the mistakes that people really make, each once in a real Jupyter kernel.

One notebook holds them all: each failing cell stops with a report, and the next cell trains on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 180

SETUP = """\
%load_ext cudalens
import torch
from torch import nn
import torch.nn.functional as F
import cudalens
device = cudalens.ensure_cuda()
torch.manual_seed(0)
torch.set_num_threads(1)
"""

SIGNALS = """\
class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2))
        self.head = nn.Linear(8 * 16, classes)

    def forward(self, x):
        return self.head(self.features(x).flatten(1))

classes = 5
signals = torch.randn(40, 1, 32)
labels = torch.arange(40) % classes + 1
dataset = torch.utils.data.TensorDataset(signals, labels)
loader = torch.utils.data.DataLoader(dataset, batch_size=8)
model = Classifier(classes).to(device)
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.CrossEntropyLoss()

def epoch(shift):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device) - shift)
        loss.backward()
        optimizer.step()
    return float(loss)
"""

BERT = """\
from transformers import BertConfig, BertForSequenceClassification
config = BertConfig(
    vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=32, max_position_embeddings=64, num_labels=2,
)
torch.manual_seed(0)
bert = BertForSequenceClassification(config).to(device)
adam = torch.optim.AdamW(bert.parameters(), lr=1e-3)
added = {"[USER]": 100, "[BOT]": 101}
ids = torch.randint(5, 100, (4, 12))
ids[1, 0], ids[3, 0] = added["[USER]"], added["[BOT]"]
answers = torch.tensor([0, 1, 0, 1])

def tune():
    adam.zero_grad()
    out = bert(input_ids=ids.to(device), labels=answers.to(device))
    out.loss.backward()
    adam.step()
    return float(out.loss)
"""

SEGMENTATION = """\
class Unet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.out = nn.Conv2d(16, classes, 1)

    def forward(self, x):
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.middle(skip))], dim=1))

unet = Unet(21).to(device)
sgd = torch.optim.SGD(unet.parameters(), lr=0.1)
images = torch.randn(2, 3, 16, 16)
masks = torch.randint(0, 21, (2, 16, 16))
masks[:, 0, :] = 255

def segment(**options):
    sgd.zero_grad()
    scores = unet(images.to(device))
    loss = F.cross_entropy(scores, masks.to(device), **options)
    loss.backward()
    sgd.step()
    return float(loss)
"""

POLICY = """\
policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
learner = torch.optim.Adam(policy.parameters(), lr=1e-2)
states = torch.randn(6, 4)
broken = states.clone()
broken[2] = float("nan")

def play(states):
    probabilities = F.softmax(policy(states.to(device)), dim=1)
    actions = torch.multinomial(probabilities, 1)
    loss = -probabilities.gather(1, actions).log().mean()
    learner.zero_grad()
    loss.backward()
    learner.step()
    return float(loss)
"""


@dataclass(frozen=True)
class Case:
    """A failing cell and what its report has to say."""

    define: str
    fail: str
    mend: str
    headline: str
    line: str
    """The user's line that the report names."""
    hint: str
    also: tuple[str, ...] = ()


CASES = {
    "labels from one": Case(
        SIGNALS,
        "epoch(0)",
        "epoch(1)",
        "= 5 is outside the 5 classes",
        "loss = criterion(model(x.to(device)), y.to(device) - shift)",
        "1-based",
        also=("batch 1 of loader",),
    ),
    "tokens without a resize": Case(
        BERT,
        "tune()",
        "bert.resize_token_embeddings(102)\nadam = torch.optim.AdamW(bert.parameters())\ntune()",
        "= 100 is outside the 100 rows",
        "out = bert(input_ids=ids.to(device), labels=answers.to(device))",
        "resize_token_embeddings",
        also=("bert.embeddings.word_embeddings",),
    ),
    "255 in the masks": Case(
        SEGMENTATION,
        "segment()",
        "segment(ignore_index=255)",
        "= 255 is outside the 21 classes",
        "loss = F.cross_entropy(scores, masks.to(device), **options)",
        "ignore_index=255",
    ),
    "a policy that gives NaN": Case(
        POLICY,
        "play(broken)",
        "play(states)",
        "= nan is not a number",
        "actions = torch.multinomial(probabilities, 1)",
        "were NaN before this op",
    ),
}


@dataclass
class Played:
    """The three cells of a case after the run."""

    outputs: list[Any] = field(default_factory=list)
    replies: list[dict[str, Any]] = field(default_factory=list)

    def report(self) -> dict[str, str]:
        (shown,) = [item for item in self.outputs[1] if item["output_type"] == "display_data"]
        return dict(shown["data"])


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Played]]:
    """All cases in one kernel, one after the other."""
    cells = [SETUP]
    for case in CASES.values():
        cells += [case.define, f"%%cudacheck --no-widgets\n{case.fail}", case.mend]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    replies: list[dict[str, Any]] = []
    client = nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        allow_errors=True,
        on_cell_executed=lambda cell, cell_index, execute_reply: replies.append(
            execute_reply["content"]
        ),
    )
    client.execute(
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "IPYTHONDIR": str(tmp_path_factory.mktemp("ipython")),
            "OMP_NUM_THREADS": "1",
            "NO_COLOR": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
    )
    found = {}
    for number, name in enumerate(CASES):
        here = slice(1 + 3 * number, 4 + 3 * number)
        outputs = [cell.outputs for cell in notebook.cells[here]]
        found[name] = Played(outputs, replies[here])
    assert replies[0]["status"] == "ok"
    yield found


@pytest.mark.parametrize("name", CASES)
def test_the_cell_stops_with_an_error(played: dict[str, Played], name: str) -> None:
    """The definitions run, the checked cell has reply status error, and its kind is ours."""
    define, fail, _ = played[name].replies
    assert define["status"] == "ok", define
    assert fail["status"] == "error"
    assert fail["ename"] in {"DeviceIndexError", "DeviceValueError"}


@pytest.mark.parametrize("name", CASES)
def test_the_report_says_what_and_where(played: dict[str, Played], name: str) -> None:
    """The observed value, the user's line, and the line to change."""
    case, report = CASES[name], played[name].report()
    text = " ".join(report["text/plain"].split())
    assert set(report) == {"text/plain", "text/html"}
    assert case.headline in report["text/plain"].splitlines()[0]
    assert case.line in report["text/plain"]
    assert case.hint in text
    for part in case.also:
        assert part in text
    assert played[name].replies[1]["evalue"].splitlines()[0] in str(played[name].outputs[1])


@pytest.mark.parametrize("name", CASES)
def test_the_next_cell_trains_on(played: dict[str, Played], name: str) -> None:
    """CUDA is alive: a training step runs to its end and gives a finite loss."""
    assert played[name].replies[2]["status"] == "ok"
    (result,) = [
        item for item in played[name].outputs[2] if item["output_type"] == "execute_result"
    ]
    assert 0 <= float(result["data"]["text/plain"]) < 100
