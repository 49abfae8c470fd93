"""A posterior as the prior of the next task: two steps of Bayes are one on all data."""

import copy
import pickle
import warnings

import jax
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate, with_ones
from pyro.nn import PyroParam
from torch import nn
from torch.distributions import MultivariateNormal, constraints

from pyro_bdl import (
    LinearizedPredictive,
    bayesianize,
    evidence,
    handlers,
    load_posterior,
    models,
    priors,
)
from pyro_bdl.curvature.prior import prior_precision, run_at
from pyro_bdl.elbo import TemperedTrace_ELBO
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import (
    AutoLaplaceGGN,
    AutoLowRank,
    AutoMAP,
    AutoMatrixNormal,
    AutoMeanField,
    AutoSubnetwork,
    selectors,
)
from pyro_bdl.nn import with_prior
from pyro_bdl.program import Program, record
from pyro_bdl.program.subset import Subset
from pyro_bdl.tracing.jax.translate import to_jax

D = torch.float64
SIZE = 4


class Tasks:
    """y ~ Normal(X w + b, 0.5^2) with w, b ~ Normal(0, 2^2), its data in two parts."""

    def __init__(self):
        torch.manual_seed(5)
        self.x = torch.randn(20, 3, dtype=D)
        self.x[:, 1] += 0.8 * self.x[:, 0]
        self.y = self.x @ torch.tensor([1.0, -0.5, 0.3], dtype=D) + 0.1
        self.y += 0.5 * torch.randn(20, dtype=D)
        self.first, self.second = (self.x[:8], self.y[:8]), (self.x[8:], self.y[8:])

    def model(self):
        torch.manual_seed(1)
        net = nn.Linear(3, 1).double()
        return models.Regression(bayesianize(net, priors.Normal(2.0)), noise=0.5)

    def posterior(self, x, y):
        """Mean and covariance given data."""
        exact = Conjugate(with_ones(x), y, 0.5, 2.0)
        return exact.mean, exact.covariance

    def log_evidence(self, x, y):
        return Conjugate(with_ones(x), y, 0.5, 2.0).evidence


@pytest.fixture
def tasks():
    return Tasks()


def fit(model, guide, args, elbo=None, tolerance=1e-11):
    """The optimum by a quasi-Newton method; the objective must not be random."""
    guide.prototype(*args)
    optimizer = torch.optim.LBFGS(
        list(guide.parameters()),
        max_iter=500,
        line_search_fn="strong_wolfe",
        tolerance_grad=tolerance,
        tolerance_change=min(1e-9, tolerance**1.5),
    )
    loss = (elbo or TemperedTrace_ELBO())(model, guide)

    def closure():
        optimizer.zero_grad()
        value = loss(*args)
        value.backward()
        return value

    optimizer.step(closure)
    return guide


def laplace(model, args, **options):
    return fit(model, AutoLaplaceGGN(model, **options), args).laplace_approximation(args)


# Exact: two steps are one


@pytest.mark.parametrize("structure", ["full", "kernel", "low_rank"])
@pytest.mark.parametrize("how", ["update_prior", "with_prior", "network"])
def test_online_laplace_is_exact_for_a_linear_gaussian_model(tasks, how, structure, covariance):
    model = tasks.model()
    if how == "network":  # alone in a program written by hand
        bnn = bayesianize(nn.Linear(3, 1).double(), priors.Normal(2.0))

        def model(x, y=None):
            mean = bnn(x)[:, 0]
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    first = laplace(model, tasks.first, structure=structure)
    log_evidence = evidence.log_marginal_likelihood(first)
    if how != "with_prior":
        changed = bnn if how == "network" else model
        assert changed.update_prior(first) is changed
    else:
        model = with_prior(model, first.as_prior())
    with warnings.catch_warnings():
        warnings.simplefilter("error", BdlWarning)
        second = laplace(model, tasks.second, structure=structure)
    mean, exact = tasks.posterior(tasks.x, tasks.y)
    torch.testing.assert_close(second.location(), mean)
    torch.testing.assert_close(covariance(second), exact)
    # log p(y1) + log p(y2 | y1) = log p(y1, y2)
    total = log_evidence + evidence.log_marginal_likelihood(second)
    torch.testing.assert_close(total, tasks.log_evidence(tasks.x, tasks.y))


