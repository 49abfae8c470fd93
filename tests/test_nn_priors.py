"""Networks with another prior, and with a prior on a part of the parameters."""

import math

import pyro
import pytest
import torch
from helpers.networks import small_mlp
from helpers.parameters import learned
from pyro.nn import PyroModule
from torch import nn

import pyro_bdl as bdl
from pyro_bdl import bayesianize, models, priors
from pyro_bdl.guides import AutoLaplaceGGN
from pyro_bdl.nn import with_prior
from pyro_bdl.program import record

# Another prior


def _scales(model, *args):
    found = record(model, {}, args).latents
    return {name: site.distribution.base_dist.scale.mean().item() for name, site in found.items()}


def test_with_prior_is_a_copy_with_the_same_values():
    x = torch.randn(4, 2)
    model = models.Regression(
        bayesianize(small_mlp(), priors.Normal(learned(0.7))), noise=learned(0.5)
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = with_prior(model, priors.FanIn(learned(2.0)))
    names = {name.rpartition(".")[2] for name, _ in found.named_parameters()}
    assert names == {"hyper_prior_gain_unconstrained", "noise_unconstrained"}
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    ours, theirs = found.network.network.state_dict(), model.network.network.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    assert _scales(model.network, x)["0.bias"] == pytest.approx(0.7)
    assert _scales(found.network, x)["0.bias"] == pytest.approx(2.0)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter += 1.0
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    pyro.clear_param_store()
    assert _scales(found.network, x)["0.bias"] == pytest.approx(2.0 * math.e)


def test_with_prior_of_a_network_alone_and_of_constants():
    bnn = bayesianize(small_mlp(), priors.Normal(0.7))
    x = torch.randn(4, 2)
    _scales(bnn, x)  # its constant prior is kept
    found = with_prior(bnn, priors.Normal(0.2))
    assert list(_scales(found, x).values()) == pytest.approx([0.2] * 4)
    assert list(_scales(bnn, x).values()) == pytest.approx([0.7] * 4)
    assert found.sites == bnn.sites and type(found) is type(bnn)
    with pytest.raises(ValueError, match=r"gives no distribution for '0.bias'"):
        with_prior(bnn, priors.ByName({"*.weight": priors.Normal(1.0)}))
    with pytest.raises(ValueError, match="holds no network of bayesianize"):
        with_prior(nn.Linear(2, 2), priors.Normal(1.0))


class _Two(PyroModule):
    """Two networks, one of which is held in two places."""

    def __init__(self):
        super().__init__()
        self.first = bayesianize(small_mlp(), priors.Normal(0.5), name="first")
        self.second = bayesianize(small_mlp(), priors.FanIn(2.0), name="second")
        self.again = self.first

    def forward(self, x):
        return self.first(x) + self.second(x)


def test_each_network_learns_from_its_own_prior():
    model, x = _Two(), torch.randn(4, 2)
    found = with_prior(model, priors.learnable)
    assert found.again is found.first and found.first is not model.first
    scales = _scales(found, x)
    assert scales["first.0.bias"] == pytest.approx(0.5)
    assert scales["second.0.bias"] == pytest.approx(2.0)
    names = {name for name, _ in found.named_parameters()}
    assert names == {
        "first.hyper_prior_scale_unconstrained", "second.hyper_prior_gain_unconstrained"
    }  # fmt: skip
    other = with_prior(model, priors.Normal(learned(3.0)))
    assert list(_scales(other, x).values()) == pytest.approx([3.0] * 8)


def test_only_some_weights_learn_their_scale():
    model, x = bayesianize(small_mlp(), priors.FanIn(2.0)), torch.randn(4, 2)
    found = with_prior(
        model, lambda prior: priors.ByName({"2.*": priors.learnable(prior), "*": prior})
    )
    (scale,) = found.parameters()
    before = _scales(found, x)
    assert before == pytest.approx(_scales(model, x))
    with torch.no_grad():
        scale.add_(torch.tensor(3.0).log())  # unconstrained
    for name, value in _scales(found, x).items():
        assert value == pytest.approx(before[name] * (3.0 if name.startswith("2.") else 1.0))


@pytest.mark.parametrize(
    ("training", "grad", "expected"),
    [
        (True, True, True),
        (False, True, False),
        (False, False, True),
    ],
)
def test_recurrent_layers_are_differentiable_in_evaluation_mode(training, grad, expected):
    """cuDNN computes them faster, but has their derivatives in training mode only."""
    seen = []

    class Watched(nn.LSTM):
        def forward(self, x):
            seen.append(torch.backends.cudnn.enabled)
            return super().forward(x)[0]

    bnn = bayesianize(Watched(2, 3)).train(training)
    with torch.set_grad_enabled(grad):
        bnn(torch.randn(4, 2))
    assert seen == [expected] and torch.backends.cudnn.enabled


# A part of the parameters


@pytest.mark.parametrize(
    "where,expected",
    [
        ("2.*", {"2.weight", "2.bias"}),
        (["*.bias", "0.w*"], {"0.weight", "0.bias", "2.bias"}),
        (lambda name: name.endswith("weight"), {"0.weight", "2.weight"}),
    ],
    ids=["pattern", "patterns", "function"],
)
def test_where_chooses_parameters_and_freezes_the_others(where, expected):
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    x, y = torch.randn(4, 2), torch.randn(4)
    bnn = bayesianize(net, where=where)
    assert set(bnn.sites) == expected
    assert all(not parameter.requires_grad for parameter in bnn.parameters())
    assert all(parameter.requires_grad for parameter in net.parameters())
    program = bdl.Program(models.Regression(bnn, noise=0.3), x, y)
    draw = {name: torch.randn_like(value) for name, value in program.initial.items()}
    found = program.run(draw).deterministic["f"]
    torch.testing.assert_close(found, torch.func.functional_call(net, draw, (x,)).squeeze(-1))


def test_where_and_parameters_without_a_prior():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    bnn = bayesianize(net, priors.ByName({"*.weight": priors.Normal(1.0)}), where="1.*")
    assert bnn.sites == ("1.weight",) and bnn.learnable == ("1.bias",)


def test_where_that_chooses_nothing():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with pytest.raises(ValueError, match="none of the network's 4 parameters, such as"):
        bayesianize(net, where="head.*")
    with pytest.raises(TypeError, match="where must be a pattern of names"):
        bayesianize(net, where=0)
    net[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"only frozen parameters, such as '0\.weight'"):
        bayesianize(net, where="0.*")


def test_under_a_g_prior_predictions_do_not_depend_on_units():
    """N(0, s^2 / h) on a linear regression: inputs in other units give the same function."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 3).double(), torch.randn(6).double()
    units = torch.tensor([1.0, 5.0, 0.1]).double()
    found = []
    for inputs in (x, x * units):
        net = nn.Linear(3, 1, bias=False).double()
        model = models.Regression(bayesianize(net, name="net"), noise=0.5)
        guide = AutoLaplaceGGN(model, structure="diag").prototype(inputs, y)
        h = guide.laplace_approximation((inputs, y)).curvature_diagonals()
        torch.testing.assert_close(h["net.weight"], inputs.square().sum(0) / 0.25)
        scaled = priors.GPrior({n.removeprefix("net."): value for n, value in h.items()}, 2.0)
        guide = AutoLaplaceGGN(with_prior(model, scaled), structure="full")
        posterior = guide.prototype(inputs, y).laplace_approximation((inputs, y))
        predictive = bdl.LinearizedPredictive(guide.program_model, posterior)
        found.append(predictive.parameter_moments(inputs, sites=["f"])["f"].variance)
    torch.testing.assert_close(found[0], found[1])


def test_a_g_prior_of_weights_without_curvature_and_of_unknown_ones():
    prior = priors.GPrior({"a": torch.tensor([4.0, 1e-9]), "b": torch.zeros(2)}, 3.0)
    known = prior("a", nn.Identity(), torch.zeros(2)).base_dist.scale
    torch.testing.assert_close(known, 3.0 / torch.tensor([4.0, 4e-6]).sqrt())
    nothing = prior("b", nn.Identity(), torch.zeros(2)).base_dist.scale
    torch.testing.assert_close(nothing, torch.full((2,), 3.0))
    with pytest.raises(ValueError, match="no curvature of parameter 'c'"):
        prior("c", nn.Identity(), torch.zeros(2))
