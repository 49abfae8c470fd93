"""The warning of shared scales, and proposition 3 of Antoran et al. 2022."""

import functools
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from helpers.parameters import learned
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from pyro_bdl import LinearizedPredictive, bayesianize, evidence, models, priors
from pyro_bdl.errors import BdlWarning
from pyro_bdl.evidence import maximize, train
from pyro_bdl.guides import AutoLaplaceGGN

_DRAWS = torch.Generator().manual_seed(1)
X = torch.randn(12, 3, dtype=torch.float64, generator=_DRAWS)
Y = torch.randn(12, 2, dtype=torch.float64, generator=_DRAWS)


def between(norm, *, first=None):
    return nn.Sequential(first or nn.Linear(3, 4), norm, nn.Tanh(), nn.Linear(4, 2))


def fitted(network, prior, noise=0.3):
    """A Laplace guide at the network's own values."""
    model = models.Regression(bayesianize(network, prior), noise=noise)
    guide = AutoLaplaceGGN(model, structure="full").prototype(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        return model, guide, guide.laplace_approximation((X, Y))


def told(function, *args, **options):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", BdlWarning)
        function(*args, **options)
    return [str(each.message) for each in found if "PerNormalizedGroup" in str(each.message)]


NETWORKS = {
    "BatchNorm": lambda: between(nn.BatchNorm1d(4)),
    "LayerNorm": lambda: between(nn.LayerNorm(4)),
    "GroupNorm": lambda: between(nn.GroupNorm(2, 4, eps=1e-10)),
    "RMSNorm": lambda: between(nn.RMSNorm(4)),
    "InstanceNorm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        nn.Conv1d(1, 2, 2),
        nn.InstanceNorm1d(2, eps=1e-10, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(4, 2),
    ),
    "weight_norm": lambda: between(nn.Identity(), first=weight_norm(nn.Linear(3, 4))),
}
GROUPS = {"InstanceNorm": "1", "weight_norm": "0.parametrizations.weight.original1"}


def test_no_run_of_all_rows_asks_which_weights_are_normalized(_double, learn):
    """The peak of memory is that of the hyperparameters' own formula, whatever the data."""
    network, rows = between(nn.LayerNorm(4)), []
    network.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    _, _, laplace = fitted(network, priors.Normal(learn(0.7)))
    rows.clear()
    assert told(maximize, laplace, steps=1, linearized=False)
    assert max(rows) == 2


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_shared_scale_is_said_once(kind, _double, learn):
    network, group = NETWORKS[kind](), GROUPS.get(kind, "0")
    model, guide, laplace = fitted(network, priors.Normal(learn(0.7)))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    (text,) = told(maximize, laplace, steps=1, linearized=False)
    assert (
        text.startswith(f"the weights of '{group}' are normalized, so that their size has")
        and "hyper_prior_scale'" in text
    )
    assert not told(maximize, guide.laplace_approximation((X, Y)), steps=1, linearized=False)
    after = model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in state.items() if "hyper" not in k)
    assert all(module.training for module in model.modules())
    separate = priors.PerNormalizedGroup(priors.Normal(learn(0.7)), network, X)
    assert separate.groups == (group,)
    assert not told(maximize, fitted(network, separate)[2], steps=1, linearized=False)


def test_no_warning_where_nothing_is_arbitrary(_double, learn):
    """Without a normalization, with a scale for each layer, of a layer that is at zero, and where
    no scale is learned."""
    for network, prior in (
        (between(nn.LayerNorm(4)), priors.Normal(0.7)),
        (between(nn.Identity()), priors.Normal(learn(0.7))),
        (between(nn.LayerNorm(4)), priors.PerLayer(priors.Normal(learn(0.7)))),
        (_at_zero(between(nn.Identity())), priors.Normal(learn(0.7))),
    ):
        laplace = fitted(network, prior, learned(0.3))[2]
        assert not told(maximize, laplace, steps=1, linearized=False)


def _at_zero(network):
    for parameter in network[0].parameters():
        nn.init.zeros_(parameter)
    return network