@pytest.mark.parametrize("of", ["program", "network"])
def test_a_posterior_under_another_prior_than_its_own_is_not_read_again(tasks, of, tmp_path):
    """Its evidence was that of a program whose prior holds the same data."""
    model = tasks.model()
    first = laplace(model, tasks.first, structure="full")
    variances, moments = first.variances(), LinearizedPredictive(model, first).moments(tasks.x)
    (model if of == "program" else model.network).update_prior(first)
    twin = copy.deepcopy(first)
    for posterior in (first, twin):
        for use in (
            posterior.refresh,
            posterior.hyperparameters,
            lambda posterior=posterior: posterior.update(tasks.second),
            lambda posterior=posterior: posterior.save(tmp_path / "posterior"),
            lambda posterior=posterior: evidence.log_marginal_likelihood(posterior),
        ):
            with pytest.raises(ValueError, match="update_prior has replaced the program's prior"):
                use()
        torch.testing.assert_close(posterior.variances(), variances)
        found = LinearizedPredictive(model, posterior).moments(tasks.x)
        torch.testing.assert_close(found["y"].variance, moments["y"].variance)
    second = laplace(model, tasks.second, structure="full")
    loaded = load_posterior(second.save(tmp_path / "second"), model)
    torch.testing.assert_close(
        evidence.log_marginal_likelihood(loaded), evidence.log_marginal_likelihood(second)
    )


@pytest.mark.parametrize("structure", ["full", "kron", "low_rank", "kernel"])
def test_a_joint_prior_under_transforms_of_torch(structure):
    """Its factors, first used inside a transform, were those of the transform."""
    model, x, y = network(noise=0.4)
    first = laplace_anywhere(model, x, y, structure)
    under = with_prior(model, first)
    program = Program(under, x, y)
    under.prior.to(D)  # which forgets what was computed
    vector = first.location() + 0.1

    def density(u):
        return program.log_prior(program.constrain(u)[0])

    precision = first.precision.solve(torch.eye(13, dtype=D)).inverse()
    for _ in range(2):
        torch.testing.assert_close(-torch.func.hessian(density)(vector), precision)
        torch.testing.assert_close(torch.func.grad(density)(vector), -0.1 * precision.sum(0))


