"""Where chains start: at given latents, at draws, and never by a value that the program refuses."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_bdl as bdl

Z = torch.tensor([-0.5, 0.0, 0.4])


def of_logarithms(y=None):
    """A prior that allows w < 0, where log(w) is NaN: seven of eight draws of it are no start."""
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with pyro.plate("data", 3):
        return pyro.sample("y", dist.Normal(w.log(), 0.3), obs=y)


VALID = {"w": Z.exp()}


@pytest.mark.parametrize("init", [VALID, bdl.Samples({"w": VALID["w"][None, None]}), "prior"])
@pytest.mark.parametrize("seed", range(6))
def test_the_first_run_needs_no_draw_of_the_prior(init, seed):
    with warnings.catch_warnings(action="ignore"):
        samples = bdl.mcmc.sgmcmc(
            of_logarithms, (Z,), kernel=bdl.mcmc.SGLD(step_size=1e-4), num_warmup=0,
            num_samples=2, seed=seed, init=init,
        )  # fmt: skip
    assert (samples.latents["w"] > 0).all()


@pytest.mark.parametrize("backend", ["numpyro", "pyro"])
def test_chains_start_where_they_are_told_to(backend):
    with warnings.catch_warnings(action="ignore"):
        samples = bdl.mcmc.sample(
            of_logarithms, Z, init=VALID, num_warmup=2, num_samples=2, backend=backend, seed=1
        )
    assert (samples.latents["w"] > 0).all()


def test_no_start_is_said_in_one_sentence():
    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal((-w.square()).log(), 1.0), obs=y)

    with pytest.raises(ValueError, match=r"prior does not allow parameters .* refuse"):
        bdl.mcmc.sample(model, torch.tensor(0.3), num_warmup=1, num_samples=1)


@pytest.mark.parametrize(("chains", "init", "runs"), [(1, "prior", 3), (3, "prior", 7)])
def test_the_network_runs_a_few_times_before_the_chains_start(chains, init, runs):
    """Its first run, the check of its contract, which is the start of the first chain too, and the
    trace; a draw and its density for each further chain. A file's few rows are run once."""
    rows = []

    class Network(torch.nn.Linear):
        def forward(self, x):
            rows.append(len(x))
            return super().forward(x)

    model = bdl.models.Regression(bdl.bayesianize(Network(1, 1)), noise=0.5)
    x = torch.linspace(-1, 1, 20)[:, None]
    options = {"num_warmup": 2, "num_samples": 2, "num_chains": chains, "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bdl.errors.BdlWarning)
        bdl.mcmc.sample(model, x, x[:, 0], init=init, **options)
    assert rows.count(20) <= runs
    assert rows.count(2) == len(rows) - rows.count(20) <= 1
