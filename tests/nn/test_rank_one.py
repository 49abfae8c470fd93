"""Rank-one factors against the dense network, the MAP, a conjugate model and the contract of
programs."""

import copy
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_bdl as bdl
from pyro_bdl.elbo import CompiledELBO
from pyro_bdl.guides import (
    AutoEnsemble,
    AutoLaplaceGGN,
    AutoMAP,
    AutoMeanField,
    MixtureGuide,
)
from pyro_bdl.init import init_afresh
from pyro_bdl.nn import rank_one

X = torch.tensor([[0.2, -1.0], [1.0, 0.5], [-0.3, 0.8], [0.7, 0.1]], dtype=torch.float64)
Y = torch.tensor([[0.3, 1.0], [-0.2, 0.4], [0.9, -0.5], [0.1, 0.2]], dtype=torch.float64)
NOISE, SCALE = 0.5, 0.4


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2, padding=1, padding_mode="reflect"),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.ConvTranspose2d(4, 6, 2, groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(6 * 36, 3),
    ).double()


def dense(units=5):
    return nn.Sequential(nn.Linear(2, units), nn.Tanh(), nn.Linear(units, 2)).double()


def regression(net=None, **options):
    network = rank_one(dense() if net is None else net, **options)
    return bdl.models.Regression(network, noise=NOISE, num_data=len(X))


def factors(network, value=None):
    """Factors at random, or all of one value."""
    shapes = {name: network._shape(name) for name in network.sites}
    if value is None:
        return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: torch.full(shape, value, dtype=torch.float64) for name, shape in shapes.items()}


@pytest.mark.parametrize("make", [dense, convolutional])
def test_output_is_that_of_the_dense_network_with_the_product_as_weight(make):
    net = make()
    x = X if make is dense else torch.randn(3, 2, 5, 5, dtype=torch.float64)
    network = rank_one(net)
    plain = poutine.condition(network, data=factors(network, 1.0))(x)
    torch.testing.assert_close(plain, net(x), rtol=1e-14, atol=1e-14)
    values = factors(network)
    other = copy.deepcopy(net)
    with torch.no_grad():
        for name, layer in other.named_children():
            if f"{name}.r" not in values:
                continue
            r, s, weight = values[f"{name}.r"], values[f"{name}.s"], layer.weight
            for o in range(len(r)):
                for i in range(len(s)):
                    if isinstance(layer, nn.Linear):
                        weight[o, i] *= r[o] * s[i]
                        continue
                    of, within = (i, o) if isinstance(layer, nn.ConvTranspose2d) else (o, i)
                    ins, outs = len(s) // layer.groups, len(r) // layer.groups
                    if i // ins == o // outs:  # of one group
                        size = outs if isinstance(layer, nn.ConvTranspose2d) else ins
                        weight[of, within % size] *= r[o] * s[i]
    got = poutine.condition(network, data=values)(x)
    torch.testing.assert_close(got, other(x), rtol=1e-12, atol=1e-12)


def test_layers_show_the_product_as_their_weight():
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    network = rank_one(attention)  # its output layer, whose weight it reads
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    values = factors(network)
    other = copy.deepcopy(attention)
    with torch.no_grad():
        other.out_proj.weight *= values["out_proj.r"][:, None] * values["out_proj.s"]
    got = poutine.condition(network, data=values)(x, x, x)[0]
    torch.testing.assert_close(got, other(x, x, x)[0])


def test_at_one_the_loss_is_that_of_the_map_of_the_plain_network():
    net, prior = dense(), bdl.priors.FanIn(0.7)
    plain = bdl.models.Regression(bdl.bayesianize(net, prior), noise=NOISE, num_data=len(X))
    elbo = bdl.elbo.TemperedTrace_ELBO()
    expected = elbo.loss(plain, AutoMAP(plain), X, Y)
    model = regression(net, scale=SCALE, prior=prior)
    guide = AutoMAP(model)
    loss = elbo.loss(model, guide, X, Y)
    of_factors = -guide.location().numel() * math.log(SCALE * math.sqrt(2 * math.pi))
    assert loss + of_factors == pytest.approx(expected, abs=1e-10)
    undecayed = regression(net, scale=SCALE, prior=None)
    assert "weights" not in poutine.trace(undecayed).get_trace(X, Y)


@pytest.fixture
def conjugate():
    """y = r o (W x) + noise at s = 1, with W fixed: p(r | y) by hand, its mean and variance."""
    net = nn.Linear(2, 2, bias=False).double()
    network = rank_one(net.requires_grad_(False), SCALE, prior=None)
    model = bdl.models.Regression(network, noise=NOISE, num_data=len(X))
    features = net(X)
    precision = features.square().sum(0) / NOISE**2 + SCALE**-2
    mean = ((features * Y).sum(0) / NOISE**2 + SCALE**-2) / precision
    return poutine.condition(model, data={"s": torch.ones(2).double()}), mean, 1 / precision


def test_laplace_of_a_conjugate_model(conjugate):
    model, mean, variance = conjugate
    guide = AutoLaplaceGGN(model).prototype(X, Y)
    with torch.no_grad():
        guide.loc.copy_(mean)
    posterior = guide.laplace_approximation((X, Y))  # without a warning: it is at the mode
    torch.testing.assert_close(posterior.variances(), variance)


