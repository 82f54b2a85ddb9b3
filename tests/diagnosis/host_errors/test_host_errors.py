"""torch's own exceptions are put into words: one case per family, each with a silent neighbour."""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from cudalens import simulate
from cudalens.core.evidence_types import ModifiedTensor
from cudalens.core.report import ErrorFacts, Evidence
from cudalens.core.report_types import (
    CodeLine,
    LineRef,
    OpName,
    ProvenanceStep,
    SourceSpan,
    TensorFact,
)
from cudalens.diagnosis import host_errors
from cudalens.diagnosis.diagnose import diagnose
from cudalens.diagnosis.host_errors import products
from tests.diagnosis.host_errors import test_cuda_errors
from tests.hostcells import run_cell

SETUP = """
import torch, numpy as np
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A failing line, what must be said of it, and a line like it where nothing is wrong."""

    family: str
    setup: str = ""
    bad: str
    good: str
    headline: str
    argument: str | None = None
    expression: str | None = None
    fix: str | None = None
    kind: str = "host_error"


CASES = [
    Case(
        family="conv_channels",
        setup="x = torch.randn(64, 100, device='cuda'); m = nn.Conv1d(1, 32, 3).cuda()",
        bad="m(x)",
        good="m(x.unsqueeze(1))",
        headline="input has 64 channels, the weight takes 1: "
        "shape (64, 100) is read as one unbatched sample",
        argument="input",
        expression="x",
        fix="m(x.unsqueeze(1))",
    ),
    Case(
        family="conv_channels",
        setup="x = torch.randn(8, 28, 28, 3, device='cuda'); m = nn.Conv2d(3, 8, 3).cuda()",
        bad="m(x)",
        good="m(x.permute(0, 3, 1, 2))",
        headline="input has 28 channels, the weight takes 3",
        argument="input",
        expression="x",
        fix="m(x.permute(0, 3, 1, 2))",
    ),
    Case(
        family="conv_channels",
        setup="x = torch.randn(8, 5, 30, device='cuda'); m = nn.Conv1d(4, 8, 3).cuda()",
        bad="m(x)",
        good="m(x[:, :4])",
        headline="input has 5 channels, the weight takes 4",
        argument="input",
        expression="x",
        fix="in_channels=5",
    ),
    Case(
        family="conv_dimensions",
        setup="x = torch.randn(3, device='cuda'); m = nn.Conv2d(3, 8, 3).cuda()",
        bad="m(x)",
        good="m(x.expand(1, 9, 9, 3).permute(0, 3, 1, 2))",
        headline="input has 1 dimension, conv2d takes 4, or 3 for one sample",
        argument="input",
        expression="x",
    ),
    Case(
        family="conv_kernel_size",
        setup="x = torch.randn(8, 3, 2, 3, device='cuda'); m = nn.Conv2d(3, 8, 3).cuda()",
        bad="m(x)",
        good="m(torch.randn(8, 3, 3, 3, device='cuda'))",
        headline="input is (2, 3) with its padding, smaller than the kernel (3, 3)",
        argument="input",
        expression="x",
    ),
    Case(
        family="matrix_product",
        setup="x = torch.randn(4, 10, device='cuda'); m = nn.Linear(8, 2).cuda()",
        bad="m(x)",
        good="m(x[:, :8])",
        headline="input has 10 features in its last dimension, Linear takes 8: its shape is (4, "
        "10)",
        argument="input",
        expression="x",
        fix="nn.Linear(10, 2)",
    ),
    Case(
        family="matrix_product",
        setup="x = torch.randn(4, 2, 3, 3, device='cuda'); m = nn.Linear(18, 2).cuda()",
        bad="m(x)",
        good="m(x.flatten(1))",
        headline="input has 3 features in its last dimension, Linear takes 18",
        argument="input",
        expression="x",
        fix="m(x.flatten(1))",
    ),
    Case(
        family="matrix_product",
        setup="logits = torch.randn(4, 3, device='cuda'); w = torch.randn(5, 3, device='cuda')",
        bad="logits @ w",
        good="logits @ w.T",
        headline="logits has 3 columns and w has 5 rows: (4, 3) and (5, 3) cannot be multiplied",
        argument="other",
        expression="w",
        fix="logits @ w.T",
    ),
    Case(
        family="batched_product",
        setup="a = torch.randn(2, 4, 3, device='cuda'); b = torch.randn(2, 5, 3, device='cuda')",
        bad="torch.bmm(a, b)",
        good="torch.bmm(a, b.transpose(1, 2))",
        headline="the matrices of a have 3 columns, those of b 5 rows: (2, 4, 3) and (2, 5, 3)",
        argument="mat2",
        expression="b",
        fix="torch.bmm(a, b.transpose(1, 2))",
    ),
    Case(
        family="product_dimensions",
        setup="a = torch.randn(3, 4, device='cuda'); b = torch.randn(2, 4, 5, device='cuda')",
        bad="torch.bmm(a, b)",
        good="torch.matmul(a, b)",
        headline="a must have 3 dimensions for this product: its shape is (3, 4)",
        argument="self",
        expression="a",
    ),
    Case(
        family="matrix_vector",
        setup="a = torch.randn(3, 4, device='cuda'); b = torch.randn(5, device='cuda')",
        bad="a @ b",
        good="a @ b[:4]",
        headline="a has 4 columns and b has 5 elements",
        argument="other",
        expression="b",
    ),
    Case(
        family="dot_length",
        setup="a = torch.randn(3, device='cuda'); b = torch.randn(4, device='cuda')",
        bad="torch.dot(a, b)",
        good="torch.dot(a, b[:3])",
        headline="the vectors have 3 and 4 elements",
        argument="tensor",
        expression="b",
    ),
    Case(
        family="einsum_subscript",
        setup="a = torch.randn(3, 4, device='cuda'); b = torch.randn(5, 2, device='cuda')",
        bad="torch.einsum('ij,jk->ik', a, b)",
        good="torch.einsum('ij,kl->ik', a, b)",
        headline="subscript j is 5 in operand 1 and 4 in an operand before it",
        argument="operands[1]",
    ),
    Case(
        family="broadcast",
        setup="a = torch.randn(3, 4, device='cuda'); b = torch.randn(3, device='cuda')",
        bad="a + b",
        good="a + b[:, None]",
        headline="a (3, 4) and b (3,) do not broadcast: 4 meets 3 in dimension 1 of the result",
        argument="other",
        expression="b",
    ),
    Case(
        family="broadcast",
        setup="q = torch.ones(1, 2, 5, 4, device='cuda'); k = torch.zeros(1, 1, 7, 7, "
        "device='cuda')",
        bad="F.scaled_dot_product_attention(q, q, q, attn_mask=k)",
        good="F.scaled_dot_product_attention(q, q, q, attn_mask=k[..., :5, :5])",
        headline="attn_mask has 7 where the attention scores have 5: its shape is (1, 1, 7, 7)",
        argument="attn_mask",
        expression="k",
    ),
    Case(
        family="view_numel",
        setup="a = torch.ones(4, 6, device='cuda')",
        bad="a.view(5, 5)",
        good="a.view(8, 3)",
        headline="24 elements of shape (4, 6) do not fill (5, 5), which takes 25",
        argument="size",
    ),
    Case(
        family="view_stride",
        setup="a = torch.ones(4, 6, device='cuda').t()",
        bad="a.view(-1)",
        good="a.reshape(-1)",
        headline="the elements do not lie in memory in the order that this view needs: "
        "shape (6, 4) with stride (1, 6)",
        argument="self",
        expression="a",
        fix="a.reshape(-1)",
    ),
    Case(
        family="cat_sizes",
        setup="a = torch.ones(4, 6, device='cuda'); b = torch.ones(4, 5, device='cuda')",
        bad="torch.cat([a, b])",
        good="torch.cat([a, b], dim=1)",
        headline="tensors[1] has size 5 where the first has 6: (4, 6) and (4, 5)",
        argument="tensors[1]",
        expression="b",
    ),
    Case(
        family="expand_size",
        setup="a = torch.ones(4, 6, device='cuda')",
        bad="a.expand(4, 7)",
        good="a[:, :1].expand(4, 7)",
        headline="a tensor of shape (4, 6) is expanded to (4, 7): 6 meets 7 in dimension 1",
        argument="self",
        expression="a",
    ),
    Case(
        family="written_shape",
        setup="a = torch.ones(4, 6, device='cuda'); i = torch.tensor([0, 1], device='cuda')",
        bad="a[i] = torch.ones(3, 6, device='cuda')",
        good="a[i] = torch.ones(2, 6, device='cuda')",
        headline="a value of shape (3, 6) is written to a selection of shape (2, 6)",
        argument="value",
    ),
    Case(
        family="index_bound",
        setup="a = torch.ones(2, 8, device='cuda')",
        bad="a[:, 9] = 1",
        good="a[:, 7] = 1",
        headline="index 9 is out of bounds for dimension 1 with size 8: the last valid index is 7",
        argument="indices",
    ),
    Case(
        family="dimension_bound",
        setup="a = torch.ones(4, 6, device='cuda')",
        bad="a.mean(dim=2)",
        good="a.mean(dim=1)",
        headline="dim 2 does not exist in a tensor of 2 dimensions: its shape is (4, 6)",
        argument="dim",
    ),
    Case(
        family="index_count",
        setup="a = torch.ones(3, 4, device='cuda')",
        bad="a[0, 1, 2]",
        good="a[0, None, 2]",
        headline="more indices than the 2 dimensions of the tensor of shape (3, 4)",
        argument="indices",
    ),
    Case(
        family="mask_shape",
        setup="a = torch.ones(3, 4, device='cuda'); m = torch.ones(5, 4, device='cuda').bool()",
        bad="a[m]",
        good="a[m[:3]]",
        headline="the mask (5, 4) has 5 where the tensor (3, 4) has 3",
        argument="indices",
        expression="m",
    ),
    Case(
        family="permuted_dimensions",
        setup="a = torch.ones(4, 6, device='cuda')",
        bad="a.permute(0, 1, 2)",
        good="a.permute(1, 0)",
        headline="permute orders 3 dimensions, the tensor of shape (4, 6) has 2",
        argument="dims",
    ),
    Case(
        family="batch_norm_channels",
        setup="x = torch.randn(4, 5, device='cuda'); m = nn.BatchNorm1d(6).cuda()",
        bad="m(x)",
        good="m(torch.randn(4, 6, device='cuda'))",
        headline="input has 5 channels in dimension 1, the normalisation is built for 6",
        argument="input",
        expression="x",
        fix="num_features=5",
    ),
    Case(
        family="norm_dimensions",
        setup="x = torch.randn(4, 5, device='cuda'); m = nn.BatchNorm2d(5).cuda()",
        bad="m(x)",
        good="m(x[:, :, None, None])",
        headline="input has 2 dimensions, BatchNorm2d takes 4: its shape is (4, 5)",
        argument="input",
        expression="x",
        fix="nn.BatchNorm1d",
    ),
    Case(
        family="batch_norm_one_value",
        setup="x = torch.randn(1, 5, device='cuda'); m = nn.BatchNorm1d(5).cuda()",
        bad="m(x)",
        good="m(torch.randn(2, 5, device='cuda'))",
        headline="input (1, 5) has one value per channel",
        argument="input",
        expression="x",
        fix="DataLoader(..., drop_last=True)",
    ),
    Case(
        family="layer_norm_shape",
        setup="x = torch.randn(4, 5, device='cuda'); m = nn.LayerNorm(6).cuda()",
        bad="m(x)",
        good="m(torch.randn(4, 6, device='cuda'))",
        headline="input (4, 5) ends in (5,), the normalisation is built for (6,)",
        argument="input",
        expression="x",
        fix="normalized_shape=5",
    ),
    Case(
        family="group_norm_groups",
        setup="x = torch.randn(4, 5, 3, 3, device='cuda'); m = nn.GroupNorm(2, 6).cuda()",
        bad="m(x)",
        good="m(torch.randn(4, 6, 3, 3, device='cuda'))",
        headline="input has 5 channels in dimension 1, which cannot be divided evenly into 2 "
        "groups",
        argument="input",
        expression="x",
    ),
    Case(
        family="rnn_input_size",
        setup="x = torch.ones(2, 5, 7, device='cuda'); m = nn.LSTM(8, 4).cuda()",
        bad="m(x)",
        good="m(torch.ones(2, 5, 8, device='cuda'))",
        headline="input has 7 features in its last dimension, the layer takes 8",
        argument="input",
        expression="x",
        fix="input_size=7",
    ),
    Case(
        family="rnn_hidden_size",
        setup="x = torch.ones(2, 5, 8, device='cuda'); m = nn.GRU(8, 4).cuda()\n"
        "h = torch.ones(1, 3, 4, device='cuda')",
        bad="m(x, h)",
        good="m(x, torch.ones(1, 5, 4, device='cuda'))",
        headline="hx has shape (1, 3, 4), the layer takes (1, 5, 4): batch size 3 instead of 5",
        argument="hx",
        expression="h",
    ),
    Case(
        family="key_padding_mask",
        setup="m = nn.MultiheadAttention(8, 2, batch_first=True).cuda()\n"
        "q = torch.ones(2, 5, 8, device='cuda'); k = torch.zeros(2, 4, device='cuda').bool()",
        bad="m(q, q, q, key_padding_mask=k)",
        good="m(q, q, q, key_padding_mask=torch.zeros(2, 5, device='cuda').bool())",
        headline="key_padding_mask covers 4 keys, there are 5: its shape is (2, 4)",
        argument="key_padding_mask",
    ),
    Case(
        family="attention_mask",
        setup="m = nn.MultiheadAttention(8, 2, batch_first=True).cuda()\n"
        "q = torch.ones(2, 5, 8, device='cuda'); k = torch.zeros(4, 5, device='cuda').bool()",
        bad="m(q, q, q, attn_mask=k)",
        good="m(q, q, q, attn_mask=torch.zeros(5, 5, device='cuda').bool())",
        headline="attn_mask has shape (4, 5), the scores have (5, 5)",
        argument="attn_mask",
    ),
    Case(
        family="state_dict_shape",
        setup="m = nn.Linear(8, 4).cuda(); saved = nn.Linear(8, 5).state_dict()",
        bad="m.load_state_dict(saved)",
        good="m.load_state_dict(nn.Linear(8, 4).state_dict())",
        headline="weight has shape (5, 8) in the checkpoint and (4, 8) in the model",
        argument="state_dict",
    ),
    Case(
        family="state_dict_keys",
        setup="m = nn.Linear(8, 4)\n"
        "saved = {f'module.{key}': value for key, value in m.state_dict().items()}",
        bad="m.load_state_dict(saved)",
        good="m.load_state_dict({key[7:]: value for key, value in saved.items()})",
        headline="the checkpoint has no weight, which the model has",
        argument="state_dict",
        fix='{key.removeprefix("module."): value for key, value in state_dict.items()}',
    ),
    Case(
        family="loss_shapes",
        setup="z = torch.randn(10, device='cuda'); y = torch.rand(10, 1, device='cuda')",
        bad="nn.BCEWithLogitsLoss()(z, y)",
        good="nn.BCEWithLogitsLoss()(z, y.squeeze(1))",
        headline="target has shape (10, 1), input has (10,): this loss takes equal shapes",
        argument="target",
        expression="y",
        fix="nn.BCEWithLogitsLoss()(z, y.squeeze(1))",
    ),
    Case(
        family="loss_batch",
        setup="z = torch.randn(8, 4, device='cuda'); y = torch.zeros(2, 4, device='cuda').long()",
        bad="F.cross_entropy(z, y)",
        good="F.cross_entropy(z, y.reshape(-1))",
        headline="target has 2 labels for 8 rows of input: input is (8, 4), target (2, 4)",
        argument="target",
        expression="y",
        fix="F.cross_entropy(z, y.reshape(-1))",
    ),
    Case(
        family="label_dimensions",
        setup="z = torch.randn(10, 4, device='cuda'); y = torch.zeros(10, 1, device='cuda').long()",
        bad="F.cross_entropy(z, y)",
        good="F.cross_entropy(z, y.squeeze(1))",
        headline="target has shape (10, 1) instead of (10,)",
        argument="target",
        expression="y",
        fix="F.cross_entropy(z, y.squeeze(1))",
    ),
    Case(
        family="label_sizes",
        setup="z = torch.randn(2, 6, 6, 4, device='cuda')\n"
        "y = torch.zeros(2, 6, 6, device='cuda').long()",
        bad="F.cross_entropy(z, y)",
        good="F.cross_entropy(z.permute(0, 3, 1, 2), y)",
        headline="target has shape (2, 6, 6), input (2, 6, 6, 4) takes (2, 6, 4)",
        argument="target",
        expression="y",
        fix="F.cross_entropy(z.permute(0, 3, 1, 2), y)",
    ),
    Case(
        family="class_weights",
        setup="z = torch.randn(10, 4, device='cuda'); y = torch.zeros(10, device='cuda').long()\n"
        "w = torch.ones(3, device='cuda')",
        bad="F.cross_entropy(z, y, weight=w)",
        good="F.cross_entropy(z, y, weight=torch.ones(4, device='cuda'))",
        headline="weight has shape (3,), there are 4 classes",
        argument="weight",
        expression="w",
    ),
    Case(
        family="layer_dtype",
        setup="x = torch.randint(0, 9, (64, 1, 100), device='cuda'); m = nn.Conv1d(1, 32, "
        "3).cuda()",
        bad="m(x)",
        good="m(x.float())",
        headline="input is int64, the bias is float32",
        argument="input",
        expression="x",
        fix="m(x.float())",
    ),
    Case(
        family="product_dtypes",
        setup="x = torch.rand(3, 4, device='cuda').half(); m = nn.Linear(4, 2).cuda()",
        bad="m(x)",
        good="m(x.float())",
        headline="input is float16, the weight is float32",
        argument="input",
        expression="x",
        fix="m(x.float())",
    ),
    Case(
        family="scalar_type",
        setup="z = torch.rand(10, 4, device='cuda'); y = torch.zeros(10, device='cuda').int()",
        bad="F.cross_entropy(z, y)",
        good="F.cross_entropy(z, y.long())",
        headline="target is int32, this call takes int64",
        argument="target",
        expression="y",
        fix="F.cross_entropy(z, y.long())",
    ),
    Case(
        family="target_probabilities",
        setup="z = torch.rand(10, 4, device='cuda'); y = torch.zeros(10, 4, device='cuda').long()",
        bad="F.cross_entropy(z, y)",
        good="F.cross_entropy(z, y.float())",
        headline="target is int64 and has the shape of input, so it is read as class probabilities",
        argument="target",
        expression="y",
        fix="F.cross_entropy(z, y.float())",
    ),
    Case(
        family="argument_scalar_type",
        setup="ids = torch.zeros(10, device='cuda'); m = nn.Embedding(4, 2).cuda()",
        bad="m(ids)",
        good="m(ids.long())",
        headline="input is float32, embedding takes int64 or int32",
        argument="input",
        expression="ids",
        fix="m(ids.long())",
    ),
    Case(
        family="index_dtype",
        setup="a = torch.rand(3, device='cuda'); i = torch.zeros(2, device='cuda')",
        bad="a[i]",
        good="a[i.long()]",
        headline="the index is float32; int64, int32, uint8 or bool are possible",
        argument="indices",
        expression="i",
        fix="a[i.long()]",
    ),
    Case(
        family="gather_index_dtype",
        setup="a = torch.rand(3, device='cuda'); i = torch.zeros(2, device='cuda')",
        bad="a.gather(0, i)",
        good="a.gather(0, i.long())",
        headline="index is float32, gather takes int64",
        argument="index",
        expression="i",
        fix="a.gather(0, i.long())",
    ),
    Case(
        family="written_dtype",
        setup="a = torch.zeros(3, device='cuda'); i = torch.zeros(3, device='cuda').long()\n"
        "b = torch.zeros(3, device='cuda').double()",
        bad="a.index_add_(0, i, b)",
        good="a.index_add_(0, i, b.float())",
        headline="source is float64 and is written to float32",
        argument="source",
        expression="b",
        fix="a.index_add_(0, i, b.float())",
    ),
    Case(
        family="in_place_dtype",
        setup="a = torch.ones(3, device='cuda').long()",
        bad="a.div_(2)",
        good="a.div(2)",
        headline="the result is float32 and cannot be stored in place in a tensor of int64",
        argument="self",
        expression="a",
    ),
    Case(
        family="unsupported_dtype",
        setup="a = torch.ones(3, 4, device='cuda').long()",
        bad="a.softmax(-1)",
        good="a.float().softmax(-1)",
        headline="softmax has no kernel for int64",
        argument="self",
        expression="a",
        fix="a.float().softmax(-1)",
    ),
    Case(
        family="mask_or_index_dtype",
        setup="a = torch.ones(3, device='cuda'); m = torch.ones(3, device='cuda')",
        bad="a.masked_fill(m, 1)",
        good="a.masked_fill(m.bool(), 1)",
        headline="mask is float32, and has to be bool",
        argument="mask",
        expression="m",
        fix="a.masked_fill(m.bool(), 1)",
    ),
    Case(
        family="bool_arithmetic",
        setup="a = torch.ones(3, device='cuda'); m = a.bool()",
        bad="a - m",
        good="a - m.float()",
        headline="a bool tensor is subtracted or negated as a number",
        argument="other",
        expression="m",
    ),
    Case(
        family="gradient_of_integers",
        setup="a = torch.ones(3, device='cuda').long()",
        bad="a.requires_grad_()",
        good="a.float().requires_grad_()",
        headline="a int64 tensor cannot require gradients",
        argument="self",
        expression="a",
        fix="a.float().requires_grad_()",
    ),
    Case(
        family="two_devices",
        setup="z = torch.rand(10, device='cuda'); y = torch.zeros(10)",
        bad="nn.MSELoss()(z, y)",
        good="nn.MSELoss()(z, y.to(z.device))",
        headline="target is on cpu, input is on cuda:0",
        argument="target",
        expression="y",
        fix="nn.MSELoss()(z, y.to(z.device))",
    ),
    Case(
        family="two_devices",
        setup="x = torch.rand(10, 4, device='cuda'); m = nn.Linear(4, 2)",
        bad="m(x)",
        good="m.to(x.device)(x)",
        headline="weight of the module is on cpu, its input is on cuda:0",
        argument="weight",
        fix='m.to("cuda:0")',
    ),
    Case(
        family="layer_dtype",
        setup="x = torch.rand(10, 1, 9); m = nn.Conv1d(1, 2, 3).cuda()",
        bad="m(x)",
        good="m(x.cuda())",
        headline="input is on cpu, the weight is on cuda",
        argument="input",
        expression="x",
        fix='m(x.to("cuda"))',
    ),
    Case(
        family="index_device",
        setup="a = torch.rand(3); i = torch.tensor([0, 1], device='cuda')",
        bad="a[i]",
        good="a.cuda()[i]",
        headline="the index is on cuda:0, the indexed tensor on cpu",
        argument="indices",
        expression="i",
        fix='a[i.to("cpu")]',
    ),
    Case(
        family="mask_device",
        setup="a = torch.rand(3, device='cuda'); m = torch.ones(3).bool()",
        bad="a.masked_fill_(m, 0)",
        good="a.masked_fill_(m.cuda(), 0)",
        headline="mask is on cpu, self on cuda:0",
        argument="mask",
        expression="m",
        fix="a.masked_fill_(m.to(a.device), 0)",
    ),
    Case(
        family="numpy_of_cuda",
        setup="a = torch.ones(2, device='cuda', requires_grad=True)",
        bad="a.numpy()",
        good="a.detach().cpu().numpy()",
        headline="a is on cuda:0; NumPy reads host memory only",
        argument="self",
        expression="a",
        fix="a.detach().cpu().numpy()",
    ),
    Case(
        family="unsafe_autocast",
        setup="p = torch.rand(4, device='cuda'); y = torch.ones(4, device='cuda')",
        bad="with torch.autocast('cuda'): F.binary_cross_entropy(p, y)",
        good="with torch.autocast('cuda'): F.binary_cross_entropy_with_logits(p, y)",
        headline="binary_cross_entropy is unsafe to autocast: its input is probabilities",
        argument="input",
        expression="p",
    ),
    Case(
        family="two_devices",
        setup="x = torch.rand(4, 8, device='cuda')",
        bad="torch.cat([x, torch.zeros(4, 1)], dim=1)",
        good="torch.cat([x, torch.zeros(4, 1).to(x.device)], dim=1)",
        headline="tensors[1] is on cpu, tensors[0] is on cuda:0",
        argument="tensors[1]",
        fix="torch.cat([x, torch.zeros(4, 1).to(x.device)], dim=1)",
    ),
    Case(
        family="two_devices",
        setup="x = torch.rand(3, 4, device='cuda'); y = torch.ones(3, 4); loss = nn.MSELoss()\n"
        "m = lambda: x.exp()",
        bad="loss(m(), y)",
        good="loss(m(), y.cuda())",
        headline="target is on cpu, input is on cuda:0",
        argument="target",
        expression="y",
        fix='loss(m(), y.to("cuda:0"))',
    ),
    Case(
        family="two_devices",
        setup="x = torch.rand(3, 4, device='cuda'); y = torch.ones(3, 4); loss = nn.MSELoss()\n"
        "m = lambda of: of.exp()",
        bad="loss(m(x), y)",
        good="loss(m(x), y.cuda())",
        headline="target is on cpu, the other tensors are on cuda:0",
        argument="target",
        expression="y",
        fix="loss(m(x), y.to(x.device))",
    ),
    Case(
        family="numpy_of_cuda",
        setup="m = nn.Linear(4, 2).cuda(); x = torch.rand(3, 4, device='cuda')",
        bad="m(x).detach().numpy()",
        good="m(x).detach().cpu().numpy()",
        headline="m(x).detach() is on cuda:0; NumPy reads host memory only",
        argument="self",
        fix="m(x).detach().cpu().numpy()",
    ),
    Case(
        family="numpy_of_cuda",
        setup="m = nn.Linear(4, 2).cuda(); x = torch.rand(3, 4, device='cuda')",
        bad="m(x).numpy()",
        good="m(x).detach().cpu().numpy()",
        headline="m(x) is on cuda:0; NumPy reads host memory only",
        argument="self",
        fix="m(x).detach().cpu().numpy()",
    ),
    Case(
        family="packed_lengths",
        setup="x = torch.rand(2, 5, 3, device='cuda'); n = torch.tensor([5, 4], device='cuda')",
        bad="nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True)",
        good="nn.utils.rnn.pack_padded_sequence(x, n.cpu(), batch_first=True)",
        headline="lengths is on cuda:0 instead of cpu",
        argument="lengths",
        expression="n",
        fix="nn.utils.rnn.pack_padded_sequence(x, n.cpu(), batch_first=True)",
    ),
    Case(
        family="distribution_values",
        setup="mean = torch.zeros(2, device='cuda'); eye = torch.eye(2, device='cuda')",
        bad="torch.distributions.MultivariateNormal(mean, -eye)",
        good="torch.distributions.MultivariateNormal(mean, eye)",
        headline="covariance_matrix (2, 2) does not satisfy PositiveDefinite(), which "
        "MultivariateNormal requires",
        argument="covariance_matrix",
    ),
    Case(
        family="numpy_of_gradient",
        setup="a = torch.ones(2, requires_grad=True)",
        bad="a.numpy()",
        good="a.detach().numpy()",
        headline="a requires grad; autograd cannot follow into NumPy",
        argument="self",
        expression="a",
        fix="a.detach().numpy()",
    ),
    Case(
        family="pinned_cuda",
        setup="samples = [torch.ones(3, device='cuda')] * 4",
        bad="next(iter(DataLoader(samples, batch_size=2, pin_memory=True)))",
        good="next(iter(DataLoader(samples, batch_size=2)))",
        headline="a torch.cuda.FloatTensor is pinned; only tensors on the CPU can be",
        argument="self",
        fix="DataLoader(..., pin_memory=False)",
    ),
    Case(
        family="generator_device",
        bad="torch.randn(3, device='cuda', generator=torch.Generator())",
        good="torch.randn(3, device='cuda', generator=torch.Generator('cuda'))",
        headline="generator is on cpu, the tensor to fill is on cuda",
        argument="generator",
        fix='torch.Generator(device="cuda")',
    ),
    Case(
        family="argument_type",
        setup="a = np.ones((2, 8)); m = nn.Linear(8, 2).cuda()",
        bad="m(a)",
        good="m(torch.from_numpy(a).float().to('cuda'))",
        headline="input is a numpy.ndarray of float64 (2, 8), linear takes a Tensor",
        argument="input",
        fix='torch.from_numpy(a).float().to("cuda:0")',
    ),
    Case(
        family="unknown_argument",
        setup="m = nn.LSTM(8, 4).cuda(); x = torch.ones(2, 5, 8, device='cuda')",
        bad="m(inputs=x)",
        good="m(input=x)",
        headline="LSTM.forward has no argument inputs",
        argument="inputs",
        fix="m(input=x)",
    ),
    Case(
        family="missing_argument",
        setup="m = nn.Linear(8, 4).cuda(); x = torch.ones(2, 8, device='cuda')",
        bad="m()",
        good="m(x)",
        headline="Linear.forward needs input, and the call does not give it",
        argument="input",
    ),
    Case(
        family="argument_count",
        setup="m = nn.Linear(8, 4).cuda(); x = torch.ones(2, 8, device='cuda')",
        bad="m(x, 3)",
        good="m(x)",
        headline="Linear.forward takes 1 argument by position, the call gives 2",
    ),
    Case(
        family="unequal_samples",
        setup="samples = [torch.ones(3), torch.ones(4)]",
        bad="next(iter(DataLoader(samples, batch_size=2)))",
        good="next(iter(DataLoader(samples, batch_size=1)))",
        headline="sample 0 of the batch has shape (3,), sample 1 has (4,): they cannot be stacked",
        argument="batch",
        fix="torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)",
    ),
    Case(
        family="unequal_samples",
        setup="a = torch.ones(3, device='cuda'); b = torch.ones(4, device='cuda')",
        bad="torch.stack([a, b])",
        good="torch.stack([a, b[:3]])",
        headline="tensors[0] has shape (3,), tensors[1] has (4,): they cannot be stacked",
        argument="tensors[1]",
        expression="b",
    ),
    Case(
        family="uncollatable_sample",
        setup="samples = [None] * 4",
        bad="next(iter(DataLoader(samples, batch_size=2)))",
        good="next(iter(DataLoader(samples, batch_size=2, collate_fn=list)))",
        headline="the dataset returned a sample with a value of type NoneType",
        argument="batch",
    ),
    Case(
        family="unequal_lists",
        setup="samples = [[1, 2], [3]]",
        bad="next(iter(DataLoader(samples, batch_size=2)))",
        good="next(iter(DataLoader(samples, batch_size=1)))",
        headline="the samples of the batch are lists of different lengths",
        argument="batch",
    ),
    Case(
        family="sample_key",
        setup="samples = [{'a': 1}, {'b': 2}]",
        bad="next(iter(DataLoader(samples, batch_size=2)))",
        good="next(iter(DataLoader(samples, batch_size=1)))",
        headline="a sample of the batch has no key 'a', which its first sample has",
        argument="batch",
    ),
    Case(
        family="ragged_list",
        bad="torch.tensor([[1, 2], [3]])",
        good="torch.tensor([[1, 2], [3, 4]])",
        headline="the list has rows of 2 and of 1 elements in dimension 1",
        argument="data",
    ),
    Case(
        family="array_dtype",
        setup="a = np.array([{}, {}])",
        bad="torch.from_numpy(a)",
        good="torch.from_numpy(np.zeros(2))",
        headline="the array has dtype numpy.object_, and there are no tensors of that dtype",
        argument="data",
    ),
    Case(
        family="array_wanted",
        setup="a = torch.ones(2)",
        bad="torch.from_numpy(a)",
        good="torch.from_numpy(a.numpy())",
        headline="from_numpy takes a NumPy array, and got a Tensor",
        argument="ndarray",
    ),
    Case(
        family="no_dtype",
        bad="torch.tensor(object())",
        good="torch.tensor(1)",
        headline="a value of type object cannot be made a tensor",
        argument="data",
    ),
    Case(
        family="many_to_scalar",
        setup="a = torch.ones(4, 6, device='cuda')",
        bad="a.item()",
        good="a[0, 0].item()",
        headline="the tensor has 24 elements, and is converted to one Python number",
        argument="self",
        expression="a",
    ),
    Case(
        family="ambiguous_truth",
        setup="a = torch.ones(4, device='cuda')",
        bad="bool(a > 0)",
        good="bool((a > 0).all())",
        headline="a tensor with more than one value is used as a condition",
    ),
    Case(
        kind="autograd_error",
        family="saved_tensor_modified",
        setup="w = torch.ones(3, device='cuda', requires_grad=True); y = w.exp(); y += 1",
        bad="y.sum().backward()",
        good="w.exp().add(1).sum().backward()",
        headline="a tensor that backward needs was changed in place: float32 (3,), output 0 of Exp",
    ),
    Case(
        kind="autograd_error",
        family="second_backward",
        setup="w = torch.ones(3, device='cuda', requires_grad=True)\n"
        "loss = w.exp().sum()\nloss.backward()",
        bad="loss.backward()",
        good="w.exp().sum().backward()",
        headline="a part of the graph of loss was freed by an earlier backward",
        argument="self",
        expression="loss",
        fix="loss.backward(retain_graph=True)",
    ),
    Case(
        kind="autograd_error",
        family="no_graph",
        setup="w = torch.ones(3, device='cuda', requires_grad=True)\nloss = w.sum().detach()",
        bad="loss.backward()",
        good="w.sum().backward()",
        headline="loss has no grad_fn: nothing leads from it to a tensor that requires grad",
        argument="self",
        expression="loss",
        fix="loss = w.sum()",
    ),
    Case(
        kind="autograd_error",
        family="not_a_scalar",
        setup="w = torch.ones(3, device='cuda', requires_grad=True); loss = w * w",
        bad="loss.backward()",
        good="loss.mean().backward()",
        headline="loss has shape (3,): backward() without a gradient takes one number",
        argument="self",
        expression="loss",
        fix="loss.mean().backward()",
    ),
    Case(
        kind="autograd_error",
        family="gradient_argument_shape",
        setup="w = torch.ones(3, device='cuda', requires_grad=True); g = torch.ones(4).cuda()",
        bad="(w * w).backward(g)",
        good="(w * w).backward(g[:3])",
        headline="the given gradient has shape (4,), the tensor has (3,)",
        argument="gradient",
        expression="g",
    ),
    Case(
        kind="autograd_error",
        family="leaf_modified",
        setup="w = torch.ones(3, device='cuda', requires_grad=True)",
        bad="w.add_(1)",
        good="w.add(1)",
        headline="w is a leaf that requires grad, and add_ changes it in place",
        argument="self",
        expression="w",
        fix="with torch.no_grad(): w.add_(1)",
    ),
    Case(
        kind="autograd_error",
        family="multi_view_modified",
        setup="w = torch.ones(4, device='cuda', requires_grad=True); a, b = (w * 2).split(2)",
        bad="b.add_(1)",
        good="b.clone().add_(1)",
        headline="b is one of several views that split returned, and is changed in place",
        argument="self",
        expression="b",
        fix="b.clone().add_(1)",
    ),
    Case(
        kind="autograd_error",
        family="input_unused",
        setup="w = torch.ones(3, device='cuda', requires_grad=True)\n"
        "other = torch.ones(3, device='cuda', requires_grad=True)",
        bad="torch.autograd.grad(w.sum(), other)",
        good="torch.autograd.grad(w.sum(), w)",
        headline="the outputs do not depend on other",
        argument="inputs",
        expression="other",
    ),
    Case(
        kind="autograd_error",
        family="flag_of_result",
        setup="w = torch.ones(3, device='cuda', requires_grad=True); y = w * 2",
        bad="y.requires_grad_(False)",
        good="y.detach()",
        headline="y is the result of an op, whose requires_grad follows from its inputs",
        argument="self",
        expression="y",
    ),
    Case(
        kind="cuda_error",
        family="invalid_device",
        bad="torch.ones(3).cuda(3)",
        good="torch.ones(3).cuda(0)",
        headline="cuda:3 does not exist for this process",
    ),
]
# Families whose message this machine cannot provoke, or whose case stands in a test of its own.
ELSEWHERE = {
    "array_in_library",
    "loss_target_dtype",
    "model_input_missing",
    "model_input_twice",
    "unequal_tokens",
    "label_grid",
    "gradient_dtype",
    "rnn_device",
    "parallel_device",
    "gradient_shape",
    "gradient_count",
    "inference_tensor",
    "anomalous_gradient",
    "no_gpu",
    "memory_fraction",
}


