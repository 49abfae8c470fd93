"""Scores equal hand-made values and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from pyro_bdl import metrics, working_memory


@pytest.fixture
def draws():
    return torch.from_numpy(np.random.default_rng(0).standard_normal((60, 7, 2)))


def test_rmse_by_hand():
    assert metrics.rmse(torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])) == math.sqrt(12.5)


def test_scores_of_probabilities_by_hand():
    """Accuracy, and the Brier score sum_c (p_c - [y = c])^2 (Brier 1950)."""
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]], dtype=torch.float64)
    y = torch.tensor([0, 1])
    assert metrics.accuracy(p, y) == 0.5
    expected = ((0.09 + 0.04 + 0.01) + (0.01 + 0.49 + 0.36)) / 2
    assert metrics.brier(p, y) == pytest.approx(expected, rel=1e-12)


def test_negative_log_predictive_density_by_hand():
    """-1/N sum_n log(1/S sum_s p(y_n | w_s)) (Gelman, Hwang & Vehtari 2014)."""
    p = torch.tensor([[0.1, 0.4], [0.3, 0.2]], dtype=torch.float64)
    expected = -(math.log(0.2) + math.log(0.3)) / 2
    assert metrics.negative_log_predictive_density(p.log()) == pytest.approx(expected, rel=1e-12)
    tiny = torch.full((3, 1), -2000.0)
    assert metrics.negative_log_predictive_density(tiny) == pytest.approx(2000.0)


def test_expected_negative_log_likelihood_by_hand():
    """-1/(S N) sum_sn log p(y_n | w_s) (Huix et al. 2022); the logarithm of the mean is larger."""
    p = torch.tensor([[0.1, 0.4], [0.3, 0.2]], dtype=torch.float64)
    found = metrics.expected_negative_log_likelihood(p.log())
    assert found == pytest.approx(-math.log(0.1 * 0.4 * 0.3 * 0.2) / 4, rel=1e-12)
    assert found > metrics.negative_log_predictive_density(p.log())
    with pytest.raises(ValueError, match=r"\(draws, points\)"):
        metrics.expected_negative_log_likelihood(p[0])


def test_crps_is_the_fair_double_sum(draws):
    """E|X - y| - 1/2 E|X - X'| over different draws (Ferro 2014)."""
    y = torch.linspace(-1, 1, 14, dtype=torch.float64).reshape(7, 2)
    size = draws.shape[0]
    pairs = (draws[:, None] - draws[None]).abs().sum((0, 1)) / (size * (size - 1))
    expected = ((draws - y).abs().mean(0) - pairs / 2).mean()
    torch.testing.assert_close(metrics.crps(draws, y), expected, rtol=1e-12, atol=0)


def test_crps_of_a_gaussian_is_the_closed_form():
    """Source: Gneiting & Raftery 2007, section 4.2."""
    quantiles = torch.from_numpy(norm.ppf((np.arange(20000) + 0.5) / 20000))
    y = torch.tensor([-1.5, 0.0, 0.7], dtype=torch.float64)
    z = y.numpy()
    expected = z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi)
    got = metrics.crps(quantiles[:, None].expand(-1, 3), y)
    assert got == pytest.approx(expected.mean(), abs=1e-4)
    scaled = metrics.crps(3 + 2 * quantiles[:, None].expand(-1, 3), 3 + 2 * y)
    assert scaled == pytest.approx(2 * expected.mean(), abs=2e-4)


def test_crps_is_fair_at_two_draws():
    rng = np.random.default_rng(1)
    pairs = torch.from_numpy(rng.standard_normal((2, 200_000)))
    got = metrics.crps(pairs, torch.zeros(200_000, dtype=torch.float64))
    closed_form = 2 * norm.pdf(0) - 1 / math.sqrt(math.pi)
    assert got == pytest.approx(closed_form, abs=0.005)


def test_blocks_do_not_change_the_result(draws):
    y = torch.zeros(7, 2, dtype=torch.float64)
    functions = {
        "crps": lambda: metrics.crps(draws, y),
        "coverage": lambda: metrics.interval_coverage(draws, y, level=[0.5, 0.9]),
        "wasserstein": lambda: metrics.wasserstein1(draws, draws[:20] + 1),
        "sd": lambda: metrics.sd_error(draws, 2 * draws[:20]),
        "variation": lambda: metrics.total_variation(draws.softmax(-1), draws[:9].softmax(-1)),
        "density": lambda: metrics.negative_log_predictive_density(draws[..., 0]),
    }
    whole = {name: function() for name, function in functions.items()}
    with working_memory(8 * 130):
        for name, function in functions.items():
            torch.testing.assert_close(function(), whole[name], rtol=1e-12, atol=0)


def test_single_precision_is_scored_in_double(draws):
    a, y = draws.float(), torch.zeros(7, 2)
    assert metrics.crps(a, y) == metrics.crps(a.double(), y.double())
    assert metrics.wasserstein1(a, a[:7]).dtype == torch.float64
    assert not metrics.crps(a.requires_grad_(), y).requires_grad


def test_bad_input(draws):
    y = torch.zeros(7, 2)
    with pytest.raises(ValueError, match=r"\(S, 7, 2\)"):
        metrics.crps(draws[..., 0], y)
    with pytest.raises(ValueError, match="2 draws"):
        metrics.crps(draws[:1], y)
    with pytest.raises(ValueError, match="level"):
        metrics.interval_coverage(draws, y, level=90)
    with pytest.raises(ValueError, match="same test points"):
        metrics.wasserstein1(draws, draws[:, :3])
    with pytest.raises(ValueError, match="from 0 to 1"):
        metrics.brier(torch.full((3, 2), 0.5), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match=r"\(N, C\)"):
        metrics.accuracy(torch.full((3, 2), 0.5), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="same shape"):
        metrics.rmse(torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(ValueError, match=r"\(draws, points\)"):
        metrics.negative_log_predictive_density(torch.zeros(3))


def test_pointwise_values_average_to_the_score():
    torch.manual_seed(0)
    draws, y = torch.randn(20, 7, 2).double(), torch.randn(7, 2).double()
    p, labels = torch.rand(6, 3).double().softmax(-1), torch.arange(6) % 3
    cases = [
        (metrics.crps, (draws, y), y.shape),
        (metrics.interval_coverage, (draws, y), y.shape),
        (metrics.negative_log_predictive_density, (draws[..., 0],), (7,)),
        (metrics.accuracy, (p, labels), (6,)),
        (metrics.brier, (p, labels), (6,)),
    ]
    for function, inputs, shape in cases:
        values = function(*inputs, pointwise=True)
        assert values.shape == shape and values.unique().numel() > 1
        assert torch.allclose(values.mean(), function(*inputs))
    assert torch.equal(metrics.squared_error(draws[0], y).mean().sqrt(), metrics.rmse(draws[0], y))


def test_gaussian_nlpd_is_a_normal_density():
    m, v, y = torch.randn(5).double(), torch.rand(5).double() + 0.1, torch.randn(5).double()
    exact = -torch.distributions.Normal(m, v.sqrt()).log_prob(y)
    assert torch.allclose(metrics.gaussian_nlpd(m, v, y), exact)


def test_effective_draws_count_those_that_share_the_density():
    log_p = torch.tensor(
        [[0.0, 0.0, -1e4], [0.0, -800.0, -1e4], [0.0, 0.0, -2e4], [0.0, 0.0, -2e4]]
    )
    assert torch.allclose(metrics.effective_draws(log_p), torch.tensor([4.0, 3.0, 2.0]).double())
