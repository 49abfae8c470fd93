"""Networks of ``torch.compile`` have the posteriors of those that are not compiled."""

import warnings

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import SGD
from torch import nn

import pyro_bdl as bdl

# Dynamo looks at .grad of what is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

WAYS = ["network", *(pytest.param(w, marks=pytest.mark.slow) for w in ("bayesian", "in place"))]


def _network(way):
    """A network in evaluation mode compares alike, however it is compiled."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    if way == "network":
        return bdl.bayesianize(torch.compile(net, backend="eager"))
    bnn = bdl.bayesianize(net)
    if way == "bayesian":
        return torch.compile(bnn, backend="eager")
    if way == "in place":
        bnn.compile(backend="eager")
    return bnn


def _problem(way):
    pyro.clear_param_store()
    torch._dynamo.reset()
    model = bdl.models.Regression(_network(way), noise=0.5, num_data=6)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(6, 2, generator=generator), torch.randn(6, 1, generator=generator)
    return model, data


def _trained(elbo, way, guide=bdl.guides.AutoMeanField):
    model, data = _problem(way)
    guide = guide(model)
    svi = SVI(model, guide, SGD({"lr": 1e-3}), elbo)
    pyro.set_rng_seed(2)
    losses = [svi.step(*data) for _ in range(4)]
    return model, data, guide, losses


@pytest.mark.parametrize(
    "elbo",
    [
        pyro.infer.Trace_ELBO,
        lambda: bdl.elbo.TemperedTraceMeanField_ELBO(),
        lambda: bdl.elbo.TemperedTraceMeanField_ELBO(num_particles=2),
        lambda: bdl.elbo.CompiledELBO(),
    ],
    ids=["pyro", "tempered", "particles", "compiled"],
)
@pytest.mark.parametrize("way", WAYS)
def test_training(elbo, way):
    with warnings.catch_warnings():
        warnings.simplefilter("error", bdl.errors.BdlWarning)
        expected, found = (_trained(elbo(), each)[-1] for each in ("no", way))
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("way", WAYS)
def test_laplace_and_predictions(way):
    found = []
    for each in ("no", way):
        model, data, guide, _ = _trained(pyro.infer.Trace_ELBO(), each, bdl.guides.AutoLaplaceGGN)
        posterior = guide.laplace_approximation(data)
        moments = bdl.LinearizedPredictive(model, posterior).parameter_moments(data[0])["y"]
        torch.manual_seed(3)
        draws = bdl.Predictive(model, posterior, num_samples=3)(data[0])["f"]
        found.append((posterior.variances(), moments.variance, draws))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", ["pyro", pytest.param("numpyro", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*#divergences")  # of two draws
def test_mcmc(backend):
    found = []
    for way in ("no", "network"):
        model, data = _problem(way)
        options = {"num_warmup": 2, "num_samples": 2, "progress": False}
        options["kernel"] = bdl.mcmc.NUTS(max_tree_depth=3)
        samples = bdl.mcmc.sample(model, *data, backend=backend, **options)
        found.append(list(samples.latents.values()))
        kernel = bdl.mcmc.SGHMC(step_size=1e-3)
        steps = bdl.mcmc.sgmcmc(model, data, kernel=kernel, num_warmup=2, num_samples=2)
        found[-1] += steps.latents.values()
        assert model.training
    torch.testing.assert_close(found[1], found[0])


def test_batch_norm_under_several_particles():
    found = []
    for compiled in (False, True):
        pyro.clear_param_store()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        net = torch.compile(net, backend="eager") if compiled else net
        model = bdl.models.Regression(bdl.bayesianize(net), noise=0.5)
        guide = bdl.guides.AutoMeanField(model)
        elbo = bdl.elbo.TemperedTraceMeanField_ELBO(num_particles=2)
        svi = SVI(model, guide, SGD({"lr": 1e-3}), elbo)
        pyro.set_rng_seed(2)
        losses = torch.tensor([svi.step(torch.eye(6)[:, :2], torch.ones(6)) for _ in range(2)])
        variances = [m.running_var for m in model.modules() if hasattr(m, "running_var")]
        found.append([losses, *variances])
    torch.testing.assert_close(*found)
