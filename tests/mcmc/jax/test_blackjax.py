"""BlackJAX's samplers on the translated density, where BlackJAX is installed."""

import sys

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl

SD = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
Y = torch.tensor(0.0, dtype=torch.float64)


def gaussian(y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), SD).to_event(1))
    pyro.sample("y", dist.Normal(w.sum() * 0, 1.0), obs=y)


@pytest.mark.parametrize("kernel", ["nuts", "mclmc"])
def test_moments(kernel):
    pytest.importorskip("blackjax")
    samples = bdl.mcmc.sample(
        gaussian, Y, kernel=kernel, backend="blackjax", num_warmup=200, num_samples=500,
        num_chains=2, chain_method="vectorized", progress=False,
    )  # fmt: skip
    w = samples.latents["w"]
    assert samples.info["backend"] == "blackjax"
    error = bdl.diagnostics.mcse(w)
    assert (w.mean((0, 1)).abs() < 4 * error + 0.01).all()
    square = bdl.diagnostics.mcse((w / SD) ** 2)
    assert (((w / SD) ** 2).mean((0, 1)) - 1).abs().max() < 4 * square.max() + 0.03
    grown = samples.extend(5)
    assert grown.num_draws == 505


def test_without_blackjax_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "blackjax", None)
    with pytest.raises(ImportError, match="pip install blackjax"):
        bdl.mcmc.sample(gaussian, Y, backend="blackjax", progress=False)
    with pytest.raises(ValueError, match="mams"):
        bdl.mcmc.sample(gaussian, Y, backend="blackjax", kernel="mams")
