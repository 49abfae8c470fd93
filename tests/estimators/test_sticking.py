"""Sticking the landing: no noise at the exact posterior, no bias elsewhere."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoGuideList
from pyro.nn import PyroModule, PyroParam

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.elbo import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.elbo.draw import constant_parameters
from pyro_bdl.guides import AutoMCDropout, AutoMeanField, BernoulliNoise, GaussianNoise

D = torch.float64


def orthogonal():
    """y ~ Normal(X w, 0.5^2), w ~ Normal(0, 2^2), with X'X diagonal: q can be the posterior."""
    x = torch.linalg.qr(torch.randn(6, 3, dtype=D))[0] * torch.tensor([1.0, 2.0, 3.0], dtype=D)
    y = x @ torch.tensor([1.0, -0.5, 0.2], dtype=D) + 0.1
    net = bayesianize(torch.nn.Linear(3, 1, bias=False).double(), priors.Normal(2.0))
    return models.Regression(net, noise=0.5), x, y


def at_posterior(guide, x, y, eta=1.0, cold=1.0):
    precision = (x.square().sum(0) / 0.25 / eta + 0.25) / cold
    guide.prototype(x, y)
    with torch.no_grad():
        guide.loc.copy_(x.T @ y / 0.25 / eta / cold / precision)
        guide.scale = precision.rsqrt()
    return [guide.loc, guide.scale_unconstrained]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.3}, {"cold_temperature": 0.2}])
def test_every_draw_has_gradient_zero_at_the_posterior(options):
    """Source: Roeder, Wu & Duvenaud 2017."""
    model, x, y = orthogonal()
    guide = AutoMeanField(model)
    eta, cold = options.get("temperature", 1.0), options.get("cold_temperature", 1.0)
    parameters = at_posterior(guide, x, y, eta, cold)
    for stick, particles in [(True, 1), (True, 3), (False, 1)]:
        elbo = TemperedTrace_ELBO(num_particles=particles, sticking_the_landing=stick, **options)
        loss = elbo(model, guide)(x, y)
        size = max(g.abs().max() for g in torch.autograd.grad(loss, parameters))
        assert size < 1e-10 if stick else size > 1e-2


class Joint(PyroModule):
    """The exact posterior of a correlated regression, as a guide; w2 is drawn given w1."""

    def __init__(self, mean, covariance):
        super().__init__()
        slope = covariance[1, 0] / covariance[0, 0]
        self.first = torch.nn.Parameter(mean[0])
        self.slope = torch.nn.Parameter(slope)
        self.offset = torch.nn.Parameter(mean[1] - slope * mean[0])
        self.scales = PyroParam(
            torch.stack([covariance[0, 0], covariance[1, 1] - slope * covariance[1, 0]]).sqrt(),
            dist.constraints.positive,
        )

    def forward(self, x, y):
        scales = self.scales
        a = pyro.sample("a", dist.Normal(self.first, scales[0]))
        pyro.sample("b", dist.Normal(self.offset + self.slope * a, scales[1]))


def regression(x, y):
    a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=D), 1.0))
    b = pyro.sample("b", dist.Normal(torch.zeros((), dtype=D), 1.0))
    pyro.sample("y", dist.Normal(a * x[:, 0] + b * x[:, 1], 0.5).to_event(1), obs=y)


def test_a_guide_of_pyro_whose_sites_depend_on_each_other():
    x = torch.tensor([[1.0, 0.5], [0.3, 1.0], [1.0, 1.0]], dtype=D)
    y = torch.tensor([0.7, -0.2, 0.1], dtype=D)
    covariance = torch.linalg.inv(x.T @ x / 0.25 + torch.eye(2, dtype=D))
    guide = Joint(covariance @ x.T @ y / 0.25, covariance)
    for stick in (True, False):
        elbo = TemperedTrace_ELBO(sticking_the_landing=stick)
        loss = elbo(regression, guide)(x, y)
        gradients = torch.autograd.grad(loss, list(guide.parameters()))
        assert all((g.abs() < 1e-10).all() == stick for g in gradients)
    assert all(p.requires_grad for p in guide.parameters())


def test_no_bias_elsewhere(conjugate, exact_expectations):
    """Over points that integrate quadratics exactly the gradients agree. The score has mean zero
    (Roeder, Wu & Duvenaud 2017)."""
    guide = AutoMeanField(conjugate.model, init_scale=0.3).prototype(conjugate.x, conjugate.y)
    particles, parameters = exact_expectations(4), [guide.loc, guide.scale_unconstrained]
    plain, sticking = (
        torch.autograd.grad(
            TemperedTrace_ELBO(num_particles=particles, sticking_the_landing=stick)(
                conjugate.model, guide
            )(conjugate.x, conjugate.y),
            parameters,
        )
        for stick in (False, True)
    )
    for a, b in zip(plain, sticking, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def _listed(model, **options):
    guide = AutoGuideList(model)
    guide.append(AutoMCDropout(pyro.poutine.block(model, hide=["0.bias"]), **options))
    guide.append(AutoMeanField(pyro.poutine.block(model, expose=["0.bias"])))
    return guide


@pytest.mark.parametrize("make", [AutoMCDropout, _listed])
@pytest.mark.parametrize("noise", [BernoulliNoise(0.5), GaussianNoise()])
def test_entropies_of_masks_have_no_score(make, noise):
    """They are closed forms, not densities at a draw: learned rates keep their gradient."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    model = models.Regression(bayesianize(net.to(D)), noise=0.5)
    x, y = torch.randn(6, 2, dtype=D), torch.randn(6, 1, dtype=D)
    guide = make(model, p=0.3, learn_p=True, noise=noise)
    guide(x, y)
    (rates,) = (p for name, p in guide.named_parameters() if name.endswith("p_unconstrained"))
    gradients = []
    for stick in (False, True):
        torch.manual_seed(0)
        loss = TemperedTrace_ELBO(sticking_the_landing=stick).differentiable_loss
        gradients += torch.autograd.grad(loss(model, guide, x, y), [rates])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-12)


def test_closed_forms_have_no_score():
    with pytest.raises(ValueError, match="closed forms: use TemperedTrace_ELBO"):
        TemperedTraceMeanField_ELBO(sticking_the_landing=True)


def test_parameters_are_learned_again_after_an_error():
    value = pyro.param("m", torch.zeros(2))
    frozen = torch.nn.Linear(1, 1)
    frozen.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="midway"), constant_parameters(frozen):
        assert not pyro.param("m").requires_grad and not frozen.weight.requires_grad
        raise RuntimeError("midway")
    assert value.requires_grad and pyro.param("m").requires_grad
    assert frozen.weight.requires_grad and not frozen.bias.requires_grad
