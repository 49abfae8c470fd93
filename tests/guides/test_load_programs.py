"""Files of every kind of posterior of programs with numbers of their own: the predictions are those
before, and another program is refused."""

import types

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroParam
from torch import nn

import pyro_bdl as bdl

# statistics of the network that they start from
pytestmark = pytest.mark.filterwarnings("ignore:.*#batchnorm")

X = torch.linspace(-1.0, 1.0, 12)[:, None].expand(12, 2) * torch.tensor([1.0, -0.5])
Y = X[:, 0].sin()


def net(activation=nn.Tanh, extra=()):
    return nn.Sequential(nn.Linear(2, 4), *extra, activation(), nn.Linear(4, 1))


def regression(network, prior=None, noise=0.3, **options):
    bnn = bdl.bayesianize(network, prior or bdl.priors.Normal(1.0), **options)
    return bdl.models.Regression(bnn, noise=noise, num_data=12)


class Own(PyroModule):
    """A program of a user's with a parameter, a constrained one and a buffer of its own."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))
        self.noise = PyroParam(torch.tensor(0.3), dist.constraints.positive)
        self.register_buffer("center", torch.zeros(2))
        self.bnn = bdl.bayesianize(nn.Linear(2, 1))

    def forward(self, x, y=None):
        f = self.bnn(x - self.center)[..., 0] + self.shift
        pyro.deterministic("f", f)
        with pyro.plate("data", 12, subsample=x):
            return pyro.sample("y", dist.Normal(f, self.noise), obs=y)


def function():
    """A program that is no module: a network that it holds in an object, and a parameter in Pyro's
    store."""
    held = types.SimpleNamespace(network=bdl.bayesianize(net(), where="2.*"))
    start = torch.tensor(0.3)

    def model(x, y=None):
        f = held.network(x)[..., 0]
        noise = pyro.param("the noise of a function", start, dist.constraints.positive)
        pyro.deterministic("f", f)
        with pyro.plate("data", 12, subsample=x):
            return pyro.sample("y", dist.Normal(f, noise), obs=y)

    return model


def no_bias_prior(name, module, parameter):
    return None if name.endswith("bias") else dist.Normal(torch.zeros(()), 1.0)


def positive(value):
    return PyroParam(torch.tensor(value), dist.constraints.positive)


PROGRAMS = {
    "last layer over a body": lambda: regression(net(), where="2.*"),
    "prior that returns None": lambda: regression(net(), no_bias_prior),
    "LoRA": lambda: regression(bdl.adapters.lora(net(), rank=2), where="*lora*"),
    "BatchNorm": lambda: regression(net(extra=[nn.BatchNorm1d(4)])),
    "learned noise": lambda: regression(net(), noise=positive(0.3)),
    "learned prior": lambda: regression(net(), bdl.priors.Normal(positive(1.0))),
    "PyroModule": Own,
    "function": function,
}


def _modules(model):
    cells = [cell.cell_contents for cell in getattr(model, "__closure__", None) or ()]
    cells = [getattr(cell, "network", cell) for cell in cells]
    return [part for part in [model, *cells] if isinstance(part, nn.Module)]


@torch.no_grad()
def _train(model):
    """Move all of a program's own numbers."""
    for module in _modules(model):
        for value in [*module.parameters(), *module.buffers()]:
            if value.is_floating_point():
                value.add_(torch.rand_like(value))
    if not isinstance(model, nn.Module):
        pyro.get_param_store()["the noise of a function"] = torch.tensor(0.9)


@pytest.fixture(params=PROGRAMS)
def fresh(request):
    """Make the program, each time with other first weights, as another process would."""

    def make():
        pyro.clear_param_store()
        return PROGRAMS[request.param]()

    return make


def trained(model):
    with torch.no_grad():  # a function has its parameter after the first run
        model(X, Y)
    _train(model)
    return model


def _moved(guide):
    guide.prototype(X, Y)
    with torch.no_grad():
        for value in guide.parameters():
            value.add_(0.1 * torch.randn_like(value))
    return guide


def _sgld(model):
    return bdl.mcmc.sgmcmc(
        model,
        (X, Y),
        kernel=bdl.mcmc.SGLD(step_size=1e-3),
        num_warmup=0,
        num_samples=4,
        batch_size=5,
    )


