"""Leave-one-out from a part of the data: unbiased over all samples, exact for all data."""

import itertools
import math

import pytest
import torch

from pyro_bdl import diagnostics

V = torch.tensor([-1.0, -2.5, 0.3, -4.0, -1.7, -0.2], dtype=torch.float64)
A = V + torch.tensor([0.1, 0.4, 0.0, 0.9, 0.2, 0.05], dtype=torch.float64)


def test_sum_and_variance_are_unbiased_over_all_samples():
    found = []
    for rows in itertools.combinations(range(6), 3):
        chosen = torch.tensor(rows)
        found.append(diagnostics.difference_estimate(V[chosen], A, chosen))
    total, error, over_data = torch.tensor(found, dtype=torch.float64).T
    assert total.mean() == pytest.approx(V.sum().item())
    assert error.square().mean() == pytest.approx(total.var(correction=0).item())
    assert over_data.square().mean() == pytest.approx(6 * V.var().item())


def test_of_all_data_it_is_the_sum():
    total, error, over_data = diagnostics.difference_estimate(V, A, torch.arange(6))
    assert (total, error) == (pytest.approx(V.sum().item()), 0.0)
    assert over_data == pytest.approx(math.sqrt(6) * V.std().item())


def test_a_tenth_of_the_data_gives_the_elpd_within_its_error():
    torch.manual_seed(0)
    w, y = 0.05 * torch.randn(4, 100, 1).double(), torch.randn(3000).double()
    density = torch.distributions.Normal(w, 1.0).log_prob(y)
    every = diagnostics.loo(density, progress=False)
    rows = torch.randperm(3000)[:300]
    some = diagnostics.loo(density[..., rows], progress=False)
    with_all = density.flatten(0, 1).logsumexp(0) - math.log(400)
    found = diagnostics.subsampled_loo(some, with_all, rows)
    assert abs(found.elpd - every.elpd) < 3 * found.subsampling_se < 0.1 * every.se
    assert found.se == pytest.approx(every.se, rel=1e-2)
    assert found.p_loo == pytest.approx(every.p_loo, abs=3 * found.subsampling_se)
    assert found.total_se == math.hypot(found.se, found.subsampling_se)
    assert "300 of 3000 observations" in str(found)
