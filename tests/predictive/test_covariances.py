"""Deterministic sites in closed form, and covariances of several outputs."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_bdl import LinearizedPredictive, Predictive, bayesianize, models
from pyro_bdl.distributions.moments import observation_covariance, observation_moments
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.guides import AutoLaplaceGGN, AutoMeanField
from pyro_bdl.predictive.observations import total_covariance
from pyro_bdl.program import Program

EXACTLY = {"rtol": 1e-9, "atol": 1e-11}


pytestmark = pytest.mark.usefixtures("double")


A = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64).mul(9.0).sin().reshape(3, 4)


def tomography(network):
    """y = A f(z) + noise, with an image f of 2 x 2 pixels and 3 projections."""
    bnn = bayesianize(network)

    def model(z, y=None):
        image = pyro.deterministic("f", bnn(z).reshape(2, 2))
        pyro.deterministic("total", image.sum())
        pyro.deterministic("constant", torch.ones(3, 2))
        with pyro.plate("projections", 3):
            pyro.sample("y", dist.Normal(A @ image.flatten(), 0.3), obs=y)

    return model


def approximate(model, args, structure="full", shift=0.1):
    guide = AutoLaplaceGGN(model, structure=structure).prototype(*args)
    with torch.no_grad():
        guide.loc += shift * torch.randn(len(guide.loc))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        return guide.laplace_approximation([args])


def slopes(guide, model, args, read):
    """The Jacobian of a function of a run in u, by autograd."""
    program = Program(model, *args)
    return torch.autograd.functional.jacobian(
        lambda u: read(program.run(program.constrain(u)[0])).flatten(), guide.loc
    )


Z, Y = (
    torch.tensor([[0.3, -1.0, 0.7]], dtype=torch.float64),
    torch.tensor([0.5, -0.2, 0.9]).double(),
)


def test_a_linear_image_is_exact():
    """f = W z, w ~ N(0, I): f has the covariance |z|^2 I, and y = A f + noise gives the posterior
    of a Gaussian (Bishop 2006, equation 2.116)."""
    model = tomography(nn.Linear(3, 4, bias=False))
    guide = approximate(model, (Z, Y), shift=0.0)
    prior = Z.square().sum() * torch.eye(4)
    gain = prior @ A.T @ torch.linalg.inv(A @ prior @ A.T + 0.09 * torch.eye(3))
    with torch.no_grad():
        weights = (gain @ Y)[:, None] * Z / Z.square().sum()
        source = AutoLaplaceGGN(model, structure="full").prototype(Z, Y)
        source.loc.copy_(weights.flatten())
    guide = source.laplace_approximation((Z, Y))
    exact = prior - gain @ A @ prior
    predictive = LinearizedPredictive(model, guide)
    found = predictive.parameter_moments(Z, sites=["f"])["f"]
    torch.testing.assert_close(found.mean, (gain @ Y).reshape(2, 2), **EXACTLY)
    torch.testing.assert_close(found.variance, exact.diagonal().reshape(2, 2), **EXACTLY)
    mean, joint = predictive.joint_parameter_covariance(Z, sites=["f"])["f"]
    torch.testing.assert_close(mean, gain @ Y, **EXACTLY)
    torch.testing.assert_close(joint, exact, **EXACTLY)
    _, rows = predictive.parameter_covariance(Z, sites=["f"])["f"]
    torch.testing.assert_close(rows, torch.stack([exact[:2, :2], exact[2:, 2:]]), **EXACTLY)
    mean, joint = predictive.joint_covariance(Z)["y"]
    torch.testing.assert_close(mean, (A @ gain @ Y)[:, None], **EXACTLY)
    total = A @ exact @ A.T + 0.09 * torch.eye(3)
    torch.testing.assert_close(joint[:, 0, :, 0], total, **EXACTLY)


def test_sites_by_brute_force(structure, covariance):
    """J C J' of every structure, for outputs of a network, sums of them, and constants."""
    model = tomography(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 4)))
    if structure in ("kron", "ekfac"):  # outputs of all inputs are in every observation
        with pytest.raises(UnsupportedProgramError, match="one at a time"):
            approximate(model, (Z, Y), structure)
        return
    guide = approximate(model, (Z, Y), structure)
    predictive, inverse = LinearizedPredictive(model, guide), covariance(guide)
    moments = predictive.parameter_moments(Z, sites=["f", "total", "constant"])
    joint = predictive.joint_parameter_covariance(Z, sites=["f", "total", "constant"])
    for name in ("f", "total", "constant"):
        rows = slopes(guide, model, (Z, Y), lambda run, name=name: run.deterministic[name])
        expected = rows @ inverse @ rows.T
        torch.testing.assert_close(joint[name][1], expected, rtol=1e-7, atol=1e-10)
        variance = moments[name].variance.flatten()
        torch.testing.assert_close(variance, expected.diagonal(), rtol=1e-7, atol=1e-10)
        assert moments[name].mean.flatten().equal(joint[name][0])
    assert not moments["constant"].variance.any() and moments["f"].mean.shape == (2, 2)


