"""The masks of dropout as a guide: their moments, the entries they share, the weights they drop."""

import copy
import itertools
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn

from pyro_bdl import Predictive, bayesianize, models
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.guides import AutoMCDropout, BernoulliNoise, GaussianNoise

D = torch.float64


def test_moments_and_quantiles_of_the_draws(model, data):
    for noise, mask in itertools.product([BernoulliNoise(), GaussianNoise()], ["units", "weights"]):
        guide = AutoMCDropout(model, p=0.3, sites="all", noise=noise, mask=mask).prototype(*data)
        draws = guide.sample_vectors(20000).detach()
        mean, variance = guide.location(), guide.variances()
        error = (variance / 20000).sqrt()
        assert ((draws.mean(0) - mean).abs() <= 4.5 * error).all()
        torch.testing.assert_close(draws.var(0), variance, rtol=0.08, atol=1e-12)
        levels = torch.tensor([0.05, 0.2, 0.4, 0.6, 0.8, 0.95], dtype=D)
        expected = torch.quantile(draws, levels, dim=0)
        found = guide.vector_quantiles(levels)
        torch.testing.assert_close(found, expected, rtol=0.06, atol=2e-2)
        single = guide.median()["0.weight"]
        torch.testing.assert_close(single, guide.quantiles([0.5])["0.weight"][0])


def test_which_entries_share_a_factor(model, data):
    def factors(**options):
        guide = AutoMCDropout(model, p=0.5, sites="all", **options).prototype(*data)
        draws = guide.sample_latents(300)
        return {n: (draws[n] / guide.mean_latents()[n]).detach() for n in guide.weights}

    units = factors()["0.weight"]
    assert (units == units[:, :1]).all()  # all outputs of one input unit
    assert (units[..., 0] != units[..., 1]).any()
    single = factors(mask="weights")["0.weight"].reshape(300, -1)
    for a, b in itertools.combinations(single.T, 2):
        assert (a != b).any()


def test_the_covariance_of_draws(model, data):
    """Within an input unit alpha M_i M_i', between units and sites nothing."""
    guide = AutoMCDropout(model, p=0.25, sites="all").prototype(*data)
    draws = guide.sample_vectors(40000).detach()
    weight = guide.mean_latents()["0.weight"].detach()
    expected = torch.zeros(guide.layout.size, guide.layout.size, dtype=D)
    block = torch.zeros(3, 2, 3, 2, dtype=D)
    for i in range(2):
        block[:, i, :, i] = torch.outer(weight[:, i], weight[:, i]) / 3
    expected[:6, :6] = block.reshape(6, 6)
    last = guide.layout.slices["2.weight"]
    expected[last, last] = torch.diag(guide.location().detach()[last].square()) / 3
    torch.testing.assert_close(torch.cov(draws.T), expected, rtol=0.05, atol=4e-3)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(2, 3), nn.Linear(3, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        return self.last(self.again(torch.relu(self.again(torch.relu(self.first(x))))))


def test_a_module_called_twice_has_one_mask_per_draw(data):
    """The program sees one matrix M diag(eps), in both calls."""
    net = Twice().to(D)
    model = models.Regression(bayesianize(net), noise=0.5)
    guide = AutoMCDropout(model, p=0.5).prototype(*data)
    assert set(guide.weights) == {"again.weight", "last.weight"}
    draws = guide.sample_latents(20)
    found = Predictive(model, guide)(data[0])["f"]
    assert len(found) == 100
    with torch.no_grad():
        for i in range(20):
            weights = {name: value[i] for name, value in draws.items()}
            factor = weights["again.weight"] / net.again.weight
            assert (factor == factor[:1]).all()
            by_hand = torch.func.functional_call(net, weights, (data[0],))[:, 0]
            from pyro_bdl.program import record

            run = record(model, weights, data)
            torch.testing.assert_close(run.deterministic["f"], by_hand)


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
    assert {n: (w.axis, w.num_units) for n, w in guide.weights.items()} == AXES
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
        masked = {"weight": layer.weight * factors[weight.units()], "bias": layer.bias}
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
    found = {n: (w.axis, w.num_units, w.hidden) for n, w in guide.weights.items()}
    assert found == {
        "cell.weight_ih": (1, 2, False),
        "cell.weight_hh": (1, 3, True),
        "last.weight": (1, 3, True),
    }
    factors = torch.tensor([0.0, 1.5], dtype=D)
    masked = {
        "cell.weight_ih": net.cell.weight_ih * factors[guide.weights["cell.weight_ih"].units()]
    }
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
    assert {n: w.axis for n, w in guide.weights.items()} == {"first": 0, "second": 1}
    assert all(w.hidden for w in guide.weights.values())  # the inputs are scaled by a latent
    assert len((guide.sample_latents(9)["first"] == 0).all(-1).unique()) == 2


def test_rates_by_name(model, data):
    guide = AutoMCDropout(model, p={"0.*": 0.2, "*.weight": 0.4}).prototype(*data)
    assert {n: r.item() for n, r in guide.rates().items()} == pytest.approx(
        {"0.weight": 0.2, "2.weight": 0.4}
    )
    only = AutoMCDropout(model, sites="0.weight").prototype(*data)
    assert list(only.weights) == ["0.weight"]
    assert (only.sample_latents(50)["2.weight"] == only.mean_latents()["2.weight"]).all()


def test_copies_keep_what_is_dropped(model, data):
    for options in ({"p": {"0.*": 0.2}}, {"learn_p": True}):
        guide = AutoMCDropout(model, **options).prototype(*data)
        for clone in (copy.deepcopy(guide), pickle.loads(pickle.dumps(guide))):
            assert clone.rates() == guide.rates() and clone.weights == guide.weights
            assert clone.sample_vectors(3).shape == (3, guide.layout.size)
