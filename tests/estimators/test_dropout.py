"""Masks for every example: moments, what shares a mask, expectations of the bound."""

from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.estimators import flipout, local_reparameterization, per_example_dropout
from pyro_bdl.guides import AutoMCDropout, AutoMeanField, GaussianNoise
from pyro_bdl.program import record
from pyro_bdl.program.rows import RowMap

D = torch.float64
COUNT = 4000
CONTEXTS = {"local_reparameterization": local_reparameterization, "flipout": flipout}


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


def outputs(guide, model, x, context=None):
    """f of every row of x, each at the draw or mask of a run."""
    latents = {name: values[0] for name, values in guide.sample_latents(1).items()}
    if context is None:
        return record(model.network, latents, (x,)).result

    def of_datum(args, kwargs, lane):
        return context.of_datum(lambda: record(model.network, latents, args).result)[0]

    with context.run(guide.site_distributions(), latents):
        return RowMap()(of_datum, (x,), {})


@pytest.mark.parametrize("mask", ["units", "weights"])
@pytest.mark.parametrize("name", NETWORKS)
def test_rows_of_a_run_are_distributed_as_plain_draws(name, mask):
    """Mean and second moments over the rows of one run, against one row of many draws."""
    net, row = NETWORKS[name]
    net = net.double()
    row = row.double() if row.is_floating_point() else row
    model = models.Regression(bayesianize(net), noise=0.5)
    x = row[None].expand(2, *row.shape)
    with torch.no_grad():
        y = torch.zeros_like(model.network.network(x))
        guide = AutoMCDropout(model, p=0.3, sites="all", mask=mask).prototype(x, y)
        many = row[None].expand(COUNT, *row.shape)
        rows = outputs(guide, model, many, per_example_dropout())
        draws = guide.sample_latents(COUNT)
        plain = torch.vmap(lambda w: record(model.network, w, (x,)).result[0])(draws)
    assert len(rows.unique(dim=0)) > 1
    for power in (lambda z: z, lambda z: (z[:, :, None] * z[:, None]).flatten(1)):
        a, b = power(rows), power(plain)
        error = ((a.var(0) + b.var(0)) / COUNT).sqrt()
        assert ((a.mean(0) - b.mean(0)).abs() < 5 * error + 1e-12).all()


def classifier():
    x = torch.randn(8, 3, dtype=D)
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    model = models.Classification(bayesianize(net, priors.Normal(1.0)))
    return model, x, torch.randint(0, 2, (8,))


@pytest.mark.parametrize("learn_p", [False, True])
def test_the_bound_and_its_gradient_have_the_same_expectation(learn_p):
    model, x, y = classifier()
    guide = AutoMCDropout(model, p=0.3, learn_p=learn_p).prototype(x, y)
    parameters, found = list(guide.parameters()), {}
    for estimator in (None, "per_example_dropout"):
        objective = TemperedTraceMeanField_ELBO(num_particles=100, estimator=estimator)(
            model, guide
        )
        rows = []
        for _ in range(60):
            loss = objective(x, y)
            gradients = torch.autograd.grad(loss, parameters)
            rows.append(torch.cat([loss.detach().reshape(1), *(g.reshape(-1) for g in gradients)]))
            if learn_p:
                guide.steps.zero_()  # the temperature of the relaxation stays
        found[estimator] = torch.stack(rows)
    a, b = found.values()
    error = ((a.var(0) + b.var(0)) / 60).sqrt()
    assert ((a.mean(0) - b.mean(0)).abs() <= 5 * error + 1e-12).all()
    assert b[:, 0].var() < a[:, 0].var()