def several(noise=0.4):
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    return (
        models.Regression(bayesianize(network), noise=noise),
        torch.randn(5, 3),
        torch.randn(5, 2),
    )


def test_several_outputs_by_brute_force(structure, covariance):
    model, x, y = several()
    guide = approximate(model, (x, y), structure)
    rows = slopes(guide, model, (x, y), lambda run: run.deterministic["f"])
    expected = rows @ covariance(guide) @ rows.T + 0.16 * torch.eye(10)
    predictive = LinearizedPredictive(model, guide)
    mean, joint = predictive.joint_covariance(x)["y"]
    torch.testing.assert_close(joint.reshape(10, 10), expected, rtol=1e-7, atol=1e-10)
    again, own = predictive.covariance(x)["y"]
    assert again.equal(mean) and own.shape == (5, 2, 2)
    blocks = expected.reshape(5, 2, 5, 2).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    torch.testing.assert_close(own, blocks, rtol=1e-7, atol=1e-10)
    f = predictive.parameter_covariance(x, sites=["f", "y"])
    torch.testing.assert_close(f["f"], f["y"])


# Of the observations


def test_the_noise_of_one_event():
    """Cov[y] of each distribution against its definition."""
    p = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
    classes = p.diag_embed() - p[:, :, None] * p[:, None, :]
    tril = torch.tensor([[0.5, 0.0], [0.2, 0.3]])
    scatter = (tril @ tril.T).expand(2, 2, 2)
    for distribution, mean, expected in (
        (dist.Categorical(p), p, classes),
        (dist.OneHotCategorical(p), p, classes),
        (dist.Multinomial(4, p), 4 * p, 4 * classes),
        (dist.MultivariateNormal(p[:, :2], scale_tril=tril), p[:, :2], scatter),
        (dist.MultivariateStudentT(torch.tensor(4.0), p[:, :2], tril), p[:, :2], 2.0 * scatter),
        (dist.Poisson(p).to_event(1), p[..., None], p[..., None, None]),
    ):  # fmt: skip
        found = observation_covariance(distribution)
        torch.testing.assert_close(found, (mean, expected))
    concentration = torch.tensor([2.0, 3.0, 5.0])
    found, matrix = observation_covariance(dist.Dirichlet(concentration))
    mean = concentration / 10.0
    exact = (mean.diag() - mean[:, None] * mean) / 11.0
    # 256 draws: the sd of a variance is about v sqrt(2 / 256)
    assert (matrix - exact).abs().max() < 5 * exact.max() * (2 / 256) ** 0.5


def test_moments_without_closed_forms_come_from_one_call():
    """A distribution of a user's that has draws and a density alone."""
    calls = []

    class Triangular(dist.TorchDistribution):
        arg_constraints, support = {}, dist.constraints.positive

        def sample(self, sample_shape=()):
            calls.append(sample_shape)
            return 3.0 * torch.rand(2, *sample_shape, *self.batch_shape).amax(0)

    triangular = Triangular(torch.Size([500]))
    mean, variance = observation_moments(triangular)
    assert len(calls) == 1 and mean.shape == variance.shape == (500,)
    # E = 3 * 2/3, Var = 9 / 18; the mean over 500 x 256 draws
    assert abs(mean.mean() - 2.0) < 5 * (0.5 / 128000) ** 0.5
    assert abs(variance.mean() - 0.5 * 255 / 256) < 5 * (0.5 / 500 * 2 / 256) ** 0.5


def test_the_law_of_total_covariance():
    """Cov[y] = E[Cov[y | w]] + Cov[E[y | w]], with events in a datum that are independent."""
    mean, root = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2, 2)
    noise = root @ root.mT  # 4 draws, 3 data, 2 events of 2 numbers
    found = total_covariance(mean, noise, joint=True)
    flat = mean.reshape(4, 12)
    blocks = [noise.mean(0)[n, t] for n in range(3) for t in range(2)]
    expected = flat.T.cov(correction=0) + torch.block_diag(*blocks)
    torch.testing.assert_close(found.covariance.reshape(12, 12), expected)
    own = total_covariance(mean, noise, joint=False)
    torch.testing.assert_close(own.mean, flat.mean(0).reshape(3, 4))
    for n in range(3):
        part = slice(4 * n, 4 * n + 4)
        torch.testing.assert_close(own.covariance[n], expected[part, part])


def test_classes_of_every_posterior():
    """The total covariance of a class's indicator is diag(m) - m m'."""
    torch.manual_seed(0)
    model = models.Classification(bayesianize(nn.Linear(3, 3)))
    x, y = torch.randn(4, 3), torch.arange(4) % 3
    laplace = approximate(model, (x, y))
    for mean, own in (
        Predictive(model, AutoMeanField(model).prototype(x, y), 50).covariance(x)["y"],
        LinearizedPredictive(model, laplace, 50).covariance(x)["y"],
    ):
        torch.testing.assert_close(own, mean.diag_embed() - mean[:, :, None] * mean[:, None, :])
