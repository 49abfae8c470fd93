"""Every method on programs with discrete sites gives what it gives on the sums written by hand."""

import math

import arviz
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.optim import Adam

import pyro_bdl as bdl
from pyro_bdl import Program
from pyro_bdl.elbo import CompiledELBO, TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError

Y = torch.tensor([-2.1, -1.7, -2.6, 1.8, 2.4, 0.4], dtype=torch.float64)
WEIGHTS = torch.tensor([0.3, 0.7], dtype=torch.float64)


def _means():
    center = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    return pyro.sample("means", dist.Normal(center, 1.0).to_event(1))


def mixture(y=None):
    """A component for each datum."""
    means = _means()
    with pyro.plate("data", len(Y) if y is None else len(y)):
        z = pyro.sample("z", dist.Categorical(WEIGHTS))
        pyro.sample("y", dist.Normal(means[z], 0.7), obs=y)


def by_hand(y=None):
    """The same with its sum written out."""
    means = _means()
    with pyro.plate("data", len(Y) if y is None else len(y)):
        components = dist.Normal(means, 0.7)
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(WEIGHTS), components), obs=y)


def switch(y=None):
    """One component for all data."""
    means = _means()
    z = pyro.sample("z", dist.Categorical(WEIGHTS))
    with pyro.plate("data", len(Y) if y is None else len(y)):
        pyro.sample("y", dist.Normal(means[z], 0.7), obs=y)


def switch_by_hand(y):
    terms = dist.Normal(_means()[:, None], 0.7).log_prob(y).sum(-1)
    pyro.factor("y", (WEIGHTS.log() + terms).logsumexp(0))


def chain(y=None):
    """A hidden Markov chain of as many steps as there are data."""
    means = _means()
    moves = pyro.sample("moves", dist.Dirichlet(1.0 + 3.0 * torch.eye(2).double()).to_event(1))
    z = 0
    for t in pyro.markov(range(len(Y))):
        z = pyro.sample(f"z{t}", dist.Categorical(moves[z]))
        pyro.sample(f"y{t}", dist.Normal(means[z], 0.7), obs=None if y is None else y[t])


def chain_by_hand(y):
    means = _means()
    moves = pyro.sample("moves", dist.Dirichlet(1.0 + 3.0 * torch.eye(2).double()).to_event(1))
    emitted = dist.Normal(means, 0.7).log_prob(y[:, None])
    forward = moves[0].log() + emitted[0]
    for t in range(1, len(y)):
        forward = (forward[:, None] + moves.log()).logsumexp(0) + emitted[t]
    pyro.factor("y", forward.logsumexp(0))


PAIRS = [(mixture, by_hand), (switch, switch_by_hand), (chain, chain_by_hand)]
both = pytest.mark.parametrize("model, hand", PAIRS, ids=lambda m: m.__name__)


def _steps(model, guide, elbo, count=2):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    svi = SVI(model, guide, Adam({"lr": 0.05}), elbo)
    return torch.tensor([svi.step(Y) for _ in range(count)])


ELBOS = {
    "trace": lambda: TemperedTrace_ELBO(0.5, num_particles=3),
    "mean-field": TemperedTraceMeanField_ELBO,
    "cold": lambda: TemperedTrace_ELBO(cold_temperature=0.5),
}


@both
@pytest.mark.parametrize("name", ELBOS)
def test_bounds_are_those_of_the_sum_by_hand(model, hand, name):
    guide = bdl.guides.AutoMeanField
    found = _steps(model, guide(model), ELBOS[name]())
    torch.testing.assert_close(found, _steps(hand, guide(hand), ELBOS[name]()))


def test_a_compiled_bound_is_the_plain_one():
    guide = bdl.guides.AutoMeanField
    found = _steps(mixture, guide(mixture), CompiledELBO(), count=4)
    torch.testing.assert_close(found, _steps(by_hand, guide(by_hand), CompiledELBO(), count=4))


@pytest.mark.parametrize(
    "make",
    [
        bdl.guides.AutoMeanField,
        bdl.guides.AutoLowRank,
        bdl.guides.AutoMatrixNormal,
        bdl.guides.AutoLaplaceGGN,
        lambda model: bdl.guides.AutoEnsemble(model, size=2),
    ],
)
def test_guides_take_steps_under_pyros_own_enumeration(make):
    guide = make(chain)
    assert math.isfinite(
        _steps(config_enumerate(chain), guide, TraceEnum_ELBO(max_plate_nesting=1))[-1]
    )
    assert list(guide.median(Y)) == ["means", "moves"]


def test_no_targets_are_named_in_a_step():
    guide, elbo = bdl.guides.AutoMeanField(mixture).prototype(Y), TemperedTrace_ELBO()
    for _ in range(2):  # before and after the check of a first step
        with pytest.raises(ValueError, match=r"pass (the|its) targets"):
            elbo.loss(mixture, guide)
        elbo.loss(mixture, guide, Y)


