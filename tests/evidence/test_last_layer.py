"""LastLayerEvidence: the dense marginal likelihood and its gradient, training, refusals."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import second_device
from pyro.infer import SVI
from pyro.nn import PyroParam
from torch import nn
from torch.func import jacrev

from pyro_bdl import Program, bayesianize, evidence, models, priors
from pyro_bdl.distributions.parameters import base_distribution
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.evidence import LastLayerEvidence
from pyro_bdl.guides import AutoLaplaceGGN, AutoLastLayer

D = torch.float64
N = 12
POSITIVE = dist.constraints.positive


def parameter(value):
    return PyroParam(torch.tensor(value, dtype=D), constraint=POSITIVE)


def network(outputs=1, tail=None):
    torch.manual_seed(3)
    layers = [nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs), *([tail] if tail else [])]
    return nn.Sequential(*layers).double()


def data(outputs=1):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 2, generator=generator, dtype=D)
    y = torch.sin(2 * x[:, :1]) + 0.3 * torch.randn(N, outputs, generator=generator, dtype=D)
    return x, y.squeeze(-1)


def uneven(name, module, value):
    numbers = torch.arange(value.numel(), dtype=D).reshape(value.shape)
    return dist.Normal(0.1 * numbers.cos(), 0.5 + 0.1 * numbers)


def own_noise(network, **options):
    """A program with a known noise for every cell, and a mask."""

    def model(x, y=None):
        mean = network(x)
        noise = 0.2 + 0.1 * torch.arange(mean.numel(), dtype=D).reshape(mean.shape).cos().square()
        kept = torch.ones(mean.shape, dtype=torch.bool)
        kept[::3, 0] = False
        likelihood = dist.Normal(mean, noise).mask(kept).to_event(1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", likelihood, obs=y)

    model.parameters = network.parameters
    return model


def shared(outputs):
    learned = priors.ByName({"2.*": priors.Normal(parameter(0.8)), "*": priors.Normal(1.0)})
    return models.Regression(bayesianize(network(outputs), learned), noise=parameter(0.3))


def by_hand():
    """Matrix products and sums without modules."""

    def normal(name, *shape):
        loc = 0.1 * torch.arange(math.prod(shape), dtype=D).reshape(shape)
        return pyro.sample(name, dist.Normal(loc, 0.5 + loc).to_event(len(shape)))

    def model(x, y=None):
        hidden = torch.tanh(x @ normal("v", 2, 4) + normal("a", 4))
        mean = normal("b", 2) + hidden @ normal("w", 4, 2)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 0.3).to_event(1), obs=y)

    model.parameters = lambda: iter(())
    return model


CASES = {
    "learned scales": (1, lambda: shared(1)),
    "several outputs": (3, lambda: shared(3)),
    "a noise with a prior": (
        1,
        lambda: models.Regression(bayesianize(network()), noise=dist.HalfNormal(1.0)),
    ),
    "uneven priors": (2, lambda: models.Regression(bayesianize(network(2), uneven), noise=0.3)),
    "by hand": (2, by_hand),
    "a noise for every cell, masked": (2, lambda: own_noise(bayesianize(network(2), uneven))),
}


def dense(model, guide, sites, x, y):
    """-[log N(y; J m0 + c, J S J' + noise^2) + log p(v)] with J by autograd, as N K matrices."""
    program, layout = Program(model, x, y), guide.layout
    values, log_det = layout.constrain(guide.loc)
    run = program.run(values)
    base = [base_distribution(run.latents[name].distribution) for name in sites]
    start = {
        name: prior.loc.expand(prior.batch_shape) for name, prior in zip(sites, base, strict=True)
    }
    variance = torch.cat([p.scale.expand(p.batch_shape).reshape(-1) ** 2 for p in base])

    def location(last):
        site = program.run(values | last).observed["y"]
        return base_distribution(site.distribution).loc.reshape(-1)

    found = jacrev(location)(start)
    design = torch.cat([found[name].reshape(y.numel(), -1) for name in sites], 1)
    observed = run.observed["y"]
    normal = base_distribution(observed.distribution)
    noise = normal.scale.expand(normal.batch_shape).reshape(-1)
    marginal = design * variance @ design.T + torch.diag(noise**2)
    kept = torch.ones(y.shape, dtype=torch.bool)
    if y.dim() > 1 and isinstance(observed.distribution.base_dist, dist.MaskedDistribution):
        kept = observed.distribution.base_dist._mask
    kept = kept.reshape(-1)
    gaussian = dist.MultivariateNormal(location(start)[kept], marginal[kept][:, kept])
    total = gaussian.log_prob(y.reshape(-1)[kept]) + log_det
    for name, site in run.latents.items():
        if name not in sites:
            total = total + site.log_prob().sum()
    return -total


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_dense_marginal_likelihood(case):
    """log N(y; Phi m0', Phi S Phi' + noise^2) (Ober & Rasmussen 2019, section 2)."""
    outputs, make = CASES[case]
    x, y = data(outputs)
    model = make()
    guide = AutoLastLayer(model).prototype(x, y)
    leaves = [guide.loc, *model.parameters()]
    ours = LastLayerEvidence().differentiable_loss(model, guide, x, y)
    sites = guide.layer(x, y).sites
    assert set(sites) == ({"w", "b"} if case == "by hand" else {"2.weight", "2.bias"})
    theirs = dense(model, guide, sites, x, y)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(
        torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True
    ):
        torch.testing.assert_close(a, b)
    last = guide.layout.slices[sites[0]]
    assert (torch.autograd.grad(
        LastLayerEvidence().differentiable_loss(model, guide, x, y), guide.loc
    )[0][last] == 0).all()  # fmt: skip


def test_it_is_the_evidence_of_the_posterior():
    """loss = -(log evidence of the last layer + log prior of the rest)."""
    x, y = data()
    model = shared(1)
    guide = AutoLastLayer(model).prototype(x, y)
    loss = LastLayerEvidence().loss(model, guide, x, y)
    posterior = guide.laplace_approximation((x, y))
    latents = guide.layout.constrain(guide.loc)[0]
    prior = sum(dist.Normal(0, 1).log_prob(latents[name]).sum() for name in ("0.weight", "0.bias"))
    expected = -(evidence.log_marginal_likelihood(posterior) + prior)
    assert loss == pytest.approx(expected.item())


def optimize(how, model, guide, x, y, steps=150):
    elbo = LastLayerEvidence()
    if how == "SVI":
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), elbo)
        return [svi.step(x, y) for _ in range(steps)]
    objective = elbo(model, guide)
    guide.prototype(x, y)
    adam = torch.optim.Adam(objective.parameters(), lr=0.03)
    losses = []
    for _ in range(steps):
        adam.zero_grad()
        loss = objective(x, y)
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("how", ["SVI", pytest.param("torch", marks=pytest.mark.slow)])
def test_it_trains_features_and_hyperparameters(how):
    """The optimum in the hyperparameters is also that of ``maximize``."""
    x, y = data()
    model = shared(1)
    guide = AutoLastLayer(model)
    start = [p.detach().clone() for p in model.parameters()]
    losses = optimize(how, model, guide, x, y, steps=250)
    assert losses[-1] < losses[0] - 1.0
    assert all(p != before for p, before in zip(model.parameters(), start, strict=True))
    trained = evidence.log_marginal_likelihood(guide.laplace_approximation((x, y)))
    posterior = guide.laplace_approximation((x, y))
    evidence.maximize(posterior)
    best = evidence.log_marginal_likelihood(posterior)
    assert 0 <= float((best - trained).detach()) < 0.05


