"""The training steps that overhead is measured on: small ones, where it shows at its worst."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  torch's own custom

Step = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training step that a measurement repeats."""

    name: str
    description: str
    make: Callable[[str], Step]
    """Builds the model and its data on a device, and gives the step."""


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


def training_step(
    model: nn.Module, data: tuple[Tensor, ...], loss_of: Callable[..., Tensor], lr: float = 1e-3
) -> Step:
    """Give a step of forward, backward and optimizer over one fixed batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, *data)
        loss.backward()
        optimizer.step()
        return loss.detach().item()

    return step


def _token_loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def _image_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def transformer(device: str) -> Step:
    torch.manual_seed(0)
    model = SmallTransformer().to(device)
    data = tuple(torch.randint(0, 50, (8, 32), device=device) for _ in range(2))
    return training_step(model, data, _token_loss)


def conv(device: str) -> Step:
    torch.manual_seed(0)
    model = SmallConvNet().to(device)
    images = torch.randn(8, 3, 32, 32, device=device)
    return training_step(model, (images, torch.randint(0, 10, (8,), device=device)), _image_loss)


def _bert(device: str, batch: int, length: int, **sizes: int) -> Step:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    # Attention in plain ops, so that the number of ops does not depend on the release.
    config = BertConfig(num_labels=3, attn_implementation="eager", **sizes)
    model = BertForSequenceClassification(config).to(device)
    tokens = torch.randint(0, config.vocab_size, (batch, length), device=device)
    labels = torch.randint(0, 3, (batch,), device=device)

    def loss_of(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=labels).loss

    return training_step(model, (tokens, labels), loss_of)


def tiny_bert(device: str) -> Step:
    return _bert(
        device,
        8,
        32,
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
    )


def bert_base(device: str) -> Step:
    return _bert(device, 32, 128)


def gpt2_medium(device: str) -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16)
    model = GPT2LMHeadModel(config).to(device)
    tokens = torch.randint(0, config.vocab_size, (8, 256), device=device)

    def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    return training_step(model, (tokens,), loss_of)


SMALL = (
    Workload(
        name="transformer",
        description="2-layer transformer, batch 8, width 64, length 32",
        make=transformer,
    ),
    Workload(name="conv", description="3 convolution blocks, batch 8, 32 x 32 pixels", make=conv),
    Workload(
        name="tiny_bert",
        description="BERT with 2 layers of width 64, embeddings and cross entropy, batch 8",
        make=tiny_bert,
    ),
)
LARGE = (
    Workload(name="bert_base", description="BERT-base, batch 32, length 128", make=bert_base),
    Workload(name="gpt2_medium", description="GPT-2 medium, batch 8, length 256", make=gpt2_medium),
)


def workloads(device: str) -> tuple[Workload, ...]:
    """Give the steps for a device: the large ones only where there is a GPU."""
    return SMALL + LARGE if device == "cuda" else SMALL
