"""Fresh starts: whatever torch draws at random when a layer is made, a member draws anew."""

import inspect

import pytest
import torch
from pyro import poutine
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import pyro_bdl as bdl
from pyro_bdl.init import init_afresh, start_at

LAYERS = {
    "Linear": lambda: nn.Linear(3, 2),
    "Bilinear": lambda: nn.Bilinear(2, 3, 2),
    "Conv1d": lambda: nn.Conv1d(2, 3, 3),
    "Conv2d": lambda: nn.Conv2d(2, 3, 3),
    "Conv3d": lambda: nn.Conv3d(2, 3, 3),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(2, 3, 3),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(2, 3, 3),
    "ConvTranspose3d": lambda: nn.ConvTranspose3d(2, 3, 3),
    "Embedding": lambda: nn.Embedding(4, 3),
    "EmbeddingBag": lambda: nn.EmbeddingBag(4, 3),
    "RNN": lambda: nn.RNN(2, 3, num_layers=2, bidirectional=True),
    "LSTM": lambda: nn.LSTM(2, 4, proj_size=2),
    "GRU": lambda: nn.GRU(2, 3),
    "RNNCell": lambda: nn.RNNCell(2, 3),
    "LSTMCell": lambda: nn.LSTMCell(2, 3),
    "GRUCell": lambda: nn.GRUCell(2, 3),
    "MultiheadAttention": lambda: nn.MultiheadAttention(4, 2, kdim=3, add_bias_kv=True),
    "Transformer": lambda: nn.Transformer(4, 2, 1, 1, 8),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(4, 2, 8),
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(4, 2, 8),
    "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 10, [2, 5]),
    "PReLU": nn.PReLU,
    "LayerNorm": lambda: nn.LayerNorm(3),
    "RMSNorm": lambda: nn.RMSNorm(3),
    "GroupNorm": lambda: nn.GroupNorm(1, 3),
    "BatchNorm1d": lambda: nn.BatchNorm1d(3),
    "BatchNorm2d": lambda: nn.BatchNorm2d(3),
    "BatchNorm3d": lambda: nn.BatchNorm3d(3),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(3, affine=True),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(3, affine=True),
    "InstanceNorm3d": lambda: nn.InstanceNorm3d(3, affine=True),
    "low-rank adapter": lambda: bdl.adapters.lora(nn.Linear(3, 2), 2, targets=lambda name: True),
}
_OTHERS = {"SyncBatchNorm", "RNNBase", "RNNCellBase"}  # of a GPU; without parameters of their own


def test_the_table_has_all_layers():
    found = {
        name
        for name, kind in vars(nn).items()
        if inspect.isclass(kind) and hasattr(kind, "reset_parameters") and "Lazy" not in name
    }
    assert found - _OTHERS <= LAYERS.keys()


class Beside(nn.Module):
    """A network that holds a layer, which is not called."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.out = layer, nn.Linear(1, 1)

    def forward(self, x):
        return self.out(x)


def starts(network):
    trace = poutine.trace(start_at(init_afresh)(network)).get_trace(torch.zeros(1, 1))
    return {name: node["value"] for name, node in trace.iter_stochastic_nodes()}


def random_parameters(make):
    """The names of the parameters that two layers do not share, as torch makes them."""
    first, second = (dict(Beside(make()).named_parameters()) for _ in range(2))
    return {name for name, value in first.items() if not torch.equal(value, second[name])}


@pytest.mark.parametrize("name", LAYERS)
def test_what_torch_draws_is_drawn_anew(name):
    network = bdl.bayesianize(Beside(LAYERS[name]()))
    first, second = starts(network), starts(network)
    drawn = {site for site, value in first.items() if not torch.equal(value, second[site])}
    assert random_parameters(LAYERS[name]) & first.keys() <= drawn
    before = dict(network.network.named_buffers())
    assert not any(torch.equal(before[site], first[site]) for site in drawn)  # and it is unchanged


def test_the_law_is_that_of_the_layer():
    """Recurrent weights are uniform in (-1 / sqrt(h), 1 / sqrt(h))."""
    network = bdl.bayesianize(Beside(nn.LSTM(3, 16)))
    weights = starts(network)["layer.weight_hh_l0"]
    assert weights.abs().max() < 0.25
    assert float(weights.var()) == pytest.approx(0.25**2 / 3, rel=0.1)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 1))
        self.inner = nn.Linear(3, 3)

    def forward(self, x):
        return self.inner(x) @ self.w


class OwnReset(Own):
    def reset_parameters(self):
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter)


@pytest.mark.parametrize(
    "make, alike",
    [
        (Own, "'w'"),
        (OwnReset, None),
        (lambda: weight_norm(nn.Linear(3, 1)), "'parametrizations.weight.original0', .*"),
        (lambda: nn.Linear(3, 1), None),
    ],
)
def test_an_ensemble_says_what_it_cannot_draw_anew(make, alike, recwarn, tmp_path):
    x, y = torch.randn(5, 3), torch.randn(5)
    model = bdl.models.Regression(bdl.bayesianize(make()))
    guide = bdl.guides.AutoEnsemble(model, size=3).prototype(x, y)
    said = [str(w.message) for w in recwarn if "same values of" in str(w.message)]
    assert len(said) == (alike is not None)
    parts = {name: guide.locs[:, part] for name, part in guide.layout.slices.items()}
    same = [repr(name) for name, locs in parts.items() if torch.equal(locs[0], locs[1])]
    if alike is None:
        assert not same
    else:
        assert all(name in said[0] for name in same)
    recwarn.clear()
    bdl.load_posterior(guide.save(tmp_path / "ensemble"), model)
    bdl.guides.AutoEnsemble(model, size=2, init_loc_fn=bdl.init.init_to_network).prototype(x, y)
    assert not [w for w in recwarn if "same values of" in str(w.message)]
