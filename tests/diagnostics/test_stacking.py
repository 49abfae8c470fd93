"""Stacking weights against a search over the simplex and in closed form."""

import math

import pytest
import torch

from pyro_bdl.diagnostics import loo, stacking_weights


def simplex(steps):
    """All weights of three posteriors on a grid, (G, 3)."""
    a, b = torch.meshgrid(*[torch.arange(steps + 1)] * 2, indexing="ij")
    grid = torch.stack([a, b, steps - a - b], -1).reshape(-1, 3)
    return grid[(grid >= 0).all(1)].double() / steps


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
def test_weights_are_those_of_a_grid(spread):
    """Three posteriors, of which each is best at some data; the third is worse on the whole."""
    log_p = spread * torch.randn(40, 3, dtype=torch.float64) - torch.tensor([0.0, 0.0, 0.2])
    found = stacking_weights(dict(zip("abc", log_p.T, strict=True)))
    grid = simplex(200)
    values = (log_p.exp() @ grid.T).log().sum(0)
    best = grid[values.argmax()]
    weights = torch.tensor(list(found.weights.values()), dtype=torch.float64)
    torch.testing.assert_close(weights, best, rtol=0, atol=0.011)
    assert weights.sum() == pytest.approx(1) and found.elpd >= values.max() - 1e-4
    assert found.elpd == pytest.approx((log_p.exp() @ weights).log().sum())
    assert found.se == pytest.approx(math.sqrt(40) * found.pointwise.std())


def test_two_posteriors_that_each_know_a_part_of_the_data():
    """If a knows n data and b the others, the weights are n / N and 1 - n / N, with the standard
    error of a share."""
    known = torch.rand(400, dtype=torch.float64) < 0.3
    log_p = torch.stack([known, ~known], 1).double().log().clamp_min(-800)
    found = stacking_weights({"a": log_p[:, 0], "b": log_p[:, 1]})
    share = known.double().mean().item()
    assert found.weights["a"] == pytest.approx(share, abs=1e-3)
    error = math.sqrt(share * (1 - share) / 400)
    assert found.weights_se["a"] == pytest.approx(error, rel=0.6)
    assert found.elpd == pytest.approx(
        400 * (share * math.log(share) + (1 - share) * math.log(1 - share)), abs=1e-3
    )


def test_a_posterior_that_is_worse_at_all_data_has_no_weight():
    good = loo(0.3 * torch.randn(2, 200, 15))
    found = stacking_weights({"good": good, "bad": good.pointwise - 1})
    assert found.weights == {"good": 1.0, "bad": 0.0}
    assert found.elpd == pytest.approx(good.elpd) and found.se == pytest.approx(good.se)
    assert math.isnan(found.weights_se["good"])  # of 15 data


@pytest.mark.parametrize("seed", range(6))
def test_no_other_weight_of_many_posteriors_would_gain(seed):
    """The gradient g_k = mean_n p_nk / sum_j w_j p_nj is 1 at a maximum, and less where w_k is 0;
    sequential quadratic programming alone ends before it at three of these."""
    torch.manual_seed(seed)
    log_p = 700 * torch.randn(40, 20, dtype=torch.float64)
    found = stacking_weights({str(k): column for k, column in enumerate(log_p.T)})
    weights = torch.tensor(list(found.weights.values()), dtype=torch.float64)
    p = (log_p - log_p.amax(1, keepdim=True)).exp()
    assert (p / (p @ weights)[:, None]).mean(0).max() <= 1 + 1e-5


@pytest.mark.parametrize(
    "scores", [{}, {"a": torch.zeros(3), "b": torch.zeros(4)}, {"a": torch.tensor([0.0, math.nan])}]
)
def test_refused_scores(scores):
    with pytest.raises(ValueError, match=r"stacking needs|not all finite"):
        stacking_weights(scores)
