"""Draws on disk: those of a run in memory, in bounded memory, also after a kill."""

import tracemalloc

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.killed_runs import drawn, walked
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_bdl as bdl
from pyro_bdl import mcmc
from pyro_bdl.mcmc.sink import Sink
from pyro_bdl.utils.memory import keep_freed_blocks

P, DRAWS = 1000, 1000


class Killed(Exception):
    pass


def wide(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(P, dtype=torch.float64), 1.0).to_event(1))
    f = pyro.deterministic("f", x * w.mean())
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 1.0), obs=y)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that was computed; views of others do not count."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        before = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in before:
                    self.bytes = max(self.bytes, storage.nbytes())
        return result


@pytest.mark.parametrize(
    "kernel, method",
    [("mclmc", "vectorized"), pytest.param("nuts", "parallel", marks=pytest.mark.slow)],
)
def test_draws_on_disk_are_those_in_memory(kernel, method, tmp_path):
    within = drawn(kernel, chain_method=method)
    options = {"chain_method": method, "checkpoint": tmp_path, "on_disk": True}
    outside = drawn(kernel, **options)
    for site, value in within.latents.items():
        assert torch.equal(outside.latents[site], value)
        outside.latents[site].zero_()  # which does not reach the files
    assert torch.equal(outside.stats["potential_energy"], within.stats["potential_energy"])
    again = drawn(kernel, **options)
    assert all(torch.equal(again.latents[site], v) for site, v in within.latents.items())
    with pytest.raises(ValueError, match=r"latents-0.bin.*number of draws.*'w'"):
        drawn(kernel, 20, **options)
    with pytest.raises(ValueError, match="no state"):
        mcmc.extend(outside, 2, drawn)
    with pytest.raises(ValueError, match="other settings"):
        drawn(kernel, **(options | {"on_disk": False}))


def test_stochastic_gradient_draws_after_a_kill(tmp_path, slow_clock, monkeypatch):
    within = walked()
    put, left = Sink.put, 5

    def killing(self, *args):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        put(self, *args)

    monkeypatch.setattr(Sink, "put", killing)
    with pytest.raises(Killed):
        walked(checkpoint=tmp_path, on_disk=True)
    monkeypatch.setattr(Sink, "put", put)
    outside = walked(checkpoint=tmp_path, on_disk=True)
    assert torch.equal(outside.latents["w"], within.latents["w"])
    for name, value in within.stats.items():
        assert torch.equal(outside.stats[name], value)


def test_memory_is_bounded(tmp_path):
    """The draws take 16 MB: neither the run nor a prediction ever holds a quarter of that.

    Python's count of allocations has numpy's arrays, the buffers of a block of draws among them.
    """
    x = torch.ones(3, dtype=torch.float64)
    whole = 2 * DRAWS * P * 8
    held = {}
    for on_disk in (False, True):
        folder = {"checkpoint": tmp_path / "draws", "on_disk": True} if on_disk else {}
        tracemalloc.start()
        samples = mcmc.sample(
            wide, x, x, kernel="mclmc", num_warmup=2, num_samples=DRAWS, thinning=1,
            num_chains=2, chain_method="sequential", progress=False, step_size=0.1, **folder,
        )  # fmt: skip
        held[on_disk] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert held[True] < whole / 4 < whole < held[False]
    assert samples.latents["w"].shape == (2, DRAWS, P)
    keep_freed_blocks()  # once in a process, a block that holds nothing
    with Largest() as largest:
        f = bdl.Predictive(wide, samples, memory=2**20)(x)["f"]
    assert 0 < largest.bytes < whole / 4
    expected = np.asarray(samples.latents["w"]).mean(-1).reshape(-1)
    assert np.allclose(f[:, 0], expected)


def test_a_folder_is_needed():
    with pytest.raises(ValueError, match="on_disk needs checkpoint"):
        drawn("mclmc", on_disk=True)
    with pytest.raises(ValueError, match="on_disk needs checkpoint"):
        walked(on_disk=True)
