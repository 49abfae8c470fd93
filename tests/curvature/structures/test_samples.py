"""The posterior as samples: exact solves, and Monte Carlo estimates within their error."""

import copy

import pytest
import torch
from helpers.parameters import learned
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import LinearizedPredictive, bayesianize, evidence, models, priors, working_memory
from pyro_bdl.curvature import Samples
from pyro_bdl.curvature.at import ProgramAtPoint
from pyro_bdl.curvature.config import CurvatureConfig
from pyro_bdl.curvature.linear_outputs import LinearOutputs
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.evidence.linearized import LinearizedModel
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.nn import with_prior

pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.filterwarnings("ignore:the guide is not at a maximum"),
]

COUNT = 64


def case(name):
    torch.manual_seed(2)
    sizes = {"normal": 2, "classes": 3, "shared": 2}
    if name == "shared":
        x = torch.randn(8, 1, 5)
        net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(6, 2))
    else:
        x = torch.randn(8, 3)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, sizes[name]))
    prior = priors.PerLayer(priors.Normal(learned(0.7)))
    if name == "classes":
        return models.Classification(bayesianize(net, prior)), x, torch.randint(0, 3, (8,))
    return models.Regression(bayesianize(net, prior), noise=learned(0.4)), x, torch.randn(8, 2)


def approximate(name, structure, data=None):
    model, x, y = case(name)
    guide = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
    torch.manual_seed(5)
    with torch.no_grad():
        guide.loc.copy_(0.3 * torch.randn_like(guide.loc))
    batches = [(x, y)] if data is None else [(x[part], y[part]) for part in data]
    return model, guide.laplace_approximation(batches), x


def both(name):
    full, samples = approximate(name, "full")[1], approximate(name, Samples(8, 1e-12))[1]
    return full.precision, samples


def right_sides(precision, count):
    """J' F^1/2 e + Lambda w_0, whose solutions the samples are."""
    prior = precision._times_prior(precision._prior_draws(range(count)))
    return precision.factor.sqrt() * precision.curvature.targets + prior


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ["normal", "classes", "shared"])
def test_solves_are_those_of_the_dense_matrix(name):
    """Solves of any vectors, and of the perturbed objectives whose solutions the samples are."""
    full, guide = both(name)
    ours = guide.precision
    close(ours.samples, full.solve(right_sides(ours, 8)))
    vectors = torch.randn(2, 3, full.size)
    close(ours.solve(vectors), full.solve(vectors))
    close(ours.quadratic(vectors), full.quadratic(vectors))
    close(guide.curvature.diagonal(), approximate(name, "full")[1].curvature.diagonal())


def test_draws_for_the_data_have_the_curvature_as_covariance(monkeypatch):
    """With unit vectors in place of the noise the targets are the rows of the Jacobian."""
    _, exact, _ = approximate("classes", "full")
    plain = torch.randn

    def units(*shape, **kwargs):
        return torch.eye(24).reshape(shape) if len(shape) == 3 else plain(*shape, **kwargs)

    model, x, y = case("classes")
    guide = AutoLaplaceGGN(model, structure=Samples(num_samples=24)).prototype(x, y)
    guide.loc.data.copy_(exact.loc)
    monkeypatch.setattr(torch, "randn", units)
    targets = guide.laplace_approximation((x, y)).curvature.targets
    close(targets.mT @ targets, exact.curvature.matrix)


def test_the_posterior_is_that_of_full():
    """Within five standard errors of 64 samples."""
    model, exact, x = approximate("normal", "full")
    _, guide, _ = approximate("normal", Samples(num_samples=COUNT))
    full, ours = exact.precision, guide.precision
    matrix = full.solve(torch.eye(full.size))
    variances = matrix.diagonal()
    error = ((variances[:, None] * variances + matrix.square()) / COUNT).sqrt()
    assert ((ours.samples.mT @ ours.samples / COUNT - matrix).abs() <= 5 * error).all()
    known = variances / guide.prior_diagonal.reciprocal()  # in units of the prior's
    error = variances * (2 / COUNT * (1 - known.square())).sqrt()
    assert ((ours.variances() - variances).abs() <= 5 * error).all()
    gamma, exactly = guide.effective_parameters(), exact.effective_parameters()
    assert abs(gamma - exactly) <= 5 * (2 * float(exactly) / COUNT) ** 0.5
    found, expected = (
        LinearizedPredictive(model, g).parameter_moments(x)["y"] for g in (guide, exact)
    )
    for key, value in expected.variance.items():
        bound = 5 * (2 / COUNT) ** 0.5 * value
        assert ((found.variance[key] - value).abs() <= bound).all()
    at = ProgramAtPoint(model, guide.subset, guide.loc).linearize((x,), {})
    jacobian = LinearOutputs.of_deterministic(at, "f").jacobian
    cells, joint = ours.covariance(jacobian), ours.joint_covariance(jacobian)
    outputs = torch.einsum("knp,sp->snk", jacobian.rows(), ours.samples)
    close(cells, torch.einsum("snk,snl->nkl", outputs, outputs) / COUNT)
    close(joint, outputs.flatten(1).mT @ outputs.flatten(1) / COUNT)
    close(ours.output_variances(jacobian), cells.diagonal(dim1=1, dim2=2))