def test_single_precision():
    x, y = data()
    model = models.Regression(bayesianize(network()), noise=dist.HalfNormal(1.0))
    exact = LastLayerEvidence().loss(model, AutoLastLayer(model), x, y)
    single = models.Regression(bayesianize(network().float()), noise=dist.HalfNormal(1.0))
    guide = AutoLastLayer(single)
    found = LastLayerEvidence().differentiable_loss(single, guide, x.float(), y.float())
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("case", ["learned scales", "a noise with a prior"])
def test_a_graph_gives_the_losses_and_gradients_of_the_program(case):
    x, y = data()
    model = CASES[case][1]()
    guide, loss = AutoLastLayer(model).prototype(x, y), LastLayerEvidence()
    leaves = [guide.loc, *model.parameters()]
    for _ in range(8):
        ours = loss.differentiable_loss(model, guide, x, y)
        theirs = LastLayerEvidence().differentiable_loss(model, guide, x, y)
        torch.testing.assert_close(ours, theirs)
        gradients = torch.autograd.grad(ours, leaves)
        torch.testing.assert_close(gradients, torch.autograd.grad(theirs, leaves))
        with torch.no_grad():
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf -= 0.01 * gradient
    assert loss.graphs.num_replays == 4 and loss.graphs.num_traces == 1