@pytest.mark.parametrize("structure", ["kron", "ekfac"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_kronecker_after_kronecker_adds_up_where_the_eigenbases_agree(structure, outputs):
    """The same data again: prior precision + H, then + H, block by block."""
    torch.manual_seed(1)
    x, y = torch.randn(9, 3, dtype=D), torch.randn(9, outputs, dtype=D)
    net = bayesianize(nn.Linear(3, outputs).double(), priors.Normal(2.0))
    model = models.Regression(net, noise=0.5)
    size = 4 * outputs
    first = laplace(model, (x, y), structure=structure)
    before = first.precision.solve(torch.eye(size, dtype=D)).inverse()
    model.update_prior(first)
    second = laplace(model, (x, y), structure=structure)
    after = second.precision.solve(torch.eye(size, dtype=D)).inverse()
    torch.testing.assert_close(after, 2 * before - torch.eye(size, dtype=D) / 4)
    assert (after - torch.diag(after.diagonal())).abs().max() > 1


def test_kronecker_factors_take_the_diagonal_in_their_eigenbasis(tasks, covariance):
    """A prior with other eigenvectors keeps its trace over a product."""
    model = tasks.model()
    first = laplace(model, tasks.first, structure="full")
    alone = laplace(tasks.model(), tasks.second, structure="kron")
    model.update_prior(first)
    second = laplace(model, tasks.second, structure="kron")
    block = alone.curvature.parts["0"]
    turned = torch.kron(torch.eye(1, dtype=D), block.block().inputs[0])
    prior = covariance(first).inverse()[:3, :3]
    expected = alone.curvature.parts["0"].spectrum().reshape(-1)
    expected = expected + (turned.T @ prior @ turned).diagonal()
    found = torch.linalg.eigvalsh(covariance(second).inverse()[:3, :3])
    torch.testing.assert_close(found, expected.sort().values)


# Everybody sees the same prior


def network(noise=None):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    model = models.Regression(
        bayesianize(net, priors.Normal(1.0)),
        noise=dist.HalfNormal(torch.ones((), dtype=D)) if noise is None else noise,
    )
    return model, torch.randn(6, 2, dtype=D), torch.randn(6, dtype=D)


def gaussian_guide(name, model, x, y):
    torch.manual_seed(8)
    if name.startswith("laplace-"):
        return laplace_anywhere(model, x, y, name.removeprefix("laplace-"))
    if name == "low-rank":
        return AutoLowRank(model, rank=3, init_scale=0.4).prototype(x, y)
    kind = AutoMeanField if name == "mean-field" else AutoMatrixNormal
    guide = kind(model, init_scale=0.3).prototype(x, y)
    with torch.no_grad():
        if name == "mean-field":
            guide.scale = torch.rand(14, dtype=D) + 0.2
            return guide
        for factor in ("row_0", "column_0", "row_1", "column_1"):
            size = len(getattr(guide, factor))
            lower = torch.randn(size, size, dtype=D).tril(-1)
            setattr(guide, factor, lower + torch.diag(torch.rand(size, dtype=D) + 0.4))
    return guide


def laplace_anywhere(model, x, y, structure):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)  # it is at no maximum
        guide = AutoLaplaceGGN(model, structure=structure).prototype(x, y)
        return guide.laplace_approximation((x, y))


GAUSSIAN = [
    "mean-field",
    "low-rank",
    "matrix-normal",
    "laplace-full",
    "laplace-kron",
    "laplace-ekfac",
    "laplace-diag",
    "laplace-low_rank",
]


@pytest.mark.parametrize("name", GAUSSIAN)
def test_the_programs_prior_is_the_guides_density(name):
    model, x, y = network()
    guide = gaussian_guide(name, model, x, y)
    vectors = guide.sample_vectors(3).detach()
    log_det = guide.layout.constrain(vectors)[1]
    expected = torch.stack(
        [guide.log_density(u, v) for u, v in zip(vectors, log_det, strict=True)]
    ).detach()
    plain = Program(model, x, y)
    before = plain.log_prior(plain.constrain(vectors[0])[0])
    under = with_prior(model, guide)
    torch.testing.assert_close(plain.log_prior(plain.constrain(vectors[0])[0]), before)
    model.update_prior(guide)
    for program in (Program(under, x, y), Program(model, x, y)):
        values = program.constrain(vectors)[0]
        torch.testing.assert_close(torch.vmap(program.log_prior)(values), expected)
    likelihood = plain.log_likelihood(plain.constrain(vectors[0])[0])["y"]
    again = program.log_likelihood(program.constrain(vectors[0])[0])["y"]
    torch.testing.assert_close(again, likelihood)


@pytest.mark.parametrize("name", GAUSSIAN)
@pytest.mark.parametrize("part", [False, True], ids=["all", "some"])
def test_the_precision_that_laplace_reads_is_the_hessian(name, part):
    model, x, y = network()
    model.update_prior(gaussian_guide(name, model, x, y))
    program = Program(model, x, y)
    vector = program.unconstrain(program.initial)

    def density(u):
        values, log_det = program.constrain(u)
        return program.log_prior(values) + log_det

    expected = -torch.autograd.functional.hessian(density, vector)
    subset = Subset(program.layout, torch.arange(0, 14, 3) if part else None)
    found = prior_precision(*run_at(model, subset, vector, (x, y), {}), subset)
    expected = expected[::3, ::3] if part else expected
    size = len(expected)
    torch.testing.assert_close(found.added_to(torch.zeros(size, size, dtype=D)), expected)
    torch.testing.assert_close(found.diagonal, expected.diagonal())


def test_a_large_prior_counts_by_its_diagonal():
    model, x, y = network(noise=0.4)
    guide = laplace_anywhere(model, x, y, "kron")
    model.update_prior(guide)
    subset = Subset(guide.layout)
    run = run_at(model, subset, guide.loc, (x, y), {})
    with pytest.warns(BdlWarning, match="couples the 13 numbers of .* than the 5 that get a matr"):
        found = prior_precision(*run, subset, dense_up_to=5)
    assert found.dense is None
    exact = guide.precision.solve(torch.eye(13, dtype=D)).inverse()
    torch.testing.assert_close(found.diagonal, exact.diagonal())


@pytest.mark.parametrize("name", GAUSSIAN)
def test_the_prior_is_a_copy_that_can_be_copied(name):
    model, x, y = network()
    guide = gaussian_guide(name, model, x, y)
    prior = guide.as_prior()
    values = guide.layout.constrain(guide.sample_vectors(1)[0].detach())[0]

    def density(prior):
        return Program(with_prior(model, prior), x, y).log_prior(values)

    expected = density(prior)
    with torch.no_grad():
        for tensor in [*guide.parameters(), *guide.buffers()]:
            if tensor.is_floating_point():
                tensor.add_(0.3)
    for other in (prior, copy.deepcopy(prior), pickle.loads(pickle.dumps(prior))):
        torch.testing.assert_close(density(other), expected)
    assert not list(prior.parameters())
    single = copy.deepcopy(model).update_prior(prior).float()
    found = Program(single, x.float(), y.float()).log_prior(
        {name: value.float() for name, value in values.items()}
    )
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(density(prior), expected)  # the model's move did not touch it


def test_nuts_sees_the_posterior_of_all_data(tasks):
    """Its density, as JAX computes it, is the exact one up to a constant."""
    model = tasks.model()
    model.update_prior(laplace(model, tasks.first, structure="full"))
    program = Program(model, *tasks.second)
    exact = MultivariateNormal(*tasks.posterior(tasks.x, tasks.y))
    points = torch.randn(3, SIZE, dtype=D)
    with jax.enable_x64(True):
        density = to_jax(program.log_density, torch.zeros(SIZE, dtype=D))
        found = torch.tensor([float(density(point.numpy())) for point in points], dtype=D)
    expected = exact.log_prob(points)
    torch.testing.assert_close(found.diff(), expected.diff())


def test_a_temperature_leaves_the_prior_alone(tasks):
    model = tasks.model().update_prior(laplace(tasks.model(), tasks.first, structure="full"))
    values = {k: site.value for k, site in record(model, {}, tasks.second[:1]).latents.items()}
    plain, tempered = (Program(m, *tasks.second) for m in (model, handlers.temper(model, 0.1)))
    torch.testing.assert_close(tempered.log_prior(values), plain.log_prior(values))
    difference = tempered.log_joint(values) - tempered.log_prior(values)
    torch.testing.assert_close(difference, 10 * (plain.log_joint(values) - plain.log_prior(values)))


# Programs


def test_a_new_output_layer_keeps_its_own_prior():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = bayesianize(nn.Linear(2, 3).double(), name="body")
            self.heads = nn.ModuleList(
                bayesianize(nn.Linear(3, 1).double(), priors.Normal(0.6), name=f"head{k}")
                for k in range(2)
            )

        def forward(self, x, y, task=0):
            mean = self.heads[task](self.body(x).tanh())[:, 0]
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(mean, 0.5), obs=y)

    model, x, y = TwoHeads(), torch.randn(5, 2, dtype=D), torch.randn(5, dtype=D)
    guide = AutoMeanField(model).prototype(x, y)
    under = with_prior(model, guide)
    with pytest.raises(ValueError, match=r"about the site 'head0.weight', which the program does"):
        record(under, {}, (x, y, 1))
    body = AutoMeanField(pyro.poutine.block(model, expose=["body.weight", "body.bias"]))
    under = with_prior(model, body.prototype(x, y))
    run = record(under, {}, (x, y, 1))
    assert (
        run.latents["body.weight"].distribution.base_dist.scale == body.scale[:6].view(3, 2)
    ).all()
    assert (run.latents["head1.weight"].distribution.base_dist.scale == 0.6).all()


