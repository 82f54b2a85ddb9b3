"""The cells that the browser runs, on a real or a simulated device."""

SETUP = """\
%load_ext cudalens
import time
import cudalens, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

cudalens.ensure_cuda()
torch.manual_seed(0)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(-1)


net = nn.Sequential(nn.Conv1d(1, 16, 3), nn.ReLU(), Mean(), nn.Linear(16, 10)).to("cuda")
digits = torch.randint(1, 10, (160,))
digits[[40, 49, 52, 63]] = torch.tensor([1, 10, 10, 10])
loader = DataLoader(TensorDataset(torch.randn(160, 1, 100), digits), batch_size=32)"""

FAILING = """\
%%cudacheck
for x, y in loader:
    x, y = x.to("cuda"), y.to("cuda")
    logits = net(x)
    loss = F.cross_entropy(logits, y)
    loss.backward()"""

SETUP_SHORT = """\
%load_ext cudalens
import cudalens, torch
import torch.nn.functional as F

cudalens.ensure_cuda()
torch.manual_seed(0)
model = torch.nn.Linear(64, 10).to("cuda")
images = torch.randn(32, 64, device="cuda")
y = torch.arange(32, device="cuda") % 10 + 1"""

FAILING_SHORT = """\
%%cudacheck
out = model(images)
loss = F.cross_entropy(out, y)"""

BUSY = """\
from pathlib import Path

while not Path("go_on").exists():
    time.sleep(0.05)"""
