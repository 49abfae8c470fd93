"""Chains that are killed, resumed and extended make the same draws as an uninterrupted run."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_bdl import mcmc
from pyro_bdl.mcmc import checkpoint
from pyro_bdl.samples import Samples

Y = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)


def model(y):
    w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=torch.float64), 1.0).to_event(1))
    s = pyro.sample("s", dist.Gamma(torch.tensor(2.0, dtype=torch.float64), 1.0))
    pyro.sample("y", dist.Normal(w, s).to_event(1), obs=y)


def drawn(kernel, num_samples=12, y=Y, **options):
    options = {
        "num_warmup": 20,
        "num_chains": 2,
        "seed": 1,
        "progress": False,
        "init": "uniform",
    } | options
    if kernel == "mclmc":
        options |= {"thinning": 2}
    return mcmc.sample(model, y, kernel=kernel, num_samples=num_samples, **options)


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    "kernel, method",
    [
        ("mclmc", "vectorized"),
        pytest.param("nuts", "sequential", marks=pytest.mark.slow),
        pytest.param("mams", "parallel", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_with_the_same_draws(kernel, method, tmp_path, slow_clock, monkeypatch):
    save, written = np.savez, []

    def counted(file, **arrays):
        written.append("stage" in arrays)  # a state, or the draws that it names
        save(file, **arrays)

    monkeypatch.setattr(np, "savez", counted)
    whole = drawn(kernel, chain_method=method, checkpoint=tmp_path / "whole")
    assert written[-5:] == [False, True, False, True, True]  # the end writes the state again
    left = len(written) - 7  # writes until the kill, between draws and the state that names them

    def killing(file, **arrays):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        save(file, **arrays)

    monkeypatch.setattr(np, "savez", killing)
    with pytest.raises(Killed):
        drawn(kernel, chain_method=method, checkpoint=tmp_path / "run")
    monkeypatch.setattr(np, "savez", save)
    resumed = drawn(kernel, chain_method=method, checkpoint=tmp_path / "run")
    for site, value in whole.latents.items():
        assert torch.equal(resumed.latents[site], value)
    for name, value in whole.stats.items():
        assert torch.equal(resumed.stats[name], value)
    if kernel == "mclmc":  # a larger number goes on
        longer = drawn(kernel, 15, chain_method=method, checkpoint=tmp_path / "run")
        assert torch.equal(longer.latents["w"][:, :12], whole.latents["w"])
        assert longer.num_draws == 15
        with pytest.raises(ValueError, match="other settings"):
            drawn(kernel, chain_method=method, checkpoint=tmp_path / "run", seed=2)


def test_a_folder_of_another_run_is_refused(tmp_path):
    def journal(settings="{}", **numbers):
        identity = {"starts": np.ones(2), "log densities": np.ones(1)} | numbers
        return checkpoint.Journal(tmp_path, settings, identity)

    first = journal()
    assert first.restore() is None
    first.write(0, 4, {"x": np.arange(3)}, {"draws": np.zeros(4)})
    first.write(0, 6, {"x": np.arange(3) + 1}, {"draws": np.ones(2)})
    found = journal(starts=np.ones(2) * (1 + 1e-6)).restore()  # but for rounding
    assert found.stage == 0 and found.done == 6 and found.leaves["x"].tolist() == [1, 2, 3]
    assert np.concatenate([block["draws"] for block in found.blocks]).tolist() == [0] * 4 + [1] * 2
    with pytest.raises(ValueError, match="other settings"):
        journal(settings="x").restore()
    with pytest.raises(ValueError, match="log densities differ"):
        journal(**{"log densities": np.ones(1) * 1.1}).restore()


@pytest.mark.parametrize("kernel", [pytest.param("nuts", marks=pytest.mark.slow), "mclmc"])
def test_extended_chains_are_those_of_a_longer_run(kernel, tmp_path):
    whole = drawn(kernel, 12)
    short = drawn(kernel, 5)
    grown = short.extend(7)
    assert torch.equal(grown.latents["w"], whole.latents["w"])
    assert torch.equal(grown.stats["potential_energy"], whole.stats["potential_energy"])
    if kernel == "mclmc":
        from_file = Samples.load(short.save(tmp_path / "short.safetensors"))
        with pytest.raises(ValueError, match=r"mcmc\.extend"):
            from_file.extend(7)
        grown = mcmc.extend(from_file, 7, model, Y, progress=False)
        assert torch.equal(grown.latents["s"], whole.latents["s"])


def test_samples_without_a_state_are_not_extended():
    samples = Samples({"w": torch.zeros(1, 4, 3)})
    with pytest.raises(ValueError, match="no state"):
        mcmc.extend(samples, 3, model, Y)


def test_a_limit_of_time_ends_the_draws():
    samples = drawn("nuts", 10**6, num_chains=1, seconds=0.01)
    assert 1 <= samples.num_draws < 10**5
    assert not samples.info["interrupted"]
