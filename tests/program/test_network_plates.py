"""Plates of networks against as many programs of one network, and what is refused."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_bdl import LinearizedPredictive, Program, bayesianize, evidence
from pyro_bdl.curvature import LowRank
from pyro_bdl.elbo import TemperedTrace_ELBO, TemperedTraceMeanField_ELBO
from pyro_bdl.errors import BdlWarning, UnsupportedProgramError
from pyro_bdl.guides import AutoLaplaceGGN, AutoMAP, AutoMeanField
from pyro_bdl.nn import each
from pyro_bdl.priors import Horseshoe, Normal, Pooled

G, N = 3, 6
X = torch.linspace(-1, 1, N * G * 2, dtype=torch.float64).cos().reshape(N, G, 2)
Y = torch.linspace(0, 7, N * G, dtype=torch.float64).sin().reshape(N, G)


def _net(*layers):
    pyro.set_rng_seed(0)
    layers = layers or (nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    return nn.Sequential(*layers).double()


def _many(net, prior=None):
    networks = bayesianize(net, prior, plate="groups")

    def model(x, y=None):
        with pyro.plate("groups", x.shape[1]):
            f = pyro.deterministic("f", networks(each(x, dim=1))[..., 0].T)
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    return model


def _one(net, prior=None):
    network = bayesianize(net, prior)

    def model(x, y=None):
        f = pyro.deterministic("f", network(x)[:, 0])
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    return model


# One plate of networks is as many programs


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)),
        (nn.Unflatten(1, (1, 2)), nn.Conv1d(1, 2, 2, padding=1), nn.Flatten(), nn.Linear(6, 1)),
        (nn.LayerNorm(2), nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)),
    ],
    ids=["MLP", "convolution", "norms"],
)
def test_the_log_density_is_the_sum_of_the_networks_own(layers):
    net = _net(*layers)
    many = Program(_many(net), X, Y)
    vector = torch.randn(many.size, dtype=torch.float64)
    latents = many.unflatten(vector)
    assert all(latent.plates == ("groups",) for latent in many.latents.values())
    total = 0.0
    for g in range(G):
        one = Program(_one(net), X[:, g], Y[:, g])
        total += one.log_joint({name: value[g] for name, value in latents.items()})
    torch.testing.assert_close(many.log_density(vector), total)


def test_inputs_are_shared_unless_they_are_each_networks_own():
    net = _net()
    networks, values = bayesianize(net, plate="groups"), {}

    def outputs(*args, **kwargs):
        with pyro.poutine.trace() as tracer, pyro.plate("groups", G):
            result = networks(*args, **kwargs)
        values.update({n: s["value"] for n, s in tracer.trace.nodes.items() if n in networks.sites})
        return result

    def expected(g, x):
        weights = {name: value[g] for name, value in values.items()}
        return torch.func.functional_call(net, weights, (x,))

    square = torch.randn(G, G, 2, dtype=torch.float64)  # both readings fit this shape
    for argument, of in ((square, lambda g: square), (each(square), lambda g: square[g])):
        found = outputs(argument)
        assert found.shape == ((G, G, G, 1) if argument is square else (G, G, 1))
        for g in range(G):
            torch.testing.assert_close(found[g], expected(g, of(g)))
    found = outputs(input=each(square, dim=1))
    torch.testing.assert_close(found[1], expected(1, square[:, 1]))


def test_nested_plates_lie_from_left_to_right_by_their_dims():
    net = _net(nn.Linear(2, 1))
    networks, x = bayesianize(net, plate=("a", "b")), torch.randn(5, 2, 3, 4, 2).double()

    def program(order):
        plates = {"a": pyro.plate("a", 2, dim=-4), "b": pyro.plate("b", 3, dim=-2)}
        with plates[order[0]], plates[order[1]]:
            return networks(each(x, dim=1)), networks.network

    for order in ("ab", "ba"):
        with pyro.poutine.trace() as tracer:
            found, _ = program(order)
        weight, bias = (tracer.trace.nodes[f"0.{n}"]["value"] for n in ("weight", "bias"))
        assert weight.shape == (2, 1, 3, 1, 1, 2) and found.shape == (2, 3, 5, 4, 1)
        expected = torch.einsum("nabmi,aboi->abnmo", x, weight.reshape(2, 3, 1, 2))
        torch.testing.assert_close(found, expected + bias.reshape(2, 3, 1, 1, 1))


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "ekfac", "low_rank"])
@pytest.mark.filterwarnings("ignore:the guide is not at a maximum")
def test_laplace_posteriors_are_those_of_the_networks(structure):
    net = _net()
    options = {"structure": LowRank(30) if structure == "low_rank" else structure}

    def laplace(model, x, y):
        guide = AutoLaplaceGGN(model, **options).prototype(x, y)
        return guide.laplace_approximation((x, y))

    model = _many(net)
    many = laplace(model, X, Y)
    variances = many.layout.unflatten(many.variances())
    moments = LinearizedPredictive(model, many).parameter_moments(X)["y"]
    log_evidence = 0.0
    for g in range(G):
        alone = _one(net)
        one = laplace(alone, X[:, g], Y[:, g])
        for name, expected in one.layout.unflatten(one.variances()).items():
            torch.testing.assert_close(variances[name][g], expected)
        expected = LinearizedPredictive(alone, one).parameter_moments(X[:, g])["y"]
        torch.testing.assert_close(moments.predictive_variance[:, g], expected.predictive_variance)
        log_evidence += evidence.log_marginal_likelihood(one)
    torch.testing.assert_close(evidence.log_marginal_likelihood(many), log_evidence)


# Ties between the networks


@pytest.mark.parametrize(
    ("prior", "hyper"),
    [
        (Normal(dist.HalfNormal(1.0)), {"prior.scale": ()}),
        (
            Horseshoe(),
            {"0.weight.global_scale": (), "0.weight.local_scale": (G, 1, 2),
             "0.bias.global_scale": (), "0.bias.local_scale": (G, 1)},
        ),
    ],
)  # fmt: skip
def test_networks_share_the_hyperparameters_of_their_prior_but_local_ones(prior, hyper):
    program = Program(_many(_net(nn.Linear(2, 1)), prior), X, Y)
    shapes = {name: tuple(latent.shape) for name, latent in program.latents.items()}
    assert shapes == {**hyper, "0.weight": (G, 1, 2), "0.bias": (G, 1)}


def test_pooled_networks_lie_around_a_mean_network():
    prior = Pooled(dist.LogNormal(0.0, 0.5), mean=Normal(2.0))
    program = Program(_many(_net(nn.Linear(2, 1)), prior), X, Y)
    latents, _ = program.constrain(torch.randn(program.size, dtype=torch.float64))
    assert latents["0.weight_mean"].shape == (1, 2) and latents["0.weight"].shape == (G, 1, 2)
    scale = latents["prior.scale"]
    expected = dist.LogNormal(0.0, 0.5).log_prob(scale)
    for name in ("0.weight", "0.bias"):
        mean = latents[f"{name}_mean"]
        expected = expected + dist.Normal(0.0, 2.0).log_prob(mean).sum()
        expected = expected + dist.Normal(mean, scale).log_prob(latents[name]).sum()
    torch.testing.assert_close(program.log_prior(latents), expected)


def test_a_pooled_prior_needs_a_prior_of_its_mean():
    with pytest.raises(ValueError, match=r"mean of '0\.weight' is None"):
        bayesianize(_net(nn.Linear(2, 1)), Pooled(mean=lambda *args: None))
    with pytest.raises(TypeError, match="mean must be"):
        Pooled(mean=dist.Normal(0.0, 1.0))


def test_parameters_without_a_prior_are_shared():
    def prior(name, module, parameter):
        return None if name.startswith("0") else Normal(1.0)(name, module, parameter)

    net = _net()
    networks = bayesianize(net, prior, plate="groups")
    with pyro.poutine.trace() as tracer, pyro.plate("groups", G):
        found = networks(each(X, dim=1))
    hidden = net[1](net[0](X)).transpose(0, 1)
    weight, bias = (tracer.trace.nodes[f"2.{n}"]["value"] for n in ("weight", "bias"))
    torch.testing.assert_close(found, hidden @ weight.mT + bias[:, None])


# Guides, chains and predictions


def _losses(model, guide, elbo, x=X, y=Y, steps=3):
    pyro.set_rng_seed(0)
    guide.prototype(x, y)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), elbo)
    pyro.set_rng_seed(1)
    return [svi.step(x, y) for _ in range(steps)]


def test_map_training_is_that_of_the_networks():
    net = _net()
    model = _many(net)
    guide = AutoMAP(model)
    losses = _losses(model, guide, TemperedTrace_ELBO())
    total = torch.zeros(3)
    for g in range(G):
        alone = _one(net)
        one = AutoMAP(alone)
        total += torch.tensor(_losses(alone, one, TemperedTrace_ELBO(), X[:, g], Y[:, g]))
        for name, value in one.median().items():
            torch.testing.assert_close(guide.median()[name][g], value)
    torch.testing.assert_close(torch.tensor(losses), total)


def test_a_subsampled_plate_trains_the_networks_of_its_indices():
    networks = bayesianize(_net(), plate="groups")

    def model(x, y=None):
        with pyro.plate("groups", G, subsample_size=2) as indices:
            f = networks(each(x[:, indices], dim=1))[..., 0].T
            with pyro.plate("data", len(x)):
                pyro.sample("y", dist.Normal(f, 0.3), obs=y[:, indices])

    def rows(full_size):
        return pyro.plate("groups", full_size, subsample_size=2)

    guide = AutoMeanField(model, create_plates=lambda x, y=None: [rows(G)])
    guide.prototype(X, Y)
    assert guide.layout.latents["0.weight"].shape == (G, 3, 2)
    before = guide.location().clone()
    _losses(model, guide, TemperedTraceMeanField_ELBO(), steps=1)
    moved = guide.layout.unflatten(guide.location() != before)["0.weight"].flatten(1).any(1)
    assert moved.sum() == 2


def test_networks_without_a_batching_rule_are_taken_one_by_one():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 1)

        def forward(self, x):
            return self.out(self.cell(x)[0][:, -1])

    net = Recurrent().double()
    networks = bayesianize(net, plate="groups")
    x = torch.randn(4, 5, 2).double()
    warned = pytest.warns(BdlWarning, match="over the networks of a plate")
    with warned, pyro.poutine.trace() as tracer, pyro.plate("groups", G):
        found = networks(x)
    for g in range(G):
        weights = {n: tracer.trace.nodes[n]["value"][g] for n in networks.sites}
        torch.testing.assert_close(found[g], torch.func.functional_call(net, weights, (x,)))


# Refusals


def _in_data(networks):
    with pyro.plate("groups", G), pyro.plate("data", N):
        networks(X[:, 0])


def _in_loop(networks):
    for _ in pyro.plate("groups", G):
        networks(X[:, 0])


def _inside(argument):
    def call(networks):
        with pyro.plate("groups", G):
            return networks(argument)

    return call


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda networks: networks(X[:, 0]), "'net.0.weight'.*plate 'groups'.*inside 'with pyro"),
        (_in_data, "'net.0.weight'.*plate 'data'.*every datum.*plate='data'"),
        (_in_loop, "'groups' of networks is a loop.*context manager"),
        (_inside(each(X)), r"dim=0.*\(3\).*\(6, 3, 2\)"),
        (_inside(each([1.0])), "float"),
    ],
)
def test_what_is_refused(call, words):
    networks = bayesianize(_net(), plate="groups", name="net")
    with pytest.raises((UnsupportedProgramError, ValueError), match=words):
        call(networks)


def test_running_statistics_of_several_networks_are_refused():
    networks = bayesianize(_net(nn.Linear(2, 3), nn.BatchNorm1d(3)), plate="groups")
    with pytest.raises(UnsupportedProgramError, match=r"layer '1'.*plate 'groups'.*GroupNorm"):
        _inside(X[:, 0])(networks)
    networks.eval()
    assert _inside(X[:, 0])(networks).shape == (G, N, 3)
