"""Posteriors made by Pyro and NumPyro are accepted wherever a posterior is."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import MCMC, NUTS
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.infer.mcmc.api import StreamingMCMC

import pyro_bdl as bdl
from pyro_bdl import importance
from pyro_bdl.guides.draws import as_posterior

X = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
Y = torch.tensor([0.1, -0.3, 0.2, 0.5, 0.4, 0.9], dtype=torch.float64)


pytestmark = pytest.mark.usefixtures("double")


def model(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    s = pyro.sample("s", dist.LogNormal(0.0, 0.5))
    f = pyro.deterministic("f", w[0] + w[1] * x)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, s), obs=y)


def in_numpyro(x, y=None):
    w = numpyro.sample("w", numpyro.distributions.Normal(jnp.zeros(2), 1.0).to_event(1))
    s = numpyro.sample("s", numpyro.distributions.LogNormal(0.0, 0.5))
    f = numpyro.deterministic("f", w[0] + w[1] * x)
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", numpyro.distributions.Normal(f, s), obs=y)


@pytest.fixture(scope="module")
def of_pyro():
    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    kernel = NUTS(model, max_tree_depth=2)
    mcmc = MCMC(kernel, num_samples=6, warmup_steps=4, disable_progbar=True)
    mcmc.run(X, Y)
    return mcmc


@pytest.fixture(scope="module")
def of_numpyro():
    mcmc = numpyro.infer.MCMC(
        numpyro.infer.BarkerMH(in_numpyro),  # which compiles in a fraction of the time of NUTS
        num_warmup=0, num_samples=5, num_chains=2, chain_method="sequential", progress_bar=False,
    )  # fmt: skip
    fields = ("accept_prob", "potential_energy")
    mcmc.run(jax.random.PRNGKey(0), X.numpy(), Y.numpy(), extra_fields=fields)
    return mcmc


def test_samples_of_pyro(of_pyro):
    samples = bdl.Samples.from_pyro(of_pyro)
    assert samples.num_chains == 1 and samples.num_draws == 6 and samples.latents["w"].shape[2] == 2
    assert torch.equal(samples.flat()["s"], of_pyro.get_samples()["s"])
    of_pyro._diagnostics[0]["divergences"], kept = [1, 4], of_pyro._diagnostics[0]["divergences"]
    marked = bdl.Samples.from_pyro(of_pyro).stats["diverging"]
    of_pyro._diagnostics[0]["divergences"] = kept
    assert marked.nonzero()[:, 1].tolist() == [1, 4]
    assert samples.info == {"kernel": "nuts", "backend": "pyro", "num_warmup": 4}


def test_samples_of_numpyro(of_numpyro):
    samples = bdl.Samples.from_numpyro(of_numpyro)
    assert samples.latents.keys() == {"w", "s"} and samples.latents["w"].shape == (2, 5, 2)
    np.testing.assert_array_equal(samples.flat()["w"], of_numpyro.get_samples()["w"])
    assert samples.stats.keys() == {"accept_prob", "potential_energy"}
    assert samples.stats["accept_prob"].shape == (2, 5)


def test_what_has_no_draws_is_refused():
    with pytest.raises(ValueError, match=r"call mcmc.run"):
        bdl.Samples.from_pyro(MCMC(NUTS(model), num_samples=2))
    with pytest.raises(TypeError, match="StreamingMCMC"):
        as_posterior(StreamingMCMC(NUTS(model), num_samples=2))
    unrun = numpyro.infer.MCMC(numpyro.infer.NUTS(in_numpyro), num_warmup=1, num_samples=1)
    with pytest.raises(ValueError, match=r"call mcmc.run"):
        as_posterior(unrun)
    for made, given in ((bdl.Samples.from_pyro, unrun), (bdl.Samples.from_numpyro, 3)):
        with pytest.raises(TypeError, match=r"needs a \w+.infer.MCMC"):
            made(given)


def test_dicts_flat_and_by_chain(of_pyro, of_numpyro):
    for mcmc, chains in ((of_pyro, 1), (of_numpyro, 2)):
        flat = as_posterior(mcmc.get_samples(), model, (X,))
        by_chain = as_posterior(mcmc.get_samples(group_by_chain=True), model, (X,))
        assert flat.num_chains == 1 and by_chain.num_chains == chains
        assert flat.latents.keys() == {"w", "s"}  # NumPyro's dict holds the deterministic f too
        for name, value in flat.flat().items():
            assert torch.equal(value, by_chain.flat()[name])
    padded = {"w": torch.zeros(4, 1, 2), "s": torch.ones(4, 1)}  # as pyro.infer.Predictive pads
    assert as_posterior(padded, model, (X,)).latents["w"].shape == (1, 4, 2)
    with pytest.raises(ValueError, match="'w' have shape"):
        as_posterior({"w": torch.zeros(4)}, model, (X,))
    with pytest.raises(ValueError, match="by chain and of others not"):
        as_posterior({"w": torch.zeros(3, 4, 2), "s": torch.ones(12)}, model, (X,))


def guides():
    def listed(program):
        guide = AutoGuideList(program)
        guide.append(AutoNormal(pyro.poutine.block(program, expose=["w"])))
        guide.append(AutoNormal(pyro.poutine.block(program, expose=["s"])))
        return guide

    return {
        "AutoNormal": AutoNormal,
        "AutoDiagonalNormal": AutoDiagonalNormal,
        "AutoMultivariateNormal": AutoMultivariateNormal,
        "AutoLowRank": AutoLowRankMultivariateNormal,
        "AutoGuideList": listed,
        "AutoDelta": AutoDelta,
        "AutoLaplace": AutoLaplaceApproximation,
        "by hand": lambda program: by_hand,
    }


def by_hand(x, y=None):
    pyro.sample("w", dist.Normal(torch.zeros(2), 0.5).to_event(1))
    pyro.sample("s", dist.LogNormal(-0.5, 0.3))


def test_a_comparison_of_all_kinds(of_pyro, of_numpyro):
    posteriors = {name: make(model) for name, make in guides().items()}
    for guide in posteriors.values():
        guide(X, Y)
    posteriors |= {"pyro": of_pyro, "numpyro": of_numpyro, "dict": of_numpyro.get_samples()}
    found = bdl.compare(model, posteriors, X, Y, reference="numpyro", num_samples=20)
    assert set(found.evaluations) == set(posteriors)
    assert found.evaluations["numpyro"].chains == 2
    torch.testing.assert_close(
        found.evaluations["dict"].function, found.evaluations["numpyro"].function
    )
    with pytest.raises(TypeError, match="posterior 'three'"):
        bdl.compare(model, {"three": 3}, X, Y, reference=None)


def test_predictive_diagnostics_and_starts(of_pyro, of_numpyro):
    for mcmc, rows in ((of_pyro, 6), (of_numpyro, 10)):
        drawn = bdl.Predictive(model, mcmc)(X)
        assert drawn["f"].shape == drawn["y"].shape == (rows, len(X))
        draws = bdl.diagnostics.function_draws(model, mcmc, X)["y"]
        torch.testing.assert_close(draws.flatten(0, 1), drawn["f"])
        assert set(bdl.diagnostics.summary(mcmc).table.index) == {"w", "s", "all"}
    w = torch.as_tensor(np.array(of_numpyro.get_samples()["f"]))
    torch.testing.assert_close(bdl.Predictive(model, of_numpyro)(X)["f"], w.double())
    bdl.mcmc.sample(
        model, X, Y, init=of_pyro, num_warmup=1, num_samples=1, backend="pyro", progress=False
    )


def test_importance_ratios_of_an_exact_guide_are_the_evidence():
    def one(y):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(a, 1.0), obs=y)

    def posterior(y):
        pyro.sample("a", dist.Normal(y / 2, 0.5**0.5))

    y = torch.tensor(0.7)
    found = importance.ratios(one, posterior, y, num_samples=25)
    evidence = dist.Normal(0.0, 2**0.5).log_prob(y)
    torch.testing.assert_close(found.log_ratios, evidence.expand(25))


def test_importance_ratios_are_refused_by_name():
    with pytest.raises(ValueError, match="one value"):
        importance.ratios(model, AutoDelta(model), X, Y, num_samples=25)
