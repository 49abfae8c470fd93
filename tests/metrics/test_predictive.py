"""Distances of predictive distributions."""

import math

import pytest
import torch
from torch.distributions import Categorical, Normal, kl_divergence

from pyro_bdl import metrics


def test_class_distances_by_hand():
    """Agreement and total variation (Izmailov et al. 2021)."""
    a = torch.tensor([[[0.9, 0.1], [0.4, 0.6]], [[0.5, 0.5], [0.2, 0.8]]])
    b = torch.tensor([[[0.6, 0.4], [0.6, 0.4]]])
    assert metrics.agreement(a, b) == 0.5
    assert metrics.total_variation(a, b) == pytest.approx((0.1 + 0.3) / 2)


def test_categorical_kl_is_that_of_the_mean_probabilities():
    """1/N sum_n sum_c q_nc log(q_nc / p_nc) (Kullback & Leibler 1951)."""
    torch.manual_seed(0)
    a, b = torch.randn(5, 7, 3).double().softmax(-1), torch.randn(9, 7, 3).double().softmax(-1)
    exact = kl_divergence(Categorical(b.mean(0)), Categorical(a.mean(0))).mean()
    torch.testing.assert_close(metrics.categorical_kl(a, b), exact)
    assert metrics.categorical_kl(a, a) == 0


def test_categorical_kl_of_what_is_ruled_out_is_large_and_finite():
    never, possible = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.5, 0.5]]])
    assert 40 < metrics.categorical_kl(never, possible) < 50
    assert metrics.categorical_kl(possible, never) == pytest.approx(math.log(2))


def test_gaussian_kl_is_exact_between_normals():
    """1/2 [v_b / v_a + (m_a - m_b)^2 / v_a - 1 + log(v_a / v_b)] (Kullback & Leibler 1951)."""
    torch.manual_seed(0)
    means, variances = torch.randn(2, 6).double(), torch.rand(2, 6).double() + 0.1
    a, b = (Normal(m, v.sqrt()) for m, v in zip(means, variances, strict=True))
    found = metrics.gaussian_kl(means[0], variances[0], means[1], variances[1])
    torch.testing.assert_close(found, kl_divergence(b, a).mean())
    with pytest.raises(ValueError, match="a_mean and b_mean must have the same shape"):
        metrics.gaussian_kl(means[0, :2], variances[0, :2], means[1], variances[1])
