"""The posterior in function space: all that "full" gives, from the rows of the Jacobian."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.parameters import learned
from torch import nn

from pyro_bdl import LinearizedPredictive, bayesianize, evidence, models, priors
from pyro_bdl.curvature.config import CurvatureConfig, check_memory
from pyro_bdl.curvature.structures import kernel as kernel_module
from pyro_bdl.distributions.matrix_normal import MatrixNormal
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides import AutoLaplaceGGN


def net(outputs, inputs=3):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


def coupled(x, y=None):
    """A prior that couples the rows of a weight, and another scale for each bias."""
    rows, columns = torch.tensor([[1.0, 0.3], [0.3, 0.5]]), torch.tensor([[2.0, 0.4], [0.4, 1.0]])
    w = pyro.sample(
        "w",
        MatrixNormal(
            torch.zeros(2, 2), torch.linalg.cholesky(rows), torch.linalg.cholesky(columns)
        ),
    )
    b = pyro.sample("b", dist.Normal(torch.zeros(2), torch.tensor([0.5, 2.0])).to_event(1))
    f = (x[:, :2] @ w.T + b).tanh()
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, 0.3).to_event(1), obs=y)


def case(name):
    torch.manual_seed(1)
    x = torch.randn(7, 3)
    if name in ("normal", "learned"):
        noise = 0.4 if name == "normal" else learned(0.4)
        prior = priors.PerLayer(priors.Normal(learned(0.7)))
        return models.Regression(bayesianize(net(2), prior), noise=noise), x, torch.randn(7, 2)
    if name == "categorical":
        model = models.Classification(bayesianize(net(3), priors.FanIn(1.5)))
        return model, x, torch.randint(0, 3, (7,))
    if name == "bernoulli":
        model = models.BinaryClassification(bayesianize(net(1), priors.Normal(0.8)))
        return model, x, torch.randint(0, 2, (7,)).to(x)
    return coupled, x, torch.randn(7, 2)


def approximate(name, structure, *, update=False, **options):
    model, x, y = case(name)
    guide = AutoLaplaceGGN(model, structure=structure, **options).prototype(x, y)
    torch.manual_seed(5)
    with torch.no_grad():
        guide.loc.copy_(0.3 * torch.randn_like(guide.loc))
    if not update:
        return model, guide.laplace_approximation((x, y))
    batches = [(x[:2], y[:2]), (x[2:3], y[2:3])]
    return model, guide.laplace_approximation(batches).update((x[3:], y[3:]))


pytestmark = pytest.mark.filterwarnings("ignore:the guide is not at a maximum")


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("subset", [None, [0, 2, 5]])
@pytest.mark.parametrize("name", ["normal", "categorical", "bernoulli", "coupled"])
def test_it_is_the_full_posterior(name, subset):
    """Whatever the batches; the contract tests hold the rest against solves."""
    chosen = None if subset is None else "b" if name == "coupled" else torch.tensor(subset)
    _, full = approximate(name, "full", subset=chosen)
    ours, exact = approximate(name, "kernel", subset=chosen)[1], full.precision
    assert len(ours.curvature.rows) == 7 * {"bernoulli": 1, "categorical": 3}.get(name, 2)
    vectors = torch.randn(3, full.subset.size)
    for posterior in (ours, approximate(name, "kernel", update=True, subset=chosen)[1]):
        close(posterior.precision.solve(vectors), exact.solve(vectors))
        close(posterior.precision.quadratic(vectors), exact.quadratic(vectors))
        close(posterior.precision.logdet(), exact.logdet())
        close(posterior.precision.variances(), exact.variances())


@pytest.mark.parametrize("name", ["normal", "coupled"])
def test_draws_have_exactly_the_covariance(name, monkeypatch):
    """A draw is A times noise; A A' is the covariance, without a Monte Carlo error."""
    _, guide = approximate(name, "kernel")
    _, full = approximate(name, "full")
    size = guide.subset.size
    monkeypatch.setattr(torch, "randn", lambda *shape, **kwargs: torch.eye(size))
    draws = guide.precision.sample(size)
    close(draws.T @ draws, full.precision.solve(torch.eye(size)))


