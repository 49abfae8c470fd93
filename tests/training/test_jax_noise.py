"""Steps in JAX with random numbers have the law of torch's, and reach the same optima."""

import jax
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from guides.conftest import AS_MAP, one_shift
from helpers.trainings import FAMILIES, check_same_trajectory, data, program, run

import pyro_bdl as bdl

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if f in AS_MAP else ()) for n, f in FAMILIES.items()],
)
def test_losses_have_the_law_of_torchs(name):
    """The mean loss at (almost) fixed parameters, within five standard errors."""
    x, y = torch.randn(3, 2), torch.tensor([0.3, -0.2, 0.9])
    means, variances, first = [], [], None
    for backend in ("torch", "jax"):
        guide = FAMILIES[name](one_shift).prototype(x, y)
        first = guide.loc.detach().clone() if first is None else first
        with torch.no_grad():
            guide.loc.copy_(first)
        optimizer = torch.optim.SGD(guide.parameters(), lr=1e-300)
        losses = run(backend, one_shift, guide, x, y, steps=100, optimizer=optimizer)[0].losses
        means.append(losses.mean())
        variances.append(losses.var() / len(losses))
    assert abs(means[0] - means[1]) <= 5 * sum(variances).sqrt() + 1e-9 * means[0].abs()


class Counted(bdl.guides.GaussianNoise):
    """Factors without random numbers that depend on the number of the step."""

    def rsample(self, p, num_samples, scheduled):
        return (1.0 + 0.001 * scheduled * p).expand(num_samples, len(p))


def test_learned_rates_follow_their_schedule_over_stretches():
    def made():
        model = program()
        guide = bdl.guides.AutoMCDropout(model, sites="all", learn_p=True, noise=Counted())
        return model, guide, {}

    ours, theirs = check_same_trajectory(made, data(), steps=520, batch_size=16, rtol=1e-6)
    assert len(ours.losses) == len(theirs.losses) == 520


def conjugate():
    """A linear model with its exact posterior mean and the precision's diagonal."""
    x = torch.stack([torch.ones(30), torch.linspace(-1, 1, 30)], -1)
    y = x @ torch.tensor([0.5, -1.0]) + 0.1 * torch.cos(50 * x[:, 1])
    precision = torch.eye(2) + x.T @ x / 0.25
    return x, y, torch.linalg.solve(precision, x.T @ y / 0.25), precision.diagonal()


def linear(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)


def test_the_optimum_of_a_conjugate_model_is_exact():
    x, y, mean, precision = conjugate()
    guide = bdl.guides.AutoMeanField(linear)
    elbo = bdl.elbo.TemperedTraceMeanField_ELBO(num_particles=16)
    run("jax", linear, guide, x, y, steps=3000, learning_rate=0.03, elbo=elbo)
    torch.testing.assert_close(guide.loc.detach(), mean, rtol=0.02, atol=0.01)
    torch.testing.assert_close(guide.scale.detach() ** -2, precision, rtol=0.05, atol=0.0)


@pytest.mark.parametrize("known", [True, False])
def test_the_update_of_ivon_is_that_of_torch(known):
    """At a warm-up, a fall and gradients that clip, with and without the draw."""
    guide = bdl.guides.AutoMeanField(linear).prototype(*conjugate()[:2])
    ivon = bdl.optim.IVON(guide, lr=0.1, clip=1.5)
    pair = [guide.loc, guide.scale_unconstrained]
    values: list = [p.detach().clone().numpy() for p in pair]
    state = {"step": np.array(0), "momentum": np.zeros(2), "peak": np.array(0.0)}
    torch.manual_seed(0)
    for rate in (0.0, 0.05, 0.1, 0.03):
        gradients, draw = 5.0 * torch.randn(2, 2), torch.randn(2) if known else None
        for parameter, gradient in zip(pair, gradients, strict=True):
            parameter.grad = gradient.clone()
        (group,) = ivon.param_groups
        group["lr"] = rate
        ivon.step(bdl.elbo.Step(torch.tensor(0.0), temperature=0.7, draw=draw))
        with jax.enable_x64(True):
            noise = None if draw is None else draw.numpy()
            options = group, values, list(gradients.numpy()), state, rate, 0.7, noise
            values, state = ivon.jax_update(*options)
    for parameter, value in zip(pair, values, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), value, rtol=1e-10)
    own = ivon.state[guide.loc]
    assert own["step"] == int(state["step"]) and own["peak"] == float(state["peak"])


@pytest.mark.filterwarnings("error:train takes the steps in torch")
def test_ivon_reaches_the_optimum_of_a_conjugate_model():
    x, y, mean, precision = conjugate()
    guide = bdl.guides.AutoMeanField(linear).prototype(x, y)
    elbo = bdl.elbo.TemperedTraceMeanField_ELBO(num_particles=16)
    ivon = bdl.optim.IVON(guide, lr=0.1)
    run("jax", linear, guide, x, y, steps=1000, elbo=elbo, optimizer=ivon)
    torch.testing.assert_close(guide.loc.detach(), mean, rtol=0.02, atol=0.01)
    torch.testing.assert_close(guide.scale.detach() ** -2, precision, rtol=0.05, atol=0.0)
    assert ivon.state[guide.loc]["step"] == 1000
    torch.testing.assert_close(ivon.state[guide.loc]["peak"], 0.1)


def test_rows_that_meet_in_a_later_batch_are_refused_under_noise_of_each_datum():
    def gated(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(1, 1), 1.0).to_event(2))
        inputs = x + (x > 0.99) * x.mean()  # the last row reads the others of its batch
        with pyro.plate("data", 40, subsample=x):
            pyro.sample("y", dist.Normal((inputs @ w)[:, 0], 0.3), obs=y)

    elbo = bdl.elbo.TemperedTraceMeanField_ELBO(estimator="local_reparameterization")
    guide = bdl.guides.AutoMeanField(gated)
    with pytest.raises(bdl.errors.UnsupportedProgramError, match="depend on each other"):
        run("jax", gated, guide, *data(), steps=40, batch_size=10, elbo=elbo)


@pytest.mark.parametrize("estimator", ["local_reparameterization", "flipout"])
def test_noise_of_each_datum_has_the_same_expectation(estimator):
    means = []
    for name in (None, estimator):
        model = program()
        guide = bdl.guides.AutoMeanField(model).prototype(*data())
        optimizer = torch.optim.SGD(guide.parameters(), lr=1e-300)
        elbo = bdl.elbo.TemperedTraceMeanField_ELBO(estimator=name)
        losses = run(
            "jax", model, guide, *data(), steps=600, optimizer=optimizer, elbo=elbo
        )[0].losses  # fmt: skip
        means.append((losses.mean(), losses.var() / len(losses)))
    (plain, error), (rows, own) = means
    assert abs(plain - rows) <= 5 * (error + own).sqrt()
    assert own < error  # the estimators' purpose


def test_seeds_determine_the_steps():
    def losses(seed):
        model = program()
        guide = bdl.guides.AutoMCDropout(model)
        return run("jax", model, guide, *data(), seed=seed, steps=20)[0].losses

    one, again, other = losses(1), losses(1), losses(2)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert len(one.unique()) == 20
