"""The linearized predictive: against Jacobians by autograd, closed forms, quadrature and draws."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers import second_device
from helpers.comparisons import Shifted
from helpers.linearized_programs import (
    KINDS,
    N,
    approximate,
    case,
    jacobian,
    observing,
)
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pyro_bdl import (
    LinearizedPredictive,
    Predictive,
    bayesianize,
    handlers,
    models,
    working_memory,
)
from pyro_bdl.curvature.jacobian.linearization import Linearization
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoLaplaceGGN, AutoMAP, MixtureGuide
from pyro_bdl.program import Program
from pyro_bdl.utils.precision import has_float64
from pyro_bdl.utils.random_state import seeded

pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.filterwarnings("ignore:.*#not-at-a-maximum"),  # around points that nobody trained
]


# Exact


def test_a_linear_gaussian_is_predicted_exactly(conjugate):
    """N(x'm, x'Cx + noise^2) (Bishop 2006, equation 3.58)."""
    for eta in (1.0, 0.1):
        model = handlers.temper(conjugate.model, eta)
        guide = AutoLaplaceGGN(model, structure="full").prototype(conjugate.x, conjugate.y)
        with torch.no_grad():
            guide.loc.copy_(conjugate.mean(eta))
        laplace = guide.laplace_approximation((conjugate.x, conjugate.y))
        x, y = torch.randn(5, 3), torch.randn(5)
        design = torch.cat([x, torch.ones(5, 1)], 1)
        mean, inverse = design @ conjugate.mean(eta), torch.linalg.inv(conjugate.precision(eta))
        joint = design @ inverse @ design.T
        total = joint.diagonal() + conjugate.noise**2
        predictive = LinearizedPredictive(model, laplace)
        moments = predictive.parameter_moments(x)["y"]
        exactly = {"rtol": 1e-10, "atol": 1e-12}
        torch.testing.assert_close(moments.mean, {"loc": mean}, **exactly)
        torch.testing.assert_close(moments.variance, {"loc": joint.diagonal()}, **exactly)
        torch.testing.assert_close(moments.predictive_variance, total, **exactly)
        found, whole = predictive.joint_parameter_covariance(x)["y"]
        torch.testing.assert_close(found, mean, **exactly)
        torch.testing.assert_close(whole, joint, **exactly)
        center, own = predictive.parameter_covariance(x)["y"]
        torch.testing.assert_close(center, mean[:, None], **exactly)
        torch.testing.assert_close(own, joint.diagonal()[:, None, None], **exactly)
        expected = dist.Normal(mean, total.sqrt()).log_prob(y)
        torch.testing.assert_close(predictive.log_density(x, y)["y"], expected, **exactly)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_by_autograd(kind, full_covariance):
    """N(f(x; u*), J C J') (Immer et al. 2021, "GLM predictive")."""
    model, *args = case(kind)
    guide = approximate(model, args)
    predictive, inverse = LinearizedPredictive(model, guide), full_covariance(guide)
    moments, inside = predictive.parameter_moments(*args), predictive.parameter_covariance(*args)
    joint = predictive.joint_parameter_covariance(*args)
    for site in moments:
        values, slopes = jacobian(model, guide, args, site)
        count = 1 if kind == "one datum" else N
        moving = {k: v.reshape(count, -1, len(guide.loc)) for k, v in slopes.items() if v.any()}
        assert set(moments[site].mean) == set(moving) == set(moments[site].variance)
        for name in moving:
            variance = torch.einsum("...p,pq,...q->...", slopes[name], inverse, slopes[name])
            torch.testing.assert_close(moments[site].mean[name], values[name])
            torch.testing.assert_close(moments[site].variance[name], variance)
        rows = torch.cat(list(moving.values()), 1)
        mean = torch.cat([values[name].reshape(count, -1) for name in moving], 1)
        blocks = torch.einsum("nip,pq,njq->nij", rows, inverse, rows)
        torch.testing.assert_close(inside[site], (mean, blocks))
        flat = rows.flatten(0, 1)
        torch.testing.assert_close(joint[site], (mean.reshape(-1), flat @ inverse @ flat.T))
        assert not any(t.requires_grad for t in (*inside[site], *joint[site]))
        assert not any(t.requires_grad for t in moments[site].variance.values())


@pytest.mark.parametrize("subset", [None, "last-layer", [0, 3, 13, 20]])
def test_every_structure_and_subset(structure, subset, full_covariance):
    model, x, y = case("several outputs")
    if isinstance(subset, list):
        if structure in ("kron", "ekfac"):
            subset = [*range(12), 24, 25]  # their factors are of whole sites
        subset = torch.tensor(subset)
    guide = approximate(model, (x, y), structure=structure, subset=subset)
    _, slopes = jacobian(model, guide, (x, y), "y")
    rows = slopes["loc"].flatten(0, 1)
    found = LinearizedPredictive(model, guide).joint_parameter_covariance(x)["y"][1]
    torch.testing.assert_close(found, rows @ full_covariance(guide) @ rows.T)


# The tangent kernel


@pytest.mark.parametrize("structure", ["full", "kron", "kernel"])
def test_the_tangent_kernel_is_the_prior_covariance(structure):
    """J(x) Lambda^-1 J(x2)', in parts of one row or at once, whatever the curvature."""
    model, x, y = case("several outputs")
    guide = approximate(model, (x, y), structure=structure)
    _, slopes = jacobian(model, guide, (x, y), "y")
    rows = slopes["loc"].flatten(0, 1)
    expected = rows / guide.prior.diagonal @ rows.T
    predictive = LinearizedPredictive(model, guide)
    torch.testing.assert_close(predictive.prior_covariance(x)["y"], expected)
    with working_memory(1):
        found = predictive.prior_covariance(x, (x[:3],))["y"]
    torch.testing.assert_close(found, expected[:, :6])


@pytest.mark.parametrize("structure", ["full", "kernel"])
def test_the_posterior_covariance_is_that_of_the_gaussian_process(structure):
    """K(x, x) - K(x, X) (K(X, X) + noise)^-1 K(X, x) (Rasmussen & Williams 2006, equation 2.24)."""
    model, x, y = case("several outputs")
    predictive = LinearizedPredictive(model, approximate(model, (x, y), structure=structure))
    new = torch.randn(3, 3)
    cross = predictive.prior_covariance(new, x)["y"]
    noisy = predictive.prior_covariance(x)["y"] + 0.4**2 * torch.eye(2 * len(x))
    expected = predictive.prior_covariance(new)["y"] - cross @ torch.linalg.solve(noisy, cross.T)
    found = predictive.joint_parameter_covariance(new)["y"][1]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


# Draws


def test_draws_are_functions_with_the_joint_covariance(structure):
    """J C J' over all inputs (Immer et al. 2021)."""
    model, x, y = case("latent noise")
    guide = approximate(model, (x, y), structure=structure)
    count = 20000
    predictive = LinearizedPredictive(model, guide, num_samples=count)
    drawn = predictive(x)
    _, joint = predictive.joint_parameter_covariance(x)["y"]
    joint = joint[::2, ::2]  # of the locations
    moments = predictive.parameter_moments(x)["y"]
    mean = moments.mean["loc"]
    assert ((drawn["f"].mean(0) - mean).abs() < 5 * (joint.diagonal() / count).sqrt()).all()
    error = ((joint.diagonal()[:, None] * joint.diagonal() + joint.square()) / count).sqrt()
    assert ((torch.cov(drawn["f"].T) - joint).abs() < 5 * error).all()
    noise = drawn["y"] - drawn["f"]
    expected = moments.noise_variance
    assert (
        (noise.square().mean(0) / expected - 1).abs() < 5 * (noise**2).std(0) / count**0.5
    ).all()


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_shapes_are_those_of_predictive(kind):
    model, x, *targets = case(kind)
    guide = approximate(model, (x, *targets))
    linear, plain = LinearizedPredictive(model, guide, 5), Predictive(model, guide, 5)
    first, second = linear(x), plain(x)
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in second.items()}
    assert {k: v.dtype for k, v in first.items()} == {k: v.dtype for k, v in second.items()}
    assert not any(value.requires_grad for value in first.values())
    first, second = linear.mean(x), plain.mean(x)
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in second.items()}
    first, second = linear.log_likelihood(x, *targets), plain.log_likelihood(x, *targets)
    assert {k: v.shape for k, v in first.items()} == {k: v.shape for k, v in second.items()}
    density = linear.log_density(x, *targets)
    assert {k: v.shape for k, v in density.items()} == {k: v.shape[1:] for k, v in second.items()}
    assert all(torch.isfinite(value).all() for value in density.values())


