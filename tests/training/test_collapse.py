"""Guides that are the prior, and guides that know the data."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import training
from pyro_bdl.errors import BdlWarning

DOUBLE = {"dtype": torch.float64}


class Wide(nn.Module):
    """f(x) = 1/N sum_j a_j relu(b_j x): at temperature 1 the best guide ignores the data."""

    def __init__(self, width):
        super().__init__()
        self.b = nn.Linear(1, width, bias=False, **DOUBLE)
        self.a = nn.Linear(width, 1, bias=False, **DOUBLE)

    def forward(self, x):
        return self.a(self.b(x).relu()) / len(self.b.weight)


def program(width):
    return bdl.models.Regression(bdl.bayesianize(Wide(width)), noise=1.0)


X = torch.linspace(-1, 1, 40, **DOUBLE)[:, None]
Y = X[:, 0].abs()


def of_others(log_density, count):
    """log mean_m p(y_n | x_m) of a matrix (targets, inputs), with m eight rows spread over all."""
    shifts = [count * (number + 1) // 9 for number in range(8)]
    rows = torch.arange(count)
    parts = torch.stack([log_density[rows, (rows + shift) % count] for shift in shifts])
    return parts.logsumexp(0) - math.log(8)


def test_the_numbers_of_a_collapse_are_exact():
    """A guide at a point: log N(y_n; f_n, 1) - log mean_m N(y_n; f_m, 1), with its standard
    error."""
    model = program(5)
    guide = bdl.guides.AutoMeanField(model, init_scale=1.0)
    guide.prototype(X, Y).loc.data.zero_()
    assert training.collapse(model, guide, X, Y).kl == pytest.approx(0.0, abs=1e-9)
    with torch.no_grad():  # a_j = 5, b_j = 1 says 5 relu(x)
        guide.loc.copy_(torch.tensor([1.0] * 5 + [5.0] * 5))
        guide.scale = torch.full((10,), 1e-9, **DOUBLE)
    found = training.collapse(model, guide, X, Y)
    densities = dist.Normal(5 * X[:, 0].relu(), 1.0).log_prob(Y[:, None])
    gains = densities.diagonal() - of_others(densities, 40)
    assert found.gain == pytest.approx(gains.mean().item(), abs=1e-6)
    assert found.error == pytest.approx((gains.std() / 40**0.5).item(), rel=1e-4)
    kl = 10 * (-math.log(1e-9) - 0.5) + 0.5 * (5 * 1.0 + 5 * 25.0)
    assert found.kl == pytest.approx(kl / 40, rel=1e-6) and not found.complete


def point(model, value, *args):
    """A guide that is certain of one network."""
    guide = bdl.guides.AutoMeanField(model, init_scale=1e-9).prototype(*args)
    guide.loc.data.copy_(torch.as_tensor(value, **DOUBLE))
    return guide


CUTS = torch.tensor([-1.0, 0.0, 1.0], **DOUBLE)


def ordinal(x, y=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.OrderedLogistic(w * x[:, 0], CUTS.to(x)), obs=y)


def several_outputs(x, y=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
    mean = torch.stack([w * x[:, 0], x[:, 0] - w], 1)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(mean, 0.5).to_event(1), obs=y)


def linear(kind, outputs=1):
    return lambda: kind(bdl.bayesianize(nn.Linear(1, outputs, **DOUBLE)))


LABELS = torch.arange(40) % 4 % 3
PAIR = torch.stack([Y, Y.square() - 1.0], 1)
KINDS = {  # the program, its weights, targets, and p(y | x) at these weights
    "classes": (
        linear(bdl.models.Classification, 3),
        [2.0, -1.0, 0.0, 0.3, 0.0, 0.0],
        LABELS,
        lambda: dist.Categorical(
            logits=X @ X.new_tensor([[2.0, -1.0, 0.0]]) + X.new_tensor([0.3, 0.0, 0.0])
        ),
    ),
    "two classes": (
        linear(bdl.models.BinaryClassification),
        [2.0, 0.1],
        (LABELS > 0).double(),
        lambda: dist.Bernoulli(logits=2 * X[:, 0] + 0.1),
    ),
    "ordered classes": (
        lambda: ordinal, [1.5], LABELS, lambda: dist.OrderedLogistic(1.5 * X[:, 0], CUTS)
    ),
    "counts": (
        linear(bdl.models.PoissonRegression),
        [0.8, -0.2],
        LABELS.double(),
        lambda: dist.Poisson((0.8 * X[:, 0] - 0.2).exp()),
    ),
    "several outputs": (
        lambda: several_outputs,
        [0.7],
        PAIR,
        lambda: dist.Normal(torch.cat([0.7 * X, X - 0.7], 1), 0.5).to_event(1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_gain_of_every_kind_of_observation(kind):
    make, value, y, exact = KINDS[kind]
    model = make()
    found = training.collapse(model, point(model, value, X, y), X, y)
    densities = exact().log_prob(y[:, None])
    gains = densities.diagonal() - of_others(densities, 40)
    assert found.gain == pytest.approx(gains.mean().item(), abs=1e-6)
    assert found.error == pytest.approx((gains.std() / 40**0.5).item(), rel=1e-4)


@pytest.mark.parametrize("inside", [False, True])
def test_masked_rows_do_not_count(inside):
    """Whatever fills them: the gain is that of the rows seen."""
    seen = torch.arange(40) % 3 > 0

    def masked(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        likelihood = dist.Normal(w * x[:, 0], 0.5)
        with pyro.plate("data", len(x)):
            if inside:
                pyro.sample("y", likelihood.mask(seen), obs=y)
            else:
                with pyro.poutine.mask(mask=seen):
                    pyro.sample("y", likelihood, obs=y)

    guide = point(masked, [0.4], X, Y)
    fillers = [torch.where(seen, Y, torch.tensor(value, **DOUBLE)) for value in (0.0, 999.0)]
    found = [training.collapse(masked, guide, X, y) for y in fillers]
    densities = dist.Normal(0.4 * X[:, 0], 0.5).log_prob(Y[:, None])
    gains = (densities.diagonal() - of_others(densities, 40))[seen]
    for each in found:
        assert each.gain == pytest.approx(gains.mean().item(), abs=1e-6)
        assert each.error == pytest.approx((gains.std() / len(gains) ** 0.5).item(), rel=1e-4)


def local(x, y=None, seen=None, likelihood=dist.Normal):
    """A latent for each row; targets that are missing are latents too."""
    b = pyro.sample("b", dist.Normal(x.new_zeros(300), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
        mean = b.mean() * x[:, 0] + 0.1 * z
        if likelihood is dist.Normal:
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y, obs_mask=seen)
        else:
            pyro.sample("y", dist.Poisson(mean.exp()), obs=y)


@pytest.mark.parametrize("count", [40, 200])
@pytest.mark.parametrize("case", ["numbers", "missing numbers", "counts"])
@pytest.mark.filterwarnings("ignore:.*#collapse")
def test_a_finished_training_is_not_lost_to_the_check(case, count):
    """With a latent for each row, at the prior, of more rows than any check would take a part of;
    the training returns."""
    x = torch.linspace(-1, 1, count, **DOUBLE)[:, None]
    y = (torch.arange(count) % 3).double()
    args = (x, y, torch.arange(count) % 4 > 0 if case == "missing numbers" else None)
    kind = dist.Poisson if case == "counts" else dist.Normal

    def model(x, y=None, seen=None):
        local(x, y, seen, kind)

    guide = bdl.guides.AutoMeanField(model, init_scale=1.0)
    guide.prototype(*args).loc.data.zero_()
    args = args if case == "missing numbers" else args[:2]
    run = training.train(model, guide, *args, steps=2, learning_rate=1e-3)
    assert len(run.losses) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("signal", "often"), [(0.0, (0.8, 1.0)), (1.0, (0.0, 0.04))])
def test_how_often_it_is_said(signal, often):
    """Of the prior, and of a posterior that explains 12 % of the variance, 0.06 nats per datum."""
    said = []
    for seed in range(30):
        torch.manual_seed(seed)
        x = torch.randn(200, 1, **DOUBLE)
        y = signal * 0.37 * x[:, 0] + torch.randn(200, **DOUBLE)

        def model(x, y=None):
            w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(w * x[:, 0], 1.0), obs=y)

        guide = bdl.guides.AutoMeanField(model, init_scale=0.07 if signal else 0.999)
        guide.prototype(x, y).loc.data.fill_(0.37 * signal)
        said.append(training.collapse(model, guide, x, y).complete)
    assert often[0] <= sum(said) / len(said) <= often[1]


@pytest.mark.parametrize("case", ["the prior", "knows", "narrow", "minibatches"])
def test_when_it_is_said(case):
    """Not of a guide that predicts better than a constant by more than its error, however small its
    KL; nor where there are more data than weights. In minibatches as well."""
    count = 80
    x = torch.linspace(-1, 1, count, **DOUBLE)[:, None]
    y = x[:, 0] + torch.linspace(-2, 2, count, **DOUBLE)[torch.randperm(count)]
    width = 3 if case == "narrow" else 200

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(width), 1.0).to_event(1))
        with pyro.plate("data", count, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(w[0] * x[:, 0] + w[1:].mean(), 1.5), obs=y)

    guide = bdl.guides.AutoMeanField(model, init_scale=0.999).prototype(x, y)
    guide.loc.data.zero_()
    if case == "knows":
        guide.loc.data[0] = 1.0
        with torch.no_grad():
            scale = guide.scale.clone()
            scale[0] = 0.2
            guide.scale = scale
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", BdlWarning)
        size = 20 if case == "minibatches" else None
        training.train(model, guide, x, y, steps=2, learning_rate=1e-4, batch_size=size)
    told = any("collapsed to the prior" in str(w.message) for w in seen)
    assert told == (case in ("the prior", "minibatches"))


@pytest.mark.parametrize("family", ["AutoMeanField", "AutoLowRank", "AutoMatrixNormal"])
@pytest.mark.parametrize("case", ["ignores", "knows", "few steps"])
def test_guides_far_from_the_prior_that_ignore_the_inputs(family, case):
    """The KL of 100 numbers with s = 0.05 is above 2 nats per datum in all cases. One of them meets
    the inputs: 1 is its true value, and -0.05 worse than no use of them."""
    count, width = 60, 100

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(1, width), 1.0).to_event(2))
        with pyro.plate("data", count, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(w[0, 0] * x[:, 0], 1.0), obs=y)

    x = 2.0 * torch.randn(count, 1, **DOUBLE)
    y = x[:, 0] + torch.randn(count, **DOUBLE)
    guide = getattr(bdl.guides, family)(model, init_scale=0.05).prototype(x, y)
    guide.loc.data.zero_()[0] = 1.0 if case == "knows" else -0.05
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", BdlWarning)
        steps = 2 if case == "few steps" else 100
        training.train(model, guide, x, y, steps=steps, learning_rate=1e-6)
    assert training.collapse(model, guide, x, y).kl > 2.0
    assert [f"ignore the inputs after {steps}" in str(w.message) for w in seen] == (
        [True] if case == "ignores" else []
    )


@pytest.mark.parametrize("eta", [1.0, 0.01])
def test_training_warns_at_temperature_1(eta):
    torch.manual_seed(0)
    model = program(200)
    guide = bdl.guides.AutoMeanField(model, init_scale=0.99)
    guide.prototype(X, Y).loc.data.zero_()
    elbo = bdl.elbo.TemperedTraceMeanField_ELBO(eta)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        training.train(model, guide, X, Y, steps=2, elbo=elbo, learning_rate=1e-3)
    told = [w for w in seen if "collapsed to the prior" in str(w.message)]
    assert len(told) == (1 if eta == 1.0 else 0)
    assert all(issubclass(w.category, BdlWarning) for w in told)
    assert all("overparameterized(tau, num_data, num_neurons)" in str(w.message) for w in told)


def scaled(where):
    """A line with a scale as a PyroParam: of the prior, of the noise, or nowhere."""
    one = pyro.nn.PyroParam(torch.tensor(1.0, **DOUBLE), constraint=dist.constraints.positive)
    prior = bdl.priors.Normal(one if where == "prior" else 1.0)
    net = bdl.bayesianize(nn.Linear(1, 1, **DOUBLE), prior)
    return bdl.models.Regression(net, noise=one if where == "noise" else 1.0)


@pytest.mark.parametrize(
    "where, family, alone, told",
    [
        ("prior", bdl.guides.AutoMAP, False, True),
        ("prior", bdl.guides.AutoLaplaceGGN, False, True),
        ("prior", bdl.guides.AutoMCDropout, False, True),
        ("prior", bdl.guides.AutoMAP, True, False),
        ("prior", bdl.guides.AutoMeanField, False, False),
        ("noise", bdl.guides.AutoMAP, False, False),
        ("nowhere", bdl.guides.AutoMAP, False, False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*#dropout")
def test_scales_of_the_prior_are_not_trained_with_a_point(where, family, alone, told):
    model = scaled(where)
    guide = family(model).prototype(X, Y)
    optimizer = torch.optim.Adam(guide.parameters()) if alone else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", BdlWarning)
        training.train(model, guide, X, Y, steps=2, optimizer=optimizer)
    found = [w for w in caught if "have no maximum together" in str(w.message)]
    assert bool(found) == told
    if told:
        assert "network.hyper_prior_scale of the prior" in str(found[0].message)
        assert found[0].filename == __file__
