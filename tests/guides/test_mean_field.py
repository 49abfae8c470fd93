"""The mean-field posterior against the Normal with its parameters."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import nn

from pyro_bdl import bayesianize, init, models
from pyro_bdl.elbo import TemperedTraceMeanField_ELBO
from pyro_bdl.guides import AutoMeanField
from pyro_bdl.guides.mean_field import shared_groups

D = torch.float64


def model():
    a = pyro.sample("a", dist.Normal(torch.zeros(2, dtype=D), 1.0).to_event(1))
    s = pyro.sample("s", dist.HalfNormal(torch.ones((), dtype=D)))
    p = pyro.sample("p", dist.Beta(torch.ones((), dtype=D), 2.0))
    pyro.sample("y", dist.Normal(a.sum() * p, s), obs=torch.zeros((), dtype=D))


@pytest.fixture
def guide():
    guide = AutoMeanField(model, init_scale=0.2).prototype()
    assert torch.allclose(guide.scale, torch.full((4,), 0.2, dtype=D))
    with torch.no_grad():
        guide.loc.copy_(torch.tensor([0.5, -1.0, 0.3, -0.2], dtype=D))
        guide.scale = torch.tensor([0.1, 0.4, 0.5, 0.3], dtype=D)
    return guide


def test_median_and_quantiles_by_scipy(guide):
    levels = [0.05, 0.5, 0.8]
    quantiles = guide.quantiles(levels)
    loc, scale = guide.loc.detach().numpy(), guide.scale.detach().numpy()
    u = torch.as_tensor(stats.norm(loc, scale).ppf([[q] for q in levels]))
    torch.testing.assert_close(quantiles["a"], u[:, :2])
    torch.testing.assert_close(quantiles["s"], u[:, 2].exp())
    torch.testing.assert_close(quantiles["p"], u[:, 3].sigmoid())
    median = guide.median()
    torch.testing.assert_close(median["s"], torch.tensor(0.3, dtype=D).exp())
    torch.testing.assert_close(median["a"], guide.loc.detach()[:2])


# Shared, bounded and fixed scales


def convolutional():
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(12, 1, bias=False)).double()
    model = models.Regression(bayesianize(net), noise=dist.HalfNormal(torch.ones((), dtype=D)))
    return model, torch.randn(4, 2, 5, dtype=D), torch.randn(4, dtype=D)


def test_which_numbers_share_a_scale():
    model, x, y = convolutional()
    layout = AutoMeanField(model).prototype(x, y).layout
    assert list(layout.latents) == ["0.weight", "0.bias", "2.weight", "noise"]
    rows = [0] * 4 + [1] * 4 + [2] * 4 + [3, 4, 5] + [6] * 12 + [7]
    assert shared_groups(layout, "per-row").tolist() == rows
    assert shared_groups(layout, "per-layer").tolist() == [0] * 12 + [1] * 3 + [2] * 12 + [3]
    assert shared_groups(layout, "per-weight") is None


def test_the_entries_of_a_plate_are_rows():
    def model():
        with pyro.plate("groups", 2):
            z = pyro.sample("z", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
            p = pyro.sample("p", dist.Dirichlet(torch.ones(3)))
        pyro.sample("y", dist.Normal(z.sum() + p.sum(), 1.0), obs=torch.tensor(0.0))

    layout = AutoMeanField(model).prototype().layout
    expected = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8, 9]
    assert shared_groups(layout, "per-row").tolist() == expected


@pytest.mark.parametrize("sharing", ["per-weight", "per-row", "per-layer"])
def test_the_exact_optimum(conjugate, exact_expectations, sharing):
    """The ELBO is -1/2 sum_i L_ii s^2 + n log s in an s that n numbers share, L the posterior
    precision: s^2 = n / sum_i L_ii (Bishop 2006, section 10.1.2)."""
    particles = exact_expectations(4)
    guide = AutoMeanField(conjugate.model, scale=sharing).prototype(conjugate.x, conjugate.y)
    diagonal = conjugate.precision().diagonal()
    optimum = diagonal.rsqrt()
    if sharing != "per-weight":
        optimum = torch.stack([3 / diagonal[:3].sum(), 1 / diagonal[3]]).sqrt()
    scale = optimum if sharing == "per-weight" else optimum[[0, 0, 0, 1]]
    with torch.no_grad():
        guide.loc.copy_(conjugate.mean())
        guide.scale = optimum
    loss = TemperedTraceMeanField_ELBO(num_particles=particles)(conjugate.model, guide)
    value = loss(conjugate.x, conjugate.y)
    gradients = torch.autograd.grad(value, [guide.loc, guide.scale_unconstrained])
    torch.testing.assert_close(torch.cat(gradients), torch.zeros(4 + len(optimum), dtype=D))
    likelihood, kl = conjugate.terms(guide.loc, scale)
    torch.testing.assert_close(value, kl - likelihood)
    torch.testing.assert_close(guide.variances(), scale.square())
    torch.testing.assert_close(guide.get_posterior().stddev, scale)


@pytest.fixture
def trained(conjugate, exact_expectations, minimize):
    """A guide at its optimum."""
    data = conjugate.x, conjugate.y

    def train(**options):
        guide = AutoMeanField(conjugate.model, **options).prototype(*data)
        loss = TemperedTraceMeanField_ELBO(num_particles=exact_expectations(4))
        parameters = [each for each in guide.parameters() if each.requires_grad]
        minimize(parameters, lambda: loss.differentiable_loss(conjugate.model, guide, *data))
        return guide

    return train


def test_a_scale_stays_below_its_bound(conjugate, trained):
    free = conjugate.precision().diagonal().rsqrt()
    assert (free > 0.12).all()  # the bound holds the optimum back
    guide = trained(init_scale=0.05, max_scale=0.1)
    assert (guide.scale > 0.09).all() and (guide.scale < 0.1).all()
    with torch.no_grad():
        guide.scale_unconstrained.fill_(-1e4)
    assert (guide.scale > 0).all()


def test_a_fixed_scale_is_no_parameter(conjugate, trained):
    guide = trained(scale=0.3)
    assert [name for name, _ in guide.named_parameters()] == ["loc"]
    torch.testing.assert_close(guide.variances(), torch.full((4,), 0.09, dtype=D))
    torch.testing.assert_close(guide.loc.detach(), conjugate.mean(), rtol=1e-5, atol=1e-6)
    draws = guide.sample_vectors(8)  # of the noise whose moments are exact
    spread = draws.var(0, correction=0).sqrt()
    torch.testing.assert_close(spread, torch.full((4,), 0.3, dtype=D))


def test_frozen_means_stay_at_the_network(conjugate, trained):
    start = torch.cat([p.detach().reshape(-1) for p in conjugate.net.parameters()])
    guide = trained(train_loc=False, init_scale=0.01)
    assert torch.equal(guide.loc, start)
    assert not guide.loc.requires_grad
    assert all(name.startswith("scale") for name, _ in guide.named_parameters())
    # the optimal scales of a Gaussian target do not depend on the means
    expected = conjugate.precision().diagonal().rsqrt()
    torch.testing.assert_close(guide.scale.detach(), expected, rtol=1e-4, atol=0)
    fresh = AutoMeanField(conjugate.model, train_loc=False)
    fresh.load_state_dict({**guide.state_dict(), "loc": start + 1})
    fresh.prototype(conjugate.x, conjugate.y)
    assert torch.equal(fresh.loc, start + 1)


def test_scales_that_start_from_a_pretrained_network():
    """s = delta |m| (Krishnan et al. 2020, MOPED)."""
    model, x, y = convolutional()
    relative = init.relative_scale(0.2, floor=0.01)
    guide = AutoMeanField(model, init_scale=relative).prototype(x, y)
    start = guide.loc.detach()
    torch.testing.assert_close(guide.scale.detach(), 0.2 * start.abs().clamp(min=0.01))
    shared = AutoMeanField(model, init_scale=relative, scale="per-layer").prototype(x, y)
    expected = 0.2 * start[:12].abs().clamp(min=0.01).square().mean().sqrt()
    torch.testing.assert_close(shared.scale[0].detach(), expected)