def test_draws_at_a_tiny_covariance_are_the_program_itself():
    """With C = 0 every draw is the network at its MAP; a Poisson's f is the log of its rate."""
    model, x, y = case("poisson")
    guide = approximate(model, (x, y))
    guide.precision.factor *= 1e9
    predictive = LinearizedPredictive(model, guide, 3)
    program = Program(model, x, y)
    run = program.run(program.constrain(guide.loc)[0])
    torch.testing.assert_close(predictive(x)["f"], run.deterministic["f"].expand(3, N))
    torch.testing.assert_close(predictive.mean(x)["y"], run.deterministic["f"].exp().expand(3, N))
    expected = run.observed["y"].distribution.log_prob(y).expand(3, N)
    torch.testing.assert_close(predictive.log_likelihood(x, y)["y"], expected)


def test_deterministic_sites_are_linearized_too():
    model, *args = case("two sites")
    guide = approximate(model, args)
    program = Program(model, *args)
    x = args[0]
    torch.manual_seed(5)
    drawn = LinearizedPredictive(model, guide, 4)(x)["spread"]
    torch.manual_seed(5)
    offsets = guide.precision.sample(4)
    where = program.slices["level"]
    torch.testing.assert_close(drawn, 3 * (guide.loc + offsets)[:, where])


