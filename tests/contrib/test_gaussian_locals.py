"""Local latents integrated in closed form, against the joint Normal of the observations."""

import jax
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_bdl import Predictive, Program, mcmc
from pyro_bdl.elbo import CompiledELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides import AutoLaplaceGGN, AutoMeanField
from pyro_bdl.handlers import cold, integrate, temper
from pyro_bdl.program import record
from pyro_bdl.tracing.jax.translate import to_jax

N = 7
X = torch.linspace(-2, 3, N, dtype=torch.float64).cos()
Y = torch.linspace(0, 5, N, dtype=torch.float64).sin()
EYE = torch.eye(3).double()


def noisy_inputs(x, y=None, size=N):
    """A line through inputs that are seen with noise: z ~ N(0.5, 2^2), x ~ N(z, 0.4^2),
    y ~ N(slope z + shift, 0.3^2)."""
    slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 1.0))
    shift = pyro.sample("shift", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("data", size, subsample=torch.arange(len(x))):
        z = pyro.sample("z", dist.Normal(x.new_tensor(0.5), 2.0))
        pyro.sample("x", dist.Normal(z, 0.4), obs=x)
        return pyro.sample("y", dist.Normal(slope * z + shift, 0.3), obs=y)


def _joint(slope, shift):
    """The Normal of (x, y) given the line."""
    direction = torch.stack([torch.ones_like(slope), slope])
    noise = torch.diag(torch.tensor([0.4, 0.3]).double() ** 2)
    mean = torch.stack([torch.full_like(slope, 0.5), 0.5 * slope + shift])
    return dist.MultivariateNormal(mean, 4.0 * torch.outer(direction, direction) + noise)


def factors(x):
    """x ~ N(W (z, v) + b, diag s^2) with z ~ N(m, S) in R^2 and a scalar v."""
    w = pyro.sample("w", dist.Normal(x.new_zeros(3, 3), 1.0).to_event(2))
    s = pyro.sample("s", dist.LogNormal(x.new_zeros(3), 0.3).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.MultivariateNormal(x.new_ones(2), EYE[:2, :2] + 0.5))
        v = pyro.sample("v", dist.Normal(x.new_zeros(()), s[0]))
        latent = torch.cat([z, v[..., None]], -1)
        pyro.sample("x", dist.Normal(latent @ w.mT + 1.0, s).to_event(1), obs=x)


# The density


def test_a_line_through_noisy_inputs():
    program = Program(integrate(noisy_inputs, "z"), X, Y)
    assert list(program.latents) == ["slope", "shift"]
    line = {"slope": torch.tensor(0.7).double(), "shift": torch.tensor(-0.2).double()}
    expected = _joint(**line).log_prob(torch.stack([X, Y], -1))
    found = program.log_likelihood(line)
    torch.testing.assert_close(found["x"] + found["y"], expected)


def test_several_local_latents_and_a_vector_of_observations():
    x = torch.linspace(-1, 2, 15, dtype=torch.float64).cos().reshape(5, 3)
    marginal = integrate(factors, "z", "v")
    program = Program(marginal, x)
    latents, _ = program.constrain(torch.randn(program.size, dtype=torch.float64))
    w, s = latents["w"], latents["s"]
    prior = torch.block_diag(EYE[:2, :2] + 0.5, s[:1, None] ** 2)
    mean = w @ torch.tensor([1.0, 1.0, 0.0]).double() + 1.0
    expected = dist.MultivariateNormal(mean, w @ prior @ w.T + torch.diag(s**2))
    torch.testing.assert_close(program.log_likelihood(latents)["x"], expected.log_prob(x))
    gain = prior @ w.T @ torch.linalg.inv(w @ prior @ w.T + torch.diag(s**2))
    posterior = marginal.posterior(latents, x)
    shift = (x - mean) @ gain.T + torch.tensor([1.0, 1.0, 0.0]).double()
    covariance = prior - gain @ w @ prior
    torch.testing.assert_close(posterior["z"].mean, shift[:, :2])
    torch.testing.assert_close(posterior["z"].covariance_matrix[3], covariance[:2, :2])
    torch.testing.assert_close(posterior["v"].mean, shift[:, 2:])


def test_rows_that_are_masked_tell_nothing():
    mask = torch.arange(N) % 2 == 0

    def model(x, y):
        with pyro.plate("data", N):
            z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
            with poutine.mask(mask=mask):
                pyro.sample("x", dist.Normal(z, 0.4), obs=x)
            pyro.sample("y", dist.Normal(2.0 * z, 0.3), obs=y)

    found = Program(integrate(model, "z"), X, Y).log_likelihood({})
    alone = dist.Normal(0.0, (4.0 + 0.09) ** 0.5).log_prob(Y)
    covariance = torch.tensor([[1.16, 2.0], [2.0, 4.09]]).double()
    both = dist.MultivariateNormal(torch.zeros(2).double(), covariance)
    expected = torch.where(mask, both.log_prob(torch.stack([X, Y], -1)), alone)
    torch.testing.assert_close(found["x"] + found["y"], expected)


def test_transforms_and_jax_see_one_density():
    program = Program(integrate(noisy_inputs, "z"), X, Y)
    vectors = torch.randn(3, 2, dtype=torch.float64)
    single = torch.stack([program.log_density(vector) for vector in vectors])
    torch.testing.assert_close(torch.vmap(program.log_density)(vectors), single)
    gradient = torch.func.grad(program.log_density)(vectors[0])
    with jax.enable_x64(True):
        translated = jax.grad(to_jax(program.log_density, vectors[0]))
        slope = np.array(translated(vectors[0].numpy()))
    torch.testing.assert_close(torch.tensor(slope), gradient)


# Methods


def _at_mode(model, *args):
    guide = AutoLaplaceGGN(model, structure="full", curvature="hessian").prototype(*args)
    program = Program(model, *args)
    optimizer = torch.optim.LBFGS([guide.loc], line_search_fn="strong_wolfe", tolerance_grad=1e-10)

    def closure():
        optimizer.zero_grad()
        loss = -program.log_density(guide.loc)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return guide


def test_laplace_over_the_global_latents():
    guide = _at_mode(integrate(noisy_inputs, "z"), X, Y)
    laplace = guide.laplace_approximation((X, Y))

    def density(vector):
        prior = dist.Normal(0.0, 1.0).log_prob(vector).sum()
        return prior + _joint(*vector).log_prob(torch.stack([X, Y], -1)).sum()

    expected = -torch.func.hessian(density)(guide.loc.detach())
    eye = torch.eye(2).double()
    torch.testing.assert_close(laplace.precision.quadratic(eye), expected.diagonal())


def test_sgmcmc_takes_minibatches_once_the_local_latents_are_gone():
    options = {"batch_size": 3, "num_warmup": 5, "num_samples": 5}
    options["kernel"] = mcmc.SGHMC(step_size=1e-3)
    with pytest.raises(UnsupportedProgramError, match=r"'z'.*handlers\.integrate"):
        mcmc.sgmcmc(noisy_inputs, (X, Y), **options)
    samples = mcmc.sgmcmc(integrate(noisy_inputs, "z"), (X, Y), **options)
    assert set(samples.latents) == {"slope", "shift"}


def test_compiled_steps_and_predictions():
    marginal, losses = integrate(noisy_inputs, "z"), []
    for elbo in (TemperedTraceMeanField_ELBO(), CompiledELBO()):
        pyro.set_rng_seed(0)
        guide = AutoMeanField(marginal).prototype(X, Y)
        svi = pyro.infer.SVI(marginal, guide, pyro.optim.Adam({"lr": 0.01}), elbo)
        pyro.set_rng_seed(0)
        losses.append([svi.step(X, Y) for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0])
    line = {"slope": torch.tensor(0.7).double(), "shift": torch.tensor(-0.2).double()}
    with torch.no_grad():
        guide.loc.copy_(torch.stack(list(line.values())))
        guide.scale = torch.full((2,), 1e-6).double()
    found = Predictive(marginal, guide, num_samples=1000)(X)["y"]
    joint = _joint(**line)
    slope = joint.covariance_matrix[0, 1] / joint.covariance_matrix[0, 0]
    mean = joint.mean[1] + slope * (X - joint.mean[0])
    variance = joint.covariance_matrix[1, 1] - slope * joint.covariance_matrix[0, 1]
    assert ((found.mean(0) - mean).abs() < 5 * (variance / 1000) ** 0.5).all()
    assert ((found.var(0) / variance - 1).abs() < 5 * (2 / 1000) ** 0.5).all()


# Refusals


def _local(prior, likelihood, plates=1, factor=False):
    def model(y=Y):
        with pyro.plate("data", N, dim=-1):
            z = pyro.sample("z", prior)
            if factor:
                pyro.factor("f", z)
            if plates == 2:
                with pyro.plate("parts", 2, dim=-2):
                    pyro.sample("y", likelihood(z), obs=torch.stack([y, y]))
            else:
                pyro.sample("y", likelihood(z), obs=y)

    return model


NORMAL = dist.Normal(torch.zeros(()).double(), 1.0)


def _dependent(y=Y):
    with pyro.plate("data", N):
        z = pyro.sample("z", NORMAL)
        v = pyro.sample("v", dist.Normal(z, 1.0))
        pyro.sample("y", dist.Normal(v, 1.0), obs=y)


def _line():
    return noisy_inputs(X, Y)


@pytest.mark.parametrize(
    ("model", "sites", "words"),
    [
        (_local(NORMAL, lambda z: dist.Normal(z.sin(), 0.1)), ["z"], "'y' is not linear.*'z'"),
        (_local(NORMAL, lambda z: dist.Normal(z, z.exp())), ["z"], "'y' is not linear.*noise"),
        (_local(NORMAL, lambda z: dist.Laplace(z, 1.0)), ["z"], "'y' is Laplace.*AutoMeanField"),
        (_local(dist.LogNormal(0.0, 1.0), lambda z: dist.Normal(z, 1.0)), ["z"], "is LogNormal"),
        (_local(NORMAL, lambda z: dist.Normal(z, 1.0), factor=True), ["z"], "factor 'f'"),
        (_local(NORMAL, lambda z: dist.Normal(z, 1.0), plates=2), ["z"], "several plates"),
        (_dependent, ["z", "v"], "'v' depends on another"),
        (temper(_line, 0.5), ["z"], "'x' is raised to a power.*put the handler around the result"),
        (cold(_line, 0.5), ["z"], "'z' is raised to a power"),
        (poutine.scale(_line, scale=torch.ones(N)), ["z"], "'z' is raised to a power"),
        (_line, ["slope"], "'slope' stands in none"),
        (_line, ["w"], "no latent site 'w'"),
        (_line, [], "names of the local latents"),
    ],
)
def test_what_has_no_closed_form_is_named(model, sites, words):
    with pytest.raises((UnsupportedProgramError, ValueError), match=words):
        Program(integrate(model, *sites))


@pytest.mark.parametrize("curve", [torch.tanh, torch.relu, torch.abs])
def test_every_evaluation_is_looked_at(curve):
    """At w = 0 the program is linear in z; elsewhere it is not, and the same object says so, in
    transforms by NaN."""

    def model(y):
        w = pyro.sample("w", dist.Normal(Y.new_zeros(()), 1.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Normal(torch.zeros_like(y), 1.0))
            pyro.sample("y", dist.Normal(curve(w * z), 0.3), obs=y)

    program = integrate(model, "z")

    def likelihood(w):
        return record(program, {"w": w}, (Y,)).log_likelihood()

    expected = dist.Normal(Y.new_zeros(()), 0.3).log_prob(Y).sum()
    torch.testing.assert_close(likelihood(Y.new_zeros(())), expected)
    for w in (1e-3, 2.0):
        with pytest.raises(UnsupportedProgramError, match="'y' is not linear"):
            likelihood(Y.new_tensor(w))
    found = torch.vmap(likelihood)(Y.new_tensor([0.0, 2.0]))
    assert found.isnan().tolist() == [False, True]
