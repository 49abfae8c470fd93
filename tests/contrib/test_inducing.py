"""Global inducing points: exact on a linear model, and layer by layer against dense Normals."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.conjugate import Conjugate, with_ones
from helpers.guide_programs import X, Y, regression
from pyro.infer import SVI
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import elbo
from pyro_bdl.contrib.inducing.layers import Conditional
from pyro_bdl.errors import UnsupportedProgramError
from pyro_bdl.guides import AutoInducing

DOUBLE = {"dtype": torch.float64}


def _data(rows=12, columns=3, outputs=1):
    torch.manual_seed(1)
    x = torch.randn(rows, columns, **DOUBLE)
    y = x @ torch.randn(columns, outputs, **DOUBLE) + 0.3 * torch.randn(rows, outputs, **DOUBLE)
    return x, y[:, 0] if outputs == 1 else y


def _network(*layers, prior, **options):
    net = nn.Sequential(*layers).double()
    return bdl.models.Regression(bdl.bayesianize(net, prior), noise=0.3, **options)


# The law of one layer


@pytest.mark.parametrize("rows, columns", [(3, 5), (6, 4)])
def test_a_conditional_is_the_posterior_of_its_pseudo_data(rows, columns):
    torch.manual_seed(0)
    a, r = torch.randn(2, rows, columns, **DOUBLE), torch.randn(2, rows, 2, **DOUBLE)
    q, size = Conditional(a, r), 2 * columns * 2
    more = 2 * rows * 2 if rows < columns else 0
    covariance = torch.linalg.inv(torch.eye(columns, **DOUBLE) + a.mT @ a)
    torch.testing.assert_close(q.mean, covariance @ a.mT @ r)

    def draw(noise):
        return q.draw(noise[:size].view(2, columns, 2), noise[size:])

    jacobian = torch.func.jacfwd(draw)(torch.zeros(size + more, **DOUBLE)).flatten(0, 2)
    torch.testing.assert_close(draw(torch.zeros(size + more, **DOUBLE)), q.mean)
    expected = torch.einsum("gij,gh,op->giohjp", covariance, *[torch.eye(2, **DOUBLE)] * 2)
    torch.testing.assert_close(jacobian @ jacobian.T, expected.reshape(size, size))
    normal = dist.MultivariateNormal(q.mean.mT, covariance[:, None])
    prior = dist.MultivariateNormal(
        torch.zeros(columns, **DOUBLE), torch.eye(columns, **DOUBLE)
    ).expand((2, 2))
    b = torch.randn(2, columns, 2, **DOUBLE)
    ratio = normal.log_prob(b.mT).sum() - prior.log_prob(b.mT).sum()
    torch.testing.assert_close(q.log_ratio(b), ratio)
    torch.testing.assert_close(q.kl(), torch.distributions.kl_divergence(normal, prior).sum())


# Whole guides


@pytest.mark.parametrize("columns", [3, 20])
def test_a_linear_model_has_its_exact_posterior_and_evidence(columns):
    """With the data as pseudo-data, from which the guide starts where noise is Normal."""
    x, y = _data(columns=columns)
    model = _network(nn.Linear(columns, 1), prior=bdl.priors.Normal(1.5))
    guide = AutoInducing(model).prototype(x, y)
    exact = Conjugate(with_ones(x), y, 0.3, 1.5)
    for bound in (elbo.TemperedTrace_ELBO(), elbo.TemperedTrace_ELBO(num_particles=3)):
        assert bound.loss(model, guide, x, y) == pytest.approx(-exact.evidence.item(), abs=1e-6)
    torch.testing.assert_close(guide.location(), exact.mean)
    torch.testing.assert_close(guide.variances(), exact.covariance.diagonal(), rtol=0.1, atol=0)


def test_minibatches_count_as_all_data():
    x, y = _data(rows=12)
    model = _network(nn.Linear(3, 1), prior=bdl.priors.Normal(1.5), num_data=12)
    guide = AutoInducing(model, num_inducing=6).prototype(x, y)
    torch.testing.assert_close(
        guide.log_precision.exp(), torch.full((6,), 2 / 0.3**2, **DOUBLE), rtol=1e-6, atol=0
    )
    assert sorted(guide.rows.tolist()) == sorted(set(guide.rows.tolist()))


def _two_layers(**options):
    x, _ = _data()
    torch.manual_seed(2)
    model = _network(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), prior=bdl.priors.Normal(0.8))
    guide = AutoInducing(model, num_inducing=5, **options).prototype(x, _data(outputs=2)[1])
    with torch.no_grad():
        guide.targets.normal_()
        guide.log_precision.normal_()
    return model, guide


def test_the_density_of_a_draw_in_a_network_of_two_layers():
    _, guide = _two_layers()
    draw, total = guide.sample_vectors(1)[0], 0.0
    values = guide.layout.unflatten(draw)
    phi, rows = with_ones(guide.inducing_0), 5
    targets = guide.targets.split([rows * 4, rows * 2])
    for site, v, power in zip("02", targets, guide.log_precision.exp().split(rows), strict=True):
        weight = torch.cat([values[f"{site}.weight"], values[f"{site}.bias"][:, None]], 1)
        prior = torch.eye(phi.shape[1], **DOUBLE) / 0.8**2
        covariance = torch.linalg.inv(phi.T @ (power[:, None] * phi) + prior)
        mean = covariance @ phi.T @ (power[:, None] * v.view(rows, -1))
        total += dist.MultivariateNormal(mean.T, covariance).log_prob(weight).sum()
        phi = with_ones(torch.tanh(phi @ weight.T))
    torch.testing.assert_close(guide.log_density(draw, draw.new_zeros(())), total)


def test_both_estimates_of_the_kl_agree():
    model, guide = _two_layers()
    x, y = _data()[0], _data(outputs=2)[1]
    with torch.no_grad():
        bounds = elbo.TemperedTraceMeanField_ELBO, elbo.TemperedTrace_ELBO
        closed, sampled = (bound(num_particles=4000) for bound in bounds)
        for bound in (closed, sampled):
            bound.loss(model, guide, x, y)
    assert closed.kl.item() == pytest.approx(sampled.kl.item(), abs=0.5)


def test_gradients_are_those_of_finite_differences():
    model, guide = _two_layers()
    x, y = _data()[0], _data(outputs=2)[1]
    program = bdl.program.program.Program(model, x, y)
    noise = torch.randn(1, guide._noise_size, **DOUBLE)
    names = "inducing_0", "targets", "log_precision"

    def bound(*values):
        with guide.at_parameters({**dict(zip(names, values, strict=True)), **others}):
            draw = guide._vectors(noise)[0]
            latents, log_det = program.constrain(draw)
            run = program.run(latents)
            sampled = guide.log_density(draw, log_det)
            return torch.stack([guide.kl(draw, log_det, run), sampled, run.log_likelihood()])

    others = {"loc": guide.loc.detach(), "scale": guide.scale.detach()}
    values = [getattr(guide, name).detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(bound, values, fast_mode=True)


def test_a_convolution_over_a_whole_image_is_a_dense_layer():
    torch.manual_seed(0)
    x, y = torch.randn(6, 2, 2, 3, **DOUBLE), torch.randn(6, 4, **DOUBLE)
    priors = {"prior": bdl.priors.Normal(0.7)}
    guides = [
        AutoInducing(_network(*layers, **priors)).prototype(x, y)
        for layers in (
            (nn.Conv2d(2, 4, (2, 3)), nn.Flatten()),
            (nn.Flatten(), nn.Linear(12, 4)),
            (nn.Conv2d(2, 4, (2, 3), groups=1, padding="valid"), nn.Flatten()),
        )
    ]
    drawn = []
    for guide in guides:
        torch.manual_seed(3)
        drawn.append(guide.sample_vectors(2))
    torch.testing.assert_close(drawn[0], drawn[1])
    torch.testing.assert_close(drawn[0], drawn[2])


def test_a_convolution_has_a_row_for_each_position_and_group():
    x, y = torch.randn(6, 2, 5, **DOUBLE), torch.randn(6, 4, 3, **DOUBLE)
    layers = nn.Conv1d(2, 4, 3, groups=2), nn.Conv1d(4, 4, 1)
    guide = AutoInducing(_network(*layers, prior=bdl.priors.Normal(0.7))).prototype(x, y)
    first, second = guide.layers.values()
    assert (first.rows, first.outputs, first.columns) == (18, 4, 4)
    assert (second.rows, second.outputs, second.columns) == (18, 4, 5)
    draws = guide.sample_vectors(3)
    zero = draws.new_zeros(3)
    with guide.cached_parameters():
        densities = torch.vmap(guide.log_density)(draws, zero)
    one_by_one = [guide.log_density(draw, zero[0]) for draw in draws]
    torch.testing.assert_close(densities, torch.stack(one_by_one))


def by_hand(x, y=None):
    """A program without modules: its weights before their use, transposed, with a scale each."""
    tau = pyro.sample("tau", dist.HalfNormal(x.new_ones(3)).to_event(1))
    w = pyro.sample("w", dist.Normal(x.new_zeros(3, 3), tau[:, None]).to_event(2))
    shift = pyro.sample("shift", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
    v = pyro.sample("v", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
    hidden = torch.tanh(x @ w.t() + shift)
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(hidden @ v, 0.3), obs=y)


def test_weights_of_a_program_by_hand_with_a_scale_for_each_output():
    x, y = _data()
    guide = AutoInducing(by_hand, num_inducing=5).prototype(x, y)
    assert list(guide.layers) == ["w", "v"] and list(guide.rest.latents) == ["tau", "shift"]
    assert not guide.layers["w"].is_shared and guide.layers["v"].is_shared
    draw = guide.sample_vectors(1)[0]
    values, log_det = guide.layout.constrain(draw)
    w, tau, phi = values["w"], values["tau"], guide.inducing_0
    targets, power = guide.targets[:15].view(5, 3), guide.log_precision.exp()[:5, None]
    total = -log_det
    for row in range(3):
        covariance = torch.linalg.inv(
            phi.T @ (power * phi) + torch.eye(3, **DOUBLE) / tau[row] ** 2
        )
        mean = covariance @ phi.T @ (power[:, 0] * targets[:, row])
        total = total + dist.MultivariateNormal(mean, covariance).log_prob(w[row])
    hidden = torch.tanh(phi @ w.T + values["shift"])
    power = guide.log_precision.exp()[5:]
    covariance = torch.linalg.inv(hidden.T @ (power[:, None] * hidden) + torch.eye(3, **DOUBLE))
    mean = covariance @ hidden.T @ (power * guide.targets[15:])
    total = total + dist.MultivariateNormal(mean, covariance).log_prob(values["v"])
    rest = guide.layout.take(draw, ["tau", "shift"])
    total = total + dist.Normal(guide.loc, guide.scale).log_prob(rest).sum()
    torch.testing.assert_close(guide.log_density(draw, log_det), total)


@pytest.mark.parametrize("bound", [elbo.TemperedTrace_ELBO, elbo.CompiledELBO])
def test_a_loop_of_pyro(bound):
    model = regression()
    guide = AutoInducing(model, num_inducing=4)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), bound(num_particles=4))
    losses = [svi.step(X, Y) for _ in range(60)]
    assert sum(losses[-15:]) < sum(losses[:15])


def test_it_is_saved_with_its_inducing_inputs(tmp_path):
    model, guide = _two_layers()
    guide.save(tmp_path / "guide")
    again = bdl.load_posterior(tmp_path / "guide", model)
    torch.testing.assert_close(again.inducing_0, guide.inducing_0)
    torch.testing.assert_close(again.location(), guide.location())


# The start at the data


def _heads(first):
    """Two networks with as many outputs as there are data, of which ``first`` is called first."""

    def model(x, y=None):
        hidden = torch.tanh(x)
        outputs = {}
        for name in sorted(("mean", "spread"), key=lambda name: name != first):
            w = pyro.sample(name, dist.Normal(x.new_zeros(1, 3), 1.0).to_event(2))
            outputs[name] = (hidden @ w.T)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(outputs["mean"], outputs["spread"].exp()), obs=y)

    return model


@pytest.mark.parametrize("first", ["mean", "spread"])
def test_the_layer_that_is_the_location_starts_at_the_data(first):
    x, y = _data()
    guide = AutoInducing(_heads(first)).prototype(x, y)
    targets = dict(zip(guide.layers, guide.targets.view(2, -1), strict=True))
    precisions = dict(zip(guide.layers, guide.log_precision.exp().view(2, -1), strict=True))
    hidden, values = torch.tanh(x), guide.layout.constrain(guide.location())[0]
    torch.testing.assert_close(targets["mean"], y)
    assert precisions["spread"].unique().numel() == 1 < precisions["mean"].unique().numel()
    assert not torch.allclose(targets["spread"], y) and values["mean"].shape == (1, 3)
    assert hidden.shape == (12, 3)


LOCATIONS = {
    "itself": (lambda z: z[:, 0], True),
    "a view": (lambda z: z.reshape(-1), True),
    "scaled": (lambda z: 2.0 * z[:, 0], False),
    "a function": (lambda z: z[:, 0].exp(), False),
}


@pytest.mark.parametrize("case", LOCATIONS)
def test_only_a_location_itself_starts_at_the_data(case):
    location, expected = LOCATIONS[case]

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(1, 3), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(location(x @ w.T), 0.3), obs=y)

    x, y = _data()
    guide = AutoInducing(model).prototype(x, y)
    assert torch.equal(guide.targets, y) == expected


def test_a_convolution_starts_at_the_data_position_by_position():
    """The optimum of the last convolution given its inputs, by least squares."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 2, 5, **DOUBLE), torch.randn(6, 3, 4, **DOUBLE)
    model = _network(nn.Conv1d(2, 3, 2), prior=bdl.priors.Normal(0.7))
    guide = AutoInducing(model).prototype(x, y)
    (layer,) = guide.layers.values()
    rows = x.unfold(2, 2, 1).movedim(1, 2).reshape(-1, 4)
    targets = y.movedim(1, 2).reshape(-1, 3)
    torch.testing.assert_close(guide.targets.view(layer.rows, 3), targets)
    mean = Conjugate(with_ones(rows), targets, 0.3, 0.7).mean.T
    found = guide.layout.unflatten(guide.location())
    torch.testing.assert_close(found["0.weight"].flatten(1), mean[:, :-1])
    torch.testing.assert_close(found["0.bias"], mean[:, -1])


