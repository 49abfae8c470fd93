"""Laplace approximations of programs: factors, flat priors, handlers, data that are not finite."""

import math
import warnings
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate_laplace import D, data
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam
from pyro.nn import PyroParam
from torch import nn
from torch.distributions import constraints

from pyro_bdl import Predictive, bayesianize, compare, evidence, models, priors
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.evidence import log_marginal_likelihood
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.program import Program

# around points that nobody trained
pytestmark = pytest.mark.filterwarnings("ignore:.*#not-at-a-maximum")


def test_factors_are_left_out_and_said(conjugate, covariance):
    def model(x, y=None):
        conjugate_w = pyro.sample("w", dist.Normal(torch.zeros(3, dtype=D), 1.0).to_event(1))
        pyro.factor("penalty", -(conjugate_w.sum() ** 2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ conjugate_w, 1.0), obs=y)

    guide = AutoLaplaceGGN(model, structure="full").prototype(*data(conjugate))
    x, y = data(conjugate)
    curvature = x.T @ x + torch.eye(3, dtype=D) + 2.0
    with torch.no_grad():
        guide.loc.copy_(torch.linalg.solve(curvature, x.T @ y))
    with pytest.warns(BdlWarning, match="factor 'penalty' has no Fisher information") as caught:
        ggn = guide.laplace_approximation(data(conjugate))
    said = [warning for warning in caught if warning.category is BdlWarning]
    assert len(said) == 1  # and it is at the maximum, penalty included
    with warnings.catch_warnings():
        warnings.simplefilter("error", BdlWarning)
        hessian = guide.laplace_approximation(data(conjugate), curvature="hessian")
    torch.testing.assert_close(torch.linalg.inv(covariance(hessian)), curvature)
    torch.testing.assert_close(
        hessian.log_likelihood, Program(model, x, y).run(hessian.median()).log_likelihood()
    )
    difference = torch.linalg.inv(covariance(hessian)) - torch.linalg.inv(covariance(ggn))
    torch.testing.assert_close(difference, 2 * torch.ones(3, 3, dtype=D))


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
def test_the_batch_whose_data_are_not_finite_is_named(conjugate, curvature):
    guide = AutoLaplaceGGN(conjugate.model, structure="full", curvature=curvature)
    batches = list(zip(conjugate.x.split(3), conjugate.y.clone().split(3), strict=True))
    batches[1][1][2] = math.inf
    with pytest.raises(
        ValueError, match=r"batch 1 \(counted.*: y holds NaN or infinity in rows 2:"
    ):
        guide.laplace_approximation(batches)
    good = [batches[0], batches[2]]
    laplace = guide.prototype(*good[0]).laplace_approximation(good)
    before = laplace.variances()
    with pytest.raises(ValueError, match=r"batch 0 .*: y holds NaN or infinity in rows 2"):
        laplace.update(batches[1])
    torch.testing.assert_close(laplace.variances(), before, rtol=0, atol=0)


@pytest.mark.parametrize("mask", ["distribution", "handler"])
def test_a_flat_prior_leaves_the_likelihood_alone(conjugate, mask):
    """The posterior of least squares, N((X'X)^-1 X'y, (X'X)^-1) for noise of sd 1, and its exact
    evidence, the integral of the likelihood."""
    x, y = conjugate.x, conjugate.y

    def model(x, y=None):
        prior = dist.Normal(x.new_zeros(3), 1.0).to_event(1)
        with pyro.poutine.mask(mask=mask != "handler"):
            w = pyro.sample("w", prior.mask(False) if mask == "distribution" else prior)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    gram = x.T @ x
    mean = torch.linalg.solve(gram, x.T @ y)
    for structure in ("full", "kron", "ekfac", "diag"):
        guide = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
        with torch.no_grad():
            guide.loc.copy_(mean)
        laplace = guide.laplace_approximation((x, y))
        exact = 1 / gram.diagonal() if structure == "diag" else torch.linalg.inv(gram).diagonal()
        torch.testing.assert_close(laplace.variances(), exact)
        if structure != "diag":
            squares = (y - x @ mean).square().sum()
            evidence = -0.5 * (squares + gram.logdet() + (len(y) - 3) * math.log(2 * math.pi))
            torch.testing.assert_close(log_marginal_likelihood(laplace), evidence)