def ident(case: Case) -> str:
    return f"{case.family}: {case.bad}"


@pytest.mark.parametrize("case", CASES, ids=ident)
def test_a_host_error_is_put_into_words(case: Case, sim: simulate.Simulation) -> None:
    """The family, the headline with the observed values, the argument, the fix; never an assert."""
    outcome = run_cell(f"{SETUP}{case.setup}\n{case.bad}")
    report = outcome.shown
    assert (report.kind, report.certainty) == (case.kind, "proven")
    assert case.headline in report.headline
    # Some releases of torch put a single tensor into a tuple before they look at it.
    argument = (report.argument or "").removesuffix("[0]") or None
    assert argument == case.argument
    assert report.expression == case.expression
    assert case.fix is None or case.fix in outcome.fixes
    assert report.source is not None and report.source.text == case.bad.split("\n")[-1]
    assert report.limits == ()
    assert "assert" not in report.headline
    if case.kind != "cuda_error":
        assert "assert" not in report.to_text()
    assert family_of(outcome.error) in (case.family, "repeated")


def family_of(error: BaseException | None) -> str:
    """Which family knows the message, by the message alone."""
    facts = ErrorFacts(type_name=type(error).__name__, message=str(error))
    verdict = host_errors.explain_host_error(Evidence(error=facts), facts)
    return verdict.pattern or "repeated"


