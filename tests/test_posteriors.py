"""The registry, and that each posterior in it fits a small problem and can be repeated."""

import functools
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroParam

import pyro_bdl as bdl
from pyro_bdl import Samples, bayesianize, evidence, load_posterior, models, posteriors, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import LaplaceGuide
from pyro_bdl.posteriors import Options, Problem, Result

pytestmark = pytest.mark.usefixtures("no_collection")
OPTIONS = Options(
    steps=30, chains=2, warmup=20, draws=8, max_tree_depth=4, rounds=2, snapshots=4, settling=60
)


def line():
    x = torch.linspace(-1, 1, 12)[:, None]
    model = models.Regression(bayesianize(torch.nn.Linear(1, 1), priors.Normal(1.0)), num_data=12)
    return Problem(model, x, x[:, 0] + 0.1 * torch.randn(12))


@pytest.fixture
def problem():
    return line()


@functools.cache
def fitted(name):
    """A problem and a posterior of it, one for all tests."""
    pyro.set_rng_seed(0)
    problem = line()
    torch.manual_seed(1)
    return problem, posteriors.fit(name, problem, OPTIONS)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(posteriors.registry, "_registry", dict(posteriors.registry._registry))


@pytest.mark.parametrize("entry", posteriors.entries(), ids=lambda entry: entry.name)
def test_each_fits(entry):
    _, first = fitted(entry.name)
    costs = first.costs
    assert first.name == entry.name and costs.seconds > 0 and not first.interrupted
    assert costs.peak_memory is None or costs.peak_memory >= 0
    assert entry.title and entry.description
    if isinstance(first.posterior, Samples):
        assert costs.elbo is None
    else:
        assert first.settings["steps"] == 30
        assert (costs.elbo is not None) == first.posterior.has_density
        assert (costs.log_evidence is not None) == isinstance(first.posterior, LaplaceGuide)


