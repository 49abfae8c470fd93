"""How chains share a machine and their compiled functions."""

import subprocess
import sys

import jax
import pyro
import pytest
import torch
from helpers.killed_runs import drawn as drawn_by_nuts
from pyro import distributions as dist

import pyro_bdl as bdl
from pyro_bdl.mcmc import MAMS, MCLMC, NUTS

_TWO_DEVICES = """
import sys
sys.path[:0] = sys.argv[1:]
import jax, torch
from helpers.killed_runs import drawn
from pyro_bdl.mcmc import run

assert len(jax.devices()) == 2
seen = []
iterate = run.Chain._iterate
def watched(self, *args):
    iterate(self, *args)
    seen.append((self.device, *jax.tree.leaves(self.state)[0].devices()))
run.Chain._iterate = watched
two = drawn("nuts")
assert {(own.id, device.id) for own, device in seen} == {(0, 0), (1, 1)}, seen
print(two.latents["w"].sum().item())
"""


@pytest.mark.slow
def test_single_chains_take_turns_on_the_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    command = [sys.executable, "-c", _TWO_DEVICES, *sys.path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = drawn_by_nuts("nuts").latents["w"].sum().item()
    assert float(done.stdout.split()[-1]) == pytest.approx(expected)


@pytest.mark.parametrize("kernel", [NUTS(max_tree_depth=3), MAMS(), MCLMC()], ids=type)
def test_chains_of_other_data_and_seeds_compile_nothing(kernel):
    """Each with its own data and its own random numbers."""

    def drawn(center, seed):
        data = torch.full((30,), center)

        def program():
            w = pyro.sample("w", dist.Normal(torch.zeros(2), 10.0).to_event(1))
            pyro.sample("y", dist.Normal(w[0], 1.0).expand([30]).to_event(1), obs=data)

        found = bdl.mcmc.sample(
            program, kernel=kernel, num_warmup=200, num_samples=300, num_chains=1, seed=seed
        )
        return found.latents["w"][..., 0]

    first = drawn(1.0, 0)
    with pytest.MonkeyPatch.context() as patch:
        compiled = []
        patch.setattr(jax, "jit", lambda function, **_: compiled.append(function) or function)
        other, far, again = drawn(1.0, 1), drawn(5.0, 0), drawn(1.0, 0)
    assert not compiled
    assert again.equal(first) and not other.equal(first)
    exact = 30 / (30 + 0.01)  # of the data's mean
    assert far.mean().item() == pytest.approx(5.0 * exact, abs=0.15)
    assert other.mean().item() == pytest.approx(exact, abs=0.15)


def test_large_integers_in_single_precision():
    """The slope's posterior is normal; the integers need 64 bits."""
    x, numbers = torch.linspace(-1.0, 1.0, 20), torch.arange(20) * 10**9

    def model(x, numbers, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        step = (slope > -50).long()  # 1: so that the product is one of the chain's
        inputs = x * (1 + (step * numbers * 7 % 5)).to(x.dtype)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(slope * inputs, 0.3), obs=y)

    options = {"num_warmup": 200, "num_samples": 300, "num_chains": 1, "seed": 0}
    samples = bdl.mcmc.sample(model, x, numbers, x, progress=False, **options)
    slope = samples.latents["slope"]
    inputs = x * (1 + numbers * 7 % 5)
    precision = 1 + inputs @ inputs / 0.09
    assert slope.dtype == torch.float32
    assert abs(slope.mean() - inputs @ x / 0.09 / precision) < 0.4 * precision**-0.5
    assert abs(slope.std() * precision**0.5 - 1) < 0.3
