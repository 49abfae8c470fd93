"""The Laplace approximation: exact where the posterior is Gaussian, and what it refuses."""

import copy
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate_laplace import D, at_mode, data
from pyro.infer import Trace_ELBO
from torch import nn

from pyro_bdl import Predictive, bayesianize, handlers, models, priors
from pyro_bdl.curvature import Diagonal, LowRank
from pyro_bdl.curvature.structures import STRUCTURES
from pyro_bdl.elbo import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.guides import AutoEnsemble, AutoLaplaceGGN, AutoLastLayer, AutoSubnetwork
from pyro_bdl.program import Program

# Exact posteriors


@pytest.mark.parametrize("eta", [1.0, 0.1])
def test_full_is_the_posterior_of_a_linear_gaussian(conjugate, eta, covariance):
    """N(u*, (sum_n J_n' F_n J_n + prior precision)^-1) (MacKay 1992; Bishop 2006, equations 3.50
    and 3.51)."""
    model = handlers.temper(conjugate.model, eta)
    for options in (
        {"structure": "full"},
        {"structure": "full", "curvature": "hessian"},
        {"structure": "low_rank"},
    ):
        guide = at_mode(conjugate, model, eta, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error", BdlWarning)
            laplace = guide.laplace_approximation(data(conjugate))
        expected = torch.linalg.inv(conjugate.precision(eta))
        torch.testing.assert_close(covariance(laplace), expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(laplace.variances(), expected.diagonal())
        assert torch.equal(laplace.location(), guide.loc)


def test_diagonal_and_kron_of_a_linear_gaussian(conjugate, covariance):
    """The diagonal, or Kronecker factors, of the exact precision (Ritter, Botev & Barber 2018)."""
    precision = conjugate.precision()
    diagonal = at_mode(conjugate, structure="diag").laplace_approximation(data(conjugate))
    torch.testing.assert_close(diagonal.variances(), 1 / precision.diagonal())
    blocks = precision.clone()
    blocks[:3, 3] = blocks[3, :3] = 0.0
    for structure in ("kron", "ekfac"):
        kron = at_mode(conjugate, structure=structure).laplace_approximation(data(conjugate))
        torch.testing.assert_close(covariance(kron), torch.linalg.inv(blocks))


def test_the_elbo_of_the_exact_posterior_is_the_evidence(conjugate):
    """Every draw gives log p(y), for every bound. log p(y, w) - log q(w) = log p(y) for q(w) = p(w
    | y)."""
    guide = at_mode(conjugate, structure="full").laplace_approximation(data(conjugate))
    design = conjugate.design
    marginal = dist.MultivariateNormal(
        torch.zeros(8, dtype=D),
        design @ design.T * conjugate.prior**2 + conjugate.noise**2 * torch.eye(8, dtype=D),
    )
    expected = -marginal.log_prob(conjugate.y).item()
    for elbo in (Trace_ELBO(), TemperedTrace_ELBO(num_particles=3), TemperedTraceMeanField_ELBO()):
        for _ in range(3):
            loss = elbo.loss(conjugate.model, guide, *data(conjugate))
            assert loss == pytest.approx(expected, rel=1e-10)


def test_the_hessian_is_that_of_the_whole_density(covariance, minimize):
    """With inferred noise and other constrained latents, in the unconstrained vector."""
    torch.manual_seed(0)
    x, y = torch.randn(9, 2, dtype=D), torch.randn(9, dtype=D)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=D), 1.0).to_event(1))
        a = pyro.sample("a", dist.Gamma(torch.tensor(3.0, dtype=D), 2.0))
        s = pyro.sample("s", dist.HalfNormal(torch.tensor(1.0, dtype=D)))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal((x * a) @ w.sin(), s), obs=y)

    guide = AutoLaplaceGGN(model, structure="full", curvature="hessian").prototype(x, y)
    program = Program(model, x, y)
    minimize(guide.parameters(), lambda: Trace_ELBO().differentiable_loss(model, guide, x, y))
    u = guide.loc.detach()
    expected = -torch.autograd.functional.hessian(program.log_density, u)
    laplace = guide.laplace_approximation((x, y))
    torch.testing.assert_close(torch.linalg.inv(covariance(laplace)), expected)