def test_the_evidence_is_maximized_alike(monkeypatch):
    """Gradients in prior scales and noise, and the maximum, are those of "full"; the rows are
    multiplied once, whatever the number of steps."""
    found, calls, gram = {}, [], kernel_module._gram
    monkeypatch.setattr(kernel_module, "_gram", lambda rows: calls.append(1) or gram(rows))
    for structure in ("full", "kernel"):
        model, posterior = approximate("learned", structure)
        total = evidence.log_marginal_likelihood(posterior)
        slopes = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
        calls.clear()
        result = evidence.maximize(posterior, steps=3, method="gradient", linearized=False)
        found[structure] = [s for s in slopes if s is not None], result.history
    assert len(calls) <= len(posterior.subset.parts)
    close(found["kernel"], found["full"])


def test_float32_has_the_digits_of_the_noise():
    """Kernel values of 1e6 times the noise: the variance is a small difference of large numbers."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 30)[:, None]
    model = models.Regression(bayesianize(net(1, 1), priors.Normal(5.0)), noise=1e-3).float()
    x, y = x.float(), x[:, 0].float()
    guide = AutoLaplaceGGN(model, structure="kernel").prototype(x, y)
    assert guide.loc.dtype == torch.float32
    single = variances(model, guide, x, y)
    assert single.dtype == torch.float32 and (single > 0).all()
    exact = variances(model.double(), guide.double(), x.double(), y.double())
    torch.testing.assert_close(single.double(), exact, rtol=1e-2, atol=0)


def variances(model, guide, x, y):
    posterior = guide.laplace_approximation((x, y))
    return LinearizedPredictive(model, posterior).parameter_moments(x)["y"].variance["loc"]


def hierarchical(y):
    scale = pyro.sample("scale", dist.HalfNormal(3.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(2), scale).to_event(1))
    with pyro.plate("data", 2):
        pyro.sample("y", dist.Normal(w, 0.1), obs=y)


@pytest.mark.parametrize("subset", [None, "w"])
def test_scales_with_a_prior(subset):
    """The prior couples the weights with their scale; at this point its precision is positive."""
    point, y = [1.0, 1.0, 1.0], torch.tensor([3.0, 2.0])
    options = {"subset": subset, "rows": "together"}
    ours = at(point, hierarchical, y, structure="kernel", **options).precision
    exact = at(point, hierarchical, y, structure="full", **options).precision
    close(ours.variances(), exact.variances())
    close(ours.logdet(), exact.logdet())


# Limits


def test_memory_is_that_of_the_factor():
    config, like = CurvatureConfig("kernel"), torch.zeros(0)
    assert 20 < config.structure.memory(10**6, like, 100) / (100 * 10**6) < 40
    with pytest.raises(MemoryError, match=r"1,000,000 latents and 90,000,000 outputs"):
        check_memory(config, 10**6, like, num_rows=90 * 10**6)


def test_what_has_no_form_in_function_space():
    with pytest.raises(ValueError, match='curvature="hessian" needs structure="full"'):
        AutoLaplaceGGN(coupled, structure="kernel", curvature="hessian")

    def flat(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.poutine.mask(mask=False):
            b = pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(w.sum() + b, 1.0), obs=y)

    with pytest.raises(ValueError, match=r'"kernel" inverts .* 0 at site \'b\': give'):
        at([1.0, 1.0, 1.0], flat, torch.tensor(0.3), structure="kernel")
    with pytest.raises(ValueError, match=r"indefinite over the sites scale, w"):
        at([0.0, 3.0, 2.0], hierarchical, torch.ones(2), structure="kernel", rows="together")
    model, x, y = case("normal")
    guide = AutoLaplaceGGN(model, structure="kernel").prototype(x, y)
    curvature = guide.laplace_approximation((x, y)).curvature
    with pytest.raises(UnsupportedProgramError, match="one process: pass the data themselves"):
        curvature.sums()


def at(point, model, y, **options):
    guide = AutoLaplaceGGN(model, **options).prototype(y)
    with torch.no_grad():
        guide.loc.copy_(torch.tensor(point))
    return guide.laplace_approximation((y,))
