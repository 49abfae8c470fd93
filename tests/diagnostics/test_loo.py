"""LOO in a conjugate model, where every left-out density is known."""

import itertools
import math

import pytest
import torch
from torch.distributions import Normal

from pyro_bdl.diagnostics import ess, loo, loo_approximate_posterior
from pyro_bdl.diagnostics.loo import difference_estimate, subsampled_loo
from pyro_bdl.errors import BdlWarning

NOISE, PRIOR, SIZE = 0.8, 2.0, 25


class Conjugate:
    """y_n ~ Normal(mu, 0.8^2), mu ~ Normal(0, 2^2)."""

    def __init__(self):
        self.y = 0.7 + NOISE * torch.randn(SIZE, dtype=torch.float64)
        self.posterior = self.given(self.y)

    def given(self, y):
        precision = len(y) / NOISE**2 + 1 / PRIOR**2
        return Normal(y.sum() / NOISE**2 / precision, precision**-0.5)

    def predictive(self, y):
        """The density of a new observation."""
        mu = self.given(y)
        return Normal(mu.mean, math.hypot(mu.stddev, NOISE))

    def left_out(self):
        """log p(y_n | all others), by leaving each one out."""
        keep = ~torch.eye(SIZE, dtype=torch.bool)
        return torch.stack(
            [self.predictive(self.y[keep[n]]).log_prob(self.y[n]) for n in range(SIZE)]
        )

    def log_likelihood(self, mu):
        return Normal(mu[..., None], NOISE).log_prob(self.y)

    def log_joint(self, mu):
        return Normal(0.0, PRIOR).log_prob(mu) + self.log_likelihood(mu).sum(-1)


def test_loo_equals_leaving_each_observation_out():
    """40 000 independent draws: the Monte Carlo error of a pointwise value is below 0.002. elpd =
    sum_n log p(y_n | y_-n) (Vehtari, Gelman & Gabry 2017)."""
    model = Conjugate()
    found = loo(model.log_likelihood(model.posterior.sample((4, 10_000))))
    exact = model.left_out()
    torch.testing.assert_close(found.pointwise, exact, rtol=0, atol=0.01)
    assert abs(found.elpd - exact.sum()) < 0.02
    assert found.num_bad == 0 and found.good_k == 0.7 and found.num_draws == 40_000
    spread = exact.numpy().std(ddof=1)
    assert abs(found.se - math.sqrt(SIZE) * spread) < 0.02
    full = model.predictive(model.y).log_prob(model.y)
    assert abs(found.p_loo - (full - exact).sum()) < 0.02


def test_approximate_posterior_is_corrected():
    """Draws from a Gaussian that is off by half a sd and 1.5 times as wide. Source: Magnusson et
    al. 2019, equation 8."""
    model = Conjugate()
    guide = Normal(
        model.posterior.mean + 0.5 * model.posterior.stddev, 1.5 * model.posterior.stddev
    )
    mu = guide.sample((1, 40_000))
    ll = model.log_likelihood(mu)
    found = loo_approximate_posterior(ll, model.log_joint(mu), guide.log_prob(mu))
    exact = model.left_out()
    torch.testing.assert_close(found.pointwise, exact, rtol=0, atol=0.02)
    assert found.num_bad == 0
    uncorrected = loo(ll)
    assert abs(uncorrected.elpd - exact.sum()) > 10 * abs(found.elpd - exact.sum())


def test_warnings_count_the_observations_and_one_has_no_standard_error():
    heavy = -torch.distributions.Exponential(0.3).sample((4, 250, 7)).double()
    with pytest.warns(BdlWarning, match=r"k-hat of 7 of 7 observations lies above 0.67"):
        found = loo(heavy)
    assert found.num_bad == 7 and "1000 draws" in str(found)
    ll = 0.1 * torch.randn(2, 100, dtype=torch.float64)  # a single observation
    assert math.isnan(loo(ll).se) and loo(ll).pointwise.shape == ()


def test_the_efficiency_of_each_observation_is_that_of_its_likelihood():
    """Observation by observation it is the value with r_eff = ess(exp(log likelihood)) / S, as by
    ``relative_eff`` of R's loo; here from 0.1 to 1."""
    torch.manual_seed(0)
    independent, held = torch.randn(4, 400, 2), torch.randn(4, 40, 3).repeat_interleave(10, 1)
    ll = torch.cat([independent, held, torch.full((4, 400, 1), -1.0)], -1).double()
    found = loo(ll, r_eff=None)
    for n in range(5):
        r_eff = float(ess(ll[..., n].exp(), kind="mean")) / 1600
        one = loo(ll[..., n], r_eff=r_eff)
        assert float(found.pointwise[n]) == pytest.approx(float(one.pointwise), rel=1e-12)
        assert float(found.pareto_k[n]) == pytest.approx(float(one.pareto_k), rel=1e-10)
        assert (r_eff < 0.2) == (n > 1)
    assert float(found.pointwise[5]) == pytest.approx(-1.0)
    whole = loo(ll)
    assert not torch.allclose(whole.pareto_k[2:5], found.pareto_k[2:5])


# ------------------------------------------------------------------------ from a part of the data

V = torch.tensor([-1.0, -2.5, 0.3, -4.0, -1.7, -0.2], dtype=torch.float64)
A = V + torch.tensor([0.1, 0.4, 0.0, 0.9, 0.2, 0.05], dtype=torch.float64)


def test_sum_and_variance_are_unbiased_over_all_samples():
    found = []
    for rows in itertools.combinations(range(6), 3):
        chosen = torch.tensor(rows)
        found.append(difference_estimate(V[chosen], A, chosen))
    total, error, over_data = torch.tensor(found, dtype=torch.float64).T
    assert total.mean() == pytest.approx(V.sum().item())
    assert error.square().mean() == pytest.approx(total.var(correction=0).item())
    assert over_data.square().mean() == pytest.approx(6 * V.var().item())


def test_of_all_data_it_is_the_sum():
    total, error, over_data = difference_estimate(V, A, torch.arange(6))
    assert (total, error) == (pytest.approx(V.sum().item()), 0.0)
    assert over_data == pytest.approx(math.sqrt(6) * V.std().item())


def test_a_tenth_of_the_data_gives_the_elpd_within_its_error():
    torch.manual_seed(0)
    w, y = 0.05 * torch.randn(4, 100, 1).double(), torch.randn(3000).double()
    density = torch.distributions.Normal(w, 1.0).log_prob(y)
    every = loo(density)
    rows = torch.randperm(3000)[:300]
    some = loo(density[..., rows])
    with_all = density.flatten(0, 1).logsumexp(0) - math.log(400)
    found = subsampled_loo(some, with_all, rows)
    assert abs(found.elpd - every.elpd) < 3 * found.subsampling_se < 0.1 * every.se
    assert found.se == pytest.approx(every.se, rel=1e-2)
    assert found.p_loo == pytest.approx(every.p_loo, abs=3 * found.subsampling_se)
    assert found.total_se == math.hypot(found.se, found.subsampling_se)


def test_a_difference_is_the_sum_of_that_of_each_datum():
    torch.manual_seed(2)
    first, second = (loo(torch.randn(4, 200, 12).double() / k) for k in (2, 3))
    found = first.difference(second)
    each = first.pointwise - second.pointwise
    assert found.elpd == pytest.approx(first.elpd - second.elpd)
    assert found.se == pytest.approx(float(each.std()) * math.sqrt(12))
    assert found.draws_se == pytest.approx(math.hypot(first.draws_se, second.draws_se))