@pytest.mark.parametrize("case", CASES, ids=ident)
def test_the_neighbour_is_silent(case: Case, sim: simulate.Simulation) -> None:
    """The same line done right gives no report."""
    outcome = run_cell(f"{SETUP}{case.setup}\n{case.good}")
    assert outcome.error is None
    assert outcome.report is None


def test_of_an_unknown_message_nothing_is_said_about_kernels(sim: simulate.Simulation) -> None:
    """``cholesky`` looks at its input on the device, and raises when the result has come back."""
    report = run_cell("import torch\ntorch.linalg.cholesky(-torch.eye(3, device='cuda'))").shown
    assert "positive-definite" in report.headline
    assert report.explanation.startswith("An exception of the host, and no device-side assert")
    assert "before any kernel" not in report.explanation
    known = run_cell("import torch\ntorch.ones(2, 3).cuda() @ torch.ones(2, 3).cuda()").shown
    assert "before any kernel" in known.explanation


def test_every_family_has_a_case() -> None:
    """A family that nothing exercises would not be noticed when torch changes its words."""
    cuda = {name for _, name, _ in test_cuda_errors.TEXTS.values()}
    known = {case.family for case in CASES} | ELSEWHERE | cuda
    assert {item.name for item in host_errors.table()} <= known
    assert known >= ELSEWHERE and {item.name for item in host_errors.table()} >= ELSEWHERE


