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

SETUP_KINDS = """\
%load_ext cudalens
import cudalens, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

cudalens.ensure_cuda()
torch.manual_seed(0)"""

KINDS = {
    "labels": (
        """\
%%cudacheck
model = nn.Linear(64, 10).to("cuda")
images = torch.randn(32, 64, device="cuda")
y = torch.arange(32, device="cuda") % 10 + 1
out = model(images)
loss = F.cross_entropy(out, y)""",
    ),
    "mask": (
        """\
%%cudacheck
seg = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
                    nn.Conv2d(16, 21, 1)).to("cuda")
photos = torch.rand(2, 3, 64, 64, device="cuda")
yy, xx = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
disc = ((yy - 30) ** 2 + (xx - 34) ** 2).sqrt()
box = torch.maximum((yy - 34).abs(), (xx - 28).abs())
masks = torch.zeros(2, 64, 64, dtype=torch.long)
masks[0][disc < 21] = 15
masks[1][box < 17] = 8
masks[0][(disc - 21).abs() < 1] = 255
masks[1][(box - 17).abs() < 1] = 255
pred = seg(photos)
loss = nn.CrossEntropyLoss()(pred, masks.to("cuda"))
loss.backward()""",
    ),
    "loader": (
        """\
class Recommender(nn.Module):
    def __init__(self, n_users, n_items):
        super().__init__()
        self.users = nn.Embedding(n_users, 16)
        self.items = nn.Embedding(n_items, 16)

    def forward(self, user, item):
        u, v = self.users(user), self.items(item)
        return (u * v).sum(-1)

model = Recommender(100, 64).to("cuda")""",
        """\
items = torch.randint(0, 64, (300,))
items[216:224] = torch.tensor([25, 64, 17, 31, 31, 20, 26, 39])
data = TensorDataset(torch.randint(0, 100, (300,)), items, torch.rand(300))""",
        """\
%%cudacheck
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for user, item, rating in DataLoader(data, batch_size=8):
    score = model(user.cuda(), item.cuda())
    loss = F.mse_loss(score, rating.cuda())
    opt.zero_grad()
    loss.backward()
    opt.step()""",
    ),
    "flatten": (
        """\
%%cudacheck
net = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
    nn.Flatten(),
    nn.Linear(2048, 10),
).to("cuda")
images = torch.rand(8, 3, 32, 32, device="cuda")
logits = net(images)""",
    ),
    "nan": (
        """\
%%cudacheck --nan
encoder = nn.Linear(20, 8).to("cuda")
x = torch.randn(16, 20, device="cuda")
same = torch.arange(16, device="cuda") % 4
same = same[:, None] == same[None, :]
z = encoder(x)
diff = z[:, None] - z[None, :]
dist = diff.pow(2).sum(-1).sqrt()
push = F.relu(1.0 - dist)
loss = torch.where(same, dist, push).mean()
loss.backward()""",
    ),
    "in_place": (
        """\
%%cudacheck
gate = nn.Linear(32, 32).to("cuda")
x = torch.randn(8, 32, device="cuda")
keep = torch.rand(8, 32, device="cuda") > 0.1
h = torch.sigmoid(gate(x))
h *= keep
h[:, 0] = 1.0
loss = h.sum()
loss.backward()""",
    ),
    "state": (
        """\
%%cudacheck
class Char(nn.Module):
    def __init__(self, vocab, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, ids, h):
        y, h = self.rnn(self.emb(ids), h)
        return self.out(y), h

text = torch.randint(0, 60, (8, 200), device="cuda")
char = Char(60).to("cuda")
opt = torch.optim.Adam(char.parameters())
h = None
for i in range(0, 190, 10):
    logits, h = char(text[:, i:i + 10], h)
    loss = F.cross_entropy(logits.flatten(0, 1), text[:, i + 1:i + 11].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()""",
    ),
    "cat": (
        """\
%%cudacheck
skip = torch.ones(1, 2, 5, device="cuda", requires_grad=True) * 2
low = torch.ones(1, 2, 2, device="cuda", requires_grad=True) * 2
torch.cat([skip, F.interpolate(low, scale_factor=2)], 1)""",
    ),
    "deep": (
        """\
%%cudacheck
layers = []
for _ in range(14):
    layers += [nn.Linear(32, 32), nn.ReLU()]
deep = nn.Sequential(*layers, nn.Linear(33, 5)).to("cuda")
inputs = torch.randn(16, 32, device="cuda")
logits = deep(inputs)""",
    ),
    "borders": (
        """\
%%cudacheck
masks = torch.randint(0, 3, (2, 64, 64))
masks[:, :2] = 255
masks[:, :, :2] = 255
F.cross_entropy(torch.randn(2, 3, 64, 64, device="cuda"), masks.to("cuda"))""",
    ),
    "long": (
        """\
%%cudacheck
coder = nn.ModuleDict({"encoder": nn.Linear(16, 32), "decoder": nn.Linear(32, 8)}).to("cuda")
very_long_input_name = torch.randn(4, 16, device="cuda")
some_long_prediction_name = torch.randn(4, 10, device="cuda")
other_long_target_name = torch.tensor([1, 2, 3, 10], device="cuda")
loss = 0.5 * F.cross_entropy(some_long_prediction_name * coder["encoder"](very_long_input_name)\
.mean(), other_long_target_name, label_smoothing=0.1, reduction="mean")""",
    ),
    "lost": (
        """\
head3 = nn.Linear(16, 3).to("cuda")
features = torch.randn(32, 16, device="cuda")
classes = torch.randint(1, 4, (32,), device="cuda")
loss = F.cross_entropy(head3(features), classes)
print(loss.item())""",
        """\
%cudacheck explain""",
    ),
}
"""Cells of each kind of failure, the last of which is reported; the last kind loses the device."""