# The guide's own distribution


def classifier(dtype=D, n=30):
    torch.manual_seed(3)
    x = torch.randn(n, 2, dtype=dtype)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    return models.Classification(bayesianize(net)), x, y


def ten_pairs(structure):
    """The structure of a name, "low_rank" with ten eigenpairs."""
    return LowRank(10) if structure == "low_rank" else structure


@pytest.fixture
def trained(minimize):
    """A guide at the maximum."""

    def train(model, x, y, steps=60, **options):
        guide = AutoLaplaceGGN(model, **options).prototype(x, y)
        objective = TemperedTraceMeanField_ELBO()(model, guide)
        minimize(objective.parameters(), lambda: objective(x, y), steps)
        return guide

    return train


@pytest.mark.parametrize("kind", [AutoLaplaceGGN, AutoLastLayer, AutoSubnetwork])
def test_latents_in_subsampled_plates_are_refused(kind):
    def model(y):
        with pyro.plate("data", 6, subsample_size=3) as index:
            z = pyro.sample("z", dist.Normal(torch.zeros((), dtype=D), 1.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y[index])

    y = torch.zeros(6, dtype=D)
    guide = kind(model)
    with pytest.raises(UnsupportedProgramError, match=r"'z' is in a subsampled plate.*all of"):
        guide.laplace_approximation((y,))


def test_update_adds_data(conjugate, structure, covariance):
    x, y = data(conjugate)
    guide = at_mode(conjugate, structure=structure)
    whole = guide.laplace_approximation((x, y))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = guide.laplace_approximation((x[:5], y[:5]))
    before = covariance(part)
    assert part.update((x[5:], y[5:])) is part
    assert (covariance(part) - before).abs().max() > 1e-3
    tolerance = 0.3 if structure == "ekfac" else 1e-10
    torch.testing.assert_close(
        covariance(part), covariance(whole), rtol=tolerance, atol=tolerance / 5
    )
    torch.testing.assert_close(part.log_likelihood, whole.log_likelihood)
    assert part.num_data == 8


def test_changes_for_one_approximation(conjugate):
    guide = at_mode(conjugate)
    assert guide.config.structure.name == "auto"
    laplace = guide.laplace_approximation(data(conjugate), structure="diag", subset="b*")
    assert laplace.config.structure == Diagonal() and laplace.subset.size == 1
    assert guide.config.structure.name == "auto"
    with pytest.raises(ValueError, match="structure must be one of"):
        guide.laplace_approximation(data(conjugate), structure="half")
    with pytest.raises(TypeError, match="color"):
        guide.laplace_approximation(data(conjugate), color=1)
    with pytest.raises(ValueError, match="structure must be one of"):
        AutoLaplaceGGN(conjugate.model, structure="half")


# Subsets


def test_subsets_are_conditionals(conjugate, covariance):
    """The others stay at the mode: the precision is a block of the whole one. Source: Daxberger et
    al. 2021."""
    precision = conjugate.precision()
    for chosen, selection in (
        ([0, 1, 2], "weight"),
        ([3], ["bias"]),
        ([0, 3], torch.tensor([3, 0])),
        ([1, 2], lambda name, latent: False),
        ([0, 1, 2, 3], "last-layer"),
        ([0, 1, 2, 3], torch.arange(4)),
    ):
        if callable(selection):
            selection = torch.tensor([False, True, True, False])
        guide = at_mode(conjugate, structure="full", subset=selection)
        laplace = guide.laplace_approximation(data(conjugate))
        expected = torch.linalg.inv(precision[chosen][:, chosen])
        torch.testing.assert_close(covariance(laplace), expected)
        variances = torch.zeros(4, dtype=D)
        variances[chosen] = expected.diagonal()
        torch.testing.assert_close(laplace.variances(), variances)
        draws = laplace.sample_vectors(5)
        fixed = [i for i in range(4) if i not in chosen]
        assert torch.equal(draws[:, fixed], laplace.loc[fixed].expand(5, -1))
        assert (draws[:, chosen] != laplace.loc[chosen]).all()
        quantiles = laplace.vector_quantiles(torch.tensor([0.0, 0.5, 1.0], dtype=D))
        assert torch.equal(quantiles[:, fixed], laplace.loc[fixed].expand(3, -1))
        torch.testing.assert_close(quantiles[1], laplace.loc)


def test_last_layers(trained, structure):
    model, x, y = classifier()
    guide = trained(model, x, y, structure=structure, subset="last-layer")
    laplace = guide.laplace_approximation((x, y))
    assert set(laplace.subset.sites) == {"2.weight", "2.bias"}
    module = model.network.network[2]
    again = guide.laplace_approximation((x, y), subset=module)
    torch.testing.assert_close(again.variances(), laplace.variances())

    def no_layer(y):
        m = pyro.sample("m", dist.Normal(torch.zeros((), dtype=D), 1.0))
        pyro.sample("y", dist.Normal(m, 1.0), obs=y)

    guide = AutoLaplaceGGN(no_layer, subset="last-layer")
    with pytest.raises(ValueError, match="weight matrix"):
        guide.laplace_approximation((torch.tensor(0.0, dtype=D),))


def test_a_copy_keeps_modules_of_its_subset():
    model, x, y = classifier()
    guide = AutoLaplaceGGN(model, subset=model.network.network[2])
    clone = copy.deepcopy(guide).prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert clone.laplace_approximation((x, y)).subset.sites == ("2.weight", "2.bias")


# Saving, copying, moving


def test_precision_may_change(trained, structure):
    model, x, y = classifier(torch.float32)
    guide = trained(model, x, y, structure=ten_pairs(structure))
    laplace = guide.laplace_approximation((x, y))
    assert laplace.sample_vectors(2).dtype == torch.float32
    expected = laplace.variances()
    laplace.double()
    model.double()
    assert laplace.sample_vectors(2).dtype == laplace.variances().dtype == D
    torch.testing.assert_close(laplace.variances().float(), expected, rtol=1e-3, atol=1e-5)
    laplace.refresh()
    loss = TemperedTrace_ELBO().loss(model, laplace, x.double(), y)
    assert math.isfinite(loss)


# Warnings and errors


def test_away_from_a_maximum(conjugate):
    guide = at_mode(conjugate, structure="full")
    with torch.no_grad():
        guide.loc.add_(3.0)
    advice = r"not at a maximum.*nats.*: train longer.*held_out=\(x, y\)\)"
    with pytest.warns(BdlWarning, match=advice):
        guide.laplace_approximation(data(conjugate))
    with warnings.catch_warnings():
        warnings.simplefilter("error", BdlWarning)  # said once
        guide.laplace_approximation(data(conjugate))
        fresh = at_mode(conjugate, structure="full")
        fresh.loc.data.add_(3.0)
        fresh.laplace_approximation(data(conjugate), held_out=data(conjugate))


def test_an_indefinite_hessian():
    """At a saddle of a mixture-like density."""

    def model(y):
        w = pyro.sample("w", dist.Normal(torch.zeros(2, dtype=D), 2.0).to_event(1))
        pyro.sample("y", dist.Normal(w.prod(), 0.1), obs=y)

    y = torch.tensor(1.0, dtype=D)
    guide = AutoLaplaceGGN(model, structure="full", curvature="hessian").prototype(y)
    with torch.no_grad():
        guide.loc.zero_()
    with pytest.raises(ValueError, match=r"not positive definite \(lowest eigenvalue -"):
        guide.laplace_approximation((y,))
    ggn = guide.laplace_approximation((y,), curvature="ggn")
    torch.testing.assert_close(ggn.variances(), torch.full((2,), 4.0, dtype=D))


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_an_input_that_is_always_zero(structure):
    """Its weights keep the prior's variance."""
    model, x, y = classifier()
    x = torch.cat([x[:, :1], torch.zeros_like(x[:, 1:])], 1)
    laplace = AutoLaplaceGGN(model, structure=structure).laplace_approximation((x, y))
    variances = laplace.layout.unflatten(laplace.variances())["0.weight"]
    torch.testing.assert_close(variances[:, 1], torch.ones(4, dtype=D))
    assert (variances[:, 0] < 1).all()


@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("binary", [False, True])
def test_saturated_outputs(structure, dtype, binary):
    net = nn.Linear(1, 1 if binary else 2, bias=False).to(dtype)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[100.0]] if binary else [[100.0], [-100.0]]))
    kind = models.BinaryClassification if binary else models.Classification
    model = kind(bayesianize(net, priors.Normal(100.0)))
    x = torch.tensor([[1.0], [-1.0], [0.01]], dtype=dtype)
    y = torch.tensor([1, 0, 1]) if binary else torch.tensor([0, 1, 0])
    laplace = AutoLaplaceGGN(model, structure=structure).laplace_approximation((x, y))
    assert torch.isfinite(laplace.sample_vectors(3)).all()
    assert torch.isfinite(laplace.precision.logdet())
    assert (laplace.variances() <= 1e4 * 1.001).all() and (laplace.variances() > 0).all()


