"""Masks for every example: moments, what shares a mask, expectations of the bound."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from pyro_bdl import bayesianize, handlers, models, priors
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.estimators import per_example_dropout
from pyro_bdl.guides import AutoMCDropout, AutoMeanField, GaussianNoise
from pyro_bdl.program import record
from pyro_bdl.program.vmap import RowMap

D = torch.float64
COUNT = 4000


class Parts(nn.Module):
    """A convolution with groups, one whose outputs are summed over positions, and a layer."""

    def __init__(self):
        super().__init__()
        self.grouped, self.kernel = nn.Conv1d(4, 4, 2, groups=2), nn.Conv1d(4, 3, 2)
        self.last = nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.kernel(self.grouped(x).tanh()).tanh().sum(-1))


class Tokens(nn.Module):
    """One layer called for two looked up rows, which share their masks."""

    def __init__(self):
        super().__init__()
        self.rows, self.layer = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, x):
        z = self.rows(x)
        return self.layer(z[:, 0]) * self.layer(z[:, 1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x.flip(1), x.flip(1))[0].flatten(1)


class Categories(nn.Module):
    """One row for each datum."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(5, 3)

    def forward(self, x):
        return self.rows(x).tanh()


NETWORKS = {
    "MLP": (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(3)),
    "convolutions": (Parts(), torch.randn(4, 4)),
    "look-ups": (Tokens(), torch.tensor([3, 3])),
    "one look-up": (Categories(), torch.tensor(3)),
    "attention": (Attention(), torch.randn(3, 4)),
}


@pytest.mark.parametrize("mask", ["units", "weights"])
@pytest.mark.parametrize("name", NETWORKS)
def test_rows_of_a_run_are_distributed_as_plain_draws(name, mask, rowwise, one_mean):
    """Mean and second moments over the rows of one run, against one row of many draws."""
    net, row = NETWORKS[name]
    net = net.double()
    row = row.double() if row.is_floating_point() else row
    model = models.Regression(bayesianize(net), noise=0.5)
    x, many = (row[None].expand(count, *row.shape) for count in (2, COUNT))
    with torch.no_grad():
        y = torch.zeros_like(model.network.network(x))
        guide = AutoMCDropout(model, p=0.3, sites="all", mask=mask).prototype(x, y)
        latents = {name: values[0] for name, values in guide.sample_latents(1).items()}
        q = guide.site_distributions()
        rows = rowwise(per_example_dropout(), RowMap(), model.network, q, latents, many)
        draws = guide.sample_latents(COUNT)
        plain = torch.vmap(lambda w: record(model.network, w, (x,)).result[0])(draws)
    assert len(rows.unique(dim=0)) > 1 and one_mean(rows, plain)
    rows, plain = ((z[:, :, None] * z[:, None]).flatten(1) for z in (rows, plain))
    assert one_mean(rows, plain)


# data that are alike, so that noise they share does not average out
X = 1.0 + 0.3 * torch.randn(8, 3, dtype=D, generator=torch.Generator().manual_seed(0))
Y = torch.zeros(8, dtype=torch.long)
VARIATIONAL = {"learn_p": True, "noise": GaussianNoise(), "mask": "weights", "sites": "all"}


class Penalized(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + self[2].weight.square().sum()


def classifier(prior=None, kind=nn.Sequential):
    net = kind(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    return models.Classification(bayesianize(net, prior or priors.Normal(1.0)))


@pytest.mark.parametrize(
    ("estimator", "context", "options", "particles", "most"),
    [
        (handlers.per_example_dropout, True, {}, 100, 1.0),
        (handlers.per_example_dropout, False, {"learn_p": True}, 100, 1.0),
        (handlers.local_reparameterization, True, VARIATIONAL, 50, 0.7),
        (handlers.flipout, False, VARIATIONAL, 50, 0.7),
    ],
)
def test_the_bound_and_its_gradient_have_the_same_expectation(
    estimator, context, options, particles, most, steps, one_mean
):
    """With less noise. Gaussian factors of weights are Normals (Kingma, Salimans & Welling 2015,
    variational dropout)."""
    rules = {"*.weight": priors.LogUniform(), "*": priors.Normal(1.0)}
    model, found = classifier(priors.ByName(rules) if options is VARIATIONAL else None), []
    guide = AutoMCDropout(model, p=0.3, **options).prototype(X, Y)
    guide.skip_steps = lambda count: None  # the temperature of the relaxation stays
    for name in (None, estimator.__name__):
        option = None if context else name
        elbo = TemperedTraceMeanField_ELBO(num_particles=particles, estimator=option)
        with estimator() if context and name else nullcontext():
            found.append(steps(elbo, model, guide, (X, Y), 60))
    plain, other = found
    assert one_mean(plain, other) and other.var(0).sum() < most * plain.var(0).sum()


NO_NORMAL = r"dropout at site '2.weight'.*per_example"


@pytest.mark.parametrize(
    ("estimator", "model", "guide", "options", "message"),
    [
        ("flipout", classifier(), AutoMCDropout, {"mask": "weights"}, NO_NORMAL),
        ("flipout", classifier(), AutoMCDropout, {"noise": GaussianNoise()}, NO_NORMAL),
        ("local_reparameterization", classifier(), AutoMCDropout, {}, NO_NORMAL),
        ("per_example_dropout", classifier(), AutoMeanField, {}, r"AutoMCDropout, and site '0.wei"),
        (
            "per_example_dropout", classifier(kind=Penalized), AutoMCDropout, {},
            r"latent '2.weight' is used twice",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(estimator, model, guide, options, message):
    guide = guide(model, **options).prototype(X, Y)
    elbo = TemperedTraceMeanField_ELBO(estimator=estimator)
    with pytest.raises(UnsupportedProgramError, match=message):
        elbo.loss(model, guide, X, Y)
