"""A chain from each member of an ensemble: each stays in its mode, with the mode's moments."""

import pyro
import pyro.distributions as dist
import torch

import pyro_bdl as bdl
from pyro_bdl import mcmc


class TwoModes(torch.nn.Module):
    """y ~ Normal(w^2, 1): modes at w = +-3 with nearly Normal shapes of their own."""

    def forward(self, x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=torch.float64), 10.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal((w**2).sum() / 2, 1.0), obs=y)


def data():
    x = torch.zeros(10, 1, dtype=torch.float64)
    return x, torch.full((10,), 9.0, dtype=torch.float64)


def start(values):
    model = TwoModes()
    guide = bdl.guides.AutoEnsemble(model, size=len(values))
    guide.prototype(*data())
    with torch.no_grad():
        guide.locs.copy_(torch.tensor(values, dtype=torch.float64))
    return model, guide


def test_chains_start_at_the_members_in_turn():
    values = [[3.0, 3.0], [-3.0, 3.0]]
    model, guide = start(values)
    samples = mcmc.ensemble_sample(
        model, *data(), members=guide, num_warmup=0, num_samples=4,
        kernel=mcmc.MCLMC(step_size=1e-4, thinning=1), progress=False,
    )  # fmt: skip
    assert torch.allclose(samples.latents["w"][:, 0], torch.tensor(values).double(), atol=1e-2)
    assert samples.info["ensemble"]["members"] == 2
    assert bdl.diagnostics.within_rhat(samples.latents["w"]).shape == (2, 2)


def test_members_are_trained_and_any_kernel_takes_over():
    samples = mcmc.ensemble_sample(
        TwoModes(), *data(), members=3, kernel=mcmc.SGHMC(step_size=1e-3), num_warmup=20,
        num_samples=10, training_steps=60, learning_rate=0.3, held_out=0.2, progress=False,
    )  # fmt: skip
    assert samples.latents["w"].shape == (3, 10, 2)
    square = (samples.latents["w"] ** 2).sum(-1) / 2
    assert ((square - 9).abs() < 5).all()
    record = samples.info["ensemble"]
    assert len(record["best_steps"]) == len(record["held_out"]) == 3


def test_the_default_asks_for_longer_steps_than_mclmc_by_itself():
    model, guide = start([[3.0, 3.0], [-3.0, 3.0]])
    samples, plain = (
        mcmc.ensemble_sample(
            model, *data(), members=guide, num_samples=50, progress=False, **options
        )
        for options in ({}, {"kernel": "mclmc"})
    )
    wanted, usual = (s.info["options"]["energy_variance"] for s in (samples, plain))
    assert wanted > 10 * usual
    reached, little = (float(s.stats["energy_variance"].mean()) for s in (samples, plain))
    assert wanted / 5 < reached < wanted * 5 and reached > 2 * little
    square = (samples.latents["w"] ** 2).sum(-1) / 2
    assert abs(float(square.mean()) - 9) < 0.3