def test_the_exception_passes_unchanged(sim: simulate.Simulation) -> None:
    """Same object, same text; one note of one line and the report are added."""
    seen: list[BaseException] = []
    code = """
    import torch
    a = torch.ones(2, 3, device="cuda")
    try:
        a @ a
    except RuntimeError as error:
        seen.append(error)
        raise
    """
    outcome = run_cell(code, {"seen": seen})
    assert outcome.error is seen[0]
    assert str(outcome.error) == "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)"
    assert outcome.error.__notes__ == [  # type: ignore[union-attr]
        "cudalens: a has 3 columns and a has 2 rows: (2, 3) and (2, 3) cannot be multiplied · at "
        f"In [{outcome.shown.source.cell}] line 4: a @ a · try a.T @ a"  # type: ignore[union-attr]
    ]
    assert outcome.error.__cudalens_report__ is not None  # type: ignore[union-attr]


def test_a_handled_host_error_gives_no_report(sim: simulate.Simulation) -> None:
    """What the cell handles itself is none of our business."""
    outcome = run_cell(
        """
        import torch
        try:
            torch.ones(2, 3, device="cuda") @ torch.ones(2, 3, device="cuda")
        except RuntimeError:
            pass
        """
    )
    assert (outcome.error, outcome.report) == (None, None)