# What it refuses


def test_data_that_are_not_finite_in_a_later_step():
    x, y = data()
    model = shared(1)
    guide, loss = AutoLastLayer(model), LastLayerEvidence()
    for _ in range(4):  # by the program, traced, compared, by the graph
        loss.differentiable_loss(model, guide, x, y)
    bad = x.clone()
    bad[3, 0] = torch.nan
    with pytest.raises(ValueError, match="x holds NaN or infinity in rows 3, columns 0"):
        loss.differentiable_loss(model, guide, bad, y)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2, dtype=D)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Penalized(models.Regression):
    def likelihood(self, output):
        pyro.factor("penalty", -output.square().sum())
        return super().likelihood(output)


def regression(net, prior=None, kind=models.Regression, **options):
    return kind(bayesianize(net, prior), noise=0.3, **options)


def convolution():
    net = nn.Sequential(nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 1, 2), nn.Flatten()).double()
    return regression(net)


REFUSED = {
    "needs a Normal observation, site 'y' is StudentT: train as MAP": lambda: regression(
        network(), kind=models.StudentTRegression
    ),
    "noise of site 'y' depends on the last layer": lambda: models.HeteroscedasticRegression(
        bayesianize(network(2))
    ),
    "site 'y' was given a minibatch": lambda: regression(network(), num_data=2 * N),
    "the last layer's output is not the location of site 'y'": lambda: regression(
        network(tail=nn.Tanh())
    ),
    r"prior of site '2.weight' is no Normal \(Laplace\)": lambda: regression(
        network(), priors.Laplace(1.0)
    ),
    r"'layer.weight' enter 2 products \(tied weights\?\)": lambda: regression(Twice()),
    "'1.weight' enter the operation 'conv1d'": convolution,
    "'penalty' depends on the last layer": lambda: regression(network(), kind=Penalized),
}


@pytest.mark.parametrize("words", REFUSED)
def test_refusals(words):
    x, y = data(2 if "layer.weight" in words else 1)
    model = REFUSED[words]()
    with pytest.raises((UnsupportedProgramError, ValueError), match=words):
        LastLayerEvidence().loss(model, AutoLastLayer(model), x, y)


def test_missing_targets_and_other_guides():
    x, y = data()
    model = regression(network())
    with pytest.raises(ValueError, match="observ"):
        LastLayerEvidence().loss(model, AutoLastLayer(model), x)
    with pytest.raises(TypeError, match="trains an AutoLastLayer, got AutoLaplaceGGN"):
        LastLayerEvidence().loss(model, AutoLaplaceGGN(model), x, y)


@pytest.mark.parametrize("how", ["SVI", "torch"])
def test_on_another_device(how, device):
    x, y = data()
    model = shared(1)
    expected = LastLayerEvidence().loss(model, AutoLastLayer(model), x, y)
    model, x, y = (second_device.moved(value, device) for value in (model, x, y))
    losses = optimize(how, model, AutoLastLayer(model), x, y, steps=20)
    assert losses[0] == pytest.approx(expected, rel=1e-5 if x.dtype == torch.float32 else 1e-6)
    assert losses[-1] < losses[0]
