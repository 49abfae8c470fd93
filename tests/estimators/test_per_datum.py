"""Estimators as contexts and as options of the ELBOs: expectations, what they refuse, restoring."""

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import nn

from pyro_bdl import bayesianize, models, priors
from pyro_bdl.elbo import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.estimators import flipout, local_reparameterization
from pyro_bdl.estimators.per_datum import active
from pyro_bdl.guides import AutoMAP, AutoMeanField

D = torch.float64
CONTEXTS = {"local_reparameterization": local_reparameterization, "flipout": flipout}
estimators = pytest.mark.parametrize("estimator", CONTEXTS)


def seeded(*shape):
    return torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(sum(shape)))


X = seeded(6, 3)
Y = X[:, 0].tanh()


def program_of(function, **shapes):
    """A program with these latents, whose observation has the mean function(x, **latents)."""

    def model(x, y=None):
        values = {
            name: pyro.sample(name, dist.Normal(torch.zeros(shape, dtype=D), 1.0).to_event())
            for name, shape in shapes.items()
        }
        f = function(x, **values)
        with pyro.plate("data", len(x)):
            y = torch.zeros_like(f) if y is None else y
            pyro.sample("y", dist.Normal(f, 0.5).to_event(f.dim() - 1), obs=y)

    return model


class Pooled(nn.Module):
    """A kernel that is used at several positions, whose outputs are summed up before the loss."""

    def __init__(self):
        super().__init__()
        self.kernel, self.norm = nn.Conv1d(1, 2, 2), nn.LayerNorm(2)
        self.last = nn.Linear(2, 1)

    def forward(self, x):
        z = self.kernel(x[:, None]).tanh().sum(-1)
        return self.last(self.norm(z) + z)


@pytest.fixture
def pooled():
    """A network with norm scales, and a noise scale that has a LogNormal in the guide."""
    x = torch.randn(5, 4, dtype=D)
    model = models.Regression(bayesianize(Pooled().double()), noise=dist.HalfNormal(1.0))
    guide = AutoMeanField(model, init_scale=0.3).prototype(x, x[:, 0])
    return model, guide, (x, x[:, 0])


@estimators
@pytest.mark.parametrize("kind", [TemperedTrace_ELBO, TemperedTraceMeanField_ELBO])
def test_the_loss_and_its_gradient_have_the_same_expectation(
    pooled, kind, estimator, steps, one_mean
):
    """Sums over 200 particles at once, so that vmap and the noise of particles are in it."""
    plain = steps(kind(num_particles=200), *pooled, 40)
    other = steps(kind(num_particles=200, estimator=estimator), *pooled, 40)
    assert one_mean(plain, other) and not torch.allclose(plain[0], other[0])


@estimators
def test_particles_have_noise_of_their_own(pooled, estimator, steps):
    """The mean over 20 of them varies a twentieth as much, here within a factor of 2.5."""
    one = steps(TemperedTraceMeanField_ELBO(estimator=estimator), *pooled, 150)[:, 0]
    many = TemperedTraceMeanField_ELBO(num_particles=20, estimator=estimator)
    ratio = steps(many, *pooled, 120)[:, 0].var() / one.var()
    assert 0.02 < ratio < 0.125


@estimators
def test_a_context_is_the_option(pooled, estimator):
    model, guide, data = pooled
    elbo = TemperedTraceMeanField_ELBO(num_particles=2)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), elbo)
    svi.step(*data)  # checks the pair
    torch.manual_seed(1)
    with CONTEXTS[estimator](), poutine.block():
        inside = svi.step(*data)
    torch.manual_seed(1)
    option = TemperedTraceMeanField_ELBO(num_particles=2, estimator=estimator)
    assert inside == option.loss(model, guide, *data)
    torch.manual_seed(1)
    assert inside != svi.step(*data)


# Guides of other kinds