@pytest.mark.parametrize("estimator", ["local_reparameterization", "flipout"])
@pytest.mark.parametrize("context", [False, True])
def test_gaussian_factors_of_weights_are_normals(estimator, context):
    """Variational dropout (Kingma, Salimans & Welling 2015): the same expectations, less noise."""
    _, x, y = classifier()
    net = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    rules = {"*.weight": priors.LogUniform(), "*": priors.Normal(1.0)}
    model = models.Classification(bayesianize(net, priors.ByName(rules)))
    options = {"p": 0.3, "learn_p": True, "noise": GaussianNoise(), "mask": "weights"}
    guide = AutoMCDropout(model, sites="all", **options).prototype(x, y)
    parameters, found = list(guide.parameters()), {}
    for name in (None, estimator):
        option = None if context else name
        objective = TemperedTraceMeanField_ELBO(num_particles=50, estimator=option)(model, guide)
        rows = []
        for _ in range(80):
            with CONTEXTS[name]() if context and name else nullcontext():
                loss = objective(x, y)
            gradients = torch.autograd.grad(loss, parameters)
            rows.append(torch.cat([loss.detach().reshape(1), *(g.reshape(-1) for g in gradients)]))
        found[name] = torch.stack(rows)
    a, b = found.values()
    error = ((a.var(0) + b.var(0)) / 80).sqrt()
    assert ((a.mean(0) - b.mean(0)).abs() <= 5 * error + 1e-12).all()
    assert b[:, 0].var() < 0.7 * a[:, 0].var()


@pytest.mark.parametrize("estimator", ["local_reparameterization", "flipout"])
@pytest.mark.parametrize("options", [{"mask": "weights"}, {"noise": GaussianNoise()}])
def test_other_dropout_has_no_normals(estimator, options):
    model, x, y = classifier()
    guide = AutoMCDropout(model, p=0.3, **options).prototype(x, y)
    elbo = TemperedTraceMeanField_ELBO(estimator=estimator)
    with pytest.raises(UnsupportedProgramError, match=r"dropout at site '2.weight'.*per_example"):
        elbo.loss(model, guide, x, y)


def test_a_context_trains_a_dropout_guide():
    model, x, y = classifier()
    guide = AutoMCDropout(model, p=0.3).prototype(x, y)
    elbo = TemperedTraceMeanField_ELBO()
    with per_example_dropout():
        elbo(model, guide)(x, y).backward()
    assert guide.loc.grad.abs().sum() > 0


def test_guides_without_dropout_are_refused():
    model, x, y = classifier()
    guide = AutoMeanField(model).prototype(x, y)
    elbo = TemperedTraceMeanField_ELBO(estimator="per_example_dropout")
    with pytest.raises(
        UnsupportedProgramError, match=r"such as AutoMCDropout, and site '0.weight'"
    ):
        elbo.loss(model, guide, x, y)


def test_a_penalty_on_a_dropped_weight_is_refused():
    class Penalized(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + self[2].weight.square().sum()

    net = Penalized(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).double()
    _, x, y = classifier()
    model = models.Classification(bayesianize(net))
    guide = AutoMCDropout(model, p=0.3).prototype(x, y)
    elbo = TemperedTraceMeanField_ELBO(estimator="per_example_dropout")
    with pytest.raises(UnsupportedProgramError, match=r"latent '2.weight' is used twice"):
        elbo.loss(model, guide, x, y)


def test_functions_of_products_alone():
    """A program by hand: x @ w.T, one mask per datum in both calls."""
    _, x, _ = classifier()
    net = nn.Linear(3, 1, bias=False).double()
    model = models.Regression(bayesianize(net), noise=0.5)
    guide = AutoMCDropout(model, p=0.5, sites="all").prototype(x, x[:, 0])
    latents = {name: values[0] for name, values in guide.sample_latents(1).items()}
    context = per_example_dropout()

    def program(x):
        w = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
        return x @ w.T, F.linear(x, w)

    def of_datum(args, kwargs, lane):
        return context.of_datum(lambda: record(program, latents, args).result)

    with context.run(guide.site_distributions(), latents):
        first, second = RowMap()(of_datum, (x,), {})
    torch.testing.assert_close(first, second)