# Several draws at once


@pytest.mark.parametrize("layers", ["dense", "convolutions"])
def test_the_density_of_several_draws_is_that_of_each(layers):
    if layers == "dense":
        model, guide = _two_layers()
        x, y = _data()[0], _data(outputs=2)[1]
    else:
        x, y = torch.randn(6, 2, 5, **DOUBLE), torch.randn(6, 4, 3, **DOUBLE)
        convolutions = nn.Conv1d(2, 4, 3, groups=2), nn.Tanh(), nn.Conv1d(4, 4, 1)
        model = _network(*convolutions, prior=bdl.priors.Normal(0.7))
        guide = AutoInducing(model, num_inducing=4).prototype(x, y)
    draws, log_dets = guide.sample_vectors(4), torch.randn(4, **DOUBLE)
    one_by_one = [guide.log_density(*pair) for pair in zip(draws, log_dets, strict=True)]
    expected = torch.stack(one_by_one)
    torch.testing.assert_close(guide.log_density(draws, log_dets), expected)
    torch.testing.assert_close(
        guide.log_density(draws.view(2, 2, -1), log_dets.view(2, 2)), expected.view(2, 2)
    )
    mixture = bdl.guides.MixtureGuide([guide, guide])
    torch.testing.assert_close(mixture.log_density(draws, log_dets), expected)


# Refusals


def _with_local(x, y=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(1, 3), 1.0).to_event(2))
    with pyro.plate("data", len(x)):
        shift = pyro.sample("shift", dist.Normal(x.new_zeros(()), 1.0))
        pyro.sample("y", dist.Normal((x @ w.T)[:, 0] + shift, 0.3), obs=y)


@pytest.mark.parametrize(
    "model, word",
    [
        (_network(nn.Linear(3, 1), prior=bdl.priors.Laplace(1.0)), "'0.weight'.*Laplace"),
        (_with_local, "'shift'.*each datum"),
    ],
)
def test_what_it_refuses(model, word):
    for _ in range(2):
        with pytest.raises(UnsupportedProgramError, match=word):
            AutoInducing(model).prototype(*_data())


@pytest.mark.parametrize(
    "options", [{"num_inducing": 0}, {"init_precision": -1.0}, {"init_scale": math.inf}]
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        AutoInducing(regression(), **options)