def _at_maximum(model, **options):
    pyro.clear_param_store()
    guide = bdl.guides.AutoLaplaceGGN(model, **options)
    pyro.set_rng_seed(0)
    svi = SVI(model, guide, Adam({"lr": 0.1, "betas": (0.9, 0.9)}), TemperedTrace_ELBO())
    for _ in range(60):
        svi.step(Y)
    return guide


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_laplace_of_a_switch_is_by_the_hessian_and_says_so_once():
    guide = _at_maximum(switch, structure="kron")
    with pytest.warns(BdlWarning, match="data of site 'y' depend on each other") as told:
        posterior = guide.laplace_approximation((Y,))
    assert sum("depend" in str(warning.message) for warning in told) == 1
    program = Program(switch, Y)
    hessian = torch.func.hessian(program.log_density)(posterior.location().detach())
    torch.testing.assert_close(posterior.variances(), torch.linalg.inv(-hessian).diagonal())


# Prediction and comparison


def _fixed(model, count=1500):
    latents = {"means": torch.tensor([-1.0, 1.0], dtype=torch.float64)}
    if model is chain:
        latents["moves"] = torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=torch.float64)
    draws = {name: value.expand(1, count, *value.shape) for name, value in latents.items()}
    return latents, bdl.Samples(draws)


@pytest.mark.parametrize("model", [mixture, switch, chain])
def test_discrete_sites_are_drawn_from_their_posterior(model):
    torch.manual_seed(0)
    latents, samples = _fixed(model)
    draws = bdl.Predictive(model, samples)(Y)
    for name, p in Program(model, Y).responsibilities(latents).items():
        frequency = draws[name].double().mean(0)
        error = (p[..., 1] * p[..., 0] / 1500).sqrt()
        assert ((frequency - p[..., 1]).abs() <= 4 * error + 1e-12).all()


def test_without_data_discrete_sites_are_drawn_from_their_prior_and_data_given_them():
    torch.manual_seed(0)
    draws = bdl.Predictive(mixture, _fixed(mixture)[1])(None)
    assert set(draws) == {"y", "z"} and draws["y"].shape == (1500, 6)
    assert (draws["z"].double().mean(0) - 0.7).abs().max() < 4 * math.sqrt(0.21 / 1500)
    residual = draws["y"] - (2.0 * draws["z"] - 1.0)
    assert abs(residual.std() - 0.7) < 4 * 0.7 / math.sqrt(2 * residual.numel())


def test_pointwise_densities_and_moments_are_those_of_the_sum_by_hand():
    torch.manual_seed(0)
    samples = bdl.Samples({"means": torch.randn(2, 30, 2, dtype=torch.float64)})
    found, expected = (bdl.Predictive(model, samples) for model in (mixture, by_hand))
    torch.testing.assert_close(found.log_likelihood(Y), expected.log_likelihood(Y))
    torch.testing.assert_close(found.moments(Y)["y"], expected.moments(Y)["y"])
    torch.testing.assert_close(found.mean(None)["y"], expected.mean(None)["y"])


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_parameters_of_the_linearized_mixture_are_those_of_the_sum_by_hand():
    found = []
    for model in (mixture, by_hand):
        guide = bdl.guides.AutoLaplaceGGN(model).prototype(Y).laplace_approximation((Y,))
        guide.loc.copy_(torch.tensor([-1.0, 1.5]))
        means = bdl.LinearizedPredictive(model, guide).parameter_moments(Y)["y"].mean
        found.append([value for _, value in sorted(means.items())])
    torch.testing.assert_close(*found)


def test_export_and_leave_one_out():
    torch.manual_seed(0)
    samples = bdl.Samples({"means": torch.randn(2, 50, 2, dtype=torch.float64)})
    found, expected = (bdl.to_arviz(model, samples, Y) for model in (mixture, by_hand))
    log_likelihood = found.log_likelihood["y"].values
    assert log_likelihood.shape == (2, 50, 6)
    assert (abs(log_likelihood - expected.log_likelihood["y"].values) < 1e-10).all()
    assert isinstance(found, arviz.InferenceData) and "z" in found.posterior_predictive


def test_terms_that_are_no_data_of_their_own_are_named():
    draws = _fixed(chain, count=30)[1]
    with pytest.warns(BdlWarning, match="'y1' depend on other data"):
        bdl.to_arviz(chain, draws, Y)
    draws = bdl.Samples({"means": torch.randn(2, 40, 2, dtype=torch.float64)})
    with pytest.warns(BdlWarning, match="'y' depend on other data"):
        bdl.to_arviz(switch, draws, Y)


def test_a_minibatch_of_a_sum_outside_of_its_plate_is_named():
    def part(y):
        means = _means()
        z = pyro.sample("z", dist.Categorical(WEIGHTS))
        with pyro.plate("data", 6, subsample=torch.arange(len(y))):
            pyro.sample("y", dist.Normal(means[z], 0.7), obs=y)

    guide = bdl.guides.AutoMeanField(part)
    svi = SVI(part, guide, Adam({"lr": 0.05}), TemperedTrace_ELBO())
    with pytest.warns(BdlWarning, match="'z' stands outside of a subsampled plate of 'y'"):
        svi.step(Y[:2])
    options = dict(num_warmup=1, num_samples=1, seed=0, progress=False)
    with pytest.raises(UnsupportedProgramError, match="'z' stands outside of a subsampled plate"):
        bdl.mcmc.sgmcmc(part, (Y,), batch_size=2, kernel=bdl.mcmc.SGLD(step_size=1e-3), **options)
