"""torch_geometric: GCN, GAT, GIN, SAGE, top-k pooling, a loader of graphs, utilities."""

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    GraphConv,
    MessagePassing,
    SAGEConv,
    TopKPooling,
    global_mean_pool,
)
from torch_geometric.utils import degree, negative_sampling, scatter, softmax, to_dense_batch

LIBRARIES = ("torch_geometric",)


class Nodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [GCNConv(6, 8), GATConv(8, 8, heads=2, concat=False), SAGEConv(8, 8), GraphConv(8, 3)]
        )

    def forward(self, x, edges):
        for layer in self.layers:
            x = layer(F.dropout(F.elu(x), 0.1, self.training), edges)
        return x


class Weighted(MessagePassing):
    def __init__(self):
        super().__init__(aggr="add")
        self.scale = nn.Linear(6, 6)

    def forward(self, x, edges):
        return self.propagate(edges, x=self.scale(x))

    def message(self, x_j):
        return x_j * 0.5


class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = GINConv(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8)))
        self.pick = TopKPooling(8, 0.6)
        self.head = nn.Linear(8, 2)

    def forward(self, graphs):
        x = self.mix(graphs.x, graphs.edge_index)
        x, _, _, batch, _, _ = self.pick(x, graphs.edge_index, batch=graphs.batch)
        return self.head(global_mean_pool(x, batch))


def program():
    edges = torch.randint(0, 20, (2, 70))
    data = Data(x=torch.randn(20, 6), edge_index=edges, y=torch.randint(0, 3, (20,))).to("cuda")
    nodes, weighted = Nodes().cuda(), Weighted().cuda()
    optimizer = torch.optim.Adam([*nodes.parameters(), *weighted.parameters()], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        x = weighted(data.x, data.edge_index)
        F.cross_entropy(nodes(x, data.edge_index)[::2], data.y[::2]).backward()
        optimizer.step()
    many = [
        Data(
            x=torch.randn(size, 6),
            edge_index=torch.randint(0, size, (2, 2 * size)),
            y=torch.tensor([size % 2]),
        )
        for size in (4, 7, 5, 9, 6, 8)
    ]
    graphs = Graphs().cuda()
    optimizer = torch.optim.Adam(graphs.parameters(), lr=1e-2)
    for on_host in DataLoader(many, batch_size=3, shuffle=True):
        batch = on_host.to("cuda")
        optimizer.zero_grad()
        F.cross_entropy(graphs(batch), batch.y).backward()
        optimizer.step()
    source, target = data.edge_index
    used = [
        degree(source, 20),
        scatter(data.x[source], target, 0, dim_size=20, reduce="mean"),
        *to_dense_batch(batch.x, batch.batch),
        softmax(torch.randn(70, device="cuda"), target),
        negative_sampling(data.edge_index, 20, 15),
    ]
    return nodes.state_dict(), weighted.state_dict(), graphs.state_dict(), used
