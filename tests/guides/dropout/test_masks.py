"""The masks of dropout as a guide: their moments, the entries they share, the weights they drop."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_bdl import bayesianize, models
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.guides import AutoMCDropout

D = torch.float64


def test_the_covariance_of_draws(model, data):
    """Within an input unit alpha M_i M_i', between units and sites nothing."""
    guide = AutoMCDropout(model, p={"0.weight": 0.25, "*.weight": 0.2}).prototype(*data)
    assert list(guide.weights) == ["0.weight", "2.weight"]
    draws = guide.sample_vectors(40000).detach()
    weight = guide.mean_latents()["0.weight"].detach()
    expected = torch.zeros(guide.layout.size, guide.layout.size, dtype=D)
    block = torch.zeros(3, 2, 3, 2, dtype=D)
    for i in range(2):
        block[:, i, :, i] = torch.outer(weight[:, i], weight[:, i]) / 3
    expected[:6, :6] = block.reshape(6, 6)
    last = guide.layout.slices["2.weight"]
    expected[last, last] = torch.diag(guide.location().detach()[last].square()) / 4
    torch.testing.assert_close(torch.cov(draws.T), expected, rtol=0.05, atol=4e-3)


# Which weights


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.attend = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.recur = nn.LSTM(4, 3, num_layers=2, batch_first=True)
        self.conv, self.grouped = nn.Conv1d(3, 4, 3, padding=1), nn.Conv1d(4, 4, 3, groups=2)
        self.up, self.norm = nn.ConvTranspose1d(4, 2, 2), nn.BatchNorm1d(2, affine=True)
        self.last = nn.Linear(10, 1)

    def forward(self, tokens):
        hidden, _ = self.recur(self.attend(self.embed(tokens)))
        hidden = self.norm(self.up(self.grouped(self.conv(hidden.mT))))
        return self.last(hidden.flatten(1))


AXES = {
    "embed.weight": (0, 5),
    "attend.self_attn.in_proj_weight": (1, 4),
    "attend.self_attn.out_proj.weight": (1, 4),
    "attend.linear1.weight": (1, 4),
    "attend.linear2.weight": (1, 8),
    "recur.weight_ih_l0": (1, 4),
    "recur.weight_hh_l0": (1, 3),
    "recur.weight_ih_l1": (1, 3),
    "recur.weight_hh_l1": (1, 3),
    "conv.weight": (1, 3),
    "grouped.weight": (1, 4),
    "up.weight": (0, 4),
    "last.weight": (1, 10),
}


def test_the_input_units_of_every_layer():
    model = models.Regression(bayesianize(Mixed()), noise=0.5)
    data = torch.randint(0, 5, (3, 6)), torch.randn(3)
    modes = [part.training for part in model.modules()]
    guide = AutoMCDropout(model, sites="all").prototype(*data)
    assert set(guide.weights) == set(AXES)
    for name, (axis, count) in AXES.items():
        weight = guide.weights[name]
        assert weight.num_units == count
        if name != "grouped.weight":
            assert (weight.units.movedim(axis, -1) == torch.arange(count)).all()
    assert [part.training for part in model.modules()] == modes
    assert int(model.network.network.norm.num_batches_tracked) == 0
    hidden = AutoMCDropout(model).prototype(*data)
    assert set(hidden.weights) == set(AXES) - {"embed.weight"}
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TemperedTraceMeanField_ELBO())
    assert all(math.isfinite(svi.step(*data)) for _ in range(2))


def test_dropping_a_channel_is_dropping_its_columns_of_a_kernel():
    """M diag(eps) on an input is M on the input times eps, for each layer's own axis."""
    x = torch.randn(2, 4, 6, dtype=D)
    for layer in (nn.Conv1d(4, 6, 3, groups=2), nn.ConvTranspose1d(4, 6, 3), nn.Conv1d(4, 2, 1)):
        layer = layer.to(D)
        net = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(1).to(D))
        net(x)
        model = models.Regression(bayesianize(net), noise=0.5)
        guide = AutoMCDropout(model, sites=["0.weight"]).prototype(x, torch.randn(2, dtype=D))
        weight = guide.weights["0.weight"]
        factors = torch.randn(weight.num_units, dtype=D)
        masked = {"weight": layer.weight * factors[weight.units], "bias": layer.bias}
        by_weight = torch.func.functional_call(layer, masked, (x,))
        torch.testing.assert_close(by_weight, layer(x * factors[:, None]))


class Unrolled(nn.Module):
    """A cell called at every step."""

    def __init__(self, cell):
        super().__init__()
        self.cell, self.last = cell, nn.Linear(3, 1)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.last(state[0] if isinstance(state, tuple) else state)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(cell):
    """Their weights are read, and dropping input units of them is dropping the input's."""
    net, x = Unrolled(cell(2, 3)).to(D), torch.randn(4, 3, 2, dtype=D)
    model = models.Regression(bayesianize(net), noise=0.5)
    guide = AutoMCDropout(model, sites="all").prototype(x, torch.randn(4, dtype=D))
    found = {n: (w.num_units, w.hidden) for n, w in guide.weights.items()}
    assert found == {
        "cell.weight_ih": (2, False), "cell.weight_hh": (3, True), "last.weight": (3, True),
    }  # fmt: skip
    factors = torch.tensor([0.0, 1.5], dtype=D)
    masked = {"cell.weight_ih": net.cell.weight_ih * factors[guide.weights["cell.weight_ih"].units]}
    by_weight = torch.func.functional_call(net, masked, (x,))
    torch.testing.assert_close(by_weight, net(x * factors))


def test_a_program_written_by_hand(data):
    def model(x, y=None):
        first = pyro.sample("first", dist.Normal(torch.zeros(2, 5, dtype=D), 1.0).to_event(2))
        second = pyro.sample("second", dist.Normal(torch.zeros(1, 5, dtype=D), 1.0).to_event(2))
        scale = pyro.sample("scale", dist.Normal(torch.zeros(2, dtype=D), 1.0).to_event(1))
        mean = (torch.relu((x * scale) @ first) @ second.T)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    guide = AutoMCDropout(model).prototype(*data)
    assert {n: w.num_units for n, w in guide.weights.items()} == {"first": 2, "second": 5}
    assert all(w.hidden for w in guide.weights.values())  # the inputs are scaled by a latent
    assert len((guide.sample_latents(9)["first"] == 0).all(-1).unique()) == 2