@pytest.mark.parametrize("case", CASES[5:9], ids=ident)
def test_the_recorder_changes_no_verdict(case: Case, sim: simulate.Simulation) -> None:
    """With the flight recorder the names are still those of the called function, not the op's."""
    outcome = run_cell(f"{SETUP}{case.setup}\n{case.bad}", fast=False)
    report = outcome.shown
    assert case.headline in report.headline
    assert (report.argument, report.expression) == (case.argument, case.expression)
    assert (report.op.api or "").startswith("torch.")


def test_the_tensors_of_a_product_are_listed(sim: simulate.Simulation) -> None:
    """Both operands with their names and shapes, and the two sizes that do not fit."""
    code = "logits = torch.randn(4, 3).cuda(); w = torch.randn(5, 3).cuda()\nlogits @ w"
    report = run_cell(SETUP + code).shown
    listed = [(item.argument, item.expression, item.shape) for item in report.tensors]
    assert listed == [("self", "logits", (4, 3)), ("other", "w", (5, 3))]
    assert "(3)" in report.explanation and "(5)" in report.explanation
    assert report.op.api == "torch.Tensor.__matmul__"


def test_the_graph_of_an_autograd_error_is_drawn(sim: simulate.Simulation) -> None:
    """The tensor that backward was asked of leads to the nodes behind it."""
    code = "w = torch.ones(3).cuda().requires_grad_(); loss = w.exp()\nloss.backward()"
    report = run_cell(SETUP + code).shown
    assert "ExpBackward0" in [node.name for node in report.graph.nodes]


