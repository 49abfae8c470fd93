"""Every guide on a plate of networks that a hyperprior ties."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.distributions import kl_divergence

from pyro_bdl import Predictive, bayesianize
from pyro_bdl.distributions.dropout_noise import BernoulliNoise, NoisyWeight
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.estimators import flipout, local_reparameterization
from pyro_bdl.guides import AutoEnsemble, AutoMCDropout, AutoMeanField
from pyro_bdl.nn import each
from pyro_bdl.priors import Normal

# outputs without a closed form
pytestmark = pytest.mark.filterwarnings("ignore:.*#last-layer-draws")

G, N = 3, 5
X = torch.linspace(-1, 1, N * G * 2, dtype=torch.float64).cos().reshape(N, G, 2)
Y = torch.linspace(0, 7, N * G, dtype=torch.float64).sin().reshape(N, G)


class Groups(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        pyro.set_rng_seed(0)
        net = nn.Sequential(*(layers or (nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))).double()
        self.networks = bayesianize(net, Normal(dist.LogNormal(0.0, 0.5)), plate="groups")

    def forward(self, x, y=None):
        with pyro.plate("groups", x.shape[1]):
            f = pyro.deterministic("f", self.networks(each(x, dim=1))[..., 0].T)
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(f, 0.3), obs=y)


def _train(model, guide, elbo, steps=3):
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), elbo)
    return [svi.step(X, Y) for _ in range(steps)]


def test_a_step_moves_every_parameter_and_predictions_have_the_groups(kind):
    model = Groups()
    guide = kind(model).prototype(X, Y)
    before = guide.location().clone()
    _train(model, guide, TemperedTraceMeanField_ELBO(num_particles=2), steps=1)
    assert (guide.location() != before).all()
    predicted = Predictive(model, guide, num_samples=4)(X)
    assert predicted["y"].shape == predicted["f"].shape == (4, N, G)


@pytest.mark.parametrize("estimator", [local_reparameterization, flipout])
def test_noise_for_every_datum_reaches_all_networks(estimator):
    """A mean over many draws is the plain bound's: linear networks, by the standard error."""
    model = Groups(nn.Linear(2, 1))
    guide = AutoMeanField(model, init_scale=0.3).prototype(X, Y)
    found = []
    for options in ({}, {"estimator": estimator.__name__}):
        elbo = TemperedTraceMeanField_ELBO(num_particles=400, **options)
        pyro.set_rng_seed(2)
        losses = torch.tensor([elbo.loss(model, guide, X, Y) for _ in range(4)])
        found.append((losses.mean(), losses.var() / 4))
    (plain, error), (noisy, other) = found
    assert (plain - noisy).abs() < 5 * (error + other).sqrt()


def test_members_of_an_ensemble_and_their_networks_start_apart():
    guide = AutoEnsemble(Groups(), size=2).prototype(X, Y)
    weights = torch.stack([guide.member(k)["0.weight"] for k in range(2)])
    assert len(weights.unique()) == weights.numel()


# Dropout


@pytest.mark.parametrize("layer", [True, False], ids=["dropout layers", "rates"])
def test_units_of_each_network_are_dropped_on_their_own(layer):
    layers = (nn.Linear(2, 4), nn.Tanh(), *([nn.Dropout(0.4)] if layer else []), nn.Linear(4, 2))
    model = Groups(*layers)
    make = AutoMCDropout.from_dropout_layers if layer else AutoMCDropout
    guide = make(model, **({} if layer else {"p": 0.4})).prototype(X, Y)
    ((site, weight),) = guide.weights.items()
    assert weight.num_units == 4 * G
    kept = guide.sample_latents(2000)[site] != 0  # (S, G, 2, 4)
    assert (kept[:, :, :1] == kept).all()
    share = kept[:, :, 0].double().flatten(1)
    error = (0.24 / 2000) ** 0.5
    assert ((share.mean(0) - 0.6).abs() < 5 * error).all()
    off_diagonal = torch.corrcoef(share.T).fill_diagonal_(0.0)
    assert off_diagonal.abs().max() < 5 / 2000**0.5


@pytest.mark.parametrize("step", [None, 0], ids=["fixed rate", "learned rate"])
def test_divergences_of_dropped_weights_are_those_of_each_network(step):
    loc = torch.randn(G, 2, 4, dtype=torch.float64)
    p, index = torch.tensor(0.3).double(), torch.arange(4).expand(2, 4)
    noise, prior = BernoulliNoise(), dist.Normal(loc.new_zeros(2, 4), 0.7).to_event(2)
    shifted = 4 * torch.arange(G)[:, None, None] + index
    many = NoisyWeight(loc, shifted, p, 4 * G, noise, step, batch_dims=1)
    alone = [NoisyWeight(loc[g], index, p, 4, noise, step) for g in range(G)]
    expected = torch.stack([kl_divergence(one, prior) for one in alone])
    torch.testing.assert_close(kl_divergence(many, prior.expand((G,))), expected)
    value = many.sample((5,))
    expected = torch.stack([one.log_prob(value[:, g]) for g, one in enumerate(alone)], 1)
    torch.testing.assert_close(many.log_prob(value), expected)