def test_a_program_without_modules_is_warned_of(_double):
    """f(x) = v tanh(normalize(W x)), with the sites written by hand."""

    def model(x, y=None):
        scale = pyro.param("scale", torch.tensor(0.7), constraint=dist.constraints.positive)
        w = pyro.sample("a.w", dist.Normal(torch.zeros(4, 3), scale).to_event(2))
        v = pyro.sample("b.v", dist.Normal(torch.zeros(2, 4), scale).to_event(2))
        hidden = torch.nn.functional.normalize(x @ w.T, dim=-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(hidden @ v.T, 0.3).to_event(1), obs=y)

    guide = AutoLaplaceGGN(model, structure="full", init_loc_fn=pyro.infer.autoguide.init_to_sample)
    guide.prototype(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        laplace = guide.laplace_approximation((X, Y))
    (text,) = told(maximize, laplace, steps=1, linearized=False)
    assert text.startswith("the weights of 'a' are normalized") and "'scale'" in text


def test_training_by_evidence_says_it_once(_double, learn, monkeypatch):
    monkeypatch.setattr(train, "maximize", functools.partial(maximize, steps=1))
    bnn = bayesianize(between(nn.LayerNorm(4)), priors.Normal(learn(0.7)))
    model = models.Regression(bnn, noise=0.3)
    guide = AutoLaplaceGGN(model, structure="diag")
    assert len(told(evidence.train_by_evidence, model, guide, X, Y, steps=2, rounds=2)) == 1


# Proposition 3


class Stream(nn.Module):
    """A residual stream, normalized where it is read: "embed" and "block" can be scaled together,
    and neither of them alone."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.LayerNorm(4, eps=0.0)

    def forward(self, x):
        x = self.embed(x)
        return self.head(self.norm(x + self.block(self.norm(x).tanh())))


def predictive(make, layers, prior, k):
    """Moments and prior scales where the weights of a normalized group are k times as large, at the
    maximum of the evidence."""
    torch.manual_seed(5)
    network = make()
    with torch.no_grad():
        for layer in layers:
            for parameter in network.get_submodule(layer).parameters():
                parameter.mul_(k)
    model, _, laplace = fitted(network, prior(network))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BdlWarning)
        found = maximize(laplace, tolerance=1e-11, steps=300, linearized=False)
    joint = LinearizedPredictive(model, laplace).joint_parameter_covariance(X)["y"]
    scales = {name.rpartition(".")[2]: v for name, v in found.hyperparameters.items()}
    return *joint, scales


PROPOSITION = {
    "one layer": (lambda: between(nn.LayerNorm(4, eps=0.0)), ["0"], "hyper_0_prior_scale"),
    "stream": (Stream, ["embed", "block"], "hyper_embed___block_prior_scale"),
}


@pytest.mark.parametrize("kind", PROPOSITION)
def test_the_size_of_normalized_weights_does_not_matter(kind, _double, learn):
    """Proposition 3: with a precision for each normalized group, which is proportional to 1 / k^2
    at its optimum, the predictive does not depend on k; with one for all it does."""
    make, layers, own = PROPOSITION[kind]

    def separate(network):
        return priors.PerNormalizedGroup(priors.Normal(learn(0.7)), network, X)

    mean, covariance, scales = predictive(make, layers, separate, 1.0)
    again, other, scaled = predictive(make, layers, separate, 3.0)
    exactly = {"rtol": 0.0, "atol": 1e-8}
    torch.testing.assert_close(again, mean, **exactly)
    torch.testing.assert_close(other, covariance, **exactly)
    assert scaled[own] ** -2 == pytest.approx((scales[own] ** -2 / 9.0).item(), rel=1e-6)
    assert scaled["hyper_prior_scale"] == pytest.approx(scales["hyper_prior_scale"].item())
    _, covariance, _ = predictive(make, layers, lambda network: priors.Normal(learn(0.7)), 1.0)
    _, other, _ = predictive(make, layers, lambda network: priors.Normal(learn(0.7)), 3.0)
    assert float((other - covariance).abs().max()) > 1e-2 * float(covariance.max())


def test_a_shared_scale_of_a_stream_is_said(_double, learn):
    torch.manual_seed(5)
    (text,) = told(maximize, fitted(Stream(), priors.Normal(learn(0.7)))[2], steps=1)
    assert text.startswith("the weights of 'embed + block' are normalized")
