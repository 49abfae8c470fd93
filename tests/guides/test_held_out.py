"""The width of a Laplace approximation by held-out rows."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate_laplace import D, at_mode, data
from scipy.optimize import minimize_scalar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_bdl import (
    LinearizedPredictive,
    bayesianize,
    evidence,
    load_posterior,
    models,
    priors,
)
from pyro_bdl.curvature.closed_forms import centered_probit
from pyro_bdl.errors import BdlWarning
from pyro_bdl.guides import AutoLaplaceGGN, AutoLastLayer, AutoSubnetwork
from pyro_bdl.guides.held_out import FACTORS

STEP = 10 ** (1 / 16)  # half a step between factors


def classes(separation):
    """Three classes around three corners, and a linear classifier that is sure of itself."""
    torch.manual_seed(1)
    y = torch.arange(90) % 3
    x = separation * nn.functional.one_hot(y, 3).to(D) + torch.randn(90, 3, dtype=D)
    network = nn.Linear(3, 3, dtype=D)
    with torch.no_grad():
        network.weight.copy_(4.0 * torch.eye(3))
        network.bias.zero_()
    return network, (x[:60], y[:60]), (x[60:], y[60:])


def program(network):
    return models.Classification(bayesianize(network, priors.Normal(1.0)), num_data=60)


def test_ends_at_the_network_where_every_width_harms():
    """A saturated classifier without a wrong row: any uncertainty takes density from the truth."""
    network, train, (x, y) = classes(separation=6.0)
    model = program(network)
    guide = AutoLaplaceGGN(model).laplace_approximation(train, held_out=(x, y))
    found = guide.held_out
    assert not found.helps and found.gain <= 0.0 and found.rows == 30
    logits, covariance = LinearizedPredictive(model, guide).parameter_covariance(x)["y"]
    before = network(x).log_softmax(-1).gather(1, y[:, None])

    def changes(factor):
        return (
            centered_probit(logits, factor * covariance / guide.width).log().gather(1, y[:, None])
            - before
        )

    assert all(changes(factor).mean() < 0 for factor in FACTORS[40:])
    assert guide.width == max(f for f in FACTORS if changes(f).abs().mean() <= 1e-4) < 1.0
    probabilities = LinearizedPredictive(model, guide).probabilities(x)["y"]
    torch.testing.assert_close(probabilities, network(x).softmax(-1), rtol=0, atol=2e-3)
    words = "on 30 held-out rows the posterior adds nothing beyond its error (less than 0.0001 nats"
    assert words in str(found)
    assert "the network is kept" in repr(guide)


def test_finds_the_best_width_of_a_conjugate_posterior(conjugate):
    """sum_n log N(y_n; x_n'm, t x_n'C x_n + noise^2) has its maximum at this t."""
    torch.manual_seed(3)
    x = 3.0 * torch.randn(400, *conjugate.x.shape[1:], dtype=D)
    guide = at_mode(conjugate, structure="full")
    posterior = guide.laplace_approximation(data(conjugate))
    covariance = posterior.precision.solve(torch.eye(4, dtype=D))
    mean = LinearizedPredictive(conjugate.model, posterior).parameter_moments(x)["y"]
    variance, noise = mean.variance["loc"], mean.noise_variance
    y = mean.mean["loc"] + (5.0 * variance + noise).sqrt() * torch.randn(400, dtype=D)

    def density(log_factor):
        scale = (math.exp(log_factor) * variance + noise).sqrt()
        return float(dist.Normal(mean.mean["loc"], scale).log_prob(y).mean())

    best = minimize_scalar(lambda t: -density(t), bounds=(-3, 4), method="bounded").x
    found = posterior.fit_width((x, y)).held_out
    assert math.exp(best) / STEP <= found.factor <= math.exp(best) * STEP
    network = dist.Normal(mean.mean["loc"], noise.sqrt()).log_prob(y).mean()
    assert found.gain == pytest.approx(density(math.log(found.factor)) - float(network))
    assert found.helps and str(found).startswith("on 400 held-out rows the posterior gains ")
    wide = posterior.precision.solve(torch.eye(4, dtype=D))
    torch.testing.assert_close(wide, found.factor * covariance)
    again = LinearizedPredictive(conjugate.model, posterior).log_density(x, y)["y"].mean()
    assert float(again) == pytest.approx(density(math.log(found.factor)))


def test_what_the_data_determine_does_not_depend_on_the_width():
    """gamma = p - tr(prior x covariance), of the covariance before it was multiplied."""
    network, train, held_out = classes(separation=6.0)
    laplace = AutoLaplaceGGN(program(network), structure="full")
    guide = laplace.laplace_approximation(train, held_out=held_out)
    covariance = guide.precision.solve(torch.eye(guide.subset.size, dtype=D)) / guide.width
    assert guide.width < 1.0
    gamma = guide.subset.size - covariance.trace()  # the prior's precision is 1
    assert guide.effective_parameters().item() == pytest.approx(gamma.item(), rel=1e-6)


def test_batches_and_a_second_search_change_nothing():
    network, train, held_out = classes(separation=1.0)
    guide = AutoLaplaceGGN(program(network))
    posterior = guide.laplace_approximation(train, held_out=held_out)
    assert posterior.held_out.helps
    batches = DataLoader(TensorDataset(*held_out), batch_size=7)
    split = guide.laplace_approximation(train, held_out=batches)
    assert split.held_out.gain == pytest.approx(posterior.held_out.gain)
    assert posterior.fit_width(held_out).width == split.width


def test_a_network_trained_elsewhere_needs_no_training_here():
    """The curvature and the prior at the network's own weights, in evaluation mode."""
    network, train, _ = classes(separation=1.0)
    loader = DataLoader(TensorDataset(*train), batch_size=16)
    guide = AutoLaplaceGGN(program(network), structure="full")
    with pytest.warns(BdlWarning, match="not at a maximum"):
        posterior = guide.laplace_approximation(loader)
    trained = AutoLaplaceGGN(program(network), structure="full").prototype(*train)
    start = nn.utils.parameters_to_vector(network.parameters())
    assert torch.equal(posterior.loc, start) and torch.equal(trained.loc, start)
    with pytest.warns(BdlWarning, match="not at a maximum"):
        expected = trained.laplace_approximation(train).precision
    torch.testing.assert_close(posterior.precision.variances(), expected.variances())
    p = network(train[0]).softmax(-1)
    inputs = torch.cat([train[0], torch.ones(60, 1, dtype=D)], 1)
    fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    exact = torch.einsum("nkl,ni,nj->kilj", fisher, inputs, inputs).reshape(12, 12)
    logdet = torch.linalg.slogdet(exact + torch.eye(12)).logabsdet
    torch.testing.assert_close(posterior.precision.logdet(), logdet)


