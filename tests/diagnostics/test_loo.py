"""LOO beside parity with ArviZ (``test_arviz.py``): warnings, efficiencies and subsamples."""

import itertools
import math

import pytest
import torch

from pyro_bdl.diagnostics import ess, loo
from pyro_bdl.diagnostics.loo import difference_estimate, subsampled_loo
from pyro_bdl.errors import BdlWarning


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