def test_what_a_subset_fixes_stays_fixed():
    model, x, y = network(noise=0.4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        guide = AutoLaplaceGGN(model, structure="full", subset=["2.*"]).prototype(x, y)
        posterior = guide.laplace_approximation((x, y))
    model.update_prior(posterior)
    program = Program(model, x, y)
    assert list(program.latents) == ["2.weight", "2.bias"]
    u = torch.randn(4, dtype=D)
    expected = MultivariateNormal(
        posterior.location()[9:], precision_matrix=posterior.curvature.matrix + torch.eye(4)
    ).log_prob(u)
    torch.testing.assert_close(program.log_prior(program.constrain(u)[0]), expected)
    run = record(model, {}, (x, y))
    torch.testing.assert_close(run.deterministic["0.weight"], posterior.median()["0.weight"])


def test_a_subnetworks_normal():
    model, x, y = network(noise=0.4)
    guide = AutoSubnetwork(model, select=selectors.Sites("2.*"))
    normal = guide.prototype(x, y).variational((x, y), init_scale=0.3)
    with torch.no_grad():
        normal.scale_tril = 0.3 * torch.eye(4, dtype=D) + 0.1 * torch.ones(4, 4, dtype=D).tril(-1)
    program = Program(with_prior(model, normal), x, y)
    u = torch.randn(4, dtype=D)
    expected = MultivariateNormal(normal.loc, scale_tril=normal.scale_tril).log_prob(u)
    torch.testing.assert_close(program.log_prior(program.constrain(u)[0]), expected.detach())
    partly = AutoSubnetwork(model, size=5).prototype(x, y).variational((x, y))
    with pytest.raises(ValueError, match=r"entries of site .* needs whole sites"):
        partly.as_prior()


# Hyperparameters


def test_learned_prior_scales_become_numbers_and_another_prior_takes_their_place():
    learned = priors.Normal(PyroParam(torch.tensor(0.7), constraints.positive))
    noise = PyroParam(torch.tensor(0.4), constraints.positive)
    model = models.Regression(bayesianize(nn.Linear(2, 1), learned), noise=noise)
    x, y = torch.randn(5, 2), torch.randn(5)
    guide = AutoMeanField(model).prototype(x, y)
    with torch.no_grad():
        guide.loc.add_(0.5)
    model.update_prior(guide)
    assert torch.equal(AutoMAP(model).prototype(x, y).location(), guide.location())
    again = with_prior(model, priors.Normal(3.0))
    for program, scale in ((model, guide.scale[:2]), (again, torch.full((2,), 3.0))):
        assert [name for name, _ in program.named_parameters()] == ["noise_unconstrained"]
        found = record(program, {}, (x, y)).latents["weight"].distribution.base_dist.scale
        torch.testing.assert_close(found[0], scale.detach())


def test_a_state_with_a_prior_does_not_fit_a_program_without(tasks, tmp_path):
    model, other = tasks.model(), tasks.model()
    model.update_prior(AutoMeanField(model).prototype(*tasks.first))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*task_prior"):
        other.load_state_dict(model.state_dict())
    path = AutoMAP(model).prototype(*tasks.first).save(tmp_path / "posterior")
    words = r"'task_prior\S+' is of shape .* and missing here, .*update_prior included"
    with pytest.raises(RuntimeError, match=words):
        load_posterior(path, other)


@pytest.mark.parametrize("structure", ["full", "kron", "low_rank", "kernel"])
def test_the_state_holds_the_whole_density(structure):
    """Two posteriors at one point, from other data; the state of one gives its density."""
    parts = {"0.weight": (3, 2), "0.bias": (3,), "2.weight": (1, 3), "2.bias": (1,)}
    values = {name: torch.ones(shape, dtype=D) for name, shape in parts.items()}
    x, y = network(noise=0.5)[1:]
    one, other = (network(noise=0.5)[0] for _ in range(2))
    one.update_prior(laplace_anywhere(one, x, y, structure))
    other.update_prior(laplace_anywhere(other, 3 * x, y, structure))
    before, expected = (Program(model, x, y).log_prior(values) for model in (one, other))
    one.load_state_dict(other.state_dict())
    assert not torch.allclose(before, expected)
    torch.testing.assert_close(Program(one, x, y).log_prior(values), expected)


# Refusals


def test_posteriors_that_are_no_gaussians(tasks):
    model = tasks.model()
    point = AutoMAP(model).prototype(*tasks.first)
    for posterior, words in ((point, "AutoMAP is not a G"), (priors.Normal(1.0), "Gaussian guide")):
        with pytest.raises(TypeError, match=words):
            model.update_prior(posterior)


def test_a_prior_of_another_program(tasks):
    guide = AutoMeanField(tasks.model()).prototype(*tasks.first)
    wide = models.Regression(bayesianize(nn.Linear(5, 1).double()), noise=0.5)
    with pytest.raises(ValueError, match=r"site 'weight' has shape \(1, 3\), .* shape \(1, 5\)"):
        record(wide.update_prior(guide), {}, (torch.randn(2, 5, dtype=D),))


def test_latents_in_plates():
    def model(x):
        with pyro.plate("rows", 4, subsample_size=2, dim=-1) as i:
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=x[i])

    def whole(x):
        with pyro.plate("rows", 4):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=x)

    x = torch.randn(4)
    for kind in (AutoMeanField, AutoLowRank):
        with pytest.raises(ValueError, match="'z' is in a subsampled plate"):
            kind(model).prototype(x).as_prior()
    for kind in (AutoMeanField, AutoLowRank):
        guide = kind(whole, init_scale=0.3).prototype(x)
        program = Program(with_prior(whole, guide), x)
        u = torch.randn(4)
        torch.testing.assert_close(
            program.log_prior({"z": u}), guide.get_posterior().log_prob(u).detach()
        )