@pytest.mark.slow
def test_nuts_of_a_conjugate_model(conjugate):
    model, mean, variance = conjugate
    samples = bdl.mcmc.sample(
        model, X, Y, num_warmup=200, num_samples=500, num_chains=2, seed=0, progress=False
    )
    distances = (samples.latents["r"].reshape(-1, 2).mean(0) - mean) / variance.sqrt()
    assert distances.abs().max() < 5 / 200**0.5


def test_curvature_of_factors_is_exact_within_each_of_them():
    model = regression()
    matrices = {}
    for structure in ("full", "kron", "diag"):
        torch.manual_seed(0)
        guide = AutoLaplaceGGN(model, structure=structure).prototype(X, Y)
        posterior = guide.laplace_approximation((X, Y))
        rows = torch.eye(posterior.location().numel(), dtype=torch.float64)
        matrices[structure] = torch.stack(
            [posterior.precision.solve(row) for row in rows]
        ).inverse()
    full, slices = matrices["full"], guide.require_layout().slices
    blocks = torch.block_diag(*(full[where, where] for where in slices.values()))
    torch.testing.assert_close(matrices["kron"], blocks)
    torch.testing.assert_close(matrices["diag"], full.diag().diag())


def test_svi_trains_weights_and_factors_together():
    model = regression()
    guide = AutoMeanField(model)
    guide.prototype(X, Y)
    parameters = dict(model.named_parameters())
    before = {name: value.detach().clone() for name, value in parameters.items()}
    loc = guide.loc.detach().clone()
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Trace_ELBO())
    svi.step(X, Y)
    assert parameters and all((value != before[name]).all() for name, value in parameters.items())
    assert (guide.loc != loc).all()


def test_weights_and_factors_reach_the_mode_together():
    """One unit, f = r s w x: the mode of r, s and w by hand, r = s, dlog p = 0."""
    net = nn.Linear(1, 1, bias=False).double()
    torch.nn.init.constant_(net.weight, 0.5)
    x = torch.ones(4, 1, dtype=torch.float64)
    model = regression(net, scale=SCALE, prior=bdl.priors.Normal(2.0))
    guide = AutoMAP(model)
    elbo = CompiledELBO()
    bdl.training.train(model, guide, x, 2.0 * x, steps=800, learning_rate=0.05, elbo=elbo)
    (w,), (r, s) = (model.network.network.base.weight.detach().flatten(), guide.loc.detach())
    slope = 4 / NOISE**2 * (2.0 - r * s * w)  # of log p(y | f) in f
    assert r.item() == pytest.approx(s.item(), abs=1e-4)
    assert (slope * s * w).item() == pytest.approx((r - 1).item() / SCALE**2, abs=5e-3)
    assert (slope * s * r).item() == pytest.approx(w.item() / 2.0**2, abs=5e-3)


def test_draws_share_the_product_with_the_weight():
    class Sizes(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.most = max(self.most, result.numel())
            return result

    net, x = nn.Linear(20, 50).double(), torch.randn(1, 20, dtype=torch.float64)
    model, y = regression(net, prior=None), torch.zeros(1, 50, dtype=torch.float64)
    guide = AutoMeanField(model).prototype(x, y)
    with Sizes() as sizes:
        bdl.elbo.TemperedTrace_ELBO(num_particles=16).loss(model, guide, x, y)
    assert sizes.most < 16 * 20 * 50 / 4  # of all draws together, no weight for each


def test_sets_of_factors_by_an_ensemble_and_by_a_mixture():
    model = regression(scale=SCALE)
    ensemble = AutoEnsemble(model, size=3)
    bdl.training.train(model, ensemble, X, Y, steps=3, elbo=CompiledELBO(num_particles=3))
    assert ensemble.locs.std(0).min() > 0.01
    assert bdl.Predictive(model, ensemble, num_samples=3)(X)["f"].std(0).min() > 1e-4
    parts = [AutoMeanField(model, init_loc_fn=init_afresh).prototype(X, Y) for _ in range(2)]
    mixture = MixtureGuide(parts)
    weight = model.network.network[0].base.weight.detach().clone()
    bdl.training.train(model, mixture, X, Y, steps=3)
    assert (model.network.network[0].base.weight != weight).all()
    assert bdl.Predictive(model, mixture, num_samples=6)(X)["y"].shape == (6, 4, 2)


def test_refusals():
    with pytest.raises(ValueError, match="the network's 0 dense and convolution layers"):
        rank_one(nn.LayerNorm(3))
    with pytest.raises(ValueError, match="with fixed numbers"):
        rank_one(dense(), prior=bdl.priors.Normal(dist.HalfNormal(1.0)))
    with pytest.raises(TypeError, match="one of bayesianize"):
        rank_one(bdl.bayesianize(dense()))
    for network in (rank_one(dense()), nn.Sequential(rank_one(dense())), bdl.bayesianize(dense())):
        with pytest.raises(TypeError, match="has its priors already: pass the plain network"):
            bdl.bayesianize(network)


def test_products_are_weights_of_the_plain_network():
    net = convolutional()
    plain = bdl.bayesianize(net, name="net")
    x = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    network = rank_one(plain.plain(), name="net")
    draws = {f"net.{name}": value[None] for name, value in factors(network).items()}
    weights = {f"net.{name}": value[0] for name, value in network.products(draws).items()}
    assert set(weights) == {f"net.{name}" for name in plain.sites}
    expected = poutine.condition(network, data={name: v[0] for name, v in draws.items()})(x)
    torch.testing.assert_close(poutine.condition(plain, data=weights)(x), expected)