# In parts


@pytest.mark.parametrize(
    "kind, memory",
    [("latent noise", 1000), ("heteroscedastic", 1000), ("categorical", 2500), ("two sites", 1000)],
)
def test_parts_say_the_same_as_all_at_once(kind, memory, monkeypatch):
    model, *args = case(kind)
    guide = approximate(model, args)
    predictive = LinearizedPredictive(model, guide, 3)

    def everything():
        torch.manual_seed(7)
        found = [
            predictive.parameter_moments(*args)["y"].variance,
            predictive.parameter_covariance(*args),
        ]
        found += [predictive.log_density(*args), predictive.mean(*args)]
        found.append(predictive.parameter_moments(*args)["y"].noise_variance)
        found.append(predictive.log_likelihood(*args))
        drawn = predictive(args[0])  # observations are drawn part by part
        found.append({k: v for k, v in drawn.items() if k not in ("y", "z")})
        return found

    whole = everything()
    sizes = []
    inner = Linearization.__init__

    def counting(self, *args, **named):
        inner(self, *args, **named)
        sizes.append(len(self.args[0]))

    monkeypatch.setattr(Linearization, "__init__", counting)
    with working_memory(memory):
        parts = everything()
    assert max(sizes) < N
    torch.testing.assert_close(parts, whole)


def test_pieces_of_large_images_hold_several_rows(monkeypatch):
    """The operations on one row of this network read and make 3 million numbers in all."""
    net = torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3)),
        *(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 10)),
    )
    model = models.Classification(bayesianize(net), num_data=2)
    x, y = torch.randn(9, 1, 100, 100), torch.zeros(9, dtype=torch.long)
    posterior = AutoLaplaceGGN(model, structure="diag").laplace_approximation((x[:2], y[:2]))
    predictive = LinearizedPredictive(model, posterior)
    predictive.probabilities(x[:2])  # says how much a row takes
    sizes, inner = [], Linearization.__init__

    def counting(self, *args, **named):
        inner(self, *args, **named)
        sizes.append(len(self.args[0]))

    monkeypatch.setattr(Linearization, "__init__", counting)
    predictive.probabilities(x)
    assert sizes == [8, 1]