def program(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    v = pyro.sample("v", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(torch.tanh(x @ w.T + b) @ v, 0.5), obs=y)


def hand_written(x, y=None):
    one = torch.ones((), dtype=D)
    w_loc = pyro.param("w_loc", lambda: 0.3 * torch.arange(6, dtype=D).view(2, 3) - 0.5)
    pyro.sample("w", dist.Normal(w_loc, 0.4 * one).to_event(2))
    pyro.sample("b", dist.Normal(torch.zeros(2, dtype=D), 0.3 * one).to_event(1))
    pyro.sample("v", dist.Normal(torch.ones(2, dtype=D), 0.2 * one).to_event(1))


def losses(elbo, guide, count):
    return torch.tensor([elbo.loss(program, guide, X, Y) for _ in range(count)], dtype=D)[:, None]


@estimators
@pytest.mark.parametrize("auto", [AutoNormal, AutoDiagonalNormal, None])
def test_pyros_guides(estimator, auto, one_mean):
    """The same expectation; with the KL in closed form and noise by datum, less variance."""
    guide = hand_written if auto is None else auto(program, init_scale=0.4)
    torch.set_default_dtype(D)
    plain = losses(TemperedTraceMeanField_ELBO(), guide, 100)
    other = losses(TemperedTraceMeanField_ELBO(estimator=estimator), guide, 100)
    assert one_mean(plain, other)
    if auto is None:  # no noise of the KL
        assert other.var() < 0.8 * plain.var()


def _narrow_and_points(model):
    guide = AutoGuideList(model)
    last = ["2.weight", "2.bias"]
    guide.append(AutoNormal(poutine.block(model, hide=last), init_scale=1e-7))
    guide.append(AutoDelta(poutine.block(model, expose=last)))
    return guide


@pytest.mark.parametrize(
    "make", [_narrow_and_points, lambda model: AutoDiagonalNormal(model, init_scale=1e-7)]
)
@estimators
def test_point_masses_stay_points(estimator, make):
    """A guide without noise has none with the estimator either, whatever the priors."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = models.Regression(bayesianize(net, priors.Normal(1.0)), noise=0.5)
    x, y = torch.randn(6, 3, dtype=D), torch.randn(6, 1, dtype=D)
    guide = make(model)
    guide(x, y)
    expected = []
    for each in (None, estimator, estimator):
        elbo = TemperedTrace_ELBO(estimator=each)
        elbo.loss(model, guide, x, y)
        expected.append(elbo.expected_log_likelihood.item())
    assert expected == pytest.approx([expected[0]] * 3, abs=1e-3)


# Which uses of a latent are one

ONE_USE = {
    "parts": lambda x, w: F.linear(x, w[:2]).sum(-1) + F.linear(x, w[2:]).sum(-1),
    "shape": (
        lambda x, w: F.linear(x, w).sum(-1) + torch.zeros_like(w[0]).sum() + w.shape[0] + len(w)
    ),
    "the rest as a draw": lambda x, w: F.linear(x, w[1:]).sum(-1) + w[0].square().sum(),
}


@estimators
@pytest.mark.parametrize("name", ONE_USE)
def test_parts_and_shapes_are_no_second_use(name, estimator, steps, one_mean):
    """Loss and gradient have the expectation of plain sampling."""
    model = program_of(ONE_USE[name], w=(3, 3))
    guide = AutoMeanField(model, init_scale=0.3).prototype(X, Y)
    plain, other = (
        steps(
            TemperedTraceMeanField_ELBO(num_particles=200, estimator=each), model, guide, (X, Y), 20
        )
        for each in (None, estimator)
    )
    assert one_mean(plain, other)


@estimators
def test_latents_outside_of_products_have_one_draw(estimator):
    """In a sum, in a norm, in another latent's multiplier; the second time the same draw."""
    seen = []

    def function(x, w, b, c):
        seen.append(b.sum() - (2 * b).sum() / 2)
        seen.append(c.sum() - c.flip(0).sum())
        return F.linear(x, w) * b + F.layer_norm(x, (3,), c, b)

    model = program_of(function, w=(3, 3), b=(3,), c=(3,))
    elbo = TemperedTraceMeanField_ELBO(estimator=estimator)
    elbo.loss(model, AutoMeanField(model).prototype(X), X)
    assert all(difference.abs() < 1e-12 for difference in seen)


# Refusals

GRAPH = torch.softmax(seeded(6, 6), -1)
TWICE, APART = "latent 'w' is used twice in one run", r"depend on each other.* site 'y'"
NO_LAYER = "found no layer that multiplies data with a latent that has its own distribution"


def linear(x, w):
    return F.linear(x, w)


def laplace(model):
    return lambda *data: pyro.sample("w", dist.Laplace(torch.zeros(1, 3), 1.0).to_event(2))


def wide(model):
    return lambda *data: pyro.sample("w", dist.Normal(torch.ones(1, 3), 0.3).to_event(2))


def positive(x, y=None):
    w = pyro.sample("w", dist.LogNormal(torch.zeros(1, 3), 1.0).to_event(2))
    pyro.sample("y", dist.Normal(F.linear(x, w), 1.0).to_event(2), obs=torch.zeros(len(x), 1))


def subsampling(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
    with pyro.plate("data", len(x), subsample_size=3) as rows:
        pyro.sample("y", dist.Normal(F.linear(x[rows], w)[:, 0], 0.5), obs=x[rows, 0])


def local_latents(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(F.linear(x, w)[:, 0] + z, 0.5), obs=x[:, 0])


# program, guide, message
REFUSED = {
    name: (program_of(function, w=(3, 3)), AutoMeanField, TWICE)
    for name, function in {
        "twice": lambda x, w: F.linear(F.linear(x, w), w),
        "tied": lambda x, w: F.linear(F.embedding(torch.tensor([0, 2]), w).sum(0) + x, w),
        "penalty": lambda x, w: F.linear(x, w).sum(-1) + w.square().sum(),
        "before": lambda x, w: w.sum() * F.linear(x, w),
        "overlapping parts": lambda x, w: F.linear(x, w.chunk(3)[0]) + F.linear(x, w[:1]),
        "a number": lambda x, w: F.linear(x, w) * w[0, 0].item(),
    }.items()
}
REFUSED |= {
    name: (program_of(function, w=(1, 3)), AutoMeanField, rf"{APART}|cannot run on one")
    for name, function in {
        "graph": lambda x, w: GRAPH @ F.linear(x, w)[:, 0],
        "centered by the batch": lambda x, w: F.linear(x - x.mean(0), w)[:, 0],
        "pairs": lambda x, w: torch.tanh(F.linear(x[:, None] - x, w)[..., 0]).sum(0),
    }.items()
}
ONE = program_of(linear, w=(1, 3))
REFUSED |= {
    "Laplace": (ONE, laplace, "needs independent Normals .* has Laplace at site 'w'"),
    "LogNormal": (positive, AutoMeanField, "has LogNormal at site 'w'"),
    "MAP": (ONE, AutoMAP, NO_LAYER),
    "joint": (ONE, AutoMultivariateNormal, "at site '_AutoMultivariateNormal_latent'"),
    "points": (ONE, AutoDelta, NO_LAYER),
    "no layer": (program_of(lambda x, w: (x * w).exp(), w=(3,)), AutoMeanField, NO_LAYER),
    "its own rows": (subsampling, wide, "picks 3 of the 6 rows at random .*estimator=None"),
    "a map of the network's own": (
        program_of(lambda x, w: torch.vmap(lambda row: F.linear(row, w))(x), w=(1, 3)),
        AutoMeanField,
        "calls torch.vmap itself, or use plain sampling",
    ),
    "local latents": (local_latents, AutoMeanField, "'z' has values for 6 rows of the plate"),
}


@estimators
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, estimator):
    """Also inside the context, which leaves nothing behind."""
    torch.set_default_dtype(D)
    model, make, message = REFUSED[name]
    guide = make(model)
    if isinstance(guide, AutoMeanField | AutoMAP):
        guide.prototype(X)
    for elbo in (TemperedTrace_ELBO(), TemperedTraceMeanField_ELBO(estimator=estimator)):
        context = poutine.block() if elbo.estimator else CONTEXTS[estimator]()
        with pytest.raises(UnsupportedProgramError, match=message), context:
            elbo.loss(model, guide, X)
        assert active() is None and not poutine.runtime._PYRO_STACK
        assert not torch.overrides._get_current_function_mode_stack()


@estimators
def test_batch_norm_in_training_mode_is_refused(estimator):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model = models.Regression(bayesianize(net), noise=0.5)
    guide = AutoMeanField(model).prototype(X, Y)
    elbo = TemperedTraceMeanField_ELBO(estimator=estimator)
    with pytest.raises(UnsupportedProgramError, match="BatchNorm layer normalizes by the batch"):
        elbo.loss(model, guide, X, Y)
    model.eval()
    assert elbo.loss(model, guide, X, Y) > 0


@estimators
def test_pyros_elbos_are_refused(estimator, pooled):
    """They would run the program on all rows at once, with one draw."""
    model, guide, data = pooled
    with CONTEXTS[estimator]():
        guide(*data)
        with pytest.raises(UnsupportedProgramError, match=r"use pyro_bdl.elbo.TemperedTrace_ELBO"):
            Trace_ELBO().loss(model, guide, *data)


def test_unknown_estimators_are_refused():
    with pytest.raises(ValueError, match=r"one of None, .*'flipout', .* got 'flip'"):
        TemperedTrace_ELBO(estimator="flip")


# Rows of data

LAYER = nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0, dtype=D).eval()


