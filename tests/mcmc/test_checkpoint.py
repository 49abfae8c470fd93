"""Chains that are killed, resumed and extended make the same draws as an uninterrupted run."""

import numpy as np
import pytest
import torch
from helpers.killed_runs import TARGETS, X, drawn, walked
from torch.utils.data import DataLoader, TensorDataset

from pyro_bdl import mcmc
from pyro_bdl.mcmc import checkpoint
from pyro_bdl.program.samples import Samples


class Killed(Exception):
    pass


@pytest.fixture
def kill(monkeypatch):
    """Kill a run after so many writes; returns the kinds of all writes so far."""
    save, kinds = checkpoint.save_tree, []

    def after(count):
        left = len(kinds) + count

        def counted(path, tree, *, kind):
            if len(kinds) >= left:
                raise Killed
            kinds.append(kind)
            save(path, tree, kind=kind)

        monkeypatch.setattr(checkpoint, "save_tree", counted)
        return kinds

    return after


def assert_same(one, other):
    for values, others in ((one.latents, other.latents), (one.stats, other.stats)):
        assert values.keys() == others.keys()
        for name, value in values.items():
            assert torch.equal(value, others[name]), name


@pytest.mark.parametrize(
    "kernel, method",
    [
        ("mclmc", "vectorized"),
        pytest.param("nuts", "parallel", marks=pytest.mark.slow),
        pytest.param("mams", "parallel", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_with_the_same_draws(kernel, method, tmp_path, slow_clock, kill):
    options = {"chain_method": method, "checkpoint": tmp_path / "run"}
    kinds = kill(10_000)
    whole = drawn(kernel, chain_method=method, checkpoint=tmp_path / "whole")
    if method != "parallel":  # where the chains' writes alternate in any order
        draws, state = checkpoint.BLOCK, checkpoint.KIND
        assert kinds[-5:] == [draws, state, draws, state, state]  # the end writes the state again
    kill(len(kinds) - 7)  # between draws and the state that names them
    with pytest.raises(Killed):
        drawn(kernel, **options)
    kill(10_000)
    assert_same(drawn(kernel, **options), whole)
    if kernel == "mclmc":  # a larger number goes on
        longer = drawn(kernel, 15, **options)
        assert torch.equal(longer.latents["w"][:, :12], whole.latents["w"])
        assert longer.num_draws == 15
        with pytest.raises(ValueError, match="seed=1, and this one has seed=2"):
            drawn(kernel, **options, seed=2)


def test_a_folder_of_another_run_is_refused(tmp_path):
    def journal(seed=0, **numbers):
        identity = {"starts": np.ones(2), "log densities": np.ones(1), "seed": seed} | numbers
        return checkpoint.Journal(tmp_path, identity)

    first = journal()
    assert first.restore() is None
    first.write(0, 4, {"x": np.arange(3)}, {"draws": np.zeros(4)})
    first.write(0, 6, {"x": np.arange(3) + 1}, {"draws": np.ones(2)})
    found = journal(starts=np.ones(2) * (1 + 1e-6)).restore()  # but for rounding
    assert found.stage == 0 and found.done == 6 and found.state["x"].tolist() == [1, 2, 3]
    assert np.concatenate([block["draws"] for block in found.blocks]).tolist() == [0] * 4 + [1] * 2
    with pytest.raises(ValueError, match="a run with seed=0, and this one has seed=1"):
        journal(seed=1).restore()
    with pytest.raises(ValueError, match="log densities differ"):
        journal(**{"log densities": np.ones(1) * 1.1}).restore()


@pytest.mark.parametrize("kernel", [pytest.param("nuts", marks=pytest.mark.slow), "mclmc"])
def test_extended_chains_are_those_of_a_longer_run(kernel, tmp_path):
    whole = drawn(kernel, 12)
    short = drawn(kernel, 5)
    short.extend(2)  # which leaves the chains where they were
    grown = short.extend(3).extend(4)
    assert torch.equal(grown.latents["w"], whole.latents["w"])
    assert torch.equal(grown.stats["potential_energy"], whole.stats["potential_energy"])
    with pytest.raises(ValueError, match="a folder as checkpoint"):
        Samples.load(short.save(tmp_path / "short.safetensors")).extend(7)


SMALL = {"step_size": 1e-3, "thinning": 2}
STOCHASTIC = {
    "sghmc": {},
    "loader": {"data": DataLoader(TensorDataset(X, TARGETS), batch_size=6, shuffle=True)},
    "psgld": {"kernel": mcmc.PSGLD(step_size=mcmc.Polynomial(1e-3), thinning=2)},
    "sgnht": {"kernel": mcmc.SGNHT(**SMALL)},
    "adaptive": {
        "kernel": mcmc.SGHMC(step_size=10.0, thinning=2, adapt_step_size=True), "num_warmup": 150,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, marks=() if m in ("sghmc", "loader") else pytest.mark.slow)
        for m in STOCHASTIC
    ],
)
def test_a_killed_stochastic_gradient_run_ends_with_the_same_draws(
    method, tmp_path, slow_clock, kill
):
    options = STOCHASTIC[method]
    whole = walked(**options)
    for count in (101, 60) if method == "adaptive" else (31,):  # 101 is in the warm-up
        kill(count)
        with pytest.raises(Killed):
            walked(**options, checkpoint=tmp_path / "run")
    kill(10_000)
    resumed = walked(**options, checkpoint=tmp_path / "run")
    assert_same(resumed, whole)
    assert resumed.info["step_size_factor"] == whole.info["step_size_factor"]
    if method == "sghmc":  # a larger number goes on, a smaller one cuts
        longer = walked(15, checkpoint=tmp_path / "run")
        assert torch.equal(longer.latents["w"], walked(15).latents["w"])
        shorter = walked(5, checkpoint=tmp_path / "run")
        assert torch.equal(shorter.latents["w"], whole.latents["w"][:, :5])
        with pytest.raises(ValueError, match=r"this one has friction=0\.5"):
            walked(checkpoint=tmp_path / "run", kernel=mcmc.SGHMC(**SMALL, friction=0.5))
        with pytest.raises(ValueError, match="step sizes differ"):
            walked(checkpoint=tmp_path / "run", kernel=mcmc.SGHMC(step_size=2e-3, thinning=2))
