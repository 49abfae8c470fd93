"""Temperature scaling of posteriors whose temperature is known."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.comparisons import labels, line, row_of, shift

from pyro_bdl import Predictive, Samples
from pyro_bdl.calibration import temperature_scaling

coin = labels(lambda logits: dist.Categorical(logits=logits))


def exactly(*values):
    """A posterior without spread."""
    return Samples({"w": torch.tensor(values).squeeze().expand(1, 20, *([2] * (len(values) > 1)))})


def test_the_factor_of_a_variance_is_recovered_in_closed_form():
    """y ~ Normal(w, 1) where the residuals are three times as large."""
    torch.manual_seed(0)
    x, y = torch.zeros(200, 1), 1 + 3 * torch.randn(200)
    posterior = exactly(1.0)
    found = temperature_scaling(shift, posterior, x, y)
    assert found.value == pytest.approx((y - 1).square().mean().item(), rel=1e-5)
    assert abs(found.value - 9) < 3 * found.error
    moments = found.moments(Predictive(shift, posterior).draw_moments(x)["y"].over_draws())
    torch.testing.assert_close(moments.variance, torch.full((200,), found.value))


@pytest.mark.parametrize("truth", [1.0, 2.5])
def test_the_temperature_of_classes_is_recovered(truth):
    """Logits are the true ones times the temperature; at 1 they are calibrated."""
    torch.manual_seed(1)
    x = 3 * torch.randn(3000, 1)
    y = torch.bernoulli(x[:, 0].sigmoid()).long()
    posterior = exactly(0.0, truth)
    found = temperature_scaling(coin, posterior, x, y)
    assert abs(found.value - truth) < 3 * found.error < 0.5 * truth
    p = found.probabilities(Predictive(coin, posterior).mean(x)["y"].mean(0))
    exact = (x[:, 0] * truth / found.value).sigmoid()
    torch.testing.assert_close(p[:, 1], exact)


def test_posteriors_that_differ_in_temperature_alone_have_one_calibrated_density():
    """Wrong noise costs NLPD, and no calibrated NLPD; of few points there is none."""
    torch.manual_seed(2)
    x = torch.linspace(-1, 1, 60)[:, None]
    y = 0.5 + x[:, 0] + torch.randn(60)  # the noise of the program is 0.5
    row = row_of(line, exactly(0.5, 1.0), x, y)
    assert row["nlpd"] > row["nlpd_calibrated"] + 0.3
    assert abs(row["temperature"] - 4) < 3 * row["temperature_se"]
    # of one normal with its own variance, 0.5 log(2 pi e), with three errors of 60 such squares
    assert row["nlpd_calibrated"] == pytest.approx(1.42, abs=3 * math.sqrt(0.5 / 60))
    few = row_of(line, exactly(0.5, 1.0), x[:19], y[:19])
    assert "temperature" in few and "nlpd_calibrated" not in few


@pytest.mark.parametrize(
    "observed",
    [
        lambda f: dist.Categorical(logits=torch.stack([-f / 2, f / 2], -1)),
        lambda f: dist.Bernoulli(logits=f),
    ],
    ids=["Categorical", "Bernoulli"],
)
@pytest.mark.parametrize("gap", [10.0, 100.0])
def test_of_very_sure_classes_it_is_that_of_their_logits(observed, gap):
    """One logit, gap on average, and 3 of 4 labels right: T = log of mean odds / log 3. In single
    precision the smaller probability of a gap of 100 is zero."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", observed(gap * w * x), obs=y)

    x, labels = torch.ones(40), (torch.arange(40) % 4 > 0).long()
    y = labels if "Categorical" in type(observed(x)).__name__ else labels.float()
    samples = Samples({"w": torch.ones(1, 5)})
    value = temperature_scaling(model, samples, x, y).value
    assert value == pytest.approx(gap / math.log(3), rel=1e-5)