def encoder(x, **latents):
    names = dict(zip(latents, (name for name, _ in LAYER.named_parameters()), strict=False))
    values = {names[key]: value for key, value in latents.items()}
    return torch.func.functional_call(LAYER, values, (x.transpose(0, 1),)).sum((0, 2))


SQUARE = seeded(6, 6, 2) + 1.0
ALONG_ANY_AXIS = {
    "sequence first, L = N": (
        lambda x, w, v: torch.tanh(F.linear(x.transpose(0, 1), w)).sum(0) @ v,
        SQUARE,
        dict(w=(3, 2), v=3),
    ),
    "transformer layer, sequence first, L = N": (
        encoder,
        seeded(6, 6, 4),
        {name.replace(".", "_"): p.shape for name, p in LAYER.named_parameters()},
    ),
    "look-ups of ids.T": (
        lambda x, w, v: F.embedding(x.T, w).sum(0).square() @ v,
        torch.randint(0, 4, (6, 6), generator=torch.Generator().manual_seed(8)),
        dict(w=(4, 2), v=2),
    ),
    "rows flattened over data and positions": (
        lambda x, w, v: torch.tanh(F.linear(x.reshape(-1, 2), w)).reshape(len(x), -1, 3).sum(1) @ v,
        SQUARE,
        dict(w=(3, 2), v=3),
    ),
}