def test_an_inner_module_is_named(sim: simulate.Simulation) -> None:
    """The path of the module, the user's line in it, and no name that the line does not prove."""
    code = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.head = nn.Linear(10, 2)

        def forward(self, x):
            x = self.conv(x).relu()
            return self.head(x.flatten(1))

    net = Net().cuda()
    net(torch.randn(2, 3, 8, 8, device="cuda"))
    """
    report = run_cell(code).shown
    assert (report.module_path, report.op.api) == ("head", "torch.nn.functional.linear")
    assert report.source is not None and report.source.text == "return self.head(x.flatten(1))"
    assert report.headline.startswith(
        "input has 288 features in its last dimension, module head takes 10"
    )


def test_a_worker_process_is_named(sim: simulate.Simulation) -> None:
    """An error that crossed from a loader's worker is explained like one of this process."""
    code = "next(iter(DataLoader([torch.ones(3), torch.ones(4)], batch_size=2, num_workers=1)))"
    report = run_cell(SETUP + code).shown
    assert report.headline == (
        "sample 0 of the batch has shape (3,), sample 1 has (4,): they cannot be stacked"
    )
    assert report.explanation.startswith("Raised in DataLoader worker process 0.")


def test_the_users_line_in_a_worker_is_told(sim: simulate.Simulation) -> None:
    """The worker's traceback came along as text; the loader's own line says little."""
    code = """
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, at):
            return torch.ones(3)[at + 3]

    next(iter(DataLoader(Data(), num_workers=1)))
    """
    report = run_cell(textwrap.dedent(SETUP) + textwrap.dedent(code)).shown
    assert report.source is not None and report.source.text.startswith("next(iter(")
    assert re.match(
        r"Raised in DataLoader worker process 0, at In \[\d+\] line \d+: "
        r"return torch\.ones\(3\)\[at \+ 3\]\. ",
        report.explanation,
    )


def test_a_gradient_of_a_custom_function(sim: simulate.Simulation) -> None:
    """The function, the input and both shapes; torch itself sums what was only broadcast."""
    code = """
    import torch

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, grad):
            x, w = ctx.saved_tensors
            return grad * w, grad * x

    x = torch.ones(4, 3, device="cuda", requires_grad=True)
    w = torch.ones(4, 1, device="cuda", requires_grad=True)
    Scale.apply(x, w).sum().backward()
    """
    assert run_cell(code).error is None
    report = run_cell(
        code.replace("return grad * w, grad * x", "return grad * w, (grad * x)[0]")
    ).shown
    assert (report.kind, report.phase) == ("autograd_error", "backward")
    assert "returned a gradient of shape (3,) for its input 1 of shape (4, 1)" in report.headline


def test_the_writer_of_a_saved_tensor_is_named(sim: simulate.Simulation) -> None:
    """With the recorder: the line that changed it, the op that saved it, and how to write it."""
    code = """
    import torch
    w = torch.ones(3, device="cuda", requires_grad=True)
    y = w.exp()
    y += 1
    y.sum().backward()
    """
    outcome = run_cell(code, fast=False)
    report = outcome.shown
    assert report.kind == "autograd_error"
    assert "line 4: y += 1" in report.headline
    assert "version 1" in report.headline and "version 0" in report.headline
    assert "aten::exp" in report.explanation
    assert outcome.fixes == ["y = y + 1"]


# --- from texts alone ----------------------------------------------------------------------------


