"""Networks of every kind of layer."""

import torch
from torch import nn

X = torch.linspace(-1.0, 1.0, 8).reshape(4, 2)


class First(nn.Module):
    """The first of what a module returns."""

    def __init__(self, inner, repeat=1):
        super().__init__()
        self.inner, self.repeat = inner, repeat

    def forward(self, x):
        return self.inner(*[x] * self.repeat)[0]


class Tied(nn.Module):
    """An autoencoder of words whose decoder is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x).tanh())


WORDS = torch.tensor([[0, 1, 6], [3, 3, 2]])
NETS = {
    "Linear": (lambda: nn.Linear(3, 2), (5, 3)),
    "Conv1d": (lambda: nn.Conv1d(2, 4, 3, groups=2, padding=1), (5, 2, 6)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 3, stride=2), (5, 2, 6, 6)),
    "Conv3d": (lambda: nn.Conv3d(1, 2, 2), (3, 1, 3, 3, 3)),
    "Embedding": (lambda: nn.Embedding(7, 4), None),
    "LayerNorm": (lambda: nn.LayerNorm(4), (5, 4)),
    "BatchNorm1d": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 3)),
    "BatchNorm2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4)), (5, 2, 4, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (5, 4, 3)),
    "MultiheadAttention": (
        lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), 3),
        (2, 5, 4),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        (2, 5, 4),
    ),
    "GRU": (lambda: First(nn.GRU(3, 4, 2, bidirectional=True, batch_first=True)), (2, 5, 3)),
    "LSTM": (lambda: First(nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True)), (2, 5, 3)),
    "tied": (Tied, None),
}
RECURRENT = ("GRU", "LSTM")


def _own_values(bnn):
    return {name: bnn.get_buffer(f"network.{name}") for name in bnn.sites}


# Which parameters become sites


def small_mlp():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
