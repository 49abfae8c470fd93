"""The contract of ready guides, those made from others included."""

import copy
import pickle

import pytest
import torch
from helpers.guide_programs import (
    ELBOS,
)


@pytest.fixture(params=ELBOS, ids=lambda elbo: elbo.__name__)
def elbo(request):
    return request.param


# Ready guides, those made from others included


def test_ready_guides_draw_values_of_every_site(guide, linear):
    _, x, y = linear
    shapes = {"w": (1, 2), "s": (), "shift": (3,)}
    values, draws = guide(x, y), guide.sample_latents(6)
    assert {name: value.shape for name, value in values.items()} == shapes
    assert {name: value.shape for name, value in draws.items()} == {
        name: (6, *shape) for name, shape in shapes.items()
    }
    assert (draws["s"] > 0).all() and draws["w"].dtype == torch.float64


def test_ready_guides_have_the_moments_of_their_draws(guide):
    draws, mean, variances = guide.sample_vectors(4000), guide.location(), guide.variances()
    error = (variances / 4000).sqrt()
    assert ((draws.mean(0) - mean).abs() <= 5 * error + 1e-9).all()
    torch.testing.assert_close(draws.var(0), variances, rtol=0.15, atol=1e-9)


def test_ready_guides_have_quantiles_in_order(guide):
    low, middle, high = guide.vector_quantiles(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64))
    assert (low <= middle).all() and (middle <= high).all()
    quantiles, median = guide.quantiles([0.1, 0.5, 0.9]), guide.median()
    for name, value in quantiles.items():
        assert value.shape == (3, *median[name].shape)
        assert (value[0] <= value[1]).all() and (value[1] <= value[2]).all()
    assert (quantiles["s"] > 0).all()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state"])
def test_ready_guides_are_copied(guide, how):
    clone = copy.deepcopy(guide) if how != "pickle" else pickle.loads(pickle.dumps(guide))
    if how == "state":
        state = {name: value.clone() for name, value in guide.state_dict().items()}
        with torch.no_grad():
            for tensor in clone.state_dict().values():
                if tensor.is_floating_point():
                    tensor.mul_(1.1)
        clone.load_state_dict(state)
    torch.testing.assert_close(clone.location(), guide.location())
    torch.testing.assert_close(clone.variances(), guide.variances())
    found = []
    for each in (guide, clone):
        torch.manual_seed(1)
        found.append(each.sample_vectors(3))
    torch.testing.assert_close(*found)
