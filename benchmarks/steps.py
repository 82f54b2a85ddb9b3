"""The training steps that overhead is measured on: small ones, where it shows at its worst."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F  # noqa: N812  torch's own custom

Step = Callable[[], Any]


@dataclass(frozen=True)
class Workload:
    """A training step that a measurement repeats."""

    name: str
    description: str
    make: Callable[[str], TrainingStep]
    """Builds the model and its data on a device, and gives the step."""
    is_large: bool = False
    """Only the ways to run cudalens itself are measured on it."""


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """Forward, backward and optimizer over one fixed batch."""

    model: nn.Module
    inputs: dict[str, Tensor]
    loss_of: Callable[[Any], Tensor]
    """Takes what the model gives."""
    optimizer: torch.optim.Optimizer

    def __call__(self) -> float:
        """Train once; return the loss."""
        self.optimizer.zero_grad()
        loss = self.loss_of(self.forward())
        loss.backward()
        self.optimizer.step()
        return loss.detach().item()

    def forward(self) -> Any:
        """Run the model alone."""
        return self.model(**self.inputs)


class SmallTransformer(nn.Module):
    """Two encoder layers over one embedding, with a class for each position."""

    def __init__(self, classes: int = 50, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.token = nn.Embedding(classes, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.token(tokens) + self.position))


class SmallConvNet(nn.Module):
    """Three convolution blocks over 32 x 32 pixels."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for before, after in ((3, 8), (8, 16), (16, 32)):
            blocks += [
                nn.Conv2d(before, after, 3, padding=1),
                nn.BatchNorm2d(after),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(32 * 4 * 4, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(images).flatten(1))


class TinyGraphNet(nn.Module):
    """Two graph convolutions over 34 nodes: messages are gathered and added by index."""

    def __init__(self, features: int = 34, hidden: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(features, hidden, bias=False)
        self.second = nn.Linear(hidden, classes, bias=False)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden = F.dropout(self._pass_on(self.first(nodes), edges).relu(), 0.5, self.training)
        return self._pass_on(self.second(hidden), edges)

    @staticmethod
    def _pass_on(nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        degree = torch.zeros(len(nodes), device=nodes.device)
        degree = degree.scatter_add(0, target, torch.ones(len(target), device=nodes.device))
        weight = degree.clamp(min=1).pow(-0.5)
        messages = nodes[source] * (weight[source] * weight[target]).unsqueeze(1)
        return torch.zeros_like(nodes).index_add(0, target, messages)


class Policy(nn.Module):
    """A policy that acts one state at a time, as in the reinforcement learning examples."""

    def __init__(self, observations: int = 4, hidden: int = 128, actions: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(observations, hidden)
        self.second = nn.Linear(hidden, actions)

    def forward(self, states: Tensor) -> Tensor:
        """Return the logarithm of the probability of each action that was drawn."""
        chosen, score = [], 0
        for state in states:
            hidden = F.dropout(self.first(state.unsqueeze(0)), 0.6, self.training).relu()
            choice = Categorical(F.softmax(self.second(hidden), dim=1))
            action = choice.sample()
            chosen.append(choice.log_prob(action))
            score += int(action.item())  # the environment runs on the host
        return torch.cat(chosen)


class Recurrent(nn.Module):
    """A cell called in a loop over time, with a class for each sample at the end."""

    def __init__(self, letters: int = 27, width: int = 32, classes: int = 18) -> None:
        super().__init__()
        self.token = nn.Embedding(letters, width)
        self.cell = nn.GRUCell(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.zeros(len(tokens), self.cell.hidden_size, device=tokens.device)
        for at in range(tokens.shape[1]):
            hidden = self.cell(self.token(tokens[:, at]), hidden)
        return self.head(hidden)


class SizedTransformer(nn.Module):
    """Layers of a well-known model's size, where transformers is not installed to build it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.length, size.width)
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(size.width, size.classes or size.vocabulary)
        self.is_decoder = not size.classes

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a class for each row, or the next token for each place."""
        length, mask = tokens.shape[1], None
        if self.is_decoder:
            mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        places = torch.arange(length, device=tokens.device)
        hidden = self.encoder(self.token(tokens) + self.position(places), mask=mask)
        return self.head(hidden if self.is_decoder else hidden[:, 0])


@dataclass(frozen=True, kw_only=True)
class Size:
    """Dimensions of a transformer and of its batches; without classes it predicts tokens."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    inner: int
    classes: int = 0


def _training(
    model: nn.Module,
    inputs: dict[str, Tensor],
    loss_of: Callable[[Any], Tensor],
    device: str,
) -> TrainingStep:
    model = model.to(device)
    return TrainingStep(
        model=model,
        inputs={name: tensor.to(device) for name, tensor in inputs.items()},
        loss_of=loss_of,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
    )


def _entropy(labels: Tensor) -> Callable[[Tensor], Tensor]:
    def loss_of(scores: Tensor) -> Tensor:
        return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.flatten())

    return loss_of


def transformer(device: str) -> TrainingStep:
    torch.manual_seed(0)
    tokens, labels = (torch.randint(0, 50, (8, 32)) for _ in range(2))
    return _training(SmallTransformer(), {"tokens": tokens}, _entropy(labels.to(device)), device)


def conv(device: str) -> TrainingStep:
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    return _training(SmallConvNet(), {"images": images}, _entropy(labels.to(device)), device)


def graph(device: str) -> TrainingStep:
    torch.manual_seed(0)
    edges, labels = torch.randint(0, 34, (2, 156)), torch.randint(0, 4, (34,))
    inputs = {"nodes": torch.eye(34), "edges": edges}
    return _training(TinyGraphNet(), inputs, _entropy(labels.to(device)), device)


def policy(device: str) -> TrainingStep:
    torch.manual_seed(0)
    states, returns = torch.randn(20, 4), torch.randn(20).to(device)
    return _training(Policy(), {"states": states}, lambda chosen: -(chosen * returns).sum(), device)


def recurrent(device: str) -> TrainingStep:
    torch.manual_seed(0)
    tokens, labels = torch.randint(0, 27, (8, 12)), torch.randint(0, 18, (8,))
    return _training(Recurrent(), {"tokens": tokens}, _entropy(labels.to(device)), device)


def has_transformers() -> bool:
    return importlib.util.find_spec("transformers") is not None


def sized(device: str, size: Size) -> TrainingStep:
    """Return a step of BERT or GPT-2 in some size, random weights and all."""
    torch.manual_seed(0)
    tokens = torch.randint(0, size.vocabulary, (size.batch, size.length))
    labels = torch.randint(0, size.classes, (size.batch,)) if size.classes else tokens
    if not has_transformers():
        model = SizedTransformer(size)
        return _training(model, {"tokens": tokens}, _entropy(labels.to(device)), device)
    inputs = {"input_ids": tokens, "labels": labels}
    make = _bert if size.classes else _gpt2
    return _training(make(size), inputs, lambda found: found.loss, device)


def _bert(size: Size) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.inner,
        num_labels=size.classes,
        # Attention in plain ops, so that the number of ops does not depend on the release.
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config)


def _gpt2(size: Size) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary, n_embd=size.width, n_layer=size.layers, n_head=size.heads
    )
    return GPT2LMHeadModel(config)


TINY_BERT = Size(
    layers=2, width=64, heads=2, vocabulary=1000, batch=8, length=32, inner=128, classes=3
)
BERT_BASE = Size(
    layers=12, width=768, heads=12, vocabulary=30522, batch=32, length=128, inner=3072, classes=3
)
GPT2_MEDIUM = Size(
    layers=24, width=1024, heads=16, vocabulary=50257, batch=8, length=256, inner=4096
)

SMALL = (
    Workload("transformer", "2-layer transformer, batch 8, width 64, length 32", transformer),
    Workload("conv", "3 convolution blocks, batch 8, 32 x 32 pixels", conv),
    Workload(
        "tiny_bert",
        "BERT with 2 layers of width 64, embeddings and cross entropy, batch 8",
        partial(sized, size=TINY_BERT),
    ),
    Workload("graph", "graph network: 2 layers over 34 nodes and 156 edges", graph),
    Workload("policy", "policy gradient: 20 states, one at a time", policy),
    Workload("recurrent", "recurrent loop: a GRU cell over 12 letters, batch 8", recurrent),
)
LARGE = (
    Workload("bert_base", "BERT-base, batch 32, length 128", partial(sized, size=BERT_BASE), True),
    Workload(
        "gpt2_medium", "GPT-2 medium, batch 8, length 256", partial(sized, size=GPT2_MEDIUM), True
    ),
)
WORKLOADS = {workload.name: workload for workload in SMALL + LARGE}


def workloads(device: str) -> tuple[Workload, ...]:
    """Return the steps for a device: the large ones only where there is a GPU."""
    return SMALL + LARGE if device == "cuda" else SMALL
