"""R-hat of weights and function in words, within chains, and ESS over seconds and gradients."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bdl.diagnostics import ess, explain_chains, rhat, summary, within_ess, within_rhat
from pyro_bdl.samples import Samples


class Squared(torch.nn.Module):
    """f = w^2, which does not know the sign of w."""

    def forward(self, x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(1, dtype=torch.float64), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x[:, 0] * w**2, 1.0), obs=y)


def chains(*centers, drift=0.0):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(centers), 200, 1, generator=generator, dtype=torch.float64)
    path = drift * torch.linspace(-1, 1, 200, dtype=torch.float64)[None, :, None]
    return Samples({"w": torch.tensor(centers)[:, None, None].double() + 0.1 * noise + path})


X = torch.ones(3, 1, dtype=torch.float64)


@pytest.mark.parametrize(
    "samples, words",
    [
        (chains(2.0, 2.0), "The chains agree."),
        (chains(2.0, -2.0), "symmetries of the network"),
        (chains(2.0, -4.0), "separate modes"),
        (chains(2.0, -4.0, drift=1.0), "not even each on its own"),
    ],
)
def test_what_the_chains_say(samples, words):
    assert words in explain_chains(Squared(), samples, X)


def test_scalar_latents_count_as_weights():
    def scalar(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x[:, 0] * w**2, 1.0), obs=y)

    samples = chains(2.0, -2.0)
    told = explain_chains(scalar, Samples({"w": samples.latents["w"][..., 0]}), X)
    assert told == explain_chains(Squared(), samples, X)


def test_one_chain_cannot_be_compared():
    with pytest.raises(ValueError, match="at least two"):
        explain_chains(Squared(), chains(1.0), X)


def test_within_chains_is_rhat_of_the_halves():
    draws = chains(0.0, 5.0, drift=1.0).latents["w"]
    found = within_rhat(draws)
    for chain, value in zip(draws, found, strict=True):
        halves = torch.stack(chain.chunk(2))
        # the halves as chains of their own would be split again: equal without that split
        assert value.shape == (1,) and float(value) > 1.5 and float(rhat(halves)) > 1.5
    assert (within_rhat(chains(0.0, 5.0).latents["w"]) < 1.05).all()


def test_ess_within_chains_does_not_count_their_distance():
    draws = chains(0.0, 5.0).latents["w"]
    found = within_ess(draws)
    assert found.shape == (2, 1) and torch.equal(found[1], ess(draws[1:]))
    assert float(found.sum()) > 10 * float(ess(draws))


def test_ess_over_the_cost():
    plain = chains(0.0, 0.0)
    steps = {"num_steps": torch.full((2, 200), 3)}
    found = summary(Samples(plain.latents, steps, {"seconds": 4.0}))
    least = float(ess(plain.latents["w"]).min())
    assert found.ess_per_second == pytest.approx(least / 4)
    assert found.ess_per_gradient == pytest.approx(least / 1200)
    assert "per second" in str(found) and "1000 gradients" in str(found)
    assert summary(plain).ess_per_second is None
