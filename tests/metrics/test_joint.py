"""Energy distance and MMD against double sums and closed forms of Normals."""

import math

import pytest
import torch

from pyro_bdl import metrics
from pyro_bdl.metrics.joint import median_distance
from pyro_bdl.utils.jackknife import monte_carlo_error, without_each


def folded(mean, sd):
    """E|Normal(mean, sd)|"""
    return sd * math.sqrt(2 / math.pi) * math.exp(-(mean**2) / (2 * sd**2)) + mean * math.erf(
        mean / (sd * math.sqrt(2))
    )


def kernel(mean, variance, scale=0.7):
    """E exp(-d^2 / 2 l^2) = l / sqrt(l^2 + v) exp(-m^2 / 2 (l^2 + v)) for d ~ Normal(m, v)."""
    total = scale**2 + variance
    return scale / math.sqrt(total) * math.exp(-(mean**2) / (2 * total))


def test_distances_of_normals_are_the_closed_forms():
    """X ~ Normal(1, 0.5), Y ~ Normal(0, 1): differences are Normal too. Source: Szekely & Rizzo
    2013, equation 1; Gretton et al. 2012, lemma 6."""
    energy = 2 * folded(1.0, math.sqrt(1.25)) - folded(0, math.sqrt(0.5)) - folded(0, math.sqrt(2))
    mmd = kernel(0, 0.5) + kernel(0, 2.0) - 2 * kernel(1.0, 1.25)
    torch.manual_seed(0)
    found = []
    for _ in range(60):
        a, b = 1 + 0.5 * torch.randn(300, 1), torch.randn(250, 1)
        found.append([metrics.energy_distance(a, b), metrics.mmd(a, b, length_scale=0.7)])
    for values, exact in zip(torch.tensor(found).T, (energy, mmd), strict=True):
        assert values.mean() == pytest.approx(exact, abs=4 * values.std().item() / math.sqrt(60))


def test_both_are_unbiased_at_few_draws():
    torch.manual_seed(0)
    a, b = torch.randn(2, 2000, 5, 3)
    for distance in (metrics.energy_distance, lambda p, q: metrics.mmd(p, q, length_scale=1.0)):
        found = torch.stack([distance(p, q) for p, q in zip(a, b, strict=True)])
        assert abs(found.mean()) < 4 * found.std() / math.sqrt(2000)
        assert found.min() < 0


def test_the_norm_is_the_root_mean_square():
    a, b = torch.zeros(1, 9), torch.full((1, 9), 3.0)
    assert metrics.energy_distance(a, b) == pytest.approx(6.0)
    assert metrics.mmd(a, b, length_scale=3.0) == pytest.approx(2 - 2 * math.exp(-0.5))
    draws = torch.tensor([0.0, 1.0, 10.0])[:, None].expand(3, 4)
    assert median_distance(draws) == pytest.approx(9.0)


def test_they_see_what_marginals_do_not():
    """Values at two inputs that go together, or against each other, with the same marginals."""
    torch.manual_seed(0)
    w = torch.randn(400, 1)
    a, b = torch.cat([w, w], 1), torch.cat([w, -w], 1)
    assert metrics.wasserstein1(a, b) < 0.1
    assert metrics.energy_distance(a, b) > 0.1 and metrics.mmd(a, b) > 0.1


def test_units_and_the_default_kernel():
    torch.manual_seed(0)
    a, b = torch.randn(2, 60, 4)
    scaled = metrics.energy_distance(5 * a, 5 * b)
    assert scaled == pytest.approx(5 * metrics.energy_distance(a, b).item(), rel=1e-4)
    assert metrics.mmd(5 * a, 5 * b) == pytest.approx(metrics.mmd(a, b).item(), rel=1e-4)
    scale = median_distance(b)
    assert metrics.mmd(a, b, length_scale=scale) == metrics.mmd(a, b)


@pytest.mark.parametrize("sizes", [(60, 45), (23, 20)])
@pytest.mark.parametrize(
    "distance", [metrics.energy_distance, lambda a, b, g=None: metrics.mmd(a, b, g, length_scale=2)]
)
def test_values_without_each_group_are_those_of_the_other_draws(distance, sizes):
    torch.manual_seed(0)
    a, b = torch.randn(sizes[0], 3), 1.0 + torch.randn(sizes[1], 3)
    pairs = zip(without_each(a, 5), without_each(b, 5), strict=True)
    torch.testing.assert_close(distance(a, b, 5), torch.stack([distance(p, q) for p, q in pairs]))
    error, _ = monte_carlo_error(distance, a, b, groups=5)
    found, added = monte_carlo_error(distance, a, b, groups=5, at_once=True)
    assert found == pytest.approx(error) and added == 0
