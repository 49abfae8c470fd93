"""The point mass ends at the mode."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDelta

from pyro_bdl.elbo import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.guides import AutoMAP

D = torch.float64


@pytest.mark.parametrize("elbo", [Trace_ELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO])
def test_the_loss_is_minus_the_log_joint(elbo, conjugate):
    """-log p(y | w) - log p(w) at w = T(m)."""
    guide = AutoMAP(conjugate.model).prototype(conjugate.x, conjugate.y)
    w = guide.loc.detach()
    residual = conjugate.y - conjugate.design @ w
    expected = -dist.Normal(0.0, torch.tensor(0.5, dtype=D)).log_prob(residual).sum()
    expected -= dist.Normal(0.0, torch.tensor(2.0, dtype=D)).log_prob(w).sum()
    loss = elbo().loss(conjugate.model, guide, conjugate.x, conjugate.y)
    assert loss == pytest.approx(expected.item(), rel=1e-10)


@pytest.mark.parametrize("eta", [1.0, 0.1])
def test_it_ends_at_the_mode_of_a_conjugate_model(conjugate, minimize, eta):
    guide = AutoMAP(conjugate.model).prototype(conjugate.x, conjugate.y)
    loss = TemperedTraceMeanField_ELBO(eta)(conjugate.model, guide)
    minimize(loss.parameters(), lambda: loss(conjugate.x, conjugate.y), tolerance_grad=1e-12)
    torch.testing.assert_close(guide.loc.detach(), conjugate.mean(eta), rtol=1e-6, atol=1e-6)
    draws = guide.sample_latents(3)
    assert torch.equal(draws["weight"][0], draws["weight"][2])
    assert torch.equal(guide.quantiles([0.1, 0.9])["bias"][0], guide.median()["bias"])


def test_the_mode_is_that_over_the_constrained_latents(minimize):
    """As Pyro's AutoDelta: Gamma(3, 2) has its mode at 1, not at 1.5 as log w has."""

    def model():
        w = pyro.sample("w", dist.Gamma(torch.tensor(3.0, dtype=D), 2.0))
        pyro.sample("y", dist.Normal(w, 1e6), obs=torch.tensor(0.0, dtype=D))

    values = []
    for kind in (AutoMAP, AutoDelta):
        pyro.clear_param_store()
        guide = kind(model)
        guide()
        elbo = Trace_ELBO()
        minimize(
            guide.parameters(),
            lambda guide=guide, elbo=elbo: elbo.differentiable_loss(model, guide),
        )
        values.append(guide.median()["w"].item())
    assert values == pytest.approx([1.0, 1.0], abs=1e-3)