def report_of(
    message: str, *, type_name: str = "RuntimeError", tensors: tuple[TensorFact, ...] = (), **rest
):  # type: ignore[no-untyped-def]
    """Diagnose an exception that is known by its text."""
    error = ErrorFacts(type_name=type_name, message=message)
    usable = not host_errors.is_sticky(message)
    return diagnose(Evidence(error=error, tensors=tensors, context_usable=usable, **rest))


OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of "
    "which 512.00 MiB is free. Process 1 has 15.20 GiB memory in use. Of the allocated memory "
    "14.00 "
    "GiB is allocated by PyTorch, and 800.00 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF"
)
DSA = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)
CUDA_TEXTS = [
    (OOM, "the GPU has no room for 2.00 GiB: 512.00 MiB of 15.77 GiB is free", True),
    (
        "CUDA error: an illegal memory access was encountered" + DSA,
        "a kernel read or wrote memory that does not belong to it",
        False,
    ),
    ("CUDA error: misaligned address" + DSA, "a kernel used a misaligned address", False),
    (
        "CUDA error: no kernel image is available for execution on the device" + DSA,
        "this build of PyTorch, or of an extension, holds no code for this GPU",
        True,
    ),
    (
        "CUDA error: invalid device ordinal" + DSA,
        "the requested GPU does not exist for this process",
        True,
    ),
    (
        "Torch not compiled with CUDA enabled",
        "CUDA was asked for, and this build of PyTorch was made without CUDA",
        None,
    ),
    (
        "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and "
        "installed a driver from http://www.nvidia.com/Download/index.aspx",
        "CUDA was asked for, and there is no GPU that this process can use",
        None,
    ),
    (
        "The NVIDIA driver on your system is too old (found version 11040).",
        "the NVIDIA driver is older than the CUDA version that PyTorch was built for",
        True,
    ),
    (
        "NCCL error in: ProcessGroupNCCL.cpp:2044, unhandled cuda error, NCCL version 2.21.5",
        "NCCL, which carries tensors between GPUs, reported an error",
        True,
    ),
    (
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb)`",
        "a library of CUDA's failed with CUBLAS_STATUS_EXECUTION_FAILED",
        True,
    ),
    (
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "a library of CUDA's failed with CUDNN_STATUS_EXECUTION_FAILED",
        True,
    ),
    (
        "CUDA error: unspecified launch failure" + DSA,
        "a kernel was ended by the hardware: unspecified launch failure",
        False,
    ),
    (
        "CUDA error: too many resources requested for launch" + DSA,
        "a kernel was launched with more blocks, threads or registers than the GPU has",
        True,
    ),
    (
        "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you "
        "must use the 'spawn' start method",
        "a forked worker process uses CUDA, which its parent had started",
        True,
    ),
    ("CUDA error: initialization error" + DSA, "CUDA reported: initialization error", True),
]


@pytest.mark.parametrize(("message", "headline", "usable"), CUDA_TEXTS)
def test_each_cuda_error_is_told_apart(message: str, headline: str, usable: bool | None) -> None:
    """By its text alone: what it is, whether a device is still usable; no assert is claimed."""
    report = report_of(message, type_name="AcceleratorError")
    assert (report.kind, report.headline) == ("cuda_error", headline)
    assert report.context_usable is usable, "None where there is no device at all"
    assert report.certainty in ("proven", "likely", "unknown")
    if "restart the kernel" in report.explanation:
        assert not usable
    assert usable is not False or "restart the kernel" in report.explanation


def test_what_only_hides_another_error_is_not_called_proven() -> None:
    """A library's status and NCCL are seldom the cause."""
    for message in ("CUDNN_STATUS_INTERNAL_ERROR", "NCCL error in: x.cpp:1"):
        assert report_of(message).certainty == "unknown"


def test_without_a_gpu_the_rehearsal_is_named() -> None:
    """One sentence says how to go on without a GPU."""
    report = report_of("Torch not compiled with CUDA enabled", type_name="AssertionError")
    assert "%cudacheck simulate or cudalens.simulate()" in report.explanation


def test_a_device_side_assert_is_no_other_cuda_error() -> None:
    """The text of an assert is never handed to a family."""
    report = report_of("CUDA error: device-side assert triggered" + DSA)
    assert report.kind == "device_assert"


@pytest.mark.parametrize(
    ("message", "headline", "argument"),
    [
        (
            "Expected target size [8, 10], got [8, 5]",
            "target has shape (8, 5) instead of (8, 10)",
            "target",
        ),
        (
            "Found dtype Double but expected Float",
            "a gradient is float64, its tensor is float32",
            None,
        ),
        (
            "Input and hidden tensors are not at the same device, found input tensor at cuda:0 and "
            "hidden tensor at cpu",
            "input is on cuda:0, the state on cpu",
            "hx",
        ),
        (
            "module must have its parameters and buffers on device cuda:0 (device_ids[0]) but "
            "found "
            "one of them on device: cpu",
            "a parameter of the module is on cpu, DataParallel wants cuda:0",
            "module",
        ),
        (
            "You have to specify either input_ids or inputs_embeds",
            "You have to specify either input_ids or inputs_embeds",
            None,
        ),
        (
            "You cannot specify both input_ids and inputs_embeds at the same time",
            "input_ids and inputs_embeds are both given",
            "inputs_embeds",
        ),
        (
            "Unable to create tensor, you should probably activate truncation and/or padding with "
            "'padding=True' 'truncation=True' to have batched tensors with the same length.",
            "the texts have different numbers of tokens, and no padding makes them equal",
            "padding",
        ),
        (
            "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be "
            "the same",
            "input is float16, the weight is float32",
            "input",
        ),
        (
            "\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Int'",
            "target is int32, this call takes int64",
            "target",
        ),
        (
            "expected scalar type Half but found Float",
            "a tensor is float32, this call takes float16",
            None,
        ),
    ],
)
def test_texts_of_other_machines(message: str, headline: str, argument: str | None) -> None:
    """Messages that only a GPU, or another release of torch, gives."""
    report = report_of(message)
    assert report.kind == "host_error"
    assert report.headline.startswith(headline)
    assert report.argument == argument


@pytest.mark.parametrize(
    ("message", "headline"),
    [
        (
            "Function ScaleBackward returned an incorrect number of gradients (expected 2, got 1)",
            "ScaleBackward returned 1 gradients, its forward has 2 inputs",
        ),
        (
            "Inference tensors cannot be saved for backward. To work around you can make a clone",
            "a tensor made under torch.inference_mode is used where gradients are recorded",
        ),
        (
            "Function 'SqrtBackward0' returned nan values in its 0th output.",
            "SqrtBackward0 returned NaN as gradient 0",
        ),
        (
            "Function AddBackward0 returned an invalid gradient at index 1 - got [4] but expected "
            "shape compatible with [3]",
            "AddBackward0 returned a gradient of shape (4,) for its input 1 of shape (3,)",
        ),
    ],
)
def test_texts_of_autograd(message: str, headline: str) -> None:
    """Graph errors by their text."""
    report = report_of(message)
    assert (report.kind, report.headline) == ("autograd_error", headline)


def test_an_unknown_message_is_repeated() -> None:
    """What no family knows is said in torch's words, and no cause is invented."""
    report = report_of("a message that nobody has seen\nmore of it")
    assert (report.kind, report.headline) == ("host_error", "a message that nobody has seen")
    assert (report.argument, report.hints) == (None, ())


def test_hints_that_fail_leave_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict comes first: what fails after it is one line of ``limits``."""
    message = "mat1 and mat2 shapes cannot be multiplied (2x3 and 5x3)"
    whole = report_of(message)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(products, "_transposed", broken)
    report = report_of(message)
    assert (report.headline, report.explanation) == (whole.headline, whole.explanation)
    assert (len(whole.hints), report.hints) == (1, ())
    assert report.limits == ("hints of matrix_product failed: ZeroDivisionError: ",)


def test_an_internal_error_is_not_called_a_host_error() -> None:
    """A KeyError in torch's own Python code has no better name."""
    report = report_of("'node'", type_name="KeyError")
    assert (report.kind, report.certainty) == ("python_error", "unknown")


def detached(*lines: str, name: str = "loss") -> Evidence:
    """A backward on the last line, with the lines before it as context."""
    context = tuple(CodeLine(line=at, text=text) for at, text in enumerate(lines, start=1))
    return Evidence(
        error=ErrorFacts(
            type_name="RuntimeError",
            message="element 0 of tensors does not require grad and does not have a grad_fn",
        ),
        op=OpName(api="torch.Tensor.backward"),
        source=SourceSpan(line=len(lines), text=lines[-1].strip(), context=context),
        call_text=f"{name}.backward()",
        tensors=(TensorFact(argument="self", expression=name, dtype="float32"),),
    )


@pytest.mark.parametrize(
    ("line", "cause", "fix"),
    [
        ("loss = f(x).item()", "item() gives a Python number", "loss = f(x)"),
        ("loss = f(x).detach()", "detach() cuts the tensor off its graph", "loss = f(x)"),
        ("loss = f(x.argmax(1), y)", "argmax gives indices", None),
        ("loss = torch.tensor(f(x).item())", "item() gives a Python number", None),
        ("loss = f(x).data", ".data is the tensor without its graph", "loss = f(x)"),
    ],
)
def test_the_detaching_line_is_named(line: str, cause: str, fix: str | None) -> None:
    """The line that made the loss shows what cut it off."""
    report = diagnose(detached("x = model(z)", line, "loss.backward()"))
    assert f"Line 2 detached it: {cause}" in report.explanation
    assert [hint.fix for hint in report.hints] == [fix]


def test_a_loss_under_no_grad_is_named() -> None:
    """The block around the line that made the loss is part of the lines before it."""
    lines = ("with torch.no_grad():", "    loss = f(x)", "loss.backward()")
    report = diagnose(detached(*lines))
    assert "Line 2 ran under with torch.no_grad(): no graph is made." in report.explanation


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (("out = net(x).detach()", "loss = out.pow(2).mean()"), "Line 1 detached out: detach()"),
        (("p = net(x).argmax(1)", "q = p.float()", "loss = q.mean()"), "Line 1 detached p: argmax"),
        (("with torch.no_grad():", "    out = net(x)", "loss = F.relu(out)"), "Line 2 ran under"),
    ],
)
def test_what_the_loss_is_made_of_is_followed(lines: tuple[str, ...], why: str) -> None:
    """The one variable that the loss reads was cut off further up."""
    report = diagnose(detached(*lines, "loss.backward()"))
    assert why in report.explanation
    assert len(report.hints) == 1


@pytest.mark.parametrize(
    "lines",
    [
        ("goal = y.detach()", "loss = f(net(x), goal)", "loss.backward()"),
        ("out = net(x).detach()", "out = net(x)", "loss = out.mean()", "loss.backward()"),
        ("out = net(x).detach()", "loss = f(x.out)", "loss.backward()"),
        ("loss = f(x)", "loss.backward()"),
        ("shown = loss.item()", "loss.backward()"),
        ("with torch.no_grad():", "    n = f(x)", "loss = f(x)", "loss.backward()"),
        ("loss = f(x).item()", "loss = f(x)", "loss.backward()"),
    ],
)
def test_no_detaching_line_is_invented(lines: tuple[str, ...]) -> None:
    """A line that did not make the loss, or did it right, is not blamed."""
    evidence = detached(*lines)
    assert " detached " not in diagnose(evidence).explanation
    assert "no graph is made" not in diagnose(evidence).explanation
    assert diagnose(evidence).hints == ()


def step(op: str, line: int, text: str) -> ProvenanceStep:
    """A recorded op of the cell with number 3."""
    return ProvenanceStep(op=op, source=LineRef(cell=3, line=line, text=text))


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        ("y += 1", "y = y + 1"),
        ("y *= a + b", "y = y * (a + b)"),
        ("x.clamp_(min=1e-6)", "x = x.clamp(min=1e-06)"),
        ("h = F.relu(h, inplace=True)", "h = F.relu(h)"),
        ("mask.zero_()", "mask = torch.zeros_like(mask)"),
        ("mask.uniform_()", None),
        ("opt.step()", None),
        ("w[0] = 1", "w = w.clone(); w[0] = 1"),
        ("w[0][1] = 1", None),
        ("self.norm(x)", None),
    ],
)
def test_an_in_place_line_is_written_anew(code: str, fix: str | None) -> None:
    """Only forms whose meaning stays the same are rewritten."""
    evidence = Evidence(
        error=ErrorFacts(
            type_name="RuntimeError",
            message="one of the variables needed for gradient computation has been modified by an "
            "inplace operation: [torch.FloatTensor [3]], which is output 0 of ExpBackward0, is at "
            "version 1; expected version 0 instead.",
        ),
        modified=ModifiedTensor(
            modified=step("aten::add_", 7, code), savers=(step("aten::exp", 6, "y = w.exp()"),)
        ),
    )
    report = diagnose(evidence)
    assert report.headline.startswith(f"aten::add_ at In [3] line 7: {code} changed a tensor")
    assert report.explanation.startswith("It was saved by aten::exp at In [3] line 6: y = w.exp()")
    assert [hint.fix for hint in report.hints] == [fix]


@pytest.mark.parametrize("case", CASES, ids=ident)
def test_at_most_one_cause_is_given(case: Case, sim: simulate.Simulation) -> None:
    """The rules exclude one another: no report of a host error carries two causes."""
    outcome = run_cell(f"{SETUP}{case.setup}\n{case.bad}")
    assert len(outcome.shown.hints) <= 1, outcome.rules


TEXT_RULES = {
    "count_of_gradients": "Function F returned an incorrect number of gradients (expected 2, "
    "got 1)",
    "pad_tokens": "Unable to create tensor, you should probably activate truncation and/or padding",
}


@pytest.mark.parametrize("rule", TEXT_RULES)
def test_rules_over_texts_alone(rule: str) -> None:
    """Rules that need nothing but the message."""
    assert [hint.rule for hint in report_of(TEXT_RULES[rule]).hints] == [rule]


OF_FREED_GRAPHS = {"carried_state", "made_once", "backward_twice"}
"""Rules that test_freed_graph holds against recorded graphs."""


def rules_of_patterns() -> set[str]:
    """The rules of all hints that a pattern can give, from the source."""
    source = Path(host_errors.__path__[0])
    calls = (
        node
        for file in source.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Hint"
    )
    given = (keyword.value for node in calls for keyword in node.keywords if keyword.arg == "rule")
    return {value.value for value in given if isinstance(value, ast.Constant)}


def test_every_rule_fires_and_every_fix_is_code(sim: simulate.Simulation) -> None:
    """Over all cases: no rule without a case, and each fix can be read as Python."""
    # The last one needs a library: test_huggingface.
    fired = {*TEXT_RULES, "out_of_place", "input_beyond_positions", "left_behind"}
    for case in CASES:
        report = run_cell(f"{SETUP}{case.setup}\n{case.bad}").shown
        assert report.limits == (), case.bad
        for hint in report.hints:
            fired.add(hint.rule)
            assert hint.fix is None or ast.parse(hint.fix)
        sim.reset()
    assert fired >= rules_of_patterns() - OF_FREED_GRAPHS


def test_the_reports_of_host_errors_render(sim: simulate.Simulation) -> None:
    """Text and page of a report without offenders and bounds are complete."""
    report = run_cell(f"{SETUP}torch.ones(2, 3).cuda() @ torch.ones(2, 3).cuda()").shown
    assert "cannot be multiplied" in report.to_text()
    assert "cannot be multiplied" in report.to_html()