def _draws(model):
    program = bdl.Program(model, X, Y)
    draws = {name: torch.randn(1, 4, *v.shape) for name, v in program.initial.items()}
    return bdl.Samples(draws).of_program(program)


POSTERIORS = {
    "MAP": lambda model: _moved(bdl.guides.AutoMAP(model)),
    "mean-field": lambda model: _moved(bdl.guides.AutoMeanField(model)),
    "ensemble": lambda model: _moved(bdl.guides.AutoEnsemble(model, size=2)),
    "mixture": lambda model: bdl.guides.MixtureGuide(
        [_moved(bdl.guides.AutoMeanField(model)) for _ in range(2)]
    ),
    "sgmcmc": _sgld,
    "draws": _draws,
}


def _check_predictions(model, posterior, expected):
    torch.manual_seed(3)
    found = bdl.Predictive(model, posterior, num_samples=4)(X)
    for site, value in expected.items():
        torch.testing.assert_close(found[site], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", POSTERIORS)
def test_predictions_are_those_before(fresh, kind, tmp_path):
    model = trained(fresh())
    posterior = POSTERIORS[kind](model)
    torch.manual_seed(3)
    expected = bdl.Predictive(model, posterior, num_samples=4)(X)
    path = posterior.save(tmp_path / "posterior")
    again = fresh()
    loaded = bdl.load_posterior(path, again)
    assert type(loaded) is type(posterior)
    _check_predictions(again, loaded, expected)
    path = loaded.save(path)  # a loaded posterior is saved with its program too
    second = fresh()
    _check_predictions(second, bdl.load_posterior(path, second), expected)


KERNELS = {
    "nuts": lambda model, **options: bdl.mcmc.sample(model, X, Y, kernel="nuts", **options),
    "mclmc": lambda model, **options: bdl.mcmc.sample(model, X, Y, kernel="mclmc", **options),
    "pyro": lambda model, **options: bdl.mcmc.sample(model, X, Y, backend="pyro", **options),
    "ensemble": lambda model, **options: bdl.mcmc.ensemble_sample(
        model, X, Y, members=2, training_steps=2, **options
    ),
    "sgmcmc": lambda model, **options: bdl.mcmc.sgmcmc(
        model, (X, Y), kernel=bdl.mcmc.SGHMC(step_size=1e-3), **options
    ),
}
FEW = {"num_warmup": 4, "num_samples": 4}


@pytest.mark.filterwarnings("ignore")  # chains are too short
@pytest.mark.parametrize(
    "kernel",  # "nuts" by the code of "mclmc"
    [pytest.param(name, marks=pytest.mark.slow if name == "nuts" else ()) for name in KERNELS],
)
def test_chains_of_every_kernel(kernel, tmp_path):
    model = trained(regression(net(), no_bias_prior))
    samples = KERNELS[kernel](model, **FEW)
    torch.manual_seed(3)
    expected = bdl.Predictive(model, samples, num_samples=4)(X)
    again = regression(net(), no_bias_prior)
    loaded = bdl.load_posterior(samples.save(tmp_path / "posterior"), again)
    _check_predictions(again, loaded, expected)


@pytest.mark.filterwarnings("ignore")
def test_chains_that_went_on(tmp_path):
    """What a file holds is the program as it was when the draws were made."""
    model = trained(regression(net(), no_bias_prior))
    folder, options = tmp_path / "chains", {"kernel": "mclmc", "num_warmup": 4}
    bdl.mcmc.sample(model, X, Y, checkpoint=folder, num_samples=2, **options)
    samples = bdl.mcmc.sample(model, X, Y, checkpoint=folder, num_samples=4, **options)
    samples = samples.extend(3).to(torch.float32)
    torch.manual_seed(3)
    expected = bdl.Predictive(model, samples, num_samples=4)(X)
    trained(model)  # on, to other values
    again = regression(net(), no_bias_prior)
    loaded = bdl.load_posterior(samples.save(tmp_path / "posterior"), again)
    assert loaded.num_draws == 7
    _check_predictions(again, loaded, expected)


CHANGES = {
    "noise": {"noise": 0.33},
    "prior": {"prior": bdl.priors.Normal(1.02)},
    "kind of prior": {"prior": bdl.priors.Laplace(1.0)},
    "activation": {"network": net(nn.Sigmoid)},
    "num_data": {"num_data": 13},
    "width": {"network": nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))},
    "a hyperprior": {"noise": bdl.priors.Hyperprior(dist.Gamma(2.0, 2.0))},
    "a latent noise": {"noise": dist.LogNormal(0.0, 1.0)},
}


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("change", CHANGES)
def test_another_program_is_refused_and_stays(change, kind, tmp_path):
    def make(network=None, prior=None, noise=0.3, num_data=12):
        bnn = bdl.bayesianize(network or net(), prior or bdl.priors.Normal(1.0))
        return bdl.models.Regression(bnn, noise=noise, num_data=num_data)

    path = POSTERIORS[kind](make()).save(tmp_path / "posterior")
    bdl.load_posterior(path, make())
    other = make(**CHANGES[change])
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(RuntimeError):
        bdl.load_posterior(path, other)
    assert other.state_dict().keys() == before.keys()
    assert all(torch.equal(other.state_dict()[name], value) for name, value in before.items())


