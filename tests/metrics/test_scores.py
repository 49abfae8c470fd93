"""Scores equal hand-made values and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import lognorm, norm, weibull_min

from pyro_bdl import metrics, working_memory
from pyro_bdl.metrics.calibration import coverage_range
from pyro_bdl.metrics.scores import crps_of_normals, effective_draws, squared_error


@pytest.fixture
def draws():
    return torch.from_numpy(np.random.default_rng(0).standard_normal((60, 7, 2)))


def test_rmse_and_scores_of_probabilities_by_hand():
    """RMSE, accuracy, and the Brier score sum_c (p_c - [y = c])^2 (Brier 1950)."""
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]], dtype=torch.float64)
    y = torch.tensor([0, 1])
    assert metrics.rmse(torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])) == math.sqrt(12.5)
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


def test_crps_of_censored_targets_is_the_integral_outside_their_limits(draws):
    """The integral of F^2 below the limits and (1 - F)^2 above (Avati et al. 2019), with F^2 that
    of pairs of different draws; targets that were seen have the CRPS."""
    low, high = (
        torch.full((7, 2), -0.4, dtype=torch.float64),
        torch.zeros(7, 2, dtype=torch.float64),
    )
    high[:, 1] = 0.9
    low[1], high[2], high[3], low[4] = -math.inf, math.inf, -0.4, 0.0
    found = metrics.crps(draws, low, upper=high, pointwise=True)
    grid, step = torch.linspace(-6.0, 6.0, 60_001, dtype=torch.float64)[:-1] + 1e-4, 2e-4
    size = len(draws)
    below = (draws[:, :, :, None] < grid).double().sum(0)  # of the draws
    squared = below * (below - 1) / (size * (size - 1))  # P(X < t, X' < t)
    above = (size - below) * (size - below - 1) / (size * (size - 1))
    inside = squared * (grid < low[..., None]) + above * (grid > high[..., None])
    torch.testing.assert_close(found, inside.sum(-1) * step, rtol=0.0, atol=4e-4)
    exact = metrics.crps(draws[:, 3], low[3], pointwise=True)
    torch.testing.assert_close(found[3, 0], exact[0])
    with pytest.raises(ValueError, match="upper and y must have the same shape"):
        metrics.crps(draws, low, upper=high[:3])


@pytest.mark.parametrize("law", ["normal", "lognormal", "weibull"])
def test_crps_of_right_censored_targets_in_closed_form(law):
    """The integral of F^2 up to the limit c: of a standard Normal c F^2 + 2 F p - P(Z < sqrt 2 c) /
    sqrt(pi); of the others by quadrature. The draws are quantiles."""
    u = (np.arange(20_000) + 0.5) / 20_000
    laws = {"normal": norm, "lognormal": lognorm(0.7), "weibull": weibull_min(1.5)}
    base, limit = laws[law], 1.1
    draws = torch.from_numpy(base.ppf(u))[:, None]
    found = metrics.crps(draws, draws.new_tensor([limit]), upper=draws.new_tensor([math.inf]))
    if law == "normal":
        p = norm.cdf(limit)
        expected = limit * p**2 + 2 * p * norm.pdf(limit)
        expected -= norm.cdf(math.sqrt(2) * limit) / math.sqrt(math.pi)
    else:
        expected = quad(lambda t: base.cdf(t) ** 2, 0.0, limit)[0]
    assert found == pytest.approx(expected, abs=2e-4)


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


HALF, ZEROS = torch.full((4, 2), 0.5), torch.zeros(4)
DRAWS, TARGETS = torch.zeros(60, 7, 2), torch.zeros(7, 2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: metrics.crps(DRAWS[..., 0], TARGETS), r"\(S, 7, 2\)"),
        (lambda: metrics.crps(DRAWS[:1], TARGETS), "2 draws"),
        (lambda: metrics.interval_coverage(DRAWS, TARGETS, level=90), "level"),
        (lambda: coverage_range(DRAWS[:1]), "at least 2 draws"),
        (lambda: coverage_range(DRAWS, level=90), "level must lie"),
        (lambda: metrics.wasserstein1(DRAWS, DRAWS[:, :3]), "same test points"),
        (lambda: metrics.energy_distance(DRAWS, DRAWS[:, :3]), "same test points"),
        (
            lambda: metrics.mmd(torch.randn(5, 2), torch.zeros(5, 2)),
            "length_scale must be",
        ),
        (lambda: metrics.brier(HALF, torch.tensor([0, 1, 2, 0])), "from 0 to 1"),
        (lambda: metrics.accuracy(HALF, torch.zeros(4, 1)), r"\(N, C\)"),
        (lambda: metrics.rmse(torch.zeros(4, 1), ZEROS), "same shape"),
        (lambda: metrics.gaussian_kl(HALF, HALF, ZEROS, ZEROS), "a_mean and b_mean must have"),
        (lambda: metrics.negative_log_predictive_density(ZEROS), r"\(draws, points\)"),
        (
            lambda: metrics.expected_calibration_error(HALF, ZEROS, bins=0),
            "bins must be at",
        ),
        (lambda: metrics.adaptive_calibration_error(HALF[:0], ZEROS[:0]), "at least one label"),
        (lambda: metrics.auroc(ZEROS, ZEROS[:0]), "at least one score of each kind"),
        (lambda: metrics.aurc(ZEROS[:0], ZEROS[:0]), "at least one point"),
    ],
)
def test_refusals_of_all_metrics(call, words):
    with pytest.raises(ValueError, match=words):
        call()


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
    assert torch.equal(squared_error(draws[0], y).mean().sqrt(), metrics.rmse(draws[0], y))


def test_gaussian_nlpd_is_a_normal_density():
    m, v, y = torch.randn(5).double(), torch.rand(5).double() + 0.1, torch.randn(5).double()
    exact = -torch.distributions.Normal(m, v.sqrt()).log_prob(y)
    assert torch.allclose(metrics.gaussian_nlpd(m, v, y), exact)


def test_effective_draws_count_those_that_share_the_density():
    log_p = torch.tensor(
        [[0.0, 0.0, -1e4], [0.0, -800.0, -1e4], [0.0, 0.0, -2e4], [0.0, 0.0, -2e4]]
    )
    assert torch.allclose(effective_draws(log_p), torch.tensor([4.0, 3.0, 2.0]).double())


@pytest.mark.parametrize("count", [1, 4, 12])
def test_crps_of_a_mixture_of_normals(count):
    made = torch.Generator().manual_seed(0)
    mean, sd, y = torch.randn(2 * count + 1, 5, generator=made).double().split([count, count, 1])
    y, sd = y[0], sd.abs() + 0.1
    grid = torch.linspace(-12, 12, 48001, dtype=torch.float64)[:, None]
    share = torch.distributions.Normal(mean[:, None], sd[:, None]).cdf(grid).mean(0)
    expected = torch.trapezoid((share - (grid >= y).double()).square(), grid[:, 0], dim=0)
    torch.testing.assert_close(crps_of_normals(mean, sd, y), expected, rtol=0, atol=3e-4)


def test_crps_of_normals_pairs_components_that_follow_member_by_member():
    made = torch.Generator().manual_seed(0)
    centers = 3.0 * torch.randn(10, 1, 50, generator=made).double()
    mean = (centers + 0.2 * torch.randn(10, 40, 50, generator=made)).flatten(0, 1)
    sd, y = torch.full_like(mean, 0.3), torch.randn(50, generator=made).double()
    gap = torch.distributions.Normal(mean[:, None] - mean, 2**0.5 * sd)  # of all pairs
    z = gap.loc / gap.scale
    density = torch.distributions.Normal(0.0, 1.0)
    far = gap.scale * (z * (2 * density.cdf(z) - 1) + 2 * density.log_prob(z).exp())
    to_y = (y - mean) / sd
    near = sd * (to_y * (2 * density.cdf(to_y) - 1) + 2 * density.log_prob(to_y).exp())
    expected = near.mean(0) - 0.5 * far.mean((0, 1))
    assert (crps_of_normals(mean, sd, y) - expected).abs().max() < 0.01


_OF_CLASSES = ["accuracy", "brier", "expected_calibration_error", "adaptive_calibration_error"]
_OF_NUMBERS = ["interval_coverage", "pit", "crps"]


@pytest.mark.parametrize("name", [*_OF_CLASSES, "agreement", "total_variation", *_OF_NUMBERS])
def test_scores_of_predictions_that_are_nan_are_nan(name):
    """A posterior that diverged has no calibration error of 0 and no coverage of 0."""
    score, bad = getattr(metrics, name), torch.tensor([torch.nan, 0.0, 0.0, 0.0])
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.5, 0.5]])
    if name in _OF_CLASSES:
        found = [score(p + bad[:, None], torch.tensor([0, 1, 0, 1]))]
    elif name in _OF_NUMBERS:
        draws, y = torch.randn(5, 4), torch.zeros(4)
        found = [score(draws + bad, y).flatten()[0], score(draws, y + bad).flatten()[0]]
    else:
        found = [score(p[None], p[None] + bad[:, None]), score(p[None] + bad[:, None], p[None])]
    assert all(value.isnan() for value in found)


def test_labels_that_are_not_whole_are_refused():
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    assert metrics.accuracy(p, torch.tensor([0.0, 1.0])) == 1.0
    with pytest.raises(ValueError, match="not whole"):
        metrics.accuracy(p, torch.tensor([0.2, 1.0]))


def test_coverage_and_pit_of_a_target_of_which_nothing_is_known():
    draws, anything = torch.randn(5, 1), torch.tensor([torch.inf])
    assert 0 <= metrics.pit(draws, -anything, upper=anything) <= 1