def test_weight_decay_as_a_prior():
    assert priors.Normal.from_weight_decay(0.01, 400).scale == pytest.approx(0.5)
    with pytest.raises(ValueError, match=r"must be positive, got 0\.0 and 400"):
        priors.Normal.from_weight_decay(0.0, 400)


def test_densities_without_a_closed_form():
    """Counts: the gain over draws against quadrature."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(1, dtype=D), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson((x * w).exp()), obs=y)

    x = torch.full((6,), 1.0, dtype=D)
    guide = AutoLaplaceGGN(model, structure="full").prototype(x, x)
    guide.loc.data.fill_(0.0)
    held_out = x.repeat(8), torch.tensor([0.0, 5, 0, 4, 0, 0], dtype=D).repeat(8)
    posterior = guide.laplace_approximation((x, x), held_out=held_out)
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    rates = (posterior.held_out.factor / 7.0) ** 0.5 * torch.from_numpy(nodes)
    weights = torch.from_numpy(weights / math.sqrt(2 * math.pi))
    densities = dist.Poisson(rates.exp()).log_prob(held_out[1][:, None]).exp() @ weights
    gain = densities.log() - dist.Poisson(torch.ones(48, dtype=D)).log_prob(held_out[1])
    assert posterior.held_out.gain == pytest.approx(float(gain.mean()), abs=0.05)
    assert posterior.held_out.gain > 0.1


def test_files_keep_the_width(tmp_path):
    network, train, held_out = classes(separation=1.0)
    model = program(network)
    posterior = AutoLaplaceGGN(model).laplace_approximation(train, held_out=held_out)
    loaded = load_posterior(posterior.save(tmp_path / "laplace.bdl"), model)
    assert loaded.held_out == posterior.held_out and loaded.width == posterior.width
    torch.testing.assert_close(loaded.variances(), posterior.variances())


def test_newton_steps_have_no_width(conjugate):
    """A last layer moves to its mode by them."""
    posterior = AutoLastLayer(conjugate.model).laplace_approximation(data(conjugate))
    gradient = torch.ones(4, dtype=D)
    step = posterior.newton_step(gradient)
    torch.testing.assert_close(step, torch.linalg.solve(conjugate.precision(), gradient))
    assert posterior.fit_width(data(conjugate)).width != 1.0
    torch.testing.assert_close(posterior.newton_step(gradient), step)


def spoiled(x, y, what, value):
    """Held-out rows with one bad number, in row 3."""
    x, y = x.clone(), y.clone()
    if what == "x":
        x[3, 1] = value
    else:
        y[3] = value
    return x, y


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["x", "y"])
@pytest.mark.parametrize(
    "family", [AutoLaplaceGGN, AutoSubnetwork, AutoLastLayer], ids=lambda family: family.__name__
)
def test_held_out_rows_that_are_not_finite_are_refused(conjugate, family, what, value):
    """By all that take them; a posterior is as before."""
    bad = spoiled(*data(conjugate), what, value)
    guide = family(conjugate.model).prototype(*data(conjugate))
    refused = rf"held_out, batch 0 .*: {what} holds NaN or infinity in rows 3"
    with pytest.raises(ValueError, match=refused):
        guide.laplace_approximation(data(conjugate), held_out=bad)
    posterior = guide.laplace_approximation(data(conjugate), held_out=data(conjugate))
    before = posterior.variances(), posterior.width.clone(), posterior.held_out
    batches = [tuple(part[:2] for part in data(conjugate)), bad]
    with pytest.raises(ValueError, match=rf"held_out, batch 1 .*: {what} holds NaN or infinity"):
        posterior.fit_width(batches)
    assert torch.equal(posterior.variances(), before[0]) and posterior.width == before[1]
    assert posterior.held_out == before[2]


def test_rows_that_are_impossible_under_the_network_are_refused(conjugate):
    posterior = at_mode(conjugate, structure="full").laplace_approximation(data(conjugate))
    variances = posterior.variances()
    with pytest.raises(ValueError, match=r"held_out: rows 3 .* no finite density"):
        posterior.fit_width(spoiled(*data(conjugate), "y", 1e200))
    assert torch.equal(posterior.variances(), variances) and posterior.held_out is None


def test_widths_without_a_finite_density_are_left_out(conjugate):
    """Row 0 has the variance t x'Cx, which overflows from t = 2.5 on: log N(y; m, t x'Cx + noise^2)
    is finite below that only, and the rows choose among those widths."""
    posterior = at_mode(conjugate, structure="full").laplace_approximation(data(conjugate))
    x = conjugate.x.clone()
    spread = torch.linalg.inv(conjugate.precision())[0, 0]
    x[0] = 0.0
    x[0, 0] = (torch.finfo(D).max / 2.5) ** 0.5 / spread.sqrt()
    y = conjugate.net(x)[:, 0].detach() + 3.0
    y[0] = torch.cat([x[0], torch.ones(1, dtype=D)]) @ conjugate.mean()
    with pytest.warns(BdlWarning, match="of 113 factors of the covariance, from .* left out"):
        found = posterior.fit_width((x, y)).held_out
    assert found.factor <= 2.5 and math.isfinite(found.gain)


def test_refusals():
    network, train, (x, y) = classes(separation=1.0)
    guide = AutoLaplaceGGN(program(network))
    with pytest.raises(ValueError, match="held_out needs at least two rows with targets, got 1"):
        guide.laplace_approximation(train, held_out=(x[:1], y[:1]))
    with pytest.raises(ValueError, match="no targets for the site 'y'"):
        guide.laplace_approximation(train, held_out=x)
    posterior = guide.laplace_approximation(train, held_out=(x, y))
    with pytest.raises(ValueError, match="without held_out for the evidence"):
        evidence.log_marginal_likelihood(posterior)
    with pytest.warns(BdlWarning, match="not at a maximum"):
        guide.laplace_approximation(train)