def test_its_state_in_a_guide_of_another_kind_says_the_way():
    model, x, y = classifier()
    guide = AutoLaplaceGGN(model, structure="diag").prototype(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = guide.laplace_approximation((x, y)).state_dict()
    fresh = AutoLaplaceGGN(model)
    fresh.load_state_dict(state)  # which waits for the first run
    for call in (lambda: guide.load_state_dict(state), lambda: fresh.prototype(x, y)):
        with pytest.raises(
            RuntimeError, match=r"another kind .* bdl\.load_posterior\(path, model\)"
        ):
            call()


EXACT = [name for name, kind in STRUCTURES.items() if not kind.curvature.is_sampled]


@pytest.mark.parametrize("structure", EXACT)
def test_on_another_device(trained, structure, device):
    model, x, y = classifier(torch.float32)
    model, x, y = model.to(device), x.to(device), y.to(device)
    guide = trained(model, x, y, structure=ten_pairs(structure))
    laplace = guide.laplace_approximation((x, y))
    assert laplace.sample_vectors(3).device.type == device.type
    exact, exact_x, _ = classifier(D)
    reference = AutoLaplaceGGN(exact, structure=ten_pairs(structure)).prototype(exact_x, y.cpu())
    with torch.no_grad():
        reference.loc.copy_(guide.loc)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = reference.laplace_approximation((x.cpu().double(), y.cpu())).variances()
    torch.testing.assert_close(laplace.variances().cpu().double(), expected, rtol=1e-2, atol=1e-3)
    assert {v.device.type for v in laplace.quantiles([0.5]).values()} == {device.type}
    assert Predictive(model, laplace, 3)(x)["y"].device == x.device
    half = guide.laplace_approximation([(x[:20], y[:20])]).update((x[20:], y[20:]))
    if structure != "ekfac":
        torch.testing.assert_close(half.variances(), laplace.variances(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("family", [AutoLaplaceGGN, AutoEnsemble])
def test_a_program_without_arguments_needs_no_data(family):
    """As Pyro's own ``laplace_approximation()``: w ~ N(0, 1), y = 1 ~ N(w, 0.5^2)."""

    def model():
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
        pyro.sample("y", dist.Normal(w, 0.5), obs=torch.tensor(1.0, dtype=torch.float64))

    guide = family(model).prototype()
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.fill_(0.8)
    posterior = guide.laplace_approximation()
    expected = dist.Normal(0.8, 0.2**0.5)
    at, density = torch.ones(1, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    found = posterior.log_density(at, density).item()
    assert found == pytest.approx(expected.log_prob(torch.tensor(1.0)).item(), rel=1e-6)


def test_data_that_a_program_needs_are_asked_for():
    model = models.Regression(bayesianize(nn.Linear(3, 1)), noise=0.3)
    with pytest.raises(TypeError, match="pass x, or its keywords"):
        AutoLaplaceGGN(model).laplace_approximation()