@estimators
@pytest.mark.parametrize("name", ALONG_ANY_AXIS)
def test_data_along_any_axis_keep_the_expectation(name, estimator, one_mean):
    """The expected log likelihood of plain draws, within five standard errors."""
    function, x, shapes = ALONG_ANY_AXIS[name]
    model, values = program_of(function, **shapes), {None: [], estimator: []}
    guide = AutoMeanField(model, init_scale=0.3).prototype(x, Y)
    for each in values:
        elbo = TemperedTraceMeanField_ELBO(num_particles=300, estimator=each)
        for _ in range(12):
            elbo.loss(model, guide, x, Y)
            values[each].append(elbo.expected_log_likelihood)
    assert one_mean(*(torch.stack(part)[:, None] for part in values.values()))


@estimators
def test_scales_and_statements_without_a_row(estimator):
    """N / B of a plate, a scale by hand, weights of data, and a term that counts once: all give
    the loss of plain draws where the guide is a point."""

    def model(x, weights, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("as many as data", 6):
            pyro.sample("others", dist.Normal(b, 0.1), obs=torch.linspace(0.0, 1.0, 6))
        pyro.sample("measured", dist.Normal(b, 0.1), obs=torch.ones(()))
        pyro.factor("penalty", -b.square())
        f = F.linear(x, w)[:, 0]
        with pyro.plate("data", 60, subsample_size=len(x)), poutine.scale(scale=weights):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)
        with pyro.plate("rows", len(x)), poutine.scale(scale=30 / len(x)):
            pyro.sample("z", dist.Normal(f, 0.5), obs=y)

    torch.set_default_dtype(D)
    data = X, torch.linspace(0.5, 2.0, 6), Y
    guide = AutoMeanField(model, init_scale=1e-9).prototype(*data)
    found = []
    for each in (None, estimator):
        elbo = TemperedTraceMeanField_ELBO(estimator=each)
        elbo.loss(model, guide, *data)
        found.append(elbo.expected_log_likelihood.item())
        elbo.loss(model, guide, *(part[:4] for part in data))  # another number of rows
        found.append(elbo.expected_log_likelihood.item())
    assert found[2:] == pytest.approx(found[:2], rel=1e-6)


@estimators
def test_recurrent_layers_take_the_rows_in_a_loop(estimator):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.last = nn.GRU(1, 2, batch_first=True), nn.Linear(2, 1)

        def forward(self, x):
            return self.last(self.cell(x[..., None])[0][:, -1])

    model = models.Regression(bayesianize(Recurrent().double()), noise=0.5)
    guide = AutoMeanField(model).prototype(X, Y)
    elbo = TemperedTraceMeanField_ELBO(estimator=estimator)
    with pytest.warns(BdlWarning, match="cannot be vectorized over data") as said:
        for _ in range(2):
            elbo.loss(model, guide, X, Y)
    assert len(said) == 1
