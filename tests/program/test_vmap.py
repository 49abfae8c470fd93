"""Maps over draws: what all draws share is computed once."""

import warnings

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pyro_bdl as bdl
from pyro_bdl.program.vmap import map_draws


def flops(function):
    with FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_total_flops(), result


@pytest.mark.parametrize("shared", [(), ("a",), ("a", "b")])
def test_what_depends_on_shared_latents_alone_is_computed_once(shared):
    x, count = torch.randn(10, 8), 5
    draws = {"a": torch.randn(count, 8, 6), "b": torch.randn(count, 6, 2)}
    draws = {n: v[:1].expand(count, -1, -1) if n in shared else v for n, v in draws.items()}
    cost, found = flops(lambda: map_draws(lambda draw: (x @ draw["a"]).tanh() @ draw["b"], draws))
    expected = torch.stack([(x @ a).tanh() @ b for a, b in zip(*draws.values(), strict=True)])
    torch.testing.assert_close(found, expected)
    first, second = 2 * 10 * 8 * 6, 2 * 10 * 6 * 2
    assert cost == first * (1 if "a" in shared else 5) + second * (1 if "b" in shared else 5)
    found[0] += 1.0  # the results of draws are tensors of their own
    torch.testing.assert_close(found[1], expected[1])


def test_random_numbers_differ_between_draws_that_share_everything():
    draws = {"a": torch.ones(1).expand(4, 1)}
    found = map_draws(lambda draw: draw["a"] + torch.randn(1), draws)
    assert len(found.unique()) == 4


def test_updates_in_place_of_what_is_shared():
    """A skip connection in place, ``h += layer(h)``, holds what all draws share."""
    draws = {"a": torch.randn(1, 4).expand(3, 4), "b": torch.randn(3, 4)}

    def function(draw):
        hidden = draw["a"] * 2.0
        hidden += draw["b"]
        return hidden

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # vmap does it where no latent counts as shared
        found = map_draws(function, draws)
    torch.testing.assert_close(found, draws["a"] * 2.0 + draws["b"])


def network():
    hidden = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh())
    return nn.Sequential(hidden, nn.Linear(50, 1))


POSTERIORS = {
    "last layer": lambda model, data: (
        bdl.guides.AutoLaplaceGGN(model, subset="last-layer")
        .prototype(*data)
        .laplace_approximation(data)
    ),
    "AutoLastLayer": lambda model, data: (
        bdl.guides.AutoLastLayer(model).prototype(*data).laplace_approximation(data)
    ),
    "variational last layer": lambda model, data: bdl.guides.AutoVariationalLastLayer(
        model
    ).prototype(*data),
    "subnetwork": lambda model, data: (
        bdl.guides.AutoSubnetwork(model)
        .prototype(*data)
        .variational(data, select=bdl.selectors.LargestVariance(), size=3)
    ),
    "MAP": lambda model, data: bdl.guides.AutoMAP(model).prototype(*data),
}


@pytest.mark.filterwarnings("ignore::pyro_bdl.errors.BdlWarning")
@pytest.mark.parametrize("name", POSTERIORS)
def test_draws_of_a_posterior_with_sites_at_a_point(name):
    """They have the distribution of the whole vector, and the sites at a point one value."""
    x, y = torch.randn(30, 4), torch.randn(30)
    model = bdl.models.Regression(bdl.bayesianize(network()), noise=dist.HalfNormal(1.0))
    if name == "variational last layer":
        model = bdl.models.Regression(bdl.bayesianize(network()), noise=0.3)
    posterior = POSTERIORS[name](model, (x, y))
    torch.manual_seed(1)
    latents = posterior.sample_latents(6)
    torch.manual_seed(1)
    expected = posterior.require_layout().constrain(posterior.sample_vectors(6))[0]
    assert latents.keys() == expected.keys()
    for site, value in latents.items():
        torch.testing.assert_close(value, expected[site])
    if name not in ("subnetwork", "MAP"):
        varying = {site for site, value in latents.items() if value.stride(0)}
        assert varying == set(posterior.subset.sites)
        assert posterior.numbers_drawn == posterior.subset.size
        one, _ = flops(lambda: bdl.Predictive(model, posterior, 1).mean(x))
        many, _ = flops(lambda: bdl.Predictive(model, posterior, 40).mean(x))
        assert many < 3 * one + 40 * 2 * 30 * 50