def test_draws_without_their_program(tmp_path):
    """They load, and a warning says what is missing."""
    model = regression(net(), where="2.*")
    draws = {
        name: torch.randn(1, 4, *v.shape) for name, v in bdl.Program(model, X, Y).initial.items()
    }
    path = bdl.Samples(draws).save(tmp_path / "draws")
    with pytest.warns(bdl.errors.BdlWarning, match="draws alone"):
        loaded = bdl.load_posterior(path, model)
    assert all(torch.equal(loaded.latents[name], value) for name, value in draws.items())
    with pytest.raises(RuntimeError, match="another program"):
        bdl.Samples({"w": torch.zeros(1, 4)}).of_program(bdl.Program(model, X, Y))


class Low(bdl.guides.AutoLowRank):
    """A guide of a user's whose option is not in ``options()``."""

    def __init__(self, model, *, width=3):
        super().__init__(model, rank=width)

    def options(self):
        return {}


class Needy(Low):
    def __init__(self, model, *, width):
        super().__init__(model, width=width)


def test_a_guide_without_options_is_told_to_have_them(tmp_path):
    model = regression(net())
    path = Low(model, width=2).prototype(X, Y).save(tmp_path / "guide")
    with pytest.raises(RuntimeError, match=r"'factor' of shape .*options\(\)"):
        bdl.load_posterior(path, model)
    path = Needy(model, width=2).prototype(X, Y).save(tmp_path / "guide")
    with pytest.raises(bdl.errors.ArgumentError, match=r"argument 'width'.*options\(\)"):
        bdl.load_posterior(path, model)


@pytest.mark.parametrize("kind", ["MAP", "draws"])
def test_what_pyros_store_holds_gives_way_to_the_file(kind, tmp_path):
    """Pyro's modules take the value of the store, of which another program is the owner here."""
    pyro.clear_param_store()
    model = trained(Own())
    posterior = POSTERIORS[kind](model)
    torch.manual_seed(3)
    expected = bdl.Predictive(model, posterior, num_samples=4)(X)
    path = posterior.save(tmp_path / "posterior")
    trained(Own())
    again = Own()
    _check_predictions(again, bdl.load_posterior(path, again), expected)


def test_draws_of_a_program_that_no_file_can_hold(tmp_path):
    """The draws are not lost: the file holds them alone, and says so."""
    bnn = bdl.bayesianize(nn.Linear(2, 1))

    def model(x, y, options):
        f = bnn(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, options.noise), obs=y)

    options = types.SimpleNamespace(noise=0.3)
    samples = bdl.mcmc.sgmcmc(
        model, ({"x": X, "y": Y, "options": options}), kernel=bdl.mcmc.SGLD(step_size=1e-4),
        num_warmup=0, num_samples=2, init="network",
    )  # fmt: skip
    with pytest.warns(bdl.errors.BdlWarning, match="without their program.*SimpleNamespace"):
        path = samples.save(tmp_path / "draws")
    with pytest.warns(bdl.errors.BdlWarning, match="draws alone"):
        loaded = bdl.load_posterior(path, model)
    assert torch.equal(loaded.latents["weight"], samples.latents["weight"])
