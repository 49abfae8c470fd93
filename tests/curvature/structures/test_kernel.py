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
from pyro_bdl.curvature.structures.kernel import KernelCurvature
from pyro_bdl.distributions.matrix_normal import MatrixNormal
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides import AutoLaplaceGGN

EXACTLY = {"rtol": 1e-8, "atol": 1e-10}


def net(outputs, inputs=3):
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


def per_layer():
    return priors.PerLayer(priors.Normal(learned(0.7)))


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
    if name == "normal":
        y = torch.randn(7, 2)
        return models.Regression(bayesianize(net(2), per_layer()), noise=0.4), x, y
    if name == "categorical":
        model = models.Classification(bayesianize(net(3), priors.FanIn(1.5)))
        return model, x, torch.randint(0, 3, (7,))
    if name == "bernoulli":
        model = models.BinaryClassification(bayesianize(net(1), priors.Normal(0.8)))
        return model, x, torch.randint(0, 2, (7,)).to(x)
    return coupled, x, torch.randn(7, 2)


def approximate(name, structure, **options):
    model, x, y = case(name)
    guide = AutoLaplaceGGN(model, structure=structure, **options).prototype(x, y)
    torch.manual_seed(5)
    with torch.no_grad():
        guide.loc.copy_(0.3 * torch.randn_like(guide.loc))
    return model, guide.laplace_approximation((x, y)), x


pytestmark = pytest.mark.filterwarnings("ignore:the guide is not at a maximum")


@pytest.mark.parametrize("subset", [None, [0, 2, 5]])
@pytest.mark.parametrize("name", ["normal", "categorical", "bernoulli", "coupled"])
def test_it_is_the_full_posterior(name, subset):
    chosen = None if subset is None else "b" if name == "coupled" else torch.tensor(subset)
    model, full, _ = approximate(name, "full", subset=chosen)
    _, guide, _ = approximate(name, "kernel", subset=chosen)
    assert guide.curvature.rows.shape[0] == 7 * {"bernoulli": 1, "categorical": 3}.get(name, 2)
    close = lambda a, b: torch.testing.assert_close(a, b, **EXACTLY)  # noqa: E731
    ours, exact = guide.precision, full.precision
    close(ours.logdet(), exact.logdet())
    close(ours.variances(), exact.variances())
    vectors = torch.randn(3, guide.subset.size)
    close(ours.solve(vectors), exact.solve(vectors))
    close(ours.quadratic(vectors), exact.quadratic(vectors))
    close(evidence.log_marginal_likelihood(guide), evidence.log_marginal_likelihood(full))
    new = torch.randn(4, 3)
    found, expected = LinearizedPredictive(model, guide), LinearizedPredictive(model, full)
    for site, moments in expected.moments(new).items():
        for key, value in moments.variance.items():
            close(found.moments(new)[site].variance[key], value)
    close(found.covariance(new)["y"], expected.covariance(new)["y"])
    close(found.joint_covariance(new)["y"], expected.joint_covariance(new)["y"])


@pytest.mark.parametrize("name", ["normal", "coupled"])
def test_draws_have_exactly_the_covariance(name, monkeypatch):
    """A draw is A times noise; A A' is the covariance, without a Monte Carlo error."""
    _, guide, _ = approximate(name, "kernel")
    _, full, _ = approximate(name, "full")
    size = guide.subset.size
    monkeypatch.setattr(torch, "randn", lambda *shape, **kwargs: torch.eye(size))
    draws = guide.precision.sample(size)
    expected = full.precision.solve(torch.eye(size))
    torch.testing.assert_close(draws.T @ draws, expected, **EXACTLY)


def test_batches_and_updates_add_up():
    _, guide, _ = approximate("categorical", "kernel")
    model, x, y = case("categorical")
    halves = AutoLaplaceGGN(model, structure="kernel").prototype(x, y)
    with torch.no_grad():
        halves.loc.copy_(guide.loc)
    batches = [(x[:3], y[:3]), (x[3:], y[3:])]
    vectors = torch.randn(3, guide.subset.size)
    for other in (
        halves.laplace_approximation(batches),
        halves.laplace_approximation(batches[0]).update(batches[1]),
    ):
        torch.testing.assert_close(
            other.precision.solve(vectors), guide.precision.solve(vectors), **EXACTLY
        )


@pytest.mark.parametrize("is_learned", [False, True])
def test_the_evidence_is_maximized_alike(is_learned):
    """Gradients in prior scales and noise, and the maximum, are those of "full"."""
    found = {}
    for structure in ("full", "kernel"):
        torch.manual_seed(1)
        x, y = torch.randn(7, 3), torch.randn(7, 2)
        noise = learned(0.4) if is_learned else 0.4
        model = models.Regression(bayesianize(net(2), per_layer()), noise=noise)
        guide = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
        posterior = guide.laplace_approximation((x, y))
        total = evidence.log_marginal_likelihood(posterior)
        slopes = torch.autograd.grad(total, list(model.parameters()), allow_unused=True)
        result = evidence.maximize(posterior, steps=3, method="gradient")
        found[structure] = [s for s in slopes if s is not None], result.history
    torch.testing.assert_close(found["kernel"], found["full"], **EXACTLY)


def test_steps_on_the_evidence_take_the_kernels_of_the_sites(monkeypatch):
    """The rows are multiplied once, whatever the number of steps."""
    calls = []
    gram = kernel_module._gram
    monkeypatch.setattr(kernel_module, "_gram", lambda rows: calls.append(1) or gram(rows))
    _, guide, _ = approximate("normal", "kernel")
    evidence.maximize(guide, steps=5, method="gradient", linearized=False)
    assert len(calls) == len(guide.subset.parts)


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
    return LinearizedPredictive(model, posterior).moments(x)["y"].variance["loc"]


def test_the_state_has_the_rows():
    _, guide, _ = approximate("bernoulli", "kernel")
    other = KernelCurvature(guide.subset.size, guide.loc, guide.subset.parts)
    other.load_state_dict(guide.curvature.state_dict())
    torch.testing.assert_close(other.rows, guide.curvature.rows)


def hierarchical(y):
    scale = pyro.sample("scale", dist.HalfNormal(3.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(2), scale).to_event(1))
    with pyro.plate("data", 2):
        pyro.sample("y", dist.Normal(w, 0.1), obs=y)


@pytest.mark.parametrize("subset", [None, "w"])
def test_scales_with_a_prior(subset):
    """The prior couples the weights with their scale; at this point its precision is positive."""
    point, y = [1.0, 1.0, 1.0], torch.tensor([3.0, 2.0])
    ours = at(point, hierarchical, y, structure="kernel", subset=subset).precision
    exact = at(point, hierarchical, y, structure="full", subset=subset).precision
    torch.testing.assert_close(ours.variances(), exact.variances(), **EXACTLY)
    torch.testing.assert_close(ours.logdet(), exact.logdet(), **EXACTLY)


# Limits


def test_memory_is_that_of_the_factor():
    config, like = CurvatureConfig("kernel"), torch.zeros(0)
    assert 100 * 10**6 < config.structure.memory(10**6, 100) < 5 * 100 * 10**6
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
        at([0.0, 3.0, 2.0], hierarchical, torch.ones(2), structure="kernel")
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