def test_a_site_that_is_the_same_for_all_rows_is_no_part_of_them():
    """One number about all data, where the data come row by row."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.deterministic("total", w.sum()[None])
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    x, y = torch.randn(6, 2), torch.randn(6)
    posterior = AutoLaplaceGGN(model, structure="full").laplace_approximation((x, y))
    predictive = LinearizedPredictive(model, posterior, 4, seed=0)
    with working_memory(10):
        moments = predictive.parameter_moments(x, sites=["total", "y"])
        drawn, latents = predictive(x)["total"], predictive.latents()["w"]
    covariance = torch.linalg.inv(x.T @ x + torch.eye(2))
    torch.testing.assert_close(moments["total"].variance, covariance.sum()[None])
    torch.testing.assert_close(moments["y"].variance["loc"], (x @ covariance * x).sum(1))
    torch.testing.assert_close(drawn, latents.sum(1, keepdim=True))


def test_draws_come_in_chunks():
    model, x, y = case("normal")
    guide = approximate(model, (x, y))
    with working_memory(3 * 8 * guide.subset.size):
        drawn = LinearizedPredictive(model, guide, 7)(x)
        seeded = LinearizedPredictive(model, guide, 7, seed=0)(x)
    assert drawn["f"].shape == drawn["y"].shape == (7, N)
    assert len(drawn["f"][:, 0].unique()) == len(seeded["f"][:, 0].unique()) == 7


# What it leaves alone


# What it refuses


def linear(kind="normal", count=None):
    model, *args = case(kind)
    return LinearizedPredictive(model, approximate(model, args), count)


def of_mixture(point):
    """Of a mixture of twice the same, or with a point mass in it."""
    model, x, y = case("normal")
    guide = approximate(model, (x, y))
    other = AutoMAP(model).prototype(x, y) if point else guide
    return LinearizedPredictive(model, MixtureGuide([guide, other]))


X = torch.randn(N, 3, dtype=torch.float64)


def of_shifted():
    model = observing(1, lambda f: Shifted(f[:, 0], 1.0))
    return LinearizedPredictive(model, approximate(model, (X, X[:, 0].abs() + 0.5)))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (
            lambda: LinearizedPredictive(case("normal")[0], AutoLaplaceGGN(case("normal")[0])),
            TypeError,
            r"laplace_approximation\(data\) .*, got AutoLaplace",
        ),
        (lambda: of_mixture(point=True), TypeError, "got MixtureGuide"),
        (lambda: linear(count=0), ValueError, "num_samples must be at least 1, got 0"),
        (lambda: linear().probabilities(X, method="exact"), ValueError, "method must be one of"),
        (lambda: linear().probabilities(X), ValueError, "is Categorical or Bernoulli"),
        (
            lambda: linear().probabilities(X, method="monte-carlo"),
            ValueError,
            "is Categorical or Bernoulli",
        ),
        (
            lambda: linear("bernoulli").probabilities(X, method="laplace-bridge"),
            ValueError,
            "is for several classes: use .probit. for two",
        ),
        (lambda: linear().log_density(X), ValueError, "'y' has no observation: pass the targets"),
        (lambda: linear().log_likelihood(X), ValueError, "no site is observed: pass the targets"),
        (
            lambda: linear("bernoulli").parameter_moments(X)["y"].predictive_variance,
            ValueError,
            "only a Normal observation has a predictive variance",
        ),
        (
            lambda: linear().parameter_moments(X, sites=["g"]),
            ValueError,
            "'g' is no observed or deterministic .* 'y', 'f'",
        ),
        (
            lambda: of_mixture(point=False).prior_covariance(X),
            ValueError,
            "take the LinearizedPredictive of a member",
        ),
        (
            lambda: of_shifted()(X),
            NotImplementedError,
            "does not know Shifted observations",
        ),
    ],
)
def test_what_it_cannot_do_is_told(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize("kind", ["latent noise", "heteroscedastic", "categorical"])
def test_another_device_says_the_same(kind, device):
    found, start = [], None
    for there in ("cpu", device):
        model, *args = case(kind)
        there = torch.device(there)
        if not has_float64(there):
            torch.set_default_dtype(torch.float32)
        model, *args = (second_device.moved(value, there) for value in (model, *args))
        args = tuple(args)
        guide = AutoLaplaceGGN(model, structure="full").prototype(*args)
        with torch.no_grad():  # the start of a noise scale is drawn
            start = guide.loc.clone() if start is None else start
            guide.loc.copy_(start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BdlWarning)
            predictive = LinearizedPredictive(model, guide.laplace_approximation(args), 3)
        found.append(
            [predictive.parameter_covariance(*args)["y"], predictive.log_density(*args)["y"]]
        )
        drawn = predictive(*args)
        assert all(value.device == args[0].device for value in drawn.values())
    second = [tuple(v.cpu() for v in found[1][0]), found[1][1].cpu()]
    narrow = {} if has_float64(device) else {"rtol": 1e-3, "atol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(second, found[0], **narrow)


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "low_rank"])
def test_predictions_are_differentiable_in_the_inputs(structure):
    """Moments as functions of the inputs have the derivatives that finite differences find, and
    the values that they have without."""
    model, x, y = case("normal")
    laplace = approximate(model, (x, y), structure=structure)
    predictive, inputs = LinearizedPredictive(model, laplace, num_samples=2), torch.randn(2, 3)

    def moments(inputs):
        of_y = predictive.parameter_moments(inputs)["y"]
        joint = predictive.joint_parameter_covariance(inputs)["y"][1]
        alone = predictive.joint_parameter_covariance(inputs, sites=["f"], group=1)["f"][1]
        return of_y.mean["loc"], of_y.variance["loc"], joint, alone

    plain = moments(inputs)
    assert not any(value.requires_grad for value in plain)
    inputs.requires_grad_()
    torch.testing.assert_close([value.detach() for value in moments(inputs)], list(plain))
    assert torch.autograd.gradcheck(moments, (inputs,))
    assert predictive(inputs)["f"].requires_grad
    with torch.no_grad():
        assert not predictive(inputs)["f"].requires_grad


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "low_rank"])
def test_joint_moments_of_groups_are_blocks_of_those_of_all_rows(structure):
    model, x, y = case("normal")
    predictive = LinearizedPredictive(model, approximate(model, (x, y), structure=structure))
    inputs = torch.randn(6, 3)
    mean, joint = predictive.joint_parameter_covariance(inputs, sites=["f"])["f"]
    means, blocks = predictive.joint_parameter_covariance(inputs, sites=["f"], group=3)["f"]
    torch.testing.assert_close(means.flatten(), mean)
    columns = len(mean) // 2
    parts = joint.reshape(2, columns, 2, columns)
    torch.testing.assert_close(blocks, torch.stack([parts[0, :, 0], parts[1, :, 1]]))
    with pytest.raises(ValueError, match="groups of 4"):
        predictive.joint_parameter_covariance(inputs, group=4)


@pytest.mark.parametrize("subset", [None, "last-layer"])
@pytest.mark.parametrize("draws", [3, 20])
def test_draws_are_linear_functions_of_the_weights(structure, subset, draws):
    """f(w*) + J (w_s - w*) with J by autograd, with fewer and with more draws than
    outputs; with gradients in x, which take the Jacobian, too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 7))
    model = models.Classification(bayesianize(net))
    x, y = torch.randn(6, 2, 4), torch.randint(7, (6,))
    guide = AutoLaplaceGGN(model, structure=structure, subset=subset).prototype(x, y)
    with warnings.catch_warnings(action="ignore", category=BdlWarning):
        posterior = guide.laplace_approximation((x, y))
    with seeded(5):
        vectors = posterior.precision.draw(draws).vectors()
    whole = posterior.subset.put(torch.zeros_like(posterior.loc), vectors)
    layout = posterior.require_layout()

    def outputs(vector):
        weights = layout.unflatten(vector)
        return torch.func.functional_call(net, dict(weights), (x,))

    matrix = torch.func.jacrev(outputs)(posterior.loc)
    expected = outputs(posterior.loc) + torch.einsum("nkp,sp->snk", matrix, whole)
    predictive = LinearizedPredictive(model, posterior, num_samples=draws, seed=5)
    found = predictive.mean(x)["y"]
    torch.testing.assert_close(found, expected.softmax(-1), rtol=1e-11, atol=1e-13)
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(predictive.mean(leaf)["y"].detach(), found, rtol=1e-11, atol=1e-13)


def operations(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_few_draws_of_many_classes_cost_passes_for_draws_and_not_for_classes(structure):
    net = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 200))
    model = models.Classification(bayesianize(net))
    x, y = torch.randn(8, 4), torch.randint(200, (8,))
    guide = AutoLaplaceGGN(model, structure=structure, curvature="ggn-mc").prototype(x, y)
    with warnings.catch_warnings(action="ignore", category=BdlWarning):
        posterior = guide.laplace_approximation((x, y))
    predictive = LinearizedPredictive(model, posterior, num_samples=5)
    predictive.mean(x)
    found = operations(lambda: predictive.mean(x))
    own = operations(lambda: posterior.precision.draw(5).vectors())
    assert found - own < 4 * 5 * operations(lambda: net(x))
    with working_memory(300_000):  # row by row; the draws are made once
        assert operations(lambda: predictive.mean(x)) < 1.2 * found