@pytest.mark.parametrize("name", ["ivon", "ensemble", "laplace", "last-layer", "nuts"])
def test_it_can_be_repeated(name):
    problem, first = fitted(name)
    torch.manual_seed(2)
    again = posteriors.fit(name, problem, OPTIONS)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(state, torch.get_rng_state())  # the process draws on as if it were not there
    if isinstance(first.posterior, Samples):
        pairs = zip(first.posterior.latents.values(), again.posterior.latents.values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    else:
        assert torch.equal(first.posterior.location(), again.posterior.location())
        assert first.costs.elbo == again.costs.elbo
        assert first.costs.log_evidence == again.costs.log_evidence


@pytest.mark.parametrize("name", ["swag", "laplace-evidence", "last-layer", "nuts"])
def test_it_is_the_same_from_its_file(name, tmp_path):
    """The program of its own, such as one with a learned prior, is made again from the problem."""
    problem, found = fitted(name)
    path = found.posterior.save(tmp_path / "posterior.safetensors")
    read = load_posterior(path, posteriors.get(name).program(line()))
    assert type(read) is type(found.posterior)
    draws = []
    for posterior in (found.posterior, read):
        torch.manual_seed(3)
        draws.append(bdl.Predictive(problem.model, posterior, 4)(problem.x)["f"])
    assert torch.equal(*draws)


def test_tempering_narrows_the_posterior(problem):
    options = Options(steps=150)
    plain = posteriors.fit("mean-field", problem, options)
    tempered = posteriors.fit("mean-field-tempered", problem, options)
    assert tempered.settings["temperature"] == 0.1
    assert (tempered.posterior.scale < plain.posterior.scale).all()
    assert tempered.costs.elbo < plain.costs.elbo


@pytest.mark.parametrize("name", ["mc-dropout", "concrete-dropout"])
def test_dropout_says_its_rates(name):
    x = torch.linspace(-1, 1, 12)[:, None]
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    problem = Problem(models.Regression(bayesianize(net), num_data=12), x, x[:, 0].clone())
    found = posteriors.fit(name, problem, OPTIONS)
    (rate,) = found.posterior.rates().values()
    assert found.settings["p of 2.weight"] == f"{rate.item():.3g}"
    rates = ("0.005", "0.01", "0.05", "0.1")  # one of them predicts held-out rows best
    assert (found.settings["p of 2.weight"] in rates) == (name == "mc-dropout")


def test_the_friction_is_critical_for_the_priors_directions():
    settings = fitted("sghmc")[1].settings
    step = float(settings["step_size"])
    assert float(settings["friction"]) == pytest.approx(min(0.02, step**0.5), rel=0.01)


def test_one_function_adds_a_posterior(registry, problem):
    @posteriors.register("mine", "mine", "what a user adds")
    def _mine(problem):
        words = f"{problem.options.seed} {problem.label} {len(problem.x)}"
        return Result(words, {"a": 1}, interrupted=True)

    found = posteriors.fit("mine", problem, Options(seed=7))
    assert (found.posterior, found.settings, found.interrupted) == ("7 None 12", {"a": 1}, True)
    assert posteriors.entries()[-1].name == "mine" and not posteriors.get("mine").default
    with pytest.raises(ValueError, match="'mine' is registered already"):
        posteriors.register("mine", "", "")
    with pytest.raises(ValueError, match=r"'nutz' \(there are map, .*did you mean 'nuts'"):
        posteriors.fit("nutz", problem)


def test_swag_tells_the_rate_that_it_found(problem):
    found = posteriors.fit("swag", problem, Options(steps=600, snapshots=4))
    assert 0 < found.settings["learning rate"] <= 1.0
    assert found.settings["snapshots"] == 4


# Laplace

LAPLACE = ["laplace", "laplace-kron", "laplace-full", "laplace-diag", "laplace-last-layer"]


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        yield


@pytest.mark.parametrize("name", [*LAPLACE, "laplace-evidence"])
def test_laplace_says_what_it_was_made_with(name, quiet):
    made = fitted(name)[1]
    structure = {"laplace-kron": "kron", "laplace-diag": "diag"}.get(name, "full")
    assert made.settings["structure"] == structure == made.posterior.config.structure.name
    with torch.no_grad():
        expected = evidence.log_marginal_likelihood(made.posterior).item()
    assert made.costs.log_evidence == expected
    values = [f"{value:.3g}" for value in made.posterior.hyperparameters().values()]
    assert values == ([made.settings["prior scale"]] if name == "laplace-evidence" else [])
    assert values != ["1"]
    if name == "laplace-last-layer":
        assert made.settings["subset"] == "last-layer"
        assert set(made.posterior.subset.sites) == {"weight", "bias"}


def test_evidence_of_the_full_posterior_is_exact():
    """A line with a known noise: the maximum over the prior's scale of the exact evidence."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
    y = 2 * x[:, 0] + 0.3 * torch.randn(12, dtype=torch.float64)
    bnn = bayesianize(torch.nn.Linear(1, 1).double(), priors.Normal(0.8))
    problem = Problem(models.Regression(bnn, noise=0.3, num_data=12), x, y)
    found = posteriors.fit("laplace-evidence", problem, Options(steps=600, rounds=3))
    design = torch.cat([x, torch.ones_like(x)], 1)

    def exact(scale):
        total = scale**2 * design @ design.T + 0.09 * torch.eye(12)
        return dist.MultivariateNormal(torch.zeros(12).double(), total).log_prob(y).item()

    best = max(exact(scale) for scale in torch.linspace(0.5, 3.0, 200))
    assert found.costs.log_evidence == pytest.approx(best, abs=0.02)
    assert found.costs.elbo < exact(0.8) + 0.05 < best  # of the problem's own prior
    assert problem.model.network.prior.scale == 0.8


@pytest.mark.parametrize(
    ("prior", "tuned"),
    [
        (priors.FanIn(1.0), ["prior gain"]),
        (priors.PerLayer(priors.Normal(1.0)), ["prior scale"]),
        pytest.param(priors.StudentT(4.0, 1.0), ["prior scale"], marks=pytest.mark.slow),
        (priors.Normal(PyroParam(torch.tensor(1.0), constraint=dist.constraints.positive)),
         ["prior scale"]),
        (priors.Normal(dist.HalfNormal(1.0)), []),
    ],
    ids=["fan-in", "per layer", "heavy tails", "already learned", "hyperprior"],
)  # fmt: skip
def test_laplace_of_every_prior(prior, tuned, quiet):
    x = torch.linspace(-1, 1, 12)[:, None]
    model = models.Regression(bayesianize(torch.nn.Linear(1, 1), prior), num_data=12)
    found = posteriors.fit("laplace-evidence", Problem(model, x, x[:, 0].clone()), OPTIONS)
    assert [key for key in found.settings if key not in ("steps", "structure")] == tuned


def test_laplace_of_classes_and_of_a_program_of_ones_own(quiet):
    x = torch.randn(12, 2)
    model = models.Classification(bayesianize(torch.nn.Linear(2, 3)), num_data=12)
    found = posteriors.fit("laplace-evidence", Problem(model, x, torch.arange(12) % 3), OPTIONS)
    assert found.settings["prior scale"]

    class Own(torch.nn.Module):
        def forward(self, x, y=None):
            w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)

    found = posteriors.fit("laplace-full", Problem(Own(), x, x.sum(-1)), OPTIONS)
    assert found.settings == {"steps": 30, "structure": "full"}


def test_errors_of_a_users_prior_are_shown():
    class Wrong(priors.Normal):
        def __copy__(self):
            raise TypeError("of the user")

    model = models.Regression(bayesianize(torch.nn.Linear(2, 1), Wrong(0.7)), noise=0.1)
    problem = Problem(model, torch.zeros(2, 2), torch.zeros(2))
    with pytest.raises(TypeError, match="of the user"):
        posteriors.get("laplace-evidence").program(problem)