@pytest.mark.parametrize("batches", [1, 4])
def test_the_hessian_of_a_program_of_factors(conjugate, batches, covariance):
    """Likelihood and prior as factors are the same density; a prior counts once, however many
    batches the data come in, or are added in later."""
    x, y = data(conjugate)

    def model(x, y=None):
        w = pyro.sample("w", dist.ImproperUniform(constraints.real, (), (3,)))
        pyro.factor("prior", -0.5 * w.double().square().sum())
        with pyro.plate("data", len(x)):
            pyro.factor("likelihood", dist.Normal(x @ w.double(), 1.0).log_prob(y))

    guide = AutoLaplaceGGN(model, structure="full").prototype(x, y)
    precision = x.T @ x + torch.eye(3, dtype=D)
    with torch.no_grad():
        guide.loc.copy_(torch.linalg.solve(precision, x.T @ y))
    parts = list(zip(x.chunk(batches), y.chunk(batches), strict=True))
    with pytest.raises(UnsupportedProgramError, match=r"'prior'.*curvature=.hessian."):
        guide.laplace_approximation(parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BdlWarning)
        laplace = guide.laplace_approximation(parts, curvature="hessian")
    joint = Program(model, x, y).log_joint(laplace.median())
    posteriors = [laplace]
    if batches > 1:
        first = guide.laplace_approximation(parts[0], curvature="hessian")
        posteriors.append(first.update(parts[1:]))
    for found in posteriors:
        torch.testing.assert_close(
            covariance(found).double(), precision.inverse(), rtol=1e-4, atol=1e-6
        )
        torch.testing.assert_close(
            found.log_likelihood.double(), joint.double(), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("is_recurrent", [False, True])
@pytest.mark.parametrize("is_update", [False, True])
def test_a_factor_of_the_latents_counts_once(is_update, is_recurrent):
    """Also beside operators that vmap has no rule for."""
    torch.manual_seed(0)
    x, y, layer = torch.randn(8, 2), torch.randn(8), nn.GRU(2, 2)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.factor("penalty", -(w.sum() ** 2))
        x = layer(x[None])[0][0].detach() if is_recurrent else x
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    rows = "together" if is_recurrent else "alone"
    guide = AutoLaplaceGGN(model, structure="full", curvature="hessian", rows=rows).prototype(x, y)
    with torch.no_grad():
        guide.loc.fill_(0.3)
    whole, halves = guide.laplace_approximation((x, y)), [(x[:4], y[:4]), (x[4:], y[4:])]
    if is_update:
        parts = guide.laplace_approximation(halves[0]).update(halves[1])
    else:
        parts = guide.laplace_approximation(halves)
    torch.testing.assert_close(parts.curvature.matrix, whole.curvature.matrix, rtol=1e-6, atol=0)
    torch.testing.assert_close(parts.log_likelihood, whole.log_likelihood)


def line(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(()), 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)


SLOPES, TARGETS = torch.tensor([1.0, 2.0, 0.5, 3.0]), torch.tensor([0.3, 1.0, -0.5, 2.0])


@pytest.mark.parametrize(
    ("data", "more"),
    [
        ((SLOPES, TARGETS), (SLOPES, TARGETS)),
        ([(SLOPES[:2], TARGETS[:2]), (SLOPES[2:], TARGETS[2:])], (SLOPES[2:], TARGETS[2:])),
        (loader := [(SLOPES.clone(), TARGETS)], loader),
    ],
    ids=["the same", "a batch", "a list"],
)
def test_data_that_are_in_the_posterior_are_refused(data, more):
    guide = AutoLaplaceGGN(line, structure="full").prototype(SLOPES, TARGETS)
    guide.warned_of.add("not at a maximum")
    posterior = guide.laplace_approximation(data)
    precision = 1 + SLOPES.square().sum()
    for _ in range(2):
        with pytest.raises(ValueError, match="these tensors are in the posterior already"):
            posterior.update(more)
        torch.testing.assert_close(posterior.variances(), 1 / precision[None])
    again = posterior.update((SLOPES.clone(), TARGETS))
    torch.testing.assert_close(again.variances(), 1 / (2 * precision - 1)[None])


def test_more_data_for_a_program_that_held_its_own_are_refused():
    def program(x=SLOPES, y=TARGETS):
        return line(x, y)

    guide = AutoLaplaceGGN(program, structure="full").prototype()
    guide.warned_of.add("not at a maximum")
    posterior = guide.laplace_approximation()
    with pytest.raises(ValueError, match="the program held the data of the fit itself"):
        posterior.update((SLOPES, TARGETS))
    torch.testing.assert_close(posterior.variances(), 1 / (1 + SLOPES.square().sum())[None])


@pytest.mark.parametrize("structure", ["full", "diag", "kernel"])
def test_data_of_the_program_beside_more_rows_of_the_arguments(structure):
    """The posterior of both; there is no density of each row that the fit could be judged by."""
    torch.manual_seed(0)
    x, y = torch.randn(30), torch.randn(30)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(()), 1.0))
        with pyro.plate("before", 4):
            pyro.sample("old", dist.Normal(w * SLOPES, 0.5), obs=TARGETS)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)

    guide = AutoLaplaceGGN(model, structure=structure, rows="together").prototype(x, y)
    precision = 1 + 4 * SLOPES.square().sum() + x.square().sum()
    guide.loc.data.copy_((4 * SLOPES @ TARGETS + x @ y) / precision)
    posterior = guide.laplace_approximation((x, y))
    torch.testing.assert_close(posterior.variances(), 1 / precision[None])
    with pytest.raises(UnsupportedProgramError, match="'y' has 30 rows, and 'old' 4"):
        posterior.fit_width((x, y))