def test_variances_without_data_are_exactly_the_priors():
    """A latent that the data do not inform has no Monte Carlo error, and adds nothing to gamma."""
    model, x, y = case("normal")
    guide = AutoLaplaceGGN(model, structure=Samples(num_samples=4, tolerance=1e-12)).prototype(x, y)
    x[:, 0] = 0.0  # the first column of weights sees no input
    guide = guide.laplace_approximation((x, y))
    column = torch.arange(guide.subset.size)[
        guide.subset.parts[next(n for n in guide.subset.parts if "0.weight" in n)]
    ].reshape(4, 3)[:, 0]
    close(guide.precision.variances()[column], torch.full((4,), 0.49))


def test_the_log_determinant_and_its_gradient():
    """Sixteen probes: five standard errors, from the matrix itself; the gradient by samples."""
    model, exact, _ = approximate("normal", "full")
    other, guide, _ = approximate("normal", Samples(num_samples=COUNT))
    full, ours = exact.precision, guide.precision
    root = exact.prior_diagonal.sqrt()
    matrix = exact.curvature.matrix + exact.prior_diagonal.diag()
    values, vectors = torch.linalg.eigh(matrix / root / root[:, None])
    logs = (vectors * values.log()) @ vectors.mT
    error = (2 * (logs - logs.diagonal().diag()).square().sum() / 16).sqrt()
    assert abs(ours.logdet() - full.logdet()) <= 5 * error
    probes = torch.stack([guide.curvature.probe(number) for number in range(16)])
    quadrature = 2 * root.log().sum() + ((probes @ logs) * probes).sum(-1).mean()
    torch.testing.assert_close(ours.logdet(), quadrature, rtol=1e-3, atol=1e-3)
    slopes = []
    for program, posterior in ((model, exact), (other, guide)):
        total = evidence.log_marginal_likelihood(posterior)
        leaves = list(program.parameters())
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        slopes.append(torch.stack([s for s in found if s is not None]))
    assert len(slopes[0]) == 3
    # d logdet / d log theta is at most 2 gamma; gamma has the error of the test above
    bound = 10 * (2 * float(exact.effective_parameters()) / COUNT) ** 0.5
    assert ((slopes[1] - slopes[0]).abs() <= bound / 0.4).all()


def test_batches_and_updates_add_up():
    """The matrix of two batches is that of both at once, whether or not their graphs fit."""
    halves = slice(0, 3), slice(3, 8)
    full, _ = both("classes")
    vectors = torch.randn(3, full.size)
    _, x, y = case("classes")
    _, together, _ = approximate("classes", Samples(num_samples=2, tolerance=1e-12), halves)
    close(together.precision.quadratic(vectors), full.quadratic(vectors))
    with working_memory(1):
        close(together.precision.quadratic(vectors), full.quadratic(vectors))
    _, guide, _ = approximate("classes", Samples(num_samples=2, tolerance=1e-12), halves[:1])
    guide.update((x[3:], y[3:]))
    close(guide.precision.quadratic(vectors), full.quadratic(vectors))
    close(guide.precision.samples, full.solve(right_sides(guide.precision, 2)))


def test_another_noise_and_prior():
    """After a change the samples are solved for again, at the same noise of the objectives."""
    model, guide, _ = approximate("normal", Samples(num_samples=3, tolerance=1e-12))
    before = guide.precision.samples
    other, exact, _ = approximate("normal", "full")
    for program, posterior in ((model, guide), (other, exact)):
        program.noise = torch.tensor(0.2)
        posterior.refresh()
    close(guide.precision.samples, exact.precision.solve(right_sides(guide.precision, 3)))
    assert not torch.allclose(guide.precision.samples, before)


def test_the_linear_optimum_is_reached():
    _, exact, _ = approximate("classes", "full")
    _, guide, _ = approximate("classes", Samples(num_samples=2))
    found, expected = (LinearizedModel(g).optimum(tolerance=1e-10).offset for g in (guide, exact))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_draws_are_the_samples_up_to_their_sign(tmp_path):
    """Copies keep it, and so does a saved posterior, which has its samples alone."""
    model, guide, _ = approximate("normal", Samples(num_samples=4))
    samples, draws = guide.precision.samples, guide.precision.sample(4)
    close((draws.mT @ draws), samples.mT @ samples)
    assert guide.precision.sample(9).shape == (9, guide.subset.size)
    close(copy.deepcopy(guide).precision.samples, samples)
    guide.save(tmp_path / "posterior.pt")
    loaded = bdl.load_posterior(tmp_path / "posterior.pt", model)
    close(loaded.precision.samples, samples)
    close(loaded.precision.variances(), guide.precision.variances())
    with pytest.raises(RuntimeError, match="was loaded from a file without them"):
        loaded.precision.solve(samples)


