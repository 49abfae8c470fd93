"""Bayesian linear regression: the closed forms against brute force over the N x N Gaussian."""

import math

import pytest
import torch
from helpers import second_device
from torch.distributions import MultivariateNormal

from pyro_bdl.bayesian_linear import (
    SufficientStatistics,
    log_evidence,
    maximize,
    posterior,
    predict,
)
from pyro_bdl.utils.precision import double_device

D = torch.float64
N, H, K = 25, 4, 3


@pytest.fixture
def phi():
    return torch.randn(N, H, dtype=D)


@pytest.fixture
def y(phi):
    return phi @ torch.randn(H, K, dtype=D) + 0.5 * torch.randn(N, K, dtype=D)


def gaussian(phi, alpha, beta):
    """y_k of the prior: N(0, Phi diag(1 / alpha) Phi' + I / beta)."""
    covariance = (phi / alpha) @ phi.mT + torch.eye(len(phi), dtype=D) / beta
    return MultivariateNormal(torch.zeros(len(phi), dtype=D), covariance)


ALPHAS = {
    "one": torch.tensor(0.7, dtype=D),
    "per feature": torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=D),
    "per weight": torch.linspace(0.2, 3.0, K * H, dtype=D).reshape(K, H),
}
BETAS = {"one": torch.tensor(2.5, dtype=D), "per output": torch.tensor([1.0, 4.0, 0.3], dtype=D)}


@pytest.fixture(params=ALPHAS)
def alpha(request):
    return ALPHAS[request.param]


@pytest.fixture(params=BETAS)
def beta(request):
    return BETAS[request.param]


def test_posterior_and_predictive_condition_the_joint_gaussian(phi, y, alpha, beta):
    """Against p(w, y*) conditioned on y as one Gaussian over all of them. Source: Bishop 2006,
    section 3.3."""
    found = posterior(SufficientStatistics.of(phi, y), alpha, beta)
    assert len(found.covariance) == (1 if alpha.dim() < 2 and beta.dim() == 0 else K)
    new = torch.randn(6, H, dtype=D)
    mean, variance = predict(new, found, beta)
    for k in range(K):
        a, b = alpha.expand(K, H)[k], beta.expand(K)[k]
        marginal = gaussian(phi, a, b).covariance_matrix
        gain = torch.linalg.solve(marginal, phi / a).mT  # Cov(w, y) Cov(y)^-1
        torch.testing.assert_close(found.mean[k], gain @ y[:, k])
        covariance = torch.diag(1 / a) - gain @ (phi / a)
        torch.testing.assert_close(found.covariance.expand(K, H, H)[k], covariance)
        torch.testing.assert_close(mean[:, k], new @ gain @ y[:, k])
        expected = (new @ covariance * new).sum(-1) + 1 / b
        torch.testing.assert_close(variance[:, k], expected)


def test_evidence_is_the_marginal_density(phi, y, alpha, beta):
    """log N(y; 0, Phi Phi' / alpha + I / beta) (Bishop 2006, section 3.5)."""
    found = log_evidence(SufficientStatistics.of(phi, y), alpha, beta)
    expected = sum(
        gaussian(phi, alpha.expand(K, H)[k], beta.expand(K)[k]).log_prob(y[:, k]) for k in range(K)
    )
    torch.testing.assert_close(found, expected)


def test_evidence_has_the_gradient_of_the_marginal_density(phi, y):
    inputs = [phi, y[:, 0], torch.tensor(0.7, dtype=D), torch.tensor(2.5, dtype=D)]
    inputs = [value.clone().requires_grad_() for value in inputs]

    def ours(phi, y, alpha, beta):
        return log_evidence(SufficientStatistics.of(phi, y), alpha, beta)

    def dense(phi, y, alpha, beta):
        return gaussian(phi, alpha, beta).log_prob(y)

    for a, b in zip(
        torch.autograd.grad(ours(*inputs), inputs),
        torch.autograd.grad(dense(*inputs), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


def test_more_features_than_rows(phi, y):
    found = log_evidence(SufficientStatistics.of(phi[:2], y[:2, 0]), 0.7, 2.5)
    expected = gaussian(phi[:2], torch.tensor(0.7, dtype=D), torch.tensor(2.5, dtype=D))
    torch.testing.assert_close(found, expected.log_prob(y[:2, 0]))


def test_batches_add_up_and_weights_count_rows_more_than_once(phi, y):
    times = torch.arange(N) % 3
    parts = [SufficientStatistics.of(phi[i::2], y[i::2], times[i::2]) for i in range(2)]
    repeated = phi.repeat_interleave(times, 0), y.repeat_interleave(times, 0)
    expected = SufficientStatistics.of(*repeated)
    for name in ("gram", "cross", "squares", "count"):
        torch.testing.assert_close(getattr(parts[0] + parts[1], name), getattr(expected, name))
    with pytest.raises(ValueError, match=r"got \(25, 4\) and \(24, 3\)"):
        SufficientStatistics.of(phi, y[1:])
    with pytest.raises(ValueError, match=r"features must have shape \(N, H\)"):
        SufficientStatistics.of(phi[0], y)


@pytest.mark.parametrize("fixed", [{}, {"alpha": 0.3}, {"beta": 3.0}])
def test_fixed_point_is_a_maximum(phi, y, fixed):
    """alpha = gamma / m'm, beta = (N - gamma) / residual (MacKay 1992; Bishop 2006, equations 3.92
    and 3.95)."""
    statistics = SufficientStatistics.of(phi, y)
    found = maximize(statistics, **fixed)
    at = [found.alpha.log().requires_grad_(), found.beta.log().requires_grad_()]
    value = log_evidence(statistics, at[0].exp(), at[1].exp())
    gradients = torch.autograd.grad(value, at)
    for name, gradient in zip(("alpha", "beta"), gradients, strict=True):
        if name in fixed:
            assert float(getattr(found, name)) == pytest.approx(fixed[name])
        else:
            assert abs(gradient) < 1e-6
    torch.testing.assert_close(found.log_evidence, value.detach())
    for factor in (0.8, 1.25):
        if "alpha" not in fixed:
            assert log_evidence(statistics, found.alpha * factor, found.beta) < value
        if "beta" not in fixed:
            assert log_evidence(statistics, found.alpha, found.beta * factor) < value
    assert 0 < found.gamma < H * K


@pytest.mark.parametrize("targets", [torch.zeros(3), torch.ones(3)])
def test_data_that_are_fitted_exactly_end_finite(targets):
    found = maximize(SufficientStatistics.of(torch.eye(3, dtype=D), targets), steps=50)
    assert math.isfinite(found.alpha) and math.isfinite(found.beta) and found.steps <= 50


def test_on_another_device(phi, y, device):
    here = maximize(SufficientStatistics.of(phi, y))
    moved = [second_device.moved(value, device) for value in (phi, y)]
    there = maximize(SufficientStatistics.of(*moved))
    assert there.alpha.device.type == double_device(device).type
    narrow = {"rtol": 1e-5, "atol": 0.0} if moved[0].dtype == torch.float32 else {}
    torch.testing.assert_close(there.alpha.cpu(), here.alpha, **narrow)
    torch.testing.assert_close(there.log_evidence.cpu(), here.log_evidence, **narrow)


@pytest.mark.parametrize("alpha", [None, 1.0])
def test_statistics_that_are_not_finite_have_no_maximum(phi, y, alpha):
    """max(0.0, nan) is 0.0, which would read as converged."""
    y[3, 0] = math.nan
    with pytest.raises(ValueError, match="statistics hold NaN or infinity"):
        maximize(SufficientStatistics.of(phi, y), alpha=alpha)