@pytest.mark.parametrize("is_update", [False, True])
@pytest.mark.parametrize("curvature", ["ggn", "hessian"])
@pytest.mark.parametrize(("power", "rows"), [(1, "alone"), (2, "alone"), (2, "together")])
def test_a_factor_of_the_data_outside_their_plate(power, rows, curvature, is_update):
    """At the center all of its values are zero, and for the square all of its slopes too."""
    x, y = torch.randn(8, 2), torch.randn(8)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.factor("penalty", -(x @ w).pow(power).sum())
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    guide = AutoLaplaceGGN(model, structure="full", curvature=curvature, rows=rows)
    guide.prototype(x, y).loc.data.zero_()
    guide.warned_of.add("not at a maximum")
    halves = [(x[:4], y[:4]), (x[4:], y[4:])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*#no-fisher-information")
        with pytest.raises(ValueError, match="'penalty' is in no plate of the data"):
            if is_update:
                guide.laplace_approximation(halves[0]).update(halves[1])
            guide.laplace_approximation(halves)


def test_an_embedding_with_sparse_gradients():
    model = models.Regression(bayesianize(nn.Embedding(5, 2, sparse=True)), noise=0.5)
    x, y = torch.randint(0, 5, (6,)), torch.randn(6, 2)
    guide = AutoLaplaceGGN(model).prototype(x, y)
    with pytest.raises(UnsupportedProgramError, match="has sparse gradients"):
        guide.laplace_approximation((x, y))


def test_a_reparameterized_program(conjugate, covariance):
    """Decentered, w = 2 v: the posterior of v is that of w, scaled."""
    x, y = data(conjugate)

    def model(x, y=None):
        with pyro.plate("inputs", 3):
            w = pyro.sample("w", dist.Normal(x.new_zeros(()), 2.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    precision = x.T @ x + torch.eye(3, dtype=D) / 4
    decentered = poutine.reparam(model, {"w": LocScaleReparam(0.0)})
    guide = AutoLaplaceGGN(decentered, structure="full").prototype(x, y)
    with torch.no_grad():
        guide.loc.copy_(torch.linalg.solve(precision, x.T @ y) / 2)
    laplace = guide.laplace_approximation((x, y))
    torch.testing.assert_close(covariance(laplace), precision.inverse() / 4)
    drawn = Predictive(decentered, laplace, num_samples=3)(x)
    assert drawn["y"].shape == (3, len(x))
    result = compare(decentered, {"laplace": laplace}, x, y, reference=None)
    assert "laplace" in str(result)


@pytest.mark.parametrize("always", [True, False])
def test_dropout_that_is_always_on_is_refused(always):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(3, 20), nn.Linear(20, 1)

        def forward(self, x):
            hidden = torch.nn.functional.dropout(self.first(x), 0.5, always or self.training)
            return self.last(hidden)

    x, y = torch.randn(8, 3), torch.randn(8)
    model = models.Regression(bayesianize(Net()), noise=1.0)
    guide = AutoLaplaceGGN(model, structure="diag").prototype(x, y)
    refused = pytest.raises(ValueError, match=r"the site 'y' is .* in another at the same latents")
    with refused if always else nullcontext():
        guide.laplace_approximation((x, y))


def test_a_noise_for_each_target_that_has_changed():
    """One factor of the curvature cannot follow it."""
    torch.manual_seed(0)
    x, y = torch.randn(12, 3), torch.randn(12, 2)
    noise = PyroParam(torch.tensor([0.5, 0.5]), constraint=constraints.positive)
    model = models.Regression(bayesianize(nn.Linear(3, 2)), noise=noise)
    guide = AutoLaplaceGGN(model, structure="full").prototype(x, y)
    posterior = guide.laplace_approximation((x, y))
    evidence.log_marginal_likelihood(posterior)
    model.noise = torch.tensor([0.5, 5.0])
    for use in (posterior.refresh, lambda: evidence.log_marginal_likelihood(posterior)):
        with pytest.raises(ValueError, match=r"'.*noise' of the likelihood has changed"):
            use()
    guide.laplace_approximation((x, y)).refresh()


def linear_in(prior_scale):
    """A linear program whose prior has a scale of its arguments."""

    def model(x, y=None, scale=1.0):
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), prior_scale(x, scale)).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    return model


@pytest.mark.parametrize("scale", [2.0, torch.tensor(2.0, dtype=D)], ids=["float", "tensor"])
def test_the_evidence_is_of_the_arguments_of_the_fit(conjugate, scale):
    """log N(y; 0, s^2 X X' + 1), where the guide was made with another s."""
    x, y = data(conjugate)
    model = linear_in(lambda x, scale: scale)
    guide = AutoLaplaceGGN(model, structure="full").prototype(x, y, 1.0 * scale / 2)
    posterior = guide.laplace_approximation((x, y, scale))
    covariance = 4.0 * x @ x.T + torch.eye(len(x), dtype=D)
    expected = dist.MultivariateNormal(x.new_zeros(len(x)), covariance).log_prob(y)
    posterior.refresh()
    for _ in range(2):
        found = log_marginal_likelihood(posterior, linearized=True)
        torch.testing.assert_close(found.detach(), expected)


def test_more_data_under_another_prior_are_refused(conjugate):
    x, y = data(conjugate)
    model = linear_in(lambda x, scale: scale * (1.0 + x.abs().mean()))
    guide = AutoLaplaceGGN(model, structure="full").prototype(x, y)
    posterior = guide.laplace_approximation((x, y))
    before = posterior.variances()
    for more in ((2 * x, y), (x, y, 2.0)):
        with pytest.raises(UnsupportedProgramError, match="prior of site 'w' depends on the data"):
            posterior.update(more)
    torch.testing.assert_close(posterior.variances(), before, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:the program states")
def test_parts_of_data_that_the_program_scales_up_do_not_add_up():
    x, y = torch.randn(10, 3), torch.randn(10, 1)
    for rows in (4, 10):
        model = models.Regression(bayesianize(nn.Linear(3, 1)), noise=0.5, num_data=10)
        guide = AutoLaplaceGGN(model, structure="full").prototype(x, y)
        posterior = guide.laplace_approximation((x[:rows], y[:rows]))
        matrix = posterior.curvature.matrix.clone()
        with pytest.raises(ValueError, match="parts do not add up"):
            posterior.update((x[4:], y[4:]))
        assert torch.equal(posterior.curvature.matrix, matrix)


def test_an_unobserved_point_mass_is_told_what_to_be():
    def model(y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Delta(torch.tensor(0.5)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(w + z, 1.0), obs=y)

    y = torch.arange(6.0)
    with pytest.raises(ValueError, match=r"'z' has no positive curvature.*pyro\.deterministic"):
        AutoLaplaceGGN(model).prototype(y).laplace_approximation((y,))


# What the first run of a fit says of the program


class Learned(models.Regression):
    """A noise that is a multiple of its parameter, different from row to row."""

    def likelihood(self, output):
        noise = self._hyperparameter("noise", output)
        return dist.Normal(output, noise * (1.0 + output.detach().square()))


def _learned(value):
    return PyroParam(torch.tensor(value, dtype=D), constraint=constraints.positive)


class _Recurrent(nn.Module):
    """A network whose rows no map takes at once."""

    def __init__(self):
        super().__init__()
        self.memory, self.out = nn.GRU(1, 2, batch_first=True), nn.Linear(2, 1)

    def forward(self, x):
        return self.out(self.memory(x[..., None])[0][:, -1])


def _with_factor(model):
    def program(x, y=None):
        result = model(x, y)
        priors.factor("shrink", -pyro.param("size", torch.tensor(0.3, dtype=D)).square())
        return result

    return program


def _net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


READ = {
    "learned scales": lambda: models.Regression(
        bayesianize(_net(), priors.Normal(_learned(0.8))), noise=_learned(0.5)
    ),
    "noise of each row": lambda: Learned(bayesianize(_net()), noise=_learned(0.5)),
    "hierarchy": lambda: models.Regression(
        bayesianize(_net(), priors.Normal(dist.HalfNormal(1.0))), noise=dist.HalfNormal(1.0)
    ),
    "heavy tails": lambda: models.Regression(
        bayesianize(_net(), priors.StudentT(4.0, 3.0)), noise=_learned(0.5)
    ),
    "loop": lambda: models.Regression(
        bayesianize(_Recurrent(), priors.Normal(_learned(0.8))), noise=_learned(0.5)
    ),
    "factor": lambda: _with_factor(models.Regression(bayesianize(_net()), noise=_learned(0.5))),
    "classes": lambda: models.Classification(
        bayesianize(
            nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3)), priors.Normal(_learned(0.8))
        )
    ),
}


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
@pytest.mark.parametrize("rows", ["alone", "together"])
@pytest.mark.parametrize("kind", READ)
def test_a_fit_has_the_prior_and_the_noise_of_a_run_of_its_own(kind, rows):
    torch.set_default_dtype(D)
    torch.manual_seed(0)
    model, x = READ[kind](), torch.randn(9, 2)
    y = torch.arange(9) % 3 if kind == "classes" else x.sum(1)
    guide = AutoLaplaceGGN(model, structure="diag", rows=rows)
    posterior = guide.laplace_approximation([(x[:5], y[:5]), (x[5:], y[5:])])
    before, slope, gradient = posterior.prior, posterior.prior_slope, posterior.gradient()
    evidence_before = log_marginal_likelihood(posterior)
    posterior.refresh()  # by a run on a few rows
    for one, other in zip(before[:3], posterior.prior[:3], strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other)
    assert before.quadratic == posterior.prior.quadratic
    torch.testing.assert_close(posterior.prior_slope, slope)
    torch.testing.assert_close(posterior.noise_factor, torch.ones_like(posterior.noise_factor))
    torch.testing.assert_close(posterior.gradient(), gradient)
    torch.testing.assert_close(log_marginal_likelihood(posterior), evidence_before)
    learns_noise = kind not in ("hierarchy", "classes")
    assert (posterior.reference_noise is not None) == learns_noise
    program = Program(model, x, y)

    def density(u):
        values, log_det = program.constrain(u)
        return program.log_prior(values) + log_det

    u = posterior.loc.clone().requires_grad_()
    (expected,) = torch.autograd.grad(density(u), u)
    torch.testing.assert_close(slope, expected)


class _Counted(nn.Tanh):
    runs = 0

    def forward(self, x):
        type(self).runs += 1
        return super().forward(x)


def test_a_fit_runs_the_network_twice():
    """On each row, and on all of them to compare."""
    torch.set_default_dtype(D)
    network = nn.Sequential(nn.Linear(2, 3), _Counted(), nn.Linear(3, 1))
    model = models.Regression(bayesianize(network, priors.Normal(_learned(0.8))), noise=0.3)
    x = torch.randn(9, 2)
    guide = AutoLaplaceGGN(model, structure="kron").prototype(x, x.sum(1))
    guide.warned_of.add("not at a maximum")  # no pass to see what a step would gain
    _Counted.runs = 0
    guide.laplace_approximation((x, x.sum(1)))
    assert _Counted.runs == 2


class StatisticsOfTheBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return nn.functional.batch_norm(x, None, None, self.weight, training=True)


@pytest.mark.parametrize(
    "layer, words",
    [
        (StatisticsOfTheBatch(), "makes data depend on each other"),
        (nn.BatchNorm1d(2, track_running_stats=False), "track_running_stats=True"),
    ],
)
def test_statistics_of_the_batch_are_refused(layer, words):
    model = models.Regression(bayesianize(nn.Sequential(layer, nn.Linear(2, 1))), noise=0.5)
    with pytest.raises(ValueError, match=words):
        AutoLaplaceGGN(model).laplace_approximation((torch.randn(5, 2), torch.randn(5)))