def test_memory_and_limits():
    """For 11 million weights (ResNet-18) in float32, two samples take 2.9 GB."""
    like = torch.zeros(0, dtype=torch.float32)
    assert 2.5e9 < Samples(num_samples=2).memory(11_200_000, like) < 3e9
    with pytest.raises(ValueError, match='"samples" needs curvature="ggn"'):
        CurvatureConfig("samples", "empirical-fisher")
    with pytest.raises(ValueError, match="tolerance must lie between 0 and 1, both"):
        Samples(tolerance=2.0)
    _, guide, _ = approximate("normal", Samples(num_samples=2))
    with pytest.raises(UnsupportedProgramError, match="one process"):
        guide.curvature.sums()
    assert not guide.has_density
    with pytest.raises(ValueError, match="no matrix that could be a prior"):
        guide.as_prior()


@pytest.mark.parametrize("name", ["normal", "classes"])
def test_under_a_g_prior_the_posterior_is_that_of_the_dense_matrix(name):
    """N(0, (G + diag(G) / scale^2)^-1) in solves and samples."""
    model, exact, x = approximate(name, "full")
    h = approximate(name, "diag")[1].curvature_diagonals()
    matrix = exact.curvature.matrix
    close(torch.cat(list(h.values())), matrix.diagonal())
    _, _, y = case(name)
    model = with_prior(model, priors.GPrior(h, learned(0.7)))
    guide = AutoLaplaceGGN(model, structure=Samples(8, 1e-12))
    guide.prototype(x, y).loc.data.copy_(exact.loc)
    posterior = guide.laplace_approximation((x, y))
    precision = matrix + matrix.diagonal().diag() / 0.7**2
    ours = posterior.precision
    vectors = torch.randn(3, len(matrix))
    close(ours.solve(vectors), torch.linalg.solve(precision, vectors.mT).mT)
    close(ours.samples, torch.linalg.solve(precision, right_sides(ours, 8).mT).mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_that_data_do_not_determine(dtype):
    """One-hot columns and an intercept under a prior sd of 1000: curvature of 1e8 times the prior's
    precision in four directions, none in the fifth. Within five standard errors of 200 samples."""
    torch.manual_seed(0)
    x = torch.cat([torch.eye(4).repeat(10, 1), torch.ones(40, 1)], 1)
    covariance = torch.linalg.inv(x.mT @ x / 0.25 + torch.eye(5) / 1e6)
    model = models.Regression(
        bayesianize(nn.Linear(5, 1, bias=False), priors.Normal(1e3)), noise=0.5
    )
    x, y = x.to(dtype), torch.randn(40, dtype=dtype)
    guide = AutoLaplaceGGN(model.to(dtype), structure=Samples(num_samples=200)).prototype(x, y)
    posterior = guide.laplace_approximation((x, y))
    found, exact = posterior.precision.variances().double(), covariance.diagonal()
    assert ((found - exact).abs() <= 5 * exact * (2 / 200) ** 0.5).all()
    outputs = posterior.precision.samples.double() @ x[:4].mT.double()
    assert ((outputs.square().mean(0) - 0.025).abs() <= 5 * 0.025 * (2 / 200) ** 0.5).all()


class Hidden(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layers, self.function = nn.Sequential(nn.Linear(3, 4), nn.ReLU()), function

    def forward(self, x):
        return self.function(self.layers(x)).sum(-1, keepdim=True)


def hidden_guide(function):
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    model = models.Regression(bayesianize(Hidden(function)), noise=0.5)
    return AutoLaplaceGGN(model, structure="samples").prototype(x, y), (x, y)


def test_networks_without_finite_second_derivatives():
    """The derivative of x log x where a rectifier is zero."""
    guide, data = hidden_guide(lambda hidden: torch.xlogy(hidden, hidden))
    with pytest.raises(UnsupportedProgramError, match="they are not finite here"):
        guide.laplace_approximation(data).variances()


def test_networks_whose_second_derivative_torch_lacks():
    """Their products are those of the Jacobian."""
    guide, data = hidden_guide(lambda hidden: torch.cdist(hidden, torch.eye(4).to(hidden)))
    ours = guide.laplace_approximation(data).precision
    full = guide.laplace_approximation(data, structure="full").precision
    vectors = torch.randn(3, ours.size)
    close(ours.quadratic(vectors), full.quadratic(vectors))


def test_a_wide_prior_that_changes_is_solved_for_again():
    """Prior precisions of 1e-8 and less are told apart: the data determine the first weight at any
    scale of the prior, and say nothing about the second."""
    torch.manual_seed(0)
    x = torch.tensor([[1.0, 0.0]]).repeat(10, 1)
    prior = priors.Normal(learned(2e4))
    model = models.Regression(bayesianize(nn.Linear(2, 1, bias=False), prior), noise=1.0)
    guide = AutoLaplaceGGN(model, structure=Samples(200)).prototype(x, x[:, :1])
    posterior = guide.laplace_approximation((x, x[:, :1]))
    for scale in (2e4, 1e6):
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if "scale" in n).fill_(scale).log_()
        posterior.refresh()
        found = posterior.precision.samples.square().mean(0)
        torch.testing.assert_close(found, torch.tensor([0.1, scale**2]), rtol=0.4, atol=0.0)
